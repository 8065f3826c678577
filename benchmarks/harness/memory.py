"""Memory: torch's allocator (exact), the process (as the system sees it), and what is kept for the backward."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from amp_compiler import TrainStep, ir

_MEASURED = "measured step"  # a mark in the profiler's record


def peak_bytes(step: Callable[[], object], rest: Callable[[], object] = lambda: None) -> int:
    """Return the most bytes that a step holds at one time, in addition to what was allocated before this call.

    The step runs twice, with `rest` in between, and the second run is measured; what the first one left behind counts.
    A free counts only if its memory was allocated here. (The profiler sees only some frees of older memory, and torch
    warns once.) It is torch's own memory, without the allocations of oneDNN and MKL.

    >>> held = [torch.empty(1 << 18)]
    >>> def step():
    ...     held[0] = torch.empty(1 << 18)  # 1 MiB, made while the old one is still there
    ...     torch.empty(1 << 19)  # 2 MiB more, not kept
    >>> [peak_bytes(step) >> 20 for _ in range(3)]
    [3, 3, 3]
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
        rest()
        with torch.profiler.record_function(_MEASURED):
            step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.experimental_event_tree()
    for event in events:  # the list grows: this visits the whole tree
        events.extend(event.children)
    events.sort(key=lambda event: event.start_time_ns)
    live: dict[int, int] = {}
    held, peak, measuring = 0, 0, False
    for event in events:
        measuring |= event.name == _MEASURED
        if event.tag != torch._C._profiler._EventType.Allocation:
            continue
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        held -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            held += size
            if measuring:
                peak = max(peak, held)
    return peak


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS is the current memory, VmHWM the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_resident(run: Callable[[], object]) -> int:
    """Return how far the process's memory rises above its current value while `run` runs (Linux).

    It is what the system sees, including caches of allocators, compiled code and scratch memory of libraries. Use a
    fresh process, see `in_fresh_process`: memory that was freed before is reused without a rise.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the highest memory to the current one
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def in_fresh_process(script: str | Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script in a process of its own; the last line that it prints is its result, in JSON."""
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{Path(script).name} {' '.join(arguments)} ended with {done.returncode}: {said[-1]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# ----------------------------------------------------------------------------------------- kept for the backward


def saved_by_autograd(forward: Callable[[], object], model: nn.Module, batch: Iterable[Tensor]) -> int:
    """Return the bytes that autograd holds after `forward`, counting shared memory once, without parameters, buffers
    and batch."""
    excluded = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    held: dict[int, Tensor] = {}  # the tensors stay alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(t.untyped_storage().nbytes() for address, t in held.items() if address not in excluded)
    del result
    return total


def saved_in_graph(step: TrainStep) -> int:
    """Return the bytes that the joint graph writes before the first use of the loss's gradient and reads after it."""
    if not step.joint_graphs:
        return 0
    graph = step.joint_graphs[0].graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    (tangent,) = [n for n in graph.nodes if n.op == "placeholder" and n.meta[ir.ROLE].kind == "tangent"]
    border = min(order[user] for user in tangent.users)
    kept = {
        _base(argument)
        for node in graph.nodes
        if order[node] >= border and node.op == "call_function"
        for argument in node.all_input_nodes
        if order[argument] < border
    }
    counted = (n for n in kept if n.op == "call_function" or (n.op == "placeholder" and n.meta[ir.ROLE].kind == "low"))
    return sum(ir.nbytes(value) for n in counted for value in ir.tensor_outputs(n) if value is not None)


def _base(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of `node`, through views and getitem."""
    while node.op == "call_function":
        if ir.is_getitem(node):
            source = node.all_input_nodes[0]
            if not _is_view(source):
                return node  # one result of an op with several
        elif _is_view(node):
            source = node.all_input_nodes[0]
        else:
            return node
        node = source
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
