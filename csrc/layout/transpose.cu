// Copies that change a tensor's memory format, through registers (transpose_blocks.cuh) or through tiles in shared
// memory, which convert as well; and copies that split fp32 in two.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "common/host/launch.h"
#include "layout/layout.h"
#include "layout/split.cuh"
#include "layout/transpose_blocks.cuh"

namespace kgopt {
namespace {

constexpr int kTile = 64;
constexpr int kThreads = 256;
constexpr int kFours = kTile / 4;
constexpr int kSteps = kTile * kFours / kThreads;

template <typename T>
using Four = Vec<T, 4>;

struct TileOf {
  int64_t n, row, column;
};
// Tiles of the same columns are neighbours: what they write is.
__device__ __forceinline__ TileOf tile_of(int64_t block, int64_t rows, int64_t columns) {
  const int64_t row_tiles = (rows + kTile - 1) / kTile, column_tiles = (columns + kTile - 1) / kTile;
  const int64_t rest = block / row_tiles;
  return {rest / column_tiles, (block - rest * row_tiles) * kTile, rest % column_tiles * kTile};
}

// As torch's Tensor.to rounds.
template <typename To, typename From>
__device__ __forceinline__ To converted(From v) {
  if constexpr (std::is_same_v<To, From>) {
    return v;
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(v);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(v);
  } else if constexpr (std::is_same_v<From, __half>) {
    return __half2float(v);
  } else {
    return __bfloat162float(v);
  }
}

// x's tile into shared memory. kVectors: rows of x are whole vectors of four.
template <bool kVectors, typename T, typename In>
__device__ __forceinline__ void load_tile(T (&tile)[kTile][kTile + 1], const In* x, const TileOf& at, int64_t rows,
                                          int64_t columns) {
  const int four = threadIdx.x % kFours;
  Four<In> v[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t row = at.row + i * (kThreads / kFours) + threadIdx.x / kFours, column = at.column + four * 4;
    const In* const from = x + (at.n * rows + row) * columns + column;
    v[i] = {};
    if (row >= rows) continue;
    if constexpr (kVectors) {
      if (column < columns) v[i] = *reinterpret_cast<const Four<In>*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j < columns) v[i].v[j] = from[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      tile[i * (kThreads / kFours) + threadIdx.x / kFours][four * 4 + j] = converted<T>(v[i].v[j]);
    }
  }
  __syncthreads();
}

// A tile of all columns, fewer than kTile of them, is one run of memory, read as such: a weight's rows are as short as
// its kernel has positions, often an odd number.
template <typename T, typename In>
__device__ __forceinline__ void load_run(T (&tile)[kTile][kTile + 1], const In* x, const TileOf& at, int64_t rows,
                                         int64_t columns) {
  constexpr int kMost = 8;  // elements of a thread at once
  const unsigned width = static_cast<unsigned>(columns);
  const unsigned count = static_cast<unsigned>(min(rows - at.row, int64_t(kTile))) * width;
  const In* const from = x + (at.n * rows + at.row) * columns;
  for (unsigned first = threadIdx.x; first < count; first += kMost * kThreads) {
    In v[kMost];
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      const unsigned i = first + j * kThreads;
      if (i < count) v[j] = from[i];
    }
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      const unsigned i = first + j * kThreads, row = i / width;
      if (i < count) tile[row][i - row * width] = converted<T>(v[j]);
    }
  }
  __syncthreads();
}

// The same of y, where a tile has all rows, fewer than kTile.
template <typename Out, typename T>
__device__ __forceinline__ void store_run(const T (&tile)[kTile][kTile + 1], Out* y, const TileOf& at, int64_t rows,
                                          int64_t columns) {
  const unsigned width = static_cast<unsigned>(rows);
  const unsigned count = static_cast<unsigned>(min(columns - at.column, int64_t(kTile))) * width;
  Out* const to = y + (at.n * columns + at.column) * rows;
  for (unsigned i = threadIdx.x; i < count; i += kThreads) {
    const unsigned column = i / width;
    to[i] = converted<Out>(tile[i - column * width][column]);
  }
}

// use(element of y, four neighbours there, how many of them exist).
template <typename T, typename Use>
__device__ __forceinline__ void for_each_four(const T (&tile)[kTile][kTile + 1], const TileOf& at, int64_t rows,
                                              int64_t columns, const Use& use) {
  const int four = threadIdx.x % kFours;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int in_tile = i * (kThreads / kFours) + threadIdx.x / kFours;
    const int64_t column = at.column + in_tile, row = at.row + four * 4;
    if (column >= columns || row >= rows) continue;
    Four<T> v;
#pragma unroll
    for (int j = 0; j < 4; ++j) v.v[j] = tile[four * 4 + j][in_tile];
    use((at.n * columns + column) * rows + row, v, static_cast<int>(min(rows - row, int64_t(4))));
  }
}

