"""`medvl eval classify`, and its page: tables, curves, subgroups, images with extreme scores."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from medvl.data.shards.source import ShardSource
from medvl.errors import MedvlError
from medvl.eval.classification.protocol import PROTOCOL, classify
from medvl.eval.classification.scored_images import (
    ClassificationResult,
    MeanOptions,
    notes_on_means,
)
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.metrics import (
    CALIBRATION_METRICS,
    DECISION_METRICS,
    ECE_BINS,
    RocCurve,
    calibration_bins,
    roc_curve,
)
from medvl.eval.core.open import Setup
from medvl.eval.core.results import PageHeader, WritePage, classes_of_lines, format_value
from medvl.eval.evaluation import ModelEvaluation
from medvl.eval.html import page as html, plots, tables
from medvl.eval.html.page import header_facts, headline
from medvl.eval.registry import register_evaluation
from medvl.models.downstream.classifier import LabelModel

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
    "For research, not for clinical use: the metrics compare scores with labels of these images "
    "and do not measure clinical benefit.",
    "Intervals are percentiles of a bootstrap over the units named above. They cover sampling "
    "variation only, not "
    "label errors (labels may come from reports) or differences from other patient populations.",
    "The images on this page belong to the data set and remain under its terms of use.",
)


def sections(
    result: ClassificationResult, pixels: html.Pixels | None, examples: int
) -> list[html.Section]:
    """Return tables, curves and, with `pixels`, galleries with `examples` images of each kind
    per finding.
    """
    curves = {
        name: curve
        for index, name in enumerate(result.images.names)
        if (curve := _curve(result, index))
    }
    parts: list[html.Section] = [_findings_table(result)]
    if curves:
        parts.append(_overlay(result, curves))
    parts += [*_decisions(result), *_subgroups(result)]
    if curves:
        parts.append(_plots(result, curves))
    if pixels is not None:
        parts.append(_gallery(result, pixels, examples))
    return parts


def write_classification_page(
    result: ClassificationResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: html.Pixels | None = None,
    examples: int = 3,
) -> Path:
    """Write the page of a classifier as one HTML file and return its path; arguments as in
    `write_zero_shot_page`.
    """
    page = html.Page(
        title=f"Classification: {header.model}",
        subtitle=subtitle(result, header.data),
        headlines=headlines(result),
        facts=facts(result, header),
        sections=sections(result, pixels, examples),
        limits=LIMITS,
        findings=result.images.names,
    )
    return html.write_page(page, path)


def subtitle(result: ClassificationResult, data: str) -> str:
    """Return the data and its number of images and patients, for `Page.subtitle`."""
    return (
        f"{data}, {len(result.images.samples):,} images of "
        f"{len(set(result.images.patients)):,} patients"
    )


def headlines(result: ClassificationResult) -> list[tuple[str, str, str]]:
    """Return the main results, for `Page.headlines`."""
    rows = _rows(result)
    names = (
        ("auroc", "macro_competition", "AUROC, five competition findings"),
        ("auroc", "macro", f"AUROC, mean of {len(result.images.means['macro'])} findings"),
        ("average_precision", "macro", "Average precision, mean"),
        ("top1_accuracy", "one class", "Top-1 accuracy, images of one class"),
    )
    return [
        headline(title, rows[metric, target, ""])
        for metric, target, title in names
        if (metric, target, "") in rows
    ]


def facts(
    result: ClassificationResult, header: PageHeader, extra: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return the facts of `extra` and those common to all classifiers, for `Page.facts`."""
    config = result.results.config
    details = result.results.details
    policy = ", ".join(
        f"{rule.replace('_', ' ')}: {choice.replace('_', ' ')}"
        for rule, choice in config["policy"].items()
    )
    thresholds = "none (no validation images)"
    if result.thresholds is not None:
        thresholds = (
            f"maximum of {_RULES[config['threshold_rule']]} on validation images of other patients"
        )
    left_out = sum(details["unreadable"].values())
    shown = [
        *extra,
        *([("Reads", config["reads"])] if "reads" in config else []),
        ("Label policy", policy),
        ("Thresholds", thresholds),
        ("Unreadable", f"{left_out} images" if left_out else "none"),
    ]
    shown += [("Means", note) for note in notes_on_means(details)]
    if details["no_finding_contradictions"]:
        shown.append(
            (
                "Labels",
                f"{details['no_finding_contradictions']} images have both No Finding and a finding",
            )
        )
    return header_facts(result.results, header, units=f"{config['bootstrap_unit']}s", extra=shown)


