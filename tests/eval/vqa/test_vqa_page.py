"""HTML page of a VQA evaluation: content, escaping, no external resources, examples and
explanations.
"""

import argparse
import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import tiny_model, tiny_tokenizer
from helpers.html_pages import Reader, check_resources, read
from helpers.mimic_files import textured
from helpers.script_modules import load_script
from helpers.vqa_corpora import rad_row, write_image

from medvl.cli import main as cli
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.questions import vqa_rad
from medvl.data.images.codecs import encode_jpeg
from medvl.data.loading.loader import Loader
from medvl.data.loading.studies import QuestionSource
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, ImageError
from medvl.eval import VQAData, evaluate_answers, normalize_answer, run_evaluation
from medvl.eval.core.open import open_for_evaluation
from medvl.eval.core.results import PageHeader
from medvl.eval.vqa.accuracy import VQAResult
from medvl.eval.vqa.controls import CONTROLS, EARLIER_REMOVED, EARLIER_SWAPPED, control_of
from medvl.eval.vqa.evaluation import QuestionAnswering, write_vqa_page
from medvl.eval.vqa.examples import choose_examples, explain
from medvl.eval.vqa.predictions import Prediction, answer_questions, question_data
from medvl.models import VQA, save
from medvl.models.downstream.vqa.attention import question_attention
from medvl.models.downstream.vqa.decoder import DecoderConfig

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>&"
ANSWERS = ("yes", "no", "left", "right", "two")
KINDS = {
    "PRES": ("Is there a mass?", "Yes"),
    "COUNT": ("How many masses?", "two"),
    "POS": ("Where is it?", "left"),
}


def question_rows(start: int) -> list[dict[str, Any]]:
    """Twelve questions about six images; a closed and two open types, and one with an answer
    that train lacks.
    """
    rows = []
    for number in range(12):
        kind = ("PRES", "COUNT", "POS")[number % 3]
        question, answer = KINDS[kind]
        closed = "CLOSED" if kind == "PRES" else "OPEN"
        image = f"synpic{number % 6}.jpg"
        rows.append(
            rad_row(start + number, image, question, answer, question_type=kind, answer_type=closed)
        )
    return rows


