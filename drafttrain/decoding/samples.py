"""A few answers with every pass of the target in them: which tokens were accepted drafts, which it
chose itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.decoding.loop import Output
from drafttrain.decoding.measure import Measurement
from drafttrain.decoding.unfolding import Unfolding
from drafttrain.target.model import Target


def samples_of(
    target: Target, prompts: Sequence[Sequence[int]], measured: Measurement, count: int
) -> dict[str, Any] | None:
    """The first answers of a measurement, plain JSON values; None where none is wanted or was kept.

    Args:
        prompts: those that were measured, more may follow.
    Returns: how they were decoded, and `answers`, each with its `prompt`, how it ended (`finish`),
        and its `passes`, the prefill first. Of each: `tokens`, how many it wrote; `drafts`, the
        texts of those that were accepted drafts; `own`, the text of the one that the target chose
        after them, where it is there. `written_in` is "text"; "ids" where the target has no
        tokenizer.
    """
    plan, kept = measured.plan, measured.outputs[:count]
    if not kept:
        return None
    return {
        "tree": plan.tree.title,
        "temperature": plan.policy.temperature,
        "rule": plan.rule_name,
        "guarantee": measured.guarantee or plan.guarantee,
        "written_in": "ids" if target.tokenizer is None else "text",
        "answers": [
            {
                "prompt": _prompt(target, prompt),
                "finish": output.finish,
                "passes": _passes(target, output),
            }
            for prompt, output in zip(prompts, kept, strict=False)
        ],
    }


def _prompt(target: Target, ids: Sequence[int]) -> str:
    if target.tokenizer is None:
        return " ".join(map(str, ids))
    return target.tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _passes(target: Target, output: Output) -> list[dict[str, Any]]:
    texts, passes, start = _texts(target, output.ids), [], 0
    for emitted, drafted in output.runs:
        part = texts[start : start + emitted]
        passes.append({"tokens": emitted, "drafts": part[:drafted], "own": "".join(part[drafted:])})
        start += emitted
    return passes


def _texts(target: Target, ids: Sequence[int]) -> list[str]:
    """Of each token what it adds to the text: the token that completes a character has all of it, a
    special token has none."""
    if target.tokenizer is None:
        return [f" {token}" for token in ids]
    unfolding, texts = Unfolding(target.tokenizer), list[str]()
    for token in ids:
        found = unfolding.add(token, False)
        texts.append(found[0] if found else "")
    rest = unfolding.rest()
    if rest:
        texts[-1] += rest[0]
    return texts
