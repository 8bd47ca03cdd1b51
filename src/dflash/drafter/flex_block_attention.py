"""Block attention by torch's FlexAttention: one compiled kernel that passes over what no slot of a tile sees."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128  # slots, and positions, that the kernel takes or passes over together


class FlexBlockAttention:
    """The rule as FlexAttention's mask, over (all positions of the context, then all slots of all blocks).

    Args:
        anchors: [N] int64, position of each block's anchor in its document, ascending within a document.
        starts: [N] int64, where its document begins among the B * S positions, ascending.
        num_positions: B * S.
        block_size: K.
    """

    def __init__(self, anchors: Tensor, starts: Tensor, *, num_positions: int, block_size: int) -> None:
        ends = starts + anchors
        # A tensor, since the kernel would be compiled anew for every number.
        own_begin = torch.tensor(num_positions, device=anchors.device)

        def sees(_batch: Tensor, _head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
            block = slot // block_size
            # Strictly before the anchor: its own hidden state does not exist yet when decoding drafts from it.
            of_context = (key >= starts[block]) & (key < ends[block])
            of_block = (key >= own_begin) & ((key - own_begin) // block_size == block)
            return of_context | of_block

        tiles = tiles_seen(starts, ends, num_positions=num_positions, block_size=block_size)
        num_slots = len(anchors) * block_size
        self.mask = BlockMask.from_kv_blocks(
            kv_num_blocks=tiles.sum(dim=1, dtype=torch.int32)[None, None],
            kv_indices=tiles.int().argsort(dim=1, descending=True, stable=True).int()[None, None],
            BLOCK_SIZE=TILE,
            mask_mod=sees,
            seq_lengths=(num_slots, num_positions + num_slots),
        )

    def __call__(
        self, query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor
    ) -> Tensor:
        """Attend; shapes as in `DenseBlockAttention.__call__`."""
        keys, values = (
            torch.cat([context.flatten(0, 1), of_blocks.flatten(0, 1)])[None].transpose(1, 2)
            for context, of_blocks in ((context_key, block_key), (context_value, block_value))
        )
        slots = query.flatten(0, 1)[None].transpose(1, 2)  # [1, heads, N * K, head_dim]
        attend: Any = _compiled() if query.device.type == "cuda" else flex_attention
        attended: Tensor = attend(slots, keys, values, block_mask=self.mask, enable_gqa=True)
        return attended.transpose(1, 2)[0].view_as(query)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def tiles_seen(starts: Tensor, ends: Tensor, *, num_positions: int, block_size: int) -> Tensor:
    """Which tiles of keys hold anything that a tile of slots may see; some that hold nothing are among them.

    The blocks of a tile are neighbours, what they see of the context lies close together: the whole stretch is taken.

    Args:
        starts: [N] int64, first position that a block sees, ascending.
        ends: [N] int64, the one behind the last; as `starts` where it sees none.
        num_positions: B * S.
        block_size: K.

    Returns:
        [tiles of slots, tiles of keys] bool.
    """
    device, num_blocks = starts.device, len(starts)
    num_slots = num_blocks * block_size
    first_slot = torch.arange(0, num_slots, TILE, device=device)
    last_slot = (first_slot + TILE - 1).clamp(max=num_slots - 1)
    first_block, last_block = first_slot // block_size, last_slot // block_size
    most = int((last_block - first_block).max()) + 1
    of_tile = torch.minimum(first_block[:, None] + torch.arange(most, device=device), last_block[:, None])
    starts, ends = starts[of_tile], ends[of_tile]  # [tiles, most]
    sees_any = ends > starts
    # Ends do not ascend from document to document: the furthest of the blocks in the tile.
    furthest = torch.where(sees_any, ends, 0).amax(dim=1)
    nearest = torch.where(sees_any, starts, num_positions).amin(dim=1)
    first_key = torch.arange(0, num_positions + num_slots, TILE, device=device)
    last_key = first_key + TILE - 1
    of_context = (last_key >= nearest[:, None]) & (first_key < furthest[:, None])
    own_first, own_last = num_positions + first_block * block_size, num_positions + (last_block + 1) * block_size - 1
    return of_context | ((last_key >= own_first[:, None]) & (first_key <= own_last[:, None]))
