"""MGCA: published sizes, the three losses against their formulas, prototypes, words, and two
ranks.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.contrastive_systems import make_batch, mgca
from helpers.errors import raises
from helpers.two_ranks import on_two_ranks
from torch import Tensor

import medvl
from medvl.errors import ConfigError
from medvl.models import MGCA, MGCAConfig, Pairs, save
from medvl.schema import Embeddings

VIT = {
    "image_encoder": "vit_b16",
    "image_arguments": {"embed_dim": 32, "depth": 1, "num_heads": 2},
    "encoder_size": None,
    "patch_level": -1,
}


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def naive_contrast(a_NE: Tensor, b_NE: Tensor, weight_N: Tensor) -> Tensor:
    """The released loss of one sample without padding: both directions of InfoNCE, weighted."""
    target_N = torch.arange(len(a_NE))
    logits_NN = a_NE @ b_NE.T / 0.1
    both_N = F.cross_entropy(logits_NN, target_N, reduction="none") + F.cross_entropy(
        logits_NN.T, target_N, reduction="none"
    )
    low, high = torch.quantile(weight_N, 0.1), torch.quantile(weight_N, 0.9)
    clipped_N = weight_N.clip(low, high)
    return (both_N / 2 * clipped_N / clipped_N.sum()).sum()


def naive_codes(scores_BK: Tensor) -> Tensor:
    """The released Sinkhorn iterations."""
    q_KB = torch.exp(scores_BK / 0.05).T
    q_KB = q_KB / q_KB.sum()
    for _ in range(3):
        q_KB = q_KB / q_KB.sum(dim=1, keepdim=True) / q_KB.shape[0]
        q_KB = q_KB / q_KB.sum(dim=0, keepdim=True) / q_KB.shape[1]
    return (q_KB / q_KB.sum(dim=0, keepdim=True)).T


def naive_losses(model: Any, images: Embeddings, texts: Embeddings) -> dict[str, Tensor]:
    """Return the three losses from loops over samples."""
    logits_BB = images.global_NE @ texts.global_NE.T / 0.07
    target_B = torch.arange(len(images))
    tokens = []
    for row in range(len(images)):
        count = int(texts.mask_NP[row].sum())
        words_WE, regions_PE = texts.local_NPE[row, :count], images.local_NPE[row]
        for_words_WE = unit((words_WE @ regions_PE.T / 0.1).softmax(dim=1) @ regions_PE)
        for_regions_PE = unit((regions_PE @ words_WE.T / 0.1).softmax(dim=1) @ words_WE)
        weight_P = (
            torch.ones(len(regions_PE)) if images.weight_NP is None else images.weight_NP[row]
        )
        words = naive_contrast(words_WE, for_words_WE, texts.weight_NP[row, :count])
        tokens.append(words + naive_contrast(regions_PE, for_regions_PE, weight_P))
    prototypes_KE = unit(model.prototype_layer.weight)
    image_BK, text_BK = images.global_NE @ prototypes_KE.T, texts.global_NE @ prototypes_KE.T
    swaps = (naive_codes(image_BK) * (text_BK / 0.2).log_softmax(dim=1)).sum(dim=1)
    swaps = swaps + (naive_codes(text_BK) * (image_BK / 0.2).log_softmax(dim=1)).sum(dim=1)
    return {
        "ita": F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B),
        "token": torch.stack(tokens).mean(),
        "prototype": -swaps.mean() / 2,
    }


@pytest.mark.parametrize("change", [{}, VIT], ids=["resnet", "vit"])
def test_losses_equal_the_formulas(change: dict[str, Any]) -> None:
    weights = {"global_weight": 0.5, "local_weight": 2.0, "prototype_weight": 3.0}
    model, batch = (
        mgca(**change, **weights).eval(),
        gloria_ranks.make_batch(gloria_ranks.tiny_tokenizer()),
    )
    with torch.no_grad():
        actual = model(batch)
        images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(batch.texts)
        expected = naive_losses(model, images, texts)
    assert (images.weight_NP is None) is (change == {})
    assert actual.terms.keys() == expected.keys()
    for name, term in expected.items():
        torch.testing.assert_close(actual.terms[name], term, rtol=1e-4, atol=1e-5)
    total = 0.5 * expected["ita"] + 2 * expected["token"] + 3 * expected["prototype"]
    torch.testing.assert_close(actual.total, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "count"), [({}, 99_275_328), ("vit", 158_420_224)], ids=["resnet", "vit"]
)
def test_mgca_has_the_published_size(change: Any, count: int) -> None:
    """113.589 and 172.734 million, less cross-attention and an attention layer that are never
    used, plus token types.
    """
    vit = {"image_encoder": "timm:deit_base_patch16_224", "encoder_size": None, "patch_level": -1}
    with torch.device("meta"):
        model = MGCA.build(MGCAConfig(**(vit if change else {})), pretrained=False, tokenizer=None)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    width = 768 if change else 2048
    assert shapes["image_head.inner.weight"] == (2048, width)
    assert shapes["region_head.inner.weight"] == (2048, width if change else 1024)
    assert shapes["word_head.inner.weight"] == shapes["text_head.inner.weight"] == (2048, 768)
    assert shapes["word_head.outer.weight"] == shapes["image_head.outer.weight"] == (128, 2048)
    assert shapes["image_head.output_norm.running_mean"] == (128,)
    assert "image_head.output_norm.weight" not in shapes
    assert shapes["prototype_layer.weight"] == (500, 128)
    assert model.image_encoder.grid(*model.image_encoder.image_size) == (
        (14, 14) if change else (19, 19)
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    crossattention, local_attention, token_types = (
        6 * (4 * (768 * 768 + 768) + 2 * 768),
        2 * 66048,
        2 * 768,
    )
    published = 172.734 if change else 113.589
    assert (count + crossattention + local_attention - token_types) / 1e6 == pytest.approx(
        published, abs=1e-3
    )


def test_losses_without_any_information_are_logarithms_of_the_numbers_of_candidates() -> None:
    model = mgca().eval()
    mask_BW = torch.arange(5) < torch.tensor([5, 3, 0, 1])[:, None]
    global_BE = unit(torch.ones(4, 24))
    model.prototype_layer.weight.data = torch.ones(10, 24)
    images = Embeddings(global_BE, unit(torch.ones(4, 6, 24)))
    texts = Embeddings(
        global_BE,
        unit(torch.ones(4, 5, 24)) * mask_BW[:, :, None],
        mask_BW,
        torch.rand(4, 5) * mask_BW,
    )
    terms = model.compare_pairs(Pairs(images=images, texts=texts)).terms
    assert terms["ita"].item() == pytest.approx(2 * math.log(4), abs=1e-5)
    assert terms["token"].item() == pytest.approx(
        (math.log(5) + math.log(3)) / 3 + math.log(6), abs=1e-5
    )
    assert terms["prototype"].item() == pytest.approx(math.log(10), abs=1e-5)


def test_prototypes_are_normalised_and_frozen_in_the_first_steps() -> None:
    model, batch = mgca(freeze_prototypes_steps=2).train(), make_batch("mgca")
    weight_KE = model.prototype_layer.weight
    for step in range(4):
        weight_KE.data *= 2 + torch.rand(10, 1)
        model.before_step(step)
        torch.testing.assert_close(weight_KE.norm(dim=1), torch.ones(10))
        model(batch).total.backward()
        assert weight_KE.grad is not None
        assert bool(weight_KE.grad.any()) is (step >= 2)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any() or parameter is weight_KE, name
        model.zero_grad()


def test_words_are_without_the_first_token_also_in_batch_norm() -> None:
    model, batch = mgca().train(), make_batch("mgca")
    inputs: list[tuple[Tensor, Tensor]] = []
    model.word_head.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments))
    texts = model.embed_ids(batch.ids_BT, batch.mask_BT)
    ((words_BWD, mask_BW),) = inputs
    assert torch.equal(mask_BW, texts.mask_NP)
    assert mask_BW.sum(dim=1).tolist() == [
        int(row.max()) + 1 for row in model.tokenizer.word_ids(batch.ids_BT, batch.mask_BT)
    ]
    assert words_BWD.shape[1] == int(mask_BW.sum(dim=1).max())
    torch.testing.assert_close(texts.local_NPE.norm(dim=2), mask_BW.float())
    features = model.eval().text_encoder(batch.ids_BT, batch.mask_BT, output_attention=True)
    words_BT = model.tokenizer.word_ids(batch.ids_BT, batch.mask_BT) >= 0
    weight_BW = model.embed_ids(batch.ids_BT, batch.mask_BT).weight_NP
    torch.testing.assert_close(weight_BW.sum(dim=1), (features.attention_BT * words_BT).sum(dim=1))


def test_padding_and_other_samples_do_not_change_a_samples_token_loss() -> None:
    model = mgca().eval()
    batch = gloria_ranks.make_batch(model.tokenizer)
    alone = []
    for row in range(len(batch)):
        ids_BT, mask_BT = model.tokenizer([batch.texts[row]])
        texts = model.embed_ids(ids_BT, mask_BT)
        alone.append(
            model.token_alignment(model.embed_images(batch.image_BCHW[row : row + 1]), texts)
        )
    longer = [F.pad(each, (0, 7)) for each in (batch.ids_BT, batch.mask_BT)]
    padded = dataclasses.replace(batch, ids_BT=longer[0], mask_BT=longer[1])
    torch.testing.assert_close(
        model(padded).terms["token"], torch.stack(alone).mean(), rtol=1e-4, atol=1e-5
    )


def test_attention_maps_are_those_of_words_at_the_local_temperature() -> None:
    model = mgca(fit="crop").eval()
    batch = gloria_ranks.make_batch(model.tokenizer, [0, 1, 2])
    attention_BWhw, mask_BW = model.word_attention(batch.image_BCHW, batch.texts)
    images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(batch.texts)
    expected_BWP = (texts.local_NPE @ images.local_NPE.mT / 0.1).softmax(dim=2)
    torch.testing.assert_close(attention_BWhw.flatten(2)[mask_BW], expected_BWP[mask_BW])
    assert attention_BWhw.shape[2:] == (6, 6)
    maps = model.attention_maps(
        batch.image_BCHW, [*batch.texts[:2], ""], [(200, 100), (64, 64), (64, 64)]
    )
    assert [tuple(map_HW.shape) for map_HW in maps] == [(200, 100), (64, 64), (64, 64)]
    assert maps[1].max() > maps[1].min()
    assert not maps[2].any()
    similarity_NN = model.similarity(batch.image_BCHW, batch.texts)
    torch.testing.assert_close(similarity_NN, images.global_NE @ texts.global_NE.T)


def test_settings_are_checked() -> None:
    for field in (
        "softmax_temperature",
        "local_temperature",
        "proto_temperature",
        "num_prototypes",
        "hidden_dim",
    ):
        with raises(ConfigError, "out_of_range", field):
            MGCAConfig(**{field: 0})


def test_two_ranks_compute_the_gradients_of_one(tmp_path: Path) -> None:
    save(mgca(), tmp_path)
    found = on_two_ranks(gloria_ranks.losses_and_gradients, tmp_path)
    alone = medvl.load(tmp_path)
    expected = alone(gloria_ranks.make_batch(alone.tokenizer))
    expected.total.backward()
    for actual in found:
        for name, term in {"total": expected.total, **expected.terms}.items():
            torch.testing.assert_close(actual[f"loss/{name}"], term.detach(), rtol=1e-5, atol=1e-6)
        for name, parameter in alone.named_parameters():
            apart = (actual[name] - parameter.grad).norm()
            assert apart < 1e-4 * parameter.grad.norm() + 1e-5, name
