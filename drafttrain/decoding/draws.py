"""How many draws a test of exactness needs."""

from __future__ import annotations

from drafttrain.errors import InputError

LEAST_DRAWS = 40
"""Draws that a prompt needs at least."""


def check_draws(draws: object, prompts: object) -> None:
    """Raises: InputError for a number of draws or prompts that no test can be made of."""
    if type(prompts) is not int or prompts < 1:
        raise InputError(f"exactness_prompts={prompts}: needs an integer of at least 1")
    if type(draws) is not int or draws < LEAST_DRAWS * prompts:
        raise InputError(
            f"exactness_draws={draws}: {prompts} prompts need an integer of at least "
            f"{LEAST_DRAWS * prompts}, {LEAST_DRAWS} for each"
        )
