"""Page of a classifier: tables, curves, subgroups, and images with extreme scores."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from medvl.errors import MedvlError
from medvl.eval.classification.scored_images import ClassificationResult
from medvl.eval.core.curves import calibration_bins, roc_curve
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.metrics import CALIBRATION_METRICS, DECISION_METRICS, ECE_BINS
from medvl.eval.core.results import format_value
from medvl.eval.html import page as html, plots
from medvl.eval.html.header import header_facts, headline

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
    "For research, not for clinical use: the metrics compare scores with labels of these images and do not measure "
    "clinical benefit.",
    "Intervals are percentiles of a bootstrap over the units named above. They cover sampling variation only, not "
    "label errors (labels may come from reports) or differences from other patient populations.",
    "The images on this page belong to the data set and remain under its terms of use.",
)


def sections(result: ClassificationResult, pixels: html.Pixels | None, examples: int) -> list[html.Section]:
    """Return tables, curves and, with `pixels`, galleries with `examples` images of each kind per finding."""
    parts: list[html.Section] = [_findings_table(result), *_decisions(result), _plots(result), *_subgroups(result)]
    if pixels is not None:
        parts.append(_gallery(result, pixels, examples))
    return parts


def write_classification_page(
    result: ClassificationResult,
    path: str | Path,
    *,
    model: str,
    data: str,
    date: str | None = None,
    pixels: html.Pixels | None = None,
    examples: int = 3,
) -> Path:
    """Write the page of a classifier as one HTML file and return its path; arguments as in `write_zero_shot_page`."""
    page = html.Page(
        title=f"Classification: {model}",
        subtitle=subtitle(result, data),
        headlines=headlines(result),
        facts=facts(result, model=model, data=data, date=date),
        sections=sections(result, pixels, examples),
        limits=LIMITS,
    )
    return html.write_page(page, path)


def subtitle(result: ClassificationResult, data: str) -> str:
    """Return the data and its number of images and patients, for `Page.subtitle`."""
    return f"{data}, {len(result.images.samples):,} images of {len(set(result.images.patients)):,} patients"


def headlines(result: ClassificationResult) -> list[tuple[str, str, str]]:
    """Return the main results, for `Page.headlines`."""
    rows = _rows(result)
    names = (
        ("auroc", "macro_competition", "AUROC, five competition findings"),
        ("auroc", "macro", f"AUROC, mean of {len(result.images.evaluable)} findings"),
        ("average_precision", "macro", "Average precision, mean"),
        ("top1_accuracy", "one class", "Top-1 accuracy, images of one class"),
    )
    return [
        headline(title, rows[metric, target, ""]) for metric, target, title in names if (metric, target, "") in rows
    ]


def facts(
    result: ClassificationResult, *, model: str, data: str, date: str | None, extra: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return the facts of `extra` and those common to all classifiers, for `Page.facts`."""
    config, details = result.results.config, result.results.details
    policy = ", ".join(
        f"{rule.replace('_', ' ')}: {choice.replace('_', ' ')}" for rule, choice in config["policy"].items()
    )
    thresholds = "none (no validation images)"
    if result.thresholds is not None:
        thresholds = f"maximum of {_RULES[config['threshold_rule']]} on validation images of other patients"
    left_out = sum(details["unreadable"].values())
    shown = [
        *extra,
        *([("Reads", config["reads"])] if "reads" in config else []),
        ("Label policy", policy),
        ("Thresholds", thresholds),
        ("Unreadable", f"{left_out} images" if left_out else "none"),
    ]
    if details["no_finding_contradictions"]:
        shown.append(("Labels", f"{details['no_finding_contradictions']} images have both No Finding and a finding"))
    return header_facts(
        result.results, model=model, data=data, date=date, units=f"{config['bootstrap_unit']}s", extra=shown
    )


def _rows(result: ClassificationResult) -> dict[tuple[str, str, str], MetricRow]:
    return {(row.metric, row.target, row.subgroup): row for row in result.results.rows}


def _targets(result: ClassificationResult, metric: str) -> dict[str, str]:
    """Return target -> its name in tables, the means first."""
    rows = _rows(result)
    means = {target: label for target, label in _MEANS.items() if (metric, target, "") in rows}
    return {**means, **{name: name for name in result.images.names if (metric, name, "") in rows}}


def _findings_table(result: ClassificationResult) -> html.Table:
    rows, counts = _rows(result), result.results.details["labels"]
    targets = _targets(result, "auroc")
    lines: list[list[html.Cell | str]] = []
    for target, label in targets.items():
        auroc = rows["auroc", target, ""]
        prevalence = auroc.n_positive / auroc.n if auroc.n_positive is not None and auroc.n else None
        sizes = ["", "", f"{auroc.n:,}", ""]
        if prevalence is not None:
            sizes = [
                f"{auroc.n_positive:,}",
                f"{100 * prevalence:.1f}%",
                f"{auroc.n:,}",
                f"{counts[target]['left_out']:,}",
            ]
        precision = html.metric_cell(rows["average_precision", target, ""], reference=prevalence, bar=True)
        lines.append([label, html.metric_cell(auroc, reference=0.5, bar=True), precision, *sizes])
    return html.Table(
        title="Findings",
        columns=["", "AUROC", "Average precision", "Positive", "Prevalence", "Evaluated", "Left out"],
        rows=lines,
        strong_rows=sum(target in _MEANS for target in targets),
        caption="With 95% intervals. The tick in a bar is chance level: 0.5 for AUROC, the prevalence for average "
        "precision. Left out: uncertain or missing labels, by the policy.",
    )


