"""Transfer of batches to the device, the next one while the device computes; and augmentation that is left to it."""

import dataclasses

import torch
from torch import Tensor

from medvl.data.transforms.device import augment_batch
from medvl.schema import Batch


def place(batch: Batch, device: torch.device, channels_last: bool) -> Batch:
    """Copy a batch to the device, and augment its images there where that is left to it; in the model's memory format.

    A batch that is in place is returned as it is, and copies from page-locked memory do not block.
    """
    batch = augment_batch(batch.to(device, non_blocking=True))
    if channels_last:
        image_BCHW = batch.image_BCHW.contiguous(memory_format=torch.channels_last)
        batch = dataclasses.replace(batch, image_BCHW=image_BCHW)
    return batch


class SideStream:
    """`place` on a CUDA stream of its own, concurrent with computation. On a CPU it is `place` alone."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device, self._channels_last = device, channels_last
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Batch) -> Batch:
        """Start to copy a batch. It must not be used before `receive`."""
        with torch.cuda.stream(self._stream):
            return place(batch, self._device, self._channels_last)

    def receive(self, batch: Batch) -> Batch:
        """Make the compute stream wait for the copy that `send` started, then return the batch."""
        if self._stream is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_stream(self._stream)
            for field in dataclasses.fields(batch):
                value = getattr(batch, field.name)
                if isinstance(value, Tensor):
                    value.record_stream(computing)  # keeps the side stream from reusing its memory during the step
        return batch


def side_stream(device: torch.device, channels_last: bool) -> SideStream | None:
    """Return a side stream for a GPU; None on a CPU, where copying ahead gains nothing."""
    return SideStream(device, channels_last) if device.type == "cuda" else None
