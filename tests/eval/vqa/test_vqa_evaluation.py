"""Evaluation of answers: vocabularies, denominators, baselines, protocols."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.errors import raises

import medvl
from medvl.data.annotations import Question
from medvl.data.corpora.questions import vqa_rad
from medvl.data.privacy import Deidentifier
from medvl.errors import EvaluationError
from medvl.eval import AnswerVocabulary, VQAData, VQAProtocol, evaluate_answers, read_results
from medvl.eval.vqa.accuracy import published_protocols_table
from medvl.eval.vqa.controls import (
    EARLIER_REMOVED,
    GAIN_OVER_ONE_IMAGE,
    GAIN_OVER_TEXT_ONLY,
    SWAPPED,
    TEXT_ONLY,
)
from medvl.eval.vqa.evaluation import QuestionAnswering
from medvl.eval.vqa.examples import example_cards
from medvl.eval.vqa.predictions import (
    Prediction,
    QuestionOnly,
    baselines,
    constant_predictions,
    features_of,
    predictions_from_scores,
    read_predictions,
)
from medvl.eval.vqa.protocol import NORMALIZERS, PROTOCOLS, PUBLISHED_PROTOCOLS, get_protocol

# Questions, vocabulary, predictions


def make_question(
    name,
    question,
    answer,
    split="test",
    kind="PRES",
    organ="CHEST",
    phrasing="freeform",
    answer_type=None,
):
    closed = answer.lower() in ("yes", "no")
    return Question(
        id=name, question=question, answer=answer,
        answer_type=answer_type or ("closed" if closed else "open"), kind=kind, organ=organ,
        split=split, phrasing=phrasing,
    )  # fmt: skip


TRAIN = (
    make_question("t1", "is there a mass?", "Yes", "train"),
    make_question("t2", "is there a mass?", "yes", "train"),
    make_question("t3", "is there a mass?", "no", "train"),
    make_question("t4", "where is the mass?", "Right lung", "train", kind="POS"),
    make_question("t5", "where is the mass?", "the right lung", "train", kind="POS"),
    make_question("t6", "which plane?", "axial", "train", kind="PLANE", organ="HEAD"),
)
TEST = (
    make_question("1", "is there a mass?", "yes"),
    make_question("2", "is there air?", "no"),
    make_question("3", "where is the mass?", "left lung", kind="POS", phrasing="para"),
    make_question("4", "which plane?", "Axial", kind="ABN, PLANE", organ="HEAD"),
    make_question(
        "5", "is it MR or CT?", "CT", answer_type="closed", kind="MODALITY", organ="HEAD"
    ),
    make_question("6", "what is it?", "", kind="ABN"),
)
DATA = VQAData(
    "tiny", "official", TRAIN + TEST, ("a", "b", "c", "d", "e", "f", "a", "a", "b", "c", "d", "e")
)
GOLD = {question.id: Prediction(question.answer) for question in TEST}


def row(result, target, metric="accuracy", subgroup=""):
    return result.results.row(metric, target, subgroup)


def test_vocabulary_comes_from_train_by_default():
    vocabulary = AnswerVocabulary.build(DATA.questions, get_protocol("medvl"))
    assert vocabulary.answers == (
        "right lung",
        "yes",
        "axial",
        "no",
    )  # by frequency, then alphabetical
    assert vocabulary.index()["axial"] == 2
    everything = AnswerVocabulary.build(DATA.questions, get_protocol("m3ae"))
    assert set(everything.answers) == {*vocabulary.answers, "left lung", "ct"}
    frequent = AnswerVocabulary.build(DATA.questions, get_protocol("medvl"), min_count=2)
    assert frequent.answers == ("right lung", "yes")
    assert len({v.fingerprint for v in (vocabulary, everything, frequent)}) == 3
    with raises(EvaluationError, "empty"):
        AnswerVocabulary.build(TEST, get_protocol("medvl"))


def test_predictions_from_scores_are_by_question_id():
    vocabulary = AnswerVocabulary.build(DATA.questions, get_protocol("medvl"))
    predictions = predictions_from_scores(
        ["2", "1"], [[0.0, 0.1, 0.3, 0.9], [2.0, 2.0, 1.0, 0.0]], vocabulary
    )
    assert {name: one.answer for name, one in predictions.items()} == {"2": "no", "1": "right lung"}
    assert predictions["2"].score == 0.9
    with raises(EvaluationError, "mismatch", names="(1, 3)"):
        predictions_from_scores(["1"], [[1.0, 2.0, 3.0]], vocabulary)
    with raises(EvaluationError, "nonfinite"):
        predictions_from_scores(["1"], [[1.0, 2.0, 3.0, np.nan]], vocabulary)


def test_malformed_predictions_are_refused_with_their_line(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(
        '{"id": 1, "answer": "yes", "answer_type": "closed"}\n\n{"id": "2", "answer": "no"}\n'
    )
    assert read_predictions(path) == {"1": Prediction("yes", "closed"), "2": Prediction("no")}
    path.write_bytes(
        '{"id": 1, "answer": "left\u2028lung\x85"}\r\n{"id": 2, "answer": "no"}'.encode()
    )
    assert read_predictions(path) == {"1": Prediction("left\u2028lung\x85"), "2": Prediction("no")}
    for text, code, names in (
        ('{"id": 1, "answer": "yes"}\n{"id": "1", "answer": "no"}', "conflict", "line 2"),
        ('{"id": 1}', "malformed", "line 1"),
        ("[]", "malformed", "line 1"),
        ("{", "malformed", "line 1"),
        ('{"id": 1, "answer": ["yes"]}', "wrong_type", "line 1"),
    ):
        path.write_text(text)
        with raises(EvaluationError, code, names=names):
            read_predictions(path)
    with raises(EvaluationError, "not_found"):
        read_predictions(tmp_path / "none")


# Evaluation


def test_every_question_stays_in_the_denominator():
    result = evaluate_answers(DATA, GOLD, resamples=0)
    assert row(result, "overall").value == pytest.approx(
        5 / 6
    )  # a question without a reference answer has no credit
    assert (row(result, "overall").n, row(result, "closed").n, row(result, "open").n) == (6, 3, 3)
    assert row(result, "closed").value == 1.0
    ceiling = row(result, "overall", "ceiling")
    assert (ceiling.value, ceiling.n) == (
        pytest.approx(3 / 6),
        6,
    )  # left lung and CT never occur in train
    half = evaluate_answers(
        DATA, {"1": Prediction("YES"), "3": Prediction("right lung")}, resamples=0
    )
    assert row(half, "overall").value == pytest.approx(1 / 6)
    assert half.results.details["not_predicted"] == 4
    with raises(EvaluationError, "mismatch", names="first 99"):
        evaluate_answers(DATA, {"99": Prediction("yes")})
    with raises(EvaluationError, "empty", "split", names="test, train"):
        evaluate_answers(DATA, GOLD, split="validate")


def test_question_of_two_kinds_counts_in_both():
    result = evaluate_answers(DATA, GOLD, resamples=0)
    assert (
        row(result, "kind: PLANE").n,
        row(result, "kind: ABN").n,
        row(result, "kind: PRES").n,
    ) == (1, 2, 2)
    assert row(result, "kind: ABN").value == 0.5
    assert (row(result, "organ: CHEST").n, row(result, "organ: HEAD").n) == (4, 2)
    assert "kind: PLANE" in result.table()
    assert len(result.table().splitlines()) > 12


def test_order_of_predictions_has_no_effect():
    backwards = dict(reversed(GOLD.items()))
    shown = [evaluate_answers(DATA, answers, resamples=20).results for answers in (backwards, GOLD)]
    assert repr(shown[0]) == repr(shown[1])  # NaN is not equal to itself


def test_intervals_resample_images():
    """With all questions on two images, few values are possible."""
    two = dataclasses.replace(
        DATA, groups=tuple("ab"[int(q.id in ("1", "2", "4"))] for q in DATA.questions)
    )
    answers = {
        name: Prediction(TEST[int(name) - 1].answer if name in ("1", "2", "4") else "wrong")
        for name in GOLD
    }
    overall = row(evaluate_answers(two, answers, resamples=200), "overall")
    assert (overall.low, overall.value, overall.high) == (0.0, 0.5, 1.0)
    separate = row(evaluate_answers(DATA.choose(range(12)), answers, resamples=200), "overall")
    assert separate.high - separate.low < 1


def test_gain_over_question_only_is_a_paired_difference():
    result = evaluate_answers(DATA, GOLD, resamples=50)
    gain = row(result, "overall", "gain_over_question_only")
    baseline = row(result, "overall", subgroup="baseline: question_only")
    assert gain.value == pytest.approx(row(result, "overall").value - baseline.value)
    assert gain.low <= gain.value <= gain.high


def test_controls_are_rows_beside_the_model_and_the_gain_over_text_only_is_paired():
    text_only = {question.id: Prediction("yes") for question in TEST}
    swapped = {"1": Prediction("no")}
    controls = {TEXT_ONLY: text_only, SWAPPED: swapped, EARLIER_REMOVED: swapped}
    result = evaluate_answers(DATA, GOLD, controls=controls, resamples=20)
    alone = evaluate_answers(DATA, text_only, resamples=20)
    control = row(result, "overall", subgroup="control: text_only")
    assert (control.value, control.low) == (row(alone, "overall").value, row(alone, "overall").low)
    gain = row(result, "overall", GAIN_OVER_TEXT_ONLY)
    assert gain.value == pytest.approx(row(result, "overall").value - control.value)
    lines = result.predictions()
    assert [line["text_only"] for line in lines] == ["yes"] * len(TEST)
    assert [line["image_swapped"] for line in lines] == ["no", *[None] * (len(TEST) - 1)]
    groups = QuestionAnswering.metric_groups(lines, result.results)
    values = {
        each.name: value
        for group in groups
        for each, value in zip(
            group.rows, group.statistic(np.ones((len(lines), 1)))[0], strict=True
        )
    }
    assert values["gain_over_text_only/overall"] == pytest.approx(gain.value)
    right = (
        row(result, "overall").value
        - row(result, "overall", subgroup="control: image_swapped").value
    )
    one_image = row(result, "overall", GAIN_OVER_ONE_IMAGE)
    assert values["gain_over_one_image/overall"] == pytest.approx(one_image.value)
    assert one_image.value == pytest.approx(right)
    assert one_image.value != pytest.approx(gain.value)


def test_results_and_predictions_are_written_and_read(tmp_path):
    result = evaluate_answers(DATA, GOLD, resamples=10, inputs={"checkpoint": "f" * 64})
    medvl.eval.write_results(result.results, tmp_path, result.predictions())
    written = read_results(tmp_path)
    assert written.config["rules"]["normalizer"] == "medvl-2"
    assert written.config["vocabulary_size"] == 4
    assert (written.inputs["checkpoint"], len(written.inputs["questions"])) == ("f" * 64, 64)
    assert (
        written.row("accuracy", "overall").value == result.results.row("accuracy", "overall").value
    )
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [question.id for question in TEST]
    assert lines[0]["model"] == "yes"
    assert lines[2]["model_credit"] == 1.0
    assert lines[5]["answer"] == ""


def test_fingerprint_depends_only_on_the_questions():
    shuffled = DATA.choose([3, *range(3), *range(4, 12)])
    assert shuffled.fingerprint == DATA.fingerprint
    changed = dataclasses.replace(
        DATA, questions=(dataclasses.replace(TRAIN[0], answer="No"), *DATA.questions[1:])
    )
    assert changed.fingerprint != DATA.fingerprint
    assert (
        dataclasses.replace(DATA, groups=("x",) * 12).fingerprint == DATA.fingerprint
    )  # hashed with another salt


# Baselines


def test_baselines_are_fitted_on_train_alone():
    predictions = baselines(TRAIN, TEST, get_protocol("medvl"))
    answers = {
        name: [one[question.id].answer for question in TEST] for name, one in predictions.items()
    }
    assert answers["always_yes"] == ["yes"] * 6
    assert answers["majority"] == ["right lung"] * 6
    assert answers["majority_by_kind"] == ["yes", "yes", "right lung"] + ["right lung"] * 3
    assert answers["question_lookup"] == [
        "yes",
        "right lung",
        "right lung",
        "axial",
        "right lung",
        "right lung",
    ]
    assert answers["question_only"][:4] == ["yes", "yes", "right lung", "axial"]
    other = [dataclasses.replace(question, answer="something else") for question in TEST]
    assert baselines(TRAIN, other, get_protocol("medvl")) == predictions


def ridge(counts_NF, classes_N, penalty, size):
    """Return the solution of the normal equations of the centered problem."""
    target_NV = np.eye(size)[classes_N]
    centred_NF = counts_NF - counts_NF.mean(axis=0)
    normal_FF = centred_NF.T @ centred_NF + penalty * np.eye(counts_NF.shape[1])
    weight_FV = np.linalg.solve(normal_FF, centred_NF.T @ (target_NV - target_NV.mean(axis=0)))
    return weight_FV, target_NV.mean(axis=0) - counts_NF.mean(axis=0) @ weight_FV


def test_question_only_model_equals_ridge_regression(monkeypatch):
    monkeypatch.setattr("medvl.eval.vqa.predictions._BLOCK", 2)
    texts = [
        "is there a mass",
        "where is it",
        "is there a mass",
        "is it left",
        "a mass a mass",
        "is there a mass",
    ]
    classes = [0, 2, 1, 0, 2, 0]
    names = sorted({name for text in texts for name in features_of(text)})

    def matrix(rows):
        return np.array([[features_of(text)[name] for name in names] for text in rows], float)

    weight_FV, bias_V = ridge(matrix(texts), classes, 0.7, 4)
    new = ["is there a fracture", "nothing known", "where is it", "where is it"]
    model = QuestionOnly(texts, classes, 4, penalty=0.7)
    np.testing.assert_allclose(model.scores(new), matrix(new) @ weight_FV + bias_V, atol=1e-12)
    assert model.scores([]).shape == (0, 4)


def test_question_only_model_refuses_invalid_training_data():
    for questions, classes in (([], []), (["a"], [4]), (["a"], [-1]), (["a", "b"], [0])):
        with raises(EvaluationError, "mismatch"):
            QuestionOnly(questions, classes, 4)


def test_question_only_model_detects_leaking_wording_only():
    rng = np.random.default_rng(0)
    leaky = [f"is the {word} there" for word in ("left", "right") for _ in range(40)]
    model = QuestionOnly(leaky, [0] * 40 + [1] * 40, 2)
    assert (model.scores(leaky).argmax(1) == [0] * 40 + [1] * 40).all()
    fair = [f"is the {word} there" for word in rng.choice(["left", "right"], 400)]
    classes = rng.integers(0, 2, 400)
    hits = (
        QuestionOnly(fair[:200], classes[:200].tolist(), 2).scores(fair[200:]).argmax(1)
        == classes[200:]
    )
    assert 0.4 < hits.mean() < 0.6


# Protocols


def test_published_protocols_have_a_flaw():
    assert PROTOCOLS["medvl"].flaw == ""
    assert PROTOCOLS["medvl"].vocabulary == ("train",)
    assert all(PROTOCOLS[name].flaw for name in PUBLISHED_PROTOCOLS)
    with raises(EvaluationError, "unknown_name", "protocol"):
        get_protocol("mine")
    with raises(EvaluationError, "unknown_name", "normalizer"):
        VQAProtocol(name="x", normalizer="mine")


def test_mevf_protocol_includes_freeform_questions_only():
    result = evaluate_answers(DATA, GOLD, protocol="mevf", resamples=0)
    assert row(result, "overall").n == 5
    none = VQAProtocol(name="none", phrasing=("frame",))
    with raises(EvaluationError, "empty"):
        evaluate_answers(DATA, GOLD, protocol=none)


def test_phrasings_of_vqa_rad_leave_out_no_question_of_other_corpora():
    """M2I2's numbers on SLAKE, whose questions are "vqa" or "kvqa", count all of them."""
    for name in ("m2i2", "mevf"):
        assert [get_protocol(name).includes(make_question("1", "?", "no",
            phrasing=kind)) for kind in ( "vqa", "kvqa", "", "freeform", "para", "frame",
        )] == [True, True, True, True, False, False]  # fmt: skip


