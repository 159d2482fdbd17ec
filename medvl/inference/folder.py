"""Inference on many files: in batches, with broken images skipped and counted, and a folder of
results.

    OUT/settings.json  model, texts and prompt set; a second run over the folder must have the same
    OUT/results.jsonl  one line for each image: {"image": PATH, "values": {TEXT: VALUE}}, or
    "skipped": CODE OUT/results.csv    the same as a table, written at the end OUT/overlays/
    heat maps on the images

A line is written when its image is finished, so that an interrupted run continues where it stopped.
"""

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from medvl.common.files import open_own, subfolder, write_atomic
from medvl.common.text_files import csv_text
from medvl.common.untrusted import parse_json
from medvl.data.dicom.parser import starts_like_dicom
from medvl.data.images.codecs import encode_png
from medvl.data.volumes.organs import OrganVolume
from medvl.data.volumes.volume import Volume
from medvl.errors import ConfigError, EvaluationError, ImageError, MedvlError
from medvl.eval.grounding.evaluation import draw_grounding
from medvl.eval.grounding.heatmaps import has_volume_patches
from medvl.eval.report_generation.generate import ReportWriter
from medvl.eval.zero_shot_classification.calibration import Calibration, FindingCalibration
from medvl.inference.answers import (
    ABLE,
    Scorer,
    answer,
    heatmap,
    write_report,
    write_study_reports,
)
from medvl.inference.models import Expected, batches, header_of, refuse
from medvl.inference.volumes import (
    draw_volume_map,
    reads_volumes,
    volume_heatmap,
    write_map,
)
from medvl.models import VQA, DualEncoder, LabelModel
from medvl.models.base import System

SETTINGS = "settings.json"
LINES = "results.jsonl"
TABLE = "results.csv"
OVERLAYS = "overlays"
_OVERLAY_SIDE = 1024
_READERS = 4

HEADER = ("modality", "body_part", "warning")

