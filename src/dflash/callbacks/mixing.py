"""How well lengths mix inside optimizer steps, as training meets them."""

from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import completes_interval, completes_step, log_metrics, sum_over_ranks
from dflash.mixing import StepLengths


class Mixing(Callback):
    """`mixing/eta2_ratio` over the interval's steps: 1 is as mixed as chance, more is worse (see `dflash.mixing`).

    Attributes:
        run: the same sums over the whole run, for the summary.
    """

    def __init__(self) -> None:
        self.run = StepLengths()
        self._steps: list[Tensor] = []  # of the unfinished interval, each [3]: samples, sum and squares of ln(length)
        self._step = torch.zeros(3, dtype=torch.float64)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Add the micro-batch; at the interval's end log and start anew."""
        logs = batch.lengths.double().log()
        self._step += torch.stack([torch.tensor(float(len(logs))), logs.sum().cpu(), logs.square().sum().cpu()])
        if not completes_step(trainer, batch_idx):
            return
        self._steps.append(self._step.clone())
        self._step.zero_()
        if completes_interval(trainer):
            interval = StepLengths()
            for step in self._over_all_ranks(trainer):
                interval.add_step(*step)
                self.run.add_step(*step)
            self._steps = []
            if (ratio := interval.eta2_ratio) is not None:
                log_metrics(trainer, pl_module, {metric_names.ETA2_RATIO: ratio})

    def _over_all_ranks(self, trainer: Trainer) -> list[list[float]]:
        # Once an interval: a step is made of all ranks' batches, but nobody has to wait for them at every one.
        return sum_over_ranks(trainer, torch.stack(self._steps)).tolist() if self._steps else []

    def over_run(self, trainer: Trainer) -> float | None:
        """`eta2_ratio` of all steps so far. All ranks must call it."""
        whole = StepLengths(**asdict(self.run))
        for step in self._over_all_ranks(trainer):
            whole.add_step(*step)
        return whole.eta2_ratio

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the run's sums and the unfinished interval, over all ranks: only rank 0 writes."""
        checkpoint["mixing"] = {"run": asdict(self.run), "interval": self._over_all_ranks(trainer)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on from them; the interval's steps on rank 0 alone, the other ranks add nothing to them."""
        if state := checkpoint.get("mixing"):
            self.run = StepLengths(**state["run"])
            share = 1.0 if trainer.is_global_zero else 0.0
            self._steps = [torch.tensor(step, dtype=torch.float64) * share for step in state["interval"]]
