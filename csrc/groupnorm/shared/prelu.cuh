// A PReLU, whose slopes lie in device memory: one, or one a channel.
#pragma once

#include "common/device/dtype.cuh"
#include "common/device/pointwise.cuh"
#include "groupnorm/params.h"

namespace kgopt {

// As PyTorch has it: NaN and zeros of either sign are multiplied.
template <typename Acc>
__device__ __forceinline__ Acc prelu(Acc x, Acc slope) {
  return x > Acc(0) ? x : x * slope;
}

__device__ __forceinline__ uint64_t divided(uint64_t n, uint64_t by, uint64_t magic) {
  return by == 1 ? n : magic != 0 ? __umul64hi(n, magic) : n / by;
}

// The channel of the dense tensor's element `at`, and its place in the channel's row.
__device__ __forceinline__ int64_t channel_at(const PReluSlopes& s, int64_t at, int64_t* column) {
  const int64_t row = divided(at, s.inner, s.inner_magic);
  *column = at - row * s.inner;
  return row - divided(row, s.count, s.count_magic) * s.count;
}

// T: the tensors' type; slopes are of that type or fp32.
template <typename T>
__device__ __forceinline__ float slope_at(const PReluSlopes& s, int64_t channel) {
  if constexpr (sizeof(T) < sizeof(float)) {
    if (s.dtype != Dtype::kFloat32) return to_acc(static_cast<const T*>(s.data)[channel]);
  }
  return static_cast<const float*>(s.data)[channel];
}

// Neighbouring elements of which the first is element `at` of the tensor. Out of line: few networks have a slope a
// channel, and a kernel has many places that store.
template <typename T, int kSize>
__device__ __noinline__ Floats<kSize> prelu_by_channel(const PReluSlopes& s, int64_t at, Floats<kSize> x) {
  int64_t column, channel = channel_at(s, at, &column);
  float slope = slope_at<T>(s, channel);
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    x.v[j] = prelu(x.v[j], slope);
    if (j + 1 < kSize && ++column == s.inner) {
      column = 0;
      if (++channel == s.count) channel = 0;
      slope = slope_at<T>(s, channel);
    }
  }
  return x;
}

template <typename T, int kSize>
__device__ __forceinline__ void apply_prelu(const PReluSlopes& s, int64_t at, float (&x)[kSize]) {
  if (s.count == 1) {
    const float slope = slope_at<T>(s, 0);
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = prelu(x[j], slope);
    return;
  }
  Floats<kSize> all;
#pragma unroll
  for (int j = 0; j < kSize; ++j) all.v[j] = x[j];
  all = prelu_by_channel<T, kSize>(s, at, all);
#pragma unroll
  for (int j = 0; j < kSize; ++j) x[j] = all.v[j];
}

// The same of elements that need not be neighbours. Of one that is not there the place may be any.
template <int kSize>
struct Places {
  uint32_t v[kSize];
};
template <typename T, int kSize>
__device__ __noinline__ Floats<kSize> prelu_by_channel(const PReluSlopes& s, Places<kSize> at, Floats<kSize> x) {
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    int64_t column;
    x.v[k] = prelu(x.v[k], slope_at<T>(s, channel_at(s, at.v[k], &column)));
  }
  return x;
}
template <typename T, int kSize>
__device__ __forceinline__ void apply_prelu(const PReluSlopes& s, const uint32_t (&at)[kSize], float (&x)[kSize]) {
  if (s.count == 1) {
    const float slope = slope_at<T>(s, 0);
#pragma unroll
    for (int k = 0; k < kSize; ++k) x[k] = prelu(x[k], slope);
    return;
  }
  Floats<kSize> all;
  Places<kSize> places;
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    all.v[k] = x[k];
    places.v[k] = at[k];
  }
  all = prelu_by_channel<T, kSize>(s, places, all);
#pragma unroll
  for (int k = 0; k < kSize; ++k) x[k] = all.v[k];
}

}  // namespace kgopt
