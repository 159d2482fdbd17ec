"""Readers of what a batch shows, and the memory that volumes take."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from medvl.data.images.codecs import JpegImage, decode_image, is_jpeg
from medvl.data.loading.items import NO_IMAGE, NO_PIXELS, ItemMaker, Views
from medvl.data.loading.sources import Source, has_organs, has_volumes, parts_of
from medvl.data.loading.studies import NO_PRIOR, StudySource, prior_positions
from medvl.data.shards.regions import Regions
from medvl.data.volumes.codec import stored_padding
from medvl.data.volumes.resampling import rgb_slices
from medvl.data.volumes.transform import CutVolume, Shape, VolumeTransform, stored_shape
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Inputs, Sample

Image = np.ndarray | JpegImage
"""Decoded pixels, or a JPEG that its transform decodes."""
Encoded = np.ndarray | JpegImage | bytes
"""A JPEG whose header was checked, another file of an image, or pixels of a source without files.
"""

_log = logging.getLogger(__name__)

MEMORY = 8 << 30
"""Default bytes of the volumes that a loader's workers prefetch."""


class Reader(Protocol):
    """What a loader reads of a sample for a batch: its image, regions, volume or slices.

    `read` decodes what is stored, `views` augments it; runs in the loader's workers.
    """

    def fetch(self, epoch: int, position: int, key: str) -> Any:
        """Return what `read` decodes, if it is small enough to be held for a whole batch. None:
        `read` reads it.
        """
        return None

    def read(self, epoch: int, position: int, key: str, sample: Sample, fetched: Any = None) -> Any:
        """Return what is stored of the sample at `position`, None where it has no image."""

    def views(self, epoch: int, key: str, sample: Sample, stored: Any) -> Views:
        """Return what `read` returned as the batch has it. `key` seeds the augmentation."""


class ImageReader(Reader):
    """Images, with the prior image and other ones of the study where the system needs them."""

    def __init__(
        self,
        source: Any,
        maker: ItemMaker,
        color: bool,
        prior: Callable[[int], Encoded | None] | None,
        *,
        draws_views: bool,
        decodes: bool,
    ) -> None:
        self._source = source
        self._maker = maker
        self._color = color
        self._prior = prior
        self._draws_views = draws_views
        self._decodes = decodes
        self._stored = stores_images(source)

    def fetch(self, epoch: int, position: int, key: str) -> Any:
        """Return the files of the image, the prior one and the others of the study."""
        return self._images(epoch, position, key) if self._stored else None

    def read(self, epoch: int, position: int, key: str, sample: Sample, fetched: Any = None) -> Any:
        """Return the image, the prior one and the others of the study; None without an image."""
        images: _Images = fetched or self._images(epoch, position, key)
        if not images.of_study:
            return None
        first, *others = map(self._decode, images.of_study)
        return first, None if images.prior is None else self._decode(images.prior), others

    def views(self, epoch: int, key: str, sample: Sample, stored: Any) -> Views:
        if stored is None:
            return self._maker.placeholder(self._color)
        image, prior, others = stored
        return self._maker.views(key, image, epoch, prior, sample, others)

    def _images(self, epoch: int, position: int, key: str) -> "_Images":
        of_study = self._of_study(epoch, position, key)
        if not of_study or self._prior is None:
            return _Images(of_study, None)
        return _Images(of_study, self._prior(position))

    def _of_study(self, epoch: int, position: int, key: str) -> list[Encoded]:
        if not isinstance(self._source, StudySource):
            image = fetch_image(self._source, position, self._color, stored=self._stored)
            return [] if image is None else [image]
        rng = self._maker.rng(epoch, key, "views") if self._draws_views else None
        read = functools.partial(
            fetch_image, self._source.source, color=self._color, stored=self._stored
        )
        return self._source.images_of(position, read, self._maker.inputs.study_images, rng)

    def _decode(self, image: Encoded) -> Image:
        if isinstance(image, bytes):
            return decode_image(image, color=self._color)
        return image.decode() if isinstance(image, JpegImage) and self._decodes else image


class _Images(NamedTuple):
    """Images of a sample as they are stored."""

    of_study: Sequence[Encoded]
    prior: Encoded | None


def stores_images(source: Any) -> bool:
    """Return whether `pixels` of a source decodes the file that `image_bytes` returns: not where a
    view changes the pixels, nor for the files of a corpus.
    """
    owners = [
        next((kind for kind in type(source).__mro__ if name in vars(kind)), None)
        for name in ("image_bytes", "pixels")
    ]
    is_one = owners[0] is not None and owners[0] is owners[1]
    return is_one and all(map(stores_images, parts_of(source)))


def fetch_image(source: Any, position: int, color: bool, *, stored: bool) -> Encoded | None:
    """Return the image as it is stored, or its pixels where it is not `stored` (`stores_images`);
    None where the sample has none.

    Raises ImageError for the header of a JPEG.
    """
    try:
        if not stored:
            pixels: np.ndarray = source.pixels(position, color)
            return pixels
        data: bytes = source.image_bytes(position)
    except ImageError as error:
        if error.code != NO_IMAGE:
            raise
        return None
    return JpegImage(data, color=color) if is_jpeg(data) else data


def reads_prior(inputs: Inputs) -> bool:
    """Return whether prompts have the prior report."""
    return inputs.prompt is not None and inputs.prompt.reads_prior


