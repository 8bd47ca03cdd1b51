"""The report of `python -m dflash.plan topology=...`: `topology.csv`, `topology.png`, a table and a line in words."""

import csv
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dflash.checks import check_fraction, check_integer, check_positive
from dflash.cost import CostModel
from dflash.placement.routing import ROUTINGS
from dflash.report.plots_topology import plot_topologies
from dflash.report.tables import text_table
from dflash.simulation.topologies import Case, Measured, Scenario, Topology, compare, idle_shares

_COLUMNS = {
    "sampler": "{}",
    "routing": "{}",
    "topology": "{}",
    "real_tokens_per_s": "{:,.0f}",
    "target_idle": "{:.1%}",
    "drafter_idle": "{:.1%}",
}


def topologies_of(config: DictConfig) -> list[str]:
    """The topologies that a configuration names.

    Raises:
        ValueError: one that is none; a value of the simulation that can not be.
    """
    named = list(config.topology) if OmegaConf.is_list(config.topology) else [config.topology]
    for text in named:
        Topology.parse(str(text))
    options = config.simulation
    for key in ("max_batches", "queued_batches", "max_groups"):
        check_integer(f"simulation.{key}", options[key], 1)
    if options.device_share is not None:
        check_fraction("simulation.device_share", options.device_share)
        check_positive("simulation.device_share", options.device_share)
    if not OmegaConf.is_list(options.routings) or not set(options.routings) <= set(ROUTINGS) or not options.routings:
        raise ValueError(f"simulation.routings={options.routings}: expected a list of {' and '.join(ROUTINGS)}.")
    return [str(text) for text in named]


def measured_of(config: DictConfig) -> Measured | None:
    """What the cost model is to be fitted to, if anything.

    Raises:
        ValueError: something is missing or out of range.
    """
    if config.calibration is None:
        return None
    if set(config.calibration) != {"topology", "random", "sorted"}:
        raise ValueError(f"calibration={config.calibration}: expected the keys topology, random and sorted.")
    for key in ("random", "sorted"):
        check_positive(f"calibration.{key}", config.calibration.get(key))
    Topology.parse(str(config.calibration.get("topology")))
    return Measured(**{str(key): value for key, value in config.calibration.items()})


def study(
    scenario: Scenario, config: DictConfig, cost: CostModel, out_folder: Path, mixing_samplers: Collection[str]
) -> Case:
    """Simulate, and write the result below `out_folder`.

    Args:
        scenario: what is trained on.
        config: of the plan.
        cost: what batches take.
        out_folder: exists.
        mixing_samplers: those that mix as well as wanted; the best case is one of them, if there are any.

    Returns:
        The case with most real tokens a second.
    """
    named = topologies_of(config)
    total = len(scenario.samplers) * len(named) * len(config.simulation.routings)
    with tqdm(total=total, desc="simulating", unit="case") as bar:

        def on_case(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        cases = compare(scenario, named, list(config.simulation.routings), cost, on_case)
        bar.total = bar.n  # cases that can not be were left out
        bar.refresh()
    rows = [case.row() for case in cases]
    with (out_folder / "topology.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(_COLUMNS))
        table.writeheader()
        table.writerows(rows)
    of_mixing = [case for case in cases if case.sampler in mixing_samplers]
    best = max(of_mixing or cases, key=lambda case: case.outcome.real_tokens_per_s)
    plot_topologies(rows, [_detail(case) for case in cases if case.topology == named[0]], out_folder / "topology.png")
    shown = [["-" if row[c] is None else form.format(row[c]) for c, form in _COLUMNS.items()] for row in rows]
    print(f"\n{text_table(list(_COLUMNS), shown)}\n\n{out_folder / 'topology.csv'}\n{out_folder / 'topology.png'}")
    print(f"\n{_in_words(best, cost, bool(of_mixing))}", flush=True)
    return best


def _detail(case: Case) -> dict[str, Any]:
    """What the picture shows of a case beyond its line: queues over time, every device's idle share."""
    return {**case.row(), "trace": case.outcome.trace, "idle": idle_shares(case.outcome)}


def _in_words(best: Case, cost: CostModel, mixes: bool) -> str:
    outcome = best.outcome
    routed = "" if best.routing == "-" else f" with placement.routing={best.routing}"
    idle = "" if outcome.target_idle is None else f", its targets {outcome.target_idle:.0%}"
    among = " of those that mix as wanted" if mixes else ""
    lines = [
        f"Most real tokens/s{among}: {best.sampler}{routed} on {best.topology}; its drafters idle "
        f"{outcome.drafter_idle:.0%} of the time{idle}."
    ]
    if (cost.target_per_token, cost.drafter_per_anchor) == (CostModel().target_per_token, 0.0):
        lines.append(
            "The cost model is the default one: its unit is no second, and the drafter costs nothing in it. Fit it to "
            "a machine with profile=true, or to two throughputs that you measured with calibration=..."
        )
    return "\n".join(lines)
