"""Description of one published checkpoint layout."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from medvl.common.untrusted import read_json
from medvl.data.tokenizer.files import Cleaning
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.encoders.hugging_face import KERNELS, PROCESSOR_FILES, numbers
from medvl.encoders.presets import IMAGENET_MEAN, IMAGENET_STD, TEXT_PRESETS
from medvl.errors import ConfigError, WeightsError
from medvl.export.importers import backbones
from medvl.export.importers.backbones import (
    IMAGE,
    TEXT,
    TEXT_PROJECTION,
    bert,
    resnet,
    sequential_resnet,
)
from medvl.export.importers.key_map import KeyRule, MappedTensors, Shapes, ZeroTensor, drop, keep

# Encoders of the sizes that the tensors of a file have; other arguments come from the importer.

Options = Mapping[str, Any]
"""Arguments of `create_image_encoder` or `create_text_encoder`."""

# of every published BERT, vision Transformer and CLIP; the files do not contain it
_HEAD_WIDTH = 64
_RESNETS: Mapping[tuple[bool, tuple[int, ...]], str] = {
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "timm:resnet101",
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "timm:resnet34",
}
"""(bottleneck blocks?, blocks per stage) -> name."""
_RESNET_CHANNELS = (64, 128, 256, 512)


class Encoders(nn.Module):
    """An image encoder, a text encoder, or both."""

    def __init__(
        self, image_encoder: ImageEncoder | None, text_encoder: TextEncoder | None
    ) -> None:
        super().__init__()
        self.image_encoder = image_encoder
        self.text_encoder = text_encoder


def build_encoders(shapes: Shapes, image: Options | None, text: Options | None) -> Encoders:
    """Build encoders with random weights for tensors of these shapes.

    Args:
        shapes: shapes of the tensors, by medvl's names.
        image, text: arguments that the shapes do not determine; None if the file has no such
            encoder.

    Raises WeightsError if the architecture is not known.
    """
    image_encoder = (
        None if image is None else create_image_encoder(**image_arguments(shapes, image))
    )
    if text is None:
        return Encoders(image_encoder, None)
    projected = any(name.startswith(TEXT_PROJECTION) for name in shapes)
    arguments = text_arguments(shapes, {"projection": projected, **text})
    return Encoders(image_encoder, create_text_encoder(**arguments))


def child_shapes(shapes: Shapes, prefix: str) -> Shapes:
    """Return the shapes of one child, without its prefix."""
    return {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }


def image_arguments(shapes: Shapes, options: Options) -> dict[str, Any]:
    """Return arguments of `create_image_encoder`. Raises WeightsError if the architecture is not
    known.
    """
    if "name" in options:
        return dict(options)
    shapes = child_shapes(shapes, IMAGE)
    if "patch_embed.norm.weight" in shapes:
        return _swin(shapes) | dict(options)
    if "class_embedding" in shapes:
        return _clip_image(shapes) | dict(options)
    if "cls_token" in shapes and "pos_embed" in shapes:
        return _vision_transformer(shapes) | dict(options)
    if "conv1.weight" in shapes and "layer1.0.conv1.weight" in shapes:
        return _resnet(shapes) | dict(options)
    raise WeightsError(
        f"unknown architecture of the image encoder: it has {_some(shapes)}", "mismatch"
    )


def text_arguments(shapes: Shapes, options: Options) -> dict[str, Any]:
    """Return arguments of `create_text_encoder`; `name` in `options` is a preset, except for CLIP's
    text encoder.

    Raises WeightsError if the architecture is not known.
    """
    encoder = child_shapes(shapes, TEXT)
    if "embeddings.word_embeddings.weight" in encoder:
        return _bert(encoder, str(options["name"])) | dict(options)
    if "token_embedding.weight" not in encoder:
        raise WeightsError(
            f"unknown architecture of the text encoder: it has {_some(encoder)}", "mismatch"
        )
    return _clip_text(encoder, shapes.get(f"{TEXT_PROJECTION}matrix", (0, 512))[1]) | dict(options)


def encoder_fields(shapes: Shapes, image: Options, text: Options) -> dict[str, Any]:
    """Return the fields of a system's config that describe its two encoders, without
    projections, which it sets.
    """
    image_options = image_arguments(shapes, image)
    text_options = text_arguments(shapes, text)
    image_options.pop("projection", None)
    sized = {"image_size": image_options.pop("image_size")} if "image_size" in image_options else {}
    return {
        "image_encoder": image_options.pop("name"),
        "text_encoder": text_options.pop("name"),
        "vocab_size": text_options.pop("vocab_size", None),
        "image_arguments": image_options,
        "text_arguments": text_options,
        **sized,
    }


def bert_fields(shapes: Shapes, preset: str) -> dict[str, Any]:
    """Return `encoder_fields` of a system whose text encoder is a BERT, with the size of its
    vocabulary.
    """
    fields = encoder_fields(shapes, {}, {"name": preset})
    return {**fields, "vocab_size": shapes[f"{TEXT}embeddings.word_embeddings.weight"][0]}


def with_image_processor(config: Any, folder: Path) -> Any:
    """Return a system's config with the statistics of pixels, the kernel and the fit of the
    processor in a folder.

    Without the file the config is returned as it is. Raises ConfigError for a file that cannot be
    read, or of other values.
    """
    path = folder / PROCESSOR_FILES[0]
    try:
        content = read_json(path, ConfigError)
    except FileNotFoundError:
        return config
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected a JSON object, got {type(content).__name__}", "malformed"
        )
    image = {**config.image_arguments, "mean": numbers(content, "image_mean", path)}
    image["std"] = numbers(content, "image_std", path)
    if min(image["std"]) <= 0:
        raise ConfigError(
            f"{path}: expected image_std above 0, got {list(image['std'])}", "out_of_range"
        )
    resample = content.get("resample", 3)
    if not isinstance(resample, int) or resample not in KERNELS:
        message = f"{path}: expected resample 2 (bilinear) or 3 (bicubic), got {resample!r}"
        raise ConfigError(message, "unsupported")
    fit = "crop" if content.get("do_center_crop") is True else "squash"
    return dataclasses.replace(config, image_arguments=image, resize=KERNELS[resample], fit=fit)


def count(shapes: Shapes, prefix: str) -> int:
    """Return the number of numbered children after a prefix, as in `blocks.11.norm1.weight`.

    Raises WeightsError unless they are numbered from 0 without gaps: a single name could claim any
    number of layers.
    """
    matches = (re.match(rf"{re.escape(prefix)}(\d+)\.", name, re.ASCII) for name in shapes)
    numbers = {match[1] for match in matches if match}
    missing = next((index for index in range(len(numbers)) if str(index) not in numbers), None)
    if missing is not None:
        raise WeightsError(f"missing {prefix}{missing}", "mismatch")
    return len(numbers)


def attention_heads(width: int) -> int:
    """Return the number of attention heads of a Transformer of this width."""
    return max(1, width // _HEAD_WIDTH)


def _resnet(shapes: Shapes) -> dict[str, Any]:
    layers = tuple(count(shapes, f"layer{stage}.") for stage in range(1, 5))
    bottleneck = "layer1.0.conv3.weight" in shapes
    channels = tuple(
        shapes.get(f"layer{stage + 1}.0.conv1.weight", (published,))[0]
        for stage, published in enumerate(_RESNET_CHANNELS)
    )
    name = _RESNETS.get((bottleneck, layers))
    arguments: dict[str, Any] = {"name": name or ("resnet50" if bottleneck else "resnet18")}
    if name is None:
        arguments["layers"] = layers
    if channels != _RESNET_CHANNELS:
        arguments["channels"] = channels
    grey = shapes["conv1.weight"][1] == 1
    return arguments | ({"in_channels": 1} if grey else {})


def _vision_transformer(shapes: Shapes) -> dict[str, Any]:
    width, _, patch, _ = shapes["patch_embed.proj.weight"]
    side = round((shapes["pos_embed"][1] - 1) ** 0.5) * patch
    depth = count(shapes, "blocks.")
    inside = shapes["blocks.0.mlp.fc1.weight"][0]
    fields = {
        "patch_size": patch,
        "embed_dim": width,
        "depth": depth,
        "num_heads": attention_heads(width),
        "mlp_ratio": inside / width,
    }
    is_dinov2 = "blocks.0.ls1.gamma" in shapes
    base = {
        "patch_size": 14 if is_dinov2 else 16,
        "embed_dim": 768,
        "depth": 12,
        "num_heads": 12,
        "mlp_ratio": 4.0,
    }
    name = "rad_dino" if is_dinov2 else "vit_b16"
    return {"name": name, "image_size": side, **_differing(fields, base)}


def _clip_image(shapes: Shapes) -> dict[str, Any]:
    width, _, patch, _ = shapes["conv1.weight"]
    side = round((shapes["positional_embedding"][0] - 1) ** 0.5) * patch
    embed_dim = shapes.get("proj", (0, 512))[1]
    fields = {
        "patch_size": patch,
        "width": width,
        "layers": count(shapes, "transformer.resblocks."),
        "embed_dim": embed_dim,
    }
    base = {"patch_size": 16 if patch == 16 else 32, "width": 768, "layers": 12, "embed_dim": 512}
    name = f"clip_vit_b{base['patch_size']}"
    return {
        "name": name,
        "image_size": side,
        "projection": "proj" in shapes,
        **_differing(fields, base),
    }


def _clip_text(shapes: Shapes, embed_dim: int) -> dict[str, Any]:
    words, width = shapes["token_embedding.weight"]
    fields = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": count(shapes, "transformer.resblocks."),
        "num_attention_heads": attention_heads(width),
        "max_position_embeddings": shapes["positional_embedding"][0],
        "embed_dim": embed_dim,
    }
    base = {
        "vocab_size": 49408,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "embed_dim": 512,
    }
    return {"name": "clip_text", **_differing(fields, base)}


def _swin(shapes: Shapes) -> dict[str, Any]:
    depths = tuple(
        count(shapes, f"layers.{stage}.blocks.") for stage in range(count(shapes, "layers."))
    )
    tables = [
        shapes[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"]
        for stage in range(len(depths))
    ]
    fields = {
        "embed_dim": shapes["patch_embed.proj.weight"][0],
        "depths": depths,
        "num_heads": tuple(table[1] for table in tables),
        "window_size": (round(tables[0][0] ** 0.5) + 1) // 2,
    }
    base = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24), "window_size": 7}
    return {"name": "swin_tiny", **_differing(fields, base)}


def _bert(shapes: Shapes, preset: str) -> dict[str, Any]:
    words, width = shapes["embeddings.word_embeddings.weight"]
    fields = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": count(shapes, "encoder.layer."),
        "num_attention_heads": attention_heads(width),
        "intermediate_size": shapes["encoder.layer.0.intermediate.dense.weight"][0],
        "max_position_embeddings": shapes["embeddings.position_embeddings.weight"][0],
    }
    return _differing(fields, TEXT_PRESETS[preset].arguments)


def _differing(fields: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if base.get(key) != value}


def _some(shapes: Shapes) -> str:
    return ", ".join(list(shapes)[:3]) or "no tensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntityFile:
    """A file with the entities of a system's training, which its checkpoint does not hold."""

    title: str
    """Name of the published file, and its format."""
    read: Callable[[Any, Path], tuple[Any, Mapping[str, Tensor]]]
    """Function from the system's config and the file to the config with the entities, and further
    tensors by medvl's names.
    """
    required: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importer:
    """One published layout."""

    name: str
    title: str
    """System, paper, backbones."""
    source: str
    """Code that defines the layout: repository and commit."""
    table: Sequence[KeyRule]
    image: Options | None = None
    """Arguments of the image encoder that the file does not determine; None if the file has no
    image encoder.
    """
    text: Options | None = None
    """The same for the text encoder."""
    system: Callable[[Shapes], Any] | None = None
    """Function from the shapes by medvl's names to the system's config; None: only the encoders
    are imported.
    """
    configure: Callable[[Path], Any] | None = None
    """Function from the folder of a file to the system's config, where the files beside it
    determine it and not the shapes.
    """
    read_tokenizer: Callable[[Path, Any], Tokenizer | None] | None = None
    """Function from a folder and the system's config to the tokenizer in it, with the rules of its
    files; None: `load_tokenizer` reads it.
    """
    zeros: Sequence[ZeroTensor] = ()
    parts: Sequence[str] = ()
    """Names of the state dicts that the file holds side by side; keys are then `part/key`."""
    text_file: str | None = None
    """Content of a second file with the text encoder; None: there is one file."""
    entities: EntityFile | None = None
    computed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """Function from the tensors by medvl's names to those that replace them."""
    settle: Callable[[Any, MappedTensors], tuple[Any, MappedTensors]] | None = None
    """Function from the config and the tensors to those after what depends on values, such as
    tables of positions that differ from the computed ones.
    """
    tokenizer: str | None = None
    """Argument of `load_tokenizer` for tokenizers that an installed package contains."""
    images: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the system's config for the released preparation of images, where they differ
    from its defaults.
    """
    has_processor: bool = False
    """Whether its files come with an image processor (`preprocessor_config.json`), which is read if
    it is beside them.
    """
    cleaning: Cleaning | None = None
    """How the released code cleans texts before its tokenizer; None: not at all."""
    closing: bool = True
    """Whether the released tokenizer ends texts with [SEP]."""
    note: str = ""
    """Known differences from the published system."""

    @property
    def kind(self) -> str:
        """Type of the imported object: "system", or which encoders."""
        if self.system is not None or self.configure is not None:
            return "system"
        encoders = [
            name
            for name, options in (("image", self.image), ("text", self.text))
            if options is not None
        ]
        return f"{' and '.join(encoders)} encoder{'s' if len(encoders) > 1 else ''}"


# Key tables of systems whose encoders alone are imported.

_HEAD = "a projection into this system's shared space: only its encoders are imported"
_SCALE = "the temperature of this system's loss"
_STATISTICS = (
    f"The pixel statistics are ImageNet's ({IMAGENET_MEAN}, {IMAGENET_STD}), the encoder's "
    "default; those of this system are not known."
)
_FUSION = "the fusion-encoder of this system: only its encoders are imported"

_METER_TOWERS = (
    *backbones.clip_image_tower("vision_encoder"),
    *bert("language_encoder."),
    drop("multi_modal_**", _FUSION),
    drop("modality_type_embeddings.weight", _FUSION),
    *(
        drop(f"{head}_head.**", "a pretraining head")
        for head in ("mlm", "mim", "itm", "itc", "align")
    ),
    *(drop(f"{head}_head.**", "a downstream head") for head in ("vqa", "cls", "irtr")),
)

ENCODER_IMPORTERS = (
    Importer(
        name="arl_encoders",
        title="ARL's encoders alone: CLIP ViT-B/16 without its last block, RoBERTa",
        source="zhjohnchan/ARL @ 527fe06",
        image={},
        text={"name": "roberta"},
        table=_METER_TOWERS,
    ),
    Importer(
        name="medklip_image",
        title="MedKLIP's image encoder alone: the first three stages of a ResNet-50",
        source="MediaBrain-SJTU/MedKLIP @ 8e60b03",
        image={},
        table=(
            *sequential_resnet("res_features."),
            drop("res_l*.*", "the projection of the grid, for the complete system"),
            drop("decoder.**", "the decoder of entities, for the complete system"),
            *(
                drop(f"{name}.*", "a head of the decoder of entities, for the complete system")
                for name in ("disease_embedding_layer", "cl_fc", "classifier")
            ),
        ),
        note="The file has no text encoder; medklip takes that of Bio_ClinicalBERT beside it.",
    ),
    Importer(
        name="prior",
        title="PRIOR (Cheng et al. 2023): ResNet-50 on grey images, Bio_ClinicalBERT",
        source="QtacierP/PRIOR @ 086bf2e",
        image={},
        text={"name": "bioclinicalbert"},
        table=(
            *resnet("image_encoder.encoder."),
            drop("image_encoder.atten_pool.**", "attention pooling, which medvl does not have"),
            *bert("text_encoder.encoder."),
            drop("global_text_attention.**", "attention over sentences, which medvl does not have"),
            *(
                drop(f"{level}_{side}_projection.*", _HEAD)
                for level in ("global", "local")
                for side in ("image", "text")
            ),
            drop("logit_scale", _SCALE),
            drop("local_logit_scale", _SCALE),
            *(
                drop(
                    name, "a part of its local and reconstruction tasks, which medvl does not have"
                )
                for name in (
                    "prototype_queries",
                    "predictor.**",
                    "sentence_**",
                    "image_decoder.**",
                    "local_cross_**",
                )
            ),
        ),
        note=_STATISTICS,
    ),
    Importer(
        name="mflag",
        title="M-FLAG (Liu et al. 2023): ResNet-50, CXR-BERT",
        source="yangzhou12/BenchX @ b874fa6",
        image={},
        text={"name": "cxrbert"},
        table=(
            *resnet("encoder."),
            *bert("lm_model.bert."),
            keep("lm_model.cls_projection_head.**", f"{TEXT_PROJECTION}**"),
            *backbones.vocabulary_head("lm_model.cls.predictions."),
            drop("proj_*.**", _HEAD),
        ),
        note=_STATISTICS,
    ),
)
