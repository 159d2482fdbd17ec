"""Tables of the small real collections: no patient in two splits, no missing environment."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.benchmark.real_tables import TABLES, write_table
from medvl.errors import ConfigError


def test_a_missing_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    with raises(ConfigError, "not_found", "MEDVL_REAL_DATA", names=str(tmp_path / "medpix")):
        write_table("medpix", tmp_path)


@pytest.mark.real
@pytest.mark.parametrize("name", TABLES)
def test_no_patient_is_in_two_splits(
    name: str, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(real_data))
    table, prompts = write_table(name, tmp_path)
    splits: dict[str, set[str]] = defaultdict(set)
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        splits[row["patient"]].add(row["split"])
        assert (real_data / row["image"]).is_file()
    assert {len(found) for found in splits.values()} == {1}
    assert {split for found in splits.values() for split in found} == {"train", "validate", "test"}
    assert prompts.is_file()
