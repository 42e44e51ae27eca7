"""Trees from files; what is wrong in one is said with its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafttrain.errors import InputError
from drafttrain.tree.files import read_tree
from drafttrain.tree.topology import Tree


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        (json.dumps(Tree.medusa().spec()[::-1]), Tree.medusa()),
        ("[[0], [1], [0, 0]]", Tree((-1, -1, 0))),
        ("- [0]\n- [0, 0]\n", Tree.chain(2)),
        ('{"parents": [-1, -1, 0, 1]}', Tree((-1, -1, 0, 1))),
        ("parents: [-1, 0]", Tree.chain(2)),
    ],
)
def test_what_is_read(text: str, tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "tree").write_text(text)
    assert read_tree(str(tmp_path / "tree")) == tree


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds None"),
        ("[", "cannot be read as JSON or YAML"),
        ("4", "holds 4, needs a list of paths"),
        ("[0, 1]", "needs a list of paths"),
        ("[]", "at least one path"),
        ("[[0], [2]]", r"path \[2\] skips a rank"),
        ("[[0], ['a']]", "integer ranks"),
        ("{parents: []}", "parents are"),
        ("{parents: [-1, x]}", "need integers"),
        ("{parents: [0, 0]}", "node 0 has parent 0"),
        ("{parents: [1, 0]}", "node 0 has parent 1"),
        ("{parents: [-1, 2, 1]}", "node 1 has parent 2"),
        ("{parents: [-1, 0, -1]}", "sort nodes breadth first"),
        ("{parents: [-1], more: 1}", "needs a list of paths"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
        ("[[0], [!!timestamp x]]", "cannot be read .*does not fit its tag"),
        ("[[0], [!!bool x]]", "cannot be read .*does not fit its tag"),
        ("[[0], [!!float '']]", "cannot be read .*does not fit its tag"),
        ("[[0x" + "f" * 5000 + "]]", "too many digits"),
        ("{parents: [0x" + "f" * 5000 + "]}", "too many digits"),
        ("[" * 20 + "0" + "]" * 20, "more than 16 levels"),
    ],
)
def test_what_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        read_tree(str(tmp_path / "tree.json"))
    assert "tree.json" in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        read_tree(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="cannot be read"):
        read_tree(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_tree(str(tmp_path / "binary"))
    (tmp_path / "huge").write_text(" " * (2 << 20))
    with pytest.raises(InputError, match="more than any tree needs"):
        read_tree(str(tmp_path / "huge"))
