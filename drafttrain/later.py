"""torch, imported when it is first used.

Settings are checked by the files that compute with them, and a wrong one should not wait the
seconds that torch takes to import. A file that is needed to check settings imports torch from here,
and uses it within functions only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Later()
