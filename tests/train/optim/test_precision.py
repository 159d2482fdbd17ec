"""Number formats of a step on processors with and without instructions for bfloat16."""

import logging

import pytest
import torch

from medvl.train.optim import optimizer as module
from medvl.train.optim.optimizer import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("supported", [False, True])
def test_bf16_is_computed_in_float32_where_a_cpu_would_emulate_it(
    supported: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_cpu_multiplies_bf16", lambda: supported)
    with caplog.at_level(logging.INFO):
        precision = Precision("bf16", CPU)
    assert ("computed in float32" in caplog.text) is not supported
    assert precision.kind == ("bf16" if supported else "fp32")
    weight_33 = torch.eye(3, requires_grad=True)
    with precision.autocast():
        product_33 = weight_33 @ weight_33
    assert product_33.dtype == (torch.bfloat16 if supported else torch.float32)
    precision.backward(product_33.float().sum())
    assert weight_33.grad is not None
    assert weight_33.grad.dtype == torch.float32


def test_other_formats_do_not_ask_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpu_multiplies_bf16", lambda: pytest.fail("asked"))
    assert Precision("fp32", CPU).kind == "fp32"
    assert Precision("fp16", CPU).kind == "fp16"
    assert Precision("bf16", torch.device("cuda")).kind == "bf16"


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512")
def test_avx_512_multiplies_bf16() -> None:
    assert module._cpu_multiplies_bf16()
