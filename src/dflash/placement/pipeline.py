"""Batches through several replicas of the target: a thread each, bounded queues, delivery in the loader's order.

    loader -> q_pre (batches that wait for a replica) -> replicas -> q_hs (states that wait for the drafter) -> drafter

All state lies behind one lock: batches are few and large, so nobody waits long for it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from dflash.batch import Batch
from dflash.target.frozen import FrozenTarget

_JOIN_SECONDS = 5.0


class Replica:
    """A copy of the target that one pass at a time may use: capturing states changes the model while it lasts."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        self.in_use = threading.Lock()

    def read(self, batch: Batch, device: torch.device) -> Batch:
        """The batch with its hidden states, on `device`."""
        with self.in_use:
            hidden = self.target.hidden_states(batch.input_ids, batch.cu_seqlens)
        fed = batch.to(device)
        fed.hidden = hidden.to(device)
        return fed


@dataclass
class PipelineFigures:
    """Who waited for whom, and how full the queues were; counted from when the pipeline was opened."""

    drafter_wait_seconds: float = 0.0
    target_wait_seconds: float = 0.0  # of all replicas together
    most_waiting_tokens: int = 0  # in q_pre
    most_states_tokens: int = 0  # in q_hs, what is being computed included
    delivered: int = 0  # batches
    waiting_tokens_sum: int = 0  # in q_pre, when a batch was delivered
    states_tokens_sum: int = 0  # in q_hs, likewise
    waiting_since: dict[int, float] = field(default_factory=dict)  # thread -> when, of those that wait right now

    def up_to_now(self) -> "PipelineFigures":
        """A copy that counts the waits that go on, too."""
        now, begun = time.perf_counter(), list(self.waiting_since.values())
        waited = self.target_wait_seconds + sum(now - begin for begin in begun)
        return replace(self, target_wait_seconds=waited, waiting_since={})


@dataclass
class _Job:
    """One batch on its way."""

    number: int
    batch: Batch
    tokens: int
    cost: float
    fed: Batch | None = None


@dataclass
class _State:
    """What the threads share, behind one lock."""

    queues: list[deque[_Job]]
    loads: list[float]  # predicted cost of what each replica has before it
    waiting_tokens: int = 0
    states_tokens: int = 0
    not_started: dict[int, int] = field(default_factory=dict)  # number -> tokens, of what q_pre holds
    done: dict[int, _Job] = field(default_factory=dict)
    total: int | None = None  # batches, once the loader has ended
    error: BaseException | None = None
    is_stopping: bool = False


