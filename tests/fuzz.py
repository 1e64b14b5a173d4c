"""Random calls of every public function, for as long as it is given: ``make fuzz ARGS="--seconds 60"``.

Four kinds of rounds, each named by its kind, function and seed, which ``--again`` runs once more:

* ``case``: sizes, layouts, dtypes and options of tests/ops/test_random_cases.py, by the rule of
  tests/ops/checks.py: twice the error of plain PyTorch against float64, nothing modified, the same bits.
* ``options``: a good call of tests/ops/calls.py with options drawn by their kinds, beside itself in float64,
  which runs the plain formula: both are refused, or both are near, their gradients too.
* ``wrong``: the same with arguments that are none: tigon.Error in the function's words, nothing modified.
* ``model``: a life of a patched model of transformers beside its stock twin (fuzz_models.py).
"""

import argparse
import collections
import inspect
import logging
import random
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "ops")]

import calls
import test_random_cases as random_cases
import test_wrong_calls as wrong_calls
import torch
from checks import check_case, same_bits

import fuzz_models
import tigon
from cases import modules
from cases.case import Case, lay_out

MODULES = modules()
CALLS = {call.name: call for call in wrong_calls.CALLS}
NOT_DRAWN = {"inplace", "seed", "max_workspace_mb", "max_peak_mb"}  # float64 has no workspace
TRAINED = ("x", "q", "k", "hidden", "logits", "student", "log_prob", "gate", "weight", "rows")
CONSTANT_WEIGHT = {"logits", "q"}  # beside them weight is of classes, or of queries
# A pair at its margin counts or does not; gradients are clipped in place; codes have no scales in float64.
NOT_BESIDE_FLOAT64 = {"contrastive_loss with all", "clip_grad_norm_", "dequantize"}
SIGNS = {"tvd", "linear_tvd"}  # whose gradients are signs of a difference, which rounding turns
LARGEST = 1e4  # where exponentials are larger, they are as far apart as their exponents' roundings
device = "cpu"  # of the tensors: --device
NEAR = 2e-3  # of the largest value: what a wrong number breaks, not a lost digit


def fuzz_case(op: str, seed: int) -> None:
    draw = random.Random(f"fuzz {op} {seed}")
    dtype = draw.choice(random_cases.DTYPES)
    params = random_cases.DRAWERS.get(op, random_cases._one_tensor)(draw)
    try:
        check_case(MODULES[op], Case(f"fuzz {seed}", params), device, dtype)
    except AssertionError as error:
        over = re.search(r"error (\S+) over (\S+);.* the values (\S+)", str(error))
        error, bound, size = map(float, over.groups()) if over else (1.0, 0.0, 1.0)
        if error > 4 * bound and error > 1e-10 * size and size > 1e-12:
            raise  # of thousands of draws some are over the rule by chance, or are rounding and nothing else


def choices(call: calls.Call, name: str) -> list:
    """What an option may be, of those that are a name: its error lists them."""
    try:
        call(**{name: "?"})
    except tigon.Error as error:
        return re.findall(r"'(\w+)'", str(error).partition(", got")[0])
    return []


def option(draw: random.Random, call: calls.Call, p: inspect.Parameter):
    """A value of the option's kind, which may or may not fit the others."""
    kind = str(p.annotation)
    if kind == "bool":
        return draw.random() < 0.5
    if kind == "str":
        return draw.choice(choices(call, p.name) or [p.default])
    if p.name == "softcap":  # a low cap makes ties of float32's largest logits, and argmax another class
        return draw.choice((p.default, 30.0, 100.0))
    if kind.startswith("float"):
        return draw.choice((p.default, 0.0 if p.default == 0.0 else 0.2, 0.5, 1.0, 2.0, 7.5))
    if kind.startswith("int"):
        return draw.choice((p.default, None, 0, 1, 2, 7))
    return p.default


