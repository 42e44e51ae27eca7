#!/usr/bin/env bash
# From nothing but Python to a package that makes the embedded target decode faster. Settings may
# follow:
#   scripts/quickstart.sh run_dir=runs/mine seed=1
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$ROOT"
setup demo

run=""
for word in "$@"; do
    case "$word" in run_dir=*) run="${word#run_dir=}" ;; esac
done
if [ -z "$run" ]; then
    run="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
    set -- "$@" "run_dir=$run"
fi

say "python -m drafttrain.fit experiment=quickstart $*"
"$VENV_PYTHON" -m drafttrain.fit experiment=quickstart "$@"

cat << TEXT

The package is in $run/package. To try next:
  source .venv/bin/activate
  python -m drafttrain.generate package=$run/package prompt="What makes the sky blue?"
  python -m drafttrain.evaluate package=$run/package
TEXT
