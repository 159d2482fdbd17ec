"""HTML page of a VQA evaluation: accuracy next to baselines, and examples with attention maps."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np

from medvl.common.files import sha256
from medvl.data.annotations import DIFFERENCE, Question
from medvl.data.loading.sources import Source, color_for
from medvl.data.loading.studies import (
    NO_PRIOR,
    QuestionSource,
    prior_positions,
    questions_in_split,
)
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.open import OutputOptions, Setup, open_source
from medvl.eval.core.results import (
    LineFields,
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    checkpoint_sha256,
    format_value,
    number,
)
from medvl.eval.evaluation import Column, Evaluation, Outcome, Task, Trial
from medvl.eval.html import plots
from medvl.eval.html.page import (
    Page,
    Pictures,
    Section,
    Strip,
    dated,
    hashed,
    headline,
    plot_picture,
    software,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.vqa.accuracy import (
    ACCURACY,
    CEILING,
    GAIN,
    MODEL,
    TYPES,
    VQAResult,
    attribute_masks,
    difference_metrics,
    evaluate_answers,
    masked_means,
    subgroup_of,
    type_masks,
)
from medvl.eval.vqa.controls import (
    CONTROLS,
    GAIN_OVER_ONE_IMAGE,
    GAIN_OVER_TEXT_ONLY,
    GAINS,
    SWAPPED,
    TEXT_ONLY,
    TITLES,
    check_controls,
    control_sources,
)
from medvl.eval.vqa.examples import Explain, Pixels, choose_examples, example_cards, explain
from medvl.eval.vqa.outside import export_questions, read_answers, with_options
from medvl.eval.vqa.predictions import (
    QUESTION_ONLY,
    Predictions,
    QuestionLoader,
    WrittenAnswers,
    answer_questions,
    model_vocabulary,
    question_data,
    questions_beside,
)
from medvl.eval.vqa.protocol import AnswerVocabulary, VQAProtocol, get_protocol
from medvl.models.downstream.vqa.model import VQA
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.report_generators.causal_lm import CausalLM

_NAMES: Mapping[str, str] = {
    MODEL: "Model",
    "always_yes": "Always yes",
    "always_no": "Always no",
    "majority": "Most frequent answer",
    "majority_by_kind": "Most frequent of its type",
    "question_lookup": "Same question in train",
    QUESTION_ONLY: "Question-only model",
    **TITLES,
}
_CLOSED = {
    "field": "by the data set's own field",
    "yes_no": "if the answer is yes or no",
    "predicted": "if the model predicts the question to be closed",
}
_RIGHT = {
    "exact": "equal to the data set's answer",
    "any_of": "equal to any of the data set's alternatives",
    "part_of": "equal to the data set's answer or to a part of it",
    "llava_med": "as in LLaVA-Med v1.0",
}
LIMITS = (
    "A research evaluation, not for clinical use: the numbers show how often answers agree with "
    "those of this data "
    "set, not any benefit for a reader or a patient.",
    "Intervals are percentiles of a bootstrap over images, with all questions of an image. They "
    "include sampling "
    "error, not errors of the reference answers or differences between these images and others.",
    "An attention map shows the weights of one layer. It does not explain an answer: lower "
    "layers have mixed the "
    "content of cells, and a model can attend to a finding and miss it.",
    "Images and questions on this page belong to the data set and stay under its terms of use.",
)


def write_vqa_page(
    result: VQAResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    explain: Explain | None = None,
    examples: int = 6,
    seed: int = 0,
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_answers`.
        path: path of the file; its folder is created if necessary.
        header: name of the model, empty for baselines alone, and the date; the result names its
            data itself.
        pixels: question id -> image; None for a page without images.
        explain: None for a page without next best answers and attention maps.
        examples: number of correct and of wrong answers, for closed and for open questions each.
        seed: seed of the sampling of examples.
    """
    sections: list[Section] = [_accuracy_table(result), *_plot(result), *_group_table(result)]
    if MODEL in result.systems:
        sections.append(
            example_cards(result, pixels, explain, choose_examples(result, examples, seed))
        )
    details = result.results.details
    page = Page(
        title=f"Visual question answering: {header.model or 'baselines without images'}",
        subtitle=f"{_questions(result)}: {details['questions']:,} questions about "
        f"{details['images']:,} images",
        headlines=_headlines(result),
        facts=_facts(result, header),
        sections=sections,
        limits=LIMITS,
    )
    return write_page(page, path)


