"""BFSPR: its three terms and its similarity against the formulas."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive_systems import PAIRS, bfspr, make_batch
from helpers.errors import raises
from torch import Tensor

from medvl.errors import ConfigError
from medvl.models import BFSPR, BFSPRConfig
from medvl.schema import Batch


def whole() -> Batch:
    return dataclasses.replace(make_batch("bfspr"), has_image_B=None)


def naive_bags(model: BFSPR, batch: Batch, images_BE: Tensor, pool: str) -> Tensor:
    """Cosines of images with the sentences of each report, pooled, report by report."""
    tokens_BTD = model.text_encoder(batch.ids_BT, batch.mask_BT).tokens_BTD
    columns = []
    for j in range(PAIRS):
        numbers = range(int(batch.sentence_BT[j].max()) + 1)
        means = [tokens_BTD[j][batch.sentence_BT[j] == number].mean(dim=0) for number in numbers]
        cosine_BS = images_BE @ F.normalize(model.text_head(torch.stack(means)), dim=1).T
        columns.append(cosine_BS.max(dim=1).values if pool == "max" else cosine_BS.mean(dim=1))
    return torch.stack(columns, dim=1)


def both_directions(similarity_BB: Tensor) -> Tensor:
    target_B = torch.arange(PAIRS)
    return (
        F.cross_entropy(similarity_BB / 0.07, target_B)
        + F.cross_entropy(similarity_BB.T / 0.07, target_B)
    ) / 2


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_terms_and_similarity_equal_the_formulas(pool: str) -> None:
    model, batch = bfspr(sentence_pool=pool, sentence_weight=0.5, image_weight=0.25).eval(), whole()
    with torch.no_grad():
        image_BE, second_BE = (
            model.encode_image(batch.image_BCHW),
            model.encode_image(batch.second_image_BCHW),
        )
        text_BE = model.encode_text(batch.ids_BT, batch.mask_BT)
        bags_BB, losses = naive_bags(model, batch, image_BE, pool), model(batch)
        texts = model.embed_ids(batch.ids_BT, batch.mask_BT, batch.sentence_BT)
        similarity_BB = model.similarity(model.embed_images(batch.image_BCHW), texts)
    expected = {
        "report": both_directions(image_BE @ text_BE.T),
        "sentence": both_directions(bags_BB),
        "image": both_directions(image_BE @ second_BE.T),
    }
    assert losses.terms.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(losses.terms[name], value, rtol=1e-3, atol=1e-4)
    total = expected["report"] + 0.5 * expected["sentence"] + 0.25 * expected["image"]
    torch.testing.assert_close(losses.total, total, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        similarity_BB, (image_BE @ text_BE.T + bags_BB) / 2, rtol=1e-3, atol=1e-4
    )


def test_the_second_view_is_needed_only_with_its_term() -> None:
    batch = dataclasses.replace(whole(), second_image_BCHW=None)
    with raises(ConfigError, "missing", "image_weight"):
        bfspr()(batch)
    alone = bfspr(image_weight=0.0)
    assert (alone.inputs.sentences, alone.inputs.second_image) == (True, False)
    assert alone(batch).terms.keys() == {"report", "sentence"}
    with raises(ConfigError, "unknown_name", "sentence_pool"):
        BFSPRConfig(sentence_pool="sum")


def test_every_parameter_learns_and_padding_changes_nothing() -> None:
    model, batch = bfspr().eval(), whole()
    losses = model(batch)
    losses.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert name.endswith("key.bias") or parameter.grad.abs().sum() > 0, name
    wider = {
        name: F.pad(getattr(batch, name), (0, 5), value=value)
        for name, value in (("ids_BT", 7), ("mask_BT", False), ("sentence_BT", -1))
    }
    torch.testing.assert_close(model(dataclasses.replace(batch, **wider)).total, losses.total)
