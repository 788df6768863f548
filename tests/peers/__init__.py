"""Networks of published libraries, built by their own constructors, optimized and compared with what they were.

``library.py`` says what an entry is, ``compare.py`` what is compared, ``norms.py`` turns the norms of networks that
have no GroupNorm into one; the other files are tables, a file a library. One more network is one more line in a table.
"""

from __future__ import annotations

import importlib

from peers.library import Library, Peer

_TABLES = (
    "monai_nets",
    "diffusers_nets",
    "timm_nets",
    "smp_nets",
    "nnunet_nets",
    "pytorch3dunet_nets",
    "torchvision_nets",
    "transformers_nets",
)


def libraries() -> list[Library]:
    """Every table, without importing the library it is about."""
    return [importlib.import_module(f"peers.{name}").LIBRARY for name in _TABLES]


def all_peers() -> list[Peer]:
    """Every network of every table.

    Raises:
        ValueError: two networks of one library have the same name.
    """
    found = [peer for library in libraries() for peer in library.peers]
    names = [peer.id for peer in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"networks named twice: {sorted(twice)}")
    return found
