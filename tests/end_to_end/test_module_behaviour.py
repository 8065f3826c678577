"""The compiled module behaves as the module that it was made from, and that one is never changed."""

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import AmpModule, AmpWarning, Policy, amp_compile
from amp_compiler.common.errors import AmpError

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


class Net(nn.Module):
    """Parameters, a persistent and a transient buffer, submodules, plain attributes and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.register_buffer("transient", torch.ones(8), persistent=False)
        self.title = "net"
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)) * self.scale * self.factor + self.shift * self.transient

    def describe(self) -> str:
        return f"{self.title} with {self.fc.out_features}"


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))


def compiled(model: Any, level: str = "O2", **options: Any) -> AmpModule:
    return amp_compile(model, level, dtype=BF16, backend="eager", **options)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a module that a compiler could spoil."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path}: attributes"] = sorted(module.__dict__)
        found[f"{path}: forward"] = module.forward.__func__
        found[f"{path}: class"] = type(module)
        found[f"{path}: training"] = module.training
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks"):
            found[f"{path}: {kind}"] = list(getattr(module, kind).values())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name}: tensor"] = (id(tensor), tensor.dtype, tensor.device, tensor.requires_grad)
    return found


# ------------------------------------------------------------------------------------- tensors and states


def test_parameters_and_buffers_are_the_originals_own():
    model = net()
    fast = compiled(model)
    for before_call in (True, False):
        for kind in ("named_parameters", "named_buffers", "named_children"):
            ours, theirs = dict(getattr(fast, kind)()), dict(getattr(model, kind)())
            assert list(ours) == list(theirs), (kind, before_call)
            assert all(ours[name] is theirs[name] for name in ours), (kind, before_call)
        assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
        assert list(dict(fast.named_modules())) == list(dict(model.named_modules()))
        fast(batch())


def test_the_state_dict_is_the_originals():
    model = net()
    fast = compiled(model)
    fast(batch())
    ours, theirs = fast.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert "transient" not in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert list(fast.state_dict(prefix="a.")) == [f"a.{name}" for name in theirs]
    assert list(nn.ModuleDict({"inner": fast}).state_dict()) == [f"inner.{name}" for name in theirs]


def test_load_state_dict_reaches_the_original():
    torch.manual_seed(1)  # an earlier test may have left the seed of net()
    model, other = net(), Net()
    fast = compiled(model)
    before = fast(batch())
    assert str(fast.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(model.fc.weight, other.fc.weight)
    assert not torch.equal(fast(batch()), before)
    with pytest.raises(RuntimeError, match="Missing key"):
        fast.load_state_dict({})
    assert fast.load_state_dict({}, strict=False).missing_keys


def test_a_state_dict_loads_through_a_parent():
    parent = nn.Sequential(compiled(net()))
    other = nn.Sequential(Net())
    parent.load_state_dict(other.state_dict())
    assert torch.equal(parent[0].original.fc.weight, other[0].fc.weight)


def test_train_and_eval_go_both_ways():
    model = net()
    fast = compiled(model)
    assert fast.training
    assert fast.eval() is fast
    assert not model.training
    assert not model.norm.training
    model.train()
    assert fast.training
    assert all(m.training for m in fast.modules())
    nn.Sequential(fast).eval()
    assert not model.training
    assert not model.norm.training


def test_the_mode_decides_what_runs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    fast = compiled(model)
    x = torch.ones(64, 4)
    for _ in range(2):
        fast.train()
        assert (fast(x) == 0).any()
        fast.eval()
        assert not (fast(x) == 0).any()


# -------------------------------------------------------------------------------------------- attributes


def test_attributes_are_the_originals():
    model = net()
    fast = compiled(model)
    assert fast.title == "net"
    assert fast.fc is model.fc
    assert fast.describe() == "net with 8"
    fast.title = "other"
    assert model.title == "other"
    model.title = "third"
    assert fast.title == "third"
    del fast.title
    assert not hasattr(model, "title")
    assert not hasattr(fast, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = fast.nothing


def test_setting_parameters_and_modules_goes_to_the_original():
    model = net()
    fast = compiled(model)
    fast(batch())
    fast.scale = nn.Parameter(torch.zeros(8))
    assert model.scale is fast.scale
    assert torch.equal(fast(batch()), model.shift.expand(6, 8).to(BF16).float())
    fast.fc = nn.Linear(4, 8)
    assert model.fc is fast.fc
    fast.register_buffer("extra", torch.zeros(1))
    assert "extra" in dict(model.named_buffers())


def test_a_changed_attribute_acts_on_the_next_call():
    model = net().eval()
    fast = compiled(model)
    before = fast(batch())
    model.factor = 4.0
    after = fast(batch())
    assert not torch.equal(before, after)
    assert torch.allclose(after, model(batch()), atol=0.1, rtol=0.05)


def test_what_it_prints():
    fast = compiled(net())
    text = repr(fast)
    assert "amp_compile" in text
    assert "O2" in text
    assert "bfloat16" in text
    assert "Linear(in_features=4, out_features=8" in text
    assert repr(compiled(torch.sin))
    assert "call the model once" in str(fast.report())
    assert fast.graphs == []
    assert fast.history == []


# ----------------------------------------------------------------------------------------------- copying


def test_a_deep_copy_is_independent_and_works():
    fast = compiled(net(), "O1", black_list=["mul"]).eval()
    before = fast(batch())
    twin = copy.deepcopy(fast)
    assert isinstance(twin, AmpModule)
    assert twin.policy == fast.policy
    assert twin.original is not fast.original
    assert not set(map(id, twin.parameters())) & set(map(id, fast.parameters()))
    assert torch.equal(twin(batch()), before)
    with torch.no_grad():
        twin.scale.zero_()
    assert torch.equal(fast(batch()), before)
    assert not torch.equal(twin(batch()), before)
    assert twin.report().rows


def test_copies_keep_all_options():
    options: dict[str, Any] = dict(keep_output_dtypes=False, disable_passes=["fold_casts"], exclude=["fc"])
    fast = compiled(nn.Sequential(net(), nn.Linear(8, 2)), **options | {"exclude": ["0.fc"]})
    fast.enabled = False
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), copy.copy(fast)):
        assert twin.policy == fast.policy
        assert twin.enabled is False
        twin.enabled = True
        out = twin(batch())
        assert {r.precision for r in twin.report().why("fc")} == {"float32"}
        assert any(r.name == "fold_casts" and not r.modified for r in twin.history)
        assert out.dtype is BF16


def test_a_deep_copy_inside_another_module_shares_what_was_shared():
    model = net()
    both = nn.ModuleDict({"fast": compiled(model), "plain": model})
    twin = copy.deepcopy(both)
    assert twin["fast"].original is twin["plain"]
    assert twin["plain"] is not model


def test_the_original_can_be_pickled_before_and_after():
    model = net()
    before = pickle.dumps(model)
    fast = compiled(model)
    fast(batch()).sum().backward()
    model.zero_grad()
    back = pickle.loads(pickle.dumps(model))
    assert type(back) is Net
    assert snapshot_names(back) == snapshot_names(pickle.loads(before))
    assert torch.equal(back.eval()(batch()), model.eval()(batch()))


def snapshot_names(model: nn.Module) -> list[tuple[str, list[str]]]:
    return [(path, sorted(module.__dict__)) for path, module in model.named_modules()]


def test_the_compiled_module_can_be_saved_whole():
    fast = compiled(net(), "O1").eval()
    before = fast(batch())
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert back.policy == fast.policy
    assert torch.equal(back(batch()), before)
    assert back.report().rows


# ----------------------------------------------------------------------------- the model is never modified


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_success_leaves_the_model_alone(level):
    model = net()
    model.fc.register_forward_hook(lambda *a: None)
    before = snapshot(model)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    fast = compiled(model, level)
    fast(batch()).sum().backward()
    with torch.no_grad():
        fast(batch())
    assert snapshot(model) == before
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


class Fails(Net):
    def forward(self, x: Tensor, fail: bool = True) -> Tensor:
        y = super().forward(x)
        if fail:
            raise KeyError("on purpose")
        return y


def test_failure_leaves_the_model_alone(monkeypatch):
    monkeypatch.delenv("AMP_VERIFY", raising=False)
    model = Fails()
    before = snapshot(model)
    with pytest.raises(AmpError):
        compiled(model, "O7")
    with pytest.raises(AmpError):
        compiled(model, exclude=["nothing"])
    fast = compiled(model)
    with pytest.raises(KeyError, match="on purpose"):
        fast(batch())
    with pytest.raises(RuntimeError):
        fast(torch.randn(3, 5), fail=False)
    with pytest.raises(TypeError):
        fast()
    with pytest.raises(AmpError):
        compiled(model, fullgraph=True)(batch())
    assert snapshot(model) == before
    fast(batch(), fail=False)
    assert snapshot(model) == before


def test_a_rewrite_that_fails_runs_the_original_with_a_warning(monkeypatch):
    """Our own bug must not be the user's: the model runs in the precision that it has."""
    monkeypatch.delenv("AMP_VERIFY", raising=False)
    model = net().eval()
    before = snapshot(model)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("amp_compiler.capture.lower.lower", broken)
    fast = compiled(model)
    with pytest.warns(AmpWarning, match=r"could not be rewritten.*ZeroDivisionError"):
        out = fast(batch())
    assert torch.equal(out, model(batch()))
    assert snapshot(model) == before
    assert "could not be rewritten" in str(fast.report())


