"""A norm in front of a convolution, and the pipelines."""

from __future__ import annotations

import dataclasses

from kgopt.fuzz.draw import Draw
from kgopt.fuzz.kind import Case
from kgopt.fuzz.target import GN, REF, Args, Target, Tensors, called_with, geometry_text, keyword_text, name_of

__all__ = ["TARGETS"]


def _draw_norm_conv(d: Draw, pointwise: bool) -> tuple[Tensors, Args]:
    rank, transposed = d.rng.choice([2, 3]), not pointwise and d.chance(0.15)
    if d.chance(0.5):  # kernels of their own
        d.products = min(d.products, 2.0**20)
    tensors, args, out = d.conv(rank, transposed)
    args["transposed"] = transposed
    if pointwise:
        args = {"transposed": False}
        w = tensors["weight"]["shape"]
        w[1], w[2:] = tensors["x"]["shape"][1], [1] * rank
        tensors["x"]["shape"] = [max(1, s) for s in tensors["x"]["shape"]]
    c = tensors["x"]["shape"][1]
    if d.chance(0.85):
        args["num_groups"], args["gn_act"] = d.divisor(c), d.act()
        d.affine(tensors, c, "gn_")
        args["moments"] = d.chance(0.25)
    else:
        args["num_groups"], args["gn_act"], args["moments"] = 0, "none", False
    args["eps"] = d.eps()
    if not pointwise:
        if d.chance(0.4) and min(out) >= 0:
            tensors["residual"] = d.tensor(out)
        args["divisor"], args["act"] = d.rng.choice([1.0, 1.0, 2.0]), d.act(0.7)
    return tensors, args


def _norm_conv_through_function(case: Case) -> str:
    a = case["args"]
    given = (
        f"x, {a['num_groups']!r}, {name_of(case, 'gn_weight')}, {name_of(case, 'gn_bias')}, weight, "
        f"{name_of(case, 'bias')}, {a['stride']!r}, {a['padding']!r}, {a['dilation']!r}, {a['groups']!r}, "
        f"{a['eps']!r}, {a['gn_act']!r}, {name_of(case, 'residual')}, {a['divisor']!r}, {a['act']!r}"
    )
    return f"kgopt.functional.group_norm_conv({given}{', moments=moments' if a['moments'] else ''})"


def _has_norm_conv_module(case: Case) -> bool:
    a = case["args"]
    affine = {"gn_weight", "gn_bias"} <= set(case["tensors"])
    return not a["moments"] and affine and (a["divisor"], a["act"]) == (1.0, "none")


def _norm_conv_through_module(case: Case) -> str:
    a, t = case["args"], case["tensors"]
    w = t["weight"]["shape"]
    more = keyword_text(a, ["stride", "padding", "dilation", "groups"])
    made = (
        f"kgopt.nn.GroupNormConv{len(w) - 2}d({a['num_groups']}, {w[1] * a['groups']}, {w[0]}, {w[2:]!r}"
        f"{more}, bias={'bias' in t}, act={a['gn_act']!r}, eps={a['eps']!r}, device='meta')"
    )
    names = {"group_norm.weight": "gn_weight", "group_norm.bias": "gn_bias", "conv.weight": "weight"}
    return called_with(made, case, names, "conv.bias", f"x, {name_of(case, 'residual')}")


def _norm_conv(name: str) -> Target:
    pointwise = name.endswith("1x1")

    def arguments(case: Case) -> str:
        a = case["args"]
        norm = (
            f"x, {'moments' if a['moments'] else 'None'}, {a['num_groups']!r}, {name_of(case, 'gn_weight')}, "
            f"{name_of(case, 'gn_bias')}, {a['eps']!r}, {a['gn_act']!r}, weight, {name_of(case, 'bias')}"
        )
        if pointwise:
            return norm
        return f"{norm}, {name_of(case, 'residual')}, {geometry_text(case)}, {a['divisor']!r}, {a['act']!r}"

    def theirs(case: Case) -> str:
        call = f"{REF}.{name.removesuffix('_moments')}_ref({arguments(case)})"
        return f"y_and_stats({call})" if name.endswith("moments") else call

    def ours(case: Case) -> str:
        a = case["args"]
        if name == "group_norm_conv" and a["num_groups"] and not a["transposed"]:
            if case["via"] == "functional":
                return _norm_conv_through_function(case)
            if case["via"] == "module" and _has_norm_conv_module(case):
                return _norm_conv_through_module(case)
        return f"torch.ops.kgopt.{name}({arguments(case)})"

    return Target(
        name,
        4,
        lambda d: _draw_norm_conv(d, pointwise),
        ours,
        theirs,
        ("functional", "op", "module") if name == "group_norm_conv" else ("op",),
        before=lambda case: ["moments = channel_moments(x)"] if case["args"]["moments"] else [],
        grads=("x", "weight", "bias", "gn_weight", "gn_bias", "residual"),
        products=True,
        wide=("gn_weight", "gn_bias"),
    )


