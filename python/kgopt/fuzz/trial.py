"""One network through ``kgopt``, and the same network without it: what each does, call by call."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import kgopt
from kgopt.fuzz import stage
from kgopt.fuzz.comparison import Comparison, DifferenceError, error_text
from kgopt.fuzz.drawn_model import input_of, network_class, randomized
from kgopt.fuzz.judge import same_bits
from kgopt.fuzz.recording import DTYPES, Run, Seen, autocast_of, in_channels_last, unchanged
from kgopt.rewrite.model import race
from kgopt.torch_private import compile_eagerly

__all__ = ["check_network"]

Json = dict[str, Any]


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
    example = given = None
    if case["example"]:
        example = input_of(case, case["calls"][0] | {"format": "contiguous"}, 0, DTYPES[case["dtype"]]).to(device)
        given = example.clone()
    model.train(case["optimized_in"] == "train")
    state = {k: t.clone() for k, t in model.state_dict().items()}
    random = torch.get_rng_state()
    for _ in range(2 if case["twice"] else 1):
        try:
            with autocast_of(case, device), _raced(case):
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
            raise DifferenceError(f"optimize raises: {error_text(error)}") from error
        if same is not model:
            raise DifferenceError("optimize returns another model")
    _same_state(model, state, "after optimize")
    if example is not None and given is not None and not same_bits(example, given):
        raise DifferenceError("optimize leaves other example inputs")
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


class _Trial:
    """A drawn network as it is, and through kgopt."""

    def __init__(self, case: Json, device: str, net: Any) -> None:
        self.case, self.device, self.dtype = case, device, DTYPES[case["dtype"]]
        # Values that every precision can hold, so that the float64 network is the same network.
        self.original = randomized(net(), case["seed"]).to(self.dtype).to(device)
        self.comparison = Comparison(case, device, self.original)
        self._others: list[list[Seen]] | None = None  # what the original may do, too
        on_gpu = torch.device(device).type == "cuda"
        self.backend: Any = "kgopt" if on_gpu else _graph_backend
        self.compiler = "inductor" if on_gpu else "aot_eager"
        self.compiled = case["how"] in ("backend", "compiled")

    def check(self) -> str | None:
        """None, or what differs.

        Raises:
            DifferenceError: what a call does differs, or optimize fails.
        """
        stage.note("the original")
        theirs = self._unchanged()
        expected = theirs.all()
        failed = [seen.error is not None for seen in expected]
        if all(failed) or (self.compiled and any(failed)):
            return None
        if self.case["how"] == "compiled" and not self._compiles(None):
            return None
        ours = Run(self.case, copy.deepcopy(self.original), self.device, self.dtype)
        ours.hook(False)
        if self.case["how"] == "backend":
            ours.entry = torch.compile(ours.model, backend=self.backend)
            self._calls_agree(ours, expected)
            return None
        before = self._probe(ours.model)
        stage.note("optimize")
        ours.model = ours.entry = _optimized(self.case, ours.model, self.device)
        if self.case["how"] == "compiled":
            ours.entry = torch.compile(ours.model, backend=self.compiler)
        if not self._calls_agree(ours, expected):
            return None
        if not _has_statistics(ours.model):
            _same_state(ours.model, theirs.model.state_dict(), "after the calls")
        return self._restored(ours.model, before)

    def _unchanged(self, correct: bool = True) -> Run:
        return unchanged(self.case, self.original, self.device, self.dtype, correct=correct)

    def _probe(self, model: nn.Module) -> Seen:
        """A call of the network before optimize, or after restore."""
        call = self.case["calls"][-1] | {"grad": False, "train": False, "functional": False}
        return Run(self.case, model, self.device, self.dtype).call(50, call)

    def _calls_agree(self, ours: Run, expected: list[Seen]) -> bool:
        """Whether they could be compared."""
        ours.hook(True)
        stage.note("the optimized network")
        for i, call in enumerate(self.case["calls"]):
            seen = ours.call(i, call)
            if expected[i].error is not None and _has_statistics(self.original):
                break  # how often they were updated by then, here and there, shows in every later call
            try:
                self.comparison.compare(i, seen, expected[i])
            except DifferenceError:
                # Asked only then, as compiling takes long: what torch.compile alone gets wrong need not be right.
                if self.compiled and not self._compiles(expected):
                    return False
                if not self._is_pytorchs(i, seen) and not self._hides_an_error():
                    raise
        return True

    def _is_pytorchs(self, index: int, seen: Seen) -> bool:
        """Whether a call did what PyTorch does in another way: a norm may have stayed PyTorch's."""
        if self._others is None:
            # Where PyTorch's gradients are known to be wrong, these.
            runs = [self._unchanged(correct=False)]
            if self.case["channels_last"] is True:
                # What was moved to channels_last and is not kgopt's runs PyTorch's kernels of that format. They sum in
                # another order: on the CPU its group norm of many equal values loses ten times as much.
                runs += [in_channels_last(run) for run in (self._unchanged(), self._unchanged(correct=False))]
            self._others = [run.all() for run in runs]
        for other in self._others:
            if other[index].error is None:  # an error would allow everything
                with contextlib.suppress(DifferenceError):
                    self.comparison.compare(index, seen, other[index])
                    return True
        return False

    def _hides_an_error(self) -> bool:
        """Whether a checkpoint lets a forward pass that writes to what its backward needs. Autograd refuses the same
        network without it, and with one that is not reentrant PyTorch's gradient is another function's.
        """
        checkpoint = torch.utils.checkpoint.checkpoint
        try:
            torch.utils.checkpoint.checkpoint = lambda function, *args, **_: function(*args)  # type: ignore[assignment]
            errors = [str(seen.error) for seen in self._unchanged().all()]
        finally:
            torch.utils.checkpoint.checkpoint = checkpoint
        return any("modified by an inplace operation" in error for error in errors)

    def _compiles(self, expected: list[Seen] | None) -> bool:
        """Whether PyTorch alone compiles the original, that runs, and gives what is expected."""
        torch.compiler.reset()
        model = copy.deepcopy(self.original)
        run = Run(self.case, model, self.device, self.dtype, torch.compile(model, backend=self.compiler))
        comparison = Comparison(self.case, self.device, self.original)
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

    def _restored(self, model: nn.Module, before: Seen) -> str | None:
        stage.note("restore")
        try:
            kgopt.restore(model)
        except Exception as error:
            return f"restore raises: {error_text(error)}"
        classes = [type(m) for m in model.modules()]
        if classes != [type(m) for m in self.original.modules()]:
            return f"restore leaves other classes: {classes}"
        strides = {name: p.stride() for name, p in self.original.named_parameters()}
        for name, p in model.named_parameters():
            if p.stride() != strides[name]:
                return f"restore leaves other strides: {name}"
        if before.error is not None or _has_statistics(model):
            return None
        again = self._probe(model)
        if again.error is not None:
            return f"a restored network raises: {error_text(again.error)}"
        if not any(h["late"] for h in self.case["hooks"]):
            for name, t in before.tensors.items():
                if not same_bits(t, again.tensors[name]):
                    return f"a restored network gives other bits: {name}"
        return None


def _has_statistics(model: nn.Module) -> bool:
    return any(True for _ in model.buffers())


def check_network(case: Json, device: str) -> str | None:
    """None, or what differs."""
    with _switches(case), torch.random.fork_rng(), network_class(case) as net:
        try:
            return _Trial(case, device, net).check()
        except NotAskedError:
            return None
        except DifferenceError as error:
            return str(error)
        finally:
            if case["how"] in ("backend", "compiled"):
                torch.compiler.reset()
