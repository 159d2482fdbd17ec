"""Encoders of the published systems by short name: architecture, weights, normalisation, licence.

Metadata only: this module imports no library and downloads nothing. Every preset builds offline with random weights.
Its published weights are one pinned file: repository, commit, file name, and sha256 where it is known. Sizes are those
of the published `config.json` files and of the checkpoints' tensors.

`weights` is None where the authors published no copy on the hub: `pretrained=True` is then an error, and a local copy
is loaded by path.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

Statistics = tuple[float, float, float]

IMAGENET_MEAN: Statistics = (0.485, 0.456, 0.406)
IMAGENET_STD: Statistics = (0.229, 0.224, 0.225)
CLIP_MEAN: Statistics = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Statistics = (0.26862954, 0.26130258, 0.27577711)

OPEN_CLIP_CUSTOM = "custom"
"""Name of an open_clip model that is described by its arguments alone, as `open_clip:custom`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """One published file of weights."""

    hub_id: str
    revision: str
    """Commit of the repository, 40 hexadecimal digits."""
    filename: str = "model.safetensors"
    sha256: str | None = None
    """Hash of the file; None where no trustworthy value is known. The commit alone pins the content as well."""
    ignored_keys: tuple[str, ...] = ()
    """Prefixes of keys that the encoder does not use, besides the library's classifier heads."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImagePreset:
    """Preset of an image encoder."""

    model: str
    """Library and model: `timm:NAME`, `torchvision:NAME` or `open_clip:NAME`."""
    weights: Weights | None
    licence: str
    """Licence of the weights, as their repository states it."""
    image_size: int = 224
    mean: Statistics = IMAGENET_MEAN
    std: Statistics = IMAGENET_STD
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    """Arguments of the library's constructor."""
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextPreset:
    """Preset of a text encoder."""

    model: str
    """Library and model: `hf:MODEL_TYPE` or `open_clip:NAME`."""
    weights: Weights | None
    licence: str
    arguments: Mapping[str, Any]
    """Fields of the Hugging Face configuration that differ from the model type's defaults."""
    projection: str | None = None
    """Kind of the published model's projection head over its text vector, built with `projection=True`."""
    pool: Literal["cls", "mean", "max", "eos"] = "cls"
    """Default pooling: the published model's own."""
    tokenizer: str | None = None
    """Argument of `medvl.data.tokenizer.tokenizer.load_tokenizer`; None is the repository of the weights at their
    revision."""
    note: str = ""

    @property
    def hub_id(self) -> str | None:
        """Repository of the weights, if any."""
        return None if self.weights is None else self.weights.hub_id

    @property
    def revision(self) -> str | None:
        """Pinned commit of the repository."""
        return None if self.weights is None else self.weights.revision


def _bert(vocab_size: int, **differences: Any) -> Mapping[str, Any]:
    """Return the configuration of BERT-base, with `differences`."""
    base = {
        "vocab_size": vocab_size,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "pad_token_id": 0,
    }
    return MappingProxyType(base | differences)


_CASED, _UNCASED, _PUBMED, _SCIVOCAB, _LINKBERT = 28996, 30522, 30522, 31090, 28895


def _bin(hub_id: str, revision: str) -> Weights:
    return Weights(hub_id=hub_id, revision=revision, filename="pytorch_model.bin")


_CLIP_B32 = Weights(
    hub_id="timm/vit_base_patch32_clip_224.openai",
    revision="a6f597a30f7b82c51704746581f9a4e41421e878",
    filename="open_clip_model.safetensors",
    sha256="e6d1bd7789aa45192b3bf90570a789b478bae1b74ebcce7eddd908e83a2b7c31",
)
_BIOMEDCLIP = Weights(
    hub_id="microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224",
    revision="9f341de24bfb00180f1b847274256e9b65a3a32e",
    filename="open_clip_pytorch_model.bin",
    sha256="52cc993c5c5ff962bd0c60931874bc001e7e9b41666a385530f4a036294576be",
)

