"""Ways to divide GPUs between targets and drafters, compared for every sampler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash.cost import CostModel
from dflash.samplers.base import LengthBatchSampler, Plan
from dflash.samplers.limits import BatchLimits, IntArray
from dflash.simulation.pipeline import Machine, Outcome, SimulatedBatch, simulate

_BISECTIONS = 18


@dataclass(frozen=True)
class Topology:
    """So many GPUs run targets, so many train drafters; no target: each drafter's GPU runs its own (inline)."""

    targets: int
    drafters: int

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """From `6+1`: targets, then drafters; or `inline`, one device for both.

        Raises:
            ValueError: anything else; fewer targets than drafters.
        """
        if text == "inline":
            return cls(0, 1)
        targets, _, drafters = str(text).partition("+")
        if not (targets.isdecimal() and drafters.isdecimal() and int(targets) >= int(drafters) >= 1):
            raise ValueError(
                f"topology={text}: expected targets+drafters with a target for every drafter, such as 6+1 or 4+4; or "
                "inline; or a list of them."
            )
        return cls(int(targets), int(drafters))

    @property
    def targets_of_ranks(self) -> tuple[int, ...]:
        """Targets are dealt in turn, as `placement=pool` does."""
        return tuple(len(range(rank, self.targets, self.drafters)) for rank in range(self.drafters))


@dataclass(frozen=True)
class Case:
    """A line of `topology.csv`, and what its picture is drawn from."""

    sampler: str
    routing: str
    topology: str
    outcome: Outcome

    def row(self) -> dict[str, str | float | None]:
        """Columns of the table."""
        return {
            "sampler": self.sampler,
            "routing": self.routing,
            "topology": self.topology,
            "real_tokens_per_s": self.outcome.real_tokens_per_s,
            "target_idle": self.outcome.target_idle,
            "drafter_idle": self.outcome.drafter_idle,
        }


