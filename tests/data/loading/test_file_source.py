"""Samples of a corpus's files: their images must be in the corpus's folders, links resolved."""

from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises

from medvl.data import FileSource, InputFolders, Plan, Record, encode_png
from medvl.data.corpora.common.rows import RowCounts
from medvl.errors import MedvlError
from medvl.schema import Sample


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """Three images: a file, a link within the folder, and a link out of it."""
    root = tmp_path / "corpus"
    (root / "a").mkdir(parents=True)
    image = encode_png(np.zeros((8, 8), dtype=np.uint8))
    for path in (root / "a/0.png", tmp_path / "secret.png"):
        path.write_bytes(image)
    (root / "1.png").symlink_to(root / "a/0.png")
    (root / "a/2.png").symlink_to(tmp_path / "secret.png")
    paths = [root / "a/0.png", root / "1.png", root / "a/2.png"]
    fields = {"corpus": "lab", "split": "test", "patient": "p", "study": "s"}
    return [Sample(key=f"k{number}", image=path, **fields) for number, path in enumerate(paths)]


@pytest.mark.fault("S7")
def test_links_out_of_the_folder_of_all_images_are_refused(
    samples: list[Sample], tmp_path: Path
) -> None:
    source = FileSource(samples, ())
    assert source.pixels(0).shape == source.pixels(1).shape == (8, 8)
    with raises(MedvlError, "outside_folder"):
        source.pixels(2)
    assert FileSource(samples, (), InputFolders.of(tmp_path)).pixels(2).shape == (8, 8)
    assert FileSource(samples, (), InputFolders.of(tmp_path / "corpus", follow_links=True)).pixels(
        2
    ).shape == (8, 8)


def test_a_plan_without_folders_has_that_of_its_files(
    samples: list[Sample], tmp_path: Path
) -> None:
    records = [Record(sample) for sample in samples]
    root = f"{tmp_path.resolve()}/"
    assert Plan("lab", records, (), RowCounts()).allowed_folders() == InputFolders(
        (f"{root}corpus/",)
    )
    report = Record(samples[0], report=tmp_path / "reports/0.txt")
    masked = Record(samples[0], masks={"Edema": tmp_path / "masks/0.png"})
    assert Plan("lab", [report], (), RowCounts()).allowed_folders() == InputFolders((root,))
    assert Plan("lab", [masked], (), RowCounts()).allowed_folders() == InputFolders((root,))
    assert Plan("lab", [], (), RowCounts()).allowed_folders() == InputFolders()
