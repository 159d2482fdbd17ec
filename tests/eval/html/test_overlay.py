"""Heatmap overlays: positions of cells, cropped areas and colors."""

import numpy as np
import pytest

from medvl.data.transforms.image import Box, EvalTransform
from medvl.eval.html.plots import draw_map, peak_ratio, to_pixels

SHAPES = [(60, 100), (100, 60), (80, 80)]
FITS = ["crop", "pad", "squash"]
WHOLE = Box(0, 0, 40, 40)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_to_pixels_keeps_cell_centers_and_zero_outside_box(height, width, fit):
    map_hw = np.random.default_rng(0).random((2, 5))
    box = EvalTransform(size=64, fit=fit).box(height, width)
    spread_HW = to_pixels(map_hw, box, height, width)
    assert spread_HW.shape == (height, width)
    seen = 0
    for row in range(2):
        for column in range(5):
            y = box.top + (row + 0.5) / 2 * box.height
            x = box.left + (column + 0.5) / 5 * box.width
            if 1 <= y < height - 1 and 1 <= x < width - 1:
                seen += 1
                assert abs(spread_HW[int(y), int(x)] - map_hw[row, column]) < 0.15
    assert seen >= 6
    if fit == "crop":
        outside = abs(height - width) // 2
        edge = spread_HW[:outside] if height > width else spread_HW[:, :outside]
        assert not edge.any()
    even = to_pixels(np.ones((3, 3)), box, height, width)
    assert set(np.round(even, 9).ravel().tolist()) <= {0.0, 1.0}


def test_to_pixels_interpolates_bilinearly():
    line = to_pixels(np.array([[0.0, 1.0]]), Box(0, 0, 8, 8), 8, 8)[0]
    np.testing.assert_allclose(line, [0, 0, 0.125, 0.375, 0.625, 0.875, 1, 1])


def test_peak_ratio_is_maximum_over_mean():
    assert peak_ratio(np.array([[1.0, 3.0]])) == 1.5
    assert peak_ratio(np.zeros((2, 2))) == 0


@pytest.mark.parametrize(
    "pixels", [np.full((60, 100), 90, np.uint8), np.full((60, 100, 3), 90, np.uint8)]
)
def test_draw_map_colors_maximum_and_darkens_cropped_area(pixels):
    map_hw = np.full((6, 6), 0.01)
    map_hw[1, 4] = 0.5
    before = pixels.copy()
    drawn = draw_map(pixels, map_hw, Box(0, 20, 60, 60))
    assert drawn.shape == (60, 100, 3)
    assert drawn.dtype == np.uint8
    np.testing.assert_array_equal(pixels, before)
    hot = drawn[15, 65].astype(int)
    assert hot[0] > hot[2] + 80  # red
    assert (drawn[45, 30] == 90).all()  # cold, seen
    assert (drawn[:, :19] < 40).all()  # cropped away
    assert (drawn[:, 81:] < 40).all()


def test_draw_map_leaves_flat_map_pale():
    pixels = np.full((40, 40), 120, np.uint8)
    assert (draw_map(pixels, np.full((4, 4), 1 / 16), WHOLE) == 120).all()
    assert (draw_map(pixels, np.zeros((4, 4)), WHOLE) == 120).all()
    rng = np.random.default_rng(0)
    nearly = draw_map(pixels, 1 + 0.02 * rng.random((4, 4)), WHOLE).astype(int)
    pointed = np.ones((4, 4))
    pointed[0, 0] = 4
    assert (
        np.abs(nearly - 120).max()
        < np.abs(draw_map(pixels, pointed, WHOLE).astype(int) - 120).max() / 3
    )
