// One kernel for every reduction [outer][reduced][inner] -> [outer][inner]: a block is a box of threads, along inner
// (coalesced where inner > 1), along reduced (coalesced where inner == 1) and along outer (where both are small).
// A reduction has: Acc, kBatch-wise `add`, `merge` and `result`, and a state of two numbers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/dtype.cuh"
#include "reduce/reduce.h"

namespace kgopt {

template <typename T, typename R>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const __grid_constant__ ReduceParams p, ReduceGeometry g) {
  using Acc = acc_t<T>;
  __shared__ R shared[kReduceThreads];
  const int ti = threadIdx.x % g.along_inner;
  const int tr = threadIdx.x / g.along_inner % g.along_reduced;
  const int to = threadIdx.x / (g.along_inner * g.along_reduced);
  const int64_t block = blockIdx.x;
  const int64_t i = block % g.inner_blocks * g.along_inner + ti;
  const int64_t o = block / g.inner_blocks % g.outer_blocks * g.along_outer + to;
  const int64_t slice = block / (g.inner_blocks * g.outer_blocks);
  const bool mine = i < p.inner && o < p.outer;

  R state;
  if (mine) {
    const T* const x = static_cast<const T*>(p.x) + o * p.reduced * p.inner + i;
    const int64_t end = min((slice + 1) * p.slice_length, p.reduced);
    for (int64_t r = slice * p.slice_length + tr; r < end; r += int64_t(kReduceBatch) * g.along_reduced) {
      Acc batch[kReduceBatch];
      int count = 0;
#pragma unroll
      for (int b = 0; b < kReduceBatch; ++b) {
        const int64_t at = r + int64_t(b) * g.along_reduced;
        if (at < end) {
          batch[b] = to_acc(x[at * p.inner]);
          count = b + 1;
        }
      }
      state.add(batch, count);
    }
  }
  shared[threadIdx.x] = state;
  for (int half = g.along_reduced / 2; half > 0; half /= 2) {
    __syncthreads();
    if (tr < half) shared[threadIdx.x].merge(shared[threadIdx.x + half * g.along_inner]);
  }
  if (tr == 0 && mine) {
    state = shared[threadIdx.x];
    const int64_t at = o * p.inner + i;
    if (p.slices == 1) {
      static_cast<T*>(p.y)[at] = from_acc<T>(state.result(Acc(p.reduced)));
    } else {
      Acc* const out = static_cast<Acc*>(p.partials) + (slice * p.outer * p.inner + at) * 2;
      out[0] = state.a;
      out[1] = state.b;
    }
  }
}

template <typename T, typename R>
__global__ void __launch_bounds__(kReduceThreads) reduce_merge_kernel(const __grid_constant__ ReduceParams p) {
  using Acc = acc_t<T>;
  const int64_t results = p.outer * p.inner;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < results;
       at += int64_t(gridDim.x) * blockDim.x) {
    R state;
    for (int64_t slice = 0; slice < p.slices; ++slice) {
      const Acc* const in = static_cast<const Acc*>(p.partials) + (slice * results + at) * 2;
      R part;
      part.a = in[0];
      part.b = in[1];
      state.merge(part);
    }
    static_cast<T*>(p.y)[at] = from_acc<T>(state.result(Acc(p.reduced)));
  }
}

template <typename T, typename R>
Status launch_reduce_typed(const char* name, const ReduceParams& p, cudaStream_t stream) {
  if (p.outer * p.inner == 0) return Status::Ok();
  const ReduceGeometry g = reduce_geometry(p);
  const int64_t blocks = g.inner_blocks * g.outer_blocks * p.slices;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "x has too many elements for one launch");
  reduce_kernel<T, R><<<static_cast<unsigned>(blocks), kReduceThreads, 0, stream>>>(p, g);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && p.slices > 1) {
    const int64_t merge_blocks = std::min<int64_t>((p.outer * p.inner + kReduceThreads - 1) / kReduceThreads, 4096);
    reduce_merge_kernel<T, R><<<static_cast<unsigned>(merge_blocks), kReduceThreads, 0, stream>>>(p);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

template <template <typename> class R>
Status launch_reduction(const char* name, const ReduceParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, { status = launch_reduce_typed<T, R<acc_t<T>>>(name, p, stream); });
  return status;
}

}  // namespace kgopt
