"""Encoded volumes: exact round trips, slices alone, damaged and hostile bytes; RGB slices."""

import struct
import zlib

import numpy as np
import pytest
import zstandard
from helpers.errors import raises
from helpers.volume_files import canonical

from medvl.data.volumes.codec import decode_volume, encode_volume, read_volume_header
from medvl.data.volumes.resampling import rgb_slices
from medvl.data.volumes.volume import Volume, VolumeLimits
from medvl.errors import ConfigError, VolumeError

HU = canonical((37, 6, 5))
DATA = encode_volume(HU)


@pytest.mark.parametrize("chunk", [1, 16, 37, 100])
@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_round_trips_are_exact(chunk, dtype):
    values = HU.astype(dtype)
    decoded = decode_volume(encode_volume(values, chunk=chunk))
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, values)
    edges = np.array([[[-32768, 32767, -1, 0, 255, 256]]]).astype(dtype)
    np.testing.assert_array_equal(decode_volume(encode_volume(edges)), edges)


@pytest.mark.parametrize("part", [slice(0, 16), slice(15, 17), slice(-3, None), slice(5, 5)])
def test_slices_equal_those_of_the_whole(part):
    np.testing.assert_array_equal(decode_volume(DATA, part), HU[part])


def test_only_the_chunks_of_the_slices_are_read():
    header = read_volume_header(DATA)
    assert header.shape == (37, 6, 5)
    offset, size, _ = header.chunks[2]
    broken = DATA[:offset] + bytes(size)
    np.testing.assert_array_equal(decode_volume(broken, slice(0, 32)), HU[:32])
    with raises(VolumeError, "mismatch"):
        decode_volume(broken, slice(31, 33))


def test_bytes_apart_are_smaller_than_plain_ones():
    smooth = (np.cumsum(np.random.default_rng(0).normal(0, 3, (16, 32, 32)), 2) - 900).astype(
        np.int16
    )
    assert len(encode_volume(smooth)) < len(zstandard.compress(smooth.tobytes(), 3))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "truncated"),
        (DATA[:25], "truncated"),
        (DATA[:-1], "truncated"),
        (DATA + b"x", "malformed"),
        (b"JUNK" + DATA[4:], "malformed"),
        (DATA[:4] + b"\x02" + DATA[5:], "version"),
        (DATA[:5] + b"\x09" + DATA[6:], "malformed"),
        (DATA[:6] + b"\0\0" + DATA[8:], "malformed"),
    ],
)
def test_damaged_bytes_are_refused(data, code):
    with raises(VolumeError, code):
        decode_volume(data)


def test_hostile_sizes_are_refused_before_anything_is_unpacked():
    with raises(VolumeError, "too_large", "voxels"):
        decode_volume(DATA, limits=VolumeLimits(voxels=100))
    frame = zstandard.compress(bytes(1 << 20))
    for content, code in ((frame, "malformed"), (b"no frame", "undecodable")):
        head = struct.pack("<4sBBHIII", b"MVOL", 1, 1, 16, 2, 2, 2)
        table = struct.pack("<II", len(content), zlib.crc32(content))
        with raises(VolumeError, code):
            decode_volume(head + table + content)


def test_wrong_arrays_are_refused():
    for values, chunk in ((HU.astype(np.int32), 16), (HU[0], 16), (HU[:0], 16), (HU, 0)):
        with pytest.raises(ValueError, match="expected"):
            encode_volume(values, chunk=chunk)
    with pytest.raises(ValueError, match="step"):
        decode_volume(DATA, slice(0, 10, 2))


def test_rgb_slices_have_a_window_in_each_channel():
    hu_DHW = np.zeros((3, 2, 2), np.int16)
    hu_DHW[1] = [[-1150, 350], [-160, 240]]
    volume = Volume(hu_DHW=hu_DHW, spacing=(1, 1, 1))
    (middle,) = rgb_slices(volume)
    assert middle.dtype == np.uint8
    assert middle[0, 0].tolist() == [0, 0, 0]
    assert middle[0, 1].tolist() == [255, 255, 100]
    assert middle[1, 0].tolist() == [168, 0, 7]
    assert middle[1, 1].tolist() == [236, 255, 80]
    assert rgb_slices(volume, [0, 2, 2]).shape == (3, 2, 2, 3)
    with raises(ConfigError, "out_of_range", "places"):
        rgb_slices(volume, [3])
