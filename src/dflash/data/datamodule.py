"""The Lightning data module: hosts a sampler, deals its plans to ranks, and knows where a run stands."""

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from dflash.batch import Batch
from dflash.data.collate import collate
from dflash.data.schedule import TrainingSchedule, plan_samples
from dflash.data.tokens import TokenDataset
from dflash.samplers.cut import split_batches
from dflash.samplers.length_sorted import LengthSortedSampler

_VALIDATION_EPOCH = 0  # validation draws the anchors of one epoch for ever, so that its losses can be compared

Feed = Callable[[Iterable[Batch]], Iterable[Batch]]


class DFlashDataModule(LightningDataModule):
    """Batches for training and validation, hidden states of the target included.

    The training loader is continuous: it runs over all epochs, so that Lightning sees one epoch of
    max_steps * accumulate batches, and a resumed run continues at the very batch where its checkpoint was made.

    Args:
        schedule: order of the training samples.
        val_batches: the held-out samples.
        max_steps: optimizer steps of the whole run.
        num_workers: processes that read and collate.
        feed: the placement's; adds the target's hidden states to the batches of a loader.
        pin_memory: collate into page-locked memory, for copies to a GPU.
    """

    def __init__(
        self,
        schedule: TrainingSchedule,
        val_batches: "ValidationBatches",
        *,
        max_steps: int,
        num_workers: int,
        feed: Feed,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self.val_batches = val_batches
        self.max_steps = max_steps
        self.num_workers = num_workers
        self.feed = feed
        self.pin_memory = pin_memory
        self.batches_before_resume = 0  # on each rank, those of the optimizer steps that a checkpoint had completed

    def train_dataloader(self) -> Iterable[Batch]:
        """Every batch of the run from where it stands, on this rank."""
        numbers = RemainingBatches(self, self.max_steps * self.schedule.accumulate)
        return self.feed(self._loader(TrainingBatches(self.schedule, self._rank()), numbers))

    def val_dataloader(self) -> Iterable[Batch]:
        """The held-out samples in batches of similar length, dealt to the ranks."""
        numbers = range(self._rank(), len(self.val_batches), self.schedule.world_size)
        return self.feed(self._loader(self.val_batches, numbers))

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, and the plan it stands in."""
        # Checkpoints are made at step boundaries only, and batches fetched ahead are not consumed.
        return self.schedule.state(self.trainer.global_step if self.trainer is not None else 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint stood.

        Raises:
            ValueError: this run's plan is another one than the checkpoint's.
        """
        self.schedule.check_state(state_dict)
        self.batches_before_resume = state_dict["batches_consumed"]

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    def _loader(self, batches: Dataset[Batch], numbers: "Iterable[int] | Sampler[int]") -> DataLoader[Batch]:
        # batch_size=None: what `batches` gives for a number is a whole batch already.
        return DataLoader(
            batches,
            sampler=numbers,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            worker_init_fn=_leave_signals_to_the_main_process,
            # Anchors come from their own generators; torch's global one must not advance differently after a resume.
            generator=torch.Generator().manual_seed(self.schedule.seed),
        )


def _leave_signals_to_the_main_process(worker_id: int) -> None:
    # Ctrl-C in a terminal reaches every process of the group. Workers must live until the main process has finished its
    # optimizer step; they end by themselves when it does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class RemainingBatches(Sampler[int]):
    """Numbers of the batches that a run has still to see; its length counts the whole run, as Lightning expects."""

    def __init__(self, datamodule: DFlashDataModule, total: int) -> None:
        self.datamodule = datamodule
        self.total = total

    def __iter__(self) -> Iterator[int]:
        # Read when iteration begins: Lightning restores the data module's state after it has built the loader.
        return iter(range(self.datamodule.batches_before_resume, self.total))

    def __len__(self) -> int:
        return self.total


class TrainingBatches(Dataset[Batch]):
    """Batch number -> batch, on one rank."""

    def __init__(self, schedule: TrainingSchedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank

    def __getitem__(self, number: int) -> Batch:
        """Read and collate one batch."""
        schedule = self.schedule
        epoch, sample_ids = schedule.batch(number, self.rank)
        packed = schedule.plan(epoch).packed
        return collate(schedule.dataset, sample_ids, schedule.limits, packed=packed, seed=schedule.seed, epoch=epoch)


class ValidationBatches(Dataset[Batch]):
    """The held-out samples, sorted by length and cut under the same limits as training batches.

    There are as many batches as ranks or more: Lightning skips the validation of a rank without any, and the others
    would wait for it for ever.

    Raises:
        ValueError: fewer held-out samples than ranks, or one that is over the budget.
    """

    def __init__(self, dataset: TokenDataset, schedule: TrainingSchedule) -> None:
        self.dataset = dataset
        self.schedule = schedule
        self.plan = plan_samples(
            LengthSortedSampler(),
            dataset,
            schedule.limits,
            seed=schedule.seed,
            epoch=_VALIDATION_EPOCH,
            world_size=1,
            accumulate=1,
        )
        self.offsets = self.plan.offsets
        if len(self) < schedule.world_size:
            if len(self.plan.indices) < schedule.world_size:
                raise ValueError(
                    f"{len(self.plan.indices)} held-out samples are too few for {schedule.world_size} ranks, each of "
                    "which validates at least one. Bring more, raise data.val_fraction, or lower trainer.devices."
                )
            self.offsets = split_batches(self.offsets, multiple=schedule.world_size)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Batch:
        """Read and collate one batch."""
        sample_ids = self.plan.indices[self.offsets[number] : self.offsets[number + 1]]
        schedule = self.schedule
        return collate(
            self.dataset, sample_ids, schedule.limits, packed=False, seed=schedule.seed, epoch=_VALIDATION_EPOCH
        )
