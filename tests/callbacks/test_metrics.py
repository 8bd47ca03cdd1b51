"""What callbacks log, against the same figures recomputed from single samples."""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from dflash.batch import Batch
from dflash.callbacks.gradient_norm import GradientNorm
from dflash.callbacks.length_buckets import LengthBuckets
from dflash.callbacks.mixing import Mixing
from dflash.callbacks.padding import Padding
from dflash.callbacks.throughput import Throughput
from dflash.callbacks.training_metrics import TrainingMetrics
from dflash.data.datamodule import DFlashDataModule, ValidationBatches
from dflash.data.schedule import TrainingSchedule
from dflash.metric_names import by_length, length_bucket
from dflash.samplers.full_shuffle import FullShuffleSampler
from dflash.samplers.limits import BatchLimits
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import CrossEntropyObjective
from tests.data.make import random_rows, token_datasets
from tests.training.tiny import CAPTURED, WIDTH, tiny_drafter, tiny_ends

LENGTHS = [5, 6, 7, 9, 12, 15, 20, 26, 31, 40, 50, 63, 70, 90, 100, 130]
EVERY, ACCUMULATE, STEPS = 2, 2, 6


class ListLogger(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.points: dict[str, list[tuple[int, float]]] = defaultdict(list)

    name = version = "list"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for tag, value in metrics.items():
            self.points[tag].append((step or 0, value))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class RandomStates:
    """Stands for the target: states that depend on the sample alone."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            batch.hidden = torch.stack([states_of(int(i))[: batch.input_ids.shape[1]] for i in batch.sample_ids])
            yield batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


@functools.cache
def states_of(sample: int) -> torch.Tensor:
    return torch.randn(200, CAPTURED * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(sample))


Run = tuple[dict[str, list[tuple[int, float]]], list[list[Batch]], DFlashModule]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Logged points of a run whose weights stand still, the micro-batches of each step, and the module."""
    torch.manual_seed(0)
    train, val = token_datasets(tmp_path_factory.mktemp("data"), random_rows(LENGTHS), random_rows([8, 40, 41], seed=1))
    limits = BatchLimits(token_budget=260, pad_multiple=4, anchors_per_sample=3)
    schedule = TrainingSchedule(train, FullShuffleSampler(), limits, seed=0, world_size=1, accumulate=ACCUMULATE)
    data = DFlashDataModule(
        schedule, ValidationBatches(val, schedule), max_steps=STEPS, num_workers=0, feed=RandomStates
    )
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    module = DFlashModule(
        tiny_drafter(), tiny_ends(), CrossEntropyObjective(4, 2.0), frozen, warmup_fraction=0.0, max_steps=STEPS
    )
    logger = ListLogger()
    Trainer(
        accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=ACCUMULATE, log_every_n_steps=EVERY,
        val_check_interval=STEPS * ACCUMULATE, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        logger=logger, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[TrainingMetrics(), LengthBuckets(), Padding(), Mixing(), GradientNorm(), Throughput(2, 1)],
    ).fit(module, data)  # fmt: skip
    batches = list(RandomStates(data.train_dataloader()))
    steps = [batches[i : i + ACCUMULATE] for i in range(0, len(batches), ACCUMULATE)]
    return logger.points, steps, module


def intervals(run: Run) -> Iterator[tuple[int, list[Batch]]]:
    """(step at its end, micro-batches) of every logging interval."""
    for end in range(EVERY, STEPS + 1, EVERY):
        yield end, [batch for step in run[1][end - EVERY : end] for batch in step]


def blocks(module: DFlashModule, batch: Batch) -> Iterator[tuple[int, list[float], list[float], list[bool]]]:
    """Length of its sample, weights, cross-entropies and hits of every block, supervised slots only."""
    outcome = module.draft(batch)
    for n, doc in enumerate(batch.anchor_doc.tolist()):
        there = outcome.supervised[n]
        yield (
            int(batch.lengths[doc]),
            outcome.weights[n][there].tolist(),
            outcome.cross_entropy[n][there].tolist(),
            outcome.correct[n][there].tolist(),
        )


def test_loss_accuracy_and_acceptance_are_sums_over_counts_of_the_interval(run: Run) -> None:
    points, _, module = run
    for end, batches in intervals(run):
        loss = weight = hits = slots = matched = count = 0.0
        for batch in batches:
            for _, weights, losses, correct in blocks(module, batch):
                loss += sum(w * x for w, x in zip(weights, losses, strict=True))
                weight += sum(weights)
                hits, slots, count = hits + sum(correct), slots + len(correct), count + 1
                matched += correct.index(False) if False in correct else len(correct)
        assert dict(points["train/loss"])[end] == pytest.approx(loss / weight, rel=1e-9)
        assert dict(points["train/accuracy"])[end] == pytest.approx(hits / slots)
        assert dict(points["train/acceptance_length"])[end] == pytest.approx(1 + matched / count)


def test_mixing_is_the_between_step_share_of_the_interval_over_that_of_chance(run: Run) -> None:
    points, steps, _ = run
    for end in range(EVERY, STEPS + 1, EVERY):
        logs = [[math.log(n) for batch in step for n in batch.lengths.tolist()] for step in steps[end - EVERY : end]]
        everything = [x for step in logs for x in step]
        mean = statistics.fmean(everything)
        total = sum((x - mean) ** 2 for x in everything)
        between = sum(len(step) * (statistics.fmean(step) - mean) ** 2 for step in logs)
        chance = (EVERY - 1) / (len(everything) - 1)
        assert dict(points["mixing/eta2_ratio"])[end] == pytest.approx(between / total / chance, rel=1e-9)


def test_loss_by_length_has_the_buckets_of_the_interval_and_no_other(run: Run) -> None:
    points, _, module = run
    expected: dict[str, dict[int, float]] = defaultdict(dict)
    for end, batches in intervals(run):
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for batch in batches:
            for length, weights, losses, _ in blocks(module, batch):
                low = max(2**k for k in range(12) if 2**k <= length)
                entry = sums[f"loss_by_length/{low:04d}-{2 * low - 1:04d}"]
                entry[0] += sum(w * x for w, x in zip(weights, losses, strict=True))
                entry[1] += sum(weights)
        for tag, (loss, weight) in sums.items():
            expected[tag][end] = loss / weight
    logged = {tag: dict(values) for tag, values in points.items() if tag.startswith("loss_by_length/")}
    assert logged.keys() == expected.keys()
    assert min(len(values) for values in logged.values()) < STEPS / EVERY, "no bucket is ever absent: a weak test"
    for tag, values in expected.items():
        assert logged[tag] == pytest.approx(values, rel=1e-9)


def test_padding_counts_computed_tokens_that_belong_to_no_sample(run: Run) -> None:
    for end, batches in intervals(run):
        computed = sum(len(batch.lengths) * batch.input_ids.shape[1] for batch in batches)
        real = sum(LENGTHS[i] for batch in batches for i in batch.sample_ids.tolist())
        assert dict(run[0]["padding/tokens"])[end] == computed - real
        assert dict(run[0]["padding/ratio"])[end] == pytest.approx((computed - real) / computed)


def test_the_gradient_norm_is_the_mean_of_the_intervals_steps(run: Run) -> None:
    points, steps, module = run
    norms = []
    for batches in steps:
        module.drafter.zero_grad()
        outcomes = [module.draft(batch) for batch in batches]
        (sum(o.loss_sum for o in outcomes) / sum(o.weights.sum() for o in outcomes)).backward()
        squares = sum(float((p.grad**2).sum()) for p in module.drafter.parameters() if p.grad is not None)
        norms.append(squares**0.5)
    for end, value in points["grad/norm"]:
        assert value == pytest.approx(sum(norms[end - EVERY : end]) / EVERY, rel=1e-9)


def test_validation_by_length_has_the_buckets_of_the_held_out_samples(run: Run) -> None:
    tags = {tag for tag in run[0] if tag.startswith(("val_loss_by_length/", "acceptance_by_length/"))}
    assert tags == {
        f"{g}/{b}" for g in ("val_loss_by_length", "acceptance_by_length") for b in ("0008-0015", "0032-0063")
    }
    assert [step for step, _ in run[0]["val/loss"]] == [STEPS]


@given(st.integers(1, 100_000))
def test_a_bucket_is_named_by_the_powers_of_two_around_its_lengths(length: int) -> None:
    low, high = by_length("group", length_bucket(length)).removeprefix("group/").split("-")
    assert int(low) <= length <= int(high)
    assert int(low) & (int(low) - 1) == 0
    assert int(high) == 2 * int(low) - 1
