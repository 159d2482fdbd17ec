"""PixelHop++: properties of the Saab transform, fitting in batches, thresholds, and the encoder
that is saved.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.label_shards import make_shards
from torch import Tensor

from medvl.cli import main as cli
from medvl.encoders import create_image_encoder, pixelhop_arguments
from medvl.encoders.image.pixelhop import PixelHop
from medvl.encoders.image.pixelhop_fit import (
    Covariance,
    PixelHopSettings,
    fit_pixelhop,
    saab,
    save_pixelhop,
    windows,
)
from medvl.errors import ConfigError, WeightsError

SMALL = PixelHopSettings(
    window=3, cutoff=0.02, discard=0.002, tokens=5, token_dim=4, cells=4, image_size=24
)


def pictures(count: int = 12) -> Tensor:
    """Smooth noise with a bright square at a random place."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.nn.functional.avg_pool2d(torch.rand(count, 1, 28, 28, generator=generator), 5, 1)
    for row in range(count):
        top, left = torch.randint(0, 14, (2,), generator=generator).tolist()
        noise[row, :, top : top + 8, left : left + 8] += 0.4
    return (noise * 180).to(torch.uint8)


IMAGES = pictures()


def fitted(batch: int = 5, **changes: Any) -> Any:
    return fit_pixelhop(lambda: IMAGES.split(batch), PixelHopSettings(**{**vars(SMALL), **changes}))


@pytest.fixture(scope="module")
def net() -> PixelHop:
    backbone: PixelHop = fitted().backbone
    return backbone


def statistics_of(vectors_CNK: Tensor) -> Covariance:
    statistics = Covariance()
    for part in vectors_CNK.split(7, dim=1):
        statistics.add(part)
    return statistics


def test_saab_is_orthonormal_with_a_constant_and_decorrelated_kernels() -> None:
    vectors_NK = (
        torch.randn(500, 9, generator=torch.Generator().manual_seed(1)).cumsum(dim=1).double()
    )
    statistics = statistics_of(vectors_NK[None])
    torch.testing.assert_close(statistics.covariance_CKK[0], vectors_NK.T.cov(correction=0))
    one = saab(statistics.mean_CK[0], statistics.covariance_CKK[0], statistics.longest[0])
    torch.testing.assert_close(one.kernels_KK @ one.kernels_KK.T, torch.eye(9).double())
    torch.testing.assert_close(one.kernels_KK[0], torch.full((9,), 1 / 3).double())
    responses_NK = vectors_NK @ one.kernels_KK.T
    torch.testing.assert_close(
        responses_NK.square().sum(), vectors_NK.square().sum()
    )  # no energy is lost
    torch.testing.assert_close(one.variance_K.sum(), statistics.covariance_CKK[0].trace())
    covariance_AA = responses_NK[:, 1:].T.cov(correction=0)
    torch.testing.assert_close(covariance_AA, torch.diag(one.variance_K[1:]))
    assert (one.variance_K[1:].diff() <= 0).all()
    assert (responses_NK + one.bias_K >= 0).all()


def test_fit_does_not_depend_on_the_batches(net: PixelHop) -> None:
    whole = fitted(batch=len(IMAGES)).backbone.state_dict()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-4)


def test_nodes_are_kept_by_energy(net: PixelHop) -> None:
    """Energies of children add up to their parent's, so that all nodes of all energies would add
    up to 1.
    """
    for unit, further in zip(net.units, net.intermediate, strict=True):
        assert (unit.energy_N.diff() <= 0).all()
        assert unit.energy_N.min() >= SMALL.discard
        assert further == (
            0 if unit is net.units[-1] else int((unit.energy_N > SMALL.cutoff).sum())
        )
    for number in (1, 2):
        parents = net.units[number - 1].energy_N[: net.intermediate[number - 1]]
        children = torch.zeros_like(parents).index_add(
            0, net.units[number].parent_N, net.units[number].energy_N
        )
        assert (children <= parents * (1 + 1e-5)).all()
    everything = fitted(discard=0.0, units=2).backbone
    assert [len(unit.energy_N) for unit in everything.units] == [9, 9 * everything.intermediate[0]]
    torch.testing.assert_close(everything.units[0].energy_N.sum(), torch.tensor(1.0))
    assert len(net.units[0].energy_N) < 9


