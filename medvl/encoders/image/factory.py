"""Creation of image encoders by name.

A name is a preset (`medvl.encoders.presets`), or the name of a timm, torchvision or open_clip
model, looked up in this order; `timm:NAME`, `torchvision:NAME` and `open_clip:NAME` select the
library. `hf:FOLDER` is the image tower of a folder of transformers (SigLIP, CLIP, DINOv2 with and
without registers, ViT); `hf:TYPE{FIELDS}` is the same without a folder
(`hf:dinov2{"hidden_size": 384}`). `patches:SIDE` is the image source of ViLT: raw patches of SIDE
pixels, without parameters; `pixelhop` with `pretrained=FOLDER` is a PixelHop++ that
`medvl fit-pixelhop` fitted. Values of
`pretrained` are described in `medvl.encoders.pretrained`.
"""

import dataclasses
import difflib
import fnmatch
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from medvl.common.config_io import check_choice
from medvl.encoders.hugging_face import (
    PROCESSOR_FILES,
    ImageTower,
    check_size,
    find_image_tower,
)
from medvl.encoders.image.adapter import Size, VisionBackbone, speed_up_patch_embedding
from medvl.encoders.image.encoder import ImageEncoder, ImageOptions, Pool
from medvl.encoders.presets import IMAGE_PRESETS, OPEN_CLIP_CUSTOM, ImagePreset
from medvl.encoders.pretrained import (
    CLIP_SCALARS,
    CLIP_TEXT_PARTS,
    KeyMap,
    Pretrained,
    fitting_keys,
    load_strictly,
    read_source,
    read_url,
    unused_blocks,
    with_set,
)
from medvl.errors import ConfigError, WeightsError

_LIBRARIES = ("timm", "torchvision", "open_clip")
_PATCHES = "patches"
_PIXELHOP = "pixelhop"
_HUGGING_FACE = "hf"
_RESTRICTED = ("CC-BY-NC", "Health AI")
"""Beginnings of licences that restrict the use of weights."""
_LOG = logging.getLogger(__name__)
_TEXT_KEYS = (*CLIP_TEXT_PARTS, "text_projection", "text.", *CLIP_SCALARS)
"""Key prefixes of an open_clip checkpoint outside its image encoder."""
_ROOTS = ("backbone.", "visual.")


def create_image_encoder(
    name: str,
    *,
    pretrained: Pretrained = False,
    weights: str | None = None,
    in_channels: int = 3,
    image_size: int | Size | None = None,
    stretch: bool = False,
    patch_level: int = -1,
    pool: Pool | None = None,
    projection: bool = False,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    **arguments: Any,
) -> ImageEncoder:
    """Create an image encoder by name.

    Args:
        name: a preset, a model of timm, torchvision or open_clip, or a folder of transformers (see
            the module's docstring).
        pretrained: weights to load (see `medvl.encoders.pretrained`). Random weights are drawn as
            the library does it, from torch's global generator: seed it.
        weights: name of a set of weights in the file, where it has several: `state_dict_ema`,
            `teacher`.
        in_channels: 3, or 1 to sum the stem's weights over RGB and average `mean` and `std`. A grey
            image then gives the same features as its RGB copy if the channels share their
            statistics.
        image_size: side or (height, width), by default the preset's or the library's. Learnt
            positions are interpolated to it, unless the file's have this size already, and reject
            other sizes; other backbones accept any size.
        stretch: stretch images of another size to `image_size`, bilinearly on the device (GLoRIA
            and MGCA).
        patch_level: stage of `patches_BPD` from the end: -1 the last, -2 the one before (GLoRIA, of
            a ResNet-50). `pooled_BD` always belongs to the last. Vision Transformers have -1 only:
            the patches after the final norm.
        pool: "cls" or "avg" of the tokens; None for the model's own pooling.
        projection: project `pooled_BD` into the shared space (open_clip, and CLIP of transformers;
            SigLIP's pooled vector is in it).
        mean, std: statistics of pixels in 0..1, one value or three. Default: the preset's, the
            library's, or those of the image processor in a folder.
        arguments: arguments of the library's constructor (`depth=11`, `channels=(32, 64, 128,
            256)`). A vision Transformer or a ResNet with fewer blocks or stages than its published
            file loads the lower ones.

    Raises:
        ConfigError: the name or an argument is unknown ("unknown_name", with the nearest names in
            the message) or out of range ("out_of_range"), or image_size does not divide into
            patches ("mismatch").
        WeightsError: the weights are not available ("not_found"), do not fit ("mismatch"), have
            values that are not finite ("nonfinite"), or the file has several sets of them
            ("conflict").
    """
    pretrained = with_set(pretrained, weights)
    library, model, preset = _resolve(name)
    if name == _PIXELHOP and not arguments and not isinstance(pretrained, bool):
        from medvl.encoders.image.pixelhop import pixelhop_arguments

        arguments = pixelhop_arguments(pretrained)
        mean = arguments.pop("mean")
        std = arguments.pop("std")
    if projection and not _has_projection(library, model):
        raise ConfigError(
            f"{name} has no projection: use an open_clip encoder", "unsupported", field="projection"
        )
    network: dict[str, Any] = {}  # size of the positions, which are interpolated to image_size
    if library == _HUGGING_FACE and preset is None:
        tower = find_image_tower(model)
        network["image_size"] = tower.fields.get("image_size", image_size)
        if network["image_size"] is None:
            del network["image_size"]
        name = f"{library}:{tower.kind}{json.dumps(network) if network else ''}"
        model = tower.kind
        others = {key: value for key, value in tower.fields.items() if key != "image_size"}
        arguments = {**others, **arguments}
        if image_size is None:
            check_size(tower)
            image_size = tower.image_size
        mean, std = _known_statistics(tower, mean, std)
        if pretrained is True and tower.folder is not None:
            pretrained = tower.folder
    options = ImageOptions(
        name=name,
        in_channels=in_channels,
        image_size=_sides(image_size, preset),
        stretch=stretch,
        patch_level=patch_level,
        pool=pool,
        projection=projection,
        mean=_statistics(mean) or (preset.mean if preset else None),
        std=_statistics(std) or (preset.std if preset else None),
        arguments=arguments,
    )
    published = preset.arguments if preset else network
    vision = _build(library, model, {**published, **arguments}, options)
    if pretrained is False or (pretrained is True and library == _PATCHES):
        return ImageEncoder(vision, options)
    if preset is not None and preset.licence.startswith(_RESTRICTED):
        _warn_of_licence(name, preset.licence)
    return _load(vision, options, preset, pretrained)


