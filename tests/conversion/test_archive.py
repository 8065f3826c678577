"""Files: written whole, read without running anything in them, refused with a clear message."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_compiler import ArchiveError, convert_model, load_converted
from amp_compiler.conversion import archive
from amp_compiler.conversion.safety import Unsafe, check_program
from helpers import BF16

X = torch.randn(3, 4)
ROOT = "archive/"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.pt2"
    shapes = {"input": {0: torch.export.Dim("rows", min=2, max=64)}}
    convert_model(nn.Linear(4, 2).eval(), (X,), dtype=BF16, dynamic_shapes=shapes).save(path)
    return path


def changed(saved: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The archive with other members."""
    with zipfile.ZipFile(saved) as source:
        members = {name: source.read(name) for name in source.namelist()}
    change(members)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return target


def edited(name: str, edit: Callable[[Any], None]) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        data = json.loads(members[ROOT + name])
        edit(data)
        members[ROOT + name] = json.dumps(data).encode()

    return change


def test_what_is_stored_comes_back(saved: Path) -> None:
    found = load_converted(saved)
    assert found.policy.level == "O2"
    assert found.details.torch_version == torch.__version__
    assert found.details.amp_version
    assert found.report().rows[0].op == "linear"
    assert not found.remove_casts().exact
    assert found(torch.randn(9, 4)).shape == (9, 2)
    assert found.exported_program.example_inputs[0][0].shape == (3, 4)


def test_a_loaded_model_saves_the_same_again(saved: Path, tmp_path: Path) -> None:
    load_converted(saved).save(tmp_path / "again.pt2")
    again = load_converted(tmp_path / "again.pt2")
    assert torch.equal(again(X), load_converted(saved)(X))
    assert torch.equal(again.remove_casts()(X), load_converted(saved).remove_casts()(X))


def test_a_crash_half_way_leaves_the_old_file(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.pt2"
    target.write_bytes(b"old")
    converted = load_converted(saved)

    def crash(program: Any, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.torch.export, "save", crash)
    with pytest.raises(ArchiveError, match="No space left"):
        converted.save(target)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.pt2"]


@pytest.mark.parametrize(("where", "told"), [("", "pass the path of a file"), ("missing/model.pt2", "mkdir -p")])
def test_a_place_that_cannot_be_written(saved: Path, tmp_path: Path, where: str, told: str) -> None:
    with pytest.raises(ArchiveError, match=rf"(cannot be|could not be) written.*{told}"):
        load_converted(saved).save(tmp_path / where)


def test_files_of_other_kinds(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="cannot be read: No such file"):
        load_converted(tmp_path / "none.pt2")
    text = tmp_path / "text.pt2"
    text.write_text("not a model")
    with pytest.raises(ArchiveError, match="not a converted model, or it is truncated"):
        load_converted(text)
    plain = tmp_path / "plain.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 2), (X,)), plain)
    with pytest.raises(ArchiveError, match=r"not written by ConvertedModel.save.*torch.export.load"):
        load_converted(plain)
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ArchiveError):
        load_converted(tmp_path / "weights.pt")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 0.99])
def test_a_file_that_is_cut_off(saved: Path, tmp_path: Path, part: float) -> None:
    data = saved.read_bytes()
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ArchiveError, match="truncated"):
        load_converted(cut)


def test_a_newer_file(saved: Path, tmp_path: Path) -> None:
    newer = changed(saved, tmp_path / "a.pt2", edited("extra/amp_compiler.json", lambda d: d.update(format=99)))
    with pytest.raises(ArchiveError, match=r"format 99.*Update amp-compiler"):
        load_converted(newer)


def test_damaged_details(saved: Path, tmp_path: Path) -> None:
    broken = changed(saved, tmp_path / "a.pt2", edited("extra/amp_compiler.json", lambda d: d.pop("policy")))
    with pytest.raises(ArchiveError, match="damaged"):
        load_converted(broken)


RAN: list[str] = []


class Evil:
    def __reduce__(self) -> Any:
        return RAN.append, ("ran",)


def pickled_weight(members: dict[str, bytes]) -> None:
    config = json.loads(members[ROOT + "data/weights/model_weights_config.json"])
    entry = config["config"]["weight"]
    entry["use_pickle"] = True
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    members[ROOT + "data/weights/" + entry["path_name"]] = buffer.getvalue()
    members[ROOT + "data/weights/model_weights_config.json"] = json.dumps(config).encode()


def pickled_inputs(members: dict[str, bytes]) -> None:
    buffer = io.BytesIO()
    torch.save((Evil(), {}), buffer)
    members[ROOT + "data/sample_inputs/model.pt"] = buffer.getvalue()


def opaque_constant(members: dict[str, bytes]) -> None:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    members[ROOT + "data/constants/model_constants_config.json"] = json.dumps({"config": {"c": entry}}).encode()
    members[ROOT + "data/constants/opaque_obj_0"] = pickle.dumps(Evil())


def legacy_weights(members: dict[str, bytes]) -> None:
    members[ROOT + "data/weights/model.pt"] = pickle.dumps(Evil())


def compiled_library(members: dict[str, bytes]) -> None:
    members[ROOT + "data/aotinductor/model/a.so"] = b"\x7fELF"


def first_node(change: Callable[[Any], None]) -> Callable[[dict[str, bytes]], None]:
    return edited("models/model.json", lambda d: change(d["graph_module"]["graph"]["nodes"][0]))


def guard(text: str) -> Callable[[dict[str, bytes]], None]:
    return edited("models/model.json", lambda d: d["guards_code"].append(text))


ATTACKS: dict[str, Callable[[dict[str, bytes]], None]] = {
    "pickled weight": pickled_weight,
    "pickled inputs": pickled_inputs,
    "opaque constant": opaque_constant,
    "legacy weights": legacy_weights,
    "compiled library": compiled_library,
    "a Python function": first_node(lambda n: n.update(target="torch.os.system")),
    "a loader": first_node(lambda n: n.update(target="torch.ops.load_library.x")),
    "an operator": first_node(lambda n: n.update(target="_operator.methodcaller")),
    "a name": first_node(lambda n: n.update(name="x=__import__('os')")),
    "a guard that calls": guard("__import__('os').getcwd() == ''"),
    "a guard with an attribute": guard("L['input'].data.__class__ == 1"),
    "a guard that breaks out": guard("L['a\") or print(1) or (\"'] == 1"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_code_in_a_file_is_refused_and_not_run(name: str, saved: Path, tmp_path: Path) -> None:
    RAN.clear()
    path = changed(saved, tmp_path / "evil.pt2", ATTACKS[name])
    with pytest.raises(ArchiveError):
        load_converted(path)
    assert RAN == []


@pytest.mark.parametrize("size", ["exec('1')", "Symbol('s0').free_symbols", "Symbol('__import__(1)')", "open(s0)"])
def test_a_size_that_is_code_is_refused(size: str) -> None:
    with pytest.raises(Unsafe):
        check_program(json.dumps({"graph_module": {"x": {"as_expr": {"expr_str": size}}}}))


@pytest.mark.parametrize("size", ["Mul(Integer(2), Symbol('s77', positive=True, integer=True))", "s0 // 2 + 1"])
def test_a_size_is_taken(size: str) -> None:
    check_program(json.dumps({"graph_module": {"x": {"as_expr": {"expr_str": size}}}}))
