"""``kgopt.optimize(channels_last=True)``: what a model does to its arguments, the caller sees."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt


class Net(nn.Module):
    """Norm, activation, convolution; then whatever ``end`` does with the arguments."""

    def __init__(self, end):
        super().__init__()
        self.scales = False
        self.norm, self.conv, self.end = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1), end

    def forward(self, x, *args, **kwargs):
        if self.scales:
            x.mul_(2)
        y = self.conv(F.silu(self.norm(x)))
        return self.end(y, x, *args, **kwargs)


def both(end, *args, **kwargs):
    """The model and the optimized one, each on its own copies: results and what has become of the arguments."""
    torch.manual_seed(0)
    original = Net(end)
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    seen = []
    for m in (original, model):
        given = copy.deepcopy((args, kwargs))
        seen.append((m(*given[0], **given[1]), *given))
    return seen


X = torch.linspace(-2, 2, 2 * 4 * 3 * 5).view(2, 4, 3, 5).sin()


@pytest.mark.parametrize("grad", [False, True])
def test_an_in_place_activation_of_the_input_reaches_the_caller(grad):
    """The model wrote to the copy in channels_last, and the caller's tensor kept its old values."""
    with torch.set_grad_enabled(grad):
        (y, (x,), _), (z, (w,), _) = both(lambda y, x: F.relu_(x) + y, X)
    assert (w >= 0).all()
    torch.testing.assert_close(w, x)
    torch.testing.assert_close(z, y)


def test_gradients_flow_through_an_input_that_is_written_to():
    torch.manual_seed(0)
    original = Net(lambda y, x: x + y)
    original.scales = True
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    gradients = []
    for m in (original, model):
        leaf = X.double().requires_grad_()
        x = leaf * 1
        y = m.double()(x)
        (y.sum() + (x * x).sum()).backward()  # x as the model left it
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_lists_and_dicts_that_the_model_fills_are_the_callers():
    """Containers were copied, and what the model put into them was lost."""

    def end(y, x, features, cache):
        features.append(y)
        features[0] = x
        cache["last"] = y
        cache.pop("first")
        return y

    for m, (_, features, cache), _ in both(end, X, [X * 2], {"first": X * 3}):
        assert len(features) == 2
        assert list(cache) == ["last"]
        torch.testing.assert_close(features[0], X)
        torch.testing.assert_close(features[1], m)
        torch.testing.assert_close(cache["last"], m)


def test_an_empty_list_is_passed_as_it_is():
    kept = []
    torch.manual_seed(0)
    model = kgopt.optimize(Net(lambda y, x, features: features is kept), measure=False, channels_last=True)
    assert model(X, kept)


def test_a_result_that_is_an_argument_is_the_callers_tensor():
    torch.manual_seed(0)
    model = kgopt.optimize(Net(lambda y, x, skip=None: (skip, y)), measure=False, channels_last=True)
    skip = X * 2
    assert model(X, skip=skip)[0] is skip


def test_compiled_models_take_lists():
    torch.manual_seed(0)
    original = Net(lambda y, x, features: y + features[0] + features[1])
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, [X, X * 2]), original(X, [X, X * 2]))


@pytest.mark.parametrize("how", ["compiled", "inference mode"])
def test_a_result_that_is_the_argument_where_writes_are_not_counted(how):
    """channels_last=True gave the caller's own tensor back, without what the model had written to its copy of it."""
    model = kgopt.optimize(nn.Sequential(nn.ReLU(inplace=True)).eval(), measure=False, channels_last=True)
    x = torch.randn(1, 4, 4, 4)
    expected = x.relu()
    if how == "compiled":
        y = torch.compile(model, backend="aot_eager")(x)
    else:
        with torch.inference_mode():
            y = model(x.clone())
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
