"""Recipes as commands, each forked from one process that has imported torch: a fraction of a second instead of four.

Run as a program this file is that process: it reads a request a line, `[[script, argument, ...], folder]`.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HEAVY = ("transformers", "timm", "albumentations", "pydicom", "webdataset")
"""Libraries that no recipe may import before its data was found."""
LIGHT = ("tyro", "medvl.train.tasks.pretraining", "medvl.train.recipe_cli", "medvl.models.dual_encoders.convirt")


def run_recipe(script: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python script arguments` in a folder. The last line of the output is `imported:` and the heavy libraries."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([[str(script), *arguments], str(folder)]) + "\n")
    server.stdin.flush()
    return subprocess.CompletedProcess(list(arguments), **json.loads(server.stdout.readline()))


@functools.cache
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Answer requests until the end of the input."""
    for name in LIGHT:
        importlib.import_module(name)
    assert not _heavy()
    for line in sys.stdin:
        words, folder = json.loads(line)
        sys.stdout.write(json.dumps(_answer(words, folder)) + "\n")
        sys.stdout.flush()


def _answer(words: list[str], folder: str) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        child = os.fork()
        if not child:
            for number, file in enumerate((stdout, stderr), start=1):
                os.dup2(file.fileno(), number)
            os.chdir(folder)
            sys.argv[:] = words
            try:
                runpy.run_path(words[0], run_name="__main__")
            finally:
                sys.stdout.write(" ".join(["imported:", *_heavy()]) + "\n")
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stdout.seek(0)
        stderr.seek(0)
        return {"returncode": status, "stdout": stdout.read(), "stderr": stderr.read()}


def _heavy() -> list[str]:
    return [name for name in HEAVY if name in sys.modules]


if __name__ == "__main__":
    serve()
