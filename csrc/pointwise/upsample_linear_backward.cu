// The gradient of linear interpolation to twice the size: a gather, so deterministic, with one read of dy from memory.
#include "common/device/traverse.cuh"
#include "pointwise/launch_samples.h"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr int kThreads = 256;
constexpr int kDeepest = 4;  // inputs along the depth that a thread goes through: planes of dy are then read 1.25 times

template <typename T>
struct UpsampleBackwardArgs {
  const T* dy;
  T* dx;
  int64_t n, c, d, h, w;
};

// Input i is a quarter or three quarters of outputs 2 i - 1 to 2 i + 2; the first and the last output are copies.
template <typename Acc>
__device__ __forceinline__ Acc weight_of(int t, int64_t i, int64_t size) {
  const int64_t out = 2 * i - 1 + t;
  if (out < 0 || out >= 2 * size) return Acc(0);
  const bool edge = (t == 1 && i == 0) || (t == 2 && i == size - 1);
  return edge ? Acc(1) : t == 0 || t == 3 ? Acc(0.25) : Acc(0.75);
}

// What a plane of dy gives to the inputs at (h, w), for kSize channels.
template <typename T, int kSize>
__device__ __forceinline__ void gather(const UpsampleBackwardArgs<T>& a, int64_t plane, int64_t h, int64_t w,
                                       int64_t channel, acc_t<T> (&sum)[kSize]) {
  using Acc = acc_t<T>;
#pragma unroll
  for (int e = 0; e < kSize; ++e) sum[e] = Acc(0);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Acc along_h = weight_of<Acc>(j, h, a.h);
    if (along_h == Acc(0)) continue;
    const int64_t row = (plane * 2 * a.h + 2 * h - 1 + j) * 2 * a.w + 2 * w - 1;
    Vec<T, kSize> loaded[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (weight_of<Acc>(k, w, a.w) != Acc(0)) loaded[k] = load_vec<T, kSize>(a.dy + (row + k) * a.c + channel);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Acc weight = along_h * weight_of<Acc>(k, w, a.w);
      if (weight == Acc(0)) continue;
      Acc v[kSize];
      unpack(loaded[k], v);
#pragma unroll
      for (int e = 0; e < kSize; ++e) sum[e] += weight * v[e];
    }
  }
}

// A thread has an input's position in a plane and kSize channels, and goes along the depth: planes 2 i and 2 i + 1 of
// dy count for input i and a neighbour.
template <typename T, int kSize, bool kDepth>
__global__ void __launch_bounds__(kThreads)
    upsample_linear_backward_kernel(const __grid_constant__ UpsampleBackwardArgs<T> a) {
  using Acc = acc_t<T>;
  using Index = uint32_t;
  constexpr int kRun = kDepth ? kDeepest : 1;
  const Index lanes = static_cast<Index>(a.c / kSize), runs = static_cast<Index>((a.d + kRun - 1) / kRun);
  Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t channel = static_cast<int64_t>(at % lanes) * kSize;
  at /= lanes;
  const int64_t w = static_cast<int64_t>(at % static_cast<Index>(a.w));
  at /= static_cast<Index>(a.w);
  const int64_t h = static_cast<int64_t>(at % static_cast<Index>(a.h));
  at /= static_cast<Index>(a.h);
  const int64_t first = static_cast<int64_t>(at % runs) * kRun;
  const int64_t n = static_cast<int64_t>(at / runs);
  if (n >= a.n) return;
  auto store = [&](int64_t depth, Acc(&v)[kSize]) {
    store_result<T, kSize>(a.dx + (((n * a.d + depth) * a.h + h) * a.w + w) * a.c + channel, pack<T, kSize>(v));
  };
  Acc plane[kSize];
  if constexpr (!kDepth) {
    gather<T, kSize>(a, n * a.d + first, h, w, channel, plane);
    store(first, plane);
  } else {
    const int64_t last = min(first + kRun, a.d) - 1, planes = n * 2 * a.d;
    Acc sum[kSize];
#pragma unroll
    for (int e = 0; e < kSize; ++e) sum[e] = Acc(0);
    if (first > 0) {
      gather<T, kSize>(a, planes + 2 * first - 1, h, w, channel, plane);
#pragma unroll
      for (int e = 0; e < kSize; ++e) sum[e] = Acc(0.25) * plane[e];
    }
    Acc odd[kSize];
    gather<T, kSize>(a, planes + 2 * first, h, w, channel, plane);
    for (int64_t i = first; i <= last; ++i) {
      gather<T, kSize>(a, planes + 2 * i + 1, h, w, channel, odd);
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        sum[e] += weight_of<Acc>(1, i, a.d) * plane[e] + weight_of<Acc>(2, i, a.d) * odd[e];
      }
      if (i + 1 < a.d) {
        gather<T, kSize>(a, planes + 2 * i + 2, h, w, channel, plane);
#pragma unroll
        for (int e = 0; e < kSize; ++e) sum[e] += Acc(0.25) * plane[e];
      }
      store(i, sum);
#pragma unroll
      for (int e = 0; e < kSize; ++e) sum[e] = Acc(0.25) * odd[e];
    }
  }
}

template <typename T, int kSize, bool kDepth>
Status launch(const UpsampleLinearBackwardParams& p, cudaStream_t stream) {
  const int64_t runs = kDepth ? (p.d + kDeepest - 1) / kDeepest : p.d, threads = runs * p.h * p.w * (p.c / kSize);
  const int64_t in = p.d * p.h * p.w * p.c, out = in * (kDepth ? 8 : 4);
  const auto launch_some = [&](int64_t first, int64_t n, unsigned grid) {
    const UpsampleBackwardArgs<T> a{
        static_cast<const T*>(p.dy) + first * out, static_cast<T*>(p.dx) + first * in, n, p.c, p.d, p.h, p.w};
    upsample_linear_backward_kernel<T, kSize, kDepth><<<grid, kThreads, 0, stream>>>(a);
  };
  return launch_samples("upsample_linear_backward_kernel", p.n, threads, kThreads, launch_some);
}

}  // namespace

Status run_upsample_linear_backward(const UpsampleLinearBackwardParams& p, cudaStream_t stream) {
  if (p.n * p.c * p.d * p.h * p.w == 0) return Status::Ok();
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {
    const bool vectors = p.c % kVecSize<T> == 0 && is_aligned(p.dy) && is_aligned(p.dx);
    constexpr int kSize = sizeof(T) == 8 ? 1 : kVecSize<T>;  // float64 is for reference: no vectors of it
    if (p.double_depth) {
      status = vectors ? launch<T, kSize, true>(p, stream) : launch<T, 1, true>(p, stream);
    } else {
      status = vectors ? launch<T, kSize, false>(p, stream) : launch<T, 1, false>(p, stream);
    }
  });
  return status;
}

}  // namespace kgopt
