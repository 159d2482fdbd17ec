"""Ensembles of checkpoints: averaged scores and recorded members."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, FakeSource, make_source
from helpers.shard_plans import OPTIONS, make_plan
from torch import Tensor, nn

import medvl
from medvl.cli import main as cli
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.privacy import Deidentifier
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import OriginalTransform
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import load_prompts, zero_shot
from medvl.eval.core.open import load_ensemble, load_model, open_for_evaluation, open_source
from medvl.eval.zero_shot_classification.protocol import predict
from medvl.models.checkpoint import load, save
from medvl.schema import FINDINGS, Embeddings

COUNT = 40


class Turned(FakeModel):
    """Fake model that reads the pixels in another order."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        return super().embed_images(image_BCHW.roll(self.shift, dims=3))


@pytest.fixture
def source() -> FakeSource:
    labels_NL = (np.random.default_rng(0).random((COUNT, len(FINDINGS))) < 0.4).astype(float)
    return make_source(labels_NL, FINDINGS)


@pytest.mark.parametrize("name", ["chexpert_pairs", "chexpert_classes", "chexpert_ensemble"])
def test_ensemble_averages_scores(name: str, source: FakeSource) -> None:
    prompts = [load_prompts(name)]
    members = [Turned(shift) for shift in (0, 3, 5)]
    predictions = predict(members, FakeLoader(source), prompts)
    alone = [predict(member, FakeLoader(source), prompts).scores_NL[0] for member in members]
    np.testing.assert_allclose(predictions.scores_NL[0], np.mean(alone, axis=0), rtol=1e-12)
    assert np.abs(alone[0] - alone[1]).max() > 0.001
    assert predictions.keys == tuple(sample.key for sample in source.samples)
    assert all(member.training for member in members)


def test_ensemble_members_encode_each_image_once(source: FakeSource) -> None:
    """Images are encoded once for all prompt sets."""
    members = [Turned(shift) for shift in (0, 3)]
    sets = [load_prompts("chexpert_pairs"), load_prompts("chexpert_classes")]
    predict(members, FakeLoader(source), sets)
    assert [member.images_encoded for member in members] == [COUNT, COUNT]


def test_ensemble_of_one_equals_single_model(source: FakeSource) -> None:
    alone = zero_shot(FakeModel(), FakeLoader(source), "chexpert_pairs", resamples=5)
    ensemble = zero_shot([FakeModel()], FakeLoader(source), "chexpert_pairs", resamples=5)
    assert ensemble.table() == alone.table()
    assert ensemble.results.config == alone.results.config
    with raises(EvaluationError, "empty", "model"):
        predict([], FakeLoader(source), [load_prompts("chexpert_pairs")])


