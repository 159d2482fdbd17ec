"""`medvl phantom quickstart`: the synthetic data of the recipes' presets `tiny`."""

from pathlib import Path

from medvl.cli import phantom
from medvl.cli.shards import corpora, vocab
from medvl.common.files import write_atomic
from medvl.data.convert.options import ShardOptions, ShardRun

_DEFAULTS = phantom.ViewsOptions(patients=2800, size=256, frontal_only=True)


def quickstart(out: Path = Path("quickstart"), options: phantom.ViewsOptions = _DEFAULTS) -> str:
    """Write the phantom MIMIC-CXR of the presets tiny as DICOM, its shards and a vocabulary: about two minutes.

    Steps that are done are not repeated.

    Args:
        out: output folder; the presets read quickstart/ in the working directory.
        options: size and seed of the corpus; fewer patients for a trial of the software.
    """
    out.mkdir(parents=True, exist_ok=True)
    salt = out / "salt"
    if not salt.exists():  # phantom data are not confidential; a fixed salt gives the same order everywhere
        write_atomic(salt, f"{0:064d}\n", permissions=0o600)
    corpus, of_shards = out / "mimic-cxr", out / "shards"
    write = phantom.COMMANDS["mimic-cxr"]
    write(corpus, options)
    run = ShardRun(out=of_shards, salt_file=salt, workers=options.workers)
    shared = corpora.ConversionOptions(run=run, options=ShardOptions(short_side=160))
    made = [
        corpora.mimic_cxr(corpus, shared, views=("PA", "AP")),
        vocab.vocab(of_shards / "train", out / "vocab", size=4000),
    ]
    return "\n".join([*made, "Next: medvl train convirt tiny"])
