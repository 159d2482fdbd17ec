"""`medvl infer`: predictions of a model for images."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from medvl.data.volumes.options import OrganLabels
from medvl.errors import ConfigError
from medvl.serve.config import ServeConfig

if TYPE_CHECKING:
    from medvl.eval.zero_shot_classification.calibration import Calibration
    from medvl.inference.folder import ImageModel, ImageResult
    from medvl.inference.generation import GenerateOptions, Prompt
    from medvl.models.base import System


_SHOWN = 20
_WIDTH = 100


def infer(
    images: tyro.conf.Positional[tuple[Path, ...]] = (),
    *,
    checkpoint: str,
    texts: tuple[str, ...] = (),
    prompts: str = "",
    calibration: Path | None = None,
    out: Path | None = None,
    overlays: int = 1,
    nifti: bool = False,
    batch: int = 32,
    frame: int | None = None,
    modality: tuple[str, ...] = (),
    organ_masks: Path | None = None,
    organ_labels: OrganLabels = "totalsegmentator2",
    all_tokens: bool = False,
    by_study: bool = False,
    device: str = "auto",
) -> str:
    """Score images against texts, answer questions about them, or write their reports; print a
    table.

    Args:
        images: DICOM, JPEG and PNG files, and folders with them; for a model of volumes, NIfTI
            files and folders of DICOM series; for the checkpoint demo, by default demo.png, a
            synthetic radiograph that is drawn if there is none.
        checkpoint: a run or a checkpoint, such as runs/convirt, hf-hub:OWNER/NAME, or demo, a small
            model of synthetic radiographs.
        texts: findings or phrases for a dual-encoder, labels of a classifier (default: all of
            them), questions for a VQA model; report generators take none.
        prompts: prompt set of dual-encoders: a name (`medvl list prompts`) or a JSON file; default
            chexpert_ensemble, and ct_clip for volumes.
        calibration: file of `medvl eval calibrate`; default the one of the checkpoint, if there is
            one. Without it, values are scores, which rank images and are no probabilities.
        out: folder for results.jsonl, results.csv and overlays; the same command again continues
            it.
        overlays: heat maps for each image, of the texts with the highest values, written to
            OUT/overlays; for volumes, the slices through the highest value.
        nifti: write the maps of volumes as NIfTI files too, in the voxels of each file.
        batch: images per batch.
        frame: frame of multi-frame DICOM files, from 0; without it they are skipped.
        modality: modalities of DICOM files to accept, such as CR DX RG; others are skipped. Without
            it, all are scored, and those of another kind than the model's training images by their
            header are marked and counted in a warning.
        organ_masks: for fvlm, folder with the masks of each volume: NAME.nii.gz, or a folder NAME
            with a file for each structure, as in `medvl shards volumes`.
        organ_labels: numbers of masks with all structures: totalsegmentator2, totalsegmentator1, or
            organs.
        all_tokens: for fvlm, read all of a volume for each organ, without masks; it was trained
            within them.
        by_study: for report generators, take the images of a folder as one study, in the order of
            their names, and write one report of it.
        device: auto, cpu or cuda.
    """
    from medvl.eval.core.open import load_model
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.zero_shot_classification.calibration import calibration_for
    from medvl.eval.zero_shot_classification.prompts import load_prompts
    from medvl.inference.folder import (
        ImageModel,
        can_draw,
        count_skipped,
        find_images,
        find_volumes,
        infer_files,
    )
    from medvl.inference.volumes import reads_volumes
    from medvl.models import DualEncoder

    _check_numbers(("batch", batch, 1), ("overlays", overlays, 0), ("frame", frame or 0, 0))
    if not images:
        images = _example(checkpoint)
    loaded = load_model(Path(checkpoint), device)
    of_volumes = reads_volumes(loaded)
    organs = _set_organs(loaded, organ_masks, organ_labels, all_tokens)
    paths = find_volumes(images) if of_volumes else find_images(images)
    prompts = prompts or ("ct_clip" if of_volumes else "chexpert_ensemble")
    fitted = None
    reason = "only scores by prompts are calibrated"
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
        **organs,
    }
    if model.calibrated:
        settings["probabilities"] = {
            name: dataclasses.asdict(each) for name, each in model.calibrated.items()
        }
    if by_study:
        settings["by_study"] = True
    if accepted:
        settings["modality"] = sorted(accepted)
    if nifti and drawn and of_volumes:
        settings["nifti"] = True
    results = infer_files(
        model,
        paths,
        out=out,
        settings=settings,
        overlays=drawn,
        nifti=nifti and of_volumes,
        batch=batch,
        frame=frame,
        modality=accepted,
        by_study=by_study,
    )
    skipped = count_skipped(results)
    if sum(skipped.values()) == len(results):
        advice = _advice(checkpoint, paths, of_volumes)
        raise ConfigError(
            f"no image could be read: {_counts(skipped)}; {advice}", "empty", field="images"
        )
    if model.gives in ("score", "value"):
        # the table on stdout stays one
        print(_uncalibrated(model, fitted, reason), file=sys.stderr)
    lines = [
        format_results(results, model.names, model.gives),
        *_notes(loaded, results, skipped, by_study),
    ]
    if out is None:
        return "\n".join(lines)
    if overlays and not drawn:
        lines.append(f"\nno overlays: {model.model.name} has no heat maps of texts")
    return "\n".join(
        [*lines, "", *(str(out / name) for name in sorted(path.name for path in out.iterdir()))]
    )


def _set_organs(
    model: "System", masks: Path | None, labels: OrganLabels, all_tokens: bool
) -> dict[str, Any]:
    """Let a model that needs the organs of volumes read masks, or all of each volume; return the
    entry of the settings.

    Raises ConfigError where neither or both are given, and for other models.
    """
    transform: Any = model.transform
    if not getattr(transform, "organs", False):
        if masks is not None or all_tokens:
            raise ConfigError(
                f"{model.name} reads no masks of organs; leave organ_masks and all_tokens out",
                "conflict",
                field="organ_masks",
            )
        return {}
    if (masks is None) != all_tokens:
        raise ConfigError(
            f"{model.name} reads each organ within its mask: give --organ-masks FOLDER, or "
            "--all-tokens to read all of a volume for each organ, which it was not trained on",
            "missing",
            field="organ_masks",
        )
    if masks is not None and not masks.is_dir():
        raise ConfigError(f"{masks} is no folder", "not_found", field="organ_masks")
    model.transform = dataclasses.replace(
        transform, organs=not all_tokens, organ_masks=masks, organ_labels=labels
    )
    return {"organs": "all tokens" if masks is None else [str(masks), labels]}


def _advice(checkpoint: str, paths: Sequence[Path], of_volumes: bool) -> str:
    """Return what to do where no file could be read."""
    from medvl.inference.folder import VOLUME_SUFFIXES

    if of_volumes:
        return "expected NIfTI files or folders of DICOM series in Hounsfield units"
    if any(str(path).endswith(VOLUME_SUFFIXES) for path in paths):
        return (
            f"{checkpoint} reads images and these are volumes: take a model of volumes, or convert "
            "them with `medvl shards volumes` for `medvl eval`, which gives it slices"
        )
    return "expected DICOM, JPEG or PNG files, or folders with them; unpack archives first"


def _check_numbers(*options: tuple[str, int, int]) -> None:
    """Raise ConfigError for an option (name, value, least value) below its least value."""
    for field, value, low in options:
        if value < low:
            raise ConfigError(
                f"expected {field} of {low} or more, got {value}", "out_of_range", field=field
            )


def _example(checkpoint: str) -> tuple[Path, ...]:
    """Return the example radiograph of the demo, drawn into the current folder if there is
    none.
    """
    from medvl.models.checkpoint_folder import kind_of
    from medvl.phantom import write_example

    if kind_of(checkpoint) != "demo":
        message = "expected image files, or folders with them; name them after `medvl infer`"
        raise ConfigError(message, "missing", field="images")
    path = Path("demo.png")
    if not path.exists():
        impression = write_example(path)
        print(f"Drew {path}, a synthetic radiograph. Its report: {impression}", file=sys.stderr)
    return (path,)


def _notes(
    model: "System",
    results: "Sequence[ImageResult]",
    skipped: Mapping[str, int],
    by_study: bool,
) -> Iterator[str]:
    """Yield what the reader of the table must know: skipped images or studies, and images of
    another kind than the model's.
    """
    from medvl.inference.models import Expected, describe_doubts

    unread = Counter[str]()
    for result in results:
        unread.update(result.unread)
    if unread:
        yield f"\n{unread.total()} images of studies not read: {_counts(unread)}"
    if skipped:
        unit = "studies" if by_study else "images"
        yield f"\n{sum(skipped.values())} of {len(results)} {unit} skipped: {_counts(skipped)}"
    expected = Expected.by(model)
    warning = describe_doubts(
        [result.warning for result in results if result.skipped is None], expected
    )
    if warning:
        kind = expected.kinds[0]
        yield (
            f"\nwarning: {warning}; --modality leaves other modalities out (--modality "
            f"{' '.join(kind.modalities)}: {kind.name} only)"
        )


def format_results(results: "Sequence[ImageResult]", names: Sequence[str], gives: str) -> str:
    """Return the results as a table: one image per row, or one text per row for one image; the
    first 20 images.
    """
    shown = [result for result in results if result.skipped is None][:_SHOWN]
    if gives == "report":
        return "\n\n".join(
            f"{result.image}{_kind(result, before=': ')}\n{result.values['report']}"
            for result in shown
        )
    if len(results) == 1:
        values = results[0].values
        order = sorted(
            names, key=lambda name: -value if isinstance(value := values[name], float) else 0
        )
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
    """Return modality and body part, with a mark on images of other kinds than the model's; ""
    for other files.
    """
    kind = " ".join(
        filter(None, (result.modality, result.body_part, "(!)" if result.warning else None))
    )
    return kind and before + kind


def _uncalibrated(model: "ImageModel", calibration: "Calibration | None", reason: str) -> str:
    """Return which values are scores, and why."""
    if calibration is None:
        return f"Scores rank images and are no calibrated probabilities: {reason}."
    left_out = calibration.left_out
    names = [name for name in model.names if name not in model.calibrated]
    reasons = "; ".join(
        f"{name} ({left_out.get(name, 'it is not one of the calibrated findings')})"
        for name in names
    )
    others = f" Probabilities: {', '.join(model.calibrated)}." if model.calibrated else ""
    return f"Scores, which rank images and are no calibrated probabilities: {reasons}.{others}"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    )


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


def _ending(path: str, width: int = 60) -> str:
    return path if len(path) <= width else "..." + path[3 - width :]


def _counts(skipped: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} {reason}" for reason, count in sorted(skipped.items(), key=lambda pair: -pair[1])
    )


# `medvl generate`: images from texts.


def generate(
    *,
    checkpoint: str,
    out: Path,
    prompt: tuple[str, ...] = (),
    prompts: Path | None = None,
    data: Path | None = None,
    sections: tuple[str, ...] = ("impression",),
    views: tuple[str, ...] = (),
    limit: int | None = None,
    guidance: tuple[float, ...] = (4.0,),
    steps: int = 25,
    sampler: Literal["dpm", "ddim", "pndm"] = "dpm",
    seed: int = 0,
    images_per_prompt: int = 1,
    reconstruct: bool = False,
    mark: bool = False,
    batch: int = 16,
    precision: Literal["fp32", "bf16"] = "fp32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> str:
    """Generate synthetic images of texts; the same command again continues an interrupted folder.

    Args:
        checkpoint: a latent diffusion model (roentgen): a run, a checkpoint, or hf-hub:OWNER/NAME.
        out: folder for images/, images.jsonl, generation.json and a contact sheet; with several
            values of guidance, one folder for each in it, such as guidance-4.
        prompt: texts.
        prompts: file with one text per line, in place of --prompt.
        data: folder of shards (one split) whose texts are the prompts, in place of --prompt.
        sections: sections that form the text of a sample of --data.
        views: views of --data, such as PA AP; all without it.
        limit: number of samples of --data, evenly spaced.
        guidance: scales of the classifier-free guidance; 1 is without.
        steps: evaluations of the U-Net for each image.
        sampler: dpm (DPM-Solver++), ddim, or pndm, which RoentGen used with 75 steps.
        seed: seed of the run; each image has its own, derived from it.
        images_per_prompt: images of each text.
        reconstruct: encode and decode the images of --data instead, the ceiling of a generator on
            this autoencoder.
        mark: write "synthetic" into a corner of each image.
        batch: images at a time.
        precision: fp32, or bf16 for the networks.
        device: auto, cpu or cuda.
    """
    from medvl.inference.generation import GenerateOptions

    texts, source = _prompts(prompt, prompts, data, sections, views, limit)
    scales = (1.0,) if reconstruct else guidance
    if not scales:
        raise ConfigError("give at least one value of --guidance", "missing", field="guidance")
    options = [
        GenerateOptions(guidance=scale, steps=steps, sampler=sampler, seed=seed,
        images_per_prompt=images_per_prompt,
                        batch=batch, device=device, precision=precision, mark=mark)
        for scale in scales
    ]  # fmt: skip
    folders = [out / f"guidance-{scale:g}" if len(scales) > 1 else out for scale in scales]
    shards = data if reconstruct else None
    if reconstruct and data is None:
        raise ConfigError("--reconstruct needs the images of --data", "missing", field="data")
    return _write(checkpoint, texts, source, dict(zip(folders, options, strict=True)), shards)


def _prompts(
    prompt: Sequence[str],
    prompts: Path | None,
    data: Path | None,
    sections: Sequence[str],
    views: Sequence[str],
    limit: int | None,
) -> "tuple[list[Prompt], dict[str, Any]]":
    """Return the prompts and their source."""
    from medvl.inference.generation import Prompt, prompts_of_file, prompts_of_shards

    if sum((bool(prompt), prompts is not None, data is not None)) != 1:
        raise ConfigError(
            "give exactly one of --prompt, --prompts and --data", "conflict", field="prompts"
        )
    if data is not None:
        return prompts_of_shards(data, sections=sections, views=views, limit=limit)
    if prompts is not None:
        return prompts_of_file(prompts)
    return [Prompt(text=text, key=str(number)) for number, text in enumerate(prompt, 1)], {
        "kind": "command"
    }


def _write(
    checkpoint: str,
    prompts: "Sequence[Prompt]",
    source: Mapping[str, Any],
    folders: "Mapping[Path, GenerateOptions]",
    shards: Path | None,
) -> str:
    """Write the folders of generated images, or with `shards` of reconstructions, and return a
    summary.
    """
    from medvl.inference.generation import CONTACT_SHEET, generate_images, reconstruct_images

    lines = []
    cut = []
    for folder, options in folders.items():
        settings: dict[str, Any] = {"options": options, "source": source, "progress": True}
        if shards is None:
            images = generate_images(checkpoint, prompts, folder, **settings)
        else:
            images = reconstruct_images(checkpoint, shards, prompts, folder, **settings)
        cut = [row.cut_tokens for row in images.rows if row.cut_tokens]
        lines.append(f"Wrote {folder}: {len(images)} synthetic images, {folder / CONTACT_SHEET}")
    if cut:
        lines.append(
            f"{len(cut)} images have prompts longer than the text encoder reads: up to "
            f"{max(cut)} tokens cut"
        )
    return "\n".join(lines)


# `medvl serve`: a page in the browser for one image.


def serve(
    server: tyro.conf.OmitArgPrefixes[ServeConfig],
    *,
    checkpoint: tuple[str, ...] = (),
    prompts: str = "",
    calibration: tuple[Path, ...] = (),
    gallery: Path | None = None,
    gallery_images: int = 5000,
    all_tokens: bool = False,
    certificate: tuple[Path, Path] | None = None,
    device: str = "auto",
) -> None:
    """Serve a page for one image or volume: findings, heat maps, questions, reports, neighbours.

    Args:
        server: address, access and limits.
        checkpoint: a run, a folder of a checkpoint, or a name on the hub; two are shown side by
            side (required).
        prompts: name of a prompt set (`medvl list prompts`) or path of a JSON file, whose findings
            are offered; default chexpert_ensemble, and ct_clip for volumes.
        calibration: files of `medvl eval calibrate`, one for each checkpoint; default those beside
            the checkpoints.
        gallery: folder of shards whose images are searched for neighbours.
        gallery_images: images of the gallery, evenly spread over its shards.
        all_tokens: read all of a volume for each organ, in a model that was trained with masks of
            organs (fvlm).
        certificate: files of a TLS certificate and its key, for https.
        device: auto, cpu or cuda.
    """
    try:
        import fastapi
        import python_multipart
        import uvicorn
    except ImportError as error:
        message = f"medvl serve needs the package {error.name}: pip install 'medvl[serve]'"
        raise ConfigError(message, "missing", field="serve") from None
    del fastapi, python_multipart, uvicorn
    from medvl.serve.app import serve as run

    run(
        checkpoint,
        config=server,
        prompts=prompts,
        calibrations=calibration,
        gallery=gallery,
        gallery_images=gallery_images,
        device=device,
        all_tokens=all_tokens,
        certificate=certificate,
    )


# `medvl embed`: embeddings of images in a Parquet file.


def embed(
    *,
    checkpoint: str,
    data: tuple[str, ...],
    out: Path,
    pooled: bool = False,
    patches: bool = False,
    batch: int = 16,
    workers: int = 2,
    frame: int | None = None,
    modality: tuple[str, ...] = (),
    device: str = "auto",
    replace: bool = False,
) -> str:
    """Write the embeddings of images to a Parquet file; the same command again continues it.

    Args:
        checkpoint: a run or a checkpoint, such as runs/convirt, or hf-hub:OWNER/NAME.
        data: folders of shards, or folders with one for each split; or DICOM, JPEG and PNG files,
            and folders with them; for a model of volumes, NIfTI files and DICOM series.
        out: file that ends in .parquet.
        pooled: write the pooled vector of the image encoder, which `medvl eval probe` reads,
            instead of the vector that is compared with texts. Other systems than dual-encoders
            have no other.
        patches: write the vectors of the patches too, as a column of flat lists.
        batch: images per batch; more are faster on a GPU and need more memory. The last bits of a
            vector depend on it.
        workers: loader processes for shards.
        frame: frame of multi-frame DICOM files, from 0; without it they are skipped.
        modality: modalities of DICOM files to accept, such as CR DX RG; others are skipped.
        device: auto, cpu or cuda.
        replace: replace a file of another checkpoint, of other data or of other options.
    """
    from medvl.inference.embeddings import embed as write

    written = write(
        checkpoint,
        data,
        out,
        pooled=pooled,
        patches=patches,
        batch=batch,
        workers=workers,
        frame=frame,
        modality=modality,
        device=device,
        replace=replace,
    )
    kind = (
        "L2-normalised vectors of encode_image"
        if written.vector == "encode_image"
        else "pooled vectors of the image encoder"
    )
    lines = [f"Wrote {written.path}: {written.rows:,} {kind}, {written.dim} numbers each"]
    if written.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in written.skipped.items())
        lines.append(f"{sum(written.skipped.values())} images skipped: {reasons}")
    return "\n".join(lines)
