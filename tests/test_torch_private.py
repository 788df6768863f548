"""Private names of torch: one module names them, each has a fallback, and everything works without any of them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kgopt
from forks import outputs
from kgopt import torch_private

PACKAGE = Path(kgopt.__file__).parent
TESTS = Path(__file__).parent
# What torch.nn.Module keeps under these names is an interface; torch_private says what happens without it.
INTERFACE = {
    *torch_private.MODULE_ATTRIBUTES,
    *torch_private.MODULE_METHODS,
    "_compiled_call_impl",
    "_conv_forward",
    "_orig_mod",
}
# Of Python's own modules.
PYTHON = {"_getframe", "_exit", "_fields", "_attributes", "_operator"}
PRIVATE_MODULE = re.compile(r"^torch(\.\w+)*\._[A-Za-z]\w*")


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and not name.startswith("_kgopt")


def names_made_here(trees):
    """Private names that the package itself binds: functions, classes, variables, attributes."""
    made = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                made.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                made.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                made.add(node.attr)
            elif isinstance(node, ast.alias):
                made.add(node.asname or node.name.split(".")[0])
            elif isinstance(node, ast.arg):
                made.add(node.arg)
    return made


def dotted(node):
    """``a.b.c`` of an expression that is only names; "" for another one."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base else ""


def private_names(tree, made):
    """(line, name) of what a module takes from torch that is private."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in made | INTERFACE | PYTHON:
                yield node.lineno, node.attr
            paths = [dotted(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            paths = [node.value]
            if re.fullmatch(r"_[a-z]\w*", node.value) and hasattr(torch._C, node.value):
                yield node.lineno, node.value
        else:
            continue
        for path in paths:
            if PRIVATE_MODULE.match(path):
                yield node.lineno, path


def test_no_other_module_names_a_private_name_of_torch():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    made = names_made_here(trees.values())
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        if "torch_private" not in path.relative_to(PACKAGE).parts
        for line, name in private_names(tree, made)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "torch._C._is_tracing()",
        "from torch._functorch.utils import enable_single_level_autograd_function",
        "from torch.autograd.function import _SingleLevelFunction",
        "import torch._dynamo.config",
        "op._op(x)",
        "x._version",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "after_import('torch._inductor.fx_passes.post_grad', f)",
        "getattr(torch._C, '_len_torch_function_stack')",
    ],
)
def test_the_search_finds(code):
    assert list(private_names(ast.parse(code), set()))


def test_the_search_leaves_public_names_alone():
    code = '"""Of torch._C."""\nfrom torch.autograd import forward_ad\nx._kgopt_state = torch.ops.aten.add.default'
    assert not list(private_names(ast.parse(code), set()))


@pytest.mark.skipif(torch.__version__ >= (2, 16), reason="this torch is newer than the ones that were looked at")
def test_this_torch_has_every_name():
    code = "import kgopt; from kgopt import torch_private; print(torch_private.missing(everything=True))"
    assert outputs([code]) == ["{}"]


SMOKE = """
import os, warnings
os.environ["KGOPT_WITHOUT_PRIVATE"] = {names!r}
warnings.simplefilter("ignore")
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
import kgopt
from kgopt import torch_private
from kgopt.rewrite.backend import kgopt_backend

hidden = {names!r}
assert hidden in torch_private.missing(everything={compiles}), hidden

def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

x = torch.randn(2, 8, 5, 6, dtype=torch.float64, requires_grad=True)
gamma, beta = (torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))

def ours(x, gamma, beta):
    return kgopt.functional.group_norm(x, 4, gamma, beta, act="silu")

def theirs(x, gamma, beta):
    return F.silu(F.group_norm(x, 4, gamma, beta))

close(ours(x, gamma, beta), theirs(x, gamma, beta))
with torch.inference_mode():
    close(ours(x, gamma, beta), theirs(x, gamma, beta))
grads = [torch.autograd.grad(f(x, gamma, beta).pow(2).sum(), (x, gamma, beta)) for f in (ours, theirs)]
close(*grads)
given = x.detach(), gamma.detach(), beta.detach()
inside = [torch.func.grad(lambda *t: f(*t).pow(2).sum(), (0, 1, 2))(*given) for f in (ours, theirs)]
close(*inside)
def per_sample(f):
    return torch.func.vmap(torch.func.grad(lambda t: f(t[None], *given[1:]).pow(2).sum()))(given[0])
close(per_sample(ours), per_sample(theirs))
with torch.autocast("cpu", dtype=torch.bfloat16):
    wide, weight = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    y, expected = kgopt.functional.conv2d(wide, weight), F.conv2d(wide, weight)
    assert y.dtype is expected.dtype, (y.dtype, expected.dtype)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2 * expected.abs().max().item())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Upsample(scale_factor=2)

    def forward(self, x):
        return self.up(F.relu(self.norm(self.conv(x))) + x)

