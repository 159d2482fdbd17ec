"""DICOM file structure: transfer syntaxes, missing parts, kept header fields, and unreadable
files.
"""

import logging
import re
import zlib
from pathlib import Path

import gdcm
import numpy as np
import pydicom
import pytest
from helpers.dicom_builder import element, fragments, image_dataset, layout, raw_file, write_dataset
from helpers.errors import raises
from PIL import Image
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate, encapsulate_extended, generate_frames
from pydicom.pixels import get_decoder
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLSLossless,
    RLELossless,
)

from medvl.data import DicomImage
from medvl.data.dicom.reader import DicomHeader, DicomLimits, read_dicom
from medvl.errors import ConfigError, DicomError

BUNDLED = Path(pydicom.__file__).parent / "data" / "test_files"
DEFLATED_FRAMES = b"1.2.840.10008.1.2.8.1"
WINDOW = {"WindowCenter": 2048, "WindowWidth": 4096, "BitsStored": 12, "HighBit": 11}


@pytest.fixture
def pixels() -> np.ndarray:
    smooth = np.add.outer(np.arange(80) ** 2 // 4, np.arange(71) * 20)
    return (smooth + np.random.default_rng(0).integers(0, 9, smooth.shape)).astype(np.uint16)


@pytest.fixture
def plain(tmp_path, pixels) -> DicomImage:
    return read_dicom(write_dataset(tmp_path / "plain.dcm", image_dataset(pixels, **WINDOW)))


@pytest.mark.parametrize(
    "syntax", [ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian]
)
def test_native_transfer_syntaxes(tmp_path, pixels, plain, syntax):
    data = image_dataset(pixels, **WINDOW)
    data.file_meta.TransferSyntaxUID = syntax
    if syntax == ExplicitVRBigEndian:
        data.PixelData = pixels.byteswap().tobytes()
    image = read_dicom(write_dataset(tmp_path / "a.dcm", data))
    assert np.array_equal(image.pixels_HW, plain.pixels_HW)
    assert image.header.transfer_syntax == syntax


@pytest.mark.parametrize("frame", range(3))
def test_big_endian_bytes_written_as_words(tmp_path, frame):
    frames = np.random.default_rng(0).integers(
        0, 256, (3, 5, 3), dtype=np.uint8
    )  # an odd number of bytes
    data = image_dataset(
        frames,
        NumberOfFrames=3,
        PixelData=np.frombuffer(frames.tobytes() + b"\0", "u2").byteswap().tobytes(),
    )
    data["PixelData"].VR = "OW"
    data.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    path = write_dataset(tmp_path / "a.dcm", data)
    assert np.array_equal(read_dicom(path, frame=frame).pixels_HW, frames[frame])


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless, JPEGLSLossless])
@pytest.mark.parametrize("signed", [False, True])
def test_lossless_compression(tmp_path, pixels, syntax, signed):
    if signed:
        pixels = pixels.astype(np.int16) - 1000
    data = image_dataset(np.stack([pixels, pixels[::-1]]), NumberOfFrames=2, **WINDOW)
    plain = write_dataset(tmp_path / "plain.dcm", data)
    data.compress(syntax)
    packed = write_dataset(tmp_path / "packed.dcm", data)
    for frame in range(2):
        assert np.array_equal(
            read_dicom(packed, frame=frame).pixels_HW, read_dicom(plain, frame=frame).pixels_HW
        )


@pytest.mark.parametrize("signed", [False, True])
def test_gdcm_decodes_jpeg_ls_where_pyjpegls_is_missing(tmp_path, pixels, signed):
    if signed:
        pixels = pixels.astype(np.int16) - 1000
    data = image_dataset(pixels, **WINDOW)
    plain = read_dicom(write_dataset(tmp_path / "plain.dcm", data))
    data.compress(JPEGLSLossless)
    packed = write_dataset(tmp_path / "packed.dcm", data)
    decoder = get_decoder(JPEGLSLossless)
    decoder.remove_plugin("pyjpegls")
    try:
        assert np.array_equal(read_dicom(packed).pixels_HW, plain.pixels_HW)
    finally:
        decoder.add_plugin("pyjpegls", ("pydicom.pixels.decoders.pyjpegls", "_decode_frame"))


