"""What one batch may hold, whatever the sampler (config group `batch`, conf/batch/default.yaml)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.checks import check_integer

IntArray = NDArray[np.int64]

TOO_LONG = ("error", "drop", "truncate", "alone")


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold (config group `batch`); the same for every sampler.

    Attributes:
        token_budget: bounds (longest sample of the batch, rounded up to `pad_multiple`) * (number of samples); in
            packed rows, the sum of the lengths, rounded up.
        pad_multiple: a batch's padded length is a multiple of this.
        anchors_per_sample: at most so many anchors are drawn from one sample.
        anchor_budget: bounds the anchors of a batch, None for no bound.
        max_samples: bounds the samples of a batch, None for no bound.
        too_long: what happens to a sample whose padded length alone exceeds `token_budget`: `error` stops, `drop`
            leaves it out (counted), `truncate` cuts it to `max_length` (counted), `alone` gives it a batch of its own,
            which then exceeds the budget.
        probe_first: the most expensive batch is the first of epoch 0, so that running out of memory shows at once.

    Raises:
        ValueError: a value of the wrong type or range, or budgets that no batch can meet.
    """

    token_budget: int
    pad_multiple: int
    anchors_per_sample: int
    anchor_budget: int | None = None
    max_samples: int | None = None
    too_long: str = "error"
    probe_first: bool = True

    def __post_init__(self) -> None:
        for key in ("token_budget", "pad_multiple", "anchors_per_sample"):
            check_integer(f"batch.{key}", getattr(self, key), minimum=1)
        for key in ("anchor_budget", "max_samples"):
            if getattr(self, key) is not None:
                check_integer(f"batch.{key}", getattr(self, key), minimum=1, otherwise=", or null for no bound")
        if self.too_long not in TOO_LONG:
            raise ValueError(f"batch.too_long={self.too_long!r} is unknown: choose one of {', '.join(TOO_LONG)}.")
        if not isinstance(self.probe_first, bool):
            raise ValueError(f"batch.probe_first={self.probe_first!r} must be true or false.")
        if self.token_budget < self.pad_multiple:
            raise ValueError(
                f"batch.token_budget={self.token_budget} is smaller than batch.pad_multiple={self.pad_multiple}: every "
                "sample is padded to at least batch.pad_multiple tokens, so no batch fits. Raise batch.token_budget or "
                "lower batch.pad_multiple."
            )
        if self.anchor_budget is not None and self.anchors_per_sample > self.anchor_budget:
            raise ValueError(
                f"batch.anchors_per_sample={self.anchors_per_sample} is more than batch.anchor_budget="
                f"{self.anchor_budget}: one sample could exceed the anchors of a whole batch. Lower "
                "batch.anchors_per_sample, raise batch.anchor_budget, or set batch.anchor_budget=null."
            )

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample that fits: the largest multiple of `pad_multiple` within `token_budget`."""
        return self.token_budget // self.pad_multiple * self.pad_multiple

    def planned_lengths(self, lengths: IntArray) -> IntArray:
        """Tokens of each sample that training sees, any shape: cut to `max_length` under `too_long=truncate`.

        Collate cuts samples to exactly this, so that the plan's budgets hold.
        """
        return np.minimum(lengths, self.max_length) if self.too_long == "truncate" else lengths

    def padded_lengths(self, lengths: IntArray) -> IntArray:
        """`lengths`, any shape, rounded up to `pad_multiple`."""
        return -(-lengths // self.pad_multiple) * self.pad_multiple

    def longest_row(self, lengths: IntArray) -> int:
        """Tokens of the longest padded row that samples of these lengths come to."""
        padded = self.padded_lengths(self.planned_lengths(lengths))
        kept = padded[padded <= self.token_budget] if self.too_long == "drop" else padded
        return int(kept.max(initial=0))

    def planned_anchors(self, num_anchorable: IntArray) -> IntArray:
        """The most anchors each sample can bring, any shape.

        Counted before truncation: a truncated sample may have fewer valid anchors left, so that this bound, and with it
        `anchor_budget`, still holds.
        """
        return np.minimum(num_anchorable, self.anchors_per_sample)
