"""Recipes as commands, each forked from one process that has imported torch: a fraction of a second
instead of four.

Run as a program this file is that process: it reads a request a line, `[[script, argument, ...],
folder]`.
"""

import atexit
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from medvl.models.registry import SYSTEMS

HEAVY = ("transformers", "timm", "albumentations", "pydicom", "webdataset")
"""Libraries that no recipe may import before its data was found."""
LIGHT = (
    "tyro",
    "medvl.eval.zero_shot_classification.protocol",
    "medvl.train.tasks.pretraining",
    "medvl.train.recipe_files",
)
"""What most recipes import, beside the systems."""

_FORK = multiprocessing.get_context(
    "fork"
)  # its processes end at once, without cleaning up for half a second


def run_recipe(script: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python script arguments` in a folder. The last line of the output is `imported:` and
    the heavy libraries.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([[str(script), *arguments], str(folder)]) + "\n")
    server.stdin.flush()
    return subprocess.CompletedProcess(list(arguments), **json.loads(server.stdout.readline()))


@functools.cache
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Answer requests until the end of the input."""
    for name in (*LIGHT, *SYSTEMS.modules.values()):
        importlib.import_module(name)
    assert not _heavy()
    gc.freeze()
    for line in sys.stdin:
        words, folder = json.loads(line)
        sys.stdout.write(json.dumps(_answer(words, folder)) + "\n")
        sys.stdout.flush()


def _answer(words: list[str], folder: str) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        child = _FORK.Process(
            target=_become, args=(words, folder, stdout.fileno(), stderr.fileno())
        )
        child.start()
        child.join()
        stdout.seek(0)
        stderr.seek(0)
        return {"returncode": child.exitcode, "stdout": stdout.read(), "stderr": stderr.read()}


def _become(words: list[str], folder: str, stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(folder)
    os.environ["MEDVL_LOG_LEVEL"] = "WARNING"
    sys.argv[:] = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.stdout.write(" ".join(["imported:", *_heavy()]) + "\n")


def _heavy() -> list[str]:
    return [name for name in HEAVY if name in sys.modules]


if __name__ == "__main__":
    serve()
