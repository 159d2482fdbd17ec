"""Towers of transformers in folders: what `config.json` and the image processor's file say.

Code in a folder is never run. The configuration is resolved through its class in transformers,
because files store only what differs from the class's defaults. What medvl cannot honour is
refused with the name of the key and of its file.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from medvl.common.untrusted import parse_json, read_json
from medvl.encoders.presets import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD
from medvl.errors import ConfigError

Side = Literal["image", "text"]

CONFIG_FILE = "config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of an image processor: its own, or as a part of that of a whole processor."""
IMAGE_KINDS = ("siglip_vision_model", "clip_vision_model", "dinov2", "dinov2_with_registers", "vit")
"""Model types of transformers that `create_image_encoder` builds."""
TEXT_KINDS = ("siglip_text_model", "clip_text_model")
"""Model types of transformers that are the text tower of a dual-encoder."""
PAIRS = ("siglip", "clip")
"""Model types with an image and a text tower."""
_TOWER: Mapping[Side, tuple[str, str]] = {
    "image": ("vision_config", "vision_model"),
    "text": ("text_config", "text_model"),
}
"""Side -> its part of the configuration of two towers, and the end of its model type."""
_REFUSED = {
    "siglip2": "its images have unequal numbers of patches (NaFlex); take a SigLIP 2 of one size",
    "vit_mae": "it drops patches at random; save its encoder as a ViTModel",
}
_NOT_OF_THE_TOWER = {
    *("stage_names", "out_features", "out_indices", "apply_layernorm", "reshape_hidden_states"),
    *("encoder_stride", "pooler_output_size", "pooler_act"),
}
"""Fields of configurations for parts that no encoder here has."""
STATISTICS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "siglip_vision_model": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip_vision_model": (CLIP_MEAN, CLIP_STD),
    "dinov2": (IMAGENET_MEAN, IMAGENET_STD),
    "dinov2_with_registers": (IMAGENET_MEAN, IMAGENET_STD),
    "vit": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Model type -> mean and standard deviation of pixels of its published models."""


# Configurations.


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `config.json`.

    Raises ConfigError: "not_found" if the file is missing, "malformed" if it names no model type.
    """
    path = folder / CONFIG_FILE
    try:
        content = read_json(path, ConfigError)
    except FileNotFoundError:
        message = (
            f"{folder} has no {CONFIG_FILE} of Hugging Face; give the folder that "
            f"save_pretrained wrote, or all files of its repository"
        )
        raise ConfigError(message, "not_found", field="name") from None
    except ConfigError as error:
        raise ConfigError(str(error), error.code, field="name") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(
            f"{path}: expected a JSON object with a model_type", "malformed", field="name"
        )
    return content


