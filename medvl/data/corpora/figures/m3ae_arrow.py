"""M3AE's preparations of ROCO, MedICaT and MIMIC-CXR: Arrow files with images and texts. Data card:
`data_cards/m3ae-arrow.md`.
"""

import dataclasses
import itertools
import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.process import memory_limited
from medvl.common.untrusted import InputFolders, PickleReader, read_limited
from medvl.data.corpora.common.figures import SplitRule, apply_split_rule, figure_sections
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, check_columns, malformed
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.reports.cleaning import clean_text
from medvl.data.reports.sentences import join_texts, one_line
from medvl.errors import CorpusError
from medvl.schema import FilePart, Sample

_SPLITS = {"train": "train", "val": "validate", "test": "test"}
_FILE = re.compile(r"[\w-]{1,80}_(train|val|test)\.arrow")
_COLUMNS = ("image", "caption", "image_id")
_MIMIC = re.compile(r"p(\d{8})/s(\d{8})/")
_ARTICLE = re.compile(r"PMC\d+|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")
"""Article of a path: ROCO's, or the hash of a PDF in MedICaT."""
_ROCO = re.compile(r"ROCO_\d+")
# bytes that may be allocated for one batch of rows: compressed ones can unpack to any size
_BATCH_MEMORY = 1 << 30


@register_corpus("m3ae-arrow")
@dataclasses.dataclass(frozen=True, kw_only=True)
class M3AEArrow(Corpus):
    """Convert M3AE's preparation of ROCO, MedICaT or MIMIC-CXR (Arrow files), with its split."""

    root: Path
    """folder with NAME_train.arrow, NAME_val.arrow, NAME_test.arrow."""
    splits: SplitRule = "official"
    """rule for articles in several splits: official refuses them, repaired keeps each in one split,
    by-article splits anew.
    """

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of all Arrow files in a folder: one for each image, with all its
        texts. The images stay in the files.

        Raises CorpusError when there is no such file, or one is damaged or has other columns;
        SplitError when `splits` is "official" and an article or patient is in two splits.
        """
        root = self.root
        allowed = access.folders(root)
        files = {
            path: match
            for path in sorted(root.glob("*.arrow"))
            if (match := _FILE.fullmatch(path.name))
        }
        if not files:
            raise CorpusError(
                f"{root} has no file NAME_train.arrow, NAME_val.arrow or NAME_test.arrow",
                "not_found",
            )
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for path, match in files.items():
            for number, row in rows.reading(_rows(path, allowed)):
                sample = _sample(row, f"{path}, row {number}", _SPLITS[match[1]], deid, warnings)
                records.append(Record(sample))
                rows.kept += 1
        unchecked = Plan(self.corpus, records, (), rows, +warnings, allowed)
        return apply_split_rule(unchecked, self.splits, tuple(_SPLITS.values()))


def _rows(path: Path, allowed: InputFolders) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (row number, counted from 1; row) of a file, which is mapped: M3AE writes many
    images as one batch.
    """
    import pyarrow

    try:
        with allowed.open(path, CorpusError) as opened:
            mapped = pyarrow.py_buffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            file = pyarrow.ipc.open_file(mapped)
            number = 0
            if "questions" in file.schema.names:
                message = (
                    f"{path} has questions; convert the original: medvl shards vqa-rad, "
                    f"slake or vqa-med"
                )
                raise CorpusError(message, "unsupported")
            check_columns(path, file.schema.names, _COLUMNS)
            for index in range(file.num_record_batches):
                with memory_limited(_BATCH_MEMORY):
                    batch = file.get_batch(index).select(list(_COLUMNS))
                batch.validate(full=True)
                name, *others = _COLUMNS
                texts = batch.select(others)
                images = _parts(path, batch.column(name), mapped, number)
                for position, image in enumerate(images):
                    number += 1
                    row = texts.slice(position, 1).to_pylist()[0]
                    yield number, {**row, name: image}
    except MemoryError:
        limit = f"at most {_BATCH_MEMORY >> 20} MB to unpack a batch of rows"
        raise CorpusError(
            f"{path}: expected {limit}; write smaller batches, or without compression", "too_large"
        ) from None
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
    ) as error:  # ValueError: an empty file, or broken texts
        raise malformed(
            path, f"it cannot be read as an Arrow file ({type(error).__name__})"
        ) from error


