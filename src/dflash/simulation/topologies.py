"""Ways to divide GPUs between targets and drafters, compared for every sampler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash.cost import CostModel
from dflash.samplers.base import LengthBatchSampler, Plan
from dflash.samplers.limits import BatchLimits, IntArray
from dflash.simulation.pipeline import Machine, Outcome, SimulatedBatch, simulate

_BISECTIONS = 18
_CALIBRATION_ROUNDS = 8
_CALIBRATED_WITHIN = 0.005


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

    def train_overrides(self, routing: str, batches_per_step: int) -> list[str]:
        """Of `dflash.train`, on one machine: drafters are on its first GPUs, targets on the next."""
        accumulate = f"trainer.accumulate_grad_batches={accumulated(batches_per_step, self.drafters)}"
        if not self.targets:
            return [f"trainer.devices={self.drafters}", accumulate]
        targets = ",".join(f"cuda:{gpu}" for gpu in range(self.drafters, self.drafters + self.targets))
        pool = ["placement=pool", f"placement.targets=[{targets}]", f"placement.routing={routing}"]
        return [*pool, f"trainer.devices={self.drafters}", accumulate]


def accumulated(batches_per_step: int, ranks: int) -> int:
    """Batches of a rank to an optimizer step that has so many in all, as near as can be."""
    return max(round(batches_per_step / ranks), 1)


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
            accumulate=accumulated(self.batches_per_step, topology.drafters),
        )
        return simulate(self.batches_of_ranks(sampler, topology.drafters), machine)

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
                accumulate=accumulated(self.batches_per_step, ranks),
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

    In turn: the target's cost is scaled, its proportions kept, until `random` comes out; then the drafter's cost of an
    anchor is raised from nothing until it holds `sorted` down to what was measured. Where random waits for targets
    only, once is enough.

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

    def rate(sampler: str, cost: CostModel) -> float:
        return scenario.run(sampler, "least_loaded", topology, cost).real_tokens_per_s

    cost = replace(cost, drafter_per_anchor=0.0, drafter_per_batch=0.0)
    for _ in range(_CALIBRATION_ROUNDS):
        cost = _with_scaled_target(cost, rate("random", cost) / measured.random)
        cost = replace(cost, drafter_per_anchor=_drafter_per_anchor(scenario, cost, topology, measured.sorted))
        of_random = rate("random", cost)
        if abs(of_random / measured.random - 1) < _CALIBRATED_WITHIN:
            return cost
    raise ValueError(
        f"calibration: a drafter that holds sorted at {measured.sorted:,.0f} real tokens/s holds random at "
        f"{of_random:,.0f}, where {measured.random:,.0f} were measured. Check the two and the lengths, or fit the "
        "cost model with profile=true."
    )


def _with_scaled_target(cost: CostModel, factor: float) -> CostModel:
    return replace(
        cost,
        target_per_token=cost.target_per_token * factor,
        target_per_token_squared=cost.target_per_token_squared * factor,
        per_batch=cost.per_batch * factor,
    )


def _drafter_per_anchor(scenario: Scenario, cost: CostModel, topology: Topology, of_sorted: float) -> float:
    """With which the sorted sampler gets `of_sorted` real tokens/s; by bisection."""

    def run(drafter_per_anchor: float) -> Outcome:
        return scenario.run("sorted", "least_loaded", topology, replace(cost, drafter_per_anchor=drafter_per_anchor))

    most = run(0.0)
    if most.real_tokens_per_s < of_sorted:
        raise ValueError(
            f"calibration: with targets that give random what was measured, sorted gets {most.real_tokens_per_s:,.0f} "
            f"real tokens/s at most, below the measured {of_sorted:,.0f}. Check the two, the lengths, and "
            "cost.target_per_token_squared."
        )
    of_ranks = scenario.batches_of_ranks("sorted", topology.drafters)
    anchors = sum(batch.anchors for batches in of_ranks for batch in batches)
    low, high = 0.0, most.real_tokens / of_sorted / anchors * topology.drafters
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if run(middle).real_tokens_per_s > of_sorted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def idle_shares(outcome: Outcome) -> dict[str, float]:
    """Of every device, by name."""
    targets = {f"target {n}": busy for n, busy in enumerate(outcome.target_busy)}
    drafters = {f"drafter {n}": busy for n, busy in enumerate(outcome.drafter_busy)}
    return {name: float(np.clip(1.0 - busy / outcome.duration, 0, 1)) for name, busy in (targets | drafters).items()}
