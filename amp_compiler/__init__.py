"""amp-compiler: mixed precision for PyTorch as an explicit, readable graph.

>>> import torch
>>> from amp_compiler import amp_compile
>>> fast = amp_compile(torch.nn.Linear(4, 2), level="O2", dtype=torch.bfloat16)
>>> fast(torch.ones(3, 4)).dtype
torch.float32
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .common.compat import check_release
from .common.version import __version__ as __version__

if TYPE_CHECKING:
    from .calibration.calibrate import calibrate as calibrate
    from .calibration.calibration import Calibration as Calibration
    from .calibration.result import Search as Search
    from .common.errors import AmpError as AmpError
    from .common.errors import AmpWarning as AmpWarning
    from .common.errors import ArchiveError as ArchiveError
    from .common.errors import ArgumentError as ArgumentError
    from .common.errors import BannedOpError as BannedOpError
    from .common.errors import CalibrationError as CalibrationError
    from .common.errors import CaptureError as CaptureError
    from .common.errors import CheckpointError as CheckpointError
    from .common.errors import DrawingError as DrawingError
    from .common.errors import ParallelError as ParallelError
    from .common.errors import PipelineError as PipelineError
    from .common.errors import PolicyError as PolicyError
    from .common.errors import ScalerError as ScalerError
    from .common.errors import SearchError as SearchError
    from .common.errors import UnknownOpError as UnknownOpError
    from .common.errors import VerifyError as VerifyError
    from .compile import amp_compile as amp_compile
    from .conversion.convert import convert_model as convert_model
    from .conversion.converted import ConvertedModel as ConvertedModel
    from .conversion.loading import load_converted as load_converted
    from .fitting.fit import fit as fit
    from .fitting.history import History as History
    from .inspect.profile import count_casts as count_casts
    from .inspect.report import Report as Report
    from .module import AmpModule as AmpModule
    from .parallel.spec import DataParallel as DataParallel
    from .parallel.spec import Sharded as Sharded
    from .policy import CallRule as CallRule
    from .policy import Policy as Policy
    from .policy.scopes import precision as precision
    from .policy.scopes import set_precision as set_precision
    from .prediction import Prediction as Prediction
    from .prediction import predict as predict
    from .search import search_policy as search_policy
    from .training.compile import compile_train_step as compile_train_step
    from .training.finite import all_finite as all_finite
    from .training.results import StepResult as StepResult
    from .training.scalers import DynamicLossScaler as DynamicLossScaler
    from .training.scalers import StaticLossScaler as StaticLossScaler
    from .training.step import TrainStep as TrainStep

check_release()

#: public name -> module that holds it; loaded at first use, so that importing the package stays light
_PUBLIC = {
    "AmpError": "common.errors",
    "AmpModule": "module",
    "AmpWarning": "common.errors",
    "ArchiveError": "common.errors",
    "ArgumentError": "common.errors",
    "BannedOpError": "common.errors",
    "Calibration": "calibration.calibration",
    "CalibrationError": "common.errors",
    "CallRule": "policy",
    "CaptureError": "common.errors",
    "CheckpointError": "common.errors",
    "ConvertedModel": "conversion.converted",
    "DataParallel": "parallel.spec",
    "DrawingError": "common.errors",
    "DynamicLossScaler": "training.scalers",
    "History": "fitting.history",
    "ParallelError": "common.errors",
    "PipelineError": "common.errors",
    "Policy": "policy",
    "PolicyError": "common.errors",
    "Prediction": "prediction",
    "Report": "inspect.report",
    "ScalerError": "common.errors",
    "Search": "calibration.result",
    "SearchError": "common.errors",
    "Sharded": "parallel.spec",
    "StaticLossScaler": "training.scalers",
    "StepResult": "training.results",
    "TrainStep": "training.step",
    "UnknownOpError": "common.errors",
    "VerifyError": "common.errors",
    "all_finite": "training.finite",
    "amp_compile": "compile",
    "calibrate": "calibration.calibrate",
    "compile_train_step": "training.compile",
    "convert_model": "conversion.convert",
    "count_casts": "inspect.profile",
    "fit": "fitting.fit",
    "load_converted": "conversion.loading",
    "precision": "policy.scopes",
    "predict": "prediction",
    "search_policy": "search",
    "set_precision": "policy.scopes",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
