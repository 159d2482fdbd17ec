"""Hostile and damaged DICOM files raise DicomError within limits of memory and time."""

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pydicom
import pytest
from helpers.dicom_builder import element, fragments, image_dataset, layout, raw_file
from PIL import Image
from pydicom.encaps import generate_frames
from pydicom.uid import JPEG2000Lossless, JPEGLSLossless, RLELossless

from medvl.data.dicom.reader import read_dicom
from medvl.errors import DicomError

EXPLICIT, DEFLATED, DEFLATED_FRAMES = (
    b"1.2.840.10008.1.2.1",
    b"1.2.840.10008.1.2.1.99",
    b"1.2.840.10008.1.2.8.1",
)
JPEG, JPEG_LS, J2K, RLE = (b"1.2.840.10008.1.2." + end for end in (b"4.50", b"4.80", b"4.90", b"5"))
UNDEFINED = 0xFFFFFFFF


def deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(1, wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def pixels(data: bytes, length: int | None = None) -> bytes:
    return element(0x7FE00010, b"OW", data, length)


def compressed(kind: str) -> bytes:
    """Return a compressed frame of a small image."""
    data = image_dataset(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64))
    data.compress({"j2k": JPEG2000Lossless, "jls": JPEGLSLossless, "rle": RLELossless}[kind])
    return next(generate_frames(data.PixelData, number_of_frames=1))


def jpeg_of_scans(count: int) -> bytes:
    """Return a baseline JPEG in which every scan has one of the three components, and no data."""
    file = io.BytesIO()
    Image.new("RGB", (1024, 1024), "grey").save(file, "JPEG", subsampling=0)
    start = file.getvalue().rindex(b"\xff\xda")
    scans = [
        struct.pack(">HHBBBBBB", 0xFFDA, 8, 1, number % 3 + 1, 0, 0, 63, 0)
        for number in range(count)
    ]
    return file.getvalue()[:start] + b"".join(scans) + b"\xff\xd9"


def patched(frame: bytes, marker: bytes, offset: int, value: bytes) -> bytes:
    start = frame.index(marker) + offset
    return frame[:start] + value + frame[start + len(value) :]


def nested(depth: int, *, defined: bool) -> bytes:
    """Return nested sequences in the element of the shared functional groups."""
    if defined:
        body = b""
        for _ in range(depth):
            item = struct.pack("<HHL", 0xFFFE, 0xE000, len(body)) + body
            body = element(0x52009229, b"SQ", item)
        return body
    opening = element(0x52009229, b"SQ", b"", UNDEFINED) + struct.pack(
        "<HHL", 0xFFFE, 0xE000, UNDEFINED
    )
    return opening * depth


def palette(entries: int, segments: bytes) -> bytes:
    """Return a palette image of one pixel with three segmented palettes."""
    image = (
        layout(1, 1, bits=8)
        .replace(b"MONOCHROME2\0", b"PALETTE COLOR ")
        .replace(b"CS\x0c\0", b"CS\x0e\0")
    )
    descriptors = b"".join(
        element(tag, b"US", struct.pack("<3H", entries % 65536, 0, 16))
        for tag in (0x00281101, 0x00281102, 0x00281103)
    )
    data = b"".join(element(tag, b"OW", segments) for tag in (0x00281221, 0x00281222, 0x00281223))
    return image + descriptors + data + pixels(b"\0")


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "deflated": (lambda: raw_file(DEFLATED, deflate(pixels(bytes(160 << 20)))), "too_large"),
    "deflated_to_the_limit": (
        lambda: raw_file(DEFLATED, deflate(layout(5000, 5000) + pixels(bytes(60 << 20)))),
        "",
    ),
    "deflated_frame": (lambda: raw_file(DEFLATED_FRAMES, layout(64,
    64) + fragments(deflate(bytes(40 << 20)))), ""), "huge_image": (lambda: raw_file(EXPLICIT,
    layout(65535, 65535) + pixels(b"", 0xFFFFFFF0)), "too_large"),
    "huge_color": (lambda: raw_file(EXPLICIT, layout(5000, 5000, samples=3) + pixels(b"",
    150_000_000)), "too_large"), "many_frames": (lambda: raw_file(EXPLICIT, layout(64, 64,
    frames=100_000) + pixels(b"", 1 << 30)), "too_large"),
    "deep_undefined": (lambda: raw_file(EXPLICIT, nested(100_000, defined=False)), "malformed"),
    "deep_defined": (lambda: raw_file(EXPLICIT, nested(2000, defined=True) + layout(1,
    1) + pixels(b"\0\0")), ""), "many_elements": (
        lambda: raw_file(EXPLICIT, b"".join(element(0x00090000 + i, b"LO",
        b"") for i in range(1 << 15)) * 8), "too_large",
    ),
    "many_items": (
        lambda: raw_file(
            EXPLICIT, element(0x52009229, b"SQ", b"", UNDEFINED) + struct.pack("<HHL", 0xFFFE,
            0xE000, 0) * 300_000
        ),
        "too_large",
    ),
    "long_value": (lambda: raw_file(EXPLICIT, layout(1, 1) + element(0x00283006, b"OW", b"",
    1 << 31)), "truncated"), "long_table": (
        lambda: raw_file(
            EXPLICIT, layout(1, 1) + element(0x00283000, b"SQ",
            b"\xfe\xff\0\xe0" + struct.pack("<L", 0x04000000) + element(0x00283002, b"US",
            b"\0\0\0\0\x10\0") + element(0x00283006, b"OW",
            bytes(0x04000000 - 26))) + pixels(b"\0\0")
        ),
        "too_large",
    ),
    "j2k_claims_more": (
        lambda: raw_file(J2K, layout(64, 64) + fragments(
            patched(compressed("j2k"), b"\xff\x51", 6, struct.pack(">LL", 60000, 60000)))),
        "malformed",
    ),
    "j2k_tiles": (
        lambda: raw_file(J2K, layout(4096, 4096) + fragments(
            patched(patched(compressed("j2k"), b"\xff\x51", 6, struct.pack(">LL", 4096, 4096)),
                    b"\xff\x51", 22, struct.pack(">LL", 17, 17)))),
        "too_large",
    ),
    "j2k_blocks": (
        lambda: raw_file(J2K, layout(4096, 4096) + fragments(
            patched(patched(compressed("j2k"), b"\xff\x51", 6, struct.pack(">LLLLLL", 4096, 4096, 0,
            0, 4096, 4096)),
                    b"\xff\x52", 10, b"\0\0"))),
        "too_large",
    ),
    "jls_claims_more": (
        lambda: raw_file(JPEG_LS, layout(64, 64) + fragments(
            patched(compressed("jls"), b"\xff\xf7", 5, struct.pack(">HH", 65535, 65535)))),
        "malformed",
    ),
    "jpeg_scans": (lambda: raw_file(JPEG, layout(1024, 1024, bits=8,
    samples=3) + fragments(jpeg_of_scans(600))), "too_large"), "rle_segments": (
        lambda: raw_file(RLE, layout(64, 64) + fragments(
            struct.pack("<16L", 2, 64, 66, *(0,) * 13) + b"\x81\xff" * (8 << 20))),
        "undecodable",
    ),
    "many_fragments": (lambda: raw_file(J2K, layout(64, 64) + fragments(*(b"\0\0",) * 200_000)),
    "too_large"), "offset_table": (
        lambda: raw_file(J2K, layout(64, 64, frames=2) + element(0x7FE00010, b"OB", b"", UNDEFINED)
                         + struct.pack("<HHL", 0xFFFE, 0xE000, 60 << 20) + bytes(60 << 20)),
        "too_large",
    ),
    "encoded": (lambda: raw_file(J2K, layout(64, 64) + fragments(bytes(50 << 20))), "too_large"),
    "encoded_in_parts": (lambda: raw_file(J2K, layout(64, 64) + fragments(*(bytes(20 << 20),) * 5)),
    "too_large"), "palette_lines": (lambda: raw_file(EXPLICIT, palette(65536, struct.pack("<HHH", 1,
    65535, 9) * 10000)), "malformed"), "palette_repeats": (
        lambda: raw_file(EXPLICIT, palette(65536, struct.pack("<HHHHHHH", 1, 9, 9, 2, 65535, 0, 0)
                                           + struct.pack("<4H", 2, 65535, 0, 0) * 8000)),
        "malformed",
    ),
    "noise": (
        lambda: raw_file(EXPLICIT, layout(5792,
        5792) + pixels(np.random.default_rng(0).bytes(5792 * 5792 * 2))), "",
    ),
}  # fmt: skip

