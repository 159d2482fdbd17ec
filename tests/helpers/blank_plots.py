"""Pictures without their plots: drawing takes longer than all else of a page."""

from typing import Any
from unittest import mock

from medvl.eval.html import plots

FILES = {"svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "pdf": b"-"}
DRAWN = "MEDVL_TEST_PLOTS"
"""Variable of programs that draw their plots."""


def save(figure: Any, kind: str) -> bytes:
    """Return a file of a kind, in place of `plots._save`."""
    return FILES[kind]


def draw_none() -> None:
    """Draw no plot in this process from now on."""
    mock.patch.object(plots, "_save", save).start()
