// Linear interpolation to twice the size, of two or three dims, with what is added to it.
#include "common/device/traverse.cuh"
#include "pointwise/launch_samples.h"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct UpsampleArgs {
  const T* x;
  const T* residual;
  T* y;
  int64_t n, c, d, h, w;
};

// Outputs 2 i + 1 and 2 i + 2 of a dim lie between inputs i and i + 1, a quarter of the way from either end. At i = -1
// there is only output 0, which is input 0; the input after it counts with weight 0, so that its infinity makes a NaN,
// as in PyTorch.
template <typename Acc>
struct Cell {
  int64_t low, high;  // inputs, both within the tensor
  int64_t out;        // the first output
  Acc low_weight[2], high_weight[2];
  bool valid[2];
};
template <typename Acc>
__device__ __forceinline__ Cell<Acc> make_cell(int64_t i, int64_t size) {
  Cell<Acc> cell;
  const bool first = i < 0;
  cell.low = first ? 0 : i;
  cell.high = min(cell.low + 1, size - 1);
  cell.out = 2 * i + 1;
  cell.low_weight[0] = Acc(0.75);
  cell.high_weight[0] = Acc(0.25);
  cell.low_weight[1] = first ? Acc(1) : Acc(0.25);
  cell.high_weight[1] = first ? Acc(0) : Acc(0.75);
  cell.valid[0] = !first;
  cell.valid[1] = i + 1 < size;
  return cell;
}

// v[0] at the low end, v[1] at the high end -> the two outputs.
template <typename Acc, int kSize>
__device__ __forceinline__ void interpolate(const Cell<Acc>& cell, Acc (&low)[kSize], Acc (&high)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const Acc a = low[j], b = high[j];
    low[j] = cell.low_weight[0] * a + cell.high_weight[0] * b;
    high[j] = cell.low_weight[1] * a + cell.high_weight[1] * b;
  }
}

// A thread makes all outputs between two neighbouring inputs of every dim, for kSize channels: as many loads of x as
// stores of y, most of which hit the L1.
template <typename T, int kSize, bool kDepth, bool kAdd>
__global__ void __launch_bounds__(kThreads) upsample_linear_kernel(const __grid_constant__ UpsampleArgs<T> a) {
  using Acc = acc_t<T>;
  using Index = uint32_t;
  constexpr int kDeep = kDepth ? 2 : 1;
  const Index lanes = static_cast<Index>(a.c / kSize);
  const Index cells_w = static_cast<Index>(a.w + 1), cells_h = static_cast<Index>(a.h + 1);
  const Index cells_d = static_cast<Index>(a.d + (kDepth ? 1 : 0));
  Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t channel = static_cast<int64_t>(at % lanes) * kSize;
  at /= lanes;
  const auto w = make_cell<Acc>(static_cast<int64_t>(at % cells_w) - 1, a.w);
  at /= cells_w;
  const auto h = make_cell<Acc>(static_cast<int64_t>(at % cells_h) - 1, a.h);
  at /= cells_h;
  const int64_t depth = static_cast<int64_t>(at % cells_d);
  const auto d = make_cell<Acc>(depth - (kDepth ? 1 : 0), a.d);
  const int64_t n = static_cast<int64_t>(at / cells_d);
  if (n >= a.n) return;

  Vec<T, kSize> loaded[kDeep][2][2];
#pragma unroll
  for (int i = 0; i < kDeep; ++i) {
    const int64_t plane = n * a.d + (kDepth ? (i ? d.high : d.low) : depth);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t row = (plane * a.h + (j ? h.high : h.low)) * a.w;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        loaded[i][j][k] = load_vec<T, kSize>(a.x + (row + (k ? w.high : w.low)) * a.c + channel);
      }
    }
  }
  Acc v[kDeep][2][2][kSize];
#pragma unroll
  for (int i = 0; i < kDeep; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      unpack(loaded[i][j][0], v[i][j][0]);
      unpack(loaded[i][j][1], v[i][j][1]);
      interpolate(w, v[i][j][0], v[i][j][1]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) interpolate(h, v[i][0][k], v[i][1][k]);
  }
  if constexpr (kDepth) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) interpolate(d, v[0][j][k], v[1][j][k]);
    }
  }
  const int64_t planes = kDepth ? 2 * a.d : a.d;
#pragma unroll
  for (int i = 0; i < kDeep; ++i) {
    if (kDepth && !d.valid[i]) continue;
    const int64_t plane = n * planes + (kDepth ? d.out + i : depth);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!h.valid[j]) continue;
      const int64_t row = (plane * 2 * a.h + h.out + j) * 2 * a.w;
      Vec<T, kSize> more[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (kAdd && w.valid[k]) more[k] = load_vec<T, kSize>(a.residual + (row + w.out + k) * a.c + channel);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (!w.valid[k]) continue;
        if constexpr (kAdd) {
          Acc added[kSize];
          unpack(more[k], added);
#pragma unroll
          for (int e = 0; e < kSize; ++e) v[i][j][k][e] += added[e];
        }
        store_result<T, kSize>(a.y + (row + w.out + k) * a.c + channel, pack<T, kSize>(v[i][j][k]));
      }
    }
  }
}

template <typename T, int kSize, bool kDepth, bool kAdd>
Status launch(const UpsampleLinearParams& p, cudaStream_t stream) {
  const int64_t threads = (kDepth ? p.d + 1 : p.d) * (p.h + 1) * (p.w + 1) * (p.c / kSize);
  const int64_t in = p.d * p.h * p.w * p.c, out = in * (kDepth ? 8 : 4);
  return launch_samples("upsample_linear_kernel", p.n, threads, kThreads, [&](int64_t first, int64_t n, unsigned grid) {
    const T* const residual = kAdd ? static_cast<const T*>(p.residual) + first * out : nullptr;
    const UpsampleArgs<T> a{
        static_cast<const T*>(p.x) + first * in, residual, static_cast<T*>(p.y) + first * out, n, p.c, p.d, p.h, p.w};
    upsample_linear_kernel<T, kSize, kDepth, kAdd><<<grid, kThreads, 0, stream>>>(a);
  });
}

template <typename T, int kSize>
Status dispatch(const UpsampleLinearParams& p, cudaStream_t stream) {
  if (p.double_depth) {
    return p.residual != nullptr ? launch<T, kSize, true, true>(p, stream) : launch<T, kSize, true, false>(p, stream);
  }
  return p.residual != nullptr ? launch<T, kSize, false, true>(p, stream) : launch<T, kSize, false, false>(p, stream);
}

}  // namespace

Status run_upsample_linear(const UpsampleLinearParams& p, cudaStream_t stream) {
  if (p.n * p.c * p.d * p.h * p.w == 0) return Status::Ok();
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {
    const bool vectors = p.c % kVecSize<T> == 0 && is_aligned(p.x) && is_aligned(p.y) && is_aligned(p.residual);
    // float64 is for reference: no vectors of it.
    constexpr int kSize = sizeof(T) == 8 ? 1 : kVecSize<T>;
    status = vectors ? dispatch<T, kSize>(p, stream) : dispatch<T, 1>(p, stream);
  });
  return status;
}

}  // namespace kgopt
