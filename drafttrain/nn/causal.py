"""A decoder-only `transformers` causal LM driven through a `KVCache`: new tokens may have any mask
between them and any positions.

The frozen target is one; a drafter that is itself a language model is another.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError, first_line
from drafttrain.flow import Packing
from drafttrain.nn import isolation
from drafttrain.nn.attention import as_attention, check_backend, computed_by
from drafttrain.nn.cache import KVCache


class CausalLM:
    """The parts of a model, and the habits of its family: sliding windows, scaled and capped
    logits, the cache's argument.

    Args:
        model: a causal LM of `transformers`; it is not copied.
        called: its name in messages, such as "target smollm2".
    Raises: InputError for a model without a causal head, or one in which drafts cannot be rolled
    back.
    """

    def __init__(self, model: Any, called: str) -> None:
        self.model: Any = model
        self.called = called
        self.config: Any = (
            model.config.get_text_config()
            if hasattr(model.config, "get_text_config")
            else model.config
        )
        self.base: Any = getattr(model, model.base_model_prefix, model)
        self.embedding: Any = model.get_input_embeddings()
        self.output: Any = model.get_output_embeddings()
        if self.output is None:
            raise InputError(
                f"{called} ({type(model).__name__}) has no causal language-model head: give a "
                "decoder-only causal LM (AutoModelForCausalLM)"
            )
        self.windows = self._attention_windows()
        """Sliding window of each layer, None for full attention."""
        if self.base is model:
            raise InputError(
                f"{called} ({type(model).__name__}) is not supported: its layers and its head are "
                "no separate parts"
            )
        self.attention: str = model.config._attn_implementation
        check_backend(self.attention)
        self.decoder_layers = self._find_layers()
        self.isolates_by = isolation.DENSE
        """How joined rows are kept apart: "dense" or "flex", see `choose_isolation`."""
        self._cache_word = (
            "cache"
            if "cache" in inspect.signature(type(self.base).forward).parameters
            else "past_key_values"
        )
        self._table_ends = min(_lengths_of_tables(self.config), default=1 << 20)
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self._scale = self._logit_scale()

    # Facts ----------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        """The device that its ids are read on."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its embedding and of its passes."""
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
        """Positions that the model is used for: those that it was built for, or fewer where its
        rotary table is another one for longer texts. There a token's keys would depend on what else
        is read in the same pass."""
        return min(self._built_for, self._table_ends)

    @property
    def context_words(self) -> str:
        """The context, and why it is shorter than the model was built for."""
        if self.context == self._built_for:
            return str(self.context)
        return (
            f"{self.context} (its longrope positions are others past that, of the "
            f"{self._built_for} it was built for)"
        )

    @property
    def _built_for(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)

    # Parts ----------------------------------------------------------------------------------------
    def head(self, hidden: Tensor) -> Tensor:
        """(... d) last hidden state -> (... v) logits, with the model's own scaling and soft
        cap."""
        return self.finish_logits(self.output(hidden))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """The part of the head after the matrix product; elementwise, so it serves chosen
        vocabulary rows too. What exceeds the dtype is infinite: the cap would make all such tokens
        equally good."""
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap:
            capped = torch.tanh(logits / self._softcap) * self._softcap
            logits = capped.masked_fill(logits == torch.inf, torch.inf)
        return logits

    # Passes ---------------------------------------------------------------------------------------
    def full_pass(self, ids: Tensor, packing: Packing | None = None) -> Tensor:
        """(b s) rows padded on the right -> (b s d) last hidden states after the final norm,
        without a cache.

        Padding follows the text, so causal attention never reads it.

        Args:
            packing: where the rows are in sequences that several were joined into; each row gives
                what it gives by itself.
        """
        if packing is not None:
            with self.packing_inputs(packing) as words:
                joined: Tensor = self.base(
                    input_ids=ids, use_cache=False, **words
                ).last_hidden_state
                return joined
        places: dict[str, Tensor] = {}
        if ids.shape[1] > self.context:
            places["position_ids"] = torch.arange(ids.shape[1], device=ids.device).clamp_max(
                self.context - 1
            )[None]
        out: Tensor = self.base(input_ids=ids, use_cache=False, **places).last_hidden_state
        return out

    @contextlib.contextmanager
    def packing_inputs(self, packing: Packing) -> Iterator[dict[str, Any]]:
        """Arguments of a pass over joined rows: masks in its backend's form, and positions that
        restart in every row.

        `flex_attention` takes the backend's place where `isolates_by` says so and no gradient is
        asked for.
        """
        flex = self.isolates_by == isolation.FLEX and not torch.is_grad_enabled()

        def made(window: int | None) -> Any:
            return (
                isolation.blocks(packing, window)
                if flex
                else self.as_attention(isolation.dense(packing, window=window))
            )

        kinds = {self.kind_of(layer): window for layer, window in enumerate(self.windows)}
        masks = {kind: made(window) for kind, window in kinds.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        with computed_by(self.model, "flex_attention") if flex else contextlib.nullcontext():
            yield {
                "attention_mask": mask,
                "position_ids": packing.position_ids.clamp_max(self.context - 1),
            }

    @torch.no_grad()
    def choose_isolation(self) -> str:
        """Find out, by trying, how to keep joined rows apart, and use that from now on. Returns
        "dense" or "flex".

        `flex_attention` is taken on an accelerator whose compiler can build it, with PyTorch's
        attention.

        Raises: InputError where joined rows do not give what they give by themselves: for instance
            in a model that counts positions itself, or whose layers pass a state from token to
            token.
        """
        ids = (
            torch.arange(1, 13, device=self.device)
            * max(1, self.vocab_size // 13)
            % self.vocab_size
        )
        documents = torch.tensor([[0] * 5 + [1] * 7 + [-1]], device=self.device)
        positions = torch.tensor([[*range(5), *range(7), 0]], device=self.device)
        packing, joined = Packing(documents, positions), torch.cat((ids, ids[:1]))[None]
        apart = torch.cat([self.full_pass(row[None])[0] for row in (ids[:5], ids[5:])]).float()
        loose = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        why = ""
        accelerated = self.device.type not in ("cpu", "mps") and self.attention == "sdpa"
        for way in (isolation.FLEX, isolation.DENSE) if accelerated else (isolation.DENSE,):
            self.isolates_by = way
            try:
                found = self.full_pass(joined, packing)[0, :12].float()
                gap = float((found - apart).abs().max() / (apart.abs().max() + 1e-9))
                if gap <= loose:
                    return way
                why = f"features differ by {gap:.2g} of their size from those of single rows"
            except Exception as error:  # A family's own code, or a compiler's.
                why = first_line(error)
        self.isolates_by = isolation.DENSE
        raise InputError(
            f"trainer.pack: {self.called} ({self.config.model_type}) cannot keep rows apart in one "
            f"sequence ({why}): set trainer.pack=null"
        )

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(rows, capacity, self.device)

    def read(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """(b s d) last hidden states of s new tokens after the committed ones; nothing is
        committed.

        Args:
            ids: (b s) int64.
            tree_mask: (b|1 s t) bool, which of the row's last t entries, the s new ones included,
                each new token sees; None is causal order, with t = s. With t > s the others are
                scratch, see `KVCache.mask`.
            depths: (b|1 t) int64, the position of each of these t relative to the entries before
                them; None means 0, 1, 2... Positions past the model's context are replaced by its
                last one.
        """
        masks, positions = self.masks_and_positions(ids.shape[1], cache, tree_mask, depths)
        out = self.base(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            **{self._cache_word: cache},
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def masks_and_positions(
        self, s: int, cache: KVCache, tree_mask: Tensor | None, depths: Tensor | None
    ) -> tuple[Any, Tensor]:
        """Of s new tokens after the committed ones; arguments as in `read`.

        Returns: a mask in the form that the attention backend takes, or one for each kind of layer
            ("full_attention", "sliding_attention"); (b s) positions.
        """
        device = cache.lengths.device
        if tree_mask is None:
            tree_mask = torch.ones(1, s, s, dtype=torch.bool, device=device).tril()
        t = tree_mask.shape[-1]
        if depths is None:
            depths = torch.arange(t, device=device)[None]
        positions = (cache.lengths - (t - s))[:, None] + depths  # b t
        return self._masks(cache, tree_mask, positions), positions[:, t - s :].clamp_max(
            self.context - 1
        )

    def kind_of(self, layer: int) -> str:
        """The kind of a layer's attention, by which masks are named."""
        return "full_attention" if self.windows[layer] is None else "sliding_attention"

    @property
    def norm_name(self) -> str | None:
        """Name of the norm after the last layer, a child of `base`; None if several could be
        it."""
        names = [
            name
            for name, module in self.base.named_children()
            if module is not self.embedding
            and getattr(getattr(module, "weight", None), "shape", None) == (self.width,)
        ]
        return names[0] if len(names) == 1 else None

    # Inside ---------------------------------------------------------------------------------------
    def _masks(self, cache: KVCache, tree_mask: Tensor, positions: Tensor) -> Any:
        full = cache.mask(tree_mask)  # b 1 s used
        kinds = set(self.windows)
        if kinds == {None}:
            return self.as_attention(full)
        (s, t), used = tree_mask.shape[-2:], full.shape[-1]
        places = torch.arange(used, device=full.device)[None].expand(cache.rows, -1)  # b used
        recent = places - (cache.lengths - (t - s))[:, None]  # place in the last t entries
        own = positions.expand(cache.rows, -1).gather(1, recent.clamp(0, t - 1))
        key_positions = torch.where((recent >= 0) & (recent < t), own, places)  # b used
        distance = positions[:, t - s :, None] - key_positions[:, None]  # b s used
        window = next(w for w in self.windows if w is not None)
        windowed = self.as_attention(full & (distance < window)[:, None])
        if None not in kinds:
            return windowed
        return {"full_attention": self.as_attention(full), "sliding_attention": windowed}

    def as_attention(self, mask: Tensor) -> Tensor:
        """(b 1 s t) bool, true = may be read -> the form that the attention backend takes."""
        return as_attention(mask, self.attention, self.dtype)

    def _find_layers(self) -> nn.ModuleList:
        count = self.config.num_hidden_layers
        for module in self.base.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise InputError(
            f"{self.called}: no list of {count} decoder layers found in {type(self.base).__name__}"
        )

    def _attention_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, None for full attention.

        A config may name a window that the family's code does not read, such as that of a Mistral
        which was written down as a Llama.
        """
        count = self.config.num_hidden_layers
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        slides = _slides(self.base)
        if kinds:
            odd = sorted({k for k in kinds if k not in ("full_attention", "sliding_attention")})
            if odd:
                raise InputError(
                    f"{self.called} has layers of type {', '.join(odd)}: only full attention and "
                    "attention with a sliding window can be verified as a tree"
                )
            return tuple(
                window if slides and kind == "sliding_attention" else None for kind in kinds
            )
        if not slides or getattr(self.config, "use_sliding_window", True) is False:
            window = None
        if getattr(self.model, "_is_stateful", False):
            raise InputError(f"{self.called} is recurrent: drafts cannot be rolled back in it")
        return (window,) * count

    def _logit_scale(self) -> float:
        kind = self.config.model_type
        if kind.startswith("cohere"):
            return float(self.config.logit_scale)
        if kind.startswith("granite"):
            return 1.0 / float(self.config.logits_scaling)
        return 1.0


def _slides(base: nn.Module) -> bool:
    """Does a family's code know of sliding windows? It may, where it cannot be read."""
    forward = inspect.unwrap(type(base).forward)
    with contextlib.suppress(OSError, TypeError, KeyError):
        return "sliding" in inspect.getsource(sys.modules[forward.__module__])
    return True


def _lengths_of_tables(config: Any) -> Iterator[int]:
    """Lengths up to which a config's rotary tables do not depend on the length of a text."""
    kinds = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while kinds:
        found = kinds.pop()
        if not isinstance(found, Mapping):
            continue
        kinds += found.values()  # Some families have one for each kind of layer.
        if found.get("rope_type", found.get("type")) in ("longrope", "su"):
            own = getattr(config, "original_max_position_embeddings", None)
            length = found.get("original_max_position_embeddings") or own
            if type(length) is int:
                yield length
