"""Public names of a package, imported on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names are imported on first use.

    The package repeats the imports under `if TYPE_CHECKING`, so that type checkers see them.

    Args:
        package: the package's `__name__`.
        names: module that defines them -> public names; a module relative to the package may begin with a dot.
    """
    module_of = {name: module for module, listed in names.items() for name in listed}

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return getattr_, dir_, sorted(module_of)
