"""Embeddings of a data set and their similarities, computed in chunks.

Shape letters: N images, M distinct texts, B images of a chunk, E shared embedding.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import (
    FullPass,
    Model,
    SupportsSimilarity,
    Values,
    concatenate,
    encode_batch,
)
from medvl.eval.core.metrics import Array
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.schema import Batch, Embeddings

_FIELDS = tuple(field.name for field in dataclasses.fields(Embeddings))
# images and texts compared at a time; bounds the memory of models with a local similarity
_CHUNK = 256
# pairs compared at a time; many systems compare all their combinations, which can be slow
_PAIRS = 8
_CACHED_ELEMENTS = 64_000_000
"""Up to this size (256 MB) similarity_NM is computed once and cached; larger ones are recomputed
in each pass.
"""


def normalized_texts(batch: Batch) -> list[str]:
    """Return the texts of a batch with white space collapsed."""
    return [" ".join(text.split()) for text in batch.texts]


def encode_images(
    model: Model, batches: FullPass, autocast: torch.dtype | None
) -> tuple[Embeddings, list[str], list[str]]:
    """Return the embeddings of all images in host memory, their keys, and their texts with white
    space collapsed.

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
    return Embeddings(
        **{name: value for name in _FIELDS if isinstance(value := values.get(name), Tensor)}
    )


class Similarity:
    """similarity_NM as an iterable over blocks of rows, which can be iterated several times."""

    def __init__(self, model: SupportsSimilarity, images: Embeddings, texts: Embeddings) -> None:
        self.model = model
        self.images = images
        self.texts = texts
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
                self.model.similarity(rows, take(self.texts, slice(first, first + _CHUNK)))
                .float()
                .cpu()
                for first in range(0, texts, _CHUNK)
            ]
            similarity_BM = torch.cat(columns, dim=1)
            if not similarity_BM.isfinite().all():
                raise EvaluationError(
                    "the model's similarities are not finite: check its weights", "nonfinite"
                )
            yield start, similarity_BM


def paired_similarity(
    model: DualEncoder, images: Embeddings, texts: Embeddings, image_Q: Tensor, text_Q: Tensor
) -> Tensor:
    """Return the similarity (Q,) of pairs of indices, float32 on the CPU."""
    device = texts.global_NE.device
    parts = []
    for image_B, text_B in zip(image_Q.split(_PAIRS), text_Q.split(_PAIRS), strict=True):
        rows = _to(take(images, image_B), device)
        columns = take(texts, text_B.to(device))
        parts.append(model.pair_similarity(rows, columns).float().cpu())
    similarity_Q = torch.cat(parts)
    if not similarity_Q.isfinite().all():
        raise EvaluationError(
            "the model's similarities are not finite: check its weights", "nonfinite"
        )
    return similarity_Q


def take(embeddings: Embeddings, index: slice | Tensor) -> Embeddings:
    """Return the embeddings at an index or slice."""
    local = embeddings.local_NPE
    mask = embeddings.mask_NP
    return Embeddings(
        embeddings.global_NE[index],
        None if local is None else local[index],
        None if mask is None else mask[index],
    )


def _to(embeddings: Embeddings, device: torch.device) -> Embeddings:
    local = embeddings.local_NPE
    mask = embeddings.mask_NP
    return Embeddings(
        embeddings.global_NE.to(device),
        None if local is None else local.to(device),
        None if mask is None else mask.to(device),
    )


# Retrieval with graded relevance: normalised discounted cumulative gain by the agreement of
# labels.
#
# Hsu et al. (arXiv 1811.08615) report nDCG@1 and nDCG@100 with relevance from label agreement.
# They do not define the agreement; here the relevance of a candidate is the share of labels that
# are positive on both sides among those that are positive on one (Jaccard index), and 1 where
# neither side has a positive label. The gain of rank i is relevance over log2(i + 1). Among equal
# similarities the less relevant candidate comes first.
#
# Shape letters: N images, M distinct texts, L labels, B images of a chunk, Q queries, C
# candidates, K the largest k.

