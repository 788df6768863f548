"""What was measured, kept for the whole process and perhaps on disk: equal models take equal paths.

A verdict is a small JSON value: the times of a site, the faster way to call something, the seconds of a model in two
forms. Its key is a text with all that it depends on: the kind of question, the GPU and the versions, PyTorch's
switches, shapes, strides, dtypes. The first answer to a question holds: a thread or process that measured the same
meanwhile takes it too. :func:`kgopt.forget` clears all of it.

On disk each verdict is one file, complete from the moment it has its name, so processes need no lock. A file that
cannot be read, of another format or with another key, counts as missing and is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kgopt import _autotune
from kgopt import ops as ops
from kgopt._autotune import cache_folder
from kgopt._version import __version__
from kgopt.torch_private import inductor_cache_dir

FORMAT = 1  # of keys and files
CAPACITY = 2**14  # verdicts in memory: a large model has some hundreds
FILES = 2**16  # verdicts in a folder
VARIABLE = "KGOPT_VERDICTS"  # "1": in the user's cache; or a folder


class Store:
    """Verdicts by key. The least recently used ones leave when there are too many."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.folder: Path | None = None
        self._lock = threading.Lock()
        self._values: OrderedDict[str, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def attach(self, folder: str | os.PathLike[str] | None) -> None:
        """Reads and writes verdicts there from now on; None: in memory alone.

        Raises:
            ValueError: ``folder`` cannot be made, or is no folder.
        """
        if folder is None:
            self.folder = None
            return
        path = Path(folder).expanduser() / f"verdicts-{FORMAT}"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"verdicts is {os.fspath(folder)!r}, expected a folder that can be written: {error}"
            ) from error
        if path == self.folder:
            return
        self.folder = path
        _prune(path)

    def known(self, key: str) -> Any:
        """The verdict; None where there is none."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = None if self.folder is None else _read(_file_of(self.folder, key), key)
        return None if value is None else self._hold(key, value)

    def keep(self, key: str, value: Any) -> Any:
        """Keeps a new verdict, and returns the one that holds: an earlier one, if somebody else was first."""
        held = self._hold(key, value)
        if self.folder is None or held is not value:
            return held
        published = _publish(_file_of(self.folder, key), key, value)
        if published is not value:
            with self._lock:
                self._values[key] = published
        return published

    def settle(self, key: str, measure: Callable[[], Any]) -> tuple[Any, bool]:
        """The verdict, and whether it was known. What ``measure`` cannot answer (None) is not kept.

        Two threads may measure the same at once; no lock is held meanwhile, for user code runs.
        """
        value = self.known(key)
        if value is not None:
            return value, True
        value = measure()
        return (value if value is None else self.keep(key, value)), False

    def forget(self) -> None:
        """Drops every verdict, also those in the folder."""
        with self._lock:
            self._values.clear()
        if self.folder is not None:
            for path in _files(self.folder):
                path.unlink(missing_ok=True)

    def _hold(self, key: str, value: Any) -> Any:
        with self._lock:
            value = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            while len(self._values) > self.capacity:
                self._values.popitem(last=False)
        return value


# ----------------------------------------------------------------------------------------------------------------------
# Files


def _file_of(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.glob("*.json"))
    return []


def _read(path: Path, key: str) -> Any:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("key") != key:
        return None
    return found.get("value")


def _publish(path: Path, key: str, value: Any) -> Any:
    """Writes a file, unless another process was first; the value that is in it. A full disk costs only the file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_text(json.dumps({"format": FORMAT, "key": key, "value": value}))
        try:
            os.link(part, path)  # fails where there is a file, unlike a rename
        except FileExistsError:
            found = _read(path, key)
            if found is not None:
                return found
            os.replace(part, path)  # it was broken
        except OSError:  # a file system without links
            os.replace(part, path)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return value


