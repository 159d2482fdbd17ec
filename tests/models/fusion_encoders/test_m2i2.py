"""M2I2: masked images beside ALBEF's objectives."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import make_batch, shaken, tiny_model, tiny_tokenizer

import medvl
from medvl.errors import ConfigError
from medvl.losses.masked import PatchMask, patchify
from medvl.models import M2I2, M2I2Config
from medvl.schema import Batch

TOKENIZER = tiny_tokenizer()


def make(**settings: Any) -> M2I2:
    model = tiny_model("m2i2", TOKENIZER, **settings)
    assert isinstance(model, M2I2)
    return model


def terms(model: M2I2, batch: Batch, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(model(batch).terms)


def test_pixels_equal_their_formula_and_teach_the_image_encoder_only() -> None:
    """Mean over removed patches of the squared difference, in the encoder's units; not
    standardised by patch.
    """
    model, batch = shaken(make()).eval(), make_batch(TOKENIZER, 3)
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    encoded = model.encode(batch, corruption)
    patches: PatchMask = corruption.of(model.mim)
    predicted = model.mim_head(encoded.image.states_BND, patches)
    true_BPC = patchify(model.image_encoder.normalize(batch.image_BCHW), 16)
    wrong = [
        (predicted[row, patch] - true_BPC[row, patch]).square().mean()
        for row in range(3)
        for patch in patches.masked_BP[row].nonzero().squeeze(1)
    ]
    loss = model.mim.loss(model.mim.predict(encoded, patches), patches)
    torch.testing.assert_close(loss, torch.stack(wrong).mean(), rtol=1e-4, atol=1e-5)
    loss.backward()
    learning = {
        name.partition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert learning == {"image_encoder", "mim_head"}


@pytest.mark.parametrize(
    ("encoder", "side"), [({}, 16), ({"image_encoder": "resnet_tiny", "image_arguments": {}}, 32)]
)
def test_removed_pixels_change_no_prediction(encoder: dict[str, Any], side: int) -> None:
    model, batch = shaken(make(**encoder)).eval(), make_batch(TOKENIZER, 4)
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    masked_BP = corruption.of(model.mim).masked_BP
    assert masked_BP.float().mean() == 0.5
    hidden_BCHW = (
        masked_BP.view(4, 1, 64 // side, -1).repeat_interleave(side, 2).repeat_interleave(side, 3)
    )
    noisy = dataclasses.replace(
        batch, image_BCHW=torch.where(hidden_BCHW, 255 - batch.image_BCHW, batch.image_BCHW)
    )
    before, after = (model.encode(images, corruption) for images in (batch, noisy))
    assert torch.equal(before.image.states_BND, after.image.states_BND)
    assert torch.equal(before.word_states_ND, after.word_states_ND)


def test_one_encoding_serves_all_objectives() -> None:
    model, batch = make(), make_batch(TOKENIZER, 4)
    kept: dict[str, list[torch.Tensor]] = {"model": [], "teacher": []}
    average: Any = model.momentum.module
    for name, encoder in (("model", model.image_encoder), ("teacher", average.image_encoder)):
        encoder.register_forward_pre_hook(
            lambda module, given, name=name: kept[name].append((*given, None)[1])
        )
    model.before_step(0)
    assert set(terms(model, batch)) == {"itc", "itm", "mlm", "mim"}
    (mine,), (theirs,) = kept["model"], kept["teacher"]
    assert mine.shape == theirs.shape == (4, 8)
    assert not torch.equal(mine, theirs)
    terms(model.eval(), batch)
    assert kept["model"][1].shape == (4, 8)  # validation reconstructs too
    assert kept["teacher"][1] is None
    assert model.features(batch).image.states_BND.shape[1] == 1 + 16


def test_published_sizes() -> None:
    """MAE's decoder: 8 blocks of width 512."""
    with torch.device("meta"):
        model = medvl.create_model("m2i2")
    assert isinstance(model, M2I2)
    blocks = 8 * (12 * 512**2 + 13 * 512)
    ends = 768 * 512 + 512 + 512 + 2 * 512 + 512 * 768 + 768
    assert sum(parameter.numel() for parameter in model.mim_head.parameters()) == blocks + ends
    assert model.mim_head.patches.grid == (16, 16)
    assert (
        model.mim.corrupt(make_batch(TOKENIZER, 1)).kept_BK.shape[1] == 217
    )  # int(256 * (1 - 0.15)), as released
    assert isinstance(model.mim_head.blocks[0].mlp.act, torch.nn.GELU)
    norms = [
        module for module in model.mim_head.modules() if isinstance(module, torch.nn.LayerNorm)
    ]
    assert {norm.eps for norm in norms} == {1e-6}


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("mask_ratio", 0.0, "out_of_range"),
        ("mim_weight", 0.0, "out_of_range"),
        ("decoder_width", 10, "conflict"),
    ],
)
def test_config_rejects_invalid_values(field: str, value: float, code: str) -> None:
    with raises(ConfigError, code, field):
        settings: Any = {field: value}
        M2I2Config(**settings)
