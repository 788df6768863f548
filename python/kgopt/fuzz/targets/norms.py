"""GroupNorm, its statistics, and their backward ops."""

from __future__ import annotations

from collections.abc import Callable

from kgopt.fuzz.draw import Draw
from kgopt.fuzz.kind import Case
from kgopt.fuzz.target import REF, Args, Target, Tensors, home_of, name_of

__all__ = ["TARGETS"]


def norm_draw(pre: bool = False, act: bool = True, least: int = 2) -> Callable[[Draw], tuple[Tensors, Args]]:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        shape, groups = d.norm_shape(least)
        tensors = {"x": d.tensor(shape)}
        d.affine(tensors, shape[1])
        args: Args = {"num_groups": groups, "eps": d.eps()}
        if act:
            args["act"] = d.act()
        if pre:
            args["pre_act"] = d.act(0.4)
        return tensors, args

    return draw


def norm_text(case: Case, *names: str) -> str:
    a = case["args"]
    return ", ".join(
        ["x", repr(a["num_groups"]), name_of(case, "weight"), name_of(case, "bias"), *(repr(a[n]) for n in names)]
    )


def _group_norm() -> Target:
    def ours(case: Case) -> str:
        if case["via"] == "module" and {"weight", "bias"} <= set(case["tensors"]):
            a, c = case["args"], case["tensors"]["weight"]["shape"][0]
            made = f"kgopt.nn.GroupNorm({a['num_groups']}, {c}, {a['eps']!r}, act={a['act']!r}, device='meta')"
            return f'torch.func.functional_call({made}, {{"weight": weight, "bias": bias}}, (x,))'
        return f"{home_of(case)}.group_norm({norm_text(case, 'eps', 'act')})"

    return Target(
        "group_norm",
        14,
        norm_draw(),
        ours,
        lambda case: f"{REF}.group_norm_ref({norm_text(case, 'eps', 'act')})",
        ("functional", "op", "module"),
        autocast=True,
        wide=("weight", "bias"),
    )


def _add_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw()(d)
    residual = d.tensor(tensors["x"]["shape"])
    return {"x": tensors.pop("x"), "residual": residual, **tensors}, args


def _added(case: Case) -> str:
    return norm_text(case, "eps", "act").replace("x, ", "x, residual, ", 1)


def _group_norm_add() -> Target:
    def ours(case: Case) -> str:
        if case["via"] == "functional":
            return f"kgopt.functional.group_norm({norm_text(case, 'eps', 'act')}, residual)"
        return f"torch.ops.kgopt.group_norm_add({_added(case)})"

    return Target(
        "group_norm_add",
        10,
        _add_draw,
        ours,
        lambda case: f"{REF}.group_norm_add_ref({_added(case)})",
        ("functional", "op"),
        autocast=True,
        wide=("weight", "bias"),
    )


def _group_norm_add_fwd() -> Target:
    return Target(
        "group_norm_add_fwd",
        4,
        _add_draw,
        lambda case: f"torch.ops.kgopt.group_norm_add_fwd({_added(case)})",
        lambda case: f"({REF}.group_norm_add_ref({_added(case)}), *{stats_text('x', case)})",
        ("op",),
        wide=("weight", "bias"),
    )


def _scale_shift_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw()(d)
    shape = tensors["x"]["shape"]
    for name in ("scale", "shift"):
        if d.rng.random() < 0.8:
            rows = d.rng.choice([shape[0], shape[0], 1])
            tensors[name] = d.tensor([rows, shape[1], *[1] * (d.rng.random() < 0.3)], plain=True)
    if d.rng.random() < 0.3:
        tensors["residual"] = d.tensor(shape)
    return tensors, args


def _scaled(case: Case) -> str:
    """What follows the norm's arguments, by name."""
    return ", ".join(f"{name}={name_of(case, name)}" for name in ("residual", "scale", "shift"))


def _maps_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(least=4)(d)
    shape = tensors["x"]["shape"]
    small = [d.rng.choice([f for f in range(1, s + 1) if s % f == 0] or [1]) for s in shape[2:]]
    for name in ("scale", "shift"):  # plain: infinity times a norm's zero, which may be rounding, is anything
        tensors[name] = d.tensor([*shape[:2], *small], plain=True)
    return tensors, args


