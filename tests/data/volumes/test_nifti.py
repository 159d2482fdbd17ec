"""NIfTI files against nibabel's own reading, and refused files."""

import gzip

import nibabel
import numpy as np
import pytest
from helpers.errors import raises
from helpers.volume_files import canonical

from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.volume import Volume, VolumeLimits, check_hounsfield
from medvl.errors import ConfigError, VolumeError


def save(path, array, affine=None, kind=nibabel.Nifti1Image, **fields):
    image = kind(array, np.diag([0.7, 0.8, 2.0, 1]) if affine is None else affine)
    for name, value in fields.items():
        image.header[name] = value
    nibabel.save(image, path)
    return path


def of_nibabel(path):
    """The volume by nibabel alone: LPS, then (z, y, x)."""
    image = nibabel.load(path)
    goal = nibabel.orientations.axcodes2ornt("LPS")
    turned = image.as_reoriented(
        nibabel.orientations.ornt_transform(nibabel.io_orientation(image.affine), goal)
    )
    return turned.get_fdata().transpose(2, 1, 0), turned.header.get_zooms()[::-1]


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LPI", "ASR", "SPL", "PIR"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_every_orientation_equals_nibabel(tmp_path, codes, kind):
    axes = nibabel.orientations.inv_ornt_aff(nibabel.orientations.axcodes2ornt(codes), (4, 5, 6))
    tilt = 0.1  # about 6 degrees: oblique, and still nearest to the same axes
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(tilt), -np.sin(tilt)], [np.sin(tilt), np.cos(tilt)]]
    affine = turn @ np.linalg.inv(axes) @ np.diag([0.7, 0.8, 2.5, 1])
    path = save(tmp_path / "a.nii.gz", canonical((4, 5, 6)), affine, kind)
    volume = read_nifti(path)
    values, spacing = of_nibabel(path)
    assert volume.hu_DHW.dtype == np.int16
    assert volume.hu_DHW.flags.c_contiguous
    np.testing.assert_array_equal(volume.hu_DHW, values)
    np.testing.assert_allclose(volume.spacing, spacing, rtol=1e-6)
    assert volume.angle == pytest.approx(np.degrees(tilt), abs=1e-3)


def test_a_ras_file_is_turned_to_head_back_left(tmp_path):
    array = np.zeros((4, 5, 6), np.int16)
    array[3, 0, 5] = 1  # right, back, head
    volume = read_nifti(save(tmp_path / "a.nii", array))
    assert volume.hu_DHW.shape == (6, 5, 4)
    assert np.argwhere(volume.hu_DHW).tolist() == [[5, 4, 0]]
    assert volume.spacing == pytest.approx((2.0, 0.8, 0.7))


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.uint16, np.int32, np.float32, ">i2", ">f8"]
)
@pytest.mark.parametrize("scaling", [(0, 0), (np.nan, 0), (2, -1024), (0.5, 3)])
def test_stored_types_and_slopes_equal_nibabel(tmp_path, dtype, scaling):
    array = (5 * np.arange(24)).reshape(2, 3, 4).astype(dtype)
    header = nibabel.Nifti1Header(endianness=">" if str(dtype).startswith(">") else "<")
    header.set_data_dtype(array.dtype)
    header.set_data_shape(array.shape)
    header.set_sform(np.eye(4), 1)
    header["scl_slope"], header["scl_inter"] = scaling
    header["magic"] = b"n+1"
    header["vox_offset"] = 352
    path = tmp_path / "a.nii"
    path.write_bytes(header.binaryblock + bytes(4) + array.tobytes(order="F"))
    np.testing.assert_array_equal(
        read_nifti(path).hu_DHW, np.clip(np.rint(of_nibabel(path)[0]), -32768, 32767)
    )


def test_values_are_rounded_and_clipped(tmp_path):
    """Single voxels above the range of int16 are cut, larger parts are refused."""
    array = np.zeros((12, 12, 12), np.float32)
    array[0, 0, :6] = [-1e9, -0.6, 0.4, 1e9, np.nan, np.inf]
    hu_DHW = read_nifti(save(tmp_path / "a.nii", array)).hu_DHW
    assert hu_DHW[:6, -1, -1].tolist() == [-32768, -1, 0, 32767, -1024, -1024]
    array[0, 1, :2] = 40_000
    with raises(VolumeError, "unsupported", names="0.2 % of the values are above 32767"):
        read_nifti(save(tmp_path / "b.nii", array))


