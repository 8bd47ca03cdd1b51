"""Small token datasets on disk, made by the package's own path from already tokenised rows."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash.data.conversations import JsonlFiles
from dflash.data.tokens import TokenDataset, build_token_datasets
from dflash.target.tiny import build_tiny_tokenizer


def random_rows(lengths: Sequence[int], seed: int = 0, vocab: int = 11) -> list[dict[str, list[int]]]:
    """Already tokenised rows of random ids; the second half of each is to be predicted."""
    random = np.random.default_rng(seed)
    return [
        {
            "input_ids": random.integers(0, vocab - 1, length).tolist(),
            "loss_mask": [int(t >= length // 2) for t in range(length)],
        }
        for length in lengths
    ]


def token_datasets(
    folder: Path, train: Sequence[dict[str, list[int]]], val: Sequence[dict[str, list[int]]]
) -> tuple[TokenDataset, TokenDataset]:
    """Training and validation samples, in the order of the rows."""
    for name, rows in (("train", train), ("val", val)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = JsonlFiles(path=str(folder / "train.jsonl"), val_path=str(folder / "val.jsonl"))
    return build_token_datasets(
        data, build_tiny_tokenizer(), vocab_size=104, mask_token_id=None, cache_dir=folder, report=lambda _: None
    )
