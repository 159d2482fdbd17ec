"""Every corpus that the phantom writes: its samples are those of the ground truth, and the printed
summary, the manifests, `medvl verify` and the budget have its counts.

Each layout is written, converted and verified as a user does it, by `medvl` commands.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.phantom_truth import check_truth

from medvl.cli import main as cli
from medvl.cli.phantom import COMMANDS as LAYOUTS
from medvl.data import list_corpora
from medvl.data.shards.format import Manifest, split_folders

NOT_CONVERTED = {"umls", "contact-sheet", "example"}
VOLUMES = {"ct-rate", "rad-chestct", "merlin", "inspect", "volumes"}
"""Layouts that `volumes/test_volume_corpora.py` compares with the phantom."""
CORPUS_OF = {"mimic-cxr-jpg": "mimic-cxr"}
"""Layout -> command of `medvl shards`, where the names differ."""
SELECTION = {
    "mimic-cxr": ("--views", "PA", "AP"),
    "mimic-cxr-jpg": ("--views", "PA"),
    "chexpert": ("--frontal-only",),
    "chexpert-plus": ("--views", "PA", "AP"),
    "rexgradient": ("--views", "PA", "AP"),
    "openi": ("--views", "FRONTAL"),
    "padchest": ("--views", "PA"),
    "brax": ("--views", "PA", "AP"),
    "medicat": ("--radiology-only",),
}
"""Layout -> options that leave rows out."""
OTHER_MEANING = {
    "rsna": ("Pneumonia",),  # any opacity
    "vindr-cxr": ("Lung Opacity", "No Finding"),
    "vindr-pcxr": ("Pneumonia", "No Finding"),
}
"""Layout -> labels that mean another thing than the phantom's of the same name."""
WITHOUT_TRUTH = {"roco", "medicat"}
"""Layouts with figures that no study of the phantom is the source of."""
ROOT_OF = {"chexpert": "CheXpert-v1.0-small"}
DAMAGED = 2
CORPUS_LINE = re.compile(
    r"^([\w-]+): read (\d+) (\w+): kept (\d+), left out (\d+)(?: \((.*)\))?$", re.MULTILINE
)
SPLIT_LINE = re.compile(
    r"^(?:[\w-]+/)?([\w-]+): (\d+) samples of (\d+) patients(.*)$", re.MULTILINE
)


class Finished(NamedTuple):
    status: int
    out: str
    err: str


