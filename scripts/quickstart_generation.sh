#!/usr/bin/env bash
# Radiographs from impressions on the phantom corpus, on a CPU: an autoencoder, latent diffusion on its latents with the
# frozen text encoder of the ConVIRT of scripts/quickstart.sh, a guidance chosen on validation patients, images of the
# impressions of test patients, and their evaluation. About twelve minutes on two cores.
#
#     bash scripts/quickstart_generation.sh
#
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

step "Guidance: the best on prompts of validation patients"
generate="$bin/medvl generate --checkpoint quickstart/roentgen/last --batch 64 --precision bf16"
judge="$bin/medvl eval generation --train quickstart/shards/train --classifier quickstart/convirt/best"
folders() { for value in "${@:2}"; do printf '%s ' "$1/guidance-$value"; done; }
$generate --data quickstart/shards/validate --limit 256 --guidance 5 3 1 --out quickstart/generated-validate
$judge --generated $(folders quickstart/generated-validate 5 3 1) --test quickstart/shards/validate \
    --out quickstart/guidance
best_first=$($bin/python - <<'END'
from medvl.eval import read_results

rows = [row for row in read_results("quickstart/guidance/results.json").rows if row.subgroup.startswith("guidance ")]
means = [row for row in rows if (row.metric, row.target) == ("auroc", "macro_competition")]
print(*(row.subgroup.removeprefix("guidance ") for row in sorted(means, key=lambda row: -row.value)))
END
)
echo "from the best to the worst: $best_first"

step "Images of impressions of test patients"
$generate --data quickstart/shards/test --limit 256 --guidance $best_first --out quickstart/generated
$bin/medvl generate --checkpoint quickstart/autoencoder/best --data quickstart/shards/test --limit 256 --batch 64 \
    --precision bf16 --reconstruct --out quickstart/reconstructed

step "Evaluation by a classifier on ConVIRT's image encoder"
$judge --generated $(folders quickstart/generated $best_first) --valid quickstart/shards/validate \
    --test quickstart/shards/test --reconstructed quickstart/reconstructed --out quickstart/generation
