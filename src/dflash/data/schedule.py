"""Where a run stands: from the number of a batch to its epoch, its step and its samples.

The order of a whole run is a function of its plans, so the position is computed and never stored: a resumed run asks
for batch 1,234 and gets what batch 1,234 always was.
"""

import threading
from typing import Any

import numpy as np

from dflash.data.tokens import TokenDataset
from dflash.samplers.base import LengthBatchSampler, Plan, TooLongError
from dflash.samplers.limits import BatchLimits, IntArray

STATE_VERSION = 1


def plan_samples(
    sampler: LengthBatchSampler,
    dataset: TokenDataset,
    limits: BatchLimits,
    *,
    seed: int,
    epoch: int,
    world_size: int,
    accumulate: int,
) -> Plan:
    """The plan of a token dataset's epoch, see `LengthBatchSampler.plan`.

    Raises:
        ValueError: as there; a sample that is too long is named by where it comes from.
    """
    try:
        return sampler.plan(
            dataset.lengths,
            dataset.num_anchorable,
            limits,
            seed=seed,
            epoch=epoch,
            world_size=world_size,
            accumulate=accumulate,
        )
    except TooLongError as error:
        raise ValueError(f"{error} The longest is {dataset.sample(error.sample).source}.") from error


class TrainingSchedule:
    """The plans of all epochs of a run, made one at a time as they are needed.

    Args:
        dataset: the training samples.
        sampler: composes the batches.
        limits: what a batch may hold.
        seed: of the run.
        world_size: number of ranks.
        accumulate: micro-batches that each rank contributes to an optimizer step.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        sampler: LengthBatchSampler,
        limits: BatchLimits,
        *,
        seed: int,
        world_size: int,
        accumulate: int,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.limits = limits
        self.seed = seed
        self.world_size = world_size
        self.accumulate = accumulate
        self._plans: dict[int, Plan] = {}  # the last two that were asked for: a loader runs ahead of the training
        self._lock = threading.Lock()  # with placement=pool it does so in a thread of its own
        self._first_step_of_epoch = [0]  # and so on; grows as plans are made

    def plan(self, epoch: int) -> Plan:
        """The batches of one epoch. The last two that were asked for are kept."""
        with self._lock:
            plan = self._plans.pop(epoch, None) or plan_samples(
                self.sampler,
                self.dataset,
                self.limits,
                seed=self.seed,
                epoch=epoch,
                world_size=self.world_size,
                accumulate=self.accumulate,
            )
            self._plans = {**dict(list(self._plans.items())[-1:]), epoch: plan}
            if len(self._first_step_of_epoch) == epoch + 1:
                self._first_step_of_epoch.append(self._first_step_of_epoch[-1] + plan.num_steps)
        return plan

    def num_steps(self, epochs: int) -> int:
        """Optimizer steps of the first `epochs` epochs, exactly."""
        while len(self._first_step_of_epoch) <= epochs:
            self.plan(len(self._first_step_of_epoch) - 1)
        return self._first_step_of_epoch[epochs]

    def epoch_of_step(self, step: int) -> int:
        """The epoch that optimizer step `step` (from 0) belongs to. No step straddles two."""
        while self._first_step_of_epoch[-1] <= step:
            self.plan(len(self._first_step_of_epoch) - 1)
        return int(np.searchsorted(self._first_step_of_epoch, step, side="right")) - 1

    def fractional_epoch(self, step: int) -> float:
        """Epochs passed when `step` optimizer steps are complete."""
        epoch = self.epoch_of_step(step)
        first, end = self._first_step_of_epoch[epoch], self.num_steps(epoch + 1)
        return epoch + (step - first) / (end - first)

    def batch(self, number: int, rank: int) -> tuple[int, IntArray]:
        """Epoch and dataset rows of a rank's batch.

        Args:
            number: of the batch within the whole run, counted on each rank, from 0.
            rank: 0..world_size-1.

        Returns:
            epoch, and rows [B] int64.
        """
        step, micro = divmod(number, self.accumulate)
        epoch = self.epoch_of_step(step)
        return epoch, self.plan(epoch).batch(step - self._first_step_of_epoch[epoch], rank, micro)

    def state(self, step: int) -> dict[str, Any]:
        """Where a run stands that has completed `step` optimizer steps, and the plan it stands in."""
        epoch = self.epoch_of_step(step)
        plan = self.plan(epoch)
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": epoch,
            "batches_consumed": step * self.accumulate,
            "dataset_fingerprint": self.dataset.info["fingerprint"],
            "plan_fingerprint": plan.fingerprint(),
            "ledger": plan.ledger,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse to continue from the state of another schedule.

        Raises:
            ValueError: the data or the plan are others than a checkpoint's; the message says in what.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"the checkpoint's data state has version {state['version']}, this dflash writes {STATE_VERSION}. "
                "Use init_from to start anew from its weights."
            )
        dataset_fingerprint = self.dataset.info["fingerprint"]
        if dataset_fingerprint != state["dataset_fingerprint"]:
            raise ValueError(
                f"resume_from: the training data are not those the checkpoint was made with (token dataset "
                f"{dataset_fingerprint}, then {state['dataset_fingerprint']}). The conversations, the tokenizer, "
                "its template or a data.* option have changed. Restore them, or use init_from to start anew from its "
                "weights."
            )
        plan = self.plan(state["epoch"])
        if plan.fingerprint() != state["plan_fingerprint"]:
            raise ValueError(
                f"resume_from: the plan of epoch {state['epoch']} is not the one the checkpoint was made with. "
                f"Its samples: {state['ledger']}, now: {plan.ledger}; its seed: {state['seed']}, now: {self.seed}. The "
                "data, the sampler, the batch limits, the number of ranks or of accumulated batches have changed. "
                "Restore them, or use init_from to start anew from its weights."
            )
