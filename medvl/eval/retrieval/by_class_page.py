"""HTML page of a retrieval by class: precision at k of every class, in each direction, next to chance."""

from collections.abc import Sequence
from pathlib import Path

from medvl.eval.core.publish import PageHeader
from medvl.eval.core.results import Results
from medvl.eval.html.header import hashed, header_facts, headline
from medvl.eval.html.page import Page, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell

_LIMITS = (
    "A research evaluation, not for clinical use: a hit is an image or text with the same label; other content may "
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
    return headline(f"{metric}, {direction or 'image to image'}", results.row(metric, "macro", direction))


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
        caption="The share of a query's nearest candidates that have its class, with 95% intervals. The tick in a bar "
        "is chance, the expected value of a random order.",
    )
