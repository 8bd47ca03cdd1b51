"""Target and drafter on one device: the target runs when the training loop asks for the next batch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from dflash.batch import Batch
from dflash.target.ends import TargetEnds, target_ends
from dflash.target.frozen import FrozenTarget


class InlinePlacement:
    """One target beside the drafter.

    Args:
        target: on the drafter's device.

    Attributes:
        ends: the target's embedding and LM head, on the drafter's device.
    """

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        self.ends: TargetEnds = target_ends(target.model)

    def feed(self, loader: Iterable[Batch]) -> "FedLoader":
        """The loader's batches in its order, each with the target's hidden states."""
        return FedLoader(loader, self.target)


@dataclass(frozen=True)
class FedLoader:
    """A loader whose batches pass through the target."""

    loader: Iterable[Batch]
    target: FrozenTarget

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            fed = batch.to(self.target.device)
            fed.hidden = self.target.hidden_states(fed.input_ids)
            yield fed

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def drafter_device(accelerator: str, local_rank: int) -> torch.device:
    """Device of this rank's drafter: its GPU where Lightning will use GPUs, else the CPU."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
