"""`medvl import` and `medvl export`: published checkpoints to medvl, and medvl checkpoints to other formats."""

import importlib
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from medvl.errors import ConfigError, MedvlError

_EXPORTERS = {
    "open_clip": ("medvl.export.exporters.open_clip", "export_open_clip"),
    "huggingface": ("medvl.export.exporters.hugging_face", "export_hugging_face"),
    "onnx": ("medvl.export.exporters.onnx", "export_onnx"),
    "published": ("medvl.export.exporters.published", "export_published"),
}

_FORMATS = {
    "huggingface": "every system: both encoders, as classes of transformers or timm if they compute the same, else for "
    "medvl.export.load_encoder; heads of ConVIRT, CLIP, CheXzero and SigLIP, with a loader for zero-shot scores",
    "open_clip": "CLIP, CheXzero and SigLIP, complete, with encoders that open_clip builds",
    "onnx": "every system: both encoders, with the heads of dual-encoders; needs medvl[onnx]",
    "published": "BioViL, BioViL-T, LoVT, MedCLIP and MGCA, complete, as the files of their authors' code",
}


def consolidate_checkpoint(checkpoint: Path, out: Path) -> str:
    """Write the model of a checkpoint in parts (sharded_checkpoints) with all weights in one file.

    Args:
        checkpoint: checkpoint or run.
        out: new folder.
    """
    from medvl.models import consolidate

    return f"{consolidate(checkpoint, out)}: one file of weights"


def import_published(
    system: tyro.conf.Positional[str] = "",
    file: tyro.conf.Positional[Path | None] = None,
    *,
    text_file: Path | None = None,
    entities: Path | None = None,
    out: Path | None = None,
    tokenizer: Path | None = None,
    weights: str | None = None,
    list_all: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> str:
    """Import a published checkpoint (GLoRIA, CheXzero, MedCLIP, ...) as a system or as encoders.

    Args:
        system: name of the system (`medvl import --list`), or open_clip:NAME.
        file: published file, or a folder of stable_diffusion; no code in it is executed.
        text_file: the text model's file, of a system published in two (biovil, biovil_t) or without it (medklip, mavl,
            lvit).
        entities: file of the entities that the system was trained with (medklip, mavl, kad, arl).
        out: new output folder for a checkpoint, or for image_encoder and text_encoder, with import.json.
        tokenizer: folder of the system's tokenizer; not needed for CLIP's.
        weights: name of a set of weights in the file, where it has several: state_dict_ema, teacher.
        list_all: list the systems that can be imported.
    """
    if list_all:
        return _list()
    if not system or file is None or out is None:
        raise ConfigError("expected medvl import SYSTEM FILE --out DIR, or medvl import --list", "missing", field="out")
    if system == "stable_diffusion":
        if weights is not None:
            raise ConfigError("stable_diffusion is a folder of parts; leave --weights out", "conflict", field="weights")
        return _import_stable_diffusion(file, out)
    from medvl.export.importers.import_checkpoint import REPORT, import_checkpoint

    others = {"text_file": text_file, "entities": entities, "tokenizer": tokenizer}
    imported = import_checkpoint(system, file, **others, weights=weights, out=out)
    reasons = sorted({*imported.left_out.values()})
    lines = [
        f"Wrote {out}: {imported.loaded} tensors loaded, {len(imported.left_out)} left out, see {REPORT}",
        *(f"  left out: {reason}" for reason in reasons),
        *(f"  not read: {entry}: {reason}" for entry, reason in imported.beside.items() if "set" in reason),
        *(f"  zero: {name}: {reason}" for name, reason in imported.zeros.items()),
        *([f"  note: {imported.note}"] if imported.note else []),
    ]
    return "\n".join(lines)


def _import_stable_diffusion(folder: Path, out: Path) -> str:
    """Write a local folder of Stable Diffusion 1.x as a checkpoint of `roentgen`."""
    from medvl.common.folders import new_folder
    from medvl.export.importers.stable_diffusion import load_stable_diffusion
    from medvl.models.checkpoint import save

    if out.exists():
        raise ConfigError(f"{out} exists; give a new folder with --out", "exists", field="out")
    model = load_stable_diffusion(folder)
    with new_folder(out) as new:
        save(model, new, {"imported": {"system": "stable_diffusion"}})
    return f"Wrote {out}: {len(model.state_dict())} tensors, as {model.name}"


def export_checkpoint(
    checkpoint: tyro.conf.Positional[Path | None] = None,
    *,
    to: Literal["open_clip", "huggingface", "onnx", "published"] = "huggingface",
    out: Path | None = None,
    list_all: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> str:
    """Export a checkpoint to open_clip, Hugging Face, ONNX or its authors' layout, and compare the outputs.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best.
        to: format; --list describes the formats.
        out: new output folder; default beside the checkpoint, with the format as suffix.
        list_all: list the formats; with a checkpoint, also try each of them and list the exported parts, or why it is
            not possible.
    """
    if checkpoint is None:
        if list_all:
            return "\n".join(f"{name:12} {text}" for name, text in _FORMATS.items())
        message = "expected medvl export CHECKPOINT --to FORMAT, or medvl export --list"
        raise ConfigError(message, "missing", field="checkpoint")
    from medvl.models import load

    model = load(checkpoint)
    if list_all:
        return "\n".join(f"{name:12} {_try(model, name)}" for name in _EXPORTERS)
    folder = out or checkpoint.with_name(f"{checkpoint.name}-{to}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; give a new folder with --out", "exists", field="out")
    exported = _exporter(to)(model, folder)
    compared = {output: value for output, value in exported.differences.items() if not math.isnan(value)}
    lines = [
        f"Wrote {folder}",
        *(f"  {output}: maximum relative difference from medvl {value:.1e}" for output, value in compared.items()),
        *([] if compared else ["  outputs not compared: onnxruntime is not installed"]),
        *(f"  left out: {part}: {reason}" for part, reason in exported.left_out.items()),
    ]
    return "\n".join(lines)


def _exporter(to: str) -> Any:
    module, name = _EXPORTERS[to]
    return getattr(importlib.import_module(module), name)


def _try(model: Any, to: str) -> str:
    """Return whether a model can be exported, by exporting it into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            exported = _exporter(to)(model, Path(folder) / "out")
        except MedvlError as error:
            return f"no: {error}"
        size = sum(path.stat().st_size for path in exported.folder.rglob("*") if path.is_file()) / 1e6
    left_out = f"; left out: {', '.join(exported.left_out)}" if exported.left_out else ""
    return f"yes, {size:.0f} MB: {', '.join(exported.differences)}{left_out}"


def _list() -> str:
    from medvl.export.importers.registry import NOT_IMPORTED, list_importers

    rows = [(importer.name, importer.kind, importer.title) for importer in list_importers()]
    rows.append(("open_clip:NAME", "system", "any model of open_clip with native encoders"))
    rows.append(("stable_diffusion", "system", "a local folder of Stable Diffusion 1.x (needs medvl[generation])"))
    lines = [f"{name:17} {kind:24} {title}" for name, kind, title in sorted(rows)]
    lines += [f"{name:17} {'not imported':24} {reason}" for name, reason in NOT_IMPORTED.items()]
    return "\n".join(lines)
