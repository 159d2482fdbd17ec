"""Names of classes: medvl's own, those of other packages by entry points, and registered ones.

A class registers itself when its module is imported. medvl's own modules are imported on first use,
so that a list of names costs nothing.
"""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from medvl.common.config_io import nearest
from medvl.errors import ConfigError

_log = logging.getLogger(__name__)

Base = TypeVar("Base")


class Registry(Generic[Base]):
    """Classes of one kind by name.

    Args:
        base: module and name of the class that all extend, such as "medvl.models.base:System".
        kind: what errors call one of them, such as "corpus".
        modules: name of each of medvl's own -> module that defines it, in the order of lists.
        group: group of entry points by which other packages add classes.
        attribute: class attribute that holds the name.
        decorator: name of the decorator that registers a class.
    """

    def __init__(
        self,
        base: str,
        *,
        kind: str,
        modules: Mapping[str, str],
        group: str,
        attribute: str = "name",
        decorator: str,
    ) -> None:
        self.base = base
        self.kind = kind
        self.modules = modules
        self.group = group
        self.attribute = attribute
        self.decorator = decorator
        self.imported: dict[str, type[Base]] = {}
        """Classes imported so far."""

    def check(self, name: str, cls: type[Base]) -> None:
        """Raise ConfigError where the name belongs to another class than `cls`."""
        place = (cls.__module__, cls.__qualname__)
        known = self.imported.get(name)
        if self.modules.get(name, cls.__module__) != cls.__module__ or (
            known is not None
            and (known.__module__, known.__qualname__) != place  # a notebook may run a cell again
        ):
            raise ConfigError(
                f"{self._article} named {name!r} exists already: choose another name",
                "exists",
                field="name",
            )

    def register(self, name: str, cls: type[Base]) -> None:
        """Register a class and set its name. Raises ConfigError as `check`."""
        self.check(name, cls)
        setattr(cls, self.attribute, name)
        self.imported[name] = cls

    def names(self) -> list[str]:
        """Return all names: medvl's own, then those of other packages. Imports no module."""
        others = {*self.imported, *entry_points(self.group)} - self.modules.keys()
        return [*self.modules, *sorted(others)]

    def get(self, name: str) -> type[Base]:
        """Return the class of a name. Imports its module if needed.

        Raises ConfigError where the name is unknown, or its entry point does not load.
        """
        if name not in self.imported:
            if name in self.modules:
                importlib.import_module(self.modules[name])
            elif name in entry_points(self.group):
                self.imported[name] = self._load(entry_points(self.group)[name])
            else:
                message = f"no {self.kind} is named {name!r}: {nearest(name, self.names())}"
                raise ConfigError(message, "unknown_name", field="name")
        return self.imported[name]

    def classes(self) -> Iterator[type[Base]]:
        """Yield the classes of all names; those that do not load are logged and left out."""
        for name in self.names():
            try:
                yield self.get(name)
            except ConfigError as error:
                _log.warning("%s", error)

    def summary(self, name: str) -> str:
        """Return the first paragraph of a class's docstring, or its package. Imports no module."""
        if name in self.imported:
            return _paragraph(self.imported[name].__doc__)
        if name not in self.modules:
            return f"The {self.kind} {name} of the package {self._package(name)}."
        return _summaries(self.modules[name], self.decorator)[name]

    @property
    def _article(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def _package(self, name: str) -> str:
        point = entry_points(self.group)[name]
        return point.dist.name if point.dist is not None else point.module

    def _load(self, point: importlib.metadata.EntryPoint) -> type[Base]:
        """Return the class of an entry point. Raises ConfigError unless it is registered under the
        name of the entry point.
        """
        source = f"{self.kind} {point.name!r} of the package {self._package(point.name)}"
        source = f"{source} ({point.value})"
        try:
            cls = point.load()
        except Exception as error:  # code of another package may raise anything
            message = f"{source} cannot be imported ({type(error).__name__}: {error})"
            raise ConfigError(message, "unsupported") from error
        module, _, base_name = self.base.partition(":")
        base: type[Base] = getattr(importlib.import_module(module), base_name)
        if (
            not (isinstance(cls, type) and issubclass(cls, base))
            or getattr(cls, self.attribute, None) != point.name
        ):
            message = (
                f"expected {source} to be a {base_name} decorated with "
                f'@{self.decorator}("{point.name}"), got {cls!r}'
            )
            raise ConfigError(message, "wrong_type")
        return cls


@functools.cache
def entry_points(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of a group by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


@functools.cache
def _summaries(module: str, decorator: str) -> Mapping[str, str]:
    """Return name -> first paragraph of the docstring of the registered classes in a module's
    source.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    lines = {}
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for call in node.decorator_list:
            match call:
                case ast.Call(ast.Name(called), [ast.Constant(str(name))]) if called == decorator:
                    lines[name] = _paragraph(ast.get_docstring(node))
    return lines


def _paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split())
