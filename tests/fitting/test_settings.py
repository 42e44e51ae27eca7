"""What a fit refuses by its configuration, before the target is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.errors import InputError
from drafttrain.fitting.first import check_first
from drafttrain.wiring.composing import compose
from tests.fitting.parts import refusal, words

# F94. The cause: what needs the target to be built was checked when it was built. So it is every
# setting of such a section (a drafter's, the source of features'), names that are added to it, a
# vocabulary too small for any drafter, and trees that these settings cannot fill.
REFUSED = [
    (["drafter.heads=0", "drafter=medusa"], "heads=0: needs an integer from 1"),
    (["drafter.chunk=0"], "chunk=0"),
    (["drafter.noise=nan"], "noise=nan"),
    (["drafter.divergence=other"], "other"),
    (["+drafter.exit_layr=1"], "drafter.exit_layr: Eagle1 has no setting exit_layr"),
    (["drafter=early_exit", "drafter.beta=3"], "beta"),
    (["drafter=ssm", "drafter.on_policy=2"], "on_policy=2"),
    (["drafter=suffix", "draft_vocab=0", "drafter.deepest=0"], "deepest=0"),
    (["drafter=ngram", "draft_vocab=0", "drafter.min_ngram=9"], "min_ngram=9 is above"),
    (["features.keep_dtype=foo"], "features.keep_dtype=foo: give one of"),
    (["features.budget_gb=-1"], "features.budget_gb=-1"),
    (["features.disk_gb=x"], "features.disk_gb=x"),
    (["+features.keep=1"], "features.keep: OnlineFeatures has no setting keep"),
    (["features=store", "features.path=x", "features.verify=no"], "features.verify=no"),
    (["draft_vocab=1"], "draft_vocab=1: needs 0 for all ids, or an integer of at least 2"),
    (["draft_vocab=2"], "final.acceptance.static_25: a node has 4 children"),
    (["drafter=medusa", "drafter.heads=2", "tree.k=4"], "4 deep, this drafter fills 2"),
    (["target.dtype=foo"], "dtype=foo: give auto"),
    (["target.attention=foo"], "attention=foo cannot verify"),
    (["target=smollm2", "target.pack=foo"], "pack=foo: give auto"),
    (["target=hf", "target.path=x", "target.trust_remote_code=no"], "target.trust_remote_code=no"),
    (["drafter=suffix", "draft_vocab=0", "tree.k=30"], "30 deep, this drafter fills 24"),
]


@pytest.mark.field("F94")
@pytest.mark.parametrize(("more", "wanted"), REFUSED)
def test_settings_are_refused_before_anything_is_read(
    more: list[str], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted in refusal(capsys, words(tmp_path / "absent", tmp_path / "run", *more))
    assert not list(tmp_path.iterdir())


@pytest.mark.field("F94")
@pytest.mark.parametrize("word", ["drafter.chunk=0", "features.keep_dtype=foo"])
def test_a_first_look_refuses_what_a_section_says_of_itself(word: str) -> None:
    """It is all that the runs of a sweep are given before the first of them starts."""
    with pytest.raises(InputError, match=word.partition(".")[2]):
        check_first(compose("fit", ["experiment=smoke", "data.path=x", word]))
