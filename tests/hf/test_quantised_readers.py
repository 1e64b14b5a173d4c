"""tigon.dequantize of modules: bit for bit what the libraries make of their own weights."""

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
    elif strategy == "tensor":
        weight = weight.view(1, -1)
    elif "group" in strategy:
        weight = weight.unflatten(1, (-1, weights["group_size"]))
    least, most = (bound(-1, strategy == "channel") for bound in (weight.amin, weight.amax))
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


def words_of(codes, bits, order=None):
    """Codes along the last dimension in int32, the low bits first, in an order within a word."""
    many = 32 // bits
    codes = codes.unflatten(-1, (-1, many))[..., order or list(range(many))]
    words = (codes << torch.arange(0, 32, bits, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def library_class(name, of, bases=(nn.Module,), forward_name="forward", **members):
    """A class as the library writes it, with a forward that is not to be called."""

    def forward(self, x):
        raise AssertionError("the library's forward ran")

    forward.__module__, forward.__qualname__ = of, f"{name}.{forward_name}"
    return type(name, bases, {"__module__": of, "forward": forward, **members})


def packed(method, bits, of_order, device, dtype=torch.float16, sizes=(64, 96, 32)):
    """A layer of gptqmodel [K, N] made by hand, and its weight [N, K] from float64."""
    inputs, outputs, group = sizes
    codes = torch.randint(2**bits, (inputs, outputs), device=device)
    zeros = torch.randint(2**bits, (inputs // group, outputs), device=device)
    scales = (torch.rand(zeros.shape, device=device) / 100 + 1e-3).to(dtype)
    of = torch.arange(inputs, device=device) // group
    of = of[torch.randperm(inputs, device=device)] if of_order else of
    linear = library_class("TorchLinear" if method == "gptq" else "AwqTorchLinear", "gptqmodel.nn")()
    linear.__dict__ |= {"bits": bits, "planar": False, "adapter": None, "group_size": group}
    linear.in_features, linear.out_features, linear.compute_dtype = inputs, outputs, torch.float16
    order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "awq" else None
    held = {
        "qweight": words_of(codes, bits, order) if order else words_of(codes.T, bits).T.contiguous(),
        "qzeros": words_of(zeros, bits, order),
        "scales": scales,
        "g_idx": of.int(),
        "bias": torch.randn(outputs, device=device, dtype=dtype),
    }
    for name, tensor in held.items():
        linear.register_buffer(name, tensor)
    weight = (codes - zeros[of]).double() * scales.double()[of]
    return linear, weight.to(dtype).T.contiguous()


PACKED = [("gptq", bits, order) for bits in (2, 4, 8) for order in (False, True)] + [("awq", 4, False)]


@pytest.mark.parametrize("method,bits,order", PACKED)
def test_gptqmodel_as_the_formats_are_written(method, bits, order, device):
    """Bit for bit as gptqmodel 7.7 has it, which dequantises to the dtype of the scales."""
    for dtype in (torch.float16, torch.bfloat16):
        linear, want = packed(method, bits, order, device, dtype)
        assert torch.equal(tigon.dequantize(linear, dtype=dtype), want)
        assert torch.equal(tigon.dequantize(linear, dtype=torch.float32), want.float())
    other, want = packed(method, bits, method == "gptq", device, dtype)
    linear.load_state_dict(other.state_dict())  # into the same tensors, with another order
    assert torch.equal(tigon.dequantize(linear, dtype=dtype), want)


@pytest.mark.parametrize("method,bits,order", PACKED)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_adapters_around_gptqmodel(method, bits, order, dtype, device):
    """The step is that of the dequantised weight, though the forward of the library is not called."""
    of_peft = pytest.importorskip(f"peft.tuners.lora.{method}", reason="needs peft")
    import peft

    torch.manual_seed(3)
    linear, weight = packed(method, bits, order, device)
    plain = nn.Linear(64, 96, device=device, dtype=dtype)
    plain.weight, plain.bias = frozen(weight.to(dtype)), frozen(linear.bias.to(dtype))
    config = peft.LoraConfig(target_modules=["q"], init_lora_weights=False)
    wrapper = of_peft.GPTQLoraLinear if method == "gptq" else of_peft.AwqLoraLinear
    layers = [wrapper(linear, "default", config, r=4), peft.tuners.lora.Linear(plain, "default", config, r=4)]
    layers[1].load_state_dict({k: v for k, v in layers[0].state_dict().items() if "lora_" in k}, strict=False)
    for name, p in layers[0].named_parameters():
        if "lora_" in name:
            p.data = p.data.to(dtype)  # PEFT takes that of the scales
    results = []
    x = torch.randn(5, 64, device=device, dtype=dtype)
    for layer in layers:
        layer.to(device)
        assert tigon.apply(nn.ModuleDict({"q": layer})).count("lora") == 1
        rows = x.clone().requires_grad_()
        y = layer(rows)
        y.float().square().sum().backward()
        assert y.dtype == dtype
        results.append([y, rows.grad, *(p.grad for n, p in layer.named_parameters() if "lora_" in n)])
    assert all(map(torch.equal, *results))


def test_hqq_by_its_own_dequantisation(device):
    """The class's forward is one of several, by its backend's name; another one is not taken."""
    weight = torch.randn(96, 64, device=device)
    members = {"dequantize": lambda self: weight.half(), "ready": True}
    kind = library_class("HQQLinear", "hqq.core.quantize", forward_name="forward_pytorch_backprop", **members)
    assert torch.equal(tigon.dequantize(kind(), dtype=torch.float32), weight.half().float())
    for forward_name, ready in (("forward", True), ("forward_pytorch", False)):
        members["ready"] = ready
        other = library_class("HQQLinear", "hqq.core.quantize", forward_name=forward_name, **members)
        with pytest.raises(tigon.Error, match="a quantised Linear that tigon reads, got HQQLinear"):
            tigon.dequantize(other())


def test_layers_that_cannot_be_read_are_named(device):
    peft = pytest.importorskip("peft", reason="needs peft")
    from peft.tuners.lora.gptq import GPTQLoraLinear

    config = peft.LoraConfig(target_modules=["q"])
    linear, _ = packed("gptq", 4, False, device)
    linear.planar = True  # another order of bits
    marlin = library_class("MarlinLinear", "gptqmodel.nn")()
    marlin.__dict__ |= vars(packed("gptq", 4, False, device)[0])
    for base, words in ((linear, "TorchLinear, holds no codes"), (marlin, "backend='auto_trainable'")):
        model = nn.ModuleDict({"q": GPTQLoraLinear(base, "default", config, r=4)})
        with pytest.raises(tigon.Error, match=words):  # there is nothing else in the model
            tigon.apply(model)
        with pytest.raises(tigon.Error, match=f"tigon reads, got {type(base).__name__}"):
            tigon.dequantize(base)


def test_torchao_weights_without_a_dequantisation_are_not_read():
    """As Int4TilePackedTo4dTensor: torch.Tensor.dequantize is for PyTorch's own quantised tensors."""
    kind = type("Int4TilePackedTo4dTensor", (torch.Tensor,), {"__module__": "torchao.quantization"})
    linear = nn.Linear(64, 96)
    linear._parameters["weight"] = linear.weight.detach().as_subclass(kind)
    with pytest.raises(tigon.Error, match="that tigon reads, got Linear"):
        tigon.dequantize(linear)


def test_adapters_of_packed_experts_are_refused():
    """gpt-oss's experts in MXFP4: PEFT would size its adapters by the bytes, and add them to these."""
    peft = pytest.importorskip("peft", reason="needs peft")
    module = pytest.importorskip("transformers.integrations.mxfp4", reason="needs Mxfp4GptOssExperts")
    sizes = SimpleNamespace(num_local_experts=4, intermediate_size=48, hidden_size=64)
    model = nn.ModuleDict({"experts": module.Mxfp4GptOssExperts(sizes), "norm": nn.RMSNorm(64)})
    codes = model["experts"].gate_up_proj
    model["experts"].gate_up_proj = frozen(codes.flatten(2))  # of four dimensions until transformers 5.17
    config = peft.LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"])
    model = peft.inject_adapter_in_model(config, model)
    with pytest.raises(tigon.Error, match="got gate_up_proj of torch.uint8.*dequantize=True"):
        tigon.apply(model)
