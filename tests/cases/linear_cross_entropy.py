"""Cases of linear_cross_entropy: hidden states x head weight x labels -> loss, without logits."""

import dataclasses
import inspect
import math

import torch
import torch.nn.functional as F

from . import cross_entropy
from .case import SCALED, Case, Inputs, Maker, bench_case, lay_out, ours, params, test_case, upstream
from .cross_entropy import make_denominator
from .heads import (
    LLAMA,
    adapter,
    altered,
    as_tigon,
    costs,
    gradient_matmuls,
    liger_head,
    linear,
    loss_gradient,
    matmul_of,
    trained,
)

NAME = "linear_cross_entropy"
tigon_fn = ours(NAME, as_tigon)
LOSS = True

DEFAULTS = {
    "lead": (13,),  # leading shape of hidden and target
    "layout": "contiguous",  # of hidden
    "lora": 0,  # rank
    "known": False,  # the number of rows that count is said
    "scale": 2.0,  # spread of the logits
}
DEFAULTS |= {"H": 32, "V": 67, "bias": False, "weight_layout": "contiguous", "masked": 0.0}
DEFAULTS |= {"ignore_index": -100, "label_smoothing": 0.0, "softcap": None, "logit_scale": 1.0}
DEFAULTS |= {"temperature": 1.0, "z_loss": 0.0, "class_weight": False, "reduction": "mean"}
DEFAULTS |= {"denominator": None, "shift": False, "chunk_rows": None, "fill": None, "grads": (0, 1)}
DEFAULTS |= {"keep_mb": 0.0, "max_peak_mb": None, "upstream": None}

EVERYTHING = {"lead": (2, 23), "H": 48, "V": 517, "bias": True, "class_weight": True, "masked": 0.2}
EVERYTHING |= {"label_smoothing": 0.1, "softcap": 6.0, "logit_scale": 0.7, "z_loss": 1e-3, "chunk_rows": 10}
OPTIONS = ("ignore_index", "label_smoothing", "softcap", "logit_scale", "temperature", "z_loss", "reduction")

