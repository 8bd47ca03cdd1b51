"""Values that stick out of their recent past: spikes of the gradient norm and of the loss."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflash.checks import check_integer, check_positive

SKIP = ("non_finite", "all", "none")
# The standard deviation of a normal distribution over its median absolute deviation.
DEVIATION_PER_MAD = 1.4826
# The least deviation, as a share of the median: without noise the MAD is 0 and everything would stick out.
LEAST_DEVIATION = 0.02


@dataclass(frozen=True)
class SpikeOptions:
    """The config group `spikes`.

    Args:
        num_deviations: a spike lies more than so many robust deviations (1.4826 * MAD) above the median.
        window_steps: of so many latest values, spikes left out.
        min_steps: nothing finite is a spike before so many values are known.
        new_level_steps: after so many finite spikes in a row their level is the new normal, and the past is forgotten.
        skip: which spikes of the gradient cost the optimizer step: `non_finite` (which would destroy the weights),
            `all` or `none`.
    """

    num_deviations: float = 8.0
    window_steps: int = 100
    min_steps: int = 20
    new_level_steps: int = 20
    skip: str = "non_finite"

    def __post_init__(self) -> None:
        check_positive("spikes.num_deviations", self.num_deviations)
        check_integer("spikes.window_steps", self.window_steps, 2)
        check_integer("spikes.min_steps", self.min_steps, 2)
        check_integer("spikes.new_level_steps", self.new_level_steps, 1)
        if self.min_steps > self.window_steps:
            raise ValueError(
                f"spikes.min_steps={self.min_steps} is more than spikes.window_steps={self.window_steps}: so many "
                "values are never known."
            )
        if self.skip not in SKIP:
            raise ValueError(f"spikes.skip={self.skip!r} is unknown: choose one of {', '.join(SKIP)}.")


@dataclass(frozen=True)
class Judgement:
    """What a detector says of one value."""

    value: float
    threshold: float  # infinite while too little is known
    is_spike: bool


class SpikeDetector:
    """Rolling median and median absolute deviation (MAD) of the latest values that were no spikes.

    Robust on purpose: a mean and a standard deviation would be moved by the very values that they are to find.
    """

    def __init__(self, options: SpikeOptions) -> None:
        self.options = options
        self.window: deque[float] = deque(maxlen=options.window_steps)
        self.recent_spikes: list[float] = []  # finite ones in a row, up to now

    @property
    def threshold(self) -> float:
        """Above this the next value is a spike."""
        if len(self.window) < self.options.min_steps:
            return math.inf
        middle = median(self.window)
        deviation = DEVIATION_PER_MAD * median(abs(value - middle) for value in self.window)
        return middle + self.options.num_deviations * max(deviation, LEAST_DEVIATION * abs(middle))

    def judge(self, value: float) -> Judgement:
        """Judge the next value, and remember it if it is no spike."""
        threshold = self.threshold
        is_spike = not math.isfinite(value) or value > threshold
        if not is_spike:
            self.window.append(value)
            self.recent_spikes.clear()
        elif math.isfinite(value):
            self.recent_spikes.append(value)
            if len(self.recent_spikes) == self.options.new_level_steps:
                self.window.clear()
                self.window.extend(self.recent_spikes)
                self.recent_spikes.clear()
        return Judgement(value, threshold, is_spike)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next judgement depends on."""
        return {"window": list(self.window), "recent_spikes": list(self.recent_spikes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.window = deque(state["window"], maxlen=self.options.window_steps)
        self.recent_spikes = list(state["recent_spikes"])
