"""Capture a fused module in a CUDA graph and replay it: no launch overhead for small batches.

python examples/cuda_graph.py
"""

import sys

import torch

import kgopt.nn


def main() -> int:
    if not torch.cuda.is_available():
        print("this example needs a CUDA GPU")
        return 0
    torch.manual_seed(0)
    model = kgopt.nn.ConvTranspose3dReLUGroupNorm(64, 128, 3, 8).cuda().eval()
    x = torch.randn(1, 64, 16, 16, 16, device="cuda")
    with torch.no_grad():
        # Warm-up on a side stream, as for every capture.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)

        x.normal_()  # new input in the captured buffer
        graph.replay()
        print("same bits as a plain call:", torch.equal(y, model(x)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
