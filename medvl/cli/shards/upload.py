"""`medvl upload`: folders of shards into an object store."""

import sys
from pathlib import Path


def upload(folder: Path, address: str) -> str:
    """Upload shards to an object store, and read back and compare every byte.

    The manifests come last, so that an interrupted upload is never taken for a whole one. Run the same command again to
    resume. Private folders are not uploaded.

    Args:
        folder: folder of a split, or folder of splits.
        address: s3://, gs://, az:// or hf:// address of the folder to write.
    """
    from medvl.data.shards.upload import upload_shards

    uploads = upload_shards(folder, address, progress=sys.stderr.isatty())
    return "\n".join(
        f"{one.address}: {one.files} files sent, {one.kept} there already, {one.bytes / 1e6:.1f} MB compared"
        for one in uploads
    )
