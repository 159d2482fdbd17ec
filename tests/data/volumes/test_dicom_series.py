"""DICOM series with known volumes: order, gaps, localizers, rescales, copies, several stacks."""

import numpy as np
import pydicom
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.volume_files import canonical, write_series, write_slice
from pydicom.dataset import Dataset

from medvl.common.untrusted import ANYWHERE
from medvl.data.volumes.dicom_series import read_dicom_series
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.data.volumes.reading import read_original
from medvl.data.volumes.volume import VolumeLimits
from medvl.errors import ConfigError, DicomError, VolumeError

HU = canonical((6, 5, 4))


def test_slices_are_ordered_by_position(tmp_path):
    write_series(tmp_path / "scan" / "a", HU[:3])
    (tmp_path / "scan" / "b").mkdir()
    for index in (3, 4, 5):
        write_slice(
            tmp_path / "scan" / "b" / f"{9 - index}", HU[index], (-10, -20, 100 + 1.5 * index)
        )
    (tmp_path / "scan" / "README").write_text("no DICOM")
    volume = read_dicom_series(tmp_path / "scan")
    assert volume.hu_DHW.dtype == np.int16
    np.testing.assert_array_equal(volume.hu_DHW, HU)
    assert volume.spacing == pytest.approx((1.5, 0.7, 0.8))  # not the thickness of 5
    assert (volume.modality, volume.is_hounsfield, volume.angle) == ("CT", True, 0)
    assert dict(volume.dropped) == {"not_dicom": 1}


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        ((-1, 0, 0, 0, -1, 0), lambda hu: hu[:, ::-1, ::-1]),  # prone: rows to the right and front
        ((1, 0, 0, 0, 0, -1), lambda hu: hu.transpose(1, 0, 2)[::-1]),  # coronal, rows to the feet
        ((0, 1, 0, 0, 0, -1), lambda hu: hu.transpose(1, 2, 0)[::-1, :, ::-1]),  # sagittal
    ],
)
def test_every_orientation_becomes_head_back_left(tmp_path, orientation, turn):
    normal = np.cross(orientation[:3], orientation[3:])
    fields = {
        index: {"ImagePositionPatient": (2.0 * index * normal).tolist()} for index in range(6)
    }
    write_series(tmp_path / "a", HU, fields=fields, ImageOrientationPatient=list(orientation))
    volume = read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(volume.hu_DHW, turn(HU))
    sizes = dict(zip(volume.hu_DHW.shape, volume.spacing, strict=True))
    assert {size: round(step, 3) for size, step in sizes.items()} == {6: 2.0, 5: 0.7, 4: 0.8}


def test_the_slope_of_each_slice_is_applied(tmp_path):
    hu_DHW = np.stack([np.full((4, 4), value) for value in (-1000, -50, 0, 1200)])
    slopes = (2, 0.5, 1, 4)
    fields = {
        index: {"RescaleSlope": slope, "RescaleIntercept": -1024 - index * slope}
        for index, slope in enumerate(slopes)
    }
    write_series(tmp_path / "a", hu_DHW, fields=fields)
    np.testing.assert_array_equal(read_dicom_series(tmp_path / "a").hu_DHW, hu_DHW)


@pytest.mark.parametrize(("modality", "pad"), [("CT", -1024), ("MR", int(HU[:, :, 1:].min()))])
def test_padding_becomes_air_or_the_least_value(tmp_path, modality, pad):
    hu_DHW = np.where(np.arange(4) == 0, -3024, HU).astype(int)
    stored = {
        index: {
            "PixelData": (hu_DHW[index] + 1024).astype("<i2").tobytes(),
            "PixelRepresentation": 1,
            "PixelPaddingValue": -2000,
        }
        for index in range(6)
    }
    write_series(tmp_path / "a", HU, fields=stored, Modality=modality)
    volume = read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(volume.hu_DHW, np.where(np.arange(4) == 0, pad, HU))
    assert volume.is_hounsfield == (modality == "CT")


def test_other_rescales_of_ct_are_no_hounsfield_units(tmp_path):
    write_series(tmp_path / "a", HU, RescaleType="US")
    assert read_dicom_series(tmp_path / "a").is_hounsfield is False
    for path in write_series(tmp_path / "b", HU):
        data = pydicom.dcmread(path)
        del data.RescaleIntercept
        data.save_as(path)
    assert read_dicom_series(tmp_path / "b").is_hounsfield is False


