"""A page as a tree, read by the standard library's parser; whatever is not well formed is
refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

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
            f"an attribute stands twice in {self.get_starttag_text()}"
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
