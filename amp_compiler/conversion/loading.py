"""Load a converted model, or any ``torch.export`` archive, without running code that is in the file."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import torch

from ..capture import program as programs
from ..common.errors import AmpError, ArchiveError
from ..common.messages import first_line
from .archive import DETAILS, read
from .converted import ConvertedModel
from .safety import Unsafe, check_members, check_program


def load_converted(path: str | os.PathLike[str]) -> ConvertedModel:
    """Load a model that ``ConvertedModel.save`` wrote, with its policy and report. Kernels are chosen for this machine.

    Nothing in the file is run as code: tensors are read as bytes, the graph may only name ops of torch and of packages
    that you have imported, and an archive that would need unpickling is refused. ``torch.export.load`` reads the same
    file but may unpickle parts of it, so use that only with files that you trust.

    Args:
        path: The file.

    Returns:
        A ``ConvertedModel``.

    Raises:
        ArchiveError: If the file cannot be read, is not a converted model, or is not safe to load.

    Examples:
        >>> import tempfile, torch
        >>> from amp_compiler import convert_model, load_converted
        >>> converted = convert_model(torch.nn.ReLU().eval(), (torch.ones(2),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     converted.save(f"{folder}/model.pt2")
        ...     loaded = load_converted(f"{folder}/model.pt2")
        >>> loaded(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    program, details, form = read(path)
    return ConvertedModel(program, details, form, [])


def load_any(path: str | os.PathLike[str]) -> ConvertedModel | torch.export.ExportedProgram:
    """Return the content of a ``.pt2``: a converted model if ``ConvertedModel.save`` wrote it, else the exported
    program."""
    source = Path(path)
    try:
        with open(source, "rb") as file:
            with zipfile.ZipFile(file) as archive:
                if any(name.endswith(f"/extra/{DETAILS}") for name in archive.namelist()):
                    return load_converted(source)
                check_members(archive, ())
                graph, sample = programs.parts(archive)
                check_program(graph)
            file.seek(0)
            return programs.load(file, graph, sample)
    except OSError as error:
        raise ArchiveError(f"The file {source} cannot be read: {error.strerror or error}.") from error
    except zipfile.BadZipFile as error:
        hint = f" For a model in that file write {source}:name." if source.suffix == ".py" else ""
        raise ArchiveError(f"{source} is not a torch.export archive, or it is truncated: {error}.{hint}") from error
    except Unsafe as error:
        raise ArchiveError(f"{source} is refused: {error}. It could run code when it is loaded.") from error
    except AmpError:
        raise
    except Exception as error:  # torch's reader raises many kinds of errors on a damaged or foreign file
        first = first_line(error, named=True, limit=200)
        raise ArchiveError(f"{source} is not a torch.export program, or it is damaged: {first}") from error
