"""M3AE: the published size, and a shared step that is the three published ones in losses, gradients and negatives."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fusion_samples import make_batch, tiny_model, tiny_tokenizer

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.config import M3AEConfig
from medvl.models.fusion_encoders.m3ae import M3AE
from medvl.models.fusion_encoders.streams import DualStreamModel

BENCHMARK = runpy.run_path(str(Path(__file__).parents[3] / "scripts/benchmark_fusion.py"), run_name="benchmark")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer: Tokenizer) -> M3AE:
    made = tiny_model("m3ae", tokenizer)
    assert isinstance(made, M3AE)
    return made


def count(*modules: torch.nn.Module) -> float:
    return sum(parameter.numel() for module in modules for parameter in module.parameters()) / 1e6


def test_the_published_size_has_the_published_parts() -> None:
    """In millions, as measured on the released code; each part within one per cent."""
    with torch.device("meta"):
        model = M3AE.build(M3AEConfig(), pretrained=False, tokenizer=None)
    fusion, decoder = model.fusion, model.mim_head
    near = {"rel": 0.01}
    assert count(model.image_encoder) == pytest.approx(78.8, **near)
    assert count(model.text_encoder) == pytest.approx(124.6, **near)
    assert count(fusion.text_layers, fusion.image_layers) == pytest.approx(113.4, **near)
    assert count(model.mlm_head) == pytest.approx(39.2, **near)
    assert count(decoder) + decoder.positions_ND.numel() / 1e6 == pytest.approx(7.8, **near)  # its table is fixed
    clip_text = (49_408 * 512 + 77 * 512 + 2 * 512) / 1e6  # CLIP's word and position tables: in the release, never used
    assert count(model) + clip_text == pytest.approx(391.6, **near)
    assert model.grid == (18, 18)
    assert model.fusion.pooled_dim == 1536


def test_the_published_settings_are_the_default() -> None:
    config = M3AEConfig()
    assert (config.image_encoder, config.image_arguments, config.text_encoder) == (
        "clip_vit_b16",
        {"layers": 11},
        "roberta",
    )
    assert (config.image_size, config.max_tokens, config.layers, config.heads) == (288, 64, 6, 12)
    assert (config.mlm_probability, config.mask_ratio, config.mim_layer) == (0.15, 0.75, 3)
    assert (config.decoder_width, config.decoder_layers, config.decoder_heads) == (384, 4, 6)
    assert (config.fusion_lr_mult, config.head_lr_mult) == (5.0, 5.0)


def test_a_shared_step_is_three_separate_forwards(model: M3AE, tokenizer: Tokenizer) -> None:
    """Same losses, same gradient of every parameter, dropout off."""
    model.eval()
    batch = make_batch(tokenizer)
    torch.manual_seed(5)
    draw = model.draw(batch)
    results = []
    for predict in (BENCHMARK["separate_forwards"], M3AE.predict):
        model.zero_grad()
        result = model.judge(predict(model, batch, draw), draw)
        result.total.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        results.append((dict(result.terms) | {"total": result.total}, gradients))
    (terms, gradients), (shared_terms, shared_gradients) = results
    for name, value in terms.items():
        torch.testing.assert_close(shared_terms[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            shared_gradients[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.manual_seed(5)
    assert torch.equal(model(batch).total, shared_terms["total"])


def test_the_published_forwards_are_what_their_losses_say(model: M3AE, tokenizer: Tokenizer) -> None:
    """The same three terms again, from whole heads and plain cross-entropies."""
    model.eval()
    batch = make_batch(tokenizer)
    torch.manual_seed(5)
    draw = model.draw(batch)
    terms = model.judge(model.predict(batch, draw), draw).terms
    image, mask_BT = model.image_tokens(batch.image_BCHW), batch.mask_BT
    words_BTV = model.mlm_head(model.fuse(model.text_tokens(draw.masked.ids_BT, mask_BT), image).text.states_BND)
    mlm = torch.nn.functional.cross_entropy(words_BTV.flatten(0, 1), draw.masked.labels_BT.flatten())
    torch.testing.assert_close(terms["mlm"], mlm)
    torch.testing.assert_close(terms["mlm"], losses.mlm(words_BTV, draw.masked.labels_BT))
    logits = model.match(
        model.text_tokens(batch.ids_BT, mask_BT), model.image_tokens(batch.image_BCHW[draw.pairs.image_N])
    )
    torch.testing.assert_close(terms["itm"], torch.nn.functional.cross_entropy(logits, draw.pairs.matched_N.long()))

    assert draw.patches is not None
    visible = model.image_tokens(batch.image_BCHW, keep_BK=draw.patches.kept_BK)
    _, stream = model.fusion.streams(model.text_tokens(batch.ids_BT, mask_BT), visible, 3)
    predicted = model.mim_head(stream.states_BND, draw.patches)
    pixels = model.image_encoder.normalize(batch.image_BCHW)
    errors = []
    for row, patch in draw.patches.masked_BP.nonzero().tolist():
        top, left = 16 * (patch // 4), 16 * (patch % 4)
        target = pixels[row, :, top : top + 16, left : left + 16].permute(1, 2, 0).flatten()
        target = (target - target.mean()) / (target.var(correction=1) + 1e-6).sqrt()
        errors.append((predicted[row, patch] - target).square().mean())
    torch.testing.assert_close(terms["mim"], torch.stack(errors).mean())


CONVOLUTIONAL: dict[str, Any] = {"image_encoder": "resnet_tiny", "image_arguments": {}}
"""Cells of 32 pixels, of which one in four is visible."""


@pytest.mark.parametrize("encoder", [{}, CONVOLUTIONAL], ids=["tokens", "pixels"])
def test_pixels_that_are_hidden_do_not_reach_the_prediction(encoder: dict[str, Any], tokenizer: Tokenizer) -> None:
    model = tiny_model("m3ae", tokenizer, **encoder).eval()
    assert isinstance(model, M3AE)
    batch = make_batch(tokenizer)
    draw = model.draw(batch)
    assert draw.patches is not None
    assert draw.patches.masked_BP.float().mean().item() == 0.75
    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    hidden_BCHW = draw.patches.masked_BP.view(6, 1, *model.grid)
    hidden_BCHW = hidden_BCHW.repeat_interleave(model.patch, 2).repeat_interleave(model.patch, 3)
    noisy = dataclasses.replace(batch, image_BCHW=torch.where(hidden_BCHW, 255 - batch.image_BCHW, batch.image_BCHW))
    seen = dataclasses.replace(batch, image_BCHW=torch.where(hidden_BCHW, batch.image_BCHW, 255 - batch.image_BCHW))
    before, after, other = (model.predict_pixels(some, text, draw)[0] for some in (batch, noisy, seen))
    assert torch.equal(before, after)
    assert not torch.equal(before, other)
    masked, _ = model.texts(batch, draw)
    assert not torch.equal(before, model.predict_pixels(batch, masked, draw)[0])  # it reads the text


def test_running_statistics_are_those_of_whole_images(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer)
    steps = {"m3ae": tiny_model("m3ae", tokenizer, **CONVOLUTIONAL).train()}
    steps["dual_stream"] = tiny_model("dual_stream", tokenizer, **CONVOLUTIONAL).train()
    steps["dual_stream"].image_encoder.load_state_dict(steps["m3ae"].image_encoder.state_dict())
    for model in steps.values():
        model(batch)
    mine, theirs = (dict(steps[name].image_encoder.named_buffers()) for name in ("m3ae", "dual_stream"))
    running = [name for name in mine if name.endswith(("running_mean", "running_var"))]
    assert running
    for name in running:
        torch.testing.assert_close(mine[name], theirs[name])


def test_samples_without_an_image_do_not_change_the_others_pixels(model: M3AE, tokenizer: Tokenizer) -> None:
    model.eval()
    batch = make_batch(tokenizer, 4)
    draw = model.draw(batch)
    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    whole = model.predict_pixels(batch, text, draw)
    some = model.predict_pixels(
        dataclasses.replace(batch, has_image_B=torch.tensor([True, False, True, True])), text, draw
    )
    for mine, theirs in zip(some, whole, strict=True):
        torch.testing.assert_close(mine, theirs[[0, 2, 3]], rtol=1e-5, atol=1e-6)


def test_a_shared_step_is_less_arithmetic() -> None:
    """At the published size, on the meta device; counted with the attention's own products, which a count on the CPU
    leaves out: 8.0 of 277.8 GFLOP."""
    config = M3AEConfig()
    with torch.device("meta"):
        model = M3AE.build(config, pretrained=False, tokenizer=None)
    batch, draw = BENCHMARK["inputs"](model, 4)
    there = BENCHMARK["on_device"](batch, draw, "meta")
    naive, shared = (
        BENCHMARK["gflop"](lambda step=step: step(model, *there)) / 4
        for step in (BENCHMARK["separate_forwards"], M3AE.predict)
    )
    assert naive == pytest.approx(277.8, rel=0.01)
    assert shared == pytest.approx(199.0, rel=0.02)
    assert naive / shared > 1.38


def test_all_that_should_learn_gets_a_gradient_behind_a_convolutional_encoder(tokenizer: Tokenizer) -> None:
    model = tiny_model("m3ae", tokenizer, **CONVOLUTIONAL)
    losses_of = model(make_batch(tokenizer))
    assert losses_of.terms["mim"].item() == pytest.approx(1.0, abs=0.1)
    losses_of.total.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_an_image_that_does_not_divide_into_the_grid_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        tiny_model("m3ae", tokenizer, image_size=70, **CONVOLUTIONAL)


def test_a_dual_stream_is_m3ae_without_pixels(model: M3AE, tokenizer: Tokenizer) -> None:
    """METER: the same names, so that one starts from the other; the same words and pairs from the same draw."""
    parent = tiny_model("dual_stream", tokenizer, seed=7)
    assert isinstance(parent, DualStreamModel)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mim_head.")}
    parent.load_state_dict(state)
    batch = make_batch(tokenizer)
    draw = model.draw(batch)
    model.eval(), parent.eval()
    mine, theirs = model.judge(model.predict(batch, draw), draw), parent.judge(parent.predict(batch, draw), draw)
    for name in ("mlm", "itm"):
        torch.testing.assert_close(mine.terms[name], theirs.terms[name])


def test_weights_of_the_terms(tokenizer: Tokenizer) -> None:
    weights: dict[str, Any] = {"mlm_weight": 2.0, "itm_weight": 0.5, "mim_weight": 3.0}
    model = tiny_model("m3ae", tokenizer, **weights)
    result = model(make_batch(tokenizer))
    expected = 2 * result.terms["mlm"] + 0.5 * result.terms["itm"] + 3 * result.terms["mim"]
    torch.testing.assert_close(result.total, expected)
