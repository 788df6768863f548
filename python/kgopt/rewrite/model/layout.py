"""channels_last(_3d) inside, the caller's formats outside.

The root gets a forward that converts what comes in and, where the caller gave contiguous tensors, what goes out; the
parameters of convolutions are stored channels_last, as the same Parameter objects. A model that takes no other strides
than its author saw (``x.view(n, -1)`` of a feature map) goes back to its own layout at the first call that fails.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kgopt._layout import FORMATS, as_channels_last, is_channels_last, is_dense_channels_last, memory_format
from kgopt.rewrite.norms.torch_norms import NORMS
from kgopt.rewrite.optimized import classes, known
from kgopt.rewrite.optimized.classes import Part
from kgopt.rewrite.optimized.transaction import LOCK, snapshot
from kgopt.rewrite.pytorch.originals import CONV_MODULES
from kgopt.rewrite.pytorch.watching import is_captured, is_watched
from kgopt.torch_private import tree_map, version_of

# The forms of a model. INSIDE: what comes in is not copied.
GIVEN, LAST, INSIDE = "given", "channels_last", "channels_last from the first convolution on"
# Bytes, from which the op converts a tensor: PyTorch is several times as slow. Below, both wait for the launch.
LARGE = 2**20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CONVS: Any = tuple(CONV_MODULES)


@dataclass
class Layout:
    """What the root of a model that runs in channels_last knows."""

    converted: list[str]  # names of the weights that were contiguous before
    # A kernel of 1 over one channel lies in both formats: PyTorch gives its result the format of its input.
    names_format: bool = False
    # A call that fails for the strides runs again in the model's own layout, for good.
    falls_back: bool = field(default=False, compare=False)
    # Does what comes in become channels_last? Else the first convolution makes of it what its weight asks for, and a
    # copy is gone when it has run: the code that calls it may keep its argument until the model is done.
    moves: bool = True
    worked: set[Any] = field(default_factory=set, compare=False)  # kinds of calls that did not fail


def is_on(root: nn.Module) -> bool:
    """Whether a model runs in channels_last inside."""
    return known.get(root, "layout") is not None


def form_of(root: nn.Module) -> str:
    """Which of the three a model has."""
    state = known.get(root, "layout")
    return GIVEN if state is None else LAST if state.moves else INSIDE


def set_layout(root: nn.Module, on: bool, falls_back: bool = False, moves: bool | None = None) -> str:
    """Turns channels_last inside on or off; the class that does the conversion comes and goes with it.

    Returns why it cannot be on; else "". ``falls_back`` and ``moves`` as in :class:`Layout`; None: what it was.
    """
    with LOCK:
        why = "" if on == is_on(root) else _turn_on(root) if on else _turn_off(root)
        if on and not why:
            state = known.get(root, "layout")
            state.moves = state.moves if moves is None else moves
            state.falls_back |= falls_back
        return why


def _turn_on(root: nn.Module) -> str:
    original, recipe = classes.recipe_of(root)
    if issubclass(original, NORMS):
        return "a norm alone gains nothing"
    converted = convert_parameters(root)
    state = Layout(converted, any(map(_fits_both, root.modules())))
    failed = classes.give(root, original, (*recipe, ("layout",)), layout=state)
    if failed:
        restore_parameters(root, converted)
        return failed
    for module in root.modules():
        known.put(module, keeps=True)
    return ""


def _fits_both(module: nn.Module) -> bool:
    weight = module._parameters.get("weight") if isinstance(module, _CONVS) else None
    return weight is not None and not is_lazy(weight) and weight.dim() in FORMATS and weight[0].numel() == 1


def _turn_off(root: nn.Module) -> str:
    original, recipe = classes.recipe_of(root)
    classes.give(root, original, tuple(part for part in recipe if part[0] != "layout"))
    restore_parameters(root, known.get(root, "layout").converted)
    known.drop(root, "layout")
    for module in root.modules():
        known.drop(module, "keeps")
    return ""


def ask_for(root: nn.Module) -> str:
    """Turns it on because the user says so; what the report says of it."""
    failed = set_layout(root, True, falls_back=True)
    return f"as it was: {failed}" if failed else "channels_last, as asked for"


def wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` on channels_last tensors, with the caller's formats outside."""

    @functools.wraps(forward)
    def channels_last_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: Layout | None = known.get(self, "layout")
        if state is None:
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling() or not state.falls_back:
            return _inside(forward, self, args, kwargs)
        kind = self.training, torch.is_grad_enabled()
        put_back = _before(self) if kind not in state.worked else None
        try:
            result = _inside(forward, self, args, kwargs)
        except RuntimeError as error:
            about_strides = re.search("stride|contiguous|view|memory.?format", str(error))
            if about_strides is None or isinstance(error, torch.OutOfMemoryError):
                raise
            if put_back is not None:
                put_back()
            return _outside(forward, self, args, kwargs, str(error).splitlines()[0])
        state.worked.add(kind)
        return result

    return channels_last_forward


