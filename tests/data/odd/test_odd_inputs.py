"""Inputs as other programs and hospitals write them, through the public commands, each with its
right value.

The inputs are made by code in the `odd_*.py` files of this folder. A public bug report becomes a
case there before it is mended.
"""

import csv
import dataclasses
import gzip
import json
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import odd_dicom
import odd_files
import odd_images
import odd_labels
import odd_reports
import odd_tables
import odd_tars
import odd_texts
import odd_weights
import pytest
import torch
from helpers.errors import raises
from helpers.published import random_tensors, shapes_of
from torch import Tensor

from medvl.cli import main as cli
from medvl.common.untrusted import ANYWHERE
from medvl.data import (
    EntityFinder,
    decode_image,
    label_report,
    mention_values,
    read_image,
    split_sentences,
    statements_of,
)
from medvl.data.corpora import table as own_table
from medvl.data.corpora.common.formats import read_sheet
from medvl.data.corpora.common.tables import FREE_LINES
from medvl.data.corpora.table import TableColumns
from medvl.data.privacy import Deidentifier
from medvl.data.reports.cleaning import first_text
from medvl.data.shards.format import Manifest, split_folders
from medvl.data.shards.source import ShardSource
from medvl.data.storage.location import locate
from medvl.data.storage.webdataset_tars import TarFields, read_tar
from medvl.encoders import create_image_encoder
from medvl.errors import CorpusError, EvaluationError, ImageError, MedvlError, WeightsError
from medvl.eval import load_prompts, read_predictions
from medvl.export import load_encoder
from medvl.inference.generation import prompts_of_file


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


def test_header_values_of_dicom_files_are_read_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, refused = odd_dicom.read_cases(), odd_dicom.refused_cases()
    for number, case in enumerate(read + refused):
        (tmp_path / f"{number}.dcm").write_bytes(case.data)
    rows = [
        {"image": f"{number}.dcm", "patient": number, "case": number}
        for number in range(len(read + refused))
    ]
    table = write_table(tmp_path / "rows.csv", rows)
    finished = medvl(
        capsys, "shards", "table", "--table", table, "--image-column", "image", "--patient-column",
        "patient", "--extra-column", "case", "--out", tmp_path / "out", "--splits", "train=1",
        "--short-side", "64", "--image-format", "png", "--max-skipped", "1000", "--workers", "1",
    )  # fmt: skip
    assert finished.status == 0, finished.err
    assert (
        f"train: {len(read)} samples of {len(read)} patients, {len(refused)} malformed"
        in finished.out
    )
    listed = [
        json.loads(line)
        for line in (tmp_path / "out-private" / "skipped.jsonl").read_text().splitlines()
    ]
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


def convert_tar(capsys: pytest.CaptureFixture[str], tar: Path, *options: str) -> Finished:
    out = tar.with_suffix(".shards")
    command = ["shards", "webdataset", "--tars", tar, "--out", out, "--splits", "train=1"]
    return medvl(
        capsys, *command, "--salt-file", tar.parent / "salt", "--new-salt", "--workers", 1, *options
    )


