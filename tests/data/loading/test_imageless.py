"""Samples without an image: from a table through shards to batches and evaluations."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import assert_skipped, raises
from helpers.mimic_files import textured
from helpers.shard_plans import OPTIONS

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora import table
from medvl.data.corpora.table import TableColumns
from medvl.data.images.codecs import encode_png
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Index, Manifest, read_samples
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Inputs

ROWS = 8
COLUMNS = TableColumns(
    image_column="image",
    patient_column="patient",
    text_column=("text",),
    label_column=("edema",),
    split_column="split",
)
TOKENIZER = train_wordpiece(["the left lung of number is clear"], vocab_size=60, min_frequency=1)


def write_table(folder: Path) -> Path:
    """Write eight rows, every second one without an image."""
    rows = ["image,patient,text,edema,split"]
    for number in range(ROWS):
        name = f"{number}.png" if number % 2 == 0 else ""
        rows.append(f"{name},p{number},the left lung of number {number},{number % 2},train")
        if name:
            (folder / name).write_bytes(encode_png(textured(number, 40, 50)))
    path = folder / "rows.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def convert(home: Path, columns: TableColumns = COLUMNS, **settings: Any) -> ShardSource:
    deid = Deidentifier(bytes(32))
    plan = table.Table(table=write_table(home), columns=columns, **settings).plan(deid)
    write_shards(plan, deid, ShardRun(out=home / "out", workers=1), OPTIONS)
    return ShardSource(home / "out/train")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ShardSource:
    return convert(tmp_path_factory.mktemp("mixed"), keep_imageless=True)


def open_it(source: Any, **changes: Any) -> Loader:
    image = ConVIRTAugmentation(size=32, flip="swap_text")
    settings: dict[str, Any] = {
        "batch": 4,
        "image": image,
        "text": WholeText(),
        "train": True,
        **changes,
    }
    return open_loader(source, tokenizer=TOKENIZER, **settings)


def test_empty_image_cells_are_skipped_unless_asked_for(tmp_path: Path, deid: Deidentifier) -> None:
    plan = table.Table(table=write_table(tmp_path), columns=COLUMNS).plan(deid)
    assert plan.rows.skipped
    assert_skipped(plan, *["cell_missing"] * plan.rows.skipped.total(), names="image is empty")
    with raises(ConfigError, "missing", "image_column"):
        table.Table(
            table=tmp_path / "rows.csv", columns=TableColumns(patient_column="patient")
        ).plan(deid)


def test_shards_hold_texts_without_an_image(source: ShardSource) -> None:
    manifest = Manifest.read(source.folder)
    assert (manifest.samples, manifest.planned, manifest.warnings["no_image"]) == (
        ROWS,
        ROWS,
        ROWS // 2,
    )
    assert len({source.key(position) for position in range(ROWS)}) == ROWS
    without = []
    for position in range(ROWS):
        sample = source.sample(position)
        assert sample.sections["text"].startswith("the left lung")
        if sample.labels["edema"]:
            without.append(position)
            with raises(ImageError, "no_image"):
                source.pixels(position)
        else:
            assert source.pixels(position).shape == (32, 40)
    assert len(without) == ROWS // 2
    assert verify_folder(source.folder, decode=True).problems == ()
    members = []
    for path in sorted(source.folder.glob("*.tar")):
        with path.open("rb") as file:
            members += [set(sample) - {"__key__"} for sample in read_samples(file, path.name)]
    assert members.count({"json"}) == members.count({"json", "png"}) == ROWS // 2


def test_a_table_without_an_image_column_is_a_corpus_of_texts(tmp_path: Path) -> None:
    source = convert(tmp_path, dataclasses.replace(COLUMNS, image_column=None))
    assert source.manifest.warnings["no_image"] == len(source) == ROWS
    assert (tmp_path / "out-private" / "sources.tsv").read_text() == ""
    batch = next(iter(open_it(source)))
    assert batch.has_image_B is not None
    assert not batch.has_image_B.any()


def test_verify_finds_an_image_that_the_index_does_not_mention(tmp_path: Path) -> None:
    source = convert(tmp_path, keep_imageless=True)
    path = next(iter(sorted(source.folder.glob("*.index"))))
    lines = path.read_text().splitlines()
    line = next(number for number, text in enumerate(lines) if "\tpng\t" in text)
    lines[line] = lines[line].split("\t")[0] + "\t-\t0\t0"
    path.write_text("\n".join(lines) + "\n")
    assert verify_folder(source.folder).problems
    lines[line] = lines[line].replace("\t-\t0\t0", "\t-\t512\t9")
    path.write_text("\n".join(lines) + "\n")
    with raises(ShardError, "malformed"):
        Index.read(path)


@pytest.mark.parametrize("color", [False, True])
def test_batches_have_placeholders_and_say_so(source: ShardSource, color: bool) -> None:
    inputs = Inputs(second_image=True, second_text=True, labels=True)
    batches = list(open_it(source, color=color, inputs=inputs))
    assert batches
    for batch in batches:
        assert batch.has_image_B is not None
        assert batch.image_BCHW.shape == (4, 3 if color else 1, 32, 32)
        assert torch.equal(batch.has_image_B, batch.labels_BL[:, 0] == 0)
        blank_BCHW = batch.image_BCHW[~batch.has_image_B]
        assert not blank_BCHW.any()
        assert batch.second_image_BCHW is not None
        assert batch.second_image_BCHW.shape == batch.image_BCHW.shape
        assert batch.has_text_B is None
        assert not any(
            "right" in text
            for text, has in zip(batch.texts, batch.has_image_B, strict=True)
            if not has
        )


def test_evaluation_leaves_them_out_and_counts_them(source: ShardSource) -> None:
    loader = open_it(source, train=False, image=EvalTransform(size=32), batch=2, max_skipped=0)
    batches = list(loader)
    assert sum(map(len, batches)) == ROWS // 2
    assert all(batch.has_image_B is None for batch in batches)
    assert loader.skipped == {"no_image": ROWS // 2}
    kept = open_it(source, train=False, image=EvalTransform(size=32), batch=2, keep_imageless=True)
    assert sum(map(len, kept)) == ROWS
    assert not kept.skipped
