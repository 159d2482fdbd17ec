"""Page of the robustness tests: a summary, a table of each test, and the images under every
corruption.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.eval.classification.page import LIMITS
from medvl.eval.classification.scored_images import notes_on_means
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import PageHeader
from medvl.eval.html.page import (
    Page,
    Picture,
    Pictures,
    Pixels,
    Section,
    Strip,
    header_facts,
    headline,
    thumbnail_uri,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.robustness.assemble import ALL, DATA
from medvl.eval.robustness.evaluate import RobustnessResult
from medvl.eval.robustness.image_versions import STRENGTHS, Version

_LIMITS = (
    *LIMITS,
    "The corruptions are computed: a model that is robust to them may still fail on the images "
    "of another device.",
)
_TRACKS = {"auroc": ("AUROC", "macro"), "above_other": ("Own text above another patient's", "all")}
_ATTRIBUTES = ("view", "projection", "sex", "age", "site")


def write_robustness_page(
    result: RobustnessResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    examples: int = 1,
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_robustness`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        pixels: function from the position of an image to its pixels; None for no images.
        examples: images that are shown under every corruption, evenly spaced in the order of the
            data.
    """
    rows = _Rows(result.results.rows)
    details = result.results.details
    sections: list[Section] = [_summary(rows)]
    sections += [
        table for metric in _TRACKS if (table := _corruptions(rows, metric, result)) is not None
    ]
    sections += [
        table
        for make in (_prompts, _findings, _subgroups, _others)
        if (table := make(rows, result)) is not None
    ]
    if pixels is not None and "corruptions" not in details["left_out"]:
        sections += _pictures(result, pixels, examples)
    left_out = [(f"Without {name}", reason) for name, reason in details["left_out"].items()]
    if details["not_scored"]:
        left_out.append(
            ("Labels without sentences in every prompt set", ", ".join(details["not_scored"]))
        )
    left_out += [("Means", note) for note in notes_on_means(details)]
    page = Page(
        title=f"Robustness: {header.model}",
        subtitle=f"{header.data}: {details['images']:,} images of {details['patients']:,} patients",
        headlines=[headline(title, row) for title, row, _ in _summary_rows(rows)][:6],
        facts=header_facts(result.results, header, units="patients", extra=left_out),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


class _Rows:
    """Rows by (metric, target, subgroup)."""

    def __init__(self, rows: Sequence[MetricRow]) -> None:
        self.rows = rows
        self._by_name = {(row.metric, row.target, row.subgroup): row for row in rows}

    def find(self, metric: str, target: str, subgroup: str = "") -> MetricRow | None:
        """Return a row, None if there is none."""
        return self._by_name.get((metric, target, subgroup))

    def of(self, metric: str, target: str, kind: str) -> list[MetricRow]:
        """Return the rows whose subgroup is of a kind, such as "sex: F"."""
        return [row for row in self.rows if (row.metric, row.target) == (metric, target)
                and row.subgroup.startswith(f"{kind}: ")]  # fmt: skip


def _summary_rows(rows: _Rows) -> Iterator[tuple[str, MetricRow, float | None]]:
    """Yield title, row and chance or ideal of every test that was made."""
    fixed: list[tuple[str, tuple[str, str, str], float | None]] = [
        ("AUROC of clean images", ("auroc", "macro", ""), 0.5),
        ("Change of AUROC, mean of all corruptions", ("auroc_change", "macro", ALL), 0.0),
        ("Own text above another patient's", ("above_other", "all", ""), 0.5),
        ("Its change, mean of all corruptions", ("above_other_change", "all", ALL), 0.0),
        ("Right about a statement and its denial", ("negation", "macro", ""), 0.5),
        ("Own text above its mirror", ("above_mirror", "all", ""), 0.5),
        ("Calibration error", ("ece", "macro", ""), 0.0),
        ("Calibration error after Platt scaling", ("ece", "macro", "calibrated"), 0.0),
    ]
    for title, name, reference in fixed:
        row = rows.find(*name)
        if row is not None and row.n:
            yield title, row, reference
    for kind in ("prompts", "paraphrases"):
        yield from (
            (f"Gap between {kind}", row, 0.0) for row in rows.of("auroc_gap", "macro", kind)
        )
    for attribute in _ATTRIBUTES:
        yield from (
            (f"Gap by {attribute}", row, 0.0) for row in rows.of("auroc_gap", "macro", attribute)
        )
    for row in rows.rows:
        if row.metric == "ood_auroc":
            yield f"Confidence above that of {row.subgroup}", row, 0.5


def _summary(rows: _Rows) -> Table:
    return Table(
        title="Summary",
        columns=["", "Value", "Items"],
        rows=[
            [title, metric_cell(row, reference=reference, bar=True), f"{row.n:,}"]
            for title, row, reference in _summary_rows(rows)
        ],
        caption="The tick is chance or, for changes, gaps and errors, no change. A gap is the "
        "best minus the worst "
        "group (named below), chosen on these images; an interval that reaches below zero does "
        "not show a difference.",
    )


def _corruptions(rows: _Rows, metric: str, result: RobustnessResult) -> Table | None:
    title, target = _TRACKS[metric]
    names = list(dict.fromkeys(version.name for version in result.scores.versions))
    if not names or rows.find(metric, target, ALL) is None:
        return None
    strengths = range(1, STRENGTHS + 1)
    body: list[list[Cell | str]] = []
    for name in [ALL, *names]:
        single = [
            metric_cell(rows.find(metric, target, f"{name} {strength}")) for strength in strengths
        ]
        change = metric_cell(rows.find(f"{metric}_change", target, name), reference=0.0, bar=True)
        body.append(
            [name.capitalize(), change, metric_cell(rows.find(metric, target, name)), *single]
        )
    return Table(
        title=f"Corruptions: {title}",
        columns=[
            "",
            "Change from clean",
            "Mean",
            *(f"Strength {strength}" for strength in strengths),
        ],
        rows=body,
        caption="Paired with the clean images: both are resampled together.",
        strong_rows=1,
    )


def _prompts(rows: _Rows, result: RobustnessResult) -> Table | None:
    found = [*rows.of("auroc", "macro", "prompts"), *rows.of("auroc", "macro", "paraphrases")]
    if not found:
        return None
    spread = [
        row for kind in ("prompts", "paraphrases") for row in rows.of("auroc_sd", "macro", kind)
    ]
    noted = ", ".join(
        f"{row.value:.3f} over the {row.subgroup.replace(': ', ' (')})" for row in spread
    )
    return Table(
        title="Prompts",
        columns=["", "AUROC"],
        rows=[[row.subgroup, metric_cell(row, bar=True)] for row in found],
        caption=f"Mean AUROC of the findings. Standard deviation: {noted}." if noted else "",
    )


def _findings(rows: _Rows, result: RobustnessResult) -> Table | None:
    metrics = {
        "auroc": "AUROC",
        "negation": "Statement or denial",
        "ece": "Calibration error",
        "brier": "Brier",
    }
    named = list(
        dict.fromkeys(
            row.target
            for row in rows.rows
            if row.metric in ("auroc", "negation") and not row.subgroup
        )
    )
    shown = [metric for metric in metrics if any(rows.find(metric, name) for name in named)]
    if not named:
        return None
    body: list[list[Cell | str]] = []
    for name in sorted(named, key=lambda name: name != "macro"):
        count = next(
            row for metric in shown if (row := rows.find(metric, name)) is not None
        ).n_positive
        cells = [
            metric_cell(
                rows.find(metric, name),
                reference=0.5 if metric in ("auroc", "negation") else None,
                bar=True,
            )
            for metric in shown
        ]
        body.append(
            ["Mean" if name == "macro" else name, *cells, "" if count is None else f"{count:,}"]
        )
    sides = [rows.find(metric, "macro") for metric in ("negation_present", "negation_absent")]
    caption = "".join(
        f"{title} {row.value:.3f}. "
        for title, row in zip(("Images of a finding that prefer the statement:",
        "Images without it that prefer the "
                               "denial:"), sides, strict=True) if row is not None
    )  # fmt: skip
    return Table(
        title="Findings", columns=["", *(metrics[metric] for metric in shown), "Positive"],
        rows=body, caption=caption.strip(), strong_rows=1,
    )  # fmt: skip


def _subgroups(rows: _Rows, result: RobustnessResult) -> Table | None:
    body: list[list[Cell | str]] = []
    for attribute in _ATTRIBUTES:
        gap = next(iter(rows.of("auroc_gap", "macro", attribute)), None)
        groups = rows.of("auroc", "macro", attribute)
        body += [[row.subgroup, metric_cell(row, bar=True), f"{row.n:,}"] for row in groups]
        if gap is not None:
            body.append(
                [f"{attribute}, gap: {gap.subgroup.partition(': ')[2]}", metric_cell(gap), ""]
            )
    if not body:
        return None
    caption = "Mean AUROC over the findings that every group of the attribute has enough images of."
    if result.scores.sites:
        caption += f" Sites: {DATA!r} are the evaluated ones."
    return Table(
        title="Subgroups and sites", columns=["", "AUROC", "Images"], rows=body, caption=caption
    )


def _others(rows: _Rows, result: RobustnessResult) -> Table | None:
    names = [row.subgroup for row in rows.rows if row.metric == "ood_auroc"]
    body: list[list[Cell | str]] = [
        ["clean", "–", metric_cell(rows.find("confidence", "all", "clean"), bar=True)]
    ]
    for name in names:
        cells = [rows.find(metric, "all", name) for metric in ("ood_auroc", "confidence")]
        body.append(
            [name, metric_cell(cells[0], reference=0.5, bar=True), metric_cell(cells[1], bar=True)]
        )
    return Table(
        title="Images that are not chest radiographs",
        columns=["", "More confident about these data", "Mean confidence"],
        rows=body,
        caption=f"Confidence: {result.scores.scorer.confidence_is}. At 0.5 it does not separate "
        f"the images; below "
        "0.5 the model is more confident about the other images.",
    )


def _pictures(result: RobustnessResult, pixels: Pixels, examples: int) -> Iterator[Pictures]:
    clean = result.scores.clean
    seed = result.results.config["seed"]
    names = dict.fromkeys(version.name for version in result.scores.versions)
    for number in range(examples):
        at = number * len(clean.keys) // examples
        image = pixels(clean.positions[at])
        key = clean.keys[at]
        strips = [Strip(title="Clean", pictures=[_picture(image, "clean image")])]
        for name in names:
            versions = [Version(name, strength) for strength in range(1, STRENGTHS + 1)]
            pictures = [
                _picture(one.apply(image, key, seed), f"image under {one}") for one in versions
            ]
            strips.append(
                Strip(title=name.capitalize(), pictures=pictures, note="strengths 1 to 5")
            )
        made_up = [
            _picture(Version(name).apply(image, key, seed), name, name)
            for name in result.scores.made_up
        ]
        if made_up:
            strips.append(Strip(title="Made up", pictures=made_up))
        yield Pictures(
            title=f"Versions of an image{f' ({number + 1})' if examples > 1 else ''}",
            strips=strips,
            kind="thumbnails",
        )


def _picture(image: NDArray[np.uint8], alternative: str, *lines: str) -> Picture:
    return Picture(source=thumbnail_uri(image, 192), alternative=alternative, lines=lines)
