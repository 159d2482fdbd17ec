"""Enhanced CT and MR: files whose frames are the slices of a volume."""

import dataclasses
import json
import shutil

import numpy as np
import pydicom
import pytest
from helpers.dicom_builder import write_dataset
from helpers.errors import raises
from helpers.volume_files import canonical, write_enhanced
from pydicom.uid import JPEG2000Lossless, JPEGLSLossless, RLELossless

from medvl.common.untrusted import ANYWHERE, InputFolders
from medvl.data import VolumeTransform
from medvl.data.dicom.parser import DicomLimits, open_dicom
from medvl.data.dicom.pixels import PixelLayout, decode_frame
from medvl.data.volumes.codec import decode_volume
from medvl.data.volumes.dicom_series import decode_dicom_series, read_dicom_series
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.data.volumes.reading import encode_stored_volume, read_original
from medvl.data.volumes.volume import VolumeLimits
from medvl.errors import DicomError, VolumeError

HU = canonical((6, 5, 4))
ORDERS = [range(6), range(5, -1, -1), (3, 0, 5, 1, 4, 2)]
TIME = 0x00209128  # TemporalPositionIndex
PLACE = 0x00209057


@pytest.mark.parametrize("order", ORDERS)
def test_frames_are_ordered_by_position(tmp_path, order):
    path = write_enhanced(tmp_path / "a.dcm", HU, order=order, slopes=(1, 0.5, 0.25))
    volume = read_dicom_series(path)
    np.testing.assert_array_equal(volume.hu_DHW, HU)
    assert volume.spacing == pytest.approx((1.5, 0.7, 0.8))
    assert volume.origin == pytest.approx((100, -20, -10))
    assert (volume.modality, volume.is_hounsfield, volume.angle) == ("CT", True, 0)
    assert dict(volume.dropped) == {}
    of_folder = read_dicom_series(tmp_path)
    np.testing.assert_array_equal(of_folder.hu_DHW, volume.hu_DHW)
    uploaded = decode_dicom_series([path.read_bytes()])
    np.testing.assert_array_equal(uploaded.hu_DHW, volume.hu_DHW)


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless, JPEGLSLossless])
@pytest.mark.parametrize("order", ORDERS[1:])
def test_compressed_frames(tmp_path, order, syntax):
    if syntax == JPEG2000Lossless:
        pytest.importorskip("openjpeg")
    if syntax == JPEGLSLossless:
        pytest.importorskip("jpeg_ls")
    hu_DHW = canonical((6, 40, 36))
    path = write_enhanced(tmp_path / "a.dcm", hu_DHW, order=order, syntax=syntax)
    np.testing.assert_array_equal(read_dicom_series(path).hu_DHW, hu_DHW)
    data = pydicom.dcmread(path)
    frames = list(pydicom.encaps.generate_frames(data.PixelData, number_of_frames=6))
    for kwargs in ({"has_bot": False}, {"has_bot": True, "fragments_per_frame": 2}):
        data.PixelData = pydicom.encaps.encapsulate(frames, **kwargs)
        write_dataset(path, data)
        np.testing.assert_array_equal(read_dicom_series(path).hu_DHW, hu_DHW)


def test_late_frames_are_read_without_those_before(tmp_path):
    """A limit of the compressed bytes of one frame holds for each of them, not for all."""
    hu_DHW = canonical((6, 40, 36))
    path = write_enhanced(tmp_path / "a.dcm", hu_DHW, syntax=RLELossless)
    data = pydicom.dcmread(path)
    frames = list(pydicom.encaps.generate_frames(data.PixelData, number_of_frames=6))
    data.PixelData = pydicom.encaps.encapsulate(frames, has_bot=False)
    write_dataset(path, data)
    limits = DicomLimits(encoded_bytes=2 * len(frames[0]), elements=400, frames=6)
    with path.open("rb") as stream:
        file = open_dicom(stream, limits)
        last = decode_frame(file, PixelLayout.from_file(file), 5)
    np.testing.assert_array_equal(last.samples - 1064.0, hu_DHW[5])


