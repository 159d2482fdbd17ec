"""A causal language model of `transformers` behind an image encoder, on MIMIC-CXR: findings from an
image and indication, as LLaVA-Rad (Vicuna-7B, BiomedCLIP-CXR; Chaves et al., arXiv 2403.08002).

    medvl shards mimic-cxr --root MIMIC-CXR --short-side 512 --out shards/mimic-cxr
    hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/qwen2.5-0.5b-instruct
    torchrun --nproc-per-node 8 recipes/causal_lm_mimic.py projector
    torchrun --nproc-per-node 8 recipes/causal_lm_mimic.py      # then LoRA, from its result
    medvl eval report-generation --checkpoint runs/causal-lm-mimic/best \\
        --data shards/mimic-cxr/test --sections findings
    torchrun --nproc-per-node 8 recipes/causal_lm_mimic.py questions    # answers of VQA-RAD
    torchrun --nproc-per-node 8 recipes/causal_lm_mimic.py grounded     # sentences of PadChest-GR
    torchrun recipes/causal_lm_mimic.py tiny    # phantom Open-i, two cores; prints how to make it
    torchrun recipes/causal_lm_mimic.py choices         # questions with four options, likewise
    medvl eval multiple-choice --checkpoint quickstart/causal-lm-choices/best \\
        --data quickstart/choices/test --train quickstart/choices/train

Any Gemma, Llama, Mistral or Qwen 2 or 3: `--model.language-weights FOLDER --data.tokenizer FOLDER`.

Preset `projector`, LLaVA-Rad's first stage: the projector alone, an image without instruction,
1e-3, batch 256, one epoch. Preset `paper`, its second stage: low-rank updates of rank 64 of all
linear layers but the output, and the projector; the indication and an instruction; 1e-4, cosine,
batch 128, three epochs. Checkpoints need the folder of the language model (`store_language`).

Presets `questions` and `grounded` start from the result of `paper`: a question of VQA-RAD is a
prompt, and its answer the text (`CausalLM.answer`, `score_options`); or the sentences of
PadChest-GR have boxes, as MAIRA-2 writes them (`medvl eval report-generation --grounded`).

Preset `choices`: the phantom's questions with four options, by the text of an option, from the
demo's image encoder. 664 questions: 0.877 [0.848, 0.903]; text only 0.250, images swapped 0.248, in
other words 0.782. Presets `letters-start`, then `letters`: by its letter (`--score letter`), larger
initial weights (`quickstart.letter_recipes`): 0.758 [0.718, 0.793]; text only 0.235, swapped 0.264.
Preset `tiny`: the quickstart's ResNet-10 and a Llama of two layers of width 128, random weights.
Preset `impression` reads no image: it writes impressions behind findings of a table of reports.

    medvl shards table --table reports.jsonl --patient-column patient --split-column split \\
        --text-column findings impression --out shards/reports
    medvl vocab --data shards/reports/train --out shards/reports/words --kind words --min-frequency 2
    # 525 steps, 677 test reports of Open-i: BLEU-4 0.155 [0.131, 0.184]; findings copied 0.041, the
    # commonest 0.089, nearest by TF-IDF 0.210 [0.182, 0.239]; perplexity by word 23.3 [19.1, 28.2]

Published on the findings of MIMIC-CXR's test studies by other code (ReXrank: RadGraph F1,
1/RadCliQ-v1, RaTEScore, GREEN): MedGemma 4B .159 .744 .549 .293, MAIRA-2 (7B) .131 .694 .517 .224.
"""

import dataclasses
from pathlib import Path

from medvl.data import ConVIRTAugmentation, EvalTransform, GroundedText, WholeText
from medvl.models import CausalLMConfig
from medvl.train import (
    Cosine,
    DataConfig,
    OptimConfig,
    Recipe,
    Run,
    TrainConfig,
    launch,
    pretraining_run,
    quickstart,
)

