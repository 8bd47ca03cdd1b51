"""Whole training steps under several placements, measured side by side, and beside what the simulation says of them.

All placements get the same batches. Rounds are interleaved, see `dflash.benchmarks.steps`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from dflash.batch import Batch
from dflash.benchmarks.steps import TrainingSteps, spread_batches
from dflash.cost import CostModel
from dflash.data.collate import collate
from dflash.measuring import synchronised_seconds
from dflash.placement.inline import InlinePlacement
from dflash.placement.pool import PoolPlacement, copy_of
from dflash.samplers.base import Plan
from dflash.simulation.pipeline import Machine, SimulatedBatch, simulate

REFERENCE = "inline"
Placement = InlinePlacement | PoolPlacement


@dataclass(frozen=True)
class PlacementRow:
    """A line of `placements.csv`.

    Attributes:
        case: the placement.
        real_tokens_per_s: measured.
        ratio_to_inline: median of the rounds' own ratios; None without `inline`.
        simulated_tokens_per_s: of the same batches, with the cost model fitted to this machine.
        simulated_over_measured: 1 where the simulation is right.
        most_waiting_tokens: in the queue before the targets; None for `inline`.
        most_states_tokens: in the queue behind them, likewise.
        capacity_tokens: of each of the two, likewise.
    """

    case: str
    real_tokens_per_s: float
    ratio_to_inline: float | None
    simulated_tokens_per_s: float
    simulated_over_measured: float
    most_waiting_tokens: int | None
    most_states_tokens: int | None
    capacity_tokens: int | None


def measure_placements(
    steps: TrainingSteps,
    placements: dict[str, Placement],
    plan: Plan,
    cost: CostModel,
    *,
    rounds: int,
    batches_per_round: int,
    on_turn: Callable[[str], object],
) -> list[PlacementRow]:
    """Train the same batches under every placement.

    Args:
        steps: what is trained, and the target.
        placements: by name; each is opened here.
        plan: where batches come from, padded or packed.
        cost: fitted to this machine.
        rounds: over which the median is taken.
        batches_per_round: of every placement.
        on_turn: called with a placement's name after each of its turns, a first one that is not counted included.
    """
    for placement in placements.values():
        device = placement.lay_out(steps.target.device)
        placement.open(steps.target if device == steps.target.device else copy_of(steps.target, device))
        placement.check_plan(plan.packed)
    chosen = spread_batches(steps.limits, steps.dataset, plan, rounds, batches_per_round)
    names = list(placements)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        _train(steps, placements[name], plan, chosen[0][:1])
        on_turn(name)
    for turn, numbers in enumerate(chosen):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cpu_begin = time.process_time()
            seconds[name].append(_train(steps, placements[name], plan, numbers))
            cpu_seconds[name].append(time.process_time() - cpu_begin)
            on_turn(name)

    # What one thing at a time uses of the cores: the rest is there for another one. A core that waits busily counts.
    alone = REFERENCE if REFERENCE in placements else names[0]
    device_share = min(sum(cpu_seconds[alone]) / sum(seconds[alone]) / torch.get_num_threads(), 1.0)
    simulated = {name: _simulated_rates(steps, p, plan, chosen, cost, device_share) for name, p in placements.items()}
    real = [sum(int(steps.dataset.lengths[plan.batch(n, 0, 0)].sum()) for n in numbers) for numbers in chosen]
    rows = []
    for name in names:
        rates = [tokens / taken for tokens, taken in zip(real, seconds[name], strict=True)]
        ratios = [r / s for r, s in zip(seconds.get(REFERENCE, []), seconds[name], strict=False)]
        placement = placements[name]
        figures = placement.state.figures if isinstance(placement, PoolPlacement) else None
        rows.append(
            PlacementRow(
                case=name,
                real_tokens_per_s=median(rates),
                ratio_to_inline=median(ratios) if ratios else None,
                simulated_tokens_per_s=median(simulated[name]),
                simulated_over_measured=median(s / r for s, r in zip(simulated[name], rates, strict=True)),
                most_waiting_tokens=figures.most_waiting_tokens if figures else None,
                most_states_tokens=figures.most_states_tokens if figures else None,
                capacity_tokens=placement.capacity_tokens if isinstance(placement, PoolPlacement) else None,
            )
        )
    return rows


def _train(steps: TrainingSteps, placement: Placement, plan: Plan, numbers: Sequence[int]) -> float:
    """Seconds that these batches take, from the first one's collating to the last one's step."""

    def loader() -> Iterator[Batch]:
        for number in numbers:
            ids = plan.batch(number, 0, 0)
            yield collate(steps.dataset, ids, steps.limits, packed=plan.packed, seed=steps.seed, epoch=0)

    device = steps.target.device
    begin = synchronised_seconds(device)
    for batch in placement.feed(loader()):
        steps.train(batch)
        batch.hidden = None
    return synchronised_seconds(device) - begin


def _simulated_rates(
    steps: TrainingSteps,
    placement: Placement,
    plan: Plan,
    chosen: list[list[int]],
    cost: CostModel,
    device_share: float,
) -> list[float]:
    """Real tokens a second of every round."""
    limits, dataset = steps.limits, steps.dataset
    lengths = limits.planned_lengths(dataset.lengths)
    anchors = limits.planned_anchors(dataset.num_anchorable)
    options: dict[str, Any] = {"targets_of_ranks": (0,)}
    if isinstance(placement, PoolPlacement):
        on_cpu = all(device.type == "cpu" for device in (*placement.devices, placement.drafter))
        options = {
            "targets_of_ranks": (len(placement.replicas),),
            "routing": placement.routing,
            "queued_batches": placement.queued_batches,
            "max_groups": placement.max_groups,
            "device_share": device_share if on_cpu else None,
        }
    machine = Machine(cost=cost, token_budget=limits.token_budget, pad_multiple=limits.pad_multiple, **options)
    rates = []
    for numbers in chosen:
        samples: list[np.ndarray] = [plan.batch(number, 0, 0) for number in numbers]
        batches = [SimulatedBatch(lengths[ids], int(anchors[ids].sum()), plan.packed) for ids in samples]
        rates.append(simulate([batches], machine).real_tokens_per_s)
    return rates
