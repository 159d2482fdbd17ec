"""MUMC: contrast within each modality, hard negatives with a floor, and the matching head of two
layers.
"""

from typing import Any

import torch
from helpers.errors import raises
from helpers.fusion_samples import make_batch, tiny_model, tiny_tokenizer
from torch import Tensor

import medvl
from medvl.errors import ConfigError
from medvl.models import MUMC, MUMCConfig

TOKENIZER = tiny_tokenizer()


def make(**settings: Any) -> MUMC:
    model = tiny_model("mumc", TOKENIZER, **settings)
    assert isinstance(model, MUMC)
    return model


def test_total_equals_the_published_formula() -> None:
    """(i2t + t2i + (i2i + t2t) / 2) / 2 + ITM + MLM, in the second step: the queue holds four
    pairs, alpha is 0.2.
    """
    model = make(alpha=0.8)
    first, second = (
        make_batch(TOKENIZER, 4, keys=list("abcd")),
        make_batch(TOKENIZER, 3, keys=list("xyz")),
    )
    for number, batch in enumerate((first, second)):
        model.before_step(number)
        corruption = model.corrupt(batch)
        encoded = model.encode(batch, corruption)
    predictions = {
        part.name: part.predict(encoded, corruption.of(part)) for part in model.objectives
    }
    result = model.losses(predictions, corruption)
    tau, keys = model.itc_head.temperature, encoded.keys
    hard_BN = torch.eye(3, 7)

    def against(query_BE: Tensor, keys_NE: Tensor, target_BN: Tensor) -> Tensor:
        return -(target_BN * (query_BE @ keys_NE.T / tau).log_softmax(dim=1)).sum() / 3

    def soft(own_NE: Tensor, other_NE: Tensor) -> Tensor:
        return 0.2 * (own_NE[:3] @ other_NE.T / tau).softmax(dim=1).detach() + 0.8 * hard_BN

    i2t = against(encoded.image_KE, keys.text_NE, soft(keys.image_NE, keys.text_NE))
    t2i = against(encoded.text_KE, keys.image_NE, soft(keys.text_NE, keys.image_NE))
    i2i, t2t = (
        against(encoded.image_KE, keys.image_NE, hard_BN),
        against(encoded.text_KE, keys.text_NE, hard_BN),
    )
    published = (i2t + t2i + 0.5 * (i2i + t2t)) / 2 + result.terms["itm"] + result.terms["mlm"]
    torch.testing.assert_close(result.total, published, rtol=1e-5, atol=1e-6)
    learned = [model.image_head.weight, model.text_head.weight, tau]
    rest = result.terms["itm"] + result.terms["mlm"]
    mine, expected = (
        torch.autograd.grad(total - rest, learned, retain_graph=True)
        for total in (result.total, published)
    )
    for gradient, naive in zip(mine, expected, strict=True):
        torch.testing.assert_close(gradient, naive, rtol=1e-4, atol=1e-6)


def test_model_and_teacher_read_different_patches_in_training_only() -> None:
    model, batch = make(), make_batch(TOKENIZER, 4)
    kept: list[Tensor | None] = []
    average: Any = model.momentum.module
    for encoder in (model.image_encoder, average.image_encoder):
        encoder.register_forward_pre_hook(lambda module, given: kept.append((*given, None)[1]))
    model.before_step(0)
    model(batch)
    model.eval()(batch)
    mine, theirs, *whole = kept
    assert mine is not None
    assert theirs is not None
    assert mine.shape == theirs.shape == (4, 8)
    assert not torch.equal(mine, theirs)
    assert whole == [None, None]


def test_published_sizes() -> None:
    with torch.device("meta"):
        model = medvl.create_model("mumc")
    assert isinstance(model, MUMC)
    assert (
        sum(p.numel() for p in model.itm_head.parameters()) == 768 * 1536 + 3 * 1536 + 1536 * 2 + 2
    )
    assert (model.config.mask_ratio, model.config.negative_floor, model.unimodal.weight) == (
        0.15,
        1e-4,
        0.5,
    )
    assert model.image_encoder.mean == (0.48145466, 0.4578275, 0.40821073)


def test_config_rejects_a_weight_of_zero() -> None:
    with raises(ConfigError, "out_of_range", "unimodal_weight"):
        MUMCConfig(unimodal_weight=0.0)
