"""``Policy``: an immutable value, the names that people use for ops, rules, files, and who wins over whom."""

import copy
import dataclasses
import functools
import itertools
import operator
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile, precision, set_precision
from amp_compiler.common.errors import AmpError, ArgumentError, PolicyError, UnknownOpError
from amp_compiler.policy import LEVELS, Conditional
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.policy.ops.table import ROWS

BF16, FP16 = torch.bfloat16, torch.float16
LOW_OPS = [row.name for row in ROWS if row.cls is OpClass.LOW]
KEPT_OPS = [row.name for row in ROWS if row.cls is OpClass.KEEP]
FREE_OPS = [row.name for row in ROWS if row.cls is not OpClass.KEEP]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def precisions(target: Any, *args: Any, level: str = "O2", **options: Any) -> dict[str, str]:
    """op -> precision of a target that was compiled and called once."""
    fast = amp_compile(target, level, dtype=options.pop("dtype", BF16), **options)
    fast(*args)
    return {row.op: row.precision for row in fast.report().rows}


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


# -------------------------------------------------------------------------------------------- immutability


def test_a_policy_cannot_be_changed():
    policy = Policy("O2", BF16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.level = "O3"  # type: ignore[misc]


def test_making_a_new_policy_changes_no_other():
    base = Policy("O2", BF16, ops=(("gelu", OpClass.FP32),), modules=(("a", "float32"),))
    before = copy.deepcopy(base)
    text = base.to_toml()
    base.with_ops(low=["exp"], fp32=["linear"], follow=["softmax"])
    base.with_modules({"b.*": "bfloat16"})
    base.with_conditional([("softplus", "beta", [2])])
    dataclasses.replace(base, level="O3")
    Policy.default("O1").with_ops(fp32=["linear"])
    assert base == before
    assert base.to_toml() == text
    assert base.classify("linear").cls is OpClass.LOW
    assert base.classify("gelu").cls is OpClass.FP32


def test_custom_lists_leave_the_defaults_and_the_table_alone():
    before = {row.name: row for row in ROWS}
    changed = Policy.default().with_ops(low=["softmax", "exp"], fp32=LOW_OPS)
    assert changed.classify("linear").cls is OpClass.FP32
    assert Policy.default().classify("linear").cls is OpClass.LOW
    assert Policy.default().classify("softmax").cls is OpClass.FP32
    assert Policy.default().ops == ()
    assert {row.name: row for row in ROWS} == before


def test_lists_of_one_call_do_not_reach_the_next():
    x = torch.randn(2, 4)
    assert precisions(nn.Linear(4, 4), x, black_list=["linear"])["linear"] == "float32"
    assert precisions(nn.Linear(4, 4), x)["linear"] == "bfloat16"
    policy = Policy.default("O2", BF16)
    assert precisions(nn.Linear(4, 4), x, policy=policy, black_list=["linear"])["linear"] == "float32"
    assert policy == Policy.default("O2", BF16)
    assert precisions(nn.Linear(4, 4), x, policy=policy)["linear"] == "bfloat16"


def test_a_list_given_to_a_policy_may_be_changed_afterwards():
    ops, rules = ["gelu"], {"a": "float32"}
    values = [2]
    made = Policy().with_ops(fp32=ops).with_modules(rules).with_conditional([("softplus", "beta", values)])
    twin = copy.deepcopy(made)
    ops.append("tanh")
    rules["b"] = "float32"
    values.append(3)
    assert made == twin


def test_lists_given_to_the_constructor_are_copied():
    modules = [("a", "float32")]
    conditional = [Conditional("softplus", "beta", (2,))]
    made = Policy("O2", BF16, modules=modules, conditional=conditional)
    modules.append(("b", "float32"))
    conditional.clear()
    assert made.module_rule("b") is None
    assert made.condition_for("softplus", {"beta": 2}) is not None
    assert made.with_modules({"c": "float32"}).module_rule("c") is not None


def test_equal_policies_are_one_value():
    one = Policy("O2", BF16).with_ops(low=["exp"], fp32=["linear"])
    two = Policy("O2", "bf16").with_ops(fp32=["aten.linear"]).with_ops(low=[torch.exp])
    assert one == two
    assert hash(one) == hash(two)
    assert one != Policy("O2", FP16)
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one


def test_values_of_a_conditional_rule_are_frozen_too():
    values = [[1, 1]]
    made = Policy().with_conditional([("conv2d", "stride", values)])
    values[0].append(9)
    assert made.condition_for("conv2d", {"stride": [1, 1]}) is not None
    assert isinstance(hash(made), int)


# --------------------------------------------------------------------------------------------------- names

LINEAR = ["linear", "aten.linear", "aten::linear", "aten.linear.default", "torch.ops.aten.linear", F.linear,
          torch.ops.aten.linear, torch.ops.aten.linear.default]  # fmt: skip


@pytest.mark.parametrize("op", LINEAR, ids=str)
def test_all_spellings_of_an_op_are_one(op):
    assert Policy().with_ops(fp32=[op]) == Policy().with_ops(fp32=["linear"])


def test_functions_and_methods_name_their_op():
    same = {
        "matmul": [torch.matmul, operator.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__],
        "add": [torch.add, operator.add, torch.Tensor.add_, "add_", torch.ops.aten.add.Tensor],
        "softmax": [torch.softmax, F.softmax, "aten.softmax.int"],
        "cross_entropy_loss": [F.cross_entropy, "cross_entropy", "cross_entropy_loss"],
        "max_pool2d": [F.max_pool2d],
        "conv2d": [F.conv2d, torch.conv2d, torch.ops.aten.conv2d.padding],
    }
    for name, spellings in same.items():
        for spelling in spellings:
            found = Policy().with_ops(follow=[spelling])
            assert found == Policy().with_ops(follow=[name]), f"{spelling} is not {name}"


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda x: F.relu6(x), F.relu6),
        (lambda x: F.relu6(x), "relu6"),
        (lambda x: torch.multiply(x, x), torch.multiply),
        (lambda x: torch.multiply(x, x), "multiply"),
        (lambda x: torch.multiply(x, x), "mul"),
        (lambda x: x / (x + 1), torch.divide),
        (lambda x: x / (x + 1), "divide"),
        (lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64)), F.nll_loss),
        (lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64)), "nll_loss"),
        (lambda x: F.softmin(x, dim=-1), F.softmin),
        (lambda x: F.softmax(x, dim=-1), "_softmax"),
        (lambda x: F.dropout(x, 0.5), F.dropout),
        (lambda x: F.silu(x), "silu"),
        (lambda x: F.layer_norm(x, [4]), F.layer_norm),
    ],
)  # fmt: skip
def test_what_a_user_names_is_what_gets_listed(call: Callable[[Tensor], Tensor], op: Any):
    """Whatever name is accepted has an effect on the op that a model with it runs."""
    fast = amp_compile(lambda x: call(x * 1.0), "O2", dtype=BF16, black_list=[op])
    fast(torch.rand(4, 4))
    rows = [row for row in fast.report().rows if row.rule == "black_list"]
    assert rows, f"{op} was accepted, and nothing followed:\n{fast.report()}"
    assert {row.precision for row in rows} == {"float32"}