def _mapped(case: Case, moments: str) -> str:
    return norm_text(case, "eps", "act").replace("x, ", f"x, {moments}scale, shift, ", 1)


def _group_norm_maps() -> Target:
    return Target(
        "group_norm_maps",
        5,
        _maps_draw,
        lambda case: f"torch.ops.kgopt.group_norm_maps({_mapped(case, 'None, ')})",
        lambda case: f"{REF}.group_norm_maps_ref({_mapped(case, '')})",
        ("op",),
        grads=("x", "weight", "bias", "scale", "shift"),
        autocast=True,
        wide=("weight", "bias"),
    )


def _group_norm_scale_shift() -> Target:
    """No op of its own: arithmetic on tiny tensors and a view in front of group_norm."""
    return Target(
        "group_norm_scale_shift",
        8,
        _scale_shift_draw,
        lambda case: f"kgopt.functional.group_norm({norm_text(case, 'eps', 'act')}, {_scaled(case)})",
        lambda case: (  # scale and shift may have any floating dtype, which PyTorch's products would promote to
            f"{REF}.group_norm_scale_shift_ref({norm_text(case)}, eps={case['args']['eps']!r}, "
            f"act={case['args']['act']!r}, {_scaled(case)}).to(x.dtype)"
        ),
        ("functional",),
        grads=("x", "weight", "bias", "scale", "shift"),
        wide=("weight", "bias"),
    )


def _prelu_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(act=False)(d)
    shape = tensors["x"]["shape"]
    tensors = {"x": tensors.pop("x"), "slope": d.tensor(d.rng.choice([[1], shape[1:2]])), **tensors}
    if d.rng.random() < 0.4:
        tensors["residual"] = d.tensor(shape)
    return tensors, args


def _preluded(case: Case) -> str:
    return norm_text(case, "eps").replace("x, ", "x, slope, ", 1) + f", {name_of(case, 'residual')}"


def _group_norm_prelu() -> Target:
    def ours(case: Case) -> str:
        if case["via"] == "functional":
            norm = norm_text(case, "eps")
            return f"kgopt.functional.group_norm({norm}, 'prelu', {name_of(case, 'residual')}, slope)"
        return f"torch.ops.kgopt.group_norm_prelu({_preluded(case)})"

    return Target(
        "group_norm_prelu",
        8,
        _prelu_draw,
        ours,
        lambda case: f"{REF}.group_norm_prelu_ref({_preluded(case)})",
        ("functional", "op"),
        wide=("weight", "bias"),
    )


def _group_norm_prelu_fwd() -> Target:
    return Target(
        "group_norm_prelu_fwd",
        3,
        _prelu_draw,
        lambda case: f"torch.ops.kgopt.group_norm_prelu_fwd({_preluded(case)})",
        lambda case: f"({REF}.group_norm_prelu_ref({_preluded(case)}), *{stats_text('x', case)})",
        ("op",),
        wide=("weight", "bias"),
    )


def _group_norm_prelu_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = _prelu_draw(d)
        tensors.setdefault("residual", d.tensor(tensors["x"]["shape"]))
        tensors["dy"] = d.tensor(tensors["x"]["shape"])
        return tensors, args

    def before(case: Case) -> list[str]:
        a = case["args"]
        return [f"mean, rstd = given_stats(x, {a['num_groups']!r}, {a['eps']!r})"]

    def ours(case: Case) -> str:
        affine = f"{name_of(case, 'weight')}, {name_of(case, 'bias')}"
        groups = case["args"]["num_groups"]
        return f"torch.ops.kgopt.group_norm_prelu_backward(dy, x, mean, rstd, slope, {groups!r}, {affine}, residual)"

    def theirs(case: Case) -> str:
        # The gradient of a residual is that of the PReLU's argument.
        given, kept = "residual=residual, slope=slope", case["tensors"]["slope"]["dtype"]
        # Beside float32 parameters all of it is computed in float32; the search rounds the first result alone.
        rounded = f"lambda dz, d: (dz, d if d.dtype == torch.float64 else d.to(torch.{kept}))"
        return f"({rounded})(*vjp(lambda {given}: {REF}.group_norm_prelu_ref({_preluded(case)}), dict({given}), dy))"

    return Target(
        "group_norm_prelu_backward", 3, draw, ours, theirs, ("op",), before=before, grads=(), wide=("weight", "bias")
    )


