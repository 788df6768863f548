"""Second derivatives and forward mode of every op: values, and what stands around them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from kgopt import functional, reference
from kgopt.ops import derivatives
from opcases import NAMES, small_calls
from tolerances import assert_all_as_good

OPS = torch.ops.kgopt
CHAINS = (
    *(*reference.ACTIVATIONS, *reference.PARAMETRIZED),
    *("tanh+hardswish", "silu+softplus+gelu", "elu(0.7)+mul(1.5)+softplus(2,15)"),
)
# Their results beside the first are what a backward op reads, and are not differentiable.
ONE_RESULT = [n for n in NAMES if n.endswith("_fwd") or n in ("conv_add_moments", "group_norm_conv_moments")]
# What these take as moments counts as computed from x.
MOMENTS_OF_X = {"group_norm_moments": 1}
# cuDNN's fp64 gradients differ from call to call in their last bits.
NONDETERMINISM = {"cpu": 0.0, "cuda": 1e-9}


def leaves(tensors):
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]


def of_tensors(name, args, kwargs):
    """The op as a function of its tensors alone, and these."""
    skipped = MOMENTS_OF_X.get(name)
    at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i != skipped]

    def function(*tensors):
        given = list(args)
        for i, t in zip(at, tensors, strict=True):
            given[i] = t
        if skipped is not None:
            variance, mean = torch.var_mean(given[0].detach().flatten(2), 2, correction=0)
            given[skipped] = torch.stack((mean, variance), 2)
        out = getattr(OPS, name)(*given, **kwargs)
        return out[0] if name in ONE_RESULT else out

    return function, leaves(args[i] for i in at)


def check_all(function, tensors, device, fast=True):
    """Both modes, and every second derivative of them that gradgradcheck knows."""
    options = {"fast_mode": fast, "nondet_tol": NONDETERMINISM[device]}
    assert gradcheck(function, tensors, check_forward_ad=True, **options)
    assert gradgradcheck(function, tensors, check_undefined_grad=False, check_fwd_over_rev=True, **options)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_every_op(index, layout, device):
    """Backward ops too, with respect to all that they take: they are public."""
    name, args, kwargs = small_calls(device, torch.float64, channels_last=layout == "channels_last")[index]
    check_all(*of_tensors(name, args, kwargs), device)


@pytest.mark.parametrize("act", CHAINS)
def test_every_activation(act, device):
    x = torch.randn(2, 4, 3, dtype=torch.float64, device=device, requires_grad=True)
    check_all(lambda x: functional.activation(x, act), [x], device, fast=False)
    weight, bias = leaves(torch.randn(2, 4, dtype=torch.float64, device=device))
    check_all(lambda x, w, b: functional.group_norm(x, 2, w, b, act=act), [x, weight, bias], device, fast=False)


@pytest.mark.parametrize("given", ["neither", "weight", "bias"])
@pytest.mark.parametrize("pre_act", ["none", "relu", "tanh"])
def test_norms_with_half_of_their_parameters(given, pre_act, device):
    x, p = drawn([(2, 4, 5), (4,)], device, torch.float64)
    tensors = [x] if given == "neither" else [x, p]

    def affine(p=None):
        return (p, None) if given == "weight" else (None, p)

    def norm(x, *p):
        return OPS.group_norm_fwd(x, 2, *affine(*p), 1e-5, "silu", pre_act)[0]

    check_all(norm, tensors, device)
    if pre_act == "none":
        check_all(lambda x, *p: functional.group_norm_mean(x, 2, *affine(*p)), tensors, device)


@pytest.mark.parametrize("channels_last", [False, True])
def test_empty_and_tiny(channels_last, device):
    """No batch, one position, one value a group: shapes as PyTorch's, no error."""
    for shape in ((0, 4, 3, 3), (2, 4, 1, 1), (1, 4, 2, 1)):
        x = torch.randn(shape, dtype=torch.float64, device=device)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        w = torch.randn(4, dtype=torch.float64, device=device, requires_grad=True)
        grads = []
        for norm in (functional.group_norm, torch.group_norm):
            (dx,) = torch.autograd.grad(norm(x, 4, w, w).pow(3).sum(), x, create_graph=True)
            grads.append((dx, *torch.autograd.grad(dx.square().sum(), (x, w))))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)


def penalty(function, tensors, wanted=None):
    """Gradients of a gradient penalty: a scalar of the first gradients."""
    wanted = tensors if wanted is None else wanted
    y = function(*tensors)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape)
    first = torch.autograd.grad((y * weights).sum(), wanted, create_graph=True)
    loss = sum(g.float().square().sum() if g.dtype.itemsize < 4 else g.square().sum() for g in first)
    # One that is zero everywhere is None in some versions of PyTorch.
    second = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
    return [g.detach() for g in (*first, *second)]