def _rows(result: VQAResult) -> dict[tuple[str, str, str], MetricRow]:
    return {(row.metric, row.target, row.subgroup): row for row in result.results.rows}


def _shown(result: VQAResult) -> str:
    """Return the system whose numbers come first: the model, or without one the question-only
    baseline.
    """
    return MODEL if MODEL in result.systems else QUESTION_ONLY


def _headlines(result: VQAResult) -> list[tuple[str, str, str]]:
    rows = _rows(result)
    shown = _shown(result)
    names = [
        (f"{_NAMES[shown]}, {target}", (ACCURACY, target, subgroup_of(shown))) for target in TYPES
    ]
    names.insert(0, ("Gain over text only", (GAIN_OVER_TEXT_ONLY, "overall", "")))
    names.append(("Gain over the question-only model", (GAIN, "overall", "")))
    names.append(("Gain over one image", (GAIN_OVER_ONE_IMAGE, "overall", "")))
    return [
        headline(title, rows[name])
        for title, name in names
        if name in rows and not np.isnan(rows[name].value)
    ]


def _facts(result: VQAResult, header: PageHeader) -> list[tuple[str, str]]:
    config = result.results.config
    inputs = result.results.inputs
    details = result.results.details
    rules = config["rules"]
    source = next((key for key in ("checkpoint", "predictions") if inputs.get(key)), None)
    vocabulary = "none: answers are generated"
    if config["vocabulary_size"] is not None:
        text = f"{config['vocabulary_size']} of {details['vocabulary_of']}"
        vocabulary = hashed(text, inputs.get("vocabulary"))
    not_predicted = details["not_predicted"]
    phrasing = ", ".join(rules["phrasing"] or ())
    facts = {
        **({source.capitalize(): hashed(header.model, inputs[source])} if source else {}),
        "Protocol": f"{rules['name']}, version {rules['version']}",
        "Not comparable": rules["flaw"],
        "Questions": hashed(_questions(result), inputs.get("questions")),
        "Answers": vocabulary,
        "Correct": f"{_RIGHT[rules['match']]}, after normalization ({rules['normalizer']})",
        "Included": phrasing and f"of VQA-RAD, {phrasing} questions only",
        "Closed": _CLOSED[rules["closed"]],
        "Intervals": f"95%, {config['resamples']:,} resamples of images, seed {config['seed']}",
        "Baselines": "fitted on the questions of train alone",
        "Software": software(result.results),
        "Not answered": f"{not_predicted} questions, which count as wrong" if not_predicted else "",
    }
    return dated(header.date, [(name, value) for name, value in facts.items() if value])


def _questions(result: VQAResult) -> str:
    config = result.results.config
    return f"{config['dataset']}, {config['split_id']} split, {config['split']}"


def _accuracy_table(result: VQAResult) -> Table:
    rows = _rows(result)
    lines: list[list[Cell | str]] = []
    for system in result.systems:
        cells = [rows[ACCURACY, target, subgroup_of(system)] for target in TYPES]
        lines.append(
            [
                _NAMES[system],
                *(metric_cell(row, reference=_reference(rows, row), bar=True) for row in cells),
            ]
        )
    ceiling = [metric_cell(rows[CEILING, target, ""], bar=True) for target in TYPES]
    lines.append(["Best possible with the vocabulary", *ceiling])
    counts = [rows[CEILING, target, ""].n for target in TYPES]
    return Table(
        title="Summary: accuracy",
        columns=[
            "",
            *(f"{target.capitalize()} ({n:,})" for target, n in zip(TYPES, counts, strict=True)),
        ],
        rows=lines,
        strong_rows=int(MODEL in result.systems),
        one_axis=True,
        caption="With 95% intervals, over all questions; a question without an answer is wrong. "
        "Baselines do not use "
        f"the image. The tick in a bar is the {_NAMES[QUESTION_ONLY].lower()}.",
    )


def _reference(rows: Mapping[tuple[str, str, str], MetricRow], row: MetricRow) -> float | None:
    """Return the accuracy of the question-only baseline on the same questions."""
    other = rows[ACCURACY, row.target, subgroup_of(QUESTION_ONLY)].value
    return None if np.isnan(other) else other


