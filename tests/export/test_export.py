"""Exported models, loaded by the other projects and compared with medvl's."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from helpers import forked
from helpers.errors import raises
from torch import nn

from medvl.cli import main as cli
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import CheckpointError, ConfigError
from medvl.export import export_hugging_face, export_onnx, export_open_clip
from medvl.export.exporters import onnx, zero_shot
from medvl.export.exporters.common import difference, random_ids
from medvl.export.importers.backbones import hugging_face_swin, hugging_face_vit
from medvl.export.importers.key_map import to_medvl, to_published
from medvl.models import checkpoint, create_model
from medvl.models.dual_encoders.chexzero import CheXzeroConfig
from medvl.models.dual_encoders.clip import CLIPConfig
from medvl.models.dual_encoders.convirt import ConVIRTConfig
from medvl.models.dual_encoders.gloria import GLoRIAConfig
from medvl.models.dual_encoders.siglip import SigLIPConfig

VISION = {"width": 128, "layers": 2, "embed_dim": 24}
TEXT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "embed_dim": 24}
TEXTS = ["small left effusion", "no pneumothorax", "clear"]
CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-5}


def chexzero(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = CheXzeroConfig(image_size=64, image_arguments=VISION, text_arguments=TEXT, **settings)
    return create_model(config, tokenizer="clip").eval()


def clip_from_timm_and_bert(tokenizer: Any = None, **settings: Any) -> Any:
    """CLIP of timm's ResNet and a BERT, with open_clip's heads."""
    torch.manual_seed(1)
    fields = {
        "image_encoder": "resnet18",
        "text_encoder": "tiny_bert",
        "text_pool": "mean",
        "text_head": "mlp",
    }
    return create_model(
        CLIPConfig(**{**fields, "image_size": 64, "projection_dim": 32, **settings}),
        tokenizer=tokenizer,
    ).eval()


def convirt(tokenizer: Any = None, **settings: Any) -> Any:
    torch.manual_seed(2)
    fields = {
        "image_encoder": "resnet18",
        "text_encoder": "tiny_bert",
        "image_size": 64,
        "frozen_text_layers": 0,
    }
    return create_model(ConVIRTConfig(**{**fields, **settings}), tokenizer=tokenizer).eval()


def pixels(channels: int = 3) -> torch.Tensor:
    return torch.randn(3, channels, 64, 64, generator=torch.Generator().manual_seed(3))


def texts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of texts of different lengths."""
    if model.tokenizer is not None:
        return model.tokenize(
            ["small left effusion", "no pneumothorax or other acute finding", "clear"]
        )
    ids = torch.randint(
        1, model.text_encoder.vocab_size, (3, 7), generator=torch.Generator().manual_seed(4)
    )
    mask = torch.arange(7) < torch.tensor([[7], [4], [2]])
    return ids.masked_fill(~mask, model.text_encoder.pad_id), mask


