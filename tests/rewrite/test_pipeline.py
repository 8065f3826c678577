"""The pipeline: order checked when it is built, passes switched off by name, one record a stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from amp_compiler import Policy, ir
from amp_compiler.capture.export import capture_export
from amp_compiler.capture.program import weights_of
from amp_compiler.common.errors import AmpError, ArgumentError, BannedOpError, PipelineError, VerifyError
from amp_compiler.cost.devices import find as find_device
from amp_compiler.cost.model import CostModel
from amp_compiler.passes import insert_casts, normalize, precision
from amp_compiler.passes.order import (
    ALL,
    CONVERT,
    FORWARD,
    INFERENCE,
    JOINT,
    PREPARE,
    RUN_CONVERTED,
    STEP,
    build,
    check_names,
)
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Context, Dialect, Fact, Pass
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.records import Record
from amp_compiler.rewrite.verify import DEEP
from helpers import BF16, casts, context, functional, pre_dispatch, step_graph

X, W = torch.randn(2, 4), torch.randn(4, 4)
GIVEN = (facts.CAPTURED,)
BLESSED = Fact("blessed", None, "Nobody makes it.", check=lambda gm, ctx, place: None)

#: what runs unless the user names a device
USUAL = tuple(p for p in FORWARD if p.name != "place_neutral")


def model(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w).softmax(-1)


def run(pipe: Pipeline, gm: fx.GraphModule | None = None, ctx: Context | None = None) -> list[Record]:
    history: list[Record] = []
    pipe.run(
        gm if gm is not None else pre_dispatch(model, X, W), ctx or context("O1"), history, graph="forward"
    )
    return history


# ------------------------------------------------------------------------------------------------ order


def test_the_pipelines_are_in_order() -> None:
    built = build()
    joint, inference = built.joint, built.inference
    assert [p.name for p in built.forward.passes] == [
        "normalize", "mark_dtype_origin", "assign_precision", "place_neutral", "insert_casts",
    ]  # fmt: skip
    assert joint.passes == JOINT
    assert inference.passes == INFERENCE
    assert joint.passes[0].name == inference.passes[0].name == "fold_casts"
    assert [p.name for p in built.step.passes] == [
        "widen_gradients", "scale_loss", "reduce_gradients", "scatter_gradients", "fold_casts", "fold_views",
        "gather_parameters", "hoist_weight_casts", "flatten_products", "fuse_cast_matmul", "lower_kernels",
        "batch_casts", "accumulate_in_place", "unscale_in_place", "reduce_in_place",
    ]  # fmt: skip
    assert set(ALL) == {p.name for p in (*FORWARD, *JOINT, *INFERENCE, *STEP, *PREPARE, *CONVERT, *RUN_CONVERTED)}


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (
            (precision.PASS,),
            "'assign_precision' needs 'normalized'.*'normalize' ensures it.*These run before it: none",
        ),
        ((normalize.PASS, insert_casts.PASS), "'insert_casts' needs 'assigned'.*These run before it: normalize"),
        (
            (normalize.PASS, insert_casts.PASS, precision.PASS),
            "'assign_precision' ensures it and must come earlier",
        ),
        (JOINT, "'fold_casts' needs 'past_autograd', which nothing before it ensures"),
    ],
)
def test_a_wrong_order_fails_when_it_is_built(passes: tuple[Pass, ...], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Pipeline(passes, GIVEN)


def test_an_unknown_fact_has_no_maker() -> None:
    strange = Pass("strange", Dialect.PRE_DISPATCH, (BLESSED,), (), lambda gm, ctx: False)
    with pytest.raises(
        PipelineError, match=r"needs 'blessed', which nothing before it ensures\. These run before it: normalize"
    ):
        Pipeline((normalize.PASS, strange), GIVEN)


def test_passes_of_two_dialects_are_no_pipeline() -> None:
    """The facts that are given say which graphs a pipeline is for."""
    with pytest.raises(PipelineError, match=r"No graph has all these facts.*functional, captured"):
        Pipeline((), (facts.FUNCTIONAL, facts.CAPTURED))
    late = Pass("late", Dialect.FUNCTIONAL, (), (), lambda gm, ctx: False)
    with pytest.raises(PipelineError, match="'late' is for functional ATen"):
        Pipeline((normalize.PASS, late), GIVEN)
    stray = Pass("stray", None, (), (facts.BATCHED,), lambda gm, ctx: False)
    with pytest.raises(PipelineError, match="'stray' is for functional ATen"):
        Pipeline((normalize.PASS, stray), GIVEN)
    with pytest.raises(PipelineError, match="'late' is for functional ATen"):
        Pipeline((Pass("early", Dialect.PRE_DISPATCH, (), (), lambda gm, ctx: False), late), ())


def test_a_pipeline_is_a_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        build().forward.passes = ()  # type: ignore[misc]


# ---------------------------------------------------------------------------------------- switching off


@pytest.mark.parametrize("name", list(ALL))
def test_each_pass_can_be_switched_off(name: str) -> None:
    """What needs the missing pass is left out and says so; the graph still runs."""
    built = build([name])
    forward, joint, inference = built.forward, built.joint, built.inference
    gm = pre_dispatch(model, X, W)
    history = run(forward, gm)
    assert [r.name for r in history] == [p.name for p in USUAL]
    holds = set(forward.given)
    for step, record in zip(USUAL, history, strict=True):
        missing = [f for f in step.requires if f not in holds]
        if step.name == name:
            assert record.note == "switched off"
        elif missing:
            assert record.note == f"left out: needs '{missing[0].name}'"
        else:
            assert record.note == ""
            holds.update(step.ensures)
        if record.note:
            assert (record.modified, record.seconds) == (False, 0.0)
    torch.testing.assert_close(gm(X, W), model(X, W), rtol=0, atol=0.05)  # bf16 in one linear at most
    for pipe in (joint, inference):
        folded = functional(lambda x: x.float().bfloat16() + 1, X.to(BF16))
        notes = {r.name: r.note for r in run(pipe, folded)}
        assert notes.get(name, "switched off") == "switched off"
        assert len(casts(folded)) == (2 if name == "fold_casts" else 0)


def test_a_cascade_is_noted_pass_by_pass() -> None:
    notes = {r.name: r.note for r in run(build(["normalize"]).forward)}
    assert notes == {
        "normalize": "switched off",
        "mark_dtype_origin": "left out: needs 'normalized'",
        "assign_precision": "left out: needs 'normalized'",
        "insert_casts": "left out: needs 'assigned'",
    }


def test_a_given_fact_that_an_earlier_pipeline_did_not_make() -> None:
    """What a switched-off pass of one pipeline would have made is missing in the next one too."""
    built = build(["normalize"])
    captured = capture_export(torch.nn.Linear(4, 4), (X,))
    ctx, history = Context(Policy("O2", BF16), weights=weights_of(captured.program)), []
    known = built.prepare.run(captured.graph, ctx, history, graph="convert")
    assert known == {facts.CAPTURED, facts.PAST_AUTOGRAD}
    built.convert.run(captured.graph, ctx, history, graph="convert", known=known)
    assert {r.name: r.note for r in history[len(PREPARE) :]} == {
        "assign_precision": "left out: needs 'normalized'",
        "insert_casts": "left out: needs 'assigned'",
        "freeze_parameters": "left out: needs 'cast'",
        "fold_casts": "",
    }


# ------------------------------------------------------------------------------------------- situations


def test_a_pass_that_must_be_asked_for_leaves_no_record_without() -> None:
    """With a device it has one, and one that says so where it is switched off."""
    ctx = dataclasses.replace(context("auto"), costs=CostModel(find_device("a100_80")))
    found = {}
    for off in ((), ("place_neutral",)):
        history: list[Record] = []
        build(off).forward.run(pre_dispatch(model, X, W), ctx, history, graph="forward")
        found[off] = {r.name: r.note for r in history}
    assert list(found[()]) == [p.name for p in FORWARD]
    assert found[("place_neutral",)]["place_neutral"] == "switched off"


def notes(pipe: Pipeline, gm: fx.GraphModule, **situation: Any) -> dict[str, str]:
    """Name -> why it did not run, of the passes that did not."""
    ctx = dataclasses.replace(context("O2"), **situation)
    return {r.name: r.note for r in run(pipe, gm, ctx) if r.note}


def training_step() -> fx.GraphModule:
    w = torch.nn.Parameter(W.clone())
    return step_graph(lambda w, x: (x.to(BF16) @ w.to(BF16)).float().sum(), w, X)


def test_what_inductor_does_by_itself_is_left_out() -> None:
    gm = functional(lambda x: x + 1, X)
    needs = "left out: needs the eager backend"
    assert notes(build().joint, gm, backend="inductor") == {"fold_views": needs, "batch_casts": needs}
    assert notes(build().joint, gm) == {}


def test_the_passes_of_a_training_step_depend_on_the_situation() -> None:
    step = build().step
    once = "left out: needs several micro-batches per update"
    alone = dict.fromkeys(
        ("reduce_gradients", "reduce_in_place"), "left out: needs gradients that several processes share"
    )
    alone |= dict.fromkeys(
        ("scatter_gradients", "gather_parameters"), "left out: needs parameters that are divided among processes"
    )
    assert notes(step, training_step()) == {"hoist_weight_casts": once, "accumulate_in_place": once, **alone}
    assert notes(step, training_step(), accumulates=True) == alone
    assert notes(step, training_step(), accumulates=True, scales_loss=False) == {
        **alone,
        "scale_loss": "left out: needs a loss scale",
        "accumulate_in_place": "left out: needs 'scaled'",
        "unscale_in_place": "left out: needs 'scaled'",
    }
    checkpointed = "left out: needs a step without activation checkpointing"
    assert notes(step, training_step(), accumulates=True, recomputes=True) == {
        **alone,
        "accumulate_in_place": checkpointed, "unscale_in_place": checkpointed,
    }  # fmt: skip
    by_itself = ("fold_views", "batch_casts", "accumulate_in_place", "reduce_in_place")
    assert notes(step, training_step(), accumulates=True, backend="inductor") == {
        **alone, **dict.fromkeys(by_itself, "left out: needs the eager backend"),
    }  # fmt: skip


def test_the_users_choice_comes_before_the_situation() -> None:
    gm = functional(lambda x: x + 1, X)
    assert notes(build(["fold_views"]).joint, gm, backend="inductor")["fold_views"] == "switched off"


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"Unknown pass .fold_cast.*Did you mean .fold_casts."):
        build(["fold_cast"])
    with pytest.raises(ArgumentError, match=r"Unknown pass .zzz.*normalize, mark_dtype_origin, assign_precision"):
        check_names(["normalize", "zzz"])
    with pytest.raises(ArgumentError, match=r"must be a list of .*write \['fold_casts'\]"):
        check_names("fold_casts")
    assert check_names(("normalize",)) == ["normalize"]


# --------------------------------------------------------------------------------------------- failures


def failing(error: Exception) -> Pass:
    def body(gm: fx.GraphModule, ctx: Context) -> bool:
        raise error

    return Pass("failing", Dialect.PRE_DISPATCH, (facts.ASSIGNED,), (BLESSED,), body)


def test_a_failing_pass_names_the_passes_before_it() -> None:
    pipe = Pipeline((normalize.PASS, precision.PASS, failing(KeyError("x"))), GIVEN)
    with pytest.raises(
        PipelineError, match="'failing' failed on a forward graph after normalize, assign_precision"
    ) as info:
        run(pipe)
    assert isinstance(info.value.__cause__, KeyError)
    assert "disable_passes=['failing']" in str(info.value)


def test_the_first_pass_fails_after_capture() -> None:
    first = dataclasses.replace(failing(ValueError("no")), requires=())
    with pytest.raises(PipelineError, match="after capture: ValueError: no"):
        run(Pipeline((first,), GIVEN))


def test_errors_for_the_user_go_up_as_they_are() -> None:
    pipe = Pipeline((normalize.PASS, precision.PASS, failing(BannedOpError("banned"))), GIVEN)
    with pytest.raises(BannedOpError, match=r"^banned$"):
        run(pipe)
    assert issubclass(PipelineError, AmpError)


def test_each_result_is_verified() -> None:
    """A pass that promises what it did not do is caught right after it, by its name."""
    liar = Pass("liar", Dialect.PRE_DISPATCH, (), (facts.ASSIGNED,), lambda gm, ctx: False)
    with pytest.raises(VerifyError, match=r"After liar: node '.*has no precision"):
        run(Pipeline((liar,), GIVEN))


@pytest.mark.parametrize("pipeline", ["joint", "step"])
def test_what_is_given_is_checked_first(pipeline: str) -> None:
    """A pre-dispatch graph is not functional, though it is for inference only."""
    with pytest.raises(VerifyError, match="After autodiff: node"):
        getattr(build(), pipeline).run(pre_dispatch(model, X, W), context(), [], graph="joint", after="autodiff")


def lie(gm: fx.GraphModule, ctx: Context) -> bool:
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["val"] = ir.retype(node.meta["val"], torch.float64)
    return True


@pytest.mark.parametrize(
    ("name", "given", "make"),
    [
        ("captured", facts.CAPTURED, lambda: pre_dispatch(lambda x: x.exp() + 1, X)),
        ("functional", facts.FUNCTIONAL, lambda: functional(lambda x: x.exp() + 1, X)),
        ("step", facts.STEP, training_step),
    ],
)
def test_ops_are_run_again_after_every_pass(
    name: str, given: Fact, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deep mode, whatever a pass ensures: here nothing at all."""
    pipe = Pipeline((Pass("liar", given.dialect, (given,), (), lie),), (given,))
    with pytest.raises(VerifyError, match=r"After liar: node '.*its meta says torch.float64"):
        run(pipe, make())
    monkeypatch.delenv(DEEP)
    run(pipe, make())


