"""The plan of an epoch, and what every sampler does to make one.

A plan says who is with whom. It is a pure function of (lengths, anchor counts, limits, sampler, seed, epoch, world
size, accumulate), so every rank computes the same plan without talking, and a resumed run computes it again:

    plan = BucketedSampler(width=1.25).plan(
        dataset.lengths, dataset.num_anchorable, limits, seed=0, epoch=3, world_size=2, accumulate=4
    )
    for step in range(plan.num_steps):
        for micro in range(plan.accumulate):
            indices = plan.batch(step, rank, micro)

A sampler only composes batches (`LengthBatchSampler.compose`, or whole steps of them, `compose_steps`); what is true of
all of them is done once, here: samples over the budget, as many batches as the steps need, their order, the ledger.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.checks import check_integer
from dflash.samplers.cut import split_batches, take_batches
from dflash.samplers.limits import BatchLimits, IntArray


@dataclass(frozen=True, eq=False)  # eq: == on arrays has no single truth value; compare fingerprints
class Plan:
    """The batches of one epoch, flat: batch b holds the samples `indices[offsets[b] : offsets[b + 1]]`.

    Attributes:
        indices: dataset indices, [emitted] int64, each at most once.
        offsets: [num_batches + 1] int64, strictly increasing from 0 to emitted.
        num_samples: samples of the dataset.
        dropped: samples left out of this epoch, by reason (`too_long`, `incomplete_step`).
        truncated: emitted samples that are cut to the budget.
        world_size: ranks that share the plan.
        accumulate: batches that each rank contributes to one optimizer step.
        packed: a batch is a row of samples behind each other, not a row each.
    """

    indices: IntArray
    offsets: IntArray
    num_samples: int
    dropped: dict[str, int]
    truncated: int
    world_size: int
    accumulate: int
    packed: bool = False

    def __post_init__(self) -> None:
        assert len(self.indices) + sum(self.dropped.values()) == self.num_samples, self.ledger
        assert self.num_batches % (self.world_size * self.accumulate) == 0, self.num_batches

    @property
    def num_batches(self) -> int:
        """Batches of the epoch, all ranks together."""
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return self.num_batches // (self.world_size * self.accumulate)

    @property
    def ledger(self) -> dict[str, int | dict[str, int]]:
        """Where the samples of the dataset went: read = emitted + the sum of dropped; truncated ones are emitted."""
        return {
            "read": self.num_samples,
            "emitted": len(self.indices),
            "dropped": dict(self.dropped),
            "truncated": self.truncated,
        }

    def batch(self, step: int, rank: int, micro: int) -> IntArray:
        """Dataset indices of one rank's batch, [B].

        The plan is dealt in order: `world_size` batches (slots) to each micro-step, `accumulate` micro-steps to each
        step. Over the micro-steps of the epoch, numbered t = step * accumulate + micro, the slots rotate: rank r takes
        slot (r + t) mod world_size. Whatever order a sampler gives the slots, no rank always gets the same one.

        Args:
            step: optimizer step of this epoch, 0..num_steps-1.
            rank: 0..world_size-1.
            micro: batch of the accumulation window, 0..accumulate-1.

        Raises:
            IndexError: one of the three is out of range.
        """
        for name, value, end in (
            ("step", step, self.num_steps),
            ("rank", rank, self.world_size),
            ("micro", micro, self.accumulate),
        ):
            if not 0 <= value < end:
                raise IndexError(f"{name}={value} is not in this plan: 0 <= {name} < {end}")
        micro_step = step * self.accumulate + micro
        number = micro_step * self.world_size + (rank + micro_step) % self.world_size
        return self.indices[self.offsets[number] : self.offsets[number + 1]]

    def fingerprint(self) -> str:
        """SHA-256 of who is with whom, when and on which rank: 64 hexadecimal digits, the same on every machine."""
        digest = hashlib.sha256()
        header = [len(self.indices), len(self.offsets), self.world_size, self.accumulate]
        for array in (np.array(header), self.indices, self.offsets):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        return digest.hexdigest()


class TooLongError(ValueError):
    """A sample is over the budget under `batch.too_long=error`; `sample` is its number in the dataset."""

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample


@dataclass(frozen=True, eq=False)
class ComposedSteps:
    """The batches of an epoch in the order of its steps, flat as in `Plan`.

    Attributes:
        indices: samples, [emitted] int64.
        offsets: [num_batches + 1] int64; num_batches is a multiple of the batches in a step.
        left_out: samples that found no place because there were too few for another step.
    """

    indices: IntArray
    offsets: IntArray
    left_out: int


class LengthBatchSampler:
    """Makes the plan of an epoch; subclasses say only how its batches are composed.

    Attributes:
        pads: whether a batch is padded to its longest sample, or a row of samples behind each other (packed).
    """

    pads = True

    def compose(
        self, lengths: IntArray, anchors: IntArray, limits: BatchLimits, rng: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Put the samples in a row and cut it into batches within `limits`.

        Args:
            lengths: tokens, [N] int64, each fits into a batch; N may be 0.
            anchors: the most anchors a sample brings, [N] int64.
            limits: what a batch may hold.
            rng: this epoch's own generator; the only source of chance.

        Returns:
            order: a permutation of 0..N-1, [N] int64.
            offsets: where batches begin in `order`, and N, [num_batches + 1] int64. The order of the batches is free:
                `compose_steps` shuffles it.
        """
        raise NotImplementedError

    def compose_steps(
        self,
        lengths: IntArray,
        anchors: IntArray,
        limits: BatchLimits,
        rng: np.random.Generator,
        batches_per_step: int,
    ) -> ComposedSteps:
        """Batches in the order of the steps: those of `compose`, as many as the steps need, shuffled.

        Args:
            lengths: tokens, [N] int64; those over the budget (`too_long=alone`) get a batch of their own.
            anchors: the most anchors a sample brings, [N] int64.
            limits: what a batch may hold.
            rng: this epoch's own generator; the only source of chance.
            batches_per_step: world_size * accumulate.
        """
        fits = lengths <= limits.max_length
        composed = np.flatnonzero(fits)
        order, offsets = self.compose(lengths[composed], anchors[composed], limits, rng)
        indices = np.concatenate([composed[order], np.flatnonzero(~fits)])
        offsets = np.concatenate([offsets, np.arange(offsets[-1] + 1, len(indices) + 1)])
        offsets = split_batches(offsets, multiple=batches_per_step)

        sizes = np.diff(offsets)
        batch_order = rng.permutation(len(sizes))
        left_out = 0
        if excess := len(sizes) % batches_per_step:
            # Smallest first; among equals the shuffle decides, so that no sample is left out in every epoch.
            smallest = np.argsort(sizes[batch_order], kind="stable")[:excess]
            left_out = int(sizes[batch_order[smallest]].sum())
            batch_order = np.delete(batch_order, smallest)
        return ComposedSteps(*take_batches(indices, offsets, batch_order), left_out)

    def plan(
        self,
        lengths: NDArray[np.integer],
        num_anchorable: NDArray[np.integer],
        limits: BatchLimits,
        *,
        seed: int,
        epoch: int,
        world_size: int,
        accumulate: int,
    ) -> Plan:
        """The batches of one epoch, the same on every rank.

        All samples are used, except those too long (by `limits.too_long`). Batches are split, those with most samples
        first, until each rank has the same number in each step. Only where that takes more batches than there are
        samples (say max_samples=1), the smallest batches are left out, fewer than world_size * accumulate samples, and
        counted as `incomplete_step`.

        Args:
            lengths: tokens of each sample, [N] integers >= 1.
            num_anchorable: valid anchors of each sample, [N] integers >= 0.
            limits: what a batch may hold.
            seed: of the run, >= 0.
            epoch: counted from 0.
            world_size: ranks, >= 1.
            accumulate: batches of each rank to one optimizer step, >= 1.

        Raises:
            TooLongError: a sample is over the budget under `too_long=error`.
            ValueError: arguments out of range; too few samples for one optimizer step.
        """
        for name, value, minimum in (
            ("seed", seed, 0),
            ("epoch", epoch, 0),
            ("world_size", world_size, 1),
            ("accumulate", accumulate, 1),
        ):
            check_integer(name, value, minimum)
        lengths, num_anchorable = _check_samples(lengths, num_anchorable)
        num_samples = len(lengths)
        batches_per_step = world_size * accumulate
        rng = np.random.default_rng(np.random.SeedSequence([seed, epoch]))

        fits = lengths <= limits.max_length
        if limits.too_long == "error" and not fits.all():
            raise TooLongError(_too_long_message(lengths, limits), int(lengths.argmax()))
        dropped = {}
        if limits.too_long == "drop" and not fits.all():
            dropped["too_long"] = int(np.count_nonzero(~fits))
        num_usable = num_samples - sum(dropped.values())
        if num_usable < batches_per_step:
            besides = f" (batch.too_long=drop left out {dropped['too_long']} more)" if dropped else ""
            raise ValueError(
                f"An epoch of {num_usable} samples{besides} is too short for one optimizer step, which takes "
                f"world_size * accumulate = {world_size} * {accumulate} = {batches_per_step} batches of at least one "
                "sample. Add data, or lower trainer.accumulate_grad_batches or trainer.devices."
            )

        planned = limits.planned_lengths(lengths)
        anchors = limits.planned_anchors(num_anchorable)
        usable = np.flatnonzero(fits) if limits.too_long == "drop" else np.arange(num_samples)
        steps = self.compose_steps(planned[usable], anchors[usable], limits, rng, batches_per_step)
        if steps.left_out:
            dropped["incomplete_step"] = steps.left_out
        indices, offsets = usable[steps.indices], steps.offsets
        if limits.probe_first and epoch == 0 and len(indices):
            first = most_expensive_first(
                self.computed_tokens(planned[indices], offsets, limits),
                np.add.reduceat(anchors[indices], offsets[:-1]),
                batches_per_step,
            )
            indices, offsets = take_batches(indices, offsets, first)
        return Plan(
            indices=indices,
            offsets=offsets,
            num_samples=num_samples,
            dropped=dropped,
            truncated=int(np.count_nonzero(planned[indices] < lengths[indices])),
            world_size=world_size,
            accumulate=accumulate,
            packed=not self.pads,
        )

    def computed_tokens(self, lengths: IntArray, offsets: IntArray, limits: BatchLimits) -> IntArray:
        """Tokens that each batch computes, padding included, [num_batches] int64.

        Args:
            lengths: tokens of the samples in the plan's order, [emitted] int64.
            offsets: where batches begin, [num_batches + 1] int64.
            limits: give the padding.
        """
        if self.pads:
            return np.maximum.reduceat(limits.padded_lengths(lengths), offsets[:-1]) * np.diff(offsets)
        return limits.padded_lengths(np.add.reduceat(lengths, offsets[:-1]))


