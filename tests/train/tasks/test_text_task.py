"""Data of runs on text alone: loaders, documents on both sides, further folders; and a recipe
from start to checkpoint.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises
from helpers.text_shards import make_documents, text_vocabulary

import medvl
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.documents import Document
from medvl.data.corpora.text import plan_documents
from medvl.data.privacy import Deidentifier
from medvl.errors import ConfigError, SplitError
from medvl.models import MaskedTextConfig, create_model
from medvl.train import OptimConfig, Recipe, TextDataConfig, TrainConfig, open_text, text_run

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
MODEL = MaskedTextConfig(text_encoder="bert", text_arguments=SMALL, max_tokens=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shards (train, validate), shards of other documents, and a
    vocabulary.
    """
    folder, deid = tmp_path_factory.mktemp("text"), Deidentifier(b"s" * 32)
    for name, seed in (("shards", 0), ("more", 1)):
        documents = [Document(text=text) for text in make_documents(30, seed)]
        planned = plan_documents(documents, deid, fractions={"train": 0.8, "validate": 0.2})
        write_shards(planned, deid, ShardRun(out=folder / name, workers=1))
    text_vocabulary().save(folder / "vocab")
    return folder


def settings(folder: Path, **changes: Any) -> TextDataConfig:
    data = TextDataConfig(
        train=folder / "shards/train",
        valid=folder / "shards/validate",
        tokenizer=folder / "vocab",
        workers=0,
        valid_batch=4,
    )
    return dataclasses.replace(data, **changes)


def test_folders_are_joined_and_checked(folder: Path) -> None:
    model = create_model(MODEL, tokenizer=folder / "vocab")
    alone = open_text(settings(folder), model, 4)
    more = open_text(
        settings(folder, extra_train=(folder / "more/train",), weights=(1.0, 3.0)), model, 4
    )
    assert more.train.steps_per_epoch > alone.train.steps_per_epoch
    assert more.described["data"]["train"]["weights"] == [1.0, 3.0]
    assert alone.described["data"]["train"]["patients"] == len(alone.train.source.manifest.patients)
    with raises(SplitError, "leak"):
        open_text(settings(folder, extra_train=(folder / "shards/validate",)), model, 4)
    with raises(ConfigError, "missing", "data.tokenizer"):
        open_text(settings(folder), create_model(dataclasses.replace(MODEL, vocab_size=60)), 4)
    without = open_text(settings(folder, valid=None), model, 4)
    assert (without.valid, without.valid_images) == (None, None)


def test_a_recipe_trains_scores_and_saves(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        model=MODEL,
        pretrained=False,
        data=settings(folder),
        optim=OptimConfig(optimizer="lamb", lr=1e-2),
        train=TrainConfig(
            run_dir=tmp_path / "run",
            steps=4,
            global_batch=8,
            accumulate=2,
            packed_text=True,
            num_threads=1,
            tensorboard=False,
            best_metric="masked/accuracy",
            best_mode="max",
        ),
    )
    result = text_run("mine", "medvl shards text")(recipe).train()
    assert {
        "loss/mlm",
        "loss/pairs",
        "masked/accuracy",
        "masked/unigram",
        "pairs/accuracy",
    } <= result.metrics.keys()
    assert result.best is not None
    model = medvl.load(result.best)
    assert model.name == "masked_text"
    from_here = dataclasses.replace(
        recipe,
        init_from=result.best,
        train=dataclasses.replace(recipe.train, run_dir=tmp_path / "next"),
    )
    assert text_run("mine", "medvl shards text")(from_here).model.name == "masked_text"
    with raises(ConfigError, "not_found", "data.train", names="medvl shards text"):
        text_run("mine", "medvl shards text")(dataclasses.replace(recipe, data=settings(tmp_path)))
