"""Tables as people have them: separators, encodings, headers, cells, and messages that name the
row and quote no cell.
"""

import dataclasses
import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from helpers.errors import assert_skipped, raises

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora import table
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.table import TableColumns
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.errors import BudgetError, ConfigError, CorpusError, SplitError
from medvl.schema import Sample

COLUMNS = TableColumns(
    image_column="image", patient_column="patient", text_column=("text",), label_column=("edema",)
)
CSV = "image,patient,text,edema\na.png,p1,Clear lungs.,0\nb.png,p2,Edema.,1\n"


def write(folder: Path, content: str | bytes, name: str = "rows.csv") -> Path:
    path = folder / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.tsv"])
def test_separator_is_detected(
    tmp_path: Path, deid: Deidentifier, separator: str, name: str
) -> None:
    expected = [
        record.sample
        for record in table.Table(table=write(tmp_path, CSV), columns=COLUMNS).plan(deid).records
    ]
    path = write(tmp_path, "\ufeff" + CSV.replace(",", separator), name)
    assert [
        record.sample for record in table.Table(table=path, columns=COLUMNS).plan(deid).records
    ] == expected


def test_separator_is_detected_where_a_column_is_missing(
    tmp_path: Path, deid: Deidentifier
) -> None:
    path = write(tmp_path, "image;patient;edema\na.png;p1;1\n")
    with raises(CorpusError, "missing", "text", names="it has image, patient, edema"):
        table.Table(table=path, columns=COLUMNS).plan(deid)


def test_first_row_is_not_quoted_where_the_header_is_missing(
    tmp_path: Path, deid: Deidentifier
) -> None:
    path = write(tmp_path, "a.png,Jane Roe,Edema.,1\nb.png,p2,Clear.,0\n")
    with raises(CorpusError, "missing", "image", names="4 fields") as caught:
        table.Table(table=path, columns=COLUMNS).plan(deid)
    assert "Roe" not in str(caught.value)
    assert "a.png" not in str(caught.value)


@pytest.mark.parametrize(
    ("encoding", "advice"),
    [("cp1252", "WINDOWS-1252"), ("latin-1", "WINDOWS-"), ("utf-16-le", "UTF-16")],
)
def test_other_encodings_are_refused_with_the_way_to_convert(
    tmp_path: Path, deid: Deidentifier, encoding: str, advice: str
) -> None:
    path = write(tmp_path, CSV.replace("Clear", "Köln").encode(encoding))
    with raises(CorpusError, "malformed", names=f"iconv -f {advice}") as caught:
        table.Table(table=path, columns=COLUMNS).plan(deid)
    assert "copy it again" not in str(caught.value)
    assert "ln lungs" not in str(caught.value)


def test_repeated_column_is_refused_by_name(tmp_path: Path, deid: Deidentifier) -> None:
    path = write(tmp_path, "image,patient,text,edema,edema\na.png,p1,Clear.,0,1\n")
    with raises(CorpusError, "conflict", "edema"):
        table.Table(table=path, columns=COLUMNS).plan(deid)
    unread = write(tmp_path, "image,patient,text,edema,note,note\na.png,p1,Clear.,0,x,y\n")
    assert len(table.Table(table=unread, columns=COLUMNS).plan(deid).records) == 1


def plan_rows(folder: Path, deid: Deidentifier, rows: str, columns: TableColumns = COLUMNS) -> Plan:
    return table.Table(
        table=write(folder, "image,patient,text,edema,split\n" + rows), columns=columns
    ).plan(deid)


