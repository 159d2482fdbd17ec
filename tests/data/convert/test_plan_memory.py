"""Plans of any size: records on disk, ordered in little memory, and the memory cap of whoever decodes."""

import dataclasses
import io
import multiprocessing
import resource
import struct
import tempfile
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.shard_plans import OPTIONS, contents, make_plan

from medvl.data.convert import pipeline
from medvl.data.convert.memory_limit import capped_memory
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.plan import ordered_by_key
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy.deidentify import Deidentifier
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
    return Record(dataclasses.replace(sample, **changes), Path(f"/reports/{number}.txt") if number % 2 else None)


def test_records_come_back_as_they_were_added() -> None:
    added = [
        record(0),
        record(1, image=None, sections={}, labels={}, view="PA", sex="F", age=0),
        record(2, extra={"boxes": [{"x": 1.5, "on": None}], "ok": True}, sections={"caption": 'Röntgen 胸片\n\t"\\'}),
        record(3, image=Path("/images/\udcff.png"), view=""),
    ]
    records = Records(added[:2])
    assert records[1] == added[1]
    records.append(added[2])  # after it was read
    records.append(added[3])
    assert list(records) == added
    assert list(records[2].sample.sections) == list(added[2].sample.sections)
    assert list(records[0].sample.sections) == ["impression", "findings"], "the order of the report"
    assert (len(records), records[-1], records[1:3]) == (4, added[3], added[1:3])
    assert not Records()
    with pytest.raises(IndexError):
        records[4]


def test_shards_are_the_same_from_memory_and_from_disk(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images")
    spooled = dataclasses.replace(plan, records=Records(plan.records[::-1]))
    write_shards(plan, deid, ShardRun(out=tmp_path / "a", workers=1), OPTIONS)
    write_shards(spooled, deid, ShardRun(out=tmp_path / "b", workers=1), OPTIONS)
    assert contents(tmp_path / "a/train") == contents(tmp_path / "b/train")
    assert contents(tmp_path / "a-private") == contents(tmp_path / "b-private")


def test_a_plan_takes_little_memory_an_image() -> None:
    """The records would take 2 kB each. Both figures are of Python's and NumPy's own count of what they allocate."""
    count, one = 20_000, record(1)
    names = ((f"{number * 7919 % 100_003:06d}", f"{number:032x}", number % 50) for number in range(count))
    tracemalloc.start()
    records = Records(
        Record(dataclasses.replace(one.sample, key=key, patient=patient, split="train" if rest else "test"), one.report)
        for key, patient, rest in names
    )
    held, _ = tracemalloc.get_traced_memory()
    places = ordered_by_key(Plan("lab", records, (), Counter()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12 * count + 200_000
    assert peak < 150 * count + 1_500_000  # and the block of texts that is on its way into a column
    assert {split: len(places) for split, places in places.items()} == {"test": 400, "train": 19_600}
    keys = [records[place].sample.key for place in places["train"][:500].tolist()]
    assert keys == sorted(keys)


def test_a_folder_that_refuses_the_plan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(CorpusError, match=r"cannot hold the plan .* \(No space left on device\).*\$TMPDIR"):
        Records()


def png_bomb(side: int) -> bytes:
    """A PNG of `side` x `side` black pixels, within the limits of a single image but not of a small cap."""
    raw = zlib.compress(bytes((side + 1) * side), 9)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)), (b"IDAT", raw), (b"IEND", b"")]
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    file.seek(0, io.SEEK_END)
    for kind, data in chunks:
        file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return file.getvalue()


def _convert_under_a_small_cap(folder: Path, deid: Deidentifier) -> tuple[int, dict[str, int], bool]:
    """(samples, what was skipped, whether the process may have what it wants again) of a conversion with a bomb."""
    plan = make_plan(folder / "images", 4, bad={2: png_bomb(8000)})
    before = resource.getrlimit(resource.RLIMIT_DATA)
    pipeline.WORKER_BYTES = 48 << 20
    (manifest,) = write_shards(plan, deid, ShardRun(out=folder / "out", workers=1, max_skipped=1), OPTIONS).values()
    np.empty(256 << 20, np.uint8).fill(1)
    return manifest.samples, dict(manifest.skipped), resource.getrlimit(resource.RLIMIT_DATA) == before


def _exceed_a_cap() -> tuple[bool, bool]:
    """(whether what exceeds a cap raises MemoryError, whether the limit is then what it was)."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with capped_memory(32 << 20):
            np.empty(256 << 20, np.uint8)
    except MemoryError:
        return True, resource.getrlimit(resource.RLIMIT_DATA) == before
    return False, resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.fixture
def fresh_process() -> Iterator[ProcessPoolExecutor]:
    """One that has run no other tests: freed memory that a process keeps may be enough for any bomb."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the cap counts what Linux counts")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.fault("S5")
def test_a_bomb_in_the_process_itself_meets_the_cap_of_a_worker(
    fresh_process: ProcessPoolExecutor, tmp_path: Path, deid: Deidentifier
) -> None:
    found = fresh_process.submit(_convert_under_a_small_cap, tmp_path, deid).result()
    assert found == (3, {"too_large": 1}, True)


def test_the_cap_ends_with_an_error_too(fresh_process: ProcessPoolExecutor) -> None:
    assert fresh_process.submit(_exceed_a_cap).result() == (True, True)
