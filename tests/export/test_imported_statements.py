"""Imported RadZero and CARZero against their released forward passes, written out plainly, on
small random files.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import (
    WIDTH,
    Tensors,
    attend,
    bert_shapes,
    bert_states,
    imported,
    linear,
    norm,
)
from torch import Tensor

import medvl
from medvl.cli import main as cli
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.encoders import create_text_encoder
from medvl.errors import ConfigError, WeightsError
from medvl.export import import_checkpoint
from medvl.export.importers.importer import with_image_processor
from medvl.models import RadZeroConfig

HEADS = WIDTH // 64
NEAR = {"atol": 2e-4, "rtol": 1e-3}
PROMPTS = [
    "There is pleural effusion",
    "There is no pneumothorax.",
    "There is: Edema - of the LEFT lung!",
]
WORDS = 97


def tokenizer(max_tokens: int) -> Tokenizer:
    words = [*PROMPTS, "effusionedemaleft", "a of", ": - ! ."]
    return train_wordpiece(words, vocab_size=70, min_frequency=1, max_tokens=max_tokens)


# RadZero


def dinov2_layer_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    layers = {f"attention.attention.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")}
    layers |= {
        "attention.output.dense": (WIDTH, WIDTH),
        "mlp.fc1": (4 * WIDTH, WIDTH),
        "mlp.fc2": (WIDTH, 4 * WIDTH),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}{name}.weight": shape for name, shape in layers.items()
    }
    shapes |= {f"{prefix}{name}.bias": shape[:1] for name, shape in layers.items()}
    shapes |= {f"{prefix}norm{n}.{leaf}": (WIDTH,) for n in (1, 2) for leaf in ("weight", "bias")}
    return shapes | {f"{prefix}layer_scale{n}.lambda1": (WIDTH,) for n in (1, 2)}


def mpnet(words: int) -> Any:
    """The class of transformers that the released code calls, with one layer."""
    torch.manual_seed(4)
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "intermediate_size": 2 * WIDTH,
    }
    return create_text_encoder("mpnet", vocab_size=words, **sizes).eval().backbone


def radzero_file(words: int, cells: int) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.cls_token": (1, 1, WIDTH),
        "vision_model.embeddings.mask_token": (1, WIDTH),
        "vision_model.embeddings.position_embeddings": (1, 1 + cells, WIDTH),
        "vision_model.embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 14, 14),
        "vision_model.embeddings.patch_embeddings.projection.bias": (WIDTH,),
        **dinov2_layer_shapes("vision_model.encoder.layer.0."),
        "vision_model.layernorm.weight": (WIDTH,),
        "vision_model.layernorm.bias": (WIDTH,),
        **dinov2_layer_shapes("align_transformer.transformer_layers.layer.0."),
        **dinov2_layer_shapes("align_transformer.transformer_layers.layer.1."),
        "loss_fns.RadZeroLoss.layer_norm.weight": (WIDTH,),
        "loss_fns.RadZeroLoss.layer_norm.bias": (WIDTH,),
    }
    text = {f"text_model.{key}": tensor for key, tensor in mpnet(words).state_dict().items()}
    pooler = random_tensors(
        {"text_model.pooler.dense.weight": (WIDTH, WIDTH), "text_model.pooler.dense.bias": (WIDTH,)}
    )
    counter = {"text_model.embeddings.position_ids": torch.arange(514)[None]}
    temperature = {"loss_fns.RadZeroLoss.loss_temperature": torch.tensor([-2.3])}
    return {**random_tensors(shapes), **text, **pooler, **counter, **temperature}


def dinov2_layer(x: Tensor, file: Tensors, name: str) -> Tensor:
    y = norm(x, file, f"{name}norm1", 1e-6)
    parts = (
        linear(y, file, f"{name}attention.attention.{part}") for part in ("query", "key", "value")
    )
    y = linear(attend(*parts, HEADS), file, f"{name}attention.output.dense")
    x = x + y * file[f"{name}layer_scale1.lambda1"]
    y = linear(
        F.gelu(linear(norm(x, file, f"{name}norm2", 1e-6), file, f"{name}mlp.fc1")),
        file,
        f"{name}mlp.fc2",
    )
    return x + y * file[f"{name}layer_scale2.lambda1"]


def radzero_tokens(pixels: Tensor, file: Tensors) -> Tensor:
    """Return the class token and the patches (B, 1 + P, D) of the released image side, behind
    the shared norm.
    """
    name = "vision_model.embeddings."
    weight, bias = (
        file[f"{name}patch_embeddings.projection.{leaf}"] for leaf in ("weight", "bias")
    )
    patches = F.conv2d(pixels, weight, bias, stride=14)
    table = file[f"{name}position_embeddings"]
    old = round((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].unflatten(1, (old, old)).permute(0, 3, 1, 2)
    if grid.shape[2:] != patches.shape[2:]:
        grid = F.interpolate(grid, size=patches.shape[2:], mode="bicubic", align_corners=False)
    table = torch.cat([table[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)
    first = file[f"{name}cls_token"].expand(len(pixels), -1, -1)
    x = torch.cat([first, patches.flatten(2).transpose(1, 2)], dim=1) + table
    x = norm(
        dinov2_layer(x, file, "vision_model.encoder.layer.0."), file, "vision_model.layernorm", 1e-6
    )
    for layer in (0, 1):
        x = dinov2_layer(x, file, f"align_transformer.transformer_layers.layer.{layer}.")
    return norm(x, file, "loss_fns.RadZeroLoss.layer_norm", 1e-5)


def radzero_logits(
    tokens: Tensor, words: Tokenizer, texts: list[str], file: Tensors
) -> tuple[Tensor, Tensor]:
    """Return the logits (B, N) and the scores of the patches (B, N, P), as `compute_logits` of
    the released code.
    """
    model, rows = mpnet(words.vocab_size), []
    for text in texts:
        ids, mask = words([text])
        states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        rows.append((states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))
    query = F.normalize(
        norm(torch.cat(rows), file, "loss_fns.RadZeroLoss.layer_norm", 1e-5), dim=-1
    )
    temperature, unit = (
        file["loss_fns.RadZeroLoss.loss_temperature"].exp(),
        F.normalize(tokens, dim=-1),
    )
    scores = torch.einsum("nd,bpd->bnp", query, unit) / temperature
    mixed = F.normalize(scores.softmax(-1) @ unit, dim=-1)
    return (mixed * query).sum(-1) / temperature, scores[:, :, 1:]


@torch.no_grad()
@pytest.mark.parametrize("side", [16, 37])
def test_radzero_import_equals_the_released_logits_and_maps(side: int, tmp_path: Path) -> None:
    """A table of 224 pixels is interpolated to 518; also after saving and loading, by the
    command.
    """
    words, out = tokenizer(32), tmp_path / "out"
    file = radzero_file(words.vocab_size, side**2)
    torch.save(file, tmp_path / "model.bin")
    words.save(tmp_path / "words")
    options = ["--tokenizer", str(tmp_path / "words"), "--out", str(out)]
    cli.main(["import", "radzero", str(tmp_path / "model.bin"), *options])
    model: Any = medvl.load(out)
    assert (model.name, model.config.image_size, model.config.trained_layers) == ("radzero", 518, 2)
    assert model.transform.fit == "squash"
    pixels = torch.randn(1, 3, 518, 518, generator=torch.Generator().manual_seed(3))
    tokens = radzero_tokens(pixels, file)
    images, scale = model.embed_images(pixels), model.logit_scale.exp()
    torch.testing.assert_close(images.local_NPE, F.normalize(tokens, dim=-1), **NEAR)
    logits, scores = radzero_logits(tokens, words, PROMPTS, file)
    torch.testing.assert_close(scale * model.similarity(images, PROMPTS), logits, **NEAR)
    for number, text in enumerate(PROMPTS):
        torch.testing.assert_close(model.cell_maps(pixels, [text])[0], scores[0, number], **NEAR)
    report = json.loads((out / "import.json").read_text())
    assert {key.split(".")[1] for key in report["left_out"]} == {"embeddings", "pooler"}


PROCESSOR = {
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.25, 0.3],
    "resample": 2,
    "do_center_crop": True,
}


def test_radzero_takes_the_statistics_of_the_image_processor_beside_its_file(
    tmp_path: Path,
) -> None:
    """Without that file they are the processor's defaults, CLIP's, as `import.json` says."""
    file = radzero_file(60, 256)
    model: Any = imported(file, "radzero", tmp_path)
    assert model.image_encoder.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert (model.transform.resize, model.transform.fit) == ("bicubic_antialias", "squash")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    model = imported(file, "radzero", tmp_path)
    assert model.image_encoder.mean == pytest.approx((0.5, 0.4, 0.3))
    assert model.image_encoder.std == pytest.approx((0.2, 0.25, 0.3))
    assert (model.transform.resize, model.transform.fit) == ("bilinear_antialias", "crop")


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"image_mean": [0.5]}, "malformed"),
        ({"image_mean": None}, "malformed"),
        ({"image_std": ["0.2", "0.2", "0.2"]}, "malformed"),
        ({"image_std": [0.2, 0.0, 0.2]}, "out_of_range"),
        ({"resample": 0}, "unsupported"),
        ("[]", "malformed"),
        ('{"image_mean": ', "malformed"),
    ],
)
def test_damaged_image_processors_are_refused(changed: Any, code: str, tmp_path: Path) -> None:
    text = changed if isinstance(changed, str) else json.dumps({**PROCESSOR, **changed})
    (tmp_path / "preprocessor_config.json").write_text(text)
    with raises(ConfigError, code, names="preprocessor_config.json"):
        with_image_processor(RadZeroConfig(), tmp_path)


def test_radzero_with_other_parts_is_refused(tmp_path: Path) -> None:
    """Variants of the released code: a projection of texts, a temperature of the attention,
    another loss.
    """
    words = tokenizer(32)
    file = radzero_file(words.vocab_size, 256)
    others = (
        "text_projector.weight",
        "loss_fns.RadZeroLoss.attn_temperature",
        "loss_fns.OpenClipLoss.logit_scale",
    )
    for key in others:
        with raises(WeightsError, "mismatch", names=f"unexpected {key}"):
            imported({**file, key: torch.zeros(1)}, "radzero", tmp_path)
    del file["align_transformer.transformer_layers.layer.1.attention.attention.key.bias"]
    with raises(WeightsError, "mismatch", names="layers.1.attn.qkv.bias needs 3 pieces"):
        imported(file, "radzero", tmp_path)


# CARZero


def decoder_shapes(prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"logit_scale": ()}
    shapes |= {
        f"{name}.{leaf}": (WIDTH,)
        for name in ("decoder_norm", "decoder.norm")
        for leaf in ("weight", "bias")
    }
    for layer in range(2):
        name = f"decoder.layers.{layer}."
        for attention in ("self_attn", "multihead_attn"):
            shapes |= {f"{name}{attention}.in_proj_weight": (3 * WIDTH, WIDTH)}
            shapes |= {f"{name}{attention}.in_proj_bias": (3 * WIDTH,)}
            shapes |= {f"{name}{attention}.out_proj.weight": (WIDTH, WIDTH)}
            shapes |= {f"{name}{attention}.out_proj.bias": (WIDTH,)}
        shapes |= {
            f"{name}norm{n}.{leaf}": (WIDTH,) for n in (1, 2, 3) for leaf in ("weight", "bias")
        }
        shapes |= {f"{name}linear1.weight": (hidden, WIDTH), f"{name}linear1.bias": (hidden,)}
        shapes |= {f"{name}linear2.weight": (WIDTH, hidden), f"{name}linear2.bias": (WIDTH,)}
    for number, (before, after) in {0: (WIDTH, 40), 3: (40, 24), 6: (24, 12), 9: (12, 1)}.items():
        shapes |= {
            f"mlp_head.{number}.weight": (after, before),
            f"mlp_head.{number}.bias": (after,),
        }
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def carzero_file(words: int) -> Tensors:
    image = "CARZero.img_encoder.model."
    layers = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
    layers |= {"mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
    block = {f"{name}.weight": shape for name, shape in layers.items()}
    block |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    block |= {f"norm{n}.{leaf}": (WIDTH,) for n in (1, 2) for leaf in ("weight", "bias")}
    shapes: dict[str, tuple[int, ...]] = {
        f"{image}cls_token": (1, 1, WIDTH),
        f"{image}pos_embed": (1, 17, WIDTH),
        f"{image}patch_embed.proj.weight": (WIDTH, 3, 16, 16),
        f"{image}patch_embed.proj.bias": (WIDTH,),
        **{f"{image}blocks.0.{name}": shape for name, shape in block.items()},
        f"{image}norm.weight": (WIDTH,),
        f"{image}norm.bias": (WIDTH,),
        **bert_shapes("CARZero.text_encoder.model.", 5, words=words, positions=128),
        "CARZero.text_encoder.model.pooler.dense.weight": (WIDTH, WIDTH),
        "CARZero.text_encoder.model.pooler.dense.bias": (WIDTH,),
        **decoder_shapes("CARZero.fusion_module.", 56),
    }
    file = random_tensors(shapes)
    for leaf in ("weight", "bias"):
        file[f"CARZero.fusion_module.decoder_norm.{leaf}"] = file[
            f"CARZero.fusion_module.decoder.norm.{leaf}"
        ].clone()
    return file


def carzero_image(pixels: Tensor, file: Tensors) -> Tensor:
    """Return the class token and the patches (B, 1 + P, D)."""
    name = "CARZero.img_encoder.model."
    weight, bias = (file[f"{name}patch_embed.proj.{leaf}"] for leaf in ("weight", "bias"))
    patches = F.conv2d(pixels, weight, bias, stride=16).flatten(2).transpose(1, 2)
    x = (
        torch.cat([file[f"{name}cls_token"].expand(len(pixels), -1, -1), patches], dim=1)
        + file[f"{name}pos_embed"]
    )
    block = f"{name}blocks.0."
    q, k, v = linear(norm(x, file, f"{block}norm1", 1e-6), file, f"{block}attn.qkv").chunk(
        3, dim=-1
    )
    x = x + linear(attend(q, k, v, HEADS), file, f"{block}attn.proj")
    y = linear(norm(x, file, f"{block}norm2", 1e-6), file, f"{block}mlp.fc1")
    x = x + linear(F.gelu(y), file, f"{block}mlp.fc2")
    return norm(x, file, f"{name}norm", 1e-6)


def carzero_text(text: str, words: Tokenizer, file: Tensors) -> Tensor:
    """Return (98, D): the mean over 97 slots, then [CLS], the words, [SEP] and zeros up to 97."""
    ids, mask = words([text])
    states = bert_states(ids, mask, file, "CARZero.text_encoder.model.", 5)
    summed = torch.stack(states[-4:]).sum(0)[0]
    names = {number: token for token, number in words.vocabulary.items()}
    slots: list[Tensor] = []
    for number, state in zip(ids[0].tolist(), summed, strict=True):
        if names[number].startswith("##"):
            slots[-1] = slots[-1] + state
        else:
            slots.append(state)
    padded = F.pad(torch.stack(slots), (0, 0, 0, WORDS - len(slots)))
    return torch.cat([padded.mean(0, keepdim=True), padded])


def carzero_scores(memory: Tensor, query: Tensor, file: Tensors) -> Tensor:
    """Return (N, M): the head's score of each query (M, D) with each memory (N, K, D)."""
    name = "CARZero.fusion_module."
    memory, x = (norm(each, file, f"{name}decoder_norm", 1e-5) for each in (memory, query))
    x = x.expand(len(memory), -1, -1)
    for layer in range(2):
        part = f"{name}decoder.layers.{layer}."
        weight, bias = (
            file[f"{part}multihead_attn.in_proj_{leaf}"].chunk(3) for leaf in ("weight", "bias")
        )
        y = norm(x, file, f"{part}norm2", 1e-5)
        q, k, v = (F.linear(each, weight[i], bias[i]) for i, each in enumerate((y, memory, memory)))
        x = x + linear(attend(q, k, v, 4), file, f"{part}multihead_attn.out_proj")
        y = linear(norm(x, file, f"{part}norm3", 1e-5), file, f"{part}linear1")
        x = x + linear(F.relu(y), file, f"{part}linear2")
    x = norm(x, file, f"{name}decoder.norm", 1e-5)
    for number in (0, 3, 6):
        x = F.relu(linear(x, file, f"{name}mlp_head.{number}"))
    return linear(x, file, f"{name}mlp_head.9")[..., 0]


