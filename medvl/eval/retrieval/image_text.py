"""Image-text retrieval: the text of each image, and an image of each text.

Protocol "image_text_retrieval", version 3:

* Equal texts (after collapsing white space) are one candidate and one query; all their images are
  its positives.
* Images without text are left out and counted.
* The rank of a query is that of its best positive among the candidates that are not its positives.
  Ties count against the positive, so a model with constant scores gets the last rank.
* The target "commonest_texts" is the baseline that looks at no image: all images get the same
  order of texts, by the number of images that they belong to. Where texts recur, it can be high.
* "recall@k" is the share of queries with a rank of k or better; "median_rank" is the median of the
  ranks; "mrr" is the mean of 1 / rank.
* Where images have labels, "ndcg@k" is the gain of the first k candidates by the agreement of
  labels (`label_gain`).
* Intervals: the bootstrap resamples patients (articles of figures), with all their images, or with
  all their texts. A text that images of several patients have is one query, of the patient of the
  image with the first key.

Shape letters: N images, M distinct texts, B images of a chunk.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import (
    FullPass,
    Loader,
    Model,
    Source,
    SupportsSimilarity,
    embed_texts,
    input_hashes,
    samples_by_key,
    slices_of,
)
from medvl.eval.core.metric_rows import (
    MetricGroup,
    MetricRow,
    mean_metrics,
    measure,
    median_metric,
    subgroups_of,
)
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results
from medvl.eval.retrieval.similarity import (
    GAIN_KS,
    LabelGains,
    Similarity,
    encode_images,
    label_gains,
    take,
)
from medvl.models.base import evaluating
from medvl.schema import POSITIVE, Embeddings

# Random examples of a retrieval for its page: queries with their nearest candidates,
# similarities, embeddings in 2-D.
#
# Shape letters: N images, M distinct texts, K examples, Q queries, E shared embedding.

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
    """Sample `queries` queries of each direction, and four times as many pairs for the matrix, with
    distinct texts.

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
    text_Q = text_K[:queries]
    image_Q = image_K[:queries]

    similarity_QM = Similarity(model, take(images, image_Q), texts).matrix()
    similarity_QN = Similarity(model, images, take(texts, text_Q)).matrix().T
    plotted_N, plotted_M = (np.sort(rng.permutation(len(of))[:_POINTS]) for of in (images, texts))
    both = (
        images.global_NE[torch.from_numpy(plotted_N)].cpu(),
        texts.global_NE[torch.from_numpy(plotted_M)].cpu(),
    )
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

    The sign of a component is chosen so that its largest loading is positive, which makes plots
    reproducible.
    """
    centered_ND = x_ND - x_ND.mean(axis=0)
    _, size_K, direction_KD = np.linalg.svd(centered_ND, full_matrices=False)
    largest_K = np.abs(direction_KD).argmax(axis=1)
    direction_KD = (
        direction_KD * np.sign(direction_KD[np.arange(len(direction_KD)), largest_K])[:, None]
    )
    variance_K = size_K**2 / max(float((size_K**2).sum()), np.finfo(np.float64).tiny)
    plane_ND = centered_ND @ direction_KD[:2].T
    shares = [*variance_K[:2].tolist(), 0.0]
    if plane_ND.shape[1] < 2:
        plane_ND = np.concatenate([plane_ND, np.zeros((len(plane_ND), 1))], axis=1)
    return plane_ND, (shares[0], shares[1])


def _nearest(query_Q: torch.Tensor, similarity_QN: torch.Tensor) -> tuple[NearestCandidates, ...]:
    best = similarity_QN.topk(min(_NEAREST, similarity_QN.shape[1]), dim=1)
    rows = zip(query_Q.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        NearestCandidates(query, tuple(candidates), tuple(values))
        for query, candidates, values in rows
    )


PROTOCOL = "image_text_retrieval"
PROTOCOL_VERSION = 3
COMMONEST_TEXTS = "commonest_texts"
"""Target of the rows of the baseline that orders texts by frequency."""

Ranks = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(image_rank_N, text_rank_M), from 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalResult:
    """Results, and the rank of every query."""

    results: Results
    keys: tuple[str, ...]
    """Keys of the images with text."""
    patients: tuple[str, ...]
    """Patient of each image; the article of a figure."""
    image_rank_N: NDArray[np.int64]
    """Rank of each image's text among the distinct texts, from 1."""
    text_rank_M: NDArray[np.int64]
    """Rank of the best image of each distinct text."""
    text_of_N: NDArray[np.int64]
    """Index of each image's text among the distinct texts."""
    subgroups: tuple[Mapping[str, str], ...]
    """Attribute -> group of each image."""
    examples: RetrievalExamples | None = None
    """Examples for the page, if requested."""

    @classmethod
    def from_ranks(
        cls,
        gallery: "Gallery",
        ranks: Ranks,
        results: Results,
        source: Source,
        examples: RetrievalExamples | None = None,
    ) -> Self:
        """Combine a gallery of images of a source, the ranks of its images and texts, and their
        results.
        """
        samples = samples_by_key(source)
        return cls(
            results=results,
            keys=gallery.keys,
            patients=tuple(samples[key][1].patient for key in gallery.keys),
            image_rank_N=ranks[0],
            text_rank_M=ranks[1],
            text_of_N=gallery.text_of_N.numpy(),
            subgroups=tuple(subgroups_of(samples[key][1]) for key in gallery.keys),
            examples=examples,
        )

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield per image its key, patient, subgroups, text (index), rank of that text, and the
        text's own rank.
        """
        fields = {
            "key": self.keys,
            "patient": self.patients,
            "subgroups": self.subgroups,
            "text": self.text_of_N.tolist(),
            "rank": self.image_rank_N.tolist(),
            "text_rank": self.text_rank_M[self.text_of_N].tolist(),
        }
        for values in zip(*fields.values(), strict=True):
            yield dict(zip(fields, values, strict=True))


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
    """Evaluate a dual-encoder on the image-text pairs of a loader; the module docstring describes
    the protocol.

    The embeddings of all images are kept in host memory.

    Args:
        model: the dual-encoder.
        loader: over samples with text.
        ks: ranks of the recalls.
        resamples, seed: number and seed of the bootstrap resamples.
        autocast: dtype of the image encoder; similarities stay in float32.
        checkpoint: its hash goes into the results.
        examples: number of random queries of each direction for the page.

    Raises:
        EvaluationError: the loader does not give every sample once, there are fewer than two
            distinct texts, or a similarity is not finite.
    """
    check_ks(ks)
    inputs = input_hashes(checkpoint, manifest=loader)
    batches = FullPass(loader)
    with evaluating(model):
        images, keys, texts = encode_images(model, batches, autocast)
        gallery = Gallery.from_texts(keys, texts, batches.unreadable, loader.source)
        images = take(images, gallery.index_N)
        texts_M = embed_texts(model, gallery.texts)
        similarity = Similarity(model, images, texts_M)
        ranks = _ranks(similarity, gallery.text_of_N)
        gains = _gains(similarity, gallery, loader)
        shown = None
        if examples:
            shown = sample_examples(
                model,
                images,
                texts_M,
                gallery.texts,
                gallery.text_of_N,
                queries=examples,
                seed=seed,
            )
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=rank_rows(gallery, ranks, ks, resamples, seed, gains),
        config={
            "ks": list(ks),
            "resamples": resamples,
            "seed": seed,
            "autocast": autocast and str(autocast),
            **slices_of(loader),
        },
        inputs=inputs,
        details={**gallery.counts, "chance": chance_recalls(gallery, ks) | _chance_gains(gains)},
    )
    return RetrievalResult.from_ranks(gallery, ranks, results, loader.source, shown)


def check_ks(ks: Sequence[int]) -> None:
    """Raise `EvaluationError` unless `ks` has one or more ranks from 1."""
    if not ks or min(ks) < 1:
        raise EvaluationError(f"expected ranks from 1, got {list(ks)}", "out_of_range", field="ks")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """The images with text, and the distinct texts."""

    keys: tuple[str, ...]
    """Keys of the images."""
    texts: tuple[str, ...]
    text_of_N: torch.Tensor
    """int64: index of each image's text."""
    index_N: torch.Tensor
    """int64: index of each image among all images of the loader."""
    counts: Mapping[str, Any]
    """Counts for `Results.details`."""
    patients: tuple[str, ...] | None = None
    """Patient of each image; None: unknown."""

    @classmethod
    def from_texts(
        cls,
        keys: Sequence[str],
        texts: Sequence[str],
        unreadable: Mapping[str, int],
        source: Source,
    ) -> Self:
        """Build a gallery from all keys and texts of a loader, its skipped samples by reason, and
        its source.

        Raises `EvaluationError` if there are fewer than two distinct texts.
        """
        indices = [index for index, text in enumerate(texts) if text]
        distinct = list(dict.fromkeys(texts[index] for index in indices))
        if len(distinct) < 2:
            raise EvaluationError(
                f"expected two or more distinct texts, got {len(distinct)}", "empty"
            )
        number = {text: index for index, text in enumerate(distinct)}
        samples = samples_by_key(source)
        patients = tuple(samples[keys[index]][1].patient for index in indices)
        counts = {
            "images": len(indices),
            "patients": len(set(patients)),
            "texts": len(distinct),
            "images_without_text": len(keys) - len(indices),
            "unreadable": dict(unreadable),
        }
        return cls(
            keys=tuple(keys[index] for index in indices),
            texts=tuple(distinct),
            text_of_N=torch.tensor([number[texts[index]] for index in indices]),
            index_N=torch.tensor(indices),
            counts=counts,
            patients=patients,
        )

    @property
    def patients_of_texts(self) -> list[str] | None:
        """Patient of each text: that of the image with the first key, where several images have
        it; None: unknown.
        """
        if self.patients is None:
            return None
        of_text: dict[int, str] = {}
        for _, text, patient in sorted(
            zip(self.keys, self.text_of_N.tolist(), self.patients, strict=True)
        ):
            of_text.setdefault(text, patient)
        return [of_text[text] for text in range(len(self.texts))]


