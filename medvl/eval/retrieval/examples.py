"""Random examples of a retrieval for its page: queries with their nearest candidates, similarities, embeddings in 2-D.

Shape letters: N images, M distinct texts, K examples, Q queries, E shared embedding.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.eval.core.interfaces import SupportsSimilarity
from medvl.eval.core.metrics import Array
from medvl.eval.retrieval.similarity import Similarity, take
from medvl.schema import Embeddings

_NEAREST = 6
_POINTS = 1500  # maximum number of images, and of texts, in the plot of embeddings


@dataclasses.dataclass(frozen=True, slots=True)
class NearestCandidates:
    """The nearest candidates of one query, most similar first."""

    query: int
    candidates: tuple[int, ...]
    similarities: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalExamples:
    """Random examples; images and texts are given by their index in the gallery."""

    texts: tuple[str, ...]
    """All distinct texts."""
    text_of_N: NDArray[np.int64]
    similarity_KK: Array
    """Similarity of example images (rows) and their own texts (columns), in the same order."""
    image_queries: tuple[NearestCandidates, ...]
    """Images with their nearest texts."""
    text_queries: tuple[NearestCandidates, ...]
    """Texts with their nearest images."""
    plotted_N: NDArray[np.int64]
    """Images in the plot of embeddings."""
    image_N2: Array
    text_M2: Array
    """Image and text embeddings in the plane of their first two principal components."""
    explained_variance: tuple[float, float]
    """Share of the variance of each component."""


def sample_examples(
    model: SupportsSimilarity,
    images: Embeddings,
    texts: Embeddings,
    names: Sequence[str],
    text_of_N: torch.Tensor,
    *,
    queries: int,
    seed: int = 0,
) -> RetrievalExamples:
    """Sample `queries` queries of each direction, and four times as many pairs for the matrix, with distinct texts.

    Args:
        model: its similarity is used.
        images, texts: embeddings of all images with text, and of all distinct texts.
        names: the distinct texts.
        text_of_N: index of each image's text.
        queries: number of queries.
        seed: seed of the sampling.
    """
    rng = np.random.default_rng(seed)
    text_K = torch.from_numpy(rng.permutation(len(names))[: 4 * queries])
    image_K = torch.stack([(text_of_N == text).nonzero()[0, 0] for text in text_K])
    text_Q, image_Q = text_K[:queries], image_K[:queries]

    similarity_QM = Similarity(model, take(images, image_Q), texts).matrix()
    similarity_QN = Similarity(model, images, take(texts, text_Q)).matrix().T
    plotted_N, plotted_M = (np.sort(rng.permutation(len(of))[:_POINTS]) for of in (images, texts))
    both = (images.global_NE[torch.from_numpy(plotted_N)].cpu(), texts.global_NE[torch.from_numpy(plotted_M)].cpu())
    plane, explained_variance = principal_plane(torch.cat(both).double().numpy())
    similarity_KK = Similarity(model, take(images, image_K), take(texts, text_K)).matrix()
    return RetrievalExamples(
        texts=tuple(names),
        text_of_N=text_of_N.numpy(),
        similarity_KK=similarity_KK.double().numpy(),
        image_queries=_nearest(image_Q, similarity_QM),
        text_queries=_nearest(text_Q, similarity_QN),
        plotted_N=plotted_N,
        image_N2=plane[: len(plotted_N)],
        text_M2=plane[len(plotted_N) :],
        explained_variance=explained_variance,
    )


def principal_plane(x_ND: Array) -> tuple[Array, tuple[float, float]]:
    """Return the first two principal components (N, 2), and the share of the variance of each.

    The sign of a component is chosen so that its largest loading is positive, which makes plots reproducible.
    """
    centered_ND = x_ND - x_ND.mean(axis=0)
    _, size_K, direction_KD = np.linalg.svd(centered_ND, full_matrices=False)
    largest_K = np.abs(direction_KD).argmax(axis=1)
    direction_KD = direction_KD * np.sign(direction_KD[np.arange(len(direction_KD)), largest_K])[:, None]
    variance_K = size_K**2 / max(float((size_K**2).sum()), np.finfo(np.float64).tiny)
    plane_ND, shares = centered_ND @ direction_KD[:2].T, [*variance_K[:2].tolist(), 0.0]
    if plane_ND.shape[1] < 2:
        plane_ND = np.concatenate([plane_ND, np.zeros((len(plane_ND), 1))], axis=1)
    return plane_ND, (shares[0], shares[1])


def _nearest(query_Q: torch.Tensor, similarity_QN: torch.Tensor) -> tuple[NearestCandidates, ...]:
    best = similarity_QN.topk(min(_NEAREST, similarity_QN.shape[1]), dim=1)
    rows = zip(query_Q.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(NearestCandidates(query, tuple(candidates), tuple(values)) for query, candidates, values in rows)
