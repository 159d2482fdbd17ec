"""Opening of files that others have made, and bounded JSON."""

import ast
import os
import re
import socket
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.common.untrusted import (
    ANYWHERE,
    MAX_JSON_DEPTH,
    DuplicateKeyError,
    InputFolders,
    NonFiniteNumberError,
    parse_json,
    read_json,
    read_limited,
)
from medvl.errors import CheckpointError, ConfigError, ImageError


def read(path: Path, folders: InputFolders) -> bytes:
    with folders.open(path, ImageError) as file:
        return read_limited(file, 100, ImageError)


def test_links_are_followed_inside_of_the_folders_only(tmp_path: Path) -> None:
    for name in ("corpus", "corpus-private", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    corpus = tmp_path / "corpus"
    (corpus / "inside").symlink_to(corpus / "a.txt")
    (corpus / "outside").symlink_to(tmp_path / "corpus-private/a.txt")
    (corpus / "folder").symlink_to(tmp_path / "other")
    (tmp_path / "root").symlink_to(corpus)  # the folder that the user names may be a link
    folders = InputFolders.of(tmp_path / "root")
    assert read(tmp_path / "root/a.txt", folders) == read(corpus / "inside", folders) == b"corpus"
    for name in ("outside", "folder/a.txt", "../other/a.txt"):
        with raises(ImageError, "outside_folder", names="--follow-links"):
            read(corpus / name, folders)
        assert read(corpus / name, InputFolders.of(corpus, follow_links=True))
    assert read(corpus / "folder/a.txt", InputFolders.of(corpus, tmp_path / "other")) == b"other"
    assert read(corpus / "a.txt", InputFolders.of("/")) == b"corpus"


@pytest.mark.fault("S16")
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "folder", "/dev/zero"):
            with raises(ImageError, "not_a_file"):
                read(tmp_path / name, ANYWHERE)
        for name in ("socket", "loop", "x" * 300, "folder/" + "y/" * 3000):
            with raises(ImageError, "unreadable"):
                read(tmp_path / name, ANYWHERE)
    for name in ("nul\0", "half\ud800"):
        with raises(ImageError, "malformed"):
            read(tmp_path / name, ANYWHERE)
    with pytest.raises(FileNotFoundError, match="none"):
        read(tmp_path / "none", ANYWHERE)
    (tmp_path / "large").write_bytes(bytes(101))
    with raises(ImageError, "too_large", names="large"):
        read(tmp_path / "large", ANYWHERE)


@pytest.mark.fault("S16")
@pytest.mark.parametrize("name", ["loop", "loop/x", "x" * 300, "nul\0"])
def test_impossible_folders_raise(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with raises(ConfigError, "unreadable"):
        InputFolders.of(tmp_path / name)
    assert InputFolders.of(tmp_path / "missing")


def is_refused(data: str | bytes) -> bool:
    try:
        parse_json(data)
    except ValueError:
        return True
    return False


@pytest.mark.fault("S17")
def test_json_is_bounded() -> None:
    nested = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert str(parse_json(nested)) == nested
    assert parse_json(b'\xef\xbb\xbf{"a": [1.5, "\\ud83d\\ude00", "\\\\ud800"]}') == {
        "a": [1.5, "\N{GRINNING FACE}", "\\ud800"]
    }
    for text in (
        f"[{nested}]",
        "[" * 100_000,
        '{"a":' * 100_000,
        '["\\ud83d"]',
        '{"\\ude00": 1}',
        "",
        "{",
        "9" * 5000,
        "[,]",
    ):
        for data in (text, text.encode()):
            assert is_refused(data)
    for data in (b'"\xed\xa0\x80"', b'"\xff"', '"a"'.encode("utf-16")):
        assert is_refused(data)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ('{"image": "a.png", "image": "b.png"}', DuplicateKeyError, "'image' twice"),
        ('[{"a": {"b": 1, "c": 2, "b": 1}}]', DuplicateKeyError, "'b' twice"),
        (
            '{"p10000032": 1, "p10000032": 2}',
            DuplicateKeyError,
            "a key twice",
        ),  # may name a patient
        ('{"\\u0061": 1, "a": 2}', DuplicateKeyError, "'a' twice"),
        ("1e400", NonFiniteNumberError, "float64"),
        ('{"temperature": -1E+999}', NonFiniteNumberError, "float64"),
        ('{"label": NaN}', NonFiniteNumberError, "NaN is no number of JSON; write null"),
        ("[Infinity]", NonFiniteNumberError, "Infinity"),
        ("-Infinity", NonFiniteNumberError, "-Infinity"),
    ],
)
def test_json_keeps_every_value(text: str, kind: type[ValueError], reason: str) -> None:
    for data in (text, text.encode(), "\ufeff" + text):
        with pytest.raises(kind, match=re.escape(reason)):
            parse_json(data)
    assert parse_json('\ufeff{"a": 1e308, "A": -0.0, "b": {"a": 1}, "c": {"a": 1}}')["a"] == 1e308


def test_json_files_are_limited_and_regular(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError):
        read_json(path, CheckpointError)
    path.write_text('{"a": 1}')
    assert read_json(path, CheckpointError) == {"a": 1}
    with raises(CheckpointError, "too_large", names="config.json"):
        read_json(path, CheckpointError, limit=7)
    path.write_text('{"a": 1, "a": 2}')
    with raises(CheckpointError, "malformed", names="'a' twice"):
        read_json(path, CheckpointError)
    path.unlink()
    os.mkfifo(path)
    with raises(CheckpointError, "not_a_file", names="pipe"):
        read_json(path, CheckpointError)


ROOT = Path(__file__).parents[2] / "medvl"
OWN_JSON = {
    *("benchmark/estimate", "benchmark/store"),
    *("common/untrusted", "data/convert/options", "data/corpora/common/record_file"),
    *("eval/core/full_pass", "eval/probing/features"),
    *("export/exporters/towers", "export/exporters/zero_shot"),
    "inference/folder",
    *("models/checkpoint", "phantom/layouts/choices", "phantom/layouts/questions"),
    "phantom/layouts/writer",
    *("train/loop/logger", "train/loop/state"),
    *("train/parallel/distributed", "train/recipe_files", "train/tasks/generation"),
}
"""Files with `json.loads` of what the same process, or a run in the same folder, has written; and
the module of exported models, which works without medvl.
"""


def test_json_of_others_is_read_by_one_function() -> None:
    callers = set()
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if "json.load" not in text:  # formatted code has both names on one line
            continue
        names = {
            ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute)
        }
        if names & {"json.load", "json.loads"}:
            callers.add(path.relative_to(ROOT).with_suffix("").as_posix())
    assert callers == OWN_JSON
