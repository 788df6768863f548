"""Convolutions of captured graphs: channels_last, and kgopt's kernels, where they were measured to be faster."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from kgopt import accuracy
from kgopt.rewrite import backend
from kgopt.rewrite.captured.passes import convolutions
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure import clocks, verdicts


class Net(nn.Module):
    """Two levels of a U-Net, and what a model may do with a feature map."""

    def __init__(self, way="plain"):
        super().__init__()
        self.first, self.down = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 8, 3, stride=2, padding=1)
        self.norm, self.up = nn.GroupNorm(2, 8), nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.last = nn.Conv3d(4, 3, kernel_size=3, padding=1)
        self.way = way

    def forward(self, x):
        # Kernels of 3: on one thread the CPU's convolution of 1 always gives a contiguous tensor.
        if self.way == "view":
            return self.first(x).view(x.shape[0], -1)
        x = F.leaky_relu(self.first(x), 0.1, inplace=True)
        y = F.silu(self.norm(self.down(x)))
        y = self.up(y) + x
        if self.way == "reshape":
            return self.last(y).reshape(y.shape[0], 3, -1).softmax(2), y
        if self.way == "written":
            y.mul_(2)
        return self.last(y), y


@pytest.fixture
def faster(monkeypatch):
    """What is measured second takes a half of the time; a dict to change that."""
    how = {"ratio": 0.5}
    monkeypatch.setattr(convolutions, "may_measure", lambda device: True)
    monkeypatch.setattr(clocks, "busy_both", lambda first, second, device: (first(), second(), 1.0, how["ratio"])[2:])
    monkeypatch.setattr(verdicts, "compiled", verdicts.Store())
    monkeypatch.setattr(verdicts, "inductor_cache_dir", lambda: None)
    return how


def captured(model, x, **options):
    """The result of the rewritten graph as it stands, and what it calls."""
    calls = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=rewrite, **options)(x), calls


def agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("way", ["plain", "reshape", "written"])
def test_results_lie_as_before(faster, way):
    model, x = Net(way).eval(), torch.randn(2, 2, 4, 6, 8)
    with torch.no_grad():
        found, calls = captured(model, x)
        agree(found, model(x))
    assert "contiguous" in calls
    assert "4 convolutions of volumes in channels_last" in backend.last_report.glue


def test_a_view_of_features_keeps_the_format(faster):
    """A view of a contiguous feature map is none in channels_last: PyTorch refuses it."""
    model, x = Net("view").eval(), torch.randn(2, 2, 4, 6, 8)
    with torch.no_grad():
        found, calls = captured(model, x)
        agree([found], [model(x)])
    assert "contiguous" not in calls
    assert not backend.last_report.glue


def test_what_is_no_faster_stays(faster):
    faster["ratio"] = 0.95
    model, x = Net().eval(), torch.randn(2, 2, 4, 6, 8)
    with torch.no_grad():
        found, calls = captured(model, x)
        agree(found, model(x))
    assert "contiguous" not in calls


def gains_anyway(monkeypatch):
    """The CPU's autocast leaves `torch.convolution` in float32, and PyTorch's results contiguous."""

    def gain(both, x):
        before, after = clocks.busy_both(int, int, x.device)
        return before - after if after < training.GAIN * before else 0.0

    monkeypatch.setattr(training, "_gain", gain)


def results(run, x, of):
    """Outputs, and gradients of x and the parameters that want one."""
    outputs = run(x)
    wanted = [t for t in (x, *of.parameters()) if t.requires_grad]
    weights = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape) for y in outputs]
    loss = sum((y.double() * w).sum() for y, w in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("ratio", "last", "own"),
    [(0.5, True, True), (0.95, False, True), (0.98, False, False)],
    ids=["channels_last", "as_it_lies", "stays"],
)
def test_a_training_step(faster, monkeypatch, ratio, last, own, autocast):
    """kgopt's convolutions with their gradients, in the format of the graph where channels_last does not pay."""
    faster["ratio"] = ratio
    if autocast:
        gains_anyway(monkeypatch)
    model, x = Net(), torch.randn(2, 2, 4, 6, 8, requires_grad=True)
    calls = []

    def rewritten(x):
        found, names = captured(model, x)
        calls.extend(names)
        return found

    wide = copy.deepcopy(model).double()
    exact = results(wide, x.detach().double().requires_grad_(), wide)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = results(rewritten, x, model), results(model, x, model)
    names = [name for name in calls if "conv" in name]
    ours = [name for name in names if name.startswith("kgopt.")]
    assert ours == (["kgopt.conv3d.default"] * 2 + ["kgopt.conv_transpose3d.default", "kgopt.conv3d.default"]) * own
    assert len(names) == 4
    assert ("contiguous" in calls) is last
    assert [y.stride() for y in found[:2]] == [y.stride() for y in expected[:2]]
    for y, plain, right in zip(found, expected, exact, strict=True):
        assert y.dtype is plain.dtype
        errors = [accuracy.relative_error(t.detach(), right.detach()) for t in (y, plain)]
        assert errors[0] <= accuracy.allowed(torch.bfloat16 if autocast else torch.float32, errors[1])