net = Net().double()
net.norm.weight.data.normal_()
expected = net(x)
dx = torch.autograd.grad(expected.pow(2).sum(), x)
for example in (None, x.detach()):
    close(kgopt.optimize(net, example, measure=example is not None, channels_last=True)(x), expected)
    close(torch.autograd.grad(net(x).pow(2).sum(), x), dx)
    with torch.no_grad():
        close(net(x), expected)
if hidden != "torch.nn.Module":
    assert kgopt.restore(net) is net
if {compiles}:
    def function(x, w):
        return F.silu(F.group_norm(x, 4, w))
    w = given[1]
    compiled = torch.compile(function, backend=kgopt_backend, options={{"kgopt.always": True}})
    close(compiled(given[0], w), function(given[0], w))
print("done")
"""


LAZY = "torch.func, torch._subclasses, torch._inductor.compile_fx, torch._inductor.fx_passes.post_grad"


def test_without_one_name_after_another():
    """Each in a process of its own; Inductor's turn, which takes seconds, comes with the names that it needs."""
    names = torch_private.names()
    compiling = ("_inductor", "_dynamo", "_subclasses", "_guards", "_functorch.config", "add.Tensor._schema")
    codes = [SMOKE.format(names=name, compiles=any(part in name for part in compiling)) for name in names]
    for name, text in zip(names, outputs(codes, first=f"import {LAZY}"), strict=True):
        assert text == "done", name


def test_schemas_without_the_private_name_are_the_same():
    """Until torch 2.13 a signature has a tuple of several results' types: they counted as one, and nodes of three
    results got a backward that took one gradient.
    """
    code = """
import torch, kgopt
from kgopt import torch_private
for name in {names!r}:
    schema = torch_private.schema_of(getattr(torch.ops.kgopt, name).default)
    print(name, len(schema.returns), [(a.name, a.kwarg_only, a.default_value) for a in schema.arguments])
"""
    code = code.format(names=["group_norm", "group_norm_fwd", "group_norm_backward", "conv2d", "group_stats"])
    (expected,) = outputs([code])
    (found,) = outputs([code], KGOPT_WITHOUT_PRIVATE="torch.ops.aten.add.Tensor._schema")
    assert "group_norm_fwd 3" in found
    assert "group_stats 2" in found
    assert found == expected


def test_a_name_that_means_something_else_counts_as_missing():
    code = """
import torch
torch._C._is_any_autocast_enabled = lambda frame: False
torch._C._any_requires_grad = lambda *args: None
torch._C._get_fp32_precision_getter = lambda backend, op: 1
import kgopt
from kgopt import torch_private
x = torch.randn(2, 4, 3, 3, requires_grad=True)
kgopt.functional.group_norm(x, 2).pow(2).sum().backward()
print(*torch_private.missing())
"""
    (found,) = outputs([code])
    assert set(found.split()) == {
        "torch._C._any_requires_grad",
        "torch._C._is_any_autocast_enabled",
        "torch._C._get_fp32_precision_getter",
    }


def test_info_lists_what_is_missing():
    name = "torch._C._is_any_autocast_enabled"
    run = subprocess.run(
        [sys.executable, "-m", "kgopt", "info", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KGOPT_WITHOUT_PRIVATE": name},
    )
    assert json.loads(run.stdout)["torch_private_missing"] == {name: "torch.is_autocast_enabled of each device"}


# Of these files every test but those about a thing that a fallback gives up, each with the reason.
SELECTION = (
    ("autograd", "autocast", "func", "bad_input", "modules", "optimize"),
    ("func_twice",),
    ("second_derivatives",),
    ("fake",),
    ("optimize_tools",),
)
GIVEN_UP = {
    "test_import_is_quick": "fallbacks are found in torch's slower modules",
    "test_import_loads_no_compiler": "the same",
    "test_first_derivatives_run_kernels": "under torch.func the ops are formulas",
    "test_the_faster_one_runs": "with gradients on there might be global backward hooks: nothing is fused",
    "test_pipelines_compile_and_export": "the same",
    "test_symbolic_trace_and_jit_trace": "the same: a trace with gradients on differs from one without",
    "[cpu-kgopt]": 'backend="kgopt" is known where the package is installed',
}


@pytest.mark.slow
@pytest.mark.parametrize("names", SELECTION, ids="+".join)
def test_the_suite_passes_without_any(names):
    """In several processes: after some 700 of these tests in one PyTorch's own operations stop recording gradients,
    which no test among them does by itself.
    """
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "--show-capture=no"),
            *("-k", " and ".join(f"not {name.strip('[]')}" for name in GIVEN_UP)),
            *(str(TESTS / f"test_{name}.py") for name in names),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "KGOPT_WITHOUT_PRIVATE": "1", "PYTHONPATH": str(PACKAGE.parent), "PYTEST_ADDOPTS": ""},
        cwd=TESTS.parent,
        timeout=1500,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    found = re.search(r"(\d+) passed", run.stdout)
    assert found is not None, run.stdout[-2000:]
    assert int(found.group(1)) > 60
