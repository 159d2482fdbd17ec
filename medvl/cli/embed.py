"""`medvl embed`: embeddings of images in a Parquet file."""

from pathlib import Path


def embed(
    *,
    checkpoint: str,
    data: tuple[str, ...],
    out: Path,
    pooled: bool = False,
    patches: bool = False,
    batch: int = 64,
    workers: int = 2,
    frame: int | None = None,
    modality: tuple[str, ...] = (),
    device: str = "auto",
    replace: bool = False,
) -> str:
    """Write the embeddings of images to a Parquet file; the same command again continues it.

    Args:
        checkpoint: a run or a checkpoint, such as runs/convirt, or hf-hub:OWNER/NAME.
        data: folders of shards, or folders with one for each split; or DICOM, JPEG and PNG files,
            and folders with them.
        out: file that ends in .parquet.
        pooled: write the pooled vector of the image encoder, which `medvl eval probe` reads,
            instead of the vector that is compared with texts. Other systems than dual-encoders
            have no other.
        patches: write the vectors of the patches too, as a column of flat lists.
        batch: images per batch; the last bits of a vector depend on it.
        workers: loader processes for shards.
        frame: frame of multi-frame DICOM files, from 0; without it they are skipped.
        modality: modalities of DICOM files to accept, such as CR DX RG; others are skipped.
        device: auto, cpu or cuda.
        replace: replace a file of another checkpoint, of other data or of other options.
    """
    from medvl.inference.embeddings import embed as write

    written = write(
        checkpoint,
        data,
        out,
        pooled=pooled,
        patches=patches,
        batch=batch,
        workers=workers,
        frame=frame,
        modality=modality,
        device=device,
        replace=replace,
    )
    kind = (
        "L2-normalised vectors of encode_image"
        if written.vector == "encode_image"
        else "pooled vectors of the image encoder"
    )
    lines = [f"Wrote {written.path}: {written.rows:,} {kind}, {written.dim} numbers each"]
    if written.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in written.skipped.items())
        lines.append(f"{sum(written.skipped.values())} images skipped: {reasons}")
    return "\n".join(lines)
