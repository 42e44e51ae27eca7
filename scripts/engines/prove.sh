#!/usr/bin/env bash
# Serves exported packages with vLLM and transformers, and compares every accepted draft with
# drafttrain's own loop. Starts from nothing but Python: sets up both environments and, unless
# packages are given, trains four small drafters (some minutes each).
#   scripts/engines/prove.sh [package ...]
set -eu
packages=()
for package in "$@"; do  # As they are named from here, and before gigabytes are installed.
    if [ ! -f "$package/config.json" ]; then
        echo "$package is no folder of a package: python -m drafttrain.fit makes one" >&2
        exit 2
    fi
    packages+=("$(cd "$package" && pwd)")
done
set -- ${packages[@]+"${packages[@]}"}
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"
cd "$ROOT"
setup demo
ENGINE="$(scripts/engines/setup.sh)"

if [ "$#" = 0 ]; then
    runs="runs/engines-$(date +%Y%m%d-%H%M%S)"
    unmeasured="eval.every=null eval.prompts=0 eval.sim_rows=0 final.prompts=0"
    unmeasured="$unmeasured final.speed_prompts=0"
    small="data.limit_tokens=8000 trainer.max_epochs=3 $unmeasured"
    heads="data.set_aside=0 final.calibrated=[] final.calibrated_speed=[]"
    train() {
        say "python -m drafttrain.fit experiment=$1 ${*:2}"
        "$VENV_PYTHON" -m drafttrain.fit "experiment=$1" "${@:2}"
    }
    # shellcheck disable=SC2086
    train quickstart "run_dir=$runs/eagle1" $small
    # shellcheck disable=SC2086
    train eagle3 "run_dir=$runs/eagle3" $small
    # shellcheck disable=SC2086
    train medusa1 "run_dir=$runs/medusa" $small $heads
    # shellcheck disable=SC2086
    train ssm "run_dir=$runs/ssm" $small
    set -- "$runs/eagle1/package" "$runs/eagle3/package" "$runs/medusa/package" \
        "$runs/ssm/package"
fi

say "python scripts/engines/proof.py --venv $ENGINE $*"
"$VENV_PYTHON" scripts/engines/proof.py --venv "$ENGINE" "$@"
