"""Image and text towers in folders of transformers against transformers' own vectors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.hugging_face_folders import (
    SIZES,
    TOWER,
    change,
    clip_model,
    randomize,
    save_processor,
    siglip_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from medvl import encoders
from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.encoders.hugging_face import PROCESSORS, read_processor
from medvl.encoders.presets import CLIP_MEAN
from medvl.errors import ConfigError, WeightsError

TOLERANCE = 1e-5
IMAGE_SIZE = {"dinov2": 56, "dinov2_swiglu": 56, "dinov2_with_registers": 56}
KINDS = ("siglip", "clip", "dinov2", "dinov2_swiglu", "dinov2_with_registers", "vit")


def network(kind: str, **fields: Any) -> Any:
    """Return a small model of transformers with random weights."""
    import transformers as hf

    side = IMAGE_SIZE.get(kind, 32)
    size = {"image_size": side, "patch_size": 14 if side == 56 else 16}
    if kind == "siglip":
        model: Any = hf.SiglipVisionModel(hf.SiglipVisionConfig(**TOWER, **size, **fields))
    elif kind == "clip":
        config = hf.CLIPVisionConfig(**TOWER, **size, projection_dim=24, **fields)
        model = hf.CLIPVisionModelWithProjection(config)
    elif kind == "vit":
        model = hf.ViTModel(hf.ViTConfig(**TOWER, **size, **fields))
    elif kind == "dinov2_with_registers":
        config = hf.Dinov2WithRegistersConfig(**SIZES, **size, num_register_tokens=3, **fields)
        model = hf.Dinov2WithRegistersModel(config)
    else:
        swiglu = {"use_swiglu_ffn": kind == "dinov2_swiglu"}
        model = hf.Dinov2Model(hf.Dinov2Config(**SIZES, **size, **swiglu, **fields))
    return randomize(model)


def folder_of(kind: str, tmp_path: Path, **fields: Any) -> tuple[Any, Path]:
    model = network(kind, **fields)
    model.save_pretrained(tmp_path)
    side = model.config.image_size
    save_processor(tmp_path, "siglip", size={"height": side, "width": side})
    return model, tmp_path


def pixels(side: int, count: int = 2) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


def published(kind: str, model: Any, image_BCHW: Tensor, *, interpolate: bool) -> Any:
    """Return transformers' (pooled vector, states after the last norm)."""
    options = {} if kind.startswith("dinov2") else {"interpolate_pos_encoding": interpolate}
    output = model(image_BCHW, **options)
    states = output.last_hidden_state
    if kind == "clip":
        return output.image_embeds, model.vision_model.post_layernorm(states)
    return states[:, 0] if kind == "vit" else output.pooler_output, states


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_towers_have_the_vectors_of_transformers(kind: str, larger: bool, tmp_path: Path) -> None:
    """Also at another size than the file's, with positions interpolated as each class does it."""
    model, folder = folder_of(kind, tmp_path)
    encoder = create_image_encoder(f"hf:{folder}", pretrained=True, projection=kind == "clip")
    encoder.eval()
    side = model.config.image_size * (2 if larger else 1)
    with torch.no_grad():
        features = encoder(pixels(side))
        pooled_BD, states_BTD = published(kind, model, pixels(side), interpolate=larger)
    torch.testing.assert_close(features.pooled_BD, pooled_BD, atol=TOLERANCE, rtol=0)
    count = features.patches_BPD.shape[1]
    torch.testing.assert_close(features.patches_BPD, states_BTD[:, -count:], atol=TOLERANCE, rtol=0)
    patch = model.config.patch_size
    assert features.grid == (side // patch, side // patch) == encoder.grid(side, side)
    assert states_BTD.shape[1] - count == {"siglip": 0, "dinov2_with_registers": 4}.get(kind, 1)
    assert encoder.mean == (0.5, 0.5, 0.5)
    assert encoder.feature_dim == (24 if kind == "clip" else 32)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_is_created_again_without_its_folder(kind: str, tmp_path: Path) -> None:
    """From its configuration and its own file, in one channel, and as a system's encoder."""
    _, folder = folder_of(kind, tmp_path / "folder")
    first = create_image_encoder(f"hf:{folder}", pretrained=True).eval()
    save_file({name: value.contiguous() for name, value in first.state_dict().items()},
              tmp_path / "own.safetensors")  # fmt: skip
    config = json.loads(json.dumps(first.config))
    again = create_image_encoder(**config, pretrained=tmp_path / "own.safetensors").eval()
    grey = create_image_encoder(f"hf:{folder}", pretrained=True, in_channels=1).eval()
    side = first.image_size[0]
    image = torch.randint(256, (2, 1, side, side), dtype=torch.uint8)
    with torch.no_grad():
        expected = first(image).pooled_BD
        assert torch.equal(again(image).pooled_BD, expected)
        torch.testing.assert_close(grey(image).pooled_BD, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_towers_are_fine_tuned_as_others(kind: str, tmp_path: Path) -> None:
    """Layers, patch dropping, attention, checkpointing and LoRA; every parameter gets a gradient."""
    _, folder = folder_of(kind, tmp_path)
    encoder = create_image_encoder(f"hf:{folder}", pretrained=True)
    groups = encoder.parameter_layers()
    names = [name for name, _ in encoder.named_parameters()]
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert len(groups) == 4  # embeddings, two blocks, the rest
    assert all("embeddings" in name or "pre_layrnorm" in name for name in groups[0])
    side = encoder.image_size[0]
    features = encoder(pixels(side))
    (features.pooled_BD.sum() + features.patches_BPD.square().sum()).backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    gradient = next(encoder.parameters()).grad
    encoder.zero_grad()
    encoders.checkpoint_activations(encoder)
    features = encoder.train()(pixels(side))
    (features.pooled_BD.sum() + features.patches_BPD.square().sum()).backward()
    torch.testing.assert_close(next(encoder.parameters()).grad, gradient)
    encoder.eval()
    count = features.patches_BPD.shape[1]
    keep_BK = torch.arange(count).expand(2, -1)
    with torch.no_grad():
        whole = encoder(pixels(side))
        all_patches = encoder(pixels(side), keep_BK)
        some = encoder(pixels(side), keep_BK[:, : count // 2])
    torch.testing.assert_close(all_patches.pooled_BD, whole.pooled_BD, atol=1e-6, rtol=0)
    assert some.patches_BPD.shape[1] == count // 2
    assert some.grid is None
    encoders.freeze_layers(encoder, 1)
    frozen = {name for name, value in encoder.named_parameters() if not value.requires_grad}
    assert frozen == {*groups[0], *groups[1]}
    adapted = encoders.add_lora(encoder, 2, 4)
    assert len(adapted) == 2  # of the second of two layers: the first is frozen
    assert all(name.endswith(("q_proj", "v_proj")) for name in adapted)


@pytest.mark.parametrize("kind", ["clip", "dinov2_with_registers", "vit"])
def test_attention_of_the_class_token(kind: str, tmp_path: Path) -> None:
    model, folder = folder_of(kind, tmp_path)
    encoder = create_image_encoder(f"hf:{folder}", pretrained=True).eval()
    model.set_attn_implementation("eager")
    image_BCHW = pixels(encoder.image_size[0])
    with torch.no_grad():
        features = encoder(image_BCHW, output_attention=True)
        tower = model.vision_model if kind == "clip" else model
        last = tower(image_BCHW, output_attentions=True).attentions[-1]
    count = features.patches_BPD.shape[1]
    assert features.attention_BP is not None
    torch.testing.assert_close(features.attention_BP, last.mean(dim=1)[:, 0, -count:])


def test_siglip_has_no_attention_of_a_class_token(tmp_path: Path) -> None:
    _, folder = folder_of("siglip", tmp_path)
    encoder = create_image_encoder(f"hf:{folder}", pretrained=True).eval()
    with raises(ConfigError, "unsupported", "output_attention"):
        encoder(pixels(32), output_attention=True)


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "quick_gelu"])
def test_the_activation_of_the_file_is_used(act: str, tmp_path: Path) -> None:
    model, folder = folder_of("siglip", tmp_path, hidden_act=act)
    encoder = create_image_encoder(f"hf:{folder}", pretrained=True).eval()
    other = create_image_encoder(
        f"hf:{folder}", pretrained=True, hidden_act="gelu" if act != "gelu" else "quick_gelu"
    ).eval()
    with torch.no_grad():
        expected = model(pixels(32)).pooler_output
        torch.testing.assert_close(encoder(pixels(32)).pooled_BD, expected, atol=1e-5, rtol=0)
        assert (other(pixels(32)).pooled_BD - expected).abs().max() > 2 * TOLERANCE


def test_files_of_older_versions_and_of_whole_models_are_read(tmp_path: Path) -> None:
    """With `vision_model.`, a counter of positions, texts and scalars; with a classifier."""
    model = siglip_model()
    model.save_pretrained(tmp_path)
    save_processor(tmp_path, "siglip")
    path = tmp_path / "model.safetensors"
    counter = {"vision_model.embeddings.position_ids": torch.arange(4)[None]}
    save_file({**load_file(path), **counter}, path)
    encoder = create_image_encoder(f"hf:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        expected = model.get_image_features(pixels(32)).pooler_output
        torch.testing.assert_close(encoder(pixels(32)).pooled_BD, expected, atol=1e-5, rtol=0)
    import transformers

    fields = {**TOWER, "image_size": 32, "patch_size": 16, "num_labels": 3}
    classifier = randomize(transformers.ViTForImageClassification(transformers.ViTConfig(**fields)))
    classifier.save_pretrained(tmp_path / "vit")
    save_processor(tmp_path / "vit", "siglip")
    encoder = create_image_encoder(f"hf:{tmp_path / 'vit'}", pretrained=True).eval()
    with torch.no_grad():
        logits = classifier.classifier(encoder(pixels(32)).pooled_BD)
        torch.testing.assert_close(logits, classifier(pixels(32)).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shards", [True, False])
def test_dinov2_of_its_own_code_is_read(shards: bool, tmp_path: Path) -> None:
    """A teacher with sharded blocks, fused attention and SwiGLU, beside its heads (CheXFound)."""
    import transformers

    fields = {**SIZES, "image_size": 56, "patch_size": 14, "use_swiglu_ffn": True}
    model = randomize(
        transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**fields))
    )
    state = model.state_dict()
    own = {
        "cls_token": state["embeddings.cls_token"],
        "mask_token": state["embeddings.mask_token"],
        "register_tokens": state["embeddings.register_tokens"],
        "pos_embed": state["embeddings.position_embeddings"],
        "patch_embed.proj.weight": state["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": state["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": state["layernorm.weight"],
        "norm.bias": state["layernorm.bias"],
    }
    for index in range(2):
        old = f"encoder.layer.{index}."
        new = f"blocks.{index}.{index}." if shards else f"blocks.{index}."
        for leaf in ("weight", "bias"):
            qkv = [state[f"{old}attention.{name}_proj.{leaf}"] for name in "qkv"]
            mlp = [state[f"{old}mlp.{name}_proj.{leaf}"] for name in ("gate", "up")]
            own |= {
                f"{new}attn.qkv.{leaf}": torch.cat(qkv),
                f"{new}attn.proj.{leaf}": state[f"{old}attention.o_proj.{leaf}"],
                f"{new}mlp.w12.{leaf}": torch.cat(mlp),
                f"{new}mlp.w3.{leaf}": state[f"{old}mlp.down_proj.{leaf}"],
                **{f"{new}norm{n}.{leaf}": state[f"{old}norm{n}.{leaf}"] for n in (1, 2)},
            }
        own |= {f"{new}ls{n}.gamma": state[f"{old}layer_scale{n}.lambda1"] for n in (1, 2)}
    teacher = {f"backbone.{name}": value for name, value in own.items()}
    heads = {"dino_head.mlp.0.weight": torch.zeros(2, 2), "ibot_head.last.weight": torch.zeros(3)}
    torch.save({"teacher": {**teacher, **heads}}, tmp_path / "teacher_checkpoint.pth")
    encoder = create_image_encoder(
        "hf:dinov2_with_registers", pretrained=tmp_path / "teacher_checkpoint.pth", **fields
    ).eval()
    with torch.no_grad():
        expected = model(pixels(56)).pooler_output
        torch.testing.assert_close(encoder(pixels(56)).pooled_BD, expected, atol=1e-5, rtol=0)
    del teacher["backbone.blocks.1.1.ls1.gamma" if shards else "backbone.blocks.1.ls1.gamma"]
    torch.save({"teacher": teacher}, tmp_path / "without.pth")
    with raises(WeightsError, "mismatch", names="encoder.layer.1.layer_scale1.lambda1"):
        create_image_encoder(
            "hf:dinov2_with_registers", pretrained=tmp_path / "without.pth", **fields
        )


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_text_towers_have_the_vectors_of_transformers(kind: str, tmp_path: Path) -> None:
    """Before and after the projection; SigLIP's over full length, whatever the batch's is."""
    model = clip_model() if kind == "clip" else siglip_model()
    model.save_pretrained(tmp_path)
    end = 513 if kind == "clip" else 1
    ids_BT = torch.tensor([[5, 7, 9, end], [8, end, 1, 1]])
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    whole = torch.nn.functional.pad(ids_BT, (0, 16), value=1) if kind == "siglip" else ids_BT
    bare = create_text_encoder(f"hf:{tmp_path}", pretrained=True).eval()
    projected = create_text_encoder(f"hf:{tmp_path}", pretrained=True, projection=True).eval()
    fields = {**projected.config, "name": encoders.text.factory.without_folder(str(tmp_path))}
    again = create_text_encoder(**fields).eval()
    again.load_state_dict(projected.state_dict())
    with torch.no_grad():
        expected = model.get_text_features(whole).pooler_output
        states = model.text_model(whole).last_hidden_state
        for encoder in (projected, again):
            features = encoder(ids_BT, mask_BT)
            torch.testing.assert_close(features.pooled_BD, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(
            features.tokens_BTD[mask_BT], states[:, :4][mask_BT], atol=TOLERANCE, rtol=0
        )
        last = states[:, -1] if kind == "siglip" else states[[0, 1], [3, 1]]
        torch.testing.assert_close(bare(ids_BT, mask_BT).pooled_BD, last, atol=1e-5, rtol=0)
    assert bare.max_tokens == 20
    groups = projected.parameter_layers()
    assert len(groups) == 4
    assert all("embeddings" in name for name in groups[0])


@pytest.mark.parametrize(
    ("kind", "defaults"), [("Siglip", {}), ("CLIP", {}), ("Bit", {}), ("ViT", {})]
)
def test_defaults_are_those_of_transformers_processors(kind: str, defaults: Any) -> None:
    import importlib

    name = f"transformers.models.{kind.lower()}.image_processing_pil_{kind.lower()}"
    theirs = getattr(importlib.import_module(name), f"{kind}ImageProcessorPil")
    ours = PROCESSORS[f"{kind}ImageProcessor"]
    assert {
        key: getattr(theirs, key) for key in ours if key not in ("image_mean", "image_std")
    } == {key: value for key, value in ours.items() if key not in ("image_mean", "image_std")}
    assert list(theirs.image_mean) == ours["image_mean"]
    assert list(theirs.image_std) == ours["image_std"]
    assert bool(getattr(theirs, "do_center_crop", False)) == ours.get("do_center_crop", False)


def processor_of(tmp_path: Path, **content: Any) -> Any:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    return read_processor(tmp_path)


def test_image_processors_of_all_versions_are_read(tmp_path: Path) -> None:
    old = processor_of(tmp_path, feature_extractor_type="CLIPFeatureExtractor", size=224)
    assert (old.size, old.fit, old.margin, old.mean) == (224, "crop", 0, CLIP_MEAN)
    square = processor_of(tmp_path, image_processor_type="SiglipImageProcessorFast", size=448)
    assert (square.size, square.fit, square.resize) == (448, "squash", "bicubic_antialias")
    vit = processor_of(tmp_path, image_processor_type="ViTImageProcessor", do_normalize=False)
    assert (vit.resize, vit.mean, vit.std) == ("bilinear_antialias", (0.0,) * 3, (1.0,) * 3)
    crop = processor_of(
        tmp_path,
        image_processor_type="BitImageProcessor",
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
    )
    assert (crop.size, crop.margin, crop.transform()["crop_rounding"]) == (224, 16, "down")
    (tmp_path / "preprocessor_config.json").unlink()
    assert read_processor(tmp_path) is None
    nested = {"image_processor": {"image_processor_type": "ViTImageProcessor"}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read_processor(tmp_path).size == 224


@pytest.mark.parametrize(
    ("changed", "field", "code"),
    [
        ({"image_processor_type": "Siglip2ImageProcessor"}, "image_processor_type", "unsupported"),
        ({"image_processor_type": None}, "image_processor_type", "unsupported"),
        ({"do_resize": False}, "do_resize", "unsupported"),
        ({"do_rescale": False}, "rescale_factor", "unsupported"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor", "unsupported"),
        ({"resample": 1}, "resample", "unsupported"),
        ({"do_pad": True}, "do_pad", "unsupported"),
        ({"do_equalize": True}, "do_equalize", "unsupported"),
        ({"crop_pct": 0.9}, "crop_pct", "unsupported"),
        ({"size": {"height": 32, "width": 48}}, "size", "unsupported"),
        ({"size": {"longest_edge": 32}}, "size", "unsupported"),
        ({"size": {"shortest_edge": 32}}, "size", "unsupported"),
        ({"image_mean": [0.5]}, "image_mean", "malformed"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std", "out_of_range"),
    ],
)
def test_processors_that_cannot_be_honoured_are_refused_by_name(
    changed: dict[str, Any], field: str, code: str, tmp_path: Path
) -> None:
    save_processor(tmp_path, "siglip")
    change(tmp_path / "preprocessor_config.json", **changed)
    with raises(ConfigError, code, field, names="preprocessor_config.json"):
        read_processor(tmp_path)


def test_folders_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    model, folder = folder_of("vit", tmp_path / "vit")
    name = f"hf:{folder}"
    for fields, code, field in (
        ({"hidden_act": "gelu_fancy"}, "unsupported", "hidden_act"),
        ({"model_type": "siglip2"}, "unsupported", "name"),
        ({"model_type": "spam"}, "unsupported", "name"),
        ({"model_type": "bert"}, "unsupported", "name"),
        ({"model_type": None}, "malformed", "name"),
        ({"hidden_size": "wide"}, "malformed", "name"),
    ):
        model.save_pretrained(folder)
        change(folder / "config.json", **fields)
        with raises(ConfigError, code, field, names="config.json"):
            create_image_encoder(name, pretrained=True)
    model.save_pretrained(folder)
    change(folder / "config.json", intermediate_size=48)
    with raises(WeightsError, "mismatch", names="layers.0.mlp.fc1.weight"):
        create_image_encoder(name, pretrained=True)
    model.save_pretrained(folder)
    save_processor(folder, "siglip", size={"height": 48, "width": 48})
    with raises(ConfigError, "conflict", "image_size", names="48 pixels"):
        create_image_encoder(name, pretrained=True)
    assert create_image_encoder(name, pretrained=True, image_size=48).image_size == (48, 48)
    (folder / "preprocessor_config.json").unlink()
    with raises(ConfigError, "missing", "mean", names="preprocessor_config.json"):
        create_image_encoder(name, pretrained=True)
    assert create_image_encoder(name, pretrained=True, mean=0.5, std=0.5).mean == (0.5,) * 3
    (folder / "model.safetensors").unlink()
    with raises(WeightsError, "not_found"):
        create_image_encoder(name, pretrained=True, mean=0.5, std=0.5)
    (folder / "config.json").unlink()
    with raises(ConfigError, "not_found", names="config.json"):
        create_image_encoder(name, mean=0.5, std=0.5)
    with raises(ConfigError, "unknown_name", "name", names="no local folder"):
        create_image_encoder("hf:/no/such/folder")
    with raises(ConfigError, "unknown_name", "hiden_size", names="hidden_size"):
        create_image_encoder('hf:vit{"hiden_size": 32}')
    with raises(ConfigError, "unsupported", "projection"):
        create_image_encoder("hf:vit", projection=True)


@pytest.mark.parametrize("size", ["small", "base"])
def test_eva_x_of_its_own_code_is_read(size: str, tmp_path: Path) -> None:
    """A file of masked pretraining, with NumPy scalars beside the weights; timm maps the names."""
    from timm.models.eva import checkpoint_filter_fn

    small: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "image_size": 64}
    reference = create_image_encoder(f"eva_x_{size}", **small)
    names = {
        ".mlp.norm.": ".mlp.ffn_ln.",
        ".mlp.fc1.": ".mlp.w12.",
        ".mlp.fc1_g.": ".mlp.w1.",
        ".mlp.fc1_x.": ".mlp.w2.",
        ".mlp.fc2.": ".mlp.w3.",
        ".q_proj.bias": ".q_bias",
        ".v_proj.bias": ".v_bias",
        "fc_norm.": "norm.",
    }
    published = {}
    for key, tensor in reference.backbone.state_dict().items():
        name = key
        for new, old in names.items():
            name = name.replace(new, old) if old != "norm." or name.startswith(new) else name
        published[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    published |= {
        "mask_token": torch.zeros(1, 1, 32),
        "lm_head.weight": torch.zeros(4, 32),
        "lm_head.bias": torch.zeros(4),
        "rope.freqs_cos": torch.zeros(16, 16),
    }
    torch.save({"model": published, "epoch": np.float64(3.0)}, tmp_path / "eva_x.pt")
    encoder = create_image_encoder(f"eva_x_{size}", pretrained=tmp_path / "eva_x.pt", **small)
    expected = checkpoint_filter_fn(published, reference.backbone)
    assert encoder.backbone.state_dict().keys() == expected.keys()
    for name, tensor in encoder.backbone.state_dict().items():
        assert torch.equal(tensor, expected[name])
    features = encoder.eval()(pixels(64))
    assert features.patches_BPD.shape == (2, 16, 32)
    del published["blocks.1.norm2.weight"]
    torch.save({"model": published}, tmp_path / "without.pt")
    with raises(WeightsError, "mismatch", names="blocks.1.norm2.weight"):
        create_image_encoder(f"eva_x_{size}", pretrained=tmp_path / "without.pt", **small)


@pytest.mark.parametrize(
    ("name", "place", "field"),
    [
        ("cxformer_base", "m42-health", "pretrained"),
        ("cxformer_small", "m42-health/CXformer-small at revision 21777c30", None),
        ("xrayclip_b16", "StanfordAIMI/XrayCLIP", "pretrained"),
        ("medsiglip", "google/medsiglip-448 at revision 9cea28a1", None),
        ("pubmedclip", "pytorch_model.bin of flaviagiammarino", None),
        ("eva_x_tiny", "eva_x_tiny_patch16_merged520k_mim.pt of MapleF/eva_x", None),
    ],
)
def test_presets_say_where_their_file_is(
    name: str, place: str, field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, whether or not a commit is pinned."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    if name != "eva_x_tiny":
        tiny: dict[str, Any] = {**TOWER, "image_size": 70}
        wide = name.startswith("cxformer")
        arguments = {
            key: value for key, value in tiny.items() if key != "intermediate_size" or not wide
        }
    with raises(WeightsError, "not_found", field, names=place):
        create_image_encoder(name, pretrained=True, **arguments)
