"""HLIP: its losses against the formulas, its settings, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.contrastive_systems import STUDIES, hlip, make_batch
from helpers.errors import raises
from safetensors.torch import save_file
from torch import Tensor

import medvl
from medvl.errors import ConfigError
from medvl.models import HLIPConfig


def vectors(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Return the unit vectors of the batch's complete rows, from the encoders and the heads."""
    batch = make_batch("hlip").rows([0, 1, 2, 4, 5, 6])
    image = model.image_encoder(batch.image_BCDHW).pooled_BD @ model.image_head.weight.T
    text = model.text_encoder(batch.ids_BT, batch.mask_BT).pooled_BD @ model.text_head.weight.T
    return (each / each.norm(dim=1, keepdim=True) for each in (image, text))


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        near = {"rtol": 1e-4, "atol": 1e-6 + 1e-5 * tensor.abs().max().item()}
        torch.testing.assert_close(found[name], tensor, **near, msg=name)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("positives", ["own", "study"])
def test_the_softmax_loss_is_the_formula(positives: str) -> None:
    model = hlip(positives=positives).eval()
    images, texts = vectors(model)
    studies = [study for row, study in enumerate(STUDIES) if row != 3]
    logits = model.logit_scale.exp() * images @ texts.T
    total = 0
    for i, study in enumerate(studies):
        same = [
            j
            for j, other in enumerate(studies)
            if j == i or (positives == "study") * (other == study)
        ]
        for row in (logits[i], logits[:, i]):
            total = total - sum(row[j] - row.logsumexp(0) for j in same) / len(same)
    expected = total / (2 * len(studies))
    actual = model(make_batch("hlip")).total
    torch.testing.assert_close(actual, expected)
    assert_near(gradients(model, actual), gradients(model, expected))


def test_the_sigmoid_loss_is_the_formula() -> None:
    model = hlip(bias=-10.0, temperature=0.1).eval()
    images, texts = vectors(model)
    total = 0
    for i in range(6):
        for j in range(6):
            sign = 1 if i == j else -1
            logit = model.logit_scale.exp() * images[i] @ texts[j] + model.logit_bias
            total = total - F.logsigmoid(sign * logit)
    actual = model(make_batch("hlip")).total
    torch.testing.assert_close(actual, total / 6)
    assert_near(gradients(model, actual), gradients(model, total / 6))


def test_every_parameter_learns_and_the_first_loss_is_that_of_chance() -> None:
    model = hlip().train()
    batch = make_batch("hlip")
    found = gradients(model, model(batch).total)
    assert all(gradient.abs().sum() > 0 for gradient in found.values())
    with torch.no_grad():
        model.logit_scale.zero_()
    assert model(batch).total.item() == pytest.approx(math.log(6), abs=0.2)
    sigmoid = hlip(bias=-10.0, temperature=0.1)
    assert sigmoid(batch).total.item() == pytest.approx(10, abs=2)


def test_a_locked_text_encoder_has_no_gradient_and_its_head_has_one() -> None:
    model = hlip(frozen_text_layers=1).train()
    model(make_batch("hlip")).total.backward()
    frozen = {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen
    assert all(name.startswith("text_encoder.") for name in frozen)
    assert "text_head.weight" not in frozen


def test_settings_are_the_published_ones() -> None:
    config = HLIPConfig()
    assert config.positives == "study", "reconstructions of a scan are never negatives"
    assert config.volume_size == (112, 336, 336)
    assert config.image_arguments == {
        "patch_size": (8, 24, 24),
        "drop_path_rate": 0.2,
        "max_scans": 1,
    }
    assert (config.text_encoder, config.max_tokens, config.projection_dim) == ("cxrbert", 512, 512)
    assert hlip().transform.size == (4, 12, 12)


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    model = hlip(tokenizer=gloria_ranks.tiny_tokenizer(), vocab_size=None).eval()
    medvl.models.save(model, tmp_path)
    again = medvl.models.load(tmp_path)
    volumes = make_batch("hlip").image_BCDHW
    torch.testing.assert_close(
        again.similarity(volumes, ["edema", "left effusion"]),
        model.similarity(volumes, ["edema", "left effusion"]),
    )
    assert again.transform == model.transform


def test_weights_of_an_image_encoder_start_it(tmp_path: Path) -> None:
    import timm

    image = timm.create_model(
        "vit_tiny_patch16_224", img_size=24, patch_size=6, embed_dim=24, depth=3, num_heads=2
    )
    save_file(image.state_dict(), tmp_path / "mae.safetensors")
    model = hlip(image_weights=str(tmp_path / "mae.safetensors"))
    name = "blocks.1.attn.qkv.weight"
    assert torch.equal(model.image_encoder.backbone.get_parameter(name), image.get_parameter(name))


def test_images_are_refused() -> None:
    with raises(ConfigError, "missing", "image_BCDHW"):
        hlip()(make_batch("clip"))
    with raises(ConfigError, "unknown_name", "name"):
        hlip(image_encoder="resnet50")


def test_batch_norm_spreads_class_tokens_before_the_linear_layer() -> None:
    model = hlip(batch_norm=True).train()
    volumes = make_batch("hlip").image_BCDHW
    token_BD = model.image_encoder(volumes).pooled_BD
    spread_BD = token_BD - token_BD.mean(dim=0)
    spread_BD = spread_BD / (token_BD.var(dim=0, unbiased=False) + 1e-5).sqrt()
    expected = spread_BD @ model.image_head.proj.weight.T
    torch.testing.assert_close(model.unnormalized_image(volumes), expected)
    patches_BPD = model.eval().image_encoder(volumes).patches_BPD
    each = torch.stack([model.image_head(patch_BD) for patch_BD in patches_BPD.unbind(1)], dim=1)
    torch.testing.assert_close(model.image_head(patches_BPD), each)


def test_packed_texts_have_the_same_loss() -> None:
    model = hlip().eval()
    batch = make_batch("hlip")
    expected = model(batch).total
    model.text_encoder.pack()
    torch.testing.assert_close(model(batch).total, expected)
