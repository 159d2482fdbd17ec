"""The loader: global batches that do not depend on ranks and workers, exact resume, skipped
samples.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.mimic_files import textured
from helpers.shard_plans import make_plan

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.images.codecs import encode_png
from medvl.data.loading.items import sample_rng, sample_rngs, seed_words
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.sampler import TrainSampler
from medvl.data.loading.sources import FileSource
from medvl.data.privacy import Deidentifier
from medvl.data.reports.cleaning import swap_laterality
from medvl.data.shards.format import Index
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import RandomSentence, WholeText
from medvl.errors import BudgetError, ConfigError, ShardError
from medvl.schema import Batch

COUNT = 23
SENTENCES = [
    "The left lung is clear today.",
    "There is a small right effusion.",
    "No pneumothorax is seen.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loader")
    plan = make_plan(root / "images", COUNT)
    for number, record in enumerate(plan.records):
        text = " ".join([*SENTENCES, f"This is image number {number} of all."])
        sample = dataclasses.replace(record.sample, sections={"findings": text})
        plan.records[number] = dataclasses.replace(record, sample=sample)
    options = ShardOptions(short_side=40, samples_per_shard=5, image_format="png")
    write_shards(plan, Deidentifier(b"0" * 32), ShardRun(out=root / "out", workers=1), options)
    return root / "out/train"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece(
        [*SENTENCES, *[f"image number {number} of all" for number in range(COUNT)]],
        vocab_size=200,
        min_frequency=1,
    )


@pytest.fixture
def open_it(folder: Path, tokenizer: Tokenizer) -> Callable[..., Loader]:
    def opener(**changes: Any) -> Loader:
        settings: dict[str, Any] = {
            "batch": 4,
            "image": ConVIRTAugmentation(size=32, flip="off"),
            "text": RandomSentence(),
            "tokenizer": tokenizer,
            "train": True,
            "seed": 7,
        }
        source = changes.pop("source") if "source" in changes else ShardSource(folder)
        return open_loader(source, **settings | changes)

    return opener


def same(a: Batch, b: Batch) -> bool:
    return (
        a.keys == b.keys
        and a.texts == b.texts
        and a.studies == b.studies
        and torch.equal(a.image_BCHW, b.image_BCHW)
        and torch.equal(a.ids_BT, b.ids_BT)
        and torch.equal(a.mask_BT, b.mask_BT)
        and torch.equal(a.labels_BL.nan_to_num(9), b.labels_BL.nan_to_num(9))
    )


def epochs(loader: Loader, count: int) -> Iterator[Batch]:
    for _ in range(count):
        yield from loader


def test_batch_fields_follow_the_schema(
    open_it: Callable[..., Loader], tokenizer: Tokenizer
) -> None:
    batch = next(
        iter(open_it(image=EvalTransform(size=32), text=WholeText(), train=False, batch=5))
    )
    assert batch.image_BCHW.shape == (5, 1, 32, 32)
    assert batch.image_BCHW.dtype == torch.uint8
    assert batch.keys == [f"key{number:03d}" for number in range(5)]
    assert batch.labels_BL.tolist() == [[1.0], [0.0], [1.0], [0.0], [1.0]]
    ids_BT, mask_BT = tokenizer(batch.texts)
    assert torch.equal(batch.ids_BT, ids_BT)
    assert torch.equal(batch.mask_BT, mask_BT)
    assert batch.mask_BT.any(dim=0).all(), "padded to the longest text only"
    assert "image number 3" in batch.texts[3]
    assert batch.studies == ["study0", "study0", "study1", "study1", "study2"]
    assert batch.has_text_B is None
    expected = (
        EvalTransform(size=32).build()(textured(3, 40, 50), np.random.default_rng(0)).image_HWC
    )
    assert np.array_equal(batch.image_BCHW[3].permute(1, 2, 0), expected)


def test_samples_without_text_are_flagged(open_it: Callable[..., Loader], folder: Path) -> None:
    """Whatever ids the tokenizer returns for an empty text."""
    images = folder.parent.parent / "images"
    sections: list[dict[str, str]] = [
        {"findings": "Clear."},
        {},
        {"findings": " "},
        {"findings": "An effusion."},
    ]
    shards = ShardSource(folder)
    samples = [
        dataclasses.replace(shards.sample(row), image=images / f"{row}.png", sections=text)
        for row, text in enumerate(sections)
    ]
    batch = next(iter(open_it(source=FileSource(samples, ()), text=WholeText(), train=False)))
    assert batch.has_text_B is not None
    assert batch.has_text_B.tolist() == [True, False, False, True]


def test_epoch_yields_every_sample_once_except_the_remainder(
    open_it: Callable[..., Loader],
) -> None:
    loader = open_it()
    orders = []
    for _ in range(3):
        keys = [key for batch in loader for key in batch.keys]
        assert len(keys) == len(set(keys)) == COUNT // 4 * 4
        orders.append(tuple(keys))
    assert len(set(orders)) == 3, "each epoch has another order"
    assert len({frozenset(order) for order in orders}) > 1, "the dropped remainder changes"
    again = open_it()
    assert tuple(key for batch in again for key in batch.keys) == orders[0]
    assert tuple(key for batch in open_it(seed=8) for key in batch.keys) != orders[0]


@pytest.mark.fault("F8")
@pytest.mark.parametrize("workers", [1, 3])
def test_number_of_workers_does_not_change_the_batches(
    open_it: Callable[..., Loader], workers: int
) -> None:
    for mine, theirs in zip(epochs(open_it(), 2), epochs(open_it(workers=workers), 2), strict=True):
        assert same(mine, theirs)


@pytest.mark.fault("F9")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_divide_the_global_batches(open_it: Callable[..., Loader], world: int) -> None:
    ranks = [open_it(rank=rank, world=world) for rank in range(world)]
    for full, *parts in zip(
        epochs(open_it(), 2), *(epochs(loader, 2) for loader in ranks), strict=True
    ):
        assert [key for part in parts for key in part.keys] == full.keys
        assert len({len(part) for part in parts}) == 1
        assert torch.equal(torch.cat([part.image_BCHW for part in parts]), full.image_BCHW)


@pytest.mark.parametrize("initialized", [False, True])
def test_ranks_of_the_process_group_are_the_default(
    initialized: bool, open_it: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank used to read the same rows where rank and world were left out."""
    expected = [list(open_it(rank=rank, world=2)) for rank in range(2)]
    for rank in range(2):
        if initialized:
            group = {"is_initialized": True, "get_rank": rank, "get_world_size": 2}
            for name, value in group.items():
                monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
        else:  # torchrun, before the process group
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
        assert all(map(same, open_it(), expected[rank]))
    with raises(ConfigError, "conflict", "world"):
        open_it(rank=0, world=1)
    whole = [key for batch in open_it(train=False, rank=0, world=1) for key in batch.keys]
    assert len(whole) == COUNT


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_yields_every_sample_once_in_full_batches(
    open_it: Callable[..., Loader], world: int
) -> None:
    expected = [batch.keys for batch in open_it(train=False)]
    assert [key for keys in expected for key in keys] == [
        f"key{number:03d}" for number in range(COUNT)
    ]
    ranks = [
        [batch.keys for batch in open_it(train=False, rank=rank, world=world)]
        for rank in range(world)
    ]
    for rank, batches in enumerate(ranks):
        assert batches == expected[rank::world]


