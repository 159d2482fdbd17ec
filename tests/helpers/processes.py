"""Tests in several processes, forked from the one that has imported and collected them.

pytest-xdist starts its processes anew. Each then imports and collects by itself, 20 CPU seconds,
and starts a server of helpers.forked, 7 more: for four processes 80 of the suite's 1,000. A file of
tests is a unit of work: a process asks for the next one when it comes to the last test of a file.
"""

import atexit
import contextlib
import importlib
import itertools
import json
import os
import selectors
import signal
import socket
import traceback
import warnings
from collections import deque
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from helpers import forked


class Worker:
    """A process that runs tests, for the process that starts it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel
        self.received = b""
        self.units: deque[list[int]] = deque()
        """Numbers of its tests that have not ended, a list for each file."""

    def messages(self) -> list[tuple[str, Any]] | None:
        """Return what the process has sent; None at its end."""
        try:
            received = self.channel.recv(1 << 16)
        except ConnectionResetError:  # it was killed before it read what was sent to it
            received = b""
        *lines, self.received = (self.received + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None


class Processes:
    """A plugin that runs the collected tests in forks of this process, and reports them here."""

    def __init__(self, count: int) -> None:
        self.count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Start the server of helpers.forked, which imports beside the collection of tests."""
        forked.start_server()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Give files of tests to the processes until all have ended."""
        if session.config.option.collectonly or session.testsfailed:
            return None
        self.session, self.hook = session, session.config.hook
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = False  # results of several files come in turns
        numbers: dict[Path, list[int]] = {}
        for number, item in enumerate(session.items):
            numbers.setdefault(item.path, []).append(number)
        self.units = deque(numbers.values())
        self.selector = selectors.DefaultSelector()
        try:
            for _ in range(min(self.count, len(self.units))):
                self._start()
            while workers := self.selector.select():
                for key, _ in workers:
                    self._read(key.data)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if not self.selector.get_map():
                    break
        finally:
            for worker in self._workers():
                os.kill(worker.pid, signal.SIGKILL)
                self._end(worker)
        return True

    def _workers(self) -> list[Worker]:
        return [key.data for key in self.selector.get_map().values()]

    def _start(self) -> None:
        """Fork a process, which shares with this one what has been imported."""
        here, there = socket.socketpair()
        factory = self.session.config._tmp_path_factory
        folder = factory.mktemp("process")
        pid = os.fork()
        if pid == 0:
            for channel in (here, *(worker.channel for worker in self._workers())):
                channel.close()
            factory._basetemp = folder
            _run(self.session, there)
        there.close()
        self.selector.register(here, selectors.EVENT_READ, Worker(pid, here))

    def _read(self, worker: Worker) -> None:
        """Handle what a process has sent, or its end."""
        messages = worker.messages()
        if messages is None:
            status = self._end(worker)
            if worker.units:
                self._report_end(worker, status)
                self._start()
            return
        for kind, content in messages:
            if kind == "next":
                unit = self.units.popleft() if self.units else []
                if unit:
                    worker.units.append(list(unit))
                with contextlib.suppress(BrokenPipeError):  # its end is read next
                    worker.channel.sendall(json.dumps(unit).encode() + b"\n")
            elif kind == "report":
                self._report(content)
            elif kind == "ended":
                worker.units[0].remove(content)
                if not worker.units[0]:
                    worker.units.popleft()
            elif kind == "warning":
                self._warn(**content)
            else:
                raise RuntimeError(f"a process of tests failed:\n{content}")

    def _report(self, data: dict[str, Any]) -> None:
        """Report a phase of a test. The place of a skipped one is a tuple, which JSON has not."""
        if isinstance(data["longrepr"], list):
            data["longrepr"] = tuple(data["longrepr"])
        config = self.session.config
        report = self.hook.pytest_report_from_serializable(config=config, data=data)
        self.hook.pytest_runtest_logreport(report=report)

    def _end(self, worker: Worker) -> int:
        """Return the status of a process that has ended."""
        self.selector.unregister(worker.channel)
        worker.channel.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _report_end(self, worker: Worker, status: int) -> None:
        """Report the test within which a process ended, and take back those after it."""
        item = self.session.items[worker.units[0].pop(0)]
        text = f"the process of this test ended with status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self.hook.pytest_runtest_logreport(report=report)
        self.units.extendleft(unit for unit in worker.units if unit)

    def _warn(self, text: str, category: list[str], place: list[Any], **when: Any) -> None:
        """Record a warning of a test here."""
        kind = getattr(importlib.import_module(category[0]), category[1], UserWarning)
        message = warnings.WarningMessage(text, kind, *place)
        self.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **when})


def _run(session: pytest.Session, channel: socket.socket) -> NoReturn:
    """Run tests in this fork until the first process has no more."""
    reporter = Reporter(session, channel.makefile("rw", encoding="utf-8"))
    atexit._clear()  # what the first process does at its exit
    try:
        forked.share_server()
        manager = session.config.pluginmanager
        manager.unregister(name="terminalreporter")
        manager.register(reporter)
        # Forks would share the position in the files that output is captured in.
        capture: Any = manager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        reporter.run()
    except KeyboardInterrupt:
        pass
    except BaseException:
        reporter.send("error", traceback.format_exc())
    finally:
        atexit._run_exitfuncs()  # removes temporary folders of helpers, which `os._exit` would leave
        os._exit(0)


class Reporter:
    """A plugin of a fork that runs tests and sends their reports to the first process."""

    def __init__(self, session: pytest.Session, channel: IO[str]) -> None:
        self.session, self.config, self.channel = session, session.config, channel
        self.is_running = False

    def send(self, kind: str, content: Any) -> None:
        """Send a message."""
        self.channel.write(f"{json.dumps([kind, content])}\n")
        self.channel.flush()

    def run(self) -> None:
        """Run file after file."""
        self.is_running = True
        items, unit = self.session.items, self._next()
        while unit:
            following: list[int] = []
            for number, after in itertools.zip_longest(unit, unit[1:]):
                if after is None:
                    following = self._next()
                # Fixtures that the next test shares stay as they are.
                after = after if after is not None else next(iter(following), None)
                self.config.hook.pytest_runtest_protocol(
                    item=items[number], nextitem=None if after is None else items[after]
                )
                self.send("ended", number)
            unit = following

    def _next(self) -> list[int]:
        """Return the numbers of the tests of another file."""
        self.send("next", None)
        unit: list[int] = json.loads(self.channel.readline())
        return unit

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.send("report", data)

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Send a warning, but not those from before the fork, which pytest repeats."""
        if not self.is_running:
            return
        category = warning_message.category
        content = {
            "text": str(warning_message.message),
            "category": [category.__module__, category.__qualname__],
            "place": [warning_message.filename, warning_message.lineno],
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        self.send("warning", content)