CASES = [
    test_case("13x32x67"),
    test_case("odd_7x33x51", lead=(7,), H=33, V=51, masked=0.3),
    test_case("one_row", lead=(1,), V=1000),
    test_case("one_hidden", H=1),
    test_case("one_class", V=1),
    test_case("empty", lead=(0,)),
    test_case("empty_sum", lead=(2, 0), reduction="sum"),
    test_case("empty_denominator", lead=(0,), denominator=3.0),
    test_case("rank3", lead=(2, 9), masked=0.2),
    test_case("rank4", lead=(2, 3, 4), masked=0.2),
    test_case("chunks", lead=(37,), chunk_rows=8, masked=0.2),
    test_case("chunks_of_one", lead=(5,), chunk_rows=1),
    test_case("chunk_larger", lead=(5,), chunk_rows=4096),
    test_case("chunks_sum", lead=(37,), chunk_rows=16, reduction="sum", masked=0.2),
    test_case("chunks_none", lead=(37,), chunk_rows=16, reduction="none", masked=0.2),
    test_case("larger", lead=(4, 65), H=128, V=1031, masked=0.2, chunk_rows=64),
    test_case("wide_vocab", lead=(6,), H=16, V=32001),
    test_case("widest_vocab", lead=(5,), H=7, V=2**17 + 1),
    test_case("rows", lead=(2, 9), layout="rows"),
    test_case("columns", lead=(2, 9), layout="columns"),
    test_case("transposed", layout="transposed"),
    test_case("misaligned", H=64, layout="offset1", weight_layout="offset1"),
    test_case("weight_rows", weight_layout="rows"),
    test_case("weight_transposed", weight_layout="transposed"),
    test_case("sum", reduction="sum", masked=0.3),
    test_case("none", reduction="none", masked=0.3),
    test_case("none_rank3", lead=(2, 9), reduction="none", masked=0.3),
    test_case("denominator", denominator=7.5, masked=0.3),
    test_case("denominator_tensor", denominator="tensor", masked=0.3),
    test_case("denominator_int_tensor", denominator="int_tensor", masked=0.3, chunk_rows=4),
    test_case("ignore_zero", ignore_index=0, masked=0.3),
    test_case("all_masked_mean", masked=1.0),
    test_case("all_masked_sum", masked=1.0, reduction="sum", bias=True),
    test_case("all_masked_none", masked=1.0, reduction="none"),
    test_case("all_masked_denominator", masked=1.0, denominator=3.0),
    test_case("mostly_masked", lead=(64,), masked=0.9, chunk_rows=16),
    test_case("bias", small=True, bias=True, masked=0.2),
    test_case("bias_chunks", lead=(37,), bias=True, masked=0.2, chunk_rows=8),
    test_case("hidden_only", grads=(0,)),
    test_case("weight_only", grads=(1,)),
    test_case("hidden_and_bias", bias=True, grads=(0,)),
    test_case("weight_and_bias", bias=True, grads=(1,)),
    test_case("no_grad", grads=(), grad=False),
    test_case("weight_only_none", grads=(1,), reduction="none", masked=0.2),
    test_case("hidden_only_none", grads=(0,), reduction="none", masked=0.2, chunk_rows=4),
    test_case("smoothing", label_smoothing=0.1, masked=0.2),
    test_case("softcap", softcap=3.0, masked=0.2),
    test_case("logit_scale", logit_scale=0.25, scale=8.0),
    test_case("scale_and_softcap", logit_scale=0.5, softcap=3.0, bias=True),
    test_case("z_loss", z_loss=1e-2, masked=0.2),
    test_case("weights", class_weight=True, masked=0.2),
    test_case("weights_smoothing", class_weight=True, label_smoothing=0.1, chunk_rows=4),
    test_case("shift", lead=(3, 8), shift=True),
    test_case("shift_masked", small=True, lead=(3, 8), shift=True, masked=0.3, chunk_rows=4),
    test_case("shift_sum", lead=(3, 8), shift=True, reduction="sum", layout="rows"),
    test_case("shift_none", lead=(3, 8), shift=True, reduction="none", masked=0.2),
    test_case("shift_denominator", lead=(1, 9), shift=True, denominator=5),
    test_case("shift_one_token", lead=(3, 1), shift=True, reduction="sum"),
    test_case("everything", **EVERYTHING, shift=True, denominator="tensor", layout="rows"),
    test_case("everything_none", small=True, **EVERYTHING, reduction="none", layout="columns"),
    test_case("temperature", temperature=0.6, masked=0.2),
    test_case("softcap_temperature", small=True, temperature=0.6, softcap=3.0, logit_scale=0.5, masked=0.2),
    # Not a small case: those are captured in a graph and replayed on labels of another count.
    test_case("known", lead=(37,), masked=0.6, known=True, chunk_rows=4, bias=True),
    test_case("known_none", lead=(37,), masked=0.6, known=True, chunk_rows=4, reduction="none"),
    test_case("known_shift", lead=(3, 11), masked=0.6, known=True, shift=True, layout="rows"),
    test_case("known_all", lead=(9,), known=True),
    test_case("kept", lead=(37,), masked=0.3, reduction="none", keep_mb=1.0, layout="rows"),
    test_case("known_none_counts", lead=(9,), masked=1.0, known=True, reduction="sum", bias=True),
    test_case("known_odd", lead=(37,), H=33, V=51, masked=0.6, known=True, layout="offset1"),
    test_case("lora", small=True, lora=4, masked=0.2, chunk_rows=4),
    test_case("lora_odd", lora=3, H=33, V=51, grads=(0,), masked=0.6, known=True, temperature=0.8),
    test_case("lora_none", lora=8, grads=(), reduction="none"),
    test_case("nan_row", fill="nan", reduction="none", grads=(0,)),
    test_case("nan_mean", fill="nan"),
    *(
        bench_case(f"{rows}x{h}x{v}", lead=(rows,), H=h, V=v)
        for rows, h, v in (
            (8192, 4096, 32000),
            (8192, 4096, 128256),
            (8192, 2048, 128256),
            (8192, 3584, 152064),
            (16384, 3072, 256000),
            (32768, 4096, 128256),
            *((rows, 4096, v) for v in (32000, 128256) for rows in (1, 16, 64, 128, 256, 512)),
        )
    ),
    *(
        bench_case(f"8192x4096x128256_{name}", lead=(8192,), H=4096, V=128256, **options)
        for name, options in {
            "masked50": {"masked": 0.5, "known": True},
            "masked80": {"masked": 0.8, "known": True},
            "masked95": {"masked": 0.95, "known": True},
            "frozen": {"grads": (0,)},
            "scaled": SCALED,
            "none": {"reduction": "none"},
            "kept": {"reduction": "none", "keep_mb": 4096.0},
            "lora16": {"lora": 16, "grads": (0,)},
        }.items()
    ),
    *(
        bench_case(f"8192x4096x128256_{name}{mb}", "peak", lead=(8192,), **LLAMA, max_peak_mb=mb, **options)
        for name, mb, options in (
            *(("peak", mb, {}) for mb in (1300, 1500, 2000)),
            ("frozen_peak", 250, {"grads": (0,)}),
        )
    ),
    *(
        bench_case(f"{rows}x4096x{v}", "sweep", lead=(rows,), H=4096, V=v)
        for rows, v in (
            *((rows, 128256) for rows in (1024, 2048, 4096, 16384)),
            *((8192, v) for v in (8192, 16384, 65536, 256000)),
        )
    ),
    # Vocabularies and hidden sizes that are no multiple of 8, each beside a neighbour that is.
    *(
        bench_case(f"{rows}x{h}x{v}{name}", "odd", lead=(rows,), H=h, V=v, **options)
        for rows, h, vocabularies, name, options in (
            (8192, 4096, (128257, 128264), "", {}),
            (8192, 4096, (32001, 32064), "", {}),
            (8192, 2048, (151665, 151680), "", {}),
            (8192, 1280, (51865, 51872), "", {}),
            (5000, 768, (50257, 50264), "", {}),
            (8192, 7168, (129281, 129288), "", {}),
            (8192, 4100, (32000,), "", {}),
            (8192, 4097, (128256, 128257), "", {}),
            (8192, 4096, (128257, 128264), "_frozen", {"grads": (0,)}),
            (8192, 4096, (128257, 128264), "_lora16", {"lora": 16, "grads": (0,)}),
            (8192, 4096, (128257, 128264), "_none", {"reduction": "none"}),
            (8192, 4096, (128257, 128264), "_kept", {"reduction": "none", "keep_mb": 4096.0}),
            (8192, 4096, (128257, 128264), "_masked80", {"masked": 0.8, "known": True}),
        )
        for v in vocabularies
    ),
    bench_case("2048x512x32001", "bench_cpu", lead=(2048,), H=512, V=32001),
    bench_case("2048x512x32000", "bench_cpu", lead=(2048,), H=512, V=32000),
    bench_case("1024x2048x128256", "bench_cpu", lead=(1024,), H=2048, V=128256),
    bench_case("256x128x1024", "smoke", lead=(256,), H=128, V=1024),
]


