"""The `medvl` command: help texts, lists, and one-line error messages."""

import errno
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.mimic_files import write_csv_gz

import medvl
from medvl.cli import main as cli
from medvl.cli.eval import print_results
from medvl.cli.help import OVERVIEW
from medvl.common import files
from medvl.data.tokenizer import tokenizer
from medvl.schema import FINDINGS

WITHOUT_DEFAULTS = (
    "completion",
    "merge",
    "upload",
    "consolidate",
    "phantom umls",
    "knowledge find",
    "cards list",
    "cards show",
)


def ends(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return status and error output of a command that must fail."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


def line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one-line error message of a command."""
    status, text = ends(arguments, capsys)
    assert status == 1
    (message,) = text.splitlines()
    assert message.startswith("medvl: ")
    return message.removeprefix("medvl: ")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_is_the_overview(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(arguments)
    assert capsys.readouterr().out == f"{OVERVIEW}\n"
    files = set(Path(cli.__file__).parent.rglob("*.py"))
    homes = {Path(inspect.getfile(function)) for function in cli.commands().values()}
    assert {path.stem for path in files - homes} == {"__init__", "help"}


@pytest.mark.parametrize("name", cli.commands())
def test_command_help_shows_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*name.split(), "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: medvl {name}" in out
    assert "(default" in out or name in WITHOUT_DEFAULTS


def test_help_does_not_import_heavy_libraries() -> None:
    code = (
        "import sys; from medvl.cli import main as cli; cli.main(['--help']);"
        "print([name for name in ('torch', 'transformers', 'timm', 'pydicom', 'albumentations') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("kind", "match", "expected"),
    [
        ("models", "*", "convirt"),
        ("image-encoders", "resnet5*", "resnet50"),
        ("text-encoders", "bioclinical*", "bioclinicalbert"),
        ("prompts", "*classes", "chexpert_classes"),
    ],
)
def test_list_command_filters_names(
    kind: str, match: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["list", kind, "--match", match])
    assert expected in capsys.readouterr().out.splitlines()
    cli.main(["list", kind, "--match", "nothing-of-this-name"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"none of the {kind} matches 'nothing-of-this-name'" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "image-encoders"),
        (["list", "sausages"], "invalid choice 'sausages'"),
        (["shards"], "expected a command of medvl shards"),
        (["shards", "mimic-cxr"], "--root"),
        (["shards", "mimic-cxr", "--root", "a", "--out", "b", "--qualitty", "3"], "--qualitty"),
        (["phantom", "mimic-cxr", "--out", "a", "--patients", "many"], "--patients"),
    ],
)
def test_invalid_command_line_exits_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = ends(arguments, capsys)
    assert status == 2
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["shard"], "medvl shards --help"),
        (["verfy"], "medvl verify"),
        (["mimic-cxr"], "medvl shards mimic-cxr"),
        (["zero-shot"], "medvl eval zero-shot"),
        (["shards", "tabel"], "medvl shards table"),
        (["xyzzy"], "medvl --help"),
    ],
)
def test_unknown_command_names_the_nearest(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = line(arguments, capsys)
    assert repr(" ".join(arguments)) in message
    assert nearest in message
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("everything", [False, True])
def test_results_fit_on_one_screen(everything: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tables = [[f"{name} {line}" for line in range(20)] for name in "abcd"] + [["note"]]
    text = "\n\n".join("\n".join(lines) for lines in tables)
    print_results(text, [Path("index.html")], everything=everything)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "index.html"
    assert "a 19" in printed
    assert "note" in printed
    if everything:
        assert "d 19" in printed
    else:
        assert len(printed) <= 40
        assert "b 3" in printed
        assert "c 0" not in printed
        assert any(
            line.startswith("... ") and line.endswith(" more lines with --all, and on the page")
            for line in printed
        )
    print_results("\n".join(map(str, range(90))), [], everything=everything)
    assert (len(capsys.readouterr().out.splitlines()) <= 40) == (not everything)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])
    assert capsys.readouterr().out == f"medvl {medvl.__version__}\n"


@pytest.mark.parametrize(("command", "resumes"), [("shards", True), ("verify", False)])
def test_interrupt_is_reported_in_one_line(
    command: str, resumes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_command", interrupted)
    status, text = ends([command], capsys)
    assert status == 130
    assert len(text.splitlines()) == 1
    assert ("run the same command again" in text) == resumes


def test_missing_folders_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere, out = str(tmp_path / "nowhere"), ["--out", str(tmp_path / "out")]
    for corpus in ("mimic-cxr", "chexpert"):
        assert nowhere in line(["shards", corpus, "--root", nowhere, *out], capsys)
    columns = ["--image-column", "image", "--patient-column", "patient"]
    message = line(["shards", "table", "--table", f"{nowhere}.csv", *columns, *out], capsys)
    assert f"{nowhere}.csv" in message
    for command in (
        ["verify", nowhere],
        ["vocab", "--data", nowhere, "--out", str(tmp_path / "out")],
    ):
        assert nowhere in line(command, capsys)
    assert nowhere in line(
        ["eval", "zero-shot", "--checkpoint", nowhere, "--data", nowhere], capsys
    )
    assert not (tmp_path / "out").exists()


def test_missing_column_is_reported(
    mimic_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = mimic_root / "mimic-cxr-2.0.0-chexpert.csv.gz"
    write_csv_gz(table, ["subject_id", "study_id", *FINDINGS[1:]], [])
    message = line(
        ["shards", "mimic-cxr", "--root", str(mimic_root), "--out", str(tmp_path / "out")], capsys
    )
    assert message.startswith(f"{table} lacks the column {FINDINGS[0]}")
    rows = tmp_path / "rows.csv"
    rows.write_text("image,subject\na.png,p1\n")
    columns = ["--image-column", "image", "--patient-column", "patient"]
    message = line(
        ["shards", "table", "--table", str(rows), *columns, "--out", str(tmp_path / "out")], capsys
    )
    assert "lacks the column patient; it has image, subject" in message
    assert not (tmp_path / "out").exists()


def test_nonempty_output_folder_is_not_modified(
    mimic_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.txt").write_text("years of work")
    assert f"{out} is not empty" in line(["phantom", "mimic-cxr", "--out", str(out)], capsys)
    assert f"{out} is not empty" in line(
        ["shards", "mimic-cxr", "--root", str(mimic_root), "--out", str(out)], capsys
    )
    assert [path.read_text() for path in out.iterdir()] == ["years of work"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--quality", "0"], "quality must be within [1, 100], got 0"),
        (["--short-side", "3"], "short_side must be within [16, 8192], got 3"),
        (["--max-skipped", "-1"], "max_skipped must be at least 0"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
    ],
)
def test_value_out_of_range_is_reported(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in line(["shards", "mimic-cxr", "--root", "a", "--out", "b", *option], capsys)


@pytest.mark.parametrize(
    "option", [["--where", "source"], ["--splits", "train"], ["--splits", "train=most"]]
)
def test_malformed_name_value_pairs_are_reported(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "shards",
        "table",
        "--table",
        str(tmp_path / "rows.csv"),
        "--out",
        str(tmp_path / "out"),
    ]
    columns = ["--image-column", "image", "--patient-column", "patient"]
    assert f"{option[0]} as NAME=" in line([*command, *columns, *option], capsys)


def test_full_disk_and_invalid_folder_are_reported_in_one_line(
    mimic_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards = tmp_path / "shards"
    cli.main(
        ["shards", "mimic-cxr", "--root", str(mimic_root), "--out", str(shards), "--workers", "1"]
    )
    capsys.readouterr()

    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "_create", full)
        patch.setattr(tokenizer.Tokenizer, "save", full)
        command = [
            "phantom",
            "mimic-cxr",
            "--out",
            str(tmp_path / "mimic"),
            "--patients",
            "1",
            "--workers",
            "1",
        ]
        assert line(command, capsys).endswith("No space left on device")
        command = [
            "vocab",
            "--data",
            str(shards / "train"),
            "--out",
            str(tmp_path / "vocab"),
            "--min-frequency",
            "1",
        ]
        assert line(command, capsys).endswith("No space left on device")
    (tmp_path / "file").touch()
    below_file = tmp_path / "file" / "below"
    message = line(
        [
            "vocab",
            "--data",
            str(shards / "train"),
            "--out",
            str(below_file),
            "--min-frequency",
            "1",
        ],
        capsys,
    )
    assert message == f"{below_file}: Not a directory"


def test_a_comparison_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare"])
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err
        == "medvl: expected runs or evaluations: medvl compare RUN RUN ...\n"
    )
    assert not list(tmp_path.iterdir())


WRONG = (["--no-such-option", "1"], ["a", "b", "--no-such-option", "c"], ["--out"])


@pytest.mark.parametrize(
    ("name", "wrong"),
    zip(sorted({*cli.commands()} - {"train", "doctor"}), itertools.cycle(WRONG), strict=False),
)
def test_hint_after_a_wrong_option_names_the_command(
    name: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`train` and `doctor` print their usage."""
    status, text = ends([*name.split(), *wrong], capsys)
    words = " ".join(re.sub(r"[^\w./<> -]", " ", text).split())
    assert status == 2
    assert set(re.findall(r"medvl ((?:[a-z][\w-]* ){1,2})--help", words)) == {f"{name} "}


@pytest.mark.parametrize("group", ["phantom", "shards", "eval", "knowledge", "recipes", "cards"])
def test_group_without_a_command_names_its_help(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([group], [group, "--wrong"]):
        status, text = ends(arguments, capsys)
        assert status == 2
        assert f"medvl {group} --help" in text
