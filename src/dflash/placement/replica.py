"""A copy of the target on a device of its own, whose states go to the drafter's device without holding that one up."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.batch import Batch
from dflash.placement.split_by_length import IntArray
from dflash.target.frozen import FrozenTarget


class Replica:
    """A target that one pass at a time may use: capturing states changes the model while it lasts.

    Args:
        target: on the replica's device.
        drafter: the device that states are moved to.
    """

    def __init__(self, target: FrozenTarget, drafter: torch.device) -> None:
        self.target = target
        self.drafter = drafter
        self.in_use = threading.Lock()
        # A copy between GPUs makes the receiver's current stream wait for it. On a stream of its own the drafter's
        # kernels do not wait behind a target's pass.
        self.stream = torch.cuda.Stream(drafter) if drafter.type == "cuda" else None

    @contextmanager
    def lend(self, timeout_seconds: float) -> Iterator[FrozenTarget]:
        """The target for somebody else's use.

        Raises:
            RuntimeError: it is not free within so many seconds.
        """
        if not self.in_use.acquire(timeout=timeout_seconds):
            raise RuntimeError(
                f"The target on {self.target.device} was not free within placement.hang_timeout_seconds="
                f"{timeout_seconds:g}: it hangs."
            )
        try:
            with current_device(self.target.device):
                yield self.target
        finally:
            self.in_use.release()

    def read(
        self, batch: Batch, samples: IntArray | None = None, width_tokens: int | None = None
    ) -> tuple[Tensor, float]:
        """States of the batch, or of some of its samples in rows of their own width.

        Args:
            batch: padded, or packed where `samples` is None.
            samples: rows of it; None: the whole batch.
            width_tokens: of these rows, at least their longest sample's; cut to the batch's own.

        Returns:
            [B, S, L * H] on the drafter's device, arrived; and the seconds that it took to get there.
        """
        with self.in_use, current_device(self.target.device):
            if samples is None:
                hidden = self.target.hidden_states(batch.input_ids, batch.cu_seqlens)
            else:
                rows = torch.from_numpy(samples)
                hidden = self.target.hidden_states(batch.input_ids[rows, :width_tokens])
        if hidden.device == self.drafter:
            return hidden, 0.0
        _wait_for(hidden.device)  # so that the copy, which waits for the pass, is timed alone
        begin = time.perf_counter()
        if self.stream is not None and hidden.device.type == "cpu":
            hidden = hidden.pin_memory()  # the driver would copy it piece by piece, and keep other streams waiting
        with self.beside_drafter(), current_device(hidden.device):
            hidden = hidden.to(self.drafter, non_blocking=self.stream is not None)
        if self.stream is not None:
            self.stream.synchronize()
        return hidden, time.perf_counter() - begin

    def join(self, batch: Batch, parts: list[tuple[IntArray, Tensor]]) -> Tensor:
        """States of the whole batch, from those of its parts.

        Args:
            batch: padded.
            parts: rows, and their states [rows, S', L * H] with S' <= S, on the drafter's device.

        Returns:
            [B, S, L * H], zero where no part reaches: on padding.
        """
        with self.beside_drafter():
            hidden = parts[0][1].new_zeros(*batch.input_ids.shape, parts[0][1].shape[-1])
            for samples, states in parts:
                hidden[torch.from_numpy(samples).to(self.drafter), : states.shape[1]] = states
        if self.stream is not None:
            self.stream.synchronize()  # the parts may go: they belong to other streams
        return hidden

    def beside_drafter(self) -> AbstractContextManager[Any]:
        """Within it, work on the drafter's device goes to this replica's stream there."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, CUDA work of this thread that names no device goes to this one, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def use_own_threads(num_threads: int) -> None:
    """Let the calling thread's CPU work run on so many threads, whatever others use.

    `torch.set_num_threads` sets OpenMP's number, which each thread has for itself, and MKL's, which is the process's:
    so that each thread keeps its own, MKL is told per thread, too. (A thread that never called this follows the last
    one that did.)
    """
    torch.set_num_threads(num_threads)
    if set_local := _mkl_set_num_threads_local():
        set_local(num_threads)


def use_common_threads(num_threads: int) -> None:
    """Let the calling thread follow `torch.set_num_threads` again, from this number on."""
    torch.set_num_threads(num_threads)
    if set_local := _mkl_set_num_threads_local():
        set_local(0)


@cache
def _mkl_set_num_threads_local() -> Any:
    """MKL's function, from torch's own copy of it; None where torch was built without."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", None) if library.exists() else None
