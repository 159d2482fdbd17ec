"""Training on tars of other projects as they are, through the webdataset library.

The tars have no manifest and no index, so less is promised than of shards: the order depends on the
numbers of ranks and workers, a sample is seen about once per epoch instead of exactly once,
resuming within an epoch reads up to the position, and patients shared with an evaluation set are
not noticed. `medvl shards webdataset` converts such tars to shards, which have none of these
limits. The randomness of a sample is that of other loaders: (seed, epoch, key).
"""

import functools
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from medvl.common.ranks import check_ranks
from medvl.data.images.codecs import (
    JpegImage,
    decode_image,
    exif_orientation,
    make_upright,
    open_image,
)
from medvl.data.loading.collate import NOT_WHERE, Collate, SkipBudget, Tokenize
from medvl.data.loading.items import Item, ItemMaker, SkippedSample
from medvl.data.loading.loader import check_identity
from medvl.data.loading.workers import TIMEOUT, init_worker, with_worker_errors
from medvl.data.reports.cleaning import first_text
from medvl.data.storage.location import Location
from medvl.data.storage.webdataset_tars import (
    TarFields,
    check_tars,
    describe_tars,
    expand_tars,
    read_tar,
)
from medvl.data.transforms.image import ImageTransform
from medvl.data.transforms.text import TextPolicy
from medvl.errors import ConfigError, ImageError, ShardError, StorageError
from medvl.schema import Batch, Inputs, Sample

SECTION = "caption"
"""Section of the texts."""
NOT_PROMISED = (
    "%s: tars without a manifest. The order depends on ranks and workers, resuming within an "
    "epoch reads up to the "
    "position, and patients or articles shared with an evaluation set are not noticed; `medvl "
    "shards webdataset` "
    "converts them to shards, which have none of these limits"
)

_log = logging.getLogger(__name__)
Result = tuple[Batch | None, list[SkippedSample]] | ShardError | StorageError


