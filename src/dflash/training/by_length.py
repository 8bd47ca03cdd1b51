"""Sums by length of the sample, in fixed buckets of powers of two."""

import torch
from torch import Tensor

from dflash.batch import Batch
from dflash.metric_names import length_bucket
from dflash.training.objective import BlockOutcome

NUM_LENGTH_BUCKETS = 32


def bucket_of_samples(batch: Batch) -> Tensor:
    """[B] int64 on the CPU: the bucket of each sample."""
    return torch.tensor([length_bucket(length) for length in batch.lengths.tolist()])


def loss_by_length(batch: Batch, outcome: BlockOutcome) -> Tensor:
    """[2, NUM_LENGTH_BUCKETS] float64 on the CPU: sum of weight * cross-entropy, and sum of weights, of each bucket."""
    bucket_of_block = bucket_of_samples(batch)[batch.anchor_doc.cpu()]
    sums = torch.zeros(2, NUM_LENGTH_BUCKETS, dtype=torch.float64)
    sums[0].index_add_(0, bucket_of_block, (outcome.weights * outcome.cross_entropy).sum(dim=1).double().cpu())
    sums[1].index_add_(0, bucket_of_block, outcome.weights.sum(dim=1).double().cpu())
    return sums
