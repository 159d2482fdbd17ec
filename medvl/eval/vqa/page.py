"""HTML page of a VQA evaluation: accuracy next to baselines, and examples with attention maps."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import PageHeader, format_value
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
from medvl.eval.vqa.baselines import QUESTION_ONLY
from medvl.eval.vqa.evaluate import ACCURACY, CEILING, GAIN, MODEL, TYPES, VQAResult, subgroup_of
from medvl.eval.vqa.examples import Explain, Pixels, choose_examples, example_cards

_NAMES: Mapping[str, str] = {
    MODEL: "Model",
    "always_yes": "Always yes",
    "always_no": "Always no",
    "majority": "Most frequent answer",
    "majority_by_kind": "Most frequent of its type",
    "question_lookup": "Same question in train",
    QUESTION_ONLY: "Question-only model",
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
    names.append(("Gain over the question-only model", (GAIN, "overall", "")))
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
        "Only the model uses "
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
    others = [system for system in result.systems if system != shown]
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