def _rows(result: ClassificationResult) -> dict[tuple[str, str, str], MetricRow]:
    return {(row.metric, row.target, row.subgroup): row for row in result.results.rows}


def _targets(result: ClassificationResult, metric: str) -> dict[str, str]:
    """Return target -> its name in tables, the means first."""
    rows = _rows(result)
    means = {target: label for target, label in _MEANS.items() if (metric, target, "") in rows}
    return {**means, **{name: name for name in result.images.names if (metric, name, "") in rows}}


def _findings_table(result: ClassificationResult) -> tables.Table:
    rows = _rows(result)
    counts = result.results.details["labels"]
    targets = _targets(result, "auroc")
    lines: list[list[tables.Cell | str]] = []
    for target, label in targets.items():
        auroc = rows["auroc", target, ""]
        prevalence = (
            auroc.n_positive / auroc.n if auroc.n_positive is not None and auroc.n else None
        )
        sizes = ["", "", f"{auroc.n:,}", ""]
        if prevalence is not None:
            sizes = [
                f"{auroc.n_positive:,}",
                f"{100 * prevalence:.1f}%",
                f"{auroc.n:,}",
                f"{counts[target]['left_out']:,}",
            ]
        precision = tables.metric_cell(
            rows["average_precision", target, ""], reference=prevalence, bar=True
        )
        lines.append([label, tables.metric_cell(auroc, reference=0.5, bar=True), precision, *sizes])
    return tables.Table(
        title="Summary by finding",
        columns=[
            "",
            "AUROC",
            "Average precision",
            "Positive",
            "Prevalence",
            "Evaluated",
            "Left out",
        ],
        rows=lines,
        strong_rows=sum(target in _MEANS for target in targets),
        caption="With 95% intervals. The ends of a column's bars are below its title. The tick "
        "in a bar is chance "
        "level: 0.5 for AUROC, the prevalence for average precision. Left out: uncertain or "
        "missing labels, by the "
        "policy.",
    )


def _decisions(result: ClassificationResult) -> list[tables.Table]:
    rows = _rows(result)
    metrics = [
        metric
        for metric in (*CALIBRATION_METRICS, *DECISION_METRICS)
        if (metric, "macro", "") in rows
    ]
    if not metrics:
        return []
    thresholds = result.thresholds or {}
    decided = result.thresholds is not None
    lines: list[list[tables.Cell | str]] = []
    for target, label in _targets(result, metrics[0]).items():
        threshold = thresholds.get(target, float("nan"))
        shown = [] if not decided else ["" if np.isnan(threshold) else f"{threshold:.3f}"]
        lines.append(
            [
                label,
                *shown,
                *(tables.metric_cell(rows.get((metric, target, ""))) for metric in metrics),
            ]
        )
    return [
        tables.Table(
            title="Calibration and decisions" if decided else "Calibration",
            columns=[
                "",
                *(["Threshold"] if decided else []),
                *(_METRIC_NAMES[metric] for metric in metrics),
            ],
            rows=lines,
            strong_rows=1,
            caption=f"Calibration error over {ECE_BINS} bins of equal width."
            + (
                " Thresholds were chosen on validation images of other patients." if decided else ""
            ),
        )
    ]


def _curve(result: ClassificationResult, index: int) -> RocCurve | None:
    images = result.images
    config = result.results.config
    return roc_curve(
        images.scores_NL[:, index],
        images.labels_NL[:, index],
        resamples=config["resamples"],
        seed=config["seed"],
        groups=result.groups,
    )


def _overlay(result: ClassificationResult, curves: Mapping[str, RocCurve]) -> html.Pictures:
    rows = _rows(result)
    order = sorted(curves, key=lambda name: -rows["auroc", name, ""].value)
    named = {f"{name}  {rows['auroc', name, ''].value:.3f}": curves[name] for name in order}
    best = order[0]
    worst = order[-1]
    picture = html.plot_picture(
        plots.roc_overlay("roc-all", named),
        alternative=f"ROC curves of {len(order)} findings in one square. Highest: {best}, AUROC "
        f"{format_value(rows['auroc', best, ''])}; lowest: {worst}, "
        f"{format_value(rows['auroc', worst, ''])}.",
        lines=["ROC curves of all findings", "in the order of their AUROC, which follows the name"],
    )
    return html.Pictures(
        title="ROC curves",
        kind="wide",
        strips=[html.Strip(title="", pictures=[picture])],
        caption="All findings in one plot; the diagonal is chance. Bands of each finding are in "
        "its own plot below.",
    )


