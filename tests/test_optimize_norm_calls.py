"""Norms that a user's code calls as functions: ``F.group_norm(x, ...)``, in whatever form it is written."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import group_norm as by_another_name
from torch.utils._python_dispatch import TorchDispatchMode

import kgopt
from kgopt.rewrite.norms import sites
from optimize_pairs import check, pair


class Parameters(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5)
        self.bias = nn.Parameter(torch.randn(channels))
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)


class Module(Parameters):
    """As image generators write it: no subclass of nn.GroupNorm, and parameters in x's dtype."""

    def forward(self, x):
        x = F.group_norm(x, num_groups=2, weight=self.weight.to(x.dtype), bias=self.bias.to(x.dtype), eps=1e-4)
        return self.conv(x)


class WithoutParameters(Parameters):
    def forward(self, x):
        return F.group_norm(self.conv(x), 4, eps=0.1)


class InBranches(Parameters):
    def forward(self, x):
        h = by_another_name(x, 2, self.weight) if x.dim() == 4 else x
        if self.training:
            h = h + torch.nn.functional.group_norm(h, 1, None, self.bias)
        return nn.functional.silu(F.group_norm(h, 4))


class Instance(Parameters):
    def forward(self, x):
        x = F.instance_norm(x, weight=self.weight, bias=self.bias)
        return F.instance_norm(self.conv(x), None, None, None, self.bias, eps=1e-3)


class BesideModules(Parameters):
    """Between norms that are modules, of which one is called as a function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        return h + F.group_norm(x, 2, self.norm.weight, self.norm.bias, self.norm.eps)


class Activated(Parameters):
    """Activations as functions and modules, in an expression and in a statement of their own."""

    def __init__(self):
        super().__init__()
        self.act = nn.Hardswish()

    def forward(self, x):
        h = F.group_norm(x, 2, self.weight, self.bias)
        h = F.leaky_relu(h, 0.2, inplace=True)
        h = self.act(F.instance_norm(self.conv(h)))
        if x.dim() == 4:
            h = F.group_norm(h, 1)
            h = torch.tanh(h)
        kept = F.group_norm(h, 4)
        h = F.silu(kept)
        return h + F.gelu(kept, approximate="tanh")


class Sums(Parameters):
    """Residuals behind functions: as an operand, in place, behind a dropout, with PReLU, of two norms, by a shift."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.prelu = nn.PReLU(4)

    def forward(self, x):
        h = F.relu(F.group_norm(self.conv(x), 2, self.weight, self.bias) + x)
        out = F.instance_norm(self.conv(h))
        out += h
        out = F.leaky_relu(out, 0.2)
        y = F.group_norm(out, num_groups=4)
        y = self.drop(y)
        y = h + y
        y = self.prelu(y)
        z = F.group_norm(y, 1) + F.group_norm(x, 2)
        return z + (F.group_norm(y, 2) + self.weight.view(1, -1, 1, 1))


class Scaled(Parameters):
    """As diffusers' AdaGroupNorm: a norm without parameters, times and plus values of each sample and channel."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        scale, shift = self.linear(x.mean((2, 3)))[:, :, None, None].chunk(2, dim=1)
        x = F.group_norm(x, 2, eps=1e-3)
        x = x * (1 + scale) + shift
        return x


class AroundScaled(Parameters):
    """What the module gives waits for the activation behind it."""

    def __init__(self):
        super().__init__()
        self.norm = Scaled()
        self.act = nn.SiLU()

    def forward(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        return F.relu(self.norm(h) + x)


NETWORKS = [Sums, Scaled, AroundScaled, Activated, Module, WithoutParameters, InBranches, Instance, BesideModules]


class Names(TorchDispatchMode):
    """What is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def norms_in(net, *args):
    with Names() as seen:
        net(*args)
    theirs = {"aten::native_group_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit"}
    ours = sum(name.startswith("kgopt::group_norm") for name in seen.names)
    return ours, sum(name in theirs or name.startswith("aten::_native_batch_norm") for name in seen.names)


