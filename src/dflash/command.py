"""What every command has in common: compose the configuration, run, and turn a mistake into one clear message.

A mistake in what the user wrote ends with exit code 1 and its message on stderr; the traceback is in the job's log, and
on screen with HYDRA_FULL_ERROR=1. Any other exception is a fault of this package and shows its traceback.
"""

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Collection
from functools import wraps
from typing import NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash.checks import suggestion
from dflash.config import CONF_DIR

_FULL_ERROR = "HYDRA_FULL_ERROR"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Nodes whose keys are the user's own: named callbacks, arguments of a chat template.
_OPEN_NODES = ("callbacks", "template_kwargs")


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make a function of a composed configuration into a command with Hydra's command line.

    Args:
        config_name: the primary config in conf/, without suffix.
    """

    def decorate(function: Callable[[DictConfig], None]) -> Callable[[], None]:
        full_error: str | None = None  # what the user has set HYDRA_FULL_ERROR to

        @wraps(function)
        def task(config: DictConfig) -> None:
            from hydra.core.hydra_config import HydraConfig

            is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
            if not is_sweep:  # a sweep ends in Hydra's hands, with its first failure
                _set_full_error(full_error)
            try:
                check_keys(config, config_name, list(HydraConfig.get().overrides.task))
                function(config)
            except ValueError as error:
                if full_error == "1" or is_sweep:  # the other jobs still run
                    raise
                _end(str(error), error)
            except OSError as error:
                if full_error == "1" or is_sweep or error.errno not in _NO_ROOM:
                    raise
                _end(
                    f"{error.filename or 'A file'} could not be written: {error.strerror}. What was written before is "
                    "whole: make room, then continue (a training with resume_from=<its folder>).",
                    error,
                )

        run_hydra = hydra.main(version_base=None, config_path=CONF_DIR, config_name=config_name)(task)

        @wraps(function)
        def main() -> None:
            nonlocal full_error
            full_error = os.environ.get(_FULL_ERROR)
            _set_full_error("1")  # until the task begins: makes Hydra raise what it would print
            try:
                run_hydra()
            except (CompactHydraException, OmegaConfBaseException) as error:
                if full_error == "1":
                    raise
                _end(explain(error, config_name, sys.argv[1:]), error)
            except ValueError as error:
                if full_error == "1":
                    raise
                _end(str(error), error)

        return main

    return decorate


def _set_full_error(value: str | None) -> None:
    os.environ.pop(_FULL_ERROR, None)
    if value is not None:
        os.environ[_FULL_ERROR] = value


def _end(message: str, error: Exception) -> NoReturn:
    """Message to the screen, traceback to the job's log file if there is one yet, exit code 1."""
    where = (type(error), error, error.__traceback__)
    record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, "%s", (message,), where)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
    print(f"Error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def check_keys(config: DictConfig, config_name: str, overrides: list[str]) -> None:
    """Refuse keys that `+key=value` added and nothing reads, and values that are still missing.

    Args:
        config: composed.
        config_name: the primary config.
        overrides: of the command line.

    Raises:
        ValueError: naming the keys, with the nearest right spelling.
    """
    if any(override.startswith("+") for override in overrides):  # Hydra itself refuses all other unknown keys
        loader = GlobalHydra.instance().config_loader()
        pristine = loader.load_configuration(config_name, _group_choices(overrides), run_mode=RunMode.RUN)
        known = _dotted_keys(pristine)
        if unknown := _unknown_keys(config, known):
            raise ValueError("\n".join(_unknown_key_text(key, known) for key in unknown))
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ValueError("\n".join(f"{key} is not given: add {key}=<value> to the command line." for key in missing))


def explain(error: Exception, config_name: str, overrides: list[str]) -> str:
    """What is wrong with a command line that Hydra could not compose."""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not understood. Write key=value, and quote values with = or blanks: 'key=\"a=b\"'."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = sorted(error.options)
        return f"{group}={option} is unknown. Allowed: {', '.join(options)}.{suggestion(option, options, group + '=')}"
    if found := re.match(r"Could not override '([^']+)'", str(error)):
        key, known = found[1], _composable_keys(config_name, overrides)
        if key in known:  # a mapping that would get new keys
            return f"{key}: new keys are added one by one, +{key}.<name>=<value>."
        return _unknown_key_text(key, known)
    if found := re.match(r"ValueError raised while resolving interpolation: (.*)\n    full_key", str(error), re.DOTALL):
        return found[1]  # of a resolver of ours
    cause = error.__cause__
    return f"{error}\n{cause}" if isinstance(cause, OmegaConfBaseException) else str(error)


def _composable_keys(config_name: str, overrides: list[str]) -> set[str]:
    """Every key of the configuration that the group choices among `overrides` give."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(CONF_DIR, version_base=None):
        return _dotted_keys(compose(config_name, _group_choices(overrides)))


def _group_choices(overrides: list[str]) -> list[str]:
    """Those of the overrides that choose an option of a config group."""
    loader = GlobalHydra.instance().config_loader()
    return [o for o in overrides if "=" in o and loader.get_group_options(o.partition("=")[0].lstrip("+"))]


def _dotted_keys(node: DictConfig, prefix: str = "") -> set[str]:
    keys = set()
    for key in map(str, node):
        keys.add(f"{prefix}{key}")
        if (child := _child(node, key)) is not None:
            keys |= _dotted_keys(child, f"{prefix}{key}.")
    return keys


def _unknown_keys(node: DictConfig, known: Collection[str], prefix: str = "") -> list[str]:
    """Keys outside `known`. A node with `_target_` answers for its own arguments, see `config.instantiate`."""
    unknown = []
    for key in map(str, node):
        child = _child(node, key)
        if f"{prefix}{key}" not in known:
            unknown.append(f"{prefix}{key}")
        elif key not in _OPEN_NODES and child is not None and "_target_" not in child:
            unknown += _unknown_keys(child, known, f"{prefix}{key}.")
    return unknown


def _child(node: DictConfig, key: str) -> DictConfig | None:
    child = node._get_node(key)
    return child if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing() else None


def _unknown_key_text(key: str, known: Collection[str]) -> str:
    parent, _, name = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    below = {k.removeprefix(prefix) for k in known if k.startswith(prefix)}
    siblings = sorted(k for k in below if "." not in k and not k.startswith("_"))
    if not siblings:  # the parent itself is unknown
        return f"{key} is unknown.{suggestion(key, sorted(known))}"
    there = f"{parent or 'The configuration'} has: {', '.join(siblings)}."
    return f"{key} is unknown.{suggestion(name, siblings, prefix)} {there}"
