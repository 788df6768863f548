"""An optimized model in the tools around PyTorch: copies, files, AMP, DDP, FSDP2, compile, export, checkpointing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import kgopt
import optimize_models as models
from kgopt.rewrite.measure import clocks
from optimize_models import FUSED
from test_optimize import assert_same_results, ops_of, optimized, run

NAMES = ["monai", "diffusers", "functional", "private_names", "cgr", "sequential"]


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_optimized_too(name, channels_last, duplicate):
    model, original = optimized(FUSED[name], "cpu", channels_last=channels_last)
    twin = duplicate(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    x = models.input_for(model)
    assert torch.equal(twin(x), model(x))
    assert ops_of(twin, x) == ops_of(model, x) != []
    assert str(kgopt.report(twin)) == str(kgopt.report(model))
    kgopt.restore(twin)
    assert [type(m) for m in twin.modules()] == [type(m) for m in original.modules()]
    torch.testing.assert_close(twin(x), original(x))


def test_state_dict_goes_both_ways():
    model, original = optimized(FUSED["monai"], "cpu", channels_last=True)
    other = kgopt.optimize(models.MonaiResBlock(), measure=False)
    other.load_state_dict(original.state_dict(), strict=True)
    x = models.input_for(model)
    torch.testing.assert_close(other(x), model(x))
    plain = models.MonaiResBlock()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(plain(x), original(x))


def test_unpickles_in_another_process(tmp_path):
    model, _ = optimized(FUSED["monai"], "cpu")
    x = models.input_for(model)
    torch.save((model, x, model(x)), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        f"sys.path.insert(0, {str(models.__file__).rsplit('/', 1)[0]!r})\n"
        f"model, x, y = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "import kgopt\n"
        "assert torch.allclose(model(x), y)\n"
        "assert len(kgopt.report(model).fused) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_train_and_eval(device):
    model, original = optimized(FUSED["diffusers"], device)
    x = models.input_for(model, device)
    for m in (model, original):
        m.dropout.p = 0.5
    for mode in (False, True, False):
        outputs = []
        for m in (model, original):
            m.train(mode)
            torch.manual_seed(1)
            outputs.append(m(x))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name, dtype, device):
    model, original = optimized(FUSED[name], device)
    x = models.input_for(model, device)
    with torch.autocast(device, dtype):
        y, expected = model(x), original(x)
    assert y.dtype is expected.dtype
    exact = copy.deepcopy(original).double()(x.double())
    error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (y, expected))
    assert error <= 2 * allowed + 1e-3


def test_autocast_training(device):
    model, original = optimized(FUSED["crg"], device)
    x = models.input_for(model, device)
    with torch.autocast(device, torch.bfloat16):
        grads = [run(m, x)[1:] for m in (model, original)]
    for a, b in zip(*grads, strict=True):
        assert a.dtype is b.dtype
        assert (a - b).norm() <= 0.05 * b.norm() + 1e-2


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("when", ["before", "after"])
def test_ddp(when, process_group):
    model, original = optimized(FUSED["monai"], "cpu")
    if when == "after":
        kgopt.restore(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    if when == "after":
        assert kgopt.optimize(parallel, measure=False) is parallel
    x = models.input_for(model)
    assert ops_of(parallel, x) == ["group_norm", "group_norm"]
    for m in (parallel, original):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-2)
    kgopt.restore(parallel)
    assert type(model) is models.MonaiResBlock


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("norms_too", [False, True])
def test_fsdp2(when, norms_too, process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, original = optimized(FUSED["monai"], "cpu")
    if when == "after":
        kgopt.restore(model)
    mesh = init_device_mesh("cpu", (1,))
    for norm in (model.norm1, model.norm2) if norms_too else ():
        fully_shard(norm, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if when == "after":
        kgopt.optimize(model, measure=False)
    x = models.input_for(model)
    assert ops_of(model, x) == (["group_norm"] * 2 if when == "before" or not norms_too else [])
    for m in (model, original):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-2)
    # What fully_shard has subclassed keeps its class, and runs PyTorch's code.
    kgopt.restore(model)
    assert ops_of(model, x) == []
    torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("name", sorted(FUSED))
def test_compile_after(name, device):
    """One graph, whose ops are kgopt's."""
    model, original = optimized(FUSED[name], device)
    x = models.input_for(model, device)
    args = (torch.randn(2, 4, device=device),) if name.startswith("diffusers") else ()
    if name == "private_names":
        pytest.skip("its forward calls train(), which is a graph break in the original too")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_results(model, original, x, *args)
    torch.testing.assert_close(compiled(x, *args), original(x, *args), rtol=1e-4, atol=1e-4)
    assert "group_norm" in ops_in_graph(model, x, *args)


def ops_in_graph(model, *args):
    """Names of kgopt's ops in what Dynamo captures."""
    found = []

    def backend(graph, inputs):
        found.extend(str(n.target).split(".")[1] for n in graph.graph.nodes if str(n.target).startswith("kgopt."))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return [name.removesuffix("_fwd") for name in found]


