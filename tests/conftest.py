"""Shared by all tests: no network, one thread a process, the folder of real data where there is one."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import medvl  # noqa: F401  installs the torchvision hook before any test imports timm or transformers

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that MEDVL_REAL_DATA names; tests that ask for it are skipped without it."""
    folder = os.environ.get("MEDVL_REAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MEDVL_REAL_DATA names no folder")
    return Path(folder)