class _BatchStream(IterableDataset[Result]):
    """Batches of one worker of one rank. Endless, because the tars of the workers hold unequal
    numbers of samples.
    """

    def __init__(
        self,
        tars: Sequence[Location],
        fields: TarFields,
        maker: ItemMaker,
        tokenizer: Tokenize,
        *,
        local_batch: int,
        rank: int,
        world: int,
        buffer: int,
        open_tars: int,
        color: bool,
    ) -> None:
        self.tars = tuple(tars)
        self.fields = fields
        self.maker = maker
        self.collate = Collate(tokenizer, maker.inputs)
        self.local_batch = local_batch
        self.rank = rank
        self.world = world
        self.buffer = buffer
        self.open_tars = open_tars
        self.color = color
        self.epoch = 0

    def __iter__(self) -> Iterator[Result]:
        items: list[Item | SkippedSample] = []
        left_out: list[SkippedSample] = []
        try:
            for members in self._shuffle(self._read(left_out)):
                items.append(self._item(members))
                if len(items) == self.local_batch:
                    batch, skipped = self.collate(items)
                    yield batch, [*skipped, *left_out]
                    items = []
                    left_out.clear()
        except (
            ShardError,
            StorageError,
        ) as error:  # raised in a worker process, it would lose its code
            yield error

    def _rng(self, purpose: str) -> np.random.Generator:
        worker = get_worker_info()
        seeds = [
            self.maker.seed,
            self.epoch,
            self.rank,
            worker.id if worker and purpose == "buffer" else 0,
        ]
        return np.random.default_rng(seeds if purpose == "buffer" else seeds[:2])

    def _read(self, left_out: list[SkippedSample]) -> Iterator[Mapping[str, Any]]:
        """Yield the members of each sample in this worker's tars, repeatedly, in turn from several
        tars; those that do not meet `fields.where` are added to `left_out`. Raises ShardError where
        there is none.
        """
        worker = get_worker_info()
        part = self.rank * (worker.num_workers if worker else 1) + (worker.id if worker else 0)
        parts = self.world * (worker.num_workers if worker else 1)
        # All ranks and workers use the same permutation, so that their parts do not overlap.
        order = self._rng("tars").permutation(len(self.tars))[part::parts]
        has_samples = True
        while has_samples:
            has_samples = False
            for members in self._in_turn([self.tars[number] for number in order]):
                if self._meets_conditions(members, left_out):
                    has_samples = True
                    yield members
        names = describe_tars([self.tars[number] for number in order])
        suffixes = ", ".join(sorted(self.fields.suffixes()))
        condition = f" and meets {', '.join(self.fields.where)}" if self.fields.where else ""
        raise ShardError(
            f"{names}: no sample has a member with a suffix of {suffixes}{condition}; correct them",
            "empty",
        )

    def _in_turn(self, tars: Sequence[Location]) -> Iterator[Mapping[str, Any]]:
        """Yield the samples of tars, one of each open tar in turn: neighbours in a tar are often
        alike.
        """
        waiting = iter(tars)
        readers = [self._samples(tar) for tar in itertools.islice(waiting, self.open_tars)]
        while readers:
            for reader in list(readers):
                members = next(reader, None)
                if members is not None:
                    yield members
                    continue
                readers.remove(reader)
                readers += [self._samples(tar) for tar in itertools.islice(waiting, 1)]

    def _samples(self, tar: Location) -> Iterator[Mapping[str, Any]]:
        for members in read_tar(tar, self.fields):
            yield members | {"__tar__": tar.name}

    def _meets_conditions(self, members: Mapping[str, Any], left_out: list[SkippedSample]) -> bool:
        try:
            unmet = self.fields.unmet(members)
        except ValueError:
            return True  # counted as unreadable where its text is read
        if unmet is not None:
            left_out.append(SkippedSample(_key(members), NOT_WHERE))
        return unmet is None

    def _shuffle(self, samples: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        rng = self._rng("buffer")
        buffer = list[Mapping[str, Any]]()
        for sample in samples:
            if len(buffer) < self.buffer:
                buffer.append(sample)
                continue
            place = int(rng.integers(self.buffer))
            buffer[place], sample = sample, buffer[place]
            yield sample

    def _item(self, members: Mapping[str, Any]) -> Item | SkippedSample:
        key = _key(members)
        try:
            text = first_text(self.fields.texts_of(members), Counter())
        except ValueError:
            return SkippedSample(key, "sample_unreadable")
        sections = {SECTION: text} if text else {}
        sample = Sample(
            key=key,
            corpus="webdataset",
            split="train",
            patient=key,
            study=key,
            image=None,
            sections=sections,
        )
        data = self.fields.image_of(members)
        if data is None:
            return self.maker.row(sample, self.maker.placeholder(self.color), self.epoch)
        try:
            return self.maker(sample, self._pixels(data, key), self.epoch)
        except ImageError as error:
            return SkippedSample(key, error.code)

    def _pixels(self, data: bytes, key: str) -> np.ndarray | JpegImage:
        """Return the pixels as conversion stores them, or a JPEG for a transform that decodes it.

        Raises ImageError, also for strips.
        """
        from medvl.data.images.read import check_sides  # imports pydicom, which takes time

        pixels: np.ndarray | JpegImage
        if getattr(self.maker.image, "decode", "full") != "full":
            pixels = open_image(data, color=self.color, orientation=exif_orientation(data))
        else:
            pixels = make_upright(decode_image(data, color=self.color), exif_orientation(data))
        check_sides(pixels, f"sample {key}")
        return pixels


def _key(members: Mapping[str, Any]) -> str:
    name = f"{members['__tar__']} {members['__key__']}".encode(errors="surrogateescape")
    return hashlib.sha256(name).hexdigest()[:32]


class WebdatasetLoader:
    """Training batches of webdataset tars; open one with `open_webdataset_loader`."""

    def __init__(
        self, stream: _BatchStream, samples: int, *, workers: int, max_skipped: float
    ) -> None:
        self.global_batch = stream.local_batch * stream.world
        self.steps_per_epoch = samples // self.global_batch
        self.samples_per_epoch = samples
        self._stream = stream
        self._workers = workers
        self._batch = 0
        self._skips = SkipBudget(describe_tars(stream.tars), max_skipped, samples)

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""
        return self._stream.epoch

    @property
    def skipped(self) -> Counter[str]:
        """Number of skips so far, by reason; a sample counts in every pass that leaves it out."""
        return self._skips.reasons

    @property
    def fingerprint(self) -> str:
        """sha256 of the tars' names and the conditions: their content is not known."""
        names = [tar.name for tar in self._stream.tars]
        return hashlib.sha256("\n".join([*names, *self._stream.fields.where]).encode()).hexdigest()

    def __iter__(self) -> Iterator[Batch]:
        batches: DataLoader[Result] = DataLoader(
            self._stream,
            batch_size=None,
            num_workers=self._workers,
            worker_init_fn=functools.partial(init_worker, beside_gpu=torch.cuda.is_available()),
            timeout=TIMEOUT if self._workers else 0,
            pin_memory=torch.cuda.is_available(),
        )
        for number, (batch, skipped) in zip(
            range(self.steps_per_epoch), with_worker_errors(batches), strict=False
        ):
            if number < self._batch:
                continue
            self._batch = number + 1
            if skipped:
                self._skips.add(skipped)
            if batch is None:
                self._skips.check_empty_batch(skipped)
                continue
            yield batch
        self._stream.epoch += 1
        self._batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data and settings it belongs to; JSON values only."""
        return {"epoch": self.epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; the next iteration reads up to it. Raises ConfigError if it
        is of another run.
        """
        check_identity(state, self._identity())
        self._stream.epoch = int(state["epoch"])
        self._batch = int(state["batch"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._stream.maker.seed,
            "global_batch": self.global_batch,
            "samples": self.samples_per_epoch,
            "fingerprint": self.fingerprint,
            "ranks": self._stream.world,
            "workers": self._workers,
        }


def open_webdataset_loader(
    tars: Sequence[str | Path],
    *,
    samples: int,
    batch: int,
    image: ImageTransform,
    text: TextPolicy,
    tokenizer: Tokenize,
    fields: TarFields | None = None,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    workers: int = 2,
    buffer: int = 2000,
    open_tars: int = 4,
    color: bool = True,
    max_skipped: float = 0.001,
    inputs: Inputs | None = None,
) -> WebdatasetLoader:
    """Open a training loader over webdataset tars; what it cannot promise is logged once.

    Args:
        tars: paths or addresses, with webdataset's braces.
        samples: number of samples that make an epoch, usually that of all tars.
        fields: suffixes of image and text, and conditions that samples meet.
        buffer: samples that are shuffled at once by each reader.
        open_tars: tars that each reader reads in turn, because neighbours in a tar are often alike.
        color: read RGB images, as evaluations of tars do; False reads grey ones, in less time.
            batch, image, text, tokenizer, seed, rank, world, workers, max_skipped, inputs: as in
            `open_loader`.

    Raises:
        ConfigError: a pattern is refused, the batch is not divisible by the ranks or larger than
            the data, there are fewer tars than readers, or the system needs what such tars do not
            have.
        ShardError: a tar does not exist; while iterating, when one is damaged.
    """
    rank, world = check_ranks(rank, world, train=True)
    paths = expand_tars(tars)
    needs = inputs or Inputs()
    for field in ("prior_image", "other_views", "drawn_view", "regions", "labels"):
        if getattr(needs, field):
            message = (
                f"the system needs {field}, which webdataset tars do not have; convert a "
                f"corpus to shards"
            )
            raise ConfigError(message, "unsupported", field=field)
    if batch < 1 or batch % world or batch > samples:
        expected = (
            f"a global batch that is a multiple of {world} ranks and at most {samples} samples"
        )
        raise ConfigError(f"expected {expected}, got {batch}", "conflict", field="batch")
    readers = world * max(1, workers)
    if len(paths) < readers:
        message = (
            f"{len(paths)} tars are too few for {readers} readers ({world} ranks); use "
            f"fewer workers"
        )
        raise ConfigError(message, "conflict", field="workers")
    check_tars(paths)
    _log.warning(NOT_PROMISED, describe_tars(paths))
    stream = _BatchStream(
        paths,
        fields or TarFields(),
        ItemMaker(image, text, (), seed, inputs),
        tokenizer,
        local_batch=batch // world,
        rank=rank,
        world=world,
        buffer=min(buffer, samples // readers // 2 + 1),
        open_tars=open_tars,
        color=color,
    )
    return WebdatasetLoader(stream, samples, workers=workers, max_skipped=max_skipped)
