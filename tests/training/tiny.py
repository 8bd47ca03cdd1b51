"""Tiny drafters, ends and batches in float64, made the same way for several tests."""

from collections.abc import Sequence

import torch
from transformers import Qwen3Config

from dflash.batch import Batch
from dflash.drafter.network import DFlashDrafter
from dflash.target.ends import TargetEnds

VOCAB, WIDTH, CAPTURED, BLOCK, MASK_ID = 11, 8, 2, 4, 10


def tiny_drafter(block_size: int = BLOCK, num_layers: int = 2) -> DFlashDrafter:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=12,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        block_size=block_size,
        dflash_config={"mask_token_id": MASK_ID, "target_layer_ids": list(range(CAPTURED))},
    )
    drafter = DFlashDrafter(config).double()
    with torch.no_grad():  # norms off their initial one, matrices large enough that every term matters
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + (1.0 if parameter.ndim == 1 else 0.0))
    return drafter


def tiny_ends(softcap: float | None = None) -> TargetEnds:
    return TargetEnds(
        embedding=torch.randn(VOCAB, WIDTH, dtype=torch.float64),
        embedding_scale=1.0,
        head=torch.randn(VOCAB, WIDTH, dtype=torch.float64),
        head_bias=None,
        logit_scale=1.0,
        logit_softcap=softcap,
    )


def make_batch(
    masks: Sequence[str], anchors: Sequence[Sequence[int]], pad_to: int | None = None, captured: int = CAPTURED
) -> Batch:
    """A batch of random tokens. A mask is a string, `x` where the token is to be predicted, `.` elsewhere."""
    longest = pad_to or max(map(len, masks))
    input_ids = torch.randint(0, VOCAB - 1, (len(masks), longest))
    loss_mask = torch.zeros(len(masks), longest, dtype=torch.bool)
    for row, mask in enumerate(masks):
        loss_mask[row, : len(mask)] = torch.tensor([c == "x" for c in mask])
    return Batch(
        input_ids=input_ids,
        loss_mask=loss_mask,
        lengths=torch.tensor([len(mask) for mask in masks]),
        sample_ids=torch.arange(len(masks)),
        anchors=torch.tensor([a for row in anchors for a in row], dtype=torch.long),
        anchor_doc=torch.tensor([doc for doc, row in enumerate(anchors) for _ in row], dtype=torch.long),
        hidden=torch.randn(len(masks), longest, captured * WIDTH, dtype=torch.float64),
    )


def rows_of(batch: Batch, rows: Sequence[int], trim: bool = True) -> Batch:
    """The samples `rows` of a batch as a batch of their own, without the padding that only the others needed."""
    length = int(batch.lengths[list(rows)].max()) if trim else batch.input_ids.shape[1]
    keep = [torch.nonzero(batch.anchor_doc == row).flatten() for row in rows]
    assert batch.hidden is not None
    return Batch(
        input_ids=batch.input_ids[list(rows), :length],
        loss_mask=batch.loss_mask[list(rows), :length],
        lengths=batch.lengths[list(rows)],
        sample_ids=batch.sample_ids[list(rows)],
        anchors=torch.cat([batch.anchors[k] for k in keep]),
        anchor_doc=torch.cat([torch.full((len(k),), new) for new, k in enumerate(keep)]),
        hidden=batch.hidden[list(rows), :length],
    )
