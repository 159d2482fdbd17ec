"""The phantom's pictures: what is drawn is where the truth says, at any size."""

import dataclasses

import cv2
import numpy as np
import pytest

from medvl.errors import ConfigError
from medvl.phantom import Finding, Part, World, boxes, draw, masks
from medvl.phantom.geometry import Camera, Surface, ellipse, ribbon, spline
from medvl.phantom.population.finding_sites import PART_SAMPLERS
from medvl.phantom.population.findings import DRAWN
from medvl.phantom.population.world import take_view
from medvl.phantom.seeds import generator

CHEST = World(2).patient(4).chest


def view_with(*findings, position="PA", key=(2, 4, 0, 0)):
    """A view of one chest; the same key gives the same patient position, exposure and noise."""
    return take_view(key, position, CHEST, findings)


def sampled(label, extent, seed=0):
    return Finding(label=label, parts=PART_SAMPLERS[label](generator(seed, 5), extent))


def shown(label, extent, side="right", **more):
    kind = {"Pleural Effusion": "fluid", "Pneumothorax": "gas", "Consolidation": "lobar", "Cardiomegaly": "shape"}[
        label
    ]
    zone = f"{side} lower lobe" if kind == "lobar" else ""
    part = Part(kind=kind, side="midline" if kind == "shape" else side, zone=zone, extent=extent, **more)
    return Finding(label=label, parts=(part,))


# Geometry


def test_a_spline_passes_through_its_control_points():
    control = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 1.0], [4.0, 4.0]])
    assert np.allclose(spline(control, samples=5)[::5], control)
    assert np.allclose(spline(control, closed=True, samples=5)[::5], control)
    stacked = spline(np.stack([control, control + 1]), samples=5)
    assert np.allclose(stacked[1], spline(control, samples=5) + 1)


def test_a_spline_keeps_a_straight_line_straight():
    line = np.stack([np.linspace(0, 9, 10), np.linspace(0, 18, 10)], axis=1)
    curve = spline(line)
    assert np.allclose(curve[:, 1], 2 * curve[:, 0])


def test_a_ribbon_is_as_wide_as_asked():
    line = np.stack([np.linspace(0, 5, 6), np.zeros(6)], axis=1)
    outline = ribbon(line, 0.5)
    assert outline.shape == (12, 2)
    assert np.allclose(np.abs(outline[:, 1]), 0.25)


def test_an_ellipse_has_its_radii_along_its_axes():
    outline = ellipse((1.0, 2.0), (3.0, 1.0), degrees=90, points=4)
    assert np.allclose(outline, [[1, 5], [0, 2], [1, -1], [2, 2]])


@pytest.mark.parametrize(("aspect", "shape_HW"), [(1.0, (200, 200)), (1.25, (160, 200)), (0.8, (200, 160))])
def test_the_camera_looks_at_its_center_with_its_scale(aspect, shape_HW):
    camera = Camera(field=40, aspect=aspect, center=(1.0, 2.0), degrees=0)
    assert camera.shape(200) == shape_HW
    surface = Surface(camera, shape_HW)
    middle, right = surface.pixels(np.array([[1.0, 2.0], [11.0, 2.0]]))
    assert np.allclose(middle, [shape_HW[1] / 2 - 0.5, shape_HW[0] / 2 - 0.5])
    assert np.isclose(right[0] - middle[0], 10 * min(shape_HW) / 40)


@pytest.mark.parametrize("size", [64, 256, 1024])
def test_filled_area_is_that_of_the_outline_and_half_a_pixel_around(size):
    surface = Surface(Camera(field=20, aspect=1, center=(0, 0), degrees=7), (size, size))
    filled = surface.fill([ellipse((0.3, -0.2), (4.0, 2.0), 20, points=64)]).sum() / 255
    area, perimeter = np.pi * 8, 19.38
    assert filled / surface.pixels_per_cm**2 == pytest.approx(area + 0.5 * perimeter / surface.pixels_per_cm, rel=0.05)


def test_a_line_thinner_than_a_pixel_grows_fainter():
    surface = Surface(Camera(field=32, aspect=1, center=(0, 0)), (64, 64))
    line = [np.array([[-8.0, 0.1], [8.0, 0.1]])]
    assert surface.stroke(line, 0.1).sum() == pytest.approx(0.2 / 0.4 * surface.stroke(line, 0.2).sum(), rel=0.05)


# Pictures


def test_an_image_has_twelve_bits_and_the_shape_of_its_camera():
    for patient in World(0).patients(4):
        for view in patient.studies[0].views:
            image_HW = draw(view, 160)
            assert image_HW.shape == view.camera.shape(160)
            assert max(image_HW.shape) == 160
            assert image_HW.dtype == np.uint16
            assert image_HW.max() <= 4095
            assert np.percentile(image_HW, 95) - np.percentile(image_HW, 5) > 1000  # not flat


def test_a_tiny_size_is_refused():
    with pytest.raises(ConfigError, match="size must be 16 pixels or more, not 15"):
        draw(view_with(), 15)


def test_drawing_twice_gives_the_same_pixels():
    view = World(5).patient(1).studies[0].views[0]
    assert np.array_equal(draw(view, 200), draw(view, 200))
    again = World(5).patient(1).studies[0].views[0]
    assert np.array_equal(draw(again, 200), draw(view, 200))


