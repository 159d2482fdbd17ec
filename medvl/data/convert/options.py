"""Settings of a conversion. Nothing heavy is imported here: the command line reads them."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from medvl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """How images are stored. Everything here decides the bytes, so it is part of the manifest."""

    short_side: int = 512
    """Images are scaled down once, so that their short side has this many pixels; smaller ones stay as they are."""
    image_format: Literal["jpg", "png"] = "jpg"
    """png is lossless, about five times larger and seven times slower to decode."""
    quality: int = 95
    """Of JPEG."""
    color: bool = False
    """Keep three channels. Radiographs, CT and MR are grey."""
    keep_textless: bool = False
    """Keep images without any text (for evaluation by labels)."""
    samples_per_shard: int = 1000

    def __post_init__(self) -> None:
        if not 16 <= self.short_side <= 8192:
            raise ConfigError(f"short_side must be between 16 and 8192 pixels, got {self.short_side}")
        if self.image_format not in ("jpg", "png"):
            raise ConfigError(f"image_format must be jpg or png, got {self.image_format!r}")
        if not 1 <= self.quality <= 100 or not 1 <= self.samples_per_shard <= 100_000:
            raise ConfigError("quality must be within 1..100 and samples_per_shard within 1..100000")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardRun:
    """Where shards go and how the work is done. Nothing here changes a byte of them, but for the salt."""

    out: Path
    """Gets one folder a split. Run the same command again after an interruption: it goes on."""
    max_skipped: float = 0.01
    """Budget of unreadable images: below 1 a share of all, else a number."""
    workers: int | None = None
    """Processes; default one a core."""
    salt_file: Path | None = None
    """What ids are hashed with; default $MEDVL_SALT_FILE or ~/.config/medvl/salt, made on first use."""
    part: str | None = None
    """Convert only this part of the corpus, as `i/n` with i from 1 to n: for the array jobs of a cluster, each with an
    --out of its own and the same salt. `medvl merge` puts the parts together. The budget is then that of the part."""

    def __post_init__(self) -> None:
        if self.max_skipped < 0:
            raise ConfigError(f"max_skipped must not be negative, got {self.max_skipped:g}")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers must be 1 or more, got {self.workers}")
        if self.part is not None:
            parse_part(self.part)


def parse_part(part: str) -> tuple[int, int]:
    """(i, n) of "i/n". Raises ConfigError unless 1 <= i <= n."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"part must be i/n with i from 1 to n, such as 3/16, got {part!r}")
    return int(match[1]), int(match[2])
