"""Image files that users name: files, and folders with all images below them."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from medvl.data.images.read import starts_like_dicom
from medvl.errors import ImageError

SUFFIXES = frozenset((".dcm", ".dicom", ".jpg", ".jpeg", ".png"))


def find_images(paths: Iterable[Path | str]) -> list[Path]:
    """Return the image files among paths, sorted within a folder, without repetitions.

    A file is taken as it is. Of a folder, all files below it are taken that end in .dcm, .dicom, .jpg, .jpeg or .png,
    or begin as a DICOM file does, as those of DICOM trees without suffixes; hidden ones are left out, and links to
    folders are not followed.

    Raises ImageError for a path that does not exist, and for folders without an image.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ImageError(f"{path} does not exist", "not_found", field="images")
        found |= dict.fromkeys(_below(path) if path.is_dir() else [path])
    if not found:
        raise ImageError("expected images, or folders with DICOM, JPEG or PNG files; got none", "empty", field="images")
    return list(found)


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and (path.suffix.lower() in SUFFIXES or _is_dicom(path)):
                yield path


def _is_dicom(path: Path) -> bool:
    """Return whether a file has the preamble of DICOM, other than that of a DICOMDIR, which has no image."""
    if path.name.upper() == "DICOMDIR" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return starts_like_dicom(file.read(132))
    except OSError:
        return False
