"""Reports of the phantom: MIMIC-CXR's form, agreement with the findings, and labels that match
the text.
"""

import re
from collections import Counter

import numpy as np
import pytest

from medvl.phantom import Finding, World, compose_report
from medvl.phantom.language import lexicon
from medvl.phantom.language.reports import (
    Sentence,
    absent_sentence,
    expand,
    present_sentences,
    realize,
    report_labels,
    uncertain_sentence,
)
from medvl.phantom.population.findings import PART_SAMPLERS, RENDERED_LABELS
from medvl.phantom.population.world import generator
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


def test_reports_have_a_title_and_no_unfilled_slot(reports):
    for report in reports:
        assert report.text.count("FINAL REPORT") in (1, 2)  # twice with an addendum
        assert not re.search(
            r"[\[\]{}|]|  \.|\.\.|\ban? an? \b", report.text.replace(" " * 30, "")
        ), report.text
        body = " ".join(report.text.split())
        assert not re.search(r"\b[Aa] [aeiou]", body), body


def test_sections_occur_in_all_combinations_of_mimic(reports):
    kinds = Counter((bool(report.findings), bool(report.impression)) for report in reports)
    total = len(reports)
    assert 0.6 < kinds[True, True] / total < 0.8
    assert 0.02 < kinds[False, False] / total < 0.09
    assert min(kinds[True, False], kinds[False, True]) / total > 0.04
    extras = Counter(
        word
        for report in reports
        for word in ("WET READ", "ADDENDUM", "___")
        if word in report.text
    )
    assert all(extras[word] > 0.01 * total for word in ("WET READ", "ADDENDUM", "___"))


def test_section_texts_are_in_the_file(reports):
    for report in reports:
        words = " ".join(report.text.split())
        assert report.findings in words
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", report.impression):
            assert sentence in words


def test_reports_are_varied(reports):
    texts = [report.findings for report in reports if report.findings]
    assert len(set(texts)) > 0.99 * len(texts)
    assert len({word for text in texts for word in re.findall(r"[a-z]+", text.lower())}) > 250


def test_report_is_reproducible():
    study = World(1).patient(5).studies[0]
    assert compose_report(study) == compose_report(World(1).patient(5).studies[0])


# Ground truth


def test_reports_do_not_contradict_the_ground_truth(studies, reports):
    for study, report in zip(studies, reports, strict=True):
        for label, value in report.labels.items():
            if label == "No Finding":
                continue
            if value == 1:
                assert study.labels[label] == 1, (label, report.text)
            elif value == 0:
                assert study.labels[label] == 0, (label, report.text)


def test_no_finding_excludes_other_labels(reports):
    for report in reports:
        mentioned = [
            value
            for label, value in report.labels.items()
            if label not in ("No Finding", "Support Devices")
        ]
        assert report.labels.get("No Finding") == (
            None if any(value != 0 for value in mentioned) else 1
        )


def test_reports_mention_most_present_and_some_absent_findings(studies, reports):
    counts = Counter()
    for study, report in zip(studies, reports, strict=True):
        for finding in study.findings:
            counts[finding.severity, report.labels.get(finding.label)] += 1
        for label in RENDERED_LABELS:
            if not study.labels[label]:
                counts["absent", report.labels.get(label)] += 1
    for severity in ("moderate", "severe"):
        rows = {value: count for (kind, value), count in counts.items() if kind == severity}
        assert rows[1] > 0.7 * sum(rows.values())
        assert 0 < rows[-1] < 0.2 * sum(rows.values())
    rows = {value: count for (kind, value), count in counts.items() if kind == "absent"}
    assert 0.3 < rows[0] / sum(rows.values()) < 0.8
    assert 0 < rows[-1] < 0.02 * sum(rows.values())
    assert counts["mild", None] > 0


