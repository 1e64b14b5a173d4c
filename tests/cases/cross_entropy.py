"""Cases of cross_entropy: the loss of given logits."""

import torch
import torch.nn.functional as F

from .case import SCALED, Case, Inputs, Maker, bench_case, memory_bound, ours, params, test_case, upstream
from .heads import altered

NAME = "cross_entropy"
tigon_fn = ours(NAME)
LOSS = True

DEFAULTS = {
    "masked": 0.0,  # fraction of labels that are ignored; 1.0: all
    "denominator": None,  # a number, or "tensor" or "int_tensor" for a 0-dim tensor
    "fill": None,  # "nan", "-inf": one logit of a row that counts
}
DEFAULTS |= {"N": 9, "V": 50, "layout": "contiguous", "ignore_index": -100, "label_smoothing": 0.0}
DEFAULTS |= {"softcap": None, "z_loss": 0.0, "class_weight": False, "reduction": "mean", "scale": 2.0}
DEFAULTS |= {"grads": (0,), "upstream": None}

# Columns of the heads of the most used model families: as their configurations have them, and with some
# tokens added.
VOCABULARIES = {30522: "BERT", 32000: "Llama 2, Mistral, Mixtral, TinyLlama"}
VOCABULARIES |= {32001: "Llama 2 and a padding token", 32064: "Phi-3", 32128: "T5", 32768: "Mistral 7B v0.3"}
VOCABULARIES |= {49152: "StarCoder2, SmolLM2", 50257: "GPT-2, GPT-Neo", 50265: "BART, RoBERTa", 50272: "OPT"}
VOCABULARIES |= {50280: "Mamba", 50304: "OLMo, Pythia, StableLM", 50368: "ModernBERT, MPT", 51200: "Phi-2"}
VOCABULARIES |= {51865: "Whisper", 55296: "Baichuan, Chinese Llama", 64000: "Yi", 65024: "Falcon"}
VOCABULARIES |= {65536: "Jamba, LFM2, Chameleon, RWKV", 73448: "MiniCPM3", 92544: "InternLM2"}
VOCABULARIES |= {100278: "OLMo 2 as tokenized", 100352: "Phi-4, OLMo 2, Granite 4"}
VOCABULARIES |= {102400: "DeepSeek V2, EXAONE 4", 103424: "ERNIE 4.5", 119547: "multilingual BERT"}
VOCABULARIES |= {120832: "Hunyuan 3", 125696: "Baichuan 2", 128000: "Falcon-H1, Bamba", 128256: "Llama 3"}
VOCABULARIES |= {128257: "Llama 3 and a padding token", 128259: "Llama 3 and three tokens"}
VOCABULARIES |= {129280: "DeepSeek V3", 131072: "Mistral NeMo, Nemotron-H, Apertus", 150528: "GLM 3"}
VOCABULARIES |= {151552: "GLM 4", 151665: "Qwen 2.5 as tokenized", 151936: "Qwen 2, Qwen 3"}
VOCABULARIES |= {152064: "Qwen 2 7B", 154880: "GLM 5", 155136: "Seed-OSS", 157184: "Ling 2"}
VOCABULARIES |= {163840: "Kimi K2", 200064: "Phi-4 mini, MiniMax M2", 201088: "gpt-oss", 202048: "Llama 4"}
VOCABULARIES |= {248320: "Qwen 3.5", 250112: "mT5", 250880: "BLOOM", 256000: "Gemma, Gemma 2, Command R"}
VOCABULARIES |= {257152: "PaliGemma", 262144: "Gemma 3", 262208: "Gemma 3 with images"}

WEIGHTED = {"class_weight": True, "masked": 0.2, "label_smoothing": 0.1}
EVERYTHING = {"N": 23, "V": 517, "softcap": 6.0, "z_loss": 1e-3, **WEIGHTED}

