"""Data of a pretraining run: missing folders, shared patients, the same batches on any number of
ranks.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.object_store import Bucket
from helpers.shard_plans import make_plan

import medvl
from medvl.cli.main import main
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.tables import Record
from medvl.data.privacy import Deidentifier
from medvl.data.reports.statements import read_statements
from medvl.data.shards.source import ShardSource
from medvl.data.storage.webdataset_tars import TarFields
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import RandomSentence, Statements
from medvl.errors import ConfigError, ShardError, SplitError
from medvl.train import OptimConfig, TrainConfig, ZeroShotRecipe, data_advice, zero_shot_run
from medvl.train.tasks.pretraining import DataConfig, DataLoaders, open_data


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 images for training, 6 of other patients for validation."""
    root = tmp_path_factory.mktemp("data")
    plan = make_plan(root / "images", 22)
    for number, record in enumerate(plan.records):
        split = "train" if number < 16 else "validate"
        text = f"This is image {number}. It shows a chest. There is no effusion."
        plan.records[number] = Record(
            dataclasses.replace(record.sample, split=split, sections={"findings": text}),
            record.report,
        )
    write_shards(
        plan,
        Deidentifier(b"0" * 32),
        ShardRun(out=root / "out", workers=1),
        ShardOptions(samples_per_shard=5),
    )
    return root / "out"


@pytest.fixture(scope="module")
def model() -> Any:
    texts = [
        f"This is image {number}. It shows a chest. There is no effusion." for number in range(22)
    ]
    return medvl.create_model(
        "convirt",
        tokenizer=train_wordpiece(texts, vocab_size=100, min_frequency=1),
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        frozen_text_layers=0,
        image_size=32,
        projection_dim=8,
    )


def config(shards: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "train": str(shards / "train"),
        "valid": shards / "validate",
        "image": ConVIRTAugmentation(size=32, flip="swap_text"),
        "text": RandomSentence(),
        "workers": 0,
        "valid_batch": 2,
    }
    return DataConfig(**settings | changes)


def opened_on(
    rank: int, world: int, data: DataConfig, model: Any, monkeypatch: pytest.MonkeyPatch
) -> DataLoaders:
    """As a process that torchrun has started opens it."""
    with monkeypatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))
        return open_data(data, model, micro_batch=4)


