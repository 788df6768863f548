"""What worked before ``kgopt.optimize`` works after it: surgery, new instances, failures half way, threads."""

from __future__ import annotations

import abc
import copy
import gc
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

import kgopt
import optimize_models as models
from test_optimize import ops_of

C = models.C


def sequential():
    layers = (nn.Conv2d(C, C, 3, padding=1), nn.GroupNorm(2, C), nn.SiLU(), nn.Conv2d(C, C, 1), nn.GroupNorm(4, C))
    return nn.Sequential(*layers, nn.ReLU())


def pair(make, **options):
    """A model, optimized, and its original."""
    original = models.randomized(make())
    model = copy.deepcopy(original)
    kgopt.optimize(model, measure=False, **options)
    return model, original


def image():
    return torch.randn(2, C, 6, 5)


# ----------------------------------------------------------------------------------------------------------------------
# Surgery


def insert(m):
    m.insert(1, nn.Tanh())
    return m


def delete(m):
    del m[2]
    return m


def replace(m):
    m[1] = nn.Identity()
    return m


def multiply(m):
    m *= 2
    return m


def add_in_place(m):
    m += nn.Sequential(nn.Tanh())
    return m


def pop_and_append(m):
    m.pop(-1)
    return m.append(nn.Tanh())


SURGERY = {
    "slice": lambda m: m[:3],
    "slice_of_the_end": lambda m: m[2:],
    "class": lambda m: type(m)(*list(m)),
    "dunder_class": lambda m: m.__class__(*reversed(list(m))),
    "append": lambda m: m.append(nn.Tanh()),
    "insert": insert,
    "extend": lambda m: m.extend([nn.Tanh(), nn.GroupNorm(2, C)]),
    "pop_and_append": pop_and_append,
    "add": lambda m: m + nn.Sequential(nn.Tanh()),
    "add_in_place": add_in_place,
    "multiply": lambda m: m * 2,
    "multiply_in_place": multiply,
    "delete": delete,
    "replace": replace,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "list": lambda m: nn.Sequential(*nn.ModuleList(m)[1:]),
    "dict": lambda m: nn.Sequential(*nn.ModuleDict({f"n{i}": c for i, c in enumerate(m)}).values()),
}


@pytest.mark.parametrize("name", SURGERY)
@pytest.mark.parametrize("channels_last", [False, True])
def test_surgery_on_a_sequential(name, channels_last):
    """``m[:3](x)`` and ``type(m)(*list(m))(x)`` of an optimized Sequential raised AttributeError: the new instance was
    of the made class and had no plan of its steps."""
    model, original = pair(sequential, channels_last=channels_last)
    x = image()
    changed, expected = (SURGERY[name](m) for m in (model, original))
    torch.testing.assert_close(changed(x), expected(x), rtol=1e-4, atol=1e-4)
    assert list(changed.state_dict()) == list(expected.state_dict())
    kgopt.restore(changed)
    torch.testing.assert_close(changed(x), expected(x), rtol=1e-4, atol=1e-4)


class Sliced(nn.Module):
    """Makes instances of its Sequential's class at each call."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def forward(self, x):
        return self.steps[2:](self.steps[:2](x))


def test_compiled_code_may_slice_a_sequential():
    """The class of a slice cannot be set back in traced code, and Dynamo died of it: ``GetSetDescriptorVariable``."""
    model, original = pair(lambda: Sliced(sequential()))
    x = image()
    torch.testing.assert_close(torch.compile(original, backend="eager")(x), original(x))  # PyTorch can
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), original(x), rtol=1e-4, atol=1e-4)


class Configured(nn.Module):
    """As diffusers' models: its configuration is what it was called with, and a class method reads it."""

    def __init__(self, channels=C, *, groups=2):
        super().__init__()
        self.config = {"channels": channels, "groups": groups}
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(groups, channels)
        self.act = nn.SiLU()

    @classmethod
    def from_config(cls, config):
        import inspect

        names = set(inspect.signature(cls.__init__).parameters) - {"self"}
        assert names == {"channels", "groups"}
        return cls(**{name: config[name] for name in names})

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_new_instances_are_of_the_original_class(channels_last):
    """``type(model)()`` after ``channels_last=True`` raised: no attribute '_kgopt_layout'."""
    model, original = pair(Configured, channels_last=channels_last)
    x = image()
    for new in (type(model)(), model.__class__.from_config(model.config), type(model)(channels=C, groups=2)):
        assert type(new) is Configured
        new.load_state_dict(model.state_dict())
        assert not any(name.startswith("_kgopt") for name in new.__dict__)
        torch.testing.assert_close(new(x), original(x), rtol=1e-4, atol=1e-4)
        kgopt.optimize(new, measure=False)
        assert ops_of(new, x) == ["group_norm"]
    bare = type(model).__new__(type(model))  # as nn.DataParallel makes its replicas
    bare.__dict__.update(original.__dict__)
    torch.testing.assert_close(bare(x), original(x))
    norm = type(model.norm)(2, C)
    assert type(norm) is nn.GroupNorm
    assert norm(x).shape == x.shape


