"""Seconds, memory and the machine's own limit: what `dflash.bench` measures with."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType


def synchronised_seconds(device: torch.device) -> float:
    """A clock that waits for the device to finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matrix_peak(dtype: torch.dtype, device: torch.device, *, size: int = 4096, attempts: int = 10) -> float:
    """Floating-point operations a second of the best of several square matrix products, with the current threads.

    Args:
        dtype: of the matrices.
        device: where they are multiplied.
        size: rows and columns.
        attempts: of which the fastest counts, after one that does not.
    """
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = left @ right
    best = float("inf")
    for _ in range(attempts):
        begin = synchronised_seconds(device)
        torch.mm(left, right, out=product)
        best = min(best, synchronised_seconds(device) - begin)
    return 2.0 * size**3 / best


def peak_tensor_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """The most memory that tensors made while `function` runs hold at a time, over what was there before.

    On a CPU it is counted from the allocator's own events: the size of the process tells what malloc keeps, too.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ["KINETO_LOG_LEVEL"] = "6"  # else it tells every start and stop on the screen
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    events = [e for e in results.events() if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    events.sort(key=lambda event: event.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    return most
