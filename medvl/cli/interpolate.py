"""`medvl interpolate`: a checkpoint between two others."""

from pathlib import Path

import tyro


def interpolate(
    start: tyro.conf.Positional[Path | None] = None,
    end: tyro.conf.Positional[Path | None] = None,
    *,
    out: Path | None = None,
    share: float = 0.5,
) -> str:
    """Interpolate the weights of a model before and after fine-tuning, so that it forgets less (WiSE-FT).

    Args:
        start: folder of the checkpoint that training started from.
        end: folder of the checkpoint after it, of the same system.
        out: new folder for the checkpoint between them.
        share: fraction of the way from start to end; choose it on validation data.
    """
    from medvl.errors import ConfigError
    from medvl.models.checkpoint import save
    from medvl.models.interpolation import interpolate as between

    if start is None or end is None or out is None:
        raise ConfigError("expected medvl interpolate START END --out FOLDER", "missing", field="out")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists already: choose a new folder", "exists", field="out")
    model = between(start, end, share)
    out.mkdir(parents=True, exist_ok=True)
    save(model, out, {"interpolated": {"start": str(start), "end": str(end), "share": share}})
    return f"Wrote {out}: {model.name}, {share:g} of the way from {start} to {end}"
