"""Mistakes on the command line: one clear message, exit code 1, nothing heavy loaded, nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.config import CONF_DIR
from tests.commands import run_module

MISTAKES = [
    (
        "train sampler=bucketd",
        "sampler=bucketd is unknown. Allowed: bucketed, packed, random, sorted, windowed. Did you",
    ),
    (
        "train sampler.widht=2",
        "sampler.widht is unknown. Did you mean sampler.width? sampler has: boundaries, cost, num_buckets, ",
    ),
    ("train smapler=sorted", "smapler is unknown. Did you mean sampler? The configuration has: batch, "),
    ("train sampler=random sampler.width=2", "sampler.width is unknown."),
    ("train experiment=smoke target.nmae=x", "target.nmae is unknown. Did you mean target.name?"),
    (
        "train experiment=dmeo",
        "experiment=dmeo is unknown. Allowed: demo, demo_long, eight_gpus, paper_qwen3_8b, smoke. Did you mean",
    ),
    ("train +max_stepz=3", "max_stepz is unknown. Did you mean max_steps?"),
    ("train +trainer.devcies=2", "trainer.devcies is unknown. Did you mean trainer.devices?"),
    ("train sampler.width", "sampler.width: not understood. Write key=value"),
    ("train data=jsonl", "data.path is not given: add data.path=<value> to the command line."),
    ("train data.template_kwargs={a:1}", "data.template_kwargs: new keys are added one by one, +data.template_kwargs."),
    ("train resume_from=nowhere", "resume_from=nowhere: found no config.yaml there. Expected the folder of a run of"),
    ("prepare targett=tiny", "targett is unknown. Did you mean target?"),
    ("regenerate regenerate.tempreature=1", "regenerate.tempreature is unknown. Did you mean regenerate.temperature?"),
    ("evaluate target=smolm2", "target=smolm2 is unknown. Allowed: hf, smollm2, tiny. Did you mean target=smollm2?"),
    ("export +chekc=true", "chekc is unknown. Did you mean check?"),
]


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m dflash.<command> ...` where importing torch is a mistake of its own."""
    command, *overrides = arguments
    (cwd / "torch.py").write_text("raise SystemExit('torch was imported')")
    return subprocess.run(
        [sys.executable, "-m", f"dflash.{command}", *overrides],
        cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_ends_with_one_message(arguments: str, message: str, tmp_path: Path) -> None:
    result = run(*arguments.split(), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"Error: {message}"), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_argument_of_a_component_is_named_with_those_it_has(tmp_path: Path) -> None:
    # Only the component itself can tell, so this one is found where it is built.
    result = run_module("train", "+sampler.widht=2", cwd=tmp_path)
    assert result.returncode == 1
    has = "dflash.samplers.bucketed.BucketedSampler has: width, boundaries, num_buckets, cost."
    expected = f"sampler.widht is unknown. Did you mean width? {has}"
    assert result.stderr.strip() == f"Error: {expected}"
    (log,) = tmp_path.glob("outputs/train/*/*/train.log")
    assert "Traceback (most recent call last)" in log.read_text()
    assert expected in log.read_text()
    assert [path.name for path in log.parent.iterdir()] == ["train.log"]


def test_hydra_full_error_shows_the_traceback(tmp_path: Path) -> None:
    result = run("train", "sampler.widht=2", cwd=tmp_path, env={"HYDRA_FULL_ERROR": "1"})
    assert result.returncode == 1
    assert "Traceback (most recent call last)" in result.stderr


def test_a_right_command_line_passes(tmp_path: Path) -> None:
    added = ["+callbacks.mine=null", "+data.template_kwargs.enable_thinking=false"]
    result = run("train", "sampler=random", *added, cwd=tmp_path)
    assert "torch was imported" in result.stderr, result.stderr  # so it got as far as the work itself


def test_help_names_every_group_and_option_and_shows_command_lines(tmp_path: Path) -> None:
    result = run("train", "--help", cwd=tmp_path)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    for group in sorted(path.name for path in Path(CONF_DIR).iterdir() if path.is_dir()):
        (line,) = [line for line in lines if line.strip().startswith(f"{group} ")]
        options, _, description = line.strip().removeprefix(group).strip().partition("  ")
        assert sorted(options.split(" | ")) == sorted(path.stem for path in (Path(CONF_DIR) / group).glob("*.yaml"))
        assert description.strip()
    examples = [line.split() for line in lines if line.strip().startswith("python -m dflash.train ")]
    assert len(examples) == 5


def test_console_scripts_offer_completion(tmp_path: Path) -> None:
    result = run(
        "train", "-sc", "query=bash", cwd=tmp_path, env={"COMP_LINE": "dflash-train sampler=", "COMP_POINT": "21"}
    )
    assert result.stdout.split() == [
        f"sampler={name}" for name in ("bucketed", "packed", "random", "sorted", "windowed")
    ]
