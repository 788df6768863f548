"""What PyTorch has: what its own code looks up, whether somebody replaced it, and who watches while it runs."""
