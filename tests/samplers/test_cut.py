"""Cutting a row into batches and splitting batches, against the plainest statements of both."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.samplers.cut import greedy_cut, split_batches, take_batches
from dflash.samplers.limits import BatchLimits

quick = settings(max_examples=200, deadline=None)  # no deadline: the machine may be busy


@st.composite
def batch_limits(draw: st.DrawFn, longest: int = 60) -> BatchLimits:
    """Limits under which a sample of `longest` tokens still fits."""
    pad_multiple = draw(st.integers(1, 20))
    anchors_per_sample = draw(st.integers(1, 12))
    return BatchLimits(
        token_budget=draw(st.integers(-(-longest // pad_multiple) * pad_multiple, 500)),
        pad_multiple=pad_multiple,
        anchors_per_sample=anchors_per_sample,
        anchor_budget=draw(st.none() | st.integers(anchors_per_sample, 60)),
        max_samples=draw(st.none() | st.integers(1, 9)),
    )


def within(limits: BatchLimits, batch: list[tuple[int, int]]) -> bool:
    """Whether a batch of (length, anchors) keeps all limits, in the words of the design."""
    longest = max(length for length, _ in batch)
    while longest % limits.pad_multiple:
        longest += 1
    if longest * len(batch) > limits.token_budget:
        return False
    if limits.anchor_budget is not None and sum(anchors for _, anchors in batch) > limits.anchor_budget:
        return False
    return limits.max_samples is None or len(batch) <= limits.max_samples


@quick
@given(limits=batch_limits(), row=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), max_size=80))
def test_every_batch_takes_samples_until_the_next_one_would_break_a_limit(
    limits: BatchLimits, row: list[tuple[int, int]]
) -> None:
    row = [(length, min(anchors, limits.anchors_per_sample)) for length, anchors in row]
    batches: list[list[tuple[int, int]]] = []
    for sample in row:
        if batches and within(limits, [*batches[-1], sample]):
            batches[-1].append(sample)
        else:
            batches.append([sample])

    lengths = np.array([length for length, _ in row], dtype=np.int64)
    anchors = np.array([count for _, count in row], dtype=np.int64)
    assert np.diff(greedy_cut(lengths, anchors, limits)).tolist() == [len(batch) for batch in batches]


@quick
@given(limits=batch_limits(), length=st.integers(1, 60), count=st.integers(1, 100))
def test_samples_of_equal_length_fill_batches_to_the_capacity_whatever_it_is(
    limits: BatchLimits, length: int, count: int
) -> None:
    lengths, anchors = np.full(count, length), np.zeros(count, dtype=np.int64)
    capacity = next(n for n in range(1, 501) if not within(limits, [(length, 0)] * (n + 1)))
    sizes = np.diff(greedy_cut(lengths, anchors, limits)).tolist()
    assert sizes == [capacity] * (count // capacity) + [count % capacity] * (count % capacity > 0)


def offsets_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


@quick
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), multiple=st.integers(1, 40))
def test_the_batches_with_most_samples_are_halved_until_their_number_divides(sizes: list[int], multiple: int) -> None:
    expected = list(sizes)
    while len(expected) % multiple and max(expected) > 1:
        largest = max(expected)
        expected.remove(largest)
        expected += [largest // 2, largest - largest // 2]
    if len(expected) % multiple:
        expected = sizes  # not enough samples to ever divide: left as it was
    assert sorted(np.diff(split_batches(offsets_of(sizes), multiple)).tolist()) == sorted(expected)


@quick
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), multiple=st.integers(1, 40))
def test_a_split_never_moves_a_sample_to_another_batch(sizes: list[int], multiple: int) -> None:
    before = offsets_of(sizes)
    assert set(before.tolist()) <= set(split_batches(before, multiple).tolist())


@quick
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), data=st.data())
def test_batches_are_taken_whole_and_in_the_wanted_order(sizes: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, unique=True))
    row = np.arange(sum(sizes)) + 1000
    pieces = np.split(row, np.cumsum(sizes)[:-1])
    indices, offsets = take_batches(row, offsets_of(sizes), np.array(wanted))
    taken = [indices[begin:end].tolist() for begin, end in itertools.pairwise(offsets)]
    assert taken == [pieces[b].tolist() for b in wanted]
