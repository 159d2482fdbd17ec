"""Page of generated images: prompts beside real and generated images, the metrics, and the
nearest training images.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import PageHeader, format_value
from medvl.eval.generation.examples import nearest_examples, prompt_examples
from medvl.eval.generation.fidelity import ALL
from medvl.eval.generation.inputs import ImageSet
from medvl.eval.generation.protocol import RECONSTRUCTED, GenerationResult
from medvl.eval.generation.training_images import SPACES, describe_copies
from medvl.eval.html.page import (
    Page,
    Pictures,
    Section,
    Strip,
    header_facts,
    headline,
    plot_picture,
    write_page,
)
from medvl.eval.html.plots import LINE_COLORS, Series, interval_lines
from medvl.eval.html.tables import Cell, Table, metric_cell

# Tables of the page of generated images.

_METRICS = {
    "auroc": "Prompted findings, AUROC",
    "negation_auroc": "Asserted against negated findings, AUROC",
    "side_auroc": "Left against right, AUROC",
    "frechet_distance": "Frechet distance",
    "kernel_distance": "Kernel distance",
    "precision": "Precision",
    "recall": "Recall",
    "density": "Density",
    "coverage": "Coverage",
}


def mean_target(result: GenerationResult, metric: str = "auroc") -> str:
    """Return the target of the mean that is shown: of the five competition findings where all
    are there.
    """
    return "macro" if result.row(metric, "macro_competition") is None else "macro_competition"


def compared_sets(result: GenerationResult) -> list[str]:
    """Return the names of the columns of the tables: the main folder, other folders, and the
    sets for comparison.
    """
    names = [images.name for images in result.generated]
    others = [(result.sets.real, "real"), (result.sets.rebuilt, RECONSTRUCTED)]
    return [*names, *(name for images, name in others if images is not None)]


def _cell(
    result: GenerationResult, metric: str, target: str, name: str, reference: float | None = None
) -> Cell:
    return metric_cell(
        result.row(metric, target, name), reference=reference, bar=reference is not None
    )


def summary_table(result: GenerationResult) -> Table:
    """Return the means of all sets."""
    names = [*compared_sets(result), "shuffled prompts"]
    mean = mean_target(result)
    targets = {
        "auroc": mean,
        "negation_auroc": mean_target(result, "negation_auroc"),
        "side_auroc": "macro",
    }
    lines: list[list[Cell | str]] = []
    for metric, title in _METRICS.items():
        cells = [_cell(result, metric, targets.get(metric, ALL), name) for name in names]
        if any(cell.interval for cell in cells):
            lines.append([title, *cells])
    lines += [
        [
            f"Too near to a training image, {space}",
            *(_cell(result, "too_near", space, name) for name in names),
        ]
        for space in SPACES
    ]
    five = " of the five competition findings" if mean == "macro_competition" else ""
    return Table(
        title="Summary",
        columns=["", *names],
        rows=lines,
        caption=f"Means{five} with 95% intervals. Real images are those of the same prompts: "
        f"the limit of the "
        "classifier. Shuffled prompts are those of other images: 0.5 by chance. Of real test "
        "images, 1% are too near "
        "to a training image by definition; a higher share of generated images means copies.",
    )


def finding_tables(result: GenerationResult) -> list[Section]:
    """Return tables of prompted findings, negations and sides, if there are any."""
    tables: list[Section] = []
    kinds = (
        ("auroc", "Prompted findings", [*compared_sets(result), "shuffled prompts"]),
        ("negation_auroc", "Asserted against negated findings", compared_sets(result)),
        ("side_auroc", "Left against right", compared_sets(result)),
    )
    captions = {
        "auroc": "AUROC of the classifier against what the prompts state. The tick is chance.",
        "negation_auroc": "AUROC among the images whose prompts name the finding: asserted "
        "against denied. A generator "
        "that only reads the word is at the tick.",
        "side_auroc": "AUROC of prompts with the finding on the patient's left against those on "
        "the right, by the "
        "classifier's score of each half of the image beside its mirror image.",
    }
    for metric, title, sets in kinds:
        names = [name for name in result.classifier.names if result.row(metric, name) is not None]
        means = {"macro_competition": "Mean of the five competition findings", "macro": "Mean"}
        means = {
            target: label
            for target, label in means.items()
            if result.row(metric, target) is not None
        }
        if not means:
            continue
        lines: list[list[Cell | str]] = []
        for target, label in {**means, **{name: name for name in names}}.items():
            row = result.row(metric, target)
            counts = "" if row is None or row.n_positive is None else f"{row.n_positive}/{row.n}"
            lines.append(
                [label, counts, *(_cell(result, metric, target, each, 0.5) for each in sets)]
            )
        tables.append(
            Table(
                title=title,
                columns=["", "positive/n", *sets],
                rows=lines,
                strong_rows=len(means),
                one_axis=True,
                caption=captions[metric],
            )
        )
    return tables


def distance_table(result: GenerationResult) -> Table:
    """Return the distances of features, at equal counts first."""
    matched = [
        row for row in result.results.rows if row.metric == "frechet_distance" and row.target != ALL
    ]
    target = matched[0].target
    names = [*(row.subgroup for row in matched if row.subgroup != "real"), "real"]
    metrics = [metric for metric in _METRICS if not metric.endswith("auroc")]
    lines: list[list[Cell | str]] = []
    for name in names:
        label = "real from other real images" if name == "real" else name
        lines.append(
            [f"{label}, {target}", *(_cell(result, metric, target, name) for metric in metrics)]
        )
    lines += [
        [f"{name}, all images", *(_cell(result, metric, ALL, name) for metric in metrics)]
        for name in names
        if name != "real"
    ]
    return Table(
        title="Distance from the real test images",
        columns=["", *(_METRICS[metric] for metric in metrics)],
        rows=lines,
        strong_rows=len(names),
        caption=f"Features: {result.results.config['features']}. The Frechet distance is biased "
        f"upwards, more for "
        f"fewer images: compare lines of equal counts. At {target} of each set, the last of the "
        f"first lines is "
        "what images of other real patients get. The kernel distance is unbiased and may be "
        "below 0.",
    )


def memorisation_table(result: GenerationResult) -> Table:
    """Return the distances to the nearest training images."""
    details = result.results.details
    lines: list[list[Cell | str]] = []
    for space in SPACES:
        for images in result.generated:
            near = [
                result.row(metric, space, images.name) for metric in ("too_near", "nearer_than_all")
            ]
            lines.append(
                [
                    f"{space}: {images.name}",
                    *(metric_cell(row) for row in near),
                    _cell(result, "nearest_distance", space, images.name),
                    _cell(result, "nearest_distance", space, "real"),
                    f"{details['nearest'][space][images.name]:.3g}",
                    f"{details['nearest'][space]['real']:.3g}",
                ]
            )
    return Table(
        title="Memorisation",
        columns=[
            "",
            "Too near",
            "Nearer than all real",
            "Median",
            "Median, real",
            "Smallest",
            "Smallest, real",
        ],
        rows=lines,
        caption=f"Distance to the nearest of all {details['training_images']:,} training "
        f"images. Too near: nearer than "
        "99% of the real test images; 0.010 is the value of real images. Relative distances are "
        "divided by the mean "
        "distance of the 2nd to 10th nearest training images: a blurred image is near to many, "
        "a copy to one.",
    )


def diversity_tables(result: GenerationResult) -> list[Section]:
    """Return the similarity within a prompt, where a prompt has two images."""
    names = [
        name
        for name in compared_sets(result)
        if result.row("ms_ssim", "same text", name) is not None
    ]
    if not names:
        return []
    lines: list[list[Cell | str]] = []
    for name in names:
        pairs = result.row("ms_ssim", "same text", name)
        cells = [
            _cell(result, metric, target, name)
            for metric in ("ms_ssim", "feature_distance")
            for target in ("same text", "other text")
        ]
        lines.append([name, "" if pairs is None else f"{pairs.n:,}", *cells])
    table = Table(
        title="Diversity",
        columns=[
            "",
            "Pairs",
            "MS-SSIM, same text",
            "other text",
            "Feature distance, same text",
            "other text",
        ],
        rows=lines,
        caption="Pairs of images with one text, and with different texts. Real images of one "
        "text are of different "
        "patients: images of one prompt that are more alike than these show little diversity. "
        "MS-SSIM of small images "
        "has fewer scales, and compares only at one image size.",
    )
    return [table]


def alignment_tables(result: GenerationResult) -> list[Section]:
    """Return similarity and retrieval of prompts, with a dual-encoder."""
    if not result.aligned:
        return []
    aligned = result.aligned[result.main.name]
    metrics = {
        "alignment": "Similarity",
        "alignment_other": "with other prompts",
        "recall@1": "Recall@1",
    }
    metrics |= {"recall@5": "Recall@5", "recall@10": "Recall@10", "median_rank": "Median rank"}
    target = f"{aligned.prompts} prompts"
    lines: list[list[Cell | str]] = [
        [name, *(_cell(result, metric, target, name) for metric in metrics)]
        for name in result.aligned
    ]
    shared = result.results.details.get("aligner_text_weights_shared", 0)
    note = f" {shared:.0%} of its text weights are those of the generator." if shared else ""
    table = Table(
        title="Alignment",
        columns=["", *metrics.values()],
        rows=lines,
        caption=f"By a dual-encoder that was trained apart from the generator: similarity of an "
        f"image with its prompt, "
        f"and the place of its prompt among {target}.{note}",
    )
    return [table]


def use_tables(result: GenerationResult) -> list[Section]:
    """Return the classifiers trained on real and synthetic images, if there are any."""
    rows = [
        row
        for row in result.results.rows
        if row.metric.startswith("use_auroc") and row.target == _use_mean(result)
    ]
    if not rows:
        return []
    by_metric = {(row.metric, row.subgroup): row for row in rows}
    fractions = list(
        dict.fromkeys(
            row.metric.split("@")[1] for row in rows if row.metric.startswith("use_auroc@")
        )
    )
    lines: list[list[Cell | str]] = []
    for fraction in fractions:
        real, both = (
            by_metric.get((f"use_auroc@{fraction}", name))
            for name in ("real", "real and synthetic")
        )
        alone = by_metric.get((f"use_auroc@{fraction}", "synthetic"))
        gain = by_metric.get((f"use_auroc_gain@{fraction}", "both minus real"))
        spread = [
            by_metric.get((f"use_auroc_sd@{fraction}", name))
            for name in ("real", "real and synthetic")
        ]
        lines.append(
            [
                "synthetic only" if fraction == "0%" else f"{fraction} of the real patients",
                *(metric_cell(row, reference=0.5, bar=True) for row in (real, both, alone)),
                metric_cell(gain),
                " / ".join(format_value(row) for row in spread if row is not None),
            ]
        )
    table = Table(
        title="Use as training data",
        columns=[
            "",
            "Real",
            "Real and synthetic",
            "Synthetic",
            "Gain",
            "SD over runs, real / both",
        ],
        rows=lines,
        one_axis=frozenset({0, 1, 2}),
        caption="Mean AUROC on real test images of linear probes that were trained on real "
        "images, on synthetic ones "
        "and on both. The gain is the difference of runs with the same real patients.",
    )
    return [table]


def _use_mean(result: GenerationResult) -> str:
    targets = {row.target for row in result.results.rows if row.metric.startswith("use_auroc")}
    return "macro_competition" if "macro_competition" in targets else "macro"


_LIMITS = (
    "A research evaluation of synthetic images, not for clinical use. A report written for a "
    "generated image proves nothing about patients.",
    "Findings are read by a classifier that makes errors on real images too: compare with the "
    "row of real images. A "
    "prompt states what a report states, which may be less than what its image shows.",
    "Distances of features depend on the features and on the number of images; values of other "
    "features or counts do not compare. Intervals of distances at equal counts are over divisions "
    "of the images, which overlap.",
    "The search for copies compares shrunk pixels and features; a copy that is cropped, "
    "mirrored or turned can escape.",
)


def write_generation_page(
    result: GenerationResult, path: str | Path, header: PageHeader, *, examples: int = 4
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_generation`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        examples: examples of each kind.
    """
    details = result.results.details
    sections: list[Section] = [
        summary_table(result),
        prompt_examples(result, examples),
        *_sweep(result),
        *finding_tables(result),
    ]
    sections += [
        distance_table(result),
        memorisation_table(result),
        nearest_examples(result, examples),
    ]
    sections += [*diversity_tables(result), *alignment_tables(result), *use_tables(result)]
    page = Page(
        title=f"Generated images: {header.model}",
        subtitle=f"{header.data}: {len(result.main.prompts):,} images of {details['prompts']:,} "
        f"prompts, "
        f"{details['training_images']:,} training images searched",
        headlines=_headlines(result),
        facts=_facts(result, header),
        sections=sections,
        limits=[*_warnings(result), *_LIMITS],
        findings=[
            name for name in result.classifier.names if result.row("auroc", name) is not None
        ],
    )
    return write_page(page, path)


