"""Batches through several replicas of the target: a thread each, bounded queues, delivery in the loader's order.

All state lies behind one lock, which the passes of a pool share: batches are few and large, nobody waits long for it.
"""

import multiprocessing
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize

import torch
from torch import Tensor

from dflash.batch import Batch
from dflash.placement.queues import Job, Part, Queues
from dflash.placement.replica import Replica, current_device, use_common_threads, use_own_threads
from dflash.placement.split_by_length import IntArray

_JOIN_SECONDS = 5.0

# Given a batch and the predicted cost of what each replica has before it: one part, or several that share its samples.
Route = Callable[[Batch, Sequence[float]], list[Part]]


@dataclass
class PipelineFigures:
    """Who waited for whom, and how full the queues were; counted from when the pipeline was opened."""

    brought: int = 0  # batches, by the loader
    drafter_wait_seconds: float = 0.0
    target_wait_seconds: float = 0.0  # of all replicas together
    transfer_seconds: float = 0.0  # of states to the drafter's device, likewise
    most_waiting_tokens: int = 0  # in q_pre
    most_states_tokens: int = 0  # in q_hs, what is being computed included
    delivered: int = 0  # batches, to the drafter
    waiting_tokens_sum: int = 0  # in q_pre, when a batch was delivered
    states_tokens_sum: int = 0  # in q_hs, likewise
    waiting_since: dict[int, float] = field(default_factory=dict)  # thread -> when, of those that wait right now


