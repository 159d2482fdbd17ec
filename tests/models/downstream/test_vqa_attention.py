"""Attention maps of every fusion-encoder against weights computed one by one."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import SIDE, TINY, flags, make_batch, shaken, tiny_model, tiny_tokenizer
from torch import Tensor

from medvl.errors import ConfigError
from medvl.models.downstream.vqa.attention import QuestionAttention, question_attention
from medvl.models.fusion_encoders.parts.transformer import Attention
from medvl.schema import Batch

LAST = {
    **dict.fromkeys(("dual_stream", "m3ae", "mixed"), "fusion.text_layers.1.cross_attention"),
    "ptunifier": "fusion.text_layers.3.cross_attention",
    "arl": "fusion.text_layers.1.text.cross_attention",
    "single_stream": "fusion.layers.1.attention",
    **dict.fromkeys(("albef", "m2i2", "mumc"), "fusion.1.cross_attention"),
    **dict.fromkeys(
        ("medvill", "pixelbert", "uniter", "visualbert"),
        "text_encoder.backbone.encoder.layer.1.attention.self",
    ),
    "lxmert": "cross_layers.1.cross_attention",
    "vilt": "image_encoder.backbone.blocks.1.attn",
}
"""The module whose attention is mapped."""
FOUR_CELLS = ("medvill", "pixelbert", "uniter", "visualbert")
"""BERTs over the 2 x 2 grid of a ResNet."""
CELLS = {
    "medvill": slice(1, 5),
    "single_stream": slice(1, 17),
    **dict.fromkeys(("lxmert", "pixelbert", "uniter", "visualbert"), slice(-4, None)),
    "vilt": slice(-16, None),
}
"""Places of the grid's cells in the keys of that attention; by default those after the first."""
FIRST = {"medvill": 5, "single_stream": 17}
"""Place of the text's first token in its queries."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def random_model(name: str, tokenizer: Any, **settings: Any) -> Any:
    return shaken(tiny_model(name, tokenizer, **settings)).eval()


def rows(batch: Batch, chosen: slice) -> Batch:
    """Select samples of a batch, padded to the longest text among them."""
    length = int(batch.mask_BT[chosen].sum(dim=1).max())
    return dataclasses.replace(
        batch,
        keys=batch.keys[chosen],
        image_BCHW=batch.image_BCHW[chosen],
        ids_BT=batch.ids_BT[chosen, :length],
        mask_BT=batch.mask_BT[chosen, :length],
        labels_BL=batch.labels_BL[chosen],
        texts=batch.texts[chosen],
    )


def last_attention(model: Any, name: str, batch: Batch) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return the last attention module, and its states, context and mask (B, Q, K) in the
    forward pass.
    """
    module, seen = model.get_submodule(LAST[name]), []
    hook = module.register_forward_pre_hook(lambda *given: seen.append(given[1:]), with_kwargs=True)
    with torch.no_grad():
        model.features(batch)
    hook.remove()
    inputs, named = seen[0]
    if name in FOUR_CELLS:  # a module of transformers
        mask = named["attention_mask"]
        return module, inputs[0], inputs[0], mask[:, 0].expand(-1, inputs[0].shape[1], -1)
    if name == "vilt":  # of timm
        return (
            module,
            inputs[0],
            inputs[0],
            named["attn_mask"][:, 0].expand(-1, inputs[0].shape[1], -1),
        )
    states_BQD, context_BKD, mask, *packings = inputs
    assert not any(packings)
    full_BQK = torch.ones(*states_BQD.shape[:2], context_BKD.shape[1], dtype=torch.bool)
    return module, states_BQD, context_BKD, full_BQK if mask is None else full_BQK & mask


def naive_weights(query_BQD: Tensor, key_BKD: Tensor, heads: int, mask_BQK: Tensor) -> Tensor:
    """(B, Q, K): one query of one head at a time, mean over the heads."""
    size = query_BQD.shape[2] // heads
    weights = torch.zeros(len(query_BQD), query_BQD.shape[1], key_BKD.shape[1])
    for row in range(len(query_BQD)):
        for place in range(query_BQD.shape[1]):
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = key_BKD[row, :, part] @ query_BQD[row, place, part] / size**0.5
                scores[~mask_BQK[row, place]] = -torch.inf
                weights[row, place] += scores.exp() / scores.exp().sum() / heads
    return weights