GAIN_KS = (1, 100)
"""Ranks of nDCG in Hsu et al."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelGains:
    """nDCG of every query of one direction."""

    ndcg_QK: Array
    """One column for each k."""
    chance_K: Array
    """Mean over queries of the expected value of a random order."""


def label_gains(
    similarity: Similarity,
    images_NL: NDArray[np.bool_],
    text_of_N: NDArray[np.int64],
    ks: Sequence[int] = GAIN_KS,
) -> tuple[LabelGains, LabelGains]:
    """Return the gains of image to text and of text to image; a text has the labels of all its
    images.

    Args:
        similarity: similarity of all images with all texts.
        images_NL: positive labels of the images.
        text_of_N: index of each image's text.
        ks: ranks at which gains are summed.
    """
    texts = similarity.shape[1]
    most = max(ks)
    texts_ML = np.zeros((texts, images_NL.shape[1]), np.bool_)
    np.logical_or.at(texts_ML, text_of_N, images_NL)
    found_MK = np.zeros((2, texts, 0))
    ideal_MK = np.zeros((texts, 0))
    sum_M = np.zeros(texts)
    of_images = []
    for start, similarity_BM in similarity:
        relevance_BM = relevance(images_NL[start : start + len(similarity_BM)], texts_ML)
        scored_BM = np.stack([similarity_BM.double().numpy(), relevance_BM])
        of_images.append(
            (_first(scored_BM, most)[1], _largest(relevance_BM, most), relevance_BM.mean(axis=1))
        )
        found_MK = _first(np.concatenate([found_MK, scored_BM.transpose(0, 2, 1)], axis=2), most)
        ideal_MK = _largest(np.concatenate([ideal_MK, relevance_BM.T], axis=1), most)
        sum_M += relevance_BM.sum(axis=0)
    found_NK, ideal_NK, mean_N = (np.concatenate(part) for part in zip(*of_images, strict=True))
    return _gains(found_NK, ideal_NK, mean_N, ks), _gains(
        found_MK[1], ideal_MK, sum_M / len(images_NL), ks
    )


def relevance(first_QL: NDArray[np.bool_], second_CL: NDArray[np.bool_]) -> Array:
    """Return (Q, C): the Jaccard index of positive labels, 1 where neither side has any."""
    both_QC = first_QL.astype(np.float64) @ second_CL.T.astype(np.float64)
    either_QC = first_QL.sum(axis=1)[:, None] + second_CL.sum(axis=1) - both_QC
    return np.where(either_QC > 0, both_QC / np.maximum(either_QC, 1), 1.0)


def _first(scored_QC: Array, most: int) -> Array:
    """Return the first `most` candidates of (2, Q, C): by decreasing score, then by increasing
    relevance.
    """
    order_QC = np.lexsort((scored_QC[1], -scored_QC[0]), axis=1)[:, :most]
    return np.take_along_axis(scored_QC, order_QC[None], axis=2)


def _largest(relevance_QC: Array, most: int) -> Array:
    return -np.sort(-relevance_QC, axis=1)[:, :most]


def _gains(found_QK: Array, ideal_QK: Array, mean_Q: Array, ks: Sequence[int]) -> LabelGains:
    discount_K = 1 / np.log2(np.arange(2, found_QK.shape[1] + 2))
    ideal_QK = np.stack([(ideal_QK * discount_K)[:, :k].sum(axis=1) for k in ks], axis=1)
    dcg_QK = np.stack([(found_QK * discount_K)[:, :k].sum(axis=1) for k in ks], axis=1)
    random_QK = mean_Q[:, None] * np.array([discount_K[:k].sum() for k in ks])
    ideal_QK = np.where(ideal_QK > 0, ideal_QK, np.nan)  # no candidate shares a label
    return LabelGains(ndcg_QK=dcg_QK / ideal_QK, chance_K=np.nanmean(random_QK / ideal_QK, axis=0))
