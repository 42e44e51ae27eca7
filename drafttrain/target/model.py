"""The frozen target: any decoder-only `transformers` causal LM behind one small interface.

It gives embeddings, the map from the last hidden state to logits, chosen layers' outputs, one causal pass over training
rows, and one cached pass over a token tree with an ancestor mask and depth positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.flow import Features, Needs
from drafttrain.nn.attention import as_attention, check_backend
from drafttrain.nn.cache import KVCache
from drafttrain.target import fingerprint

if TYPE_CHECKING:
    from drafttrain.target.adapter import Adapter


@dataclass(frozen=True)
class Pass:
    """One cached pass over new tokens."""

    hidden: Tensor
    """(b s d) last hidden state of each new token, after the final norm."""
    layers: dict[int, Tensor]
    """{l: (b s d)} outputs of the layers asked for."""


class Target:
    """A frozen causal LM. Not an `nn.Module`: whoever holds it neither saves it nor wraps it nor trains it."""

    def __init__(self, model: Any, tokenizer: Any | None, name: str) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config: Any = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.base: Any = getattr(model, model.base_model_prefix, model)
        self.embedding: Any = model.get_input_embeddings()
        self.output: Any = model.get_output_embeddings()
        if self.output is None or self.base is model:
            raise InputError(
                f"target {name} ({type(model).__name__}) has no causal language-model head: "
                "give a decoder-only causal LM (AutoModelForCausalLM)"
            )
        self.attention: str = model.config._attn_implementation
        check_backend(self.attention)
        self.decoder_layers = self._find_layers()
        self._windows = self._attention_windows()
        self._cache_word = "cache" if "cache" in inspect.signature(type(self.base).forward).parameters else "past_key_values"
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self._scale = self._logit_scale()
        self.adapter: Adapter | None = None
        """What joint training added to its weights; None for a target as it came."""
        self.original: Target | None = None
        """The target that it was tuned from."""
        self._probe()
        self._fingerprint: dict[str, str] | None = None

    # Facts ------------------------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the head: sizes come from the model, never from the tokenizer."""
        return self.output.weight.shape[0]

    @property
    def context(self) -> int:
        """Positions the target was built for."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End ids of the generation settings, the model and the tokenizer's end-of-turn token together."""
        found: list[int] = []
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            found += ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
        return tuple(dict.fromkeys(int(i) for i in found))

    @property
    def fingerprint(self) -> dict[str, str]:
        if self._fingerprint is None and self.original is not None and self.adapter is not None:
            self._fingerprint = {**self.original.fingerprint, fingerprint.ADAPTER: self.adapter.digest}
        if self._fingerprint is None:
            quantisation = getattr(self.model.config, "quantization_config", None)
            self._fingerprint = {
                "config": fingerprint.of_config(self.config),
                "weights": fingerprint.of_weights(self.model),
                "tokenizer": fingerprint.of_tokenizer(self.tokenizer),
                "chat_template": fingerprint.of_template(self.tokenizer),
                "quantisation": "none" if quantisation is None else fingerprint.digest(str(quantisation).encode()),
                "dtype": str(self.dtype).removeprefix("torch."),
            }
        return self._fingerprint

    # Parts ------------------------------------------------------------------------------------------------------
    def embed(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (... d), rows of the input embedding."""
        return nn.functional.embedding(ids, self.embedding.weight)

    def head(self, hidden: Tensor) -> Tensor:
        """(... d) last hidden state -> (... v) logits, with the target's own scaling and soft cap."""
        return self.finish_logits(self.output(hidden))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """The part of the head behind the matrix product; elementwise, so it serves chosen vocabulary rows too."""
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    # Passes -----------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def features(self, input_ids: Tensor, lengths: Tensor, needs: Needs) -> Features:
        """One causal pass over training rows padded on the right.

        Args:
            input_ids: (b s) int64.
            lengths: (b) real tokens per row. Padding stands behind the text, so causal attention never reads it.
        """
        del lengths
        with self._capture(needs.layers) as layers:
            out = self.base(input_ids=input_ids.to(self.device), use_cache=False)
        return Features(last_hidden=out.last_hidden_state if needs.last_hidden else None, layers=dict(layers))

    def hidden(self, input_ids: Tensor) -> Tensor:
        """(b s) int64 -> (b s d), the same pass's last hidden state, differentiable where gradients are on."""
        out: Tensor = self.base(input_ids=input_ids.to(self.device), use_cache=False).last_hidden_state
        return out

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(rows, capacity, self.device)

    @torch.inference_mode()
    def step(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        among: Tensor | None = None,
        depths: Tensor | None = None,
        layers: tuple[int, ...] = (),
    ) -> Pass:
        """Read s new tokens behind the committed ones; nothing is committed.

        Args:
            ids: (b s) int64.
            among: (b|1 s s) bool, which new tokens each new token sees; None means causal order.
            depths: (b|1 s) int64, position of each new token relative to the row's length; None means 0, 1, 2...
            layers: decoder layers whose outputs are wanted.
        """
        s = ids.shape[1]
        if among is None:
            among = torch.ones(1, s, s, dtype=torch.bool, device=ids.device).tril()
        if depths is None:
            depths = torch.arange(s, device=ids.device)[None]
        positions = cache.lengths[:, None] + depths  # b s
        mask = self._masks(cache, among, positions)
        with self._capture(layers) as outputs:
            out = self.base(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions.expand(ids.shape[0], -1),
                use_cache=True,
                **{self._cache_word: cache},
            )
        return Pass(hidden=out.last_hidden_state, layers=dict(outputs))

    # Inside -----------------------------------------------------------------------------------------------------
    def _masks(self, cache: KVCache, among: Tensor, positions: Tensor) -> Any:
        full = cache.mask(among)  # b 1 s used
        kinds = set(self._windows)
        if kinds == {None}:
            return self._as_attention(full)
        s, used = among.shape[-1], full.shape[-1]
        places = torch.arange(used, device=full.device)[None].expand(cache.rows, -1)  # b used
        fresh = places - cache.lengths[:, None]
        new = positions.expand(cache.rows, -1).gather(1, fresh.clamp(0, s - 1))
        key_positions = torch.where((fresh >= 0) & (fresh < s), new, places)  # b used
        distance = positions[:, :, None] - key_positions[:, None]  # b s used
        window = next(w for w in self._windows if w is not None)
        windowed = self._as_attention(full & (distance < window)[:, None])
        if None not in kinds:
            return windowed
        return {"full_attention": self._as_attention(full), "sliding_attention": windowed}

    def _as_attention(self, mask: Tensor) -> Tensor:
        return as_attention(mask, self.attention, self.dtype)

    @contextmanager
    def _capture(self, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Hooks on the chosen layers only; all hidden states are never held."""
        outputs: dict[int, Tensor] = {}
        handles = []
        for layer in layers:
            if not 0 <= layer < len(self.decoder_layers):
                raise InputError(f"layer {layer} asked for; target {self.name} has layers 0..{len(self.decoder_layers) - 1}")

            def hook(_module: nn.Module, _args: Any, output: Any, layer: int = layer) -> None:
                outputs[layer] = output[0] if isinstance(output, tuple) else output

            handles.append(self.decoder_layers[layer].register_forward_hook(hook))
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def _find_layers(self) -> nn.ModuleList:
        count = self.config.num_hidden_layers
        for module in self.base.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise InputError(f"target {self.name}: no list of {count} decoder layers found in {type(self.base).__name__}")

    def _attention_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, None for full attention."""
        count = self.config.num_hidden_layers
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            odd = sorted({k for k in kinds if k not in ("full_attention", "sliding_attention")})
            if odd:
                raise InputError(
                    f"target {self.name} has layers of type {', '.join(odd)}: only attention with a full or sliding "
                    "window can be verified as a tree"
                )
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        if getattr(self.config, "use_sliding_window", True) is False:
            window = None
        if getattr(self.model, "_is_stateful", False):
            raise InputError(f"target {self.name} is recurrent: drafts cannot be rolled back in it")
        return (window,) * count

    def _logit_scale(self) -> float:
        kind = self.config.model_type
        if kind.startswith("cohere"):
            return float(self.config.logit_scale)
        if kind.startswith("granite"):
            return 1.0 / float(self.config.logits_scaling)
        return 1.0

    def _probe(self) -> None:
        """The wrapper must compute the model's own logits, plain and through the cache, or the target is refused."""
        # From all over the vocabulary: the first ids are often control tokens, whose huge activations magnify rounding.
        ids = torch.arange(1, 7, device=self.device)[None] * max(1, self.vocab_size // 7) % self.vocab_size
        with torch.inference_mode():
            reference = self.model(input_ids=ids, use_cache=False).logits.float()
            hidden = self.features(ids, torch.tensor([6]), Needs(last_hidden=True)).last_hidden
            assert hidden is not None
            plain = self.head(hidden).float()
            cache = self.new_cache(1, 16)
            first = self.step(ids[:, :3], cache).hidden
            cache.commit(torch.tensor([3], device=self.device))
            # The rest twice, as two branches of a tree: positions and mask must keep them apart.
            among = torch.zeros(6, 6, dtype=torch.bool, device=self.device)
            among[:3, :3] = among[3:, 3:] = torch.ones(3, 3, dtype=torch.bool, device=self.device).tril()
            depths = torch.arange(3, device=self.device).repeat(2)[None]
            rest = self.step(ids[:, 3:].repeat(1, 2), cache, among=among[None], depths=depths).hidden
            cached = self.head(torch.cat((first, rest[:, 3:]), 1)).float()
        size = float(reference.abs().max()) + 1e-6
        loose = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.15
        for what, logits in (("hidden states through the head", plain), ("the cached tree pass", cached)):
            gap = float((logits - reference).abs().max()) / size
            if not gap <= loose:
                raise InputError(
                    f"target {self.name} ({type(self.model).__name__}): {what} differ from the model's own logits by "
                    f"{gap:.2g} of their size; this architecture or attention backend "
                    f"({self.attention}) cannot be represented, try attention=eager"
                )
