"""Canonical statements of reports, and the policies that train with them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises

from medvl.data import (
    SectionOrStatement,
    Statements,
    TextOrLabels,
    WholeText,
    swap_laterality,
    train_wordpiece,
)
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import ItemMaker
from medvl.data.reports.sentences import split_sentences
from medvl.data.reports.statements import read_statements, statement, statements_of
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.errors import ConfigError
from medvl.schema import FINDINGS, Inputs, Sample

REPORT = (
    "Small left effusion, opacity at the right base. No pneumothorax. The heart may be enlarged."
)
ALL = [
    "There is lung opacity of the right basal lung.",
    "There is pleural effusion of the left side.",
    "There is no pneumothorax.",
    "There is possible cardiomegaly.",
]


def sample(key: str = "k", report: str = REPORT, **fields: Any) -> Sample:
    sections = {"findings": report} if report else {}
    return Sample(
        key=key,
        corpus="c",
        split="train",
        patient="p",
        study=f"s{key}",
        sections=sections,
        **fields,
    )


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REPORT, ALL),
        ("LLL opacity. Bibasilar atelectasis.", [
            "There is lung opacity of the left lower "
            "lung.", "There is atelectasis of the bilateral basal lung."]),
        ("Left base is clear, right effusion.", ["There is pleural effusion of the right side."]),
        ("Small left effusion, no right effusion.", [
            "There is pleural effusion of the left "
            "side.", "There is no pleural effusion of the right side."]),
        ("Small left, no large right effusion.", [
            "There is pleural effusion of the left "
            "side.", "There is no pleural effusion of the right side."]),
        ("No effusion on the left, moderate on the right.", [
            "There is no pleural effusion of the left "
            "side.", "There is pleural effusion of the right side."]),
        ("Left effusion and right basilar atelectasis.", [
            "There is pleural effusion of the left "
            "side.", "There is atelectasis of the right basal lung."]),
        ("Right nodule and left effusion and right pneumothorax.", [
            "There is lung lesion of the right "
            "side.", "There is pleural effusion of the left side.",
            "There is pneumothorax of the right side."]),
        ("Small left effusion and no right effusion.", [
            "There is pleural effusion of the left "
            "side.", "There is no pleural effusion of the right side."]),
        ("Left effusion and atelectasis.", [
            "There is pleural effusion of the left "
            "side.", "There is atelectasis of the left side."]),
        ("Opacity in the left base and right base represents pneumonia.", [
            "There is lung opacity of the bilateral basal "
            "lung.", "There is pneumonia of the bilateral basal lung."]),
        ("The heart is enlarged and there is a left effusion.", [
            "There is cardiomegaly.", "There is pleural effusion of the left side."]),
        ("Opacities in both the lungs.", ["There is lung opacity of both sides."]),
        ("No edema. No edema.", ["There is no edema.", "There is no finding."]),
        ("A PICC is in place. No "
         "edema.", ["There is support device.", "There is no edema.", "There is no finding."]),
        ("CT of the chest.", []),
    ],
)  # fmt: skip
def test_statements_of_a_report(text: str, expected: list[str]) -> None:
    assert sorted(statements_of(text)) == sorted(expected)


def test_statements_of_findings_are_read_back_by_the_labeler_and_change_sides_with_the_image() -> (
    None
):
    for finding in FINDINGS[:-1]:
        for value in (1, 0, -1):
            text = statement(finding, value, "left lower lung")
            if finding not in ("No Finding", "Enlarged Cardiomediastinum"):
                assert statement(finding, value, "left lower lung") in statements_of(text)
            assert swap_laterality(text) == text.replace("left", "right")
    assert swap_laterality(ALL[1]) == "There is pleural effusion of the right side."


def test_a_policy_draws_one_statement_or_gives_all() -> None:
    policy = Statements()
    sections = policy.of_sample(sample())
    assert sorted(policy.all_of(sections, rng())) == sorted(ALL)
    assert {policy(sections, np.random.default_rng(seed)) for seed in range(40)} == set(ALL)
    some = Statements(most=2).all_of(sections, rng())
    assert len(some) == 2
    assert set(some) < set(ALL)
    assert policy(policy.of_sample(sample(report="")), rng()) == ""
    sentences = Statements(source="sentences")
    assert sentences.all_of(sentences.of_sample(sample()), rng())[1] == "No pneumothorax."
    labels = Statements(source="labels")
    assert labels.all_of(labels.of_sample(sample(labels={"Edema": 0, "No Finding": 0})), rng()) == [
        "There is no edema."
    ]


def test_labels_become_sentences_where_there_is_no_report() -> None:
    policy = TextOrLabels(text=WholeText())
    assert policy(policy.of_sample(sample(labels={"Edema": 1})), rng()) == REPORT
    text = policy(policy.of_sample(sample(report="", labels={"Edema": 1, "Fracture": -1})), rng())
    assert text in (
        "There is edema. There is possible fracture.",
        "There is possible fracture. There is edema.",
    )


def test_absent_labels_are_drawn() -> None:
    """CXR-CLIP draws three of ChestX-ray14's; present and uncertain ones are all kept."""
    labels = {
        "Mass": 1,
        "Nodule": -1,
        **dict.fromkeys(("Edema", "Fracture", "Hernia", "Pneumonia", "Fibrosis"), 0),
    }
    policy, generator = TextOrLabels(text=WholeText(), most_absent=3), rng()
    texts = [
        policy(policy.of_sample(sample(report="", labels=labels)), generator) for _ in range(60)
    ]
    for text in texts:
        assert {"There is mass.", "There is possible nodule."} <= set(split_sentences(text))
        assert text.count("There is no ") == 3
    assert {name for name,
        value in labels.items() if value == 0 and any(name.lower() in text for text in texts)} == { "Edema", "Fracture", "Hernia", "Pneumonia", "Fibrosis",
    }  # fmt: skip
    for most, count in ((0, 0), (None, 5)):
        policy = TextOrLabels(text=WholeText(), most_absent=most)
        assert (
            policy(policy.of_sample(sample(report="", labels=labels)), generator).count(
                "There is no "
            )
            == count
        )
    with raises(ConfigError, "out_of_range", "most_absent"):
        TextOrLabels(text=WholeText(), most_absent=-1)


