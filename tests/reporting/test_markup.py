"""What is not markup is text, whatever it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.reporting.page.markup import Markup, element, escaped, joined
from tests.reporting.parsed import parsed


def test_elements() -> None:
    assert element(
        "p",
        "a & b",
        [None, element("b", "<c>")],
        class_="x",
        aria_label='"',
        hidden=True,
        id=None,
        title=False,
    ) == ('<p class="x" aria-label="&quot;" hidden>a &amp; b<b>&lt;c&gt;</b></p>')
    assert (
        element("br") == "<br>"
        and element("rect", x=1.504, width=2.0, height=3)
        == '<rect x="1.5" width="2" height="3"></rect>'
    )
    assert joined("<", Markup("<b>"), iter(["&"])) == "&lt;<b>&amp;" and isinstance(
        joined("a"), Markup
    )
    assert escaped("\x00\r\n\t\x7f\x85\ud800\uffff") == "␀␍\n\t␡\ufffd\ufffd\ufffd"


@settings(max_examples=25, deadline=None)
@given(st.text())
def test_any_text_stays_text_and_can_be_written(text: str) -> None:
    made = element("p", text, title=text)
    made.encode("utf-8")
    (node,) = parsed(f"<!DOCTYPE html>\n{made}").all("p")
    assert node.text == node.attributes["title"] and not node.all("b")
    assert len(node.text) == len(text)
    assert all(
        a == b or b == "\ufffd" or "\u2400" <= b <= "\u2421"
        for a, b in zip(text, node.text, strict=True)
    )
