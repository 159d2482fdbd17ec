"""One training step under bf16 autocast of systems with a loss of several terms, near the same
step in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.albef_ranks import quiet
from helpers.fusion_samples import SIDE, make_batch, tiny_model, tiny_tokenizer
from helpers.train_fakes import one_rank, optim, step_of
from torch import nn

import medvl
from medvl.data.loading.dense_targets import DenseBatch
from medvl.schema import Batch
from medvl.train.parallel.distributed import machine_settings


def fusion(name: str) -> nn.Module:
    return tiny_model(name, tiny_tokenizer(), dropout=0.0, text_arguments=quiet())


def lvit() -> nn.Module:
    torch.manual_seed(0)
    text = {"text_encoder": "tiny_bert", "text_arguments": quiet()}
    return medvl.create_model(
        "lvit", tokenizer=tiny_tokenizer(), labels=("Infection",), image_size=SIDE, width=8, **text
    )


def marked_batch() -> Batch:
    """Return the fusion-encoders' batch with a mask for each image."""
    plain = make_batch(tiny_tokenizer())
    masks_BLhw = torch.zeros(len(plain), 1, SIDE, SIDE, dtype=torch.uint8)
    masks_BLhw[:, :, 8:20, 4:16] = 255
    fields: dict[str, Any] = {
        name: getattr(plain, name) for name in ("keys", "image_BCHW", "ids_BT", "mask_BT")
    }
    return DenseBatch(**fields, labels_BL=plain.labels_BL, texts=plain.texts, masks_BLhw=masks_BLhw)


SYSTEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    **{
        name: (functools.partial(fusion, name), lambda: make_batch(tiny_tokenizer()))
        for name in ("m3ae", "albef")
    },
    "lvit": (lvit, marked_batch),
}


@pytest.mark.fault("N4")
@pytest.mark.parametrize("name", SYSTEMS)
def test_bf16_step_is_near_the_float32_step(name: str, device: torch.device) -> None:
    """The same masked words and patches, because both steps draw from one seed; dropout is off."""
    make, batch = SYSTEMS[name]
    results, ranks = {}, one_rank(device)
    for precision in ("fp32", "bf16"):
        model = make().train()
        step = step_of(model, optim(clip_norm=1.0), precision, ranks)
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        with machine_settings(ranks, 1, False, precision):
            results[precision] = step(0, 1e-3, [batch()], 1)
        assert results[precision].updated
        for key, parameter in model.named_parameters():
            assert (parameter.dtype, parameter.device) == (torch.float32, device)
            if parameter.requires_grad and parameter.ndim > 1 and "pooler" not in key:
                assert not torch.equal(parameter, before[key]), key
    exact, rounded = results["fp32"], results["bf16"]
    for term, value in exact.losses[0].terms.items():
        torch.testing.assert_close(
            rounded.losses[0].terms[term], value, rtol=1e-2, atol=0, msg=term
        )
    torch.testing.assert_close(rounded.grad_norm, exact.grad_norm, rtol=0.15, atol=0)
