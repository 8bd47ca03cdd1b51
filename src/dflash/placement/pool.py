"""Replicas of the target on devices of their own, at their own pace, before the drafter's."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from weakref import WeakSet

import torch

from dflash.batch import Batch
from dflash.checks import check_integer, check_positive
from dflash.cost import CostModel
from dflash.placement.pipeline import Pipeline, PoolState
from dflash.placement.queues import Part
from dflash.placement.replica import Replica
from dflash.placement.routing import ROUTINGS, route_batch
from dflash.target.ends import TargetEnds, target_ends
from dflash.target.frozen import FrozenTarget


class PoolPlacement:
    """Several targets feed one drafter; of several ranks, each with its own share of the targets.

    Args:
        targets: devices of the replicas of this machine, `[cuda:1,cuda:2]` or `[cpu,cpu]`; `auto`: every CUDA device
            that is no drafter's.
        routing: `least_loaded`: each batch goes to the replica with least before it, by predicted cost;
            `split_by_length`: its samples are cut into length groups, see `length_groups`.
        cost: what a batch costs the target.
        token_budget: tokens of a full batch.
        pad_multiple: length groups are padded to multiples of it.
        max_groups: of a batch, at most.
        queued_batches: each of the two queues holds so many full batches a replica.
        threads_per_replica: of replicas on the CPU; None: as many as the drafter has.
        hang_timeout_seconds: the longest wait for a batch before the run ends.

    Raises:
        ValueError: no replica, or a value that can not be.

    Attributes:
        ends: the target's embedding and LM head, on the drafter's device; once `open` has been called.
        replicas: of this rank; once `open` has been called.
        state: who waited for whom, and the first error.
    """

    ends: TargetEnds

    def __init__(
        self,
        targets: str | Sequence[str] = "auto",
        *,
        routing: str = "least_loaded",
        cost: CostModel,
        token_budget: int,
        pad_multiple: int = 16,
        max_groups: int = 8,
        queued_batches: int = 2,
        threads_per_replica: int | None = None,
        hang_timeout_seconds: float = 600.0,
    ) -> None:
        if isinstance(targets, str) and targets != "auto":
            raise ValueError(f"placement.targets={targets}: expected auto, or a list such as [cuda:1,cuda:2].")
        if not targets:
            raise ValueError("placement.targets=[]: expected auto, or a list such as [cuda:1,cuda:2].")
        if routing not in ROUTINGS:
            raise ValueError(f"placement.routing={routing!r} is unknown. Allowed: {', '.join(ROUTINGS)}.")
        check_integer("placement.max_groups", max_groups, 1)
        check_integer("placement.queued_batches", queued_batches, 1)
        if threads_per_replica is not None:
            check_integer("placement.threads_per_replica", threads_per_replica, 1, ", or null")
        check_positive("placement.hang_timeout_seconds", hang_timeout_seconds)
        self.targets = targets
        self.routing = routing
        self.cost = cost
        self.token_budget = token_budget
        self.pad_multiple = pad_multiple
        self.max_groups = max_groups
        self.queued_batches = queued_batches
        self.threads_per_replica = threads_per_replica
        self.hang_timeout_seconds = hang_timeout_seconds
        self.state = PoolState()
        self.devices: list[torch.device] = []
        self.replicas: list[Replica] = []
        self.pipelines: WeakSet[Pipeline] = WeakSet()  # that have been iterated and not been forgotten

    def lay_out(self, drafter: torch.device, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
        """Decide which devices this rank's replicas are on, before the target is loaded.

        Args:
            drafter: this rank's drafter's device.
            local_rank: among the ranks of this machine.
            local_ranks: of this machine; drafters are on its first GPUs, or on the CPU.

        Returns:
            The device to load the target on.

        Raises:
            ValueError: more processes than ranks; a replica on a drafter's GPU; a device that there is not; fewer
                replicas than ranks.
        """
        if local_rank >= local_ranks:
            raise ValueError(
                f"trainer.devices={local_ranks}, but this is process {local_rank + 1} of this machine. Set "
                "trainer.devices to the number of processes that are started on each."
            )
        drafters = [torch.device("cuda", rank) for rank in range(local_ranks)] if drafter.type == "cuda" else [drafter]
        devices = replica_devices(self.targets, drafters)
        if len(devices) < local_ranks:
            raise ValueError(
                f"placement.targets has {len(devices)} devices for trainer.devices={local_ranks} ranks, each of which "
                "needs one of its own. Name more, lower trainer.devices, or set placement=inline."
            )
        self.drafter = drafter
        self.devices = devices[local_rank::local_ranks]
        return self.devices[0]

    def check_plan(self, packed: bool) -> None:
        """Make sure that batches can be routed as wanted.

        Raises:
            ValueError: packed batches are to be cut.
        """
        if packed and self.routing == "split_by_length":
            raise ValueError(
                "placement.routing=split_by_length saves the padding of padded batches, and sampler=packed has none. "
                "Set placement.routing=least_loaded, or a sampler that pads, for example sampler=random."
            )

    def open(self, target: FrozenTarget) -> None:
        """Take the target in, on the device that `lay_out` named, and copy it to the others."""
        assert target.device == self.devices[0], f"the target is on {target.device}, not on {self.devices[0]}"
        self.ends = target_ends(target.model).to(self.drafter)
        copies = [copy_of(target, device) for device in self.devices[1:]]
        self.replicas = [Replica(replica, self.drafter) for replica in (target, *copies)]

    def lend_target(self) -> AbstractContextManager[FrozenTarget]:
        """The first replica's target for decoding; batches wait for it meanwhile."""
        return self.replicas[0].lend(self.hang_timeout_seconds)

    def close(self) -> None:
        """End the threads of all passes over loaders, also of those that were left early."""
        for pipeline in list(self.pipelines):
            pipeline.stop()

    @property
    def capacity_tokens(self) -> int:
        """Of each of the two queues."""
        return self.queued_batches * self.token_budget * len(self.replicas)

    def feed(self, loader: Iterable[Batch]) -> "PooledLoader":
        """The loader's batches in its order, each with the target's hidden states."""
        return PooledLoader(self, loader)

    def route(self, batch: Batch, loads: Sequence[float]) -> list[Part]:
        """Which replica reads the batch, or which parts of it."""
        return route_batch(
            batch.lengths.numpy(),
            loads,
            packed=batch.cu_seqlens is not None,
            routing=self.routing,
            cost=self.cost,
            max_groups=self.max_groups,
            pad_multiple=self.pad_multiple,
        )


