"""Published systems, one file each, on the shared encoders; creation, saving and loading of
models.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.common.config_io import check_choice as check_choice, check_within as check_within
    from medvl.models.base import (
        EncoderArguments as EncoderArguments,
        System as System,
        SystemConfig as SystemConfig,
        TowersConfig as TowersConfig,
    )
    from medvl.models.checkpoint import (
        consolidate as consolidate,
        interpolate as interpolate,
        load as load,
        load_towers as load_towers,
        save as save,
        warm_start as warm_start,
    )
    from medvl.models.checkpoint_folder import (
        copy_training as copy_training,
        find_checkpoint as find_checkpoint,
        load_weights as load_weights,
        train_manifests as train_manifests,
    )
    from medvl.models.downstream.classifier import (
        ChangeClassifier as ChangeClassifier,
        ChangeClassifierConfig as ChangeClassifierConfig,
        Classifier as Classifier,
        ClassifierConfig as ClassifierConfig,
        LabelModel as LabelModel,
        create_change_classifier as create_change_classifier,
        create_classifier as create_classifier,
    )
    from medvl.models.downstream.dense import (
        DenseConfig as DenseConfig,
        DenseModel as DenseModel,
        MaskModel as MaskModel,
        Segmenter as Segmenter,
        SegmenterConfig as SegmenterConfig,
        create_dense as create_dense,
    )
    from medvl.models.downstream.detector import (
        Detector as Detector,
        DetectorConfig as DetectorConfig,
        RegionSelection as RegionSelection,
    )
    from medvl.models.downstream.fused_classifier import (
        FusedClassifier as FusedClassifier,
        FusedClassifierConfig as FusedClassifierConfig,
        create_fused_classifier as create_fused_classifier,
    )
    from medvl.models.downstream.lvit import LViT as LViT, LViTConfig as LViTConfig
    from medvl.models.downstream.ranking import (
        ChoiceConfig as ChoiceConfig,
        ChoiceModel as ChoiceModel,
        RetrievalConfig as RetrievalConfig,
        RetrievalModel as RetrievalModel,
        create_choices as create_choices,
        create_retrieval as create_retrieval,
    )
    from medvl.models.downstream.regions import create_region_detector as create_region_detector
    from medvl.models.downstream.vqa.decoder import (
        DecoderConfig as DecoderConfig,
        VQAConfig as VQAConfig,
    )
    from medvl.models.downstream.vqa.model import VQA as VQA, create_vqa as create_vqa
    from medvl.models.dual_encoders.bases.base import (
        BertDualConfig as BertDualConfig,
        DualEncoder as DualEncoder,
        DualEncoderConfig as DualEncoderConfig,
        projection_head as projection_head,
    )
    from medvl.models.dual_encoders.bases.local import (
        LocalDualConfig as LocalDualConfig,
        LocalDualEncoder as LocalDualEncoder,
        SentenceDualEncoder as SentenceDualEncoder,
        pool_sentences as pool_sentences,
    )
    from medvl.models.dual_encoders.bases.pairs import Pairs as Pairs
    from medvl.models.dual_encoders.bfspr import BFSPR as BFSPR, BFSPRConfig as BFSPRConfig
    from medvl.models.dual_encoders.biovil import (
        BioViL as BioViL,
        BioViLConfig as BioViLConfig,
    )
    from medvl.models.dual_encoders.biovil_t import (
        BioViLT as BioViLT,
        BioViLTConfig as BioViLTConfig,
    )
    from medvl.models.dual_encoders.carzero import (
        CARZero as CARZero,
        CARZeroConfig as CARZeroConfig,
    )
    from medvl.models.dual_encoders.chexzero import (
        CheXzero as CheXzero,
        CheXzeroConfig as CheXzeroConfig,
    )
    from medvl.models.dual_encoders.clip import CLIP as CLIP, CLIPConfig as CLIPConfig
    from medvl.models.dual_encoders.convirt import (
        ConVIRT as ConVIRT,
        ConVIRTConfig as ConVIRTConfig,
    )
    from medvl.models.dual_encoders.cxrclip import (
        CXRCLIP as CXRCLIP,
        CXRCLIPConfig as CXRCLIPConfig,
    )
    from medvl.models.dual_encoders.gloria import GLoRIA as GLoRIA, GLoRIAConfig as GLoRIAConfig
    from medvl.models.dual_encoders.kad import KAD as KAD, KADConfig as KADConfig
    from medvl.models.dual_encoders.lovt import (
        LocalAnalysis as LocalAnalysis,
        LocalAnalysisConfig as LocalAnalysisConfig,
        LoVT as LoVT,
        LoVTConfig as LoVTConfig,
    )
    from medvl.models.dual_encoders.mavl import MAVL as MAVL, MAVLConfig as MAVLConfig
    from medvl.models.dual_encoders.medclip import (
        MedCLIP as MedCLIP,
        MedCLIPConfig as MedCLIPConfig,
    )
    from medvl.models.dual_encoders.medklip import (
        MedKLIP as MedKLIP,
        MedKLIPConfig as MedKLIPConfig,
    )
    from medvl.models.dual_encoders.mgca import MGCA as MGCA, MGCAConfig as MGCAConfig
    from medvl.models.dual_encoders.mutual_info import (
        MutualInfo as MutualInfo,
        MutualInfoConfig as MutualInfoConfig,
    )
    from medvl.models.dual_encoders.parts.layers import (
        AttentionPool as AttentionPool,
        BatchNormHead as BatchNormHead,
        CrossAttention as CrossAttention,
        MaskedBatchNorm as MaskedBatchNorm,
        attend as attend,
        attention_weights as attention_weights,
    )
    from medvl.models.dual_encoders.radzero import (
        RadZero as RadZero,
        RadZeroConfig as RadZeroConfig,
    )
    from medvl.models.dual_encoders.siglip import SigLIP as SigLIP, SigLIPConfig as SigLIPConfig
    from medvl.models.dual_encoders.umrl import (
        UMRL as UMRL,
        UMRLConfig as UMRLConfig,
        fit_tfidf as fit_tfidf,
    )
    from medvl.models.factory import (
        create_model as create_model,
        create_model_and_transforms as create_model_and_transforms,
        from_pretrained as from_pretrained,
        get_tokenizer as get_tokenizer,
        list_pretrained as list_pretrained,
        push_to_hub as push_to_hub,
        save_pretrained as save_pretrained,
    )
    from medvl.models.fusion_encoders.albef import (
        ALBEF as ALBEF,
        ALBEFConfig as ALBEFConfig,
    )
    from medvl.models.fusion_encoders.arl import (
        ARL as ARL,
        ARLConfig as ARLConfig,
        EntityAlignment as EntityAlignment,
    )
    from medvl.models.fusion_encoders.bases.base import (
        FusionConfig as FusionConfig,
        FusionModel as FusionModel,
        StreamConfig as StreamConfig,
    )
    from medvl.models.fusion_encoders.bases.bert_stream import (
        JointStream as JointStream,
    )
    from medvl.models.fusion_encoders.bases.objectives import (
        Corruption as Corruption,
        Encoded as Encoded,
        ImageTextMatching as ImageTextMatching,
        MaskedImageModeling as MaskedImageModeling,
        MaskedLanguageModeling as MaskedLanguageModeling,
        Objective as Objective,
        WordPatchAlignment as WordPatchAlignment,
    )
    from medvl.models.fusion_encoders.bases.region_model import (
        MaskedObjectLabels as MaskedObjectLabels,
        MaskedRegionClassification as MaskedRegionClassification,
        MaskedRegionFeatures as MaskedRegionFeatures,
        MaskedRegionRegression as MaskedRegionRegression,
        RegionConfig as RegionConfig,
        RegionModel as RegionModel,
    )
    from medvl.models.fusion_encoders.berthop import (
        BERTHop as BERTHop,
        BERTHopConfig as BERTHopConfig,
    )
    from medvl.models.fusion_encoders.lxmert import LXMERT as LXMERT, LXMERTConfig as LXMERTConfig
    from medvl.models.fusion_encoders.m2i2 import M2I2 as M2I2, M2I2Config as M2I2Config
    from medvl.models.fusion_encoders.m3ae import M3AE as M3AE, M3AEConfig as M3AEConfig
    from medvl.models.fusion_encoders.medvill import (
        MedViLL as MedViLL,
        MedViLLConfig as MedViLLConfig,
    )
    from medvl.models.fusion_encoders.mixed import (
        MixedConfig as MixedConfig,
        MixedModel as MixedModel,
    )
    from medvl.models.fusion_encoders.mrm import MRM as MRM, MRMConfig as MRMConfig
    from medvl.models.fusion_encoders.mumc import MUMC as MUMC, MUMCConfig as MUMCConfig
    from medvl.models.fusion_encoders.pixelbert import (
        PixelBERT as PixelBERT,
        PixelBERTConfig as PixelBERTConfig,
    )
    from medvl.models.fusion_encoders.ptunifier import (
        PTUnifier as PTUnifier,
        PTUnifierConfig as PTUnifierConfig,
    )
    from medvl.models.fusion_encoders.streams import (
        DualStreamConfig as DualStreamConfig,
        DualStreamModel as DualStreamModel,
        SingleStreamConfig as SingleStreamConfig,
        SingleStreamModel as SingleStreamModel,
        StreamModel as StreamModel,
    )
    from medvl.models.fusion_encoders.uniter import UNITER as UNITER, UNITERConfig as UNITERConfig
    from medvl.models.fusion_encoders.vilt import ViLT as ViLT, ViLTConfig as ViLTConfig
    from medvl.models.fusion_encoders.visualbert import (
        VisualBERT as VisualBERT,
        VisualBERTConfig as VisualBERTConfig,
    )
    from medvl.models.image_generation.autoencoder import (
        Autoencoder as Autoencoder,
        AutoencoderConfig as AutoencoderConfig,
        AutoencoderSizes as AutoencoderSizes,
        UNetSizes as UNetSizes,
    )
    from medvl.models.image_generation.latent_diffusion import (
        LatentDiffusion as LatentDiffusion,
        LatentDiffusionConfig as LatentDiffusionConfig,
        RoentGen as RoentGen,
        RoentGenConfig as RoentGenConfig,
        create_latent_diffusion as create_latent_diffusion,
    )
    from medvl.models.image_generation.sampling import (
        Sampling as Sampling,
        sample_images as sample_images,
    )
    from medvl.models.language.base import (
        LanguageConfig as LanguageConfig,
        LanguageModel as LanguageModel,
        MaskedWordScore as MaskedWordScore,
        TextModelConfig as TextModelConfig,
    )
    from medvl.models.language.kebert import (
        KEBERT as KEBERT,
        ConceptScore as ConceptScore,
        KEBERTConfig as KEBERTConfig,
    )
    from medvl.models.language.masked_text import (
        AlbertText as AlbertText,
        AlbertTextConfig as AlbertTextConfig,
        MaskedText as MaskedText,
        MaskedTextConfig as MaskedTextConfig,
    )
    from medvl.models.registry import (
        list_models as list_models,
        register_system as register_system,
        system as system,
    )
    from medvl.models.report_generators.base import ReportGenerator as ReportGenerator
    from medvl.models.report_generators.causal_lm import (
        CausalLM as CausalLM,
        CausalLMConfig as CausalLMConfig,
    )
    from medvl.models.report_generators.cxrmate import (
        CXRMate as CXRMate,
        CXRMateConfig as CXRMateConfig,
    )
    from medvl.models.report_generators.r2gen import R2Gen as R2Gen, R2GenConfig as R2GenConfig
    from medvl.models.text_decoding import Decoding as Decoding
    from medvl.models.volumes.colipri import COLIPRI as COLIPRI, COLIPRIConfig as COLIPRIConfig
    from medvl.models.volumes.ct_clip import CTCLIP as CTCLIP, CTCLIPConfig as CTCLIPConfig
    from medvl.models.volumes.fvlm import FVLM as FVLM, FVLMConfig as FVLMConfig
    from medvl.models.volumes.hlip import HLIP as HLIP, HLIPConfig as HLIPConfig

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
