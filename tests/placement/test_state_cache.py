"""Kept states: the target's own, for the samples they belong to, within their budget."""

from dataclasses import replace

import pytest
import torch

from dflash.batch import Batch
from dflash.placement.inline import InlinePlacement
from dflash.placement.state_cache import StateCache
from dflash.target.frozen import FrozenTarget
from dflash.target.tiny import build_tiny_model

NO_ANCHORS = {"anchors": torch.empty(0, dtype=torch.long), "anchor_doc": torch.empty(0, dtype=torch.long)}


def make_batch(samples: dict[int, list[int]], pad_to: int) -> Batch:
    input_ids = torch.zeros(len(samples), pad_to, dtype=torch.long)
    for row, ids in enumerate(samples.values()):
        input_ids[row, : len(ids)] = torch.tensor(ids)
    return Batch(
        input_ids=input_ids,
        loss_mask=torch.zeros_like(input_ids, dtype=torch.bool),
        lengths=torch.tensor([len(ids) for ids in samples.values()]),
        sample_ids=torch.tensor(list(samples)),
        **NO_ANCHORS,
    )


TEXTS = {7: [5, 6, 7, 8, 9], 2: [20, 21, 22], 4: [30, 31, 32, 33]}


class CountingTarget(FrozenTarget):
    passes = 0

    def hidden_states(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        self.passes += 1
        return super().hidden_states(input_ids, cu_seqlens)


def opened(target: FrozenTarget, cache_gib: float = 0.0) -> InlinePlacement:
    placement = InlinePlacement(cache_gib)
    placement.open(target)
    return placement


def epochs() -> list[Batch]:
    """The same three samples twice, in other company and with other padding."""
    first = [make_batch({7: TEXTS[7], 2: TEXTS[2]}, 8), make_batch({4: TEXTS[4]}, 6)]
    return [*first, make_batch({4: TEXTS[4], 7: TEXTS[7]}, 5), make_batch({2: TEXTS[2]}, 3)]


def test_the_second_epoch_gets_the_states_of_the_first_without_a_pass_through_the_target() -> None:
    # In float64: these wide random weights magnify float32's rounding in other company to 1e-3.
    target = CountingTarget(build_tiny_model().double(), [0, 1])
    batches = list(opened(target, cache_gib=1).feed(epochs()))
    assert target.passes == 2
    alone = FrozenTarget(build_tiny_model().double(), [0, 1])
    for batch in batches:
        assert batch.hidden is not None
        assert batch.hidden.shape[:2] == batch.input_ids.shape
        for row, sample_id in enumerate(batch.sample_ids.tolist()):
            text = TEXTS[sample_id]
            expected = alone.hidden_states(torch.tensor([text]))[0]
            torch.testing.assert_close(batch.hidden[row, : len(text)], expected)


def test_without_a_cache_every_batch_passes_through_the_target() -> None:
    target = CountingTarget(build_tiny_model(), [0])
    list(opened(target).feed(epochs()))
    assert target.passes == 4


def test_training_and_validation_samples_of_the_same_number_are_not_mixed_up() -> None:
    target = CountingTarget(build_tiny_model(), [0])
    placement = opened(target, cache_gib=1)
    list(placement.feed([make_batch({0: TEXTS[7]}, 5)]))
    (other,) = placement.feed([make_batch({0: TEXTS[4] + [9]}, 5)])
    assert target.passes == 2
    assert other.hidden is not None
    torch.testing.assert_close(other.hidden, target.hidden_states(other.input_ids))


def test_no_more_is_kept_than_the_budget_and_the_rest_is_computed() -> None:
    row_bytes = 64 * 4  # one captured layer of width 64 in float32
    target = CountingTarget(build_tiny_model(), [0])
    cache = StateCache(budget_bytes=8 * row_bytes)
    for batch in epochs()[:2]:
        batch.hidden = target.hidden_states(batch.input_ids)
        cache.keep(batch)
    assert set(cache.states) == {7, 2}, "sample 4 has no room behind 5 + 3 tokens"
    assert cache.used_bytes == 8 * row_bytes
    assert cache.find(epochs()[2]) is None, "one of its samples is not kept"
    assert cache.find(epochs()[3]) is not None


def test_states_kept_of_padded_batches_serve_a_packed_one_and_the_other_way_round() -> None:
    target = CountingTarget(build_tiny_model().double(), [0, 1])
    padded = make_batch({7: TEXTS[7], 2: TEXTS[2]}, 8)
    row = make_batch({0: [*TEXTS[2], *TEXTS[7], 0]}, 9)
    packed = replace(
        row,
        lengths=torch.tensor([3, 5]), sample_ids=torch.tensor([2, 7]), cu_seqlens=torch.tensor([0, 3, 8]).int(),
    )  # fmt: skip
    for first, second in ((padded, packed), (packed, padded)):
        target.passes = 0
        of_first, of_second = opened(target, cache_gib=1).feed([first, second])
        assert target.passes == 1
        assert of_first.hidden is not None
        assert of_second.hidden is not None
        by_id = [
            {
                int(i): batch.hidden.flatten(0, 1)[start : start + n]
                for i, start, n in zip(batch.sample_ids, batch.starts, batch.lengths, strict=True)
            }
            for batch in (of_first, of_second)
        ]
        for sample_id in (7, 2):
            torch.testing.assert_close(by_id[0][sample_id], by_id[1][sample_id])


def test_a_sample_cut_to_another_length_is_not_taken_for_the_kept_one() -> None:
    target = FrozenTarget(build_tiny_model(), [0])
    cache = StateCache(2**20)
    batch = make_batch({7: TEXTS[7]}, 5)
    batch.hidden = target.hidden_states(batch.input_ids)
    cache.keep(batch)
    assert cache.find(make_batch({7: TEXTS[7][:4]}, 5)) is None


@pytest.mark.parametrize("value", [-1, "4", True, float("nan")])
def test_a_size_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"placement\.cache_gib="):
        InlinePlacement(value)  # type: ignore[arg-type]