Value = float | str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageResult:
    """Result of a model for one image."""

    image: str
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    """Text -> score or calibrated probability, question -> answer, or "report" -> text."""
    skipped: str | None = None
    """Reason why the image was skipped: the code of an error."""
    overlays: tuple[str, ...] = ()
    """Files in the folder of results."""
    modality: str | None = None
    body_part: str | None = None
    """Values of the DICOM header; None if it lacks them, and for other files."""
    warning: str | None = None
    """Why the image is no chest radiograph, such as "MR, HEAD"."""
    unread: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> number of images of a study that were not read."""

    def as_json(self) -> str:
        """Return a line of `results.jsonl`."""
        reason = {} if self.skipped is None else {"skipped": self.skipped}
        pictures = {"overlays": list(self.overlays)} if self.overlays else {}
        header = {name: getattr(self, name) for name in HEADER if getattr(self, name) is not None}
        unread = {"unread": dict(self.unread)} if self.unread else {}
        row = {"image": self.image, "values": dict(self.values), **pictures, **reason, **header}
        row |= unread
        return json.dumps(row, ensure_ascii=False)


class ImageModel:
    """One task of a model on images: scores of texts, answers to questions, or reports.

    Attributes:
        names: columns of the results: texts or labels, questions, or "report".
        gives: "probability" where all values are calibrated, "score" where none is, "value" where
            some are; "answer" or "report".
        calibrated: names whose values are calibrated probabilities.
    """

    def __init__(
        self,
        model: System,
        texts: Sequence[str] | None,
        *,
        calibration: Calibration | None = None,
        **scoring: Any,
    ) -> None:
        """Raise ConfigError for a model that supports none of the tasks, EvaluationError as
        `infer`.

        `calibration` is that of the model's scores by the prompt set in `scoring`.
        """
        self.model = model
        self.calibrated: dict[str, FindingCalibration] = {}
        self._run: Callable[[Tensor], list[dict[str, Value]]]
        if isinstance(model, VQA) and not model.config.earlier_image:
            if not texts:
                raise ConfigError(
                    "a VQA model needs questions: give --texts", "missing", field="texts"
                )
            self.gives = "answer"
            self.names = tuple(texts)
            self._run = self._answer
        elif isinstance(model, DualEncoder | LabelModel):
            scorer = Scorer(model, texts, **scoring)
            self.names = scorer.names
            if calibration is not None and scorer.prompts is not None:
                self.calibrated = calibration.of_texts(scorer.prompts, scorer.sentences)
            self.gives = "score" if not self.calibrated else "value"
            if len(self.calibrated) == len(self.names):
                self.gives = "probability"
            self._run = lambda image_BCHW: self._calibrate(scorer.prepared(image_BCHW).tolist())
        elif isinstance(model, ReportWriter):
            if texts:
                raise ConfigError(
                    f"a {model.name} writes reports and takes no texts", "conflict", field="texts"
                )
            self.gives = "report"
            self.names = ("report",)
            self._run = lambda image_BCHW: [
                {"report": text} for text in write_report(model, list(image_BCHW))
            ]
        else:
            raise refuse(
                model, "be applied to single images", f"{ABLE}, a VQA model or a report generator"
            )

    def __call__(self, pixels: Sequence[np.ndarray]) -> list[dict[str, Value]]:
        """Return the values of images, from the pixels that `transform.read` returned."""
        return [
            row
            for image_BCHW in batches(self.model, list(pixels), len(pixels))
            for row in self._run(image_BCHW)
        ]

    def of_studies(self, studies: Sequence[Sequence[np.ndarray]]) -> list[dict[str, Value]]:
        """Return the reports of studies, from the pixels of their images."""
        return [{"report": text} for text in write_study_reports(self.model, studies)]

    def _calibrate(self, scores: Sequence[Sequence[float]]) -> list[dict[str, Value]]:
        rows = _rows(self.names, scores)
        for row in rows:
            row |= {
                name: fitted.probability(float(row[name]))
                for name, fitted in self.calibrated.items()
            }
        return rows

    def _answer(self, image_BCHW: Tensor) -> list[dict[str, Value]]:
        columns = [answer(self.model, list(image_BCHW), question) for question in self.names]
        return _rows(self.names, zip(*columns, strict=True))


def infer_files(
    model: ImageModel,
    images: Sequence[Path],
    *,
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    overlays: int = 0,
    nifti: bool = False,
    batch: int = 32,
    frame: int | None = None,
    modality: Sequence[str] = (),
    by_study: bool = False,
    progress: bool | None = None,
) -> list[ImageResult]:
    """Return the results of image files, or of studies, in order; those that cannot be read are
    skipped with their reason.

    Args:
        model: the model with its texts.
        images: paths of the files (`find_images`).
        out: folder for the results; None writes none. A folder with results of the same settings is
            continued.
        settings: content of `settings.json`.
        overlays: number of heat maps to draw for each image, of the texts with the highest values;
            needs `out`.
        nifti: write these maps as NIfTI files too, in the voxels of each volume.
        batch: images per batch.
        frame: index of the frame in multi-frame DICOM files, from 0; with None, these are skipped.
        modality: modalities to accept; DICOM files of others are skipped as "other_modality".
            Empty: all are accepted, and images of another kind than the model's training images
            have a `warning`.
        by_study: the files of a folder are a study, which has one report; the folder is its name.
        progress: True for a progress bar, None for one on a terminal.

    Raises ConfigError if `out` has other content, or results of other settings, and with `by_study`
    for a model that writes no reports.
    """
    if by_study and model.gives != "report":
        raise refuse(model.model, "write a report of a study", "leave by_study out")
    result_of = {} if out is None else _open_folder(out, dict(settings or {}))
    files_of: dict[Path, list[Path]] = {}
    for path in images:
        files_of.setdefault(path.parent if by_study else path, []).append(path)
    todo = [row for row in files_of.items() if image_name(row[0]) not in result_of]
    with tqdm(
        total=len(files_of),
        initial=len(files_of) - len(todo),
        unit="study" if by_study else "img",
        disable=_hidden(progress),
    ) as bar:
        for start in range(0, len(todo), batch):
            part = dict(todo[start : start + batch])
            if by_study:
                results = _infer_studies(model, part, frame, modality)
            else:
                drawing = None if out is None else _Drawing(out, overlays, nifti)
                results = _infer_batch(model, [*part], frame, drawing, modality)
            if out is not None:
                with open_own(out / LINES) as file:
                    file.writelines(f"{result.as_json()}\n".encode() for result in results)
            result_of |= {result.image: result for result in results}
            bar.update(len(results))
    in_order = [result_of[image_name(path)] for path in files_of]
    if out is not None:
        rows = [
            [
                one.image,
                *(one.values.get(name, "") for name in model.names),
                one.skipped or "",
                *(getattr(one, name) or "" for name in HEADER),
            ]
            for one in in_order
        ]
        write_atomic(out / TABLE, csv_text([["image", *model.names, "skipped", *HEADER], *rows]))
    return in_order


def count_skipped(results: Sequence[ImageResult]) -> dict[str, int]:
    """Return reason -> number of skipped images."""
    return dict(Counter(result.skipped for result in results if result.skipped is not None))


def _infer_batch(
    model: ImageModel,
    paths: Sequence[Path],
    frame: int | None,
    drawing: "_Drawing | None",
    modality: Sequence[str],
) -> list[ImageResult]:
    headers = {path: header_of(path) for path in paths}
    expected = Expected.by(model.model)
    read_images = read_files(model.model, paths, frame, modality)
    readable = [pixels for pixels in read_images if not isinstance(pixels, str)]
    values = iter(model(readable) if readable else [])
    results = []
    for path, pixels in zip(paths, read_images, strict=True):
        header = headers[path]
        result = ImageResult(
            image=image_name(path),
            modality=None if header is None else header.modality,
            body_part=None if header is None else header.body_part,
            warning=None if modality else expected.doubt(header),
        )
        if isinstance(pixels, str):
            results.append(dataclasses.replace(result, skipped=pixels, warning=None))
            continue
        row = next(values)
        drawn = () if drawing is None else _draw(model, path, pixels, row, drawing)
        results.append(dataclasses.replace(result, values=row, overlays=drawn))
    return results


def _infer_studies(
    model: ImageModel,
    files_of: Mapping[Path, Sequence[Path]],
    frame: int | None,
    modality: Sequence[str],
) -> list[ImageResult]:
    """Return the reports of studies, from the images that can be read."""
    limit = model.model.inputs.study_images
    expected = Expected.by(model.model)
    pairs = []
    for folder, files in files_of.items():
        images = read_files(model.model, files, frame, modality)
        readable = [pixels for pixels in images if not isinstance(pixels, str)]
        unread = Counter(reason for reason in images if isinstance(reason, str))
        unread["over_limit"] += max(0, len(readable) - limit)
        doubts = (None if modality else expected.doubt(header_of(path)) for path in files)
        result = ImageResult(
            image=image_name(folder),
            skipped=None if readable else next(iter(unread)),
            warning=next(filter(None, doubts), None) if readable else None,
            unread=+unread,
        )
        pairs.append((result, readable))
    studies = [images for _, images in pairs if images]
    reports = iter(model.of_studies(studies) if studies else [])
    return [
        dataclasses.replace(result, values=next(reports)) if images else result
        for result, images in pairs
    ]


def read_files(
    model: System, paths: Sequence[Path], frame: int | None, modality: Sequence[str]
) -> list[np.ndarray | str]:
    """Return the pixels of image files as `transform.read` does, or the reason why one is skipped:
    the code of an error, or "other_modality".

    Args:
        model: has the transform.
        paths: the files.
        frame: frame of multi-frame DICOM files; with None, these are skipped.
        modality: modalities of DICOM files to accept; empty for all.
    """

    def read(path: Path) -> np.ndarray | str:
        header = header_of(path) if modality else None
        if header is not None and header.modality not in modality:
            return "other_modality"
        try:
            return model.transform.read(path, frame=frame)
        except MedvlError as error:
            return error.code or type(error).__name__
        except OSError:
            return "unreadable"

    readers = 1 if reads_volumes(model) else _READERS  # a large CT takes a gigabyte
    with ThreadPoolExecutor(readers) as pool:  # decoders run outside of Python's lock
        return list(pool.map(read, paths))


@dataclasses.dataclass(frozen=True)
class _Drawing:
    """Pictures of the texts with the highest values."""

    out: Path
    count: int
    nifti: bool


def _draw(
    model: ImageModel,
    path: Path,
    pixels: np.ndarray,
    values: Mapping[str, Value],
    drawing: _Drawing,
) -> tuple[str, ...]:
    """Write the heat maps of the texts with the highest values. Returns their paths in `out`."""
    order = sorted(
        values,
        key=lambda name: values[name] if isinstance(values[name], float) else 0.0,
        reverse=True,
    )
    names: list[str] = []
    for text in order[: drawing.count]:
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]  # files of equal names
        stem = f"{OVERLAYS}/{image_name(Path(path.stem))[:60]}-{digest}-{_slug(text)}"
        subfolder(drawing.out, OVERLAYS)
        if reads_volumes(model.model):
            names += _draw_volume(model.model, path, pixels, text, drawing, stem)
            continue
        map_HW = heatmap(model.model, pixels, text)
        side = min(_OVERLAY_SIDE, max(pixels.shape[:2]))
        drawn_HWC = draw_grounding(pixels, map_HW, [], side=side)
        write_atomic(drawing.out / f"{stem}.png", encode_png(drawn_HWC))
        names.append(f"{stem}.png")
    return tuple(names)


def _draw_volume(
    model: Any,
    path: Path,
    values: np.ndarray | OrganVolume,
    text: str,
    drawing: _Drawing,
    stem: str,
) -> list[str]:
    """Write a picture of slices with a map, and the map as NIfTI; return their paths in `out`."""
    spacing = model.transform.stored.spacing
    if drawing.nifti or spacing is None:
        volume = model.transform.original(path)
        map_DHW = volume_heatmap(model, path if model.transform.organs else volume, text)
    else:
        hu_DHW = values.hu_DHW if isinstance(values, OrganVolume) else values
        volume = Volume(hu_DHW=hu_DHW, spacing=spacing)
        map_DHW = volume_heatmap(model, values, text)
    picture = draw_volume_map(volume, map_DHW, model.image_encoder.window)
    write_atomic(drawing.out / f"{stem}.png", encode_png(picture))
    if not drawing.nifti:
        return [f"{stem}.png"]
    source = None if path.is_dir() or _is_dicom(path) else path
    write_map(drawing.out / f"{stem}.nii.gz", map_DHW, volume, source)
    return [f"{stem}.png", f"{stem}.nii.gz"]


def can_draw(model: ImageModel) -> bool:
    """Return whether the model has heat maps of its texts."""
    if not isinstance(model.model, DualEncoder | VQA):
        return False
    if reads_volumes(model.model):
        return has_volume_patches(model.model)
    try:
        heatmap(model.model, np.zeros((64, 64), np.uint8), model.names[0])
    except (ConfigError, EvaluationError):
        return False
    return True


def image_name(path: Path) -> str:
    """Return the path as text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())[:40].strip("-")


