"""Directories that the library speculators writes, as vLLM's adapter reads them: the head's own
keys at the top level, the block's in `transformer_layer_config`, the target in
`speculators_config`, so that vLLM serves the directory as if it were a model.

Read from: speculators 0.9 models/, and 0.1 models/eagle.py for EAGLE-1; vLLM 0.32
transformers_utils/configs/speculators.
"""

from __future__ import annotations

from pathlib import PureWindowsPath
from typing import Any

from drafttrain.layouts import dflash, eagle3, engines
from drafttrain.layouts.directory import Directory
from drafttrain.layouts.eagle3 import nested
from drafttrain.layouts.eagle3.facts import SPECULATORS_TYPE as TYPE
from drafttrain.layouts.engines import Reading
from drafttrain.layouts.finding import Finding
from drafttrain.layouts.inspection import Inspection
from drafttrain.layouts.layout import Layout, known

READINGS = {engines.VLLM: Reading()}
"""vLLM makes an EAGLE-3 or DFlash head of it and loads that."""
SERVED = ("eagle3", "peagle", "dflash", "dspark")
"""Types that vLLM's adapter knows."""


def recognises(head: Directory) -> bool:
    return TYPE in head.config or "speculators_config" in head.config


def check(inspection: Inspection[Reading]) -> None:
    config = inspection.config
    kind = config.get(TYPE)
    _check_keys(inspection)
    inspection.common_values(config)
    if kind == "mtp":
        inspection.add(
            "mtp-not-stitched",
            "a directory of type mtp is not served as it is: stitch it into the target's own "
            "checkpoint",
        )
        return
    if kind not in SERVED:
        adopted = any(kind in layout.speculators for layout in known())
        inspection.add(
            "speculators-type",
            f"{TYPE} is {str(kind)[:40]}, vLLM's adapter knows {', '.join(SERVED)}"
            + ("; import it with drafttrain.adopt and export it to=vllm" if adopted else ""),
        )
        return
    if not isinstance(config.get(nested.BLOCK), dict):
        return
    head = inspection.head
    plain = Directory(head.path, _plain(config), head.tensors, head.pickled)
    if kind in ("eagle3", "peagle"):
        if kind == "eagle3" and "norm_before_residual" not in config:
            inspection.add(
                "norm-order-unsaid",
                "norm_before_residual is not given: vLLM takes true, the library false; write "
                "what it was trained with",
            )
        if kind == "peagle":
            plain.config["parallel_drafting"] = True
        inspection.findings += _as_eagle3(inspection, plain)
    else:
        if kind == "dflash" and config.get("sliding_window_non_causal") is not True:
            inspection.add(
                "dflash-causal",
                "sliding_window_non_causal is not true: vLLM makes all layers causal, those of "
                "full attention too; write true",
            )
        inspection.findings += _as_dflash(inspection, plain, kind == "dspark")


def _as_eagle3(inspection: Inspection[Reading], plain: Directory) -> list[Finding]:
    reads = eagle3.LAYOUT.engines().get(inspection.engine, eagle3.READINGS[engines.VLLM])
    inner = Inspection(plain, inspection.engine, reads, inspection.target)
    eagle3.check(inner, complete=True)
    # SGLang's numbering has no place in this layout.
    return [finding for finding in inner.findings if finding.name != "layers-one-convention"]


def _as_dflash(inspection: Inspection[Reading], plain: Directory, spark: bool) -> list[Finding]:
    reads = dflash.LAYOUT.engines().get(inspection.engine, dflash.READINGS[engines.VLLM])
    inner = Inspection(plain, inspection.engine, reads, inspection.target)
    dflash.check(inner, spark=spark)
    return inner.findings


def _check_keys(inspection: Inspection[Reading]) -> None:
    """What the adapter needs, and what makes it find another target."""
    config = inspection.config
    block = config.get("speculators_config")
    block = block if isinstance(block, dict) else {}
    methods, verifier = block.get("proposal_methods"), block.get("verifier")
    first = (
        methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    )
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    places = {
        TYPE: config.get(TYPE),
        nested.BLOCK: config.get(nested.BLOCK),
        "speculators_config.proposal_methods[0].speculative_tokens": first.get(
            "speculative_tokens"
        ),
        "speculators_config.verifier.name_or_path": name,
    }
    if lacking := [key for key, value in places.items() if value is None]:
        inspection.add(
            "speculators-key-missing", f"{', '.join(lacking)} not given: vLLM does not start"
        )
    local = isinstance(name, str) and (
        name.startswith((".", "~", "/")) or PureWindowsPath(name).is_absolute()
    )
    if local:
        inspection.add(
            "verifier-path",
            f"verifier.name_or_path is {str(name)[:80]}, a path of some machine: write the "
            "target's name",
            fatal=False,
        )
    if "model_type" in config:
        inspection.add(
            "speculators-model-type",
            "model_type at the top level: readers take it for that model",
            fatal=False,
        )
    if config.get("draft_vocab_size") is None:
        inspection.add(
            "draft-vocab-missing", "draft_vocab_size is not given: write it, whatever it is"
        )


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config that vLLM's adapter makes of it."""
    kind = config[TYPE]
    if kind in ("eagle3", "peagle"):
        return nested.plain(config)
    found = nested.shared(config)
    ids = config.get("aux_hidden_state_layer_ids")
    fits = isinstance(ids, list) and all(type(i) is int for i in ids)
    found["architectures"] = ["Qwen3DSparkModel" if kind == "dspark" else "DFlashDraftModel"]
    found |= {
        "model_type": "qwen3",
        "target_layer_ids": [i - 1 for i in ids] if fits and ids else ids,
    }
    # Whether sliding layers are causal is given by sliding_window_non_causal.
    found["dflash_config"] = {"mask_token_id": config.get("mask_token_id"), "causal": False}
    for key in (
        "block_size",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ):
        if key in config:
            found[key] = config[key]
    return found


LAYOUT = Layout(
    name="speculators",
    what="directories of the library speculators",
    turn=10,
    readings=READINGS,
    recognises=recognises,
    check=check,
)
