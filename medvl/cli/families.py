"""Families of commands that are made from classes: `medvl shards` and `medvl eval`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import tyro

from medvl.common.registry import Registry
from medvl.errors import ConfigError

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]
"""A dataclass whose fields become options without a prefix: --out, not --run.out."""


class ClassCommands(Mapping[str, Callable[..., Any]]):
    """Name of a command -> its function, made from the class of this name on first use.

    The function of a class whose package cannot be imported raises the error.

    Args:
        registry: the classes.
        command: function that returns the function of a class by its name.
        others: commands without a class.
    """

    def __init__(
        self,
        registry: Registry[Any],
        command: Callable[[str], Callable[..., Any]],
        others: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._registry = registry
        self._command = command
        self._others = dict(others or {})

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of a command. Raises ConfigError where its package does not load."""
        return self._others[name] if name in self._others else self._command(name)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self:
            raise KeyError(name)
        try:
            return self.function(name)
        except ConfigError:
            return self.summaries()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._others or name in self._registry.names()

    def __iter__(self) -> Iterator[str]:
        yield from self._registry.names()
        yield from self._others

    def __len__(self) -> int:
        return len(self._registry.names()) + len(self._others)

    def is_own(self, name: str) -> bool:
        """Return whether a command is medvl's own, and not that of another package."""
        return name in self._registry.modules or name in self._others

    def summaries(self) -> dict[str, Callable[..., Any]]:
        """Return functions whose docstrings are the summaries, for lists. Imports no class."""
        return {name: self._summary(name) for name in self._registry.names()} | self._others

    def _summary(self, name: str) -> Callable[..., Any]:
        def command() -> Any:
            return self._command(name)()

        command.__doc__ = self._registry.summary(name)
        return command
