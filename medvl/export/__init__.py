"""Checkpoints of other projects into medvl, and medvl's into other formats.

    from medvl.export import export_onnx, import_checkpoint, list_importers, load_encoder

    imported = import_checkpoint("gloria", "chexpert_resnet50.ckpt", out="imported/gloria")
    imported.left_out                         # key of the file -> why it was left out
    load_encoder("imported/gloria/image_encoder")
    export_onnx(medvl.load("runs/convirt/best"), "exported").differences

How a published file's keys correspond to medvl's stands in the tables of `systems_dual`, `systems_fusion` and
`systems_towers`, one line for a key or a family of keys; `families` has the lines of the backbones.
"""

import importlib
from typing import Any

_LAZY = {
    "Exported": "medvl.export.exported",
    "Imported": "medvl.export.importing",
    "export_hugging_face": "medvl.export.to_hugging_face",
    "export_onnx": "medvl.export.to_onnx",
    "export_open_clip": "medvl.export.to_open_clip",
    "import_checkpoint": "medvl.export.importing",
    "list_importers": "medvl.export.importers",
    "load_encoder": "medvl.export.importing",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'medvl.export' has no attribute {name!r}")
