"""Run the real training, in this process or as the command that a person types."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash.config import CONF_DIR, config_of_resumed_run
from dflash.train import run

SMALL = ["experiment=smoke", "data.max_samples=60", "regenerate.max_new_tokens=24", "trainer.num_threads=1"]


def train_here(folder: Path, cache_dir: Path, *overrides: str, start_from: list[str] = SMALL) -> int:
    """The body of `python -m dflash.train`, without the seconds that a new process takes."""
    overrides_list = [*start_from, f"cache_dir={cache_dir}", *overrides]
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    config = compose_config("train", *overrides_list)
    if config.resume_from:
        config = config_of_resumed_run(config, list(overrides))
    try:
        return run(config, folder)
    finally:
        torch.set_num_threads(threads)


def train_command(*overrides: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`python -m dflash.train ...` in `cwd`, its output captured."""
    return subprocess.Popen(
        [sys.executable, "-m", "dflash.train", *overrides],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def scalars(run_folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of a run's event files as TensorBoard would show them: tag -> [(step, value)]."""
    events = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    # Files are read in the order of their names, which end in a count of the process's files: .10 comes before .9. A
    # run has a file of its untrained validation and one of its training, often of the same second.
    return {
        tag: sorted([(e.step, e.value) for e in events.Scalars(tag)], key=lambda point: point[0])
        for tag in events.Tags()["scalars"]
    }


def run_module(command: str, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m dflash.<command> ...` in `cwd`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", f"dflash.{command}", *overrides], cwd=cwd, capture_output=True, text=True, timeout=500
    )


def compose_config(name: str, *overrides: str) -> DictConfig:
    """The configuration of a command line of `python -m dflash.<name>`."""
    with initialize_config_dir(CONF_DIR, version_base=None):
        return compose(name, list(overrides))
