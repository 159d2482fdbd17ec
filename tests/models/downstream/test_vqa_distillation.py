"""Momentum distillation of the answer decoder: its moving average, its share of the loss, and
its checkpoints.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, make_batch, shaken, tiny_model

import medvl
from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError
from medvl.models import VQA, save
from medvl.models.downstream.vqa.decoder import DecoderConfig
from medvl.schema import Batch

ANSWERS = ("yes", "no", "left effusion", "right lower lobe")
DECODER = DecoderConfig(
    layers=2, heads=2, intermediate=64, dropout=0.0, max_tokens=16, alpha=0.4, momentum=0.9
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece([*TEXTS, *ANSWERS], vocab_size=200, min_frequency=1)


def distilled(
    tokenizer: Tokenizer, name: str = "albef", head: Any = "ranking", **changes: Any
) -> VQA:
    model = VQA.on(
        tiny_model(name, tokenizer),
        ANSWERS,
        head=head,
        decoder=dataclasses.replace(DECODER, **changes),
    )
    shaken(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def answered_batch(tokenizer: Tokenizer) -> Batch:
    return make_batch(tokenizer, 4, labels_BL=torch.eye(4))


def teacher_of(model: VQA) -> Any:
    assert model.momentum is not None
    return model.momentum.module


def test_average_starts_as_a_copy_follows_slowly_and_is_not_trained(tokenizer: Tokenizer) -> None:
    model, batch = distilled(tokenizer), answered_batch(tokenizer)
    with raises(ConfigError, "missing", "before_step"):
        model(batch)
    model.before_step(0)
    mine, average = (
        model.answer_head.decoder.words.weight,
        teacher_of(model).answer_head.decoder.words.weight,
    )
    assert torch.equal(mine, average)
    assert mine.data_ptr() != average.data_ptr()
    first = mine.detach().clone()
    with torch.no_grad():
        mine.add_(1.0)
    model.before_step(1)
    torch.testing.assert_close(average, first + 0.1)
    model(batch).total.backward()
    assert not any(parameter.requires_grad for parameter in teacher_of(model).parameters())
    assert mine.grad is not None
    trained = {
        id(parameter)
        for group in model.parameter_groups(1e-3, 0.0)
        for parameter in group["params"]
    }
    assert not trained & {id(parameter) for parameter in teacher_of(model).parameters()}


@pytest.mark.parametrize("name", ["albef", "m3ae"])
def test_loss_has_the_teachers_share_in_training_alone(name: str, tokenizer: Tokenizer) -> None:
    model, batch = distilled(tokenizer, name, ramp_steps=4), answered_batch(tokenizer)
    for step in range(3):  # alpha is 0.4 * 2 / 4
        model.before_step(step)
    with torch.no_grad():
        shaken(model.fusion_model)
    model.eval()
    with torch.no_grad():
        teacher = teacher_of(model)
        teacher_NV, *_ = teacher.answer_head.score_targets(
            teacher.fusion_model.features(batch), batch.labels_BL
        )
        scores = model.answer_head.score_targets(
            model.fusion_model.features(batch), batch.labels_BL
        )
        plain = losses.answer_words(*scores, 4)
        expected = losses.answer_words(*scores, 4, teacher_NV, 0.2)
        assert abs(float(plain - expected)) > 1e-3
        torch.testing.assert_close(model(batch).total, plain)
        model.training = True  # only the model itself: no dropout
        torch.testing.assert_close(model(batch).total, expected)


def test_checkpoints_keep_the_average_and_other_heads_have_none(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = distilled(tokenizer)
    model.before_step(0)
    model.before_step(1)
    save(model.eval(), tmp_path)
    loaded = medvl.load(tmp_path)
    assert isinstance(loaded, VQA)
    assert int(loaded.momentum.n_averaged) == 2
    assert loaded.state_dict().keys() == model.state_dict().keys()
    batch = answered_batch(tokenizer)
    with torch.no_grad():
        torch.testing.assert_close(loaded.answer_logits(batch), model.answer_logits(batch))
    assert distilled(tokenizer, head="classifier").momentum is None
    assert distilled(tokenizer, alpha=0.0).momentum is None
    with raises(ConfigError, "out_of_range", "alpha"):
        dataclasses.replace(DECODER, alpha=1.0)
