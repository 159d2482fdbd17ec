"""Volumes of samples in a loader, and the memory that they take."""

import logging
from typing import Any

import numpy as np

from medvl.data.loading.sources import Source, has_volumes
from medvl.data.volumes.transform import VolumeTransform, stored_shape
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Inputs, Sample

_log = logging.getLogger(__name__)

MEMORY = 8 << 30
"""Default bytes of the volumes that a loader's workers prefetch."""


def check_volumes(
    source: Source, image: Any, image_keys: object, inputs: Inputs, targets: object
) -> bool:
    """Return whether a transform reads volumes.

    Raises ConfigError ("mismatch") where the source has volumes and the transform is for images,
    or the reverse; "conflict" for parts of a batch that are of images.
    """
    reads = isinstance(image, VolumeTransform)
    if reads != has_volumes(source):
        kinds = ("volumes", "images") if reads else ("images", "volumes")
        where = getattr(source, "folder", "the source")
        raise ConfigError(
            f"expected {kinds[0]}, got {kinds[1]} in {where}; give shards of {kinds[0]}, or a "
            f"model of {kinds[1]}",
            "mismatch",
            field="data",
        )
    if not reads:
        return False
    names = ("second_image", "prior_image", "other_view", "drawn_view", "regions")
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
    """Return int16 (D, H, W) of the transform's size, None where the sample has no volume; only the
    chunks of the cut are decoded.

    Raises ShardError.
    """
    try:
        if "shape" not in sample.extra:
            source.volume(position, slice(0, 0))  # tells a sample without a volume from damage
        cut = transform.cut(stored_shape(sample.extra), rng)
        volume = source.volume(position, cut.source[0])
    except ImageError as error:
        if error.code != "no_image":
            raise
        return None
    except ValueError as error:
        raise ShardError(f"sample {sample.key}: {error}", "malformed") from error
    return transform.fill(volume.hu_DHW, cut)


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
