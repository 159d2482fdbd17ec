"""BioViL: the losses against their formulas, published sizes, regions in the space of texts, and
averaged prompts.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive_systems import PAIRS, biovil, make_batch
from helpers.errors import raises
from helpers.gloria_ranks import tiny_tokenizer
from torch import Tensor

from medvl import losses
from medvl.errors import ConfigError
from medvl.eval.grounding.heatmaps import choose_maps, embed_patches, phrase_maps
from medvl.models import BioViL, BioViLConfig
from medvl.schema import Batch, Inputs
from medvl.train.loop.step import GradCache
from medvl.train.optim.optimizer import Precision

BATCH = dataclasses.replace(make_batch("biovil"), has_image_B=None)


def info_nce(a_NE: Tensor, b_NE: Tensor, temperature: float) -> float:
    """Return the symmetric InfoNCE in a loop over rows."""
    cosine_NN = F.normalize(a_NE, dim=1) @ F.normalize(b_NE, dim=1).T / temperature
    rows = [cosine_NN[i].logsumexp(0) - cosine_NN[i, i] for i in range(len(a_NE))]
    columns = [cosine_NN[:, i].logsumexp(0) - cosine_NN[i, i] for i in range(len(a_NE))]
    return torch.stack(rows + columns).mean().item()


def test_defaults_and_sizes_are_the_published_ones() -> None:
    config = BioViLConfig()
    assert (config.image_encoder, config.text_encoder, config.image_size, config.fit) == (
        *("resnet50", "cxrbert", 480, "crop"),
    )
    with torch.device("meta"):
        model = BioViL.build(config, pretrained=False, tokenizer=None)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["image_head.inner.weight"] == (128, 2048)
    assert "image_head.inner.bias" not in shapes
    assert shapes["image_head.outer.weight"] == (128, 128)
    assert shapes["text_encoder.projection.dense_to_hidden.weight"] == (128, 768)
    assert shapes["word_head.dense.weight"] == (768, 768)
    assert shapes["word_head.bias"] == (30522,)
    assert model.image_encoder.grid(480, 480) == (15, 15)
    assert (model.image_encoder.mean, model.image_encoder.std) == ((0.0,) * 3, (1.0,) * 3)
    assert model.transform.size + 2 * model.transform.margin == 512
    assert model.inputs == Inputs(second_text=True)


def test_every_loss_is_its_formula() -> None:
    model = biovil(temperature=0.3).eval()
    actual = model(BATCH)
    regions_BPE = model.image_head(model.image_encoder(BATCH.image_BCHW).patches_BPD)
    features = model.text_encoder(BATCH.ids_BT, BATCH.mask_BT)
    text_BE = model.text_head(features.pooled_BD)
    assert actual.terms["global"].item() == pytest.approx(
        info_nce(regions_BPE.mean(1), text_BE, 0.3), rel=1e-5
    )
    kept = [0, 2, 3, 4, 5, 6]  # the second has one text
    second = model.text_encoder(BATCH.second_ids_BT, BATCH.second_mask_BT).pooled_BD
    expected = info_nce(text_BE[kept], model.text_head(second)[kept], 0.3)
    assert actual.terms["rsm"].item() == pytest.approx(expected, rel=1e-5)
    inner_BT = torch.zeros_like(BATCH.mask_BT)
    for row, length in enumerate(BATCH.mask_BT.sum(dim=1).tolist()):
        inner_BT[row, 1 : length - 1] = True
    local = losses.gloria_local(regions_BPE, model.text_head(features.tokens_BTD), inner_BT)
    torch.testing.assert_close(actual.terms["local"], sum(local), rtol=1e-5, atol=1e-6)
    masked = model.masking(BATCH.ids_BT, BATCH.mask_BT, torch.default_generator)
    states_BTD = model.text_encoder(masked.ids_BT, BATCH.mask_BT).tokens_BTD
    table_VD = model.text_encoder.backbone.embeddings.word_embeddings.weight
    mlm = losses.mlm(
        model.word_head(states_BTD.flatten(0, 1), table_VD), masked.labels_BT.flatten()
    )
    torch.testing.assert_close(actual.terms["mlm"], mlm, rtol=1e-5, atol=1e-6)
    total = actual.terms["global"] + actual.terms["rsm"] + 0.5 * (local[0] + local[1] + mlm)
    torch.testing.assert_close(actual.total, total, rtol=1e-5, atol=1e-6)


def test_losses_start_near_their_expectation_and_reach_every_parameter() -> None:
    model = biovil().train()
    actual = model(BATCH)
    assert actual.terms["global"].item() == pytest.approx(math.log(PAIRS), abs=0.5)
    assert actual.terms["mlm"].item() == pytest.approx(math.log(40), abs=0.5)
    actual.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("setting", ["local_weight", "rsm_weight", "mlm_weight"])
def test_a_weight_of_zero_takes_the_loss_and_its_parts_away(setting: str) -> None:
    model = biovil(**{setting: 0.0})
    batch = BATCH if setting != "rsm_weight" else dataclasses.replace(BATCH, second_ids_BT=None)
    assert setting.removesuffix("_weight") not in model(batch).terms
    assert (model.word_head is None) == (setting == "mlm_weight")
    assert model.inputs.second_text == (setting != "rsm_weight")


def test_without_second_texts_there_is_nothing_to_match() -> None:
    actual = biovil()(
        dataclasses.replace(BATCH, has_second_text_B=torch.zeros(PAIRS, dtype=torch.bool))
    )
    assert actual.terms["rsm"].item() == 0
    actual.total.backward()
    with raises(ConfigError, "missing", "second_ids_BT"):
        biovil()(dataclasses.replace(BATCH, second_ids_BT=None))


def test_words_are_masked_with_the_models_tokenizer() -> None:
    settings: dict[str, Any] = {"image_encoder": "resnet_tiny", "image_size": 32, "margin": 0}
    model = BioViL.build(
        BioViLConfig(text_encoder="tiny_bert", vocab_size=45, mlm_probability=0.5, **settings),
        pretrained=False,
        tokenizer=tiny_tokenizer(),
    )
    batch = dataclasses.replace(BATCH, ids_BT=BATCH.ids_BT % 30 + 5)
    first, second = (model.eval()(batch).terms["mlm"].item() for _ in range(2))
    assert first != second
    model.tokenizer = None
    vars(model).pop("masking")
    with raises(ConfigError, "missing", "tokenizer"):
        model(batch)


def test_parts_give_the_gradient_of_the_batch() -> None:
    model = biovil().eval()
    model(BATCH).total.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    GradCache(model, 2, Precision("fp32", torch.device("cpu")))(BATCH, 1, lambda part: None)
    for name, parameter in model.named_parameters():
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-4, atol=1e-6 + 1e-5 * largest
        )


def test_padding_changes_nothing() -> None:
    model = biovil().eval()

    def longer(batch: Batch) -> Batch:
        return dataclasses.replace(
            batch, ids_BT=F.pad(batch.ids_BT, (0, 3), value=7), mask_BT=F.pad(batch.mask_BT, (0,
            3)), second_ids_BT=F.pad(batch.second_ids_BT, (0, 2), value=7),
            second_mask_BT=F.pad(batch.second_mask_BT, (0, 2)),
        )  # fmt: skip

    for name, term in model(longer(BATCH)).terms.items():
        torch.testing.assert_close(term, model(BATCH).terms[name], rtol=1e-4, atol=1e-5, msg=name)


def test_regions_are_compared_with_texts() -> None:
    """An image's vector is the mean of its regions, and the map of a phrase is its cosine with
    each of them.
    """
    model = biovil(image_size=96, vocab_size=60, image_arguments={}).eval()
    model.tokenizer = tiny_tokenizer()
    image_BCHW = torch.randint(0, 256, (2, 1, 96, 96), dtype=torch.uint8)
    regions_BPE, grid = embed_patches(model, image_BCHW)
    assert grid == (3, 3)
    torch.testing.assert_close(
        F.normalize(regions_BPE.mean(1), dim=1), model.encode_image(image_BCHW)
    )
    assert choose_maps(model, None) == "similarity"
    phrases = ["No pneumothorax.", "A left effusion."]
    text_BE = model.encode_text(phrases)
    cosine_BP = F.cosine_similarity(regions_BPE, text_BE[:, None], dim=2)
    maps = phrase_maps(model, image_BCHW, phrases, [(96, 96)] * 2, maps="similarity")
    middles = torch.stack([map_HW[48, 48] for map_HW in maps])
    torch.testing.assert_close(middles, cosine_BP[:, 4], rtol=0.1, atol=0.01)
