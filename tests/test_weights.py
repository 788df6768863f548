"""Weights of convolutions in channels_last in code that Inductor compiles (kgopt/rewrite/inductor/weights.py)."""

from __future__ import annotations

import contextlib
import copy
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import kgopt  # noqa: F401
from kgopt._layout import FORMATS
from kgopt.rewrite.inductor import weights
from kgopt.rewrite.inductor.passes import passes

ATEN, OPS = torch.ops.aten, torch.ops.kgopt
CAST = torch.ops.prims.convert_element_type.default
FORWARD, BACKWARD, IN_FORMAT = ATEN.convolution.default, ATEN.convolution_backward.default, OPS.in_format.default
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh():
    """What an earlier version of this package compiled must not be found."""
    import torch._inductor.utils

    with torch._inductor.utils.fresh_inductor_cache():
        yield
    torch._dynamo.reset()


# ----------------------------------------------------------------------------------------------------------------------
# Graphs without a compiler, whose fake tensors are meta tensors


@pytest.fixture
def meta(monkeypatch):
    monkeypatch.setattr(weights, "DEVICES", ("meta",))


def last(t):
    return t.contiguous(memory_format=FORMATS[t.dim()])


class Joint:
    """A training step's graph of one convolution: x, the weight and the gradient of the result go in."""

    def __init__(self, dims=3, c_in=32, c_out=40, kernel=3, dtype=torch.bfloat16, transposed=False, x_last=True):
        self.graph, self.dtype = fx.Graph(), dtype
        torch.manual_seed(0)
        x = torch.randn(2, c_in, *[6] * dims, dtype=dtype or torch.float32)
        weight = torch.randn(*((c_in, c_out) if transposed else (c_out, c_in)), *[kernel] * dims)
        self.geometry = [2 if transposed else 1] * dims, [1] * dims, [1] * dims, transposed, [0] * dims, 1
        y = FORWARD(x, weight.to(x.dtype), None, *self.geometry)
        dy = torch.randn_like(y)
        self.is_last = last if x_last else (lambda t: t)
        self.tensors = [self.is_last(x), weight, self.is_last(dy)]
        names = ("x", "weight", "dy")
        self.x, self.weight, self.dy = (
            self.known(self.graph.placeholder(n), t) for n, t in zip(names, self.tensors, strict=True)
        )
        self.read = self.cast(self.weight, dtype) if dtype else self.weight
        args = (self.x, self.read, None, *self.geometry)
        self.y = self.known(self.graph.call_function(FORWARD, args), self.is_last(y))

    @staticmethod
    def known(node, like):
        node.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return node

    def cast(self, node, dtype):
        return self.known(self.graph.call_function(CAST, (node, dtype)), node.meta["val"].to(dtype))

    def backward(self, dy=None, mask=(True, True, False)):
        """The gradients of x and of the weight as the convolution reads it."""
        args = (dy or self.dy, self.x, self.read, None, *self.geometry, list(mask))
        made = self.graph.call_function(BACKWARD, args)
        parts = [self.graph.call_function(operator.getitem, (made, i)) for i in (0, 1)]
        likes = [self.x.meta["val"], self.is_last(self.read.meta["val"])]
        return tuple(self.known(part, like) for part, like in zip(parts, likes, strict=True))

    def step(self):
        """With the gradient of the weight in its own dtype."""
        dx, dweight = self.backward()
        self.graph.output((self.y, dx, self.cast(dweight, torch.float32) if self.dtype else dweight))
        return self

    def run(self):
        self.graph.lint()
        return fx.Interpreter(fx.GraphModule({}, self.graph)).run(*self.tensors)

    def calls(self, target):
        return [node for node in self.graph.nodes if node.target is target]


def changed(joint, change=weights.lay):
    """The calls of in_format that a pass puts in; the graph gives what it gave, and its fake tensors are right."""
    before = joint.run()
    change(joint.graph)
    for ours, theirs in zip(joint.run(), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())
        assert ours.dtype is theirs.dtype
    return joint.calls(IN_FORMAT)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", HALF)
def test_a_cast_and_its_gradient(dtype, dims, transposed, meta):
    """One kernel of Inductor's wrote a half weight twice, contiguous for the backward and in channels_last for the
    forward, at a tenth of the memory's pace. The backward copied the first, and autograd copied the gradient."""
    joint = Joint(dims, 64, 96, dtype=dtype, transposed=transposed).step()
    there, back = changed(joint)
    assert (there.args, back.args[1:]) == ((joint.weight, True, dtype), (False, torch.float32))
    assert {user.target for user in there.users} == {FORWARD, BACKWARD}
    assert last(there.meta["val"]) is there.meta["val"]
    assert back.meta["val"].is_contiguous()
    assert not joint.calls(CAST)
    assert joint.run()[2].stride() == joint.tensors[1].stride()