def image_has_projection(name: str) -> bool:
    """Return whether `create_image_encoder` can build this encoder with `projection=True`.

    Raises:
        ConfigError: "unknown_name".
    """
    return _has_projection(*_resolve(name)[:2])


def _has_projection(library: str, model: str) -> bool:
    if library != _HUGGING_FACE:
        return library == "open_clip"
    return find_image_tower(model).kind in ("clip_vision_model", "siglip_vision_model")


def without_image_folder(name: str) -> str:
    """Return the name of the same encoder that does not depend on a local folder:
    `hf:TYPE{FIELDS}` for one.
    """
    library, _, model = name.partition(":")
    if library != _HUGGING_FACE or name in IMAGE_PRESETS:
        return name
    tower = find_image_tower(model)
    return name if tower.folder is None else tower.describe()


def list_image_encoders(pattern: str = "*", *, library: str | None = None) -> list[str]:
    """Return the names that match a wildcard, sorted.

    Args:
        pattern: wildcard.
        library: "timm", "torchvision" or "open_clip" for their models; None for the presets.

    Raises:
        ConfigError: "unknown_name" for another library.
    """
    if library is not None:
        check_choice(library, _LIBRARIES, "library")
    return sorted(fnmatch.filter(IMAGE_PRESETS if library is None else _names(library), pattern))


@functools.cache
def _warn_of_licence(name: str, licence: str) -> None:
    """Log the licence of weights that is not a free one, once for each encoder."""
    _LOG.warning("the weights of %s have the licence: %s", name, licence)


def _sides(image_size: int | Size | None, preset: ImagePreset | None) -> Size | None:
    size = image_size or (preset.image_size if preset else None)
    return (
        (size, size)
        if isinstance(size, int)
        else None
        if size is None
        else (int(size[0]), int(size[1]))
    )


def _statistics(values: float | Sequence[float] | None) -> Sequence[float] | None:
    return (values,) if isinstance(values, int | float) else values


def _known_statistics(
    tower: ImageTower,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> tuple[float | Sequence[float] | None, float | Sequence[float] | None]:
    """Return the given statistics, else those of a folder's image processor."""
    mean = tower.mean if mean is None else mean
    std = tower.std if std is None else std
    if tower.folder is not None and (mean is None or std is None):
        message = (
            f"{tower.folder} has no {PROCESSOR_FILES[0]} with the statistics of pixels; add the "
            f"file, or give mean and std"
        )
        raise ConfigError(message, "missing", field="mean")
    return mean, std


def _names(library: str) -> Sequence[str]:
    if library == "timm":
        import timm

        return list(timm.list_models())
    if library == "torchvision":
        from torchvision import models

        return list(models.list_models(module=models))
    import open_clip

    return list(open_clip.list_models())


def _is_listed(library: str, name: str) -> bool:
    """Return whether a library has a model of this name; in timm NAME or NAME.TAG."""
    if library != "timm":
        return name in _names(library)
    import timm

    name = name.partition(".")[0]
    return name in timm.list_models(name)  # sorting all names takes longer than a small model


def _resolve(name: str) -> tuple[str, str, ImagePreset | None]:
    """Return (library, model, preset) of a name, searching the presets first, then library by
    library.
    """
    preset = IMAGE_PRESETS.get(name)
    library, separator, model = (preset.model if preset else name).partition(":")
    if preset is not None or name == _PIXELHOP or (library == _PATCHES and separator):
        return library, model, preset
    if separator and library == _HUGGING_FACE:
        return library, model, None
    if separator and library not in _LIBRARIES:
        raise ConfigError(
            f"{name!r}: expected library in {(*_LIBRARIES, _HUGGING_FACE)}, got {library!r}",
            "unknown_name",
            field="name",
        )
    for candidate in [library] if separator else _LIBRARIES:
        target = model if separator else name
        if _is_listed(candidate, target) or name == f"open_clip:{OPEN_CLIP_CUSTOM}":
            return candidate, target, None
    all_names = dict.fromkeys(
        [
            *IMAGE_PRESETS,
            *(each for candidate in _LIBRARIES for each in _names(candidate)),
        ]
    )
    near = difflib.get_close_matches(model or name, all_names, n=4)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"the presets are {', '.join(IMAGE_PRESETS)}"
    )
    raise ConfigError(f"unknown image encoder {name!r}: {hint}", "unknown_name", field="name")


