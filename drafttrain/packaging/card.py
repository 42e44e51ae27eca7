"""The model card of a package, and the two files that let transformers decode with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from drafttrain.decoding.plan import TUNED, UNKEPT, Plan
from drafttrain.target.change import words
from drafttrain.target.fingerprint import mode_settings
from drafttrain.target.naming import HUB_IDS
from drafttrain.tree.confident import Confident
from drafttrain.tree.dynamic import Dynamic
from drafttrain.tree.forest import Forest
from drafttrain.tree.topology import Growth

_GENERATE = '''\
"""Speculative decoding with this package, called by transformers:

    model.generate(**inputs, custom_generate="<this package>", trust_remote_code=True, \
max_new_tokens=128)

{text}
What would change the text and cannot be honoured is refused.
"""

from drafttrain.packaging.hf_generate import generate

__all__ = ["generate"]
'''

_OWN = "The text is the one that `model.generate` gives without it."
_TUNED = """\
The text is that of the tuned model: this package holds an adapter, which is added to a copy of \
the model's weights. It is not the
text that `model.generate` gives without it. The model itself is not changed."""

REQUIREMENTS = "drafttrain\n"

_GUARANTEES = {
    "greedy": "the same tokens as the target's greedy decoding",
    "distribution": "the same distribution as sampling from the target",
    "approximate": "none: the text may differ from the target's",
    UNKEPT: "none: the text was seen to differ from the target's",
}

_BORROWED = "embedding and output head are the target's and are not in this package."
_AS_MODEL = "`ssm/` is the drafter as a language model by itself."
_ASSISTANT = """\
Only the drafter, in transformers without drafttrain:
```python
assistant = AutoModelForCausalLM.from_pretrained("path/to/this/package/ssm")
model.generate(**inputs, max_new_tokens=128, assistant_model=assistant)
```
"""

_TEXT = """\
---
library_name: drafttrain
tags: [speculative-decoding, {kind_tag}]{front}
---
# {kind} drafter for {target}

{guesser} the next tokens of **{target}** ({model_type}). The target checks the guesses in one pass
and keeps those it would have written itself, so its text is the same and takes fewer passes. This
package works with no other target: loading compares fingerprints and refuses others.
{tuned}
{facts}

## Measured
{table}

`tau` is tokens written per target pass, over all rounds, the target's own included; `mean of
prompts` is the mean of the prompts' own taus; `accept@k` is how often the k-th
drafted token is kept, given that those before it were; `speed` is plain decoding's seconds per
token divided by the drafter's, in the same loop, on the same prompts, in turn. Brackets are 95 %
intervals over prompts. {settings}

{kinds}

{guarantees}
In low precision a pass over several tokens can round differently from a pass over one, so that
near-ties may be decided differently.

## Use
```python
import drafttrain
from drafttrain.target import load