def test_without_a_cast(meta):
    """In the joint graph the gradient alone: a copy of the weight would be kept beside it until the backward."""
    joint = Joint(dtype=None).step()
    (back,) = changed(joint)
    assert back.args[1:] == (False,)
    (there,) = set(changed(joint, weights.lay_what_is_read)) - {back}
    assert there.args == (joint.weight, True)
    assert {user.target for user in there.users} == {FORWARD, BACKWARD}


@pytest.mark.parametrize(
    "options",
    [{"kernel": 1, "c_in": 256, "c_out": 256}, {"c_in": 16, "c_out": 96}, {"c_in": 24, "c_out": 24}, {"x_last": False}],
    ids=["one position", "few channels", "small", "contiguous activations"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_what_is_left_alone(dtype, options, meta):
    """A weight that lies in both formats, one that ATen would copy, one that is nothing beside a launch, and one that
    would bring the convolution into another format."""
    joint = Joint(dtype=dtype, **options).step()
    assert not changed(joint)
    assert not changed(joint, weights.lay_what_is_read)


def test_weights_that_lie_in_channels_last_already(meta):
    joint = Joint()
    Joint.known(joint.weight, last(joint.weight.meta["val"]))
    joint.tensors[1] = last(joint.tensors[1])
    assert not changed(joint.step())


def test_others_read_the_cast(meta):
    """The sum of a half weight, say: what reads it is written for a contiguous tensor."""
    joint = Joint()
    total = joint.graph.call_function(ATEN.sum.default, (joint.read,))
    joint.graph.output((joint.y, total))
    assert not changed(joint)


def test_others_read_the_gradient(meta):
    """A weight that is used twice has a sum of gradients, with which Inductor fuses the cast."""
    joint = Joint()
    _, dweight = joint.backward()
    wide = joint.cast(dweight, torch.float32)
    joint.graph.output(
        (joint.y, joint.known(joint.graph.call_function(ATEN.add.Tensor, (wide, wide)), wide.meta["val"]))
    )
    (there,) = changed(joint)
    assert there.args[0] is joint.weight


def test_a_weight_that_code_computes(meta):
    """Its cast is part of the kernel that computes it."""
    joint = Joint(dtype=None)
    with joint.graph.inserting_before(joint.y):
        doubled = joint.known(joint.graph.call_function(ATEN.mul.Tensor, (joint.weight, 2)), joint.tensors[1])
        half = joint.cast(doubled, torch.bfloat16)
        x = joint.cast(joint.x, torch.bfloat16)
    joint.y.args = (x, half, *joint.y.args[2:])
    joint.graph.output((joint.y,))
    assert not changed(joint)
    assert not changed(joint, weights.lay_what_is_read)


def test_without_a_gradient_of_x_nobody_reads_the_weight(meta):
    joint = Joint(dtype=None)
    _, dweight = joint.backward(mask=(False, True, False))
    joint.graph.output((dweight,))
    assert [n.args[1] for n in changed(joint)] == [False]
    joint.graph.erase_node(joint.y)
    assert [n.args[1] for n in changed(joint, weights.lay_what_is_read)] == [False]


@pytest.mark.parametrize("part", [(0, 40), (8, 48)])
def test_a_part_of_a_gradient_is_made_dense(part, meta):
    """The gradient of a concatenation's part was read by ATen's convolution, which copied it by single elements."""
    joint = Joint()
    whole = last(torch.randn(2, 72, 6, 6, 6).bfloat16())
    joint.tensors[2] = whole
    Joint.known(joint.dy, whole)
    piece = joint.known(joint.graph.call_function(ATEN.slice.Tensor, (joint.dy, 1, *part)), whole[:, slice(*part)])
    joint.graph.output(joint.backward(piece))
    changed(joint)
    (dense,) = joint.calls(ATEN.clone.default)
    assert dense.args == (piece,)
    assert dense.meta["val"].is_contiguous(memory_format=torch.channels_last_3d)
    assert {user.target for user in dense.users} == {BACKWARD}


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d])
def test_dense_gradients_stay(form, meta):
    joint = Joint(x_last=form is not torch.contiguous_format).step()
    changed(joint)
    assert not joint.calls(ATEN.clone.default)


# ----------------------------------------------------------------------------------------------------------------------
# Compiled code


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(32, 32, 3)

    def forward(self, x):
        return self.conv(x)


def test_a_pass_of_the_users_stays():
    """Inductor has one place for a pass over joint graphs."""
    called, x = [], torch.randn(1, 32, 6, 6, 6)
    model = Plain()
    torch.compile(model, backend="kgopt", options={"joint_custom_post_pass": called.append})(x)
    assert called
    called.clear()
    torch._dynamo.reset()
    with torch._inductor.config.patch(joint_custom_post_pass=called.append):
        torch.compile(model, backend="kgopt")(x)
    assert called