def test_missing_and_uneven_slices_are_a_gap(tmp_path):
    paths = write_series(tmp_path / "a", HU)
    paths[4].unlink()
    with raises(VolumeError, "gap", names="slices 3 and 4 are 3.00 mm apart, expected 1.50 mm"):
        read_dicom_series(tmp_path / "a")
    with raises(VolumeError, "gap"):
        read_dicom_series(tmp_path / "a", gaps="resample")
    with raises(ConfigError, "out_of_range", "gaps"):
        read_dicom_series(tmp_path / "a", gaps="split")


def test_slices_of_nearly_even_distance_are_resampled(tmp_path):
    places = np.array([0, 2.0, 4.1, 6.0, 7.9, 10.0])
    hu_DHW = np.broadcast_to(np.rint(100 * places)[:, None, None], (6, 3, 3))
    fields = {index: {"ImagePositionPatient": [0, 0, z]} for index, z in enumerate(places.tolist())}
    write_series(tmp_path / "a", hu_DHW, fields=fields)
    with raises(VolumeError, "gap"):
        read_dicom_series(tmp_path / "a")
    volume = read_dicom_series(tmp_path / "a", gaps="resample")
    assert volume.spacing[0] == pytest.approx(2)
    assert volume.hu_DHW[:, 1, 1].tolist() == [0, 200, 400, 600, 800, 1000]


def test_what_is_no_slice_of_the_scan_is_dropped_and_counted(tmp_path):
    write_series(tmp_path / "a", HU)
    sagittal = {"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}
    write_slice(tmp_path / "a" / "x1", HU[0], (0, 0, 0), **sagittal)
    write_slice(
        tmp_path / "a" / "x2", HU[0], (0, 0, 0), ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]
    )
    write_slice(tmp_path / "a" / "x3", HU[0], (0, 0, 0), ImageType=["DERIVED", "SECONDARY", "MPR"])
    screenshot = image_dataset(np.zeros((5, 4), np.uint8), Modality="OT")
    write_dataset(tmp_path / "a" / "x4", screenshot)
    report = image_dataset(np.zeros((5, 4), np.uint8), PixelData=None)
    write_dataset(tmp_path / "a" / "x5", report)
    write_slice(tmp_path / "a" / "x6", HU[2], (-10, -20, 103.0))
    volume = read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(volume.hu_DHW, HU)
    assert dict(volume.dropped) == {
        "localizer": 2,
        "derived": 1,
        "no_position": 1,
        "no_pixels": 1,
        "duplicate": 1,
    }


def test_different_slices_at_one_place_are_a_conflict(tmp_path):
    write_series(tmp_path / "a", HU)
    write_slice(tmp_path / "a" / "x", HU[2] + 1, (-10, -20, 103.0))
    with raises(VolumeError, "conflict"):
        read_dicom_series(tmp_path / "a")


@pytest.mark.parametrize(
    "field", ["AcquisitionNumber", "TemporalPositionIdentifier", "ContentTime", "EchoNumbers"]
)
def test_phases_of_one_series_are_stacks(tmp_path, field):
    write_series(tmp_path / "a", HU, **{field: "100000"})
    other = HU[:4] + 5
    write_series(tmp_path / "a" / "b", other, **{field: "200000"})
    with raises(VolumeError, "conflict", "stack", names="6, 4"):
        read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(read_dicom_series(tmp_path / "a", stack=0).hu_DHW, HU)
    np.testing.assert_array_equal(read_dicom_series(tmp_path / "a", stack=1).hu_DHW, other)
    with raises(VolumeError, "not_found", "stack"):
        read_dicom_series(tmp_path / "a", stack=2)


def test_series_in_one_folder_are_stacks(tmp_path):
    write_series(tmp_path / "a", HU, Modality="MR")  # no Hounsfield units
    write_series(tmp_path / "a" / "b", HU[:4] + 5, SeriesInstanceUID="1.2.826.2", Modality="MR")
    with raises(VolumeError, "conflict", "stack"):
        read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(read_dicom_series(tmp_path / "a", stack=1).hu_DHW, HU[:4] + 5)
    file, options = VolumeFile(modality="MR"), VolumeOptions(stacks="largest")
    volume = read_original(tmp_path / "a", file, options, ANYWHERE)
    np.testing.assert_array_equal(volume.hu_DHW, HU)
    assert dict(volume.dropped) == {"other_stack": 4}
    assert options.stored() == {**VolumeOptions().stored(), "stacks": "largest"}


def test_series_without_a_modality_have_that_of_the_table(tmp_path):
    write_series(tmp_path / "a", HU, Modality="")
    file = VolumeFile(modality="MR")
    assert read_original(tmp_path / "a", file, VolumeOptions(), ANYWHERE).modality == "MR"


