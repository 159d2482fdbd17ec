"""Loader of training and evaluation batches: global shuffle, exact resume, independent of ranks and
workers.

Batch b of an epoch is the b-th slice of the epoch's permutation (`medvl.data.loading.sampler`) and
rank r decodes the r-th part of it. The state of a loader is therefore two numbers, (epoch, batch),
and resuming costs nothing. All randomness of a sample comes from (seed, epoch, key).
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from medvl.common.ranks import check_ranks
from medvl.data.annotations import is_annotated
from medvl.data.loading.collate import Collate, SkipBudget, Tokenize
from medvl.data.loading.items import NO_IMAGE, Item, ItemMaker, SkippedSample, Views
from medvl.data.loading.readers import (
    MEMORY,
    ImageReader,
    Reader,
    RegionReader,
    SliceReader,
    VolumeReader,
    check_volumes,
    limited_workers,
    positions_of_priors,
    prior_reader,
    reads_prior,
)
from medvl.data.loading.sampler import AllEpochs, BatchSampler, TrainSampler, batch_sampler
from medvl.data.loading.sources import (
    Source,
    has_color,
    is_remote,
    region_manifest_of,
)
from medvl.data.loading.studies import NO_PRIOR, ScanSource, by_study
from medvl.data.loading.workers import TIMEOUT, PassErrors, init_worker, with_worker_errors
from medvl.data.storage.store import map_threads
from medvl.data.transforms.image import ImageTransform
from medvl.data.transforms.text import TextPolicy
from medvl.data.volumes.transform import VolumeTransform
from medvl.errors import (
    ConfigError,
    CorpusError,
    DicomError,
    ImageError,
    ShardError,
    StorageError,
)
from medvl.schema import Batch, Inputs, Sample

if TYPE_CHECKING:
    from medvl.data.loading.dense_targets import DenseTargets


_log = logging.getLogger(__name__)

T = TypeVar("T")

_PREFETCHED = 4
"""Largest number of batches that a worker prefetches."""


class SampleDataset(Dataset[Item | SkippedSample]):
    """Items of a source, indexed by (epoch, position); runs in the loader's workers.

    `reader` reads what the batch shows of each sample. With `keep_imageless`, samples without an
    image get placeholder pixels; otherwise they are skipped. `prior_N` has the positions of prior
    samples, for models that read them.
    """

    def __init__(
        self,
        source: Source,
        maker: ItemMaker,
        reader: Reader,
        image_keys: Sequence[str] | None,
        keep_imageless: bool,
        prior_N: NDArray[np.int64] | None,
        scans: ScanSource | None,
    ) -> None:
        self.source = source
        self.maker = maker
        self.reader = reader
        self.image_keys = image_keys
        self.keep_imageless = keep_imageless
        self._reads_prior = reads_prior(maker.inputs)
        self._prior_N = prior_N
        self._last: tuple[tuple[int, str], Views] | None = None
        self._is_remote = is_remote(source)
        self._scans = scans

    def __getitem__(self, place: tuple[int, int]) -> Item | SkippedSample:
        return self._items([place])[0]

    def __getitems__(
        self, places: Sequence[tuple[int, int]]
    ) -> list[Item | SkippedSample] | StorageError:
        """Return the items of a batch; torch's DataLoader calls this.

        An error of a remote store is returned: raised in a worker process, it would lose its code
        on the way.
        """
        try:
            return self._items(places)
        except StorageError as error:
            return error

    def _items(self, places: Sequence[tuple[int, int]]) -> list[Item | SkippedSample]:
        """Make items stage by stage over the batch (read, decode and augment, select texts): better
        cache locality. Between decoded images, the code of the other stages would be read from
        memory again.
        """
        if (scans := self._scans) is not None:
            seed = self.maker.seed
            places = [(epoch, scans.drawn(epoch, row, seed)) for epoch, row in places]
        if self._is_remote:  # in threads; what is read again below is in memory by then
            collections.deque(
                map_threads(self._request, [position for _, position in places]), maxlen=0
            )
        samples = [self._sample(position) for _, position in places]
        self._make_rngs(places, samples)
        fetched = collections.deque(map(self._fetch, places, samples))
        images = [
            self._image(*place, sample, fetched.popleft())  # without it, all pixels would be held
            for place, sample in zip(places, samples, strict=True)
        ]
        rows = zip(places, samples, images, strict=True)
        return [
            self._item(epoch, position, sample, image) for (epoch, position), sample, image in rows
        ]

    def _sample(self, position: int) -> Sample | SkippedSample:
        try:
            return self.source.sample(position)
        except ShardError as error:
            return SkippedSample(str(error), "sample_unreadable")

    def _request(self, position: int) -> None:
        """Request what an item is made of from a remote store."""
        self._sample(position)
        if self._prior_N is not None and self._prior_N[position] != NO_PRIOR:
            self._sample(int(self._prior_N[position]))
        if self.maker.inputs.regions:
            with contextlib.suppress(ImageError, ShardError):  # raised again where the item is made
                source: Any = self.source
                source.regions(position)

    def _make_rngs(
        self, places: Sequence[tuple[int, int]], samples: Sequence[Sample | SkippedSample]
    ) -> None:
        """Make the generators that every sample of a batch needs."""
        names = []
        for (epoch, position), sample in zip(places, samples, strict=True):
            if isinstance(sample, Sample):
                names.append((epoch, self._image_key(position, sample), "image"))
                names.append((epoch, sample.key, "text"))
        self.maker.make_rngs(names)

    def _image_key(self, position: int, sample: Sample) -> str:
        return sample.key if self.image_keys is None else self.image_keys[position]

    def _fetch(self, place: tuple[int, int], sample: Sample | SkippedSample) -> Any:
        """Return what the reader fetches; None where samples share an image, which is read once."""
        if isinstance(sample, SkippedSample) or self.image_keys is not None:
            return None
        epoch, position = place
        return _or_skipped(sample.key, lambda: self.reader.fetch(epoch, position, sample.key))

    def _image(
        self, epoch: int, position: int, sample: Sample | SkippedSample, fetched: Any
    ) -> Views | SkippedSample:
        """Return the augmented images. Samples that share an image are adjacent, so the last
        image is cached.
        """
        if isinstance(sample, SkippedSample):
            return sample
        if isinstance(fetched, SkippedSample):
            return fetched
        key = self._image_key(position, sample)
        if self.image_keys is not None and self._last is not None and self._last[0] == (epoch, key):
            return self._last[1]

        def views() -> Views:
            stored = self.reader.read(epoch, position, key, sample, fetched)
            return self.reader.views(epoch, key, sample, stored)

        image = _or_skipped(sample.key, views)
        if isinstance(image, SkippedSample):
            return image
        if not image.has_image and not self.keep_imageless:
            return SkippedSample(sample.key, NO_IMAGE)
        self._last = None if self.image_keys is None else ((epoch, key), image)
        return image

    def _item(
        self,
        epoch: int,
        position: int,
        sample: Sample | SkippedSample,
        image: Views | SkippedSample,
    ) -> Item | SkippedSample:
        if isinstance(sample, SkippedSample):
            return sample
        if isinstance(image, SkippedSample):
            return image
        if self._reads_prior and self._prior_N is not None and self._prior_N[position] != NO_PRIOR:
            prior = self._sample(int(self._prior_N[position]))
            if isinstance(prior, Sample):
                image = dataclasses.replace(image, prior_sections=prior.sections)
        try:
            return self.maker.row(
                sample, image, epoch, None if self.image_keys is None else self.image_keys[position]
            )
        except CorpusError as error:  # of a target
            return SkippedSample(sample.key, f"{error.field}_{error.code}")


def _or_skipped(key: str, read: Callable[[], T]) -> T | SkippedSample:
    """Return what a function reads, or why the sample of this key is left out."""
    try:
        return read()
    except (ImageError, DicomError) as error:
        return SkippedSample(key, error.code)
    except ShardError:
        return SkippedSample(key, "shard_damaged")
    except FileNotFoundError:
        return SkippedSample(key, "image_missing")


class Loader:
    """Batches of one epoch at a time; open one with `open_loader`.

    Iterating yields the rest of the current epoch and then moves to the start of the next one. In
    training, workers start the next epoch while the last batches of this one are in use.
    `state_dict()` counts the batches that were yielded, not those that the workers have prefetched.
    """

    def __init__(
        self,
        source: Source,
        sampler: BatchSampler,
        samples: Any,
        collate: Callable[[Any], tuple[Batch | None, list[SkippedSample]]],
        *,
        workers: int,
        max_skipped: float,
        timeout: float,
        prefetch: int = _PREFETCHED,
    ) -> None:
        self.source = source
        self.samples = samples
        self.collate = collate
        self.global_batch = sampler.global_batch
        self._sampler = sampler
        self._skips = SkipBudget(
            str(getattr(source, "folder", "the files")), max_skipped, len(source)
        )
        self._training = isinstance(sampler, TrainSampler)
        self.ranks = sampler.rank, sampler.world
        """Rank of this loader, and number of ranks."""
        self.last_batch = -1
        """Number of the last batch in this iteration on this rank; batches without a readable
        sample count too.
        """
        self._batches: DataLoader[Any] = DataLoader(
            samples,
            batch_sampler=AllEpochs(sampler) if self._training else sampler,
            num_workers=workers,
            collate_fn=PassErrors(self.collate),
            worker_init_fn=functools.partial(init_worker, beside_gpu=torch.cuda.is_available()),
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            timeout=timeout if workers else 0,
            pin_memory=torch.cuda.is_available(),
        )
        self._ahead: Iterator[tuple[Batch | None, list[SkippedSample]]] | None = None
        """Training batches from the current position on, over all epochs; None: not started."""

    @property
    def slices(self) -> int | None:
        """Slices of each volume that a transform of images reads; None for images."""
        reader = getattr(self.samples, "reader", None)
        return reader.count if isinstance(reader, SliceReader) else None

    @property
    def skipped(self) -> Counter[str]:
        """Number of skips so far, by reason; a sample counts in every pass that leaves it out."""
        return self._skips.reasons

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""
        return self._sampler.epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch on this rank."""
        return len(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        if not self._training:
            yield from self._read(with_worker_errors(self._batches))
            return
        if self._ahead is None:
            self._ahead = with_worker_errors(self._batches)
        left = self.steps_per_epoch - self._sampler.batch
        try:
            yield from self._read(itertools.islice(self._ahead, left))
        except Exception:
            self._ahead = None  # an iterator that raised has no further batches
            raise
        self._sampler.epoch += 1
        self._sampler.batch = 0

    def _read(self, batches: Iterable[tuple[Batch | None, list[SkippedSample]]]) -> Iterator[Batch]:
        """Yield the batches that have a readable sample, and count the samples without."""
        for number, (batch, skipped) in enumerate(batches):
            self.last_batch = number
            self._sampler.batch += (
                self._training
            )  # advance before yielding: a yielded batch counts as consumed
            if skipped:
                self._skips.add(skipped)
            if batch is None:
                self._skips.check_empty_batch(skipped)
                continue
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data and settings it belongs to; JSON values only."""
        return {"epoch": self._sampler.epoch, "batch": self._sampler.batch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position. Raises ConfigError when it belongs to other data, another
        seed or batch size.
        """
        # positions that were saved before `together` existed
        check_identity({"together": 1, **state}, self._identity())
        if not 0 <= state["batch"] <= self.steps_per_epoch or state["epoch"] < 0:
            got = f"batch {state['batch']} of epoch {state['epoch']}"
            message = (
                f"expected a position within {self.steps_per_epoch} batches per epoch, got {got}"
            )
            raise ConfigError(message, "out_of_range", field="batch")
        self._sampler.epoch = int(state["epoch"])
        self._sampler.batch = int(state["batch"])
        self._ahead = None

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._sampler.seed,
            "global_batch": self.global_batch,
            "samples": len(self.source),
            "fingerprint": self.source.fingerprint,
            "together": self._sampler.together,
        }


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ConfigError, its `field` naming the differences, unless a saved position belongs to
    this loader.
    """
    names = ", ".join(name for name, value in identity.items() if state.get(name) != value)
    if names:
        advice = "resume with the same data and settings, or start a new run"
        message = f"the saved loader position belongs to another {names}; {advice}"
        raise ConfigError(message, "mismatch", field=names)


def open_loader(
    source: Source,
    *,
    batch: int,
    image: ImageTransform | VolumeTransform,
    text: TextPolicy,
    tokenizer: Tokenize,
    train: bool,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    workers: int = 0,
    color: bool | None = None,
    max_skipped: float = 0.001,
    together: int = 1,
    timeout: float = TIMEOUT,
    inputs: Inputs | None = None,
    targets: "DenseTargets | None" = None,
    keep_imageless: bool | None = None,
    memory: int = MEMORY,
    slices: int = 1,
) -> Loader:
    """Open a loader over a source. If the source has `image_keys`, evaluation batches hold each
    image once.

    Args:
        source: for example `ShardSource(folder)` or `FileSource(samples, label_names)`.
        batch: in training the global batch size over all ranks; in evaluation the size of each
            batch.
        image, text: image transform, and text policy, which selects the text of a sample. A
            `VolumeTransform` reads volumes in place of images (`Batch.image_BCDHW`).
        tokenizer: runs in the workers; `medvl.data.no_text` for models without a text encoder.
        train: shuffle and drop the incomplete last batch; otherwise yield every sample once, in
            order.
        seed, color: seed of order and augmentation; RGB images (C = 3) or grey ones, None: as the
            source's shards are.
        rank, world: by default those of the process group, or of torchrun. In evaluation 0 and 1
            read all batches.
        workers: number of prefetching processes; 0 reads in this process.
        max_skipped: budget of unreadable samples, each counted once over all passes of this
            process: below 1 a fraction of the source, else a number.
        together: in training, up to this many samples of one image follow one another and share the
            augmented image.
        timeout: seconds without a batch after which a worker is considered hung.
        inputs: optional parts of the batches, `System.inputs`; None: no optional parts. With
            `regions`, `image` is not applied, and `Batch.image_BCHW` has no pixels. With
            `other_views` or `drawn_view`, a row is a study.
        targets: makes training targets in the workers, for example `DenseTargets`.
        keep_imageless: keep samples without an image, else count them as `no_image`. None: keep
            them in training only.
        memory: bytes of the volumes that workers prefetch; fewer workers are used where they would
            need more.
        slices: axial slices of a volume that an `ImageTransform` reads in evaluation, in RGB by
            three windows: the middle one as an image, or several as `Batch.slices_BNCHW`. In
            training, one is drawn.

    Raises:
        ConfigError: the batch is not divisible by the ranks, or larger than the data; the source
            lacks an input, or has images and `image` is for volumes; `world` is 1 in training on
            several ranks.
        BudgetError, ShardError, LoaderError, StorageError: while iterating, when too many samples,
        or all of a batch,
            are unreadable, a worker process died or hangs, or a remote store fails for good.
    """
    rank, world = check_ranks(rank, world, train=train)
    if inputs is not None and inputs.by_study:
        source = by_study(source)
        if rank == 0 and not inputs.drawn_view:
            source.warn_beyond(inputs.study_images)
    image_keys: Sequence[str] | None = getattr(source, "image_keys", None)
    check_settings(len(source), batch, train, world, workers)
    _check_together(together, image_keys)
    sampler = batch_sampler(source, batch, seed, rank, world, train=train, together=together)
    shared = None if train and together == 1 else image_keys
    _check_inputs(inputs or Inputs(), source, shared)
    if train and inputs is not None and inputs.boxed_phrases:
        _check_boxes(source)
    prefetch = _PREFETCHED
    has_volumes = check_volumes(source, image, shared, inputs or Inputs(), targets)
    if has_volumes and isinstance(image, VolumeTransform):
        rows = batch // world if train else batch
        workers, prefetch = limited_workers(workers, prefetch, rows * image.bytes, memory)
    maker = ItemMaker(image, text, source.label_names, seed, inputs, targets)
    prior_N = positions_of_priors(source, maker.inputs, train)
    scans = source if isinstance(source, ScanSource) else None
    read_source = source if scans is None else scans.source
    reader: Reader
    if has_volumes and isinstance(image, VolumeTransform):
        reader = VolumeReader(read_source, maker, image)
    elif has_volumes:
        reader = SliceReader(read_source, maker, 1 if train else max(1, slices), draws=train)
    elif maker.inputs.regions:
        reader = RegionReader(read_source, maker)
    else:
        color = has_color(source) if color is None else color
        reader = ImageReader(
            read_source,
            maker,
            color,
            prior_reader(source, prior_N, color) if maker.inputs.prior_image else None,
            draws_views=train and maker.inputs.drawn_view,
            decodes=not _leaves_jpeg(image, source),
        )
    keep = train if keep_imageless is None else keep_imageless
    samples = SampleDataset(read_source, maker, reader, shared, keep, prior_N, scans)
    collate = Collate(tokenizer, maker.inputs, maker.targets)
    return Loader(
        source,
        sampler,
        samples,
        collate,
        workers=workers,
        max_skipped=max_skipped,
        timeout=timeout,
        prefetch=prefetch,
    )


def _leaves_jpeg(image: Any, source: Source) -> bool:
    """Return whether JPEG images are left to the transform to decode. Raises ConfigError where the
    source has no stored images.
    """
    decode = getattr(image, "decode", "full")
    if decode == "full":
        return False
    if not hasattr(source, "image_bytes"):
        raise ConfigError(
            f"image.decode {decode!r} needs shards, got {type(source).__name__}; leave it out",
            "conflict",
            field="image.decode",
        )
    return True


def _check_together(together: int, image_keys: Sequence[str] | None) -> None:
    if together < 1 or (together > 1 and image_keys is None):
        reason = (
            f"expected together=1, or more for a source whose samples share images, got {together}"
        )
        raise ConfigError(reason, "out_of_range", field="together")


def _check_inputs(inputs: Inputs, source: Source, image_keys: Sequence[str] | None) -> None:
    if inputs.labels and not source.label_names:
        raise ConfigError(
            "the system needs labels and the source has none; use other data",
            "missing",
            field="labels",
        )
    if inputs.second_image and (image_keys is not None or inputs.regions):
        message = (
            "second_image is unsupported where samples share an image, and with regions in "
            "place of pixels"
        )
        raise ConfigError(message, "conflict", field="second_image")
    if inputs.prior_image and (
        inputs.regions or (image_keys is not None and not hasattr(source, "prior_pixels"))
    ):
        message = (
            "prior_image is unsupported with regions in place of pixels, and where samples share "
            "an image, unless the source has the prior image of each (prior_pixels)"
        )
        raise ConfigError(message, "conflict", field="prior_image")
    _check_regions(inputs, source)


def _check_boxes(source: Source) -> None:
    """Raise ConfigError where no sample has boxes: their loss would train nothing."""
    if not any(is_annotated(source.sample(place)) for place in range(len(source))):
        message = "box_weight trains on phrases with boxes, and no training sample has any"
        advice = "set it to 0, or use shards with boxes, such as those of `medvl shards ms-cxr`"
        raise ConfigError(f"{message}; {advice}", "missing", field="box_weight")


def _check_regions(inputs: Inputs, source: Source) -> None:
    manifest = region_manifest_of(source)
    if inputs.regions and manifest is None:
        message = (
            "the system needs regions: run `medvl regions` on the shards, and set "
            "data.regions to their name"
        )
        raise ConfigError(message, "missing", field="regions")
    if inputs.region_classes and manifest is not None and not manifest.class_names:
        message = (
            f"the system needs a distribution over classes, which {manifest.detector} does not have"
        )
        raise ConfigError(f"{message}; use a detector", "missing", field="region_classes")


def check_settings(samples: int, batch: int, train: bool, world: int, workers: int) -> None:
    """Raise ConfigError where a batch does not fit the data or the ranks."""
    if batch < 1:
        raise ConfigError(
            f"expected a batch size of at least 1, got {batch}", "out_of_range", field="batch"
        )
    if workers < 0:
        raise ConfigError(
            f"expected 0 or more workers, got {workers}", "out_of_range", field="workers"
        )
    if not samples:
        raise ConfigError("the source has no samples", "empty", field="source")
    if train and batch % world:
        raise ConfigError(
            f"expected a multiple of {world} ranks, got batch {batch}", "conflict", field="batch"
        )
    if train and batch > samples:
        message = (
            f"expected a batch of at most {samples}, the samples of the data, got "
            f"{batch}; take a smaller one"
        )
        raise ConfigError(f"{message} (--train.global-batch)", "too_large", field="batch")
