"""Options of a conversion. The command line imports this module, so it imports nothing heavy."""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from medvl.common.config_io import check_choice, check_within
from medvl.data.storage.location import is_address, locate
from medvl.data.volumes.options import OrganOptions, VolumeOptions
from medvl.errors import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """Storage format of the images. Every option changes the bytes of the shards, so all are
    part of the manifest.
    """

    short_side: int = 512
    """Images are shrunk so that their short side has this many pixels; smaller ones are kept as
    they are.
    """
    image_format: Literal["jpg", "png"] = "jpg"
    """png is lossless, about five times larger and seven times slower to decode."""
    quality: int = 95
    """JPEG quality."""
    color: bool = False
    """Keep three channels. Radiographs, CT and MR are grey."""
    crop_background: bool = False
    """Cut images to their largest bright object before they are shrunk, such as the breast of a
    mammogram; boxes and masks move with it.
    """
    keep_textless: bool = False
    """Keep images without text (for evaluation by labels)."""
    samples_per_shard: int = 1000
    """Records per shard."""
    frame: int | None = None
    """Frame to keep of DICOM files with several, from 0; default: such files are skipped as
    multi_frame.
    """
    follow_links: bool = False
    """Also read files that links outside of the corpus lead to, as in trees of git-annex and
    DataLad. Only for trees that you trust: a link can bring any file that you can read into the
    shards.
    """

    def __post_init__(self) -> None:
        check_within(self, "[16, 8192]", "short_side")
        check_choice(self.image_format, ("jpg", "png"), "image_format")
        check_within(self, "[1, 100]", "quality")
        check_within(self, "[1, 100_000]", "samples_per_shard")
        check_within(self, "[0, inf)", "frame")

    def stored(self) -> dict[str, Any]:
        """Return the options as the manifest stores them: `frame`, `follow_links` and
        `crop_background` only where they are used.
        """
        unused = {"frame": None, "follow_links": False, "crop_background": False}
        values = dataclasses.asdict(self)
        return {
            name: value
            for name, value in values.items()
            if name not in unused or value != unused[name]
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeShardOptions(ShardOptions):
    """Storage format of volumes, in place of that of images."""

    volume: VolumeOptions = dataclasses.field(default_factory=VolumeOptions)
    """Spacing and size."""
    organs: OrganOptions = dataclasses.field(default_factory=OrganOptions)
    """Masks and texts by organ."""
    modality: str = "CT"
    """Modality of the volumes."""

    def stored(self) -> dict[str, Any]:
        """Return the options as the manifest stores them, without those of images."""
        values = {
            "volume": self.volume.stored(),
            "keep_textless": self.keep_textless,
            "samples_per_shard": self.samples_per_shard,
        }
        values |= {"follow_links": True} if self.follow_links else {}
        values |= {"modality": self.modality} if self.modality != "CT" else {}
        values |= self.organs.stored()
        stored: dict[str, Any] = json.loads(json.dumps(values))  # lists, as a manifest has them
        return stored


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardRun:
    """Output folder and resources of a conversion. Except for the salt, nothing here changes the
    bytes of a shard.
    """

    out: Path
    """Output folder, one subfolder per split, or the address of a remote one (s3://, gs://, az://,
    hf://). Run the same command again to resume after an interruption.
    """
    staging: Path | None = None
    """Local folder where shards for a remote --out are made before they are uploaded, with the
    private folder.
    """
    max_skipped: float = 0.01
    """Budget of unreadable images, and of unusable rows of the corpus: below 1 a fraction of
    all, else a number.
    """
    workers: int | None = None
    """Number of processes; default one per core (of the cluster, for Ray)."""
    engine: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: a Ray cluster, or Ray on this machine (needs
    medvl[ray]).
    """
    address: str | None = None
    """Address of a Ray cluster whose nodes all have the corpus and --out under the same paths;
    default $RAY_ADDRESS, or the cores of this machine.
    """
    salt_file: Path | None = None
    """Salt file for hashing ids; default $MEDVL_SALT_FILE, or ~/.config/medvl/salt, which is
    created on first use.
    """
    new_salt: bool = False
    """Create the salt file if it does not exist."""
    part: str | None = None
    """Convert only this part of the corpus, as `i/n` with i from 1 to n: for cluster array jobs,
    each with an --out of its own and the same salt. `medvl merge` combines the parts. The budget
    applies to the part.
    """

    def __post_init__(self) -> None:
        check_within(self, "[0, inf]", "max_skipped")
        check_within(self, "[1, inf)", "workers")
        check_choice(self.engine, ("local", "ray"), "engine")
        if self.engine == "ray" and importlib.util.find_spec("ray") is None:
            raise ConfigError("engine ray needs Ray; install medvl[ray]", "missing", field="engine")
        if self.address is not None and self.engine != "ray":
            raise ConfigError(
                f"address is for engine ray, got engine {self.engine}", "conflict", field="address"
            )
        if self.part is not None:
            parse_part(self.part)
        self._check_remote()

    def _check_remote(self) -> None:
        is_remote = is_address(self.out)
        if is_remote and self.staging is None:
            message = (
                f"{locate(self.out)} is remote: name a local folder with --staging, where "
                f"its shards are made"
            )
            raise ConfigError(message, "missing", field="staging")
        if is_remote and self.part is not None:
            message = (
                "parts are converted into local folders: give a local --out, and upload "
                "after medvl merge"
            )
            raise ConfigError(message, "conflict", field="part")
        if not is_remote and self.staging is not None:
            raise ConfigError(
                "staging is for a remote --out; leave it out", "conflict", field="staging"
            )

    @property
    def local_out(self) -> Path:
        """Local output folder: `out`, or one of the same name in `staging`."""
        return self.out if self.staging is None else self.staging / locate(self.out).name


def parse_part(part: str) -> tuple[int, int]:
    """Return (i, n) of "i/n". Raises ConfigError unless 1 <= i <= n."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(
            f"expected part as i/n with i from 1 to n, got {part!r}", "malformed", field="part"
        )
    return int(match[1]), int(match[2])


def select_part(items: Sequence[T], part: str | None) -> Sequence[T]:
    """Return every n-th item starting with the i-th for part `i/n`, so parts get equal shares;
    all items for None.
    """
    if part is None:
        return items
    number, parts = parse_part(part)
    return items[number - 1 :: parts]
