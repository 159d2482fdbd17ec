"""Page of a linear probe: AUROC by fraction of the labels, and the sections of every classifier."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medvl.eval.classification.page import LIMITS, facts, sections, subtitle
from medvl.eval.core.publish import PageHeader
from medvl.eval.html.header import headline
from medvl.eval.html.page import Page, Pixels, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.probing.evaluate import ProbeResult, suffix


def write_probe_page(
    result: ProbeResult, path: str | Path, header: PageHeader, *, pixels: Pixels | None = None, examples: int = 3
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in `write_zero_shot_page`."""
    page = Page(
        title=f"Linear probe: {header.model}",
        subtitle=subtitle(result, header.data),
        headlines=[_headline(result, fraction) for fraction in result.fractions],
        facts=facts(result, header, extra=_probe_facts(result)),
        sections=[_by_fraction(result), *sections(result, pixels, examples)],
        limits=LIMITS,
        findings=result.images.names,
    )
    return write_page(page, path)


def _headline(result: ProbeResult, fraction: float) -> tuple[str, str, str]:
    row = result.results.row(f"auroc{suffix(fraction)}", "macro")
    return headline(f"AUROC, {100 * fraction:g}% of the labels", row)


def _probe_facts(result: ProbeResult) -> list[tuple[str, str]]:
    config, details = result.results.config, result.results.details
    penalties = ", ".join(f"{value:g}" for value in config["penalties"])
    runs = f"{config['seeds']} per fraction below 100%, nested samples of patients"
    return [
        ("Probe", f"logistic regression on {details['feature_dim']:,} standardised features"),
        ("Penalty", f"selected from {penalties} on validation images"),
        ("Runs", f"{len(details['runs'])}: {runs}"),
        *([("Encoder", details["note"])] if "note" in details else []),
    ]


def _by_fraction(result: ProbeResult) -> Table:
    rows = {(row.metric, row.target): row for row in result.results.rows if not row.subgroup}
    means = {"macro_competition": "Mean of the five competition findings", "macro": "Mean of all"}
    means = {target: label for target, label in means.items() if (f"auroc{suffix(1)}", target) in rows} or {
        "macro": "Mean of all"
    }
    lines: list[Sequence[Cell | str]] = []
    for target, label in {**means, **{name: name for name in result.images.names}}.items():
        cells: list[Cell | str] = [label]
        for fraction in result.fractions:
            cells.append(metric_cell(rows.get((f"auroc{suffix(fraction)}", target)), reference=0.5, bar=True))
            deviation = rows.get((f"auroc_sd{suffix(fraction)}", target))
            cells.append("" if deviation is None or np.isnan(deviation.value) else f"{deviation.value:.3f}")
        lines.append(cells)
    columns = [name for fraction in result.fractions for name in (f"AUROC, {100 * fraction:g}%", "SD over runs")]
    return Table(
        title="Summary by fraction of the labels",
        columns=["", *columns],
        rows=lines,
        strong_rows=len(means),
        one_axis=True,
        caption="Mean over the runs of a fraction with 95% interval over test patients, and standard deviation (SD) "
        "over the runs. The sections below show the first run of the largest fraction.",
    )
