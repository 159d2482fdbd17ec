"""Conversion on Ray: tasks on a cluster, or on the cores of this machine. Needs the extra
`medvl[ray]`.

    driver     plans the corpus, keeps a bounded number of shards under way, stores the note of each
               finished shard
    Ray task   builds one shard, exactly as a local worker, and writes it to the shared file system
    lost task  Ray runs it again elsewhere; a shard is renamed to its name when complete, so nothing
               partial counts
    lost driver  the same command continues with the shards that have no note

Corpus and output folder must have the same path on every node, and medvl and its codecs the same
versions: a node where they differ ends the conversion, because it would write other bytes.
"""

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cv2

from medvl.common.process import WORKER_BYTES, memory_limited
from medvl.data.convert.plan import package_versions
from medvl.data.convert.record import Progress, ShardNote, ShardTask, build_shard
from medvl.errors import ConfigError, ShardError

_RETRIES = 3
"""Times that a shard is started again after its worker or node was lost."""
_STOP_SECONDS = 10.0
_CONNECT_SECONDS = 10.0


class RayEngine:
    """Tasks of a Ray cluster, two for each of its cores, so that no core waits for the driver.

    Args:
        address: address of a cluster, as for `ray.init`; None uses $RAY_ADDRESS, else the cores of
            this machine.
        workers: shards built at the same time; None uses all cores.
    """

    def __init__(self, address: str | None, workers: int | None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS")
        self.workers = workers

    def run(self, tasks: Iterable[ShardTask]) -> Progress:
        """Build shards, as `Engine.run`.

        Raises ConfigError when no cluster answers at the address.
        """
        import ray

        started_here = not ray.is_initialized()
        if started_here:
            self._connect()
        try:
            yield from self._run(tasks)
        finally:
            if started_here:
                ray.shutdown()

    def _connect(self) -> None:
        import ray

        # by default, Ray sends usage statistics
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        where: dict[str, Any] = {"address": self.address}
        if self.address is None:
            where = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
        try:
            host, _, port = (self.address or "").rpartition(":")
            if host and port.isdecimal():  # Ray itself retries for minutes
                socket.create_connection(
                    (host.rpartition("/")[2], int(port)), timeout=_CONNECT_SECONDS
                ).close()
            ray.init(log_to_driver=False, logging_level=logging.WARNING, **where)
        except (OSError, ValueError, RuntimeError) as error:
            message = (
                f"no Ray cluster answers at {self.address} ({type(error).__name__}); "
                f"start one with ray start"
            )
            raise ConfigError(message, "not_found", field="address") from error

    def _run(self, tasks: Iterable[ShardTask]) -> Progress:
        import ray

        build = ray.remote(num_cpus=1, max_retries=_RETRIES)(_build_on_node)
        packages: Any = ray.put(package_versions())
        running: dict[Any, ShardTask] = {}
        converted = 0
        remaining = iter(tasks)
        try:
            while True:
                while len(running) < self._most_running():
                    task = next(remaining, None)
                    if task is None:
                        break
                    running[build.remote(task, str(Path.cwd()), packages)] = task
                if not running:
                    return
                finished, _ = ray.wait(list(running), timeout=0.5)
                if not finished:
                    yield None, converted
                for reference in finished:
                    task = running.pop(reference)
                    converted += len(task.records)
                    yield _result(reference, task), converted
        finally:
            _cancel(list(running))

    def _most_running(self) -> int:
        """Return the number of tasks that may be submitted at a time; the size of a cluster may
        change.
        """
        import ray

        cores = int(ray.cluster_resources().get("CPU", 1))
        return 2 * cores if self.workers is None else min(self.workers, 2 * cores)


def _result(reference: Any, task: ShardTask) -> ShardNote:
    """Return the note of a finished task. Raises its error, or ShardError when its workers were
    lost.
    """
    import ray.exceptions

    try:
        note: ShardNote = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        kind = type(error).__name__
        advice = (
            "see Ray's log of the node, and run the same command again: finished shards are kept"
        )
        message = (
            f"the workers that built {task.name} were lost {_RETRIES + 1} times ({kind}); {advice}"
        )
        raise ShardError(message, "worker") from error
    return note


def _cancel(references: list[Any]) -> None:
    """Interrupt tasks, and give them a moment to remove their partial files."""
    import ray

    for reference in references:
        ray.cancel(reference)
    if references:
        ray.wait(references, num_returns=len(references), timeout=_STOP_SECONDS)


def _build_on_node(task: ShardTask, folder: str, packages: Mapping[str, str]) -> ShardNote:
    """Build a shard in a Ray worker; `folder` is the driver's working directory, for relative
    paths.
    """
    if Path(folder).is_dir():
        os.chdir(folder)
    node = os.uname().nodename
    here = package_versions()
    differing = [
        f"{name} {here[name]} (driver {other})"
        for name, other in packages.items()
        if here[name] != other
    ]
    if differing:
        message = f"node {node} has {', '.join(differing)}; install the same versions on all nodes"
        raise ShardError(message, "mismatch", field="packages")
    for path in (task.folder, *map(Path, task.folders.real)):
        if not path.is_dir():
            message = (
                f"{path} does not exist on node {node}; mount corpus and output on all "
                f"nodes under the same path"
            )
            raise ShardError(message, "not_found", field="address")
    cv2.setNumThreads(0)  # one task per core already
    with memory_limited(WORKER_BYTES):
        return build_shard(task, _no_progress)


def _no_progress() -> None:
    """Do nothing: progress is counted by the shard."""
