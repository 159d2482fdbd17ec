"""Training of image generators on shards: views and texts, the cache of latents, resuming,
recipes' settings.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.generators import AUTOENCODER, DIFFUSION, tiny_generator
from helpers.label_shards import make_shards

import medvl
from medvl.data import EvalTransform, WholeText, select_samples
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import ConfigError, ShardError
from medvl.models import create_latent_diffusion, save
from medvl.train import (
    GenerationDataConfig,
    ImageDataConfig,
    OptimConfig,
    TrainConfig,
    open_generation,
    open_images,
    train,
)
from medvl.train.tasks.generation import LatentCache

pytest.importorskip("diffusers")
TEXT = WholeText(sections=("caption",), missing="no_text")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("bright"), texts=True)


@pytest.fixture(scope="module")
def model() -> Any:
    texts = [f"Image {number} is {kind}." for number in range(60) for kind in ("bright", "dark")]
    words = train_wordpiece(texts, vocab_size=80, max_tokens=16)
    return tiny_generator(words, latent_scale=None)


def generation(shards: Path, **settings: Any) -> GenerationDataConfig:
    fields = {
        "train": shards / "train",
        "valid": shards / "validate",
        "text": TEXT,
        "workers": 0,
        "valid_batch": 8,
    }
    return GenerationDataConfig(**{**fields, **settings})


def test_an_autoencoder_trains_on_shards(shards: Path, tmp_path: Path) -> None:
    model = medvl.create_model(AUTOENCODER)
    data = ImageDataConfig(
        train=shards / "train",
        valid=shards / "validate",
        image=EvalTransform(size=32),
        workers=0,
        valid_batch=8,
    )
    loaders = open_images(data, model, 8)
    config = TrainConfig(
        run_dir=tmp_path, steps=4, global_batch=8, best_metric="loss/l1", tensorboard=False
    )
    result = train(
        model,
        loaders.train,
        optim=OptimConfig(lr=3e-3),
        config=config,
        valid_loader=loaders.valid,
        run=loaders.described,
    )
    assert {"loss/l1", "loss/kl"} <= set(result.metrics)
    assert medvl.load(tmp_path).autoencoder.trained_on[0]["patients"]


def test_a_diffusion_model_trains_on_latents_and_resumes_to_the_same_weights(
    shards: Path, model: Any, tmp_path: Path
) -> None:
    save(model, _new(tmp_path / "start"))
    data = generation(shards, cache=tmp_path / "cache")

    def run(name: str, steps: int) -> dict[str, torch.Tensor]:
        config = dataclasses.replace(DIFFUSION, latent_scale=None, ema_decay=0.9)
        with medvl.train.seeded(0):
            fresh = create_latent_diffusion(config, start=tmp_path / "start")
        loaders = open_generation(data, fresh, 8)
        settings = TrainConfig(
            run_dir=tmp_path / name,
            steps=steps,
            global_batch=8,
            checkpoint_every=3,
            tensorboard=False,
        )
        train(
            fresh,
            loaders.train,
            optim=OptimConfig(lr=1e-3),
            config=settings,
            valid_loader=loaders.valid,
            run=loaders.described,
        )
        return fresh.state_dict()

    whole = run("whole", 6)
    run("parts", 3)
    parts = run("parts", 6)
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert len(list((tmp_path / "cache").iterdir())) == 2, "one folder for each split, made once"
    assert float(whole["latent_scale"]) > 0


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_cached_batches_are_those_of_the_shards(shards: Path, model: Any, tmp_path: Path) -> None:
    """In the same order, with the same latents and text states."""
    plain = open_generation(generation(shards), model, 8)
    cached = open_generation(generation(shards, cache=tmp_path), model, 8)
    model.eval()
    for first, second in zip(plain.train, cached.train, strict=True):
        assert first.keys == second.keys
        assert torch.allclose(
            second.moments_BCHW, model.encode_moments(first.image_BCHW), atol=5e-3
        )
        assert torch.equal(second.mask_BT, first.mask_BT)
        states = model.encode_text(first.ids_BT, first.mask_BT)[0]
        assert torch.allclose(second.states_BTD, states, atol=5e-3)
    assert [batch.keys for batch in plain.valid] == [batch.keys for batch in cached.valid]


def test_a_run_on_the_cpu_stores_its_latents_from_there(
    shards: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a GPU; a run that needs one says that there is none before it encodes for
    hours.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = generation(shards, cache=tmp_path, valid=None)
    with raises(ConfigError, "unsupported", "device"):
        open_generation(data, model, 8, "cuda")
    assert not [*tmp_path.glob("*/keys.json")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    open_generation(data, model, 8, "cpu")
    assert [*tmp_path.glob("*/keys.json")]


def test_another_autoencoder_gets_a_cache_of_its_own(
    shards: Path, model: Any, tmp_path: Path
) -> None:
    data = generation(shards, cache=tmp_path, valid=None)
    open_generation(data, model, 8)
    open_generation(data, model, 8)
    assert len(list(tmp_path.iterdir())) == 1
    parameter = next(model.autoencoder.parameters())
    with torch.no_grad():
        parameter += 0.1
    open_generation(data, model, 8)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    with raises(ShardError, "malformed"):
        LatentCache(tmp_path)
    (tmp_path / "keys.json").write_text(json.dumps(["a"]))
    np.save(tmp_path / "moments.npy", np.zeros((1, 2, 1, 1), np.float16))
    (tmp_path / "texts.npy").write_bytes(b"\x93NUMPY")
    with raises(ShardError, "malformed"):
        LatentCache(tmp_path)


def test_samples_are_selected_by_view_and_text(shards: Path) -> None:
    source = ShardSource(shards / "train")
    assert select_samples(source, ()) is source
    assert len(select_samples(source, (), TEXT)) == 32
    assert len(select_samples(source, (), TEXT, len("Image 1 is bright."))) < 32
    with raises(ConfigError, "empty", "views", names="LATERAL"):
        select_samples(source, ("LATERAL",))
    with raises(ConfigError, "empty"):
        select_samples(source, (), WholeText(sections=("impression",), missing="no_text"), 1000)
