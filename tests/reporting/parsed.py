"""A page as a tree, read by the standard library's parser, and what every page must fulfil."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

LOADING = {
    "script",
    "img",
    "image",
    "link",
    "iframe",
    "object",
    "embed",
    "base",
    "source",
    "video",
    "audio",
    "form",
    "input",
    "use",
}
"""Elements that load, run or send something."""
ADDRESSES = {
    "src",
    "srcset",
    "xlink:href",
    "action",
    "formaction",
    "data",
    "poster",
    "background",
    "ping",
    "style",
}
COORDINATES = ("d", "x", "y", "cx", "cy", "points", "width", "height", "transform", "stroke-width")
VOID = {"meta", "br", "hr", "col", "img", "link", "input", "base", "source", "embed"}


@dataclass
class Node:
    name: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, name: str) -> list[Node]:
        return [node for node in self.walk() if node.name == name]

    def one(self, id: str) -> Node:
        (found,) = [node for node in self.walk() if node.attributes.get("id") == id]
        return found

    def classed(self, name: str) -> list[Node]:
        return [
            node for node in self.walk() if name in (node.attributes.get("class") or "").split()
        ]

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def cells(self) -> list[list[Node]]:
        """Of a table, the cells of its body, row by row."""
        (body,) = self.all("tbody")
        return [
            [cell for cell in row.walk() if cell.name in ("th", "td")] for row in body.all("tr")
        ]

    def values(self) -> list[float]:
        """The exact numbers in a cell."""
        return [float(node.attributes["value"] or "") for node in self.all("data")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (
            f"an attribute occurs twice in {self.get_starttag_text()}"
        )
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert len(self.open) > 1 and self.open[-1].name == tag, (
            f"</{tag}> ends {self.open[-1].name}, line {self.getpos()[0]}"
        )
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def parsed(text: str) -> Node:
    assert text.startswith("<!DOCTYPE html>\n")
    reader = _Reader()
    reader.feed(text)
    reader.close()
    (root,) = reader.open
    return root


def check_form(text: str) -> Node:
    """Raise AssertionError unless a page fulfils what every page must."""
    root = parsed(text)
    (outer,) = root.all("html")
    assert outer.attributes["lang"] == "en" and [
        node.name for node in outer.children if isinstance(node, Node)
    ] == ["head", "body"]
    ids = [node.attributes["id"] for node in root.walk() if "id" in node.attributes]
    assert len(set(ids)) == len(ids)
    for node in root.walk():
        assert node.name not in LOADING, node
        odd = [name for name in node.attributes if name.startswith("on") or name in ADDRESSES]
        assert not odd, node
        if "href" in node.attributes:
            target = node.attributes["href"] or ""
            assert node.name == "a" and target[0] == "#" and target[1:] in ids
    (style,) = root.all("style")
    assert "url(" not in style.text and "@import" not in style.text and "<" not in style.text
    (rules,) = [
        node
        for node in root.all("meta")
        if node.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    digest = base64.b64encode(hashlib.sha256(style.text.encode()).digest()).decode()
    assert (
        rules.attributes["content"]
        == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    for svg in root.all("svg"):
        box = [float(end) for end in (svg.attributes["viewbox"] or "").split()]
        assert box[:2] == [0, 0] and min(box[2:]) > 0 and all(map(math.isfinite, box))
        assert svg.attributes.get("aria-label") or svg.attributes.get("aria-hidden") == "true"
        for node in svg.walk():
            places = " ".join(
                value or "" for name, value in node.attributes.items() if name in COORDINATES
            )
            assert not re.search(r"nan|inf|e[-+]?\d", places), places
    for table in root.all("table"):
        assert len(table.all("caption")) == 1 and all(
            cell.attributes["scope"] in ("row", "col") for cell in table.all("th")
        )
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text)
    return root
