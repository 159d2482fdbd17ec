"""ViLT, VisualBERT and PixelBERT: what each has of its own, and word-patch alignment as an
objective.
"""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import SIDE, flags, make_batch, shaken, tiny_model, tiny_tokenizer

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.bases.objectives import (
    Encoded,
    TransportedPairs,
    WordPatchAlignment,
)
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.models.fusion_encoders.vilt import ViLT, ViLTConfig


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def encoded_pairs(tokenizer: Tokenizer, pairs: int = 3) -> Encoded:
    generator = torch.Generator().manual_seed(0)
    text_MTD, image_MPD = (
        torch.randn(pairs, 5, 4, generator=generator),
        torch.randn(pairs, 6, 4, generator=generator),
    )
    text = Tokens(
        text_MTD.requires_grad_(), torch.arange(5) < torch.tensor([5, 4, 2, 3])[:pairs, None]
    )
    image = Tokens(image_MPD.requires_grad_(), None)
    fused = Fused(text, image, text.states_BND[:, 0])
    return Encoded(
        batch=make_batch(tokenizer, 4), image=image, text=text, word_states_ND=torch.zeros(0, 4),
        pooled_MD=fused.pooled_BD, pairs=fused, matched_M=torch.tensor([True, False, True,
        False])[:pairs],
    )  # fmt: skip


@pytest.mark.parametrize(("ends", "prefix"), [(True, 0), (False, 1)])
def test_alignment_is_the_distance_of_matches_less_that_of_the_others(
    ends: bool, prefix: int, tokenizer: Tokenizer
) -> None:
    """CLS, SEP and the class token take part in UNITER only; the text of two tokens then has no
    word.
    """
    encoded = encoded_pairs(tokenizer)
    objective = WordPatchAlignment(0.1, text_ends=ends, image_prefix=prefix)
    loss = objective.loss(objective.predict(encoded, None), None)
    assert encoded.pairs is not None
    text_MTD, image_MPD = encoded.pairs.text.states_BND, encoded.pairs.image.states_BND
    expected = torch.zeros(())
    for row, (length, sign) in enumerate(((5, 1), (4, -1), (2, 1))):
        words_TD = (
            text_MTD[row : row + 1, :length] if ends else text_MTD[row : row + 1, 1 : length - 1]
        )
        patches_PD = image_MPD[row : row + 1, prefix:]
        pads = [torch.zeros(1, side.shape[1], dtype=torch.bool) for side in (words_TD, patches_PD)]
        expected = (
            expected + sign * losses.word_patch_alignment(words_TD, patches_PD, *pads)[0].sum() / 3
        )
    torch.testing.assert_close(loss, expected)
    for mine, wanted in zip(
        torch.autograd.grad(loss, [text_MTD, image_MPD]),
        torch.autograd.grad(expected, [text_MTD, image_MPD]),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted)


def test_alignment_of_no_pair_is_zero() -> None:
    none = TransportedPairs(torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.bool))
    assert WordPatchAlignment(0.1, text_ends=True).loss(none, None) == 0


def test_vilt_matches_and_aligns_the_same_pairs(tokenizer: Tokenizer) -> None:
    model: Any = shaken(tiny_model("vilt", tokenizer)).eval()
    batch = make_batch(
        tokenizer, has_image_B=flags(1, 1, 1, 1, 0, 1), has_text_B=flags(1, 1, 1, 1, 1, 0)
    )
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    result = model.losses(model.predict(batch, corruption), corruption)
    pairs = corruption.of(model.itm)
    assert len(pairs) == 4  # complete samples
    text, image = (
        model.text_tokens(batch.ids_BT, batch.mask_BT),
        model.image_tokens(batch.image_BCHW),
    )
    fused = model.fuse(text.rows(pairs.text_N), image.rows(pairs.image_N))
    length_N = batch.mask_BT.sum(dim=1)[pairs.text_N]
    distances = [
        losses.word_patch_alignment(
            words[None, 1 : int(length) - 1], patches[None, 1:],
            torch.zeros(1, int(length) - 2, dtype=torch.bool), torch.zeros(1, 16, dtype=torch.bool),
        )[0]
        for words, patches, length in zip(fused.text.states_BND, fused.image.states_BND, length_N,
        strict=True)
    ]  # fmt: skip
    signs = torch.where(pairs.matched_N, 1.0, -1.0)
    torch.testing.assert_close(
        result.terms["wpa"], (torch.cat(distances) * signs).mean(), rtol=1e-4, atol=1e-5
    )
    total = result.terms["mlm"] + result.terms["itm"] + 0.1 * result.terms["wpa"]
    torch.testing.assert_close(result.total, total)