def _groups(result: VQAResult) -> list[str]:
    shown = subgroup_of(_shown(result))
    return [
        row.target
        for row in result.results.rows
        if (row.metric, row.subgroup) == (ACCURACY, shown) and row.target not in TYPES
    ]


def _group_table(result: VQAResult) -> list[Table]:
    rows = _rows(result)
    groups = _groups(result)
    shown = _shown(result)
    if not groups:
        return []
    hidden = {shown, *CONTROLS} - {*GAINS}
    others = [system for system in result.systems if system not in hidden]
    lines: list[list[Cell | str]] = []
    for group in groups:
        row = rows[ACCURACY, group, subgroup_of(shown)]
        other_cells = [metric_cell(rows[ACCURACY, group, subgroup_of(system)]) for system in others]
        reference = _reference(rows, row) if shown == MODEL else None
        lines.append(
            [group, metric_cell(row, reference=reference, bar=True), *other_cells, f"{row.n:,}"]
        )
    return [
        Table(
            title="By question type, organ and side",
            columns=["", _NAMES[shown], *(_NAMES[system] for system in others), "Questions"],
            rows=lines,
            caption="Accuracy with 95% intervals. A question of two types counts for both.",
        )
    ]


def _plot(result: VQAResult) -> list[Pictures]:
    rows = _rows(result)
    groups = [group for group in _groups(result) if group.startswith("kind: ")]
    if not groups:
        return []

    def series(system: str, color: str) -> plots.Series:
        of_system = [rows[ACCURACY, group, subgroup_of(system)] for group in groups]
        value_K, low_K, high_K = np.array([(row.value, row.low, row.high) for row in of_system]).T
        return plots.Series(
            name=_NAMES[system], value_K=value_K, low_K=low_K, high_K=high_K, color=color
        )

    lines = [(MODEL, plots.LINE_COLOR), (QUESTION_ONLY, plots.NEGATIVE_COLOR)]
    ticks = [("majority_by_kind", plots.POSITIVE_COLOR), ("majority", plots.GREY)]
    counts = [rows[ACCURACY, group, subgroup_of(QUESTION_ONLY)].n for group in groups]
    plot = plots.interval_plot(
        "question-types",
        [f"{group.removeprefix('kind: ')} ({n})" for group, n in zip(groups, counts, strict=True)],
        [series(*each) for each in lines if each[0] in result.systems],
        [series(*each) for each in ticks],
        axis="accuracy",
    )
    values = ", ".join(
        f"{group.removeprefix('kind: ')} "
        f"{format_value(rows[ACCURACY, group, subgroup_of(_shown(result))])}"
        for group in groups
    )
    picture = plot_picture(
        plot, alternative=f"Accuracy by question type with 95% intervals: {values}."
    )
    return [
        Pictures(
            title="Question types",
            kind="wide",
            strips=[Strip(title="", pictures=[picture])],
            caption="Accuracy with 95% intervals, and ticks for the most frequent answers; "
            "(number of questions).",
        )
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """Predictions and their origin."""

    predictions: Predictions | None
    """None for the baselines alone."""
    name: str
    inputs: Mapping[str, str]
    vocabulary: AnswerVocabulary | Literal["protocol"] | None = "protocol"
    """Answers of the model; None if it generates them, "protocol" if they are unknown."""
    explain: Explain | None = None
    controls: Mapping[str, Predictions] = dataclasses.field(default_factory=dict)
    """Predictions under the controls of `medvl.eval.vqa.controls`."""


@register_evaluation("vqa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Evaluation):
    """Evaluate visual question answering: accuracy with intervals, beside text only, swapped
    images, questions in other words, and baselines without the image.
    """

    protocols = ("vqa",)
    lines = LineFields(item=("id",), needs=("closed", "model_credit"))
    tasks = (
        Task(
            name="questions",
            fits=FusionModel,
            needs=("questions", "questions_valid"),
            data="questions",
            columns=(
                Column(title="questions", metric=ACCURACY, targets=("overall",)),
                Column(
                    title="question alone",
                    metric=ACCURACY,
                    targets=("overall",),
                    subgroup=subgroup_of(QUESTION_ONLY),
                ),
                Column(
                    title="gain over text only", metric=GAIN_OVER_TEXT_ONLY, targets=("overall",)
                ),
                Column(title="gain over question alone", metric=GAIN, targets=("overall",)),
                Column(title="closed", metric=ACCURACY, targets=("closed",)),
                Column(title="open", metric=ACCURACY, targets=("open",)),
            ),
        ),
    )

    data: Path
    """folder of shards with questions"""
    checkpoint: Path | None = None
    """folder of a checkpoint of recipes/vqa_finetune.py, or of a causal language model that was
    trained on questions
    """
    predictions: Path | None = None
    """answers of another system instead of a checkpoint: JSON lines with id, answer and optional
    score; samples of lmms-eval; or results.json of MedEvalKit
    """
    control_predictions: tuple[str, ...] = ()
    """answers of the same system to an exported control, such as text_only=FILE"""
    parser: str = "medvl-1"
    """rule that maps free text to options, of questions with options: medvl-1 or medevalkit"""
    export: Path | None = None
    """folder for the questions with images, and for those of text_only and image_swapped, as a data
    set of the hub with tasks of lmms-eval
    """
    train: Path | None = None
    """folder of shards with the training questions, from which the baselines are built, and with
    whose answers the checkpoint's vocabulary is compared; default --data, for corpora with all
    splits in one folder
    """
    split: str = "test"
    """split of the questions"""
    protocol: str = "medvl"
    """rules for comparing answers; `medvl` is ours, others reproduce published numbers"""
    examples: int = 6
    """correct and wrong answers on the page, per closed and open question type"""
    controls: tuple[str, ...] = CONTROLS
    """controls of a checkpoint to run: text_only, noise, image_swapped, question_reworded and, of
    models of two images, earlier_removed and earlier_swapped. Each takes as long as the questions
    themselves; none for no control
    """
    seed: int = 0
    """seed of swapped images and noise"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the checkpoint or the file of predictions; of the
        baselines below the exported questions.
        """
        if self.checkpoint is not None and self.predictions is not None:
            message = "give one of --checkpoint and --predictions"
            raise ConfigError(message, "conflict", field="checkpoint")
        if self.control_predictions and self.predictions is None:
            message = "--control-predictions needs --predictions; a checkpoint has --controls"
            raise ConfigError(message, "conflict", field="control_predictions")
        if self.checkpoint is None and self.predictions is None:
            if self.export is None:
                message = "give one of --checkpoint, --predictions and --export"
                raise ConfigError(message, "missing", field="checkpoint")
            return OutputFolder(options.out or self.export / "baselines", replace=options.replace)
        return options.folder(self.checkpoint or self.predictions, "vqa")

    def run(self, setup: Setup) -> Outcome:
        """Open the questions and the answers, and evaluate."""
        rules = get_protocol(self.protocol)
        if self.checkpoint is not None:
            rules.check_answer_types()
        shards = setup.source(self.data, *([] if self.checkpoint is None else [self.checkpoint]))
        folders = [self.data] if self.train is None else [self.train, self.data]
        alone = self.train is None or self.train.resolve() == self.data.resolve()
        questions = question_data([shards] if alone else [ShardSource(folders[0]), shards])
        setup.settle(questions=questions.fingerprint)
        elsewhere = questions_beside(folders)
        if self.export is not None:
            self._export(shards, self.export)
        entries = questions_in_split(shards, self.split)
        if self.checkpoint is not None:
            answers = self._from_checkpoint(self.checkpoint, shards, rules, setup)
        else:
            answers = self._from_files([entry.question for entry in entries])
        result = evaluate_answers(
            questions,
            answers.predictions,
            protocol=rules,
            split=self.split,
            vocabulary=answers.vocabulary,
            elsewhere=elsewhere,
            controls=answers.controls,
            resamples=setup.resamples,
            inputs=answers.inputs,
        )
        positions = {entry.question.id: entry.image for entry in entries}
        page = functools.partial(
            write_vqa_page,
            result,
            pixels=lambda name: shards.pixels(positions[name], color=True),
            explain=answers.explain,
            examples=self.examples,
        )
        return Outcome(
            result=result,
            model=answers.name,
            data=shards.manifest,
            page=page,
            table=result.table(),
        )

    def _from_checkpoint(
        self, checkpoint: Path, shards: ShardSource, rules: VQAProtocol, setup: Setup
    ) -> _Answers:
        advice = "fine-tune it with recipes/vqa_finetune.py, or causal_lm_mimic.py questions"
        model: VQA | CausalLM = setup.model(checkpoint, (VQA, CausalLM), advice)
        # The other views of a writer are those of a study, which questions share.
        inputs = dataclasses.replace(model.inputs, other_views=0)
        source = QuestionSource(
            shards,
            self.split,
            () if isinstance(model, CausalLM) else model.config.answers,
            rules.normalize,
            earlier=inputs.prior_image,
        )
        train = shards if self.train is None else ShardSource(self.train)
        color = color_for(shards, model.transform)

        def answers(of: Source) -> Predictions:
            loader = setup.loader(of, model, sections=("question",), inputs=inputs)
            answering = WrittenAnswers(model) if isinstance(model, CausalLM) else model
            return answer_questions(answering, cast("QuestionLoader", loader))

        controls = control_sources(
            source, train, color=color, seed=self.seed, names=check_controls(self.controls)
        )
        name = model.name if isinstance(model, CausalLM) else model.fusion_model.name
        return _Answers(
            predictions=answers(source),
            controls={name: answers(each) for name, each in controls.items()},
            name=f"{name} ({checkpoint})",
            inputs={"checkpoint": checkpoint_sha256(checkpoint)},
            vocabulary=None if isinstance(model, CausalLM) else model_vocabulary(model, rules),
            # attention maps are of one image, and of fusion-encoders
            explain=None
            if isinstance(model, CausalLM) or model.config.earlier_image
            else functools.partial(explain, model, source),
        )

    def _from_files(self, questions: Sequence[Question]) -> _Answers:
        if self.predictions is None:
            return _Answers(predictions=None, name="", inputs={})
        files = {MODEL: self.predictions, **self._control_files()}
        answers = {
            name: with_options(read_answers(file, questions), questions, self.parser)
            for name, file in files.items()
        }
        return _Answers(
            predictions=answers.pop(MODEL),
            name=str(self.predictions),
            inputs={"predictions": sha256(self.predictions)},
            controls=answers,
        )

    def _control_files(self) -> dict[str, Path]:
        files = {}
        for text in self.control_predictions:
            name, _, file = text.partition("=")
            if name not in CONTROLS or not file:
                message = f"expected {', '.join(CONTROLS)} with =FILE, got {text!r}"
                raise ConfigError(message, "malformed", field="control_predictions")
            files[name] = Path(file)
        return files

    def _export(self, shards: ShardSource, folder: Path) -> None:
        kinds = {each.question.kind for each in questions_in_split(shards, self.split)}
        earlier = DIFFERENCE in kinds and bool((prior_positions(shards) != NO_PRIOR).any())
        source = QuestionSource(shards, self.split, (), str, earlier=earlier)
        train = shards if self.train is None else ShardSource(self.train)
        controls = control_sources(
            source, train, color=True, seed=self.seed, names=(TEXT_ONLY, SWAPPED)
        )
        name = re.sub(r"\W+", "_", shards.manifest.corpus)
        export_questions({self.split: source, **controls}, folder, name)

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the accuracy, and the gains over the controls of `GAINS` and over the question
        alone, by type of question.
        """
        credit_N, floor_N, *control_KN = (
            np.array([number(line.get(f"{system}_credit")) for line in lines])
            for system in (MODEL, QUESTION_ONLY, *GAINS)
        )
        types = type_masks(np.array([bool(line["closed"]) for line in lines]))
        masks = types | attribute_masks([Question.from_json(line) for line in lines])
        groups = [masked_means(ACCURACY, credit_N, masks)]
        if all(MODEL in line for line in lines):
            questions = [Question.from_json(line) for line in lines]
            groups += difference_metrics(questions, [str(line[MODEL] or "") for line in lines])
        for gain, control_N in zip(GAINS.values(), control_KN, strict=True):
            if not np.isnan(control_N).all():
                groups.append(masked_means(gain, credit_N - control_N, masks))
        if np.isnan(floor_N).all():
            return groups
        return [*groups, masked_means(GAIN, credit_N - floor_N, types)]

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "QuestionAnswering":
        """Fine-tune the checkpoint with the recipe for questions, and return its evaluation."""
        open_source(trial.data, [trial.origin])  # refuses its patients before the fine-tuning
        return cls(checkpoint=trial.finetuned(), data=trial.data, train=trial.data.parent / "train")