def _parts(path: Path, images: Any, mapped: Any, before: int) -> Iterator[FilePart | None]:
    """Yield the places of a column of images in their file, `mapped`; None for other values.

    `before` is the number of rows before it. Raises CorpusError where the column is compressed.
    """
    from pyarrow import types

    is_large = types.is_large_binary(images.type)
    if not (is_large or types.is_binary(images.type)):
        yield from itertools.repeat(None, len(images))
        return
    _, offsets, content = images.buffers()
    start = 0 if content is None else content.address - mapped.address
    if content is not None and not 0 <= start <= mapped.size - content.size:
        message = f"{path}: expected images without compression; write the file without it"
        raise CorpusError(message, "unsupported")
    ends_N = np.frombuffer(offsets, np.int64 if is_large else np.int32)[images.offset :]
    for number, is_valid in enumerate(images.is_valid().to_pylist()):
        first, end = map(int, ends_N[number : number + 2])
        name = f"row {before + number + 1}"
        yield FilePart(str(path), name, start + first, end - first) if is_valid else None


def _sample(
    row: Mapping[str, Any],
    where: str,
    split: str,
    deid: Deidentifier,
    warnings: Counter[str],
) -> Sample:
    image = row["image"]
    texts = row["caption"]
    name = row["image_id"]
    if not isinstance(image, FilePart) or not isinstance(name, str) or not isinstance(texts, list):
        raise malformed(
            where, "expected bytes as image, a list of texts as caption and a text as image_id"
        )
    if not all(isinstance(text, str) for text in texts):
        raise malformed(where, "expected texts", "caption")
    key = deid.image(name)
    patient, study, report = _group(name, warnings)
    sections = (
        _report_sections(texts, warnings) if report else _figure_sections(name, texts, warnings)
    )
    return Sample(
        key=key,
        corpus=M3AEArrow.corpus,
        split=split,
        patient=deid.patient(patient),
        study=deid.study(patient, study),
        image=image,
        sections=sections,
    )


def _report_sections(texts: list[str], warnings: Counter[str]) -> dict[str, str]:
    """Return impression and findings of a report, in the order of the preparation, or its only
    text as findings.
    """
    texts = [one_line(clean_text(text)) for text in texts]
    if len(texts) == 2 and all(texts):
        return {"impression": texts[0], "findings": texts[1]}
    text = join_texts(texts)
    warnings["empty_report"] += not text
    return {"findings": text} if text else {}


def _figure_sections(name: str, texts: list[str], warnings: Counter[str]) -> dict[str, str]:
    """Return the texts of a figure, whose caption is the last one in ROCO and the first one in
    MedICaT.
    """
    if _ROCO.search(Path(name).name):
        texts = [*texts[-1:], *texts[:-1]]
    return figure_sections(texts[0] if texts else None, texts[1:], warnings)


def _group(name: str, warnings: Counter[str]) -> tuple[str, str, bool]:
    """Return patient or article, study or figure, and whether the texts are parts of a report,
    from an image's path.
    """
    study = _MIMIC.search(name)
    if study:
        return study[1], study[2], True
    article = _ARTICLE.search(Path(name).name)
    warnings["no_article"] += article is None
    return (article[0] if article else name), name, False


# Reading plain data from a pickle without running it.
#
# Some releases are published as pickles of lists, dictionaries, texts and numbers only.

MAX_PICKLE_BYTES = 1 << 26
"""Largest accepted pickle; the largest of PathVQA has 5 MB."""


def read_plain_pickle(path: Path, folders: InputFolders) -> Any:
    """Read a pickle of plain data. Raises CorpusError if it is missing, damaged, or has objects,
    functions or bytes.
    """
    try:
        with folders.open(path, CorpusError) as file:
            data = read_limited(file, MAX_PICKLE_BYTES, CorpusError)
        return PickleReader(path).read(data)
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"{path} is damaged ({type(error).__name__}): copy it again", "malformed"
        ) from None