@pytest.mark.parametrize(
    ("wrong", "near"), [("liner", "linear"), ("layernorm", "layer_norm"), ("aten.sofmax", "softmax")]
)
def test_an_unknown_name_suggests_the_nearest(wrong, near):
    with pytest.raises(UnknownOpError, match=f"Did you mean .*'{near}'"):
        Policy().with_ops(low=[wrong])


@pytest.mark.parametrize("wrong", ["", "no_such_op", "nolib::nothing", nn.Linear, 3, None, lambda x: x])
def test_what_is_no_op_is_an_error(wrong):
    with pytest.raises(UnknownOpError, match=r"aten|name such as"):
        Policy().with_ops(low=[wrong])


def test_a_custom_op_is_known_by_its_namespace():
    @torch.library.custom_op("amp_policy_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    x = torch.randn(3)
    op = torch.ops.amp_policy_test.twice
    plain = amp_compile(lambda x: op(x), "O3", dtype=BF16)
    plain(x)
    (row,) = plain.report().rows
    assert row.precision == "float32"
    assert "unlisted" in row.reason
    spelled = ("amp_policy_test::twice", "amp_policy_test.twice", op, op.default)
    for name in spelled:
        assert Policy().with_ops(low=[name]) == Policy().with_ops(low=["amp_policy_test::twice"])
    low = amp_compile(lambda x: op(x), "O1", dtype=BF16, white_list=["amp_policy_test::twice"])
    out = low(x)
    (row,) = low.report().rows
    assert row.precision == "bfloat16"
    assert torch.equal(out, (x.to(BF16) * 2).float())


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("twin", LINEAR, ids=str)
def test_an_op_on_both_lists_is_an_error(twin):
    with pytest.raises(PolicyError, match=r"'linear' is on two lists.*remove it from one"):
        Policy().with_ops(low=["linear"], fp32=[twin])
    with pytest.raises(PolicyError, match="two lists"):
        amp_compile(nn.Linear(2, 2), white_list=[twin], black_list=["linear"])
    with pytest.raises(PolicyError, match="two lists"):
        Policy("O2", BF16, ops=(("linear", OpClass.LOW), ("aten.linear", OpClass.FP32)))


def test_two_names_of_one_row_are_one_op_on_both_lists():
    with pytest.raises(PolicyError, match="two lists"):
        Policy().with_ops(low=["softmax"], fp32=["_softmax"])


@pytest.mark.parametrize(
    ("level", "near"), [("O4", "O"), ("o2", "O2"), ("AUTO", "auto"), ("O", "O"), (2, "choose one of O0"),
                        (None, "choose one of O0"), (["O2"], "choose one of O0"), ("", "choose one of O0")]
)  # fmt: skip
def test_an_unknown_level(level, near):
    for make in (Policy, Policy.default, lambda given: amp_compile(nn.Identity(), given)):
        with pytest.raises(ArgumentError, match=f"Unknown level.*{near}"):
            make(level)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, "float8", "", 16, "float32"])
