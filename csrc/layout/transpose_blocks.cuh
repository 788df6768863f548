// Copies to the other memory format through registers: a thread takes a square block, V rows and V columns of a 16-byte
// vector's V elements each, and turns it without shared memory. A warp's blocks lie side by side, so that it reads and
// writes whole sectors, but for sides that are a single block.
#pragma once

#include <algorithm>

#include "common/device/dtype.cuh"
#include "common/host/launch.h"
#include "layout/layout.h"

namespace kgopt {

struct TransposeBlocksParams : TransposeParams {
  int down = 1, across = 1;  // blocks of a warp along a column, and along a row
  int64_t row_tiles = 0, column_tiles = 0;
};

inline constexpr int kTransposeBlocksThreads = 256;
// Elements below which tiles in shared memory do it: a thread's block is four times what it has of a tile, and a small
// tensor would leave the GPU idle. The border itself was not measured.
inline constexpr int64_t kTransposeBlocksLeast = int64_t(1) << 21;

// Words from byte `shift` on, a multiple of T's size, of eight.
template <typename T>
__device__ __forceinline__ uint4 shifted_words(uint4 a, uint4 b, uint32_t shift) {
  uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = shift & 4 ? w[i + 1] : w[i];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = shift & 2 ? __funnelshift_r(w[i], w[i + 1], 16) : w[i];
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// kShifts: rows of x are no whole vectors. Then `end` is where x ends.
template <typename T, bool kShifts>
__device__ __forceinline__ uint4 load_words(const T* from, const T* end) {
  if constexpr (!kShifts) return *reinterpret_cast<const uint4*>(from);
  const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) & 15;
  const char* const at = reinterpret_cast<const char*>(from) - shift;
  const uint4 low = *reinterpret_cast<const uint4*>(at);
  uint4 high = make_uint4(0, 0, 0, 0);
  if (shift != 0 && at + 16 < reinterpret_cast<const char*>(end)) high = *reinterpret_cast<const uint4*>(at + 16);
  return shifted_words<T>(low, high, shift);
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Column j of a block whose rows are given.
template <typename T, int kVec>
__device__ __forceinline__ uint4 column_words(const uint4 (&rows)[kVec], int j) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2) {
      w[i] = __byte_perm(word_of(rows[2 * i], j / 2), word_of(rows[2 * i + 1], j / 2), j % 2 ? 0x7632 : 0x5410);
    } else {
      w[i] = word_of(rows[i], j);
    }
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

template <typename T, bool kShifts>
__global__ void __launch_bounds__(kTransposeBlocksThreads)
    transpose_blocks_kernel(const __grid_constant__ TransposeBlocksParams p) {
  constexpr int kVec = 16 / sizeof(T), kWarps = kTransposeBlocksThreads / 32;
  const int64_t tile = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, rest = tile / p.row_tiles;
  const int64_t n = rest / p.column_tiles;
  const int lane = threadIdx.x % 32, right = lane / p.down;
  const int64_t row = ((tile - rest * p.row_tiles) * p.down + (lane - right * p.down)) * kVec;
  const int64_t column = ((rest - n * p.column_tiles) * p.across + right) * kVec;
  if (n >= p.n || right >= p.across || row >= p.rows || column >= p.columns) return;
  const T* const x = static_cast<const T*>(p.x);
  const T* const from = x + (n * p.rows + row) * p.columns + column;
  uint4 rows[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    rows[i] = load_words<T, kShifts>(from + i * p.columns, x + p.n * p.rows * p.columns);
  }
  T* const to = static_cast<T*>(p.y) + (n * p.columns + column) * p.rows + row;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    if (!kShifts || column + j < p.columns) store_words(to + j * p.rows, column_words<T>(rows, j));
  }
}

// Blocks of a warp along the shorter side: all of it, if they are few, or a part that comes out even.
inline int transpose_blocks_of(int64_t count) {
  if (count <= 8) return static_cast<int>(count);
  for (int blocks = 8; blocks > 4; --blocks) {
    if (count % blocks == 0) return blocks;
  }
  return 8;
}

// Whether it takes a copy of elements of this size.
template <typename T>
bool plan_transpose_blocks(const TransposeParams& p, TransposeBlocksParams* plan) {
  constexpr int64_t kVec = 16 / sizeof(T);
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  if (!aligned(p.x) || !aligned(p.y) || p.rows % kVec != 0 || p.columns < kVec) return false;
  if (p.n * p.rows * p.columns < kTransposeBlocksLeast) return false;
  static_cast<TransposeParams&>(*plan) = p;
  const int64_t down = p.rows / kVec, across = (p.columns + kVec - 1) / kVec;
  int* const shorter = down <= across ? &plan->down : &plan->across;
  int* const longer = down <= across ? &plan->across : &plan->down;
  *shorter = transpose_blocks_of(std::min(down, across));
  for (*longer = 1; *longer * 2 * *shorter <= 32;) *longer *= 2;  // whole sectors
  plan->row_tiles = (down + plan->down - 1) / plan->down;
  plan->column_tiles = (across + plan->across - 1) / plan->across;
  return true;
}

template <typename T>
Status launch_transpose_blocks(const TransposeBlocksParams& p, cudaStream_t stream) {
  const char* const name = "transpose_blocks_kernel";
  constexpr int kWarps = kTransposeBlocksThreads / 32;
  const int64_t blocks = (p.n * p.row_tiles * p.column_tiles + kWarps - 1) / kWarps;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "the tensor has too many elements for one launch");
  const auto grid = static_cast<unsigned>(blocks);
  if (p.columns % (16 / sizeof(T)) == 0) {
    return launch_kernel<transpose_blocks_kernel<T, false>>(name, p, grid, kTransposeBlocksThreads, 0, stream);
  }
  return launch_kernel<transpose_blocks_kernel<T, true>>(name, p, grid, kTransposeBlocksThreads, 0, stream);
}

}  // namespace kgopt
