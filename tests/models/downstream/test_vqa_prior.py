"""A prior of questions: the regression against its formula, training without the own question, and
the VQA model that starts from it.
"""

from pathlib import Path

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, make_batch, tiny_model
from torch import Tensor

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError
from medvl.models import VQA, load, save
from medvl.models.downstream.vqa.decoder import VQAConfig
from medvl.models.downstream.vqa.prior import QuestionPrior, _counts

ANSWERS = ("yes", "no", "left")
IDS = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0], [2, 7, 8, 3], [2, 8, 7, 3], [2, 7, 9, 3]])
MASK = IDS > 0
CHOSEN = [0, 1, 1, 2, 0]
TARGET = torch.eye(3)[CHOSEN]


def ridge(rows_NT: Tensor, target_NV: Tensor, asked_MT: Tensor) -> Tensor:
    """Return the scores of a regression with centred counts and a penalty of 1."""
    counts_NH = _counts(rows_NT, rows_NT > 0).double()
    mean_H, mean_V = counts_NH.mean(dim=0), target_NV.double().mean(dim=0)
    gram_NN = (counts_NH - mean_H) @ (counts_NH - mean_H).T + torch.eye(len(rows_NT))
    dual_NV = torch.linalg.solve(gram_NN, target_NV.double() - mean_V)
    asked_MH = _counts(asked_MT, asked_MT > 0).double() - mean_H
    return (asked_MH @ (counts_NH - mean_H).T @ dual_NV + mean_V).float()


def fitted() -> QuestionPrior:
    prior = QuestionPrior(3)
    prior.fit(IDS, MASK, CHOSEN)
    return prior


def test_scores_are_those_of_the_regression_and_of_one_without_the_own_question() -> None:
    prior = fitted()
    expected = ridge(IDS, TARGET, IDS).clamp(1e-3, 1 - 1e-3).logit()
    torch.testing.assert_close(prior(IDS, MASK), expected, rtol=1e-3, atol=1e-3)
    own = prior(IDS, MASK, TARGET)
    # The intercept is not penalised, so that the centre of the counts does not matter.
    counts_NH = _counts(IDS, MASK).double()
    counts_NH = counts_NH[:, counts_NH.any(dim=0)]  # columns without a word have weights of 0
    centred_NH = torch.cat([counts_NH - counts_NH.mean(dim=0), torch.ones(5, 1)], dim=1)
    penalty = torch.eye(centred_NH.shape[1]).double()
    penalty[-1, -1] = 0
    for row in range(5):
        others = [n for n in range(5) if n != row]
        part_NH = centred_NH[others]
        weight = torch.linalg.solve(
            part_NH.T @ part_NH + penalty, part_NH.T @ TARGET[others].double()
        )
        score_V = (centred_NH[row] @ weight).float().clamp(1e-3, 1 - 1e-3)
        torch.testing.assert_close(own[row], score_V.logit(), rtol=1e-3, atol=1e-3)
    longer = torch.nn.functional.pad(IDS, (0, 2))
    torch.testing.assert_close(prior(longer, longer > 0, TARGET), own)
    torch.testing.assert_close(prior(IDS, MASK, 0 * TARGET), prior(IDS, MASK))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece([*TEXTS, *ANSWERS], vocab_size=200, min_frequency=1)


def vqa(tokenizer: Tokenizer, name: str = "m3ae", **settings: bool) -> VQA:
    pairs = list(zip(TEXTS, ("yes", "no", "elsewhere", "left"), strict=False))
    model = tiny_model(name, tokenizer)
    return VQA.on(model, ANSWERS, question_prior=pairs, **settings)


def test_a_model_starts_from_the_prior_and_learns_what_it_lacks(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = vqa(tokenizer, frozen_encoders=True)
    batch = make_batch(tokenizer, 4, labels_BL=TARGET[:4])
    assert model.question_prior is not None
    prior_BV = model.question_prior(batch.ids_BT, batch.mask_BT)
    own_BV = model.question_prior(batch.ids_BT, batch.mask_BT, TARGET[:4])
    model.eval()
    torch.testing.assert_close(model.answer_logits(batch), prior_BV)
    assert model.predict(batch).answers == [ANSWERS[place] for place in prior_BV.argmax(dim=1)]
    model.train()
    loss = model(batch).total
    torch.testing.assert_close(loss, losses.vqa_bce(own_BV, TARGET[:4]))
    loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any(name.startswith("answer_head.") for name in trained)
    assert not [name for name in trained if "image_encoder" in name or "text_encoder" in name]
    model.eval()
    save(model, tmp_path)
    torch.testing.assert_close(load(tmp_path).answer_logits(batch), prior_BV)


def test_heads_and_systems_without_it_are_refused(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "conflict", "question_prior"):
        VQAConfig(fusion="m3ae", answers=ANSWERS, head="ranking", question_prior=True)
    with raises(ConfigError, "unsupported", "frozen_encoders"):
        vqa(tokenizer, "visualbert", frozen_encoders=True)
    with raises(ConfigError, "empty", "question_prior"):
        VQA.on(tiny_model("m3ae", tokenizer), ANSWERS, question_prior=[("where?", "elsewhere")])
