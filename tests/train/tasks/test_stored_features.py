"""Training on the stored output of a frozen image encoder: the steps are those of training on
images.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.region_shards import region_data, region_table
from torch import Tensor

import medvl
from medvl.cli import main as cli
from medvl.data.convert.regions import RegionOptions, write_regions
from medvl.data.shards.regions import RegionManifest, Regions, region_folder
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.errors import ConfigError, ShardError
from medvl.eval.core.open import open_source
from medvl.models.checkpoint import load, save
from medvl.models.checkpoint_folder import detector_of
from medvl.models.downstream.regions import GridRegions
from medvl.schema import Batch
from medvl.train import DataLoaders, TrainResult, train
from medvl.train.tasks.pretraining import DataConfig, open_data

TOKENIZER = train_wordpiece(
    ["the left lung of number 0 1 2 3 4 5 6 7 8 9"], vocab_size=60, min_frequency=1
)
TEXT = {
    "text_encoder": "tiny_bert",
    "text_arguments": {"num_hidden_layers": 1},
    "attention_dropout": 0.0,
}
UMRL = {"text_arguments": {"dimension": 24}, "projection_dim": 16, "hidden_dim": 24}
CONVIRT = {**TEXT, "frozen_text_layers": 0, "frozen_image_layers": -1, "label_map_weight": 1.0}
SYSTEMS: dict[str, dict[str, Any]] = {
    "radzero": {**TEXT, "trained_layers": 1},
    "umrl": UMRL,
    "convirt": {**CONVIRT, "label_map_texts": ("Edema",)},
    # of an encoder whose vector is wider than its cells
    "gloria": {
        **CONVIRT,
        "label_map_texts": ("Edema",),
        "text_layers": 1,
        "projection_dim": 16,
        "margin": 0,
        "encoder_size": None,
        "fit": "crop",
    },
}


def make_model(system: str = "radzero", **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "image_encoder": "resnet_tiny",
        "image_size": 64,
        **SYSTEMS.get(system, TEXT),
        **changes,
    }
    return medvl.create_model(system, tokenizer=TOKENIZER, **settings)


def detector(model: Any, *, all_tokens: bool = True) -> GridRegions:
    return GridRegions(model.image_encoder, model.transform, "grid:test", all_tokens=all_tokens)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight samples for training in two shards, two of them without an image; features of
    `make_model()`.
    """
    home = region_table(tmp_path_factory.mktemp("table"))
    train = ShardSource(home / "train")
    write_regions(train, detector(make_model()), "half")
    write_regions(train, detector(make_model()), "full", RegionOptions(full_precision=True))
    for system in ("umrl", "convirt", "gloria"):
        full = RegionOptions(full_precision=True)
        write_regions(train, detector(make_model(system)), system, full)
    return home


def config(shards: Path, **changes: Any) -> DataConfig:
    return region_data(shards, size=64, **changes)


def opened(shards: Path, model: Any, **changes: Any) -> DataLoaders:
    return open_data(config(shards, **changes), model, micro_batch=4)


