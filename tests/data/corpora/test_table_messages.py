"""Tables as people have them: separators, encodings, headers, cells, and messages that name the row and quote no cell."""

import dataclasses
import gzip
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.corpora import table
from medvl.data.corpora.table import TableColumns
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import ConfigError, CorpusError, SplitError
from medvl.schema import Sample

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


def samples(folder: Path, deid: Deidentifier, rows: str, columns: TableColumns = COLUMNS) -> list[Sample]:
    path = write(folder, "image,patient,text,edema,split\n" + rows)
    return [record.sample for record in table.plan(path, columns, deid).records]


@pytest.mark.parametrize(
    ("cell", "label"),
    [("True", 1), ("FALSE", 0), ("true", 1), ("1.0", 1), ("nan", None), ("NA", None), ("<NA>", None), ("None", None)],
)
def test_label_cells_of_other_programs_are_read(
    tmp_path: Path, deid: Deidentifier, cell: str, label: int | None
) -> None:
    (sample,) = samples(tmp_path, deid, f"a.png,p,{cell if label is None else 'Clear.'},{cell},\n")
    assert sample.labels.get("edema") == label
    assert sample.sections == ({"text": "None"} if cell == "None" else {} if label is None else {"text": "Clear."})


def test_missing_patients_and_categories_are_not_words(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "missing", "patient"):
        samples(tmp_path, deid, "a.png,nan,Clear.,1,\n")
    columns = TableColumns(image_column="image", patient_column="patient", category_column=("edema",))
    plan = table.plan(write(tmp_path, "image,patient,edema\na.png,p,yes\nb.png,q,NaN\n"), columns, deid)
    assert plan.label_names == ("edema=yes",)


def test_all_invalid_cells_are_named_at_once_without_their_values(tmp_path: Path, deid: Deidentifier) -> None:
    rows = "a.png,p,,SECRET,\nb.png,p,,1,\nc.png,,,1,\nd.png,p,,2,\n"
    with raises(CorpusError, "malformed", "edema", names="rows.csv, row 1: edema") as caught:
        samples(tmp_path, deid, rows)
    assert all(part in str(caught.value) for part in ("row 3: patient is empty", "row 4: edema"))
    assert "row 2" not in str(caught.value)
    assert "SECRET" not in str(caught.value)
    with raises(
        CorpusError, "malformed", names="row 10: edema must be 1, 0, -1, true, false or empty; and 5 more rows"
    ):
        samples(tmp_path, deid, "".join(f"{number}.png,p,,x,\n" for number in range(15)))


SPLIT_COLUMNS = dataclasses.replace(COLUMNS, split_column="split")


def test_repeated_images_are_named_by_row(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "conflict", "image", names="rows 1 and 3") as caught:
        samples(tmp_path, deid, "a.png,p,,1,\nb.png,p,,1,\na.png,p,,1,\n")
    assert deid.image("a.png") not in str(caught.value)


def test_one_file_under_two_spellings_is_refused(tmp_path: Path, deid: Deidentifier) -> None:
    rows = "a.png,p,,1,train\nb.png,q,,1,train\nsub/.././a.png,r,,1,test\n"
    with raises(CorpusError, "conflict", "image", names="rows 1 and 3"):
        samples(tmp_path, deid, rows, SPLIT_COLUMNS)


def test_patient_in_two_splits_is_named_by_row(tmp_path: Path, deid: Deidentifier) -> None:
    rows = "a.png,p,,1,train\nb.png,q,,1,train\nc.png,p,,1,train\nd.png,p,,1,test\n"
    with raises(SplitError, "leak", "split", names="rows 3 (train) and 4 (test)") as caught:
        samples(tmp_path, deid, rows, SPLIT_COLUMNS)
    assert deid.patient("p") not in str(caught.value)


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "..", "a\nb"])
def test_names_with_a_path_are_refused(tmp_path: Path, deid: Deidentifier, name: str) -> None:
    with raises(ConfigError, "malformed", "name"):
        table.plan(write(tmp_path, CSV), COLUMNS, deid, name=name)
    with raises(ConfigError, "malformed", "splits"):
        table.plan(write(tmp_path, CSV), COLUMNS, deid, fractions={name: 1.0})


@pytest.mark.parametrize(("name", "part"), [("images.zip", "unpack"), ("nowhere", "does not exist")])
def test_image_root_must_be_a_folder(tmp_path: Path, deid: Deidentifier, name: str, part: str) -> None:
    path = write(tmp_path, CSV)
    (tmp_path / "images.zip").write_bytes(b"PK")
    with raises(ConfigError, "not_found", "image_root", names=part):
        table.plan(path, COLUMNS, deid, image_root=tmp_path / name)
