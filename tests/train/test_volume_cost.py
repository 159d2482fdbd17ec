"""Cost of volume encoders on paper, against the arithmetic written out."""

import pytest
from helpers.errors import raises

from medvl.cli.recipes import doctor
from medvl.errors import ConfigError
from medvl.train.doctor.volume_plan import (
    Measured,
    PlanOptions,
    VolumeCost,
    plan_phases,
    volume_cost,
)

TINY = {"name": "vit", "size": (8, 12, 12), "patch_size": (2, 3, 3), "embed_dim": 24}


def gflop(levels: tuple[str, ...]) -> float:
    """Of 64 patches in 4 slices, width 24, by layers; each slice has a class token."""
    total = 2 * 64 * 18 * 24  # patches
    for level in levels:
        parts, tokens = (4, 17) if level == "slice" else (1, 65)
        total += parts * (2 * tokens * 12 * 24**2 + 4 * tokens**2 * 24)
    return total / 1e9


def test_operations_are_those_of_the_layers_and_recomputation_keeps_less() -> None:
    costs = {}
    for levels in (("slice",) * 3 + ("study",), ("study",) * 4):
        cost = volume_cost({**TINY, "depth": 4, "num_heads": 2, "attention": levels})
        assert cost.forward_gflop == pytest.approx(gflop(levels), rel=1e-6)
        assert cost.tokens == 64
        assert cost.recomputed_gb < cost.activations_gb / 3
        costs[levels[0]] = cost
    assert costs["slice"].parameters == costs["study"].parameters


def test_a_network_with_batch_norms_is_not_recomputed() -> None:
    cost = volume_cost({"name": "resnet18_3d", "size": (16, 32, 32)})
    assert cost.recomputed_gb is None
    assert cost.activations_gb > 0


def test_the_command_describes_a_recipe_without_data() -> None:
    text = doctor(["volumes", "hlip_ct_rate", "tiny"])
    assert "16 x 32 x 32 voxels" in text
    assert "with recomputation" in text
    with raises(ConfigError, "unsupported", "recipe"):
        doctor(["volumes", "convirt", "tiny"])


def test_the_plan_multiplies_what_it_measured_and_what_it_was_given() -> None:
    measured = Measured(
        file_mb=50, read_s=1.0, resample_s=0.5, encode_s=0.5, stored_mb=10.0, decode_s=0.05
    )
    cost = VolumeCost(
        size=(112, 336, 336), tokens=1, parameters=1, forward_gflop=600.0, activations_gb=1.0,
        recomputed_gb=0.1,
    )  # fmt: skip
    options = PlanOptions(volumes=3600, raw_tb=4.5, tflops=100.0, utilisation=0.5, devices=4,
                          cores=10, network_gbit=10.0, scaling=0.5)  # fmt: skip
    phases = plan_phases(options, measured, cost, samples=36_000, recomputes=False)
    hours = {phase.name: phase.hours for phase in phases}
    assert hours["download"] == pytest.approx((1.0, 0.25))  # eight machines, half as fast
    assert hours["conversion"] == pytest.approx((0.2, 0.05))
    seconds = 36_000 * 3 * 600e9 / (4 * 100e12 * 0.5)
    assert hours["training, devices"][0] == pytest.approx(seconds / 3600)
    assert hours["training, loader"][0] == pytest.approx(36_000 * 0.05 / 10 / 3600)


def test_the_command_plans_with_its_assumptions() -> None:
    small = ["--source", "8", "32", "32", "--source-spacing", "40", "12", "12"]
    command = ["volumes", "hlip_ct_rate", "tiny", "--plan", *small, "--spacing", "20", "12", "12"]
    text = doctor([*command, "--tflops", "400", "--price", "30", "--machines", "1", "3"])
    for fact in ("1 machine", "3 machines", "400 TFLOP/s", "600 steps of 64 volumes", "30 a machine",
                 "measured here", "--engine ray", "21 TB (given)"):  # fmt: skip
        assert fact in text
    with raises(ConfigError, "missing", "tflops"):
        doctor(command)
    with raises(ConfigError, "out_of_range", "price"):
        doctor([*command, "--tflops", "400", "--price", "-1"])
