"""Biomedical vision-language training on one set of shared image and clinical-text encoders.

    import medvl
    model = medvl.create_model("convirt")
    model = medvl.load("runs/convirt/best")

Everything is imported on first use: `import medvl` costs milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

from medvl.common import torchvision_cpu
from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl import data as data
    from medvl import encoders as encoders
    from medvl import errors as errors
    from medvl import eval as eval
    from medvl import export as export
    from medvl import losses as losses
    from medvl import models as models
    from medvl import phantom as phantom
    from medvl import schema as schema
    from medvl import train as train
    from medvl.models import create_model as create_model
    from medvl.models import list_models as list_models
    from medvl.models import load as load

__version__ = "0.1.0"

torchvision_cpu.install()  # must come before timm, open_clip or transformers are imported

_SUBMODULES = ("data", "encoders", "errors", "eval", "export", "losses", "models", "phantom", "schema", "train")

_getattr, _dir, _names = lazy_exports(__name__, {".models": ["create_model", "list_models", "load"]})

__all__ = ["__version__", *_names, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"medvl.{name}")
    return _getattr(name)


def __dir__() -> list[str]:
    return sorted({*_dir(), *_SUBMODULES})
