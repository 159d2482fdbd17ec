"""Checks of errors by type, code and field; their wording may change."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest

from medvl.data.corpora.common.tables import Plan
from medvl.errors import MedvlError


@contextlib.contextmanager
def raises(
    kind: type[MedvlError], code: str, field: str | None = None, *, names: str = ""
) -> Iterator[pytest.ExceptionInfo[MedvlError]]:
    """Expect a `kind` with this code and, if given, this field; `names` must appear in its
    message (a path, a value).
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r}: {caught.value}"
    assert field is None or caught.value.field == field, f"{caught.value.field!r}: {caught.value}"
    assert names in str(caught.value)


def assert_skipped(plan: Plan, *reasons: str, names: str = "") -> str:
    """Check the rows that a plan skips by reason, and that `names` is in their messages. Return
    the messages.
    """
    messages = "; ".join(message for _, message in plan.rows.messages)
    assert plan.rows.skipped == Counter(reasons), messages
    assert [reason for reason, _ in plan.rows.messages] == list(reasons)
    assert plan.rows.read == plan.rows.kept + plan.rows.left_out.total()
    assert names in messages
    return messages
