"""CLIP, CheXzero and SigLIP: outputs equal to open_clip's, published settings, and strict
loading of weights.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import clip_ranks
from helpers.errors import raises
from helpers.two_ranks import on_two_ranks
from torch import Tensor

import medvl
from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.errors import ConfigError, WeightsError
from medvl.models.checkpoint import save
from medvl.models.dual_encoders.chexzero import CheXzeroConfig
from medvl.models.dual_encoders.clip import CLIP, CLIPConfig
from medvl.models.dual_encoders.siglip import SigLIPConfig
from medvl.schema import Batch

TEXTS = [
    "Small left effusion.",
    "No acute cardiopulmonary process.",
    "The heart is enlarged; lungs are clear.",
    "CHF",
]
SIDE = 64
BERT = {
    "vocab_size": 49408,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
}
TEXT = {"layers": 2, "width": 64, "heads": 2, "vocab_size": 49408, "context_length": 77}
SIGLIP_TEXT = {
    **TEXT,
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": 1e-6},
}
MOBILE_TEXT = {**TEXT, "no_causal_mask": True}
VIT = {"layers": 2, "width": 64, "patch_size": 16, "image_size": SIDE}
TIMM = {"timm_model_name": "vit_tiny_patch16_224", "image_size": 224}
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ViT": (VIT, TEXT),
    "ResNet": ({"layers": [1, 1, 1, 1], "width": 16, "image_size": SIDE}, TEXT),
    "timm trunk with a linear head": ({**TIMM, "timm_pool": "", "timm_proj": "linear"}, TEXT),
    "SigLIP": ({**TIMM, "timm_pool": "map", "timm_proj": "none"}, SIGLIP_TEXT),
    "MobileCLIP's text": (VIT, MOBILE_TEXT),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("clip")


def reference_of(
    image: dict[str, Any], text: dict[str, Any], embed_dim: int, **options: Any
) -> Any:
    """Return a small random model of open_clip, its parameters moved away from zeros and ones."""
    import open_clip

    torch.manual_seed(3)
    model = open_clip.CustomTextCLIP(embed_dim, dict(image), dict(text), **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def write(model: Any, path: Path) -> Path:
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(tensors, path)
    return path


def arguments(image: dict[str, Any], text: dict[str, Any], embed_dim: int) -> dict[str, Any]:
    """Return the same model as settings of medvl, where the depth has Hugging Face's name."""
    text = {key: value for key, value in text.items() if key not in ("vocab_size", "layers")}
    return {
        "image_encoder": "open_clip:custom",
        "image_arguments": {key: value for key, value in image.items() if key != "image_size"}
        | {"embed_dim": embed_dim},
        "image_size": image["image_size"],
        "text_encoder": "open_clip:custom",
        "text_arguments": {**text, "num_hidden_layers": 2, "embed_dim": embed_dim},
    }


def pixels(side: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(5))


def full_ids(tokenizer: Tokenizer, length: int = 77, pad: int = 0) -> Tensor:
    """Return token ids as open_clip takes them, padded to the full length."""
    ids_BT, mask_BT = tokenizer(TEXTS)
    padded = torch.full((len(TEXTS), length), pad)
    padded[:, : ids_BT.shape[1]] = ids_BT.masked_fill(~mask_BT, pad)
    return padded


