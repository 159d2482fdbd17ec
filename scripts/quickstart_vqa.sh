#!/usr/bin/env bash
# Pretraining, then answering questions about the phantom's images, on a CPU:
#
#     bash scripts/quickstart_vqa.sh            # M3AE on case reports (ROCO and MedICaT), then VQA
#     bash scripts/quickstart_vqa.sh medvill    # MedViLL on chest radiographs, from the ConVIRT of scripts/quickstart.sh
#     bash scripts/quickstart_vqa.sh convirt    # that ConVIRT's towers under a fresh fusion-encoder
#
# Run again, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
start="${1:-m3ae}"
case "$start" in m3ae | medvill | convirt) ;; *) echo "error: $start: take m3ae, medvill or convirt" >&2; exit 2 ;; esac
if [ "$start" != m3ae ] && [ ! -e quickstart/convirt/best ]; then bash scripts/quickstart.sh; fi
source scripts/setup.sh
setup ""
export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1 MEDVL_SALT_FILE="$PWD/quickstart/salt"
mkdir -p quickstart
[ -e quickstart/salt ] || (umask 077 && printf '%064d\n' 0 > quickstart/salt)  # as in scripts/quickstart.sh
bin=.venv/bin
step() { printf '\n== %s\n' "$1"; }

if [ "$start" = m3ae ]; then
    step "Case reports: figures with captions and what the articles say about them"
    $bin/medvl phantom roco --out quickstart/roco --patients 1500 --size 160
    $bin/medvl phantom medicat --out quickstart/medicat --patients 1500 --size 160
    $bin/medvl shards roco --root quickstart/roco --references quickstart/roco/roco_references \
        --out quickstart/roco-shards --short-side 160
    $bin/medvl shards medicat --root quickstart/medicat --radiology-only --out quickstart/medicat-shards --short-side 160
    $bin/medvl vocab --data quickstart/roco-shards/train --out quickstart/figure-vocab --size 2000

    step "ConVIRT on the captions: it stands for the CLIP that M3AE starts from"
    torchrun recipes/convirt_mimic.py tiny --train.epochs 5 --prompts None \
        --data.train quickstart/roco-shards/train --data.extra-train quickstart/medicat-shards/train \
        --data.valid quickstart/roco-shards/validation --data.tokenizer quickstart/figure-vocab \
        --data.text.sections caption --train.best-metric loss --train.best-mode min \
        --train.run-dir quickstart/figures-convirt

    step "M3AE: masked words, masked patches, image-text matching"
    torchrun recipes/m3ae_roco_medicat.py tiny
elif [ "$start" = medvill ]; then
    step "MedViLL: masked words and image-text matching"
    torchrun recipes/medvill_mimic.py tiny
fi

step "Questions about radiographs, CT and MR slices; other patients to validate on"
$bin/medvl phantom vqa-rad --out quickstart/vqa-rad --patients 3000 --size 256 --seed 20
$bin/medvl phantom vqa-rad --out quickstart/vqa-rad-valid --patients 400 --size 256 --seed 21
$bin/medvl shards vqa-rad --root quickstart/vqa-rad --out quickstart/vqa --short-side 160
$bin/medvl shards vqa-rad --root quickstart/vqa-rad-valid --out quickstart/vqa-valid --short-side 160

step "Fine-tuning"
# Half of the preset's epochs after the two trainings above: all of it then takes a quarter of an hour.
epochs=$([ "$start" = m3ae ] && echo 3 || echo 6)
torchrun recipes/vqa_finetune.py tiny --init-from "quickstart/$start/best" --train.run-dir "quickstart/vqa-$start" \
    --train.epochs "$epochs"

step "Answers about held-out patients"
$bin/medvl eval vqa --checkpoint "quickstart/vqa-$start/best" --data quickstart/vqa/test --train quickstart/vqa/train \
    --out "quickstart/vqa-$start-answers"
