#!/usr/bin/env bash
# Print a Python >= 3.12 that runs and can make a virtual environment: $PYTHON if given, else the first good one on the
# path, else the newest of pyenv, else uv's. Exit 2 with one line if there is none.
# A name on the path proves nothing: pyenv's shims exist for versions that are not active, and fail when run.
set -u

good() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 </dev/null
}

newest_of_pyenv() {
    local python
    for python in "${HOME:-}"/.pyenv/versions/*/bin/python3; do
        good "$python" && printf '%s %s\n' "$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')" "$python"
    done | sort -V | tail -n 1 | cut -d ' ' -f 2-
}

if [ -n "${PYTHON:-}" ]; then
    good "$PYTHON" && command -v "$PYTHON" && exit 0
    echo "error: PYTHON=$PYTHON does not run, is older than 3.12 or has no venv; give the path of another Python" >&2
    exit 2
fi
for name in python3.14 python3.13 python3.12 python3; do
    good "$name" && command -v "$name" && exit 0
done
python=$(newest_of_pyenv)
[ -n "$python" ] && echo "$python" && exit 0
python=$(uv python find '>=3.12' 2>/dev/null)
[ -n "$python" ] && good "$python" && echo "$python" && exit 0
echo "error: no Python >= 3.12 found; install one ('uv python install 3.13', pyenv or python.org) or set PYTHON=/path/to/it" >&2
exit 2
