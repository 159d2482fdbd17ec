"""From shards to batches: global shuffle, exact position, the same global batches whatever the ranks and workers.

The order of an epoch is one permutation of all samples, decided by (seed, epoch). Batch number b of an epoch is the
b-th slice of it, `global_batch` long, and rank r decodes the r-th part of that slice. So the state of the loader is
two numbers, going back to it costs nothing, and neither the number of ranks nor that of workers changes what is in a
batch. All randomness of a sample comes from (seed, epoch, key).
"""

import abc
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from medvl.data.convert.writer import read_pixels
from medvl.data.loading.collate import Collate, Failure, Item, ItemMaker, SkipCount, Tokenize, start_worker
from medvl.data.loading.worker_errors import TIMEOUT, watched
from medvl.data.transforms.image import ImageTransform, Transformed
from medvl.data.transforms.text import TextPolicy
from medvl.errors import ConfigError, DicomError, ImageError, ShardError
from medvl.schema import Batch, Sample


class Source(Protocol):
    """Random access to samples and their pixels: a folder of shards, or files as a corpus names them."""

    label_names: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int: ...

    def sample(self, position: int) -> Sample:
        """The sample at a position, from 0."""

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """Its decoded image (H, W) or (H, W, C)."""


class FileSource:
    """Samples whose images still lie in the corpus' own files: for evaluating on a corpus without making shards."""

    def __init__(self, samples: Sequence[Sample], label_names: Sequence[str]) -> None:
        self.samples = list(samples)
        self.label_names = tuple(label_names)
        content = "\n".join(f"{sample.key} {sorted(sample.labels.items())}" for sample in self.samples)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, position: int) -> Sample:
        """Everything but the pixels."""
        return self.samples[position]

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """uint8 (H, W), or (H, W, 3) with `color`. Raises DicomError, ImageError or FileNotFoundError."""
        return read_pixels(self.samples[position], color=color)[0]


class Samples(Dataset[Item | Failure]):
    """What runs in a loader worker: read, decode, and make a row of it."""

    def __init__(self, source: Source, maker: ItemMaker, color: bool, image_keys: Sequence[str] | None) -> None:
        self.source, self.maker, self.color, self.image_keys = source, maker, color, image_keys
        self._last: tuple[tuple[int, str], Transformed] | None = None

    def __getitem__(self, place: tuple[int, int]) -> Item | Failure:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[Item | Failure]:
        """The rows of a batch; torch's DataLoader calls this. All are read, then decoded and augmented, then given
        their texts: one kind of work at a time keeps to what the processor's caches hold."""
        samples = [self._sample(position) for _, position in places]
        images = [self._image(*place, sample) for place, sample in zip(places, samples, strict=True)]
        rows = zip(places, samples, images, strict=True)
        return [self._row(epoch, position, sample, image) for (epoch, position), sample, image in rows]

    def _sample(self, position: int) -> Sample | Failure:
        try:
            return self.source.sample(position)
        except ShardError as error:
            return Failure(str(error), "sample_unreadable")

    def _image(self, epoch: int, position: int, sample: Sample | Failure) -> Transformed | Failure:
        """Samples that share an image come behind one another: the last one is kept."""
        if isinstance(sample, Failure):
            return sample
        key = sample.key if self.image_keys is None else self.image_keys[position]
        if self.image_keys is not None and self._last is not None and self._last[0] == (epoch, key):
            return self._last[1]
        try:
            image = self.maker.transform(key, self.source.pixels(position, self.color), epoch)
        except (ImageError, DicomError) as error:
            return Failure(sample.key, error.code)
        except ShardError:
            return Failure(sample.key, "shard_damaged")
        except FileNotFoundError:
            return Failure(sample.key, "image_missing")
        self._last = None if self.image_keys is None else ((epoch, key), image)
        return image

    def _row(self, epoch: int, position: int, sample: Sample | Failure, image: Transformed | Failure) -> Item | Failure:
        if isinstance(sample, Failure):
            return sample
        if isinstance(image, Failure):
            return image
        return self.maker.row(sample, image, epoch, None if self.image_keys is None else self.image_keys[position])


