"""Imported MRM against the released layers, written out plainly, on a small random file: pixels
from the file's table.
"""

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
    imported,
    linear,
    m3ae_shapes,
    norm,
)
from torch import Tensor

import medvl
from medvl.errors import WeightsError
from medvl.losses.masked import PatchMask
from medvl.models.checkpoint import save
from medvl.models.fusion_encoders.parts.heads import sinusoids

SIDE, PATCH, DECODER = 64, 16, 192  # six heads of 32
CELLS = (SIDE // PATCH) ** 2


def block_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a block of timm."""
    layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    layers |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.{name}.weight": shape for name, shape in layers.items()
    }
    shapes |= {f"{prefix}.{name}.bias": shape[:1] for name, shape in layers.items()}
    return shapes | {
        f"{prefix}.norm{n}.{leaf}": (width,) for n in (1, 2) for leaf in ("weight", "bias")
    }


def mrm_positions(cells: int, width: int) -> Tensor:
    """The released table: its exponents are divided twice where MAE divides by half, so
    frequencies end at 0.1.
    """
    side, half = round(cells**0.5), width // 2
    rate = 10_000.0 ** -(torch.arange(half // 2, dtype=torch.float64) / half / 2.0)
    rows = torch.arange(cells) // side
    columns = torch.arange(cells) % side
    angles = [place.double()[:, None] * rate for place in (columns, rows)]
    table = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
    return torch.cat([torch.zeros(1, width), table.float()])


def mrm_file(table: Tensor) -> Tensors:
    words, pixels = 30, 3 * (2 * PATCH) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 1 + CELLS, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
        **block_shapes("blocks.0", WIDTH),
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
        "mask_token": (1, 1, DECODER),
        "decoder_embed.weight": (DECODER, WIDTH),
        "decoder_embed.bias": (DECODER,),
        **block_shapes("decoder_blocks.0", DECODER),
        "decoder_norm.weight": (DECODER,),
        "decoder_norm.bias": (DECODER,),
        "decoder_pred.weight": (pixels, DECODER),
        "decoder_pred.bias": (pixels,),
        "bert_mlp.weight": (WIDTH, WIDTH),
        "bert_mlp.bias": (WIDTH,),
        **bert_shapes("bert_encoder.model.bert.", 1, words=words),
        "bert_encoder.model.cls.predictions.bias": (words,),
        "bert_encoder.model.cls.predictions.transform.dense.weight": (WIDTH, WIDTH),
        "bert_encoder.model.cls.predictions.transform.dense.bias": (WIDTH,),
        "bert_encoder.model.cls.predictions.transform.LayerNorm.weight": (WIDTH,),
        "bert_encoder.model.cls.predictions.transform.LayerNorm.bias": (WIDTH,),
    }
    file = random_tensors(shapes)
    head, words_table = (
        "bert_encoder.model.cls.predictions",
        "bert_encoder.model.bert.embeddings.word_embeddings.weight",
    )
    file |= {
        f"{head}.decoder.weight": file[words_table],
        f"{head}.decoder.bias": file[f"{head}.bias"],
    }
    return {**file, "decoder_pos_embed": table[None]}


def timm_block(x: Tensor, file: Tensors, name: str, heads: int) -> Tensor:
    q, k, v = linear(norm(x, file, f"{name}.norm1", 1e-6), file, f"{name}.attn.qkv").chunk(
        3, dim=-1
    )
    x = x + linear(attend(q, k, v, heads), file, f"{name}.attn.proj")
    y = linear(norm(x, file, f"{name}.norm2", 1e-6), file, f"{name}.mlp.fc1")
    return x + linear(F.gelu(y), file, f"{name}.mlp.fc2")


def released_pixels(pixels: Tensor, file: Tensors, kept: Tensor) -> Tensor:
    """Return the prediction (B, P, C) of the released forward pass, for the patches `kept` (B,
    K) in order.
    """
    patches = F.conv2d(
        pixels, file["patch_embed.proj.weight"], file["patch_embed.proj.bias"], stride=PATCH
    )
    x = patches.flatten(2).transpose(1, 2) + file["pos_embed"][:, 1:]
    seen = torch.stack([x[row, kept[row]] for row in range(len(x))])
    first = (file["cls_token"] + file["pos_embed"][:, :1]).expand(len(x), -1, -1)
    x = norm(
        timm_block(torch.cat([first, seen], dim=1), file, "blocks.0", WIDTH // 64),
        file,
        "norm",
        1e-6,
    )
    x = linear(x, file, "decoder_embed")
    whole = file["mask_token"].expand(len(x), CELLS, -1).clone()
    for row in range(len(x)):
        whole[row, kept[row]] = x[row, 1:]
    x = torch.cat([x[:, :1], whole], dim=1) + file["decoder_pos_embed"]
    x = norm(timm_block(x, file, "decoder_blocks.0", 6), file, "decoder_norm", 1e-6)
    return linear(x, file, "decoder_pred")[:, 1:]


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "stored"), [("mrm", True), ("mae", False), ("half", True), ("other", True)]
)
def test_mrm_import_predicts_the_pixels_of_the_released_code(
    kind: str, stored: bool, tmp_path: Path
) -> None:
    """The file's table is kept where it is not MAE's, also after saving and loading."""
    tables = {"mrm": mrm_positions(CELLS, DECODER), "mae": sinusoids((4, 4), DECODER)}
    tables |= {"half": tables["mrm"].half(), "other": torch.randn(1 + CELLS, DECODER)}
    file = mrm_file(tables[kind])
    model = imported(file, "mrm", tmp_path)
    assert model.config.stored_positions == stored
    assert ("mim_head.positions_ND" in model.state_dict()) == stored
    (tmp_path / "out").mkdir()
    save(model, tmp_path / "out")
    pixels = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    kept = torch.tensor([[0, 3, 7, 12], [1, 2, 9, 15]])
    masked = torch.ones(2, CELLS, dtype=torch.bool).scatter(1, kept, value=False)
    order = torch.cat([kept, masked.nonzero()[:, 1].view(2, -1)], dim=1)
    expected = released_pixels(pixels, {key: tensor.float() for key, tensor in file.items()}, kept)
    for each in (model, medvl.load(tmp_path / "out")):
        features = each.image_encoder(pixels, kept, normalized=True)
        states = torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)
        got = each.mim_head(states, PatchMask(kept, order.argsort(dim=1), masked))
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_m3ae_keeps_a_table_that_is_not_maes(tmp_path: Path) -> None:
    file = random_tensors(m3ae_shapes(1))
    model: Any = imported(file, "m3ae", tmp_path)
    assert torch.equal(model.mim_head.positions_ND, file["mim_head.decoder_pos_embed"][0])
    file["mim_head.decoder_pos_embed"] = sinusoids((4, 4), 64)[None]
    model = imported(file, "m3ae", tmp_path)
    assert not model.config.stored_positions


def test_computed_tensors_with_other_values_are_refused(tmp_path: Path) -> None:
    """Numbers of positions in another order would be dropped in silence."""
    file = mrm_file(mrm_positions(CELLS, DECODER))
    key = "bert_encoder.model.bert.embeddings.position_ids"
    imported({**file, key: torch.arange(16)[None]}, "mrm", tmp_path)
    for other in (torch.arange(16).flip(0)[None], torch.arange(1, 17)[None], torch.zeros(1, 16)):
        with raises(WeightsError, "mismatch", names=f"{key} has other values"):
            imported({**file, key: other}, "mrm", tmp_path)
