"""`medvl shards` and `medvl vocab` as users run them: warnings, salts, locks, interrupts, and
folders that are in use.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import textured
from helpers.shard_plans import OPTIONS, make_plan

from medvl.cli import main as cli
from medvl.common.files import RunLock
from medvl.data.convert import pipeline
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, MedvlError


def command(
    folder: Path, *options: str, texts: tuple[str, ...] = ("Clear.",), count: int = 4
) -> list[str]:
    """Write a table with images, and return the command that converts it into `folder / "out"`."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        (folder / f"images/{number}.png").write_bytes(encode_png(textured(number, 40, 50)))
        text = texts[number % len(texts)]
        rows.append(
            {
                "image": f"images/{number}.png",
                "patient": f"p{number}",
                "text": text,
                "edema": number % 2,
            }
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    required = [
        "--table",
        str(folder / "rows.jsonl"),
        "--image-column",
        "image",
        "--patient-column",
        "patient",
    ]
    text = [] if "--label-column" in options else ["--text-column", "text"]
    return [
        "shards",
        "table",
        *required,
        *text,
        "--out",
        str(folder / "out"),
        "--workers",
        "1",
        *options,
    ]


def test_warnings_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(command(tmp_path, texts=("Seen on 03/14/2015 by Dr. Smith.", "Clear.")))
    out = capsys.readouterr().out
    assert "warnings: 2 possible_date, 2 possible_doctor\n" in out
    assert "may name a person" in out
    cli.main(command(tmp_path / "clean"))
    out = capsys.readouterr().out
    assert "warnings:" not in out
    assert "may name a person" not in out


def test_identifiers_in_extra_columns_are_counted_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(
        tmp_path, "--extra-column", "note", "codes", "score", "prior", "--splits", "train=1"
    )
    table = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    rows[0] |= {"note": "Read by Mr. Smith on 03/14/2015", "codes": 12345678}
    rows[1] |= {"note": "clear", "codes": [{"seen": "14-Mar-2015"}]}
    rows[2] |= {"note": None, "codes": 7, "score": 0.123456789}
    rows[3] |= {"score": True, "prior": "CT on 03/14/2015"}
    table.write_text(
        "".join(
            json.dumps({"note": "", "codes": "", "score": "", "prior": ""} | row) + "\n"
            for row in rows
        )
    )
    cli.main(arguments)
    out = capsys.readouterr().out
    assert "warnings: 3 possible_date, 1 possible_name, 1 possible_number\n" in out
    assert "may name a person" in out
    assert Manifest.read(tmp_path / "out/train").warnings["possible_date"] == 3
    notes = [ShardSource(tmp_path / "out/train").sample(row).extra.get("note") for row in range(4)]
    assert "Read by Mr. Smith on 03/14/2015" in notes


def test_burned_in_text_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path)
    dataset = image_dataset(np.zeros((64, 64), np.uint16), BurnedInAnnotation="YES")
    write_dataset(tmp_path / "a.dcm", dataset).replace(tmp_path / "images/2.png")
    cli.main(arguments)
    out = capsys.readouterr().out
    assert "1 says_burned_in" in out
    assert "may name a person" in out


def test_labels_without_text_are_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(command(tmp_path, "--label-column", "edema"))
    manifests = [Manifest.read(path.parent) for path in (tmp_path / "out").glob("*/manifest.json")]
    assert sum(manifest.samples for manifest in manifests) == 4
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(command(tmp_path / "empty", texts=("",)))
    assert ended.value.code == 1
    assert "no sample was written of 4 (4 no_text); to keep images" in capsys.readouterr().err


