"""Inputs as other programs and hospitals write them, through the public commands, each with its right value.

The inputs are made by code in the `odd_*.py` files of this folder. A public bug report becomes a case there before it is
mended.
"""

import dataclasses

import pytest

from medvl.cli import main as cli


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
