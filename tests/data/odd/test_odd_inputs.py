"""Inputs as other programs and hospitals write them, through the public commands, each with its right value.

The inputs are made by code in the `odd_*.py` files of this folder. A public bug report becomes a case there before it is
mended.
"""

import csv
import dataclasses
import json
import tarfile
from pathlib import Path

import numpy as np
import odd_dicom
import pytest

from medvl.cli import main as cli
from medvl.data import decode_image


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a command left behind: its exit status, its output and its error output."""

    status: int
    out: str
    err: str


def medvl(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """Run a command of `medvl` in this process."""
    capsys.readouterr()
    try:
        cli.main([str(argument) for argument in arguments])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    printed = capsys.readouterr()
    return Finished(status, printed.out, printed.err)


def write_table(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write a CSV file of rows with the same columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_header_values_of_dicom_files_are_read_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read, refused = odd_dicom.read_cases(), odd_dicom.refused_cases()
    for number, case in enumerate(read + refused):
        (tmp_path / f"{number}.dcm").write_bytes(case.data)
    rows = [{"image": f"{number}.dcm", "patient": number, "case": number} for number in range(len(read + refused))]
    table = write_table(tmp_path / "rows.csv", rows)
    finished = medvl(
        capsys, "shards", "table", "--table", table, "--image-column", "image", "--patient-column", "patient",
        "--extra-column", "case", "--out", tmp_path / "out", "--splits", "train=1", "--short-side", "64",
        "--image-format", "png", "--max-skipped", "1000", "--workers", "1",
    )  # fmt: skip
    assert finished.status == 0, finished.err
    assert f"train: {len(read)} samples of {len(read)} patients, {len(refused)} malformed" in finished.out
    listed = [json.loads(line) for line in (tmp_path / "out-private" / "skipped.jsonl").read_text().splitlines()]
    messages = dict(row["message"].split(": ", 1) for row in listed)
    for number, case in enumerate(refused, len(read)):
        assert messages[str(tmp_path / f"{number}.dcm")].startswith(f"{case.keyword} ("), case.name
    images: dict[str, np.ndarray] = {}
    cases: dict[str, odd_dicom.Case] = {}
    for path in (tmp_path / "out").rglob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                content = tar.extractfile(member).read()
                if suffix == "json":
                    cases[key] = read[int(json.loads(content)["extra"]["case"])]
                else:
                    images[key] = decode_image(content)
    assert len(images) == len(read)
    for key, case in cases.items():
        assert np.abs(images[key] - 255 * case.shades).max() <= 0.51, case.name
