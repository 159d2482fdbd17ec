"""Sharding with a torch that cannot do it safely."""

import dataclasses

import pytest
from helpers import train_fakes as fakes
from helpers.errors import raises
from torch.distributed.fsdp import FSDPModule

from medvl.errors import ConfigError
from medvl.train.parallel import model


def test_a_torch_that_cannot_reduce_unused_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is exchanged: ranks could wait forever for gradients that one of them does
    not have.
    """
    monkeypatch.delattr(FSDPModule, model._UNUSED)
    ranks = dataclasses.replace(fakes.ONE_RANK, size=2)
    with raises(ConfigError, "unsupported", "shard_weights"):
        model.FSDPModel(fakes.Regression(), ranks)