@pytest.mark.fault("F7")
@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_from_any_position(
    open_it: Callable[..., Loader], position: int, workers: int
) -> None:
    loader = open_it()
    expected = epochs(loader, 4)
    for _ in range(position):
        next(expected)
    state = json.loads(json.dumps(loader.state_dict()))
    again = open_it(workers=workers)
    again.load_state_dict(state)
    resumed = epochs(again, 4)
    for mine in expected:
        assert same(mine, next(resumed))


def test_state_counts_yielded_batches_not_prefetched_ones(open_it: Callable[..., Loader]) -> None:
    loader = open_it(workers=2)
    for count, _ in enumerate(loader, start=1):
        assert loader.state_dict()["batch"] == count
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_start_the_next_epoch_before_the_end_of_this_one(
    open_it: Callable[..., Loader], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffled: list[int] = []
    passes = TrainSampler.passes
    monkeypatch.setattr(
        TrainSampler, "passes", lambda self, epoch: shuffled.append(epoch) or passes(self, epoch)
    )
    loader = open_it(workers=workers)
    for _ in loader:
        assert loader.epoch == 0
    assert loader.epoch == 1
    assert (1 in shuffled) == (workers > 0), "without workers nothing is read ahead"
    assert len(list(loader)) == loader.steps_per_epoch
    assert loader.state_dict()["epoch"] == 2


def test_loader_starts_again_where_an_error_ended_it(open_it: Callable[..., Loader]) -> None:
    loader, other = open_it(), open_it()
    first = next(iter(loader))
    broken = mock.patch.object(loader.samples.maker, "row", side_effect=ValueError("once"))
    with broken, pytest.raises(ValueError, match="once"):
        next(iter(loader))
    for mine, theirs in zip([first, *loader], other, strict=True):
        assert same(mine, theirs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 8}, "seed"),
        ({"batch": 5}, "global_batch"),
        ({"source": "other"}, "samples, fingerprint"),
    ],
)
def test_state_of_another_run_is_refused(
    open_it: Callable[..., Loader], change: dict, field: str
) -> None:
    if change.get("source"):
        source = ShardSource(open_it().source.folder)
        change = {"source": FileSource([source.sample(number) for number in range(9)], ["even"])}
    state = open_it().state_dict()
    with raises(ConfigError, "mismatch", field):
        open_it(**change).load_state_dict(state)
    with raises(ConfigError, "out_of_range", "batch"):
        open_it().load_state_dict(state | {"batch": 99})


