"""Which of two precisions each op of a graph should have, so that ops and casts together take the least time.

The problem. Every op runs low or in fp32 and takes a time in either; some are fixed. Every value has the precision of
the op that makes it. Where a reader has the other precision the value is cast, once for all such readers. In training
the gradient that comes back from such a reader is cast too, one for each use, because each use has its own gradient.
An op may also be bound to be no lower than another.

The answer is a minimum cut between a source (fp32) and a sink (low). An edge u → v of capacity c is paid if u is on the
source's side and v on the sink's, that is if u is fp32 and v is low:

1. an op that takes ``low`` and ``fp32``: source → op with capacity ``low``, op → sink with capacity ``fp32``. One of
   the two edges is cut, the one of its precision.
2. a value, cast to low for all its low readers: op → a with the cast's time and a → reader without limit, for each
   reader; ``a`` is a node of its own. If the op is fp32 and a reader is low, ``a`` must be on the low side, since no
   finite cut parts it from that reader, and the cast is paid once. If the op is low, or no reader is, ``a`` can join
   the op or the readers at no cost.
3. a value, cast to fp32 for all its fp32 readers: the mirror image, reader → b without limit, b → op with the time.
4. the cast of a gradient: op → reader or reader → op with its time.
5. an op that must not be lower than another: other → op without limit.

So for every assignment of the ops the cheapest sides of the nodes ``a`` and ``b``, each of which can be chosen by
itself, make the cut exactly as heavy as the assignment is slow. The other way round, a cut of finite weight is an
assignment that keeps rule 5 and is no slower than the cut is heavy. Hence the minimum cut is the fastest assignment,
not an approximation of it.

Times are counted in whole femtoseconds, so that ties are ties. Among equally fast assignments the one with the fewest
ops that differ from the usual choice is taken, then the one with the fewest casts, and then the one with the most ops
in fp32, of which there is only one (the source sides of minimum cuts are closed under union). The first two are further
digits of every capacity, below the time's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_UNITS = 1e15  # per second
_SOURCE, _SINK = "fp32", "low"


class Use(NamedTuple):
    """A use of a value. ``widened``: seconds of the gradient's cast if the reader is low and the value is fp32,
    ``rounded``: of the one in the other case. Both are 0 where there is no gradient."""

    reader: int
    widened: float = 0.0
    rounded: float = 0.0


class Cast(NamedTuple):
    """One cast of an assignment: of which value, and in which direction."""

    value: int
    to_low: bool


@dataclass(frozen=True, slots=True)
class _Op:
    low: int
    fp32: int
    usual: bool
    fixed: bool


@dataclass(frozen=True, slots=True)
class _Value:
    maker: int
    to_low: int
    to_fp32: int
    uses: tuple[tuple[int, int, int], ...]

    def cast(self, low: Sequence[bool]) -> bool | None:
        """Whether it is cast to low (True) or to fp32 (False) in an assignment; None if it is not cast."""
        own = low[self.maker]
        return not own if any(low[reader] is not own for reader, _, _ in self.uses) else None

    def cost(self, low: Sequence[bool]) -> int:
        """The time of its casts and of its gradients' casts."""
        direction = self.cast(low)
        if direction is None:
            return 0
        gradients = (w if low[r] else n for r, w, n in self.uses if low[r] is not low[self.maker])
        return (self.to_low if direction else self.to_fp32) + sum(gradients)


class Change(NamedTuple):
    """What another choice for one op would change: seconds in all, of them those of ops themselves, and casts."""

    seconds: float
    op_seconds: float
    added: tuple[Cast, ...]
    removed: tuple[Cast, ...]


