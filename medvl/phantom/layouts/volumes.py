"""Chest CTs in a folder of one's own (NIfTI files, DICOM series and a table with reports), and in
the layouts of CT-RATE, RAD-ChestCT, Merlin and INSPECT.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, CTImageStorage, ExplicitVRLittleEndian

from medvl.common.files import write_atomic
from medvl.errors import ConfigError
from medvl.phantom.language.reports import compose_ct_report
from medvl.phantom.layouts.writer import workbook_bytes
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


Shape = tuple[int, int, int]

CT_RATE_LABELS = (
    "Medical material", "Arterial wall calcification", "Cardiomegaly", "Pericardial effusion",
    "Coronary artery wall calcification", "Hiatal hernia", "Lymphadenopathy", "Emphysema",
    "Atelectasis", "Lung nodule", "Lung opacity", "Pulmonary fibrotic sequela", "Pleural effusion",
    "Mosaic attenuation pattern", "Peribronchial thickening", "Consolidation", "Bronchiectasis",
    "Interlobular septal thickening",
)  # fmt: skip
_TABLES = {
    "radiology_text_reports/{long}_reports.csv": (
        "VolumeName", "ClinicalInformation_EN", "Technique_EN", "Findings_EN", "Impressions_EN",
    ),
    "multi_abnormality_labels/{short}_predicted_labels.csv": ("VolumeName", *CT_RATE_LABELS),
    "metadata/{long}_metadata.csv": (
        "VolumeName", "RescaleSlope", "RescaleIntercept", "XYSpacing", "ZSpacing",
        "ImageOrientationPatient", "PatientPosition", "PatientSex", "PatientAge", "StudyDate",
    ),
}  # fmt: skip
_RAD_NAMES = {
    "Lung nodule": "nodule",
    "Pleural effusion": "pleural_effusion",
    "Consolidation": "consolidation",
    "Emphysema": "emphysema",
    "Cardiomegaly": "cardiomegaly",
    "Pericardial effusion": "pericardial_effusion",
    "Arterial wall calcification": "calcification",
}
_INSPECT_TABLES = {
    "impressions": ("impression_id", "impressions"),
    "splits": ("impression_id", "split"),
    "study_mapping": ("impression_id", "person_id", "image_id", "procedure_DATETIME"),
    "labels": ("impression_id", "pe_positive_nlp", "12_month_PH"),
}
_PLACES = ("left_lung", "right_lung", "other_location")


class _Scan(NamedTuple):
    """A scan of CT-RATE."""

    part: str
    """train or valid."""
    patient: int
    """Number in its part, from 1."""
    letter: str
    chest: ChestCT

    @property
    def name(self) -> str:
        return f"{self.part}_{self.patient}_{self.letter}"


def write_ct_rate(
    root: Path | str,
    *,
    patients: int = 40,
    shape: Shape = (32, 64, 64),
    reconstructions: int = 2,
    organ_masks: bool = False,
    seed: int = 0,
) -> None:
    """Write `dataset/` as CT-RATE has it: a quarter of the patients in the official part valid.

    Every second patient of each part has two scans; reconstructions of a scan share its report.
    Every third scan is in the first release only: stored values with an intercept of -8192 or
    -1024, whose header states neither rescale nor spacing. The others are in the fixed release, in
    Hounsfield units. The first scan lies feet first and has the clinical information "Not given.";
    the last one of train is in `no_chest_train.txt`. `truth.jsonl` has a line for each scan.

    Args:
        root: output folder.
        patients: number of patients, at least 2.
        shape: voxels along (z, y, x) of the field of 30 x 36 x 36 cm.
        reconstructions: volumes of a scan.
        organ_masks: write the organs of each volume to organ_masks/, as `organ_numbers` has them.
        seed: seed of the population.

    Raises:
        ConfigError: "out_of_range" for `patients`, `shape` or `reconstructions`.
        ImportError: nibabel is not installed.
    """
    _check(patients, 2, shape, reconstructions)
    folder = Path(root)
    dataset = folder / "dataset"
    scans = list(_ct_rate_scans(patients, seed))
    rows: dict[str, list[list[object]]] = {}
    for number, scan in enumerate(scans):
        for index in range(reconstructions):
            name = f"{scan.name}_{index + 1}.nii.gz"
            feet_first = number == 0
            intercept = (-8192, -1024)[number % 2] if number % 3 == 2 else 0
            tree = scan.part if intercept else f"{scan.part}_fixed"
            path = dataset / tree / f"{scan.part}_{scan.patient}" / scan.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hu_DHW = draw_volume(scan.chest, shape, reconstruction=index)
            flips = (0, 2) if feet_first else ()
            if intercept:
                _write_raw(path, hu_DHW, intercept, flips)
            else:
                write_nifti(path, hu_DHW, flips)
            if organ_masks:
                mask = folder / "organ_masks" / name
                mask.parent.mkdir(exist_ok=True)
                numbers_DHW = organ_numbers(scan.chest, shape)
                if intercept:
                    _write_raw(mask, numbers_DHW, 0, flips)
                else:
                    write_nifti(mask, numbers_DHW, flips)
            for table, row in _ct_rate_rows(scan, name, shape, intercept, number == 0).items():
                rows.setdefault(table, []).append(row)
    for part, long in (("train", "train"), ("valid", "validation")):
        for form, header in _TABLES.items():
            table = form.format(long=long, short=part)
            _write_table(dataset / table, header, rows.get(table, ()))
        last = [scan.name for scan in scans if scan.part == part][-1:]
        heads = [
            f"{name}_{index + 1}.nii.gz\n" for name in last for index in range(reconstructions)
        ]
        write_atomic(
            dataset / f"metadata/no_chest_{part}.txt", "".join(heads) if part == "train" else ""
        )
    _write_truth(folder, [truth_of(scan.chest, scan.name) for scan in scans])


def _ct_rate_scans(patients: int, seed: int) -> Iterator[_Scan]:
    numbers = {"train": 0, "valid": 0}
    for patient in range(patients):
        part = "valid" if patient % 4 == 1 else "train"
        numbers[part] += 1
        for scan in range(1 + numbers[part] % 2):
            chest = sample_chest_ct((seed, patient, scan) if scan else (seed, patient))
            yield _Scan(part, numbers[part], "ab"[scan], chest)


def _ct_rate_rows(
    scan: _Scan, name: str, shape: Shape, intercept: int, feet_first: bool
) -> dict[str, list[object]]:
    """Return the row of a volume in each table of its part."""
    z, y, x = spacing_of(shape)
    report = compose_ct_report(scan.chest)
    clinical = "Not given." if feet_first else "Cough."
    sign = -1 if feet_first else 1
    contents: tuple[list[object], ...] = (
        [name, clinical, "Non-contrast CT.", report["findings"], report["impression"]],
        [name, *(scan.chest.labels.get(label, 0) for label in CT_RATE_LABELS)],
        [
            *(name, 1, intercept or -1024, f"[{y}, {x}]", z, f"[{sign}, 0, 0, 0, 1, 0]"),
            *("FFS" if feet_first else "HFS", "FM"[scan.patient % 2], f"{40 + scan.patient:03d}Y"),
            20200101 + "ab".index(scan.letter),
        ],
    )
    long = "validation" if scan.part == "valid" else "train"
    names = (form.format(long=long, short=scan.part) for form in _TABLES)
    return dict(zip(names, contents, strict=True))


def _write_raw(path: Path, hu_DHW: np.ndarray, intercept: int, flips: Sequence[int]) -> None:
    """Write stored values whose header states no rescale, spacing or direction."""
    import nibabel

    stored = np.flip(hu_DHW.transpose(2, 1, 0), tuple(flips)) - np.int16(intercept)
    nibabel.save(nibabel.Nifti1Image(stored, np.eye(4)), path)


def write_rad_chestct(
    root: Path | str,
    *,
    patients: int = 40,
    shape: Shape = (32, 64, 64),
    seed: int = 0,
) -> None:
    """Write RAD-ChestCT's NumPy archives (slices from head to feet) and its tables: labels by
    place, and patients.

    Arguments and errors are those of `write_ct_rate`, without reconstructions. The release has
    voxels of .8 mm; these have those of `shape`.
    """
    _check(patients, 1, shape, 1)
    folder = Path(root)
    folder.mkdir(parents=True, exist_ok=True)
    columns = [f"{name}*{place}" for name in _RAD_NAMES.values() for place in _PLACES]
    rows: dict[str, list[list[object]]] = {"train": [], "valid": [], "test": []}
    people = []
    truth = []
    for patient in range(patients):
        part = ("train", "train", "valid", "test")[patient % 4]
        name = f"{ {'train': 'trn', 'valid': 'val', 'test': 'tst'}[part] }{patient:05d}"
        chest = sample_chest_ct((seed, patient))
        np.savez_compressed(folder / name, ct=draw_volume(chest, shape)[::-1])
        present = {f"{_RAD_NAMES[each.name]}*{_rad_place(each.side)}" for each in chest.findings}
        rows[part].append([name, *(int(column in present) for column in columns)])
        people.append([name, f"MRN{patient:05d}"])
        truth.append(truth_of(chest, name))
    for part, lines in rows.items():
        table = folder / f"img{part}_Abnormality_and_Location_Labels.csv"
        _write_table(table, ("NoteAcc_DEID", *columns), lines)
    _write_table(
        folder / "CT_Scan_Metadata_Complete_35747.csv", ("NoteAcc_DEID", "MRN_DEID"), people
    )
    _write_truth(folder, truth)


def _rad_place(side: str) -> str:
    return f"{side}_lung" if side else "other_location"


def write_merlin(
    root: Path | str,
    *,
    patients: int = 40,
    shape: Shape = (32, 64, 64),
    seed: int = 0,
) -> None:
    """Write Merlin's layout: NIfTI files whose axes lead to the right, the front and the head, a
    table of findings, and labels of which -1 is not mentioned.

    The body part is a chest, which is what the phantom draws. Arguments and errors are those of
    `write_ct_rate`, without reconstructions.
    """
    _check(patients, 1, shape, 1)
    folder = Path(root)
    (folder / "merlin_data").mkdir(parents=True, exist_ok=True)
    reports = []
    labels = []
    truth = []
    for patient in range(patients):
        name = f"AC4{patient:05d}"
        chest = sample_chest_ct((seed, patient))
        write_nifti(folder / "merlin_data" / f"{name}.nii.gz", draw_volume(chest, shape), (0, 1))
        split = ("train", "train", "val", "test")[patient % 4]
        reports.append([name, compose_ct_report(chest)["findings"], split, 0])
        values: list[int] = list(chest.labels.values())
        labels.append([name, *(-1 if not value and patient % 2 else value for value in values)])
        truth.append(truth_of(chest, name))
    header = ("study id", "Findings", "Split", "Few Shot")
    write_atomic(folder / "reports_final.xlsx", workbook_bytes(header, reports))
    names = [name.lower().replace(" ", "_") for name in CT_FINDINGS]
    _write_table(folder / "zero_shot_findings_disease_cls.csv", ("study id", *names), labels)
    _write_truth(folder, truth)


def write_inspect(
    root: Path | str,
    *,
    patients: int = 40,
    shape: Shape = (32, 64, 64),
    seed: int = 0,
) -> None:
    """Write INSPECT's layout: CTPA/ with NIfTI files, and tables of impressions, splits, studies
    and labels.

    The phantom draws no embolism: in place of it, the label stands for a consolidation, and the
    outcomes are drawn by the number of the patient. The first study is listed twice. Arguments and
    errors are those of `write_ct_rate`, without reconstructions.
    """
    _check(patients, 1, shape, 1)
    folder = Path(root)
    (folder / "CTPA").mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[list[object]]] = {name: [] for name in _INSPECT_TABLES}
    truth = []
    for patient in range(patients):
        name = f"PE{patient:05d}"
        chest = sample_chest_ct((seed, patient))
        write_nifti(folder / "CTPA" / f"{name}.nii.gz", draw_volume(chest, shape), (0, 1))
        number = 1000 + patient
        split = ("train", "train", "valid", "test")[patient % 4]
        outcome = ("False", "True", "Censored")[patient % 3]
        rows["impressions"].append([number, compose_ct_report(chest)["impression"]])
        rows["splits"].append([number, split])
        study = [number, 500 + patient, name, f"2020-01-{1 + patient % 28:02d} 10:00:00"]
        rows["study_mapping"] += [study] * (1 + (patient == 0))
        rows["labels"].append([number, bool(chest.labels["Consolidation"]), outcome])
        truth.append(truth_of(chest, name))
    for name, header in _INSPECT_TABLES.items():
        _write_table(folder / f"{name}_20250611.tsv", header, rows[name], separator="\t")
    _write_truth(folder, truth)


def _check(patients: int, least: int, shape: Shape, reconstructions: int) -> None:
    if patients < least or min(reconstructions, *shape) < 1:
        raise ConfigError(
            f"expected {least} or more patients, and reconstructions and sides of 1 or more, got "
            f"{patients}, {reconstructions} and {shape}",
            "out_of_range",
        )


def _write_table(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], separator: str = ","
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.writer(table, delimiter=separator, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomic(path, table.getvalue())


def _write_truth(folder: Path, truth: Sequence[dict[str, Any]]) -> None:
    write_atomic(folder / "truth.jsonl", "".join(json.dumps(line) + "\n" for line in truth))
