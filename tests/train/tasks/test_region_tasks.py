"""Models of regions in fine-tuning and evaluation, from shards with files of regions to results."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TINY
from helpers.region_shards import region_table, with_regions
from helpers.vqa_corpora import write_rad_shards
from torch import nn

import medvl
from medvl.data.loading.profile import time_stages
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.encoders import RegionEncoder
from medvl.errors import ConfigError
from medvl.eval import LabelPolicy, classify, reranked_retrieval
from medvl.eval.core.open import open_for_evaluation, open_source
from medvl.eval.retrieval.rerank import ShortlistModel
from medvl.models import VQA, FusedClassifier, RetrievalModel
from medvl.models.checkpoint import load, save
from medvl.models.downstream.ranking import as_matcher
from medvl.schema import Inputs
from medvl.train.tasks.pretraining import DataConfig, open_data
from medvl.train.tasks.supervised import (
    ChangeDataConfig,
    ClassificationDataConfig,
    VQADataConfig,
    open_change,
    open_classification,
    open_vqa,
)

TEXTS = [
    "the left lung of number is clear",
    "is the heart enlarged? where is the mass? how many masses? what plane",
]
TOKENIZER = train_wordpiece(TEXTS, vocab_size=90, min_frequency=1)
ENCODERS = {"uniter": "regions:2+7", "lxmert": "regions:2+4", "visualbert": "regions:2"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of labelled images with texts, and their regions."""
    home = region_table(tmp_path_factory.mktemp("table"))
    for split in ("train", "validate"):
        with_regions(home / split)
    return home


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards with questions, and the regions of their images."""
    folder = write_rad_shards(tmp_path_factory.mktemp("rad"))
    with_regions(folder)
    return folder


@pytest.fixture(params=sorted(ENCODERS))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    settings = {
        **TINY[request.param],
        "image_encoder": ENCODERS[request.param],
        "image_arguments": {},
    }
    classes = {"region_classes": 2} if request.param != "visualbert" else {}
    return medvl.create_model(request.param, tokenizer=TOKENIZER, **settings, **classes)


def trained(model: nn.Module, loader: Any, described: dict[str, Any], folder: Path) -> Any:
    """Check the gradients of a step, then save the model and load it again."""
    model(next(iter(loader))).total.backward()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [
        name for name, p in learning.items() if p.grad is None or not p.grad.isfinite().all()
    ] == []
    folder.mkdir()
    save(model, folder, described)
    restored = load(folder)
    assert [each.detector for each in restored.modules() if isinstance(each, RegionEncoder)] == [
        "d" * 64
    ]
    return restored


def no_pixels(*_: object) -> bytes:
    raise AssertionError("images were read")


def test_questions_are_answered_from_regions(
    model: Any, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardSource, "image_bytes", no_pixels)
    vqa = VQA.on(model, ("yes", "no", "right lung", "2"))
    image = EvalTransform(size=32)
    data = VQADataConfig(
        train=questions,
        valid=questions,
        valid_split="test",
        image=image,
        regions="quarters",
        workers=0,
        valid_batch=2,
    )
    opened = open_vqa(data, vqa, vqa.config.answers, str.lower, 4)
    answering = trained(vqa, opened.train, opened.described, tmp_path / "vqa")
    assert opened.valid is not None
    with torch.no_grad():
        for batch in opened.valid:
            assert batch.regions_BPD is not None
            assert set(answering.predict(batch).answers) <= set(vqa.config.answers)
            assert answering(batch).total.isfinite()


def test_labels_are_predicted_from_regions(
    model: Any, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardSource, "image_bytes", no_pixels)
    classifier = FusedClassifier.on(model, ("edema",))
    data = ClassificationDataConfig(
        train=shards / "train", valid=shards / "validate", regions="quarters", workers=0
    )
    opened = open_classification(data, classifier, lambda labels, names: labels, 4)
    restored = trained(classifier, opened.train, opened.described, tmp_path / "labels")
    assert open_source(shards / "validate", [tmp_path / "labels"]).region_manifest is not None
    source = ShardSource(shards / "train", regions="quarters")  # validation has one image
    loader = open_for_evaluation(source, restored.transform, TOKENIZER, batch=2, workers=0)
    result = classify(restored, loader, policy=LabelPolicy(), resamples=10)
    assert [
        row.value for row in result.results.rows if row.metric == "auroc" and np.isfinite(row.value)
    ]


def test_candidates_are_ranked_by_their_regions(model: Any, shards: Path, tmp_path: Path) -> None:
    """The dual-encoder that makes the shortlists reads the pixels of the same samples."""
    ranking = RetrievalModel.on(model, negatives=2)
    data = DataConfig(
        train=str(shards / "train"),
        valid=None,
        image=EvalTransform(size=32),
        text=WholeText(),
        regions="quarters",
        workers=0,
    )
    opened = open_data(data, ranking, 4)
    ranking = trained(ranking, opened.train, opened.described, tmp_path / "rank")
    matcher = as_matcher(ranking)
    tiny = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "projection_dim": 8,
    }
    dual = medvl.create_model("convirt", tokenizer=TOKENIZER, frozen_text_layers=0, **tiny).eval()
    plain = open_for_evaluation(
        open_source(shards / "train"), dual.transform, TOKENIZER, batch=4, workers=0
    )
    source = ShardSource(shards / "train", regions="quarters")
    loader = open_for_evaluation(source, matcher.transform, TOKENIZER, batch=4, workers=0)
    result = reranked_retrieval(
        matcher, loader, shortlist=3, shortlist_model=ShortlistModel(dual, plain), resamples=10
    )
    assert all(np.isfinite(row.value) for row in result.results.rows)


def test_stages_of_a_loader_of_regions_are_timed_without_pixels(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ShardSource(shards / "train", regions="quarters")
    loader = open_for_evaluation(source, EvalTransform(size=32), TOKENIZER, batch=4, workers=0)
    monkeypatch.setattr(ShardSource, "image_bytes", no_pixels)
    assert time_stages(loader, batch=4).total > 0


def test_regions_of_another_detector_are_refused_at_every_head(model: Any, shards: Path) -> None:
    next(each for each in model.modules() if isinstance(each, RegionEncoder)).detector = "e" * 64
    classifier = FusedClassifier.on(model, ("edema",))
    data = ClassificationDataConfig(
        train=shards / "train", valid=shards / "validate", regions="quarters", workers=0
    )
    with raises(ConfigError, "mismatch", "data.regions"):
        open_classification(data, classifier, lambda labels, names: labels, 4)


def test_a_classifier_of_change_that_reads_pixels_refuses_regions(shards: Path) -> None:
    model = SimpleNamespace(
        name="change", config=SimpleNamespace(findings=("edema",)), inputs=Inputs(), modules=list
    )
    data = ChangeDataConfig(
        train=shards / "train", valid=shards / "validate", regions="quarters", workers=0
    )
    with raises(ConfigError, "conflict", "data.regions"):
        open_change(data, model, 4)
