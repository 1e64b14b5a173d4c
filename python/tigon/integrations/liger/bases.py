"""The four base classes of ``liger_kernel.chunked_loss``, for subclasses that bring a formula of their own.

They work as there, without a compiler: ``forward(cls, ctx, ...)`` computes the loss of detached operands and
their gradients, ``backward(ctx, grad_output)`` returns these. Log-probabilities come from
:func:`tigon.linear_log_prob`, so that no logits are formed; a distillation's formula is one of logits, which
exist for ``chunk_size`` rows at a time.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from tigon.integrations.liger.policies import share_of_tokens
from tigon.integrations.liger.preferences import head_log_prob, logit_sums


class _Base(torch.autograd.Function):
    @staticmethod
    def _differentiate(ctx, operands, loss_of):
        """Loss and results of detached operands; their gradients stay in ctx."""
        with torch.enable_grad():
            leaves = [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in operands]
            loss, results = loss_of(*leaves)
            wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
            trained = list(itertools.compress(leaves, wanted))
            found = iter(torch.autograd.grad(loss, trained) if trained else ())
        ctx.save_for_backward(*(next(found) if want else None for want in wanted))
        return loss.detach(), tuple(result.detach() for result in results)


def _backward(between: int, behind: int = 0):
    """Of operands input, weight, some others, bias and others; the upstream gradient is the loss's."""

    def backward(ctx, grad_output, *args):
        while isinstance(grad_output, (tuple, list)):
            grad_output, *_ = grad_output
        dinput, dweight, dbias = (None if g is None else g * grad_output for g in ctx.saved_tensors)
        return dinput, dweight, *[None] * between, dbias, *[None] * behind

    return staticmethod(backward)


def _formula(name: str):
    def formula(*args, **kwargs):
        raise NotImplementedError(f"{name} must be implemented")

    return staticmethod(formula)


class LigerFusedLinearPreferenceBase(_Base):
    """Pairs of answers, chosen ones first.

    The formula is ``preference_loss_fn``: (loss, results...) of the log-probabilities of chosen and rejected.
    """

    preference_loss_fn = _formula("LigerFusedLinearPreferenceBase.preference_loss_fn")
    backward = _backward(1, 4)

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        alpha=1.0,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=True,
        **loss_kwargs,
    ):
        half, counts = target.shape[0] // 2, target != ignore_index
        length = counts.sum(-1) if average_log_prob else 1

        def sums(hidden, weight, bias):
            return head_log_prob(hidden, weight, target, bias, ignore_index)

        if use_ref_model:
            with torch.no_grad():
                refs = sums(ref_input, ref_weight, ref_bias).sum(-1) / length
            loss_kwargs["ref_chosen_logps"], loss_kwargs["ref_rejected_logps"] = refs.split(half)

        def loss_of(hidden, weight, bias):
            log_prob = sums(hidden, weight, bias)
            chosen, rejected = (log_prob.sum(-1) / length).split(half)
            made = cls.preference_loss_fn(chosen, rejected, target, beta=beta, **loss_kwargs)
            loss, *results = made if isinstance(made, tuple) else (made,)
            nll = torch.zeros_like(loss)
            if compute_nll_loss:
                labels, tokens = target[:half], log_prob[:half]
                if nll_target is not None:
                    labels = nll_target[:half]
                    tokens = head_log_prob(hidden[:half], weight, labels, bias, ignore_index)
                nll = -tokens.sum() / (labels != ignore_index).sum()
            logits = logit_sums(hidden.detach(), weight.detach(), bias)
            means = logits / (half * target.shape[1] * weight.shape[0])
            shared = (chosen, rejected, *(part.sum() for part in means.split(half)), nll)
            return loss + alpha * nll, (*shared, *results)

        return _Base._differentiate(ctx, (_input, weight, bias), loss_of)


class LigerFusedLinearUnpairedPreferenceBase(_Base):
    """Single answers with a preference each.

    The formula is ``preference_loss_fn``: (loss, results...) of the log-probabilities of the answers.
    """

    preference_loss_fn = _formula("LigerFusedLinearUnpairedPreferenceBase.preference_loss_fn")
    backward = _backward(2)

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        preference_labels,
        bias=None,
        chunk_size=1,
        ignore_index=-100,
        compiled=True,
        use_ref_model=False,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        average_log_prob=False,
        **loss_kwargs,
    ):
        counts = target != ignore_index
        length = counts.sum(-1) if average_log_prob else 1
        if use_ref_model:
            with torch.no_grad():
                ref = head_log_prob(ref_input, ref_weight, target, ref_bias, ignore_index).sum(-1)
            loss_kwargs["ref_log_prob_chunk"] = ref / length

        def loss_of(hidden, weight, bias):
            log_prob = head_log_prob(hidden, weight, target, bias, ignore_index).sum(-1) / length
            made = cls.preference_loss_fn(log_prob, preference_labels, target, **loss_kwargs)
            loss, *results = made if isinstance(made, tuple) else (made,)
            logits = logit_sums(hidden.detach(), weight.detach(), bias)
            sums = (
                (values * wanted).sum()
                for values in (log_prob, logits)
                for wanted in (preference_labels, ~preference_labels)
            )
            return loss, (*sums, *results)

        return _Base._differentiate(ctx, (_input, weight, bias), loss_of)