def placed(value):
    if isinstance(value, (tuple, list)):
        return type(value)(placed(one) for one in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def laid_out(draw, value):
    if isinstance(value, (tuple, list)):
        return type(value)(laid_out(draw, one) for one in value)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    layout = draw.choice(
        [name for name in random_cases.LAYOUTS[:5] if value.dim() > 1 or name != "transposed"]
    )
    return lay_out(value, layout)


def results(function, arguments: dict) -> tuple[list, list] | str:
    """Results and gradients of the float tensors, or the error."""
    tensors = [t for _, t in calls.tensors_of([*arguments.values()]) if t.is_floating_point()]
    torch.manual_seed(0)  # of what drops
    try:
        found = calls.call(function, arguments)
    except tigon.Error as error:
        return str(error)
    found = [y for _, y in calls.tensors_of(found) if y.is_floating_point()]
    roots = [y for y in found if y.requires_grad]
    if not roots:
        return found, []
    slopes = [torch.linspace(-0.5, 1.0, y.numel(), device=y.device).to(y.dtype).view(y.shape) for y in roots]
    wanted = [t for t in tensors if t.requires_grad]
    return found, list(torch.autograd.grad(roots, wanted, slopes, allow_unused=True))


def fuzz_options(name: str, seed: int) -> None:
    draw, call = random.Random(f"options {name} {seed}"), CALLS[name]
    torch.manual_seed(seed)
    good, parameters = call.draw(), inspect.signature(call.function).parameters
    # On CUDA a wrong number of rows is NaN, or not looked at.
    skipped = NOT_DRAWN | ({"valid_rows"} if device == "cuda" else set())
    free = [p for key, p in parameters.items() if p.default is not p.empty and key not in skipped]
    free = [p for p in free if not isinstance(good.get(p.name), (torch.Tensor, tuple, list))]
    for p in draw.sample(free, min(len(free), draw.randrange(4))):
        good[p.name] = option(draw, call, p)
    good = {key: laid_out(draw, placed(value)) for key, value in good.items()}
    trained = [key for key in TRAINED if isinstance(good.get(key), torch.Tensor) and draw.random() < 0.8]
    trained = [key for key in trained if key != "weight" or not CONSTANT_WEIGHT & good.keys()]
    found = []
    for of in (torch.float32, torch.float64):  # 16 bits would choose other labels, experts and negatives
        arguments = {key: calls.converted(value, of) for key, value in good.items()}
        for key in trained:
            t = arguments[key]
            arguments[key] = t.detach().requires_grad_(t.is_floating_point())
        kept = [t.detach().clone() for _, t in calls.tensors_of([*arguments.values()])]
        found.append(results(call.function, arguments))
        for (at, t), before in zip(calls.tensors_of([*arguments.values()]), kept, strict=True):
            assert same_bits(t, before), f"{at} was modified"
    ours, exact = found
    if isinstance(ours, str) or isinstance(exact, str):
        refused = ours if isinstance(ours, str) else exact
        assert isinstance(ours, str) == isinstance(exact, str), f"float32 or float64 alone: {refused}"
        return
    if name.split()[0] in SIGNS:
        ours, exact = (ours[0], []), (exact[0], [])
    wanted = [*exact[0], *exact[1]]
    if any(y is not None and y.numel() and y.abs().max() > torch.finfo(torch.float32).max for y in wanted):
        return
    for got, want in zip([*ours[0], *ours[1]], wanted, strict=True):
        assert (got is None) == (want is None)
        if got is None:
            continue
        if want.numel() == 0 or not want.abs().max() < LARGEST:
            continue
        size, error = want.abs().max().item(), (got.double() - want).abs().max().item()
        assert error <= NEAR * (size + 1e-3), f"{error} of {size}"


def fuzz_wrong(name: str, seed: int) -> None:
    draw, call = random.Random(f"wrong {name} {seed}"), CALLS[name]
    torch.manual_seed(seed)
    good = call.draw()
    kept = [t.detach().clone() for _, t in calls.tensors_of([*good.values()])]
    arguments, names = dict(good), list(inspect.signature(call.function).parameters)
    for key in draw.sample(names, min(len(names), draw.choice((1, 1, 2, 3)))):
        place, part = draw.choice(list(wrong_calls.places(arguments.get(key))))
        pool = wrong_calls.values() | (wrong_calls.changed(part) if isinstance(part, torch.Tensor) else {})
        value = wrong_calls.put(arguments.get(key), place, pool[draw.choice(list(pool))])
        if not wrong_calls.is_taken(call, key, value):
            arguments[key] = value
    modifies = arguments.get("inplace") is True or call.function is tigon.clip_grad_norm_
    problem = wrong_calls.outcome(call.function, arguments)
    assert not problem, problem
    if not modifies:
        for (at, t), before in zip(calls.tensors_of([*good.values()]), kept, strict=True):
            assert same_bits(t, before), f"{at} was modified"


KINDS = {
    "case": (fuzz_case, list(MODULES)),
    "options": (fuzz_options, [name for name in CALLS if name not in NOT_BESIDE_FLOAT64]),
    "wrong": (fuzz_wrong, list(CALLS)),
    "model": (fuzz_models.fuzz_model, fuzz_models.NAMES),
}


def round_of(kind: str, name: str, seed: int) -> str:
    """The problem that a round found, or nothing."""
    try:
        KINDS[kind][0](name, seed)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # an assertion of the rule, or whatever a call raised
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".split("\n")[0][:400]
        return f"{text} ({Path(where.filename).name}:{where.lineno})"
    return ""


def device_is_lost() -> bool:
    """Whether every call on the GPU fails from now on, as after an access out of bounds."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> int:
    global device
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draws; another one every time where none"
    )
    parser.add_argument(
        "--only", default="", help="a part of the kind and the function, such as 'case rms_norm'"
    )
    parser.add_argument("--rounds", type=int, default=None, help="in the place of seconds: always the same")
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--again", default="", help="one round by its name: 'case rms_norm 17'")
    options = parser.parse_args()
    device = fuzz_models.device = options.device
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    if options.again:
        kind, *name, seed = options.again.split()
        KINDS[kind][0](" ".join(name), int(seed))
        print("nothing found")
        return 0
    first = random.randrange(2**32) if options.seed is None else options.seed
    draw, end = random.Random(first), time.monotonic() + options.seconds
    pool = [
        (kind, name)
        for kind, (_, names) in KINDS.items()
        for name in names
        if options.only in f"{kind} {name}"
    ]
    counts, failed = collections.Counter(), []
    weights = {
        "case": 1.0,
        "options": 1.0,
        "wrong": 4.0,
        "model": 0.01,
    }  # wrong calls are quick, lives are not
    rounds = options.rounds
    while pool and (time.monotonic() < end if rounds is None else counts.total() < rounds):
        kind = draw.choices(list(KINDS), [weights[k] * any(k == p[0] for p in pool) for k in KINDS])[0]
        name = draw.choice([name for k, name in pool if k == kind])
        seed = draw.randrange(2**32)
        counts[kind] += 1
        if problem := round_of(kind, name, seed):
            failed.append(f"{kind} {name} {seed}")
            print(f"{failed[-1]}: {problem}", flush=True)
            if device_is_lost():
                print("the device is lost: no other round can run")
                break
    drawn = ", ".join(f"{n} of {kind}" for kind, n in counts.items())
    print(f"seed {first}: {drawn}; {len(failed)} found something")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
