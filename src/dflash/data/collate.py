"""From samples of the token dataset to one padded batch, its anchors drawn."""

from collections.abc import Sequence

import numpy as np
import torch

from dflash.anchors import draw_anchors
from dflash.batch import Batch
from dflash.data.tokens import TokenDataset
from dflash.samplers.limits import BatchLimits


def collate_padded(
    dataset: TokenDataset, sample_ids: Sequence[int] | np.ndarray, limits: BatchLimits, *, seed: int, epoch: int
) -> Batch:
    """Pad samples on the right to their longest, and draw their anchors.

    Args:
        dataset: where the samples lie.
        sample_ids: rows of the dataset, B of them.
        limits: gives the padding, the truncation and the anchors a sample.
        seed: of the anchors.
        epoch: of this visit.

    Returns:
        A batch of [B, S], S the longest sample rounded up to `limits.pad_multiple`.
    """
    samples = [dataset.sample(int(i)) for i in sample_ids]
    full_lengths = np.array([len(sample.input_ids) for sample in samples])
    lengths = limits.planned_lengths(full_lengths)
    shape = (len(samples), int(limits.padded_lengths(lengths).max()))
    input_ids = np.zeros(shape, dtype=np.int64)  # any id will do for padding: no real position sees it
    loss_mask = np.zeros(shape, dtype=np.bool_)
    anchors = []
    for row, (sample, sample_id, length) in enumerate(zip(samples, sample_ids, lengths, strict=True)):
        input_ids[row, :length] = sample.input_ids[:length]
        loss_mask[row, :length] = sample.loss_mask[:length]
        anchors.append(
            draw_anchors(
                loss_mask[row, :length], limits.anchors_per_sample, seed=seed, epoch=epoch, sample_id=int(sample_id)
            )
        )
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        loss_mask=torch.from_numpy(loss_mask),
        lengths=torch.from_numpy(lengths.astype(np.int64)),
        sample_ids=torch.as_tensor(np.asarray(sample_ids, dtype=np.int64)),
        anchors=torch.from_numpy(np.concatenate(anchors)),
        anchor_doc=torch.from_numpy(np.repeat(np.arange(len(samples)), [len(a) for a in anchors])),
        epoch=epoch,
        num_truncated=int((lengths < full_lengths).sum()),
    )
