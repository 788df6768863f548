// From the Gram plan's numbers to a template instance of its kernel.
#pragma once

#include "../common/launch.h"
#include "conv3d_gram.h"
#include "conv3d_gram_kernel.cuh"

namespace kgopt {

template <typename Element, bool kAccurate, int kChannels>
Status launch_gram_blocks(const GramParams& p, int64_t n, cudaStream_t stream) {
  constexpr char kName[] = "conv_gram_kernel";
  const dim3 grid(static_cast<unsigned>(n * p.plan.slices));
  constexpr int kThreads = gram_threads(kAccurate);
  const int smem = p.plan.smem_bytes;
  switch (p.plan.blocks) {
    case 1:
      return launch_kernel<conv_gram_kernel<Element, kChannels, 1, kAccurate>>(kName, p, grid, kThreads, smem, stream);
    case 2:
      return launch_kernel<conv_gram_kernel<Element, kChannels, 2, kAccurate>>(kName, p, grid, kThreads, smem, stream);
    case 3:
      return launch_kernel<conv_gram_kernel<Element, kChannels, 3, kAccurate>>(kName, p, grid, kThreads, smem, stream);
  }
  return Status::Unsupported(kName, "no instance for this many blocks");
}

template <typename Element, bool kAccurate>
Status launch_gram(const GramParams& p, int64_t n, cudaStream_t stream) {
  return p.plan.channels == 4 ? launch_gram_blocks<Element, kAccurate, 4>(p, n, stream)
                              : launch_gram_blocks<Element, kAccurate, 8>(p, n, stream);
}

}  // namespace kgopt