def stats_text(x: str, case: Case) -> str:
    return f"{REF}.group_stats_ref(wide({x}), {case['args']['num_groups']!r}, {case['args']['eps']!r})"


def _group_norm_fwd() -> Target:
    def theirs(case: Case) -> str:
        y = f"{REF}.group_norm_ref({norm_text(case, 'eps', 'act', 'pre_act')})"
        before = f"{REF}.activation_ref(wide(x), {case['args']['pre_act']!r})"
        return f"({y}, *{stats_text(before, case)})"

    return Target(
        "group_norm_fwd",
        8,
        norm_draw(pre=True),
        lambda case: f"torch.ops.kgopt.group_norm_fwd({norm_text(case, 'eps', 'act', 'pre_act')})",
        theirs,
        ("op",),
        wide=("weight", "bias"),
    )


def _group_norm_moments() -> Target:
    return Target(
        "group_norm_moments",
        4,
        norm_draw(least=3),
        lambda case: (
            "torch.ops.kgopt.group_norm_moments("
            + norm_text(case, "eps", "act").replace("x, ", "x, moments, ", 1)
            + ")"
        ),
        lambda case: f"{REF}.group_norm_ref({norm_text(case, 'eps', 'act')})",
        ("op",),
        before=lambda case: ["moments = channel_moments(x)"],
        autocast=True,
        wide=("weight", "bias"),
    )


def _group_stats() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = norm_draw(act=False)(d)
        return {"x": tensors["x"]}, args

    return Target(
        "group_stats",
        5,
        draw,
        lambda case: f"{home_of(case)}.group_stats(x, {case['args']['num_groups']!r}, {case['args']['eps']!r})",
        lambda case: stats_text("x", case),
        differentiable=2,
        grads=("x",),
    )


def _group_norm_mean() -> Target:
    return Target(
        "group_norm_mean",
        5,
        norm_draw(act=False),
        lambda case: f"{home_of(case)}.group_norm_mean({norm_text(case, 'eps')})",
        lambda case: f"{REF}.group_norm_mean_ref({norm_text(case, 'eps')})",
        autocast=True,
        wide=("weight", "bias"),
    )


def _group_norm_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = norm_draw(pre=True)(d)
        tensors["dy"] = d.tensor(tensors["x"]["shape"])
        return tensors, args

    def before(case: Case) -> list[str]:
        a = case["args"]
        # By kgopt's own function, which computes it again: another one's rounding is all that is left of x - mean
        # where the group has one value.
        before = f"torch.ops.kgopt.activation(wide(x), {a['pre_act']!r})"
        return [f"mean, rstd = given_stats({before}, {a['num_groups']!r}, {a['eps']!r})"]

    def ours(case: Case) -> str:
        a = case["args"]
        call = (
            f"torch.ops.kgopt.group_norm_backward(dy, x, mean, rstd, {a['num_groups']!r}, {name_of(case, 'weight')}, "
            f"{name_of(case, 'bias')}, {a['act']!r}, {a['pre_act']!r})"
        )
        given = [True, "weight" in case["tensors"], "bias" in case["tensors"]]
        return call if all(given) else f"[g for g, m in zip({call}, {given!r}) if m]"

    def theirs(case: Case) -> str:
        names = [n for n in ("x", "weight", "bias") if n in case["tensors"]]
        call = f"{REF}.group_norm_ref({norm_text(case, 'eps', 'act', 'pre_act')})"
        given = ", ".join(f"{n}={n}" for n in names)
        return f"vjp(lambda {given}: {call}, dict({given}), dy)"

    return Target(
        "group_norm_backward", 4, draw, ours, theirs, ("op",), before=before, grads=(), wide=("weight", "bias")
    )


def _wide_affine(case: Case) -> str:
    """Of a norm in the dtype of statistics."""
    names = (f"wide({n})" if n in case["tensors"] else "None" for n in ("weight", "bias"))
    return f"wide(x), {case['args']['num_groups']!r}, {', '.join(names)}, {case['args']['eps']!r}"


