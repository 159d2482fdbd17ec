"""Checkpoints of sharded models that all ranks write at once, each its own part, without gathering anything.

    run_dir/checkpoints/step-00001200/
      config.json, tokenizer/, ...              as in other checkpoints; rank 0 writes them
      weights/shard-00001-model-..., ...        one file per rank, instead of model.safetensors
      train_state/state.json, optimizer/        one file per rank, instead of optimizer.safetensors
      complete.json                             written last, by rank 0, with the hash that each rank made of its files

The folder has a temporary name until all of it is on the disk, as with other checkpoints.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from medvl.common import folders
from medvl.common.files import fsync
from medvl.models.locate import WEIGHT_PARTS
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import OPTIMIZER_PARTS, Checkpoints
from medvl.train.parallel.model import ParallelModel
from medvl.train.parallel.parts import write_parts


def save_parts(
    checkpoints: Checkpoints, model: ParallelModel, state: Mapping[str, Any], optimizer: Mapping[str, Tensor]
) -> Path:
    """Write the checkpoint of `state["step"]` from all ranks, and link it as `Checkpoints.save` does. Collective call.

    Raises on all ranks where one of them fails; existing checkpoints are not changed.
    """
    ranks, folder = model.ranks, checkpoints.folder / f"step-{state['step']:08d}"
    with contextlib.ExitStack() as stack:  # on rank 0 it removes the new folder after an error

        def begin() -> str:
            aside = stack.enter_context(folders.new_folder(folder))
            checkpoints.write_description(model.whole, aside, state)
            (aside / WEIGHT_PARTS).mkdir()
            (aside / OPTIMIZER_PARTS).mkdir()
            return str(aside)

        aside = Path(ranks.on_main(begin))
        for name, tensors in ((WEIGHT_PARTS, model.weights()), (OPTIMIZER_PARTS, optimizer)):
            write_parts(aside / name, tensors, ranks)
        parts = ranks.on_all(lambda: _inventory_of_rank(aside, ranks.rank))

        def finish() -> None:
            files = {name: entry for part in parts for name, entry in part.items()}
            rest = [path for path in aside.rglob("*") if path.relative_to(aside).as_posix() not in files]
            checkpoint.write_marker(aside, state["step"], files | checkpoint.inventory(aside, rest))
            stack.close()
            checkpoints.finish(folder, state["best"]["step"])

        ranks.on_main(finish)
    return folder


def _inventory_of_rank(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of a rank's own files, and flush them to the disk."""
    own = f"shard-{rank + 1:05d}-*"
    files = [path for name in (WEIGHT_PARTS, OPTIMIZER_PARTS) for path in (folder / name).glob(own)]
    for path in files:
        fsync(path)
    return checkpoint.inventory(folder, files)
