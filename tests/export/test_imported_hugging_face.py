"""SigLIP and CLIP in folders of transformers: imported, and exported again, against transformers'
own vectors on random weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.hugging_face_folders import (
    TEXTS,
    change,
    clip_model,
    save_clip_tokenizer,
    save_processor,
    save_siglip_tokenizer,
    siglip_model,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import medvl
from medvl.cli.main import main
from medvl.common.files import sha256
from medvl.errors import ConfigError, WeightsError
from medvl.export import export_hugging_face, import_checkpoint, read_image_transform

TOLERANCE = 1e-5


def written(kind: str, folder: Path, **vision: Any) -> tuple[Any, Any]:
    """Write a whole folder; return the model and the image processor of transformers."""
    model = (clip_model if kind == "clip" else siglip_model)(**vision)
    model.save_pretrained(folder)
    (save_clip_tokenizer if kind == "clip" else save_siglip_tokenizer)(folder)
    return model, save_processor(folder, kind)


def photo() -> np.ndarray:
    y_HW, x_HW = np.mgrid[:90, :77]
    noise_HW = np.random.default_rng(0).normal(0, 25, (90, 77))
    return (128 + 80 * np.sin(x_HW / 7) * np.cos(y_HW / 9) + noise_HW).clip(0, 255).astype(np.uint8)


def padded(ids_BT: Tensor, length: int, pad: int) -> Tensor:
    return F.pad(ids_BT, (0, length - ids_BT.shape[1]), value=pad)


def outputs(kind: str, model: Any, tokenizer: Any, processor: Any) -> Any:
    """Return what transformers computes for an image and the texts."""
    pixels = processor(images=Image.fromarray(photo()).convert("RGB"), return_tensors="pt")
    ids_BT, mask_BT = tokenizer(TEXTS)
    options = {"attention_mask": mask_BT.long()} if kind == "clip" else {}
    if kind == "siglip":  # its processor pads to full length, and gives no mask
        ids_BT = padded(ids_BT, 20, 1)
    with torch.no_grad():
        return model(input_ids=ids_BT, pixel_values=pixels["pixel_values"], **options)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_imported_towers_have_the_vectors_and_logits_of_transformers(
    kind: str, act: str, tmp_path: Path
) -> None:
    """From an image and strings: processor, tokenizer, both towers, scale and bias."""
    theirs, processor = written(kind, tmp_path / "folder", hidden_act=act)
    imported = import_checkpoint(f"hf-{kind}", tmp_path / "folder", out=tmp_path / "out")
    assert not imported.left_out
    assert imported.loaded == len(theirs.state_dict())
    for model in (imported.model, medvl.load(tmp_path / "out")):
        assert isinstance(model, medvl.models.DualEncoder)
        expected = outputs(kind, theirs, model.tokenizer, processor)
        with torch.no_grad():
            image_BE = model.encode_image(model.transform(photo()))
            text_BE = model.encode_text(TEXTS)
            logits_NM = image_BE @ text_BE.T * model.logit_scale.exp()
            logits_NM = logits_NM + getattr(model, "logit_bias", 0.0)
        torch.testing.assert_close(image_BE, expected.image_embeds, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(text_BE, expected.text_embeds, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(logits_NM, expected.logits_per_image, atol=1e-4, rtol=0)
        assert model.name == kind


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_an_export_goes_back_to_transformers_whole(kind: str, tmp_path: Path) -> None:
    """The same tensors, configuration, processor and ids; and medvl imports it again."""
    import transformers

    theirs, _ = written(kind, tmp_path / "folder")
    model: Any = import_checkpoint(f"hf-{kind}", tmp_path / "folder").model
    exported = export_hugging_face(model, tmp_path / "back")
    assert max(exported.differences.values()) < TOLERANCE
    assert set(exported.differences) == {"image embedding", "text embedding", "logits"}
    assert not exported.left_out
    first = load_file(tmp_path / "folder" / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert first.keys() == back.keys()
    assert all(torch.equal(first[key], back[key]) for key in first)
    again, details = transformers.AutoModel.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(details[name] for name in ("missing_keys", "unexpected_keys"))
    assert again.config.vision_config.hidden_act == theirs.config.vision_config.hidden_act
    assert again.config.text_config.eos_token_id == theirs.config.text_config.eos_token_id
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = [model.tokenizer([text])[0][0].tolist() for text in TEXTS]
    assert [words(text, truncation=True)["input_ids"] for text in TEXTS] == ids
    name = "preprocessor_config.json"
    written_back = json.loads((tmp_path / "back" / name).read_text())
    given = json.loads((tmp_path / "folder" / name).read_text())
    assert {key: given[key] for key in written_back if key != "rescale_factor"} == {
        key: value for key, value in written_back.items() if key != "rescale_factor"
    }
    second: Any = import_checkpoint(f"hf-{kind}", tmp_path / "back").model
    assert second.transform == model.transform
    with torch.no_grad():
        assert torch.equal(second.encode_text(TEXTS), model.encode_text(TEXTS))
        pixels = model.transform(photo())
        assert torch.equal(second.encode_image(pixels), model.encode_image(pixels))


def test_commands_import_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another kernel: transformers has no processor for it, and the export says so."""
    written("siglip", tmp_path / "folder")
    options = ["--out", str(tmp_path / "out"), "--resize", "bilinear"]
    main(["import", "hf-siglip", str(tmp_path / "folder"), *options])
    assert medvl.load(tmp_path / "out").transform.resize == "bilinear"
    arguments = ["--checkpoint", str(tmp_path / "out"), "--out", str(tmp_path / "back")]
    main(["export", *arguments, "--to", "huggingface"])
    text = capsys.readouterr().out
    assert "logits: maximum relative difference from medvl" in text
    assert "left out: image processor" in text
    assert not (tmp_path / "back" / "preprocessor_config.json").exists()
    main(["import", "--list"])
    listed = capsys.readouterr().out
    assert "hf-siglip" in listed
    assert "hf-clip" in listed


