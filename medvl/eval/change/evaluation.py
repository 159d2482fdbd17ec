"""Page of a change classification: accuracy of each finding, confusion of the classes, and pairs
of images.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.data.loading.studies import prior_positions
from medvl.data.shards.source import ShardSource
from medvl.errors import EvaluationError
from medvl.eval.change.protocol import (
    PROTOCOL,
    ChangeResult,
    change_classification,
    change_metrics,
    load_change_prompts,
)
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.open import Setup
from medvl.eval.core.results import LineFields, Lines, PageHeader, Results, WritePage, number
from medvl.eval.evaluation import Column, ModelEvaluation, Task, Trial
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
from medvl.eval.registry import register_evaluation
from medvl.models.downstream.classifier import ChangeClassifier
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.schema import CHANGES, Inputs

_LIMITS = (
    "A research evaluation, not for clinical use. Labels are one reading of two images.",
    "Zero-shot accuracy depends on the sentences of the prompts. They were not chosen on these "
    "images.",
)


def write_change_page(
    result: ChangeResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    prior_pixels: Pixels | None = None,
    examples: int = 4,
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `change_classification`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        pixels, prior_pixels: functions from the position of an image to its pixels and to those of
            its prior image; None for no images.
        examples: pairs of each kind, correct and wrong.
    """
    results = result.results
    used = "used" if results.config["use_prior"] else "not used"
    extra = [("Scores", _scores(result)), ("Prior images", f"{used}; {_missing(result)}")]
    sections: list[Section] = [_accuracy_table(result), _confusion_table(result)]
    if pixels is not None and prior_pixels is not None:
        sections.append(_gallery(result, pixels, prior_pixels, examples))
    page = Page(
        title=f"Change between images: {header.model}",
        subtitle=f"{header.data}: {results.details['images']:,} images with "
        f"{int((result.truth_NL >= 0).sum()):,} labels",
        headlines=[
            headline("macro accuracy (chance 0.333)", results.row("macro_accuracy", "macro")),
            headline("accuracy", results.row("accuracy", "macro")),
        ],
        facts=header_facts(results, header, units="patients", extra=extra),
        sections=sections,
        limits=_LIMITS if "prompts" in results.config else _LIMITS[:1],
        findings=result.findings,
    )
    return write_page(page, path)


def _scores(result: ChangeResult) -> str:
    config = result.results.config
    if "classifier" in config:
        return "probabilities of the classifier"
    if "folds" in config:
        return f"linear probe, cross-validated over {config['folds']} folds of patients"
    return f"similarity with the prompts {config['prompts']}"


def _missing(result: ChangeResult) -> str:
    missing = result.results.details["without_prior"]
    return f"{missing} images without one" if missing else "every image has one"


def _accuracy_table(result: ChangeResult) -> Table:
    results = result.results
    rows: list[Sequence[Cell | str]] = []
    for target in ("macro", *result.findings):
        counts = results.details["labels"].get(target)
        rows.append(
            [
                "Mean" if target == "macro" else target,
                metric_cell(results.row("macro_accuracy", target), reference=1 / 3, bar=True),
                metric_cell(results.row("accuracy", target)),
                *("" if counts is None else f"{counts[change]:,}" for change in CHANGES),
            ]
        )
    return Table(
        title="Summary by finding",
        columns=["", "Macro accuracy", "Accuracy", *map(str.capitalize, CHANGES)],
        rows=rows,
        strong_rows=1,
        caption="Macro accuracy is the mean of the accuracies of the three classes, with 95% "
        "intervals; the tick is "
        "chance. On the right, the number of labels.",
    )


def _predicted(result: ChangeResult) -> NDArray[np.int64]:
    """Return the predicted class (N, L); -1 for a tie of the highest scores, which the metrics
    count as wrong.
    """
    highest_NL1 = result.scores_NLC.max(axis=2, keepdims=True)
    tied_NL = (result.scores_NLC == highest_NL1).sum(axis=2) > 1
    return np.where(tied_NL, -1, result.scores_NLC.argmax(axis=2))


def _confusion_table(result: ChangeResult) -> Table:
    predicted_NL = _predicted(result)
    rows = []
    for truth, name in enumerate(CHANGES):
        of_class = predicted_NL[result.truth_NL == truth]
        counts = np.bincount(of_class[of_class >= 0], minlength=len(CHANGES))
        shares = [f"{count / max(len(of_class), 1):.2f}" for count in counts]
        rows.append([name.capitalize(), *shares, f"{len(of_class):,}"])
    return Table(
        title="Confusion",
        columns=["Label", *(f"Predicted {change}" for change in CHANGES), "Labels"],
        rows=rows,
        caption="Share of the labels of each class that were predicted as each class, over all "
        "findings. A tie of the "
        "highest scores predicts none.",
    )