def test_derived_slices_are_read_where_asked(tmp_path):
    write_series(tmp_path / "a", HU, ImageType=["DERIVED", "SECONDARY", "REFORMATTED"])
    with raises(VolumeError, "empty", names="6 derived"):
        read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(read_dicom_series(tmp_path / "a", derived=True).hu_DHW, HU)


def test_the_longest_run_of_slices_is_read(tmp_path):
    """3 slices, a gap, 6 slices, 2 at another distance."""
    hu_DHW = canonical((11, 6, 7))
    places = [0, 1, 2, 80, 81, 82, 83, 84, 85, 87, 89]
    for index, place in enumerate(places):
        write_slice(tmp_path / f"{index}.dcm", hu_DHW[index], (0.0, 0.0, float(place)))
    with raises(VolumeError, "gap", names="78.00 mm"):
        read_dicom_series(tmp_path)
    volume = read_dicom_series(tmp_path, gaps="longest")
    np.testing.assert_array_equal(volume.hu_DHW, hu_DHW[3:9])
    assert volume.spacing == pytest.approx((1, 0.7, 0.8))
    assert volume.dropped == {"beyond_gap": 5}
    whole = tmp_path / "whole"
    write_series(whole, hu_DHW)
    volume = read_dicom_series(whole, gaps="longest")
    np.testing.assert_array_equal(volume.hu_DHW, hu_DHW)
    assert volume.dropped == {}
    with raises(ConfigError, "out_of_range", "gaps"):
        read_dicom_series(whole, gaps="all")


def test_gantry_tilt_is_corrected(tmp_path):
    """Each slice lies a row and two columns further than the one before."""
    true_DHW = canonical((4, 12, 15))
    for index in range(4):
        image_HW = true_DHW[index, index : index + 8, 2 * index : 2 * index + 8]
        place = (0.8 * 2 * index, 0.7 * index, 3.0 * index)
        write_slice(tmp_path / f"{index}.dcm", image_HW, place)
    with raises(VolumeError, "tilt"):
        read_dicom_series(tmp_path)
    volume = read_dicom_series(tmp_path, tilt="correct")
    assert volume.spacing == pytest.approx((3, 0.7, 0.8))
    for index in range(4):
        found = volume.hu_DHW[index]
        np.testing.assert_array_equal(
            found[index:, 2 * index :], true_DHW[index, index:8, 2 * index : 8]
        )
        assert (found[:index] == -1024).all()
        assert (found[:, : 2 * index] == -1024).all()


def test_gantry_tilt_is_refused(tmp_path):
    fields = {index: {"ImagePositionPatient": [0, 0.3 * index, 1.5 * index]} for index in range(6)}
    write_series(tmp_path / "a", HU, fields=fields)
    with raises(VolumeError, "tilt", names="11.3 degrees"):
        read_dicom_series(tmp_path / "a")


def test_oblique_slices_are_refused_above_the_limit(tmp_path):
    turn = np.radians(25)
    orientation = [1, 0, 0, 0, float(np.cos(turn)), float(np.sin(turn))]
    normal = np.cross(orientation[:3], orientation[3:])
    fields = {index: {"ImagePositionPatient": (index * normal).tolist()} for index in range(6)}
    write_series(tmp_path / "a", HU, fields=fields, ImageOrientationPatient=orientation)
    with raises(VolumeError, "oblique", "max_oblique"):
        read_dicom_series(tmp_path / "a")
    volume = read_dicom_series(tmp_path / "a", max_oblique=30)
    assert volume.angle == pytest.approx(25, abs=1e-3)
    np.testing.assert_array_equal(volume.hu_DHW, HU)