def test_shared_and_own_groups(tmp_path):
    """Spacing and direction of each frame, rescale of all; and what only the file states."""
    own = {"PixelSpacing": [0.7, 0.8], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
    none = {"RescaleSlope": None, "RescaleIntercept": None, "RescaleType": None}
    shared = {"PixelSpacing": None, "ImageOrientationPatient": None, "RescaleSlope": 2.0}
    path = write_enhanced(
        tmp_path / "a.dcm",
        HU,
        frames={index: {**own, **none} for index in range(6)},
        shared={**shared, "RescaleIntercept": -2000.0, "RescaleType": "HU"},
    )
    volume = read_dicom_series(path)
    stored = HU.astype(int) + 1024 + 8 * np.arange(6)[:, None, None]
    np.testing.assert_array_equal(volume.hu_DHW, 2 * stored - 2000)
    assert volume.is_hounsfield
    slope = {index: {**none, "RescaleSlope": 0.5} for index in range(6)}  # no intercept
    path = write_enhanced(tmp_path / "b.dcm", HU, frames=slope)
    np.testing.assert_array_equal(read_dicom_series(path).hu_DHW, np.rint(stored / 2))
    assert read_dicom_series(path).is_hounsfield is False
    write_enhanced(
        tmp_path / "c.dcm",
        HU,
        frames=dict.fromkeys(range(6), none),
        shared={"PixelSpacing": None},
        PixelSpacing=[0.3, 0.4],
        RescaleSlope=1,
        RescaleIntercept=-1024,
    )
    volume = read_dicom_series(tmp_path / "c.dcm")
    np.testing.assert_array_equal(volume.hu_DHW, stored - 1024)
    assert volume.spacing == pytest.approx((1.5, 0.3, 0.4))


def test_gaps_and_tilt_and_oblique_frames_are_refused(tmp_path):
    kept = [0, 1, 2, 4, 5]
    path = write_enhanced(tmp_path / "gap.dcm", HU, order=kept)
    with raises(VolumeError, "gap", names="slices 2 and 3 are 3.00 mm apart"):
        read_dicom_series(path)
    longest = read_dicom_series(path, gaps="longest")
    np.testing.assert_array_equal(longest.hu_DHW, HU[:3])
    assert dict(longest.dropped) == {"beyond_gap": 2}
    aside = {index: {"ImagePositionPatient": [0, 0.3 * index, 1.5 * index]} for index in range(6)}
    path = write_enhanced(tmp_path / "tilt.dcm", HU, frames=aside)
    with raises(VolumeError, "tilt", names="11.3 degrees"):
        read_dicom_series(path)
    assert read_dicom_series(path, tilt="correct").hu_DHW.shape == HU.shape
    turn = np.radians(25)
    orientation = [1, 0, 0, 0, float(np.cos(turn)), float(np.sin(turn))]
    normal = np.cross(orientation[:3], orientation[3:])
    along = {index: {"ImagePositionPatient": (index * normal).tolist()} for index in range(6)}
    path = write_enhanced(
        tmp_path / "oblique.dcm", HU, frames=along, shared={"ImageOrientationPatient": orientation}
    )
    with raises(VolumeError, "oblique", "max_oblique"):
        read_dicom_series(path)
    np.testing.assert_array_equal(read_dicom_series(path, max_oblique=30).hu_DHW, HU)


def twice(later):
    """Six slices, and the first four again with other values, at the same places.

    `later` are elements of the groups of these four.
    """
    hu_DHW = np.concatenate([HU, HU[:4] // 2])
    places = {6 + index: [-10.0, -20.0, 100 + 1.5 * index] for index in range(4)}
    frames = {
        index: {"ImagePositionPatient": place, "DimensionIndexValues": [1, index - 5, 1], **later}
        for index, place in places.items()
    }
    return hu_DHW, frames


@pytest.mark.parametrize(
    "later",
    [
        {"DimensionIndexValues": [1, 1, 2]},
        {"TemporalPositionIndex": 2},
        {"FrameAcquisitionNumber": 7},
        {"FrameType": ["DERIVED", "PRIMARY", "AXIAL", "NONE"]},
        {"StackID": "2"},
    ],
)
def test_several_scans_of_one_file_are_stacks(tmp_path, later):
    hu_DHW, frames = twice(later)
    path = write_enhanced(
        tmp_path / "a.dcm",
        hu_DHW,
        order=(9, 3, 0, 6, 7, 1, 2, 8, 5, 4),
        frames=frames,
        dimensions=(0x00209056, PLACE, TIME),
    )
    with raises(VolumeError, "conflict", "stack", names="6, 4"):
        read_dicom_series(path)
    np.testing.assert_array_equal(read_dicom_series(path, stack=0).hu_DHW, HU)
    np.testing.assert_array_equal(read_dicom_series(path, stack=1).hu_DHW, HU[:4] // 2)
    options = VolumeOptions(stacks="largest")
    volume = read_original(path, VolumeFile(), options, ANYWHERE)
    assert dict(volume.dropped) == {"other_stack": 4}


def test_frames_at_one_place_that_nothing_tells_apart_are_a_conflict(tmp_path):
    hu_DHW, frames = twice({})
    dimensions = (0x00209056, PLACE, TIME)
    path = write_enhanced(tmp_path / "a.dcm", hu_DHW, frames=frames, dimensions=dimensions)
    with raises(VolumeError, "conflict", names="neither acquisition"):
        read_dicom_series(path)


def test_two_dimensions_tell_scans_apart(tmp_path):
    """Two echoes of two times: neither alone parts them."""
    times = {
        index: {
            "ImagePositionPatient": [0, 0, 1.5 * (index % 3)],
            "TemporalPositionIndex": 1 + index // 6,
            "DimensionIndexValues": [1, index % 3 + 1, 1 + index // 3 % 2],
        }
        for index in range(12)
    }
    hu_DHW = canonical((12, 5, 4))
    path = write_enhanced(
        tmp_path / "a.dcm", hu_DHW, frames=times, dimensions=(0x00209056, PLACE, 0x00189082)
    )
    for stack in range(4):
        found = read_dicom_series(path, stack=stack).hu_DHW
        np.testing.assert_array_equal(found, hu_DHW[3 * stack : 3 * stack + 3])


def test_parts_of_one_series_and_copies_are_one_volume(tmp_path):
    write_enhanced(tmp_path / "a", HU, order=(5, 1, 3))
    write_enhanced(tmp_path / "b", HU, order=(0, 2, 4))
    np.testing.assert_array_equal(read_dicom_series(tmp_path).hu_DHW, HU)
    shutil.copy(tmp_path / "b", tmp_path / "again")
    volume = read_dicom_series(tmp_path)
    np.testing.assert_array_equal(volume.hu_DHW, HU)
    assert dict(volume.dropped) == {"duplicate": 3}


def test_other_frames_and_files_are_dropped_and_counted(tmp_path):
    frames = {
        0: {"FrameType": ["ORIGINAL", "PRIMARY", "LOCALIZER", "NONE"]},
        1: {"FrameType": ["DERIVED", "PRIMARY", "MPR", "NONE"]},
        2: {"ImagePositionPatient": None},
    }
    write_enhanced(tmp_path / "a", canonical((9, 5, 4)), frames=frames)
    write_enhanced(tmp_path / "mask", canonical((9, 5, 4)), Modality="SEG")
    write_enhanced(tmp_path / "dose", canonical((9, 5, 4)), Modality="RTDOSE")
    volume = read_dicom_series(tmp_path)
    np.testing.assert_array_equal(volume.hu_DHW, canonical((9, 5, 4))[3:])
    assert dict(volume.dropped) == {
        "localizer": 1,
        "derived": 1,
        "no_position": 1,
        "no_scan": 2,
    }


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"frames": {2: {"ImagePositionPatient": [1, 2]}}}, "ImagePositionPatient"),
        ({"shared": {"PixelSpacing": [0, 1]}}, "PixelSpacing"),
        ({"shared": {"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}}, "ImageOrientationPatient"),
        ({"frames": {1: {"RescaleSlope": 0}}}, "RescaleSlope"),
        ({"PerFrameFunctionalGroupsSequence": []}, "PerFrameFunctionalGroupsSequence"),
    ],
)
def test_damaged_groups_are_named(tmp_path, fields, field):
    path = write_enhanced(tmp_path / "a.dcm", HU, **fields)
    with raises(DicomError, "malformed", field, names="a.dcm"):
        read_dicom_series(path)


def test_limits_hold_for_frames(tmp_path):
    path = write_enhanced(tmp_path / "a.dcm", HU)
    with raises(VolumeError, "too_large", "voxels"):
        read_dicom_series(path, limits=VolumeLimits(voxels=100))
    with raises(VolumeError, "too_large", "files"):
        read_dicom_series(path, limits=VolumeLimits(files=5))
    path.write_bytes(path.read_bytes()[:-1])
    with raises(DicomError, "truncated", names="a.dcm"):
        read_dicom_series(path)
    with pytest.raises(FileNotFoundError):
        read_dicom_series(tmp_path / "none.dcm")


def test_values_that_int16_loses_are_refused(tmp_path):
    """Maps of diffusion have slopes of a millionth, uptake of PET goes above 32,767."""
    slope = {index: {"RescaleSlope": 1e-3, "RescaleIntercept": 0} for index in range(6)}
    path = write_enhanced(tmp_path / "a.dcm", HU, frames=slope, Modality="MR")
    with raises(VolumeError, "unsupported", names="multiply them first"):
        read_dicom_series(path)
    slope = {index: {"RescaleSlope": 50.0, "RescaleIntercept": 0} for index in range(6)}
    path = write_enhanced(tmp_path / "b.dcm", HU, frames=slope, Modality="PT")
    with raises(VolumeError, "unsupported", names="divide them first"):
        read_dicom_series(path)


def body(shape=(8, 12, 10)):
    """Soft tissue in air."""
    hu_DHW = np.full(shape, -1000, np.int16)
    hu_DHW[:, 2:-2, 2:-2] = 40 + canonical(shape)[:, 2:-2, 2:-2] // 100
    return hu_DHW


def test_files_are_converted_and_prepared_as_their_folders(tmp_path):
    hu_DHW = body()
    path = write_enhanced(tmp_path / "scan.dcm", hu_DHW, order=range(7, -1, -1))
    folders = InputFolders.of(tmp_path)
    options = (VolumeFile(), VolumeOptions(), folders, {}, "organs")
    stored = encode_stored_volume(path, *options)
    np.testing.assert_array_equal(decode_volume(stored.volume), hu_DHW)
    assert "SECRET" not in json.dumps(stored.fields)
    assert stored.fields["modality"] == "CT"
    with raises(VolumeError, "mismatch", "modality"):
        encode_stored_volume(path, dataclasses.replace(options[0], modality="MR"), *options[1:])
    prepared = VolumeTransform(size=(8, 12, 10))([path, hu_DHW])
    np.testing.assert_array_equal(prepared[0, 0], hu_DHW)
    np.testing.assert_array_equal(prepared[1, 0], hu_DHW)
    (tmp_path / "in").mkdir()
    link = tmp_path / "in" / "scan.dcm"
    link.symlink_to(path)
    with raises(VolumeError, "outside_folder"):
        read_original(link, VolumeFile(), VolumeOptions(), InputFolders.of(tmp_path / "in"))