def test_a_model_that_is_set_up_again():
    """``model.__init__(...)`` of an optimized model gives new layers, which nothing that it knew is about."""
    model, _ = pair(Configured, channels_last=True)
    model.__init__()
    assert kgopt.rewrite.optimized.disguise.original_class(model) is None
    model(image())


# ----------------------------------------------------------------------------------------------------------------------
# Registries and metaclasses


class Registry(type):
    """Keeps classes by name, and wants a keyword."""

    known: dict = {}  # noqa: RUF012

    def __new__(mcs, name, bases, namespace, *, kind):
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, name, bases, namespace, *, kind):
        super().__init__(name, bases, namespace)
        Registry.known[name] = cls

    def __setattr__(cls, name, value):
        raise TypeError("classes of this kind do not change")


class Registered(Configured, metaclass=Registry, kind="block"):
    pass


class Abstract(Configured, abc.ABC):
    @abc.abstractmethod
    def name(self): ...


class Concrete(Abstract):
    def name(self):
        return "concrete"


class Slotted(Configured):
    __slots__ = ("note",)


class Refuses(Configured):
    """Nothing may be set on it once it is made; its class least of all."""

    def __setattr__(self, name, value):
        done = "act" in self.__dict__.get("_modules", {})
        if name == "__class__" or done:
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


@pytest.mark.parametrize("make", [Registered, Concrete, Slotted, Refuses])
@pytest.mark.parametrize("channels_last", [False, True])
def test_classes_that_mind_being_subclassed(make, channels_last):
    """A registry metaclass found its entry replaced by ours; one that wants a keyword, or a ``__setattr__`` that
    refuses, made optimize fail half way."""
    model, original = pair(make, channels_last=channels_last)
    assert type(model) is not make
    assert isinstance(model, make)
    x = image()
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    assert ops_of(model, x) == ["group_norm"]
    assert Registry.known == {"Registered": Registered}
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert type(type(model)()) is make
    kgopt.restore(model)
    assert type(model) is make


class Alone(type):
    """Allows no subclass at all."""

    def mro(cls):
        found = super().mro()
        if sum(isinstance(base, Alone) for base in found) > 1:
            raise TypeError("this class stands alone")
        return found


class Single(Configured, metaclass=Alone):
    pass


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_class_that_cannot_be_replaced_is_left_alone(channels_last):
    """optimize failed half way; now the report has the reason, and the norms in it run on kgopt."""
    model, original = pair(Single, channels_last=channels_last)
    assert type(model) is Single
    x = image()
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    assert ops_of(model, x) == ["group_norm"]
    report = kgopt.report(model)
    assert "this class stands alone" in report.sites[0].reason
    assert report.sites[0].became == "group_norm"
    assert ("this class stands alone" in report.layout) is channels_last
    assert model.conv.weight.is_contiguous()
    kgopt.restore(model)
    assert model.__dict__.keys() == original.__dict__.keys()


class Heard(Configured):
    """Keeps a list of its subclasses."""

    names: list = []  # noqa: RUF012

    def __init_subclass__(cls, **keywords):
        Heard.names.append((cls.__name__, keywords))


def test_subclasses_of_a_made_class_are_the_users_own():
    """``class Mine(type(model))`` was not heard of by the user's registry."""
    model, _ = pair(Heard)
    x = image()

    class Mine(type(model), kind="mine"):
        pass

    assert Heard.names == [("Mine", {"kind": "mine"})]
    mine = Mine()
    assert type(mine) is Mine
    mine.load_state_dict(model.state_dict())
    torch.testing.assert_close(mine(x), model(x), rtol=1e-4, atol=1e-4)


