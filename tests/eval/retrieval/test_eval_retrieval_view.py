"""Pictures of a retrieval: what queries found, what belongs together on the diagonal, the plane, the page."""

import base64
import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers.eval_fakes import WIDTH, FakeLoader, FakeModel, make_source, text_vector
from PIL import Image

from medvl.eval import write_retrieval_page
from medvl.eval.html import plots
from medvl.eval.retrieval.examples import RetrievalView, main_plane
from medvl.eval.retrieval.image_text import RetrievalResult, image_text_retrieval

TEXTS = [f"report <{index % 12}>" for index in range(30)]


def loader_of(noise: float) -> FakeLoader:
    rng = np.random.default_rng(0)
    source = make_source(np.zeros((len(TEXTS), 0)), ())
    source.images = [
        np.clip(128 + 100 * text_vector(text) + noise * rng.normal(size=WIDTH), 0, 255).astype(np.uint8)[None]
        for text in TEXTS
    ]
    return FakeLoader(source, texts=TEXTS)


@pytest.fixture(scope="module")
def result() -> RetrievalResult:
    return image_text_retrieval(FakeModel(), loader_of(60), resamples=20, examples=2)


@pytest.fixture(scope="module")
def view(result: RetrievalResult) -> RetrievalView:
    assert result.view is not None
    return result.view


def unit_images() -> np.ndarray:
    images = np.stack([image[0].astype(np.float64) - 128 for image in loader_of(60).source.images])
    return images / np.linalg.norm(images, axis=1, keepdims=True)


def test_queries_show_what_a_plain_search_finds(result: RetrievalResult, view: RetrievalView) -> None:
    similarity = unit_images() @ np.stack([text_vector(text) for text in view.texts]).T
    assert len(view.of_images) == len(view.of_texts) == 2
    for found in view.of_images:
        assert list(found.candidates) == np.argsort(-similarity[found.query])[:6].tolist()
        assert found.similarities == pytest.approx(np.sort(similarity[found.query])[::-1][:6], abs=1e-5)
        own = int(view.text_of_N[found.query])
        assert (own in found.candidates) == (result.image_rank_N[found.query] <= 6)
    for found in view.of_texts:
        assert list(found.candidates) == np.argsort(-similarity[:, found.query])[:6].tolist()
    assert view.similarity_KK.shape == (8, 8)


def test_the_diagonal_is_what_belongs_together_and_each_text_stands_once() -> None:
    view = image_text_retrieval(FakeModel(), loader_of(0), resamples=0, examples=2).view
    assert view is not None
    assert (view.similarity_KK.argmax(axis=1) == np.arange(8)).all()
    np.testing.assert_allclose(np.diag(view.similarity_KK), 1, atol=1e-2)
    assert len({found.query for found in view.of_texts}) == 2


def test_looking_changes_no_number_and_is_off_by_default(result: RetrievalResult) -> None:
    plain = image_text_retrieval(FakeModel(), loader_of(60), resamples=20)
    assert plain.view is None
    assert plain.results == result.results


def test_the_plane_is_that_of_scikit_learns_pca(view: RetrievalView) -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    x_ND = np.random.default_rng(0).normal(size=(50, 7)) * np.arange(1, 8)
    plane_N2, spread = main_plane(x_ND)
    pca = decomposition.PCA(2).fit(x_ND)
    expected_N2 = pca.transform(x_ND)
    for ours_N, theirs_N in zip(plane_N2.T, expected_N2.T, strict=True):
        assert abs(np.corrcoef(ours_N, theirs_N)[0, 1]) == pytest.approx(1)
    np.testing.assert_allclose(np.abs(plane_N2), np.abs(expected_N2))
    assert spread == pytest.approx(tuple(pca.explained_variance_ratio_))
    np.testing.assert_allclose(main_plane(-x_ND)[0], -plane_N2)  # the directions do not turn with the data
    assert view.image_N2.shape == (30, 2)
    assert view.text_M2.shape == (12, 2)


def test_a_plane_of_points_that_are_all_the_same_or_on_a_line_is_no_error() -> None:
    plane_N2, spread = main_plane(np.ones((4, 3)))
    assert not plane_N2.any()
    assert list(spread) == [0, 0]
    plane_N2, spread = main_plane(np.arange(4.0)[:, None])
    assert plane_N2.shape == (4, 2)
    assert list(spread) == [1, 0]


def test_plots_are_whole_pictures(view: RetrievalView) -> None:
    points = {"images": view.image_N2, "none": np.zeros((0, 2))}
    colors = {"images": plots.LINE_COLOR, "none": plots.GREY}
    pngs = [plots.matrix_plot(view.similarity_KK, "text", "image"), plots.points_plot(points, colors, ["a", "b"])]
    for png in pngs:
        pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        assert pixels.shape[0] > 400
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


def test_the_page_shows_queries_their_finds_and_escapes_texts(result: RetrievalResult, tmp_path: Path) -> None:
    def labels(key: str) -> Mapping[str, int]:
        return {"Edema": int(key[-1]) % 2, "Fracture": -1}

    path = write_retrieval_page(
        result,
        tmp_path / "index.html",
        model="fake",
        data="phantom",
        date="2026-01-01",
        pixels=lambda key: np.full((30, 40), 90, np.uint8),
        labels=labels,
    )
    html = path.read_text(encoding="utf-8")
    plots, images = (re.findall(rf'src="data:image/{kind};base64,([^"]+)"', html) for kind in ("png", "jpeg"))
    assert len(plots) == 3  # the matrix, both sides, Edema; of Fracture nobody is known to have one
    assert len(images) == 2 + 2 * 6
    assert Image.open(io.BytesIO(base64.b64decode(images[0]))).size == (40, 30)
    for word in (
        "report &lt;",
        "recall@5, image to text",
        "Texts that images found",
        "Images that texts found",
        "Edema",
    ):
        assert word in html
    assert "report <" not in html
    bare = write_retrieval_page(result, tmp_path / "bare.html", model="fake", data="phantom").read_text()
    assert "data:image/jpeg" not in bare


def test_similarities_beyond_a_cosine_are_written_as_they_are(
    result: RetrievalResult, view: RetrievalView, tmp_path: Path
) -> None:
    """GLoRIA's reach 3: bars are drawn in proportion to the highest."""
    first, *others = view.of_images
    values = tuple(3.0 / (place + 1) for place in range(len(first.candidates)))
    higher = dataclasses.replace(view, of_images=(dataclasses.replace(first, similarities=values), *others))
    shown = dataclasses.replace(result, view=higher)
    page = write_retrieval_page(
        shown, tmp_path / "index.html", model="m", data="d", pixels=lambda key: np.zeros((8, 8), np.uint8)
    ).read_text()
    for text in ('width="100.0" height="5"', ">3.00<", 'width="50.0" height="5"', ">1.50<"):
        assert text in page
