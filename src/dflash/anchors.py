"""Which positions of a sample a block may start from, and which of them a training step draws.

The draw is a property of (seed, epoch, sample): padded or packed, whatever the sampler, the company or a resume, the
same sample trains the same blocks in the same epoch.
"""

import numpy as np
from numpy.typing import NDArray


def valid_anchors(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions t with mask[t] and mask[t + 1]: the anchor was predicted, and there is something to predict after it.

    Args:
        loss_mask: [S] bool.

    Returns:
        [num_anchorable] int64, ascending.
    """
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def draw_anchors(
    loss_mask: NDArray[np.bool_], anchors_per_sample: int, *, seed: int, epoch: int, sample_id: int
) -> NDArray[np.int64]:
    """Draw at most `anchors_per_sample` valid anchors, uniformly without replacement.

    Args:
        loss_mask: [S] bool.
        anchors_per_sample: how many at most.
        seed: the run's seed.
        epoch: epoch of this visit to the sample.
        sample_id: row in the token dataset.

    Returns:
        [N] int64 positions, ascending.
    """
    valid = valid_anchors(loss_mask)
    if len(valid) <= anchors_per_sample:
        return valid
    generator = np.random.default_rng([seed, epoch, sample_id])
    return np.sort(generator.choice(valid, size=anchors_per_sample, replace=False))
