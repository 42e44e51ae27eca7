"""Build the API reference from the docstrings: python scripts/docs.py [folder].

The folder is build/api by default.

Every warning of pdoc, such as an annotation that it cannot read, ends it with exit code 1.

It uses pdoc, which reads the package as it is: no second tree of pages to keep in step and no
configuration. Sphinx would need both, and its own markup in the docstrings.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
API = (
    "drafttrain",
    "drafttrain.flow",
    "drafttrain.errors",
    # from the target to the text
    "drafttrain.target.load",
    "drafttrain.target.model",
    "drafttrain.nn.sampling",
    "drafttrain.nn.losses",
    "drafttrain.nn.layers",
    "drafttrain.wiring.defaults",
    *(
        f"drafttrain.tree.{name}"
        for name in ("topology", "candidates", "dynamic", "confident", "forest", "search")
    ),
    *(f"drafttrain.tree.{name}" for name in ("merge", "share")),
    *(
        f"drafttrain.drafter.{name}"
        for name in ("base", "growing", "retrieval", "borrowing", "heads", "inside")
    ),
    *(f"drafttrain.drafter.{name}" for name in ("remembered", "standalone")),
    *(
        f"drafttrain.drafter.{name}"
        for name in ("eagle1", "mtp", "medusa", "hydra_heads", "ssm", "early_exit", "selfspec")
    ),
    *(f"drafttrain.drafter.{name}" for name in ("ensemble", "ngram", "suffix")),
    *(
        f"drafttrain.decoding.{name}"
        for name in ("plan", "loop", "record", "speculator", "measure", "members", "exactness")
    ),
    "drafttrain.decoding.rules",
    *(
        f"drafttrain.decoding.rules.{name}"
        for name in ("match", "chain", "tree", "spectr", "approximate")
    ),
    # data, training, packages, reports
    "drafttrain.data.conversations",
    "drafttrain.data.datamodule",
    *(f"drafttrain.training.{name}" for name in ("boost", "tuning", "references")),
    *(f"drafttrain.packaging.{name}" for name in ("reading", "writing", "collection")),
    *(f"drafttrain.reporting.{name}" for name in ("figures", "rows", "side_by_side")),
    "drafttrain.wiring.composing",
    "drafttrain.wiring.building",
)
"""Modules that a program or a notebook may build on. Commands are not in it: their --help has
everything."""


def build(folder: Path) -> list[str]:
    """Write the pages, including index.html. Returns the warnings of pdoc."""
    try:
        import pdoc
    except ImportError:
        raise SystemExit("docs.py needs pdoc: pip install -e '.[dev]'") from None

    # Warnings during these imports are not about the pages.
    modules = [importlib.import_module(name) for name in API]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            # pdoc does not see names that are looked up at first use.
            setattr(module, name, getattr(module, name))
    words = []
    for module in sorted(modules, key=lambda module: not hasattr(module, "__path__")):
        words.append(module.__name__)
        if hasattr(module, "__path__"):
            # A package brings all of its modules; those to be shown are named later, one by one.
            words.append(f"!{re.escape(module.__name__)}[.]")
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pdoc.pdoc(*words, output_directory=folder)
    return [str(one.message) for one in found]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "api"
    warned = build(place)
    for line in warned:
        print(line, file=sys.stderr)
    print(f"{len(API)} modules: {place / 'index.html'}")
    sys.exit(bool(warned))
