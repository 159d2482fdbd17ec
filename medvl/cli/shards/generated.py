"""`medvl shards generated`: convert a folder of `medvl generate` to shards, for training."""

from pathlib import Path

from medvl.cli.shards.corpora import ConversionOptions, Flat, convert
from medvl.schema import ConventionsName


def generated(
    root: Path,
    shared: Flat[ConversionOptions],
    *,
    source: tuple[Path, ...] = (),
    name: str = "generated",
    split: str = "train",
    conventions: ConventionsName = "chexpert",
) -> str:
    """Convert generated images to shards for training, with the generator's hash and training data in the manifest.

    Evaluations refuse such shards as test data, and treat a model that is trained on them as trained on the generator's
    training data too.

    Args:
        root: folder of medvl generate.
        shared: output, resources and storage format.
        source: folders of the shards whose texts are the prompts, for their patients.
        name: name of the corpus.
        split: name of the split.
        conventions: what counts as positive and as uncertain in a prompt.
    """
    from medvl.data.convert.generated import plan

    deid = shared.deidentifier()
    return convert(plan(root, deid, sources=source, name=name, split=split, conventions=conventions), deid, shared)
