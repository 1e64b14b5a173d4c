"""Sections of docs/results: bench/adapters.py, optimizer.py, parallel*.py, medusa.py and others."""

from __future__ import annotations

import adapters
import medusa
import mfu
import parallel_e2e
import small_steps
import titles
import trl_trainers
from tables import Section, by_provider, by_tokens, markdown, mib, ms

# Other AdamW, in records of bench/optimizer.py: PyTorch's two, and those of moments of 8 bits.
ADAMW = ("fused", "foreach", "bitsandbytes", "torchao")


def optimizer_section(run, _: list) -> Section:
    """A row for each set of parameters and kind; AdamW of others where they have the kind."""
    section, rows = Section(run, titles.heading(run), ""), []
    others = [name for name in ADAMW if any(r.keys() & {f"{name}_ms", f"{name}_error"} for r in run.records)]
    agreement, muon = {}, []
    for r in run.records:
        if r["kind"] == "muon":
            speed = section.compare(f"Muon, {r['parameters']}", r["tigon_ms"], {"torch": r["torch_ms"]})
            errors = [f"{r[f'{who}_error']:.1e}" for who in ("tigon", "torch")]
            muon.append([r["parameters"], ms(r["tigon_ms"]), ms(r["torch_ms"]), speed, *errors])
            continue
        if r["kind"] == "agreement":
            agreement = {name: r[name] for name in ("bf16", "fp32", "int8_beside_cpu") if name in r}
            continue
        peers = {name: r[f"{name}_ms"] for name in others if f"{name}_ms" in r}
        speed = section.compare(f"{r['parameters']} {r['kind']}", r["tigon_ms"], peers)
        section.of_limit.append(r["of_copy"])
        cells = [r["parameters"], r["kind"], f"{r['elements']:,} in {r['tensors']}", ms(r["copy_ms"])]
        cells += [ms(r["tigon_ms"]), f"{100 * r['of_copy']:.0f} %"]
        for name in others:
            error = r.get(f"{name}_error", "-").split(". ")[0]
            cells.append(ms(peers[name]) if name in peers else error)
        host = [r.get(f"{name}_host_us") for name in ("tigon", *others)]
        rows.append([*cells, speed, *("-" if us is None else f"{us:.0f}" for us in host)])
    head = (
        "parameters",
        "kind",
        "elements, tensors",
        "copy",
        "tigon",
        "of the copy",
        *others,
        "speed",
        "host us tigon",
        *(f"host us {name}" for name in others),
    )
    section.text = (
        "Milliseconds of one step, and the share that a device copy of the same bytes would take, which is "
        "not a\nbound: above 100 % the step moved its bytes faster than the copy. `fused`, `foreach`: "
        "`torch.optim.AdamW`. `speed`:\nof Tigon to the fastest of the others.\n\n" + markdown(head, rows)
    )
    if muon:
        head = ("Muon's step", "tigon", "torch", "speed", "error of tigon", "error of torch")
        section.text += f"\n\n{markdown(head, muon)}"
    if agreement:
        found = ", ".join(f"{name} {value:.1e}" for name, value in agreement.items())
        section.text += f"\n\nLargest difference from PyTorch's steps: {found}."
    return section


def parallel_section(run, op: str) -> Section:
    """A row for each case and provider of one op over several GPUs."""
    records = [r for r in run.records if r["op"] == op]
    section, rows = Section(run, titles.heading(run, op), "", op=op), []
    for case, measured in by_provider(records, lambda r: r["case"]).items():
        timed = {name: r for name, r in measured.items() if "ms" in r}
        for name, r in (measured | measured.elsewhere).items():
            if "ms" not in r:
                rows.append([case, str(r["gpus"]), name, r["error"][:120].replace("|", "/"), *["-"] * 6])
                continue
            limit = r["limit_ms"]
            cells = [ms(r["ms"]), ms(limit), f"{100 * limit / r['ms']:.0f} %"]
            cells += [ms(r[of]) if r.get(of) else "-" for of in ("divided_ms", "alone_ms")] + [mib(r)]
            cells.append(ms(r["exposed_ms"]) if "exposed_ms" in r else "-")
            rows.append([case, str(r["gpus"]), measured.shown(name, lambda r: r["provider"]), *cells])
        if "tigon" in timed:
            ours = timed.pop("tigon")
            section.of_limit.append(ours["limit_ms"] / ours["ms"])
            section.compare(f"{op} {case}", ours["ms"], {name: r["ms"] for name, r in timed.items()})
    head = (
        "case",
        "GPUs",
        "provider",
        "ms of a step",
        "limit",
        "of the limit",
        "divided",
        "the shard alone",
        "MiB of each GPU",
        "exposed",
    )
    section.text = (
        "The limit: the bare matmuls of a shard, for given logits a copy of the bytes of one process.\n"
        "`divided`: the bare matmuls of the whole head on one GPU, divided by the number of GPUs.\n"
        "`the shard alone`: one process with its shard as the whole vocabulary, without the others.\n"
        "`exposed`: "
        "communication beside no other kernel, by the profiler.\n\n" + markdown(head, rows)
    )
    return section


