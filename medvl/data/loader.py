"""From shards to batches: global shuffle, exact position, the same global batches whatever the ranks and workers.

The order of an epoch is one permutation of all samples, decided by (seed, epoch). Batch number b of an epoch is the
b-th slice of it, `global_batch` long, and rank r decodes the r-th part of that slice. So the state of the loader is
two numbers, going back to it costs nothing, and neither the number of ranks nor that of workers changes what is in a
batch. All randomness of a sample comes from (seed, epoch, key).
"""

import abc
import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from medvl.data.reports import swap_laterality
from medvl.data.shard_build import read_pixels
from medvl.data.shards import label_row
from medvl.data.text import TextPolicy
from medvl.data.tokenize import Tokenizer
from medvl.data.transforms import ImageTransform
from medvl.errors import BudgetError, ConfigError, DicomError, ImageError, ShardError
from medvl.schema import Batch, Sample

_log = logging.getLogger(__name__)


class Source(Protocol):
    """Random access to samples and their pixels: a folder of shards, or files as a corpus names them."""

    label_names: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int: ...

    def sample(self, position: int) -> Sample: ...

    def pixels(self, position: int, color: bool = False) -> np.ndarray: ...


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    key: str
    image_HWC: np.ndarray
    text: str
    labels_L: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    key: str
    reason: str


def sample_rng(seed: int, epoch: int, key: str, purpose: str) -> np.random.Generator:
    """The generator of one sample in one epoch. Each purpose has its own, so that they do not disturb each other."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{key}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


class _Samples(Dataset["_Item | _Failure"]):
    """What runs in a loader worker: read, decode, augment, choose the text."""

    def __init__(self, source: Source, image: ImageTransform, text: TextPolicy, seed: int, color: bool) -> None:
        self.source, self.image, self.text = source, image, text
        self.seed, self.color = seed, color
        self._transform: Any = None  # built on first use in the process that uses it: pipelines do not pickle well

    def __getitem__(self, place: tuple[int, int]) -> _Item | _Failure:
        epoch, position = place
        self._transform = self._transform or self.image.build()
        try:
            sample = self.source.sample(position)
        except ShardError as error:
            return _Failure(str(error), "sample_unreadable")
        try:
            pixels = self.source.pixels(position, self.color)
        except (ImageError, DicomError) as error:
            return _Failure(sample.key, error.reason)
        except ShardError:
            return _Failure(sample.key, "shard_damaged")
        except FileNotFoundError:
            return _Failure(sample.key, "image_missing")
        transformed = self._transform(pixels, sample_rng(self.seed, epoch, sample.key, "image"))
        text = self.text(sample.sections, sample_rng(self.seed, epoch, sample.key, "text"))
        if transformed.flipped and self.image.flip == "swap_text":
            text = swap_laterality(text)
        return _Item(sample.key, transformed.image_HWC, text, label_row(sample.labels, self.source.label_names))


class _Collate:
    """Stacks items into a batch and tokenises their texts, padded to the longest one only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, items: Sequence[_Item | _Failure]) -> tuple[Batch | None, list[_Failure]]:
        good = [item for item in items if isinstance(item, _Item)]
        failures = [item for item in items if isinstance(item, _Failure)]
        if not good:
            return None, failures
        texts = [item.text for item in good]
        ids_BT, mask_BT = self.tokenizer(texts)
        image_BHWC = torch.from_numpy(np.stack([item.image_HWC for item in good]))
        batch = Batch(
            keys=[item.key for item in good],
            image_BCHW=image_BHWC.permute(0, 3, 1, 2).contiguous(),
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.from_numpy(np.stack([item.labels_L for item in good])),
            texts=texts,
        )
        return batch, failures


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

    def __len__(self) -> int:
        return self.count // self.global_batch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, self.order(self.epoch)
        local = self.global_batch // self.world
        for batch in range(self.batch, len(self)):
            start = batch * self.global_batch + self.rank * local
            yield [(epoch, int(position)) for position in order[start : start + local]]


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
        samples: _Samples,
        tokenizer: Tokenizer,
        *,
        workers: int,
        max_skipped: float,
    ) -> None:
        self.source = source
        self.global_batch = positions.global_batch
        self.skipped: Counter[str] = Counter()
        """Samples that could not be read so far, by reason."""
        self._positions = positions
        self._budget = int(max_skipped if max_skipped >= 1 else max_skipped * len(source))
        self._training = isinstance(positions, _TrainPositions)
        self._batches = DataLoader(
            samples,
            batch_sampler=positions,
            num_workers=workers,
            collate_fn=_Collate(tokenizer),
            worker_init_fn=_start_worker,
            prefetch_factor=4 if workers else None,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

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
        for batch, failures in self._batches:
            self._positions.batch += self._training  # before the batch is handed out: who holds it has had it
            if failures:
                self._count(failures)
            if batch is None:
                raise ShardError(
                    f"{self._where()}: not one sample of a batch can be read ({failures[0].reason}, first key "
                    f"{failures[0].key}). `medvl verify` names what is damaged."
                )
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
        }

    def _count(self, failures: Sequence[_Failure]) -> None:
        for failure in failures:
            self.skipped[failure.reason] += 1
            _log.warning("sample %s is left out: %s", failure.key, failure.reason)
        if self.skipped.total() > self._budget:
            detail = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
            raise BudgetError(
                f"{self._where()}: {self.skipped.total()} samples cannot be read ({detail}), more than the budget of "
                f"{self._budget}. `medvl verify` names what is damaged."
            )

    def _where(self) -> str:
        return str(getattr(self.source, "folder", "the files"))


def open_loader(
    source: Source,
    *,
    batch: int,
    image: ImageTransform,
    text: TextPolicy,
    tokenizer: Tokenizer,
    train: bool,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    color: bool = False,
    max_skipped: float = 0.001,
) -> Loader:
    """A loader over a source.

    Args:
        source: `ShardSource(folder)` or `FileSource(samples, label_names)`.
        batch: in training the global batch, over all ranks; in evaluation the size of each batch.
        image: transform of the pixels.
        text: which text a sample is given.
        tokenizer: makes ids of it, in the workers.
        train: shuffle, and drop what does not fill a global batch; else every sample once, in order.
        seed: of the order and of every sample's randomness.
        rank, world: of this process.
        workers: processes that read ahead; 0 reads in this one.
        color: three channels instead of one.
        max_skipped: budget of unreadable samples: below 1 a share of the source, else a number.

    Raises:
        ConfigError: the batch does not divide by the ranks, or is larger than the data.
        BudgetError, ShardError: while iterating, when too many samples, or all of a batch, cannot be read.
    """
    if batch < 1 or not 0 <= rank < world or workers < 0:
        raise ConfigError(f"batch {batch}, rank {rank} of {world} and {workers} workers do not make sense")
    if train and batch % world:
        raise ConfigError(f"a global batch of {batch} cannot be shared evenly by {world} ranks: make it a multiple")
    if train and batch > len(source):
        raise ConfigError(f"a global batch of {batch} is more than the {len(source)} samples: make it smaller")
    if not len(source):
        raise ConfigError("the source has no sample")
    kind = _TrainPositions if train else _EvalPositions
    positions = kind(len(source), batch, train, seed, rank, world)
    samples = _Samples(source, image, text, seed, color)
    return Loader(source, positions, samples, tokenizer, workers=workers, max_skipped=max_skipped)


def _start_worker(worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already, and its pool does not survive a fork
    cv2.setNumThreads(0)
