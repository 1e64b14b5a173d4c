"""Random lives of small models: what is done to a patched one is done to its stock twin, and both stay equal.

A life is a dozen acts: calls of many forms, and what programs do to models between calls. `tests/fuzz.py`
draws lives as rounds of the kind ``model``.
"""

import contextlib
import copy
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn

sys.path += [str(Path(__file__).parent / "hf"), str(Path(__file__).parents[1] / "tools")]

import peft
from graph_recorder import recording
from tiny import FAMILIES, VOCABULARY, loaded, make
from tiny_config import tiny_config

import tigon

TYPES = ("falcon_h1", "gpt_oss", "nemotron", "smollm3", "olmo3", "cohere2", "glm4", "gpt2", "deepseek_v3")
NAMES = [*FAMILIES, *TYPES]
REFUSED = "graphs=False"  # what an error recommends for calls that graphs do not take
ACTS = 12
device = "cpu"  # of the models; tests/fuzz.py sets it


def made(name: str) -> nn.Module:
    """A model of two layers at the most, in training mode."""
    if name in FAMILIES:
        return make(name)
    torch.manual_seed(0)
    config = tiny_config(transformers.CONFIG_MAPPING[name]())
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):  # a graph draws for the padding too
            part.p = 0.0
    return model


def drawn_batch(draw: random.Random, model, sizes: list[tuple[int, int]], left: bool) -> dict:
    """Arguments of a call. Padding is on the left, where no token sees another, or on the right."""
    words = min(VOCABULARY, model.config.get_text_config().vocab_size)
    rows, tokens = draw.choice(sizes)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    ids = torch.randint(3, words, (rows, tokens), generator=generator)
    masked = draw.choices((0.0, 0.3, 1.0), (6, 6, 1))[0]
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < masked, -100)
    inputs = {"input_ids": ids, "labels": labels}
    if draw.random() < 0.3:
        inputs["attention_mask"] = torch.ones_like(ids)
        padding = slice(tokens // 3) if left else slice(tokens - tokens // 3, None)
        inputs["attention_mask"][0, padding] = 0
        if not left:  # what is computed of them is any number
            labels[0, padding] = -100
    if draw.random() < 0.2:
        inputs["position_ids"] = torch.arange(tokens).expand(rows, -1) + draw.choice((0, 2))
    if draw.random() < 0.2:
        inputs["num_items_in_batch"] = draw.choice((3, torch.tensor(7)))
    if draw.random() < 0.2:
        inputs["use_cache"] = draw.random() < 0.5
    if draw.random() < 0.2:
        inputs["output_hidden_states"] = True
    if draw.random() < 0.2:
        inputs["return_dict"] = False
    return inputs


# Losses of a program's own.
def shifted(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")


def log_probs(logits, labels):
    log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    return (log_p.squeeze(-1) * (labels >= 0)).sum()


def scaled(logits, labels):
    return shifted(logits / 0.7, labels)


def counted_rows(logits, labels):
    rows = labels >= 0
    return F.cross_entropy(logits[rows], labels[rows], reduction="sum")


def in_place(logits, labels):
    logits.div_(2.0)
    return shifted(logits, labels)


def masked_in_place(logits, labels):
    view = logits[:, :-1]
    logits[..., :5] = -30.0
    return F.cross_entropy(view.reshape(-1, view.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum")


def entropies(logits, labels):
    p = logits.softmax(-1)
    return -(p * p.clamp(min=1e-9).log()).sum(-1)[labels >= 0].sum()


def largest(logits, labels):
    rows = logits[labels >= 0]
    return rows.amax(-1).detach().sum() + rows.logsumexp(-1).sum()


LOSSES = (shifted, log_probs, scaled, counted_rows, in_place, masked_in_place, entropies, largest)


class Life:
    """A stock model and its patched twin."""

    def __init__(self, name: str, draw: random.Random):
        self.draw, self.log = draw, []
        stock = made(name).to(device)
        self.models = [stock, copy.deepcopy(stock)]
        self.options = {"qk_norm": draw.random() < 0.3, "lazy_logits": draw.random() < 0.6}
        if draw.random() < 0.15:
            self.options["recompute"] = draw.choice(("norms", "elementwise"))
        self.sizes = [
            (draw.choice((1, 2, 3)), draw.choices((1, 5, 8, 13), (1, 5, 5, 5))[0]) for _ in range(6)
        ]
        self.calls = CALLS
        if draw.random() < 0.3:  # which are made of calls that come again
            self.options["graphs"] = True
            self.sizes, self.calls = self.sizes[:1] * 6 + self.sizes[1:2], CALLS + STEPS * 3
        tigon.apply(self.models[1], **self.options)

    def batch(self) -> dict:
        left = "graphs" not in self.options  # which pad rows to longer ones
        inputs = drawn_batch(self.draw, self.models[0], self.sizes, left)
        return {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
        }

    # --- acts between calls: each gives a function of a model, to be called with both ---------------------

    def path(self, kind: type = nn.Module) -> str:
        modules = self.models[0].named_modules()
        found = [path for path, module in modules if path and isinstance(module, kind)]
        found = [path for path in found if "parametrizations" not in path]
        self.log[-1] += f" {(path := self.draw.choice(found))}"
        return path

    def apply_again(self):
        options = self.options

        def act(model):
            if model is self.models[1]:
                tigon.apply(model, **options)

        return act

    def undo_and_apply(self):
        options = self.options

        def act(model):
            if model is self.models[1]:
                tigon.undo(model)
                tigon.apply(model, **options)

        return act

    def mode(self):
        train = self.draw.random() < 0.7
        return lambda model: [model.train(train)]

    def freeze(self):
        path, on = self.path(), self.draw.random() < 0.5
        return lambda model: [model.get_submodule(path).requires_grad_(on)]

    def thaw(self):
        return lambda model: [model.requires_grad_(True)]

    def checkpointing(self):
        on, reentrant = self.draw.random() < 0.6, self.draw.random() < 0.3

        def act(model):
            if on:
                options = {"use_reentrant": reentrant}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            else:
                model.gradient_checkpointing_disable()

        return act

    def copied(self):
        return copy.deepcopy

    def pickled(self):
        return loaded

    def loaded(self):
        by = self.draw.choice((0.9, 1.1))
        assign = self.draw.random() < 0.3

        def act(model):
            state = {
                key: value * by if value.is_floating_point() else value
                for key, value in model.state_dict().items()
            }
            model.load_state_dict(state, assign=assign)

        return act

    def update(self):
        rate = self.draw.choice((0.01, 0.1))

        def act(model):
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= rate * p.grad / (1 + p.grad.norm())
                if model is self.models[1]:  # roundings do not add up over a life
                    for ours, stock in zip(model.parameters(), self.models[0].parameters(), strict=True):
                        ours.copy_(stock)

        return act

    def hook(self):
        path, kind = self.path(), self.draw.choice(("forward", "pre", "backward"))
        by = self.draw.choice((0.8, 1.25))

        def times(value):
            if isinstance(value, tuple):
                return tuple(times(one) for one in value)
            return value * by if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        def act(model):
            module = model.get_submodule(path)
            if kind == "forward":
                module.register_forward_hook(lambda _, args, y: times(y))
            elif kind == "pre":
                module.register_forward_pre_hook(lambda _, args: times(args))
            else:
                module.register_full_backward_hook(lambda _, dx, dy: times(dx))

        return act

    def wrapped(self):
        path, by = self.path(), self.draw.choice((0.8, 1.25))

        def act(model):
            module = model.get_submodule(path)
            inner = module.forward

            def forward(*args, **kwargs):
                y = inner(*args, **kwargs)
                return y * by if isinstance(y, torch.Tensor) else y

            module.forward = forward

        return act

    def replaced(self):
        path = self.path()

        def act(model):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, copy.deepcopy(model.get_submodule(path)))

        return act

    def inside(self):
        """A module in a Sequential, as wrappers of quantisation and offloading do."""
        path = self.path((nn.Linear, nn.Embedding, nn.Dropout))

        def act(model):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Sequential(model.get_submodule(path)))

        return act

    def shared(self):
        """Two modules of one kind become one."""
        path = self.path((nn.Linear, nn.ModuleList))
        other = path.replace(".0.", ".1.")

        def act(model):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, model.get_submodule(other))

        return act

    def new_parameter(self):
        path, frozen = self.path(), self.draw.random() < 0.3

        def act(model):
            module = model.get_submodule(path)
            for name, p in list(module._parameters.items()):
                if p is not None:
                    setattr(module, name, nn.Parameter(p.detach() * 1.1, requires_grad=not frozen))

        return act

    def new_bias(self):
        path = self.path(nn.Linear)

        def act(model):
            module = model.get_submodule(path)
            module.bias = nn.Parameter(
                torch.linspace(-0.1, 0.1, module.weight.shape[0], dtype=module.weight.dtype)
            )

        return act

    def other_class(self):
        path = self.path()

        def act(model):
            module = model.get_submodule(path)
            kind = type(module)

            def forward(self, *args, **kwargs):
                y = kind.forward(self, *args, **kwargs)
                return y * 1.1 if isinstance(y, torch.Tensor) else y

            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})

        return act

    def setting(self):
        name, value = self.draw.choice(
            (
                ("output_hidden_states", True),
                ("output_attentions", True),
                ("use_cache", False),
                ("return_dict", False),
                ("logits_scaling", 2.0),
                ("final_logit_softcapping", 5.0),
                ("vocab_size", None),
            )
        )

        def act(model):
            config = model.config
            if value is not None and hasattr(config, name):
                setattr(config, name, value)

        return act

    def resized(self):
        extra = self.draw.choice((-3, 7, 8))

        def act(model):
            size = model.get_input_embeddings().weight.shape[0]
            model.resize_token_embeddings(size + extra, mean_resizing=False)
            with torch.no_grad():  # new rows are drawn
                for part in (model.get_input_embeddings(), model.get_output_embeddings()):
                    part.weight[size:] = 0.01

        return act

    def tied(self):
        def act(model):
            model.get_output_embeddings().weight = model.get_input_embeddings().weight

        return act

    def dtype(self):
        to = self.draw.choice((torch.float64, torch.float32))
        return lambda model: [model.to(to)]

    def adapter(self):
        options = {"r": self.draw.choice((1, 4)), "target_modules": "all-linear", "init_lora_weights": False}
        options |= {"use_dora": self.draw.random() < 0.3, "use_rslora": self.draw.random() < 0.3}
        if self.draw.random() < 0.5:
            options["target_modules"] = self.draw.sample(
                ["q_proj", "v_proj", "down_proj", "lm_head", "o_proj"], 2
            )
        seed, name = self.draw.randrange(2**31), f"a{len(self.log)}"

        def act(model):
            torch.manual_seed(seed)
            if isinstance(model, peft.PeftModel):
                model.add_adapter(name, peft.LoraConfig(**options))
                model.set_adapter(name)
                return model
            return peft.get_peft_model(model, peft.LoraConfig(**options), adapter_name=name).train()

        return act

    def adapter_state(self):
        what = self.draw.choice(
            ("merge_adapter", "unmerge_adapter", "disable_adapter_layers", "enable_adapter_layers")
        )
        return lambda model: getattr(model, what)() if isinstance(model, peft.PeftModel) else None

    def number(self):
        """Another value of a float attribute, such as a norm's epsilon or the scale of attention."""
        kinds = [
            (path, key)
            for path, module in self.models[0].named_modules()
            for key, value in vars(module).items()
            if path and isinstance(value, float) and value and not key.startswith("_")
        ]
        path, key = self.draw.choice(kinds or [("", "scale")])
        self.log[-1] += f" {path}.{key}"

        def act(model):
            module = model.get_submodule(path)
            setattr(module, key, getattr(module, key, 1.0) * 1.3)

        return act

    def parameter_hook(self):
        trained = [name for name, p in self.models[0].named_parameters() if p.requires_grad]
        path = self.draw.choice(trained or [""])
        self.log[-1] += f" {path}"
        late = self.draw.random() < 0.3

        def halve(p):
            p.grad.mul_(0.5)

        def act(model):
            p = model.get_parameter(path)
            p.register_post_accumulate_grad_hook(halve) if late else p.register_hook(lambda g: g * 0.5)

        return act

    def weight_norm(self):
        path = self.path(nn.Linear)

        def act(model):
            module = model.get_submodule(path)
            if not nn.utils.parametrize.is_parametrized(module):
                nn.utils.parametrizations.weight_norm(module)

        return act

    def layers(self):
        """Layers change places, or the last one goes."""
        path, drop = self.path(nn.ModuleList), self.draw.random() < 0.3

        def act(model):
            found = model.get_submodule(path)
            if drop and len(found) > 1:
                del found[-1]
            else:
                found[0], found[-1] = found[-1], found[0]

        return act

    # --- calls: each gives a function of a model that returns tensors by name ---------------------------

    def step(self):
        inputs = self.batch()
        also = 0.0 if "graphs" in self.options else self.draw.choice((0.0, 0.0, 0.1))
        scale = self.draw.choice((1.0, 1.0, 0.25, 3.0))

        def call(model):
            model.zero_grad()
            output = model(**inputs)
            loss, logits = (
                (output[0], output[1]) if isinstance(output, tuple) else (output.loss, output.logits)
            )
            total = loss + also * logits.float().square().mean() if also else loss
            (scale * total).backward()
            return {"loss": loss.detach()} | gradients(model)

        return call

    def own_loss(self):
        inputs = self.batch()
        labels = inputs.pop("labels")
        inputs.pop("num_items_in_batch", None)
        own = self.draw.choice(LOSSES)
        self.log[-1] += f" {own.__name__}"

        def call(model):
            model.zero_grad()
            output = model(**inputs)
            loss = own(output[0] if isinstance(output, tuple) else output.logits, labels)
            loss.backward()
            return {"loss": loss.detach()} | gradients(model)

        return call

    def embedded(self):
        """The gradient of embeddings that the caller computes."""
        inputs = self.batch()
        ids = inputs.pop("input_ids")

        def call(model):
            x = model.get_input_embeddings()(ids).detach().requires_grad_()
            output = model(inputs_embeds=x, **inputs)
            loss = loss_of(output)
            return {"loss": loss.detach(), "x": torch.autograd.grad(loss, x)[0]}

        return call

    def two_calls(self):
        """Two forwards before the backwards, in either order."""
        pair = [self.batch() for _ in range(2)]
        order = self.draw.choice((1, -1))

        def call(model):
            model.zero_grad()
            outputs = [model(**inputs) for inputs in pair]
            losses = [*map(loss_of, outputs)]
            for loss in losses[::order]:
                loss.backward()
            return {"first": losses[0].detach(), "second": losses[1].detach()} | gradients(model)

        return call

    def twice(self):
        """Two backwards of one forward."""
        inputs = self.batch()

        def call(model):
            model.zero_grad()
            output = model(**inputs)
            loss = loss_of(output)
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
            return {"loss": loss.detach()} | gradients(model)

        return call

    def functional(self):
        """A call with other parameters, as meta-learning and torch.func make it."""
        inputs = self.batch()

        def call(model):
            model.zero_grad()
            given = {name: (p * 1.05).detach() for name, p in model.named_parameters()}
            with torch.no_grad():
                output = torch.func.functional_call(model, given, (), inputs)
            return {"loss": loss_of(output).clone()}

        return call

    def evaluated(self):
        inputs = self.batch()
        keep = self.draw.choice((None, 1, 3))
        if keep and self.draw.random() < 0.5:
            del inputs["labels"]
            inputs.pop("num_items_in_batch", None)
            inputs["logits_to_keep"] = keep

        def call(model):
            with torch.no_grad():
                output = model(**inputs)
            found = [
                one
                for one in (output if isinstance(output, tuple) else [output.logits])
                if isinstance(one, torch.Tensor)
            ]
            return {f"output {i}": one.clone() for i, one in enumerate(found)}

        return call

    def generated(self):
        ids = self.batch()["input_ids"][:1]

        def call(model):
            training = model.training
            found = model.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
            model.train(training)
            return {"tokens": found.double()}

        return call

    # --- a life ------------------------------------------------------------------------------------------

    def act(self) -> None:
        kind = self.draw.choice(BETWEEN)
        self.log.append(kind.__name__)
        act = kind(self)
        results = [attempt(act, model) for model in self.models]
        if self.agree(*results):
            self.models = [
                new if isinstance(new, nn.Module) else old
                for new, old in zip(results, self.models, strict=True)
            ]

    def call(self) -> None:
        kind = self.draw.choice(self.calls)
        self.log.append(kind.__name__)
        call = kind(self)
        results = [attempt(call, model) for model in self.models]
        if self.agree(*results):
            self.compare(call, *results)

    def compare(self, call, stock: dict, ours: dict) -> None:
        """Both are near, or differ by no more than stock whose parameters are changed by roundings.

        Some lives are badly conditioned.
        """
        assert ours.keys() == stock.keys(), f"results {sorted(ours.keys() ^ stock.keys())}"
        far = [key for key in stock if not near(ours[key], stock[key], stock)]
        if not far:
            return
        twin = copy.deepcopy(self.models[0])
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1 + 2.0**-23 * torch.randn_like(p))
        rounded = attempt(call, twin)
        for key in far:
            error, allowed = ((t[key] - stock[key]).norm().item() for t in (ours, rounded))
            assert error <= 300 * allowed, f"{key}: error {error:.3g}, roundings make {allowed:.3g}"

    def agree(self, stock, ours) -> bool:
        """Whether stock did it, and the patched one too."""
        if isinstance(stock, str):
            return False  # what fails in stock may work with Tigon's kernels
        if isinstance(ours, str) and REFUSED in ours:
            return False
        assert not isinstance(ours, str), f"the patched one fails: {ours}"
        return True


