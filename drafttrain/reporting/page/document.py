"""A report as one page that runs nothing and loads nothing: readable without a network, in light
and dark, on a phone, printed."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttrain.files import write_atomic
from drafttrain.reporting.page.acceptance import positions
from drafttrain.reporting.page.kinds import by_kind
from drafttrain.reporting.page.markup import Content, Markup, element
from drafttrain.reporting.page.parts import Row
from drafttrain.reporting.page.run import intervals, section
from drafttrain.reporting.page.tables import table
from drafttrain.reporting.records import Record
from drafttrain.reporting.side_by_side import COLUMNS, MEANING, line
from drafttrain.version import version

PAGE = "report.html"
COMPARED = "compared"
"""Id of the table that all runs share."""
_TERMS = """\
tau is the number of tokens written per pass of the target, its own token included, over all rounds;
the mean tau of prompts is that of their own taus, all prompts counting alike. accept@k is
conditional: of the rounds whose first k-1 drafts were accepted, the share that accepts the k-th.
Speed is plain decoding's seconds per token divided by the drafter's, in the same loop, on the same
prompts, in turn. 95 % intervals are over prompts unless another kind is named."""


def title_of(records: Sequence[Record]) -> str:
    """A page's title: the drafter, or that there are several, and the target."""
    first = records[0].entry
    return (
        f"{'Drafters' if len(records) > 1 else first.drafter} for {first.config['target']['name']}"
    )


def page(
    title: str,
    records: Sequence[Record],
    *,
    rows: Sequence[Row] = (),
    settings: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    above: Content = None,
) -> str:
    """The page's text.

    Args:
        records: the runs, in the order of their parts.
        rows: drafters side by side, each with what it costs, as `side_by_side.line` takes them;
            without them there is no shared table.
        settings: under which the rows were measured.
        notes: sentences about them.
        above: what comes before all other parts.
    """
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=rules),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    names = [f"run-{number}" for number in range(1, len(records) + 1)]
    body = element(
        "body",
        element(
            "header",
            element("h1", title),
            _contents(records, names) if len(records) > 1 or rows else None,
        ),
        element(
            "main",
            above,
            _side_by_side(rows, settings or {}, notes) if rows else None,
            [section(record, name) for record, name in zip(records, names, strict=True)],
        ),
        element(
            "footer",
            element("p", _TERMS),
            element("p", f"Made by drafttrain {version()} from what the runs recorded."),
        ),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Keep a page; an earlier one is replaced only by a complete one."""
    write_atomic(Path(path), lambda scratch: scratch.write_text(text, encoding="utf-8"))


def _contents(records: Sequence[Record], names: Sequence[str]) -> Markup:
    links = [
        element("a", record.entry.name, href=f"#{name}")
        for record, name in zip(records, names, strict=True)
    ]
    return element("nav", element("ul", [element("li", link) for link in links]), aria_label="Runs")


def _side_by_side(rows: Sequence[Row], settings: Mapping[str, Any], notes: Sequence[str]) -> Markup:
    listed = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    content: list[Content] = [
        element("h2", "Side by side"),
        [element("p", f"{note[:1].upper()}{note[1:]}.") for note in notes],
        table("Drafters, the fastest first", COLUMNS, [line(row) for row in rows], name=COMPARED),
        element("p", MEANING.replace("`", "")),
        element("p", f"Measured with: {listed}.") if listed else None,
        intervals(rows),
        by_kind(rows),
        element("h3", "Acceptance by position"),
        positions(rows),
    ]
    return element("section", content, id="side-by-side")
