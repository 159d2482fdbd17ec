# Sourced by quickstart.sh and test.sh: makes .venv beside the project and installs medvl into it. Idempotent: when
# neither pyproject.toml nor the constraints have changed since the last time, it costs nothing.
#   setup EXTRAS     e.g. setup "" or setup "[dev]"

# torch without CUDA libraries. PyPI's wheels for Linux bring 19 packages of them, several GB that only a GPU needs.
PYTORCH_CPU_INDEX="${PYTORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}"

find_python() {
    for candidate in "${MEDVL_PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "medvl needs Python 3.11, 3.12 or 3.13: install one, or name it in MEDVL_PYTHON" >&2
    return 1
}

# Succeeds where PyTorch's CPU index answers within three seconds. pip itself would retry for minutes.
cpu_index_answers() {
    [ -n "$PYTORCH_CPU_INDEX" ] && "$1" - "$PYTORCH_CPU_INDEX" 2>/dev/null <<'EOF'
import os, sys, threading, urllib.request

threading.Timer(3, os._exit, [1]).start()  # looking up a name has no timeout of its own
try:
    urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=3).close()
except OSError:
    os._exit(1)
os._exit(0)
EOF
}

setup() {
    local extras="$1" python stamp sources=()
    python="$(find_python)" || return 1
    if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi >/dev/null 2>&1; then
        sources=(--constraint constraints-cpu.txt)
    fi
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
        rm -rf .venv
        "$python" -m venv .venv
    fi
    stamp="$(cat pyproject.toml constraints-cpu.txt | cksum) ${sources[*]:-gpu} $PWD"
    if [ "$(cat ".venv/medvl-setup$extras" 2>/dev/null)" != "$stamp" ]; then
        echo "Installing medvl$extras into .venv: a minute or two"
        if [ -n "${sources[*]}" ] && cpu_index_answers "$python"; then
            sources+=(--extra-index-url "$PYTORCH_CPU_INDEX")
        fi
        # Without compiling ten thousand modules, most of which are never imported.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "${sources[@]}" --editable ".$extras"
        echo "$stamp" > ".venv/medvl-setup$extras"
    fi
}