class Pipeline:
    """One pass over a loader.

    Args:
        loader: its batches come back in its order.
        replicas: of the target.
        device: of the drafter, where batches are delivered.
        capacity_tokens: of each of the two queues; a larger batch passes alone.
        cost: predicts what a batch costs a replica, in any unit.
        hang_timeout_seconds: the longest wait for a batch before the run ends.
        figures: counted up.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        replicas: Sequence[Replica],
        device: torch.device,
        *,
        capacity_tokens: int,
        cost: Callable[[Batch], float],
        hang_timeout_seconds: float,
        figures: PipelineFigures,
    ) -> None:
        self.loader = loader
        self.replicas = replicas
        self.device = device
        self.capacity_tokens = capacity_tokens
        self.cost = cost
        self.hang_timeout_seconds = hang_timeout_seconds
        self.figures = figures
        self.changed = threading.Condition()
        self.state = _State([deque() for _ in replicas], [0.0] * len(replicas))
        # OpenMP counts threads per thread that calls it: a new one would not know what this one was told.
        self.num_threads = torch.get_num_threads()

    def __iter__(self) -> Iterator[Batch]:
        threads = [threading.Thread(target=self._guarded, args=(self._distribute,), name="dflash-loader", daemon=True)]
        for number in range(len(self.replicas)):
            threads.append(
                threading.Thread(
                    target=self._guarded, args=(self._work, number), name=f"dflash-target-{number}", daemon=True
                )
            )
        for thread in threads:
            thread.start()
        try:
            number = 0
            while (fed := self._deliver(number)) is not None:
                yield fed
                number += 1
        finally:
            with self.changed:
                self.state.is_stopping = True
                self.changed.notify_all()
            deadline = time.monotonic() + _JOIN_SECONDS
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _guarded(self, body: Callable[..., None], *arguments: int) -> None:
        try:
            body(*arguments)
        except BaseException as error:  # whatever it is, the drafter's thread has to raise it
            with self.changed:
                self.state.error = self.state.error or error
                self.state.is_stopping = True
                self.changed.notify_all()

    def _distribute(self) -> None:
        """Give every batch of the loader to the replica that has least before it, as q_pre has room."""
        state, number = self.state, 0
        for number, batch in enumerate(self.loader, start=1):
            job = _Job(number - 1, batch, batch.num_padded_tokens, self.cost(batch))
            with self.changed:
                self.changed.wait_for(
                    lambda: state.is_stopping or self._fits(state.waiting_tokens, job.tokens)  # noqa: B023
                )
                if state.is_stopping:
                    return
                replica = min(range(len(self.replicas)), key=lambda r: state.loads[r])
                state.queues[replica].append(job)
                state.loads[replica] += job.cost
                state.waiting_tokens += job.tokens
                state.not_started[job.number] = job.tokens
                self.figures.most_waiting_tokens = max(self.figures.most_waiting_tokens, state.waiting_tokens)
                self.changed.notify_all()
        with self.changed:
            state.total = number
            self.changed.notify_all()

    def _work(self, replica: int) -> None:
        """Read what the replica is given, as q_hs has room."""
        torch.set_num_threads(self.num_threads)
        state, queue = self.state, self.state.queues[replica]
        while True:
            with self.changed:
                thread = threading.get_ident()  # training and validation have threads of their own
                self.figures.waiting_since[thread] = time.perf_counter()
                self.changed.wait_for(
                    lambda: state.is_stopping or (self._may_start(queue[0]) if queue else state.total is not None)
                )
                self.figures.target_wait_seconds += time.perf_counter() - self.figures.waiting_since.pop(thread)
                if state.is_stopping or not queue:
                    return
                job = queue.popleft()
                del state.not_started[job.number]
                state.waiting_tokens -= job.tokens
                state.states_tokens += job.tokens
                self.figures.most_states_tokens = max(self.figures.most_states_tokens, state.states_tokens)
                self.changed.notify_all()
            job.fed = self.replicas[replica].read(job.batch, self.device)
            with self.changed:
                state.done[job.number] = job
                state.loads[replica] -= job.cost
                self.changed.notify_all()

    def _may_start(self, job: _Job) -> bool:
        """Whether q_hs has room for it beside all earlier batches: those must never wait for a later one to leave."""
        earlier = sum(tokens for number, tokens in self.state.not_started.items() if number < job.number)
        return self._fits(self.state.states_tokens + earlier, job.tokens)

    def _fits(self, held_tokens: int, tokens: int) -> bool:
        return held_tokens == 0 or held_tokens + tokens <= self.capacity_tokens

    def _deliver(self, number: int) -> Batch | None:
        """Batch `number`, or None where the loader has no more; raises what any thread has raised."""
        state = self.state
        with self.changed:
            begin = time.perf_counter()
            is_in_time = self.changed.wait_for(
                lambda: state.error is not None or number in state.done or state.total == number,
                timeout=self.hang_timeout_seconds,
            )
            self.figures.drafter_wait_seconds += time.perf_counter() - begin
            if state.error is not None:
                raise state.error
            if not is_in_time:
                raise RuntimeError(self._hang_text(number))
            if number not in state.done:
                return None
            self.figures.delivered += 1
            self.figures.waiting_tokens_sum += state.waiting_tokens
            self.figures.states_tokens_sum += state.states_tokens
            job = state.done.pop(number)
            state.states_tokens -= job.tokens
            self.changed.notify_all()
            assert job.fed is not None
            return job.fed

    def _hang_text(self, number: int) -> str:
        state = self.state
        where = "the loader has not brought it"
        for replica, queue in enumerate(state.queues):
            if any(job.number == number for job in queue):
                where = f"it waits for replica {replica}"
        return (
            f"Batch {number} of this pass did not come within placement.hang_timeout_seconds="
            f"{self.hang_timeout_seconds:g}: {where} or a replica hangs in it."
        )
