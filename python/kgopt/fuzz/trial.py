"""One network through ``kgopt``, and the same network without it: what each does, call by call."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import linecache
import math
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import kgopt
from kgopt.fuzz import stage
from kgopt.fuzz.judge import Judged, same_bits, verdict
from kgopt.fuzz.writer import write_network
from kgopt.rewrite import race
from kgopt.torch_private import compile_eagerly

__all__ = ["DifferenceError", "check_network", "network_class"]

Json = dict[str, Any]

EXACT = 1e-9  # of float64 values, relative to the largest one
NOISES = 3  # runs of the original with rounding noise, where that is asked for
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_numbers = itertools.count()


class DifferenceError(Exception):
    """The optimized network does something else; the text says what."""


# ----------------------------------------------------------------------------------------------------------------------
# The model


@contextlib.contextmanager
def network_class(case: Json) -> Iterator[Any]:
    """The class ``Net`` of a case, with its source where :mod:`inspect` finds it."""
    text, number = write_network(case), next(_numbers)
    name = f"kgopt_drawn_{number}"
    file = f"<drawn network {number}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    try:
        exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
        if case["home"] == "executed" and case["copy"] != "pickle":
            del sys.modules[name]  # as of a module that was loaded from a file by hand
        yield module.__dict__["Net"]
    finally:
        sys.modules.pop(name, None)
        linecache.cache.pop(file, None)


def _correct(model: nn.Module) -> nn.Module:
    """``model`` for comparison, its instance norms given contiguous gradients.

    Of one sample and a gradient in channels_last, PyTorch's instance norm computes another gradient on the CPU.
    """
    for module in model.modules():
        if isinstance(module, (nn.InstanceNorm2d, nn.InstanceNorm3d)):
            module.register_forward_hook(_with_contiguous_gradient)
    return model


def _with_contiguous_gradient(module: Any, args: Any, y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(lambda g: g.clone(memory_format=torch.contiguous_format))


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """``model`` with parameters from a seed, all of them away from what constructors give."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.dim() > 1 and p.numel() > max(p.shape):
                noise = noise / max(1, p[0].numel()) ** 0.5
            else:
                noise = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
            p.copy_(noise)
    return model


def input_of(case: Json, call: Json, index: int, dtype: torch.dtype) -> Tensor:
    """What a call is given, on the CPU."""
    generator = torch.Generator().manual_seed(case["seed"] + index)
    batch = call["batch"] or case["batch"]
    shape = [batch, case["channels"], *(s + call["grow"] for s in case["size"])]
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if call["format"] == "channels_last":
        x = x.contiguous(memory_format=_FORMATS[x.dim()])
    elif call["format"] == "slice":
        x = torch.cat([x, x], 1)[:, : shape[1]]
    elif call["format"] == "transposed":
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x


# ----------------------------------------------------------------------------------------------------------------------
# What it does


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _named(item, f"{name}[{i}]")


class Seen:
    """What one call did: tensors by name, hooks in order, the random state, the exception."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.hooks: list[tuple[str, list[tuple[str, Tensor]]]] = []
        self.random: Tensor | None = None
        self.error: Exception | None = None


class _Hook:
    """Writes down what it is given; copies and pickles of it write to the same run."""

    def __init__(self, run: int, name: str, kind: str) -> None:
        self.run, self.name, self.kind = run, name, kind

    def __call__(self, module: Any, *values: Any) -> Any:
        if _RUNS[self.run].seen:  # not while optimize runs its example
            copies = [(k, t.detach().clone()) for k, t in _named(values, "")]
            _RUNS[self.run].seen[-1].hooks.append((f"{self.kind} of {self.name}", copies))
        return values[-1] * 1.5 if self.kind == "replace" and isinstance(values[-1], Tensor) else None


_RUNS: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()


def _add_hooks(model: nn.Module, hooks: list[Json], run: int) -> None:
    modules = list(model.named_modules())
    for hook in hooks:
        name, module = modules[min(int(hook["at"] * len(modules)), len(modules) - 1)]
        register = {
            "forward": module.register_forward_hook,
            "replace": module.register_forward_hook,
            "forward_pre": module.register_forward_pre_hook,
            "backward": module.register_full_backward_hook,
            "backward_pre": module.register_full_backward_pre_hook,
        }[hook["kind"]]
        register(_Hook(run, name, hook["kind"]))


def _noise_hooks(model: nn.Module, eps: float, seed: int) -> None:
    """Rounding noise on parameters and on what each module gives."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        return t * (1 + eps * noise.clamp(-3, 3))

    with torch.no_grad():
        for p in model.parameters():
            p.copy_(noisy(p))
    for module in model.modules():
        if not module._modules:
            module.register_forward_hook(lambda m, a, y: noisy(y) if isinstance(y, Tensor) else None)


