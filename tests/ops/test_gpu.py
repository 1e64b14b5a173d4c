"""What only a GPU can show: no wait for the device, capture in a graph, more than 2^31 elements."""

import ctypes
import gc
import random
import resource
import time

import pytest
import torch
from checks import check_case, run, same_bits, tensors_of
from heads import compare, head_inputs
from test_cases import pairs

import tigon
from cases import hyper_connection, linear_cross_entropy
from cases import linear_log_prob as cases_of_log_prob
from cases.case import test_case
from tigon.ops.loss_gradient import rescale
from tigon.ops.loss_head import linear_log_prob

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("module, case", pairs("test"))
def test_nothing_waits_for_the_device(module, case):
    """Forward and backward of every case, with torch told to raise on a synchronisation."""
    inputs = module.make(case, "cuda", torch.bfloat16, 0)
    run(module.tigon_fn, inputs, grad="grad" in case.tags)  # first calls may load modules
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(module.tigon_fn, inputs, grad="grad" in case.tags)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Options of the loss head at sizes whose matmuls are cut: an odd vocabulary, an odd or an even hidden size.
_CUT = {
    "odd_hidden": {},
    "even_hidden": {"H": 1032},
    "frozen": {"grads": (0,)},
    "none": {"reduction": "none"},
    "kept": {"reduction": "none", "keep_mb": 64.0},
    "chunks": {"chunk_rows": 384},
    "known": {"known": True, "bias": True},
    "lora": {"lora": 8, "grads": (0,)},
    "lora_odd": {"lora": 5},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", _CUT)
def test_large_matmuls_at_odd_sizes(name, dtype):
    """The loss head's matmuls in pieces (tigon/base/gemm_pieces.h), under every way to its gradients."""
    options = {"lead": (520,), "H": 1031, "V": 4099, "masked": 0.2} | _CUT[name]
    check_case(linear_cross_entropy, test_case(f"cut_{name}", **options), "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_hyper_connection_of_long_rows(dtype):
    """Several chunks of tokens in each range of them; more Sinkhorn divisors than shared memory holds."""
    check_case(hyper_connection, test_case("ranges", shape=(300, 4, 8192), iterations=40), "cuda", dtype)


@pytest.mark.parametrize("h", [1031, 1032])
def test_log_prob_of_large_matmuls_at_odd_sizes(h):
    """The same of linear_log_prob, and of linear_loss, which runs the matmuls chunk by chunk."""
    hidden, weight, target = head_inputs(520, h, 4099, dtype=torch.bfloat16, device="cuda")
    options = {"entropy": True}
    compare(tigon.linear_log_prob, linear_log_prob.reference, (hidden, weight, target), options)
    loss = tigon.linear_loss(hidden, weight, target, torch.neg, chunk_rows=256)
    plain = tigon.linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(loss, plain)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (loss, plain)), strict=True):
        assert (a - b).norm() <= 4e-3 * b.norm()


