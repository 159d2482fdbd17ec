"""Examples of a retrieval (nearest candidates, similarities, principal components) and its page."""

import base64
import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers.eval_fakes import FakeLoader, FakeModel, make_source, text_vector
from helpers.retrieval_images import noisy_images, unit_images
from PIL import Image

from medvl.eval import write_retrieval_page
from medvl.eval.core.results import PageHeader
from medvl.eval.html import plots
from medvl.eval.retrieval.image_text import (
    RetrievalExamples,
    RetrievalResult,
    image_text_retrieval,
    principal_plane,
)

TEXTS = [f"report <{index % 12}>" for index in range(30)]


def loader_of(noise: float) -> FakeLoader:
    source = make_source(np.zeros((len(TEXTS), 0)), ())
    source.images = noisy_images(TEXTS, noise)
    return FakeLoader(source, texts=TEXTS)


@pytest.fixture(scope="module")
def result() -> RetrievalResult:
    return image_text_retrieval(FakeModel(), loader_of(60), resamples=20, examples=2)


@pytest.fixture(scope="module")
def examples(result: RetrievalResult) -> RetrievalExamples:
    assert result.examples is not None
    return result.examples


def test_examples_equal_a_naive_search(
    result: RetrievalResult, examples: RetrievalExamples
) -> None:
    similarity = (
        unit_images(loader_of(60)) @ np.stack([text_vector(text) for text in examples.texts]).T
    )
    assert len(examples.image_queries) == len(examples.text_queries) == 2
    for query in examples.image_queries:
        assert list(query.candidates) == np.argsort(-similarity[query.query])[:6].tolist()
        assert query.similarities == pytest.approx(
            np.sort(similarity[query.query])[::-1][:6], abs=1e-5
        )
        own = int(examples.text_of_N[query.query])
        assert (own in query.candidates) == (result.image_rank_N[query.query] <= 6)
    for query in examples.text_queries:
        assert list(query.candidates) == np.argsort(-similarity[:, query.query])[:6].tolist()
    assert examples.similarity_KK.shape == (8, 8)


def test_matrix_has_own_texts_on_the_diagonal_and_distinct_queries() -> None:
    examples = image_text_retrieval(FakeModel(), loader_of(0), resamples=0, examples=2).examples
    assert examples is not None
    assert (examples.similarity_KK.argmax(axis=1) == np.arange(8)).all()
    np.testing.assert_allclose(np.diag(examples.similarity_KK), 1, atol=1e-2)
    assert len({query.query for query in examples.text_queries}) == 2


def test_examples_do_not_change_results_and_are_off_by_default(result: RetrievalResult) -> None:
    plain = image_text_retrieval(FakeModel(), loader_of(60), resamples=20)
    assert plain.examples is None
    assert plain.results == result.results


def test_principal_plane_equals_scikit_learn(examples: RetrievalExamples) -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    x_ND = np.random.default_rng(0).normal(size=(50, 7)) * np.arange(1, 8)
    plane_N2, variance = principal_plane(x_ND)
    pca = decomposition.PCA(2).fit(x_ND)
    expected_N2 = pca.transform(x_ND)
    for actual_N, expected_N in zip(plane_N2.T, expected_N2.T, strict=True):
        assert abs(np.corrcoef(actual_N, expected_N)[0, 1]) == pytest.approx(1)
    np.testing.assert_allclose(np.abs(plane_N2), np.abs(expected_N2))
    assert variance == pytest.approx(tuple(pca.explained_variance_ratio_))
    np.testing.assert_allclose(
        principal_plane(-x_ND)[0], -plane_N2
    )  # the sign of a component does not depend on the data's sign
    assert examples.image_N2.shape == (30, 2)
    assert examples.text_M2.shape == (12, 2)


def test_principal_plane_of_equal_or_collinear_points() -> None:
    plane_N2, variance = principal_plane(np.ones((4, 3)))
    assert not plane_N2.any()
    assert list(variance) == [0, 0]
    plane_N2, variance = principal_plane(np.arange(4.0)[:, None])
    assert plane_N2.shape == (4, 2)
    assert list(variance) == [1, 0]


@pytest.mark.usefixtures("drawn_plots")
def test_plots_are_valid_images(examples: RetrievalExamples) -> None:
    points = {"images": examples.image_N2, "none": np.zeros((0, 2))}
    colors = {"images": plots.LINE_COLOR, "none": plots.GREY}
    drawn = [
        plots.matrix_plot("m", examples.similarity_KK, "text", "image"),
        plots.points_plot("p", points, colors, ["a", "b"]),
    ]
    for plot in drawn:
        assert plot.pdf.startswith(b"%PDF")
        (image, *_) = re.findall(
            rb'base64,([^"]+)"', plot.svg
        )  # the matrix and the points are an image within the plot
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGBA"))
        assert min(pixels.shape[:2]) > 200
        assert len(np.unique(pixels.reshape(-1, 4), axis=0)) > 5


def test_page_shows_queries_and_candidates_and_escapes_texts(
    result: RetrievalResult, tmp_path: Path
) -> None:
    def labels(key: str) -> Mapping[str, int]:
        return {"Edema": int(key[-1]) % 2, "Fracture": -1}

    path = write_retrieval_page(
        result,
        tmp_path / "index.html",
        PageHeader(model="fake", data="phantom", date="2026-01-01"),
        pixels=lambda key: np.full((30, 40), 90, np.uint8),
        labels=labels,
    )
    html = path.read_text(encoding="utf-8")
    plots, images = (
        re.findall(rf'src="data:image/{kind};base64,([^"]+)"', html)
        for kind in (r"svg\+xml", "jpeg")
    )
    assert len(plots) == 3  # the matrix, images and texts, Edema; no image is positive for Fracture
    assert len(images) == 2 + 2 * 6
    assert Image.open(io.BytesIO(base64.b64decode(images[0]))).size == (40, 30)
    for word in (
        "report &lt;",
        "recall@5, image to text",
        "Texts retrieved by images",
        "Images retrieved by texts",
        "Edema",
    ):
        assert word in html
    assert "report <" not in html
    bare = write_retrieval_page(
        result, tmp_path / "bare.html", PageHeader(model="fake", data="phantom")
    ).read_text()
    assert "data:image/jpeg" not in bare


def test_bars_are_scaled_to_similarities_above_one(
    result: RetrievalResult, examples: RetrievalExamples, tmp_path: Path
) -> None:
    """GLoRIA's similarities reach 3."""
    first, *others = examples.image_queries
    values = tuple(3.0 / (index + 1) for index in range(len(first.candidates)))
    higher = dataclasses.replace(
        examples, image_queries=(dataclasses.replace(first, similarities=values), *others)
    )
    shown = dataclasses.replace(result, examples=higher)
    page = write_retrieval_page(
        shown,
        tmp_path / "index.html",
        PageHeader(model="m", data="d"),
        pixels=lambda key: np.zeros((8, 8), np.uint8),
    ).read_text()
    for text in ('width="100.0" height="5"', ">3.00<", 'width="50.0" height="5"', ">1.50<"):
        assert text in page