class Run:
    """A network and the calls that are made of it, one after the other."""

    def __init__(self, case: Json, model: nn.Module, device: str, dtype: torch.dtype, entry: Any = None) -> None:
        self.case, self.model, self.device, self.dtype = case, model, device, dtype
        self.entry = model if entry is None else entry  # what is called: compiled, perhaps
        self.seen: list[Seen] = []
        self.number = next(_numbers)
        _RUNS[self.number] = self

    def hook(self, late: bool) -> None:
        """Registers the hooks that come before or after optimize."""
        _add_hooks(self.model, [h for h in self.case["hooks"] if h["late"] is late], self.number)

    def call(self, index: int, call: Json) -> Seen:
        """Makes one call and writes down what it did."""
        seen = Seen()
        self.seen.append(seen)
        self.model.train(call["train"])
        self.model.zero_grad(set_to_none=True)
        for module in self.model.modules():
            module.__dict__.pop("last", None)  # of the call before
        made = input_of(self.case, call, index, torch.float64)
        # The float64 run computes with the values that a lower precision gets.
        made = made.to(_DTYPES[self.case["dtype"]]).to(self.dtype).to(self.device)
        torch.manual_seed(self.case["seed"])
        context = contextlib.ExitStack()
        with context, torch.set_grad_enabled(call["grad"]):
            if self.case["how"] == "autocast" and self.dtype is not torch.float64:
                context.enter_context(torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16))
            if call["grad"]:
                made.requires_grad_()
            x = made * 1 if call["grad"] else made  # a leaf takes no in-place op
            try:
                if call["functional"]:
                    parameters = {k: p * 0.75 for k, p in self.model.named_parameters()}
                    result = torch.func.functional_call(self.model, parameters, (x,))
                else:
                    result = self.entry(x)
                outputs = dict(_named(result, "y"))
                if call["grad"]:
                    self._backward(outputs, index)
            except Exception as error:
                seen.error = error
                return seen
        seen.tensors |= {k: t.detach().clone() for k, t in outputs.items()}
        # In compiled code that runs in channels_last, what the model writes to its input stays in a copy.
        if not (self.case["how"] == "compiled" and self.case["channels_last"] is True):
            seen.tensors["x afterwards"] = x.detach().clone()
        if made.grad is not None:
            seen.tensors["dx"] = made.grad.detach().clone()
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                seen.tensors[f"gradient of {name}"] = p.grad.detach().clone()
        for name, b in self.model.named_buffers():
            seen.tensors[f"buffer {name}"] = b.clone()
        kept = [(n, m.__dict__["last"]) for n, m in self.model.named_modules() if "last" in m.__dict__]
        seen.tensors |= {f"{n}.last": t.detach().clone() for n, t in kept}
        seen.random = torch.get_rng_state()
        return seen

    def _backward(self, outputs: dict[str, Tensor], index: int) -> None:
        generator = torch.Generator().manual_seed(self.case["seed"] + 100 + index)
        loss: Any = 0
        for t in outputs.values():
            if t.requires_grad:
                weight = torch.randn(t.shape, generator=generator, dtype=torch.float64)
                loss = loss + (t.to(self.dtype) * weight.to(t.device, self.dtype)).sum()
        if isinstance(loss, Tensor):
            loss.backward()

    def all(self) -> list[Seen]:
        """Every call of the case."""
        return [self.call(i, call) for i, call in enumerate(self.case["calls"])]


# ----------------------------------------------------------------------------------------------------------------------
# Comparing


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def _tensor_of(index: int, name: str) -> Callable[[list[Seen]], Tensor]:
    return lambda run: run[index].tensors[name]


def _seen_by_hook(index: int, hook: int, value: int) -> Callable[[list[Seen]], Tensor]:
    return lambda run: run[index].hooks[hook][1][value][1]


