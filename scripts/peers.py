"""Networks of published libraries, optimized, against what they were: the table of tests/peers, with counts.

    python scripts/peers.py [--device cuda] [WORD ...]

Every network whose name has one of the words (all without any) is compared in float64, contiguous and channels_last.
Exit status 1 where one differs.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import peers
from peers import compare
from peers.library import Peer, offline


def compared(peer: Peer, device: str) -> tuple[list[float], list[str], int]:
    """Differences in both formats, what is wrong, and the number of replaced sites."""
    model = peer.make().to(device)
    args, kwargs = (compare.to_device(part, device) for part in peer.inputs())
    expected = compare.outcome(model, args, kwargs)
    worst, wrong, sites = [], [], 0
    for name, channels_last in compare.FORMATS.items():
        try:
            apart, sites = compare.check(model, expected, args, kwargs, channels_last)
            worst.append(apart)
        except Exception as error:  # whatever a library's code raises is a finding
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return worst, wrong, sites


def main() -> int:
    """Prints a line a network and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--there", action="store_true", help="only say with the exit status whether all are installed")
    options = parser.parse_args()
    if options.there:
        return 0 if all(importlib.util.find_spec(library.name) for library in peers.libraries()) else 1
    warnings.simplefilter("ignore")
    offline()
    networks: collections.Counter[str] = collections.Counter()
    replaced: collections.Counter[str] = collections.Counter()
    missing: collections.Counter[str] = collections.Counter()
    findings, largest, start = 0, 0.0, time.perf_counter()
    for peer in peers.all_peers():
        if options.words and not any(word in peer.id for word in options.words):
            continue
        try:
            worst, wrong, sites = compared(peer, options.device)
        except ModuleNotFoundError as error:
            missing[f"{peer.library}: {error}"] += 1
            continue
        networks[peer.library] += 1
        replaced[peer.library] += sites
        findings += len(wrong)
        largest = max([largest, *worst])
        print(f"{peer.id:64s} {sites:4d} sites  {max(worst, default=float('nan')):.0e}", *wrong, sep="  ", flush=True)
    print(f"\n{'library':32s} networks  sites")
    for library, count in networks.items():
        print(f"{library:32s} {count:8d} {replaced[library]:6d}")
    for reason, count in missing.items():
        print(f"left out, {count} networks: {reason}")
    print(
        f"{sum(networks.values())} networks in 2 formats on {options.device}: {findings} differ, largest difference "
        f"{largest:.0e} of a tensor's largest element, {time.perf_counter() - start:.0f} s"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