@torch.no_grad()
def test_carzero_import_equals_the_released_similarity(tmp_path: Path) -> None:
    """With the padding of texts, and texts cleaned as published; also after saving and loading,
    by the command.
    """
    words, out = tokenizer(WORDS), tmp_path / "out"
    file = carzero_file(words.vocab_size)
    torch.save({"state_dict": file, "epoch": 3}, tmp_path / "CARZero.ckpt")
    words.save(tmp_path / "words")
    options = ["--tokenizer", str(tmp_path / "words"), "--out", str(out)]
    cli.main(["import", "carzero", str(tmp_path / "CARZero.ckpt"), *options])
    model: Any = medvl.load(out)
    assert (model.name, model.config.image_size, model.config.head_dims) == (
        "carzero",
        64,
        (40, 24, 12),
    )
    assert (model.config.fit, model.config.margin, model.config.decoder_layers) == ("pad", 16, 2)
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    images = carzero_image(pixels, file)
    cleaned = [
        "there is pleural effusion",
        "there is no pneumothorax",
        "there is edema of the left lung",
    ]
    texts = torch.stack([carzero_text(text, words, file) for text in cleaned])
    image_to_text = carzero_scores(images, texts[:, 0], file)
    text_to_image = carzero_scores(texts, images[:, 0], file)
    embedded = model.embed_images(pixels)
    torch.testing.assert_close(
        model.similarity(embedded, PROMPTS), (image_to_text + text_to_image.T) / 2, **NEAR
    )
    several = model.similarity(embedded, PROMPTS[:1])
    torch.testing.assert_close(several[:, 0], ((image_to_text + text_to_image.T) / 2)[:, 0], **NEAR)
    report = json.loads((out / "import.json").read_text())
    reasons = set(report["left_out"].values())
    assert any("does not call" in why for why in reasons)
    assert any("does not use" in why for why in reasons)


def test_carzero_with_a_linear_head_or_another_norm_is_refused(tmp_path: Path) -> None:
    file = carzero_file(60)
    linear_head = {key: tensor for key, tensor in file.items() if "mlp_head" not in key}
    head = {"CARZero.fusion_module.mlp_head.0.weight": torch.zeros(1, WIDTH)}
    with raises(WeightsError, "mismatch", names="score.1.0.weight"):
        imported({**linear_head, **head}, "carzero", tmp_path)
    file["CARZero.fusion_module.decoder_norm.weight"] = (
        file["CARZero.fusion_module.decoder_norm.weight"] + 1
    )
    with raises(WeightsError, "mismatch", names="decoder_norm.weight is not equal"):
        imported(file, "carzero", tmp_path)


def test_a_model_without_a_tokenizer_is_imported_and_has_no_words(tmp_path: Path) -> None:
    torch.save({"state_dict": carzero_file(60)}, tmp_path / "file.ckpt")
    model: Any = import_checkpoint("carzero", tmp_path / "file.ckpt").model
    assert model.tokenizer is None
    assert model.config.padded_memory
