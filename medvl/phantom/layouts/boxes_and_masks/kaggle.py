"""Shared code of the Kaggle challenges' layouts: square 8-bit frontal images.

Tables refer to images of 1024 pixels, independent of the size at which the phantom's images are drawn.
"""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian

from medvl.phantom.layouts.dicom_writer import view_position
from medvl.phantom.layouts.writer import Options, truth_row, write_file
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.draw import draw

REFERENCE_SIZE = 1024
"""Side of the images to which boxes and masks refer: that of every image of the real releases."""
_SECONDARY_CAPTURE = UID("1.2.840.10008.5.1.4.1.1.7")


def square_frontal_views(patient: Patient) -> Iterator[tuple[Study, View]]:
    """Yield one frontal view of each study, with a square field."""
    for study in patient.studies:
        view = study.frontal
        yield study, dataclasses.replace(view, camera=dataclasses.replace(view.camera, aspect=1.0))


def challenge_options(corpus: str, patients: int, seed: int, size: int) -> Options:
    """Return the options of a challenge: one labelled split, no reports. Raises ConfigError: "out_of_range"."""
    return Options(corpus=corpus, patients=patients, seed=seed, size=size, split=(1.0, 0.0, 0.0), reports=False)


def write_image(
    root: Path, path: Path, name: str, patient: Patient, study: Study, view: View, size: int
) -> dict[str, object]:
    """Write the DICOM file of a view to `path` below `root` if it is missing; return its ground truth row."""
    if not (root / path).exists():
        write_file(root / path, plain_dicom(name, study, view, size))
    return truth_row(view, study, REFERENCE_SIZE, path=path.as_posix(), subject_id=patient.subject_id)


def image_uid_hex(view: View) -> str:
    """Return the 32 hexadecimal digits of a view's UID."""
    return view.dicom_id.replace("-", "")[:32]


def uid(view: View) -> UID:
    """Return the UID of a view, below the root 2.25 for 128-bit numbers."""
    return UID(f"2.25.{int(image_uid_hex(view), 16)}")


def plain_dicom(name: str, study: Study, view: View, size: int) -> bytes:
    """Return an uncompressed 8-bit DICOM file of `size` x `size` pixels; `name` becomes name and id of the patient."""
    image_HW = (draw(view, size) >> 4).astype("u1")
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID = meta.MediaStorageSOPClassUID = _SECONDARY_CAPTURE
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID = uid(view)
    dataset.Modality, dataset.BodyPartExamined, dataset.ViewPosition = "CR", "CHEST", view_position(view)
    dataset.PatientID = dataset.PatientName = name
    dataset.PatientSex, dataset.PatientAge = study.sex, f"{study.age:03d}Y"
    dataset.Rows, dataset.Columns = image_HW.shape
    dataset.SamplesPerPixel, dataset.PixelRepresentation = 1, 0
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 8, 8, 7
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.PixelData = image_HW.tobytes()
    dataset["PixelData"].VR = "OB"
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()
