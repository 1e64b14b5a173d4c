"""tigon.dequantize of modules: bit for bit what the libraries make of their own weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tigon

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="needs FP8Linear")
E4M3 = torch.float8_e4m3fn


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("sizes", [(256, 384), (130, 200), (64, 48)])
@pytest.mark.parametrize("scales", ["float32", "ue8m0", "one"])
def test_fp8_linear(sizes, scales, device):
    block = None if scales == "one" else (128, 128)
    linear = fp8.FP8Linear(*reversed(sizes), block, scale_fmt="ue8m0" if scales == "ue8m0" else "float").to(
        device
    )
    linear.weight = frozen(torch.randn(sizes, device=device).to(E4M3))
    made = torch.rand(linear.weight_scale_inv.shape, device=device) / 50
    linear.weight_scale_inv = frozen(made.to(linear.weight_scale_inv.dtype))
    wide = linear.weight_scale_inv.float()
    if block is not None:
        wide = wide.repeat_interleave(128, 0)[: sizes[0]].repeat_interleave(128, 1)[:, : sizes[1]]
    want = linear.weight.float() * wide
    if hasattr(fp8, "_dequantize_fp8_weight"):  # the library's own, which older versions do not have
        of_library = fp8._dequantize_fp8_weight(linear.weight, linear.weight_scale_inv, block, torch.float32)
        assert torch.equal(want, of_library)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(tigon.dequantize(linear, dtype=dtype), want.to(dtype))
    linear.weight = frozen(want)  # as if it was loaded with dequantize=True
    with pytest.raises(tigon.Error, match="a quantised Linear that tigon reads, got FP8Linear"):
        tigon.dequantize(linear)


def test_a_subclass_with_a_forward_of_its_own_is_not_read():
    grouped = (
        fp8.FP8GroupedLinear(64, 64, 2, block_size=(32, 32)) if hasattr(fp8, "FP8GroupedLinear") else None
    )
    if grouped is not None:
        with pytest.raises(tigon.Error, match="got FP8GroupedLinear"):
            tigon.dequantize(grouped)


def test_rows_of_scales(device):
    """CompressedTensorsFP8Linear keeps (1, N), FbgemmFp8Linear (N, 1)."""
    module = pytest.importorskip("transformers.integrations.compressed_tensors")
    if not hasattr(module, "CompressedTensorsFP8Linear"):
        pytest.skip("needs CompressedTensorsFP8Linear")
    linear = module.CompressedTensorsFP8Linear(48, 64).to(device)
    linear.weight = frozen(torch.randn(64, 48, device=device).to(E4M3))
    linear.weight_scale = frozen(torch.rand(1, 64, device=device))
    want = linear.weight.float() * linear.weight_scale.T
    assert torch.equal(tigon.dequantize(linear, dtype=torch.float32), want)


FLOAT8, INT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int", "strategy": "group"}
FLOAT4 = {"num_bits": 4, "type": "float"}
SCHEMES = {
    "rows": (FLOAT8 | {"strategy": "channel"}, FLOAT8 | {"strategy": "token", "dynamic": True}),
    "blocks": (
        FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
        FLOAT8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "one": (FLOAT8 | {"strategy": "tensor"}, FLOAT8 | {"strategy": "token", "dynamic": True}),
    "int8": (
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    ),
    "int4": (INT4 | {"group_size": 128}, None),
    "int4 with zeros": (INT4 | {"group_size": 64, "symmetric": False}, None),
    "nvfp4": (FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3}, None),
    "mxfp4": (FLOAT4 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, None),
}


def compressed(name, device):
    """A Linear that compressed-tensors has compressed, and its weight as it decompresses it."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs compressed-tensors")
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization.utils import calculate_qparams

    weights, inputs = SCHEMES[name]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    model = nn.ModuleDict({"q": nn.Linear(256, 128)}).to(device, torch.bfloat16)
    quantization.apply_quantization_config(
        model, quantization.QuantizationConfig(config_groups={"all": scheme})
    )
    linear, strategy = model["q"], weights["strategy"]
    weight = linear.weight.data
    if strategy == "block":
        weight = weight.view(1, 128, 2, 128).transpose(1, 2).flatten(2)
    elif "group" in strategy:
        weight = weight.unflatten(1, (-1, weights["group_size"]))
    least, most = (
        (weight.amin(-1), weight.amax(-1))
        if strategy in ("block", "group", "tensor_group")
        else (
            (weight.amin().view(1), weight.amax().view(1))
            if strategy == "tensor"
            else (weight.amin(1, True), weight.amax(1, True))
        )
    )
    divisor = None
    if name == "nvfp4":
        divisor = (448 * 6 / weight.abs().max().float()).view(1)
        linear.weight_global_scale.data.copy_(divisor)
    scales, zeros = calculate_qparams(least, most, scheme.weights, global_scale=divisor)
    linear.weight_scale.data.copy_(scales)
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data.copy_(zeros)
    compress_module(linear)
    dense = copy.deepcopy(linear)
    decompress_module(dense)
    return model, dense


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name, device):
    model, dense = compressed(name, device)
    assert torch.equal(tigon.dequantize(model["q"]), dense.weight)


@pytest.mark.parametrize("name", ["rows", "int8"])
def test_adapters_around_compressed_tensors(name, device):
    """Its forward, which it binds to the module, is no reason to leave the layer."""
    peft = pytest.importorskip("peft", reason="needs peft")
    model, dense = compressed(name, device)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q"]))
    assert tigon.apply(model).count("lora") == 1
    x = torch.randn(3, 256, device=device, dtype=torch.bfloat16)
    y = model.base_model.model["q"](x)
    assert torch.equal(y, nn.functional.linear(x, dense.weight, dense.bias))


def test_packed_zeros_as_the_format_has_them(device):
    """int4 of compressed-tensors without the library: eight codes a word, low bits first, stored plus 8."""
    codes = torch.randint(-8, 8, (16, 64), device=device)
    zeros = torch.randint(-8, 8, (16, 2), device=device)
    shifts = torch.arange(0, 32, 4, device=device)
    words = ((codes + 8).unflatten(1, (8, 8)) << shifts).sum(-1)
    of_zeros = ((zeros + 8).unflatten(0, (2, 8)) << shifts[:, None]).sum(1)
    linear = nn.Linear(64, 16, bias=False, device=device)
    del linear.weight
    to_int32 = lambda t: torch.where(t >= 2**31, t - 2**32, t).int()  # noqa: E731
    linear.weight_packed, linear.weight_zero_point = frozen(to_int32(words)), frozen(to_int32(of_zeros))
    linear.weight_scale = frozen(torch.rand(16, 2, device=device).bfloat16())
    args = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    linear.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(**args))
    wide = [t.repeat_interleave(32, 1) for t in (zeros, linear.weight_scale.float())]
    assert torch.equal(tigon.dequantize(linear, dtype=torch.float32), (codes - wide[0]) * wide[1])
    linear.weight_g_idx = frozen(torch.zeros(64, dtype=torch.int32))  # permuted columns
    with pytest.raises(tigon.Error, match="a quantised Linear that tigon reads"):
        tigon.dequantize(linear)
