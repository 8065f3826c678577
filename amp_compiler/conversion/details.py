"""What a converted model stores in its file in addition to its graph."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from typing import Any

import torch

from ..inspect.report import Report
from ..policy import Policy

#: the version of the file format: a file with a higher one is refused
FORMAT = 1


@dataclass(frozen=True)
class Details:
    """``fp32_bytes``: the weights of the fp32 model that the graph reads; ``stored_bytes``: those of the converted one.

    ``rounded``: paths of weights of which only rounded values are stored. ``kept``: (path, why) of weights that low
    precision cannot represent. ``cast_params``, ``keep_io_dtypes``, ``disable_passes``: as passed to ``convert_model``.
    """

    policy: Policy
    report: Report
    fp32_bytes: int
    stored_bytes: int
    rounded: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    cast_params: bool = True
    keep_io_dtypes: bool = True
    disable_passes: tuple[str, ...] = ()
    amp_version: str = ""
    torch_version: str = torch.__version__

    def to_json(self) -> str:
        """Return all fields as JSON, with the policy as the text of its TOML file."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("policy", "report")}
        report = json.loads(self.report.to_json())
        return json.dumps({"format": FORMAT, **plain, "policy": self.policy.to_toml(), "report": report})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Details:
        """Return details from parsed JSON of this format; raise a KeyError, TypeError or ValueError if it is not."""
        return cls(
            policy=Policy.from_dict(tomllib.loads(data["policy"])), report=Report.from_json(data["report"]),
            fp32_bytes=int(data["fp32_bytes"]), stored_bytes=int(data["stored_bytes"]),
            rounded=tuple(map(str, data["rounded"])), kept=tuple((str(p), str(why)) for p, why in data["kept"]),
            cast_params=bool(data["cast_params"]), keep_io_dtypes=bool(data["keep_io_dtypes"]),
            disable_passes=tuple(map(str, data["disable_passes"])),
            amp_version=str(data["amp_version"]), torch_version=str(data["torch_version"]),
        )  # fmt: skip
