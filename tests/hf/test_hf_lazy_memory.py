"""Lazy logits: what shares memory with them, changes in place, rows that are added."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import VOCABULARY, apply_as_stock, assert_step_as_good, batch, close, double, make, step

import tigon
from tigon.integrations.transformers import HeadCalls, LazyLogits, apply
from tigon.integrations.transformers.lazy_logits import LogitsRequest


def tensor(x):
    return x.materialise() if isinstance(x, LazyLogits) else x


VIEWS = {
    "all": lambda x: x[...],
    "view": lambda x: x.view(-1, VOCABULARY),
    "reshape": lambda x: x.reshape(-1, VOCABULARY),
    "flatten": lambda x: x.flatten(0, 1),
    "rows": lambda x: x[:, :-1],
    "later rows": lambda x: x[:, 1:],
    "one row": lambda x: x[0],
    "view of one row": lambda x: x[1].view(1, -1, VOCABULARY),
    "last rows": lambda x: x[:, -1],
    "new axis": lambda x: x[None],
    "columns": lambda x: x[..., :50],
    "columns of rows": lambda x: x[:, 1:, :50],
    "late columns": lambda x: x[..., 50:],
    "late columns of rows": lambda x: x[:, :-1, 50:],
    "one column": lambda x: x[..., 55],
    "one column of a row": lambda x: x[:, -1, 55],
    "transposed": lambda x: x[:, :-1].transpose(1, 2),
    "unsqueezed": lambda x: x[:, 1:].unsqueeze(1),
    "listed": lambda x: next(iter(x)),
    "chunk": lambda x: x.chunk(2)[1],
    "detached": lambda x: x.detach(),
    "detached rows": lambda x: x[:, :-1].detach(),
    "tensor": tensor,
    "tensor of rows": lambda x: tensor(x[:, 1:]),
}
COPIES = {
    "rows_contiguous": lambda x: x[:, :-1].contiguous(),
    "rows_reshaped": lambda x: x[:, 1:].reshape(-1, VOCABULARY),
    "rows_by_index": lambda x: x[:, [0, 2]],
    "columns_by_index": lambda x: x[:, 1:, [3, 55]],
    "scaled": lambda x: 2 * x,
    "double": lambda x: x.double(),
    "computed": lambda x: x.clone(),
    "sum of rows": lambda x: x[:, 1:] + 1.0,
}
WRITES = {
    "scale": lambda x: operator.itruediv(x, 2.0),
    "divide": lambda x: x.div_(2.0),
    "add": lambda x: operator.iadd(x, 1.0),
    "power": lambda x: operator.ipow(x, 2.0),
    "element": lambda x: x.__setitem__(0, 3.0),
    "mask": lambda x: x.__setitem__(x > 0, 3.0),
    "function": lambda x: F.relu(x, inplace=True),
    "out": lambda x: torch.add(torch.ones_like(x), 1.0, out=x),
    "list": lambda x: torch._foreach_zero_([x]),
    "fill": lambda x: x.fill_(-1e4),
    "part": lambda x: x[..., 1:].fill_(-1e4),
    "first": lambda x: x[:1].mul_(3.0),
    "turned": lambda x: x.transpose(0, -1).masked_fill_(torch.tensor(True, device=x.device), 0.5),
    "tensor": lambda x: tensor(x).add_(1.0),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("of", [*VIEWS, *COPIES])
def test_views_of_what_changes_in_place(device, of, grad):
    """As stock, by every way to change them: a view sees it, a copy does not, and an error is one."""
    model, inputs = make(device=device), batch(device)
    make_view = (VIEWS | COPIES)[of]
    hidden = model.model(inputs["input_ids"]).last_hidden_state.detach()
    stock_head = copy.deepcopy(model.lm_head)
    apply(model, lazy_logits=True)

    def run(write, of_view, read, lazy):
        head = model.lm_head if lazy else stock_head
        with torch.set_grad_enabled(grad):
            base = owed(model, hidden) if lazy else head(hidden)
            try:
                view = make_view(base)
                if read:
                    base.sum(), view.sum()
                WRITES[write](view if of_view else base)
                values = [tensor(base) + 0, tensor(view) + 0]
                total = sum(torch.sin(value.double()).sum() for value in values)
                grads = torch.autograd.grad(total, [head.weight]) if total.requires_grad else []
            except RuntimeError as error:
                return type(error)
        return [*values, *grads]

    # On CUDA, PyTorch does not count what `_foreach_zero_` changes (`_version`): views keep their gradient.
    writes = [write for write in WRITES if write != "list" or device == "cpu" or not grad]
    for write in writes:
        for of_view in (False, True):
            for read in (False, True):
                wanted, got = (run(write, of_view, read, lazy) for lazy in (False, True))
                case = f"{write}, {'view' if of_view else 'logits'} written, {'read before' if read else ''}"
                if isinstance(wanted, type):
                    assert got is wanted, case
                    continue
                assert not isinstance(got, type) and len(got) == len(wanted), case
                assert all(
                    torch.allclose(*pair, rtol=2e-5, atol=2e-5) for pair in zip(got, wanted, strict=True)
                ), case


def owed(model, hidden):
    """Lazy logits of these hidden states."""
    return LazyLogits(model.lm_head, hidden, VOCABULARY, hidden.dtype, HeadCalls())


@pytest.mark.parametrize("read", [operator.neg, lambda x: x.cross_entropy(torch.tensor([0, 1]))])
def test_hidden_states_that_change_in_place_are_noticed(device, read):
    """Also through another view of them, and of logits taken since."""
    for of in (lambda x: x, lambda x: x[1:], lambda x: 2 * x, lambda x: x[[0, 1]]):
        model, hidden = make(device=device), torch.randn(1, 3, 32, device=device)
        apply(model)
        lazy = owed(model, hidden)[0, :2]
        hidden[0, 2] = 0.0
        with pytest.raises(tigon.Error, match="before the hidden states change in place"):
            read(of(lazy))


ROWS = {
    "row": lambda x, row: x + row,
    "row from the left": lambda x, row: row + x,
    "matrix": lambda x, row: x + row[None],
    "of all dimensions": lambda x, row: torch.add(x, row[None, None]),
    "in two steps": lambda x, row: x + row + 0.5 * row,
    "wide": lambda x, row: x + row.double(),
    "before a cap": lambda x, row: torch.tanh((x + row) / 3.0) * 3.0,
    "before a part": lambda x, row: (x + row)[:, 1:, :80],
    "behind a part": lambda x, row: x[:, 1:, :80] + row[:80],
    "float": lambda x, row: x.float() + row,
}
OTHERS = {
    "scaled before": lambda x, row: 2 * x + row,
    "of rows": lambda x, row: x + torch.ones(x.shape[1], 1, device=x.device),
    "new dimensions": lambda x, row: x + row[None, None, None],
    "alpha": lambda x, row: torch.add(x, row, alpha=2.0),
    "a number": lambda x, row: x + 1.0,
    "in place": lambda x, row: operator.iadd(1.0 * x, row),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "head with a bias"])
@pytest.mark.parametrize("name", [*ROWS, *OTHERS])
def test_rows_that_are_added(device, name, bias):
    """Stay lazy where the head's bias can take them; a trained row gets its gradient."""
    model, inputs = make(device=device), batch(device)
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=bias, device=device)
    row = torch.randn(VOCABULARY, device=device, requires_grad=True)
    trained = row, model.lm_head.weight
    change = (ROWS | OTHERS)[name]

    def run():
        logits = change(model(inputs["input_ids"]).logits, row)
        rows = inputs["labels"][:, : logits.shape[-2]].clamp(0, 79).reshape(-1)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1])[: len(rows)], rows)
        grads = torch.autograd.grad(loss, trained, materialize_grads=True)
        return loss.detach(), *grads, logits.detach() + 0

    wanted = run()
    report = apply(model, lazy_logits=True)
    for got, want in zip(run(), wanted, strict=True):
        assert got.dtype == want.dtype or got.ndim == 0
        close(got.double(), want.double(), ulps=256)
    assert report.head_calls.fused == (name in ROWS)


