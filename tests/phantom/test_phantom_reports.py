"""The phantom's reports: in MIMIC's form, true to the findings, with labels that match their words."""

import re
from collections import Counter

import numpy as np
import pytest

from medvl.phantom import Finding, World, compose_report, questions
from medvl.phantom.language import lexicon
from medvl.phantom.language.reports import report_labels
from medvl.phantom.language.sentences import Sentence, expand, say, state_absent, state_present, state_uncertain
from medvl.phantom.population.finding_sites import PART_SAMPLERS
from medvl.phantom.population.findings import DRAWN
from medvl.phantom.seeds import generator
from medvl.schema import FINDINGS


@pytest.fixture(scope="module")
def studies():
    return [study for patient in World(23).patients(500) for study in patient.studies]


@pytest.fixture(scope="module")
def reports(studies):
    return [compose_report(study) for study in studies]


# Form


def test_lines_are_short_and_start_with_a_space(reports):
    for report in reports:
        assert report.text.endswith("\n")
        for line in report.text.removesuffix("\n").split("\n"):
            assert line.startswith(" ")
            assert len(line) <= 79


def test_every_report_has_its_title_and_nothing_unfilled(reports):
    for report in reports:
        assert report.text.count("FINAL REPORT") in (1, 2)  # twice with an addendum
        assert not re.search(r"[\[\]{}|]|  \.|\.\.|\ban? an? \b", report.text.replace(" " * 30, "")), report.text
        body = " ".join(report.text.split())
        assert not re.search(r"\b[Aa] [aeiou]", body), body


def test_sections_come_in_all_combinations_that_mimic_has(reports):
    kinds = Counter((bool(report.findings), bool(report.impression)) for report in reports)
    total = len(reports)
    assert 0.6 < kinds[True, True] / total < 0.8
    assert 0.02 < kinds[False, False] / total < 0.09
    assert min(kinds[True, False], kinds[False, True]) / total > 0.04
    extras = Counter(word for report in reports for word in ("WET READ", "ADDENDUM", "___") if word in report.text)
    assert all(extras[word] > 0.01 * total for word in ("WET READ", "ADDENDUM", "___"))


def test_section_texts_stand_in_the_file(reports):
    for report in reports:
        words = " ".join(report.text.split())
        assert report.findings in words
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", report.impression):
            assert sentence in words


def test_reports_are_varied(reports):
    texts = [report.findings for report in reports if report.findings]
    assert len(set(texts)) > 0.99 * len(texts)
    assert len({word for text in texts for word in re.findall(r"[a-z]+", text.lower())}) > 250


def test_a_report_is_always_the_same():
    study = World(1).patient(5).studies[0]
    assert compose_report(study) == compose_report(World(1).patient(5).studies[0])


# Truth


def test_a_report_never_contradicts_the_truth(studies, reports):
    for study, report in zip(studies, reports, strict=True):
        for label, value in report.labels.items():
            if label == "No Finding":
                continue
            if value == 1:
                assert study.labels[label] == 1, (label, report.text)
            elif value == 0:
                assert study.labels[label] == 0, (label, report.text)


def test_no_finding_means_that_nothing_else_is_claimed(reports):
    for report in reports:
        claimed = [value for label, value in report.labels.items() if label not in ("No Finding", "Support Devices")]
        assert report.labels.get("No Finding") == (None if any(value != 0 for value in claimed) else 1)


def test_reports_mention_most_of_what_is_there_and_part_of_what_is_not(studies, reports):
    said = Counter()
    for study, report in zip(studies, reports, strict=True):
        for finding in study.findings:
            said[finding.severity, report.labels.get(finding.label)] += 1
        for label in DRAWN:
            if not study.labels[label]:
                said["absent", report.labels.get(label)] += 1
    for severity in ("moderate", "severe"):
        rows = {value: count for (kind, value), count in said.items() if kind == severity}
        assert rows[1] > 0.7 * sum(rows.values())
        assert 0 < rows[-1] < 0.2 * sum(rows.values())
    rows = {value: count for (kind, value), count in said.items() if kind == "absent"}
    assert 0.3 < rows[0] / sum(rows.values()) < 0.8
    assert 0 < rows[-1] < 0.02 * sum(rows.values())
    assert said["mild", None] > 0


