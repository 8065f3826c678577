"""Every error that a user can meet, one class per cause. Each message says what, where, what to do.

What a program may want to know of an error is in its fields; the text says the same in words.
"""

from __future__ import annotations


class AmpError(Exception):
    """Base of all errors that amp_compiler raises on purpose.

    ``pass_name``: the pass that failed, or after which a check did. ``node``: the name of the node. ``source``: the
    line of the user's code. ``hint``: what to do; it is part of the text. Each is empty where it does not apply or is
    not known. All of them survive copying and pickling.

    >>> error = ArgumentError("Unknown pass 'fold_cast'.", hint="Did you mean 'fold_casts'?")
    >>> str(error), error.hint, error.node
    ("Unknown pass 'fold_cast'. Did you mean 'fold_casts'?", "Did you mean 'fold_casts'?", '')
    """

    def __init__(
        self, message: str = "", *, pass_name: str = "", node: str = "", source: str = "", hint: str = ""
    ) -> None:
        super().__init__(message if hint in message else f"{message} {hint}")
        self.pass_name, self.node, self.source, self.hint = pass_name, node, source, hint


class ArgumentError(AmpError, ValueError):
    """An argument of a public function is wrong: a level, a dtype, a backend, a pass name."""


class UnknownOpError(ArgumentError):
    """An op name in a list or a policy file names no op that torch has."""


class PolicyError(ArgumentError):
    """A policy contradicts itself, matches nothing, or its file cannot be read."""


class CaptureError(AmpError, RuntimeError):
    """A model could not be brought into a graph."""


class BannedOpError(AmpError, RuntimeError):
    """An op that must not run in the asked precision; the message names the safe form."""


class PipelineError(AmpError, RuntimeError):
    """Passes in an order that cannot work, or a pass that failed on a graph."""


class VerifyError(AmpError, RuntimeError):
    """A graph broke a rule after a pass: names the pass, the node and the source line."""


class ScalerError(AmpError, RuntimeError):
    """A loss scaler's methods in an order that cannot work: unscale twice, step without a backward."""


class CheckpointError(AmpError, RuntimeError):
    """A checkpoint that is damaged or not of this model, optimizer or scaler; nothing was changed."""


class ArchiveError(AmpError, RuntimeError):
    """A file of a converted model cannot be written or read: damaged, of something else, newer, or unsafe."""


class DrawingError(AmpError, RuntimeError):
    """A picture of a graph could not be made: a tool is missing or failed."""


class AmpWarning(UserWarning):
    """Something works, but not as the user may think."""
