"""Weights: read without pickle, fitted without silence, pinned when they come from the hub."""

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS
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


@pytest.mark.parametrize(
    ("pretrained", "message"),
    [
        ("missing/model.safetensors", r"missing/model.safetensors does not exist"),
        ("laion2b", r"'laion2b' is neither a file, nor a folder, nor OWNER/NAME@COMMIT"),
        ("timm/resnet18.a1_in1k", r"the commit must be named"),
        ("timm/resnet18.a1_in1k@main", r"revision 'main' is not a full commit hash"),
        (f"timm/resnet18.a1_in1k@{COMMIT}", r"HF_HUB_OFFLINE is set; fetch it on a connected machine \(`hf download"),
        (
            f"timm/resnet18.a1_in1k@{COMMIT}:a/b.safetensors",
            rf"a/b.safetensors of timm/resnet18.a1_in1k at .* {COMMIT}",
        ),
    ],
)
def test_sources_that_cannot_be_had(pretrained: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(WeightsError, match=message):
        image_encoder(pretrained=pretrained)
    assert time.monotonic() - started < 5


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds none of model.safetensors, "):
        image_encoder(pretrained=tmp_path)


def test_true_names_repository_and_revision() -> None:
    weights = IMAGE_PRESETS["resnet18"].weights
    assert weights is not None
    with pytest.raises(WeightsError) as caught:
        create_image_encoder("resnet18", pretrained=True)
    for part in (weights.hub_id, weights.revision, weights.filename, "local copy"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["clinicalbert", "bioalbert", "tiny_bert"])
def test_true_without_published_weights(name: str) -> None:
    with pytest.raises(WeightsError, match=rf"{name} has no published weights that are pinned here"):
        create_text_encoder(name, pretrained=True, num_hidden_layers=1)
    assert TEXT_PRESETS[name].hub_id is None


def test_true_of_a_library_s_model_asks_for_the_commit() -> None:
    with pytest.raises(WeightsError, match=r"timm/resnet10t.c3_in1k: add the commit"):
        create_image_encoder("timm:resnet10t", pretrained=True)


def test_cached_file_is_taken_without_the_network_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache as the hub's client lays it out; then one bit of the file is another."""
    import hashlib

    from huggingface_hub import constants

    from medvl import _hub

    tensors = moved(image_encoder())
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    path = write(tensors, snapshot / "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert _hub.fetch("owner/name", "model.safetensors", COMMIT, sha256=digest) == path
    encoder = image_encoder(pretrained=f"owner/name@{COMMIT}")
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"])
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(WeightsError, match=r"is not the file that was pinned: its sha256 is"):
        _hub.fetch("owner/name", "model.safetensors", COMMIT, sha256=digest)


def test_without_network_the_answer_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the hub client's own retries, which take over twenty seconds."""
    from huggingface_hub import constants

    from medvl import _hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    started = time.monotonic()
    with pytest.raises(WeightsError, match=r"the hub cannot be reached|cannot be had from the hub"):
        _hub.fetch("owner/name", "model.safetensors", COMMIT)
    assert time.monotonic() - started < 8


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


def test_torchvision_s_default_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned by the hash in their file's name, which torch checks; here the download is stood in for."""
    from urllib.error import URLError

    asked: list[tuple[str, dict[str, Any]]] = []
    tensors = moved(create_image_encoder("torchvision:resnet18"))

    def download(url: str, **options: Any) -> dict[str, Tensor]:
        asked.append((url, options))
        return {**tensors, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    encoder = create_image_encoder("torchvision:resnet18", pretrained=True)
    assert torch.equal(encoder.backbone.conv1.weight, tensors["conv1.weight"])
    [(url, options)] = asked
    assert url.startswith("https://download.pytorch.org/models/resnet18-")
    assert (options["check_hash"], options["weights_only"]) == (True, True)

    def no_network(url: str, **options: Any) -> dict[str, Tensor]:
        raise URLError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    with pytest.raises(WeightsError, match=r"resnet18-\w+.pth cannot be had .* give pretrained=PATH"):
        create_image_encoder("torchvision:resnet18", pretrained=True)
