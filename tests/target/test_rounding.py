"""F93, neighbours of another dtype: one float32 file in bfloat16 and in float16, and what is near
it: one tensor longer by a hundredth, shifted, turned round or gone; zeros, very small and very
large weights; files in float16, or in either, loaded in a wider dtype; a fingerprint that lacks the
sample, or was edited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafttrain.errors import InputError
from drafttrain.target import fingerprint, load, rounding
from drafttrain.target.model import Target


def in_dtype(dtype: str, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Target:
    model = load.tiny().model
    with torch.no_grad():
        if change is not None:
            weight = model.model.layers[1].self_attn.v_proj.weight
            weight.copy_(change(weight))
    return Target(model.to(getattr(torch, dtype)), None, "t")


@pytest.mark.field("F93")
def test_one_file_in_bfloat16_and_in_float16_is_one_target() -> None:
    """Rounding twice gives other weights than rounding once, in one of 16 of them."""
    brain, half = (in_dtype(dtype).fingerprint for dtype in ("bfloat16", "float16"))
    assert brain[fingerprint.HALF] != half["weights"] != brain["weights"]
    for one, other in ((brain, half), (half, brain)):
        fingerprint.refuse_other(one, other, "the set")
        lacking = {k: v for k, v in one.items() if k != fingerprint.SAMPLED}
        assert fingerprint.difference("weights", lacking, other)
        edited = {**one, fingerprint.SAMPLED: "edited"}
        assert fingerprint.difference("weights", edited, other)


@pytest.mark.field("F93")
@pytest.mark.parametrize(
    "change", [lambda w: w * 1.01, lambda w: w + 1e-3 * w.std(), lambda w: -w, lambda w: w * 0]
)
def test_another_tensor_in_float16_is_another_target(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    brain, half = in_dtype("bfloat16").fingerprint, in_dtype("float16", change).fingerprint
    for one, other in ((brain, half), (half, brain)):
        with pytest.raises(InputError, match=r"another target \(weights"):
            fingerprint.refuse_other(one, other, "the set")


@pytest.mark.field("F93")
def test_a_copy_of_the_files_in_float16_is_one_target(caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded in float32 as the original is, for instance on a CPU."""

    def rounded(change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, str]:
        return Target(in_dtype("float16", change).model.to(torch.float32), None, "t").fingerprint

    own, copy, other = in_dtype("float32").fingerprint, rounded(), rounded(lambda w: w * 1.01)
    assert own["weights"] != copy["weights"] and own["dtype"] == copy["dtype"]
    for one, two in ((own, copy), (copy, own)):
        caplog.clear()
        fingerprint.refuse_other(one, two, f"a set {one is own}")
        assert "a copy of this target's files of another precision" in caplog.text
        # Features and texts of both differ.
        with pytest.raises(InputError, match="another target"):
            fingerprint.refuse_other(one, two, "the store", dtype=True)
        assert not fingerprint.same(one, two) and fingerprint.run_changes(one, two)
    with pytest.raises(InputError, match="another target"):
        fingerprint.refuse_other(own, other, "the set")


FILES = ("bfloat16", "float16")


@pytest.mark.field("F93")
@pytest.mark.parametrize(
    "loaded", [("float32", "float32"), ("float32", "float16"), ("bfloat16", "float32")]
)
def test_copies_of_one_original_in_both_are_one_target(
    loaded: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither is a rounding of the other."""

    def copy(files: str, dtype: str, change: Any = None) -> dict[str, str]:
        model = in_dtype(files, change).model.to(getattr(torch, dtype))
        return Target(model, None, "t").fingerprint

    brain, half = (copy(files, dtype) for files, dtype in zip(FILES, loaded, strict=True))
    other = copy("float16", loaded[1], lambda w: w * 1.01)
    for one, two in ((brain, half), (half, brain)):
        caplog.clear()
        fingerprint._warn_once.cache_clear()
        fingerprint.refuse_other(one, two, f"a set {loaded} {one is brain}")
        assert "another precision, float16 against bfloat16" in caplog.text
        with pytest.raises(InputError, match="another target"):
            fingerprint.refuse_other(one, two, "the store", dtype=True)
        assert not fingerprint.same(one, two) and fingerprint.run_changes(one, two)
        for wrong in ((other, two), (two, other)) if two is brain else ():
            with pytest.raises(InputError, match="another target"):
                fingerprint.refuse_other(*wrong, "the set")


@pytest.mark.field("F93")
def test_what_float16_gives_in_bfloat16_is_not_known_and_said() -> None:
    """Rounded twice, some values are others; so are those of a model that was trained a little."""
    brain = in_dtype("bfloat16").fingerprint
    twice = Target(in_dtype("float16").model.to(torch.bfloat16), None, "t").fingerprint
    assert rounding.neighbours(brain[fingerprint.SAMPLED], twice[fingerprint.SAMPLED])
    with pytest.raises(InputError, match=r"none differs by more than bfloat16 rounds: if one's"):
        fingerprint.refuse_other(brain, twice, "the set")
    other = in_dtype("bfloat16", lambda w: w * 1.02).fingerprint
    assert "rounds" not in fingerprint.difference("weights", brain, other)


def test_every_weight_that_has_both_roundings_fits_them() -> None:
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=chance)
    values *= 10 ** (8 * torch.rand(4000, generator=chance) - 6)
    values[:4] = torch.tensor([0.0, 1e-9, 7e4, -7e4])
    values[9] = 3.0
    model = torch.nn.ParameterList([one for one in values.split(8)])
    samples = [rounding.sample(model, dtype) for dtype in rounding.KINDS.values()]
    assert rounding.may_be_one(*samples)
    for place, other in ((0, 1e-3), (1, -1e-3), (2, 1.0), (9, 3.03)):
        moved = values.clone()
        moved[place] = other
        there = torch.nn.ParameterList([one for one in moved.split(8)])
        assert not rounding.may_be_one(samples[0], rounding.sample(there, torch.float16))
