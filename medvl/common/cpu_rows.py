"""Few different numbers of rows in matrix products on a CPU.

oneDNN compiles a kernel for every shape that it meets and keeps the last 1,024 of them. Where the number of rows
differs from batch to batch, as that of real or masked tokens does, nothing is reused: 16-bit products of a small BERT
took 1.6 times as long, and the kernels gigabytes of memory.
"""

import torch

_MULTIPLE = 64


def filling_rows(rows: int, device: torch.device) -> int:
    """Return how many rows to add to a matrix product, so that there are few different numbers.

    0 on a GPU and for fewer than 64 rows, whose numbers are few.
    """
    return -rows % _MULTIPLE if device.type == "cpu" and rows > _MULTIPLE else 0
