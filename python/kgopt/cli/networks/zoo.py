"""All networks of the zoo by name."""

from __future__ import annotations

import importlib
import re

from kgopt.cli.networks.case import Entry
from kgopt.cli.networks.drawn import Drawn, drawn_networks
from kgopt.cli.networks.network import Network

__all__ = ["find_network", "library_networks", "networks"]

_TABLES = ("of_volumes", "of_monai", "of_diffusers", "of_images")


def _tables() -> list[list[Network]]:
    return [importlib.import_module(f"kgopt.cli.networks.{table}").NETWORKS for table in _TABLES]


def library_networks() -> list[Network]:
    """Those of libraries, without importing one of them."""
    return [network for table in _tables() for network in table]


def networks(count: int, seed: int) -> list[Entry]:
    """Those of libraries and ``count`` drawn ones, mixed evenly: a run that is cut short has some of each."""
    lists: list[list[Entry]] = [[*table] for table in _tables()]
    lists.append([*drawn_networks(count, seed)])
    placed = [((i + 0.5) / len(some), n, entry) for n, some in enumerate(lists) for i, entry in enumerate(some)]
    return [entry for _, _, entry in sorted(placed, key=lambda place: place[:2])]


def find_network(name: str) -> Entry:
    """The network of this name.

    Raises:
        ValueError: there is none.
    """
    match = re.fullmatch(r"drawn (\d+)/(\d+)", name)
    if match:
        return Drawn(int(match[1]), int(match[2]))
    for network in library_networks():
        if network.name == name:
            return network
    raise ValueError(f"the zoo has no network {name!r}")
