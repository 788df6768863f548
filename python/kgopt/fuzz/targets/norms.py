"""GroupNorm, its statistics, and their backward ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kgopt.fuzz.draw import Draw
from kgopt.fuzz.kind import Case
from kgopt.fuzz.target import AFFINE, REF, Args, Target, Tensors, home_of, name_of, of_op, vjp_text, with_dy

__all__ = ["TARGETS"]

_INPUTS = ("x", *AFFINE)
_SUM_INPUTS = ("x", "residual", *AFFINE)
_PRELU_INPUTS = ("x", "residual", "slope", *AFFINE)
_LSE_BACKWARD = "group_norm_tanh_hardswish_residual_logsumexp_backward"

# ----------------------------------------------------------------------------------------------------------------------
# Drawing


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


def _add_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw()(d)
    residual = d.tensor(tensors["x"]["shape"])
    return {"x": tensors.pop("x"), "residual": residual, **tensors}, args


def _leaky_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(act=False)(d)
    residual = d.tensor(tensors["x"]["shape"])
    return {"x": tensors.pop("x"), "residual": residual, **tensors}, {**args, "slope": d.rng.choice([0.01, 0.2, -0.5])}


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


def _sample_draw(d: Draw) -> tuple[Tensors, Args]:
    shape, groups = d.norm_shape()
    tensors = {"x": d.tensor(shape), **{name: d.tensor(shape[:2], plain=True) for name in AFFINE}}
    return tensors, {"num_groups": groups, "eps": d.eps(), "act": d.act()}


def _maps_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(least=4)(d)
    shape = tensors["x"]["shape"]
    small = [d.rng.choice([f for f in range(1, s + 1) if s % f == 0] or [1]) for s in shape[2:]]
    for name in ("scale", "shift"):  # plain: infinity times a norm's zero, which may be rounding, is anything
        tensors[name] = d.tensor([*shape[:2], *small], plain=True)
    return tensors, args


def _prelu_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(act=False)(d)
    shape = tensors["x"]["shape"]
    tensors = {"x": tensors.pop("x"), "slope": d.tensor(d.rng.choice([[1], shape[1:2]])), **tensors}
    if d.rng.random() < 0.4:
        tensors["residual"] = d.tensor(shape)
    return tensors, args


def _summed_prelu_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = _prelu_draw(d)
    tensors.setdefault("residual", d.tensor(tensors["x"]["shape"]))
    return tensors, args


def _stats_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(act=False)(d)
    return {"x": tensors["x"]}, args


def _stats_backward_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = _stats_draw(d)
    sizes = [tensors["x"]["shape"][0], args["num_groups"]]
    return {**tensors, "dy": d.statistics(sizes), "drstd": d.statistics(sizes)}, args


def _mean_backward_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(act=False)(d)
    tensors.pop("bias", None)
    tensors["dy"] = d.statistics(tensors["x"]["shape"][:1])
    return tensors, args


def _lse_draw(d: Draw) -> tuple[Tensors, Args]:
    tensors, args = norm_draw(act=False, least=3)(d)
    shape = tensors["x"]["shape"]
    tensors["dy"] = d.statistics([shape[0], 1, *shape[2:]])
    return tensors, args


def _channel_draw(d: Draw) -> tuple[Tensors, Args]:
    shape, _ = d.norm_shape()
    tensors = {"x": d.tensor(shape)}
    d.affine(tensors, shape[1])
    # Of one channel, rms and l2 are x's sign: the gradient is what rounding leaves of a difference, for which
    # tests/test_channel_norm.py has a bound.
    kind = d.rng.choice(["rms", "l2", "layer"] if shape[1] > 1 else ["layer"])
    eps = d.rng.choice([1e-12, 1e-6, 0.1]) if kind == "l2" else d.eps()
    return tensors, {"kind": kind, "eps": eps, "act": d.act()}


# ----------------------------------------------------------------------------------------------------------------------
# Arguments


def _affine(case: Case) -> str:
    return f"{name_of(case, 'weight')}, {name_of(case, 'bias')}"


def norm_text(case: Case, *names: str, more: str = "") -> str:
    """``more``: what stands behind x."""
    a = case["args"]
    return ", ".join([f"x{more}", repr(a["num_groups"]), _affine(case), *(repr(a[n]) for n in names)])


def _normed(case: Case) -> str:
    return norm_text(case, "eps", "act")


def _added(case: Case) -> str:
    return norm_text(case, "eps", "act", more=", residual")


def _scaled(case: Case) -> str:
    """What follows the norm's arguments, by name."""
    return ", ".join(f"{name}={name_of(case, name)}" for name in ("residual", "scale", "shift"))


