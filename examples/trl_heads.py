"""TRL's trainers that form whole logits, on Tigon's heads: GKD, GOLD (of one tokenizer), ORPO and CPO.

These have no function that tigon.compat.trl could take: a class of their own replaces the method that does.
``trainer("GKD")`` is a class to use where you would use TRL's; options and data are the same. Not carried
over: auxiliary losses of experts, AlphaPO, images, GOLD's loss across tokenizers.
"""

from __future__ import annotations

import importlib

import torch

import tigon


def states(model, input_ids, attention_mask):
    """Hidden states before the head, and the head's weight."""
    base = model.get_decoder()
    hidden = base(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return hidden, model.get_output_embeddings().weight


class Redirected:
    """Runs the loss inside the forward of a wrapped model (DDP, FSDP, DeepSpeed), as TRL does."""

    def inside(self, model, method, *args):
        """method(model, *args)."""
        from trl.models.utils import _ForwardRedirection

        plain = self.accelerator.unwrap_model(model)
        return _ForwardRedirection()(model, plain, lambda *given: method(plain, *given), *args)


class Distilled(Redirected):
    """GKD and GOLD: generalised JSD of two heads."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As TRL's, without either side's logits."""
        if return_outputs or getattr(self, "use_uld_loss", False):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        mask = inputs["attention_mask"]
        with torch.no_grad():
            teacher = self.inside(self.teacher_model.eval(), states, inputs["input_ids"], mask)

        def loss(plain, input_ids, labels):
            hidden, weight = states(plain, input_ids, mask)
            return tigon.linear_jsd(
                hidden,
                weight,
                teacher,
                labels,
                beta=self.beta,
                shift=True,
                denominator=num_items_in_batch,
                temperature=self.temperature if hasattr(self, "use_uld_loss") else 1.0,
            )

        return self.inside(model, loss, inputs["input_ids"], inputs["labels"])


class Preferring(Redirected):
    """ORPO and CPO: losses of pairs from one head."""

    padding = "padding_value"  # the attribute that holds it

    def options(self, labels, whole):
        """What linear_preference takes, of the labels of answers and those of prompts and answers."""
        raise NotImplementedError

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        """As TRL's, without logits and their means."""
        padding, device = getattr(self, self.padding), self.accelerator.device
        given = self.concatenated_inputs(batch, padding_value=padding, device=device)
        ids, mask = given["concatenated_input_ids"], given["concatenated_attention_mask"]
        labels = given["concatenated_labels"]
        options = self.options(labels, torch.where(mask == 1, ids, -100))

        def loss(plain, ids, mask, labels):
            hidden, weight = states(plain, ids, mask)
            return tigon.linear_preference(hidden, weight, labels, beta=self.beta, shift=True, **options)

        out = self.inside(model, loss, ids, mask, labels)
        chosen, rejected = out.rewards.chunk(2)
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "nll_loss": out.nll,
        }
        prefix = "eval_" if train_eval == "eval" else ""
        gather = self.accelerator.gather_for_metrics
        return out.loss, {prefix + name: gather(value).mean().item() for name, value in values.items()}


class OddsRatio(Preferring):
    """ORPO; its likelihood term has the prompt too."""

    def options(self, labels, whole):
        """Of kind "orpo"."""
        return {"kind": "orpo", "nll_target": whole[: len(whole) // 2]}


class Contrastive(Preferring):
    """CPO and its kinds."""

    padding = "pad_token_id"

    def options(self, labels, whole):
        """Of the trainer's loss_type."""
        kind = {"sigmoid": "cpo"}.get(self.loss_type, self.loss_type)
        options = {"kind": kind, "nll": float(self.cpo_alpha)}
        options |= {"label_smoothing": self.label_smoothing} if kind in ("cpo", "simpo") else {}
        return options | ({"gamma": self.simpo_gamma} if kind == "simpo" else {})


KINDS = {
    "GKD": ("gkd", Distilled),
    "GOLD": ("gold", Distilled),
    "ORPO": ("orpo", OddsRatio),
    "CPO": ("cpo", Contrastive),
}


def trainer(name):
    """TRL's trainer of that name (a key of KINDS) on Tigon's head."""
    package, mixin = KINDS[name]
    stock = getattr(importlib.import_module(f"trl.experimental.{package}"), f"{name}Trainer")
    return type(f"Tigon{name}Trainer", (mixin, stock), {})
