"""Published systems, one file each, on the shared encoders; and how a model is made, saved and loaded."""

import importlib
from typing import Any

_LAZY = {
    "create_classifier": "medvl.models.classifier",
    "create_dense": "medvl.models.dense",
    "create_vqa": "medvl.models.vqa",
    "create_model": "medvl.models.registry",
    "list_models": "medvl.models.registry",
    "load": "medvl.models.storage",
    "load_towers": "medvl.models.storage",
    "warm_start": "medvl.models.storage",
    "load_weights": "medvl.models.storage",
    "save": "medvl.models.storage",
    "ContrastiveEncoder": "medvl.models.dual",
    "DualEncoder": "medvl.models.dual",
    "VQA": "medvl.models.vqa",
    "Classifier": "medvl.models.classifier",
    "ClassifierConfig": "medvl.models.classifier_config",
    "Detector": "medvl.models.detector",
    "DetectorConfig": "medvl.models.dense_config",
    "Segmenter": "medvl.models.segmenter",
    "SegmenterConfig": "medvl.models.dense_config",
    "FusionModel": "medvl.models.fusion_model",
    "System": "medvl.models.base",
    "ALBEFConfig": "medvl.models.fusion_configs",
    "CheXzeroConfig": "medvl.models.clip_configs",
    "CLIPConfig": "medvl.models.clip_configs",
    "ConVIRTConfig": "medvl.models.configs",
    "DualStreamConfig": "medvl.models.fusion_configs",
    "GLoRIAConfig": "medvl.models.gloria_config",
    "M3AEConfig": "medvl.models.fusion_configs",
    "MedViLLConfig": "medvl.models.fusion_configs",
    "SigLIPConfig": "medvl.models.clip_configs",
    "SingleStreamConfig": "medvl.models.fusion_configs",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'medvl.models' has no attribute {name!r}")