@pytest.mark.fault("N8")
@pytest.mark.parametrize("make", [chexzero, clip_from_timm_and_bert])
def test_open_clip_loads_the_folder_with_equal_embeddings(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    model = make()
    exported = export_open_clip(model, tmp_path / "out")
    assert max(exported.differences.values()) < 1e-5
    monkeypatch.chdir(tmp_path / "out")  # where open_clip looks for the configuration of a BERT
    exported_model, _, preprocess = open_clip.create_model_and_transforms(
        f"local-dir:{tmp_path / 'out'}"
    )
    exported_model.eval()
    ids, mask = texts(model)
    length = exported_model.context_length if model.tokenizer is not None else ids.shape[1]
    padded = nn.functional.pad(ids, (0, length - ids.shape[1]), value=model.text_encoder.pad_id)
    with torch.no_grad():
        torch.testing.assert_close(
            exported_model.encode_image(pixels(), normalize=True),
            model.encode_image(pixels()),
            **CLOSE,
        )
        torch.testing.assert_close(
            exported_model.encode_text(padded, normalize=True),
            model.encode_text(ids, mask),
            **CLOSE,
        )
        assert torch.equal(exported_model.logit_scale, model.logit_scale)
    normalize = preprocess.transforms[-1]
    assert tuple(normalize.mean) == pytest.approx(model.image_encoder.mean)
    assert tuple(normalize.std) == pytest.approx(model.image_encoder.std)
    written = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert (
        written["preprocess_cfg"]["resize_mode"]
        == {"pad": "longest", "crop": "shortest"}[model.config.fit]
    )
    assert "local-dir:FOLDER" in (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in json.dumps(written)


def usage(folder: Path) -> str:
    """Return the code in a card, for this folder."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    return code.replace("FOLDER", str(folder))


def in_new_process(code: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [
        sys.executable,
        "-c",
        f"import medvl\n{code}",
    ]  # for PyPI's torchvision beside torch without CUDA
    done = forked.run(command, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_open_clip_folder_of_a_bert_can_be_moved(tmp_path: Path) -> None:
    model = clip_from_timm_and_bert(
        tokenizer=train_wordpiece(TEXTS, vocab_size=100, min_frequency=1)
    )
    export_open_clip(model, tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere" / "moved")
    show = (
        "\nprint(tokenizer(['clear effusion']).tolist()[0], "
        "model.eval().encode_text(tokenizer(['clear effusion'])).tolist())"
    )
    ids, vectors = in_new_process(usage(moved) + show, tmp_path).strip().split("] [[")
    expected, mask = model.tokenize(["clear effusion"])
    assert json.loads(ids + "]")[: expected.shape[1]] == expected[0].tolist()
    vector = torch.tensor(json.loads("[[" + vectors))
    torch.testing.assert_close(
        nn.functional.normalize(vector, dim=-1), model.encode_text(expected, mask), **CLOSE
    )


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
        (
            lambda: clip_from_timm_and_bert(image_encoder="resnet_tiny"),
            "image_encoder",
            "resnet_tiny",
        ),
        (
            lambda: clip_from_timm_and_bert(text_arguments={"layers": [1, -1]}),
            "text_arguments",
            "(1, -1)",
        ),
        (
            lambda: clip_from_timm_and_bert(image_arguments={"in_channels": 1}),
            None,
            "three channels",
        ),
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
        scaled = (
            model.logit_scale.exp() * model.encode_text(ids, mask) @ model.encode_image(pixels()).T
        )
        torch.testing.assert_close(output.logits_per_text, scaled, atol=1e-4, rtol=1e-5)
    token_ids = AutoTokenizer.from_pretrained(tmp_path / "out")(["small left effusion"])[
        "input_ids"
    ]
    assert token_ids == model.tokenize(["small left effusion"])[0].tolist()


@pytest.mark.fault("N8")
@pytest.mark.parametrize("settings", [{}, {"image_encoder": "resnet50"}])
def test_hugging_face_loads_the_encoders_of_any_system(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Basic blocks and bottlenecks with nonzero running means."""
    from transformers import AutoModel

    model = convirt(**settings)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(generator=torch.Generator().manual_seed(6))
    exported = export_hugging_face(model, tmp_path / "out")
    assert not exported.left_out
    image = AutoModel.from_pretrained(tmp_path / "out" / "image_encoder").eval()
    text = AutoModel.from_pretrained(
        tmp_path / "out" / "text_encoder", add_pooling_layer=False
    ).eval()
    ids, mask = texts(model)
    with torch.no_grad():
        pooled = image(pixels()).pooler_output.flatten(1)
        torch.testing.assert_close(
            pooled, model.image_encoder(pixels()).pooled_BD, atol=1e-4, rtol=1e-4
        )
        states = text(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(
            states[mask], model.text_encoder(ids, mask).tokens_BTD[mask], **CLOSE
        )


def test_hugging_face_loads_a_vision_transformer(tmp_path: Path) -> None:
    from transformers import AutoModel

    sizes = {"depth": 2, "embed_dim": 64, "num_heads": 2}
    model = clip_from_timm_and_bert(image_encoder="vit_b16", image_arguments=sizes, text_pool="cls")
    export_hugging_face(model, tmp_path / "out")
    exported_model = AutoModel.from_pretrained(
        tmp_path / "out" / "image_encoder", add_pooling_layer=False
    ).eval()
    with torch.no_grad():
        pooled = exported_model(pixels()).last_hidden_state[:, 0]
        torch.testing.assert_close(pooled, model.image_encoder(pixels()).pooled_BD, **CLOSE)


@pytest.mark.fault("N8")
@pytest.mark.parametrize(
    ("image_encoder", "model_type"),
    [
        ("resnet_tiny", "timm_wrapper"),
        ("timm:convnext_atto", "timm_wrapper"),
        ("torchvision:resnet18", None),
    ],
)
def test_hugging_face_export_of_any_image_encoder_scores_as_medvl_does(
    image_encoder: str, model_type: str | None, tmp_path: Path
) -> None:
    """From the folder alone, moved; the quickstart's encoder in a process of its own, by the
    code in the card.
    """
    tokenizer = train_wordpiece(TEXTS, vocab_size=100, min_frequency=1)
    model = convirt(image_encoder=image_encoder, tokenizer=tokenizer)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(generator=torch.Generator().manual_seed(6))
    exported = export_hugging_face(model, tmp_path / "out")
    assert not exported.left_out
    assert set(exported.differences) >= {
        "image embedding",
        "text embedding",
        "embedding of strings",
    }
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    if model_type is None:
        assert (moved / "image_encoder" / "encoder.json").is_file()
    else:
        assert (
            json.loads((moved / "image_encoder" / "config.json").read_text())["model_type"]
            == model_type
        )
    if image_encoder == "resnet_tiny":
        torch.save({"pixels": pixels()}, tmp_path / "pixels.pt")
        inputs = (
            f"import torch; pixels_NCHW = "
            f"torch.load({str(tmp_path / 'pixels.pt')!r})['pixels']; texts = {TEXTS}"
        )
        printed = in_new_process(f"{inputs}\n{usage(moved)}\nprint(similarity_NM.tolist())", moved)
        scores = torch.tensor(json.loads(printed))
    else:
        loaded = zero_shot.load(moved)
        scores = loaded.encode_image(pixels()) @ loaded.encode_text(TEXTS).T
    torch.testing.assert_close(scores, model.similarity(pixels(), TEXTS), **CLOSE)


def test_hugging_face_export_leaves_out_heads_of_regions_and_words(tmp_path: Path) -> None:
    """GLoRIA's similarity needs more than a vector."""
    model: Any = create_model(
        GLoRIAConfig(image_encoder="resnet18", text_encoder="tiny_bert", image_size=64)
    ).eval()
    exported = export_hugging_face(model, tmp_path / "out")
    assert "image_head" in exported.left_out
    assert not (tmp_path / "out" / "zero_shot.py").exists()
    assert "- image_head: transformers has no class" in (tmp_path / "out" / "README.md").read_text()


def test_key_tables_are_inverted_exactly() -> None:
    """Fused matrices are split into three and joined again."""
    names = {
        **dict.fromkeys(
            ("layers.0.blocks.1.attn.qkv.weight", "layers.0.blocks.1.mlp.fc1.weight"), (12, 4)
        ),
        **dict.fromkeys(
            ("layers.1.downsample.reduction.weight", "patch_embed.proj.weight"), (4, 4)
        ),
    }
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"image_encoder.backbone.{name}": torch.randn(shape, generator=generator)
        for name, shape in names.items()
    }
    published, unknown = to_published(tensors, hugging_face_swin("swin."))
    assert not unknown
    assert published["swin.encoder.layers.0.blocks.1.attention.self.key.weight"].shape == (4, 4)
    assert "swin.encoder.layers.0.downsample.reduction.weight" in published
    back = to_medvl(published, hugging_face_swin("swin."))
    assert not back.problems
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in tensors.items())
    _, unknown = to_published(
        {"image_encoder.backbone.reg_token": torch.zeros(1)}, hugging_face_vit("")
    )
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


def test_export_command_writes_a_folder_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    checkpoint.save(chexzero(), tmp_path / "run")
    cli.main(["export", "--checkpoint", str(tmp_path / "run"), "--to", "open_clip"])
    output = capsys.readouterr().out
    assert output.startswith(
        f"Wrote {tmp_path / 'run-open_clip'}\n  image embedding: maximum relative difference "
        f"from medvl "
    )
    with pytest.raises(SystemExit):
        cli.main(["export", "--checkpoint", str(tmp_path / "run"), "--to", "open_clip"])
    assert "run-open_clip exists" in capsys.readouterr().err


def test_export_list_tells_what_a_checkpoint_can_become(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # ONNX takes long
    checkpoint.save(convirt(image_encoder="resnet_tiny"), tmp_path)
    cli.main(["export", "--checkpoint", str(tmp_path), "--list"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["huggingface"].startswith("yes, ")
    assert "image embedding" in lines["huggingface"]
    assert (
        lines["open_clip"]
        == "no: open_clip does not support convirt: export clip, chexzero or siglip"
    )
    assert "medvl[onnx]" in lines["onnx"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    cli.main(["export", "--list"])
    formats = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert formats == ["huggingface", "open_clip", "onnx", "published"]


def test_onnx_export_without_its_libraries_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convirt()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "missing", names="pip install 'medvl[onnx]'"):
        export_onnx(model, tmp_path / "out")


@pytest.mark.parametrize("channels", [1, 3])
def test_code_of_the_onnx_card_gives_embeddings(
    channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the traced modules in place of the files."""
    tokenizer = train_wordpiece(["small left pleural effusion"], min_frequency=1, max_tokens=16)
    model = convirt(tokenizer, fit="pad", image_arguments={"in_channels": channels})

    class Session:
        def __init__(self, path: str) -> None:
            self.tower: Any = (
                onnx.ImageTower(model) if "image_tower" in path else onnx.TextTower(model)
            )

        def run(self, outputs: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            assert {value.dtype.name for value in inputs.values()} <= {"uint8", "int64"}
            return [
                each.detach().numpy()
                for each in self.tower(**{k: torch.from_numpy(v) for k, v in inputs.items()})
            ]

    monkeypatch.setattr(onnx, "_write", lambda *arguments: {})
    monkeypatch.setattr(onnx, "_NEEDED", ())
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=Session))
    export_onnx(model, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"`pixels`: uint8, images x {channels} x 64 x 64" in card
    assert "standard deviation" not in card
    grey_HW = np.random.default_rng(0).integers(256, size=(80, 70), dtype=np.uint8)
    PIL.Image.fromarray(grey_HW).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(usage(tmp_path / "out"), names)
    with torch.no_grad():
        expected = (
            model.encode_image(model.transform("image.png")),
            model.encode_text("Small left pleural effusion."),
        )
    for name, vectors in zip(("image_embedding", "text_embedding"), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(names[name]), vectors, **CLOSE)


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
    image = torch.randint(
        256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(8), dtype=torch.uint8
    )
    ids, mask = texts(model)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "image_tower.onnx"))
    (embedding,) = session.run(["image_embedding"], {"pixels": image.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(embedding), model.encode_image(image), atol=1e-5, rtol=1e-4
        )
        session = onnxruntime.InferenceSession(str(tmp_path / "out" / "text_tower.onnx"))
        (embedding,) = session.run(
            ["text_embedding"], {"ids": ids.numpy(), "mask": mask.long().numpy()}
        )
        torch.testing.assert_close(
            torch.from_numpy(embedding), model.encode_text(ids, mask), atol=1e-5, rtol=1e-4
        )
