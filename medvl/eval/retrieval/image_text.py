"""Image-text retrieval: which text belongs to an image, and which image to a text.

Protocol "image_text_retrieval", version 1:

* Equal texts (after collapsing white space) are one candidate and one query; all their images are positives of it.
* Images without text are left out and counted.
* The rank of a query is that of its best positive among the candidates that are no positives of it, equal scores
  counting against it: a model that gives one score to everything comes last.
* "recall@k" is the share of queries with a rank of k or better; "median_rank" the median of the ranks.
* Intervals: texts are drawn, with all their images, in both directions.

Shape letters: N images, M distinct texts, B images of a chunk, E shared embedding.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, input_hashes
from medvl.eval.core.interfaces import Compares, Loader, Model, encode_batch
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics, measure, median_metric
from medvl.eval.core.results import Results
from medvl.eval.retrieval.examples import RetrievalView, look
from medvl.eval.zero_shot_classification.scores import concatenate, embed_texts
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch, Embeddings

PROTOCOL, PROTOCOL_VERSION = "image_text_retrieval", 1

_CHUNK = 256
"""Images and texts that are compared at a time: what bounds memory for models with a local similarity."""
_KEPT_ELEMENTS = 64_000_000
"""Of similarity_NM: up to here (256 MB) it is computed once and kept, above it twice and never held whole."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalResult:
    """The results, and the rank of every query."""

    results: Results
    keys: tuple[str, ...]
    """Of the images with text."""
    image_rank_N: NDArray[np.int64]
    """Rank of each image's text among the distinct texts, from 1."""
    text_rank_M: NDArray[np.int64]
    """Rank of the best image of each distinct text."""
    text_of_N: NDArray[np.int64]
    """The distinct text of each image, by number."""
    view: RetrievalView | None = None
    """Examples for the page, where they were asked for."""

    @classmethod
    def of(
        cls,
        gallery: "Gallery",
        ranks: tuple[NDArray[np.int64], NDArray[np.int64]],
        results: Results,
        view: RetrievalView | None = None,
    ) -> Self:
        """Of what was searched, the ranks of images and of texts, and what they come to."""
        return cls(
            results=results,
            keys=gallery.keys,
            image_rank_N=ranks[0],
            text_rank_M=ranks[1],
            text_of_N=gallery.text_of_N.numpy(),
            view=view,
        )

    def predictions(self) -> Iterator[dict[str, Any]]:
        """One mapping an image: its key, the number of its text, and the rank of that."""
        rows = zip(self.keys, self.text_of_N.tolist(), self.image_rank_N.tolist(), strict=True)
        for key, text, rank in rows:
            yield {"key": key, "text": text, "rank": rank}


def image_text_retrieval(
    model: Model,
    loader: Loader,
    *,
    ks: Sequence[int] = (1, 5, 10),
    resamples: int = 1000,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    checkpoint: str | Path | None = None,
    examples: int = 0,
) -> RetrievalResult:
    """Judge a dual-encoder on the pairs of a loader; the protocol is at the top of this module.

    The embeddings of all images are kept in host memory. As many `examples` of each direction are drawn for the page.
    Raises `EvaluationError` when the loader does not give every
    sample once, or there are fewer than two distinct texts.
    """
    check_ks(ks)
    inputs, given = input_hashes(checkpoint, manifest=loader), FullPass(loader)
    with evaluating(model):
        images, keys, texts = encode_images(model, given, autocast)
        gallery = Gallery.of(keys, texts, given.unreadable)
        images, texts_M = take(images, gallery.place_N), embed_texts(model, gallery.texts)
        image_rank_N, text_rank_M = retrieval_ranks(model, images, texts_M, gallery.text_of_N)
        view = None
        if examples:
            view = look(model, images, texts_M, gallery.texts, gallery.text_of_N, queries=examples, seed=seed)
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=rank_rows(gallery, image_rank_N, text_rank_M, ks, resamples, seed),
        config={"ks": list(ks), "resamples": resamples, "seed": seed, "autocast": autocast and str(autocast)},
        inputs=inputs,
        details={**gallery.counts, "chance": chance_recalls(gallery, ks)},
    )
    return RetrievalResult.of(gallery, (image_rank_N, text_rank_M), results, view)