def retrieval_ranks(
    model: SupportsSimilarity, images: Embeddings, texts: Embeddings, text_of_N: torch.Tensor
) -> Ranks:
    """Return the ranks of images and texts as the protocol defines them.

    Two passes over the rows of similarities: the first finds the score of each positive, the second
    counts the candidates that score at least as high.

    Args:
        model: its similarity is used.
        images, texts: embeddings.
        text_of_N: index of each image's text; every text must have an image.

    Raises EvaluationError if a similarity is not finite.
    """
    return _ranks(Similarity(model, images, texts), text_of_N)


def _ranks(similarity: Similarity, text_of_N: torch.Tensor) -> Ranks:
    image_rank_N = torch.empty_like(text_of_N)
    positive_N = torch.empty(len(text_of_N))
    for start, similarity_BM in similarity:
        chunk = slice(start, start + len(similarity_BM))
        positive_B1 = similarity_BM.gather(1, text_of_N[chunk, None])
        positive_N[chunk] = positive_B1[:, 0]
        # includes the positive itself
        image_rank_N[chunk] = (similarity_BM >= positive_B1).sum(dim=1)
    best_M = torch.full((similarity.shape[1],), -torch.inf).scatter_reduce(
        0, text_of_N, positive_N, "amax"
    )
    text_rank_M = torch.ones(similarity.shape[1], dtype=torch.int64)
    for _, similarity_BM in similarity:
        text_rank_M += (similarity_BM >= best_M).sum(dim=0)
    own_positives = (positive_N >= best_M[text_of_N]).long()
    text_rank_M.scatter_add_(0, text_of_N, -own_positives)
    return image_rank_N.numpy(), text_rank_M.numpy()