def _rows(names: Sequence[str], rows: Any) -> list[dict[str, Value]]:
    return [dict(zip(names, row, strict=True)) for row in rows]


def _hidden(progress: bool | None) -> bool | None:
    return None if progress is None else not progress


def _open_folder(out: Path, settings: dict[str, Any]) -> dict[str, ImageResult]:
    """Return the finished results in a folder. Raises ConfigError if it has other content."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a folder", "exists", field="out")
    out.mkdir(parents=True, exist_ok=True)
    path = out / SETTINGS
    if not path.is_file():
        if any(out.iterdir()):
            raise ConfigError(
                f"{out} is not empty and has no results to continue; give another",
                "exists",
                field="out",
            )
        write_atomic(
            path, json.dumps(settings, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        )
        return {}
    try:
        same = parse_json(path.read_bytes()) == json.loads(json.dumps(settings))
    except ValueError:
        same = False
    if not same:
        message = (
            f"{out} has results of another model, other texts or options; give another "
            f"folder, or remove it"
        )
        raise ConfigError(message, "exists", field="out")
    return {result.image: result for result in _read_lines(out / LINES)}


def _read_lines(path: Path) -> Iterator[ImageResult]:
    """Yield the finished results; cut off a last line that an interruption left half written."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        write_atomic(path, whole)
    # not at the separators of Unicode, which names may have
    for line in whole.decode().split("\n")[:-1]:
        data = parse_json(line)
        yield ImageResult(**{**data, "overlays": tuple(data.get("overlays", ()))})