PAIRS = {
    "group_norm": (
        [(2, 8, 6, 5), (8,), (8,)],
        lambda x, w, b: functional.group_norm(x, 4, w, b, act="silu"),
        lambda x, w, b: reference.group_norm_ref(x, 4, w, b, act="silu"),
    ),
    "group_norm_mean": (
        [(3, 8, 6, 5), (8,), (8,)],
        lambda x, w, b: functional.group_norm_mean(x, 4, w, b),
        lambda x, w, b: reference.group_norm_mean_ref(x, 4, w, b),
    ),
    "activation": (
        [(2, 8, 6, 5)],
        lambda x: functional.activation(x, "gelu+mish"),
        lambda x: reference.activation_ref(x, "gelu+mish"),
    ),
    "logsumexp": (
        [(2, 8, 6, 5)],
        lambda x: functional.logsumexp(x, 1),
        lambda x: torch.logsumexp(x, 1),
    ),
    "conv3d_group_norm_mean": (
        [(2, 3, 5, 6, 4), (8, 3, 3, 3, 3), (8,), (8,), (8,)],
        lambda x, w, c, g, b: functional.conv3d_group_norm_mean(x, w, c, 4, g, b),
        lambda x, w, c, g, b: reference.conv3d_group_norm_mean_ref(x, w, c, 4, g, b),
    ),
    "conv_transpose3d_relu_group_norm": (
        [(2, 4, 3, 4, 3), (4, 8, 3, 3, 3), (8,), (8,)],
        lambda x, w, g, b: functional.conv_transpose3d_relu_group_norm(x, w, None, 4, g, b, 2),
        lambda x, w, g, b: reference.conv_transpose3d_relu_group_norm_ref(x, w, None, 4, g, b, 2),
    ),
    "conv2d_..._logsumexp": (
        [(2, 4, 9, 8), (8, 4, 3, 3), (8,), (8,), (8,)],
        lambda x, w, c, g, b: functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp(x, w, c, 4, g, b),
        lambda x, w, c, g, b: reference.conv2d_group_norm_tanh_hardswish_residual_logsumexp_ref(x, w, c, 4, g, b),
    ),
    "group_norm_conv": (
        [(2, 8, 6, 5), (8,), (8,), (4, 8, 3, 3), (4,), (2, 4, 6, 5)],
        lambda x, g, b, w, c, r: functional.group_norm_conv(
            x, 4, g, b, w, c, padding=1, gn_act="silu", residual=r, divisor=2.0, act="relu"
        ),
        lambda x, g, b, w, c, r: reference.group_norm_conv_ref(
            x, None, 4, g, b, 1e-5, "silu", w, c, r, [1, 1], [1, 1], [1, 1], [0, 0], 1, False, 2.0, "relu"
        ),
    ),
}


def drawn(shapes, device, dtype, channels_last=False):
    tensors = []
    for shape in shapes:
        t = torch.randn(shape).to(device, dtype)
        if channels_last and t.dim() > 3:
            t = t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
        tensors.append(t.requires_grad_())
    return tensors


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_as_good_as_torch(name, dtype, channels_last, device):
    """First gradients with a graph, and the gradients of a penalty on them, by the rule of tolerances."""
    shapes, ours, theirs = PAIRS[name]
    tensors = drawn(shapes, device, dtype, channels_last)
    exact = penalty(theirs, leaves(t.double() for t in tensors))
    expected, actual = penalty(theirs, tensors), penalty(ours, tensors)
    assert_all_as_good(actual, expected, exact)


@pytest.mark.parametrize("name", PAIRS)
def test_of_some_inputs(name, device):
    """A penalty on the gradient of one input reaches all of them; one that needs no gradient is left out."""
    shapes, ours, theirs = PAIRS[name]
    tensors = drawn(shapes, device, torch.float64)
    for wanted in tensors[:2]:
        for a, e in zip(penalty(ours, tensors, [wanted]), penalty(theirs, tensors, [wanted]), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)
    if len(tensors) > 1:
        tensors[1].requires_grad_(False)
        some = [t for i, t in enumerate(tensors) if i != 1]
        grads = [penalty(lambda *t, f=f: f(t[0], tensors[1], *t[1:]), some) for f in (ours, theirs)]
        for a, e in zip(*grads, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["group_norm", "conv2d_..._logsumexp"])
def test_third_derivative(name, device):
    shapes, ours, theirs = PAIRS[name]
    tensors = drawn(shapes, device, torch.float64)
    grads = []
    for function in (ours, theirs):
        g = function(*tensors).sin().sum()
        for _ in range(3):
            g = torch.autograd.grad(g, tensors[0], create_graph=True)[0].pow(3).sum()
        grads.append(torch.autograd.grad(g, tensors))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-7 * float(e.abs().max()))


