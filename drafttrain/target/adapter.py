"""A low-rank adapter of the target (LoRA, Hu et al. 2021, arXiv:2106.09685): the part of it that
joint training changes.

In training it is kept apart from the frozen weights (`Trained`, through peft), so that the original
is one switch away. Decoding uses a second target with the adapter added to its weights (`tuned`):
as fast as the original, which is not changed, so that others can go on using it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import InputError
from drafttrain.nn.packed import PackedLinear
from drafttrain.target.lowrank import Adapter
from drafttrain.target.model import Target

ALL = "all"
EXTRA = "pip install 'drafttrain[medusa2]'"
LARGEST_RANK = 1 << 16
_NAME = "drafttrain"


def linears_of(target: Target, linears: str | Sequence[str]) -> dict[str, nn.Module]:
    """The linears of the target's decoder layers by their names in the model.

    The LM head is not one of them: drafters borrow it frozen, and often it is the embedding.

    Args:
        linears: last parts of names, or `all`.
    Raises: InputError for a name that no linear has.
    """
    inside = {id(module) for module in target.decoder_layers.modules()}
    found = {
        name: module
        for name, module in target.model.named_modules()
        if id(module) in inside and type(module) in (nn.Linear, PackedLinear)
    }
    if not found:
        raise InputError(
            f"target {target.name} has no plain linears in its layers (quantised ones, or another "
            "library's): an adapter needs an unquantised target"
        )
    if linears == ALL:
        return found
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in found))
    odd = [str(name) for name in linears if name not in known]
    if odd:
        raise InputError(
            f"linears: {odd[0]} is none of target {target.name}'s layers; they have "
            f"{', '.join(known)}"
        )
    return {name: module for name, module in found.items() if name.rpartition(".")[2] in linears}


def shapes_of(target: Target, rank: int, linears: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Names and shapes of an adapter's tensors."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in linears_of(target, linears).items():
        weight: Any = module.weight
        out, inner = weight.shape
        shapes |= {f"{name}.A": (rank, inner), f"{name}.B": (out, rank)}
    return shapes


def need_peft() -> None:
    """Raise InputError if the library that trains adapters is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(
            f"training the target with adapters needs peft, which is not installed: {EXTRA}"
        )


class Trained(nn.Module):
    """An adapter in training: part of the target's passes unless it is `off`. Its weights are this
    module's children, those of the target are not.

    A starts as peft draws it and B as zero, so that the target starts as the original.

    Args:
        target: with plain linears; they are wrapped in place, until `remove`.
        dropout: on the input of A, only in passes within `learning`.
        seed: of A.
    """

    def __init__(
        self,
        target: Target,
        *,
        rank: int,
        alpha: float,
        dropout: float,
        linears: str | Sequence[str],
        seed: int,
    ) -> None:
        super().__init__()
        need_peft()
        if target.adapter is not None:
            raise InputError(f"target {target.name} is tuned already: give the original")
        chosen = linears_of(target, linears)
        if any(isinstance(module, PackedLinear) for module in chosen.values()):
            raise InputError(
                "the target's weights are packed, and packed weights cannot be trained: set "
                "target.pack=false"
            )
        from peft import LoraConfig, inject_adapter_in_model

        assert target.fingerprint  # computed now, while the target is the original
        self.target = target
        self.rank, self.alpha = rank, alpha
        self.linears = tuple(dict.fromkeys(name.rpartition(".")[2] for name in chosen))
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=list(chosen),
            bias="none",  # type: ignore[arg-type]
        )
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, target.model, _NAME)
        # In a plain dict: the wrapped layers hold the frozen weights, which must not become
        # children of this module.
        self._layers: dict[str, Any] = {name: target.model.get_submodule(name) for name in chosen}
        self.weights = nn.ParameterDict()
        for name, layer in self._layers.items():
            for part, inner in (("A", layer.lora_A[_NAME]), ("B", layer.lora_B[_NAME])):
                # In float32, where small updates are not rounded away.
                inner.float().requires_grad_(True)
                self.weights[f"{name}.{part}".replace(".", "/")] = inner.weight
        self._dropouts = [layer.lora_dropout[_NAME] for layer in self._layers.values()]
        self._drop(False)

    def _drop(self, on: bool) -> None:
        for dropout in self._dropouts:
            dropout.train(on)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """The target is the original."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """With dropout."""
        self._drop(True)
        try:
            yield
        finally:
            self._drop(False)

    def adapter(self) -> Adapter:
        """Its weights now, as a copy."""
        tensors = {
            name.replace("/", "."): weight.detach().to("cpu", torch.float32, copy=True)
            for name, weight in self.weights.items()
        }
        return Adapter(self.rank, self.alpha, self.linears, tensors)

    def remove(self) -> None:
        """Give the target its own linears back: it is the original again."""
        for name, layer in self._layers.items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.target.model.get_submodule(parent), leaf, layer.base_layer)
        self.target.model.__dict__.pop("peft_config", None)
        self._layers = {}

    def describe(self) -> str:
        """One line."""
        size = sum(weight.numel() for weight in self.weights.values())
        return (
            f"target: trained jointly by an adapter of rank {self.rank} on {len(self._layers)} "
            f"linears ({', '.join(self.linears)}), {size:,} parameters"
        )


def tuned(target: Target, adapter: Adapter) -> Target:
    """A second target with the adapter added to its weights. `target` is not changed. The two share
    every tensor that the adapter does not change, so the second takes as much memory as the linears
    that it changes (packed copies included).

    In a precision below float32 the sums are rounded to it.

    Raises: InputError for a target that is tuned already or whose modules cannot be copied.
    """
    if target.adapter is not None:
        raise InputError(f"target {target.name} is tuned already: give the original")
    model = _twin(target.model, {}, target.name)
    for name, module in linears_of(target, adapter.linears).items():
        a, b = (adapter.tensors[f"{name}.{part}"] for part in ("A", "B"))
        linear: Any = module
        weight: Tensor = linear.weight.detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        grown = weight.to(wide) + (adapter.alpha / adapter.rank) * (
            b.to(weight.device, wide) @ a.to(weight.device, wide)
        )
        grown = grown.to(weight.dtype)
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, PackedLinear):
            setattr(model.get_submodule(parent), leaf, PackedLinear(grown, linear.bias))
        else:
            twin: Any = model.get_submodule(name)
            twin.weight = nn.Parameter(grown, requires_grad=False)
    found = Target(model, target.tokenizer, target.name)
    found.adapter, found.original = adapter, target
    return found


def _twin(module: nn.Module, made: dict[int, nn.Module], name: str) -> nn.Module:
    """The same tree of modules over the same tensors: replacing a module or a weight in one does
    not change the other."""
    if id(module) in made:
        return made[id(module)]
    if "forward" in module.__dict__:
        raise InputError(
            f"target {name}: its modules were changed by another library (device_map, hooks), so "
            "no second target can be made from it: load it on one device, without device_map"
        )
    twin = module.__class__.__new__(module.__class__)
    made[id(module)] = twin
    for key, value in module.__dict__.items():
        twin.__dict__[key] = value.copy() if isinstance(value, (dict, set)) else value
    for child, inner in module._modules.items():
        twin._modules[child] = None if inner is None else _twin(inner, made, name)
    return twin
