"""nDCG by the agreement of labels and MRR, against their formulas written out."""

import math
from pathlib import Path

import numpy as np
import pytest
from helpers.eval_fakes import FakeLoader, FakeModel, make_source, text_vector
from helpers.retrieval_images import noisy_images

from medvl.eval import image_text_retrieval, write_retrieval_page
from medvl.eval.core.results import PageHeader
from medvl.eval.retrieval import similarity as similarity_module
from medvl.eval.retrieval.similarity import relevance

NAMES = ("A", "B", "C")
TEXTS = [f"report {index % 40}" for index in range(60)]


def labeled_loader(noise: float = 60) -> FakeLoader:
    labels_NL = (np.random.default_rng(3).random((len(TEXTS), 3)) < 0.3).astype(float)
    source = make_source(labels_NL, NAMES)
    source.images = noisy_images(TEXTS, noise)
    return FakeLoader(source, 7, TEXTS)


def agreement(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0


def ndcg(scores: list[float], relevances: list[float], k: int) -> float:
    ranked = sorted(zip(scores, relevances, strict=True), key=lambda pair: (-pair[0], pair[1]))
    gain = sum(value / math.log2(rank + 2) for rank, (_, value) in enumerate(ranked[:k]))
    return gain / sum(
        value / math.log2(rank + 2)
        for rank, value in enumerate(sorted(relevances, reverse=True)[:k])
    )


def test_gains_and_reciprocal_ranks_match_their_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity_module, "_CHUNK", 16)
    loader = labeled_loader()
    result = image_text_retrieval(FakeModel(), loader, resamples=20)
    images = np.stack([image[0].astype(np.float32) - 128 for image in loader.source.images])
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    texts = list(dict.fromkeys(TEXTS))
    similarity = images @ np.stack([text_vector(text) for text in texts]).T
    found = [
        {name for name, value in sample.labels.items() if value == 1}
        for sample in loader.source.samples
    ]
    of_text = [
        set().union(*(one for one, other in zip(found, TEXTS, strict=True) if other == text))
        for text in texts
    ]
    for k in (1, 100):
        of_images = [
            ndcg(row.tolist(), [agreement(a, b) for b in of_text], k)
            for row, a in zip(similarity, found, strict=True)
        ]
        of_texts = [
            ndcg(row.tolist(), [agreement(a, b) for b in found], k)
            for row, a in zip(similarity.T, of_text, strict=True)
        ]
        for target, values in (("image_to_text", of_images), ("text_to_image", of_texts)):
            row = result.results.row(f"ndcg@{k}", target)
            assert row.value == pytest.approx(np.mean(values))
            assert row.low <= row.value <= row.high
            assert result.results.details["chance"][f"ndcg@{k}/{target}"] < row.value
    assert result.results.row("mrr", "image_to_text").value == pytest.approx(
        np.mean(1 / result.image_rank_N)
    )
    assert result.results.row("mrr", "text_to_image").value == pytest.approx(
        np.mean(1 / result.text_rank_M)
    )


def test_a_random_order_has_the_gain_of_chance() -> None:
    """Constant similarities are no random order: among equal ones the less relevant comes first."""
    loader = labeled_loader(noise=1e4)
    result = image_text_retrieval(FakeModel(), loader, resamples=0).results
    for target in ("image_to_text", "text_to_image"):
        assert result.row("ndcg@100", target).value == pytest.approx(
            result.details["chance"][f"ndcg@100/{target}"], abs=0.06
        )


def test_relevance_is_the_jaccard_index_and_one_without_findings() -> None:
    first = np.array([[1, 1, 0], [0, 0, 0]], bool)
    second = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
    np.testing.assert_allclose(relevance(first, second), [[1 / 3, 0, 1], [0, 1, 0]])


def test_data_without_labels_has_no_gains(tmp_path: Path) -> None:
    source = make_source(np.zeros((len(TEXTS), 0)), ())
    source.images = noisy_images(TEXTS, 60)
    metrics = {
        row.metric
        for row in image_text_retrieval(
            FakeModel(), FakeLoader(source, 7, TEXTS), resamples=0
        ).results.rows
    }
    assert "mrr" in metrics
    assert not {"ndcg@1", "ndcg@100"} & metrics
    page = write_retrieval_page(
        image_text_retrieval(FakeModel(), labeled_loader(), resamples=5),
        tmp_path / "page.html",
        PageHeader(model="m", data="d"),
    ).read_text()
    assert "nDCG@100" in page
    assert "MRR" in page
