"""Two ranks without torchrun: a second instead of ten."""

import os
import socket
import sys
import tempfile
from pathlib import Path

from helpers import forked

RANKS = 2


def run_two_ranks(script: Path | str, *arguments: object, timeout: float = 300) -> None:
    """Run a script as `torchrun --nproc-per-node 2` does. Raises AssertionError with the output if
    a rank fails.

    Scripts with DDP leave their process group as it is: DDP that is freed after the group can wait
    forever.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as logs:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, str(script), *map(str, arguments)]
        outputs = [Path(logs, str(rank)) for rank in range(RANKS)]
        processes = []
        for rank, output in enumerate(outputs):
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": RANKS,
                "LOCAL_WORLD_SIZE": RANKS,
            }
            env = {name: str(value) for name, value in {**numbers, "MASTER_PORT": port}.items()}
            env = {**os.environ, **env, "MASTER_ADDR": "localhost"}
            processes.append(
                forked.start(command, cwd=Path.cwd(), stdout=output, stderr=output, env=env)
            )
        for process in processes:
            process.join(timeout)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * RANKS, "\n".join(
            [str(codes), *(path.read_text() for path in outputs if path.exists())]
        )