def _preluded(case: Case) -> str:
    return f"{norm_text(case, 'eps', more=', slope')}, {name_of(case, 'residual')}"


def _sampled(case: Case, *names: str) -> str:
    a = case["args"]
    return ", ".join(["x, weight, bias", *(repr(a[n]) for n in ("num_groups", *names))])


def _channel_text(case: Case) -> str:
    a = case["args"]
    return ", ".join(["x", _affine(case), *(repr(a[n]) for n in ("kind", "eps", "act"))])


def _wide_affine(case: Case) -> str:
    """Of a norm in the dtype of statistics."""
    names = (f"wide({n})" if n in case["tensors"] else "None" for n in AFFINE)
    return f"wide(x), {case['args']['num_groups']!r}, {', '.join(names)}, {case['args']['eps']!r}"


def stats_text(x: str, case: Case) -> str:
    return f"{REF}.group_stats_ref(wide({x}), {case['args']['num_groups']!r}, {case['args']['eps']!r})"


def _with_stats(y: str, case: Case, of: str = "x") -> str:
    return f"({y}, *{stats_text(of, case)})"


def _stats_before(case: Case, x: str = "x") -> list[str]:
    a = case["args"]
    return [f"mean, rstd = given_stats({x}, {a['num_groups']!r}, {a['eps']!r})"]


def _stats_of_act_before(case: Case) -> list[str]:
    # By kgopt's own function, which computes it again: another one's rounding is all that is left of x - mean where the
    # group has one value.
    return _stats_before(case, f"torch.ops.kgopt.activation(wide(x), {case['args']['pre_act']!r})")


# ----------------------------------------------------------------------------------------------------------------------
# Calls


def _group_norm(case: Case) -> str:
    if case["via"] == "module" and set(AFFINE) <= set(case["tensors"]):
        a, c = case["args"], case["tensors"]["weight"]["shape"][0]
        made = f"kgopt.nn.GroupNorm({a['num_groups']}, {c}, {a['eps']!r}, act={a['act']!r}, device='meta')"
        return f'torch.func.functional_call({made}, {{"weight": weight, "bias": bias}}, (x,))'
    return f"{home_of(case)}.group_norm({_normed(case)})"


def _group_norm_add(case: Case) -> str:
    if case["via"] == "functional":
        return f"kgopt.functional.group_norm({_normed(case)}, residual)"
    return f"torch.ops.kgopt.group_norm_add({_added(case)})"


def _group_norm_prelu(case: Case) -> str:
    if case["via"] == "functional":
        norm = norm_text(case, "eps")
        return f"kgopt.functional.group_norm({norm}, 'prelu', {name_of(case, 'residual')}, slope)"
    return f"torch.ops.kgopt.group_norm_prelu({_preluded(case)})"


def _sum_gradients(case: Case, call: str, names: Sequence[str]) -> str:
    # The gradient of a residual is that of the activation's argument. Beside float32 parameters all of it is computed
    # in float32; the search rounds the first result alone.
    dtypes = ", ".join(f"torch.{case['tensors'][n]['dtype']}" for n in names if n in case["tensors"])
    given = vjp_text(case, call, names)
    return f"[g if g.dtype == torch.float64 else g.to(d) for g, d in zip({given}, ({dtypes}))]"


def _prelu_gradients(case: Case) -> str:
    return _sum_gradients(case, f"{REF}.group_norm_prelu_ref({_preluded(case)})", _PRELU_INPUTS)


def _leaky_gradients(case: Case) -> str:
    act = f"leaky_relu({case['args']['slope']!r})"
    call = f"{REF}.group_norm_add_ref({norm_text(case, more=', residual')}, eps={case['args']['eps']!r}, act={act!r})"
    return _sum_gradients(case, call, _SUM_INPUTS)


def _norm_fwd_ref(case: Case) -> str:
    y = f"{REF}.group_norm_ref({norm_text(case, 'eps', 'act', 'pre_act')})"
    return _with_stats(y, case, f"{REF}.activation_ref(wide(x), {case['args']['pre_act']!r})")