def _decisions(result: ClassificationResult) -> list[html.Table]:
    rows = _rows(result)
    metrics = [metric for metric in (*CALIBRATION_METRICS, *DECISION_METRICS) if (metric, "macro", "") in rows]
    if not metrics:
        return []
    thresholds = result.thresholds or {}
    decided = result.thresholds is not None
    lines: list[list[html.Cell | str]] = []
    for target, label in _targets(result, metrics[0]).items():
        threshold = thresholds.get(target, float("nan"))
        shown = [] if not decided else ["" if np.isnan(threshold) else f"{threshold:.3f}"]
        lines.append([label, *shown, *(html.metric_cell(rows.get((metric, target, ""))) for metric in metrics)])
    return [
        html.Table(
            title="Calibration and decisions" if decided else "Calibration",
            columns=["", *(["Threshold"] if decided else []), *(_METRIC_NAMES[metric] for metric in metrics)],
            rows=lines,
            strong_rows=1,
            caption=f"Calibration error over {ECE_BINS} bins of equal width."
            + (" Thresholds were chosen on validation images of other patients." if decided else ""),
        )
    ]


def _plots(result: ClassificationResult) -> html.Pictures:
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
            html.Picture(source=html.png_uri(png), alternative=f"{name}: {title}")
            for title, png in images_by_title.items()
        ]
        strips.append(html.Strip(title=name, note=f"AUROC {format_value(rows['auroc', name, ''])}", pictures=pictures))
    return html.Pictures(
        title="Curves",
        strips=strips,
        caption="ROC curve with pointwise 95% band; normalised histograms of the scores of positive and negative "
        "images; fraction of positives in bins of about equal size, with Wilson's 95% interval.",
    )


def _subgroups(result: ClassificationResult) -> list[html.Table]:
    rows = _rows(result)
    groups = list(dict.fromkeys(row.subgroup for row in result.results.rows if row.subgroup and row.metric == "auroc"))
    if not groups:
        return []
    lines: list[list[html.Cell | str]] = []
    for target, label in {"macro": "Mean", **{name: name for name in result.images.names}}.items():
        cells = [rows.get(("auroc", target, group)) for group in groups]
        if any(cells):
            lines.append([label, *(html.metric_cell(row) for row in cells)])
    return [
        html.Table(
            title="Subgroups",
            columns=["AUROC", *groups],
            rows=lines,
            strong_rows=int(any(("auroc", "macro", group) in rows for group in groups)),
            caption=f"A cell needs {result.results.config['smallest_subgroup']} positive and as many negative images. "
            "Means are over the findings with a value in every group of the attribute.",
        ),
        *_gaps(result),
    ]


def _gaps(result: ClassificationResult) -> list[html.Table]:
    gaps = [row for row in result.results.rows if row.metric == "auroc_gap"]
    if not gaps:
        return []
    order = sorted(gaps, key=lambda row: row.target != "macro")
    lines: list[Sequence[html.Cell | str]] = [
        ["Mean" if row.target == "macro" else row.target, row.subgroup, html.metric_cell(row)] for row in order
    ]
    return [
        html.Table(
            title="Gaps between subgroups",
            columns=["", "Best - worst", "AUROC"],
            rows=lines,
            strong_rows=sum(row.target == "macro" for row in gaps),
            caption="AUROC of the best group minus that of the worst, both chosen on these images: with more than two "
            "groups the gap is biased upwards. If the interval includes zero, the groups are not distinguished.",
        )
    ]


def _gallery(result: ClassificationResult, pixels: html.Pixels, examples: int) -> html.Pictures:
    images, strips = result.images, []
    for index, name in enumerate(images.names):
        if name not in images.evaluable:
            continue
        scores_N, labels_N = images.scores_NL[:, index], images.labels_NL[:, index]
        order = np.argsort(-scores_N, kind="stable")
        positive, negative = order[labels_N[order] == 1], order[labels_N[order] == 0]
        kinds = {
            "highest scores, positive": positive[:examples],
            "highest scores, negative": negative[:examples],
            "lowest scores, positive": positive[::-1][:examples],
        }
        for kind, rows_N in kinds.items():
            pictures = [_thumbnail(result, int(row), index, pixels) for row in rows_N]
            strips.append(html.Strip(title=name, note=kind, pictures=[picture for picture in pictures if picture]))
    return html.Pictures(
        title="Images",
        kind="thumbnails",
        strips=strips,
        caption="Images with the highest scores among positives and among negatives, and with the lowest scores among "
        "positives: score, label, key (a hash).",
    )


def _thumbnail(result: ClassificationResult, row: int, label: int, pixels: html.Pixels) -> html.Picture | None:
    sample, images = result.images.samples[row], result.images
    try:
        image = pixels(images.positions[row])
    except (MedvlError, OSError):
        _log.warning("image %s is left out of the page: it could not be read", sample.key)
        return None
    value = "positive" if images.labels_NL[row, label] == 1 else "negative"
    view = f", {sample.view}" if sample.view else ""
    lines = (f"{images.scores_NL[row, label]:.3f}, {value}", f"{sample.key[:16]}{view}")
    return html.Picture(source=html.thumbnail_uri(image), alternative=f"image {sample.key}", lines=lines)
