"""The embedded text: lengths as asked for, nothing missing between pieces, the same every time."""

import numpy as np
import pytest

from dflash.data.sized_text import SizedText
from dflash.data.tokens import build_token_datasets
from dflash.target.tiny import build_tiny_tokenizer


def texts(**options: int) -> list[str]:
    return [str(row["text"]) for _, row in SizedText(max_samples=300, **options).rows("train") if isinstance(row, dict)]


def test_pieces_follow_each_other_in_the_library() -> None:
    assert "".join(texts(seed=1))[:5000] == "".join(texts(seed=2))[:5000]


def test_more_pieces_are_asked_for_than_others_and_their_lengths_spread_as_asked() -> None:
    chars = np.array([len(text) for text in texts(median_tokens=100, shortest_tokens=10, longest_tokens=800)])
    assert chars.min() >= 10 * 3
    assert chars.max() <= 800 * 3.5
    logs = np.log(chars)
    # 300 draws: the median's error is below 0.07 in log, the deviation's below 0.04, three times that is allowed.
    assert abs(np.median(logs) - np.log(100 * 3.4)) < 0.21
    assert abs(logs.std() - 0.92) < 0.13


def test_it_becomes_a_token_dataset_with_both_sides(tmp_path) -> None:
    train, val = build_token_datasets(
        SizedText(max_samples=60, val_fraction=0.2),
        build_tiny_tokenizer(), vocab_size=104, mask_token_id=None, cache_dir=tmp_path, report=lambda _: None,
    )  # fmt: skip
    assert len(train) + len(val) == 60
    assert len(val) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_samples": None}, r"data\.max_samples=None: expected a whole number of 2 or more"),
        ({"max_samples": 9, "median_tokens": 4}, r"data\.median_tokens=4: expected a whole number of 5 or more"),
        ({"max_samples": 9, "log_sigma": 0}, r"data\.log_sigma=0: expected a number above 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SizedText(**options)  # type: ignore[arg-type]
