"""Cases of tigon.parallel: LoRA, main_grad, a cap on the workspace, the order of exchanges, refusals."""

import functools
import itertools
from unittest import mock

import torch
from parallel_cases import (
    LAYOUTS,
    LORA_SCALE,
    OPTIONS,
    RANK,
    H,
    S,
    V,
    backward,
    check,
    compare,
    drawn,
    everywhere,
    formula,
    group,
    loss_of,
    mine,
    operands,
    plain,
    problem,
    sharded,
)
from two_processes import case, device_type, rank, refused

import tigon
from tigon import parallel
from tigon.ops.loss_head import matmuls
from tigon.parallel import plan, stream


@case(**{name.replace(" ", "_"): (name,) for name in ("plain", "none", "all")})
def parallel_lora(name):
    """A replicated, B sharded as the weight: A's gradient is that of all classes, on every process."""
    options = OPTIONS[name] | {"lora": True}
    for dtype, sp, chunk in itertools.product((torch.float32, torch.bfloat16), (False, True), (None, 10)):
        check(options, dtype, seed=20, sp=sp, chunk_rows=chunk)


@case(**{name: (name,) for name in LAYOUTS})
def parallel_lora_layout(layout):
    for name, sp, more in (
        ("none", True, {"keep_mb": 1.0}),
        ("smooth rows", False, {"keep_mb": 0.0}),
        ("plain", False, {}),
    ):
        options = OPTIONS[name] | {"lora": True}
        check(options, seed=21, layout=layout, sp=sp, chunk_rows=10, **more)


@case
def parallel_lora_log_prob():
    options = {"softcap": 7.0, "temperature": 0.8, "lora": True}
    more = {"entropy": True, "chunk_rows": 10}
    for dtype, sp in itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        draw, unsharded = drawn(dtype, 22), functools.partial(formula, options=options, entropy=True)
        compare(draw, options, "padded", sp, parallel.linear_log_prob, unsharded, **more)


@case
def parallel_lora_wide_logits():
    """Logits in float32, beside one process's."""
    p = problem(torch.bfloat16, 29)
    options = {"reduction": "none", "logit_dtype": torch.float32}
    own = options | {"lora": True}
    want = tigon.linear_cross_entropy(
        p["hidden"], p["weight"], p["target"], lora=(p["lora_a"], p["lora_b"], LORA_SCALE), **options
    )
    for sp, keep_mb in itertools.product((False, True), (0.0, 1.0)):
        more = {"chunk_rows": 10, "keep_mb": keep_mb}
        (got,), gradients = sharded(p, own, "padded", sp, parallel.linear_cross_entropy, **more)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert all(g is None or torch.isfinite(g).all() for g in gradients)


@case
def parallel_lora_alone():
    """Some of the gradients: the others are not formed, and those that are have the same bits."""
    p = problem(torch.float32, 23)
    for reduction, sp in (("mean", False), ("none", True), ("none", False)):
        want = None
        for trained in ((0, 1, 2, 3, 4), (2, 3), (2,), (3,), (0, 2), (4,), (0, 4)):
            options = {"reduction": reduction, "lora": True, "bias": True}
            hidden, weight, bias, kwargs = operands(p, options, "uneven", sp)
            leaves = (hidden, weight, *kwargs["lora"][:2], bias)
            for i, leaf in enumerate(leaves):
                leaf.requires_grad_(i in trained)
            loss = parallel.linear_cross_entropy(hidden, weight, p["target"], group(), **kwargs)
            backward((loss,), p)
            grads = [leaf.grad for leaf in leaves]
            want = want or grads
            for i, (got, whole) in enumerate(zip(grads, want, strict=True)):
                assert (got is not None) == (i in trained) and (got is None or torch.equal(got, whole))


@case(**{name.replace(" ", "_"): (name,) for name in ("plain", "none", "denominator", "all")})
def parallel_main_grad(name):
    """The weight's gradient in float32, in main_grad."""
    options = OPTIONS[name] | {"main_grad": True}
    ways = ({}, {"chunk_rows": 10}, {"chunk_rows": 10, "keep_mb": 1.0})
    for dtype, sp, more in itertools.product((torch.float32, torch.bfloat16), (False, True), ways):
        check(options, dtype, seed=24, layout="padded", sp=sp, **more)


