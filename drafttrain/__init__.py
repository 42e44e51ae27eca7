"""drafttrain trains the draft side of speculative decoding. `load` opens a package; everything else
is reached by module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafttrain.packaging.reading import load

    __version__: str

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """Looked up at first use, so that `import drafttrain` by itself loads neither torch nor
    transformers."""
    if name == "load":
        from drafttrain.packaging.reading import load

        return load
    if name == "__version__":
        from drafttrain.version import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
