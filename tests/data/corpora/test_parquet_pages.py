"""Pages of Parquet files: values and their places equal what pyarrow reads; damage is an error."""

import io
import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.errors import raises

from medvl.data.corpora.common import parquet_pages
from medvl.data.corpora.common.parquet_pages import ByteColumn, PageSizeError
from medvl.data.corpora.parquet_files import ParquetColumns, ParquetFiles
from medvl.data.privacy import Deidentifier
from medvl.data.storage.tars import read_parts
from medvl.errors import CorpusError, MedvlError
from medvl.schema import FilePart

BYTES = pyarrow.binary()
STRUCT = pyarrow.struct([("bytes", BYTES), ("path", pyarrow.string())])
MIB = 1 << 20
ROWS = 90


def value(random: random.Random) -> bytes | None:
    if random.random() < 0.15:
        return None
    return b"equal" if random.random() < 0.3 else random.randbytes(random.randrange(400))


def cell(random: random.Random) -> dict[str, Any] | None:
    return None if random.random() < 0.1 else {"bytes": value(random), "path": "a.png"}


def row(kind: Any, random: random.Random) -> Any:
    if kind == BYTES:
        return value(random)
    if kind == STRUCT:
        return cell(random)
    make = cell if kind.value_type == STRUCT else value
    number = random.randrange(4)
    return None if random.random() < 0.1 else [make(random) for _ in range(number)]


def expected(rows: list[Any]) -> list[list[bytes | None]]:
    cells = [row if isinstance(row, list) else [row] for row in rows]
    return [
        [entry.get("bytes") if isinstance(entry, dict) else entry for entry in each] or [None]
        for each in cells
    ]


def write(target: Any, rows: list[Any], kind: Any = STRUCT, **options: Any) -> None:
    captions = [f"Caption {number}." for number in range(len(rows))]
    table = pyarrow.table({"caption": captions, "image": pyarrow.array(rows, kind)})
    pyarrow.parquet.write_table(table, target, **options)


@pytest.mark.parametrize(
    "kind", [BYTES, STRUCT, pyarrow.list_(BYTES), pyarrow.list_(STRUCT)], ids=str
)
def test_values_and_places_are_those_of_pyarrow(kind: Any, tmp_path: Path) -> None:
    made = random.Random(0)
    rows = [row(kind, made) for _ in range(ROWS)]
    path = tmp_path / "a.parquet"
    write(path, rows[:5], kind)
    leaf = next(
        name
        for name in pyarrow.parquet.ParquetFile(path).metadata.row_group(0).to_dict()["columns"]
        if name["path_in_schema"].startswith("image") and "path" not in name["path_in_schema"][6:]
    )["path_in_schema"]
    encodings: list[dict[str, Any]] = [
        {"dictionary_pagesize_limit": 4000},
        {"use_dictionary": False},
        {"use_dictionary": False, "column_encoding": {leaf: "DELTA_LENGTH_BYTE_ARRAY"}},
    ]
    for encoding, compression, version, group in itertools.product(
        encodings, ("none", "snappy", "zstd", "gzip", "lz4", "brotli"), ("1.0", "2.0"), (20, ROWS)
    ):
        options = {"compression": compression, "data_page_version": version, **encoding}
        write(
            path,
            rows,
            kind,
            row_group_size=group,
            data_page_size=3000,
            write_batch_size=8,
            **options,
        )
        found = list(ByteColumn.find(path, "image", MIB).rows())
        contents = [[each and each.content for each in values] for values in found]
        assert contents == expected(rows), options
        values = [each for each in itertools.chain.from_iterable(found) if each]
        parts = [FilePart(str(path), "", each.offset, each.size, each.page) for each in values]
        read = read_parts(parts)
        assert [read[part] for part in parts] == [each.content for each in values], options


def test_pages_above_the_limit_are_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [{"bytes": bytes(2 * MIB), "path": ""}], compression="zstd")
    assert path.stat().st_size < 10_000
    with pytest.raises(PageSizeError, match="at most 1 MB in a compressed page"):
        list(ByteColumn.find(path, "image", MIB).rows())
    assert len(list(ByteColumn.find(path, "image", 3 * MIB).rows())) == 1


