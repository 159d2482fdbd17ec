"""Images of the phantom: findings are drawn at their ground truth, at any size."""

import dataclasses

import cv2
import numpy as np
import pytest
from helpers.errors import raises

from medvl.errors import ConfigError
from medvl.phantom import Finding, Part, World, boxes, draw, masks
from medvl.phantom.geometry import Camera, Surface, ellipse, ribbon, spline
from medvl.phantom.population.findings import PART_SAMPLERS, RENDERED_LABELS
from medvl.phantom.population.world import generator, sample_view

CHEST = World(2).patient(4).chest


def view_with(*findings, position="PA", key=(2, 4, 0, 0)):
    """Return a view of one chest; equal keys give equal position, exposure and noise."""
    return sample_view(key, position, CHEST, findings)


def sample_finding(label, extent, seed=0):
    return Finding(label=label, parts=PART_SAMPLERS[label](generator(seed, 5), extent))


def make_finding(label, extent, side="right", **more):
    kind = {
        "Pleural Effusion": "fluid",
        "Pneumothorax": "gas",
        "Consolidation": "lobar",
        "Cardiomegaly": "shape",
    }[label]
    zone = f"{side} lower lobe" if kind == "lobar" else ""
    part = Part(
        kind=kind, side="midline" if kind == "shape" else side, zone=zone, extent=extent, **more
    )
    return Finding(label=label, parts=(part,))


# Geometry


def test_spline_passes_through_its_control_points():
    control = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 1.0], [4.0, 4.0]])
    assert np.allclose(spline(control, samples=5)[::5], control)
    assert np.allclose(spline(control, closed=True, samples=5)[::5], control)
    stacked = spline(np.stack([control, control + 1]), samples=5)
    assert np.allclose(stacked[1], spline(control, samples=5) + 1)


def test_spline_of_a_straight_line_is_straight():
    line = np.stack([np.linspace(0, 9, 10), np.linspace(0, 18, 10)], axis=1)
    curve = spline(line)
    assert np.allclose(curve[:, 1], 2 * curve[:, 0])


def test_ribbon_has_the_requested_width():
    line = np.stack([np.linspace(0, 5, 6), np.zeros(6)], axis=1)
    outline = ribbon(line, 0.5)
    assert outline.shape == (12, 2)
    assert np.allclose(np.abs(outline[:, 1]), 0.25)


def test_ellipse_has_its_radii_along_its_axes():
    outline = ellipse((1.0, 2.0), (3.0, 1.0), degrees=90, points=4)
    assert np.allclose(outline, [[1, 5], [0, 2], [1, -1], [2, 2]])


@pytest.mark.parametrize(
    ("aspect", "shape_HW"), [(1.0, (200, 200)), (1.25, (160, 200)), (0.8, (200, 160))]
)
def test_camera_maps_its_center_and_scale(aspect, shape_HW):
    camera = Camera(field=40, aspect=aspect, center=(1.0, 2.0), degrees=0)
    assert camera.shape(200) == shape_HW
    surface = Surface(camera, shape_HW)
    middle, right = surface.pixels(np.array([[1.0, 2.0], [11.0, 2.0]]))
    assert np.allclose(middle, [shape_HW[1] / 2 - 0.5, shape_HW[0] / 2 - 0.5])
    assert np.isclose(right[0] - middle[0], 10 * min(shape_HW) / 40)


@pytest.mark.parametrize("size", [64, 256, 1024])
def test_filled_area_exceeds_the_outline_by_half_a_pixel(size):
    surface = Surface(Camera(field=20, aspect=1, center=(0, 0), degrees=7), (size, size))
    filled = surface.fill([ellipse((0.3, -0.2), (4.0, 2.0), 20, points=64)]).sum() / 255
    area, perimeter = np.pi * 8, 19.38
    assert filled / surface.pixels_per_cm**2 == pytest.approx(
        area + 0.5 * perimeter / surface.pixels_per_cm, rel=0.05
    )


def test_line_thinner_than_a_pixel_is_fainter():
    surface = Surface(Camera(field=32, aspect=1, center=(0, 0)), (64, 64))
    line = [np.array([[-8.0, 0.1], [8.0, 0.1]])]
    assert surface.stroke(line, 0.1).sum() == pytest.approx(
        0.2 / 0.4 * surface.stroke(line, 0.2).sum(), rel=0.05
    )


# Images


def test_image_has_12_bits_and_the_shape_of_its_camera():
    for patient in World(0).patients(4):
        for view in patient.studies[0].views:
            image_HW = draw(view, 160)
            assert image_HW.shape == view.camera.shape(160)
            assert max(image_HW.shape) == 160
            assert image_HW.dtype == np.uint16
            assert image_HW.max() <= 4095
            assert np.percentile(image_HW, 95) - np.percentile(image_HW, 5) > 1000  # not flat


def test_size_below_minimum_raises():
    with raises(ConfigError, "out_of_range", "size"):
        draw(view_with(), 15)


def test_drawing_is_reproducible():
    view = World(5).patient(1).studies[0].views[0]
    assert np.array_equal(draw(view, 200), draw(view, 200))
    again = World(5).patient(1).studies[0].views[0]
    assert np.array_equal(draw(again, 200), draw(view, 200))


