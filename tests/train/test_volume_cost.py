"""Cost of volume encoders on paper, against the arithmetic written out."""

import pytest
from helpers.errors import raises

from medvl.cli.recipes import doctor
from medvl.errors import ConfigError
from medvl.train.doctor.volume_cost import volume_cost

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
