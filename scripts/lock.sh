#!/usr/bin/env bash
# Writes constraints-locked.txt: versions and hashes of all packages of the Docker image (Linux, Python 3.12, x86_64).
#   bash scripts/lock.sh            # newest versions that pyproject.toml allows; needs uv
#   bash scripts/lock.sh --audit    # known vulnerabilities of the locked versions; needs pip-audit and the network
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--audit" ]; then
    exec pip-audit --require-hashes --disable-pip --requirement constraints-locked.txt
fi
packages="$(mktemp)"
trap 'rm -f "$packages"' EXIT
# hatchling builds medvl in the image.
echo hatchling | uv pip compile pyproject.toml - --extra wandb --extra serve --extra remote --quiet \
    --python-version 3.12 --python-platform x86_64-manylinux_2_28 --constraint constraints-cpu.txt \
    --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$packages" > /dev/null
{ echo "# Written by scripts/lock.sh. Install: pip install --require-hashes -r constraints-locked.txt"; cat "$packages"; } \
    > constraints-locked.txt
