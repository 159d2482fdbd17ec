"""Number formats of the step: float32 or 16-bit autocast; weights and optimiser stay in float32."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_log = logging.getLogger(__name__)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_LOWEST_SCALE = 1.0
"""fp16 lowers its loss scale on overflow. At this scale an overflow is caused by the model."""


class Precision:
    """Autocast, and for fp16 a loss scale that keeps small gradients from vanishing.

    On a CPU whose instructions do not multiply bfloat16 (x86 without AVX-512), where torch is 15 times as slow in it as
    in float32, "bf16" is computed in float32.
    """

    def __init__(self, kind: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        if kind == "bf16" and device.type == "cpu" and not _cpu_multiplies_bf16():
            _log.info("bf16 is computed in float32: this CPU has no instructions for it, and would be slower")
            kind = "fp32"
        self.kind, self.device = kind, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=kind == "fp16")

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run operations of this context in 16 bits where autocast allows it.

        On a CPU, attention then uses torch's unfused form: the fused backward pass takes four times as long in 16 bits
        (49 tokens, torch 2.13).
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._attention())
            if self.kind != "fp32":
                stack.enter_context(torch.autocast(self.device.type, dtype=_DTYPES[self.kind]))
            yield

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, scaled for fp16."""
        with self._attention():  # for layers that are recomputed
            self.scaler.scale(loss).backward()

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        plain = self.kind != "fp32" and self.device.type == "cpu"
        return sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, before their norm is computed and clipped."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimiser's step."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def skip_step(self) -> bool:
        """Close a step without an update: lower the scale after non-finite gradients.

        Returns whether a too large scale may be the cause of non-finite gradients.
        """
        searching = self.kind == "fp16" and self.scaler.get_scale() > _LOWEST_SCALE
        self.scaler.update()
        return searching

    def state_dict(self) -> dict[str, Any]:
        """Return the scale's state as JSON values; empty except for fp16."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            self.scaler.load_state_dict(dict(state))


def _cpu_multiplies_bf16() -> bool:
    supported: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported
