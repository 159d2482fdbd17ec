"""Masks and texts of organs for the records of a corpus of volumes."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medvl.common.untrusted import InputFolders, read_json
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.corpora.registry import FileAccess
from medvl.data.reports.cleaning import stored_text
from medvl.data.reports.organs import organ_texts
from medvl.data.volumes.options import OrganOptions
from medvl.data.volumes.organs import find_organ_masks, volume_name
from medvl.errors import ConfigError, CorpusError
from medvl.schema import ORGANS

_TEXT_BYTES = 1 << 30
_Texts = Mapping[str, Mapping[str, Any]]


def add_organs(plan: Plan, options: OrganOptions, access: FileAccess) -> Plan:
    """Return a plan whose records have the files of their masks and the texts of their organs.

    Volumes without a mask are kept and counted (`no_organ_mask`). Of volumes that find the same
    file, none has it (`organ_mask_of_several`).

    Raises:
        CorpusError: "missing" where no volume has a mask; "malformed" for the file of texts.
        ConfigError: "not_found" for a folder or file that does not exist.
    """
    if options.organ_masks is None:
        return plan
    root = options.organ_masks
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder", "not_found", field="organ_masks")
    texts = {
        part: read_organ_texts(path, f"organ_{part}s")
        for part, path in (
            ("conclusion", options.organ_conclusions),
            ("description", options.organ_descriptions),
        )
        if path is not None
    }
    files = Counter[Path]()
    for record in plan.records:
        if record.volume is not None and isinstance(record.sample.image, Path):
            files.update(find_organ_masks(root, record.sample.image).values())
    if not files:
        raise CorpusError(
            f"no volume of {plan.corpus} has a mask in {root}; expected NAME.nii.gz for a volume "
            "NAME.nii.gz, or a folder NAME with a file for each structure",
            "missing",
            field="organ_masks",
        )
    warnings = Counter(plan.warnings)

    def changed() -> Iterator[Record]:
        for record in plan.records:
            if record.volume is None or not isinstance(record.sample.image, Path):
                yield record
                continue
            masks = find_organ_masks(root, record.sample.image)
            if any(files[path] > 1 for path in masks.values()):
                warnings["organ_mask_of_several"] += 1
                masks = {}
            warnings["no_organ_mask"] += not masks
            yield _with_organs(dataclasses.replace(record, masks=masks), texts, warnings)

    records = Records(changed())
    folders = plan.allowed_folders()
    if folders.real:
        masks = access.folders(root)
        folders = InputFolders((*folders.real, *masks.real)) if masks.real else masks
    return dataclasses.replace(plan, records=records, warnings=+warnings, folders=folders)


def _with_organs(record: Record, files: Mapping[str, _Texts], warnings: Counter[str]) -> Record:
    sample = record.sample
    given: dict[str, Mapping[str, Any]] | None = None
    if files:
        given = {part: _of_volume(texts, record) for part, texts in files.items()}
        warnings["no_organ_texts"] += not any(given.values())
    if not sample.sections and not (given and any(given.values())):
        return record
    texts = organ_texts(sample.sections, given)
    for entry in texts.values():
        for part, text in entry.items():
            if isinstance(text, str):
                entry[part] = stored_text(text, warnings)
    extra = {**sample.extra, "organs": {"texts": texts}}
    return dataclasses.replace(record, sample=dataclasses.replace(sample, extra=extra))


def _of_volume(texts: _Texts, record: Record) -> Mapping[str, Any]:
    """Return the texts of a volume: by its name, with or without the suffix, or by its folder's,
    which is that of the scan in CT-RATE.
    """
    path = record.sample.image
    assert isinstance(path, Path)
    names = (path.name, volume_name(path), path.parent.name)
    return next((texts[name] for name in names if name in texts), {})


def read_organ_texts(path: Path, field: str) -> _Texts:
    """Return name -> organ -> text, or {"text": text, "normal": bool}, of a JSON file.

    Raises ConfigError: "not_found", or "malformed" for another content.
    """
    try:
        content = read_json(path, ConfigError, limit=_TEXT_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "not_found", field=field) from None
    if not isinstance(content, dict) or not all(map(_are_texts, content.values())):
        raise ConfigError(
            f'{path}: expected {{NAME: {{ORGAN: TEXT or {{"text": TEXT, "normal": true or false}}}}'
            f"}} with the organs {', '.join(ORGANS)}",
            "malformed",
            field=field,
        )
    return content


def _are_texts(organs: object) -> bool:
    return isinstance(organs, dict) and all(map(_is_text, organs.values()))


def _is_text(entry: object) -> bool:
    if not isinstance(entry, dict):
        return isinstance(entry, str)
    return (
        set(entry) <= {"text", "normal"}
        and isinstance(entry.get("text"), str)
        and isinstance(entry.get("normal", True), bool)
    )
