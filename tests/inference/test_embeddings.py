"""Embeddings in Parquet files: values, columns, resuming, refusal."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import tiny_tokenizer
from helpers.label_shards import NAMES, make_shards

import medvl
from medvl.cli import main as cli
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError
from medvl.eval.core.results import checkpoint_sha256
from medvl.inference import embed, embeddings as module
from medvl.models import create_classifier, save
from medvl.models.base import evaluating
from medvl.models.downstream.classifier import image_encoder_of

SETTINGS = {
    "image_encoder": "resnet_tiny",
    "text_encoder": "tiny_bert",
    "image_size": 32,
    "projection_dim": 8,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of random weights."""
    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("convirt")
        model = medvl.create_model(
            "convirt", tokenizer=tiny_tokenizer(), frozen_text_layers=0, **SETTINGS
        )
        save(model, folder)
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("bright"), texts=True)


def vectors(path: Path, column: str = "embedding") -> np.ndarray:
    rows = pyarrow.parquet.read_table(path)[column].to_pylist()
    return np.array(rows, dtype=np.float32)


def batches(source: ShardSource, size: int) -> Iterator[list[bytes]]:
    images = [source.image_bytes(position) for position in range(len(source))]
    for start in range(0, len(images), size):
        yield images[start : start + size]


def metadata(path: Path) -> dict[str, str]:
    raw = pyarrow.parquet.read_schema(path).metadata
    return {name.decode(): value.decode() for name, value in raw.items()}


