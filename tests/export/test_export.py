"""Exported models, loaded by the other projects and compared with medvl's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from torch import nn

from medvl.cli import main as cli
from medvl.errors import CheckpointError, ConfigError
from medvl.export import export_hugging_face, export_onnx, export_open_clip
from medvl.export.exporters.common import difference, random_ids
from medvl.export.importers.backbones import hugging_face_swin, hugging_face_vit
from medvl.export.importers.key_map import to_medvl, to_published
from medvl.models import checkpoint, create_model
from medvl.models.dual_encoders.chexzero import CheXzeroConfig
from medvl.models.dual_encoders.clip import CLIPConfig
from medvl.models.dual_encoders.convirt import ConVIRTConfig
from medvl.models.dual_encoders.siglip import SigLIPConfig

VISION = {"width": 128, "layers": 2, "embed_dim": 24}
TEXT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "embed_dim": 24}
CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-5}


def chexzero(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = CheXzeroConfig(image_size=64, image_arguments=VISION, text_arguments=TEXT, **settings)
    return create_model(config, tokenizer="clip").eval()


def clip_from_timm_and_bert(**settings: Any) -> Any:
    """CLIP of timm's ResNet and a BERT, with open_clip's heads."""
    torch.manual_seed(1)
    fields = {"image_encoder": "resnet18", "text_encoder": "tiny_bert", "text_pool": "mean", "text_head": "mlp"}
    return create_model(CLIPConfig(**{**fields, "image_size": 64, "projection_dim": 32, **settings})).eval()


def convirt(**settings: Any) -> Any:
    torch.manual_seed(2)
    fields = {"image_encoder": "resnet18", "text_encoder": "tiny_bert", "image_size": 64, "frozen_text_layers": 0}
    return create_model(ConVIRTConfig(**{**fields, **settings})).eval()


def pixels(channels: int = 3) -> torch.Tensor:
    return torch.randn(3, channels, 64, 64, generator=torch.Generator().manual_seed(3))


def texts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of texts of different lengths."""
    if model.tokenizer is not None:
        return model.tokenize(["small left effusion", "no pneumothorax or other acute finding", "clear"])
    ids = torch.randint(1, model.text_encoder.vocab_size, (3, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(7) < torch.tensor([[7], [4], [2]])
    return ids.masked_fill(~mask, model.text_encoder.pad_id), mask


@pytest.mark.fault("N8")
@pytest.mark.parametrize("make", [chexzero, clip_from_timm_and_bert])
def test_open_clip_loads_the_folder_with_equal_embeddings(make: Callable[[], Any], tmp_path: Path) -> None:
    import open_clip

    model = make()
    exported = export_open_clip(model, tmp_path / "out")
    assert max(exported.differences.values()) < 1e-5
    exported_model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    exported_model.eval()
    ids, mask = texts(model)
    length = exported_model.context_length if model.tokenizer is not None else ids.shape[1]
    padded = nn.functional.pad(ids, (0, length - ids.shape[1]), value=model.text_encoder.pad_id)
    with torch.no_grad():
        torch.testing.assert_close(
            exported_model.encode_image(pixels(), normalize=True), model.encode_image(pixels()), **CLOSE
        )
        torch.testing.assert_close(
            exported_model.encode_text(padded, normalize=True), model.encode_text(ids, mask), **CLOSE
        )
        assert torch.equal(exported_model.logit_scale, model.logit_scale)
    normalize = preprocess.transforms[-1]
    assert tuple(normalize.mean) == pytest.approx(model.image_encoder.mean)
    assert tuple(normalize.std) == pytest.approx(model.image_encoder.std)
    written = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert written["preprocess_cfg"]["resize_mode"] == {"pad": "longest", "crop": "shortest"}[model.config.fit]
    assert "local-dir:FOLDER" in (tmp_path / "out" / "README.md").read_text()


def test_open_clip_export_of_siglip_keeps_its_bias(tmp_path: Path) -> None:
    import open_clip

    torch.manual_seed(5)
    vision = {**VISION, "patch_size": 16}
    model: Any = create_model(
        SigLIPConfig(
            image_encoder="open_clip:custom",
            text_encoder="open_clip:custom",
            image_size=64,
            image_arguments=vision,
            text_arguments=TEXT,
            bias=-7.5,
        ),
        tokenizer="clip",
    )
    export_open_clip(model, tmp_path / "out")
    exported_model = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert exported_model.logit_bias.item() == -7.5


@pytest.mark.parametrize(
    ("make", "field", "names"),
    [
        (convirt, "model", "convirt"),
        (lambda: clip_from_timm_and_bert(text_pool="max"), "text_pool", "max"),
        (lambda: clip_from_timm_and_bert(image_encoder="resnet_tiny"), "image_encoder", "resnet_tiny"),
        (lambda: clip_from_timm_and_bert(text_arguments={"layers": [1, -1]}), "text_arguments", "(1, -1)"),
        (lambda: clip_from_timm_and_bert(image_arguments={"in_channels": 1}), None, "three channels"),
    ],
)
def test_open_clip_export_refuses_unsupported_parts(
    make: Callable[[], Any], field: str | None, names: str, tmp_path: Path
) -> None:
    with raises(ConfigError, "unsupported", field, names=names):
        export_open_clip(make(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("N8")
def test_hugging_face_loads_a_complete_clip(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model = chexzero()
    export_hugging_face(model, tmp_path / "out")
    exported_model = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(exported_model).__name__ == "CLIPModel"
    ids, mask = texts(model)
    with torch.no_grad():
        output = exported_model(input_ids=ids, attention_mask=mask.long(), pixel_values=pixels())
        torch.testing.assert_close(output.image_embeds, model.encode_image(pixels()), **CLOSE)
        torch.testing.assert_close(output.text_embeds, model.encode_text(ids, mask), **CLOSE)
        scaled = model.logit_scale.exp() * model.encode_text(ids, mask) @ model.encode_image(pixels()).T
        torch.testing.assert_close(output.logits_per_text, scaled, atol=1e-4, rtol=1e-5)
    token_ids = AutoTokenizer.from_pretrained(tmp_path / "out")(["small left effusion"])["input_ids"]
    assert token_ids == model.tokenize(["small left effusion"])[0].tolist()


@pytest.mark.fault("N8")
@pytest.mark.parametrize("settings", [{}, {"image_encoder": "resnet50"}])
def test_hugging_face_loads_the_encoders_of_any_system(settings: dict[str, Any], tmp_path: Path) -> None:
    """Basic blocks and bottlenecks with nonzero running means; the heads are listed as left out."""
    from transformers import AutoModel

    model = convirt(**settings)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(generator=torch.Generator().manual_seed(6))
    exported = export_hugging_face(model, tmp_path / "out")
    assert set(exported.left_out) == {"image_head", "text_head"}
    assert "image_head: transformers has no class with this head" in (tmp_path / "out" / "README.md").read_text()
    image = AutoModel.from_pretrained(tmp_path / "out" / "image_encoder").eval()
    text = AutoModel.from_pretrained(tmp_path / "out" / "text_encoder", add_pooling_layer=False).eval()
    ids, mask = texts(model)
    with torch.no_grad():
        pooled = image(pixels()).pooler_output.flatten(1)
        torch.testing.assert_close(pooled, model.image_encoder(pixels()).pooled_BD, atol=1e-4, rtol=1e-4)
        states = text(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(states[mask], model.text_encoder(ids, mask).tokens_BTD[mask], **CLOSE)


def test_hugging_face_loads_a_vision_transformer(tmp_path: Path) -> None:
    from transformers import AutoModel

    sizes = {"depth": 2, "embed_dim": 64, "num_heads": 2}
    model = clip_from_timm_and_bert(image_encoder="vit_b16", image_arguments=sizes, text_pool="cls")
    export_hugging_face(model, tmp_path / "out")
    exported_model = AutoModel.from_pretrained(tmp_path / "out" / "image_encoder", add_pooling_layer=False).eval()
    with torch.no_grad():
        pooled = exported_model(pixels()).last_hidden_state[:, 0]
        torch.testing.assert_close(pooled, model.image_encoder(pixels()).pooled_BD, **CLOSE)


def test_hugging_face_export_refuses_backbones_without_a_class(tmp_path: Path) -> None:
    with raises(ConfigError, "unsupported", "image_encoder", names="resnet_tiny (timm.models.resnetv2.ResNetV2)"):
        export_hugging_face(convirt(image_encoder="resnet_tiny"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_key_tables_are_inverted_exactly() -> None:
    """Fused matrices are split into three and joined again."""
    names = {
        **dict.fromkeys(("layers.0.blocks.1.attn.qkv.weight", "layers.0.blocks.1.mlp.fc1.weight"), (12, 4)),
        **dict.fromkeys(("layers.1.downsample.reduction.weight", "patch_embed.proj.weight"), (4, 4)),
    }
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"image_encoder.backbone.{name}": torch.randn(shape, generator=generator) for name, shape in names.items()
    }
    published, unknown = to_published(tensors, hugging_face_swin("swin."))
    assert not unknown
    assert published["swin.encoder.layers.0.blocks.1.attention.self.key.weight"].shape == (4, 4)
    assert "swin.encoder.layers.0.downsample.reduction.weight" in published
    back = to_medvl(published, hugging_face_swin("swin."))
    assert not back.problems
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in tensors.items())
    _, unknown = to_published({"image_encoder.backbone.reg_token": torch.zeros(1)}, hugging_face_vit(""))
    assert unknown == ["image_encoder.backbone.reg_token"]


def test_differing_outputs_are_refused() -> None:
    assert difference("it", torch.tensor([1.0, 2.0 + 1e-6]), torch.tensor([1.0, 2.0])) < 1e-6
    with raises(CheckpointError, "mismatch", names="it differs by 5.0e-01"):
        difference("it", torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.0]))
    with raises(CheckpointError, "mismatch", names="nan"):
        difference("it", torch.tensor([float("nan"), 2.0]), torch.tensor([1.0, 2.0]))
    with raises(CheckpointError, "mismatch", names="(2,)"):
        difference("it", torch.zeros(2), torch.zeros(1, 2))


def test_random_ids_contain_the_end_id_once() -> None:
    encoder = convirt().text_encoder
    ids = random_ids(encoder, end_id=3)
    assert (ids[:, -1] == 3).all()
    assert not (ids[:, :-1] == 3).any()
    assert not (ids == encoder.pad_id).any()


def test_export_command_writes_a_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    checkpoint.save(chexzero(), tmp_path / "run")
    cli.main(["export", str(tmp_path / "run"), "--to", "open_clip"])
    output = capsys.readouterr().out
    assert output.startswith(
        f"Wrote {tmp_path / 'run-open_clip'}\n  image embedding: maximum relative difference from medvl "
    )
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path / "run"), "--to", "open_clip"])
    assert "run-open_clip exists" in capsys.readouterr().err


def test_onnx_export_without_its_libraries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "missing", names="pip install 'medvl[onnx]'"):
        export_onnx(convirt(), tmp_path / "out")


@pytest.mark.fault("N8")
@pytest.mark.slow
@pytest.mark.parametrize("make", [chexzero, convirt])
def test_onnx_outputs_are_equal(make: Callable[[], Any], tmp_path: Path) -> None:
    """Both encoders, with another batch size and text length than traced."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make()
    exported = export_onnx(model, tmp_path / "out")
    assert max(exported.differences.values()) < 1e-4
    image = torch.randint(256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(8), dtype=torch.uint8)
    ids, mask = texts(model)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "image_tower.onnx"))
    (embedding,) = session.run(["image_embedding"], {"pixels": image.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(embedding), model.encode_image(image), atol=1e-5, rtol=1e-4)
        session = onnxruntime.InferenceSession(str(tmp_path / "out" / "text_tower.onnx"))
        (embedding,) = session.run(["text_embedding"], {"ids": ids.numpy(), "mask": mask.long().numpy()})
        torch.testing.assert_close(torch.from_numpy(embedding), model.encode_text(ids, mask), atol=1e-5, rtol=1e-4)