@case
def parallel_main_grad_adds():
    """To what is there, by each call and use of a graph; the loss has the bits that it has without."""
    for layout, options in itertools.product(LAYOUTS, ({}, {"lora": True, "reduction": "none"})):
        p = problem(torch.float32, 25)
        _, exact = plain(p, torch.float64, lambda p, o=options: [formula(p, o)])
        hidden, weight, _, kwargs = operands(p, options | {"main_grad": True}, layout, False)
        weight.main_grad.fill_(2.0)
        for _ in range(2):
            loss = parallel.linear_cross_entropy(
                hidden, weight, p["target"], group(), **kwargs, chunk_rows=10
            )
            backward((loss,), p)
        _, columns, _ = LAYOUTS[layout][rank()]
        assert weight.grad is None and (weight.main_grad[columns:] == 2.0).all()
        added = (weight.main_grad[:columns].double() - 2.0) / 2.0
        torch.testing.assert_close(added, mine(exact[1], layout)[:columns], rtol=1e-4, atol=2e-6)
        with torch.no_grad():
            without = parallel.linear_cross_entropy(
                hidden, weight, p["target"], group(), **kwargs, chunk_rows=10
            )
        assert torch.equal(everywhere(loss), without)
        loss = parallel.linear_cross_entropy(hidden, weight, p["target"], group(), **kwargs).sum()
        weight.main_grad.zero_()
        loss.backward(retain_graph=True)
        once = weight.main_grad.clone()
        loss.backward()
        torch.testing.assert_close(weight.main_grad, 2 * once, rtol=1e-4, atol=1e-6)