@pytest.mark.parametrize("position", ["PA", "LATERAL"])
def test_images_agree_between_sizes(position):
    view = view_with(
        sample_finding("Edema", 0.7), sample_finding("Lung Lesion", 0.7), position=position
    )
    large = cv2.resize(
        draw(view, 768).astype(np.float32),
        view.camera.shape(128)[::-1],
        interpolation=cv2.INTER_AREA,
    )
    small = draw(view, 128).astype(np.float32)
    assert np.corrcoef(large.ravel(), small.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("label", RENDERED_LABELS)
def test_finding_changes_the_image_inside_its_mask(label):
    """Views with and without the finding differ mainly inside its mask."""
    for seed in range(2):
        finding = sample_finding(label, 0.9, seed)
        normal, diseased = view_with(), view_with(finding)
        # A comparison of pixels needs the same chest.
        if label in ("Cardiomegaly", "Enlarged Cardiomediastinum"):
            inside = masks(diseased, 256)[label]
        else:
            diseased = dataclasses.replace(diseased, chest=normal.chest)
            inside = masks(diseased, 256)[label]
        change = np.abs(draw(diseased, 256).astype(float) - draw(normal, 256))
        near = cv2.dilate(inside.astype(np.uint8), np.ones((9, 9))) > 0
        assert change[inside].mean() > 4 * change[~near].mean(), label


@pytest.mark.parametrize(
    "label", ["Pleural Effusion", "Consolidation", "Atelectasis", "Lung Lesion", "Edema"]
)
def test_opacities_are_brighter(label):
    normal = view_with()
    diseased = dataclasses.replace(view_with(sample_finding(label, 0.8)), chest=normal.chest)
    inside = masks(diseased, 256)[label]
    assert draw(diseased, 256)[inside].mean() > draw(normal, 256)[inside].mean() + 150


def test_pneumothorax_is_darker():
    normal = view_with()
    diseased = dataclasses.replace(view_with(make_finding("Pneumothorax", 0.7)), chest=normal.chest)
    inside = masks(diseased, 256)["Pneumothorax"]
    assert draw(diseased, 256)[inside].mean() < draw(normal, 256)[inside].mean() - 50


@pytest.mark.parametrize("label", ["Pleural Effusion", "Pneumothorax", "Cardiomegaly"])
def test_extent_increases_the_area(label):
    areas = [
        masks(view_with(make_finding(label, extent)), 256)[label].sum()
        for extent in (0.15, 0.5, 0.85)
    ]
    assert areas[0] < areas[1] < areas[2]


def test_cardiomegaly_increases_the_cardiothoracic_ratio():
    for extent, least, most in ((0.02, 0.46, 0.53), (0.5, 0.54, 0.62), (1.0, 0.62, 0.72)):
        chest = view_with(make_finding("Cardiomegaly", extent)).chest
        assert least < chest.heart_ratio < most
    assert view_with().chest.heart_ratio < 0.5


@pytest.mark.parametrize("label", ["Pleural Effusion", "Pneumothorax", "Consolidation"])
def test_right_side_is_on_the_left_of_the_image(label):
    for side in ("right", "left"):
        view = view_with(make_finding(label, 0.6, side=side, s=0.5, t=0.76))
        columns = np.nonzero(masks(view, 256)[label])[1]
        middle = Surface(view.camera, view.camera.shape(256)).pixels(np.array([[0.0, 0.0]]))[0, 0]
        assert (columns.mean() < middle) == (side == "right")


def test_pneumothorax_and_collapse_shift_the_mediastinum():
    assert view_with(make_finding("Pneumothorax", 0.95, "right")).chest.shift > 1
    assert view_with(make_finding("Pneumothorax", 0.95, "left")).chest.shift < -1
    collapse = Part(kind="collapse", side="left", zone="left lower lobe", extent=0.9)
    assert view_with(Finding(label="Atelectasis", parts=(collapse,))).chest.shift > 1


# Ground truth


@pytest.mark.parametrize("size", [96, 512])
def test_boxes_bound_their_masks(size):
    checked = 0
    for patient in World(7).patients(25):
        for view in (view for study in patient.studies for view in study.views):
            height, width = view.camera.shape(size)
            union = masks(view, size)
            for label, mask_HW in union.items():
                assert mask_HW.shape == (height, width)
                assert mask_HW.dtype == bool
                rows, columns = np.nonzero(mask_HW)
                parts = [box for box in boxes(view, size) if box.label == label]
                assert min(box.x for box in parts) == columns.min()
                assert min(box.y for box in parts) == rows.min()
                assert max(box.x + box.width for box in parts) == columns.max() + 1
                assert max(box.y + box.height for box in parts) == rows.max() + 1
                checked += 1
            assert {box.label for box in boxes(view, size)} <= {
                finding.label for finding in view.findings
            }
    assert checked > 100


def test_boxes_scale_with_the_image():
    view = view_with(sample_finding("Consolidation", 0.6), sample_finding("Support Devices", 0.6))
    small, large = boxes(view, 256), boxes(view, 1024)
    assert len(small) == len(large) > 1
    for one, other in zip(small, large, strict=True):
        assert (one.label, one.zone) == (other.label, other.zone)
        assert np.allclose([4 * one.x, 4 * one.y], [other.x, other.y], atol=8)
        assert np.allclose([4 * one.width, 4 * one.height], [other.width, other.height], atol=12)


def test_normal_chest_and_invisible_finding_have_no_boxes():
    assert boxes(view_with()) == []
    assert masks(view_with()) == {}
    assert boxes(view_with(sample_finding("Fracture", 0.9), position="LATERAL")) == []
