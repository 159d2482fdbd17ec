"""Small fake model, source and loader for the tests of evaluators."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.errors import ShardError
from medvl.schema import Batch, Embeddings, Sample

WIDTH = 16
"""Width of the embeddings and of the one-row images."""


def text_vector(text: str) -> np.ndarray:
    """Return a unit vector that depends on the text only."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    vector = np.random.default_rng(seed).normal(size=WIDTH)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


class FakeModel(nn.Module):
    """Fake dual-encoder: an image of one row is embedded as its pixels minus 128, a text by its
    hash.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Dropout(0.5)
        self.images_encoded, self.texts_encoded = 0, 0

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        assert not self.training
        assert not self.head.training
        assert not torch.is_grad_enabled()
        self.images_encoded += len(image_BCHW)
        return Embeddings(F.normalize(image_BCHW[:, 0, 0].float() - 128, dim=1) * self.scale)

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        self.texts_encoded += len(texts)
        return Embeddings(torch.from_numpy(np.stack([text_vector(text) for text in texts])))

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        return images.global_NE @ texts.global_NE.T


class FakeSource:
    """Source of samples and pixels in memory."""

    fingerprint = "f" * 64

    def __init__(
        self, samples: Sequence[Sample], pixels: Sequence[np.ndarray], label_names: Sequence[str]
    ) -> None:
        self.samples, self.images, self.label_names = (
            list(samples),
            list(pixels),
            tuple(label_names),
        )
        self.damaged: set[int] = set()

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, position: int) -> Sample:
        if position in self.damaged:
            raise ShardError("a member is damaged")
        return self.samples[position]

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        return self.images[position]


class FakeLoader:
    """Loader of batches in order; damaged samples are skipped and counted."""

    def __init__(
        self, source: FakeSource, batch: int = 7, texts: Sequence[str] | None = None
    ) -> None:
        self.source, self.batch = source, batch
        self.texts = texts or ["" for _ in range(len(source))]
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.source), self.batch):
            chunk = range(start, min(start + self.batch, len(self.source)))
            yield self._collate(
                [position for position in chunk if position not in self.source.damaged]
            )
            self.skipped["shard_damaged"] += sum(
                position in self.source.damaged for position in chunk
            )

    def _collate(self, positions: Sequence[int]) -> Batch:
        samples = [self.source.samples[position] for position in positions]
        labels = [
            [sample.labels.get(name, np.nan) for name in self.source.label_names]
            for sample in samples
        ]
        return Batch(
            keys=[sample.key for sample in samples],
            image_BCHW=torch.from_numpy(
                np.stack([self.source.images[position] for position in positions])
            )[:, None],
            ids_BT=torch.zeros(len(samples), 1, dtype=torch.int64),
            mask_BT=torch.ones(len(samples), 1, dtype=torch.bool),
            labels_BL=torch.tensor(labels, dtype=torch.float32),
            texts=[self.texts[position] for position in positions],
        )


def make_source(
    labels_NL: np.ndarray,
    names: Sequence[str],
    *,
    seed: int = 0,
    patients: int | None = None,
    prefix: str = "p",
) -> FakeSource:
    """Return one-row noise images with these labels (NaN: missing); image i belongs to patient i
    % `patients`.
    """
    rng = np.random.default_rng(seed)
    count = len(labels_NL)
    views = ("PA", "AP", "LATERAL")
    samples = [
        Sample(
            key=f"{prefix}-{index:04d}",
            corpus="fake",
            split="test",
            patient=f"{prefix}{index % (patients or count)}",
            study=f"s{index}",
            labels={
                name: int(value)
                for name, value in zip(names, row, strict=True)
                if not np.isnan(value)
            },
            view=views[index % 3],
            sex="FM"[index % 2],
            age=30 + index % 60,
        )
        for index, row in enumerate(labels_NL)
    ]
    return FakeSource(samples, list(rng.integers(0, 256, (count, 1, WIDTH), dtype=np.uint8)), names)