class _Positions(abc.ABC):
    """Which samples make up each coming batch of this rank: a batch sampler that can be set anywhere."""

    def __init__(self, count: int, global_batch: int, shuffle: bool, seed: int, rank: int, world: int) -> None:
        self.count, self.global_batch, self.shuffle = count, global_batch, shuffle
        self.seed, self.rank, self.world = seed, rank, world
        self.epoch = 0
        self.batch = 0

    def order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))).permutation(self.count)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Batches an epoch."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """(epoch, position) of each sample of each batch, from `self.batch` of `self.epoch` on."""


class _TrainPositions(_Positions):
    """Full global batches only, cut into equal parts for the ranks. What is left over is another set each epoch."""

    images_N: np.ndarray | None = None
    """Number of each sample's image, where `together` samples of an image are to follow one another."""
    together = 1

    def order(self, epoch: int) -> np.ndarray:
        order_N = super().order(epoch)
        return order_N if self.images_N is None else _gathered(order_N, self.images_N, self.together)

    def __len__(self) -> int:
        return self.count // self.global_batch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, self.order(self.epoch)
        local = self.global_batch // self.world
        for batch in range(self.batch, len(self)):
            start = batch * self.global_batch + self.rank * local
            yield [(epoch, int(position)) for position in order[start : start + local]]