# Image files that users name: files, and folders with all images below them.

SUFFIXES = frozenset((".dcm", ".dicom", ".jpg", ".jpeg", ".png"))
_OTHER_FORMATS = frozenset((".bmp", ".gif", ".tif", ".tiff", ".webp"))
"""Images that cannot be read: they are counted as skipped, and not passed over."""


def find_images(paths: Iterable[Path | str]) -> list[Path]:
    """Return the image files among paths, sorted within a folder, without repetitions.

    A file is taken as it is. Of a folder, all files below it are taken that end in .dcm, .dicom,
    .jpg, .jpeg or .png, or begin as a DICOM file does, as those of DICOM trees without suffixes;
    and images of other formats, which reading refuses. Hidden ones are left out, and links to
    folders are not followed.

    Raises ImageError for a path that does not exist, and for folders without an image.
    """
    images: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ImageError(f"{path} does not exist", "not_found", field="images")
        images |= dict.fromkeys(_below(path) if path.is_dir() else [path])
    if not images:
        raise ImageError(
            "expected images, or folders with DICOM, JPEG or PNG files; got none",
            "empty",
            field="images",
        )
    return list(images)


VOLUME_SUFFIXES = (".nii", ".nii.gz")


def find_volumes(paths: Iterable[Path | str]) -> list[Path]:
    """Return the volumes among paths: files as they are, and of a folder all NIfTI files below it
    and all folders that hold DICOM files, one series each (or enhanced files of one).

    Raises ImageError for a path that does not exist, and for folders without a volume.
    """
    volumes: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ImageError(f"{path} does not exist", "not_found", field="images")
        if path.is_file():
            volumes[path] = None
            continue
        for parent, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            files = [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
            volumes |= dict.fromkeys(
                file for file in files if file.name.lower().endswith(VOLUME_SUFFIXES)
            )
            if any(_is_dicom(file) for file in files):
                volumes[Path(parent)] = None
    if not volumes:
        raise ImageError(
            "expected NIfTI files, or folders of DICOM series; got none", "empty", field="images"
        )
    return list(volumes)


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            is_image = path.suffix.lower() in SUFFIXES | _OTHER_FORMATS
            if not name.startswith(".") and (is_image or _is_dicom(path)):
                yield path


def _is_dicom(path: Path) -> bool:
    """Return whether a file has the preamble of DICOM, other than that of a DICOMDIR, which has
    no image.
    """
    if path.name.upper() == "DICOMDIR" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return starts_like_dicom(file.read(132))
    except OSError:
        return False
