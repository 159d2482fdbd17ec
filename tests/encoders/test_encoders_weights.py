"""Weights: read without pickle, fitted without silence, pinned when they come from the hub."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.encoders.presets import IMAGE_PRESETS
from medvl.encoders.pretrained import read_tensors
from medvl.errors import ConfigError, WeightsError

TINY_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
TINY_CLIP = {"width": 64, "layers": 2, "embed_dim": 16}
TINY_BERT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def image_encoder(name: str = "resnet18", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return create_image_encoder(name, **{**(TINY_RESNET if name.startswith("resnet") else {}), **options}).eval()


def text_encoder(name: str = "bert", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return create_text_encoder(name, **{**TINY_BERT, **options}).eval()


def moved(encoder: Any) -> dict[str, Tensor]:
    """The encoder's tensors under its library's names, all at other values, so that a load shows."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in encoder.backbone.state_dict().items()
    }


def write(tensors: dict[str, Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("filename", ["model.safetensors", "pytorch_model.bin", "weights.pth"])
def test_library_s_own_file(tmp_path: Path, filename: str) -> None:
    """With a classifier in it, which is dropped, and without the counters of old batch norms, which stay at zero."""
    tensors = moved(image_encoder())
    file = {key: tensor for key, tensor in tensors.items() if not key.endswith("num_batches_tracked")}
    file |= {"fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}
    path = write(file, tmp_path / filename)
    encoder = image_encoder(pretrained=str(path) if filename == "weights.pth" else path)
    for name, tensor in tensors.items():
        assert torch.equal(encoder.backbone.state_dict()[name], tensor), name
    if filename != "weights.pth":
        assert torch.equal(image_encoder(pretrained=tmp_path).backbone.conv1.weight, tensors["conv1.weight"])


@pytest.mark.parametrize("wrap", [lambda t: {"state_dict": t, "epoch": torch.tensor(3)}, lambda t: {"model": t}])
def test_nested_checkpoints_and_wrapped_modules(tmp_path: Path, wrap: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = moved(image_encoder())
    path = tmp_path / "last.ckpt"
    torch.save(wrap({f"module.{key}": tensor for key, tensor in tensors.items()}), path)
    assert torch.equal(image_encoder(pretrained=path).backbone.conv1.weight, tensors["conv1.weight"])


def test_half_precision_is_cast(tmp_path: Path) -> None:
    tensors = {
        key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in moved(image_encoder()).items()
    }
    encoder = image_encoder(pretrained=write(tensors, tmp_path / "model.safetensors"))
    assert encoder.backbone.conv1.weight.dtype == torch.float32
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"].float())


def test_differences_are_named(tmp_path: Path) -> None:
    tensors = moved(image_encoder())
    del tensors["layer2.0.conv1.weight"]
    tensors["layer9.weight"] = torch.zeros(1)
    tensors["conv1.weight"] = torch.zeros(64, 3, 5, 5)
    with pytest.raises(WeightsError) as caught:
        image_encoder(pretrained=write(tensors, tmp_path / "model.safetensors"))
    text = str(caught.value)
    assert "model.safetensors does not fit this encoder" in text
    assert "1 missing: layer2.0.conv1.weight" in text
    assert "1 unexpected: layer9.weight" in text
    assert "1 of another shape: conv1.weight is (64, 3, 5, 5), expected (64, 3, 7, 7)" in text


def test_a_failed_load_changes_nothing(tmp_path: Path) -> None:
    from medvl.encoders.pretrained import KeyMap, load_strictly

    encoder = image_encoder()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    tensors = moved(encoder)
    del tensors["conv1.weight"]
    with pytest.raises(WeightsError, match=r"^file does not fit this encoder: 1 missing: conv1.weight$"):
        load_strictly(encoder.backbone, tensors, KeyMap(layouts=[[("", "")]]), "file")
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


def test_own_file_fits_the_finished_encoder(tmp_path: Path) -> None:
    """A grey stem, another image size, a projection: saved by us, loaded by us."""
    options: dict[str, Any] = {"in_channels": 1, "image_size": 96, "projection": True, **TINY_CLIP}
    encoder = image_encoder("clip_vit_b32", seed=1, **options)
    path = write(encoder.state_dict(), tmp_path / "model.safetensors")
    again = image_encoder("clip_vit_b32", seed=2, pretrained=path, **options)
    assert all(torch.equal(tensor, encoder.state_dict()[name]) for name, tensor in again.state_dict().items())
    text = text_encoder("cxrbert", seed=1, projection=True)
    path = write(text.state_dict(), tmp_path / "text.safetensors")
    again = text_encoder("cxrbert", seed=2, projection=True, pretrained=path)
    assert all(torch.equal(tensor, text.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_published_file_is_adapted_after_it_is_loaded(tmp_path: Path) -> None:
    tensors = moved(image_encoder("clip_vit_b32", **TINY_CLIP))
    path = write(tensors, tmp_path / "model.safetensors")
    grey = image_encoder("clip_vit_b32", pretrained=path, in_channels=1, image_size=320, **TINY_CLIP)
    torch.testing.assert_close(grey.backbone.conv1.weight, tensors["conv1.weight"].sum(dim=1, keepdim=True))
    assert grey.backbone.positional_embedding.shape == (101, 64)
    torch.testing.assert_close(grey.backbone.positional_embedding[0], tensors["positional_embedding"][0])
    fewer = image_encoder("clip_vit_b32", pretrained=path, **{**TINY_CLIP, "layers": 1})
    assert len(fewer.backbone.transformer.resblocks) == 1
    assert torch.equal(fewer.backbone.ln_post.weight, tensors["ln_post.weight"])
    with pytest.raises(WeightsError, match=r"12 missing: transformer.resblocks.2"):
        image_encoder("clip_vit_b32", pretrained=path, **{**TINY_CLIP, "layers": 3})


def test_positions_of_the_wanted_size_are_taken_as_they_are(tmp_path: Path) -> None:
    """M3AE's vision file is at 288 pixels already."""
    at_288 = image_encoder("clip_vit_b16", image_size=288, **TINY_CLIP)
    tensors = moved(at_288)
    path = write(tensors, tmp_path / "model.safetensors")
    encoder = image_encoder("clip_vit_b16", pretrained=path, image_size=288, **TINY_CLIP)
    assert torch.equal(encoder.backbone.positional_embedding, tensors["positional_embedding"])
    with pytest.raises(WeightsError, match=r"positional_embedding is \(325, 64\), expected \(197, 64\)"):
        image_encoder("clip_vit_b16", pretrained=path, **TINY_CLIP)


@pytest.mark.parametrize("projection", [True, False])
def test_whole_clip_file_fills_both_towers(tmp_path: Path, projection: bool) -> None:
    """CheXzero's layout: the image tower under `visual.`, the text tower at the top."""
    import open_clip

    torch.manual_seed(4)
    vision = {"layers": 2, "width": 64, "patch_size": 32, "image_size": 224}
    text = {"layers": 2, "width": 64, "heads": 1, "vocab_size": 60, "context_length": 77}
    whole = open_clip.CLIP(512, vision, text, quick_gelu=True).eval()
    file = dict(whole.state_dict()) | {"input_resolution": torch.tensor(224)}
    path = write(file, tmp_path / "clip.pt")
    image = torch.randn(2, 3, 224, 224)
    encoder = image_encoder("clip_vit_b32", pretrained=path, projection=projection, width=64, layers=2)
    pooled_BD = encoder(image).pooled_BD
    expected = whole.encode_image(image)
    torch.testing.assert_close(
        pooled_BD if projection else pooled_BD @ whole.visual.proj, expected, rtol=1e-4, atol=1e-4
    )
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 60}
    tower = create_text_encoder("clip_text", pretrained=path, projection=projection, **sizes).eval()
    ids = torch.randint(1, 50, (2, 77))
    ids[:, 10] = 59
    short = tower(ids[:, :11], torch.ones(2, 11, dtype=torch.bool)).pooled_BD
    projected = short if projection else short @ whole.text_projection
    torch.testing.assert_close(projected, whole.encode_text(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("projection", [True, False])
def test_biomedclip_layout(tmp_path: Path, projection: bool) -> None:
    """timm trunk and Hugging Face tower in one open_clip file."""
    text = text_encoder("biomedclip_text", seed=5, projection=True)
    image = image_encoder("biomedclip", seed=5, projection=True, timm_model_name="vit_tiny_patch16_224")
    file = {f"visual.{key}": tensor for key, tensor in image.backbone.state_dict().items()}
    file |= {f"text.transformer.{key}": tensor for key, tensor in text.backbone.state_dict().items()}
    file |= {f"text.proj.{key}": tensor for key, tensor in text.projection.state_dict().items()}
    file |= {"logit_scale": torch.tensor(4.4), "text.transformer.embeddings.position_ids": torch.arange(24)[None]}
    path = write(file, tmp_path / "open_clip_pytorch_model.bin")
    again = text_encoder("biomedclip_text", seed=6, projection=projection, pretrained=path)
    torch.testing.assert_close(
        again.state_dict(), {k: v for k, v in text.state_dict().items() if k in again.state_dict()}
    )
    pixels = torch.randn(1, 3, 224, 224)
    loaded = image_encoder("biomedclip", projection=projection, timm_model_name="vit_tiny_patch16_224", pretrained=path)
    torch.testing.assert_close(loaded(pixels).patches_BPD, image(pixels).patches_BPD)
    if projection:
        torch.testing.assert_close(loaded(pixels).pooled_BD, image(pixels).pooled_BD)


BERT_FILES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "bert": ("bert.", {"cls.predictions.bias": (60,), "bert.pooler.dense.weight": (32, 32)}),
    "bioclinicalbert": ("bert.", {"cls.seq_relationship.weight": (2, 32), "bert.embeddings.position_ids": (1, 24)}),
    "biolinkbert": ("", {"pooler.dense.bias": (32,), "embeddings.position_ids": (1, 24)}),
    "roberta": ("roberta.", {"lm_head.bias": (60,), "roberta.pooler.dense.bias": (32,)}),
    "bioalbert": ("albert.", {"predictions.bias": (60,), "albert.pooler.weight": (32, 32)}),
    "cxrbert": ("bert.", {"cls.predictions.bias": (60,), "cls_projection_head.LayerNorm.weight": (128,)}),
}


@pytest.mark.parametrize("name", BERT_FILES)
def test_files_of_language_models(tmp_path: Path, name: str) -> None:
    """With the heads, poolers and counters that published files have, all left out by name."""
    prefix, extra = BERT_FILES[name]
    sizes = {"embedding_size": 16} if name == "bioalbert" else {}
    tensors = moved(text_encoder(name, **sizes))
    file = {prefix + key: tensor for key, tensor in tensors.items()} | {key: torch.zeros(s) for key, s in extra.items()}
    encoder = text_encoder(name, pretrained=write(file, tmp_path / "pytorch_model.bin"), **sizes)
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in encoder.backbone.state_dict().items())
    file[prefix + "encoder.surprise"] = torch.zeros(1)
    with pytest.raises(WeightsError, match=r"1 unexpected: backbone.encoder.surprise"):
        text_encoder(name, pretrained=write(file, tmp_path / "other.bin"), **sizes)


def test_old_names_of_layer_norms_and_fewer_layers(tmp_path: Path) -> None:
    tensors = moved(text_encoder(num_hidden_layers=3))
    old = {key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
           for key, tensor in tensors.items()}  # fmt: skip
    encoder = text_encoder(pretrained=write({f"bert.{key}": t for key, t in old.items()}, tmp_path / "bert.bin"))
    assert encoder.num_layers == 2
    assert torch.equal(encoder.backbone.embeddings.LayerNorm.bias, tensors["embeddings.LayerNorm.bias"])
    assert torch.equal(
        encoder.backbone.encoder.layer[1].output.dense.weight, tensors["encoder.layer.1.output.dense.weight"]
    )


def test_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    path = write(moved(text_encoder()), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"word_embeddings.weight is \(60, 32\), expected \(61, 32\)"):
        text_encoder(pretrained=path, vocab_size=61)


def test_positions_that_count_from_the_padding_id(tmp_path: Path) -> None:
    path = write(moved(text_encoder("roberta")), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"roberta counts positions from its padding id, which is 1 .* not 0"):
        text_encoder("roberta", pretrained=path, pad_id=0)
    assert text_encoder("roberta", pad_id=0).max_tokens == 23


class Payload:
    """What an attacker would put into a checkpoint."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("payload-ran",)


@pytest.mark.fault("S1")
@pytest.mark.parametrize("how", ["torch", "pickle", "in a tensor's place"])
def test_pickled_objects_are_never_run(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps({"conv1.weight": Payload()}))
    else:
        torch.save({"conv1.weight": Payload()} if how == "torch" else {"state_dict": Payload()}, path)
    with pytest.raises(WeightsError, match="holds pickled objects, which are never run"):
        image_encoder(pretrained=path)
    assert not (tmp_path / "payload-ran").exists()


@pytest.mark.parametrize(
    ("filename", "content", "message"),
    [
        ("model.safetensors", b"", "cannot be read as safetensors"),
        ("model.safetensors", b"\xff" * 64, "cannot be read as safetensors"),
        ("model.safetensors", (2**40).to_bytes(8, "little") + b"{}", "cannot be read as safetensors"),
        ("model.pt", b"", "cannot be read as a file of tensors"),
        ("model.pt", b"PK\x03\x04 not a zip", "cannot be read as a file of tensors"),
    ],
)
def test_damaged_files(tmp_path: Path, filename: str, content: bytes, message: str) -> None:
    (tmp_path / filename).write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        image_encoder(pretrained=tmp_path / filename)


@pytest.mark.parametrize("content", [{}, {"a": 1}, [torch.zeros(1)], torch.zeros(2)])
def test_files_without_a_dictionary_of_tensors(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(WeightsError, match="does not hold a dictionary of tensors"):
        read_tensors(tmp_path / "model.pt")


def test_dinov2_names_are_timm_s() -> None:
    """RAD-DINO's file has the names of the DINOv2 repository; only its mask token has no place."""
    encoder = create_image_encoder("rad_dino", image_size=56, embed_dim=32, depth=1, num_heads=2)
    block = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    expected = {f"blocks.0.{layer}.{leaf}" for layer in block for leaf in ("weight", "bias")}
    expected |= {"blocks.0.ls1.gamma", "blocks.0.ls2.gamma", "cls_token", "pos_embed", "norm.weight", "norm.bias"}
    expected |= {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert set(encoder.backbone.state_dict()) == expected
    weights = IMAGE_PRESETS["rad_dino"].weights
    assert weights is not None
    assert weights.drop == ("mask_token",)
