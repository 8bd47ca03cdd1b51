"""Where the Hydra configuration lies, and how a resumed run gets its own configuration back."""

import inspect
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dflash.checks import check_fraction, check_integer, suggestion

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT_CONF = _PACKAGE.parents[1] / "conf"

# A relative `config_path` breaks console scripts and wheels, so every command hands Hydra this absolute one.
# The wheel carries the same files as the package `dflash.conf` (see pyproject.toml).
CONF_DIR = str(_CHECKOUT_CONF if (_CHECKOUT_CONF / "train.yaml").exists() else _PACKAGE / "conf")

# In a run folder:
RUN_CONFIG = "config.yaml"  # the whole configuration the run was started with
LAST_CHECKPOINT = "checkpoints/last.ckpt"
BEST_CHECKPOINT = "checkpoints/best.ckpt"


def _no_run_text(resume_from: str) -> str:
    return f"resume_from={resume_from}: found no {RUN_CONFIG} there. Expected the folder of a run of dflash.train."


# hydra.run.dir of `dflash.train`: a resumed run continues in its own folder, any other gets a fresh one.
def _run_folder(resume_from: str | None, fresh: str) -> str:
    # Asked before Hydra creates the folder: a mistyped name must leave none behind.
    if resume_from and not (Path(resume_from) / RUN_CONFIG).is_file():
        raise ValueError(_no_run_text(resume_from))
    return resume_from or fresh


OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)


