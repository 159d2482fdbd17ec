"""Hostile files (tars, images, weights, DICOM directories, tables), and privacy of logs and
error messages.
"""

import dataclasses
import io
import itertools
import json
import logging
import struct
import subprocess
import sys
import tarfile
import tomllib
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pydicom
import pytest
import torch
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import textured
from helpers.shard_plans import OPTIONS, make_plan, reseal
from pydicom.uid import UID

from medvl.cli import main as cli
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.dicom.reader import read_dicom
from medvl.data.privacy import Deidentifier, has_burned_in_text
from medvl.data.shards import format
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.encoders.pretrained import read_tensors
from medvl.errors import BudgetError, CheckpointError, DicomError, ShardError, WeightsError
from medvl.schema import Sample
from medvl.train.fault_tolerance import checkpoint

ROOT = Path(__file__).parent.parent


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


HOSTILE = {
    "parent folder": header("../../evil.json", 2) + padded(b"{}"),
    "absolute": header("/etc/evil.json", 2) + padded(b"{}"),
    "symlink": header("a.json", kind=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hardlink": header("a.json", kind=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "device": header("a.json", kind=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "fifo": header("a.json", kind=tarfile.FIFOTYPE),
    "folder": header("a", kind=tarfile.DIRTYPE),
    "sparse": header("a.json", 512, kind=tarfile.GNUTYPE_SPARSE) + bytes(512),
    "large": header("a.json", 50 << 30),
    "negative": header("a.json", 0)[:124] + b"\xff" * 12 + header("a.json", 0)[136:],
    "pax": header("x", 1 << 30, kind=tarfile.XHDTYPE) + padded(b"30 path=" + b"a" * 100_000),
    "long name": header("x", 1 << 30, kind=tarfile.GNUTYPE_LONGNAME) + b"a" * 4096,
    "not ascii": header("ä.json", 2) + padded(b"{}"),
    "two dots": header("a.b.json", 2) + padded(b"{}"),
    "executable": header("a.exe", 2) + padded(b"MZ"),
}


def repaired(block: bytes) -> bytes:
    """Return the header with a valid checksum, so that it is not refused for that alone."""
    plain = bytearray(block)
    plain[148:156] = b" " * 8
    plain[148:156] = b"%06o\0 " % sum(plain[:512])
    return bytes(plain)


@pytest.mark.fault("S4")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tar_members_are_refused_before_reading(kind: str) -> None:
    data = repaired(HOSTILE[kind][:512]) + HOSTILE[kind][512:] + bytes(1024)
    stream = io.BytesIO(header("fine.json", 2) + padded(b"{}") + data)
    members = format.read_members(stream, "a.tar")
    assert next(members).name == "fine.json"
    with pytest.raises(ShardError) as caught:
        list(members)
    assert caught.value.code in ("malformed", "unsupported")
    assert str(caught.value).startswith("a.tar: ")
    assert stream.tell() <= 4 * 512, "its content was read"


class Endless(io.RawIOBase):
    """An endless tar of tiny members, as a server may send it."""

    def __init__(self) -> None:
        self.blocks, self.number = io.BytesIO(), 0

    def read(self, size: int = -1, /) -> bytes:
        data = self.blocks.read(size)
        while len(data) < size:
            self.number += 1
            self.blocks = io.BytesIO(header(f"k{self.number}.json", 2) + padded(b"{}"))
            data += self.blocks.read(size - len(data))
        return data


@pytest.mark.fault("S4")
def test_endless_tar_uses_constant_memory() -> None:
    tracemalloc.start()
    for _ in itertools.islice(format.read_samples(Endless(), "endless"), 5_000):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.fault("S4")
@pytest.mark.parametrize("kind", ["parent folder", "symlink", "sparse", "pax", "large"])
def test_verify_reports_a_hostile_tar_with_matching_hashes_and_writes_nothing(
    kind: str, tmp_path: Path, deid: Deidentifier
) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    folder = tmp_path / "out/train"
    tar = folder / "lab-train-000000.tar"
    evil = repaired(HOSTILE[kind][:512]) + HOSTILE[kind][512:]
    tar.write_bytes(tar.read_bytes()[:-1024] + evil + bytes(1024))
    content = json.loads((folder / "manifest.json").read_text())
    content["shards"][0]["bytes"] = tar.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(content))
    reseal(folder, 0)
    before = sorted(tmp_path.rglob("*"))
    (problem,) = verify_folder(folder, decode=True).problems
    assert "medvl did not write it" in problem
    source = ShardSource(folder)  # reads by its index only, so it never touches the other members
    assert [source.sample(position).key for position in range(5)] == [f"key00{n}" for n in range(5)]
    assert sorted(tmp_path.rglob("*")) == before


