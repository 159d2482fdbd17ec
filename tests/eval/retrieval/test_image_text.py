"""Retrieval ranks against a naive search, with equal texts, ties, chunks and a local similarity."""

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source, text_vector
from helpers.retrieval_images import noisy_images

from medvl.errors import EvaluationError
from medvl.eval import RetrievalEval, image_text_retrieval
from medvl.eval.core.full_pass import concatenate
from medvl.eval.core.metrics import bootstrap_indices
from medvl.eval.retrieval import similarity as similarity_module
from medvl.eval.retrieval.image_text import Gallery, retrieval_ranks
from medvl.schema import Embeddings

TEXTS = [f"report {index % 20}" for index in range(50)]


def loader_of(
    texts: list[str], noise: float, batch: int = 7, patients: int | None = None
) -> FakeLoader:
    """Return images whose embeddings are their text's vector plus noise; image i is of patient i
    % `patients`.
    """
    source = make_source(np.zeros((len(texts), 0)), (), patients=patients)
    source.images = noisy_images(texts, noise)
    return FakeLoader(source, batch, texts)


def plain_ranks(loader: FakeLoader) -> tuple[list[int], list[int]]:
    """Return the ranks of the protocol, one query at a time."""
    texts = list(dict.fromkeys(loader.texts))
    images = np.stack([image[0].astype(np.float32) - 128 for image in loader.source.images])
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    similarity = images @ np.stack([text_vector(text) for text in texts]).T
    of_images, of_texts = [], []
    for row, text in zip(similarity, loader.texts, strict=True):
        own = texts.index(text)
        of_images.append(
            1 + sum(row[other] >= row[own] for other in range(len(texts)) if other != own)
        )
    for index, text in enumerate(texts):
        positive = np.array([other == text for other in loader.texts])
        best = similarity[positive, index].max()
        of_texts.append(1 + int((similarity[~positive, index] >= best).sum()))
    return of_images, of_texts


def test_ranks_equal_a_naive_search():
    loader = loader_of(TEXTS, noise=60)
    result = image_text_retrieval(FakeModel(), loader, resamples=0)
    of_images, of_texts = plain_ranks(loader)
    assert result.image_rank_N.tolist() == of_images
    assert result.text_rank_M.tolist() == of_texts
    assert max(of_images) > 5  # the task is not trivial
    row = result.results.row("recall@5", "image_to_text")
    assert (row.value, row.n) == (pytest.approx(np.mean(np.array(of_images) <= 5)), 50)
    row = result.results.row("median_rank", "text_to_image")
    assert (row.value, row.n) == (np.median(of_texts), 20)


@pytest.mark.parametrize("cached", [0, 10**9])
def test_ranks_do_not_depend_on_chunks_and_caching(monkeypatch, cached):
    reference = image_text_retrieval(FakeModel(), loader_of(TEXTS, noise=60), resamples=0)
    monkeypatch.setattr(similarity_module, "_CHUNK", 8)
    monkeypatch.setattr(similarity_module, "_CACHED_ELEMENTS", cached)
    chunked = image_text_retrieval(FakeModel(), loader_of(TEXTS, noise=60, batch=50), resamples=0)
    np.testing.assert_array_equal(chunked.image_rank_N, reference.image_rank_N)
    np.testing.assert_array_equal(chunked.text_rank_M, reference.text_rank_M)


def test_similarity_is_computed_in_chunks(monkeypatch):
    class CheckedModel(FakeModel):
        def similarity(self, images, texts):
            assert len(images) <= 8
            assert len(texts) <= 8
            return super().similarity(images, texts)

    monkeypatch.setattr(similarity_module, "_CHUNK", 8)
    image_text_retrieval(CheckedModel(), loader_of(TEXTS, noise=60), resamples=0)


def test_perfect_pairs_rank_first_and_each_image_is_encoded_once():
    model = FakeModel()
    result = image_text_retrieval(model, loader_of(TEXTS, noise=0))
    for direction in ("image_to_text", "text_to_image"):
        row = result.results.row("recall@1", direction)
        assert (row.value, row.low, row.high) == (1, 1, 1)
        assert result.results.row("median_rank", direction).value == 1
    assert model.images_encoded == 50
    assert model.texts_encoded == 20


def test_constant_similarity_gives_the_last_rank():
    class Constant(FakeModel):
        def similarity(self, images, texts):
            return torch.zeros(len(images), len(texts))

    result = image_text_retrieval(Constant(), loader_of(TEXTS, noise=0), resamples=0)
    assert set(result.image_rank_N.tolist()) == {20}
    copies = np.array([TEXTS.count(text) for text in dict.fromkeys(TEXTS)])
    np.testing.assert_array_equal(result.text_rank_M, 1 + 50 - copies)


def test_intervals_resample_patients_with_all_their_images_and_texts():
    """Ten patients: patient p has the texts p and p + 10, each with two or three images."""
    result = image_text_retrieval(
        FakeModel(), loader_of(TEXTS, noise=60, patients=10), resamples=25, seed=3
    )
    assert result.results.details["patients"] == 10
    assert [line["patient"] for line in result.predictions()] == [
        f"p{image % 10}" for image in range(50)
    ]
    for target, rank_Q in (
        ("image_to_text", result.image_rank_N),
        ("text_to_image", result.text_rank_M),
    ):
        patient_Q, recalls, medians = np.arange(len(rank_Q)) % 10, [], []
        for drawn in bootstrap_indices(10, 25, seed=3):
            queries = np.concatenate([np.flatnonzero(patient_Q == patient) for patient in drawn])
            recalls.append((rank_Q[queries] <= 5).mean())
            medians.append(np.median(rank_Q[queries]))
        row = result.results.row("recall@5", target)
        assert (row.low, row.high) == pytest.approx(tuple(np.percentile(recalls, (2.5, 97.5))))
        row = result.results.row("median_rank", target)
        assert (row.low, row.high) == pytest.approx(tuple(np.percentile(medians, (2.5, 97.5))))


