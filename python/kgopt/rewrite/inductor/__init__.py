"""What Inductor makes of kgopt's ops: passes over its graphs, and what it is told of memory formats.

``lowering`` (formats of the ops), ``moments`` (from a convolution to its norm), ``weights`` (of convolutions in
channels_last), ``decomposed`` (what ATen computes slowly).
"""
