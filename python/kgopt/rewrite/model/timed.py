"""A model with example inputs that may be called and timed, and to which nothing has happened afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kgopt.rewrite import cuda_graphs, glue
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure import clocks, policy, verdicts
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.transaction import snapshot
from kgopt.rewrite.waiting import padding
from kgopt.torch_private import has_backward_hooks, tree_leaves

# Of the shorter time by the clock, up to which two forms of a model are equally fast, and the GPU's work decides: of a
# call, and where the host is in the way, as in a step or between two layouts. A step that waits for this host is no
# reason to give the GPU more to do.
NEAR, EQUAL = 1.03, 1.1


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of example inputs: a tensor, a tuple of arguments, or a dict of keywords."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def site_states(root: nn.Module) -> list[policy.SiteState]:
    """Of the sites of a model."""
    states = (known.get(m, name) for m in root.modules() for name in ("site", "calls"))
    return [state for state in states if state is not None]


@contextlib.contextmanager
def original_code(root: nn.Module) -> Iterator[None]:
    """The model runs as it was before kgopt saw it, but for its layout."""
    states: list[Any] = site_states(root)
    states += map(glue.state_of, glue.modules_of(root))
    states += map(training.state_of, training.modules_of(root))
    for state in states:
        state.enabled = False
    try:
        with padding.as_it_stands():
            yield
    finally:
        for state in states:
            state.enabled = True


class TimedModel:
    """A model and its example inputs. What was asked of an equal one is known."""

    def __init__(self, root: nn.Module, example: Any) -> None:
        self.root = root
        self.front: Any = training if root.training else glue  # whose calls stand between the norms
        self.example = example
        self.seed = torch.initial_seed()
        self.device = torch.device("cpu")
        self.key = ""
        self.draws = False  # did the last call draw random numbers?
        self.asked: list[bool] = []  # of each question, whether the answer was known
        self.replays = False  # calls will be replayed as CUDA graphs: what launches take does not count
        self._steps: bool | None = None  # is a backward timed, too? None: not tried yet
        self._row = 0  # calls that are timed at once; 0: not tried yet

    @contextlib.contextmanager
    def trial(self, grad: bool) -> Iterator[None]:
        """The model may be called, and afterwards nothing has happened to it or to its inputs."""
        put_back = snapshot(self.root, self.example)
        # In inference mode nothing can be saved for a backward, whatever is enabled.
        with torch.set_grad_enabled(grad and not torch.is_inference_mode_enabled()):
            try:
                yield
            finally:
                put_back()

    def bare(self) -> Any:
        """Calls the model, within a trial."""
        args, kwargs = arguments_of(self.example)
        return self.root(*args, **kwargs)

    def call(self) -> Any:
        """Calls the model, and nothing has happened to it afterwards."""
        with self.trial(self.root.training):
            torch.manual_seed(self.seed)
            before = _random_states(self.device)
            result = self.bare()
            after = _random_states(self.device)
            self.draws = not all(map(torch.equal, before, after))
            return result

    def says(self, question: str, ask: Callable[..., bool], *more: Any) -> bool:
        """The answer about a call of the example inputs."""
        args, kwargs = arguments_of(self.example)

        def answer() -> list[float]:
            with self.trial(False):
                return [float(ask(self.root, args, kwargs, *more))]

        (said,), _ = self.settle(question, answer)
        return bool(said)

    def seconds(self, question: str, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
        """Of a call of two forms of the model, measured unless an equal model was asked the same.

        On CUDA of a few short calls in a row, as models are used: of a single one that finds the GPU idle, the launches
        of what comes first are most.
        """

        def measure() -> list[float]:
            if self.replays:
                with self.trial(False):
                    found = cuda_graphs.seconds_of_replays(first, second, self.device)
                if found is not None:
                    return list(found)
            with self.trial(self.root.training):
                row = self.row(first)

                def in_a_row(form: Callable[[], Any]) -> Callable[[], Any]:
                    def run() -> None:
                        for _ in range(row):
                            form()

                    return run

                rows = in_a_row(first)
                both = clocks.time_both(rows, rows if first is second else in_a_row(second), self.device)
                return [t / row for t in both]

        (before, after), known = self.settle(f"{question} replayed" if self.replays else question, measure)
        self.asked.append(known)
        return before, after

    def switched(self, question: str, switch: Callable[[Any], None], *states: Any) -> tuple[float, float]:
        """:meth:`seconds` of the model after ``switch`` of each of two states; by default off and on."""
        timed = self.timed

        def form(state: Any) -> Callable[[], Any]:
            def run() -> None:
                switch(state)
                timed()

            return run

        return self.seconds(question, *map(form, states or (False, True)))

    def work(self, question: str) -> float:
        """Seconds of the GPU's work in a call of the form that the model now has, launches hidden."""

        def measure() -> list[float]:
            with self.trial(self.root.training):
                return [clocks.busy(self.timed, self.device)]

        (seconds,), known = self.settle(f"work {question}", measure)
        self.asked.append(known)
        return float(seconds)

    def peak(self, question: str) -> float:
        """Bytes that a call of the form that the model now has takes at its worst, in training with its backward."""

        def measure() -> list[float]:
            with self.trial(self.root.training):
                return [float(clocks.peak_bytes(self.timed, self.device))]

        (found,), known = self.settle(f"memory {question}", measure)
        self.asked.append(known)
        return float(found)

    def are_equal(self, before: float, after: float, slack: float = EQUAL) -> bool:
        """Whether two times by the clock say little of two forms, of which the GPU's work may say more."""
        return not self.replays and max(before, after) <= slack * min(before, after)

    def row(self, form: Callable[[], Any]) -> int:
        """How many calls are timed at once. Within a trial."""
        if self.device.type != "cuda":
            return 1
        if not self._row:
            form()  # what a first call takes says nothing of the others
            self._row = 3 if clocks.seconds_once(form, self.device) < clocks.SHORT else 1
        return self._row

    def settle(self, question: str, measure: Callable[[], list[float]]) -> tuple[Any, bool]:
        """The answer for this model and these inputs, and whether it was known."""
        return verdicts.store.settle(f"{self.key}|{question}", measure)

    @property
    def timed(self) -> Callable[[], Any]:
        """What is timed: the call, in training with its backward, which takes two thirds of a step."""
        if self._steps is None:
            self._steps = self.goes_back()
        return self.step if self._steps else self.bare

    def step(self) -> None:
        """The call and its backward, within a trial; no ``.grad`` is written."""
        out = [t for t in tree_leaves(self.bare()) if isinstance(t, Tensor) and t.requires_grad]
        parameters = [p for p in self.root.parameters() if p.requires_grad]
        if out:
            torch.autograd.grad(out, parameters, [torch.ones_like(t) for t in out], allow_unused=True)

    def goes_back(self) -> bool:
        """Whether the original can be trained, and nobody watches its gradients.

        A forward that writes to what its backward needs runs without a gradient alone.
        """
        root = self.root
        parameters = [p for p in root.parameters() if p.requires_grad]
        watched = any(has_backward_hooks(p) or type(p.data) is not Tensor for p in parameters)
        watched = watched or any(m._backward_hooks or m._backward_pre_hooks for m in root.modules())
        if not root.training or not parameters or watched:
            return False
        with original_code(root), self.trial(True):
            try:
                self.step()
            except RuntimeError:
                return False
        return True


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the generators that a model there may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
