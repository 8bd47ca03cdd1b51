"""Samplers by name, where several are compared: `bucketed boundaries=optimal num_buckets=20`."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dflash.checks import suggestion
from dflash.config import CONF_DIR, instantiate
from dflash.samplers.base import LengthBatchSampler


def named_samplers(names: Any, cost: DictConfig) -> dict[str, LengthBatchSampler]:
    """The samplers of a list of names.

    Args:
        names: each an option of the config group `sampler`, and after it key=value of what differs from its defaults.
        cost: the config group `cost`, which some of them read.

    Raises:
        ValueError: no list of names, or a name that is no sampler.
    """
    if not OmegaConf.is_list(names) or not len(names):
        raise ValueError(f"samplers={names}: expected a list, for example samplers=[sorted,random,bucketed].")
    return {str(name): _named_sampler(str(name), cost) for name in names}


def _named_sampler(name: str, cost: DictConfig) -> LengthBatchSampler:
    options = sorted(path.stem for path in Path(CONF_DIR, "sampler").glob("*.yaml"))
    option, *overrides = name.split()
    if option not in options:
        raise ValueError(
            f"samplers: {name!r} is unknown. Allowed: {', '.join(options)}, each followed by key=value where it "
            f"differs from its defaults.{suggestion(option, options)}"
        )
    node = OmegaConf.load(Path(CONF_DIR, "sampler", f"{option}.yaml"))
    node = OmegaConf.merge(node, OmegaConf.from_dotlist(overrides))
    return instantiate(OmegaConf.create({"cost": cost, "sampler": node}).sampler)
