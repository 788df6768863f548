"""The command line, ``python -m kgopt``: demo, bench, fuzz and info.

Each subcommand lives in a module of its own, imported when it runs, so that ``--help`` and ``info`` need nothing beyond
torch. What a subcommand needs more is named in one line, with the pip command that brings it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kgopt.cli._optional import MissingPackageError

__all__ = ["build_parser", "main"]

_DEMO = """\
Runs the three pipelines on real input: 3D patches of the MRI volume inside the nibabel package, tiles of the
photographs inside scikit-image (or scikit-learn). gamma and beta are random, with a fixed seed. Each kgopt module loads
the state_dict of the plain PyTorch model and is compared with it, and both with float64. On a GPU the headline
shapes follow. The exit status is 1 when an error exceeds twice PyTorch's own.
"""

_BENCH = """\
Measures kgopt beside eager PyTorch, eager channels_last, torch.compile and its max-autotune mode, in one run: medians,
caches flushed between runs, cuDNN autotuned, the same TF32 setting for all. The floor of each row comes from the bytes
and operations that it cannot do without, at the copy bandwidth and matmul rates measured in the same run.

suites:
  pipelines   the three fused pipelines at their headline shapes
  groupnorm   GroupNorm and its activation at real models' shapes
  channelnorm norms over channels (RMSNorm, F.normalize, LayerNorm) and their activation at real models' shapes
  conv        convolutions at real models' shapes
  ops         activations, logsumexp, mean, group statistics
  models      whole models as their libraries have them, through kgopt.optimize: MONAI SegResNet, pytorch3dunet
              UNet3D, the decoders of diffusers' AutoencoderKL and AutoencoderKLHunyuanVideo; with --backward also a
              training step of the first two. A library that is not installed is skipped, with the pip command
  sweep       GroupNorm at random shapes, forward and backward, against the better of eager and torch.compile, which
              takes about 3 seconds a shape to compile: --count and --budget bound that
  scaling     the first and third pipeline at batches from 1 to 1024 and edges from 8 to 128, eager, kgopt, and kgopt's
              launches replayed as a CUDA graph: cost against work
  chains      random convolutions of few channels with what the first or third pipeline does after them, --count of them
  convs       random convolutions (8 to 512 channels, kernels of 1 to 5, groups, transposed, 2D and 3D) beside cuDNN,
              autotuned, both in both memory formats
  zoo         networks of users and networks drawn by --seed, in the --ways of PyTorch and of kgopt, inference and
              training steps, each way in a process that may fail; times by the clock; --seconds bounds it (docs/zoo.md)