class Comparison:
    """Of an optimized network's calls with the original's."""

    def __init__(self, case: Json, device: str, original: nn.Module) -> None:
        self.case, self.device, self.original = case, device, original
        self.dtype = _DTYPES[case["dtype"]]
        self.precision = "bfloat16" if case["how"] == "autocast" else case["dtype"]
        tf32 = case["tf32"] and device != "cpu" and case["dtype"] == "float32"
        self.eps = _EPS["tf32" if tf32 and self.precision == "float32" else self.precision]
        # A gradient that is zero but for rounding, a sum of a hundred terms perhaps, is held to the rounding of this
        # share of the largest one.
        self.share = 1e-3 if self.precision == "float64" else 10.0
        self._exact: list[Seen] | None = None
        self._noisy: list[list[Seen]] | None = None

    def reference(self) -> list[Seen]:
        """The original in float64."""
        if self._exact is None:
            stage.note("the original in float64")
            self._exact = self._run_double(None)
        return self._exact

    def _run_double(self, seed: int | None) -> list[Seen]:
        model = _correct(copy.deepcopy(self.original).double())
        if seed is not None:
            _noise_hooks(model, self.eps, seed)
        run = Run(self.case, model, self.device, torch.float64)
        run.hook(False)
        run.hook(True)
        return run.all()

    def noisy(self) -> list[list[Seen]]:
        """The original in float64 with the rounding noise of the precision."""
        if self._noisy is None:
            stage.note("the original with rounding noise")
            self._noisy = [self._run_double(seed) for seed in range(NOISES)]
        return self._noisy

    def compare(self, index: int, ours: Seen, theirs: Seen) -> None:
        """One call.

        Raises:
            DifferenceError: it differs.
        """
        where = f"call {index}"
        if theirs.error is not None:
            return  # what the original cannot do need not be possible
        if ours.error is not None:
            error = ours.error
            raise DifferenceError(f"{where} raises where the original runs: {_error_text(error)}") from error
        if list(ours.tensors) != list(theirs.tensors):
            other = sorted(set(ours.tensors) ^ set(theirs.tensors)) or "order"
            raise DifferenceError(f"{where} has other tensors: {other}")
        names = [name for name, _ in ours.hooks]
        if names != [name for name, _ in theirs.hooks]:
            raise DifferenceError(f"other hooks ran: {names}, the original's {[n for n, _ in theirs.hooks]} in {where}")
        if not torch.equal(ours.random, theirs.random):  # type: ignore[arg-type]
            raise DifferenceError(f"other random numbers were drawn: {where}")
        gradients = [t for k, t in theirs.tensors.items() if k == "dx" or k.startswith("gradient")]
        largest = max((float(t.abs().max()) for t in gradients if t.numel()), default=0.0)
        for name, t in theirs.tensors.items():
            # The gradients that come in are of size 1: what cancels leaves their rounding (a bias ahead of a norm).
            floor = max(self.share * largest, 0.1) if name == "dx" or name.startswith("gradient") else 0.0
            if name.startswith("buffer"):  # a mean of values of either sign
                floor = 0.1
            self._tensor(name, where, ours.tensors[name], t, floor, _tensor_of(index, name))
        for i, (hook, values) in enumerate(theirs.hooks):
            if len(values) != len(ours.hooks[i][1]):
                raise DifferenceError(f"a hook saw other values: {hook} in {where}")
            for j, (name, t) in enumerate(values):
                floor = self.share * largest
                self._tensor(f"{hook}{name}", where, ours.hooks[i][1][j][1], t, floor, _seen_by_hook(index, i, j))

    def _tensor(
        self, name: str, where: str, ours: Tensor, theirs: Tensor, floor: float, of: Callable[[list[Seen]], Tensor]
    ) -> None:
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise DifferenceError(
                f"{name} has another shape or dtype in {where}: {list(ours.shape)} {ours.dtype}, the original "
                f"{list(theirs.shape)} {theirs.dtype}"
            )
        if same_bits(ours, theirs):
            return
        if not theirs.is_floating_point():
            raise DifferenceError(f"{name} differs in {where}")
        if self.precision == "float64":
            # What is zero but for rounding, as the gradient of a bias in front of a norm, is held to `floor`.
            scale = max(float(theirs.nan_to_num(0, 0, 0).abs().max()), floor)
            apart = (ours - theirs).abs()
            if not torch.equal(ours.isnan(), theirs.isnan()):
                raise DifferenceError(f"{name} has NaN in other places in {where}")
            if float(apart.nan_to_num(0, 0, 0).max()) <= EXACT * scale:
                return
        exact = of(self.reference()).to(ours.device)
        if exact.shape != ours.shape:
            raise DifferenceError(f"{name} in {where}: the float64 network gives {list(exact.shape)}")
        samples = [of(s) for s in self.noisy()]
        # Rounding decides on which side of a kink a value lies; the noise shows how much hangs on it.
        judged = Judged(name, ours, theirs, exact, self.precision, floor * self.eps)
        wrong = verdict(judged, lambda: samples)
        if wrong is not None and not self._within_noise(ours, theirs, exact, samples, floor):
            raise DifferenceError(f"{wrong}; {where}")

    def _within_noise(self, ours: Tensor, theirs: Tensor, exact: Tensor, samples: list[Tensor], floor: float) -> bool:
        """Whole networks amplify: no further away than a few times what noise does to the original."""

        def away(t: Tensor) -> float:
            return float((t.double() - exact).nan_to_num(0, 0, 0).norm())

        if not torch.equal(ours.isnan(), theirs.isnan()):
            return False
        yardstick = max([away(theirs), *map(away, samples), floor * self.eps * exact.numel() ** 0.5])
        return away(ours) <= 4 * yardstick


