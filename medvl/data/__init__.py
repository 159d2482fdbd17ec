"""From a corpus on disk to batches: reading, de-identification, corpora, splits, shards, loader."""

import importlib
from typing import Any

_LAZY = {
    "read_dicom": "medvl.data.dicom",
    "DicomImage": "medvl.data.dicom",
    "parse_report": "medvl.data.reports",
    "label_report": "medvl.data.labeler",
    "Report": "medvl.data.reports",
    "Deidentifier": "medvl.data.deid",
    "open_loader": "medvl.data.loader",
    "load_tokenizer": "medvl.data.tokenize",
    "train_wordpiece": "medvl.data.tokenize",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'medvl.data' has no attribute {name!r}")