# Rows whose z is capped, or whose entropies are wanted beside a gradient or have one.
_STAGED = {
    "softcap": {"softcap": 9.0},
    "softcap_frozen": {"softcap": 9.0, "logit_scale": 1.5, "temperature": 0.7, "grads": (0,)},
    "entropy": {"entropy": True, "temperature": 0.8},
    "softcap_entropy": {"softcap": 9.0, "entropy": True},
    "fp32_logits": {"softcap": 9.0, "logit_dtype": torch.float32, "keep_mb": 0},
    "entropy_fp32_logits": {"entropy": True, "logit_scale": 1.5, "logit_dtype": torch.float32},
    "softcap_entropy_fp32_logits": {"softcap": 9.0, "entropy": True, "logit_dtype": torch.float32},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("v", [128, 5003, 16392, 32769, 50257, 100003, 256000, 262147])
@pytest.mark.parametrize("name", _STAGED)
def test_capped_rows_and_entropies(name, v, dtype):
    options = {"lead": (37,), "H": 64, "V": v, "masked": 0.2} | _STAGED[name]
    check_case(cases_of_log_prob, test_case(f"{name}_{v}", **options), "cuda", dtype)


@pytest.mark.parametrize("v", [40, 16392, 50257, 100003, 256000])
@pytest.mark.parametrize("softcap", [None, 9.0])
def test_entropies_beside_a_gradient(softcap, v):
    """Results of the pass that forms the gradient, and of the one without a gradient."""
    hidden, weight, target = head_inputs(37, 16, v, dtype=torch.bfloat16, device="cuda", masked=0.2)
    with torch.no_grad():  # logits that no matmul rounds
        hidden.copy_(torch.randint(-3, 4, hidden.shape))
        weight.copy_(torch.randint(-3, 4, weight.shape) / 8)
    options = {"softcap": softcap, "outputs": ("loss", "entropy", "correct", "lse"), "reduction": "none"}
    leaf = hidden.detach().clone().requires_grad_()
    got = tigon.linear_cross_entropy(leaf, weight.detach(), target, **options)
    with torch.no_grad():
        alone = tigon.linear_cross_entropy(hidden, weight, target, **options)
    z = (hidden.detach() @ weight.detach().T).double()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = z.log_softmax(-1)
    counts = target != -100
    want = {
        "loss": -log_p.gather(1, target.clamp(min=0)[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": z.logsumexp(-1),
    }
    for result in (got, alone):
        for name, value in want.items():
            value = torch.where(counts, value, 0.0)
            torch.testing.assert_close(getattr(result, name).double(), value, rtol=2e-6, atol=2e-6)
        assert torch.equal(result.correct, counts & (z.argmax(-1) == target))
    assert torch.autograd.grad(got.loss.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("rows, h, v", ((700, 64, 257), (129, 520, 5003), (5000, 128, 50257), (1, 8, 1)))
def test_statistics_in_the_epilogue_of_the_matmul(rows, h, v, dtype):
    """Losses without gradients: those of rounded logits, a row's bits the same in any batch."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs wgmma (sm_90)")
    hidden, weight, target = (
        t.detach() for t in head_inputs(rows, h, v, dtype=dtype, device="cuda", masked=0.0)
    )
    got = tigon.linear_log_prob(hidden, weight, target, shift=False)
    logits = (hidden.double() @ weight.double().T).to(dtype).double()
    want = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-2)  # one logit in the other direction
    first, count = rows // 3, rows // 2
    for part in (slice(first, first + count), slice(0, 1)):
        alone = tigon.linear_log_prob(hidden[part], weight, target[part], shift=False)
        assert same_bits(alone, got[part])


@pytest.mark.parametrize("module, case", pairs("small"))
def test_captured_in_a_graph(module, case):
    """Forward and backward in a CUDA graph; a replay on new data gives the bits of a plain run."""
    inputs = module.make(case, "cuda", torch.bfloat16, 0)
    fresh = module.make(case, "cuda", torch.bfloat16, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(module.tigon_fn, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(module.tigon_fn, inputs)
    for value, new in zip(tensors_of(inputs), tensors_of(fresh), strict=True):
        value.copy_(new)
    graph.replay()
    plain = run(module.tigon_fn, fresh)
    for name, value in plain.tensors.items():
        assert same_bits(value, captured.tensors[name]), name


# More than 2^31 elements, where a 32-bit index overflows. An oracle of that size would take the
# memory of several cards; instead the ends of a large result must be the result of the ends. The
# sizes are arguments so that the logic of these tests can be tried on small tensors too.

BIG = 2**31


def _need(gigabytes: int) -> None:
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, there are {free / 1e9:.0f}")


def _randn(*shape, device="cuda"):
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _ends(x: torch.Tensor, rows: int = 3) -> torch.Tensor:
    return torch.cat((x[:rows], x[-rows:]))


def _rows_op(fn, inputs: list[torch.Tensor]) -> None:
    """A row op: outputs and gradients of the first and last rows are those of these rows alone."""
    small = [_ends(value).requires_grad_() for value in inputs]
    leaves = [value.requires_grad_() for value in inputs]
    y = fn(*leaves)
    dy = _randn(*y.shape, device=y.device)
    grads = torch.autograd.grad(y, leaves, dy)
    y_small = fn(*small)
    grads_small = torch.autograd.grad(y_small, small, _ends(dy))
    assert same_bits(_ends(y.detach()), y_small.detach())
    for grad, grad_small in zip(grads, grads_small, strict=True):
        assert same_bits(_ends(grad), grad_small)


def big_rms_norm(rows=BIG // 4096 + 3, columns=4096, device="cuda"):
    """x, y and their gradients of more than 2^31 elements."""
    weight = 1 + 0.1 * _randn(columns, device=device)
    _rows_op(lambda x: tigon.rms_norm(x, weight), [_randn(rows, columns, device=device)])


def big_layer_norm(rows=BIG // 4096 + 3, columns=4096, device="cuda"):
    """x, y and their gradients of more than 2^31 elements."""
    weight, bias = _randn(2, columns, device=device)
    _rows_op(lambda x: tigon.layer_norm(x, weight, bias), [_randn(rows, columns, device=device)])


def big_softmax(rows=BIG // 4099 + 3, columns=4099, device="cuda"):
    """x, y and their gradients of more than 2^31 elements, rows that start anywhere."""
    _rows_op(tigon.softmax, [_randn(rows, columns, device=device)])


def big_sparsemax(rows=BIG // 4099 + 3, columns=4099, device="cuda"):
    """The same."""
    _rows_op(tigon.sparsemax, [_randn(rows, columns, device=device)])


def big_poly_norm(rows=BIG // 4104 + 3, columns=4104, device="cuda"):
    """x, y and their gradients of more than 2^31 elements, beside partial sums of the rows."""
    weight, bias = _randn(3, device=device), _randn(1, device=device)
    _rows_op(lambda x: tigon.poly_norm(x, weight, bias), [_randn(rows, columns, device=device)])


def big_swiglu(rows=BIG // 16384 + 3, columns=16384, device="cuda"):
    """Five tensors of more than 2^31 elements."""
    _rows_op(tigon.swiglu, [_randn(rows, columns, device=device) for _ in range(2)])


def big_rope(time=BIG // (128 * 128) + 3, heads=128, width=128, device="cuda"):
    """q in Hugging Face's layout, one head of k."""

    def tables(positions):
        angles = positions[:, None] * 10000 ** -(torch.arange(width // 2) / (width // 2))
        angles = torch.cat((angles, angles), -1)[None]
        return [f(angles).to(device, torch.bfloat16) for f in (torch.cos, torch.sin)]

    def turn(positions):
        cos, sin = tables(positions)

        def fn(q, k):  # [T, heads, width] here, so that rows are positions
            q, k = tigon.rope(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
            return q[0].transpose(0, 1), k[0].transpose(0, 1)

        return fn

    positions = torch.arange(time, dtype=torch.float32)
    q, k = _randn(time, heads, width, device=device), _randn(time, 1, width, device=device)
    with torch.no_grad():
        large = turn(positions)(q, k)
        small = turn(_ends(positions))(_ends(q), _ends(k))
    for a, b in zip(large, small, strict=True):
        assert same_bits(_ends(a), b)
    q.requires_grad_()
    dy = _randn(time, heads, width, device=device)
    (dq,) = torch.autograd.grad(turn(positions)(q, k)[0], q, dy)
    q_small = _ends(q.detach()).requires_grad_()
    (dq_small,) = torch.autograd.grad(turn(_ends(positions))(q_small, _ends(k))[0], q_small, _ends(dy))
    assert same_bits(_ends(dq), dq_small)


def big_cross_entropy(rows=BIG // 131080 + 3, vocab=131080, device="cuda"):
    """Logits of more than 2^31 elements."""
    target = torch.randint(0, vocab, (rows,), device=device)
    logits = _randn(rows, vocab, device=device).requires_grad_()
    upstream = torch.randn(rows, device=device)
    loss = tigon.cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(loss, logits, upstream)
    small = _ends(logits.detach()).requires_grad_()
    loss_small = tigon.cross_entropy(small, _ends(target), reduction="none")
    (grad_small,) = torch.autograd.grad(loss_small, small, _ends(upstream))
    assert same_bits(_ends(loss.detach()), loss_small.detach())
    assert same_bits(_ends(grad), grad_small)


def _close(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    a, b = a.float(), b.float()
    assert ((a - b).norm() / b.norm()).item() <= bound


def big_head_weight(rows=64, hidden=8192, vocab=BIG // 8192 + 24, device="cuda"):
    """A head of more than 2^31 weights, against logits made by torch."""
    x = _randn(rows, hidden, device=device).requires_grad_()
    weight = (_randn(vocab, hidden, device=device) / hidden**0.5).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)
    target[0], target[1] = 0, vocab - 1
    loss = tigon.linear_cross_entropy(x, weight, target)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    plain = torch.nn.functional.cross_entropy((x @ weight.t()).float(), target)
    dx_plain, dw_plain = torch.autograd.grad(plain, (x, weight))
    _close(loss, plain, 1e-3)  # bf16 logits in the plain one, three digits
    _close(dx, dx_plain, 2e-2)
    _close(_ends(dw, 1000), _ends(dw_plain, 1000), 2e-2)


def big_head_logits(rows=BIG // 131080 + 3, hidden=64, vocab=131080, device="cuda"):
    """One chunk of logits of more than 2^31 elements, against small chunks."""
    x = _randn(rows, hidden, device=device).requires_grad_()
    weight = (_randn(vocab, hidden, device=device) / hidden**0.5).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)
    results = []
    for chunk in (rows, 1024):
        loss = tigon.linear_cross_entropy(x, weight, target, chunk_rows=chunk)
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for a, b, bound in zip(*results, (1e-5, 1e-2, 1e-2), strict=True):
        _close(a, b, bound)


@pytest.mark.xdist_group("large")  # one after the other: together they need more memory than there is
@pytest.mark.parametrize(
    "test, gigabytes",
    [
        (big_rms_norm, 25),
        (big_layer_norm, 25),
        (big_softmax, 25),
        (big_sparsemax, 25),
        (big_poly_norm, 25),
        (big_swiglu, 40),
        (big_rope, 30),
        (big_cross_entropy, 20),
        (big_head_weight, 40),
        (big_head_logits, 20),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_more_than_2_31_elements(test, gigabytes):
    """Indices are 64 bits wide where they must be."""
    torch.cuda.empty_cache()
    _need(gigabytes)
    try:
        test()
    finally:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("size, vocabulary", [(768, 50257), (2048, 32001), (4096, 128256)])
def test_a_row_has_the_same_bits_alone_and_beside_others(size, vocabulary):
    """The matmuls and the pass over the logits of `linear_log_prob`, whatever the number of rows."""
    hidden, weight, target = head_inputs(2049, size, vocabulary, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        want = tigon.linear_log_prob(hidden, weight, target)
        differing = {}
        for rows in (1, 2, 7, 16, 33, 64, 128, 257, 1024, 2048):
            got = tigon.linear_log_prob(hidden[-rows:], weight, target[-rows:])
            differing[rows] = int((got != want[-rows:]).sum())
    assert not any(differing.values()), differing


def test_a_refused_launch_is_no_error_of_the_next():
    """The default stream is refused beside a capture: `tigon.Error`, and nothing for PyTorch to find."""
    handle = ctypes.c_void_p()
    torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))  # PyTorch's own ignore the default one
    x, factor, counter = (torch.full((n,), 3.0, device="cuda") for n in (64, 1, 1))
    other = torch.cuda.Stream()
    rescale(x, factor[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        graph.capture_begin()
        with torch.cuda.stream(torch.cuda.default_stream()), pytest.raises(tigon.Error, match="failed"):
            rescale(x, factor[0])  # allocates nothing
        with torch.cuda.stream(other):
            counter += 1
        with pytest.raises(RuntimeError, match="capture"):
            graph.capture_end()
    # The failed capture leaves PyTorch's generator in a capture, which the end of another one ends.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        factor.clone()
    torch.rand(1, device="cuda")
    rescale(x, factor[0])
    assert (x == 27).all() and counter.item() == 4


def test_matmuls_of_many_row_counts_keep_no_memory():
    """The plans of matmuls are bounded: 5,000 steps that each list another number of rows."""
    hidden, weight, target = head_inputs(5200, 64, 520, dtype=torch.bfloat16, device="cuda", masked=0.0)
    weight.requires_grad_(False)

    def step(rows):
        loss = tigon.linear_cross_entropy(hidden[:rows], weight, target[:rows], valid_rows=rows)
        torch.autograd.grad(loss, hidden)

    def peak_kb():
        torch.cuda.synchronize()
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for rows in range(1, 601):
        step(rows)
    before = peak_kb()
    for rows in range(200, 5200):
        step(rows)
    assert peak_kb() - before < 8 << 10  # 1.6 KB a step


def test_the_same_step_has_the_same_bits_whatever_the_delays(monkeypatch):
    """100 steps of a patched model with masked labels: the host ahead of their count, or behind it."""
    from tiny import make

    from tigon.integrations.transformers import head
    from tigon.ops.loss_head import labels as counts

    options = {"device": "cuda", "hidden_size": 256, "vocab_size": 5003, "head_dim": 32}
    options |= {"intermediate_size": 512, "max_position_embeddings": 512, "num_attention_heads": 8}
    model = make("llama", **options)
    tigon.apply(model)
    ids = torch.randint(3, 5003, (4, 300), device="cuda")
    labels = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.6, -100)
    delays = random.Random(0)
    late = 0.0  # seconds that the host loses in each layer
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(late))

    def step():
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=labels.clone()).loss  # labels of every step, as from a loader
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()]

    def same(a, b):
        return same_bits(a[0], b[0]) and all(same_bits(x, y) for x, y in zip(a[1], b[1], strict=True))

    first = step()
    for _ in range(100):
        if delays.random() < 0.5:
            late = delays.choice([1e-4, 1e-3, 5e-3])
        else:
            late = 0.0  # and the count held back: of its own stream alone a forward does not wait
            side = counts._streams[torch.cuda.current_device()]
            with torch.cuda.stream(delays.choice([side, torch.cuda.current_stream()])):
                torch.cuda._sleep(delays.randrange(40_000_000))
        assert same(step(), first)
    monkeypatch.setattr(head, "count_labels", lambda *_, **__: None)
    assert not same(step(), first)  # all rows have other bits: a choice between them by time would show
