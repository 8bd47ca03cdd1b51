"""What waits where between loader, replicas and drafter: the rules alone, without threads or time.

    loader -> q_pre (batches that wait for a replica) -> replicas -> q_hs (states that wait for the drafter) -> drafter

Both queues are bounded in tokens; a batch that is larger than a queue passes it alone. `Pipeline` runs these rules with
threads, `dflash.simulation` in simulated time.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """What one replica reads of a batch."""

    replica: int
    samples: NDArray[np.int64] | None  # places in the batch, ascending; None: the whole batch
    cost: float  # predicted
    width_tokens: int | None = None  # that the samples are padded to


@dataclass
class Job(Generic[Item]):
    """One batch on its way."""

    number: int
    batch: Item
    tokens: int
    parts_left: int


class Queues(Generic[Item]):
    """Batches between loader and drafter.

    Args:
        num_replicas: that read them.
        capacity_tokens: of each of the two queues.

    Attributes:
        waiting_tokens: in q_pre.
        states_tokens: in q_hs, what is being computed included.
        loads: predicted cost of what each replica has before it, 0 where it is idle.
        num_brought: batches, so far.
        num_batches: that the loader had, once it has ended.
    """

    def __init__(self, num_replicas: int, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.waiting_tokens = 0
        self.states_tokens = 0
        self.loads = [0.0] * num_replicas
        self.num_brought = 0
        self.num_batches: int | None = None
        self._of_replicas: list[deque[tuple[Job[Item], Part]]] = [deque() for _ in range(num_replicas)]
        self._not_started: dict[int, int] = {}  # number -> tokens, of what q_pre holds
        self._being_read: dict[int, int] = {}  # replica -> number
        self._done: dict[int, Job[Item]] = {}

    def has_room(self, tokens: int) -> bool:
        """Whether a batch of so many tokens fits into q_pre."""
        return self._fits(self.waiting_tokens, tokens)

    def put(self, number: int, batch: Item, tokens: int, parts: list[Part]) -> None:
        """Give a batch to the replicas of its parts. Batches come in their order."""
        job = Job(number, batch, tokens, len(parts))
        for part in parts:
            self._of_replicas[part.replica].append((job, part))
            self.loads[part.replica] += part.cost
        self.waiting_tokens += tokens
        self._not_started[number] = tokens
        self.num_brought += 1

    def may_start(self, replica: int) -> bool:
        """Whether the replica has something to read, and q_hs room for it.

        The whole of a batch passes from q_pre to q_hs with its first part, since it leaves that one in one piece, too.
        Room must be left for all earlier batches: they must never wait for a later one to leave.
        """
        if not self._of_replicas[replica]:
            return False
        job = self._of_replicas[replica][0][0]
        if job.number not in self._not_started:
            return True
        earlier = sum(tokens for number, tokens in self._not_started.items() if number < job.number)
        return self._fits(self.states_tokens + earlier, job.tokens)

    def start(self, replica: int) -> tuple[Job[Item], Part]:
        """What the replica is to read next."""
        job, part = self._of_replicas[replica].popleft()
        self._being_read[replica] = job.number
        if job.number in self._not_started:
            del self._not_started[job.number]
            self.waiting_tokens -= job.tokens
            self.states_tokens += job.tokens
        return job, part

    def finish(self, job: Job[Item], part: Part) -> bool:
        """Note that a part has been read; whether it was the last one of its batch."""
        self.loads[part.replica] = self.loads[part.replica] - part.cost if self._of_replicas[part.replica] else 0.0
        del self._being_read[part.replica]
        job.parts_left -= 1
        return not job.parts_left

    def is_finished(self, replica: int) -> bool:
        """Whether nothing will come for the replica any more."""
        return self.num_batches is not None and not self._of_replicas[replica]

    def complete(self, job: Job[Item]) -> None:
        """A batch is ready for the drafter, as soon as those before it have been taken."""
        self._done[job.number] = job

    def is_ready(self, number: int) -> bool:
        """Whether the drafter can take batch `number`."""
        return number in self._done

    def take(self, number: int) -> Job[Item]:
        """Hand a ready batch to the drafter."""
        job = self._done.pop(number)
        self.states_tokens -= job.tokens
        return job

    def waits_for(self, number: int) -> list[int]:
        """Replicas that have not begun with (a part of) batch `number`."""
        return [r for r, queue in enumerate(self._of_replicas) if any(job.number == number for job, _ in queue)]

    def is_read_by(self, number: int) -> list[int]:
        """Replicas that are reading (a part of) batch `number`."""
        return [replica for replica, being_read in self._being_read.items() if being_read == number]

    def _fits(self, held_tokens: int, tokens: int) -> bool:
        return held_tokens == 0 or held_tokens + tokens <= self.capacity_tokens
