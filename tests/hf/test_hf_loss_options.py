"""Options of the loss among a forward's keywords: used by every path, or refused in words."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tiny import VOCABULARY, batch, close, make

import tigon
from tigon.integrations.liger import functional, outputs, patching
from tigon.integrations.transformers import apply

OPTIONS = [
    {"label_smoothing": 0.1},
    {"lse_square_scale": 0.01},
    {"use_token_scaling": True},
    {"ce_weight": torch.linspace(0.5, 1.5, VOCABULARY)},
    {"use_token_scaling": True, "label_smoothing": 0.2, "lse_square_scale": 0.1},
]


def plain(
    model,
    inputs,
    count=None,
    label_smoothing=0.0,
    lse_square_scale=0.0,
    use_token_scaling=False,
    ce_weight=None,
):
    """The loss by its formula, from the logits of a stock model."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY)
    labels = inputs["labels"][:, 1:].reshape(-1)
    rows = F.cross_entropy(logits, labels, ce_weight, label_smoothing=label_smoothing, reduction="none")
    rows = rows + lse_square_scale * logits.logsumexp(-1).square()
    if use_token_scaling:
        own = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        rows = rows * own.exp().detach()
    kept = labels != -100
    weights = kept.sum() if ce_weight is None else ce_weight[labels[kept]].sum()
    return rows[kept].sum() / (weights if count is None else count)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_options_are_used(family, options):
    """Where logits are owed, asked for, and in evaluation; divided by a count or not."""
    model, inputs = make(family), batch()
    wanted = {count: plain(model, inputs, count, **options) for count in (None, 7)}
    slopes = {count: gradients(model, loss) for count, loss in wanted.items()}
    report = apply(model)
    for count in (None, 7):
        given = {**inputs, **options, "num_items_in_batch": count}
        got = model(**given).loss
        close(got, wanted[count])
        close(gradients(model, got), slopes[count], ulps=512)
        close(model(**given, skip_logits=False).loss, wanted[count])
        close(model.eval()(**given).loss, wanted[count])
        model.train()
    assert (report.head_calls.fused, report.head_calls.materialised) == (2, 0)


def test_labels_that_are_shifted_already():
    model, inputs = make(), batch()
    wanted = plain(model, inputs, use_token_scaling=True)
    apply(model)
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    close(
        model(inputs["input_ids"], labels=shifted, shift_labels=shifted, use_token_scaling=True).loss, wanted
    )


@pytest.mark.parametrize("name", ["reduction", "softcap", "final_logit_softcapping", "return_z_loss"])
def test_what_cannot_be_done_is_refused(name):
    model, inputs = make(), batch()
    report = apply(model)
    with pytest.raises(tigon.Error, match=rf"\[causal_lm_loss\] {name} must not be given"):
        model(**inputs, **{name: "sum"})
    assert report.head_calls.lazy == 0
    model(**inputs, **{name: None})


def test_a_loss_of_its_own_takes_no_options():
    model, inputs = make(), batch()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().sum()
    apply(model)
    with pytest.raises(tigon.Error, match="options of the loss must be given to a model with"):
        model(**inputs, label_smoothing=0.1)


_PATCHES = [apply, patching._apply_liger_kernel_to_instance]


@pytest.mark.parametrize(
    "family, patch, compiled",
    [
        *itertools.product(("llama", "mixtral", "gemma2"), _PATCHES, (False,)),
        ("llama", _PATCHES[1], True),
        ("mixtral", apply, True),
    ],
)
def test_counts_of_the_loss(family, patch, compiled):
    """TRL's keywords with use_liger_kernel, whoever patched the model; traced whole by torch.compile."""
    model, inputs = make(family, num_hidden_layers=1), batch()
    best = model(**inputs).logits.argmax(-1)
    inputs["labels"][:, :3], inputs["labels"][:, 4:7] = -100, best[:, 3:6]
    stock, shifted = model(**inputs), F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    kept = shifted != -100
    patch(model)
    outputs._make.cache_clear()
    torch._dynamo.reset()
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    got = call(**inputs, return_token_accuracy=True, return_predicted_tokens=True)
    assert got.logits is None
    assert torch.equal(got.predicted_tokens, torch.where(kept, best, -1).view(-1))
    close(got.token_accuracy, (best == shifted)[kept].float().mean())
    assert got.token_accuracy > 0.2
    close(got.loss, stock.loss)
    got.loss.backward()
    again = call(**inputs)
    assert "token_accuracy" not in again and again.logits is not None
    assert model(**inputs, return_token_accuracy=True, skip_logits=False).logits is not None


def test_keywords_of_others_pass():
    model, inputs = make(), batch()
    wanted = model(**inputs).loss
    apply(model)
    got = model(
        **inputs,
        output_hidden_states=True,
        cu_seq_lens_q=None,
        accum_dtype=torch.float32,
        use_token_scaling=False,
        chunk_mem_const=8,
    )
    close(got.loss, wanted)
    assert len(got.hidden_states) == 3


@pytest.mark.parametrize("switch", ["fused_linear_cross_entropy", "cross_entropy"])
def test_token_scaling_by_the_interface(switch):
    """TRL's dft before 1.15: keywords of a model that the interface has patched."""
    model, inputs = make(), batch()
    wanted = plain(model, inputs, use_token_scaling=True)
    off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    patching._apply_liger_kernel_to_instance(model, **{**off, switch: True})
    got = model(**inputs, use_token_scaling=True, return_token_accuracy=True)
    close(got.loss, wanted)
    assert hasattr(got, "token_accuracy") == (switch != "cross_entropy")


def test_a_program_wraps_the_loss_head(facade, monkeypatch):
    """Axolotl's liger_use_token_scaling; in evaluation Liger's models have the plain loss of logits."""
    from liger_kernel.transformers import functional as public

    def scaled(*args, **kwargs):
        return functional.liger_fused_linear_cross_entropy(*args, **{**kwargs, "use_token_scaling": True})

    monkeypatch.setattr(public, "liger_fused_linear_cross_entropy", scaled)
    model, inputs = make(), batch()
    wanted, stock = plain(model, inputs, use_token_scaling=True), model(**inputs).loss
    patching.apply_liger_kernel_to_llama(model=model)
    close(model(**inputs).loss, wanted)
    close(model.eval()(**inputs).loss, stock)
    close(model(**inputs, skip_logits=True).loss, wanted)


def test_another_loss_head_is_refused(facade, monkeypatch):
    from liger_kernel.transformers import functional as public

    monkeypatch.setattr(public, "liger_fused_linear_cross_entropy", lambda x, w, y, **_: x.sum())
    with pytest.raises(tigon.Error, match="may be wrapped by a function that calls it"):
        patching.apply_liger_kernel_to_llama(model=make())
