"""From a stored sample to a row of a batch: what loaders of every kind share."""

import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence

import cv2
import numpy as np
import torch
from torch import Tensor

from medvl.data.reports.laterality import swap_laterality
from medvl.data.shards.format import label_row
from medvl.data.transforms.image import BuiltTransform, ImageTransform, Transformed
from medvl.data.transforms.text import TextPolicy
from medvl.errors import BudgetError, ShardError
from medvl.schema import Batch, Sample

_log = logging.getLogger(__name__)

Tokenize = Callable[[Sequence[str]], tuple[Tensor, Tensor]]
"""Texts -> (ids_BT, mask_BT): a `Tokenizer`, or what stands for one where no text is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A row of a batch."""

    key: str
    study: str
    image_HWC: np.ndarray
    text: str
    labels_L: np.ndarray
    image_key: str | None = None
    """The same for items that share one image; None: it has its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A sample that could not be read."""

    key: str
    reason: str


def sample_rng(seed: int, epoch: int, key: str, purpose: str) -> np.random.Generator:
    """The generator of one sample in one epoch. Each purpose has its own, so that they do not disturb each other."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{key}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


class ItemMaker:
    """Augments an image and chooses its text; all randomness from (seed, epoch, key)."""

    def __init__(self, image: ImageTransform, text: TextPolicy, label_names: Sequence[str], seed: int) -> None:
        self.image, self.text = image, text
        self.label_names, self.seed = tuple(label_names), seed
        self._transform: BuiltTransform | None = None  # built in the process that uses it: pipelines do not pickle

    def __call__(self, sample: Sample, pixels: np.ndarray, epoch: int) -> Item:
        """The row of one sample. `pixels` are uint8, (H, W) or (H, W, 3)."""
        return self.row(sample, self.transform(sample.key, pixels, epoch), epoch)

    def transform(self, key: str, pixels: np.ndarray, epoch: int) -> Transformed:
        """An image as the batch will hold it; its augmentation is drawn from the key."""
        if self._transform is None:
            self._transform = self.image.build()
        return self._transform(pixels, sample_rng(self.seed, epoch, key, "image"))

    def row(self, sample: Sample, image: Transformed, epoch: int, image_key: str | None = None) -> Item:
        """The row of one sample with its transformed image, which others may share under `image_key`."""
        text = self.text(sample.sections, sample_rng(self.seed, epoch, sample.key, "text"))
        if image.flipped and self.image.flip == "swap_text":
            text = swap_laterality(text)
        labels_L = label_row(sample.labels, self.label_names)
        return Item(sample.key, sample.study, image.image_HWC, text, labels_L, image_key)


class Collate:
    """Stacks items into a batch and tokenises their texts, padded to the longest one only."""

    def __init__(self, tokenizer: Tokenize) -> None:
        self.tokenizer = tokenizer

    def __call__(self, items: Sequence[Item | Failure]) -> tuple[Batch | None, list[Failure]]:
        good = [item for item in items if isinstance(item, Item)]
        failures = [item for item in items if isinstance(item, Failure)]
        if not good:
            return None, failures
        texts = [item.text for item in good]
        ids_BT, mask_BT = self.tokenizer(texts)
        has_text_B = torch.tensor([bool(text.strip()) for text in texts])
        names = [str(row) if item.image_key is None else f"shared {item.image_key}" for row, item in enumerate(good)]
        images = dict(zip(names, (item.image_HWC for item in good), strict=True))
        place = {name: row for row, name in enumerate(images)}
        image_BHWC = torch.from_numpy(np.stack(list(images.values())))
        batch = Batch(
            keys=[item.key for item in good],
            image_BCHW=image_BHWC.permute(0, 3, 1, 2).contiguous(),
            image_of_B=torch.tensor([place[name] for name in names]) if len(images) < len(good) else None,
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.from_numpy(np.stack([item.labels_L for item in good])),
            texts=texts,
            studies=[item.study for item in good],
            has_text_B=None if has_text_B.all() else has_text_B,
        )
        return batch, failures


class SkipCount:
    """Samples that could not be read, by reason, and the budget for them."""

    def __init__(self, where: str, budget: int) -> None:
        self.reasons: Counter[str] = Counter()
        self._where, self._budget = where, budget

    def add(self, failures: Sequence[Failure]) -> None:
        """Count, name in the log. Raises BudgetError when it is too many."""
        for failure in failures:
            self.reasons[failure.reason] += 1
            _log.warning("sample %s is left out: %s", failure.key, failure.reason)
        if self.reasons.total() > self._budget:
            detail = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
            raise BudgetError(
                f"{self._where}: {self.reasons.total()} samples cannot be read ({detail}), more than the budget of "
                f"{self._budget}. `medvl verify` names what is damaged."
            )

    def empty_batch(self, failures: Sequence[Failure]) -> ShardError:
        """The error for a batch without one readable sample."""
        return ShardError(
            f"{self._where}: not one sample of a batch can be read ({failures[0].reason}, first key "
            f"{failures[0].key}). `medvl verify` names what is damaged."
        )


def start_worker(worker: int) -> None:
    """What a loader's worker process does first."""
    os.setpgid(0, 0)  # torchrun and Ctrl-C signal the group: training wants to end its step, with its workers alive
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already, and its pool does not survive a fork
    cv2.setNumThreads(0)
