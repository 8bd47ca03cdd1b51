"""`checkpoints/last.ckpt`: when it is written, and how a run ends early without losing anything."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dflash.batch import Batch
from dflash.callbacks.interval import completes_step
from dflash.config import LAST_CHECKPOINT


class RunInterruptedError(Exception):
    """A signal ended the run at a step boundary, its checkpoint saved."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(signal_number).name} after optimizer step {step}")
        self.exit_code = 128 + signal_number


class StopAndSave(Checkpoint):  # Lightning runs Checkpoint callbacks last, when all others have noted the step
    """Saves the run's state, only at step boundaries: inside an accumulation window it could not resume exactly.

    It saves every `every_n_steps` optimizer steps, before each validation, at the end, and when the first SIGTERM or
    Ctrl-C has let the current step finish. A second signal ends the process at once and saves nothing.

    Args:
        run_folder: `checkpoints/last.ckpt` is written there.
        every_n_steps: optimizer steps between two saves.
        stop_after_steps: end the run after so many optimizer steps; the schedule's horizon stays what it is.
    """

    def __init__(self, run_folder: str | Path, every_n_steps: int, stop_after_steps: int | None = None) -> None:
        self.path = Path(run_folder) / LAST_CHECKPOINT
        self.every_n_steps = every_n_steps
        self.stop_after_steps = stop_after_steps
        self.received_signal: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals from Lightning, whose own handling of SIGTERM stops inside the accumulation window.

        In no earlier hook: Lightning registers its handlers after `on_fit_start`, and would call ours beside its own.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous_handlers[number] = signal.signal(number, self._note_signal)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self._previous_handlers.items():
            if signal.getsignal(number) == self._note_signal:  # Lightning has given back those of its own run already
                signal.signal(number, handler)
        self._previous_handlers = {}

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received_signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received_signal = number
        # os.write and not print: a handler that interrupts another print must not enter the same buffer.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: finishing the optimizer step, then saving. Once more ends at once.\n".encode())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """At a step boundary: save if it is time to, then end the run if it is time to."""
        if not completes_step(trainer, batch_idx):
            return
        step = trainer.global_step
        signal_number = self._signal_on_any_rank(trainer)
        finished = step >= min(trainer.max_steps, self.stop_after_steps or trainer.max_steps)
        # Before a validation too: it can take long, and a signal in the middle of it ends the run without a save.
        assert trainer.val_check_batch is not None
        validation_next = (batch_idx + 1) % trainer.val_check_batch == 0
        if signal_number or finished or validation_next or step % self.every_n_steps == 0:
            trainer.save_checkpoint(self.path, weights_only=False)
        if signal_number:
            raise RunInterruptedError(signal_number, step)
        if finished:
            trainer.should_stop = True  # makes Lightning validate once more, then end

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """The state was saved before the validation began: end at once.

        Not with several ranks: they have different numbers of validation batches, and must end together.
        """
        if trainer.world_size == 1:
            self._end_if_signalled(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Several ranks end here, together."""
        self._end_if_signalled(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A signal came behind the last validation: nothing is lost, and the exit code tells of it all the same."""
        self._end_if_signalled(trainer)

    def _end_if_signalled(self, trainer: Trainer) -> None:
        if trainer.state.fn == "fit" and (signal_number := self._signal_on_any_rank(trainer)):
            raise RunInterruptedError(signal_number, trainer.global_step)

    def _signal_on_any_rank(self, trainer: Trainer) -> int:
        # Ranks must agree, or those without the signal wait for ever in the next reduction.
        # root_device: when fit ends, Lightning has moved the module to the CPU, where NCCL can not reduce.
        number = torch.tensor(self.received_signal or 0, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(number, reduce_op="max")) if trainer.world_size > 1 else int(number)