template <bool kVectors, typename T>
__device__ __forceinline__ void store_four(T* to, const Four<T>& v, int count) {
  if constexpr (kVectors) {
    store_result(to, v);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < count) to[j] = v.v[j];
    }
  }
}

// Whether a tile's side is read or written as a run: where it has no vectors, or so few that most threads have none.
template <bool kVectors>
__device__ __forceinline__ bool is_run(int64_t length) {
  return length < (kVectors ? kTile / 4 : kTile);
}

// The tile holds the smaller type of the two: a conversion rounds once at most, wherever it is.
template <typename In, typename Out, bool kLoads, bool kStores>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const __grid_constant__ TransposeParams p) {
  using T = std::conditional_t<sizeof(In) <= sizeof(Out), In, Out>;
  __shared__ T tile[kTile][kTile + 1];
  const TileOf at = tile_of(blockIdx.x, p.rows, p.columns);
  const In* const x = static_cast<const In*>(p.x);
  Out* const y = static_cast<Out*>(p.y);
  if (is_run<kLoads>(p.columns)) {
    load_run(tile, x, at, p.rows, p.columns);
  } else {
    load_tile<kLoads>(tile, x, at, p.rows, p.columns);
  }
  if (is_run<kStores>(p.rows)) return store_run(tile, y, at, p.rows, p.columns);
  for_each_four(tile, at, p.rows, p.columns, [&](int64_t to, const Four<T>& v, int count) {
    Four<Out> out;
#pragma unroll
    for (int j = 0; j < 4; ++j) out.v[j] = converted<Out>(v.v[j]);
    store_four<kStores>(y + to, out, count);
  });
}

Status count_blocks(const char* name, int64_t n, int64_t rows, int64_t columns, unsigned* blocks) {
  const int64_t count = n * ((rows + kTile - 1) / kTile) * ((columns + kTile - 1) / kTile);
  if (count > 0x7fffffff) return Status::Unsupported(name, "the tensor has too many elements for one launch");
  *blocks = static_cast<unsigned>(count);
  return Status::Ok();
}

template <typename In, typename Out = In>
Status launch(const TransposeParams& p, cudaStream_t stream) {
  const char* const name = "transpose_kernel";
  unsigned blocks = 0;
  if (const Status status = count_blocks(name, p.n, p.rows, p.columns, &blocks); !status.ok()) return status;
  const auto whole = [](const void* data, int64_t length, size_t bytes) {
    return length % 4 == 0 && reinterpret_cast<uintptr_t>(data) % (4 * bytes) == 0;
  };
  const bool loads = whole(p.x, p.columns, sizeof(In)), stores = whole(p.y, p.rows, sizeof(Out));
  if (loads && stores) {
    return launch_kernel<transpose_kernel<In, Out, true, true>>(name, p, blocks, kThreads, 0, stream);
  }
  if (loads) return launch_kernel<transpose_kernel<In, Out, true, false>>(name, p, blocks, kThreads, 0, stream);
  if (stores) return launch_kernel<transpose_kernel<In, Out, false, true>>(name, p, blocks, kThreads, 0, stream);
  return launch_kernel<transpose_kernel<In, Out, false, false>>(name, p, blocks, kThreads, 0, stream);
}

template <bool kLoads, bool kStores>
__global__ void __launch_bounds__(kThreads) split_half_kernel(const __grid_constant__ SplitHalfParams p) {
  __shared__ float tile[kTile][kTile + 1];
  const float scale = split_scale(*p.largest);
  const TileOf at = tile_of(blockIdx.x, p.rows, p.columns);
  load_tile<kLoads>(tile, p.x, at, p.rows, p.columns);
  for_each_four(tile, at, p.rows, p.columns, [&](int64_t to, const Four<float>& v, int count) {
    Four<__half> high, low;
#pragma unroll
    for (int j = 0; j < 4; ++j) split_half(v.v[j], scale, &high.v[j], &low.v[j]);
    store_four<kStores>(static_cast<__half*>(p.high) + to, high, count);
    store_four<kStores>(static_cast<__half*>(p.low) + to, low, count);
  });
}

// Nothing transposed.
__global__ void __launch_bounds__(kThreads) split_half_dense_kernel(const __grid_constant__ SplitHalfParams p) {
  const float scale = split_scale(*p.largest);
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4, count = p.n * p.columns;
  if (at >= count) return;
  Four<float> v{};
  const bool whole = at + 4 <= count;
  if (whole) {
    v = *reinterpret_cast<const Four<float>*>(p.x + at);
  } else {
    for (int64_t j = 0; at + j < count; ++j) v.v[j] = p.x[at + j];
  }
  Four<__half> high, low;
#pragma unroll
  for (int j = 0; j < 4; ++j) split_half(v.v[j], scale, &high.v[j], &low.v[j]);
  __half *const to_high = static_cast<__half*>(p.high) + at, *const to_low = static_cast<__half*>(p.low) + at;
  if (whole) {
    store_four<true>(to_high, high, 4);
    store_four<true>(to_low, low, 4);
  } else {
    store_four<false>(to_high, high, static_cast<int>(count - at));
    store_four<false>(to_low, low, static_cast<int>(count - at));
  }
}

