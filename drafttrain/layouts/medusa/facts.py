"""What each engine makes of Medusa heads, and names that writing, checking and reading share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from drafttrain.layouts import engines
from drafttrain.layouts.engines import Engine, Reading
from drafttrain.layouts.inspection import Inspection

FILE = "medusa_lm_head.safetensors"
PLAIN = re.compile(r"(\d{1,3})\.(\d{1,2})\.linear\.(weight|bias)")
"""A block by FasterDecoding's names."""
BLOCK = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,2})\.(weight|bias)")
"""A block by vLLM's names."""


@dataclass(frozen=True, kw_only=True)
class Reads(Reading):
    skips_unknown: bool = True
    plain: bool = False
    """Does it read only FasterDecoding's names and files? Others read both."""
    sizes_by_config: bool = False
    """Must width and vocabulary size be in config.json, whose keys it renames?"""
    biases_by_flag: bool = False
    """Does it read biases only with medusa_fc_bias?"""
    token_map: bool = False
    """Does it look for a reduced vocabulary?"""
    one_head: bool = False
    """Does it read one projection for all heads, with original_lm_head?"""
    no_head: bool = False
    """Does it take the target's head where the file has no projection?"""
    one_block: bool = False
    """Does it repeat one block where a head has several?"""


READINGS: dict[Engine, Reads] = {
    engines.VLLM: Reads(
        method="medusa", sizes_by_config=True, biases_by_flag=True, token_map=True, one_head=True
    ),
    engines.MEDUSA: Reads(plain=True, no_head=True, one_block=True),
}


def bare(name: str) -> str:
    return name.replace("medusa_heads.", "").replace("medusa_head.", "")


def held(names: Iterable[str]) -> tuple[int, int] | None:
    """(heads, blocks of each) by the names, without a prefix, of a file's blocks; None where there
    are none."""
    found = [match for name in names if (match := BLOCK.fullmatch(name) or PLAIN.fullmatch(name))]
    if not found:
        return None
    heads, blocks = (1 + max(int(match[place]) for match in found) for place in (1, 2))
    return heads, blocks


def counts(inspection: Inspection[Reads], names: Iterable[str]) -> tuple[int | None, int | None]:
    """Heads, and blocks of each, as config.json says, with a fault where the file has others.

    Args:
        names: of the file's tensors, without a prefix.
    """
    config = inspection.config
    heads = "num_heads" if "num_heads" in config else "medusa_num_heads"
    layers = (
        "num_hidden_layers"
        if "num_hidden_layers" in config and heads == "num_heads"
        else "medusa_num_layers"
    )
    said = inspection.integer(config, heads), inspection.integer(config, layers, 1)
    there = held(names)
    for key, mine, own in zip((heads, layers), said, there or (None, None), strict=True):
        if mine is not None and own is not None and mine != own:
            inspection.add(
                "medusa-counts",
                f"{key} is {mine}{'' if key in config else ' where it is not given'}, the file has "
                f"{own}: write {key}: {own}, or get the directory again",
                fatal=key == layers or mine > own,
            )
    return said