CASES = [
    test_case("9x50"),
    test_case("odd_7x33", small=True, N=7, V=33, masked=0.3),
    test_case("one_row", N=1, V=1000),
    test_case("one_column", N=5, V=1),
    test_case("two_columns", N=5, V=2),
    test_case("empty", N=0),
    test_case("empty_sum", N=0, reduction="sum"),
    test_case("empty_none", N=0, reduction="none"),
    test_case("empty_denominator", N=0, denominator=4.0),
    test_case("129x1031", N=129, V=1031, masked=0.2),
    test_case("wide", N=3, V=70001),
    test_case("odd_50257", N=5, V=50257, masked=0.3, reduction="none"),
    test_case("three_blocks_rows", N=3, V=152065, layout="rows", reduction="none"),
    test_case("widest_misaligned", N=2, V=262143, layout="offset1"),
    test_case("one_block_73448", N=5, V=73448, masked=0.3),
    test_case("two_blocks_201088", N=3, V=201088, reduction="none"),
    test_case("two_blocks_262208", N=2, V=262208),
    test_case("vocab_32000", N=17, V=32000, masked=0.2),
    test_case("rows", V=130, layout="rows"),
    test_case("columns", V=130, layout="columns"),
    test_case("transposed", V=130, layout="transposed"),
    test_case("misaligned", V=256, layout="offset1"),
    test_case("expanded", V=33, layout="expanded"),
    test_case("sum", reduction="sum", masked=0.3),
    test_case("none", reduction="none", masked=0.3),
    test_case("denominator", denominator=7.5, masked=0.3),
    test_case("denominator_tensor", denominator="tensor", masked=0.3),
    test_case("denominator_int_tensor", denominator="int_tensor", masked=0.3),
    test_case("denominator_sum", denominator=7.5, reduction="sum"),
    test_case("ignore_zero", ignore_index=0, masked=0.3),
    test_case("ignore_minus_one", ignore_index=-1, masked=0.3),
    test_case("all_masked_mean", masked=1.0),
    test_case("all_masked_sum", masked=1.0, reduction="sum"),
    test_case("all_masked_none", masked=1.0, reduction="none"),
    test_case("all_masked_denominator", masked=1.0, denominator=3.0),
    test_case("smoothing", label_smoothing=0.1, masked=0.2),
    test_case("smoothing_one", label_smoothing=1.0),
    test_case("smoothing_wide", N=3, V=32001, label_smoothing=0.2),
    test_case("softcap", softcap=5.0, masked=0.2),
    test_case("softcap_saturated", softcap=2.0, scale=20.0),
    *(
        test_case(f"softcap_{v}", V=v, softcap=cap, masked=0.2, **({"N": 5} | options))
        for v, cap, options in (
            (128, 30.0, {"N": 17}),
            (4096, 30.0, {"layout": "offset1"}),
            (16384, 30.0, {"reduction": "none"}),
            (16391, 5.0, {"layout": "rows", "class_weight": True}),
            (32768, 30.0, {"z_loss": 1e-3}),
            (50257, 5.0, {"N": 4, "reduction": "none"}),
            (100003, 30.0, {"N": 4, "class_weight": True, "z_loss": 1e-3, "reduction": "none"}),
            (256000, 30.0, {"N": 3, "reduction": "none"}),
        )
    ),
    test_case("softcap_wide_saturated", N=3, V=70001, softcap=2.0, scale=20.0, reduction="none"),
    test_case("softcap_nan", softcap=5.0, fill="nan", reduction="none"),
    test_case("softcap_minus_inf", softcap=5.0, fill="-inf", reduction="none"),
    test_case("z_loss", z_loss=1e-2, masked=0.2),
    test_case("z_loss_none", small=True, z_loss=1e-2, reduction="none", masked=0.2),
    test_case("weights", class_weight=True, masked=0.2),
    test_case("weights_none", class_weight=True, masked=0.2, reduction="none"),
    test_case("weights_smoothing", **WEIGHTED),
    test_case("weights_smoothing_softcap_sum", small=True, reduction="sum", softcap=4.0, **WEIGHTED),
    test_case("weights_all_masked", class_weight=True, masked=1.0),
    test_case("everything_masked", masked=1.0, **{k: v for k, v in EVERYTHING.items() if k != "masked"}),
    test_case("everything", denominator="tensor", layout="rows", **EVERYTHING),
    test_case("everything_none", reduction="none", layout="columns", **EVERYTHING),
    test_case("confident", N=23, V=517, scale=40.0),
    test_case("flat", N=23, V=517, scale=1e-3),
    test_case("nan_row", fill="nan", reduction="none"),
    test_case("nan_mean", fill="nan"),
    test_case("minus_inf", fill="-inf", reduction="none"),
    bench_case("8192x32000", N=8192, V=32000),
    bench_case("8192x128256", N=8192, V=128256),
    bench_case("8192x128256_scaled", N=8192, V=128256, **SCALED),
    bench_case("8192x128256_denominator", N=8192, V=128256, denominator="tensor"),
    bench_case("8192x128256_none", N=8192, V=128256, reduction="none"),
    bench_case("8192x152064", N=8192, V=152064),
    bench_case("4096x262144", N=4096, V=262144),
    bench_case("4096x256000_softcap", N=4096, V=256000, softcap=30.0),
    bench_case("8192x128256_softcap", N=8192, V=128256, softcap=30.0),
    # 2 GB of logits in bf16.
    *(bench_case(f"vocabulary_{v}", "vocabulary", N=2**30 // v, V=v) for v in VOCABULARIES),
    *(bench_case(f"paper_8192x{v}", "paper", N=8192, V=v) for v in (40960, 81920, 122880, 163840)),
    bench_case("1024x32000", "bench_cpu", N=1024, V=32000),
    bench_case("256x1024", "smoke", N=256, V=1024),
]


def make_denominator(value, device):
    """None, a number, or a 0-dim tensor of some dtype."""
    if value == "tensor":
        return torch.tensor(6.25, device=device)
    if value == "int_tensor":
        return torch.tensor(7, device=device)
    return value


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    logits = draw.randn(p["N"], p["V"], layout=p["layout"], scale=p["scale"])
    masked, ignore = p["masked"], p["ignore_index"]
    target = draw.labels(p["V"], p["N"], masked=masked, ignore_index=ignore)
    if p["fill"] is not None:
        target[1] = 0
        logits[1, 3] = float(p["fill"])
    wide = torch.promote_types(dtype, torch.float32)
    weight = draw.randn(p["V"], dtype=wide).abs() + 0.1 if p["class_weight"] else None
    none = p["reduction"] == "none" and p["denominator"] is None
    grad = draw.randn(p["N"], dtype=wide) if none else upstream(case, dtype, device)
    names = ("ignore_index", "label_smoothing", "softcap", "z_loss", "reduction")
    return Inputs(
        args=(logits, target),
        kwargs={
            "weight": weight,
            "denominator": make_denominator(p["denominator"], device),
            **{name: p[name] for name in names},
        },
        grads=p["grads"],
        grad_outputs=(grad,),
    )


def eager_fn(logits, target, **options):
    """Logits upcast, then torch's own cross-entropy, as Hugging Face has it."""
    from tigon.ops.cross_entropy import reference

    return reference(logits, target, **options)


def oracle_fn(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    z_loss=0.0,
    reduction="mean",
    denominator=None,
):
    """The formula row by row, for fp64.

    loss_i = (1-s) w_y (lse - x_y) + s/V sum_c w_c (lse - x_c) + z lse^2, zero where the label is
    ignored; a mean divides by the sum of w_y over the labels that count, as torch does.
    """
    x, valid = altered(logits, softcap), target != ignore_index
    y = torch.where(valid, target, 0)
    w = x.new_ones(x.shape[-1]) if weight is None else weight
    lse = torch.logsumexp(x, dim=-1)
    rows = (1 - label_smoothing) * w[y] * (lse - x.gather(-1, y.unsqueeze(-1)).squeeze(-1))
    if label_smoothing:
        rows = rows + label_smoothing / x.shape[-1] * (w * (lse.unsqueeze(-1) - x)).sum(-1)
    if z_loss:
        rows = rows + z_loss * lse * lse
    rows = torch.where(valid, rows, 0.0)
    if denominator is not None:
        return rows.sum() / torch.as_tensor(denominator, device=rows.device)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / torch.where(valid, w[y], 0.0).sum()


# the logits; logits and their gradient
bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = memory_bound(
    1, 2, lambda case: case.params["N"] * case.params["V"]
)
bytes_step = bytes_bwd  # loss and gradient in one pass: one read and one write


def _inplace(case, inputs):
    import tigon

    # A view of the leaf, since the gradient of a leaf cannot take the leaf's own place.
    return lambda x, *a, **k: tigon.cross_entropy(x.view_as(x), *a, inplace=True, **k)


def _aten(case, inputs):
    if inputs.kwargs["softcap"] or inputs.kwargs["z_loss"]:
        return None
    if inputs.kwargs["denominator"] is not None:
        return None

    def fn(logits, target, *, weight, ignore_index, label_smoothing, reduction, **_):
        options = {"label_smoothing": label_smoothing, "reduction": reduction}
        return F.cross_entropy(logits, target, weight, ignore_index=ignore_index, **options)

    return fn


def _liger(case, inputs):
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def fn(x, target, *, weight, ignore_index, z_loss, label_smoothing, reduction, softcap, denominator, **_):
        reduction = reduction if denominator is None else "sum"
        loss = LigerCrossEntropyFunction.apply(
            x, target, weight, ignore_index, z_loss, label_smoothing, reduction, softcap
        )[0]
        return loss if denominator is None else loss / denominator

    return fn


def _quack(inplace):
    def factory(case, inputs):
        from quack import cross_entropy

        kwargs = inputs.kwargs
        if kwargs["softcap"] or kwargs["z_loss"] or kwargs["label_smoothing"]:
            return None
        if kwargs["denominator"] is not None:
            return None

        def fn(x, target, *, weight, ignore_index, reduction, **_):
            logits = x.view_as(x) if inplace else x
            options = {"ignore_index": ignore_index, "reduction": reduction, "inplace_backward": inplace}
            return cross_entropy(logits, target, weight=weight, **options)

        return fn

    return factory


PEERS = {
    "tigon_inplace": _inplace,
    "aten": _aten,
    "liger": _liger,
    "quack": _quack(False),
    "quack_inplace": _quack(True),
}
