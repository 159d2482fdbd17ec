"""Embeddings of a data set and their similarities, computed in chunks.

Shape letters: N images, M distinct texts, B images of a chunk, E shared embedding.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.embeddings import concatenate, encode_batch
from medvl.eval.core.full_pass import FullPass, Values
from medvl.eval.core.interfaces import Model, SupportsSimilarity
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.schema import Batch, Embeddings

_FIELDS = tuple(field.name for field in dataclasses.fields(Embeddings))
_CHUNK = 256  # images and texts compared at a time; bounds the memory of models with a local similarity
_PAIRS = 8  # pairs compared at a time; many systems compare all their combinations, which can be slow
_CACHED_ELEMENTS = 64_000_000
"""Up to this size (256 MB) similarity_NM is computed once and cached; larger ones are recomputed in each pass."""


def normalized_texts(batch: Batch) -> list[str]:
    """Return the texts of a batch with white space collapsed."""
    return [" ".join(text.split()) for text in batch.texts]


def encode_images(
    model: Model, batches: FullPass, autocast: torch.dtype | None
) -> tuple[Embeddings, list[str], list[str]]:
    """Return the embeddings of all images in host memory, their keys, and their texts with white space collapsed.

    Raises `EvaluationError` if the pass is incomplete.
    """
    device = next(model.parameters()).device

    def encode(batch: Batch) -> dict[str, Tensor | list[str]]:
        embeddings = encode_batch(model, batch, device, autocast)
        tensors = {name: getattr(embeddings, name) for name in _FIELDS}
        return {
            "texts": normalized_texts(batch),
            **{name: value for name, value in tensors.items() if value is not None},
        }

    parts = batches.compute(encode)
    texts = [str(text) for part in parts for text in part["texts"]]
    return concatenate([_embeddings(part) for part in parts]), list(batches.keys), texts


def _embeddings(values: Values) -> Embeddings:
    return Embeddings(**{name: value for name in _FIELDS if isinstance(value := values.get(name), Tensor)})


class Similarity:
    """similarity_NM as an iterable over blocks of rows, which can be iterated several times."""

    def __init__(self, model: SupportsSimilarity, images: Embeddings, texts: Embeddings) -> None:
        self.model, self.images, self.texts = model, images, texts
        self.shape = len(images), len(texts)
        cached = self.shape[0] * self.shape[1] <= _CACHED_ELEMENTS
        self._blocks = list(self._compute()) if cached else None

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first image, similarity_BM on the CPU)."""
        return iter(self._blocks) if self._blocks is not None else self._compute()

    def matrix(self) -> Tensor:
        """Return similarity_NM on the CPU."""
        return torch.cat([block for _, block in self])

    def _compute(self) -> Iterator[tuple[int, Tensor]]:
        images, texts = self.shape
        device = self.texts.global_NE.device
        for start in range(0, images, _CHUNK):
            rows = _to(take(self.images, slice(start, start + _CHUNK)), device)
            columns = [
                self.model.similarity(rows, take(self.texts, slice(first, first + _CHUNK))).float().cpu()
                for first in range(0, texts, _CHUNK)
            ]
            similarity_BM = torch.cat(columns, dim=1)
            if not similarity_BM.isfinite().all():
                raise EvaluationError("the model's similarities are not finite: check its weights", "nonfinite")
            yield start, similarity_BM


def paired_similarity(
    model: DualEncoder, images: Embeddings, texts: Embeddings, image_Q: Tensor, text_Q: Tensor
) -> Tensor:
    """Return the similarity (Q,) of pairs of indices, float32 on the CPU."""
    device, parts = texts.global_NE.device, []
    for image_B, text_B in zip(image_Q.split(_PAIRS), text_Q.split(_PAIRS), strict=True):
        rows, columns = _to(take(images, image_B), device), take(texts, text_B.to(device))
        parts.append(model.pair_similarity(rows, columns).float().cpu())
    similarity_Q = torch.cat(parts)
    if not similarity_Q.isfinite().all():
        raise EvaluationError("the model's similarities are not finite: check its weights", "nonfinite")
    return similarity_Q


def take(embeddings: Embeddings, index: slice | Tensor) -> Embeddings:
    """Return the embeddings at an index or slice."""
    local, mask = embeddings.local_NPE, embeddings.mask_NP
    return Embeddings(
        embeddings.global_NE[index], None if local is None else local[index], None if mask is None else mask[index]
    )


def _to(embeddings: Embeddings, device: torch.device) -> Embeddings:
    local, mask = embeddings.local_NPE, embeddings.mask_NP
    return Embeddings(
        embeddings.global_NE.to(device),
        None if local is None else local.to(device),
        None if mask is None else mask.to(device),
    )
