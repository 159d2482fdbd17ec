"""Answers of outside models: files of harnesses, parsers of free text, and exported questions."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from helpers.choice_shards import choice_shards
from helpers.errors import raises

import medvl
from medvl.data.annotations import Question
from medvl.data.images.codecs import decode_image
from medvl.data.loading.studies import QuestionSource
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_words
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import RunOptions, run_evaluation
from medvl.eval.core.open import open_for_evaluation
from medvl.eval.vqa.accuracy import MODEL
from medvl.eval.vqa.controls import REWORDED
from medvl.eval.vqa.evaluation import QuestionAnswering
from medvl.eval.vqa.outside import parse_medevalkit, parse_option, prompt_of, read_answers
from medvl.models import save

OPTIONS = ("left lung", "right lung", "both lungs", "no finding")


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("B", 1),
        ("(C)", 2),
        ("B. right lung", 1),
        ("The answer is D.", 3),
        ("It is the right lung.", 1),
        ("Reasoning ... \\boxed{C}", 2),
        ("<think>A?</think><answer>B</answer>", 1),
        ("not left lung, right lung", 1),
        ("not the left lung", None),
        ("left lung or right lung", None),
        ("A shadow is seen.", None),
        ("There is no finding", 3),
        ("", None),
    ],
)
def test_free_text_is_one_option_or_none(text: str, option: int | None) -> None:
    assert parse_option(text, OPTIONS) == option


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("B", 1),
        ("The answer is: b", 1),
        ("So the answer is right lung. Sure.", 1),
        ("The left lungs", 0),  # the most similar option
        ("xyz", 0),  # no option at all
    ],
)
def test_every_text_is_an_answer_for_medevalkit(text: str, option: int) -> None:
    assert parse_medevalkit(text, OPTIONS) == option


def questions() -> list[Question]:
    return [
        Question(id=name, question="?", answer="yes", answer_type="closed", split="test")
        for name in ("a", "b")
    ]


def write(path: Path, content: Any, *, lines: bool = False) -> Path:
    rows = [json.dumps(row) for row in content] if lines else [json.dumps(content)]
    path.write_text("\n".join(rows))
    return path


def test_files_of_harnesses(tmp_path: Path) -> None:
    own = write(tmp_path / "a.jsonl", [{"id": "b", "answer": "no"}], lines=True)
    assert {name: p.answer for name, p in read_answers(own, questions()).items()} == {"b": "no"}

    samples = [
        {"doc_id": 1, "target": "yes", "resps": [["No"]], "filtered_resps": ["no"]},
        {"doc_id": 0, "target": "yes", "resps": [["Yes, so"]]},
    ]
    by_place = write(tmp_path / "samples.jsonl", samples, lines=True)
    assert {n: p.answer for n, p in read_answers(by_place, questions()).items()} == {
        "b": "no", "a": "Yes, so",
    }  # fmt: skip
    for place in (-1, 2, "1"):  # no place of two questions
        write(tmp_path / "samples.jsonl", [{**samples[0], "doc_id": place}, samples[1]], lines=True)
        with raises(EvaluationError, "missing", "question_id"):
            read_answers(by_place, questions())
    named = [{**samples[0], "doc": {"question_id": "a"}}]
    path = write(tmp_path / "named.jsonl", named, lines=True)
    assert read_answers(path, questions())["a"].answer == "no"
    kit = [{"question": "?", "answer": "yes", "response": "Yes."}, {"response": "no"}]
    path = write(tmp_path / "results.json", kit)
    assert [p.answer for p in read_answers(path, questions()).values()] == ["Yes.", "no"]

    for content, code in (
        ([{"response": "no"}], "missing"),
        ([{"response": 3}], "malformed"),
        ({"response": "no"}, "malformed"),
        (
            [{"response": "x", "question_id": "a"}, {"response": "y", "question_id": "a"}],
            "conflict",
        ),
    ):
        with raises(EvaluationError, code):
            read_answers(write(tmp_path / "results.json", content), questions())
    with raises(EvaluationError, "not_found", "predictions"):
        read_answers(tmp_path / "none.json", questions())


def test_exported_questions_come_back_as_answers(tmp_path: Path) -> None:
    """An outside model that names the brightness of the exported images."""
    shards = choice_shards()
    common = {"data": shards / "test", "train": shards / "train"}
    options = RunOptions(workers=0, resamples=20)
    run_evaluation(QuestionAnswering(**common, export=tmp_path / "out"), options)
    assert (tmp_path / "out/baselines/results.json").is_file()
    task = (tmp_path / "out/choices_test.yaml").read_text()
    assert "test_split: test" in task
    assert "doc_to_visual: !function utils.doc_to_visual" in task
    compile((tmp_path / "out/utils.py").read_text(), "utils.py", "exec")

    files = {}
    for split in ("test", "text_only", "image_swapped"):
        table = pyarrow.parquet.read_table(tmp_path / f"out/data/{split}-00000-of-00001.parquet")
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        assert features["image"] == {"_type": "Image"}
        rows = []
        for row in table.to_pylist():
            level = decode_image(row["image"]["bytes"], color=True).mean()
            place = int(np.abs(np.array([20, 90, 160, 240]) - level).argmin())
            words = ("black", "dark", "grey", "bright")[place]
            rows.append({"response": f"I see a {words} image.", "question_id": row["question_id"]})
            assert len(row["options"]) in (0, 4)
            assert ("A. " in row["prompt"]) == bool(row["options"])
        files[split] = write(tmp_path / f"{split}.json", rows)
    controls = tuple(f"{name}={files[name]}" for name in ("text_only", "image_swapped"))
    evaluation = QuestionAnswering(
        **common, predictions=files["test"], control_predictions=controls
    )
    outcome, _ = run_evaluation(evaluation, options)
    rows = {row.name: row for row in outcome.result.results.rows}
    assert rows["accuracy/overall"].value == pytest.approx(16 / 17)  # one question is yes or no
    assert rows["accuracy/overall (control: text_only)"].value == pytest.approx(4 / 17)
    assert rows["gain_over_text_only/overall"].value == pytest.approx(12 / 17)
    assert rows["accuracy/overall (control: image_swapped)"].value < 0.6


def test_options_of_the_command_that_do_not_fit(tmp_path: Path) -> None:
    shards = choice_shards() / "test"
    options = RunOptions(workers=0)
    with raises(ConfigError, "missing", "checkpoint"):
        run_evaluation(QuestionAnswering(data=shards), options)
    file = write(tmp_path / "a.jsonl", [{"id": "test0", "answer": "x"}], lines=True)
    wrong = QuestionAnswering(
        data=shards, train=choice_shards() / "train", predictions=file,
        control_predictions=("mean=x",),
    )  # fmt: skip
    with raises(ConfigError, "malformed", "control_predictions"):
        run_evaluation(wrong, options)
    without = dataclasses.replace(wrong, predictions=None, export=tmp_path / "out")
    with raises(ConfigError, "conflict", "control_predictions"):
        run_evaluation(without, options)
    unknown = QuestionAnswering(
        data=shards, train=choice_shards() / "train", predictions=file, parser="other"
    )
    with pytest.raises(EvaluationError):
        run_evaluation(unknown, options)


def test_prompts_list_options() -> None:
    question = Question(id="1", question="Which?", answer="b", answer_type="closed", split="test",
        options=("a", "b"), right=(1,))  # fmt: skip
    assert prompt_of(question, "Which?").split("\n")[1:3] == ["A. a", "B. b"]


def test_written_answers_of_a_causal_language_model_are_evaluated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    words = ["Which image is it ? Is an Question Answer black dark grey bright yes"]
    model: Any = medvl.create_model(
        "causal_lm", tokenizer=train_words(words, min_frequency=1), max_tokens=4, lora_language=0,
        image_encoder="timm:test_vit", image_arguments={"depth": 1}, image_size=32,
        language='{"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}',
    ).eval()  # fmt: skip
    (tmp_path / "model").mkdir()
    save(model, tmp_path / "model")
    shards = choice_shards()
    evaluation = QuestionAnswering(
        checkpoint=tmp_path / "model", data=shards / "test", train=shards / "train",
        controls=(REWORDED,),
    )  # fmt: skip
    outcome, _ = run_evaluation(evaluation, RunOptions(workers=0, resamples=5))
    found = outcome.result.systems
    source = QuestionSource(ShardSource(shards / "test"), "test", (), str)
    loader = open_for_evaluation(
        source, model.transform, model.tokenizer, batch=32, workers=0, sections=("question",)
    )
    [batch] = loader
    answers = model.answer(batch.image_BCHW[batch.image_of_B], batch.texts)
    assert [found[MODEL][q.id].answer for _, q in source.questions] == answers
    assert len(set(answers)) > 1
    assert all(0 <= each.score <= 1 for each in found[MODEL].values())
    assert found[REWORDED].keys() == found[MODEL].keys()
    results = outcome.result.results
    assert results.config["vocabulary_size"] is None