def test_words_of_side_and_size_follow_the_finding():
    for seed in range(60):
        finding = Finding(label="Pleural Effusion", parts=PART_SAMPLERS["Pleural Effusion"](generator(seed), 0.9))
        (sentence,) = state_present(generator(seed, 1), finding, None)
        words = set(re.findall(r"[a-z]+", sentence.text.lower()))
        if finding.side != "bilateral":
            assert finding.side in words
            assert not words & ({"left", "right", "bilateral"} - {finding.side})
        assert not words & {"small", "tiny", "trace", "moderate", "minimal"}


def test_a_change_is_said_only_against_an_earlier_study(studies, reports):
    changed = re.compile(r"(since|from|compared to) (the prior study|___)")
    assert not any(changed.search(r.findings) for s, r in zip(studies, reports, strict=True) if s.prior is None)
    assert any(changed.search(r.findings) for s, r in zip(studies, reports, strict=True) if s.prior is not None)


# Templates


def test_every_choice_of_every_template_can_be_said():
    for label in DRAWN:
        for seed in range(80):
            rng = generator(seed, FINDINGS.index(label))
            finding = Finding(label=label, parts=PART_SAMPLERS[label](rng, float(rng.random())))
            sentences = state_present(rng, finding, "same" if seed % 2 else None)
            if label in lexicon.UNCERTAIN:
                sentences.append(state_uncertain(rng, finding))
            for sentence in sentences:
                assert re.fullmatch(r"[A-Z_\d][^\[\]{}|]*\.", sentence.text), sentence.text
                assert label in sentence.mentions


def test_every_finding_but_devices_can_be_denied():
    labels_of = {labels for labels, _ in lexicon.ABSENT}
    assert {label for labels in labels_of for label in labels} == set(DRAWN) - {"Support Devices"}
    for labels, templates in lexicon.ABSENT:
        sentence = state_absent(generator(0), labels, templates)
        assert set(sentence.mentions.values()) == {0}


def test_choices_expand_innermost_first():
    found = {expand(np.random.default_rng(seed), "[a|b[c|d]]e") for seed in range(60)}
    assert found == {"ae", "bce", "bde"}


def test_say_mends_articles_spaces_and_capitals():
    rng = np.random.default_rng(0)
    assert say(rng, ["[ ]a {what}  opacity."], {"what": "ill-defined"}) == "An ill-defined opacity."


def test_present_outweighs_uncertain_outweighs_absent():
    sentences = [
        Sentence("", {"Edema": 0, "Pneumonia": -1, "Fracture": 0}),
        Sentence("", {"Edema": -1, "Pneumonia": 1}),
        Sentence("", {"Pneumonia": 0}),
    ]
    assert report_labels(sentences) == {"Edema": -1, "Fracture": 0, "Pneumonia": 1}
    assert report_labels([]) == {"No Finding": 1}
    assert report_labels([Sentence("", {"Support Devices": 1})]) == {"No Finding": 1, "Support Devices": 1}


# Questions


def test_answers_are_the_truth(studies):
    contents = Counter()
    for study in studies[:300]:
        for view in study.views:
            for question in questions(view):
                contents[question.content] += 1
                finding = next((f for f in view.findings if f.label == question.label), None)
                if question.content == "presence":
                    assert question.answer == ("yes" if study.labels[question.label] else "no")
                elif question.content == "severity":
                    assert question.answer == finding.severity
                elif question.content == "count":
                    assert int(question.answer) == len(finding.parts)
                elif question.content == "laterality" and question.answer_type == "OPEN":
                    assert question.answer == {"bilateral": "both"}.get(finding.side, finding.side)
                elif question.content == "laterality":
                    asked = "left" if "left" in question.question else "right"
                    assert question.answer == ("yes" if finding.side == asked else "no")
                elif question.content == "view":
                    assert question.answer in (view.position, "lateral" if view.lateral else "frontal")
                if question.answer_type == "CLOSED":
                    assert question.answer in ("yes", "no", "PA", "AP")
    assert set(contents) == {"view", "presence", "laterality", "severity", "location", "count", "size"}


def test_yes_and_no_are_balanced(studies):
    answers = Counter(
        question.answer
        for study in studies[:300]
        for view in study.views
        for question in questions(view)
        if question.content == "presence"
    )
    assert 0.3 < answers["yes"] / sum(answers.values()) < 0.6


def test_questions_are_always_the_same():
    view = World(9).patient(3).studies[0].views[0]
    assert questions(view) == questions(World(9).patient(3).studies[0].views[0])
