"""The one kind of error a person can mend: it says what was given, what is needed and how to get it."""

from __future__ import annotations


class InputError(Exception):
    """Wrong input, settings or files. Doors print the message alone and leave with exit code 2."""