def test_weights_in_parts_are_read_and_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    theirs, _ = written("siglip", tmp_path / "folder")
    whole = load_file(tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "model.safetensors").unlink()
    theirs.save_pretrained(tmp_path / "folder", max_shard_size="40KB")
    parts = sorted((tmp_path / "folder").glob("model-*.safetensors"))
    assert len(parts) > 1
    imported = import_checkpoint("hf-siglip", tmp_path / "folder")
    assert imported.loaded == len(whole)
    assert imported.parts_sha256 == {path.name: sha256(path) for path in parts}
    for path in parts:
        path.unlink()
    (tmp_path / "folder" / "model.safetensors.index.json").unlink()
    for key, names in (
        ("text_model.head.weight", "missing text_encoder.projection.weight"),
        ("vision_model.head.probe", "missing image_encoder.backbone.head.probe"),
        ("logit_bias", "missing logit_bias"),
    ):
        save_file({name: value for name, value in whole.items() if name != key},
                  tmp_path / "folder" / "model.safetensors")  # fmt: skip
        with raises(WeightsError, "mismatch", names=names):
            import_checkpoint("hf-siglip", tmp_path / "folder")
    save_file({**whole, "vision_model.spam": torch.zeros(1)},
              tmp_path / "folder" / "model.safetensors")  # fmt: skip
    with raises(WeightsError, "mismatch", names="unexpected vision_model.spam"):
        import_checkpoint("hf-siglip", tmp_path / "folder")


def test_counters_of_older_versions_are_left_out_with_the_reason(tmp_path: Path) -> None:
    written("clip", tmp_path)
    path = tmp_path / "model.safetensors"
    counters = {
        "vision_model.embeddings.position_ids": torch.arange(5)[None],
        "text_model.embeddings.position_ids": torch.arange(20)[None],
    }
    save_file({**load_file(path), **counters}, path)
    imported = import_checkpoint("hf-clip", tmp_path)
    assert imported.left_out.keys() == counters.keys()
    save_file({**load_file(path), "text_model.embeddings.position_ids": torch.zeros(1, 20)}, path)
    with raises(WeightsError, "mismatch", names="other values"):
        import_checkpoint("hf-clip", tmp_path)


@pytest.mark.parametrize(("end", "pools_end"), [(2, True), (513, True), (7, False)])
def test_the_rule_for_the_end_of_a_text_is_that_of_the_file(
    end: int, pools_end: bool, tmp_path: Path
) -> None:
    """`eos_token_id` 2 of old files pools the highest id; a rule that the tokenizer does not fit
    is refused.
    """
    theirs, processor = written("clip", tmp_path)
    theirs.config.text_config.eos_token_id = end
    theirs.text_model.eos_token_id = end
    theirs.save_pretrained(tmp_path)
    if not pools_end:
        with raises(ConfigError, "unsupported", "tokenizer", names="eos_token_id"):
            import_checkpoint("hf-clip", tmp_path)
        return
    model: Any = import_checkpoint("hf-clip", tmp_path).model
    expected = outputs("clip", theirs, model.tokenizer, processor)
    with torch.no_grad():
        actual = model.encode_text(TEXTS)
    torch.testing.assert_close(actual, expected.text_embeds, atol=TOLERANCE, rtol=0)
    exported = export_hugging_face(model, tmp_path / "back")
    assert max(exported.differences.values()) < TOLERANCE


