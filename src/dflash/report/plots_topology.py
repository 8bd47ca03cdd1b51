"""Picture of simulated ways to divide GPUs between targets and drafters."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MOST_TRACES = 4


def plot_topologies(rows: list[dict[str, Any]], details: list[dict[str, Any]], path: Path) -> None:
    """Draw throughput by topology; of one topology, the queues over time and how long each device idles.

    Args:
        rows: lines of `topology.csv`.
        details: of the topology that is drawn closer: lines with `trace`, (time, q_pre, q_hs), and `idle` by device.
        path: of the PNG.
    """
    topologies = list(dict.fromkeys(row["topology"] for row in rows))
    series = list(dict.fromkeys((row["sampler"], row["routing"]) for row in rows))
    of_case = {(row["sampler"], row["routing"], row["topology"]): row["real_tokens_per_s"] for row in rows}
    shown = _fastest_and_slowest(details)
    figure = Figure(figsize=(15, 4.6 + 1.7 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    halves = figure.subfigures(2, 1, squeeze=False, height_ratios=[4.6, max(1.7 * len(shown), 0.1)])
    top, bottom = halves[0][0], halves[1][0]

    axes = top.subplots()
    width = 0.85 / len(series)
    for number, (sampler, routing) in enumerate(series):
        places = [p + (number - (len(series) - 1) / 2) * width for p in range(len(topologies))]
        heights = [of_case.get((sampler, routing, topology), 0.0) for topology in topologies]
        bars = axes.bar(places, heights, width * 0.92, label=f"{sampler}, {routing}", color=f"C{number}")
        labels = [f"{height / 1000:.1f}" if height >= 1000 else f"{height:.3g}" if height else "" for height in heights]
        axes.bar_label(bars, labels=labels, fontsize=7, padding=1, rotation=90 if len(topologies) > 2 else 0)
    axes.set_xticks(range(len(topologies)), topologies)
    axes.margins(y=0.15)
    axes.set(title="Throughput", xlabel="targets+drafters", ylabel="real tokens/s (labels in thousands above 1,000)")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    if not shown:
        figure.savefig(path, dpi=110)
        return
    panels = bottom.subplots(len(shown), 2, squeeze=False, width_ratios=[2, 1])
    for (queues, devices), detail in zip(panels, shown, strict=True):
        name = f"{detail['sampler']}, {detail['routing']} on {detail['topology']}"
        times, waiting, states = zip(*detail["trace"], strict=True) if detail["trace"] else ((), (), ())
        queues.plot(times, waiting, label="q_pre: waits for targets", linewidth=0.8)
        queues.plot(times, states, label="q_hs: being read, or waits for the drafter", linewidth=0.8)
        queues.set(title=name, ylim=(0, 1.05), ylabel="share full")
        names = [device.replace("target ", "t").replace("drafter ", "d") for device in detail["idle"]]
        bars = devices.bar(names, list(detail["idle"].values()), color="#3b6ea5")
        devices.bar_label(bars, fmt="{:.0%}", fontsize=7)
        devices.set(title="idle share of each device", ylim=(0, 1.15))
    panels[0][0].legend(fontsize=8)
    panels[-1][0].set_xlabel("time, in the cost model's unit")
    figure.savefig(path, dpi=110)


def _fastest_and_slowest(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases that are worth a closer look: the ends of the ranking."""
    ranked = sorted(details, key=lambda detail: -detail["real_tokens_per_s"])
    if len(ranked) <= _MOST_TRACES:
        return ranked
    return [*ranked[: _MOST_TRACES // 2], *ranked[-(_MOST_TRACES - _MOST_TRACES // 2) :]]
