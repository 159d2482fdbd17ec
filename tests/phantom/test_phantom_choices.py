"""The phantom's questions with four options: true, and balanced over answers and letters."""

from collections import Counter, defaultdict

from medvl.phantom.layouts.choices import balanced_choices, choice_questions
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
