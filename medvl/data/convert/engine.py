"""Interface of the engines: where the shards of a conversion are built. All of them write the same bytes.

`local_engine.LocalEngine` uses the processes of this machine, `ray_engine.RayEngine` those of a Ray cluster. An engine
does not affect the content: a `ShardTask` has the records, the options and the file to write.
"""

from collections.abc import Generator, Iterable
from typing import Protocol

from medvl.data.convert.note import ShardNote
from medvl.data.convert.shard_task import ShardTask

Progress = Generator[tuple[ShardNote | None, int], None, None]
"""Notes of finished shards, or None about every half second, with the number of converted images so far."""


class Engine(Protocol):
    """Interface of the engines."""

    def run(self, tasks: Iterable[ShardTask]) -> Progress:
        """Build shards; a limited number of tasks is queued. Closing the generator stops the workers.

        Raises ShardError when a worker died, and the error of a task that failed.
        """
