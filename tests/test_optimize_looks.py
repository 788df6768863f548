"""Tools that look at a model's modules or at their code take an optimized one for the original."""

from __future__ import annotations

import copy
import inspect
import io
import subprocess
import sys
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgopt
import optimize_models as models
from kgopt.rewrite import glue
from kgopt.rewrite.gradients import training
from kgopt.rewrite.optimized import classes
from test_optimize import ops_of

C = models.C


class Block(nn.Module):
    """Each way in which a site is found: functions behind a norm, norms alone, a Sequential."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(C, C, 3, padding=1)
        self.norm = nn.GroupNorm(2, C)
        self.instance = nn.InstanceNorm2d(C, affine=True)
        self.seq = nn.Sequential(nn.Conv2d(C, C, 1), nn.GroupNorm(4, C), nn.ReLU(), nn.Conv2d(C, C, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = F.relu(h)
        h = self.instance(self.conv(h))
        return self.seq(h) + x


class Model(nn.Module):
    """Counts its calls in a dict that it has already."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.calls = {"n": 0}

    def forward(self, x):
        self.calls["n"] = 1
        return self.block(x)


@pytest.fixture(params=[False, True], ids=["contiguous", "channels_last"])
def both(request):
    original = models.randomized(Block()).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=request.param)
    assert "group_norm" in ops_of(model, image())
    return model, original


def image():
    return torch.randn(2, C, 6, 5)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_repr_source_signature_and_hints(both):
    """``repr`` said OptimizedGroupNorm, and the source of a norm's or a Sequential's forward was ours."""
    model, original = both
    assert repr(model) == repr(original)
    for a, b in zip(model.modules(), original.modules(), strict=True):
        one, other = type(a), type(b)
        assert (one.__name__, one.__qualname__, one.__module__) == (
            other.__name__,
            other.__qualname__,
            other.__module__,
        )
        assert one.__doc__ == other.__doc__
        assert inspect.getsource(one.forward) == inspect.getsource(other.forward)
        assert inspect.signature(a.forward) == inspect.signature(b.forward)
        assert inspect.signature(one) == inspect.signature(other)
        assert typing.get_type_hints(one.forward) == typing.get_type_hints(other.forward)


def test_tables_of_types(both):
    """Counters of operations, weight initialization and quantization look ``type(m)`` up in a table."""
    model, original = both
    table = {nn.GroupNorm: "norm", nn.InstanceNorm2d: "norm", nn.Conv2d: "conv"}
    for a, b in zip(model.modules(), original.modules(), strict=True):
        assert table.get(type(a)) == table.get(type(b))
        assert isinstance(a, type(b))
    kind = type(model.norm)
    assert kind == nn.GroupNorm
    assert nn.GroupNorm == kind
    assert kind != nn.InstanceNorm2d
    assert kind in (nn.BatchNorm2d, nn.GroupNorm)
    assert type(model.instance) in {nn.InstanceNorm2d}
    # What something else makes from it is another class.
    sharded = type("Sharded", (kind,), {})
    assert sharded != nn.GroupNorm


def test_symbolic_trace(both):
    """TraceError with InstanceNorm, and GroupNorm was traced as a function, where it was a leaf module."""
    model, original = both
    graphs = [torch.fx.symbolic_trace(m) for m in (model, original)]
    nodes = [[(n.op, n.target) for n in g.graph.nodes] for g in graphs]
    assert nodes[0] == nodes[1]
    x = image()
    close(graphs[0](x), original(x))


