"""Whatever a user replaced is what runs, in an optimized model as in the plain one."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

import kgopt
from kgopt import torch_private
from kgopt.rewrite.backend import rewrite_graph
from kgopt.rewrite.pytorch import originals
from optimize_pairs import all_faster
from replaced_ways import MODELS, WAYS, make


def optimized(model, x, way):
    """A copy that kgopt optimized in one of the ways that it has for the code between norms."""
    model = kgopt.optimize(copy.deepcopy(model), measure=False, channels_last=way == "channels_last")
    if way == "glue":
        all_faster(model, x)
    return model


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.parametrize("form", ["sites", "glue", "channels_last"])
def test_what_was_replaced_runs(name, when, form):
    """A replaced ``conv._conv_forward`` was ignored, before optimize and after; so were ``nn.GroupNorm.forward``,
    ``F.group_norm``, ``nn.ReLU.forward`` replaced before, and ``Block.forward`` replaced after.
    """
    plain, x = make(name)
    with torch.no_grad():
        unchanged = plain(x)
        seen = 0
        for label, way in WAYS.items():
            both = copy.deepcopy(plain)
            with contextlib.ExitStack() as stack:
                stack.enter_context(way(both))
                expected = both(x)
            if torch.equal(expected, unchanged):
                continue  # this model does not run that
            seen += 1
            ours = None if when == "before" else optimized(plain, x, form)
            if when == "after a call":
                ours(x)
            with contextlib.ExitStack() as stack:
                if ours is None:
                    ours = copy.deepcopy(plain)
                    stack.enter_context(way(ours))
                    ours = kgopt.optimize(ours, measure=False, channels_last=form == "channels_last")
                    if form == "glue" and label != "function mode":
                        all_faster(ours, x)
                else:
                    stack.enter_context(way(ours))
                for _ in range(2):
                    try:
                        close(ours(x), expected)
                    except Exception as error:
                        raise AssertionError(f"{label}: {error}") from error
            try:
                close(ours(x), unchanged)
            except Exception as error:
                raise AssertionError(f"{label}, put back: {error}") from error
    assert seen > 4


COMPILED = {
    "block": (
        "GroupNorm.forward",
        "Block.forward",
        "Mixin.helper",
        "conv._conv_forward",
        "F of globals",
        "wrapped act",
    ),
    "sequential": ("ReLU.forward", "Sequential.forward", "norm.forward", "torch.group_norm", "function mode"),
    "lse": ("Conv2d._conv_forward", "Lse.forward", "norm's class"),
}


@pytest.mark.parametrize(("name", "label"), [(name, label) for name, labels in COMPILED.items() for label in labels])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_code_runs_it_too(name, label, when):
    """``after``: the model was compiled, and called, before it is replaced. What plain torch.compile does not notice
    then (it guards no class of PyTorch's) may stay unnoticed. When it is taken back, torch 2.11 itself goes on with the
    code of another class of a norm; the optimized model does not.
    """
    plain, x = make(name)
    plain.requires_grad_(False)
    unchanged, results = plain(x), []
    for model in (copy.deepcopy(plain), optimized(plain, x, "sites")):
        torch._dynamo.reset()
        fast = torch.compile(model, backend="eager")
        if when == "after":
            fast(x)
        with WAYS[label](model):
            results.append(fast(x))
    close(fast(x), unchanged)
    both = copy.deepcopy(plain)
    with WAYS[label](both):
        expected = both(x)
    assert not torch.equal(expected, unchanged)
    # With a function mode torch.compile itself gives other values than eager code.
    close(results[1], expected if when == "after" and torch.equal(results[0], unchanged) else results[0])


def rewriting(ours):
    """A backend that runs the graph, which kgopt has rewritten if ``ours``; without Inductor's caches."""

    def backend(graph, inputs):
        if ours:
            rewrite_graph(graph, always=True)
        return aot_eager(graph, inputs)

    return backend


@pytest.mark.parametrize("name", ["block", "sequential", "mean"])
def test_the_graph_front_end_replaces_pytorchs_own_alone(name):
    """It took ``F.group_norm`` by the name that it has when the graph is read, whoever stood there."""
    plain, x = make(name)
    plain.requires_grad_(False)
    unchanged, seen = plain(x), 0
    for label in ("torch.nn.functional.group_norm", "torch.group_norm", "torch.relu", "Tensor.mean"):
        with WAYS[label](plain):
            results = [plain(x)]
            for ours in (False, True):
                torch._dynamo.reset()
                results.append(torch.compile(plain, backend=rewriting(ours))(x))
        eager, compiled, actual = results
        seen += not torch.equal(eager, unchanged)
        # Dynamo knows functions by their names: it may call what it finds there twice.
        close(actual, compiled if torch.allclose(actual, compiled) else eager)
    assert seen


def test_setting_an_attribute_of_the_class_sets_it_for_all():
    """``type(model).forward = other`` set it on the class that kgopt made, of one part of the objects."""
    plain, x = make("block")
    ours, other = optimized(plain, x, "sites"), make("block")[0]
    expected = plain(x)
    before = type(ours).forward
    type(ours).forward = lambda self, x: before(self, x) + 1
    type(ours).count = 1
    try:
        close(ours(x), expected + 1)
        close(plain(x), expected + 1)
        close(other(x), expected + 1)
        first = type(ours).forward
        type(ours).forward = lambda self, x: first(self, x) * 2
        close(ours(x), (expected + 1) * 2)
        assert type(plain).count == 1
    finally:
        type(ours).forward = before
        del type(ours).count
    close(ours(x), expected)
    close(plain(x), expected)
    assert type(ours).forward is before
    assert type(plain).forward.__code__.co_freevars == ()
    assert not hasattr(type(plain), "count")


# Asks whether an argument wants to be asked; modes and subclasses are looked for by kgopt itself.
PLUMBING = ("has_torch_function_unary", "has_torch_function_variadic", "handle_torch_function")


def looked_up(function, cls=None):
    """The places where the code of a function finds functions: on self, in F, in torch and torch._C._nn."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            owners = {"F": F, "torch": torch}
            if vars(torch_private.nn_functions):  # not missing
                owners["torch._C._nn"] = torch_private.nn_functions
            if cls is None:
                owners[""] = F
            if owner == "self" and cls is not None:
                found.add((cls, name))
            elif owner in owners and name not in (*PLUMBING, function.__name__):
                found.add((owners[owner], name))
    return {
        (o, n) for o, n in found if isinstance(getattr(o, n, None), (types.FunctionType, types.BuiltinFunctionType))
    }


@pytest.mark.parametrize("cls", originals.AS_CALLED, ids=lambda cls: cls.__name__)
def test_all_that_a_forward_looks_up_is_asked_for(cls):
    """The tables are checked against PyTorch's source: ``F._verify_batch_size`` was in none."""
    places = {(id(owner), name) for owner, name in originals.called(cls)}
    waiting = [(cls.forward, cls)]
    while waiting:
        function, of = waiting.pop()
        for owner, name in looked_up(function, of):
            if owner is F and (name in ("pad", "interpolate") or "dropout" in name):
                continue  # what they are replaced for is asked where they are called
            assert (id(owner), name) in places, f"{cls.__name__}: {owner.__name__}.{name}"
            value = getattr(owner, name)
            if isinstance(value, types.FunctionType):
                assert (id(value), "__code__") in places
                waiting.append((value, cls if owner is cls else None))
