"""Subclasses of PyTorch's norms: read by what their forward does, and left alone where that is more than a norm."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
from kgopt.rewrite.chains.chain import Chain
from kgopt.rewrite.norms import sites
from optimize_pairs import check, check_compiled, pair, results

C = 6
SHAPE = (2, 2, 3, 4, 5)


class NothingNew(nn.GroupNorm):
    def __init__(self, channels, groups=2):
        super().__init__(groups, channels)


class Super(NothingNew):
    """Calls its base class."""

    def forward(self, x):
        """And has a docstring."""
        return super().forward(x)


class OldSuper(NothingNew):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super(OldSuper, self).forward(x)  # noqa: UP008
        return y


class InstanceSuper(nn.InstanceNorm3d):
    def __init__(self, channels):
        super().__init__(channels, affine=True)

    def forward(self, input):
        return super().forward(input)


class Branch(NothingNew):
    def __init__(self, channels):
        super().__init__(channels)
        self.fast = False

    def forward(self, x):
        if self.fast:
            return other_norm(x) * 2
        else:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Keywords(NothingNew):
    def forward(self, x):
        x = nn.functional.group_norm(x, self.num_groups, bias=self.bias, weight=self.weight, eps=self.eps)
        return x


class WithIdentities(NothingNew):
    def __init__(self, channels):
        super().__init__(channels)
        self.drop = nn.Dropout(0.0)
        self.act = nn.Identity()

    def forward(self, x):
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        return self.act(x)


class WithAct(WithIdentities):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)


class Optional(NothingNew):
    def __init__(self, channels, act=None):
        super().__init__(channels)
        self.act = act

    def forward(self, x):
        y = super().forward(x)
        if self.act is not None:
            y = self.act(y)
        return y


class OptionalAct(Optional):
    def __init__(self, channels):
        super().__init__(channels, nn.SiLU())


class FunctionBehind(NothingNew):
    def forward(self, x):
        return F.leaky_relu(super().forward(x), 0.2)


class Scaled(NothingNew):
    def forward(self, x):
        return super().forward(x) * 2


class Affine(NothingNew):
    def forward(self, x):
        y = 1 + super().forward(x) / 4
        return y


class OwnAct(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(2 * x)


class OwnBehind(WithIdentities):
    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.SiLU(), OwnAct()


def other_norm(x):
    return x - x.mean()


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv = nn.Conv3d(2, C, 3, padding=1)
        self.norm = norm(C)
        self.act = nn.SiLU()
        self.norm2 = norm(C)
        self.head = nn.Sequential(nn.Conv3d(C, C, 1), norm(C), nn.GELU())

    def forward(self, x):
        h = self.norm(self.conv(x))
        h = self.act(h)
        s = h
        h = self.norm2(h)
        h = h + s
        return self.head(h)


def optimized(norm):
    return pair(lambda: Net(norm), std=0.7)


LEAVES = [NothingNew, Super, OldSuper, Branch, Keywords, WithIdentities, Optional]
FUSED = ["silu", "sum none", "gelu"]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm", LEAVES)
def test_a_norm_and_no_more_is_fused_with_the_code_around_it(norm, train, ran):
    net, original = optimized(norm)
    check(net.train(train), original.train(train), SHAPE)
    assert ran == FUSED
    assert type(net.norm).__name__ == norm.__name__
    assert isinstance(net.norm, norm)
    kgopt.restore(net)
    assert type(net.norm) is norm
    check(net, original, SHAPE)


def test_instance_norm(ran):
    net, original = optimized(InstanceSuper)
    check(net, original, SHAPE)
    assert ran == FUSED
    assert [row.kind for row in kgopt.report(net).sites] == [
        f"InstanceSuper → {what}" for what in ("silu", "sum", "gelu")
    ]


@pytest.mark.parametrize(
    ("norm", "act"),
    [
        (WithAct, "relu"),
        (OptionalAct, "silu"),
        (FunctionBehind, "leaky_relu(0.2)"),
        (OwnBehind, "silu"),
        (Scaled, "mul(2.0)"),
        (Affine, "mul(0.25)+add(1.0)"),
    ],
)
def test_activations_of_its_own_join_it(norm, act, ran):
    net, original = optimized(norm)
    check(net, original, SHAPE)
    assert ran == [act] * 3
    assert [row.kind for row in kgopt.report(net).sites] == ["GroupNorm → " + act.replace("+", " → ")] * 3


def test_arithmetic_that_was_replaced(ran, monkeypatch):
    net, original = optimized(Scaled)
    monkeypatch.setattr(torch.Tensor, "__mul__", torch.Tensor.sub)
    check(net, original, SHAPE)
    assert ran == []


def test_a_keyword_argument():
    net, original = optimized(Super)
    x = torch.randn(2, C, 5).double()
    assert torch.equal(net.norm(x=x), original.norm(x=x))
    with pytest.raises(TypeError):
        net.norm(input=x)


@pytest.mark.parametrize("norm", [Branch, WithAct, FunctionBehind, Scaled])
def test_copies_pickles_and_graphs(norm, ran):
    net, original = optimized(norm)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        ran.clear()
        check(other, original, SHAPE)
        assert len(ran) == 3
    check_compiled(net, original, SHAPE)


# ----------------------------------------------------------------------------------------------------------------------
# Left alone


class InPlace(NothingNew):
    def forward(self, x):
        return super().forward(x).mul_(2)


class ByTensor(NothingNew):
    def forward(self, x):
        return super().forward(x) * self.weight[0]


class Residual(NothingNew):
    def forward(self, x):
        return super().forward(x) + x


class OtherEps(NothingNew):
    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias)


class OtherGroups(NothingNew):
    def forward(self, x):
        return F.group_norm(x, 3, self.weight, self.bias, self.eps)


class Keeps(NothingNew):
    def forward(self, x):
        self.seen = x.detach()
        return super().forward(x)


class Twice(NothingNew):
    def forward(self, x):
        return super().forward(super().forward(x))


class ActFirst(WithIdentities):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return super().forward(self.act(x))


class Unused(WithIdentities):
    """Calls a child for what else it does."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        self.act(y)
        return y