@dataclass
class Problem:
    """Ops, values and bounds. Assignments are sequences with one entry per op, True where it is low.

    >>> problem = Problem()
    >>> product = problem.add_op(low=2e-6, fp32=9e-6, usual=True, fixed=True)
    >>> add = problem.add_op(low=1e-6, fp32=2e-6, usual=False)
    >>> norm = problem.add_op(low=0, fp32=0, usual=False, fixed=True)
    >>> _ = problem.add_value(product, to_low=0, to_fp32=3e-6, uses=[Use(add)])
    >>> _ = problem.add_value(add, to_low=3e-6, to_fp32=3e-6, uses=[Use(norm)])
    >>> problem.solve()
    (True, True, False)
    """

    ops: list[_Op] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    #: (op, other): the op is low only where the other is
    bounds: list[tuple[int, int]] = field(default_factory=list)

    def add_op(self, low: float, fp32: float, *, usual: bool, fixed: bool = False) -> int:
        """An op by its seconds in either precision. ``usual``: True if the rules alone make it low; ``fixed``: that is
        the only choice."""
        self.ops.append(_Op(_units(low), _units(fp32), usual, fixed))
        return len(self.ops) - 1

    def add_value(self, maker: int, to_low: float, to_fp32: float, uses: Iterable[Use]) -> int:
        """A value that op ``maker`` makes, with the seconds of its casts. Returns its number."""
        counted = tuple((reader, _units(widened), _units(rounded)) for reader, widened, rounded in uses)
        self.values.append(_Value(maker, _units(to_low), _units(to_fp32), counted))
        return len(self.values) - 1

    def bind(self, op: int, other: int) -> None:
        """Let ``op`` be low only where ``other`` is."""
        self.bounds.append((op, other))

    @property
    def usual(self) -> tuple[bool, ...]:
        """The assignment that the rules alone make."""
        return tuple(op.usual for op in self.ops)

    # ------------------------------------------------------------------------------------------------ looking

    def allows(self, low: Sequence[bool]) -> bool:
        """True if an assignment keeps what is fixed and what is bound."""
        kept = all(low[number] is op.usual for number, op in enumerate(self.ops) if op.fixed)
        return kept and all(low[other] for op, other in self.bounds if low[op] and not self._both_fixed(op, other))

    def rank(self, low: Sequence[bool]) -> tuple[int, int, int]:
        """What ``solve`` minimizes: femtoseconds, then ops that differ from the usual choice, then casts."""
        times = sum(op.low if chosen else op.fp32 for op, chosen in zip(self.ops, low, strict=True))
        differs = sum(op.usual is not chosen for op, chosen in zip(self.ops, low, strict=True))
        casts = sum(value.cast(low) is not None for value in self.values)
        return times + sum(value.cost(low) for value in self.values), differs, casts

    def seconds(self, low: Sequence[bool]) -> float:
        """The time of an assignment."""
        return self.rank(low)[0] / _UNITS

    def changes(self, low: Sequence[bool]) -> dict[int, Change | None]:
        """For each free op, what it would change to give it the other precision and leave all others, except those
        that are bound to follow; None if one of these cannot."""
        touching: list[dict[int, None]] = [{} for _ in self.ops]
        for number, value in enumerate(self.values):
            for op in (value.maker, *(reader for reader, _, _ in value.uses)):
                touching[op][number] = None
        bound: dict[int, list[int]] = {}
        for op, limit in self.bounds:
            first, second = (limit, op) if low[limit] else (op, limit)
            bound.setdefault(first, []).append(second)
        other = list(low)
        found: dict[int, Change | None] = {}
        for op in (number for number, known in enumerate(self.ops) if not known.fixed):
            turned = self._turned(op, low, bound)
            if turned is not None:
                for number in turned:
                    other[number] = not low[number]
                values = dict.fromkeys(v for number in turned for v in touching[number])
                found[op] = self._change(low, other, turned, list(values))
                for number in turned:
                    other[number] = low[number]
            else:
                found[op] = None
        return found

    def _turned(self, op: int, low: Sequence[bool], bound: dict[int, list[int]]) -> list[int] | None:
        """``op`` and the ops that have to change with it; None if one of them is fixed."""
        turned, todo = {op: None}, [op]
        while todo:
            for other in bound.get(todo.pop(), ()):
                if low[other] is low[op] and other not in turned:
                    if self.ops[other].fixed:
                        return None
                    turned[other] = None
                    todo.append(other)
        return list(turned)

    def _change(self, low: Sequence[bool], other: Sequence[bool], turned: Sequence[int], values: list[int]) -> Change:
        before = {Cast(v, d) for v in values if (d := self.values[v].cast(low)) is not None}
        after = {Cast(v, d) for v in values if (d := self.values[v].cast(other)) is not None}
        slower = sum((self.ops[n].fp32 - self.ops[n].low) * (1 if low[n] else -1) for n in turned)
        casts = sum(self.values[v].cost(other) - self.values[v].cost(low) for v in values)
        added, removed = tuple(sorted(after - before)), tuple(sorted(before - after))
        return Change((slower + casts) / _UNITS, slower / _UNITS, added, removed)

    # ------------------------------------------------------------------------------------------------ solving

    def solve(self) -> tuple[bool, ...]:
        """The best assignment."""
        low = [op.usual for op in self.ops]
        network = _Network(self)
        for group in network.groups():
            for op, chosen in network.cut(group):
                low[op] = chosen
        return tuple(low)

    def _both_fixed(self, op: int, other: int) -> bool:
        return self.ops[op].fixed and self.ops[other].fixed


