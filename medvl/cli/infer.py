"""`medvl infer`: predictions of a model for images."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from medvl.eval.zero_shot_classification.calibration import Calibration
    from medvl.inference.folder import ImageModel, ImageResult
    from medvl.models.base import System

_SHOWN, _WIDTH = 20, 100


def infer(
    images: tyro.conf.Positional[tuple[Path, ...]],
    *,
    checkpoint: str,
    texts: tuple[str, ...] = (),
    prompts: str = "chexpert_ensemble",
    calibration: Path | None = None,
    out: Path | None = None,
    overlays: int = 1,
    batch: int = 32,
    frame: int | None = None,
    modality: tuple[str, ...] = (),
    device: str = "auto",
) -> str:
    """Score images against texts, answer questions about them, or write their reports; print a table.

    Args:
        images: DICOM, JPEG and PNG files, and folders with them.
        checkpoint: a run or a checkpoint, such as runs/convirt, or hf-hub:OWNER/NAME.
        texts: findings or phrases for a dual-encoder, labels of a classifier (default: all of them), questions for a
            VQA model; report generators take none.
        prompts: prompt set of dual-encoders: a name (`medvl list prompts`) or a JSON file.
        calibration: file of `medvl eval calibrate`; default the one of the checkpoint, if there is one. Without it,
            values are scores, which rank images and are no probabilities.
        out: folder for results.jsonl, results.csv and overlays; the same command again continues it.
        overlays: heat maps for each image, of the texts with the highest values, written to OUT/overlays.
        batch: images per batch.
        frame: frame of multi-frame DICOM files, from 0; without it they are skipped.
        modality: modalities of DICOM files to accept, such as CR DX RG; others are skipped. Without it, all are
            scored, and those of another kind than the model's training images by their header are marked and counted in
            a warning.
        device: auto, cpu or cuda.
    """
    from medvl.errors import ConfigError
    from medvl.eval.core.open import load_model
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.zero_shot_classification.calibration import calibration_for
    from medvl.eval.zero_shot_classification.prompts import load_prompts
    from medvl.inference.files import find_images
    from medvl.inference.folder import ImageModel, can_draw, count_skipped, infer_files
    from medvl.models import DualEncoder

    for field, value, low in (("batch", batch, 1), ("overlays", overlays, 0), ("frame", frame or 0, 0)):
        if value < low:
            raise ConfigError(f"expected {field} of {low} or more, got {value}", "out_of_range", field=field)
    paths = find_images(images)
    loaded = load_model(Path(checkpoint), device)
    fitted, reason = None, "only scores by prompts are calibrated"
    if isinstance(loaded, DualEncoder):
        fitted, reason = calibration_for(Path(checkpoint), load_prompts(prompts), calibration)
    model = ImageModel(loaded, texts or None, prompts=prompts, calibration=fitted)
    accepted = tuple(name.strip().upper() for name in modality)
    drawn = overlays if out is not None and overlays and can_draw(model) else 0
    settings: dict[str, Any] = {
        "checkpoint": checkpoint_sha256(checkpoint),
        "texts": list(texts),
        "prompts": prompts,
        "frame": frame,
        "overlays": drawn,
    }
    if model.calibrated:
        settings["probabilities"] = {name: dataclasses.asdict(each) for name, each in model.calibrated.items()}
    if accepted:
        settings["modality"] = sorted(accepted)
    results = infer_files(
        model, paths, out=out, settings=settings, overlays=drawn, batch=batch, frame=frame, modality=accepted
    )
    skipped = count_skipped(results)
    if sum(skipped.values()) == len(results):
        advice = "expected DICOM, JPEG or PNG files, or folders with them; unpack archives first"
        raise ConfigError(f"no image could be read: {_counts(skipped)}; {advice}", "empty", field="images")
    if model.gives in ("score", "value"):
        print(_uncalibrated(model, fitted, reason), file=sys.stderr)  # the table on stdout stays one
    lines = [format_results(results, model.names, model.gives), *_notes(loaded, results, skipped)]
    if out is None:
        return "\n".join(lines)
    if overlays and not drawn:
        lines.append(f"\nno overlays: {model.model.name} has no heat maps of texts")
    return "\n".join([*lines, "", *(str(out / name) for name in sorted(path.name for path in out.iterdir()))])


def _notes(model: "System", results: "Sequence[ImageResult]", skipped: Mapping[str, int]) -> Iterator[str]:
    """Yield what the reader of the table must know: skipped images, and images of another kind than the model's."""
    from medvl.inference.modality import Expected, describe_doubts

    if skipped:
        yield f"\n{sum(skipped.values())} of {len(results)} images skipped: {_counts(skipped)}"
    warning = describe_doubts([result.warning for result in results if result.skipped is None], Expected.by(model))
    if warning:
        yield f"\nwarning: {warning}; --modality leaves other modalities out (--modality CR DX RG: radiographs only)"


def format_results(results: "Sequence[ImageResult]", names: Sequence[str], gives: str) -> str:
    """Return the results as a table: one image per row, or one text per row for one image; the first 20 images."""
    shown = [result for result in results if result.skipped is None][:_SHOWN]
    if gives == "report":
        return "\n\n".join(f"{result.image}{_kind(result, before=': ')}\n{result.values['report']}" for result in shown)
    if len(results) == 1:
        values = results[0].values
        order = sorted(names, key=lambda name: -value if isinstance(value := values[name], float) else 0)
        table = _table([[name, _cell(values[name])] for name in order], ["", gives])
        return f"{results[0].image}{_kind(results[0], before=': ')}\n\n{table}"
    columns = list(names)
    while len(columns) > 1 and sum(max(len(name), 6) + 2 for name in columns) > _WIDTH:
        columns.pop()
    with_kind = any(map(_kind, shown))
    rows = [
        [
            _ending(result.image),
            *([_kind(result)] if with_kind else []),
            *(_cell(result.values[name]) for name in columns),
        ]
        for result in shown
    ]
    more = [f"{len(names) - len(columns)} more columns"] if len(columns) < len(names) else []
    readable = sum(result.skipped is None for result in results)
    more += [f"{readable - len(shown)} more images"] if readable > len(shown) else []
    return _table(rows, ["image", *(["modality"] if with_kind else []), *columns]) + (
        "\n... " + " and ".join(more) if more else ""
    )


def _kind(result: "ImageResult", before: str = "") -> str:
    """Return modality and body part, with a mark on images of other kinds than the model's; "" for other files."""
    kind = " ".join(filter(None, (result.modality, result.body_part, "(!)" if result.warning else None)))
    return kind and before + kind


def _uncalibrated(model: "ImageModel", calibration: "Calibration | None", reason: str) -> str:
    """Return which values are scores, and why."""
    if calibration is None:
        return f"Scores rank images and are no calibrated probabilities: {reason}."
    left_out = calibration.left_out
    names = [name for name in model.names if name not in model.calibrated]
    reasons = "; ".join(f"{name} ({left_out.get(name, 'it is not one of the calibrated findings')})" for name in names)
    others = f" Probabilities: {', '.join(model.calibrated)}." if model.calibrated else ""
    return f"Scores, which rank images and are no calibrated probabilities: {reasons}.{others}"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


def _ending(path: str, width: int = 60) -> str:
    return path if len(path) <= width else "..." + path[3 - width :]


def _counts(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items(), key=lambda pair: -pair[1]))
