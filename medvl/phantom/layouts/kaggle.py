"""What the phantom's challenges share: square frontal images of 8 bits, as Kaggle's releases of chest radiographs have.

Tables speak of images of 1024 pixels, whatever size the phantom's are drawn at: a box or a mask is a share of a square.
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

SIDE = 1024
"""Pixels that boxes and masks are given in: the side of every image of the real releases."""
_SECONDARY_CAPTURE = UID("1.2.840.10008.5.1.4.1.1.7")


def frontals(patient: Patient) -> Iterator[tuple[Study, View]]:
    """One frontal view of each study, on a square plate."""
    for study in patient.studies:
        view = study.frontal
        yield study, dataclasses.replace(view, camera=dataclasses.replace(view.camera, aspect=1.0))


def challenge_options(corpus: str, patients: int, seed: int, size: int) -> Options:
    """What a challenge is written with: one labelled part, no reports. Raises ConfigError on what is out of range."""
    return Options(corpus=corpus, patients=patients, seed=seed, size=size, split=(1.0, 0.0, 0.0), reports=False)


def write_image(
    root: Path, path: Path, name: str, patient: Patient, study: Study, view: View, size: int
) -> dict[str, object]:
    """Write the view as `plain_dicom` has it to `path` below `root`, if it is not there; its row of the truth."""
    if not (root / path).exists():
        write_file(root / path, plain_dicom(name, study, view, size))
    return truth_row(view, study, SIDE, path=path.as_posix(), subject_id=patient.subject_id)


def hexadecimal(view: View) -> str:
    """32 digits that name a view."""
    return view.dicom_id.replace("-", "")[:32]


def uid(view: View) -> UID:
    """The UID of a view, below 2.25, which is open to any 128-bit number."""
    return UID(f"2.25.{int(hexadecimal(view), 16)}")


def plain_dicom(name: str, study: Study, view: View, size: int) -> bytes:
    """The view as an uncompressed 8-bit DICOM file of `size` x `size` pixels, the patient being called `name`."""
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
