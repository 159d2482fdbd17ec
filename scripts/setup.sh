# Sourced by quickstart.sh and test.sh: makes .venv beside the project and installs medvl into it. Idempotent: when
# neither pyproject.toml nor the constraints have changed since the last time, it costs nothing.
#   setup EXTRAS     e.g. setup "" or setup "[dev]"

find_python() {
    for candidate in "${MEDVL_PYTHON:-}" python3.11 python3.12 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "medvl needs Python 3.11 or 3.12: install one, or name it in MEDVL_PYTHON" >&2
    return 1
}

setup() {
    local extras="$1" python stamp constraints=()
    python="$(find_python)" || return 1
    if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi >/dev/null 2>&1; then
        constraints=(--constraint constraints-cpu.txt)
    fi
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
        rm -rf .venv
        "$python" -m venv .venv
    fi
    stamp="$(cat pyproject.toml constraints-cpu.txt | cksum) ${constraints[*]:-gpu} $PWD"
    if [ "$(cat ".venv/medvl-setup$extras" 2>/dev/null)" != "$stamp" ]; then
        echo "Installing medvl$extras into .venv: a minute or two"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check "${constraints[@]}" --editable ".$extras"
        echo "$stamp" > ".venv/medvl-setup$extras"
    fi
}