def test_rows_equal_encode_image_bit_for_bit(
    checkpoints: list[Path], shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train.parquet"
    source = ShardSource(shards / "train")
    written = embed(checkpoints[0], [shards / "train"], out, batch=5, workers=0)
    assert (written.rows, written.dim, written.vector, dict(written.skipped)) == (
        len(source),
        8,
        "encode_image",
        {},
    )
    model = medvl.load(checkpoints[0])
    with evaluating(model):
        expected = [model.encode_image(model.transform(images)) for images in batches(source, 5)]
    np.testing.assert_array_equal(vectors(out), torch.cat(expected).numpy())
    table = pyarrow.parquet.read_table(out)
    labels = [f"label/{name}" for name in NAMES]
    assert table.column_names == [
        *("key", "patient", "study", "split", "view"),
        *labels,
        "embedding",
    ]
    samples = [source.sample(position) for position in range(len(source))]
    for name in ("key", "patient", "study", "split", "view"):
        assert table[name].to_pylist() == [getattr(sample, name) for sample in samples]
    for name in NAMES:
        column = table[f"label/{name}"].to_pylist()
        assert column == [sample.labels.get(name) for sample in samples]
    assert None in table["label/Fracture"].to_pylist()
    assert -1 in table["label/Fracture"].to_pylist()
    facts = metadata(out)
    assert facts["medvl.checkpoint"] == checkpoint_sha256(checkpoints[0])
    assert facts["medvl.data"] == source.fingerprint
    assert facts["medvl.vector"] == "encode_image"


def test_pooled_vectors_and_patches_are_those_of_the_encoder(
    checkpoints: list[Path], shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "test.parquet"
    source = ShardSource(shards / "test")
    embed(checkpoints[0], [shards / "test"], out, pooled=True, patches=True, batch=6, workers=0)
    model = medvl.load(checkpoints[0])
    encoder = image_encoder_of(model)
    with evaluating(model):
        features = [encoder(model.transform(images)) for images in batches(source, 6)]
    pooled_ND = torch.cat([each.pooled_BD for each in features])
    np.testing.assert_array_equal(vectors(out), pooled_ND.numpy())
    patches_NPD = torch.cat([each.patches_BPD for each in features])
    shape = json.loads(metadata(out)["medvl.patches"])["shape"]
    assert shape == list(patches_NPD.shape[1:])
    np.testing.assert_array_equal(vectors(out, "patches").reshape(-1, *shape), patches_NPD.numpy())
    both = tmp_path / "both.parquet"
    embed(checkpoints[0], [shards / "test"], both, patches=True, batch=6, workers=0)
    np.testing.assert_array_equal(vectors(both, "patches"), vectors(out, "patches"))
    assert vectors(both).shape == (len(source), 8)


def test_a_classifier_gives_its_pooled_vector(
    checkpoints: list[Path], shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "classifier").mkdir()
    save(create_classifier(checkpoints[0], ["Edema"]), tmp_path / "classifier")
    written = embed(tmp_path / "classifier", [shards / "test"], tmp_path / "c.parquet", workers=0)
    embed(checkpoints[0], [shards / "test"], tmp_path / "p.parquet", pooled=True, workers=0)
    assert written.vector == "pooled"
    np.testing.assert_array_equal(vectors(tmp_path / "c.parquet"), vectors(tmp_path / "p.parquet"))


def test_a_parent_folder_has_the_rows_of_all_splits(
    checkpoints: list[Path], shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "all.parquet"
    assert embed(checkpoints[0], [shards], out, workers=0).rows == 60
    splits = pyarrow.parquet.read_table(out)["split"].to_pylist()
    assert {name: splits.count(name) for name in splits} == {
        "test": 14,
        "train": 32,
        "validate": 14,
    }


@pytest.mark.parametrize("stop", [0, 3, 5])
def test_a_killed_command_continues_to_the_same_bytes(
    checkpoints: list[Path],
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: int,
) -> None:
    monkeypatch.setattr(module, "_PART_ROWS", 8)
    arguments: dict[str, Any] = {"batch": 5, "workers": 0}
    once, twice, cut = (tmp_path / f"{name}.parquet" for name in ("once", "twice", "cut"))
    for path in (once, twice):
        embed(checkpoints[0], [shards / "train"], path, **arguments)
    assert once.read_bytes() == twice.read_bytes()
    encode = module._Encoder.__call__
    calls = []

    def killed(self: Any, images: tuple[torch.Tensor, ...]) -> Any:
        calls.append(len(images[0]))
        if len(calls) > stop:
            raise KeyboardInterrupt
        return encode(self, images)

    monkeypatch.setattr(module._Encoder, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        embed(checkpoints[0], [shards / "train"], cut, **arguments)
    assert not cut.exists()
    calls.clear()

    def counted(self: Any, images: tuple[torch.Tensor, ...]) -> Any:
        calls.append(len(images[0]))
        return encode(self, images)

    monkeypatch.setattr(module._Encoder, "__call__", counted)
    embed(checkpoints[0], [shards / "train"], cut, **arguments)
    assert sum(calls) == 32 - 10 * (stop // 2)  # a part has two batches of five
    assert cut.read_bytes() == once.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("*cut*")) == ["cut.parquet"]
    calls.clear()
    embed(checkpoints[0], [shards / "train"], cut, **arguments)
    assert not calls
    embed(checkpoints[0], [shards / "train"], cut, replace=True, **arguments)
    assert sum(calls) == 32
    assert cut.read_bytes() == once.read_bytes()


def test_another_checkpoint_or_other_data_is_refused(
    checkpoints: list[Path], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "test.parquet"
    embed(checkpoints[0], [shards / "test"], out, workers=0)
    before = out.read_bytes()
    with raises(ConfigError, "exists", "checkpoint", names="another checkpoint"):
        embed(checkpoints[1], [shards / "test"], out, workers=0)
    with raises(ConfigError, "exists", "data", names="other data"):
        embed(checkpoints[0], [shards / "train"], out, workers=0)
    with raises(ConfigError, "exists", "vector", names="--pooled"):
        embed(checkpoints[0], [shards / "test"], out, pooled=True, workers=0)
    assert out.read_bytes() == before
    embed(checkpoints[1], [shards / "test"], out, workers=0, replace=True)
    assert metadata(out)["medvl.checkpoint"] == checkpoint_sha256(checkpoints[1])
    out.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            embed(checkpoints[0], [shards / "test"], out, workers=0)
    with raises(ConfigError, "exists", "checkpoint", names="test.parquet.parts"):
        embed(checkpoints[1], [shards / "test"], out, workers=0)
    embed(checkpoints[0], [shards / "test"], out, workers=0)
    assert out.read_bytes() == before


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_files_that_are_not_ours_are_kept(
    checkpoints: list[Path], shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), out)
    with raises(ConfigError, "exists", "out", names="mine.parquet"):
        embed(checkpoints[0], [shards / "test"], out, workers=0)
    out.write_text("a text")
    with raises(ConfigError, "exists", "out", names="mine.parquet"):
        embed(checkpoints[0], [shards / "test"], out, workers=0)
    with raises(ConfigError, "malformed", "out"):
        embed(checkpoints[0], [shards / "test"], tmp_path / "folder", workers=0)
    with raises(ConfigError, "conflict", "data"):
        embed(checkpoints[0], [shards / "test", tmp_path], tmp_path / "a.parquet", workers=0)


def test_a_pipe_among_the_images_is_skipped(
    checkpoints: list[Path], shards: Path, tmp_path: Path
) -> None:
    """Hashing it would wait for its writer."""
    images = tmp_path / "images"
    images.mkdir()
    shutil.copy(shards.parent / "0.png", images)
    os.mkfifo(images / "pipe.png")
    written = embed(checkpoints[0], [images], tmp_path / "a.parquet")
    assert (written.rows, dict(written.skipped)) == (1, {"not_a_file": 1})


def test_the_command_embeds_files_and_counts_broken_ones(
    checkpoints: list[Path],
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(5):
        shutil.copy(shards.parent / f"{number}.png", images)
    for name in ("cut1.png", "cut2.png"):  # one batch has no readable image
        (images / name).write_bytes((images / "0.png").read_bytes()[:300])
    cv2.imwrite(str(images / "z.png"), np.full((40, 50), 99, np.uint8))
    out = tmp_path / "files.parquet"
    command = [
        *("embed", "--checkpoint", str(checkpoints[0]), "--data", str(images)),
        *("--out", str(out), "--batch", "5"),
    ]
    cli.main(command)
    printed = capsys.readouterr().out
    assert "6 L2-normalised vectors of encode_image, 8 numbers each" in printed
    assert "2 images skipped: 2 truncated" in printed
    table = pyarrow.parquet.read_table(out)
    names = [f"{number}.png" for number in range(5)] + ["z.png"]
    assert table["key"].to_pylist() == [str(images / name) for name in names]
    assert table["patient"].to_pylist() == [None] * 6
    model = medvl.load(checkpoints[0])
    with evaluating(model):
        expected = [
            model.encode_image(model.transform([images / name for name in batch]))
            for batch in (names[:5], names[5:])
        ]
    np.testing.assert_array_equal(vectors(out), torch.cat(expected).numpy())
    before = out.read_bytes()
    cli.main(command)
    assert out.read_bytes() == before
    shutil.copy(images / "0.png", images / "1.png")  # another image under the same name
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "other data" in capsys.readouterr().err
    for path in images.glob("*.png"):
        path.write_bytes(b"no image")
    with raises(ConfigError, "empty", "data"):
        embed(checkpoints[0], [images], tmp_path / "none.parquet")
