"""What the page of every classifier shows: tables, curves, subgroups, and the images it was surest about."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.errors import MedvlError
from medvl.eval.classification.scored_images import ClassificationResult
from medvl.eval.core.curves import calibration_bins, roc_curve
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.metrics import CALIBRATION_METRICS, DECISION_METRICS, ECE_BINS
from medvl.eval.core.results import format_value
from medvl.eval.html import plots
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import (
    Cell,
    Page,
    Picture,
    Pictures,
    Section,
    Strip,
    Table,
    metric_cell,
    png_uri,
    thumbnail_uri,
    write_page,
)

_log = logging.getLogger(__name__)

_MEANS = {"macro_competition": "Mean of the five competition findings", "macro": "Mean of all"}
_METRIC_NAMES: Mapping[str, str] = {
    "brier": "Brier",
    "ece": "Calibration error",
    "f1": "F1",
    "mcc": "MCC",
    "accuracy": "Accuracy",
    "balanced_accuracy": "Balanced accuracy",
    "sensitivity": "Sensitivity",
    "specificity": "Specificity",
}
_RULES: Mapping[str, str] = {"f1": "F1", "mcc": "MCC", "youden": "sensitivity + specificity"}
LIMITS = (
    "A research evaluation, not for clinical use: the numbers say how scores rank these images against these labels, "
    "not what a reader or a patient would gain.",
    "Intervals are percentiles of a bootstrap over the units named above. They hold the chance of the draw, "
    "not errors of the labels (which may come from reports), nor any difference between these patients and others.",
    "Images on this page belong to the data set and stay under its terms of use.",
)


def sections(
    result: ClassificationResult, pixels: Callable[[int], NDArray[np.uint8]] | None, examples: int
) -> list[Section]:
    """Findings, decisions, curves, subgroups and, with `pixels`, that many images of each kind for a finding."""
    found: list[Section] = [_findings_table(result), *_decisions(result), _plots(result), *_subgroups(result)]
    if pixels is not None:
        found.append(_gallery(result, pixels, examples))
    return found


def write_classification_page(
    result: ClassificationResult,
    path: str | Path,
    *,
    model: str,
    data: str,
    date: str | None = None,
    pixels: Callable[[int], NDArray[np.uint8]] | None = None,
    examples: int = 3,
) -> Path:
    """Write the page of a classifier as one HTML file; its path. The arguments are those of `write_zero_shot_page`."""
    page = Page(
        title=f"Classification: {model}",
        subtitle=subtitle(result, data),
        headlines=headlines(result),
        facts=facts(result, model=model, data=data, date=date),
        sections=sections(result, pixels, examples),
        limits=LIMITS,
    )
    return write_page(page, path)


def subtitle(result: ClassificationResult, data: str) -> str:
    """The data and how many images and patients of it were judged, for `Page.subtitle`."""
    return f"{data}, {len(result.images.samples):,} images of {len(set(result.images.patients)):,} patients"


def headlines(result: ClassificationResult) -> list[tuple[str, str, str]]:
    """The few numbers to remember, for `Page.headlines`."""
    rows = _rows(result)
    names = (
        ("auroc", "macro_competition", "AUROC, five competition findings"),
        ("auroc", "macro", f"AUROC, mean of {len(result.images.judgeable)} findings"),
        ("average_precision", "macro", "Average precision, mean"),
        ("top1_accuracy", "one class", "Top-1 accuracy, images of one class"),
    )
    return [headline(what, rows[metric, target, ""]) for metric, target, what in names if (metric, target, "") in rows]


def facts(
    result: ClassificationResult, *, model: str, data: str, date: str | None, own: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """What was evaluated, and how, for `Page.facts`: `own`, and what is told alike of every classifier."""
    config, details = result.results.config, result.results.details
    policy = ", ".join(
        f"{rule.replace('_', ' ')}: {choice.replace('_', ' ')}" for rule, choice in config["policy"].items()
    )
    thresholds = "none: no validation images were given"
    if result.thresholds is not None:
        thresholds = f"best {_RULES[config['threshold_rule']]} on validation images of other patients"
    left_out = sum(details["unreadable"].values())
    told = [
        *own,
        ("Label policy", policy),
        ("Thresholds", thresholds),
        ("Unreadable", f"{left_out} images" if left_out else "none: every image was scored"),
    ]
    if details["no_finding_contradictions"]:
        told.append(("Labels", f"{details['no_finding_contradictions']} images have No Finding beside a finding"))
    return header_facts(
        result.results, model=model, data=data, date=date, units=f"{config['bootstrap_unit']}s", extra=told
    )


def _rows(result: ClassificationResult) -> dict[tuple[str, str, str], MetricRow]:
    return {(row.metric, row.target, row.subgroup): row for row in result.results.rows}


def _targets(result: ClassificationResult, metric: str) -> dict[str, str]:
    """Target -> its label in a table, the means first."""
    rows = _rows(result)
    means = {target: label for target, label in _MEANS.items() if (metric, target, "") in rows}
    return {**means, **{name: name for name in result.images.names if (metric, name, "") in rows}}


def _findings_table(result: ClassificationResult) -> Table:
    rows, counts = _rows(result), result.results.details["labels"]
    targets = _targets(result, "auroc")
    lines: list[list[Cell | str]] = []
    for target, label in targets.items():
        auroc = rows["auroc", target, ""]
        share = auroc.n_positive / auroc.n if auroc.n_positive is not None and auroc.n else None
        sizes = ["", "", f"{auroc.n:,}", ""]
        if share is not None:
            sizes = [f"{auroc.n_positive:,}", f"{100 * share:.1f}%", f"{auroc.n:,}", f"{counts[target]['left_out']:,}"]
        precision = metric_cell(rows["average_precision", target, ""], reference=share, bar=True)
        lines.append([label, metric_cell(auroc, reference=0.5, bar=True), precision, *sizes])
    return Table(
        title="Findings",
        columns=["", "AUROC", "Average precision", "Positive", "Share", "Judged", "Left out"],
        rows=lines,
        strong_rows=sum(target in _MEANS for target in targets),
        caption="With 95% intervals. The tick in a bar is a score that knows nothing: 0.5 for AUROC, the share of "
        "positives for average precision. Left out: uncertain or missing labels, by the policy.",
    )


def _decisions(result: ClassificationResult) -> list[Table]:
    """Calibration and yes/no metrics, as far as the evaluation has them."""
    rows = _rows(result)
    metrics = [metric for metric in (*CALIBRATION_METRICS, *DECISION_METRICS) if (metric, "macro", "") in rows]
    if not metrics:
        return []
    thresholds = result.thresholds or {}
    decided = result.thresholds is not None
    lines: list[list[Cell | str]] = []
    for target, label in _targets(result, metrics[0]).items():
        threshold = thresholds.get(target, float("nan"))
        shown = [] if not decided else ["" if np.isnan(threshold) else f"{threshold:.3f}"]
        lines.append([label, *shown, *(metric_cell(rows.get((metric, target, ""))) for metric in metrics)])
    return [
        Table(
            title="Calibration and decisions" if decided else "Calibration",
            columns=["", *(["Threshold"] if decided else []), *(_METRIC_NAMES[metric] for metric in metrics)],
            rows=lines,
            strong_rows=1,
            caption=f"Calibration error over {ECE_BINS} bins of equal width."
            + (" Thresholds were chosen on validation images of other patients, never on these." if decided else ""),
        )
    ]


def _plots(result: ClassificationResult) -> Pictures:
    images, config = result.images, result.results.config
    rows, strips = _rows(result), []
    for index, name in enumerate(images.names):
        scores_N, labels_N = images.scores_NL[:, index], images.labels_NL[:, index]
        curve = roc_curve(scores_N, labels_N, resamples=config["resamples"], seed=config["seed"], groups=result.groups)
        if curve is None:
            continue
        threshold = (result.thresholds or {}).get(name)
        images_by_title = {
            "ROC curve": plots.roc_plot(curve),
            "scores": plots.score_plot(scores_N, labels_N, threshold),
        }
        if result.gives_probabilities:
            images_by_title["calibration"] = plots.calibration_plot(calibration_bins(scores_N, labels_N))
        pictures = [
            Picture(source=png_uri(png), alternative=f"{name}: {what}") for what, png in images_by_title.items()
        ]
        strips.append(Strip(title=name, note=f"AUROC {format_value(rows['auroc', name, ''])}", pictures=pictures))
    return Pictures(
        title="Curves",
        strips=strips,
        caption="ROC curve with its pointwise 95% band; scores of positive and of negative images, each histogram of "
        "area 1; share of positives in bins of about equally many images, with Wilson's 95% interval.",
    )


def _subgroups(result: ClassificationResult) -> list[Table]:
    rows = _rows(result)
    groups = list(dict.fromkeys(row.subgroup for row in result.results.rows if row.subgroup and row.metric == "auroc"))
    if not groups:
        return []
    lines: list[list[Cell | str]] = []
    for target, label in {"macro": "Mean", **{name: name for name in result.images.names}}.items():
        cells = [rows.get(("auroc", target, group)) for group in groups]
        if any(cells):
            lines.append([label, *(metric_cell(row) for row in cells)])
    return [
        Table(
            title="Subgroups",
            columns=["AUROC", *groups],
            rows=lines,
            strong_rows=int(any(("auroc", "macro", group) in rows for group in groups)),
            caption=f"A cell needs {result.results.config['smallest_subgroup']} positive and as many negative images. "
            "The mean of a group is over the findings that all groups beside it can be judged on.",
        ),
        *_gaps(result),
    ]


def _gaps(result: ClassificationResult) -> list[Table]:
    gaps = [row for row in result.results.rows if row.metric == "auroc_gap"]
    if not gaps:
        return []
    order = sorted(gaps, key=lambda row: row.target != "macro")
    lines: list[Sequence[Cell | str]] = [
        ["Mean" if row.target == "macro" else row.target, row.subgroup, metric_cell(row)] for row in order
    ]
    return [
        Table(
            title="Gaps between subgroups",
            columns=["", "Best - worst", "AUROC"],
            rows=lines,
            strong_rows=sum(row.target == "macro" for row in gaps),
            caption="The AUROC of the best group less that of the worst. The two are chosen on these images: with more "
            "than two groups the gap looks larger than it is. An interval below zero does not tell them apart.",
        )
    ]


def _gallery(result: ClassificationResult, pixels: Callable[[int], NDArray[np.uint8]], examples: int) -> Pictures:
    images, strips = result.images, []
    for index, name in enumerate(images.names):
        if name not in images.judgeable:
            continue
        scores_N, labels_N = images.scores_NL[:, index], images.labels_NL[:, index]
        order = np.argsort(-scores_N, kind="stable")
        positive, negative = order[labels_N[order] == 1], order[labels_N[order] == 0]
        kinds = {
            "scored highest, right": positive[:examples],
            "scored highest, wrong": negative[:examples],
            "scored lowest, wrong": positive[::-1][:examples],
        }
        for kind, chosen in kinds.items():
            pictures = [_thumbnail(result, int(place), index, pixels) for place in chosen]
            strips.append(Strip(title=name, note=kind, pictures=[picture for picture in pictures if picture]))
    return Pictures(
        title="Images",
        kind="thumbnails",
        strips=strips,
        caption="The images with the highest score among positives and among negatives, and with the lowest among "
        "positives: key (a hash), score, label.",
    )


def _thumbnail(
    result: ClassificationResult, place: int, label: int, pixels: Callable[[int], NDArray[np.uint8]]
) -> Picture | None:
    sample, images = result.images.samples[place], result.images
    try:
        image = pixels(images.positions[place])
    except (MedvlError, OSError):
        _log.warning("image %s cannot be shown: it could not be read again", sample.key)
        return None
    value = "positive" if images.labels_NL[place, label] == 1 else "negative"
    view = f", {sample.view}" if sample.view else ""
    lines = (f"{images.scores_NL[place, label]:.3f}, {value}", f"{sample.key[:16]}{view}")
    return Picture(source=thumbnail_uri(image), alternative=f"image {sample.key}", lines=lines)