def test_randomness_depends_on_seed_epoch_and_key_only(open_it: Callable[..., Loader]) -> None:
    """The augmentation of a sample does not depend on the batch size or its place in the order."""

    def by_key(loader: Loader, epoch: int) -> dict[str, tuple]:
        loader.load_state_dict(loader.state_dict() | {"epoch": epoch})
        return {
            key: (text, image.numpy().tobytes())
            for batch in loader
            for key, text, image in zip(batch.keys, batch.texts, batch.image_BCHW, strict=True)
        }

    first, second = by_key(open_it(), 3), by_key(open_it(batch=1), 3)
    assert all(second[key] == value for key, value in first.items())
    other_epoch, other_seed = by_key(open_it(batch=1), 4), by_key(open_it(batch=1, seed=8), 3)
    assert all(second[key][1] != other_epoch[key][1] != other_seed[key][1] for key in second)
    assert len({value[0] for value in second.values()}) > 3, "sentences are drawn"


def test_purposes_have_independent_generators() -> None:
    draws = [sample_rng(1, 2, "key", purpose).random() for purpose in ("image", "text")]
    assert draws[0] != draws[1]
    assert sample_rng(1, 2, "key", "image").random() == draws[0]


def test_generators_of_a_batch_are_those_of_its_samples() -> None:
    """The words of their seeds are those of NumPy's SeedSequence."""
    places = [(epoch, key, name) for epoch in (0, 3) for key in "ab" for name in ("image", "text")]
    made = sample_rngs(7, places)
    assert list(made) == places
    for place, rng in made.items():
        assert rng.bit_generator.state == sample_rng(7, *place).bit_generator.state
    assert sample_rngs(7, []) == {}
    entropy = [0, 5, 1 << 32, (1 << 128) - 1]
    words_B4 = np.array(
        [[number >> 32 * word & 0xFFFFFFFF for word in range(4)] for number in entropy]
    )
    expected = [np.random.SeedSequence(number).generate_state(4, np.uint64) for number in entropy]
    np.testing.assert_array_equal(seed_words(words_B4.astype(np.uint32)), expected)


@pytest.mark.parametrize("flip", ["swap_text", "plain"])
def test_flipped_images_get_swapped_text_only_with_swap_text(
    open_it: Callable[..., Loader], flip: str
) -> None:
    plain = {
        key: text
        for batch in open_it(batch=1)
        for key, text in zip(batch.keys, batch.texts, strict=True)
    }
    changed = Counter()
    for batch in open_it(batch=1, image=ConVIRTAugmentation(size=32, flip=flip)):
        (key,), (text,) = batch.keys, batch.texts
        assert text in (plain[key], swap_laterality(plain[key]))
        changed[text != plain[key]] += "left" in plain[key] or "right" in plain[key]
    assert bool(changed[True]) == (flip == "swap_text")


