"""Replicas of the target on devices of their own, at their own pace, before the drafter's."""

import copy
from collections.abc import Iterable, Iterator, Sequence

import torch

from dflash.batch import Batch
from dflash.checks import check_integer, check_positive
from dflash.cost import CostModel
from dflash.placement.pipeline import Pipeline, PipelineFigures, Replica
from dflash.target.ends import TargetEnds, target_ends
from dflash.target.frozen import FrozenTarget


class PoolPlacement:
    """Several targets feed one drafter.

    Args:
        targets: devices of the replicas, `[cuda:1,cuda:2]` or `[cpu,cpu]`; `auto`: every CUDA device but the drafter's.
        cost: what a batch costs the target, by which batches go to the replica with least before it.
        token_budget: tokens of a full batch.
        queued_batches: each of the two queues holds so many full batches a replica.
        hang_timeout_seconds: the longest wait for a batch before the run ends.

    Raises:
        ValueError: no replica, or a value out of range.

    Attributes:
        target: for decoding, once `open` has been called; beside the replicas.
        ends: the target's embedding and LM head, on the drafter's device; once `open` has been called.
        figures: who waited for whom.
    """

    target: FrozenTarget
    ends: TargetEnds

    def __init__(
        self,
        targets: str | Sequence[str] = "auto",
        *,
        cost: CostModel,
        token_budget: int,
        queued_batches: int = 2,
        hang_timeout_seconds: float = 600.0,
    ) -> None:
        if isinstance(targets, str) and targets != "auto":
            raise ValueError(f"placement.targets={targets}: expected auto, or a list such as [cuda:1,cuda:2].")
        if not targets:
            raise ValueError("placement.targets=[]: expected auto, or a list such as [cuda:1,cuda:2].")
        check_integer("placement.queued_batches", queued_batches, 1)
        check_positive("placement.hang_timeout_seconds", hang_timeout_seconds)
        self.targets = targets
        self.cost = cost
        self.token_budget = token_budget
        self.queued_batches = queued_batches
        self.hang_timeout_seconds = hang_timeout_seconds
        self.figures = PipelineFigures()
        self.replicas: list[Replica] = []

    def check(self, drafter: torch.device, num_ranks: int) -> None:
        """Find mistakes before the target is loaded.

        Raises:
            ValueError: a replica on the drafter's GPU; a device that there is not; none at all; several ranks.
        """
        if num_ranks > 1:
            raise ValueError(
                f"placement=pool with {num_ranks} ranks: targets are not dealt to ranks yet, each would take all of "
                "them. Set trainer.devices=1, or placement=inline."
            )
        replica_devices(self.targets, drafter)

    def open(self, target: FrozenTarget) -> None:
        """Copy the target to every replica's device; on its own device the weights are shared."""
        self.target = target
        self.ends = target_ends(target.model)
        self.replicas = [Replica(_copy_of(target, device)) for device in replica_devices(self.targets, target.device)]

    @property
    def capacity_tokens(self) -> int:
        """Of each of the two queues."""
        return self.queued_batches * self.token_budget * len(self.replicas)

    def feed(self, loader: Iterable[Batch]) -> "PooledLoader":
        """The loader's batches in its order, each with the target's hidden states."""
        return PooledLoader(self, loader)

    def batch_cost(self, batch: Batch) -> float:
        """Predicted cost of a batch for a replica; packed rows attend within their samples."""
        tokens = float(batch.num_padded_tokens)
        lengths = batch.lengths.double()
        squares = float((lengths**2).sum()) if batch.cu_seqlens is not None else tokens * batch.input_ids.shape[1]
        return float(self.cost.target(tokens, squares))


class PooledLoader:
    """A loader whose batches pass through the replicas."""

    def __init__(self, placement: PoolPlacement, loader: Iterable[Batch]) -> None:
        self.placement = placement
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        pool = self.placement
        return iter(
            Pipeline(
                self.loader,
                pool.replicas,
                pool.target.device,
                capacity_tokens=pool.capacity_tokens,
                cost=pool.batch_cost,
                hang_timeout_seconds=pool.hang_timeout_seconds,
                figures=pool.figures,
            )
        )

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def replica_devices(targets: str | Sequence[str], drafter: torch.device) -> list[torch.device]:
    """The replicas' devices.

    Args:
        targets: `auto`, or a device for each.
        drafter: the drafter's device.

    Raises:
        ValueError: none is left; one that there is not; one that is the drafter's GPU.
    """
    if targets == "auto":
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        devices = [device for device in devices if device != drafter]
        if not devices:
            raise ValueError(
                "placement.targets=auto found no CUDA device beside the drafter's. Set placement=inline, or name "
                "devices: placement.targets=[cpu,cpu]."
            )
        return devices
    devices = []
    for name in targets:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"placement.targets: {name!r} is no device. Expected cpu, or cuda:0, cuda:1, ..."
            ) from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"placement.targets: there is no {name} here, only {torch.cuda.device_count()} CUDA devices."
            )
        if device.type == "cuda" and torch.device("cuda", device.index or 0) == drafter:
            raise ValueError(
                f"placement.targets: {name} is the drafter's own device, which it would have to share. Leave it out, "
                "or set placement=inline."
            )
        devices.append(device)
    return devices


def _copy_of(target: FrozenTarget, device: torch.device) -> FrozenTarget:
    """A model object of its own, since capturing hooks into it; on the same device its weights are `target`'s."""
    weights = [*target.model.parameters(), *target.model.buffers()]
    shared = {id(weight): weight for weight in weights} if device == target.device else {}
    return FrozenTarget(copy.deepcopy(target.model, shared), target.layer_ids, device, target.prefill_chunk)
