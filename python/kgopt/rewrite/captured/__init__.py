"""The front end for captured graphs, behind ``torch.compile(backend="kgopt")``: what each rewrite of them asks.

``values`` (what a graph says of its tensors), ``writes`` (what its nodes write to), ``functional_norms`` (norms that
are written out), ``contest`` (op or compiler, for one site), ``whole_graphs`` (for the whole graph). The rewrites are
in ``passes``, their order is in :mod:`~kgopt.rewrite.backend`.
"""
