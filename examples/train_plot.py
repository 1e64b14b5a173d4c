"""The picture examples/train.py ends with: loss curves over each other, tokens/s, memory."""

from __future__ import annotations

from pathlib import Path

COLOURS = {"stock": "#8a8f98", "tigon": "#e8710a", "liger": "#3b6fb6", "control": "#c9ccd1"}


def draw(summary: dict, path: Path) -> None:
    """Draw what train.json holds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = summary["runs"]
    figure, (curve, speed, memory) = plt.subplots(
        1, 3, figsize=(12, 3.8), width_ratios=(2, 1, 1), layout="constrained"
    )
    # Stock broad and below, the others thin above it: equal curves are seen to be equal.
    for i, (name, run) in enumerate(runs.items()):
        steps = range(1, len(run["losses"]) + 1)
        width, style = (5, "-") if i == 0 else (1.6, ("-", "--", ":")[(i - 1) % 3])
        alpha = 0.6 if i == 0 else 1
        colour = COLOURS.get(name)
        curve.plot(steps, run["losses"], style, lw=width, alpha=alpha, color=colour, label=name)
    curve.set(xlabel="step", ylabel="loss", title=summary["title"])
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.legend(frameon=False)
    bars = (
        (speed, "tokens/s", lambda run: run["tokens_per_s"], "{:,.0f}"),
        (memory, "peak memory above the model, GB", lambda run: run["peak_bytes"] / 1e9, "{:.2f}"),
    )
    for axis, title, value, form in bars:
        values = [value(run) for run in runs.values()]
        drawn = axis.bar(list(runs), values, color=[COLOURS.get(name) for name in runs])
        axis.bar_label(drawn, [form.format(v) for v in values], padding=2)
        axis.set_title(title, fontsize=10)
        axis.set_yticks([])
        axis.margins(y=0.12)
    for axis in (curve, speed, memory):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
