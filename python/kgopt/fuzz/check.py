"""One call on one device, beside PyTorch's and float64's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kgopt._layout import FORMATS, empty, is_channels_last
from kgopt.fuzz.calls import Run, flags, gradient_lines, namespace, tf32_of
from kgopt.fuzz.catalogue import TARGETS
from kgopt.fuzz.judge import Judged, same_bits, verdict
from kgopt.fuzz.kind import Case
from kgopt.fuzz.noise import Noise, NoisySteps
from kgopt.fuzz.stage import note

__all__ = ["ONLY_THEIRS", "Check"]

_SMALL = 2**15  # elements; up to here the reference is computed on the CPU whatever the device
_SAMPLES = 12  # evaluations under noise, of a result that PyTorch's own error does not explain
# What PyTorch refuses for its own reasons: kgopt need not.
ONLY_THEIRS = (
    "more than 1 value per channel",
    "Expected HxW to be greater than 0",
    "is ambiguous",  # a reshape without elements, in the reference
    "not implemented for",
    "does not have a device",
    "needs to be contiguous",
    "grad_weight must be contiguous",  # of the CPU, in float64, of x with odd strides for sizes of 1
    "unable to find an engine",
    "CUDNN",
    "cuDNN",
    "oneDNN",
    "mkldnn",
)
_NOT_THIS_BACKEND = "cannot run", "kgopt has no convolution of its own"  # which the call asked for
_IN_AUTOCAST = "expected scalar type"  # of norms on the CPU with float32 parameters


def _refused(error: Exception) -> str:
    """An exception that says no; a CUDA error or missing memory is raised again."""
    text = str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "CUDA error" in text or "can't allocate" in text:
        raise error
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def _strides(t: Tensor) -> list[int]:
    return [t.stride(d) for d in range(t.dim()) if t.size(d) > 1]


def _lies_right(y: Tensor, theirs: Tensor, inputs: Sequence[Tensor]) -> bool:
    """As PyTorch's result lies, or in the memory format of the inputs."""
    if y.numel() == 0 or _strides(y) == _strides(theirs):
        return True
    if any(t.dim() != y.dim() for t in inputs):
        return True  # an image without a batch
    last = [is_channels_last(t) for t in inputs]
    if y.is_contiguous() and not (last and all(last)):
        return True
    return _dense_last(y) and (any(last) or any(_dense_last(t) for t in inputs))


def _dense_last(y: Tensor) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.dim())
    return last is not None and y.is_contiguous(memory_format=last)


