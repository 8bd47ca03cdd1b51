"""Block attention that computes the visible pairs and little more: neighbouring blocks of a document together."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

GROUP_SLOTS = 256  # slots of neighbouring blocks that attend together: fewer waste less, more fill the matrix units


class _Group(NamedTuple):
    """G neighbouring blocks of one document."""

    blocks: slice
    context: slice  # P positions that the last of them sees, among the B * S
    shared: int  # so many of these all of them see
    bias: Tensor  # [G, 1, P - shared]: -inf where a block does not see one of the others, else 0


class GroupedBlockAttention:
    """Neighbouring blocks of a document attend together to its context up to the last one's anchor, and to themselves.

    What is masked is computed only between the first and the last anchor of a group.

    Args:
        anchors: [N] int64, ascending within a document.
        starts: [N] int64, where its document begins among the B * S positions, ascending.
        block_size: K.
    """

    def __init__(self, anchors: Tensor, starts: Tensor, *, block_size: int) -> None:
        self.groups: list[_Group] = []
        blocks_in_group = max(GROUP_SLOTS // block_size, 1)
        anchor_list, start_list = anchors.tolist(), starts.tolist()
        first = 0
        while first < len(anchor_list):
            end = first + 1
            while end < min(first + blocks_in_group, len(anchor_list)) and start_list[end] == start_list[first]:
                end += 1
            begin, shared, reach = start_list[first], anchor_list[first], anchor_list[end - 1]
            # Strictly before the anchor: its own hidden state does not exist yet when decoding drafts from it.
            hidden = torch.arange(shared, reach, device=anchors.device) >= anchors[first:end, None, None]
            bias = torch.zeros(hidden.shape, device=anchors.device).masked_fill_(hidden, float("-inf"))
            self.groups.append(_Group(slice(first, end), slice(begin, begin + reach), shared, bias))
            first = end

    def __call__(
        self, query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor
    ) -> Tensor:
        """Attend; shapes as in `DenseBlockAttention.__call__`."""
        attended: Tensor = _GroupedAttention.apply(
            query, block_key, block_value, context_key, context_value, self.groups
        )
        return attended


class _GroupedAttention(torch.autograd.Function):
    """Forward and backward group by group, so that what a group needs stays in the processor's cache.

    Written by hand, since autograd's gradient of a slice is a tensor as large as what it was cut from, for every group.
    The shares are computed again in the backward pass: a product more, and the memory of all of them less.

    H query heads share the keys and values of Hk key heads, R = H / Hk each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        groups: list[_Group],
    ) -> Tensor:
        """Shapes as in `DenseBlockAttention.__call__`."""
        ctx.save_for_backward(query, block_key, block_value, context_key, context_value)
        ctx.groups = groups
        block_size, key_heads = query.shape[1], context_key.shape[2]
        keys, values = _context_by_head(context_key), _context_by_head(context_value)
        attended = torch.empty_like(query)
        for group in groups:
            rows, own_key, own_value = (_by_head(t[group.blocks], key_heads) for t in (query, block_key, block_value))
            shares = _shares(rows * _scale(query), own_key, keys[:, group.context], group)
            of_context, of_own = _context_and_own(shares, block_size)
            result = of_own @ own_value + (of_context @ values[:, group.context]).view_as(rows)
            _put(attended[group.blocks], result, key_heads)
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:
        """With shares P of scores S = q k and the output O = P v: dv = P' dO, dP = dO v', dS = P (dP - sum of P dP)."""
        query, block_key, block_value, context_key, context_value = ctx.saved_tensors
        block_size, key_heads, scale = query.shape[1], context_key.shape[2], _scale(query)
        keys, values = _context_by_head(context_key), _context_by_head(context_value)
        grad_query, grad_block_key, grad_block_value = map(torch.empty_like, (query, block_key, block_value))
        # Many groups add to the same positions: in float32 or wider.
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_keys, grad_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
        for group in ctx.groups:
            rows, own_key, own_value, grad_rows = (
                _by_head(t[group.blocks], key_heads) for t in (query, block_key, block_value, grad)
            )
            rows = rows * scale
            key, value = keys[:, group.context], values[:, group.context]
            shares = _shares(rows, own_key, key, group)
            of_context, of_own = _context_and_own(shares, block_size)
            grad_values[:, group.context] += of_context.transpose(1, 2) @ grad_rows.flatten(1, 2)
            _put(grad_block_value[group.blocks], of_own.transpose(2, 3) @ grad_rows, key_heads)

            scores_grad = torch.empty_like(shares)
            on_context, on_own = _context_and_own(scores_grad, block_size)
            torch.bmm(grad_rows.flatten(1, 2), value.transpose(1, 2), out=on_context)
            on_own.copy_(grad_rows @ own_value.transpose(2, 3))
            scores_grad *= shares
            scores_grad.addcmul_(shares, scores_grad.sum(dim=-1, keepdim=True, dtype=wide).to(shares.dtype), value=-1)

            grad_keys[:, group.context] += on_context.transpose(1, 2) @ rows.flatten(1, 2)
            _put(grad_block_key[group.blocks], on_own.transpose(2, 3) @ rows, key_heads)
            grad_rows = on_own @ own_key + (on_context @ key).view_as(rows)
            _put(grad_query[group.blocks], grad_rows.mul_(scale), key_heads)
        of_context_key, of_context_value = (
            t.transpose(0, 1).reshape(context_key.shape).to(query.dtype) for t in (grad_keys, grad_values)
        )
        return grad_query, grad_block_key, grad_block_value, of_context_key, of_context_value, None


def _shares(rows: Tensor, own_key: Tensor, key: Tensor, group: _Group) -> Tensor:
    """How much each row looks at the context, and at its own block.

    Args:
        rows: scaled queries, [Hk, G, K * R, D].
        own_key: [Hk, G, K, D].
        key: of the context, [Hk, P, D].
        group: says who sees what.

    Returns:
        [Hk, G, K * R, P + K], each row's sum is 1.
    """
    length = key.shape[1]
    scores = rows.new_empty(*rows.shape[:3], length + own_key.shape[2])
    on_context, on_own = _context_and_own(scores, own_key.shape[2])
    torch.bmm(rows.flatten(1, 2), key.transpose(1, 2), out=on_context)
    on_own.copy_(rows @ own_key.transpose(2, 3))
    scores[..., group.shared : length] += group.bias
    # The softmax itself in float32 or wider: in bfloat16 sums of many small shares lose what is left of them.
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def _context_and_own(scores: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Views of [Hk, G, K * R, P + K]: towards the context, all rows of a head together, and towards the own block."""
    on_context, on_own = scores.split([scores.shape[-1] - block_size, block_size], dim=-1)
    return on_context.flatten(1, 2), on_own


def _scale(query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5)


def _context_by_head(context: Tensor) -> Tensor:
    """[B, S, Hk, D] -> [Hk, B * S, D]."""
    return context.flatten(0, 1).transpose(0, 1)


def _by_head(blocks: Tensor, key_heads: int) -> Tensor:
    """[G, K, heads, D] -> [Hk, G, K * heads / Hk, D]: by key head, what belongs to it side by side."""
    return blocks.unflatten(2, (key_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


def _put(blocks: Tensor, rows: Tensor, key_heads: int) -> None:
    """Write what has the shape that `_by_head` gives into `blocks`, [G, K, heads, D]."""
    blocks.unflatten(2, (key_heads, -1)).permute(2, 0, 1, 3, 4).copy_(rows.unflatten(2, (blocks.shape[1], -1)))
