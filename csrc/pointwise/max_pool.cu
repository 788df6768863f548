// The largest value of each window, without the indices that a backward would need.
#include "common/device/traverse.cuh"
#include "pointwise/launch_samples.h"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr int kThreads = 256;

// A thread takes kSize channels of one output. kTwo: windows of 2 in every dim with stride 2 and no padding, whose
// loads can all be in flight at once.
template <typename T, int kSize, bool kTwo, bool kDepth>
__global__ void __launch_bounds__(kThreads) max_pool_kernel(const __grid_constant__ MaxPoolParams p) {
  using Acc = acc_t<T>;
  using Index = uint32_t;
  const Index lanes = static_cast<Index>(p.c / kSize);
  Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t channel = static_cast<int64_t>(at % lanes) * kSize;
  at /= lanes;
  int64_t out[3];
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    out[i] = static_cast<int64_t>(at % static_cast<Index>(p.out[i]));
    at /= static_cast<Index>(p.out[i]);
  }
  const int64_t n = static_cast<int64_t>(at);
  if (n >= p.n) return;
  const T* const x = static_cast<const T*>(p.x) + n * p.in[0] * p.in[1] * p.in[2] * p.c + channel;
  Acc largest[kSize];
#pragma unroll
  for (int e = 0; e < kSize; ++e) largest[e] = -INFINITY;
  const auto take = [&](const Vec<T, kSize>& loaded) {
    Acc v[kSize];
    unpack(loaded, v);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      if (v[e] > largest[e] || v[e] != v[e]) largest[e] = v[e];
    }
  };
  if constexpr (kTwo) {
    constexpr int kDeep = kDepth ? 2 : 1;
    Vec<T, kSize> loaded[kDeep][2][2];
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int64_t plane = kDeep * out[0] + i, row = 2 * out[1] + j, column = 2 * out[2] + k;
          loaded[i][j][k] = load_vec<T, kSize>(x + ((plane * p.in[1] + row) * p.in[2] + column) * p.c);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        take(loaded[i][j][0]);
        take(loaded[i][j][1]);
      }
    }
  } else {
    int64_t begin[3], end[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      begin[i] = out[i] * p.stride[i] - p.padding[i];
      end[i] = min(begin[i] + p.kernel[i], p.in[i]);
      begin[i] = max(begin[i], int64_t(0));
    }
    for (int64_t i = begin[0]; i < end[0]; ++i) {
      for (int64_t j = begin[1]; j < end[1]; ++j) {
        for (int64_t k = begin[2]; k < end[2]; ++k) {
          take(load_vec<T, kSize>(x + ((i * p.in[1] + j) * p.in[2] + k) * p.c));
        }
      }
    }
  }
  const int64_t position = ((n * p.out[0] + out[0]) * p.out[1] + out[1]) * p.out[2] + out[2];
  store_result<T, kSize>(static_cast<T*>(p.y) + position * p.c + channel, pack<T, kSize>(largest));
}

template <typename T, int kSize, bool kTwo, bool kDepth>
Status launch(const MaxPoolParams& p, cudaStream_t stream) {
  const int64_t in = p.in[0] * p.in[1] * p.in[2] * p.c, out = p.out[0] * p.out[1] * p.out[2] * p.c;
  return launch_samples("max_pool_kernel", p.n, out / kSize, kThreads, [&](int64_t first, int64_t n, unsigned grid) {
    MaxPoolParams some = p;
    some.x = static_cast<const T*>(p.x) + first * in;
    some.y = static_cast<T*>(p.y) + first * out;
    some.n = n;
    max_pool_kernel<T, kSize, kTwo, kDepth><<<grid, kThreads, 0, stream>>>(some);
  });
}

template <typename T, int kSize>
Status dispatch(const MaxPoolParams& p, cudaStream_t stream) {
  const auto all = [&](const int64_t (&values)[3], int64_t wanted, int first) {
    return std::all_of(values + first, values + 3, [&](int64_t v) { return v == wanted; });
  };
  const bool flat = p.kernel[0] == 1 && p.stride[0] == 1 && p.padding[0] == 0;
  const int first = flat ? 1 : 0;
  if (!all(p.kernel, 2, first) || !all(p.stride, 2, first) || !all(p.padding, 0, 0)) {
    return launch<T, kSize, false, true>(p, stream);
  }
  return flat ? launch<T, kSize, true, false>(p, stream) : launch<T, kSize, true, true>(p, stream);
}

}  // namespace

Status run_max_pool(const MaxPoolParams& p, cudaStream_t stream) {
  if (p.n * p.c * p.out[0] * p.out[1] * p.out[2] == 0) return Status::Ok();
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {
    const bool vectors = p.c % kVecSize<T> == 0 && is_aligned(p.x) && is_aligned(p.y);
    // float64 is for reference: no vectors of it.
    constexpr int kSize = sizeof(T) == 8 ? 1 : kVecSize<T>;
    status = vectors ? dispatch<T, kSize>(p, stream) : dispatch<T, 1>(p, stream);
  });
  return status;
}

}  // namespace kgopt