class Scenario:
    """Samples, samplers and limits, planned for as many ranks as a topology has drafters.

    Args:
        samplers: by name.
        lengths: tokens of the samples, [N] int64.
        num_anchorable: valid anchors of the samples, [N] int64.
        limits: of batches.
        machine: its options; topology, routing and accumulation are set for each case.
        batches_per_step: of an optimizer step, all ranks together, as near as the number of ranks allows.
        max_batches: of a plan are simulated, its first ones.
        seed: of the plans.
    """

    def __init__(
        self,
        samplers: Mapping[str, LengthBatchSampler],
        lengths: IntArray,
        num_anchorable: IntArray,
        limits: BatchLimits,
        machine: Machine,
        *,
        batches_per_step: int,
        max_batches: int,
        seed: int,
    ) -> None:
        self.samplers = samplers
        self.lengths, self.num_anchorable, self.limits = lengths, num_anchorable, limits
        self.machine = machine
        self.batches_per_step, self.max_batches, self.seed = batches_per_step, max_batches, seed
        self._batches: dict[tuple[str, int], list[list[SimulatedBatch]]] = {}

    def run(self, sampler: str, routing: str, topology: Topology, cost: CostModel) -> Outcome:
        """Simulate a sampler on a topology."""
        machine = replace(
            self.machine,
            targets_of_ranks=topology.targets_of_ranks,
            cost=cost,
            routing=routing,
            accumulate=self._accumulate(topology.drafters),
        )
        return simulate(self.batches_of_ranks(sampler, topology.drafters), machine)

    def _accumulate(self, ranks: int) -> int:
        return max(round(self.batches_per_step / ranks), 1)

    def batches_of_ranks(self, sampler: str, ranks: int) -> list[list[SimulatedBatch]]:
        """Batches of every rank in the order of the plan; plans are made once."""
        if (sampler, ranks) not in self._batches:
            plan = self.samplers[sampler].plan(
                self.lengths,
                self.num_anchorable,
                self.limits,
                seed=self.seed,
                epoch=0,
                world_size=ranks,
                accumulate=self._accumulate(ranks),
            )
            self._batches[sampler, ranks] = self._simulated(plan)
        return self._batches[sampler, ranks]

    def _simulated(self, plan: Plan) -> list[list[SimulatedBatch]]:
        lengths = self.limits.planned_lengths(self.lengths)
        anchors = self.limits.planned_anchors(self.num_anchorable)
        num_steps = min(max(self.max_batches // (plan.world_size * plan.accumulate), 1), plan.num_steps)
        of_ranks: list[list[SimulatedBatch]] = [[] for _ in range(plan.world_size)]
        for step in range(num_steps):
            for micro in range(plan.accumulate):
                for rank in range(plan.world_size):
                    samples = plan.batch(step, rank, micro)
                    of_ranks[rank].append(
                        SimulatedBatch(lengths[samples], int(anchors[samples].sum()), packed=plan.packed)
                    )
        return of_ranks


def compare(
    scenario: Scenario,
    topologies: Sequence[str],
    routings: Sequence[str],
    cost: CostModel,
    on_case: Callable[[str], object],
) -> list[Case]:
    """Every sampler with every routing on every topology; packed batches are not cut, nor those of inline:
    they are simulated once.

    Args:
        scenario: what is trained on.
        topologies: see `Topology.parse`.
        routings: of `dflash.placement.routing.ROUTINGS`.
        cost: what batches take.
        on_case: called with a name after each case.
    """
    cases = []
    for name, sampler in scenario.samplers.items():
        for text in topologies:
            topology = Topology.parse(text)
            for routing in routings if sampler.pads and topology.targets else ["least_loaded"]:
                shown = routing if topology.targets else "-"
                cases.append(Case(name, shown, text, scenario.run(name, routing, topology, cost)))
                on_case(f"{name} {routing} {text}")
    return cases


@dataclass(frozen=True)
class Measured:
    """Two throughputs that somebody measured, in real tokens a second, to fit the cost model to.

    Attributes:
        topology: they were measured on.
        random: with the random sampler, where padding makes the targets the bottleneck.
        sorted: with the sorted one.
    """

    topology: str
    random: float
    sorted: float


def calibrate(scenario: Scenario, cost: CostModel, measured: Measured) -> CostModel:
    """The cost model, in seconds, with which the simulation gives the two measured throughputs.

    The target's cost is scaled, its proportions kept, so that `random` comes out with a drafter that costs nothing;
    then the drafter's cost of an anchor is raised until it holds `sorted` down to what was measured.

    Args:
        scenario: has the samplers `random` and `sorted`.
        cost: whose target's proportions hold.
        measured: to be met, with `least_loaded` routing.

    Raises:
        ValueError: a sampler is missing; no cost of the drafter explains the two.
    """
    for name in ("random", "sorted"):
        if name not in scenario.samplers:
            raise ValueError(f"calibration needs the sampler {name}: add it to samplers.")
    topology = Topology.parse(measured.topology)
    free = replace(cost, drafter_per_anchor=0.0, drafter_per_batch=0.0)
    scale = scenario.run("random", "least_loaded", topology, free).real_tokens_per_s / measured.random
    free = replace(
        free,
        target_per_token=free.target_per_token * scale,
        target_per_token_squared=free.target_per_token_squared * scale,
        per_batch=free.per_batch * scale,
    )

    def of_sorted(drafter_per_anchor: float) -> Outcome:
        return scenario.run("sorted", "least_loaded", topology, replace(free, drafter_per_anchor=drafter_per_anchor))

    most = of_sorted(0.0)
    if most.real_tokens_per_s < measured.sorted:
        raise ValueError(
            f"calibration: with targets that give random {measured.random:,.0f} real tokens/s, sorted gets "
            f"{most.real_tokens_per_s:,.0f} at most, below the measured {measured.sorted:,.0f}. Check the two, the "
            "lengths, and cost.target_per_token_squared."
        )
    anchors = sum(
        batch.anchors for batches in scenario.batches_of_ranks("sorted", topology.drafters) for batch in batches
    )
    low, high = 0.0, most.real_tokens / measured.sorted / anchors * topology.drafters
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if of_sorted(middle).real_tokens_per_s > measured.sorted:
            low = middle
        else:
            high = middle
    return replace(free, drafter_per_anchor=(low + high) / 2)


def idle_shares(outcome: Outcome) -> dict[str, float]:
    """Of every device, by name."""
    targets = {f"target {n}": busy for n, busy in enumerate(outcome.target_busy)}
    drafters = {f"drafter {n}": busy for n, busy in enumerate(outcome.drafter_busy)}
    return {name: float(np.clip(1.0 - busy / outcome.duration, 0, 1)) for name, busy in (targets | drafters).items()}
