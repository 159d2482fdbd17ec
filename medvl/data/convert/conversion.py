"""Identity of a conversion, stored in `OUT-private/plan.json`.

A resumed run compares it with its own, and `medvl merge` compares those of all parts.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import medvl
from medvl.common.files import write_atomic
from medvl.common.folders import RunLock, subfolder, sweep
from medvl.common.untrusted import parse_json
from medvl.data.convert.options import ShardOptions, select_part
from medvl.data.convert.plan import ShardPlan, count_by_split, shard_name
from medvl.data.convert.private_folder import PrivateFolder
from medvl.errors import ConfigError, ShardError

_PACKAGES = ("numpy", "opencv-python-headless", "pillow", "pydicom", "simplejpeg")
_IDENTITY = {
    "corpus": "the corpus' name",
    "options": "the options of the images or shards",
    "part": "the part",
    "records": "the records (rows, columns or splits)",
    "salt": "the salt",
}
"""Field of a conversion that a resumed run must share -> its name in messages."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A planned corpus and its options. All parts of one conversion differ in `part` only."""

    corpus: str
    salt: str
    """Fingerprint of the salt."""
    records: str
    """`ShardPlan.fingerprint` of the corpus."""
    options: Mapping[str, Any]
    part: str | None
    """`i/n`, or None for the whole corpus."""
    label_names: tuple[str, ...]
    excluded: Mapping[str, int]
    """Rows left out before planning by an option or a rule, by reason."""
    corpus_warnings: Mapping[str, int]
    """Repairs to the tables of the corpus, by rule."""
    planned: Mapping[str, int]
    """Images per split, over all parts."""
    packages: Mapping[str, str]
    generators: tuple[Mapping[str, Any], ...] = ()
    """Generators of synthetic images (`Manifest.generators`)."""
    rows: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rows of the corpus, as `Manifest.rows`."""

    @classmethod
    def from_plan(cls, plan: ShardPlan, options: ShardOptions, salt: str, part: str | None) -> "Conversion":
        """Return the identity of a plan, which covers the whole corpus."""
        return cls(
            corpus=plan.corpus,
            salt=salt,
            records=plan.fingerprint(),
            options=options.stored(),
            part=part,
            label_names=plan.label_names,
            excluded=_nonzero(plan.rows.excluded),
            rows=plan.rows.to_json(),
            corpus_warnings=_nonzero(plan.warnings),
            planned=dict(count_by_split(plan.shards)),
            packages=package_versions(),
            generators=plan.generators,
        )

    @classmethod
    def read(cls, private: PrivateFolder) -> "Conversion":
        """Read `plan.json`. Raises ShardError when it is missing or damaged."""
        if not private.plan.is_file():
            raise ShardError(f"{private.plan} does not exist; copy it beside the shards", "not_found")
        try:
            content = _load(private.plan)
            return cls(**{**content, **{name: tuple(content.get(name, ())) for name in ("label_names", "generators")}})
        except (TypeError, KeyError) as error:
            raise ShardError(f"{private.plan} is damaged or of another version; convert again", "malformed") from error

    @contextlib.contextmanager
    def claim(self, out: Path, private: PrivateFolder) -> Iterator[None]:
        """Create the output folders, or resume in them, and lock them within the block.

        Raises ConfigError when they hold another conversion or other files, or another process writes them.
        """
        self._check_folders(out, private)
        private.create()
        with RunLock(private.path, error=ConfigError, field="out"):
            self._check_folders(out, private)  # another process may have finished since
            for split in self.planned:
                sweep(subfolder(out, split))  # partial shards of a killed process
            content = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
            write_atomic(private.plan, content, permissions=0o600)
            yield

    def _check_folders(self, out: Path, private: PrivateFolder) -> None:
        if private.plan.is_file():
            stored = _load(private.plan)
            differing = [name for name in _IDENTITY if stored.get(name) != getattr(self, name)]
            if differing:
                advice = f"give another --out, or remove {out} and {private.path} to start again"
                message = (
                    f"{out} holds another conversion: it differs in {', '.join(_IDENTITY[name] for name in differing)}"
                )
                raise ConfigError(f"{message}; {advice}", "exists", field=", ".join(differing))
        elif out.exists() and any(out.iterdir()):
            message = f"{out} is not empty and {private.plan} does not exist; give another --out"
            raise ConfigError(message, "exists", field="out")

    def shards(self) -> list[tuple[str, str]]:
        """Return (split, name) of each shard of this part, or of the whole corpus, in order."""
        names = [
            (split, shard_name(self.corpus, split, number))
            for split, planned in sorted(self.planned.items())
            for number in range(-(-planned // self.options["samples_per_shard"]))
        ]
        return list(select_part(names, self.part))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that determine the bytes of a shard."""
    # medvl's own from the code: a checkout on PYTHONPATH is not installed.
    return {"medvl": medvl.__version__, **{name: importlib.metadata.version(name) for name in _PACKAGES}}


def _load(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        raise ShardError(f"cannot read {path} ({type(error).__name__}); convert again", "malformed") from error
    return content


def _nonzero(counter: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counter.items()) if count}