# ---------------------------------------------------------------------------------------------- history


def test_history_has_one_record_a_stage() -> None:
    gm = pre_dispatch(model, X, W)
    records = run(build().forward, gm)
    assert [r.name for r in records] == [p.name for p in USUAL]
    assert all(r.seconds > 0 and r.graph == "forward" and r.note == "" for r in records)
    assert all(
        r.text.startswith("input x_1: f32[2, 4]") and r.text.splitlines()[-1].startswith("return")
        for r in records
    )
    assert [r.casts for r in records] == [0, 0, 0, 3]
    assert [r.nodes for r in records] == [6, 6, 6, 8]  # three casts come, the cast of fp32 to fp32 goes
    assert [r.modified for r in records] == [False, False, True, True]
    assert records[-1].text != records[-2].text


def test_history_counts_subgraphs() -> None:
    def fn(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(p, lambda x, w: (F.linear(x, w),), lambda x, w: (x * 2,), (x, w))[0]

    records = run(build().forward, pre_dispatch(fn, torch.tensor(True), X, W))
    assert records[-1].casts == 3
    assert records[-1].nodes > records[0].nodes
    assert "graph true_graph_0:" in records[-1].text


def test_a_run_that_changes_nothing_says_so() -> None:
    records = run(build().forward, pre_dispatch(lambda x: x.exp(), X))
    assert [r.modified for r in records] == [False, False, True, False]
    again = functional(lambda x: x.exp(), X)
    assert [r.modified for r in run(build().joint, again)] == [False] * len(JOINT)