def _group_norm_mean_fwd() -> Target:
    def theirs(case: Case) -> str:
        channel_mean = (
            "wide(x).reshape(*x.shape[:2], -1).mean(2)" if len(case["tensors"]["x"]["shape"]) > 2 else "wide(x)"
        )
        return f"({REF}.group_norm_mean_ref({_wide_affine(case)}), {channel_mean}, *{stats_text('x', case)})"

    return Target(
        "group_norm_mean_fwd",
        2,
        norm_draw(act=False),
        lambda case: f"torch.ops.kgopt.group_norm_mean_fwd({norm_text(case, 'eps')})",
        theirs,
        ("op",),
        wide=("weight", "bias"),
        statistics=True,
    )


def _group_norm_mean_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = norm_draw(act=False)(d)
        tensors.pop("bias", None)
        tensors["dy"] = d.statistics(tensors["x"]["shape"][:1])
        return tensors, args

    def before(case: Case) -> list[str]:
        a = case["args"]
        return [
            f"mean, rstd = given_stats(x, {a['num_groups']!r}, {a['eps']!r})",
            "channel_mean = channel_moments(x)[..., 0].contiguous()",
        ]

    def ours(case: Case) -> str:
        groups, weight = case["args"]["num_groups"], name_of(case, "weight")
        call = f"torch.ops.kgopt.group_norm_mean_backward(dy, x, channel_mean, mean, rstd, {groups!r}, {weight})"
        return f"{call}[:{2 if 'weight' in case['tensors'] else 1}]"

    def theirs(case: Case) -> str:
        given = "x=x, weight=weight" if "weight" in case["tensors"] else "x=x"
        return f"vjp(lambda {given}: {REF}.group_norm_mean_ref({norm_text(case, 'eps')}), dict({given}), dy)"

    return Target("group_norm_mean_backward", 2, draw, ours, theirs, ("op",), before, grads=(), wide=("weight",))


def _group_stats_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = norm_draw(act=False)(d)
        sizes = [tensors["x"]["shape"][0], args["num_groups"]]
        return {"x": tensors["x"], "dy": d.statistics(sizes), "drstd": d.statistics(sizes)}, args

    return Target(
        "group_stats_backward",
        2,
        draw,
        lambda case: f"torch.ops.kgopt.group_stats_backward(dy, drstd, x, mean, rstd, {case['args']['num_groups']!r})",
        lambda case: f"vjp(lambda x: {stats_text('x', case)}, dict(x=x), (dy, drstd))[0]",
        ("op",),
        before=lambda case: [f"mean, rstd = given_stats(x, {case['args']['num_groups']!r}, {case['args']['eps']!r})"],
        grads=(),
    )


def _lse_backward() -> Target:
    name = "group_norm_tanh_hardswish_residual_logsumexp_backward"

    def residual(case: Case, x: str) -> str:
        names = (f"{n}" if n in case["tensors"] else "None" for n in ("weight", "bias"))
        a = case["args"]
        norm = f"{REF}.group_norm_ref({x}, {a['num_groups']!r}, {', '.join(names)}, {a['eps']!r}, 'tanh+hardswish')"
        return f"torch.logsumexp({x} + {norm}, 1, True)"

    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = norm_draw(act=False, least=3)(d)
        shape = tensors["x"]["shape"]
        tensors["dy"] = d.statistics([shape[0], 1, *shape[2:]])
        return tensors, args

    def before(case: Case) -> list[str]:
        return [f"mean, rstd = given_stats(x, {case['args']['num_groups']!r}, {case['args']['eps']!r})"]

    def ours(case: Case) -> str:
        affine = f"{name_of(case, 'weight')}, {name_of(case, 'bias')}"
        call = f"torch.ops.kgopt.{name}(dy, x, mean, rstd, {case['args']['num_groups']!r}, {affine})"
        given = [True, "weight" in case["tensors"], "bias" in case["tensors"]]
        return call if all(given) else f"[g for g, m in zip({call}, {given!r}) if m]"

    def theirs(case: Case) -> str:
        given = ", ".join(f"{n}={n}" for n in ("x", "weight", "bias") if n in case["tensors"])
        return f"vjp(lambda {given}: {residual(case, 'x')}, dict({given}), dy)"

    return Target(name, 2, draw, ours, theirs, ("op",), before, grads=(), wide=("weight", "bias"))