class Images(nn.Module):
    """Convolutions of images and one of volumes; `read`: by what the first one's result is read."""

    def __init__(self, read=F.relu):
        super().__init__()
        self.first, self.up, self.read = nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(4, 3, 2, stride=2), read
        self.volumes = nn.Conv3d(1, 2, 1, bias=False)

    def forward(self, x):
        y = self.up(self.read(self.first(x)))
        return y, self.volumes(y[:, None])


@pytest.mark.parametrize("ratio", [0.5, 0.98])
def test_images_in_training(faster, ratio):
    """One format for all, so that Inductor need not choose."""
    faster["ratio"] = ratio
    model, x = Images(), torch.randn(2, 2, 6, 8)
    wide = copy.deepcopy(model).double()
    calls = []

    def rewritten(x):
        found, names = captured(model, x)
        calls.extend(names)
        return found

    found, expected = results(rewritten, x, model), results(model, x, model)
    assert [y.stride() for y in found[:2]] == [y.stride() for y in expected[:2]]
    for y, plain, right in zip(found, expected, results(wide, x.double(), wide), strict=True):
        errors = [accuracy.relative_error(t.detach(), right.detach()) for t in (y, plain)]
        assert errors[0] <= accuracy.allowed(torch.float32, errors[1])
    ours = ["kgopt.conv2d.default", "kgopt.conv_transpose2d.default", "kgopt.conv3d.default"]
    assert [name for name in calls if name in ours] == ours * (ratio < 0.9)
    assert calls.count("contiguous") >= 3 if ratio < 0.9 else "contiguous" not in calls


def test_images_whose_convolutions_pytorch_computes_stay(faster, monkeypatch):
    """Inductor knows a format for them; a gain in volumes moves volumes alone."""
    monkeypatch.setattr(training, "_gain", lambda both, x: 0.0)
    _, calls = captured(Images(), torch.randn(2, 2, 6, 8))
    assert backend.last_report.glue == "1 convolutions of volumes in channels_last, 0 of them by kgopt"
    assert not any("kgopt" in name for name in calls)


@pytest.mark.parametrize(("plain", "last", "best"), [(1.0, 2.0, 1.5), (2.0, 1.0, 0.99)])
def test_images_must_beat_both_formats(faster, monkeypatch, plain, last, best):
    """A gain in channels_last is none where Inductor may leave the model as it is."""
    times = convolutions._Times(plain, last, plain, best, "", "auto")
    monkeypatch.setattr(convolutions, "_measured", lambda node, grad, until: times)
    graph = fx.symbolic_trace(nn.Conv2d(2, 3, 3))
    (conv,) = (node for node in graph.graph.nodes if node.op == "call_function")
    assert convolutions.find(graph).ways == {}
    monkeypatch.setattr(convolutions, "_measured", lambda *given: convolutions._Times(1.0, 1.0, 1.0, 0.9, "", "auto"))
    assert convolutions.find(graph).ways == {conv: convolutions._Way("auto", channels_last=True)}


