"""Retrieval by class: precision of the nearest candidates with respect to the classes of the query.

Protocol "class_retrieval", version 2, over candidates and queries that are fixed in a file
(`medvl.eval.retrieval.candidate_lists`), and "image_retrieval", version 1, over all images of a
folder:

* "precision@k" of a class is the share of a query's k nearest candidates that have it, averaged
  over the queries that have it; "macro" is the mean over classes. Ties count against the query:
  candidates without the class come first, so a model with constant scores gets the lowest possible
  value.
* An image is not a candidate for itself; over a folder, neither are other images of its patient.
* Two images are compared by the cosine of their embeddings, an image and a text by the model's own
  similarity.
* Over a list: image queries (all candidates, if the list has none) and text queries against
  candidate images, and candidate images against the candidates' own texts (findings and impression
  of a report), if every candidate has one.
* Over a folder: a named policy resolves labels; a candidate whose label is left out is not a hit.
* `details["chance"]` is the expected precision of a random order; for a fixed list, the precision
  of all its candidates.
* Intervals: the bootstrap resamples queries, images by patient; the candidates are fixed.

CheXpert 8x200: ConVIRT, arXiv 2010.00747, section 4.3, with k = 5, 10, 50. 5x200: GLoRIA, ICCV
2021.

Shape letters: Q queries, N candidates, L classes, E shared embedding.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.data.reports.sentences import join_texts, one_line
from medvl.data.transforms.text import REPORT_SECTIONS, choose_sections
from medvl.errors import EvaluationError
from medvl.eval.classification.scored_images import LabelPolicy, image_counts
from medvl.eval.core.full_pass import (
    FullPass,
    Loader,
    Model,
    embed_texts,
    input_hashes,
    samples_by_key,
)
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics, measure, subgroups_of
from medvl.eval.core.metrics import Array, defined_labels, mean_over_labels
from medvl.eval.core.results import Results
from medvl.eval.retrieval.candidate_lists import Item, RetrievalList
from medvl.eval.retrieval.image_text import check_ks
from medvl.eval.retrieval.similarity import Similarity, encode_images, take
from medvl.models.base import evaluating
from medvl.schema import Embeddings, Sample

LIST_PROTOCOL = "class_retrieval"
LIST_VERSION = 2
FOLDER_PROTOCOL = "image_retrieval"
FOLDER_VERSION = 1
KS = (5, 10, 50)
_CHUNK = 256


class Query(NamedTuple):
    """A query and its bootstrap unit."""

    query: str
    """Key of an image, or a text."""
    patient: str
    """Patient of an image; a text is resampled alone."""
    subgroups: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Queries:
    """Queries of one direction with the precision of their nearest candidates."""

    direction: str
    """ "image to image", ...; empty for the images of a folder."""
    precision: Mapping[int, Array]
    """k -> (Q, L)"""
    relevant_QL: Array
    """1.0 if a query has a class."""
    queries: Sequence[Query]

    def measure(self, names: Sequence[str], *, resamples: int, seed: int) -> tuple[MetricRow, ...]:
        """Return all rows of this direction, with queries resampled by patient."""
        values = [
            (k, np.where(self.relevant_QL == 1, of_k_QL, np.nan))
            for k, of_k_QL in self.precision.items()
        ]
        groups = [precision_metrics(k, values_QL, names, self.direction) for k, values_QL in values]
        patients = [query.patient for query in self.queries]
        return measure(groups, len(patients), resamples=resamples, seed=seed, groups=patients)


@dataclasses.dataclass(frozen=True, slots=True)
class ClassRetrievalResult:
    """Results, with the precision of every query."""

    results: Results
    classes: tuple[str, ...]
    queries: tuple[Queries, ...]

    def predictions(self) -> Iterator[Mapping[str, Any]]:
        """Yield one JSON line per query: k -> class -> precision, for the classes that the query
        has.
        """
        for one in self.queries:
            for row, query in enumerate(one.queries):
                has = [column for column, value in enumerate(one.relevant_QL[row]) if value == 1]
                yield {
                    "direction": one.direction,
                    **query._asdict(),
                    "precision": {
                        str(k): {
                            self.classes[column]: float(of_k_QL[row, column]) for column in has
                        }
                        for k, of_k_QL in one.precision.items()
                    },
                }


def precision_at(
    similarity_QN: Tensor, relevant_NL: Tensor, ks: Sequence[int]
) -> dict[int, Tensor]:
    """Return k -> (Q, L): the share of the k nearest candidates that have each class, with ties
    counted against it.

    Nothing is sorted by class: with v the k-th largest similarity of a query, all candidates above
    v are among its k nearest, and the remaining ones are taken from those at v, candidates without
    the class first.

    Args:
        similarity_QN: -inf for a candidate that is excluded for that query.
        relevant_NL: 1.0 if a candidate has the class, else 0.0.
        ks: each at most the number of candidates that every query has.
    """
    nearest_QK = similarity_QN.topk(max(ks), dim=1).values
    precision = {}
    for k in ks:
        edge_Q1 = nearest_QK[:, k - 1 : k]
        above_QN = (similarity_QN > edge_Q1).float()
        at_QN = (similarity_QN == edge_Q1).float()
        room_Q1 = k - above_QN.sum(dim=1, keepdim=True)
        others_QL = at_QN @ (1 - relevant_NL)
        precision[k] = (above_QN @ relevant_NL + (room_Q1 - others_QL).clamp(min=0)) / k
    return precision


def image_retrieval(
    model: Model,
    loader: Loader,
    *,
    ks: Sequence[int] = KS,
    policy: LabelPolicy | None = None,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> ClassRetrievalResult:
    """Evaluate retrieval of every image of a folder among the images of all other patients.

    The module docstring describes the protocol.

    Args:
        model: the dual-encoder.
        loader: over labelled images.
        ks: numbers of nearest candidates.
        policy: treatment of uncertain and missing labels.
        resamples, seed: number and seed of the bootstrap resamples.
        checkpoint: its hash goes into the results.

    Raises:
        EvaluationError: the loader does not give every sample once, no label has a positive, or a
            query has fewer than k candidates.
    """
    check_ks(ks)
    policy = policy or LabelPolicy()
    inputs = input_hashes(checkpoint, manifest=loader)
    images, samples, counts = _encode(model, loader)
    names = tuple(loader.source.label_names)
    labels_NL = np.array(
        [[sample.labels.get(name, np.nan) for name in names] for sample in samples]
    )
    resolved = policy.resolve(labels_NL, names)
    used = [
        index for index, name in enumerate(names) if (resolved.labels_NL[:, index] == 1).sum() > 0
    ]
    if not used:
        raise EvaluationError(
            "no label of these images has a positive: use labelled shards", "empty"
        )
    relevant_NL = (resolved.labels_NL[:, used] == 1).astype(np.float64)
    patients = [sample.patient for sample in samples]
    number = {patient: index for index, patient in enumerate(dict.fromkeys(patients))}
    patient_N = torch.tensor([number[patient] for patient in patients])
    precision = _precisions(
        images.global_NE,
        images.global_NE,
        relevant_NL,
        ks,
        excluded=lambda rows: patient_N[rows, None] == patient_N,
    )
    labels = [names[index] for index in used]
    queries = Queries("", precision, relevant_NL, [_query(sample) for sample in samples])
    results = Results(
        protocol=FOLDER_PROTOCOL,
        protocol_version=FOLDER_VERSION,
        rows=queries.measure(labels, resamples=resamples, seed=seed),
        config={
            "ks": list(ks),
            "policy": dataclasses.asdict(policy),
            "resamples": resamples,
            "seed": seed,
        },
        inputs=inputs,
        details={
            **image_counts(samples, counts, resolved, labels),
            "chance": dict(
                zip(labels, _chance(relevant_NL, patient_N.numpy()).tolist(), strict=True)
            ),
        },
    )
    return ClassRetrievalResult(results, tuple(labels), (queries,))


def _chance(relevant_NL: Array, patient_N: np.ndarray) -> Array:
    """Return (L,): the expected precision of a random order, for queries among the images of
    other patients.
    """
    relevant_PL = np.zeros((patient_N.max() + 1, relevant_NL.shape[1]))
    np.add.at(relevant_PL, patient_N, relevant_NL)
    candidates_N = len(patient_N) - np.bincount(patient_N)[patient_N]
    share_NL = (relevant_NL.sum(axis=0) - relevant_PL[patient_N]) / candidates_N[:, None]
    share_L: Array = (share_NL * relevant_NL).sum(axis=0) / relevant_NL.sum(axis=0)
    return share_L


def class_retrieval(
    model: Model,
    loader: Loader,
    retrieval_list: RetrievalList,
    *,
    ks: Sequence[int] = KS,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> ClassRetrievalResult:
    """Evaluate retrieval of the queries of a list among its candidates; the module docstring
    describes the protocol.

    Args:
        model: the dual-encoder.
        loader: over the images of the list; other images are ignored.
        retrieval_list: candidates and queries.
        ks: numbers of nearest candidates.
        resamples, seed: number and seed of the bootstrap resamples.
        checkpoint: its hash goes into the results.

    Raises EvaluationError if an image of the list is missing, or there are fewer than k candidates.
    """
    check_ks(ks)
    inputs = input_hashes(checkpoint, manifest=loader)
    images, samples, counts = _encode(model, loader)
    position = {sample.key: index for index, sample in enumerate(samples)}
    missing = retrieval_list.keys - position.keys()
    if missing:
        message = (
            f"{len(missing)} images of the list are not in these shards (the first is "
            f"{min(missing)})"
        )
        raise EvaluationError(message, "mismatch")
    with evaluating(model):
        directions = [
            _image_queries(images, samples, retrieval_list, position, ks),
            *_text_queries(model, images, retrieval_list, position, ks),
            *_report_queries(model, images, samples, retrieval_list, position, ks),
        ]
    classes = tuple(retrieval_list.classes)
    chance_L = _relevance(retrieval_list.candidates, classes).mean(axis=0)
    results = Results(
        protocol=LIST_PROTOCOL,
        protocol_version=LIST_VERSION,
        rows=tuple(
            row
            for one in directions
            for row in one.measure(classes, resamples=resamples, seed=seed)
        ),
        config={"ks": list(ks), "list": retrieval_list.name, "resamples": resamples, "seed": seed},
        inputs={**inputs, "list": retrieval_list.sha256},
        details={
            "candidates": len(retrieval_list.candidates),
            "image_queries": len(retrieval_list.image_queries),
            "text_queries": len(retrieval_list.text_queries),
            "unreadable": counts,
            "chance": dict(zip(classes, chance_L.tolist(), strict=True)),
        },
    )
    return ClassRetrievalResult(results, classes, tuple(directions))


def _query(sample: Sample) -> Query:
    return Query(sample.key, sample.patient, subgroups_of(sample))


def _image_queries(
    images: Embeddings,
    samples: Sequence[Sample],
    retrieval_list: RetrievalList,
    position: Mapping[str, int],
    ks: Sequence[int],
) -> Queries:
    candidates = retrieval_list.candidates
    classes = retrieval_list.classes
    queries = retrieval_list.image_queries or candidates
    key_N, key_Q = (np.array([key for key, _ in items]) for items in (candidates, queries))
    precision = _precisions(
        _select(images, queries, position).global_NE,
        _select(images, candidates, position).global_NE,
        _relevance(candidates, classes),
        ks,
        excluded=lambda rows: torch.from_numpy(key_Q[rows, None] == key_N),
    )
    sampled = [_query(samples[position[key]]) for key, _ in queries]
    return Queries("image to image", precision, _relevance(queries, classes), sampled)


def _text_queries(
    model: Model,
    images: Embeddings,
    retrieval_list: RetrievalList,
    position: Mapping[str, int],
    ks: Sequence[int],
) -> Iterator[Queries]:
    candidates = retrieval_list.candidates
    queries = retrieval_list.text_queries
    classes = retrieval_list.classes
    if queries:
        texts = embed_texts(model, [text for text, _ in queries])
        similarity_NQ = Similarity(model, _select(images, candidates, position), texts).matrix()
        precision = _precisions_of(similarity_NQ.T, _relevance(candidates, classes), ks)
        sampled = [Query(text, f"text {number}", {}) for number, (text, _) in enumerate(queries)]
        yield Queries("text to image", precision, _relevance(queries, classes), sampled)


def _report_queries(
    model: Model,
    images: Embeddings,
    samples: Sequence[Sample],
    retrieval_list: RetrievalList,
    position: Mapping[str, int],
    ks: Sequence[int],
) -> Iterator[Queries]:
    candidates = retrieval_list.candidates
    candidate_samples = [samples[position[key]] for key, _ in candidates]
    reports = [_text(sample) for sample in candidate_samples]
    if all(reports):
        texts = embed_texts(model, reports)
        similarity_NM = Similarity(model, _select(images, candidates, position), texts).matrix()
        relevant_NL = _relevance(candidates, retrieval_list.classes)
        sampled = [_query(sample) for sample in candidate_samples]
        yield Queries(
            "image to text", _precisions_of(similarity_NM, relevant_NL, ks), relevant_NL, sampled
        )


def _encode(model: Model, loader: Loader) -> tuple[Embeddings, list[Sample], dict[str, int]]:
    """Return embeddings and samples of every readable image, and the counts of unreadable ones."""
    batches = FullPass(loader)
    with evaluating(model):
        images, keys, _ = encode_images(model, batches, None)
    samples = samples_by_key(loader.source)
    return images, [samples[key][1] for key in keys], batches.unreadable


def _select(images: Embeddings, items: Sequence[Item], position: Mapping[str, int]) -> Embeddings:
    return take(images, torch.tensor([position[key] for key, _ in items]))


def _relevance(items: Sequence[Item], classes: Sequence[str]) -> Array:
    return np.array(
        [[float(name in item_classes) for name in classes] for _, item_classes in items]
    )


def _text(sample: Sample) -> str:
    return one_line(join_texts(choose_sections(sample.sections, REPORT_SECTIONS)))


def _precisions(
    query_QE: Tensor,
    candidate_NE: Tensor,
    relevant_NL: Array,
    ks: Sequence[int],
    *,
    excluded: Callable[[slice], Tensor],
) -> dict[int, Array]:
    """Return precision by cosine, in chunks of queries; `excluded` gives those to exclude for a
    chunk.
    """
    query_QE = F.normalize(query_QE.float(), dim=1)
    candidate_NE = F.normalize(candidate_NE.float(), dim=1)
    relevant = torch.from_numpy(relevant_NL).float()
    parts: dict[int, list[Tensor]] = {k: [] for k in ks}
    for start in range(0, len(query_QE), _CHUNK):
        rows = slice(start, start + _CHUNK)
        similarity_QN = query_QE[rows] @ candidate_NE.T
        if not similarity_QN.isfinite().all():
            raise EvaluationError(
                "the model's embeddings are not finite: check its weights", "nonfinite"
            )
        excluded_QN = excluded(rows)
        fewest = int((~excluded_QN).sum(dim=1).min())
        if fewest < max(ks):
            raise _too_few(fewest, ks)
        similarity_QN.masked_fill_(excluded_QN, -torch.inf)
        for k, precision_QL in precision_at(similarity_QN, relevant, ks).items():
            parts[k].append(precision_QL)
    return {k: torch.cat(chunks).double().numpy() for k, chunks in parts.items()}


def _precisions_of(
    similarity_QN: Tensor, relevant_NL: Array, ks: Sequence[int]
) -> dict[int, Array]:
    if similarity_QN.shape[1] < max(ks):
        raise _too_few(similarity_QN.shape[1], ks)
    relevant = torch.from_numpy(relevant_NL).float()
    return {
        k: precision.double().numpy()
        for k, precision in precision_at(similarity_QN, relevant, ks).items()
    }


def _too_few(candidates: int, ks: Sequence[int]) -> EvaluationError:
    return EvaluationError(
        f"a query has {candidates} candidates, fewer than k = {max(ks)}: lower ks",
        "out_of_range",
        field="ks",
    )


def precision_metrics(
    k: int, values_QL: Array, names: Sequence[str], direction: str
) -> MetricGroup:
    """Return precision at k of every class, over the queries that have it (else NaN), and the
    mean over classes.
    """
    metric = f"precision@{k}"
    by_class = mean_metrics(metric, values_QL, names, subgroup=direction)
    macro = MetricRow(metric=metric, target="macro", subgroup=direction, n=len(values_QL))
    fixed_L = defined_labels(by_class.statistic, len(values_QL))

    def statistic(counts_QR: Array) -> Array:
        values_RL = by_class.statistic(counts_QR)
        return np.concatenate([values_RL, mean_over_labels(values_RL, fixed_L)[:, None]], axis=1)

    return MetricGroup([*by_class.rows, macro], statistic)
