"""`scripts/setup.sh`: which Python and which packages it installs, without installing any."""

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
STUB = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


@pytest.fixture
def index() -> Iterator[str]:
    """A package index on this machine that answers every request."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()


def pip_call(folder: Path, index: str, *, gpu: bool = False) -> str:
    """Return the arguments that `setup ""` gives to pip in a copy of the project."""
    for name in ("pyproject.toml", "constraints-cpu.txt", "scripts/setup.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(PROJECT / name, folder / name)
    tools = folder / "tools"
    tools.mkdir()
    for name, text in (("python", STUB), ("nvidia-smi", f"#!/bin/sh\nexit {int(not gpu)}\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    calls = folder / "calls"
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "MEDVL_PYTHON": str(tools / "python"),
        "CALLS": str(calls),
        "REAL_PYTHON": sys.executable,
        "PYTORCH_CPU_INDEX": index,
        "PYTHONDONTWRITEBYTECODE": "1",
        "no_proxy": "127.0.0.1",
    }
    command = [
        "bash",
        "-ec",
        'source scripts/setup.sh; setup ""; setup ""; echo "keeps bytecode: '
        '[$PYTHONDONTWRITEBYTECODE]"',
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("keeps bytecode: []\n")
    (line,) = [line for line in calls.read_text().splitlines() if line.startswith("-m pip")]
    return line


def test_cpu_wheels_come_from_the_cpu_index(tmp_path: Path, index: str) -> None:
    arguments = pip_call(tmp_path, index)
    assert f"--extra-index-url {index}" in arguments
    assert "--constraint constraints-cpu.txt" in arguments


def test_an_index_that_is_out_of_reach_is_left_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        arguments = pip_call(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "--extra-index-url" not in arguments
    assert "--constraint constraints-cpu.txt" in arguments


def test_a_gpu_machine_takes_the_default_wheels(tmp_path: Path, index: str) -> None:
    arguments = pip_call(tmp_path, index, gpu=True)
    assert "--extra-index-url" not in arguments
    assert "--constraint" not in arguments


def test_documents_name_the_supported_versions() -> None:
    import tomllib

    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    assert named == ["3.11", "3.12", "3.13"]
    assert all(version in SpecifierSet(project["requires-python"]) for version in named)
    sentence = "Python 3.11, 3.12 or 3.13"
    for name in ("README.md", "docs/pages/start-here.md", "scripts/setup.sh"):
        assert sentence in (PROJECT / name).read_text(), name


@pytest.mark.parametrize(
    ("cores", "gpu", "expected"),
    [(1, False, 1), (2, False, 2), (3, False, 2), (4, False, 4), (64, False, 4), (64, True, 1)],
)
def test_recipes_run_on_one_rank_a_core(
    cores: int, gpu: bool, expected: int, tmp_path: Path
) -> None:
    for name, text in (
        ("nproc", f"#!/bin/sh\necho {cores}\n"),
        ("awk", "#!/bin/sh\necho 32\n"),  # free memory of 64 GB
        ("nvidia-smi", f"#!/bin/sh\nexit {int(not gpu)}\n"),
        (".venv/bin/torchrun", '#!/bin/sh\necho "$@" "$OMP_NUM_THREADS"\n'),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "7"}
    command = [
        "bash",
        "-ec",
        f"source {PROJECT}/scripts/setup.sh; torchrun recipe.py tiny; echo $OMP_NUM_THREADS",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    threads = 1 if expected > 1 else 7
    assert done.stdout.splitlines() == [
        f"--standalone --nproc-per-node {expected} recipe.py tiny {threads}",
        "7",
    ]


def test_cores_do_not_depend_on_the_threads_of_libraries() -> None:
    counts = set()
    for threads in ("1", "7", None):
        environment = {
            name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
        }
        environment |= {} if threads is None else {"OMP_NUM_THREADS": threads}
        command = ["bash", "-ec", f"source {PROJECT}/scripts/setup.sh; cores"]
        counts.add(
            subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
        )
    assert counts == {f"{len(os.sched_getaffinity(0))}\n"}


def test_quickstarts_train_on_all_cores() -> None:
    for name in ("quickstart.sh", "quickstart_vqa.sh", "quickstart_generation.sh"):
        lines = (PROJECT / "scripts" / name).read_text().splitlines()
        assert any(line.strip().startswith("torchrun recipes/") for line in lines), name
        assert not any("--nproc-per-node" in line for line in lines), name
