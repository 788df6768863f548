"""What PyTorch has: what its own code looks up, whether somebody replaced it, and who watches while it runs.

``originals`` are its functions, methods and classes, ``places`` compares what an answer rests on at each call,
``watching`` sees hooks, modes, tracers and transforms.
"""
