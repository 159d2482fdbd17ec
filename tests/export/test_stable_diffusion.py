"""Import of Stable Diffusion: a small folder in diffusers' layout against the outputs of its own
libraries.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.errors import raises

import medvl
from medvl.cli.import_export import import_published
from medvl.errors import ConfigError, WeightsError
from medvl.export import load_stable_diffusion

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    root = tmp_path_factory.mktemp("sd")
    torch.manual_seed(0)
    diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
    ).save_pretrained(root / "unet")
    diffusers.AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        scaling_factor=0.2,
    ).save_pretrained(root / "vae")
    text = transformers.CLIPTextConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=49408,
        projection_dim=64,
    )
    transformers.CLIPTextModel(text).save_pretrained(root / "text_encoder")
    diffusers.PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True
    ).save_pretrained(root / "scheduler")
    return root


def test_all_parts_compute_what_their_libraries_compute(folder: Path) -> None:
    import transformers

    model = load_stable_diffusion(folder, train_text=False)
    assert model.config.image_size == 16
    assert model.latent_scale.item() == pytest.approx(0.2)
    clip = transformers.CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
    ids_BT, mask_BT = model.tokenize(["Small left effusion.", ""])
    states_BTD, full_BT = model.encode_text(ids_BT, mask_BT)
    padded_BT, _ = model.text_ids(ids_BT, mask_BT)
    assert states_BTD.shape == (2, 77, 64)
    assert full_BT.all()
    assert (padded_BT[:, -1] == 49407).all(), "Stable Diffusion pads with the last token"
    with torch.no_grad():
        expected_BTD = clip(input_ids=padded_BT).last_hidden_state
        assert torch.allclose(states_BTD, expected_BTD, atol=1e-4)
        unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet").eval()
        noisy, step = torch.randn(2, 4, 8, 8), torch.tensor([3, 900])
        found = model.predict(noisy, step, states_BTD, full_BT)
        assert torch.allclose(
            found, unet(noisy, step, encoder_hidden_states=states_BTD).sample, atol=1e-4
        )
        vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
        assert torch.allclose(model.decode(noisy), vae.decode(noisy / 0.2).sample, atol=1e-4)


def test_the_command_writes_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    said = import_published("stable_diffusion", folder, out=tmp_path / "sd")
    assert "as roentgen" in said
    model = medvl.load(tmp_path / "sd")
    assert model.name == "roentgen"
    assert model.tokenizer is not None
    with raises(ConfigError, "exists", "out"):
        import_published("stable_diffusion", folder, out=tmp_path / "sd")


@pytest.mark.parametrize(
    ("file", "change", "code"),
    [
        ("unet/config.json", {"use_linear_projection": True}, "unsupported"),
        ("unet/config.json", {"attention_head_dim": [5, 10]}, "unsupported"),
        ("unet/config.json", {"block_out_channels": [32, 32]}, "malformed"),
        ("text_encoder/config.json", {"hidden_act": "gelu"}, "unsupported"),
        ("text_encoder/config.json", {"num_hidden_layers": 3}, "mismatch"),
        ("scheduler/scheduler_config.json", {"beta_end": 0.02}, "unsupported"),
        ("vae/config.json", None, "malformed"),
        ("vae/diffusion_pytorch_model.safetensors", None, "malformed"),
        ("text_encoder/model.safetensors", None, "malformed"),
    ],
)
def test_other_architectures_and_damage_are_refused(
    folder: Path, tmp_path: Path, file: str, change: dict[str, object] | None, code: str
) -> None:
    copy = tmp_path / "sd"
    shutil.copytree(folder, copy)
    path = copy / file
    path.write_bytes(b"{" * 9) if change is None else path.write_text(
        json.dumps(json.loads(path.read_text()) | change)
    )
    with raises(WeightsError, code):
        load_stable_diffusion(copy)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises(WeightsError, "not_found", names="unet"):
        load_stable_diffusion(tmp_path)