def test_ensemble_results_record_hash_of_every_member(source: FakeSource, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_text(file.name)
    members = [Turned(0), Turned(3)]
    results = zero_shot(
        members, FakeLoader(source), "chexpert_pairs", resamples=0, checkpoint=files
    ).results
    assert len(results.config["ensemble"]) == 2
    swapped = zero_shot(
        members, FakeLoader(source), "chexpert_pairs", resamples=0, checkpoint=files[::-1]
    ).results
    assert results.inputs["checkpoint"] != swapped.inputs["checkpoint"]
    single = zero_shot(
        Turned(0), FakeLoader(source), "chexpert_pairs", resamples=0, checkpoint=files[0]
    ).results
    assert single.inputs["checkpoint"] == results.config["ensemble"][0]
    assert "ensemble" not in single.config
    with raises(EvaluationError, "conflict", "checkpoint"):
        zero_shot(members, FakeLoader(source), "chexpert_pairs", checkpoint=[files[0], files[0]])
    with raises(EvaluationError, "mismatch", "checkpoint"):
        zero_shot(members, FakeLoader(source), "chexpert_pairs", checkpoint=files[0])


def checkpoint(folder: Path, seed: int, size: int = 32) -> Path:
    torch.manual_seed(seed)
    model = medvl.create_model(
        "clip",
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        text_arguments={"num_hidden_layers": 1},
        tokenizer=train_wordpiece(list(load_prompts("chexpert_pairs").texts())),
        image_size=size,
        projection_dim=16,
    )
    folder.mkdir()
    save(model, folder)
    return folder


def test_evaluated_convolutions_are_fast_on_a_cpu_and_equal(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", 0)
    plain, evaluated = load(folder), load_model(folder, "cpu")
    convolutions = [module for module in evaluated.modules() if isinstance(module, nn.Conv2d)]
    assert convolutions
    assert all(
        module.weight.is_contiguous(memory_format=torch.channels_last) for module in convolutions
    )
    image_BCHW = torch.randint(256, (4, 1, 32, 32), dtype=torch.uint8)
    with torch.inference_mode():
        expected_BE, found_BE = (
            model.embed_images(image_BCHW).global_NE for model in (plain, evaluated)
        )
    assert torch.allclose(found_BE, expected_BE, atol=1e-5)


def test_load_ensemble_rejects_different_transforms(tmp_path: Path) -> None:
    folders = [
        checkpoint(tmp_path / "a", 0),
        checkpoint(tmp_path / "b", 1),
        checkpoint(tmp_path / "c", 2, size=64),
    ]
    assert len(load_ensemble(folders[:2], "cpu")) == 2
    with raises(ConfigError, "mismatch", "checkpoint"):
        load_ensemble(folders, "cpu")


def test_load_ensemble_rejects_models_of_color_and_of_grey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a loader, which reads one or the other."""
    folders = [checkpoint(tmp_path / name, 0) for name in ("a", "b")]

    def load_trained(folder: Path, device: str) -> Any:
        model = load_model(folder, device)
        stored = {
            "short_side": 64,
            "image_format": "png",
            "quality": 95,
            "color": folder.name == "b",
        }
        model.transform = OriginalTransform(**model.transform.settings(), **stored)
        return model

    monkeypatch.setattr("medvl.eval.core.open.load_model", load_trained)
    assert load_ensemble(folders[:1] * 2, "cpu")
    with raises(ConfigError, "mismatch", "checkpoint"):
        load_ensemble(folders, "cpu")


def test_zero_shot_command_accepts_several_checkpoints(tmp_path: Path, deid: Deidentifier) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    data = tmp_path / "out/train"
    sides = {"positive": ["This number is even."], "negative": ["This number is odd."]}
    described = {
        "name": "even",
        "version": 1,
        "description": "",
        "scoring": "pair_softmax",
        "temperature": 1.0,
    }
    prompts = tmp_path / "even.json"
    prompts.write_text(
        json.dumps({**described, "ensemble": "similarity_mean", "classes": {"even": sides}})
    )
    (tmp_path / "run").mkdir()
    folders = [
        checkpoint(tmp_path / "run" / name, seed) for seed, name in enumerate(("first", "second"))
    ]
    options = ["--data", str(data), "--prompts", str(prompts), "--resamples", "0", "--workers", "0"]
    cli.main(["eval", "zero-shot", "--checkpoint", *map(str, folders), *options])
    out = folders[0] / "eval/zero_shot_ensemble"
    members = load_ensemble(folders, "cpu")
    read = functools.partial(open_for_evaluation, open_source(data, folders), batch=5, workers=0)
    alone = [
        predict(
            member,
            read(transform=member.transform, tokenizer=member.tokenizer),
            [load_prompts(prompts)],
        ).scores_NL[0]
        for member in members
    ]
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(
        [line["scores"]["even"] for line in lines], np.mean(alone, axis=0)[:, 0], rtol=1e-6
    )
    assert len(json.loads((out / "results.json").read_text())["config"]["ensemble"]) == 2
    assert "second" in (out / "index.html").read_text()
