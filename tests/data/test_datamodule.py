"""Batches as the training loop gets them: what the plan says, in its order, whatever reads them."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.anchors import draw_anchors, valid_anchors
from dflash.batch import Batch
from dflash.data.collate import collate
from dflash.data.datamodule import DFlashDataModule, ValidationBatches
from dflash.data.schedule import TrainingSchedule
from dflash.data.tokens import TokenDataset
from dflash.samplers.base import LengthBatchSampler
from dflash.samplers.bucketed import BucketedSampler
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.limits import BatchLimits
from tests.data.make import random_rows, token_datasets

LENGTHS = [int(n) for n in np.random.default_rng(3).integers(6, 60, 50)]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenDataset, TokenDataset]:
    return token_datasets(tmp_path_factory.mktemp("data"), random_rows(LENGTHS), random_rows(LENGTHS[:9], seed=1))


def limits(**changes: object) -> BatchLimits:
    return BatchLimits(**{"token_budget": 160, "pad_multiple": 8, "anchors_per_sample": 5, **changes})  # type: ignore[arg-type]


def schedule_of(dataset: TokenDataset, sampler: LengthBatchSampler | None = None, **changes: int) -> TrainingSchedule:
    arguments = {"seed": 7, "world_size": 1, "accumulate": 2, **changes}
    return TrainingSchedule(dataset, sampler or BucketedSampler(width=1.25), limits(), **arguments)


def unfed(loader: Iterable[Batch]) -> Iterable[Batch]:
    return loader


def test_a_batch_holds_its_samples_padded_on_the_right(datasets: tuple[TokenDataset, TokenDataset]) -> None:
    rows = random_rows(LENGTHS)
    batch = collate(datasets[0], [4, 0, 17], limits(), packed=False, seed=0, epoch=0)
    longest = max(LENGTHS[i] for i in (4, 0, 17))
    assert batch.input_ids.shape == (3, -(-longest // 8) * 8)
    for row, sample in enumerate((4, 0, 17)):
        length = LENGTHS[sample]
        assert batch.input_ids[row, :length].tolist() == rows[sample]["input_ids"]
        assert batch.loss_mask[row].tolist() == [bool(m) for m in rows[sample]["loss_mask"]] + [False] * (
            batch.input_ids.shape[1] - length
        )
        chosen = batch.anchors[batch.anchor_doc == row].tolist()
        allowed = [t for t in range(length - 1) if rows[sample]["loss_mask"][t] and rows[sample]["loss_mask"][t + 1]]
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(allowed)
        assert len(chosen) == min(5, len(allowed))


def test_a_packed_batch_is_its_samples_behind_each_other_with_the_anchors_of_the_padded_one(
    datasets: tuple[TokenDataset, TokenDataset],
) -> None:
    ids = [4, 0, 17]
    padded, packed = (collate(datasets[0], ids, limits(), packed=p, seed=0, epoch=3) for p in (False, True))
    lengths = [LENGTHS[i] for i in ids]
    assert packed.input_ids.shape == (1, -(-sum(lengths) // limits().pad_multiple) * limits().pad_multiple)
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    for row, (start, length) in enumerate(zip(packed.starts.tolist(), lengths, strict=True)):
        here = slice(start, start + length)
        assert packed.input_ids[0, here].tolist() == padded.input_ids[row, :length].tolist()
        assert packed.loss_mask[0, here].tolist() == padded.loss_mask[row, :length].tolist()
        assert packed.position_ids[0, here].tolist() == list(range(length))
    assert not packed.loss_mask[0, sum(lengths) :].any()
    assert packed.anchors.tolist() == padded.anchors.tolist()
    assert packed.anchor_doc.tolist() == padded.anchor_doc.tolist()
    assert (packed.num_real_tokens, packed.num_padded_tokens) == (sum(lengths), packed.input_ids.numel())


def test_a_truncated_sample_has_no_anchor_beyond_its_cut(datasets: tuple[TokenDataset, TokenDataset]) -> None:
    longest = int(np.argmax(LENGTHS))
    cut = limits(token_budget=32, too_long="truncate")
    batch = collate(datasets[0], [longest], cut, packed=False, seed=0, epoch=0)
    assert batch.lengths.tolist() == [32]
    assert batch.num_truncated == 1
    assert all(a + 1 < 32 for a in batch.anchors.tolist())


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8), st.integers(0, 5), st.integers(0, 5))
def test_anchors_depend_on_seed_epoch_and_sample_alone(mask: list[bool], most: int, seed: int, epoch: int) -> None:
    loss_mask = np.array(mask, dtype=bool)
    drawn = draw_anchors(loss_mask, most, seed=seed, epoch=epoch, sample_id=3)
    again = draw_anchors(loss_mask, most, seed=seed, epoch=epoch, sample_id=3)
    assert drawn.tolist() == again.tolist()
    valid = [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]
    assert valid_anchors(loss_mask).tolist() == valid
    assert drawn.tolist() == sorted(set(drawn.tolist()) & set(valid))
    assert len(drawn) == min(most, len(valid))


def test_anchors_are_drawn_uniformly_and_anew_in_every_epoch() -> None:
    mask = np.ones(21, dtype=bool)
    counts = np.zeros(20)
    draws = [draw_anchors(mask, 5, seed=0, epoch=epoch, sample_id=0) for epoch in range(4000)]
    for drawn in draws:
        counts[drawn] += 1
    # 4,000 draws of 5 in 20: 1,000 expected each, standard deviation about 27; six of them is one in 10^8.
    assert abs(counts - 1000).max() < 165
    assert len({tuple(drawn) for drawn in draws}) > 3000


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [BucketedSampler(width=1.25), FullShuffleSampler()])
def test_the_loader_is_the_plans_of_all_epochs_in_a_row(
    datasets: tuple[TokenDataset, TokenDataset], sampler: LengthBatchSampler, workers: int
) -> None:
    schedule = schedule_of(datasets[0], sampler)
    max_steps = schedule.num_steps(2) + 3
    module = DFlashDataModule(
        schedule, ValidationBatches(datasets[1], schedule), max_steps=max_steps, num_workers=workers, feed=unfed
    )
    seen = [(batch.epoch, batch.sample_ids.tolist()) for batch in module.train_dataloader()]
    expected = []
    for epoch in range(3):
        plan = sampler.plan(
            datasets[0].lengths, datasets[0].num_anchorable, limits(), seed=7, epoch=epoch, world_size=1, accumulate=2
        )
        for step in range(plan.num_steps):
            expected += [(epoch, plan.batch(step, 0, micro).tolist()) for micro in (0, 1)]
    assert seen == expected[: max_steps * 2]
    for epoch in (0, 1):
        assert sorted(i for e, ids in seen if e == epoch for i in ids) == list(range(len(LENGTHS)))


def test_ranks_share_each_epoch_without_overlap(datasets: tuple[TokenDataset, TokenDataset]) -> None:
    schedule = schedule_of(datasets[0], world_size=3, accumulate=2)
    seen: list[int] = []
    for number in range(schedule.num_steps(1) * 2):
        for rank in range(3):
            epoch, ids = schedule.batch(number, rank)
            assert epoch == 0
            seen += ids.tolist()
    assert sorted(seen) == list(range(len(LENGTHS)))


def test_the_fractional_epoch_is_an_integer_where_an_epoch_ends(datasets: tuple[TokenDataset, TokenDataset]) -> None:
    schedule = schedule_of(datasets[0])
    for epochs in (1, 2, 3):
        assert schedule.fractional_epoch(schedule.num_steps(epochs)) == epochs
    assert 0 < schedule.fractional_epoch(1) < 1


def test_validation_sees_every_held_out_sample_once_with_the_same_anchors_each_time(
    datasets: tuple[TokenDataset, TokenDataset],
) -> None:
    schedule = schedule_of(datasets[0])
    module = DFlashDataModule(
        schedule, ValidationBatches(datasets[1], schedule), max_steps=1, num_workers=0, feed=unfed
    )
    first, second = list(module.val_dataloader()), list(module.val_dataloader())
    assert sorted(i for batch in first for i in batch.sample_ids.tolist()) == list(range(9))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.anchors, b.anchors)