def positions_of_priors(source: Source, inputs: Inputs, train: bool) -> NDArray[np.int64] | None:
    """Return the position of each sample's prior one, for models that read its image or report.

    Sources with `prior_pixels` know the prior images themselves, and have no prior reports.

    Raises ConfigError where no sample has one; a model that writes behind a prompt also reads
    studies without.
    """
    if hasattr(source, "prior_pixels") or not (inputs.prior_image or reads_prior(inputs)):
        return None
    prior_N = prior_positions(source)
    if (prior_N == NO_PRIOR).all():
        if not train and inputs.prompt is not None:
            _log.warning("no sample has a prior image or report; none is read")
            return prior_N
        message = (
            "no sample has a prior image: convert a corpus that has the order of a patient's "
            "studies"
        )
        raise ConfigError(message, "unsupported", field="prior_image")
    return prior_N


def prior_reader(
    source: Any, prior_N: NDArray[np.int64] | None, color: bool
) -> Callable[[int], Encoded | None]:
    """Return the function from a position to the prior image, None without one."""
    if hasattr(source, "prior_pixels"):
        return functools.partial(source.prior_pixels, color=color)
    assert prior_N is not None, "sources without prior images have the order of studies"
    stored = stores_images(source)

    def fetch(position: int) -> Encoded | None:
        prior = int(prior_N[position])
        return None if prior == NO_PRIOR else fetch_image(source, prior, color, stored=stored)

    return fetch


class RegionReader(Reader):
    """Regions of a detector, or stored features, of the images of a study that the system reads;
    the pixels are not decoded.
    """

    def __init__(self, source: Any, maker: ItemMaker) -> None:
        self._source = source
        self._maker = maker
        self._limit = maker.inputs.study_images

    def read(
        self, epoch: int, position: int, key: str, sample: Sample, fetched: Any = None
    ) -> list[Regions]:
        if isinstance(self._source, StudySource):
            read = functools.partial(_read_regions, self._source.source)
            return self._source.images_of(position, read, self._limit)
        regions = _read_regions(self._source, position)
        return [] if regions is None else [regions]

    def views(self, epoch: int, key: str, sample: Sample, stored: Any) -> Views:
        phrases = self._maker.phrases(key, sample, epoch) if stored else ()
        return dataclasses.replace(region_views(stored), phrases=phrases)


def _read_regions(source: Any, position: int) -> Regions | None:
    try:
        regions: Regions = source.regions(position)
        return regions
    except ImageError as error:
        if error.code != NO_IMAGE:
            raise
        return None


def region_views(images: Sequence[Regions]) -> Views:
    """Return the regions of the images of one sample, which may have none."""
    return Views(
        NO_PIXELS,
        has_image=bool(images),
        regions=images[0] if images else None,
        other_regions=tuple(images[1:]),
    )


class VolumeReader(Reader):
    """The cut of each volume by a transform of volumes; air without organs where there is none."""

    def __init__(self, source: Any, maker: ItemMaker, transform: VolumeTransform) -> None:
        self._source = source
        self._maker = maker
        self._transform = transform

    def read(
        self, epoch: int, position: int, key: str, sample: Sample, fetched: Any = None
    ) -> CutVolume | None:
        rng = self._maker.rng(epoch, key, "image")
        return cut_volume(self._source, position, sample, self._transform, rng)

    def views(self, epoch: int, key: str, sample: Sample, stored: Any) -> Views:
        volume = self._transform.empty() if stored is None else stored
        return Views(NO_PIXELS, has_image=stored is not None, volume=volume)


class SliceReader(Reader):
    """Slices of each volume in RGB for a transform of images: one that is drawn, the middle one, or
    several in a stack.
    """

    def __init__(self, source: Any, maker: ItemMaker, count: int, *, draws: bool) -> None:
        self._source = source
        self._maker = maker
        self._draws = draws
        self.count = count

    def read(
        self, epoch: int, position: int, key: str, sample: Sample, fetched: Any = None
    ) -> np.ndarray | None:
        rng = self._maker.rng(epoch, key, "slice") if self._draws else None
        return read_slices(self._source, position, sample, self.count, rng)

    def views(self, epoch: int, key: str, sample: Sample, stored: Any) -> Views:
        if stored is None:
            return self._maker.placeholder(color=True)
        if self.count == 1:
            return self._maker.views(key, stored[0], epoch, None, sample)
        images = [self._maker.views(key, pixels, 0).image.image_HWC for pixels in stored]
        return Views(NO_PIXELS, slices_NCHW=np.stack(images).transpose(0, 3, 1, 2))


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
    names = ["prior_image", "other_views", "drawn_view", "regions"]
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
) -> CutVolume | None:
    """Return the cut of the transform's size, None where the sample has no volume; only the chunks
    of the cut are decoded. Organs are 0 without masks.

    Raises ShardError.
    """
    shape = _shape(source, position, sample)
    if shape is None:
        return None
    cut = transform.cut(shape, rng, organ_box_of(sample, shape) if transform.organs else None)
    volume = source.volume(position, cut.source[0])
    volume_DHW = transform.fill(volume.hu_DHW, cut, stored_padding(volume, sample.extra))
    if not transform.organs:
        return CutVolume(volume_DHW, None)
    organs_DHW = source.organs(position, cut.source[0])
    if organs_DHW is None:
        return CutVolume(volume_DHW, np.zeros(volume_DHW.shape, np.uint8))
    return CutVolume(volume_DHW, transform.fill(organs_DHW, cut, 0))


def organ_box_of(sample: Sample, shape: Shape) -> list[list[int]] | None:
    """Return the box of a stored volume's organs, as `VolumeTransform.cut` takes it; None where the
    sample has none. Raises ShardError.
    """
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
