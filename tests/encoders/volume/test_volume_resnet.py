"""The ResNet for volumes against torchvision's for videos."""

import pytest
import torch
from helpers.errors import raises
from safetensors.torch import save_file
from torch import Tensor

from medvl.encoders import (
    checkpoint_activations,
    create_volume_encoder,
    freeze_layers,
    parameter_groups,
)
from medvl.errors import ConfigError, WeightsError

SIZE = (8, 32, 32)


@pytest.fixture(scope="module")
def video() -> torch.nn.Module:
    """torchvision's network with random statistics."""
    from torchvision.models.video import r3d_18

    torch.manual_seed(0)
    net = r3d_18(num_classes=3).eval()
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if "running" in name:
                tensor.uniform_(0.5, 1.5)
    return net


def volumes(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-1200, 500, (count, 1, *SIZE), generator=generator).short()


def test_a_grey_volume_has_the_features_of_three_equal_channels(video, tmp_path):
    save_file(video.state_dict(), tmp_path / "video.safetensors")
    encoder = create_volume_encoder(
        "resnet18_3d", size=SIZE, pretrained=tmp_path / "video.safetensors"
    ).eval()
    hu = volumes(2)
    share = ((hu.float() + 1150) / 1500).clamp(0, 1)
    rgb = ((share - 0.449) / 0.226).expand(-1, 3, -1, -1, -1)
    maps = rgb
    for part in (video.stem, video.layer1, video.layer2, video.layer3, video.layer4):
        maps = part(maps)
    features = encoder(hu)
    assert features.grid == encoder.grid == (1, 2, 2)
    patches = maps.permute(0, 2, 3, 4, 1).reshape(2, 4, 512)
    torch.testing.assert_close(features.patches_BPD, patches, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.pooled_BD, patches.mean(1), rtol=1e-4, atol=1e-4)


def test_every_parameter_learns_and_belongs_to_one_layer():
    torch.manual_seed(0)
    encoder = create_volume_encoder("resnet18_3d", size=SIZE).train()
    encoder(volumes(2)).pooled_BD.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
    names = [name for group in encoder.parameter_layers() for name in group]
    assert sorted(names) == sorted(dict(encoder.named_parameters()))
    rates = {group["lr"] for group in parameter_groups(encoder, 1.0, 0.1, layer_decay=0.5)}
    assert rates == {0.5**k for k in range(1, 6)}
    freeze_layers(encoder, 4)
    assert encoder.is_frozen


def test_what_does_not_fit_is_refused(video, tmp_path):
    state = video.state_dict()
    del state["layer4.1.conv2.0.weight"]
    save_file(state, tmp_path / "part.safetensors")
    with raises(WeightsError, "mismatch", names="layer4.1.conv2.0.weight"):
        create_volume_encoder("resnet18_3d", size=SIZE, pretrained=tmp_path / "part.safetensors")
    with raises(ConfigError, "unknown_name", "patch_size"):
        create_volume_encoder("resnet18_3d", size=SIZE, patch_size=(2, 2, 2))
    encoder = create_volume_encoder("resnet18_3d", size=SIZE)
    with raises(WeightsError, "mismatch", names="stem.0.weight"):
        image = {"conv1.weight": torch.zeros(64, 3, 7, 7)}
        encoder.backbone.fit_weights(image, "resnet18.pth", rescale=False)
    with raises(ConfigError, "mismatch", "size"):
        encoder(volumes(1)[..., :24])
    with raises(ConfigError, "mismatch", "max_scans"):
        encoder(volumes(1).repeat(1, 2, 1, 1, 1))
    with raises(ConfigError, "unsupported"):
        checkpoint_activations(encoder)
