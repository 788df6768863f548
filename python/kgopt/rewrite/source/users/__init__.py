"""Users' classes and functions that are run on names: is one a norm, an activation, or nothing?

``derived`` reads subclasses of PyTorch's norms, ``small`` modules without parameters, and functions; ``reading`` has
the statements that both understand.
"""