@pytest.mark.parametrize("fragments_per_frame", [1, 3])
@pytest.mark.parametrize("table", ["none", "basic", "extended"])
def test_frames_in_fragments_with_and_without_offset_tables(
    tmp_path, pixels, fragments_per_frame, table
):
    data = image_dataset(
        np.stack([pixels, pixels[::-1], pixels[:, ::-1]]), NumberOfFrames=3, **WINDOW
    )
    plain = write_dataset(tmp_path / "plain.dcm", data)
    data.compress(JPEG2000Lossless)
    frames = list(generate_frames(data.PixelData, number_of_frames=3))
    if table == "extended":
        data.PixelData, data.ExtendedOffsetTable, data.ExtendedOffsetTableLengths = (
            encapsulate_extended(frames)
        )
    else:
        data.PixelData = encapsulate(
            frames, fragments_per_frame=fragments_per_frame, has_bot=table == "basic"
        )
    data["PixelData"].is_undefined_length = True
    packed = write_dataset(tmp_path / "packed.dcm", data)
    for frame in range(3):
        assert np.array_equal(
            read_dicom(packed, frame=frame).pixels_HW, read_dicom(plain, frame=frame).pixels_HW
        )


def test_deflated_frames(tmp_path, pixels):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    frame = packer.compress(pixels.tobytes()) + packer.flush()
    plain = raw_file(
        b"1.2.840.10008.1.2.1", layout(80, 71) + element(0x7FE00010, b"OW", pixels.tobytes())
    )
    for name, data in (
        ("plain", plain),
        ("packed", raw_file(DEFLATED_FRAMES, layout(80, 71) + fragments(frame))),
    ):
        (tmp_path / f"{name}.dcm").write_bytes(data)
    packed = read_dicom(tmp_path / "packed.dcm")
    assert np.array_equal(packed.pixels_HW, read_dicom(tmp_path / "plain.dcm").pixels_HW)
    for damaged, code in ((frame[:-50], "truncated"), (b"no deflated data", "malformed")):
        (tmp_path / "a.dcm").write_bytes(
            raw_file(DEFLATED_FRAMES, layout(80, 71) + fragments(damaged))
        )
        with raises(DicomError, code):
            read_dicom(tmp_path / "a.dcm")


def test_jpeg_lossless_of_12_bits(tmp_path, pixels, plain):
    path = tmp_path / "plain.dcm"
    reader, change, writer = (
        gdcm.ImageReader(),
        gdcm.ImageChangeTransferSyntax(),
        gdcm.ImageWriter(),
    )
    reader.SetFileName(str(path))
    assert reader.Read()
    change.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.JPEGLosslessProcess14_1))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer.SetFileName(str(tmp_path / "packed.dcm"))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    assert writer.Write()
    image = read_dicom(tmp_path / "packed.dcm")
    assert image.header.transfer_syntax == "1.2.840.10008.1.2.4.70"
    assert np.array_equal(image.pixels_HW, plain.pixels_HW)


