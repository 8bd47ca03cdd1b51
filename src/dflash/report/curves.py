"""Curves of runs, from their TensorBoard event files."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path


def read_curves(run_folder: Path, tags: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) points of each of `tags` that the run has logged; nothing for a run without event files."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells that it runs without TensorFlow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    logged = set(events.Tags()["scalars"])
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags if tag in logged}


def short_names(runs: Sequence[Path]) -> list[str]:
    """The runs' paths without the folders that all of them share."""
    common = os.path.commonpath([run.absolute() for run in runs])
    return [os.path.relpath(run.absolute(), common) for run in runs]
