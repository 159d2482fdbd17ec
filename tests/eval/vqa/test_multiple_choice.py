"""Multiple choice: scores of every kind of system, controls, orders, lengths and metrics."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.choice_shards import LEVELS, VALUES, choice_shards
from helpers.errors import raises
from helpers.fusion_samples import SIDE, tiny_model, tiny_tokenizer

import medvl
from medvl.data.annotations import Question
from medvl.data.loading.studies import questions_in_split
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_words
from medvl.errors import ConfigError
from medvl.eval import RunOptions, run_evaluation
from medvl.eval.core.metric_rows import measure
from medvl.eval.vqa import multiple_choice
from medvl.eval.vqa.choice_metrics import (
    choice_metrics,
    choose_option_threshold,
    fit_temperature,
    share_of_right,
)
from medvl.eval.vqa.controls import (
    CONTROLS,
    TEXT_ONLY,
    check_controls,
    control_sources,
    mean_image,
    reword_question,
    swapped_images,
)
from medvl.eval.vqa.multiple_choice import ChoiceSource, MultipleChoice, cyclic_scores
from medvl.eval.vqa.option_scores import OptionScorer, OptionScores, Templates, option_scorer
from medvl.eval.vqa.protocol import get_protocol
from medvl.models import VQA, save
from medvl.schema import Batch

OPTIONS = ("small left effusion", "no pneumothorax", "the heart is enlarged")
TOKENS = {"image_encoder": "timm:test_vit", "image_arguments": {"depth": 1}, "image_size": SIDE}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    if name == "convirt":
        model: Any = medvl.create_model(
            name, image_encoder="resnet_tiny", text_encoder="tiny_bert", tokenizer=tokenizer,
            image_size=SIDE, frozen_text_layers=0, projection_dim=8,
        )  # fmt: skip
    elif name == "vqa":
        model = VQA.on(tiny_model("dual_stream", tokenizer), ["Left", "right", "no pneumothorax"])
    elif name == "r2gen":
        model = medvl.create_model(
            name, **TOKENS, width=16, layers=1, heads=2, intermediate=16, memory_heads=2, slots=1, views=1,
            tokenizer=tokenizer,
        )  # fmt: skip
    else:
        model = tiny_model(name, tokenizer)
    return model.eval()


def question(*options: str, right: int = 0) -> Question:
    return Question(
        id="1", question="Which one?", answer=options[right], answer_type="closed", split="test",
        options=options, right=(right,),
    )  # fmt: skip


def batch_of(model: Any, questions: Sequence[Question], seed: int = 0) -> Batch:
    pixels = np.random.default_rng(seed).integers(0, 256, (2, 1, SIDE, SIDE), dtype=np.uint8)
    texts = [each.question for each in questions]
    ids_BT, mask_BT = model.tokenize(texts)
    return Batch(
        keys=[str(n) for n in range(len(texts))], image_BCHW=torch.from_numpy(pixels),
        ids_BT=ids_BT, mask_BT=mask_BT, labels_BL=torch.empty(len(texts), 0), texts=texts,
        image_of_B=torch.tensor([0, 1, 1]),
    )  # fmt: skip


@pytest.fixture
def asked() -> list[Question]:
    return [question(*OPTIONS), question(*OPTIONS[::-1]), question("left", "right")]


@pytest.mark.parametrize("name", ["convirt", "albef"])
@torch.no_grad()
def test_statements_are_compared_with_each_image_alone(name: str, asked: list[Question]) -> None:
    model = make_model(name)
    templates = Templates({"": ["{option}.", "{question} {option}"]})
    scorer = option_scorer(model, templates, get_protocol("medvl"))
    assert scorer.name == ("statement" if name == "convirt" else "matching")  # of both, albef's
    batch = batch_of(model, asked)
    found = scorer.score(batch, asked)
    for row, each in enumerate(asked):
        image_BCHW = batch.image_BCHW[[0, 1, 1][row]][None]
        for place, option in enumerate(each.options):
            values = []
            for text in (f"{option}.", f"Which one? {option}"):
                if name == "convirt":
                    images, texts = model.embed_images(image_BCHW), model.embed_texts([text])
                    values.append(float(model.similarity(images, texts)))
                else:
                    text_tokens = model.text_tokens(*model.tokenize([text]))
                    logits = model.match(text_tokens, model.image_tokens(image_BCHW))[0]
                    values.append(float(logits[1] - logits[0]))
            assert found[row].scores[place] == pytest.approx(np.mean(values), abs=1e-4)


@torch.no_grad()
def test_answers_of_a_model_are_found_by_their_normal_form(asked: list[Question]) -> None:
    model = make_model("vqa")
    scorer = option_scorer(model, Templates(), get_protocol("medvl"))
    found = scorer.score(batch_of(model, asked), asked)
    logits_BV = model.answer_logits(batch_of(model, asked))
    assert found[2].scores == pytest.approx(logits_BV[2, :2].tolist(), abs=1e-5)
    assert np.isnan(found[0].scores).tolist() == [True, False, True]


def log_probability(model: Any, read: Any, ids: list[int]) -> float:
    """Return the log-probability of words by scoring each next one alone."""
    total = 0.0
    for place in range(len(ids)):
        shown = torch.tensor([[*ids[:place], 0]])
        total += float(model.score_words(shown, read)[0, place].log_softmax(0)[ids[place]])
    return total


@torch.no_grad()
def test_likelihood_of_a_report_generator(asked: list[Question]) -> None:
    model = make_model("r2gen")
    scorer = option_scorer(model, Templates({"": ["{option}."]}), get_protocol("medvl"))
    batch = batch_of(model, asked)
    found = scorer.score(batch, asked)
    for row, place in ((0, 0), (1, 0), (2, 1)):
        text = f"{asked[row].options[place]}."
        ids = model.tokenizer([text])[0][0].tolist()[1:-1]
        image = batch.image_BCHW[[0, 1, 1][row]][None]
        read = model.read(dataclasses.replace(batch.to("cpu"), image_of_B=None, image_BCHW=image))
        expected = log_probability(model, read.rows(torch.tensor([0])), ids)
        assert found[row].scores[place] == pytest.approx(expected, abs=1e-3)
        assert found[row].tokens[place] == len(ids)
        assert found[row].characters[place] == len(text)


@torch.no_grad()
def test_letters_and_texts_of_a_causal_language_model(
    tmp_path: Path, asked: list[Question]
) -> None:
    sizes = {"vocab_size": 80, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    language = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen2", **sizes)
    )
    language.save_pretrained(tmp_path)
    words = [*OPTIONS, "left right A B C . Question : Which one ? Options Answer"]
    model: Any = medvl.create_model(
        "causal_lm", tokenizer=train_words(words, min_frequency=1), language_weights=str(tmp_path),
        lora_language=2, **TOKENS,
    ).eval()  # fmt: skip
    batch = batch_of(model, asked)
    letters = option_scorer(model, Templates(), get_protocol("medvl"), "letter")
    assert letters.sees_all_options
    found = letters.score(batch, asked)
    assert [len(each.scores) for each in found] == [3, 3, 2]
    assert np.isfinite(found[0].scores).all()
    assert len(set(found[0].scores)) == 3
    texts = option_scorer(model, Templates(), get_protocol("medvl"))
    assert (texts.name, texts.sees_all_options) == ("likelihood", False)
    encoded: list[int] = []
    model.image_encoder.register_forward_hook(lambda _, images, __: encoded.append(len(images[0])))
    first, second = (
        texts.score(batch, asked),
        texts.score(batch, [asked[0], question(*OPTIONS), asked[2]]),
    )
    assert encoded == [2, 2]  # once for all questions of an image
    assert first[1].scores[::-1] == pytest.approx(second[1].scores, abs=1e-4)
    expected = model.score_options(
        batch.image_BCHW[batch.image_of_B], batch.texts, [each.options for each in asked],
        length="sum",
    )  # fmt: skip
    for given, own in zip(first, expected, strict=True):
        assert given.scores == pytest.approx(own.tolist(), abs=1e-3)
    other = dataclasses.replace(batch, texts=["Which Answer ?", *batch.texts[1:]])
    assert texts.score(other, asked)[0].scores != pytest.approx(first[0].scores, abs=1e-6)


def test_scores_that_a_system_lacks_are_refused() -> None:
    with raises(ConfigError, "unsupported", "score"):
        option_scorer(make_model("convirt"), Templates(), get_protocol("medvl"), "letter")
    wrong = ("{question}", "{option} {other}", "{option", "{}", "{option[0]}", "{option.name}",
             "{option!r}", "{option:{question}}", "option")  # fmt: skip
    for template in wrong:
        with raises(ConfigError, "malformed", "templates"):
            Templates({"": [template]})


def test_ties_share_the_credit_and_unanswered_is_wrong() -> None:
    assert share_of_right([1, 1, 0], [1]) == 0.5
    assert share_of_right([1, 1, 0], [2]) == 0
    assert share_of_right([0, 0, 2], [2]) == 1
    assert share_of_right([0, float("nan"), 2], [2]) == 0
    assert share_of_right([1, 2, 3, 0], [1, 2]) == 1
    assert share_of_right([2, 2, 3, 2], [1, 2]) == pytest.approx(1 / 3)
    assert share_of_right([3, 2, 2, 2], [1, 2]) == 0


def line(scores: Sequence[float | None], right: int, **fields: Any) -> dict[str, Any]:
    entry = {"scores": scores, "tokens": [1, 4], "characters": [10, 2]}
    return {
        "kind": "a",
        "options": ["x", "y"],
        "right": [right],
        "scores": {"main": entry},
        **fields,
    }


def metrics(
    lines: list[dict[str, Any]], length: str = "sum", less: bool = False, **config: Any
) -> dict[str, float]:
    groups = choice_metrics(lines, {"length": length, "less_text_only": less, **config})
    ones = np.ones((len(lines), 1))
    return {
        row.name: float(value)
        for group in groups
        for row, value in zip(group.rows, group.statistic(ones)[0], strict=True)
    }


def test_metrics_of_lengths_less_text_only_and_orders() -> None:
    lines = [line([-2, -4], 0), line([-2, -4], 1)]
    found = metrics([lines[0]])
    assert found["accuracy/overall"] == 1
    assert found["accuracy/overall (length: token)"] == 0  # -2 and -1
    assert found["accuracy/overall (length: character)"] == 1
    assert metrics([lines[0]], "token")["accuracy/overall"] == 0
    assert metrics(lines)["chance_corrected/overall"] == 0
    assert metrics(lines)["accuracy_by_letter/macro"] == 0.5

    shuffled = [{"scores": [-1.0, -2.0]}, {"scores": [-2.0, -1.0]}]
    found = metrics([line([-2, -4], 0, shuffled=shuffled), lines[0]])
    assert found["options_shuffled/accuracy"] == 0.75
    assert found["options_shuffled/agreement"] == 0.5

    both = line([-2, -4], 1)
    both["scores"]["text_only"] = {"scores": [-1, -5]}
    assert metrics([both])["accuracy/overall"] == 0
    assert metrics([both], less=True)["accuracy/overall"] == 1
    assert metrics([both])["gain_over_text_only/overall"] == 0
    assert metrics([both], less=True)["accuracy/overall (control: text_only)"] == 0.5
    both["shuffled"] = [{"scores": [-2.0, -4.0]}]  # the subtraction is of one order alone
    assert metrics([both], less=True)["options_shuffled/agreement"] == 1
    lost = line([None, -4], 1)
    assert metrics([lost])["unanswered/overall"] == 1
    lost["shuffled"] = [{"scores": [None, -4.0]}]
    assert metrics([lost])["options_shuffled/agreement"] == 1


def test_means_over_cyclic_orders_cancel_a_preference_for_a_letter() -> None:
    options = {"1": ["left", "right", "none"], "2": ["yes", "no"]}
    worth = {"left": 1.0, "right": 0.5, "none": 0.0, "yes": 0.2, "no": 0.3}
    calls = []

    def score(shown: Any) -> dict[str, OptionScores]:
        calls.append(dict(shown))
        return {
            name: OptionScores([worth[o] + 2 * n for n, o in enumerate(several)])
            for name, several in shown.items()
        }

    assert int(np.argmax(score(options)["1"].scores)) == 2  # the last letter
    calls.clear()
    found = cyclic_scores(score, options)
    assert [call["1"] for call in calls] == [
        ["left", "right", "none"], ["right", "none", "left"], ["none", "left", "right"],
    ]  # fmt: skip
    assert [call["2"] for call in calls[:2]] == [["yes", "no"], ["no", "yes"]]
    for name, several in options.items():
        expected = np.zeros(len(several))
        for turn in range(len(several)):
            shown = np.roll(several, -turn).tolist()
            values = np.array([worth[o] + 2 * n for n, o in enumerate(shown)])
            log = np.log(np.exp(values) / np.exp(values).sum())
            expected += [log[shown.index(o)] / len(several) for o in several]
        np.testing.assert_allclose(found[name].scores, expected)
        assert several[int(np.argmax(found[name].scores))] == max(several, key=worth.__getitem__)


def several(scores: Sequence[float | None], *right: int, **fields: Any) -> dict[str, Any]:
    options = ["x", "y", "z", "u"]
    return {"kind": "a", "options": options, "right": [*right],
            "scores": {"main": {"scores": scores}}, **fields}  # fmt: skip


def test_several_right_options_are_scored_beside_single_ones() -> None:
    lines = [several([4, 3, 1, 0], 0, 1), several([4, 3, 1, 0], 0, 2), line([-2, -4], 0)]
    found = metrics(lines, threshold=0.0)
    assert found["accuracy/overall"] == 1  # of the third
    assert found["several_right/exact_count"] == 0.5
    assert found["several_right/option_auroc"] == (1 + 3 / 4) / 2
    assert found["several_right/exact"] == 0.5
    assert found["several_right/f1"] == 0.75
    assert "several_right/exact" not in metrics(lines)
    only = metrics([several([None, 3, 1, 0], 0, 1)], threshold=0.0)
    assert {name: only[f"several_right/{name}"] for name in ("exact_count", "option_auroc")} == {
        "exact_count": 0, "option_auroc": 0.5,
    }  # fmt: skip
    assert "accuracy/overall" not in only


def test_the_threshold_of_several_right_options_is_that_of_most_exact_matches() -> None:
    config = {"length": "sum", "less_text_only": False}
    lines = [several([9, 5, 1, 1], 0), several([5, 5, 1, 1], 0, 1), several([6, 1, 5, 0], 0, 2)]
    threshold = choose_option_threshold(lines, config)
    assert threshold is not None
    assert -2 < threshold < 2  # between relative scores of wrong and right options
    assert metrics(lines, threshold=threshold)["several_right/exact"] == 1
    assert choose_option_threshold(lines[:1], config) is None


def test_calibration_of_the_softmax_over_options() -> None:
    lines = [line([0, 0], 0), line([np.log(3), 0], 0), line([0, np.log(3)], 0)]
    found = metrics(lines)
    # 0.5 with half a credit; 0.75 twice, of which one is right
    assert found["choice_ece/overall"] == pytest.approx((0 + abs(1.5 - 1)) / 3)
    assert found["choice_brier/overall"] == pytest.approx((0.5 + 2 / 16 + 2 * 9 / 16) / 3)
    config = {"length": "sum", "less_text_only": False, "scale": 2.0}
    few = [line([1.0, 0], 0)] * 3 + [line([1.0, 0], 1)]
    temperature = fit_temperature(few, config)
    assert temperature == pytest.approx(2 / np.log(3), rel=1e-3)  # 3 of 4 are right
    scaled = metrics(few, scale=2.0, temperature=temperature)
    assert scaled["choice_ece/overall (temperature scaled)"] == pytest.approx(0, abs=1e-3)
    assert scaled["choice_ece/overall"] > 0.1
    assert fit_temperature([several([1, 0, 0, 0], 0, 1)], config) is None
    assert np.isnan(metrics([line([None, 0], 0)])["choice_ece/overall"])


class Brightness(OptionScorer):
    """Prefers the option that names the brightness of the image."""

    name = "statement"

    def score(self, batch: Batch, questions: Sequence[Question]) -> list[OptionScores]:
        values = batch.image_BCHW.float().mean(dim=(1, 2, 3))
        rows = range(len(batch)) if batch.image_of_B is None else batch.image_of_B.tolist()
        return [
            OptionScores(
                [-abs(float(values[row]) - VALUES[LEVELS.index(o.split()[0])]) for o in q.options]
            )
            for row, q in zip(rows, questions, strict=True)
        ]


def test_a_system_that_looks_loses_without_the_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shards = choice_shards()
    (tmp_path / "model").mkdir()
    save(make_model("convirt"), tmp_path / "model")
    monkeypatch.setattr(multiple_choice, "option_scorer", lambda *_: Brightness())
    evaluation = MultipleChoice(
        checkpoint=tmp_path / "model", data=shards / "test", train=shards / "train"
    )
    outcome, paths = run_evaluation(evaluation, RunOptions(workers=0, resamples=50))
    rows = {row.name: row for row in outcome.result.results.rows}
    assert rows["accuracy/overall"].value == 1
    assert rows["accuracy/overall (control: text_only)"].value == 0.25
    assert rows["accuracy/overall (control: noise)"].value == 0.25
    assert rows["accuracy/overall (control: image_swapped)"].value < 0.6
    assert rows["accuracy/overall (control: question_reworded)"].value == 1
    assert rows["gain_over_text_only/overall"].value == 0.75
    assert rows["gain_over_text_only/overall"].low > 0.4
    assert rows["accuracy/overall (baseline: most_frequent_letter)"].value == 0.25
    assert rows["options_shuffled/agreement"].value == 1
    assert outcome.result.results.config["left_out"] == 1
    page = next(path for path in paths if path.suffix == ".html").read_text()
    assert "Gain over text only" in page
    text = (paths[0].parent / "predictions.jsonl").read_text()
    lines = [json.loads(each) for each in text.splitlines()]
    assert {each["chosen"] == each["answer"] for each in lines} == {True}
    results = outcome.result.results  # medvl compare computes the same metrics from the lines
    again = measure(MultipleChoice.metric_groups(lines, results), len(lines), resamples=0)
    assert {row.name: row.value for row in again} == pytest.approx(
        {row.name: row.value for row in results.rows}, nan_ok=True
    )


def test_chosen_controls_alone_are_run_and_text_only_decodes_no_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = choice_shards()
    questions = ChoiceSource(ShardSource(shards / "test"), "test")
    names = check_controls(["question_reworded", "text_only"])
    assert names == ("text_only", "question_reworded")
    assert check_controls(CONTROLS) == CONTROLS
    assert check_controls(["none"]) == ()
    for wrong in (["none", "noise"], ["swapped"]):
        with raises(ConfigError, "unknown_name", "controls"):
            check_controls(wrong)
    train = ShardSource(shards / "train")
    controls = control_sources(questions, train, color=False, names=names)
    assert tuple(controls) == names
    monkeypatch.setattr(ShardSource, "pixels", None)
    assert {controls[TEXT_ONLY].pixels(place).shape for place in range(3)} == {(256, 256)}


def test_swapped_images_are_of_other_patients_and_the_mean_is_that_of_train() -> None:
    source = ShardSource(choice_shards() / "test")
    questions = questions_in_split(source, "test")
    image_of = swapped_images(source, questions, seed=3)
    assert image_of is not None
    assert sorted(image_of) == [*range(len(source))]
    assert all(place != other for place, other in enumerate(image_of))
    assert image_of == swapped_images(source, questions, seed=3)
    assert image_of != swapped_images(source, questions, seed=4)
    mean = mean_image(ShardSource(choice_shards() / "train"), color=False)
    assert mean.shape == (256, 256)
    assert mean[128, 128] == pytest.approx(np.mean(VALUES), abs=3)
    one = [each for each in questions if each.image == 0]
    assert swapped_images(source, one) is None


@pytest.mark.parametrize(
    ("question", "reworded"),
    [
        ("Is there a mass?", "Does this image show mass?"),
        ("Does this image show edema?", "Is there edema in this image?"),
        ("Which lobe is affected?", "Looking at this image, which lobe is affected?"),
        ("How many masses are there?", "What is the number of masses are there?"),
        ("Describe it.", "Regarding this image: Describe it."),
    ],
)
def test_questions_in_other_words(question: str, reworded: str) -> None:
    assert reword_question(question) == reworded
