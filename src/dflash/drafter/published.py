"""The published layout of a drafter: a folder with `config.json` and safetensors, as inference servers load it.

Strict both ways: a folder is written or read only if it holds exactly the tensors of its config, each of the right
shape, and only features that this drafter has. Nothing inside is ever executed or unpickled.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.checks import check_new_folder
from dflash.drafter.network import DFlashDrafter
from dflash.drafter.published_config import checked_config, published_config, seal

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
SEAL = "dflash"  # metadata of the weights file, see `published_config.seal`
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def write_published(drafter: DFlashDrafter, folder: Path, dtype: torch.dtype) -> None:
    """Write a drafter in the published layout, as a whole or not at all.

    Args:
        drafter: whose weights are rounded to `dtype`.
        folder: must not exist yet.
        dtype: of the weights on disk.

    Raises:
        ValueError: the folder exists.
    """
    check_new_folder("out", folder)
    config = published_config(drafter.config, dtype)
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(weights, partial / WEIGHTS_NAME, {"format": "pt", SEAL: json.dumps(seal(config))})
        # Both are made for their owner alone, and servers often run as another user.
        partial.chmod(0o755)
        (partial / WEIGHTS_NAME).chmod(0o644)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_published(name: str | Path, key: str) -> DFlashDrafter:
    """A drafter from a published folder or hub repository, its parameters in the dtype they are stored in.

    Args:
        name: folder, or hub name with an optional revision, `owner/name@revision`.
        key: config key the name comes from, for errors.

    Raises:
        ValueError: it is not there, holds a pickle, or is not exactly such a drafter; the message lists what is wrong.
    """
    folder = _local_folder(str(name), key)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise ValueError(
            f"{key}={name} holds {', '.join(pickles)}: a pickle can run code when it is loaded, so such a folder is "
            "not read. Expected config.json and .safetensors files alone."
        )
    values = _read_config(folder / CONFIG_NAME, key)
    config = checked_config(values, f"{key}={name}: {CONFIG_NAME}")
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    weights = _read_weights(folder, values, f"{key}={name}")
    problems = shape_problems(drafter.state_dict(), weights)
    if problems:
        raise ValueError(f"{key}={name}: its tensors are not those of its {CONFIG_NAME}: {problems}.")
    drafter.load_state_dict(weights, assign=True)
    return drafter


def shape_problems(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """What is missing, too many or of another shape, in words; empty if nothing is."""
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} does not belong here" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected.keys() & found.keys()
        if expected[name].shape != found[name].shape
    ]
    return "; ".join(sorted(problems)[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")


def _local_folder(name: str, key: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    repository, _, revision = name.partition("@")
    try:
        wanted = [CONFIG_NAME, "*.safetensors"]
        return Path(str(snapshot_download(repository, revision=revision or None, allow_patterns=wanted)))
    except (HFValidationError, OSError) as error:
        raise ValueError(
            f"{key}={name} is neither a run folder, a .ckpt file or a folder with a drafter, nor a hub drafter that is "
            "cached or can be downloaded from here. Check the name, or download it where there is internet with "
            f"`hf download {repository}`."
        ) from error


def _read_config(path: Path, key: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{key}={path.parent}: found no {CONFIG_NAME} there. Expected a run folder (with checkpoints/last.ckpt), a "
            ".ckpt file, or a drafter in the published layout."
        ) from None
    except ValueError as error:
        raise ValueError(f"{key}={path.parent}: {CONFIG_NAME} is no JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{key}={path.parent}: {CONFIG_NAME} is no JSON object.")
    return values


def _read_weights(folder: Path, config: dict[str, Any], where: str) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{where}: found no .safetensors file beside {CONFIG_NAME}.")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                sealed = (tensors.metadata() or {}).get(SEAL)
                names = tensors.keys()  # it is no mapping: iterating over the file itself is an error
                new = {name: tensors.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(f"{where}: {file.name} is damaged: {error}.") from error
        if sealed is not None and json.loads(sealed) != seal(config):
            raise ValueError(
                f"{where}: {CONFIG_NAME} does not say what the weights were trained with. It says {seal(config)}, "
                f"{file.name} says {sealed}. Export the drafter again."
            )
        if doubled := new.keys() & weights.keys():
            raise ValueError(f"{where}: {', '.join(sorted(doubled))} is in more than one file.")
        weights |= new
    dtypes = {str(tensor.dtype) for tensor in weights.values() if not tensor.is_floating_point()}
    if dtypes:
        raise ValueError(f"{where}: expected floating-point tensors, found {', '.join(sorted(dtypes))}.")
    return weights
