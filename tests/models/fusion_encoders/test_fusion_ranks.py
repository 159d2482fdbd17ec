"""Fusion-encoders on two ranks: DDP averages the gradients of both, also with missing modalities."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fusion_samples import (
    TEXTS,
    flags,
    make_batch,
    tiny_model,
    tiny_tokenizer,
    with_altered_texts,
)
from helpers.two_ranks import on_two_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.schema import Batch

CASES = ("complete", "without text", "without images", "without sides", "without pairs")
"""Samples of rank 1; rank 0 always has complete pairs."""
COMBINATIONS = [
    *((name, case) for name in ("m3ae", "uniter") for case in CASES),
    *(("medvill", "without text"), ("medvill", "without sides")),
    *(("mixed", "without images"), ("mixed", "without pairs")),
    *(("single_stream", "without pairs"), ("dual_stream", "without text")),
    *(("dual_stream", "without sides"), ("vilt", "without images"), ("arl", "without pairs")),
]
"""Systems and cases. That a rank has all gradients in the cases of every system is tested without
ranks (test_fusion_models.py).
"""


def model_of(name: str, case: str) -> FusionModel:
    """Return a model, with matching of mirrored texts where rank 1 has no text that names a
    side; UNITER's step is ITM.
    """
    settings: dict[str, Any] = (
        {"mirror_weight": float(case == "without sides")}
        if name != "uniter"
        else {"task_mix": True}
    )
    model = tiny_model(name, tiny_tokenizer(), **settings)
    if name == "uniter":
        model.train()
        for step in range(99):
            model.before_step(step)
            if model.itm in model.step_objectives:
                break
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def batch_of(rank: int, case: str) -> Batch:
    tokenizer = tiny_tokenizer()
    if case == "without sides":
        return with_altered_texts(
            make_batch(tokenizer, size=4, texts=TEXTS[1:3] if rank else TEXTS[:2]), tokenizer
        )
    if rank == 0 or case == "complete":
        return make_batch(tokenizer, size=4 + 2 * rank)
    if case == "without pairs":
        alone = flags(1, 1, 1, 0, 0, 1)
        return make_batch(tokenizer, has_image_B=alone, has_text_B=~alone)
    nothing = flags(*[0] * 6)
    return make_batch(
        tokenizer, **{"has_text_B" if case == "without text" else "has_image_B": nothing}
    )


def loss_of(module: torch.nn.Module, rank: int, case: str) -> Tensor:
    torch.manual_seed(10 + rank)  # random numbers of this rank
    total: Tensor = module(batch_of(rank, case)).total
    return total


def gradients(model: FusionModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def rank_gradients() -> list[dict[str, dict[str, Tensor]]]:
    """Return the averaged gradients of each rank, by system and case."""
    return on_two_ranks(gradients_under_ddp)


@pytest.mark.parametrize(("name", "case"), COMBINATIONS)
def test_ddp_averages_the_gradients_of_both_ranks(
    name: str, case: str, rank_gradients: list[dict[str, dict[str, Tensor]]]
) -> None:
    expected: dict[str, Tensor] = {}
    model = model_of(name, case)
    for rank in (0, 1):
        model.zero_grad(set_to_none=True)
        loss_of(model, rank, case).backward()
        for key, gradient in gradients(model).items():
            expected[key] = expected.get(key, torch.zeros_like(gradient)) + gradient / 2
    for by_case in rank_gradients:
        averaged = by_case[f"{name} {case}"]
        assert averaged.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(
                averaged[key], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, k=key: k + text
            )


def gradients_under_ddp() -> dict[str, dict[str, Tensor]]:
    """Return the gradients of every system and case under DDP on this rank."""
    rank = dist.get_rank()
    results = {}
    for name, case in COMBINATIONS:
        model = model_of(name, case)
        wrapped = DistributedDataParallel(model)  # must exist until the end of the backward pass
        loss_of(wrapped, rank, case).backward()
        results[f"{name} {case}"] = gradients(model)
    return results