def test_named_salt_file_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    salt = tmp_path / "slat"
    for options in (["--salt-file", str(salt)], []):
        if not options:
            monkeypatch.setenv("MEDVL_SALT_FILE", str(salt))
        with pytest.raises(SystemExit):
            cli.main(command(tmp_path, *options))
        message = capsys.readouterr().err
        assert str(salt) in message
        assert "--new-salt" in message
        assert not salt.exists()
    cli.main(command(tmp_path, "--new-salt"))
    assert f"Creating the salt file {salt}" in capsys.readouterr().err
    monkeypatch.delenv("MEDVL_SALT_FILE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cli.main(command(tmp_path / "default"))
    assert "Creating the salt file" in capsys.readouterr().err
    assert (tmp_path / "home/.config/medvl/salt").is_file()
    cli.main(command(tmp_path / "again"))
    assert "Creating" not in capsys.readouterr().err


def test_two_conversions_into_one_folder_exclude_each_other(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan, run = make_plan(tmp_path / "images"), ShardRun(out=tmp_path / "out", workers=1)
    seen: list[MedvlError] = []
    original = pipeline.build_shard

    def second(*arguments: object) -> object:
        if not seen:
            with raises(ConfigError, "in_use", "out", names="out-private") as caught:
                write_shards(plan, deid, run, OPTIONS)
            seen.append(caught.value)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "build_shard", second)
        assert write_shards(plan, deid, run, OPTIONS)["train"].samples == 12
    assert len(seen) == 1
    with RunLock(tmp_path / "out-private"), raises(ConfigError, "in_use", "out"):
        write_shards(plan, deid, run, OPTIONS)
    assert write_shards(plan, deid, run, OPTIONS)["train"].samples == 12


def interrupt_conversion(folder: Path, count: int) -> tuple[list[str], int, str]:
    """Send SIGINT to a conversion and its workers after two shards; return its arguments, exit
    status and errors.
    """
    arguments = command(
        folder, "--workers", "2", "--samples-per-shard", "4", "--split-column", "split", count=count
    )
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pictures = [encode_png(textured(number, 700, 600)) for number in range(7)]
    for number, row in enumerate(rows):
        (folder / row["image"]).write_bytes(pictures[number % 7])
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"split": "train"}) + "\n" for row in rows)
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "medvl", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored where a shell runs the tests with &
    )
    for _ in range(3000):
        if (
            len(list((folder / "out-private").glob("table-*.json"))) >= 2
            or process.poll() is not None
        ):
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return arguments, process.returncode, errors


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line_and_the_command_resumes(tmp_path: Path) -> None:
    """Send SIGINT to the command and its workers, as a terminal does, then run the same command
    again.
    """
    for count in (
        120,
        400,
        1200,
    ):  # on a busy machine a short conversion may end before it gets the signal
        folder = tmp_path / str(count)
        arguments, status, errors = interrupt_conversion(folder, count)
        if status:
            break
    assert status == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "medvl: interrupted; run the same command again to resume"
    assert not list((folder / "out/train").glob("*.partial"))
    recorded = {path.stem for path in (folder / "out-private").glob("table-*.json")}
    tars = list((folder / "out/train").glob("*.tar"))
    finished = {path: path.stat().st_mtime_ns for path in tars if path.stem in recorded}
    assert 2 <= len(recorded) == len(finished) < count // 4
    # A shard is recorded after it is renamed, so those in flight (two for each worker) may be there
    # without a record.
    assert len(tars) - len(finished) <= 4
    cli.main([*arguments, "--workers", "1"])
    assert Manifest.read(folder / "out/train").samples == count
    assert all(path.stat().st_mtime_ns == changed for path, changed in finished.items())


def test_vocabulary_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(command(tmp_path, "--splits", "train=1", texts=("The lungs are clear.", "Edema.")))
    train = [
        "vocab",
        "--data",
        str(tmp_path / "out/train"),
        "--out",
        str(tmp_path / "vocab"),
        "--min-frequency",
        "1",
    ]
    cli.main(train)
    before = {path.name: path.read_bytes() for path in (tmp_path / "vocab").iterdir()}
    cli.main(train)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main([*train, "--max-tokens", "64"])
    assert f"{tmp_path / 'vocab'} holds another vocabulary" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "vocab").iterdir()} == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("years of work")
    with pytest.raises(SystemExit):
        cli.main([*train[:2], str(tmp_path / "thesis")])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_name_with_a_path_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(command(tmp_path, "--name", "../../x"))
    assert "name" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
