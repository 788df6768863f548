// Moments and sums across a warp or a block, always merged in the same order: the same input gives the same bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kgopt {

// Count, mean and sum of squared deviations of a set of values.
template <typename Acc>
struct Moments {
  Acc mean = 0, m2 = 0, count = 0;
};

// Divisions by counts, which are far from 2^126, and roots of variances, without what IEEE rounding needs for numbers
// that neither is: each kernel would have a copy of that.
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }
__device__ __forceinline__ float root(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double reciprocal_root(double x) { return 1 / sqrt(x); }
__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
// Rounded as a division would, but for rare counts: a factor of many sums, whose error would add up.
__device__ __forceinline__ double reciprocal_of_count(double n) { return 1 / n; }
__device__ __forceinline__ float reciprocal_of_count(float n) {
  const float r = __fdividef(1.f, n);
  return fmaf(fmaf(-n, r, 1.f), r, r);
}

// An origin of sums: one value that is far from the others does not cost those their digits.
__device__ __forceinline__ float median(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }

// Chan, Golub, LeVeque 1983.
template <typename Acc>
__device__ __forceinline__ void merge(Moments<Acc>& a, const Moments<Acc>& b) {
  const Acc total = a.count + b.count;
  if (b.count == Acc(0)) return;
  const Acc delta = b.mean - a.mean;
  const Acc fraction = quotient(b.count, total);
  a.mean += delta * fraction;
  a.m2 += b.m2 + delta * delta * a.count * fraction;
  a.count = total;
}

// Sums of values shifted by one of them, so that an offset common to all does not cancel.
template <typename Acc>
struct ShiftedSums {
  Acc shift = 0, sum = 0, sum_sq = 0;

  __device__ __forceinline__ void add(Acc x) {
    const Acc v = x - shift;
    sum += v;
    sum_sq += v * v;
  }
  __device__ __forceinline__ Moments<Acc> moments(Acc count) const {
    Moments<Acc> m;
    if (count == Acc(0)) return m;
    m.mean = shift + quotient(sum, count);
    m.m2 = sum_sq - quotient(sum * sum, count);
    if (m.m2 < Acc(0)) m.m2 = 0;
    m.count = count;
    return m;
  }
};

template <typename Acc>
__device__ __forceinline__ Moments<Acc> shuffle_xor(const Moments<Acc>& m, int mask) {
  Moments<Acc> r;
  r.mean = __shfl_xor_sync(0xffffffffu, m.mean, mask);
  r.m2 = __shfl_xor_sync(0xffffffffu, m.m2, mask);
  r.count = __shfl_xor_sync(0xffffffffu, m.count, mask);
  return r;
}

// Merges the lanes that differ in the bits first_mask, 2 * first_mask, ... 16. The merge is not symmetric in its
// rounding, so the lower lane's share always comes first: all lanes end with the same bits.
template <typename Acc>
__device__ __forceinline__ Moments<Acc> warp_merge(Moments<Acc> m, int first_mask = 1) {
  const int lane = threadIdx.x & 31;
  for (int mask = first_mask; mask <= 16; mask *= 2) {
    Moments<Acc> other = shuffle_xor(m, mask);
    if (lane & mask) {
      merge(other, m);
      m = other;
    } else {
      merge(m, other);
    }
  }
  return m;
}

// The same for `lanes` neighbouring lanes that all count `count` values: half the work.
__device__ __forceinline__ Moments<float> warp_merge_equal(float mean, float m2, float count, int lanes = 32) {
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) {
    const float delta = __shfl_xor_sync(0xffffffffu, mean, mask) - mean;
    m2 += __shfl_xor_sync(0xffffffffu, m2, mask) + delta * delta * (0.5f * count);
    mean += 0.5f * delta;
    count *= 2.f;
  }
  return {mean, m2, count};
}

template <typename Acc>
__device__ __forceinline__ Acc warp_sum(Acc v) {
  for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
  return v;
}

// The warp's moments, valid in every lane, where every lane brings up to kOwn sets that are already there: no divisions
// but one. Means are taken relative to the first lane's, which must count something; `count` is the counts' sum.
template <int kOwn>
__device__ __forceinline__ Moments<float> warp_pool(const Moments<float> (&own)[kOwn], float count) {
  const float origin = __shfl_sync(0xffffffffu, own[0].mean, 0);
  float sum = 0.f, m2 = 0.f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i].count * (own[i].mean - origin);
  const float offset = __fdividef(warp_sum(sum), count);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float d = own[i].mean - origin - offset;
    m2 += own[i].m2 + own[i].count * (d * d);
  }
  return {origin + offset, warp_sum(m2), count};
}

// The whole block's moments, valid in thread 0. `shared` holds one entry a warp.
template <typename Acc>
__device__ __forceinline__ Moments<Acc> block_merge(Moments<Acc> m, Moments<Acc>* shared) {
  m = warp_merge(m);
  const int warp = threadIdx.x / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[warp] = m;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) merge(m, shared[w]);
  }
  return m;
}

// The whole block's sum, valid in every thread. `shared` holds one entry a warp.
template <typename Acc>
__device__ __forceinline__ Acc block_sum(Acc v, Acc* shared) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  Acc total = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += shared[w];
  return total;
}

}  // namespace kgopt
