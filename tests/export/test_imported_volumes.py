"""Imported dual-encoders of volumes against their released forward passes, written out plainly, on
small random files.
"""

from pathlib import Path

import pytest
import torch
from helpers.errors import raises
from helpers.naive_volumes import hlip_tokens
from helpers.published import random_tensors
from helpers.published_layers import WIDTH, Tensors, bert_shapes, bert_states, imported, texts

from medvl.errors import WeightsError

HEADS = WIDTH // 64


def hlip_file(scans: int) -> Tensors:
    trunk: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 1, 2, 3, 3),
        "patch_embed.proj.bias": (WIDTH,),
    }
    for layer in range(3):
        block = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
        block |= {"mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
        trunk |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
        trunk |= {f"blocks.{layer}.{name}.bias": shape[:1] for name, shape in block.items()}
        norms = [f"blocks.{layer}.norm{n}.{leaf}" for n in (1, 2) for leaf in ("weight", "bias")]
        trunk |= dict.fromkeys(norms, (WIDTH,))
    trunk |= dict.fromkeys(("norm.weight", "norm.bias"), (WIDTH,))
    shapes = {f"visual.trunk.{name}": shape for name, shape in trunk.items()}
    shapes |= {"visual.head.proj.weight": (24, WIDTH), "text.proj.weight": (24, WIDTH)}
    file = random_tensors({**shapes, **bert_shapes("text.transformer.", 2), "logit_scale": ()})
    places = hlip_places(scans)
    return {**file, **{f"visual.trunk.{name}": table for name, table in places.items()}}


def hlip_places(scans: int) -> Tensors:
    """The tables of positions that the released code computes, for a grid of 2 x 2 x 3."""

    def sines(count: int, width: int) -> torch.Tensor:
        rate = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        angle = torch.arange(count)[:, None] * rate
        return torch.cat([angle.sin(), angle.cos()], 1).float()

    table = torch.zeros(1, 2, 2, 3, WIDTH)
    third = WIDTH // 6 * 2
    for d in range(2):
        for h in range(2):
            for w in range(3):
                parts = [sines(3, third)[place] for place in (w, h, d)]
                table[0, d, h, w, : 3 * third] = torch.cat(parts)
    return {"spatial_posemb": table, "sequential_posemb": sines(scans, WIDTH)[None]}


@pytest.mark.parametrize("scans", [1, 3])
def test_hlip_import_equals_the_released_forward(scans: int, tmp_path: Path) -> None:
    file = hlip_file(scans)
    model = imported(file, "hlip", tmp_path)
    assert model.config.volume_size == (4, 6, 9)
    assert model.image_encoder.max_scans == scans
    inner = "slice" if scans == 1 else "scan"
    generator = torch.Generator().manual_seed(3)
    study = torch.randint(-1500, 800, (1, scans, 4, 6, 9), generator=generator).short()
    trunk = {
        name.removeprefix("visual.trunk."): tensor
        for name, tensor in file.items()
        if name.startswith("visual.trunk.")
    }
    pooled, _ = hlip_tokens(trunk, study[0], attention=(inner, inner, "study"), heads=HEADS)
    image = torch.from_numpy(pooled).float() @ file["visual.head.proj.weight"].T
    torch.testing.assert_close(
        model.encode_image(study)[0], image / image.norm(), rtol=1e-5, atol=1e-5
    )
    ids, mask = texts()
    states = bert_states(ids, mask, file, "text.transformer.", 2)[-1][:, 0]
    text = states @ file["text.proj.weight"].T
    torch.testing.assert_close(
        model.encode_text(ids, mask), text / text.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5
    )
    assert model.logit_scale == file["logit_scale"]


def test_a_file_of_images_is_refused(tmp_path: Path) -> None:
    file = hlip_file(1)
    file["visual.trunk.patch_embed.proj.weight"] = torch.zeros(WIDTH, 3, 3, 3)
    with raises(WeightsError, "mismatch"):
        imported(file, "hlip", tmp_path)
