"""Retrieval of one section of a report by another, such as the impression by the findings, beside
TF-IDF.

Protocol "text_retrieval", version 1:

* Queries are the reports that have both sections; each study counts once. Candidates are the
  distinct texts of the second section: equal texts, up to white space, are positives of each other.
* The model's score is the cosine of two vectors: of a dual-encoder those that it compares with
  images, of any other system or encoder its pooled vector, or the mean of its tokens (`pool`).
* A rank counts the candidates that score at least as high as the query's own text, so that a model
  that scores all alike is last.
* Baselines are rows of their own: "tfidf" (`medvl.eval.text_tasks.metrics`, weights from the
  candidates), "commonest_texts" (the same order of candidates for every query, by frequency), and
  "chance", the expected value of a random order.
* "above_tfidf" is the difference of the model and TF-IDF on the same queries.
* Intervals: patients are resampled, or the groups that a field of the file names.

Shape letters: N queries, M distinct texts, B queries of a chunk, E numbers of a vector.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.files import sha256
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.tables import read_json_lines
from medvl.data.reports.headings import section_name
from medvl.errors import CorpusError, EvaluationError
from medvl.eval.core.full_pass import Source, embed_texts, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics, measure, median_metric
from medvl.eval.core.open import OutputOptions, RunOptions, Setup, resolve_device
from medvl.eval.core.results import (
    LineFields,
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    checkpoint_sha256,
    format_table,
)
from medvl.eval.evaluation import Evaluation, Outcome
from medvl.eval.html.page import (
    Card,
    Cards,
    Choice,
    Deck,
    Page,
    Section,
    header_facts,
    headline,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.retrieval.image_text import commonest_text_ranks, rank_groups
from medvl.eval.text_tasks.evaluation import TextEncoderOptions
from medvl.eval.text_tasks.metrics import TfIdf
from medvl.eval.text_tasks.protocol import EvaluatedEncoder
from medvl.models.base import evaluating
from medvl.models.checkpoint_folder import described_model
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.registry import system
from medvl.schema import Embeddings, TextFeatures

PROTOCOL = "text_retrieval"
PROTOCOL_VERSION = 1
KS = (1, 5, 10)
MODEL = "model"
TFIDF = "tfidf"
COMMONEST = "commonest_texts"
CHANCE = "chance"
ABOVE = "above_tfidf"
_TITLES = {
    TFIDF: "TF-IDF",
    COMMONEST: "The commonest texts for every query",
    CHANCE: "Chance",
    ABOVE: "Above TF-IDF",
}
_CHUNK = 256
_SHOWN = 3
Pool = Literal["own", "mean"]
Embed = Callable[[Sequence[str]], Tensor]
"""Texts -> vectors (N, E)."""


class Report(NamedTuple):
    """Two sections of a report."""

    key: str
    group: str
    """Patient, or what is resampled instead."""
    query: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Reports that have both sections, and the distinct texts of the second."""

    reports: tuple[Report, ...]
    texts: tuple[str, ...]
    text_of_N: NDArray[np.int64]
    """Index of each report's text."""
    incomplete: int
    """Reports without one of the sections."""

    @classmethod
    def of(cls, reports: Sequence[Report]) -> "Pairs":
        """Collapse white space, and leave out reports without one of the sections.

        Raises EvaluationError if there are fewer than two distinct texts.
        """
        plain = [
            report._replace(query=_plain(report.query), text=_plain(report.text))
            for report in reports
        ]
        complete = [report for report in plain if report.query and report.text]
        place = {
            text: n for n, text in enumerate(dict.fromkeys(report.text for report in complete))
        }
        if len(place) < 2:
            message = (
                f"expected reports with both sections and two distinct texts of the second, "
                f"got {len(complete)} of {len(plain)} reports and {len(place)} distinct texts"
            )
            raise EvaluationError(message, "empty", field="data")
        return cls(
            reports=tuple(complete),
            texts=tuple(place),
            text_of_N=np.array([place[report.text] for report in complete]),
            incomplete=len(plain) - len(complete),
        )


def _plain(text: str) -> str:
    return " ".join(text.split())


def reports_of_shards(source: Source, query: str, target: str) -> list[Report]:
    """Return the two sections of each study of shards; "" for a section that it lacks."""
    studies: dict[str, Report] = {}
    for key, (_, sample) in samples_by_key(source).items():
        sections = {section_name(name): text for name, text in sample.sections.items()}
        sections |= sample.sections
        report = Report(key, sample.patient, sections.get(query, ""), sections.get(target, ""))
        studies.setdefault(sample.study, report)
    return list(studies.values())


