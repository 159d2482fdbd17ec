"""The loader of text alone: order, resuming, ranks, skipped samples."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.text_shards import text_vocabulary, write_text_shards

from medvl.data.loading.text_loader import open_text_loader
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.masked_text import TextMasking, TextSequences
from medvl.schema import Sample


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ShardSource:
    return write_text_shards(tmp_path_factory.mktemp("text") / "out", block_words=25)


@pytest.fixture(scope="module")
def sequences() -> TextSequences:
    tokenizer = text_vocabulary()
    return TextSequences(tokenizer, TextMasking(tokenizer), pairs="next")


def rows(batches: Any) -> dict[str, tuple[Any, ...]]:
    """Return key -> content of the row, without padding."""
    found = {}
    for batch in batches:
        for row, key in enumerate(batch.keys):
            mask_T = batch.mask_BT[row]
            parts = (batch.ids_BT, batch.order_BT, batch.masked_BT, batch.types_BT)
            found[key] = (*(part[row][mask_T].tolist() for part in parts), int(batch.pair_B[row]))
    return found


def test_epochs_are_shuffled_resumed_and_equal_on_any_ranks(
    source: ShardSource, sequences: TextSequences
) -> None:
    whole = open_text_loader(source, sequences, batch=4, train=True)
    first, second = rows(whole), rows(whole)
    assert len(first) == len(source) // 4 * 4
    assert len(set(source.manifest.patients)) < len(source)  # several blocks of a document
    shared = first.keys() & second.keys()
    assert any(first[key] != second[key] for key in shared)  # drawn anew in each epoch
    ranks = [
        open_text_loader(source, sequences, batch=4, train=True, rank=rank, world=2)
        for rank in range(2)
    ]
    assert rows(ranks[0]) | rows(ranks[1]) == first
    resumed = open_text_loader(source, sequences, batch=4, train=True)
    iterator = iter(resumed)
    next(iterator), next(iterator)
    state = resumed.state_dict()
    other = open_text_loader(source, sequences, batch=4, train=True)
    other.load_state_dict(state)
    assert rows(other) == rows(iterator)
    workers = open_text_loader(source, sequences, batch=4, train=True, workers=1)
    assert rows(workers) == first


def test_evaluation_masks_are_fixed_and_negatives_are_other_documents(
    source: ShardSource, sequences: TextSequences
) -> None:
    loader = open_text_loader(source, sequences, batch=5, train=False)
    once = rows(loader)
    assert len(once) == len(source)
    assert once == rows(loader)
    labels = [row[-1] for row in once.values()]
    assert 0 < labels.count(0) < len(labels)


class SomeTexts:
    """Sequences of a source whose every second sample has another section."""

    def __init__(self, source: ShardSource) -> None:
        self.source, self.label_names, self.fingerprint = (
            source,
            source.label_names,
            source.fingerprint,
        )

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, position: int) -> Sample:
        sample = self.source.sample(position)
        return dataclasses.replace(
            sample, sections={("findings", "other")[position % 2]: "No effusion. Clear lungs."}
        )


def test_samples_without_the_section_do_not_count_as_unreadable(
    source: ShardSource, sequences: TextSequences
) -> None:
    some: Any = SomeTexts(source)
    loader = open_text_loader(
        some, sequences, batch=4, train=True, max_skipped=0, sections=["findings"]
    )
    for _ in range(2):
        assert 0 < sum(map(len, loader)) <= -(-len(source) // 2)
    assert loader.skipped["no_text"] > len(source) // 4
    nothing = open_text_loader(source, sequences, batch=4, train=False, sections=["findings"])
    assert list(nothing) == []
    assert nothing.skipped == {"no_text": len(source)}


def test_batches_have_no_pixels(source: ShardSource, sequences: TextSequences) -> None:
    batch = next(iter(open_text_loader(source, sequences, batch=4, train=True)))
    assert batch.image_BCHW.shape == (4, 1, 0, 0)
    assert batch.has_image_B is not None
    assert not batch.has_image_B.any()
    assert batch.to(torch.device("cpu")).keys == batch.keys
    assert batch.studies is not None
    assert Path(source.folder).is_dir()
