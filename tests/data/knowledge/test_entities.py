"""Mentions of entities in texts and in token ids, and the parts of a batch that loaders make of
them.
"""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.vocabularies import write_byte_level

from medvl.data import EntityFinder, EntityLinker, WholeText, load_tokenizer, train_wordpiece
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import ItemMaker
from medvl.data.transforms.image import EvalTransform
from medvl.errors import ConfigError
from medvl.schema import Inputs, Sample

NAMES = [
    ("pleural effusion", 0),
    ("effusion", 1),
    ("lung", 2),
    ("x-ray", 3),
    ("ET tube", 4),
    ("Ménière disease", 5),
]
FINDER = EntityFinder.of(NAMES)
TEXTS = ["Small left pleural effusion on the X-ray.", "No effusion; ET tube.", "Nothing here."]


def found(text: str, finder: EntityFinder = FINDER) -> list[tuple[str, int]]:
    return [(text[start:end], entity) for start, end, entity in finder.find(text)]


def test_longest_names_of_whole_words_are_found() -> None:
    assert found("No pleural effusion, EFFUSION in lungs or lung") == [
        ("pleural effusion", 0), ("EFFUSION", 1), ("lung", 2),
    ]  # fmt: skip
    assert found("pleural  effusion; x - ray; X-Ray; meniere disease") == [
        ("pleural  effusion", 0), ("x - ray", 3), ("X-Ray", 3), ("meniere disease", 5),
    ]  # fmt: skip
    assert found("") == found("no names") == found("effusion", EntityFinder.of([])) == []


def test_overlapping_names_start_first_then_longest() -> None:
    finder = EntityFinder.of(
        [("a1 b", 0), ("b c d", 1), ("c", 2), ("a1 b c", 3), ("a1 b c d e", 4)]
    )
    assert found("a1 b c d", finder) == [("a1 b c", 3)]
    assert found("a1 b x b c d", finder) == [("a1 b", 0), ("b c d", 1)]


def test_unusable_names_are_left_out_and_the_first_of_equal_names_counts() -> None:
    finder = EntityFinder.of(
        [("ALL", 0), ("x", 1), ("12", 2), ("w " * 11, 3), ("CT", 4), ("ct", 5), ("---", 6)]
    )
    assert len(finder) == 1
    assert found("All x of 12 CT --- scans", finder) == [("CT", 4)]


def test_equals_a_naive_search_of_random_texts() -> None:
    rng = np.random.default_rng(0)
    names = [(" ".join(rng.choice(list("pqrs"), rng.integers(1, 5))) + " z", n) for n in range(30)]
    finder, first = EntityFinder.of(names), dict(reversed(names))
    for _ in range(50):
        words = [str(word) for word in rng.choice(list("pqrsz"), 30)]
        expected, place = [], 0
        while place < len(words):
            most = min(10, len(words) - place)
            length = next(
                (k for k in range(most, 0, -1) if " ".join(words[place : place + k]) in first), 0
            )
            if length:
                expected.append((name := " ".join(words[place : place + length]), first[name]))
            place += max(length, 1)
        assert found(" ".join(words), finder) == expected


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level"])
def test_tokens_of_mentions(kind: str, tmp_path: Path) -> None:
    if kind == "wordpiece":
        tokenizer = train_wordpiece(TEXTS, vocab_size=60, min_frequency=1)
    else:
        tokenizer = load_tokenizer(write_byte_level(tmp_path, TEXTS, 300))
    ids_BT, mask_BT = tokenizer(TEXTS)
    linker = pickle.loads(
        pickle.dumps(EntityLinker(FINDER, tokenizer))
    )  # as for a loader's workers
    entity_BN, mention_BT = linker(ids_BT, mask_BT)
    assert entity_BN.tolist() == [[0, 3], [1, 4], [-1, -1]]
    assert mention_BT.shape == ids_BT.shape
    spelled = [
        [
            "".join(
                tokenizer.token_texts[i] for i in ids_BT[row][mention_BT[row] == n].tolist()
            ).strip()
            for n in (0, 1)
        ]
        for row in (0, 1)
    ]
    words = [[mention.lower().replace(" ", "") for mention in of_row] for of_row in spelled]
    assert words == [["pleuraleffusion", "x-ray"], ["effusion", "ettube"]]
    assert not (mention_BT[~mask_BT] >= 0).any()
    assert not (mention_BT[2] >= 0).any()


def test_truncated_texts_and_the_most_entities(tmp_path: Path) -> None:
    words = train_wordpiece(TEXTS, vocab_size=90, min_frequency=1)
    ids_BT, mask_BT = words(["effusion " * 30])
    entity_BN, mention_BT = EntityLinker(FINDER, words, most=24)(ids_BT, mask_BT)
    assert entity_BN.shape == (1, 24)
    assert mention_BT.max() == 23
    ids_BT, mask_BT = words(["lung effusion"])
    last = int(mask_BT.sum()) - 2
    entity_BN, _ = EntityLinker(FINDER, words)(
        ids_BT[:, :last], mask_BT[:, :last]
    )  # "effusion" is cut or missing
    assert 0 not in entity_BN.tolist()[0]
    empty = EntityLinker(FINDER, words)(ids_BT[:0], mask_BT[:0])
    assert empty.entity_BN.shape == (0, 1)


def test_batches_have_the_entities_of_their_texts_and_of_all_texts_of_a_sample() -> None:
    tokenizer = train_wordpiece([*TEXTS, "lung"], vocab_size=90, min_frequency=1)
    inputs = Inputs(entities=FINDER)
    maker = ItemMaker(EvalTransform(size=16), WholeText(sections=("impression",)), (), 0, inputs)
    sections = {"findings": "The right lung. No effusion.", "impression": "ET tube, lung."}
    fields = {"corpus": "c", "split": "train", "patient": "p", "study": "s"}
    samples = [Sample(key="0", sections=sections, **fields), Sample(key="1", **fields)]
    items = [maker(sample, np.zeros((16, 16), np.uint8), 0) for sample in samples]
    batch, _ = Collate(tokenizer, inputs)(items)
    assert batch is not None
    assert batch.entity_BN is not None
    assert batch.image_entity_BN is not None
    assert batch.entity_BN.tolist() == [[4, 2], [-1, -1]]
    assert batch.image_entity_BN.tolist() == [[2, 1, 4], [-1, -1, -1]]
    plain, _ = Collate(tokenizer)(
        [
            ItemMaker(EvalTransform(size=16), WholeText(), (), 0)(
                samples[0], items[0].image_HWC[..., 0], 0
            )
        ]
    )
    assert plain is not None
    assert plain.entity_BN is plain.mention_BT is plain.image_entity_BN is None
    with raises(ConfigError, "wrong_type", "tokenizer"):
        Collate(lambda texts: (torch.zeros(0), torch.zeros(0)), inputs)
