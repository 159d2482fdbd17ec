#!/usr/bin/env bash
# Builds the documentation site into site/ and checks its links. No network is needed once the packages are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup "[docs]"
export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1
.venv/bin/python scripts/build_docs.py "$@"
