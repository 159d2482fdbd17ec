#!/usr/bin/env bash
# Sets up .venv and runs lint, types and tests. Arguments go to pytest: bash scripts/test.sh -k loader
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup "[dev]"
# No test needs the network; and libraries are set to offline mode.
export HF_HUB_OFFLINE=1 NO_ALBUMENTATIONS_UPDATE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
export PYTHONDONTWRITEBYTECODE= # compiled tests are kept, also where a container asks not to
# The type check runs beside the tests. A file of tests is one unit of work, in the order of tests/conftest.py: those with
# slow tests first. Two processes more than cores work while others wait for a process, a socket or the disk.
.venv/bin/mypy &
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
tests=0
.venv/bin/python -m pytest --processes "${MEDVL_TEST_PROCESSES:-$(($(cores) + 2))}" "$@" || tests=$?
wait "$types"
exit "$tests"
