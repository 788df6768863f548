// y = act(((x - mean) * rstd * weight + bias) * scale + shift), with scale and shift from maps of lower resolution:
// each of their positions is read for all positions of x that it stands for, and nobody stores the larger maps.
#include "common/device/floor.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/traverse.cuh"
#include "groupnorm/passes/maps.h"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {
namespace {

template <typename T>
struct MapsArgs {
  const T* x;
  T* y;
  const AffineRow<acc_t<T>>* table;  // [N, C]
  const T* scale;
  const T* shift;
  int64_t c, s, map_s;  // channels, positions of x and of a map
  uint32_t out[2];      // height and width of x
  uint32_t in[2];       // of a map
  uint32_t factor[3];   // positions of x that one of a map stands for: depth, height, width
  ActChain act;

  // Where position `at` of x is in a map.
  __device__ __forceinline__ int64_t map_position(uint32_t at) const {
    const uint32_t row = at / out[1], plane = row / out[0];
    const uint32_t height = (row - plane * out[0]) / factor[1], width = (at - row * out[1]) / factor[2];
    return (int64_t(plane / factor[0]) * in[0] + height) * in[1] + width;
  }
};

template <Chain kAct, typename T, int kSize>
__device__ __forceinline__ void activate(const ActChain& act, acc_t<T> (&y)[kSize]) {
  if constexpr (kAct == Chain::kRelu) {
    apply_chain<kAct, kIsCoarse<T>>(floored(act), y);
  } else {
    apply_chain<kAct, kIsCoarse<T>>(act, y);
  }
}

// channels_last: a thread owns kSize neighbouring channels and walks over positions.
template <typename T, Chain kAct, int kSize>
__global__ void __launch_bounds__(kTraverseThreads)
    maps_columns_kernel(const __grid_constant__ MapsArgs<T> a, ColumnGeometry geometry, int64_t slices,
                        int64_t slice_length) {
  using Acc = acc_t<T>;
  const int lane = threadIdx.x % geometry.lanes, walker = threadIdx.x / geometry.lanes;
  // From the end, which the pass before left in L2.
  const int64_t block = int64_t(gridDim.x) - 1 - blockIdx.x;
  const int64_t channel = ((block % geometry.channel_blocks) * geometry.lanes + lane) * kSize;
  const int64_t slice = block / geometry.channel_blocks % slices;
  const int64_t n = block / (geometry.channel_blocks * slices);
  if (walker >= geometry.walkers || channel >= a.c) return;
  Acc mean[kSize], weight[kSize], bias[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const AffineRow<Acc> row = a.table[n * a.c + channel + j];
    mean[j] = row.mean;
    weight[j] = row.weight * row.rstd;
    bias[j] = row.bias;
  }
  const T* const x = a.x + n * a.s * a.c + channel;
  T* const y = a.y + n * a.s * a.c + channel;
  const T* const scales = a.scale + n * a.map_s * a.c + channel;
  const T* const shifts = a.shift + n * a.map_s * a.c + channel;
  constexpr int kUnroll = 2;
  const int64_t end = min((slice + 1) * slice_length, a.s);
  for (int64_t first = slice * slice_length + walker; first < end; first += kUnroll * geometry.walkers) {
    Vec<T, kSize> own[kUnroll], scale[kUnroll], shift[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t position = first + u * geometry.walkers;
      if (position >= end) break;
      own[u] = load_vec<T, kSize>(x + position * a.c);
      const int64_t at = a.map_position(static_cast<uint32_t>(position)) * a.c;
      scale[u] = load_vec<T, kSize>(scales + at);
      shift[u] = load_vec<T, kSize>(shifts + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t position = first + u * geometry.walkers;
      if (position >= end) break;
      Acc values[kSize], factors[kSize], terms[kSize];
      unpack(own[u], values);
      unpack(scale[u], factors);
      unpack(shift[u], terms);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        values[j] = ((values[j] - mean[j]) * weight[j] + bias[j]) * factors[j] + terms[j];
      }
      activate<kAct, T>(a.act, values);
      store_result<T, kSize>(y + position * a.c, pack<T, kSize>(values));
    }
  }
}

// Contiguous: a block walks over a part of a channel, neighbouring threads over neighbouring vectors of positions.
template <typename T, Chain kAct, int kSize>
__global__ void __launch_bounds__(kTraverseThreads)
    maps_rows_kernel(const __grid_constant__ MapsArgs<T> a, int64_t slices, int64_t slice_length) {
  using Acc = acc_t<T>;
  const int64_t block = int64_t(gridDim.x) - 1 - blockIdx.x;
  const int64_t row = block / slices, slice = block % slices;
  const AffineRow<Acc> affine = a.table[row];
  const Acc weight = affine.weight * affine.rstd;
  const T* const x = a.x + row * a.s;
  T* const y = a.y + row * a.s;
  const T* const scales = a.scale + row * a.map_s;
  const T* const shifts = a.shift + row * a.map_s;
  const int64_t end = min((slice + 1) * slice_length, a.s);
  for (int64_t at = slice * slice_length + threadIdx.x * kSize; at < end; at += kTraverseThreads * kSize) {
    const Vec<T, kSize> own = load_vec<T, kSize>(x + at);
    Acc values[kSize];
    unpack(own, values);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const int64_t from = a.map_position(static_cast<uint32_t>(at + j));
      const Acc scale = to_acc(scales[from]), shift = to_acc(shifts[from]);
      values[j] = ((values[j] - affine.mean) * weight + affine.bias) * scale + shift;
    }
    activate<kAct, T>(a.act, values);
    store_result<T, kSize>(y + at, pack<T, kSize>(values));
  }
}