@case
def parallel_workspace_cap():
    """Chunks shrink alike in all processes, whatever each of them holds."""
    for (layout, sp), name in itertools.product(
        (("uneven", False), ("empty", False), ("padded", True)), ("all", "plain")
    ):
        options, seen = OPTIONS[name], []
        divide = plan.divide

        def watched(*args, seen=seen, divide=divide, **kwargs):
            seen.append(divide(*args, **kwargs))
            return seen[-1]

        cap = 34.0 if device_type() == "cuda" else 0.07 if layout == "empty" else 0.045
        with mock.patch.object(stream, "divide", watched):
            check(options, seed=26, layout=layout, sp=sp, max_workspace_mb=cap)
        counts = torch.tensor([len(chunks) for chunks in seen], dtype=torch.int32)
        everywhere(counts.float())
        assert device_type() == "cuda" or counts.min() > 1, counts  # there the matmuls' own memory is more
    if device_type() == "cuda":
        rows, size, columns, cap = 4096, 512, 16000, 96
        hidden = torch.randn(rows, size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(columns, size, dtype=torch.bfloat16, requires_grad=True)
        target = torch.arange(rows)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = parallel.linear_cross_entropy(
                hidden, weight, target, group(), vocab=2 * columns, max_workspace_mb=cap
            )
            peak = torch.cuda.max_memory_allocated() - before
            del loss
        gradients = 2 * rows * size + 4 * columns * size
        assert peak <= gradients + (cap << 20), (peak - gradients) / 2**20


@case
def parallel_peak_cap():
    """Values under a bound of the peak that only small chunks keep."""
    least = 32.1 if device_type() == "cuda" else 0.1
    for (layout, sp), name in itertools.product((("uneven", False), ("padded", True)), ("plain", "none")):
        for dtype in (torch.float32, torch.bfloat16):
            check(OPTIONS[name], dtype, seed=30, layout=layout, sp=sp, max_peak_mb=least)


@case
def parallel_parts():
    """Chunks of parts on every device, however few their rows."""
    for sp, keep_mb in itertools.product((False, True), (None, 0.0)):
        with mock.patch.multiple(plan, _LEAST_PART=1, _ALIGNED=1):
            for name in ("plain", "all"):
                options = OPTIONS[name] | {"lora": True}
                check(options, torch.bfloat16, seed=27, sp=sp, keep_mb=keep_mb, chunk_rows=20)


@case
def parallel_order_of_exchanges():
    """What is exchanged is started before a matmul, and waited for after it."""
    said = []

    def told(word, function):
        def call(*args, **kwargs):
            said.append(word(args) if callable(word) else word)
            return function(*args, **kwargs)

        return call

    def gather(self, part, whole=None):
        wait = start_gather(self, part, whole)
        number = sum(word.startswith("gather") for word in said)
        said.append(f"gather {number}")
        return told(f"wait {number}", wait)

    start_gather = stream.Work.start_gather
    p = problem(torch.float32, 28)
    with (
        mock.patch.multiple(plan, _LEAST_PART=1, _ALIGNED=1),
        mock.patch.object(matmuls, "_logits", told("logits", matmuls._logits)),
        mock.patch.object(
            matmuls,
            "_gradients",
            told(lambda args: "dweight" if args[3] is None else "dhidden", matmuls._gradients),
        ),
        mock.patch.object(stream.Work, "start_gather", gather),
        mock.patch.object(stream.Work, "start_all_reduce", told("reduce", stream.Work.start_all_reduce)),
    ):
        parts = len(plan._FRACTIONS) + 1
        chunks = range(parts), range(parts, 2 * parts)
        loss_of(p, reduction="mean", chunk_rows=18, label_smoothing=0.1)
        want = []
        for chunk in chunks:
            want += [f"logits gather {i}" for i in chunk]
            want += [*(f"wait {i} dhidden reduce" for i in chunk), "dweight"]
        assert " ".join(said) == " ".join(want), said
        said.clear()
        loss_of(p, reduction="mean", chunk_rows=18)  # in one pass over the logits
        want = []
        for first, *others in chunks:
            want += [f"logits gather {first}"]
            want += [f"logits wait {i - 1} dhidden reduce gather {i}" for i in others[:-1]]
            want += [f"logits gather {others[-1]}"]
            want += [*(f"wait {i} dhidden reduce" for i in others[-2:]), "dweight"]
        assert " ".join(said) == " ".join(want), said
        said.clear()
        with torch.no_grad():
            loss_of(p, reduction="mean", chunk_rows=18)
        between = " ".join(f"logits gather {i} wait {i - 1}" for i in range(1, 2 * parts))
        assert " ".join(said) == f"logits gather 0 {between} wait {2 * parts - 1}", said


@case
def parallel_refusals():
    """What one process gets wrong is an error in both, at once."""
    p = problem(torch.float32, 12)
    weight, first = mine(p["weight"], "uneven"), rank() == 0
    call = functools.partial(parallel.linear_cross_entropy, p["hidden"], weight, p["target"], group())
    refused(
        lambda: call(label_smoothing=2.0 if first else 0.0), *(["label_smoothing"] if first else ["refused"])
    )
    refused(lambda: call(temperature="x" if first else 1.0))
    process = f"got temperature={1.0 if first else 2.0} here and another in process {int(first)}"
    refused(lambda: call(temperature=1.0 if first else 2.0), "options must be the same", process)
    differ = {"label_smoothing": (0.1, 0.2), "softcap": (30.0, None), "logit_scale": (1.0, 2.0)}
    differ |= {"z_loss": (0.0, 1e-4), "ignore_index": (-100, 0), "outputs": (("loss", "predicted"), None)}
    differ |= {"shift": (0, 1), "chunk_rows": (5, 6), "logit_dtype": (torch.float32, None)}
    differ |= {"partial_hidden_grad": (True, False)}
    narrow = {"hidden": p["hidden"].bfloat16(), "weight": weight.bfloat16()}
    for name, values in differ.items():
        of = narrow if name == "logit_dtype" else {"hidden": p["hidden"], "weight": weight}
        both = functools.partial(parallel.linear_cross_entropy, **of, target=p["target"], group=group())
        refused(
            lambda both=both, name=name, values=values: both(**{name: values[rank()]}),
            "options must be the same",
            f"{name}=",
        )
    if device_type() == "cpu":  # elsewhere nobody reads values on the host
        scale = torch.ones(V) if first else torch.full((V,), 2.0)
        refused(lambda: call(class_weight=scale), "options must be the same", "class_weight=")
        refused(lambda: call(token_weight=torch.full(p["target"].shape, 1.0 + rank())), "token_weight=")
        moved = p["lora_a"] + rank()
        refused(lambda: call(lora=(moved, mine(p["lora_b"], "uneven"), 1.0)), "lora=")
    refused(
        lambda: (
            parallel.linear_log_prob(p["hidden"], weight, p["target"], group())
            if first
            else call(reduction="none")
        ),
        "must be the same",
    )
    refused(lambda: call(reduction="sum" if first else "none"), "options must be the same")
    refused(lambda: call(denominator=torch.tensor(3.0) if first else None), "options must be the same")
    three = torch.tensor(3.0) if first else 3.0
    if device_type() == "cpu":
        assert call(denominator=three).isfinite()
    else:  # where the host does not know it, a number and a tensor are not alike
        refused(lambda: call(denominator=three), "options must be the same")
    refused(lambda: call(denominator=torch.ones(2) if first else 3.0))
    refused(lambda: call(vocab=V if first else V - 1), "vocab must be the same")
    refused(lambda: call(vocab=V + 1), "shards must hold all 252 classes")
    refused(lambda: call(first_class=0), "every class once")
    refused(lambda: call(first_class=0 if first else None), "first_class")
    refused(lambda: call(lora=(1, 2, 3)), "lora A")
    a, b = p["lora_a"], mine(p["lora_b"], "uneven")
    refused(lambda: call(lora=(a, p["lora_b"], 1.0)), "lora must be (A [r, 32], B [12")
    ranks = slice(0, RANK if first else RANK - 1)
    refused(lambda: call(lora=(a[ranks], b[:, ranks], 1.0)), "options must be the same")
    refused(lambda: call(lora=(a, b, 1.0) if first else None), "options must be the same")
    refused(lambda: call(max_workspace_mb=0.02), "max_workspace_mb must be at least", "for one row of every")
    refused(lambda: call(max_workspace_mb=8 + rank()), "options must be the same")
    refused(lambda: call(max_workspace_mb="x"), "max_workspace_mb")
    refused(lambda: call(max_peak_mb=1e-3), "max_peak_mb must be at least", "for one row of every share")
    refused(lambda: call(max_peak_mb=8 + rank()), "options must be the same", "max_peak_mb=")
    if device_type() == "cpu":  # elsewhere nobody waits for the count
        refused(lambda: call(valid_rows=3), "valid_rows must be the number of labels that count, 32, got 3")
    refused(lambda: call(class_weight=torch.ones(126)), "[251]")
    refused(lambda: call(class_weight=torch.ones(V if first else 126)), "options must be the same")
    rows = slice(0, S if first else S - 1)
    part = functools.partial(parallel.linear_cross_entropy, group=group())
    refused(lambda: part(p["hidden"][rows], weight, p["target"][rows]), "number of rows must be the same")
    dtype = torch.float32 if first else torch.bfloat16
    refused(lambda: part(p["hidden"].to(dtype), weight, p["target"]), "dtype must be the same")
    if device_type() == "cpu":  # elsewhere nobody reads the labels on the host
        other = p["target"] + rank() * (p["target"] == 3)
        refused(lambda: part(p["hidden"], weight, other), "target must be the same")
    refused(lambda: part(p["hidden"], weight, p["target"], sequence_parallel=True), "target must be [24, 3]")
    hidden = p["hidden"].clone().requires_grad_(first)
    refused(lambda: part(hidden, weight, p["target"]), "require grad must be the same")
    refused(
        lambda: parallel.linear_cross_entropy(p["hidden"], weight, p["target"], None),
        "group must be a ProcessGroup",
    )
    refused(lambda: part(p["hidden"].double(), weight.double(), p["target"]), "float32, bfloat16 or float16")
    weight = weight.requires_grad_()
    weight.tigon_main_grad = True
    refused(lambda: part(p["hidden"], weight, p["target"]), "main_grad must be float32", "got none")
    weight.main_grad = torch.zeros(H, len(weight)).T
    refused(lambda: part(p["hidden"], weight, p["target"]), "main_grad must be contiguous")
    weight.main_grad, weight.tigon_main_grad = torch.zeros_like(weight), first
    refused(lambda: part(p["hidden"], weight, p["target"]), "options must be the same")
    assert not weight.main_grad.any()
    logits = p["hidden"] @ mine(p["weight"], "uneven").T
    refused(
        lambda: parallel.cross_entropy(logits, p["target"][rows], group()),
        *([] if first else ["target must be"]),
    )


@case
def parallel_vocabularies_of_other_sizes():
    """One process alone has other columns than in the call before."""
    p = problem(torch.float32, 19)
    for columns in (126, 125, 126, 120):
        whole = p["weight"][: columns + 125] if columns != 120 else p["weight"][:240]
        shard = whole.split([columns, len(whole) - columns])[rank()].clone()
        target = p["target"].clamp(min=0) % len(whole)
        want = tigon.linear_cross_entropy(p["hidden"], whole, target)
        for vocab in (None, len(whole)):
            got = parallel.linear_cross_entropy(p["hidden"], shard, target, group(), vocab=vocab)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