IMAGE_PRESETS: Mapping[str, ImagePreset] = MappingProxyType(
    {
        "resnet50": ImagePreset(
            model="timm:resnet50",
            weights=Weights(
                hub_id="timm/resnet50.tv_in1k",
                revision="78f3ecfdb38e06d9b8397f662e7ab8fee96026fa",
                sha256="5d061a3c593d795bfe682d9b152bafbcf550579873492def3515b46db1189888",
            ),
            licence="BSD-3-Clause",
            note="torchvision's IMAGENET1K_V1 weights: ConVIRT, GLoRIA, BioViL, MedCLIP start from these",
        ),
        "resnet18": ImagePreset(
            model="timm:resnet18",
            weights=Weights(
                hub_id="timm/resnet18.tv_in1k",
                revision="bbd144b3e5565108aad885f145491d11bc6ce807",
                sha256="694f673df6520a3158624e8a89af086f59923ee4cd7436fe5bc3bc71d295ad81",
            ),
            licence="BSD-3-Clause",
            note="torchvision's IMAGENET1K_V1 weights",
        ),
        "resnet_tiny": ImagePreset(
            model="timm:resnetv2_18",
            weights=None,
            licence="none: trained from scratch",
            image_size=128,
            arguments=MappingProxyType({"layers": (1, 1, 1, 1), "channels": (32, 64, 128, 256), "stem_chs": 32}),
            note="a pre-activation ResNet-10 of half width, for training from scratch on a CPU at 112 to 160 pixels",
        ),
        "densenet121": ImagePreset(
            model="timm:densenet121",
            weights=Weights(
                hub_id="timm/densenet121.tv_in1k",
                revision="d42603aa2960ebf044e46628536b6f0edf7c0c6b",
                sha256="c894c6d9caa317a8ca1942986dee7a16a86c77734a4d691d2abe05389cfef358",
            ),
            licence="Apache-2.0",
            note="torchvision's IMAGENET1K_V1 weights",
        ),
        "vit_b16": ImagePreset(
            model="timm:vit_base_patch16_224",
            weights=Weights(
                hub_id="timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
                revision="063c6c38a5d8510b2e57df480445e94b231dad2c",
                sha256="32aa17d6e17b43500f531d5f6dc9bc93e56ed8841b8a75682e1bb295d722405b",
            ),
            licence="Apache-2.0",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        ),
        "swin_tiny": ImagePreset(
            model="timm:swin_tiny_patch4_window7_224",
            weights=Weights(
                hub_id="timm/swin_tiny_patch4_window7_224.ms_in1k",
                revision="4cc3a7275b50b53a7bec45f32c236ebe64227cff",
                sha256="fb01861f793143135fa0d6cd97b1631e4b33eaa3ee162bbea9e62de1c76ebac1",
            ),
            licence="MIT",
        ),
        "clip_vit_b32": ImagePreset(
            model="open_clip:ViT-B-32-quickgelu",
            weights=_CLIP_B32,
            licence="MIT",
            mean=CLIP_MEAN,
            std=CLIP_STD,
            note="OpenAI's CLIP: initial weights of CheXzero",
        ),
        "clip_vit_b16": ImagePreset(
            model="open_clip:ViT-B-16-quickgelu",
            weights=Weights(
                hub_id="timm/vit_base_patch16_clip_224.openai",
                revision="977e3dd0ec55ab8da155f2fbeb6b5f54948b6e3d",
                filename="open_clip_model.safetensors",
                sha256="4b8699299b1e8997753c64b052ba32031449d5d853f55a039148560ee02b820f",
            ),
            licence="MIT",
            mean=CLIP_MEAN,
            std=CLIP_STD,
            note="OpenAI's CLIP; M3AE uses its first 11 blocks: layers=11",
        ),
        "biomedclip": ImagePreset(
            model="open_clip:custom",
            weights=_BIOMEDCLIP,
            licence="MIT",
            mean=CLIP_MEAN,
            std=CLIP_STD,
            arguments=MappingProxyType(
                {
                    "embed_dim": 512,
                    "timm_model_name": "vit_base_patch16_224",
                    "timm_pool": "",
                    "timm_proj": "linear",
                    "image_size": 224,
                }
            ),
        ),
        "rad_dino": ImagePreset(
            model="timm:vit_base_patch14_dinov2",
            weights=Weights(
                hub_id="microsoft/rad-dino",
                revision="2ec9ca0e7a73c23aded999b844acd2f07c7e46b9",
                filename="backbone_compatible.safetensors",
                ignored_keys=("mask_token",),
            ),
            licence="MIT",
            image_size=518,
            mean=(0.5307, 0.5307, 0.5307),
            std=(0.2583, 0.2583, 0.2583),
        ),
    }
)

