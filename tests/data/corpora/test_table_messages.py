"""Tables as people have them: separators, encodings, headers, cells, and messages that name the row and quote no cell."""

import gzip
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.corpora import table
from medvl.data.corpora.table import TableColumns
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError

COLUMNS = TableColumns(image_column="image", patient_column="patient", text_column=("text",), label_column=("edema",))
CSV = "image,patient,text,edema\na.png,p1,Clear lungs.,0\nb.png,p2,Edema.,1\n"


def write(folder: Path, content: str | bytes, name: str = "rows.csv") -> Path:
    path = folder / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.tsv"])
def test_separator_is_detected(tmp_path: Path, deid: Deidentifier, separator: str, name: str) -> None:
    expected = [record.sample for record in table.plan(write(tmp_path, CSV), COLUMNS, deid).records]
    path = write(tmp_path, "\ufeff" + CSV.replace(",", separator), name)
    assert [record.sample for record in table.plan(path, COLUMNS, deid).records] == expected


def test_separator_is_detected_where_a_column_is_missing(tmp_path: Path, deid: Deidentifier) -> None:
    path = write(tmp_path, "image;patient;edema\na.png;p1;1\n")
    with raises(CorpusError, "missing", "text", names="it has image, patient, edema"):
        table.plan(path, COLUMNS, deid)


def test_first_row_is_not_quoted_where_the_header_is_missing(tmp_path: Path, deid: Deidentifier) -> None:
    path = write(tmp_path, "a.png,Jane Roe,Edema.,1\nb.png,p2,Clear.,0\n")
    with raises(CorpusError, "missing", "image", names="4 fields") as caught:
        table.plan(path, COLUMNS, deid)
    assert "Roe" not in str(caught.value)
    assert "a.png" not in str(caught.value)


@pytest.mark.parametrize(
    ("encoding", "advice"), [("cp1252", "WINDOWS-1252"), ("latin-1", "WINDOWS-"), ("utf-16", "UTF-16")]
)
def test_other_encodings_are_refused_with_the_way_to_convert(
    tmp_path: Path, deid: Deidentifier, encoding: str, advice: str
) -> None:
    path = write(tmp_path, CSV.replace("Clear", "Köln").encode(encoding))
    with raises(CorpusError, "malformed", names=f"iconv -f {advice}") as caught:
        table.plan(path, COLUMNS, deid)
    assert "copy it again" not in str(caught.value)
    assert "ln lungs" not in str(caught.value)


def test_repeated_column_is_refused_by_name(tmp_path: Path, deid: Deidentifier) -> None:
    path = write(tmp_path, "image,patient,text,edema,edema\na.png,p1,Clear.,0,1\n")
    with raises(CorpusError, "conflict", "edema"):
        table.plan(path, COLUMNS, deid)
    unread = write(tmp_path, "image,patient,text,edema,note,note\na.png,p1,Clear.,0,x,y\n")
    assert len(table.plan(unread, COLUMNS, deid).records) == 1
