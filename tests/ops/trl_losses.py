"""The losses of TRL's own trainers on log-probabilities,
as oracles: methods on trainers that hold nothing else."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch


def _same(x, *_, **__):
    return x


def _accelerator():
    same = dict.fromkeys(("gather", "gather_for_metrics", "reduce", "unwrap_model"), _same)
    return SimpleNamespace(device=torch.device("cpu"), num_processes=1, sync_gradients=True, **same)


class _Outputs(SimpleNamespace):
    """What a patched model of TRL returns: statistics of the tokens."""


class _Model:
    training = True

    def __init__(self, log_prob):
        zeros = torch.zeros_like(log_prob).detach()
        self.outputs = _Outputs(log_probs=log_prob, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    def __call__(self, **_):
        return self.outputs


def _trainer(module, name, **members):
    found = pytest.importorskip(f"trl.trainer.{module}")
    trainer = object.__new__(getattr(found, name))
    members.setdefault("_metrics", {"train": defaultdict(list), "eval": defaultdict(list)})
    for key, value in (members | {"accelerator": _accelerator(), "aux_loss_enabled": False}).items():
        object.__setattr__(trainer, key, value)
    return trainer


def _answers(mask):
    """Ids whose first token is the prompt's; labels are shifted already."""
    ids = torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long)
    completion = torch.cat((torch.zeros(len(mask), 1, dtype=torch.long), mask.long()), 1)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": completion}


def dpo(log_prob, mask, ref, loss_type, *, beta, label_smoothing=0.0, tau=0.05):
    """DPOTrainer's loss of one type; `log_prob` are those of labels that are shifted already."""
    model = _Model(log_prob)
    members = {"model": model, "beta": beta, "loss_types": [loss_type], "loss_weights": [1.0]}
    members |= {"label_smoothing": label_smoothing, "args": SimpleNamespace(discopop_tau=tau)}
    members |= {"precompute_ref_logps": True, "f_divergence_type": "reverse_kl", "ld_alpha": None}
    members |= {"use_weighting": False, "_total_train_tokens": 0, "_tp_size": 1}
    trainer = _trainer("dpo_trainer", "DPOTrainer", **members)
    inputs = _answers(mask) | dict(zip(("ref_chosen_logps", "ref_rejected_logps"), ref.chunk(2), strict=True))
    return trainer._compute_loss(model, inputs, False), trainer._metrics["train"]


def kto(log_prob, mask, ref, desirable, loss_type, *, beta, weights, kl):
    """KTOTrainer's loss; `kl`: log-probabilities of the mismatched answers, of policy and reference."""
    model = _Model(log_prob)
    members = {"model": model, "beta": beta, "loss_type": loss_type, "precompute_ref_logps": True}
    members |= {"desirable_weight": weights[0], "undesirable_weight": weights[1], "_tp_size": 1}
    members |= {"calculate_KL": loss_type == "kto", "_compute_kl_logps": lambda *_: kl[0]}
    trainer = _trainer("kto_trainer", "KTOTrainer", **members, _total_train_tokens=0)
    batch = _answers(mask) | {"label": desirable, "ref_logps": ref, "ref_KL_logps": kl[1]}
    return trainer._compute_loss(model, batch, False), trainer._metrics["train"]


def grpo(
    log_prob,
    mask,
    advantage,
    loss_type,
    *,
    entropies,
    old=None,
    ref=None,
    importance=None,
    level="token",
    clip=(0.2, 0.2),
    delta=None,
    kl=0.0,
    kl_corrected=False,
    entropy=0.0,
    items=None,
    length=None,
):
    """GRPOTrainer's loss of one type."""
    sapo = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "steps_per_generation": 1}
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    args = SimpleNamespace(delta=delta, use_bias_correction_kl=kl_corrected, **sapo, **vespo)
    members = {"model": SimpleNamespace(training=True), "args": args, "beta": kl, "loss_type": loss_type}
    members |= {"epsilon_low": clip[0], "epsilon_high": clip[1], "importance_sampling_level": level}
    members |= {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
    members |= {"use_vllm": importance is not None, "vllm_importance_sampling_correction": True}
    members |= {"current_gradient_accumulation_steps": 1, "max_completion_length": length}
    members |= {"entropy_coef": entropy, "_entropy_bonus_enabled": entropy != 0.0}
    members |= {"use_adaptive_entropy": False}
    members["_get_per_token_logps_and_entropies"] = lambda *_, **__: (log_prob, entropies, None)
    trainer = _trainer("grpo_trainer", "GRPOTrainer", **members)
    ids = torch.ones_like(mask, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
    inputs |= {"completion_mask": mask.long(), "advantages": advantage}
    inputs |= {"num_items_in_batch": torch.tensor(items or 1)}
    optional = {
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": importance,
    }
    inputs |= {name: t for name, t in optional.items() if t is not None}
    return trainer._compute_loss(trainer.model, inputs), trainer._metrics["train"]
