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
from torch import Tensor

from dflash.batch import Batch
from dflash.placement.replica import Replica, use_threads
from dflash.placement.split_by_length import IntArray

_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """What one replica reads of a batch."""

    replica: int
    samples: IntArray | None  # rows of the batch, None: the whole batch
    cost: float  # predicted


# Given a batch and the predicted cost of what each replica has before it: one part, or several that share its samples.
Route = Callable[[Batch, Sequence[float]], list[Part]]


@dataclass
class PipelineFigures:
    """Who waited for whom, and how full the queues were; counted from when the pipeline was opened."""

    drafter_wait_seconds: float = 0.0
    target_wait_seconds: float = 0.0  # of all replicas together
    transfer_seconds: float = 0.0  # of states to the drafter's device, likewise
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
    parts_left: int
    parts: list[tuple[IntArray, Tensor]] = field(default_factory=list)  # what has been read of it, where it is cut
    hidden: Tensor | None = None


@dataclass
class _State:
    """What the threads share, behind one lock."""

    queues: list[deque[tuple[_Job, Part]]]
    loads: list[float]  # predicted cost of what each replica has before it, 0 where it is idle
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
        route: says which replica reads a batch, or which parts of it.
        hang_timeout_seconds: the longest wait for a batch before the run ends.
        threads_per_replica: of replicas on the CPU; None: as many as the thread that iterates has.
        figures: counted up.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        replicas: Sequence[Replica],
        device: torch.device,
        *,
        capacity_tokens: int,
        route: Route,
        hang_timeout_seconds: float,
        threads_per_replica: int | None = None,
        figures: PipelineFigures,
    ) -> None:
        self.loader = loader
        self.replicas = replicas
        self.device = device
        self.capacity_tokens = capacity_tokens
        self.route = route
        self.hang_timeout_seconds = hang_timeout_seconds
        self.figures = figures
        self.changed = threading.Condition()
        self.state = _State([deque() for _ in replicas], [0.0] * len(replicas))
        # A new thread does not know what this one was told.
        self.num_threads = threads_per_replica or torch.get_num_threads()

    def __iter__(self) -> Iterator[Batch]:
        use_threads(torch.get_num_threads())  # it must not follow the replicas' number
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
        """Give every batch of the loader to replicas as q_pre has room."""
        state, number = self.state, 0
        for number, batch in enumerate(self.loader, start=1):
            tokens = batch.num_padded_tokens
            with self.changed:
                self.changed.wait_for(
                    lambda: state.is_stopping or self._fits(state.waiting_tokens, tokens)  # noqa: B023
                )
                if state.is_stopping:
                    return
                parts = self.route(batch, state.loads)
                job = _Job(number - 1, batch, tokens, len(parts))
                for part in parts:
                    state.queues[part.replica].append((job, part))
                    state.loads[part.replica] += part.cost
                state.waiting_tokens += tokens
                state.not_started[job.number] = tokens
                self.figures.most_waiting_tokens = max(self.figures.most_waiting_tokens, state.waiting_tokens)
                self.changed.notify_all()
        with self.changed:
            state.total = number
            self.changed.notify_all()

    def _work(self, replica: int) -> None:
        """Read what the replica is given, as q_hs has room."""
        if self.replicas[replica].target.device.type == "cpu":
            use_threads(self.num_threads)
        state, queue = self.state, self.state.queues[replica]
        while True:
            with self.changed:
                thread = threading.get_ident()  # training and validation have threads of their own
                self.figures.waiting_since[thread] = time.perf_counter()
                self.changed.wait_for(
                    lambda: state.is_stopping or (self._may_start(queue[0][0]) if queue else state.total is not None)
                )
                self.figures.target_wait_seconds += time.perf_counter() - self.figures.waiting_since.pop(thread)
                if state.is_stopping or not queue:
                    return
                job, part = queue.popleft()
                self._start(job)
            states, transfer_seconds = self.replicas[replica].read(job.batch, part.samples)
            with self.changed:
                self.figures.transfer_seconds += transfer_seconds
                state.loads[replica] = state.loads[replica] - part.cost if queue else 0.0
                job.parts_left -= 1
                if part.samples is not None:
                    job.parts.append((part.samples, states))
                is_whole = not job.parts_left
            if is_whole:
                job.hidden = states if part.samples is None else self.replicas[replica].join(job.batch, job.parts)
                job.parts.clear()
                with self.changed:
                    state.done[job.number] = job
                    self.changed.notify_all()

    def _start(self, job: _Job) -> None:
        """With its first part, the whole of a batch passes from q_pre to q_hs: it leaves that one in one piece, too."""
        state = self.state
        if job.number not in state.not_started:
            return
        del state.not_started[job.number]
        state.waiting_tokens -= job.tokens
        state.states_tokens += job.tokens
        self.figures.most_states_tokens = max(self.figures.most_states_tokens, state.states_tokens)
        self.changed.notify_all()

    def _may_start(self, job: _Job) -> bool:
        """Whether q_hs has room for it beside all earlier batches: those must never wait for a later one to leave."""
        if job.number not in self.state.not_started:
            return True
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
        assert job.hidden is not None
        fed = job.batch.to(self.device)
        fed.hidden = job.hidden
        if (
            fed.hidden.is_cuda
        ):  # made on a replica's stream: its memory must stay until this stream is done with it, too
            fed.hidden.record_stream(torch.cuda.current_stream(self.device))
        return fed

    def _hang_text(self, number: int) -> str:
        state = self.state
        where = "the loader has not brought it"
        for replica, queue in enumerate(state.queues):
            if any(job.number == number for job, _ in queue):
                where = f"it waits for replica {replica}"
        return (
            f"Batch {number} of this pass did not come within placement.hang_timeout_seconds="
            f"{self.hang_timeout_seconds:g}: {where} or a replica hangs in it."
        )
