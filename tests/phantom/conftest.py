"""The phantom's tests draw each view anew; processes of some are forks."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import forked

from medvl.phantom.layouts import kaggle, writer
from medvl.phantom.rendering.draw import draw


@pytest.fixture(scope="module", autouse=True)
def _views_are_drawn() -> Iterator[None]:
    with mock.patch.object(writer, "draw", draw), mock.patch.object(kaggle, "draw", draw):
        yield


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are forks of a process with the libraries, in place of new interpreters."""
    processes = SimpleNamespace(get_context=forked.context)
    monkeypatch.setattr(writer, "multiprocessing", processes)