dtypes:
  tf32        float32 tensors, TF32 allowed in convolutions (PyTorch's default)
  fp32        float32 tensors, TF32 off
  bf16, fp16  as named
  autocast    float32 tensors under torch.autocast(bfloat16): training steps of suite models
  training    suite zoo: training steps under the autocast that people train a network with

examples:
  python -m kgopt bench --suite models --backward --json models.json --plot models.png
  python -m kgopt bench --suite models --case SegResNet --dtype bf16 --impl compile,kgopt
  python -m kgopt bench --suite zoo --ways eager,optimize,graph --dtype bf16 --seconds 500 --json zoo.json
  python -m kgopt bench --suite sweep --count 60 --budget 300 --json sweep.json --plot sweep.png
"""

_INFO = """\
Prints versions, what was compiled into kgopt, the GPUs seen, and for typical convolutions which path an op
takes on each device, with the reason.
"""


_FUZZ = """\
Draws calls of every op, function, module and pipeline, and whole networks through kgopt.optimize: dtypes, sizes,
layouts, values, gradients. Each is checked: against float64 by the tolerance rule (twice PyTorch's own error), NaN and
infinities in PyTorch's places, equal bits when called twice, PyTorch's shapes, dtypes and strides, PyTorch's refusals
refused. Each worker is a process of its own: one that dies or hangs is a finding, and the search goes on. Every finding
is shrunk and printed as Python. The exit status is 1 when there are findings. The same seed draws the same cases,
however many workers there are.

examples:
  python -m kgopt fuzz --calls 5000 --seed 1
  python -m kgopt fuzz --seconds 600 --kind all --gpus 0,1 --workers 24 --json fuzz.json
  python -m kgopt fuzz --op group_norm --op conv2d --seconds 60
  python -m kgopt fuzz --case '{"kind": "ops", ...}'
"""


def _comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def build_parser() -> argparse.ArgumentParser:
    """The argument parser of ``python -m kgopt``."""
    parser = argparse.ArgumentParser(
        prog="python -m kgopt",
        description="kgopt: GroupNorm convolution networks at the speed of the memory and the tensor cores.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    _add_demo(add("demo", "the three pipelines on real images, compared with PyTorch", _DEMO))
    _add_bench(add("bench", "measure kgopt beside PyTorch and the floor", _BENCH))
    _add_fuzz(add("fuzz", "search for faults with random calls and networks", _FUZZ))
    _add_info(add("info", "versions, what was compiled in, GPUs, and which path ops take", _INFO))
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--out", metavar="PNG", default="kgopt_demo.png", help="where the chart goes (%(default)s)")
    demo.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    demo.add_argument("--seed", type=int, default=0, help="seed of weights, gamma and beta (%(default)s)")
    demo.add_argument("--quick", action="store_true", help="fewer patches, shorter timing, no headline shapes")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    suites = ["pipelines", "groupnorm", "channelnorm", "conv", "ops", "models", "sweep", "scaling", "chains", "convs",
              "zoo"]  # fmt: skip
    bench.add_argument("--suite", choices=suites, default="pipelines", help="what to measure (%(default)s)")
    bench.add_argument("--json", metavar="F", help="write the measured rows here, after every case")
    bench.add_argument("--plot", metavar="F", help="write a chart of the rows here (.png, .svg or .pdf)")
    bench.add_argument("--plot-dtype", metavar="D", help="dtype in the chart (default: the first measured)")
    bench.add_argument("--from-json", metavar="F", nargs="+",
                       help="measure nothing: print and plot the rows of these files; --json joins them")  # fmt: skip
    bench.add_argument("--shard", metavar="I/N",
                       help="measure only every N-th case from the I-th: several GPUs share a suite, and --from-json "
                       "joins the files")  # fmt: skip
    bench.add_argument("--jobs", type=int, metavar="N",
                       help="N processes compile the baselines side by side, then measure one at a time on each GPU; "
                       "where nothing can be compiled ahead (models, convs) at most one for each GPU")  # fmt: skip
    bench.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    _add_what(bench)
    _add_how_long(bench)
    bench.set_defaults(done=frozenset(), stop_at=None)  # see run_bench


def _add_what(bench: argparse.ArgumentParser) -> None:
    """Dtypes, cases, implementations."""
    bench.add_argument("--dtype", type=_comma_list, metavar="LIST",
                       help="comma-separated (default: tf32,bf16; for pipelines also fp32; for models with --backward "
                       "also autocast; for sweep fp32,bf16,fp16; for zoo bf16,training,fp16,tf32; on CPU else "
                       "fp32)")  # fmt: skip
    bench.add_argument(
        "--case",
        metavar="TEXT",
        help="only cases whose name contains TEXT (models, zoo: names or parts of them, comma-separated)",
    )
    bench.add_argument("--impl", type=_comma_list, metavar="LIST",
                       help="only these implementations, as the rows name them; eager is always measured "
                       "(for example compile,kgopt,kgopt_compile)")  # fmt: skip
    bench.add_argument("--ways", type=_comma_list, metavar="LIST",
                       help="zoo: only these of eager,channels_last,optimize,graph,compile,backend,optimize_compile,"
                       "reduce_overhead,backend_reduce_overhead,max_autotune, which are all")  # fmt: skip
    bench.add_argument("--profile", action="store_true",
                       help="zoo: no rows; for each of --case and --ways (eager,compile,backend,optimize) which "
                       "operators and kernels one call's time goes to")  # fmt: skip
    bench.add_argument("--backward", action="store_true",
                       help="also measure the backward pass (pipelines, models: a training step); sweep "
                       "always does")  # fmt: skip
    bench.add_argument("--quick", action="store_true",
                       help="batch / 16 (models: few channels), one input set, short timing, no compile")  # fmt: skip
    bench.add_argument("--no-compile", action="store_true", help="leave out every torch.compile baseline")
    bench.add_argument("--max-autotune", choices=["first", "all", "none"], default="first",
                       help="torch.compile max-autotune for the first dtype, for all, or not at all (%(default)s; "
                       "on a GPU, suite pipelines)")  # fmt: skip
    bench.add_argument("--no-max-autotune", dest="max_autotune", action="store_const", const="none",
                       help="the same as --max-autotune none")  # fmt: skip


def _add_how_long(bench: argparse.ArgumentParser) -> None:
    """Budgets, and how many random cases."""
    bench.add_argument("--budget", type=float, metavar="S",
                       help="after S seconds start no further torch.compile baseline")  # fmt: skip
    bench.add_argument("--stop", type=float, metavar="S", help="after S seconds start no further measurement at all")
    bench.add_argument("--resume", action="store_true", help="keep the rows of --json and measure what they lack")
    bench.add_argument("--count", type=int, default=None, metavar="N",
                       help="how many random shapes, from the first (sweep, convs: 200, chains: 100), or drawn "
                       "networks (zoo: 60)")  # fmt: skip
    bench.add_argument("--seed", type=int, default=0, metavar="N",
                       help="sweep, chains, convs, zoo: seed of the shapes (%(default)s)")  # fmt: skip
    bench.add_argument("--seconds", type=float, metavar="S",
                       help="zoo: for all of it; the row at hand is given up then, the others stay")  # fmt: skip
    bench.add_argument("--way-seconds", type=float, default=240.0, metavar="S",
                       help="zoo: for one row, after which its process is ended (%(default)s)")  # fmt: skip
    bench.add_argument("--max-bytes", type=float, metavar="B",
                       help="sweep: the largest tensor (default: 1 GiB; with --quick or on a CPU 1 MiB)")  # fmt: skip
    bench.add_argument(
        "--commit", metavar="HASH", help="the commit to note in the rows (default: $KGOPT_COMMIT, then git)"
    )


def _add_fuzz(fuzz: argparse.ArgumentParser) -> None:
    fuzz.add_argument("--seconds", type=float, metavar="N", help="start no case after N seconds")
    fuzz.add_argument("--calls", type=int, metavar="N", help="check N cases (default: 2000, without --seconds)")
    fuzz.add_argument("--seed", type=int, metavar="S", help="of the cases (default: a new one, which is printed)")
    fuzz.add_argument(
        "--first",
        type=int,
        default=0,
        metavar="I",
        help="leave out the seed's first I cases: the next part of a run that is done in parts",
    )
    fuzz.add_argument(
        "--shrink-seconds",
        type=float,
        default=300.0,
        metavar="N",
        help="at most N seconds for the smallest forms of what failed (default: 300)",
    )
    fuzz.add_argument("--op", action="append", metavar="NAME", help="only this op (may be given several times)")
    fuzz.add_argument("--kind", choices=["ops", "networks", "all"], default="ops",
                      help="calls of ops, networks, or both (%(default)s)")  # fmt: skip
    fuzz.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    fuzz.add_argument("--gpus", metavar="LIST", help="the GPUs that the workers share, for example 0,1")
    fuzz.add_argument("--workers", type=int, metavar="W", help="processes (default: one a core, at most 12 a GPU)")
    fuzz.add_argument(
        "--json", metavar="F", help="write seed, device, versions, counts and findings here, as they come"
    )
    fuzz.add_argument("--case", metavar="JSON", help="check this case alone, and print it as Python (or a file of it)")


def _add_info(info: argparse.ArgumentParser) -> None:
    info.add_argument("--json", action="store_true", help="print JSON")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status: 0, 1 for a result out of tolerance, 2 for a bad call."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "demo":
            from kgopt.cli.demo import run_demo

            return run_demo(args)
        if args.command == "bench":
            from kgopt.cli.bench import run_bench

            return run_bench(args)
        if args.command == "fuzz":
            from kgopt.cli.fuzz import run_fuzz

            return run_fuzz(args)
        from kgopt.cli.info import run_info

        return run_info(args)
    except (MissingPackageError, ValueError, OSError) as error:
        print(f"kgopt {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