def test_an_unknown_low_dtype(dtype):
    for make in (Policy, Policy.default, lambda _, d: Policy.torch("cpu", d)):
        with pytest.raises(ArgumentError, match=r"float16 or torch.bfloat16.*O0"):
            make("O2", dtype)


@pytest.mark.parametrize("spelled", ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
def test_spellings_of_a_dtype(spelled):
    assert Policy("O2", spelled).dtype is BF16
    assert Policy().with_modules({"a": spelled}).module_rule("a") == ("a", BF16)


def test_an_unknown_precision_of_a_module():
    for wrong in ("int8", "low", None, torch.float64):
        with pytest.raises(ArgumentError, match="choose 'float32', 'float16' or 'bfloat16'"):
            Policy().with_modules({"a": wrong})
        with pytest.raises(ArgumentError, match="choose 'float32', 'float16' or 'bfloat16'"):
            Policy(modules=(("a", wrong),))


def test_a_pattern_that_matches_nothing():
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(2, 2))
    with pytest.raises(PolicyError, match=r"'encoderr' matches no module.*'encoder'"):
        amp_compile(model, exclude=["encoderr"])
    with pytest.raises(PolicyError, match=r"'decoder\.\*' matches no module.*encoder"):
        amp_compile(model, policy=Policy().with_modules({"decoder.*": "float32"}))
    for wrong in ("", 3):
        with pytest.raises(PolicyError, match=r"'encoder\.\*'"):
            Policy().with_modules({wrong: "float32"})


def test_a_class_that_matches_nothing():
    with pytest.raises(PolicyError, match="no module of class LSTM"):
        amp_compile(nn.Linear(2, 2), exclude=[nn.LSTM])
    for wrong in (int, 3, nn.Linear(2, 2)):
        with pytest.raises(ArgumentError, match="path patterns and module classes"):
            amp_compile(nn.Linear(2, 2), exclude=[wrong])


def test_module_rules_on_a_function():
    with pytest.raises(PolicyError, match="function has no module paths"):
        amp_compile(torch.sin, exclude=["a"])
    with pytest.raises(PolicyError, match="function has no module paths"):
        amp_compile(torch.sin, policy=Policy().with_modules({"a": "float32"}))


@pytest.mark.parametrize("given", ["linear", 3, None])
def test_a_list_that_is_none(given):
    for call in (lambda: Policy().with_ops(low=given), lambda: amp_compile(nn.Identity(), black_list=given)):
        with pytest.raises(PolicyError, match="must be a list"):
            call()


def test_an_unknown_op_class():
    for wrong in ("nonsense", 3, None):
        with pytest.raises(ArgumentError, match="low"):
            Policy(ops=(("linear", wrong),))


@pytest.mark.parametrize("wrong", [["encoder"], "encoder", None])
def test_module_rules_that_are_no_mapping(wrong):
    with pytest.raises(ArgumentError, match=r"encoder\.\*"):
        Policy().with_modules(wrong)


