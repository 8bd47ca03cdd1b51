"""Weights of a drafter from a checkpoint of training."""

from pathlib import Path
from typing import Any

import torch

from dflash.drafter.network import DFlashDrafter

_PREFIX = "drafter."  # of the drafter within the Lightning module's state dict


def find_checkpoint(path: str | Path, key: str) -> Path:
    """The checkpoint file that a run folder or a path names.

    Args:
        path: a run folder (its `checkpoints/last.ckpt` is meant) or a .ckpt file.
        key: config key the path comes from, for the error.

    Raises:
        ValueError: there is none.
    """
    path = Path(path)
    checkpoint = path / "checkpoints" / "last.ckpt" if path.is_dir() else path
    if not checkpoint.is_file():
        raise ValueError(
            f"{key}={path}: found no checkpoint at {checkpoint}. Expected a run folder that holds "
            "checkpoints/last.ckpt, or a .ckpt file."
        )
    return checkpoint


def init_drafter_from(drafter: DFlashDrafter, path: str | Path) -> None:
    """Load the weights of another run's drafter; strict on names and shapes.

    Raises:
        ValueError: there is no checkpoint, or it is of a drafter of another shape.
    """
    checkpoint = find_checkpoint(path, "init_from")
    state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}
    own = drafter.state_dict()
    problems = [f"{name} is missing" for name in own.keys() - weights.keys()]
    problems += [f"{name} is not of this drafter" for name in weights.keys() - own.keys()]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, this drafter's has {tuple(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if problems:
        raise ValueError(
            f"init_from={path}: its drafter has another shape: {'; '.join(sorted(problems)[:5])}"
            f"{' ...' if len(problems) > 5 else ''}. Give this run the drafter.* and target.* of that one."
        )
    drafter.load_state_dict(weights)
