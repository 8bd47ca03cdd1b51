"""The padding tax: tokens that are computed and belong to no sample."""

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import IntervalCallback
from dflash.training.objective import BlockOutcome


class Padding(IntervalCallback):
    """`padding/ratio`, padding tokens over computed tokens of the interval, and `padding/tokens`, their number."""

    num_sums = 2

    def measure(self, trainer: Trainer, batch: Batch, outcome: BlockOutcome | None) -> Tensor:
        """Real tokens, computed tokens."""
        return torch.tensor([batch.num_real_tokens, batch.num_padded_tokens])

    def metrics(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """Share and number of padding tokens."""
        real, padded = sums
        return {metric_names.PADDING_RATIO: (padded - real) / padded, metric_names.PADDING_TOKENS: padded - real}
