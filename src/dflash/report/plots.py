"""Pictures of results. matplotlib's own drawing surface, so that no display is needed and nothing global is set."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray


def plot_evaluation(figures: dict[str, Any], path: Path) -> None:
    """Draw what `evaluate.json` holds: acceptance by slot, tokens a round, speed, and both by length.

    Args:
        figures: the content of `evaluate.json`.
        path: of the PNG.
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    acceptance, speedup = figures["acceptance_length"], figures["speedup"]
    figure.suptitle(
        f"{figures['run']}\n{figures['prompts']} prompts: "
        + (f"{acceptance:.2f} tokens a round, " if acceptance else "no round, ")
        + (f"{speedup:.2f}x the target's own decoding" if speedup else "no speed measured"),
        fontsize=11,
    )
    by_slot, by_round, speed, by_length = figure.subplots(2, 2).flat

    slots = list(range(1, len(figures["acceptance_by_slot"]) + 1))
    _bars(by_slot, slots, figures["acceptance_by_slot"], "{:.0%}")
    by_slot.set(title="Drafts accepted up to this slot", xlabel="slot", ylabel="share of rounds", ylim=(0, 1.08))

    histogram = figures["acceptance_histogram"]
    _bars(by_round, list(range(1, len(histogram) + 1)), histogram, "{:.0f}")
    by_round.set(title="Tokens a round", xlabel="emitted tokens", ylabel="rounds")

    rates = [figures["baseline_tokens_per_s"] or 0.0, figures["tokens_per_s"] or 0.0]
    _bars(speed, ["target alone", "with the drafter"], rates, "{:.1f}")
    speed.set(title="Speed after the first token", ylabel="tokens/s")

    buckets = {name: bucket for name, bucket in figures["by_length"].items() if bucket["speedup"]}
    _bars(by_length, list(buckets), [bucket["speedup"] for bucket in buckets.values()], "{:.2f}x")
    by_length.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    by_length.set(title="Speed-up by length (prompt and text)", xlabel="tokens", ylabel="times the target alone")
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, names: list[Any], heights: list[float], label: str) -> None:
    places = range(len(names))
    bars = axes.bar(places, heights, color="#3b6ea5")
    axes.bar_label(bars, labels=[label.format(height) for height in heights], padding=2)
    axes.set_xticks(places, [str(name) for name in names])
    axes.margins(y=0.12)