def test_statistics(device):
    """mean and rstd of group_stats are results like any other, and their gradients can be differentiated."""
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64, device=device, requires_grad=True)

    def of(stats):
        mean, rstd = stats(x, 3)
        return (mean.exp() * rstd.square()).sum()

    grads = []
    for stats in (functional.group_stats, reference.group_stats_ref):
        (dx,) = torch.autograd.grad(of(stats), x, create_graph=True)
        grads.append(torch.autograd.grad(dx.sin().sum(), x)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("given", ["of x, without a graph", "differentiable"])
def test_statistics_of_a_backward_op(given, device):
    """mean and rstd that carry no derivative count as functions of x, with their own one as arguments: equal sums.

    As constants they would leave out how the statistics move with x: wrong values, without an error.
    """
    x, dy = drawn([(2, 6, 5), (2, 6, 5)], device, torch.float64)
    w = drawn([(6,)], device, torch.float64)[0]
    mean, rstd = functional.group_stats(x, 3)
    if given != "differentiable":
        mean, rstd = mean.detach(), rstd.detach()
    dx, dw, _ = OPS.group_norm_backward(dy, x, mean, rstd, 3, w, None, "silu")
    y = reference.group_norm_ref(x, 3, w, None, act="silu")
    expected = torch.autograd.grad(y, (x, w), dy, create_graph=True)
    torch.testing.assert_close((dx, dw), expected)
    for a, e in zip(
        torch.autograd.grad(dx.sin().sum() + dw.cos().sum(), (x, dy, w)),
        torch.autograd.grad(expected[0].sin().sum() + expected[1].cos().sum(), (x, dy, w)),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("around", ["save_on_cpu", "checkpoint", "reentrant", "retain_graph"])
@pytest.mark.parametrize("name", ["group_norm", "group_norm_conv", "conv3d_group_norm_mean"])
def test_what_stands_around(name, around, device):
    shapes, ours, theirs = PAIRS[name]
    tensors = drawn(shapes, device, torch.float64)
    expected = penalty(theirs, tensors)
    if around == "save_on_cpu":  # around the second backward, too, in which torch.func refuses such hooks
        with torch.autograd.graph.save_on_cpu():
            actual = penalty(ours, tensors)
    elif around == "retain_graph":
        y = ours(*tensors)
        weights = torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape)
        first = torch.autograd.grad((y * weights).sum(), tensors, create_graph=True)
        loss = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(loss, tensors, allow_unused=True)
        for a, e in zip(again, second, strict=True):
            torch.testing.assert_close(a, e)
        actual = [*first, *(g for g in second if g is not None)]
    elif around == "checkpoint":
        actual = penalty(lambda *t: checkpoint(ours, *t, use_reentrant=False), tensors)
    else:  # the whole penalty inside: what is computed again is a backward with a graph
        x, *rest = tensors

        def norm_of_gradient(x):
            y = ours(x, *rest)
            weights = torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape)
            first = torch.autograd.grad((y * weights).sum(), tensors, create_graph=True)
            return sum(g.square().sum() for g in first)

        loss = checkpoint(norm_of_gradient, x, use_reentrant=False)
        second = torch.autograd.grad(loss, tensors, allow_unused=True)
        actual, expected = [g for g in second if g is not None], expected[len(tensors) :]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


def test_autocast(device):
    """Nothing in a formula is cast once more: gradients with a graph keep their dtypes and values."""
    shapes, ours, _ = PAIRS["conv3d_group_norm_mean"]
    tensors = drawn(shapes, device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        y = ours(*tensors)
        plain = torch.autograd.grad(y.float().sum(), tensors, retain_graph=True)
        with_graph = torch.autograd.grad(y.float().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(with_graph[0].square().sum(), tensors[1])[0]
        tangent = torch.func.jvp(lambda x: ours(x, *tensors[1:]), (tensors[0],), (torch.ones_like(tensors[0]),))[1]
    for a, e in zip(with_graph, plain, strict=True):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2 * float(e.abs().max()))
    assert second.dtype is torch.float32
    assert second.isfinite().all()
    assert tangent.dtype is y.dtype


def test_first_derivatives_run_kernels(device, monkeypatch):
    """Formulas are for second derivatives alone: not for a backward, nor for one that keeps a graph."""

    def formula(*_):
        raise AssertionError("a formula ran")

    monkeypatch.setattr(derivatives, "formula", formula)
    for shapes, ours, _ in PAIRS.values():
        tensors = drawn(shapes, device, torch.float64)
        torch.autograd.grad(ours(*tensors).sum(), tensors)
        torch.autograd.grad(ours(*tensors).sum(), tensors, create_graph=True)
        torch.func.grad(lambda x, f=ours, t=tensors: f(x, *t[1:]).sum())(tensors[0])


def test_compiled_functions_refuse_as_any(device):
    """AOTAutograd has no second derivative, and says so."""
    x = torch.randn(2, 4, 5, device=device, requires_grad=True)
    y = torch.compile(lambda x: functional.group_norm(x, 2), backend="aot_eager")(x)
    (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dx.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["conv3d", "conv_transpose3d"])
def test_precision_of_a_second_derivative(name):
    """``allow_tf32=False`` holds for convolutions of the second derivative, whatever PyTorch's switch says then."""
    torch.backends.cudnn.allow_tf32 = True
    x, w = drawn([(2, 32, 8, 8, 8), (32, 32, 3, 3, 3)], "cuda", torch.float32)
    ours, theirs = getattr(functional, name), getattr(torch.nn.functional, name)
    exact = penalty(theirs, leaves((x.double(), w.double())))
    for a, e in zip(penalty(lambda *t: ours(*t, allow_tf32=False), [x, w]), exact, strict=True):
        error = float((a.double() - e).norm() / e.norm())
        assert error < 1e-5, f"error {error:.1e} is TF32's"