@pytest.mark.parametrize("adobe", [False, True])
@pytest.mark.parametrize("photometric", ["MONOCHROME2", "MONOCHROME1", "YBR_FULL_422", "RGB"])
def test_jpeg_of_8_bits(tmp_path, photometric, adobe):
    scene = np.add.outer(np.arange(48) * 2, np.arange(40) * 3).astype(np.uint8)
    color = not photometric.startswith("MONO")
    samples = np.stack([scene, 255 - scene, scene // 2], axis=-1) if color else scene
    grey = np.asarray(Image.fromarray(samples).convert("L")).astype(int)
    encoded = tmp_path / "a.jpg"
    Image.fromarray(samples).save(encoded, quality=95, keep_rgb=photometric == "RGB")
    jpeg = encoded.read_bytes()
    if (
        photometric == "RGB" and not adobe
    ):  # remove the marker, so that only the DICOM header states RGB
        jpeg = re.sub(rb"\xff\xee\x00\x0eAdobe.{7}", b"", jpeg, flags=re.DOTALL)
    elif adobe and photometric != "RGB":
        mark = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([1 if color else 0])
        jpeg = jpeg[:2] + mark + jpeg[20:]  # in place of the JFIF mark
    data = image_dataset(samples, PhotometricInterpretation=photometric)
    data.PixelData = encapsulate([jpeg])
    data["PixelData"].is_undefined_length = True
    data.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    image = read_dicom(write_dataset(tmp_path / "a.dcm", data))
    expected = 255 - grey if photometric == "MONOCHROME1" else grey
    assert np.abs(image.pixels_HW - expected).mean() < 2
    assert np.abs(image.pixels_HW - expected).max() < 12


def test_missing_codec_raises_with_install_command():
    if "pylibjpeg" in get_decoder(JPEGExtended12Bit).available_plugins:
        assert read_dicom(BUNDLED / "JPGExtended.dcm").pixels_HW.shape == (1024, 256)
        return
    with raises(DicomError, "no_codec", names='pip install "medvl[gpl-codecs]"'):
        read_dicom(BUNDLED / "JPGExtended.dcm")


def test_files_without_preamble_or_meta_information_are_read(tmp_path, pixels, plain):
    content = (tmp_path / "plain.dcm").read_bytes()
    body = content[content.index(b"\x08\0\x16\0UI") :]
    data = image_dataset(pixels, **WINDOW)
    data.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    implicit = write_dataset(tmp_path / "implicit.dcm", data).read_bytes()
    variants = {
        "no_preamble": content[132:],
        "no_meta": body,
        "no_meta_implicit": implicit[implicit.index(b"\x08\0\x16\0\x1c") :],
        "no_syntax": bytes(128) + b"DICM" + body,
        "wrong_syntax": raw_file(b"1.2.840.10008.1.2", body),
    }
    for name, data in variants.items():
        (tmp_path / f"{name}.dcm").write_bytes(data)
        image = read_dicom(tmp_path / f"{name}.dcm")
        assert np.array_equal(image.pixels_HW, plain.pixels_HW), name


def test_header_fields(tmp_path, pixels):
    fields = {
        "Modality": "CR",
        "ViewPosition": "PA",
        "BodyPartExamined": "CHEST ",
        "ImageLaterality": "U",
        "PatientSex": "F",
        "PatientAge": "093Y",
        "PixelSpacing": [0.139, 0.140],
        "BurnedInAnnotation": "NO",
    }
    header = read_dicom(
        write_dataset(tmp_path / "a.dcm", image_dataset(pixels, **WINDOW, **fields))
    ).header
    assert header == DicomHeader(
        rows=80,
        columns=71,
        frames=1,
        bits_stored=12,
        photometric_interpretation="MONOCHROME2",
        transfer_syntax="1.2.840.10008.1.2.1",
        modality="CR",
        view_position="PA",
        body_part="CHEST",
        laterality="U",
        patient_sex="F",
        burned_in=False,
        patient_age=90,
        pixel_spacing=(0.139, 0.140),
    )


CANARY = "CANARY"


def identified(pixels: np.ndarray) -> Dataset:
    """Return a dataset with names and numbers in every element known to contain them."""
    data = image_dataset(pixels, **WINDOW)
    data.PatientName = data.PatientID = data.InstitutionName = data.AccessionNumber = CANARY
    data.StudyDescription = data.ImageComments = data.PatientComments = f"{CANARY}^JOHN"
    data.add_new(0x00091001, "LO", CANARY)
    data.add_new(0x00080050, "SH", CANARY)
    data.StudyInstanceUID = "1.2.3.4"
    data.StudyDate = "20200102"
    person = Dataset()
    person.PatientName = CANARY
    data.ReferencedPatientSequence = [person]
    for name, vr in (
        ("ViewPosition", "CS"),
        ("BodyPartExamined", "CS"),
        ("PatientSex", "CS"),
        ("Modality", "CS"),
    ):
        data.add_new(pydicom.datadict.tag_for_keyword(name), vr, CANARY)
    data.add_new(0x00101010, "LO", CANARY)
    data.add_new(0x00080005, "CS", CANARY)
    return data


@pytest.mark.fault("S9")
def test_no_output_names_a_patient(tmp_path, pixels, caplog, recwarn):
    caplog.set_level(logging.DEBUG)
    content = write_dataset(tmp_path / "a.dcm", identified(pixels)).read_bytes()
    recwarn.clear()
    caplog.clear()
    image = read_dicom(tmp_path / "a.dcm")
    texts = [repr(image), repr(image.header)]
    assert image.header.modality is None
    assert image.header.body_part is None
    for name, data in {
        "truncated": content[:-100],
        "cut_header": content[:700],
        "frames": content.replace(
            b"\x28\0\x10\0US", element(0x00280008, b"IS", CANARY.encode()) + b"\x28\0\x10\0US"
        ),
        "photometric": content.replace(b"MONOCHROME2 ", CANARY.encode() * 2),
        "syntax": raw_file(CANARY.encode(), content[content.index(b"\x08\0\x16\0UI") :]),
    }.items():
        (tmp_path / f"{name}.dcm").write_bytes(data)
        with pytest.raises(DicomError) as caught:
            read_dicom(tmp_path / f"{name}.dcm")
        texts.append(str(caught.value))
    texts += [str(warning.message) for warning in recwarn] + [
        record.getMessage() for record in caplog.records
    ]
    assert not [text for text in texts if CANARY in text or "1.2.3.4" in text or "20200102" in text]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "not_dicom"),
        (b"\x08", "not_dicom"),
        (b"This is a text file.\n" * 20, "not_dicom"),
        (bytes(128) + b"DICM", "no_pixels"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(2, 2)), "no_pixels"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(2, 2) + element(0x00101010, b"AS", b"09", 900)), "truncated"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(2, 2) + element(0x7FE00010, b"OW", bytes(6))), "truncated"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(2, 2) + element(0x7FE00010, b"OW", bytes(6), 8)), "truncated"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(0, 2) + element(0x7FE00010, b"OW", bytes(6))), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.1", element(0x7FE00010, b"OW", bytes(6))), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(2, 2, bits=12) + element(0x7FE00010, b"OW", bytes(6))), "unsupported"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(2, 2, samples=4) + element(0x7FE00010, b"OW", bytes(32))), "unsupported"),
        (raw_file(b"1.2.840.10008.1.2.1", layout(2, 2) + fragments(bytes(8))), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.4.90", layout(2, 2) + element(0x7FE00010, b"OW", bytes(8))), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.4.90", layout(2, 2) + fragments()), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.4.90", layout(2, 2) + fragments(bytes(80))[:-50]), "truncated"),
        (raw_file(b"1.2.840.10008.1.2.4.90", layout(2, 2) + fragments(bytes(80))), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.4.70", layout(2, 2) + fragments(bytes(80))), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.5", layout(2, 2) + fragments(bytes(80))), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.4.100", layout(2, 2) + fragments(bytes(80))), "unsupported"),
        (raw_file(b"1.2.840.10008.1.2.1.99", b"no deflated data"), "malformed"),
        (raw_file(b"1.2.840.10008.1.2.1.99", b"\x63"), "truncated"),
    ],
)  # fmt: skip
def test_unreadable_images_raise(tmp_path, data, code):
    path = tmp_path / "some image.dcm"
    path.write_bytes(data)
    with raises(DicomError, code) as caught:
        read_dicom(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_missing_files_and_folders_raise(tmp_path):
    with raises(DicomError, "not_a_file", names=f"{tmp_path} "):
        read_dicom(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing.dcm"):
        read_dicom(tmp_path / "missing.dcm")


def test_invalid_settings_raise(tmp_path, plain):
    with raises(ConfigError, "out_of_range", "bits"):
        read_dicom(tmp_path / "plain.dcm", bits=12)
    with raises(ConfigError, "out_of_range", "frame"):
        read_dicom(tmp_path / "plain.dcm", frame=-1)


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (DicomLimits(file_bytes=1000), "file_bytes"),
        (DicomLimits(frame_bytes=2000), "frame_bytes"),
        (DicomLimits(elements=3), "elements"),
    ],
)
def test_custom_limits_apply(tmp_path, plain, limits, field):
    with raises(DicomError, "too_large", field):
        read_dicom(tmp_path / "plain.dcm", limits=limits)
