"""Cases of tigon.parallel: LoRA, main_grad, a cap on the workspace, the order of exchanges, refusals."""

import functools
import itertools
from unittest import mock

import torch
from parallel_cases import (
    LAYOUTS,
    LORA_SCALE,
    LOSS,
    OPTIONS,
    H,
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
        (got,), gradients = sharded(p, own, "padded", sp, LOSS, **more)
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
            loss = LOSS(hidden, weight, p["target"], group(), **kwargs)
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
        call = functools.partial(LOSS, hidden, weight, p["target"], group(), **kwargs)
        weight.main_grad.fill_(2.0)
        for _ in range(2):
            loss = call(chunk_rows=10)
            backward((loss,), p)
        _, columns, _ = LAYOUTS[layout][rank()]
        assert weight.grad is None and (weight.main_grad[columns:] == 2.0).all()
        added = (weight.main_grad[:columns].double() - 2.0) / 2.0
        torch.testing.assert_close(added, mine(exact[1], layout)[:columns], rtol=1e-4, atol=2e-6)
        with torch.no_grad():
            without = call(chunk_rows=10)
        assert torch.equal(everywhere(loss), without)
        loss = call().sum()
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
            loss = LOSS(hidden, weight, target, group(), vocab=2 * columns, max_workspace_mb=cap)
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
    on_host, same, low = device_type() == "cpu", "options must be the same", mine(p["lora_b"], "uneven")

    usual = {"hidden": p["hidden"], "weight": weight, "target": p["target"], "group": group()}

    def call(**options):
        return LOSS(**usual | options)

    def alike(**options):
        return options, options

    def apart(name, one, other):
        return {name: one}, {name: other}

    differ = {"label_smoothing": (0.1, 0.2), "softcap": (30.0, None), "logit_scale": (1.0, 2.0)}
    differ |= {"z_loss": (0.0, 1e-4), "ignore_index": (-100, 0), "outputs": (("loss", "predicted"), None)}
    differ |= {"shift": (0, 1), "chunk_rows": (5, 6), "partial_hidden_grad": (True, False)}
    differ |= {"max_peak_mb": (8, 9)}
    narrow, process = {"hidden": p["hidden"].bfloat16(), "weight": weight.bfloat16()}, int(first)
    part = {"hidden": p["hidden"][:-1], "target": p["target"][:-1]}
    tall = torch.tensor(3.0)
    rows = [  # options of either process, and words of both errors
        (*apart("label_smoothing", 2.0, 0.0), "label_smoothing" if first else "refused"),
        (*apart("temperature", "x", 1.0),),
        (*apart("temperature", 1.0, 2.0), same, f"got temperature={2.0 - first} here", f"process {process}"),
        *((*apart(name, *values), same, f"{name}=") for name, values in differ.items()),
        (narrow | {"logit_dtype": torch.float32}, narrow | {"logit_dtype": None}, same, "logit_dtype="),
        (*apart("reduction", "sum", "none"), same),
        (*apart("denominator", tall, None), same),
        (*apart("denominator", torch.ones(2), 3.0),),
        (*apart("vocab", V, V - 1), "vocab must be the same"),
        (*alike(vocab=V + 1), "shards must hold all 252 classes"),
        (*alike(first_class=0), "every class once"),
        (*apart("first_class", 0, None), "first_class"),
        (*alike(lora=(1, 2, 3)), "lora A"),
        (*alike(lora=(p["lora_a"], p["lora_b"], 1.0)), "lora must be (A [r, 32], B [12"),
        (*apart("lora", (p["lora_a"], low, 1.0), (p["lora_a"][:-1], low[:, :-1], 1.0)), same),
        (*apart("lora", (p["lora_a"], low, 1.0), None), same),
        (*alike(max_workspace_mb=0.02), "max_workspace_mb must be at least", "for one row of every"),
        (*apart("max_workspace_mb", 8, 9), same),
        (*alike(max_workspace_mb="x"), "max_workspace_mb"),
        (*alike(max_peak_mb=1e-3), "max_peak_mb must be at least", "for one row of every shard"),
        (*alike(class_weight=torch.ones(126)), "[251]"),
        (*apart("class_weight", torch.ones(V), torch.ones(126)), same),
        ({}, part, "number of rows must be the same"),
        (*apart("hidden", p["hidden"], p["hidden"].bfloat16()), "dtype must be the same"),
        (*alike(sequence_parallel=True), "target must be [24, 3]"),
        (
            *apart("hidden", p["hidden"].clone().requires_grad_(), p["hidden"]),
            "require grad must be the same",
        ),
        (*alike(group=None), "group must be a ProcessGroup"),
        (*alike(hidden=p["hidden"].double(), weight=weight.double()), "float32, bfloat16 or float16"),
    ]
    if on_host:  # elsewhere nobody reads values, or waits for a count, on the host
        shape, ones = p["target"].shape, torch.ones(V)
        rows += [
            (*apart("class_weight", ones, 2 * ones), same, "class_weight="),
            (*apart("token_weight", torch.ones(shape), torch.full(shape, 2.0)), "token_weight="),
            (*apart("lora", (p["lora_a"], low, 1.0), (p["lora_a"] + 1, low, 1.0)), "lora="),
            (*alike(valid_rows=3), "valid_rows must be the number of labels that count, 32, got 3"),
            (*apart("target", p["target"], p["target"] + (p["target"] == 3)), "target must be the same"),
        ]
        assert call(denominator=tall if first else 3.0).isfinite()
    else:  # where the host does not know it, a number and a tensor are not alike
        rows.append((*apart("denominator", tall, 3.0), same))
    for one, other, *words in rows:
        refused(functools.partial(call, **(one if first else other)), *words)
    other = functools.partial(parallel.linear_log_prob, p["hidden"], weight, p["target"], group())
    refused(other if first else functools.partial(call, reduction="none"), "must be the same")
    weight.requires_grad_().tigon_main_grad = True
    refused(call, "main_grad must be float32", "got none")
    weight.main_grad = torch.zeros(H, len(weight)).T
    refused(call, "main_grad must be contiguous")
    weight.main_grad, weight.tigon_main_grad = torch.zeros_like(weight), first
    refused(call, same)
    assert not weight.main_grad.any()
    logits = p["hidden"] @ mine(p["weight"], "uneven").T
    labels = p["target"] if first else p["target"][:-1]
    refused(lambda: parallel.cross_entropy(logits, labels, group()), *([] if first else ["target must be"]))


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
            got = LOSS(p["hidden"], shard, target, group(), vocab=vocab)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
