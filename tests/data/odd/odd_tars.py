"""Tars as people pack them: by hand, on a Mac, from DICOM exports, with captions of any kind."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.mimic_files import textured

from medvl.data.images.codecs import encode_jpeg, encode_png

JPEG, PNG = encode_jpeg(textured(1, 40, 50), 95), encode_png(textured(2, 40, 50))
TEXT = b"No acute disease."
Members = Sequence[tuple[str, bytes]]


def pairs(*names: str, image: str = "jpg", text: str = "txt") -> Members:
    """Members of samples: image and text of each name."""
    return [
        member for name in names for member in ((f"{name}.{image}", JPEG), (f"{name}.{text}", TEXT))
    ]


def write(path: Path, members: Members, kind: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar with these members in this order."""
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            if name.endswith("/"):
                header.type = tarfile.DIRTYPE
            tar.addfile(header, io.BytesIO(data))
    return path


def uid(number: int) -> str:
    """Name of a DICOM export."""
    return f"1.2.840.113619.2.55.{number}"


READ: Mapping[str, tuple[Members, tuple[str, ...], int, str]] = {
    "plain": (pairs("a", "b"), (), 2, "read 2 samples: kept 2, left out 0"),
    "upper case": (pairs("a", "b", image="JPG", text="TXT"), (), 2, "kept 2, left out 0"),
    "jpeg and PNG": ([("a.JPEG", JPEG), ("a.txt", TEXT), ("b.Png", PNG), ("b.txt", TEXT)], (), 2,
    "kept 2, left out 0"), "folders": ([("./", b""), *pairs("./a"), ("./d/", b""), *pairs("./d/a")],
    (), 2, "kept 2, left out 0"), "folders with dots": (pairs("1.2.840/a", "1.2.841/a"), (), 2,
    "kept 2, left out 0"), "long names": (pairs("x" * 180 + "/a", "x" * 180 + "/b"), (), 2,
    "kept 2, left out 0"), "names beyond ASCII": (pairs("Röntgen/Müller", "胸部/一"), (), 2,
    "kept 2, left out 0"), "keys with dots": (pairs(uid(1), uid(2), "7"), ("--key-end", "last-dot"),
    3, "read 3 samples: kept 3, left out 0"), "a mask beside the image": (
        [("a.jpg", JPEG), ("a.seg.png", PNG), ("a.txt", TEXT)], (), 1,
        "read 1 samples: kept 1, left out 0",
    ),
    "a nested suffix by name": (
        [("a.img.png", PNG), ("a.txt", TEXT)], ("--image", "img.png"), 1, "kept 1, left out 0",
    ),
    "captions in JSON": ([("a.jpg", JPEG), ("a.json", json.dumps({"caption": "A text."}).encode())],
    (), 1, "kept 1"), "captions by class": ([("a.jpg", JPEG), ("a.cls", b"3")], ("--text", "cls"),
    1, "kept 1, left out 0"), "captions by another suffix": (pairs("a", text="caption"), ("--text",
    "caption"), 1, "kept 1, left out 0"), "byte-order marks": (
        [("a.jpg", JPEG), ("a.txt", b"\xef\xbb\xbfA text."), ("b.jpg", JPEG), ("b.txt",
        "A text.".encode("utf-16"))], (), 2, "kept 2, left out 0",
    ),
    "of a Mac": (
        [("._a.jpg", b"Mac OS X"), ("a.jpg", JPEG), ("._a.txt", b"Mac OS X"), ("a.txt", TEXT),
         ("__MACOSX/._a.jpg", b"Mac OS X"), (".DS_Store", b"Bud1")], (), 1,
         "read 1 samples: kept 1, left out 0",
    ),
    "texts without images": ([*pairs("a"), ("b.txt", TEXT), ("c.txt", TEXT)], (), 1,
    "read 3 samples: kept 1, left out 2 (2 no_image)"), "images without texts": ([*pairs("a"),
    ("b.jpg", JPEG)], (), 1, "1 no_text"), "other files": ([*pairs("a"), ("b.dcm", b"x"), ("README",
    b"x")], (), 1, "read 2 samples: kept 1, left out 1 (1 no_image_or_text)"),
    "captions in another encoding": (
        [*pairs("a"), ("b.jpg", JPEG), ("b.txt", "Größe".encode("cp1252"))], ("--max-skipped", "1"),
        1, "read 2 samples: kept 1, left out 1 (1 text_unreadable)",
    ),
    "empty members": (
        [*pairs("a"), ("b.jpg", b""), ("b.txt", TEXT), ("c.jpg", JPEG), ("c.txt", b"")],
        ("--max-skipped", "1"), 1, "1 no_text",
    ),
}  # fmt: skip
"""Name -> members, options, samples in the shards, and a part of what the command prints."""

REFUSED: Mapping[str, tuple[Members, tuple[str, ...], str]] = {
    "keys with dots": (pairs(uid(1), uid(2)), (), "last-dot"),
    "keys with dots, one without": (pairs("1", "1.2.3"), (), "last-dot"),
    "keys with dots and captions in JSON": ([("s.1.jpg", JPEG), ("s.1.json", b"{}")], (),
    "last-dot"), "images alone, keys with dots": ([("1.jpg", JPEG), ("1.2.3.jpg", JPEG)],
    ("--keep-textless",), "last-dot"), "captions in several languages": ([("a.jpg", JPEG),
    ("a.en.txt", TEXT), ("a.de.txt", TEXT)], (), "a.de.txt"), "images first": ([("a.jpg", JPEG),
    ("b.jpg", JPEG), ("a.txt", TEXT), ("b.txt", TEXT)], (), "--sort=name"),
    "one name twice": ([*pairs("a"), *pairs("b"), *pairs("a")], (), "'a'"),
    "one name twice in a row": ([*pairs("a"), *pairs("a")], (), "two members a.jpg"),
    "captions in another encoding": ([("a.jpg", JPEG), ("a.txt", b"caf\xe9")], ("--max-skipped",
    "0"), "no sample"), "one caption in another encoding": ([*pairs("a", "b"), ("c.jpg", JPEG),
    ("c.txt", b"\xe9")], (), "text_unreadable"), "other suffixes": (pairs("a", image="tiff",
    text="caption"), (), "1 tiff, 1 caption"), "texts alone": ([("a.txt", TEXT), ("b.txt", TEXT)],
    (), "2 no_image"), "nothing": ([], (), "none read"),
}  # fmt: skip
"""Name -> members, options, and a part of the message."""


def links(path: Path) -> Path:
    """Write a tar with a hard link, as tar packs a file with two names."""
    with tarfile.open(write(path, pairs("a")), "a") as tar:
        header = tarfile.TarInfo("b.jpg")
        header.type, header.linkname = tarfile.LNKTYPE, "a.jpg"
        tar.addfile(header)
    return path
