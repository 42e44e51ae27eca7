"""Open a page in a browser without a window and without a network, and tell what it does there, one
line of JSON for each width.

    .venv-browser/bin/python scripts/look.py report.html --width 390 --width 1280 [--dark]
    [--picture folder]

Needs PySide6-WebEngine; scripts/browser.sh installs it in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT: list[object] = []
"""Parts of the browser: what Python clears away in the wrong order ends the program with a
fault."""
SECONDS, PAUSE = 60, 3000
"""Seconds that anything may take, and milliseconds in which a page is drawn anew."""
TALLEST, SHEET = 12000, 1600
"""Pixels of a page that are in its pictures, and of one picture."""
LOOK = """
(() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const drawings = [...document.querySelectorAll('svg[role=img]')];
  const letters = one => {
    const scale = one.getBoundingClientRect().width / one.viewBox.baseVal.width;
    return [...one.querySelectorAll('text')].map(text => scale * parseFloat(getComputedStyle(text).fontSize));
  };
  const over = one => !one.parentElement.closest('.scroll') && one.getBoundingClientRect().right > innerWidth + 0.5;
  const body = getComputedStyle(document.body);
  return JSON.stringify({
    width: innerWidth,
    scroll_width: document.documentElement.scrollWidth,
    scroll_height: document.documentElement.scrollHeight,
    too_wide: [...document.querySelectorAll('body *')].filter(over).map(one => one.outerHTML.slice(0, 120)).slice(0, 5),
    drawings: drawings.map(one => [one.getBoundingClientRect(), one.getBBox()].map(box => [box.width, box.height])),
    smallest_letter: Math.min(...drawings.flatMap(letters)),
    active: document.querySelectorAll('script, img, iframe, object, embed, link').length,
    resources: performance.getEntriesByType('resource').map(one => one.name),
    colours: [body.color, body.backgroundColor],
    text: document.body.innerText.length,
  });
})()
"""
CLOSED = """
document.querySelectorAll('details').forEach(one => one.open = false);
document.documentElement.scrollHeight;
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument(
        "--width", type=int, action="append", required=True, help="of the window, in pixels"
    )
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--picture", type=Path, help="a folder for pictures of the page")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    flags = [
        "--disable-gpu",
        '--host-resolver-rules="MAP * ~NOTFOUND"',
        "--disable-background-networking",
    ]
    flags += [f"--blink-settings=preferredColorScheme={0 if given.dark else 1}"]
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = " ".join(flags)
    os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = (
        "1"  # It does not work for root, and the page runs nothing.
    )
    try:
        import PySide6.QtWebEngineWidgets  # noqa: F401 - before there is an application
        from PySide6.QtWidgets import QApplication
    except ImportError as error:
        sys.exit(
            f"look: no browser ({error}): scripts/browser.sh installs one; it needs libnss3, "
            f"libegl1, libasound2, libxkbfile1"
        )
    app = QApplication(sys.argv[:1])
    app.setQuitOnLastWindowClosed(False)
    for width in given.width:
        print(
            json.dumps(
                look(given.page.resolve(), width, given.picture, "dark" if given.dark else "light")
            ),
            flush=True,
        )
    os._exit(0)


def look(path: Path, width: int, pictures: Path | None, scheme: str) -> dict[str, Any]:
    """What the page does and how it lies in a window of that width."""
    from PySide6.QtCore import QEventLoop, QTimer, QUrl
    from PySide6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineProfile,
        QWebEngineScript,
        QWebEngineUrlRequestInterceptor,
    )
    from PySide6.QtWebEngineWidgets import QWebEngineView

    address = QUrl.fromLocalFile(str(path))
    requests: list[str] = []
    said: list[str] = []

    class Refuse(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info: Any) -> None:
            requests.append(info.requestUrl().toString())
            info.block(info.requestUrl() != address)

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(
            self, level: Any, message: str, line: int, source: str
        ) -> None:
            said.append(f"{level} {message} ({source}:{line})")

    def wait(start: Callable[[Callable[[Any], None]], None]) -> Any:
        """What `start` hands to the function that it is given."""
        loop, found = QEventLoop(), list[Any]()

        def done(value: Any) -> None:
            found.append(value)
            loop.quit()

        QTimer.singleShot(1000 * SECONDS, loop.quit)
        start(done)
        if not found:
            loop.exec()
        if not found:
            sys.exit(f"look: {path} was not done within {SECONDS} s")
        return found[0]

    profile = QWebEngineProfile()  # keeps nothing
    refuse = Refuse()
    profile.setUrlRequestInterceptor(refuse)
    view = QWebEngineView()
    page = Page(profile, view)
    view.setPage(page)
    view.resize(width, 900)
    view.show()

    def load(done: Callable[[Any], None]) -> None:
        page.loadFinished.connect(done)
        page.load(address)

    loaded = wait(load)
    world = QWebEngineScript.ScriptWorldId.ApplicationWorld.value
    found = json.loads(wait(lambda done: page.runJavaScript(LOOK, world, done)))
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        height = wait(lambda done: page.runJavaScript(CLOSED, world, done))
        view.resize(width, min(TALLEST, int(height)))
        wait(lambda done: QTimer.singleShot(PAUSE, lambda: done(True)))
        whole = view.grab()
        for number, top in enumerate(range(0, whole.height(), SHEET), start=1):
            whole.copy(0, top, width, SHEET).save(
                str(pictures / f"{path.stem}-{scheme}-{width}-{number}.png")
            )
    KEPT.extend((view, page, profile, refuse))
    return {
        "loaded": loaded,
        "requests": requests,
        "console": said,
        "page": address.toString(),
        **found,
    }


if __name__ == "__main__":
    main()
