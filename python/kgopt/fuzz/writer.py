"""Writes a drawn network (:mod:`kgopt.fuzz.grammar`) as Python: classes as people write them.

It follows the shape of the value while it writes, and gives a layer less where it asks for more than the shape allows:
a stride where one position is left becomes 1. Anything that the grammar draws, and any part of it, becomes code that
runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["write_network"]

Json = dict[str, Any]

_IMPORTS = """\
import collections
import contextlib
import dataclasses
import functools

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
"""
_HELPERS = {
    "LayerNorm2d": '''
class LayerNorm2d(nn.LayerNorm):
    """Over channels."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)
''',
    "RMSNorm": """
class RMSNorm(nn.Module):
    def __init__(self, channels, dims):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, *(1,) * dims))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * self.weight
""",
    "UnitNorm": """
class UnitNorm(nn.Module):
    def __init__(self, channels, dims, bias):
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * dims))
        self.bias = nn.Parameter(torch.zeros(channels, *(1,) * dims)) if bias else 0.0

    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale * self.gamma + self.bias
""",
    "CenteredNorm": """
class CenteredNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        y = (x - u) / torch.sqrt(s + 1e-5)
        shape = (1, -1, 1, 1) if x.dim() == 4 else (1, -1, 1, 1, 1)
        return self.weight.view(shape) * y + self.bias.view(shape)
""",
    "PixelNorm": """
class PixelNorm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-6)
""",
    "MyNorm": '''
class MyNorm(nn.GroupNorm):
    """Does more than its base class."""

    def forward(self, x):
        return super().forward(x) * 2
''',
    "BranchNorm": '''
class BranchNorm(nn.GroupNorm):
    """Is its base class, where a flag of the instance says so."""

    fast: bool

    def __init__(self, groups, channels):
        super().__init__(groups, channels)
        self.fast = False

    def forward(self, x):
        if self.fast:
            return F.group_norm(x.float(), self.num_groups, None, None, self.eps).to(x.dtype)
        else:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
''',
    "ActedNorm": '''
