"""`medvl import`: a published checkpoint in, a folder that medvl reads out. `medvl export`: the other way."""

import importlib
import math
from pathlib import Path
from typing import Annotated, Literal

import tyro

from medvl.errors import ConfigError

_EXPORTERS = {
    "open_clip": ("medvl.export.exporters.open_clip", "export_open_clip"),
    "huggingface": ("medvl.export.exporters.hugging_face", "export_hugging_face"),
    "onnx": ("medvl.export.exporters.onnx", "export_onnx"),
}


def import_published(
    system: tyro.conf.Positional[str] = "",
    file: tyro.conf.Positional[Path | None] = None,
    *,
    out: Path | None = None,
    tokenizer: Path | None = None,
    list_all: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> str:
    """Import a published checkpoint (GLoRIA, CheXzero, MedCLIP, ...): whole, or as encoders.

    Args:
        system: which (`medvl import --list`), or open_clip:NAME.
        file: the published file; nothing in it is run.
        out: new folder, which gets a checkpoint, or image_encoder and text_encoder; and import.json.
        tokenizer: folder of the system's tokenizer, for systems that do not have CLIP's.
        list_all: list what can be imported.
    """
    if list_all:
        return _list()
    if not system or file is None or out is None:
        raise ConfigError("say what to import and where to: medvl import SYSTEM FILE --out DIR, or medvl import --list")
    from medvl.export.importers.import_checkpoint import REPORT, import_checkpoint

    imported = import_checkpoint(system, file, tokenizer=tokenizer, out=out)
    reasons = sorted({*imported.left_out.values()})
    lines = [
        f"Wrote {out}: {imported.loaded} tensors loaded, {len(imported.left_out)} left out, see {REPORT}",
        *(f"  left out: {reason}" for reason in reasons),
        *(f"  zero: {name}: {why}" for name, why in imported.zeros.items()),
        *([f"  note: {imported.note}"] if imported.note else []),
    ]
    return "\n".join(lines)


def export_checkpoint(
    checkpoint: Path, *, to: Literal["open_clip", "huggingface", "onnx"] = "huggingface", out: Path | None = None
) -> str:
    """Export a checkpoint to open_clip, Hugging Face or ONNX, and prove that it computes the same.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best.
        to: open_clip takes CLIP-shaped models; huggingface, towers that transformers has a class for, or a whole CLIP;
            onnx, any system's towers.
        out: new folder; default beside the checkpoint, with the format behind its name.
    """
    from medvl.models import load

    module, name = _EXPORTERS[to]
    model, folder = load(checkpoint), out or checkpoint.with_name(f"{checkpoint.name}-{to}")
    if folder.exists():
        raise ConfigError(f"{folder} exists: give a folder that does not with --out")
    exported = getattr(importlib.import_module(module), name)(model, folder)
    compared = {output: value for output, value in exported.differences.items() if not math.isnan(value)}
    lines = [
        f"Wrote {folder}",
        *(f"  {output}: differs from medvl's by at most {value:.1e} of its size" for output, value in compared.items()),
        *([] if compared else ["  not compared with medvl's: onnxruntime is not installed"]),
        *(f"  left out: {part}: {why}" for part, why in exported.left_out.items()),
    ]
    return "\n".join(lines)


def _list() -> str:
    from medvl.export.importers.registry import NOT_IMPORTED, list_importers

    rows = [(importer.name, importer.kind, importer.title) for importer in list_importers()]
    rows.append(("open_clip:NAME", "system", "any model of open_clip whose towers are its own"))
    lines = [f"{name:17} {makes:24} {title}" for name, makes, title in sorted(rows)]
    lines += [f"{name:17} {'not imported':24} {why}" for name, why in NOT_IMPORTED.items()]
    return "\n".join(lines)