def step(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the loss and the gradients of a batch; dropout is off."""
    model.eval().zero_grad(set_to_none=True)
    losses = model(batch)
    losses.total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert losses.total.item() > 0
    assert len(gradients) > 2
    return {**gradients, "loss": losses.total.detach()}


@pytest.mark.parametrize(
    ("system", "name", "near"),
    [
        ("radzero", "full", {"rtol": 1e-5, "atol": 1e-6}),
        ("radzero", "half", {"rtol": 5e-3, "atol": 5e-4}),
        ("umrl", "umrl", {"rtol": 1e-5, "atol": 1e-6}),
        ("convirt", "convirt", {"rtol": 1e-5, "atol": 1e-6}),
        ("gloria", "gloria", {"rtol": 1e-4, "atol": 1e-5}),
    ],
)
def test_steps_are_those_of_the_frozen_encoder(
    shards: Path, system: str, name: str, near: dict[str, float]
) -> None:
    model = make_model(system)
    batches = opened(shards, model).train, opened(shards, model, image_features=name).train
    runs = []
    model.image_encoder.register_forward_pre_hook(lambda *_: runs.append(1))
    for number, (pixels, stored) in enumerate(zip(*batches, strict=True)):
        assert pixels.keys == stored.keys
        assert stored.image_BCHW.numel() == 0
        expected, actual = step(model, pixels), step(model, stored)
        assert len(runs) == number + 1  # for the images alone
        for key, tensor in expected.items():
            torch.testing.assert_close(
                actual.pop(key), tensor, **near, msg=lambda text, key=key: f"{key}: {text}"
            )
        assert not actual
    assert number == 1


def test_features_in_float32_give_the_same_bits(shards: Path) -> None:
    """What the writer stores of a batch is what the step computes of it."""
    model = make_model()
    batch = next(iter(opened(shards, model).train))
    features = model.image_encoder.eval()(batch.image_BCHW)
    assert features.patches_BPD is not None
    tokens_BKD = torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)
    stored = dataclasses.replace(
        batch, image_BCHW=batch.image_BCHW[:, :, :0, :0], regions_BPD=tokens_BKD
    )
    expected, actual = step(model, batch), step(model, stored)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
    found = list(opened(shards, model, image_features="half").train)
    assert {batch.regions_BPD.dtype for batch in found if batch.regions_BPD is not None} == {
        torch.float16
    }


def test_a_batch_without_an_image_has_zero_losses(shards: Path) -> None:
    model = make_model().train()
    batch = next(iter(opened(shards, model, image_features="half").train))
    nothing = torch.zeros(len(batch), dtype=torch.bool)
    losses = model(
        dataclasses.replace(batch, regions_BPD=torch.zeros(len(batch), 0, 0), has_image_B=nothing)
    )
    losses.total.backward()
    assert losses.total.item() == 0
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or not parameter.grad.any(), name


def test_validation_and_the_checkpoint_are_those_of_training_on_images(
    shards: Path, tmp_path: Path
) -> None:
    model = make_model()
    data, plain = opened(shards, model, image_features="half"), opened(shards, model)
    for loader in (data.valid, data.valid_images):
        assert loader is not None
        batch = next(iter(loader))
        assert batch.regions_BPD is None
        assert batch.image_BCHW.shape[2:] == (64, 64)
    described = json.loads(json.dumps(data.described))
    found = described["data"]["train"].pop("image_features")
    assert described == json.loads(json.dumps(plain.described))
    assert found["sha256"] == detector(make_model()).sha256
    folders = tmp_path / "stored", tmp_path / "images"
    for folder, run in zip(folders, (data.described, plain.described), strict=True):
        folder.mkdir()
        save(model, folder, run)
        assert detector_of(folder) is None
        assert not load(folder).inputs.regions
    assert {path.name for path in folders[0].iterdir()} == {
        path.name for path in folders[1].iterdir()
    }
    assert (folders[0] / "model.safetensors").read_bytes() == (
        folders[1] / "model.safetensors"
    ).read_bytes()
    assert open_source(shards / "validate", [folders[0]]).region_manifest is None


class Stopped(Exception):
    """The end of a run before its last step."""


def run(shards: Path, folder: Path, stop: int | None = None) -> TrainResult:
    model = make_model()

    def before_step(step: int) -> None:
        if step == stop:
            raise Stopped

    model.before_step = before_step
    data = opened(shards, model, image_features="half", valid=None)
    settings = {"epochs": 2, "global_batch": 4, "checkpoint_every": 1}
    return train(
        model,
        data.train,
        optim=fakes.optim(),
        config=fakes.config(folder, **settings),
        run=data.described,
    )


def test_an_interrupted_run_ends_with_the_weights_of_a_whole_one(
    shards: Path, tmp_path: Path
) -> None:
    assert run(shards, tmp_path / "whole").step == 4
    with pytest.raises(Stopped):
        run(shards, tmp_path / "again", stop=3)
    assert run(shards, tmp_path / "again").step == 4
    whole, again = fakes.weights(tmp_path / "whole"), fakes.weights(tmp_path / "again")
    assert whole.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    start = make_model().state_dict()
    changed = {name for name, tensor in whole.items() if not torch.equal(tensor, start[name])}
    assert any(name.startswith("layers.") for name in changed)
    assert not any(name.startswith("image_encoder.") for name in changed)


class Killed(GridRegions):
    """An encoder that is stopped at its second batch."""

    batches = 0

    def __call__(self, images: Sequence[Any]) -> list[Regions]:
        self.batches += 1
        if self.batches == 2:
            raise KeyboardInterrupt
        return super().__call__(images)


def test_a_killed_command_continues_with_the_same_bytes(shards: Path) -> None:
    model, source = make_model(), ShardSource(shards / "train")
    with pytest.raises(KeyboardInterrupt):
        write_regions(
            source,
            Killed(model.image_encoder, model.transform, "grid:test", all_tokens=True),
            "killed",
        )
    with raises(ShardError, "not_found", "regions"):
        opened(shards, model, image_features="killed")
    write_regions(source, detector(model), "killed")
    for whole in sorted((shards / "train/regions/half").iterdir()):
        assert (shards / "train/regions/killed" / whole.name).read_bytes() == whole.read_bytes()


def test_a_command_writes_the_features_of_a_file_and_of_a_checkpoint(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    model.save_pretrained(tmp_path / "checkpoint")
    safetensors.torch.save_file(
        model.image_encoder.backbone.state_dict(), tmp_path / "encoder.safetensors"
    )
    train = str(shards / "train")
    weights = [
        "--weights",
        str(tmp_path / "encoder.safetensors"),
        "--image-size",
        "64",
        "--fit",
        "crop",
    ]
    options = ["--all-tokens", "--device", "cpu", "--name"]
    cli.main(
        ["regions", "--data", train, "--detector", "grid:resnet_tiny", *weights, *options, "file"]
    )
    cli.main(
        [
            "regions",
            "--data",
            train,
            "--detector",
            str(tmp_path / "checkpoint"),
            *options,
            "checkpoint",
        ]
    )
    assert "data.image_features checkpoint" in capsys.readouterr().out
    written = {
        name: RegionManifest.read(region_folder(train, name))
        for name in ("half", "file", "checkpoint")
    }
    assert len({manifest.detector_sha256 for manifest in written.values()}) == 1
    for name in written:
        opened(shards, make_model(), image_features=name)


def test_settings_without_stored_features_are_named(shards: Path) -> None:
    field = "data.image_features"
    with raises(ConfigError, "unsupported", field):
        opened(shards, make_model("mgca", text_layers=1), image_features="half")
    with raises(ConfigError, "conflict", field):
        opened(shards, make_model(frozen_image=False), image_features="half")
    dropping = make_model()
    dropping.patch_dropout = 0.5
    with raises(ConfigError, "conflict", field):
        opened(shards, dropping, image_features="half")
    with raises(ConfigError, "conflict", field):
        opened(shards, make_model(), image_features="half", regions="half")
    with raises(ConfigError, "conflict", field):
        opened(shards, make_model(), image_features="half", train="https://host/lab/{00..01}.tar")
    for image in (
        ConVIRTAugmentation(size=64),
        EvalTransform(size=64, fit="pad"),
        EvalTransform(size=32),
    ):
        with raises(ConfigError, "conflict", "data.image"):
            opened(shards, make_model(), image_features="half", image=image)
    with raises(ShardError, "not_found", "regions"):
        opened(shards, make_model(), image_features="absent")


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"fit": "pad"}, "transform"),
        ({"image_size": 96}, "encoder, transform"),
        ({"image_arguments": {"output_stride": 16}}, "encoder"),
    ],
)
def test_features_of_another_encoder_are_refused(
    shards: Path, changes: dict[str, Any], differing: str
) -> None:
    model = make_model(**changes)
    with raises(ConfigError, "mismatch", "data.image_features") as caught:
        opened(shards, model, image_features="half", image=model.transform)
    assert f"other {differing} than" in str(caught.value)


def test_features_of_other_weights_and_without_a_class_token_are_refused(shards: Path) -> None:
    other = make_model()
    with torch.no_grad():
        next(other.image_encoder.parameters()).mul_(1.001)
    write_regions(ShardSource(shards / "train"), detector(make_model(), all_tokens=False), "cells")
    for model, name, differing in (
        (other, "half", "weights"),
        (make_model(), "cells", "all_tokens"),
    ):
        with raises(ConfigError, "mismatch", "data.image_features") as caught:
            opened(shards, model, image_features=name)
        assert f"other {differing} than" in str(caught.value)


def test_linear_heads_with_dropout_of_stored_features(shards: Path) -> None:
    """The vectors of images are those of the linear head behind torch's dropout, in training
    alone.
    """
    settings = {"hidden_dim": 0, "feature_dropout": 0.5, "label_map_weight": 0.0}
    model = make_model("convirt", **settings)
    batch = next(iter(opened(shards, model, image_features="convirt").train))
    features = model.image_features(batch).pooled_BD
    head = model.image_head
    assert isinstance(head, torch.nn.Linear)
    assert isinstance(model.text_head, torch.nn.Linear)
    torch.manual_seed(1)
    kept = torch.nn.functional.dropout(features, 0.5)
    model.train()
    model.text_encoder.eval()  # it draws too
    torch.manual_seed(1)
    expected = torch.nn.functional.normalize(kept @ head.weight.T + head.bias, dim=-1)
    torch.testing.assert_close(model.embed_pairs(batch).images.global_NE, expected)
    model.eval()
    whole = torch.nn.functional.normalize(head(features), dim=-1)
    torch.testing.assert_close(model.embed_pairs(batch).images.global_NE, whole)
    with raises(ConfigError, "out_of_range", "feature_dropout"):
        make_model("convirt", feature_dropout=1.0)
