"""Conversion to shards: determinism, resuming, accounting for every image, and reading the
shards back.
"""

import dataclasses
import json
import os
import signal
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import webdataset
from helpers import forked
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import IMAGES, textured
from helpers.shard_plans import OPTIONS, contents, make_plan

from medvl.common.untrusted import ANYWHERE
from medvl.data.convert import pipeline, record
from medvl.data.convert.merge import merge_parts
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.convert.record import ShardTask
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.images.codecs import decode_image, encode_png
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Index, Manifest, check_key, sample_from_json, sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.errors import BudgetError, ConfigError, CorpusError, ShardError, SplitError
from medvl.schema import FINDINGS, Sample


def test_shards_return_the_converted_samples(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images")
    manifest = write_shards(plan, deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS)["train"]
    assert Manifest.read(tmp_path / "out/train") == manifest
    assert (manifest.samples, manifest.planned, len(manifest.shards)) == (12, 12, 3)
    assert manifest.patients == tuple(sorted(f"patient{number}" for number in range(6)))
    source = ShardSource(tmp_path / "out/train")
    assert source.label_names == ("even",)
    for position in range(len(source)):
        planned = plan.records[position].sample
        sample = source.sample(position)
        assert sample == dataclasses.replace(planned, image=None)
        assert source.key(position) == sample.key
        assert source.pixels(position).shape == (32, 40)
    with pytest.raises(IndexError):
        source.sample(12)


def test_webdataset_reads_the_shards(tmp_path: Path, deid: Deidentifier) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    urls = [str(path) for path in sorted((tmp_path / "out/train").glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"key{number:03d}" for number in range(12)]
    assert json.loads(samples[3]["json"])["sections"] == {"caption": "This is image 3."}
    assert decode_image(samples[3]["png"]).shape == (32, 40)


def test_number_of_workers_does_not_change_the_bytes(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images", bad={3: b"no image"})
    for workers in (1, 2):
        run = ShardRun(out=tmp_path / f"out{workers}", workers=workers, max_skipped=1)
        write_shards(plan, deid, run, OPTIONS)
    assert contents(tmp_path / "out1/train") == contents(tmp_path / "out2/train")


@pytest.mark.fault("F12")
def test_skipped_images_are_counted_and_listed(tmp_path: Path, deid: Deidentifier) -> None:
    whole = encode_png(textured(1, 40, 50))
    plan = make_plan(tmp_path / "images", bad={0: b"zero", 4: whole[: len(whole) // 2], 7: b"text"})
    (tmp_path / "images/0.png").write_bytes(b"")
    (tmp_path / "images/9.png").unlink()
    manifest = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=4), OPTIONS
    )["train"]
    assert (manifest.samples, manifest.planned, sum(manifest.skipped.values())) == (8, 12, 4)
    reasons = {
        "key000": "empty",
        "key004": "truncated",
        "key007": "unknown_format",
        "key009": "image_missing",
    }
    assert manifest.skipped_keys == tuple(reasons.items())
    assert manifest.skipped == dict.fromkeys(reasons.values(), 1)
    private = [
        json.loads(line)
        for line in (tmp_path / "out-private/skipped.jsonl").read_text().splitlines()
    ]
    assert {row["key"]: row["reason"] for row in private} == dict(manifest.skipped_keys)
    assert all(f"{int(row['key'][3:])}.png" in row["message"] for row in private)
    assert (tmp_path / "out-private").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("shape", [(1, 600), (600, 1), (15, 15), (20, 1200)])
def test_strips_are_skipped(tmp_path: Path, deid: Deidentifier, shape: tuple[int, int]) -> None:
    plan = make_plan(tmp_path / "images", bad={0: encode_png(textured(0, *shape))})
    manifest = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=1), OPTIONS
    )["train"]
    assert manifest.skipped_keys == (("key000", "too_small"),)


def test_frame_of_multi_frame_files_is_an_option(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images", 2)
    frames_NHW = np.stack([np.full((32, 32), value, np.uint16) for value in (0, 4000)])
    path = write_dataset(tmp_path / "clip.dcm", image_dataset(frames_NHW, NumberOfFrames=2))
    plan.records[0] = Record(dataclasses.replace(plan.records[0].sample, image=path))
    run = ShardRun(out=tmp_path / "without", workers=1, max_skipped=1)
    manifest = write_shards(plan, deid, run, OPTIONS)["train"]
    assert manifest.skipped == {"multi_frame": 1}
    assert not {"frame", "follow_links"} & set(manifest.options), (
        "manifests of other conversions are unchanged"
    )
    run = dataclasses.replace(run, out=tmp_path / "with")
    manifest = write_shards(plan, deid, run, dataclasses.replace(OPTIONS, frame=1))["train"]
    assert (manifest.samples, manifest.options["frame"]) == (2, 1)
    with raises(ConfigError, "out_of_range", "frame"):
        ShardOptions(frame=-1)


@pytest.mark.fault("F12")
def test_conversion_stops_over_budget_and_resumes_with_a_larger_one(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = make_plan(tmp_path / "images", bad={1: b"x", 8: b"y"})
    with raises(
        BudgetError, "budget", "max_skipped", names=str(tmp_path / "out-private/skipped.jsonl")
    ):
        write_shards(
            plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=0.1), OPTIONS
        )
    assert not (tmp_path / "out/train/manifest.json").exists()
    manifest = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=0.2), OPTIONS
    )["train"]
    assert manifest.samples == 10


def test_images_without_text_are_excluded(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images", 4)
    plan.records[2] = Record(dataclasses.replace(plan.records[2].sample, sections={"caption": ""}))
    manifest = write_shards(plan, deid, ShardRun(out=tmp_path / "a", workers=1), OPTIONS)["train"]
    assert (manifest.samples, manifest.excluded, manifest.skipped) == (3, {"no_text": 1}, {})
    keep = dataclasses.replace(OPTIONS, keep_textless=True)
    assert (
        write_shards(plan, deid, ShardRun(out=tmp_path / "b", workers=1), keep)["train"].samples
        == 4
    )


@pytest.mark.parametrize("part", [None, "1/1"])
def test_a_conversion_without_a_sample_is_an_error(
    tmp_path: Path, deid: Deidentifier, part: str | None
) -> None:
    full = make_plan(tmp_path / "images", 4)
    textless = [
        Record(dataclasses.replace(each.sample, sections={"caption": ""})) for each in full.records
    ]
    plan = dataclasses.replace(full, records=textless)
    run = ShardRun(out=tmp_path / "out", workers=1, part=part)
    for _ in range(
        2
    ):  # a second run of the same command has nothing to convert, and no sample either
        with raises(
            CorpusError,
            "empty",
            "out",
            names="no sample was written of 4 (4 no_text); to keep images",
        ):
            if part is None:
                write_shards(plan, deid, run, OPTIONS)
            else:
                write_shards(plan, deid, run, OPTIONS)
                merge_parts(tmp_path / "merged", [run.out])
    assert not list(tmp_path.rglob("manifest.json"))
    unreadable = make_plan(tmp_path / "others", 2, bad={0: b"x", 1: b"y"})
    with raises(CorpusError, "empty", names="of 2 (2 unknown_format); remove"):
        write_shards(
            unreadable, deid, ShardRun(out=tmp_path / "other", workers=1, max_skipped=2), OPTIONS
        )


@pytest.mark.parametrize("stop_after", [0, 3, 5, 8, 11])
def test_interrupted_run_resumes_to_the_same_bytes(
    tmp_path: Path, deid: Deidentifier, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path / "images")
    write_shards(plan, deid, ShardRun(out=tmp_path / "whole", workers=1), OPTIONS)
    original, seen = record.encode_stored, [0]

    def stop(*arguments: object) -> bytes:
        seen[0] += 1
        if seen[0] > stop_after:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(record, "encode_stored", stop)
        with pytest.raises(KeyboardInterrupt):
            write_shards(plan, deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS)
    stored = json.loads((tmp_path / "out-private/plan.json").read_text())
    del stored["options"]["color"]  # as from a version without this option
    (tmp_path / "out-private/plan.json").write_text(json.dumps(stored))
    seen[0] = -100
    with monkeypatch.context() as patch:
        patch.setattr(record, "encode_stored", stop)
        write_shards(plan, deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS)
    assert seen[0] + 100 == 12 - stop_after // 5 * 5, "finished shards are converted again"
    assert contents(tmp_path / "out/train") == contents(tmp_path / "whole/train")


# A hundred images of a size that leaves time to kill the run, converted twice and a half.
@pytest.mark.slow
def test_run_killed_by_the_system_resumes(tmp_path: Path, deid: Deidentifier) -> None:
    """Kill the command and its workers at an arbitrary moment, then run the same command again."""
    folder = tmp_path / "images"
    folder.mkdir()
    rows = []
    for number in range(100):
        (folder / f"{number}.png").write_bytes(encode_png(textured(number, 600, 500)))
        rows.append(
            {"image": f"images/{number}.png", "patient": f"p{number}", "text": f"Image {number}."}
        )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "medvl", "shards", "table", "--table",
        str(tmp_path / "rows.jsonl"),
               "--image-column", "image", "--patient-column", "patient", "--text-column", "text",
               "--samples-per-shard", "7"]  # fmt: skip
    whole = ["--out", str(tmp_path / "whole"), "--workers", "1"]  # the bytes are those of two
    forked.run([*command, *whole]).check_returncode()
    command += ["--workers", "2"]
    out = tmp_path / "out"
    process = forked.start([*command, "--out", str(out)], cwd=tmp_path, new_session=True)
    assert process.pid is not None
    while not list(out.glob("*/*.tar")):
        assert process.exitcode is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert not list(out.glob("*/manifest.json")), "killed too late to test anything"
    forked.run([*command, "--out", str(out)]).check_returncode()
    for split in ("train", "validate", "test"):
        expected = contents(tmp_path / "whole" / split)
        actual = contents(out / split)
        assert {name: actual[name] for name in expected} == expected


def test_second_run_writes_nothing_and_another_plan_is_refused(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan, run = make_plan(tmp_path / "images"), ShardRun(out=tmp_path / "out", workers=1)
    write_shards(plan, deid, run, OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/train").iterdir()}
    write_shards(plan, deid, run, OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out/train").iterdir()} == before
    with raises(ConfigError, "exists", "options"):
        write_shards(plan, deid, run, dataclasses.replace(OPTIONS, quality=90))
    with raises(ConfigError, "exists", "records"):
        write_shards(make_plan(tmp_path / "images", 11), deid, run, OPTIONS)
    with raises(ConfigError, "exists", "salt"):
        write_shards(plan, Deidentifier(b"another salt of sufficient size!"), run, OPTIONS)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/file").touch()
    with raises(ConfigError, "exists", "out"):
        write_shards(plan, deid, ShardRun(out=tmp_path / "foreign"), OPTIONS)


def test_private_files_are_closed_to_other_users(tmp_path: Path, deid: Deidentifier) -> None:
    """Whatever the modes of a folder that was there before; a link is refused, and its target
    stays as it was.
    """
    plan, private = make_plan(tmp_path / "images", 4), tmp_path / "out-private"
    private.mkdir()
    (private / "sources.tsv").touch()
    private.chmod(0o755)
    (private / "sources.tsv").chmod(0o644)
    (tmp_path / "target").mkdir(mode=0o755)
    write_shards(plan, deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS)
    assert private.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in private.iterdir() if path.stat().st_mode & 0o077} <= {".lock"}
    assert (private / "sources.tsv").read_text()
    (tmp_path / "linked-private").symlink_to(tmp_path / "target")
    with raises(ConfigError, "outside_folder"):
        write_shards(plan, deid, ShardRun(out=tmp_path / "linked", workers=1), OPTIONS)
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize(
    ("max_skipped", "passes"), [(2, True), (1, False), (0.34, True), (0.3, False)]
)
def test_unusable_rows_are_held_to_the_budget(
    tmp_path: Path, deid: Deidentifier, max_skipped: float, passes: bool
) -> None:
    """One of six rows was skipped while planning, and one image is unreadable; rows that an
    option excludes are free.
    """
    plan = make_plan(tmp_path / "images", 5, bad={2: b"no image"})
    counts = RowCounts(read=9, kept=5, excluded=Counter(view=3), skipped=Counter(text_unreadable=1))
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=max_skipped)
    if passes:
        manifest = write_shards(dataclasses.replace(plan, rows=counts), deid, run, OPTIONS)["train"]
        assert manifest.rows == {
            "unit": "images",
            "read": 9,
            "kept": 5,
            "skipped": {"text_unreadable": 1},
        }
        assert manifest.excluded_from_corpus == {"view": 3}
    else:
        with raises(BudgetError, "budget", "max_skipped"):
            write_shards(dataclasses.replace(plan, rows=counts), deid, run, OPTIONS)


def test_damaged_shards_are_converted_again(tmp_path: Path, deid: Deidentifier) -> None:
    plan, run = make_plan(tmp_path / "images"), ShardRun(out=tmp_path / "out", workers=1)
    write_shards(plan, deid, run, OPTIONS)
    expected = contents(tmp_path / "out/train")
    (tmp_path / "out/train/lab-train-000001.tar").write_bytes(b"cut short")
    (tmp_path / "out/train/lab-train-000002.index").unlink()
    (tmp_path / "out-private/lab-train-000000.json").write_text('{"name": "lab-tr')
    write_shards(plan, deid, run, OPTIONS)
    assert contents(tmp_path / "out/train") == expected


@pytest.mark.fault("S11")
def test_patient_in_two_splits_is_refused(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images", 4)
    plan.records[1] = Record(dataclasses.replace(plan.records[1].sample, split="test"))
    with raises(SplitError, "leak", names="1 in both"):
        write_shards(plan, deid, ShardRun(out=tmp_path / "out"), OPTIONS)


def test_empty_plans_and_duplicate_keys_are_refused(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "empty", names="3 view"):
        write_shards(
            Plan("lab", [], (), RowCounts(read=3, excluded=Counter(view=3))),
            deid,
            ShardRun(out=tmp_path / "out"),
            OPTIONS,
        )
    plan = make_plan(tmp_path / "images", 2)
    with raises(CorpusError, "conflict", "key", names="key000"):
        write_shards(
            Plan("lab", plan.records * 2, (), RowCounts()),
            deid,
            ShardRun(out=tmp_path / "out"),
            OPTIONS,
        )


@pytest.mark.fault("F2")
def test_full_disk_keeps_finished_shards(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, run = make_plan(tmp_path / "images"), ShardRun(out=tmp_path / "out", workers=1)
    original, calls = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise OSError(28, "No space left on device")
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with raises(ShardError, "unreadable", names="1 of 3 shards"):
            write_shards(plan, deid, run, OPTIONS)
    assert not list((tmp_path / "out").rglob("*.tar.partial"))
    assert write_shards(plan, deid, run, OPTIONS)["train"].samples == 12


@pytest.mark.fault("F6")
def test_dead_worker_raises(
    tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_start_worker", os._exit)
    with raises(ShardError, "worker", names="no worker process started"):
        write_shards(
            make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "out", workers=2), OPTIONS
        )


def test_slow_shards_do_not_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks hold all records of a shard: four are queued for two workers, however long the
    shards take.
    """
    pool, submitted = Mock(), list[ShardTask]()
    pool.submit = lambda _, task: submitted.append(task) or Future[object]()
    monkeypatch.setattr(pipeline, "ProcessPoolExecutor", lambda *_, **__: pool)
    monkeypatch.setattr(pipeline, "wait", lambda running, **_: (set(), running))
    task = ShardTask("a", "train", Path("a"), (), OPTIONS, ANYWHERE)
    results = pipeline.LocalEngine(2).run([task] * 20)
    for _ in range(10):
        assert next(results) == (None, 0)
    results.close()
    assert len(submitted) == 4


def test_mimic_cxr_is_converted_without_identifiers(
    mimic_root: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    manifests = write_shards(
        mimic_cxr.MimicCXR(root=mimic_root).plan(deid),
        deid,
        ShardRun(out=tmp_path / "out", workers=1),
        ShardOptions(short_side=64),
    )
    assert {split: manifest.samples for split, manifest in manifests.items()} == {
        "train": 3,
        "validate": 1,
        "test": 1,
    }
    assert manifests["train"].label_names == FINDINGS
    assert manifests["test"].warnings["no_findings_or_impression"] == 1
    source = ShardSource(tmp_path / "out/train")
    by_key = {source.key(position): position for position in range(len(source))}
    original = textured(1, 91, 120)
    stored = source.pixels(by_key[deid.image(IMAGES[1][2])])
    assert stored.shape == (64, 84)
    reference = original[:: len(original) // 8, ::15].mean()
    assert abs(float(stored.mean()) - reference) < 20, "this is the image of another sample"
    stored = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    for subject, study, dicom_id, _, _ in IMAGES:
        for identifier in (subject, study, dicom_id):
            assert identifier.encode() not in stored


def test_missing_reports_are_skipped_and_latin_1_reports_are_read(
    mimic_root: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    (mimic_root / "files/p11/p11000001/s51000001.txt").unlink()
    latin = mimic_root / "files/p10/p10000764/s57375967.txt"
    latin.write_bytes(" FINDINGS: M\xe9diastinum widened.\n".encode("latin-1"))
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=1)
    manifests = write_shards(mimic_cxr.MimicCXR(root=mimic_root).plan(deid), deid, run)
    assert manifests["validate"].skipped == {"report_missing": 1}
    assert manifests["test"].warnings["not_utf8"] == 1
    assert (
        ShardSource(tmp_path / "out/test").sample(0).sections["findings"] == "Médiastinum widened."
    )


def test_sample_json_round_trip_and_other_json_is_refused() -> None:
    sample = Sample(
        key="k",
        corpus="c",
        split="s",
        patient="p",
        study="t",
        sections={"caption": "5 µm"},
        labels={"A": -1},
    )
    assert sample_from_json(sample_to_json(sample)) == sample
    for data in (b"", b"[]", b'{"key": 1}', b'{"key": "k", "unknown": 1}', b"\xff\xfe"):
        with pytest.raises(ValueError, match="\\w"):
            sample_from_json(data)


@pytest.mark.fault("S4")
@pytest.mark.parametrize("key", ["", "a/b", "../a", "a.b", "a b", "ä", "a" * 101, "a\n"])
def test_keys_that_are_not_file_names_are_refused(key: str) -> None:
    with raises(ShardError, "malformed", "key"):
        check_key(key)


@pytest.mark.fault("S4")
def test_tars_contain_plain_files_with_fixed_headers(tmp_path: Path, deid: Deidentifier) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    with tarfile.open(tmp_path / "out/train/lab-train-000000.tar") as archive:
        for member in archive:
            assert (member.mtime, member.uid, member.uname, member.isreg()) == (0, 0, "", True)


@pytest.mark.fault("F11")
@pytest.mark.parametrize(
    ("damage", "code", "names"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "not_found", "manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "malformed", "manifest.json"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"schema_version": 99}'),
            "version",
            "got 99",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text('{"schema_version": 2}'),
            "malformed",
            "manifest.json",
        ),
        (lambda folder: (folder / "lab-train-000001.tar").unlink(), "not_found", "000001.tar"),
        (lambda folder: (folder / "lab-train-000001.index").unlink(), "not_found", "000001.index"),
        (lambda folder: os.truncate(folder / "lab-train-000001.tar", 1000), "mismatch", "got 1000"),
        (
            lambda folder: (folder / "lab-train-000001.index").write_text(
                "# medvl index 1\na\tb\n"
            ),
            "malformed",
            "000001.index",
        ),
        (
            lambda folder: (folder / "lab-train-000001.index").write_bytes(b"\xff\xfe\x00"),
            "malformed",
            "000001.index",
        ),
        (
            lambda folder: (folder / "lab-train-000001.index").write_bytes(
                (folder / "lab-train-000002.index").read_bytes()
            ),
            "mismatch",
            "000001.index",
        ),
    ],
)
def test_opening_a_damaged_folder_raises(
    tmp_path: Path, deid: Deidentifier, damage: Callable[[Path], object], code: str, names: str
) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    damage(tmp_path / "out/train")
    with raises(ShardError, code, names=names):
        ShardSource(tmp_path / "out/train")


def test_index_file_round_trip(tmp_path: Path) -> None:
    places = np.array([[512, 10], [2048, 20]])
    index = Index(("a", "b"), ("jpg", "png"), places, places + 1)
    (tmp_path / "x.index").write_text(index.to_text())
    read = Index.read(tmp_path / "x.index")
    assert (read.keys, read.suffixes) == (index.keys, index.suffixes)
    np.testing.assert_array_equal(read.image, index.image)
    np.testing.assert_array_equal(read.meta, index.meta)