def test_autodiff_that_fails_runs_the_rewritten_graph_with_a_warning(monkeypatch):
    monkeypatch.delenv("AMP_VERIFY", raising=False)
    model = net()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a bug of AOTAutograd")

    monkeypatch.setattr("amp_compiler.capture.autodiff.compile_graph", broken)
    fast = compiled(model)
    with pytest.warns(AmpWarning, match=r"AOTAutograd could not compile a graph.*ZeroDivisionError"):
        out = fast(batch())
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    assert "bfloat16" in fast.report().by_precision


# --------------------------------------------------------------------------------- the switch, the decorator


def test_the_switch():
    model = net().eval()
    fast = compiled(model, "O3")
    low = fast(batch())
    fast.enabled = False
    assert torch.equal(fast(batch()), model(batch()))
    assert not torch.equal(low, model(batch()))
    fast.enabled = True
    assert torch.equal(fast(batch()), low)
    assert not hasattr(model, "enabled")


def test_switched_off_it_never_captures():
    fast = compiled(net())
    fast.enabled = False
    fast(batch())
    assert fast.graphs == []


def test_a_function():
    def product(a: Tensor, b: Tensor, *, shift: float = 0.0) -> Tensor:
        """Multiply."""
        return a @ b + shift

    fast = compiled(product, "O1")
    a = torch.randn(4, 4, requires_grad=True)
    out = fast(a, b=a, shift=1.0)
    assert torch.equal(out, (a.to(BF16) @ a.to(BF16)).float() + 1.0)
    out.sum().backward()
    assert a.grad is not None
    assert fast.original is product
    assert fast.__name__ == "product"
    assert list(fast.parameters()) == []
    assert list(fast.state_dict()) == []
    assert isinstance(fast.train().eval(), AmpModule)


