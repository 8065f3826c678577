"""Follow the dtypes of tensors through the model's Python code while Dynamo reads it.

In a graph traced in fp32, ``x.to(y.dtype)`` and ``x.to(torch.float32)`` look the same. Dynamo, however, reads the code
symbolically: what ``y.dtype`` returns is an object of Dynamo's, which the code may store, pass on and use. Here that
object is a ``Followed``, and so are ``torch.finfo(y.dtype)`` and its limits. Where a call in the graph takes one as an
argument, the node of the call says from which tensor it came (``ir.DTYPE_OF``, ``ir.NUMBER_OF``).

As long as nobody reads the value of a ``Followed`` in any other way, the code does the same in every precision, and the
recorded names say all about it: ``Reading.is_whole``. Code that compares a dtype, looks it up in a table, prints it or
computes with a limit is traced a second time instead, in low precision (``twin.py``).

torch 2.13 internals, and why: ``ConstantVariable`` (a subclass of it sees who reads the value),
``TensorVariable.method_attr_dtype``, ``symbolic_convert.compare_op_handlers`` (a comparison with None says nothing
about a precision), ``UserDefinedClassVariable.call_function`` (``torch.finfo``), ``SubgraphTracer.create_proxy`` and
``OutputGraph.compile_subgraph`` (where reading ends). Dynamo has no hooks for any of them; they are replaced while a
frame is read, for this thread only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.compat import attribute_method
from ..common.torch_names import pytree
from ..ir.constants import LIMITS
from .patching import replaced

#: attributes of a dtype that all floating-point dtypes agree on
_SAME_FOR_FLOATS = frozenset({"is_floating_point", "is_complex", "is_signed"})
#: what Dynamo calls the comparisons that may have None or the dtype of integers on one side
_COMPARISONS = ("is", "is not", "==", "!=")


class Reading:
    """What became of the dtypes of tensors while Dynamo read one frame."""

    #: False once a dtype, or one of its limits, was used for anything other than an argument of a call in the graph
    is_whole = True
    #: True once all of the frame's code was read
    is_read = False

    def __init__(self) -> None:
        self.asked: dict[int, tuple[Any, fx.Node]] = {}  # by id of a ``Followed``: the object, and the tensor's node
        self.named: list[tuple[Any, fx.Node]] = []  # arguments of the next call

    def follow(self, constant: Any, node: fx.Node | None) -> Any:
        """Return Dynamo's ``constant``, which derives from the dtype of ``node``, as a ``Followed``."""
        from torch._dynamo.variables.constant import ConstantVariable

        if node is None or type(constant) is not ConstantVariable or "value" not in vars(constant):
            self.is_whole = False
            return constant
        new = copy.copy(constant)  # Dynamo may share one object among equal constants
        new.__class__ = _followed_class()
        self.asked[id(new)] = (new, node)
        return new

    def has_one_result(self, compared: Sequence[Any], followed: type) -> bool:
        """True if comparing constants, of which some are ``followed``, has the same result in every precision: the
        others are no floating-point dtypes, or all are the dtypes of the graph's inputs."""
        others = [constant for constant in compared if not isinstance(constant, followed)]
        if others:
            return all(o.is_python_constant() and _is_no_float(o.as_python_constant()) for o in others)
        sources = [self.source_of(constant) for constant in compared]
        values = {vars(constant)["value"] for constant in compared}
        return len(values) == 1 and all(node is not None and node.op == "placeholder" for node in sources)

    def source_of(self, constant: Any) -> fx.Node | None:
        """Return the node whose dtype a ``Followed`` derives from; None if Dynamo made another object of it."""
        return self.asked[id(constant)][1] if id(constant) in self.asked else None


class _Current(threading.local):
    reading: Reading | None = None


_CURRENT = _Current()


def current() -> Reading | None:
    """Return what is known about the frame that Dynamo is reading in this thread; None if it is not read for us."""
    return _CURRENT.reading