class Keywords(Configured):
    """Made and unmade in its own ways."""

    def __new__(cls, *args, note):
        self = super().__new__(cls)
        self.__dict__["note"] = note
        return self

    def __init__(self, note="n"):
        super().__init__()

    def __getnewargs_ex__(self):
        return (), {"note": self.note}


class Reduces(Configured):
    def __reduce__(self):
        return type(self), (C,), self.__getstate__()


@pytest.mark.parametrize(
    "make", [lambda: Keywords(note="n"), Reduces, Configured], ids=["keywords", "reduces", "plain"]
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_classes_with_ways_of_their_own(make, protocol):
    """PicklingError: the made class went into the file by its name, which means another class."""
    model, original = pair(make)
    twin = pickle.loads(pickle.dumps(model, protocol))
    assert isinstance(twin, type(original))
    x = image()
    torch.testing.assert_close(twin(x), original(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(copy.deepcopy(model)(x), original(x), rtol=1e-4, atol=1e-4)


def test_an_abc_keeps_its_own_cache():
    """A class that is made without ABCMeta fills the caches of the original: ``isinstance`` was wrong for both."""
    model, original = pair(Concrete)
    isinstance(original, type(model))  # fills a cache
    for cls in (Concrete, Abstract):
        assert isinstance(original, cls)
        assert isinstance(model, cls)


def test_made_classes_go_with_their_last_module():
    """Made classes were kept forever, and with them every class that was ever optimized; a library that walks
    ``__subclasses__()`` saw them."""

    class Local(Configured):
        pass

    model = kgopt.optimize(Local(), measure=False)
    assert len(Local.__subclasses__()) == 1
    kgopt.restore(model)
    gc.collect()
    assert Local.__subclasses__() == []


# ----------------------------------------------------------------------------------------------------------------------
# Failures half way


def state_of(model):
    """All that optimize might leave behind."""
    return [
        (
            name,
            type(m),
            m.training,
            sorted(m.__dict__),
            [sorted(v) for v in m.__dict__.values() if isinstance(v, dict)],
            {k: (id(p), p.stride(), p.grad) for k, p in m._parameters.items() if p is not None},
        )
        for name, m in model.named_modules()
    ]


class Fails(nn.Module):
    """Its forward raises after it has changed a few things."""

    def __init__(self, error):
        super().__init__()
        self.body = sequential()
        self.bn = nn.BatchNorm2d(C)
        self.error = error
        self.seen = 0
        self.fails = True

    def forward(self, x):
        self.seen += 1
        self.last = x
        x = self.bn(self.body(x)) + torch.rand(())
        self.eval()
        self.body[0].register_forward_hook(lambda *_: None)
        self.register_buffer("kept", x.detach())
        if x.requires_grad:
            x.sum().backward(retain_graph=True)
        if self.fails:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), RuntimeError("no"), SystemExit()], ids=repr)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_an_example_call_that_raises_changes_nothing(error, channels_last, again):
    """The model kept its made classes, and raised later: optimize is done as a whole or not at all."""
    model = models.randomized(Fails(error))
    if again:
        kgopt.optimize(model, measure=False, exclude="body.4", channels_last=not channels_last)
    x = image()
    before, seed = state_of(model), torch.get_rng_state()
    report = str(kgopt.report(model)) if again else ""
    buffers = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(type(error)):
        kgopt.optimize(model, x, measure=False, channels_last=channels_last)
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), seed)
    assert model.seen == 0
    for name, b in model.named_buffers():
        assert torch.equal(b, buffers[name])
    if again:
        assert str(kgopt.report(model)) == report
    model.fails = False
    model(image())
    kgopt.optimize(model, measure=False)


def test_a_failure_inside_optimize_changes_nothing(monkeypatch):
    from kgopt.rewrite import api

    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(api.layout, "convert_parameters", broken)
    model = sequential()
    before = state_of(model)
    with pytest.raises(MemoryError):
        kgopt.optimize(model, measure=False, channels_last=True)
    assert state_of(model) == before


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.LazyConv2d(C, 3)
        self.norm = nn.GroupNorm(2, C)
        self.bn = nn.LazyBatchNorm2d()

    def forward(self, x):
        return self.bn(torch.relu(self.norm(self.conv(x))))


