"""Layers: a drawn one as a module to construct and the expression that calls it."""

from __future__ import annotations

from collections.abc import Callable

from kgopt.fuzz.writer.draft import ClassDraft, Draft, Json, Made, Shape

__all__ = ["write_layer"]

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


def _conv(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    channels, sizes, dims = shape.channels, shape.sizes, range(w.dims)
    asked = [1] + [3] * (w.dims - 1) if layer["kernel"] == "flat" else [layer["kernel"]] * w.dims
    kernel = [k if k <= s else 1 for k, s in zip(asked, sizes, strict=True)]
    dilation = [layer["dilation"] if (kernel[i] - 1) * layer["dilation"] < sizes[i] else 1 for i in dims]
    reach = [(k - 1) * e for k, e in zip(kernel, dilation, strict=True)]
    stride = [layer["stride"] if s >= 4 and shape.positions >= 16 else 1 for s in sizes]
    same = layer["padding"] == "same" and max(stride) == 1
    padding = [r // 2 for r in reach]
    if layer["padding"] == "0" and all(sizes[i] - reach[i] >= 3 for i in dims):
        padding = [0] * w.dims
    out, groups = _out_and_groups(layer, channels)
    made = sizes if same else tuple((sizes[i] + 2 * padding[i] - reach[i] - 1) // stride[i] + 1 for i in dims)
    fits = all(reach[i] < sizes[i] for i in dims)  # modes but zeros take their padding from the input
    options = _options(
        ("stride", _one(stride), "1"),
        ("padding", repr("same") if same else _one(padding), "0"),
        ("dilation", _one(dilation), "1"),
        ("groups", groups, 1),
        ("bias", layer["bias"], True),
        ("padding_mode", repr(layer["mode"] if fits else "zeros"), repr("zeros")),
    )
    return Made(f"nn.Conv{w.dims}d({channels}, {out}, {_one(kernel)}{options})", "{m}({x})", Shape(out, made))


def _out_and_groups(layer: Json, channels: int) -> tuple[int, int]:
    out = max(2, int(channels * layer["out"]))
    if layer["groups"] == "2" and channels % 2 == 0:
        return out + out % 2, 2
    if layer["groups"] == "depthwise":
        return channels * max(1, int(layer["out"])), channels
    return out, 1


def _options(*options: tuple[str, object, object]) -> str:
    """Keyword arguments: (name, value, the default, with which it is left out)."""
    return "".join(f", {name}={value}" for name, value, plain in options if value != plain)


def _one(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else str(tuple(values))


def _tconv(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    d, k, stride = w.dims, layer["kernel"], layer["stride"]
    if shape.positions > 400:
        stride = 1
    padding = min((k - 1) // 2, min(shape.sizes) - 1)
    extra = 1 if layer["extra"] and stride > 1 else 0
    out = max(2, int(shape.channels * layer["out"]))
    groups = 2 if layer["groups"] == "2" and shape.channels % 2 == 0 else 1
    out += out % groups
    sizes = tuple((s - 1) * stride - 2 * padding + k + extra for s in shape.sizes)
    options = _options(
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("output_padding", extra, 0),
        ("groups", groups, 1),
        ("bias", layer["bias"], True),
    )
    return Made(f"nn.ConvTranspose{d}d({shape.channels}, {out}, {k}{options})", "{m}({x})", Shape(out, sizes))


def _norm(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    kind, channels, d = _norm_that_serves(w, layer["norm"], shape), shape.channels, w.dims
    # Statistics of a few elements would say nothing of anything.
    groups = 1 if shape.positions < 4 else channels if layer["groups"] == "all" else layer["groups"]
    while channels % groups:
        groups -= 1
    eps = "" if layer["eps"] == 1e-5 else f", eps={layer['eps']}"
    affine = "" if layer["affine"] else ", affine=False"
    group = f"nn.GroupNorm({groups}, {channels}{eps}{affine})"
    if kind == "group" and layer["functional"]:
        m = at.attribute("norm", group)
        return Made(None, f"F.group_norm({{x}}, {groups}, {m}.weight, {m}.bias, {m}.eps)", shape)
    if kind == "group" and layer["shared"]:
        if at.norm_channels != channels:
            at.norm, at.norm_channels = at.attribute("shared_norm", group), channels
        return Made(None, f"{at.norm}({{x}})", shape)
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
        w.need(_NORM_HELPERS[kind])
    return Made(modules[kind], "{m}({x})", shape)


def _norm_that_serves(w: Draft, kind: str, shape: Shape) -> str:
    """Another kind, where this one would differ from itself."""
    if shape.positions < 4 and kind in ("instance", "batch", "tracked"):
        return "group"
    if w.checkpoints and w.case["how"] in ("backend", "compiled"):
        # Eager code updates running statistics twice there, compiled code once.
        kind = {"batch": "group", "tracked": "instance"}.get(kind, kind)
    if kind == "tracked" and w.case["channels_last"] is True:
        return "instance"  # it stays PyTorch's, whose gradients of one sample in channels_last are wrong on the CPU
    return kind


def _act(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    act, form = layer["act"], layer["form"]
    inplace = layer["inplace"] and act in (*_INPLACE, "leaky_relu_0.2", "elu_0.5", "celu_2", "hardtanh_0")
    i, j = ("inplace=True", ", inplace=True") if inplace else ("", "")
    module = _ACT_MODULES[act].format(i=i, j=j)
    if form == "shared" and act in _INPLACE:
        name = f"act_{act}{'_' if inplace else ''}"
        line = f"        self.{name} = {module}"
        if line not in at.init:
            at.init.append(line)
        return Made(None, f"self.{name}({{x}})", shape)
    if form == "functional" and act in _ACT_FUNCTIONS:
        return Made(None, _ACT_FUNCTIONS[act].replace("{j}", j), shape)
    if form in ("method", "torch") and act in _METHODS:
        underscore = "_" if layer["inplace"] else ""
        call = f"{{x}}.{act}{underscore}()" if form == "method" else f"torch.{act}{underscore}({{x}})"
        return Made(None, call, shape)
    return Made(module, "{m}({x})", shape)


def _drop(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    kind = layer["kind"].replace("2d", f"{w.dims}d")
    p = layer["p"] if w.drops else 0.0
    if layer["form"] == "functional" and kind != "path":
        name = {"": "dropout", "alpha": "alpha_dropout"}.get(kind, f"dropout{kind}")
        return Made(None, f"F.{name}({{x}}, {p}, self.training)", shape)
    if kind == "path":
        w.need("DropPath")
        return Made(f"DropPath({p})", "{m}({x})", shape)
    name = "AlphaDropout" if kind == "alpha" else f"Dropout{kind}"
    return Made(f"nn.{name}({p})", "{m}({x})", shape)


def _pool(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    d, kind, is_module = w.dims, layer["pool"], layer["form"] == "module"
    if min(shape.sizes) < 4 or shape.positions < 32:
        return Made("nn.Identity()", "{m}({x})", shape)
    if kind == "adaptive":
        made = Shape(shape.channels, (2,) * d)
        if is_module:
            return Made(f"nn.AdaptiveAvgPool{d}d(2)", "{m}({x})", made)
        return Made(None, f"F.adaptive_avg_pool{d}d({{x}}, 2)", made)
    made = Shape(shape.channels, tuple(s // 2 for s in shape.sizes))
    if is_module:
        return Made(f"nn.{kind.title()}Pool{d}d(2)", "{m}({x})", made)
    return Made(None, f"F.{kind}_pool{d}d({{x}}, 2)", made)


def _up(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    if shape.positions > 200:
        return Made("nn.Identity()", "{m}({x})", shape)
    linear = repr("bilinear" if w.dims == 2 else "trilinear")
    made = Shape(shape.channels, tuple(2 * s for s in shape.sizes))
    mode = f"mode={linear}, align_corners=False" if layer["mode"] == "linear" else "mode='nearest'"
    if layer["form"] == "module":
        return Made(f"nn.Upsample(scale_factor=2, {mode})", "{m}({x})", made)
    size = "size=[2 * s for s in {x}.shape[2:]]" if layer["mode"] == "sized" else "scale_factor=2"
    return Made(None, f"F.interpolate({{x}}, {size}, {mode})", made)


def _other(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    pad = ", ".join(["1, 0"] + ["0, 0"] * (w.dims - 1))
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
    return Made(module, call, made)


_LAYERS: dict[str, Callable[[Draft, ClassDraft, Json, Shape], Made]] = {
    "conv": _conv,
    "tconv": _tconv,
    "norm": _norm,
    "act": _act,
    "drop": _drop,
    "pool": _pool,
    "up": _up,
    "other": _other,
}


def write_layer(w: Draft, at: ClassDraft, layer: Json, shape: Shape) -> Made:
    """A layer at a shape."""
    return _LAYERS[layer["layer"]](w, at, layer, shape)
