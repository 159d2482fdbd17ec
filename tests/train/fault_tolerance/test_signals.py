"""Signals before, while and after `StopSignals` handles them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from medvl.train.fault_tolerance.guards import StopSignals

STOPS = (signal.SIGTERM, signal.SIGINT)
PROGRAM = """
import json, os, signal, sys
from medvl.train.fault_tolerance.guards import StopSignals

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

for line in sys.stdin:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        break
    os.close(write)
    with open(read) as pipe:
        printed = pipe.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed]), flush=True)
else:
    sys.exit()
os.dup2(write, 1)
os.close(write)
signal.alarm(60)
# A shell that starts the tests in the background has them ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
stop = StopSignals()
exec(json.loads(line))
"""
"""An interpreter that forks for each line of its input, so that torch is imported once. A fork ends
as the interpreter does.
"""
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return the exit status and output of a program that has `stop` and `send(name)`."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def run_lines(*lines: str) -> tuple[int, str]:
            requests.write(json.dumps("\n".join(lines)) + "\n")
            requests.flush()
            status, printed = json.loads(answers.readline())
            return status, printed

        yield run_lines


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


@pytest.fixture(autouse=True)
def _same_handlers() -> Iterator[None]:
    """The handlers of before, also after a test that fails."""
    before = [signal.getsignal(number) for number in STOPS]
    yield
    for number, handler in zip(STOPS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPS)
def test_first_signal_requests_a_stop(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
    assert stop.requested == number.name  # read after the block, to end the process


@pytest.mark.parametrize("number", STOPS)
def test_signal_before_the_block_has_its_usual_effect(number: signal.Signals, run: Run) -> None:
    assert run(f"send({number.name!r})", "with stop: print('trains')") == (-number, "")


@pytest.mark.parametrize("number", STOPS)
def test_signal_after_the_block_has_its_usual_effect(number: signal.Signals, run: Run) -> None:
    lines = (
        "with stop: print('trains', flush=True)",
        f"send({number.name!r})",
        "print('still here')",
    )
    assert run(*lines) == (-number, "trains\n")


@pytest.mark.parametrize("second", STOPS)
@pytest.mark.parametrize("first", STOPS)
def test_second_signal_ends_the_process(
    first: signal.Signals, second: signal.Signals, run: Run
) -> None:
    sent = f"  send({first.name!r}); print(stop.requested, flush=True); send({second.name!r})"
    assert run("with stop:", sent, "  print('still here')") == (-second, f"{first.name}\n")


@pytest.mark.parametrize("sent", STOPS)
@pytest.mark.parametrize("during", [0, 1])
def test_signal_between_the_two_handlers_requests_a_stop(
    monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, during: int
) -> None:
    """Without blocking, Ctrl-C before the second handler would leave the first one behind."""
    install: Callable[..., Any] = signal.signal
    calls: list[int] = []

    def install_and_send(number: int, handler: Any) -> Any:
        before = install(number, handler)
        if len(calls) == during:  # to this thread: others of the process do not block it
            signal.pthread_kill(threading.get_ident(), sent)
        calls.append(number)
        return before

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    stop = StopSignals()
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", install_and_send)
        with stop:
            patch.undo()
            assert stop.requested == sent.name
            assert [signal.getsignal(number) for number in STOPS] == [stop._handle] * 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_interrupt_that_another_thread_takes_leaves_no_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python runs the handler in the main thread, which has blocked the signal for itself only."""
    install: Callable[..., Any] = signal.signal
    before = [signal.getsignal(number) for number in STOPS]

    def install_and_interrupt(number: int, handler: Any) -> Any:
        previous = install(number, handler)
        if number == STOPS[0] and handler not in before:
            raise KeyboardInterrupt
        return previous

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", install_and_interrupt)
        with pytest.raises(KeyboardInterrupt), StopSignals():
            pass
    assert [signal.getsignal(number) for number in STOPS] == before


def test_interrupt_while_signals_are_being_blocked_leaves_none_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python runs its handlers within `pthread_sigmask`, once the signals are blocked."""
    block = signal.pthread_sigmask
    before = [signal.getsignal(number) for number in STOPS]

    def block_and_interrupt(how: int, numbers: Any) -> Any:
        mask = block(how, numbers)
        if how == signal.SIG_BLOCK and numbers:
            raise KeyboardInterrupt
        return mask

    with monkeypatch.context() as patch:
        patch.setattr(signal, "pthread_sigmask", block_and_interrupt)
        with pytest.raises(KeyboardInterrupt), StopSignals():
            pass
    blocked = block(signal.SIG_SETMASK, ())
    assert not blocked & set(STOPS)
    assert [signal.getsignal(number) for number in STOPS] == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("handler", [ignore, signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_of_before_return(handler: Any, fails: bool) -> None:
    for number in STOPS:
        signal.signal(number, handler)
    stop = StopSignals()
    for _ in range(2):  # a program may train twice
        with contextlib.suppress(ValueError), stop:
            assert {signal.getsignal(number) for number in STOPS} == {stop._handle}
            if fails:
                raise ValueError("the training failed")
        assert [signal.getsignal(number) for number in STOPS] == [handler] * 2


def test_handlers_stay_when_another_thread_trains() -> None:
    before = [signal.getsignal(number) for number in STOPS]
    seen: list[Any] = []

    def elsewhere() -> None:
        with StopSignals() as stop:
            seen.extend(signal.getsignal(number) for number in STOPS)
            seen.append(stop.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [*before, None]
