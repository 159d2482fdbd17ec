"""Heat maps resized to the pixels of an image, for every way to make it square."""

import numpy as np
import pytest
import torch

from medvl.data.transforms.image import Box, EvalTransform
from medvl.models.heatmaps import on_image


def test_on_image_is_linear_between_cell_centers() -> None:
    map_Khw = torch.tensor([[[0.0, 4.0], [2.0, 6.0]]])
    map_KHW = on_image(map_Khw, Box(0, 0, 8, 8), 8, 8)
    along_first_row = [
        0.0,
        0.0,
        0.5,
        1.5,
        2.5,
        3.5,
        4.0,
        4.0,
    ]  # centers at 2 and 6, and flat beyond them
    torch.testing.assert_close(map_KHW[0, 0], torch.tensor(along_first_row))
    torch.testing.assert_close(map_KHW[0, -1], torch.tensor(along_first_row) + 2)
    assert map_KHW.shape == (1, 8, 8)


def test_on_image_equals_torch_interpolation_for_the_whole_image() -> None:
    map_Khw = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(
        map_Khw[None], (40, 33), mode="bilinear", align_corners=False
    )[0]
    torch.testing.assert_close(
        on_image(map_Khw, Box(0, 0, 40, 33), 40, 33), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(120, 200), (200, 120), (64, 64), (97, 143)])
@pytest.mark.parametrize(
    "transform",
    [
        EvalTransform(size=64, fit="crop"),
        EvalTransform(size=64, fit="pad"),
        EvalTransform(size=64, fit="squash"),
        EvalTransform(size=48, fit="pad", margin=8),
        EvalTransform(size=64, fit="crop", stored_size=80, margin=4),
    ],
    ids=str,
)
def test_a_bright_spot_is_mapped_back_to_its_place(
    shape: tuple[int, int], transform: EvalTransform
) -> None:
    """With the model's input as the grid, a spot that is bright in it must be bright at its
    place in the image.
    """
    height, width = shape
    spot = round(0.4 * height), round(0.55 * width)
    image_HW = np.zeros(shape, np.uint8)
    image_HW[spot[0] - 5 : spot[0] + 6, spot[1] - 5 : spot[1] + 6] = 255
    square_HWC = transform.build()(image_HW, np.random.default_rng(0)).image_HWC
    map_hw = torch.from_numpy(square_HWC[:, :, 0].copy()).float()
    map_HW = on_image(map_hw[None], transform.box(height, width), height, width)[0].nan_to_num()
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    center = [(map_HW * place).sum() / map_HW.sum() for place in (rows, columns)]
    assert [float(value) for value in center] == pytest.approx(spot, abs=1.0)
    assert map_HW[spot] > 200


def test_pixels_that_were_cut_off_are_nan() -> None:
    cropped = EvalTransform(size=50, fit="crop")
    map_HW = on_image(torch.ones(1, 7, 7), cropped.box(100, 200), 100, 200)[0]
    assert map_HW[:, 50:150].eq(1).all()
    assert map_HW[:, :50].isnan().all()
    assert map_HW[:, 150:].isnan().all()
    for fit in ("pad", "squash"):
        assert (
            on_image(torch.ones(1, 7, 7), EvalTransform(size=50, fit=fit).box(99, 200), 99, 200)
            .eq(1)
            .all()
        )
    gloria = EvalTransform(size=224, fit="pad", margin=16)
    map_HW = on_image(torch.ones(1, 19, 19), gloria.box(256, 128), 256, 128)[0]
    assert map_HW.isnan()[
        [15, 240]
    ].all()  # 16 rows are cut off above and below, and of the borders all else
    assert map_HW[16:240].eq(1).all()
