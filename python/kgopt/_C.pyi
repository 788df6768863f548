"""The compiled module: importing it registers torch.ops.kgopt; it holds no Python functions of its own."""
