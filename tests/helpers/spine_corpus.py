"""The spine as a user types it: commands in processes of their own, and what of a patient must
not get past them.
"""

import base64
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pydicom

from helpers import blank_plots, forked

RECIPE = Path(__file__).parents[2] / "recipes" / "convirt_mimic.py"
PATIENTS, SEED, SIZE = 22, 10, 96
"""This seed puts two patients into validation and four into test, with positives and negatives
of some findings.
"""

_NAMED = {  # header fields that name a patient, a study, a day, a place or a person
    *(
        "PatientName",
        "PatientID",
        "PatientBirthDate",
        "AccessionNumber",
        "StudyID",
        "StudyDate",
        "StudyTime",
    ),
    *(
        "ReferringPhysicianName",
        "InstitutionName",
        "SOPInstanceUID",
        "StudyInstanceUID",
        "SeriesInstanceUID",
    ),
}
_SHORTEST = 5  # letters and digits fewer than these stand somewhere in any file of random bytes


@dataclasses.dataclass(frozen=True)
class Spine:
    """One pass of the pipeline, its folders all below `home`."""

    home: Path
    printed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of a command that was run -> all that it wrote on stdout and stderr."""
    medvl = (sys.executable, "-m", "medvl")

    @property
    def corpus(self) -> Path:
        return self.home / "mimic-cxr"

    @property
    def shards(self) -> Path:
        return self.home / "shards"

    @property
    def vocab(self) -> Path:
        return self.home / "vocab"

    @property
    def commands(self) -> dict[str, list[str]]:
        """From nothing to a vocabulary."""
        return {
            "phantom": ["phantom", "mimic-cxr", "--out", str(self.corpus), "--patients",
            str(PATIENTS),
                        "--seed", str(SEED), "--size", str(SIZE), "--workers", "1"],
            "shards": ["shards", "mimic-cxr", "--root", str(self.corpus), "--out", str(self.shards),
                       "--short-side", "48", "--samples-per-shard", "20", "--workers", "1"],
            "verify": ["verify", str(self.shards), "--decode"],
            "vocab": ["vocab", "--data", str(self.shards / "train"), "--out", str(self.vocab), "--size", "400",
            "--min-frequency", "1"],
        }  # fmt: skip

    def make(self) -> None:
        """All of `commands` in order."""
        for name, arguments in self.commands.items():
            self.run(name, [*self.medvl, *arguments])

    def run(self, name: str, command: Sequence[str]) -> None:
        """A command that must succeed; what it prints goes into `printed`."""
        done = self.ended(command)
        assert done.returncode == 0, done.stderr
        self.printed[name] = done.stdout + done.stderr

    def ended(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """A command to its end, however it ends."""
        return forked.run(command, cwd=self.home, env=self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """Of every command: one thread, and plots as users have them."""
        return {**os.environ, "OMP_NUM_THREADS": "1", blank_plots.DRAWN: "1"}

    def recipe(self, run_dir: Path, **changes: object) -> list[str]:
        """The ConVIRT recipe on this corpus, as small as its options go; every setting that
        matters here is given.
        """
        settings = {
            "model.image-encoder": "resnet_tiny",
            "model.text-encoder": "tiny_bert",
            "model.image-size": 32,
            "model.projection-dim": 32,
            "model.frozen-text-layers": 0,
            "model.max-tokens": 32,
            "data.train": self.shards / "train",
            "data.valid": self.shards / "validate",
            "data.tokenizer": self.vocab,
            "data.image.size": 32,
            "data.workers": 0,
            "data.seed": 0,
            "optim.optimizer": "adamw",
            "optim.lr": 1e-3,
            "optim.schedule.warmup-steps": 0,
            "train.run-dir": run_dir,
            "train.steps": 12,
            "train.epochs": 100,
            "train.global-batch": 8,
            "train.accumulate": 1,
            "train.precision": "fp32",
            "train.num-threads": 1,
            "train.validate-every": "epoch",
            "train.best-metric": "loss",
            "train.best-mode": "min",
            "train.checkpoint-every": "epoch",
            "train.log-every": 1,
            **{name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()},
        }
        flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        return [sys.executable, str(RECIPE), "tiny", *flags]


def canaries(corpus: Path) -> dict[str, set[str]]:
    """What headers, file names and folder names say of patients: where it stands -> the texts,
    in lower case.
    """
    found: dict[str, set[str]] = {name: set() for name in _NAMED}
    for path in corpus.rglob("*.dcm"):
        header = pydicom.dcmread(path, stop_before_pixels=True)
        for name in _NAMED:
            found[name] |= {str(header[name].value), *str(header[name].value).split("^")}
    files = list((corpus / "files").rglob("*"))
    found["names of files and folders"] = {path.stem for path in files} | {
        path.stem[1:] for path in files if path.is_dir()
    }
    found["identifiers in DICOM ids"] = {
        path.stem.split("-")[0] for path in files if path.suffix == ".dcm"
    }
    return {
        name: {text.lower() for text in texts if len(text) >= _SHORTEST}
        for name, texts in found.items()
    }


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """All that can be read in every file below a folder, in lower case: its name, its runs of
    printable characters, and those of whatever a page has put in base64.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            embedded = [
                base64.b64decode(text) for text in re.findall(rb"base64,([A-Za-z0-9+/=]+)", data)
            ]
            runs = [
                run
                for part in (data, *embedded)
                for run in re.findall(rb"[ -~]{%d,}" % _SHORTEST, part)
            ]
            yield path, b"\n".join([str(path.relative_to(folder)).encode(), *runs]).lower()
