"""Models in other projects' formats: loaded by those projects, and computing the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medvl.cli import main as cli
from medvl.errors import CheckpointError, ConfigError
from medvl.export import export_hugging_face, export_onnx, export_open_clip
from medvl.export.exporters.common import difference, random_ids
from medvl.export.importers.backbones import hugging_face_swin, hugging_face_vit
from medvl.export.importers.key_map import to_ours, to_theirs
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


def clip_of_others(**settings: Any) -> Any:
    """timm's ResNet and a BERT, under heads as open_clip makes them."""
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
    """Ids and mask of texts of unlike length, none of them with padding inside."""
    if model.tokenizer is not None:
        return model.tokenize(["small left effusion", "no pneumothorax or other acute finding", "clear"])
    ids = torch.randint(1, model.text_encoder.vocab_size, (3, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(7) < torch.tensor([[7], [4], [2]])
    return ids.masked_fill(~mask, model.text_encoder.pad_id), mask


@pytest.mark.fault("N8")
@pytest.mark.parametrize("make", [chexzero, clip_of_others])
def test_open_clip_loads_the_folder_and_embeds_alike(make: Callable[[], Any], tmp_path: Path) -> None:
    import open_clip

    model = make()
    exported = export_open_clip(model, tmp_path / "out")
    assert max(exported.differences.values()) < 1e-5
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    theirs.eval()
    ids, mask = texts(model)
    length = theirs.context_length if model.tokenizer is not None else ids.shape[1]
    padded = nn.functional.pad(ids, (0, length - ids.shape[1]), value=model.text_encoder.pad_id)
    with torch.no_grad():
        torch.testing.assert_close(theirs.encode_image(pixels(), normalize=True), model.encode_image(pixels()), **CLOSE)
        torch.testing.assert_close(theirs.encode_text(padded, normalize=True), model.encode_text(ids, mask), **CLOSE)
        assert torch.equal(theirs.logit_scale, model.logit_scale)
    normalize = preprocess.transforms[-1]
    assert tuple(normalize.mean) == pytest.approx(model.image_encoder.mean)
    assert tuple(normalize.std) == pytest.approx(model.image_encoder.std)
    written = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert written["preprocess_cfg"]["resize_mode"] == {"pad": "longest", "crop": "shortest"}[model.config.fit]
    assert "local-dir:FOLDER" in (tmp_path / "out" / "README.md").read_text()


def test_open_clip_takes_siglip_with_its_bias(tmp_path: Path) -> None:
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
    theirs = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert theirs.logit_bias.item() == -7.5


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (convirt, "open_clip has nothing like convirt: only clip, chexzero and siglip"),
        (lambda: clip_of_others(text_pool="max"), "pools a BERT by cls or mean, not by max"),
        (lambda: clip_of_others(image_encoder="resnet_tiny"), "cannot build resnet_tiny"),
        (lambda: clip_of_others(text_arguments={"layers": [1, -1]}), "reads the last layer of a text encoder"),
        (lambda: clip_of_others(image_arguments={"in_channels": 1}), "take three channels"),
    ],
)
def test_what_open_clip_cannot_express_is_named(make: Callable[[], Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        export_open_clip(make(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("N8")
def test_hugging_face_loads_a_whole_clip(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model = chexzero()
    export_hugging_face(model, tmp_path / "out")
    theirs = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "CLIPModel"
    ids, mask = texts(model)
    with torch.no_grad():
        output = theirs(input_ids=ids, attention_mask=mask.long(), pixel_values=pixels())
        torch.testing.assert_close(output.image_embeds, model.encode_image(pixels()), **CLOSE)
        torch.testing.assert_close(output.text_embeds, model.encode_text(ids, mask), **CLOSE)
        scaled = model.logit_scale.exp() * model.encode_text(ids, mask) @ model.encode_image(pixels()).T
        torch.testing.assert_close(output.logits_per_text, scaled, atol=1e-4, rtol=1e-5)
    read = AutoTokenizer.from_pretrained(tmp_path / "out")(["small left effusion"])["input_ids"]
    assert read == model.tokenize(["small left effusion"])[0].tolist()


@pytest.mark.fault("N8")
@pytest.mark.parametrize("settings", [{}, {"image_encoder": "resnet50"}])
def test_hugging_face_loads_the_towers_of_any_system(settings: dict[str, Any], tmp_path: Path) -> None:
    """Basic blocks and bottlenecks, their statistics moved; the heads are named as left out."""
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
        found = image(pixels()).pooler_output.flatten(1)
        torch.testing.assert_close(found, model.image_encoder(pixels()).pooled_BD, atol=1e-4, rtol=1e-4)
        states = text(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(states[mask], model.text_encoder(ids, mask).tokens_BTD[mask], **CLOSE)


def test_hugging_face_loads_a_vision_transformer(tmp_path: Path) -> None:
    from transformers import AutoModel

    sizes = {"depth": 2, "embed_dim": 64, "num_heads": 2}
    model = clip_of_others(image_encoder="vit_b16", image_arguments=sizes, text_pool="cls")
    export_hugging_face(model, tmp_path / "out")
    theirs = AutoModel.from_pretrained(tmp_path / "out" / "image_encoder", add_pooling_layer=False).eval()
    with torch.no_grad():
        found = theirs(pixels()).last_hidden_state[:, 0]
        torch.testing.assert_close(found, model.image_encoder(pixels()).pooled_BD, **CLOSE)


def test_what_transformers_has_no_class_for_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"resnet_tiny is a timm\.models\.resnetv2\.ResNetV2, for which transformers has no"
    ):
        export_hugging_face(convirt(image_encoder="resnet_tiny"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_tables_read_both_ways() -> None:
    """What goes to their names comes back the same: fused matrices are cut in three and put together again."""
    names = {
        **dict.fromkeys(("layers.0.blocks.1.attn.qkv.weight", "layers.0.blocks.1.mlp.fc1.weight"), (12, 4)),
        **dict.fromkeys(("layers.1.downsample.reduction.weight", "patch_embed.proj.weight"), (4, 4)),
    }
    generator = torch.Generator().manual_seed(7)
    ours = {f"image_encoder.backbone.{name}": torch.randn(shape, generator=generator) for name, shape in names.items()}
    theirs, unknown = to_theirs(ours, hugging_face_swin("swin."))
    assert not unknown
    assert theirs["swin.encoder.layers.0.blocks.1.attention.self.key.weight"].shape == (4, 4)
    assert "swin.encoder.layers.0.downsample.reduction.weight" in theirs
    back = to_ours(theirs, hugging_face_swin("swin."))
    assert not back.problems
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in ours.items())
    _, unknown = to_theirs({"image_encoder.backbone.reg_token": torch.zeros(1)}, hugging_face_vit(""))
    assert unknown == ["image_encoder.backbone.reg_token"]


def test_what_comes_out_different_is_not_kept() -> None:
    assert difference("it", torch.tensor([1.0, 2.0 + 1e-6]), torch.tensor([1.0, 2.0])) < 1e-6
    with pytest.raises(CheckpointError, match=r"it came out different by 5\.0e-01 of its largest value"):
        difference("it", torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.0]))
    with pytest.raises(CheckpointError, match="it came out different by nan"):
        difference("it", torch.tensor([float("nan"), 2.0]), torch.tensor([1.0, 2.0]))
    with pytest.raises(CheckpointError, match=r"it came out of shape \(2,\), not \(1, 2\)"):
        difference("it", torch.zeros(2), torch.zeros(1, 2))


def test_random_texts_end_once() -> None:
    encoder = convirt().text_encoder
    ids = random_ids(encoder, end_id=3)
    assert (ids[:, -1] == 3).all()
    assert not (ids[:, :-1] == 3).any()
    assert not (ids == encoder.pad_id).any()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    checkpoint.save(chexzero(), tmp_path / "run")
    cli.main(["export", str(tmp_path / "run"), "--to", "open_clip"])
    told = capsys.readouterr().out
    assert told.startswith(f"Wrote {tmp_path / 'run-open_clip'}\n  image embedding: differs from medvl's by at most ")
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path / "run"), "--to", "open_clip"])
    assert "run-open_clip exists: give a folder that does not with --out" in capsys.readouterr().err


def test_onnx_asks_for_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx and onnxscript is not installed: pip install 'medvl\[onnx\]'"):
        export_onnx(convirt(), tmp_path / "out")


@pytest.mark.fault("N8")
@pytest.mark.slow
@pytest.mark.parametrize("make", [chexzero, convirt])
def test_onnx_computes_the_same(make: Callable[[], Any], tmp_path: Path) -> None:
    """Both towers, for another number of images and another length than they were traced with."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make()
    exported = export_onnx(model, tmp_path / "out")
    assert max(exported.differences.values()) < 1e-4
    image = torch.randint(256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(8), dtype=torch.uint8)
    ids, mask = texts(model)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "image_tower.onnx"))
    (found,) = session.run(["image_embedding"], {"pixels": image.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model.encode_image(image), atol=1e-5, rtol=1e-4)
        session = onnxruntime.InferenceSession(str(tmp_path / "out" / "text_tower.onnx"))
        (found,) = session.run(["text_embedding"], {"ids": ids.numpy(), "mask": mask.long().numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model.encode_text(ids, mask), atol=1e-5, rtol=1e-4)
