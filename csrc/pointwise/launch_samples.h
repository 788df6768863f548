// Launches of kernels that number their threads in 32 bits, whose divisions are short.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/status.h"

namespace kgopt {

// launch(first sample, samples, blocks) for all of `n` samples, or where these have too many threads, for some at a
// time. A thread's number is blockIdx.x * block_threads + threadIdx.x.
template <typename Launch>
Status launch_samples(const char* name, int64_t n, int64_t threads_of_sample, int block_threads, Launch launch) {
  const int64_t most = ((int64_t(1) << 32) - block_threads) / threads_of_sample;
  if (most == 0) return Status::Unsupported(name, "a sample has too many elements for one launch");
  for (int64_t first = 0; first < n; first += most) {
    const int64_t samples = std::min(most, n - first);
    launch(first, samples, static_cast<unsigned>((samples * threads_of_sample + block_threads - 1) / block_threads));
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  }
  return Status::Ok();
}

}  // namespace kgopt
