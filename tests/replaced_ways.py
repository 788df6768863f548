"""Ways in which Python lets a user replace what a model runs, and models with every kind of site."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from kgopt import torch_private

C = 8


def changed(function):
    """``function``, whose result is another one."""

    def other(*args, **kwargs):
        y = function(*args, **kwargs)
        return y.mul(2).sub(-1) if isinstance(y, torch.Tensor) and y.is_floating_point() else y

    return other


# ----------------------------------------------------------------------------------------------------------------------
# Models


class Mixin:
    def helper(self, x):
        x = self.norm2(x)
        return F.silu(x)


class Block(Mixin, nn.Module):
    """Chains in a method, in a helper of a base class, of functions and methods of tensors."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(2, C), nn.GroupNorm(4, C), nn.InstanceNorm2d(C, affine=True)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.3)
        self.conv1, self.conv2 = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)
        self.scale = 2.0

    def forward(self, x, gain=1.0):
        h = self.norm1(x)
        h = self.act(h)
        h = self.conv1(h)
        h = self.helper(h)
        h = self.drop(h)
        h = self.conv2(h)
        h = self.norm3(h)
        h = h.sigmoid()
        return (x + h) * gain / self.scale


class Decorated(nn.Module):
    """Two blocks in a user's own code, and the reductions."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.act = nn.GroupNorm(2, C), nn.LeakyReLU()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.act(self.norm(x))
        return torch.logsumexp(x, 1, keepdim=True)


class Up(nn.Module):
    """What stands between norms."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.conv = nn.Upsample(scale_factor=2), nn.GroupNorm(2, C), nn.Conv2d(C, C, 1)

    def forward(self, x):
        y = F.interpolate(x, scale_factor=2, mode="nearest")
        y = torch.cat([y, self.up(self.norm(x))], 2)
        y = F.max_pool2d(y, 2)
        return F.pad(self.conv(y), (1, 1, 1, 1), mode="replicate")


class Lse(nn.Module):
    """The third pipeline, as written by people."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, C, 3), nn.GroupNorm(2, C)
        self.tanh, self.act = nn.Tanh(), nn.Hardswish()

    def forward(self, x):
        y = self.conv(x)
        z = self.act(self.tanh(self.norm(y)))
        return torch.logsumexp(y + z, dim=1, keepdim=True)


class MeanOfAll(nn.Module):
    """The first pipeline, with a method of the tensor."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(C, C, 3), nn.GroupNorm(2, C)

    def forward(self, x):
        x = self.norm(self.conv(x))
        return x.mean(dim=(1, 2, 3, 4))


def sequential():
    """Chains of modules, also from one Sequential into the next."""
    inner = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(C, C, 3, padding=1), nn.InstanceNorm2d(C))
    tail = nn.Sequential(nn.GroupNorm(2, C), nn.SiLU(), nn.Identity(), nn.Conv2d(C, 2, 1))
    return nn.Sequential(nn.Conv2d(C, C, 1), nn.GroupNorm(2, C), inner, nn.LeakyReLU(), tail)


def transposed():
    """The second pipeline."""
    return nn.Sequential(nn.ConvTranspose3d(C, C, 2, stride=2), nn.ReLU(), nn.GroupNorm(2, C))


def alone():
    """A norm and nothing else."""
    return nn.ModuleDict({"norm": nn.GroupNorm(2, C)})["norm"]


MODELS = {
    "block": (Block, (2, C, 6, 5)),
    "blocks": (Decorated, (2, C, 6, 5)),
    "sequential": (sequential, (2, C, 6, 5)),
    "between": (Up, (2, C, 6, 4)),
    "lse": (Lse, (2, C, 6, 5)),
    "mean": (MeanOfAll, (2, C, 4, 5, 4)),
    "transposed": (transposed, (2, C, 3, 2, 3)),
    "norm": (alone, (2, C, 6, 5)),
}


