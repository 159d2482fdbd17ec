"""`medvl eval class-retrieval`: options, and the page with precision at k of every class."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medvl.data.loading.sources import Subset
from medvl.data.shards.source import ShardSource
from medvl.eval.core.full_pass import Loader
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.predictions import LineFields, Lines, at_items, number
from medvl.eval.core.results import OutputFolder, PageHeader, Results, format_table
from medvl.eval.evaluation import Evaluation, Outcome, OutputOptions, Setup
from medvl.eval.html.page import Page, hashed, header_facts, headline, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.retrieval.by_class import (
    ClassRetrievalResult,
    class_retrieval,
    image_retrieval,
    precision_metrics,
)
from medvl.eval.retrieval.candidate_lists import RetrievalList
from medvl.models.dual_encoders.bases.base import DualEncoder

_LIMITS = (
    "A research evaluation, not for clinical use: a hit is an image or text with the same "
    "label; other content may "
    "differ.",
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
        headlines=[_headline(results, direction) for direction in directions],
        facts=header_facts(results, header, units="queries", extra=extra),
        sections=[_table(results, direction) for direction in directions],
        limits=_LIMITS,
        findings=list(results.details["chance"]),
    )
    return write_page(page, path)


def _headline(results: Results, direction: str) -> tuple[str, str, str]:
    metric = f"precision@{results.config['ks'][0]}"
    return headline(
        f"{metric}, {direction or 'image to image'}", results.row(metric, "macro", direction)
    )


def _table(results: Results, direction: str) -> Table:
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
        "intervals. The tick in a bar "
        "is chance, the expected value of a random order.",
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
            chosen = [place for place in range(len(opened)) if opened.key(place) in keys]
            source = Subset(opened, chosen)
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
                found = [lines[row]["precision"][str(k)] for row in rows_Q]
                values_QL = np.array(
                    [[number(of_query.get(name)) for name in names] for of_query in found]
                )
                groups.append(at_items(precision_metrics(k, values_QL, names, direction), rows_Q))
        return groups
