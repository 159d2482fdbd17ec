"""Memory of a conversion: records on disk, ordering in little memory, and the memory limit of
workers.
"""

import dataclasses
import io
import multiprocessing
import resource
import struct
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers.errors import raises
from helpers.shard_plans import OPTIONS, contents, make_plan

from medvl.common.process import memory_limited
from medvl.data.convert import pipeline
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.plan import order_by_key
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import Sample


def record(number: int, **changes: object) -> Record:
    sample = Sample(
        key=f"lab-{number * 7919 % 100_003:06d}",
        corpus="lab",
        split="train",
        patient=f"{number:032x}",
        study=f"study{number}",
        image=Path(f"/images/{number}.png"),
        sections={"impression": "Normal. " * 20, "findings": "Clear."},
        labels={"Edema": -1, "Atelectasis": 0},
    )
    return Record(
        dataclasses.replace(sample, **changes),
        Path(f"/reports/{number}.txt") if number % 2 else None,
    )


def test_records_are_read_back_unchanged() -> None:
    added = [
        record(0),
        record(1, image=None, sections={}, labels={}, view="PA", sex="F", age=0),
        record(
            2,
            extra={"boxes": [{"x": 1.5, "on": None}], "ok": True},
            sections={"caption": 'Röntgen 胸片\n\t"\\'},
        ),
        record(3, image=Path("/images/\udcff.png"), view=""),
    ]
    records = Records(added[:2])
    assert records[1] == added[1]
    records.append(added[2])  # after a read
    records.append(added[3])
    assert list(records) == added
    assert list(records[2].sample.sections) == list(added[2].sample.sections)
    assert list(records[0].sample.sections) == ["impression", "findings"], "the order of the report"
    assert (len(records), records[-1], records[1:3]) == (4, added[3], added[1:3])
    assert not Records()
    with pytest.raises(IndexError):
        records[4]


def test_records_in_memory_and_on_disk_give_the_same_shards(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = make_plan(tmp_path / "images")
    on_disk = dataclasses.replace(plan, records=Records(plan.records[::-1]))
    write_shards(plan, deid, ShardRun(out=tmp_path / "a", workers=1), OPTIONS)
    write_shards(on_disk, deid, ShardRun(out=tmp_path / "b", workers=1), OPTIONS)
    assert contents(tmp_path / "a/train") == contents(tmp_path / "b/train")
    assert contents(tmp_path / "a-private") == contents(tmp_path / "b-private")


def test_ordering_uses_little_memory_per_image() -> None:
    """The limits are on memory traced by tracemalloc; records in memory would take 2 kB each."""
    count, one = 5_000, record(1)
    names = (
        (f"{number * 7919 % 100_003:06d}", f"{number:032x}", number % 50) for number in range(count)
    )
    tracemalloc.start()
    records = Records(
        Record(
            dataclasses.replace(
                one.sample, key=key, patient=patient, split="train" if rest else "test"
            ),
            one.report,
        )
        for key, patient, rest in names
    )
    held, _ = tracemalloc.get_traced_memory()
    orders = order_by_key(Plan("lab", records, (), RowCounts()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12 * count + 50_000
    assert peak < 150 * count + 200_000
    assert {split: len(order_N) for split, order_N in orders.items()} == {
        "test": 100,
        "train": 4_900,
    }
    keys = [records[place].sample.key for place in orders["train"][:500].tolist()]
    assert keys == sorted(keys)


def test_full_temporary_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with raises(CorpusError, "unreadable", names="No space left on device"):
        Records()


def png_bomb(side: int) -> bytes:
    """Return a PNG of `side` x `side` black pixels: within the limit for one image, above a
    small memory limit.
    """
    raw = zlib.compress(bytes((side + 1) * side), 9)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)),
        (b"IDAT", raw),
        (b"IEND", b""),
    ]
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    file.seek(0, io.SEEK_END)
    for kind, data in chunks:
        file.write(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )
    return file.getvalue()


def _convert_with_a_small_limit(
    folder: Path, deid: Deidentifier
) -> tuple[int, dict[str, int], bool]:
    """Convert a plan with a PNG bomb. Returns (samples, skipped by reason, whether the limit was
    lifted afterwards).
    """
    plan = make_plan(folder / "images", 4, bad={2: png_bomb(8000)})
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with mock.patch.object(pipeline, "WORKER_BYTES", 48 << 20):
        (manifest,) = write_shards(
            plan, deid, ShardRun(out=folder / "out", workers=1, max_skipped=1), OPTIONS
        ).values()
    np.empty(256 << 20, np.uint8).fill(1)
    return (
        manifest.samples,
        dict(manifest.skipped),
        resource.getrlimit(resource.RLIMIT_DATA) == before,
    )


def _exceed_the_limit() -> tuple[bool, bool]:
    """Return (whether exceeding the limit raises MemoryError, whether the limit was lifted
    afterwards).
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with memory_limited(32 << 20):
            np.empty(256 << 20, np.uint8)
    except MemoryError:
        return True, resource.getrlimit(resource.RLIMIT_DATA) == before
    return False, resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.fixture
def fresh_process() -> Iterator[ProcessPoolExecutor]:
    """A process that has run no other tests: memory that they freed would be enough for the
    bomb.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("the limit works on Linux only")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.fault("S5")
def test_one_worker_is_limited_as_well(
    fresh_process: ProcessPoolExecutor, tmp_path: Path, deid: Deidentifier
) -> None:
    result = fresh_process.submit(_convert_with_a_small_limit, tmp_path, deid).result()
    assert result == (3, {"too_large": 1}, True)


def test_limit_is_lifted_after_an_error(fresh_process: ProcessPoolExecutor) -> None:
    assert fresh_process.submit(_exceed_the_limit).result() == (True, True)