SCRIPT = """
import json, re, sys, time
from pathlib import Path
from medvl.data.dicom.reader import read_dicom
from medvl.errors import DicomError
for path in sys.argv[1:]:
    start = time.perf_counter()
    try:
        read_dicom(path, frame=0)
        reason = ""
    except DicomError as error:
        reason = error.code
    peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024
    print(json.dumps([Path(path).stem, reason, round(time.perf_counter() - start, 2), peak]))
"""


@pytest.mark.fault("S5")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_no_file_takes_over_512_mb(tmp_path):
    paths = []
    for name, (make, _) in BOMBS.items():
        paths.append(tmp_path / f"{name}.dcm")
        paths[-1].write_bytes(make())
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths], capture_output=True, text=True, timeout=120
    )
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stderr[-2000:]
    assert {name: reason for name, reason, _, _ in results} == {
        name: reason for name, (_, reason) in BOMBS.items()
    }
    assert max(peak for _, _, _, peak in results) < 512


MUTATED = {
    "CT_small": 300,  # explicit, signed
    "MR_small_implicit": 200,
    "MR_small_RLE": 200,
    "MR_small_jp2klossless": 200,
    "MR_small_jpeg_ls_lossless": 200,
    "SC_rgb_jpeg_gdcm": 200,  # JPEG lossless
    "SC_rgb_small_odd_jpeg": 200,
    "image_dfl": 200,
    "liver_1frame": 200,  # sequences, single bits
    "ExplVR_BigEnd": 100,
}
EDGES = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff", b"\x01\0\0\0", b"SQ")


@pytest.mark.fault("S15")
@pytest.mark.parametrize("name", MUTATED)
def test_mutated_files_raise_only_dicom_errors(tmp_path, name):
    content = (Path(pydicom.__file__).parent / "data" / "test_files" / f"{name}.dcm").read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "a.dcm"
    reasons = set()
    for _ in range(MUTATED[name]):
        data = bytearray(content)
        for _ in range(random.integers(1, 5)):
            start = int(
                random.integers(min(len(data), 3000) if random.random() < 0.6 else len(data))
            )
            kind = random.integers(3)
            if kind == 0:
                data[start] ^= 1 << int(random.integers(8))
            elif kind == 1:
                data[start : start + int(random.integers(0, 9))] = random.bytes(
                    int(random.integers(0, 9))
                )
            else:
                data[start : start + 4] = EDGES[random.integers(len(EDGES))]
        path.write_bytes(data[: random.integers(1, len(data))] if random.random() < 0.1 else data)
        try:
            image = read_dicom(path, frame=0)
        except DicomError as error:
            reasons.add(error.code)
        else:
            reasons.add("decoded")
            assert image.pixels_HW.shape == (image.header.rows, image.header.columns)
            assert image.pixels_HW.dtype == np.uint8
    assert {"decoded", "truncated"} < reasons