@pytest.mark.parametrize("op", KEPT_OPS[:: max(1, len(KEPT_OPS) // 8)])
def test_an_op_that_is_kept_can_not_be_listed(op):
    for name in ("low", "fp32", "follow"):
        with pytest.raises(PolicyError, match=f"'{op}' cannot be given a precision"):
            Policy().with_ops(**{name: [op]})


def test_an_unknown_autocast_device():
    with pytest.raises(PolicyError, match=r"cpu.*'tpu'"):
        Policy.torch("tpu")


def test_policy_and_arguments_that_contradict():
    with pytest.raises(ArgumentError, match="contradicts"):
        amp_compile(nn.Linear(2, 2), dtype=FP16, policy=Policy("O2", BF16))
    with pytest.raises(ArgumentError, match=r"must be an amp_compiler\.Policy"):
        amp_compile(nn.Linear(2, 2), policy="O2")
    assert amp_compile(nn.Linear(2, 2), dtype=FP16, policy=Policy("O2")).policy.dtype is FP16
    assert amp_compile(nn.Linear(2, 2), dtype="fp16", policy=Policy("O2", FP16)).policy.dtype is FP16


# --------------------------------------------------------------------------------------- conditional rules


@pytest.mark.parametrize(
    ("rule", "call", "hit"),
    [
        (("gelu", "approximate", ["tanh"]), lambda x: F.gelu(x, approximate="tanh"), True),
        (("gelu", "approximate", ["tanh"]), lambda x: F.gelu(x), False),
        (("gelu", "approximate", ["none"]), lambda x: F.gelu(x), True),
        (("leaky_relu", "negative_slope", [0.2, 0.5]), lambda x: F.leaky_relu(x, 0.5), True),
        (("leaky_relu", "negative_slope", [0.2, 0.5]), lambda x: F.leaky_relu(x, 0.3), False),
        (("leaky_relu", "negative_slope", [0.01]), lambda x: F.leaky_relu(x, 0.01), True),
        (("leaky_relu", "negative_slope", [0.01]), lambda x: F.leaky_relu(x), True),
        ((F.leaky_relu, "negative_slope", [0.5]), lambda x: F.leaky_relu(x, negative_slope=0.5), True),
        (("conv1d", "stride", [[2]]), lambda x: F.conv1d(x[None], x[None].mT, stride=2), True),
        (("conv1d", "stride", [(2,)]), lambda x: F.conv1d(x[None], x[None].mT, stride=2), True),
        (("conv1d", "groups", [4]), lambda x: F.conv1d(x[None], x[:, None], groups=4), True),
    ],
)  # fmt: skip
def test_a_conditional_rule_looks_at_an_argument(rule, call, hit):
    policy = Policy("O3", BF16).with_conditional([rule])
    fast = amp_compile(call, policy=policy)
    fast(torch.randn(4, 4))
    name = rule[0] if isinstance(rule[0], str) else "leaky_relu"
    (row,) = [r for r in fast.report().rows if r.op == name]
    assert row.precision == ("float32" if hit else "bfloat16"), row.reason
    assert ("conditional" in row.reason) is hit


def test_the_example_in_our_own_message_works():
    """The error for a malformed rule names ('softplus', 'beta', [1]): beta=1 is softplus's default."""
    policy = Policy("O3", BF16).with_conditional([("softplus", "beta", [1])])
    fast = amp_compile(lambda x: F.softplus(x), policy=policy)
    fast(torch.randn(4))
    assert fast.report().rows[0].precision == "float32"


@pytest.mark.parametrize("wrong", [("softplus",), ("softplus", "beta", 3), "softplus", 5, ("gelu", "beta")])
def test_a_malformed_conditional_rule(wrong):
    with pytest.raises(PolicyError, match=r"\(op, argument, values\)"):
        Policy().with_conditional([wrong])


def test_a_conditional_rule_on_an_argument_that_is_none():
    with pytest.raises(PolicyError, match=r"no argument 'betta'; it has .*beta"):
        Policy().with_conditional([("softplus", "betta", [1])])
    with pytest.raises(UnknownOpError, match="softplus"):
        Policy().with_conditional([("softpluss", "beta", [1])])


# --------------------------------------------------------------------------------------------------- files


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    words = st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
    patterns = st.one_of(st.sampled_from(["encoder.*", "layers.[0-3]", 'a"b\\c', "é ü", "#"]), words)
    numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans())
    lists: dict[str, list[str]] = {"low": [], "fp32": [], "follow": []}
    ops = draw(st.dictionaries(st.sampled_from(FREE_OPS), st.sampled_from(sorted(lists)), max_size=6))
    for name, where in ops.items():
        lists[where].append(name)
    policy = Policy(
        draw(st.sampled_from(list(LEVELS))), draw(st.sampled_from([None, FP16, BF16])),
        autocast_device=draw(st.sampled_from([None, None, "cpu", "cuda"])),
    )  # fmt: skip
    policy = policy.with_ops(**lists)
    marks = st.dictionaries(patterns, st.sampled_from(["float32", "fp16", BF16]), max_size=2)
    for rules in draw(st.lists(marks, max_size=3)):
        policy = policy.with_modules(rules)
    argument = st.sampled_from([("softplus", "beta"), ("gelu", "approximate"), ("conv2d", "stride")])
    values = st.lists(st.one_of(numbers, words, st.lists(st.integers(0, 9), max_size=2)), max_size=3)
    rules = draw(st.lists(st.tuples(argument, values), max_size=2))
    return policy.with_conditional((op, name, given) for (op, name), given in rules)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(policy=policies())
def test_a_policy_comes_back_from_its_file(tmp_path_factory, policy):
    path = tmp_path_factory.getbasetemp() / "policy.toml"
    policy.to_file(path)
    back = Policy.from_file(path)
    assert back == policy
    assert back.to_toml() == policy.to_toml()


@pytest.mark.parametrize("name", ["a\rb", "a\nb", "a\tb", "a\x7fb", "a\x00b", "a\x1bb", "a\u2028b", "\r\n"])
def test_a_pattern_with_control_characters_comes_back(tmp_path, name):
    policy = Policy().with_modules({name: "float32"})
    policy.to_file(tmp_path / "p.toml")
    assert Policy.from_file(tmp_path / "p.toml") == policy


def test_other_ways_of_writing_a_rule_come_back(tmp_path):
    written = [
        Policy(modules=(("a", "fp32"), ("b", "BF16"))),
        Policy(modules=(("a", torch.float32),)),
        Policy().with_conditional([("conv2d", "stride", [(2, 2)])]),
        Policy(conditional=(Conditional("conv2d", "stride", ((2, 2),)),)),
        Policy(ops=(("aten.linear", OpClass.FP32), ("exp_", OpClass.LOW))),
    ]
    for index, policy in enumerate(written):
        path = tmp_path / f"{index}.toml"
        policy.to_file(path)
        assert Policy.from_file(path) == policy


def test_a_value_that_no_file_can_hold_is_an_error_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "p.toml"
    Policy("O1").to_file(path)
    policy = Policy().with_conditional([("softplus", "beta", [object()])])
    with pytest.raises(PolicyError, match="cannot be written"):
        policy.to_file(path)
    assert Policy.from_file(path) == Policy("O1")


def test_a_file_from_a_person(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'level = "O1"  # a comment\ndtype = "fp16"\nops.fp32 = ["aten.linear"]\n'
        '[[module]]\npattern = "encoder.*"\nprecision = "fp32"\n'
        '[[conditional]]\nop = "softplus"\nargument = "beta"\nvalues = [2]\n'
    )
    expected = Policy("O1", FP16).with_ops(fp32=["linear"]).with_modules({"encoder.*": "float32"})
    assert Policy.from_file(path) == expected.with_conditional([("softplus", "beta", [2])])
    (tmp_path / "empty.toml").write_text("")
    assert Policy.from_file(tmp_path / "empty.toml") == Policy()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('levle = "O1"', "Unknown key 'levle'.*'level'"),
        ("zzz = 1", "Unknown key 'zzz'.*Known: .*level"),
        ('[ops]\nlo = ["linear"]', r"Unknown key 'lo' in \[ops\].*'low'"),
        ("version = 2", "version is 2; this release reads 1"),
        ('version = "1"', "version is '1'"),
        ('level = "O9"', "Unknown level 'O9'"),
        ("level = 2", "Unknown level 2"),
        ('dtype = "float8"', "float16 or torch.bfloat16"),
        ("dtype = 16", "float16 or torch.bfloat16"),
        ('autocast_device = "tpu"', "cpu"),
        ("autocast_device = 3", "must be a text"),
        ('ops = ["linear"]', r"write \[ops\]"),
        ('[ops]\nlow = "linear"', "must be a list"),
        ('[ops]\nlow = ["liner"]', "Did you mean 'linear'"),
        ("[ops]\nlow = [3]", "name such as 'linear'"),
        ('[ops]\nlow = ["linear"]\nfp32 = ["aten.linear"]', "two lists"),
        (f'[ops]\nlow = ["{KEPT_OPS[0]}"]', "cannot be given a precision"),
        ('[module]\npattern = "a"\nprecision = "float32"', r"\[\[module\]\] tables"),
        ('[[module]]\npattern = "a"', "lacks 'precision'"),
        ('[[module]]\npattern = "a"\nprecisoin = "float32"', "Unknown key 'precisoin'.*'precision'"),
        ('[[module]]\npattern = "a"\nprecision = "int8"', "choose 'float32'"),
        ('[[module]]\npattern = 3\nprecision = "float32"', "path pattern such as"),
        ('[[module]]\npattern = ["a"]\nprecision = "float32"', "path pattern such as"),
        ('[[conditional]]\nop = "softplus"\nargument = "beta"', "lacks 'values'"),
        ('[[conditional]]\nop = "softplus"\nargument = "b"\nvalues = [1]', "no argument 'b'"),
        ('[[conditional]]\nop = "softplus"\nargument = "beta"\nvalues = 1', "must be a list"),
        ('[[conditional]]\nop = 3\nargument = "beta"\nvalues = [1]', "name such as"),
        ("level = ", "is not TOML"),
        ("[ops", "is not TOML"),
        ('level = "O1"\nlevel = "O2"', "is not TOML"),
    ],
)  # fmt: skip
def test_a_file_with_a_mistake_says_where_and_what(tmp_path, text, says):
    path = tmp_path / "mistake.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=f"mistake.toml.*{says}"):
        Policy.from_file(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(PolicyError, match=r"nothing\.toml cannot be read: No such file"):
        Policy.from_file(tmp_path / "nothing.toml")
    with pytest.raises(PolicyError, match="cannot be read: Is a directory"):
        Policy.from_file(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00level")
    with pytest.raises(PolicyError, match="is not TOML"):
        Policy.from_file(tmp_path / "binary.toml")


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for path in ("missing/p.toml", "file/p.toml", "folder", "x" * 300):
        with pytest.raises(PolicyError, match="could not be written"):
            Policy().to_file(tmp_path / path)
    with pytest.raises(PolicyError, match=r"there is no folder .*missing; create it first \(mkdir -p .*missing\)"):
        Policy().to_file(tmp_path / "missing" / "p.toml")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"], "something was left behind"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_without_a_name():
    for path in ("", ".", "/"):
        with pytest.raises(PolicyError, match="could not be written"):
            Policy().to_file(path)


@pytest.mark.parametrize("broken", ["replace", "write"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, broken):
    path = tmp_path / "p.toml"
    Policy("O1").to_file(path)
    before = path.read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if broken == "replace":
            patch.setattr(os, "replace", full)
        else:
            patch.setattr(Path, "write_text", full)
        with pytest.raises(PolicyError, match="No space left"):
            Policy("O3").to_file(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.toml"]


def test_a_file_decides_as_the_policy_did(tmp_path):
    made = Policy("O2", BF16).with_ops(fp32=["linear"], low=["exp"]).with_modules({"1": "float16"})
    made.to_file(tmp_path / "p.toml")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = []
    for policy in (made, Policy.from_file(tmp_path / "p.toml")):
        fast = amp_compile(model, policy=policy)
        fast(torch.randn(2, 4))
        found.append([(r.op, r.precision, r.reason) for r in fast.report().rows])
    assert found[0] == found[1]
    assert [p for _, p, _ in found[0]] == ["float32", "float16"]


# ------------------------------------------------------------------------------- defaults, torch, patterns


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (torch.device("cpu"), BF16),
        ("cpu", BF16),
        ("cuda", FP16),
        ("cuda:1", FP16),
        (torch.device("cuda"), FP16),
    ],
)
def test_the_default_dtype_is_autocasts(device, dtype):
    assert Policy.default("O1", None, device) == Policy("O1", dtype)
    kind = torch.device(device).type
    assert Policy.torch(kind).dtype is dtype
    assert torch.get_autocast_dtype(kind) is dtype
    assert Policy.default("O1", FP16, device).dtype is FP16


def test_policy_torch_follows_autocasts_lists():
    policy = Policy.torch("cpu", BF16)
    assert policy == Policy("auto", BF16, autocast_device="cpu")

    def code(x: Tensor) -> Tensor:
        # on the CPU torch.autocast lists neither softmax nor exp
        return torch.exp(torch.softmax(F.linear(x, x), -1))

    fast = amp_compile(code, policy=policy, keep_output_dtypes=False)
    x = torch.randn(4, 4)
    with torch.autocast("cpu", BF16):
        expected = code(x)
    found = fast(x)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    assert "autocast" in fast.report().rows[0].reason


PATHS = {f"encoder.layers.{i}.{j}" for i in "01" for j in "01"} | {"encoder_head", ""}


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("encoder", PATHS - {"encoder_head", ""}),
        ("encoder.*", PATHS - {"encoder_head", ""}),
        ("encoder*", PATHS - {""}),
        ("encoder.layers.0", {"encoder.layers.0.0", "encoder.layers.0.1"}),
        ("encoder.layers.0.*", {"encoder.layers.0.0", "encoder.layers.0.1"}),
        ("*.1", {"encoder.layers.0.1", "encoder.layers.1.0", "encoder.layers.1.1"}),
        ("encoder.layers.[1-9].0", {"encoder.layers.1.0"}),
        ("encoder_head", {"encoder_head"}),
        ("*", PATHS),
    ],
)
def test_a_module_pattern_takes_the_module_and_all_below(pattern, paths):
    policy = Policy("O2", BF16).with_modules({pattern: "float32"})
    assert {path for path in PATHS if policy.module_rule(path) is not None} == paths


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), two_layers()])})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder["layers"]:
            x = layer(x)
        return torch.matmul(x, x.mT)