def test_a_decorator_without_arguments():
    @amp_compile
    def square(x: Tensor) -> Tensor:
        return x @ x

    assert square(torch.ones(2, 2)).dtype is torch.float32
    assert square.policy == Policy.default("O2")


def test_a_decorator_with_arguments():
    @amp_compile(level="auto", dtype=torch.float16, keep_output_dtypes=False)
    def square(x: Tensor) -> Tensor:
        return x @ x

    assert square(torch.ones(2, 2)).dtype is torch.float16
    assert square.policy == Policy.default("auto", torch.float16)


def test_a_decorator_without_a_call_is_checked_at_once():
    with pytest.raises(AmpError, match="Unknown level"):
        amp_compile(level="O9")


def test_a_decorated_method():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        @amp_compile(level="O1", dtype=BF16)
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = Model()
    assert torch.allclose(model(batch()), model.fc(batch()), atol=0.05)


# ------------------------------------------------------------------------------------------------- training


def test_an_optimizer_over_either_updates_the_original():
    for own in (True, False):
        model = net()
        fast = compiled(model)
        optimizer = torch.optim.AdamW((fast if own else model).parameters(), lr=0.1)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = (fast(batch()) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert all(p.dtype is torch.float32 for p in model.parameters())


def test_zero_grad_requires_grad_and_to():
    model = net()
    fast = compiled(model)
    fast(batch()).sum().backward()
    fast.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert fast.requires_grad_(False) is fast
    assert not any(p.requires_grad for p in model.parameters())
    assert not fast(batch()).requires_grad
    fast.fc.requires_grad_(True)
    fast(batch()).sum().backward()
    assert model.fc.weight.grad is not None
    assert model.scale.grad is None
    assert fast.to("cpu") is fast
    fast.to(torch.float64)
    assert model.fc.weight.dtype is torch.float64
    assert fast(batch().double()).dtype is torch.float64
    fast.float()
    assert fast(batch()).dtype is torch.float32
    fast.to("meta")
    assert model.fc.weight.is_meta


def test_running_statistics_are_updated_as_without_us():
    model, twin = net(), net()
    fast = compiled(model)
    for _ in range(3):
        fast(batch())
        twin(batch())
    assert int(model.norm.num_batches_tracked) == 3
    assert torch.allclose(model.norm.running_mean, twin.norm.running_mean, atol=0.02)
    assert model.norm.running_var.dtype is torch.float32


def test_hooks_still_run():
    model = net()
    seen: list[str] = []
    model.fc.register_forward_hook(lambda m, i, o: seen.append("fc"))
    model.fc.register_forward_pre_hook(lambda m, i: seen.append("before fc"))
    model.register_forward_hook(lambda m, i, o: seen.append("model"))
    fast = compiled(model)
    fast.register_forward_hook(lambda m, i, o: seen.append("compiled"))
    for _ in range(2):
        seen.clear()
        fast(batch())
        assert seen == ["before fc", "fc", "model", "compiled"]


def test_a_hook_that_changes_a_value():
    model = net().eval()
    handle = model.norm.register_forward_hook(lambda m, i, o: torch.zeros_like(o))
    fast = compiled(model)
    assert torch.equal(fast(batch()), model(batch()).to(BF16).float())
    handle.remove()
    assert torch.allclose(fast(batch()), model(batch()), atol=0.1, rtol=0.05)


def test_hooks_on_gradients_see_fp32():
    model = net()
    seen: list[torch.dtype] = []
    for p in model.parameters():
        p.register_hook(lambda g: seen.append(g.dtype))
    compiled(model)(batch()).sum().backward()
    assert seen == [torch.float32] * len(list(model.parameters()))


def test_a_compiled_module_inside_an_uncompiled_one():
    inner = compiled(net())
    outer = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(8, 2))
    outer(batch()).sum().backward()
    assert all(p.grad is not None for p in outer.parameters())
    assert inner.report().rows


