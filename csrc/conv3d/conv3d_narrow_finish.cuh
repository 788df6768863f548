// The end of a statistics pass of the kernels for narrow convolutions.
#pragma once

#include <cuda_runtime.h>

#include "../common/async.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/dtype.cuh"
#include "../common/reduce.cuh"
#include "conv3d_narrow_params.h"

namespace kgopt {

// What a later load then finds in L2.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Whether nobody wants this sample's statistics. Called by all threads before anything else.
__device__ __forceinline__ bool skips_sample(const NarrowStats& p, int64_t n) {
  if (!p.only) return false;
  wait_for_prerequisites();
  return p.only[n] == 0;
}

// What group_stats_finalize_kernel and group_norm_mean_kernel do, for the sample whose channels' moments are in
// `shared`. `groups` is room for a float2 of each group. Called by kThreads threads, the first of them 0.
template <int kThreads>
__device__ __forceinline__ void finish_sample(const NarrowStats& p, int64_t n, const Moments<float>* shared,
                                              float2* groups, int thread) {
  const GroupStatsFinalizeParams& f = p.finish;
  const int num_groups = static_cast<int>(f.g), channels = static_cast<int>(f.c) / num_groups;
  for (int g = thread; g < num_groups; g += kThreads) {
    Moments<float> m = shared[g * channels];
    for (int i = 1; i < channels; ++i) merge(m, shared[g * channels + i]);
    const float rstd = 1.f / sqrtf(m.m2 / m.count + static_cast<float>(f.eps));
    groups[g] = make_float2(m.mean, rstd);
    if (f.mean) static_cast<float*>(f.mean)[n * num_groups + g] = m.mean;
    if (f.rstd) static_cast<float*>(f.rstd)[n * num_groups + g] = rstd;
  }
  named_barrier(1, kThreads);
  if (thread >= 32) return;
  float sum = 0.f;
  for (int c = thread; c < f.c; c += 32) {
    const float2 statistics = groups[c / channels];
    const float weight = f.weight ? load_as<float>(f.weight, c, f.affine_dtype) : 1.f;
    const float bias = f.bias ? load_as<float>(f.bias, c, f.affine_dtype) : 0.f;
    if (f.channel_mean) static_cast<float*>(f.channel_mean)[n * f.c + c] = shared[c].mean;
    if (f.table) {
      static_cast<float4*>(f.table)[n * f.c + c] = make_float4(statistics.x, statistics.y, weight, bias);
    }
    sum += (shared[c].mean - statistics.x) * statistics.y * weight + bias;
  }
  if (!p.sample_mean) return;
  sum = warp_sum(sum);
  if (thread == 0) p.sample_mean[n] = sum / static_cast<float>(f.c);
}

// `shared` holds the moments of kColumns channels from each of kParts parts of the block. They are merged, always in
// the same order, and become the slice's partials or, where the block has seen all of its sample, the sample's
// statistics. bias(c): what was left out of the sums; it moves the mean and nothing else.
template <int kColumns, int kParts, int kThreads, typename Bias>
__device__ __forceinline__ void finish_stats(const NarrowStats& p, int64_t n, int64_t slice, int c_first, int c_valid,
                                             Moments<float>* shared, int thread, Bias bias) {
  static_assert(kParts > 1, "the groups' statistics take the place of the second part");
  named_barrier(1, kThreads);
  float* const out = p.partials + ((n * p.slices + slice) * p.c_out_total + c_first) * 3;
  for (int c = thread; c < c_valid; c += kThreads) {
    Moments<float> m = shared[c];
    for (int part = 1; part < kParts; ++part) merge(m, shared[part * kColumns + c]);
    m.mean += bias(c);
    if (p.finishes) {
      shared[c] = m;
    } else {
      out[c * 3] = m.mean;
      out[c * 3 + 1] = m.m2;
      out[c * 3 + 2] = m.count;
    }
  }
  if (!p.finishes) return;
  named_barrier(1, kThreads);
  finish_sample<kThreads>(p, n, shared, reinterpret_cast<float2*>(shared + kColumns), thread);
}

#endif

}  // namespace kgopt
