"""What decoding one prompt gave, and how long it took."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from dflash.checks import check_integer


@dataclass(frozen=True)
class DecodingOptions:
    """How a sequence is decoded.

    Args:
        stop_ids: tokens that end the text; the one that ended it is kept.
        max_new_tokens: limit of the text, the stop token included.
        temperature: 0 = greedy; above 0 the target's own distribution softmax(logits / temperature) is sampled.
        seed: of sampling.

    Raises:
        ValueError: a value out of range.
    """

    stop_ids: Collection[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        is_number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not is_number or not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature!r}: expected 0 (greedy) or a positive number.")


@dataclass
class Transcript:
    """The new tokens of one sequence, round by round. The first comes from the prefill and belongs to no round."""

    token_ids: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)  # tokens that each round added; stop or limit cut the last one
    matched: list[int] = field(default_factory=list)  # drafted tokens among them
    first_token_seconds: float = 0.0  # of the prefill, until the first token is known
    drafter_seconds: float = 0.0  # of the rounds, in the drafter's forwards, its LM head included
    target_seconds: float = 0.0  # of the rounds, in the target's forwards
    other_seconds: float = 0.0  # of the rounds, in everything else

    @property
    def num_rounds(self) -> int:
        """Forward passes of the target after the prefill."""
        return len(self.emitted)

    @property
    def seconds(self) -> float:
        """Of all rounds: everything after the first token."""
        return self.drafter_seconds + self.target_seconds + self.other_seconds

    def is_complete(self, options: DecodingOptions) -> bool:
        """Whether the text has reached its stop token or its limit."""
        return self.token_ids[-1] in options.stop_ids or len(self.token_ids) == options.max_new_tokens

    def add(self, tokens: list[int], num_drafted: int, options: DecodingOptions) -> None:
        """Append a round's tokens up to the stop token or the limit.

        Args:
            tokens: of the round.
            num_drafted: how many of them, from the first on, the drafter had right.
            options: when to stop.
        """
        kept = tokens[: options.max_new_tokens - len(self.token_ids)]
        stop = next((i for i, token in enumerate(kept) if token in options.stop_ids), len(kept))
        kept = kept[: stop + 1]
        self.token_ids += kept
        self.emitted.append(len(kept))
        self.matched.append(min(num_drafted, len(kept)))


class Stopwatch:
    """Seconds between two looks at it, the device's pending work included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = self._now()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self.last = self.last, self._now()
        return self.last - last

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
