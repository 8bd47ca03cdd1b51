"""Text of chosen lengths, without an LLM to write it (`data=sized_text`): for measuring speed, and for first tries.

The running Python's own library, function after function, cut into pieces whose lengths are lognormal as those of real
conversations are. All of a piece is supervised. A drafter trained on it learns to continue source code, which is no
substitute for the target's own answers.
"""

import itertools
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash.checks import check_integer, check_positive
from dflash.data.conversations import DataOptions, RawRow
from dflash.data.stdlib_chat import read_functions
from dflash.lengths import lognormal_lengths

CHARS_PER_TOKEN = 3.4  # of Python source under SmolLM2's tokenizer; others differ by a tenth or two


@dataclass(frozen=True, kw_only=True)
class SizedText(DataOptions):
    """The embedded text in pieces: `data=sized_text`.

    Attributes:
        max_samples: how many pieces.
        seed: of their lengths.
        median_tokens: of the lengths, about.
        log_sigma: standard deviation of their logarithm.
        shortest_tokens: no piece is shorter, about.
        longest_tokens: no piece is longer, about; `max_length_tokens` cuts exactly.
    """

    seed: int = 0
    median_tokens: int = 55
    log_sigma: float = 0.95
    shortest_tokens: int = 5
    longest_tokens: int = 410

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("data.max_samples", self.max_samples, 2)
        check_integer("data.seed", self.seed, 0)
        check_integer("data.shortest_tokens", self.shortest_tokens, 3)
        check_integer("data.median_tokens", self.median_tokens, self.shortest_tokens)
        check_integer("data.longest_tokens", self.longest_tokens, self.median_tokens)
        check_positive("data.log_sigma", self.log_sigma)

    @property
    def has_val_source(self) -> bool:
        """Never: pieces are split by number."""
        return False

    def rows(self, split: str) -> Iterator[tuple[str, RawRow]]:
        """The pieces, one after the other through the library's functions, from its beginning again at its end."""
        assert self.max_samples is not None
        lengths = lognormal_lengths(
            self.max_samples,
            median_tokens=self.median_tokens,
            log_sigma=self.log_sigma,
            shortest_tokens=self.shortest_tokens,
            longest_tokens=self.longest_tokens,
            seed=self.seed,
        )
        code = itertools.cycle(f.code for f in read_functions(Path(sysconfig.get_path("stdlib"))))
        rest = ""
        for number, length in enumerate(lengths.tolist()):
            num_chars = round(length * CHARS_PER_TOKEN)
            while len(rest) < num_chars:
                rest += next(code) + "\n\n"
            # Neighbours share a function now and then: four of them are on one side of the split.
            yield f"sized_text:{number}", {"text": rest[:num_chars], "group": str(number // 4)}
            rest = rest[num_chars:]

    def fingerprint(self, split: str) -> list[str]:
        """The Python whose library it is, and the options of the pieces."""
        options = (self.max_samples, self.seed, self.median_tokens, self.log_sigma)
        return [sys.version, str((*options, self.shortest_tokens, self.longest_tokens, CHARS_PER_TOKEN))]