def make(name):
    """A model in float64, where kgopt's values are PyTorch's to twelve digits, and its input."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model, torch.randn(shape, dtype=torch.float64)


# ----------------------------------------------------------------------------------------------------------------------
# Attributes of classes and modules


# Empty where the private name counts as missing: then nobody asks what was replaced in it.
_NN = torch_private.nn_functions

# What is looked up on PyTorch's classes and modules.
TORCH = [
    (nn.Module, "__call__"),
    (nn.Module, "_call_impl"),
    *((cls, "forward") for cls in (nn.GroupNorm, nn.InstanceNorm2d, nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.Hardswish)),
    *((cls, "forward") for cls in (nn.Dropout, nn.Identity, nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d, nn.Tanh)),
    *((cls, "forward") for cls in (nn.Sequential, nn.Upsample)),
    *((cls, "__call__") for cls in (nn.GroupNorm, nn.ReLU, nn.Conv2d, nn.Sequential)),
    *((cls, "_call_impl") for cls in (nn.GroupNorm, nn.SiLU, nn.Conv2d, nn.Sequential)),
    *((cls, "_conv_forward") for cls in (nn.Conv2d, nn.Conv3d)),
    (nn.InstanceNorm2d, "_apply_instance_norm"),
    *((F, name) for name in ("group_norm", "instance_norm", "relu", "silu", "leaky_relu", "hardswish", "dropout")),
    *((F, name) for name in ("conv2d", "conv3d", "conv_transpose3d", "interpolate", "pad", "max_pool2d")),
    *((torch, name) for name in ("group_norm", "instance_norm", "relu", "tanh", "cat", "logsumexp")),
    *((_NN, name) for name in ("silu", "leaky_relu", "hardswish", "upsample_nearest2d") if hasattr(_NN, name)),
    *((torch.Tensor, name) for name in ("sigmoid", "mean", "__add__")),
]
OWN = [
    (Block, "forward"),
    (Block, "helper"),
    (Mixin, "helper"),
    (Decorated, "forward"),
    (Lse, "forward"),
    (MeanOfAll, "forward"),
    (Up, "forward"),
]


def at(owner, name):
    """Replaces an attribute while it is entered."""

    @contextlib.contextmanager
    def way(model):
        with mock.patch.object(owner, name, changed(getattr(owner, name))):
            yield

    return way


def code_of(owner, name):
    """What reloading a module in a notebook does: the function stays and has other code."""

    @contextlib.contextmanager
    def way(model):
        function = getattr(owner, name)
        before = function.__code__
        if name == "forward":

            def other(self, x, gain=1.0):
                return self.norm1(x) * 3

        else:

            def other(self, x):
                return self.norm2(x) * 3

        function.__code__ = other.__code__
        try:
            yield
        finally:
            function.__code__ = before

    return way


@contextlib.contextmanager
def class_of(model):
    """The attribute of the class that the instance has now, as ``type(model).forward = ...`` sets it."""
    cls = type(model)
    with mock.patch.object(cls, "forward", changed(cls.forward)):
        yield


@contextlib.contextmanager
def functions_of_globals(model):
    """A name that the module of the user's code imported."""
    other = types.SimpleNamespace(**{**vars(F), "silu": changed(F.silu)})
    with mock.patch.dict(Block.forward.__globals__, {"F": other}):
        yield


def first(model, *classes):
    """The first module of one of these classes."""
    return next((m for m in model.modules() if isinstance(m, classes)), None)


def of_first(change, *classes):
    """Changes the first module of these classes, where there is one; ``change`` returns what undoes it."""

    @contextlib.contextmanager
    def way(model):
        module = first(model, *classes)
        undo = None if module is None else change(module)
        try:
            yield
        finally:
            if undo is not None:
                undo()

    return way


def on_instance(name, *classes):
    """Replaces a method of one module, as ``m.forward = types.MethodType(...)`` does."""

    def change(module):
        setattr(module, name, types.MethodType(changed(getattr(type(module), name)), module))
        return lambda: delattr(module, name)

    return of_first(change, *classes)


def hooked(register, *classes):
    """Registers a hook of one module."""
    return of_first(lambda module: register(module).remove, *classes)


