"""Readers of what a batch shows, and the memory that volumes take."""

import logging
from typing import Any

import numpy as np

from medvl.data.loading.sources import Source, has_organs, has_volumes
from medvl.data.volumes.slices import rgb_slices
from medvl.data.volumes.transform import Shape, VolumeTransform, stored_shape
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Inputs, Sample

_log = logging.getLogger(__name__)

MEMORY = 8 << 30
"""Default bytes of the volumes that a loader's workers prefetch."""

DRAWN = 0
"""Slices of a loader that draws one of each volume."""


def check_volumes(
    source: Source, image: Any, image_keys: object, inputs: Inputs, targets: object
) -> bool:
    """Return whether a source has volumes, of which a transform of images reads slices.

    Raises ConfigError ("mismatch") where a transform of volumes is given images; "conflict" for
    parts of a batch that are of images.
    """
    if not has_volumes(source):
        if isinstance(image, VolumeTransform):
            where = getattr(source, "folder", "the source")
            raise ConfigError(
                f"expected volumes, got images in {where}; give shards of volumes, or a model of "
                "images",
                "mismatch",
                field="data",
            )
        return False
    if isinstance(image, VolumeTransform) and image.organs and not has_organs(source):
        where = getattr(source, "folder", "the source")
        raise ConfigError(
            f"expected volumes with masks of organs, got {where} without; convert the corpus with "
            "--organ-masks",
            "missing",
            field="organ_masks",
        )
    names = ["prior_image", "other_view", "drawn_view", "regions"]
    names += ["second_image"] * isinstance(image, VolumeTransform)
    wanted = [name for name in names if getattr(inputs, name)]
    wanted += ["targets"] * (targets is not None)
    wanted += ["image_keys"] * (image_keys is not None)
    if wanted:
        raise ConfigError(
            f"{wanted[0]} is unsupported with volumes; leave it out", "conflict", field=wanted[0]
        )
    return True


def cut_volume(
    source: Any,
    position: int,
    sample: Sample,
    transform: VolumeTransform,
    rng: np.random.Generator | None = None,
) -> np.ndarray | None:
    """Return int16 (C, D, H, W) of the transform's size, None where the sample has no volume; only
    the chunks of the cut are decoded. C is 1, or 2 with organs, which are 0 without masks.

    Raises ShardError.
    """
    shape = _shape(source, position, sample)
    if shape is None:
        return None
    cut = transform.cut(shape, rng, _box(sample, shape) if transform.organs else None)
    volume_DHW = transform.fill(source.volume(position, cut.source[0]).hu_DHW, cut)
    if not transform.organs:
        return volume_DHW[None]
    organs_DHW = source.organs(position, cut.source[0])
    if organs_DHW is None:
        return np.stack([volume_DHW, np.zeros_like(volume_DHW)])
    return np.stack([volume_DHW, transform.fill(organs_DHW, cut, 0)])


def _box(sample: Sample, shape: Shape) -> list[list[int]] | None:
    """Return the box of a sample's organs, None where it has none. Raises ShardError."""
    organs = sample.extra.get("organs")
    box = organs.get("box") if isinstance(organs, dict) else None
    if box is None:
        return None
    fits = (
        isinstance(box, list)
        and len(box) == 3
        and all(
            isinstance(ends, list)
            and len(ends) == 2
            and all(isinstance(end, int) for end in ends)
            and 0 <= ends[0] < ends[1] <= side
            for ends, side in zip(box, shape, strict=True)
        )
    )
    if not fits:
        raise ShardError(f"sample {sample.key}: organs with another box", "malformed")
    return box


def read_slices(
    source: Any,
    position: int,
    sample: Sample,
    count: int = 1,
    rng: np.random.Generator | None = None,
) -> np.ndarray | None:
    """Return uint8 RGB slices (N, H, W, 3) of a volume at even distances, the middle one of one; or
    with `rng` one of the inner 80 %. None where the sample has no volume.

    Raises ShardError.
    """
    shape = _shape(source, position, sample)
    if shape is None:
        return None
    shares = (np.arange(count) + 0.5) / count if rng is None else rng.uniform(0.1, 0.9, 1)
    places = (shares * shape[0]).astype(int).tolist()
    first = places[0]
    volume = source.volume(position, slice(first, places[-1] + 1))
    return rgb_slices(volume, [place - first for place in places])


def _shape(source: Any, position: int, sample: Sample) -> Shape | None:
    """Return the shape of a sample's volume, None where it has none. Raises ShardError."""
    try:
        if "shape" not in sample.extra:
            source.volume(position, slice(0, 0))  # tells a sample without a volume from damage
        return stored_shape(sample.extra)
    except ImageError as error:
        if error.code != "no_image":
            raise
        return None
    except ValueError as error:
        raise ShardError(f"sample {sample.key}: {error}", "malformed") from error


def limited_workers(workers: int, prefetch: int, size: int, memory: int) -> tuple[int, int]:
    """Return the workers, and the batches of `size` bytes that each prefetches, that fit into
    `memory`.

    Raises ConfigError ("too_large") where one batch does not fit.
    """
    fitting = memory // size
    if not fitting:
        raise ConfigError(
            f"a batch of volumes has {size / 2**30:.1f} GiB, over the limit of "
            f"{memory / 2**30:.1f} GiB; take a smaller batch or raise the limit (memory)",
            "too_large",
            field="memory",
        )
    if workers > fitting:
        _log.warning(
            "%d of %d loader workers are used: more would hold over %.1f GiB of volumes",
            *(fitting, workers, memory / 2**30),
        )
        workers = fitting
    return workers, min(prefetch, max(1, fitting // max(1, workers)))