class LigerFusedLinearPPOBase(_Base):
    """Sampled answers; the formula is ``ppo_loss_fn``: (loss, metrics) of the tokens' log-probabilities."""

    ppo_loss_fn = _formula("LigerFusedLinearPPOBase.ppo_loss_fn")
    backward = _backward(3, 21)
    _compute_dapo_normalizer = staticmethod(share_of_tokens)

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):
        """``[B, T]`` log-probabilities of the tokens."""
        return head_log_prob(input_chunk, weight, selected_token_ids, bias, -100, temperature)

    @staticmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        selected_token_ids,
        attention_mask,
        advantages,
        bias=None,
        ref_per_token_logps=None,
        old_per_token_logps=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        temperature=1.0,
        compiled=True,
        use_ref_model=False,
        chunk_size=1,
        vllm_is_ratio=None,
        **loss_kwargs,
    ):
        if use_ref_model:
            assert ref_per_token_logps is not None or ref_input is not None, (
                "If use_ref_model is True, ref_per_token_logps or ref_input must be provided"
            )
        if vllm_is_ratio is not None and vllm_is_ratio.dim() == 1:
            vllm_is_ratio = vllm_is_ratio.unsqueeze(-1)
        if use_ref_model and ref_per_token_logps is None:
            with torch.no_grad():
                ref_per_token_logps = cls.chunk_forward(
                    ref_input, ref_weight, selected_token_ids, ref_bias, temperature
                )

        def loss_of(hidden, weight, bias):
            log_prob = cls.chunk_forward(hidden, weight, selected_token_ids, bias, temperature)
            return cls.ppo_loss_fn(
                per_token_logps=log_prob,
                attention_mask=attention_mask,
                advantages=advantages,
                full_attention_mask=attention_mask,
                ref_per_token_logps=ref_per_token_logps,
                old_per_token_logps=old_per_token_logps,
                vllm_is_ratio=vllm_is_ratio,
                **loss_kwargs,
            )

        return _Base._differentiate(ctx, (_input, weight, bias), loss_of)


class LigerFusedLinearDistillationBase(_Base):
    """A student's logits beside its teacher's.

    The formula is ``distillation_loss_fn``: the sum of the losses of some rows.
    """

    distillation_loss_fn = _formula("LigerFusedLinearDistillationBase.distillation_loss_fn")
    backward = _backward(3)

    @staticmethod
    def forward(
        cls,
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        target,
        student_bias=None,
        teacher_bias=None,
        chunk_size=1024,
        ignore_index=-100,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        compute_ce_loss=True,
        temperature=1.0,
        compiled=True,
        return_soft_hard_loss=False,
        **loss_kwargs,
    ):
        valid = (target != ignore_index).sum().clamp(min=1)
        wanted = [x is not None for x in (student_input, student_weight, student_bias)]
        weight, bias = (
            x if x is None else x.detach().requires_grad_() for x in (student_weight, student_bias)
        )
        totals = student_input.new_zeros(3, dtype=torch.float32)
        rows, sums = [], [None, None]
        for begin in range(0, max(target.shape[0], 1), chunk_size):
            part = slice(begin, begin + chunk_size)
            hidden = student_input[part].detach().requires_grad_()
            with torch.no_grad():
                teacher = F.linear(teacher_input[part], teacher_weight, teacher_bias) / temperature
            with torch.enable_grad():
                logits = F.linear(hidden, weight, bias)
                hard = logits.new_zeros((), dtype=torch.float32)
                if compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss):
                    hard = F.cross_entropy(
                        logits.float(), target[part], reduction="sum", ignore_index=ignore_index
                    )
                logits = F.pad(logits / temperature, (0, max(teacher.shape[-1] - logits.shape[-1], 0)))
                soft = cls.distillation_loss_fn(
                    logits, teacher, target=target[part], ignore_index=ignore_index, beta=beta, **loss_kwargs
                )
                loss = (weight_hard_loss * hard + weight_soft_loss * soft) / valid
                leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
                row, *shared = torch.autograd.grad(loss, leaves)
            totals += torch.stack([x.detach().float() for x in (loss, soft / valid, hard / valid)])
            rows.append(row)
            sums = [
                new.float() if old is None else old.add_(new) for old, new in zip(sums, shared, strict=False)
            ]
        found = iter([torch.cat(rows), *(s.to(student_weight.dtype) for s in sums)])
        ctx.save_for_backward(*(next(found) if there else None for there in wanted))
        return tuple(totals.unbind()) if return_soft_hard_loss else totals[0].clone()