class ActedNorm(nn.GroupNorm):
    """With an activation inside."""

    def __init__(self, groups, channels, act):
        super().__init__(groups, channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        return self.act(x)
''',
    "DropPath": """
def drop_path(x, p=0.0, training=False):
    if p == 0.0 or not training:
        return x
    return x * x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(1 - p) / (1 - p)


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return drop_path(x, self.p, self.training)
""",
    "Result": """
@dataclasses.dataclass
class Result:
    sample: torch.Tensor
    kept: object = None
""",
    "logged": """
def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call
""",
}
_NORM_HELPERS = {
    **{"layer": "LayerNorm2d", "rms": "RMSNorm"},
    **{"subclass": "MyNorm", "branch": "BranchNorm", "acted": "ActedNorm"},
    **{"unit": "UnitNorm", "centered": "CenteredNorm", "pixel": "PixelNorm"},
}
_ACT_MODULES = {
    "relu": "nn.ReLU({i})",
    "leaky_relu": "nn.LeakyReLU({i})",
    "silu": "nn.SiLU({i})",
    "gelu": "nn.GELU()",
    "gelu_tanh": "nn.GELU(approximate='tanh')",
    "sigmoid": "nn.Sigmoid()",
    "tanh": "nn.Tanh()",
    "hardswish": "nn.Hardswish({i})",
    "hardtanh": "nn.Hardtanh({i})",
    "elu": "nn.ELU({i})",
    "mish": "nn.Mish({i})",
    "softplus": "nn.Softplus()",
    "prelu": "nn.PReLU()",
    "relu6": "nn.ReLU6({i})",
    "selu": "nn.SELU({i})",
    "leaky_relu_0.2": "nn.LeakyReLU(0.2{j})",
    "elu_0.5": "nn.ELU(0.5{j})",
    "logsigmoid": "nn.LogSigmoid()",
    "softsign": "nn.Softsign()",
    "celu_2": "nn.CELU(2.0{j})",
    "softplus_2": "nn.Softplus(2, 15)",
    "hardtanh_0": "nn.Hardtanh(0, 6{j})",
    "hardsigmoid": "nn.Hardsigmoid({i})",
    "tanhshrink": "nn.Tanhshrink()",
    "softshrink": "nn.Softshrink(0.3)",
    "clamp": "nn.Hardtanh(-0.5, 2{j})",
    "clamp_min": "nn.Threshold(-0.25, -0.25{j})",
}
_ACT_FUNCTIONS = {
    "relu": "F.relu({x}{j})",
    "leaky_relu": "F.leaky_relu({x}{j})",
    "silu": "F.silu({x}{j})",
    "gelu": "F.gelu({x})",
    "gelu_tanh": "F.gelu({x}, approximate='tanh')",
    "sigmoid": "F.sigmoid({x})",
    "tanh": "F.tanh({x})",
    "hardswish": "F.hardswish({x}{j})",
    "hardtanh": "F.hardtanh({x}{j})",
    "elu": "F.elu({x}{j})",
    "mish": "F.mish({x}{j})",
    "softplus": "F.softplus({x})",
    "relu6": "F.relu6({x}{j})",
    "selu": "F.selu({x}{j})",
    "leaky_relu_0.2": "F.leaky_relu({x}, 0.2{j})",
    "elu_0.5": "F.elu({x}, 0.5{j})",
    "logsigmoid": "F.logsigmoid({x})",
    "softsign": "F.softsign({x})",
    "celu_2": "F.celu({x}, 2.0{j})",
    "softplus_2": "F.softplus({x}, beta=2, threshold=15)",
    "hardtanh_0": "F.hardtanh({x}, 0, 6{j})",
    "hardsigmoid": "F.hardsigmoid({x}{j})",
    "tanhshrink": "F.tanhshrink({x})",
    "softshrink": "F.softshrink({x}, 0.3)",
    "clamp": "torch.clamp({x}, -0.5, 2)",
    "clamp_min": "{x}.clamp_min(-0.25)",
}
_INPLACE = ("relu", "leaky_relu", "silu", "hardswish", "hardtanh", "elu", "mish", "relu6", "selu")
_METHODS = ("relu", "sigmoid", "tanh")


@dataclass(frozen=True)
class Shape:
    """Of the value that the code handles: channels, and the sizes behind them."""

    channels: int
    sizes: tuple[int, ...]

    @property
    def positions(self) -> int:
        """In one channel."""
        count = 1
        for s in self.sizes:
            count *= s
        return count


@dataclass(frozen=True)
class _Made:
    """A layer: the module to construct (None: the code alone), and the expression with ``{m}`` and ``{x}``."""

    module: str | None
    call: str
    shape: Shape


class _Class:
    """A class that is being written."""

    def __init__(self, name: str, base: str = "nn.Module") -> None:
        self.name, self.base = name, base
        self.init: list[str] = []
        self.lines: list[str] = []
        self.methods: list[str] = []
        self.decorators: list[str] = []
        self.arguments = "self, x"
        self.indent = 2
        self.count = 0
        self.norm = ""  # a shared one: its name, and for how many channels
        self.norm_channels = 0

    def say(self, line: str) -> None:
        """A line of the forward."""
        self.lines.append("    " * self.indent + line)

    @contextlib.contextmanager
    def under(self, line: str) -> Iterator[None]:
        """A compound statement."""
        self.say(line)
        self.indent += 1
        yield
        self.indent -= 1

    def fresh(self, prefix: str) -> str:
        """A name."""
        self.count += 1
        return f"{prefix}{self.count}"

    def attribute(self, prefix: str, module: str) -> str:
        """Constructs a module; returns how the code calls it."""
        name = self.fresh(prefix)
        self.init.append(f"        self.{name} = {module}")
        return f"self.{name}"

    def text(self) -> str:
        """The class."""
        out = [f"class {self.name}({self.base}):", "    def __init__(self):", "        super().__init__()", *self.init]
        out += ["", *(f"    {d}" for d in self.decorators), f"    def forward({self.arguments}):", *self.lines]
        for method in self.methods:
            out += ["", method]
        return "\n".join(out) + "\n"


class Writer:
    """Writes one network."""

    def __init__(self, case: Json) -> None:
        self.case = case
        self.dims = case["dims"]
        self.classes: list[str] = []
        self.checkpoints = 0  # around what is written now
        self.helpers: list[str] = []
        self.count = 0
        # Random numbers go to elements in the order of memory, and lower precisions draw others.
        self.drops = case["dtype"] == "float64" and case["channels_last"] is False and case["how"] == "eager"

    def need(self, helper: str) -> str:
        """Makes a helper part of the program."""
        if helper not in self.helpers:
            self.helpers.append(helper)
        return helper

    def class_name(self, prefix: str) -> str:
        """A new one."""
        self.count += 1
        return f"{prefix}{self.count}"

    # ------------------------------------------------------------------------------------------------ layers

    def made(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        """What a layer becomes at a shape."""
        return getattr(self, f"_{layer['layer']}")(at, layer, shape)  # type: ignore[no-any-return]

    def _conv(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        d = self.dims
        flat = layer["kernel"] == "flat"
        kernel = [1] + [3] * (d - 1) if flat else [layer["kernel"]] * d
        kernel = [k if k <= s else 1 for k, s in zip(kernel, shape.sizes, strict=True)]
        dilation = [
            layer["dilation"] if (k - 1) * layer["dilation"] < s else 1
            for k, s in zip(kernel, shape.sizes, strict=True)
        ]
        stride = [layer["stride"] if s >= 4 and shape.positions >= 16 else 1 for s in shape.sizes]
        same = layer["padding"] == "same" and all(s == 1 for s in stride)
        padding = [((k - 1) * e) // 2 for k, e in zip(kernel, dilation, strict=True)]
        if layer["padding"] == "0" and all(
            s - (k - 1) * e >= 3 for s, k, e in zip(shape.sizes, kernel, dilation, strict=True)
        ):
            padding = [0] * d
        mode = layer["mode"]
        if mode != "zeros" and any((k - 1) * e >= s for s, k, e in zip(shape.sizes, kernel, dilation, strict=True)):
            mode = "zeros"
        out = max(2, int(shape.channels * layer["out"]))
        groups = 1
        if layer["groups"] == "2" and shape.channels % 2 == 0:
            groups, out = 2, out + out % 2
        elif layer["groups"] == "depthwise":
            groups, out = shape.channels, shape.channels * max(1, int(layer["out"]))
        if same:
            sizes = shape.sizes
        else:
            sizes = tuple(
                (s + 2 * p - e * (k - 1) - 1) // t + 1
                for s, p, e, k, t in zip(shape.sizes, padding, dilation, kernel, stride, strict=True)
            )
        options = ""
        if any(s > 1 for s in stride):
            options += f", stride={_one(stride)}"
        if same or any(padding):
            options += f", padding={repr('same') if same else _one(padding)}"
        if any(e > 1 for e in dilation):
            options += f", dilation={_one(dilation)}"
        if groups > 1:
            options += f", groups={groups}"
        if not layer["bias"]:
            options += ", bias=False"
        if mode != "zeros":
            options += f", padding_mode={mode!r}"
        return _Made(f"nn.Conv{d}d({shape.channels}, {out}, {_one(kernel)}{options})", "{m}({x})", Shape(out, sizes))

    def _tconv(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        d, k, stride = self.dims, layer["kernel"], layer["stride"]
        if shape.positions > 400:
            stride = 1
        padding = min((k - 1) // 2, min(shape.sizes) - 1)
        extra = 1 if layer["extra"] and stride > 1 else 0
        out = max(2, int(shape.channels * layer["out"]))
        groups = 2 if layer["groups"] == "2" and shape.channels % 2 == 0 else 1
        out += out % groups
        sizes = tuple((s - 1) * stride - 2 * padding + k + extra for s in shape.sizes)
        options = "".join(
            f", {name}={value}"
            for name, value, plain in (
                ("stride", stride, 1),
                ("padding", padding, 0),
                ("output_padding", extra, 0),
                ("groups", groups, 1),
                ("bias", layer["bias"], True),
            )
            if value != plain
        )
        return _Made(f"nn.ConvTranspose{d}d({shape.channels}, {out}, {k}{options})", "{m}({x})", Shape(out, sizes))

    def _norm(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        kind, channels, d = layer["norm"], shape.channels, self.dims
        groups = channels if layer["groups"] == "all" else layer["groups"]
        while channels % groups:
            groups -= 1
        if shape.positions < 4:  # statistics of a few elements would say nothing of anything
            groups = 1
            kind = "group" if kind in ("instance", "batch", "tracked") else kind
        if self.checkpoints and self.case["how"] in ("backend", "compiled"):
            # Eager code updates running statistics twice there, compiled code once.
            kind = {"batch": "group", "tracked": "instance"}.get(kind, kind)
        if kind == "tracked" and self.case["channels_last"] is True:
            kind = "instance"  # it stays PyTorch's, whose gradients of one sample in channels_last are wrong on the CPU
        eps = "" if layer["eps"] == 1e-5 else f", eps={layer['eps']}"
        affine = "" if layer["affine"] else ", affine=False"
        group = f"nn.GroupNorm({groups}, {channels}{eps}{affine})"
        if kind == "group" and layer["functional"]:
            m = at.attribute("norm", group)
            return _Made(None, f"F.group_norm({{x}}, {groups}, {m}.weight, {m}.bias, {m}.eps)", shape)
        if kind == "group" and layer["shared"]:
            if at.norm_channels != channels:
                at.norm, at.norm_channels = at.attribute("shared_norm", group), channels
            return _Made(None, f"{at.norm}({{x}})", shape)
        modules = {
            "group": group,
            "instance": f"nn.InstanceNorm{d}d({channels}{eps}{', affine=True' if layer['affine'] else ''})",
            "tracked": f"nn.InstanceNorm{d}d({channels}, affine=True, track_running_stats=True)",
            "batch": f"nn.BatchNorm{d}d({channels}{eps}{affine})",
            "layer": f"LayerNorm2d({channels})",
            "rms": f"RMSNorm({channels}, {d})",
            "unit": f"UnitNorm({channels}, {d}, {layer['affine']})",
            "centered": f"CenteredNorm({channels})",
            "pixel": "PixelNorm()",
            "subclass": f"MyNorm({groups}, {channels})",
            "branch": f"BranchNorm({groups}, {channels})",
            "acted": f"ActedNorm({groups}, {channels}, {'nn.SiLU()' if layer['affine'] else 'nn.Identity()'})",
            "none": "nn.Identity()",
        }
        if kind in _NORM_HELPERS:
            self.need(_NORM_HELPERS[kind])
        return _Made(modules[kind], "{m}({x})", shape)

    def _act(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        act, form = layer["act"], layer["form"]
        inplace = layer["inplace"] and act in (*_INPLACE, "leaky_relu_0.2", "elu_0.5", "celu_2", "hardtanh_0")
        i, j = ("inplace=True", ", inplace=True") if inplace else ("", "")
        module = _ACT_MODULES[act].format(i=i, j=j)
        if form == "shared" and act in _INPLACE:
            name = f"act_{act}{'_' if inplace else ''}"
            line = f"        self.{name} = {module}"
            if line not in at.init:
                at.init.append(line)
            return _Made(None, f"self.{name}({{x}})", shape)
        if form == "functional" and act in _ACT_FUNCTIONS:
            return _Made(None, _ACT_FUNCTIONS[act].replace("{j}", j), shape)
        if form in ("method", "torch") and act in _METHODS:
            underscore = "_" if layer["inplace"] else ""
            call = f"{{x}}.{act}{underscore}()" if form == "method" else f"torch.{act}{underscore}({{x}})"
            return _Made(None, call, shape)
        return _Made(module, "{m}({x})", shape)

    def _drop(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        kind = layer["kind"].replace("2d", f"{self.dims}d")
        p = layer["p"] if self.drops else 0.0
        if layer["form"] == "functional" and kind != "path":
            name = {"": "dropout", "alpha": "alpha_dropout"}.get(kind, f"dropout{kind}")
            return _Made(None, f"F.{name}({{x}}, {p}, self.training)", shape)
        if kind == "path":
            self.need("DropPath")
            return _Made(f"DropPath({p})", "{m}({x})", shape)
        name = "AlphaDropout" if kind == "alpha" else f"Dropout{kind}"
        return _Made(f"nn.{name}({p})", "{m}({x})", shape)

    def _pool(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        d, kind, is_module = self.dims, layer["pool"], layer["form"] == "module"
        if min(shape.sizes) < 4 or shape.positions < 32:
            return _Made("nn.Identity()", "{m}({x})", shape)
        if kind == "adaptive":
            made = Shape(shape.channels, (2,) * d)
            if is_module:
                return _Made(f"nn.AdaptiveAvgPool{d}d(2)", "{m}({x})", made)
            return _Made(None, f"F.adaptive_avg_pool{d}d({{x}}, 2)", made)
        made = Shape(shape.channels, tuple(s // 2 for s in shape.sizes))
        if is_module:
            return _Made(f"nn.{kind.title()}Pool{d}d(2)", "{m}({x})", made)
        return _Made(None, f"F.{kind}_pool{d}d({{x}}, 2)", made)

    def _up(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        if shape.positions > 200:
            return _Made("nn.Identity()", "{m}({x})", shape)
        linear = repr("bilinear" if self.dims == 2 else "trilinear")
        made = Shape(shape.channels, tuple(2 * s for s in shape.sizes))
        mode = f"mode={linear}, align_corners=False" if layer["mode"] == "linear" else "mode='nearest'"
        if layer["form"] == "module":
            return _Made(f"nn.Upsample(scale_factor=2, {mode})", "{m}({x})", made)
        size = "size=[2 * s for s in {x}.shape[2:]]" if layer["mode"] == "sized" else "scale_factor=2"
        return _Made(None, f"F.interpolate({{x}}, {size}, {mode})", made)

    def _other(self, at: _Class, layer: Json, shape: Shape) -> _Made:
        pad = ", ".join(["1, 0"] + ["0, 0"] * (self.dims - 1))
        wider = Shape(shape.channels, (*shape.sizes[:-1], shape.sizes[-1] + 1))
        expressions = {
            "identity": ("nn.Identity()", "{m}({x})", shape),
            "scale": (None, "({x}) * 0.5 + 0.25", shape),
            "contiguous": (None, "{x}.contiguous()", shape),
            "clone": (None, "{x}.clone()", shape),
            "flip": (None, "{x}.flip(2)", shape),
            "pad": (None, f"F.pad({{x}}, ({pad}))", wider),
            "clamp": (None, "{x}.clamp(-3, 3)", shape),
            "replicate": (None, f"F.pad({{x}}, ({pad}), mode='replicate')", wider),
            "softmax": (None, "{x}.softmax(1)", shape),
            "roundtrip": (None, "{x}.flatten(2).unflatten(2, {x}.shape[2:])", shape),
        }
        module, call, made = expressions[layer["other"]]
        return _Made(module, call, made)

    # ------------------------------------------------------------------------------------------------ chains

    def chain(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        """Layers one behind the other, in one of the styles in which people write them."""
        style = block["style"]
        modules_only = style in ("sequential", "nested", "ordered", "subclass", "added", "list", "dict", "sliced",
                                 "indexed", "reduced")  # fmt: skip
        made: list[_Made] = []
        for layer in block["layers"]:
            if modules_only:
                layer = dict(layer)
                for key, plain in (("form", "module"), ("shared", False), ("functional", False)):
                    if key in layer:
                        layer[key] = plain
                if layer["layer"] == "other":
                    layer["other"] = "identity"
            made.append(self.made(at, layer, shape))
            shape = made[-1].shape
        if not made:
            at.say(f"{dst} = {src}")
        elif modules_only:
            getattr(self, f"_as_{style}")(at, [m.module for m in made], src, dst)
        else:
            self._as_statements(at, style, made, src, dst)
        return shape

    def _as_statements(self, at: _Class, style: str, made: list[_Made], src: str, dst: str) -> None:
        calls: list[Callable[[str], str]] = []
        for m in made:
            text = m.call
            if m.module is not None:
                kind = m.module.split(".")[-1]
                prefix = "conv" if kind.startswith("Conv") else "norm" if "Norm" in kind else "layer"
                name = at.attribute(prefix, m.module)
                if style == "functional" and kind.startswith("Conv") and "Transpose" not in kind and "mode" not in kind:
                    f = f"F.conv{self.dims}d"
                    rest = f"{name}.weight, {name}.bias, {name}.stride, {name}.padding, {name}.dilation, {name}.groups"
                    text = f"{f}({{x}}, {rest})"
                else:
                    text = text.replace("{m}", name)
            calls.append(lambda x, text=text: text.replace("{x}", x))  # type: ignore[misc]
        if style == "expression":
            # A call that mentions its operand twice, or is no call, takes a variable.
            expression = src
            for m, call in zip(made, calls, strict=True):
                if m.call.count("{x}") > 1 or m.call.startswith(("{x}", "({x})")):
                    if expression.isidentifier():
                        expression = call(expression)
                    else:
                        at.say(f"{dst} = {expression}")
                        expression = call(dst)
                    if m.call.startswith("({x})"):
                        expression = f"({expression})"
                else:
                    expression = call(expression)
            at.say(f"{dst} = {expression}")
            return
        value = src
        for i, call in enumerate(calls):
            name = dst if style != "names" or i + 1 == len(calls) else at.fresh("h")
            if style == "walrus" and i + 1 < len(calls) and calls[i](value).count(value) == 1:
                at.say(f"if ({name} := {call(value)}) is None:")
                at.say("    raise ValueError(name)")
            elif style == "conditional" and i:
                at.say(f"{name} = {call(value)} if self is not None else {value}")
            else:
                at.say(f"{name} = {call(value)}")
            value = name

    def _as_sequential(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        at.say(f"{dst} = {at.attribute('seq', f'nn.Sequential({_comma(modules)})')}({src})")

    def _as_nested(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        half = (len(modules) + 1) // 2
        inner = f"nn.Sequential(nn.Sequential({_comma(modules[:half])}), nn.Sequential({_comma(modules[half:])}))"
        at.say(f"{dst} = {at.attribute('seq', inner)}({src})")

    def _as_ordered(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        pairs = _comma([f"('m{i}', {m})" for i, m in enumerate(modules)])
        name = at.attribute("seq", f"nn.Sequential(collections.OrderedDict([{pairs}]))")
        at.say(f"{dst} = {name}({src})")

    def _as_subclass(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        name = self.class_name("Unit")
        self.classes.append(
            f"class {name}(nn.Sequential):\n    def __init__(self):\n        super().__init__(\n            "
            + ",\n            ".join(modules)
            + ",\n        )\n"
        )
        at.say(f"{dst} = {at.attribute('unit', f'{name}()')}({src})")

    def _as_added(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        name = self.class_name("Unit")
        lines = "".join(f"        self.add_module('part{i}', {m})\n" for i, m in enumerate(modules))
        self.classes.append(
            f"class {name}(nn.Sequential):\n    def __init__(self):\n        super().__init__()\n{lines}"
        )
        at.say(f"{dst} = {at.attribute('unit', f'{name}()')}({src})")

    def _as_list(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        name = at.attribute("layers", f"nn.ModuleList([{_comma(modules)}])")
        if src != dst:
            at.say(f"{dst} = {src}")
        with at.under(f"for layer in {name}:"):
            at.say(f"{dst} = layer({dst})")

    def _as_dict(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        pairs = _comma([f"'k{i}': {m}" for i, m in enumerate(modules)])
        name = at.attribute("parts", f"nn.ModuleDict({{{pairs}}})")
        for i in range(len(modules)):
            at.say(f"{dst} = {name}['k{i}']({src if i == 0 else dst})")

    def _as_sliced(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        name, half = at.attribute("seq", f"nn.Sequential({_comma(modules)})"), (len(modules) + 1) // 2
        at.say(f"{dst} = {name}[:{half}]({src})")
        at.say(f"{dst} = {name}[{half}:]({dst})")

    def _as_indexed(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        name = at.attribute("seq", f"nn.Sequential({_comma(modules)})")
        for i in range(len(modules)):
            at.say(f"{dst} = {name}[{i}]({src if i == 0 else dst})")

    def _as_reduced(self, at: _Class, modules: list[str], src: str, dst: str) -> None:
        name = at.attribute("layers", f"nn.ModuleList([{_comma(modules)}])")
        at.say(f"{dst} = functools.reduce(lambda value, layer: layer(value), {name}, {src})")

    # ------------------------------------------------------------------------------------------------ blocks

    def body(self, at: _Class, blocks: list[Json], src: str, dst: str, shape: Shape) -> Shape:
        """Blocks one behind the other: ``dst`` from ``src``, which the code may still read afterwards."""
        if not blocks and src != dst:
            at.say(f"{dst} = {src}")
        for block in blocks:
            shape = self.block(at, block, src, dst, shape)
            src = dst
        return shape

    def block(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        """One block, in the forward at hand or in a class of its own."""
        if block["block"] == "chain":
            return self.chain(at, block, src, dst, shape)
        write = getattr(self, f"_{block['block']}")
        if not block.get("own"):
            return write(at, block, src, dst, shape)  # type: ignore[no-any-return]
        inner = _Class(self.class_name("Block"))
        out = write(inner, block, "x", "y", shape)
        call = self._wrap(inner, block["wrap"], src)
        if block["decorated"]:
            inner.decorators.append(f"@{self.need('logged')}")
        text = inner.text()
        name = inner.name
        if block["wrap"] == "inherited":
            name = self.class_name("Block")
            text += f"\n\nclass {name}({inner.name}):\n    pass\n"
        self.classes.append(text)
        at.say(f"{dst} = {call.format(m=at.attribute('block', f'{name}()'), x=src)}")
        return out

    def _wrap(self, inner: _Class, wrap: str, src: str) -> str:
        """How a block of its own takes its input and gives its result; the expression that calls it."""
        returned, call = "y", "{m}({x})"
        if wrap == "kwargs":
            inner.arguments, call = "self, x, *, scale=None, **kwargs", "{m}(x={x}, scale=None, other=1)"
        elif wrap == "default":
            inner.arguments, returned, call = (
                "self, x, scale=1.0, skip=None",
                "y if skip is None else y + skip",
                "{m}({x}, 2.0)",
            )
            inner.say("y = y * scale")
        elif wrap == "extra":
            inner.arguments, call = "self, x, emb=None", "{m}({x}, {x}.mean())"
            inner.say("if emb is not None:")
            inner.say("    y = y + emb")
        elif wrap == "tuple":
            returned, call = "y, x.shape", "{m}({x})[0]"
        elif wrap == "dict":
            returned, call = "{'sample': y, 'size': x.shape}", "{m}({x})['sample']"
        elif wrap == "dataclass":
            returned, call = f"{self.need('Result')}(sample=y)", "{m}({x}).sample"
        inner.say(f"return {returned}")
        return call

    def _residual(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        h, kept = at.fresh("h"), at.fresh("kept")
        conv = ""

        def shortcut(out: Shape | None) -> None:
            nonlocal conv
            if block["shortcut"] == "norm" and (out is None or out.channels == shape.channels):
                at.say(f"{kept} = {at.attribute('norm', f'nn.GroupNorm(1, {shape.channels})')}({src})")
            elif block["shortcut"] == "conv" or (out is not None and out.channels != shape.channels):
                conv = at.attribute("shortcut", "?")
                at.say(f"{kept} = {conv}({src})")
            else:
                at.say(f"{kept} = {src}")

        if block["first"] == "shortcut":
            shortcut(None)
            out = self.body(at, block["body"], src, h, shape)
        else:
            out = self.body(at, block["body"], src, h, shape)
            shortcut(out)
        if conv:
            made = f"nn.Conv{self.dims}d({shape.channels}, {out.channels}, 1)"
            at.init[:] = [line.replace(f"{conv} = ?", f"{conv} = {made}") for line in at.init]
        elif out.channels != shape.channels:
            at.say(f"{kept} = {kept}.mean(1, keepdim=True)")
        if out.sizes != shape.sizes:
            at.say(f"{kept} = F.interpolate({kept}, size={h}.shape[2:])")
        form = block["form"]
        # An in-place sum needs the larger operand on its left.
        if form in ("h += x", "add_"):
            at.say(f"{h} += {kept}" if form == "h += x" else f"{h}.add_({kept})")
            result = h
        elif form in ("scaled", "divided"):
            at.init.append("        self.scale = 1.5")
            result = f"({kept} + {h}) / self.scale" if form == "divided" else f"{kept} + {h} * self.scale"
        else:
            result = {"x + h": f"{kept} + {h}", "h + x": f"{h} + {kept}", "torch.add": f"torch.add({kept}, {h})",
                      "h.add": f"{h}.add({kept})", "chained": f"{kept} + {h} + 0.5"}[form]  # fmt: skip
        at.say(f"{dst} = {result}")
        if block["after"] is not None:
            return self.chain(at, {"layers": [block["after"]], "style": "statements"}, dst, dst, out)
        return out

    def _cat(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        names, shapes = [at.fresh("part"), at.fresh("part")], []
        for name, body in zip(names, block["bodies"], strict=True):
            shapes.append(self.body(at, body, src, name, shape))
        if shapes[0].sizes != shapes[1].sizes:
            at.say(f"{names[1]} = F.interpolate({names[1]}, size={names[0]}.shape[2:])")
        at.say(f"{dst} = torch.cat([{', '.join(names)}], dim=1)")
        channels = shapes[0].channels + shapes[1].channels
        made = Shape(channels, shapes[0].sizes)
        return self._narrowed(at, dst, made)

    def _narrowed(self, at: _Class, x: str, shape: Shape) -> Shape:
        """Fewer channels where there are many, so that networks stay small."""
        if shape.channels <= 16:
            return shape
        at.say(f"{x} = {at.attribute('narrow', f'nn.Conv{self.dims}d({shape.channels}, 8, 1)')}({x})")
        return Shape(8, shape.sizes)

    def _unet(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        d, c = self.dims, shape.channels
        if min(shape.sizes) < 4:
            return self.body(at, block["body"], src, dst, shape)
        skip, h = at.fresh("skip"), at.fresh("h")
        skips = block["join"] == "skips"
        at.say(f"{skip} = [{src}]" if skips else f"{skip} = {src}")
        half = Shape(c, tuple(s // 2 for s in shape.sizes))
        if block["down"] == "conv":
            half = Shape(c, tuple((s - 1) // 2 + 1 for s in shape.sizes))
            at.say(f"{h} = {at.attribute('down', f'nn.Conv{d}d({c}, {c}, 3, stride=2, padding=1)')}({src})")
        elif block["down"] == "max":
            at.say(f"{h} = {at.attribute('down', f'nn.MaxPool{d}d(2)')}({src})")
        else:
            at.say(f"{h} = F.avg_pool{d}d({src}, 2)")
        out = self.body(at, block["body"], h, h, half)
        if block["up"] == "tconv":
            up = at.attribute("up", f"nn.ConvTranspose{d}d({out.channels}, {c}, 2, stride=2)")
            out = Shape(c, out.sizes)
            at.say(f"{h} = {up}({h})")
        else:
            linear = "bilinear" if d == 2 else "trilinear"
            mode = "'nearest'" if block["up"] == "nearest" else f"'{linear}', align_corners=False"
            at.say(f"{h} = {at.attribute('up', f'nn.Upsample(scale_factor=2, mode={mode})')}({h})")
        other = f"{skip}.pop()" if skips else skip
        if skips:
            at.say(f"{skip} = {other}")
        at.say(f"if {h}.shape[2:] != {skip}.shape[2:]:")
        at.say(f"    {h} = F.interpolate({h}, size={skip}.shape[2:])")
        if block["join"] == "add" and out.channels == c:
            at.say(f"{dst} = {h} + {skip}")
            return shape
        at.say(f"{dst} = torch.cat(({skip}, {h}), 1)")
        return self._narrowed(at, dst, Shape(c + out.channels, shape.sizes))

    def _branch(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        at.init.append("        self.flag = True")
        test = {"batch": f"{src}.shape[0] > 1", "is not None": "self.flag is not None", "grad": f"{src}.requires_grad"}
        with at.under(f"if {test.get(block['test'], block['test'])}:"):
            first = self.body(at, block["bodies"][0], src, dst, shape)
        with at.under("else:"):
            second = self.body(at, block["bodies"][1], src, dst, shape)
            if second.channels != first.channels:
                fit = at.attribute("fit", f"nn.Conv{self.dims}d({second.channels}, {first.channels}, 1)")
                at.say(f"{dst} = {fit}({dst})")
        if second.sizes != first.sizes:
            fixed = ", ".join(map(str, first.sizes))
            at.say(f"{dst} = F.interpolate({dst}, size=({fixed},))")
        if block["moved"] is not None:
            return self.chain(at, {"layers": [block["moved"]], "style": "statements"}, dst, dst, first)
        return first

    def _shared(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        """The same modules several times: a class, or a loop around the statements."""
        inner = _Class(self.class_name("Shared"))
        out = self.body(inner, block["body"], "x", "x", shape)
        inner.say("return x")
        self.classes.append(inner.text())
        name = at.attribute("shared", f"{inner.name}()")
        at.say(f"{dst} = {name}({src})")
        if out == shape:
            for _ in range(block["times"] - 1):
                at.say(f"{dst} = {name}({dst})")
        return out

    def _loop(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        names = []
        for body in block["bodies"]:
            inner = _Class(self.class_name("Step"))
            out = self.body(inner, body, "x", "x", shape)
            if out.channels != shape.channels:
                fit = inner.attribute("fit", f"nn.Conv{self.dims}d({out.channels}, {shape.channels}, 1)")
                inner.say(f"x = {fit}(x)")
            shape = Shape(shape.channels, out.sizes)
            inner.say("return x")
            self.classes.append(inner.text())
            names.append(f"{inner.name}()")
        form = block["form"]
        if form == "reversed":
            names.reverse()
        if form == "values":
            pairs = _comma([f"'step{i}': {n}" for i, n in enumerate(names)])
            steps = at.attribute("steps", f"nn.ModuleDict({{{pairs}}})")
        else:
            steps = at.attribute("steps", f"nn.ModuleList([{_comma(names)}])")
        if src != dst:
            at.say(f"{dst} = {src}")
        if form == "while":
            i = at.fresh("i")
            at.say(f"{i} = 0")
            with at.under(f"while {i} < len({steps}):"):
                at.say(f"{dst} = {steps}[{i}]({dst})")
                at.say(f"{i} += 1")
        elif form == "comprehension":
            at.say(f"{dst} = [{dst} := step({dst}) for step in {steps}][-1]")
        else:
            head = {
                "for": f"for step in {steps}:",
                "enumerate": f"for i, step in enumerate({steps}):",
                "index": f"for i in range(len({steps})):",
                "zip": f"for step, _ in zip({steps}, range(len({steps}))):",
                "values": f"for step in {steps}.values():",
                "reversed": f"for step in reversed({steps}):",
            }[form]
            with at.under(head):
                at.say(f"{dst} = {f'{steps}[i]' if form == 'index' else 'step'}({dst})")
        return shape

    def _checkpoint(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        inner = _Class(self.class_name("Part"))
        self.checkpoints += 1
        out = self.body(inner, block["body"], "x", "x", shape)
        self.checkpoints -= 1
        inner.say("return x")
        self.classes.append(inner.text())
        name = at.attribute("part", f"{inner.name}()")
        with at.under(f"if self.training and {src}.requires_grad:"):
            run = f"torch.utils.checkpoint.checkpoint({name}, {src}, use_reentrant={block['reentrant']})"
            at.say(f"{dst} = {run}")
        with at.under("else:"):
            at.say(f"{dst} = {name}({src})")
        return out

    def _gate(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        d, c, form = self.dims, shape.channels, block["form"]
        dims = tuple(range(2, 2 + d))
        if form == "se":
            a, b = at.attribute("squeeze", f"nn.Conv{d}d({c}, 2, 1)"), at.attribute("excite", f"nn.Conv{d}d(2, {c}, 1)")
            at.say(f"{dst} = {src} * {b}(F.silu({a}({src}.mean({dims}, keepdim=True)))).sigmoid()")
        elif form == "spatial":
            a = at.attribute("gate", f"nn.Conv{d}d({c}, 1, 1)")
            at.say(f"{dst} = {src} * torch.sigmoid({a}({src}))")
        elif form.startswith("film"):
            a, n = at.attribute("film", f"nn.Linear({c}, {2 * c})"), at.attribute("norm", f"nn.GroupNorm(1, {c})")
            at.say(f"scale, shift = {a}({src}.mean({dims})).unflatten(1, (2, {c})).unbind(1)")
            ones = ", None" * d
            if form == "film":
                at.say(f"{dst} = F.silu({n}({src}) * (1 + scale[:, :{ones}]) + shift[:, :{ones}])")
            elif form == "film shift":
                at.say(f"{dst} = F.silu({n}({src}) + shift[:, :{ones}])")
            else:
                self._film(at, form, n, src, dst, ones)
        else:
            a = at.attribute("gate", f"nn.Conv{d}d({c}, {c}, 1)")
            at.say(f"{dst} = {src} * {a}({src}).flatten(2).softmax(-1).unflatten(2, {src}.shape[2:])")
        return shape

    def _film(self, at: _Class, form: str, norm: str, src: str, dst: str, ones: str) -> None:
        """Scale and shift of a norm, a statement each."""
        at.say(f"scale, shift = scale[:, :{ones}], shift[:, :{ones}]")
        at.say(f"{dst} = {norm}({src})")
        if form == "film addcmul":
            at.say(f"{dst} = torch.addcmul(shift, {dst}, scale + 1)")
        elif form == "film in place":
            at.say(f"{dst} *= scale")
            at.say(f"{dst} += shift")
        elif form == "film branch":
            with at.under("if not self.training:"):
                at.say(f"{dst} = {dst} * (scale + 1) + shift")
        else:
            at.say(f"{dst} = {dst} * (1 + scale) + shift")
        at.say(f"{dst} = {at.attribute('act', 'nn.SiLU()')}({dst})")

    def _views(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        d, c, form = self.dims, shape.channels, block["form"]
        out = self.body(at, block["body"], src, dst, shape)
        c = out.channels
        if form == "tokens":
            n, a = at.attribute("ln", f"nn.LayerNorm({c})"), at.attribute("mix", f"nn.Linear({c}, {c})")
            t = at.fresh("t")
            at.say(f"{t} = {dst}.flatten(2).transpose(1, 2)")
            at.say(f"{dst} = {dst} + {a}({n}({t})).transpose(1, 2).reshape({dst}.shape)")
        elif form == "grouped" and c % 2 == 0:
            at.say(f"{dst} = {dst}.unflatten(1, (2, {c // 2})).transpose(1, 2).flatten(1, 2)")
        elif form == "shuffle" and d == 2 and c % 4 == 0 and c >= 8:
            at.say(f"{dst} = F.pixel_shuffle({dst}, 2)")
            return Shape(c // 4, tuple(2 * s for s in out.sizes))
        elif form == "slices" and c % 2 == 0 and c >= 4:
            at.say(f"{dst} = {dst}[:, ::2] * {dst}[:, 1::2]")
            return Shape(c // 2, out.sizes)
        elif form == "chunks" and c % 2 == 0 and c >= 4:
            a, b = at.fresh("a"), at.fresh("b")
            at.say(f"{a}, {b} = {dst}.chunk(2, dim=1)")
            at.say(f"{dst} = {a} * F.gelu({b})")
            return Shape(c // 2, out.sizes)
        elif form == "stack":
            at.say(f"{dst} = torch.stack([{dst}, {dst} * 2], 0).sum(0)")
        elif form == "unfold":
            at.say(f"{dst} = {dst}.unfold(2, 1, 1).squeeze(-1)")
        return out

    def _wrapped(self, at: _Class, block: Json, src: str, dst: str, shape: Shape) -> Shape:
        how = block["how"]
        if how in ("try", "with", "suppress"):
            head = {"try": "try:", "with": "with torch.autograd.profiler.record_function('block'):",
                    "suppress": "with contextlib.suppress(KeyError):"}[how]  # fmt: skip
            with at.under(head):
                out = self.body(at, block["body"], src, dst, shape)
            if how == "try":
                at.say("except KeyError:")
                at.say("    raise")
            return out
        if how == "kept":
            out = self.body(at, block["body"], src, dst, shape)
            at.say(f"self.last = {dst}")
            return out
        if how == "nested":
            name = at.fresh("inner")
            with at.under(f"def {name}(value):"):
                out = self.body(at, block["body"], "value", "value", shape)
                at.say("return value")
            at.say(f"{dst} = {name}({src})")
            return out
        # The rest call something: a method or a function that this class has written.
        helper = _Class(at.name)
        helper.init, helper.count = at.init, at.count
        helper.norm, helper.norm_channels = at.norm, at.norm_channels
        out = self.body(helper, block["body"], "value", "value", shape)
        at.count, at.norm, at.norm_channels = helper.count, helper.norm, helper.norm_channels
        at.methods += helper.methods
        name = at.fresh("_stage")
        helper.say("return value")
        at.methods.append("\n".join([f"    def {name}(self, value):", *helper.lines]))
        calls = {
            "lambda": f"(lambda value: self.{name}(value))({src})",
            "partial": f"functools.partial(self.{name}, value={src})()",
            "static": f"type(self).{name}(self, {src})",
        }
        at.say(f"{dst} = {calls.get(how, f'self.{name}({src})')}")
        return out

    # ------------------------------------------------------------------------------------------------ the whole

    def write(self) -> str:
        """The program that defines ``Net``."""
        case = self.case
        shape = Shape(case["channels"], tuple(case["size"]))
        net = _Class("Net")
        if case["root"] == "sequential":
            names = []
            for block in case["body"]:
                inner = _Class(self.class_name("Stage"))
                shape = self.block(inner, block | {"own": False}, "x", "x", shape)
                inner.say("return x")
                self.classes.append(inner.text())
                names.append(f"{inner.name}()")
            tail = _Class("Tail")
            self._tail(tail, shape)
            self.classes.append(tail.text())
            body = "".join(f"            {n},\n" for n in [*names, "Tail()"])
            text = f"class Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(\n{body}        )\n"
        else:
            shape = self.body(net, case["body"], "x", "x", shape)
            self._tail(net, shape)
            text = net.text()
        parts = [_IMPORTS, *(_HELPERS[h].lstrip("\n") for h in self.helpers), *self.classes, text]
        return "\n\n".join(parts)

    def _tail(self, at: _Class, shape: Shape) -> None:
        tail, dims = self.case["tail"], tuple(range(1, 2 + self.dims))
        if tail == "linear":
            at.say(f"x = {at.attribute('head', f'nn.Linear({shape.channels}, 3)')}(x.flatten(2).mean(2))")
        elif tail == "adaptive":
            at.say(f"x = {at.attribute('pool', f'nn.AdaptiveAvgPool{self.dims}d(1)')}(x).flatten(1)")
        elif tail:
            at.say(
                {
                    "mean": f"x = x.mean({dims})",
                    "mean_keep": f"x = torch.mean(x, dim={dims[1:]}, keepdim=True)",
                    "logsumexp": "x = torch.logsumexp(x, dim=1, keepdim=True)",
                    "sum": f"x = x.sum({dims[1:]})",
                    "amax": f"x = x.amax({dims[1:]})",
                }[tail]
            )
        at.say({"tensor": "return x", "tuple": "return x, x * 2", "dict": "return {'sample': x}"}[self.case["returns"]])


def _one(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else str(tuple(values))


def _comma(items: list[str]) -> str:
    return ", ".join(items)


def write_network(case: Json) -> str:
    """The Python program that defines ``Net`` of a drawn case."""
    return Writer(case).write()
