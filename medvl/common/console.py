"""Log lines of medvl on stderr, above a progress bar where there is one."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

LEVEL = "MEDVL_LOG_LEVEL"
"""Variable of the environment with the log level of recipes, such as WARNING."""


@contextlib.contextmanager
def console(active: bool, level: int | None = None) -> Iterator[None]:
    """Show medvl's log lines on stderr within the block, unless the caller has configured logging.

    Args:
        active: show them; False changes nothing, for the other ranks of a run.
        level: lowest level that is shown; None takes `MEDVL_LOG_LEVEL`, or INFO.
    """
    logger = logging.getLogger("medvl")
    if not active or logger.hasHandlers():
        yield
        return
    handler = _ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    before = logger.level
    logger.addHandler(handler)
    default = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, ""), logging.INFO)
    logger.setLevel(default if level is None else level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _ConsoleHandler(logging.Handler):
    """Handler that writes log lines above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if "tqdm" in sys.modules:  # without it there is no bar, and its import takes a while
            from tqdm import tqdm

            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")