def samples(
    folder: Path, deid: Deidentifier, rows: str, columns: TableColumns = COLUMNS
) -> list[Sample]:
    return [record.sample for record in plan_rows(folder, deid, rows, columns).records]


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        ("True", 1),
        ("FALSE", 0),
        ("true", 1),
        ("1.0", 1),
        ("nan", None),
        ("NA", None),
        ("<NA>", None),
        ("None", None),
    ],
)
def test_label_cells_of_other_programs_are_read(
    tmp_path: Path, deid: Deidentifier, cell: str, label: int | None
) -> None:
    (sample,) = samples(tmp_path, deid, f"a.png,p,{cell if label is None else 'Clear.'},{cell},\n")
    assert sample.labels.get("edema") == label
    assert sample.sections == ({} if label is None else {"text": "Clear."})


def test_missing_patients_and_categories_are_not_words(tmp_path: Path, deid: Deidentifier) -> None:
    assert_skipped(
        plan_rows(tmp_path, deid, "a.png,nan,Clear.,1,\n"), "cell_missing", names="patient is empty"
    )
    columns = TableColumns(
        image_column="image", patient_column="patient", category_column=("edema",)
    )
    plan = table.Table(
        table=write(tmp_path, "image,patient,edema\na.png,p,yes\nb.png,q,NaN\n"), columns=columns
    ).plan(deid)
    assert plan.label_names == ("edema=yes",)


def test_invalid_cells_are_skipped_and_named_without_their_values(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = plan_rows(tmp_path, deid, "a.png,p,,SECRET,\nb.png,p,,1,\nc.png,,,1,\nd.png,p,,2,\n")
    messages = assert_skipped(
        plan, "cell_malformed", "cell_missing", "cell_malformed", names="rows.csv, row 1: edema"
    )
    assert [record.sample.image.name for record in plan.records if record.sample.image] == ["b.png"]
    assert all(
        part in messages for part in ("rows.csv, row 3: patient is empty", "rows.csv, row 4: edema")
    )
    assert "row 2" not in messages
    assert "SECRET" not in messages
    many = plan_rows(tmp_path, deid, "".join(f"{number}.png,p,,x,\n" for number in range(15)))
    assert many.rows.describe_skipped().endswith(
        "row 10: edema must be 1, 0, -1, true, false or empty; and 5 more"
    )


def test_invalid_rows_count_towards_the_budget_and_are_listed(
    tmp_path: Path, deid: Deidentifier
) -> None:
    rows = "image,patient,text\na.png,p,Clear.\nb.png,q\nc.png,r,Edema.\n,s,Nodule.\n"
    columns = TableColumns(
        image_column="image", patient_column="patient", text_column=("text",), tags_column=("text",)
    )
    plan = table.Table(table=write(tmp_path, rows), columns=columns, splits=("train=1.0",)).plan(
        deid
    )
    assert_skipped(plan, "row_malformed", "cell_missing", names="rows.csv, row 4: image is empty")
    assert plan.label_names == ("Clear.", "Edema.", "Nodule.")
    for name in "ac":
        (tmp_path / f"{name}.png").write_bytes(encode_png(np.full((32, 32), 99, np.uint8)))
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=1)
    with raises(BudgetError, "budget", "max_skipped", names="line 3: expected 3 fields") as caught:
        write_shards(plan, deid, run)
    assert (
        "2 of 4 images cannot be used (1 cell_missing, 1 row_malformed), over the budget of 1"
        in str(caught.value)
    )
    assert not run.out.exists()
    manifest = write_shards(plan, deid, dataclasses.replace(run, max_skipped=2))["train"]
    assert manifest.samples == 2
    assert manifest.rows == {
        "unit": "images", "read": 4, "kept": 2, "skipped": {"cell_missing": 1, "row_malformed": 1}
    }  # fmt: skip
    listed = [
        json.loads(line)
        for line in (tmp_path / "out-private/skipped.jsonl").read_text().splitlines()
    ]
    assert [(row["reason"], row["message"]) for row in listed] == plan.rows.messages


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
        table.Table(table=write(tmp_path, CSV), columns=COLUMNS, name=name).plan(deid)
    with raises(ConfigError, "malformed", "splits"):
        table.Table(table=write(tmp_path, CSV), columns=COLUMNS, splits=(f"{name}=1",)).plan(deid)