def resolve_config(content: Mapping[str, Any], path: Path) -> Any:
    """Return the configuration of transformers for the content of a file, with all defaults.

    Raises ConfigError: "unsupported" for a model type that transformers does not have,
    "malformed" for values that its class refuses.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    kind = content["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        message = f"{path}: transformers has no model_type {kind!r}; update transformers"
        raise ConfigError(message, "unsupported", field="name")
    standard = {key: value for key, value in content.items() if key != "auto_map"}
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(standard)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        message = f"{path} describes no {kind} of transformers ({reason}); get the file again"
        raise ConfigError(message, "malformed", field="name") from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageTower:
    """An image tower of transformers, named by its folder or by its type and fields."""

    kind: str
    fields: Mapping[str, Any]
    folder: Path | None = None
    image_size: int | None = None
    """Size of its image processor; None: that of the network."""
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def describe(self) -> str:
        """Return its name without a folder."""
        statistics = {"image_mean": self.mean, "image_std": self.std}
        known = {name: list(values) for name, values in statistics.items() if values is not None}
        return f"hf:{self.kind}{json.dumps({**self.fields, **known})}"


def find_image_tower(model: str) -> ImageTower:
    """Return the tower of a name behind `hf:`, which is a folder, or a model type with or without
    fields: `dinov2{"hidden_size": 384}`.

    Raises ConfigError: as `read_tower` and `read_processor`; "unknown_name" for any other name.
    """
    kind, mark, text = model.partition("{")
    if kind in IMAGE_KINDS and (model.endswith("}") or not mark):
        fields = parse_fields(mark + text) if mark else {}
        mean = fields.pop("image_mean", None)
        std = fields.pop("image_std", None)
        return ImageTower(kind=kind, fields=fields, mean=mean, std=std)
    folder = Path(model)
    if model.endswith("}") or not folder.is_dir():
        message = (
            f"hf:{model} is no local folder and no image encoder of transformers; give the "
            f"folder of a model, or one of {', '.join(IMAGE_KINDS)}"
        )
        raise ConfigError(message, "unknown_name", field="name")
    kind, fields = read_tower(folder, "image")
    prepared = read_processor(folder)
    if prepared is None:
        return ImageTower(kind=kind, fields=fields, folder=folder)
    return ImageTower(
        kind=kind,
        fields=fields,
        folder=folder,
        image_size=prepared.size,
        mean=prepared.mean,
        std=prepared.std,
    )


def check_size(tower: ImageTower) -> None:
    """Raise ConfigError ("conflict") where the image processor gives images of a size for which
    the network has no positions, and does not interpolate them by itself.
    """
    own = tower.fields.get("image_size")
    interpolates = tower.kind in ("dinov2", "dinov2_with_registers")
    if tower.folder is None or interpolates or tower.image_size in (None, own):
        return
    message = (
        f"{tower.folder}: its image processor gives {tower.image_size} pixels, the image_size of "
        f"its {CONFIG_FILE} is {own}; correct one of both, or give image_size to interpolate the "
        f"positions"
    )
    raise ConfigError(message, "conflict", field="image_size")


def read_tower(folder: Path, side: Side) -> tuple[str, dict[str, Any]]:
    """Return (model type, fields of its configuration) of a folder's image or text tower.

    Of a folder with two towers (SigLIP, CLIP), its part is read.

    Raises:
        ConfigError: as `read_config` and `resolve_config`; "unsupported" for a model type without
            such a tower, or an activation that transformers does not have.
    """
    path = folder / CONFIG_FILE
    content = read_config(folder)
    kind = content["model_type"]
    kinds = IMAGE_KINDS if side == "image" else TEXT_KINDS
    if kind in PAIRS:
        whole = resolve_config(content, path)
        part, ending = _TOWER[side]
        config = getattr(whole, part)
        kind = f"{kind}_{ending}"
        fields = _own_fields(config)
        if "projection_dim" in fields:  # that of the towers stays at its default
            fields["projection_dim"] = whole.projection_dim
    elif kind in kinds:
        config = resolve_config(content, path)
        fields = _own_fields(config)
    else:
        reason = _REFUSED.get(kind, f"expected {', '.join((*PAIRS, *kinds))}")
        message = f"{path}: no {side} encoder of model_type {kind!r}: {reason}"
        raise ConfigError(message, "unsupported", field="name")
    check_activation(config.hidden_act, str(path))
    return kind, fields


def check_activation(name: Any, where: str) -> None:
    """Raise ConfigError ("unsupported") unless transformers has an activation of this name."""
    from transformers.activations import ACT2CLS

    if not isinstance(name, str) or name not in ACT2CLS:
        near = difflib.get_close_matches(str(name), ACT2CLS, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(ACT2CLS)}"
        message = f"{where}: hidden_act {name!r} is no activation of transformers: {hint}"
        raise ConfigError(message, "unsupported", field="hidden_act")


def _own_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a tower's configuration that describe its network, JSON values only."""
    import transformers

    general = transformers.PretrainedConfig().to_dict().keys() | _NOT_OF_THE_TOWER
    known = type(config)().to_dict().keys() - general
    return {key: value for key, value in config.to_dict().items() if key in known}