# ----------------------------------------------------------------------------------------------------------------------
# The check


@contextlib.contextmanager
def _switches(case: Json) -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = case["tf32"]
    cudnn.deterministic = True  # what a network gives after restore is compared bit by bit
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic = before


def _graph_backend(graph: Any, inputs: Any) -> Any:
    """What ``backend="kgopt"`` does to a graph, with the cheapest of compilers behind it."""
    from kgopt.rewrite.backend import rewrite_graph

    rewrite_graph(graph, always=True)
    return compile_eagerly(graph, inputs)


def _copied(model: nn.Module, how: str) -> nn.Module:
    for module in model.modules():
        module.__dict__.pop("last", None)  # with a graph behind it, of which PyTorch makes no copy
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        file = io.BytesIO()
        pickle.dump(model, file)
        file.seek(0)
        return pickle.load(file)  # type: ignore[no-any-return]
    return model


def _same_state(model: nn.Module, expected: dict[str, Tensor], when: str) -> None:
    actual = model.state_dict()
    if list(actual) != list(expected):
        raise DifferenceError(f"state_dict has other keys {when}: {sorted(set(actual) ^ set(expected)) or 'order'}")
    for name, t in expected.items():
        if not same_bits(actual[name], t):
            raise DifferenceError(f"state_dict differs {when}: {name}")


def _optimized(case: Json, model: nn.Module, device: str) -> nn.Module:
    example = None
    if case["example"]:
        example = input_of(case, case["calls"][0] | {"format": "contiguous"}, 0, _DTYPES[case["dtype"]]).to(device)
    model.train(case["optimized_in"] == "train")
    state = {k: t.clone() for k, t in model.state_dict().items()}
    random = torch.get_rng_state()
    for _ in range(2 if case["twice"] else 1):
        try:
            with _autocast(case, device), _raced(case):
                same = kgopt.optimize(
                    model,
                    example,
                    measure=not case["always"],
                    channels_last=case["channels_last"],
                    recompute=case.get("recompute", False),
                )
        except Exception as error:
            if example is not None and _raises(model, example):
                raise NotAskedError from None  # what optimize runs is the model's own error
            raise DifferenceError(f"optimize raises: {_error_text(error)}") from error
        if same is not model:
            raise DifferenceError("optimize returns another model")
    _same_state(model, state, "after optimize")
    if not torch.equal(random, torch.get_rng_state()):
        raise DifferenceError("optimize draws random numbers")
    str(kgopt.report(model))
    return _copied(model, case["copy"])


class NotAskedError(Exception):
    """PyTorch alone cannot do it either."""


def _raises(model: nn.Module, example: Tensor) -> bool:
    with contextlib.suppress(Exception):
        model(example)
        return False
    return True


@contextlib.contextmanager
def _raced(case: Json) -> Iterator[None]:
    """Small networks are often slower optimized: whether that is undone is drawn, not measured."""
    before = race.SLACK
    race.SLACK = 0.0 if case.get("slower") else math.inf
    try:
        yield
    finally:
        race.SLACK = before


