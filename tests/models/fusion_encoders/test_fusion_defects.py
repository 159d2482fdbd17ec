"""Defects that were measured in public code of fusion-encoders and of their neighbours, and do not
exist here.

Most are tested beside the part that they concern:

* ARL: graph attention run for every use and sample, entities without their own rows
  (`test_arl.py`).
* PTUnifier: a contrastive term that is never computed, prompts without gradient
  (`test_ptunifier.py`, `test_fusion_models.py`), a metric of NaN that selects
  (`test_train_validate.py`), empty reports scored as a fixed sentence
  (`test_report_generation.py`), label subsets by position (`test_linear_probe.py`).
* MedViLL: the true words fed while writing (`test_report_writing.py`), rows that read padding
  (`test_fusion_masks.py`), pairs without a negative (`test_losses_itm.py`,
  `test_fusion_medvill.py`).
* Li et al.: boxes changed in place (`test_image_input.py`).
* LViT: ten words, one image size, flips against the text (`test_lvit.py`), pixels of an empty mask
  (`test_mask_metrics.py`).
* M2I2, MUMC, ALBEF: answers of the test set, free-form questions alone, decimal points
  (`tests/eval/vqa`), rows without a negative (`test_losses_itm.py`).
* R2Gen: cut references, decimal points, decoding without a cache (`test_r2gen.py`,
  `test_report_generation.py`).
* METER: whole-word masking that does nothing for byte-level words (`test_masking.py`).
"""

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval_fakes import make_source
from helpers.fusion_samples import SIDE, TEXTS, make_batch, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from medvl.data import EvalTransform, WholeText
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import ItemMaker
from medvl.encoders.presets import TEXT_PRESETS
from medvl.eval.classification.scored_images import ScoredImages
from medvl.eval.dense.metrics import THRESHOLDS, mask_areas
from medvl.losses import lvit
from medvl.losses.pairs.image_text import hard_pairs
from medvl.models.fusion_encoders.berthop import BERTHopConfig
from medvl.schema import Sample
from medvl.train import OptimConfig
from medvl.train.loop.step import Step
from medvl.train.optim.optimizer import Precision, build_optimizer
from medvl.train.parallel.distributed import RankInfo
from medvl.train.parallel.model import DDPModel
from medvl.train.recipe_files import choose

RECIPES = Path(__file__).parents[3] / "recipes"
TOKENIZER = tiny_tokenizer()


def presets(name: str) -> dict[str, Any]:
    """Return the presets of a recipe."""
    found: dict[str, Any] = runpy.run_path(str(RECIPES / f"{name}.py"))["PRESETS"]
    return found