@pytest.mark.parametrize("position", ["PA", "LATERAL"])
def test_every_size_shows_the_same_chest(position):
    view = view_with(sampled("Edema", 0.7), sampled("Lung Lesion", 0.7), position=position)
    large = cv2.resize(draw(view, 768).astype(np.float32), view.camera.shape(128)[::-1], interpolation=cv2.INTER_AREA)
    small = draw(view, 128).astype(np.float32)
    assert np.corrcoef(large.ravel(), small.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("label", DRAWN)
def test_a_finding_changes_the_picture_where_the_truth_marks_it(label):
    """The same view with and without: what differs by more than the noise lies inside the mask, or is pushed by it."""
    for seed in range(2):
        finding = sampled(label, 0.9, seed)
        healthy, ill = view_with(), view_with(finding)
        # The rest of the chest must stay in place for a comparison of pixels.
        if label in ("Cardiomegaly", "Enlarged Cardiomediastinum"):
            inside = masks(ill, 256)[label]
        else:
            ill = dataclasses.replace(ill, chest=healthy.chest)
            inside = masks(ill, 256)[label]
        change = np.abs(draw(ill, 256).astype(float) - draw(healthy, 256))
        near = cv2.dilate(inside.astype(np.uint8), np.ones((9, 9))) > 0
        assert change[inside].mean() > 4 * change[~near].mean(), label


@pytest.mark.parametrize("label", ["Pleural Effusion", "Consolidation", "Atelectasis", "Lung Lesion", "Edema"])
def test_what_fills_the_lung_is_brighter(label):
    healthy = view_with()
    ill = dataclasses.replace(view_with(sampled(label, 0.8)), chest=healthy.chest)
    inside = masks(ill, 256)[label]
    assert draw(ill, 256)[inside].mean() > draw(healthy, 256)[inside].mean() + 150


def test_free_gas_is_darker():
    healthy = view_with()
    ill = dataclasses.replace(view_with(shown("Pneumothorax", 0.7)), chest=healthy.chest)
    inside = masks(ill, 256)["Pneumothorax"]
    assert draw(ill, 256)[inside].mean() < draw(healthy, 256)[inside].mean() - 50


@pytest.mark.parametrize("label", ["Pleural Effusion", "Pneumothorax", "Cardiomegaly"])
def test_worse_findings_are_larger(label):
    areas = [masks(view_with(shown(label, extent)), 256)[label].sum() for extent in (0.15, 0.5, 0.85)]
    assert areas[0] < areas[1] < areas[2]


def test_cardiomegaly_means_a_ratio_above_one_half():
    for extent, least, most in ((0.02, 0.46, 0.53), (0.5, 0.54, 0.62), (1.0, 0.62, 0.72)):
        chest = view_with(shown("Cardiomegaly", extent)).chest
        assert least < chest.heart_ratio < most
    assert view_with().chest.heart_ratio < 0.5


@pytest.mark.parametrize("label", ["Pleural Effusion", "Pneumothorax", "Consolidation"])
def test_the_right_side_is_on_the_left_of_the_image(label):
    for side in ("right", "left"):
        view = view_with(shown(label, 0.6, side=side, s=0.5, t=0.76))
        columns = np.nonzero(masks(view, 256)[label])[1]
        middle = Surface(view.camera, view.camera.shape(256)).pixels(np.array([[0.0, 0.0]]))[0, 0]
        assert (columns.mean() < middle) == (side == "right")


def test_a_large_pneumothorax_pushes_the_heart_and_collapse_pulls_it():
    assert view_with(shown("Pneumothorax", 0.95, "right")).chest.shift > 1
    assert view_with(shown("Pneumothorax", 0.95, "left")).chest.shift < -1
    collapse = Part(kind="collapse", side="left", zone="left lower lobe", extent=0.9)
    assert view_with(Finding(label="Atelectasis", parts=(collapse,))).chest.shift > 1


# Truth


@pytest.mark.parametrize("size", [96, 512])
def test_boxes_fit_their_masks_and_the_image(size):
    checked = 0
    for patient in World(7).patients(25):
        for view in (view for study in patient.studies for view in study.views):
            height, width = view.camera.shape(size)
            united = masks(view, size)
            for label, mask_HW in united.items():
                assert mask_HW.shape == (height, width)
                assert mask_HW.dtype == bool
                rows, columns = np.nonzero(mask_HW)
                parts = [box for box in boxes(view, size) if box.label == label]
                assert min(box.x for box in parts) == columns.min()
                assert min(box.y for box in parts) == rows.min()
                assert max(box.x + box.width for box in parts) == columns.max() + 1
                assert max(box.y + box.height for box in parts) == rows.max() + 1
                checked += 1
            assert {box.label for box in boxes(view, size)} <= {finding.label for finding in view.findings}
    assert checked > 100


def test_boxes_scale_with_the_image():
    view = view_with(sampled("Consolidation", 0.6), sampled("Support Devices", 0.6))
    small, large = boxes(view, 256), boxes(view, 1024)
    assert len(small) == len(large) > 1
    for one, other in zip(small, large, strict=True):
        assert (one.label, one.zone) == (other.label, other.zone)
        assert np.allclose([4 * one.x, 4 * one.y], [other.x, other.y], atol=8)
        assert np.allclose([4 * one.width, 4 * one.height], [other.width, other.height], atol=12)


def test_a_healthy_chest_and_a_hidden_finding_have_no_boxes():
    assert boxes(view_with()) == []
    assert masks(view_with()) == {}
    assert boxes(view_with(sampled("Fracture", 0.9), position="LATERAL")) == []
