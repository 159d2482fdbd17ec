"""Retrieval by class: how many of the nearest candidates show what the query shows.

Protocol "class_retrieval", version 1, over a list of candidates and queries that is pinned in a file
(`medvl.eval.retrieval.candidate_lists`), and "image_retrieval", version 1, over all images of a folder:

* "precision@k" of a class is the share of a query's k nearest candidates that have it, averaged over the queries that
  have it; "macro" is the mean over the classes. Candidates of equal similarity count against the query: those without
  the class come first, so that a model which gives one score to everything finds as little as can be.
* An image is no candidate of itself; over a folder, no image of its patient is one either.
* Two images are compared by the cosine of their embeddings, an image and a text by the model's own similarity.
* Over a list: image queries (all candidates, where the list has none) and text queries against candidate images, and
  candidate images against the candidates' own texts, where each of these has one.
* Over a folder: labels are settled by a named policy; a candidate whose label is left out is no hit.
* `details.chance` is what a random order would have.
* Intervals: queries are drawn, images by patient; the candidates stay.

CheXpert 8x200: ConVIRT, arXiv 2010.00747, section 4.3, with k = 5, 10, 50. 5x200: GLoRIA, ICCV 2021.

Shape letters: Q queries, N candidates, L classes, E shared embedding.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.classification.label_policy import LabelPolicy
from medvl.eval.classification.scored_images import image_counts
from medvl.eval.core.bootstrap import mean_over_labels
from medvl.eval.core.full_pass import FullPass, input_hashes, samples_by_key
from medvl.eval.core.interfaces import Loader, Model
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics, measure
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results
from medvl.eval.retrieval.candidate_lists import Item, RetrievalList
from medvl.eval.retrieval.image_text import Similarity, check_ks, encode_images, take
from medvl.eval.zero_shot_classification.scores import embed_texts
from medvl.models.eval_mode import evaluating
from medvl.schema import Embeddings, Sample

LISTED, FOLDER, VERSION = "class_retrieval", "image_retrieval", 1
KS = (5, 10, 50)
_CHUNK = 256


def precision_at(similarity_QN: Tensor, relevant_NL: Tensor, ks: Sequence[int]) -> dict[int, Tensor]:
    """k -> (Q, L): the share of the k nearest candidates that have each class, equal similarities counting against it.

    Args:
        similarity_QN: -inf where a candidate is none for that query.
        relevant_NL: 1.0 where a candidate has the class, else 0.0.
        ks: each at most the number of candidates that every query has.

    Nothing is sorted by class: with v the k-th largest similarity of a query, all candidates above v are among its k
    nearest, and of those at v as many without the class as there is room for.
    """
    nearest_QK = similarity_QN.topk(max(ks), dim=1).values
    found = {}
    for k in ks:
        edge_Q1 = nearest_QK[:, k - 1 : k]
        above_QN, at_QN = (similarity_QN > edge_Q1).float(), (similarity_QN == edge_Q1).float()
        room_Q1 = k - above_QN.sum(dim=1, keepdim=True)
        others_QL = at_QN @ (1 - relevant_NL)
        found[k] = (above_QN @ relevant_NL + (room_Q1 - others_QL).clamp(min=0)) / k
    return found


def image_retrieval(
    model: Model,
    loader: Loader,
    *,
    ks: Sequence[int] = KS,
    policy: LabelPolicy | None = None,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> Results:
    """Every image of a folder against those of all other patients; the protocol is at the top of this module.

    Raises `EvaluationError` when the loader does not give every sample once, no label can be judged, or a query has
    fewer than k candidates.
    """
    check_ks(ks)
    policy = policy or LabelPolicy()
    inputs = input_hashes(checkpoint, manifest=loader)
    images, samples, counts = _encode(model, loader)
    names = tuple(loader.source.label_names)
    labels_NL = np.array([[sample.labels.get(name, np.nan) for name in names] for sample in samples])
    resolved = policy.resolve(labels_NL, names)
    asked = [place for place, name in enumerate(names) if (resolved.labels_NL[:, place] == 1).sum() > 0]
    if not asked:
        raise EvaluationError("no label of these images has a positive: there is nothing to look for")
    relevant_NL = (resolved.labels_NL[:, asked] == 1).astype(np.float64)
    patients = [sample.patient for sample in samples]
    number = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
    patient_N = torch.tensor([number[patient] for patient in patients])
    precision = _precisions(
        images.global_NE,
        images.global_NE,
        relevant_NL,
        ks,
        excluded=lambda rows: patient_N[rows, None] == patient_N,
    )
    kept = [names[place] for place in asked]
    blocks = _blocks(precision, relevant_NL, kept, "")
    return Results(
        protocol=FOLDER,
        protocol_version=VERSION,
        rows=measure(blocks, len(samples), resamples=resamples, seed=seed, groups=patients),
        config={"ks": list(ks), "policy": dataclasses.asdict(policy), "resamples": resamples, "seed": seed},
        inputs=inputs,
        details={
            **image_counts(samples, counts, resolved, kept),
            "chance": dict(zip(kept, relevant_NL.mean(axis=0).tolist(), strict=True)),
        },
    )


def class_retrieval(
    model: Model,
    loader: Loader,
    listed: RetrievalList,
    *,
    ks: Sequence[int] = KS,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> Results:
    """The queries of a list against its candidates; the protocol is at the top of this module.

    `loader` gives the images of the list and may give others, which are left out.

    Raises `EvaluationError` when an image of the list is not there, or there are fewer than k candidates.
    """
    check_ks(ks)
    inputs = input_hashes(checkpoint, manifest=loader)
    images, samples, counts = _encode(model, loader)
    place = {sample.key: number for number, sample in enumerate(samples)}
    missing = listed.keys - place.keys()
    if missing:
        raise EvaluationError(
            f"{len(missing)} of {len(listed.keys)} images of the list {listed.name!r} are not in these shards (the "
            f"first is {min(missing)}): name the shards that the list was made for, and their salt"
        )
    with evaluating(model):
        directions = [
            _image_queries(images, samples, listed, place, ks),
            *_text_queries(model, images, listed, place, ks),
            *_report_queries(model, images, samples, listed, place, ks),
        ]
    rows: tuple[MetricRow, ...] = ()
    for one in directions:
        blocks = _blocks(one.precision, one.relevant_QL, listed.classes, one.name)
        rows += measure(blocks, len(one.relevant_QL), resamples=resamples, seed=seed, groups=one.groups)
    chance_L = _relevance(listed.candidates, listed.classes).mean(axis=0)
    return Results(
        protocol=LISTED,
        protocol_version=VERSION,
        rows=rows,
        config={"ks": list(ks), "list": listed.name, "resamples": resamples, "seed": seed},
        inputs={**inputs, "list": listed.sha256},
        details={
            "candidates": len(listed.candidates),
            "image_queries": len(listed.image_queries),
            "text_queries": len(listed.text_queries),
            "unreadable": counts,
            "chance": dict(zip(listed.classes, chance_L.tolist(), strict=True)),
        },
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Direction:
    """Queries of one kind and what they found."""

    name: str
    precision: dict[int, Array]
    """k -> (Q, L)."""
    relevant_QL: Array
    """1.0 where a query has a class."""
    groups: Sequence[Hashable]
    """What intervals draw."""


def _image_queries(
    images: Embeddings, samples: Sequence[Sample], listed: RetrievalList, place: Mapping[str, int], ks: Sequence[int]
) -> _Direction:
    queries = listed.image_queries or listed.candidates
    key_N, key_Q = (np.array([key for key, _ in items]) for items in (listed.candidates, queries))
    precision = _precisions(
        _select(images, queries, place).global_NE,
        _select(images, listed.candidates, place).global_NE,
        _relevance(listed.candidates, listed.classes),
        ks,
        excluded=lambda rows: torch.from_numpy(key_Q[rows, None] == key_N),
    )
    patients = [samples[place[key]].patient for key, _ in queries]
    return _Direction("image to image", precision, _relevance(queries, listed.classes), patients)


def _text_queries(
    model: Model, images: Embeddings, listed: RetrievalList, place: Mapping[str, int], ks: Sequence[int]
) -> Iterator[_Direction]:
    if listed.text_queries:
        texts = embed_texts(model, [text for text, _ in listed.text_queries])
        similarity_NQ = _similarity(model, _select(images, listed.candidates, place), texts)
        precision = _at_once(similarity_NQ.T, _relevance(listed.candidates, listed.classes), ks)
        wanted_QL = _relevance(listed.text_queries, listed.classes)
        yield _Direction("text to image", precision, wanted_QL, range(len(wanted_QL)))


def _report_queries(
    model: Model,
    images: Embeddings,
    samples: Sequence[Sample],
    listed: RetrievalList,
    place: Mapping[str, int],
    ks: Sequence[int],
) -> Iterator[_Direction]:
    of_candidates = [samples[place[key]] for key, _ in listed.candidates]
    reports = [_text(sample) for sample in of_candidates]
    if all(reports):
        similarity_NM = _similarity(model, _select(images, listed.candidates, place), embed_texts(model, reports))
        relevant_NL = _relevance(listed.candidates, listed.classes)
        patients = [sample.patient for sample in of_candidates]
        yield _Direction("image to text", _at_once(similarity_NM, relevant_NL, ks), relevant_NL, patients)


def _encode(model: Model, loader: Loader) -> tuple[Embeddings, list[Sample], dict[str, int]]:
    """Embeddings and samples of every readable image, and what could not be read."""
    given = FullPass(loader)
    with evaluating(model):
        images, keys, _ = encode_images(model, given, None)
    place_of = samples_by_key(loader.source)
    return images, [place_of[key][1] for key in keys], given.unreadable


def _select(images: Embeddings, items: Sequence[Item], place: Mapping[str, int]) -> Embeddings:
    return take(images, torch.tensor([place[key] for key, _ in items]))


def _relevance(items: Sequence[Item], classes: Sequence[str]) -> Array:
    """1.0 where an item has a class."""
    return np.array([[float(name in found) for name in classes] for _, found in items])


def _text(sample: Sample) -> str:
    return " ".join(" ".join(sample.sections.values()).split())


def _similarity(model: Model, images: Embeddings, texts: Embeddings) -> Tensor:
    return torch.cat([rows for _, rows in Similarity(model, images, texts)])


def _precisions(
    query_QE: Tensor,
    candidate_NE: Tensor,
    relevant_NL: Array,
    ks: Sequence[int],
    *,
    excluded: Callable[[slice], Tensor],
) -> dict[int, Array]:
    """Precision by cosine, in chunks of queries; `excluded` says which candidates a chunk of queries does not have."""
    relevant = torch.from_numpy(relevant_NL).float()
    parts: dict[int, list[Tensor]] = {k: [] for k in ks}
    for start in range(0, len(query_QE), _CHUNK):
        rows = slice(start, start + _CHUNK)
        similarity_QN = query_QE[rows].float() @ candidate_NE.float().T
        if not similarity_QN.isfinite().all():
            raise EvaluationError("the model's embeddings are not finite: look at its weights")
        without_QN = excluded(rows)
        fewest = int((~without_QN).sum(dim=1).min())
        if fewest < max(ks):
            raise EvaluationError(f"a query has {fewest} candidates, fewer than k = {max(ks)}: lower ks")
        similarity_QN.masked_fill_(without_QN, -torch.inf)
        for k, precision_QL in precision_at(similarity_QN, relevant, ks).items():
            parts[k].append(precision_QL)
    return {k: torch.cat(found).double().numpy() for k, found in parts.items()}


def _at_once(similarity_QN: Tensor, relevant_NL: Array, ks: Sequence[int]) -> dict[int, Array]:
    if similarity_QN.shape[1] < max(ks):
        raise EvaluationError(f"there are {similarity_QN.shape[1]} candidates, fewer than k = {max(ks)}: lower ks")
    relevant = torch.from_numpy(relevant_NL).float()
    return {k: found.double().numpy() for k, found in precision_at(similarity_QN, relevant, ks).items()}


def _blocks(precision: dict[int, Array], relevant_QL: Array, names: Sequence[str], direction: str) -> list[MetricGroup]:
    """Precision at each k of every class, over the queries that have it, and the mean over classes."""
    return [
        _with_macro(f"precision@{k}", np.where(relevant_QL == 1, found_QL, np.nan), names, direction)
        for k, found_QL in precision.items()
    ]


def _with_macro(metric: str, values_QL: Array, names: Sequence[str], direction: str) -> MetricGroup:
    single = mean_metrics(metric, values_QL, names, subgroup=direction)
    macro = MetricRow(metric=metric, target="macro", subgroup=direction, n=len(values_QL))

    def statistic(counts_QR: Array) -> Array:
        values_RL = single.statistic(counts_QR)
        return np.concatenate([values_RL, mean_over_labels(values_RL)[:, None]], axis=1)

    return MetricGroup([*single.rows, macro], statistic)
