"""Page of the robustness tests: a summary, a table of each test, and the images under every
corruption.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError
from medvl.eval.classification.evaluation import LIMITS
from medvl.eval.classification.scored_images import LabelPolicy, MeanOptions, notes_on_means
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.open import OutputOptions, Setup, open_source
from medvl.eval.core.results import (
    LineFields,
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    ScoredClasses,
    WritePage,
    number_table,
)
from medvl.eval.evaluation import ModelEvaluation
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
from medvl.eval.matching import matching_groups
from medvl.eval.probing.features import ProbedEncoder, encode_features
from medvl.eval.probing.protocol import FittedProbe
from medvl.eval.registry import register_evaluation
from medvl.eval.robustness.assemble import ALL, DATA
from medvl.eval.robustness.image_versions import STRENGTHS, Version
from medvl.eval.robustness.protocol import (
    PROTOCOL,
    RobustnessResult,
    RobustnessSettings,
    evaluate_robustness,
)
from medvl.eval.zero_shot_classification.calibration import (
    Calibration,
    calibration_path,
    read_calibration,
)
from medvl.eval.zero_shot_classification.prompts import default_prompts, load_prompts
from medvl.models.base import System

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
    auroc_rows = [*rows.of("auroc", "macro", "prompts"), *rows.of("auroc", "macro", "paraphrases")]
    if not auroc_rows:
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
        rows=[[row.subgroup, metric_cell(row, bar=True)] for row in auroc_rows],
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


@register_evaluation("robustness")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Robustness(ModelEvaluation):
    """Test a model on other patients, sites, image qualities and wordings, and on images that are
    not radiographs.

    The checkpoint is a dual-encoder, a fusion-encoder or a classifier; the shards have labels,
    texts or both. With --probe-train and --probe-valid it is any system with an image encoder, and
    a linear probe scores the findings.
    """

    protocols = (PROTOCOL,)
    lines = LineFields(needs=("labels",))
    advice = "give a system's checkpoint"

    probe_train: Path | None = None
    """folder of labelled shards of other patients, to which a linear probe of the image encoder is
    fitted
    """
    probe_valid: Path | None = None
    """folder of labelled shards of further patients, on which the penalty of the probe is chosen"""
    prompts: tuple[str, ...] = ()
    """prompt sets of a dual-encoder (`medvl list prompts`, or JSON files); the first scores the
    findings. Default chexpert_ensemble (statements for systems that are trained on statements),
    chexpert_pairs and chexzero_template
    """
    corruptions: tuple[str, ...] = ("noise", "blur", "contrast", "crop", "rotation", "marks")
    """corruptions, each at five strengths"""
    made_up: tuple[str, ...] = ("natural noise", "inverted", "shuffled tiles")
    """images that are not radiographs, made from those of the data"""
    sites: tuple[Path, ...] = ()
    """folders of labelled shards of other hospitals"""
    outside: tuple[Path, ...] = ()
    """folders of shards of images that are not chest radiographs, such as those of `medvl phantom
    roco`
    """
    calibration: Path | None = None
    """file of `medvl eval calibrate`; default the one beside the checkpoint, if there is one"""
    seed: int = 0
    """seed of the corruptions and of the intervals"""
    label: MeanOptions = dataclasses.field(default_factory=MeanOptions)
    """labels, thresholds and means"""

    @property
    def folder_name(self) -> str:
        """Name of the folder of the results, by what scores the findings."""
        return "robustness_probe" if self.probe_train else "robustness"

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results.

        Raises ConfigError where an option of the probe is missing or does not apply.
        """
        if (self.probe_train is None) != (self.probe_valid is None):
            message = "give both --probe-train and --probe-valid"
            raise ConfigError(message, "conflict", field="probe_train")
        if self.probe_train and (self.prompts or self.calibration is not None):
            message = "a linear probe has no prompts and no calibration"
            raise ConfigError(message, "conflict", field="probe_train")
        return options.folder(self.checkpoint, self.folder_name)

    def evaluate(self, model: System, source: ShardSource, setup: Setup) -> RobustnessResult:
        """Return the metrics of every test."""
        sets = [load_prompts(name) for name in self.prompts]
        load = functools.partial(setup.loader, model=model, text=self.probe_train is None)
        first = sets[0].name if sets else default_prompts(model)
        return evaluate_robustness(
            model,
            source,
            load,
            prompts=sets,
            sites={
                name: setup.source(path, self.checkpoint)
                for name, path in _named(self.sites).items()
            },
            outside={name: open_source(path) for name, path in _named(self.outside).items()},
            calibration=None if self.probe_train else self._calibration(first),
            probe=self._probe(model, setup),
            settings=RobustnessSettings(
                corruptions=self.corruptions,
                made_up=self.made_up,
                policy=self.label.policy(),
                smallest_class=self.label.smallest_class,
                resamples=setup.resamples,
                seed=self.seed,
            ),
            checkpoint=self.checkpoint,
        )

    def _probe(self, model: System, setup: Setup) -> FittedProbe | None:
        """Return a linear probe of the model's image encoder; its features are cached as those of
        `medvl eval probe`.
        """
        if self.probe_train is None or self.probe_valid is None:
            return None
        encoder = ProbedEncoder.from_model(model, name=model.name)
        train, valid = (
            encode_features(
                encoder, setup.loader(of_split, model, text=False), cache=setup.features
            )
            for of_split in (
                open_source(self.probe_train, synthetic=True),
                open_source(self.probe_valid),
            )
        )
        return FittedProbe.fit(encoder, train, valid, policy=self.label.policy())

    def _calibration(self, prompts: str) -> Calibration | None:
        """Return the calibration of a file, or that beside the checkpoint for its prompts; None if
        there is none.
        """
        default = calibration_path(self.checkpoint, prompts)
        if self.calibration is None and not default.is_file():
            return None
        return read_calibration(self.calibration or default)

    def model_name(self, model: System) -> str:
        """Return the name of the model, with the probe."""
        name = super().model_name(model)
        return f"linear probe of {name}" if self.probe_train else name

    def table(self, result: RobustnessResult) -> str:
        """Return the table of the tests."""
        return result.table()

    def page(self, result: RobustnessResult, source: ShardSource) -> WritePage:
        return functools.partial(write_robustness_page, result, pixels=source.pixels)

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metrics of the choices between texts."""
        if "texts" not in lines[0]:
            return []
        scores_N3 = np.array([line["texts"] for line in lines], dtype=float)
        return matching_groups(scores_N3, decides=False)

    @staticmethod
    def scored_classes(lines: Lines, results: Results) -> ScoredClasses | None:
        """Return the scores and labels of the findings."""
        if "findings" not in lines[0]:
            return None
        labels = list(lines[0]["labels"])
        names = [name for name in lines[0]["findings"] if name in labels]
        policy = LabelPolicy(**results.config["policy"])
        labels_NL = policy.resolve(number_table(lines, "labels", labels), labels).labels_NL
        return ScoredClasses(
            names,
            number_table(lines, "findings", names),
            labels_NL[:, [labels.index(name) for name in names]],
        )


def _named(folders: tuple[Path, ...]) -> dict[str, Path]:
    """Return short name -> folder: the last two parts of the path, or all of it where these are
    not unique.
    """
    short = ["/".join(path.parts[-2:]) for path in folders]
    names = [
        str(path) if short.count(name) > 1 else name
        for name, path in zip(short, folders, strict=True)
    ]
    return dict(zip(names, folders, strict=True))
