"""Weights between two checkpoints of one system."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.contrastive_systems import clip, convirt
from helpers.errors import raises
from helpers.generators import AUTOENCODER

from medvl.cli.main import main
from medvl.errors import CheckpointError, ConfigError
from medvl.models import System, create_model, interpolate, load, save
from medvl.models.checkpoint_folder import recording_modules


def saved(folder: Path, model: torch.nn.Module) -> Path:
    folder.mkdir()
    save(model, folder)
    return folder


def autoencoder() -> System:
    pytest.importorskip("diffusers")
    return create_model(AUTOENCODER)


def unet() -> System:
    return create_model("lvit", network="unet", labels=("Infection",), image_size=32, width=8)


def test_weights_are_on_the_line_between_start_and_end(tmp_path: Path) -> None:
    """Also the statistics of batch norms; counters are those of the end."""
    first, last = convirt(), convirt()
    for tensor in last.state_dict().values():
        tensor.add_(1)
    start, end = saved(tmp_path / "start", first), saved(tmp_path / "end", last)
    main(["interpolate", str(start), str(end), "--share", "0.25", "--out", str(tmp_path / "out")])
    for name, tensor in load(tmp_path / "out").state_dict().items():
        shift = 0.25 if tensor.is_floating_point() else 1
        torch.testing.assert_close(tensor, first.state_dict()[name] + shift, msg=name)
    for share, expected in ((0.0, first), (1.0, last)):
        torch.testing.assert_close(
            dict(interpolate(start, end, share).named_parameters()),
            dict(expected.named_parameters()),
        )
    for arguments in ([str(start), str(end), "--out", str(tmp_path / "out")], [str(start)]):
        with pytest.raises(SystemExit):
            main(["interpolate", *arguments])


def test_other_systems_and_shares_are_refused(tmp_path: Path) -> None:
    start, other = saved(tmp_path / "start", convirt()), saved(tmp_path / "other", clip())
    with raises(CheckpointError, "mismatch"):
        interpolate(start, other, 0.5)
    for share in (-0.1, 1.5):
        with raises(ConfigError, "out_of_range", "share"):
            interpolate(start, start, share)


@pytest.mark.parametrize(
    ("make", "share"), [(convirt, 0.0), (convirt, 0.5), (autoencoder, 0.5), (unet, 0.5)]
)
def test_the_patients_of_both_are_remembered(
    make: Callable[[], System], share: float, tmp_path: Path
) -> None:
    """An autoencoder and a U-Net have no encoder that could record them."""
    models = [make(), make()]
    for number, model in enumerate(models):
        model.trained_on = ({"corpus": f"c{number}"},)
    start, end = (saved(tmp_path / str(number), model) for number, model in enumerate(models))
    save(interpolate(start, end, share), tmp_path)
    for module in recording_modules(load(tmp_path)).values():
        assert module.trained_on == ({"corpus": "c1"}, {"corpus": "c0"})