class StaleValue(WithAct):
    def forward(self, x):
        y = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        z = self.act(y)  # noqa: F841
        return y  # which the activation has changed


class Property(NothingNew):
    @property
    def eps(self):
        return 0.5

    @eps.setter
    def eps(self, value):
        pass


class OwnCall(NothingNew):
    def __call__(self, x):
        return super().__call__(x) * 3


class Hides(NothingNew):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


class Decides(NothingNew):
    def forward(self, x):
        if x.mean() > 0:
            return super().forward(x)
        return x


class Mixed(NothingNew):
    """Its next class is not PyTorch's."""

    def forward(self, x):
        return super(NothingNew, self).forward(x) - 1


ALONE = [
    Residual,
    InPlace,
    ByTensor,
    OtherEps,
    OtherGroups,
    Keeps,
    Twice,
    ActFirst,
    Unused,
    StaleValue,
    Property,
    OwnCall,
    Hides,
]


@pytest.mark.parametrize("norm", [*ALONE, Decides, Mixed])
def test_more_than_a_norm_is_left_alone(norm, ran):
    net, original = optimized(norm)
    check(net, original, SHAPE)
    assert ran == []
    assert all("which may do more" in row.reason for row in kgopt.report(net).sites)


# ----------------------------------------------------------------------------------------------------------------------
# Changed after it was optimized


def flag(net, patch):
    net.norm.fast = True


def flag_deleted(net, patch):
    del net.norm.fast
    patch.setattr(type(net.norm), "fast", True, raising=False)


def class_forward(net, patch):
    patch.setattr(Branch, "forward", lambda self, x: x + 1)


def class_call(net, patch):
    patch.setattr(Branch, "__call__", lambda self, x: x + 1)


