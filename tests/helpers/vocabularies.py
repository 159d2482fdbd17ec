"""Small vocabularies in the formats of published encoders."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers


def write_byte_level(folder: Path, texts: Iterable[str], vocab_size: int = 400) -> Path:
    """Train a byte-level BPE vocabulary, write it in RoBERTa's two files, and return the folder."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.model.save(str(folder))
    return folder
