"""Size of the largest tensor that a function makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest output, except of those as large as one of the given inputs.

    Under torch's `FakeTensorMode`, nothing is computed or allocated.
    """

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.inputs, self.bytes = {tensor.numel() for tensor in inputs}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(each, Tensor) and each.numel() not in self.inputs:
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return found
