"""From samples of the token dataset to one batch, padded or packed, its anchors drawn."""

from collections.abc import Sequence

import numpy as np
import torch

from dflash.anchors import draw_anchors
from dflash.batch import Batch
from dflash.data.tokens import TokenDataset
from dflash.samplers.limits import BatchLimits


def collate(
    dataset: TokenDataset,
    sample_ids: Sequence[int] | np.ndarray,
    limits: BatchLimits,
    *,
    packed: bool,
    seed: int,
    epoch: int,
) -> Batch:
    """Pad samples on the right to their longest, or put them behind each other in one row, and draw their anchors.

    Args:
        dataset: where the samples lie.
        sample_ids: rows of the dataset, D of them.
        limits: gives the padding, the truncation and the anchors a sample.
        packed: one row instead of D.
        seed: of the anchors.
        epoch: of this visit.

    Returns:
        A batch of [D, S], S the longest sample; or packed of [1, S], S all of them. S is rounded up to
        `limits.pad_multiple`.
    """
    samples = [dataset.sample(int(i)) for i in sample_ids]
    full_lengths = np.array([len(sample.input_ids) for sample in samples])
    lengths = limits.planned_lengths(full_lengths)
    ends = np.cumsum(lengths)
    row_length = int(limits.padded_lengths(ends[-1:] if packed else lengths).max())
    starts = ends - lengths if packed else np.arange(len(samples)) * row_length
    num_rows = 1 if packed else len(samples)
    input_ids = np.zeros(num_rows * row_length, dtype=np.int64)  # any id will do for padding: no real position sees it
    loss_mask = np.zeros(num_rows * row_length, dtype=np.bool_)
    anchors = []
    for sample, sample_id, start, length in zip(samples, sample_ids, starts, lengths, strict=True):
        mask = sample.loss_mask[:length]
        input_ids[start : start + length] = sample.input_ids[:length]
        loss_mask[start : start + length] = mask
        anchors.append(draw_anchors(mask, limits.anchors_per_sample, seed=seed, epoch=epoch, sample_id=int(sample_id)))
    return Batch(
        input_ids=torch.from_numpy(input_ids).view(num_rows, row_length),
        loss_mask=torch.from_numpy(loss_mask).view(num_rows, row_length),
        lengths=torch.from_numpy(lengths.astype(np.int64)),
        sample_ids=torch.as_tensor(np.asarray(sample_ids, dtype=np.int64)),
        anchors=torch.from_numpy(np.concatenate(anchors)),
        anchor_doc=torch.from_numpy(np.repeat(np.arange(len(samples)), [len(a) for a in anchors])),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)) if packed else None,
        epoch=epoch,
        num_truncated=int((lengths < full_lengths).sum()),
    )
