"""Creation of image encoders by name.

A name is a preset (`medvl.encoders.presets`), or the name of a timm, torchvision or open_clip
model, looked up in this order; `timm:NAME`, `torchvision:NAME` and `open_clip:NAME` select the
library. `patches:SIDE` is the image source of ViLT: raw patches of SIDE pixels, without parameters;
`pixelhop` with `pretrained=FOLDER` is a PixelHop++ that `medvl fit-pixelhop` fitted. Values of
`pretrained` are described in `medvl.encoders.pretrained`.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any

from medvl.common.config_io import check_choice
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
        name: a preset, or a model of timm, torchvision or open_clip (see the module's docstring).
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
        projection: project `pooled_BD` into the shared space (open_clip only).
        mean, std: statistics of pixels in 0..1, one value or three. Default: the preset's or the
            library's.
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
    if projection and library != "open_clip":
        raise ConfigError(
            f"{name} has no projection: use an open_clip encoder", "unsupported", field="projection"
        )
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
    vision = _build(library, model, {**(preset.arguments if preset else {}), **arguments}, options)
    if pretrained is False or (pretrained is True and library == _PATCHES):
        return ImageEncoder(vision, options)
    return _load(vision, options, preset, pretrained)


def image_has_projection(name: str) -> bool:
    """Return whether `create_image_encoder` can build this encoder with `projection=True`.

    Raises:
        ConfigError: "unknown_name".
    """
    return _resolve(name)[0] == "open_clip"


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


def _names(library: str) -> Sequence[str]:
    if library == "timm":
        import timm

        return list(timm.list_models())
    if library == "torchvision":
        from torchvision import models

        return list(models.list_models(module=models))
    import open_clip

    return list(open_clip.list_models())


def _resolve(name: str) -> tuple[str, str, ImagePreset | None]:
    """Return (library, model, preset) of a name, searching the presets first, then library by
    library.
    """
    preset = IMAGE_PRESETS.get(name)
    library, separator, model = (preset.model if preset else name).partition(":")
    if preset is not None or name == _PIXELHOP or (library == _PATCHES and separator):
        return library, model, preset
    if separator and library not in _LIBRARIES:
        raise ConfigError(
            f"{name!r}: expected library in {_LIBRARIES}, got {library!r}",
            "unknown_name",
            field="name",
        )
    for candidate in [library] if separator else _LIBRARIES:
        target = model if separator else name
        names = _names(candidate)
        is_known = target in names or target.partition(".")[0] in names  # timm: NAME.TAG
        if is_known or name == f"open_clip:{OPEN_CLIP_CUSTOM}":
            return candidate, target, None
    known = dict.fromkeys(
        [*IMAGE_PRESETS, *(known for candidate in _LIBRARIES for known in _names(candidate))]
    )
    near = difflib.get_close_matches(model or name, known, n=4)
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
        from medvl.encoders.image.timm_models import build_timm

        return build_timm(model, arguments)
    if library == "torchvision":
        from medvl.encoders.image.torchvision_models import build_torchvision

        return build_torchvision(model, arguments, options.patch_level, options.image_size)
    if library == "open_clip":
        from medvl.encoders.image.open_clip_models import build_open_clip

        return build_open_clip(model, arguments, options.projection)
    if library == _PIXELHOP:
        from medvl.encoders.image.pixelhop import build_pixelhop

        return build_pixelhop(arguments)
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
        vision = dataclasses.replace(
            vision, image_size=options.image_size
        )  # positions of this size already (M3AE)
        vision.adapter.resize(vision.net, vision.image_size)
        load_strictly(vision.net, tensors, keys, source)
    return ImageEncoder(vision, options)


def _count_fitting(keys: Sequence[str], vision: VisionBackbone) -> int:
    """Return how many keys are those of the model: alone, in medvl's file, or in that of a whole
    open_clip model.
    """
    names = vision.net.state_dict().keys()
    heads = tuple(vision.ignored_heads)
    bare = [key.partition(".")[2] if key.startswith(_ROOTS) else key for key in keys]
    return sum(name in names or key.startswith(heads) for key, name in zip(keys, bare, strict=True))