class _Network:
    """The capacities of a problem, between its free ops, the two terminals and the nodes of rules 2 and 3."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        digits = len(problem.values) + 1
        self.differing, self.second = digits, digits * (len(problem.ops) + 1)
        #: node -> successor -> capacity, None without limit
        self.edges: dict[object, dict[object, int | None]] = {}
        for number, op in enumerate(problem.ops):
            if not op.fixed:
                self._edge(_SOURCE, number, op.low * self.second + (0 if op.usual else self.differing))
                self._edge(number, _SINK, op.fp32 * self.second + (self.differing if op.usual else 0))
        for number, value in enumerate(problem.values):
            self._value(number, value)
        for bound, other in problem.bounds:
            self._edge(self._node(other), self._node(bound), None)

    def _node(self, op: int) -> object:
        known = self.problem.ops[op]
        return (_SINK if known.usual else _SOURCE) if known.fixed else op

    def _value(self, number: int, value: _Value) -> None:
        maker = self._node(value.maker)
        readers = dict.fromkeys(self._node(reader) for reader, _, _ in value.uses)
        if maker is not _SINK:
            self._cast(maker, ("to low", number), [r for r in readers if r is not maker], value.to_low, forward=True)
        if maker is not _SOURCE:
            self._cast(maker, ("to fp32", number), [r for r in readers if r is not maker], value.to_fp32, forward=False)
        for reader, widened, rounded in value.uses:
            self._edge(maker, self._node(reader), widened * self.second)
            self._edge(self._node(reader), maker, rounded * self.second)

    def _cast(self, maker: object, shared: object, readers: list[object], cost: int, *, forward: bool) -> None:
        other = _SINK if forward else _SOURCE
        if not readers or readers == [_SOURCE if forward else _SINK]:
            return
        # a reader that is fixed in the other precision, or the only one, stands for the shared node itself
        direct = other if other in readers else readers[0] if len(readers) == 1 else None
        weight = cost * self.second + 1
        near = direct if direct is not None else shared
        self._edge(*((maker, near) if forward else (near, maker)), weight)
        for reader in readers if direct is None else ():
            self._edge(*((shared, reader) if forward else (reader, shared)), None)

    def _edge(self, start: object, end: object, capacity: int | None) -> None:
        if start in (end, _SINK) or end == _SOURCE or capacity == 0:
            return  # never cut, or of no weight
        if start == _SOURCE and end == _SINK:
            return  # always cut
        ends = self.edges.setdefault(start, {})
        known = ends.get(end, 0)
        ends[end] = None if capacity is None or known is None else known + capacity

    def groups(self) -> Iterator[set[object]]:
        """The nodes in groups that no edge joins but by way of a terminal: each is a problem of its own."""
        import networkx  # not before a device is given: it takes a while to import

        whole = networkx.Graph()
        for start, ends in self.edges.items():
            whole.add_edges_from((start, end) for end in ends)
        whole.add_nodes_from(number for number, op in enumerate(self.problem.ops) if not op.fixed)
        whole.remove_nodes_from((_SOURCE, _SINK))
        yield from networkx.connected_components(whole)

    def cut(self, group: set[object]) -> Iterator[tuple[int, bool]]:
        """The best choice for each op of a group."""
        import networkx

        network = networkx.DiGraph()
        network.add_nodes_from((_SOURCE, _SINK))
        for start in (_SOURCE, *group):
            for end, capacity in self.edges.get(start, {}).items():
                if end in group or (end == _SINK and start != _SOURCE):
                    known = {} if capacity is None else {"capacity": capacity}
                    network.add_edge(start, end, **known)
        _, low = networkx.minimum_cut(network, _SOURCE, _SINK)[1]
        yield from ((node, node in low) for node in group if isinstance(node, int))


def _units(seconds: float) -> int:
    return round(seconds * _UNITS)