def reports_of_file(path: Path, query: str, target: str, group: str | None) -> list[Report]:
    """Return the two sections of each line of a file of JSON lines, gzipped or not.

    Args:
        path: the file; its lines are objects with both fields, which may be null.
        query, target: names of the fields.
        group: field of the patient; None where each line is another one.

    Raises CorpusError for a file that is missing or malformed.
    """
    fields = (query, target) if group is None else (query, target, group)
    reports = []
    for number, row in read_json_lines(path, fields, InputFolders.of(path.parent)):
        texts = [row[name] or "" for name in (query, target)]
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            message = f"{path}, row {number}: expected texts, got {type(wrong).__name__}"
            raise CorpusError(message, "malformed", field="data")
        reports.append(Report(str(number), str(row[group] if group else number), *texts))
    return reports


def ranks(score: Callable[[slice], NDArray[Any]], text_of_N: NDArray[np.int64]) -> NDArray[Any]:
    """Return the rank (N,) of each query's own text, from 1.

    Args:
        score: chunk of the queries -> their scores (B, M) with all texts.
        text_of_N: index of each query's text.
    """
    parts = []
    for start in range(0, len(text_of_N), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        score_BM = score(chunk)
        if not np.isfinite(score_BM).all():
            message = "the model's vectors are not finite: check its weights"
            raise EvaluationError(message, "nonfinite")
        own_B1 = np.take_along_axis(score_BM, text_of_N[chunk, None], axis=1)
        parts.append((score_BM >= own_B1).sum(axis=1))
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextRetrievalResult:
    """Results, and the rank of the own text of every query."""

    results: Results
    pairs: Pairs
    rank_N: NDArray[np.int64]
    tfidf_rank_N: NDArray[np.int64]
    nearest_NK: NDArray[np.int64]
    """The model's first texts of each query."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield key, patient, index of the text and ranks of each query, no texts."""
        columns = (self.pairs.text_of_N, self.rank_N, self.tfidf_rank_N)
        values = zip(self.pairs.reports, *(one.tolist() for one in columns), strict=True)
        for report, text, rank, tfidf in values:
            names = {"key": report.key, "patient": report.group}
            yield {**names, "text": text, "rank": rank, "tfidf_rank": tfidf}


def evaluate_text_retrieval(
    embed: Embed,
    pairs: Pairs,
    *,
    ks: Sequence[int] = KS,
    resamples: int = 1000,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    inputs: dict[str, str | None] | None = None,
) -> TextRetrievalResult:
    """Evaluate vectors of texts by the protocol of this module.

    Args:
        embed: texts -> their vectors.
        pairs: the reports.
        ks: ranks of the recalls.
        resamples, seed: number and seed of the bootstrap resamples.
        config, inputs: further settings and hashes for the results.

    Raises EvaluationError if a vector is not finite.
    """
    queries = [report.query for report in pairs.reports]
    query_NE, text_ME = (
        torch.nn.functional.normalize(embed(texts).float().cpu(), dim=1)
        for texts in (queries, pairs.texts)
    )
    nearest: list[Tensor] = []

    def cosines(chunk: slice) -> NDArray[Any]:
        score_BM = query_NE[chunk] @ text_ME.T
        nearest.append(score_BM.topk(min(_SHOWN, len(text_ME)), dim=1).indices)
        return score_BM.numpy()

    tfidf = TfIdf(pairs.texts)
    query_NV, text_VM = tfidf.vectors(queries), tfidf.vectors(pairs.texts).T
    rank_N = ranks(cosines, pairs.text_of_N)
    tfidf_N = ranks(lambda chunk: (query_NV[chunk] @ text_VM).toarray(), pairs.text_of_N)
    groups = [report.group for report in pairs.reports]
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(
            [
                *rank_groups(rank_N, ks, MODEL),
                *_baselines(pairs, rank_N, tfidf_N, ks),
            ],
            len(rank_N),
            resamples=resamples,
            seed=seed,
            groups=groups,
        ),
        config={**(config or {}), "ks": list(ks), "resamples": resamples, "seed": seed},
        inputs=inputs or {},
        details={
            "reports": len(queries),
            "patients": len(set(groups)),
            "texts": len(pairs.texts),
            "incomplete": pairs.incomplete,
        },
    )
    return TextRetrievalResult(
        results=results,
        pairs=pairs,
        rank_N=rank_N,
        tfidf_rank_N=tfidf_N,
        nearest_NK=torch.cat(nearest).numpy(),
    )