template <typename T, Chain kAct, int kSize>
Status launch(const MapsParams& p, const MapsArgs<T>& a, cudaStream_t stream) {
  const char* const name = "maps_kernel";
  if (p.dims.channels_last) {
    const ColumnGeometry geometry = column_geometry(a.c, kSize);
    const int64_t slice_length = int64_t(geometry.walkers) * 16, slices = (a.s + slice_length - 1) / slice_length;
    const int64_t blocks = p.dims.n * slices * geometry.channel_blocks;
    if (blocks > 0x7fffffff) return Status::Unsupported(name, "too many elements for one launch");
    return launch_after<maps_columns_kernel<T, kAct, kSize>>(
        false, name, static_cast<unsigned>(blocks), kTraverseThreads, stream, a, geometry, slices, slice_length);
  }
  const int64_t slice_length = int64_t(kTraverseThreads) * kSize * 4, slices = (a.s + slice_length - 1) / slice_length;
  const int64_t blocks = p.dims.n * a.c * slices;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "too many elements for one launch");
  return launch_after<maps_rows_kernel<T, kAct, kSize>>(false, name, static_cast<unsigned>(blocks), kTraverseThreads,
                                                        stream, a, slices, slice_length);
}

// Where no vector fits, any chain is walked.
template <typename T>
Status launch_chain(const MapsParams& p, cudaStream_t stream) {
  MapsArgs<T> a{};
  a.x = static_cast<const T*>(p.x);
  a.y = static_cast<T*>(p.y);
  a.table = static_cast<const AffineRow<acc_t<T>>*>(p.table);
  a.scale = static_cast<const T*>(p.scale);
  a.shift = static_cast<const T*>(p.shift);
  a.c = p.dims.c;
  a.s = p.dims.s;
  a.map_s = p.in[0] * p.in[1] * p.in[2];
  for (int i = 0; i < 3; ++i) a.factor[i] = static_cast<uint32_t>(p.out[i] / p.in[i]);
  for (int i = 0; i < 2; ++i) {
    a.out[i] = static_cast<uint32_t>(p.out[1 + i]);
    a.in[i] = static_cast<uint32_t>(p.in[1 + i]);
  }
  a.act = p.act;
  constexpr int kSize = kWalkSize<T>;
  const bool fits = (p.dims.channels_last ? a.c : a.s) % kSize == 0 && is_aligned(a.x) && is_aligned(a.y) &&
                    (!p.dims.channels_last || (is_aligned(a.scale) && is_aligned(a.shift)));
  if (!fits) return launch<T, Chain::kAny, 1>(p, a, stream);
  switch (chain_kind(p.act)) {
    case Chain::kNone:
    case Chain::kRelu: return launch<T, chain_for<T>(Chain::kRelu), kSize>(p, a, stream);
    case Chain::kSilu: return launch<T, chain_for<T>(Chain::kSilu), kSize>(p, a, stream);
    default: return launch<T, Chain::kAny, kSize>(p, a, stream);
  }
}

}  // namespace

Status run_group_norm_maps(const MapsParams& p, cudaStream_t stream) {
  if (p.dims.numel() == 0) return Status::Ok();
  if (p.dims.s > 0x7fffffff) return Status::Unsupported("maps_kernel", "too many positions");
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, { status = launch_chain<T>(p, stream); });
  return status;
}

}  // namespace kgopt
