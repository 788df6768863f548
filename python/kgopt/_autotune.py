"""Where ``KGOPT_AUTOTUNE=1`` keeps what it measures."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
from pathlib import Path

import torch

from kgopt import _C
from kgopt._version import __version__

__all__ = ["cache_folder", "cache_prefix", "forget", "install"]


def cache_folder() -> str:
    """kgopt's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "kgopt")


def cache_prefix() -> str:
    """Folder and beginning of the files' names. A file holds for a GPU model, which ends its name, and versions."""
    name = f"conv-torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}-kgopt{__version__}"
    return os.path.join(cache_folder(), name)


def _is_on() -> bool:
    return os.environ.get("KGOPT_AUTOTUNE", "0") not in ("", "0")


def forget() -> None:
    """Drops what was measured, in this process and on disk; nothing where nothing is."""
    if not _is_on():
        return
    for path in glob.glob(glob.escape(cache_prefix()) + "-*.txt"):
        with contextlib.suppress(OSError):  # another process forgets, too
            os.remove(path)
    function = ctypes.CDLL(_C.__file__).kgopt_forget_measurements
    function.argtypes, function.restype = [], None
    function()


def install() -> None:
    """Tells the extension. Where the folder cannot be made, measurements last as long as the process."""
    if not _is_on():
        return
    prefix = cache_prefix()
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    setter = ctypes.CDLL(_C.__file__).kgopt_set_cache_prefix
    setter.argtypes = [ctypes.c_char_p]
    setter.restype = None
    setter(os.fsencode(prefix))