def test_qform_units_and_files_without_orientation(tmp_path):
    image = nibabel.Nifti1Image(canonical((3, 4, 5)), None)
    image.header.set_zooms((0.001, 0.002, 0.003))
    image.header.set_xyzt_units("meter")
    nibabel.save(image, tmp_path / "none.nii")
    with raises(VolumeError, "missing", "orientation", names="none.nii"):
        read_nifti(tmp_path / "none.nii")
    told = read_nifti(tmp_path / "none.nii", orientation="LPS")
    assert told.spacing == pytest.approx((3, 2, 1))
    np.testing.assert_array_equal(told.hu_DHW, canonical((3, 4, 5)).T)
    with raises(ConfigError, "out_of_range", "orientation"):
        read_nifti(tmp_path / "none.nii", orientation="LRS")
    image.set_qform(np.diag([-1, -1, 1, 1]), 1)
    nibabel.save(image, tmp_path / "qform.nii")
    np.testing.assert_array_equal(read_nifti(tmp_path / "qform.nii").hu_DHW, told.hu_DHW)


def test_an_sform_against_the_qform_is_a_conflict(tmp_path):
    steps = np.diag([-0.7, -0.8, 2, 1])
    turned = steps.copy()
    turned[0, 2] = 0.2  # 6 degrees, which the qform has at right angles
    mirrored = np.diag([0.7, -0.8, 2, 1])
    for qform, code, is_refused in [
        (steps, 1, False),
        (turned, 1, False),
        (mirrored, 1, True),
        (mirrored, 4, False),  # an sform of a template
        (np.diag([-0.7, -0.8, 3, 1]), 1, True),
    ]:
        image = nibabel.Nifti1Image(canonical(), None)
        image.set_sform(steps, code)
        image.set_qform(qform, 1)
        nibabel.save(image, tmp_path / "a.nii")
        if is_refused:
            with raises(VolumeError, "conflict", "orientation"):
                read_nifti(tmp_path / "a.nii")
        told = read_nifti(tmp_path / "a.nii", orientation="LPS", spacing=(0.7, 0.8, 2))
        np.testing.assert_array_equal(told.hu_DHW, canonical().T)


def test_fractions_that_int16_would_lose_are_refused(tmp_path):
    values = np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4)
    with raises(VolumeError, "unsupported", names="from 0 to 1"):
        read_nifti(save(tmp_path / "a.nii", values))
    assert read_nifti(save(tmp_path / "a.nii", 100 * values)).hu_DHW.max() == 100


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.zeros((2, 3, 4, 2), np.int16), "unsupported"),
        (np.zeros((3, 4), np.int16), "unsupported"),
        (np.zeros((2, 3, 4), np.complex64), "unsupported"),
        (np.zeros((2, 3, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")]), "unsupported"),
    ],
)
def test_other_things_than_one_volume_are_refused(tmp_path, array, code):
    with raises(VolumeError, code, names="a.nii"):
        read_nifti(save(tmp_path / "a.nii", array))


def test_a_fourth_axis_of_one_is_dropped(tmp_path):
    assert read_nifti(save(tmp_path / "a.nii", np.zeros((2, 3, 4, 1), np.int16))).hu_DHW.shape == (
        4,
        3,
        2,
    )


def test_pairs_and_analyze_are_refused(tmp_path):
    nibabel.save(nibabel.Nifti1Pair(canonical(), np.eye(4)), tmp_path / "a.hdr")
    with raises(VolumeError, "unsupported"):
        read_nifti(tmp_path / "a.hdr")


def broken(tmp_path, change):
    path = save(tmp_path / "a.nii.gz", canonical((20, 20, 20)))
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:-4], "truncated"),
        (lambda data: data[:-8] + bytes(8), "malformed"),
        (lambda data: data[:3000] + b"\xff" * 100 + data[3100:], "malformed"),
        (lambda data: gzip.decompress(data)[:4000], "truncated"),
        (lambda data: gzip.decompress(data)[:100], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: b"no volume, but a text", "malformed"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, code):
    with raises(VolumeError, code, names="a.nii.gz"):
        read_nifti(broken(tmp_path, change))