def _baselines(
    pairs: Pairs, rank_N: NDArray[Any], tfidf_N: NDArray[Any], ks: Sequence[int]
) -> list[MetricGroup]:
    """Return the metrics of the baselines, and the differences from TF-IDF."""
    texts = len(pairs.texts)
    commonest_N = commonest_text_ranks(pairs.text_of_N)
    every_N = np.ones((len(rank_N), 1))
    expected = {f"recall@{k}": min(1.0, k / texts) for k in ks}
    expected["mrr"] = float((1 / np.arange(1, texts + 1)).mean())
    return [
        *rank_groups(tfidf_N, ks, TFIDF),
        *rank_groups(commonest_N, ks, COMMONEST),
        *(mean_metrics(name, every_N * value, [CHANCE]) for name, value in expected.items()),
        median_metric("median_rank", every_N[:, 0] * (texts + 1) / 2, CHANCE),
        *(
            mean_metrics(f"recall@{k}", ((rank_N <= k) - 1.0 * (tfidf_N <= k))[:, None], [ABOVE])
            for k in ks
        ),
        mean_metrics("mrr", (1 / rank_N - 1 / tfidf_N)[:, None], [ABOVE]),
    ]


def embedder(encoder: EvaluatedEncoder, device: str, pool: Pool, batch: int) -> Embed:
    """Return the vectors of a text encoder: its own pooled ones, or the mean of its tokens."""
    network = encoder.make(0).eval().to(device)
    tokenizer = encoder.tokenizer(network.max_tokens)

    def encode(texts: list[str]) -> Tensor:
        ids_BT, mask_BT = tokenizer(texts)
        features: TextFeatures = network(ids_BT.to(device), mask_BT.to(device))
        if pool == "own":
            return features.pooled_BD
        return features.tokens_BTD.sum(dim=1) / features.mask_BT.sum(dim=1, keepdim=True).clamp(
            min=1
        )

    def embed(texts: Sequence[str]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # little padding
        chunks = [order[start : start + batch] for start in range(0, len(order), batch)]
        with torch.inference_mode():
            vector_ND = torch.cat([encode([texts[row] for row in chunk]) for chunk in chunks])
            return vector_ND[torch.tensor(order, device=device).argsort()]

    return embed


_LIMITS = (
    "A research evaluation of text encoders, not for clinical use: a retrieved text may have the "
    "same meaning as the report's own in other words, and is still counted as wrong.",
    "Recall falls as the number of texts grows: compare numbers over the same reports only.",
    "Texts on this page belong to the data set and stay under its terms of use.",
)


def write_text_retrieval_page(
    result: TextRetrievalResult, path: str | Path, header: PageHeader, *, examples: int = 6
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_text_retrieval`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        examples: queries that are shown; 0 for none, such as for texts that may not be shared.
    """
    results = result.results
    details = results.details
    last = f"recall@{max(results.config['ks'])}"
    sections: list[Section] = [_table(results, header.model)]
    if examples:
        sections.append(_examples(result, examples))
    query, target = (results.config.get(name, name) for name in ("query", "target"))
    page = Page(
        title=f"Text retrieval: {header.model}",
        subtitle=f"{header.data}: {target} by {query}, {details['reports']:,} reports and "
        f"{details['texts']:,} distinct texts",
        headlines=[
            headline(f"{last}, {title}", results.row(last, target))
            for target, title in (
                (MODEL, "model"),
                (TFIDF, "TF-IDF"),
                (COMMONEST, "commonest texts"),
            )
        ],
        facts=header_facts(results, header, units="patients"),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


def _table(results: Results, model: str) -> Table:
    rows = {(row.metric, row.target): row for row in results.rows}
    recalls = [f"recall@{k}" for k in results.config["ks"]]
    lines: list[Sequence[Cell | str]] = [
        [
            title,
            *(metric_cell(rows[name, target], bar=target != ABOVE) for name in recalls),
            *(metric_cell(rows.get((name, target))) for name in ("mrr", "median_rank")),
        ]
        for target, title in {MODEL: model, **_TITLES}.items()
    ]
    return Table(
        title="Summary: recall",
        columns=["", *map(str.capitalize, recalls), "MRR", "Median rank"],
        rows=lines,
        strong_rows=1,
        caption="The share of reports whose own text is among the first k, with 95% intervals; "
        "MRR is the mean of 1 / rank. TF-IDF compares the words of the two sections. The last row "
        "is the difference on the same reports.",
    )


def _examples(result: TextRetrievalResult, examples: int) -> Cards:
    decks = []
    hit_N = result.rank_N <= _SHOWN
    for title, good in (
        ("Own text among the first", True),
        ("Own text not among the first", False),
    ):
        of_kind = np.flatnonzero(hit_N == good)
        shown = of_kind[np.linspace(0, len(of_kind) - 1, min(examples, len(of_kind))).astype(int)]
        if len(shown):
            cards = [_card(result, row) for row in shown.tolist()]
            counted = f"{title}: {len(of_kind):,} of {len(hit_N):,}"
            decks.append(Deck(title=counted, cards=cards, good=good))
    return Cards(
        title="Retrieved texts",
        decks=decks,
        caption="Queries evenly spaced in the order of the data, with the first texts.",
    )


def _card(result: TextRetrievalResult, row: int) -> Card:
    own = int(result.pairs.text_of_N[row])
    nearest = result.nearest_NK[row].tolist()
    choices = [
        Choice(text=result.pairs.texts[text], score=None, right=text == own) for text in nearest
    ]
    return Card(
        title=f"Rank {result.rank_N[row]:,}, of TF-IDF {result.tfidf_rank_N[row]:,}",
        pictures=[],
        choices=choices,
        lines=[
            ("Query", result.pairs.reports[row].query),
            *([] if own in nearest else [("Its own", result.pairs.texts[own])]),
        ],
        tags=[],
    )


@register_evaluation("text-retrieval")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRetrieval(Evaluation):
    """Evaluate how a text encoder retrieves one section of a report by another, beside TF-IDF.

    A dual-encoder's vectors are those that it compares with images, other vectors those of the text
    encoder itself.
    """

    # No task of `medvl benchmark`: its columns compare systems on images and texts.
    protocols = (PROTOCOL,)
    lines = LineFields(needs=("rank", "tfidf_rank"))

    data: Path
    """folder of shards with reports, or a file of JSON lines (.jsonl, .jsonl.gz)"""
    query: str = "findings"
    """section, or field of the file, that is given"""
    target: str = "impression"
    """section, or field of the file, that is retrieved"""
    group: str | None = None
    """field of the file with the patient; default each line is another patient"""
    pool: Pool = "own"
    """vector of a text encoder: its own, or the mean of its tokens, for encoders that were trained
    on masked words alone. Dual-encoders have their own
    """
    examples: int = 6
    """queries of each kind on the page; 0 for a page without texts"""
    text: TextEncoderOptions = dataclasses.field(default_factory=TextEncoderOptions)
    """the text encoder"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the encoder."""
        name = "text_retrieval_random" if self.text.random_weights else "text_retrieval"
        return options.folder(self.text.checkpoint, name, hashed=not self.text.random_weights)

    def run(self, setup: Setup) -> Outcome:
        """Open the encoder and the reports, and evaluate."""
        assert isinstance(setup.options, RunOptions)
        checkpoint = self.text.checkpoint
        data: Any = self.data.name
        if self.data.is_file():
            pairs = Pairs.of(reports_of_file(self.data, self.query, self.target, self.group))
            inputs: dict[str, str | None] = {"manifest": sha256(self.data)}
        else:
            source = setup.source(self.data, *([] if checkpoint is None else [checkpoint]))
            pairs = Pairs.of(reports_of_shards(source, self.query, self.target))
            inputs, data = {"manifest": source.fingerprint}, source.manifest
        setup.settle(**inputs)
        trained = None if self.text.random_weights else checkpoint
        result_of = functools.partial(
            evaluate_text_retrieval,
            pairs=pairs,
            resamples=setup.resamples,
            config={"query": self.query, "target": self.target, "pool": self.pool},
            inputs={
                **inputs,
                "checkpoint": None if trained is None else checkpoint_sha256(trained),
            },
        )
        if trained is not None and issubclass(
            system(described_model(trained)["name"]), DualEncoder
        ):
            model = setup.model(trained)
            name = f"{model.name} ({trained})"
            with evaluating(model):
                result = result_of(lambda texts: _vectors(model, texts))
        else:
            encoder = self.text.evaluated_encoder(random=self.text.random_weights)
            name = encoder.name
            device = resolve_device(setup.options.device)
            result = result_of(embedder(encoder, device, self.pool, setup.options.batch))
        return Outcome(
            result=result,
            model=name,
            data=data,
            page=functools.partial(write_text_retrieval_page, result, examples=self.examples),
            table=format_table(result.results.rows),
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return recalls, median rank and MRR of the model."""
        rank_N = np.array([line["rank"] for line in lines])
        return rank_groups(rank_N, results.config["ks"], MODEL)


def _vectors(model: Any, texts: Sequence[str]) -> Tensor:
    """Return the vectors of a dual-encoder, without those of words."""
    return embed_texts(
        model, texts, lambda some: Embeddings(model.embed_texts(some).global_NE)
    ).global_NE
