#!/usr/bin/env bash
# Radiographs from impressions on the phantom corpus, on a CPU: an autoencoder, latent diffusion on its latents with the
# frozen text encoder of the ConVIRT of scripts/quickstart.sh, images of held-out impressions, and their evaluation.
#
#     bash scripts/quickstart_generation.sh
#
# Guidance 5 was the best of 1, 2, 3 and 5 on validation prompts, in a shorter run.
# Run again, it goes on where it was. The images are synthetic, and no patient's.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -e quickstart/convirt/best ]; then bash scripts/quickstart.sh; fi
source scripts/setup.sh
setup "[generation]"
export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1 MEDVL_SALT_FILE="$PWD/quickstart/salt"
bin=.venv/bin
step() { printf '\n== %s\n' "$1"; }

step "An autoencoder of the frontal views at 64 pixels"
torchrun recipes/autoencoder_cxr.py tiny

step "Latent diffusion"
torchrun recipes/roentgen_mimic.py tiny

step "Images of impressions of held-out patients, at several values of guidance"
prompts="--data quickstart/shards/test --limit 256 --batch 64 --precision bf16"
$bin/medvl generate --checkpoint quickstart/roentgen/last $prompts --guidance 5 3 1 --out quickstart/generated
$bin/medvl generate --checkpoint quickstart/autoencoder/best $prompts --reconstruct --out quickstart/reconstructed

step "Evaluation by a classifier on ConVIRT's image encoder"
$bin/medvl eval generation --generated quickstart/generated/guidance-5 quickstart/generated/guidance-3 \
    quickstart/generated/guidance-1 --train quickstart/shards/train --valid quickstart/shards/validate \
    --test quickstart/shards/test --classifier quickstart/convirt/best --reconstructed quickstart/reconstructed \
    --out quickstart/generation
