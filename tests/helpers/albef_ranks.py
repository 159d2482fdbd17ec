"""A small ALBEF or MUMC, and three training steps of it on a rank."""

import dataclasses
from typing import Any

import torch

from helpers.fusion_samples import flags, make_batch, tiny_model, tiny_tokenizer
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.models.fusion_encoders.albef import ALBEF
from medvl.schema import Batch


def make(tokenizer: Tokenizer | None, name: str = "albef", **settings: Any) -> ALBEF:
    model = tiny_model(name, tokenizer, **settings)
    assert isinstance(model, ALBEF)
    return model


def quiet() -> dict[str, Any]:
    """Arguments of a text encoder without dropout, whose training mode is reproducible."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return {**sizes, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def silent(name: str) -> ALBEF:
    """Return a model without dropout, also of patches."""
    return make(tiny_tokenizer(), name, dropout=0.0, text_arguments=quiet(), mask_ratio=0.0)


def three_steps(model: ALBEF, module: torch.nn.Module, rank: int, world: int) -> dict[str, Any]:
    """Run three steps on this rank's share of batches of six, with gradients of the contrastive
    losses only.

    The second half of the last batch, which is rank 1 of two, has images alone and texts alone.
    Returns the losses and the gradients of the last two steps.
    """
    results: dict[str, Any] = {}
    for number in range(3):
        batch = make_batch(tiny_tokenizer(), 6, keys=[f"{number}-{row}" for row in range(6)])
        if number == 2:
            batch = dataclasses.replace(
                batch, has_image_B=flags(1, 1, 1, 1, 0, 1), has_text_B=flags(1, 1, 1, 0, 1, 0)
            )
        row = slice(rank * 6 // world, (rank + 1) * 6 // world)
        mine = {
            name: None if value is None else value[row] for name, value in vars_of(batch).items()
        }
        torch.manual_seed(number)
        model.before_step(number)
        result = module(Batch(**mine))
        model.zero_grad()
        contrast = [result.terms[name] for name in ("itc", "unimodal") if name in result.terms]
        zero = 0 * (result.terms["itm"] + result.terms["mlm"])
        (torch.stack(contrast).sum() + zero).backward()
        grads = {
            "image": model.image_head.weight.grad,
            "temperature": model.itc_head.temperature.grad,
        }
        results[f"loss {number}"] = [value.item() for value in contrast]
        for name, grad in grads.items():
            assert grad is not None
            results[f"{name} {number}"] = grad.tolist()
    return results


def vars_of(batch: Batch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
