// The end of a statistics pass of the kernels for few channels.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "conv3d/few_channels/params.h"

namespace kgopt {

// What a later load then finds in L2.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A value whose type is known only now: a load without branches, which nothing waits for until the value is wanted.
struct RawValue {
  uint32_t bits;
  bool is_there;

  __device__ __forceinline__ RawValue(const void* p, int64_t i, int size, bool wanted) : is_there(p && wanted) {
    const char* const at = static_cast<const char*>(p) + i * size;
    asm("{\n .reg .pred p, q;\n .reg .b16 h;\n setp.eq.s32 p, %2, 2;\n setp.eq.s32 q, %2, 4;\n mov.u32 %0, 0;\n"
        " mov.b16 h, 0;\n @p ld.global.nc.b16 h, [%1];\n @p cvt.u32.u16 %0, h;\n @q ld.global.nc.b32 %0, [%1];\n}"
        : "=&r"(bits)
        : "l"(at), "r"(is_there ? size : 0));
  }
  __device__ __forceinline__ float as(Dtype dtype, float otherwise) const {
    const float half = dtype == Dtype::kFloat16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits)))
                                                : __uint_as_float(bits << 16);
    return !is_there ? otherwise : dtype == Dtype::kFloat32 ? __uint_as_float(bits) : half;
  }
  template <typename T>
  __device__ __forceinline__ float as(float otherwise) const {
    return as(std::is_same_v<T, float>    ? Dtype::kFloat32
              : std::is_same_v<T, __half> ? Dtype::kFloat16
                                          : Dtype::kBFloat16,
              otherwise);
  }
};

// merge() without a branch: quotients of counts then need not wait for one another.
__device__ __forceinline__ void merge_part(Moments<float>& a, const Moments<float>& b) {
  const float total = a.count + b.count, fraction = __fdividef(b.count, fmaxf(total, 1.f)), delta = b.mean - a.mean;
  a.m2 += fmaf(delta * delta * a.count, fraction, b.m2);
  a.mean = fmaf(delta, fraction, a.mean);
  a.count = total;
}

// Weight and bias of a channel of the norm.
__device__ __forceinline__ float2 norm_affine(const GroupStatsFinalizeParams& f, int c) {
  return make_float2(f.weight ? load_as<float>(f.weight, c, f.affine_dtype) : 1.f,
                     f.bias ? load_as<float>(f.bias, c, f.affine_dtype) : 0.f);
}

// Whether nobody wants this sample's statistics. Called by all threads before anything else.
__device__ __forceinline__ bool skips_sample(const FewChannelsStats& p, int64_t n) {
  if (!p.only) return false;
  wait_for_prerequisites();
  return p.only[n] == 0;
}

// What group_stats_finalize_kernel and group_norm_mean_kernel do, for the sample whose channels' moments are in
// `shared`. `groups` is room for a float2 of each group. Called by kThreads threads, the first of them 0. affine(c):
// weight and bias of the norm.
template <int kThreads, typename Affine>
__device__ __forceinline__ void finish_sample(const FewChannelsStats& p, int64_t n, const Moments<float>* shared,
                                              float2* groups, int thread, Affine affine) {
  const GroupStatsFinalizeParams& f = p.finish;
  const int num_groups = static_cast<int>(f.g), channels = static_cast<int>(f.c) / num_groups;
  for (int g = thread; g < num_groups; g += kThreads) {
    Moments<float> m = shared[g * channels];
    for (int i = 1; i < channels; ++i) merge_part(m, shared[g * channels + i]);
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
    const float2 scale = affine(c);
    if (f.channel_mean) static_cast<float*>(f.channel_mean)[n * f.c + c] = shared[c].mean;
    if (f.table) {
      static_cast<float4*>(f.table)[n * f.c + c] = make_float4(statistics.x, statistics.y, scale.x, scale.y);
    }
    sum += (shared[c].mean - statistics.x) * statistics.y * scale.x + scale.y;
  }
  if (!p.sample_mean) return;
  sum = warp_sum(sum);
  if (thread == 0) p.sample_mean[n] = sum / static_cast<float>(f.c);
}

// `shared` holds the moments of kColumns channels from each of kParts parts of the block. They are merged, always in
// the same order, and become the slice's partials or, where the block has seen all of its sample, the sample's
// statistics. bias(c): what was left out of the sums; it moves the mean and nothing else.
template <int kColumns, int kParts, int kThreads, typename Bias, typename Affine>
__device__ __forceinline__ void finish_stats(const FewChannelsStats& p, int64_t n, int64_t slice, int c_first,
                                             int c_valid, Moments<float>* shared, int thread, Bias bias,
                                             Affine affine) {
  static_assert(kParts > 1, "the groups' statistics take the place of the second part");
  static_assert(kThreads >= kColumns);
  const int c = thread;
  const float own_bias = c < c_valid ? bias(c) : 0.f;  // on its way while the others come
  named_barrier(1, kThreads);
  float* const out = p.partials + ((n * p.slices + slice) * p.c_out_total + c_first) * 3;
  if (c < c_valid) {
    Moments<float> m = shared[c];
#pragma unroll
    for (int part = 1; part < kParts; ++part) merge_part(m, shared[part * kColumns + c]);
    m.mean += own_bias;
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
  finish_sample<kThreads>(p, n, shared, reinterpret_cast<float2*>(shared + kColumns), thread, affine);
}

// The same with the norm's parameters from memory.
template <int kColumns, int kParts, int kThreads, typename Bias>
__device__ __forceinline__ void finish_stats(const FewChannelsStats& p, int64_t n, int64_t slice, int c_first,
                                             int c_valid, Moments<float>* shared, int thread, Bias bias) {
  finish_stats<kColumns, kParts, kThreads>(p, n, slice, c_first, c_valid, shared, thread, bias,
                                           [&](int c) { return norm_affine(p.finish, c); });
}

#endif

}  // namespace kgopt
