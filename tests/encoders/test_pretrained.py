"""Reading weights without pickle and loading them strictly."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.errors import raises
from torch import Tensor

from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.encoders.presets import IMAGE_PRESETS
from medvl.encoders.pretrained import KeyMap, load_strictly, read_tensors
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


def image_encoder(name: str = "resnet18", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return create_image_encoder(
        name, **{**(TINY_RESNET if name.startswith("resnet") else {}), **options}
    ).eval()


def text_encoder(name: str = "bert", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return create_text_encoder(name, **{**TINY_BERT, **options}).eval()


def changed_tensors(encoder: Any) -> dict[str, Tensor]:
    """Return the backbone's tensors, each with another value, so that a load is visible."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in encoder.backbone.state_dict().items()
    }


def write(tensors: dict[str, Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, path
        )
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("filename", ["model.safetensors", "pytorch_model.bin", "weights.pth"])
def test_file_of_the_library_is_loaded(tmp_path: Path, filename: str) -> None:
    """A classifier in the file is ignored, and missing counters of batch norms stay at zero."""
    tensors = changed_tensors(image_encoder())
    file = {
        key: tensor for key, tensor in tensors.items() if not key.endswith("num_batches_tracked")
    }
    file |= {"fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}
    path = write(file, tmp_path / filename)
    encoder = image_encoder(pretrained=str(path) if filename == "weights.pth" else path)
    for name, tensor in tensors.items():
        assert torch.equal(encoder.backbone.state_dict()[name], tensor), name
    if filename != "weights.pth":
        assert torch.equal(
            image_encoder(pretrained=tmp_path).backbone.conv1.weight, tensors["conv1.weight"]
        )


@pytest.mark.parametrize(
    "wrap", [lambda t: {"state_dict": t, "epoch": torch.tensor(3)}, lambda t: {"model": t}]
)
def test_nested_checkpoint_of_a_wrapped_module_is_loaded(
    tmp_path: Path, wrap: Callable[[dict[str, Tensor]], Any]
) -> None:
    tensors = changed_tensors(image_encoder())
    path = tmp_path / "last.ckpt"
    torch.save(wrap({f"module.{key}": tensor for key, tensor in tensors.items()}), path)
    assert torch.equal(
        image_encoder(pretrained=path).backbone.conv1.weight, tensors["conv1.weight"]
    )


def test_half_precision_weights_are_cast(tmp_path: Path) -> None:
    tensors = {
        key: tensor.half() if tensor.is_floating_point() else tensor
        for key, tensor in changed_tensors(image_encoder()).items()
    }
    encoder = image_encoder(pretrained=write(tensors, tmp_path / "model.safetensors"))
    assert encoder.backbone.conv1.weight.dtype == torch.float32
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"].float())


def test_error_names_the_differing_tensors(tmp_path: Path) -> None:
    tensors = changed_tensors(image_encoder())
    del tensors["layer2.0.conv1.weight"]
    tensors["layer9.weight"] = torch.zeros(1)
    tensors["conv1.weight"] = torch.zeros(64, 3, 5, 5)
    with raises(WeightsError, "mismatch", names="model.safetensors") as caught:
        image_encoder(pretrained=write(tensors, tmp_path / "model.safetensors"))
    text = str(caught.value)
    assert "1 missing: layer2.0.conv1.weight" in text
    assert "1 unexpected: layer9.weight" in text
    assert "1 of another shape: conv1.weight is (64, 3, 5, 5), expected (64, 3, 7, 7)" in text


def test_failed_load_leaves_the_encoder_unchanged(tmp_path: Path) -> None:
    encoder = image_encoder()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    tensors = changed_tensors(encoder)
    del tensors["conv1.weight"]
    with raises(WeightsError, "mismatch", names="1 missing: conv1.weight"):
        load_strictly(encoder.backbone, tensors, KeyMap(layouts=[[("", "")]]), "file")
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


def test_saved_encoder_is_loaded_with_its_options(tmp_path: Path) -> None:
    """A grey stem, another image size and a projection survive saving and loading."""
    options: dict[str, Any] = {"in_channels": 1, "image_size": 96, "projection": True, **TINY_CLIP}
    encoder = image_encoder("clip_vit_b32", seed=1, **options)
    path = write(encoder.state_dict(), tmp_path / "model.safetensors")
    again = image_encoder("clip_vit_b32", seed=2, pretrained=path, **options)
    assert all(
        torch.equal(tensor, encoder.state_dict()[name])
        for name, tensor in again.state_dict().items()
    )
    text = text_encoder("cxrbert", seed=1, projection=True)
    path = write(text.state_dict(), tmp_path / "text.safetensors")
    again = text_encoder("cxrbert", seed=2, projection=True, pretrained=path)
    assert all(
        torch.equal(tensor, text.state_dict()[name]) for name, tensor in again.state_dict().items()
    )


def test_published_file_is_adapted_after_loading(tmp_path: Path) -> None:
    tensors = changed_tensors(image_encoder("clip_vit_b32", **TINY_CLIP))
    path = write(tensors, tmp_path / "model.safetensors")
    grey = image_encoder(
        "clip_vit_b32", pretrained=path, in_channels=1, image_size=320, **TINY_CLIP
    )
    torch.testing.assert_close(
        grey.backbone.conv1.weight, tensors["conv1.weight"].sum(dim=1, keepdim=True)
    )
    assert grey.backbone.positional_embedding.shape == (101, 64)
    torch.testing.assert_close(
        grey.backbone.positional_embedding[0], tensors["positional_embedding"][0]
    )
    fewer = image_encoder("clip_vit_b32", pretrained=path, **{**TINY_CLIP, "layers": 1})
    assert len(fewer.backbone.transformer.resblocks) == 1
    assert torch.equal(fewer.backbone.ln_post.weight, tensors["ln_post.weight"])
    with raises(WeightsError, "mismatch", names="12 missing: transformer.resblocks.2"):
        image_encoder("clip_vit_b32", pretrained=path, **{**TINY_CLIP, "layers": 3})


def test_positions_of_the_requested_size_are_not_interpolated(tmp_path: Path) -> None:
    """M3AE's image file has positions for 288 pixels."""
    at_288 = image_encoder("clip_vit_b16", image_size=288, **TINY_CLIP)
    tensors = changed_tensors(at_288)
    path = write(tensors, tmp_path / "model.safetensors")
    encoder = image_encoder("clip_vit_b16", pretrained=path, image_size=288, **TINY_CLIP)
    assert torch.equal(encoder.backbone.positional_embedding, tensors["positional_embedding"])
    with raises(
        WeightsError, "mismatch", names="positional_embedding is (325, 64), expected (197, 64)"
    ):
        image_encoder("clip_vit_b16", pretrained=path, **TINY_CLIP)


@pytest.mark.parametrize("projection", [True, False])
def test_clip_file_fills_both_encoders(tmp_path: Path, projection: bool) -> None:
    """CheXzero's layout: the image encoder under `visual.`, the text encoder at the top level."""
    import open_clip

    torch.manual_seed(4)
    vision = {"layers": 2, "width": 64, "patch_size": 32, "image_size": 224}
    text = {"layers": 2, "width": 64, "heads": 1, "vocab_size": 60, "context_length": 77}
    clip = open_clip.CLIP(512, vision, text, quick_gelu=True).eval()
    file = dict(clip.state_dict()) | {"input_resolution": torch.tensor(224)}
    path = write(file, tmp_path / "clip.pt")
    image = torch.randn(2, 3, 224, 224)
    encoder = image_encoder(
        "clip_vit_b32", pretrained=path, projection=projection, width=64, layers=2
    )
    pooled_BD = encoder(image).pooled_BD
    expected = clip.encode_image(image)
    torch.testing.assert_close(
        pooled_BD if projection else pooled_BD @ clip.visual.proj, expected, rtol=1e-4, atol=1e-4
    )
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "vocab_size": 60,
    }
    tower = create_text_encoder("clip_text", pretrained=path, projection=projection, **sizes).eval()
    ids = torch.randint(1, 50, (2, 77))
    ids[:, 10] = 59
    short = tower(ids[:, :11], torch.ones(2, 11, dtype=torch.bool)).pooled_BD
    projected = short if projection else short @ clip.text_projection
    torch.testing.assert_close(projected, clip.encode_text(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("projection", [True, False])
def test_biomedclip_file_fills_both_encoders(tmp_path: Path, projection: bool) -> None:
    """An open_clip file has a timm image encoder and a Hugging Face text encoder."""
    text = text_encoder("biomedclip_text", seed=5, projection=True)
    image = image_encoder(
        "biomedclip", seed=5, projection=True, timm_model_name="vit_tiny_patch16_224"
    )
    file = {f"visual.{key}": tensor for key, tensor in image.backbone.state_dict().items()}
    file |= {
        f"text.transformer.{key}": tensor for key, tensor in text.backbone.state_dict().items()
    }
    file |= {f"text.proj.{key}": tensor for key, tensor in text.projection.state_dict().items()}
    file |= {
        "logit_scale": torch.tensor(4.4),
        "text.transformer.embeddings.position_ids": torch.arange(24)[None],
    }
    path = write(file, tmp_path / "open_clip_pytorch_model.bin")
    again = text_encoder("biomedclip_text", seed=6, projection=projection, pretrained=path)
    torch.testing.assert_close(
        again.state_dict(), {k: v for k, v in text.state_dict().items() if k in again.state_dict()}
    )
    pixels = torch.randn(1, 3, 224, 224)
    loaded = image_encoder(
        "biomedclip", projection=projection, timm_model_name="vit_tiny_patch16_224", pretrained=path
    )
    torch.testing.assert_close(loaded(pixels).patches_BPD, image(pixels).patches_BPD)
    if projection:
        torch.testing.assert_close(loaded(pixels).pooled_BD, image(pixels).pooled_BD)


BERT_FILES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "bert": ("bert.", {"cls.predictions.bias": (60,), "bert.pooler.dense.weight": (32, 32)}),
    "bioclinicalbert": (
        "bert.",
        {"cls.seq_relationship.weight": (2, 32), "bert.embeddings.position_ids": (1, 24)},
    ),
    "biolinkbert": ("", {"pooler.dense.bias": (32,), "embeddings.position_ids": (1, 24)}),
    "roberta": ("roberta.", {"lm_head.bias": (60,), "roberta.pooler.dense.bias": (32,)}),
    "bioalbert": ("albert.", {"predictions.bias": (60,), "albert.pooler.weight": (32, 32)}),
    "cxrbert": (
        "bert.",
        {"cls.predictions.bias": (60,), "cls_projection_head.LayerNorm.weight": (128,)},
    ),
}


@pytest.mark.parametrize("name", BERT_FILES)
def test_file_of_a_language_model_is_loaded(tmp_path: Path, name: str) -> None:
    """The heads, poolers and counters of published files are ignored by name."""
    prefix, extra = BERT_FILES[name]
    sizes = {"embedding_size": 16} if name == "bioalbert" else {}
    tensors = changed_tensors(text_encoder(name, **sizes))
    file = {prefix + key: tensor for key, tensor in tensors.items()} | {
        key: torch.zeros(s) for key, s in extra.items()
    }
    encoder = text_encoder(name, pretrained=write(file, tmp_path / "pytorch_model.bin"), **sizes)
    assert all(
        torch.equal(tensor, tensors[key]) for key, tensor in encoder.backbone.state_dict().items()
    )
    file[prefix + "encoder.surprise"] = torch.zeros(1)
    with raises(WeightsError, "mismatch", names="1 unexpected: backbone.encoder.surprise"):
        text_encoder(name, pretrained=write(file, tmp_path / "other.bin"), **sizes)


def test_old_layer_norm_names_and_extra_layers_are_handled(tmp_path: Path) -> None:
    tensors = changed_tensors(text_encoder(num_hidden_layers=3))
    old = {key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias",
        "LayerNorm.beta"): tensor
           for key, tensor in tensors.items()}  # fmt: skip
    encoder = text_encoder(
        pretrained=write({f"bert.{key}": t for key, t in old.items()}, tmp_path / "bert.bin")
    )
    assert encoder.num_layers == 2
    assert torch.equal(
        encoder.backbone.embeddings.LayerNorm.bias, tensors["embeddings.LayerNorm.bias"]
    )
    assert torch.equal(
        encoder.backbone.encoder.layer[1].output.dense.weight,
        tensors["encoder.layer.1.output.dense.weight"],
    )


def test_vocabulary_of_another_size_raises(tmp_path: Path) -> None:
    path = write(changed_tensors(text_encoder()), tmp_path / "model.safetensors")
    with raises(
        WeightsError, "mismatch", names="word_embeddings.weight is (60, 32), expected (61, 32)"
    ):
        text_encoder(pretrained=path, vocab_size=61)


def test_padding_id_must_match_published_roberta(tmp_path: Path) -> None:
    path = write(changed_tensors(text_encoder("roberta")), tmp_path / "model.safetensors")
    with raises(ConfigError, "conflict", "pad_id"):
        text_encoder("roberta", pretrained=path, pad_id=0)
    assert text_encoder("roberta", pad_id=0).max_tokens == 23


class Payload:
    """Malicious object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("payload-ran",)


@pytest.mark.fault("S1")
@pytest.mark.parametrize("how", ["torch", "pickle", "in a tensor's place"])
def test_pickled_objects_are_never_run(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps({"conv1.weight": Payload()}))
    else:
        torch.save(
            {"conv1.weight": Payload()} if how == "torch" else {"state_dict": Payload()}, path
        )
    with raises(WeightsError, "unsupported", names="model.pt"):
        image_encoder(pretrained=path)
    assert not (tmp_path / "payload-ran").exists()


@pytest.mark.parametrize(
    ("filename", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", (2**40).to_bytes(8, "little") + b"{}"),
        ("model.pt", b""),
        ("model.pt", b"PK\x03\x04 not a zip"),
    ],
)
def test_damaged_file_raises(tmp_path: Path, filename: str, content: bytes) -> None:
    (tmp_path / filename).write_bytes(content)
    with raises(WeightsError, "malformed", names=filename):
        image_encoder(pretrained=tmp_path / filename)


@pytest.mark.parametrize("content", [{}, {"a": 1}, [torch.zeros(1)], torch.zeros(2)])
def test_file_without_a_dictionary_of_tensors_raises(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "model.pt")
    with raises(WeightsError, "mismatch", names="model.pt"):
        read_tensors(tmp_path / "model.pt")


def test_rad_dino_has_the_names_of_the_dinov2_file() -> None:
    """RAD-DINO's file has the names of the DINOv2 repository; only its mask token is ignored."""
    encoder = create_image_encoder("rad_dino", image_size=56, embed_dim=32, depth=1, num_heads=2)
    block = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    expected = {f"blocks.0.{layer}.{leaf}" for layer in block for leaf in ("weight", "bias")}
    expected |= {
        "blocks.0.ls1.gamma",
        "blocks.0.ls2.gamma",
        "cls_token",
        "pos_embed",
        "norm.weight",
        "norm.bias",
    }
    expected |= {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert set(encoder.backbone.state_dict()) == expected
    weights = IMAGE_PRESETS["rad_dino"].weights
    assert weights is not None
    assert weights.ignored_keys == ("mask_token",)
