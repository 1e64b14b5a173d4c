"""Tools of the tests of functions on a linear head: inputs, gradients, the comparison with fp64."""

import gc

import torch
from checks import check_close, outputs_of
from torch.profiler import ProfilerActivity, profile


def head_inputs(rows=12, h=16, v=40, *, dtype=torch.float32, device="cpu", masked=0.25, scale=1.0):
    """Hidden states, a head's weight, labels."""
    lead = rows if isinstance(rows, tuple) else (rows,)
    hidden = torch.randn(*lead, h).to(device, dtype).requires_grad_()
    weight = torch.randn(v, h).mul(scale / h**0.5).to(device, dtype).requires_grad_()
    target = torch.randint(0, v, lead)
    target[torch.rand(lead) < masked] = -100
    return hidden, weight, target.to(device)


def widened(value):
    """A float tensor as an fp64 leaf, tuples and dicts item by item, anything else as it is."""
    if isinstance(value, dict):
        return {name: widened(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(widened(item) for item in value)
    if torch.is_tensor(value) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def leaves_of(values):
    """Every tensor that needs a gradient, in order."""
    found = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, tuple | list | dict):
            found += leaves_of(value)
        elif torch.is_tensor(value) and value.requires_grad:
            found.append(value)
    return found


def run(fn, args, options, upstream=None):
    """Outputs and gradients, detached."""
    outputs = outputs_of(fn(*args, **options))
    differentiable = [out for out in outputs if out.requires_grad]
    if upstream is None:
        upstream = [torch.linspace(0.5, 1.5, out.numel()).view(out.shape) for out in differentiable]
    upstream = [g.to(out.device, out.dtype) for g, out in zip(upstream, differentiable, strict=True)]
    grads = (
        torch.autograd.grad(differentiable, leaves_of([*args, options]), upstream) if differentiable else ()
    )
    return [*(out.detach() for out in outputs), *grads]


def _scaled(value):
    """The floats of arguments, each times a random number of 0.5 to 1.5."""
    if isinstance(value, dict):
        return {name: _scaled(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_scaled(item) for item in value)
    if torch.is_tensor(value) and value.is_floating_point():
        return (value.detach() * (0.5 + torch.rand_like(value))).requires_grad_(value.requires_grad)
    return value


def compare(fn, plain, args, options, noise=0.0):
    """fn against the same formula in plain PyTorch, in fp64 and in its own precision (tests/ops/checks.py).

    `noise` is a share of the largest value below which a difference is not looked at: sums that cancel.
    """
    got = run(fn, args, options)
    again = run(fn, args, options)
    plain_options = {
        name: value for name, value in options.items() if name not in ("chunk_rows", "valid_rows")
    }

    def plain_runs(args, options):
        return run(plain, args, options), run(plain, widened(args), widened(options))

    eager, exact = plain_runs(args, plain_options)
    for i, (a, twice, b, c) in enumerate(zip(got, again, eager, exact, strict=True)):
        assert torch.equal(a.nan_to_num(), twice.nan_to_num()), f"result {i}: two runs differ"
        if not a.is_floating_point():
            assert torch.equal(a, c), f"result {i}"
            continue
        error = (a.double() - c).abs()
        if not error.numel() or error.max() <= noise * c.abs().max():
            continue

        def another_draw(seed, i=i):
            torch.manual_seed(seed)
            others, changed = _scaled((args, options))
            b, c = plain_runs(others, {name: changed[name] for name in plain_options})
            a = run(fn, others, changed)[i]
            return a, b[i].to(a.dtype), c[i]

        check_close(f"result {i}", a, b.to(a.dtype), c, another_draw)


def peak_on_the_cpu(step, leaves):
    """The most memory that a second step holds at a time.

    What a matmul of the framework takes and frees inside itself (operands widened where a CPU has no bf16
    arithmetic) is left out, as the prediction leaves it out; what a matmul leaves behind counts.
    """
    step()
    for leaf in leaves:
        leaf.grad = None
    gc.collect()  # what earlier tests left would be freed within the step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = prof.profiler.kineto_results.events()
    matmuls = [e for e in events if e.name() in ("aten::mm", "mkldnn::_linear_pointwise")]
    assert matmuls
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        before, now = now, now + event.nbytes()
        if not any(p.start_ns() <= event.start_ns() <= p.end_ns() for p in matmuls):
            peak = max(peak, before, now)
    return peak