def safetensors_file(entries: dict, data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WEIGHTS: dict[str, bytes] = {
    "header beyond the file": safetensors_file({"a": F32}, bytes(8), 1 << 40),
    "header of 2^63": safetensors_file({"a": F32}, bytes(8), (1 << 63) + 1),
    "overlap": safetensors_file({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "hole": safetensors_file({"a": F32, "b": {**F32, "data_offsets": [16, 24]}}, bytes(24)),
    "beyond the end": safetensors_file(
        {"a": {**F32, "data_offsets": [0, 1 << 40], "shape": [1 << 38]}}, bytes(8)
    ),
    "shape overflows": safetensors_file({"a": {**F32, "shape": [1 << 62, 1 << 62]}}, bytes(8)),
    "negative": safetensors_file({"a": {**F32, "shape": [-2]}}, bytes(8)),
    "backwards": safetensors_file({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)),
    "not json": struct.pack("<Q", 8) + b"{nonsens" + bytes(8),
    "deep json": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "unknown dtype": safetensors_file({"a": {**F32, "dtype": "OBJECT"}}, bytes(8)),
}


@pytest.mark.fault("S3")
@pytest.mark.parametrize("kind", WEIGHTS)
def test_hostile_safetensors_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WEIGHTS[kind])
    with raises(WeightsError, "malformed"):
        read_tensors(path)
    (tmp_path / "train_state").mkdir()
    (tmp_path / checkpoint.STATE).write_text('{"format": 2}')
    path.rename(tmp_path / checkpoint.OPTIMIZER)
    with raises(CheckpointError, "malformed"):
        checkpoint.read(tmp_path).optimizer()


@pytest.mark.fault("S2")
def test_torch_is_newer_than_cve_2026_24747() -> None:
    """`weights_only=True` of torch before 2.10 could run code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [text for text in project["dependencies"] if text.startswith("torch>=")]
    assert tuple(map(int, wanted.removeprefix("torch>=").split("."))) >= (2, 10)
    assert tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 10)


def png(chunks: list[tuple[bytes, bytes]], width: int = 8, height: int = 8) -> bytes:
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        *chunks,
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts
    )
    return b"\x89PNG\r\n\x1a\n" + body


PIXELS = (b"IDAT", zlib.compress(bytes(8 * 9)))
BOMB = zlib.compress(bytes(200 << 20), 9)
IMAGES: dict[str, Callable[[], bytes]] = {
    "png declares a huge size": lambda: png([PIXELS], 60_000, 60_000),
    "png with too much data": lambda: png([(b"IDAT", BOMB)]),
    "png text": lambda: png([(b"zTXt", b"Comment\0\0" + BOMB), PIXELS]),
    "png profile": lambda: png([(b"iCCP", b"icc\0\0" + BOMB), PIXELS]),
    "png international text": lambda: png([(b"iTXt", b"Comment\0\1\0\0\0" + BOMB), PIXELS]),
    "jpeg declares a huge size": lambda: (
        b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\x01\x01\x11\0\xff\xd9"
    ),
    "jpeg of many scans": lambda: (
        b"\xff\xd8" + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" * 100_000 + b"\xff\xd9"
    ),
}

DECODE = """
import re, sys, time
from pathlib import Path
from medvl.data.images.codecs import decode_image
from medvl.errors import ImageError
for path in sys.argv[1:]:
    started = time.process_time()
    try:
        decode_image(Path(path).read_bytes())
        reason = "decoded"
    except ImageError as error:
        reason = error.code
    peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
    print(Path(path).stem.replace(" ", "_"), reason, round(time.process_time() - started, 2), peak)
"""


@pytest.mark.fault("S6")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_image_bombs_use_little_memory_and_time(tmp_path: Path) -> None:
    paths = []
    for name, make in IMAGES.items():
        paths.append(tmp_path / f"{name}.img")
        paths[-1].write_bytes(make())
        assert paths[-1].stat().st_size < 2 << 20
    run = subprocess.run(
        [sys.executable, "-c", DECODE, *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [line.split() for line in run.stdout.splitlines()]
    assert len(rows) == len(IMAGES)
    for name, reason, seconds, peak in rows:
        assert float(seconds) < 2, name
        assert int(peak) < 512, name
        assert reason != "decoded" or name.startswith("png"), (
            name
        )  # comments may be skipped, the pixels are valid


MEMORY_LIMITED = """
import sys
from pathlib import Path
import numpy as np
from helpers.shard_plans import OPTIONS, make_plan
from medvl.data.convert import record
from medvl.data.privacy import Deidentifier
from medvl.common.process import limit_memory
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards

def greedy(path, **options):
    if path.stem == "3":
        np.ones(1 << 30, np.uint8)
    return decode(path, **options)

out = Path(sys.argv[1])
plan = make_plan(out / "images")
decode, record.read_pixels = record.read_pixels, greedy
limit_memory(512 << 20)
(manifest,) = write_shards(plan, Deidentifier(bytes(32)), ShardRun(out=out / "out", workers=1, max_skipped=2), OPTIONS).values()
print(manifest.samples, manifest.skipped_keys)
"""


@pytest.mark.fault("S5")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit works on Linux only")
def test_image_over_the_memory_limit_is_skipped(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split("\n")[0] == "11 (('key003', 'too_large'),)"


@pytest.mark.fault("S7")
def test_dicomdir_is_refused_and_its_references_are_not_followed(tmp_path: Path) -> None:
    """The records of a hostile DICOMDIR may name any file (CVE-2026-32711)."""
    secret = tmp_path / "secret.dcm"
    write_dataset(secret, image_dataset(np.zeros((4, 4), np.uint16)))
    data = image_dataset(np.zeros((4, 4), np.uint16))
    del data.PixelData
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.1.3.10")
    record = pydicom.Dataset()
    record.DirectoryRecordType = "IMAGE"
    record.ReferencedFileID = ["..", "secret.dcm"]
    data.DirectoryRecordSequence = [record]
    (tmp_path / "disc").mkdir()
    path = write_dataset(tmp_path / "disc" / "DICOMDIR", data)
    with raises(DicomError, "no_pixels"):
        read_dicom(path)
    sources = [file.read_text() for file in (ROOT / "medvl").rglob("*.py")]
    assert not [text for text in sources if "pydicom.fileset" in text or "FileSet(" in text]


CANARIES = ("ZEBRAFISH", "MRN7718234", "19610417", "1.2.826.0.1.3680043.77")


def identified(path: Path, *, broken: str) -> None:
    data = image_dataset(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) % 4096)
    data.PatientName, data.PatientID = f"{CANARIES[0]}^ANNA", CANARIES[1]
    data.StudyDate = data.PatientBirthDate = CANARIES[2]
    data.StudyInstanceUID = CANARIES[3]
    data.add_new(0x00091001, "LO", CANARIES[0])
    if broken == "header":
        data.PhotometricInterpretation = CANARIES[0]
    content = write_dataset(path, data).read_bytes()
    if broken == "end":
        path.write_bytes(content[:-500])


REPORT = f"""PATIENT NAME: {CANARIES[0]}^ANNA
MRN: {CANARIES[1]}
DOB: {CANARIES[2]}
FINDINGS: Clear lungs.
SIGNED BY: Dr {CANARIES[0]}
"""


@pytest.mark.fault("S9")
def test_patient_data_of_readable_and_broken_files_is_never_stored_or_printed(
    tmp_path: Path,
    deid: Deidentifier,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Valid and broken DICOM files and reports: not in shards, manifests, private notes, logs,
    errors or output.
    """
    caplog.set_level(logging.DEBUG)
    records = []
    for number, broken in enumerate(["", "header", "end", "report"]):
        image, report = tmp_path / f"{number}.dcm", tmp_path / f"{number}.txt"
        identified(image, broken=broken)
        report.write_bytes(REPORT.encode() + (b"\0" if broken == "report" else b""))
        ids = {"patient": deid.patient(number), "study": deid.study(number, 1)}
        records.append(
            Record(
                Sample(key=deid.image(number), corpus="lab", split="train", image=image, **ids),
                report,
            )
        )
    plan = Plan("lab", records, (), RowCounts())
    with raises(BudgetError, "budget", "max_skipped") as raised:
        write_shards(plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=1), OPTIONS)
    (manifest,) = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1, max_skipped=3), OPTIONS
    ).values()
    assert manifest.skipped == {"malformed": 1, "report_unreadable": 1, "truncated": 1}
    assert manifest.warnings["sections_naming_a_person"] >= 4
    assert ShardSource(tmp_path / "out" / "train").sample(0).sections == {
        "findings": "Clear lungs."
    }
    printed = capsys.readouterr()
    texts = [str(raised.value), caplog.text, printed.out, printed.err]
    for folder in (tmp_path / "out", tmp_path / "out-private"):
        texts += [
            path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file()
        ]
    assert len(texts) > 8
    assert not [text[:200] for text in texts for canary in CANARIES if canary in text]
    assert all(
        canary.encode() in b"".join(map(Path.read_bytes, tmp_path.glob("*.*")))
        for canary in CANARIES
    )