@pytest.mark.fault("F9")
@pytest.mark.parametrize(("world", "workers"), [(2, 0), (2, 1), (4, 0)])
def test_ranks_together_read_the_batches_of_one_process(
    world: int, workers: int, shards: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, pixels after augmentation and drawn sentences, over two epochs."""
    alone = opened_on(0, 1, config(shards), model, monkeypatch)
    ranks = [
        opened_on(rank, world, config(shards, workers=workers), model, monkeypatch)
        for rank in range(world)
    ]
    seen = 0
    for _ in range(2):
        for whole, *parts in zip(alone.train, *(part.train for part in ranks), strict=True):
            assert whole.keys == [key for part in parts for key in part.keys]
            assert whole.texts == [text for part in parts for text in part.texts]
            assert torch.equal(whole.image_BCHW, torch.cat([part.image_BCHW for part in parts]))
            seen += len(whole)
    assert seen == 32
    held_out = [batch.keys for batch in alone.valid]
    for rank, part in enumerate(ranks):
        assert [batch.keys for batch in part.valid] == held_out[rank::world]
        assert [batch.keys for batch in part.valid_images] == held_out


def test_check_names_missing_folders_with_advice(shards: Path, tmp_path: Path) -> None:
    config(shards).check("make it")
    with raises(ConfigError, "not_found", "data.train"):
        config(shards, train=str(tmp_path / "train")).check("make it")
    with raises(ConfigError, "not_found", "data.valid"):
        config(shards, valid=tmp_path / "validate", tokenizer=tmp_path / "vocab").check("make it")
    with raises(ConfigError, "not_found", "data.tokenizer") as caught:
        config(shards, tokenizer=tmp_path / "vocab").check("make the shards of MIMIC-CXR")
    assert f"medvl vocab --data {shards / 'train'} --out {tmp_path / 'vocab'}" in str(caught.value)
    assert "MIMIC" not in str(caught.value)


def test_advice_has_a_command_for_data_of_ones_own() -> None:
    advice = data_advice("convirt_mimic", "medvl shards mimic-cxr", "", DataConfig.own_data)
    assert "medvl shards table --table" in advice
    assert "medvl train convirt_mimic tiny --data.train shards/ours/train" in advice


@pytest.mark.fault("S11")
def test_open_data_refuses_a_shared_patient(shards: Path, model: Any) -> None:
    with raises(SplitError, "leak"):
        open_data(config(shards, valid=shards / "train"), model, micro_batch=4)


def test_open_data_refuses_damaged_shards_and_a_missing_tokenizer(
    shards: Path, model: Any, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with raises(ShardError, "malformed"):
        open_data(config(shards, train=str(tmp_path)), model, micro_batch=4)
    bare = medvl.create_model(dataclasses.replace(model.config, vocab_size=100))
    with raises(ConfigError, "missing", "data.tokenizer"):
        open_data(config(shards), bare, micro_batch=4)


def test_described_holds_the_training_patients(shards: Path, model: Any) -> None:
    opened = open_data(config(shards), model, micro_batch=4)
    assert opened.described["train_manifest"]["patients"] == tuple(
        sorted(f"patient{number}" for number in range(8))
    )
    assert opened.described["data"]["train"]["samples"] == 16
    assert opened.described["data"]["valid"]["patients"] == 3
    without = open_data(config(shards, valid=None), model, micro_batch=4)
    assert (without.valid, without.valid_images) == (None, None)


def test_shards_in_a_store_are_those_of_the_folder(
    shards: Path, model: Any, bucket: Bucket, tmp_path: Path
) -> None:
    address = bucket.upload(shards, "lab")
    data = config(shards, train=f"{address}/train", valid=Path(f"{address}/validate"))
    data.check("make it")
    remote, local = (
        open_data(data, model, micro_batch=4),
        open_data(config(shards), model, micro_batch=4),
    )
    assert remote.described == local.described
    for part in ("train", "valid", "valid_images"):
        assert [batch.keys for batch in getattr(remote, part)] == [
            batch.keys for batch in getattr(local, part)
        ]
    with raises(ConfigError, "not_found", "data.train", names=f"{address}/nowhere"):
        config(shards, train=f"{address}/nowhere").check("make it")
    main(["vocab", "--data", f"{address}/train", "--out", str(tmp_path / "vocab"), "--size", "60"])
    assert (tmp_path / "vocab/tokenizer.json").is_file()


def test_webdataset_tars_need_the_number_of_their_samples(shards: Path, model: Any) -> None:
    """Shards are webdataset tars as well, with their text in the JSON."""
    pattern = str(shards / "train/lab-train-{000000..000003}.tar")
    fields = TarFields(text="json:key")
    with raises(ConfigError, "missing", "data.samples"):
        open_data(config(shards, train=pattern), model, micro_batch=4)
    with raises(ConfigError, "conflict", "data.weights"):
        open_data(config(shards, train=pattern, weights=(1.0,), samples=16), model, micro_batch=4)
    data = config(shards, train=pattern, samples=16, fields=fields)
    data.check("make it")
    opened = open_data(data, model, micro_batch=4)
    assert [len(batch) for batch in opened.train] == [4] * 4
    assert "train_manifest" not in opened.described
    assert opened.described["data"]["valid"]["patients"] == 3


def test_statements_of_other_studies_are_refused(shards: Path, model: Any, tmp_path: Path) -> None:
    """Names of MIMIC-CXR in place of the shards' hashes: no sample had a text, and every loss
    was 0.
    """
    source = ShardSource(shards / "train")
    file = tmp_path / "statements.jsonl"
    text = Statements(source="file", file=file)
    for study, statements in (
        ("p10/p10000032/s50414267", ["Edema."]),
        (source.sample(3).study, [" "]),
    ):
        file.write_text(json.dumps({"study": study, "statements": statements}))
        with raises(ConfigError, "mismatch", "data.text.file"):
            open_data(config(shards, text=text), model, 4)
        read_statements.cache_clear()
    file.write_text(json.dumps({"study": source.sample(3).study, "statements": ["Edema."]}))
    assert open_data(config(shards, text=text), model, 4).train is not None


@pytest.mark.parametrize(
    ("prompts", "code", "text"),
    [(None, "conflict", "--prompts None"), ("chexpert_ensemble", "mismatch", "Consolidation")],
)
def test_a_zero_shot_metric_that_the_labels_lack_is_refused_before_training(
    shards: Path, model: Any, tmp_path: Path, prompts: str | None, code: str, text: str
) -> None:
    data = config(shards)
    vocabulary = tmp_path / "tokenizer"
    model.tokenizer.save(vocabulary)
    recipe = ZeroShotRecipe(
        model=model.config,
        pretrained=False,
        prompts=prompts,
        data=dataclasses.replace(data, tokenizer=vocabulary),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(
            run_dir=tmp_path / "run",
            steps=1,
            global_batch=2,
            best_metric="zero_shot/auroc_macro_competition",
            best_mode="max",
        ),
    )
    prepare = zero_shot_run("convirt_mimic", "", lambda images, prompts: lambda model: {})
    with raises(ConfigError, code, "best_metric", names=text):
        prepare(recipe)
    of_all = dataclasses.replace(recipe.train, best_metric="zero_shot/auroc_macro")
    if prompts is not None:
        assert prepare(dataclasses.replace(recipe, train=of_all)).evals