def test_damaged_files_name_themselves(tmp_path):
    paths = write_series(tmp_path / "a", HU)
    paths[2].write_bytes(paths[2].read_bytes()[:-10])
    with raises(DicomError, "truncated", names=paths[2].name):
        read_dicom_series(tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, "malformed", "ImageOrientationPatient"),
        ({"ImagePositionPatient": [1, 0]}, "malformed", "ImagePositionPatient"),
        ({"PixelSpacing": [0, 1]}, "malformed", "PixelSpacing"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "malformed", "RescaleSlope"),
    ],
)
def test_damaged_geometry_is_refused(tmp_path, fields, code, field):
    write_series(tmp_path / "a", HU)
    slope = {**fields, "PixelData": bytes(40)}
    data = image_dataset(
        np.zeros((5, 4), np.uint16),
        **{
            "Modality": "CT",
            "SeriesInstanceUID": "1.2.826.1",
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "ImagePositionPatient": [-10, -20, 109],
            "PixelSpacing": [0.7, 0.8],
            **slope,
        },
    )
    write_dataset(tmp_path / "a" / "x", data)
    with raises(DicomError, code, field):
        read_dicom_series(tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "dropped"),
    [
        (
            {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "ImagePositionPatient": [0, 0, 0]},
            {"multi_frame": 1},
        ),
        ({"PerFrameFunctionalGroupsSequence": [Dataset()] * 3}, {"no_position": 3}),
    ],
)
def test_frames_without_places_are_dropped(tmp_path, fields, dropped):
    frames = image_dataset(np.zeros((3, 5, 4), np.uint16), NumberOfFrames=3, **fields)
    write_series(tmp_path / "a", HU)
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        write_dataset(tmp_path / folder / "x", frames)
    volume = read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(volume.hu_DHW, HU)
    assert dict(volume.dropped) == dropped
    with raises(VolumeError, "empty", names=f"{sum(dropped.values())} {next(iter(dropped))}"):
        read_dicom_series(tmp_path / "b")


def test_images_of_several_kinds_at_one_place_are_stacks(tmp_path):
    """Magnitude and phase of MR share series, acquisition and echo."""
    kinds = (["ORIGINAL", "PRIMARY", "M"], ["ORIGINAL", "PRIMARY", "P"])
    for number, kind in enumerate(kinds):
        write_series(tmp_path / kind[2], HU + number, ImageType=kind, Modality="MR")
    for number in range(2):
        np.testing.assert_array_equal(read_dicom_series(tmp_path, stack=number).hu_DHW, HU + number)


def test_films_and_colour_beside_slices_are_dropped(tmp_path):
    write_series(tmp_path / "a", HU)
    film = image_dataset(np.zeros((3, 5, 4), np.uint16), NumberOfFrames=3, Modality="CT")
    write_dataset(tmp_path / "a" / "x", film)
    fused = image_dataset(
        np.zeros((5, 4, 3), np.uint8),
        ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
        ImagePositionPatient=[-10, -20, 103],
        PixelSpacing=[0.7, 0.8],
    )
    write_dataset(tmp_path / "a" / "y", fused)
    volume = read_dicom_series(tmp_path / "a")
    np.testing.assert_array_equal(volume.hu_DHW, HU)
    assert dict(volume.dropped) == {"multi_frame": 1, "color": 1}


def test_numbers_that_differ_in_their_last_digits_are_one_stack(tmp_path):
    fields = {
        index: {
            "ImageOrientationPatient": [1, 0.0005 + sign * 1e-8, 0, -0.0005, 1, 0],
            "PixelSpacing": [0.70315 + sign * 1e-8, 0.8],
        }
        for index, sign in enumerate((1, -1, 1, -1, 1, -1))
    }
    write_series(tmp_path / "a", HU, fields=fields)
    np.testing.assert_array_equal(read_dicom_series(tmp_path / "a").hu_DHW, HU)


def test_small_and_large_folders(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_dicom_series(tmp_path / "none")
    (tmp_path / "a").mkdir()
    with raises(VolumeError, "empty", names=str(tmp_path / "a")):
        read_dicom_series(tmp_path / "a")
    write_series(tmp_path / "a", HU[:1])
    with raises(VolumeError, "too_small"):
        read_dicom_series(tmp_path / "a")
    write_series(tmp_path / "a", HU)
    with raises(VolumeError, "too_large", "voxels"):
        read_dicom_series(tmp_path / "a", limits=VolumeLimits(voxels=100))
    with raises(VolumeError, "too_large", "files"):
        read_dicom_series(tmp_path / "a", limits=VolumeLimits(files=5))


def test_links_out_of_the_folder_are_refused(tmp_path):
    write_series(tmp_path / "a", HU)
    secret = write_slice(tmp_path / "other", HU[0], (0, 0, 0))
    (tmp_path / "a" / "x").symlink_to(secret)
    with raises(DicomError, "outside_folder"):
        read_dicom_series(tmp_path / "a")


def test_linked_folders_are_read_once(tmp_path):
    write_series(tmp_path / "a", HU[:4])
    write_slice(tmp_path / "b", HU[4], (-10, -20, 106))
    write_series(tmp_path / "c", HU[:3])
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    np.testing.assert_array_equal(read_dicom_series(tmp_path / "a").hu_DHW, HU[:4])
    (tmp_path / "a" / "out").symlink_to(tmp_path / "c")
    with raises(DicomError, "outside_folder"):
        read_dicom_series(tmp_path / "a")