@pytest.mark.parametrize("what", ["*", "encoder.layers.1", Tree])
def test_modules_left_out_run_in_fp32_and_no_others(what):
    left_out = {"encoder.layers.1.0", "encoder.layers.1.1"}
    if what != "encoder.layers.1":
        left_out |= {"encoder.layers.0", ""}
    fast = amp_compile(Tree(), "O2", dtype=BF16, exclude=[what])
    fast(torch.randn(2, 4))
    rows = [r for r in fast.report().rows if r.op in ("linear", "matmul")]
    assert len(rows) == 4
    assert {r.module for r in rows if r.precision == "float32"} == left_out


def test_the_model_itself_can_be_marked_or_left_out():
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, x)

    x = torch.randn(4, 4)
    assert precisions(set_precision(Product(), "float32"), x)["matmul"] == "float32"
    assert precisions(Product(), x, exclude=[Product])["matmul"] == "float32"
    assert precisions(nn.Linear(4, 4), x, exclude=[nn.Linear])["linear"] == "float32"


def test_exclude_takes_a_class():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    fast = amp_compile(model, "O3", dtype=BF16, exclude=[nn.Linear])
    fast(torch.randn(2, 4))
    assert {r.op: r.precision for r in fast.report().rows} == {
        "linear": "float32", "layer_norm": "bfloat16", "gelu": "bfloat16",
    }  # fmt: skip