def test_a_number_that_changes_later(device):
    """A temperature in a tensor: that of the time when it was used."""
    model, hidden = make(device=device), torch.randn(1, 3, 32, device=device)
    apply(model)
    for scale in (operator.mul, operator.truediv, operator.imul, operator.itruediv):
        wanted = model.lm_head.forward(hidden, LogitsRequest())
        temperature = torch.full((), 2.0, device=device)
        got = scale(owed(model, hidden), temperature)
        assert isinstance(got, LazyLogits)
        temperature.zero_()
        close(got.materialise(), wanted / 2 if "div" in scale.__name__ else wanted * 2)


def test_results_into_a_tensor(device):
    model, hidden = make(device=device), torch.randn(1, 3, 32, device=device)
    apply(model)
    with torch.no_grad():
        for function, *rest in ((torch.mul, 2.0), (torch.add, 2.0), (torch.tanh,), (torch.div, 2.0)):
            lazy, out = owed(model, hidden), torch.empty(1, 3, VOCABULARY, device=device)
            assert function(lazy, *rest, out=out) is out
            close(out, function(lazy.materialise(), *rest))


def test_a_row_that_changes_is_noticed(device):
    model, row = make(device=device), torch.zeros(VOCABULARY, device=device)
    report = apply(model)
    logits = model(**batch(device)).logits + row
    assert isinstance(logits, LazyLogits) and report.head_calls.materialised == 0
    row += 1
    with pytest.raises(tigon.Error, match="change in place"):
        logits.argmax(-1)


