"""``search_policy`` on networks with planted faults, compiled and run; the rest of it is in ``test_search.py``."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from planted import Planted, expected, gradient_error, relative_error, small_loss
from sklearn import datasets
from torch import nn

from amp_compiler import Policy, amp_compile, calibrate, convert_model, search_policy

X = torch.linspace(-1, 1, 128).reshape(8, 16)
FAULTS = {0: "quotient", 2: "activations"}


@pytest.fixture(scope="module")
def searched():
    model = Planted(4, FAULTS).eval()
    calibration = calibrate(model, [(X, None)])
    evaluate = relative_error(model, X)
    return model, search_policy(model, evaluate, tolerance=0.01, maximize=False, calibration=calibration)


def test_planted_faults_are_found_in_few_evaluations(searched):
    _, search = searched
    assert {name for name, _ in search.reasons} == expected(FAULTS)
    assert set(search.blamed) == expected(FAULTS)
    assert search.evaluations <= 12
    assert search.complete
    assert search.verified
    assert search.confidence is None
    assert search.share == 1.0
    assert not math.isfinite(search.trials[0].metric)
    assert search.trials[-1].purpose == "verification"
    assert search.metric == search.trials[-1].metric <= 0.01
    assert search.baseline == 0.0


def test_the_report_says_which_ops_are_why(searched):
    _, search = searched
    report = search.report()
    assert {row.name for row in report.rows} == expected(FAULTS)
    assert all(row.alone for row in report.rows)
    text = str(report)
    assert "everything low fails: metric nan" in text
    assert "fp16 holds 65504" in text
    assert "planted.py" in text
    assert "blocks.0:addcdiv#0" in text


def test_the_policy_works_everywhere(searched, tmp_path):
    model, search = searched
    held_out = X.flip(0) * 0.9
    evaluate = relative_error(model, held_out)
    assert evaluate(amp_compile(model, policy=search.policy)) <= 0.01
    converted = convert_model(model, (held_out,), policy=search.policy)
    assert evaluate(converted) <= 0.01
    assert converted.report().low_flops_share == 1.0
    assert not math.isfinite(evaluate(convert_model(model, (held_out,), level="O3", dtype=torch.float16)))
    search.to_file(tmp_path / "policy.toml")
    assert Policy.from_file(tmp_path / "policy.toml") == search.policy
    assert "; fp16 holds 65504; in float16 the metric is nan" in (tmp_path / "policy.toml").read_text()


def test_the_trials_as_data_and_as_a_plot(searched, tmp_path):
    _, search = searched
    data = json.loads(search.to_json())
    assert len(data["trials"]) == len(search.trials)
    assert data["trials"][0]["metric"] == "nan"
    shares, metrics = zip(*((t.share, t.metric) for t in search.front), strict=True)
    assert list(shares) == sorted(shares)
    assert list(metrics) == sorted(metrics)
    root = ElementTree.fromstring(search.to_svg(tmp_path / "front.svg"))
    assert len([e for e in root.iter() if e.tag.endswith("circle")]) == len(search.trials)
    assert (tmp_path / "front.svg").exists()


def test_gradients_that_vanish_are_found_by_a_metric_of_gradients():
    faults = {1: "gradients"}
    model = Planted(2, faults).eval()
    assert relative_error(model, X)(amp_compile(model, level="O3", dtype=torch.float16)) < 0.01, "the values all fit"
    calibration = calibrate(model, [(X, None)], small_loss, scale=1.0)
    evaluate = gradient_error(model, X)
    search = search_policy(model, evaluate, tolerance=0.1, maximize=False, calibration=calibration)
    assert {name for name, _ in search.reasons} == expected(faults)
    assert search.trials[0].metric == 1.0, "a weight has no gradient at all"
    assert search.evaluations <= 10
    assert all("has gradients up to" in reason for _, reason in search.reasons)


@pytest.mark.zoo
def test_gradients_that_cancel_are_found_by_a_metric_of_gradients():
    """The weights nearly cancel, so that the two gradients of what they multiply do too: their sum is computed in the
    precision of that value."""
    faults = {1: "weights"}
    model = Planted(2, faults).eval()
    calibration = calibrate(model, [(X, None)], small_loss, scale=1.0)
    search = search_policy(model, gradient_error(model, X), tolerance=0.1, maximize=False, calibration=calibration)
    assert {name for name, _ in search.reasons} == expected(faults, gradients=True)
    assert set(search.blamed) == expected(faults, gradients=True)
    assert "its gradient is a sum that cancels" in dict(search.reasons)["blocks.1:tanh#0"]


def test_without_a_calibration():
    faults = {1: "quotient"}
    model = Planted(2, faults).eval()
    search = search_policy(model, relative_error(model, X), tolerance=0.01, maximize=False, objective="bytes")
    assert {name for name, _ in search.reasons} == expected(faults)
    assert 0.5 < search.share < 1.0


def test_digits_keep_their_accuracy_with_nearly_everything_low():
    data, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(data, dtype=torch.float32) * 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10),
                          Sharp())  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model[:5](x[:1000] / 256), y[:1000]).backward()
        optimizer.step()
    with torch.no_grad():
        model[0].weight /= 256
    model.eval()

    def accuracy(net, part):
        with torch.no_grad():
            return float((net(x[part]).argmax(1) == y[part]).double().mean())

    search = search_policy(model, lambda net: accuracy(net, slice(1000, 1400)), tolerance=0.01,
                           calibration=calibrate(model, [(x[:200], None)]))  # fmt: skip
    held_out = slice(1400, None)
    assert accuracy(amp_compile(model, level="O3", dtype=torch.float16), held_out) < 0.5, "O3 fails"
    found = amp_compile(model, policy=search.policy)
    assert accuracy(found, held_out) >= accuracy(model, held_out) - 0.01
    assert found.report().low_flops_share >= 0.95
    assert {row.module for row in search.report().rows} == {"5"}


class Sharp(nn.Module):
    """Normalizes scores in a way that fp16 cannot: by the sum of their exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(8.0), requires_grad=False)

    def forward(self, x):
        e = torch.exp(x * self.scale)
        return e / e.sum(1, keepdim=True)


def test_a_norm_whose_eps_is_too_small_keeps_only_itself_in_fp32():
    """1 / sqrt(eps) is kept for the backward and is not among the norm's results, so what reads them can be low."""
    model = nn.Sequential(nn.LayerNorm(16, eps=1e-12), nn.Linear(16, 16)).eval()
    fast = amp_compile(model, level="O3", dtype=torch.float16)
    fast(X)
    assert {row.op: row.precision for row in fast.report().rows if row.op in ("layer_norm", "linear")} == {
        "layer_norm": "float32", "linear": "float16",
    }  # fmt: skip
