"""Images shared by two folders: the perceptual hash, its tolerance and limits, and `medvl verify
--against`.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.mimic_files import textured
from helpers.shard_plans import OPTIONS

from medvl.cli import main as cli
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.images.codecs import decode_image, encode_jpeg
from medvl.data.privacy import Deidentifier
from medvl.data.shards import verify
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import (
    SAME,
    HashedImages,
    find_overlaps,
    hash_images,
    perceptual_hash,
    shared_images,
)
from medvl.phantom import World, draw
from medvl.schema import Sample


@pytest.fixture(scope="module")
def films() -> list[np.ndarray]:
    """Frontal and lateral chest radiographs of 40 patients."""
    views = [patient.studies[0].views[-1] for patient in World(6).patients(40)]
    return [(draw(view, 320) >> 4).astype(np.uint8) for view in views]


def distance(image_HW: np.ndarray, other_HW: np.ndarray) -> int:
    bits, others = perceptual_hash(image_HW), perceptual_hash(other_HW)
    assert bits is not None
    assert others is not None
    return int((bits != others).sum(axis=1).min())


def with_margin(image_HW: np.ndarray, share: float) -> np.ndarray:
    """Return the image with a black margin and writing in it."""
    high, wide = (int(share * side) for side in image_HW.shape)
    page_HW = cv2.copyMakeBorder(image_HW, high, high, wide, wide, cv2.BORDER_CONSTANT)
    return cv2.putText(page_HW, "R", (3, high - 6), cv2.FONT_HERSHEY_SIMPLEX, 0.4, 255, 1)


# The hash


def test_hash_bits_are_the_signs_of_the_lowest_frequencies(films: list[np.ndarray]) -> None:
    """Compare with the cosine transform from its definition: X[u, v] = sum over x, y of f[x, y]
    cos((2x + 1) u pi / 2N) cos((2y + 1) v pi / 2N).
    """
    n = np.arange(64)
    basis = (
        np.cos((2 * n[None] + 1) * n[:, None] * np.pi / 128)
        * np.where(n[:, None] == 0, np.sqrt(0.5), 1)
        / np.sqrt(32)
    )
    for image_HW in films[:10]:
        small_HW = cv2.resize(image_HW, (64, 64), interpolation=cv2.INTER_AREA).astype(np.float64)
        lowest = (basis @ small_HW @ basis.T)[:16, :16].ravel()[1:]
        margin = lowest - np.median(lowest)
        bits = perceptual_hash(image_HW)
        assert bits is not None
        assert bits.shape == (2, 255)
        clear = np.abs(margin) > 1e-3  # in float32 the median itself may fall on either side
        assert clear.sum() >= 253
        np.testing.assert_array_equal(bits[0][clear], (margin > 0)[clear])


COPIES = {
    "half the size, JPEG 50": lambda x: decode_image(
        encode_jpeg(cv2.resize(x, None, fx=0.5, fy=0.5), 50)
    ),
    "JPEG 30": lambda x: decode_image(encode_jpeg(x, 30)),
    "twice the size": lambda x: cv2.resize(x, None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC),
    "square": lambda x: cv2.resize(x, (224, 224), interpolation=cv2.INTER_AREA),
    "less contrast": lambda x: (0.7 * x + 20).astype(np.uint8),
    "in colour and back": lambda x: decode_image(encode_jpeg(np.stack([x, x, x], axis=2), 80)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_match(films: list[np.ndarray], name: str) -> None:
    assert max(distance(COPIES[name](image_HW), image_HW) for image_HW in films) <= SAME


def test_copies_without_margins_match(films: list[np.ndarray]) -> None:
    bodies = []
    for image_HW in films:  # a body on a black background, as in CT and MR
        mask_HW = np.zeros_like(image_HW)
        height, width = image_HW.shape
        cv2.ellipse(
            mask_HW, (width // 2, height // 2), (width // 2 - 2, height // 2 - 2), 0, 0, 360, 1, -1
        )
        bodies.append(mask_HW * np.maximum(image_HW, 40))
    matches = [distance(with_margin(body_HW, 0.2), body_HW) <= SAME for body_HW in bodies]
    assert np.mean(matches) > 0.7
    full = [
        (perceptual_hash(with_margin(body, 0.2))[0] != perceptual_hash(body)[0]).sum()
        for body in bodies
    ]
    assert min(full) > SAME  # the hash of the whole image alone matches none


def test_images_of_different_patients_do_not_match(films: list[np.ndarray]) -> None:
    bits_N2K = [perceptual_hash(image_HW) for image_HW in films]
    distances = [(a != b).sum(axis=1).min() for i, a in enumerate(bits_N2K) for b in bits_N2K[:i]]
    assert len(distances) == 780
    assert min(distances) > SAME


@pytest.mark.parametrize("change", [np.fliplr, np.rot90], ids=["flipped", "rotated"])
def test_flipped_and_rotated_copies_do_not_match(films: list[np.ndarray], change: object) -> None:
    """A documented limit."""
    assert callable(change)
    assert (
        min(distance(np.ascontiguousarray(change(image_HW)), image_HW) for image_HW in films[:10])
        > SAME
    )


def test_uniform_image_has_no_hash() -> None:
    for value in (0, 128, 255):
        assert perceptual_hash(np.full((50, 60), value, np.uint8)) is None
    assert perceptual_hash(textured(1, 1, 9)) is not None
    assert perceptual_hash(textured(1, 900, 3)) is not None


# Pairs


def hashed(bits_N2K: np.ndarray, prefix: str) -> HashedImages:
    return HashedImages(
        tuple(f"{prefix}{number}" for number in range(len(bits_N2K))), bits_N2K, Counter()
    )


def test_shared_images_equal_a_direct_count_of_differing_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "_BLOCK", 3)  # several blocks, the last one incomplete
    rng = np.random.default_rng(0)
    bits_N2K = rng.random((10, 2, 255)) < 0.5
    other_M2K = rng.random((8, 2, 255)) < 0.5
    for row, column, channel, flips in (
        (0, 7, 0, 0),
        (4, 2, 1, SAME),
        (9, 1, 0, SAME + 1),
        (9, 3, 1, 3),
    ):
        other_M2K[column, channel] = bits_N2K[row, channel]
        other_M2K[column, channel, rng.permutation(255)[:flips]] ^= True
    plain = {
        (f"a{n}", f"b{m}", int((bits_N2K[n] != other_M2K[m]).sum(axis=1).min()))
        for n in range(10)
        for m in range(8)
        if (bits_N2K[n] != other_M2K[m]).sum(axis=1).min() <= SAME
    }
    pairs = shared_images(hashed(bits_N2K, "a"), hashed(other_M2K, "b"))
    assert (
        {dataclasses.astuple(pair) for pair in pairs}
        == plain
        == {("a0", "b7", 0), ("a4", "b2", SAME), ("a9", "b3", 3)}
    )
    assert [pair.distance for pair in pairs] == [0, 3, SAME]
    assert shared_images(hashed(bits_N2K, "a"), hashed(other_M2K[:0], "b")) == []


# Folders of shards


def write_folder(
    root: Path, name: str, images: dict[str, np.ndarray], deid: Deidentifier, people: str = ""
) -> Path:
    """Shards of the images under their keys, split train; the patient of an image is `people`
    and its key.
    """
    records = []
    for key, image_HW in images.items():
        path = root / f"{name}-files" / f"{key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image_HW)
        patient = deid.patient(f"{people}{key}")
        sections = {"caption": "A chest radiograph."}
        records.append(
            Record(
                Sample(
                    key=key,
                    corpus=name,
                    split="train",
                    patient=patient,
                    study=key,
                    image=path,
                    sections=sections,
                )
            )
        )
    write_shards(
        Plan(name, records, (), RowCounts()), deid, ShardRun(out=root / name, workers=1), OPTIONS
    )
    return root / name


@pytest.fixture
def pair(tmp_path: Path, films: list[np.ndarray], deid: Deidentifier) -> tuple[Path, Path]:
    """Two corpora that share two images, one of them as a small JPEG, under other keys and other
    patients.
    """
    mine = {f"mine{number}": image_HW for number, image_HW in enumerate(films[:8])}
    yours = {f"yours{number}": image_HW for number, image_HW in enumerate(films[8:14])}
    yours |= {"copy3": films[3], "small5": COPIES["half the size, JPEG 50"](films[5])}
    yours["blank"] = np.full((40, 40), 9, np.uint8)
    return write_folder(tmp_path, "mine", mine, deid), write_folder(tmp_path, "yours", yours, deid)


def test_find_overlaps_reports_shared_images(pair: tuple[Path, Path]) -> None:
    (overlap,) = find_overlaps([pair[0] / "train"], [pair[1] / "train"])
    assert {(shared.key, shared.other) for shared in overlap.images} == {
        ("mine3", "copy3"),
        ("mine5", "small5"),
    }
    assert (overlap.name, overlap.other, overlap.patients) == ("mine/train", "yours/train", set())
    assert overlap.not_compared == {"of_one_colour": 1}


def test_unreadable_images_are_counted(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ShardSource(pair[0] / "train")
    read = source.image_bytes
    monkeypatch.setattr(
        source, "image_bytes", lambda position: read(position)[: -200 if position == 2 else None]
    )
    images = hash_images(source)
    assert images.not_hashed == {"truncated": 1}
    assert len(images.keys) == len(images.bits_N2K) == 7
    assert source.key(2) not in images.keys


def test_verify_against_prints_the_pairs_and_fails(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["verify", str(pair[0]), "--against", str(pair[1])])
    printed = capsys.readouterr()
    assert "mine/train and yours/train share 2 images, 0 patients" in printed.out
    assert "  mine3 copy3 0\n" in printed.out
    assert "  1 images not compared: of_one_colour" in printed.out
    assert printed.err.startswith(
        f"medvl: {pair[0]} and {pair[1]} share 2 pairs of images and 0 patients"
    )


def test_verify_against_passes_without_overlap(
    tmp_path: Path, films: list[np.ndarray], deid: Deidentifier, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = write_folder(tmp_path, "mine", {"a": films[0]}, deid)
    yours = write_folder(tmp_path, "yours", {"b": films[1]}, deid)
    cli.main(["verify", str(mine), "--against", str(yours)])
    assert "share 0 images, 0 patients" in capsys.readouterr().out


def test_verify_against_fails_on_shared_patients_and_prints_other_salts(
    tmp_path: Path, films: list[np.ndarray], deid: Deidentifier, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = write_folder(tmp_path, "mine", {"a": films[0]}, deid, people="article ")
    yours = write_folder(tmp_path, "yours", {"a": films[1]}, deid, people="article ")
    with pytest.raises(SystemExit, match="1"):
        cli.main(["verify", str(mine), "--against", str(yours)])
    printed = capsys.readouterr()
    assert "share 0 images, 1 patients" in printed.out
    assert "share 0 pairs of images and 1 patients" in printed.err
    others = write_folder(
        tmp_path,
        "others",
        {"a": films[1]},
        Deidentifier(b"another salt, as long"),
        people="article ",
    )
    cli.main(["verify", str(mine), "--against", str(others)])
    assert (
        "share 0 images, unknown patients (hashed with different salts)" in capsys.readouterr().out
    )


# Real data


@pytest.mark.real
def test_slices_known_to_be_in_vqa_rad_match(real_data: Path) -> None:
    """All 19 match, 2 of them cropped in one corpus; no other match is a different image on
    inspection.
    """
    rows = [
        json.loads(line) for line in (real_data / "medpix/captions.jsonl").read_text().splitlines()
    ]
    known = {row["id"] for row in rows if row["also_in_vqa_rad"]}
    files = {row["id"]: real_data / "medpix" / row["image"] for row in rows[::4]}
    files |= {row["id"]: real_data / "medpix" / row["image"] for row in rows if row["id"] in known}
    slices = hashed_files(files)
    questions = hashed_files({path.stem: path for path in (real_data / "vqa_rad/images").iterdir()})
    pairs = shared_images(slices, questions)
    matched = {pair.key for pair in pairs}
    assert len(known) == 19
    assert known <= matched
    same_by_eye = {"MPX2028_synpic34053", "MPX1792_synpic24221", "MPX2518_synpic39512"}
    assert matched - known <= same_by_eye
    radiographs = hashed_files(
        {path.name: path for path in list((real_data / "cxr/images").rglob("*.jpg"))[:300]}
    )
    assert shared_images(radiographs, questions) == []


def hashed_files(paths: dict[str, Path]) -> HashedImages:
    bits = {key: perceptual_hash(decode_image(path.read_bytes())) for key, path in paths.items()}
    hashed = {key: value for key, value in bits.items() if value is not None}
    return HashedImages(tuple(hashed), np.stack(list(hashed.values())), Counter())
