"""The walk: acceptance length on known text, as decoding would find it.

From the first response token, each round drafts a block, keeps its matching prefix and adds the target's own token:
a <- a + matched + 1. Tokens over rounds is the acceptance length. On text that the target wrote greedily it equals
decoding; a mean over drawn anchors would not, since more anchors lie in long accepted stretches.
"""

import torch
from torch import Tensor

from dflash.batch import Batch
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds
from dflash.training.objective import block_labels, block_token_ids


@torch.no_grad()
def walk_batch(
    drafter: DFlashDrafter, ends: TargetEnds, batch: Batch, blocks_at_a_time_per_doc: int
) -> tuple[Tensor, Tensor]:
    """Walk every sample of a batch.

    Args:
        drafter: drafts the blocks.
        ends: the target's embedding and LM head.
        batch: with the target's hidden states; all valid anchors are tried, whichever were drawn.
        blocks_at_a_time_per_doc: bounds the memory of a pass.

    Returns:
        tokens [B] int64 and rounds [B] int64 of each sample, on the CPU.
    """
    assert batch.hidden is not None, "the placement adds hidden states"
    assert batch.cu_seqlens is None, "validation batches are padded"
    anchorable = batch.loss_mask.clone()
    anchorable[:, :-1] &= batch.loss_mask[:, 1:]
    anchorable[:, -1] = False
    rank_in_doc = anchorable.long().cumsum(dim=1) - 1
    matched = torch.zeros_like(batch.input_ids)
    context = drafter.project_context(batch.hidden, batch.position_ids)
    for first in range(0, int(anchorable.sum(dim=1).max()), blocks_at_a_time_per_doc):
        chosen = anchorable & (rank_in_doc >= first) & (rank_in_doc < first + blocks_at_a_time_per_doc)
        doc, anchors = chosen.nonzero(as_tuple=True)
        tokens = block_token_ids(batch, anchors, doc, drafter.block_size, drafter.mask_token_id)
        states = drafter.denoise(ends.embed(tokens), context, anchors, batch.starts[doc])
        labels, supervised = block_labels(batch, anchors, doc, drafter.block_size)
        matched[doc, anchors] = greedy_matches(states, labels, supervised, ends)
    walked = [
        walk(matched_of_doc, mask)
        for matched_of_doc, mask in zip(matched.tolist(), batch.loss_mask.tolist(), strict=True)
    ]
    tokens_of_doc, rounds_of_doc = zip(*walked, strict=True)
    return torch.tensor(tokens_of_doc), torch.tensor(rounds_of_doc)


def greedy_matches(states: Tensor, labels: Tensor, supervised: Tensor, ends: TargetEnds) -> Tensor:
    """Length of each block's matching prefix under greedy drafting.

    The LM head, most of the work, runs slot by slot and only for the blocks that have matched so far.

    Args:
        states: the drafter's output, [N, K, H].
        labels: [N, K - 1] int64.
        supervised: [N, K - 1] bool.
        ends: the target's LM head.

    Returns:
        [N] int64, each in 0..K-1.
    """
    matched = torch.zeros(len(states), dtype=torch.long, device=states.device)
    alive = torch.arange(len(states), device=states.device)
    for slot in range(1, states.shape[1]):
        alive = alive[supervised[alive, slot - 1]]
        if len(alive) == 0:
            break
        predicted = ends.logits(states[alive, slot]).argmax(dim=-1)
        alive = alive[predicted == labels[alive, slot - 1]]
        matched[alive] += 1
    return matched


def walk(matched: list[int], loss_mask: list[bool]) -> tuple[int, int]:
    """Walk the supervised runs of one sample.

    Args:
        matched: at each position, how many tokens a block anchored there gets right before its first mistake.
        loss_mask: at each position, whether it belongs to a response.

    Returns:
        tokens that rounds have produced (each run's first comes from the prefill and is not counted), and rounds.
    """
    tokens = rounds = position = 0
    while position < len(loss_mask):
        if not loss_mask[position]:
            position += 1
            continue
        last = position
        while last + 1 < len(loss_mask) and loss_mask[last + 1]:
            last += 1
        tokens += last - position
        while position < last:
            position += matched[position] + 1
            rounds += 1
        position = last + 1
    return tokens, rounds