def _gains(
    similarity: Similarity, gallery: Gallery, loader: Loader
) -> tuple[LabelGains, LabelGains] | None:
    """Return the gains of both directions; None for data without labels."""
    names = loader.source.label_names
    samples = samples_by_key(loader.source)
    if not names:
        return None
    labels = [samples[key][1].labels for key in gallery.keys]
    positive_NL = np.array(
        [[of_image.get(name) == POSITIVE for name in names] for of_image in labels]
    )
    return label_gains(similarity, positive_NL, gallery.text_of_N.numpy())


def _chance_gains(gains: tuple[LabelGains, LabelGains] | None) -> dict[str, float]:
    by_direction = zip(("image_to_text", "text_to_image"), gains or (), strict=False)
    return {
        f"ndcg@{k}/{direction}": float(value)
        for direction, one in by_direction
        for k, value in zip(GAIN_KS, one.chance_K, strict=True)
    }


def rank_rows(
    gallery: Gallery,
    ranks: Ranks,
    ks: Sequence[int],
    resamples: int,
    seed: int,
    gains: tuple[LabelGains, LabelGains] | None = None,
) -> tuple[MetricRow, ...]:
    """Return recall at each k, the median rank, MRR and gains, in both directions, with
    intervals.
    """

    def groups(rank: NDArray[np.int64], target: str, side: int) -> list[MetricGroup]:
        columns = [] if gains is None else list(zip(GAIN_KS, gains[side].ndcg_QK.T, strict=True))
        return [
            *rank_groups(rank, ks, target),
            *(mean_metrics(f"ndcg@{k}", ndcg_Q[:, None], [target]) for k, ndcg_Q in columns),
        ]

    image_rank_N, text_rank_M = ranks
    of_images = measure(
        groups(image_rank_N, "image_to_text", 0),
        len(image_rank_N),
        resamples=resamples,
        seed=seed,
        groups=gallery.patients,
    )
    of_texts = measure(
        groups(text_rank_M, "text_to_image", 1),
        len(text_rank_M),
        resamples=resamples,
        seed=seed,
        groups=gallery.patients_of_texts,
    )
    baseline = measure(
        rank_groups(commonest_text_ranks(gallery.text_of_N.numpy()), ks, COMMONEST_TEXTS),
        len(image_rank_N),
        resamples=resamples,
        seed=seed,
        groups=gallery.patients,
    )
    return of_images + of_texts + baseline