def expected_maps(model: Any, name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """(pooled_BP, words_BP) from the inputs of the last attention."""
    module, states_BQD, context_BKD, mask_BQK = last_attention(model, name, batch)
    heads = {Attention: "heads"}.get(
        type(module), "num_heads" if name == "vilt" else "num_attention_heads"
    )
    heads = getattr(module, heads)
    with torch.no_grad():
        if name == "vilt":
            query_BQD, key_BKD, _ = module.qkv(states_BQD).chunk(3, dim=2)
        else:
            query_BQD, key_BKD = module.query(states_BQD), module.key(context_BKD)
        weights = naive_weights(query_BQD, key_BKD, heads, mask_BQK)
    cells, first = CELLS.get(name, slice(1, None)), FIRST.get(name, 0)
    words = []
    for row, length in enumerate(batch.mask_BT.sum(dim=1).tolist()):
        words.append(weights[row, first + 1 : first + length - 1].mean(dim=0)[cells])
    return weights[:, 0, cells], torch.stack(words)


@pytest.mark.parametrize(
    "name", sorted(TINY.keys() - {"berthop"})
)  # VisualBERT's attention, without a grid
def test_maps_equal_the_attention_of_the_forward_pass(name: str, tokenizer: Any) -> None:
    model, batch = random_model(name, tokenizer), make_batch(tokenizer)
    pooled_BP, words_BP = expected_maps(model, name, batch)
    maps = question_attention(model, batch)
    torch.testing.assert_close(maps.pooled_BP, pooled_BP, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(maps.words_BP, words_BP, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(TINY))
def test_shapes_and_sums(name: str, tokenizer: Any) -> None:
    maps = question_attention(random_model(name, tokenizer), make_batch(tokenizer))
    grid = None if name == "berthop" else (2, 2) if name in (*FOUR_CELLS, "lxmert") else (4, 4)
    assert maps.grid == grid
    for map_BP in (maps.pooled_BP, maps.words_BP):
        assert map_BP.shape == (6, map_BP.shape[1] if grid is None else grid[0] * grid[1])
        assert map_BP.dtype == torch.float32
        assert (map_BP >= 0).all()
        assert (map_BP.sum(dim=1) <= 1 + 1e-5).all()
        assert (map_BP.sum(dim=1) > 1e-5).all()
        assert not map_BP.requires_grad
    assert not torch.allclose(maps.pooled_BP[0], maps.pooled_BP[1], atol=1e-4)


@pytest.mark.parametrize("name", sorted(TINY))
def test_padding_and_other_samples_do_not_change_maps(name: str, tokenizer: Any) -> None:
    model, batch = random_model(name, tokenizer), make_batch(tokenizer)
    expected_maps_of_all = question_attention(model, batch)
    alone = [
        question_attention(model, rows(batch, slice(row, row + 1))) for row in range(len(batch))
    ]
    other_BT = torch.where(batch.mask_BT, batch.ids_BT, batch.ids_BT.max())
    noisy = question_attention(model, dataclasses.replace(batch, ids_BT=other_BT))
    for field in ("pooled_BP", "words_BP"):
        expected = getattr(expected_maps_of_all, field)
        torch.testing.assert_close(
            torch.cat([getattr(one, field) for one in alone]), expected, rtol=1e-3, atol=1e-5
        )
        torch.testing.assert_close(getattr(noisy, field), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(TINY))
def test_sample_without_an_image_or_text_has_zero_maps(name: str, tokenizer: Any) -> None:
    model = random_model(name, tokenizer)
    batch = make_batch(
        tokenizer, has_image_B=flags(1, 0, 1, 1, 0, 1), has_text_B=flags(1, 1, 0, 1, 1, 1)
    )
    maps = question_attention(model, batch)
    assert not maps.pooled_BP[[1, 4]].any()
    assert not maps.words_BP[[1, 2, 4]].any()
    assert (maps.words_BP[[0, 3, 5]].sum(dim=1) > 0.01).all()
    full = question_attention(model, make_batch(tokenizer))
    torch.testing.assert_close(maps.words_BP[0], full.words_BP[0], rtol=1e-3, atol=1e-5)
    nothing = question_attention(
        model, dataclasses.replace(batch, has_image_B=torch.zeros(6, dtype=torch.bool))
    )
    if nothing.grid is not None:
        assert nothing.pooled_BP.shape == (6, nothing.grid[0] * nothing.grid[1])
    assert not nothing.pooled_BP.any()
    assert not nothing.words_BP.any()


def test_question_without_words_has_zero_word_maps(tokenizer: Any) -> None:
    batch = make_batch(tokenizer, size=2, texts=("", "No pneumothorax."), has_text_B=None)
    assert batch.mask_BT.sum(dim=1)[0] == 2
    maps = question_attention(random_model("dual_stream", tokenizer), batch)
    assert maps.pooled_BP[0].sum() > 0.01
    assert not maps.words_BP[0].any()
    assert maps.words_BP[1].any()


def test_regions_have_no_grid_and_padding_gets_zero(tokenizer: Any) -> None:
    model = random_model("dual_stream", tokenizer, image_encoder="regions:12", image_arguments={})
    regions_BPD = torch.randn(6, 5, 12, generator=torch.Generator().manual_seed(0))
    regions_BPD[2, 3:] = 0
    maps = question_attention(model, make_batch(tokenizer, regions_BPD=regions_BPD))
    assert maps.grid is None
    assert maps.pooled_BP.shape == (6, 5)
    assert not maps.pooled_BP[2, 3:].any()
    assert (maps.pooled_BP[2, :3] > 0).all()


def test_masked_words_have_zero_maps(tokenizer: Any) -> None:
    model = random_model("medvill", tokenizer, attention="non_cross")
    assert not question_attention(model, make_batch(tokenizer)).words_BP.any()


def test_map_points_to_the_matching_cell(tokenizer: Any) -> None:
    """One cell's key matches every query and gets all attention."""
    model, batch = random_model("dual_stream", tokenizer), make_batch(tokenizer)
    layer = model.get_submodule(LAST["dual_stream"])
    wanted = 6
    layer.query.register_forward_hook(lambda *_: torch.full((6, batch.ids_BT.shape[1], 24), 4.0))
    keys_BKD = torch.zeros(6, 17, 24)
    keys_BKD[:, 1 + wanted] = 4.0
    layer.key.register_forward_hook(lambda *_: keys_BKD)
    maps = question_attention(model, batch)
    assert maps.pooled_BP.argmax(dim=1).tolist() == [wanted] * 6
    assert (maps.words_BP[:, wanted] > 0.99).all()


@pytest.mark.parametrize("name", sorted(TINY))
def test_forward_pass_computes_no_maps(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computing maps does not change the model."""
    model, batch = random_model(name, tokenizer), make_batch(tokenizer)
    with torch.no_grad():
        before = model.features(batch).pooled_BD
        question_attention(model, batch)
        monkeypatch.setattr(
            "medvl.models.fusion_encoders.parts.transformer.attention_weights", None
        )
        monkeypatch.setattr(
            "medvl.models.fusion_encoders.bases.bert_stream.attention_weights", None
        )
        after = model.features(batch).pooled_BD
    assert torch.equal(before, after)


def test_training_mode_is_rejected(tokenizer: Any) -> None:
    model = tiny_model("medvill", tokenizer).train()
    with raises(ConfigError, "conflict"):
        question_attention(model, make_batch(tokenizer))


def test_grid_follows_the_image_size(tokenizer: Any) -> None:
    model = random_model("dual_stream", tokenizer, image_encoder="resnet_tiny", image_arguments={})
    cells = {}
    for side in (SIDE, 2 * SIDE):
        image_BCHW = torch.zeros(6, 1, side, SIDE, dtype=torch.uint8)
        maps: QuestionAttention = question_attention(
            model, make_batch(tokenizer, image_BCHW=image_BCHW)
        )
        assert maps.grid is not None
        assert maps.pooled_BP.shape == (6, maps.grid[0] * maps.grid[1])
        cells[side] = maps.grid
    assert cells[2 * SIDE] == (2 * cells[SIDE][0], cells[SIDE][1])
