"""assign_precision: decide a precision, with a reason, for every node, in one walk from inputs to outputs.

It only annotates (``node.meta["amp"]``, a ``Decision``); no node and no traced value is changed. For each node the
first rule that applies decides, in this order:

 1. ``selected``: a node that selects an output of another node has the precision of that output
 2. ``higher_order``: the nodes of its bodies are decided; it keeps its own dtypes unless its body simply runs
 3. ``author_cast``: an explicit dtype is honoured as it is; one that followed another tensor's (``x.to(y.dtype)``, see
    ``mark_dtype_origin``) follows the precision assigned here
 4. ``view_of_written``: a view of a tensor that is written to keeps its dtype
 5. ``level_changes_nothing``: level O0
 6. ``creation``: a tensor is created; one in the dtype of another is low where the model counts as low (O2, O3)
 7. ``no_float``: it has no floating-point input
 8. ``in_native_body``: the backward of a custom autograd function keeps its dtypes
 9. ``like_autocast``: under ``Policy.torch`` autocast's lists decide, and none of the rules below apply
10. ``in_place``: runs in the dtype of the argument that it writes to (a cast copy would lose the write)
11. ``never_changed``: fp64, complex or sparse inputs, a complex result
12. ``kept_by_class``: ops of class KEEP get the dtypes that they were traced with
13. ``sparse_gradient``: a cast cannot pass on a sparse gradient
14. ``explicit_dtype``: an explicit ``dtype=`` argument wins
15. ``written_later``: something is written into its result that the low-precision dtype cannot represent
16. ``by_place``: a region, ``set_precision`` or a module rule sets a dtype
17. ``already_low``: all its inputs are low already
18. ``unsure``: the code takes a different path in low precision, as the twin trace shows
19. ``stored_low``: in a conversion, a lookup in a parameter that is stored low
20. ``moves_values``: ops of class EXACT follow their input
21. ``conditional``: a conditional rule of the policy
22. ``reads_wide``: at O2 an op that reads the result of an fp32 op is fp32 (``amp_compiler/ir/wide.py``)
23. ``from_constants``: what is computed from constants alone is fp32 until it is combined with another value
24. ``kept_between_calls``: its result is kept between calls, where rounding errors would add up
25. ``asked_for_fp32``: the author cast its operands to fp32
26. ``by_level``: the level's treatment of the op's class, unless a constant does not fit the low-precision dtype

A number that is the limit of its dtype (``torch.finfo(x.dtype).min``) becomes the limit of the low-precision dtype
where the op is low, or where it would otherwise turn into inf or 0 later (``limits.py``). With ``Policy.torch``,
numbers and dtypes that followed the dtype of a value follow the dtype that it has under autocast.

Where the costs of a device are known, decisions also say whether the rules would allow the other precision
(``either.py``), for ``place_neutral``.

Requires: normalized. Ensures: assigned. A second run changes nothing.
"""

from __future__ import annotations

from torch import fx

from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import ASSIGNED, NORMALIZED

from .walk import assign


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    return assign(gm, ctx)


PASS = Pass("assign_precision", Dialect.PRE_DISPATCH, requires=(NORMALIZED,), ensures=(ASSIGNED,), run=run)
