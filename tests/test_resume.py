"""A run that was stopped and resumed is the run that was not, to the bit."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash.callbacks.stop_and_save import RunInterruptedError, StopAndSave
from tests.commands import scalars, train_here

STEPS = 7
ACCUMULATE = 2


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def options(folder: Path) -> list[str]:
    return [
        f"max_steps={STEPS}",
        f"trainer.accumulate_grad_batches={ACCUMULATE}",
        "batch.token_budget=1024",
        "trainer.log_every_n_steps=2",
        "trainer.validate_every_n_steps=3",
        "trainer.save_every_n_steps=100",
        f"+callbacks.recorder={{_target_: tests.recorder.Recorder, path: {folder / 'record.jsonl'}}}",
    ]


def record(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train_here(folder, cache_dir, *options(folder)) == 0
    return folder


@pytest.mark.parametrize(("workers", "stops"), [(0, [1, 4]), (2, [3, 5]), (0, [2, 6])])
def test_stopped_and_resumed_twice_equals_undisturbed(
    undisturbed: Path, cache_dir: Path, tmp_path: Path, workers: int, stops: list[int]
) -> None:
    number = f"num_workers={workers}"
    train_here(tmp_path, cache_dir, *options(tmp_path), number, f"stop_after_steps={stops[0]}")
    assert len(record(tmp_path)) == stops[0] * ACCUMULATE
    train_here(tmp_path, cache_dir, f"resume_from={tmp_path}", f"stop_after_steps={stops[1]}")
    train_here(tmp_path, cache_dir, f"resume_from={tmp_path}")

    # Next sample ids, anchors, losses and learning rates.
    assert record(tmp_path) == record(undisturbed)
    expected = weights(undisturbed)
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(tensor, expected[name]), name

    # TensorBoard: every step once, and what is not a matter of time with the same value.
    ours, theirs = scalars(tmp_path), scalars(undisturbed)
    for tag, points in theirs.items():
        steps = [step for step, _ in ours.get(tag, [])]
        assert len(steps) == len(set(steps)), f"{tag} has doubled steps: {steps}"
        if tag.startswith(("train/", "loss_by_length/", "padding/", "mixing/", "grad/", "data/")):
            assert ours[tag] == points, tag
        elif tag.startswith(("val", "acceptance_by_length/")):  # a stop adds a validation, and takes none away
            assert set(points) <= set(ours[tag]), tag


def test_a_packed_run_resumes_to_the_bit(cache_dir: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_here(whole, cache_dir, *options(whole), "sampler=packed", "stop_after_steps=4")
    train_here(parts, cache_dir, *options(parts), "sampler=packed", "stop_after_steps=3")
    train_here(parts, cache_dir, f"resume_from={parts}", "stop_after_steps=4")
    assert record(parts) == record(whole)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(parts).items())


def test_a_worse_drafter_never_takes_the_place_of_a_better_one(cache_dir: Path, tmp_path: Path) -> None:
    train_here(tmp_path, cache_dir, *options(tmp_path), "stop_after_steps=3")
    best = tmp_path / "checkpoints" / "best.ckpt"
    good = torch.load(best, weights_only=True)
    good["callbacks"]["BestCheckpoint"]["acceptance_length"] = 3.9  # as if step 3 had been far better than what follows
    torch.save(good, best)
    train_here(tmp_path, cache_dir, f"resume_from={tmp_path}")
    assert torch.load(best, weights_only=True)["global_step"] == 3


def test_resuming_a_finished_run_keeps_its_summary(undisturbed: Path, cache_dir: Path) -> None:
    before = json.loads((undisturbed / "summary.json").read_text())
    train_here(undisturbed, cache_dir, f"resume_from={undisturbed}")
    after = json.loads((undisturbed / "summary.json").read_text())
    assert after["validation"]["untrained"] == before["validation"]["untrained"]
    assert after["train"] == before["train"]
    assert (after["samples"], after["steps"]) == (before["samples"], before["steps"])


def test_a_run_that_died_after_its_checkpoint_shows_no_step_twice(
    undisturbed: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Killed at step 5 with a checkpoint of step 3: its events of steps 4 and 5 are there when the resume writes."""
    train_here(tmp_path, cache_dir, *options(tmp_path), "stop_after_steps=3", "trainer.log_every_n_steps=1")
    checkpoint = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()
    train_here(tmp_path, cache_dir, f"resume_from={tmp_path}", "stop_after_steps=5")
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(checkpoint)
    train_here(tmp_path, cache_dir, f"resume_from={tmp_path}")
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == list(range(1, STEPS + 1))


def test_what_would_change_the_training_cannot_be_overridden(undisturbed: Path, cache_dir: Path) -> None:
    for override in ("sampler=random", "batch.token_budget=512", "trainer.accumulate_grad_batches=1", "seed=3"):
        with pytest.raises(ValueError, match=rf"{override} cannot be combined with resume_from"):
            train_here(undisturbed, cache_dir, f"resume_from={undisturbed}", override)


def test_a_longer_horizon_may_be_set(cache_dir: Path, tmp_path: Path) -> None:
    train_here(tmp_path, cache_dir, *options(tmp_path), "stop_after_steps=2")
    train_here(tmp_path, cache_dir, f"resume_from={tmp_path}", "max_steps=9")
    assert len(record(tmp_path)) == 9 * ACCUMULATE


def test_changed_data_are_refused_with_what_changed(cache_dir: Path, tmp_path: Path) -> None:
    train_here(tmp_path, cache_dir, *options(tmp_path), "stop_after_steps=2")
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("token_budget: 1024", "token_budget: 1536"))
    with pytest.raises(ValueError, match=r"the plan of epoch 0 is not the one the checkpoint was made with"):
        train_here(tmp_path, cache_dir, f"resume_from={tmp_path}")


def test_a_folder_without_a_run_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume_from=.*found no config\.yaml"):
        train_here(tmp_path, cache_dir, f"resume_from={tmp_path}")


def test_init_from_takes_the_weights_and_nothing_else(undisturbed: Path, cache_dir: Path, tmp_path: Path) -> None:
    train_here(tmp_path, cache_dir, *options(tmp_path), f"init_from={undisturbed}", "stop_after_steps=1")
    first, again = record(tmp_path)[0], record(undisturbed)[0]
    assert first["samples"] == again["samples"], "the data start anew"
    assert float.fromhex(str(first["loss"])) != float.fromhex(str(again["loss"])), "the weights do not"
    with pytest.raises(ValueError, match=r"init_from=.*its drafter is another: layers\.1"):
        train_here(tmp_path, cache_dir, *options(tmp_path), f"init_from={undisturbed}", "drafter.num_layers=2")


def test_ranks_agree_on_a_signal_on_the_device_that_they_reduce_on(tmp_path: Path) -> None:
    """When fit ends, Lightning has moved the module elsewhere."""
    reduced = []

    def reduce(number: torch.Tensor, reduce_op: str) -> torch.Tensor:
        reduced.append((number.device, reduce_op))
        return torch.tensor(signal.SIGTERM)  # that another rank has received

    strategy = SimpleNamespace(root_device=torch.device("meta"), reduce=reduce)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn="fit"), world_size=2, global_step=1, strategy=strategy)
    with pytest.raises(RunInterruptedError, match="SIGTERM after optimizer step 1"):
        StopAndSave(tmp_path, 1).on_fit_end(trainer, None)  # type: ignore[arg-type]
    assert reduced == [(torch.device("meta"), "max")]
