"""Sample lengths as real conversation data has them: lognormal, most of them short and a few very long."""

import numpy as np
from numpy.typing import NDArray


def lognormal_lengths(
    num_samples: int, *, median_tokens: float, log_sigma: float, shortest_tokens: int, longest_tokens: int, seed: int
) -> NDArray[np.int64]:
    """Draw lengths whose logarithm is normal, then clip them.

    Args:
        num_samples: N.
        median_tokens: of the distribution before clipping.
        log_sigma: standard deviation of the natural logarithm.
        shortest_tokens: shorter ones become this.
        longest_tokens: longer ones become this.
        seed: of the draw; equal seeds give equal lengths.

    Returns:
        [N] int64.
    """
    drawn = np.random.default_rng(seed).lognormal(np.log(median_tokens), log_sigma, num_samples)
    return np.clip(np.rint(drawn), shortest_tokens, longest_tokens).astype(np.int64)
