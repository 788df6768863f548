"""Builds kgopt: one Python package with one extension module, kgopt._C.

`_C` uses LibTorch's stable ABI and Python's limited API, so the wheel (cp310-abi3) serves every Python from 3.10 and
every torch from 2.10, with or without a GPU. With an nvcc at hand it holds the CUDA kernels; without one it is
CPU-only, and the build says so.

Environment variables:
    KGOPT_CUDA         0: CPU-only; 1: missing CUDA is an error; native: for the GPUs of this machine, CPU-only where
                       there is none; unset: CUDA if an nvcc is found.
    KGOPT_CUDA_ARCHS   GPU architectures, separated by ';' (default "8.0+PTX;9.0a", with KGOPT_CUDA=native the GPUs').
    KGOPT_LINEINFO     1: line tables in device code, for profilers and compute-sanitizer.
    KGOPT_NVCC_FLAGS   more flags for nvcc, for example "-Xptxas -v".
    KGOPT_CXX_FLAGS    more flags for the C++ compiler.
    KGOPT_LOCAL_VERSION  a label for wheels of another CUDA major: "cu12" gives 0.1.0+cu12.
    CUDA_HOME, CXX     the CUDA toolkit and the host compiler to use.
    MAX_JOBS           how many compilers run at once (default: one per core).
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)

DEFAULT_ARCHS = "8.0+PTX;9.0a"
MIN_TORCH = (2, 10)
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10
PY_LIMITED_API = "0x030a0000"  # 3.10
# sm_90a, which the default architectures name, came with CUDA 12.0.
MIN_CUDA = (12, 0)


def say(message: str) -> None:
    print(f"kgopt: {message}", file=sys.stderr, flush=True)


def die(message: str) -> None:
    sys.exit(f"kgopt: error: {message}")


def read_version() -> str:
    text = (ROOT / "python/kgopt/_version.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    if match is None:
        die('python/kgopt/_version.py has no line __version__ = "..."')
    label = os.environ.get("KGOPT_LOCAL_VERSION")
    return f"{match.group(1)}+{label}" if label else match.group(1)


def read_sources() -> dict[str, list[str]]:
    """The files of sources.txt by part, sorted, each once."""
    parts: dict[str, set[str]] = {"module": set(), "api": set(), "kernels": set(), "one_ptx": set(), "hopper": set()}
    for line in (ROOT / "sources.txt").read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            part, folder, pattern = line.split()
            parts[part].update(str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob(pattern))
    return {part: sorted(files) for part, files in parts.items()}


# ---------------------------------------------------------------------------------------------------------- toolkit


class Cuda:
    """A CUDA toolkit: its nvcc, its folders, its version."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.nvcc = home / "bin/nvcc"
        # An installed toolkit has lib64; the pip packages have lib, and a cross toolkit targets/<name>.
        targets = sorted((home / "targets").glob("*")) if (home / "targets").is_dir() else []
        self.include = self._find("cuda_runtime_api.h", [home / "include", *(t / "include" for t in targets)])
        self.lib = self._find("libcudart_static.a", [home / "lib64", home / "lib", *(t / "lib" for t in targets)])
        text = run_text([str(self.nvcc), "--version"])
        match = re.search(r"release (\d+)\.(\d+)", text)
        if match is None:
            die(f"{self.nvcc} --version says nothing of a release:\n{text}")
        self.version = (int(match.group(1)), int(match.group(2)))

    def _find(self, name: str, folders: list[Path]) -> Path:
        for folder in folders:
            if (folder / name).is_file():
                return folder
        die(f"no {name} in {', '.join(map(str, folders))}: CUDA_HOME={self.home} is not a whole CUDA toolkit")
        raise AssertionError

    @property
    def version_text(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def run_text(command: list[str]) -> str:
    """What a command prints, stdout and stderr together; empty when it cannot be run."""
    try:
        return subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    except OSError:
        return ""


def run(command: list[str]) -> tuple[int, str]:
    """The exit code of a command and what it printed."""
    try:
        done = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def find_cuda_home() -> Path | None:
    """CUDA_HOME, else the toolkit of the nvcc on PATH, else of the nvcc that pip installed, else the usual place."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            home = Path(os.environ[variable])
            if not (home / "bin/nvcc").exists():
                die(f"{variable}={home} has no bin/nvcc")
            return home
    nvcc = shutil.which("nvcc")
    if nvcc:
        # The nvcc on PATH may be a wrapper or a link, so nvcc itself says where its toolkit is.
        match = re.search(r"^#\$ TOP=(.+)$", run_text([nvcc, "--dryrun", "x.cu"]), re.M)
        home = Path(match.group(1)).resolve() if match else Path(nvcc).resolve().parent.parent
        if (home / "bin/nvcc").exists():
            return home
        say(f"{nvcc} names {home} as its toolkit, but that has no bin/nvcc; ignored")
    packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    packages.update(Path(p) for p in sys.path if p.endswith("-packages"))
    for folder in sorted(packages):
        # nvidia-cuda-nvcc and its companions share one folder per CUDA major.
        for home in sorted(folder.glob("nvidia/cu[0-9]*"), reverse=True):
            if (home / "bin/nvcc").exists():
                return home
    usual = Path("/usr/local/cuda")
    return usual if (usual / "bin/nvcc").exists() else None


def native_archs() -> list[str]:
    """The architectures of this machine's GPUs, as KGOPT_CUDA_ARCHS has them."""
    try:
        import torch
    except ImportError:
        return []  # make_extension says that building needs it
    if not torch.cuda.is_available():
        return []
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    usable = sorted(c for c in found if c >= (8, 0))
    # 9.0a holds Hopper's own instructions. The wheel has no machine code for later GPUs either: they run PTX of 8.0.
    return ["9.0a" if c == (9, 0) else f"{c[0]}.{c[1]}" if c < (9, 0) else "8.0+PTX" for c in usable]


def find_cuda() -> Cuda | None:
    wish = os.environ.get("KGOPT_CUDA", "")
    if wish not in ("", "0", "1", "native"):
        die(f"KGOPT_CUDA is '{wish}', expected 0, 1, native or nothing")
    if wish == "0":
        say("KGOPT_CUDA=0: building a CPU-only kgopt._C")
        return None
    if wish == "native" and not native_archs():
        say("no NVIDIA GPU here that torch can use: building a CPU-only kgopt._C (KGOPT_CUDA=1 builds the kernels too)")
        return None
    home = find_cuda_home()
    if home is None:
        if wish == "1":
            die("KGOPT_CUDA=1, but there is no nvcc: not in CUDA_HOME, on PATH, from pip, or in /usr/local/cuda")
        say(
            "no nvcc found (looked at CUDA_HOME, PATH, pip's nvidia-cuda-nvcc and /usr/local/cuda): "
            "building a CPU-only kgopt._C"
        )
        return None
    cuda = Cuda(home)
    if cuda.version < MIN_CUDA:
        reason = f"{cuda.nvcc} is of CUDA {cuda.version_text}, expected {MIN_CUDA[0]}.{MIN_CUDA[1]} or later"
        if wish == "1":
            die(reason)
        say(f"{reason}: building a CPU-only kgopt._C")
        return None
    return cuda


def arch_flags(archs: str, cuda: Cuda) -> list[str]:
    """nvcc's -gencode flags for a list such as "8.0+PTX;9.0a"."""
    known = set(re.findall(r"sm_(\d+)", run_text([str(cuda.nvcc), "--list-gpu-code"])))
    flags: list[str] = []
    for arch in filter(None, (a.strip() for a in archs.split(";"))):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if match is None:
            die(f"KGOPT_CUDA_ARCHS has '{arch}', expected a list like '{DEFAULT_ARCHS}'")
        major, minor, variant, ptx = match.groups()
        if int(major) < 8:
            die(f"KGOPT_CUDA_ARCHS has '{arch}', expected 8.0 or later: the kernels use sm_80's instructions")
        if known and major + minor not in known:
            die(f"KGOPT_CUDA_ARCHS has '{arch}', which nvcc {cuda.version_text} does not know")
        if variant and ptx:
            die(f"KGOPT_CUDA_ARCHS has '{arch}': PTX of a '{variant}' architecture runs on no other GPU, drop +PTX")
        number = f"{major}{minor}{variant}"
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    if not flags:
        die(f"KGOPT_CUDA_ARCHS is '{archs}', expected a list like '{DEFAULT_ARCHS}'")
    return flags


def shared_ptx(flags: list[str]) -> list[str]:
    """The same -gencode flags with the PTX of the lowest architecture for all of them: compiled to PTX once."""
    lowest = min((re.search(r"arch=(compute_(\d+)\w*)", f).groups() for f in flags), key=lambda g: int(g[1]))[0]
    if not lowest.removeprefix("compute_").isdigit():
        return flags  # PTX of a variant runs on nothing else
    shared = (re.sub(r"arch=compute_\w+", f"arch={lowest}", f) for f in flags)
    return list(dict.fromkeys(re.sub(r"code=compute_\w+", f"code={lowest}", f) for f in shared))


def from_hopper_on(flags: list[str]) -> list[str]:
    """The -gencode flags of 9.0 and later; all of them where none is."""
    return [f for f in flags if int(re.search(r"arch=compute_(\d+)", f)[1]) >= 90] or flags


# ------------------------------------------------------------------------------------------------------ compilation


def cpu_seconds_of_children() -> float:
    used = os.times()
    return used.children_user + used.children_system


# Of a command that stores PTX: nvcc keeps its intermediate files and prints its steps.
KEEP_PTX = ("--keep", "-v")


class Compiler:
    """Compiles what changed, several files at once.

    An object is up to date when its command is the one of last time and no file that the compiler read for it is
    newer. Objects live in build/objects, so a second build, of a wheel or in place, compiles only what changed.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder = folder
        self.jobs = jobs

    def compile(self, commands: dict[str, list[str]]) -> list[str]:
        """Source file -> command without input and output. Returns the object files."""
        objects = {source: self.folder / (source + ".o") for source in commands}
        stale = [s for s in commands if not self._up_to_date(objects[s], s, commands[s])]
        if not stale:
            say(f"{len(objects)} object files are up to date")
        # First what has never compiled, C++ before CUDA, so that an error shows early; then, so that no long one is
        # left alone at the end, longest first by what each took last time.
        stale.sort(key=lambda s: (-self._last_seconds(objects[s]), s.endswith(".cu"), s))
        failed = []
        before = cpu_seconds_of_children()
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(self._compile_one, s, objects[s], commands[s]) for s in stale]
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                source, seconds, code, output = future.result()
                say(f"[{done}/{len(stale)}] {source} ({seconds:.0f} s)" + ("" if code == 0 else " FAILED"))
                if output:
                    print(output, file=sys.stderr, flush=True)
                if code != 0:
                    failed.append(source)
                    for other in futures:
                        other.cancel()
                    break
        if failed:
            die(f"{', '.join(failed)} did not compile")
        if stale:
            say(f"{len(stale)} files took {cpu_seconds_of_children() - before:.0f} CPU seconds")
        return [str(o) for o in objects.values()]

    def _compile_one(self, source: str, obj: Path, command: list[str]) -> tuple[str, float, int, str]:
        obj.parent.mkdir(parents=True, exist_ok=True)
        stamp = obj.with_suffix(".cmd")
        stamp.unlink(missing_ok=True)
        full = [*command, "-MD", "-MF", str(obj.with_suffix(".d")), "-c", source, "-o", str(obj)]
        start = time.monotonic()
        if KEEP_PTX[0] in command:
            code, output = self._compile_with_short_ptx(full, obj)
        else:
            code, output = run(full)
        seconds = time.monotonic() - start
        if code == 0:
            stamp.write_text(f"{seconds:.1f}\n{shlex.join(command)}\n")
        else:
            output = f"{shlex.join(full)}\n{output}"
        return source, seconds, code, output.strip()

    @staticmethod
    def _compile_with_short_ptx(command: list[str], obj: Path) -> tuple[int, str]:
        """Compiles, then puts PTX of less than half the bytes in the place of nvcc's.

        nvcc prints its commands. The one that packs the images runs again, of PTX that scripts/short_ptx.py rewrote.
        Without such a command or without objcopy nvcc's object stays, which is larger and nothing else.
        """
        with tempfile.TemporaryDirectory() as folder:
            code, printed = run([*command, "--keep-dir", folder])
            steps = [line[3:] for line in printed.splitlines() if line.startswith("#$ ")]
            output = "\n".join(line for line in printed.splitlines() if not line.startswith("#$ "))
            if code != 0:
                return code, output
            pack = next((shlex.split(step) for step in steps if step.startswith("fatbinary ")), None)
            if pack is None or shutil.which("objcopy") is None:
                return 0, output
            pack[0] = str(Path(command[0]).parent / pack[0])
            ptx = [part.split("file=")[1] for part in pack if part.startswith("--image3=kind=ptx")]
            fatbin = next(part.split("=", 1)[1] for part in pack if part.startswith("--create="))
            for step in (
                [sys.executable, "scripts/short_ptx.py", *ptx],
                pack,
                ["objcopy", "--update-section", f".nv_fatbin={fatbin}", str(obj)],
            ):
                code, printed = run(step)
                output += printed
                if code != 0:
                    return code, f"{shlex.join(step)}\n{output}"
        return 0, output

    @staticmethod
    def _last_seconds(obj: Path) -> float:
        try:
            return float(obj.with_suffix(".cmd").read_text().split("\n")[0])
        except (OSError, ValueError):
            return math.inf

    @staticmethod
    def _up_to_date(obj: Path, source: str, command: list[str]) -> bool:
        try:
            if obj.with_suffix(".cmd").read_text().split("\n")[1] != shlex.join(command):
                return False
            built = obj.stat().st_mtime_ns
            rule = obj.with_suffix(".d").read_text().replace("\\\n", " ")
            read = re.split(r"(?<!\\)\s+", rule.split(":", 1)[1].strip())
            return all(os.stat(p.replace("\\ ", " ")).st_mtime_ns <= built for p in [source, *read])
        except (OSError, IndexError):
            return False  # never built, or a header is gone


class KgoptBuildExt(build_ext):
    """Compiles kernels with nvcc alone, everything else with the C++ compiler and torch's headers.

    torch's BuildExtension would hand torch's include folders to nvcc too; without them a kernel file that includes a
    torch header does not compile, which is the rule.
    """

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        cuda: Cuda | None = ext.kgopt_cuda
        folder = ROOT / "build/objects" / (f"cuda-{cuda.version_text}-{ext.kgopt_archs}" if cuda else "cpu")
        cxx = shlex.split(os.environ.get("CXX") or "c++")
        includes = ["-Icsrc", f"-I{sysconfig.get_path('include')}"]
        includes += [f"-isystem{path}" for path in ext.include_dirs]
        cxx_command = [*cxx, *ext.extra_compile_args["cxx"], *includes]
        # Files that check arguments and launch: a tenth smaller in the wheel, and without a loop to vectorize.
        smaller = [*cxx_command, "-O2"]
        api = ext.kgopt_parts["api"] if cuda else ()
        commands = {s: smaller if s in api else cxx_command for s in ext.sources if not s.endswith(".cu")}
        if cuda:
            ccbin = ["-ccbin", cxx[-1]] if os.environ.get("CXX") else []
            nvcc_command = [str(cuda.nvcc), *ccbin, *ext.extra_compile_args["nvcc"]]
            for source in (s for s in ext.sources if s.endswith(".cu")):
                gencode = ext.kgopt_gencode
                if source in ext.kgopt_parts["one_ptx"]:
                    gencode = shared_ptx(gencode)
                elif source in ext.kgopt_parts["hopper"]:
                    gencode = from_hopper_on(gencode)
                has_ptx = any("code=compute_" in flag for flag in gencode)
                commands[source] = [*nvcc_command, *gencode, *(KEEP_PTX if has_ptx else ())]
        objects = Compiler(folder, jobs).compile(commands)

        target.parent.mkdir(parents=True, exist_ok=True)
        link = [
            *cxx,
            "-shared",
            "-o",
            str(target),
            *objects,
            *(f"-L{path}" for path in ext.library_dirs),
            *ext.extra_link_args,
            *(f"-l{name}" for name in ext.libraries),
        ]
        done = subprocess.run(link)
        if done.returncode != 0:
            die(f"linking failed: {shlex.join(link)}")
        # What is left undefined must be torch's, Python's or the system's; one of ours would only show at import.
        symbols = run_text(["nm", "-D", "-C", "--undefined-only", str(target)])
        ours = [line.split(maxsplit=1)[1] for line in symbols.splitlines() if "kgopt" in line]
        if ours:
            target.unlink()
            die("declared and called, but defined in no source file: " + "; ".join(ours))
        say(f"{target.name}: {target.stat().st_size / 2**20:.1f} MiB, {ext.kgopt_summary}")


class KgoptBuild(build):
    """Starts from an empty build_lib, so that a module that was deleted or renamed does not stay in the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# -------------------------------------------------------------------------------------------------------- extension


# Hidden visibility keeps every symbol but the module's entry points out of the process's namespace.
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-math-errno",
    "-fno-trapping-math",  # comparisons in a loop then become selects, and the loop vectorizes
    "-fopenmp-simd",  # "omp simd" pragmas alone, no OpenMP
    "-ffunction-sections",
    "-fdata-sections",
    "-Wall",
    "-Wno-maybe-uninitialized",  # gcc 12 sees ghosts in std::optional of a shared_ptr
]
LINK_FLAGS = [
    f"-Wl,--version-script={ROOT / 'csrc/exports.map'}",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--gc-sections",
    "-Wl,-z,relro,-z,now",
    "-s",
    # libtorch.so itself holds nothing, but it leads to libtorch_cuda where torch has one.
    *("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
]


def make_extension(version: str) -> Extension:
    cuda = find_cuda()
    if cuda:
        os.environ["CUDA_HOME"] = str(cuda.home)  # torch reads it when cpp_extension is imported
    torch_version = check_torch()
    defines = [
        f"-DPy_LIMITED_API={PY_LIMITED_API}",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f'-DKGOPT_VERSION="{version}"',
    ]
    more_cxx = shlex.split(os.environ.get("KGOPT_CXX_FLAGS", ""))
    ext = cpu_extension(defines, more_cxx) if cuda is None else cuda_extension(cuda, defines, more_cxx)
    ext.kgopt_cuda = cuda
    say(f"{ext.kgopt_summary}; headers of torch {torch_version}; {len(ext.sources)} source files")
    return ext


def check_torch() -> str:
    """The version of the torch to build against."""
    try:
        import torch
        import torch.utils.cpp_extension
    except ImportError as error:
        die(
            f"building needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or later, for its headers ({error}); "
            "with pip: install torch first, then pass --no-build-isolation"
        )
    torch_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if torch_version < MIN_TORCH:
        die(f"torch is {torch.__version__}, expected {MIN_TORCH[0]}.{MIN_TORCH[1]} or later")
    return torch.__version__


def cpu_extension(defines: list[str], more_cxx: list[str]) -> Extension:
    from torch.utils import cpp_extension

    ext = cpp_extension.CppExtension(
        "kgopt._C",
        read_sources()["module"],
        py_limited_api=True,
        extra_compile_args={"cxx": CXX_FLAGS + defines + more_cxx, "nvcc": []},
        extra_link_args=LINK_FLAGS,
    )
    ext.libraries = ["torch_cpu", "c10"]
    ext.kgopt_summary = "CPU-only"
    return ext


def cuda_extension(cuda: Cuda, defines: list[str], more_cxx: list[str]) -> Extension:
    from torch.utils import cpp_extension

    parts = read_sources()
    native = os.environ.get("KGOPT_CUDA") == "native"
    archs = os.environ.get("KGOPT_CUDA_ARCHS") or (";".join(native_archs()) if native else DEFAULT_ARCHS)
    gencode = arch_flags(archs, cuda)
    cpp_extension.CUDA_HOME = str(cuda.home)  # a CPU-only torch leaves it None; its headers are enough
    cuda_defines = ["-DUSE_CUDA", "-DKGOPT_CUDA"]
    facts = [f'-DKGOPT_ARCHS="{archs}"', f'-DKGOPT_CUDA_VERSION="{cuda.version_text}"']
    ext = cpp_extension.CUDAExtension(
        "kgopt._C",
        parts["module"] + parts["api"] + parts["kernels"],
        py_limited_api=True,
        extra_compile_args={
            "cxx": CXX_FLAGS + defines + cuda_defines + facts + more_cxx,
            "nvcc": nvcc_flags(cuda, cuda_defines),
        },
        extra_link_args=LINK_FLAGS,
    )
    # cudart is linked in; c10_cuda and torch_cuda would tie the wheel to a torch with CUDA.
    ext.libraries = ["torch_cpu", "c10", "cudart_static", "dl", "rt", "pthread"]
    ext.library_dirs = [str(cuda.lib), *ext.library_dirs]
    ext.include_dirs = [*ext.include_dirs, str(cuda.include)]
    ext.kgopt_gencode = gencode
    ext.kgopt_archs = re.sub(r"[^0-9a-zA-Z.]+", "-", archs)
    ext.kgopt_parts = parts
    ext.kgopt_summary = f"CUDA {cuda.version_text} from {cuda.home}, architectures {archs}"
    return ext


def nvcc_flags(cuda: Cuda, defines: list[str]) -> list[str]:
    return [
        "-std=c++17",
        "-O3",
        "--expt-relaxed-constexpr",
        # The host's part launches kernels: a third smaller, and it has no loops.
        "-Xcompiler=-Os,-fPIC,-fvisibility=hidden,-g0",
        "-Xfatbin=-compress-all",
        # The wheel is a quarter smaller; every driver of CUDA 13 can read it.
        *(["--compress-mode=size"] if cuda.version >= (13, 0) else []),
        "-Icsrc",
        *defines,
        *(["-lineinfo"] if os.environ.get("KGOPT_LINEINFO", "0") != "0" else []),
        *shlex.split(os.environ.get("KGOPT_NVCC_FLAGS", "")),
    ]


VERSION = read_version()
# Metadata commands (pip asks for them first) need no compiler and no torch.
BUILDS = any(
    command in sys.argv for command in ("build", "build_ext", "bdist_wheel", "install", "develop", "editable_wheel")
)

setup(
    version=VERSION,
    ext_modules=[make_extension(VERSION)] if BUILDS else [],
    cmdclass={"build": KgoptBuild, "build_ext": KgoptBuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