_PIPELINES = {
    "conv3d_group_norm_mean": (3, False, "Conv3dGroupNormMean", "conv"),
    "conv_transpose3d_relu_group_norm": (3, True, "ConvTranspose3dReLUGroupNorm", "conv_transpose"),
    "conv2d_group_norm_tanh_hardswish_residual_logsumexp": (
        2,
        False,
        "Conv2dGroupNormTanhHardswishResidualLogSumExp",
        "conv",
    ),
}


def _pipeline_fwd(name: str) -> Target:
    """Its twin that also returns statistics, and behind a ReLU what that read, or gave: ReLU makes them one."""
    plain = _pipeline(name)

    def ours(case: Case) -> str:
        called = plain.ours({**case, "via": "op"}).replace(f"kgopt.{name}(", f"kgopt.{name}_fwd(", 1)
        return f"(lambda y, c, *stats: (y, c.relu(), *stats))(*{called})" if "relu" in name else called

    def theirs(case: Case) -> str:
        a = case["args"]
        conv = f"torch.convolution(x, weight, {name_of(case, 'bias')}, {_conv_text(case, name)})"
        if "relu" in name:
            conv = f"torch.nn.functional.relu({conv})"
        more = f"wide({conv}).flatten(2).mean(2), " if name.endswith("mean") else ""
        if "relu" in name:
            more = f"{conv}, "
        y = plain.theirs(case) if "relu" in name else f"wide({plain.theirs(case)})"
        return f"({y}, {more}*{REF}.group_stats_ref(wide({conv}), {a['num_groups']!r}, {a['eps']!r}))"

    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = plain.draw(d)
        if isinstance(args["padding"], str):
            args["padding"] = [0] * len(args["stride"])
        return tensors, args

    more: Args = {"vias": ("op",), "autocast": False, "statistics": "relu" not in name}
    return dataclasses.replace(plain, name=f"{name}_fwd", weight=3, draw=draw, ours=ours, theirs=theirs, **more)


def _conv_text(case: Case, name: str) -> str:
    """What torch.convolution takes after the bias."""
    a, transposed = case["args"], "transpose" in name
    zeros = [0] * len(a["stride"])
    values = (a["stride"], a["padding"], a["dilation"], transposed, a.get("output_padding", zeros), a["groups"])
    return ", ".join(map(repr, values))


def _pipeline(name: str) -> Target:
    rank, transposed, module, prefix = _PIPELINES[name]
    order = ["stride", "padding"] + (["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"])

    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args, out = d.conv(rank, transposed)
        d.affine(tensors, out[1], "gn_")
        args.update({"num_groups": d.divisor(out[1]), "eps": d.eps(), **d.backend()})
        if not transposed and d.chance(0.05):
            args["padding"] = "valid" if any(s != 1 for s in args["stride"]) else "same"
        return tensors, args

    def positional(case: Case) -> str:
        a = case["args"]
        names = ["x", "weight", name_of(case, "bias"), repr(a["num_groups"]), *(name_of(case, n) for n in GN)]
        return ", ".join([*names, *(repr(a[n]) for n in order), repr(a["eps"])])

    def ours(case: Case) -> str:
        a, t = case["args"], case["tensors"]
        if case["via"] == "module" and {"gn_weight", "gn_bias"} <= set(t):
            w, g = t["weight"]["shape"], a["groups"]
            c_in, c_out = (w[0], w[1] * g) if transposed else (w[1] * g, w[0])
            more = keyword_text(a, [n for n in order if n != "groups"])
            made = (
                f"kgopt.nn.{module}({c_in}, {c_out}, {w[2:]!r}, {a['num_groups']}{more}, conv_groups={g}, "
                f"bias={'bias' in t}, eps={a['eps']!r}, device='meta')"
            )
            names = {f"{prefix}.weight": "weight", "group_norm.weight": "gn_weight", "group_norm.bias": "gn_bias"}
            return called_with(made, case, names, f"{prefix}.bias", "x,")
        home = "torch.ops.kgopt" if case["via"] == "op" and isinstance(a["padding"], list) else "kgopt.functional"
        return f"{home}.{name}({positional(case)}{keyword_text(a, ['backend', 'allow_tf32'])})"

    return Target(
        name,
        7,
        draw,
        ours,
        lambda case: f"{REF}.{name}_ref({positional(case)})",
        ("functional", "op", "module"),
        grads=("x", "weight", "bias", "gn_weight", "gn_bias"),
        autocast=True,
        products=True,
        wide=("gn_weight", "gn_bias"),
    )


TARGETS = [
    *(_norm_conv(n) for n in ("group_norm_conv", "group_norm_conv_moments", "group_norm_conv1x1")),
    *(_pipeline(n) for n in _PIPELINES),
    *(_pipeline_fwd(n) for n in _PIPELINES),
]
