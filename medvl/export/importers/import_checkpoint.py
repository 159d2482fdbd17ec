"""Import of a published checkpoint: every entry is mapped or left out with a reason, every
parameter is filled.
"""

import dataclasses
import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import medvl
from medvl.common.files import new_folder, sha256, write_json
from medvl.common.untrusted import parse_json
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.data.transforms.operations import Kernel
from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.encoders.pretrained import check_values, fitting_keys
from medvl.encoders.weight_files import (
    copies,
    file_in_folder,
    listed_parts,
    read_weight_file,
    several_sets,
)
from medvl.errors import CheckpointError, ConfigError, WeightsError
from medvl.export.importers import (
    dual_encoders,
    fusion_encoders,
    hugging_face,
    language,
    lvit,
    queries,
    records,
    volumes,
)
from medvl.export.importers.importer import (
    ENCODER_IMPORTERS,
    Encoders,
    Importer,
    build_encoders,
    with_image_processor,
)
from medvl.export.importers.key_map import MappedTensors, count_covered, to_medvl, without_wrapper
from medvl.models import checkpoint, create_model
from medvl.models.base import System
from medvl.models.checkpoint_folder import AllocationLimit, limited_allocation

# All importers of published checkpoints, by name.

_IMPORTERS: Mapping[str, Importer] = {
    importer.name: importer
    for importer in sorted(
        (
            *fusion_encoders.ALBEF_IMPORTERS,
            *dual_encoders.BIOVIL_IMPORTERS,
            *dual_encoders.IMPORTERS,
            *fusion_encoders.IMPORTERS,
            *records.KNOWLEDGE_IMPORTERS,
            *language.REPORT_IMPORTERS,
            *language.IMPORTERS,
            *lvit.IMPORTERS,
            *records.IMPORTERS,
            *queries.IMPORTERS,
            *queries.STATEMENT_IMPORTERS,
            *volumes.IMPORTERS,
            *ENCODER_IMPORTERS,
            *hugging_face.IMPORTERS,
        ),
        key=lambda importer: importer.name,
    )
}

NOT_IMPORTED: Mapping[str, str] = {
    "benchx_converters": "a table of conventions, not a file: BenchX's files are those of the "
    "systems that it names",
}
"""Published layouts without an importer, and the reason."""


def list_importers() -> list[Importer]:
    """Return all importers, sorted by name."""
    return list(_IMPORTERS.values())


def find_importer(name: str) -> Importer:
    """Return the importer of that name, or of `open_clip:NAME` for any model of open_clip.

    Raises:
        ConfigError: there is no such importer; the message names similar ones.
    """
    family, separator, model = name.partition(":")
    if family == "open_clip" and separator:
        return dual_encoders.open_clip_importer(model)
    if name in _IMPORTERS:
        return _IMPORTERS[name]
    if name in NOT_IMPORTED:
        raise ConfigError(
            f"{name} cannot be imported: {NOT_IMPORTED[name]}", "unsupported", field="system"
        )
    near = difflib.get_close_matches(name, _IMPORTERS, n=3)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"choose one of {', '.join(_IMPORTERS)} and open_clip:NAME."
    )
    raise ConfigError(f"no importer is called {name!r}: {hint}", "unknown_name", field="system")


def matching_importers(keys: Sequence[str]) -> list[str]:
    """Return the names of the importers whose tables cover all of these keys."""
    return [
        importer.name
        for importer in list_importers()
        if count_covered(keys, importer.table) == len(keys)
    ]


