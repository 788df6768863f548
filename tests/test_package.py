"""The package around the ops: import with and without a GPU or the extension, PyTorch's TF32 switch, source rules."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kgopt
from forks import outputs
from kgopt import functional
from kgopt.ops import precision

ROOT = Path(__file__).resolve().parent.parent


def run_python(code, **environment):
    """The output of a fresh interpreter; what it prints to stderr is in the failure's text."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:kgopt", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT.anchor,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_works_with_the_gpus_hidden():
    code = (
        "import torch, kgopt\n"
        "assert not torch.cuda.is_available()\n"
        "print(float(kgopt.functional.logsumexp(torch.zeros(4), 0).exp()))"
    )
    assert float(run_python(code, CUDA_VISIBLE_DEVICES="")) == pytest.approx(4)


def test_missing_extension_is_an_import_error_that_says_so():
    code = (
        "import sys, torch\n"
        "sys.modules['kgopt._C'] = None\n"
        "try:\n"
        "    import kgopt\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    message = run_python(code)
    assert "kgopt._C could not be loaded" in message
    assert "pip install kgopt" in message


def test_import_brings_in_no_heavy_module():
    """triton, sympy and the compiler cost seconds; import kgopt may not be what loads them."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import kgopt\n"
        "heavy = ('triton', 'torch._dynamo', 'torch._inductor', 'sympy', 'torch.onnx', 'torch.utils.flop_counter')\n"
        "print([m for m in heavy if m in sys.modules and m not in before])"
    )
    assert run_python(code) == "[]"


def test_import_runs_no_backward():
    """With a GPU there autograd's threads start at a process's first backward, and no fork of it can run one: so it was
    for each process that had imported kgopt, which tried a node of autograd so."""
    code = (
        "import torch\n"
        "from torch.autograd import graph\n"
        "def run(*args, **keywords):\n"
        "    raise AssertionError('a backward')\n"
        "graph._engine_run_backward = torch.autograd._engine_run_backward = run\n"
        "import kgopt\n"
        "assert not torch.cuda.is_initialized()\n"
        "try:\n"
        "    torch.zeros(1, requires_grad=True).sum().backward()\n"
        "except AssertionError as error:\n"
        "    print(error, kgopt.torch_private.missing())"
    )
    assert run_python(code, KGOPT_WITHOUT_PRIVATE="") == "a backward {}"


@pytest.mark.gpu
def test_a_fork_of_a_process_that_used_the_gpu():
    """On the CPU a forked process works as without kgopt: nothing asks CUDA, which raises there."""
    code = (
        "import os, torch, kgopt\n"
        "from torch import nn\n"
        "torch.ones(1, device='cuda')\n"
        "if child := os.fork():\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        "    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())\n"
        "    x = torch.randn(2, 4, 6, 6)\n"
        "    model = kgopt.optimize(model, x, channels_last=True)\n"
        "    model(x).sum().backward()\n"
        "    print(model[0].weight.grad is not None, flush=True)\n"
        "    os._exit(0)"
    )
    assert run_python(code) == "True"


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_optimize_brings_in_no_compiler(mode):
    """A decorator of torch.compiler imported Dynamo with kgopt.rewrite: 5 to 12 seconds of the first ``optimize``."""
    code = (
        "import sys, torch, kgopt\n"
        "from torch import nn\n"
        "before = set(sys.modules)\n"
        "model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Upsample(scale_factor=2))\n"
        f"kgopt.optimize(model.{mode}(), torch.randn(1, 4, 6, 6))\n"
        "print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules and m not in before])"
    )
    assert run_python(code) == "[]"


def test_flop_formulas_in_either_order_of_import():
    orders = (("kgopt", "torch.utils.flop_counter"), ("torch.utils.flop_counter", "kgopt"))
    counts = outputs(
        [
            f"import torch, {first}, {second}\n"
            "from torch.utils.flop_counter import FlopCounterMode\n"
            "with FlopCounterMode(display=False) as counter:\n"
            "    torch.ops.kgopt.conv2d(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3))\n"
            "print(counter.get_total_flops())"
            for first, second in orders
        ]
    )
    assert [int(count) for count in counts] == [2 * 3 * 2 * 3 * 3 * 2 * 2] * 2


def test_version_is_the_installed_one():
    try:
        installed = importlib.metadata.version("kgopt")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kgopt is on the path, but not installed as a distribution")
    assert kgopt.__version__ == installed


def test_build_info():
    info = json.loads(torch.ops.kgopt.build_info())
    assert {"cuda", "archs", "cuda_version", "torch_target"} <= set(info)
    assert info["torch_target"] == "2.10"
    assert [c_in for c_in, _ in info["few_channels"]] == [16, 32], "what the backward of a pipeline goes by"


# What the switch says after each sequence of settings, on torch's own word: whether a cuDNN convolution may use TF32.
SWITCHES = {
    "default": ("", 1),
    "old interface off": ("torch.backends.cudnn.allow_tf32 = False", 0),
    "old interface off and on": ("torch.backends.cudnn.allow_tf32 = False; torch.backends.cudnn.allow_tf32 = True", 1),
    "convolutions in ieee": ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", 0),
    "convolutions in tf32": ("torch.backends.cudnn.conv.fp32_precision = 'tf32'", 1),
    "everything in ieee": (
        "torch.backends.cudnn.conv.fp32_precision = 'none'; torch.backends.fp32_precision = 'ieee'",
        0,
    ),
    "everything in tf32": (
        "torch.backends.cudnn.conv.fp32_precision = 'none'; torch.backends.fp32_precision = 'tf32'",
        1,
    ),
    # Reading torch.backends.cudnn.allow_tf32 raises after these.
    "both interfaces, ieee": (
        "torch.backends.cudnn.allow_tf32 = True; torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        0,
    ),
    "both interfaces, tf32": (
        "torch.backends.cudnn.allow_tf32 = False; torch.backends.cudnn.conv.fp32_precision = 'tf32'",
        1,
    ),
}


@pytest.fixture(scope="module")
def switched():
    """What the query answers after each sequence of settings, by its name."""
    codes = [
        "import warnings; warnings.simplefilter('error')\n"
        "import torch, kgopt.ops\n"
        f"{settings}\n"
        "print(kgopt.ops.precision.conv_tf32_allowed())"
        for settings, _ in SWITCHES.values()
    ]
    return dict(zip(SWITCHES, outputs(codes), strict=True))


@pytest.mark.parametrize("name", SWITCHES)
def test_tf32_switch(name, switched):
    assert int(switched[name]) == SWITCHES[name][1]


def test_forced_precision_is_restored():
    """allow_tf32 of an op also holds for its gradients, and for nothing after them."""
    get = torch._C._get_fp32_precision_getter
    for before in ("ieee", "tf32"):
        torch._C._set_fp32_precision_setter("cuda", "conv", before)
        forced = precision.conv_precision(before == "ieee")
        with contextlib.suppress(ZeroDivisionError), forced:
            assert get("cuda", "conv") != before
            raise ZeroDivisionError
        assert get("cuda", "conv") == before


@pytest.mark.gpu
def test_forced_fp32_holds_for_gradients():
    """Wide enough that cuDNN takes TF32 for the weight's gradient wherever it may."""
    x = torch.randn(4, 64, 32, 32, device="cuda")
    weight = torch.randn(64, 64, 3, 3, device="cuda", requires_grad=True)
    torch.backends.cudnn.allow_tf32 = True
    functional.conv2d(x, weight, allow_tf32=False).sum().backward()
    exact = torch.nn.grad.conv2d_weight(x.double(), weight.shape, torch.ones(4, 64, 30, 30, device="cuda").double())
    assert float((weight.grad - exact).norm() / exact.norm()) < 5e-6
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [True, False])
def test_an_op_of_its_own_precision_at_cudnn(allowed):
    """The switch says the opposite of what an op is told, whose work cuDNN does: so it is in compiled graphs."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(2, 96, 40, 40, device="cuda", generator=generator) for _ in range(2))
    weight = torch.randn(96, 96, 3, 3, device="cuda", generator=generator) / 30
    one, option = [1, 1], {"backend": "aten", "allow_tf32": allowed}
    torch.backends.cudnn.allow_tf32 = not allowed
    ops = torch.ops.kgopt
    dx, dweight, _ = ops.conv_backward(dy, x, weight, one, one, one, [0, 0], 1, False, [True, True, False], **option)
    y = ops.conv2d(x, weight, None, one, one, one, 1, **option)
    assert torch.backends.cudnn.allow_tf32 is not allowed
    dy, x, weight = dy.double(), x.double(), weight.double()
    exact = [
        torch.nn.functional.conv2d(x, weight, padding=1),
        torch.nn.grad.conv2d_input(x.shape, weight, dy, padding=1),
        torch.nn.grad.conv2d_weight(x, weight.shape, dy, padding=1),
    ]
    errors = [float((got - right).norm() / right.norm()) for got, right in zip((y, dx, dweight), exact, strict=True)]
    assert (max(errors) > 1e-5) is allowed, errors


def check_sources():
    path = ROOT / "scripts" / "check_sources.py"
    if not path.exists():
        pytest.skip("the tests run without the source tree")
    spec = importlib.util.spec_from_file_location("check_sources", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_source_rules(capsys):
    """Kernel files see no torch header, nothing prints or exits, and every file is built."""
    status = check_sources().main()
    assert status == 0, capsys.readouterr().out


def test_source_rules_see_a_breach(tmp_path, monkeypatch, capsys):
    checks = check_sources()
    csrc = tmp_path / "csrc" / "op"
    csrc.mkdir(parents=True)
    (csrc / "helper.h").write_text("#include <ATen/ATen.h>\n")
    (csrc / "op_params.h").write_text('// #include <torch/torch.h>\n#include "helper.h"\n')
    (csrc / "op.cu").write_text('#include "op_params.h"\nvoid f() { printf("x"); }\n')
    (csrc / "forgotten.cpp").write_text("\n")
    (tmp_path / "sources.txt").write_text("kernels csrc *.cu\n")
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setattr(checks, "CSRC", tmp_path / "csrc")
    assert checks.main() == 1
    out = capsys.readouterr().out
    assert "op.cu: includes op_params.h -> helper.h -> ATen/ATen.h" in out
    assert "op_params.h: includes helper.h -> ATen/ATen.h" in out
    assert "op.cu:2: printf" in out
    assert "forgotten.cpp: no line of sources.txt builds it" in out
