"""Open a page in a browser without a window and without a network, and print what it does there,
one line of JSON for each width.

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
"""Parts of the browser. Python would clear them away in the wrong order, which crashes."""
SECONDS, PAUSE = 60, 3000
"""Seconds that anything may take, and milliseconds in which a page is drawn again."""
TALLEST, SHEET = 12000, 1600
"""Pixels of a page that are in its pictures, and of one picture."""
LOOK = """
(() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const drawings = [...document.querySelectorAll('svg[role=img]')];
  const letters = one => {
    const scale = one.getBoundingClientRect().width / one.viewBox.baseVal.width;
    const size = text => scale * parseFloat(getComputedStyle(text).fontSize);
    return [...one.querySelectorAll('text')].map(size);
  };
  const over = one =>
    !one.parentElement.closest('.scroll') && one.getBoundingClientRect().right > innerWidth + 0.5;
  const boxes = one => [one.getBoundingClientRect(), one.getBBox()];
  const elements = [...document.querySelectorAll('body *')];
  const body = getComputedStyle(document.body);
  return JSON.stringify({
    width: innerWidth,
    scroll_width: document.documentElement.scrollWidth,
    scroll_height: document.documentElement.scrollHeight,
    too_wide: elements.filter(over).map(one => one.outerHTML.slice(0, 120)).slice(0, 5),
    drawings: drawings.map(one => boxes(one).map(box => [box.width, box.height])),
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
    # The sandbox does not work for root, and the page runs nothing.
    os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
    try:
        import PySide6.QtWebEngineWidgets  # noqa: F401 - before there is an application
        from PySide6.QtWidgets import QApplication
    except ImportError as error:
        sys.exit(
            f"look: no browser ({error}): scripts/browser.sh installs one; it needs libnss3, "
            "libegl1, libasound2, libxkbfile1"
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


class Browser:
    """A window with one page. It loads that page's file and refuses every other request."""

    def __init__(self, path: Path, width: int) -> None:
        from PySide6.QtCore import QUrl
        from PySide6.QtWebEngineCore import QWebEngineProfile, QWebEngineScript
        from PySide6.QtWebEngineWidgets import QWebEngineView

        self.path, self.address = path, QUrl.fromLocalFile(str(path))
        self.requests: list[str] = []
        self.said: list[str] = []
        refuse, page = self._parts()
        self._world = QWebEngineScript.ScriptWorldId.ApplicationWorld.value
        profile = QWebEngineProfile()  # keeps nothing
        profile.setUrlRequestInterceptor(refuse)
        self.view = QWebEngineView()
        self.page = page(profile, self.view)
        self.view.setPage(self.page)
        self.view.resize(width, 900)
        self.view.show()
        KEPT.extend((self.view, self.page, profile, refuse))

    def _parts(self) -> tuple[Any, Any]:
        """What refuses requests, and the class of a page that notes what the console says."""
        from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor

        address, requests, said = self.address, self.requests, self.said

        class Refuse(QWebEngineUrlRequestInterceptor):
            def interceptRequest(self, info: Any) -> None:
                requests.append(info.requestUrl().toString())
                info.block(info.requestUrl() != address)

        class Page(QWebEnginePage):
            def javaScriptConsoleMessage(
                self, level: Any, message: str, line: int, source: str
            ) -> None:
                said.append(f"{level} {message} ({source}:{line})")

        return Refuse(), Page

    def load(self) -> Any:
        """Whether the page could be loaded."""

        def start(done: Callable[[Any], None]) -> None:
            self.page.loadFinished.connect(done)
            self.page.load(self.address)

        return self._wait(start)

    def run(self, script: str) -> Any:
        """The value of a script's last expression."""
        return self._wait(lambda done: self.page.runJavaScript(script, self._world, done))

    def pause(self) -> None:
        from PySide6.QtCore import QTimer

        self._wait(lambda done: QTimer.singleShot(PAUSE, lambda: done(True)))

    def _wait(self, start: Callable[[Callable[[Any], None]], None]) -> Any:
        """The value that `start` passes to the function that it is given."""
        from PySide6.QtCore import QEventLoop, QTimer

        loop, found = QEventLoop(), list[Any]()

        def done(value: Any) -> None:
            found.append(value)
            loop.quit()

        QTimer.singleShot(1000 * SECONDS, loop.quit)
        start(done)
        if not found:
            loop.exec()
        if not found:
            sys.exit(f"look: {self.path} was not done within {SECONDS} s")
        return found[0]


def look(path: Path, width: int, pictures: Path | None, scheme: str) -> dict[str, Any]:
    """What the page does, and its sizes in a window of that width."""
    browser = Browser(path, width)
    loaded = browser.load()
    found = json.loads(browser.run(LOOK))
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        height = browser.run(CLOSED)
        browser.view.resize(width, min(TALLEST, int(height)))
        browser.pause()
        shown = browser.view.grab()
        for number, top in enumerate(range(0, shown.height(), SHEET), start=1):
            shown.copy(0, top, width, SHEET).save(
                str(pictures / f"{path.stem}-{scheme}-{width}-{number}.png")
            )
    return {
        "loaded": loaded,
        "requests": browser.requests,
        "console": browser.said,
        "page": browser.address.toString(),
        **found,
    }


if __name__ == "__main__":
    main()
