"""`python -m dflash.train -m ...`: a table with a row for every job, failed ones too."""

import csv
import subprocess
import weakref
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf

from dflash.report.sweep import SweepTable, swept_keys
from tests.commands import SMALL, run_module

FAST = [*SMALL, "max_steps=2", "validate_untrained=false", "callbacks.decoding=null", "data.max_samples=30"]


def sweep(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_module("train", "-m", *FAST, *overrides, cwd=cwd)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    cwd = tmp_path_factory.mktemp("sweep")
    result = sweep(cwd, "sampler=bucketed", "sampler.width=1.1,0.5,1.5")
    (table,) = cwd.glob("outputs/train/*/*/sweep.csv")
    return table, result


def test_every_job_has_its_row_and_a_failed_one_its_reason(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    table, result = swept
    rows = list(csv.DictReader(table.open()))
    assert [(row["job"], row["sampler.width"], row["status"]) for row in rows] == [
        ("0", "1.1", "completed"), ("1", "0.5", "failed"), ("2", "1.5", "completed"),
    ]  # fmt: skip
    assert "sampler.width=0.5" in rows[1]["reason"]
    for row in (rows[0], rows[2]):
        assert float(row["val_loss"]) > 0
        assert float(row["val_acceptance_length"]) >= 1
        assert 0 <= float(row["padding_ratio"]) < 1
        assert row["steps"] == "2"
        assert (Path(table.parents[4]) / row["folder"] / "summary.json").is_file() or Path(row["folder"]).is_dir()
    assert "sampler" not in rows[0], "what is the same in every job is no column"
    assert (table.parent / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert result.returncode == 1, "a sweep with a failed job is no success"
    assert "Error: sampler.width=0.5" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_sweep_over_several_ranks_is_refused(tmp_path: Path) -> None:
    result = sweep(tmp_path, "trainer.devices=2", "seed=0,1")
    assert result.returncode == 1
    assert "-m runs its jobs in one process, and trainer.devices=2" in result.stderr
    (table,) = tmp_path.glob("outputs/train/*/*/sweep.csv")
    assert [row["status"] for row in csv.DictReader(table.open())] == ["failed", "failed"]


def test_what_a_failed_job_held_is_freed_before_the_next_one(tmp_path: Path) -> None:
    class Target:
        pass

    held: list[weakref.ref[Target]] = []

    def job() -> None:
        target = Target()
        held.append(weakref.ref(target))
        raise ValueError("no")

    job_return = JobReturn(status=JobStatus.FAILED)
    try:
        job()
    except ValueError as error:
        job_return.return_value = error
    (tmp_path / "0").mkdir()
    hydra = {"mode": "MULTIRUN", "job": {"num": 0}, "overrides": {"task": ["a=1"]}, "sweep": {"dir": str(tmp_path)}}
    config = OmegaConf.create({"hydra": {**hydra, "runtime": {"output_dir": str(tmp_path / "0")}}})
    config.hydra.mode = RunMode.MULTIRUN
    assert held[0]() is not None
    SweepTable().on_job_end(config, job_return)
    assert held[0]() is None
    (row,) = csv.DictReader((tmp_path / "sweep.csv").open())
    assert row["reason"] == "no"


def test_swept_keys_are_those_that_differ() -> None:
    rows = [{"overrides": {"a": "1", "b": "x", "c": "2"}}, {"overrides": {"a": "1", "b": "y"}}]
    assert swept_keys(rows) == ["b", "c"]
    assert swept_keys(rows[:1]) == ["a", "b", "c"]


def test_a_sweep_over_two_samplers_goes_by_experiments(tmp_path: Path) -> None:
    small = [option for option in FAST if not option.startswith("experiment=")]
    samplers = "experiment=[smoke,sampler/optimal],[smoke,sampler/windowed]"
    result = run_module("train", "-m", *small, samplers, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (table,) = tmp_path.glob("outputs/train/*/*/sweep.csv")
    rows = list(csv.DictReader(table.open()))
    assert [row["status"] for row in rows] == ["completed", "completed"]
    assert all(float(row["padding_ratio"]) >= 0 for row in rows)
    assert (table.parent / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_joblib_launcher_runs_jobs_side_by_side_into_one_table(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    result = sweep(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1")
    assert result.returncode == 0, result.stderr
    (table,) = tmp_path.glob("outputs/train/*/*/sweep.csv")
    assert [(row["seed"], row["status"]) for row in csv.DictReader(table.open())] == [
        ("0", "completed"), ("1", "completed"),
    ]  # fmt: skip


def test_the_submitit_launcher_composes(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=8", "hydra.launcher.partition=long"]
    result = run_module("train", *FAST, *launcher, "--cfg", "hydra", "-p", "hydra.launcher", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "SlurmLauncher" in result.stdout
    assert "gpus_per_node: 8" in result.stdout
    assert "partition: long" in result.stdout
