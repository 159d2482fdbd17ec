"""Training on two nodes, each with a torchrun agent of its own: one node is lost and replaced."""

import json
import os
import signal
import socket
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from helpers import forked, node_ranks, train_fakes as fakes
from helpers.errors import raises

from medvl.errors import ConfigError
from medvl.train.doctor import checks


def start_agent(
    endpoint: str, folder: Path, *, host: bool = False, **environment: str
) -> BaseProcess:
    """Start the agent of one node, as `examples/cluster` does; what it prints is added to
    `FOLDER/log`.
    """
    # both nodes have the address of this machine
    conf = f"is_host={int(host)},keep_alive_interval=2"
    options = {
        "nnodes": "2", "nproc-per-node": "2", "rdzv-backend": "c10d", "rdzv-endpoint": endpoint,
        "rdzv-id": "run", "max-restarts": "3", "rdzv-conf": conf,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return forked.start(
        [sys.executable, "-m", "torch.distributed.run", *words, node_ranks.__file__, str(folder)],
        cwd=folder,
        stderr=folder / "log",
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **environment,
        },
    )


@pytest.mark.slow
def test_a_lost_node_is_replaced_and_the_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    first = start_agent(endpoint, tmp_path, host=True)
    second = start_agent(endpoint, tmp_path, LOSES_NODE="1")
    agents = [first, second]
    try:
        second.join(240)
        assert second.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
        agents.append(start_agent(endpoint, tmp_path))
        for agent in (first, agents[-1]):
            agent.join(240)
            assert agent.exitcode == 0, (tmp_path / "log").read_text()
    finally:
        for agent in agents:
            agent.kill()
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["nodes"], rank["problems"]) for rank in found] == [([0, 0, 1, 1], [])] * 4
    assert not list(tmp_path.glob(".medvl-doctor-*"))
    fewer, more = sorted({rank["restarts"] for rank in found})
    # a busy machine may miss a keep-alive, which restarts both nodes once more
    assert more == fewer + 1, "the new node counts from its own start"
    assert fakes.records(tmp_path / "lost") == fakes.records(tmp_path / "whole")
    assert len(fakes.records(tmp_path / "whole", "train")) == 12
    assert fakes.weights_hash(tmp_path / "lost") == fakes.weights_hash(tmp_path / "whole")


def rank(**changes: Any) -> dict[str, Any]:
    versions = {"medvl": "1", "torch": "2"}
    return {
        "node": 0,
        "host": "a",
        "device": "cpu",
        "versions": versions,
        "clock": 0.0,
        "storage": 0.1,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"versions": {"medvl": "1", "torch": "1"}}, "rank 1 on b has torch 1, rank 0 has 2"),
        ({"clock": -9.0}, "rank 1 on b has a clock -9.0 s off"),
        ({"storage": "cannot write"}, "rank 1 on b: storage: cannot write"),
        ({"storage": 12.0}, "rank 1 on b sees a new file after 12.0 s"),
    ],
)
def test_doctor_names_the_node_that_differs(changes: dict[str, Any], problem: str) -> None:
    (found,) = checks._disagreements([rank(), rank(node=1, host="b", **changes)])
    assert found.startswith(problem)


def test_doctor_of_nodes_needs_several_ranks() -> None:
    with raises(ConfigError, "missing", "ranks"):
        checks.check_nodes(fakes.ONE_RANK, 0.0, None)