def test_words_of_side_and_size_match_the_finding():
    for seed in range(60):
        finding = Finding(
            label="Pleural Effusion", parts=PART_SAMPLERS["Pleural Effusion"](generator(seed), 0.9)
        )
        (sentence,) = present_sentences(generator(seed, 1), finding, None)
        words = set(re.findall(r"[a-z]+", sentence.text.lower()))
        if finding.side != "bilateral":
            assert finding.side in words
            assert not words & ({"left", "right", "bilateral"} - {finding.side})
        assert not words & {"small", "tiny", "trace", "moderate", "minimal"}


def test_changes_are_reported_only_with_a_prior_study(studies, reports):
    changed = re.compile(r"(since|from|compared to) (the prior study|___)")
    assert not any(
        changed.search(r.findings) for s, r in zip(studies, reports, strict=True) if s.prior is None
    )
    assert any(
        changed.search(r.findings)
        for s, r in zip(studies, reports, strict=True)
        if s.prior is not None
    )


def test_words_of_change_agree_with_the_sizes_of_the_findings(studies, reports):
    names = {"effusion": "Pleural Effusion", "pneumothorax": "Pneumothorax", "edema": "Edema"}
    agrees = {
        "new": lambda before, after: before == 0 < after,
        "increased|worsened|progressed": lambda before, after: 0 < before < after,
        "improved|decreased": lambda before, after: before > after > 0,
        "unchanged|stable|not significantly changed": lambda before, after: (
            abs(before - after) < 0.2 and after > 0
        ),
        "has resolved|is no longer seen": lambda before, after: before > 0 == after,
    }

    def extent(findings, label):
        return max((finding.extent for finding in findings if finding.label == label), default=0)

    seen = Counter()
    for study, report in zip(studies, reports, strict=True):
        for sentence in re.split(r"(?<=\.) ", report.findings if study.prior is not None else ""):
            for words, rule in agrees.items():
                pattern = words if "has" in words else rf"({words}) (since|from|compared to)"
                for name, label in names.items():
                    if re.search(pattern, sentence) and re.search(rf"\b{name}", sentence):
                        seen[words] += 1
                        assert rule(extent(study.prior, label), extent(study.findings, label)), (
                            sentence
                        )
    assert set(seen) == set(agrees)


# Templates


def test_templates_give_complete_sentences():
    for label in RENDERED_LABELS:
        for seed in range(80):
            rng = generator(seed, FINDINGS.index(label))
            finding = Finding(label=label, parts=PART_SAMPLERS[label](rng, float(rng.random())))
            sentences = present_sentences(rng, finding, "same" if seed % 2 else None)
            if label in lexicon.UNCERTAIN:
                sentences.append(uncertain_sentence(rng, finding))
            for sentence in sentences:
                assert re.fullmatch(r"[A-Z_\d][^\[\]{}|]*\.", sentence.text), sentence.text
                assert label in sentence.mentions


def test_all_findings_except_devices_can_be_negated():
    labels_of = set(lexicon.ABSENT)
    assert {label for labels in labels_of for label in labels} == set(RENDERED_LABELS) - {
        "Support Devices"
    }
    for labels, templates in lexicon.ABSENT.items():
        sentence = absent_sentence(generator(0), labels, templates)
        assert set(sentence.mentions.values()) == {0}


def test_choices_expand_innermost_first():
    results = {expand(np.random.default_rng(seed), "[a|b[c|d]]e") for seed in range(60)}
    assert results == {"ae", "bce", "bde"}


def test_realize_fixes_articles_spaces_and_capitals():
    rng = np.random.default_rng(0)
    assert (
        realize(rng, ["[ ]a {what}  opacity."], {"what": "ill-defined"})
        == "An ill-defined opacity."
    )


def test_present_outweighs_uncertain_outweighs_absent():
    sentences = [
        Sentence("", {"Edema": 0, "Pneumonia": -1, "Fracture": 0}),
        Sentence("", {"Edema": -1, "Pneumonia": 1}),
        Sentence("", {"Pneumonia": 0}),
    ]
    assert report_labels(sentences) == {"Edema": -1, "Fracture": 0, "Pneumonia": 1}
    assert report_labels([]) == {"No Finding": 1}
    assert report_labels([Sentence("", {"Support Devices": 1})]) == {
        "No Finding": 1,
        "Support Devices": 1,
    }
