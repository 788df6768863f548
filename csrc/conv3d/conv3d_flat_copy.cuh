// The copy of x for the flat convolution, of half types whose rows are whole vectors of 16 bytes: a warp brings pieces
// of some vectors by a chunk of channels to shared memory as they lie, [channel][vector], and ldmatrix transposes them.
#pragma once

#include <cuda_runtime.h>

#include "../common/async.cuh"
#include "../common/mma.cuh"
#include "conv3d_flat_params.h"

namespace kgopt {

inline constexpr int kFlatCopyChannels = kFlatRowBytes / 2;

// Vectors of a channel are in an order of its own, such that every bank is met once.
__device__ __forceinline__ uint32_t flat_copy_place(int channel, int vector) {
  return (channel * kFlatCopyVectors + (vector ^ (channel / 8 % 4))) * 16;
}

// Asks for a piece, as lane `lane` of a warp; cp_async_wait_all and __syncwarp are the caller's.
__device__ __forceinline__ void load_flat_piece(const FlatInput& in, const FlatPlan& plan, int n, int chunk,
                                                int first_vector, char* tile, int lane) {
  const int row_vectors = plan.in[2] / 8;
  const int vector = first_vector + lane % kFlatCopyVectors;
  const int row = plan.by_row_vectors(vector), d = plan.by_height(row);
  const bool inside = d < plan.in[0];
  constexpr int kAtOnce = 32 / kFlatCopyVectors;
  const int c = lane / kFlatCopyVectors;
  const unsigned short* x = static_cast<const unsigned short*>(in.x) + n * in.stride_n + d * in.stride[0] +
                            (row - d * plan.in[1]) * in.stride[1] + (vector - row * row_vectors) * 8 +
                            (int64_t(chunk) * kFlatCopyChannels + c) * in.stride_c;
  int left = in.c_in - chunk * kFlatCopyChannels - c;
#pragma unroll 4
  for (int i = 0; i < kFlatCopyChannels; i += kAtOnce) {
    const bool is_there = inside && left > i;
    cp_async<16>(tile + flat_copy_place(c + i, lane % kFlatCopyVectors), is_there ? x : in.x, is_there);
    x += kAtOnce * in.stride_c;
  }
}

// Stores it, and the zeros behind the rows and planes that end in it.
__device__ __forceinline__ void store_flat_piece(const FlatInput& in, const FlatPlan& plan, int n, int chunk,
                                                 int first_vector, const char* tile, int lane) {
  const int row_vectors = plan.in[2] / 8;
  const bool tail = n >= in.x_split;
  const int64_t slot_bytes = int64_t(plan.chunks) * kFlatRowBytes;
  char* const copy = static_cast<char*>(tail ? in.tail_copy : in.copy) +
                     (n - (tail ? in.x_split : 0)) * plan.sample_bytes + int64_t(chunk) * kFlatRowBytes;
  // Of four matrices of 8 channels, this lane names the channel that thread t finds at word m, for t and m of
  // 8 t + 2 m + lane % 2: each thread then holds eight neighbouring channels of one position.
  const int channel = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
#pragma unroll 1
  for (int i = 0; i < kFlatCopyVectors; ++i) {
    const int vector = first_vector + i, row = plan.by_row_vectors(vector), d = plan.by_height(row);
    if (d >= plan.in[0]) break;
    const int h = row - d * plan.in[1], w = (vector - row * row_vectors) * 8;
    char* const to = copy + ((d * plan.out[1] + h) * plan.out[2] + w) * slot_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v[4];
      load_matrices_transposed(v, shared_address(tile) + flat_copy_place(half * 32 + channel, i));
      *reinterpret_cast<uint4*>(to + lane / 4 * slot_bytes + half * 64 + lane % 4 * 16) =
          make_uint4(v[0], v[1], v[2], v[3]);
    }
    if (w + 8 < plan.in[2]) continue;
    const int rows = h + 1 == plan.in[1] ? plan.out[1] - h : 1;
    const int zeros = rows * plan.out[2] - plan.in[2];  // slots
    for (int j = lane; j < zeros * (kFlatRowBytes / 16); j += 32) {
      *reinterpret_cast<uint4*>(to + (8 + j / 8) * slot_bytes + j % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace kgopt
