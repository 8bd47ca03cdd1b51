"""What a person sees while a run goes on: a progress bar in a terminal, plain lines elsewhere."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import completes_interval, completes_step
from dflash.training.lightning_module import DFlashModule

_SHOWN = {
    "epoch": (metric_names.DATA_EPOCH, "{:.2f}"),
    "loss": (metric_names.TRAIN_LOSS, "{:.3f}"),
    "acceptance": (metric_names.TRAIN_ACCEPTANCE_LENGTH, "{:.2f}"),
    "tokens/s": (metric_names.REAL_TOKENS_PER_S, "{:,.0f}"),
    "padding": (metric_names.PADDING_RATIO, "{:.1%}"),
}


def _latest(module: LightningModule) -> dict[str, str]:
    assert isinstance(module, DFlashModule)
    latest = module.latest_metrics
    return {label: form.format(latest[name]) for label, (name, form) in _SHOWN.items() if name in latest}


class StatusBar(TQDMProgressBar):
    """Lightning's progress bar with the latest metrics of the run."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands behind the bar."""
        return {"step": f"{trainer.global_step}/{trainer.max_steps}", **_latest(pl_module)}


class StatusLine(Callback):
    """A plain line at each logging interval and validation, where the output is no terminal."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Print the interval that has just been logged."""
        if trainer.is_global_zero and completes_step(trainer, batch_idx) and completes_interval(trainer):
            values = "  ".join(f"{label} {value}" for label, value in _latest(pl_module).items())
            print(f"step {trainer.global_step}/{trainer.max_steps}  {values}", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what validation found."""
        assert isinstance(pl_module, DFlashModule)
        metrics = pl_module.latest_metrics
        if trainer.is_global_zero and metric_names.VAL_ACCEPTANCE_LENGTH in metrics:
            print(
                f"step {trainer.global_step}/{trainer.max_steps}  validation: loss "
                f"{metrics[metric_names.VAL_LOSS]:.3f}  acceptance length "
                f"{metrics[metric_names.VAL_ACCEPTANCE_LENGTH]:.3f}",
                flush=True,
            )
