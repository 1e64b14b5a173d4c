"""Pages of docs/results, tables of README and docs/one-card.md, pictures, from the files of bench/results.

    python bench/results.py                                  docs/results/*.md and docs/img/*.png
    python bench/results.py out/mine.jsonl                   the tables of these files, printed
    python bench/results.py --no-pictures                    the pages alone
    python bench/results.py --check                          whether pages and table are those of the files

Every file below bench/results is recognised by its records: those of bench/run.py, host.py, e2e.py, floor.py,
convergence.py, adapters.py, optimizer.py, fp8.py, parallel.py, parallel_e2e.py, medusa.py, trl_trainers.py or
examples/train.py. A page holds a group of ops, with one table for each op and file, since runs are not
compared with each other.
Files in a folder named `older` share a page without pictures. Pages and pictures that belong to no file are
deleted.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import age
import cards
import convergence
import e2e
import floor
import fp8
import fp8_accuracy
import plot
import processes
import readme
import titles
from commands import command_lines, values
from files import GROUPS, Run, runs
from steps import (
    adapters_section,
    medusa_section,
    optimizer_section,
    parallel_e2e_section,
    parallel_section,
    small_steps_section,
    trl_section,
)
from store import ROOT
from tables import (
    Comparison,
    Section,
    by_provider,
    by_tokens,
    fastest_peer,
    markdown,
    mib,
    ms,
    notes,
    speed_text,
)

DATA, PAGES, IMAGES = ROOT / "bench/results", ROOT / "docs/results", ROOT / "docs/img"
NOTE = "<!--\nWritten by `make results` from the files of `bench/results`.\n-->"
LIMIT = (
    "Times are milliseconds. `limit` was measured in the same run: a device copy of the least bytes of the\n"
    "op, for the loss head its bare matmuls. `of limit`: limit / Tigon's time. Bold: the fastest.\n"
    "`speed`: of Tigon to the fastest peer. `behind`: that peer is more than 3 % ahead."
)
MEMORY = "`MiB`: peak memory of one call above what was allocated before."


# --- tables -----------------------------------------------------------------------------------


def op_section(run: Run, op: str) -> Section:
    """A row for each case and pass, a column for each provider; below it what providers could not do."""
    records = [r for r in run.records if r["op"] == op]
    providers = list(dict.fromkeys(r["provider"] for r in records if "ms" in r))
    providers.sort(key=lambda name: not name.startswith("tigon"))
    several = len({r["dtype"] for r in records}) > 1

    def name_of(r: dict) -> tuple[str, str]:
        name = f"{r['case']} {r['dtype']}" if several else r["case"]
        if r.get("upstream", 1.0) not in (1.0, "normal"):
            name += f", upstream {r['upstream']:g}"
        return name, r["pass"]

    section = Section(run, titles.heading(run, op), "", op=op)
    head = ["case", "pass", "limit", *providers, "of limit", "speed"]
    rows = []
    cases = by_provider((r for r in records if "ms" in r), name_of)
    for (case, which), measured in cases.items():
        best = min(r["ms"] for r in measured.values())

        def cell(r: dict | None, measured=measured, best=best) -> str:
            text = ms(r["ms"]) if r else "-"
            fastest = r and r["ms"] <= best and r is measured.get(r["provider"])
            return f"**{text}**" if fastest else text

        cells = [case, which, ms(next(iter(measured.values()))["limit_ms"])]
        cells += [measured.shown(name, cell) for name in providers]
        pair, speed, share = fastest_peer(measured), "-", "-"
        if "tigon" in measured:
            section.of_limit.append(measured["tigon"]["of_limit"])
            share = f"{100 * measured['tigon']['of_limit']:.0f} %"
            ours, peers = measured["tigon"], {}
            if pair:
                ours, peers = pair[0], {pair[1]["provider"]: pair[1]["ms"]}
            speed = section.compare(f"{titles.OPS.get(op, op)} {case}, {which}", ours["ms"], peers)
        cells += [share, speed]
        if not run.cpu:  # resident memory of a process tells too little of one call
            cells += [mib(measured.get("tigon")), mib(pair and pair[1])]
        rows.append(cells)
    memory = [] if run.cpu else ["MiB tigon", "MiB fastest peer"]
    section.text = markdown([*head, *memory], rows) + notes(cases.values())
    section.text += failures([r for r in records if "error" in r])
    return section


def failures(records: list[dict]) -> str:
    """What providers could not do; errors that differ in numbers alone are one line."""
    found: dict[tuple, list[dict]] = {}
    for r in records:
        found.setdefault((r["provider"], re.sub(r"\d+", "", r["error"])), []).append(r)
    lines = [
        f"- {same[0]['provider']}, {values(same, 'case').replace(',', ', ')}: {same[0]['error'][:120]}"
        for same in found.values()
    ]
    return "\n\nNot measured:\n\n" + "\n".join(lines) if lines else ""


def e2e_section(run: Run, _: list[Run]) -> Section:
    text = e2e.table(run.records) + ("" if run.cpu else f"\n\n{e2e.mfu.NOTE}")
    section = Section(run, titles.heading(run), text)
    measured = (r for r in run.records if "error" not in r)
    for row in by_provider(measured, lambda r: e2e.key(r | {"provider": None})).values():
        section.comparisons += by_tokens(lambda r: f"{e2e.setting(r)}, {r['batch']} x {r['seq']}", row)
    return section


def floor_section(run: Run, everything: list[Run]) -> Section:
    """The floor of a step beside the step of the same folder."""
    steps = {
        e2e.key(r): statistics.mean(r["step_ms"])
        for other in everything
        if other.kind == "e2e" and other.path.parent == run.path.parent
        for r in other.records
        if "step_ms" in r
    }
    text = "Least milliseconds of a step ([method](../benchmarks.md#whole-models)) and the step measured.\n\n"
    return Section(run, titles.heading(run), text + floor.table(run.records, steps))


def train_section(run: Run, _: list[Run]) -> Section:
    summary = run.records[0]
    first = next(iter(summary["runs"].values()))
    rows = [
        (
            name,
            f"{r['tokens_per_s']:,.0f}",
            f"{r['tokens_per_s'] / first['tokens_per_s']:.2f}x",
            f"{r['peak_bytes'] / 1e9:.2f} GB",
            f"{r['peak_bytes'] / first['peak_bytes']:.2f}x",
            f"{r['losses'][-1]:.4f}",
            "-" if r is first else f"{r['relative_difference']:.1e}",
        )
        for name, r in summary["runs"].items()
    ]
    head = ("", "tokens/s", "speed", "peak above the model", "memory", "final loss", "loss differs by")
    section = Section(run, titles.heading(run), f"{summary['title']}.\n\n{markdown(head, rows)}")
    peers = {name: r for name, r in summary["runs"].items() if name in ("stock", "liger")}
    if peers and (ours := summary["runs"].get("tigon")):
        name, peer = max(peers.items(), key=lambda item: item[1]["tokens_per_s"])
        rates = [f"{r['tokens_per_s']:,.0f} tokens/s" for r in (ours, peer)]
        speed = ours["tokens_per_s"] / peer["tokens_per_s"]
        section.comparisons.append(Comparison(summary["title"], rates[0], name, rates[1], speed))
    return section


def convergence_section(run: Run, _: list[Run]) -> Section:
    """Whether patched models learn what stock models learn."""
    text = (
        "Stock is trained eight times as the same function with its sums in another order; `band` is the\n"
        "largest distance of two of these runs, `distance` the median distance of patched runs from them.\n"
        "`inside`: every distance is within its band ([method](../benchmarks.md#convergence))."
    )
    return Section(run, titles.heading(run), f"{text}\n\n{convergence.table(run.records)}")


def host_section(run: Run, _: list[Run]) -> Section:
    empty = next((r["empty"] for r in run.records if "empty" in r), {})
    records = [r for r in run.records if "tigon" in r]
    passes = list(empty or records[0]["tigon"])
    head = ["op", *(f"{who}, {kind}" for kind in passes for who in ("tigon", "pytorch", "speed"))]
    section, rows = Section(run, titles.heading(run), ""), []
    for r in records:
        cells = [r["op"]]
        for kind in passes:
            ours, theirs = r["tigon"][kind], r["pytorch"][kind]
            cells += [f"{ours:.1f}", f"{theirs:.1f}", speed_text(theirs / ours)]
            figures = f"{ours:.1f} us", "pytorch", f"{theirs:.1f} us"
            section.comparisons.append(Comparison(f"{r['op']}, {kind}", *figures, theirs / ours))
        rows.append(cells)
    if empty:
        rows.append(
            ["an empty autograd.Function", *(c for kind in passes for c in (f"{empty[kind]:.1f}", "-", "-"))]
        )
    text = f"{run.records[0]['gpu']}: microseconds of the host for one small call, and Tigon's speed.\n\n"
    section.text = text + markdown(head, rows)
    return section


def fp8_section(run: Run, _: list[Run]) -> Section:
    return Section(run, titles.heading(run), fp8.parts(run.records))


def fp8_accuracy_section(run: Run, _: list[Run]) -> Section:
    return Section(run, titles.heading(run), fp8_accuracy.table(run.records))


SECTIONS = {
    "e2e": e2e_section,
    "floor": floor_section,
    "train": train_section,
    "convergence": convergence_section,
    "fp8": fp8_section,
    "fp8_accuracy": fp8_accuracy_section,
    "host": host_section,
    "adapters": adapters_section,
    "optimizer": optimizer_section,
    "medusa": medusa_section,
    "parallel_e2e": parallel_e2e_section,
    "trl_trainers": trl_section,
    "small_steps": small_steps_section,
}


OF_OPS = {"op": op_section, "parallel": parallel_section}  # a section for each op


def sections(everything: list[Run]) -> dict[str, list[Section]]:
    """The parts of every page; ops in the order of GROUPS, the rest in that of the titles."""
    order = [op for ops in GROUPS.values() for op in ops]
    found: dict[str, list[Section]] = {}
    for run in everything:
        if run.kind not in OF_OPS:
            found.setdefault(run.page(), []).append(SECTIONS[run.kind](run, everything))
            continue
        for op in dict.fromkeys(r["op"] for r in run.records):
            found.setdefault(run.page(op), []).append(OF_OPS[run.kind](run, op))
    for parts in found.values():
        parts.sort(
            key=lambda part: (
                order.index(part.op) if part.op in order else len(order),
                part.run.path.parent.name == "h100",
                titles.place(part.run),
            )
        )
    pages = [*titles.PAGES, *sorted(found.keys() - titles.PAGES.keys())]
    return {page: found[page] for page in pages if page in found}


# --- pages ------------------------------------------------------------------------------------


def behind_list(parts: list[Section]) -> str:
    """The cases in which a peer is ahead by more than 3 %, the worst first; what was compared, what not."""
    comparisons = [c for part in parts for c in part.comparisons]
    behind = sorted((c for c in comparisons if c.behind), key=lambda c: c.speed)
    alone = sum(part.alone for part in parts)
    blocks = [f"## Where a peer is more than 3 % faster: {len(behind)} of {len(comparisons)} cases"]
    if behind:
        rows = [(c.what, c.ours, c.peer, c.theirs, f"{100 / c.speed - 100:.1f} %") for c in behind]
        blocks.append(
            markdown(("case", "Tigon", "fastest peer", "its figure", "Tigon takes longer by"), rows)
        )
    if alone:
        blocks.append(f"{alone} more cases have no peer in the same run, and are not compared.")
    return "\n\n".join(blocks)


def run_list(parts: list[Section]) -> str:
    """Device, versions, commits and commands of every file on a page."""
    blocks = []
    for run in {part.run.path: part.run for part in parts}.values():
        commands = "\n".join(command_lines(run))
        blocks.append(f"`{run.name}`: {run.where()}.\n\n```sh\n{commands}\n```")
    return "\n\n".join(blocks)


def render(page: str, parts: list[Section], shown: dict[Path, list[str]]) -> str:
    """The text of one page; `shown` names the pictures of every file."""
    links = "[Method](../benchmarks.md), [known gaps](../known-gaps.md), [all results](index.md)."
    blocks = [f"# {titles.page(page)}", NOTE, links]
    if op_parts := [part for part in parts if part.run.kind == "op"]:
        blocks.append(LIMIT if all(part.run.cpu for part in op_parts) else f"{LIMIT}\n{MEMORY}")
    compared = page != "older" and any(part.comparisons or part.alone for part in parts)
    if page == "older":
        blocks.append("Kept for peers that newer runs of the same ops do not have.")
    elif compared and page != "models":
        blocks.append(behind_list(parts))
    for part in parts:
        blocks += [f"## {part.heading}", part.text]
        blocks += [f"![{part.heading}](../img/{name})" for name in _of_section(part, shown)]
        blocks.append(f"`{part.run.name}`. {age.mark(part.run, part.op)}".strip())
    if compared and page == "models":
        blocks.append(behind_list(parts))
    blocks.append(f"## How to measure this again\n\n{run_list(parts)}")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _of_section(part: Section, shown: dict[Path, list[str]]) -> list[str]:
    names = shown.get(part.run.path, [])
    if part.run.kind != "op":
        return names
    own = [name for name in names if name.endswith(f"_{part.run.path.stem}_{part.op}.png")]
    return own + [n for n in names if part.op == "linear_cross_entropy" and "_over_" in n]


def _mean(values: list[float], form: Callable[[float], str]) -> str:
    return form(statistics.geometric_mean(values)) if values else "-"


def index(parts: dict[str, list[Section]]) -> str:
    """One chart, ten rows, where peers are faster, and a line for each page."""
    rows, worst = [], []
    for page, page_parts in parts.items():
        if page == "older":
            continue
        comparisons = [c for part in page_parts for c in part.comparisons]
        limits = [share for part in page_parts for share in part.of_limit]
        behind = [c for c in comparisons if c.behind]
        link = f"[{titles.page(page)}]({page}.md)"
        rows.append(
            (
                link,
                str(len(comparisons)),
                _mean([c.speed for c in comparisons], "{:.2f}x".format),
                str(len(behind)),
                _mean(limits, "{:.0%}".format),
                str(sum(part.alone for part in page_parts)),
            )
        )
        if behind:
            c = min(behind, key=lambda c: c.speed)
            worst.append((c.speed, (link, str(len(behind)), c.what, c.ours, f"{c.peer} {c.theirs}")))
    head = ("", "compared", "speed, mean", "behind", "of the limit, mean", "without a peer")
    older = "[older runs](older.md), " if "older" in parts else ""
    blocks = [
        "# Results",
        NOTE,
        "Each comparison holds records of one run: one card, one PyTorch, one commit "
        "([method](../benchmarks.md)).",
    ]
    if (DATA / "h200/e2e_six.jsonl").exists() and DATA in next(iter(parts.values()))[0].run.path.parents:
        blocks += ["![Six models](../img/six_models.png)", readme.table("")]
    blocks += [
        "## Where a peer is faster",
        "The worst case of each page; [known gaps](../known-gaps.md) has the reasons.",
        markdown(("", "cases", "the worst", "Tigon", "peer"), [row for _, row in sorted(worst)]),
        "## All pages",
        "A case is counted once for each pass and dtype. `speed`: of Tigon to the fastest peer; means are\n"
        "geometric. `behind`: a peer is more than 3 % faster.",
        markdown(head, rows),
        f"Also: {older}[Liger's paper](../paper.md), [own matmuls](../own-products.md), "
        "[models of transformers](../models.md).",
        "Figures whose code has changed since, or that name no commit, are marked on their page as to be\n"
        "measured again.",
    ]
    return "\n\n".join(blocks) + "\n"


def images(everything: list[Run]) -> dict[Path, dict[str, Callable[[Path], None]]]:
    """The pictures of every file that has some, and what draws them."""
    found = {
        run.path: plot.pictures(run.path, run.records)
        for run in everything
        if run.kind in ("op", "convergence") and not run.older
    }
    return {path: drawn for path, drawn in found.items() if drawn}


def pages(everything: list[Run]) -> dict[str, str]:
    """Every page by the name of its file."""
    parts = sections(everything)
    shown = {path: list(drawn) for path, drawn in images(everything).items()}
    texts = {f"{page}.md": render(page, page_parts, shown) for page, page_parts in parts.items()}
    return {"index.md": index(parts), **texts}


def write(everything: list[Run], pictures: bool) -> None:
    """Pages and pictures; those that no file accounts for are deleted."""
    if age.whole_history():
        age.FILE.write_text(age.text(age.history(everything)))
        age.known.cache_clear()
    texts = pages(everything)
    PAGES.mkdir(parents=True, exist_ok=True)
    for stale in {path.name for path in PAGES.glob("*.md")} - texts.keys():
        (PAGES / stale).unlink()
    for name, text in texts.items():
        (PAGES / name).write_text(text)
    if pictures:
        drawn = dict(readme.PICTURES)
        for file_images in images(everything).values():
            drawn |= file_images
        IMAGES.mkdir(parents=True, exist_ok=True)
        for path in IMAGES.glob("*.png"):
            if not path.name.startswith("paper_") and path.name not in drawn:
                path.unlink()
        for name, draw in drawn.items():
            draw(IMAGES / name)
    for path, text in with_tables().items():
        path.write_text(text)
    names = ", ".join(path.name for path in with_tables())
    print(f"tables of {names} and {len(texts)} pages in {PAGES.relative_to(ROOT)}")


def with_tables() -> dict[Path, str]:
    """Pages by hand with measured tables in them, those written anew."""
    tables = {readme.PAGE: readme.table, cards.PAGE: cards.tables, fp8.PAGE: fp8.table}
    return {path: readme.page(path.read_text(), table()) for path, table in tables.items()}


def outdated(everything: list[Run]) -> list[str]:
    """Pages that are not what the files give, README among them."""
    texts = pages(everything)
    committed = {path.name: path.read_text() for path in PAGES.glob("*.md")}
    found = sorted(n for n in texts.keys() | committed.keys() if texts.get(n) != committed.get(n))
    return found + [path.name for path, text in with_tables().items() if text != path.read_text()]


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or print the tables of the files named."""
    parser = processes.command_line(__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="print the tables of these files, write nothing")
    parser.add_argument("--no-pictures", action="store_true")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is out of date")
    args = parser.parse_args(arguments)
    if args.check:
        everything = runs(DATA)
        errors = age.errors(everything)
        errors += [f"make results writes {name} anew" for name in outdated(everything)]
        print(*(f"results: {line}" for line in errors or ["the pages are in order"]), sep="\n")
        return bool(errors)
    if not args.files:
        write(runs(DATA), not args.no_pictures)
        return 0
    given = [Run(path.resolve()) for path in args.files]
    for page, parts in sections(given).items():
        print(render(page, parts, {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
