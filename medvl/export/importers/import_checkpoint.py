"""Load a published system's file into medvl: every entry mapped or left out for a reason, every parameter filled."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import medvl
from medvl.common.files import sha256
from medvl.common.folders import new_folder, write_json
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.errors import CheckpointError, ConfigError, WeightsError
from medvl.export.importers.encoders_from_shapes import Towers, build_towers
from medvl.export.importers.key_map import Mapped, to_ours
from medvl.export.importers.registry import Importer, find_importer, recognise
from medvl.export.importers.torch_reader import read_checkpoint
from medvl.models import checkpoint, create_model
from medvl.models.base import System

_LOG = logging.getLogger(__name__)
REPORT, ENCODER, WEIGHTS = "import.json", "encoder.json", "model.safetensors"
_FORMAT = 1
_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    """A published checkpoint in medvl's terms, in eval mode."""

    model: System | Towers
    system: str
    """The importer's name."""
    loaded: int
    """Tensors of ours that were filled from the file."""
    left_out: Mapping[str, str]
    """Key of the file -> why."""
    zeros: Mapping[str, str]
    """Tensor of ours that is zero because the file has none -> why that is the same."""
    blanks: Sequence[str]
    """Types of the objects in the file that were not read."""
    sha256: str
    """Of the file."""
    note: str

    def report(self) -> dict[str, Any]:
        """What happened, as JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**{name: value for name, value in fields.items() if name != "model"}, "medvl": medvl.__version__}


def import_checkpoint(
    system: str, file: Path | str, *, tokenizer: Tokenizer | Path | str | None = None, out: Path | str | None = None
) -> Imported:
    """A published checkpoint as a medvl system, or as encoders where medvl has not built the system.

    Args:
        system: name of an importer (`list_importers`), or `open_clip:NAME`.
        file: safetensors, or what `torch.save` wrote; nothing in it is run.
        tokenizer: the system's, or its folder; without one, only the systems with CLIP's vocabulary take strings.
        out: folder to write. A system becomes a checkpoint that `medvl.load` reads; an encoder becomes a folder
            `image_encoder` or `text_encoder` that `load_encoder` reads. `import.json` says what was left out and why.

    Raises:
        ConfigError: there is no such importer, or the tokenizer does not fit.
        WeightsError: the file cannot be read or is of another system; the text names the first differences.
    """
    importer, path = find_importer(system), Path(file)
    checkpoint = read_checkpoint(path, importer.parts)
    model, mapped, zeros = fit(checkpoint.tensors, importer, str(path), tokenizer)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in mapped.tensors.items():
            state[name].copy_(tensor)
        for name in zeros:
            state[name].zero_()
    imported = Imported(
        model=model.eval(),
        system=importer.name,
        loaded=len(mapped.tensors),
        left_out=mapped.left_out,
        zeros=zeros,
        blanks=checkpoint.blanks,
        sha256=sha256(path),
        note=importer.note,
    )
    if out is not None:
        _save(imported, Path(out))
    _LOG.info("%s: %d tensors loaded as %s, %d left out", path, imported.loaded, system, len(imported.left_out))
    return imported


def fit(
    tensors: Mapping[str, Tensor], importer: Importer, source: str, tokenizer: Tokenizer | Path | str | None = None
) -> tuple[System | Towers, Mapped, dict[str, str]]:
    """(model at random weights, a file's tensors by its names, zeros -> why), after comparing all names and shapes.

    Works on the meta device, where nothing but shapes exists. Raises as `import_checkpoint` does.
    """
    mapped = to_ours(tensors, importer.table)
    try:
        model = _build(importer, mapped, tokenizer)
    except (WeightsError, KeyError) as error:  # the tensors that decide the sizes are missing
        raise WeightsError(_refusal(tensors, importer, source, [*mapped.problems, f"missing {error}"])) from None
    state = model.state_dict()
    missing = [name for name in state if name not in mapped.tensors and not name.endswith("num_batches_tracked")]
    zeros = {zero.ours: zero.why for zero in importer.zeros if zero.ours in missing}
    problems = [*mapped.problems, *(f"missing {name}" for name in missing if name not in zeros)]
    for name, tensor in mapped.tensors.items():
        keys = ", ".join(mapped.sources[name])
        if name not in state:
            problems.append(f"unexpected {keys}")
        elif state[name].shape != tensor.shape:
            problems.append(f"{keys} is {tuple(tensor.shape)}, expected {tuple(state[name].shape)}")
    if problems:
        raise WeightsError(_refusal(tensors, importer, source, problems))
    return model, mapped, zeros


def _build(importer: Importer, mapped: Mapped, tokenizer: Tokenizer | Path | str | None) -> System | Towers:
    if importer.system is None:
        if tokenizer is not None:
            raise ConfigError(f"{importer.name} is imported as encoders, which take no tokenizer")
        return build_towers(mapped.shapes, importer.image, importer.text)
    config = importer.system(mapped.shapes)
    if tokenizer is None and importer.tokenizer is not None:
        tokenizer = load_tokenizer(importer.tokenizer, max_tokens=config.max_tokens)
    return create_model(config, tokenizer=tokenizer)


def _refusal(tensors: Mapping[str, Tensor], importer: Importer, source: str, problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    others = [name for name in recognise(list(tensors)) if name != importer.name]
    hint = f" Its keys are those of {' or '.join(others)}." if others else ""
    return f"{source} is no checkpoint of {importer.name}: {'; '.join(problems[:_SHOWN])}{more}.{hint}"


def _save(imported: Imported, out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists: give a folder that does not")
    with new_folder(out) as folder:
        if isinstance(imported.model, Towers):
            for name, encoder in imported.model.named_children():
                save_encoder(encoder, folder / name)
        else:
            checkpoint.save(
                imported.model, folder, {"imported": {"system": imported.system, "sha256": imported.sha256}}
            )
        write_json(folder / REPORT, imported.report())


def save_encoder(encoder: nn.Module, folder: Path) -> None:
    """Write one encoder into a new folder: `encoder.json`, the arguments that make it again, and its weights."""
    import safetensors.torch

    assert isinstance(encoder, ImageEncoder | TextEncoder)
    kind = "image" if isinstance(encoder, ImageEncoder) else "text"
    folder.mkdir(parents=True)
    write_json(folder / ENCODER, {"format": _FORMAT, "kind": kind, "arguments": encoder.config})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / WEIGHTS)


def load_encoder(folder: Path | str) -> ImageEncoder | TextEncoder:
    """The encoder that `import_checkpoint` wrote into a folder, in eval mode.

    The same as `create_image_encoder(**arguments, pretrained=folder)` with the arguments of its `encoder.json`.

    Raises:
        CheckpointError: the folder holds no encoder.
        WeightsError: its weights are missing or do not fit.
    """
    path = Path(folder) / ENCODER
    try:
        described = json.loads(path.read_bytes())
        kind, arguments = described["kind"], dict(described["arguments"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}): no encoder was written here") from None
    if kind == "image":
        return create_image_encoder(**arguments, pretrained=Path(folder)).eval()
    return create_text_encoder(**arguments, pretrained=Path(folder)).eval()