def make(case: Case, device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw the inputs of a case; the logits have the spread `scale`."""
    p = params(case, DEFAULTS)
    draw = Maker(case, device, dtype, seed)
    lead, hidden_size, vocab = p["lead"], p["H"], p["V"]
    hidden = draw.randn(*lead, hidden_size, layout=p["layout"])
    weight = draw.randn(vocab, hidden_size, scale=p["scale"] / math.sqrt(hidden_size))
    weight = lay_out(weight, p["weight_layout"])
    bias = draw.randn(vocab) if p["bias"] else None
    masked, ignore = p["masked"], p["ignore_index"]
    target = draw.labels(vocab, *lead, masked=masked, ignore_index=ignore)
    if p["fill"] is not None:
        target.view(-1)[1] = 0
        hidden.view(-1, hidden_size)[1, 3] = float(p["fill"])
    wide = torch.promote_types(dtype, torch.float32)
    class_weight = draw.randn(vocab, dtype=wide).abs() + 0.1 if p["class_weight"] else None
    none = p["reduction"] == "none" and p["denominator"] is None
    grad = draw.randn(*lead, dtype=wide) if none else upstream(case, dtype, device)
    known = target[..., 1:] if p["shift"] else target
    return Inputs(
        args=(hidden, weight, target),
        kwargs={
            "bias": bias,
            "class_weight": class_weight,
            "denominator": make_denominator(p["denominator"], device),
            "valid_rows": int((known != ignore).sum()) if p["known"] else None,
            **adapter(draw, p["lora"], hidden_size, vocab),
            **{name: p[name] for name in (*OPTIONS, "shift", "chunk_rows", "keep_mb", "max_peak_mb")},
        },
        grads=p["grads"],
        grad_outputs=(grad,),
        grad_kwargs=trained(p),
    )


def eager_fn(hidden, weight, target, **options):
    """Logits in the model's dtype, upcast, then torch's cross-entropy, as Hugging Face has it."""
    from tigon.ops.loss_head.reference import reference

    return reference(hidden, weight, target, **as_tigon(options))


def oracle_fn(hidden, weight, target, **options):
    """Logits of every row that takes part, then the formula, for fp64."""
    form = {name: options[name] for name in ("softcap", "logit_scale", "temperature")}
    operands = {name: options[name] for name in ("bias", "lora_a", "lora_b")}
    own = {name: options[name] for name in (*OPTIONS, "denominator") if name not in form}
    if options["shift"]:
        hidden, target = hidden[:, :-1], target[:, 1:]
    logits = linear(hidden.reshape(-1, hidden.shape[-1]), weight, **operands)
    rows = cross_entropy.oracle_fn(
        altered(logits, **form), target.reshape(-1), weight=options["class_weight"], **own
    )
    if rows.dim() == 0:
        return rows
    rows = rows.view(target.shape)
    return F.pad(rows, (0, 1)) if options["shift"] else rows  # the last position has no label: 0


bytes_fwd, bytes_bwd, flops_fwd, flops_bwd = costs(matmul_of(DEFAULTS))


def even_neighbour(inputs: Inputs) -> tuple[Inputs, float] | None:
    """The case with H and V at the next multiples of 64; the operations of this one as a share of its."""
    hidden, weight, target = inputs.args
    missing = [-side % 64 for side in weight.shape]
    if not any(missing):
        return None
    wider = F.pad(hidden, (0, missing[1])), F.pad(weight, (0, missing[1], 0, missing[0])), target
    return dataclasses.replace(inputs, args=wider), weight.numel() / wider[1].numel()


def bare_matmuls(hidden, weight, target, inputs: Inputs, step: bool, again: bool) -> list:
    """The matmuls on the same operands: logits, for a step those of the gradients, and logits `again`."""
    hidden, weight, target = (value.detach() for value in (hidden, weight, target))
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if inputs.kwargs["valid_rows"] is not None:
        counts = target != inputs.kwargs.get("ignore_index", -100)
        hidden, target = hidden[counts], target[counts]
    matmuls = [lambda: hidden @ weight.t()]
    if step:
        matmuls *= 1 + again
        matmuls += gradient_matmuls(loss_gradient(hidden, weight, target), hidden, weight, inputs.grads)
    return matmuls


def gemms(inputs: Inputs, step: bool) -> list:
    """The bare matmuls; those of logits twice for per-row losses whose logits' gradients are not kept."""
    again = inputs.kwargs["reduction"] == "none" and not inputs.kwargs["keep_mb"]
    return bare_matmuls(*inputs.args, inputs, step, again)


def _plain(kwargs) -> bool:
    """No option that this benchmark's peers lack."""
    changed = kwargs["logit_scale"] != 1.0 or kwargs["temperature"] != 1.0 or kwargs["lora_a"] is not None
    return not (kwargs["shift"] or kwargs["denominator"] or changed)


def _aten(case, inputs):
    fused = getattr(F, "linear_cross_entropy", None)
    if fused is None:
        raise ImportError("this torch has no linear_cross_entropy")
    if not _plain(inputs.kwargs) or inputs.kwargs["softcap"] or inputs.kwargs["z_loss"]:
        return None

    def fn(hidden, weight, target, *, ignore_index, label_smoothing, reduction, **_):
        options = {"label_smoothing": label_smoothing, "reduction": reduction}
        return fused(hidden, weight, target, ignore_index=ignore_index, **options)

    return fn


def _liger(accumulate):
    def factory(case, inputs):
        import liger_kernel.ops.fused_linear_cross_entropy  # noqa: F401

        if not _plain(inputs.kwargs):
            return None
        return lambda *tensors, **options: liger_head(*tensors, options, accumulate)

    return factory


def _quack(scaled):
    def factory(case, inputs):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        kwargs = inputs.kwargs
        if not _plain(kwargs) or kwargs["softcap"] or kwargs["z_loss"]:
            return None
        if kwargs["label_smoothing"] or kwargs["bias"] is not None:
            return None
        # Releases before 0.6.5 have one path, and no name for it.
        named = "use_scaled_exp" in inspect.signature(chunked_linear_cross_entropy).parameters
        if scaled and not named:
            return None
        path = {"use_scaled_exp": scaled} if named else {}
        # The scaled-exp path refuses a chunk as long as the hidden size.
        chunk = 2048 if scaled and inputs.args[0].shape[-1] == 4096 else 4096

        def fn(hidden, weight, target, *, ignore_index, reduction, **_):
            return chunked_linear_cross_entropy(
                hidden, weight, target, chunk, ignore_index, reduction, **path
            )

        return fn

    return factory


def _cce(filter_eps):
    def factory(case, inputs):
        from cut_cross_entropy import linear_cross_entropy

        kwargs = inputs.kwargs
        unknown = kwargs["z_loss"] or kwargs["label_smoothing"] or kwargs["class_weight"] is not None
        if not _plain(kwargs) or unknown or kwargs["bias"] is not None:
            return None

        def fn(hidden, weight, target, *, ignore_index, softcap, reduction, **_):
            return linear_cross_entropy(
                hidden, weight, target, ignore_index, softcap, reduction, filter_eps=filter_eps
            )

        return fn

    return factory


PEERS = {
    "cce": _cce("high"),  # as installed: small gradients are left out
    "cce_exact": _cce(None),
    "aten": _aten,
    "liger": _liger(None),
    "liger_fp32": _liger(torch.float32),
    "quack": _quack(False),
    "quack_scaled": _quack(True),
}
