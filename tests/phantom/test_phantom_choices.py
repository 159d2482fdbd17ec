"""The phantom's questions with four options: true, and balanced over answers and letters."""

import json
from collections import Counter, defaultdict

from helpers.errors import raises

from medvl.errors import ConfigError
from medvl.phantom.layouts.choices import (
    MOST_FORMS,
    balanced_choices,
    choice_questions,
    wording,
    write_rexvqa,
)
from medvl.phantom.population.findings import truth_labels
from medvl.phantom.population.world import World


def candidates(patients):
    world = World(5)
    views = [
        (index, view)
        for index in range(patients)
        for study in world.patient(index).studies
        for view in study.views
    ]
    return [
        ("test" if index % 2 == 0 else "train", f"{view.dicom_id} {question.question}", question)
        for index, view in views
        for question in choice_questions(view)
    ], {f"{view.dicom_id}": view for _, view in views}


def test_every_answer_and_letter_is_equally_frequent():
    rows, _ = candidates(200)
    answers: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    letters: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    kept = list(balanced_choices(rows))
    for asked in kept:
        split, _, question = rows[asked.place]
        assert sorted(asked.options) == sorted(question.options)
        assert asked.options[asked.right] == question.options[question.right]
        answers[split, question.question][asked.options[asked.right]] += 1
        letters[split, question.question][asked.right] += 1
    assert len(answers) == 8
    for form in answers:
        assert len(set(answers[form].values())) == 1
        assert len(answers[form]) == 4
        assert len(set(letters[form].values())) == 1
    again = {rows[a.place][1]: a.options for a in kept}
    shuffled = rows[::-1]
    assert {shuffled[a.place][1]: a.options for a in balanced_choices(shuffled)} == again


def test_answers_are_true():
    rows, views = candidates(40)
    for _, name, question in rows:
        view = views[name.split(" ")[0]]
        truth = truth_labels(view.findings)
        answer = question.options[question.right]
        found = {finding.label: finding for finding in view.findings}
        assert not view.lateral
        if question.kind == "presence":
            labels = ("Pleural Effusion", "Pneumothorax", "Cardiomegaly", "Edema")
            assert [truth[label] for label in labels] == [
                int(place == question.right) for place in range(4)
            ]
        elif answer.startswith("no "):
            assert answer.removeprefix("no ") in ("pleural effusion", "cardiomegaly")
            label = "Cardiomegaly" if "cardio" in answer else "Pleural Effusion"
            assert label not in found
        else:
            label = "Cardiomegaly" if "cardio" in answer else "Pleural Effusion"
            word = answer.split(" ")[0]
            kinds = {"laterality": found[label].side, "severity": found[label].severity}
            assert word == kinds[question.kind]


def test_wordings_change_the_question_alone():
    rows, _ = candidates(60)
    texts: defaultdict[str, set[str]] = defaultdict(set)
    for _, name, question in rows:
        assert wording(question, name, 1) == question.question
        text = wording(question, name, MOST_FORMS)
        texts[question.question].add(text)
        assert text == wording(question, name, MOST_FORMS)
        if question.kind != "presence":
            assert question.options[-1].removeprefix("no ") in text
    assert {len(each) for each in texts.values()} == {MOST_FORMS}
    every = [text for each in texts.values() for text in each]
    assert len(set(every)) == len(every)  # no wording is of two questions


def test_the_layout_has_the_chosen_number_of_wordings(tmp_path):
    arguments = {"patients": 8, "seed": 3, "size": 32, "workers": 1}
    found = []
    for forms in (1, 3):
        root = write_rexvqa(tmp_path / str(forms), forms=forms, **arguments)
        found.append(json.loads((root / "metadata/train_vqa_data.json").read_text()))
    one, three = found
    assert one.keys() == three.keys()
    same = [{k: v for k, v in each.items() if k != "question"} for each in one.values()]
    assert same == [{k: v for k, v in each.items() if k != "question"} for each in three.values()]
    assert sum(one[key]["question"] != three[key]["question"] for key in one) > len(one) / 3
    with raises(ConfigError, "out_of_range", "forms"):
        write_rexvqa(tmp_path / "none", forms=0)