SEQUENCES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
SEQUENCES |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0}
SEQUENCES |= {"attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 64}
LED = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 4}
BARTS = {"Bart": {}, "MBart": {}, "Blenderbot": {}, "BlenderbotSmall": {}, "Pegasus": {}}
BARTS |= {"BigBirdPegasus": {"attention_type": "original_full"}, "PLBart": {}, "Mvp": {}, "LED": LED}
BARTS_CAUSAL = {"Marian": "MarianMTModel"}


def sequences(name, device):
    """A tiny model whose row is not zero."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    kind = getattr(transformers, f"{name}Config")
    config = kind(vocab_size=VOCABULARY, **SEQUENCES, **special, **BARTS.get(name, {}))
    cls = getattr(transformers, BARTS_CAUSAL.get(name, f"{name}ForConditionalGeneration"))
    model = cls(config).to(device).train()
    model.final_logits_bias.normal_()
    return model


@pytest.mark.parametrize("name", [*BARTS, *BARTS_CAUSAL])
def test_models_that_add_a_row_to_their_logits(device, name):
    """BART's `lm_head(x) + final_logits_bias`."""
    model, inputs = sequences(name, device), batch(device, tokens=12)
    logits = model(**inputs).logits.detach()
    report = apply_as_stock(model, inputs, ulps=1024)
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0
    report.check()
    close(model(**inputs).logits.materialise(), logits, ulps=256)


@pytest.mark.parametrize("cast", ["bfloat16", "row in float32", "autocast"])
def test_rows_in_16_bits_are_as_good_as_stock(device, cast):
    """The row is as it is, in float32, where stock adds it so."""
    model, inputs = sequences("Bart", device), batch(device, tokens=12)
    if cast != "autocast":
        model.bfloat16()
    if cast == "row in float32":
        model.final_logits_bias = model.final_logits_bias.float().normal_()
    exact = step(double(model), inputs)

    def run():
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=cast == "autocast"):
            return step(model, inputs)

    wanted = run()
    report = apply(model)
    assert_step_as_good(run(), wanted, exact, 8, 2.0**-8)
    assert report.head_calls.fused == 1 and report.head_calls.materialised == 0