def test_yes_no_protocol_counts_other_closed_questions_as_open():
    result = evaluate_answers(DATA, GOLD, protocol="yes_no", resamples=0)
    assert (row(result, "closed").n, row(result, "open").n) == (2, 4)


def test_predicted_types_are_required_by_the_pubmedclip_protocol():
    with raises(EvaluationError, "missing", "answer_type"):
        evaluate_answers(DATA, GOLD, protocol="pubmedclip")
    typed = {name: dataclasses.replace(one, answer_type="open") for name, one in GOLD.items()}
    result = evaluate_answers(DATA, typed, protocol="pubmedclip", resamples=0)
    assert (row(result, "closed").n, row(result, "open").n) == (0, 6)
    assert "uses predicted answer types" in published_protocols_table(DATA, GOLD)
    assert "substrings count" in published_protocols_table(DATA)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("mass", 1),
        ("large mass", 1),
        ("(large) mass", 1),
        ("Cyst", 1),
        ("large", 0),
        ("mass cyst", 0),
        ("", 0),
    ],
)
def test_vqa_med_accepts_alternatives_and_optional_parts(answer, right):
    question = make_question("1", "what is abnormal?", "(large) mass#cyst")
    assert get_protocol("vqa_med_2019").credit(answer, question) == right


@pytest.mark.parametrize(
    ("answer", "gold", "credit"),
    [
        ("normal", "no", 1),
        ("normal", "yes", 0),
        ("yes and no", "yes", 1),
        ("yes and no", "no", 1),
        ("MRI", "mri", 0),
    ],
)
def test_llava_med_credits_substrings(answer, gold, credit):
    assert (
        get_protocol("llava_med").credit(
            answer, make_question("1", "?", gold, answer_type="closed")
        )
        == credit
    )
    assert get_protocol("medvl").credit(
        answer, make_question("1", "?", gold, answer_type="closed")
    ) == (answer == "MRI")