def test_the_last_matching_module_rule_wins():
    policy = Policy("O2", BF16).with_modules({"*": "float32"}).with_modules({"1": "float16"})
    fast = amp_compile(two_layers(), policy=policy)
    fast(torch.randn(2, 4))
    assert [r.precision for r in fast.report().rows] == ["float32", "float16"]
    policy = Policy("O2", BF16).with_modules({"1": "float16"}).with_modules({"*": "float32"})
    fast = amp_compile(two_layers(), policy=policy)
    fast(torch.randn(2, 4))
    assert [r.precision for r in fast.report().rows] == ["float32", "float32"]


def test_exclude_wins_over_the_module_rules_of_a_policy():
    policy = Policy("O2", BF16).with_modules({"*": "float16"})
    fast = amp_compile(two_layers(), policy=policy, exclude=["0"])
    fast(torch.randn(2, 4))
    assert [r.precision for r in fast.report().rows] == ["float32", "float16"]


# ---------------------------------------------------------------------------------------------- precedence


class Softplus(nn.Module):
    """softplus with beta=2 inside a module, with or without a region around it in the code."""

    def __init__(self, region: str | None) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        if self.region is None:
            return F.softplus(x, beta=2)
        with precision(self.region):
            return F.softplus(x, beta=2)


MECHANISMS = ["region", "set_precision", "module_rule", "conditional", "list", "table"]
LOW, HIGH = "bfloat16", "float32"