class Joined(nn.Module):
    """A level of a U-Net whose norms stand in front of convolutions, with gradients."""

    def __init__(self, channels=6):
        super().__init__()
        self.first, self.low = nn.Conv3d(1, channels, 3, padding=1), nn.Conv3d(channels, 8, 3, padding=1)
        self.norm, self.second = nn.GroupNorm(2, channels + 8), nn.Conv3d(channels + 8, 4, 3, padding=1)
        self.norm2, self.last = nn.GroupNorm(2, 4), nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.first(x))
        low = F.interpolate(self.low(F.max_pool3d(x, 2)), scale_factor=2.0)
        h = F.relu(self.second(self.norm(torch.cat([x, low], 1))))
        return self.last(self.norm2(h))


def formats(model, x):
    """What kgopt's norms and each convolution of the rewritten graph read: a format that is said, or none."""
    found = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph, always=True)
        for node in graph.graph.nodes:
            name = str(node.target)
            if node.op == "call_function" and ("conv" in name or "group_norm" in name):
                x = node.args[0]
                says = x.target in (convolutions.lies, torch.ops.kgopt.in_format.default)
                found.append(("conv" if "conv" in name else "norm", x.args[1] if says else None))
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=rewrite)(x), found


@pytest.mark.parametrize("grad", [True, False])
def test_sites_read_channels_last(faster, monkeypatch, grad):
    """Convolutions beside kgopt's norms were left as they came, and a norm's concatenation was written contiguous."""
    monkeypatch.setattr(training, "_gain", lambda both, x: 0.0)
    model, x = Joined(), torch.randn(1, 1, 4, 6, 8)
    with torch.set_grad_enabled(grad):
        y, found = formats(model, x)
        torch.testing.assert_close(y, model(x))
    # The first one reads a single channel, which lies in both.
    assert [says for kind, says in found if kind == "conv"] == [None, True, True, True]
    assert next(says for kind, says in found if kind == "norm") is True
    if grad:
        y.square().sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(got, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("best_plain", "stays"), [(1e-3, True), (1 - 1e-9, False)])
def test_one_that_is_worth_its_copies_stays_among_volumes(faster, monkeypatch, best_plain, stays):
    first = []

    def measured(node, grad, until):
        is_first = not first or first == [node]
        first[:] = first or [node]
        return convolutions._Times(1.0, 1.0, best_plain, 1.0, "", "") if is_first else slow

    slow = convolutions._Times(9.0, 1.0, 9.0, 1.0, "", "")
    monkeypatch.setattr(convolutions, "_measured", measured)
    model, x = nn.Sequential(nn.Conv3d(2, 30, 3), nn.Conv3d(30, 3, 3), nn.Conv3d(3, 2, 3)), torch.randn(1, 2, 8, 8, 8)
    with torch.no_grad():
        y, found = formats(model, x)
        agree([y], [model(x)])
    # The largest, which is measured first, is the second.
    assert [says for _, says in found] == [True, not stays, True]


def test_what_there_is_no_time_for_follows_the_largest(faster, monkeypatch):
    """A graph of many convolutions is not left as it came because the time is over."""
    seen = []

    def measure(node, grad, is_free):
        seen.append(node.args[1].meta["example_value"].shape[0])
        monkeypatch.setattr(convolutions, "SECONDS", -1.0)  # from now on
        return [2.0, 1.0, 2.0, 1.0, "", ""]

    class Deadline:
        def thread_time(self):
            return float(bool(seen))

    monkeypatch.setattr(convolutions, "SECONDS", 0.5)
    monkeypatch.setattr(convolutions, "time", Deadline())
    monkeypatch.setattr(convolutions, "_measure", measure)
    model, x = nn.Sequential(nn.Conv3d(2, 3, 1), nn.Conv3d(3, 40, 3), nn.Conv3d(40, 2, 1)), torch.randn(2, 2, 4, 6, 8)
    with torch.no_grad():
        agree(captured(model.eval(), x)[0], model(x))
    assert seen == [40]
    assert backend.last_report.glue == "3 convolutions of volumes in channels_last, 0 of them by kgopt"


