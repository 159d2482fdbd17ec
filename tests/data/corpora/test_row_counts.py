"""Every corpus counts each row once: read, kept, or left out with a reason."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from helpers.errors import raises

import medvl.data
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.errors import CorpusError
from medvl.schema import Sample

CORPORA = Path(medvl.data.__file__).parent / "corpora"
PLANNING = [
    path
    for path in sorted(CORPORA.rglob("*.py"))
    if " Plan(" in path.read_text() or "(Plan(" in path.read_text()
]
QUESTIONS = [
    path for path in sorted(CORPORA.rglob("*.py")) if "plan_questions(" in path.read_text()
]


def calls(path: Path) -> Counter[str]:
    """Return the names of the functions and methods that a file calls."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return Counter(ast.unparse(node.func).rpartition(".")[2] for node in nodes)


@pytest.mark.parametrize(
    "path",
    sorted({*PLANNING, *QUESTIONS} - {CORPORA / "common/questions.py"}),
    ids=lambda path: path.stem,
)
def test_every_corpus_counts_its_rows(path: Path) -> None:
    """`Plan` checks the sum of the counts in every test of a corpus; here, no corpus makes a
    plan without counts.
    """
    called = calls(path)
    assert called["RowCounts"]
    assert called["reading"] or path.name == "webdataset_tars.py", (
        "tars count samples without any member to read too"
    )


def test_all_corpora_are_found() -> None:
    assert len({*PLANNING, *QUESTIONS}) > 24


@pytest.mark.parametrize(
    "rows",
    [
        RowCounts(read=3, kept=1),
        RowCounts(read=1, kept=1, excluded=Counter(view=1)),
        RowCounts(read=2, kept=2),
        RowCounts("documents", read=2, kept=1, skipped=Counter(text_unreadable=2)),
    ],
)
def test_counts_that_do_not_add_up_are_refused(rows: RowCounts) -> None:
    sample = Sample(
        key="a", corpus="lab", split="train", patient="p", study="s", image=Path("a.png")
    )
    with raises(CorpusError, "mismatch", "rows"):
        Plan("lab", Records([Record(sample)]), (), rows)


def test_counts_are_printed_by_reason() -> None:
    rows = RowCounts()
    for number in rows.reading(range(9)):
        if number < 3:
            rows.exclude("view")
        elif number == 3:
            rows.skip("text_unreadable")
        else:
            rows.kept += 1
    assert str(rows) == "read 9 images: kept 5, left out 4 (3 view, 1 text_unreadable)"
    assert RowCounts.from_json(rows.to_json(), rows.excluded) == rows
    assert RowCounts.from_json({}, {}) is None
