"""Rows of Parquet files, read a few at a time within limits of memory."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from medvl.common.process import memory_limited
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.parquet_pages import map_file, read_groups
from medvl.data.corpora.common.tables import check_columns
from medvl.errors import CorpusError

_OVERHEAD = 1 << 16  # bytes of pages and dictionaries of a column in a group of rows
_BUFFER = 1 << 20  # bytes of a column that are read from the file at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParquetLimits:
    """Limits of reading, so that one cell or a false footer cannot fill the memory."""

    rows: int
    """Rows that are decoded at once."""
    memory: int
    """Bytes that decoding them may allocate."""
    group: int
    """Bytes of a column in a group of rows, as the file states them."""
    cell: int
    """Bytes that a cell may have on average in a group of rows."""
    advice: str
    """What to do about a file above the limits."""

    def check_group(self, path: Path, size: int, rows: int) -> None:
        """Raise CorpusError where a column of a group of rows is above the limits."""
        limit = min(self.cell * rows + _OVERHEAD, self.group)
        if size > limit:
            raise CorpusError(
                f"{path}: expected at most {limit >> 20} MB in a column of a group of {rows} "
                f"rows, got {size >> 20} MB; {self.advice}",
                "too_large",
            )


def read_parquet(
    path: Path,
    required: Sequence[str],
    folders: InputFolders,
    limits: ParquetLimits,
    *,
    bytes_column: str | None = None,
    check_schema: Callable[[Any], None] | None = None,
    check_batch: Callable[[Any, int], None] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, counted from 1; row) of a Parquet file; other columns are not read.

    Args:
        path: the file.
        required: names of the columns.
        folders: folders that the file must be in.
        limits: limits of memory.
        bytes_column: required column of bytes, or of a struct or list with bytes, which are not
            decoded: of a struct or list, only the field `path` is in the rows.
        check_schema: raises for columns of a wrong type; gets the file's `pyarrow.Schema`.
        check_batch: raises for rows that take too much memory as Python objects; gets a
            `pyarrow.RecordBatch` and the number of the row before it.

    Raises CorpusError when the file does not exist, is damaged or above the limits, or lacks a
    column or has it twice.
    """
    import pyarrow.parquet

    number = 0
    names = sorted(set(required))
    try:
        with folders.open(path, CorpusError) as opened:
            file = pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=_BUFFER)
            check_columns(path, file.schema_arrow.names, required)
            for group in read_groups(map_file(opened)):
                for chunk in group.chunks:
                    if chunk.path[0] in names:
                        limits.check_group(path, chunk.unpacked, group.rows)
            if check_schema is not None:
                check_schema(file.schema_arrow)
            # One thread: the stacks of others would count towards the memory limit.
            columns = _without_bytes(file.schema, names, bytes_column)
            batches = file.iter_batches(limits.rows, columns=columns, use_threads=False)
            while (batch := _next_batch(batches, limits.memory)) is not None:
                if check_batch is not None:
                    check_batch(batch, number)
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except MemoryError:
        limit = f"at most {limits.memory >> 20} MB to decode {limits.rows} rows"
        raise CorpusError(
            f"{path}, after row {number}: expected {limit}; {limits.advice}", "too_large"
        ) from None
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorpusError(
            f"{path} cannot be read as Parquet ({type(error).__name__})", "malformed"
        ) from error


def _without_bytes(schema: Any, names: Sequence[str], bytes_column: str | None) -> list[str]:
    """Return the columns to decode: `names`, and of `bytes_column` the paths."""
    leaves = [schema.column(number).path for number in range(len(schema))]
    paths = [
        path for path in leaves if path.startswith(f"{bytes_column}.") and path.endswith(".path")
    ]
    return [name for name in names if name != bytes_column] + paths


def _next_batch(batches: Iterator[Any], memory: int) -> Any:
    """Return the next batch of rows, None at the end. Raises MemoryError where decoding it takes
    too much memory.
    """
    with memory_limited(memory):
        return next(batches, None)


def check_text_lengths(path: Path, batch: Any, number: int, longest: int) -> None:
    """Raise CorpusError where a text of a `pyarrow.RecordBatch` has more than `longest` bytes.

    A text that rows share would be copied for each of them. `number` is the row before the batch.
    """
    import pyarrow.compute

    for name in batch.schema.names:
        if is_text(batch.schema.field(name).type):
            column = batch.column(name)
            lengths = pyarrow.compute.binary_length(getattr(column, "dictionary", column))
            if (pyarrow.compute.max(lengths).as_py() or 0) > longest:
                limit = f"at most {longest} bytes in a text of {name}"
                raise CorpusError(f"{path}, after row {number}: expected {limit}", "too_large")


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type holds texts, plain or dictionary-encoded."""
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(value) or types.is_large_string(value))


def entry_type(kind: Any) -> Any:
    """Return the type of a list's entries; other types as they are."""
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if is_list else kind


def has_bytes(kind: Any) -> bool:
    """Return whether an Arrow type holds bytes, in a struct or a list or plain."""
    from pyarrow import types

    kind = entry_type(kind)
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return bool(place >= 0 and is_binary(kind.field(place).type))
    return is_binary(kind)


def is_binary(kind: Any) -> bool:
    """Return whether an Arrow type is that of bytes."""
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))