def check_ks(ks: Sequence[int]) -> None:
    """Raises `EvaluationError` unless there are ranks to report, from 1."""
    if not ks or min(ks) < 1:
        raise EvaluationError(f"ks are {list(ks)}: give ranks from 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """The images with text, and the distinct texts."""

    keys: tuple[str, ...]
    """Of the images."""
    texts: tuple[str, ...]
    text_of_N: torch.Tensor
    """int64: the text of each image."""
    place_N: torch.Tensor
    """int64: where the images stand among all that the loader gave."""
    counts: Mapping[str, Any]
    """For `Results.details`: what was judged and what was left out."""

    @classmethod
    def of(cls, keys: Sequence[str], texts: Sequence[str], unreadable: Mapping[str, int]) -> Self:
        """Of all keys and texts that a loader gave, and what it skipped, by reason.

        Raises `EvaluationError` when there are fewer than two distinct texts.
        """
        kept = [index for index, text in enumerate(texts) if text]
        distinct = list(dict.fromkeys(texts[index] for index in kept))
        if len(distinct) < 2:
            raise EvaluationError(f"retrieval needs two distinct texts or more; these images have {len(distinct)}")
        number = {text: index for index, text in enumerate(distinct)}
        counts = {
            "images": len(kept),
            "texts": len(distinct),
            "images_without_text": len(keys) - len(kept),
            "unreadable": dict(unreadable),
        }
        return cls(
            keys=tuple(keys[index] for index in kept),
            texts=tuple(distinct),
            text_of_N=torch.tensor([number[texts[index]] for index in kept]),
            place_N=torch.tensor(kept),
            counts=counts,
        )


def plain_texts(batch: Batch) -> list[str]:
    """The texts of a batch with white space collapsed: what is compared when texts are told apart."""
    return [" ".join(text.split()) for text in batch.texts]


def encode_images(
    model: Model, batches: Iterable[Batch], autocast: torch.dtype | None
) -> tuple[Embeddings, list[str], list[str]]:
    """Embeddings of all images in host memory, keys, and texts with white space collapsed.

    Raises `EvaluationError` when there is no batch.
    """
    device = next(model.parameters()).device
    parts, keys, texts = [], [], []
    for batch in batches:
        embeddings = encode_batch(model, batch, device, autocast)
        parts.append(_to(embeddings, torch.device("cpu")))
        keys += batch.keys
        texts += plain_texts(batch)
    if not parts:
        raise EvaluationError("there is no image to evaluate")
    return concatenate(parts), keys, texts


class Similarity:
    """similarity_NM as blocks of rows, the same blocks each time it is iterated."""

    def __init__(self, model: Compares, images: Embeddings, texts: Embeddings) -> None:
        self.model, self.images, self.texts = model, images, texts
        self.shape = len(images), len(texts)
        kept = self.shape[0] * self.shape[1] <= _KEPT_ELEMENTS
        self._blocks = list(self._compute()) if kept else None

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first image, similarity_BM on the CPU)."""
        return iter(self._blocks) if self._blocks is not None else self._compute()

    def _compute(self) -> Iterator[tuple[int, torch.Tensor]]:
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
                raise EvaluationError("the model's similarities are not finite: look at its weights")
            yield start, similarity_BM


def retrieval_ranks(
    model: Compares, images: Embeddings, texts: Embeddings, text_of_N: torch.Tensor
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(image_rank_N, text_rank_M), from 1, as the protocol defines them; `text_of_N` is the text of each image.

    Every text must have an image. Two passes over the rows of similarities: the first finds the score of each positive,
    the second counts what scores as high. Raises `EvaluationError` when a similarity is not finite.
    """
    similarity = Similarity(model, images, texts)
    image_rank_N, positive_N = torch.empty_like(text_of_N), torch.empty(len(text_of_N))
    for start, similarity_BM in similarity:
        chunk = slice(start, start + len(similarity_BM))
        positive_B1 = similarity_BM.gather(1, text_of_N[chunk, None])
        positive_N[chunk] = positive_B1[:, 0]
        image_rank_N[chunk] = (similarity_BM >= positive_B1).sum(dim=1)  # the positive itself counts as one
    best_M = torch.full((similarity.shape[1],), -torch.inf).scatter_reduce(0, text_of_N, positive_N, "amax")
    text_rank_M = torch.ones(similarity.shape[1], dtype=torch.int64)
    for _, similarity_BM in similarity:
        text_rank_M += (similarity_BM >= best_M).sum(dim=0)
    own_positives = (positive_N >= best_M[text_of_N]).long()
    text_rank_M.scatter_add_(0, text_of_N, -own_positives)
    return image_rank_N.numpy(), text_rank_M.numpy()


def rank_rows(
    gallery: Gallery,
    image_rank_N: NDArray[np.int64],
    text_rank_M: NDArray[np.int64],
    ks: Sequence[int],
    resamples: int,
    seed: int,
) -> tuple[MetricRow, ...]:
    """Recall at each k and the median rank, in both directions, with their intervals."""

    def blocks(rank: NDArray[np.int64], target: str) -> list[MetricGroup]:
        recalls = [mean_metrics(f"recall@{k}", (rank <= k)[:, None].astype(np.float64), [target]) for k in ks]
        return [*recalls, median_metric("median_rank", rank.astype(np.float64), target)]

    of_images = measure(
        blocks(image_rank_N, "image_to_text"),
        len(image_rank_N),
        resamples=resamples,
        seed=seed,
        groups=gallery.text_of_N.tolist(),
    )
    of_texts = measure(blocks(text_rank_M, "text_to_image"), len(text_rank_M), resamples=resamples, seed=seed)
    return of_images + of_texts


def chance_recalls(gallery: Gallery, ks: Sequence[int]) -> dict[str, float]:
    """Recall of a random order: what the numbers are to be compared with."""
    images, texts = len(gallery.keys), len(gallery.texts)
    positives_M = np.bincount(gallery.text_of_N.numpy(), minlength=texts)
    chance = {}
    for k in ks:
        chance[f"recall@{k}/image_to_text"] = min(1.0, k / texts)
        missed_M = np.ones(texts)
        for drawn in range(min(k, images)):
            missed_M *= np.maximum(images - positives_M - drawn, 0) / (images - drawn)
        chance[f"recall@{k}/text_to_image"] = float(1 - missed_M.mean())
    return chance


def take(embeddings: Embeddings, index: slice | torch.Tensor) -> Embeddings:
    """Some of them."""
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


class RetrievalEval:
    """Retrieval while a model is being trained: `RetrievalEval(loader)(model)` is a flat mapping of numbers.

    "retrieval/recall@5/image_to_text", "retrieval/median_rank/text_to_image", ...; no intervals.
    """

    def __init__(self, loader: Loader, *, ks: Sequence[int] = (1, 5, 10), autocast: torch.dtype | None = None) -> None:
        self.loader, self.ks, self.autocast = loader, ks, autocast

    def __call__(self, model: Model) -> dict[str, float]:
        """The numbers for the model as it is now. Raises `EvaluationError` as `image_text_retrieval` does."""
        result = image_text_retrieval(model, self.loader, ks=self.ks, resamples=0, autocast=self.autocast)
        return {f"retrieval/{row.name}": row.value for row in result.results.rows}
