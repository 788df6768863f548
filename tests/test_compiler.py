"""torch.library.opcheck, torch.compile, export, AOTInductor, autograd, autocast, vmap, flop counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from opcases import NAMES, small_calls
from torch.utils.flop_counter import FlopCounterMode

import kgopt.nn
from kgopt import functional

OPS = torch.ops.kgopt


def test_every_op_has_a_case():
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("kgopt::")]
    takes_tensor = {s.name.split("::")[1] for s in schemas if any(str(a.type) == "Tensor" for a in s.arguments)}
    assert takes_tensor - {"explain_conv"} == set(NAMES)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_opcheck(index, channels_last, requires_grad, device):
    name, args, kwargs = small_calls(device, channels_last=channels_last, requires_grad=requires_grad)[index]
    if requires_grad and name.endswith("_backward"):
        pytest.skip("backward ops refuse a second derivative; test_double_backward_refused")
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


def grad_inputs(device, *shapes):
    return [torch.randn(s, device=device, dtype=torch.float64, requires_grad=True) for s in shapes]


GRADCHECKS = {
    "group_norm": ([(2, 4, 3, 3), (4,), (4,)], lambda x, w, b: functional.group_norm(x, 2, w, b, act="silu")),
    "group_norm pre": ([(2, 4, 5), (4,), (4,)], lambda x, w, b: OPS.group_norm_fwd(x, 2, w, b, 1e-5, "tanh", "silu")[0]),
    "group_norm_mean": ([(2, 4, 3, 3), (4,), (4,)], lambda x, w, b: functional.group_norm_mean(x, 2, w, b)),
    "group_stats": ([(2, 4, 5)], lambda x: functional.group_stats(x, 2)),
    "activation": ([(17,)], lambda x: functional.activation(x, "gelu+mish")),
    "logsumexp": ([(3, 4, 2)], lambda x: functional.logsumexp(x, [0, 2])),
    "mean": ([(3, 4, 2)], lambda x: functional.mean(x, [1], True)),
    "conv2d": ([(2, 3, 5, 5), (4, 3, 3, 3), (4,)], lambda x, w, b: functional.conv2d(x, w, b, 2, 1)),
    "conv_transpose3d": ([(1, 2, 3, 3, 2), (2, 2, 2, 2, 2)], lambda x, w: functional.conv_transpose3d(x, w, stride=2)),
    "conv3d_group_norm_mean": (
        [(2, 2, 4, 4, 4), (4, 2, 3, 3, 3), (4,), (4,), (4,)],
        lambda x, w, b, g, h: functional.conv3d_group_norm_mean(x, w, b, 2, g, h),
    ),
    "conv_transpose3d_relu_group_norm": (
        [(1, 2, 3, 3, 3), (2, 4, 2, 2, 2), (4,), (4,)],
        lambda x, w, g, h: functional.conv_transpose3d_relu_group_norm(x, w, None, 2, g, h),
    ),
    "conv2d_..._logsumexp": (
        [(2, 2, 5, 5), (4, 2, 3, 3), (4,), (4,), (4,)],
        lambda x, w, b, g, h: functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp(x, w, b, 2, g, h),
    ),
}


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name, device):
    shapes, function = GRADCHECKS[name]
    # cuDNN's fp64 gradients differ from call to call in their last bits.
    nondeterminism = 1e-10 if device == "cuda" and "conv" in name else 0.0
    inputs = grad_inputs(device, *shapes)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True, nondet_tol=nondeterminism)


@pytest.mark.parametrize("name", [n for n in GRADCHECKS if not n.startswith("conv2d") or "log" in n])
def test_double_backward_refused(name, device):
    if name in ("conv_transpose3d",):
        pytest.skip("convolutions are differentiable twice, through ATen")
    shapes, function = GRADCHECKS[name]
    inputs = grad_inputs(device, *shapes)
    y = function(*inputs)
    y = y[0] if isinstance(y, tuple) else y
    (dx,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        dx.square().sum().backward()


def test_convolution_double_backward(device):
    assert torch.autograd.gradgradcheck(
        lambda x, w: functional.conv2d(x, w), grad_inputs(device, (1, 2, 4, 4), (2, 2, 3, 3))
    )


class Net(torch.nn.Module):
    """Every module, and functional calls, in one model."""

    def __init__(self):
        super().__init__()
        self.conv = kgopt.nn.Conv2d(4, 8, 3, padding=1)
        self.norm = kgopt.nn.GroupNorm(4, 8, act="silu")
        self.up = kgopt.nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = kgopt.nn.Conv2dGroupNormTanhHardswishResidualLogSumExp(4, 16, 3, 4)

    def forward(self, x):
        x = self.up(self.norm(self.conv(x)))
        return functional.mean(self.head(functional.activation(x, "gelu")), [2, 3])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_inference(dynamic, device):
    net = Net().to(device).eval()
    compiled = torch.compile(net, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for size in (12, 14, 18):
            x = torch.randn(2, 4, size, size + 1, device=device)
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_training(dynamic, device):
    net = Net().to(device)
    compiled = torch.compile(net, fullgraph=True, dynamic=dynamic)
    x = torch.randn(2, 4, 12, 12, device=device)
    grads = []
    for model in (net, compiled):
        net.zero_grad()
        model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_export(device):
    net = Net().to(device).eval()
    x = torch.randn(2, 4, 12, 12, device=device)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(net, (x,), dynamic_shapes={"x": {0: batch}})
    assert "kgopt" in str(program.graph)
    y = torch.randn(5, 4, 12, 12, device=device)
    torch.testing.assert_close(program.module()(y), net(y), rtol=1e-4, atol=1e-4)


def test_aot_inductor(tmp_path, device):
    net = Net().to(device).eval()
    x = torch.randn(2, 4, 12, 12, device=device)
    with torch.no_grad():
        program = torch.export.export(net, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(loaded(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_as_torch(dtype, device):
    x2, x3 = torch.randn(2, 4, 9, 10, device=device), torch.randn(2, 4, 5, 6, 7, device=device)
    w2, w3, wt3 = (torch.randn(s, device=device) * 0.2 for s in ((6, 4, 3, 3), (6, 4, 3, 3, 3), (4, 6, 3, 3, 3)))
    b, gamma, beta = (torch.randn(6, device=device) for _ in range(3))
    norm = (3, gamma, beta)

    def logsumexp_pipeline(c):
        return torch.logsumexp(c + F.hardswish(torch.tanh(F.group_norm(c, *norm))), 1, keepdim=True)

    pairs = [
        (lambda: functional.conv2d(x2, w2, b), lambda: F.conv2d(x2, w2, b)),
        (lambda: functional.conv_transpose3d(x3, wt3), lambda: F.conv_transpose3d(x3, wt3)),
        (lambda: functional.conv3d_group_norm_mean(x3, w3, b, *norm),
         lambda: F.group_norm(F.conv3d(x3, w3, b), *norm).mean((1, 2, 3, 4))),
        (lambda: functional.conv_transpose3d_relu_group_norm(x3, wt3, None, *norm),
         lambda: F.group_norm(F.relu(F.conv_transpose3d(x3, wt3)), *norm)),
        (lambda: functional.conv2d_group_norm_tanh_hardswish_residual_logsumexp(x2, w2, b, *norm),
         lambda: logsumexp_pipeline(F.conv2d(x2, w2, b))),
    ]  # fmt: skip
    for ours, torchs in pairs:
        with torch.autocast(device, dtype):
            y, expected = ours(), torchs()
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


def test_autocast_training_step(device):
    net = Net().to(device)
    x = torch.randn(2, 4, 12, 12, device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = net(x).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_vmap(index, device):
    name, args, kwargs = small_calls(device)[index]
    op = getattr(OPS, name)
    batched = [torch.stack([a, a * 0.5, a + 1]) if i == 0 else a for i, a in enumerate(args)]
    in_dims = tuple(0 if i == 0 else None for i in range(len(args)))
    out = torch.vmap(lambda *a: op(*a, **kwargs), in_dims=in_dims)(*batched)
    single = [op(batched[0][i], *args[1:], **kwargs) for i in range(3)]
    if isinstance(out, torch.Tensor):
        out, single = (out,), [(s,) for s in single]
    for k, o in enumerate(out):
        torch.testing.assert_close(o, torch.stack([s[k] for s in single]), rtol=1e-4, atol=1e-5)


def test_flop_counts_are_those_of_aten(device):
    x2, x3 = torch.randn(2, 4, 9, 10, device=device), torch.randn(2, 4, 5, 6, 7, device=device)
    w2, w3, wt3 = (torch.randn(s, device=device) for s in ((6, 4, 3, 3), (6, 4, 3, 3, 3), (4, 6, 3, 3, 3)))
    pairs = [
        (lambda: functional.conv2d(x2, w2, stride=2), lambda: F.conv2d(x2, w2, stride=2)),
        (lambda: functional.conv_transpose3d(x3, wt3, stride=2), lambda: F.conv_transpose3d(x3, wt3, stride=2)),
        (lambda: functional.conv3d_group_norm_mean(x3, w3, None, 3), lambda: F.conv3d(x3, w3)),
        (lambda: functional.conv_transpose3d_relu_group_norm(x3, wt3, None, 3), lambda: F.conv_transpose3d(x3, wt3)),
    ]
    for ours, torchs in pairs:
        counts = []
        for run in (ours, torchs):
            with FlopCounterMode(display=False) as counter:
                run()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0
