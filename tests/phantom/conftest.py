"""The phantom's tests draw each view anew."""

from collections.abc import Iterator
from unittest import mock

import pytest

from medvl.phantom.layouts import kaggle, writer
from medvl.phantom.rendering.draw import draw


@pytest.fixture(scope="module", autouse=True)
def _views_are_drawn() -> Iterator[None]:
    with mock.patch.object(writer, "draw", draw), mock.patch.object(kaggle, "draw", draw):
        yield
