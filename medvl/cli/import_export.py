"""`medvl import` and `medvl export`: published checkpoints to medvl, and medvl checkpoints to
other formats.
"""

import dataclasses
import functools
import importlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from medvl.errors import ConfigError, MedvlError

if TYPE_CHECKING:
    from torch import Tensor

    from medvl.data.loading.sources import Subset
    from medvl.data.shards.source import ShardSource
    from medvl.data.transforms.image import EvalTransform


_EXPORTERS = {
    "open_clip": ("medvl.export.exporters.open_clip", "export_open_clip"),
    "huggingface": ("medvl.export.exporters.hugging_face", "export_hugging_face"),
    "onnx": ("medvl.export.exporters.onnx", "export_onnx"),
    "published": ("medvl.export.exporters.published", "export_published"),
}

_FORMATS = {
    "huggingface": "every system: both encoders, as classes of transformers or timm if they "
    "compute the same, else for "
    "medvl.export.load_encoder; heads of ConVIRT, CLIP, CheXzero and SigLIP, with a loader for "
    "zero-shot scores",
    "open_clip": "CLIP, CheXzero and SigLIP, complete, with encoders that open_clip builds",
    "onnx": "every system: both encoders, with the heads of dual-encoders; needs medvl[onnx]",
    "published": "BioViL, BioViL-T, LoVT, MedCLIP and MGCA, complete, as the files of their "
    "authors' code",
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
    resize: Literal["area", "bicubic", "bilinear", "bicubic_antialias", "bilinear_antialias"]
    | None = None,
    list_all: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> str:
    """Import a published checkpoint (GLoRIA, CheXzero, MedCLIP, ...) as a system or as encoders.

    Args:
        system: name of the system (`medvl import --list`), or open_clip:NAME.
        file: published file, or the folder of hf-siglip, hf-clip and stable_diffusion; no code in
            it is executed.
        text_file: the text model's file, of a system published in two (biovil, biovil_t) or without
            it (medklip, mavl, lvit).
        entities: file of the entities that the system was trained with (medklip, mavl, kad, arl).
        out: new output folder for a checkpoint, or for image_encoder and text_encoder, with
            import.json.
        tokenizer: folder of the system's tokenizer; not needed for CLIP's.
        weights: name of a set of weights in the file, where it has several: state_dict_ema,
            teacher.
        resize: kernel with which images are resized, in place of the released one: bilinear for
            MedSigLIP, whose card resizes images outside of its processor.
        list_all: list the systems that can be imported.
    """
    if list_all:
        return _list()
    if not system or file is None or out is None:
        raise ConfigError(
            "expected medvl import SYSTEM FILE --out DIR, or medvl import --list",
            "missing",
            field="out",
        )
    if system == "stable_diffusion":
        for name, value in (("weights", weights), ("resize", resize)):
            if value is not None:
                raise ConfigError(
                    f"stable_diffusion is a folder of parts; leave --{name} out",
                    "conflict",
                    field=name,
                )
        return _import_stable_diffusion(file, out)
    from medvl.export.importers.import_checkpoint import REPORT, import_checkpoint

    imported = import_checkpoint(
        system,
        file,
        text_file=text_file,
        entities=entities,
        tokenizer=tokenizer,
        weights=weights,
        resize=resize,
        out=out,
    )
    reasons = sorted({*imported.left_out.values()})
    lines = [
        f"Wrote {out}: {imported.loaded} tensors loaded, {len(imported.left_out)} left out, see "
        f"{REPORT}",
        *(f"  left out: {reason}" for reason in reasons),
        *(
            f"  not read: {entry}: {reason}"
            for entry, reason in imported.beside.items()
            if "set" in reason
        ),
        *(f"  zero: {name}: {reason}" for name, reason in imported.zeros.items()),
        *([f"  note: {imported.note}"] if imported.note else []),
    ]
    return "\n".join(lines)


def _import_stable_diffusion(folder: Path, out: Path) -> str:
    """Write a local folder of Stable Diffusion 1.x as a checkpoint of `roentgen`."""
    from medvl.common.files import new_folder
    from medvl.export.importers.stable_diffusion import load_stable_diffusion
    from medvl.models.checkpoint import save

    if out.exists():
        raise ConfigError(f"{out} exists; give a new folder with --out", "exists", field="out")
    model = load_stable_diffusion(folder)
    with new_folder(out) as new:
        save(model, new, {"imported": {"system": "stable_diffusion"}})
    return f"Wrote {out}: {len(model.state_dict())} tensors, as {model.name}"


def export_checkpoint(
    *,
    checkpoint: Path | None = None,
    to: Literal["open_clip", "huggingface", "onnx", "published"] = "huggingface",
    out: Path | None = None,
    list_all: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> str:
    """Export a checkpoint to open_clip, Hugging Face, ONNX or its authors' layout, and compare the
    outputs.

    Args:
        checkpoint: folder of a checkpoint, such as runs/convirt/best.
        to: format; --list describes the formats.
        out: new output folder; default beside the checkpoint, with the format as suffix.
        list_all: list the formats; with a checkpoint, also try each of them and list the exported
            parts, or why it is not possible.
    """
    if checkpoint is None:
        if list_all:
            return "\n".join(f"{name:12} {text}" for name, text in _FORMATS.items())
        message = "expected medvl export --checkpoint FOLDER --to FORMAT, or medvl export --list"
        raise ConfigError(message, "missing", field="checkpoint")
    from medvl.models import load

    model = load(checkpoint)
    if list_all:
        return "\n".join(f"{name:12} {_try(model, name)}" for name in _EXPORTERS)
    folder = out or checkpoint.with_name(f"{checkpoint.name}-{to}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; give a new folder with --out", "exists", field="out")
    exported = _exporter(to)(model, folder)
    compared = {
        output: value for output, value in exported.differences.items() if not math.isnan(value)
    }
    lines = [
        f"Wrote {folder}",
        *(
            f"  {output}: maximum relative difference from medvl {value:.1e}"
            for output, value in compared.items()
        ),
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
        size = (
            sum(path.stat().st_size for path in exported.folder.rglob("*") if path.is_file()) / 1e6
        )
    left_out = f"; left out: {', '.join(exported.left_out)}" if exported.left_out else ""
    return f"yes, {size:.0f} MB: {', '.join(exported.differences)}{left_out}"


def _list() -> str:
    from medvl.export.importers.import_checkpoint import NOT_IMPORTED, list_importers

    rows = [(importer.name, importer.kind, importer.title) for importer in list_importers()]
    rows.append(("open_clip:NAME", "system", "any model of open_clip with native encoders"))
    rows.append(
        (
            "stable_diffusion",
            "system",
            "a local folder of Stable Diffusion 1.x (needs medvl[generation])",
        )
    )
    lines = [f"{name:17} {kind:24} {title}" for name, kind, title in sorted(rows)]
    lines += [f"{name:17} {'not imported':24} {reason}" for name, reason in NOT_IMPORTED.items()]
    return "\n".join(lines)


# `medvl fit-pixelhop`: PixelHop++ fitted to the images of shards.


def fit_pixelhop(
    data: Path,
    out: Path,
    *,
    images: int = 2000,
    image_size: int = 224,
    fit: Literal["crop", "pad", "squash"] = "crop",
    units: int = 3,
    window: int = 5,
    cutoff: float = 1e-3,
    discard: float = 1e-4,
    tokens: int = 15,
    token_dim: int = 64,
    cells: int = 16,
    batch: int = 16,
    workers: int = 2,
) -> str:
    """Fit PixelHop++ to the images of training shards: an image encoder without gradients, for
    BERTHop.

    Reads the images once for each unit and once for the tokens; memory does not depend on their
    number.

    Args:
        data: folder of shards, of training patients only.
        out: new folder of the encoder: create_image_encoder("pixelhop", pretrained=OUT).
        images: images to fit to, a random choice; 0 takes all.
        image_size: side of the images in pixels.
        fit: method that makes an image square.
        units: PixelHop++ units, with maximum pooling between them.
        window: side of the windows in pixels.
        cutoff: share of the energy above which a node is transformed further.
        discard: share of the energy below which a node is dropped.
        tokens: visual tokens, the nodes with the highest energy.
        token_dim: numbers of a token, principal components.
        cells: side of the grid to which the map of a node is averaged.
        batch: images at once.
        workers: loader processes.
    """
    from medvl.data.shards.source import ShardSource
    from medvl.data.transforms.image import EvalTransform
    from medvl.encoders.image.pixelhop_fit import (
        PixelHopSettings,
        fit_pixelhop as fit_encoder,
        save_pixelhop,
    )

    settings = PixelHopSettings(
        units=units,
        window=window,
        cutoff=cutoff,
        discard=discard,
        tokens=tokens,
        token_dim=token_dim,
        cells=cells,
        image_size=image_size,
    )
    source = ShardSource(data)
    subset = choose_images(source, images)
    passes = functools.partial(
        _read, subset, EvalTransform(size=image_size, fit=fit), batch, workers
    )
    encoder = fit_encoder(passes, settings)
    described = {
        "shards": source.fingerprint,
        "images": len(subset),
        "settings": dataclasses.asdict(settings),
    }
    save_pixelhop(encoder, out, described)
    nodes = encoder.config["nodes"]
    further = encoder.config["intermediate"]
    of_units = ", ".join(f"{count} ({kept})" for count, kept in zip(nodes, further, strict=True))
    return (
        f"Fitted {tokens} tokens to {len(subset)} images of {data}; nodes (transformed "
        f"further): {of_units}"
    )


def _read(
    images: "Subset", transform: "EvalTransform", batch: int, workers: int
) -> "Iterator[Tensor]":
    from medvl.eval.core.open import open_for_evaluation

    return (
        part.image_BCHW
        for part in open_for_evaluation(images, transform, batch=batch, workers=workers)
    )


def choose_images(source: "ShardSource", count: int) -> "Subset":
    """Return a random choice of images in the order of the shards; 0 takes all."""
    import numpy as np

    from medvl.data.loading.sources import Subset

    return Subset(
        source, np.sort(np.random.default_rng(0).permutation(len(source))[: count or len(source)])
    )


# `medvl interpolate`: a checkpoint between two others.


def interpolate(
    start: tyro.conf.Positional[Path | None] = None,
    end: tyro.conf.Positional[Path | None] = None,
    *,
    out: Path | None = None,
    share: float = 0.5,
) -> str:
    """Interpolate the weights of a model before and after fine-tuning, so that it forgets less
    (WiSE-FT).

    Args:
        start: folder of the checkpoint that training started from.
        end: folder of the checkpoint after it, of the same system.
        out: new folder for the checkpoint between them.
        share: fraction of the way from start to end; choose it on validation data.
    """
    from medvl.errors import ConfigError
    from medvl.models.checkpoint import interpolate as between, save

    if start is None or end is None or out is None:
        raise ConfigError(
            "expected medvl interpolate START END --out FOLDER", "missing", field="out"
        )
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists already: choose a new folder", "exists", field="out")
    model = between(start, end, share)
    out.mkdir(parents=True, exist_ok=True)
    save(model, out, {"interpolated": {"start": str(start), "end": str(end), "share": share}})
    return f"Wrote {out}: {model.name}, {share:g} of the way from {start} to {end}"