def has_gradients_of_a_bias_alone():
    """Not PyTorch's own GroupNorm in 2.13 on the CPU: "tensor does not have a device"."""
    bias = torch.randn(4, requires_grad=True)
    try:
        F.group_norm(torch.randn(2, 4, 3, requires_grad=True), 2, None, bias).sum().backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("train", [False, True])
def test_values_and_gradients(make, train):
    """In training such a call ran PyTorch's code, the slowest kernel of a whole step."""
    if make is InBranches and train and not has_gradients_of_a_bias_alone():
        pytest.skip("this torch has no gradient of a bias without a weight")
    net, original = (m.train(train) for m in pair(make))
    check(net, original)
    ours, theirs = norms_in(net, torch.randn(2, 4, 5, 6, dtype=torch.float64))
    wanted = {
        Sums: 6,
        Scaled: 1,
        AroundScaled: 2,
        Activated: 4,
        Module: 1,
        WithoutParameters: 1,
        InBranches: 3 if train else 2,
        Instance: 2,
        BesideModules: 2,
    }
    assert (ours, theirs) == (wanted[make], 0)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (Sums, ["add relu", "add leaky_relu(0.2)", "prelu sum", "none", "add none", "scaled none"]),
        (Scaled, ["scaled none"]),
        (AroundScaled, ["scaled silu", "scaled none"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_follows_joins(make, wanted, monkeypatch):
    """Sums, scales and shifts behind a function are part of its op, as they are behind a module."""
    net, _ = pair(make)
    seen = []
    run, run_added, run_modulated = sites.Site.run_now, sites.Site.run_added, sites.Site.run_modulated

    def alone(self, *args):
        seen.append(self.chain.post)
        return run(self, *args)

    def added(self, norm, x, other, act, prelu=None, begun=True):
        y = run_added(self, norm, x, other, act, prelu, begun)
        seen.extend([] if y is None else ["prelu sum" if prelu is not None else f"add {act}"])
        return y

    def scaled(self, norm, x, factor, shift, act="none", *more):
        seen.append(f"scaled {act}")
        return run_modulated(self, norm, x, factor, shift, act, *more)

    monkeypatch.setattr(sites.Site, "run_now", alone)
    monkeypatch.setattr(sites.Site, "run_added", added)
    monkeypatch.setattr(sites.Site, "run_modulated", scaled)
    net(torch.randn(2, 4, 5, 6, dtype=torch.float64))
    assert seen == wanted


def test_waiting_calls_see_what_was_there():
    """A function that was replaced, hooks on what follows, and a value that is written to before the sum."""

    class Written(Parameters):
        def forward(self, x):
            h = F.group_norm(x, 2, self.weight)
            x.mul_(2)
            return F.relu(h + x)

    x = torch.randn(1, 4, 5, 6, dtype=torch.float64)
    net, original = pair(Written)
    torch.testing.assert_close(net(x.clone()), original(x.clone()), rtol=1e-10, atol=1e-10)
    net, original = pair(Sums)
    for one in (net, original):
        one.prelu.register_forward_hook(lambda module, given, result: result + given[0])
    torch.testing.assert_close(net(x), original(x), rtol=1e-10, atol=1e-10)


def test_activations_join():
    """Into the calls of the op; those of a value that is read twice stay alone."""
    net, _ = pair(Activated)
    acts = []

    class Acts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name.startswith("kgopt::group_norm"):
                acts.extend(a for a in args if isinstance(a, str))
            return func(*args, **(kwargs or {}))

    with Acts():
        net(torch.randn(1, 4, 5, 5, dtype=torch.float64))
    assert [act for act in acts if act != "none"] == ["leaky_relu(0.2)", "hardswish", "tanh"]


def test_a_replaced_activation_runs(monkeypatch):
    net, _ = pair(Activated)
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    expected = net(x)
    seen = []
    net.act.register_forward_hook(lambda *_: seen.append("hook"))
    torch.testing.assert_close(net(x), expected)
    assert seen == ["hook"]
    monkeypatch.setattr(torch, "tanh", lambda x: seen.append("tanh") or x)
    assert (net(x) - expected).abs().max() > 0.1
    assert seen == ["hook", "hook", "tanh"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_autocast_and_half(dtype, device):
    net = kgopt.optimize(Module().to(device, dtype), measure=False)
    x = torch.randn(2, 4, 8, 8, device=device, dtype=dtype)
    expected = kgopt.restore(copy.deepcopy(net))
    assert net(x).dtype is dtype
    torch.testing.assert_close(net(x), expected(x), rtol=2e-2, atol=2e-2)
    if dtype is torch.float32:
        half = torch.bfloat16
        with torch.autocast(device, half):
            seen, wanted = net(x), expected(x)
        assert seen.dtype is wanted.dtype
        torch.testing.assert_close(seen, wanted, rtol=5e-2, atol=5e-2)


def test_measured_where_example_inputs_are(device):
    torch.manual_seed(0)
    net = kgopt.optimize(Module().to(device).eval(), torch.randn(2, 4, 33, 35, device=device))
    row = next(row for row in kgopt.report(net).sites if row.path == "")
    assert row.kind == "norm as a function"
    assert row.us_before is not None


def test_a_replaced_function_runs(monkeypatch):
    """What a user put in the place of F.group_norm is what runs, whether before or after."""
    net, _ = pair(WithoutParameters)
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    monkeypatch.setattr(F, "group_norm", lambda x, *args, **kwargs: torch.zeros_like(x))
    assert not net(x).any()
    net, _ = pair(WithoutParameters)
    assert not net(x).any()
    monkeypatch.undo()
    assert net(x).any()


@pytest.mark.parametrize(
    "arguments",
    [{"running_mean": torch.zeros(4), "running_var": torch.ones(4)}, {"use_input_stats": False}, {"eps": "much"}],
    ids=["running", "not of the input", "no number"],
)
def test_other_arguments_are_pytorchs(arguments):
    class Net(nn.Module):
        def forward(self, x):
            return F.instance_norm(x, **arguments)

    def outcome(net):
        try:
            return net(torch.ones(1, 4, 3, 3))
        except Exception as error:
            return type(error), str(error)

    seen, expected = outcome(kgopt.optimize(Net(), measure=False)), outcome(Net())
    assert isinstance(seen, torch.Tensor) is isinstance(expected, torch.Tensor)
    assert torch.equal(seen, expected) if isinstance(seen, torch.Tensor) else seen == expected


def test_what_pytorch_refuses_is_refused():
    class Net(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            self.args, self.kwargs = args, kwargs

        def forward(self, x):
            return F.group_norm(x, *self.args, **self.kwargs)

    for args in ((3,), (0,), (2, torch.ones(3)), (2, torch.ones(4, dtype=torch.int64)), (2.0,), ()):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            Net(*args)(torch.ones(1, 4, 3, 3))
        with pytest.raises(expected.type):
            kgopt.optimize(Net(*args), measure=False)(torch.ones(1, 4, 3, 3))


def test_code_with_names_of_its_own_is_left_alone():
    class Net(nn.Module):
        def forward(self, x):
            norms = [F.group_norm(x, groups) for groups in (1, 2)]
            return sum(norms) + (lambda value: F.group_norm(value, 4))(x)

    net, original = pair(Net)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(net(x), original(x))
    assert norms_in(net, x) == (0, 3)


def test_excluded_restored_copied_pickled():
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    net, original = pair(lambda: nn.Sequential(Module(), Module()))
    assert norms_in(net, x) == (2, 0)
    again = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert norms_in(again, x) == (2, 0)
    torch.testing.assert_close(again(x), original(x))
    assert norms_in(kgopt.restore(net), x) == (0, 2)
    assert norms_in(kgopt.optimize(original, exclude="1", measure=False), x) == (1, 1)
    assert [row.path for row in kgopt.report(original).sites] == ["0"]


def test_compiled_in_one_graph():
    torch.manual_seed(0)
    net = kgopt.optimize(Module().eval(), measure=False)
    x = torch.randn(2, 4, 3, 3)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
