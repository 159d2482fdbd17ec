"""Chest CTs in a folder of one's own: NIfTI files, DICOM series and a table with reports."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, CTImageStorage, ExplicitVRLittleEndian

from medvl.common.files import write_atomic
from medvl.errors import ConfigError
from medvl.phantom.language.reports import compose_ct_report
from medvl.phantom.population.volumes import CT_FINDINGS, ChestCT, sample_chest_ct
from medvl.phantom.population.world import generator
from medvl.phantom.rendering.volumes import FIELD, draw_volume, finding_masks, organ_numbers

_STREAM = 73
_ROOT_UID = "1.2.826.0.1.3680043.8.498"
_AXIAL = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
_CORONAL = [1.0, 0.0, 0.0, 0.0, 0.0, -1.0]


def write_volumes(
    root: Path | str,
    *,
    patients: int = 40,
    shape: tuple[int, int, int] = (32, 64, 64),
    reconstructions: int = 1,
    dicom: bool = False,
    organ_masks: bool = False,
    seed: int = 0,
) -> None:
    """Write one scan of each patient.

    `volumes.csv` has a row for each reconstruction: patient, study, path (`nifti/*.nii.gz`), series
    (`dicom/*`, with `dicom`), reconstruction, the report's findings and impression, and the labels.
    Reconstructions of a scan share its report. `boxes_mm` has the box of each finding, as
    `medvl eval volume-grounding` reads it. `truth.jsonl` has a line for each scan, with place
    and size of each finding.

    Args:
        root: output folder.
        patients: number of patients.
        shape: voxels along (z, y, x) of the field of 30 x 36 x 36 cm.
        reconstructions: volumes of a scan: a smooth kernel, then sharper ones.
        dicom: write DICOM series too: files in random order, one localizer, a rescale of its own in
            each slice, and InstanceNumber against the position.
        organ_masks: write the organs of each volume to organ_masks/, as `organ_numbers` has them.
        seed: seed of the population.

    Raises:
        ConfigError: "out_of_range" for `patients`, `shape` or `reconstructions`.
        ImportError: nibabel is not installed.
    """
    if min(patients, reconstructions, *shape) < 1:
        raise ConfigError(
            "expected patients, reconstructions and sides of 1 or more, got less", "out_of_range"
        )
    folder = Path(root)
    for name in ("nifti", *["dicom"] * dicom, *["organ_masks"] * organ_masks):
        (folder / name).mkdir(parents=True, exist_ok=True)
    header = [
        *("patient", "study", "path", "series", "reconstruction", "findings", "impression"),
        *("boxes_mm", *CT_FINDINGS),
    ]
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(header)
    truth = []
    for patient in range(patients):
        chest = sample_chest_ct((seed, patient))
        report = compose_ct_report(chest)
        names = (f"p{patient:05d}", f"s{patient:05d}")
        boxes = json.dumps(boxes_of(chest, shape))
        for index in range(reconstructions):
            hu_DHW = draw_volume(chest, shape, reconstruction=index)
            path = Path("nifti") / f"{names[1]}_{index + 1}.nii.gz"
            write_nifti(folder / path, hu_DHW)
            if organ_masks:
                write_nifti(folder / "organ_masks" / path.name, organ_numbers(chest, shape))
            series = Path("dicom") / f"{names[1]}_{index + 1}" if dicom else ""
            if dicom:
                _write_series(folder / series, hu_DHW, chest, index)
            texts = (report["findings"], report["impression"], boxes)
            writer.writerow([*names, path, series, index + 1, *texts, *chest.labels.values()])
        truth.append(truth_of(chest, names[1]))
    write_atomic(folder / "volumes.csv", table.getvalue())
    write_atomic(folder / "truth.jsonl", "".join(json.dumps(line) + "\n" for line in truth))


def spacing_of(shape: tuple[int, int, int]) -> tuple[float, float, float]:
    """Return millimetres between voxels along (z, y, x)."""
    z, y, x = (10 * field / count for field, count in zip(FIELD, shape, strict=True))
    return z, y, x


def boxes_of(chest: ChestCT, shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Return the box around the mask of each finding, in millimetres from the middle of the volume
    along (z, y, x). A finding that fills no voxel to half has that of its truth.
    """
    boxes = []
    masks = finding_masks(chest, shape)
    for finding in chest.findings:
        ends = []
        places = np.nonzero(masks[finding.name])
        for axis, step in enumerate(spacing_of(shape)):
            if len(places[axis]):
                first, last = places[axis].min(), places[axis].max() + 1
                ends.append((step * (first - shape[axis] / 2), step * (last - shape[axis] / 2)))
            else:
                middle = 10 * chest.stretch[axis] * finding.center[axis]
                reach = 10 * chest.stretch[axis] * finding.radii[axis]
                ends.append((middle - reach, middle + reach))
        boxes.append(
            {
                "label": finding.name,
                "center": [round(float(low + high) / 2, 2) for low, high in ends],
                "size": [round(float(high - low), 2) for low, high in ends],
            }
        )
    return boxes


