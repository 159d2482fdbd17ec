"""Page of generated images: prompts beside real and generated images, the metrics, and the nearest training images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.publish import PageHeader
from medvl.eval.generation.examples import nearest_examples, prompt_examples
from medvl.eval.generation.fidelity import ALL
from medvl.eval.generation.inputs import ImageSet
from medvl.eval.generation.memorisation import describe_copies
from medvl.eval.generation.result import GenerationResult
from medvl.eval.generation.tables import (
    alignment_tables,
    distance_table,
    diversity_tables,
    finding_tables,
    mean_target,
    memorisation_table,
    summary_table,
    use_tables,
)
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import Page, Pictures, Section, Strip, plot_picture, write_page
from medvl.eval.html.plots import LINE_COLORS, Series, interval_lines

_LIMITS = (
    "A research evaluation of synthetic images, not for clinical use. A report written for a generated image proves "
    "nothing about patients.",
    "Findings are read by a classifier that makes errors on real images too: compare with the row of real images. A "
    "prompt states what a report states, which may be less than what its image shows.",
    "Distances of features depend on the features and on the number of images; values of other features or counts do "
    "not compare. Intervals of distances at equal counts are over divisions of the images, which overlap.",
    "The search for copies compares shrunk pixels and features; a copy that is cropped, mirrored or turned can escape.",
)


def write_generation_page(result: GenerationResult, path: str | Path, header: PageHeader, *, examples: int = 4) -> Path:
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
    sections += [distance_table(result), memorisation_table(result), nearest_examples(result, examples)]
    sections += [*diversity_tables(result), *alignment_tables(result), *use_tables(result)]
    page = Page(
        title=f"Generated images: {header.model}",
        subtitle=f"{header.data}: {len(result.main.prompts):,} images of {details['prompts']:,} prompts, "
        f"{details['training_images']:,} training images searched",
        headlines=_headlines(result),
        facts=_facts(result, header),
        sections=sections,
        limits=[*_warnings(result), *_LIMITS],
        findings=[name for name in result.classifier.names if result.row("auroc", name) is not None],
    )
    return write_page(page, path)


def _headlines(result: GenerationResult) -> list[tuple[str, str, str]]:
    shown = [
        ("Prompted findings", result.row("auroc", mean_target(result))),
        ("Asserted against negated", result.row("negation_auroc", mean_target(result, "negation_auroc"))),
        ("Frechet distance", result.row("frechet_distance", ALL)),
        ("Too near to a training image", result.row("too_near", "pixels")),
    ]
    return [headline(title, row) for title, row in shown if row is not None]


def _facts(result: GenerationResult, header: PageHeader) -> list[tuple[str, str]]:
    config, details, inputs = result.results.config, result.results.details, result.results.inputs
    main = details["generation"][result.main.name]
    classifier = details["classifier"]
    auroc = np.mean(list(classifier["auroc_on_test"].values()) or [np.nan])
    extra = [
        ("Generator", f"{main['system']} (sha256 {str(inputs['generator'])[:12]})"),
        ("Sampling", f"{main['sampler']}, {main['steps']} steps, guidance {main['guidance']:g}, seed {main['seed']}"),
        ("Prompts", f"{details['prompts']:,}, {details['cut_prompts']:,} longer than the generator reads"),
        ("Classifier", f"{config['classifier']}, {classifier['kind']}; mean AUROC on real test images {auroc:.3f}"),
        ("Features", f"{config['features']}, {details['feature_dim']} (sha256 {str(inputs['features'])[:12]})"),
    ]
    facts = header_facts(result.results, header, units="patients of the prompts", extra=extra)
    return [fact for fact in facts if fact[0] != "Checkpoint"]


def _warnings(result: GenerationResult) -> list[str]:
    details, found = result.results.details, describe_copies(result.results.rows)
    if details["generator_training_unknown"]:
        found.append(
            "The folder does not name the generator's training data: whether all of it was searched is unknown."
        )
    if details["training_shards_not_given"]:
        count = details["training_shards_not_given"]
        found.append(f"{count} shards that the generator was trained on were not given: copies of them are not found.")
    return found


def _sweep(result: GenerationResult) -> list[Section]:
    """Return plots of findings, fidelity and copies against the guidance, where there are several folders."""
    if len(result.generated) < 2:
        return []
    order = sorted(result.generated, key=lambda images: _guidance(images))
    guidance_K = np.array([_guidance(images) for images in order])
    mean, negated = mean_target(result), mean_target(result, "negation_auroc")
    kinds = (
        ("AUROC of findings", [("prompted", "auroc", mean), ("negated", "negation_auroc", negated)]),
        ("Frechet distance", [("Frechet distance", "frechet_distance", ALL)]),
        (
            "share of images",
            [("precision", "precision", ALL), ("recall", "recall", ALL), ("coverage", "coverage", ALL)],
        ),
        ("share too near", [("pixels", "too_near", "pixels"), ("features", "too_near", "features")]),
    )
    pictures = []
    for number, (axis, lines) in enumerate(kinds):
        series = []
        for place, (name, metric, target) in enumerate(lines):
            rows = [result.row(metric, target, images.name) for images in order]
            if all(row is not None for row in rows):
                series.append(_series(name, [row for row in rows if row is not None], LINE_COLORS[place]))
        if series:
            plot = interval_lines(f"guidance-{number}", guidance_K, series, x="guidance", y=axis)
            pictures.append(plot_picture(plot, alternative=f"{axis} against guidance", lines=[f"{axis} by guidance"]))
    caption = (
        "Guidance makes findings clearer and moves the images away from the real ones: choose it on prompts of "
        "validation patients, and report both. Bars are 95% intervals."
    )
    return [Pictures(title="Guidance", strips=[Strip(title="", pictures=pictures)], caption=caption)]


def _guidance(images: ImageSet) -> float:
    return float(images.source.images.generation.guidance)


def _series(name: str, rows: Sequence[MetricRow], color: str) -> Series:
    value_K, low_K, high_K = (np.array([getattr(row, field) for row in rows]) for field in ("value", "low", "high"))
    return Series(name=name, value_K=value_K, low_K=low_K, high_K=high_K, color=color)