@pytest.mark.parametrize("case", odd_tars.READ)
def test_tars_are_read(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sample is in the shards, or is left out with a printed reason that `medvl verify`
    repeats.
    """
    members, options, samples, printed = odd_tars.READ[case]
    tar = odd_tars.write(tmp_path / "a.tar", members)
    done = convert_tar(capsys, tar, *options)
    assert done.status == 0, done.err
    assert printed in done.out
    out = tar.with_suffix(".shards")
    assert sum(Manifest.read(folder).samples for folder in split_folders(out)) == samples
    verified = medvl(capsys, "verify", out)
    assert verified.status == 0
    assert printed in verified.out


def test_captions_of_tars_are_cleaned_as_cells_of_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = (*odd_reports.NO_TEXT_CELLS, *odd_reports.POINTING_CELLS)
    texts = dict.fromkeys(empty, "") | odd_reports.CLEANED_CELLS
    members: list[tuple[str, bytes]] = []
    for number, text in enumerate(texts):
        caption = text.encode() if number % 2 else json.dumps({"caption": text}).encode()
        members += [
            (f"{number:03d}.jpg", odd_tars.JPEG),
            (f"{number:03d}.{'txt' if number % 2 else 'json'}", caption),
        ]
    tar = odd_tars.write(tmp_path / "a.tar", members)
    for sample, expected in zip(read_tar(locate(tar), TarFields()), texts.values(), strict=True):
        assert (
            first_text(TarFields().texts_of(sample), Counter()) == expected
        )  # as training on the tar reads it
    done = convert_tar(capsys, tar)
    assert done.status == 0, done.err
    stored = [ShardSource(folder) for folder in split_folders(tar.with_suffix(".shards"))]
    kept = [
        source.sample(row).sections["caption"] for source in stored for row in range(len(source))
    ]
    assert sorted(kept) == sorted(filter(None, texts.values()))
    counted = Counter(
        {name: int(count) for count, name in re.findall(r"(\d+) (\w+_texts|texts_\w+)", done.out)}
    )
    assert counted["missing_texts"] + counted["texts_referring_elsewhere"] == len(
        list(filter(str.strip, empty))
    )
    assert counted["cleaned_texts"] > 9


@pytest.mark.parametrize("case", odd_tars.REFUSED)
def test_tars_that_would_lose_samples_are_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members, options, message = odd_tars.REFUSED[case]
    done = convert_tar(capsys, odd_tars.write(tmp_path / "a.tar", members), *options)
    assert done.status != 0
    assert message in done.err


def test_links_in_tars_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = convert_tar(capsys, odd_tars.links(tmp_path / "a.tar"))
    assert done.status != 0
    assert "--hard-dereference" in done.err


@pytest.mark.parametrize(
    "case", odd_images.png_cases() + odd_images.jpeg_cases(), ids=lambda case: case.name
)
def test_images_of_other_programs_are_read_as_viewers_show_them(case: odd_images.Case) -> None:
    for color in (False, True):
        pixels = read_image(case.data, color=color)
        grey = case.pixels if not color else case.pixels[:, :, None]
        assert pixels.shape[:2] == case.pixels.shape
        assert np.abs(pixels.astype(int) - grey).max() <= 3


@pytest.mark.parametrize("case", odd_images.refused_cases(), ids=lambda case: case.name)
def test_images_that_are_damaged_or_too_large_are_refused(
    case: odd_images.Case, tmp_path: Path
) -> None:
    (tmp_path / "image.png").write_bytes(case.data)
    with raises(ImageError, case.code, names="image.png"):
        read_image(tmp_path / "image.png")


DECODE = """
import sys, time
from pathlib import Path
from medvl.data import decode_image

for path in sys.argv[1:]:
    start = time.process_time()
    decode_image(Path(path).read_bytes(), color=True)
    # The peak of getrusage is that of the parent, where that was larger when it forked.
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(round(time.process_time() - start, 2), int(peak) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory is read from /proc")
def test_the_largest_images_take_less_than_512_mb(tmp_path: Path) -> None:
    cases = odd_images.large_cases()
    for number, case in enumerate(cases):
        (tmp_path / f"{number}.png").write_bytes(case.data)
    paths = [str(tmp_path / f"{number}.png") for number in range(len(cases))]
    run = subprocess.run(
        [sys.executable, "-c", DECODE, *paths],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    for case, line in zip(cases, run.stdout.splitlines(), strict=True):
        seconds, peak = map(float, line.split())
        assert peak < 512, case.name
        assert seconds < 4, case.name


def convert_table(capsys: pytest.CaptureFixture[str], table: Path, content: bytes) -> Finished:
    table.write_bytes(content)
    command = [
        "shards",
        "table",
        "--table",
        table,
        "--patient-column",
        "patient",
        "--text-column",
        "text",
    ]
    command += [
        "--extra-column",
        "image",
        "--age-column",
        "age",
        "--splits",
        "train=1",
        "--workers",
        1,
    ]
    labels = [] if ".jsonl" in table.name else ["--label-column", "effusion"]
    return medvl(
        capsys,
        *command,
        *labels,
        "--out",
        table.parent / "out",
        "--salt-file",
        table.parent / "salt",
        "--new-salt",
    )


@pytest.mark.parametrize("case", odd_tables.READ)
def test_tables_of_spreadsheets_are_read(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = convert_table(capsys, tmp_path / "rows.csv", odd_tables.READ[case])
    assert done.status == 0, done.err
    assert "table: read 3 rows: kept 3, left out 0" in done.out
    source = ShardSource(tmp_path / "out" / "train")
    samples = sorted(
        map(source.sample, range(len(source))), key=lambda sample: str(sample.extra["image"])
    )
    values = [
        (sample.age, sample.labels.get("effusion"), sample.sections["text"]) for sample in samples
    ]
    assert values == odd_tables.VALUES


def test_invalid_rows_are_printed_and_counted_and_no_sample_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"patient": n, "text": "Clear." if n % 4 else "None", "age": 40, "effusion": n % 2}
        for n in range(200)
    ]
    rows[7]["effusion"] = rows[9]["effusion"] = "SECRET"
    table = write_table(tmp_path / "rows.csv", rows)
    command = [
        "shards",
        "table",
        "--table",
        table,
        "--patient-column",
        "patient",
        "--text-column",
        "text",
    ]
    command += [
        "--label-column",
        "effusion",
        "--splits",
        "train=1",
        "--workers",
        1,
        "--out",
        tmp_path / "out",
    ]
    done = medvl(capsys, *command)
    assert done.status == 0, done.err
    assert "table: read 200 rows: kept 198, left out 2 (2 cell_malformed)" in done.out
    assert f"skipped rows: {table}, row 8: effusion must be 1, 0" in done.out
    assert f"{table}, row 10: effusion must be" in done.out
    assert "train: 148 samples of 148 patients, 50 no_text" in done.out
    assert medvl(capsys, *command).out == done.out  # resumed, complete
    assert "left out 2 (2 cell_malformed)" in medvl(capsys, "verify", tmp_path / "out").out
    rows[11]["effusion"] = "SECRET"
    write_table(table, rows)
    refused = medvl(capsys, *command[:-1], tmp_path / "over")
    assert refused.status == 1
    assert "3 of 200 rows cannot be used (3 cell_malformed), over the budget of 2" in refused.err
    assert f"{table}, row 12: effusion must be" in refused.err
    assert "SECRET" not in done.out + refused.err
    write_table(table, rows[::4])
    empty = medvl(capsys, *command[:-1], tmp_path / "empty")
    assert (empty.status, empty.out) == (1, "")
    assert "no sample was written of 50 (50 no_text)" in empty.err


@pytest.mark.parametrize("case", odd_tables.REFUSED)
def test_tables_that_cannot_be_read_are_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = odd_tables.REFUSED[case]
    done = convert_table(capsys, tmp_path / "rows.csv", content)
    assert done.status == 1
    assert message in done.err


@pytest.mark.parametrize("case", odd_tables.JSON_REFUSED)
def test_json_lines_with_lost_values_are_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = odd_tables.JSON_REFUSED[case]
    done = convert_table(capsys, tmp_path / "rows.jsonl", content)
    assert done.status == 1
    assert message in done.err


def test_tables_that_unpack_to_too_much_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = convert_table(capsys, tmp_path / "rows.csv.gz", odd_tables.packed_rows(2_000_000))
    assert done.status == 1
    assert "gunzip" in done.err
    for name, content in {"cells": odd_tables.MANY_CELLS, "bytes": odd_tables.MANY_BYTES}.items():
        (tmp_path / f"{name}.xlsx").write_bytes(content)
        with raises(CorpusError, "too_large", names=f"{name}.xlsx"):
            list(read_sheet(tmp_path / f"{name}.xlsx", ["Image"], ANYWHERE))
    for name, rows_of_tags in odd_tables.MANY_TAGS.items():
        (tmp_path / "tags.xlsx").write_bytes(odd_tables.workbook(rows_of_tags))
        with raises(CorpusError, "too_large", names="more than 1310720 tags"):
            pytest.fail(
                f"{name}: {len(list(read_sheet(tmp_path / 'tags.xlsx', ['Image'], ANYWHERE)))} rows"
            )
    (tmp_path / "sparse.xlsx").write_bytes(odd_tables.SPARSE)
    rows = list(read_sheet(tmp_path / "sparse.xlsx", ["Image"], ANYWHERE))
    assert rows == [{"Image": "a.png", "Description": "A text."}]


@pytest.mark.parametrize("line", [b"a.png,1,x\n", b"\n", b"\r", b",,\r\n", b"a.png\n"])
def test_packed_tables_of_too_many_lines_are_refused_soon(
    tmp_path: Path, line: bytes, deid: Deidentifier
) -> None:
    path, header = tmp_path / "rows.csv.gz", b"image,patient,text\n"
    path.write_bytes(gzip.compress(header + line * (FREE_LINES + 1)))
    columns = TableColumns(image_column="image", patient_column="patient")
    start = time.process_time()
    with raises(CorpusError, "too_large", names=f"more than {FREE_LINES} lines"):
        own_table.Table(table=path, columns=columns).plan(deid)
    assert time.process_time() - start < 10
    path.write_bytes(gzip.compress(header + b"a.png,1,x\n" + b"\n" * (FREE_LINES - 9)))
    assert own_table.Table(table=path, columns=columns).plan(deid).rows.kept == 1


def test_rows_that_are_filtered_out_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(
        tmp_path / "rows.csv",
        [{"p": n, "text": "A text.", "source": "ab"[n % 2]} for n in range(10)],
    )
    done = medvl(
        capsys, "shards", "table", "--table", table, "--patient-column", "p", "--text-column",
        "text", "--where", "source=a", "--out", tmp_path / "out", "--splits", "train=1",
        "--workers", "1",
    )  # fmt: skip
    line = "table: read 10 rows: kept 5, left out 5 (5 where)"
    assert line in done.out
    assert line in medvl(capsys, "verify", tmp_path / "out").out


@pytest.mark.parametrize("name", odd_files.READ)
def test_texts_of_every_known_encoding_are_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encode = odd_files.READ[name]
    path = tmp_path / "file"
    path.write_bytes(encode(odd_files.json_lines(odd_files.answers())))
    assert [each.answer for each in read_predictions(path).values()] == list(odd_files.TEXTS)
    path.write_bytes(encode("\n".join(odd_files.TEXTS) + "\n"))
    assert [prompt.text for prompt in prompts_of_file(path)[0]] == list(odd_files.TEXTS)
    (tmp_path / "set.json").write_bytes(encode(odd_files.prompt_file()))
    assert load_prompts(tmp_path / "set.json").texts() == ("Ein Ödem ist zu sehen.", "Kein Ödem.")
    (tmp_path / "reports.jsonl").write_bytes(encode(odd_files.json_lines(odd_files.reports())))
    (tmp_path / "labels.csv").write_bytes(encode(odd_files.chexbert_table(odd_files.TEXTS)))
    out, labels = tmp_path / "out", tmp_path / "labels.csv"
    done = medvl(capsys, "eval", "report-generation", "--predictions", tmp_path / "reports.jsonl",
        "--out", out,
                 "--chexbert", labels, labels, "--resamples", 2)  # fmt: skip
    assert done.status == 0, done.err
    lines = (out / "predictions.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["generated"] for line in lines] == list(odd_files.TEXTS)


@pytest.mark.parametrize("name", odd_files.REFUSED)
def test_texts_of_unknown_encodings_are_refused_by_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(odd_files.REFUSED[name](odd_files.json_lines(odd_files.reports())))
    refused = medvl(
        capsys, "eval", "report-generation", "--predictions", path, "--out", tmp_path / "out"
    )
    assert refused.status == 1
    assert f"{path}, line 1" in refused.err
    assert "UTF-8" in refused.err
    assert "Traceback" not in refused.err
    for read in (read_predictions, load_prompts):
        with raises(EvaluationError, "malformed", names=f"{path}, line 1"):
            read(path)


@pytest.mark.parametrize("name", odd_files.BROKEN_LINES)
def test_damaged_json_lines_are_refused_by_file_and_line(name: str, tmp_path: Path) -> None:
    text, number = odd_files.BROKEN_LINES[name]
    path = tmp_path / "answers.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EvaluationError) as caught:
        read_predictions(path)
    assert f"{path}, line {number}" in str(caught.value)
    assert caught.value.code in ("malformed", "wrong_type", "conflict")


def test_labels_in_odd_spellings_are_evaluated_as_their_findings() -> None:
    spellings = {"Pleural Effusion": "Pleural_Effusion", "Cardiomegaly": "cardiomegaly",
        "Edema": "EDEMA",
                 "Lung Opacity": "Airspace Opacity", "Pneumothorax": " pneumothorax"}  # fmt: skip
    prompts = load_prompts("chexpert_pairs").for_labels(list(spellings.values()))
    assert prompts.labels_of(list(spellings.values())) == spellings
    asked = (
        load_prompts("statements")
        .for_labels([*spellings.values(), "finding=mass", "Rib_Fracture"])
        .texts()
    )
    assert {"There is mass.", "There is rib fracture.", "There is airspace opacity."} <= set(asked)
    assert not any(sign in text for text in asked for sign in "_=")


@pytest.mark.parametrize("kind", odd_labels.PHRASES)
def test_phrases_of_findings_have_their_labels(kind: str) -> None:
    """Labels, statements and values of entities follow the same rules."""
    finder = EntityFinder.of(odd_labels.nouns())
    wrong = []
    for text, expected in odd_labels.cases(kind):
        labels = label_report(text)
        labels.pop("No Finding", None)
        stated = odd_labels.stated_values(statements_of(text), expected)
        mentions = finder.find(text)
        values = zip(
            (entity for _, _, entity in mentions), mention_values(text, mentions), strict=True
        )
        entities = odd_labels.entity_values(values)
        named = {finding: value for finding, value in expected.items() if finding in entities}
        if not labels == stated == expected or entities != named:
            wrong.append((text, expected, labels, stated, entities))
    assert wrong == []


def test_identifiers_in_texts_are_counted_and_phrases_of_reports_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [text for text in odd_texts.IDENTIFIERS if text not in odd_texts.MISSED]
    assert len(found) >= 0.95 * len(odd_texts.IDENTIFIERS) >= 0.95 * 100
    warned: dict[str, int] = {}
    for name, texts in (("identifiers", found), ("phrases", odd_texts.PHRASES)):
        rows = [{"text": text, "patient": number} for number, text in enumerate(texts)]
        finished = medvl(
            capsys, "shards", "table", "--table", write_table(tmp_path / f"{name}.csv", rows),
            "--patient-column", "patient", "--text-column", "text", "--out", tmp_path / name,
            "--workers", "1", "--splits", "train=1",
        )  # fmt: skip
        assert finished.status == 0, finished.err
        (split,) = split_folders(tmp_path / name)
        warnings = Manifest.read(tmp_path / name / split).warnings
        warned[name] = sum(
            count for kind, count in warnings.items() if kind.startswith("possible_")
        )
    assert warned["identifiers"] >= len(found)
    assert warned["phrases"] == 0
    assert "possible_name" in Manifest.read(tmp_path / "identifiers" / "train").warnings


def tiny_resnet(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_image_encoder(
        "resnet18", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32), **options
    ).eval()


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Weights of a tiny ResNet without counters, other than those that its factory draws."""
    torch.manual_seed(5)
    return {
        name: torch.rand(tensor.shape) + 0.5
        for name, tensor in tiny_resnet().backbone.state_dict().items()
        if tensor.is_floating_point()
    }


def loads(
    expected: Mapping[str, Tensor], factor: float = 1, tolerance: float = 0, **options: Any
) -> bool:
    state = tiny_resnet(**options).backbone.state_dict()
    return all(
        torch.allclose(state[name], factor * tensor, rtol=tolerance)
        for name, tensor in expected.items()
    )


def test_files_of_weights_are_read_exactly(weights: dict[str, Tensor], tmp_path: Path) -> None:
    cases = {**{name: (write, 0) for name, write in odd_weights.EXACT.items()},
             **{name: (write, 0.01) for name, write in odd_weights.CLOSE.items()}}  # fmt: skip
    wrong = []
    for number, (name, (write, tolerance)) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            right = loads(weights, tolerance=tolerance, pretrained=write(weights, folder))
        except MedvlError as error:
            right, name = False, f"{name}: {error}"
        wrong += [] if right else [name]
    assert wrong == []


@pytest.mark.parametrize("name", odd_weights.SETS)
def test_one_of_several_sets_of_weights_is_chosen_by_its_name(
    weights: dict[str, Tensor], tmp_path: Path, name: str
) -> None:
    write, (plain, copy) = odd_weights.SETS[name]
    path = write(weights, tmp_path)
    with raises(WeightsError, "conflict", "weights", names=copy) as caught:
        tiny_resnet(pretrained=path)
    assert plain in str(caught.value)
    assert loads(weights, pretrained=path, weights=plain)
    assert loads(weights, 2, pretrained=path, weights=copy)
    assert loads(weights, 2, pretrained=f"{path}#{copy}")
    with raises(WeightsError, "unknown_name", "weights", names=copy):
        tiny_resnet(pretrained=path, weights="none")


@pytest.mark.parametrize("name", odd_weights.REFUSED)
def test_what_is_no_usable_file_of_weights_is_refused_by_name(
    weights: dict[str, Tensor], tmp_path: Path, name: str
) -> None:
    write, code, words = odd_weights.REFUSED[name]
    with raises(WeightsError, code, names=words):
        tiny_resnet(pretrained=write(weights, tmp_path))


def test_import_reads_one_set_of_weights_and_lists_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = random_tensors(shapes_of("biovil_image"))
    averaged = {
        key: tensor * 2 if tensor.is_floating_point() else tensor for key, tensor in tensors.items()
    }
    torch.save({"model": tensors, "model_ema": averaged, "epoch": 3}, tmp_path / "b.pt")
    refused = medvl(capsys, "import", "biovil_image", tmp_path / "b.pt", "--out", tmp_path / "a")
    assert refused.status != 0
    assert "several sets of weights: model, model_ema" in refused.err
    assert not (tmp_path / "a").exists()
    done = medvl(
        capsys,
        "import",
        "biovil_image",
        tmp_path / "b.pt",
        "--weights",
        "model_ema",
        "--out",
        tmp_path / "ema",
    )
    assert done.status == 0
    assert "not read: model: another set of weights" in done.out
    report = json.loads((tmp_path / "ema" / "import.json").read_text())
    assert report["weights"] == "model_ema"
    assert report["beside"] == {
        "model": "another set of weights",
        "epoch": "no weights of the model",
    }
    stem = load_encoder(tmp_path / "ema" / "image_encoder").get_parameter("backbone.conv1.weight")
    assert torch.equal(stem, averaged["encoder.encoder.conv1.weight"])
    torch.save(
        {**tensors, "encoder.encoder.conv1.weight": stem.detach() * torch.inf}, tmp_path / "nan.pt"
    )
    broken = medvl(capsys, "import", "biovil_image", tmp_path / "nan.pt", "--out", tmp_path / "nan")
    assert broken.status != 0
    assert "NaN or infinite" in broken.err


def converted_reports(
    capsys: pytest.CaptureFixture[str], folder: Path, rows: list[dict[str, str]], *options: str
) -> tuple[dict[str, dict[str, str]], str]:
    """Convert a table of reports; return the stored sections by the column `name`, and the
    output.
    """
    table, salt, out = folder / "reports.jsonl", folder / "salt", folder / "shards"
    table.write_text(
        "".join(
            json.dumps({"patient": f"p{n}", "split": "train", **row}) + "\n"
            for n, row in enumerate(rows)
        )
    )
    salt.write_text("5e" * 32)
    salt.chmod(0o600)
    columns = ("--patient-column", "patient", "--split-column", "split", "--extra-column", "name")
    made = medvl(
        capsys,
        "shards",
        "table",
        "--table",
        table,
        *columns,
        "--salt-file",
        salt,
        "--out",
        out,
        *options,
    )
    assert made.status == 0, made.err
    assert medvl(capsys, "verify", out / "train").status == 0
    samples = ShardSource(out / "train")
    stored = [samples.sample(position) for position in range(len(samples))]
    return {str(sample.extra["name"]): dict(sample.sections) for sample in stored}, made.out


def test_reports_in_the_layouts_of_many_hospitals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"name": name, "report": layout.text} for name, layout in odd_reports.LAYOUTS.items()]
    stored, printed = converted_reports(
        capsys, tmp_path, rows, "--text-column", "report", "--parse-reports"
    )
    assert stored.keys() == odd_reports.LAYOUTS.keys()
    for name, layout in odd_reports.LAYOUTS.items():
        sections = stored[name]
        for section, sentences in (
            ("findings", layout.findings),
            ("impression", layout.impression),
        ):
            found = [
                sentence.rstrip(".,;") for sentence in split_sentences(sections.pop(section, ""))
            ]
            assert found == list(sentences), (name, section)
        assert set(sections) == set(layout.context), name
    for count, times in Counter(
        count for layout in odd_reports.LAYOUTS.values() for count in layout.counts
    ).items():
        assert int(re.search(rf"(\d+) {count}\b", printed)[1]) >= times, (count, printed)


def test_cells_of_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = (*odd_reports.NO_TEXT_CELLS, *odd_reports.POINTING_CELLS, *odd_reports.CLEANED_CELLS)
    rows = [
        {"name": f"{n}.", "section_findings": text, "section_clinical_history": "Pneumonia?"}
        for n, text in enumerate(texts)
    ]
    columns = ("--text-column", "section_findings", "section_clinical_history")
    stored, printed = converted_reports(capsys, tmp_path, rows, *columns)
    for n, text in enumerate(texts):
        findings = odd_reports.CLEANED_CELLS.get(text)
        assert stored[f"{n}."] == ({} if findings is None else {"findings": findings}) | {
            "history": "Pneumonia?"
        }, text
    missing = sum(bool(text.strip()) for text in odd_reports.NO_TEXT_CELLS)
    assert f"{missing} missing_texts" in printed
    assert f"{len(odd_reports.POINTING_CELLS)} texts_referring_elsewhere" in printed
    assert (
        f"{len(odd_reports.NO_TEXT_CELLS) + len(odd_reports.POINTING_CELLS)} no_description"
        in printed
    )
    assert "cleaned_texts" in printed
