"""Layers and layouts of fusion-encoders against naive forms and transformers' own BERT layer."""

import pytest
import torch
from torch import Tensor
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from medvl.losses.masked import mask_patches
from medvl.models.base import WordHead
from medvl.models.fusion_encoders.parts.encoder import (
    DualStream,
    FusionEncoder,
    SingleStream,
    Tokens,
)
from medvl.models.fusion_encoders.parts.heads import (
    Patches,
    PixelDecoder,
    PixelDecoderConfig,
    sinusoids,
)
from medvl.models.fusion_encoders.parts.transformer import Attention, SelfAttentionLayer, Sizes

SIZES = Sizes(width=16, layers=3, heads=4, intermediate=32)


def tokens(seed: int, batch: int, count: int, *, padded: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    mask_BN = torch.ones(batch, count, dtype=torch.bool)
    if padded:
        mask_BN[0, -padded:] = False
    return Tokens(torch.randn(batch, count, 16, generator=generator), mask_BN)


def random_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Set weights far from zero, so that residual connections cannot hide an error."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.eval()


def test_self_attention_layer_equals_bert() -> None:
    config = BertConfig(
        hidden_size=16,
        num_attention_heads=4,
        intermediate_size=32,
        attn_implementation="eager",
        hidden_act="gelu",
    )
    bert, ours = random_weights(BertLayer(config)), SelfAttentionLayer(SIZES).eval()
    names = {
        "attention.self.query": "attention.query",
        "attention.self.key": "attention.key",
        "attention.self.value": "attention.value",
        "attention.output.dense": "attention.out",
        "attention.output.LayerNorm": "attention.norm",
        "intermediate.dense": "feed_forward.inner",
        "output.dense": "feed_forward.outer",
        "output.LayerNorm": "feed_forward.norm",
    }
    state = {}
    for name, tensor in bert.state_dict().items():
        module, _, leaf = name.rpartition(".")
        state[f"{names[module]}.{leaf}"] = tensor
    ours.load_state_dict(state)
    given = tokens(0, 2, 7, padded=3)
    assert given.mask_BN is not None
    additive = (~given.mask_BN[:, None, None, :]).float() * torch.finfo(torch.float32).min
    expected = bert(given.states_BND, additive)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(
        ours(given.states_BND, given.mask_BN[:, None, :]), expected, rtol=1e-4, atol=1e-5
    )


def naive_attention(
    layer: Attention, states_BQD: Tensor, context_BKD: Tensor, mask_BQK: Tensor
) -> Tensor:
    """One query of one head at a time."""
    query, key, value = layer.query(states_BQD), layer.key(context_BKD), layer.value(context_BKD)
    size = query.shape[2] // layer.heads
    attended = torch.zeros_like(query)
    for row in range(len(query)):
        for head in range(layer.heads):
            part = slice(head * size, (head + 1) * size)
            for place in range(query.shape[1]):
                scores = key[row, :, part] @ query[row, place, part] / size**0.5
                scores[~mask_BQK[row, place]] = -torch.inf
                attended[row, place, part] = scores.softmax(0) @ value[row, :, part]
    return layer.norm(states_BQD + layer.out(attended))


def test_attention_equals_naive_form_in_value_and_gradient() -> None:
    layer = random_weights(Attention(SIZES))
    assert isinstance(layer, Attention)
    states, context = tokens(1, 2, 5).states_BND, tokens(2, 2, 6).states_BND
    mask_BQK = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    mask_BQK[:, :, 0] = True
    gradients = []
    for form in (layer, lambda *inputs: naive_attention(layer, *inputs)):
        layer.zero_grad()
        output = form(states, context, mask_BQK)
        output.square().sum().backward()
        gradients.append([output, *(parameter.grad.clone() for parameter in layer.parameters())])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    weights_BHQK = layer.weights(states, context, mask_BQK)
    torch.testing.assert_close(weights_BHQK.sum(dim=-1), torch.ones(2, 4, 5))
    assert not weights_BHQK[~mask_BQK[:, None].expand_as(weights_BHQK)].any()


def test_a_query_without_keys_stays_finite() -> None:
    layer = random_weights(Attention(SIZES))
    states = tokens(1, 2, 5).states_BND.requires_grad_()
    output = layer(states, states, torch.zeros(2, 5, 5, dtype=torch.bool))
    output.sum().backward()
    assert output.isfinite().all()
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_both_streams_read_the_layer_below() -> None:
    """As in M3AE, no stream reads the output of the other in the same layer."""
    encoder = random_weights(DualStream(SIZES))
    assert isinstance(encoder, DualStream)
    text, image = tokens(1, 2, 5, padded=2), tokens(2, 2, 7, padded=1)
    text_states, image_states = encoder.mark(text, image)
    for text_layer, image_layer in zip(encoder.text_layers, encoder.image_layers, strict=True):
        old_text, old_image = text_states, image_states
        for layer, own, other, own_mask, other_mask in (
            (text_layer, old_text, old_image, text.mask_BN, image.mask_BN),
            (image_layer, old_image, old_text, image.mask_BN, text.mask_BN),
        ):
            new = layer.attention(own, own, own_mask[:, None].expand(-1, own.shape[1], -1))
            new = layer.cross_attention(
                new, other, other_mask[:, None].expand(-1, own.shape[1], -1)
            )
            new = layer.feed_forward(new)
            text_states, image_states = (
                (new, image_states) if layer is text_layer else (text_states, new)
            )
    fused = encoder(text, image)
    torch.testing.assert_close(fused.text.states_BND, text_states)
    torch.testing.assert_close(fused.image.states_BND, image_states)
    below, _ = encoder.streams(text, image, 2)
    assert not torch.allclose(below.states_BND, text_states)
    assert fused.pooled_BD.shape == (2, encoder.pooled_dim) == (2, 32)


@pytest.mark.parametrize("layout", [DualStream, SingleStream])
def test_padding_and_row_order_change_nothing(layout: type[FusionEncoder]) -> None:
    encoder = random_weights(layout(SIZES))
    text, image = tokens(1, 3, 5, padded=2), tokens(2, 3, 7, padded=1)
    fused = encoder(text, image)
    order = torch.tensor([2, 0, 1])
    reordered = encoder(text.rows(order), image.rows(order))
    torch.testing.assert_close(reordered.pooled_BD, fused.pooled_BD[order])
    noise = tokens(9, 3, 4).states_BND * 50
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    longer = [
        Tokens(
            torch.cat([part.states_BND, noise], dim=1), torch.cat([part.mask_BN, nothing], dim=1)
        )
        for part in (text, image)
    ]
    padded = encoder(*longer)
    torch.testing.assert_close(padded.pooled_BD, fused.pooled_BD, rtol=1e-4, atol=1e-5)
    for mine, theirs in ((padded.text, fused.text), (padded.image, fused.image)):
        real = theirs.mask_BN
        torch.testing.assert_close(
            mine.states_BND[:, : real.shape[1]][real], theirs.states_BND[real], rtol=1e-4, atol=1e-5
        )


def test_full_mask_equals_no_mask() -> None:
    for layout in (DualStream, SingleStream):
        encoder = random_weights(layout(SIZES))
        text, image = tokens(1, 2, 5), tokens(2, 2, 7)
        bare = encoder(Tokens(text.states_BND, None), Tokens(image.states_BND, None))
        torch.testing.assert_close(
            encoder(text, image).pooled_BD, bare.pooled_BD, rtol=1e-5, atol=1e-6
        )


def test_seq2seq_stream_is_causal_over_its_text() -> None:
    encoder = random_weights(SingleStream(SIZES, "seq2seq"))
    text, image = tokens(1, 2, 5), tokens(2, 2, 7)
    before = encoder(text, image)
    states = text.states_BND.clone()
    states[:, 3] += 1
    after = encoder(Tokens(states, text.mask_BN), image)
    torch.testing.assert_close(after.text.states_BND[:, :3], before.text.states_BND[:, :3])
    torch.testing.assert_close(after.image.states_BND, before.image.states_BND)
    assert not torch.allclose(after.text.states_BND[:, 4], before.text.states_BND[:, 4])


def test_weights_are_initialised_like_bert() -> None:
    encoder = DualStream(Sizes(width=128, layers=2, heads=4, intermediate=256))
    for name, parameter in encoder.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name


def test_fixed_positions_equal_mae() -> None:
    """Each number by its formula; zeros for the class token."""
    table = sinusoids((2, 3), 8)
    assert table.shape == (7, 8)
    assert not table[0].any()
    for row in range(2):
        for column in range(3):
            expected = [
                form(place / 10_000 ** (index / 2))
                for place in (torch.tensor(float(column)), torch.tensor(float(row)))
                for form in (torch.sin, torch.cos)
                for index in range(2)
            ]
            torch.testing.assert_close(table[1 + row * 3 + column], torch.stack(expected))


def test_pixel_decoder_restores_patch_order() -> None:
    torch.manual_seed(0)
    decoder = PixelDecoder(
        16,
        Patches((3, 3), 2, 12),
        PixelDecoderConfig(decoder_width=8, decoder_layers=2, decoder_heads=2),
    ).eval()
    patches = mask_patches(4, 9, 0.5, torch.Generator().manual_seed(0))
    states = tokens(0, 4, 1 + patches.kept_BK.shape[1]).states_BND
    predicted = decoder(states, patches)
    assert predicted.shape == (4, 9, 12)
    embedded = decoder.embed(states)
    hidden = decoder.mask_token.repeat(4, 10, 1)
    for row in range(4):
        hidden[row, 0] = embedded[row, 0]
        for place, patch in enumerate(patches.kept_BK[row].tolist()):
            hidden[row, 1 + patch] = embedded[row, 1 + place]
    hidden = hidden + decoder.positions_ND
    for block in decoder.blocks:
        hidden = block(hidden)
    torch.testing.assert_close(predicted, decoder.pixels(decoder.norm(hidden))[:, 1:])


def test_tied_word_head_uses_the_embedding_table() -> None:
    table = torch.randn(20, 16)
    tied, free = WordHead(16, 20, tied=True), WordHead(16, 20)
    assert sum(parameter.numel() for parameter in free.parameters()) == 16 * 17 + 32 + 20 * 16 + 20
    assert sum(parameter.numel() for parameter in tied.parameters()) == 16 * 17 + 32 + 20
    states = torch.randn(3, 16)
    hidden = tied.norm(torch.nn.functional.gelu(tied.dense(states)))
    torch.testing.assert_close(tied(states, table), hidden @ table.T + tied.bias)
