"""The training objective: cross-entropy of every supervised slot, weighted less the further it lies from the anchor.

Rules (design 4.6): slot k of a block with anchor a predicts token a + k; slot 0 is the anchor and has no loss;
supervision stops at the first unsupervised or out-of-range position; w_k = exp(-(k - 1) / gamma). The loss of an
optimizer step is sum(w * CE) / sum(w) over all of its micro-batches and ranks, so what is formed here are the two sums.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.batch import Batch
from dflash.checks import check_integer, check_positive
from dflash.target.ends import TargetEnds

# Decay of the slot weights in the published recipe (arXiv 2602.06036), by block size.
PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass
class BlockOutcome:
    """What the blocks of one batch came to. N blocks, K slots; slot 0 has no entry."""

    loss_sum: Tensor  # scalar, sum of weight * cross-entropy, carries the gradient
    weights: Tensor  # [N, K - 1] float32 or wider, 0 where there is no label
    cross_entropy: Tensor  # [N, K - 1] float32 or wider, 0 where there is no label
    supervised: Tensor  # [N, K - 1] bool
    correct: Tensor  # [N, K - 1] bool, the most likely token is the label

    def matched(self) -> Tensor:
        """[N] int64: length of each block's leading run of right predictions."""
        return matched_prefix(self.correct)


def matched_prefix(correct: Tensor) -> Tensor:
    """Length of each block's leading run of right predictions.

    Args:
        correct: [N, K - 1] bool, false where there is no label.

    Returns:
        [N] int64, each in 0..K-1. The accepted length of a round is this plus one (the target's own token).
    """
    return correct.long().cumprod(dim=1).sum(dim=1)


