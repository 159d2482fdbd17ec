"""Reading plain data from a pickle without running it.

Some releases are published as pickles of lists, dictionaries, texts and numbers only.
"""

from pathlib import Path
from typing import Any

from medvl.common.plain_pickle import PickleReader
from medvl.common.untrusted import InputFolders, read_limited
from medvl.errors import CorpusError

MAX_PICKLE_BYTES = 1 << 26
"""Largest accepted pickle; the largest of PathVQA has 5 MB."""


def read_plain_pickle(path: Path, folders: InputFolders) -> Any:
    """Read a pickle of plain data. Raises CorpusError if it is missing, damaged, or has objects, functions or bytes."""
    try:
        with folders.open(path, CorpusError) as file:
            data = read_limited(file, MAX_PICKLE_BYTES, CorpusError)
        return PickleReader(path).read(data)
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"{path} is damaged ({type(error).__name__}): copy it again", "malformed") from None