def test_texts_are_cleaned_as_the_class_of_the_tokenizer_does(tmp_path: Path) -> None:
    """SigLIP's removes all punctuation, SigLIP 2's lower-cases only, others do neither."""
    written("siglip", tmp_path)
    ids = {}
    for kind in ("SiglipTokenizer", "Siglip2Tokenizer", "PreTrainedTokenizerFast"):
        save_siglip_tokenizer(tmp_path, kind)
        model: Any = import_checkpoint("hf-siglip", tmp_path).model
        ids[kind] = model.tokenizer(["No_effusion."])[0][0].tolist()
        plain = model.tokenizer(["noeffusion", "no_effusion."])[0]
        if kind == "SiglipTokenizer":
            assert ids[kind] == plain[0].tolist() == plain[1].tolist()
        elif kind == "Siglip2Tokenizer":
            assert ids[kind] == plain[1].tolist() != plain[0].tolist()
        else:
            assert ids[kind] != plain[1].tolist()
    save_siglip_tokenizer(tmp_path, do_lower_case=False)
    with raises(ConfigError, "unsupported", "do_lower_case", names="tokenizer_config.json"):
        import_checkpoint("hf-siglip", tmp_path)
    save_siglip_tokenizer(tmp_path, padding_side="left")
    with raises(ConfigError, "unsupported", "padding_side", names="tokenizer_config.json"):
        import_checkpoint("hf-siglip", tmp_path)
    save_siglip_tokenizer(tmp_path, model_max_length=16)
    with raises(ConfigError, "unsupported", "model_max_length", names="tokenizer_config.json"):
        import_checkpoint("hf-siglip", tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "spiece.model")
    with raises(ConfigError, "unsupported", "tokenizer", names="spiece.model"):
        import_checkpoint("hf-siglip", tmp_path)
    (tmp_path / "spiece.model").unlink()
    assert import_checkpoint("hf-siglip", tmp_path).model.tokenizer is None


def test_words_and_merges_of_clip_are_a_tokenizer_too(tmp_path: Path) -> None:
    written("clip", tmp_path)
    first: Any = import_checkpoint("hf-clip", tmp_path).model
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer.json").unlink()
    second: Any = import_checkpoint("hf-clip", tmp_path).model
    assert torch.equal(second.tokenizer(TEXTS)[0], first.tokenizer(TEXTS)[0])