def instantiate(node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Hydra's `instantiate`, with errors that name the key.

    Raises:
        ValueError: an argument that the target does not have; or the constructor's own, in place of Hydra's account.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    check_arguments(node)
    try:
        return hydra_instantiate(node, *args, **kwargs)
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def named_options(key: str, names: Any, config: DictConfig) -> dict[str, Any]:
    """Several options of a config group, made and by name, where they are compared.

    Args:
        key: of the list: `samplers`, `placements`. The group is called so without its s.
        names: each an option, and after it key=value of what differs from its defaults:
            `bucketed boundaries=optimal num_buckets=20`.
        config: has the groups `cost` and `batch`, which some of them read.

    Raises:
        ValueError: no list of names, or a name that is no option; a value that can not be.
    """
    group = key.removesuffix("s")
    options = sorted(path.stem for path in Path(CONF_DIR, group).glob("*.yaml"))
    if not OmegaConf.is_list(names) or not len(names):
        raise ValueError(f"{key}={names}: expected a list, for example {key}=[{','.join(options[:3])}].")
    named = {}
    for name in map(str, names):
        option, *overrides = name.split()
        if option not in options:
            raise ValueError(
                f"{key}: {name!r} is unknown. Allowed: {', '.join(options)}, each followed by key=value where it "
                f"differs from its defaults.{suggestion(option, options)}"
            )
        node = OmegaConf.load(Path(CONF_DIR, group, f"{option}.yaml"))
        node = OmegaConf.merge(node, OmegaConf.from_dotlist(overrides))
        whole = OmegaConf.create({"cost": config.cost, "batch": config.batch, group: node})
        named[name] = instantiate(whole[group])
    return named


def check_arguments(node: DictConfig) -> None:
    """Refuse keys that the class or function named by `_target_` does not take.

    Raises:
        ValueError: naming the key, what there is, and the nearest of them.
    """
    from hydra.utils import get_object

    parameters = inspect.signature(get_object(node._target_)).parameters.values()
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for key in node:
        if key not in names and not str(key).startswith("_"):
            raise ValueError(
                f"{node._get_full_key(key)} is unknown.{suggestion(str(key), names)} {node._target_} has: "
                f"{', '.join(names)}."
            )


def save_run_config(config: DictConfig, run_folder: Path) -> None:
    """Write the whole configuration into the run folder; one that a resume changed is kept under another name.

    What depends on the place is settled: `cache_dir` becomes absolute, so that the run is found again from any folder.
    """
    path = run_folder / RUN_CONFIG
    settled = OmegaConf.merge(config, {"cache_dir": str(Path(config.cache_dir).absolute())})
    text = OmegaConf.to_yaml(settled, resolve=True)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        num_kept = len(list(run_folder.glob("config.before-resume-*.yaml")))
        path.rename(run_folder / f"config.before-resume-{num_kept + 1}.yaml")
    path.write_text(text, encoding="utf-8")


def check_sweep(config: DictConfig) -> None:
    """Refuse a sweep over several ranks: each rank would be relaunched with the whole sweep.

    Raises:
        ValueError: with what to do.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    ranks = config.trainer.devices * config.trainer.num_nodes
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and ranks > 1:
        raise ValueError(
            f"-m runs its jobs in one process, and trainer.devices={config.trainer.devices}, trainer.num_nodes="
            f"{config.trainer.num_nodes} needs {ranks}. Sweep with trainer.devices=1, or start the runs one by one."
        )


def config_of_run(name: str | Path) -> DictConfig | None:
    """The configuration that a run folder or a checkpoint in it was trained with; None for anything else."""
    path = Path(name)
    config_file = (path.parents[1] if path.suffix == ".ckpt" and len(path.parents) > 1 else path) / RUN_CONFIG
    if not config_file.is_file():
        return None
    config = OmegaConf.load(config_file)
    assert isinstance(config, DictConfig)
    return config


def check_run_options(config: DictConfig) -> None:
    """Refuse values that only a later stage would stumble over.

    Raises:
        ValueError: all that is wrong, each with its key, value and what is allowed.
    """
    minimum = {
        "seed": 0,
        "num_workers": 0,
        "trainer.devices": 1,
        "trainer.num_nodes": 1,
        "trainer.accumulate_grad_batches": 1,
        "trainer.log_every_n_steps": 1,
        "trainer.validate_every_n_steps": 1,
        "trainer.save_every_n_steps": 1,
    }
    optional = {"epochs": 1, "max_steps": 1, "stop_after_steps": 1, "trainer.num_threads": 1}
    mistakes = []
    if "topology" in config:
        mistakes.append("experiment=eight_gpus is one of python -m dflash.plan, which simulates. Leave it out.")
    for key, least in {**minimum, **optional}.items():
        value = OmegaConf.select(config, key)
        if value is None and key in optional:
            continue
        try:
            check_integer(key, value, least, ", or null" if key in optional else "")
        except ValueError as mistake:
            mistakes.append(str(mistake))
    try:
        check_fraction("optimizer.warmup_fraction", config.optimizer.warmup_fraction)
    except ValueError as mistake:
        mistakes.append(str(mistake))
    if config.epochs is None and config.max_steps is None:
        mistakes.append("epochs=null and max_steps=null: give one of the two, the length of training.")
    if mistakes:
        raise ValueError("\n".join(mistakes))


def check_evaluation_options(config: DictConfig, run_config: DictConfig | None) -> None:
    """Refuse what `dflash.evaluate` can not do.

    Args:
        config: of the evaluation.
        run_config: of the run that it evaluates; None for a drafter in the published layout.

    Raises:
        ValueError: all that is wrong, each with its key, value and what is allowed.
    """
    mistakes = []
    if not config.run:
        mistakes.append("run=null: name a run folder, a .ckpt file or an exported drafter, run=outputs/train/...")
    elif run_config is None:
        for key, example in (("target", "target=hf target.name=Qwen/Qwen3-8B"), ("prompts", "prompts=chats.jsonl")):
            if not config.get(key):
                mistakes.append(
                    f"run={config.run} is no run of dflash.train that could name its {key}: give {example}."
                )
    if config.template_kwargs and not config.prompts:
        mistakes.append("template_kwargs is for prompts=<file>; the run's held-out samples are rendered already.")
    if config.prompts and not Path(config.prompts).is_file():
        mistakes.append(f"prompts={config.prompts}: no such file (working folder: {Path.cwd()}).")
    for key, least in (("num_prompts", 1), ("num_threads", 1), ("seed", 0)):
        if config[key] is None and key != "seed":
            continue
        try:
            check_integer(key, config[key], least, "" if key == "seed" else ", or null")
        except ValueError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise ValueError("\n".join(mistakes))


# What a resumed run may change: nothing that shapes its plan, its model or its steps.
_FREE_TO_CHANGE = ("max_steps", "epochs", "stop_after_steps", "num_workers", "trainer", "logger", "callbacks")
_FIXED_TRAINER_KEYS = ("accumulate_grad_batches", "gradient_clip_val", "precision")


def config_of_resumed_run(composed: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration that `resume_from` was started with, and the few overrides that a resume allows.

    Args:
        composed: what Hydra composed from the command line of the resume.
        overrides: that command line's overrides, `key=value` or `group=option`.

    Raises:
        ValueError: the folder holds no run, or an override would change what was trained.
    """
    path = Path(composed.resume_from) / RUN_CONFIG
    if not path.is_file():
        raise ValueError(_no_run_text(composed.resume_from))
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    config.resume_from = composed.resume_from
    config.stop_after_steps = None  # it has been reached; only the command line sets a new one
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        group, _, rest = key.partition(".")
        if key == "resume_from" or group == "hydra":
            continue
        if group not in _FREE_TO_CHANGE or (group == "trainer" and (not rest or rest in _FIXED_TRAINER_KEYS)):
            raise ValueError(
                f"{override} cannot be combined with resume_from: it would change what the run trains on or how. "
                f"Allowed: {', '.join(_FREE_TO_CHANGE)} (of trainer not {', '.join(_FIXED_TRAINER_KEYS)}). To start "
                f"anew from its weights, use init_from={composed.resume_from}."
            )
        OmegaConf.update(config, key, OmegaConf.select(composed, key), force_add=True)
        if key == "epochs":
            config.max_steps = None  # which would win over it
    return config
