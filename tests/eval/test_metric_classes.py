"""torchmetrics classes: the evaluators' numbers, in one process and over two."""

import numpy as np
import pytest
import torch
from helpers import metric_ranks
from helpers.errors import raises
from helpers.metric_ranks import NAMES, TEXTS, batches, compute
from helpers.two_ranks import on_two_ranks

from medvl.errors import EvaluationError
from medvl.eval import (
    LabelMetrics,
    LabelPolicy,
    RetrievalMetrics,
    bootstrap_auroc,
    bootstrap_average_precision,
)
from medvl.eval.core.metrics import DecisionColumn, ProbabilityColumn
from medvl.eval.retrieval.image_text import retrieval_ranks
from medvl.schema import Embeddings


def columns() -> list[torch.Tensor]:
    return [torch.cat([batch[column] for batch in batches()]) for column in range(4)]


def test_label_metrics_are_those_of_the_evaluators() -> None:
    scores, labels, *_ = columns()
    resolved = LabelPolicy().resolve(labels.double().numpy(), NAMES).labels_NL
    scores_NL = scores.double().numpy()
    values = compute()
    auroc_L, _, _ = bootstrap_auroc(scores_NL, resolved, resamples=10)
    precision_L, _, _ = bootstrap_average_precision(scores_NL, resolved, resamples=10)
    once = np.ones((len(scores_NL), 1))
    for index, name in enumerate(NAMES):
        assert values[f"auroc/{name}"].item() == pytest.approx(auroc_L[index])
        assert values[f"average_precision/{name}"].item() == pytest.approx(precision_L[index])
        decided = DecisionColumn(scores_NL[:, index] >= 0.5, resolved[:, index]).metrics_RK(once)[0]
        assert values[f"f1/{name}"].item() == pytest.approx(decided[0])
        brier = ProbabilityColumn(scores_NL[:, index], resolved[:, index]).metrics_RK(once)[0, 0]
        assert values[f"brier/{name}"].item() == pytest.approx(brier)
    assert values["auroc/macro"].item() == pytest.approx(np.nanmean(auroc_L))


def test_retrieval_metrics_are_those_of_the_evaluator() -> None:
    _, _, images, of_text = columns()
    texts, text_of_N = of_text[:11], torch.arange(20) % 11

    class Cosine:
        def similarity(self, one: Embeddings, other: Embeddings) -> torch.Tensor:
            return one.global_NE @ other.global_NE.T

    image_rank_N, text_rank_M = retrieval_ranks(
        Cosine(), Embeddings(images), Embeddings(texts), text_of_N
    )
    values = compute()
    assert values["recall@1/image_to_text"].item() == pytest.approx((image_rank_N <= 1).mean())
    assert values["recall@5/text_to_image"].item() == pytest.approx((text_rank_M <= 5).mean())
    assert values["mrr/image_to_text"].item() == pytest.approx((1 / image_rank_N).mean())
    assert values["median_rank/text_to_image"].item() == pytest.approx(np.median(text_rank_M))
    metrics = RetrievalMetrics()
    for _, _, image_BE, text_BE, names in reversed(batches()):
        metrics.update(
            3 * image_BE, 0.5 * text_BE, [f" {name} \n" for name in names]
        )  # lengths, order, white space
    assert metrics.compute()["recall@1/image_to_text"] == values["recall@1/image_to_text"]


def test_images_without_text_are_left_out() -> None:
    metrics, images = RetrievalMetrics(ks=(1,)), torch.eye(5)
    metrics.update(images, images, ["one", "", "two", " \n", "three"])
    metrics.update(images[:2], images[:2], ["", ""])
    assert {name: value.item() for name, value in metrics.compute().items()} == dict.fromkeys(
        metrics.compute(), 1.0
    )


def test_a_label_without_a_threshold_has_no_decisions() -> None:
    metrics = LabelMetrics(
        ["Edema", "Fracture"], thresholds={"Edema": 0.5, "Fracture": float("nan")}
    )
    metrics.update(torch.tensor([[0.9, 0.8], [0.1, 0.2]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    values = metrics.compute()
    assert "f1/Fracture" not in values
    assert values["f1/Edema"] == values["f1/macro"] == values["auroc/Fracture"] == 1


def test_two_processes_give_the_values_of_one() -> None:
    expected = compute()
    for values in on_two_ranks(metric_ranks.compute_on_this_rank):
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, equal_nan=True, msg=name)


def test_reset_and_bad_input() -> None:
    metrics = LabelMetrics(NAMES)
    metrics.update(torch.rand(4, 3), torch.ones(4, 3))
    assert metrics.compute()["auroc/Edema"].isnan()
    metrics.reset()
    with raises(EvaluationError, "empty"), pytest.warns(UserWarning, match="before the"):
        metrics.compute()
    with raises(EvaluationError, "mismatch", "scores"):
        metrics.update(torch.rand(4, 2), torch.ones(4, 3))
    metrics.reset()
    metrics.update(torch.full((4, 3), torch.nan), torch.ones(4, 3))
    with raises(EvaluationError, "nonfinite", "scores"):
        metrics.compute()
    with raises(EvaluationError, "missing", "thresholds"):
        LabelMetrics(NAMES, thresholds={"Edema": 0.5})
    with raises(EvaluationError, "conflict", "names"):
        LabelMetrics(["Edema", "Edema"])
    retrieval = RetrievalMetrics()
    with raises(EvaluationError, "mismatch", "texts"):
        retrieval.update(torch.rand(4, 2), torch.rand(4, 2), TEXTS[:3])
    retrieval.update(torch.rand(4, 2), torch.rand(4, 2), ["same"] * 4)
    with raises(EvaluationError, "empty"):
        retrieval.compute()
    with raises(EvaluationError, "out_of_range", "ks"):
        RetrievalMetrics(ks=(0,))