@pytest.mark.parametrize(
    ("answer", "gold", "credit"),
    [("right", "Right "
               "lung", 1), ("no", "normal", 1), ("3.5", "35 "
                                                        "cm", 1), ("", "CT", 1), ("right "
                                                                                  "lung", "right", 0),
     ("yes", "no", 0), ("yes", "", 0), ("", "", 0)],
)  # fmt: skip
def test_mumc_credits_parts_of_the_right_answer(answer, gold, credit):
    assert get_protocol("mumc").credit(answer, make_question("1", "?", gold)) == credit


@pytest.mark.parametrize(
    ("answer", "gold", "credit"),
    [("right", "Right "
               "lung", 0), ("no", "normal", 0), ("3.5 cm", "35 cm", 1), ("", "CT", 0), ("", "", 0),
     ("X-ray.", "x ray", 1), ("Right Lung", "right lung ", 1)],
)  # fmt: skip
def test_mumc_of_2024_compares_whole_answers(answer, gold, credit):
    assert get_protocol("mumc_2024").credit(answer, make_question("1", "?", gold)) == credit


def test_examples_mark_answers_as_the_protocol_credits_them():
    for name, right in (("mumc", True), ("medvl", False)):
        result = evaluate_answers(DATA, {"3": Prediction("left")}, protocol=name, resamples=0)
        (deck,) = example_cards(result, None, None, {(right, "open"): [2]}).decks
        assert [choice.right for choice in deck.cards[0].choices] == [right]


