"""Imported dual-encoders of volumes against their released forward passes, written out plainly, on
small random files.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.naive_volumes import ctvit_tokens, hlip_tokens, mean_query_pool, primus_tokens
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


def ct_clip_file() -> Tensors:
    """Patches of 2 x 4 x 4 voxels, a plane of 3 x 3 patches, 16 codes."""
    inside, width, voxels = 2 * 8, 24, 32
    shapes: dict[str, tuple[int, ...]] = {
        "to_patch_emb.1.weight": (voxels,),
        "to_patch_emb.1.bias": (voxels,),
        "to_patch_emb.2.weight": (width, voxels),
        **dict.fromkeys(("to_patch_emb.2.bias", "to_patch_emb.3.weight"), (width,)),
        "to_patch_emb.3.bias": (width,),
        "to_patch_emb_first_frame.2.weight": (width, 16),
        "to_pixels.0.weight": (voxels, width),
        "vq._codebook.embed": (1, 16, width),
        "vq._codebook.cluster_size": (1, 16),
        "spatial_rel_pos_bias.net.0.0.weight": (width, 2),
        "spatial_rel_pos_bias.net.0.0.bias": (width,),
        "spatial_rel_pos_bias.net.1.0.weight": (width, width),
        "spatial_rel_pos_bias.net.1.0.bias": (width,),
        "spatial_rel_pos_bias.net.2.weight": (2, width),
        "spatial_rel_pos_bias.net.2.bias": (2,),
    }
    for side in ("spatial", "temporal"):
        prefix = f"enc_{side}_transformer."
        shapes |= {f"{prefix}norm_out.{leaf}": (width,) for leaf in ("gamma", "beta")}
        for layer in range(2):
            name = f"{prefix}layers.{layer}."
            norms = [f"{name}1.{norm}.{leaf}" for norm in ("norm", "context_norm")
                     for leaf in ("gamma", "beta")]  # fmt: skip
            shapes |= dict.fromkeys(norms, (width,))
            shapes |= {
                f"{name}0.dsconv.weight": (width, 1, 3, 3, 3),
                f"{name}0.dsconv.bias": (width,),
                f"{name}1.null_kv": (2, 0, 8),
                f"{name}1.q_scale": (8,),
                f"{name}1.k_scale": (8,),
                f"{name}1.to_q.weight": (inside, width),
                f"{name}1.to_kv.weight": (2 * inside, width),
                f"{name}1.to_out.weight": (width, inside),
                f"{name}3.0.weight": (width,),
                f"{name}3.0.bias": (width,),
                f"{name}3.1.weight": (128, width),
                f"{name}3.4.weight": (width, 64),
            }
    shapes = {f"visual_transformer.{name}": shape for name, shape in shapes.items()}
    shapes |= {"to_visual_latent.weight": (20, 9 * width), "to_text_latent.weight": (20, WIDTH)}
    shapes |= {"to_visual_latent_extra.weight": (20, 9 * width), "temperature": ()}
    file = random_tensors({**shapes, **bert_shapes("text_transformer.", 2)})
    zeros = [name for name in file if name.endswith(".beta")]
    return {**file, **{name: torch.zeros(24) for name in zeros}}


def test_ct_clip_import_equals_the_released_forward(tmp_path: Path) -> None:
    """Its slices are exchanged: the released loader gives x where files of medvl have y."""
    file = ct_clip_file()
    model = imported(file, "ct_clip", tmp_path)
    assert model.config.volume_size == (6, 12, 12)
    generator = torch.Generator().manual_seed(3)
    hu = torch.randint(-1300, 1300, (6, 12, 12), generator=generator).short()
    state = {
        name.removeprefix("visual_transformer."): tensor
        for name, tensor in file.items()
        if name.startswith("visual_transformer.")
    }
    patches = ctvit_tokens(state, hu.transpose(1, 2), patch=(2, 4, 4), heads=2)
    plane = torch.from_numpy(patches).float().mean(0).flatten()
    image = file["to_visual_latent.weight"] @ plane
    torch.testing.assert_close(
        model.encode_image(hu[None, None])[0], image / image.norm(), rtol=1e-5, atol=1e-5
    )
    ids, mask = texts()
    states = bert_states(ids, mask, file, "text_transformer.", 2)[-1][:, 0]
    text = states @ file["to_text_latent.weight"].T
    torch.testing.assert_close(
        model.encode_text(ids, mask), text / text.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5
    )
    assert model.logit_scale == file["temperature"]


def test_a_bias_where_ct_clip_has_a_constant_is_refused(tmp_path: Path) -> None:
    file = ct_clip_file()
    file["visual_transformer.enc_spatial_transformer.norm_out.beta"] = torch.ones(24)
    with raises(WeightsError, "mismatch", names="norm_out.beta"):
        imported(file, "ct_clip", tmp_path)


def colipri_file() -> Tensors:
    """Patches of 2 x 2 x 2 voxels, two layers of two heads."""
    width = 144
    inside = 384
    shapes: dict[str, tuple[int, ...]] = {
        "mask_token": (1, 1, width),
        "down_projection.proj.weight": (width, 1, 2, 2, 2),
        "down_projection.proj.bias": (width,),
        "eva.norm.weight": (width,),
        "eva.norm.bias": (width,),
    }
    for layer in range(2):
        layers = {"fc1_g": (inside, width), "fc1_x": (inside, width), "fc2": (width, inside)}
        block = {f"mlp.{name}.weight": shape for name, shape in layers.items()}
        block |= {f"mlp.{name}.bias": shape[:1] for name, shape in layers.items()}
        block |= {f"attn.{name}.weight": (width, width)
                  for name in ("q_proj", "k_proj", "v_proj", "proj")}  # fmt: skip
        block |= {f"attn.{name}.bias": (width,) for name in ("q_proj", "v_proj", "proj")}
        for name, size in {"norm1": width, "norm2": width, "attn.norm": width, "mlp.norm": inside
                           }.items():  # fmt: skip
            block |= {f"{name}.{leaf}": (size,) for leaf in ("weight", "bias")}
        block |= dict.fromkeys(("gamma_1", "gamma_2"), (width,))
        shapes |= {f"eva.blocks.{layer}.{name}": shape for name, shape in block.items()}
    shapes = {f"image_encoder.backbone.{name}": shape for name, shape in shapes.items()}
    shapes |= {
        "image_encoder.projector.weight": (WIDTH, width, 1, 1, 1),
        "image_encoder.projector.bias": (WIDTH,),
    }
    for side in ("image", "text"):
        pool = f"{side}_encoder.pooler.attn."
        shapes |= {
            f"{pool}in_proj_weight": (3 * WIDTH, WIDTH),
            f"{pool}in_proj_bias": (3 * WIDTH,),
            f"{pool}out_proj.weight": (WIDTH, WIDTH),
            f"{pool}out_proj.bias": (WIDTH,),
        }
    file = random_tensors({**shapes, **bert_shapes("text_encoder.backbone.", 1)})
    return {**file, "softmax_temperature": torch.tensor(2.0)}


def part_of(file: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in file.items() if k.startswith(prefix)}


def test_colipri_import_equals_the_released_forward(tmp_path: Path) -> None:
    """Patches, the pooled volume, dense vectors and texts; its loader turns volumes to RAS."""
    file = colipri_file()
    model = imported(file, "colipri", tmp_path)
    assert model.config.volume_size == (48, 48, 48)
    assert model.logit_scale.exp().item() == pytest.approx(0.5)
    generator = np.random.default_rng(3)
    of_file_XYZ = generator.integers(-1300, 1300, (4, 6, 8)).astype(np.int16)
    hu = torch.from_numpy(of_file_XYZ[::-1, ::-1].transpose(2, 1, 0).copy())[None, None]
    state = part_of(file, "image_encoder.backbone.")
    expected = primus_tokens(state, of_file_XYZ, heads=2, patch=2)
    features = model.image_encoder(hu)
    assert features.grid == (4, 3, 2)
    patches = features.patches_BPD[0].unflatten(0, features.grid).permute(2, 1, 0, 3).flip(0, 1)
    np.testing.assert_allclose(patches.detach(), expected, rtol=1e-5, atol=1e-5)

    weight = file["image_encoder.projector.weight"].flatten(1).double().numpy()
    bias = file["image_encoder.projector.bias"].double().numpy()
    tokens = expected.reshape(-1, expected.shape[-1]) @ weight.T + bias
    pool = part_of(file, "image_encoder.pooler.attn.")
    heads = model.config.pool_heads
    pooled = model.encode_image(hu, normalize=False)[0].detach()
    np.testing.assert_allclose(pooled, mean_query_pool(pool, tokens, heads), rtol=1e-5, atol=1e-5)
    dense = model.embed_regions(hu)[0].unflatten(0, features.grid).permute(2, 1, 0, 3).flip(0, 1)
    of_one = mean_query_pool(pool, tokens[5:6], heads)  # attention to one token is 1
    np.testing.assert_allclose(dense.flatten(0, 2)[5].detach(), of_one, rtol=1e-5, atol=1e-5)

    ids, mask = texts()
    states = bert_states(ids, mask, file, "text_encoder.backbone.", 1)[-1]
    of_text = part_of(file, "text_encoder.pooler.attn.")
    for row, vector in enumerate(model.encode_text(ids, mask, normalize=False).detach()):
        real = states[row][mask[row]].double().numpy()
        np.testing.assert_allclose(
            vector, mean_query_pool(of_text, real, heads), rtol=1e-4, atol=1e-5
        )