def _gathered(order_N: np.ndarray, images_N: np.ndarray, together: int) -> np.ndarray:
    """The same samples in an order in which the first of an image brings its next ones along, up to `together`."""
    images_N = images_N[order_N]
    by_image_N = np.argsort(images_N, kind="stable")
    _, start, count = np.unique(images_N[by_image_N], return_index=True, return_counts=True)
    nth_N = np.empty(len(order_N), int)
    nth_N[by_image_N] = np.arange(len(order_N)) - np.repeat(start, count)
    group_N = images_N * (count.max() // together + 1) + nth_N // together
    _, first, group_N = np.unique(group_N, return_index=True, return_inverse=True)
    return order_N[np.argsort(first[group_N], kind="stable")]


class _EvalPositions(_Positions):
    """Every sample exactly once. Ranks take whole batches in turn, so a batch's content never depends on the ranks."""

    def __len__(self) -> int:
        batches = -(-self.count // self.global_batch)
        return len(range(self.rank, batches, self.world))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = self.order(0)
        for start in range(self.rank * self.global_batch, self.count, self.world * self.global_batch):
            yield [(0, int(position)) for position in order[start : start + self.global_batch]]


class Loader:
    """Batches of one epoch at a time, from the current position on.

    Iterating yields the rest of the current epoch and then moves to the start of the next one. `state_dict()` counts
    the batches that were handed out, whatever the workers have read ahead.
    """

    def __init__(
        self,
        source: Source,
        positions: _Positions,
        samples: Samples,
        tokenizer: Tokenize,
        *,
        workers: int,
        max_skipped: float,
        timeout: float,
    ) -> None:
        self.source = source
        self.samples, self.collate = samples, Collate(tokenizer)
        self.global_batch = positions.global_batch
        self._positions = positions
        self._skips = SkipCount(
            str(getattr(source, "folder", "the files")),
            int(max_skipped if max_skipped >= 1 else max_skipped * len(source)),
        )
        self._training = isinstance(positions, _TrainPositions)
        self._batches = DataLoader(
            samples,
            batch_sampler=positions,
            num_workers=workers,
            collate_fn=self.collate,
            worker_init_fn=start_worker,
            prefetch_factor=4 if workers else None,
            persistent_workers=workers > 0,
            timeout=timeout if workers else 0,
            pin_memory=torch.cuda.is_available(),
        )

    @property
    def skipped(self) -> Counter[str]:
        """Samples that could not be read so far, by reason."""
        return self._skips.reasons

    @property
    def epoch(self) -> int:
        """Number of the epoch that iterating would continue."""
        return self._positions.epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch on this rank."""
        return len(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[Batch]:
        for batch, failures in watched(self._batches):
            self._positions.batch += self._training  # before the batch is handed out: who holds it has had it
            if failures:
                self._skips.add(failures)
            if batch is None:
                raise self._skips.empty_batch(failures)
            yield batch
        if self._training:
            self._positions.epoch += 1
            self._positions.batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what that position means; JSON values only."""
        return {"epoch": self._positions.epoch, "batch": self._positions.batch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position at once. Raises ConfigError when it was that of other data, another seed or batch."""
        differing = [name for name, value in self._identity().items() if state.get(name) != value]
        if differing:
            raise ConfigError(
                f"the loader's position was saved with another {', '.join(differing)}: "
                "continue with the same data, seed and global batch, or start a new run"
            )
        if not 0 <= state["batch"] <= self.steps_per_epoch or state["epoch"] < 0:
            raise ConfigError(f"batch {state['batch']} of epoch {state['epoch']} is not a position of this loader")
        self._positions.epoch, self._positions.batch = int(state["epoch"]), int(state["batch"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._positions.seed,
            "global_batch": self.global_batch,
            "samples": len(self.source),
            "fingerprint": self.source.fingerprint,
            "together": getattr(self._positions, "together", 1),
        }


def open_loader(
    source: Source,
    *,
    batch: int,
    image: ImageTransform,
    text: TextPolicy,
    tokenizer: Tokenize,
    train: bool,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    color: bool = False,
    max_skipped: float = 0.001,
    together: int = 1,
    timeout: float = TIMEOUT,
) -> Loader:
    """A loader over a source. Where several samples are about one image (the source has `image_keys`), a batch of
    evaluation holds each of its images once (`Batch.image_of_B`).

    Args:
        source: `ShardSource(folder)` or `FileSource(samples, label_names)`.
        batch: in training the global batch, over all ranks; in evaluation the size of each batch.
        image: transform of the pixels.
        text: which text a sample is given.
        tokenizer: makes ids of it, in the workers; `medvl.data.loading.subset.no_text` where nobody reads it.
        train: shuffle, and drop what does not fill a global batch; else every sample once, in order.
        seed: of the order and of every sample's randomness.
        rank, world: of this process.
        workers: processes that read ahead; 0 reads in this one.
        color: three channels instead of one.
        max_skipped: budget of unreadable samples: below 1 a share of the source, else a number.
        together: in training, as many samples about one image follow one another and share it, crop and all. 1 lets
            chance alone decide, and crops for each.
        timeout: seconds without a batch after which the workers are taken to hang.

    Raises:
        ConfigError: the batch does not divide by the ranks, or is larger than the data.
        BudgetError, ShardError: while iterating, when too many samples, or all of a batch, cannot be read.
        LoaderError: while iterating, when a worker process has died or hangs.
    """
    if batch < 1 or not 0 <= rank < world or workers < 0:
        raise ConfigError(f"batch {batch}, rank {rank} of {world} and {workers} workers do not make sense")
    if train and batch % world:
        raise ConfigError(f"a global batch of {batch} cannot be shared evenly by {world} ranks: make it a multiple")
    if train and batch > len(source):
        raise ConfigError(f"a global batch of {batch} is more than the {len(source)} samples: make it smaller")
    if not len(source):
        raise ConfigError("the source has no sample")
    image_keys: Sequence[str] | None = getattr(source, "image_keys", None)
    if together < 1 or (together > 1 and image_keys is None):
        raise ConfigError(f"together is {together}: 1, or more where samples share images, as questions do")
    kind = _TrainPositions if train else _EvalPositions
    positions = kind(len(source), batch, train, seed, rank, world)
    if isinstance(positions, _TrainPositions) and together > 1:
        positions.images_N, positions.together = np.unique(np.array(image_keys), return_inverse=True)[1], together
    shared = None if train and together == 1 else image_keys
    samples = Samples(source, ItemMaker(image, text, source.label_names, seed), color, shared)
    return Loader(source, positions, samples, tokenizer, workers=workers, max_skipped=max_skipped, timeout=timeout)