@pytest.mark.parametrize(
    ("read", "free"), [(F.relu, True), (lambda y: F.group_norm(y, 2), False)], ids=["relu", "norm"]
)
def test_a_bias_that_the_compiler_adds_on_the_way(faster, monkeypatch, read, free):
    """Only a convolution whose result elementwise functions read is timed without its bias, and only in inference."""
    timed = []
    step = convolutions._Convolution.step

    def noted(self):
        args, kwargs = self.timed
        timed.append([*args, *kwargs.values()][2] is None)
        return step(self)

    monkeypatch.setattr(convolutions._Convolution, "step", noted)
    with torch.no_grad():
        captured(Images(read).eval(), torch.randn(2, 2, 6, 8))
    # Of the two of images in the order of their sizes; the last is read by elementwise functions in any case.
    assert sorted(timed[:4]) == sorted([free] * 2 + [False] * 2)
    assert timed[4:] == [True] * 2
    timed.clear()
    captured(Images(read), torch.randn(2, 2, 6, 8))
    assert timed[:4] == [False] * 4


@pytest.mark.parametrize("ratio", [0.5, 0.95])
def test_one_channel(faster, ratio):
    """A tensor of one channel lies in both formats; its convolution gave a contiguous one, and a step three copies."""
    faster["ratio"] = ratio
    model, x = nn.Sequential(nn.Conv3d(1, 4, 3), nn.GroupNorm(2, 4), nn.Conv3d(4, 2, 1)), torch.randn(2, 1, 4, 6, 8)
    read = []

    class Noting(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is F.group_norm:
                read.append(args[0].is_contiguous(memory_format=torch.channels_last_3d))
            return super().call_function(target, args, kwargs)

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        return Noting(graph).run

    torch._dynamo.reset()
    agree([torch.compile(model, backend=rewrite)(x)], [model(x)])
    assert read == [ratio < 0.9]


def test_measurements_end(faster, monkeypatch):
    monkeypatch.setattr(convolutions, "SECONDS", -1.0)
    _, calls = captured(Net(), torch.randn(2, 2, 4, 6, 8))
    assert not any("kgopt.conv" in name for name in calls)


class Odd(nn.Module):
    """Convolutions that are not to be replaced in training, and one that is."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Conv3d(2, 4, 3).requires_grad_(False)
        self.named = nn.Conv3d(4, 4, 3, padding="same")
        self.last = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x):
        return (self.last(self.named(self.frozen(x))),)


def test_convolutions_without_gradients_and_with_other_arguments(faster):
    model, x = Odd(), torch.randn(2, 2, 4, 6, 8)
    found, calls = captured(model, x)
    agree(found, model(x))
    assert sum("conv3d" in name for name in calls) == 3
    assert calls.count("kgopt.conv3d.default") == 2


def test_one_that_is_not_as_accurate_stays(faster, monkeypatch):
    monkeypatch.setattr(accuracy, "allowed", lambda *errors: -1.0)
    _, calls = captured(Net(), torch.randn(2, 2, 4, 6, 8))
    assert not any(name.startswith("kgopt.conv") for name in calls)


def test_a_verdict_holds_for_equal_graphs(faster):
    """As it does for kgopt.optimize: the same question, in the same store."""
    model, x = Net(), torch.randn(2, 2, 4, 6, 8)
    _, calls = captured(model, x)
    faster["ratio"] = 2.0
    assert captured(model, x)[1] == calls
    assert any("training gain" in key for key in verdicts.compiled._values)


def test_what_is_measured_passes_no_hook_for_saved_tensors(faster):
    """Those of the model's own call that follows do, and they are the same ones."""
    model, x = Net(), torch.randn(2, 2, 4, 6, 8, requires_grad=True)
    counts = []
    for _ in range(2):  # the first one compiles
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            if not counts:
                torch._dynamo.reset()
                compiled = torch.compile(model, backend=lambda graph, _: (backend.rewrite_graph(graph), graph)[1])
            compiled(x)
        counts.append(kept)
    assert counts[0] == counts[1]
    assert counts[0]


def test_what_a_step_keeps(faster, monkeypatch):
    """Each convolution's input once, in one format and dtype."""
    monkeypatch.setattr(training, "_gain", lambda both, x: 0.5)
    model = nn.Sequential(*(nn.Sequential(nn.Conv3d(c, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True),
                                          nn.LeakyReLU(inplace=True)) for c in (2, 16, 16)))  # fmt: skip
    x = torch.randn(2, 2, 6, 8, 10)
    kept = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="kgopt", options={"kgopt.always": True})
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = compiled(x)
    y.float().square().sum().backward()
    large = {t.data_ptr(): t.numel() * t.element_size() for t in kept if t.shape[:1] == x.shape[:1] and t.dim() == 5}
    positions = 2 * 6 * 8 * 10
    # bf16: x, what three convolutions give, and what two of them are given.
    assert sum(large.values()) <= 2 * positions * (2 + 3 * 16 + 2 * 16)
    assert len(backend.last_report.sites) == 3
    assert "3 of them by kgopt" in backend.last_report.glue


