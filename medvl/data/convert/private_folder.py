"""OUT-private beside a folder of shards: the plan, notes of finished shards, skipped images and source files.

It names files of the corpus and must not be shared.
"""

import json
import stat
from collections.abc import Iterable
from pathlib import Path

from medvl.common.files import new_file, write_atomic
from medvl.common.folders import private_folder
from medvl.data.convert.note import ShardNote


class PrivateFolder:
    """The private folder of the output folder `out`."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(out.name + "-private")
        self.plan, self.skipped, self.sources = (
            self.path / name for name in ("plan.json", "skipped.jsonl", "sources.tsv")
        )

    def create(self) -> Path:
        """Create the folder, or close an existing one and its files to other users; return its path.

        Raises ConfigError where it is a link or belongs to another user, as `private_folder`.
        """
        private_folder(self.path)
        for file in self.path.iterdir():
            if file.is_file() and not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) & 0o077:
                file.chmod(0o600)
        return self.path

    def note_path(self, shard: str) -> Path:
        """Return the path of a shard's note."""
        return self.path / f"{shard}.json"

    def write_note(self, note: ShardNote) -> None:
        """Record a shard as finished."""
        write_atomic(self.note_path(note.name), note.to_json(), permissions=0o600)

    def read_note(self, folder: Path, shard: str) -> ShardNote | None:
        """Read the note of a shard in `folder`; None if the shard, its index or its note is missing or truncated."""
        tar = folder / f"{shard}.tar"
        try:
            note = ShardNote.from_json(self.note_path(shard).read_bytes())
            complete = tar.stat().st_size == note.size and tar.with_suffix(".index").is_file()
        except (OSError, ValueError, TypeError):
            return None
        return note if complete else None

    def write_skipped(self, notes: Iterable[ShardNote], rows: Iterable[tuple[str, str]] = ()) -> None:
        """List the skipped rows of the corpus, and the skipped images, with reason and message; these name files."""
        lines = [json.dumps({"reason": reason, "message": message}) for reason, message in rows]
        lines += [
            json.dumps({"key": image.key, "split": note.split, "reason": image.reason, "message": image.message})
            for note in notes
            for image in note.skipped
        ]
        write_atomic(self.skipped, "".join(line + "\n" for line in lines), permissions=0o600)

    def write_sources(self, lines: Iterable[str]) -> None:
        """List the source file of each key: sorted lines `key<TAB>path`, written as they are produced."""
        with new_file(self.sources, permissions=0o600) as file:
            file.writelines(line.encode(errors="surrogateescape") for line in lines)