def _autocast(case: Json, device: str) -> Any:
    if case["how"] != "autocast":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def check_network(case: Json, device: str) -> str | None:
    """None, or what differs."""
    with _switches(case), torch.random.fork_rng(), network_class(case) as net:
        try:
            return _check(case, device, net)
        except NotAskedError:
            return None
        except DifferenceError as error:
            return str(error)
        finally:
            if case["how"] in ("backend", "compiled"):
                torch.compiler.reset()


def _check(case: Json, device: str, net: Any) -> str | None:
    stage.note("the original")
    dtype = _DTYPES[case["dtype"]]
    # Values that every precision can hold, so that the float64 network is the same network.
    original = randomized(net(), case["seed"]).to(dtype).to(device)
    theirs = Run(case, _correct(copy.deepcopy(original)), device, dtype)
    theirs.hook(False)
    theirs.hook(True)
    expected = theirs.all()
    if all(seen.error is not None for seen in expected):
        return None
    if case["how"] in ("backend", "compiled") and any(seen.error is not None for seen in expected):
        return None
    if case["how"] == "compiled" and not _compiles(case, original, device, dtype):
        return None

    model = copy.deepcopy(original)
    ours = Run(case, model, device, dtype)
    ours.hook(False)
    before = None
    probe = case["calls"][-1] | {"grad": False, "train": False, "functional": False}
    if case["how"] != "backend":
        before = Run(case | {"how": case["how"]}, model, device, dtype).call(50, probe)
        ours.seen.clear()
        stage.note("optimize")
        ours.model = ours.entry = model = _optimized(case, model, device)
    if case["how"] == "backend":
        backend: Any = "kgopt" if torch.device(device).type == "cuda" else _graph_backend
        ours.entry = torch.compile(model, backend=backend)
    elif case["how"] == "compiled":
        ours.entry = torch.compile(model, backend="inductor" if torch.device(device).type == "cuda" else "aot_eager")
    ours.hook(True)
    stage.note("the optimized network")
    comparison = Comparison(case, device, original)
    for i, call in enumerate(case["calls"]):
        seen = ours.call(i, call)
        try:
            comparison.compare(i, seen, expected[i])
        except DifferenceError:
            # Asked only then, as compiling takes long: what torch.compile alone gets wrong need not be right.
            if case["how"] in ("backend", "compiled") and not _compiles(case, original, device, dtype, expected):
                return None
            raise
    if case["how"] == "backend":
        return None
    _same_state(model, theirs.model.state_dict(), "after the calls") if not _has_statistics(model) else None
    stage.note("restore")
    try:
        kgopt.restore(model)
    except Exception as error:
        return f"restore raises: {_error_text(error)}"
    classes = [type(m) for m in model.modules()]
    if classes != [type(m) for m in original.modules()]:
        return f"restore leaves other classes: {classes}"
    for name, p in model.named_parameters():
        if p.stride() != dict(original.named_parameters())[name].stride():
            return f"restore leaves other strides: {name}"
    if before is None or before.error is not None or _has_statistics(model):
        return None
    again = Run(case, model, device, dtype).call(50, probe)
    if again.error is not None:
        return f"a restored network raises: {_error_text(again.error)}"
    if not any(h["late"] for h in case["hooks"]):
        for name, t in before.tensors.items():
            if not same_bits(t, again.tensors[name]):
                return f"a restored network gives other bits: {name}"
    return None


def _has_statistics(model: nn.Module) -> bool:
    return any(True for _ in model.buffers())


def _compiles(
    case: Json, original: nn.Module, device: str, dtype: torch.dtype, expected: list[Any] | None = None
) -> bool:
    """Whether PyTorch alone compiles the original, that runs, and gives what is expected."""
    torch.compiler.reset()
    model = copy.deepcopy(original)
    backend = "inductor" if torch.device(device).type == "cuda" else "aot_eager"
    run = Run(case, model, device, dtype, torch.compile(model, backend=backend))
    comparison = Comparison(case, device, original)
    try:
        for i, seen in enumerate(run.all()):
            if seen.error is not None:
                return False
            if expected is not None:
                comparison.compare(i, seen, expected[i])
    except DifferenceError:
        return False
    finally:
        torch.compiler.reset()
    return True
