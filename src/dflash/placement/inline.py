"""Target and drafter on one device: the target runs when the training loop asks for the next batch."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from dflash.batch import Batch
from dflash.checks import check_not_negative
from dflash.placement.state_cache import StateCache
from dflash.target.ends import TargetEnds, target_ends
from dflash.target.frozen import FrozenTarget


class InlinePlacement:
    """One target beside the drafter.

    Args:
        cache_gib: main memory for the states of samples that have been seen, see `StateCache`; 0 keeps none.

    Raises:
        ValueError: a negative size.

    Attributes:
        target: once `open` has been called.
        ends: the target's embedding and LM head, on the drafter's device; once `open` has been called.
    """

    target: FrozenTarget
    ends: TargetEnds

    def __init__(self, cache_gib: float = 0.0) -> None:
        check_not_negative("placement.cache_gib", cache_gib)
        self.cache_bytes = int(cache_gib * 2**30)

    def lay_out(self, drafter: torch.device, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
        """The device to load the target on: the drafter's."""
        return drafter

    def check_plan(self, packed: bool) -> None:
        """Nothing can be wrong: whole batches are read."""

    def open(self, target: FrozenTarget) -> None:
        """Take the target in. It is the last thing that a run loads, so that mistakes in all else show before."""
        self.target = target
        self.ends = target_ends(target.model)

    def close(self) -> None:
        """Nothing goes on by itself."""

    def lend_target(self) -> AbstractContextManager[FrozenTarget]:
        """The target for decoding."""
        return nullcontext(self.target)

    def feed(self, loader: Iterable[Batch]) -> "FedLoader":
        """The loader's batches in its order, each with the target's hidden states."""
        # Each loader has its own cache: training and validation both count their samples from 0.
        return FedLoader(loader, self.target, StateCache(self.cache_bytes))


@dataclass(frozen=True)
class FedLoader:
    """A loader whose batches pass through the target, or get the states that it gave before."""

    loader: Iterable[Batch]
    target: FrozenTarget
    cache: StateCache

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield self._fed(batch)  # bound to no name: this frame would keep its states until the next ones are there

    def _fed(self, batch: Batch) -> Batch:
        fed = batch.to(self.target.device)
        fed.hidden = self.cache.find(fed)
        if fed.hidden is None:
            fed.hidden = self.target.hidden_states(fed.input_ids, fed.cu_seqlens)
            self.cache.keep(fed)
        return fed

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]
