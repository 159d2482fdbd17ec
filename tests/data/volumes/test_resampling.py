"""Resampling against torch and formulas, crops, padding and windows."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.volume_files import canonical

from medvl.data.volumes.resampling import apply_window, crop_or_pad, resample_volume
from medvl.data.volumes.volume import Volume
from medvl.errors import ConfigError, VolumeError


def volume(array, spacing=(1.0, 1.0, 1.0)):
    return Volume(hu_DHW=np.asarray(array, np.int16), spacing=spacing, modality="CT")


@pytest.mark.parametrize("spacing", [(2.0, 0.8, 0.5), (0.4, 3.0, 1.7), (1.0, 1.0, 1.0)])
def test_without_a_filter_it_is_the_trilinear_interpolation_of_the_peers(spacing):
    hu_DHW = canonical((9, 40, 12))
    result = resample_volume(volume(hu_DHW), spacing, antialias=False)
    sides = [int(side / step + 1e-6) for side, step in zip(hu_DHW.shape, spacing, strict=True)]
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(hu_DHW).float()[None, None], sides, mode="trilinear", align_corners=False
    )[0, 0]
    assert result.hu_DHW.dtype == np.int16
    assert np.abs(result.hu_DHW - expected.numpy()).max() <= 0.51
    assert result.spacing == pytest.approx(
        [side / new for side, new in zip(hu_DHW.shape, sides, strict=True)]
    )
    assert result.modality == "CT"


def test_sides_are_not_one_short_by_rounding():
    assert resample_volume(
        volume(np.zeros((3, 3, 3)), (0.3, 0.3, 0.3)), (0.1,) * 3
    ).hu_DHW.shape == (9, 9, 9)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_filter_keeps_what_is_thinner_than_a_new_voxel(axis):
    hu_DHW = np.zeros((24, 24, 24))
    np.moveaxis(hu_DHW, axis, 0)[::4] = 400  # every fourth plane: a mean of 100
    spacing = [1.0, 1.0, 1.0]
    spacing[axis] = 4.0
    plain = resample_volume(volume(hu_DHW), spacing, antialias=False).hu_DHW
    smooth = resample_volume(volume(hu_DHW), spacing).hu_DHW
    assert not plain.any()  # centres at 1.5, 5.5, ...: between the planes
    middle = np.moveaxis(smooth, axis, 0)[1:-1]
    sigma = 1.5  # (4 - 1) / 2
    weights = np.exp(-0.5 * (np.arange(-6, 7) / sigma) ** 2)
    weights /= weights.sum()
    filtered = np.convolve(np.tile([400.0, 0, 0, 0], 12), weights, "same")[20:24]
    assert np.abs(middle - (filtered[1] + filtered[2]) / 2).max() <= 1


def test_a_ratio_of_up_to_one_and_a_half_is_not_filtered():
    source = volume(canonical((12, 12, 12)))
    for ratio, equal in ((1.5, True), (1.6, False)):
        results = [
            resample_volume(source, (ratio, 1, 1), antialias=a).hu_DHW for a in (True, False)
        ]
        assert np.array_equal(*results) == equal


def test_padding_does_not_darken_the_border():
    hu_DHW = np.full((4, 4, 4), -3024)
    hu_DHW[:, :, 2:] = 0
    result = resample_volume(volume(hu_DHW), (1, 1, 0.5)).hu_DHW
    assert result.min() == -1024
    assert set(np.unique(result)) == {-1024, -768, -256, 0}


def test_crop_and_padding_are_centred():
    hu_DHW = canonical((4, 5, 3))
    result = crop_or_pad(volume(hu_DHW), (2, 8, 3))
    assert result.hu_DHW.shape == (2, 8, 3)
    np.testing.assert_array_equal(result.hu_DHW[:, 1:6], hu_DHW[1:3])
    assert (result.hu_DHW[:, [0, 6, 7]] == -1024).all()
    assert (crop_or_pad(volume(hu_DHW), (4, 5, 5), value=7).hu_DHW[:, :, [0, 4]] == 7).all()


def test_windows():
    values = apply_window(np.array([-2000, -1150, -400, 350, 900], np.int16), -1150, 350)
    assert values.dtype == np.float32
    assert values.tolist() == [0, 0, 0.5, 1, 1]


def test_wrong_settings_are_refused():
    source = volume(np.zeros((2, 2, 2)))
    for spacing in ((1, 1), (1, 0, 1), (1, 1, float("nan"))):
        with raises(ConfigError, "out_of_range", "spacing"):
            resample_volume(source, spacing)
    with raises(VolumeError, "too_small", "spacing"):
        resample_volume(source, (5, 1, 1))
    for step in (1e3, 1e30):  # metres, and no spacing at all
        wide = dataclasses.replace(source, spacing=(step, step, step))
        with raises(VolumeError, "too_large", "spacing"):
            resample_volume(wide, (1, 1, 1))
    for size in ((1, 1), (1, 0, 1)):
        with raises(ConfigError, "out_of_range", "size"):
            crop_or_pad(source, size)
    with raises(ConfigError, "out_of_range", "window"):
        apply_window(source.hu_DHW, 5, 5)