def test_other_folders_are_refused_with_the_right_call(tmp_path: Path) -> None:
    theirs, _ = written("siglip", tmp_path)
    with raises(ConfigError, "unsupported", "system", names="medvl import hf-siglip"):
        import_checkpoint("hf-clip", tmp_path)
    theirs.vision_model.save_pretrained(tmp_path)
    with raises(ConfigError, "unsupported", "system", names="create_image_encoder"):
        import_checkpoint("hf-siglip", tmp_path)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, field, names in (
        ({"model_type": "siglip2"}, "system", "NaFlex"),
        (
            {"vision_config": {**config["vision_config"], "hidden_act": "spam"}},
            "hidden_act",
            "spam",
        ),
        ({"vision_config": {**config["vision_config"], "image_size": 48}}, "image_size", "48"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
        code = "conflict" if field == "image_size" else "unsupported"
        with raises(ConfigError, code, field, names=names):
            import_checkpoint("hf-siglip", tmp_path)
    narrow = {"text_config": {**config["text_config"], "intermediate_size": 48}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **narrow}))
    with raises(WeightsError, "mismatch", names="mlp.fc1.weight is"):
        import_checkpoint("hf-siglip", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "a.B"}}))
    assert import_checkpoint("hf-siglip", tmp_path).loaded  # code of the hub is never run
    change(tmp_path / "preprocessor_config.json", do_resize=False)
    with raises(ConfigError, "unsupported", "do_resize", names="preprocessor_config.json"):
        import_checkpoint("hf-siglip", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with raises(ConfigError, "not_found", names="preprocessor_config.json"):
        import_checkpoint("hf-siglip", tmp_path)
    (tmp_path / "config.json").unlink()
    with raises(ConfigError, "not_found", names="config.json"):
        import_checkpoint("hf-siglip", tmp_path)
    with raises(ConfigError, "conflict", "resize"):
        import_checkpoint("mflag", tmp_path, resize="area")


@pytest.mark.parametrize("name", ["siglip", "dinov2", "vit"])
def test_a_system_on_one_tower_is_saved_and_exported(name: str, tmp_path: Path) -> None:
    """The checkpoint does not need the folder; the export is the class of transformers."""
    import transformers

    from medvl.models import save

    kind = {"siglip": "SiglipVisionModel", "dinov2": "Dinov2Model", "vit": "ViTModel"}[name]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, kind).config_class(
        **sizes,
        image_size=56,
        patch_size=14,
        **({} if name == "dinov2" else {"intermediate_size": 64}),
    )
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "tower")
    save_processor(tmp_path / "tower", "siglip", size={"height": 56, "width": 56})
    bert = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    model: Any = medvl.create_model(
        "convirt",
        image_encoder=f"hf:{tmp_path / 'tower'}",
        pretrained=False,
        image_size=56,
        frozen_text_layers=0,
        text_arguments={**bert, "intermediate_size": 64},
        vocab_size=100,
    ).eval()
    assert str(tmp_path) not in model.config.image_encoder
    (tmp_path / "out").mkdir()
    save(model, tmp_path / "out", {})
    (tmp_path / "tower").rename(tmp_path / "moved")
    again: Any = medvl.load(tmp_path / "out")
    pixels = torch.randint(256, (2, 1, 56, 56), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(again.encode_image(pixels), model.encode_image(pixels))
    assert again.image_encoder.mean == (0.5, 0.5, 0.5)
    exported = export_hugging_face(again, tmp_path / "back")
    assert "image regions" in exported.differences
    assert "image embedding" in exported.differences
    back = transformers.AutoModel.from_pretrained(tmp_path / "back" / "image_encoder")
    assert type(back).__name__ == kind


def test_the_transform_of_a_folder_gives_the_pixels_of_its_processor(tmp_path: Path) -> None:
    """For an encoder alone: crop and squash, and another kernel where one is given."""
    for kind, settings in (
        ("siglip", {}),
        ("clip", {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}),
    ):
        processor = save_processor(tmp_path, kind, **settings)
        transform = read_image_transform(tmp_path)
        image = Image.fromarray(photo()).convert("RGB")
        options = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        expected = processor(images=image, **options)["pixel_values"][0, 0]
        assert np.array_equal(transform(photo())[0, 0].numpy(), expected)
        assert read_image_transform(tmp_path, resize="bilinear").resize == "bilinear"
    (tmp_path / "preprocessor_config.json").unlink()
    with raises(ConfigError, "not_found", names="preprocessor_config.json"):
        read_image_transform(tmp_path)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_training_starts_from_a_folder_or_from_its_import(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of weights alone is enough where the others are beside it; no pickle is run."""
    folder = tmp_path / "folder"
    written(kind, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    imported: Any = import_checkpoint(
        f"hf-{kind}", folder / "pytorch_model.bin", out=tmp_path / "out"
    ).model
    monkeypatch.chdir(tmp_path)
    name = "hf:folder"
    settings: dict[str, Any] = {
        "image_encoder": name,
        "text_encoder": name,
        "image_size": 32,
        "max_tokens": 20,
        "tokenizer": folder,
    }
    whole: Any = medvl.create_model(kind, weights=str(folder), pretrained=True, **settings)
    started: Any = medvl.create_model(kind, init_from=tmp_path / "out", **settings)
    for model in (whole, started):
        for key, tensor in imported.state_dict().items():
            assert torch.equal(model.state_dict()[key], tensor), key
        assert "folder" not in model.config.image_encoder + model.config.text_encoder
        assert model.image_encoder.mean == imported.image_encoder.mean
    whole.train()
    features = whole.encode_image(torch.randint(256, (2, 1, 32, 32), dtype=torch.uint8))
    (features @ whole.encode_text(TEXTS[:2]).T).sum().backward()
    assert all(
        parameter.grad is not None
        for part in (whole.image_encoder, whole.text_encoder)
        for parameter in part.parameters()
    )
