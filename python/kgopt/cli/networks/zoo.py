"""All networks of the zoo by name."""

from __future__ import annotations

import importlib
import re

from kgopt.cli.networks.case import Entry
from kgopt.cli.networks.drawn import Drawn, drawn_networks
from kgopt.cli.networks.network import Network

__all__ = ["find_network", "library_networks", "networks"]

_TABLES = ("of_volumes", "of_monai", "of_diffusers", "of_images")


def library_networks() -> list[Network]:
    """Those of libraries, without importing one of them."""
    return [n for table in _TABLES for n in importlib.import_module(f"kgopt.cli.networks.{table}").NETWORKS]


def networks(count: int, seed: int) -> list[Entry]:
    """Those of libraries, a library after the other in turn, then ``count`` drawn ones."""
    return [*library_networks(), *drawn_networks(count, seed)]


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
