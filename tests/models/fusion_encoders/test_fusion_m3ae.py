"""M3AE: the published sizes, and a shared step that equals the three published forward passes."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import make_batch, tiny_model, tiny_tokenizer

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.m3ae import M3AE, M3AEConfig
from medvl.models.fusion_encoders.streams import DualStreamModel

SCRIPTS = str(Path(__file__).parents[3] / "scripts")
sys.path.insert(0, SCRIPTS)  # where the benchmark's modules find each other
try:
    from lines import fusion as benchmark
finally:
    sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer: Tokenizer) -> M3AE:
    m3ae = tiny_model("m3ae", tokenizer)
    assert isinstance(m3ae, M3AE)
    return m3ae


def count(*modules: torch.nn.Module) -> float:
    return sum(parameter.numel() for module in modules for parameter in module.parameters()) / 1e6


def test_paper_model_has_published_parameter_counts() -> None:
    """In millions, as measured on the released code; each part within 1 %."""
    with torch.device("meta"):
        model = M3AE.build(M3AEConfig(), pretrained=False, tokenizer=None)
    fusion, decoder = model.fusion, model.mim_head
    near = {"rel": 0.01}
    assert count(model.image_encoder) == pytest.approx(78.8, **near)
    assert count(model.text_encoder) == pytest.approx(124.6, **near)
    assert count(fusion.text_layers, fusion.image_layers) == pytest.approx(113.4, **near)
    assert count(model.mlm_head) == pytest.approx(39.2, **near)
    assert count(decoder) + decoder.positions_ND.numel() / 1e6 == pytest.approx(
        7.8, **near
    )  # its table is fixed
    clip_text = (
        49_408 * 512 + 77 * 512 + 2 * 512
    ) / 1e6  # CLIP's word and position tables: in the release, never used
    assert count(model) + clip_text == pytest.approx(391.6, **near)
    assert model.mim_head.patches.grid == (18, 18)
    assert model.fusion.pooled_dim == 1536


def test_defaults_are_the_published_settings() -> None:
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


def test_shared_step_equals_three_separate_forward_passes(
    model: M3AE, tokenizer: Tokenizer
) -> None:
    """Equal losses and gradients of every parameter, without dropout."""
    model.eval()
    batch = make_batch(tokenizer)
    torch.manual_seed(5)
    corruption = model.corrupt(batch)
    results = []
    for predict in (benchmark.separate_forwards, M3AE.predict):
        model.zero_grad()
        result = model.losses(predict(model, batch, corruption), corruption)
        result.total.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        results.append((dict(result.terms) | {"total": result.total}, gradients))
    (terms, gradients), (shared_terms, shared_gradients) = results
    for name, value in terms.items():
        torch.testing.assert_close(shared_terms[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            shared_gradients[name],
            gradient,
            rtol=1e-3,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    torch.manual_seed(5)
    assert torch.equal(model(batch).total, shared_terms["total"])


def test_losses_equal_plain_cross_entropies_and_squared_errors(
    model: M3AE, tokenizer: Tokenizer
) -> None:
    """The three terms again, from unshared heads."""
    model.eval()
    batch = make_batch(tokenizer)
    torch.manual_seed(5)
    corruption = model.corrupt(batch)
    words, pairs, patches = (
        corruption.of(model.mlm),
        corruption.of(model.itm),
        corruption.of(model.mim),
    )
    terms = model.losses(model.predict(batch, corruption), corruption).terms
    image, mask_BT = model.image_tokens(batch.image_BCHW), batch.mask_BT
    words_BTV = model.mlm_head(
        model.fuse(model.text_tokens(words.ids_BT, mask_BT), image).text.states_BND
    )
    mlm = torch.nn.functional.cross_entropy(words_BTV.flatten(0, 1), words.labels_BT.flatten())
    torch.testing.assert_close(terms["mlm"], mlm)
    torch.testing.assert_close(terms["mlm"], losses.mlm(words_BTV, words.labels_BT))
    logits = model.match(
        model.text_tokens(batch.ids_BT, mask_BT),
        model.image_tokens(batch.image_BCHW[pairs.image_N]),
    )
    torch.testing.assert_close(
        terms["itm"], torch.nn.functional.cross_entropy(logits, pairs.matched_N.long())
    )

    visible = model.image_tokens(batch.image_BCHW, keep_BK=patches.kept_BK)
    _, stream = model.fusion.streams(model.text_tokens(batch.ids_BT, mask_BT), visible, 3)
    predicted = model.mim_head(stream.states_BND, patches)
    pixels = model.image_encoder.normalize(batch.image_BCHW)
    errors = []
    for row, patch in patches.masked_BP.nonzero().tolist():
        top, left = 16 * (patch // 4), 16 * (patch % 4)
        target = pixels[row, :, top : top + 16, left : left + 16].permute(1, 2, 0).flatten()
        target = (target - target.mean()) / (target.var(correction=1) + 1e-6).sqrt()
        errors.append((predicted[row, patch] - target).square().mean())
    torch.testing.assert_close(terms["mim"], torch.stack(errors).mean())


CONVOLUTIONAL: dict[str, Any] = {"image_encoder": "resnet_tiny", "image_arguments": {}}
"""Cells of 32 pixels, one in four visible."""


@pytest.mark.parametrize("encoder", [{}, CONVOLUTIONAL], ids=["tokens", "pixels"])
def test_masked_pixels_do_not_change_the_prediction(
    encoder: dict[str, Any], tokenizer: Tokenizer
) -> None:
    model = tiny_model("m3ae", tokenizer, **encoder).eval()
    assert isinstance(model, M3AE)
    batch = make_batch(tokenizer)
    patches = model.mim.corrupt(batch)
    assert patches.masked_BP.float().mean().item() == 0.75
    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    grid, side = model.mim_head.patches.grid, model.mim_head.patches.side
    hidden_BCHW = (
        patches.masked_BP.view(6, 1, *grid).repeat_interleave(side, 2).repeat_interleave(side, 3)
    )
    noisy = dataclasses.replace(
        batch, image_BCHW=torch.where(hidden_BCHW, 255 - batch.image_BCHW, batch.image_BCHW)
    )
    seen = dataclasses.replace(
        batch, image_BCHW=torch.where(hidden_BCHW, batch.image_BCHW, 255 - batch.image_BCHW)
    )
    before, after, other = (
        model.mim.predict_patches(images, text, text, patches).pixels_BPC
        for images in (batch, noisy, seen)
    )
    assert torch.equal(before, after)
    assert not torch.equal(before, other)
    other_text = text.rows(torch.arange(6).flip(0))
    assert not torch.equal(
        before, model.mim.predict_patches(batch, text, other_text, patches).pixels_BPC
    )


def test_batch_norm_statistics_come_from_whole_images(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer)
    steps = {"m3ae": tiny_model("m3ae", tokenizer, **CONVOLUTIONAL).train()}
    steps["dual_stream"] = tiny_model("dual_stream", tokenizer, **CONVOLUTIONAL).train()
    steps["dual_stream"].image_encoder.load_state_dict(steps["m3ae"].image_encoder.state_dict())
    for model in steps.values():
        model(batch)
    mine, theirs = (
        dict(steps[name].image_encoder.named_buffers()) for name in ("m3ae", "dual_stream")
    )
    running = [name for name in mine if name.endswith(("running_mean", "running_var"))]
    assert running
    for name in running:
        torch.testing.assert_close(mine[name], theirs[name])


def test_samples_without_an_image_do_not_change_other_predictions(
    model: M3AE, tokenizer: Tokenizer
) -> None:
    model.eval()
    batch = make_batch(tokenizer, 4)
    patches = model.mim.corrupt(batch)
    text = model.text_tokens(batch.ids_BT, batch.mask_BT)
    whole = model.mim.predict_patches(batch, text, text, patches)
    fewer = dataclasses.replace(batch, has_image_B=torch.tensor([True, False, True, True]))
    some = model.mim.predict_patches(fewer, text, text, patches)
    for mine, theirs in zip(some, whole, strict=True):
        torch.testing.assert_close(mine, theirs[[0, 2, 3]], rtol=1e-5, atol=1e-6)


def test_shared_step_needs_less_arithmetic() -> None:
    """At the published size, on the meta device, which counts attention too (8.0 of 277.8
    GFLOP), unlike the CPU.
    """
    config = M3AEConfig()
    with torch.device("meta"):
        model = M3AE.build(config, pretrained=False, tokenizer=None)
    inputs = benchmark.on_device(*benchmark.inputs(model, 4), "meta")
    naive, shared = (
        benchmark.gflop(lambda step=step: step(model, *inputs)) / 4
        for step in (benchmark.separate_forwards, M3AE.predict)
    )
    assert naive == pytest.approx(277.8, rel=0.01)
    assert shared == pytest.approx(199.0, rel=0.02)
    assert naive / shared > 1.38


def test_every_parameter_gets_a_gradient_with_a_cnn(tokenizer: Tokenizer) -> None:
    model = tiny_model("m3ae", tokenizer, **CONVOLUTIONAL)
    result = model(make_batch(tokenizer))
    assert result.terms["mim"].item() == pytest.approx(1.0, abs=0.1)
    result.total.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_image_size_that_the_grid_does_not_divide_is_rejected(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "mismatch", "image_size"):
        tiny_model("m3ae", tokenizer, image_size=70, **CONVOLUTIONAL)


def test_dual_stream_equals_m3ae_without_mim(model: M3AE, tokenizer: Tokenizer) -> None:
    """Equal parameter names, and equal MLM and ITM losses for equal corruption."""
    parent = tiny_model("dual_stream", tokenizer, seed=7)
    assert isinstance(parent, DualStreamModel)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("mim_head.")
    }
    parent.load_state_dict(state)
    batch = make_batch(tokenizer)
    corruption = model.corrupt(batch)
    model.eval(), parent.eval()
    mine, theirs = (
        system.losses(system.predict(batch, corruption), corruption) for system in (model, parent)
    )
    for name in ("mlm", "itm"):
        torch.testing.assert_close(mine.terms[name], theirs.terms[name])


def test_total_weighs_the_terms(tokenizer: Tokenizer) -> None:
    weights: dict[str, Any] = {"mlm_weight": 2.0, "itm_weight": 0.5, "mim_weight": 3.0}
    model = tiny_model("m3ae", tokenizer, **weights)
    result = model(make_batch(tokenizer))
    expected = 2 * result.terms["mlm"] + 0.5 * result.terms["itm"] + 3 * result.terms["mim"]
    torch.testing.assert_close(result.total, expected)
