"""What a call of one of PyTorch's modules is, now: that of its class and no more, or something else."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kgopt._after_import import after_import
from kgopt.rewrite.chains.meanings import conv_of, is_identity, read_of
from kgopt.rewrite.optimized import known
from kgopt.rewrite.optimized.disguise import is_made, original_class
from kgopt.rewrite.pytorch import originals
from kgopt.rewrite.pytorch.watching import any_global_hooks, is_hooked
from kgopt.torch_private import DYNAMO

Path = tuple[str, ...]  # names of children
_MORE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE


def has_own_methods(module: Any, cls: Any) -> bool:
    """Whether the instance has a method that the forward of ``cls``, one of PyTorch's classes, looks up on it."""
    names = originals.METHODS.get(cls)
    if names is not None:
        for name in names:
            if name in module.__dict__:
                return True
    return False


def hides_parameters(module: Any) -> bool:
    """Whether an attribute of the instance stands before its weight or bias."""
    own = module.__dict__
    return "weight" in own or "bias" in own


def guard_methods(module: Any) -> None:
    """In traced code: has the compiler guard that the instance gets no method of its own. ``in`` is not guarded, a
    look-up is.
    """
    if isinstance(module, nn.Module):
        for name in ("forward", "_call_impl", *originals.METHODS.get(original_class(module) or type(module), ())):
            getattr(module, name)


def is_as_is(module: Any) -> bool:
    """Whether a call of a convolution, an activation or a dropout is that of PyTorch's class and no more."""
    original = original_class(module)
    return runs_as_is(module, type(module), original)


def does_nothing(module: Any) -> bool:
    """Whether a call of a module gives its argument back, now, and nobody sees that."""
    return isinstance(module, nn.Module) and is_identity(module) and is_as_is(module) and not any_global_hooks()


MORE = "norm and more"  # what a class gives later whose forward returns a tuple that begins with a norm's value


def gives_later(module: Any, with_more: bool = False) -> bool:
    """Whether a class of ours has a second forward, ``_kgopt_later``, that may give what is no tensor yet, and calling
    that one is all that a call of the module would do. Watching is the caller's business. ``with_more``: in a tuple.
    """
    cls = type(module)
    both = getattr(cls, "_kgopt_later_of", None)
    if both is None or not is_made(cls) or cls.__call__ is not nn.Module.__call__:
        return False
    if cls.forward is not both[0] or cls._kgopt_original.forward is not both[1]:
        return False  # it has another one, or something around it
    if (cls._kgopt_gives == MORE) is not with_more:
        return False
    return not is_hooked(module) and not any_global_hooks()


def takes_later(module: Any) -> bool:
    """Whether the forward of a class of ours may be given what is no tensor yet: a norm's value."""
    if torch.compiler.is_compiling() or not gives_later(module):
        return False
    cls = type(module)
    return cls._kgopt_later_of[1].__code__ is cls._kgopt_takes  # type: ignore[attr-defined]


def only_convolves(module: Any) -> bool:
    """Whether a call of a module with rewritten code pads, convolves, and changes nothing."""
    if not takes_later(module) or not type(module)._kgopt_only_convolves:
        return False
    return all(conv_of(m) is not None and is_as_is(m) for m in module._modules.values())


def runs_as_is(module: Any, made: Any, original: Any) -> bool:
    """:func:`is_as_is` of a module of the class ``made``, which was made from ``original``, or from none."""
    cls = made if original is None else original
    untouched = originals.AS_CALLED.get(cls)
    if untouched is None:
        return original is None and read_of(module) is not None and not is_hooked(module)
    if not untouched() or is_hooked(module) or has_own_methods(module, cls):
        return False
    return original is None or (made.forward is made._kgopt_forward and made.__call__ is cls.__call__)


def is_own_conv(conv: Any) -> bool:
    """Whether the forward of a convolution module is PyTorch's, for its class and for the instance."""
    cls = original_class(conv) or type(conv)
    untouched = originals.AS_INSIDE.get(cls)
    return untouched is not None and untouched() and not has_own_methods(conv, cls)


def child(module: Any, path: Path) -> Any:
    """The module at a path of names; None where there is none."""
    for name in path:
        module = module._modules.get(name)
        if module is None:
            return None
    return module


def runs_like_sequential(module: Any) -> bool:
    """A Sequential that does what nn.Sequential does, by itself or through :mod:`~kgopt.rewrite.source.sequential`."""
    if not isinstance(module, nn.Sequential) or "forward" in module.__dict__ or "_call_impl" in module.__dict__:
        return False
    cls: Any = original_class(module) or type(module)
    if not originals.AS_CALLED[nn.Sequential]() or cls.forward is not nn.Sequential.forward:
        return False
    if cls.__call__ is not nn.Sequential.__call__ or cls._call_impl is not nn.Sequential._call_impl:
        return False
    return getattr(cls, "__iter__", None) is nn.Sequential.__iter__