def test_scores_of_entities_keep_no_copy_of_them_for_each_sample() -> None:
    """ARL's code repeats the matrix of all entities for every sample."""
    model: Any = tiny_model("arl", TOKENIZER)
    sizes: list[int] = []

    def kept(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    states_BD = torch.randn(2, 64, 24, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        image_BV, _ = model.align_head(*states_BD)
    entities, width = model.align_head.graph.vectors.shape
    assert image_BV.shape == (64, entities)
    assert max(sizes) < 64 * entities * width


def first_layer(encoder: nn.Module, ending: str) -> str:
    return next(name for name, _ in encoder.named_modules() if name.endswith(ending))


@pytest.mark.parametrize("name", ["m3ae", "arl"])
def test_a_step_encodes_an_image_and_a_text_twice_and_not_once_for_each_loss(name: str) -> None:
    """M3AE's code makes a complete pass for each of three losses, ARL's one for each of four."""
    model, batch = tiny_model(name, TOKENIZER), make_batch(TOKENIZER)
    rows: Counter[str] = Counter()

    def count(part: str, module: nn.Module) -> None:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows[part] += len(inputs[0])

        module.register_forward_pre_hook(add)

    count("image", model.image_encoder.get_submodule(first_layer(model.image_encoder, "blocks.0")))
    count("text", model.text_encoder.get_submodule(first_layer(model.text_encoder, "layer.0")))
    model(batch)
    assert 0 < rows["image"] <= 2 * len(batch)
    assert 0 < rows["text"] <= 2 * len(batch)


def test_a_report_of_a_corpus_reaches_the_model_word_by_word() -> None:
    """MedViLL's reader of its own CSV gives every report as the three unknown tokens of a
    tokenizer's output.
    """
    sample = Sample(
        key="0", corpus="c", split="train", patient="p", study="s", sections={"findings": TEXTS[2]}
    )
    model = tiny_model("medvill", TOKENIZER)
    maker = ItemMaker(
        EvalTransform(size=SIDE), WholeText(sections=("findings",)), (), 0, model.inputs
    )
    batch, _ = Collate(TOKENIZER, model.inputs)(
        [maker(sample, np.zeros((SIDE, SIDE), np.uint8), 0)]
    )
    assert batch is not None
    assert TOKENIZER.unk_id not in batch.ids_BT[batch.mask_BT]
    assert (
        TOKENIZER.decode(batch.ids_BT[0][batch.mask_BT[0]]).replace(" .", ".") == TEXTS[2].lower()
    )


def test_switches_can_be_turned_off() -> None:
    """MedViLL's `type=bool` reads the text "False" as true."""
    recipes = presets("uniter_mimic")
    assert recipes["paper"].pretrained
    assert recipes["paper"].train.channels_last
    changed: Any = choose(recipes, ["--pretrained", "False", "--train.channels-last", "False"])
    assert not changed.pretrained
    assert not changed.train.channels_last


def test_berthop_reads_words_as_bluebert() -> None:
    """Its notebook loads Bio_ClinicalBERT, whose cased vocabulary has 28,996 words."""
    preset = TEXT_PRESETS[BERTHopConfig().text_encoder]
    assert preset.weights is not None
    assert preset.weights.hub_id == "bionlp/bluebert_pubmed_mimic_uncased_L-12_H-768_A-12"
    assert preset.arguments["vocab_size"] == 30_522


def test_means_count_normal_images_as_a_finding_too() -> None:
    """The comparison of Li et al. leaves "Normal" out of its mean."""
    labels_NL = np.array([[0.0, 1.0], [1.0, 0.0]])
    source = make_source(labels_NL, ("No Finding", "Edema"))
    images = ScoredImages(names=("No Finding", "Edema"), scores_NL=labels_NL, labels_NL=labels_NL,
                          samples=tuple(source.samples), positions=(0, 1), counts={})  # fmt: skip
    assert images.means["macro"] == ["No Finding", "Edema"]


def test_dice_changes_no_prediction() -> None:
    """LViT's monitoring sets the predictions to 0 and 1 in place, before the loss is taken back
    through them.
    """
    prob_B1HW, mask_B1HW = torch.rand(2, 1, 8, 8), (torch.rand(2, 1, 8, 8) < 0.5).float()
    before = prob_B1HW.clone()
    lvit(prob_B1HW, mask_B1HW)
    map_HW = prob_B1HW[0, 0].numpy()
    mask_areas(map_HW, mask_B1HW[0, 0].numpy() > 0, THRESHOLDS)
    assert torch.equal(prob_B1HW, before)


def test_losses_that_a_step_returns_keep_no_graph() -> None:
    """LViT's epoch loss adds up tensors with their graphs, one for every step."""
    model = tiny_model("visualbert", TOKENIZER)
    world = RankInfo(rank=0, size=1, local_size=1, device=torch.device("cpu"))
    optimizer = build_optimizer(model, OptimConfig(lr=1e-4))
    step = Step(DDPModel(model, world), optimizer, Precision("fp32", world.device), seed=0,
        clip_norm=1.0,
                channels_last=False)  # fmt: skip
    (losses,) = step(1, 1e-4, [make_batch(TOKENIZER)], 1).losses
    assert losses.terms
    assert not any(value.requires_grad for value in (losses.total, *losses.terms.values()))


class Reads(TorchDispatchMode):
    """Counts how often a number is read out of a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("floor", [0.0, 1e-4])
def test_hard_negatives_are_drawn_without_reading_a_number(floor: float) -> None:
    """ALBEF's family draws them sample by sample, with an `.item()` each, which waits for the
    device.
    """
    similarity_BB, same_BB = torch.randn(16, 16), torch.eye(16, dtype=torch.bool)
    with Reads() as reads:
        pairs = hard_pairs(similarity_BB, same_BB, torch.Generator().manual_seed(0), floor)
    assert len(pairs) == 48
    assert reads.count == 0


@pytest.mark.parametrize(
    "name", ["m2i2_clef", "mumc_figures", "r2gen_iu", "albef_roco_medicat", "ptunifier_figures"]
)
def test_no_preset_flips_images_of_texts_trains_on_a_test_split_or_selects_by_one(
    name: str,
) -> None:
    """M2I2, MUMC and R2Gen flip images whose texts name sides; MUMC trains on ROCO's test split;
    M2I2 and R2Gen keep the epoch that is best on the test set.
    """
    for preset in presets(name).values():
        data = preset.data
        assert data.image.flip == "off"
        folders = [Path(folder) for folder in (data.train, *data.extra_train)]
        assert not any("test" in folder.name for folder in folders)
        assert data.valid is not None
        assert "test" not in Path(data.valid).name
        assert Path(data.valid) not in folders
