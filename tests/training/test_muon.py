"""Muon for matrices and AdamW for all else: who trains what, the exact steps, resumed runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drafttrain.data.datamodule import ConversationData
from drafttrain.drafter.medusa import Medusa
from drafttrain.drafter.ssm import Ssm
from drafttrain.errors import InputError
from drafttrain.target import load
from drafttrain.target.model import Target
from drafttrain.training.checkpoint import check_complete, read_checkpoint
from drafttrain.training.muon import Both, matrices
from drafttrain.training.optim import Muon
from tests.drafter import contract
from tests.drafter import make as drafters
from tests.training.parts import (
    MUON,
    OPTIM,
    Watch,
    drafter_of,
    fit,
    keeper,
    module_for,
    optim_of,
    same,
    weights_of,
)

BY_MUON = {**OPTIM, **MUON}


class Parts(nn.Module):
    """A weight of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.embed_tokens = nn.Embedding(7, 4)
        self.places = nn.Embedding(6, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.norm = nn.LayerNorm(4)
        self.column, self.row = nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.ones(1, 4))
        self.base_kernel = nn.Parameter(torch.ones(2, 2, 4))
        self.markov_w1, self.markov_w2 = (nn.Parameter(torch.ones(7, 2)) for _ in range(2))
        self.predecessor_codebook = nn.Parameter(torch.ones(7, 2))
        self.projections = nn.ParameterList([torch.ones(7, 4)])
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)


def steps(
    settings: dict[str, Any], weights: nn.Module, gradients: list[dict[str, Tensor]]
) -> torch.optim.Optimizer:
    """An optimiser after updates by given gradients."""
    one = Muon(**settings).optimiser([{"params": list(weights.parameters())}], weights)
    for update in gradients:
        for name, p in weights.named_parameters():
            p.grad = update[name].clone()
        for group in one.param_groups:
            group["lr"] = settings["lr"] * group.get("factor", 1.0)
        one.step()
    return one


def test_muon_has_the_matrices_and_adamw_all_else() -> None:
    weights = Parts()
    assert list(matrices(weights)) == ["fc.weight"]
    trained = [p for p in weights.parameters() if p.requires_grad]
    found = Muon(**BY_MUON).optimiser([{"params": trained}], weights)
    muon, adamw = found.param_groups
    assert [id(p) for p in muon["params"]] == [id(weights.fc.weight)]
    assert {id(p) for p in adamw["params"]} == {id(p) for p in trained} - {id(weights.fc.weight)}
    said = Muon(**BY_MUON).describe(weights)
    assert said.startswith("Muon: fc (12 parameters); AdamW: column, row, base_kernel, ")
    assert "frozen" not in said
    with pytest.raises(InputError, match="optim=muon: LayerNorm trains no matrix"):
        matrices(nn.LayerNorm(4))


# A drafter's own projection to the vocabulary, or its embedding, that is called otherwise would go
# to Muon without a word: here the vocabulary is no other size.
@pytest.mark.parametrize("name", contract.learners())
def test_no_drafter_gives_its_vocabulary_to_muon(name: str) -> None:
    target = load.tiny(family="qwen3", layers=3, vocab_size=331)
    made = [contract.build(name, target)]
    if name == "medusa":
        made.append(drafters.make(Medusa, target, heads=2, own_head=True))
    if name == "ssm":
        made.append(drafters.make(Ssm, target, layers=[0], own=["embedding", "norm", "head"]))
    for drafter in made:
        found = matrices(drafter)
        sides = {side for p in found.values() for side in p.shape}
        assert sides and not sides & {target.vocab_size, drafter.choices}, sorted(found)
        rest = [p for n, p in drafter.named_parameters() if p.requires_grad and n not in found]
        assert all(p.ndim == 1 or target.vocab_size in p.shape for p in rest)


# Two steps of `torch.optim.Muon` from the identity with its own defaults, worked out apart, in
# bfloat16; the bias next to it makes AdamW's: -lr, then by its two moments.
def test_two_steps_are_those_that_were_worked_out() -> None:
    weights = nn.Linear(2, 2)
    with torch.no_grad():
        weights.weight.copy_(torch.eye(2))
        weights.bias.zero_()
    settings = BY_MUON | {"lr": 0.1, "adjust_lr_fn": "original", "rest_factor": 0.5}
    first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    bias = torch.tensor([2.0, -3.0])
    one = steps(settings, weights, [{"weight": first, "bias": bias}])
    expected = [[1.05836, -0.08164], [-0.07344, 0.96529]]
    torch.testing.assert_close(weights.weight, torch.tensor(expected), rtol=0, atol=1e-3)
    torch.testing.assert_close(weights.bias, torch.tensor([-0.05, 0.05]), rtol=0, atol=1e-6)
    for p, grad in ((weights.weight, second), (weights.bias, bias)):
        p.grad = grad.clone()
    one.step()
    expected = [[0.9759, -0.11637], [-0.01841, 0.89314]]
    torch.testing.assert_close(weights.weight, torch.tensor(expected), rtol=0, atol=1e-3)
    buffer = torch.tensor([[0.0475, 0.145], [0.0925, 0.19]])
    torch.testing.assert_close(one.state[weights.weight]["momentum_buffer"], buffer)


