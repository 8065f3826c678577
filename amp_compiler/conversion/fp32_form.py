"""The fp32 form of a converted model: the graph before any cast, for ``remove_casts``."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .. import ir
from ..capture.program import Frame, from_json, rebuild, to_json
from ..ir.weights import Weight, Weights
from ..policy import dtype_name


class Fp32Form:
    """The exported graph with its weights' names, and where the converted program has their values (``stored``)."""

    def __init__(self, frame: Frame, graph: fx.GraphModule, weights: Weights) -> None:
        self._frame, self._graph, self._weights = frame, graph, weights
        self.stored: dict[str, str] = {}

    def fp32_weights(self) -> list[tuple[str, str]]:
        """Return (input, path) for each weight that is fp32 in this form."""
        found = [n for n in self._graph.graph.nodes if n in self._weights]
        return [(n.name, self._weights[n].path) for n in found if n.meta["val"].dtype is torch.float32]

    def with_values_of(self, converted: ExportedProgram, out_spec: Any) -> ExportedProgram:
        """The fp32 program, with the values that the converted one holds."""
        values = _Values(converted, self.stored)

        def make(node: fx.Node, weight: Weight) -> torch.Tensor:
            return values.of(node.name, node.meta["val"].dtype)

        graph = ir.copy_graph(self._graph).graph
        return rebuild(self._frame, graph, make, self._weights, out_spec=out_spec)

    def to_json(self, converted: ExportedProgram) -> str:
        """Return the form without values, for a file."""

        def nothing(node: fx.Node, weight: Weight) -> torch.Tensor:
            value = node.meta["val"]
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

        graph = ir.copy_graph(self._graph).graph
        program = rebuild(self._frame, graph, nothing, self._weights, out_spec=converted.call_spec.out_spec)
        dtypes = {n.name: dtype_name(n.meta["val"].dtype) for n in graph.nodes if n in self._weights}
        return json.dumps({"stored": self.stored, "dtypes": dtypes, "graph": json.loads(to_json(program))})


class StoredFp32Form:
    """An fp32 form that was read from a checked file."""

    def __init__(self, text: str) -> None:
        self._text = text

    def with_values_of(self, converted: ExportedProgram, out_spec: Any) -> ExportedProgram:
        """The fp32 program, with the values that the converted one holds."""
        data = json.loads(self._text)
        values = _Values(converted, data["stored"])
        state: dict[str, Any] = {}
        constants: dict[str, Any] = {k: v for k, v in converted.constants.items() if not isinstance(v, torch.Tensor)}
        for spec in data["graph"]["graph_module"]["signature"]["input_specs"]:
            ((kind, given),) = spec.items()
            name = given.get("arg", {}).get("name", "")
            if name not in data["dtypes"]:
                continue
            value = values.of(name, getattr(torch, data["dtypes"][name]))
            if kind == "parameter":
                state[given["parameter_name"]] = torch.nn.Parameter(value, requires_grad=False)
            elif kind == "buffer" and given["persistent"]:
                state[given["buffer_name"]] = value
            else:
                constants[given.get("buffer_name") or given["tensor_constant_name"]] = value
        return from_json(json.dumps(data["graph"]), state, constants, converted.example_inputs)

    def to_json(self, converted: ExportedProgram) -> str:
        """Return the text that it was read from."""
        return self._text


class _Values:
    """The weights of a converted program by the name of the fp32 form's input."""

    def __init__(self, converted: ExportedProgram, stored: dict[str, str]) -> None:
        self._converted, self._stored = converted, stored
        self._paths = {spec.arg.name: spec.target for spec in converted.graph_signature.input_specs}

    def of(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        path = self._paths[self._stored.get(name, name)]
        held = self._converted.state_dict if path in self._converted.state_dict else self._converted.constants
        value: torch.Tensor = held[path].detach().to(dtype, copy=True)
        return value