_LOG = logging.getLogger(__name__)
REPORT = "import.json"
ENCODER = "encoder.json"
WEIGHTS = "model.safetensors"
_FORMAT = 1
_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    """A published checkpoint as a medvl model in eval mode."""

    model: System | Encoders
    system: str
    """The importer's name."""
    loaded: int
    """Number of medvl tensors that were filled from the file."""
    left_out: Mapping[str, str]
    """Key of the file -> reason."""
    zeros: Mapping[str, str]
    """medvl tensor that is set to zero because the file has none -> why the result is the same."""
    beside: Mapping[str, str]
    """Entry of the file outside of the weights, such as an optimizer's state or another set of
    weights -> reason.
    """
    weights: str
    """Name of the set of weights that was read; `.` for the top of the file."""
    blanks: Sequence[str]
    """Types of the objects in the file that were skipped."""
    sha256: str
    """Hash of the file; of its index, for weights in parts."""
    parts_sha256: Mapping[str, str]
    """Name of a part -> its hash, for weights in parts."""
    text_sha256: str | None
    """Hash of the text model's file, where there are two."""
    entities_sha256: str | None
    """Hash of the file of entities, if one was given."""
    note: str

    def report(self) -> dict[str, Any]:
        """Return all fields except the model, and medvl's version, for `import.json`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **{name: value for name, value in fields.items() if name != "model"},
            "medvl": medvl.__version__,
        }


def import_checkpoint(
    system: str,
    file: Path | str,
    *,
    text_file: Path | str | None = None,
    entities: Path | str | None = None,
    tokenizer: Tokenizer | Path | str | None = None,
    weights: str | None = None,
    resize: Kernel | None = None,
    out: Path | str | None = None,
) -> Imported:
    """Load a published checkpoint as a medvl system, or as encoders where medvl does not have the
    system.

    Args:
        system: name of an importer (`list_importers`), or `open_clip:NAME`.
        file: safetensors, or a file written by `torch.save`, or a folder with one; no code in it is
            run.
        text_file: the text model's file, for systems that were published in two (BioViL, BioViL-T),
            or without their text encoder (MedKLIP, MAVL).
        entities: file with the entities of the system's training, which its checkpoint does not
            hold (MedKLIP, MAVL, KAD, ARL).
        tokenizer: the system's tokenizer or its folder; without it, only systems with CLIP's
            vocabulary take strings.
        weights: name of a set of weights in `file`, where it has several: `state_dict_ema`,
            `teacher`.
        resize: kernel with which the system's images are resized, in place of the released one
            (`medvl.data.transforms.operations.Kernel`).
        out: new folder. A system becomes a checkpoint for `medvl.load`; encoders become folders
            `image_encoder` and `text_encoder` for `load_encoder`. `import.json` lists what was left
            out and why.

    Raises:
        ConfigError: there is no such importer, `out` exists, the tokenizer does not fit, or a
            second file is missing, malformed or not wanted.
        WeightsError: the file cannot be read or belongs to another system; the message names the
            first differences. "conflict": it has several sets of weights. "nonfinite": a value is
            NaN or infinite.
    """
    importer = find_importer(system)
    path = file_in_folder(Path(file))
    _check_files(importer, text_file, entities)
    files = [path] if text_file is None else [path, file_in_folder(Path(text_file))]
    weight_names = [weights, None][: len(files)]
    contents = [
        read_weight_file(each, weights=name, parts=importer.parts)
        for each, name in zip(files, weight_names, strict=True)
    ]
    tensors: dict[str, Tensor] = {}
    for each, content in zip(files, contents, strict=True):
        own = fitting_keys(
            without_wrapper(content.tensors), lambda keys: count_covered(keys, importer.table)
        )
        twice = [key for key in own if key in tensors and not torch.equal(tensors[key], own[key])]
        if twice:
            message = (
                f"{twice[0]} is in {path} and in {each}: give the image model's file and "
                f"the text model's"
            )
            raise WeightsError(message, "conflict", field="text_file")
        tensors |= own
    source = " and ".join(map(str, files))
    model, mapped, zeros = match_checkpoint(
        tensors, importer, source, tokenizer, entities, path.parent, resize
    )
    state = model.state_dict()
    zero = {name: torch.zeros_like(state[name]) for name in zeros}
    check_values(mapped.tensors, state, source)
    model.load_state_dict({**state, **mapped.tensors, **zero})
    imported = Imported(
        model=model.eval(),
        system=importer.name,
        loaded=len(mapped.tensors),
        left_out=mapped.left_out,
        zeros=zeros,
        beside={key: reason for content in contents for key, reason in content.beside.items()},
        weights=contents[0].weights,
        blanks=sorted({blank for content in contents for blank in content.blanks}),
        sha256=sha256(path),
        parts_sha256={part: sha256(path.parent / part) for part in listed_parts(path)},
        text_sha256=None if text_file is None else sha256(files[1]),
        entities_sha256=None if entities is None else sha256(Path(entities)),
        note=importer.note,
    )
    if out is not None:
        _save(imported, Path(out))
    _LOG.info(
        "%s: %d tensors loaded as %s, %d left out",
        path,
        imported.loaded,
        system,
        len(imported.left_out),
    )
    return imported


def _check_files(
    importer: Importer, text_file: Path | str | None, entities: Path | str | None
) -> None:
    parts = [
        each
        for each in list_importers()
        if each.name in (f"{importer.name}_image", f"{importer.name}_encoders")
    ]
    without = f"; {parts[0].name} imports the {parts[0].kind} without it" if parts else ""
    if importer.text_file is not None and text_file is None:
        message = (
            f"{importer.name} needs a second file, text_file, with {importer.text_file}{without}"
        )
        raise ConfigError(message, "missing", field="text_file")
    if importer.text_file is None and text_file is not None:
        raise ConfigError(
            f"{importer.name} is imported from one file", "conflict", field="text_file"
        )
    if importer.entities is None and entities is not None:
        raise ConfigError(
            f"{importer.name} takes no file of entities", "conflict", field="entities"
        )
    if importer.entities is not None and importer.entities.required and entities is None:
        message = f"{importer.name} needs a file of entities: {importer.entities.title}{without}"
        raise ConfigError(message, "missing", field="entities")


def match_checkpoint(
    tensors: Mapping[str, Tensor],
    importer: Importer,
    source: str,
    tokenizer: Tokenizer | Path | str | None = None,
    entities: Path | str | None = None,
    folder: Path | None = None,
    resize: Kernel | None = None,
) -> tuple[System | Encoders, MappedTensors, dict[str, str]]:
    """Return the model (random weights), the file's tensors by its names, and the tensors to zero
    with the reason.

    All names and shapes are compared. Works on the meta device. `folder` may have the file of an
    image processor.

    Raises:
        ConfigError, WeightsError: as `import_checkpoint`.
    """
    mapped = to_medvl(tensors, importer.table)
    if importer.computed is not None:
        mapped = dataclasses.replace(
            mapped, tensors={**mapped.tensors, **importer.computed(mapped.tensors)}
        )
    elements = sum(tensor.numel() for tensor in tensors.values())
    limit = AllocationLimit(
        elements, WeightsError("its sizes need far more weights than it has", "mismatch")
    )
    try:
        with limit:
            model, mapped = _build(importer, mapped, tokenizer, entities, folder, resize)
    except (
        WeightsError,
        KeyError,
    ) as error:  # the tensors that determine the sizes are missing, or claim too much
        problems = [
            *mapped.problems,
            f"missing {error}" if isinstance(error, KeyError) else str(error),
        ]
        raise _mismatch(tensors, importer, source, problems) from None
    except (
        ValueError,
        IndexError,
        ZeroDivisionError,
    ) as error:  # one of them has another number of axes
        problems = [*mapped.problems, f"shapes from which no model can be built ({error})"]
        raise _mismatch(tensors, importer, source, problems) from None
    state = model.state_dict()
    missing = [
        name
        for name in state
        if name not in mapped.tensors and not name.endswith("num_batches_tracked")
    ]
    zeros = {zero.name: zero.why for zero in importer.zeros if zero.name in missing}
    problems = [*mapped.problems, *(f"missing {name}" for name in missing if name not in zeros)]
    for name, tensor in mapped.tensors.items():
        keys = ", ".join(mapped.sources.get(name, [name]))
        if name not in state:
            problems.append(f"unexpected {keys}")
        elif state[name].shape != tensor.shape:
            problems.append(f"{keys} is {tuple(tensor.shape)}, expected {tuple(state[name].shape)}")
    if problems:
        sets = copies({key: tensor.shape for key, tensor in tensors.items()})
        if sets and not all(
            count_covered([key], importer.table) for key in tensors if key.startswith(f"{sets[1]}.")
        ):
            raise several_sets(source, sets)
        raise _mismatch(tensors, importer, source, problems)
    return model, mapped, zeros


def _build(
    importer: Importer,
    mapped: MappedTensors,
    tokenizer: Tokenizer | Path | str | None,
    entities: Path | str | None,
    folder: Path | None,
    resize: Kernel | None,
) -> tuple[System | Encoders, MappedTensors]:
    """Return the model, and the tensors with those of its file of entities."""
    if importer.kind != "system":
        if tokenizer is not None:
            message = f"{importer.name} is imported as encoders: they take no tokenizer"
            raise ConfigError(message, "conflict", field="tokenizer")
        if resize is not None:
            message = f"{importer.name} is imported as encoders: they resize no images"
            raise ConfigError(message, "conflict", field="resize")
        return build_encoders(mapped.shapes, importer.image, importer.text), mapped
    if importer.configure is not None:
        return _build_from_folder(importer, tokenizer, folder, resize), mapped
    assert importer.system is not None
    config = dataclasses.replace(importer.system(mapped.shapes), **importer.images)
    if importer.has_processor and folder is not None:
        config = with_image_processor(config, folder)
    if importer.settle is not None:
        config, mapped = importer.settle(config, mapped)
    config = _with_kernel(config, resize, importer)
    if importer.entities is not None and entities is not None:
        config, more = importer.entities.read(config, Path(entities))
        mapped = dataclasses.replace(mapped, tensors={**mapped.tensors, **more})
    if tokenizer is None and importer.tokenizer is not None:
        tokenizer = load_tokenizer(importer.tokenizer, max_tokens=config.max_tokens)
    if tokenizer is not None and (importer.cleaning is not None or not importer.closing):
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = load_tokenizer(tokenizer, max_tokens=config.max_tokens)
        tokenizer = tokenizer.as_published(cleaning=importer.cleaning, closing=importer.closing)
    return create_model(config, tokenizer=tokenizer), mapped


def _build_from_folder(
    importer: Importer,
    tokenizer: Tokenizer | Path | str | None,
    folder: Path | None,
    resize: Kernel | None,
) -> System:
    """Return the system that the files of a folder describe."""
    if importer.configure is None or importer.read_tokenizer is None or folder is None:
        message = f"{importer.name} needs the folder of its file"
        raise ConfigError(message, "missing", field="file")
    config = _with_kernel(importer.configure(folder), resize, importer)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = importer.read_tokenizer(
            folder if tokenizer is None else Path(tokenizer), config
        )
    if tokenizer is not None:
        config = dataclasses.replace(config, max_tokens=tokenizer.max_tokens)
    return create_model(config, tokenizer=tokenizer)


def _with_kernel(config: Any, resize: Kernel | None, importer: Importer) -> Any:
    """Return a config with another kernel of the resize, if one is given."""
    if resize is None:
        return config
    if not hasattr(config, "resize"):
        message = f"{importer.name} has no kernel of its own; leave resize out"
        raise ConfigError(message, "conflict", field="resize")
    return dataclasses.replace(config, resize=resize)


def _mismatch(
    tensors: Mapping[str, Tensor], importer: Importer, source: str, problems: Sequence[str]
) -> WeightsError:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    others = [name for name in matching_importers(list(tensors)) if name != importer.name]
    hint = f" Its keys are those of {' or '.join(others)}." if others else ""
    message = (
        f"{source} is not a checkpoint of {importer.name}: "
        f"{'; '.join(problems[:_SHOWN])}{more}.{hint}"
    )
    return WeightsError(message, "mismatch")


def _save(imported: Imported, out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists: give a new folder", "exists", field="out")
    with new_folder(out) as folder:
        if isinstance(imported.model, Encoders):
            for name, encoder in imported.model.named_children():
                save_encoder(encoder, folder / name)
        else:
            checkpoint.save(
                imported.model,
                folder,
                {"imported": {"system": imported.system, "sha256": imported.sha256}},
            )
        write_json(folder / REPORT, imported.report())


def save_encoder(encoder: nn.Module, folder: Path) -> None:
    """Write one encoder into a new folder: its weights, and its factory arguments in
    `encoder.json`.
    """
    assert isinstance(encoder, ImageEncoder | TextEncoder)
    kind = "image" if isinstance(encoder, ImageEncoder) else "text"
    folder.mkdir(parents=True)
    write_json(folder / ENCODER, {"format": _FORMAT, "kind": kind, "arguments": encoder.config})
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in encoder.state_dict().items()
    }
    safetensors.torch.save_file(tensors, folder / WEIGHTS)


def load_encoder(folder: Path | str) -> ImageEncoder | TextEncoder:
    """Load an encoder that `import_checkpoint` wrote, in eval mode.

    The same as `create_image_encoder(**arguments, pretrained=folder)` with the arguments of its
    `encoder.json`.

    Raises CheckpointError if the folder holds no encoder or no weights, and WeightsError if they do
    not fit.
    """
    path = Path(folder) / ENCODER
    try:
        description = parse_json(path.read_bytes())
        kind = description["kind"]
        arguments = dict(description["arguments"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = (
            f"{path} cannot be read ({type(error).__name__}): give a folder written by "
            f"import_checkpoint"
        )
        raise CheckpointError(
            message, "not_found" if isinstance(error, FileNotFoundError) else "malformed"
        ) from None
    create = create_image_encoder if kind == "image" else create_text_encoder
    with limited_allocation(Path(folder)):
        encoder: ImageEncoder | TextEncoder = create(**arguments, pretrained=Path(folder))
    return encoder.eval()