def _gallery(result: ChangeResult, pixels: Pixels, prior_pixels: Pixels, examples: int) -> Pictures:
    predicted_NL = _predicted(result)
    labelled_NL = result.truth_NL >= 0
    strips = []
    for title, chosen_NL in (
        ("Correct", predicted_NL == result.truth_NL),
        ("Wrong", predicted_NL != result.truth_NL),
    ):
        places = np.argwhere(chosen_NL & labelled_NL)
        for row, column in places[
            np.linspace(0, len(places) - 1, min(examples, len(places))).astype(int)
        ]:
            predicted = int(predicted_NL[row, column])
            shown = _pair(result, int(row), int(column), predicted, pixels, prior_pixels)
            strips.append(Strip(title=title, pictures=list(shown)))
    return Pictures(
        title="Pairs",
        kind="thumbnails",
        strips=strips,
        caption="Prior image and current image, the label and the prediction, evenly spaced in "
        "the order of the data.",
    )


def _pair(
    result: ChangeResult,
    row: int,
    column: int,
    predicted: int,
    pixels: Pixels,
    prior_pixels: Pixels,
) -> Iterator[Picture]:
    finding = result.findings[column]
    position = result.positions[row]
    answer = f"predicted {CHANGES[predicted]}" if predicted >= 0 else "a tie"
    lines = (finding, f"label {CHANGES[result.truth_NL[row, column]]}", answer)
    yield Picture(
        source=thumbnail_uri(prior_pixels(position)),
        alternative=f"prior image of the image on its right ({finding})",
        lines=("prior image",),
    )
    yield Picture(
        source=thumbnail_uri(pixels(position)),
        alternative=f"current image: {', '.join(lines)}",
        lines=lines,
    )


@register_evaluation("change")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Change(ModelEvaluation):
    """Evaluate how well a model distinguishes improving, stable and worsening findings, from pairs
    of images.

    The checkpoint is a dual-encoder, or a classifier of recipes/change_finetune.py, to which
    `prompts`, `use_prior` and `folds` do not apply; the shards have labels of change (ms-cxr-t).
    """

    protocols = (PROTOCOL,)
    lines = LineFields(needs=("patient",))
    fits = (DualEncoder, ChangeClassifier)
    advice = "give the checkpoint of a dual-encoder or of a classifier of change"
    tasks = (
        Task(
            fits=DualEncoder,
            needs=("changes",),
            data="changes",
            columns=(Column(title="change", metric="macro_accuracy", targets=("macro",)),),
        ),
    )

    prompts: Path | None = None
    """JSON file with a list of sentences with {finding} for each of improving, stable and
    worsening
    """
    use_prior: bool = True
    """give prior images to a model that takes them"""
    folds: int | None = None
    """number of folds of patients over which a linear probe of the images' vectors is
    cross-validated, such as 5; default zero-shot classification by the prompts
    """
    examples: int = 4
    """pairs on the page, correct and wrong ones each"""

    @property
    def folder_name(self) -> str:
        """Name of the folder of the results, by the kind of the classification."""
        name = "change" if self.folds is None else "change-probe"
        return name if self.use_prior else f"{name}-without-prior"

    def evaluate(
        self, model: DualEncoder | ChangeClassifier, source: ShardSource, setup: Setup
    ) -> ChangeResult:
        """Return the accuracies."""
        return change_classification(
            model,
            setup.loader(source, model, text=False, inputs=Inputs(prior_image=True)),
            load_change_prompts(self.prompts),
            use_prior=self.use_prior,
            folds=self.folds,
            resamples=setup.resamples,
            checkpoint=self.checkpoint,
        )

    def page(self, result: ChangeResult, source: ShardSource) -> WritePage:
        prior_N = prior_positions(source)
        return functools.partial(
            write_change_page,
            result,
            pixels=source.pixels,
            prior_pixels=lambda position: source.pixels(int(prior_N[position])),
            examples=self.examples,
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the accuracy of each finding, and its mean."""
        findings = sorted({name for line in lines for name in line["findings"]})
        scores_NLC = np.zeros((len(lines), len(findings), len(CHANGES)))
        truth_NL = np.full(scores_NLC.shape[:2], -1)
        for row, line in enumerate(lines):
            for name, one in line["findings"].items():
                column = findings.index(name)
                scores_NLC[row, column] = [number(one["scores"][change]) for change in CHANGES]
                truth_NL[row, column] = CHANGES.index(one["label"])
        return [change_metrics(scores_NLC, truth_NL, findings)]

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Change":
        """Return the evaluation with prior images, of a system that reads them."""
        if not trial.model().inputs.prior_image:
            message = "the system reads no prior image"
            raise EvaluationError(message, "unsupported", field="prior_image")
        return cls(checkpoint=trial.checkpoint, data=trial.data)
