"""Fixtures: devices, poisoned memory, fixed seeds, PyTorch's precision switches."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys

import pytest
import torch

os.environ["KGOPT_VERDICTS"] = "0"  # what somebody measured before is no part of a test, nor to be forgotten by one
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # docs/log/findings.md: oneDNN in bf16


def pytest_addoption(parser):
    """pytest 8 says where a test hangs, but does not end it; it would refuse the configuration."""
    if pytest.version_tuple < (9,):
        parser.addini("faulthandler_exit_on_timeout", "of pytest 9", type="bool")


def pytest_configure(config):
    """Processes that test side by side share the cores: with a thread each for every core they would all wait."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that tests start


def pytest_runtest_logreport(report):
    """Appends each failure to the file that KGOPT_TEST_LOG names, as it comes: a run that a time limit ends has no
    summary. Workers of pytest-xdist send their reports to the first process, which writes alone."""
    path = os.environ.get("KGOPT_TEST_LOG")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as log:  # closed, and so written, with each line
            log.write(f"{report.outcome.upper()} {report.nodeid} ({report.when}, {report.duration:.1f} s)\n")
            log.write("".join(f"    {line}\n" for line in _reason(report).splitlines()))


def _reason(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
    return text[-1500:]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each test that takes it runs on the CPU, and on a GPU where there is one."""
    return request.param


@pytest.fixture(autouse=True)
def no_race(monkeypatch):
    """Small models are often slower optimized, which ``optimize`` would undo; that has tests of its own."""
    monkeypatch.setattr("kgopt.rewrite.model.race.SLACK", math.inf)


@pytest.fixture(autouse=True)
def fixed_state():
    """The same seeds for every test, TF32 off unless a test turns it on, no code compiled or measured by another."""
    torch.manual_seed(0)
    if "kgopt.rewrite" in sys.modules:
        sys.modules["kgopt.rewrite"].forget()
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def poisoned():
    """Every uninitialized tensor is filled with NaN, so that an element nobody wrote shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@functools.cache
def _ceilings(device, precisions, quick):
    from kgopt.cli import floor

    return floor.measure_ceilings(device, list(precisions), quick)


@pytest.fixture
def quick_bench(monkeypatch):
    """Benches on the CPU without what takes most of their time: large writes between runs, ceilings measured anew."""
    from kgopt.cli import bench, measure

    monkeypatch.setattr(measure, "_CPU_FLUSH_BYTES", 2**12)
    monkeypatch.setattr(
        bench, "measure_ceilings", lambda device, wanted, quick: _ceilings(device, tuple(wanted), quick)
    )


_PLAIN_PACKAGE = """
import sys, torch
model, x = torch.nn.Conv2d(2, 3, 3).eval(), torch.randn(1, 2, 5, 5)
with torch.no_grad():
    program = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    torch._inductor.aoti_load_package(path)(x)
"""


@pytest.fixture(scope="session")
def aot_inductor(tmp_path_factory):
    """Skips where this torch's AOTInductor dies on a plain model, which one build of torch 2.11 does."""
    if not torch.__version__.startswith("2.11."):
        return
    package = str(tmp_path_factory.mktemp("plain") / "plain.pt2")
    run = subprocess.run([sys.executable, "-c", _PLAIN_PACKAGE, package], capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip(f"AOTInductor fails on a plain torch model here (exit status {run.returncode})")


@pytest.fixture
def ours(monkeypatch):
    """kgopt's ops run wherever they can, on the CPU as well."""
    from kgopt.rewrite.measure import policy

    monkeypatch.setattr(policy, "default", lambda device: True)


@pytest.fixture
def summed(monkeypatch):
    """The activations of the sums that became one op."""
    from optimize_pairs import note_sites

    return note_sites(monkeypatch, run_added=lambda site, norm, x, other, act, *_: act)


@pytest.fixture
def ran(monkeypatch):
    """What kgopt's ops computed behind norms: an activation, perhaps of a sum or of what was scaled."""
    from optimize_pairs import note_sites

    return note_sites(
        monkeypatch,
        run=lambda site, *_, **more: site.chain.post,
        run_added=lambda site, norm, x, other, act, *_: f"sum {act}",
        run_modulated=lambda site, norm, x, factor, shift, act="none", *_: (
            act if factor is shift is None else f"scaled {act}"
        ),
        run_scaled_sum=lambda site, norm, x, other, factor, shift, act="none", *_: f"scaled sum {act}",
    )


@pytest.fixture
def emitted(monkeypatch):
    """The chains that ran on kgopt's ops, of norms that are known by what they compute."""
    from kgopt.rewrite.norms import sites

    found = []
    emit = sites.emit_kgopt

    def watched(chain, *args, **kwargs):
        found.append(chain)
        return emit(chain, *args, **kwargs)

    monkeypatch.setattr(sites, "emit_kgopt", watched)
    return found


@pytest.fixture
def nothing_is_timed_in_a_capture(monkeypatch):
    """A measurement within a CUDA graph's capture fails."""
    from kgopt.rewrite.measure import clocks, measuring

    def watched(real):
        def call(*args, **kwargs):
            assert not torch.cuda.is_current_stream_capturing()
            return real(*args, **kwargs)

        return call

    for module, names in ((measuring, ("measure",)), (clocks, ("time_both", "busy_both", "clock_both"))):
        for name in names:
            monkeypatch.setattr(module, name, watched(getattr(module, name)))
