// Every element repeated along each dim, and the gradient of that: the sum over the repetitions, in a fixed order.
#include "common/device/traverse.cuh"
#include "pointwise/launch_samples.h"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct NearestArgs {
  const T* from;
  T* to;
  int64_t n, c, d, h, w;  // of the small tensor
  int64_t pitch;          // from one position of `from` to the next
  int fd, fh, fw;
};

// Forward, a thread has kSize channels of an element of the small tensor in one of the large one's rows, so that a warp
// writes a run of memory; backward, of an element of the small tensor, which it adds up.
template <typename T, int kSize, bool kBackward>
__global__ void __launch_bounds__(kThreads) upsample_nearest_kernel(const __grid_constant__ NearestArgs<T> a) {
  using Acc = acc_t<T>;
  using Index = uint32_t;
  const Index lanes = static_cast<Index>(a.c / kSize);
  const Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  Index rest = at / lanes;
  const int64_t channel = static_cast<int64_t>(at % lanes) * kSize;
  const int64_t w = static_cast<int64_t>(rest % static_cast<Index>(a.w));
  rest /= static_cast<Index>(a.w);
  if constexpr (!kBackward) {
    const Index rows = static_cast<Index>(a.h) * a.fh;
    const Index plane = rest / rows, row = rest - plane * rows;  // of the large tensor
    if (static_cast<int64_t>(plane) >= a.n * a.d * a.fd) return;
    const int64_t small = static_cast<int64_t>(plane / a.fd) * a.h + row / a.fh;
    const Vec<T, kSize> value = load_vec<T, kSize>(a.from + (small * a.w + w) * a.pitch + channel);
    T* const to = a.to + (static_cast<int64_t>(rest) * a.w + w) * a.fw * a.c + channel;
    for (int k = 0; k < a.fw; ++k) store_result<T, kSize>(to + k * a.c, value);
  } else {
    const int64_t h = static_cast<int64_t>(rest % static_cast<Index>(a.h));
    rest /= static_cast<Index>(a.h);
    const int64_t plane = static_cast<int64_t>(rest);  // n * d + depth
    if (plane >= a.n * a.d) return;
    Acc sum[kSize];
#pragma unroll
    for (int e = 0; e < kSize; ++e) sum[e] = Acc(0);
    for (int i = 0; i < a.fd; ++i) {
#pragma unroll 2
      for (int j = 0; j < a.fh; ++j) {
        const int64_t row = (plane * a.fd + i) * (a.h * a.fh) + h * a.fh + j;
        const T* const from = a.from + (row * (a.w * a.fw) + w * a.fw) * a.pitch + channel;
#pragma unroll 2
        for (int k = 0; k < a.fw; ++k) {
          Acc v[kSize];
          unpack(load_vec<T, kSize>(from + k * a.pitch), v);
#pragma unroll
          for (int e = 0; e < kSize; ++e) sum[e] += v[e];
        }
      }
    }
    store_result<T, kSize>(a.to + ((plane * a.h + h) * a.w + w) * a.c + channel, pack<T, kSize>(sum));
  }
}

template <typename T, int kSize, bool kBackward>
Status launch(const UpsampleNearestParams& p, cudaStream_t stream) {
  const int64_t positions = p.d * p.h * p.w, rows = p.factors[0] * p.factors[1],
                large = positions * rows * p.factors[2];
  const int64_t from = kBackward ? large : positions, to = kBackward ? positions : large;
  const auto launch_some = [&](int64_t first, int64_t n, unsigned grid) {
    const NearestArgs<T> a{static_cast<const T*>(p.from) + first * from * p.pitch,
                           static_cast<T*>(p.to) + first * to * p.c,
                           n,
                           p.c,
                           p.d,
                           p.h,
                           p.w,
                           p.pitch,
                           static_cast<int>(p.factors[0]),
                           static_cast<int>(p.factors[1]),
                           static_cast<int>(p.factors[2])};
    upsample_nearest_kernel<T, kSize, kBackward><<<grid, kThreads, 0, stream>>>(a);
  };
  return launch_samples("upsample_nearest_kernel", p.n, positions * (kBackward ? 1 : rows) * (p.c / kSize), kThreads,
                        launch_some);
}

}  // namespace

Status run_upsample_nearest(const UpsampleNearestParams& p, cudaStream_t stream) {
  if (p.n * p.c * p.d * p.h * p.w == 0) return Status::Ok();
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {
    const bool vectors = p.c % kVecSize<T> == 0 && p.pitch % kVecSize<T> == 0 && is_aligned(p.from) && is_aligned(p.to);
    constexpr int kSize = sizeof(T) == 8 ? 1 : kVecSize<T>;  // float64 is for reference: no vectors of it
    if (p.backward) {
      status = vectors ? launch<T, kSize, true>(p, stream) : launch<T, 1, true>(p, stream);
    } else {
      status = vectors ? launch<T, kSize, false>(p, stream) : launch<T, 1, false>(p, stream);
    }
  });
  return status;
}

}  // namespace kgopt