def near(got: torch.Tensor, want: torch.Tensor, others: dict) -> bool:
    """Whether two results of a call are equal but for rounding; a fused head skips rows of NaN times 0."""
    if got.shape != want.shape or not want.isfinite().all():
        return got.shape == want.shape
    scale = max(t.norm().item() for t in others.values() if t.isfinite().all())
    return (got - want).norm().item() <= 1e-3 * want.norm().item() + 1e-5 * scale + 1e-8


def loss_of(output) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output.loss


def gradients(model) -> dict:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def attempt(function, model):
    """What it returns, or the text of its error."""
    try:
        torch.manual_seed(7)
        return function(model)
    except Exception as error:  # whatever a model of transformers raises
        return f"{type(error).__name__}: {error}"


BETWEEN = (Life.apply_again, Life.undo_and_apply, Life.mode, Life.freeze, Life.thaw, Life.checkpointing)
BETWEEN += (Life.copied, Life.pickled, Life.loaded, Life.update, Life.setting, Life.dtype, Life.resized)
BETWEEN += (Life.hook, Life.wrapped, Life.replaced, Life.inside, Life.shared, Life.new_parameter, Life.layers)
BETWEEN += (Life.new_bias, Life.other_class, Life.tied, Life.number, Life.parameter_hook, Life.weight_norm)
BETWEEN += (Life.adapter, Life.adapter, Life.adapter_state)
STEPS = (Life.step,) * 4
CALLS = (Life.own_loss, Life.own_loss, Life.embedded, Life.two_calls, Life.twice, Life.functional)
CALLS += (*STEPS, Life.evaluated, Life.generated)


def fuzz_model(name: str, seed: int) -> None:
    draw = random.Random(f"model {name} {seed}")
    with recording() if device == "cpu" else contextlib.nullcontext():
        life = Life(name, draw)
        try:
            for _ in range(ACTS + 12 * ("graphs" in life.options)):
                if draw.random() < (0.25 if "graphs" in life.options else 0.5):
                    life.act()
                life.call()
        except AssertionError as error:
            raise AssertionError(f"{error} after {life.options} {', '.join(life.log)}") from None
