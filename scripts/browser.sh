#!/usr/bin/env bash
# Opens pages of the report in a browser without a window and without a network, and checks how they
# are laid out; further words go to pytest. The browser is QtWebEngine from the wheel
# PySide6-WebEngine, in an environment of its own (.venv-browser, about 700 MB). It needs the same
# libraries of the system as any desktop program; on a bare Debian:
#   apt-get install libnss3 libegl1 libgl1 libasound2 libdbus-1-3 libfontconfig1 libxkbcommon0 \
#     libxkbfile1 libxcomposite1 libxdamage1 libxrandr2 libxtst6
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$ROOT"
setup dev
BROWSER="$ROOT/.venv-browser"
if ! "$BROWSER/bin/python" -c 'import PySide6.QtWebEngineCore' > /dev/null 2>&1; then
    say "a browser in .venv-browser"
    "${PYTHON:-python3}" -m venv --clear "$BROWSER"
    "$BROWSER/bin/python" -m pip install --quiet "PySide6-WebEngine>=6.12"
fi
export DRAFTTRAIN_BROWSER_PYTHON="$BROWSER/bin/python"
"$VENV_PYTHON" -m pytest -p no:cacheprovider -m browser tests/reporting "$@"
