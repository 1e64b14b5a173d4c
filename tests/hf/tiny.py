"""Tiny random models of the families under test, and what to compare of them."""

import copy
import io

import torch
import transformers
from torch.overrides import TorchFunctionMode

from tigon.integrations.transformers import apply

VOCABULARY = 97
SHARED = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHARED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SHARED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
HEAD_DIM = {"head_dim": 8}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama_bias_tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", HEAD_DIM),
    "gemma": ("Gemma", HEAD_DIM),
    "gemma2": ("Gemma2", {**HEAD_DIM, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5}),
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "olmo2": ("Olmo2", {}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"},
    ),
}


def config(family: str = "llama", **changes):
    """The configuration of a tiny model."""
    prefix, own = FAMILIES[family]
    return getattr(transformers, f"{prefix}Config")(**{**SHARED, **own, **changes})


def make(family: str = "llama", *, device=None, dtype=torch.float32, seed=0, **changes):
    """A tiny random model in training mode; its norms are no identities."""
    torch.manual_seed(seed)
    prefix = FAMILIES[family][0]
    model = with_uneven_norms(getattr(transformers, f"{prefix}ForCausalLM")(config(family, **changes)))
    return model.to(device=device or torch.get_default_device(), dtype=dtype)


def with_uneven_norms(model):
    """The model in training mode; its norms are no identities."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of a layer


def adapted(model, **options):
    """PEFT's model around it, of adapters that are not zero."""
    import peft

    torch.manual_seed(5)
    options = {"r": 4, "target_modules": LINEARS, "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options)).train()


def batch(device="cpu", rows=2, tokens=11, seed=1, masked=0.25):
    """Token ids and labels, some of them masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator, device="cpu")
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator, device="cpu") < masked, -100)
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def trainer_options(folder, **changes) -> dict:
    """Arguments of transformers' Trainer, and of those made from it, for a few steps on the CPU."""
    options = {"output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 3, "report_to": []}
    options |= {"learning_rate": 1e-2, "seed": 1, "use_cpu": True, "save_strategy": "no"}
    return options | {"logging_steps": 1, "disable_tqdm": True} | changes


def word_tokenizer():
    """A tokenizer of the words w0 to w96, split at spaces."""
    import tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    level = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=level, **special)


def own_loss(model, inputs):
    return model(**inputs).loss


def step(model, inputs, loss_of=own_loss, seed=None) -> tuple[torch.Tensor, dict]:
    """Loss and every gradient of one step."""
    if seed is not None:
        torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, inputs)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def double(model):
    """An fp64 twin of a stock model."""
    return copy.deepcopy(model).double()


class InDouble(TorchFunctionMode):
    """Casts to float32 become casts to float64: a formula in fp64, whatever it casts."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def assert_as_good(got, stock, exact, floor, what=""):
    """The house rule: at most twice stock's error against fp64, in the Euclidean norm."""
    error = (got.double() - exact).norm().item()
    allowed = 2 * (stock.double() - exact).norm().item() + floor * exact.norm().item()
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def assert_all_as_good(got, stock, exact, ulps=2.0):
    """Results and gradients, in one order, under the house rule; in stock's shapes and dtypes."""
    for i, (one, other, right) in enumerate(zip(got, stock, exact, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), f"result {i}"
        assert_as_good(one, other, right, ulps * torch.finfo(one.dtype).eps, f"result {i}")


def assert_step_as_good(got, stock, exact, places, ulp=2.0**-23):
    """Loss and all gradients of a step under the house rule.

    Where stock's own error happens to vanish a floor stands in: each of the replaced places may
    round once differently, by one unit in the last place.
    """
    assert got[1].keys() == stock[1].keys()
    assert_as_good(got[0], stock[0], exact[0], places * ulp, "loss")
    for name, grad in exact[1].items():
        assert_as_good(got[1][name], stock[1][name], grad, places * ulp, name)


def close(got, stock, ulps=64.0):
    """Equal within the rounding of fp32 sums in another order: tensors, or sequences or mappings of them."""
    torch.testing.assert_close(got, stock, rtol=ulps * 2.0**-23, atol=ulps * 2.0**-23)


def same(got, wanted, ulps=256.0):
    """Two steps: one loss, the same parameters' gradients."""
    close(got[0], wanted[0], ulps=min(ulps, 64.0))
    close(got[1], wanted[1], ulps=ulps)


def unequal(got, wanted) -> list[str]:
    """What two steps do not have in common to the bit, by name."""
    (loss, gradients), (other, others) = got, wanted
    shared = gradients.keys() & others.keys()
    names = gradients.keys() ^ others.keys() | {n for n in shared if not torch.equal(gradients[n], others[n])}
    return ["loss"] * (not torch.equal(loss, other)) + sorted(names)


def same_bits(got, wanted):
    """Two steps: one loss, the same gradients, to the bit."""
    found = unequal(got, wanted)
    assert not found, found


def attributes(model):
    """What each module holds, by its path."""
    return {path: dict(vars(module)) for path, module in model.named_modules()}


def loaded(model):
    """The model through a file."""
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def report_of(model):
    """The report of a patched model, whoever called `apply`."""
    return model._tigon_state.report


def apply_around(change, model, when, **slots):
    """What a change makes of a model that is patched before or after it, and the report."""
    report = apply(model, **slots) if when == "before" else None
    model = change(model)
    return model, apply(model, **slots) if when == "after" else report


def apply_as_stock(model, inputs, ulps=256.0, **slots):
    """The report of `apply`; a step of the model is what it was before."""
    wanted = step(model, inputs)
    report = apply(model, **slots)
    same(step(model, inputs), wanted, ulps)
    return report
