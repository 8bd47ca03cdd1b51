"""Which of a machine's ranks this process is, and where its drafter goes. Lightning starts the ranks."""

import torch
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)


def local_rank_here() -> int:
    """This process's rank among those of its machine, as Lightning's trainer will find it later."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment):
        if environment.detect():
            return int(environment().local_rank())
    return LightningEnvironment().local_rank()


def drafter_device(accelerator: str, local_rank: int) -> torch.device:
    """Device of this rank's drafter: its GPU where Lightning will use GPUs, else the CPU."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