def test_a_text_of_several_patients_is_of_the_patient_of_its_first_key():
    source = make_source(np.zeros((4, 0)), ())
    keys = [source.samples[row].key for row in (2, 3, 0, 1)]
    gallery = Gallery.from_texts(keys, ["normal", "effusion", "normal", "edema"], {}, source)
    assert gallery.patients == ("p2", "p3", "p0", "p1")
    assert gallery.patients_of_texts == ["p0", "p3", "p1"]


def test_the_commonest_texts_are_a_baseline_without_images():
    texts = ["rare", *["normal"] * 6, "edema", *["effusion"] * 3, "other"]
    result = image_text_retrieval(FakeModel(), loader_of(texts, noise=0), ks=(1, 2), resamples=20)
    ranks = [3, *[1] * 6, 4, *[2] * 3, 5]  # equal counts in the order of their first images
    for metric, expected in (
        ("recall@1", 6 / 12),
        ("recall@2", 9 / 12),
        ("median_rank", np.median(ranks)),
        ("mrr", np.mean([1 / rank for rank in ranks])),
    ):
        row = result.results.row(metric, "commonest_texts")
        assert (row.value, row.n) == (pytest.approx(expected), 12)
    assert row.low < row.value < row.high


@pytest.mark.real
def test_recalls_of_published_embeddings(real_data):
    """1,000 pairs of ROCO under a trained dual-encoder; figures of athulpp06/MedCLIP-Radiology-Search."""
    import safetensors.torch

    file = real_data / "retrieval_embeddings_roco/embeddings.safetensors"
    sides = safetensors.torch.load_file(file)
    images, texts = (
        Embeddings(global_NE=torch.nn.functional.normalize(sides[f"{side}_NE"].float(), dim=1))
        for side in ("image", "text")
    )
    image_rank_N, text_rank_M = retrieval_ranks(FakeModel(), images, texts, torch.arange(1000))
    recalls = [(text_rank_M <= k).mean() for k in (1, 5, 10)]
    assert recalls == [0.123, 0.329, 0.504]
    assert round((1 / text_rank_M).mean(), 4) == 0.24
    assert np.median(text_rank_M) == 10
    assert [(image_rank_N <= k).mean() for k in (1, 5, 10)] == [0.121, 0.351, 0.509]


def test_chance_equals_the_mean_over_random_orders():
    result = image_text_retrieval(
        FakeModel(), loader_of(TEXTS, noise=60), resamples=0, ks=(1, 5, 100)
    )
    chance, rng = result.results.details["chance"], np.random.default_rng(0)
    positives = [np.array([text == other for other in TEXTS]) for text in dict.fromkeys(TEXTS)]
    hits = [[positive[rng.permutation(50)[:5]].any() for positive in positives] for _ in range(500)]
    assert chance["recall@5/text_to_image"] == pytest.approx(np.mean(hits), abs=0.01)
    assert chance["recall@5/image_to_text"] == pytest.approx(5 / 20)
    assert chance["recall@100/image_to_text"] == chance["recall@100/text_to_image"] == 1


def test_empty_texts_are_left_out_and_white_space_is_collapsed():
    texts = ["a b", " a  b\n", "", "  ", "c"]
    result = image_text_retrieval(FakeModel(), loader_of(texts, noise=0), resamples=0)
    assert result.results.details["texts"] == 2
    assert result.results.details["images_without_text"] == 2
    assert [line["key"] for line in result.predictions()] == ["p-0000", "p-0001", "p-0004"]


def test_concatenated_words_are_padded_with_their_mask():
    short = Embeddings(
        torch.ones(2, 4), torch.ones(2, 3, 5), torch.tensor([[True, True, False]] * 2)
    )
    long = Embeddings(torch.ones(1, 4), torch.ones(1, 6, 5), torch.ones(1, 6, dtype=torch.bool))
    both = concatenate([short, long])
    assert both.local_NPE.shape == (3, 6, 5)
    assert both.mask_NP.sum(dim=1).tolist() == [2, 2, 6]
    assert both.local_NPE[0, 3:].abs().sum() == 0


def test_invalid_inputs_are_refused():
    with raises(EvaluationError, "out_of_range", "ks"):
        image_text_retrieval(FakeModel(), loader_of(TEXTS, 0), ks=(0,))
    with raises(EvaluationError, "empty"):
        image_text_retrieval(FakeModel(), loader_of(["same"] * 9, 0))
    model = FakeModel()
    model.scale.data.fill_(float("nan"))
    with raises(EvaluationError, "nonfinite"):
        image_text_retrieval(model, loader_of(TEXTS, 0))


def test_metrics_during_training_equal_those_of_the_protocol():
    numbers = RetrievalEval(loader_of(TEXTS, noise=60), ks=(1, 5))(FakeModel())
    results = image_text_retrieval(
        FakeModel(), loader_of(TEXTS, noise=60), ks=(1, 5), resamples=0
    ).results
    assert numbers == {f"retrieval/{row.name}": row.value for row in results.rows}
    assert "retrieval/recall@5/image_to_text" in numbers
