"""Loss and acceptance length by length of the sample: who pays for the batching?"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import IntervalCallback, log_metrics
from dflash.training.by_length import NUM_LENGTH_BUCKETS, loss_by_length
from dflash.training.lightning_module import DFlashModule
from dflash.training.objective import BlockOutcome


class LengthBuckets(IntervalCallback):
    """`loss_by_length/*` in training; `val_loss_by_length/*` and `acceptance_by_length/*` (the walk) in validation.

    The buckets are powers of two, the same for every sampler, so that runs can be compared.
    """

    num_sums = 2 * NUM_LENGTH_BUCKETS

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show all buckets of a group in one chart, on TensorBoard's page of custom scalars."""
        groups = (metric_names.LOSS_BY_LENGTH, metric_names.VAL_LOSS_BY_LENGTH, metric_names.ACCEPTANCE_BY_LENGTH)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                charts = {group: ["Multiline", [f"^{group}/"]] for group in groups}
                logger.experiment.add_custom_scalars({"by length of the sample": charts})

    def measure(self, trainer: Trainer, batch: Batch, outcome: BlockOutcome | None) -> Tensor:
        """Weighted loss of every bucket, then weight of every bucket."""
        return torch.zeros(self.num_sums) if outcome is None else loss_by_length(batch, outcome).flatten()

    def metrics(self, trainer: Trainer, sums: list[float]) -> dict[str, float]:
        """The loss of each bucket that was seen."""
        return _ratios(metric_names.LOSS_BY_LENGTH, sums[:NUM_LENGTH_BUCKETS], sums[NUM_LENGTH_BUCKETS:])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module has summed over all ranks by now."""
        assert isinstance(pl_module, DFlashModule)
        loss, weight, tokens, rounds = pl_module.validation_totals.tolist()
        metrics = _ratios(metric_names.VAL_LOSS_BY_LENGTH, loss, weight)
        metrics |= _ratios(metric_names.ACCEPTANCE_BY_LENGTH, tokens, rounds)
        log_metrics(trainer, pl_module, metrics)


def _ratios(group: str, numerators: list[float], counts: list[float]) -> dict[str, float]:
    pairs = enumerate(zip(numerators, counts, strict=True))
    return {metric_names.by_length(group, bucket): total / count for bucket, (total, count) in pairs if count}