def test_the_passes_run(monkeypatch):
    """In training over the joint graph, then over the forward and the backward."""
    seen = []
    monkeypatch.setattr(weights, "lay", lambda graph: seen.append("joint"))
    monkeypatch.setattr(weights, "lay_what_is_read", lambda graph: seen.append("lowered"))
    model, x = Plain(), torch.randn(1, 32, 6, 6, 6)
    torch.compile(model, backend="kgopt")(x).sum().backward()
    assert seen == ["joint", "lowered", "lowered"]
    seen.clear()
    with torch.no_grad():
        torch.compile(model, backend="kgopt")(x)
    assert seen == ["joint", "lowered"]
    seen.clear()
    torch._dynamo.reset()
    torch.compile(model, backend="inductor")(x).sum().backward()
    assert seen == []


class Net(nn.Module):
    """An encoder and a decoder of one step, in channels_last inside: the first and the last weights are small."""

    def __init__(self, dims=3):
        super().__init__()
        conv, up = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        self.form, wide = FORMATS[dims + 2], 128 if dims == 2 else 32
        self.first = conv(2, wide, 3, padding=1)
        self.down = conv(wide, 2 * wide, 3, stride=2, padding=1)
        self.up = up(2 * wide, wide, 2, stride=2, bias=False)
        self.join = conv(2 * wide, wide, 3, padding=1)
        self.last = conv(wide, 3, 1)

    def forward(self, x):
        x = torch.relu(self.first(x.contiguous(memory_format=self.form)))
        h = self.up(torch.relu(self.down(x)))
        return self.last(torch.relu(self.join(torch.cat((h, x), 1))))


def steps(t):
    """The strides that count: of a dim of one any will do."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


def step(model, run, x, dtype):
    """Result and gradients of a training step."""
    model.zero_grad()
    with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
        y = run(x)
    y.float().square().mean().backward()
    return y, [p.grad for p in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [*HALF, None])
@pytest.mark.parametrize("dims", [2, 3])
def test_training_steps(dims, dtype, dynamic):
    """Compiled by kgopt and by Inductor alone they give the same; autograd has no gradient to copy."""
    torch.manual_seed(0)
    model = Net(dims).cuda()
    tolerance = 3e-2 if dtype else 1e-2
    runs = [torch.compile(model, backend=backend, dynamic=dynamic) for backend in ("inductor", "kgopt")]
    for size in (16, 24) if dynamic else (16,):
        x = torch.randn(2, 2, *[size] * dims, device="cuda")
        expected, theirs = step(model, runs[0], x, dtype)
        y, ours = step(model, runs[1], x, dtype)
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
        for a, b, p in zip(ours, theirs, model.parameters(), strict=True):
            assert (a.dtype, steps(a)) == (p.dtype, steps(p))
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, None])
def test_code_of_volumes(dtype):
    """Each large weight is cast once and its gradient once; nothing of ATen's copies one of them."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.manual_seed(0)
    model, x = Net().cuda(), torch.randn(2, 2, 16, 16, 16, device="cuda")

    def loss(run):
        with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
            return run(x).float().square().mean()

    # Convolutions that become kgopt's op are no part of this: the passes alone.
    from kgopt.torch_private import compile_graph

    def backend(graph, inputs):
        return compile_graph(graph, inputs, None, {}, passes=passes())

    run = torch.compile(copy.deepcopy(model), backend=backend)
    _, (forward, backward) = run_fw_bw_and_get_code(lambda: loss(run))
    called = r"(?m)^ *buf\d+ = torch\.ops\.kgopt\.in_format"
    assert len(re.findall(called, forward)) == 3
    assert len(re.findall(called, backward)) == (3 if dtype else 6)
    large = {tuple(m.weight.shape) for m in (model.down, model.up, model.join)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        loss(run).backward()
    copied = {tuple(e.input_shapes[0]) for e in profile.events() if e.name == "aten::copy_" and e.input_shapes}
    assert not copied & large
    assert (2, 32, 16, 16, 16) not in copied  # the gradient of the concatenation's part


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, None])
def test_inference(dtype):
    torch.manual_seed(0)
    model, x = Net().cuda().eval(), torch.randn(1, 2, 16, 16, 16, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
        expected = model(x)
        y = torch.compile(model, backend="kgopt")(x)
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item())


@pytest.mark.gpu
def test_functions_with_one_weight():
    """Two convolutions that read one weight, whose gradients are added."""
    torch.manual_seed(0)
    weight = torch.randn(64, 32, 3, 3, 3, device="cuda", requires_grad=True)
    x = last(torch.randn(1, 32, 12, 12, 12, device="cuda"))

    def f(x):
        with torch.autocast("cuda", torch.bfloat16):
            return F.conv3d(x, weight, padding=1).float().mean() + F.conv3d(x, weight, stride=2).float().square().mean()

    (expected,) = torch.autograd.grad(f(x), weight)
    (ours,) = torch.autograd.grad(torch.compile(f, backend="kgopt")(x), weight)
    torch.testing.assert_close(ours, expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item())
