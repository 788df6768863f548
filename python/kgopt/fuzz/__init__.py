"""The search for faults: random calls and random networks, each checked against PyTorch and float64."""
