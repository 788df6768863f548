"""A test that hangs is a failure that says where, and the tests after it run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).resolve().parents[1] / "pyproject.toml"
TESTS = """
import ctypes

def test_hangs():
    ctypes.PyDLL(None).pause()  # in C, and the interpreter is not given back

def test_after_it():
    pass
"""


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 9 ends what hangs")
def test_a_hang_is_a_failure(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_hang.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(CONFIG), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["-n", "1", "-o", "faulthandler_timeout=5", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "in test_hangs" in done.stderr, done.stderr