def block_token_ids(batch: Batch, anchors: Tensor, anchor_doc: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """What a block starts from: the anchor's token in slot 0, the mask token in all others.

    Args:
        batch: holds the tokens.
        anchors: [N] int64, positions in their samples.
        anchor_doc: [N] int64, their samples.
        block_size: K.
        mask_token_id: fills slots 1..K-1.

    Returns:
        [N, K] int64.
    """
    token_ids = batch.input_ids.new_full((len(anchors), block_size), mask_token_id)
    token_ids[:, 0] = batch.input_ids.flatten()[batch.starts[anchor_doc] + anchors]
    return token_ids


def block_labels(batch: Batch, anchors: Tensor, anchor_doc: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Labels of slots 1..K-1 and where they exist.

    Args:
        batch: holds tokens and loss mask.
        anchors: [N] int64, positions in their samples.
        anchor_doc: [N] int64, their samples.
        block_size: K.

    Returns:
        labels [N, K - 1] int64 and supervised [N, K - 1] bool. A block's supervision ends at its first false.
    """
    positions = anchors[:, None] + torch.arange(1, block_size, device=anchors.device)
    length = batch.lengths[anchor_doc][:, None]
    # Beyond the end of a sample lies another one, or nothing.
    flat = batch.starts[anchor_doc][:, None] + torch.minimum(positions, length - 1)
    supervised = (positions < length) & batch.loss_mask.flatten()[flat]
    return batch.input_ids.flatten()[flat], supervised.long().cumprod(dim=1).bool()


class CrossEntropyObjective:
    """Weighted cross-entropy against the data's tokens.

    Args:
        block_size: K.
        gamma: decay of the slot weights, in slots; null takes the published one for K of 16, 10 or 8.
        chunk_slots: how many slots pass the LM head at a time; bounds the memory of the logits to chunk_slots * V.

    Raises:
        ValueError: no gamma is published for K and none is given.
    """

    def __init__(self, block_size: int, gamma: float | None = None, chunk_slots: int = 512) -> None:
        if gamma is None and block_size not in PUBLISHED_GAMMA:
            raise ValueError(
                f"objective.gamma=null, and none is published for drafter.block_size={block_size} (only for "
                f"{', '.join(map(str, PUBLISHED_GAMMA))}). Set objective.gamma, about half the block size."
            )
        gamma = PUBLISHED_GAMMA[block_size] if gamma is None else gamma
        check_positive("objective.gamma", gamma)
        check_integer("objective.chunk_slots", chunk_slots, 1)
        self.chunk_slots = chunk_slots
        self.slot_weights = [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]

    def __call__(self, states: Tensor, labels: Tensor, supervised: Tensor, ends: TargetEnds) -> BlockOutcome:
        """Sum the weighted cross-entropy of all blocks.

        Args:
            states: the drafter's output, [N, K, H].
            labels: [N, K - 1] int64.
            supervised: [N, K - 1] bool.
            ends: the target's LM head.
        """
        wide = torch.promote_types(states.dtype, torch.float32)
        weights = torch.tensor(self.slot_weights, dtype=wide, device=states.device) * supervised
        loss_sum, slot_loss, slot_correct = WeightedHeadCrossEntropy.apply(
            states[:, 1:][supervised], labels[supervised], weights[supervised], ends, self.chunk_slots
        )
        cross_entropy = torch.zeros_like(weights)
        cross_entropy[supervised] = slot_loss.to(wide)
        correct = torch.zeros_like(supervised)
        correct[supervised] = slot_correct
        return BlockOutcome(loss_sum, weights, cross_entropy, supervised, correct)


class WeightedHeadCrossEntropy(torch.autograd.Function):
    """LM head and weighted cross-entropy, a chunk of slots at a time.

    The gradient towards the states is formed in the forward pass while a chunk's logits exist, so that neither the
    whole [R, V] is kept nor a product computed twice. Softmax and logsumexp are float32 or wider: in bfloat16 the loss
    is biased.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, labels: Tensor, weights: Tensor, ends: TargetEnds, chunk_slots: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """R slots.

        Args:
            ctx: autograd's.
            states: [R, H].
            labels: [R] int64.
            weights: [R].
            ends: the target's LM head.
            chunk_slots: slots a chunk.

        Returns:
            sum of weight * cross-entropy (scalar), cross-entropy [R], whether the most likely token is the label [R].
        """
        wide = torch.promote_types(ends.head.dtype, torch.float32)
        slot_loss = torch.zeros(len(states), dtype=wide, device=states.device)
        slot_correct = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        with torch.autocast(states.device.type, enabled=False):  # the head's own dtype decides
            for start in range(0, len(states), chunk_slots):
                rows = slice(start, start + chunk_slots)
                slot_loss[rows], slot_correct[rows], of_rows = _chunk(
                    states[rows], labels[rows, None], weights[rows, None], ends, with_gradient=gradient is not None
                )
                if gradient is not None and of_rows is not None:
                    gradient[rows] = of_rows
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(slot_loss, slot_correct)
        return (slot_loss * weights).sum(), slot_loss, slot_correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Scale the gradient that the forward pass has formed."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None


def _chunk(
    states: Tensor, label: Tensor, weight: Tensor, ends: TargetEnds, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """R slots at once.

    Args:
        states: [R, H].
        label: [R, 1] int64.
        weight: [R, 1].
        ends: the target's LM head.
        with_gradient: whether it is wanted.

    Returns:
        cross-entropy [R]; whether the most likely token is the label [R]; gradient of the sum of weight * cross-entropy
        towards the states, [R, H].
    """
    logits = ends.logits(states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = None if ends.logit_softcap is None else 1 - (logits / ends.logit_softcap).square_()
    # All in one tensor: each one more would be written to, and read from, memory that no cache holds.
    largest, most_likely = logits.max(dim=-1, keepdim=True)
    shifted = logits.sub_(largest)
    label_logit = shifted.gather(-1, label)
    exponentials = shifted.exp_()
    total = exponentials.sum(dim=-1, keepdim=True)
    cross_entropy, correct = total.log() - label_logit, most_likely == label
    if not with_gradient:
        return cross_entropy.squeeze(-1), correct.squeeze(-1), None
    scale = (weight * ends.logit_scale).to(logits.dtype)
    error = exponentials.mul_(scale / total).scatter_add_(-1, label, -scale)  # scale * (softmax, less 1 at the label)
    if slope is not None:
        error.mul_(slope)
    return cross_entropy.squeeze(-1), correct.squeeze(-1), error.to(ends.head.dtype) @ ends.head