def test_ceiling_counts_parts_of_answers_where_the_protocol_does():
    """ "left lung" and "CT" are not in the vocabulary, but "left" and "c" are."""
    vocabulary = AnswerVocabulary(("yes", "no", "left", "axial", "c"), "mumc", ("train",))
    ceilings = [
        row(
            evaluate_answers(
                DATA, GOLD, protocol=get_protocol(name), vocabulary=vocabulary, resamples=0
            ),
            "overall",
            "ceiling",
        )
        for name in ("mumc", "m3ae")
    ]
    assert [ceiling.value for ceiling in ceilings] == pytest.approx([5 / 6, 3 / 6])


def test_vocabulary_of_the_model_sets_the_ceiling_and_its_test_answers_are_a_flaw():
    """A model that was fine-tuned with m3ae's vocabulary, evaluated by medvl's protocol."""
    protocol = get_protocol("medvl")
    everything = AnswerVocabulary.build(DATA.questions, get_protocol("m3ae"))
    own = AnswerVocabulary.of_model(everything.answers, protocol)
    result = evaluate_answers(DATA, GOLD, vocabulary=own, resamples=0)
    assert result.results.config["vocabulary_size"] == len(everything)
    assert result.results.details["vocabulary_of"] == "the model"
    assert row(result, "overall").value <= row(result, "overall", "ceiling").value
    assert "2 answers of test that no other split has" in result.results.config["rules"]["flaw"]
    assert result.protocol.flaw == result.results.config["rules"]["flaw"]
    trained = AnswerVocabulary.of_model(
        ["Right lung", "yes", "axial", "the right lung", "another corpus"], protocol
    )
    assert trained.answers == ("right lung", "yes", "axial", "another corpus")
    assert (
        evaluate_answers(DATA, GOLD, vocabulary=trained, resamples=0).results.config["rules"][
            "flaw"
        ]
        == ""
    )
    generated = evaluate_answers(DATA, GOLD, vocabulary=None, resamples=0)
    assert row(generated, "overall", "ceiling").value == pytest.approx(5 / 6)
    assert generated.results.config["vocabulary_size"] is None


