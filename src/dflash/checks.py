"""Checks of single configuration values: a plain YAML config takes any type in silence."""

from numbers import Integral


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
        raise ValueError(f"{name}={value!r}: expected a whole number of {minimum} or more{otherwise}.")
