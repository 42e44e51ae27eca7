#!/usr/bin/env bash
# An environment of its own for vLLM on the CPU (3.4 GB, a few minutes), or for the library
# speculators (1.5 GB). It shares nothing with the project's, since they exclude each other's
# versions of transformers. Made once for each version; one that was left half-made is made again.
#   scripts/engines/setup.sh [vllm|speculators] [folder]
# Prints the folder, and nothing else, on standard output.
# Variables: DRAFTTRAIN_ENGINES (where environments are; default: engines/ in drafttrain's cache
# folder), PYTHON (default python3).
set -eu

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
WHAT=vllm
if [[ "${1:-}" =~ ^[a-z]+$ && -f "$HERE/$1.txt" ]]; then
    WHAT="$1" && shift
fi
REQUIREMENTS="$(cat "$HERE/$WHAT.txt")"
REQUIREMENT="${REQUIREMENTS%%$'\n'*}"  # the first names the folder
CACHE="${DRAFTTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/drafttrain}"
ENGINES="${DRAFTTRAIN_ENGINES:-$CACHE/engines}"
FOLDER="${1:-$ENGINES/${REQUIREMENT/==/-}}"
CPU_INDEX="https://download.pytorch.org/whl/cpu"
# Wheels of these on the package index are made for another torch, and break the first import.
STRAY="torchvision torchaudio torchcodec"
BASE="${PYTHON:-python3}"

say() { printf '== %s\n' "$*" >&2; }

STAMP="$(cat "$HERE/setup.sh" "$HERE/$WHAT.txt" | cksum)"

mkdir -p "$(dirname "$FOLDER")"
if command -v flock > /dev/null 2>&1; then  # Of two at once, the second waits and finds it made.
    exec 9> "$FOLDER.lock"
    flock 9
fi
if [ "$(cat "$FOLDER/.ready" 2> /dev/null || true)" = "$STAMP" ]; then
    say "$REQUIREMENT in $FOLDER is complete: reused"
    echo "$FOLDER"
    exit 0
fi
if [ -e "$FOLDER" ] && [ ! -e "$FOLDER/pyvenv.cfg" ] && [ -n "$(ls -A "$FOLDER")" ]; then
    echo "$FOLDER holds something that is no environment of Python's: give a new folder" >&2
    exit 1
fi
if ! "$BASE" -c 'import sys; sys.exit(sys.version_info < (3, 10))' > /dev/null 2>&1; then
    found="$("$BASE" --version 2>&1 || true)"
    echo "needs Python >= 3.10 and found $found: install one, or name it with" \
        "PYTHON=/path/to/python" >&2
    exit 1
fi

say "new environment in $FOLDER ($("$BASE" --version))"
"$BASE" -m venv --clear "$FOLDER" >&2
pip() { "$FOLDER/bin/python" -m pip "$@" >&2; }
say "$REQUIREMENT"
# The torch that it asks for is on torch's own index, unless a folder of wheels is set up.
# shellcheck disable=SC2086
pip install --quiet $REQUIREMENTS \
    || pip install --quiet --extra-index-url "$CPU_INDEX" $REQUIREMENTS
# shellcheck disable=SC2086
pip uninstall --quiet --yes $STRAY
say "first import"
HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$FOLDER/bin/python" -c "import $WHAT" >&2
echo "$STAMP" > "$FOLDER/.ready.new"
mv "$FOLDER/.ready.new" "$FOLDER/.ready"
echo "$FOLDER"