// The maximum of bits does not depend on the order.
__global__ void __launch_bounds__(kThreads) largest_magnitude_kernel(const float* x, int64_t count, uint32_t* largest) {
  uint32_t most = 0;
  const auto add = [&](float v) {
    const uint32_t bits = __float_as_uint(v) & 0x7fffffffu;
    if (bits < 0x7f800000u) most = max(most, bits);
  };
  const int64_t step = int64_t(gridDim.x) * kThreads, first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t fours = reinterpret_cast<uintptr_t>(x) % sizeof(Four<float>) == 0 ? count / 4 : 0;
#pragma unroll 4
  for (int64_t i = first; i < fours; i += step) {
    const Four<float> v = reinterpret_cast<const Four<float>*>(x)[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) add(v.v[j]);
  }
  for (int64_t i = fours * 4 + first; i < count; i += step) add(x[i]);
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0 && most > 0) atomicMax(largest, most);
}

}  // namespace

Status run_transpose(const TransposeParams& p, cudaStream_t stream) {
  if (p.n * p.rows * p.columns == 0) return Status::Ok();
  if (p.from == p.to) {
    TransposeBlocksParams blocks;
    const int size = dtype_size(p.from);
    if (size == 2 && plan_transpose_blocks<uint16_t>(p, &blocks)) {
      return launch_transpose_blocks<uint16_t>(blocks, stream);
    }
    if (size == 4 && plan_transpose_blocks<uint32_t>(p, &blocks)) {
      return launch_transpose_blocks<uint32_t>(blocks, stream);
    }
    switch (size) {
      case 2: return launch<uint16_t>(p, stream);
      case 4: return launch<uint32_t>(p, stream);
      default: return launch<uint64_t>(p, stream);
    }
  }
  if (p.from == Dtype::kFloat32 && p.to == Dtype::kFloat16) return launch<float, __half>(p, stream);
  if (p.from == Dtype::kFloat32 && p.to == Dtype::kBFloat16) return launch<float, __nv_bfloat16>(p, stream);
  if (p.from == Dtype::kFloat16 && p.to == Dtype::kFloat32) return launch<__half, float>(p, stream);
  if (p.from == Dtype::kBFloat16 && p.to == Dtype::kFloat32) return launch<__nv_bfloat16, float>(p, stream);
  return Status::Unsupported("transpose_kernel", "it converts between float32 and one of the half types alone");
}

Status run_largest_magnitude(const float* x, int64_t count, uint32_t* largest, int sm_count, cudaStream_t stream) {
  const char* const name = "largest_magnitude_kernel";
  const cudaError_t error = cudaMemsetAsync(largest, 0, sizeof(uint32_t), stream);
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  const int64_t blocks = std::min<int64_t>((count / 4 + kThreads - 1) / kThreads + 1, int64_t(sm_count) * 8);
  return launch_with(largest_magnitude_kernel, facts_of<largest_magnitude_kernel>(), name,
                     {dim3(static_cast<unsigned>(blocks)), kThreads, 0}, stream, x, count, largest);
}

Status run_split_half(const SplitHalfParams& p, cudaStream_t stream) {
  const char* const name = "split_half_kernel";
  if (p.n * p.rows * p.columns == 0) return Status::Ok();
  if (p.rows == 1) {
    const int64_t blocks = (p.n * p.columns / 4 + kThreads) / kThreads;
    if (blocks > 0x7fffffff) return Status::Unsupported(name, "the tensor has too many elements for one launch");
    return launch_kernel<split_half_dense_kernel>(name, p, static_cast<unsigned>(blocks), kThreads, 0, stream);
  }
  unsigned blocks = 0;
  if (const Status status = count_blocks(name, p.n, p.rows, p.columns, &blocks); !status.ok()) return status;
  const bool loads = p.columns % 4 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0, stores = p.rows % 4 == 0;
  if (loads && stores) return launch_kernel<split_half_kernel<true, true>>(name, p, blocks, kThreads, 0, stream);
  if (loads) return launch_kernel<split_half_kernel<true, false>>(name, p, blocks, kThreads, 0, stream);
  if (stores) return launch_kernel<split_half_kernel<false, true>>(name, p, blocks, kThreads, 0, stream);
  return launch_kernel<split_half_kernel<false, false>>(name, p, blocks, kThreads, 0, stream);
}

}  // namespace kgopt
