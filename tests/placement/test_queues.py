"""The rules of the queues, whoever is how fast: nobody waits for ever, and nothing is held beyond the capacity."""

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.placement.queues import Job, Part, Queues


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 30), min_size=1, max_size=15),
    replicas=st.integers(1, 4),
    capacity_tokens=st.sampled_from([1, 10, 25, 60, 200]),
    most_parts=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_cut_batches_all_arrive_in_order_within_the_capacity(
    tokens: list[int], replicas: int, capacity_tokens: int, most_parts: int, seed: int
) -> None:
    """Loader, replicas and drafter move in any order in which they can; parts of a batch lie on any replicas."""
    source, queues = random.Random(seed), Queues[int](replicas, capacity_tokens)
    reads: dict[int, tuple[Job[int], Part]] = {}  # replica -> what it is reading
    given_out = taken = 0

    def bring() -> None:
        nonlocal given_out
        parts = [Part(source.randrange(replicas), None, 1.0) for _ in range(source.randint(1, most_parts))]
        queues.put(given_out, given_out, tokens[given_out], parts)
        given_out += 1

    def start(replica: int) -> None:
        reads[replica] = queues.start(replica)

    def finish(replica: int) -> None:
        job, part = reads.pop(replica)
        if queues.finish(job, part):
            queues.complete(job)

    def take() -> None:
        nonlocal taken
        assert queues.take(taken).batch == taken
        taken += 1

    bound = max(capacity_tokens, *tokens)  # one that is larger passes alone
    while taken < len(tokens):
        moves: list[Callable[[], None]] = []
        if given_out < len(tokens) and queues.has_room(tokens[given_out]):
            moves.append(bring)
        for replica in range(replicas):
            if replica in reads:
                moves.append(lambda replica=replica: finish(replica))  # type: ignore[misc]
            elif queues.may_start(replica):
                moves.append(lambda replica=replica: start(replica))  # type: ignore[misc]
        if queues.is_ready(taken):
            moves.append(take)
        assert moves, f"all wait for each other at batch {taken}"
        source.choice(moves)()
        assert 0 <= queues.waiting_tokens <= bound
        assert 0 <= queues.states_tokens <= bound
    assert queues.waiting_tokens == queues.states_tokens == 0
    assert queues.loads == [0.0] * replicas
