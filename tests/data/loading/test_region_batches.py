"""Region features in batches: padding, order, resume, workers, joined and unpaired sources,
shared images.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.region_shards import QuarterDetector, region_table, with_regions

from medvl.data.convert.regions import write_regions
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.sources import ConcatSource, LabelPolicyView, Subset, UnpairedSource
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.schema import Batch, Inputs

TOKENIZER = train_wordpiece(["the left lung of number is clear"], vocab_size=60, min_frequency=1)
REGIONS = Inputs(regions=True, region_classes=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("regions")


@pytest.fixture(scope="module")
def source(home: Path) -> ShardSource:
    return with_regions(region_table(home / "lab") / "train")


def open_it(source: Any, **changes: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch": 4,
        "image": ConVIRTAugmentation(size=16, flip="swap_text"),
        "text": WholeText(),
        "tokenizer": TOKENIZER,
        "train": True,
        "seed": 3,
        "inputs": REGIONS,
    }
    return open_loader(source, **settings | changes)


def parts(batch: Batch) -> list[Any]:
    return [
        batch.keys,
        batch.regions_BPD,
        batch.region_boxes_BP4,
        batch.region_classes_BPK,
        batch.has_image_B,
    ]


def equal(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(parts(one), parts(other), strict=True)
    )


def test_batches_hold_the_regions_padded_with_zeros(source: ShardSource) -> None:
    positions = {source.key(position): position for position in range(len(source))}
    batches = list(open_it(source))
    assert len(batches) == 2
    lengths = set()
    for batch in batches:
        assert batch.regions_BPD is not None
        assert batch.region_boxes_BP4 is not None
        assert batch.region_classes_BPK is not None
        assert batch.regions_BPD.dtype == torch.float16  # as stored, in half of the memory
        assert batch.region_boxes_BP4.dtype == batch.region_classes_BPK.dtype == torch.float32
        assert batch.image_BCHW.shape == (4, 1, 0, 0)  # no image is decoded
        for row, key in enumerate(batch.keys):
            position = positions[key]
            count = 0
            if source.has_image(position):
                stored = source.regions(position)
                count = len(stored.boxes_P4)
                lengths.add(count)
                np.testing.assert_array_equal(batch.regions_BPD[row, :count], stored.features_PD)
                np.testing.assert_array_equal(batch.region_boxes_BP4[row, :count], stored.boxes_P4)
                np.testing.assert_array_equal(
                    batch.region_classes_BPK[row, :count], stored.classes_PK
                )
            else:
                assert batch.has_image_B is not None
            assert batch.has_image_B is None or bool(batch.has_image_B[row]) == (count > 0)
            for tensor in (batch.regions_BPD, batch.region_boxes_BP4, batch.region_classes_BPK):
                assert not tensor[row, count:].any()
    assert lengths == {2, 4}


def test_only_what_is_declared_is_made(source: ShardSource) -> None:
    batch = next(iter(open_it(source, inputs=Inputs(regions=True))))
    assert batch.regions_BPD is not None
    assert batch.region_classes_BPK is None
    batch = next(iter(open_it(source, inputs=Inputs())))
    assert batch.regions_BPD is batch.region_boxes_BP4 is None
    assert batch.image_BCHW.shape[2:] == (16, 16)


@pytest.mark.parametrize("workers", [0, 1])
def test_order_is_that_of_one_process_on_every_rank_and_worker(
    source: ShardSource, workers: int
) -> None:
    whole = list(open_it(source))
    ranks = [
        list(open_it(source, rank=rank, world=2, workers=workers if rank else 0))
        for rank in range(2)
    ]
    for batch, first, second in zip(whole, *ranks, strict=True):
        assert batch.keys == first.keys + second.keys
        for row, part in enumerate((first, second)):
            assert part.regions_BPD is not None
            assert batch.regions_BPD is not None
            length = part.regions_BPD.shape[1]
            assert torch.equal(batch.regions_BPD[2 * row : 2 * row + 2, :length], part.regions_BPD)


def test_resume_within_an_epoch(source: ShardSource) -> None:
    loader = open_it(source)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = open_it(source)
    resumed.load_state_dict(state)
    assert equal(next(iter(resumed)), next(iterator))
    with raises(ConfigError, "mismatch", "fingerprint"):  # the regions are part of the data
        open_it(ShardSource(source.folder), inputs=Inputs()).load_state_dict(state)


def test_rows_and_moves_keep_the_regions(source: ShardSource) -> None:
    batch = next(iter(open_it(source)))
    assert batch.region_classes_BPK is not None
    rows = batch.rows([2, 0])
    assert rows.region_classes_BPK is not None
    assert torch.equal(rows.region_classes_BPK, batch.region_classes_BPK[[2, 0]])
    moved = batch.to("meta")
    for tensor in (moved.regions_BPD, moved.region_boxes_BP4, moved.region_classes_BPK):
        assert tensor is not None
        assert tensor.is_meta


def test_joined_unpaired_and_viewed_sources(home: Path, source: ShardSource) -> None:
    other = with_regions(region_table(home / "clinic", "clinic") / "train")
    joined = ConcatSource([UnpairedSource(source, 0.5, others="separate"), other], weights=(1, 1))
    kinds = set()
    for batch in open_it(joined, batch=2):
        assert batch.regions_BPD is not None
        for row in range(len(batch)):
            has_image = batch.has_image_B is None or bool(batch.has_image_B[row])
            assert bool(batch.regions_BPD[row].any()) == has_image
            kinds.add((has_image, batch.has_text_B is None or bool(batch.has_text_B[row])))
    assert kinds == {(True, True), (True, False), (False, True)}
    assert pickle.loads(pickle.dumps(joined)).regions(len(joined) - 1).boxes_P4.shape[1] == 4
    last = max(position for position in range(len(source)) if source.has_image(position))
    view = LabelPolicyView(Subset(source, [last, 0]), source.label_names, _unchanged)
    np.testing.assert_array_equal(view.regions(0).features_PD, source.regions(last).features_PD)
    assert view.region_manifest is source.region_manifest
    write_regions(ShardSource(other.folder), QuarterDetector("e" * 64), "others")
    with raises(ConfigError, "mismatch", "regions"):
        ConcatSource([source, ShardSource(other.folder, regions="others")])
    with raises(ConfigError, "mismatch", "regions"):
        ConcatSource([source, ShardSource(other.folder)])


def _unchanged(table_NL: Any, names: Any) -> Any:
    return table_NL


def test_samples_that_share_an_image_share_its_regions(source: ShardSource) -> None:
    first, second = [position for position in range(len(source)) if source.has_image(position)][:2]
    questions: Any = Subset(source, [first, first, second, second])
    questions.image_keys = tuple(map(source.key, questions.positions.tolist()))
    batch = next(iter(open_it(questions, train=False)))
    assert batch.image_of_B is not None
    assert batch.image_of_B.tolist() == [0, 0, 1, 1]
    assert batch.regions_BPD is not None
    assert len(batch.regions_BPD) == 2


def test_samples_without_an_image_are_left_out_of_an_evaluation(source: ShardSource) -> None:
    loader = open_it(source, train=False)
    keys = [key for batch in loader for key in batch.keys]
    assert len(keys) == len(source) - 1
    assert loader.skipped == {"no_image": 1}
    only_text = Subset(
        source, [position for position in range(len(source)) if not source.has_image(position)]
    )
    batch = next(iter(open_it(only_text, batch=1)))
    assert batch.has_image_B is not None
    assert batch.has_image_B.tolist() == [False]
    assert batch.regions_BPD is not None
    assert batch.regions_BPD.shape[:2] == (1, 0)


def test_missing_regions_are_named(source: ShardSource) -> None:
    with raises(ConfigError, "missing", "regions"):
        open_it(ShardSource(source.folder))

    class Classless(QuarterDetector):
        class_names = ()

        def __init__(self) -> None:
            super().__init__("c" * 64)

    write_regions(ShardSource(source.folder), Classless(), "classless")
    classless = ShardSource(source.folder, regions="classless")
    with raises(ConfigError, "missing", "region_classes"):
        open_it(classless)
    assert next(iter(open_it(classless, inputs=Inputs(regions=True)))).regions_BPD is not None
    for field, inputs in (
        ("second_image", Inputs(regions=True, second_image=True)),
        ("prior_image", Inputs(regions=True, prior_image=True)),
    ):
        with raises(ConfigError, "conflict", field):
            open_it(source, inputs=inputs)
