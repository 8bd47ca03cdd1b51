"""A trained drafter from wherever it lies: a run folder, a checkpoint of training, or the published layout."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, Qwen3Config

from dflash.config import BEST_CHECKPOINT, LAST_CHECKPOINT, RUN_CONFIG
from dflash.drafter.network import DFlashDrafter
from dflash.drafter.published import read_published, shape_problems

_CHECKPOINTS_AT_A_TIME = 3
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
    checkpoint = path / LAST_CHECKPOINT if path.is_dir() else path
    if not checkpoint.is_file():
        raise ValueError(
            f"{key}={path}: found no checkpoint at {checkpoint}. Expected a run folder that holds {LAST_CHECKPOINT}, "
            "or a .ckpt file."
        )
    return checkpoint


def check_disk_space(run_folder: Path, num_parameters: int) -> None:
    """Refuse a training whose checkpoints would not fit on the disk.

    Args:
        run_folder: they are written below it.
        num_parameters: of the drafter.

    Raises:
        ValueError: naming the folder, what is free and what is needed.
    """
    # float32 weights and AdamW's two moments; the last and the best one, and the one that is being written.
    there = sum((run_folder / name).is_file() for name in (LAST_CHECKPOINT, BEST_CHECKPOINT))
    needed = (_CHECKPOINTS_AT_A_TIME - there) * 3 * 4 * num_parameters
    free = shutil.disk_usage(run_folder).free
    if free < needed:
        raise ValueError(
            f"{run_folder}: {free / 2**30:.2f} GiB are free on this disk, and the checkpoints of a drafter of "
            f"{num_parameters / 1e6:,.1f}M parameters take {needed / 2**30:.2f} GiB. Make room, or write the run "
            "elsewhere with hydra.run.dir=<folder>."
        )


def is_training_checkpoint(name: str | Path) -> bool:
    """Whether `name` is a run folder or a .ckpt file, and not a drafter in the published layout."""
    path = Path(name)
    return path.suffix == ".ckpt" or (path / "checkpoints").is_dir() or (path / RUN_CONFIG).is_file()


def load_drafter(name: str | Path, key: str) -> DFlashDrafter:
    """A trained drafter on the CPU; its config comes with it.

    Args:
        name: a run folder, a .ckpt file, a folder in the published layout, or the hub name of one.
        key: config key the name comes from, for errors.

    Raises:
        ValueError: there is none, or what is there is not exactly a drafter.
    """
    if not is_training_checkpoint(name):
        return read_published(name, key)
    checkpoint = find_checkpoint(name, key)
    content: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    if "drafter_config" not in content:
        raise ValueError(f"{key}={name}: {checkpoint} is no checkpoint of dflash.train: it holds no drafter_config.")
    drafter = DFlashDrafter(Qwen3Config.from_dict(content["drafter_config"]))
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in content["state_dict"].items()}
    if problems := shape_problems(drafter.state_dict(), weights):
        raise ValueError(f"{key}={name}: {checkpoint} is damaged: {problems}.")
    drafter.load_state_dict(weights)
    return drafter


def init_drafter_from(drafter: DFlashDrafter, name: str | Path) -> None:
    """Load the weights of another drafter, which must be of the same shape and compute the same from them.

    The block size may differ: it is a matter of training.

    Raises:
        ValueError: there is none, or it is another kind of drafter; the message says in what.
    """
    source = load_drafter(name, "init_from")
    theirs, ours = _meaning(source), _meaning(drafter)
    differences = [
        f"{field}={theirs[field]} there, {ours[field]} here" for field in ours if theirs[field] != ours[field]
    ]
    problems = shape_problems(drafter.state_dict(), source.state_dict())
    if differences or problems:
        raise ValueError(
            f"init_from={name}: its drafter is another: {'; '.join(filter(None, [*differences, problems]))}. Give this "
            "run the drafter.* and target.* of that one."
        )
    drafter.load_state_dict(source.state_dict())


def check_target(drafter: DFlashDrafter, target: PretrainedConfig, where: str, target_name: str) -> None:
    """Refuse a drafter that was trained for another target.

    Args:
        drafter: the drafter.
        target: config of the target.
        where: names the drafter, for the error.
        target_name: names the target, for the error.

    Raises:
        ValueError: the target has another width, depth or vocabulary.
    """
    target = target.get_text_config()
    differences = [
        f"{name} {ours} in the drafter's, {theirs} here"
        for name, ours, theirs in (
            ("layers", drafter.config.num_target_layers, target.num_hidden_layers),
            ("hidden_size", drafter.config.hidden_size, target.hidden_size),
            ("vocab_size", drafter.config.vocab_size, target.vocab_size),
        )
        if ours != theirs
    ]
    if differences:
        raise ValueError(f"{where} was trained for another target than {target_name}: {'; '.join(differences)}.")


def _meaning(drafter: DFlashDrafter) -> dict[str, Any]:
    """What the shapes of the weights do not tell of how they are used."""
    config = drafter.config
    rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
    return {
        "rope_theta": rope["rope_theta"],
        "target_layer_ids": drafter.target_layer_ids,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": drafter.mask_token_id,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
    }
