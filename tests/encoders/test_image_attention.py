"""Attention of a vision Transformer's class token, compared with the weights that its last block
computes.
"""

from typing import Any

import pytest
import torch
from helpers.errors import raises
from torch import Tensor

from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError

TINY_VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def make_encoder(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_image_encoder(name, image_size=64, **options).eval()


@pytest.mark.parametrize(
    "arguments",
    [{}, {"qkv_bias": False, "qk_norm": True}, {"reg_tokens": 2}],
    ids=["plain", "normed", "registers"],
)
def test_attention_of_the_class_token_is_that_of_the_last_block(arguments: dict[str, Any]) -> None:
    encoder = make_encoder("vit_b16", **TINY_VIT, **arguments)
    attention = encoder.backbone.blocks[-1].attn
    weights: list[Tensor] = []
    attention.attn_drop.register_forward_pre_hook(lambda module, inputs: weights.append(inputs[0]))
    attention.fused_attn = False
    image_BCHW = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    features = encoder(image_BCHW, output_attention=True)
    assert encoder.has_attention
    assert not features.attention_BP.requires_grad
    torch.testing.assert_close(features.attention_BP, weights[-1].mean(dim=1)[:, 0, -16:])
    kept_BK = torch.tensor([[3, 1], [0, 15]])
    kept_BP = encoder(image_BCHW, kept_BK, output_attention=True).attention_BP
    torch.testing.assert_close(kept_BP, weights[-1].mean(dim=1)[:, 0, -2:])
    assert encoder(image_BCHW).attention_BP is None
    assert not attention._forward_pre_hooks


@pytest.mark.parametrize("name", ["resnet_tiny", "torchvision:resnet18"])
def test_attention_needs_a_class_token(name: str) -> None:
    encoder = make_encoder(name)
    assert not encoder.has_attention
    with raises(ConfigError, "unsupported", "output_attention"):
        encoder(torch.zeros(1, 3, 64, 64), output_attention=True)