class PooledLoader:
    """A loader whose batches pass through the replicas."""

    def __init__(self, placement: PoolPlacement, loader: Iterable[Batch]) -> None:
        self.placement = placement
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        pool = self.placement
        pipeline = Pipeline(
            self.loader,
            pool.replicas,
            pool.drafter,
            capacity_tokens=pool.capacity_tokens,
            route=pool.route,
            threads_per_replica=pool.threads_per_replica,
            hang_timeout_seconds=pool.hang_timeout_seconds,
            state=pool.state,
        )
        pool.pipelines.add(pipeline)
        return iter(pipeline)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def replica_devices(targets: str | Sequence[str], drafters: Sequence[torch.device]) -> list[torch.device]:
    """The replicas' devices.

    Args:
        targets: `auto`, or a device for each.
        drafters: devices of the drafters.

    Raises:
        ValueError: none is left; one that there is not; one that is a drafter's GPU; CPUs and GPUs together.
    """
    if targets == "auto":
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        devices = [device for device in devices if device not in drafters]
        if not devices:
            found = f"of {torch.cuda.device_count()} CUDA devices, drafters take {len(drafters)}: none is left"
            advice = "Lower trainer.devices, the number of drafters; set placement=inline"
            if drafters[0].type == "cpu":
                found, advice = "there is no CUDA device", "Set placement=inline"
            raise ValueError(
                f"placement.targets=auto: {found} for targets. {advice}; or name devices: placement.targets=[cpu,cpu]."
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
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"placement.targets: {name!r} is not supported. Expected cpu, or cuda:0, cuda:1, ...")
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            if device.index >= torch.cuda.device_count():
                raise ValueError(
                    f"placement.targets: there is no {name} here, only {torch.cuda.device_count()} CUDA devices."
                )
            if device in drafters:
                raise ValueError(
                    f"placement.targets: {name} is a drafter's own device, which it would have to share. Leave it "
                    "out, or set placement=inline."
                )
        devices.append(device)
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            f"placement.targets=[{','.join(targets)}] mixes CPUs and GPUs, whose states differ by their dtype and "
            "rounding: a sample's would depend on which replica reads it. Name devices of one kind."
        )
    return devices


def copy_of(target: FrozenTarget, device: torch.device) -> FrozenTarget:
    """A model object of its own, since capturing hooks into it; on the same device its weights are `target`'s."""
    # Weights are copied to where they go: a second target beside the first one may not fit. Tied ones stay tied.
    moved: dict[int, torch.Tensor] = {}
    for weight in target.model.parameters():
        moved[id(weight)] = (
            weight if device == target.device else torch.nn.Parameter(weight.to(device), weight.requires_grad)
        )
    for buffer in target.model.buffers():
        moved[id(buffer)] = buffer.to(device, copy=True)  # some rotary embeddings change theirs with every pass
    return FrozenTarget(copy.deepcopy(target.model, moved), target.layer_ids, device, target.prefill_chunk)