def parse_fields(text: str) -> dict[str, Any]:
    """Return the fields of a name such as `hf:bert{"hidden_size": 192}`. Raises ConfigError if
    they are malformed.
    """
    try:
        fields = parse_json(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        message = (
            "expected hf:TYPE with a JSON object of fields, such as hf:bert{"
            + '"hidden_size": 192}'
        )
        raise ConfigError(message, "malformed", field="name")
    return fields


def check_fields(name: str, fields: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError ("unknown_name"), with similar names, for a field that is not known."""
    known = list(known)
    for field in fields:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=3)
            hint = (
                f"did you mean {', '.join(near)}?"
                if near
                else f"choose from {', '.join(sorted(known)[:12])}, ..."
            )
            raise ConfigError(
                f"unknown argument {field!r} of {name}: {hint}", "unknown_name", field=field
            )


def local_folder(name: str, presets: Mapping[str, Any]) -> Path | None:
    """Return the local folder of a name such as `hf:FOLDER` or `FOLDER`; None for other names.

    A model type of transformers is no folder: `hf:bert`, even beside a folder `bert`.
    """
    if not name or name in presets or name.endswith("}"):  # fields may be too long for a path
        return None
    folder = Path(name.removeprefix("hf:"))
    if not folder.is_dir():
        folder = Path(name)
    return folder if folder.is_dir() and not _is_type(name) else None


def _is_type(name: str) -> bool:
    if not name.startswith("hf:") or "/" in name:
        return False
    import transformers

    return name.removeprefix("hf:") in transformers.CONFIG_MAPPING


# Image processors.

KERNELS: Mapping[int, Literal["bilinear_antialias", "bicubic_antialias"]] = {
    2: "bilinear_antialias",
    3: "bicubic_antialias",
}
"""Pillow's number of a filter -> kernel of `EvalTransform`."""
_SQUARE = {"height": 224, "width": 224}
_SHORT = {"shortest_edge": 224}
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_OF_CLIP = {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
PROCESSORS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "SiglipImageProcessor": {"size": _SQUARE, "resample": 3, **_HALVES},
        "ViTImageProcessor": {"size": _SQUARE, "resample": 2, **_HALVES},
        "CLIPImageProcessor": {
            "size": _SHORT, "crop_size": _SQUARE, "resample": 3, "do_center_crop": True, **_OF_CLIP,
        },
        "BitImageProcessor": {
            "size": _SHORT, "crop_size": _SQUARE, "resample": 3, "do_center_crop": True, **_OF_CLIP,
        },
    }
)  # fmt: skip
"""Class of an image processor -> its defaults, which a file may leave out."""
_ON = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
_READ = {
    *_ON,
    *("size", "crop_size", "resample", "do_center_crop", "image_mean", "image_std"),
    "rescale_factor",
}
_WITHOUT_EFFECT = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    *("_valid_processor_keys", "data_format", "input_data_format", "return_tensors", "device"),
    *("disable_grouping", "default_to_square", "image_seq_length", "do_pad", "num_channels"),
}
"""Keys that do not change the pixels of one image; `do_pad` is refused where it is true."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """What an image processor's file says: the arguments of `EvalTransform`, and the statistics."""

    size: int
    fit: Literal["crop", "squash"]
    resize: Literal["bilinear_antialias", "bicubic_antialias"]
    margin: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def transform(self) -> dict[str, Any]:
        """Return the arguments of `medvl.data.EvalTransform`."""
        names = ("size", "fit", "resize", "margin")
        return {name: getattr(self, name) for name in names} | {"crop_rounding": "down"}


def read_processor(folder: Path) -> Preparation | None:
    """Return the preparation of images that a folder's image processor describes; None without a
    file of one.

    Raises:
        ConfigError: "malformed" or "out_of_range" for values that no processor has; "unsupported"
            for a class, or a key, that medvl cannot honour.
    """
    for name in PROCESSOR_FILES:
        path = folder / name
        try:
            content = read_json(path, ConfigError)
        except FileNotFoundError:
            continue
        content = content.get("image_processor") if path.stem == "processor_config" else content
        if content is not None:
            return _preparation(content, path)
    return None