@dataclass
class PoolState:
    """What the passes of a pool have in common: while one validates, that of training reads ahead.

    Attributes:
        changed: the lock, and what is notified whenever anything behind it changes.
        figures: of all passes together.
        error: the first one of any thread; it ends all passes.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    figures: PipelineFigures = field(default_factory=PipelineFigures)
    error: BaseException | None = None

    def figures_now(self) -> PipelineFigures:
        """A copy that counts the waits that go on, too."""
        with self.changed:
            figures, now = self.figures, time.perf_counter()
            waited = figures.target_wait_seconds + sum(now - begin for begin in figures.waiting_since.values())
            return replace(figures, target_wait_seconds=waited, waiting_since={})


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
        state: that it shares with other passes.
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
        state: PoolState,
    ) -> None:
        self.loader = loader
        self.replicas = replicas
        self.device = device
        self.route = route
        self.hang_timeout_seconds = hang_timeout_seconds
        self.state, self.changed, self.figures = state, state.changed, state.figures
        self.queues: Queues[Batch] = Queues(len(replicas), capacity_tokens)
        self.hidden: dict[int, Tensor] = {}  # states of whole batches, by number
        self.parts: dict[int, list[tuple[IntArray, Tensor]]] = defaultdict(list)  # of those that are still in parts
        self.is_stopping = False
        self.is_hanging = False
        self.threads: list[threading.Thread] = []
        self.threads_per_replica = threads_per_replica
        self.num_threads = torch.get_num_threads()  # which a new thread would not know of

    def __iter__(self) -> Iterator[Batch]:
        if self.threads_per_replica is not None:
            use_own_threads(self.num_threads)  # this thread must not follow the replicas' number
        self._start("dflash-loader", self._distribute)
        for number in range(len(self.replicas)):
            self._start(f"dflash-target-{number}", self._work, number)
        try:
            number = 0
            while self._is_next(number):
                yield self._deliver(number)  # bound to no name: this frame would keep its states until the next one
                number += 1
        finally:
            self.stop()

    def stop(self) -> None:
        """End all threads, in the thread that iterates; more than once does no harm.

        A loop that is left early, as Lightning's at the last step, drops its iterator whenever it likes: whoever
        wants the threads gone calls this. A thread that hangs, or is at work for too long, is left behind.
        """
        with self.changed:
            self.is_stopping = True
            self.changed.notify_all()
        if not self.threads:
            return
        deadline = time.monotonic() + (0.0 if self.is_hanging else _JOIN_SECONDS)
        loader = self.threads[0]
        while self.threads:
            thread = self.threads.pop()
            if thread is not threading.current_thread():  # as where garbage collection ends this pass
                thread.join(max(deadline - time.monotonic(), 0.0))
        if loader.is_alive():
            Finalize(None, _end_loader_processes, exitpriority=1)
        self.hidden.clear()
        self.parts.clear()
        if self.threads_per_replica is not None:
            use_common_threads(self.num_threads)

    def _start(self, name: str, body: Callable[..., None], *arguments: int) -> None:
        thread = threading.Thread(target=self._guarded, args=(body, *arguments), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _guarded(self, body: Callable[..., None], *arguments: int) -> None:
        try:
            # A new thread's device is cuda:0, where pinning memory and leaving a stream would open a context.
            with current_device(self.device):
                body(*arguments)
        except BaseException as error:  # whatever it is, the drafter's thread has to raise it
            with self.changed:
                self.state.error = self.state.error or error
                self.is_stopping = True
                self.changed.notify_all()

    def _distribute(self) -> None:
        """Give every batch of the loader to replicas as q_pre has room."""
        queues, number = self.queues, 0
        for number, batch in enumerate(self.loader, start=1):
            tokens = batch.num_padded_tokens
            with self.changed:
                self.changed.wait_for(lambda: self.is_stopping or queues.has_room(tokens))  # noqa: B023
                if self.is_stopping:
                    return
                loads = list(queues.loads)
            parts = self.route(batch, loads)  # outside the lock: of thousands of samples it takes its time
            with self.changed:
                queues.put(number - 1, batch, tokens, parts)
                self.figures.brought += 1
                self.figures.most_waiting_tokens = max(self.figures.most_waiting_tokens, queues.waiting_tokens)
                self.changed.notify_all()
        with self.changed:
            queues.num_batches = number
            self.changed.notify_all()

    def _work(self, replica: int) -> None:
        """Read what the replica is given, as q_hs has room."""
        if self.replicas[replica].target.device.type == "cpu":
            if self.threads_per_replica is None:
                torch.set_num_threads(self.num_threads)
            else:
                use_own_threads(self.threads_per_replica)
        queues, figures = self.queues, self.figures
        while True:
            with self.changed:
                thread = threading.get_ident()  # training and validation have threads of their own
                figures.waiting_since[thread] = time.perf_counter()
                self.changed.wait_for(
                    lambda: self.is_stopping or queues.may_start(replica) or queues.is_finished(replica)
                )
                figures.target_wait_seconds += time.perf_counter() - figures.waiting_since.pop(thread)
                if self.is_stopping or not queues.may_start(replica):
                    return
                job, part = queues.start(replica)
                figures.most_states_tokens = max(figures.most_states_tokens, queues.states_tokens)
                self.changed.notify_all()
            states, transfer_seconds = self.replicas[replica].read(job.batch, part.samples, part.width_tokens)
            with self.changed:
                figures.transfer_seconds += transfer_seconds
                is_whole = queues.finish(job, part)
                if part.samples is not None:
                    self.parts[job.number].append((part.samples, states))
            if is_whole:
                self._complete(job, replica, states)
            del job, part, states  # or they would stay on the drafter's device until the next ones are there

    def _complete(self, job: Job[Batch], replica: int, states: Tensor) -> None:
        """Hand over a batch of which the replica has read the last part, or all: then `states` is the whole."""
        if parts := self.parts.pop(job.number, None):
            states = self.replicas[replica].join(job.batch, parts)
        with self.changed:
            self.hidden[job.number] = states
            self.queues.complete(job)
            self.changed.notify_all()

    def _is_next(self, number: int) -> bool:
        """Whether there is a batch `number`: waits until it is ready; raises what any thread has raised."""
        queues, state = self.queues, self.state
        with self.changed:
            begin = time.perf_counter()
            is_in_time = self.changed.wait_for(
                lambda: (
                    state.error is not None
                    or self.is_stopping
                    or queues.is_ready(number)
                    or queues.num_batches == number
                ),
                timeout=self.hang_timeout_seconds,
            )
            self.figures.drafter_wait_seconds += time.perf_counter() - begin
            if state.error is not None:
                raise state.error
            if self.is_stopping:
                raise RuntimeError("This pass over the batches was ended: its pool is closed.")
            if not is_in_time:
                self.is_hanging = True
                raise RuntimeError(self._hang_text(number))
            return queues.is_ready(number)

    def _deliver(self, number: int) -> Batch:
        """Batch `number`, which is ready, on the drafter's device."""
        queues, figures = self.queues, self.figures
        with self.changed:
            figures.delivered += 1
            figures.waiting_tokens_sum += queues.waiting_tokens
            figures.states_tokens_sum += queues.states_tokens
            job, hidden = queues.take(number), self.hidden.pop(number)
            self.changed.notify_all()
        fed = job.batch.to(self.device)
        fed.hidden = hidden
        if hidden.is_cuda:  # made on a replica's stream: its memory must stay until this stream is done with it, too
            hidden.record_stream(torch.cuda.current_stream(self.device))
        return fed

    def _hang_text(self, number: int) -> str:
        waits = [f"it waits for replica {replica}" for replica in self.queues.waits_for(number)]
        reads = [
            f"replica {replica} on {self.replicas[replica].target.device} hangs in it"
            for replica in self.queues.is_read_by(number)
        ]
        is_brought = number < self.queues.num_brought
        rest = "its parts are being put together" if is_brought else "the loader has not brought it"
        where = ", ".join([*waits, *reads]) or rest
        return (
            f"Batch {number} of this pass did not come within placement.hang_timeout_seconds="
            f"{self.hang_timeout_seconds:g}: {where}."
        )


def _end_loader_processes() -> None:
    """At exit, where a loader was left at work: its processes ignore the signal with which Python would end them.

    See `DFlashDataModule`; Python would then wait for them for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for process in multiprocessing.active_children():
        process.kill()
