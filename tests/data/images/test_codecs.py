"""JPEG and PNG decoding compared with Pillow and with handmade PNGs; damage, bombs and resizing."""

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from helpers.errors import raises
from PIL import Image, ImageOps

from medvl.data.images.codecs import (
    decode_image,
    encode_jpeg,
    encode_png,
    exif_orientation,
    make_upright,
    resize_short_side,
)
from medvl.errors import ImageError


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    """A smooth colour image (120, 90, 3)."""
    small = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    return cv2.resize(small, (90, 120), interpolation=cv2.INTER_CUBIC)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, bits: int, color_type: int, samples: bytes = b"") -> bytes:
    """Return a PNG: signature, IHDR, IDAT, IEND."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(samples))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpeg_decoding_equals_pillow(scene, mode):
    data = saved(Image.fromarray(scene).convert(mode), "JPEG", quality=90)
    reference = Image.open(io.BytesIO(data))
    for color, target in ((False, "L"), (True, "RGB")):
        decoded = decode_image(data, color=color)
        expected = np.asarray(reference.convert("RGB").convert(target))
        assert decoded.dtype == np.uint8
        assert decoded.shape == expected.shape
        assert (
            np.abs(decoded.astype(int) - expected).max() <= 3
        )  # two roundings of a colour conversion


@pytest.mark.parametrize("options", [{"progressive": True}, {"keep_rgb": True}, {"subsampling": 0}])
def test_jpeg_variants_are_decoded(scene, options):
    decoded = decode_image(saved(Image.fromarray(scene), "JPEG", quality=95, **options), color=True)
    assert np.abs(decoded.astype(int) - scene).mean() < 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_png_decoding_equals_pillow(scene, mode):
    image = Image.fromarray(scene).convert(mode)
    data = saved(image, "PNG")
    assert np.array_equal(decode_image(data), np.asarray(image.convert("L")))
    assert np.array_equal(decode_image(data, color=True), np.asarray(image.convert("RGB")))


def test_16_bit_png_is_scaled_to_8_bits():
    ramp = np.arange(65536, dtype=">u2").reshape(256, 256)
    rows = b"".join(b"\0" + row.tobytes() for row in ramp)
    scaled = np.round(np.arange(65536) / 257).reshape(256, 256)
    assert np.array_equal(decode_image(png(256, 256, 16, 0, rows)), scaled)
    assert np.array_equal(
        decode_image(png(256, 256, 16, 0, rows), color=True), np.stack([scaled] * 3, axis=-1)
    )
    rows_rgb = b"".join(b"\0" + np.repeat(row, 3).tobytes() for row in ramp)
    assert np.abs(decode_image(png(256, 256, 16, 2, rows_rgb)).astype(int) - scaled).max() <= 1
    rows_alpha = b"".join(b"\0" + np.repeat(row, 2).tobytes() for row in ramp)
    assert np.abs(decode_image(png(256, 256, 16, 4, rows_alpha)).astype(int) - scaled).max() <= 1


@pytest.mark.parametrize("largest", [255, 1000, 4095, 16383])
@pytest.mark.parametrize("color_type", [0, 2, 4, 6])
def test_16_bit_png_of_fewer_bits_is_scaled_by_them(largest, color_type):
    values = np.linspace(0, largest, 64 * 64).round().astype(">u2").reshape(64, 64)
    full = {255: 255, 1000: 1023, 4095: 4095, 16383: 16383}[largest]
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[color_type]
    samples_HWC = np.repeat(values[:, :, None], channels, axis=2)
    if color_type in (4, 6):
        samples_HWC[:, :, -1] = 65535
    rows = b"".join(b"\0" + row.tobytes() for row in samples_HWC)
    expected = (values * (255 / full)).round()
    for color in (False, True):
        decoded = decode_image(png(64, 64, 16, color_type, rows), color=color).astype(int)
        assert np.abs(decoded - (expected[:, :, None] if color else expected)).max() <= 1
        assert len(np.unique(decoded)) >= 250


def test_16_bit_color_keeps_its_channels():
    samples_HWC = np.zeros((8, 8, 3), ">u2")
    samples_HWC[:] = (4095, 2048, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in samples_HWC)
    assert decode_image(png(8, 8, 16, 2, rows), color=True)[0, 0].tolist() == [255, 128, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientation_equals_pillow(scene, kind, orientation):
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "maker", orientation
    data = saved(Image.fromarray(scene), kind, exif=exif)
    upright = make_upright(decode_image(data, color=True), exif_orientation(data))
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    assert upright.shape == expected.shape
    assert np.abs(upright.astype(int) - expected).max() <= (0 if kind == "PNG" else 3)


def test_damaged_exif_data_are_ignored(scene):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.fromarray(scene), "JPEG", exif=exif)
    start = data.index(b"Exif\0\0") + 6
    for offset, value in ((4, b"\xff\xff\xff\xff"), (8, b"\xff\xff"), (18, b"\xff\xff")):
        damaged = data[: start + offset] + value + data[start + offset + len(value) :]
        assert exif_orientation(damaged) in (1, 6)
    assert exif_orientation(data[: start + 3]) == 1
    assert exif_orientation(saved(Image.fromarray(scene), "JPEG")) == 1


def test_low_bit_depths_are_scaled_to_the_full_range():
    assert decode_image(png(4, 1, 2, 0, bytes([0, 0b00011011]))).tolist() == [[0, 85, 170, 255]]


def test_encoding_round_trip(scene):
    grey = scene[:, :, 0]
    assert np.array_equal(decode_image(encode_png(grey)), grey)
    assert np.array_equal(decode_image(encode_png(scene), color=True), scene)
    assert np.abs(decode_image(encode_jpeg(grey)).astype(int) - grey).mean() < 1
    assert np.abs(decode_image(encode_jpeg(scene), color=True).astype(int) - scene).mean() < 1.5
    assert len(encode_jpeg(scene, 50)) < len(encode_jpeg(scene, 95))
    assert encode_jpeg(grey[:, ::-1]) == encode_jpeg(
        grey[:, ::-1].copy()
    )  # from a view too, and deterministic


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_files_raise(scene, kind):
    data = saved(Image.fromarray(scene), kind)
    for length in (len(data) // 2, len(data) * 9 // 10):
        with raises(ImageError, "truncated", names=kind):
            decode_image(data[:length])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty"),
        (b"\x89PN", "truncated"),
        (b"\xff\xd8", "truncated"),
        (b"\x89PNG\r\n\x1a\n\0\0", "truncated"),
        (b"\xff\xd8\xff\xe0abc", "malformed"),
        (b"GIF89a" + bytes(50), "unknown_format"),
        (bytes(100), "unknown_format"),
        (png(0, 5, 8, 0), "malformed"),
        (png(5, 5, 8, 7, bytes(30)), "malformed"),
        (png(100_000, 100_000, 8, 0), "too_large"),
    ],
)
def test_damaged_files_raise(data, code):
    with raises(ImageError, code):
        decode_image(data)


@pytest.mark.fault("S6")
def test_jpeg_bomb_is_refused_by_its_header(scene):
    data = bytearray(saved(Image.fromarray(scene), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    with raises(ImageError, "too_large", names="65500 x 65500"):
        decode_image(bytes(data))
    with raises(ImageError, "too_large", names="10000"):
        decode_image(saved(Image.fromarray(scene), "JPEG"), max_pixels=10_000)


@pytest.mark.fault("S15")
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_mutated_files_decode_or_raise_image_errors(scene, kind):
    original = saved(Image.fromarray(scene), kind)
    random = np.random.default_rng(0)
    failed = 0
    for _ in range(500):
        data = bytearray(original)
        for _ in range(random.integers(1, 6)):
            start = int(random.integers(len(data)))
            data[start : start + int(random.integers(0, 9))] = random.bytes(
                int(random.integers(0, 9))
            )
        try:
            decoded = decode_image(bytes(data), color=True, max_pixels=1 << 20)
        except ImageError as error:
            failed += error.code in ("truncated", "malformed", "too_large", "unknown_format")
        else:
            assert decoded.dtype == np.uint8
            assert decoded.shape[2] == 3
    assert failed > 100


def test_resize_short_side_shapes(scene):
    assert resize_short_side(scene, 45).shape == (60, 45, 3)
    assert resize_short_side(scene.transpose(1, 0, 2), 45).shape == (45, 60, 3)
    assert resize_short_side(scene[:, :, 0], 45).shape == (60, 45)
    assert resize_short_side(scene, 90) is scene
    assert resize_short_side(scene, 200) is scene
    assert resize_short_side(scene, 180, enlarge=True).shape == (240, 180, 3)
    assert resize_short_side(np.zeros((3, 1000), np.uint8), 1).shape == (1, 333)


def test_shrinking_averages_areas():
    image = np.random.default_rng(0).integers(0, 256, (64, 96), dtype=np.uint8)
    means = image.reshape(16, 4, 24, 4).mean(axis=(1, 3))
    assert (
        np.abs(
            resize_short_side(image, 20) - cv2.resize(image, (30, 20), interpolation=cv2.INTER_AREA)
        ).max()
        == 0
    )
    assert np.abs(resize_short_side(image, 16) - means).max() <= 1  # halved before: rounded twice


def test_halving_large_images_first_changes_little(scene):
    grey_HW = cv2.resize(scene, (1201, 801), interpolation=cv2.INTER_CUBIC)[:, :, 0]
    direct = cv2.resize(grey_HW, (150, 100), interpolation=cv2.INTER_AREA).astype(int)
    shrunk = resize_short_side(grey_HW, 100)
    assert shrunk.shape == direct.shape
    assert abs((shrunk - direct).mean()) < 0.6  # OpenCV rounds halves up
    assert np.abs(shrunk - direct).max() <= 4


@pytest.mark.fault("S6")
def test_jpegs_of_many_scans_are_refused_before_decoding() -> None:
    """Each scan of a progressive JPEG is a pass over all pixels, and costs the file a dozen
    bytes.
    """
    data = saved(Image.fromarray(np.full((1024, 1024), 127, np.uint8)), "JPEG", progressive=True)
    assert decode_image(data).shape == (1024, 1024)
    last = data.rfind(b"\xff\xda")
    with raises(ImageError, "too_large"):
        decode_image(data[:last] + data[last:-2] * 20_000 + data[-2:])
    with raises(ImageError, "too_large"):
        decode_image(data[:2] + b"\xff\xfe\0\2" * 1_000_000 + data[2:])
    plain = saved(Image.fromarray(np.full((64, 64), 127, np.uint8)), "JPEG")
    last = plain.rfind(b"\xff\xda")
    with raises(ImageError, "malformed"):  # the decoder itself takes one scan
        decode_image(plain[:-2] + plain[last:-2] * 20_000 + plain[-2:])
    metadata = (
        b"\xff\xe1" + (2 + 500 * 4).to_bytes(2, "big") + b"\xff\xda\0\2" * 500
    )  # as of an embedded thumbnail
    assert decode_image(data[:2] + metadata + data[2:]).shape == (1024, 1024)