def _preparation(content: Any, path: Path) -> Preparation:
    if not isinstance(content, dict):
        message = f"{path}: expected a JSON object, got {type(content).__name__}"
        raise ConfigError(message, "malformed")
    kind = _processor_class(content, path)
    wrong = sorted(set(content) - _READ - _WITHOUT_EFFECT)
    refused = [key for key in wrong if content[key] not in (None, False)]
    refused += ["do_pad"] if content.get("do_pad") else []
    if refused:
        message = (
            f"{path}: medvl does not honour {refused[0]} = {content[refused[0]]!r}; remove the "
            f"key if it does not change pixels, or prepare images yourself"
        )
        raise ConfigError(message, "unsupported", field=refused[0])
    given = {key: value for key, value in content.items() if value is not None}
    settings: dict[str, Any] = {**_ON, "do_center_crop": False, **PROCESSORS[kind], **given}
    if not settings["do_resize"]:
        message = (
            f"{path}: do_resize is false, so the file does not say how images are resized; set "
            f"it to true with the model's size and resample (2 bilinear, 3 bicubic)"
        )
        raise ConfigError(message, "unsupported", field="do_resize")
    factor = settings.get("rescale_factor", 1 / 255)
    if not settings["do_rescale"] or not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        message = f"{path}: medvl scales pixels by 1/255; expected do_rescale with rescale_factor"
        raise ConfigError(f"{message} 0.00392156862745098", "unsupported", field="rescale_factor")
    resample = settings["resample"]
    if isinstance(resample, bool) or resample not in KERNELS:
        message = f"{path}: expected resample 2 (bilinear) or 3 (bicubic), got {resample!r}"
        raise ConfigError(message, "unsupported", field="resample")
    crops = bool(settings["do_center_crop"])
    side, is_short = _side(settings["size"], path, "size", short="crop_size" in PROCESSORS[kind])
    size = _side(settings["crop_size"], path, "crop_size")[0] if crops else side
    crops &= is_short or size != side  # a crop of the whole square
    if is_short != crops or (side - size) % 2 or side < size:
        message = (
            f"{path}: medvl resizes both sides, or crops the centre after a resize of the short "
            f"side by an even number of pixels; got size {settings['size']}, do_center_crop "
            f"{crops}, crop_size {settings.get('crop_size')}"
        )
        raise ConfigError(message, "unsupported", field="size")
    normalizes = bool(settings["do_normalize"])
    mean = numbers(settings, "image_mean", path) if normalizes else (0.0, 0.0, 0.0)
    std = numbers(settings, "image_std", path) if normalizes else (1.0, 1.0, 1.0)
    if min(std) <= 0:
        message = f"{path}: expected image_std above 0, got {list(std)}"
        raise ConfigError(message, "out_of_range", field="image_std")
    return Preparation(
        size=size,
        fit="crop" if crops else "squash",
        resize=KERNELS[resample],
        margin=(side - size) // 2,
        mean=mean,
        std=std,
    )


def _processor_class(content: Mapping[str, Any], path: Path) -> str:
    """Return the class without the endings of its faster and Pillow's variants."""
    name = content.get("image_processor_type") or content.get("feature_extractor_type")
    kind = str(name).removesuffix("Fast").removesuffix("Pil")
    kind = kind.replace("FeatureExtractor", "ImageProcessor")
    if kind not in PROCESSORS:
        message = (
            f"{path}: medvl does not have the image processor {name!r}; expected "
            f"image_processor_type {', '.join(PROCESSORS)}"
        )
        raise ConfigError(message, "unsupported", field="image_processor_type")
    return kind


def _side(value: Any, path: Path, key: str, *, short: bool = False) -> tuple[int, bool]:
    """Return the side of a square in pixels, and whether it is that of an image's short side;
    `short`: a single number is one.
    """
    is_short = isinstance(value, dict) and set(value) == {"shortest_edge"}
    if isinstance(value, dict) and set(value) == {"height", "width"}:
        sides = list(value.values())
    elif isinstance(value, dict):
        sides = [value["shortest_edge"]] * 2 if is_short else [None, None]
    else:
        sides = [value, value]
        is_short = short
    side = sides[0]
    if not isinstance(side, int) or isinstance(side, bool) or sides[1] != side or side <= 0:
        message = (
            f"{path}: expected {key} as one number, shortest_edge, or equal height and width; "
            f"got {value!r}"
        )
        raise ConfigError(message, "unsupported", field=key)
    return side, is_short


def numbers(content: Mapping[str, Any], name: str, path: Path) -> tuple[float, ...]:
    """Return three numbers of a file. Raises ConfigError ("malformed") for anything else."""
    values = content.get(name)
    triple = tuple(
        float(value)
        for value in (values if isinstance(values, list) else ())
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
    if len(triple) != 3 or not isinstance(values, list) or len(values) != 3:
        message = f"{path}: expected {name} of three numbers, got {values!r}"
        raise ConfigError(message, "malformed", field=name)
    return triple