@pytest.mark.parametrize("qat", [False, True])
def test_fx_quantization(both, qat):
    """``prepare_fx`` raised; norms shall be quantized as they were."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx

    mapping = get_default_qat_qconfig_mapping("qnnpack") if qat else get_default_qconfig_mapping("qnnpack")
    x, outputs, kinds = image(), [], []
    for m in both:
        m = m.train(qat)
        prepared = (prepare_qat_fx if qat else prepare_fx)(m, mapping, (x,))
        prepared(x)
        converted = convert_fx(prepared.eval())
        kinds.append([type(k).__name__ for k in converted.modules()])
        outputs.append(converted(x))
    assert kinds[0] == kinds[1]
    step = float(outputs[1].abs().max()) / 50
    torch.testing.assert_close(*outputs, rtol=0, atol=step)


def test_eager_static_quantization(both):
    """The norm was not swapped, then a 'view' error: its type was not among those that are quantized."""
    from torch.ao.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare

    x, outputs, kinds = image(), [], []
    for m in both:
        whole = nn.Sequential(QuantStub(), m.seq, DeQuantStub())
        whole.qconfig = get_default_qconfig("qnnpack")
        prepared = prepare(whole)
        prepared(x)
        converted = convert(prepared)
        kinds.append([type(k).__name__ for k in converted.modules()])
        engine = torch.backends.quantized.engine
        outputs.append(converted(x))
        torch.backends.quantized.engine = engine
    assert kinds[0] == kinds[1]
    assert "quantized" in type(converted[1][1]).__module__
    torch.testing.assert_close(*outputs, rtol=0, atol=float(outputs[1].abs().max()) / 50)


def test_fusing_modules(both):
    """``fuse_modules`` and ``fuse_conv_bn_eval`` look types up too."""
    from torch.ao.quantization import fuse_modules
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    model, original = both
    x = image()
    tail = nn.Sequential(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.ReLU()).eval()
    wholes = [nn.Sequential(m, copy.deepcopy(tail)) for m in both]
    kgopt.optimize(wholes[0], measure=False)
    fused = [fuse_modules(m, [["1.0", "1.1", "1.2"]]) for m in wholes]
    assert [type(m).__name__ for m in fused[0].modules()] == [type(m).__name__ for m in fused[1].modules()]
    close(*(m(x) for m in fused))
    bn = nn.BatchNorm2d(C).eval()
    close(fuse_conv_bn_eval(model.conv, bn)(x), fuse_conv_bn_eval(original.conv, bn)(x))


def test_script(both):
    """``torch.jit.script``, with which MONAI's bundles export, compiled our code and failed."""
    model, original = both
    x = image()
    scripted = torch.jit.script(model)
    close(scripted(x), original(x))
    assert "kgopt::" not in str(scripted.inlined_graph)
    assert "group_norm" in ops_of(model, x)  # the model itself stays as it was
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    close(torch.jit.load(file)(x), original(x))


