"""GLoRIA's published zero-shot scoring: phrases, similarity and standardised scores."""

import dataclasses
import itertools
import json
import random
from collections.abc import Sequence

import numpy as np
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval import load_prompts, zero_shot
from medvl.eval.zero_shot_classification.prompts import _FOLDER
from medvl.eval.zero_shot_classification.protocol import predict
from medvl.schema import COMPETITION_FINDINGS, Embeddings

PUBLISHED = "gloria_published"


class Published(FakeModel):
    """Fake dual-encoder with a second similarity that is scaled per text, by the number of its
    characters.
    """

    def published_prompts(self, texts: Sequence[str]) -> Embeddings:
        return Embeddings(
            self.embed_texts(texts).global_NE * torch.tensor([[len(text)] for text in texts])
        )

    def published_similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        similarity_NM: Tensor = self.similarity(images, texts)
        return similarity_NM * torch.arange(1, similarity_NM.shape[1] + 1) - 7


def test_gloria_has_471_distinct_phrases_and_draws_five_a_class() -> None:
    everything = load_prompts("gloria_all")
    assert [len(sides.positive) for sides in everything.classes.values()] == [210, 15, 192, 18, 36]
    assert len(everything.texts()) == 471
    assert everything.scoring == "gloria_best_word"
    for name, sides in load_prompts(PUBLISHED).classes.items():
        assert {text.strip() for text in sides.positive} <= set(everything.classes[name].positive)


def test_gloria_mean_has_the_phrases_for_any_dual_encoder() -> None:
    mean = load_prompts("gloria_mean")
    assert mean.classes == load_prompts("gloria_all").classes
    assert (mean.scoring, mean.ensemble) == ("class_softmax", "similarity_mean")
    source = make_source(np.eye(5).repeat(2, axis=0), tuple(mean.classes))
    (scores_NL,) = predict(FakeModel(), FakeLoader(source), [mean]).scores_NL
    assert scores_NL.shape == (10, 5)


def test_the_published_phrases_are_the_draw_of_seed_6() -> None:
    """As `random.sample` draws them from the phrases with their blanks; bilateral effusions are
    listed twice.
    """
    rng, drawn = random.Random(6), {}
    for name, content in json.loads((_FOLDER / "gloria_all.json").read_text())["classes"].items():
        phrases = content["positive"]
        lists = phrases["parts"] if isinstance(phrases, dict) else [[""], phrases, [""]]
        if name == "Pleural Effusion":
            lists[2].append(lists[2][0])
        if name == "Edema":
            lists.append([""])
        drawn[name] = rng.sample([" ".join(texts) for texts in itertools.product(*lists)], 5)
    assert {
        name: list(sides.positive) for name, sides in load_prompts(PUBLISHED).classes.items()
    } == drawn


def test_gloria_prompts_have_five_phrases_per_class() -> None:
    classes = load_prompts(PUBLISHED).classes
    assert tuple(classes) == COMPETITION_FINDINGS
    assert all(len(set(sides.positive)) == 5 and not sides.negative for sides in classes.values())


@torch.no_grad()
def test_gloria_scores_are_standardised_maxima_over_phrases() -> None:
    source = make_source(np.eye(5)[np.arange(40) % 5], COMPETITION_FINDINGS)
    model, prompts = Published(), load_prompts(PUBLISHED)
    found_NL = predict(model, FakeLoader(source), [prompts]).scores_NL[0]
    model.eval()
    texts = model.published_prompts(prompts.texts())
    images = [model.embed_images(batch.image_BCHW) for batch in FakeLoader(source)]
    similarity_NM = torch.cat([model.published_similarity(part, texts) for part in images]).double()
    best_NL = similarity_NM.unflatten(1, (5, 5)).amax(dim=2)
    expected_NL = (best_NL - best_NL.mean(dim=0)) / best_NL.std(dim=0, correction=0)
    np.testing.assert_allclose(found_NL, expected_NL.numpy(), rtol=1e-5, atol=1e-6)


def test_gloria_scoring_is_recorded_and_gives_top1_accuracy() -> None:
    source = make_source(np.eye(5)[np.arange(40) % 5], COMPETITION_FINDINGS)
    results = zero_shot(Published(), FakeLoader(source), PUBLISHED, resamples=5).results
    assert results.config["prompts"]["scoring"] == "gloria_published"
    metrics = {row.metric for row in results.rows}
    assert {"auroc", "top1_accuracy"} <= metrics
    assert "brier" not in metrics  # a standardised score is no probability


def test_gloria_scoring_rejects_other_models_and_single_images() -> None:
    source = make_source(np.eye(5)[np.arange(10) % 5], COMPETITION_FINDINGS)
    with raises(EvaluationError, "unsupported", "prompts"):
        predict(FakeModel(), FakeLoader(source), [load_prompts(PUBLISHED)])
    single = make_source(np.eye(5)[:1], COMPETITION_FINDINGS)
    with raises(EvaluationError, "empty"):
        predict(Published(), FakeLoader(single), [load_prompts(PUBLISHED)])
    with raises(EvaluationError, "unsupported", "prompts"):
        predict(FakeModel(), FakeLoader(source), [load_prompts("gloria_all")])
    assert not load_prompts(PUBLISHED).gives_probabilities
    with raises(EvaluationError, "malformed", "classes"):
        dataclasses.replace(load_prompts(PUBLISHED)).select(["Edema"])
