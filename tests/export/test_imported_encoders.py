"""Imported encoders against the published layers, written out plainly from the file's own keys,
on small random files.
"""

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.published import random_tensors
from helpers.published_layers import (
    WIDTH,
    bert_shapes,
    bert_states,
    imported,
    linear,
    norm,
    resnet,
    resnet_shapes,
    texts,
)

from medvl.errors import WeightsError

_SWIN = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "attention.relative_position_bias.relative_position_bias_table": "attention.self.relative_position_bias_table",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def test_cxrbert_import_includes_its_projection(tmp_path: Path) -> None:
    head: dict[str, tuple[int, ...]] = {
        "cls_projection_head.dense_to_hidden.weight": (128, WIDTH),
        "cls_projection_head.dense_to_output.weight": (128, 128),
        **{
            f"cls_projection_head.{name}": (128,)
            for name in (
                "dense_to_hidden.bias",
                "LayerNorm.weight",
                "LayerNorm.bias",
                "dense_to_output.bias",
            )
        },
    }
    file = random_tensors(
        {**bert_shapes("bert.", 2), **head, "bert.embeddings.position_ids": (1, 16)}
    )
    encoder = imported(file, "cxrbert", tmp_path).text_encoder
    ids, mask = texts()
    cls = bert_states(ids, mask, file, "bert.", 2)[-1][:, 0]
    hidden = norm(
        F.gelu(linear(cls, file, "cls_projection_head.dense_to_hidden")),
        file,
        "cls_projection_head.LayerNorm",
        1e-12,
    )
    with torch.no_grad():
        actual = encoder(ids, mask).pooled_BD
    torch.testing.assert_close(
        actual, linear(hidden, file, "cls_projection_head.dense_to_output"), atol=2e-5, rtol=1e-4
    )


def test_a_layer_of_any_number_is_refused_at_once(tmp_path: Path) -> None:
    """No model of three million layers is begun."""
    file = bert_shapes("bert.", 2)
    layer = {
        key.replace(".layer.1.", ".layer.3000000."): shape
        for key, shape in file.items()
        if ".layer.1." in key
    }
    start = time.perf_counter()
    with raises(WeightsError, "mismatch", names="encoder.layer.2"):
        imported(random_tensors({**file, **layer}), "cxrbert", tmp_path)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("grey", [False, True])
def test_resnet_imports_from_named_keys(tmp_path: Path, grey: bool) -> None:
    """torchvision's names; one channel as in PRIOR."""
    blocks = (1, 2, 1, 1)
    file = random_tensors(resnet_shapes("", blocks, grey))
    pixels = torch.randn(2, 1 if grey else 3, 64, 64, generator=torch.Generator().manual_seed(3))
    expected = resnet(pixels, file, "", blocks)
    named = {f"encoder.encoder.{key}": tensor for key, tensor in file.items()}
    encoder = imported(named, "biovil_image", tmp_path).image_encoder
    with torch.no_grad():
        features = encoder(pixels)
    torch.testing.assert_close(
        features.patches_BPD, expected.flatten(2).transpose(1, 2), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(features.pooled_BD, expected.mean(dim=(2, 3)), atol=1e-4, rtol=1e-4)


def test_swin_import_equals_transformers(tmp_path: Path) -> None:
    """transformers' Swin, its parameters renamed to those of version 4; two of its blocks are
    shifted.
    """
    from transformers import SwinConfig, SwinModel

    torch.manual_seed(4)
    sizes = {
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 7,
        "image_size": 224,
    }
    swin = SwinModel(SwinConfig(**sizes), add_pooling_layer=False).eval()
    for parameter in swin.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tensors = swin.state_dict()
    for new, old in _SWIN.items():
        tensors = {key.replace(f".{new}", f".{old}"): tensor for key, tensor in tensors.items()}
    file = {f"image_encoder.image_encoder.{key}": tensor for key, tensor in tensors.items()}
    file |= random_tensors(bert_shapes("text_encoder.text_encoder.", 1))
    heads = {"image_projection.projection": (8, 48), "text_projection.projection": (8, 128)}
    file |= random_tensors({f"{name}.weight": size for name, size in heads.items()})
    file |= random_tensors({f"{name}.bias": size[:1] for name, size in heads.items()})
    model = imported({**file, "logit_scale": torch.tensor(2.5)}, "cxrclip", tmp_path)
    encoder = model.image_encoder
    assert {*encoder.mean, *encoder.std} == {0.5}
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = swin(pixels).last_hidden_state
        torch.testing.assert_close(encoder(pixels).patches_BPD, expected, atol=1e-4, rtol=1e-4)
        first = torch.nn.functional.normalize(model.image_head(expected[:, 0]), dim=1)
        torch.testing.assert_close(model.encode_image(pixels), first, atol=1e-4, rtol=1e-4)