def commonest_text_ranks(text_of_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each image's text, from 1, among texts ordered by their number of images;
    ties are in the order of the first image.
    """
    count_M = np.bincount(text_of_N)
    rank_M = np.empty_like(count_M)
    rank_M[np.argsort(-count_M, kind="stable")] = np.arange(1, len(count_M) + 1)
    return rank_M[text_of_N]


def rank_groups(rank_Q: NDArray[np.int64], ks: Sequence[int], target: str) -> list[MetricGroup]:
    """Return recall at each k, the median rank and MRR of the queries of one direction."""
    recalls = [
        mean_metrics(f"recall@{k}", (rank_Q <= k)[:, None].astype(np.float64), [target]) for k in ks
    ]
    median = median_metric("median_rank", rank_Q.astype(np.float64), target)
    return [*recalls, median, mean_metrics("mrr", 1 / rank_Q[:, None], [target])]


def chance_recalls(gallery: Gallery, ks: Sequence[int]) -> dict[str, float]:
    """Return the expected recall of a random order, by metric and direction."""
    images = len(gallery.keys)
    texts = len(gallery.texts)
    positives_M = np.bincount(gallery.text_of_N.numpy(), minlength=texts)
    chance = {}
    for k in ks:
        chance[f"recall@{k}/image_to_text"] = min(1.0, k / texts)
        missed_M = np.ones(texts)
        for drawn in range(min(k, images)):
            missed_M *= np.maximum(images - positives_M - drawn, 0) / (images - drawn)
        chance[f"recall@{k}/text_to_image"] = float(1 - missed_M.mean())
    return chance


class RetrievalEval:
    """Retrieval during training: `RetrievalEval(loader)(model)` returns a flat mapping of metrics
    without intervals.

    Its keys are "retrieval/recall@5/image_to_text", "retrieval/median_rank/text_to_image", ...
    """

    def __init__(
        self, loader: Loader, *, ks: Sequence[int] = (1, 5, 10), autocast: torch.dtype | None = None
    ) -> None:
        self.loader = loader
        self.ks = ks
        self.autocast = autocast

    def __call__(self, model: Model) -> dict[str, float]:
        """Return the metrics of the model. Raises `EvaluationError` as `image_text_retrieval`
        does.
        """
        result = image_text_retrieval(
            model, self.loader, ks=self.ks, resamples=0, autocast=self.autocast
        )
        return {f"retrieval/{row.name}": row.value for row in result.results.rows}
