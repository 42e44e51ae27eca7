"""A package and the target it is loaded with: what is refused, and what is only warned about."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenizers import normalizers

import drafttrain
from drafttrain.data.template import give_arguments
from drafttrain.drafter.eagle1 import Eagle1
from drafttrain.errors import InputError
from drafttrain.packaging.manifest import read_config
from drafttrain.target.model import Target
from tests.drafter import make as drafters
from tests.helpers import CHATML, tiny_chat_target, tiny_tokenizer
from tests.packaging.made import packed


@pytest.mark.field("F81")
def test_a_target_with_another_chat_template_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ids and weights are the same."""
    chat = tiny_chat_target()
    folder = packed(tmp_path / "package", drafters.make(Eagle1, chat), chat)
    with caplog.at_level(logging.WARNING):
        drafttrain.load(folder, tiny_chat_target("{{ messages[0].content }}"))
    assert "was made in another mode (chat_template: the chat template is another" in caplog.text


@pytest.mark.field("F81")
def test_a_package_says_in_which_mode_it_was_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of the set, whatever the target's was at the time."""
    template = CHATML + "{% if not enable_thinking %}<quick>{% endif %}"
    quick, deep = (tiny_chat_target(template) for _ in range(2))
    give_arguments(quick.tokenizer, {"enable_thinking": False})
    drafter = drafters.make(Eagle1, deep)
    folder = packed(tmp_path / "package", drafter, deep, trained_on=quick.fingerprint)
    marks = read_config(folder)["target"]["fingerprint"]
    assert marks["chat_template"] == quick.fingerprint["chat_template"]
    assert "`target.template.enable_thinking=false`" in (folder / "README.md").read_text()
    with caplog.at_level(logging.WARNING):
        drafttrain.load(folder, quick)
        assert not caplog.text
        drafttrain.load(folder, deep)
    assert "enable_thinking false there, not given here" in caplog.text


@pytest.mark.field("F75")
def test_a_package_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    chat = tiny_chat_target()
    folder = packed(tmp_path / "package", drafters.make(Eagle1, chat), chat)
    other = tiny_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Replace("?", "!")
    with pytest.raises(InputError, match=r"\(tokenizer: its normaliser .* has other ids\)"):
        drafttrain.load(folder, Target(chat.model, other, "other"))