def test_sections_and_statements_are_drawn_by_weight() -> None:
    sections = {
        "history": "Cough.",
        "findings": "Large effusion on the left.",
        "impression": "Effusion. No edema.",
    }
    generator = rng()

    def shares(policy: Any, sections: dict[str, str], draws: int = 1000) -> dict[str, float]:
        return {
            text: count / draws
            for text, count in Counter(policy(sections, generator) for _ in range(draws)).items()
        }

    statements = statements_of("Large effusion on the left. Effusion. No edema.")
    expected = {sections["findings"]: 0.4, sections["impression"]: 0.3}
    expected |= dict.fromkeys(statements, 0.3 / len(statements))
    assert shares(SectionOrStatement(), sections) == pytest.approx(expected, abs=0.05)
    only = {"findings": "Lungs are well inflated."}  # neither an impression nor a statement
    assert shares(SectionOrStatement(), only, 20) == {"Lungs are well inflated.": 1}
    found = shares(SectionOrStatement(impression=0, statement=0.4), {"impression": "Effusion."}, 20)
    assert found == {"There is pleural effusion.": 1}
    figure = {"caption": "A chest.", "reference-1": "Edema is seen."}
    drawn = {"A chest.": 0.35, "Edema is seen.": 0.35, "There is edema.": 0.3}
    assert shares(SectionOrStatement(), figure) == pytest.approx(drawn, abs=0.05)
    assert SectionOrStatement()({}, generator) == ""
    labelled = sample(report="", labels={"Edema": 1, "Fracture": 0})
    policy = TextOrLabels(text=SectionOrStatement())
    assert policy.of_sample(sample(report="Clear lungs.")) == {"findings": "Clear lungs."}
    texts = shares(policy, dict(policy.of_sample(labelled)), 300)
    assert {
        "There is edema.",
        "There is no fracture.",
        "There is edema. There is no fracture.",
    } < set(texts)
    for weights in ({"findings": -1.0}, {"findings": 0.0, "impression": 0.0, "statement": 0.0}):
        with raises(ConfigError, "out_of_range", "findings"):
            SectionOrStatement(**weights)