def test_traced_file_loads_without_kgopt(both, tmp_path):
    """``torch.jit.trace`` wrote kgopt's ops into a file that then loaded only where kgopt was imported."""
    model, original = both
    x = image()
    traced = torch.jit.trace(model, (x,))
    close(traced(x), original(x))
    traced.save(tmp_path / "traced.pt")
    torch.save((x, original(x)), tmp_path / "data.pt")
    code = (
        "import sys, torch\n"
        f"x, y = torch.load({str(tmp_path / 'data.pt')!r})\n"
        f"assert torch.allclose(torch.jit.load({str(tmp_path / 'traced.pt')!r})(x), y, atol=1e-4)\n"
        "assert 'kgopt' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx(both, dynamo, tmp_path):
    """Both exporters refused kgopt's ops."""
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    if dynamo:
        pytest.importorskip("onnxscript", reason="needs onnxscript")
    model, original = both
    x = image()
    ops = []
    for name, m in (("model", model), ("original", original)):
        path = tmp_path / f"{name}.onnx"
        torch.onnx.export(m, (x,), path, dynamo=dynamo)
        program = onnx.load(path)
        onnx.checker.check_model(program)
        ops.append([node.op_type for node in program.graph.node])
    assert ops[0] == ops[1]
    evaluator = pytest.importorskip("onnx.reference", reason="needs onnx").ReferenceEvaluator(
        onnx.load(tmp_path / "model.onnx")
    )
    (y,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    close(torch.from_numpy(y), original(x).detach())


@pytest.mark.parametrize("channels_last", [False, True])
def test_compile_a_forward_that_writes_to_a_dict(channels_last):
    """Dynamo does not look into a class's ``__dict__`` once the code has written to a dict: graph breaks, and
    ``fullgraph=True`` failed."""
    original = models.randomized(Model()).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=channels_last)
    x = image()
    for grad in (True, False):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            close(torch.compile(model, backend="eager", fullgraph=True)(x), original(x))
    assert model.calls == {"n": 1}


def test_module_tree_tools(both):
    """``apply``, hooks as torchinfo's, wrappers that keep the model in an attribute, weight and spectral norm."""
    model, original = both
    x = image()
    seen = {}
    for name, m in (("model", model), ("original", original)):
        seen[name] = []
        handles = [
            k.register_forward_hook(lambda k, args, y, name=name: seen[name].append((type(k).__name__, y.shape)))
            for k in m.modules()
        ]
        m(x)
        for h in handles:
            h.remove()
    assert seen["model"] == seen["original"]
    kinds = [[], []]
    for m, found in zip(both, kinds, strict=True):
        m.apply(lambda k, found=found: found.append(type(k).__name__))
    assert kinds[0] == kinds[1]
    for m in both:
        nn.utils.parametrizations.weight_norm(m.conv)
        nn.utils.parametrizations.spectral_norm(m.seq[0])
    original.load_state_dict(model.state_dict())
    close(model.eval()(x), original.eval()(x))


def test_replaced_forwards_of_offloading_hooks():
    """accelerate's hooks, as diffusers offloads with, keep the forward that they found and put another one there."""
    hooks = pytest.importorskip("accelerate.hooks", reason="needs accelerate")
    model, original = (models.randomized(Block()).eval() for _ in range(2))
    original.load_state_dict(model.state_dict())
    x = image()
    expected = original(x)
    kgopt.optimize(model, measure=False)
    for m in model.modules():
        hooks.add_hook_to_module(m, hooks.AlignDevicesHook(execution_device="cpu"))
    close(model(x), expected)
    kgopt.restore(model)
    close(model(x), expected)
    kgopt.optimize(model, measure=False)
    hooks.remove_hook_from_module(model, recurse=True)
    close(model(x), expected)
    kgopt.restore(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]


def test_deepcopy_in_the_middle_of_training():
    """A copy goes on where the original is: the same gradients from there."""
    model = models.randomized(Block())
    kgopt.optimize(model, measure=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = image()
    model(x).square().mean().backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.zero_grad()
        m(x).square().mean().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.gpu
def test_data_parallel():
    """Replicas are made past ``__init__``, with a copy of the instance's ``__dict__``."""
    devices = list(range(torch.cuda.device_count()))
    model = models.randomized(Block(), "cuda")
    original = copy.deepcopy(model)
    kgopt.optimize(model, measure=False)
    x = torch.randn(4 * len(devices), C, 6, 5, device="cuda")
    replicas = nn.parallel.replicate(model, [0, *devices[1:]])
    close(nn.DataParallel(model, devices)(x), original(x))
    close(replicas[0](x), original(x))


@pytest.mark.parametrize("name", ["SegResNet", "UNet", "DynUNet"])
def test_monai_exports_torchscript(name):
    """MONAI's bundles export with ``convert_to_torchscript``."""
    nets = pytest.importorskip("monai.networks.nets", reason="needs monai")
    from monai.networks.utils import convert_to_torchscript

    group = ("group", {"num_groups": 2})
    common = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    options = {
        "SegResNet": {"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
        "UNet": {"channels": (4, 8), "strides": (2,), "norm": group, "num_res_units": 1},
        "DynUNet": {"kernel_size": (3,) * 3, "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "norm_name": group},
    }
    original = models.randomized(getattr(nets, name)(**common, **options[name])).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False, channels_last=True)
    x = torch.randn(1, 1, 16, 16)
    close(convert_to_torchscript(model)(x), original(x))


class Between(nn.Module):
    """What optimize replaces on a GPU between the norms, with globals in its code."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(C, C, 2, 2)
        self.up = nn.Upsample(scale_factor=2.0, mode="nearest")
        self.norm = nn.GroupNorm(2, C)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return F.interpolate(self.norm(self.up(self.conv(x))), scale_factor=scale)


def test_scripts_of_wrapped_forwards():
    """A wrapper's code has other globals than the forward that TorchScript compiles for it."""
    original = models.randomized(Between()).eval()
    model = kgopt.optimize(copy.deepcopy(original), measure=False)
    for m in (model.conv, model.up, model):
        for part, state in (("glue", glue.GlueState()), ("training", training.TrainingState())):
            cls, recipe = classes.recipe_of(m)
            assert classes.give(m, cls, (*recipe, (part,)), **{part: state}) == ""
    x = image()
    close(torch.jit.script(model)(x), original(x))
    nodes = [[(n.op, n.target) for n in torch.fx.symbolic_trace(m).graph.nodes] for m in (model, original)]
    assert nodes[0] == nodes[1]
    close(model(x), original(x))
