"""Which of a machine's ranks this process is, and where its drafter goes. Lightning starts the ranks."""

import atexit
import subprocess
import time

import torch
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch import Trainer

_LAST_WORDS_SECONDS = 3.0  # for other ranks to say what failed there, where that came first


def local_rank_here() -> int:
    """This process's rank among those of its machine, as Lightning's trainer will find it later."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment):
        if environment.detect():
            return int(environment().local_rank())
    return LightningEnvironment().local_rank()


def drafter_device(accelerator: str, local_rank: int) -> torch.device:
    """Device of this rank's drafter: its GPU, or the CPU where there is none or where it is asked for.

    Raises:
        ValueError: an accelerator that there is not, or that is not supported.
    """
    if accelerator not in ("auto", "gpu", "cuda", "cpu"):
        raise ValueError(f"trainer.accelerator={accelerator!r} is not supported. Allowed: auto, gpu, cpu.")
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.accelerator={accelerator}, but torch finds no CUDA device here. Set trainer.accelerator=auto or "
            "cpu, or install a torch that was built for this machine's GPU."
        )
    if accelerator != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def end_started_ranks(trainer: Trainer) -> None:
    """After a failure of this process: when it ends, those that Lightning started from it end, too.

    They may wait in a reduction for this one, with NCCL for half an hour, their GPUs in use. Where ranks are started by
    others than Lightning (torchrun, SLURM), these end them.
    """
    started: list[subprocess.Popen[bytes]] = getattr(trainer.strategy.launcher, "procs", [])
    processes = list(started)
    started.clear()  # Lightning's observer has the same list: it would kill this process before it can say what failed

    def end() -> None:
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()

    atexit.register(end)