def test_vit_over_its_own_tokens_is_the_image_encoder() -> None:
    encoder = create_image_encoder("timm:test_vit", image_size=SIDE, depth=2).eval()
    image_BCHW = make_batch(tiny_tokenizer(), 3).image_BCHW
    states = encoder.encode_tokens(encoder.embed(image_BCHW), None)
    assert len(states) == 3
    features = encoder(image_BCHW)
    torch.testing.assert_close(states[-1][:, 1:], features.patches_BPD)
    torch.testing.assert_close(states[-1][:, 0], features.pooled_BD)
    padded = torch.cat([encoder.embed(image_BCHW), torch.randn(3, 2, 64)], dim=1)
    real = torch.arange(19).expand(3, -1) < 17
    torch.testing.assert_close(
        encoder.encode_tokens(padded, real)[-1][:, :17], states[-1], rtol=1e-4, atol=1e-5
    )
    resnet = create_image_encoder("resnet_tiny", image_size=SIDE)
    with raises(ConfigError, "unsupported", "image_encoder"):
        resnet.embed(image_BCHW)
    with raises(ConfigError, "unsupported", "image_encoder"):
        resnet.encode_tokens(padded, None)


@pytest.mark.parametrize(("name", "cells", "leading"), [("vilt", 16, 1), ("pixelbert", 4, 0)])
def test_training_samples_cells_of_each_image(
    name: str, cells: int, leading: int, tokenizer: Tokenizer
) -> None:
    settings: dict[str, Any] = {"image_tokens": 2}
    if name != "vilt":
        settings["text_arguments"] = {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "hidden_dropout_prob": 0.0,
        }
    model = tiny_model(name, tokenizer, **settings)
    image_BCHW = make_batch(tokenizer, 4).image_BCHW
    model.eval()
    whole_BND = model.image_tokens(image_BCHW).states_BND
    assert whole_BND.shape[1] == leading + cells
    model.training = True  # its encoders stay in eval mode
    sampled_BND = model.image_tokens(image_BCHW).states_BND
    assert sampled_BND.shape[1] == leading + 2
    torch.testing.assert_close(sampled_BND[:, :leading], whole_BND[:, :leading])
    nearest = torch.cdist(sampled_BND, whole_BND).min(dim=2)
    assert nearest.values.max() < 1e-4
    assert len({tuple(row) for row in nearest.indices.tolist()}) > 1
    with raises(ConfigError, "out_of_range", "image_tokens"):
        dataclasses.replace(model.config, image_tokens=0)


def test_vilt_has_the_published_size_and_layout() -> None:
    """The paper counts 87.4 million parameters without the words' embeddings."""
    with torch.device("meta"):
        model = ViLT.build(ViLTConfig(), pretrained=False, tokenizer=None)
    counted = sum(
        p.numel() for part in (model.image_encoder, model.modality) for p in part.parameters()
    )
    assert counted == pytest.approx(87.4e6, rel=0.005)
    assert model.image_encoder.grid(384, 384) == (12, 12)
    with raises(ConfigError, "unsupported", "image_encoder"):
        tiny_model("vilt", tiny_tokenizer(), image_encoder="resnet_tiny", image_arguments={})
    with raises(ConfigError, "unsupported", "image_encoder"):
        tiny_model("vilt", tiny_tokenizer(), text_arguments={"num_hidden_layers": 0})


def test_visualbert_starts_regions_from_the_tables_of_words(tokenizer: Tokenizer) -> None:
    model: Any = tiny_model("visualbert", tokenizer)
    words = model.text_encoder.backbone.embeddings
    assert torch.equal(model.image_types.weight, words.token_type_embeddings.weight)
    assert torch.equal(model.image_positions.weight, words.position_embeddings.weight)
    assert model.image_positions.weight is not words.position_embeddings.weight
    batch = make_batch(tokenizer, 2, image_BCHW=torch.zeros(2, 1, SIDE, SIDE, dtype=torch.uint8))
    features = model.image_encoder.eval()(batch.image_BCHW)
    same = dataclasses.replace(features, patches_BPD=features.patches_BPD[:, :1].expand(-1, 4, -1))
    model.eval()
    states_BPD = model.embed_image(same)
    torch.testing.assert_close(states_BPD[:, 0], states_BPD[:, 3])  # no position, as published
    numbered: Any = tiny_model("visualbert", tokenizer, image_positions=True).eval()
    states_BPD = numbered.embed_image(same)
    assert not torch.allclose(states_BPD[:, 0], states_BPD[:, 3], atol=1e-3)


def test_visualbert_predicts_words_beside_wrong_images(tokenizer: Tokenizer) -> None:
    model: Any = shaken(tiny_model("visualbert", tokenizer)).eval()
    batch = make_batch(tokenizer)
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    encoded = model.encode(batch, corruption)
    words, pairs = corruption.of(model.mlm), corruption.of(model.itm)
    image_of = dict(zip(pairs.text_N.tolist(), pairs.image_N.tolist(), strict=True))
    rows = torch.tensor([image_of[row] for row in range(len(batch))])
    assert (rows != torch.arange(6)).sum() == 3
    fused = model.fuse(
        model.text_tokens(words.ids_BT, batch.mask_BT), model.image_tokens(batch.image_BCHW[rows])
    )
    states_ND = fused.text.states_BND.flatten(0, 1)[words.position_N]
    torch.testing.assert_close(encoded.word_states_ND, states_ND, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        encoded.pooled_MD, fused.pooled_BD[pairs.text_N], rtol=1e-4, atol=1e-5
    )
