"""Every error that a user can meet, one class a cause. Each message says what, where, what to do."""

from __future__ import annotations


class AmpError(Exception):
    """Base of all errors that amp_compiler raises on purpose."""


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
