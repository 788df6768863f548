"""What runs in place of a norm and of the chain around it, and the checks before it, at every call.

``sites`` has both, ``arguments`` what an op is given; ``torch_norms`` and ``channel_norms`` (with ``channels``) are the
classes of norms, ``calls`` is norms that are called as functions. ``carry`` brings moments from a convolution to the
norm behind it, ``spared`` copies inputs that a model writes to.
"""