def most_expensive_first(tokens: IntArray, anchors: IntArray, batches_per_step: int) -> IntArray:
    """An order of the batches in which the most expensive one is the first of all; steps stay together.

    Args:
        tokens: that each batch computes, [num_batches] int64.
        anchors: of each batch, [num_batches] int64; they decide among equals.
        batches_per_step: neighbours that make a step.
    """
    order = np.arange(len(tokens)).reshape(-1, batches_per_step)
    step, place = divmod(int(np.lexsort((anchors, tokens))[-1]), batches_per_step)
    order[[0, step]] = order[[step, 0]]
    order[0, [0, place]] = order[0, [place, 0]]
    return order.ravel()


def _too_long_message(lengths: IntArray, limits: BatchLimits) -> str:
    longest = int(lengths.argmax())
    return (
        f"{np.count_nonzero(lengths > limits.max_length)} of {len(lengths)} samples do not fit into batch.token_budget="
        f"{limits.token_budget} once padded to batch.pad_multiple={limits.pad_multiple}; the longest has "
        f"{lengths[longest]} tokens (sample {longest}). Set batch.token_budget to "
        f"{limits.padded_lengths(lengths).max()} or more, or batch.too_long to drop, truncate or alone."
    )


def _check_samples(lengths: NDArray[np.integer], num_anchorable: NDArray[np.integer]) -> tuple[IntArray, IntArray]:
    for name, array, minimum in (("lengths", lengths, 1), ("num_anchorable", num_anchorable, 0)):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name} must be a row of integers, not {array.dtype} of shape {array.shape}.")
        if len(array) and array.min() < minimum:
            raise ValueError(f"{name}[{array.argmin()}]={array.min()} must be >= {minimum}.")
    if len(lengths) != len(num_anchorable):
        raise ValueError(
            f"lengths has {len(lengths)} samples, num_anchorable {len(num_anchorable)}: they must describe the same."
        )
    return lengths.astype(np.int64, copy=False), num_anchorable.astype(np.int64, copy=False)
