"""Several folders of shards as one source, and random sections of a figure's text."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.shard_plans import make_plan

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.tables import Record
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.sources import ConcatSource, UnpairedSource
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import RandomSection, WholeText
from medvl.errors import ConfigError, ImageError


def write(
    home: Path, corpus: str, count: int, salt: bytes = bytes(32), **labels: int
) -> ShardSource:
    """Write a folder of shards with its own images and patients."""
    (home / corpus).mkdir(parents=True)
    plan = make_plan(home / corpus / "images", count)
    for number, record in enumerate(plan.records):
        names: dict[str, Any] = {
            "key": f"{corpus}-{record.sample.key}",
            "patient": f"{corpus}-{number}",
        }
        sample = dataclasses.replace(
            record.sample, **names, corpus=corpus, split="train", labels=labels
        )
        plan.records[number] = Record(sample, record.report)
    plan = dataclasses.replace(plan, corpus=corpus, label_names=tuple(labels))
    run = ShardRun(out=home / corpus / "out", workers=1)
    write_shards(
        plan, Deidentifier(salt), run, ShardOptions(samples_per_shard=3, keep_textless=True)
    )
    return ShardSource(home / corpus / "out" / "train")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardSource, ShardSource]:
    home = tmp_path_factory.mktemp("joined")
    return write(home, "roco", 5, Edema=1), write(home, "medicat", 4, Edema=0, Mass=1)


def test_samples_of_the_sources_follow_one_another(
    sources: tuple[ShardSource, ShardSource],
) -> None:
    joined = ConcatSource(sources)
    assert len(joined) == 9
    expected = [source.sample(place) for source in sources for place in range(len(source))]
    assert [joined.sample(place) for place in range(9)] == expected
    np.testing.assert_array_equal(joined.pixels(5), sources[1].pixels(0))
    for beyond in (-1, 9):
        with pytest.raises(IndexError, match=f"sample {beyond} of 9"):
            joined.sample(beyond)


def test_labels_patients_and_shards_are_merged(sources: tuple[ShardSource, ShardSource]) -> None:
    joined = ConcatSource(sources)
    assert joined.label_names == ("Edema", "Mass")
    assert joined.manifest.corpus == "roco+medicat"
    assert joined.manifest.samples == 9
    assert set(joined.manifest.patients) == {
        p for source in sources for p in source.manifest.patients
    }
    assert joined.fingerprint != ConcatSource(sources[::-1]).fingerprint  # the order matters
    assert all(str(source.folder) in joined.folder for source in sources)


def test_repeated_missing_and_differently_salted_folders_are_refused(
    sources: tuple[ShardSource, ShardSource], tmp_path: Path
) -> None:
    with raises(ConfigError, "conflict"):
        ConcatSource([sources[0], sources[0]])
    with raises(ConfigError, "missing"):
        ConcatSource([])
    with raises(ConfigError, "mismatch", "salt"):
        ConcatSource([sources[0], write(tmp_path, "other", 2, salt=b"1" * 32)])


def test_weights_set_the_shares_of_an_epoch(sources: tuple[ShardSource, ShardSource]) -> None:
    """Also after resuming; a position of other weights is refused."""
    tokenizer = train_wordpiece(["This is image number."], vocab_size=60, min_frequency=1)

    def open_it(weights: tuple[float, ...] | None) -> Loader:
        image = ConVIRTAugmentation(size=32, flip="off")
        options: dict[str, Any] = {
            "batch": 3,
            "image": image,
            "text": WholeText(),
            "tokenizer": tokenizer,
        }
        return open_loader(ConcatSource(sources, weights), train=True, **options)

    loader = open_it((1, 2))
    batches = iter(loader)
    keys = [next(batches).keys]
    state = loader.state_dict()
    rest = [batch.keys for batch in batches]
    keys += rest
    assert sum(key.startswith("roco") for batch in keys for key in batch) == 3
    resumed = open_it((1, 2))
    del state["together"]  # as from a version without it
    resumed.load_state_dict(state)
    assert [batch.keys for batch in resumed] == rest
    for other in ((2.0, 1.0), None):
        with raises(ConfigError, "mismatch", "fingerprint"):
            open_it(other).load_state_dict(state)
    for weights, code in (
        ((1.0,), "mismatch"),
        ((1.0, 0.0), "out_of_range"),
        ((1.0, float("nan")), "out_of_range"),
    ):
        with raises(ConfigError, code, "weights"):
            ConcatSource(sources, weights)


def test_pairs_are_separated_by_patient(sources: tuple[ShardSource, ShardSource]) -> None:
    source = sources[0]
    mixed = UnpairedSource(source, 0.4)
    assert len(mixed) == 2 + 3 + 3  # every sample is of a patient of its own
    kinds = []
    for position in range(len(mixed)):
        sample = mixed.sample(position)
        try:
            mixed.pixels(position)
            has_image = True
        except ImageError as error:
            has_image = error.code != "no_image"
        kinds.append((has_image, bool(sample.sections)))
        assert sample.labels == {"Edema": 1}
    assert kinds == [(True, True)] * 2 + [(True, False)] * 3 + [(False, True)] * 3
    assert len({mixed.sample(position).key for position in range(len(mixed))}) == len(mixed)
    alone = UnpairedSource(source, 0.4, others="drop")
    assert [alone.sample(place) for place in range(2)] == [
        mixed.sample(place) for place in range(2)
    ]
    assert len(alone) == 2
    assert (
        len(
            {UnpairedSource(source, fraction).fingerprint for fraction in (0.0, 0.4, 1.0)}
            | {alone.fingerprint}
        )
        == 4
    )
    assert len(ConcatSource([mixed, sources[1]], (1, 1))) == 12
    for fraction, others in ((1.5, "separate"), (0.0, "drop")):
        with raises(ConfigError, "out_of_range", "paired_fraction"):
            UnpairedSource(source, fraction, others=others)


def test_random_section_draws_complete_sections_uniformly() -> None:
    sections = {
        "caption": "Figure of a chest.",
        "reference-1": "It shows a mass there.",
        "reference-2": "See.",
    }
    rng = np.random.default_rng(0)
    drawn = [RandomSection()(sections, rng) for _ in range(400)]
    assert set(drawn) == {
        "Figure of a chest.",
        "It shows a mass there.",
    }  # the short one is excluded
    assert abs(drawn.count("Figure of a chest.") - 200) < 40
    assert RandomSection()({"caption": "See."}, rng) == "See."
    assert RandomSection()({}, rng) == ""
