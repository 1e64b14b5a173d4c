"""The slot `lora` around quantised bases: dequantised once a direction, one weight at a time, and exact."""

import copy
import gc
import importlib.util
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny import adapted, apply_as_stock, batch, close, make, step
from torch import nn

import tigon
from tigon.integrations.transformers import apply
from tigon.integrations.transformers import lora as slot

peft = pytest.importorskip("peft", reason="needs peft")

LAYERS = 14
OPTIONS = {"plain": {}, "dora": {"use_dora": True}, "dropout": {"lora_dropout": 0.3}}


def nf4(linear):
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    made = bnb.nn.Linear4bit(
        *linear.weight.T.shape,
        bias=linear.bias is not None,
        quant_type="nf4",
        compute_dtype=linear.weight.dtype,
    )
    made.weight = bnb.nn.Params4bit(
        linear.weight.detach(), requires_grad=False, quant_type="nf4", compress_statistics=True, blocksize=64
    )
    made.bias = linear.bias
    return made.to(linear.weight.device)


def int8(linear):
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    made = bnb.nn.Linear8bitLt(*linear.weight.T.shape, bias=linear.bias is not None, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False)
    made.bias = linear.bias
    return made.to(linear.weight.device)


def torchao(linear):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    return linear


def fp8(linear):
    """transformers' Linear of float8 in blocks; 48 is no multiple of 20."""
    kind = pytest.importorskip(
        "transformers.integrations.finegrained_fp8", reason="needs FP8Linear"
    ).FP8Linear
    made = kind(*reversed(linear.weight.shape), block_size=(20, 20), has_bias=linear.bias is not None)
    made.weight = nn.Parameter(linear.weight.detach().mul(30).to(torch.float8_e4m3fn), requires_grad=False)
    scales = torch.rand(made.weight_scale_inv.shape, device=made.weight.device) / 20 + 0.01
    made.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    made.bias = linear.bias
    return made


def compressed(linear):
    """compressed-tensors' Linear, by hand: codes of int8 and a scale for each row."""
    scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    linear.weight = nn.Parameter(
        (linear.weight.detach() / scales).round().to(torch.int8), requires_grad=False
    )
    linear.weight_scale = nn.Parameter(scales, requires_grad=False)
    args = {"type": "int", "num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": True}
    linear.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(**args))
    return linear


KINDS = {"nf4": nf4, "int8": int8, "torchao": torchao, "fp8": fp8, "compressed": compressed}
READ = ("nf4", "int8", "torchao")  # by PEFT too


def adapted_model(quantise, device, dtype=torch.float32, before=lambda model: None, **options):
    """A model of quantised bases with adapters, and the same of plain bases with the dequantised weights."""
    model = make("llama_bias_tied", device=device, dtype=dtype)
    plain = copy.deepcopy(model)
    for path, module in list(plain.named_modules()):
        if not isinstance(module, nn.Linear) or path == "lm_head":
            continue
        quantised = quantise(copy.deepcopy(module))
        model.set_submodule(path, quantised)
        module.weight.data.copy_(tigon.dequantize(quantised, dtype=module.weight.dtype))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = quantise is nf4, quantise is int8
    before(model)
    found = [adapted(one, target_modules="all-linear", **options) for one in (model, plain)]
    adapters = {n: p for n, p in found[0].named_parameters() if "lora_" in n}
    with torch.no_grad():  # DoRA's magnitudes as well
        for name, parameter in found[1].named_parameters():
            if name in adapters:
                parameter.copy_(adapters[name])
    return found


@pytest.fixture
def made(monkeypatch):
    """How many weights were dequantised; two of them at a time fail."""
    alive, count = [], []
    original = slot._dequantised

    def watched(*args):
        make = original(*args)

        def dequantise():
            assert not [one for one in alive if one() is not None], "another dequantised weight is alive"
            weight = make()
            alive[:] = [weakref.ref(weight)]
            count.append(1)
            return weight

        return dequantise

    monkeypatch.setattr(slot, "_dequantised", watched)
    return count


@pytest.mark.parametrize("kind, what", [(k, o) for k in KINDS for o in OPTIONS if k in READ or o != "dora"])
def test_as_with_the_dequantised_weights(kind, what, device, made):
    model, plain = adapted_model(KINDS[kind], device, **OPTIONS[what])
    inputs = batch(device)
    report = apply(model)
    apply(plain)
    assert report.count("lora") == LAYERS
    wanted = step(plain, inputs, seed=3)
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    assert len(made) == LAYERS
    loss.backward()
    assert len(made) == 2 * LAYERS
    close(loss.detach(), wanted[0], ulps=512)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            close(parameter.grad, wanted[1][name], ulps=1024)


def test_as_peft_computes_nf4(device):
    """bitsandbytes dequantises for its own matmul too: the same numbers."""
    model, _ = adapted_model(nf4, device)
    apply_as_stock(model, batch(device), ulps=1024)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_dequantised_is_kept(kind, device):
    """Between forward and backward no tensor of the size of a weight is there but the quantised ones."""
    model, _ = adapted_model(KINDS[kind], device)
    apply(model)

    def tensors():
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]  # asks no dead weak proxy

    before = {id(o) for o in tensors()}
    loss = model(**batch(device)).loss
    shapes = {
        (layer.out_features, layer.in_features) for layer in model.modules() if hasattr(layer, "lora_A")
    }
    new = [o for o in tensors() if id(o) not in before]
    assert not [o.shape for o in new if tuple(o.shape) in shapes and o.dtype.is_floating_point]
    loss.backward()


@pytest.mark.parametrize("late", [False, True])
def test_what_peft_does_with_codes_is_refused(late, device):
    """DoRA's lengths would be those of codes; an adapter of a parameter would be added to codes.

    So where adapters come after `apply` too, by every forward.
    """
    before = apply if late else lambda model: None

    def refused(model, message):
        for _ in range(2):
            with pytest.raises(tigon.Error, match=message):
                model(**batch(device)) if late else apply(model)

    model, _ = adapted_model(compressed, device, before=before, use_dora=True)
    refused(model, "DoRA must be around a base that PEFT dequantises, got Linear")
    model = make(device=device)
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(torch.ones(1, 1, device=device), requires_grad=False)
    before(model)
    model = peft.get_peft_model(model, peft.LoraConfig(target_parameters=["down_proj.weight"]))
    refused(model, "target_parameters must name parameters that are not quantised")


def test_a_4_bit_base_computes_in_its_own_dtype(device, made):
    """float32 activations outside of autocast: matmuls in bfloat16, a result in float32."""
    model, _ = adapted_model(nf4, device)
    layer = model.base_model.model.model.layers[0].self_attn.o_proj
    layer.base_layer.compute_dtype = torch.bfloat16
    apply(model)
    x = torch.randn(3, 5, 32, device=device)
    y = layer(x)
    assert y.dtype == torch.float32 and len(made) == 1
    assert torch.equal(y, y.bfloat16().float())


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is here")
def test_without_the_library_nothing_is_asked_of_it(device):
    """A plain model needs none of them."""
    model = peft.get_peft_model(make(device=device), peft.LoraConfig(target_modules=["q_proj"]))
    assert apply(model).count("lora") == 2
    model(**batch(device)).loss.backward()