def test_responses_of_the_units_are_those_of_their_windows(net: PixelHop) -> None:
    image = IMAGES[:2].float() / 255
    first, second, third = net.maps(image)
    assert first.shape[2:] == (24, 24)
    assert second.shape[2:] == (12, 12)
    assert third.shape[2:] == (6, 6)
    unit = net.units[1]
    below = torch.nn.functional.max_pool2d(first[:, : net.intermediate[0]], 2)
    windows_CMK = windows(below, 3)
    node = len(unit.parent_N) - 1
    expected = (
        windows_CMK[unit.parent_N[node]] @ unit.kernel_N1HW[node].flatten() + unit.bias_N[node]
    )
    torch.testing.assert_close(second[:, node].flatten(), expected)
    assert all((response >= -1e-4).all() for response in net.maps(IMAGES.float() / 255))


def test_tokens_are_centred_decorrelated_and_of_unit_variance() -> None:
    encoder = fitted()
    features = encoder(IMAGES)
    tokens_BQD = features.patches_BPD
    assert tokens_BQD.shape == (12, 5, 4)
    assert features.grid is None
    assert features.pooled_BD.shape == (12, encoder.feature_dim) == (12, 20)
    torch.testing.assert_close(tokens_BQD.mean(dim=0), torch.zeros(5, 4), atol=2e-3, rtol=0)
    torch.testing.assert_close(
        tokens_BQD.var(dim=0, correction=0).mean(dim=1), torch.ones(5), atol=2e-2, rtol=0
    )
    for token_BD in tokens_BQD.unbind(1):
        covariance = token_BD.T.cov(correction=0)
        torch.testing.assert_close(covariance, torch.diag(covariance.diagonal()), atol=1e-2, rtol=0)
    assert not list(encoder.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(encoder(IMAGES).patches_BPD, tokens_BQD)
    torch.testing.assert_close(
        encoder(IMAGES.expand(-1, 3, -1, -1)).patches_BPD, tokens_BQD, atol=1e-4, rtol=1e-4
    )


def test_saved_encoder_is_created_by_name(tmp_path: Path) -> None:
    encoder = fitted()
    save_pixelhop(encoder, tmp_path, {"shards": "hash"})
    alone = create_image_encoder("pixelhop", pretrained=tmp_path, image_size=24)
    given = create_image_encoder(
        "pixelhop", pretrained=tmp_path, image_size=24, **pixelhop_arguments(tmp_path)
    )
    for other in (alone, given):
        torch.testing.assert_close(
            other(IMAGES).patches_BPD, encoder(IMAGES).patches_BPD, rtol=0, atol=0
        )
    assert create_image_encoder(**encoder.config).patch_dim == 4
    with raises(WeightsError, "not_found", "pretrained"):
        create_image_encoder("pixelhop", pretrained=True)
    with raises(WeightsError, "not_found", "folder"):
        pixelhop_arguments(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with raises(WeightsError, "malformed", "folder"):
        pixelhop_arguments(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"window": 4}, "window"),
        ({"discard": 0.5}, "discard"),
        ({"token_dim": 17}, "token_dim"),
        ({"image_size": 12}, "image_size"),
        ({"cutoff": 0.99}, "cutoff"),
        ({"tokens": 500}, "tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], field: str) -> None:
    with raises(ConfigError, "out_of_range", field):
        fitted(**changes)
    with raises(ConfigError, "out_of_range"):
        create_image_encoder("pixelhop", nodes=(3,), intermediate=(4,), tokens=2)


def test_command_fits_to_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = make_shards(tmp_path)
    out = tmp_path / "pixelhop"
    options = [
        "--tokens",
        "4",
        "--token-dim",
        "8",
        "--cells",
        "4",
        "--window",
        "3",
        "--image-size",
        "32",
    ]
    cli.main(
        [
            "fit-pixelhop",
            "--data",
            str(shards / "train"),
            "--out",
            str(out),
            *options,
            "--workers",
            "0",
            "--images",
            "20",
        ]
    )
    assert "tokens" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["fitted"]["images"] == 20
    assert len(config["fitted"]["shards"]) == 64
    encoder = create_image_encoder("pixelhop", pretrained=out, image_size=32)
    assert encoder(torch.zeros(1, 1, 32, 32, dtype=torch.uint8)).patches_BPD.shape == (1, 4, 8)
