"""Classes that other packages add by entry points."""

import importlib.metadata
from typing import TypeVar

from medvl.errors import ConfigError

Base = TypeVar("Base")


def load_class(
    point: importlib.metadata.EntryPoint,
    source: str,
    base: type[Base],
    *,
    attribute: str,
    decorator: str,
) -> type[Base]:
    """Return the class of an entry point.

    Args:
        point: the entry point.
        source: what errors call it.
        base: class that it must extend.
        attribute: class attribute with the name under which it is registered.
        decorator: name of the decorator that registers it.

    Raises ConfigError unless it is a class of `base` registered under the name of its entry point.
    """
    try:
        cls = point.load()
    except Exception as error:  # code of another package may raise anything
        message = f"{source} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(message, "unsupported") from error
    if (
        not (isinstance(cls, type) and issubclass(cls, base))
        or getattr(cls, attribute, None) != point.name
    ):
        message = (
            f"expected {source} to be a {base.__name__} decorated with "
            f'@{decorator}("{point.name}"), got {cls!r}'
        )
        raise ConfigError(message, "wrong_type")
    return cls