class Check:
    """One case on one device."""

    def __init__(self, case: Case, device: str, names: dict[str, Any]) -> None:
        self._case, self._device, self._names = case, device, names
        self._target = TARGETS[case["op"]]
        self._leaves = [n for n in case["grad"] if n in case["tensors"]]
        self._tensors = {n: names[n] for n in case["tensors"]}
        self._dys: list[Tensor] = []
        self._samples: list[list[Tensor]] | None = None
        elements = sum(t.numel() for t in self._tensors.values())
        self._judge = torch.device("cpu") if elements <= _SMALL else torch.device(device)

    # What kgopt and PyTorch give, as one list of results and gradients.

    def _theirs(self, aligned: bool = True) -> Run:
        """``aligned=False``: of the results alone, from the tensors as they lie."""
        target, case = self._target, self._case
        names, leaves = dict(self._names), self._leaves
        if self._device != "cpu" and aligned:  # cuDNN has kernels that fail at an address that is no multiple of 16
            names.update({n: t.clone() for n, t in self._tensors.items() if not t.is_meta and t.data_ptr() % 16})
        parameters = [t for n, t in self._tensors.items() if n in target.wide]
        # Such a mixture is allowed; with another thing wrong beside it, it is that thing which counts.
        mixed = case["bad"] != "dtype" and any(t.dtype != self._tensors["x"].dtype for t in parameters)
        if mixed and target.products:  # float32 parameters beside halves, as if they were halves
            names.update({n: t.to(self._tensors["x"].dtype) for n, t in self._tensors.items()})
        elif mixed:  # a norm's: in float32, rounded at the end
            names.update({n: t.float() for n, t in self._tensors.items()})
        with flags(case, self._device, theirs=True):
            note("PyTorch, forward")
            run = Run(target.theirs(case), names, leaves, target.differentiable, theirs=True)
            if mixed:
                x = self._tensors["x"].dtype
                rounded = 0 if target.statistics else target.differentiable
                run.outputs = [o.to(x) if i < rounded else o for i, o in enumerate(run.outputs)]
            if run.has_gradients and case["bad"] is None and aligned:
                text = "\n".join(gradient_lines(case, run.outputs, self._device))
                names = {**namespace()}
                exec(text, names)
                self._dys = [names[f"dy{i}"] for i in range(min(target.differentiable, len(run.outputs)))]
                note("PyTorch, backward")
                moved = [t.clone() if t.is_cuda and t.data_ptr() % 16 else t for t in self._dys]
                run.backward(moved)
                if mixed:
                    run.grads = [
                        g if g is None else g.to(self._tensors[n].dtype) for n, g in zip(leaves, run.grads, strict=True)
                    ]
        return run

    def _ours(self, text: str, backward: bool) -> Run:
        target, case = self._target, self._case
        with flags(case, self._device):
            note("kgopt, forward")
            run = Run(text, self._names, self._leaves, target.differentiable)
            if backward:
                if not run.has_gradients:
                    raise RuntimeError("the result does not require a gradient")
                note("kgopt, backward")
                run.backward(self._dys)
        return run

    def _exact(self, noise: Noise | None = None, **instead: Tensor) -> list[Tensor | None]:
        """In float64, from the same values or some others; with noise behind each step if asked for."""
        target = self._target
        names = dict(self._names)
        for n, t in (self._tensors | instead).items():
            names[n] = t.to(self._judge).double() if t.is_floating_point() else t
        note("float64")
        mode: Any = contextlib.nullcontext() if noise is None else NoisySteps(noise, self._judge)
        with mode:
            run = Run(target.theirs(self._case), names, self._leaves, target.differentiable, theirs=True)
            if self._dys:
                run.backward([dy.to(self._judge).double() for dy in self._dys])
        return run.everything()

    def _noisy(self, at: int) -> list[Tensor]:
        """Result number ``at`` of evaluations under noise."""
        case = self._case
        if self._samples is None:
            low = case["autocast"] or self._lowest()
            noises = [Noise.of(low, tf32_of(case) and self._device != "cpu", s) for s in range(_SAMPLES)]
            self._samples = [[t for t in self._exact(noise)] for noise in noises]  # type: ignore[misc]
        return [s[at] for s in self._samples]

    def _lowest(self) -> str:
        dtypes = {str(t.dtype).removeprefix("torch.") for t in self._tensors.values()}
        return next((d for d in ("bfloat16", "float16", "float32") if d in dtypes), "float64")

    def run(self) -> str | None:
        """None where the call is right, else what is wrong."""
        case, target = self._case, self._target
        text = target.ours(case)
        before = {n: t.clone() for n, t in self._tensors.items() if not t.is_meta}
        theirs, refused = None, ""
        try:
            theirs = self._theirs()
        except Exception as error:
            refused = _refused(error)
        if theirs is not None:
            _poison(theirs)
        try:
            ours = self._ours(text, bool(self._dys))
        except Exception as error:
            said = _refused(error)
            forced = case["args"].get("backend", "auto") != "auto"
            forced &= any(text in said for text in _NOT_THIS_BACKEND)
            if theirs is None or case["bad"] is not None or forced:
                return None
            return f"refused: kgopt raises {said}"
        if theirs is None:
            if any(text in refused for text in ONLY_THEIRS) or (case["autocast"] and _IN_AUTOCAST in refused):
                return None
            return f"accepted: PyTorch raises {refused}"
        if any(t.is_meta for t in self._tensors.values()):
            return None  # PyTorch takes it, and nothing can be compared
        wrong = self._shapes(ours, theirs) or self._again(ours, theirs, text)
        if wrong is None:
            try:
                wrong = self._values(ours, theirs)
            except RuntimeError as error:  # the reference again, in float64 or under noise
                if not any(text in _refused(error) for text in ONLY_THEIRS):
                    raise
        for n, t in before.items():
            if wrong is None and not same_bits(t, self._tensors[n]):
                wrong = f"changed input: {n}"
        return wrong

    def _shapes(self, ours: Run, theirs: Run) -> str | None:
        if len(ours.outputs) < len(theirs.outputs):
            return f"wrong results: {len(ours.outputs)} of them, expected {len(theirs.outputs)}"
        inputs = [t for n, t in self._tensors.items() if n in ("x", "weight", "residual", "dy") and t.dim() in (4, 5)]
        for i, (a, b) in enumerate(zip(ours.everything(), theirs.everything(), strict=False)):
            what = self._what(i, theirs)
            if b is None:
                continue
            if a is None:
                return f"no gradient: {what} is None"
            if a.shape != b.shape:
                return f"wrong shape: {what} has {list(a.shape)}, PyTorch's {list(b.shape)}"
            if a.dtype != b.dtype:
                return f"wrong dtype: {what} has {a.dtype}, PyTorch's {b.dtype}"
            if a.device != b.device:
                return f"wrong device: {what} is on {a.device}, PyTorch's on {b.device}"
            if i == 0 and self._target.grads and not _lies_right(a, b, inputs):
                return f"wrong strides: {what} {list(a.shape)} has {list(a.stride())}, PyTorch's {list(b.stride())}"
        return None

    def _what(self, at: int, theirs: Run) -> str:
        outputs = len(theirs.outputs)
        if at >= outputs:
            return f"gradient of {self._leaves[at - outputs]}"
        return "the result" if outputs == 1 else f"result {at}"

    def _again(self, ours: Run, theirs: Run, text: str) -> str | None:
        """The same call once more, for equal bits."""
        case = self._case
        if self._target.products and not case["deterministic"] and not case["poison"]:
            return None  # cuDNN may add up in another order
        more = self._ours(text, bool(self._dys))
        for i, (a, b) in enumerate(zip(ours.everything(), more.everything(), strict=True)):
            if a is None or b is None or same_bits(a, b):
                continue
            if not self._theirs_differs(i, theirs):
                return f"other bits: {self._what(i, ours)} differs between two calls"
        return None

    def _theirs_differs(self, at: int, theirs: Run) -> bool:
        """Whether PyTorch's own result changes from call to call, as oneDNN's gradients of halves do.

        The latter read memory that nobody wrote on some CPUs, and so do some of cuDNN's kernels of grouped volumes, so
        nothing can be said of what is theirs in ours.
        """
        if not self._target.products:
            return False
        first = theirs.everything()[at]
        for _ in range(6):
            again = self._theirs().everything()[at]
            _poison(theirs, workspaces=True)
            if first is not None and again is not None and not same_bits(first, again):
                return True
        return False

    def _values(self, ours: Run, theirs: Run) -> str | None:
        """Every result and gradient by the tolerance rule."""
        case, judge = self._case, self._judge
        wide = case["dtype"] == "float64" and len({t.dtype for t in self._tensors.values()}) == 1
        if theirs.outputs[0].numel() == 0:
            return None  # nothing to compare, and not every path of PyTorch's gives such results
        x = self._tensors["x"]
        if x.numel() == 0 and x.shape[0] > 0 and "num_groups" in case["args"]:
            return None  # statistics of groups without elements
        try:
            exact = theirs.everything() if wide and judge == torch.device(self._device) else self._exact()
        except RuntimeError as error:
            if "Output size is too small" in str(error):
                return None  # in float64 PyTorch refuses a result without elements
            raise
        low = case["autocast"] or self._lowest()
        for i, (a, b, e) in enumerate(zip(ours.everything(), theirs.everything(), exact, strict=False)):
            if a is None or b is None or e is None:
                continue
            precision = low if self._rounds(i, theirs) else str(a.dtype).removeprefix("torch.")
            # Derivatives that vanish do so in float64, too, by its own roundings.
            dy = max((float(t.abs().nan_to_num(0, 0, 0).max()) for t in self._given() if t.numel()), default=0.0)
            saved = self._target.differentiable <= i < len(theirs.outputs) and bool(self._target.grads)
            saved |= case["op"] == "group_stats" and i < len(theirs.outputs)  # of a group that is not finite
            what, floor = self._what(i, theirs), 2.0**-50 * dy
            zeros = self._zeros(i, theirs)
            judged = Judged(what, a.to(judge), b.to(judge), e.to(judge), precision, floor, saved, zeros)
            wrong = verdict(judged, functools.partial(self._noisy, i))
            if wrong is None or self._theirs_differs(i, theirs) or self._meets_zeros(i, theirs, judged):
                continue
            if not self._right_as_it_lies(i, theirs, judged):
                return wrong
        return None

    def _right_as_it_lies(self, at: int, theirs: Run, judged: Judged) -> bool:
        """Whether a result is right beside that of another kernel of cuDNN's.

        It has other ones for tensors off a multiple of 16 bytes, and in channels_last, which is what tensors of one
        channel or position are taken for beside another of that layout. Of a transposed convolution with a stride, and
        of the gradient of x of any other, some multiply by the zeros between the taps, which makes NaN of an infinity
        or NaN where it does not belong.
        """
        if self._device == "cpu" or not self._target.products:
            return False
        if at >= len(theirs.outputs):
            if len({t.dtype for t in self._tensors.values()}) > 1:
                return False  # a mixture that PyTorch refuses
            same = self._theirs_in_channels_last()
        elif any(t.data_ptr() % 16 for t in self._tensors.values() if not t.is_meta):
            same = self._theirs(aligned=False)
        else:
            return False
        found = same.everything()[at]
        if found is None:
            return False
        judged = dataclasses.replace(judged, theirs=found.detach().to(self._judge))
        return verdict(judged, functools.partial(self._noisy, at)) is None

    def _theirs_in_channels_last(self) -> Run:
        """Results and gradients; with strides of that layout also where sizes of 1 leave a choice."""

        def moved(t: Tensor) -> Tensor:
            return empty(t, t.shape, channels_last=True).copy_(t) if t.dim() in FORMATS else t

        with flags(self._case, self._device, theirs=True):
            names = {n: moved(t) for n, t in self._tensors.items()}
            run = Run(
                self._target.theirs(self._case),
                {**self._names, **names},
                self._leaves,
                self._target.differentiable,
                theirs=True,
            )
            run.backward([moved(dy) for dy in self._dys])
        return run

    def _meets_zeros(self, at: int, theirs: Run, judged: Judged) -> bool:
        """Whether it is right but for NaN where a transposed convolution's weights, some not finite, meet zeros.

        A kernel that collects what an output gets multiplies all taps, also those that lie beyond x, there by zero.
        cuDNN's do, or do not. Such a NaN stays in the output's channel, and behind a norm in that channel's group,
        whose gradients then have it, too.
        """
        transposed = "transpose" in self._case["op"] or self._case["args"].get("transposed", False)
        weight = self._tensors.get("weight")
        if not transposed or weight is None or bool(weight.isfinite().all()):
            return False
        if self._is_gradient(at, theirs) and "num_groups" not in self._case["args"]:
            return False
        groups = self._case["args"]["groups"]
        of_channels = weight.detach().double().unflatten(0, (groups, -1)).transpose(1, 2)  # [group, channel, c_in, *]
        bad = ~of_channels.flatten(2).isfinite().all(2)
        bad = bad.reshape(*bad.shape, *[1] * (weight.dim() - 1))
        spread = torch.where(bad, math.nan, of_channels)
        exact = self._exact(weight=spread.transpose(1, 2).flatten(0, 1))[at]
        if exact is None:
            return False
        has = exact.isnan().to(judged.ours.device)
        if not self._is_gradient(at, theirs) and has.dim() > 2:
            # Where x's border and output_padding leave no tap at all, the channel's taps lie beyond x.
            has = has.flatten(2).any(2).reshape(*has.shape[:2], *[1] * (has.dim() - 2)).expand_as(has)
        reached = judged.ours.isnan() & has
        ours = torch.where(reached, judged.theirs, judged.ours)
        return verdict(dataclasses.replace(judged, ours=ours), functools.partial(self._noisy, at)) is None

    def _zeros(self, at: int, theirs: Run) -> bool:
        """Whether PyTorch's NaN may be a product with a zero that nobody needs.

        That is so of upsampling's gradients at the border, and of hardswish's: the reference multiplies by its
        derivative, PyTorch's own function leaves the gradient out.
        """
        acts = "+".join(str(self._case["args"].get(name, "")) for name in ("act", "gn_act", "pre_act"))
        # Taps of a kernel that meet padding alone have no gradient, which cuDNN multiplies with zeros.
        padded = self._target.products and any(self._case["args"].get("padding", ()))
        return self._is_gradient(at, theirs) and (self._target.border or "hardswish" in acts or padded)

    def _is_gradient(self, at: int, theirs: Run) -> bool:
        return at >= len(theirs.outputs) or not self._target.grads

    def _given(self) -> list[Tensor]:
        """The gradients that the call is given."""
        return [*self._dys, *(t for n, t in self._tensors.items() if n == "dy")]

    def _rounds(self, at: int, theirs: Run) -> bool:
        """Whether a result is of the tensors' precision: statistics of halves are float32."""
        return at < self._target.differentiable or at >= len(theirs.outputs) or self._target.products


def _poison(theirs: Run, workspaces: bool = False) -> None:
    """Leaves NaN in memory of the sizes that the call is about to ask for.

    ``workspaces``: also in pieces of 512 bytes to 64 MiB, which a library may ask for.
    """
    results = [t for t in theirs.everything() if t is not None and t.is_floating_point()]
    spoiled = [torch.full_like(t, math.nan) for t in results]
    if workspaces:
        spoiled += [torch.full((2**k,), math.nan, device=results[0].device) for k in range(7, 25) if results]
    del spoiled
