"""Padding of matrix products on a CPU, so that few different shapes occur.

oneDNN compiles a kernel for every shape and keeps the last 1,024 of them. If the number of rows
changes from batch to batch, as the number of real or masked tokens does, no kernel is reused:
16-bit products of a small BERT took 1.6 times as long, and the kernels took gigabytes of memory.
"""

import torch

_MULTIPLE = 64


def filling_rows(rows: int, device: torch.device) -> int:
    """Return the number of rows to add to a matrix product, so that few different shapes occur.

    0 on a GPU and below 64 rows.
    """
    return -rows % _MULTIPLE if device.type == "cpu" and rows > _MULTIPLE else 0
