"""Small shards of text, and a vocabulary of them."""

import random
from pathlib import Path

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.documents import Document
from medvl.data.corpora.text import TextOptions, plan_documents
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece

WORDS = [
    "left",
    "right",
    "small",
    "large",
    "effusion",
    "opacity",
    "lung",
    "lobe",
    "heart",
    "size",
    "normal",
    "seen",
    "no",
    "acute",
    "unchanged",
    "pleural",
]


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Return documents of three to eight sentences of four to nine words."""
    rng = random.Random(seed)
    return [
        " ".join(
            f"{' '.join(rng.choices(WORDS, k=rng.randint(4, 9))).capitalize()}."
            for _ in range(rng.randint(3, 8))
        )
        for _ in range(count)
    ]


def write_text_shards(folder: Path, documents: int = 24, block_words: int = 0) -> ShardSource:
    """Write shards of text and return their source."""
    deid = Deidentifier(b"s" * 32)
    texts = [Document(text=text) for text in make_documents(documents)]
    planned = plan_documents(
        texts, deid, options=TextOptions(block_words=block_words), fractions={"train": 1.0}
    )
    write_shards(planned, deid, ShardRun(out=folder, workers=1), ShardOptions(samples_per_shard=10))
    return ShardSource(folder / "train")


def text_vocabulary(max_tokens: int = 32) -> Tokenizer:
    """Return a vocabulary in which long words are several pieces."""
    return train_wordpiece(make_documents(24), vocab_size=60, max_tokens=max_tokens)
