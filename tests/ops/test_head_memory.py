"""The memory of the fused loss head: what is predicted is what is allocated."""

import functools
import gc
import re

import pytest
import torch
from calls import calls, converted
from heads import compare, head_inputs, peak_on_the_cpu, run

import tigon

LOSS = tigon.linear_cross_entropy
ROWS = {"reduction": "none"}


def test_a_cap_makes_chunks_small(device):
    hidden, weight, target = head_inputs(2000, 16, 1000, device=device)
    cap = 1.0 if device == "cpu" else 33.0
    predicted = tigon.linear_cross_entropy_memory(
        2000, 16, 1000, torch.float32, device=device, max_workspace_mb=cap
    )
    assert predicted.chunk_rows < 300 and predicted.workspace <= cap * 2**20
    got = run(LOSS, (hidden, weight, target), {"max_workspace_mb": cap})
    want = run(LOSS, (hidden, weight, target), {"chunk_rows": predicted.chunk_rows})
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _peak(step, leaves, device):
    """The most memory that a second step asks for and holds at a time.

    Of a block that is left over from other tests PyTorch's allocator hands out up to 1 MiB more.
    """
    if device == "cpu":
        return peak_on_the_cpu(step, leaves)
    step()
    for leaf in leaves:
        leaf.grad = None
    gc.collect()  # what earlier tests left would be freed within the step
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def _answers(fn, *before, **options):
    """A loss of answers, of labels in one row."""

    def call(hidden, weight, target, **more):
        lead = (4, target.shape[0] // 4)
        own = [t.to(hidden.device) for t in before]
        ref = {name: t.to(hidden.device) for name, t in options.items() if torch.is_tensor(t)}
        out = fn(hidden.view(*lead, -1), weight, target.view(lead), *own, **options | ref, **more)
        return out.loss

    return call


@functools.lru_cache(1)
def _teacher(hidden, weight):
    """Made once: the call is measured, not these."""
    return hidden.detach().flip(0), weight.detach().flip(0)


def _divergence(hidden, weight, target, logits=False, **options):
    teacher = _teacher(hidden, weight)
    teacher = _logits(hidden, weight) if logits else teacher
    return tigon.linear_jsd(hidden, weight, teacher, target, beta=0.3, hard=0.5, **options)


@functools.lru_cache(1)
def _logits(hidden, weight):
    return torch.matmul(*(t.detach() for t in (hidden, weight.T)))


def _drafter(hidden, weight, target, steps=1, **options):
    """Against a teacher of more classes, at the positions of every step."""
    states = hidden.view(-1, steps, hidden.shape[-1]) if steps > 1 else hidden
    ids = torch.arange(len(weight), device=weight.device)
    return tigon.drafter_loss(states, weight, _larger_teacher(hidden, weight, steps), ids, **options)


@functools.lru_cache(1)
def _larger_teacher(hidden, weight, steps):
    states, head = _teacher(hidden, weight)
    return states[::steps].clone(), torch.cat((head, 0.5 * head[: len(head) // 3]))


def _drafter_memory(n, h, v, *others, steps=1, **options):
    sizes = {"teacher_hidden_size": h, "teacher_vocab": v + v // 3, "steps": steps}
    return tigon.drafter_loss_memory(n // steps, h, v, *others, **sizes, **options)


def _of_rows(hidden, weight, target, **options):
    return tigon.linear_loss(hidden, weight, target, torch.neg, **options)


def _of_groups(hidden, weight, target, **options):
    lead, group = (4, target.shape[0] // 4), "sequence"
    loss = functools.partial(torch.sum, dim=-1)
    return tigon.linear_loss(hidden.view(*lead, -1), weight, target.view(lead), loss, group=group, **options)


def _heads(hidden, weight, target, **options):
    return tigon.multi_token_loss(hidden[None], [weight, weight], target[None], **options).loss


_ZEROS = torch.zeros(4)
PEAKS = {
    "labels": (LOSS, tigon.linear_cross_entropy_memory, {}),
    "rows": (LOSS, tigon.linear_cross_entropy_memory, {"reduction": "none"}),
    "smooth": (
        functools.partial(LOSS, label_smoothing=0.1, z_loss=1e-3, softcap=5.0),
        tigon.linear_cross_entropy_memory,
        {},
    ),
    "log-probabilities": (tigon.linear_log_prob, tigon.linear_log_prob_memory, {}),
    "entropies": (
        lambda *args, **options: sum(tigon.linear_log_prob(*args, entropy=True, **options)),
        tigon.linear_log_prob_memory,
        {},
    ),
    "pairs": (_answers(tigon.linear_preference, beta=0.5, ref=_ZEROS), tigon.linear_preference_memory, {}),
    "answers": (
        _answers(tigon.linear_kto, torch.tensor([True, False, True, True]), ref=_ZEROS),
        functools.partial(tigon.linear_preference_memory, group=1),
        {},
    ),
    "policy": (
        _answers(tigon.linear_policy, torch.tensor([1.0, -1.0, 0.5, 2.0]), entropy=0.1),
        functools.partial(tigon.linear_preference_memory, group=0),
        {},
    ),
    "divergence": (
        _divergence,
        lambda n, h, *sizes, **options: tigon.linear_divergence_memory(
            n, h, *sizes, teacher_hidden_size=h, **options
        ),
        {},
    ),
    "drafter": (_drafter, _drafter_memory, {}),
    "drafter of steps": (
        functools.partial(_drafter, steps=4, loss="lk"),
        functools.partial(_drafter_memory, steps=4),
        {},
    ),
    "drafter of rows": (_drafter, _drafter_memory, {"reduction": "none"}),
    "function": (_of_rows, tigon.linear_loss_memory, {}),
    "function of groups": (_of_groups, None, {}),  # chunks of whole groups: nobody predicts these
    "tied heads": (_heads, None, {}),
}


def _sizes(memory, rows, h, v):
    return (4, rows // 4, h, v) if "linear_preference" in str(memory) else (rows, h, v)


@pytest.mark.parametrize(
    "name, dtype",
    [(name, dtype) for name in PEAKS for dtype in (torch.float32, torch.bfloat16)]
    + [("labels", torch.float16)],
)
def test_a_peak_is_kept(name, dtype, device):
    """The least peak, one of all sizes, and the default's give a call of that peak, and its values."""
    loss, memory, options = PEAKS[name]
    rows, h, v = (400, 32, 3003) if device == "cpu" else (3200, 256, 33001)
    hidden, weight, target = head_inputs(rows, h, v, dtype=dtype, device=device, masked=0.0)
    predict = functools.partial(memory or tigon.linear_cross_entropy_memory, *_sizes(memory, rows, h, v))
    predict = functools.partial(predict, dtype, device=device, **options)
    with pytest.raises(tigon.Error, match=r"max_peak_mb must be at least \d+ for this call") as refused:
        loss(hidden, weight, target, max_peak_mb=0.1, **options)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    most = predict().peak / 2**20
    for cap in (least, (least + most) / 2, 0.98 * most, most + 1):
        capped = functools.partial(loss, max_peak_mb=cap, **options)
        # Differences of softmaxes cancel, and matmuls of a few rows add in an order of their own.
        noise = 1e-5 if "drafter" in name and dtype == torch.float32 else 0.0
        compare(capped, functools.partial(loss, **options), (hidden, weight, target), {}, noise)

        def step(capped=capped):
            hidden.grad = weight.grad = None
            capped(hidden, weight, target).sum().backward()

        peak = _peak(step, (hidden, weight), device)
        assert peak <= cap * 2**20
        if memory is None:
            continue
        predicted = predict(max_peak_mb=cap).peak
        assert predicted <= cap * 2**20
        if device == "cuda":  # cuBLASLt's 32 MiB are there where one of its kernels asks for them
            assert peak >= 0.95 * predicted - 2**25
        else:  # float32 has room for oneDNN's matmul, divergences for pieces of their operands in float32
            assert peak >= (0.85 if dtype == torch.bfloat16 and name != "divergence" else 0.4) * predicted


def test_a_peak_keeps_labels_that_count(device):
    """Ignored rows, class weights, confident rows; a weight or hidden states without a gradient."""
    rows, h, v = (300, 32, 5003) if device == "cpu" else (3000, 256, 33001)
    cap = 1.1 if device == "cpu" else 90
    dtype = torch.bfloat16
    for train in ((True, True), (True, False), (False, True)):
        hidden, weight, target = head_inputs(rows, h, v, dtype=dtype, device=device, scale=20.0)
        for leaf, needs in zip((hidden, weight), train, strict=True):
            leaf.requires_grad_(needs)
        with torch.no_grad():
            target[::2] = (hidden @ weight.T).argmax(-1)[::2]
        valid = int((target != -100).sum())
        more = {"class_weight": torch.rand(v, device=device), "label_smoothing": 0.1}
        for options in ({}, {"valid_rows": valid}, {"valid_rows": valid, **more}):
            args, capped = (hidden, weight, target), functools.partial(LOSS, max_peak_mb=cap)
            compare(capped, LOSS, args, options)
            leaves = [t for t in (hidden, weight) if t.requires_grad]
            step = functools.partial(run, capped, args, options)
            assert _peak(step, leaves, device) <= cap * 2**20


@pytest.mark.parametrize("name", ["labels", "log-probabilities", "pairs", "divergence", "drafter of steps"])
def test_a_peak_is_traced(name, device):
    """torch.compile takes the plan of numbers, also where sizes are symbols."""
    torch._dynamo.reset()
    loss = functools.partial(PEAKS[name][0], max_peak_mb=8 if device == "cpu" else 60)
    args = head_inputs(400, 32, 3003, dtype=torch.bfloat16, device=device, masked=0.0)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for got, want in zip(run(compiled, args, {}), run(loss, args, {}), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("options", [{}, ROWS, {"valid_rows": 250}, {"weight": torch.float32}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_keeps_a_peak(options, dtype, one_process, device):
    """As its only process: gradients in float32 where there are several chunks, in weight's dtype."""
    hidden, weight, target = head_inputs(400, 32, 3003, dtype=dtype, device=device, masked=0.0)
    options = dict(options)
    target[options.get("valid_rows", 400) :] = -100
    weight = weight.detach().to(options.pop("weight", dtype)).requires_grad_()
    plain = functools.partial(LOSS, reduction=options.get("reduction", "mean"))
    shard = functools.partial(tigon.parallel.linear_cross_entropy, group=one_process, vocab=3003, **options)
    with pytest.raises(tigon.Error, match=r"max_peak_mb must be at least \d+ for one row of") as refused:
        shard(hidden, weight, target, max_peak_mb=0.1)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])

    def step(**cap):
        hidden.grad = weight.grad = None
        shard(hidden, weight, target, **cap).sum().backward()

    free = _peak(step, (hidden, weight), device) / 2**20
    # On a GPU the workspace of matmuls counts, which these few rows do not take.
    for cap in (least, *(max(least, cap) for cap in ((least + free) / 2, 0.98 * free, free + 1))):
        compare(functools.partial(shard, max_peak_mb=cap), plain, (hidden, weight, target), {}, 1e-5)
        assert _peak(functools.partial(step, max_peak_mb=cap), (hidden, weight), device) <= cap * 2**20


HEADS = [c for c in calls() if c.name.startswith(("linear_", "drafter", "contrastive", "multi_token"))]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_no_peak_is_ignored(head):
    """A peak that is too small is an error of every function on a head, in every dtype and transform."""
    with pytest.raises((tigon.Error, TypeError), match="max_peak_mb"):
        head(max_peak_mb=1e-3)
    if "hidden" not in head.parameters():
        return
    wide = {name: converted(value, torch.float64) for name, value in head.draw().items()}
    with pytest.raises((tigon.Error, TypeError), match="max_peak_mb"):
        head(**wide, max_peak_mb=1e-3)
    with pytest.raises((tigon.Error, TypeError), match="max_peak_mb"):
        torch.func.vjp(lambda hidden: head(hidden=hidden, max_peak_mb=1e6), head.draw()["hidden"])


MEMORY = [
    {},
    {"max_workspace_mb": None},
    {"valid_rows": True},
    {"main_grad": True},
    ROWS,
    {**ROWS, "keep_mb": 0},
    {**ROWS, "keep_mb": 1e4},
    {**ROWS, "keep_mb": 6},
    {**ROWS, "valid_rows": True},
    {**ROWS, "valid_rows": True, "keep_mb": 1e4},
    {**ROWS, "train_weight": False},
    {**ROWS, "main_grad": True, "keep_mb": 1e4},
    {"labels": 64},
    {"labels": 64, "train_weight": False},
]


def _memory_case(rows, h, v, device, dtype, cap, options):
    """A step, and what it is said to take."""
    options = dict(options)
    if "max_workspace_mb" in options:
        options["max_workspace_mb"] = cap
    hidden, weight, target = head_inputs(rows, h, v, dtype=dtype, device=device, masked=0.0)
    if "valid_rows" in options:
        options["valid_rows"] = rows * 3 // 8
        target[options["valid_rows"] :] = -100
    labels = options.get("labels")
    memory = tigon.linear_log_prob_memory if labels else tigon.linear_cross_entropy_memory
    predicted = memory(rows, h, v, dtype, device=device, **options)
    if options.pop("labels", None):
        target = torch.randint(0, v, (rows, labels), device=device)
    loss = tigon.linear_log_prob if labels else LOSS
    weight.requires_grad_(options.pop("train_weight", True))
    if options.pop("main_grad", False):
        weight.main_grad, weight.tigon_main_grad = torch.zeros(v, h, device=device), True

    def step():
        hidden.grad = weight.grad = None
        loss(hidden, weight, target, **options).sum().backward()

    return step, (hidden, weight), predicted


@pytest.mark.parametrize("options", MEMORY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_predicted_memory_on_the_cpu(options, dtype):
    step, leaves, predicted = _memory_case(2000, 16, 3000, "cpu", dtype, 4, options)
    peak = peak_on_the_cpu(step, leaves)
    # float32: the prediction has room for oneDNN's matmul in a tensor of its own, which MKL does without.
    least = 0.9 if dtype == torch.bfloat16 else 0.45
    assert least * predicted.peak <= peak <= 1.1 * predicted.peak


@pytest.mark.parametrize(
    "name, options",
    [
        *(("divergence", o) for o in ({}, {"valid_rows": 1500}, ROWS, {"logits": True})),
        *(("pairs", {"chunk_rows": rows}) for rows in (None, 1200, 300)),
        *(("drafter", o) for o in ({}, {"chunk_rows": 500}, ROWS)),
        ("drafter of steps", {"chunk_rows": 333}),
        *(("function", o) for o in ({}, {"valid_rows": 1500}, {"chunk_rows": 300})),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_memory_of_others_on_the_cpu(name, options, dtype):
    rows, h, v = 4000, 64, 3000
    loss, memory, _ = PEAKS[name]
    hidden, weight, target = head_inputs(rows, h, v, dtype=dtype, masked=0.0)
    target[options.get("valid_rows", rows) :] = -100
    predict = memory
    if "logits" in options:
        predict = lambda *sizes, logits, **o: tigon.linear_divergence_memory(*sizes, **o)  # noqa: E731
    predicted = predict(*_sizes(memory, rows, h, v), dtype, device="cpu", **options)

    def step():
        hidden.grad = weight.grad = None
        loss(hidden, weight, target, **options).sum().backward()

    peak = peak_on_the_cpu(step, (hidden, weight))
    least = 0.85 if dtype == torch.bfloat16 and name != "divergence" else 0.4
    assert least * predicted.peak <= peak <= 1.1 * predicted.peak


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ((10, 10, 0), {}, "vocab must be >= 1, got 0"),
        ((0, 0, 0), {}, "hidden_size must be >= 1, got 0"),
        ((-1, -1, -1), {}, "rows must be >= 0, got -1"),
        ((10, 10.0, 10), {}, "hidden_size must be an int, got float"),
        ((10, 10, 10, torch.int64), {}, "dtype must be one of"),
        ((10, 10, 10), {"valid_rows": 11}, r"valid_rows must be in \[0, 10\]"),
        ((10, 10, 10), {"chunk_rows": 0}, "chunk_rows must be >= 1, got 0"),
        ((10, 10, 10), {"lora_rank": -1}, "lora_rank must be >= 0, got -1"),
        ((10, 10, 10), {"reduction": "avg"}, "reduction must be one of"),
        ((10, 10, 10), {"max_workspace_mb": float("inf")}, "max_workspace_mb must be finite"),
        ((10, 10, 10), {"max_workspace_mb": "aaa"}, "max_workspace_mb must be a number, got str"),
    ],
)
def test_memory_of_sizes_that_no_head_has(sizes, options, message):
    with pytest.raises(tigon.Error, match=message):
        tigon.linear_cross_entropy_memory(*sizes, **options)


@pytest.mark.parametrize(
    "memory, sizes",
    [
        (tigon.linear_cross_entropy_memory, (8192, 4096, 128256)),
        (tigon.linear_log_prob_memory, (8192, 4096, 128256)),
        (tigon.linear_preference_memory, (4, 2048, 4096, 128256)),
        (tigon.linear_divergence_memory, (8192, 4096, 128256)),
        (_drafter_memory, (8192, 4096, 128256)),
        (tigon.linear_loss_memory, (8192, 4096, 128256)),
    ],
)
def test_memory_on_any_name_of_a_device(memory, sizes):
    for kind in ("cuda", "cpu"):
        want = memory(*sizes, device=kind)
        for device in (f"{kind}:0", torch.device(kind), torch.device(kind, 1)):
            assert memory(*sizes, device=device) == want
    for device in ("meta", "xyz", None):
        with pytest.raises(tigon.Error, match="device must be a CPU or CUDA device, got"):
            memory(*sizes, device=device)
    with pytest.raises(tigon.Error, match="train_weight must be True or False, got str"):
        memory(*sizes, train_weight="no")


def test_memory_of_a_teacher_of_no_size():
    with pytest.raises(tigon.Error, match="teacher_hidden_size must be >= 1, got 0"):
        tigon.linear_divergence_memory(8, 8, 8, teacher_hidden_size=0)


def test_memory_of_no_rows():
    for dtype in (torch.bfloat16, torch.float64):
        assert tigon.linear_cross_entropy_memory(0, 10, 10, dtype).results >= 10 * 10 * dtype.itemsize


@pytest.mark.gpu
@pytest.mark.parametrize("options", MEMORY, ids=str)
def test_predicted_memory(options):
    step, leaves, predicted = _memory_case(8192, 512, 32000, "cuda", torch.bfloat16, 64, options)
    peak = _peak(step, leaves, "cuda")
    # cuBLASLt's 32 MiB are there where one of its kernels asks for them.
    assert 0.9 * predicted.peak - 2**22 - 2**25 <= peak <= 1.03 * predicted.peak + 2**22
