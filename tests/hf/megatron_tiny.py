"""Tiny Megatron models on the CPU, and their losses and gradients with and without Tigon."""

import contextlib
import inspect
import runpy
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F

VOCAB, ROWS, BATCH = 96, 16, 2


@contextlib.contextmanager
def megatron(tensor_parallel=1):
    """Megatron's groups on the CPU; it asks for a CUDA device and its random states, and gets the CPU's.

    Its functions under torch.compile run eagerly: the compiler would ask for properties of that device.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    eager = torch._dynamo.config.patch(disable=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), eager:
        warnings.simplefilter("ignore")
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        forks = random.CudaRNGStatesTracker
        patch.setattr(forks, "fork", lambda self, *args, **kwargs: contextlib.nullcontext())
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def deterministic_mode(**options):
    """What --deterministic-mode does: by Megatron's own file, whose package imports much more."""
    import megatron.core

    path = Path(megatron.core.__file__).parents[1] / "training/determinism.py"
    if not path.exists():  # 0.16 comes without it
        torch.use_deterministic_algorithms(True)
        return
    args = Namespace(**{"cross_entropy_loss_fusion": False, "tp_comm_overlap": False, **options})
    runpy.run_path(path)["apply_determinism_to_args"](args)


def places_of_liger():
    """(owner, name) of what apply_liger_kernel_to_megatron replaces in this version."""
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_bias_swiglu, fused_cross_entropy
    from megatron.core.models import backends
    from megatron.core.models.common.language_module import language_module
    from megatron.core.tensor_parallel import cross_entropy
    from megatron.core.transformer import transformer_block

    places = [
        (fused_cross_entropy, "fused_vocab_parallel_cross_entropy"),
        (language_module, "fused_vocab_parallel_cross_entropy"),
        (cross_entropy, "vocab_parallel_cross_entropy"),
        (tensor_parallel, "vocab_parallel_cross_entropy"),
        (backends.LocalSpecProvider, "layer_norm"),
        (transformer_block, "LayerNormImpl"),
        (fused_bias_swiglu, "SwiGLUFunction"),
    ]
    return [(owner, name) for owner, name in places if hasattr(owner, name)]


@contextlib.contextmanager
def kept(places):
    """What these places hold is there again afterwards."""
    before = [getattr(*place) for place in places]
    try:
        yield
    finally:
        for (owner, name), value in zip(places, before, strict=True):
            setattr(owner, name, value)


def fitting(function, values):
    """The values that this version's function knows."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}


def config(**changes):
    from megatron.core.transformer import TransformerConfig

    values = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
    values |= {"tensor_model_parallel_size": dist.get_world_size(), "use_cpu_initialization": True}
    values |= {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu}
    values |= {"add_bias_linear": False, "bias_activation_fusion": True, "hidden_dropout": 0.0}
    values |= {"attention_dropout": 0.0, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    values |= {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False}
    values |= {"bias_dropout_fusion": False}
    return TransformerConfig(**fitting(TransformerConfig, {**values, **changes}))


def gpt(spec=None, tied=False, mtp=None, model=None, **changes):
    """A GPTModel, with an own spec or Megatron's local one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(0)
    conf = config(**({"mtp_num_layers": mtp} if mtp else {}), **changes)
    if spec is None:
        names = {"num_experts": "num_moe_experts", "normalization": "normalization"}
        names |= {"qk_layernorm": "qk_layernorm", "qk_l2_norm": "qk_l2_norm"}
        spec = get_gpt_layer_local_spec(**{name: getattr(conf, of) for name, of in names.items()})
    else:
        spec = spec(conf)
    extra = {} if mtp is None else {"mtp_block_spec": mtp_spec(conf, spec)}
    return GPTModel(
        conf,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=ROWS,
        share_embeddings_and_output_weights=tied,
        **{"position_embedding_type": "rope", **extra, **(model or {})},
    )


def mtp_spec(conf, spec):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(conf, spec, use_transformer_engine=False)


def hybrid(norms=False, pattern="*-*-", **changes):
    """A HybridModel of attention and MLP layers; before Megatron-Core 0.19 its name is MambaModel."""
    import tigon.megatron

    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        name = "hybrid_layer_pattern"
    except ImportError:
        from megatron.core.models.mamba import MambaModel as Model

        name = "hybrid_override_pattern"
    torch.manual_seed(0)
    conf = config(num_layers=len(pattern), **changes)
    return Model(
        conf,
        tigon.megatron.hybrid_stack_spec(conf, norms=norms),
        vocab_size=VOCAB,
        max_sequence_length=ROWS,
        position_embedding_type="rope",
        **{name: pattern},
    )


def data():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (BATCH, ROWS), generator=generator)
    upstream = torch.rand(BATCH, ROWS, generator=generator)
    positions = torch.arange(ROWS).expand(BATCH, ROWS)
    mask = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).triu(1)
    return (ids, positions, mask), ids.roll(-1, 1), upstream


def step(model):
    """Per-token losses, and all gradients of their weighted sum."""
    inputs, labels, upstream = data()
    model.zero_grad(set_to_none=True)
    loss = model(*inputs, labels=labels)
    (loss * upstream).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def smoothed_loss(logits, target, smoothing):
    """Megatron's smoothing: the label keeps 1 - s, the other classes share s."""
    vocab = logits.shape[-1]
    spread = torch.full_like(logits, smoothing / (vocab - 1)).scatter_(-1, target[..., None], 1 - smoothing)
    return -(spread * logits.double().log_softmax(-1)).sum(-1)


def same(got, want, ulps=256):
    """Equal within float32 rounding of the largest value."""
    for name, grad in {"loss": want[0], **want[1]}.items():
        ours = got[0] if name == "loss" else got[1][name]
        scale = grad.abs().max().item() + 1e-6
        assert ours.shape == grad.shape and ours.dtype == grad.dtype, name
        worst = (ours - grad).abs().max().item() / scale
        assert worst <= ulps * 2.0**-24, f"{name}: {worst:.2e}"
    assert got[1].keys() == want[1].keys()