@contextlib.contextmanager
def global_hook(model):
    """A hook of every module."""
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, y: y * 2 if y.is_floating_point() else y)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def global_pre_hook(model):
    """A hook before every module, containers among them."""
    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, a: (a[0] * 2, *a[1:]))
    try:
        yield
    finally:
        handle.remove()


class Wrapper(nn.Module):
    """A submodule's wrapper, as adapters are put in."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2 + 1


def wrapped(*classes):
    """A submodule in a wrapper."""

    @contextlib.contextmanager
    def way(model):
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if isinstance(child, classes):
                    parent._modules[name] = Wrapper(child)
                    try:
                        yield
                    finally:
                        parent._modules[name] = child
                    return
        yield

    return way


def another_class(*classes):
    """The class of one module."""

    @contextlib.contextmanager
    def way(model):
        module = first(model, *classes)
        if module is None or module is model:
            yield
            return
        before = type(module)
        module.__class__ = type("Other", (before,), {"forward": changed(before.forward)})
        try:
            yield
        finally:
            module.__class__ = before

    return way


class Times(nn.Module):
    def forward(self, w):
        return w * 1.5


def parametrized(name, *classes):
    """A parametrization of a weight or bias."""

    @contextlib.contextmanager
    def way(model):
        module = first(model, *classes)
        if module is None or getattr(module, name) is None:
            yield
            return
        parametrize.register_parametrization(module, name, Times())
        try:
            yield
        finally:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)

    return way


def pruned(name):
    """Pruning, by a hook and an attribute that is no parameter."""

    @contextlib.contextmanager
    def way(model):
        module = first(model, nn.Conv2d)
        if module is None:
            yield
            return
        before = getattr(module, name).detach().clone()
        prune.custom_from_mask(module, name, torch.arange(before.numel()).reshape(before.shape) % 2)
        try:
            yield
        finally:
            prune.remove(module, name)
            getattr(module, name).data.copy_(before)

    return way


class Changing(torch.overrides.TorchFunctionMode):
    """A function mode that changes what some functions give."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        names = ("group_norm", "instance_norm", "relu", "silu", "interpolate", "conv2d", "conv3d", "conv_transpose3d")
        return y * 2 + 1 if getattr(func, "__name__", "") in names else y


@contextlib.contextmanager
def mode(model):
    """A function mode around the call."""
    with Changing():
        yield


@contextlib.contextmanager
def inplace(model):
    """An attribute of an activation that its class reads at each call."""
    acts = [m for m in model.modules() if isinstance(m, nn.LeakyReLU)]
    for m in acts:
        m.negative_slope = 0.5
    try:
        yield
    finally:
        for m in acts:
            m.negative_slope = 0.01


@contextlib.contextmanager
def weight_norm(model):
    """A parametrization that PyTorch has."""
    conv = first(model, nn.Conv2d, nn.Conv3d)
    if conv is None:
        yield
        return
    before = conv.weight.detach().clone()
    parametrizations.weight_norm(conv)
    with torch.no_grad():
        conv.parametrizations.weight.original0.mul_(3)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(conv, "weight")
        with torch.no_grad():
            conv.weight.copy_(before)


def set_on(owner, name, value):
    """An attribute that the owner need not have had."""

    @contextlib.contextmanager
    def way(model):
        with mock.patch.object(owner, name, value, create=not hasattr(owner, name)):
            yield

    return way