def test_m2i2_compares_by_the_rules_of_vqa_v2():
    credit = get_protocol("m2i2").credit
    assert credit("35 cm", make_question("1", "how large?", "3.5 cm")) == 0
    assert credit("two right lungs", make_question("1", "where?", "2 right lungs")) == 1
    assert credit("right", make_question("1", "where?", "right lung")) == 0


def test_llava_med_token_recall_rewards_long_answers():
    question = make_question("1", "where?", "right lower lobe")
    credit = get_protocol("llava_med").credit
    assert credit("right lobe", question) == pytest.approx(2 / 3)
    assert credit("left right upper lower middle lobe", question) == 1
    assert credit("right right right", question) == pytest.approx(
        3 / 5
    )  # its code counts repetitions of the output
    assert credit("left", make_question("1", "where?", "left and left")) == pytest.approx(1 / 2)
    assert credit("", question) == 0


# VQA-RAD itself


@pytest.fixture(scope="module")
def rad(real_data):
    samples = (
        vqa_rad.VQARAD(root=real_data / "vqa_rad").plan(Deidentifier(b"0" * 32)).iter_samples()
    )
    return VQAData.from_samples(samples)


@pytest.mark.real
@pytest.mark.parametrize(
    ("normalizer", "train", "everything", "unseen", "closed", "opened"),
    [("raw", 514, 557, 48, 6, 42), ("lower", 476, 517, 47, 6, 41), ("vqa_v2", 461, 498, 44, 6, 38),
     ("mevf", 458, 494, 43, 6, 37), ("mumc", 470, 509, 45, 6, 39), ("medvl-2", 459, 495, 43, 6, 37)],
)  # fmt: skip
def test_vqa_rad_vocabularies_have_their_known_sizes(
    rad, normalizer, train, everything, unseen, closed, opened
):
    own = AnswerVocabulary.build(rad.questions, VQAProtocol(name="x", normalizer=normalizer))
    both = AnswerVocabulary.build(
        rad.questions, VQAProtocol(name="x", normalizer=normalizer, vocabulary=("train", "test"))
    )
    assert (len(own), len(both)) == (train, everything)
    normalize = NORMALIZERS[normalizer]
    missed = [
        q.answer_type for q in rad.part("test").questions if normalize(q.answer) not in own.answers
    ]
    assert (len(missed), missed.count("closed"), missed.count("open")) == (unseen, closed, opened)


