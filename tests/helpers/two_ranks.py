"""Two ranks without torchrun, forked from a process that has imported the libraries: a second instead of ten."""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path

RANKS = 2
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "medvl.models.dual_encoders.convirt",
        "medvl.train",
        "timm",
        "torch.distributed.fsdp",
        "torch.nn.parallel.distributed",
        "transformers.models.bert.modeling_bert",
    ]
)


def run_two_ranks(script: Path | str, *arguments: object, timeout: float = 300) -> None:
    """Run a script as `torchrun --nproc-per-node 2` does. Raises AssertionError with the output if a rank fails."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as logs:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        words = [str(script), *map(str, arguments)]
        outputs = [Path(logs, str(rank)) for rank in range(RANKS)]
        processes = [
            _CONTEXT.Process(target=_run, args=(rank, port, words, output)) for rank, output in enumerate(outputs)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * RANKS, "\n".join([str(codes), *(path.read_text() for path in outputs if path.exists())])


def _run(rank: int, port: int, words: list[str], output: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="localhost")
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
