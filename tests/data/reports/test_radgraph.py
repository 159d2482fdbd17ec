"""Statements from RadGraph's annotations: both forms of labels, names, places, damaged files,
and training on them.
"""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises

from medvl.cli.main import main
from medvl.data import ConVIRTAugmentation, Statements
from medvl.data.loading.items import ItemMaker
from medvl.data.privacy import Deidentifier
from medvl.data.reports.statements import (
    PLACES,
    radgraph_statements,
    read_statements,
    write_statements,
)
from medvl.errors import ConfigError
from medvl.schema import FINDINGS, Inputs, Sample
from medvl.train.recipe_files import choose

RECIPES = Path(__file__).parents[3] / "recipes"

NAME = "p10/p10000032/s50414267.txt"
LONG = {"DP": "definitely present", "DA": "definitely absent", "U": "uncertain"}


def entity(tokens: str, label: str, *relations: list[str], long: bool = False) -> dict[str, Any]:
    kind, _, certainty = label.partition("-")
    name = {"OBS": "Observation", "ANAT": "Anatomy"}[kind]
    full = f"{name}::{LONG[certainty]}" if long else label
    return {
        "tokens": tokens,
        "label": full,
        "start_ix": 0,
        "end_ix": 0,
        "relations": list(relations),
    }


def report(long: bool) -> dict[str, Any]:
    entities = {
        "1": entity("Small", "OBS-DP", ["modify", "2"], long=long),
        "2": entity("effusion", "OBS-DP", ["located_at", "4"], ["suggestive_of", "6"], long=long),
        "3": entity("left", "ANAT-DP", ["modify", "4"], long=long),
        "4": entity("lung", "ANAT-DP", long=long),
        "5": entity("pneumothorax", "OBS-DA", long=long),
        "6": entity("edema", "OBS-U", long=long),
    }
    return {"text": "Small left effusion.", "entities": entities}


STATEMENTS = (
    "There is small effusion of the left lung.",
    "There is no pneumothorax.",
    "There is possible edema.",
)


@pytest.mark.parametrize("long", [False, True])
def test_observations_become_statements_with_modifiers_and_places(
    tmp_path: Path, long: bool
) -> None:
    path = tmp_path / "graphs.json"
    path.write_text(json.dumps({NAME: report(long), "other": {"entities": {}}}))
    assert list(radgraph_statements(path)) == [(NAME, STATEMENTS), ("other", ())]
    deid = Deidentifier(bytes(32))
    named = [study for study, _ in radgraph_statements(path, deid.study)]
    assert named == [deid.study("10000032", "50414267"), "other"]
    lines = tmp_path / "graphs.jsonl"
    row = {"text": "a line\u2028separator", "study": "a", **report(long)}
    lines.write_text(json.dumps(row, ensure_ascii=False) + "\n\n")
    assert list(radgraph_statements(lines)) == [("a", STATEMENTS)]


def test_modifiers_that_form_a_circle_end() -> None:
    ring = {str(n): entity(f"w{n}", "ANAT-DP", ["modify", str(1 - n)]) for n in (0, 1)}
    ring["2"] = entity("mass", "OBS-DP", ["located_at", "0"])
    from medvl.data.reports.statements import _statements

    (text,) = _statements(ring)
    assert text.startswith("There is mass of the ")


@pytest.mark.parametrize(
    "content",
    ["[1]", "{", '{"a": '
                 '1}', '{"a": {"entities": {"1": {"tokens": "x", "label": "OBS-DP", '
                       '"relations": [["modify", "9"]]}}}}',
     '{"a": {"entities": {"1": {"tokens": "x", "label": "?"}}}}'],
)  # fmt: skip
def test_other_files_are_refused_without_their_text(tmp_path: Path, content: str) -> None:
    path = tmp_path / "graphs.json"
    path.write_text(content)
    with raises(ConfigError, "malformed", "file"):
        list(radgraph_statements(path))
    with raises(ConfigError, "not_found", "file"):
        list(radgraph_statements(tmp_path / "none.json"))


def test_labels_and_places_of_training_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs, out = tmp_path / "graphs.json", tmp_path / "statements.jsonl"
    graphs.write_text(json.dumps({"s": report(long=False)}))
    main(["knowledge", "radgraph", "--file", str(graphs), "--out", str(out), "--named", "shards"])
    printed = capsys.readouterr().out
    assert "statements of 1 studies" in printed
    for name in ("radzero", "carzero", "medklip", "kad", "mavl"):
        presets = runpy.run_path(str(RECIPES / f"{name}_mimic.py"))["PRESETS"]
        chosen = choose(presets, printed.partition("Train on them: ")[2].split()).data.text
        assert (chosen.source, chosen.file, chosen.relabel) == ("file", out, True)
    assert write_statements(radgraph_statements(graphs), tmp_path / "again.jsonl") == 1
    sample = Sample(
        key="k", corpus="c", split="train", patient="p", study="s",
        sections={"findings": "Fracture of the right clavicle."}, labels={"Fracture": 1},
    )  # fmt: skip
    image = ConVIRTAugmentation(size=16, flip="off")
    for relabel in (False, True):
        text = Statements(source="file", file=out, joined=True, relabel=relabel)
        maker = ItemMaker(image, text, FINDINGS, 0, Inputs(labels=True, positions=True))
        item = maker(sample, np.zeros((20, 20), np.uint8), 0)
        assert item.text == " ".join(STATEMENTS)
        found = {
            name: value
            for name, value in zip(FINDINGS, item.labels_L, strict=True)
            if not np.isnan(value)
        }
        places = {
            name: PLACES[place]
            for name, place in zip(FINDINGS, item.positions, strict=True)
            if place >= 0
        }
        if relabel:
            assert found == {"Edema": -1, "Pleural Effusion": 1, "Pneumothorax": 0}
            assert places == {"Pleural Effusion": "left side"}
        else:
            assert found == {"Fracture": 1}
    with raises(ConfigError, "conflict", "relabel"):
        Statements(source="labels", relabel=True)


def test_statements_by_names_of_mimic_have_those_of_its_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The salt is that of the shards; other names are kept."""
    file, out, salt = tmp_path / "written.jsonl", tmp_path / "statements.jsonl", tmp_path / "salt"
    salt.write_text("00" * 32)
    names = NAME, "p10/p10000032/s50414267x", "own"
    file.write_text(
        "".join(json.dumps({"study": name, "statements": [name]}) + "\n" for name in names)
    )
    main(
        [
            "knowledge",
            "statements",
            "--file",
            str(file),
            "--out",
            str(out),
            "--salt-file",
            str(salt),
        ]
    )
    assert f"--data.text.file {out}" in capsys.readouterr().out
    hashed = Deidentifier.from_file(salt).study("10000032", "50414267")
    assert dict(read_statements(out)) == {hashed: (NAME,), names[1]: (names[1],), "own": ("own",)}
