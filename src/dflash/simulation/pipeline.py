"""Targets, queues and drafters as a discrete-event simulation, over the batches of a real plan.

The queues and the routing are those of `placement=pool` itself; what takes time takes what the cost model says. Moving
states between devices takes none, and drafters reduce their gradients in none.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from dflash.cost import CostModel
from dflash.placement.queues import Part, Queues
from dflash.placement.routing import padded_tokens, pass_cost, route_batch
from dflash.placement.split_by_length import IntArray
from dflash.simulation.shared_device import SharedDevice


@dataclass(frozen=True)
class SimulatedBatch:
    """What time depends on.

    Attributes:
        lengths: tokens of its samples, [D] int64.
        anchors: that the drafter trains.
        packed: samples behind each other in a row, or a row each.
    """

    lengths: IntArray
    anchors: int
    packed: bool = False


@dataclass(frozen=True)
class Machine:
    """What is simulated.

    Attributes:
        targets_of_ranks: replicas of every rank; 0 everywhere: each drafter's device runs the target, too
            (`placement=inline`).
        cost: what batches take.
        token_budget: tokens of a full batch.
        pad_multiple: lengths are padded to multiples of it.
        queued_batches: each queue holds so many full batches a replica.
        routing: `least_loaded` or `split_by_length`.
        max_groups: of a batch under `split_by_length`.
        accumulate: batches of a rank to one optimizer step, after which ranks wait for each other.
        device_share: None: replicas and drafters have a device each; a number: they share one, such as a CPU, of which
            each can use this share at once, see `SharedDevice`.
    """

    targets_of_ranks: tuple[int, ...]
    cost: CostModel
    token_budget: int
    pad_multiple: int
    queued_batches: int = 2
    routing: str = "least_loaded"
    max_groups: int = 8
    accumulate: int = 1
    device_share: float | None = None


@dataclass
class Outcome:
    """What happened.

    Attributes:
        real_tokens: of all batches.
        duration: in the cost model's unit.
        target_busy: of every replica, rank by rank, in the time that its work takes alone; empty where there
            are none and drafters' devices run the target.
        drafter_busy: of every rank's drafter.
        trace: (time, q_pre, q_hs) whenever rank 0's drafter took a batch; how full the queues were, of 1.
        target_padded_tokens: that the targets computed.
    """

    real_tokens: int = 0
    duration: float = 0.0
    target_busy: list[float] = field(default_factory=list)
    drafter_busy: list[float] = field(default_factory=list)
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    target_padded_tokens: int = 0

    @property
    def real_tokens_per_s(self) -> float:
        """Where the cost model's unit is a second."""
        return self.real_tokens / self.duration

    @property
    def target_idle(self) -> float | None:
        """Share of the time, mean over the replicas; None where drafters' devices run the target."""
        return 1.0 - float(np.mean(self.target_busy)) / self.duration if self.target_busy else None

    @property
    def drafter_idle(self) -> float:
        """Share of the time, mean over the ranks."""
        return 1.0 - float(np.mean(self.drafter_busy)) / self.duration


def simulate(ranks: Sequence[Sequence[SimulatedBatch]], machine: Machine) -> Outcome:
    """Let every rank train its batches, the same number each, and see what it takes.

    Args:
        ranks: the batches of every rank, in order.
        machine: as many ranks.
    """
    env = simpy.Environment()
    outcome = Outcome(sum(int(batch.lengths.sum()) for batches in ranks for batch in batches))
    device = None if machine.device_share is None else SharedDevice(env, machine.device_share)
    barrier = _Barrier(env, len(ranks))
    for number, (batches, num_targets) in enumerate(zip(ranks, machine.targets_of_ranks, strict=True)):
        _Rank(env, number, batches, num_targets, machine, outcome, device, barrier)
    env.run()
    outcome.duration = float(env.now)
    return outcome


class _Barrier:
    """Where ranks wait for each other."""

    def __init__(self, env: simpy.Environment, size: int) -> None:
        self.env, self.size = env, size
        self.num_waiting, self.event = 0, env.event()

    def wait(self) -> simpy.Event:
        """An event that happens when the last rank has come."""
        event = self.event
        self.num_waiting += 1
        if self.num_waiting == self.size:
            self.num_waiting, self.event = 0, self.env.event()
            event.succeed()
        return event