@pytest.mark.parametrize("kind", TOWERS)
def test_models_of_open_clip_give_equal_outputs(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Embeddings and loss are equal after loading the file of the whole model."""
    import open_clip

    image, text = TOWERS[kind]
    embed_dim = 192 if kind == "SigLIP" else 32
    reference = reference_of(
        image, text, embed_dim, init_logit_bias=-10.0 if kind == "SigLIP" else None
    )
    path = write(reference, tmp_path / "open_clip_model.safetensors")
    name = "siglip" if kind == "SigLIP" else "clip"
    model = medvl.create_model(
        name,
        pretrained=True,
        weights=str(path),
        tokenizer=tokenizer,
        **arguments(image, text, embed_dim),
    ).eval()
    assert isinstance(model, CLIP)
    image_BCHW = pixels(image["image_size"])
    image_BE, text_BE = model.encode_image(image_BCHW), model.encode_text(TEXTS)
    ids = full_ids(tokenizer)
    torch.testing.assert_close(
        image_BE, reference.encode_image(image_BCHW, normalize=True), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        text_BE, reference.encode_text(ids, normalize=True), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(model.logit_scale, reference.logit_scale)
    expected = open_clip.loss.SigLipLoss() if kind == "SigLIP" else open_clip.ClipLoss()
    scalars = [reference.logit_scale.exp()] + ([reference.logit_bias] if kind == "SigLIP" else [])
    torch.testing.assert_close(
        model.contrast(image_BE, text_BE),
        expected(image_BE, text_BE, *scalars),
        rtol=1e-4,
        atol=1e-5,
    )
    mine = {name for name, _ in model.named_parameters()}
    assert len(mine) == len(list(reference.parameters()))  # nothing is left out, nothing is added


@pytest.mark.parametrize(
    ("pool", "head"), [("cls_last_hidden_state_pooler", "mlp"), ("mean_pooler", "linear")]
)
def test_open_clip_models_with_a_hugging_face_text_encoder_give_equal_outputs(
    pool: str, head: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As in BiomedCLIP: a BERT with a head, which is in the same file."""
    import transformers

    folder = tmp_path / "bert"
    transformers.BertConfig(**BERT, pad_token_id=0).save_pretrained(folder)
    text = {
        "hf_model_name": str(folder),
        "hf_model_pretrained": False,
        "hf_pooler_type": pool,
        "hf_proj_type": head,
        "context_length": 77,
    }
    reference = reference_of(VIT, text, 16)
    path = write(reference, tmp_path / "open_clip_model.safetensors")
    settings = arguments(VIT, {}, 16) | {
        "text_encoder": "hf:bert",
        "text_arguments": {key: value for key, value in BERT.items() if key != "vocab_size"},
        "vocab_size": 49408,
        "text_pool": "cls" if pool.startswith("cls") else "mean",
        "text_head": head,
    }
    model = medvl.create_model(
        "clip", pretrained=True, weights=str(path), tokenizer=tokenizer, **settings
    ).eval()
    assert isinstance(model, CLIP)
    ids = full_ids(tokenizer)
    torch.testing.assert_close(
        model.encode_text(TEXTS), reference.encode_text(ids, normalize=True), rtol=1e-4, atol=1e-5
    )
    assert model.logit_scale.item() == pytest.approx(reference.logit_scale.item())
    without = {
        name: tensor
        for name, tensor in reference.state_dict().items()
        if not name.startswith("text.proj")
    }
    safetensors.torch.save_file(without, path)
    with pytest.raises(
        WeightsError, match=r"open_clip_model.safetensors does not fit.* missing: (0\.)?weight"
    ):
        medvl.create_model(
            "clip", pretrained=True, weights=str(path), tokenizer=tokenizer, **settings
        )


def small(name: str = "clip", tokenizer: Tokenizer | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = arguments(VIT, TEXT, 32) | changes
    return medvl.create_model(name, tokenizer=tokenizer, **settings)


def make_batch(tokenizer: Tokenizer, size: int = 6, **fields: Any) -> Batch:
    texts = [f"{TEXTS[number % 4]} {number}" for number in range(size)]
    ids_BT, mask_BT = tokenizer(texts)
    generator = torch.Generator().manual_seed(1)
    return Batch(
        keys=[str(number) for number in range(size)],
        image_BCHW=torch.randint(
            0, 256, (size, 1, SIDE, SIDE), dtype=torch.uint8, generator=generator
        ),
        ids_BT=ids_BT,
        mask_BT=mask_BT,
        labels_BL=torch.zeros(size, 0),
        texts=texts,
        **fields,
    )


def test_configs_have_the_published_defaults() -> None:
    clip, chexzero, siglip = CLIPConfig(), CheXzeroConfig(), SigLIPConfig()
    assert (clip.image_encoder, clip.text_encoder, clip.max_tokens) == (
        "clip_vit_b32",
        "clip_text",
        77,
    )
    assert (clip.temperature, clip.max_scale, clip.projection_dim) == (0.07, 100.0, 512)
    assert (chexzero.fit, chexzero.stored_size, chexzero.image_size) == ("pad", 320, 224)
    assert chexzero.image_mean == (101.48761 / 255,)
    assert chexzero.image_std == (83.43944 / 255,)
    assert (siglip.temperature, siglip.bias, siglip.max_tokens) == (0.1, -10.0, 64)


def published_file(path: Path, **scalars: Tensor) -> tuple[Any, Path]:
    """Write a file in OpenAI's layout, with the text encoder at the top level, as CheXzero's
    files.
    """
    import open_clip

    torch.manual_seed(4)
    text = {"layers": 2, "width": 64, "heads": 1, "vocab_size": 49408, "context_length": 77}
    vision = {"layers": 2, "width": 64, "patch_size": 32, "image_size": 224}
    whole = open_clip.CLIP(512, vision, text, quick_gelu=True).eval()
    safetensors.torch.save_file(
        {**whole.state_dict(), "logit_scale": torch.tensor(4.6052), **scalars}, path
    )
    return whole, path


SMALL_CLIP: dict[str, Any] = {
    "image_arguments": {"layers": 2, "width": 64},
    "text_arguments": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 1},
}


def test_chexzero_loads_clip_weights_by_path_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders, projections and scale are loaded; grey images are normalised by the corpus'
    statistics.
    """
    whole, path = published_file(tmp_path / "model.safetensors")
    model = medvl.create_model("chexzero", pretrained=True, weights=str(path), **SMALL_CLIP).eval()
    assert isinstance(model, CLIP)
    assert model.tokenizer is not None
    assert (model.tokenizer.source, model.tokenizer.max_tokens) == ("clip", 77)
    image_BCHW = torch.randint(0, 256, (2, 1, 224, 224), dtype=torch.uint8)
    normalised = ((image_BCHW.float() - 101.48761) / 83.43944).expand(-1, 3, -1, -1)
    expected = whole.encode_image(normalised, normalize=True)
    torch.testing.assert_close(model.encode_image(image_BCHW), expected, rtol=1e-4, atol=1e-5)
    expected = whole.encode_text(full_ids(model.tokenizer), normalize=True)
    torch.testing.assert_close(model.encode_text(TEXTS), expected, rtol=1e-4, atol=1e-5)
    assert model.logit_scale.item() == pytest.approx(math.log(100))  # 4.6052 is just above

    name = "open_clip:ViT-B-32-quickgelu"
    spelt = medvl.create_model(
        "chexzero",
        pretrained=True,
        weights=str(path),
        image_encoder=name,
        text_encoder=name,
        **SMALL_CLIP,
    ).eval()
    assert torch.equal(spelt.encode_text(TEXTS), model.encode_text(TEXTS))  # with CLIP's vocabulary

    requests: list[tuple[str, str]] = []

    def fetch(hub_id: str, filename: str, revision: str | None, **pins: Any) -> Path:
        requests.append((hub_id, filename))
        return path

    monkeypatch.setattr("medvl.encoders.pretrained.fetch", fetch)
    named = medvl.create_model("chexzero", pretrained=True, **SMALL_CLIP).eval()
    assert set(requests) == {
        ("timm/vit_base_patch32_clip_224.openai", "open_clip_model.safetensors")
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(named.state_dict()[name], tensor), name


def test_encoders_of_two_sources_keep_the_initial_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = published_file(tmp_path / "model.safetensors")
    bert = medvl.encoders.create_text_encoder("bert", **BERT)
    safetensors.torch.save_file(bert.state_dict(), tmp_path / "bert.safetensors")
    files = {
        "open_clip_model.safetensors": path,
        "model.safetensors": tmp_path / "bert.safetensors",
    }
    monkeypatch.setattr(
        "medvl.encoders.pretrained.fetch", lambda hub_id, filename, *pins, **more: files[filename]
    )
    settings = {
        "image_arguments": SMALL_CLIP["image_arguments"],
        "text_encoder": "bert",
        "vocab_size": 49408,
    }
    arguments = {key: value for key, value in BERT.items() if key != "vocab_size"}
    tokenizer = load_tokenizer("clip")
    model = medvl.create_model(
        "clip", pretrained=True, tokenizer=tokenizer, text_arguments=arguments, **settings
    )
    assert isinstance(model, CLIP)
    assert model.logit_scale.exp().item() == pytest.approx(1 / 0.07)
    assert model.encode_text(TEXTS).shape == (
        4,
        512,
    )  # a new head leads to the image tower's projection


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"visual.proj": None}, "1 missing: proj"),
        ({"text_projection": None}, "1 missing: projection.matrix"),
        ({"ln_final.bias": torch.zeros(3)}, r"ln_final.bias is \(3,\), expected \(64,\)"),
        ({"visual.extra": torch.zeros(3)}, "1 unexpected: extra"),
        ({"cls_token": torch.zeros(3)}, "1 unexpected: cls_token"),
        ({"logit_scale": None}, "has no logit_scale"),
    ],
)
def test_weights_that_do_not_fit_are_rejected_with_the_first_differences(
    change: dict[str, Tensor | None], difference: str, tmp_path: Path
) -> None:
    _, path = published_file(tmp_path / "model.safetensors")
    tensors = safetensors.torch.load_file(path) | change
    safetensors.torch.save_file(
        {key: tensor for key, tensor in tensors.items() if tensor is not None}, path
    )
    with pytest.raises(WeightsError, match=rf"model.safetensors.*{difference}"):
        medvl.create_model("chexzero", pretrained=True, weights=str(path), **SMALL_CLIP)


def test_siglip_loads_a_scale_only_with_its_bias(tmp_path: Path) -> None:
    """A softmax does not depend on the bias, so CLIP's scale does not fit a sigmoid."""
    clip = {
        "image_encoder": "clip_vit_b32",
        "text_encoder": "clip_text",
        "max_tokens": 77,
        "pretrained": True,
    }
    _, path = published_file(tmp_path / "clip.safetensors")
    model: Any = medvl.create_model("siglip", weights=str(path), **clip, **SMALL_CLIP)
    assert model.logit_scale.exp().item() == pytest.approx(10)
    assert model.logit_bias.item() == -10
    scalars = {"logit_scale": torch.tensor([4.7]), "logit_bias": torch.tensor([-12.9])}
    _, path = published_file(tmp_path / "siglip.safetensors", **scalars)
    model = medvl.create_model("siglip", weights=str(path), **clip, **SMALL_CLIP)
    assert model.logit_scale.item() == pytest.approx(
        4.7
    )  # above CLIP's clamp, which the paper does not have
    assert model.logit_bias.item() == pytest.approx(-12.9)


@pytest.mark.parametrize("name", ["clip", "chexzero", "siglip"])
def test_every_parameter_gets_a_gradient(name: str, tokenizer: Tokenizer) -> None:
    model = small(name, tokenizer)
    model(make_batch(tokenizer)).total.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_losses_equal_the_published_ones(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, 8)
    for name, scalars in (("clip", (1 / 0.07,)), ("siglip", (10.0, -10.0))):
        model = small(name, tokenizer, **arguments(VIT, TEXT, 512)).eval()
        image_BE, text_BE = (
            model.encode_image(batch.image_BCHW),
            model.encode_text(batch.ids_BT, batch.mask_BT),
        )
        actual = model(batch)
        loss: Any = getattr(losses, name)
        torch.testing.assert_close(actual.total, loss(image_BE, text_BE, *scalars))
        assert set(actual.terms) == {"contrastive"}
        if name == "clip":
            assert actual.total.item() == pytest.approx(math.log(8), abs=0.3)


def test_the_temperature_is_learned_and_clamped(tokenizer: Tokenizer) -> None:
    """The clamp is in place and before the step, so that the scale keeps its gradient."""
    batch = make_batch(tokenizer)
    model = small("clip", tokenizer)
    with torch.no_grad():
        model.logit_scale.fill_(7.0)
    model.eval()(batch)
    assert model.logit_scale.item() == 7.0  # not clamped in eval mode
    model.train()(batch).total.backward()
    assert model.logit_scale.item() == pytest.approx(math.log(100))
    assert model.logit_scale.grad.abs() > 0
    free = small("clip", tokenizer, max_scale=None)
    with torch.no_grad():
        free.logit_scale.fill_(7.0)
    free(batch)
    assert free.logit_scale.item() == 7.0
    bounded = small("clip", tokenizer, min_scale=1.0).train()
    for start, expected in ((-3.0, 0.0), (7.0, math.log(100)), (1.5, 1.5)):
        with torch.no_grad():
            bounded.logit_scale.fill_(start)
        bounded(batch)
        assert bounded.logit_scale.item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_sample_without_a_text_is_left_out(name: str, tokenizer: Tokenizer) -> None:
    model = small(name, tokenizer).eval()
    batch = make_batch(
        tokenizer, 6, has_text_B=torch.tensor([True, True, False, True, False, True])
    )
    image_BE, text_BE = (
        model.encode_image(batch.image_BCHW),
        model.encode_text(batch.ids_BT, batch.mask_BT),
    )
    kept = [0, 1, 3, 5]
    torch.testing.assert_close(model(batch).total, model.contrast(image_BE[kept], text_BE[kept]))
    empty = make_batch(tokenizer, 2, has_text_B=torch.tensor([False, False]))
    total = model(empty).total
    assert total.item() == 0
    total.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert not parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", ["clip", "chexzero", "siglip"])
def test_a_loaded_model_equals_the_saved_one(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = small(name, tokenizer, image_mean=(0.5,), image_std=(0.25,)).eval()
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    save(model, tmp_path)
    loaded: Any = medvl.load(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert loaded.transform == model.transform
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert torch.equal(loaded.encode_text(TEXTS), model.encode_text(TEXTS))
    assert "logit_scale" in loaded.state_dict()


def test_incompatible_settings_are_rejected(tokenizer: Tokenizer) -> None:
    arguments_ = arguments(VIT, TEXT, 32)
    other = arguments_ | {"text_arguments": arguments_["text_arguments"] | {"embed_dim": 16}}
    with raises(ConfigError, "mismatch", "text_encoder"):
        medvl.create_model("clip", **other)
    with raises(ConfigError, "conflict", "image_arguments", names="image_size"):
        medvl.create_model("clip", image_arguments={"image_size": 64})
    with raises(ConfigError, "out_of_range", "temperature"):
        CLIPConfig(temperature=0)
    with raises(ConfigError, "out_of_range", "max_scale"):
        CLIPConfig(max_scale=10)


def test_encoders_without_projections_get_heads(tokenizer: Tokenizer) -> None:
    """A ResNet and a BERT have no projection of their own."""
    model = small(
        "clip",
        tokenizer,
        image_encoder="resnet_tiny",
        image_arguments={},
        text_encoder="tiny_bert",
        text_arguments={"num_hidden_layers": 1},
        projection_dim=24,
    )
    assert model.encode_text(TEXTS).shape == (4, 24)
    assert sorted(name for name, _ in model.named_parameters() if "head" in name) == [
        "image_head.weight",
        "text_head.weight",
    ]


@pytest.mark.slow
def test_two_ranks_compute_the_gradients_of_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Loss and gradients, also of scale and bias, equal those of the global batch with unequal
    ranks and a missing text.
    """
    folders = [tmp_path / name for name in ("chexzero", "siglip")]
    batch = make_batch(tokenizer, sum(clip_ranks.COUNTS))
    for folder in folders:
        folder.mkdir()
        save(small(folder.name, tokenizer).eval(), folder)
        parts = {"image": batch.image_BCHW, "ids": batch.ids_BT, "mask": batch.mask_BT}
        parts["has_text"] = torch.arange(len(batch)) != 2
        safetensors.torch.save_file(parts, folder / clip_ranks.BATCH)
    found, _ = on_two_ranks(clip_ranks.steps_of_this_rank, folders)
    for folder, actual in zip(folders, found, strict=True):
        alone = medvl.load(folder)
        expected = clip_ranks.step(alone, alone, clip_ranks.whole_batch(folder))
        assert actual.keys() == expected.keys()
        assert expected["logit_scale"].abs() > 0
        for name, tensor in actual.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=1e-4, atol=1e-6, msg=f"{folder.name}: {name}"
            )
