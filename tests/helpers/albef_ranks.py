"""A small ALBEF, and two training steps of it on a rank."""

import dataclasses
from typing import Any

import torch

from helpers.fusion_samples import make_batch, tiny_model, tiny_tokenizer
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.models.fusion_encoders.albef import ALBEF


def make(tokenizer: Tokenizer | None, **settings: Any) -> ALBEF:
    model = tiny_model("albef", tokenizer, **settings)
    assert isinstance(model, ALBEF)
    return model


def quiet() -> dict[str, Any]:
    """Arguments of a text encoder without dropout, whose training mode is reproducible."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return {**sizes, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def two_steps(model: ALBEF, module: torch.nn.Module, rank: int, world: int) -> dict[str, Any]:
    """Run two steps on this rank's share of two batches of six, with the gradient of the contrastive loss only."""
    for number in range(2):
        batch = make_batch(tiny_tokenizer(), 6, keys=[f"{number}-{row}" for row in range(6)])
        row = slice(rank * 6 // world, (rank + 1) * 6 // world)
        names = ("keys", "image_BCHW", "ids_BT", "mask_BT", "labels_BL", "texts")
        mine = dataclasses.replace(batch, **{name: getattr(batch, name)[row] for name in names})
        torch.manual_seed(number)
        model.before_step(number)
        result = module(mine)
        model.zero_grad()
        zero = 0 * (result.terms["itm"] + result.terms["mlm"])
        (result.terms["itc"] + zero).backward()
    grads = {"image": model.image_head.weight.grad, "temperature": model.itc_head.temperature.grad}
    return {
        "itc": result.terms["itc"].item(),
        **{name: grad.tolist() for name, grad in grads.items() if grad is not None},
    }
