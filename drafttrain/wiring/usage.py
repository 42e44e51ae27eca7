"""What a door's `--help` prints: its choices, its settings, and what their comments say."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence

from hydra import initialize_config_dir
from omegaconf import OmegaConf

from drafttrain.wiring.composing import group_options, invocation_of, search_path
from drafttrain.wiring.conf import comments_of, conf_dir
from drafttrain.wiring.names import join


def help_text(
    name: str,
    about: str | None,
    overrides: Sequence[str],
    text: Sequence[str],
    config_dir: str | None,
    *,
    sweeps: bool = False,
) -> str:
    invocation = invocation_of(
        name, overrides, text=text, config_dir=config_dir, check_missing=False
    )
    search = search_path(config_dir)
    lines = [
        inspect.cleandoc(about or name),
        "",
        f"Usage: python -m drafttrain.{name} [key=value ...] [--cfg job [--resolve]] "
        "[--config-dir DIR]",
    ]
    if sweeps:
        lines.append(f"       python -m drafttrain.{name} -m [key=value,value,... ...]   # a sweep")
    lines.append("")
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=name):
        if invocation.choices:
            lines.append("Choices (group=choice; * is chosen now)")
            for group, chosen in sorted(invocation.choices.items()):
                picked = chosen if isinstance(chosen, list) else [chosen]
                shown = join(
                    ("*" if option in picked else "") + option
                    for option in group_options(group, search)
                )
                lines.append(f"  {group}: {shown}")
            lines.append("")
    lines.append("Settings (section.key=value; ??? must be given)")
    said = comments_of(name, invocation.choices)
    parents: list[str] = []
    for line in OmegaConf.to_yaml(invocation.config).splitlines():
        match = re.match(r"^( *)([\w-]+):", line)
        if match:
            parents = [*parents[: len(match.group(1)) // 2], match.group(2)]
            meaning = said.get(".".join(parents), "")
            indent = f"  {match.group(1)}# "
            lines += textwrap.wrap(meaning, 118, initial_indent=indent, subsequent_indent=indent)
        lines.append(f"  {line}")
    return "\n".join(lines)
