"""The tensors that a training step trains: the model's, and those of a loss function that is a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..policy.scopes import original_of


class Holder:
    """The modules of a model and its loss function, and what they hold."""

    def __init__(self, model: Any, loss_fn: Any) -> None:
        self.model, self.loss_fn = model, loss_fn

    def modules(self) -> Iterator[nn.Module]:
        for root in (self.model, self.loss_fn):
            if isinstance(root, nn.Module):
                yield from map(original_of, root.modules())

    def attributes(self) -> list[tuple[dict[str, Any], str]]:
        """Return (dictionary, key) for every module attribute that holds a tensor other than a parameter."""
        found: list[tuple[dict[str, Any], str]] = []
        for module in self.modules():
            found += [(module._buffers, key) for key in module._buffers]
            found += [(module.__dict__, key) for key, value in module.__dict__.items() if isinstance(value, Tensor)]
        return found


class Owner(Holder):
    """The tensors of the model, the loss function and the optimizer taken together."""

    def __init__(self, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, loss_fn)
        self.optimizer = optimizer
        self._trained: list[Tensor] = []
        self.look()

    def look(self) -> None:
        """Collect the tensors anew, once per call: parameters may have been frozen, added or replaced."""
        found: dict[int, Tensor] = {}
        waiting: list[nn.Module] = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else []
        waiting.append(self.model)
        seen: set[int] = set()
        while waiting:  # named_parameters() takes ten times as long, 1% of a small model's step
            module = waiting.pop()
            if id(module) not in seen:
                seen.add(id(module))
                for parameter in module._parameters.values():
                    if parameter is not None and parameter.requires_grad:
                        found[id(parameter)] = parameter
                if inner := module._modules:
                    waiting += reversed([m for m in inner.values() if m is not None])
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                found[id(parameter)] = parameter
        self._trained = list(found.values())

    def parameters(self) -> list[Tensor]:
        """Return every tensor that is trained or gets a gradient, once each, as of the last ``look``."""
        return self._trained

    def named_parameters(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        if isinstance(self.loss_fn, nn.Module):
            named.update((f"loss_fn.{name}", p) for name, p in self.loss_fn.named_parameters())
        return named

    def names(self) -> dict[int, str]:
        """Return the names of the parameters by the ids of their tensors."""
        return {id(tensor): name for name, tensor in self.named_parameters().items()}

    def named_trained(self) -> dict[str, Tensor]:
        """Everything that is trained or gets a gradient, by a name that another process gives it too."""
        return {**{name: p for name, p in self.named_parameters().items() if p.requires_grad}, **self.others()}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by names that are the same in another process."""
        named: dict[str, Tensor] = dict(self.model.named_buffers())
        if isinstance(self.loss_fn, nn.Module):
            named.update((f"loss_fn.{name}", b) for name, b in self.loss_fn.named_buffers())
        return named

    def others(self) -> dict[str, Tensor]:
        """Return what the optimizer trains in addition to the modules' own parameters."""
        own = {id(p) for p in self.named_parameters().values()}
        return {f"optimizer.{i}": p for i, p in enumerate(self.parameters()) if id(p) not in own}

    def state(self) -> dict[str, Tensor]:
        """Return the untrained tensors that a forward may write to: buffers, and parameters without a gradient."""
        frozen = {name: p for name, p in self.named_parameters().items() if not p.requires_grad}
        return {**self.buffers(), **frozen}