def _plots(result: ClassificationResult, curves: Mapping[str, RocCurve]) -> html.Pictures:
    rows = _rows(result)
    strips = [
        html.Strip(
            title=name,
            note=f"AUROC {format_value(rows['auroc', name, ''])}",
            pictures=_plots_of(result, result.images.names.index(name), curve),
        )
        for name, curve in curves.items()
    ]
    return html.Pictures(
        title="Curves by finding",
        strips=strips,
        caption="ROC curve with pointwise 95% band; normalised histograms of the scores of "
        "positive and negative "
        "images; fraction of positives in bins of about equal size, with Wilson's 95% interval.",
    )


def _plots_of(result: ClassificationResult, index: int, curve: RocCurve) -> list[html.Picture]:
    images = result.images
    name = result.images.names[index]
    scores_N = images.scores_NL[:, index]
    labels_N = images.labels_NL[:, index]
    threshold = (result.thresholds or {}).get(name)
    at_tenth = float(np.interp(0.1, curve.false_positive_rate, curve.true_positive_rate))
    positive, negative = (float(np.median(scores_N[labels_N == label])) for label in (1, 0))
    cut = "" if threshold is None or np.isnan(threshold) else f" The threshold is {threshold:.3f}."
    pictures = [
        html.plot_picture(
            plots.roc_plot(f"roc-{html.slug(name)}", curve),
            alternative=f"ROC curve of {name}: true positive rate {at_tenth:.2f} at a false "
            f"positive rate of 0.1, "
            f"AUROC {format_value(_rows(result)['auroc', name, ''])}.",
            lines=["ROC curve", f"sensitivity {at_tenth:.2f} at specificity 0.9"],
        ),
        html.plot_picture(
            plots.score_plot(f"scores-{html.slug(name)}", scores_N, labels_N, threshold),
            alternative=f"Histograms of the scores for {name}: the median is {positive:.3f} of "
            f"the positive images and "
            f"{negative:.3f} of the negative ones.{cut}",
            lines=[
                "Scores",
                f"median {positive:.3f} of positive, {negative:.3f} of negative images",
            ],
        ),
    ]
    if result.gives_probabilities:
        bins = calibration_bins(scores_N, labels_N)
        predicted = float(bins.probability_Q[-1])
        observed = float(bins.observed_Q[-1])
        pictures.append(
            html.plot_picture(
                plots.calibration_plot(f"calibration-{html.slug(name)}", bins),
                alternative=f"Calibration of {name}: of the images with the highest "
                f"probabilities, {predicted:.2f} on "
                f"average, {observed:.0%} are positive.",
                lines=[
                    "Calibration",
                    f"highest bin: probability {predicted:.2f}, {observed:.0%} positive",
                ],
            )
        )
    return pictures


def _subgroups(result: ClassificationResult) -> list[tables.Table]:
    rows = _rows(result)
    groups = list(
        dict.fromkeys(
            row.subgroup for row in result.results.rows if row.subgroup and row.metric == "auroc"
        )
    )
    if not groups:
        return []
    lines: list[list[tables.Cell | str]] = []
    for target, label in {"macro": "Mean", **{name: name for name in result.images.names}}.items():
        cells = [rows.get(("auroc", target, group)) for group in groups]
        if any(cells):
            lines.append([label, *(tables.metric_cell(row) for row in cells)])
    return [
        tables.Table(
            title="Subgroups",
            columns=["AUROC", *groups],
            rows=lines,
            strong_rows=int(any(("auroc", "macro", group) in rows for group in groups)),
            caption=f"A cell needs {result.results.config['smallest_subgroup']} positive and as "
            f"many negative images. "
            "Means are over the findings with a value in every group of the attribute.",
        ),
        *_gaps(result),
    ]