@pytest.mark.parametrize("channels_last", [False, True])
def test_compile_before(channels_last, device):
    """Optimizing a model that was compiled, and has run, makes it recompile; so does restoring it."""
    original = models.randomized(models.MonaiResBlock(), device)
    model = copy.deepcopy(original)
    ran = []

    def backend(graph, inputs):
        def call(*args):
            ran[:] = [str(n.target) for n in graph.graph.nodes]
            return graph.forward(*args)

        return call

    compiled = torch.compile(model, backend=backend)
    x = models.input_for(model, device)
    compiled(x)
    assert kgopt.optimize(compiled, measure=False, channels_last=channels_last) is compiled
    torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-4)
    assert sum("kgopt" in t for t in ran) == 2
    assert compiled(x).is_contiguous()
    kgopt.restore(compiled)
    torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-4)
    assert type(model) is models.MonaiResBlock
    assert not any("kgopt" in t for t in ran)


def test_compile_sees_hooks_that_come_later():
    model, _ = optimized(FUSED["monai"], "cpu")
    compiled = torch.compile(model, backend="eager")
    x = models.input_for(model)
    before = compiled(x)
    handle = model.norm1.register_forward_hook(lambda m, args, y: y * 2)
    torch._dynamo.reset()  # PyTorch compiles without guards on hooks unless told otherwise
    after = compiled(x)
    handle.remove()
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("faster", ["kgopt", "pytorch"])
def test_compile_after_measuring_keeps_the_verdict(faster, device, monkeypatch):
    for timer in ("time_both", "busy_both"):  # with launches, and where they are hidden
        monkeypatch.setattr(clocks, timer, lambda *_: (2.0, 1.0) if faster == "kgopt" else (1.0, 2.0))
    model = kgopt.optimize(models.randomized(models.MonaiResBlock(), device).eval().requires_grad_(False))
    x = models.input_for(model, device)
    model(x)
    assert ops_in_graph(model, x) == (["group_norm", "group_norm"] if faster == "kgopt" else [])


def test_compile_dynamic(device):
    model, original = optimized(FUSED["monai"], device)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for size in (5, 6, 9):
        x = torch.randn(2, models.C, size, 6, 7, device=device)
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["monai", "functional", "sequential"])
def test_export(name, strict):
    model, original = optimized(FUSED[name], "cpu")
    x = models.input_for(model)
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
    assert any("kgopt.group_norm" in str(n.target) for n in program.graph.nodes)
    assert list(program.state_dict) == list(original.state_dict())
    for n in (2, 5):
        x = models.input_for(model, batch=n)
        torch.testing.assert_close(program.module()(x), original(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [m for ms in models.PIPELINES.values() for m in ms])
def test_pipelines_compile_and_export(make):
    model, original = optimized(make, "cpu")
    x = models.input_for(model)
    op = kgopt.report(model).sites[0].became
    assert ops_in_graph(model, x) == [op]
    program = torch.export.export(model, (x,))
    assert any(op in str(n.target) for n in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), original(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, device):
    """The first call measures inside the checkpoint; what it saves for its own backward is not the checkpoint's."""
    from torch.utils.checkpoint import checkpoint

    original = models.randomized(models.MonaiResBlock(), device)
    model = kgopt.optimize(copy.deepcopy(original))
    x = models.input_for(model, device).requires_grad_()
    for _ in range(2):
        grads = []
        for m in (model, original):
            y = checkpoint(m, x, use_reentrant=reentrant)
            m.zero_grad()
            y.square().sum().backward()
            grads.append([p.grad for p in m.parameters()])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)


def test_measuring_leaves_gradients_and_hooks_alone(device):
    model = kgopt.optimize(models.randomized(models.MonaiResBlock(), device))
    calls = []
    for p in model.parameters():
        p.register_hook(lambda g: calls.append(1))
    x = models.input_for(model, device)
    y = model(x)
    assert kgopt.report(model).sites[0].us_before is not None
    assert all(p.grad is None for p in model.parameters())
    assert calls == []
    y.sum().backward()
    assert len(calls) == len(list(model.parameters()))


def test_functional_call_vmap_and_forward_mode():
    model, original = optimized(FUSED["monai"], "cpu")
    x = models.input_for(model)
    parameters = dict(model.named_parameters())

    def loss(p, m):
        return torch.func.functional_call(m, p, (x,)).square().mean()

    for (n, a), b in zip(
        torch.func.grad(loss)(parameters, model).items(),
        torch.func.grad(loss)(parameters, original).values(),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=n)
    # In-place steps are the model's own, so vmap and jvp run where PyTorch's code can.
    model, original = optimized(FUSED["functional"], "cpu")
    tangent = torch.randn_like(x)
    a, b = (torch.func.jvp(m, (x,), (tangent,))[1] for m in (model, original))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_symbolic_trace_and_jit_trace():
    model, original = optimized(FUSED["functional"], "cpu")
    x = models.input_for(model)
    traced = torch.jit.trace(model, (x,))
    torch.testing.assert_close(traced(x), original(x))
    graph = torch.fx.symbolic_trace(original)
    assert kgopt.report(kgopt.optimize(graph, measure=False)).sites[0].became == "group_norm"
    torch.testing.assert_close(graph(x), original(x))


def test_no_reference_keeps_a_model_alive():
    model, _ = optimized(FUSED["monai"], "cpu")
    model(models.input_for(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_subclass_registry_does_not_hear_of_it():
    class Registered(models.MonaiResBlock):
        names: list = []  # noqa: RUF012

        def __init_subclass__(cls, **kwargs):
            Registered.names.append(cls.__name__)

    model = kgopt.optimize(Registered(), measure=False)
    assert type(model) is not Registered
    assert type(model).__name__ == "Registered"
    assert type(model).__qualname__ == Registered.__qualname__
    assert Registered.names == []
