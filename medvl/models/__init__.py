"""Published systems, one file each, on the shared encoders; and how a model is made, saved and loaded."""

from typing import TYPE_CHECKING

from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl.models.base import System as System
    from medvl.models.base import SystemConfig as SystemConfig
    from medvl.models.base import TwoTowers as TwoTowers
    from medvl.models.checkpoint import load as load
    from medvl.models.checkpoint import load_towers as load_towers
    from medvl.models.checkpoint import load_weights as load_weights
    from medvl.models.checkpoint import save as save
    from medvl.models.checkpoint import warm_start as warm_start
    from medvl.models.downstream.classifier import Classifier as Classifier
    from medvl.models.downstream.classifier import ClassifierConfig as ClassifierConfig
    from medvl.models.downstream.classifier import create_classifier as create_classifier
    from medvl.models.downstream.dense_base import DenseConfig as DenseConfig
    from medvl.models.downstream.dense_base import DenseModel as DenseModel
    from medvl.models.downstream.dense_base import create_dense as create_dense
    from medvl.models.downstream.detector import Detector as Detector
    from medvl.models.downstream.detector import DetectorConfig as DetectorConfig
    from medvl.models.downstream.segmenter import Segmenter as Segmenter
    from medvl.models.downstream.segmenter import SegmenterConfig as SegmenterConfig
    from medvl.models.downstream.vqa.config import DecoderConfig as DecoderConfig
    from medvl.models.downstream.vqa.config import VQAConfig as VQAConfig
    from medvl.models.downstream.vqa.model import VQA as VQA
    from medvl.models.downstream.vqa.model import create_vqa as create_vqa
    from medvl.models.dual_encoders.base import ContrastiveEncoder as ContrastiveEncoder
    from medvl.models.dual_encoders.base import DualEncoder as DualEncoder
    from medvl.models.dual_encoders.base import DualEncoderConfig as DualEncoderConfig
    from medvl.models.dual_encoders.base import projection_head as projection_head
    from medvl.models.dual_encoders.chexzero import CheXzero as CheXzero
    from medvl.models.dual_encoders.chexzero import CheXzeroConfig as CheXzeroConfig
    from medvl.models.dual_encoders.clip import CLIP as CLIP
    from medvl.models.dual_encoders.clip import CLIPConfig as CLIPConfig
    from medvl.models.dual_encoders.convirt import ConVIRT as ConVIRT
    from medvl.models.dual_encoders.convirt import ConVIRTConfig as ConVIRTConfig
    from medvl.models.dual_encoders.gloria import GLoRIA as GLoRIA
    from medvl.models.dual_encoders.gloria import GLoRIAConfig as GLoRIAConfig
    from medvl.models.dual_encoders.local import LocalDualConfig as LocalDualConfig
    from medvl.models.dual_encoders.local import LocalDualEncoder as LocalDualEncoder
    from medvl.models.dual_encoders.pairs import Pairs as Pairs
    from medvl.models.dual_encoders.siglip import SigLIP as SigLIP
    from medvl.models.dual_encoders.siglip import SigLIPConfig as SigLIPConfig
    from medvl.models.factory import create_model as create_model
    from medvl.models.fusion_encoders.albef import ALBEF as ALBEF
    from medvl.models.fusion_encoders.albef import ALBEFConfig as ALBEFConfig
    from medvl.models.fusion_encoders.aligned import AlignedFusionConfig as AlignedFusionConfig
    from medvl.models.fusion_encoders.aligned import AlignedFusionModel as AlignedFusionModel
    from medvl.models.fusion_encoders.base import FusionModel as FusionModel
    from medvl.models.fusion_encoders.config import FusionConfig as FusionConfig
    from medvl.models.fusion_encoders.config import StreamConfig as StreamConfig
    from medvl.models.fusion_encoders.joint_bert import JointBERT as JointBERT
    from medvl.models.fusion_encoders.m3ae import M3AE as M3AE
    from medvl.models.fusion_encoders.m3ae import M3AEConfig as M3AEConfig
    from medvl.models.fusion_encoders.medvill import MedViLL as MedViLL
    from medvl.models.fusion_encoders.medvill import MedViLLConfig as MedViLLConfig
    from medvl.models.fusion_encoders.objectives import Corruption as Corruption
    from medvl.models.fusion_encoders.objectives import Encoded as Encoded
    from medvl.models.fusion_encoders.objectives import ImageTextMatching as ImageTextMatching
    from medvl.models.fusion_encoders.objectives import MaskedImageModeling as MaskedImageModeling
    from medvl.models.fusion_encoders.objectives import MaskedLanguageModeling as MaskedLanguageModeling
    from medvl.models.fusion_encoders.objectives import Objective as Objective
    from medvl.models.fusion_encoders.streams import DualStreamConfig as DualStreamConfig
    from medvl.models.fusion_encoders.streams import DualStreamModel as DualStreamModel
    from medvl.models.fusion_encoders.streams import SingleStreamConfig as SingleStreamConfig
    from medvl.models.fusion_encoders.streams import SingleStreamModel as SingleStreamModel
    from medvl.models.fusion_encoders.streams import StreamModel as StreamModel
    from medvl.models.registry import list_models as list_models
    from medvl.models.registry import register_system as register_system

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".base": ["System", "SystemConfig", "TwoTowers"],
        ".checkpoint": ["load", "load_towers", "load_weights", "save", "warm_start"],
        ".downstream.classifier": ["Classifier", "ClassifierConfig", "create_classifier"],
        ".downstream.dense_base": ["DenseConfig", "DenseModel", "create_dense"],
        ".downstream.detector": ["Detector", "DetectorConfig"],
        ".downstream.segmenter": ["Segmenter", "SegmenterConfig"],
        ".downstream.vqa.model": ["VQA", "create_vqa"],
        ".dual_encoders.base": ["ContrastiveEncoder", "DualEncoder", "DualEncoderConfig", "projection_head"],
        ".dual_encoders.chexzero": ["CheXzero", "CheXzeroConfig"],
        ".dual_encoders.clip": ["CLIP", "CLIPConfig"],
        ".dual_encoders.convirt": ["ConVIRT", "ConVIRTConfig"],
        ".dual_encoders.gloria": ["GLoRIA", "GLoRIAConfig"],
        ".dual_encoders.local": ["LocalDualConfig", "LocalDualEncoder"],
        ".dual_encoders.pairs": ["Pairs"],
        ".dual_encoders.siglip": ["SigLIP", "SigLIPConfig"],
        ".downstream.vqa.config": ["DecoderConfig", "VQAConfig"],
        ".fusion_encoders.aligned": ["AlignedFusionConfig", "AlignedFusionModel"],
        ".fusion_encoders.joint_bert": ["JointBERT"],
        ".factory": ["create_model"],
        ".fusion_encoders.albef": ["ALBEF", "ALBEFConfig"],
        ".fusion_encoders.base": ["FusionModel"],
        ".fusion_encoders.config": ["FusionConfig", "StreamConfig"],
        ".fusion_encoders.m3ae": ["M3AE", "M3AEConfig"],
        ".fusion_encoders.medvill": ["MedViLL", "MedViLLConfig"],
        ".fusion_encoders.objectives": [
            "Corruption",
            "Encoded",
            "ImageTextMatching",
            "MaskedImageModeling",
            "MaskedLanguageModeling",
            "Objective",
        ],
        ".fusion_encoders.streams": [
            "DualStreamConfig",
            "DualStreamModel",
            "SingleStreamConfig",
            "SingleStreamModel",
            "StreamModel",
        ],
        ".registry": ["list_models", "register_system"],
    },
)
