"""Records for the installed Weights & Biases, which writes to a folder here and needs no
network.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="needs the extra medvl[wandb]")

PROGRAM = """
import sys
import warnings
from pathlib import Path

import numpy as np

from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import no_text
from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.schema import Sample
from medvl.train.config import TrainConfig
from medvl.train.loop.logger import RunLogger


class Source:
    label_names, fingerprint = (), "source"

    def __len__(self):
        return 4

    def sample(self, position):
        return Sample(key=f"k{position}", corpus="c", split="s", patient="p", study="t", sections={"caption": "x"})

    def pixels(self, position, color=False):
        print("read by a worker")
        warnings.warn("a warning of a worker")
        return np.zeros((40, 40), np.uint8)


image = ConVIRTAugmentation.weak(32)
loader = open_loader(Source(), batch=2, image=image, text=WholeText(), tokenizer=no_text, train=True, workers=1)
config = TrainConfig(run_dir=Path(sys.argv[1]), steps=2, global_batch=2, wandb="tests", tensorboard=False)
assert "albumentations" not in sys.modules
logger = RunLogger(config, step=0, total_steps=2, active=True, run={"model": "none"})
for step, batch in enumerate(loader, 1):
    logger.record("train", step, {"loss": 1 / step})
logger.close()
print("finished")
"""


@pytest.mark.slow
def test_workers_start_after_a_real_run_of_wandb_has_begun(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_CONFIG_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "finished" in ended.stdout
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert run.stat().st_size > 500