def test_random_sentence_is_uniform_and_excludes_short_ones() -> None:
    sections = {
        "findings": "Clear. The lungs are clear. No effusion is seen.",
        "impression": "Normal chest today.",
    }
    policy = RandomSentence(min_tokens=3, sections=("findings", "impression"))
    drawn = Counter(policy(sections, np.random.default_rng(seed)) for seed in range(3000))
    assert set(drawn) == {"The lungs are clear.", "No effusion is seen.", "Normal chest today."}
    assert all(900 < count < 1100 for count in drawn.values())
    assert policy({"findings": "Clear."}, np.random.default_rng(0)) == "Clear."
    assert (
        policy({"caption": "An axial slice of the brain."}, np.random.default_rng(0))
        == "An axial slice of the brain."
    )
    assert policy({}, np.random.default_rng(0)) == ""
    assert WholeText()(sections, np.random.default_rng(0)) == " ".join(sections.values())


def damage(folder: Path, tmp_path: Path, rows: list[int]) -> Path:
    """Return a copy of the folder in which some images of the first shard are zeroed; sizes and
    index are unchanged.
    """
    copy = tmp_path / "damaged"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    index = Index.read(copy / "lab-train-000000.index")
    data = bytearray((copy / "lab-train-000000.tar").read_bytes())
    for row in rows:
        start, size = (int(number) for number in index.image[row])
        data[start : start + size] = bytes(size)
    (copy / "lab-train-000000.tar").write_bytes(data)
    return copy


@pytest.mark.fault("F12")
def test_unreadable_samples_are_counted_within_the_budget(
    open_it: Callable[..., Loader], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = open_it(
        source=ShardSource(damage(folder, tmp_path, [1, 3])), train=False, batch=5, max_skipped=2
    )
    sizes = [len(batch) for batch in loader]
    assert sizes == [3, 5, 5, 5, 3]
    assert loader.skipped.total() == 2
    assert "skipped sample key001" in caplog.text
    with raises(BudgetError, "budget", "max_skipped", names="2 unreadable samples"):
        list(open_it(source=loader.source, train=False, batch=5, max_skipped=1))


@pytest.mark.parametrize("train", [True, False])
def test_a_sample_that_is_unreadable_in_every_pass_counts_once(
    open_it: Callable[..., Loader],
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    train: bool,
) -> None:
    """A run within its budget stays within it, however many epochs or validations it makes."""
    source = ShardSource(damage(folder, tmp_path, [1, 3]))
    loader = open_it(source=source, train=train, batch=5 if not train else 23, max_skipped=2)
    for passes in (1, 2, 3):
        assert sum(map(len, loader)) == COUNT - 2
        assert loader.skipped.total() == 2 * passes
    assert caplog.text.count("skipped sample key001") == 1


def test_batch_without_a_readable_sample_raises(
    open_it: Callable[..., Loader], folder: Path, tmp_path: Path
) -> None:
    source = ShardSource(damage(folder, tmp_path, [0, 1, 2, 3, 4]))
    with raises(ShardError, "empty"):
        list(open_it(source=source, train=False, batch=5, max_skipped=10))


def test_tar_truncated_after_opening_raises(
    open_it: Callable[..., Loader], folder: Path, tmp_path: Path
) -> None:
    source = ShardSource(damage(folder, tmp_path, []))
    with (source.folder / "lab-train-000000.tar").open("r+b") as file:
        file.truncate(100)
    with raises(BudgetError, "budget"):
        list(open_it(source=source, train=False, batch=5))
    with raises(ShardError, "truncated", names="sample key000"):
        source.sample(0)


def test_file_source_reads_corpus_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    samples = [record.sample for record in make_plan(tmp_path / "images", 6).records]
    (tmp_path / "images/4.png").write_bytes(encode_png(textured(4, 30, 70)))
    loader = open_loader(
        FileSource(samples, ("even",)),
        batch=4,
        image=EvalTransform(size=32),
        text=WholeText(),
        tokenizer=tokenizer,
        train=False,
    )
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 2]
    assert loader.source.pixels(4).shape == (30, 70)


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"batch": 5, "rank": 0, "world": 2}, "conflict", "batch"),
        ({"batch": 24}, "too_large", "batch"),
        ({"batch": 0}, "out_of_range", "batch"),
        ({"rank": 2, "world": 2}, "out_of_range", "rank"),
        ({"rank": 1}, "missing", "world"),
        ({"world": 2}, "missing", "rank"),
        ({"workers": -1}, "out_of_range", "workers"),
        ({"source": FileSource([], ())}, "empty", "source"),
    ],
)
def test_invalid_settings_are_refused(
    open_it: Callable[..., Loader], changes: dict, code: str, field: str
) -> None:
    with raises(ConfigError, code, field):
        open_it(**changes)
