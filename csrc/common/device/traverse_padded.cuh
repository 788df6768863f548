// The walk of traverse.cuh through a channels_last tensor, element by element, whose result has the outermost positions
// repeated around it: padding costs no pass of its own.
#pragma once

#include "common/device/traverse.cuh"
#include "common/padded_shape.h"

namespace kgopt {

// A thread owns a vector of channels and walks over positions of y, whose position of x it computes.
template <typename F>
__global__ void __launch_bounds__(kTraverseThreads)
    elementwise_padded_kernel(const __grid_constant__ ElementwiseArgs<F> a, const __grid_constant__ PaddedShape pad,
                              ColumnGeometry geometry, int64_t slices, int64_t slice_length) {
  using T = typename F::Element;
  using Out = typename OutputOf<F>::Type;
  constexpr int kSize = kWalkSize<T>;
  const int lane = threadIdx.x % geometry.lanes;
  const int walker = threadIdx.x / geometry.lanes;
  // From the end, which the pass before left in L2.
  const int64_t block = int64_t(gridDim.x) - 1 - blockIdx.x;
  const int64_t channel = ((block % geometry.channel_blocks) * geometry.lanes + lane) * kSize;
  const int64_t slice = block / geometry.channel_blocks % slices;
  const int64_t n = block / (geometry.channel_blocks * slices);
  if (walker >= geometry.walkers || channel >= a.c) return;
  typename F::Coef coef[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) coef[j] = a.f.load(n * a.c + channel + j);
  const auto* const x = a.x + n * pad.in[0] * pad.in[1] * pad.in[2] * a.c + channel;
  Out* const y = a.y + n * a.s * a.c + channel;
  const auto inside = [&](uint32_t at, int dim) {
    return min(max(static_cast<int>(at) - pad.before[dim], 0), pad.in[dim] - 1);
  };
  const auto source = [&](uint32_t position) {
    const uint32_t row = position / pad.out[2], plane = row / pad.out[1];
    const int64_t from = int64_t(inside(plane, 0)) * pad.in[1] + inside(row - plane * pad.out[1], 1);
    return from * pad.in[2] + inside(position - row * pad.out[2], 2);
  };
  const int64_t end = min((slice + 1) * slice_length, a.s);
  for (int64_t first = slice * slice_length + walker; first < end; first += kTraverseUnroll * geometry.walkers) {
    Vec<T, kSize> own[kTraverseUnroll];
#pragma unroll
    for (int u = 0; u < kTraverseUnroll; ++u) {
      const int64_t position = first + u * geometry.walkers;
      if (position < end) own[u] = load_vec<T, kSize>(x + source(static_cast<uint32_t>(position)) * a.c);
    }
#pragma unroll
    for (int u = 0; u < kTraverseUnroll; ++u) {
      const int64_t position = first + u * geometry.walkers;
      if (position >= end) break;
      acc_t<T> values[kSize], results[kSize];
      unpack(own[u], values);
      a.f.apply(each(coef), values, values, results);
      store_result<Out, kSize>(y + position * a.c, pack<Out, kSize>(results));
    }
  }
}

// Of a functor with one input; a.s are the positions of y. Channels must fill vectors, and x and y be aligned.
template <typename F>
Status launch_elementwise_padded(const char* name, const ElementwiseArgs<F>& a, const PaddedShape& pad,
                                 cudaStream_t stream) {
  constexpr int kSize = kWalkSize<typename F::Element>;
  if (a.n * a.c * a.s == 0) return Status::Ok();
  if (a.c % kSize != 0 || !is_aligned(a.x) || !is_aligned(a.y)) return Status::Unsupported(name, "no vector fits");
  const ColumnGeometry geometry = column_geometry(a.c, kSize);
  const int64_t slice_length = int64_t(geometry.walkers) * kTraverseUnroll * 4;
  const int64_t slices = (a.s + slice_length - 1) / slice_length;
  const int64_t blocks = a.n * slices * geometry.channel_blocks;
  if (blocks > 0x7fffffff || a.s > 0x7fffffff) return Status::Unsupported(name, "too many elements for one launch");
  return launch_after<elementwise_padded_kernel<F>>(false, name, static_cast<unsigned>(blocks), kTraverseThreads,
                                                    stream, a, pad, geometry, slices, slice_length);
}

}  // namespace kgopt
