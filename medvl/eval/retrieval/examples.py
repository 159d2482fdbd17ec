"""What a retrieval looks like: a few queries with what they found, similarities among them, the embeddings in a plane.

Shape letters: N images, M distinct texts, K examples, Q queries, E shared embedding.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.eval.core.interfaces import Compares
from medvl.eval.core.metrics import Array
from medvl.schema import Embeddings

_NEAREST = 6
_POINTS = 1500
"""Images, and texts, in the plane: more would hide each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The nearest candidates of one query, the best first."""

    query: int
    candidates: tuple[int, ...]
    similarities: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalView:
    """Examples drawn from an evaluation; images and texts go by their number in it."""

    texts: tuple[str, ...]
    """All distinct ones."""
    text_of_N: NDArray[np.int64]
    similarity_KK: Array
    """Of example images (rows) and their own texts, in the same order: the diagonal is what belongs together."""
    of_images: tuple[Found, ...]
    """Texts that images found."""
    of_texts: tuple[Found, ...]
    """Images that texts found."""
    shown_N: NDArray[np.int64]
    """Images of the plane."""
    image_N2: Array
    text_M2: Array
    """Both in the plane of their two main directions."""
    spread: tuple[float, float]
    """Share of the variance that each direction holds."""


def look(
    model: Compares,
    images: Embeddings,
    texts: Embeddings,
    names: Sequence[str],
    text_of_N: torch.Tensor,
    *,
    queries: int,
    seed: int = 0,
) -> RetrievalView:
    """Draw examples: `queries` of each direction, four times as many in the matrix, each with another text.

    Args:
        model: whose similarity is shown.
        images, texts: embeddings of all images with text, and of all distinct texts.
        names: the distinct texts.
        text_of_N: the text of each image.
        queries: how many.
        seed: of the draw.
    """
    from medvl.eval.retrieval.image_text import Similarity, take

    rng = np.random.default_rng(seed)
    text_K = torch.from_numpy(rng.permutation(len(names))[: 4 * queries])
    image_K = torch.stack([(text_of_N == text).nonzero()[0, 0] for text in text_K])
    text_Q, image_Q = text_K[:queries], image_K[:queries]

    def similarities(rows: Embeddings, columns: Embeddings) -> torch.Tensor:
        return torch.cat([block for _, block in Similarity(model, rows, columns)])

    similarity_QM = similarities(take(images, image_Q), texts)
    similarity_QN = similarities(images, take(texts, text_Q)).T
    shown_N, shown_M = (np.sort(rng.permutation(len(of))[:_POINTS]) for of in (images, texts))
    both = (images.global_NE[torch.from_numpy(shown_N)].cpu(), texts.global_NE[torch.from_numpy(shown_M)].cpu())
    plane, spread = main_plane(torch.cat(both).double().numpy())
    return RetrievalView(
        texts=tuple(names),
        text_of_N=text_of_N.numpy(),
        similarity_KK=similarities(take(images, image_K), take(texts, text_K)).double().numpy(),
        of_images=_nearest(image_Q, similarity_QM),
        of_texts=_nearest(text_Q, similarity_QN),
        shown_N=shown_N,
        image_N2=plane[: len(shown_N)],
        text_M2=plane[len(shown_N) :],
        spread=spread,
    )


def main_plane(x_ND: Array) -> tuple[Array, tuple[float, float]]:
    """(N, 2) of the two main directions (PCA), and the share of the variance that each of them holds.

    A direction's sign is such that its largest entry is positive, so that the same data give the same picture.
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


def _nearest(query_Q: torch.Tensor, similarity_QN: torch.Tensor) -> tuple[Found, ...]:
    best = similarity_QN.topk(min(_NEAREST, similarity_QN.shape[1]), dim=1)
    rows = zip(query_Q.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Found(query, tuple(candidates), tuple(values)) for query, candidates, values in rows)
