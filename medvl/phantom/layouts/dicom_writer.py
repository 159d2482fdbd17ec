"""DICOM files of views: 12 bits, in the variety of encodings of hospital images.

Unlike in the real release, the header has an invented name, ids and dates, so that tests can verify
de-identification.
"""

import dataclasses
import io

import numpy as np
from numpy.typing import NDArray
from pydicom import uid
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.pixels import get_encoder
from pydicom.uid import UID

from medvl.phantom.population.world import Patient, Study, View, generator
from medvl.phantom.rendering.scene import WHITE

_STREAM = 96
# DX for presentation, CR
_DIGITAL = UID("1.2.840.10008.5.1.4.1.1.1.1")
_COMPUTED = UID("1.2.840.10008.5.1.4.1.1.1")
_SYNTAXES = {
    uid.ExplicitVRLittleEndian: 0.62, uid.ImplicitVRLittleEndian: 0.08, uid.RLELossless: 0.10,
    uid.JPEG2000Lossless: 0.10, uid.JPEGLSLossless: 0.10,
}  # fmt: skip
_SURNAMES = (
    "Ashgrove",
    "Brambleby",
    "Corncrake",
    "Dunmallow",
    "Eskwater",
    "Fernhollow",
    "Gorseley",
    "Hazelrigg",
)
_GIVEN = {
    "F": ("Alma", "Beatrix", "Clementine", "Dorothea"),
    "M": ("Ambrose", "Barnaby", "Cornelius", "Digby"),
}
_VIEW_CODES = {
    "PA": ("399348003", "postero-anterior"),
    "AP": ("399348003", "antero-posterior"),
    "LATERAL": ("399067008", "lateral"),
    "LL": ("399067008", "left lateral"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """Storage of the pixels of a file."""

    syntax: UID
    inverted: bool
    """Whether low values are bright (MONOCHROME1)."""
    table: bool
    """Whether there is a VOI LUT sequence in place of a window."""
    low: int
    """Stored value of black (of white if inverted)."""
    high: int
    gamma: float
    """Exponent of the VOI LUT; 1 with a window."""
    implicit_position: bool
    """Whether ViewPosition is blank."""


def encoding_of(view: View) -> Encoding:
    """Return the encoding of a view; always the same for the same view."""
    rng = generator(*view.key, _STREAM)
    syntaxes = list(_SYNTAXES)
    table = rng.random() < 0.15
    return Encoding(
        syntax=syntaxes[rng.choice(len(syntaxes), p=list(_SYNTAXES.values()))],
        inverted=bool(rng.random() < 0.2),
        table=bool(table),
        low=int(rng.integers(0, 500)),
        high=int(rng.integers(3200, WHITE + 1)),
        gamma=float(rng.uniform(1.4, 2.2)) if table else 1.0,
        implicit_position=bool(rng.random() < 0.03),
    )


def view_position(view: View) -> str:
    """Return the ViewPosition in header and table, which is sometimes blank."""
    return "" if encoding_of(view).implicit_position else view.position


def view_code(view: View) -> str:
    """Return the meaning of the view's code, as in the tables."""
    return _VIEW_CODES[view.position][1]


def procedure(study: Study) -> str:
    """Return the description of the examination."""
    if any(view.lateral for view in study.views):
        return "CHEST (PA AND LAT)"
    return (
        f"CHEST ({'PORTABLE ' if study.views[0].position == 'AP' else ''}{study.views[0].position})"
    )


def orientation(view: View) -> str:
    """Return Erect or Recumbent."""
    return "Recumbent" if view.position == "AP" else "Erect"


def dicom_bytes(patient: Patient, study: Study, view: View, image_HW: NDArray[np.uint16]) -> bytes:
    """Return the DICOM file of a view with the pixels `image_HW` of `draw`, which its VOI and
    polarity restore.
    """
    encoding = encoding_of(view)
    rng = generator(*view.key, _STREAM + 1)
    meta = FileMetaDataset()
    implicit = uid.ImplicitVRLittleEndian
    explicit = uid.ExplicitVRLittleEndian
    meta.TransferSyntaxUID = implicit if encoding.syntax == implicit else explicit
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    _describe(dataset, patient, study, view, rng)
    _add_pixels(dataset, image_HW, encoding, view)
    if encoding.syntax.is_compressed:
        dataset.compress(_available(encoding.syntax), generate_instance_uid=False)
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def _available(syntax: UID) -> UID:
    """Return the syntax, or JPEG 2000 with the same pixels where no codec writes it: JPEG-LS
    needs pyjpegls.
    """
    return syntax if get_encoder(syntax).is_available else uid.JPEG2000Lossless


def _describe(
    dataset: Dataset, patient: Patient, study: Study, view: View, rng: np.random.Generator
) -> None:
    person = generator(*study.key[:2], _STREAM)  # equal in all studies of a patient
    surname, given = (str(person.choice(names)) for names in (_SURNAMES, _GIVEN[study.sex]))
    digital = rng.random() < 0.7
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = (
        _DIGITAL if digital else _COMPUTED
    )
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = _uid(view.dicom_id)
    dataset.StudyInstanceUID = _uid(f"{study.study_id:x}")
    dataset.SeriesInstanceUID = _uid(f"{study.study_id:x}01")
    dataset.Modality = "DX" if digital else "CR"
    dataset.PatientName = f"{surname}^{given}"
    dataset.PatientID = f"PHANTOM-{patient.subject_id}"
    dataset.PatientSex = study.sex
    dataset.PatientAge = f"{study.age:03d}Y"
    dataset.PatientBirthDate = f"{study.taken.year - study.age}0101"
    dataset.AccessionNumber = f"ACC{study.study_id}"
    dataset.StudyID = str(study.study_id)
    dataset.StudyDate = study.taken.strftime("%Y%m%d")
    dataset.StudyTime = study.taken.strftime("%H%M%S.%f")[:-3]
    dataset.ReferringPhysicianName = "Quillfeather^Ottoline"
    dataset.InstitutionName = "Phantom General Hospital"
    dataset.Manufacturer = "Phantom Works"
    dataset.BodyPartExamined = "CHEST"
    dataset.ViewPosition = view_position(view)
    dataset.PerformedProcedureStepDescription = procedure(study)
    dataset.ViewCodeSequence = [_code(*_VIEW_CODES[view.position])]
    dataset.ProcedureCodeSequence = [_code("399208008", procedure(study))]
    dataset.PatientOrientationCodeSequence = [_code("10904000", orientation(view))]


def _code(value: str, meaning: str) -> Dataset:
    item = Dataset()
    item.CodeValue = value
    item.CodingSchemeDesignator = "SCT"
    item.CodeMeaning = meaning
    return item


def _uid(hexadecimal: str) -> UID:
    """Return a UID below the root 2.25 for 128-bit numbers."""
    return UID(f"2.25.{int(hexadecimal.replace('-', '')[:32], 16)}")


def _add_pixels(
    dataset: Dataset, image_HW: NDArray[np.uint16], encoding: Encoding, view: View
) -> None:
    """Store values such that VOI (window or table) and then polarity restore `image_HW`."""
    brightness_HW = (WHITE - image_HW if encoding.inverted else image_HW) / WHITE
    span = encoding.high - encoding.low
    stored = np.rint(encoding.low + span * brightness_HW ** (1 / encoding.gamma)).astype("<u2")
    height, width = image_HW.shape
    dataset.Rows = height
    dataset.Columns = width
    dataset.SamplesPerPixel = 1
    dataset.PixelRepresentation = 0
    dataset.BitsAllocated = 16
    dataset.BitsStored = 12
    dataset.HighBit = 11
    dataset.PhotometricInterpretation = "MONOCHROME1" if encoding.inverted else "MONOCHROME2"
    dataset.PresentationLUTShape = "INVERSE" if encoding.inverted else "IDENTITY"
    dataset.RescaleIntercept = 0
    dataset.RescaleSlope = 1
    dataset.RescaleType = "US"
    spacing = round(10 * view.camera.field / min(height, width), 4)  # millimetres
    dataset.ImagerPixelSpacing = [spacing, spacing]
    dataset.PixelData = stored.tobytes()
    dataset["PixelData"].VR = "OW"
    if encoding.table:
        curve = np.rint(WHITE * (np.arange(span + 1) / span) ** encoding.gamma).astype(int)
        item = Dataset()
        item.LUTDescriptor = [span + 1, encoding.low, 12]
        item.LUTExplanation = "NORMAL"
        item.LUTData = curve.tolist()
        item["LUTDescriptor"].VR = item["LUTData"].VR = "US"
        dataset.VOILUTSequence = [item]
    else:  # DICOM's linear function maps [c - w/2, c + w/2 - 1]
        dataset.WindowCenter = (encoding.low + encoding.high + 1) / 2
        dataset.WindowWidth = span + 1
