"""Building a batch from stored samples: the parts that all loaders share."""

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
"""Texts -> (ids_BT, mask_BT): a `Tokenizer`, or `no_text` for models without a text encoder."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One row of a batch."""

    key: str
    study: str
    image_HWC: np.ndarray
    text: str
    labels_L: np.ndarray
    image_key: str | None = None
    """Equal for items that share one image. None: the item has its own image."""


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedSample:
    """An unreadable sample that is left out of its batch."""

    key: str
    reason: str


def sample_rng(seed: int, epoch: int, key: str, purpose: str) -> np.random.Generator:
    """Return the random generator of one sample in one epoch; each purpose has an independent one."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{key}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


class ItemMaker:
    """Image augmentation and text selection for a sample. All randomness comes from (seed, epoch, key)."""

    def __init__(self, image: ImageTransform, text: TextPolicy, label_names: Sequence[str], seed: int) -> None:
        self.image, self.text = image, text
        self.label_names, self.seed = tuple(label_names), seed
        self._transform: BuiltTransform | None = None  # built in the process that uses it: pipelines do not pickle

    def __call__(self, sample: Sample, pixels: np.ndarray, epoch: int) -> Item:
        """Return the item of one sample. `pixels` are uint8, (H, W) or (H, W, 3)."""
        return self.row(sample, self.transform(sample.key, pixels, epoch), epoch)

    def transform(self, key: str, pixels: np.ndarray, epoch: int) -> Transformed:
        """Return the augmented image; `key` seeds the augmentation."""
        if self._transform is None:
            self._transform = self.image.build()
        return self._transform(pixels, sample_rng(self.seed, epoch, key, "image"))

    def row(self, sample: Sample, image: Transformed, epoch: int, image_key: str | None = None) -> Item:
        """Return the item of one sample and its augmented image. Items with one `image_key` share the image."""
        text = self.text(sample.sections, sample_rng(self.seed, epoch, sample.key, "text"))
        if image.flipped and self.image.flip == "swap_text":
            text = swap_laterality(text)
        labels_L = label_row(sample.labels, self.label_names)
        return Item(sample.key, sample.study, image.image_HWC, text, labels_L, image_key)


class Collate:
    """Stack items into a batch and tokenize their texts, padded to the longest text of the batch."""

    def __init__(self, tokenizer: Tokenize) -> None:
        self.tokenizer = tokenizer

    def __call__(self, items: Sequence[Item | SkippedSample]) -> tuple[Batch | None, list[SkippedSample]]:
        kept = [item for item in items if isinstance(item, Item)]
        skipped = [item for item in items if isinstance(item, SkippedSample)]
        if not kept:
            return None, skipped
        texts = [item.text for item in kept]
        ids_BT, mask_BT = self.tokenizer(texts)
        has_text_B = torch.tensor([bool(text.strip()) for text in texts])
        names = [str(row) if item.image_key is None else f"shared {item.image_key}" for row, item in enumerate(kept)]
        images = dict(zip(names, (item.image_HWC for item in kept), strict=True))
        image_row = {name: row for row, name in enumerate(images)}
        image_BHWC = torch.from_numpy(np.stack(list(images.values())))
        batch = Batch(
            keys=[item.key for item in kept],
            image_BCHW=image_BHWC.permute(0, 3, 1, 2).contiguous(),
            image_of_B=torch.tensor([image_row[name] for name in names]) if len(images) < len(kept) else None,
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.from_numpy(np.stack([item.labels_L for item in kept])),
            texts=texts,
            studies=[item.study for item in kept],
            has_text_B=None if has_text_B.all() else has_text_B,
        )
        return batch, skipped


class SkipBudget:
    """Counter of skipped samples by reason, with an upper limit.

    Args:
        where: folder or address of the data, for messages.
        max_skipped: below 1 a fraction of all samples, else a number.
        samples: number of all samples.
    """

    def __init__(self, where: str, max_skipped: float, samples: int) -> None:
        self.reasons: Counter[str] = Counter()
        self._where, self._budget = where, int(max_skipped if max_skipped >= 1 else max_skipped * samples)

    def add(self, skipped: Sequence[SkippedSample]) -> None:
        """Count and log skipped samples. Raises BudgetError above the limit."""
        for sample in skipped:
            self.reasons[sample.reason] += 1
            _log.warning("skipped sample %s: %s", sample.key, sample.reason)
        if self.reasons.total() > self._budget:
            detail = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
            raise BudgetError(
                f"{self._where}: {self.reasons.total()} unreadable samples ({detail}), over the budget of "
                f"{self._budget}; run `medvl verify` to list the damage",
                "budget",
                field="max_skipped",
            )

    def empty_batch(self, skipped: Sequence[SkippedSample]) -> ShardError:
        """Return the error for a batch without a readable sample."""
        return ShardError(
            f"{self._where}: no sample of a batch can be read (first: {skipped[0].key}, {skipped[0].reason}); "
            "run `medvl verify` to list the damage",
            "empty",
        )


def init_worker(worker: int) -> None:
    """Set up a loader's worker process (`worker_init_fn` of torch's DataLoader)."""
    os.setpgid(0, 0)  # torchrun and Ctrl-C signal the process group; training needs its workers to finish the step
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already; the thread pool breaks after a fork
    cv2.setNumThreads(0)
