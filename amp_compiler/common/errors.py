"""The errors that users can get, one class per cause. Each message says what is wrong, where, and what to do.

An error's fields hold what a program may want to know about it; the text says the same in words.
"""

from __future__ import annotations


class AmpError(Exception):
    """Base class of all errors that the package raises on purpose.

    The message says what is wrong, where, and what to do. The fields below say the same to a program; each is an empty
    string where it does not apply or is not known. They survive copying and pickling.

    Args:
        message: The text of the error.
        pass_name: The pass that failed, or the one after which a check failed.
        node: The name of the graph node.
        source: The line of the user's code that the node comes from.
        hint: What to do about it. It is a part of the text too.

    Examples:
        >>> from amp_compiler import AmpError, amp_compile
        >>> try:
        ...     amp_compile(lambda x: x, disable_passes=["fold_cast"])
        ... except AmpError as error:
        ...     error.hint.partition(" Passes")[0]
        "Did you mean 'fold_casts'?"
    """

    def __init__(
        self, message: str = "", *, pass_name: str = "", node: str = "", source: str = "", hint: str = ""
    ) -> None:
        super().__init__(message if hint in message else f"{message} {hint}")
        self.pass_name, self.node, self.source, self.hint = pass_name, node, source, hint


class ArgumentError(AmpError, ValueError):
    """An argument of a public function is wrong: a level, a dtype, a backend, the name of a pass. Also a
    ``ValueError``.

    Examples:
        >>> from amp_compiler import ArgumentError, amp_compile
        >>> try:
        ...     amp_compile(lambda x: x, backend="triton")
        ... except ArgumentError as error:
        ...     print(error)
        Unknown backend 'triton': choose one of auto, eager, inductor.
    """


class UnknownOpError(ArgumentError):
    """A list or a policy file names an op that torch does not have. The message suggests the nearest names.

    Examples:
        >>> from amp_compiler import Policy, UnknownOpError
        >>> try:
        ...     Policy("O2").with_ops(fp32=["sofmax"])
        ... except UnknownOpError as error:
        ...     print(str(error).partition("?")[0])
        Unknown op 'sofmax'. Did you mean 'softmax' or '_softmax' or 'fmax'
    """


class PolicyError(ArgumentError):
    """A policy contradicts itself, matches nothing in the model, or its file cannot be read.

    Examples:
        >>> from amp_compiler import Policy, PolicyError
        >>> try:
        ...     Policy("O2").with_ops(low=["add"], fp32=["add"])
        ... except PolicyError as error:
        ...     print(error)
        'add' is on two lists (low and fp32): remove it from one of them.
    """


class CalibrationError(ArgumentError):
    """A calibration cannot be made from what was given, cannot be read or written, or belongs to another model.

    Examples:
        >>> from amp_compiler import Calibration, CalibrationError
        >>> try:
        ...     Calibration.load("no_such_file.json")
        ... except CalibrationError as error:
        ...     print(error)
        The calibration no_such_file.json cannot be read: No such file or directory.
    """


class CaptureError(AmpError, RuntimeError):
    """The model could not be brought into a graph, where one graph is needed: in ``convert_model``, or with
    ``fullgraph=True``.

    Examples:
        >>> import torch
        >>> from amp_compiler import CaptureError, convert_model
        >>> scripted = torch.jit.script(torch.nn.ReLU())
        >>> try:
        ...     convert_model(scripted, (torch.ones(2),))
        ... except CaptureError as error:
        ...     print(error)
        A TorchScript module cannot be exported: convert the Python model it was made from.
    """


class BannedOpError(AmpError, RuntimeError):
    """The model uses an op that is unsafe in the precision that was asked for. The hint names the safe form.

    Examples:
        >>> import torch
        >>> from amp_compiler import BannedOpError, amp_compile
        >>> loss = amp_compile(torch.nn.functional.binary_cross_entropy, level="O3", dtype=torch.float16)
        >>> try:
        ...     loss(torch.full((2,), 0.5), torch.ones(2))
        ... except BannedOpError as error:
        ...     print(error.hint.partition(". ")[0])
        binary_cross_entropy is unsafe in fp16: the log of a rounded probability is -inf
    """