def write_corpus(root: Path) -> Path:
    test = [
        *question_rows(100),
        rad_row(200, "synpic0.jpg", f"{HOSTILE}?", f"{HOSTILE}", image_organ="HEAD"),
    ]
    (root / "trainset.json").write_text(json.dumps(question_rows(0)))
    (root / "testset.json").write_text(json.dumps(test))
    for number in range(6):
        write_image(root / "images" / f"synpic{number}.jpg", number)
    return root


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, its shards, and the checkpoint of a random model."""
    home = tmp_path_factory.mktemp("page")
    deid = Deidentifier(bytes(32))
    plan = vqa_rad.VQARAD(root=write_corpus(home)).plan(deid)
    write_shards(
        plan, deid, ShardRun(out=home / "shards", workers=1), ShardOptions(keep_textless=True)
    )
    (home / "run" / "best").mkdir(parents=True)
    save(VQA.on(tiny_model("dual_stream", tiny_tokenizer()), ANSWERS).eval(), home / "run" / "best")
    return home


@pytest.fixture(scope="module")
def model(home: Path) -> VQA:
    from medvl import load

    loaded = load(home / "run" / "best")
    assert isinstance(loaded, VQA)
    return loaded


@pytest.fixture(scope="module")
def source(home: Path) -> QuestionSource:
    return QuestionSource(ShardSource(home / "shards" / "mixed"), "test", ANSWERS, normalize_answer)


@pytest.fixture(scope="module")
def result(model: VQA, source: QuestionSource) -> VQAResult:
    answers = answer_questions(model, open_questions(model, source, 8))
    for n, name in enumerate(
        sorted(answers)
    ):  # replace some answers of the random model by right ones
        question = next(entry.question for entry in source.questions if entry.question.id == name)
        if n % 2 and question.id != "200":
            answers[name] = Prediction(normalize_answer(question.answer), score=0.75)
    return evaluate_answers(
        question_data([source.source]), answers, resamples=20, inputs={"checkpoint": "ab" * 32}
    )


UNNAMED = PageHeader(model="", data="")


def open_questions(model: VQA, source: QuestionSource, batch: int) -> Loader:
    return open_for_evaluation(
        source, model.transform, model.tokenizer, batch=batch, workers=0, sections=("question",)
    )


def pixels_of(source: QuestionSource) -> Any:
    positions = {entry.question.id: entry.image for entry in source.questions}
    return lambda name: source.source.pixels(positions[name], color=True)


@pytest.fixture(scope="module")
def page(
    result: VQAResult, model: VQA, source: QuestionSource, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write_vqa_page(
        result,
        tmp_path_factory.mktemp("out") / "new" / "index.html",
        PageHeader(model="dual_stream", data="", date="2026-01-31"),
        pixels=pixels_of(source),
        explain=functools.partial(explain, model, source),
    )


def images(reader: Reader) -> list[dict[str, str]]:
    return [attributes for tag, attributes in reader.tags if tag == "img"]


def test_page_shows_data_protocol_and_hashes(page: Path, result: VQAResult) -> None:
    text = "\n".join(read(page).text)
    for expected in (
        "Visual question answering: dual_stream",
        "vqa-rad, official split, test: 13 questions about 6 images",
        "2026-01-31",
        "medvl, version 1",
        f"vqa-rad, official split, test (sha256 {str(result.results.inputs['questions'])[:12]})",
        f"3 of train (sha256 {str(result.results.inputs['vocabulary'])[:12]})",
        f"dual_stream (sha256 {'ab' * 6})",
        "equal to the data set's answer, after normalization (medvl-2)",
        "by the data set's own field",
        "95%, 20 resamples of images, seed 0",
        "not for clinical use",
    ):
        assert expected in text


def test_page_shows_every_row_with_all_baselines(page: Path, result: VQAResult) -> None:
    text = read(page).text
    start = text.index("By question type, organ and side")
    columns = [
        "Model", "Always yes", "Always no", "Most frequent answer", "Most frequent of its type",
        "Same question in train", "Question-only model", "Questions",
    ]  # fmt: skip
    start = text.index("Questions", start)
    assert [word for word in text[start - 9 : start + 1] if not word[0].isdigit()] == columns
    for group in ("kind: PRES", "kind: COUNT", "kind: POS", "organ: CHEST", "organ: HEAD"):
        position = text.index(group, start)
        row = result.results.row("accuracy", group)
        assert text[position + 1] == f"{row.value:.3f}"
        assert text[position + 2] == f"[{row.low:.3f}, {row.high:.3f}]"
        always = result.results.row("accuracy", group, "baseline: always_yes")
        assert text[position + 3] == f"{always.value:.3f}"
    for target, n in (("overall", 13), ("closed", 4), ("open", 9)):
        assert f"{target.capitalize()} ({n})" in text
        row = result.results.row("accuracy", target)
        assert f"{row.value:.3f}" in text


def test_page_has_no_scripts_or_external_resources(page: Path) -> None:
    check_resources(page)


def test_html_in_questions_and_answers_is_escaped(page: Path) -> None:
    reader = read(page)
    assert f"{HOSTILE}?" in reader.text
    assert HOSTILE in reader.text
    assert "script" not in {tag for tag, _ in reader.tags}
    assert all(image["src"].startswith("data:") for image in images(reader))


def test_cards_show_image_question_answers_and_both_maps(
    page: Path, result: VQAResult, model: VQA, source: Any
) -> None:
    reader = read(page)
    assert [
        line
        for line in reader.text
        if line in ("Correct, closed", "Correct, open", "Wrong, closed", "Wrong, open")
    ]
    chosen = choose_examples(result)
    right_N = result.credits["model"] >= 1
    of_kind = Counter(
        zip(right_N.tolist(), [q.answer_type for q in result.data.questions], strict=True)
    )
    assert {key: len(indices) for key, indices in chosen.items() if indices} == {
        k: min(6, n) for k, n in of_kind.items()
    }
    count = sum(map(len, chosen.values()))
    kinds = Counter(image["alt"].split(" ")[0].rstrip(":") for image in images(reader))
    assert kinds == {"Accuracy": 1, "the": count, "attention": 2 * count}
    assert sum("heat map (Summary token)" in image["alt"] for image in images(reader)) == count
    question = result.data.questions[chosen[False, "open"][0]]
    start = reader.text.index("Wrong, open")
    explanation = explain(model, source, [question.id])[question.id]
    prediction = result.systems["model"][question.id]
    card = reader.text[start + 1 : reader.text.index(f"id {question.id}")]
    assert card[0] == question.question
    assert card[card.index("True answer") + 1] == question.answer
    assert prediction.answer in card
    assert f"{prediction.score:.2f}" in card
    others = [answer for answer, _ in explanation.answers if answer != prediction.answer]
    below = card[card.index(prediction.answer, card.index("True answer") + 2) :]
    assert [line for line in below if line in others] == others


def test_explanations_equal_the_outputs_of_the_model(model: VQA, source: QuestionSource) -> None:
    model.train()
    rows = (1, 5, next(n for n, entry in enumerate(source.questions) if entry.question.id == "200"))
    ids = [source.questions[row].question.id for row in rows]
    explanations = explain(model, source, ids, answers=3)
    assert model.training
    model.eval()
    assert set(explanations) == set(ids)
    (batch,) = open_questions(model, source, 13)
    with torch.no_grad():
        logits_BV = model.answer_logits(batch)
        maps = question_attention(model.fusion_model, batch)
    for row in rows:
        one = explanations[source.questions[row].question.id]
        order = logits_BV[row].argsort(descending=True).tolist()
        assert [answer for answer, _ in one.answers] == [ANSWERS[index] for index in order[:3]]
        assert one.answers[0][1] == pytest.approx(float(logits_BV[row].max().sigmoid()), abs=1e-4)
        right = normalize_answer(source.questions[row].question.answer)
        assert one.rank == (order.index(ANSWERS.index(right)) + 1 if right in ANSWERS else None)
        assert one.transform == model.transform
        for (_, map_hw), map_BP in zip(one.maps, (maps.pooled_BP, maps.words_BP), strict=True):
            assert map_hw.shape == maps.grid == (4, 4)
            np.testing.assert_allclose(map_hw.ravel(), map_BP[row], rtol=1e-3, atol=1e-5)
    assert explanations["200"].rank is None


def test_scores_of_a_decoder_are_its_likelihoods(source: QuestionSource) -> None:
    decoder = DecoderConfig(layers=1, heads=2, intermediate=32)
    model = VQA.on(
        tiny_model("dual_stream", tiny_tokenizer()), ANSWERS, head="ranking", decoder=decoder
    ).eval()
    predictions = answer_questions(model, open_questions(model, source, 13))
    for name, one in explain(model, source, ["100", "101"], answers=len(ANSWERS)).items():
        answer, score = one.answers[0]
        assert (answer, score) == (
            predictions[name].answer,
            pytest.approx(predictions[name].score, rel=1e-3),
        )
        assert 0 < sum(score for _, score in one.answers) < 1
        assert len(one.maps) == 2


def test_question_with_an_unreadable_image_is_not_explained(
    model: VQA,
    source: QuestionSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pixels = source.pixels

    def broken(position: int, color: bool = False) -> np.ndarray:
        if position == 0:
            raise ImageError("damaged", "truncated")
        return pixels(position, color)

    monkeypatch.setattr(source, "pixels", broken)
    ids = [source.questions[position].question.id for position in (0, 1)]
    assert set(explain(model, source, ids)) == {ids[1]}
    assert f"question {ids[0]} is not explained" in caplog.text


def test_page_without_a_checkpoint_shows_images_and_answers(
    result: VQAResult, source: Any, tmp_path: Path
) -> None:
    path = write_vqa_page(
        result,
        tmp_path / "page.html",
        PageHeader(model="answers.jsonl", data=""),
        pixels=pixels_of(source),
    )
    reader = read(path)
    alternatives = [image["alt"] for image in images(reader)]
    shown = sum(map(len, choose_examples(result).values()))
    assert (
        sum(alternative.startswith("the image of question") for alternative in alternatives)
        == shown
    )
    assert not [alternative for alternative in alternatives if alternative.startswith("attention")]
    assert "Heatmaps show" not in "\n".join(reader.text)
    assert "Date" not in reader.text
    bare = read(write_vqa_page(result, tmp_path / "bare.html", UNNAMED))
    assert len(images(bare)) == 1
    assert "True answer" in bare.text


@pytest.mark.parametrize(
    ("score", "shown"), [(0.25, True), (1, True), (-3.5, False), ("high", False), (None, False)]
)
def test_scores_outside_of_zero_to_one_are_not_drawn(
    source: Any, tmp_path: Path, score: Any, shown: bool
) -> None:
    answers = {"100": Prediction("yes", score=score)}
    result = evaluate_answers(question_data([source.source]), answers, resamples=5)
    page = write_vqa_page(result, tmp_path / "page.html", UNNAMED).read_text()
    assert ('class="share"' in page) == shown


def test_page_without_predictions_shows_the_baselines(
    source: QuestionSource, tmp_path: Path
) -> None:
    result = evaluate_answers(question_data([source.source]), resamples=5)
    text = read(write_vqa_page(result, tmp_path / "page.html", UNNAMED)).text
    assert "Visual question answering: baselines without images" in text
    assert "Question-only model, overall" in text
    assert "Model" not in text
    assert "Correct and wrong answers" not in text


def test_unreadable_images_are_left_out(result: VQAResult, tmp_path: Path, caplog: Any) -> None:
    def missing(name: str) -> np.ndarray:
        raise FileNotFoundError(2, "no such file")

    reader = read(write_vqa_page(result, tmp_path / "page.html", UNNAMED, pixels=missing))
    assert len(images(reader)) == 1
    assert "is not shown: it could not be read" in caplog.text


def test_page_counts_unanswered_questions_and_names_the_flaw(
    source: QuestionSource, tmp_path: Path
) -> None:
    data = question_data([source.source])
    text = read(
        write_vqa_page(evaluate_answers(data, {}, resamples=5), tmp_path / "page.html", UNNAMED)
    ).text
    assert "13 questions, which count as wrong" in text
    assert text.count("(no answer)") == 10  # six open ones and four closed ones
    published = read(
        write_vqa_page(
            evaluate_answers(data, {}, protocol="mevf", resamples=5),
            tmp_path / "mevf.html",
            UNNAMED,
        )
    ).text
    assert "Not comparable" in published
    assert "includes freeform questions only" in published


def test_page_is_reproducible(
    page: Path, result: VQAResult, model: VQA, source: QuestionSource, tmp_path: Path
) -> None:
    repeated = write_vqa_page(
        result,
        tmp_path / "index.html",
        PageHeader(model="dual_stream", data="", date="2026-01-31"),
        pixels=pixels_of(source),
        explain=functools.partial(explain, model, source),
    )
    assert repeated.read_bytes() == page.read_bytes()


def many(result: VQAResult, count: int = 400) -> VQAResult:
    """Return a result with correct and wrong answers of eight question types, some of them rare."""
    first = result.data.questions[0]
    kinds = ["PRES"] * 13 + ["A", "B", "C", "D", "E", "F", "G"]
    questions = tuple(
        dataclasses.replace(
            first, id=str(n), kind=kinds[n % 20], answer_type=("closed", "open")[n % 3 == 0]
        )
        for n in range(count)
    )
    data = VQAData("d", "s", questions, tuple(map(str, range(count))))
    credit_N = np.array([(0.0, 0.4, 1.0, 1.0)[n % 4] for n in range(count)])
    return dataclasses.replace(result, data=data, credits={"model": credit_N})


def test_examples_are_random_and_alternate_between_question_types(result: VQAResult) -> None:
    large = many(result)
    chosen = choose_examples(large, each=8)
    assert chosen == choose_examples(large, each=8)
    assert chosen != choose_examples(large, each=8, seed=1)
    for (correct, answer_type), indices in chosen.items():
        assert len(set(indices)) == 8
        for index in indices:
            question = large.data.questions[index]
            assert question.answer_type == answer_type
            assert (large.credits["model"][index] == 1) == correct
        kinds = Counter(large.data.questions[index].kind for index in indices)
        all_kinds = {q.kind for n,
            q in enumerate(large.data.questions) if q.answer_type == answer_type
                      and (large.credits["model"][n] == 1) == correct}  # fmt: skip
        assert len(kinds) == min(8, len(all_kinds))
    first = Counter(
        large.data.questions[choose_examples(large, each=1, seed=seed)[True, "closed"][0]].kind
        for seed in range(60)
    )
    assert first["PRES"] > 20  # in random order, not alphabetical
    assert len(first) > 2
    assert not any(choose_examples(large, each=0).values())


def test_vqa_command_writes_the_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(home / "shards" / "mixed"), "--resamples", "5"]
    cli.main(
        [
            "eval",
            "vqa",
            "--checkpoint",
            str(home / "run" / "best"),
            *data,
            "--workers",
            "0",
            "--examples",
            "1",
        ]
    )
    out = home / "run" / "best" / "eval" / "vqa"
    assert str(out / "index.html") in capsys.readouterr().out
    reader = read(out / "index.html")
    assert any("heat map (Words)" in image["alt"] for image in images(reader))
    results = json.loads((out / "results.json").read_text())
    assert results["inputs"]["checkpoint"]
    assert results["config"]["vocabulary_size"] == len(
        ANSWERS
    )  # of the model: train has three answers
    assert any(text.startswith("5 of the model") for text in reader.text)
    subgroups = {each["subgroup"] for each in results["metrics"]}
    of_two_images = {EARLIER_REMOVED, EARLIER_SWAPPED}
    known = {control_of(name) for name in {*CONTROLS} - of_two_images}
    assert {name for name in subgroups if name.startswith("control: ")} == known
    assert "Gain over text only" in " ".join(reader.text)
    with pytest.raises(SystemExit):
        cli.main(
            [
                "eval",
                "vqa",
                "--checkpoint",
                str(home / "run" / "best"),
                *data,
                "--protocol",
                "pubmedclip",
            ]
        )
    assert "needs a predicted answer type" in capsys.readouterr().err

    answers = home / "answers.jsonl"
    answers.write_text(
        "".join(json.dumps({"id": str(100 + n), "answer": "yes"}) + "\n" for n in range(12))
    )
    same = ["--train", str(home / "shards" / "mixed")]  # the same folder is not read twice
    cli.main(
        [
            "eval",
            "vqa",
            "--predictions",
            str(answers),
            *data,
            *same,
            "--out",
            str(home / "from_file"),
        ]
    )
    reader = read(home / "from_file" / "index.html")
    assert f"Visual question answering: {answers}" in reader.text
    assert len(images(reader)) > 4
    assert "1 questions, which count as wrong" in reader.text
    for invalid in (
        [],
        ["--predictions", str(answers), "--checkpoint", str(home / "run" / "best")],
    ):
        with pytest.raises(SystemExit):
            cli.main(["eval", "vqa", *data, *invalid])
        assert "give one of --checkpoint" in capsys.readouterr().err


def test_scripts_write_the_page_with_images_of_the_corpus(
    home: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    scripts = load_script("vqa_corpora")

    samples = list(vqa_rad.VQARAD(root=home).plan(deid).iter_samples())
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"id": "100", "answer": "yes", "score": 0.5}))
    options = argparse.Namespace(
        predictions=answers,
        protocol="medvl",
        part="test",
        resamples=5,
        published_protocols=False,
        out=tmp_path / "out",
    )
    output = scripts.report(VQAData.from_samples(samples), options, scripts._pixels(samples))
    assert output.endswith("index.html")
    reader = read(tmp_path / "out" / "index.html")
    assert (
        sum(image["alt"].startswith("the image of question") for image in images(reader)) == 4 + 6
    )


def test_checkpoint_without_a_vqa_head_is_refused(home: Path, tmp_path: Path) -> None:
    save(tiny_model("dual_stream", tiny_tokenizer()), tmp_path)
    with raises(ConfigError, "unsupported", "checkpoint"):
        run_evaluation(QuestionAnswering(data=home / "shards" / "mixed", checkpoint=tmp_path))


def test_explanations_read_the_colors_that_answers_are_given_to(model: VQA, tmp_path: Path) -> None:
    """The best answer of an explanation has the score of the answer, also of a question about a
    colour image.
    """
    write_corpus(tmp_path)
    for number in range(6):
        channels = [textured(10 * number + channel, 70, 90) for channel in range(3)]
        (tmp_path / "images" / f"synpic{number}.jpg").write_bytes(
            encode_jpeg(np.stack(channels, axis=2), 95)
        )
    deid = Deidentifier(bytes(32))
    options = ShardOptions(keep_textless=True, color=True)
    write_shards(
        vqa_rad.VQARAD(root=tmp_path).plan(deid),
        deid,
        ShardRun(out=tmp_path / "shards", workers=1),
        options,
    )
    source = QuestionSource(
        ShardSource(tmp_path / "shards" / "mixed"), "test", ANSWERS, normalize_answer
    )
    loader = open_questions(model, source, 8)
    assert next(iter(loader)).image_BCHW.shape[1] == 3
    answers = answer_questions(model, loader)
    explained = explain(model, source, answers)
    scores = {
        name: pytest.approx(prediction.score, abs=1e-5) for name, prediction in answers.items()
    }
    assert {name: explanation.answers[0][1] for name, explanation in explained.items()} == scores
