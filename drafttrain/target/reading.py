"""Reading a target from a directory or the hub: its config, its tokenizer, its weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafttrain.checks import path_of, shown
from drafttrain.errors import InputError, first_line, panicked
from drafttrain.target.tokenising import PROBE

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names that families have for the number of their layers."""
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
"""A directory with none of these files has no tokenizer."""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers; its settings are restored afterwards. The bars of a
    download are another library's."""
    from transformers.utils import logging as theirs

    before = theirs.set_tqdm_hook(lambda _, args, settings: theirs.EmptyTqdm(*args, **settings))
    try:
        yield
    finally:
        theirs.set_tqdm_hook(before)


def _why(local: Path, error: BaseException) -> str:
    """Why a config could not be read, as far as that is known."""
    said = first_line(error)
    if local.exists():
        return said
    return f"there is no such directory here, and as a name on the hub it could not be had ({said})"


def read_config(path: str, *, revision: str | None, trust_remote_code: bool) -> tuple[str, Any]:
    """A target's directory or hub id, and its config. Whatever can be refused before weights are
    read is refused here."""
    from transformers import AutoConfig

    if not path:
        raise InputError("target.path is empty: give the directory or the hub id of a causal LM")
    local = path_of("target.path", path)
    if local.exists() and not (local / "config.json").is_file():
        raise InputError(
            f"target.path={path} has no config.json: give the directory of a transformers model"
        )
    if local.is_dir() and (local / "drafter.safetensors").exists():
        raise InputError(
            f"target.path={path} is a drafttrain package, not a target: give the target it was "
            "trained for"
        )
    if not local.exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise InputError(f"target.path={path} does not exist")
    where = str(local) if local.exists() else path
    if local.is_dir():
        check_layers(local, f"target {path}")
    try:
        config = AutoConfig.from_pretrained(
            where, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"target {path} brings its own Python code, which is not run unless you set "
                "target.trust_remote_code=true (read the code first)"
            ) from error
        raise InputError(f"target {path} cannot be read: {_why(local, error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"target {path} is an encoder-decoder ({config.model_type}): give a decoder-only "
            "causal LM"
        )
    if not trust_remote_code and not _is_causal(config):
        raise InputError(
            f"target {path} ({config.model_type}) has no causal language-model class in "
            "transformers: give a decoder-only causal LM"
        )
    headless = [
        name
        for name in config.architectures or ()
        if name.endswith("Model") or "Classification" in name or "Embedding" in name
    ]
    if config.architectures and len(headless) == len(config.architectures):
        raise InputError(
            f"target {path} was saved as {headless[0]}, without a causal head: give the causal LM "
            "itself"
        )
    return where, config


def check_layers(folder: Path, what: str) -> None:
    """Raise InputError if config.json describes more layers than its folder's files have tensors:
    building them could take for ever.

    Files that cannot be read are left to the code that reads them.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        tensors = 0
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                tensors += len(file.keys())
    except (SafetensorError, OSError, ValueError, RecursionError):
        return
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    counts = [part.get(name) for part in parts if isinstance(part, dict) for name in _LAYERS]
    layers = max((count for count in counts if type(count) is int), default=0)
    if layers > tensors > 0:
        raise InputError(
            f"{what}: its config.json describes {layers} layers, its files hold {tensors} tensors: "
            "get it again"
        )


def _is_causal(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def read_model(path: str, where: str, **settings: Any) -> Any:
    """A causal LM with all its tensors; only safetensors is read.

    Args:
        path: its name in messages.
        where: a directory or hub id, as of `read_config`.
        settings: of `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    try:
        with without_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                where, use_safetensors=True, output_loading_info=True, **settings
            )
    except Exception as error:
        raise InputError(f"target {path} cannot be loaded: {first_line(error)}") from error
    lost = sorted(report.get("missing_keys", ()))
    if lost:
        raise InputError(
            f"target {path}: its files lack {len(lost)} tensors, the first is {lost[0]}"
        )
    return model


def has_tokenizer(where: str) -> bool:
    """Is a tokenizer to be expected there?"""
    folder = Path(where)
    return not folder.is_dir() or any((folder / file).is_file() for file in _TOKENIZER)


def _settle(tokenizer: Any) -> None:
    """Let a text have the same ids every time: merges that are dropped by chance are for
    training."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is not None and getattr(model, "dropout", None):
        model.dropout = None


def read_tokenizer(
    where: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """A target's tokenizer, once it has read and written a few words.

    Raises: InputError if it cannot be read, or does not work.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, revision=revision, trust_remote_code=trust_remote_code
        )
        _settle(tokenizer)
        ids = tokenizer(PROBE)["input_ids"]
        if not all(type(one) is int for one in ids) or not isinstance(tokenizer.decode(ids), str):
            raise ValueError("it does not turn a text into integers")
        for special in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
            if special is not None and type(special) is not int:
                raise ValueError(f"a special token has the id {shown(special)}")
    except BaseException as error:
        if not isinstance(error, Exception) and not panicked(error):
            raise
        raise InputError(
            f"target {where}: its tokenizer cannot be read: {first_line(error)}"
        ) from error
    return tokenizer