def _inside(forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    state = known.get(module, "layout")
    given = _Given(state.names_format, state.moves)
    converted = tuple(map(given.convert, args)), {name: given.convert(value) for name, value in kwargs.items()}
    result = forward(module, *converted[0], **converted[1])
    given.hand_back()
    return tree_map(given.back, result)


class _Given:
    """What the caller gave, and what of it was converted; what the model writes to a copy goes back to the caller's."""

    def __init__(self, names_format: bool = False, moves: bool = True) -> None:
        self.names_format, self.moves = names_format, moves
        self.is_channels_last = False  # did the caller use it?
        self.tensors: list[tuple[Tensor, Tensor, int]] = []  # the caller's, ours, its version; _SHARED: of a view
        self.containers: list[tuple[Any, Any, Any]] = []  # the caller's, ours, what was in it

    def convert(self, value: Any) -> Any:
        """An argument in channels_last; the very same object, where nothing in it needs to be converted."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) is list or type(value) is dict:
            own = list(value.values()) if isinstance(value, dict) else value
            items = [self.convert(v) for v in own]
            if all(a is b for a, b in zip(items, own, strict=True)):
                return value
            made: Any = dict(zip(value, items, strict=True)) if isinstance(value, dict) else items
            self.containers.append((value, made, made.copy()))
            return made
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        count = len(self.tensors)
        other = tree_map(self._tensor, value)
        return value if len(self.tensors) == count else other

    def _tensor(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() not in FORMATS or not x.is_floating_point():
            return x
        self.is_channels_last = self.is_channels_last or is_dense_channels_last(x)
        y = _moved(x, True) if self.moves else x
        if y is not x:
            self.tensors.append((x, y, _version(y)))
        elif self.names_format and x.shape[1] == 1 and not is_channels_last(x):
            y = x.squeeze(1).unsqueeze(-1).movedim(-1, 1)  # the same memory, by strides that say channels_last
            self.tensors.append((x, y, _SHARED))
        return y

    def hand_back(self) -> None:
        """Writes to the caller's tensors, lists and dicts what the model wrote to ours."""
        for x, y, version in self.tensors:
            if version == _SHARED:
                continue
            if _version(y) != version or (version == _UNKNOWN and _differ(x, y)):
                x.copy_(y)
        for theirs, ours, before in self.containers:
            if type(ours) is list:
                if len(ours) != len(before) or not all(a is b for a, b in zip(ours, before, strict=True)):
                    theirs[:] = [self._own(item) for item in ours]
            elif list(ours) != list(before) or not all(ours[key] is before[key] for key in before):
                items = {key: self._own(item) for key, item in ours.items()}
                theirs.clear()
                theirs.update(items)

    def _own(self, value: Any) -> Any:
        for x, y, _ in self.tensors:
            if y is value:
                return x
        return value

    def back(self, x: Any) -> Any:
        """A result as the caller expects it."""
        if not isinstance(x, Tensor) or x.dim() not in FORMATS:
            return x
        # Where nobody counts what is written to ours, the caller's own tensor may not have it.
        own = self._own(x) if _counts(x) else x
        return own if own is not x or self.is_channels_last or not is_dense_channels_last(x) else _moved(x, False)


def _moved(x: Tensor, channels_last: bool) -> Tensor:
    """In that format; as it is where it lies so."""
    is_op = x.is_cuda and type(x) is Tensor and x.dtype in _DTYPES and x.numel() * x.element_size() >= LARGE
    if is_op and not torch.compiler.is_compiling() and not is_watched():
        lies = x.is_contiguous(memory_format=memory_format(x.dim(), channels_last))
        return x if lies else torch.ops.kgopt.in_format(x, channels_last)  # type: ignore[no-any-return]
    return as_channels_last(x) if channels_last else x.contiguous()


def _counts(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and not x.is_inference()


_UNKNOWN, _SHARED = -1, -2


def _differ(x: Tensor, y: Tensor) -> bool:
    """Whether x, which must take writing, has other values than y; False where they cannot be asked for."""
    if x.is_leaf and x.requires_grad:
        return False
    if is_captured():
        return False
    return not torch.equal(x, y)


def _version(x: Tensor) -> int:
    """How often x was written to; 0 where nobody counts, ``_UNKNOWN`` where torch does not tell."""
    if not _counts(x):
        return 0
    version = version_of(x)
    return _UNKNOWN if version is None else version


def _outside(forward: Callable[..., Any], module: Any, args: Any, kwargs: Any, why: str) -> Any:
    """The call in the model's own layout, which stays if the call succeeds: then it was channels_last that failed."""
    moves = known.get(module, "layout").moves
    set_layout(module, False)
    try:
        result = forward(module, *args, **kwargs)
    except BaseException:
        set_layout(module, True, falls_back=True, moves=moves)
        raise
    report = known.get(module, "report")
    if report is not None:
        report.layout = f"as it was: channels_last fails: {why}"
    return result


def _before(module: nn.Module) -> Callable[[], None] | None:
    """Undoes what a call does to buffers and the random state; None where the call is only recorded."""
    if is_watched() or is_captured():
        return None
    return snapshot(module)


def convert_parameters(model: nn.Module) -> list[str]:
    """Stores the weights of convolutions channels_last; the names of those that were contiguous before."""
    changed: list[str] = []
    try:
        for path, module in model.named_modules():
            weight = module._parameters.get("weight") if isinstance(module, _CONVS) else None
            if weight is None or is_lazy(weight) or type(weight.data) is not Tensor or not weight.is_contiguous():
                continue
            converted = weight.data.contiguous(memory_format=FORMATS[weight.dim()])
            if converted.is_contiguous():
                # 1x1 kernels: both at once, but the strides say channels_last.
                converted = torch.empty_like(weight.data, memory_format=FORMATS[weight.dim()]).copy_(weight.data)
            weight.data = converted
            changed.append(f"{path}.weight" if path else "weight")
    except BaseException:  # memory ran out, or the user lost patience
        restore_parameters(model, changed)
        raise
    torch.clear_autocast_cache()  # an autocast around this call keeps casts in the format from before
    return changed


def restore_parameters(model: nn.Module, names: list[str]) -> None:
    """Undoes :func:`convert_parameters`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name in parameters:
            weight = parameters[name]
            # A tensor may be contiguous in both senses; its strides are those of a new one.
            weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).copy_(weight.data)
    torch.clear_autocast_cache()


classes.add_part("layout", Part(wrap=lambda _, forward: wrapped_forward(forward), place=2))