def _headlines(result: GenerationResult) -> list[tuple[str, str, str]]:
    shown = [
        ("Prompted findings", result.row("auroc", mean_target(result))),
        (
            "Asserted against negated",
            result.row("negation_auroc", mean_target(result, "negation_auroc")),
        ),
        ("Frechet distance", result.row("frechet_distance", ALL)),
        ("Too near to a training image", result.row("too_near", "pixels")),
    ]
    return [headline(title, row) for title, row in shown if row is not None]


def _facts(result: GenerationResult, header: PageHeader) -> list[tuple[str, str]]:
    config = result.results.config
    details = result.results.details
    inputs = result.results.inputs
    main = details["generation"][result.main.name]
    classifier = details["classifier"]
    auroc = np.mean(list(classifier["auroc_on_test"].values()) or [np.nan])
    extra = [
        ("Generator", f"{main['system']} (sha256 {str(inputs['generator'])[:12]})"),
        (
            "Sampling",
            f"{main['sampler']}, {main['steps']} steps, guidance {main['guidance']:g}, seed "
            f"{main['seed']}",
        ),
        (
            "Prompts",
            f"{details['prompts']:,}, {details['cut_prompts']:,} longer than the generator reads",
        ),
        (
            "Classifier",
            f"{config['classifier']}, {classifier['kind']}; mean AUROC on real test images "
            f"{auroc:.3f}",
        ),
        (
            "Features",
            f"{config['features']}, {details['feature_dim']} (sha256 "
            f"{str(inputs['features'])[:12]})",
        ),
    ]
    facts = header_facts(result.results, header, units="patients of the prompts", extra=extra)
    return [fact for fact in facts if fact[0] != "Checkpoint"]


