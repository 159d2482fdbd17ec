"""Programs in processes of their own, forked from one that has imported the libraries: their start
costs a tenth of a second instead of five. Python programs that they start are forks of them.
"""

import ctypes
import faulthandler
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch

from helpers import blank_plots

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "albumentations",
        "matplotlib.backends.backend_pdf",
        "medvl.cli.main",
        "medvl.eval.zero_shot_classification.evaluation",
        "medvl.models.dual_encoders.convirt",
        "medvl.train",
        "pydicom",
        "scipy.stats",
        "timm",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.nn.parallel.distributed",
        "torchmetrics",
        "transformers.models.bert.modeling_bert",
        "helpers.frozen",
    ]
)
_FORK = multiprocessing.get_context("fork")


def start_server() -> None:
    """Start the process of which programs are forks. Without this, the first of them waits."""
    multiprocessing.forkserver.ensure_running()


def share_server() -> None:
    """Use in this fork the server that its parent has started, for whose end it cannot wait."""
    server: Any = vars(multiprocessing.forkserver)["_forkserver"]
    server.ensure_running = lambda: None


def context(method: str) -> ForkServerContext:
    """Return the context of processes that are forked, in place of
    `multiprocessing.get_context("spawn")`.
    """
    assert method == "spawn"
    return _SERVER


def start(
    command: Sequence[str],
    *,
    cwd: Path,
    stdout: Path | str = os.devnull,
    stderr: Path | str = os.devnull,
    env: Mapping[str, str] | None = None,
    new_session: bool = False,
) -> BaseProcess:
    """Start `python program.py ...` or `python -m module ...`. Output goes to files or named
    pipes.
    """
    assert command[0] == sys.executable, command
    environment = dict(os.environ if env is None else env)
    words = [str(word) for word in command[1:]]
    settings = (words, str(cwd), str(stdout), str(stderr), environment, new_session)
    process = _SERVER.Process(target=_become, args=settings)
    process.start()
    return process


def start_call(
    function: Callable[..., object],
    *arguments: object,
    output: Path,
    env: Mapping[str, str],
) -> BaseProcess:
    """Start a function of a module. What it prints goes to a file."""
    settings = (function, arguments, str(Path.cwd()), str(output), dict(env))
    process = _SERVER.Process(target=_call, args=settings)
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
    stdout: str | int,
    stderr: str | int,
    environment: dict[str, str],
    new_session: bool,
) -> None:
    """Do what the interpreter does with these words."""
    if new_session:
        os.setsid()
    _prepare(folder, stdout, stderr, environment)
    is_module = words[0] == "-m"
    paths = [
        folder if is_module else str(Path(words[0]).parent),
        *environment.get("PYTHONPATH", "").split(os.pathsep),
    ]
    sys.path[:0] = [path for path in paths if path]
    sys.argv[:] = words[is_module:]
    with mock.patch.object(subprocess.Popen, "_execute_child", _fork_child):
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(words[0]).absolute()), run_name="__main__")


def _call(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    folder: str,
    output: str,
    environment: dict[str, str],
) -> None:
    _prepare(folder, output, output, environment)
    function(*arguments)


def _prepare(
    folder: str, stdout: str | int, stderr: str | int, environment: dict[str, str]
) -> None:
    """Take folder, outputs (paths or open files) and environment of a new process."""
    for number, output in ((1, stdout), (2, stderr)):
        if isinstance(output, str):
            output = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, number)
    # A crash in a library's C code, but an overflow of the stack, says where: first the line of
    # Python, then the C++ frames of all threads.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    faulthandler.enable(file=2)
    if sys.platform == "linux":
        _handle_signals_on_the_usual_stack()
    os.environ.clear()
    os.environ.update(environment)
    if blank_plots.DRAWN not in environment:
        blank_plots.draw_none()
    os.chdir(folder)
    torch.set_num_threads(1)
    # the default of this system, not that of the fork server
    multiprocessing.set_start_method(None, force=True)


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


_execute_child: Any = vars(subprocess.Popen)["_execute_child"]
"""The method of Popen that starts the child; all others then work on a fork as well."""


def _fork_child(popen: "subprocess.Popen[Any]", *arguments: Any) -> None:
    """Start a Python program as a fork of this process, as Popen starts any program."""
    asked = inspect.signature(_execute_child).bind(popen, *arguments).arguments
    given = asked["args"]
    command = [given] if isinstance(given, str) else [os.fspath(word) for word in given]
    words = command[2 if command[1:2] == ["-u"] else 1 :]
    is_program = words and (words[0] == "-m" or not words[0].startswith("-"))
    if command[0] != sys.executable or not is_program or asked["p2cread"] != -1:
        _execute_child(popen, *arguments)
        return
    process = _FORK.Process(
        target=_become,
        args=(
            words,
            os.fspath(asked["cwd"] or Path.cwd()),
            1 if asked["c2pwrite"] == -1 else asked["c2pwrite"],
            2 if asked["errwrite"] == -1 else asked["errwrite"],
            dict(os.environ if asked["env"] is None else asked["env"]),
            asked["start_new_session"],
        ),
    )
    sys.stdout.flush()
    sys.stderr.flush()
    popen.pid = os.fork()
    if popen.pid == 0:
        _forget_parent()
        # multiprocessing would take the exit status of a process that it has started itself.
        os._exit(process._bootstrap())
    popen._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(asked[end] for end in ends))


def _forget_parent() -> None:
    """Close connections and remove handlers of signals, as a new program has none."""
    for path in Path("/dev/fd").iterdir():
        try:
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                os.close(int(path.name))
        except OSError:  # the folder that was listed
            continue
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
