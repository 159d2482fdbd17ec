"""Commands in the files of benchmarks: each is parsed with the command's own parser."""

import functools
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import medvl.benchmark
from medvl.cli import main as cli

FOLDER = Path(medvl.benchmark.__file__).parent
FILES = [FOLDER / "steps.toml", *sorted((FOLDER / "presets").glob("*.toml"))]
COMMANDS = cli.commands()
FILLED = {"{resamples}": "10"}
"""Placeholders whose value is a number; the others are paths."""


def command_lines(value: Any, key: str = "") -> Iterator[str]:
    """Yield the commands of medvl in the values of a TOML file."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from command_lines(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from command_lines(part, key)
    elif key in ("run", "command"):
        yield value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_commands_parse(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(command_lines(tomllib.loads(path.read_text(encoding="utf-8"))))
    for line in lines:
        for name, value in FILLED.items():
            line = line.replace(name, value)
        words = shlex.split(line.replace("\\\n", " "))
        name = next(name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS)
        if name == "train":  # tests/test_recipes.py parses the options of recipes
            continue
        calls: list[Any] = []
        record = functools.wraps(COMMANDS[name])(
            lambda *args, calls=calls, **named: calls.append((args, named))
        )
        try:
            cli.parse_and_run(name, record, words[len(name.split()) :])
        except SystemExit:
            pytest.fail(f"{line}\n{capsys.readouterr().err}")
        assert len(calls) == 1
    assert lines or path.stem == "phantom-full"