def _channel_draw(d: Draw) -> tuple[Tensors, Args]:
    shape, _ = d.norm_shape()
    tensors = {"x": d.tensor(shape)}
    d.affine(tensors, shape[1])
    # Of one channel, rms and l2 are x's sign: the gradient is what rounding leaves of a difference, for which
    # tests/test_channel_norm.py has a bound.
    kind = d.rng.choice(["rms", "l2", "layer"] if shape[1] > 1 else ["layer"])
    eps = d.rng.choice([1e-12, 1e-6, 0.1]) if kind == "l2" else d.eps()
    return tensors, {"kind": kind, "eps": eps, "act": d.act()}


def _channel_text(case: Case) -> str:
    a = case["args"]
    names = (name_of(case, "weight"), name_of(case, "bias"))
    return ", ".join(["x", *names, *(repr(a[n]) for n in ("kind", "eps", "act"))])


def _channel_norm() -> Target:
    def ours(case: Case) -> str:
        given = [n for n in ("weight", "bias") if n in case["tensors"]]
        if case["via"] == "module" and len(case["tensors"]["x"]["shape"]) > 1:
            a, c = case["args"], case["tensors"]["x"]["shape"][1]
            rest = f"{c}, {a['eps']!r}, act={a['act']!r}, device='meta'"
            parameters = "{" + ", ".join(f"'{n}': {n}" for n in given) + "}"
            made = None
            if a["kind"] == "layer" and given != ["bias"]:
                made = f"ChannelLayerNorm({rest}, elementwise_affine={bool(given)}, bias={'bias' in given})"
            elif a["kind"] != "layer":
                made = f"ChannelRMSNorm({rest}, elementwise_affine={'weight' in given}, bias={'bias' in given}, "
                made += f"normalize={a['kind'] == 'l2'})"
            if made:
                return f"torch.func.functional_call(kgopt.nn.{made}, {parameters}, (x,))"
        return f"{home_of(case)}.channel_norm({_channel_text(case)})"

    return Target(
        "channel_norm",
        8,
        _channel_draw,
        ours,
        lambda case: f"{REF}.channel_norm_ref({_channel_text(case)})",
        ("functional", "op", "module"),
        autocast=True,
        wide=("weight", "bias"),
    )


def _channel_norm_backward() -> Target:
    def draw(d: Draw) -> tuple[Tensors, Args]:
        tensors, args = _channel_draw(d)
        tensors["dy"] = d.tensor(tensors["x"]["shape"])
        return tensors, args

    def ours(case: Case) -> str:
        call = f"torch.ops.kgopt.channel_norm_backward(dy, {_channel_text(case)})"
        given = [True, "weight" in case["tensors"], "bias" in case["tensors"]]
        return call if all(given) else f"[g for g, m in zip({call}, {given!r}) if m]"

    def theirs(case: Case) -> str:
        given = ", ".join(f"{n}={n}" for n in ("x", "weight", "bias") if n in case["tensors"])
        return f"vjp(lambda {given}: {REF}.channel_norm_ref({_channel_text(case)}), dict({given}), dy)"

    return Target("channel_norm_backward", 4, draw, ours, theirs, ("op",), grads=(), wide=("weight", "bias"))


TARGETS = [
    _channel_norm(),
    _channel_norm_backward(),
    _group_norm(),
    _group_norm_fwd(),
    _group_norm_add(),
    _group_norm_add_fwd(),
    _group_norm_scale_shift(),
    _group_norm_prelu(),
    _group_norm_prelu_fwd(),
    _group_norm_prelu_backward(),
    _group_norm_moments(),
    _group_norm_maps(),
    _group_stats(),
    _group_norm_mean(),
    _group_norm_mean_fwd(),
    _group_norm_mean_backward(),
    _group_stats_backward(),
    _lse_backward(),
    _group_norm_backward(),
]
