"""Folder of a checkpoint from the argument of a user: a checkpoint, a run, or a model on the Hugging Face hub."""

import hashlib
import re
from pathlib import Path

from medvl.common.files import MARKER, sha256
from medvl.common.hub import HUB_PREFIX, fetch_snapshot, is_hub_id
from medvl.errors import CheckpointError, WeightsError

CONFIG, WEIGHTS, TOKENIZER, TRAIN_MANIFEST = "config.json", "model.safetensors", "tokenizer", "train_manifest.json"
WEIGHT_PARTS = "weights"
"""Folder of a checkpoint whose weights were written by several ranks, each its own part, instead of one file."""
TRAIN_STATE = "train_state"
"""Folder of a checkpoint with the state of the training run, which a model does not need."""
ANCESTORS = "ancestor_manifests.json"
"""File of a checkpoint with the training manifests of the checkpoints that its run started from, and of theirs."""
CARD = "README.md"
"""File of a checkpoint with its model card."""
MODEL_FILES = (CONFIG, WEIGHTS, f"{TOKENIZER}/*", TRAIN_MANIFEST, ANCESTORS, CARD)
"""Files of a checkpoint that make up the model; the others belong to the training run."""
BEST, LAST = "best", "last"
"""Links in the folder of a run."""
_SHOWN = 5
_REVISION = re.compile(r"[\w./-]{1,96}", re.ASCII)


def find_checkpoint(source: Path | str) -> Path:
    """Return the folder of a checkpoint.

    Args:
        source: the folder of a checkpoint; or of a run, for its best checkpoint, or its last one where it has no best;
            or `hf-hub:OWNER/NAME[@REVISION]`, which is downloaded. Other paths are returned as they are.

    Raises CheckpointError "not_found" for a model of the hub that is not available.
    """
    name = str(source)
    if not on_hub(source):
        return _of_run(Path(source))
    if not _is_hub_name(name.removeprefix(HUB_PREFIX)):
        message = f"expected {HUB_PREFIX}OWNER/NAME, or with @REVISION at the end, got {name!r}"
        raise CheckpointError(message, "malformed")
    hub_id, _, revision = name.removeprefix(HUB_PREFIX).partition("@")
    try:
        return fetch_snapshot(hub_id, revision or None, (*MODEL_FILES, MARKER))
    except WeightsError as error:
        raise CheckpointError(str(error), error.code) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights: one, or the parts of several ranks."""
    return sorted((folder / WEIGHT_PARTS).glob("*.safetensors")) or [folder / WEIGHTS]


def weights_sha256(folder: Path) -> str:
    """Return the sha256 of a checkpoint's weights; of weights in several parts that of their hashes."""
    hashes = [sha256(file) for file in weight_files(folder)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def nearby_checkpoints(folder: Path) -> str:
    """Return advice that names the runs and checkpoints in a folder, the first five; "" where there are none."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [str(entry) for entry in entries if (_of_run(entry) / CONFIG).is_file()]
    more = ", ..." if len(found) > _SHOWN else ""
    return f"give one of {', '.join(found[:_SHOWN])}{more}" if found else ""


def on_hub(source: Path | str) -> bool:
    """Return whether `find_checkpoint` takes a name from the hub: one that begins with `hf-hub:`."""
    return str(source).startswith(HUB_PREFIX)


def hub_advice(source: Path | str) -> str:
    """Return advice for a path that does not exist, but may be meant as the name of a model on the hub; else ""."""
    name = str(source)
    is_possible = not on_hub(source) and not Path(source).exists() and _is_hub_name(name)
    return f"for a model of the hub write {HUB_PREFIX}{name}" if is_possible else ""


def _is_hub_name(name: str) -> bool:
    hub_id, at, revision = name.partition("@")
    return is_hub_id(hub_id) and (not at or _REVISION.fullmatch(revision) is not None)


def _of_run(folder: Path) -> Path:
    if (folder / CONFIG).is_file():
        return folder
    return next((folder / name for name in (BEST, LAST) if (folder / name / CONFIG).is_file()), folder)