def _build(
    library: str, model: str, arguments: dict[str, Any], options: ImageOptions
) -> VisionBackbone:
    vision = _build_plain(library, model, arguments, options)
    speed_up_patch_embedding(vision.net)
    return vision


def _build_plain(
    library: str, model: str, arguments: dict[str, Any], options: ImageOptions
) -> VisionBackbone:
    """Build a model with its library, which takes seconds to import."""
    if library == "timm":
        from medvl.encoders.image.libraries import build_timm

        return build_timm(model, arguments)
    if library == "torchvision":
        from medvl.encoders.image.libraries import build_torchvision

        return build_torchvision(model, arguments, options.patch_level, options.image_size)
    if library == "open_clip":
        from medvl.encoders.image.open_clip_models import build_open_clip

        return build_open_clip(model, arguments, options.projection)
    if library == _PIXELHOP:
        from medvl.encoders.image.pixelhop import build_pixelhop

        return build_pixelhop(arguments)
    if library == _HUGGING_FACE:
        from medvl.encoders.image.hugging_face_models import build_hugging_face

        return build_hugging_face(model, arguments, options.projection)
    from medvl.encoders.image.small_networks import build_raw_patches, build_six_stage_resnet

    if library == _PATCHES:
        return build_raw_patches(model, arguments)
    return build_six_stage_resnet(arguments)


def _load(
    vision: VisionBackbone,
    options: ImageOptions,
    preset: ImagePreset | None,
    pretrained: Pretrained,
) -> ImageEncoder:
    """Load published weights before the model is adapted to the options, and medvl's own file
    after that.
    """
    published = preset.weights if preset else None
    if pretrained is True and preset is None and vision.url is not None:
        source = vision.url
        tensors = read_url(vision.url)
    else:
        note = preset.note if preset else vision.note
        source, tensors = read_source(options.name, pretrained, published, note)
    if vision.rename is not None and not _is_own_file(tensors, vision):
        tensors = vision.rename(tensors)
    tensors = fitting_keys(tensors, lambda keys: _count_fitting(keys, vision))
    if any(key.startswith("backbone.") for key in tensors):
        encoder = ImageEncoder(vision, options)
        load_strictly(encoder, tensors, KeyMap(layouts=[[("backbone.", "backbone.")]]), source)
        return encoder
    tower = "visual." if any(key.startswith("visual.") for key in tensors) else ""
    ignored_names = list(vision.ignored_heads)
    if vision.block_prefix is not None:
        ignored_names += unused_blocks(
            vision.block_prefix, [name for name, _ in vision.net.named_parameters()]
        )
    ignored_keys = list(_TEXT_KEYS if tower else ())
    if published and pretrained is True:
        ignored_keys += published.ignored_keys
    keys = KeyMap(layouts=[[(tower, "")]], ignored_keys=ignored_keys, ignored_names=ignored_names)
    try:
        load_strictly(vision.net, tensors, keys, source)
    except WeightsError:
        if options.image_size in (None, vision.image_size) or not vision.adapter.fixed_size:
            raise
        # positions of this size already (M3AE)
        vision = dataclasses.replace(vision, image_size=options.image_size)
        vision.adapter.resize(vision.net, vision.image_size)
        load_strictly(vision.net, tensors, keys, source)
    return ImageEncoder(vision, options)


def _is_own_file(tensors: Mapping[str, Tensor], vision: VisionBackbone) -> bool:
    """Return whether a file has medvl's names: those of the model behind `backbone.`."""
    names = vision.net.state_dict().keys()
    return {key.removeprefix("backbone.") for key in tensors} == names


def _count_fitting(keys: Sequence[str], vision: VisionBackbone) -> int:
    """Return how many keys are those of the model: alone, in medvl's file, or in that of a whole
    open_clip model.
    """
    names = vision.net.state_dict().keys()
    heads = tuple(vision.ignored_heads)
    bare = [key.partition(".")[2] if key.startswith(_ROOTS) else key for key in keys]
    return sum(name in names or key.startswith(heads) for key, name in zip(keys, bare, strict=True))
