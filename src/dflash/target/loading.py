"""Load a target and its tokenizer: from the hub or a folder, from a GGUF file in a package, or a tiny random one.

GGUF files are unpacked once into `<cache_dir>/targets` as an ordinary Hugging Face folder: dequantising SmolLM2-135M
takes half a minute, loading the unpacked weights a second.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dflash.checks import check_integer
from dflash.target.tiny import build_tiny_model, build_tiny_tokenizer, tiny_config

SOURCES = ("hub", "gguf_package", "tiny")


@dataclass(frozen=True)
class TargetOptions:
    """The config group `target`.

    Args:
        source: `hub` (hub name or local folder), `gguf_package` (a GGUF file inside an installed package) or `tiny`.
        name: hub name or folder; for the other sources a label.
        revision: hub revision, branch or commit.
        dtype: `auto` (bfloat16 where the device multiplies it fast, else float32) or a torch dtype's name.
        prefill_chunk: samples of more tokens are read so many at a time, which bounds the memory of activations; null:
            in one pass.
        mask_token_id: id of the mask token; null: the tokenizer's, else an unused vocabulary row.
        gguf_package: import name of the package that holds the file.
        gguf_file: file name inside the package.
        install_command: the command that installs the package, shown where it is missing.
    """

    source: str
    name: str
    revision: str | None = None
    dtype: str = "auto"
    prefill_chunk: int | None = None
    mask_token_id: int | None = None
    gguf_package: str | None = None
    gguf_file: str | None = None
    install_command: str | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"target.source={self.source!r} is unknown. Allowed: {', '.join(SOURCES)}.")
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"target.name={self.name!r}: expected a Hugging Face hub name or a folder, for example "
                "target.name=Qwen/Qwen3-8B."
            )

        if self.prefill_chunk is not None:
            check_integer("target.prefill_chunk", self.prefill_chunk, 1, ", or null")

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        """Identity of the weights and the tokenizer, and of the dtype they run in, for caches of what the target wrote.

        Weights files are identified by name, size and time of change: hashing them would take minutes on large models.
        """
        files = []
        folder = _gguf_folder(self) if self.source == "gguf_package" else Path(self.name)
        if self.source != "tiny" and folder.is_dir():
            wanted = [folder / str(self.gguf_file)] if self.source == "gguf_package" else sorted(folder.iterdir())
            files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in wanted if f.is_file()]
        identity = repr((self.source, self.name, self.revision, files, str(dtype) if dtype else None))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


def load_tokenizer(options: TargetOptions, cache_dir: str | Path) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ValueError: the target is not installed, not cached and not a folder.
    """
    if options.source == "tiny":
        return build_tiny_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(_pretrained_folder(options, cache_dir), revision=options.revision)
    except OSError as error:
        raise _not_found(options) from error


def load_config(options: TargetOptions, cache_dir: str | Path) -> PretrainedConfig:
    """The target's config.json, without its weights.

    Raises:
        ValueError: the target is not installed, not cached and not a folder.
    """
    if options.source == "tiny":
        return tiny_config()
    try:
        return AutoConfig.from_pretrained(_pretrained_folder(options, cache_dir), revision=options.revision)
    except OSError as error:
        raise _not_found(options) from error


def load_causal_lm(
    options: TargetOptions, cache_dir: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The target in eval mode, without gradients, on `device`.

    Raises:
        ValueError: the target is not installed, not cached and not a folder.
    """
    if options.source == "tiny":
        model: PreTrainedModel = build_tiny_model()
        model = model.to(dtype)  # type: ignore[arg-type]  # transformers wraps nn.Module.to and loses its overloads
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                _pretrained_folder(options, cache_dir), revision=options.revision, dtype=dtype
            )
        except OSError as error:
            raise _not_found(options) from error
    return model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]


def end_of_turn_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: chat models often name several in their generation config.

    Raises:
        ValueError: neither names one.
    """
    published = model.generation_config.eos_token_id
    published = published if isinstance(published, list) else [published]
    ends = list(dict.fromkeys(i for i in [tokenizer.eos_token_id, *published] if i is not None))
    if not ends:
        raise ValueError("The target names no end-of-turn token (eos_token_id) in its tokenizer or generation config.")
    return ends


def servable_name(options: TargetOptions, cache_dir: str | Path) -> str:
    """What a server is told to load: the hub name or folder, or the folder with the unpacked weights.

    The tiny target lies nowhere: its label stands for where a user would save it.
    """
    return options.name if options.source == "tiny" else str(_pretrained_folder(options, cache_dir))


def _pretrained_folder(options: TargetOptions, cache_dir: str | Path) -> str:
    """What `from_pretrained` takes: the hub name or folder itself, or the folder a GGUF file was unpacked into."""
    return options.name if options.source == "hub" else str(_unpack_gguf(options, Path(cache_dir)))


def _not_found(options: TargetOptions) -> ValueError:
    return ValueError(
        f"target.name={options.name!r} (revision {options.revision or 'default'}) is neither a folder with a model nor "
        "a hub model that is cached or can be downloaded from here. Check the name, or download it where there is "
        f"internet with `hf download {options.name}`."
    )


def _gguf_folder(options: TargetOptions) -> Path:
    # find_spec does not import: the package's own code needs llama-cpp-python, which nobody needs here.
    spec = importlib.util.find_spec(str(options.gguf_package))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"target.name={options.name} comes in the Python package {options.gguf_package}, which is not installed. "
            f"Install it with: {options.install_command}"
        )
    return Path(spec.submodule_search_locations[0])


def _unpack_gguf(options: TargetOptions, cache_dir: Path) -> Path:
    folder = cache_dir / "targets" / f"{options.name}-{options.fingerprint()}"
    if folder.is_dir():
        return folder
    print(f"Unpacking {options.gguf_file} into {folder} (once, about half a minute) ...", flush=True)
    source = str(_gguf_folder(options))
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=options.gguf_file)
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=options.gguf_file, dtype=torch.float32)
    # What is saved are plain float32 weights: a reader must not take them for a quantised model.
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder that bears the final name is complete: written aside, then renamed.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        os.replace(partial, folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # else another process was faster, and its copy is as good
            raise
    return folder
