"""Convolutions, their sums, and their backward op."""

from __future__ import annotations

from kgopt.fuzz.draw import Draw
from kgopt.fuzz.kind import Case
from kgopt.fuzz.target import REF, Args, Target, Tensors, called_with, geometry_text, keyword_text, name_of

__all__ = ["TARGETS"]


def _conv_target(name: str, rank: int, transposed: bool) -> Target:
    module = f"kgopt.nn.{'ConvTranspose' if transposed else 'Conv'}{rank}d"

    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args, _ = d.conv(rank, transposed)
        args.update(d.backend())
        if d.dtype in ("bfloat16", "float16") and d.chance(0.08):
            for name in ("weight", "bias"):
                if name in tensors:
                    tensors[name]["dtype"] = "float32"
        if not transposed and d.chance(0.06):
            args["padding"] = "valid" if d.chance(0.3) or any(s != 1 for s in args["stride"]) else "same"
        if d.chance(0.04) and tensors["x"]["shape"][0] == 1:
            tensors["x"]["shape"] = tensors["x"]["shape"][1:]
            tensors["x"]["layout"] = "contiguous"
        if not transposed and d.chance(0.05) and isinstance(args["padding"], list):
            args["padding_mode"] = d.rng.choice(["reflect", "replicate", "circular"])
            args.pop("allow_tf32", None)  # a module's argument, and modules have no such one
        return tensors, args

    order = ["stride", "padding", "output_padding", "groups", "dilation"] if transposed else [
        "stride", "padding", "dilation", "groups"]  # fmt: skip

    def plain(case: Case) -> bool:
        """What only functions and modules take."""
        args = case["args"]
        return isinstance(args["padding"], list) and len(case["tensors"]["x"]["shape"]) == rank + 2

    def through_module(case: Case, module: str) -> str:
        w, args = case["tensors"]["weight"]["shape"], case["args"]
        g = args["groups"]
        c_in, c_out = (w[0], w[1] * g) if transposed else (w[1] * g, w[0])
        more = keyword_text(args, [*order, "padding_mode"])
        made = f"{module}({c_in}, {c_out}, {w[2:]!r}{more}, bias={'bias' in case['tensors']}, device='meta')"
        return called_with(made, case, {"weight": "weight"}, "bias", "x,")

    def ours(case: Case) -> str:
        if case["via"] == "module" or "padding_mode" in case["args"]:
            return through_module(case, module)
        keywords = keyword_text(case["args"], ["backend", "allow_tf32"])
        home = "torch.ops.kgopt" if case["via"] == "op" and plain(case) else "kgopt.functional"
        values = [repr(case["args"][n]) for n in order]
        return f"{home}.{name}(x, weight, {name_of(case, 'bias')}, {', '.join(values)}{keywords})"

    def theirs(case: Case) -> str:
        if "padding_mode" in case["args"]:
            return through_module(case, module.replace("kgopt", "torch"))
        values = [repr(case["args"][n]) for n in order]
        return f"torch.nn.functional.{name}(x, weight, {name_of(case, 'bias')}, {', '.join(values)})"

    return Target(
        name,
        10,
        draw,
        ours,
        theirs,
        ("functional", "op", "module"),
        autocast=True,
        products=True,
        wide=("weight", "bias"),
    )


def _conv_add_draw(d: Draw) -> tuple[Tensors, Args]:
    rank, transposed = d.rng.choice([2, 3]), d.chance(0.25)
    tensors, args, out = d.conv(rank, transposed)
    args["transposed"] = transposed
    if d.chance(0.5) and min(out) >= 0:
        tensors["residual"] = d.tensor(out)
        if d.chance(0.5):
            tensors["residual"]["layout"] = (
                tensors["x"]["layout"] if "channels" in tensors["x"]["layout"] else "contiguous"
            )
    args["divisor"] = d.rng.choice([1.0, 1.0, 2.0, 1.4142135, -3.0])
    args["act"] = d.act(0.6)
    return tensors, args


def _conv_add_args(case: Case) -> str:
    a = case["args"]
    tensors = f"x, weight, {name_of(case, 'bias')}, {name_of(case, 'residual')}"
    return f"{tensors}, {geometry_text(case)}, {a['divisor']!r}, {a['act']!r}"


def _conv_add(name: str, moments: bool) -> Target:
    def theirs(case: Case) -> str:
        return (
            f"{REF}.{name}_ref({_conv_add_args(case)})"
            if not moments
            else f"y_and_stats({REF}.conv_add_ref({_conv_add_args(case)}))"
        )

    return Target(
        name,
        5 if not moments else 3,
        _conv_add_draw,
        lambda case: f"torch.ops.kgopt.{name}({_conv_add_args(case)})",
        theirs,
        ("op",),
        grads=("x", "weight", "bias", "residual"),
        products=True,
    )


def _conv_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        transposed = d.chance(0.3)
        tensors, args, out = d.conv(d.rng.choice([2, 3]), transposed, bias=1.0)
        args["transposed"] = transposed
        args["mask"] = d.rng.choice(
            [[True] * 3, [True] * 3, [True, False, False], [False, True, False], [True, True, False]]
        )
        tensors["dy"] = d.tensor([max(0, s) for s in out])
        args.update(d.backend() if d.device == "cuda" else {})
        args.pop("allow_tf32", None)
        return tensors, args

    def ours(case: Case) -> str:
        keywords = keyword_text(case["args"], ["backend"])
        call = (
            f"torch.ops.kgopt.conv_backward(dy, x, weight, {geometry_text(case)}, {case['args']['mask']!r}{keywords})"
        )
        return f"[g for g, m in zip({call}, {case['args']['mask']!r}) if m]"

    def theirs(case: Case) -> str:
        a = case["args"]
        zeros = a.get("output_padding", [0] * len(a["stride"]))
        rest = f"{a['stride']!r}, {a['padding']!r}, {a['dilation']!r}, {a['transposed']!r}, {zeros!r}, {a['groups']!r}"
        names = [n for n, m in zip(("x", "weight", "bias"), a["mask"], strict=True) if m]
        wanted = ", ".join(f"{n}={n}" for n in names)
        return (
            f"vjp(lambda x=x, weight=weight, bias=bias: torch.convolution(x, weight, bias, {rest}), dict({wanted}), dy)"
        )

    return Target("conv_backward", 3, draw, ours, theirs, ("op",), grads=(), products=True)


TARGETS = [
    *(_conv_target(f"conv{k}{r}d", r, bool(k)) for k in ("", "_transpose") for r in (2, 3)),
    _conv_add("conv_add", False),
    _conv_add("conv_add_moments", True),
    _conv_backward(),
]
