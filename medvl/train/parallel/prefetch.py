"""Batches from the host to the device, the next one while the device still computes."""

import dataclasses

import torch
from torch import Tensor

from medvl.schema import Batch


def place(batch: Batch, device: torch.device, channels_last: bool) -> Batch:
    """The batch on the device, its images in the model's memory format. Nothing happens twice, and nothing is waited
    for where the batch comes from page-locked memory."""
    batch = batch.to(device, non_blocking=True)
    if channels_last:
        image_BCHW = batch.image_BCHW.contiguous(memory_format=torch.channels_last)
        batch = dataclasses.replace(batch, image_BCHW=image_BCHW)
    return batch


class SideStream:
    """`place` beside whatever the device is doing: a stream of its own, and the order of things between the two.

    On a CPU, which has no streams, it is `place` alone.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device, self._channels_last = device, channels_last
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Batch) -> Batch:
        """Start to place a batch. Nobody may use it before `receive` has had it."""
        with torch.cuda.stream(self._stream):
            return place(batch, self._device, self._channels_last)

    def receive(self, batch: Batch) -> Batch:
        """The batch that `send` gave: what the device is told to do from now on begins when it is there."""
        if self._stream is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_stream(self._stream)
            for field in dataclasses.fields(batch):
                value = getattr(batch, field.name)
                if isinstance(value, Tensor):
                    value.record_stream(computing)  # its memory is the side stream's: not before the step is done
        return batch


def side_stream(device: torch.device, channels_last: bool) -> SideStream | None:
    """What brings a run's batches to its device ahead of the steps; None where a copy would gain nothing."""
    return SideStream(device, channels_last) if device.type == "cuda" else None