def _warnings(result: GenerationResult) -> list[str]:
    details = result.results.details
    messages = describe_copies(result.results.rows)
    if details["generator_training_unknown"]:
        messages.append(
            "The folder does not name the generator's training data: whether all of it was "
            "searched is unknown."
        )
    if details["training_shards_not_given"]:
        count = details["training_shards_not_given"]
        messages.append(
            f"{count} shards that the generator was trained on were not given: copies of them "
            f"are not found."
        )
    return messages


def _sweep(result: GenerationResult) -> list[Section]:
    """Return plots of findings, fidelity and copies against the guidance, if there are
    several folders.
    """
    if len(result.generated) < 2:
        return []
    order = sorted(result.generated, key=lambda images: _guidance(images))
    guidance_K = np.array([_guidance(images) for images in order])
    mean = mean_target(result)
    negated = mean_target(result, "negation_auroc")
    kinds = (
        (
            "AUROC of findings",
            [("prompted", "auroc", mean), ("negated", "negation_auroc", negated)],
        ),
        ("Frechet distance", [("Frechet distance", "frechet_distance", ALL)]),
        (
            "share of images",
            [
                ("precision", "precision", ALL),
                ("recall", "recall", ALL),
                ("coverage", "coverage", ALL),
            ],
        ),
        (
            "share too near",
            [("pixels", "too_near", "pixels"), ("features", "too_near", "features")],
        ),
    )
    pictures = []
    for number, (axis, lines) in enumerate(kinds):
        series = []
        for place, (name, metric, target) in enumerate(lines):
            rows = [result.row(metric, target, images.name) for images in order]
            if all(row is not None for row in rows):
                series.append(
                    _series(name, [row for row in rows if row is not None], LINE_COLORS[place])
                )
        if series:
            plot = interval_lines(f"guidance-{number}", guidance_K, series, x="guidance", y=axis)
            pictures.append(
                plot_picture(
                    plot, alternative=f"{axis} against guidance", lines=[f"{axis} by guidance"]
                )
            )
    caption = (
        "Guidance makes findings clearer and moves the images away from the real ones: choose it "
        "on prompts of validation patients, and report both. Bars are 95% intervals."
    )
    return [
        Pictures(title="Guidance", strips=[Strip(title="", pictures=pictures)], caption=caption)
    ]


def _guidance(images: ImageSet) -> float:
    return float(images.source.images.generation.guidance)


def _series(name: str, rows: Sequence[MetricRow], color: str) -> Series:
    value_K, low_K, high_K = (
        np.array([getattr(row, field) for row in rows]) for field in ("value", "low", "high")
    )
    return Series(name=name, value_K=value_K, low_K=low_K, high_K=high_K, color=color)
