"""Activation checkpointing: same values and gradients, dropout included, with fewer saved
activations.
"""

from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.tiny_towers import TINY_BERT
from torch import Tensor

from medvl.encoders import checkpoint_activations, create_image_encoder, create_text_encoder
from medvl.errors import ConfigError

BERT = TINY_BERT | {"num_hidden_layers": 8}
CLIP_TEXT = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 1}


def text_encoder(name: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return create_text_encoder(name, **sizes)


def image_encoder(name: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return create_image_encoder(name, **sizes)


ENCODERS = {
    "bert": lambda: text_encoder(
        "bert", **BERT
    ),  # with the dropout of 0.1 that it is published with
    "packed bert": lambda: text_encoder("bert", **BERT),
    "open_clip's text": lambda: text_encoder("clip_text", **CLIP_TEXT),
    "timm's vision Transformer": lambda: image_encoder(
        "vit_small_patch16_224",
        embed_dim=32,
        depth=12,
        num_heads=2,
        image_size=32,
        drop_path_rate=0.3,
    ),
    "open_clip's vision Transformer": lambda: image_encoder(
        "clip_vit_b32", width=64, layers=12, image_size=64
    ),
}


def run(encoder: Any) -> tuple[Tensor, dict[str, Tensor | None], int]:
    """Return the pooled vectors of a fixed batch, its gradients, and the count of values that
    autograd saved.
    """
    generator, saved = torch.Generator().manual_seed(1), 0
    if hasattr(encoder, "image_size"):
        size = encoder.image_size
        inputs = [torch.randint(0, 256, (3, 1, *size), generator=generator, dtype=torch.uint8)]
    else:
        ids_BT = torch.randint(5, 100, (3, 9), generator=generator)
        inputs = [ids_BT, torch.arange(9) < torch.tensor([9, 4, 7])[:, None]]

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 0 if tensor.untyped_storage().data_ptr() in weights else tensor.numel()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    torch.manual_seed(5)
    encoder.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        pooled_BD = encoder(*inputs).pooled_BD
    pooled_BD.square().sum().backward()
    return (
        pooled_BD,
        {name: parameter.grad for name, parameter in encoder.named_parameters()},
        saved,
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_values_and_gradients_do_not_change(name: str) -> None:
    encoder = ENCODERS[name]().train()
    if name.startswith("packed"):
        encoder.pack()
    expected, gradients, saved = run(encoder)
    checkpoint_activations(encoder)
    again, gradients_again, saved_again = run(encoder)
    assert torch.equal(again, expected)
    for parameter, gradient in gradients.items():
        gradient_again = gradients_again[parameter]
        assert (gradient is None) == (gradient_again is None), parameter
        if gradient is not None:
            torch.testing.assert_close(
                gradient_again, gradient, rtol=1e-5, atol=1e-6, msg=parameter
            )
    assert saved_again < 0.3 * saved


def test_batch_norms_raise() -> None:
    with raises(ConfigError, "unsupported", names="resnet_tiny has batch norms"):
        checkpoint_activations(image_encoder("resnet_tiny"))


@pytest.mark.parametrize("name", ["static", "bioalbert"])
def test_unsupported_encoder_raises(name: str) -> None:
    sizes = (
        {"dimension": 8, "vocab_size": 10} if name == "static" else {**BERT, "embedding_size": 16}
    )
    with raises(ConfigError, "unsupported", names=name):
        checkpoint_activations(text_encoder(name, **sizes))