@functools.cache
def outcome(**chosen: str) -> str:
    """The precision of softplus when each mechanism in ``chosen`` asks for its dtype."""
    level = "O3" if chosen.get("table", LOW) == LOW else "O1"
    policy = Policy(level, BF16)
    if "list" in chosen:
        policy = policy.with_ops(**{"low" if chosen["list"] == LOW else "fp32": ["softplus"]})
    if "conditional" in chosen:
        policy = policy.with_conditional([("softplus", "beta", [2])])
    if "module_rule" in chosen:
        policy = policy.with_modules({"act": chosen["module_rule"]})
    act = Softplus(chosen.get("region"))
    if "set_precision" in chosen:
        set_precision(act, chosen["set_precision"])
    model = nn.Sequential()
    model.add_module("act", act)
    fast = amp_compile(model, policy=policy)
    fast(torch.randn(3))
    (row,) = [r for r in fast.report().rows if r.op == "softplus"]
    return row.precision


PAIRS = [
    (winner, loser, a, b)
    for winner, loser in itertools.combinations(MECHANISMS, 2)
    for a, b in ((LOW, HIGH), (HIGH, LOW))
    if not (winner == "conditional" and a == LOW) and not (loser == "conditional" and b == LOW)
]


@pytest.mark.parametrize(("winner", "loser", "a", "b"), PAIRS, ids=lambda v: v)
def test_precedence(winner, loser, a, b):
    assert outcome(**{loser: b}) == b, f"{loser} alone has no effect"
    assert outcome(**{winner: a, loser: b}) == a


