"""Imports of the package: public names on first use, and torchvision beside a CPU-only torch."""

import ast
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Public names of a package, imported on first use.


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


# Workaround to import torchvision beside a CPU-only torch.
#
# The torchvision wheel on the package index is built for CUDA. Beside a CPU build of torch its
# compiled extension does not load, and the import then fails where Python code registers a fake
# kernel for `torchvision::nms`, an operator that the extension declares. timm, open_clip and
# transformers import torchvision, so they fail with it.
#
# `repair_torchvision()` adds an import finder that acts only when `torchvision` itself is imported
# and only after that failure: it declares the two missing operator schemas and runs the module
# again. Where torchvision loads natively it does nothing. Still missing afterwards:
# `torchvision.io` codecs, `nms` and `deform_conv2d`.

_MISSING = "torchvision::nms does not exist"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Loader(importlib.abc.Loader):
    """Loader that runs torchvision again with the missing operators declared, where the native
    loader fails.
    """

    def __init__(self, native: importlib.abc.Loader) -> None:
        self.native = native
        self.library: object | None = None  # declared schemas are removed with this object

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.native.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self.native.exec_module(module)
        except RuntimeError as error:
            if _MISSING not in str(error):
                raise
            self._declare_operators()
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            self.native.exec_module(module)

    def _declare_operators(self) -> None:
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(name + _SCHEMA)
        self.library = library


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that wraps the loader of torchvision and of no other module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def repair_torchvision() -> None:
    """Add the finder once. It costs nothing until torchvision is imported."""
    if "torchvision" not in sys.modules and not any(
        isinstance(finder, _Finder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())