def truth_of(chest: ChestCT, study: str) -> dict[str, Any]:
    """Return the line of a scan in `truth.jsonl`."""
    findings = [
        {
            "name": finding.name,
            "side": finding.side,
            "center_mm": [10 * place for place in finding.center],
            "diameter_mm": finding.diameter_mm,
        }
        for finding in chest.findings
    ]
    return {"study": study, "labels": chest.labels, "findings": findings}


def write_nifti(path: Path, hu_DHW: np.ndarray, flips: tuple[int, ...] = ()) -> None:
    """Write Hounsfield units (z to the head, y to the back, x to the left), with some of the axes
    0, 1, 2 of the file, for x, y, z, in the opposite direction.
    """
    import nibabel

    z, y, x = spacing_of((hu_DHW.shape[0], hu_DHW.shape[1], hu_DHW.shape[2]))
    steps = np.array([-x, -y, z])  # the axes of NIfTI's millimetres are right, front and head
    steps[list(flips)] *= -1
    stored = np.flip(hu_DHW.transpose(2, 1, 0), flips)
    nibabel.save(nibabel.Nifti1Image(stored, np.diag([*steps, 1])), path)


def _write_series(folder: Path, hu_DHW: np.ndarray, chest: ChestCT, reconstruction: int) -> None:
    folder.mkdir(exist_ok=True)
    rng = generator(*chest.key, _STREAM, reconstruction)
    count = len(hu_DHW)
    names = rng.permutation(count + 1)
    z, y, x = spacing_of((count, hu_DHW.shape[1], hu_DHW.shape[2]))
    series = f"{_ROOT_UID}.{chest.key[-1] + 1}.{reconstruction + 1}"
    for index, slice_HW in enumerate(hu_DHW):
        data = _slice(slice_HW, series, index, intercept=-1024 - int(rng.integers(0, 100)))
        data.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
        data.ImageOrientationPatient = _AXIAL
        data.ImagePositionPatient = [-180.0, -180.0, index * z]
        data.PixelSpacing = [y, x]
        data.InstanceNumber = count - index
        _save(data, folder / f"{names[index]:05d}.dcm")
    scout = _slice(hu_DHW[:, hu_DHW.shape[1] // 2], series, count, intercept=-1024)
    scout.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    scout.ImageOrientationPatient = _CORONAL
    scout.ImagePositionPatient = [-180.0, 0.0, count * z]
    scout.PixelSpacing = [z, x]
    _save(scout, folder / f"{names[count]:05d}.dcm")


def _slice(slice_HW: np.ndarray, series: str, index: int, *, intercept: int) -> FileDataset:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = UID(f"{series}.{index + 1}")
    data = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID = CTImageStorage
    data.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    data.SeriesInstanceUID = UID(series)
    data.Modality = "CT"
    data.PatientName = "Ashgrove^Alma"  # invented, so that tests can look for it
    data.PatientID = f"{series.split('.')[-2]}"
    data.SamplesPerPixel = 1
    data.PhotometricInterpretation = "MONOCHROME2"
    data.Rows, data.Columns = slice_HW.shape
    data.BitsAllocated = 16
    data.BitsStored = 16
    data.HighBit = 15
    data.PixelRepresentation = 0
    data.RescaleSlope = 1
    data.RescaleIntercept = intercept
    data.RescaleType = "HU"
    stored_HW = (slice_HW.astype(np.int32) - intercept).astype("<u2")
    data.PixelData = stored_HW.tobytes()
    data["PixelData"].VR = "OW"
    return data


def _save(data: FileDataset, path: Path) -> None:
    buffer = io.BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    write_atomic(path, buffer.getvalue())
