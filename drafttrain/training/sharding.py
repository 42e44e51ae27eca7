"""Fully sharded training (PyTorch's `fully_shard`, after ZeRO, Rajbhandari et al. 2019,
arXiv:1910.02054): every process keeps its share of the drafter's weights, gradients and moments,
and gathers all weights for the loss of a micro-batch.

What is trained is one unit, gathered once a micro-batch and dropped after its backward pass. The
target is no part of it: each process has all of it. Gradients are the mean over processes, as under
DDP, so that an update is the same.

Checkpoints hold complete tensors under the names that they have without sharding: nothing in them
depends on the strategy or on the number of processes. Evaluation decodes with a complete copy, for
which weights are gathered; every process does so at the same place, and none gathers anything where
another does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from drafttrain.drafter.base import Drafter
from drafttrain.flow import Batch, Features, Loss
from drafttrain.training.module import loss_of


class _Judge(nn.Module):
    """The unit that is sharded: its forward pass is the drafter's loss, during which it has all
    weights."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, batch: Batch, features: Features, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        found = loss_of(self.drafter, batch, features, generator)
        return found.total, found.count, found.parts


class Sharding:
    """A drafter of which this process keeps a share.

    Args:
        drafter: with the same weights on every process, rank 0's where they are not; it keeps all
            of them.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.plain = drafter
        for value in drafter.state_dict().values():
            torch.distributed.broadcast(value.detach(), 0)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.drafter = drafter.at(torch.float32)
        for mine, theirs in zip(self.drafter.parameters(), drafter.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        self.drafter.train(drafter.training)
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        self._judge: Any = fully_shard(_Judge(self.drafter), mesh=mesh, reshard_after_forward=False)
        if device.type == "cpu":
            self._judge.set_force_sum_reduction_for_comms(True)  # Gloo has no mean.

    def loss(self, batch: Batch, features: Features, generator: torch.Generator | None) -> Loss:
        """As of the drafter; every process must come here."""
        return Loss(*self._judge(batch, features, generator))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Gradients stay on this process, and are added up."""
        self._judge.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._judge.set_requires_gradient_sync(True)

    @torch.no_grad()
    def gathered(self) -> Drafter:
        """The drafter with all of its present weights; every process must come here."""
        self.plain.load_state_dict(
            {name: gathered(value) for name, value in self.drafter.state_dict().items()}
        )
        return self.plain


def gathered(value: Any) -> Any:
    """A complete tensor of one that processes share; anything else as it is. Every process must
    come here."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def shared_out(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """An optimiser's state with complete tensors -> with this process's share of each.

    Args:
        parameters: in the order in which the state numbers them.
    Raises: ValueError for a state of other weights.
    """
    found: dict[int, dict[str, Any]] = {}
    for number, values in state["state"].items():
        if number not in range(len(parameters)):
            raise ValueError(f"there is a state of weight {number}, and {len(parameters)} weights")
        parameter = parameters[number]
        found[number] = {
            name: share(value, parameter)
            if isinstance(value, Tensor) and value.shape == parameter.shape
            else value
            for name, value in values.items()
        }
    return {**state, "state": found}


def share(value: Tensor, like: Tensor) -> Tensor:
    """This process's share of a complete tensor, as it has one of another of that shape."""
    if not isinstance(like, DTensor):
        return value
    # Every process has read all of it, so nothing is sent.
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


class Sharded(ModelParallelStrategy):
    """Lightning's part in it: processes, mesh, optimiser, checkpoints."""

    def __init__(self, world: int, *, backend: str | None) -> None:
        super().__init__(
            data_parallel_size=world,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
        )
        self._sharding: Sharding | None = None

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        module: Any = self.lightning_module
        self._sharding = Sharding(module.drafter, self.root_device)
        module.drafter, module.sharding = self._sharding.drafter, self._sharding
        self.barrier()
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._sharding is not None
        with self._sharding.apart():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Complete tensors on the first process, nothing on the others; every process must come
        here."""
        assert self.lightning_module is not None
        found = {}
        for name, value in self.lightning_module.state_dict().items():
            value = gathered(value)
            if self.is_global_zero:
                found[name] = value.detach().cpu()
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As `lightning_module_state_dict`, in the form that the optimiser has without sharding."""
        state = (
            optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        ).state_dict()
        found: dict[int, dict[str, Any]] = {}
        for number, values in state["state"].items():
            own = {}
            for name, value in values.items():
                value = gathered(value)
                own[name] = value.cpu() if isinstance(value, Tensor) else value
            found[number] = own if self.is_global_zero else {}
        return {**state, "state": found}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [
                cast(Tensor, p) for group in optimizer.param_groups for p in group["params"]
            ]
            optimizer.load_state_dict(shared_out(state, parameters))

    def on_train_end(self) -> None:
        if self._sharding is not None:
            self._sharding.gathered()

    def teardown(self) -> None:
        """Nothing is gathered here: other processes may be gone."""
        module: Any = self.lightning_module
        if module is not None and self._sharding is not None:
            module.drafter, module.sharding = self._sharding.plain, None
        self._sharding = None
        super().teardown()