@pytest.mark.parametrize("channels_last", [False, True, "auto"])
@pytest.mark.parametrize("example", [False, True])
def test_lazy_modules(channels_last, example):
    """An uninitialized LazyConv2d made optimize fail half way."""
    torch.manual_seed(0)
    model, original = Lazy(), Lazy()
    x = image()
    kgopt.optimize(model, x if example else None, measure=False, channels_last=channels_last)
    model(x), original(x)
    model.load_state_dict(original.state_dict())
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)
    kgopt.restore(model)
    assert type(model.conv) is nn.Conv2d
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# Threads


@pytest.mark.parametrize("measure", [False, True])
def test_optimize_and_restore_while_others_call_the_model(measure):
    """AttributeErrors: a class came before what its forward looks for, and went after it."""
    make = lambda: nn.Sequential(sequential(), Configured(), nn.InstanceNorm2d(C, affine=True))  # noqa: E731
    model = models.randomized(make())
    x = torch.randn(1, C, 3, 3)
    with torch.no_grad():
        expected = model(x)
    errors, done = [], threading.Event()

    def run():
        with torch.no_grad():
            while not done.is_set():
                try:
                    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
                except BaseException as error:
                    errors.append(error)
                    return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run) for _ in range(3)]
    try:
        for t in threads:
            t.start()
        for _ in range(200):
            kgopt.optimize(model, measure=measure)
            str(kgopt.report(model))
            kgopt.restore(model)
            if errors:
                break
    finally:
        done.set()
        for t in threads:
            t.join()
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


# ----------------------------------------------------------------------------------------------------------------------
# Code that counts on contiguous feature maps


class Views(nn.Module):
    """As MONAI's VarAutoEncoder: the feature map is flattened with ``view``. A random draw and a buffer come first."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(C, C, 3, padding=1)
        self.norm = nn.GroupNorm(2, C)
        self.bn = norm(C)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(C * 30, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x)))
        h = self.drop(self.bn(h))
        return self.head(h.view(h.size(0), -1))


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_channels_last_with_a_view_of_a_feature_map(example, training):
    """``view size is not compatible with input tensor's size and stride``: the layout is given up, with its reason, and
    neither the running statistics nor the random state have moved twice."""
    original = models.randomized(Views()).double().train(training)
    model = copy.deepcopy(original)
    x = image().double()
    kgopt.optimize(model, x if example else None, measure=False, channels_last=True)
    for _ in range(2):
        results = []
        for m in (model, original):
            torch.manual_seed(3)
            y = m(x)
            m.zero_grad()
            y.square().sum().backward()
            results.append([y, *(p.grad for p in m.parameters()), *m.buffers(), torch.rand(1)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert "channels_last fails: view size" in kgopt.report(model).layout
    assert model.conv.weight.is_contiguous()
    assert ops_of(model, x) == ["group_norm"]
    kgopt.restore(model)
    assert type(model) is Views


def test_channels_last_survives_the_users_own_mistakes():
    """An error that the model's own layout has as well is the user's, and the layout stays."""
    model, original = pair(Configured, channels_last=True)

    def hook(module, args, y):
        raise RuntimeError("no contiguous thought in this hook")

    handle = model.norm.register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="no contiguous thought"):
        model(image())
    handle.remove()
    assert "as asked for" in kgopt.report(model).layout
    assert not model.conv.weight.is_contiguous()
    x = image()
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)


def test_monai_var_auto_encoder():
    """The model of the bug itself."""
    nets = pytest.importorskip("monai.networks.nets", reason="needs monai")
    options = {"spatial_dims": 2, "in_shape": (1, 16, 16), "out_channels": 1, "latent_size": 4}
    make = lambda: nets.VarAutoEncoder(**options, channels=(4, 8), strides=(2, 2), norm=("group", {"num_groups": 2}))  # noqa: E731
    model, original = pair(make, channels_last=True)
    x = torch.randn(2, 1, 16, 16)
    for a, b in zip(*(m.eval()(x) for m in (model, original)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
