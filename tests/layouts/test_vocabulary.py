"""d2t and t2d by small exact examples, and what is wrong in foreign ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.errors import InputError
from drafttrain.layouts import engines, vocabulary
from drafttrain.layouts.directory import open_directory
from drafttrain.layouts.engines import Reading
from drafttrain.layouts.inspection import Inspection
from tests.layouts.made import directory
from tests.messages import said


def test_offsets_and_marks() -> None:
    """ids 1, 3, 4, 7 of 8: draft id 2 is target id 2 + 2 = 4."""
    found = vocabulary.maps_of(torch.tensor([1, 3, 4, 7]), 8)
    assert found["d2t"].tolist() == [1, 2, 2, 4] and found["d2t"].dtype == torch.int64
    assert found["t2d"].tolist() == [False, True, False, True, True, False, False, True]
    assert vocabulary.ids_of(found["d2t"]).tolist() == [1, 3, 4, 7]
    whole = vocabulary.maps_of(torch.arange(5), 5)
    assert whole["d2t"].tolist() == [0] * 5 and bool(whole["t2d"].all())


@pytest.mark.parametrize("ids", [[3, 1], [1, 1], [-1, 2], [1, 8], [], [[1, 2]]])
def test_ids_that_are_none(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=said("layouts.ids-ascend")):
        vocabulary.maps_of(torch.tensor(ids, dtype=torch.int64), 8)


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        (torch.tensor([5, 2, 7]), True),
        (torch.tensor([5, 2, 7], dtype=torch.int32), True),
        (torch.tensor([5.0, 2.0]), False),
        (torch.tensor([5, 5]), False),
        (torch.tensor([5, 8]), False),
        (torch.tensor([-1, 2]), False),
        (torch.tensor([1]), False),
        (torch.arange(9), False),
    ],
)
def test_foreign_lists_of_ids(tensor: torch.Tensor, fits: bool) -> None:
    if fits:
        assert vocabulary.read_ids("map", tensor, 8).tolist() == tensor.tolist()
        return
    with pytest.raises(InputError, match="map"):
        vocabulary.read_ids("map", tensor, 8)


IDS = torch.tensor([1, 3, 4, 7])
GOOD = vocabulary.maps_of(IDS, 8)


@pytest.mark.parametrize(
    ("held", "size", "name"),
    [
        (GOOD, 4, None),
        ({"d2t": GOOD["d2t"].int()}, 4, None),
        ({}, 4, "d2t-missing"),
        ({}, 8, None),
        (GOOD, 8, "d2t-for-whole-vocabulary"),
        (GOOD, 5, "d2t-shape"),
        ({**GOOD, "d2t": GOOD["d2t"].float()}, 4, "d2t-shape"),
        ({**GOOD, "t2d": GOOD["t2d"][:7]}, 4, "t2d-shape"),
        ({"d2t": IDS, "t2d": GOOD["t2d"]}, 4, "d2t-absolute"),
        ({"d2t": IDS}, 4, "d2t-absolute"),
        ({"d2t": torch.tensor([1, 2, 2, 5])}, 4, "d2t-out-of-range"),
        ({"d2t": torch.tensor([-1, 2, 2, 4])}, 4, "d2t-out-of-range"),
        ({"d2t": torch.tensor([1, 0, 2, 4])}, 4, "d2t-not-ascending"),
        ({"d2t": GOOD["d2t"], "t2d": ~GOOD["t2d"]}, 4, "t2d-disagrees"),
        ({"d2t": GOOD["d2t"], "t2d": GOOD["t2d"].roll(1)}, 4, "t2d-disagrees"),
        ({}, 9, "draft-vocab-size"),
    ],
)
def test_invariants(
    held: dict[str, torch.Tensor], size: int, name: str | None, tmp_path: Path
) -> None:
    head = open_directory(directory(tmp_path / "head", {}, {"x": torch.ones(1), **held}), "head")
    inspection = Inspection(head, engines.VLLM, Reading())
    vocabulary.check(inspection, 8, size)
    found = {finding.name: finding.fatal for finding in inspection.findings}
    half = "d2t" in held and "t2d" not in held
    assert found.pop("t2d-missing", None) is (False if half else None)
    assert list(found) == ([] if name is None else [name])


def test_engines_without_a_draft_vocabulary(tmp_path: Path) -> None:
    head = open_directory(directory(tmp_path / "head", {}, {"x": torch.ones(1), **GOOD}), "head")
    inspection = Inspection(head, engines.SGLANG, Reading())
    vocabulary.check(inspection, 8, 4, read=False)
    assert [finding.name for finding in inspection.findings] == ["draft-vocab-not-read"]