def _gaps(result: ClassificationResult) -> list[tables.Table]:
    gaps = [row for row in result.results.rows if row.metric == "auroc_gap"]
    if not gaps:
        return []
    order = sorted(gaps, key=lambda row: row.target != "macro")
    lines: list[Sequence[tables.Cell | str]] = [
        ["Mean" if row.target == "macro" else row.target, row.subgroup, tables.metric_cell(row)]
        for row in order
    ]
    return [
        tables.Table(
            title="Gaps between subgroups",
            columns=["", "Best - worst", "AUROC"],
            rows=lines,
            strong_rows=sum(row.target == "macro" for row in gaps),
            caption="AUROC of the best group minus that of the worst, both chosen on these "
            "images: with more than two "
            "groups the gap is biased upwards. If the interval includes zero, the groups are "
            "not distinguished.",
        )
    ]


def _gallery(result: ClassificationResult, pixels: html.Pixels, examples: int) -> html.Pictures:
    images = result.images
    strips = []
    for index, name in enumerate(images.names):
        if name not in images.evaluable:
            continue
        scores_N = images.scores_NL[:, index]
        labels_N = images.labels_NL[:, index]
        order = np.argsort(-scores_N, kind="stable")
        positive = order[labels_N[order] == 1]
        negative = order[labels_N[order] == 0]
        kinds = {
            "highest scores, positive": positive[:examples],
            "highest scores, negative": negative[:examples],
            "lowest scores, positive": positive[::-1][:examples],
        }
        for kind, rows_N in kinds.items():
            pictures = [
                _thumbnail(result, int(row), index, pixels, kind.rpartition(",")[0])
                for row in rows_N
            ]
            strips.append(
                html.Strip(
                    title=name, note=kind, pictures=[picture for picture in pictures if picture]
                )
            )
    return html.Pictures(
        title="Images",
        kind="thumbnails",
        strips=strips,
        caption="Images with the highest scores among positives and among negatives, and with "
        "the lowest scores among "
        "positives: score, label, key (a hash).",
    )


def _thumbnail(
    result: ClassificationResult, row: int, label: int, pixels: html.Pixels, kind: str
) -> html.Picture | None:
    sample = result.images.samples[row]
    images = result.images
    try:
        image = pixels(images.positions[row])
    except (MedvlError, OSError):
        _log.warning("image %s is left out of the page: it could not be read", sample.key)
        return None
    value = "positive" if images.labels_NL[row, label] == 1 else "negative"
    view = f", {sample.view}" if sample.view else ""
    lines = (f"{images.scores_NL[row, label]:.3f}, {value}", f"{sample.key[:16]}{view}")
    seen = f"{sample.view} view" if sample.view else "image"
    alternative = (
        f"{seen}, {value} for {images.names[label]}, score "
        f"{lines[0].partition(',')[0]} (one of the {kind})"
    )
    return html.Picture(source=html.thumbnail_uri(image), alternative=alternative, lines=lines)


@register_evaluation("classify")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(ModelEvaluation):
    """Evaluate a classifier of recipes/linear_probe.py or recipes/classify_openi.py, with intervals
    and a page.
    """

    protocols = (PROTOCOL,)
    fits = (LabelModel,)
    advice = "train a classifier on it with recipes/linear_probe.py"
    divides_batches = True
    scored_classes = staticmethod(classes_of_lines)

    valid: Path | None = None
    """folder of shards of other patients, on which thresholds are chosen; without it, no yes/no
    metrics
    """
    label: MeanOptions = dataclasses.field(default_factory=MeanOptions)
    """labels, thresholds and means"""

    def evaluate(
        self, model: LabelModel, source: ShardSource, setup: Setup
    ) -> ClassificationResult:
        """Return the metrics of the classifier."""
        return classify(
            model,
            setup.loader(source, model),
            valid_loader=setup.valid_loader(self.valid, model, self.checkpoint),
            policy=self.label.policy(),
            threshold_rule=self.label.threshold_rule,
            resamples=setup.resamples,
            smallest_class=self.label.smallest_class,
            checkpoint=self.checkpoint,
        )

    def model_name(self, model: LabelModel) -> str:
        """Return the name of the model, with what it reads."""
        return f"{model.name} of {model.reads} ({self.checkpoint})"

    def table(self, result: ClassificationResult) -> str:
        """Return the table, with notes on the means."""
        return result.table()

    def page(self, result: ClassificationResult, source: ShardSource) -> WritePage:
        return functools.partial(write_classification_page, result, pixels=source.pixels)
