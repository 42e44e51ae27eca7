"""Build the API reference from the docstrings: python scripts/docs.py [folder], build/api by
itself.

Anything that pdoc warns of, such as an annotation that it cannot read, ends it with exit code 1.

By pdoc, since it reads the package as it is: no second tree of pages to keep in step, no
configuration, one small program that is maintained. Sphinx would need all of that, and its own
markup in the docstrings.
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
    *(
        f"drafttrain.tree.{name}"
        for name in ("topology", "dynamic", "confident", "forest", "search", "merge", "share")
    ),
    *(f"drafttrain.drafter.{name}" for name in ("base", "borrowing", "heads")),
    *(
        f"drafttrain.drafter.{name}"
        for name in ("eagle1", "medusa", "hydra_heads", "ssm", "early_exit", "selfspec")
    ),
    *(f"drafttrain.drafter.{name}" for name in ("ensemble", "ngram", "suffix")),
    *(
        f"drafttrain.decoding.{name}"
        for name in ("plan", "loop", "speculator", "measure", "members", "exactness", "rules")
    ),
    *(
        f"drafttrain.decoding.rules.{name}"
        for name in ("match", "chain", "tree", "spectr", "approximate")
    ),
    # data, training, packages, reports
    "drafttrain.data.conversations",
    "drafttrain.data.datamodule",
    "drafttrain.training.boost",
    *(f"drafttrain.packaging.{name}" for name in ("reading", "writing", "collection")),
    *(f"drafttrain.reporting.{name}" for name in ("figures", "rows", "side_by_side")),
    "drafttrain.wiring.composing",
    "drafttrain.wiring.building",
)
"""What a program or a notebook may build on. Commands are not in it: their --help says all of
them."""


def build(folder: Path) -> list[str]:
    """Write the pages, index.html among them. Returns what pdoc had to warn of."""
    import pdoc

    modules = [
        importlib.import_module(name) for name in API
    ]  # What they warn of while they are imported is not about these pages.
    for module in modules:
        for name in getattr(module, "__all__", ()):
            setattr(
                module, name, getattr(module, name)
            )  # pdoc does not see what is looked up at first use
    words = []
    for module in sorted(modules, key=lambda module: not hasattr(module, "__path__")):
        words.append(module.__name__)
        if hasattr(module, "__path__"):
            # A package brings all that is in it; what is wanted of that is named by itself, further
            # behind.
            words.append(f"!{re.escape(module.__name__)}[.]")
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pdoc.pdoc(*words, output_directory=folder)
    return [str(one.message) for one in found]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "api"
    told = build(place)
    for line in told:
        print(line, file=sys.stderr)
    print(f"{len(API)} modules: {place / 'index.html'}")
    sys.exit(bool(told))
