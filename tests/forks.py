"""Code that must find nothing loaded but what it asks for, in forks of one process that has imported torch.

Importing torch takes seconds, a fork nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys

_RUN = """
import os, sys, traceback
import torch

exec(sys.argv[1])
for code in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)
    print(end="\\0", flush=True)
"""


def outputs(codes: list[str], first: str = "", **environment: str) -> list[str]:
    """What each code prints in a fork of its own; what it prints to stderr is in the failure's text.

    ``first`` runs once, before the forks.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:kgopt", "-c", _RUN, first, *codes],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=os.sep,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [text.strip() for text in done.stdout.split("\0")[:-1]]