def test_bombs_are_refused_before_they_unpack(tmp_path):
    image = nibabel.Nifti1Image(np.zeros((2, 2, 2), np.int16), np.eye(4))
    image.header.set_data_shape((1000, 1000, 1000))
    bomb = gzip.compress(image.header.binaryblock + bytes(10 << 20))
    (tmp_path / "bomb.nii.gz").write_bytes(bomb)
    with raises(VolumeError, "truncated"):
        read_nifti(tmp_path / "bomb.nii.gz")
    with raises(VolumeError, "too_large", "voxels"):
        read_nifti(tmp_path / "bomb.nii.gz", limits=VolumeLimits(voxels=10**8))
    with raises(VolumeError, "too_large", "file_bytes"):
        read_nifti(tmp_path / "bomb.nii.gz", limits=VolumeLimits(file_bytes=100))


def test_damaged_headers_are_refused(tmp_path):
    path = save(tmp_path / "a.nii", canonical())
    data = path.read_bytes()
    for offset, value in [
        (70, b"\x63\x63"),
        (40, b"\x09\0"),
        (42, b"\xff\xff"),
        (108, b"\0\0\xff\x7f"),
        (280, b"\0\0\xff\x7f"),
    ]:
        path.write_bytes(data[:offset] + value + data[offset + len(value) :])
        with raises(VolumeError, "malformed", names="a.nii"):
            read_nifti(path)


def test_sheared_and_oblique_axes_are_refused(tmp_path):
    shear = np.diag([1.0, 1, 2, 1])
    shear[1, 2] = 0.1
    with raises(VolumeError, "tilt"):
        read_nifti(save(tmp_path / "a.nii", canonical(), shear))
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]]
    path = save(tmp_path / "b.nii", canonical(), turn)
    with raises(VolumeError, "oblique", "max_oblique"):
        read_nifti(path)
    assert read_nifti(path, max_oblique=30).angle == pytest.approx(np.degrees(0.5), abs=1e-3)


def test_header_extensions_are_skipped(tmp_path):
    image = nibabel.Nifti1Image(canonical(), np.diag([-1, -1, 1, 1]))
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"Jane Doe" * 10))
    nibabel.save(image, tmp_path / "a.nii")
    np.testing.assert_array_equal(read_nifti(tmp_path / "a.nii").hu_DHW, canonical().T)


@pytest.mark.parametrize(
    ("shift", "is_refused"), [(0, False), (-1024, True), (-8192, True), (1024, True)]
)
def test_a_second_rescale_is_not_hounsfield(shift, is_refused):
    hu_DHW = np.full((8, 16, 16), -1000)
    hu_DHW[:, 3:13, 3:13] = 40
    volume = Volume(hu_DHW=(hu_DHW + shift).astype(np.int16), spacing=(1, 1, 1))
    if is_refused:
        with raises(VolumeError, "not_hu", names="%"):
            check_hounsfield(volume)
    else:
        check_hounsfield(volume)


@pytest.mark.parametrize("share", [1.0, 0.55, 0.45])
def test_lungs_are_hounsfield(share):
    hu_DHW = np.full((4, 8, 100), 40, np.int16)
    hu_DHW[:, :, : int(share * 100)] = -850  # at 0.5, the median is between lung and tissue
    hu_DHW[:, :, 50] = -450
    check_hounsfield(Volume(hu_DHW=hu_DHW, spacing=(1, 1, 1)))
    if share == 0.55:  # stored values, where lung has those of soft tissue
        with raises(VolumeError, "not_hu"):
            check_hounsfield(Volume(hu_DHW=hu_DHW + np.int16(1024), spacing=(1, 1, 1)))


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_nifti(tmp_path / "none.nii")
    with raises(VolumeError, "not_a_file"):
        read_nifti(tmp_path)