def test_headers_that_lie_about_sizes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    content = random.Random(0).randbytes(300)
    write(path, [content], BYTES, compression="none", use_dictionary=False)
    data = path.read_bytes()
    start = data.index(len(content).to_bytes(4, "little") + content)
    for length in (301, 1 << 20, (1 << 32) - 1):
        path.write_bytes(data[:start] + length.to_bytes(4, "little") + data[start + 4 :])
        with pytest.raises(ValueError, match="longer than its page"):
            list(ByteColumn.find(path, "image", MIB).rows())


def test_a_row_cannot_have_a_million_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    write(path, [[b"equal"] * 50], pyarrow.list_(BYTES))
    assert len(next(ByteColumn.find(path, "image", MIB).rows())) == 50
    monkeypatch.setattr(parquet_pages, "_ROW_VALUES", 49)
    with pytest.raises(ValueError, match="more than 49 values"):
        list(ByteColumn.find(path, "image", MIB).rows())
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"equal"] * 20_000}), path)
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(parquet_pages, "_FREE_VALUES", 1000)
    with pytest.raises(ValueError, match="20000 values"):
        list(ByteColumn.find(path, "image", MIB).rows())


def changed(data: bytes, random: random.Random) -> bytes:
    """Return a file with some bytes changed, removed or inserted."""
    place = random.randrange(len(data))
    kind = random.randrange(4)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + data[place + random.randrange(1, 9) :]
    if kind == 2:
        return data[:place] + random.randbytes(random.randrange(1, 9)) + data[place:]
    new = bytes([random.choice((0, 127, 128, 255, random.randrange(256)))])
    return data[:place] + new + data[place + 1 :]


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0"},
    ],
    ids=str,
)
def test_damaged_files_are_plans_or_errors_of_the_project(
    options: dict[str, Any], lists: bool, tmp_path: Path
) -> None:
    """pyarrow's metadata of a column end the process at some of them."""
    made = random.Random(1)
    kind = pyarrow.list_(STRUCT) if lists else STRUCT
    buffer = io.BytesIO()
    write(buffer, [row(kind, made) for _ in range(20)], kind, **options)
    path = tmp_path / "train.parquet"
    columns = ParquetColumns(text_column=("caption",))
    corpus = ParquetFiles(files=(str(path),), columns=columns, rows_are_patients=True)
    outcomes = set()
    messages = []
    for _ in range(150):
        path.write_bytes(changed(buffer.getvalue(), made))
        try:
            plan = corpus.plan(Deidentifier(bytes(16)))
            parts = [record.sample.image for record in plan.records]
            read_parts(part for part in parts if isinstance(part, FilePart))
            outcomes.add("plan")
        except MedvlError as error:
            messages.append(str(error))
            outcomes.add(error.code)
    assert {"plan", "malformed"} <= outcomes
    assert all(str(path) in message for message in messages)


def test_columns_of_other_shapes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    columns = ParquetColumns(text_column=("caption",))
    corpus = ParquetFiles(files=(str(path),), columns=columns, rows_are_patients=True)
    kinds = [
        (pyarrow.list_(pyarrow.list_(BYTES)), [[b"a"]]),
        (pyarrow.struct([("data", BYTES)]), {"data": b"a"}),
        (pyarrow.binary(3), b"abc"),
        (pyarrow.map_(pyarrow.string(), BYTES), [("bytes", b"a")]),
    ]
    for kind, content in kinds:
        write(path, [content], kind)
        with raises(CorpusError, "wrong_type", "image", names="expected bytes"):
            corpus.plan(Deidentifier(bytes(16)))
    inner = pyarrow.struct([("bytes", STRUCT), ("path", pyarrow.string())])
    write(path, [{"bytes": {"bytes": b"a", "path": ""}, "path": ""}], inner)
    with raises(CorpusError, "wrong_type", "image"):
        corpus.plan(Deidentifier(bytes(16)))