def global_name(net, patch):
    patch.setitem(globals(), "F", nn.Module)
    patch.setattr(nn.Module, "group_norm", lambda x, *_: x + 1, raising=False)


def function(net, patch):
    patch.setattr(F, "group_norm", lambda x, *_: x + 1)


def torch_function(net, patch):
    patch.setattr(torch, "group_norm", lambda x, *_: x + 1)


def code(net, patch):
    patch.setattr(Branch.forward, "__code__", (lambda self, x: x + 1).__code__)


def instance_forward(net, patch):
    net.norm.forward = lambda x: x + 1


@pytest.mark.parametrize(
    "change",
    [flag, flag_deleted, class_forward, class_call, global_name, function, torch_function, code, instance_forward],
)
def test_a_leaf_that_changes(change, monkeypatch):
    net, original = optimized(Branch)
    before = net(torch.ones(1, 2, 3, 4, 5).double())
    for model in (net, original):
        change(model, monkeypatch)
    check(net, original, SHAPE)
    assert not torch.equal(net(torch.ones(1, 2, 3, 4, 5).double()), before)
    monkeypatch.undo()
    if change not in (flag, flag_deleted, instance_forward):
        check(net, original, SHAPE)


def own_act(net):
    net.norm.act = OwnAct()


def other_act(net):
    net.norm.act = nn.Tanh()


def no_act(net):
    net.norm.act = nn.Identity()


def dropout(net):
    net.norm.drop = nn.Dropout(1.0)


def hook(net):
    net.norm.act.register_forward_hook(lambda m, i, o: o + 1)


def norm_hook(net):
    net.norm.register_forward_hook(lambda m, i, o: o + 1)


@pytest.mark.parametrize("change", [own_act, other_act, no_act, dropout, hook, norm_hook])
@pytest.mark.parametrize("norm", [WithIdentities, WithAct])
def test_a_child_that_changes(norm, change):
    net, original = optimized(norm)
    for model in (net, original):
        change(model)
    check(net, original, SHAPE)


def test_a_base_that_changes(monkeypatch):
    net, original = optimized(Super)
    monkeypatch.setattr(NothingNew, "forward", lambda self, x: x + 1, raising=False)
    check(net, original, SHAPE)


def test_global_hooks_see_the_children():
    net, original = optimized(WithIdentities)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m).__name__))
    try:
        results(net, SHAPE)
        ours = list(seen)
        seen.clear()
        results(original, SHAPE)
    finally:
        handle.remove()
    assert ours == seen


class Cast(NothingNew):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class CastAll(NothingNew):
    def forward(self, x):
        y = F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)
        return y.type_as(x)


@pytest.mark.parametrize("norm", [Cast, CastAll])
def test_casts_that_do_nothing(norm, ran):
    net, original = optimized(norm)
    check(net, original, SHAPE) if norm is CastAll else None
    assert ran == []  # float64, which they round
    for model in (net, original):
        model.float()
    check(net, original, SHAPE, rtol=1e-3, atol=1e-3)
    assert ran == FUSED


class Names(nn.Module):
    """Its forward says its own name."""

    scale = 2

    def __init__(self, norm=None):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, C), nn.SiLU()

    def forward(self, x):
        x = self.norm(x) if Names.scale else x
        x = self.norm(x * Names.scale)
        return self.act(x)


def test_a_method_that_names_its_class(ran):
    net, original = pair(Names)
    x = torch.randn(2, C, 5, 5).double()
    torch.testing.assert_close(net(x), original(x), rtol=1e-9, atol=1e-9)
    assert ran == ["none", "silu"]
    assert type(net).forward.__qualname__ == "Names.forward"


@pytest.mark.parametrize("kind", ["group", "instance"])
def test_a_site_from_before_the_classes_of_norms_is_refused(kind, monkeypatch):
    """It took no norm for the rest of the process, and nothing said so."""
    monkeypatch.setitem(sites.LEAVES, kind, [])
    with pytest.raises(RuntimeError, match="import torch_norms first"):
        sites.Site(Chain(kind), ("norm",))