FINDINGS = WholeText(sections=("findings",), missing="no_text")
LANGUAGE = "models/qwen2.5-0.5b-instruct"
LORA = CausalLMConfig(
    image_encoder="rad_dino",
    image_size=518,
    language_weights=LANGUAGE,
    store_language=False,
    prompt=("indication",),
)
paper = Recipe(
    model=LORA,
    pretrained=False,
    init_from=Path("runs/causal-lm-projector/best"),
    data=DataConfig(
        train="shards/mimic-cxr/train",
        valid=Path("shards/mimic-cxr/validate"),
        tokenizer=Path(LANGUAGE),
        text=FINDINGS,
        image=ConVIRTAugmentation.crop(518, area=(0.77, 1.0)),
        valid_batch=16,
    ),
    optim=OptimConfig(
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.0,
        clip_norm=1.0,
        schedule=Cosine(warmup_steps=100),
    ),
    train=TrainConfig(
        run_dir=Path("runs/causal-lm-mimic"),
        epochs=3,
        global_batch=128,
        precision="bf16",
        best_metric="report/f1_macro",
        best_mode="max",
    ),
)
projector = dataclasses.replace(
    paper,
    model=dataclasses.replace(
        LORA, frozen_language=True, lora_language=0, instruction="", prompt=()
    ),
    pretrained=True,
    init_from=None,
    optim=dataclasses.replace(paper.optim, lr=1e-3, schedule=Cosine(warmup_steps=30)),
    train=dataclasses.replace(
        paper.train, run_dir=Path("runs/causal-lm-projector"), epochs=1, global_batch=256
    ),
)
LAST = dataclasses.replace(
    paper.train, epochs=10, global_batch=64, best_metric="loss", best_mode="min"
)
questions = dataclasses.replace(
    paper,
    init_from=Path("runs/causal-lm-mimic/best"),
    data=dataclasses.replace(
        paper.data,
        train="shards/vqa-rad/train",
        valid=Path("shards/vqa-rad/validate"),
        text=WholeText(sections=("answer",)),
        questions=True,
    ),
    train=dataclasses.replace(LAST, run_dir=Path("runs/causal-lm-questions")),
)
grounded = dataclasses.replace(
    paper,
    model=dataclasses.replace(
        LORA, max_tokens=512, instruction="Describe the findings with boxes."
    ),
    init_from=Path("runs/causal-lm-mimic/best"),
    data=dataclasses.replace(
        paper.data,
        train="shards/padchest-gr/train",
        valid=Path("shards/padchest-gr/validate"),
        text=GroundedText(),
        image=EvalTransform(size=518, fit="crop", resize="bicubic"),
    ),
    train=dataclasses.replace(LAST, run_dir=Path("runs/causal-lm-grounded")),
)
tiny = quickstart.report_recipe(
    "causal-lm",
    CausalLMConfig(
        image_encoder="resnet_tiny",
        image_size=112,
        frozen_image=False,
        language=quickstart.LLAMA,
        lora_language=0,
        instruction="",
        prompt=("indication",),
        max_tokens=82,
    ),
    FINDINGS,
)
impression = dataclasses.replace(
    tiny,
    model=dataclasses.replace(
        tiny.model,
        image_encoder="patches:112",
        frozen_image=True,
        views=0,
        language=quickstart.LLAMA.replace("}", ', "attention_dropout": 0.2}'),
        prompt=("findings",),
        max_tokens=64,
    ),
    init_from=None,
    data=dataclasses.replace(
        tiny.data,
        train="shards/reports/train",
        valid=Path("shards/reports/validate"),
        tokenizer=Path("shards/reports/words"),
        text=WholeText(sections=("impression",), missing="no_text"),
    ),
    optim=dataclasses.replace(tiny.optim, weight_decay=0.3),
    train=dataclasses.replace(LAST, run_dir=Path("runs/impressions"), epochs=8, global_batch=32),
)
choices = quickstart.choice_recipe("causal-lm-choices", tiny)
letters_start, letters = quickstart.letter_recipes(tiny)
PRESETS = {"paper": paper, "projector": projector, "questions": questions, "grounded": grounded}
PRESETS |= {"impression": impression, "tiny": tiny, "choices": choices}
PRESETS |= {"letters-start": letters_start, "letters": letters}
MAKE_DATA = """medvl shards mimic-cxr --root MIMIC-CXR --short-side 512 --out shards/mimic-cxr
    medvl train causal_lm projector"""
PHANTOM = f"{quickstart.REPORT_DATA}causal_lm tiny"


def prepare(recipe: Recipe) -> Run:
    """Create the model, the loaders and the evaluator of reports."""
    data = recipe.data
    phantom = f"{quickstart.CHOICE_DATA}causal_lm choices" if data.questions else PHANTOM
    run = pretraining_run("causal_lm_mimic", MAKE_DATA, phantom)(recipe)
    if data.questions or isinstance(data.text, GroundedText) or not recipe.model.views:
        return run
    from medvl.eval import ReportEval

    return run.with_evaluator(lambda images: ReportEval(images))


if __name__ == "__main__":
    launch(prepare, PRESETS, "A causal language model that reads images, on MIMIC-CXR.")
