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

# Cores of this process. nproc takes OMP_NUM_THREADS for a limit, which is that of a library's threads.
cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; }

# Prints the number of ranks of a training run on this machine: one on a GPU, else one a core, because ranks wait for each
# other once a step and threads at every operation. It is a power of two, so that every batch can be divided; 4 at most,
# so that each rank of a batch of 64 has 16 pairs for its batch norms, and one for every 2 GB of free memory. Ranks on
# more cores than that use several threads each.
ranks() {
    local count=1 cores memory
    if ! has_gpu; then
        cores="$(cores)"
        memory="$(awk '/^MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo 2>/dev/null)"
        while [ $((2 * count)) -le 4 ] && [ $((2 * count)) -le "$cores" ] && [ $((2 * count)) -le "${memory:-4}" ]; do
            count=$((2 * count))
        done
    fi
    echo "$count"
}

# Runs a recipe on all cores. medvl sets the threads of each rank itself, and torchrun warns without OMP_NUM_THREADS.
torchrun() {
    local count
    count="$(ranks)"
    if [ "$count" -gt 1 ]; then local -x OMP_NUM_THREADS=1; fi
    .venv/bin/torchrun --standalone --nproc-per-node "$count" "$@"
}

setup() {
    local extras="$1" python stamp sources=()
    python="$(find_python)" || return 1
    if ! has_gpu; then
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
        # Without compiling ten thousand modules, most of which are never imported: Python keeps what it compiles.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "${sources[@]}" --editable ".$extras"
        echo "$stamp" > ".venv/medvl-setup$extras"
    fi
    # Containers set this so that images stay small; every process would then compile torch and the rest anew.
    export PYTHONDONTWRITEBYTECODE=
}
