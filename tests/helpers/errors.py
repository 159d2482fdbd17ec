"""Checks of errors by type, code and field; their wording may change."""

import contextlib
from collections.abc import Iterator

import pytest

from medvl.errors import MedvlError


@contextlib.contextmanager
def raises(
    kind: type[MedvlError], code: str, field: str | None = None, *, names: str = ""
) -> Iterator[pytest.ExceptionInfo[MedvlError]]:
    """Expect a `kind` with this code and, if given, this field; `names` must appear in its message (a path, a value)."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r}: {caught.value}"
    assert field is None or caught.value.field == field, f"{caught.value.field!r}: {caught.value}"
    assert names in str(caught.value)