target = {loading}
speculator = drafttrain.load("path/to/this/package", target)
outputs, tally = speculator.generate([prompt_ids], max_new_tokens=128)
for ids, accepted in speculator.stream(prompt_ids, max_new_tokens=128): ...
```
On the command line: `python -m drafttrain.generate package=path/to/this/package prompt="..."`

In transformers, with drafttrain installed. This runs the code in `custom_generate/`: read it before
you trust it.
```python
model.generate(
    **inputs, max_new_tokens=128, custom_generate="path/to/this/package", trust_remote_code=True
)
```
{assistant}By default it decodes with {plan} (`decoding.yaml`).

## Licence
{licence}
"""


_CHANGED = """
**This package changes the target.** Drafter and target were trained together, the target by an
adapter of rank {rank} ({parameters:,} parameters on {linears}), which is in `adapter.safetensors`.
Loading adds it to a copy of the target's weights; the target given is not altered. The guarantees
below are relative to this tuned target: its text is not the original's. {change}
"""


def generate_file(*, tuned: bool) -> str:
    """`custom_generate/generate.py` of a package."""
    return _GENERATE.replace("{text}", _TUNED if tuned else _OWN)


def card(
    config: dict[str, Any], metrics: dict[str, Any], plan: Plan, *, as_model: bool = False
) -> str:
    """The README of a package, made from its config and metrics.

    Args:
        as_model: the package holds the drafter as a directory of transformers.
    """
    target = config["target"]
    kind = config["drafter"]["_target_"].rpartition(".")[2]
    name, licence = target["name"], target["licence"]
    learned, corpus = _origin(config)
    rows = metrics["rows"]
    text = _TEXT.format(
        kind=kind,
        kind_tag=kind.lower(),
        target=name,
        model_type=target["model_type"],
        front=_front(name, licence if learned or corpus else None),
        guesser="A small model that guesses" if learned else "Settings of a drafter that guesses",
        tuned=_tuned(config.get("adapter"), metrics.get("target_change")),
        facts="\n".join(f"- {fact}" for fact in _facts(config, as_model)),
        table=_table(rows)
        if rows
        else "Nothing has been measured yet: run `python -m drafttrain.evaluate`.",
        settings=_settings(metrics.get("settings") or {}),
        kinds=_kinds(rows),
        guarantees=_guaranteed(rows),
        loading='load.smollm2(dtype="auto", device="auto", attention="sdpa")'
        if name == "smollm2"
        else 'load.hf("path/or/id/of/the/target", dtype="auto", device="auto", attention="sdpa")',
        plan=describe(plan),
        assistant=_ASSISTANT if as_model else "",
        licence=_licence(config),
    )
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", text))


def _origin(config: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether anything was trained, and the name of the conversations that drafts are copied
    from."""
    corpora = [
        node["corpus"] for node in (config["drafter"], *_members(config)) if node.get("corpus")
    ]
    return bool(config["shape"]["parameters"]), " and ".join(
        dict.fromkeys(map(str, corpora))
    ) or None


def _members(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of each drafter of an ensemble; none of any other drafter."""
    found: list[dict[str, Any]] = config["drafter"].get("members", [])
    return found


def _facts(config: dict[str, Any], as_model: bool) -> list[str]:
    """What the drafter is, a sentence or two each."""
    shape, length = config["shape"], config["trained_length"]
    learned, corpus = _origin(config)
    if "skip_attention" in config["drafter"]:
        return [*_left_out(config["drafter"]), _vocabulary(shape)]
    kinds = [node["_target_"].rpartition(".")[2] for node in _members(config)]
    together = [
        f"Drafters that draft side by side: {', '.join(kinds)}. Their trees are merged and checked "
        "in one pass."
    ]
    if not learned:
        more = f", or in the conversations of {corpus} in this package" if corpus else ""
        return [
            *(together if kinds else []),
            "No weights: nothing was trained. Drafts are copied from what followed earlier in "
            f"the same text, prompt and answer{more}.",
            "Where the end of the text has not occurred before, nothing is drafted.",
            *_remembered(config),
        ]
    return [
        *(together if kinds else []),
        f"{shape['parameters']:,} trained parameters, stored as {shape['dtype']}; "
        f"{_AS_MODEL if as_model else _BORROWED}",
        _vocabulary(shape),
        f"Trained on rows of at most {length:,} tokens. In longer texts it still drafts and the "
        "text is still the target's, but fewer drafts may be kept."
        if length
        else "The length of the rows it was trained on was not recorded.",
        *_mode(config),
        *_remembered(config),
    ]


def _mode(config: dict[str, Any]) -> list[str]:
    """With which arguments of the chat template it was trained, where there were any."""
    given = mode_settings(config["target"]["fingerprint"])
    if not given:
        return []
    return [
        f"Trained with the chat template's arguments `{given}`. With others the text is still the "
        "target's, but fewer drafts may be kept."
    ]


def _remembered(config: dict[str, Any]) -> list[str]:
    """Of a drafter that drafts from what it decoded for other requests."""
    given = [node.get("remember") for node in (config["drafter"], *_members(config))]
    tokens = max((one for one in given if type(one) is int), default=0)
    if not tokens:
        return []
    return [
        "While a process runs, drafts also come from what was decoded in it before: the latest "
        f"{tokens:,} tokens of prompts and answers. Requests that must not speed each other up "
        "need separate processes. Each measurement started without any."
    ]


def _vocabulary(shape: dict[str, Any]) -> str:
    if shape["draft_vocab"] == shape["vocab_size"]:
        return f"Drafts from all {shape['vocab_size']:,} tokens of the target's vocabulary."
    return (
        f"Drafts from {shape['draft_vocab']:,} of the target's {shape['vocab_size']:,} tokens; the "
        "others are never drafted."
    )


def _left_out(drafter: dict[str, Any]) -> list[str]:
    """Of a drafter that is the target without some of its sub-layers."""
    named = {name: drafter[f"skip_{name}"] for name in ("attention", "mlp")}
    left_out = [
        f"{'MLP' if name == 'mlp' else name} of layers {', '.join(map(str, layers))}"
        for name, layers in named.items()
        if layers
    ]
    return [
        "No weights: nothing was trained. The target itself drafts, with some of its sub-layers "
        "left out.",
        f"Left out, layers counted from 0: {'; '.join(left_out) or 'nothing'}.",
    ]


def _licence(config: dict[str, Any]) -> str:
    if not any(_origin(config)):
        return "Nothing in this package was learned from the target or written by it."
    licence = config["target"]["licence"]
    if licence:
        return (
            f"The target is under {licence}. A drafter made from its answers is subject to that "
            "licence's terms too."
        )
    return (
        "The target's licence was not recorded: see the target. It may also apply to a drafter "
        "made from its answers."
    )


def _tuned(adapter: dict[str, Any] | None, change: Any) -> str:
    """How joint training changed the target; nothing for other packages."""
    if adapter is None:
        return ""
    try:
        measured = f"Measured: {words(change)}."
    except (LookupError, TypeError, ValueError, OverflowError):
        measured = (
            "How far it is from the original was not measured: `python -m drafttrain.evaluate` "
            "measures it."
        )
    linears = ", ".join(f"`{name}`" for name in adapter["linears"])
    return _CHANGED.format(
        rank=adapter["rank"], parameters=adapter["parameters"], linears=linears, change=measured
    )


def _front(name: str, licence: str | None) -> str:
    """Lines of the card's front matter that name the target, where they can be right."""
    hub = HUB_IDS.get(name, name if "/" in name else None)
    lines = [f"base_model: {json.dumps(hub, ensure_ascii=False)}"] if hub else []
    lines += [f"license: {json.dumps(licence.lower())}"] if licence else []
    return "".join(f"\n{line}" for line in lines)


def _shape(tree: Growth) -> str:
    if not tree.size:
        return "no drafts"
    if isinstance(tree, Forest):
        return "; ".join(
            f"{_shape(one)} by member {number}" for number, one in enumerate(tree.trees, start=1)
        )
    if isinstance(tree, Confident):
        return (
            f"a chain of at most {tree.size}, ended where the drafter's most likely token has less "
            f"than {tree.stop_below:g}"
        )
    if tree.is_chain:
        return f"a chain of {tree.size}"
    if isinstance(tree, Dynamic):
        return (
            f"a dynamic tree of {tree.size} drafts, at most {tree.max_depth} deep (top_k "
            f"{tree.top_k})"
        )
    return f"a tree of {tree.size} drafts, {tree.max_depth} deep"


def describe(plan: Plan) -> str:
    """A plan in words."""
    shape = _shape(plan.tree) if plan.tree.size else "no drafts (plain decoding)"
    policy = plan.policy
    reading = [
        f"repetition_penalty {policy.repetition_penalty:g}" * (policy.repetition_penalty != 1),
        f"min_new_tokens {policy.min_new_tokens}" * bool(policy.min_new_tokens),
        "some logits biased" * bool(policy.logit_bias),
    ]
    if policy.greedy:
        return ", ".join([shape, "greedily", *filter(None, reading)])
    filters = [
        f"top_k {policy.top_k}" * bool(policy.top_k),
        f"top_p {policy.top_p:g}" * (policy.top_p < 1),
        f"min_p {policy.min_p:g}" * bool(policy.min_p),
    ]
    words = [shape, f"at temperature {policy.temperature:g}", *filter(None, [*filters, *reading])]
    return ", ".join(words)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| temperature | drafts | rule | tau | mean of prompts | accept@1, 2, ... | speed | "
        "prompts | rounds | guarantee |",
        "|" + " --- |" * 10,
    ]
    for row in rows:
        cells = (
            _number(row.get("temperature"), "g"),
            _drafts(row),
            str(row.get("rule", "?")),
            _ranged(row.get("tau"), row.get("tau_interval")),
            _ranged(row.get("tau_prompt_mean"), row.get("tau_prompt_mean_interval")),
            " ".join(_number(value) for value in _list(row.get("accept_at"))) or "-",
            _ranged(row.get("speedup"), row.get("speedup_interval"), "x"),
            str(row.get("prompts", "?")),
            str(row.get("rounds", "?")),
            str(row.get("guarantee", "?")),
        )
        lines.append(_line(cells))
    slower = [row for row in rows if _is_number(row.get("speedup")) and row["speedup"] < 1]
    if slower:
        lines += [
            "",
            f"{len(slower)} of these decode **slower** than no drafts at all (speed below 1).",
        ]
    return "\n".join(lines)


def _drafts(row: dict[str, Any]) -> str:
    growth = str(row.get("growth", "?"))
    return f"{growth} {row['nodes']}" if row.get("nodes") else growth


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _kinds(rows: list[dict[str, Any]]) -> str:
    """tau by kind of task, of the way of drafting that has the highest; empty where nothing was
    counted by kind."""
    known = [row for row in rows if _is_number(row.get("tau")) and _by_kind(row)]
    if not known:
        return ""
    best = max(known, key=lambda row: row["tau"])
    at = _number(best.get("temperature"), "g")
    lines = [
        f"By kind of task, with {_drafts(best)} at temperature {at}:",
        "",
        "| kind | tau | mean of prompts | prompts | rounds |",
        "|" + " --- |" * 5,
    ]
    for one in _by_kind(best):
        cells = (
            str(one.get("category", "?")),
            _ranged(one.get("tau"), one.get("tau_interval")),
            _ranged(one.get("tau_prompt_mean"), one.get("tau_prompt_mean_interval")),
            str(one.get("prompts", "?")),
            str(one.get("rounds", "?")),
        )
        lines.append(_line(cells))
    return "\n".join(lines)


def _by_kind(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in _list(row.get("by_category")) if isinstance(one, dict)]


def _is_number(value: Any) -> bool:
    """One that can be written in a table: a file may hold anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _number(value: Any, form: str = ".2f") -> str:
    return format(value, form) if _is_number(value) else "-"


def _ranged(value: Any, interval: Any, unit: str = "") -> str:
    if not _is_number(value):
        return "-"
    shown = f"{value:.2f}{unit}"
    ends = _list(interval)
    if len(ends) == 2 and all(map(_is_number, ends)):
        shown += f" [{ends[0]:.2f}, {ends[1]:.2f}]"
    return shown


def _settings(settings: Any) -> str:
    if not isinstance(settings, dict):
        return ""
    listed = [
        f"{name} {value}"
        for name, value in settings.items()
        if isinstance(value, str | int | float | bool)
    ]
    return f"Measured with: {', '.join(listed)}." if listed else ""


def _meaning(name: str) -> str:
    plain = name.removesuffix(TUNED)
    meaning = _GUARANTEES.get(plain, plain)
    return meaning if plain == name else f"{meaning}, the target being the tuned one"


def _guaranteed(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(str(row.get("guarantee")) for row in rows if row.get("guarantee")))
    return (
        "Guarantee: " + "; ".join(f"*{name}* is {_meaning(name)}" for name in names) + "."
        if names
        else ""
    )
