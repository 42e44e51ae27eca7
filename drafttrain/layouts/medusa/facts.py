"""What each engine makes of Medusa heads, and names that writing, checking and reading share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drafttrain.layouts import engines
from drafttrain.layouts.engines import Engine, Reading

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