@pytest.mark.fault("S10")
@pytest.mark.parametrize("place", [(20, 60), (300, 990)], ids=["top", "bottom"])
@pytest.mark.parametrize("size", [0.6, 0.9, 1.4])
def test_burned_in_text_is_flagged(place: tuple[int, int], size: float) -> None:
    image = cv2.GaussianBlur(textured(1, 1024, 1024), (0, 0), 3) // 2
    assert not has_burned_in_text(image)
    cv2.putText(
        image, "ZEBRAFISH ANNA 17.04.61", place, cv2.FONT_HERSHEY_SIMPLEX, size, 255, 2, cv2.LINE_AA
    )
    assert has_burned_in_text(image)


@pytest.mark.fault("S10")
@pytest.mark.parametrize("mark", ["L", "R", "PA", "AP SUPINE", "PORTABLE"])
def test_side_and_view_markers_are_not_flagged_as_text(mark: str) -> None:
    image = cv2.GaussianBlur(textured(1, 1024, 1024), (0, 0), 3) // 2
    cv2.putText(image, mark, (60, 90), cv2.FONT_HERSHEY_SIMPLEX, 1.5, 255, 3, cv2.LINE_AA)
    assert not has_burned_in_text(image)


@pytest.mark.fault("S10")
def test_manifest_counts_burned_in_text_and_annotations(tmp_path: Path, deid: Deidentifier) -> None:
    plan = make_plan(tmp_path / "images", 4)
    for number in range(4):
        pixels = (textured(number, 512, 512) // 2).astype(np.uint8)
        if number < 2:
            cv2.putText(pixels, "ZEBRAFISH 170461", (10, 40), cv2.FONT_HERSHEY_SIMPLEX, 0.8, 255, 2)
        fields = {"BurnedInAnnotation": "YES"} if number == 3 else {}
        path = write_dataset(tmp_path / f"{number}.dcm", image_dataset(pixels, **fields))
        plan.records[number] = Record(dataclasses.replace(plan.records[number].sample, image=path))
    (manifest,) = write_shards(
        plan, deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    ).values()
    assert manifest.warnings["possible_burned_in_text"] == 2
    assert manifest.warnings["says_burned_in"] == 1


@pytest.mark.fault("S13")
@pytest.mark.parametrize(
    "name", ["with space", "Röntgen-été-胸片", 'quote\'s "x" $(id) `id` ;|&', "-dash", "a/../b"]
)
def test_folder_names_with_special_characters_work(
    name: str, tmp_path: Path, deid: Deidentifier, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / name
    if ".." in home.parts:
        (tmp_path / "a").mkdir()
    home.mkdir(parents=True)
    write_shards(
        make_plan(home / "images", 6), deid, ShardRun(out=home / "out", workers=1), OPTIONS
    )
    cli.main(["verify", str(home / "out"), "--decode"])
    cli.main(
        [
            "vocab",
            "--data",
            str(home / "out" / "train"),
            "--out",
            str(home / "vocab"),
            "--size",
            "60",
            "--min-frequency",
            "1",
        ]
    )
    printed = capsys.readouterr().out
    assert "6 samples of 3 patients" in printed
    assert (home / "vocab" / "tokenizer.json").is_file()
    assert not [
        path for path in Path.cwd().iterdir() if path.name.startswith(("with", "Rönt", "quote"))
    ]


@pytest.mark.fault("S12")
def test_no_socket_is_opened_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from medvl.common import hub
    from medvl.encoders import create_image_encoder

    def refuse(*arguments: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with raises(WeightsError, "not_found", names="HF_HUB_OFFLINE"):
        hub.fetch("owner/name", "model.safetensors", "0" * 40)
    with raises(WeightsError, "not_found", names="HF_HUB_OFFLINE"):
        create_image_encoder("resnet18", pretrained=True)
    create_image_encoder("resnet_tiny")


@pytest.mark.fault("S14")
def test_templates_keep_autoescape_and_content_security_policy() -> None:
    templates = list((ROOT / "medvl").rglob("*.html"))
    assert templates
    for path in templates:
        text = path.read_text()
        assert "autoescape false" not in text
        served = path.is_relative_to(
            ROOT / "medvl/serve"
        )  # its policy is a header of every answer, tested there
        assert served or "Content-Security-Policy" in text
    calls = [
        path for path in (ROOT / "medvl").rglob("*.py") if "jinja2.Environment(" in path.read_text()
    ]
    assert len(calls) == 1, "expected one Jinja environment, with autoescape on"