def plot_sweep(rows: list[dict[str, Any]], swept: list[str], path: Path) -> None:
    """Draw a sweep: what was swept against throughput, padding, mixing, validation loss and acceptance length.

    Args:
        rows: of the sweep's table, see `dflash.report.sweep`.
        swept: the overrides that differ.
        path: of the PNG.
    """
    panels = {
        "real_tokens_per_s": ("Throughput", "real tokens/s", "{:,.0f}"),
        "padding_ratio": ("Padding", "share of computed tokens", "{:.1%}"),
        "eta2_ratio": ("Mixing: 1 is chance", "eta2_ratio", "{:.1f}"),
        "val_loss": ("Validation loss", "loss", "{:.3f}"),
        "val_acceptance_length": ("Held-out acceptance length", "tokens a round", "{:.3f}"),
    }
    names = ["\n".join(row["overrides"].get(key, "-") for key in swept) for row in rows]
    figure = Figure(figsize=(3.4 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(" and ".join(swept) or "one job", fontsize=11)
    for axes, (column, (title, unit, label)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        heights = [row[column] or 0.0 for row in rows]
        bars = axes.bar(range(len(rows)), heights, color="#3b6ea5")
        known = [
            label.format(row[column]) if row[column] is not None else row["status"].replace("completed", "none")
            for row in rows
        ]
        axes.bar_label(bars, labels=known, padding=2, fontsize=8)
        axes.set_xticks(range(len(rows)), names)
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
        axes.set(title=title, ylabel=unit)
    figure.savefig(path, dpi=110)


def plot_curves(runs: dict[str, dict[str, list[tuple[int, float]]]], tags: list[str], path: Path) -> None:
    """Draw the curves of several runs, a panel a tag.

    Args:
        runs: name of the run -> tag -> (step, value) points.
        tags: in the order of the panels; a tag that no run has gets none.
        path: of the PNG.
    """
    shown = [tag for tag in tags if any(tag in curves for curves in runs.values())]
    columns = min(3, max(len(shown), 1))
    rows = -(-len(shown) // columns) or 1
    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, tag in enumerate(shown, 1):
        axes = figure.add_subplot(rows, columns, number)
        for name, curves in runs.items():
            steps, values = zip(*curves.get(tag, [(0, float("nan"))]), strict=True)
            axes.plot(steps, values, label=name, marker="o" if len(steps) < 20 else None, markersize=3)
        axes.set(title=tag, xlabel="optimizer step")
        axes.grid(alpha=0.3)
    if shown:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
    figure.savefig(path, dpi=110)


def plot_bench(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a bench: real tokens a second by sampler, a panel for each part of the step.

    Args:
        rows: lines of `bench.csv`, their case `<part>/<sampler>`.
        path: of the PNG.
    """
    parts = list(dict.fromkeys(row["case"].partition("/")[0] for row in rows))
    cases = len(rows) // len(parts)
    figure = Figure(figsize=((1.0 + 0.9 * cases) * len(parts), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        of_part = [row for row in rows if row["case"].startswith(f"{part}/")]
        names = [row["case"].partition("/")[2] for row in of_part]
        bars = axes.bar(names, [row["real_tokens_per_s"] for row in of_part], color="#3b6ea5")
        labels = [
            f"{row['real_tokens_per_s']:,.0f}"
            + (f"\n{row['ratio_to_sorted']:.2f} x sorted" if row["ratio_to_sorted"] is not None else "")
            + f"\n{row['share_of_peak']:.0%} of peak"
            for row in of_part
        ]
        axes.bar_label(bars, labels=labels, padding=2, fontsize=8)
        axes.margins(y=0.2)
        axes.tick_params(axis="x", rotation=20)
        axes.set(title=part, ylabel="real tokens/s")
    figure.savefig(path, dpi=110)


def plot_plan(rows: list[dict[str, Any]], lengths: NDArray[np.int64], bounds: dict[str, list[int]], path: Path) -> None:
    """Draw what samplers trade: mixing against speed, and where their buckets end among the lengths.

    Args:
        rows: lines of `plan.csv`.
        lengths: of the samples, tokens, [N] int64.
        bounds: of the bucketed samplers among them, the longest length of every bucket.
        path: of the PNG.
    """
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    trade, histogram = figure.subplots(1, 2)
    column = "relative_throughput" if rows[0]["relative_throughput"] is not None else "tokens_per_cost"
    for number, row in enumerate(rows):
        if row["eta2_ratio"] is None:
            continue
        colour = f"C{number}"
        trade.scatter(row["eta2_ratio"], row[column], s=60, color=colour, label=row["sampler"])
    trade.set_xscale("log")
    trade.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    trade.set(
        title="Mixing against speed: up and to the left is better",
        xlabel="eta2_ratio: variance of length between optimizer steps, 1 is chance",
        ylabel="throughput, sorted = 1" if column == "relative_throughput" else "real tokens by unit of cost",
    )
    trade.set_ylim(bottom=0)
    trade.grid(alpha=0.3)
    trade.legend(fontsize=8, loc="center")

    edges = np.geomspace(max(lengths.min(), 1), lengths.max() + 1, 60)
    histogram.hist(lengths, bins=edges.tolist(), color="#c9d4e3")
    histogram.set_xscale("log")
    top = histogram.get_ylim()[1]
    for place, (name, of_sampler) in enumerate(bounds.items()):
        number = next(i for i, row in enumerate(rows) if row["sampler"] == name)
        height = top * (1.04 + 0.07 * place)
        histogram.plot(of_sampler, [height] * len(of_sampler), "|", markersize=9, color=f"C{number}", label=name)
    histogram.set(title="Lengths, and where buckets end", xlabel="tokens", ylabel="samples")
    if bounds:
        histogram.legend(fontsize=8, loc="upper right")
        histogram.set_ylim(top=top * (1.1 + 0.07 * len(bounds) + 0.25))
    figure.savefig(path, dpi=110)