def parallel_e2e_section(run, _: list) -> Section:
    section = Section(run, titles.heading(run), parallel_e2e.table(run.records))
    for row in parallel_e2e.settings([r for r in run.records if "error" not in r]).values():
        section.comparisons += by_tokens(
            lambda r: f"{parallel_e2e.setting(r)}, {r['gpus']} GPUs, {r['batch']} x {r['seq']}", row
        )
    return section


def medusa_section(run, _: list) -> Section:
    section = Section(run, titles.heading(run), f"{medusa.table(run.records)}\n\n{mfu.NOTE}")
    measured = (r for r in run.records if "error" not in r)
    for row in by_provider(measured, lambda r: medusa.key(r | {"provider": None})).values():
        section.comparisons += by_tokens(
            lambda r: (
                f"Medusa, {r['model']}, stage {r['stage']}, {r['heads']} heads, {r['batch']} x {r['seq']}"
            ),
            row,
        )
    return section


def adapters_section(run, _: list) -> Section:
    """LoRA beside the frozen base, PEFT and Unsloth; the largest ratio to the frozen base first."""
    rows = {adapters.name_of(next(iter(row.values()))): row for row in adapters.cases(run.records).values()}
    section, lines = Section(run, titles.heading(run), ""), {}
    for name, row in rows.items():
        floor, ours = adapters.floor_of(row), row.get("tigon")
        if ours is None:
            continue

        peers = stock, *_ = [row.get(name) for name in ("peft", "peft_compile", "unsloth")]
        cells = [name, *(ms(r["ms"]) if r else "-" for r in (floor, ours, *peers))]
        cells += [f"{r['ms'] / floor['ms']:.2f}" if r and floor else "-" for r in (ours, stock)]
        found = {r["provider"]: r["ms"] for r in peers if r}
        cells.append(section.compare(f"LoRA, {name}", ours["ms"], found) if found else "-")
        cells += [f"{r['gb']:.1f}" if r and "gb" in r else "-" for r in (floor, ours, stock)]
        lines[name] = ours["ms"] / floor["ms"] if floor else 0.0, cells
    head = (
        "case",
        "frozen",
        "tigon",
        "PEFT",
        "PEFT, compiled",
        "Unsloth's functions",
        "tigon / frozen",
        "PEFT / frozen",
        "speed",
        "GB frozen",
        "GB tigon",
        "GB PEFT",
    )
    section.text = (
        "Milliseconds of forward and backward. `frozen` is the base without adapters: its two\n"
        "matmuls, or the model with `tigon.apply` and gradients of activations. The largest ratio to it\n"
        "comes first. `speed`: of Tigon to the fastest of the others. Unsloth's functions run in a\n"
        "model whose other parts are Tigon's. A case of DoRA has DoRA in all but the frozen base.\n"
        "The floor of `dequantize` is a copy of as many bytes, and of fp8 bases LoRA on the bf16 base.\n\n"
    ) + markdown(head, [cells for _, cells in sorted(lines.values(), reverse=True)])
    return section


def trl_section(run, _: list) -> Section:
    section = Section(run, titles.heading(run), f"{trl_trainers.table(run.records)}\n\n{mfu.NOTE}")
    for (what, rows), row in trl_trainers.settings([r for r in run.records if "error" not in r]).items():
        section.comparisons += by_tokens(lambda _, what=what, rows=rows: f"TRL, {what}, {rows}", row)
    return section


def small_steps_section(run, _: list) -> Section:
    """Tigon's graphs beside whatever is not Tigon; captured by hand it is forward and backward only."""
    section = Section(run, titles.heading(run), small_steps.table(run.records))
    for (what, rows), row in small_steps.settings([r for r in run.records if "error" not in r]).items():
        if "tigon_graphs" in row:
            peers = {way: small_steps.median(r) for way, r in row.items() if not way.startswith("tigon")}
            section.compare(f"{what}, {rows}", small_steps.median(row["tigon_graphs"]), peers)
    return section
