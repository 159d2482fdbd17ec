"""`medvl generate`: folders of synthetic images from prompts, sweeps, continuation,
reconstructions.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.generators import AUTOENCODER, TEXTS, tiny_generator, tiny_words
from helpers.label_shards import make_shards

import medvl
from medvl.cli.infer import generate
from medvl.data import GeneratedImages, Manifest
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError
from medvl.inference import GenerateOptions, Prompt, prompts_of_file, prompts_of_shards
from medvl.models import save

pytest.importorskip("diffusers")
FAST: dict[str, Any] = {"steps": 2, "device": "cpu", "batch": 3}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("bright"), texts=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> str:
    folder = tmp_path_factory.mktemp("generator")
    manifest = json.loads((shards / "train" / "manifest.json").read_text())
    save(tiny_generator(tiny_words()), folder, {"train_manifest": manifest})
    return str(folder)


def test_prompts_become_a_folder_of_marked_images(
    checkpoint: str, shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    long = " ".join(["very dark"] * 20)
    said = generate(
        checkpoint=checkpoint, out=out, prompt=(TEXTS[0], long, ""), guidance=(2.0,), **FAST
    )
    assert "3 synthetic images" in said
    assert "1 images have prompts longer" in said
    images = GeneratedImages.open(out)
    generation = images.generation
    assert (generation.system, generation.sampler, generation.steps, generation.guidance) == (
        "latent_diffusion",
        "dpm",
        2,
        2.0,
    )
    (manifest,) = images.train_manifests()
    assert Manifest.parse(manifest, "").patients == ShardSource(shards / "train").manifest.patients
    assert generation.train_fingerprints == (Manifest.parse(manifest, "").fingerprint,)
    assert [row.prompt for row in images.rows] == [TEXTS[0], long, ""]
    assert images.rows[0].cut_tokens == 0 < images.rows[1].cut_tokens
    assert images.pixels(2).shape == (32, 32)
    assert (out / "contact_sheet.png").is_file()


def test_a_corpus_gives_prompts_with_their_keys_and_a_sweep_the_same_noise(
    checkpoint: str, shards: Path, tmp_path: Path
) -> None:
    options = {**FAST, "sections": ("caption",), "limit": 3, "images_per_prompt": 2}
    generate(
        checkpoint=checkpoint, out=tmp_path, data=shards / "test", guidance=(1.0, 3.0), **options
    )
    one, three = (GeneratedImages.open(tmp_path / f"guidance-{scale}") for scale in (1, 3))
    source = ShardSource(shards / "test")
    texts = {
        source.sample(row).key: source.sample(row).sections["caption"] for row in range(len(source))
    }
    assert len(one) == 6
    assert [row.prompt for row in one.rows] == [texts[str(row.source_key)] for row in one.rows]
    assert len({row.prompt_key for row in one.rows}) == 3
    assert len({row.seed for row in one.rows}) == 6
    assert [row.seed for row in one.rows] == [row.seed for row in three.rows]
    assert [row.pixel_hash for row in one.rows] != [row.pixel_hash for row in three.rows]
    assert one.generation.prompt_source["fingerprint"] == source.manifest.fingerprint


def test_the_same_command_continues_and_other_settings_are_refused(
    checkpoint: str, tmp_path: Path
) -> None:
    command: dict[str, Any] = {
        "checkpoint": checkpoint,
        "out": tmp_path,
        "prompt": tuple(TEXTS),
        **FAST,
    }
    generate(**command)
    first = [row.pixel_hash for row in GeneratedImages.open(tmp_path).rows]
    lines = (tmp_path / "images.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "images.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "images" / "000000.png").unlink()
    kept = (tmp_path / "images" / "000001.png").stat().st_mtime_ns
    generate(**command)
    images = GeneratedImages.open(tmp_path)
    assert (tmp_path / "images" / "000001.png").stat().st_mtime_ns == kept
    differences = [first[row] != images.rows[row].pixel_hash for row in (1,)]
    assert not any(differences)
    with raises(CorpusError, "exists", "out"):
        generate(**{**command, "seed": 1})


def test_reconstructions_are_those_of_the_autoencoder(
    shards: Path, tmp_path: Path, checkpoint: str
) -> None:
    model: Any = medvl.create_model(AUTOENCODER)
    (tmp_path / "auto").mkdir()
    save(model, tmp_path / "auto")
    model = medvl.load(tmp_path / "auto")
    data = shards / "test"
    options: dict[str, Any] = {
        "data": data,
        "sections": ("caption",),
        "limit": 2,
        "reconstruct": True,
        **FAST,
    }
    for name, path in (("auto", str(tmp_path / "auto")), ("diffusion", checkpoint)):
        generate(checkpoint=path, out=tmp_path / f"{name}-images", **options)
    images = GeneratedImages.open(tmp_path / "auto-images")
    assert images.generation.sampler == "reconstruction"
    source = ShardSource(data)
    position = next(
        row for row in range(len(source)) if source.sample(row).key == images.rows[0].source_key
    )
    rebuilt = model.reconstruct(model.transform(source.pixels(position)))[0].numpy()
    assert np.abs(rebuilt.astype(int) - images.pixels(0).astype(int)).max() <= 1


def test_a_mark_is_seen(checkpoint: str, tmp_path: Path) -> None:
    for mark in (False, True):
        generate(
            checkpoint=checkpoint, out=tmp_path / str(mark), prompt=(TEXTS[0],), mark=mark, **FAST
        )
    plain, with_mark = (GeneratedImages.open(tmp_path / str(mark)) for mark in (False, True))
    assert with_mark.generation.marked
    changed = plain.pixels(0) != with_mark.pixels(0)
    assert changed[-8:].any()
    assert not changed[:16].any()


def test_wrong_arguments(checkpoint: str, shards: Path, tmp_path: Path) -> None:
    with raises(ConfigError, "conflict", "prompts"):
        generate(checkpoint=checkpoint, out=tmp_path / "a")
    with raises(ConfigError, "missing", "data"):
        generate(checkpoint=checkpoint, out=tmp_path / "a", prompt=("x",), reconstruct=True)
    with raises(ConfigError, "missing", "guidance"):
        generate(checkpoint=checkpoint, out=tmp_path / "a", prompt=("x",), guidance=())
    with raises(ConfigError, "out_of_range", "batch"):
        generate(checkpoint=checkpoint, out=tmp_path / "a", prompt=("x",), batch=0)
    with raises(ConfigError, "unknown_name", "precision"):
        GenerateOptions(precision="int8")
    with raises(ConfigError, "not_found", "prompts"):
        prompts_of_file(tmp_path / "none.txt")
    (tmp_path / "blank.txt").write_text("\n \n")
    with raises(ConfigError, "empty", "prompts"):
        prompts_of_file(tmp_path / "blank.txt")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with raises(ConfigError, "malformed", "prompts"):
        prompts_of_file(tmp_path / "bad.txt")
    (tmp_path / "two.txt").write_text("first\n\n second \n")
    assert prompts_of_file(tmp_path / "two.txt")[0] == [
        Prompt(text="first", key="1"),
        Prompt(text="second", key="3"),
    ]
    with raises(ConfigError, "empty"):
        prompts_of_shards(shards / "test", sections=("findings",))
    (tmp_path / "auto").mkdir()
    save(medvl.create_model(AUTOENCODER), tmp_path / "auto")
    with raises(ConfigError, "unsupported", "model"):
        generate(checkpoint=str(tmp_path / "auto"), out=tmp_path / "b", prompt=("x",), **FAST)
    assert not (tmp_path / "b").exists()
