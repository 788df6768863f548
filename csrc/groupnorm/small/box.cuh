// What the blocks of a cluster exchange.
#pragma once

#include "common/device/async.cuh"
#include "groupnorm/small/params.h"

namespace kgopt {

// Whether the code that is being compiled may run in clusters: no plan has any before Hopper.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif

// What the blocks of a cluster tell each other.
struct SmallBox {
  float4 parts[kSmallMaxBlocks];
  uint64_t arrived;
};

__device__ __forceinline__ void open_box(SmallBox* box, uint32_t blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    barrier_init(&box->arrived, 1);
    barrier_init_fence();
    barrier_expect_bytes(&box->arrived, blocks * sizeof(float4));
  }
  __syncthreads();
  cluster_arrive();
#endif
}
// Afterwards box->parts has what each block said.
__device__ __forceinline__ void exchange(SmallBox* box, uint32_t blocks, uint32_t rank, float4 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cluster_wait();
  if (threadIdx.x < blocks) cluster_send(v, box->parts + rank, &box->arrived, threadIdx.x);
  cluster_barrier_wait(&box->arrived, 0);
#endif
}
// Sums over the cluster, in the order of the blocks.
__device__ __forceinline__ void exchange(SmallBox* box, uint32_t blocks, uint32_t rank, float (&v)[2]) {
  exchange(box, blocks, rank, make_float4(v[0], v[1], 0.f, 0.f));
  v[0] = v[1] = 0.f;
  for (uint32_t r = 0; r < blocks; ++r) {
    v[0] += box->parts[r].x;
    v[1] += box->parts[r].y;
  }
}

}  // namespace kgopt