@pytest.mark.parametrize(
    ("rule", "shape", "rms"),
    [
        ("original", (64, 256), 0.0536),
        ("original", (256, 64), 0.1075),
        ("match_rms_adamw", (64, 256), 0.1702),
        ("match_rms_adamw", (256, 64), 0.1709),
    ],
)
def test_a_step_is_as_large_as_the_rule_says(rule: str, shape: tuple[int, int], rms: float) -> None:
    torch.manual_seed(0)
    weights = nn.Linear(shape[1], shape[0], bias=False)
    before = weights.weight.detach().clone()
    settings = BY_MUON | {"lr": 1.0, "matrix_decay": 0.0, "adjust_lr_fn": rule}
    steps(settings, weights, [{"weight": torch.randn(shape)}])
    step = (weights.weight.detach() - before).double()
    assert float(step.pow(2).mean().sqrt()) == pytest.approx(rms, rel=0.03)


def test_each_decay_is_of_its_own_weights() -> None:
    weights, nothing = nn.Linear(3, 2), {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    before = copy.deepcopy(weights)
    steps(BY_MUON | {"lr": 0.1, "matrix_decay": 0.5, "weight_decay": 0.2}, weights, [nothing])
    torch.testing.assert_close(weights.weight, before.weight * 0.95)
    torch.testing.assert_close(weights.bias, before.bias * 0.98)


@pytest.mark.parametrize("save", [1, 3, 6])
def test_a_resumed_run_has_the_weights_of_one_that_went_on(
    target: Target, data: ConversationData, tmp_path: Path, save: int
) -> None:
    calm, stream = module_for(data, target, optim=MUON)
    rates = Watch()
    fit(calm, stream, rates, keeper(tmp_path / "calm"))
    stopped, stream = module_for(data, target, optim=MUON)
    fit(stopped, stream, Watch(save), keeper(tmp_path / "stopped"))
    state = read_checkpoint(tmp_path / "stopped" / "last.ckpt")
    check_complete(state | {"facts": {"target": None}}, tmp_path)
    assert state["progress"]["updates"] == stopped.updates == save + 1  # after the one under way
    found, stream = module_for(data, target, optim=MUON)
    found.continue_from(state)
    stream.position, again = found.position, Watch()
    trainer = fit(found, stream, again, keeper(tmp_path / "stopped"))
    assert same(weights_of(found), weights_of(calm)) and rates.rates[save + 1 :] == again.rates
    ends = [read_checkpoint(tmp_path / n / "last.ckpt")["optimiser"] for n in ("calm", "stopped")]
    assert ends[0]["param_groups"] == ends[1]["param_groups"]
    assert all(same(ends[0]["state"][n], values) for n, values in ends[1]["state"].items())
    both = trainer.optimizers[0]
    assert isinstance(both, Both) and both.adamw is not None
    assert both.muon.state is both.state is both.adamw.state


def test_it_is_another_run_than_adamws(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, max_steps=2)
    fit(module, stream, keeper(tmp_path))
    other, stream = module_for(data, target, optim=MUON, max_steps=4)
    other.continue_from(read_checkpoint(tmp_path / "last.ckpt"))
    with pytest.raises(InputError, match="the checkpoint's optimiser does not fit"):
        fit(other, stream)


def test_momentum_that_is_lacking_or_not_finite_is_named(
    target: Target, data: ConversationData, tmp_path: Path
) -> None:
    module, stream = module_for(data, target, optim=MUON, max_steps=1)
    fit(module, stream, keeper(tmp_path))
    path = tmp_path / "last.ckpt"
    state = read_checkpoint(path) | {"facts": {"target": None}}
    for change, fault in (
        (
            lambda one: one.clear(),
            r"lacks moments of the optimiser \(momentum_buffer of weight 0\)",
        ),
        (lambda one: one["momentum_buffer"].view(-1)[0].fill_(torch.inf), "momentum_buffer of we"),
    ):
        spoilt = copy.deepcopy(state)
        change(spoilt["optimiser"]["state"][0])
        with pytest.raises(InputError, match=fault):
            check_complete(spoilt, path)


def test_an_infinite_gradient_is_in_no_momentum(target: Target, data: ConversationData) -> None:
    class Spoilt(Muon):
        windows = 0

        def norm(self, parameters: Any) -> Tensor:
            parameters = list(parameters)
            type(self).windows += 1
            if type(self).windows == 2:
                torch._foreach_mul_([p.grad for p in parameters], torch.inf)
            return super().norm(parameters)

    module, stream = module_for(data, target, optim=MUON, max_steps=3)
    module.optim = Spoilt(**BY_MUON)
    trainer = fit(module, stream)
    assert (module.updates, module.spoilt_windows) == (2, 1)
    for p, moments in trainer.optimizers[0].state.items():
        assert p.isfinite().all() and all(value.isfinite().all() for value in moments.values())


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"momentum": 1.0}, "optim.momentum=1.0: needs a number from 0 to below 1"),
        ({"momentum": -0.1}, "optim.momentum=-0.1"),
        ({"ns_steps": 0}, "optim.ns_steps=0"),
        ({"ns_steps": 100}, "optim.ns_steps=100"),
        ({"adjust_lr_fn": "rms"}, "optim.adjust_lr_fn=rms: give one of match_rms_adamw, origi"),
        ({"adjust_lr_fn": ["original"]}, "optim.adjust_lr_fn="),
        ({"rest_factor": 0}, "optim.rest_factor=0"),
        ({"matrix_decay": -1}, "optim.matrix_decay=-1"),
        ({"eps": 0.0}, "optim.eps=0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError) as caught:
        optim_of(BY_MUON | given)
    assert fault in str(caught.value)


def test_an_earlier_torch_has_none(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    optim_of(BY_MUON).check_installed()
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InputError, match=r"optim=muon needs torch 2\.9 or later, this is 2"):
        optim_of(BY_MUON).check_installed()
    optim_of(None).check_installed()
    assert optim_of(None).describe(drafter_of(target)) == ""