# ------------------------------------------------------------------------------------ many of the same class


def test_many_compilations_of_one_class():
    """Dynamo counts re-compilations by code object: they must not use up one another's limit."""
    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        for index in range(10):
            level = ("O1", "auto", "O2", "O3")[index % 4]
            fast = compiled(nn.Sequential(nn.Linear(4, 2 + index)), level)
            with torch.no_grad():
                fast(batch())
            made.append(fast)
    assert all(fast.report().rows for fast in made)
    assert all(fast.report().by_precision == {"bfloat16": 1} for fast in made)


def test_one_model_at_two_levels():
    model = net().eval()
    low, high = compiled(model, "O3"), compiled(model, "O0")
    assert torch.equal(high(batch()), model(batch()))
    assert not torch.equal(low(batch()), high(batch()))
    assert "bfloat16" in low.report().by_precision
    assert "bfloat16" not in high.report().by_precision
    assert torch.equal(high(batch()), model(batch()))


# ----------------------------------------------------------------------------------------------- distributed

DDP = textwrap.dedent("""
    import os
    import signal
    import sys
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from amp_compiler import amp_compile

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 600), nn.GELU(), nn.Linear(600, 600))

    def gradients(model, run, x):
        model.zero_grad()
        run(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    def main(rank, file):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
        data = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
        model = build()
        fast = amp_compile(model, "O2", dtype=torch.bfloat16, backend="eager")
        # the two large layers fill a bucket each: Dynamo splits its graph between them
        ddp = DistributedDataParallel(fast, bucket_cap_mb=1)
        for _ in range(2):
            ours = gradients(model, ddp, data[rank])
        for mine in ours:
            everyone = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(everyone, mine)
            assert torch.equal(everyone[0], everyone[1]), "the ranks disagree"
            assert mine.dtype is torch.float32
        if rank == 0:
            alone = build()
            single = amp_compile(alone, "O2", dtype=torch.bfloat16, backend="eager")
            parts = [gradients(alone, single, data[r]) for r in range(2)]
            for mine, a, b in zip(ours, *parts, strict=True):
                torch.testing.assert_close(mine, (a + b) / 2, rtol=1e-5, atol=1e-7)
        names = {f"module.{n}" for n in build().state_dict()}
        assert set(ddp.state_dict()) == names, sorted(ddp.state_dict())
        assert fast.report().by_precision.get("bfloat16", 0) >= 3, str(fast.report())
        assert len(fast.graphs) > 1, "the graph was not split at the buckets"
        dist.destroy_process_group()

    other = os.fork()  # here, so that one import of torch serves both ranks
    try:
        main(0 if other else 1, sys.argv[1])
    except BaseException:
        if other:
            os.kill(other, signal.SIGKILL)  # it would wait for us
        raise
    if other:
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0, "rank 1 failed"
""")


def test_inside_distributed_data_parallel(tmp_path: Path):
    script, rendezvous = tmp_path / "ddp.py", tmp_path / "rendezvous"
    script.write_text(DDP)
    command = [sys.executable, script, rendezvous]
    ranks = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        errors = ranks.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        os.killpg(ranks.pid, signal.SIGKILL)  # both ranks
        raise
    assert ranks.returncode == 0, errors
