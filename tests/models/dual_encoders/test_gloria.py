"""GLoRIA as published: words, regions, losses, similarities, attention maps, and training on two
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
from helpers.errors import raises
from helpers.gloria_ranks import RAGGED, TEXTS, make_batch, tiny_model, tiny_tokenizer
from helpers.learning import fit
from helpers.two_ranks import on_two_ranks
from torch import Tensor

import medvl
from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError
from medvl.eval.core.full_pass import concatenate
from medvl.eval.retrieval.similarity import Similarity, take
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.eval.zero_shot_classification.protocol import PromptScorer
from medvl.losses.local.gloria import gloria_attention, gloria_similarity
from medvl.models import GLoRIAConfig, load_towers, save
from medvl.models.dual_encoders.bases.local import most_slots, sum_by_slot, word_slots
from medvl.models.dual_encoders.gloria import GLoRIA
from medvl.schema import Batch, Embeddings


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer: Tokenizer) -> GLoRIA:
    return tiny_model(tokenizer)


def naive_words(model: GLoRIA, text: str) -> Tensor:
    """Return (W, E) by the published loop over the tokens of one text: sub-words with ## belong
    to the word before.
    """
    assert model.tokenizer is not None
    ids_BT, mask_BT = model.tokenizer([text])
    tokens_TD = model.text_encoder(ids_BT, mask_BT).tokens_BTD[0]
    pieces = {number: piece for piece, number in model.tokenizer.vocabulary.items()}
    words: list[Tensor] = []
    for token_D, number in zip(tokens_TD, ids_BT[0].tolist(), strict=True):
        if pieces[number] == "[SEP]":
            break
        if pieces[number].startswith("##"):
            words[-1] = words[-1] + token_D
        else:
            words.append(token_D)
    return model.word_head(torch.stack(words))


def test_gloria_has_the_published_defaults() -> None:
    config = GLoRIAConfig()
    assert (config.image_encoder, config.text_encoder) == ("resnet50", "bioclinicalbert")
    assert (config.image_size, config.fit, config.margin, config.encoder_size) == (
        224,
        "pad",
        16,
        299,
    )
    assert (config.patch_level, config.projection_dim, config.max_tokens) == (-2, 768, 97)
    assert (config.text_layers, config.text_reduce, config.word_pool) == (4, "sum", "sum")
    assert (config.temp1, config.temp2, config.temp3) == (4.0, 5.0, 10.0)
    assert (config.local_weight, config.global_weight) == (1.0, 1.0)
    assert (config.local_feature_norm, config.text_token) == (None, True)
    with torch.device("meta"):
        model = GLoRIA.build(config, pretrained=False, tokenizer=None)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if "encoder" not in name
    }
    assert shapes == {
        "image_head.weight": (768, 2048),
        "image_head.bias": (768,),
        "region_head.weight": (768, 1024),
    }
    assert model.image_encoder.grid(299, 299) == (19, 19)
    assert model.image_encoder.mean == model.image_encoder.std == (0.5, 0.5, 0.5)


def test_words_are_sums_of_their_sub_words(model: GLoRIA) -> None:
    model.eval()
    embedded = model.embed_texts(RAGGED)
    assert embedded.local_NPE is not None
    assert embedded.mask_NP is not None
    for i, text in enumerate(RAGGED):
        expected = naive_words(model, text)
        assert embedded.mask_NP[i].sum() == len(expected)
        torch.testing.assert_close(
            embedded.local_NPE[i, : len(expected)], expected, rtol=1e-4, atol=1e-5
        )
    assert max(embedded.mask_NP.sum(dim=1)) == embedded.mask_NP.shape[1]


def test_the_text_vector_has_the_direction_of_the_mean_over_slots(
    model: GLoRIA, tokenizer: Tokenizer
) -> None:
    """The published mean is over 97 slots: words, [CLS], [SEP] and zeros; a cosine does not
    depend on the divisor.
    """
    model.eval()
    for text in RAGGED:
        ids_BT, mask_BT = tokenizer([text])
        tokens_TD = model.text_encoder(ids_BT, mask_BT).tokens_BTD[0]
        expected = F.normalize(model.text_head(tokens_TD.sum(dim=0) / 97), dim=-1)
        torch.testing.assert_close(model.encode_text([text])[0], expected, rtol=1e-4, atol=1e-5)


def test_tokens_are_summed_by_slot() -> None:
    tokens_BTD = torch.randn(
        2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    slot_BT = torch.tensor([[0, 1, 1, 2, -1, -1], [0, 1, 2, 3, 3, -1]])
    words_BWD, mask_BW = sum_by_slot(tokens_BTD, slot_BT, most_slots(slot_BT))
    assert mask_BW.tolist() == [[True, True, True, False], [True] * 4]
    for text in range(2):
        for word in range(4):
            expected = sum(
                (tokens_BTD[text, t] for t in range(6) if slot_BT[text, t] == word),
                torch.zeros(3).double(),
            )
            torch.testing.assert_close(words_BWD[text, word], expected.float())


def test_the_first_token_has_slot_0_and_the_last_none(tokenizer: Tokenizer) -> None:
    ids_BT, mask_BT = tokenizer(["", "The heart."])
    slot_BT = word_slots(tokenizer, ids_BT, mask_BT)
    assert set(slot_BT[0, 1:].tolist()) == {-1}
    assert slot_BT[:, 0].tolist() == [0, 0]
    assert slot_BT[1].unique_consecutive().tolist() == [0, 1, 2, 3, -1]
    mask_BT[0] = False
    slot_BT = word_slots(tokenizer, ids_BT, mask_BT)
    words_BWD, mask_BW = sum_by_slot(
        torch.ones(2, mask_BT.shape[1], 4), slot_BT, most_slots(slot_BT)
    )
    assert mask_BW.tolist() == [[False] * 4, [True] * 4]
    assert not words_BWD[0].any()


def test_regions_come_from_the_earlier_stage_at_the_encoder_size(model: GLoRIA) -> None:
    model.eval()
    batch = make_batch(model.tokenizer)
    pixels = (batch.image_BCHW.float() / 255 - 0.5) / 0.5
    inside = F.interpolate(
        pixels.expand(-1, 3, -1, -1), (96, 96), mode="bilinear", align_corners=True
    )
    stages = model.image_encoder.backbone.forward_intermediates(
        inside, indices=[-2], intermediates_only=True
    )
    expected = stages[0].flatten(2).transpose(1, 2) @ model.region_head.weight.T
    embedded = model.embed_images(batch.image_BCHW)
    assert embedded.local_NPE is not None
    assert embedded.local_NPE.shape == (7, 36, 24)
    torch.testing.assert_close(embedded.local_NPE, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embedded.global_NE, model.encode_image(batch.image_BCHW))
    torch.testing.assert_close(embedded.global_NE.norm(dim=1), torch.ones(7))


@pytest.mark.parametrize(
    "change", [{}, {"temp1": 2.0, "temp2": 3.0, "temp3": 7.0, "word_pool": "mean"}], ids=str
)
def test_losses_equal_the_published_ones(tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    weights = {"local_weight": 0.5, "global_weight": 2.0} if change else {}
    model = tiny_model(tokenizer, **change, **weights).eval()
    config, batch = model.config, make_batch(tokenizer)
    actual = model(batch)
    images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(batch.texts)
    local = sum(
        losses.gloria_local(
            images.local_NPE, texts.local_NPE, texts.mask_NP, config.temp1, config.temp2,
            config.temp3, pool=config.word_pool,
        )
    )  # fmt: skip
    logits_BB = config.temp3 * images.global_NE @ texts.global_NE.T
    target_B = torch.arange(len(batch))
    whole = F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)
    assert list(actual.terms) == ["local", "global"]
    torch.testing.assert_close(actual.terms["local"], local)
    torch.testing.assert_close(actual.terms["global"], whole)
    torch.testing.assert_close(
        actual.total, config.local_weight * local + config.global_weight * whole
    )


def test_the_global_loss_starts_near_its_expectation(model: GLoRIA) -> None:
    """The local loss does not: texts of more words have an advantage
    (tests/losses/local/test_losses_gloria.py).
    """
    actual = model.eval()(make_batch(model.tokenizer))
    assert actual.terms["global"].item() == pytest.approx(2 * math.log(7), abs=1.0)


def test_every_parameter_has_a_gradient(model: GLoRIA) -> None:
    model(make_batch(model.tokenizer)).total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_regions_and_words_are_not_rounded_under_autocast(tokenizer: Tokenizer) -> None:
    """The softmax over regions reads raw products: rounding both sides to bf16 changes its
    gradients by percents.
    """
    model = tiny_model(tokenizer, projection_dim=48).eval()
    batch = make_batch(tokenizer)
    features = {}
    model.image_encoder.register_forward_hook(
        lambda *call: features.update(image=call[2].patches_BPD)
    )
    model.text_encoder.register_forward_hook(lambda *call: features.update(text=call[2].tokens_BTD))
    with torch.autocast("cpu", torch.bfloat16):
        images, texts = (
            model.embed_images(batch.image_BCHW),
            model.embed_ids(batch.ids_BT, batch.mask_BT),
        )
    slot_BT = word_slots(tokenizer, batch.ids_BT, batch.mask_BT)
    words_BWD, _ = sum_by_slot(features["text"], slot_BT, most_slots(slot_BT))
    assert features["image"].dtype == torch.bfloat16
    regions_NPE, words_NWE, _ = locals_of(images, texts)
    assert regions_NPE.dtype == words_NWE.dtype == torch.float32
    torch.testing.assert_close(
        regions_NPE, model.region_head(features["image"].float()), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(words_NWE, model.word_head(words_BWD), rtol=1e-5, atol=1e-6)


@pytest.mark.training
def test_the_loss_falls_on_one_batch(model: GLoRIA) -> None:
    model.train()
    batch = make_batch(model.tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = fit(model, batch, optimizer, 12)
    assert seen[-1]["local"] < 0.7 * seen[0]["local"]
    assert seen[-1]["global"] < 0.8 * seen[0]["global"]


def test_samples_without_image_or_text_are_left_out(model: GLoRIA) -> None:
    model.eval()
    batch = make_batch(model.tokenizer)
    whole_B = torch.tensor([True, False, True, True, False, True, True])
    kept = make_batch(model.tokenizer, whole_B.nonzero().squeeze(1).tolist())
    has_image_B, has_text_B = torch.ones(7, dtype=torch.bool), torch.ones(7, dtype=torch.bool)
    has_image_B[1] = has_text_B[4] = False
    partial = dataclasses.replace(batch, has_image_B=has_image_B, has_text_B=has_text_B)
    torch.testing.assert_close(model(partial).total, model(kept).total, rtol=1e-4, atol=1e-5)
    nothing = model(dataclasses.replace(batch, has_image_B=torch.zeros(7, dtype=torch.bool))).total
    nothing.backward()
    assert nothing.item() == 0
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
    )


def test_similarity_does_not_depend_on_padding_or_the_batch(model: GLoRIA) -> None:
    model.eval()
    batch = make_batch(model.tokenizer)
    images = model.embed_images(batch.image_BCHW)
    together = model.similarity(images, RAGGED)
    alone = torch.cat([model.similarity(images, [text]) for text in RAGGED], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        model.similarity(batch.image_BCHW[2:3], RAGGED), together[2:3], rtol=1e-4, atol=1e-5
    )


def test_similarity_equals_that_of_training(model: GLoRIA) -> None:
    """It is the mean of cosine and local similarity, without temp3."""
    model.eval()
    batch = make_batch(model.tokenizer)
    images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(RAGGED)
    cosine_NM = images.global_NE @ texts.global_NE.T
    local_NM = gloria_similarity(*locals_of(images, texts))
    torch.testing.assert_close(
        model.similarity(batch.image_BCHW, RAGGED), (cosine_NM + local_NM) / 2
    )


@pytest.mark.parametrize("part", ["global", "local"])
def test_similarity_leaves_out_a_part_that_is_not_trained(tokenizer: Tokenizer, part: str) -> None:
    other = {"global": "local", "local": "global"}[part]
    model = tiny_model(tokenizer, **{f"{other}_weight": 0.0}).eval()
    images, texts = model.embed_images(make_batch(tokenizer).image_BCHW), model.embed_texts(RAGGED)
    expected = {
        "global": images.global_NE @ texts.global_NE.T,
        "local": gloria_similarity(*locals_of(images, texts)),
    }
    torch.testing.assert_close(model.similarity(images, texts), expected[part])


def locals_of(
    images: Embeddings, texts: Embeddings, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    assert images.local_NPE is not None
    assert texts.local_NPE is not None
    assert texts.mask_NP is not None
    return images.local_NPE, texts.local_NPE[:, first:], texts.mask_NP[:, first:]


def test_the_best_word_similarity_differs_from_training_in_two_ways(model: GLoRIA) -> None:
    """Only the best word counts, and [CLS] is not a word."""
    model.eval()
    images = model.embed_images(make_batch(model.tokenizer).image_BCHW)
    texts = model.embed_texts(RAGGED)
    cosine_NM = images.global_NE @ texts.global_NE.T
    local_NM = gloria_similarity(*locals_of(images, texts, first=1), pool="max")
    actual = model.best_word_similarity(images, texts)
    torch.testing.assert_close(actual, (cosine_NM + local_NM) / 2)
    assert not torch.allclose(actual, model.similarity(images, texts), atol=0.1)
    assert model.best_word_similarity(images, [""]).isfinite().all()  # a text of no word but [CLS]


def test_published_similarity_takes_as_many_slots_as_characters(model: GLoRIA) -> None:
    """Written out for one image and text at a time: [CLS] is left out, [SEP] and zero vectors
    are words.
    """
    model.eval()
    assert model.tokenizer is not None
    texts = ["effusion", " tiny effusion ", "There is a small left effusion."]
    images = model.embed_images(make_batch(model.tokenizer).image_BCHW)
    prompts = model.published_prompts(texts)
    assert prompts.mask_NP is not None
    assert prompts.mask_NP.sum(dim=1).tolist() == [8, 15, 31]
    actual_NM = model.published_similarity(images, prompts)
    assert images.local_NPE is not None
    for column, text in enumerate(texts):
        ids_BT, mask_BT = model.tokenizer([text])
        last_D = model.text_encoder(ids_BT, mask_BT).tokens_BTD[0, -1]
        words_WE = torch.cat([naive_words(model, text), model.word_head(last_D)[None]])
        slots_WE = torch.cat([words_WE, torch.zeros(97 - len(words_WE), 24)])[1 : len(text) + 1]
        for row, regions_PE in enumerate(images.local_NPE):
            share_PW = (regions_PE @ slots_WE.T).softmax(dim=1)
            context_WE = (4 * share_PW).softmax(dim=0).T @ regions_PE
            match_W = F.cosine_similarity(context_WE, slots_WE, dim=1)
            cosine = images.global_NE[row] @ model.encode_text([text])[0]
            torch.testing.assert_close(
                actual_NM[row, column], (5 * match_W.max() + cosine) / 2, rtol=1e-4, atol=1e-5
            )
    assert not torch.allclose(actual_NM, model.best_word_similarity(images, texts), atol=1e-3)


def test_prompts_of_any_length_are_encoded(model: GLoRIA) -> None:
    """The published code counts characters as words and fails on this prompt of more than 96
    characters.
    """
    model.eval()
    long = (
        "mildly enlarged cardiac silhouette, likely left ventricular enlargement. other "
        "chambers are less prominent"
    )
    images = model.embed_images(make_batch(model.tokenizer).image_BCHW)
    assert model.best_word_similarity(images, [long, "edema"]).isfinite().all()
    prompts = model.published_prompts([long, "edema"])
    assert prompts.mask_NP is not None
    assert prompts.mask_NP.sum(dim=1).tolist() == [model.config.max_tokens - 1, 5]
    assert model.published_similarity(images, prompts).isfinite().all()
    assert (
        model.embed_texts([long]).mask_NP.sum() == 1 + 13 + 2
    )  # [CLS], the words, a comma and a full stop


def test_evaluators_compare_embeddings_in_chunks(model: GLoRIA) -> None:
    """Embeddings of parts with different lengths are concatenated and compared in blocks."""
    model.eval()
    batch = make_batch(model.tokenizer)
    texts = concatenate([model.embed_texts(RAGGED[:2]), model.embed_texts(RAGGED[2:])])
    images = concatenate(
        [model.embed_images(batch.image_BCHW[:3]), model.embed_images(batch.image_BCHW[3:])]
    )
    expected = model.similarity(batch.image_BCHW, RAGGED)
    with torch.no_grad():
        blocks = torch.cat([rows for _, rows in Similarity(model, images, texts)])
    torch.testing.assert_close(blocks, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        model.similarity(take(images, slice(2, 5)), take(texts, torch.tensor([3, 0]))),
        expected[2:5][:, [3, 0]],
        rtol=1e-4,
        atol=1e-5,
    )
    with torch.no_grad():
        scores_NL = PromptScorer(model, load_prompts("chexpert_ensemble"))(images)
    assert scores_NL.shape == (7, 14)
    assert ((scores_NL > 0) & (scores_NL < 1)).all()


def test_attention_maps_are_in_pixels_of_the_original(tokenizer: Tokenizer) -> None:
    model = tiny_model(tokenizer, fit="crop").eval()
    batch = make_batch(tokenizer, [0, 1, 2, 3])
    sizes = [(200, 100), (100, 300), (64, 64), (65, 64)]
    maps = model.attention_maps(batch.image_BCHW, batch.texts, sizes)
    assert [tuple(map_HW.shape) for map_HW in maps] == sizes
    assert maps[0].isnan().any(dim=1).tolist() == [row < 50 or row >= 150 for row in range(200)]
    assert maps[1].isnan().any(dim=0).tolist() == [
        column < 100 or column >= 200 for column in range(300)
    ]
    assert not maps[2].isnan().any()
    images, texts = model.embed_images(batch.image_BCHW), model.embed_texts(batch.texts)
    attention_BWP = gloria_attention(*locals_of(images, texts))
    actual, mask_BW = model.word_attention(batch.image_BCHW, batch.texts)
    torch.testing.assert_close(actual.flatten(2), attention_BWP[:, 1:])
    assert actual.shape[2:] == (6, 6)
    assert mask_BW.sum(dim=1).tolist() == [
        len(naive_words(model, text)) - 1 for text in batch.texts
    ]
    (regions_PE, words_WE), count = (
        (each.local_NPE[2] for each in (images, texts)),
        int(mask_BW[2].sum()),
    )
    words = [(words_WE[word], attention_BWP[2, word]) for word in range(1, 1 + count)]
    fits = [
        F.cosine_similarity(look_P @ regions_PE, word_E, dim=0).mul(5).exp().item()
        for word_E, look_P in words
    ]
    expected = sum(fit / sum(fits) * look_P for fit, (_, look_P) in zip(fits, words, strict=True))
    assert expected.sum().item() == pytest.approx(1.0, abs=1e-5)
    peak = int(maps[2].argmax())
    cell = int(expected.argmax())
    assert (peak // 64 * 6 // 64, peak % 64 * 6 // 64) == (cell // 6, cell % 6)
    (own,) = model.attention_maps(batch.image_BCHW[2:3], batch.texts[2:3])
    torch.testing.assert_close(own, maps[2], rtol=1e-4, atol=1e-6)
    with raises(ConfigError, "mismatch", "texts"):
        model.attention_maps(batch.image_BCHW, batch.texts[:3])


def test_a_loaded_model_equals_the_saved_one(model: GLoRIA, tmp_path: Path) -> None:
    model.eval()
    save(model, tmp_path)
    loaded = medvl.load(tmp_path)
    assert isinstance(loaded, GLoRIA)
    assert (loaded.config, loaded.transform) == (model.config, model.transform)
    batch = make_batch(model.tokenizer)
    assert torch.equal(
        loaded.similarity(batch.image_BCHW, TEXTS), model.similarity(batch.image_BCHW, TEXTS)
    )


def test_text_token_false_leaves_out_the_first_token(model: GLoRIA, tokenizer: Tokenizer) -> None:
    alone = tiny_model(tokenizer, text_token=False)
    alone.load_state_dict(model.state_dict())
    model.eval(), alone.eval()
    batch = make_batch(tokenizer, [0, 1, 2])
    (_, words_BWE, mask_BW), (_, theirs_BWE, theirs_BW) = (
        locals_of(each.embed_images(batch.image_BCHW), each.embed_texts(batch.texts))
        for each in (alone, model)
    )
    torch.testing.assert_close(words_BWE, theirs_BWE[:, 1:])
    assert torch.equal(mask_BW, theirs_BW[:, 1:])
    pair = batch.image_BCHW, batch.texts
    torch.testing.assert_close(alone.best_word_similarity(*pair), model.best_word_similarity(*pair))
    (attention_BWhw, shown_BW), (_, whole_BW) = (
        each.word_attention(*pair) for each in (alone, model)
    )
    assert torch.equal(shown_BW, whole_BW)
    torch.testing.assert_close(
        attention_BWhw.sum(dim=(2, 3))[shown_BW], torch.ones(int(shown_BW.sum()))
    )
    losses_of = alone(batch)
    losses_of.total.backward()
    assert losses_of.terms["local"].isfinite()


def test_local_feature_norm_keeps_attention_from_saturating(tokenizer: Tokenizer) -> None:
    """Without it and with large norms, one word gets every region and attention is uniform."""
    batch = make_batch(tokenizer, [0, 1, 2])
    spread = {}
    for length in (None, 3.0):
        model = tiny_model(tokenizer, local_feature_norm=length).eval()
        with torch.no_grad():
            for head in (model.word_head, model.region_head):
                head.load_state_dict(
                    {name: 100 * tensor for name, tensor in head.state_dict().items()}
                )
            attention_BWhw, mask_BW = model.word_attention(batch.image_BCHW, batch.texts)
            regions_NPE = model.embed_images(batch.image_BCHW).local_NPE
        assert regions_NPE is not None
        cells_NP = attention_BWhw.flatten(2)[mask_BW]
        spread[length] = (cells_NP.max(dim=1).values / cells_NP.min(dim=1).values).log()
        lengths_NP = regions_NPE.norm(dim=2)
        assert (lengths_NP == pytest.approx(3.0, rel=1e-4)) is (length is not None)
    assert spread[3.0].min() > 0
    assert (spread[None] == 0).any()
    with raises(ConfigError, "out_of_range", "local_feature_norm"):
        GLoRIAConfig(local_feature_norm=0.0)


def test_encoders_are_exchanged_with_other_systems(model: GLoRIA, tmp_path: Path) -> None:
    towers = {
        name: getattr(model.config, name)
        for name in ("image_encoder", "text_encoder", "image_size")
    }
    other = medvl.create_model("convirt", tokenizer=model.tokenizer, frozen_text_layers=0, **towers)
    save(other, tmp_path)
    load_towers(model, tmp_path)
    for name, tensor in other.image_encoder.state_dict().items():
        assert torch.equal(tensor, model.image_encoder.state_dict()[name])
    save(model, tmp_path)
    load_towers(other, tmp_path)


@pytest.mark.parametrize(
    "towers",
    [
        {
            "image_encoder": "timm:vit_tiny_patch16_224",
            "patch_level": -1,
            "encoder_size": None,
            "image_size": 224,
        },
        {"image_encoder": "torchvision:densenet121", "patch_level": -2, "encoder_size": 64},
        {
            "text_encoder": "open_clip:ViT-B-32-quickgelu",
            "tokenizer": "clip",
            "text_layers": 1,
            "vocab_size": None,
        },
    ],
    ids=["vision Transformer", "DenseNet", "CLIP's text"],
)
def test_gloria_takes_encoders_of_any_library(tokenizer: Tokenizer, towers: dict[str, Any]) -> None:
    model = tiny_model(towers.pop("tokenizer", tokenizer), **towers).eval()
    side = model.config.image_size
    image_BCHW = torch.randint(0, 256, (2, 1, side, side), dtype=torch.uint8)
    assert model.similarity(image_BCHW, TEXTS).isfinite().all()
    assert model.attention_maps(image_BCHW, TEXTS[:2])[0].shape == (side, side)


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"temp2": 0.0}, "out_of_range", "temp2"),
        ({"word_pool": "max"}, "unknown_name", "word_pool"),
        ({"local_weight": 0.0, "global_weight": 0.0}, "out_of_range", "global_weight"),
        ({"text_layers": 0}, "out_of_range", "text_layers"),
        ({"patch_level": -9}, "out_of_range", "patch_level"),
        ({"text_layers": 9}, "out_of_range", "layers"),
    ],
)
def test_invalid_settings_are_rejected(
    tokenizer: Tokenizer, settings: dict[str, Any], code: str, field: str
) -> None:
    with raises(ConfigError, code, field):
        tiny_model(tokenizer, **settings)


def test_words_need_a_tokenizer() -> None:
    model = tiny_model(None, vocab_size=300)
    ids_BT = torch.ones(2, 4, dtype=torch.long)
    assert model.encode_text(ids_BT, ids_BT.bool()).shape == (2, 24)
    batch = Batch(
        keys=["a", "b"],
        image_BCHW=torch.zeros(2, 1, 64, 64, dtype=torch.uint8),
        ids_BT=ids_BT,
        mask_BT=ids_BT.bool(),
        labels_BL=torch.zeros(2, 0),
        texts=["", ""],
    )
    with raises(ConfigError, "missing", "tokenizer"):
        model(batch)
    with raises(ConfigError, "missing"):
        model.similarity(Embeddings(torch.zeros(2, 24)), Embeddings(torch.zeros(2, 24)))


@pytest.mark.fault("N1")
def test_two_ranks_compute_the_gradients_of_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Loss and gradients equal those of the global batch, with unequal ranks, text lengths and
    numbers of phrases with boxes; so does gather_padded.
    """
    save(tiny_model(tokenizer, box_weight=0.5), tmp_path)
    actual = on_two_ranks(gloria_ranks.losses_and_gradients, tmp_path)
    alone = medvl.load(tmp_path)
    expected = alone(make_batch(alone.tokenizer))
    assert expected.terms["boxes"] > 0
    expected.total.backward()
    for of_rank in actual:
        for name, term in {"total": expected.total, **expected.terms}.items():
            torch.testing.assert_close(
                of_rank.pop(f"loss/{name}"), term.detach(), rtol=1e-5, atol=1e-6
            )
        padded, mask = of_rank.pop("padded"), of_rank.pop("mask")
        torch.testing.assert_close(padded, gloria_ranks.sequences()[0])
        assert torch.equal(mask, gloria_ranks.sequences()[1])
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            apart = (of_rank.pop(name) - parameter.grad).norm()
            assert apart < 1e-4 * parameter.grad.norm() + 1e-5, (
                name
            )  # attention does not feel the bias of its keys
        assert not of_rank
