"""Decode prompts with vLLM, greedily, and report what it drafted and kept. Run by vLLM's own
Python, without drafttrain.

Usage: <vLLM's environment>/bin/python serve.py request.json answer.json

The request: `target` (its directory), `prompts` (lists of ids), `new` (tokens of each answer, stop
tokens do not end it), `dtype`, `context` (most tokens of a text), `speculative` (what
`--speculative-config` is given) or null for plain decoding. The answer: `texts` (ids of each
answer), `counters` (vLLM's own, of drafts), `tensors` (`read` and `unread` names of the drafter's
file), `seconds`, `version`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

COUNTERS = "vllm:spec_decode_num_"


def main(request: str, answer: str) -> None:
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    began = time.perf_counter()
    import vllm

    imported = time.perf_counter()
    more: dict[str, Any] = (
        {} if asked["speculative"] is None else {"speculative_config": asked["speculative"]}
    )
    engine = vllm.LLM(
        model=asked["target"],
        dtype=asked["dtype"],
        max_model_len=asked["context"],
        max_num_seqs=4,
        max_num_batched_tokens=max(2048, asked["context"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # else nothing is counted
        worker_extension_cls="worker.Loading",
        **more,
    )
    loaded = time.perf_counter()
    policy = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    outputs = engine.generate(prompts, policy, use_tqdm=False)
    done = time.perf_counter()
    tensors = None
    if asked["speculative"] is not None and "model" in asked["speculative"]:
        (tensors,) = engine.collective_rpc("tensors_read", args=(asked["speculative"]["model"],))
    found = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters(engine.get_metrics()),
        "tensors": tensors,
        "seconds": {"import": imported - began, "load": loaded - imported, "decode": done - loaded},
        "version": vllm.__version__,
    }
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def counters(metrics: Any) -> dict[str, Any]:
    """vLLM's counters of drafts without their common prefix; per_pos is a list."""
    found: dict[str, Any] = {}
    for metric in metrics:
        if metric.name.startswith(COUNTERS):
            values = getattr(metric, "values", None)
            found[metric.name.removeprefix(COUNTERS)] = (
                metric.value if values is None else list(values)
            )
    return found


if __name__ == "__main__":  # vLLM starts further processes, which import this file
    main(*sys.argv[1:])
