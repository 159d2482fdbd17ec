"""Write the demo checkpoint of the package from a run: `medvl.load("demo")`.

    bash scripts/quickstart.sh                    # the data
    torchrun --nproc-per-node 2 recipes/convirt_mimic.py tiny --train.run-dir runs/demo-convirt \\
        --model.text-arguments hidden_size 128 num_hidden_layers 2 num_attention_heads 2 \\
        intermediate_size 512 max_position_embeddings 64
    python scripts/make_demo.py runs/demo-convirt
    medvl eval calibrate --checkpoint medvl/models/demo --data quickstart/shards/validate
    medvl eval zero-shot --checkpoint medvl/models/demo --data quickstart/shards/test \\
        --out demo-test
    python scripts/make_demo.py runs/demo-convirt --results demo-test/results.json

The text encoder is smaller than the quickstart's, so that the weights have under 4 MB in 16 bits.
"""

import dataclasses
import json
from pathlib import Path

import safetensors.torch
import tyro

import medvl
from medvl.common.files import sha256, write_atomic, write_json
from medvl.models.checkpoint import save
from medvl.models.checkpoint_folder import (
    CARD,
    MARKER,
    TRAIN_MANIFEST,
    WEIGHTS,
    find_checkpoint,
    train_manifests,
)

CARD_TEXT = """---
library_name: medvl
license: apache-2.0
pipeline_tag: zero-shot-image-classification
tags: [medvl, medical-imaging, vision-language, convirt, synthetic]
---

# demo

A small ConVIRT, trained on synthetic radiographs and reports alone (`medvl phantom quickstart`), in
16 bits. It shows what the software does. It knows nothing about real radiographs, is not a medical
device and must not be used for clinical decisions.

```python
import medvl

model = medvl.load("demo")
medvl.phantom.write_example("chest.png")
medvl.infer(model, "chest.png", ["pleural effusion"])
```

Made by `scripts/make_demo.py`. {results}
"""
_RESULTS = (
    "Zero-shot AUROC of five findings in {images} synthetic radiographs of other patients: "
    "{value:.3f} [{low:.3f}, {high:.3f}]."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """The demo checkpoint."""

    run: tyro.conf.Positional[Path]
    """Run of ConVIRT on the phantom corpus."""
    results: Path | None = None
    """results.json of its zero-shot evaluation, for the card."""
    out: Path = Path("medvl/models/demo")
    """Folder of the package."""


def main(demo: Demo) -> None:
    """Write the model of a run in 16 bits, with its card, and the hashes of all files."""
    model = medvl.load(demo.run)
    manifest = train_manifests(find_checkpoint(demo.run))[0]
    # The settings of the run hold paths of the machine that trained it.
    kept = {name: model.provenance[name] for name in ("recipe", "data", "optim", "versions")}
    run = {**kept, TRAIN_MANIFEST.removesuffix(".json"): manifest.to_json(), "marker": MARKER}
    demo.out.mkdir(parents=True, exist_ok=True)
    save(model, demo.out, run)
    write_atomic(demo.out / CARD, CARD_TEXT.format(results=_results(demo.results)))
    tensors = safetensors.torch.load_file(demo.out / WEIGHTS)
    halves = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    safetensors.torch.save_file(halves, demo.out / WEIGHTS)
    files = sorted(path for path in demo.out.rglob("*") if path.is_file() and path.name != MARKER)
    entries = {
        str(path.relative_to(demo.out)): {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in files
    }
    write_json(demo.out / MARKER, {"format": 2, "files": entries})
    total = sum(path.stat().st_size for path in files)
    print(f"{demo.out}: {len(files)} files, {total / 1e6:.2f} MB")


def _results(path: Path | None) -> str:
    if path is None:
        return ""
    metrics = json.loads(path.read_text())["metrics"]
    row = next(each for each in metrics if each["name"] == "auroc/macro_competition")
    return _RESULTS.format(images=row["n"], value=row["value"], low=row["low"], high=row["high"])


if __name__ == "__main__":
    main(tyro.cli(Demo, description=__doc__))
