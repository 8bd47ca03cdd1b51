"""What a batch costs (group `cost`): one model for bucket boundaries, for dealing to ranks and for judging plans."""

from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash.checks import check_not_negative, check_positive

Number = TypeVar("Number", float, NDArray[np.float64])


@dataclass(frozen=True)
class CostModel:
    """Cost of a batch: target_per_token * tokens + target_per_token_squared * sum of squared lengths, for the target;
    drafter_per_anchor * anchors, for the drafter; per_batch and drafter_per_batch, whatever is in it.

    The unit is seconds where the model was fitted (`python -m dflash.plan profile=true`); elsewhere any unit will do,
    since samplers compare costs only.

    Attributes:
        target_per_token: the target's matrices.
        target_per_token_squared: the target's attention.
        drafter_per_anchor: a block of the drafter, forward, loss and backward.
        per_batch: what every pass of the target costs however little is in it.
        drafter_per_batch: likewise of the drafter, its optimizer's step included.

    Raises:
        ValueError: a number that is negative, or none.
    """

    target_per_token: float = 1.0
    target_per_token_squared: float = 2e-5
    drafter_per_anchor: float = 0.0
    per_batch: float = 0.0
    drafter_per_batch: float = 0.0

    def __post_init__(self) -> None:
        check_positive("cost.target_per_token", self.target_per_token)
        for key in ("target_per_token_squared", "drafter_per_anchor", "per_batch", "drafter_per_batch"):
            check_not_negative(f"cost.{key}", getattr(self, key))

    def __str__(self) -> str:
        """As overrides of a command line."""
        return " ".join(f"cost.{key}={value:.4g}" for key, value in asdict(self).items())

    def target(self, tokens: Number, squared_lengths: Number) -> Number:
        """Of one pass of the target.

        Args:
            tokens: computed, padding included.
            squared_lengths: sum of the squares of the (padded) lengths.
        """
        return self.target_per_token * tokens + self.target_per_token_squared * squared_lengths

    def sample(self, tokens: Number, anchors: Number) -> Number:
        """What one sample adds to a batch without padding."""
        return self.target(tokens, tokens**2) + self.drafter_per_anchor * anchors

    def batch(self, tokens: Number, squared_lengths: Number, anchors: Number) -> Number:
        """Of a whole batch."""
        return self.target(tokens, squared_lengths) + self.per_batch + self.drafter(anchors)

    def drafter(self, anchors: Number) -> Number:
        """Of one step of the drafter."""
        return self.drafter_per_anchor * anchors + self.drafter_per_batch
