"""Programs in processes of their own, forked from one that has imported the libraries: their start
costs a tenth of a second instead of five.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "albumentations",
        "medvl.cli.main",
        "medvl.models.dual_encoders.convirt",
        "medvl.train",
        "timm",
        "torch.distributed.fsdp",
        "torch.nn.parallel.distributed",
        "transformers.models.bert.modeling_bert",
        "helpers.frozen",
    ]
)
_FORK = multiprocessing.get_context("fork")


def start(
    command: Sequence[str],
    *,
    cwd: Path,
    stdout: Path | str = os.devnull,
    stderr: Path | str = os.devnull,
    env: Mapping[str, str] | None = None,
    new_session: bool = False,
    nested: bool = False,
) -> BaseProcess:
    """Start `python program.py ...` or `python -m module ...`. Output goes to files or named
    pipes.
    """
    assert command[0] == sys.executable, command
    environment = dict(os.environ if env is None else env)
    words = [str(word) for word in command[1:]]
    context = _FORK if nested else _SERVER
    settings = (words, str(cwd), str(stdout), str(stderr), environment, new_session)
    process = context.Process(target=_become, args=settings)
    process.start()
    return process


def start_with_pipe(
    command: Sequence[str], pipe: Path, **options: Any
) -> tuple[BaseProcess, IO[str]]:
    """Start a program and return it with its stderr, which ends when the last process that
    writes to it has.
    """
    os.mkfifo(pipe)
    process = start(command, stderr=pipe, **options)
    return process, pipe.open()


def run(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    nested: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run(command, capture_output=True, text=True)`
    does; also `python -c`.
    """
    with tempfile.TemporaryDirectory() as folder:
        if command[1] == "-c":
            program = Path(folder, "program.py")
            program.write_text(f"import sys\nsys.path[0] = ''\n{command[2]}")
            command = [command[0], str(program), *command[3:]]
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(
            command,
            cwd=cwd or Path.cwd(),
            stdout=outputs[0],
            stderr=outputs[1],
            env=env,
            nested=nested,
        )
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(list(command), timeout)
        texts = [path.read_text() if path.exists() else "" for path in outputs]
        return subprocess.CompletedProcess(list(command), process.exitcode, *texts)


def _become(
    words: list[str],
    folder: str,
    stdout: str,
    stderr: str,
    environment: dict[str, str],
    new_session: bool,
) -> None:
    """Do what the interpreter does with these words; Python programs that it then runs to their
    end are forks of it.
    """
    if new_session:
        os.setsid()
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # A crash in a library's C code, but an overflow of the stack, says where: first the line of
    # Python, then the C++ frames of all threads.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    faulthandler.enable(file=2)
    if sys.platform == "linux":
        _handle_signals_on_the_usual_stack()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    module = words[0] == "-m"
    paths = [
        folder if module else str(Path(words[0]).parent),
        *environment.get("PYTHONPATH", "").split(os.pathsep),
    ]
    sys.path[:0] = [path for path in paths if path]
    multiprocessing.set_start_method(
        None, force=True
    )  # the default of this system, not that of the fork server
    sys.argv[:] = words[module:]
    with mock.patch.object(subprocess, "run", _run_nested):
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")


class _SignalStack(ctypes.Structure):
    """`stack_t` of Linux, see sigaltstack(2)."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def _handle_signals_on_the_usual_stack() -> None:
    """Switch off the signal stack of faulthandler: torch's frames do not fit in it, and
    overwrite the heap beside it.
    """
    disable = 2
    off = _SignalStack(None, disable, 0)
    if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(off), None):
        raise OSError(ctypes.get_errno(), "cannot switch off the signal stack")


_run = subprocess.run


def _run_nested(command: Any, *arguments: Any, **options: Any) -> Any:
    if command[0] != sys.executable:
        return _run(command, *arguments, **options)
    done = run(command, cwd=options.get("cwd"), env=options.get("env"), nested=True)
    if options.get("check"):
        done.check_returncode()
    return done