def code_in(function, changes):
    """The code of a function of PyTorch's, or what else may be set while the function stays."""

    @contextlib.contextmanager
    def way(model):
        before = {name: getattr(function, name) for name in changes}
        for name, value in changes.items():
            setattr(function, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(function, name, value)

    return way


@contextlib.contextmanager
def weight_in_dict(model):
    """A tensor that stands before a norm's parameter of the same name."""
    norm = first(model, nn.GroupNorm)
    if norm is None:
        yield
        return
    norm.__dict__["weight"] = norm.weight.detach() * 2
    try:
        yield
    finally:
        del norm.__dict__["weight"]


def _norm_forward(self, input):
    return input * 3


def _functional(input, *args, **kwargs):
    return input * 3


_getattr = nn.Module.__getattr__


def _getattr_twice(self, name):
    value = _getattr(self, name)
    return value * 2 if name == "bias" and value is not None else value


def _name(owner, name):
    return f"{getattr(owner, '__name__', owner)}.{name}"


_NORMS, _CONVS = (nn.GroupNorm, nn.InstanceNorm2d), (nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d)
_ACTS = (nn.ReLU, nn.SiLU, nn.Tanh)
CLASSES = {_name(*place): at(*place) for place in (*TORCH, *OWN)}
INSTANCES = {
    "type(model).forward": class_of,
    "Block.forward.__code__": code_of(Block, "forward"),
    "Mixin.helper.__code__": code_of(Mixin, "helper"),
    "F of globals": functions_of_globals,
    "GroupNorm.forward.__code__": code_in(nn.GroupNorm.forward, {"__code__": _norm_forward.__code__}),
    "InstanceNorm.forward.__code__": code_in(nn.InstanceNorm2d.forward, {"__code__": _norm_forward.__code__}),
    "F.group_norm.__code__": code_in(F.group_norm, {"__code__": _functional.__code__}),
    "F.silu.__code__": code_in(F.silu, {"__code__": _functional.__code__}),
    "F.relu.__code__": code_in(F.relu, {"__code__": _functional.__code__}),
    "F.silu.__defaults__": code_in(
        F.silu, {"__code__": (lambda input, inplace=False: input * inplace).__code__, "__defaults__": (3.0,)}
    ),
    "Module._compiled_call_impl": set_on(nn.Module, "_compiled_call_impl", changed(nn.Module._call_impl)),
    "Module.__getattr__": set_on(nn.Module, "__getattr__", _getattr_twice),
    "weight before the parameter": weight_in_dict,
    "norm.forward": on_instance("forward", *_NORMS),
    "norm._call_impl": on_instance("_call_impl", *_NORMS),
    "instance_norm._apply_instance_norm": on_instance("_apply_instance_norm", nn.InstanceNorm2d),
    "act.forward": on_instance("forward", *_ACTS),
    "conv.forward": on_instance("forward", *_CONVS),
    "conv._conv_forward": on_instance("_conv_forward", nn.Conv2d, nn.Conv3d),
    "conv._output_padding": on_instance("_output_padding", nn.ConvTranspose3d),
    "sequential.forward": on_instance("forward", nn.Sequential),
    "block.helper": on_instance("helper", Block),
    "block.forward": on_instance("forward", Block, Lse, MeanOfAll, Up),
    "norm's hook": hooked(lambda m: m.register_forward_hook(lambda m, a, y: y * 2), *_NORMS),
    "norm's pre-hook": hooked(lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * a[0],)), *_NORMS),
    "act's hook with kwargs": hooked(
        lambda m: m.register_forward_hook(lambda m, a, k, y: y * 2, with_kwargs=True, always_call=True), *_ACTS
    ),
    "conv's hook": hooked(lambda m: m.register_forward_hook(lambda m, a, y: y * 2), *_CONVS),
    "every module's hook": global_hook,
    "every module's pre-hook": global_pre_hook,
    "wrapped norm": wrapped(*_NORMS),
    "wrapped act": wrapped(*_ACTS),
    "wrapped conv": wrapped(*_CONVS),
    "norm's class": another_class(*_NORMS),
    "act's class": another_class(*_ACTS),
    "conv's class": another_class(*_CONVS),
    "parametrized norm": parametrized("weight", nn.GroupNorm),
    "parametrized norm's bias": parametrized("bias", nn.GroupNorm),
    "parametrized conv": parametrized("weight", *_CONVS),
    "parametrized conv's bias": parametrized("bias", *_CONVS),
    "pruned weight": pruned("weight"),
    "pruned bias": pruned("bias"),
    "weight_norm": weight_norm,
    "function mode": mode,
    "attribute of an activation": inplace,
}
WAYS = {**CLASSES, **INSTANCES}
