"""Checks of single configuration values: a plain YAML config takes any type in silence."""

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path


def check_integer(name: str, value: object, minimum: int, otherwise: str = "") -> None:
    """Refuse what is not a whole number of `minimum` or more.

    Args:
        name: the config key, for the error.
        value: what it was set to.
        minimum: the least that is allowed.
        otherwise: what else is allowed, in words: ", or null for no bound".

    Raises:
        ValueError: naming key and value.
    """
    # numpy's integers are Integral too, and so is bool.
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < minimum:
        # 1e3 is a float in YAML.
        meant = f" Did you mean {int(value)}?" if isinstance(value, float) and value.is_integer() else ""
        raise ValueError(f"{name}={value!r}: expected a whole number of {minimum} or more{otherwise}.{meant}")


def check_positive(name: str, value: object) -> None:
    """Refuse what is not a number above 0.

    Raises:
        ValueError: naming key and value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r}: expected a number above 0.")


def check_not_negative(name: str, value: object) -> None:
    """Refuse what is not a number of 0 or more.

    Raises:
        ValueError: naming key and value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name}={value!r}: expected a number of 0 or more.")


def check_fraction(name: str, value: object) -> None:
    """Refuse what is not a number from 0 to 1.

    Raises:
        ValueError: naming key and value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: expected a number in 0..1.")


def suggestion(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """In words, " Did you mean <prefix><nearest>?"; nothing where none of the candidates is near."""
    near = get_close_matches(name, list(candidates), n=1)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def check_new_folder(key: str, folder: Path) -> None:
    """Refuse a folder that exists.

    Raises:
        ValueError: naming key and folder.
    """
    if folder.exists():
        raise ValueError(f"{key}={folder} exists already. Name a folder that does not, so that nothing is overwritten.")
