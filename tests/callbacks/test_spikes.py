"""Injected spikes are recorded with the right samples at the right step, before and after a resume."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash.callbacks.spikes import ExplainedByLength
from dflash.training.by_length import NUM_LENGTH_BUCKETS
from tests.commands import scalars, train_here
from tests.inject import as_override

LARGE, NAN, STEPS, ACCUMULATE = 12, 15, 18, 2


def options(folder: Path, large_at: list[int], nan_at: list[int]) -> list[str]:
    return [
        f"max_steps={STEPS}",
        f"trainer.accumulate_grad_batches={ACCUMULATE}",
        "batch.token_budget=1024",
        "trainer.log_every_n_steps=4",
        "trainer.save_every_n_steps=100",
        "spikes.min_steps=8",
        "validate_untrained=false",
        "callbacks.decoding=null",
        as_override(large_at, nan_at),
        f"+callbacks.recorder={{_target_: tests.recorder.Recorder, path: {folder / 'record.jsonl'}}}",
    ]


def spike_lines(folder: Path) -> list[dict[str, object]]:
    path = folder / "spikes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("disturbed")
    assert train_here(folder, cache_dir, *options(folder, [LARGE], [NAN])) == 0
    return folder


def test_a_large_gradient_and_a_nan_batch_are_recorded_with_their_samples(disturbed: Path) -> None:
    large, nan = spike_lines(disturbed)
    assert (large["step"], large["gradient_spike"], large["loss_spike"]) == (LARGE, True, False)
    assert large["skipped"] is False
    assert large["gradient_norm"] > large["gradient_threshold"]  # type: ignore[operator]
    assert (nan["step"], nan["gradient_spike"], nan["loss_spike"], nan["skipped"]) == (NAN, True, True, True)
    assert (nan["gradient_norm"], nan["loss"]) == ("nan", "nan")
    # Micro-batches 2 * step - 2 and 2 * step - 1 of the run, as an independent callback has seen them.
    seen = [json.loads(line)["samples"] for line in (disturbed / "record.jsonl").read_text().splitlines()]
    for line, step in ((large, LARGE), (nan, NAN)):
        assert line["sample_ids"] == seen[2 * step - 2] + seen[2 * step - 1]
        assert len(line["lengths"]) == len(line["sample_ids"])  # type: ignore[arg-type]
        for name in line["loss_by_length"]:  # type: ignore[attr-defined]
            low, high = map(int, name.split("-"))
            assert any(low <= length <= high for length in line["lengths"])  # type: ignore[attr-defined]


def test_spikes_are_in_tensorboard_and_in_the_summary(disturbed: Path) -> None:
    tags = scalars(disturbed)
    assert dict(tags["grad/spikes"]) == {4: 0, 8: 0, 12: 1, 16: 1}
    assert dict(tags["loss/spikes"]) == {4: 0, 8: 0, 12: 0, 16: 1}
    assert all(value > 0 for _, value in tags["grad/spike_threshold"])
    summary = json.loads((disturbed / "summary.json").read_text())
    assert summary["spikes"] == {"gradient": 2, "loss": 1, "skipped_steps": 1}
    assert 0 <= summary["loss_variance_explained_by_length"] <= 1


def test_a_nan_batch_does_not_destroy_the_weights(disturbed: Path) -> None:
    state = torch.load(disturbed / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_run_whose_loss_merely_falls_has_no_spike(cache_dir: Path, tmp_path: Path) -> None:
    assert train_here(tmp_path, cache_dir, *options(tmp_path, [], [])) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["spikes"] == {"gradient": 0, "loss": 0, "skipped_steps": 0}
    assert spike_lines(tmp_path) == []


@pytest.mark.parametrize("stop", [9, 13])
def test_a_resumed_run_records_what_the_undisturbed_one_does(
    disturbed: Path, cache_dir: Path, tmp_path: Path, stop: int
) -> None:
    train_here(tmp_path, cache_dir, *options(tmp_path, [LARGE], [NAN]), f"stop_after_steps={stop}")
    # As if the killed part had got further than its checkpoint: those steps come again.
    with (tmp_path / "spikes.jsonl").open("a") as file:
        file.write(json.dumps({"step": stop + 1}) + "\n")
    train_here(tmp_path, cache_dir, f"resume_from={tmp_path}")
    assert spike_lines(tmp_path) == spike_lines(disturbed)
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (tmp_path, disturbed))
    for key in ("spikes", "loss_variance_explained_by_length"):
        assert ours[key] == theirs[key]


def test_every_spike_can_cost_its_step(cache_dir: Path, tmp_path: Path) -> None:
    train_here(tmp_path, cache_dir, *options(tmp_path, [LARGE], [NAN]), "spikes.skip=all")
    assert [line["skipped"] for line in spike_lines(tmp_path)] == [True, True]


def weights(bucket: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(bucket), NUM_LENGTH_BUCKETS).double()


@given(st.lists(st.tuples(st.integers(5, 12), st.floats(0.5, 9)), min_size=4, max_size=40))
def test_the_explained_share_is_the_squared_correlation_of_the_changes(steps: list[tuple[int, float]]) -> None:
    explained = ExplainedByLength()
    for bucket, loss in steps:
        explained.add(loss, weights(bucket))
        explained.add(math.nan, weights(5))  # a step without a loss tells nothing
    dx, dy = np.diff([b for b, _ in steps]), np.diff([loss for _, loss in steps])
    if dx.std() < 1e-3 or dy.std() < 1e-3:
        return
    assert explained.share == pytest.approx(np.corrcoef(dx, dy)[0, 1] ** 2, rel=1e-6, abs=1e-9)


def test_a_falling_loss_is_not_explained_by_mixed_lengths_and_a_sorted_one_is() -> None:
    random = np.random.default_rng(0)
    mixed, by_length = ExplainedByLength(), ExplainedByLength()
    for step in range(400):
        bucket = int(random.integers(6, 12))
        falling = 3.0 + 3.0 / (1 + step / 50)
        mixed.add(falling + random.normal(0, 0.1), weights(bucket))
        by_length.add(falling + 0.4 * bucket + random.normal(0, 0.1), weights(bucket))
    assert mixed.share is not None
    assert by_length.share is not None
    assert mixed.share < 0.05
    assert by_length.share > 0.9
