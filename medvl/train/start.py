"""What a run starts from, by content: checkpoints, weights of one's own, the vocabulary and files of statements."""

import hashlib
import json
from pathlib import Path
from typing import Any

from medvl.common.files import sha256
from medvl.encoders.pretrained import split_set
from medvl.models.locate import find_checkpoint, weights_sha256

_CHECKPOINTS = ("init_from", "image_from", "text_from", "autoencoder")
"""Settings of recipes that name a checkpoint."""
_FILES = ("image_weights", "text_weights", "pixelhop")
"""Settings of recipes, or of their models, that name a file or a folder of weights."""


def describe_start(settings: Any, model: Any) -> dict[str, str]:
    """Return hashes of what the settings of a recipe name, so that a run in a used folder is known for another one.

    Names of encoders and addresses on the hub, which contain a commit, are returned as they are.
    """
    found: dict[str, str] = {}
    for name in _CHECKPOINTS:
        if (source := getattr(settings, name, None)) is not None:
            folder = find_checkpoint(source)
            found[name] = weights_sha256(folder) if folder.is_dir() else str(source)
    for part, prefix in ((settings, ""), (getattr(settings, "model", None), "model.")):
        for name in _FILES:
            if (source := getattr(part, name, None)) is not None:
                path, weights = split_set(source)
                found[prefix + name] = _content(Path(path)) + (f"#{weights}" if weights else "")
    file = getattr(getattr(settings.data, "text", None), "file", None)
    if file is not None:
        found["data.text.file"] = _content(Path(file))
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        words = json.dumps(sorted(tokenizer.vocabulary.items()))
        found["vocabulary"] = hashlib.sha256(words.encode()).hexdigest()
    return found


def _content(path: Path) -> str:
    """Return the hash of a file, or of the files of a folder; another name as it is."""
    if path.is_dir():
        hashes = [sha256(file) for file in sorted(path.rglob("*")) if file.is_file()]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()
    return sha256(path) if path.is_file() else str(path)