def test_statements_are_read_from_a_file_by_study(tmp_path: Path) -> None:
    file = tmp_path / "statements.jsonl"
    rows = [{"study": "sk", "statements": ["There is a  wire.", " ", "There is a  wire."]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    policy = Statements(source="file", file=file)
    assert policy.all_of(policy.of_sample(sample()), rng()) == ["There is a wire."]
    assert policy.all_of(policy.of_sample(sample("other")), rng()) == []
    for name, content, code in (
        ("cut", '{"study": "a", "statem', "malformed"),
        ("types", '{"study": "a", "statements": "text"}', "malformed"),
        ("twice", '{"study": "a", "statements": []}\n' * 2, "exists"),
    ):
        (tmp_path / name).write_text(content)
        with raises(ConfigError, code, "file"):
            read_statements(tmp_path / name)
    with raises(ConfigError, "not_found", "file"):
        read_statements(tmp_path / "none")


@pytest.mark.parametrize("source", ["labeler", "sentences"])
def test_policies_follow_the_conventions(source: Any) -> None:
    probable = sample(report="Probable edema of the left lung. Vascular congestion.")
    found = {}
    for name in ("chexpert", "indexed"):
        policy = Statements(source=source, joined=True, relabel=True, conventions=name)
        maker = ItemMaker(
            EvalTransform(size=16), policy, FINDINGS, 0, Inputs(labels=True, positions=True)
        )
        item = maker(probable, np.zeros((20, 20), np.uint8), 0)
        edema = FINDINGS.index("Edema")
        found[name] = (item.text, item.labels_L[edema], item.positions[edema] >= 0)
    texts = {
        "labeler": ("There is possible edema of the left side. There is possible edema.",
        "There is edema of the left side."),
        "sentences": ("Probable edema of the left lung. Vascular congestion.",) * 2,
    }  # fmt: skip
    assert found["chexpert"] == (texts[source][0], -1, False)
    assert found["indexed"] == (texts[source][1], 1, True)


def test_a_drawn_statement_follows_the_conventions() -> None:
    sections = {"findings": "Probable edema."}
    drawn = [SectionOrStatement(findings=0, impression=0, statement=1, conventions=name)(sections,
        rng())
             for name in ("chexpert", "indexed")]  # fmt: skip
    assert drawn == ["There is possible edema.", "There is edema."]


def test_settings_of_statements_are_checked() -> None:
    for policy in (Statements, SectionOrStatement):
        with raises(
            ConfigError, "unknown_name", "conventions", names="chexpert, doubtful, indexed"
        ):
            policy(conventions="radiologists")
    with raises(ConfigError, "unknown_name", "source"):
        Statements(source="reports")  # type-checked callers cannot
    for settings in ({"source": "file"}, {"file": Path("x")}):
        with raises(ConfigError, "conflict", "file"):
            Statements(**settings)
    with raises(ConfigError, "out_of_range", "most"):
        Statements(most=0)


@pytest.mark.parametrize("policy", [Statements(), WholeText()])
def test_a_batch_has_all_statements_with_the_sides_of_its_images(policy: Any) -> None:
    tokenizer = train_wordpiece(
        [*ALL, REPORT, swap_laterality(REPORT)], vocab_size=200, min_frequency=1
    )
    inputs = Inputs(statements=True)
    maker = ItemMaker(ConVIRTAugmentation(size=16, flip="swap_text"), policy, (), 0, inputs)
    pixels = np.zeros((20, 20), np.uint8)
    samples = [sample("a"), sample("b", "No pneumothorax."), sample("c", "")]
    items = [maker(each, pixels, 0) for each in samples]
    sides = {
        maker(sample(str(key)), pixels, 0).statements[-3 if isinstance(policy, Statements) else 0]
        for key in range(9)
    }
    assert len(sides) == 2  # some are mirrored, and say so
    batch, _ = Collate(tokenizer, inputs)(items)
    assert batch is not None
    counts = [len(item.statements) for item in items]
    assert counts == ([4, 2, 0] if isinstance(policy, Statements) else [1, 1, 0])
    assert batch.statement_mask_BST.any(dim=2).sum(dim=1).tolist() == counts
    ids_NT, mask_NT = tokenizer([text for item in items for text in item.statements])
    real_BS = batch.statement_mask_BST.any(dim=2)
    assert torch.equal(batch.statement_ids_BST[real_BS], ids_NT)
    assert torch.equal(batch.statement_mask_BST[real_BS], mask_NT)
    assert len(batch.rows([1]).statement_ids_BST) == 1
    empty, _ = Collate(tokenizer, inputs)([maker(sample("c", ""), pixels, 0)])
    assert empty is not None
    assert empty.statement_ids_BST.shape[:2] == (1, 1)
    assert not empty.statement_mask_BST.any()
    assert ItemMaker(EvalTransform(size=16), policy, (), 0)(sample(), pixels, 0).statements == ()