@pytest.mark.parametrize(
    ("name", "part"), [("images.zip", "unpack"), ("nowhere", "does not exist")]
)
def test_image_root_must_be_a_folder(
    tmp_path: Path, deid: Deidentifier, name: str, part: str
) -> None:
    path = write(tmp_path, CSV)
    (tmp_path / "images.zip").write_bytes(b"PK")
    with raises(ConfigError, "not_found", "image_root", names=part):
        table.Table(table=path, columns=COLUMNS, image_root=tmp_path / name).plan(deid)


@pytest.mark.parametrize(
    "rows",
    [
        'a.png,p,1,"Clear.\nb.png,q,1,Edema.\n',
        'a.png,p,1,"Clear.\nb.png,q,1,Edema.\nc.png,r,1,"Nodule"\nd.png,s,1,x\n',
    ],
)
def test_a_quote_that_is_not_closed_joins_no_rows(
    tmp_path: Path, deid: Deidentifier, rows: str
) -> None:
    path = write(tmp_path, "image,patient,edema,text\nz.png,p,1,Clear.\n" + rows)
    with raises(CorpusError, "malformed", names="after line 2") as caught:
        table.Table(table=path, columns=COLUMNS).plan(deid)
    assert "Edema." not in str(caught.value)


def test_a_missing_split_is_not_a_split(tmp_path: Path, deid: Deidentifier) -> None:
    plan = plan_rows(tmp_path, deid, "a.png,p,,1,train\nb.png,q,,1,nan\n", SPLIT_COLUMNS)
    assert_skipped(plan, "cell_malformed", names="row 2: split must be")


def plan_json(folder: Path, deid: Deidentifier, *rows: dict[str, object], **columns: Any) -> Plan:
    given: dict[str, Any] = {"image_column": "image", "patient_column": "patient", **columns}
    lines = [json.dumps({"image": f"{number}.png", **row}) for number, row in enumerate(rows)]
    return table.Table(
        table=write(folder, "\n".join(lines), "rows.jsonl"), columns=TableColumns(**given)
    ).plan(deid)


def test_whole_numbers_are_the_same_id_in_every_form(tmp_path: Path, deid: Deidentifier) -> None:
    plan = plan_json(
        tmp_path, deid, {"patient": 7}, {"patient": "7"}, {"patient": 7.0}, {"patient": "007"}
    )
    assert [record.sample.patient for record in plan.records] == [deid.patient("7")] * 3 + [
        deid.patient("007")
    ]
    texts = plan_json(tmp_path, deid, {"patient": "7.0"}, {"patient": "1.2.840.0"})
    assert texts.warnings == {"ids_like_1.0": 1}


@pytest.mark.parametrize("cell", ["2.16840113668637E+38", 2.16840113668637e38])
def test_rounded_ids_are_skipped(tmp_path: Path, deid: Deidentifier, cell: object) -> None:
    plan = plan_json(tmp_path, deid, {"patient": cell})
    assert "2.168" not in assert_skipped(plan, "cell_malformed", names="patient has a number")
    plan = plan_json(tmp_path, deid, {"patient": "p", "study": cell}, study_column="study")
    assert_skipped(plan, "cell_malformed", names="study has a number")


@pytest.mark.parametrize("column", ["text", "patient", "image"])
def test_a_list_is_not_a_text(tmp_path: Path, deid: Deidentifier, column: str) -> None:
    plan = plan_json(
        tmp_path,
        deid,
        {"patient": "p", "text": "Clear.", column: ["Clear."]},
        text_column=("text",),
    )
    assert_skipped(plan, "cell_malformed", names=f"row 1: {column} must be")