@pytest.mark.real
def test_vqa_rad_baselines_equal_their_known_values(rad):
    result = evaluate_answers(rad, resamples=0)

    def value(name, target):
        return row(result, target, subgroup=f"baseline: {name}").value

    for name, closed, overall in (("always_yes", 0.434, 0.262), ("always_no", 0.489, 0.295)):
        assert value(name, "closed") == pytest.approx(closed, abs=5e-4)
        assert value(name, "overall") == pytest.approx(overall, abs=5e-4)
    assert value("question_only", "closed") == pytest.approx(0.713, abs=0.005)
    by_yes_no = evaluate_answers(rad, protocol="yes_no", resamples=0)
    assert row(by_yes_no, "closed", subgroup="baseline: question_only").value == pytest.approx(
        0.745, abs=0.01
    )
    assert (row(by_yes_no, "closed", "ceiling").n, row(by_yes_no, "open", "ceiling").n) == (
        251,
        200,
    )
    assert row(evaluate_answers(rad, protocol="mevf", resamples=0), "closed", "ceiling").n == 185


@pytest.mark.real
@pytest.mark.parametrize(("answer", "closed"), [("normal", 0.489), ("yes and no", 0.923)])
def test_llava_med_credits_a_constant_word_on_closed_questions(rad, answer, closed):
    ids = [question.id for question in rad.part("test").questions]
    result = evaluate_answers(
        rad, constant_predictions(ids, answer), protocol="llava_med", resamples=0
    )
    assert row(result, "closed").value == pytest.approx(closed, abs=5e-4)
    assert row(result, "closed", "ceiling").value == pytest.approx(
        0.934, abs=5e-4
    )  # the score of a perfect model
    honest = evaluate_answers(rad, constant_predictions(ids, answer), resamples=0)
    assert row(honest, "closed").value < 0.01


@pytest.mark.real
def test_mumc_credits_the_constant_no_for_answers_that_contain_it(rad):
    ids = [question.id for question in rad.part("test").questions]
    values = [
        row(
            evaluate_answers(rad, constant_predictions(ids, "no"), protocol=name, resamples=0),
            "overall",
        ).value
        for name in ("mumc", "m3ae")
    ]
    assert values == pytest.approx([0.317, 0.295], abs=5e-4)


def test_answers_of_splits_that_are_not_given_are_no_leak():
    """The published commands for SLAKE give train and test; the vocabulary of some protocols has
    validate's answers.
    """
    own = AnswerVocabulary.of_model(["right lung", "left lung"], get_protocol("medvl"))
    rest = [dataclasses.replace(one, split="validate") for one in TEST]
    found = [
        evaluate_answers(
            DATA, GOLD, vocabulary=own, elsewhere=elsewhere, resamples=0
        ).results.config["rules"]["flaw"]
        for elsewhere in ((), rest, TEST)
    ]
    assert "1 answers of test that no other split has" in found[0]
    assert found[1:] == ["", found[0]]