def _prune(folder: Path) -> None:
    """Removes the oldest files of a folder with too many, down to three quarters."""
    files = _files(folder)
    if len(files) <= FILES:
        return
    with contextlib.suppress(OSError):
        files.sort(key=lambda path: path.stat().st_mtime)
    for path in files[: len(files) - FILES * 3 // 4]:
        with contextlib.suppress(OSError):
            path.unlink()


# ----------------------------------------------------------------------------------------------------------------------
# Keys


def key_of(kind: str, device: torch.device, *parts: Any) -> str:
    """The key of one question: what is asked, where, under which switches, about what."""
    return "|".join((kind, environment(device), _switches(device), canonical(parts)))


def environment(device: torch.device) -> str:
    """The hardware and the versions that a measurement holds for. Two equal GPUs are one."""
    if device.type != "cuda":
        return f"{_versions()} {device.type} {_cpu()} threads {torch.get_num_threads()}"
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"{_versions()} cudnn {torch.backends.cudnn.version()} {_gpu(index)}"


def environments(devices: Iterable[torch.device]) -> list[tuple[str, int | None, str]]:
    """What a pickle says of the devices that its measurements are of."""
    return [(d.type, d.index, environment(d)) for d in dict.fromkeys(devices)]


def are_here(devices: Any) -> bool:
    """Whether such measurements hold in this process; an empty list, or None, says nothing."""
    if not devices or (any(kind == "cuda" for kind, *_ in devices) and not torch.cuda.is_initialized()):
        return False  # loading a model for the CPU starts no GPU
    try:
        return all(environment(torch.device(kind, index)) == found for kind, index, found in devices)
    except (AssertionError, RuntimeError):  # there is no such device
        return False


@functools.cache
def _versions() -> str:
    return f"kgopt {__version__} torch {torch.__version__} cuda {torch.version.cuda}"


@functools.cache
def _cpu() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


@functools.cache
def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    # A slice of a GPU has its name, but fewer multiprocessors.
    return f"{properties.name} {properties.major}.{properties.minor} {properties.multi_processor_count}"


def _switches(device: torch.device) -> str:
    """What decides which of PyTorch's kernels run."""
    found = [
        *(["deterministic"] if torch.are_deterministic_algorithms_enabled() else []),
        *(["inference"] if torch.is_inference_mode_enabled() else []),
    ]
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        found += ["tf32"] if ops.conv_tf32_allowed() else []
        found += [name for name in ("enabled", "benchmark", "deterministic") if getattr(cudnn, name)]
        found += ["autotune"] if os.environ.get("KGOPT_AUTOTUNE", "0") not in ("", "0") else []
    if torch.is_autocast_enabled(device.type):
        found.append(str(torch.get_autocast_dtype(device.type)))
    return " ".join(found)


def canonical(value: Any) -> str:
    """A text that is equal for equal arguments, in every process. Of a tensor its kind, not its values."""
    if isinstance(value, Tensor):
        kind = (tuple(value.shape), value.stride() if value.layout is torch.strided else None)
        return f"<{value.dtype} {value.device.type} {kind} {value.requires_grad}>"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{canonical(k)}: {canonical(v)}" for k, v in value.items())) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(canonical, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(canonical, value))) + "}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


store = Store()
compiled = Store()  # of captured graphs, where `store` has no folder: beside Inductor's cache


def of_graphs() -> Store:
    """Where verdicts of captured graphs are kept: on disk with all others, or in a folder of Inductor's cache."""
    if store.folder is not None:
        return store
    folder = inductor_cache_dir()
    if folder is not None and compiled.folder is None:
        with contextlib.suppress(ValueError):
            compiled.attach(folder)
    return compiled


def attach_from_environment() -> None:
    """The folder that KGOPT_VERDICTS names. One that cannot be made is no error: verdicts stay in memory."""
    value = os.environ.get(VARIABLE, "0")
    if value in ("", "0"):
        return
    with contextlib.suppress(ValueError):
        store.attach(cache_folder() if value == "1" else value)


attach_from_environment()


def forget() -> None:
    """Forgets all that :func:`kgopt.optimize` measured in this process, and in the folder of ``verdicts``, if any; and
    what ``KGOPT_AUTOTUNE=1`` measured, where that is on.

    What is optimized or called at a new shape from now on is measured again. Models keep the verdicts that they have;
    optimize a restored one, or a new copy, to measure anew.
    """
    store.forget()
    compiled.forget()
    _autotune.forget()
