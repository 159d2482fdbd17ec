"""CT-ViT: codes, gradients and layers; its forward pass is tested with the importer of CT-CLIP."""

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from torch import Tensor

from medvl.encoders import checkpoint_activations, create_volume_encoder
from medvl.errors import ConfigError

TINY = {
    "size": (4, 6, 9),
    "patch_size": (2, 3, 3),
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 2,
    "head_dim": 8,
}


def tiny(**options):
    torch.manual_seed(0)
    return create_volume_encoder("ctvit", **{**TINY, **options})


def volumes(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-1200, 500, (count, 1, 4, 6, 9), generator=generator).short()


def test_gradients_reach_all_parameters_with_and_without_checkpointing():
    gradients = []
    for checkpoints in (False, True):
        encoder = tiny(codes=16).train()
        if checkpoints:
            checkpoint_activations(encoder)
        encoder(volumes(2)).patches_BPD.square().sum().backward()
        gradients.append({name: p.grad for name, p in encoder.named_parameters()})
    plain, recomputed = gradients
    assert all(grad is not None and grad.abs().sum() > 0 for grad in plain.values())
    torch.testing.assert_close(plain, recomputed)
    names = [name for group in tiny().parameter_layers() for name in group]
    assert sorted(names) == sorted(plain)


def test_patches_are_their_nearest_codes():
    encoder = tiny(codes=16).eval()
    plain = tiny().eval()
    state = encoder.state_dict()
    codes = state.pop("backbone.codebook")
    plain.load_state_dict(state)
    before, after = (each(volumes(2)) for each in (plain, encoder))
    nearest = F.cosine_similarity(before.patches_BPD[:, :, None], codes, dim=3).argmax(2)
    torch.testing.assert_close(after.patches_BPD, codes[nearest])
    torch.testing.assert_close(after.pooled_BD, after.patches_BPD.mean(1))
    assert after.grid == (2, 2, 3)


def test_exchanged_axes_give_exchanged_patches():
    plain = tiny(size=(4, 6, 6)).eval()
    turned = tiny(size=(4, 6, 6), transposed=True).eval()
    volume = volumes(1)[..., :6]
    expected = plain(volume.transpose(3, 4)).patches_BPD.unflatten(1, (2, 2, 2)).transpose(2, 3)
    torch.testing.assert_close(turned(volume).patches_BPD, expected.flatten(1, 3))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"depth": 0}, "depth"), ({"codes": -1}, "codes"), ({"head_dim": 0}, "head_dim")],
)
def test_wrong_arguments_are_refused(options, field):
    with raises(ConfigError, "out_of_range", field):
        tiny(**options)
