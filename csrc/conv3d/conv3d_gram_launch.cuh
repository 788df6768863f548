// From the Gram plan's numbers to a template instance of its kernel.
#pragma once

#include "../common/launch.h"
#include "conv3d_gram.h"
#include "conv3d_gram_kernel.cuh"

namespace kgopt {

template <typename Element, int kChannels>
Status launch_gram_instance(const GramParams& p, int64_t n, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(n * p.plan.slices));
  return launch_kernel<conv_gram_kernel<Element, kChannels>>("conv_gram_kernel", p, grid, kGramThreads,
                                                             p.plan.smem_bytes, stream);
}

template <typename Element>
Status launch_gram(const GramParams& p, int64_t n, cudaStream_t stream) {
  return p.plan.channels == 4 ? launch_gram_instance<Element, 4>(p, n, stream)
                              : launch_gram_instance<Element, 8>(p, n, stream);
}

}  // namespace kgopt
