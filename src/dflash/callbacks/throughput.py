"""How fast training goes: over the latest steps, and since the pipeline filled."""

import time
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dflash import metric_names
from dflash.batch import Batch
from dflash.callbacks.interval import completes_interval, completes_step, log_metrics, sum_over_ranks
from dflash.checks import check_integer
from dflash.training.lightning_module import DFlashModule


class Throughput(Callback):
    """`throughput/*` per second of training; time for validation and decoding does not count, for checkpoints it does.

    Args:
        window_steps: the logged rates are over so many latest optimizer steps.
        warmup_steps: so many first steps (compilation, caches, queues filling) are left out of every rate.
    """

    def __init__(self, window_steps: int, warmup_steps: int) -> None:
        check_integer("callbacks.throughput.window_steps", window_steps, 1)
        check_integer("callbacks.throughput.warmup_steps", warmup_steps, 1)
        self.warmup_steps = warmup_steps
        # After each step: training seconds, and real tokens, padded tokens, anchors so far on this rank.
        self.marks: deque[tuple[float, torch.Tensor]] = deque(maxlen=window_steps + 1)
        self.start: tuple[float, torch.Tensor] | None = None
        self.counts = torch.zeros(3, dtype=torch.float64)
        self.steps_here = 0
        self._seconds_validating = 0.0
        self._validation_began = 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock again."""
        self._seconds_validating += time.perf_counter() - self._validation_began

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count the micro-batch; after a step, note the time."""
        self.counts += torch.tensor([batch.num_real_tokens, batch.num_padded_tokens, len(batch.anchors)]).double()
        if not completes_step(trainer, batch_idx):
            return
        self.steps_here += 1
        if self.steps_here < self.warmup_steps:
            return
        assert isinstance(pl_module, DFlashModule)
        seconds = time.perf_counter() - self._seconds_validating - pl_module.decoding_seconds
        mark = (seconds, self.counts.clone())
        self.start = self.start or mark
        self.marks.append(mark)
        if completes_interval(trainer) and len(self.marks) > 1:
            real, padded, anchors = self._rates(trainer, self.marks[0]).tolist()
            metrics = {
                metric_names.REAL_TOKENS_PER_S: real,
                metric_names.PADDED_TOKENS_PER_S: padded,
                metric_names.ANCHORS_PER_S: anchors,
            }
            log_metrics(trainer, pl_module, metrics)

    def since_warmup(self, trainer: Trainer) -> dict[str, float] | None:
        """Rates since the warm-up steps, and how many those were; None while there are no more than those."""
        if self.start is None or self.marks[-1] is self.start:
            return None
        real, padded, anchors = self._rates(trainer, self.start).tolist()
        return {
            "real_tokens_per_s": real,
            "padded_tokens_per_s": padded,
            "anchors_per_s": anchors,
            "warmup_steps_left_out": self.warmup_steps,
        }

    def _rates(self, trainer: Trainer, since: tuple[float, torch.Tensor]) -> torch.Tensor:
        seconds, counts = self.marks[-1]
        rates = (counts - since[1]) / (seconds - since[0])
        return sum_over_ranks(trainer, rates)