@contextlib.contextmanager
def reading() -> Iterator[Reading]:
    """Follow dtypes while Dynamo reads a frame inside of the block."""
    from torch._dynamo.output_graph import OutputGraph, SubgraphTracer
    from torch._dynamo.symbolic_convert import compare_op_handlers
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    found, outer = Reading(), _CURRENT.reading
    ask, call = TensorVariable.method_attr_dtype, SubgraphTracer.create_proxy
    make, finish = UserDefinedClassVariable.call_function, OutputGraph.compile_subgraph
    followed = _followed_class()

    def method_attr_dtype(tensor: Any, tx: Any) -> Any:
        dtype = ask(tensor, tx)
        if not isinstance(dtype, ConstantVariable) or dtype.value not in ir.ELIGIBLE:
            return dtype
        return found.follow(dtype, tensor.as_proxy().node)

    def make_instance(cls: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if cls.value not in (torch.finfo, torch.iinfo) or not args or not isinstance(args[0], followed):
            return make(cls, tx, args, kwargs)
        return found.follow(make(cls, tx, [_plain(args[0]), *args[1:]], kwargs), found.source_of(args[0]))

    def comparing(compare: Any) -> Any:
        def handler(tx: Any, args: Any, kwargs: Any) -> Any:
            if any(isinstance(arg, followed) for arg in args) and found.has_one_result(args, followed):
                args = [_plain(arg) if isinstance(arg, followed) else arg for arg in args]
            return compare(tx, args, kwargs)

        return handler

    def create_proxy(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = call(tracer, *args, **kwargs)
        if found.named:
            leaves = pytree.tree_leaves((proxy.node.args, proxy.node.kwargs))
            for value, node in found.named:
                if any(type(leaf) is type(value) and leaf == value for leaf in leaves):
                    # not its name: Dynamo renames nodes later
                    proxy.node.meta[ir.DTYPE_OF if isinstance(value, torch.dtype) else ir.NUMBER_OF] = node
                else:
                    found.is_whole = False
            found.named.clear()
        return proxy

    def compile_subgraph(output: Any, *args: Any, **kwargs: Any) -> Any:
        found.is_read = True  # from here on, values are only written into the new bytecode
        try:
            return finish(output, *args, **kwargs)
        except BaseException:
            found.is_read = False  # Dynamo may read the frame once more
            raise

    with (
        replaced(OutputGraph, "compile_subgraph", compile_subgraph),
        replaced(TensorVariable, "method_attr_dtype", method_attr_dtype),
        replaced(UserDefinedClassVariable, "call_function", make_instance),
        replaced(SubgraphTracer, "create_proxy", create_proxy),
    ):
        before = {name: compare_op_handlers[name] for name in _COMPARISONS}
        compare_op_handlers.update((name, comparing(compare)) for name, compare in before.items())
        _CURRENT.reading = found
        try:
            yield found
        finally:
            _CURRENT.reading = outer
            compare_op_handlers.update(before)


def _is_no_float(value: Any) -> bool:
    """True for None, and for a dtype that no precision is: comparing with it has one result in all of them."""
    return value is None or (isinstance(value, torch.dtype) and not value.is_floating_point)


def _plain(followed: Any) -> Any:
    """Return a ``Followed`` as an ordinary constant, whose value may be read."""
    from torch._dynamo.variables.constant import ConstantVariable

    plain = copy.copy(followed)
    plain.__class__ = ConstantVariable
    return plain


@functools.cache
def _followed_class() -> type:
    from torch._dynamo.variables.constant import ConstantVariable

    base: Any = ConstantVariable

    class Followed(base):  # type: ignore[misc]
        """The dtype of a tensor, ``torch.finfo`` of it, or one of its limits."""

        @property
        def value(self) -> Any:
            here = _CURRENT.reading
            if here is not None and not here.is_read:
                here.is_whole = False
            return vars(self)["value"]

        @value.setter
        def value(self, new: Any) -> None:
            self.__dict__["value"] = new

        def as_proxy(self) -> Any:
            here = _CURRENT.reading
            if here is None or here.is_read or (node := here.source_of(self)) is None:
                return self.value
            here.named.append((vars(self)["value"], node))
            return vars(self)["value"]

        def is_constant_none(self) -> bool:
            return False

    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        here, value = _CURRENT.reading, vars(self)["value"]
        result = getattr(_plain(self), attribute)(tx, name)
        if here is None or (isinstance(value, torch.dtype) and name in _SAME_FOR_FLOATS):
            return result
        # only limits can be told in another dtype
        return here.follow(result, here.source_of(self) if name in LIMITS else None)

    attribute = attribute_method(base)
    setattr(Followed, attribute, get_attribute)
    return Followed
