"""The folder of generated images: round trip, continuation, damage."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises
from PIL import Image

from medvl.data import GeneratedImages, GeneratedImagesWriter, Generation, pixel_hash
from medvl.errors import CorpusError, ImageError

GENERATION = Generation(
    generator="ab" * 32,
    system="latent_diffusion",
    config={"sizes": (1, 2), "target": "v"},
    train_fingerprints=("f1",),
    sampler="ddim",
    steps=5,
    guidance=3.0,
    seed=7,
    prompt_source={"kind": "command"},
    image_size=8,
    images=3,
)
MANIFESTS = [{"patients": ["p1"]}]
PROMPT = "Gro\u00dfer Erguss\u2028links"


def image(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)


def write(
    folder: Path, numbers: list[int] | None = None, generation: Generation = GENERATION
) -> list[int]:
    """Write some of the missing images; return the numbers that were missing."""
    with GeneratedImagesWriter(folder, generation, MANIFESTS) as writer:
        missing = writer.missing()
        for number in missing if numbers is None else numbers:
            writer.add(
                number, image(number), prompt=PROMPT, prompt_key="0", seed=number, cut_tokens=number
            )
    return missing


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert write(tmp_path / "out") == [0, 1, 2]
    images = GeneratedImages.open(tmp_path / "out")
    assert len(images) == 3
    assert images.generation == dataclasses.replace(
        GENERATION, config={"sizes": [1, 2], "target": "v"}
    )
    assert images.train_manifests() == MANIFESTS
    for number, row in enumerate(images.rows):
        assert (row.prompt, row.seed, row.cut_tokens, row.guidance, row.synthetic) == (
            PROMPT,
            number,
            number,
            3.0,
            True,
        )
        assert np.array_equal(images.pixels(number), image(number))
        assert row.pixel_hash == pixel_hash(image(number))
    with Image.open(tmp_path / "out" / images.rows[2].file) as file:
        assert file.text == {
            "synthetic": "true",
            "prompt": PROMPT,
            "seed": "2",
            "generator": "ab" * 32,
        }
        assert file.mode == "L"


def test_an_interrupted_folder_is_continued(tmp_path: Path) -> None:
    write(tmp_path, [0, 2])
    with raises(CorpusError, "truncated"):
        GeneratedImages.open(tmp_path)
    lines = (tmp_path / "images.jsonl").read_text()
    (tmp_path / "images.jsonl").write_text(lines + lines[:20])  # killed within a line
    (tmp_path / "images" / "000000.png").unlink()
    assert write(tmp_path) == [0, 1]
    assert len(GeneratedImages.open(tmp_path)) == 3
    assert write(tmp_path) == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with raises(CorpusError, "exists", "out"):
        write(tmp_path / "a", generation=dataclasses.replace(GENERATION, guidance=4.0))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    with raises(CorpusError, "exists", "out"):
        write(tmp_path / "b")
    with GeneratedImagesWriter(tmp_path / "c", GENERATION), raises(CorpusError, "in_use", "out"):
        write(tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("generation.json", None, "not_found"),
        ("generation.json", "{", "malformed"),
        ("generation.json", "[]", "malformed"),
        ("generation.json", '{"schema_version": 99}', "version"),
        ("generation.json", '{"schema_version": 1}', "malformed"),
        ("images.jsonl", None, "truncated"),
        ("images.jsonl", "{}\n", "malformed"),
        ("images.jsonl", '"\n', "malformed"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: str | None, code: str) -> None:
    write(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with raises(CorpusError, code):
        GeneratedImages.open(tmp_path)


def test_a_line_without_the_mark_of_synthetic_images_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "images.jsonl").read_text().split("\n")[:-1]]
    rows[1]["synthetic"] = False
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with raises(CorpusError, "malformed"):
        GeneratedImages.open(tmp_path)


def test_changed_images_and_manifests_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    images = GeneratedImages.open(tmp_path)
    Image.fromarray(image(9)).save(tmp_path / images.rows[0].file)
    with raises(CorpusError, "mismatch"):
        images.pixels(0)
    (tmp_path / images.rows[1].file).unlink()
    with raises(CorpusError, "not_found"):
        images.pixels(1)
    (tmp_path / images.rows[2].file).write_bytes(b"")
    with raises(ImageError, "empty"):
        images.pixels(2)
    (tmp_path / "train_manifests.json").write_text("[]")
    with raises(CorpusError, "mismatch"):
        images.train_manifests()
