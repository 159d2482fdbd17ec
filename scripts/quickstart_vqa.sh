#!/usr/bin/env bash
# After scripts/quickstart.sh: its ConVIRT learns to answer questions, on the phantom's VQA-RAD, in some five minutes more.
# Run again, it goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -e quickstart/convirt/best ] || bash scripts/quickstart.sh
source scripts/setup.sh
setup ""
export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1 MEDVL_SALT_FILE="$PWD/quickstart/salt"
bin=.venv/bin
step() { printf '\n== %s\n' "$1"; }

step "Questions about radiographs, CT and MR slices; other patients to validate on"
$bin/medvl phantom vqa-rad --out quickstart/vqa-rad --patients 1500 --size 256 --seed 20
$bin/medvl phantom vqa-rad --out quickstart/vqa-rad-valid --patients 400 --size 256 --seed 21

step "Shards"
$bin/medvl shards vqa-rad --root quickstart/vqa-rad --out quickstart/vqa --short-side 160
$bin/medvl shards vqa-rad --root quickstart/vqa-rad-valid --out quickstart/vqa-valid --short-side 160

step "Fine-tuning: ConVIRT's towers under a fresh fusion-encoder"
$bin/torchrun --standalone --nproc-per-node 1 recipes/vqa_finetune.py tiny

step "Answers about held-out patients"
$bin/medvl eval vqa --checkpoint quickstart/vqa-run/best --data quickstart/vqa/test --train quickstart/vqa/train \
    --out quickstart/vqa-answers
