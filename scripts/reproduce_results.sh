#!/usr/bin/env bash
# Trains and evaluates what RESULTS.md reports on the phantom, then prints the tables.
# Parts can be named; without names all of them run, in about six hours on two CPU cores. Finished steps are not repeated.
#
#     bash scripts/reproduce_results.sh                      # all parts
#     bash scripts/reproduce_results.sh zero-shot grounding  # these only
set -euo pipefail
cd "$(dirname "$0")/.."
all="zero-shot probe grounding chexzero dense vqa vqa-medvill choices reports pretraining generation \
    generation-variants volumes benchmark benchmark-options"
parts="${*:-$all}"
for part in $parts; do
    case " $all " in *" $part "*) ;; *) echo "error: no part $part: take $all" >&2; exit 2 ;; esac
done
source scripts/setup.sh
setup ""
export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1 MEDVL_SALT_FILE="$PWD/quickstart/salt"
mkdir -p quickstart
[ -e quickstart/salt ] || (umask 077 && printf '%064d\n' 0 > quickstart/salt)  # as in scripts/quickstart.sh
bin=.venv/bin
torchrun() { $bin/torchrun --standalone --nproc-per-node 1 "$@"; }
evaluate() { [ -e "$2/results.json" ] || $bin/medvl eval "$1" --out "$2" "${@:3}"; }
wanted() { case " $parts " in *" $1 "*) printf '\n== %s\n' "$1" ;; *) return 1 ;; esac; }
shards=quickstart/shards

if wanted zero-shot; then bash scripts/quickstart.sh; fi
if wanted probe; then
    evaluate probe quickstart/probe --checkpoint quickstart/convirt/best --train $shards/train --valid $shards/validate \
        --test $shards/test
fi
if wanted grounding; then
    torchrun recipes/gloria_chexpert.py tiny
    $bin/medvl phantom ms-cxr --out quickstart/ms-cxr --patients 600 --size 256 --seed 32
    $bin/medvl shards ms-cxr --root quickstart/ms-cxr --out quickstart/ms-cxr-shards --short-side 160
    for system in convirt gloria; do
        evaluate grounding "quickstart/grounding-$system" --checkpoint "quickstart/$system/best" \
            --data quickstart/ms-cxr-shards/test --maps similarity --smoothing 0.7
    done
    evaluate zero-shot quickstart/zero-shot-gloria --checkpoint quickstart/gloria/best --data $shards/test \
        --valid $shards/validate
fi
if wanted chexzero; then
    torchrun recipes/chexzero_mimic.py tiny
    evaluate zero-shot quickstart/zero-shot-chexzero --checkpoint quickstart/chexzero/best --data $shards/test \
        --valid $shards/validate
fi
if wanted dense; then
    for corpus in rsna siim; do
        $bin/medvl phantom $corpus --out "quickstart/$corpus-files" --patients 500 --size 320
        $bin/medvl shards $corpus --root "quickstart/$corpus-files" --out "quickstart/$corpus" --short-side 224
    done
    torchrun recipes/dense_transfer.py tiny
    torchrun recipes/dense_transfer.py tiny-segmentation
    evaluate detection quickstart/detection-results --checkpoint quickstart/detection/best --data quickstart/rsna/test \
        --valid quickstart/rsna/validate
    evaluate segmentation quickstart/segmentation-results --checkpoint quickstart/segmentation/best \
        --data quickstart/siim/test --valid quickstart/siim/validate
fi
if wanted vqa; then bash scripts/quickstart_vqa.sh; fi
if wanted vqa-medvill; then bash scripts/quickstart_vqa.sh medvill; fi
if wanted choices; then
    $bin/medvl phantom rexvqa --out quickstart/rexvqa --patients 3000 --size 160
    $bin/medvl shards rexvqa --root quickstart/rexvqa --out quickstart/choices --short-side 160
    $bin/medvl vocab --data quickstart/choices/train --out quickstart/choice-words --kind words
    torchrun recipes/causal_lm_mimic.py choices
    torchrun recipes/choices_finetune.py tiny
    evaluate multiple-choice quickstart/choice-results --checkpoint quickstart/causal-lm-choices/best \
        --data quickstart/choices/test --train quickstart/choices/train
    evaluate multiple-choice quickstart/choice-results-fusion --checkpoint quickstart/choices-run/best \
        --data quickstart/choices/test --train quickstart/choices/train
