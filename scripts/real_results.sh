#!/usr/bin/env bash
# Trains the published encoders of `medvl[weights]` further on the real collections in the folder that MEDVL_REAL_DATA
# names, and evaluates them beside their baselines, as RESULTS.md reports. Parts can be named; without names all of them
# run, in about three hours on two CPU cores. Finished steps are not repeated.
#
#     MEDVL_REAL_DATA=DIR bash scripts/real_results.sh
#     MEDVL_REAL_DATA=DIR SEED=1 bash scripts/real_results.sh odir    # one part with another seed
set -euo pipefail
cd "$(dirname "$0")/.."
all="baselines odir medpix chest"
parts="${*:-$all}"
for part in $parts; do
    case " $all " in *" $part "*) ;; *) echo "error: no part $part: take $all" >&2; exit 2 ;; esac
done
: "${MEDVL_REAL_DATA:?set it to the folder of the real collections (docs/pages/guides/benchmark.md)}"
source scripts/setup.sh
setup "[weights]"
export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1
seed="${SEED:-0}"
data="$PWD/real/data" runs="real/seed-$seed"
say() { printf '%s  %s\n' "$(date +%H:%M)" "$*"; }
wanted() { case " $parts " in *" $1 "*) printf '\n== %s, seed %s\n' "$1" "$seed" ;; *) return 1 ;; esac; }
train() { # RECIPE PRESET RUN OPTIONS: trains whole in fp32; continues an interrupted run, and leaves a finished one
    say "train $runs/$3"
    .venv/bin/medvl train "$1" "$2" --train.run-dir "$runs/$3" --train.seed "$seed" --data.seed "$seed" \
        --data.workers 1 --train.precision fp32 --train.global-batch 48 "${@:4}"
}
evaluate() {
    if [ -e "$2/results.json" ]; then
        say "$2 is finished"
    else
        say "eval $1: $2"
        .venv/bin/medvl eval "$1" --out "$2" "${@:3}"
    fi
}
zero_shot() { # CHECKPOINT OUT SHARDS PROMPTS: with the prompts, and in other words
    evaluate zero-shot "$2" --checkpoint "$1" --data "$3" --prompts "$4.json"
    evaluate zero-shot "$2-other-words" --checkpoint "$1" --data "$3" --prompts "$4-other-words.json"
}
probe() { # OUT SHARDS OPTIONS
    evaluate probe "$1" --train "$2/train" --valid "$2/validate" --test "$2/test" --fractions 1.0 "${@:3}"
}

say "data: real/data"
.venv/bin/python - real <<'PYTHON'
import sys
from pathlib import Path

from medvl.benchmark import read_benchmark
from medvl.benchmark.plan import make_corpus
from medvl.benchmark.plan import located_corpus

for corpus in read_benchmark("real-small").corpora:
    make_corpus(located_corpus(corpus, Path(sys.argv[1]).absolute()))
PYTHON

if wanted baselines; then # pixels, and the frozen network
    for shards in odir/shards medpix/shards chest/nih chest/paediatric; do
        name="${shards//\//-}"
        probe "real/pixels-$name" "$data/$shards" --encoder patches:32 --image-size 32
        probe "real/frozen-$name" "$data/$shards" --encoder efficientnet_lite0 --pretrained
    done
fi
if wanted odir; then
    odir=(--data.train "$data/odir/shards/train" --data.valid "$data/odir/shards/validate"
        --prompts "$data/odir/odir.json" --data.image.flip plain --data.image.rotation 15 --model.max-tokens 32
        --optim.schedule.warmup-steps 50 --train.best-metric zero_shot/auroc_macro --train.best-mode max)
    train continue_pairs paper odir-128 "${odir[@]}" --model.image-size 128 --data.image.size 128 --train.epochs 6
    train continue_pairs paraphrases odir "${odir[@]}" --init-from "$runs/odir-128/best" --pretrained False \
        --data.text.file "$data/odir/odir-paraphrases.json" --model.image-size 192 --data.image.size 192 \
        --optim.lr 2e-4 --train.epochs 3
    for run in odir-128 odir; do
        zero_shot "$runs/$run/best" "$runs/zero-shot-$run" "$data/odir/shards/test" "$data/odir/odir"
    done
fi
if wanted medpix; then
    medpix=(--data.train "$data/medpix/shards/train" --data.valid "$data/medpix/shards/validate"
        --prompts "$data/medpix/medpix.json" --model.image-size 160 --data.image.size 160
        --optim.schedule.warmup-steps 40 --train.best-metric zero_shot/auroc_macro --train.best-mode max)
    train continue_pairs paper medpix-texts "${medpix[@]}" --train.epochs 8
    train continue_pairs paper medpix-labels "${medpix[@]}" --model.positives labels --model.frozen-image-layers 2 \
        --optim.lr 2e-4 --train.epochs 4
    for run in medpix-texts medpix-labels; do
        zero_shot "$runs/$run/best" "$runs/zero-shot-$run" "$data/medpix/shards/test" "$data/medpix/medpix"
        evaluate retrieval "$runs/retrieval-$run" --checkpoint "$runs/$run/best" --data "$data/medpix/shards/test"
    done
fi
if wanted chest; then # trained whole for NIH's findings; with the image encoder as it is for another hospital's children
    chest=(--data.train "$data/chest/shards/train" --data.valid "$data/chest/shards/validate" --model.positives labels
        --optim.schedule.warmup-steps 20)
    chest_results() { # RUN
        for name in nih paediatric; do
            zero_shot "$runs/$1/last" "$runs/$name-$1" "$data/chest/$name/test" "$data/chest/$name"
        done
        evaluate grounding "$runs/grounding-$1" --checkpoint "$runs/$1/last" --data "$data/chest/boxes/test"
    }
    train continue_pairs paper chest "${chest[@]}" --model.image-size 160 --data.image.size 160 --train.epochs 10
    chest_results chest
    train continue_pairs paper chest-frozen "${chest[@]}" --model.image-size 224 --data.image.size 224 \
        --model.frozen-image-layers -1 --optim.lr 1e-3 --train.epochs 8
    chest_results chest-frozen
fi