def medvl(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    capsys.readouterr()
    try:
        cli.main([str(argument) for argument in arguments])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    return Finished(status, printed.out, printed.err)


def reasons(text: str) -> Counter[str]:
    """Return reason -> count of a text such as `, 3 no_text, 1 truncated`."""
    return Counter({reason: int(count) for count, reason in re.findall(r"(\d+) ([a-z]\w*)", text)})


def check_counts(
    capsys: pytest.CaptureFixture[str], printed: str, out: Path
) -> dict[str, Manifest]:
    """Check that rows and images add up, in the summary, the manifests and `medvl verify`.
    Return the manifests.
    """
    manifests = {folder.name: Manifest.read(folder) for folder in split_folders(out)}
    (line,) = CORPUS_LINE.finditer(printed)
    name, read, unit, kept, left_out, why = line.groups()
    by_reason = reasons(why or "")
    assert int(read) == int(kept) + int(left_out) > 0
    assert by_reason.total() == int(left_out)
    splits = {
        split: (int(samples), reasons(rest))
        for split, samples, _, rest in SPLIT_LINE.findall(printed)
    }
    assert splits.keys() == manifests.keys()
    for split, manifest in manifests.items():
        assert not [warning for warning in manifest.warnings if warning.startswith("possible_")], (
            "nobody is named"
        )
        assert manifest.corpus == name
        assert manifest.rows["unit"] == unit
        assert (manifest.rows["read"], manifest.rows["kept"]) == (int(read), int(kept))
        assert (
            Counter(manifest.excluded_from_corpus) + Counter(manifest.rows["skipped"]) == by_reason
        )
        omitted = Counter(manifest.excluded) + Counter(manifest.skipped)
        assert splits[split] == (manifest.samples, omitted)
        assert manifest.planned == manifest.samples + omitted.total()
    if unit == "images":
        assert int(kept) == sum(manifest.planned for manifest in manifests.values())
    if unit == "questions":
        assert int(kept) == sum(map(int, re.findall(r"(\d+) questions in \w", printed)))
    verified = medvl(capsys, "verify", out)
    assert verified.status == 0, verified.err
    assert line[0] in verified.out.splitlines()
    for split, samples, _, rest in SPLIT_LINE.findall(verified.out):
        assert rest.endswith(": intact")
        assert (int(samples), reasons(rest.partition("left out")[2])) == splits[split]
    return manifests


def images_of(out: Path) -> Iterator[Path]:
    """Yield the image files that one sample of a conversion reads."""
    lines = (out.with_name(f"{out.name}-private") / "sources.tsv").read_text().splitlines()
    times = Counter(line.split("\t")[1] for line in lines)
    return (Path(path) for path, count in times.items() if count == 1)


def test_every_layout_has_a_corpus() -> None:
    assert {CORPUS_OF.get(layout, layout) for layout in LAYOUTS.keys() - NOT_CONVERTED} <= set(
        list_corpora()
    )
    assert SELECTION.keys() | ROOT_OF.keys() | CORPUS_OF.keys() <= LAYOUTS.keys()


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - NOT_CONVERTED - VOLUMES))
def test_a_layout_gives_the_samples_of_the_phantom_and_counts_them(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--patients", 8, "--size", 64, "--workers", 1)
    assert medvl(capsys, "phantom", layout, "--out", tmp_path / "corpus", *size).status == 0
    root = tmp_path / "corpus" / ROOT_OF.get(layout, "")
    command = [
        "shards",
        CORPUS_OF.get(layout, layout),
        "--root",
        root,
        "--short-side",
        32,
        "--workers",
        1,
    ]

    def convert(name: str, *options: object) -> Finished:
        return medvl(capsys, *command, *options, "--out", tmp_path / name)

    whole = convert("whole")
    assert whole.status == 0, whole.err
    planned = {
        split: each.planned
        for split, each in check_counts(capsys, whole.out, tmp_path / "whole").items()
    }
    meaning = OTHER_MEANING.get(layout, ())
    same = check_truth(root, tmp_path / "whole", other_meaning=meaning)
    stored = [Manifest.read(folder).samples for folder in split_folders(tmp_path / "whole")]
    assert same == sum(stored) or (layout in WITHOUT_TRUTH and same > 0)
    options = SELECTION.get(layout, ())
    if options:
        selected = convert("selected", *options)
        assert selected.status == 0, selected.err
        manifests = check_counts(capsys, selected.out, tmp_path / "selected")
        assert next(iter(manifests.values())).excluded_from_corpus
        assert sum(each.planned for each in manifests.values()) < sum(planned.values())

    damaged = [path for path, _ in zip(images_of(tmp_path / "whole"), range(DAMAGED), strict=False)]
    assert len(damaged) == DAMAGED
    for path in damaged:
        path.write_bytes(path.read_bytes()[:200])
    refused = convert("damaged", "--max-skipped", DAMAGED - 1)
    assert refused.status == 1
    assert f"over the budget of {DAMAGED - 1}" in refused.err
    assert not list((tmp_path / "damaged").glob("*/manifest.json"))
    allowed = convert("damaged", "--max-skipped", DAMAGED)
    assert allowed.status == 0, allowed.err
    manifests = check_counts(capsys, allowed.out, tmp_path / "damaged")
    assert {split: each.planned for split, each in manifests.items()} == planned
    assert sum(Counter(each.skipped).total() for each in manifests.values()) == DAMAGED


def test_concepts_of_the_ontology_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = tmp_path / "graph"
    assert medvl(capsys, "phantom", "umls", "--out", tmp_path / "umls").status == 0
    assert (
        medvl(capsys, "knowledge", "build", "--umls", tmp_path / "umls", "--out", graph).status == 0
    )
    command = [
        "shards",
        "concepts",
        "--knowledge",
        graph,
        "--umls",
        tmp_path / "umls",
        "--workers",
        1,
    ]
    done = medvl(capsys, *command, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert (
        sum(
            manifest.samples
            for manifest in check_counts(capsys, done.out, tmp_path / "out").values()
        )
        > 100
    )