fi
if wanted reports; then
    bash scripts/quickstart.sh
    torchrun recipes/medvill_mimic.py tiny  # finished after part vqa-medvill
    torchrun recipes/medvill_mimic.py tiny-report
    evaluate report-generation quickstart/reports --checkpoint quickstart/medvill-report/best --data $shards/test \
        --sections impression --beams 4 --samples 16 --phantom-truth quickstart/mimic-cxr
fi
if wanted pretraining; then
    $bin/python scripts/pretraining_helps.py --start quickstart/m3ae/best --train quickstart/vqa/train \
        --valid quickstart/vqa-valid/test --test quickstart/vqa/test --out quickstart/m3ae-helps -- --train.epochs 2
fi
if wanted generation; then bash scripts/quickstart_generation.sh; fi
if wanted generation-variants; then
    bash scripts/quickstart_generation.sh
    draw() {
        $bin/medvl generate --checkpoint "quickstart/$1/last" --batch 64 --precision bf16 --out "quickstart/$2" "${@:3}"
    }
    judge() {
        evaluate generation "quickstart/$1" --valid $shards/validate --test $shards/test \
            --classifier quickstart/convirt/best --cache quickstart/features "${@:2}"
    }
    torchrun recipes/roentgen_mimic.py tiny --text-from None --data.tokenizer quickstart/vocab \
        --train.run-dir quickstart/roentgen-random
    torchrun recipes/roentgen_mimic.py tiny --model.train-text True --train.run-dir quickstart/roentgen-text
    for text in random text; do
        draw roentgen-$text generated-$text --data $shards/test --limit 256 --guidance 5 3
        judge generation-$text --train $shards/train --generated quickstart/generated-$text/guidance-{5,3}
    done
    draw roentgen generated-train --data $shards/train --limit 1024 --guidance 3
    judge generation-use --train $shards/train --generated quickstart/generated/guidance-5 \
        --synthetic-train quickstart/generated-train
    $bin/medvl phantom mimic-cxr --out quickstart/few-files --patients 27 --size 256 --frontal-only --seed 77
    $bin/medvl shards mimic-cxr --root quickstart/few-files --out quickstart/few --views PA AP --short-side 160
    torchrun recipes/roentgen_mimic.py tiny --data.train quickstart/few/train --train.run-dir quickstart/roentgen-few \
        --train.epochs None --train.steps 1200 --train.validate-every 400
    draw roentgen-few generated-few --data quickstart/few/train --limit 64 --guidance 1 3
    judge generation-few --train quickstart/few/train $shards/train --generated quickstart/generated-few/guidance-{1,3}
fi
if wanted volumes; then
    scans=quickstart/ct-rate-shards
    $bin/medvl phantom ct-rate --out quickstart/ct-rate --patients 1600 --shape 16 32 32 --reconstructions 1
    $bin/medvl shards ct-rate --root quickstart/ct-rate --out $scans
    $bin/medvl vocab --data $scans/train --out quickstart/ct-rate-vocab --kind words
    for system in hlip ct_clip colipri; do
        torchrun recipes/${system}_ct_rate.py tiny --data.train $scans/train --data.valid $scans/validate \
            --data.tokenizer quickstart/ct-rate-vocab --train.run-dir quickstart/$system-ct-rate
        evaluate zero-shot quickstart/zero-shot-$system --checkpoint quickstart/$system-ct-rate/best --data $scans/test \
            --prompts phantom_ct
    done
fi
if wanted benchmark; then # prints what failed
    $bin/medvl benchmark phantom-quick --out quickstart/benchmark --jobs 2 || true
fi
if wanted benchmark-options; then $bin/medvl benchmark phantom-options --out quickstart/benchmark-options || true; fi
$bin/python scripts/results.py
