"""Every notebook runs from top to bottom, with a tiny target and a handful of updates; their own
asserts hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 200_000
"""Bytes of a notebook: what is stored with outputs is a picture at most."""
ABSOLUTE = re.compile(r"""(?<=[\s"'(=])/[A-Za-z][\w.-]*/""")
"""A path from the root, which is somebody's machine."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One process for all of them, since importing what they need takes longer than most of them
    run."""
    place = tmp_path_factory.mktemp("kernel")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {
        "DRAFTTRAIN_NOTEBOOKS": "fast",
        "DRAFTTRAIN_NOTEBOOK_RUNS": str(place / "runs"),
        "PYTHONPATH": path,
    }
    settings["IPYTHONDIR"] = str(place / "ipython")
    manager = AsyncKernelManager(connection_file=str(place / "kernel.json"))
    run_sync(manager.start_kernel)(cwd=str(ROOT / "notebooks"), env={**os.environ, **settings})
    try:
        yield manager
    finally:
        run_sync(manager.shutdown_kernel)(now=True)


def run(kernel: Any, notebook: Any) -> Any:
    """Executed in place, behind a cell that forgets what the notebook before it named."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = NotebookClient(notebook, km=kernel, timeout=120)
    try:
        client.execute()
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
    return notebook


@pytest.mark.processes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(kernel: Any, path: Path) -> None:
    notebook = run(kernel, nbformat.read(path, as_version=4))
    for cell in notebook.cells[1:]:
        if cell.cell_type == "code":
            assert cell.execution_count is not None
            assert not [output for output in cell.outputs if output.output_type == "error"]


@pytest.mark.processes
def test_a_notebook_that_fails_is_noticed(kernel: Any) -> None:
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in ("import setting", "assert not setting.FAST")
    ]
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(kernel, nbformat.v4.new_notebook(cells=cells))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_should_be(path: Path) -> None:
    """Whole, small, with a title, without outputs but for pictures, and without places of one
    machine."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    for cell in notebook.cells:
        assert cell.source.strip()
        for output in cell.get("outputs", ()):
            assert "image/png" in output.get("data", {})
    assert not ABSOLUTE.search(path.read_text(encoding="utf-8"))


def test_a_place_of_one_machine_is_noticed() -> None:
    for text in ("runs in /a/b", '"/usr/x"', "(/mnt/data/set)", "path=/opt/x"):
        assert ABSOLUTE.search(text), text
    for text in (
        "https://arxiv.org/abs/2401.15077",
        "runs/mine/package",
        "p/q and 3/4",
        "and/or",
        "</div>",
        "../shared/x",
    ):
        assert not ABSOLUTE.search(text), text


def test_there_is_a_notebook_for_each_question() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {
        "acceptance",
        "boosting",
        "compare",
        "first_head",
        "your_own_drafter",
    }