def test_inductor(faster):
    model, x = Net().eval(), torch.randn(2, 2, 4, 6, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="kgopt")(x)
        agree(found, model(x))


def test_sizes_that_are_not_known(faster):
    model = Net().eval()
    with torch.no_grad():
        for depth in (4, 6):
            x = torch.randn(2, 2, depth, 6, 8)
            found, calls = captured(model, x, dynamic=True)
            agree(found, model(x))
            assert "contiguous" not in calls


def test_own_kernels(faster, monkeypatch):
    """The op that is written is that of the measurement."""
    find = convolutions.find

    def found(*given):
        formats = find(*given)
        formats.ways = dict.fromkeys(formats.ways, convolutions._Way("own", channels_last=True))
        return formats

    monkeypatch.setattr(convolutions, "find", found)
    model, x = Net().eval(), torch.randn(2, 2, 4, 6, 8)
    seen = []

    def rewrite(graph, example_inputs):
        backend.rewrite_graph(graph)
        seen.extend((str(node.target), node.args[1:], node.kwargs) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="kgopt"):  # there is no such kernel on the CPU
        torch.compile(model, backend=rewrite)(x)
    names = [name for name, *_ in seen]
    assert names.count("kgopt.conv3d.default") == 3
    assert names.count("kgopt.conv_transpose3d.default") == 1
    convs = [(args, kwargs) for name, args, kwargs in seen if name == "kgopt.conv3d.default"]
    args, kwargs = convs[1]
    assert args[2:] == ([2, 2, 2], [1, 1, 1], [1, 1, 1], 1)
    assert kwargs == {"backend": "kgopt"}


class Times:
    """A kernel of kgopt's that takes half of PyTorch's time in the graph's format, where that is twice as fast as
    channels_last."""

    def __init__(self, node, channels_last, *_):
        self.channels_last = channels_last

    def step(self):
        pass

    def faster(self):
        return (1.5, "own") if self.channels_last else (0.5, "own")


@pytest.mark.parametrize("dims", [2, 3])
def test_own_kernels_in_the_format_of_the_graph(dims, faster, monkeypatch):
    """In inference, too; of images that is the compiler's to choose."""
    find, found = convolutions.find, []
    monkeypatch.setattr(convolutions, "_Convolution", Times)
    monkeypatch.setattr(clocks, "busy_both", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(convolutions, "find", lambda *given: found.append(find(*given)) or convolutions.Convolutions())
    conv, x = (nn.Conv2d, nn.Conv3d)[dims - 2](4, 4, 3, padding="same"), torch.randn(1, 4, *[6] * dims)
    model = nn.Sequential(conv, nn.GroupNorm(2, 4)).eval()
    with torch.no_grad():
        agree(captured(model, x)[0], model(x))
    ways = [way for each in found for way in each.ways.values()]
    assert ways == ([convolutions._Way("own", channels_last=False)] if dims == 3 else [])
