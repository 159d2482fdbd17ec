"""Text metrics of answers to questions about the difference between two images."""

import dataclasses

import numpy as np
import pytest

from medvl.data.annotations import DIFFERENCE, Question
from medvl.eval.core.metric_rows import measure
from medvl.eval.report_generation.metrics import overlap_metrics
from medvl.eval.vqa.accuracy import MODEL, VQAResult, evaluate_answers, subgroup_of
from medvl.eval.vqa.evaluation import QuestionAnswering
from medvl.eval.vqa.predictions import QUESTION_ONLY, Prediction, VQAData

REFERENCES = ("the effusion is larger", "nothing has changed", "a nodule is added on the left")
ANSWERS = ("the effusion is gone", "nothing has changed", "edema is added")


def question(name: str, answer: str, kind: str, split: str = "test") -> Question:
    closed = answer in ("yes", "no")
    return Question(
        id=name,
        question="What has changed?",
        answer=answer,
        answer_type="closed" if closed else "open",
        kind=kind,
        split=split,
    )


@pytest.fixture(scope="module")
def result() -> VQAResult:
    asked = [question(str(n), text, DIFFERENCE) for n, text in enumerate(REFERENCES)]
    questions = (
        question("t", "nothing has changed", DIFFERENCE, "train"),
        question("p", "yes", "presence"),
        *asked,
    )
    data = VQAData("tiny", "official", questions, ("a", "b", "b", "c", "d"))
    answers = {str(n): Prediction(text) for n, text in enumerate(ANSWERS)}
    return evaluate_answers(data, answers | {"p": Prediction("yes")}, resamples=10)


def test_answers_about_differences_have_text_metrics(result: VQAResult) -> None:
    expected = {
        row.metric: row.value
        for row in measure(overlap_metrics(ANSWERS, REFERENCES), 3, resamples=0)
    }
    rows = {
        row.metric: row
        for row in result.results.rows
        if row.target == DIFFERENCE and not row.subgroup and row.metric in expected
    }
    assert rows.keys() == expected.keys()
    for metric, value in expected.items():
        np.testing.assert_allclose(rows[metric].value, value)
    assert 0 < rows["corpus_bleu_1"].value < 1
    # The question alone always gives the answer of train.
    floor = result.results.row("mean_rouge_l", DIFFERENCE, subgroup_of(QUESTION_ONLY))
    assert floor.value < rows["mean_rouge_l"].value
    assert "corpus bleu 4" in result.table()


def test_comparisons_pair_them_and_other_questions_have_none(result: VQAResult) -> None:
    lines = result.predictions()
    groups = QuestionAnswering.metric_groups(lines, result.results)
    values = {row.name: row.value for row in measure(groups, len(lines), resamples=0)}
    bleu = result.results.row("corpus_bleu_1", DIFFERENCE).value
    assert values["corpus_bleu_1/difference"] == pytest.approx(bleu)
    others = [{**line, "kind": "presence"} for line in lines]
    plain = measure(QuestionAnswering.metric_groups(others, result.results), 4, resamples=0)
    assert not any(row.metric.startswith("corpus_bleu") for row in plain)
    without = [{name: line[name] for name in line if name != MODEL} for line in lines]
    assert QuestionAnswering.metric_groups(without, dataclasses.replace(result.results))
