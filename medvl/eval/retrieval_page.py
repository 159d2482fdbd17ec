"""The page of a retrieval by class: precision at k of every class, in each direction, beside that of a random order."""

from collections.abc import Sequence
from pathlib import Path

from medvl.eval.page import Cell, Page, Table, metric_cell, write_page
from medvl.eval.results import Results, format_value

_LIMITS = (
    "A research evaluation, not for clinical use: a hit is an image or text with the same label, which says nothing of "
    "how much else the two have in common.",
    "Intervals hold the chance of the queries that were drawn; the candidates are those of the list or the folder.",
)


def write_class_retrieval_page(
    results: Results, path: str | Path, *, model: str, data: str, date: str | None = None
) -> Path:
    """Write the page as one HTML file; its path. `model` and `data` are what they are called in the header."""
    directions = list(dict.fromkeys(row.subgroup for row in results.rows))
    inputs = {name: value[:12] for name, value in results.inputs.items() if value}
    told = [
        ("Checkpoint", f"{model} (sha256 {inputs['checkpoint']})" if "checkpoint" in inputs else model),
        ("Data", f"{data} (sha256 {inputs['manifest']})" if "manifest" in inputs else data),
        ("Intervals", f"95%, {results.config['resamples']:,} resamples of queries, seed {results.config['seed']}"),
        ("Protocol", f"{results.protocol}, version {results.protocol_version}"),
    ]
    if "list" in inputs:
        told.insert(2, ("List", f"{results.config['list']} (sha256 {inputs['list']})"))
    page = Page(
        title=f"Retrieval by class: {model}",
        subtitle=data,
        headlines=[_headline(results, direction) for direction in directions],
        facts=[("Date", date), *told] if date else told,
        sections=[_table(results, direction) for direction in directions],
        limits=_LIMITS,
    )
    return write_page(page, path)


def _headline(results: Results, direction: str) -> tuple[str, str, str]:
    metric = f"precision@{results.config['ks'][0]}"
    number, _, interval = format_value(results.row(metric, "macro", direction)).partition(" ")
    return f"{metric}, {direction or 'image to image'}", number, interval


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
        caption="The share of a query's nearest candidates that have its class, with 95% intervals. The tick in a bar "
        "is a random order.",
    )
