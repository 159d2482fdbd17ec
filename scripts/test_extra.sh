#!/usr/bin/env bash
# Installs medvl with one extra into an environment of its own and runs the tests of the extra there; fails where none
# runs. bash scripts/test_extra.sh [EXTRA ...]; without a name, all of them: a few minutes each.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

# Extra -> its tests, and the packages that these need besides.
tests_of() {
    case "$1" in
        wandb) echo "tests/train/loop/test_wandb.py" ;;
        remote) echo "tests/data/storage/test_cloud_stores.py" ;;
        serve) echo "tests/serve/test_serve_limits.py" "httpx2>=2.16" ;;
        generation) echo "tests/models/image_generation/test_latent_diffusion.py" ;;
        metrics) echo "tests/eval/test_metric_classes.py" ;;
        onnx) echo "tests/export/test_export.py" ;;
        ray) echo "tests/data/convert/test_ray_engine.py" ;;
        gpl-codecs) echo "tests/data/dicom/test_dicom_files.py" ;;
        volumes) echo "tests/data/volumes/test_nifti.py" ;;
        weights) echo "tests/encoders/test_wheel_weights.py" ;;
        reports) echo "tests/data/reports/test_radeval.py" ;;
        bench) echo "tests/test_scripts.py" ;;
        *) echo "medvl has no extra $1 with tests" >&2; return 1 ;;
    esac
}

export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
python="$(find_python)"
index=()
if ! has_gpu; then
    index=(--constraint constraints-cpu.txt)
    if cpu_index_answers "$python"; then index+=(--extra-index-url "$PYTORCH_CPU_INDEX"); fi
fi
[ $# -gt 0 ] || set -- wandb remote serve generation metrics onnx ray gpl-codecs volumes weights bench
for extra in "$@"; do
    read -r -a wanted <<< "$(tests_of "$extra")"
    home="$(mktemp -d)"
    "$python" -m venv "$home"
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "${index[@]}" \
        ".[$extra]" pytest hypothesis "${wanted[@]:1}"
    "$home/bin/python" -m pytest -q -p no:cacheprovider "${wanted[0]}" | tee "$home/log"
    if ! grep -q "[0-9] passed" "$home/log"; then
        echo "no test of the extra $extra ran" >&2
        exit 1
    fi
    rm -rf "$home"
done