class PipelineError(AmpError, RuntimeError):
    """A pass failed on a graph, or passes were put in an order that cannot work.

    A compiled model does not raise this by default: the graph then runs in the precision it had, with a warning.
    ``AMP_VERIFY=deep`` turns such a fallback into this error. Try again without the pass that it names, and report it.

    Examples:
        >>> from amp_compiler import PipelineError, amp_compile
        >>> error = PipelineError("Pass 'fold_views' failed.", pass_name="fold_views")
        >>> fast = amp_compile(lambda x: x + 1, disable_passes=[error.pass_name])
    """


class VerifyError(AmpError, RuntimeError):
    """A graph broke a rule after a pass. This is a bug in the pass, not in the model.

    The fields name the pass, the node and the line of the model's code. As with ``PipelineError``, a compiled model
    falls back with a warning instead, unless ``AMP_VERIFY=deep`` is set.

    Examples:
        >>> from amp_compiler import VerifyError
        >>> error = VerifyError("After fold_casts: a cast is left.", pass_name="fold_casts", node="to_1")
        >>> error.pass_name, error.node
        ('fold_casts', 'to_1')
    """


class ScalerError(AmpError, RuntimeError):
    """The methods of a loss scaler were called in an order that cannot work, such as ``unscale_`` twice.

    Examples:
        >>> import torch
        >>> from amp_compiler import ScalerError, StaticLossScaler
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> try:
        ...     StaticLossScaler(8.0).step(optimizer)
        ... except ScalerError as error:
        ...     print(str(error).partition(":")[0])
        step() was called before scale()
    """


class CheckpointError(AmpError, RuntimeError):
    """A checkpoint is damaged, or belongs to another model, optimizer or scaler. Nothing was changed by loading it.

    Examples:
        >>> import torch
        >>> from amp_compiler import CheckpointError, compile_train_step
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = compile_train_step(model, torch.nn.functional.mse_loss, optimizer)
        >>> try:
        ...     step.load_state_dict(model.state_dict())
        ... except CheckpointError as error:
        ...     print(str(error).partition(" (")[0])
        This is not a checkpoint of a training step
    """


class ParallelError(AmpError, RuntimeError):
    """The processes that train a model together do not run the same thing: the message says what differs, and where.

    Every process of the group raises it, before any of them could wait for another in a collective.

    Examples:
        >>> from amp_compiler import AmpError, ParallelError
        >>> issubclass(ParallelError, AmpError)
        True
    """


class ArchiveError(AmpError, RuntimeError):
    """The file of a converted model cannot be written or read: it is damaged, something else, too new, or unsafe to
    load.

    Examples:
        >>> from amp_compiler import ArchiveError, load_converted
        >>> try:
        ...     load_converted("no_such_file.pt2")
        ... except ArchiveError as error:
        ...     print(error)
        The file no_such_file.pt2 cannot be read: No such file or directory.
    """


class DrawingError(AmpError, RuntimeError):
    """A picture of a graph could not be drawn, because Graphviz is missing or failed. Only ``dump --format svg`` needs
    it.

    Examples:
        >>> from amp_compiler import AmpError, DrawingError
        >>> issubclass(DrawingError, AmpError)
        True
    """


class SearchError(AmpError, RuntimeError):
    """A search for a policy cannot go on: its ``evaluate`` does not work, or its journal cannot be read or written.

    Examples:
        >>> import torch
        >>> from amp_compiler import SearchError, search_policy
        >>> try:
        ...     search_policy(torch.nn.Linear(2, 2), lambda model: "good", tolerance=0.1)
        ... except SearchError as error:
        ...     print(error)
        evaluate must return the metric as a number, but returned str on the fp32 model.
    """


class AmpWarning(UserWarning):
    """Something works, but not as the user may expect. A ``UserWarning``, so ``warnings.filterwarnings`` can select it.

    Examples:
        >>> import warnings
        >>> from amp_compiler import AmpWarning
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", AmpWarning)  # stop at the first
    """
