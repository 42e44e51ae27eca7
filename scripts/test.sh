#!/usr/bin/env bash
# Every check of the repository: ruff (rules and format), mypy, pytest. It needs only Python.
# Further words go to pytest:
#   scripts/test.sh                       everything but what takes minutes
#   scripts/test.sh -m slow               what takes minutes
#   scripts/test.sh tests/nn
# All run even if one fails; the exit code is that of the first that failed.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$ROOT" || exit 1
setup dev || exit 1

code=0
check() {
    say "$*"
    "$VENV_PYTHON" "$@"
    local result=$?
    [ "$code" -ne 0 ] || code=$result
}

check -m ruff check .
check -m ruff format --check .
check -m mypy
# Two workers of one thread each: small models keep a core busy better than they share two.
# Files come in the order of tests/conftest.py, the longest first.
OMP_NUM_THREADS=1 check -m pytest -p no:cacheprovider -n 2 --dist loadfile \
    --no-loadscope-reorder --durations=15 "$@"
exit "$code"
