"""SigLIP's own settings; those that it shares with CLIP are in `test_clip.py`."""

import pytest
from helpers.contrastive_systems import TOWERS
from helpers.errors import raises

import medvl
from medvl.errors import ConfigError
from medvl.models import SigLIPConfig
from medvl.train import OptimConfig
from medvl.train.optim.optimizer import parameter_groups


def test_scale_and_bias_have_a_rate_of_their_own() -> None:
    model = medvl.create_model("siglip", **TOWERS, scalar_lr_mult=10.0)
    groups = parameter_groups(model, OptimConfig(lr=1e-5, weight_decay=1e-4))
    rates = {
        id(each): (group["lr"], group["weight_decay"])
        for group in groups
        for each in group["params"]
    }
    assert (
        len(rates) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    )
    for name, parameter in model.named_parameters():
        is_scalar = name in ("logit_scale", "logit_bias")
        assert rates[id(parameter)][0] == pytest.approx(1e-4 if is_scalar else 1e-5), name
        assert is_scalar <= (rates[id(parameter)][1] == 0), name
    assert {decay for _, decay in rates.values()} == {0, 1e-4}
    layers = parameter_groups(model, OptimConfig(lr=1e-5, layer_decay=0.5))
    assert min(group["lr"] for group in layers) < 1e-5 < max(group["lr"] for group in layers)
    with raises(ConfigError, "out_of_range", "scalar_lr_mult"):
        SigLIPConfig(scalar_lr_mult=0)