def _mean_fwd_ref(case: Case) -> str:
    has_positions = len(case["tensors"]["x"]["shape"]) > 2
    channel_mean = "wide(x).reshape(*x.shape[:2], -1).mean(2)" if has_positions else "wide(x)"
    return _with_stats(f"{REF}.group_norm_mean_ref({_wide_affine(case)}), {channel_mean}", case)


def _mean_backward(case: Case) -> str:
    groups, weight = case["args"]["num_groups"], name_of(case, "weight")
    call = f"torch.ops.kgopt.group_norm_mean_backward(dy, x, channel_mean, mean, rstd, {groups!r}, {weight})"
    return f"{call}[:{2 if 'weight' in case['tensors'] else 1}]"


def _lse_ref(case: Case) -> str:
    norm = norm_text(case, "eps")
    return f"torch.logsumexp(x + {REF}.group_norm_ref({norm}, 'tanh+hardswish'), 1, True)"


def _channel_norm(case: Case) -> str:
    given = [n for n in AFFINE if n in case["tensors"]]
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


TARGETS = [
    Target(
        "channel_norm",
        8,
        _channel_draw,
        _channel_norm,
        lambda case: f"{REF}.channel_norm_ref({_channel_text(case)})",
        ("functional", "op", "module"),
        autocast=True,
        wide=AFFINE,
    ),
    of_op(
        "channel_norm_backward",
        4,
        with_dy(_channel_draw),
        lambda case: f"dy, {_channel_text(case)}",
        lambda case: vjp_text(case, f"{REF}.channel_norm_ref({_channel_text(case)})", _INPUTS),
        _INPUTS,
        grads=(),
        wide=AFFINE,
    ),
    Target(
        "group_norm",
        14,
        norm_draw(),
        _group_norm,
        lambda case: f"{REF}.group_norm_ref({_normed(case)})",
        ("functional", "op", "module"),
        autocast=True,
        wide=AFFINE,
    ),
    of_op(
        "group_norm_fwd",
        8,
        norm_draw(pre=True),
        lambda case: norm_text(case, "eps", "act", "pre_act"),
        _norm_fwd_ref,
        wide=AFFINE,
    ),
    Target(
        "group_norm_add",
        10,
        _add_draw,
        _group_norm_add,
        lambda case: f"{REF}.group_norm_add_ref({_added(case)})",
        autocast=True,
        wide=AFFINE,
    ),
    of_op(
        "group_norm_add_fwd",
        4,
        _add_draw,
        _added,
        lambda case: _with_stats(f"{REF}.group_norm_add_ref({_added(case)})", case),
        wide=AFFINE,
    ),
    Target(  # no op of its own: arithmetic on tiny tensors and a view in front of group_norm
        "group_norm_scale_shift",
        8,
        _scale_shift_draw,
        lambda case: f"kgopt.functional.group_norm({_normed(case)}, {_scaled(case)})",
        lambda case: (  # scale and shift may have any floating dtype, which PyTorch's products would promote to
            f"{REF}.group_norm_scale_shift_ref({norm_text(case)}, eps={case['args']['eps']!r}, "
            f"act={case['args']['act']!r}, {_scaled(case)}).to(x.dtype)"
        ),
        ("functional",),
        grads=(*_INPUTS, "scale", "shift"),
        wide=AFFINE,
    ),
    of_op(
        "group_norm_by_sample",
        5,
        _sample_draw,
        lambda case: _sampled(case, "eps", "act"),
        lambda case: f"{REF}.group_norm_by_sample_ref({_sampled(case, 'eps', 'act')})",
        autocast=True,
        wide=AFFINE,
    ),
    of_op(
        "group_norm_by_sample_fwd",
        3,
        _sample_draw,
        lambda case: _sampled(case, "eps", "act"),
        lambda case: _with_stats(f"{REF}.group_norm_by_sample_ref({_sampled(case, 'eps', 'act')})", case),
        wide=AFFINE,
    ),
    of_op(
        "group_norm_by_sample_backward",
        3,
        with_dy(_sample_draw),
        lambda case: f"dy, x, mean, rstd, {_sampled(case, 'act').removeprefix('x, ')}",
        lambda case: vjp_text(case, f"{REF}.group_norm_by_sample_ref({_sampled(case, 'eps', 'act')})", _INPUTS),
        _INPUTS,
        before=_stats_before,
        grads=(),
        wide=AFFINE,
    ),
    Target(
        "group_norm_prelu",
        8,
        _prelu_draw,
        _group_norm_prelu,
        lambda case: f"{REF}.group_norm_prelu_ref({_preluded(case)})",
        wide=AFFINE,
    ),
    of_op(
        "group_norm_prelu_fwd",
        3,
        _prelu_draw,
        _preluded,
        lambda case: _with_stats(f"{REF}.group_norm_prelu_ref({_preluded(case)})", case),
        wide=AFFINE,
    ),
    of_op(
        "group_norm_prelu_backward",
        3,
        with_dy(_summed_prelu_draw),
        lambda case: f"dy, x, mean, rstd, slope, {case['args']['num_groups']!r}, {_affine(case)}, residual",
        _prelu_gradients,
        _PRELU_INPUTS,
        before=_stats_before,
        grads=(),
        wide=AFFINE,
    ),
    of_op(
        "group_norm_add_leaky_relu_backward",
        3,
        with_dy(_leaky_draw),
        lambda case: (
            f"dy, x, residual, mean, rstd, {case['args']['num_groups']!r}, {_affine(case)}, {case['args']['slope']!r}"
        ),
        _leaky_gradients,
        _SUM_INPUTS,
        before=_stats_before,
        grads=(),
        wide=AFFINE,
    ),
    of_op(
        "group_norm_moments",
        4,
        norm_draw(least=3),
        lambda case: norm_text(case, "eps", "act", more=", moments"),
        lambda case: f"{REF}.group_norm_ref({_normed(case)})",
        before=lambda case: ["moments = channel_moments(x)"],
        autocast=True,
        wide=AFFINE,
    ),
    of_op(
        "group_norm_maps",
        5,
        _maps_draw,
        lambda case: norm_text(case, "eps", "act", more=", None, scale, shift"),
        lambda case: f"{REF}.group_norm_maps_ref({norm_text(case, 'eps', 'act', more=', scale, shift')})",
        grads=(*_INPUTS, "scale", "shift"),
        autocast=True,
        wide=AFFINE,
    ),
    Target(
        "group_stats",
        5,
        _stats_draw,
        lambda case: f"{home_of(case)}.group_stats(x, {case['args']['num_groups']!r}, {case['args']['eps']!r})",
        lambda case: stats_text("x", case),
        differentiable=2,
        grads=("x",),
    ),
    Target(
        "group_norm_mean",
        5,
        norm_draw(act=False),
        lambda case: f"{home_of(case)}.group_norm_mean({norm_text(case, 'eps')})",
        lambda case: f"{REF}.group_norm_mean_ref({norm_text(case, 'eps')})",
        autocast=True,
        wide=AFFINE,
    ),
    of_op(
        "group_norm_mean_fwd",
        2,
        norm_draw(act=False),
        lambda case: norm_text(case, "eps"),
        _mean_fwd_ref,
        wide=AFFINE,
        statistics=True,
    ),
    Target(
        "group_norm_mean_backward",
        2,
        _mean_backward_draw,
        _mean_backward,
        lambda case: vjp_text(case, f"{REF}.group_norm_mean_ref({norm_text(case, 'eps')})", ("x", "weight")),
        ("op",),
        lambda case: [*_stats_before(case), "channel_mean = channel_moments(x)[..., 0].contiguous()"],
        grads=(),
        wide=("weight",),
    ),
    of_op(
        "group_stats_backward",
        2,
        _stats_backward_draw,
        lambda case: f"dy, drstd, x, mean, rstd, {case['args']['num_groups']!r}",
        lambda case: f"{vjp_text(case, stats_text('x', case), ('x',), '(dy, drstd)')}[0]",
        before=_stats_before,
        grads=(),
    ),
    of_op(
        _LSE_BACKWARD,
        2,
        _lse_draw,
        lambda case: f"dy, x, mean, rstd, {case['args']['num_groups']!r}, {_affine(case)}",
        lambda case: vjp_text(case, _lse_ref(case), _INPUTS),
        _INPUTS,
        before=_stats_before,
        grads=(),
        wide=AFFINE,
    ),
    of_op(
        "group_norm_backward",
        4,
        with_dy(norm_draw(pre=True)),
        lambda case: (
            f"dy, x, mean, rstd, {case['args']['num_groups']!r}, {_affine(case)}, "
            f"{case['args']['act']!r}, {case['args']['pre_act']!r}"
        ),
        lambda case: vjp_text(case, f"{REF}.group_norm_ref({norm_text(case, 'eps', 'act', 'pre_act')})", _INPUTS),
        _INPUTS,
        before=_stats_of_act_before,
        grads=(),
        wide=AFFINE,
    ),
]
