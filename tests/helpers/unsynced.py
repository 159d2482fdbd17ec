"""Files of tests survive a kill, and need not survive a loss of power.

Waiting for the disk took up to nine tenths of a small training. Tests of a disk that fails replace
`os.fsync` themselves; programs that are no forks of a test wait as ever.
"""

import os
from unittest import mock


def _check_file(descriptor: int) -> None:
    os.fstat(descriptor)


WITHOUT_WAITING = mock.patch.object(os, "fsync", _check_file)
"""`os.fsync` checks that its file is open, and does not wait for the disk."""