def test_lists_of_tags_are_read_in_json_and_with_bars_only(
    tmp_path: Path, deid: Deidentifier
) -> None:
    columns = TableColumns(image_column="image", patient_column="patient", tags_column=("tags",))
    path = write(
        tmp_path,
        'image,patient,tags\na.png,p,"[""mass"", ""nodule""]"\nb.png,q,mass|edema\nc.png,r,nan\n',
    )
    assert table.Table(table=path, columns=columns).plan(deid).label_names == (
        "edema",
        "mass",
        "nodule",
    )
    path = write(tmp_path, "image,patient,tags\na.png,p,mass\nb.png,q,\"['mass', 'nodule']\"\n")
    plan = table.Table(table=path, columns=columns).plan(deid)
    assert plan.label_names == ("mass",)
    assert_skipped(plan, "cell_malformed", names="row 2: tags must be")


def test_a_missing_field_of_json_lines_is_named_by_row(tmp_path: Path, deid: Deidentifier) -> None:
    plan = plan_json(
        tmp_path, deid, {"patient": "p", "text": "Clear."}, {"patient": "q"}, text_column=("text",)
    )
    assert_skipped(plan, "cell_missing", names="rows.jsonl, row 2 lacks the column text")


def test_unknown_sexes_and_ages_are_counted(tmp_path: Path, deid: Deidentifier) -> None:
    rows = [{"sex": "W", "age": ">89"}, {"sex": "Male", "age": "045Y"}, {"sex": "", "age": None}]
    given = [{"patient": "p", **row} for row in rows]
    plan = plan_json(tmp_path, deid, *given, sex_column="sex", age_column="age")
    assert plan.warnings == {"unknown_sex": 1, "unknown_age": 1}
    assert [(record.sample.sex, record.sample.age) for record in plan.records] == [
        (None, None),
        ("M", 45),
        (None, None),
    ]


def test_extra_columns_of_parquet_are_kept_as_json(tmp_path: Path, deid: Deidentifier) -> None:
    taken = [{"at": datetime.date(2020, 1, 2), "values": [1, None]}]
    content = {"image": ["a.png"], "patient": ["p"], "taken": [taken]}
    pyarrow.parquet.write_table(pyarrow.table(content), tmp_path / "rows.parquet")
    columns = TableColumns(image_column="image", patient_column="patient", extra_column=("taken",))
    (record,) = table.Table(table=tmp_path / "rows.parquet", columns=columns).plan(deid).records
    assert record.sample.extra == {"taken": [{"at": "2020-01-02", "values": [1, None]}]}


def test_sections_suffixes_and_patients_within_names(tmp_path: Path, deid: Deidentifier) -> None:
    content = "image,text,section_findings\nx/PMC12_F1.jpg,Clear.,A.\nPMC12_F2,Clear.,\nq.png,C,C\n"
    columns = TableColumns(
        image_column="image",
        patient_column="image",
        text_column=("impression=text", "section_findings"),
    )
    options = {"image_suffix": ".png", "patient_pattern": r"PMC\d+"}
    path = write(tmp_path, content)
    plan = table.Table(table=path, columns=columns, **options).plan(deid)
    first, second = (record.sample for record in plan.records)
    assert first.sections == {"impression": "Clear.", "findings": "A."}
    assert (first.image, second.image) == (tmp_path / "x/PMC12_F1.png", tmp_path / "PMC12_F2.png")
    assert first.patient == second.patient == deid.patient("PMC12")
    assert first.key == deid.image("x/PMC12_F1.jpg"), "the suffix changes no key"
    assert "--patient-pattern" in assert_skipped(plan, "cell_malformed", names="row 3")
    group = {"patient_pattern": r"PMC(\d+)_|(q)"}
    plan = table.Table(table=path, columns=columns, **group).plan(deid)
    assert plan.records[0].sample.patient == deid.patient("12")
    assert_skipped(plan, "cell_malformed", names="row 3")
    for field, value in (("image_suffix", "png"), ("patient_pattern", "(")):
        with raises(ConfigError, "malformed", field):
            table.Table(table=path, columns=columns, **{field: value}).plan(deid)
