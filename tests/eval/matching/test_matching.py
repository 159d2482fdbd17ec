"""Image-text matching: choice of the texts, scores of each pair, metrics, and the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, make_source
from helpers.fusion_samples import SIDE, TEXTS, tiny_model, tiny_tokenizer

import medvl
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import ShortlistModel, image_text_matching, reranked_retrieval, write_matching_page
from medvl.eval.core.results import PageHeader
from medvl.eval.matching import MIRROR, OTHER, OWN, choose_texts
from medvl.eval.robustness.scorers import make_scorer
from medvl.models import FusionModel, RetrievalModel
from medvl.models.downstream.ranking import as_matcher

REPORTS = [*TEXTS, "Dense left consolidation of the lungs.", "", "No effusion."]


def make_loader(batch: int = 5, count: int = 9) -> FakeLoader:
    source = make_source(np.zeros((count, 0)), ())
    rng = np.random.default_rng(0)
    source.images = [rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8) for _ in range(count)]
    return FakeLoader(source, batch, [f" {REPORTS[row % len(REPORTS)]}\n" for row in range(count)])


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    if name != "convirt":
        return tiny_model(name, tiny_tokenizer()).eval()
    sizes: dict[str, Any] = {"image_size": SIDE, "frozen_text_layers": 0, "projection_dim": 8}
    tokenizer = tiny_tokenizer()
    return medvl.create_model(
        name, image_encoder="resnet_tiny", text_encoder="tiny_bert", tokenizer=tokenizer, **sizes
    ).eval()


def test_texts_are_own_next_other_and_mirror() -> None:
    items = choose_texts(["left a", "left a", "", "b", "right  a"], ["p", "q", "q", "q", "r"])
    named = [
        tuple(items.texts[index] if index >= 0 else None for index in row) for row in items.text_N3
    ]
    assert items.position_N.tolist() == [0, 1, 3, 4]
    assert named == [
        ("left a", "b", "right a"),
        ("left a", "right  a", "right a"),
        ("b", "right  a", None),
        ("right  a", "left a", "left  a"),
    ]
    for texts, patients in ((["", ""], "pq"), (["a", "a"], "pq"), (["a", "b"], "pp")):
        with raises(EvaluationError, "empty", "data"):
            choose_texts(texts, list(patients))


@pytest.mark.parametrize("name", ["m3ae", "albef", "convirt"])
@torch.no_grad()
def test_scores_are_those_of_each_pair_alone(name: str) -> None:
    loader, model = make_loader(), make_model(name)
    result = image_text_matching(model, loader, resamples=20)
    pixels = {
        sample.key: image
        for sample, image in zip(loader.source.samples, loader.source.images, strict=True)
    }
    for row, sample in enumerate(result.samples):
        image_BCHW = torch.from_numpy(pixels[sample.key])[None, None]
        for column in (OWN, OTHER, MIRROR):
            if result.items.text_N3[row, column] < 0:
                assert np.isnan(result.scores_N3[row, column])
                continue
            text = [result.text(row, column)]
            if isinstance(model, FusionModel):
                logits = model.match(
                    model.text_tokens(*model.tokenize(text)), model.image_tokens(image_BCHW)
                )[0]
                expected = logits[1] - logits[0]
            else:
                expected = model.similarity(
                    model.embed_images(image_BCHW), model.embed_texts(text)
                )[0, 0]
            assert result.scores_N3[row, column] == pytest.approx(float(expected), abs=1e-4)


def test_metrics_and_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Own 1, others -1 and 1 in turn, mirrors 0: half of the other texts tie."""
    model, loader = make_model("dual_stream"), make_loader(count=8)

    def fake(
        _: Any, __: Any, image_Q: torch.Tensor, text_Q: torch.Tensor, ___: Any
    ) -> torch.Tensor:
        items = choose_texts(
            [text.strip() for text in loader.texts], [s.patient for s in loader.source.samples]
        )
        place = {
            (row, int(text)): column
            for row, texts in enumerate(items.text_N3)
            for column, text in enumerate(texts)
        }
        values = [
            (1, -1 if row % 2 else 1, 0)[place[row, text]]
            for row, text in zip(image_Q.tolist(), text_Q.tolist(), strict=True)
        ]
        return torch.tensor(values, dtype=torch.float32)

    monkeypatch.setattr("medvl.eval.matching.match_scores", fake)
    result = image_text_matching(model, loader, resamples=20)
    count, odd = len(result.samples), len(result.samples) // 2
    assert result.results.row("above_other", "all").value == pytest.approx(
        (odd + (count - odd) / 2) / count
    )
    assert result.results.row("above_mirror", "all").value == 1
    assert (
        result.results.row("above_mirror", "all").n
        == result.results.details["naming_a_side"]
        < count
    )
    assert result.results.row("accuracy", "all").value == pytest.approx(
        (odd + (count - odd) / 2) / count
    )
    assert result.results.details["without_text"] == 8 - count
    assert len([json.dumps(line) for line in result.predictions()]) == count
    page = write_matching_page(
        result, tmp_path / "page.html", PageHeader(model="m", data="d"), pixels=loader.source.pixels
    )
    assert "Own text above its mirror" in page.read_text()


def test_systems_without_pair_scores_are_refused() -> None:
    model = medvl.create_model("classifier", encoder={"name": "resnet_tiny"}, labels=["Edema"])
    with raises(ConfigError, "unsupported", "model"):
        image_text_matching(model, make_loader())


def test_a_system_that_was_not_trained_to_match_is_refused() -> None:
    model = tiny_model("medvill", tiny_tokenizer(), objective="report")
    with raises(EvaluationError, "unsupported", "model"):
        image_text_matching(model, make_loader())
    with raises(EvaluationError, "unsupported", "model"):
        reranked_retrieval(
            model,
            make_loader(),
            shortlist_model=ShortlistModel(make_model("convirt"), make_loader()),
        )
    with raises(EvaluationError, "unsupported", "model"):
        make_scorer(model, [], [], None)
    assert as_matcher(RetrievalModel.on(model)).can_match
