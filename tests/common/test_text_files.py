"""Text files of users: encodings, ends of lines, JSON lines and tables, with errors that name
the line.
"""

from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.common.text_files import read_csv_rows, read_json_objects, read_lines, read_text
from medvl.errors import ConfigError


def test_lines_end_as_on_any_system(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufeffa\r\nb\rc\u2028d\u0085e\n\nf".encode())
    assert read_lines(path, ConfigError) == ["a", "b", "c\u2028d\u0085e", "", "f"]
    assert read_text(path, ConfigError) == "a\nb\nc\u2028d\u0085e\n\nf"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"a\r\nb\xe9c", 2),
        (b"\xff", 1),
        (b"a\rb\n\xc3", 3),
        ("a\nb".encode("utf-16-le"), 1),
        (b"\xff\xfea\x00\n", 1),
    ],
)
def test_other_encodings_name_the_line(data: bytes, line: int, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(data)
    with raises(ConfigError, "malformed", field="prompts", names=f"{path}, line {line}"):
        read_text(path, ConfigError, field="prompts")


def test_files_that_are_none(tmp_path: Path) -> None:
    with raises(ConfigError, "not_found", field="file", names="give a list"):
        read_text(tmp_path / "no", ConfigError, field="file", what="a list")
    with raises(ConfigError, "not_a_file", field="file"):
        read_text(tmp_path, ConfigError, field="file")
    (tmp_path / "large").write_bytes(b"12345")
    with raises(ConfigError, "too_large"):
        read_text(tmp_path / "large", ConfigError, limit=4)


def test_fields_of_json_lines_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1, "b": "x"}\n\n{"a": null, "b": "y", "c": []}\n')
    assert [
        row["b"] for _, row in read_json_objects(path, ConfigError, {"a": object, "b": str})
    ] == ["x", "y"]
    assert [where for where, _ in read_json_objects(path, ConfigError, ("a",))] == [
        f"{path}, line {n}" for n in (1, 3)
    ]
    with raises(ConfigError, "malformed", field="c", names="line 1"):
        list(read_json_objects(path, ConfigError, ("a", "c")))
    with raises(ConfigError, "wrong_type", field="a", names="line 1"):
        list(read_json_objects(path, ConfigError, {"a": str}))
    path.write_text('{"a": 1},\n')
    with raises(ConfigError, "malformed", field="file", names="comma"):
        list(read_json_objects(path, ConfigError, ("a",), field="file"))


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes('\ufeff\r\na,"b"\r\n1,"x\r\ny"\r\n\r\n2\r\n,\r\n'.encode())
    assert read_csv_rows(path, ConfigError) == [
        {"a": "1", "b": "x\ny"},
        {"a": "2", "b": ""},
        {"a": "", "b": ""},
    ]
    for content, place in (
        ("a,a\n1,2\n", "twice"),
        ("a\n1,2\n", "line 2"),
        ('a,b\n1,"x\n', "line"),
    ):
        path.write_text(content)
        with raises(ConfigError, "malformed", field="table", names=place):
            read_csv_rows(path, ConfigError, field="table")
