"""Number formats of the step: float32, or a 16-bit autocast; weights and optimiser stay in float32."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_LOWEST_SCALE = 1.0
"""fp16 lowers its loss scale on overflow. At this scale an overflow is the model's fault, not the scale's."""


class Precision:
    """Autocast, and for fp16 the loss scale that keeps small gradients from vanishing."""

    def __init__(self, kind: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        self.kind, self.device = kind, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=kind == "fp16")

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Within this context operations that bear it run in 16 bits.

        On a CPU attention is then computed in its plain form: the backward pass of torch's fused one takes four times
        as long in 16 bits (49 tokens, torch 2.13).
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._attention())
            if self.kind != "fp32":
                stack.enter_context(torch.autocast(self.device.type, dtype=_DTYPES[self.kind]))
            yield

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss, scaled for fp16."""
        with self._attention():  # that of layers which are computed again
            self.scaler.scale(loss).backward()

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        plain = self.kind != "fp32" and self.device.type == "cpu"
        return sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale out of the gradients, before they are measured and clipped."""
        self.scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser's step."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def skip(self) -> bool:
        """After gradients that were not finite: lower the scale. True where its being too large may be the cause."""
        searching = self.kind == "fp16" and self.scaler.get_scale() > _LOWEST_SCALE
        self.scaler.update()
        return searching

    def state_dict(self) -> dict[str, Any]:
        """JSON values; empty but for fp16."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if state:
            self.scaler.load_state_dict(dict(state))
