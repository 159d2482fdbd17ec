"""Image encoders by name: which there are, and how one is built and filled.

A name is a preset (`medvl.encoders.presets`), or that of a timm, torchvision or open_clip model, looked up in this
order; `timm:NAME`, `torchvision:NAME` and `open_clip:NAME` say which library. What `pretrained` may be stands in
`medvl.encoders.pretrained`.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any

from medvl.encoders.image.adapter import Size, Vision
from medvl.encoders.image.encoder import ImageEncoder, ImageOptions, Pool
from medvl.encoders.image.open_clip_models import CUSTOM
from medvl.encoders.presets import IMAGE_PRESETS, ImagePreset
from medvl.encoders.pretrained import (
    CLIP_SCALARS,
    KeyMap,
    Pretrained,
    beyond,
    load_strictly,
    locate_weights,
    read_tensors,
    read_url,
)
from medvl.errors import ConfigError, WeightsError

_LIBRARIES = ("timm", "torchvision", "open_clip")
_OTHER_TOWER = (
    "transformer.",
    "token_embedding.",
    "positional_embedding",
    "ln_final.",
    "text_projection",
    "text.",
    *CLIP_SCALARS,
)
"""What a whole open_clip checkpoint holds beside its image tower."""


def create_image_encoder(
    name: str,
    *,
    pretrained: Pretrained = False,
    in_channels: int = 3,
    image_size: int | Size | None = None,
    patch_level: int = -1,
    pool: Pool | None = None,
    projection: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **arguments: Any,
) -> ImageEncoder:
    """An image encoder by name.

    Args:
        name, pretrained: see above. At random it starts as its library does, from torch's global generator: seed it.
        in_channels: 1 sums the stem's weights over RGB: a grey image gives what its RGB copy gives where the channels
            share their statistics, which are averaged.
        image_size: a side or (height, width). Backbones with learnt positions have them interpolated and take no other
            size; a file whose positions are of that size already is taken as it is. For the rest it is only what they
            are meant for. Default: the preset's or the library's.
        patch_level: stage of `patches_BPD` from the end: -1 the last, -2 the one before (GLoRIA's, of a ResNet-50);
            `pooled_BD` is of the last. Vision Transformers have -1 only: all patch tokens after the final norm.
        pool: "cls" or "avg" of the tokens; None is the model's own way.
        projection: open_clip only: `pooled_BD` goes through the tower's projection into the shared space.
        mean, std: of pixels in 0..1, where they differ from the preset's or the library's.
        arguments: for the library's constructor (`depth=11`, `channels=(32, 64, 128, 256)`). A vision Transformer with
            fewer blocks than its published file takes the lower ones.

    Raises:
        ConfigError: the name or an argument is unknown or out of range; the text names the nearest names.
        WeightsError: the weights cannot be had, or do not fit; the text names the first differences.
    """
    library, model, preset = _resolve(name)
    if projection and library != "open_clip":
        raise ConfigError(f"{name} has no projection into a shared space: only open_clip's towers have one")
    options = ImageOptions(
        name=name,
        in_channels=in_channels,
        image_size=_sides(image_size, preset),
        patch_level=patch_level,
        pool=pool,
        projection=projection,
        mean=mean or (preset.mean if preset else None),
        std=std or (preset.std if preset else None),
        arguments=arguments,
    )
    vision = _build(library, model, {**(preset.arguments if preset else {}), **arguments}, options)
    return ImageEncoder(vision, options) if pretrained is False else _load(vision, options, preset, pretrained)


def image_has_projection(name: str) -> bool:
    """Whether `create_image_encoder` can build the encoder with `projection=True`. Raises ConfigError as it does."""
    return _resolve(name)[0] == "open_clip"


def list_image_encoders(pattern: str = "*", *, library: str | None = None) -> list[str]:
    """Names that match a wildcard, sorted: presets, or the models of "timm", "torchvision" or "open_clip".

    Raises ConfigError for another library.
    """
    if library is not None and library not in _LIBRARIES:
        raise ConfigError(f"library is {library!r}: known are {', '.join(_LIBRARIES)}")
    return sorted(fnmatch.filter(IMAGE_PRESETS if library is None else _names(library), pattern))


def _sides(image_size: int | Size | None, preset: ImagePreset | None) -> Size | None:
    size = image_size or (preset.image_size if preset else None)
    return (size, size) if isinstance(size, int) else None if size is None else (int(size[0]), int(size[1]))


def _names(library: str) -> Sequence[str]:
    names: Sequence[str]
    if library == "timm":
        import timm

        names = timm.list_models()
    elif library == "torchvision":
        from torchvision import models

        names = models.list_models(module=models)
    else:
        import open_clip

        names = open_clip.list_models()
    return names


def _resolve(name: str) -> tuple[str, str, ImagePreset | None]:
    """(library, model, preset) of a name; a bare name is looked for in the presets first, then library by library."""
    preset = IMAGE_PRESETS.get(name)
    library, separator, model = (preset.model if preset else name).partition(":")
    if separator and library not in _LIBRARIES:
        raise ConfigError(f"{name!r}: {library!r} is no library of encoders; known are {', '.join(_LIBRARIES)}")
    if preset is not None:
        return library, model, preset
    for candidate in [library] if separator else _LIBRARIES:
        wanted = model if separator else name
        names = _names(candidate)
        if wanted in names or wanted.partition(".")[0] in names or name == f"open_clip:{CUSTOM}":  # timm has NAME.TAG
            return candidate, wanted, None
    known = [*IMAGE_PRESETS, *(known for candidate in _LIBRARIES for known in _names(candidate))]
    near = difflib.get_close_matches(model or name, known, n=4)
    hint = f"did you mean {', '.join(near)}?" if near else f"presets are {', '.join(IMAGE_PRESETS)}"
    raise ConfigError(f"no image encoder is called {name!r}: {hint}")


def _build(library: str, model: str, arguments: dict[str, Any], options: ImageOptions) -> Vision:
    if library == "timm":
        from medvl.encoders.image.timm_models import build_timm

        return build_timm(model, arguments)
    if library == "torchvision":
        from medvl.encoders.image.torchvision_models import build_torchvision

        return build_torchvision(model, arguments, options.patch_level, options.image_size)
    from medvl.encoders.image.open_clip_models import build_open_clip

    return build_open_clip(model, arguments, options.projection)


def _load(vision: Vision, options: ImageOptions, preset: ImagePreset | None, pretrained: Pretrained) -> ImageEncoder:
    """Fill the model as it was published, then fit it to the options; a file of ours fits the finished encoder."""
    published = preset.weights if preset else None
    if pretrained is True and preset is None and vision.url is not None:
        source, tensors = vision.url, read_url(vision.url)
    else:
        path = locate_weights(options.name, pretrained, published, preset.note if preset else vision.note)
        source, tensors = str(path), read_tensors(path)
    if any(key.startswith("backbone.") for key in tensors):
        encoder = ImageEncoder(vision, options)
        load_strictly(encoder, tensors, KeyMap(layouts=[[("backbone.", "backbone.")]]), source)
        return encoder
    tower = "visual." if any(key.startswith("visual.") for key in tensors) else ""
    without = list(vision.heads)
    if vision.blocks is not None:
        without += beyond(vision.blocks, [name for name, _ in vision.net.named_parameters()])
    drop = [*(_OTHER_TOWER if tower else ()), *(published.drop if published and pretrained is True else ())]
    keys = KeyMap(layouts=[[(tower, "")]], drop=drop, without=without)
    try:
        load_strictly(vision.net, tensors, keys, source)
    except WeightsError:
        if options.image_size in (None, vision.image_size) or not vision.adapter.fixed_size:
            raise
        vision = dataclasses.replace(vision, image_size=options.image_size)  # positions of that size already (M3AE)
        vision.adapter.resize(vision.net, vision.image_size)
        load_strictly(vision.net, tensors, keys, source)
    return ImageEncoder(vision, options)