def test_a_black_list_holds_at_every_level():
    """O3 runs the table's FP32 ops low; an op that the user named stays in fp32."""
    for level in ("O1", "auto", "O2", "O3"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
        found = precisions(model, torch.randn(2, 4), level=level, black_list=["linear", "softmax"])
        assert found == {"linear": HIGH, "softmax": HIGH}, level


def test_all_at_once_the_region_wins():
    everything = dict.fromkeys(MECHANISMS, HIGH)
    assert outcome(**{**everything, "region": LOW}) == LOW


def test_exclude_wins_over_a_white_list_and_loses_to_set_precision():
    x = torch.randn(2, 4)
    assert precisions(two_layers(), x, exclude=["*"], white_list=["linear"])["linear"] == HIGH
    model = two_layers()
    set_precision(model[1], "bfloat16")
    fast = amp_compile(model, "O2", dtype=BF16, exclude=["*"])
    fast(x)
    assert [r.precision for r in fast.report().rows] == [HIGH, LOW]


def test_the_innermost_region_and_the_innermost_mark_win():
    def code(x: Tensor) -> Tensor:
        with precision("float32"):
            x = F.gelu(x)
            with precision("bfloat16"):
                return torch.tanh(x)

    assert precisions(code, torch.randn(3), level="O1") == {"gelu": HIGH, "tanh": LOW}
    model = nn.Sequential(two_layers(), nn.Linear(4, 4))
    set_precision(model, "float32")
    set_precision(model[0][1], "bfloat16")
    fast = amp_compile(model, "O2", dtype=BF16)
    fast(torch.randn(2, 4))
    assert [r.precision for r in fast.report().rows] == [HIGH, LOW, HIGH]


def test_a_nested_autocast_wins_over_a_mark():
    class Off(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return F.linear(x, x)

    model = nn.Sequential(Off())
    set_precision(model, "bfloat16")
    assert precisions(model, torch.randn(3, 3))["linear"] == HIGH


def test_set_precision_none_takes_the_mark_off():
    model = two_layers()
    set_precision(model, "float32")
    set_precision(model, None)
    assert precisions(model, torch.randn(2, 4))["linear"] == LOW
    for wrong in (3, "int8"):
        with pytest.raises(AmpError, match="choose 'float32'"):
            set_precision(model, wrong)
    with pytest.raises(AmpError, match=r"takes a torch\.nn\.Module"):
        set_precision(torch.sin, "float32")


def test_the_newest_word_on_an_op_counts():
    policy = Policy("O2", BF16).with_ops(fp32=["linear"]).with_ops(low=["linear"])
    assert policy.classify("linear").cls is OpClass.LOW
    follow = Policy("O1", BF16).with_ops(follow=["linear"])
    assert precisions(two_layers(), torch.randn(2, 4), policy=follow)["linear"] == HIGH
