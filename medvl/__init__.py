"""Biomedical vision-language training on one set of shared image and clinical-text encoders.

    import medvl
    model = medvl.create_model("convirt")
    model = medvl.load("runs/convirt/best")

Everything is imported on first use: `import medvl` costs milliseconds.
"""

import importlib
from typing import Any

from medvl import _torchvision

__version__ = "0.1.0"

_torchvision.install()  # must come before timm, open_clip or transformers are imported

_LAZY = {
    "create_model": "medvl.models",
    "list_models": "medvl.models",
    "load": "medvl.models",
}
_SUBMODULES = (
    *("data", "encoders", "errors", "eval", "export"),
    *("files", "losses", "models", "phantom", "schema", "train"),
)

__all__ = ["__version__", *_LAZY, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"medvl.{name}")
    raise AttributeError(f"module 'medvl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