TEXT_PRESETS: Mapping[str, TextPreset] = MappingProxyType(
    {
        "bert": TextPreset(
            model="hf:bert",
            arguments=_bert(_UNCASED),
            weights=Weights(
                hub_id="google-bert/bert-base-uncased", revision="86b5e0934494bd15c9632b12f734a8a67f723594"
            ),
            licence="Apache-2.0",
        ),
        "clinicalbert": TextPreset(
            model="hf:bert",
            arguments=_bert(_CASED),
            weights=None,
            licence="MIT",
            note="Alsentzer et al. 2019, BERT-base trained on all MIMIC notes (bert_pretrain_all_notes_150000); its "
            "authors publish it outside the hub (github.com/EmilyAlsentzer/clinicalBERT): give the local folder",
        ),
        "bioclinicalbert": TextPreset(
            model="hf:bert",
            arguments=_bert(_CASED),
            weights=_bin("emilyalsentzer/Bio_ClinicalBERT", "d5892b39a4adaed74b92212a44081509db72f87b"),
            licence="MIT",
            note="ConVIRT, GLoRIA, LoVT, MedCLIP, MGCA, CXR-CLIP. A cased vocabulary, but the repository does not say "
            "so, and the Hugging Face tokenizer that all of them used lower-cases",
        ),
        "biobert": TextPreset(
            model="hf:bert",
            arguments=_bert(_CASED),
            weights=_bin("dmis-lab/biobert-v1.1", "551ca18efd7f052c8dfa0b01c94c2a8e68bc5488"),
            licence="not stated by the repository",
        ),
        "pubmedbert": TextPreset(
            model="hf:bert",
            arguments=_bert(_PUBMED),
            weights=_bin(
                "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract-fulltext",
                "e1354b7a3a09615f6aba48dfad4b7a613eef7062",
            ),
            licence="MIT",
        ),
        "bluebert": TextPreset(
            model="hf:bert",
            arguments=_bert(_UNCASED),
            weights=_bin(
                "bionlp/bluebert_pubmed_mimic_uncased_L-12_H-768_A-12", "c656dbe1fc4d6c7771d93bcaff21b2e7984f64c8"
            ),
            licence="CC0-1.0",
        ),
        "scibert": TextPreset(
            model="hf:bert",
            arguments=_bert(_SCIVOCAB),
            weights=_bin("allenai/scibert_scivocab_uncased", "24f92d32b1bfb0bcaf9ab193ff3ad01e87732fc1"),
            licence="Apache-2.0",
        ),
        "bioalbert": TextPreset(
            model="hf:albert",
            arguments=MappingProxyType(
                {
                    "vocab_size": 30000,
                    "embedding_size": 128,
                    "hidden_size": 768,
                    "num_hidden_layers": 12,
                    "num_attention_heads": 12,
                    "intermediate_size": 3072,
                    "max_position_embeddings": 512,
                    "type_vocab_size": 2,
                    "hidden_act": "gelu_new",
                    "layer_norm_eps": 1e-12,
                    "hidden_dropout_prob": 0.0,
                    "attention_probs_dropout_prob": 0.0,
                    "pad_token_id": 0,
                }
            ),
            weights=None,
            licence="not stated by the repository",
            note="Naseem et al. 2021, ALBERT-base trained on PubMed; its authors publish TensorFlow checkpoints "
            "outside the hub (github.com/usmaann/BioALBERT): convert one and give the local folder",
        ),
        "cxrbert": TextPreset(
            model="hf:bert",
            arguments=_bert(_UNCASED, hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.25),
            weights=_bin("microsoft/BiomedVLP-CXR-BERT-specialized", "f1cc2c6b7fac60f3724037746a129a5baf194dbc"),
            licence="MIT",
            projection="cxrbert",
            note="BioViL's text model: a plain BERT with a vocabulary of its own; the repository's code is not needed",
        ),
        "radbert": TextPreset(
            model="hf:bert",
            arguments=_bert(_CASED),
            weights=_bin("StanfordAIMI/RadBERT", "c8f97547ff6dd96debf4e50022d9679219e6987b"),
            licence="MIT",
        ),
        "biolinkbert": TextPreset(
            model="hf:bert",
            arguments=_bert(_LINKBERT),
            weights=_bin("michiyasunaga/BioLinkBERT-base", "b71f5d70f063d1c8f1124070ce86f1ee463ca1fe"),
            licence="Apache-2.0",
        ),
        "roberta": TextPreset(
            model="hf:roberta",
            arguments=MappingProxyType(
                {
                    "vocab_size": 50265,
                    "hidden_size": 768,
                    "num_hidden_layers": 12,
                    "num_attention_heads": 12,
                    "intermediate_size": 3072,
                    "max_position_embeddings": 514,
                    "type_vocab_size": 1,
                    "hidden_act": "gelu",
                    "layer_norm_eps": 1e-5,
                    "hidden_dropout_prob": 0.1,
                    "attention_probs_dropout_prob": 0.1,
                    "pad_token_id": 1,
                }
            ),
            weights=Weights(hub_id="FacebookAI/roberta-base", revision="e2da8e2f811d1448a5b465c236feacd80ffbac7b"),
            licence="MIT",
            note="M3AE",
        ),
        "clip_text": TextPreset(
            model="open_clip:ViT-B-32-quickgelu",
            arguments=MappingProxyType({}),
            weights=_CLIP_B32,
            licence="MIT",
            projection="clip",
            pool="eos",
            tokenizer="clip",
            note="the text tower of OpenAI's CLIP ViT-B/32, 77 tokens",
        ),
        "biomedclip_text": TextPreset(
            model="hf:bert",
            arguments=_bert(_PUBMED),
            weights=_BIOMEDCLIP,
            licence="MIT",
            projection="biomedclip",
            note="PubMedBERT (abstracts) with an MLP 768-640-512, 256 tokens",
        ),
        "tiny_bert": TextPreset(
            model="hf:bert",
            arguments=_bert(
                8000,
                hidden_size=192,
                num_hidden_layers=3,
                num_attention_heads=3,
                intermediate_size=768,
                max_position_embeddings=256,
            ),
            weights=None,
            licence="none: trained from scratch",
            note="for training from scratch on a CPU, with a vocabulary trained on the shards' own text",
        ),
    }
)