_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_SILENT = ("RESUME", "CACHE", "PRECALL", "PUSH_NULL", "NOP", "NOT_TAKEN")


def _constant_in_graphs(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Dynamo takes what the function gives as constant. It is told when it is there: importing it takes seconds."""
    after_import(DYNAMO, lambda: torch.compiler.assume_constant_result(function))
    return function


@functools.lru_cache(maxsize=1024)
def _passed_to(code: types.CodeType) -> str:
    """The child of ``return self.child(x)``, where that is all of a forward; "" for any other."""
    steps = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & _MORE or len(steps) != 5:
        return ""
    own, child, x, call, back = steps
    given = [s.opname in _LOADS and s.argval == name for s, name in zip((own, x), code.co_varnames, strict=False)]
    looks_up = child.opname in ("LOAD_ATTR", "LOAD_METHOD")
    calls = call.opname in ("CALL", "CALL_METHOD", "CALL_FUNCTION") and call.arg == 1
    return str(child.argval) if all(given) and looks_up and calls and back.opname == "RETURN_VALUE" else ""


@_constant_in_graphs
def _child_of_class(cls: Any) -> str:
    forward = cls.forward
    return _passed_to(forward.__code__) if isinstance(forward, types.FunctionType) else ""


def passed_on(module: Any) -> Any:
    """The child that does all that a module does, where its forward is ``return self.child(x)``; else the module."""
    cls = type(module)
    if cls.__call__ is not nn.Module.__call__ or "_kgopt_original" in cls.__dict__ or is_hooked(module):
        return module
    inside = module._modules.get(_child_of_class(cls))
    return module if inside is None else inside


def first_is_conv(module: Any) -> bool:
    """Whether the module only convolves its input: a convolution, or Sequentials that start with one."""
    while isinstance(module, nn.Sequential):
        if is_hooked(module) or not module._modules or not runs_like_sequential(module):
            return False
        module = next(iter(module._modules.values()))
    return isinstance(module, nn.Module) and bool(conv_of(module)) and is_as_is(module)


def only_conv(module: Any) -> Any:
    """The convolution that is all of a module, perhaps in Sequentials; None for any other, or where somebody looks."""
    while isinstance(module, nn.Sequential) and runs_like_sequential(module):
        if is_hooked(module) or len(module._modules) != 1 or known.get(module, "steps") is not None:
            return None
        module = next(iter(module._modules.values()))
    return module if conv_of(module) is not None and is_as_is(module) else None


class _InFloat(nn.Upsample):
    """As video autoencoders write it, from a time when PyTorch had no kernels for bfloat16: the values are the same."""

    def forward(self, x):  # type: ignore[no-untyped-def,override]
        return super().forward(x.float()).type_as(x)


class _PassedOn(nn.Upsample):
    def forward(self, x):  # type: ignore[no-untyped-def,override]
        return super().forward(x)


def _essence(function: Any) -> Any:
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & _MORE:
        return None
    counts = code.co_argcount, code.co_kwonlyargcount
    return code.co_code, code.co_names, code.co_consts[1:], code.co_freevars, counts


# Forwards of subclasses of nn.Upsample, as Python compiles them: another name of the argument makes no difference.
_UPSAMPLE_FORWARDS = {_essence(_InFloat.forward), _essence(_PassedOn.forward)}
_casts_as_is = originals.untouched(*originals.methods(("float", "type_as")))


def is_upsampler(module: Any) -> bool:
    """nn.Upsample, or a subclass whose forward is that of nn.Upsample, perhaps by way of float32."""
    if not isinstance(module, nn.Upsample) or not originals.AS_CALLED[nn.Upsample]():
        return False
    cls: Any = original_class(module) or type(module)
    if cls is nn.Upsample:
        return True
    return bool(_upsamples_as_is(cls)) and _casts_as_is()


PADDINGS = (nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad2d, nn.ConstantPad3d)


def is_zero_padding(module: Any) -> bool:
    """One of PyTorch's modules that put zeros around images or videos."""
    # isinstance first: made classes compare by a function of Python's.
    return isinstance(module, PADDINGS) and type(module) in PADDINGS and module.value == 0


@_constant_in_graphs
def _upsamples_as_is(cls: Any) -> bool:
    own = cls.__dict__
    if cls.__bases__ != (nn.Upsample,) or own.keys() & {"__call__", "_call_impl", "__getattr__", "__getattribute__"}:
        return False
    forward = own.get("forward")
    if forward is None:
        return True
    cells = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    return _essence(forward) in _UPSAMPLE_FORWARDS and cells == [cls] and "super" not in forward.__globals__