class _Rank:
    """Loader, replicas and drafter of one rank: the processes that `Pipeline` runs as threads."""

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        batches: Sequence[SimulatedBatch],
        num_targets: int,
        machine: Machine,
        outcome: Outcome,
        device: SharedDevice | None,
        barrier: _Barrier,
    ) -> None:
        self.env, self.number, self.batches = env, number, batches
        self.machine, self.outcome, self.device, self.barrier = machine, outcome, device, barrier
        self.first_target = len(outcome.target_busy)
        outcome.target_busy += [0.0] * num_targets
        outcome.drafter_busy.append(0.0)
        if not num_targets:
            env.process(self._inline())
            return
        capacity = machine.queued_batches * machine.token_budget * num_targets
        self.queues: Queues[SimulatedBatch] = Queues(num_targets, capacity)
        self.changed = env.event()
        env.process(self._loader())
        env.process(self._drafter())
        for replica in range(num_targets):
            env.process(self._target(replica))

    def _notify(self) -> None:
        event, self.changed = self.changed, self.env.event()
        event.succeed()

    def _work(self, duration: float, busy: list[float], place: int) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(duration) if self.device is None else self.device.work(duration)
        busy[place] += duration

    def _loader(self) -> Generator[simpy.Event, Any, None]:
        for number, batch in enumerate(self.batches):
            tokens = padded_tokens(batch.lengths, batch.packed, self.machine.pad_multiple)
            while not self.queues.has_room(tokens):
                yield self.changed
            self.queues.put(number, batch, tokens, self._route(batch))
            self._notify()
        self.queues.num_batches = len(self.batches)
        self._notify()

    def _route(self, batch: SimulatedBatch) -> list[Part]:
        machine = self.machine
        return route_batch(
            batch.lengths,
            self.queues.loads,
            packed=batch.packed,
            routing=machine.routing,
            cost=machine.cost,
            max_groups=machine.max_groups,
            pad_multiple=machine.pad_multiple,
        )

    def _target(self, replica: int) -> Generator[simpy.Event, Any, None]:
        queues = self.queues
        while True:
            while not queues.may_start(replica):
                if queues.is_finished(replica):
                    return
                yield self.changed
            job, part = queues.start(replica)
            self._notify()
            lengths = job.batch.lengths if part.samples is None else job.batch.lengths[part.samples]
            self.outcome.target_padded_tokens += padded_tokens(lengths, job.batch.packed, self.machine.pad_multiple)
            yield from self._work(part.cost, self.outcome.target_busy, self.first_target + replica)
            if queues.finish(job, part):
                queues.complete(job)
                self._notify()

    def _drafter(self) -> Generator[simpy.Event, Any, None]:
        queues = self.queues
        for number, batch in enumerate(self.batches):
            while not queues.is_ready(number):
                yield self.changed
            if self.number == 0:
                fill = (queues.waiting_tokens / queues.capacity_tokens, queues.states_tokens / queues.capacity_tokens)
                self.outcome.trace.append((float(self.env.now), *fill))
            queues.take(number)
            self._notify()
            yield from self._train(number, batch)

    def _inline(self) -> Generator[simpy.Event, Any, None]:
        for number, batch in enumerate(self.batches):
            self.outcome.target_padded_tokens += padded_tokens(batch.lengths, batch.packed, self.machine.pad_multiple)
            read = pass_cost(batch.lengths, batch.packed, self.machine.cost, self.machine.pad_multiple)
            yield from self._work(read, self.outcome.drafter_busy, self.number)
            yield from self._train(number, batch)

    def _train(self, number: int, batch: SimulatedBatch) -> Generator[simpy.Event, Any, None]:
        duration = self.machine.cost.drafter(float(batch.anchors))
        yield from self._work(duration, self.outcome.drafter_busy, self.number)
        if (number + 1) % self.machine.accumulate == 0:
            yield self.barrier.wait()
