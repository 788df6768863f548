"""torch.func and torch.autograd.functional: transforms of transforms, against those of PyTorch's functions."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import kgopt.nn
from kgopt import functional, reference
from kgopt.torch_private import FORWARD_AD
from test_func import FUNCTIONS, scalar


def activation_pair(act):
    return (
        [(4, 5)],
        lambda x: functional.activation(x, act),
        lambda x: reference.activation_ref(x, act),
    )


ACTS = (*reference.ACTIVATIONS, "tanh+hardswish", "softplus(2,15)", "elu(0.7)+clamp(-0.5,2)")
PAIRS = {**FUNCTIONS, **{act: activation_pair(act) for act in ACTS}}


# name: (function, inputs, tangents, three examples of the first input) -> values
TRANSFORMS = {
    "hessian": lambda f, x, t, s: hessian(scalar(f))(*x),
    "jacrev of jacrev": lambda f, x, t, s: jacrev(jacrev(scalar(f)))(*x),
    "jacfwd of jacfwd": lambda f, x, t, s: jacfwd(jacfwd(scalar(f)))(*x),
    "jacrev of jacfwd": lambda f, x, t, s: jacrev(jacfwd(scalar(f)))(*x),
    "jvp of grad": lambda f, x, t, s: jvp(grad(scalar(f), tuple(range(len(x)))), x, t),
    "jvp of some": lambda f, x, t, s: jvp(lambda first: f(first, *x[1:]), x[:1], t[:1]),
    "jvp of jvp": lambda f, x, t, s: jvp(lambda *a: jvp(f, a, t)[1], x, t),
    "grad of jvp": lambda f, x, t, s: grad(lambda *a: jvp(scalar(f), a, t)[1], tuple(range(len(x))))(*x),
    "grad of grad of grad": lambda f, x, t, s: grad(
        lambda a: grad(lambda b: grad(scalar(f))(b, *x[1:]).square().sum())(a).square().sum()
    )(x[0]),
    "vmap of grad of grad": lambda f, x, t, s: vmap(
        lambda one: grad(lambda a: grad(scalar(f))(a, *x[1:]).square().sum())(one)
    )(s),
    "vmap of hessian": lambda f, x, t, s: vmap(lambda one: hessian(scalar(f))(one, *x[1:]))(s),
    # The levels of torch.func that recorded the graph are gone when this runs.
    "vjp after its transform": lambda f, x, t, s: vjp(grad(scalar(f)), *x)[1](t[0]),
    "autograd.functional.hessian": lambda f, x, t, s: torch.autograd.functional.hessian(scalar(f), x),
    "autograd.functional.hessian, forward over reverse": lambda f, x, t, s: torch.autograd.functional.hessian(
        scalar(f), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "autograd.functional.hvp": lambda f, x, t, s: torch.autograd.functional.hvp(scalar(f), x, t),
    "autograd.functional.vhp": lambda f, x, t, s: torch.autograd.functional.vhp(scalar(f), x, t),
    "autograd.functional.jvp": lambda f, x, t, s: torch.autograd.functional.jvp(f, x, t),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PAIRS)
def test_transforms(name, transform, device):
    """Levels of torch.func see each other's derivatives: none is a constant, which would be a silent zero."""
    shapes, ours, theirs = PAIRS[name]
    inputs, tangents = (
        tuple(torch.randn(s, device=device, dtype=torch.float64) for s in shapes) for _ in ("inputs", "tangents")
    )
    examples = torch.randn(3, *shapes[0], device=device, dtype=torch.float64)
    try:
        expected = tree_leaves(TRANSFORMS[transform](theirs, inputs, tangents, examples))
    except RuntimeError as error:  # torch 2.10 to 2.13: the Hessian of their own group_norm, forward over reverse
        if not torch.__version__.startswith(("2.10.", "2.11.", "2.12.", "2.13.")):
            raise
        pytest.skip(f"this torch's own function refuses it: {error}")
    actual = tree_leaves(TRANSFORMS[transform](ours, inputs, tangents, examples))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dual_numbers(name, device):
    """Tangents of some arguments, and none: then the kernel runs."""
    shapes, ours, theirs = FUNCTIONS[name]
    inputs = [torch.randn(s, device=device, dtype=torch.float64) for s in shapes]
    with forward_ad.dual_level():
        for i in range(len(inputs)):
            given = list(inputs)
            given[i] = forward_ad.make_dual(inputs[i], torch.randn_like(inputs[i]))
            (y, tangent), (_, expected) = (forward_ad.unpack_dual(f(*given)) for f in (ours, theirs))
            torch.testing.assert_close(y, ours(*inputs))
            torch.testing.assert_close(tangent, expected, rtol=1e-9, atol=1e-9)
        assert forward_ad.unpack_dual(ours(*inputs)).tangent is None


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: kgopt.nn.GroupNorm(2, 4, act="silu"), (2, 4, 3, 5)),
        (lambda: kgopt.nn.Conv3dGroupNormMean(2, 4, 3, 2), (2, 2, 4, 5, 4)),
        (lambda: kgopt.nn.ConvTranspose3dReLUGroupNorm(2, 4, 2, 2), (2, 2, 3, 2, 3)),
        (lambda: kgopt.nn.Conv2dGroupNormTanhHardswishResidualLogSumExp(2, 4, 3, 2), (2, 2, 5, 4)),
    ],
    ids=["GroupNorm", "Conv3dGroupNormMean", "ConvTranspose3dReLUGroupNorm", "Conv2d...LogSumExp"],
)
def test_modules(make, shape, device):
    """Hessian-vector products over a module's parameters: forward over reverse and reverse over reverse agree."""
    module = make().to(device, torch.float64)
    parameters = {k: torch.randn_like(v) for k, v in module.named_parameters()}
    direction = {k: torch.randn_like(v) for k, v in parameters.items()}
    x = torch.randn(shape, device=device, dtype=torch.float64)

    def loss(p):
        return functional_call(module, p, (x,)).pow(3).sum()

    forward_over_reverse = jvp(grad(loss), (parameters,), (direction,))[1]
    reverse_over_reverse = grad(
        lambda p: sum((g * d).sum() for g, d in zip(grad(loss)(p).values(), direction.values(), strict=True))
    )(parameters)
    for key, value in forward_over_reverse.items():
        torch.testing.assert_close(value, reverse_over_reverse[key], rtol=1e-8, atol=1e-8)
    assert any(v.abs().max() > 1e-3 for v in forward_over_reverse.values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["group_norm", "conv2d"])
def test_compiled_transforms(name, backend, device):
    """A graph of Dynamo's enters the levels of jvp where Python does not count them: tangents were lost in the ops.

    The sum with x keeps a tangent of the result, so that nothing else would have said so.
    """
    if torch.__version__.startswith("2.13.") and not isinstance(FORWARD_AD, dict):
        pytest.skip("in Dynamo of torch 2.13 making a dual number, which asks for the level, is an internal error")
    shapes, ours, theirs = FUNCTIONS[name]
    inputs, tangents = (
        tuple(torch.randn(s, device=device, dtype=torch.float64) for s in shapes) for _ in ("inputs", "tangents")
    )

    def derivatives(f):
        def loss(*args):
            return scalar(f)(*args) + args[0].sum()

        return lambda *args: (jvp(loss, args, tangents)[1], jvp(grad(loss), args, tangents)[1])

    actual = torch.compile(derivatives(ours), backend=backend)(*inputs)
    for a, e in zip(actual, derivatives(theirs)(*inputs), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)
