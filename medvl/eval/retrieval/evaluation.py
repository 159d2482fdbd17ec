"""HTML page of an image-text retrieval: metrics next to chance, example queries, similarities
and embeddings.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.data.loading.sources import Subset
from medvl.data.shards.source import ShardSource
from medvl.eval.core.full_pass import Loader, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.metrics import Array
from medvl.eval.core.open import SLICES, OutputOptions, Setup, shown_pixels, unsupported_model
from medvl.eval.core.results import (
    LineFields,
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    WritePage,
    at_items,
    format_table,
    number,
)
from medvl.eval.evaluation import Column, Evaluation, ModelEvaluation, Outcome, Task, Trial
from medvl.eval.html import page as html, plots, tables
from medvl.eval.html.page import Page, hashed, header_facts, headline, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.retrieval import image_text, rerank
from medvl.eval.retrieval.by_class import (
    ClassRetrievalResult,
    class_retrieval,
    image_retrieval,
    precision_metrics,
)
from medvl.eval.retrieval.candidate_lists import RetrievalList
from medvl.eval.retrieval.image_text import NearestCandidates, RetrievalExamples, RetrievalResult
from medvl.eval.retrieval.rerank import ShortlistModel
from medvl.models.base import System
from medvl.models.downstream.ranking import as_matcher
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.fusion_encoders.bases.base import FusionModel

_DIRECTIONS = {"image_to_text": "Image to text", "text_to_image": "Text to image"}
_FINDINGS = 2
_MIN_IMAGES = 5  # minimum number of images with, and without, a finding that colors the embeddings
LIMITS = (
    "A research evaluation, not for clinical use: a retrieved text may have the same meaning as "
    "the image's own text in other words, and is still counted as wrong.",
    "Intervals are percentiles of a bootstrap over patients, with all their images or texts. "
    "Recall falls as the gallery grows: compare numbers over one gallery only.",
    "Images and texts on this page belong to the data set and stay under its terms of use.",
)


def write_retrieval_page(
    result: RetrievalResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Callable[[str], NDArray[np.uint8]] | None = None,
    labels: Callable[[str], Mapping[str, int]] | None = None,
) -> Path:
    """Write the page as one HTML file and return its path; other arguments as in
    `write_zero_shot_page`.

    Args:
        result: result of `image_text_retrieval`; its examples are shown, if there are any.
        pixels: key -> image; None for a page without images.
        labels: key -> labels, which color the embeddings.
    """
    details = result.results.details
    sections: list[html.Section] = [_table(result)]
    if result.examples is not None:
        sections.append(_plots(result, result.examples, labels))
        if pixels is not None:
            sections += [
                _image_cards(result, result.examples, pixels),
                _text_strips(result, result.examples, pixels),
            ]
    extra = [("Equal texts", "one text, with several images")]
    page = html.Page(
        title=f"Image-text retrieval: {header.model}",
        subtitle=f"{header.data}: {details['images']:,} images and {details['texts']:,} "
        f"distinct texts",
        headlines=[_headline(result, direction) for direction in _DIRECTIONS],
        facts=header_facts(result.results, header, units="patients", extra=extra),
        sections=sections,
        limits=LIMITS,
    )
    return html.write_page(page, path)


def _middle_metric(result: RetrievalResult) -> str:
    ks = sorted(result.results.config["ks"])
    return f"recall@{ks[len(ks) // 2]}"


def _headline(result: RetrievalResult, direction: str) -> tuple[str, str, str]:
    metric = _middle_metric(result)
    return headline(
        f"{metric}, {_DIRECTIONS[direction].lower()}", result.results.row(metric, direction)
    )


def _table(result: RetrievalResult) -> tables.Table:
    chance: Mapping[str, float] = result.results.details["chance"]
    recalls = [f"recall@{k}" for k in result.results.config["ks"]]
    gains = list(
        dict.fromkeys(row.metric for row in result.results.rows if row.metric.startswith("ndcg@"))
    )
    lines: list[Sequence[tables.Cell | str]] = []
    for direction, title in _DIRECTIONS.items():
        rows = {row.metric: row for row in result.results.rows if row.target == direction}
        cells = [
            tables.metric_cell(rows[each], reference=chance[f"{each}/{direction}"], bar=True)
            for each in (*recalls, *gains)
        ]
        ranks = [tables.metric_cell(rows[each]) for each in ("mrr", "median_rank")]
        lines.append([title, *cells, *ranks, f"{rows['median_rank'].n:,}"])
    lines.append(_baseline_line(result, recalls, len(gains)))
    return tables.Table(
        title="Summary: recall",
        columns=[
            "",
            *(metric.capitalize() for metric in recalls),
            *(gain.replace("ndcg", "nDCG") for gain in gains),
            "MRR",
            "Median rank",
            "Queries",
        ],
        rows=lines,
        caption="The share of queries whose own text, or image, is among the first k, with 95% "
        "intervals. The tick in a bar is chance, the expected value of a random order. nDCG is the "
        "gain of the first k by the agreement of labels; MRR is the mean of 1 / rank.",
    )


def _baseline_line(
    result: RetrievalResult, recalls: Sequence[str], gains: int
) -> list[tables.Cell | str]:
    """Return the line of the baseline that names the commonest texts for every image."""
    rows = {
        row.metric: row for row in result.results.rows if row.target == image_text.COMMONEST_TEXTS
    }
    return [
        "The commonest texts for every image",
        *(tables.metric_cell(rows[each], bar=True) for each in recalls),
        *[""] * gains,
        *(tables.metric_cell(rows[each]) for each in ("mrr", "median_rank")),
        f"{rows['median_rank'].n:,}",
    ]


def _plots(
    result: RetrievalResult,
    examples: RetrievalExamples,
    labels: Callable[[str], Mapping[str, int]] | None,
) -> html.Pictures:
    count = len(examples.similarity_KK)
    own = np.diag(examples.similarity_KK)
    others = float((examples.similarity_KK.sum() - own.sum()) / max(count * (count - 1), 1))
    matrix = html.plot_picture(
        plots.matrix_plot("similarities", examples.similarity_KK, "text", "image"),
        alternative=f"Matrix of the similarities of {count} images (rows) with {count} texts "
        f"(columns): "
        f"{own.mean():.2f} on average with the own text, on the diagonal, and {others:.2f} with "
        f"others.",
        lines=["Similarities", f"{count} random images, each with its own text on the diagonal"],
    )
    sides = {"images": examples.image_N2, "texts": examples.text_M2}
    colors = {"images": plots.LINE_COLOR, "texts": plots.POSITIVE_COLOR}
    pictures = [matrix, _plane("Images and texts", sides, colors, examples)]
    for name, positive_N in _finding_colors(result, examples, labels):
        sides = {
            "without": examples.image_N2[positive_N == 0],
            "with": examples.image_N2[positive_N == 1],
        }
        colors = {"without": plots.NEGATIVE_COLOR, "with": plots.POSITIVE_COLOR}
        pictures.append(_plane(name, sides, colors, examples))
    return html.Pictures(
        title="Similarities and embeddings",
        strips=[html.Strip(title="", pictures=pictures)],
        caption="First two principal components of image and text embeddings together (PCA). "
        "Images and texts are often in separate regions (the modality gap), and retrieval compares "
        "them across the gap.",
    )


def _plane(
    name: str, sides: Mapping[str, Array], colors: Mapping[str, str], examples: RetrievalExamples
) -> html.Picture:
    axes = tuple(
        f"component {n} ({share:.0%})" for n, share in enumerate(examples.explained_variance, 1)
    )
    centers = ", ".join(
        f"{side} {len(points)} points around ({points[:, 0].mean():.2f}, {points[:, 1].mean():.2f})"
        for side, points in sides.items()
        if len(points)
    )
    return html.plot_picture(
        plots.points_plot(f"embeddings-{html.slug(name)}", sides, colors, axes),
        alternative=f"Embeddings in the plane of their first two principal components, by "
        f"{name.lower()}: {centers}.",
        lines=[name],
    )


def _finding_colors(
    result: RetrievalResult,
    examples: RetrievalExamples,
    labels: Callable[[str], Mapping[str, int]] | None,
) -> list[tuple[str, NDArray[np.int64]]]:
    """Return the findings that split the plotted images most evenly, with 1 for each positive
    image.
    """
    if labels is None:
        return []
    known = [labels(result.keys[index]) for index in examples.plotted_N.tolist()]
    names = sorted({name for row in known for name in row})
    columns = [(name, np.array([int(row.get(name) == 1) for row in known])) for name in names]
    smaller = {name: min(int(values.sum()), int((1 - values).sum())) for name, values in columns}
    order = sorted(columns, key=lambda column: (-smaller[column[0]], column[0]))
    return [column for column in order if smaller[column[0]] >= _MIN_IMAGES][:_FINDINGS]


def _image_cards(
    result: RetrievalResult, examples: RetrievalExamples, pixels: Callable[[str], NDArray[np.uint8]]
) -> html.Cards:
    # most similarities are cosines; those of GLoRIA can exceed 1
    full = max(1.0, *(value for query in examples.image_queries for value in query.similarities))

    def card(query: NearestCandidates) -> html.Card:
        own = int(examples.text_of_N[query.query])
        rank = int(result.image_rank_N[query.query])
        choices = [
            html.Choice(text=examples.texts[text], score=value, right=text == own, full=full)
            for text, value in zip(query.candidates, query.similarities, strict=True)
        ]
        picture = html.Picture(
            source=html.thumbnail_uri(pixels(result.keys[query.query]), 256),
            alternative=f"query image, whose own text is {_ordinal(rank)} of "
            f"{len(examples.texts):,}",
        )
        return html.Card(
            title=f"Its own text is {_ordinal(rank)} of {len(examples.texts):,}",
            pictures=[picture],
            choices=choices,
            lines=[] if own in query.candidates else [("Its own", examples.texts[own])],
            tags=[],
        )

    hits = [
        int(examples.text_of_N[query.query]) in query.candidates for query in examples.image_queries
    ]
    decks = [
        html.Deck(
            title=title,
            good=good,
            cards=[
                card(query)
                for query, hit in zip(examples.image_queries, hits, strict=True)
                if hit == good
            ],
        )
        for title, good in (
            ("Own text among the first", True),
            ("Own text not among the first", False),
        )
    ]
    return html.Cards(
        title="Texts retrieved by images",
        decks=[deck for deck in decks if deck.cards],
        caption="Random images, with the nearest texts of the gallery and their similarities.",
    )


def _text_strips(
    result: RetrievalResult, examples: RetrievalExamples, pixels: Callable[[str], NDArray[np.uint8]]
) -> html.Pictures:
    def picture(image: int, similarity: float, text: int) -> html.Picture:
        own = "✓ its own" if int(examples.text_of_N[image]) == text else "of another text"
        source = html.thumbnail_uri(pixels(result.keys[image]))
        return html.Picture(
            source=source,
            alternative=f"retrieved image, {own}, similarity {similarity:.2f}",
            lines=[own, f"{similarity:.2f}"],
        )

    strips = [
        html.Strip(
            title=examples.texts[query.query],
            note=f"own image {_ordinal(int(result.text_rank_M[query.query]))} of "
            f"{len(examples.text_of_N):,}",
            pictures=[
                picture(image, similarity, query.query)
                for image, similarity in zip(query.candidates, query.similarities, strict=True)
            ],
        )
        for query in examples.text_queries
    ]
    return html.Pictures(
        title="Images retrieved by texts",
        kind="thumbnails",
        strips=strips,
        caption="Random texts, with the nearest images of the gallery and their similarities.",
    )


def _ordinal(number: int) -> str:
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number:,}{ending}"


_KS = (1, 5, 10)
_KS_OF_VOLUMES = (5, 10, 50, 100)
_EXAMPLES = 6
"""Queries of each direction on the page."""


@register_evaluation("retrieval")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval(ModelEvaluation):
    """Evaluate image-text retrieval in both directions; equal texts are positives of each other."""

    protocols = (image_text.PROTOCOL, rerank.PROTOCOL)
    lines = LineFields(earlier_group="text", needs=("text_rank",))
    fits = (DualEncoder,)
    advice = "give the checkpoint of a dual-encoder, and --rerank"
    divides_batches = True
    tasks = (
        Task(
            fits=DualEncoder,
            columns=(
                Column(title="R@10 image to text", metric="recall@10", targets=("image_to_text",)),
                Column(title="R@10 text to image", metric="recall@10", targets=("text_to_image",)),
                Column(
                    title="R@10 of the commonest texts",
                    metric="recall@10",
                    targets=(image_text.COMMONEST_TEXTS,),
                    baseline=True,
                ),
            ),
        ),
        Task(
            name="reranking",
            fits=FusionModel,
            columns=(
                Column(title="R@1 image to text", metric="recall@1", targets=("image_to_text",)),
                Column(title="R@1 text to image", metric="recall@1", targets=("text_to_image",)),
            ),
        ),
    )

    rerank: Path | None = None
    """checkpoint of a fusion-encoder, or of recipes/retrieval_finetune.py on one, that re-ranks the
    shortlists of the dual-encoder; the same folder if the model is both
    """
    shortlist: int = 256
    """candidates per query that are re-ranked"""
    sections: tuple[str, ...] = ()
    """sections of the text; default the whole text"""
    ks: tuple[int, ...] = ()
    """ranks of the recalls; default 1 5 10, and 5 10 50 100 of volumes"""
    slices: int = SLICES
    """axial slices of each volume that a model of images reads; their vectors are averaged"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the fusion-encoder, if there is one."""
        return options.folder(self.rerank or self.checkpoint, self.folder_name)

    def evaluate(self, model: DualEncoder, source: ShardSource, setup: Setup) -> RetrievalResult:
        """Return the recalls and ranks."""
        loader = setup.loader(source, model, sections=self.sections, slices=self.slices)
        if self.rerank is None:
            of_volumes = _KS_OF_VOLUMES if source.has_volumes else _KS
            return image_text.image_text_retrieval(
                model,
                loader,
                ks=self.ks or of_volumes,
                resamples=setup.resamples,
                checkpoint=self.checkpoint,
                examples=_EXAMPLES,
            )
        shortlist_model = None
        fusion: System = model
        if self.rerank.resolve() != self.checkpoint.resolve():
            shortlist_model = ShortlistModel(model, loader, self.checkpoint)
            source = setup.source(self.data, self.rerank)
            fusion = setup.model(self.rerank, field="rerank")
            loader = setup.loader(source, fusion, sections=self.sections)
        fusion = as_matcher(fusion)
        if not isinstance(fusion, FusionModel):
            advice = "give the checkpoint of a fusion-encoder"
            raise unsupported_model(self.rerank, fusion, advice, field="rerank")
        return rerank.reranked_retrieval(
            fusion,
            loader,
            shortlist=self.shortlist,
            shortlist_model=shortlist_model,
            resamples=setup.resamples,
            checkpoint=self.rerank,
        )

    def page(self, result: RetrievalResult, source: ShardSource) -> WritePage | None:
        """Return the writer of the page; None where the result has no examples."""
        if result.examples is None:
            return None
        samples = samples_by_key(source)
        shown = shown_pixels(source)
        return functools.partial(
            write_retrieval_page,
            result,
            pixels=lambda key: shown(samples[key][0]),
            labels=lambda key: samples[key][1].labels,
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metrics of images, and of the texts of these images, each drawn with its first
        image.
        """
        _, first_M = np.unique([line["text"] for line in lines], return_index=True)
        image_rank_N, text_rank_N = (
            np.array([int(line[field]) for line in lines]) for field in ("rank", "text_rank")
        )
        ks: list[int] = results.config["ks"]
        of_texts = image_text.rank_groups(text_rank_N[first_M], ks, "text_to_image")
        return [
            *image_text.rank_groups(image_rank_N, ks, "image_to_text"),
            *(at_items(group, first_M) for group in of_texts),
        ]

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Retrieval":
        """Return the evaluation of a dual-encoder, or of a fusion-encoder on the shortlists of the
        benchmark's dual-encoder.
        """
        if task.name != "reranking":
            return cls(checkpoint=trial.checkpoint, data=trial.data)
        settings = trial.settings
        return cls(
            checkpoint=trial.other(settings.shortlist_system),
            rerank=trial.checkpoint,
            data=trial.data,
            shortlist=settings.shortlist,
            sections=settings.sections,
        )


# `medvl eval class-retrieval`: options, and the page with precision at k of every class.

_LIMITS = (
    "A research evaluation, not for clinical use: a hit is an image or text with the same "
    "label; other content may differ.",
    "Intervals include the sampling error of the queries; the candidates are fixed.",
)


def write_class_retrieval_page(results: Results, path: str | Path, header: PageHeader) -> Path:
    """Write the page as one HTML file and return its path; `header` has the display names."""
    directions = list(dict.fromkeys(row.subgroup for row in results.rows))
    list_hash = results.inputs.get("list")
    extra = [("List", hashed(results.config["list"], list_hash))] if list_hash else []
    page = Page(
        title=f"Retrieval by class: {header.model}",
        subtitle=header.data,
        headlines=[_class_headline(results, direction) for direction in directions],
        facts=header_facts(results, header, units="queries", extra=extra),
        sections=[_class_table(results, direction) for direction in directions],
        limits=_LIMITS,
        findings=list(results.details["chance"]),
    )
    return write_page(page, path)


def _class_headline(results: Results, direction: str) -> tuple[str, str, str]:
    metric = f"precision@{results.config['ks'][0]}"
    return headline(
        f"{metric}, {direction or 'image to image'}", results.row(metric, "macro", direction)
    )


def _class_table(results: Results, direction: str) -> Table:
    rows = {(row.metric, row.target): row for row in results.rows if row.subgroup == direction}
    chance = results.details["chance"]
    metrics = [f"precision@{k}" for k in results.config["ks"]]
    targets = {"macro": sum(chance.values()) / len(chance), **chance}
    lines: list[Sequence[Cell | str]] = [
        [
            "Mean" if target == "macro" else target,
            *(metric_cell(rows[metric, target], reference=share, bar=True) for metric in metrics),
            f"{rows[metrics[0], target].n:,}",
            f"{share:.3f}",
        ]
        for target, share in targets.items()
    ]
    return Table(
        title=(direction or "image to image").capitalize(),
        columns=["", *(metric.capitalize() for metric in metrics), "Queries", "Chance"],
        rows=lines,
        strong_rows=1,
        one_axis=True,
        caption="The share of a query's nearest candidates that have its class, with 95% "
        "intervals. The tick in a bar is chance, the expected value of a random order.",
    )


@register_evaluation("class-retrieval")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassRetrieval(Evaluation):
    """Evaluate precision at k of the images or texts nearest to a query, by labels or over a fixed
    candidate list.

    The checkpoint is a dual-encoder; the shards have labels. Default folders are
    eval/class_retrieval with a list and eval/image_retrieval without.
    """

    protocols = ("class_retrieval", "image_retrieval")
    lines = LineFields(item=("direction", "patient", "query"))

    checkpoint: Path
    """folder of a checkpoint of a dual-encoder, such as runs/convirt/best"""
    data: Path
    """folder of shards with labels, of patients that the model was not trained on"""
    candidates: Path | None = None
    """candidates and queries from `medvl eval make-retrieval-list`, such as CheXpert 8x200; default
    every image against the images of all other patients
    """
    ks: tuple[int, ...] = (5, 10, 50)
    """numbers of nearest candidates"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the checkpoint, by the kind of the candidates."""
        task = "image_retrieval" if self.candidates is None else "class_retrieval"
        return options.folder(self.checkpoint, task)

    def run(self, setup: Setup) -> Outcome:
        """Open the list, the shards and the checkpoint, and evaluate."""
        fixed = None if self.candidates is None else RetrievalList.read(self.candidates)
        opened = setup.source(self.data, self.checkpoint)
        source: ShardSource | Subset = opened
        if fixed is not None:  # a folder may hold a hundred times as many images as the list
            keys = fixed.keys
            places = [place for place in range(len(opened)) if opened.key(place) in keys]
            source = Subset(opened, places)
        setup.settle(manifest=source.fingerprint)
        advice = "give the checkpoint of a dual-encoder"
        model: DualEncoder = setup.model(self.checkpoint, (DualEncoder,), advice)
        result = self._evaluate(model, setup.loader(source, model), fixed, setup.resamples)
        return Outcome(
            result=result,
            model=f"{model.name} ({self.checkpoint})",
            data=opened.manifest,
            page=functools.partial(write_class_retrieval_page, result.results),
            table=format_table(result.results.rows),
        )

    def _evaluate(
        self, model: DualEncoder, loader: Loader, fixed: RetrievalList | None, resamples: int
    ) -> ClassRetrievalResult:
        if fixed is None:
            return image_retrieval(
                model, loader, ks=self.ks, resamples=resamples, checkpoint=self.checkpoint
            )
        return class_retrieval(
            model, loader, fixed, ks=self.ks, resamples=resamples, checkpoint=self.checkpoint
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the precision at each k of the classes, in each direction."""
        names = list(results.details["chance"])
        groups = []
        for direction in dict.fromkeys(line["direction"] for line in lines):
            rows_Q = np.array(
                [row for row, line in enumerate(lines) if line["direction"] == direction]
            )
            for k in results.config["ks"]:
                precisions = [lines[row]["precision"][str(k)] for row in rows_Q]
                values_QL = np.array(
                    [[number(of_query.get(name)) for name in names] for of_query in precisions]
                )
                groups.append(at_items(precision_metrics(k, values_QL, names, direction), rows_Q))
        return groups
