"""Public names of a package, imported on first use."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names are imported on
    first use.

    The names are those that its `__init__.py` imports under `if TYPE_CHECKING`: type checkers and
    Python read one list.

    Args:
        package: the package's `__name__`.
        file: the package's `__file__`.
    """
    module_of: dict[str, str] = {}
    for block in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    module_of |= {alias.name: node.module for alias in node.names}

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        value = importlib.import_module(f"{package}.{name}" if module == package else module)
        if module != package:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return getattr_, dir_, sorted(module_of)
