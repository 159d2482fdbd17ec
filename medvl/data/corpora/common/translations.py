"""English translations of Spanish reports, in the files of the RRG24 challenge.

Line n of `report.en.tok` is a report in tokens, lower case and separated by blanks; line n of
`image.tok` (or `image.en.tok`) lists its images, separated by commas.
"""

import itertools
import re
from collections import Counter
from pathlib import Path

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.tables import find_file, malformed, read_lines

_REPORT = "report.en.tok"
_BEFORE_MARK = re.compile(r"\s+([.,;:!?%)\]])")
_AFTER_BRACKET = re.compile(r"([(\[])\s+")
_HYPHEN = re.compile(r"(?<=\w) - (?=\w)")
_DECIMAL = re.compile(r"(?<=\d) ?([.,]) ?(?=\d)")
_START = re.compile(r"(^|[.!?] )([a-z])")


def read_translations(path: Path, folders: InputFolders, warnings: Counter[str]) -> dict[str, str]:
    """Return file name of an image -> its report, with blanks and capitals as in English.

    Reports whose text changes are counted as `detokenized`.

    Raises CorpusError when a file is missing, has another number of lines than the other, or lists
    an image twice with different reports.
    """
    if not path.name.endswith(_REPORT):
        raise malformed(path, f"expected a file named {_REPORT}, or ending so", "reports_en")
    prefix = path.name.removesuffix(_REPORT)
    names = find_file(path.parent, f"{prefix}image.tok", f"{prefix}image.en.tok")
    texts: dict[str, str] = {}
    lines = itertools.zip_longest(read_lines(path, folders), read_lines(names, folders))
    for number, (tokens, images) in enumerate(lines, start=1):
        if tokens is None or images is None:
            shorter = path if tokens is None else names
            message = f"expected as many lines as in {names.name if tokens is None else path.name}"
            raise malformed(shorter, f"{message}, got {number - 1}; download both again")
        text = detokenize(tokens)
        warnings["detokenized"] += text != tokens.strip()
        for image in filter(None, (part.strip() for part in images.split(","))):
            name = image.rpartition("/")[2]
            if texts.setdefault(name, text) != text:
                raise malformed(f"{names}, line {number}", "expected each image with one report")
    return texts


def detokenize(tokens: str) -> str:
    """Return the text of tokens: no blanks before marks, and capitals after full stops.

    `the heart is 1 . 5 cm wide . no effusion .` is "The heart is 1.5 cm wide. No effusion."
    """
    text = " ".join(tokens.split())
    text = _DECIMAL.sub(r"\1", text)
    text = _HYPHEN.sub("-", _AFTER_BRACKET.sub(r"\1", _BEFORE_MARK.sub(r"\1", text)))
    return _START.sub(lambda match: match[1] + match[2].upper(), text)
