// Parts of planes on their way into shared memory, where they are floats, whatever they are in memory.
#pragma once

#include "common/device/dtype.cuh"
#include "conv3d/depthwise/params.h"

namespace kgopt {

__device__ __forceinline__ int quotient_of(int value, const DepthwiseDivisor& by) {
  return by.factor == 0 ? value : static_cast<int>(__umulhi(static_cast<uint32_t>(value), by.factor));
}

// 16 bytes of half values or floats, as floats.
__device__ __forceinline__ void unpack_words(const uint4& raw, Dtype dtype, float (&v)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  if (dtype == Dtype::kBFloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  } else if (dtype == Dtype::kFloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(words[i]);
  }
}

// The reverse.
__device__ __forceinline__ uint4 pack_words(const float (&v)[8], Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
  }
  uint4 raw;
  if (dtype == Dtype::kBFloat16) {
    store_vec(reinterpret_cast<__nv_bfloat16*>(&raw), pack<__nv_bfloat16, 8>(v));
  } else {
    store_vec(reinterpret_cast<__half*>(&raw), pack<__half, 8>(v));
  }
  return raw;
}

// Neighbouring threads take 32 neighbouring elements of some rows, a piece of 2^log2 each.
inline constexpr int kDepthwiseRun = 5;

// Where a tile lies in its tensor.
struct DepthwisePlace {
  const char* from;             // the first channel of the tile at position 0 of a sample
  int64_t stride_c, stride[3];  // elements
  int size[3];                  // of the tensor
  int channels;                 // of the tile that there are
  int depth, row, column;       // of the tile's first position, which may lie beyond a border
};

// Up to 16 bytes. `from` is where it would lie at depth 0, null beyond a border of height or width; `to` is the place
// of its first element in the tile, below 0 where the tile does not want it.
struct DepthwisePiece {
  const char* from;
  int to, z;  // z: of the tile's planes of the depth
};

// Threads copy pieces into a tile. `kLanes` channels of a position are neighbours in shared memory, 1: positions of a
// row are. `kAlternate`: see DepthwiseTile.
template <int kLanes, int kAlternate, int kDepth>
struct DepthwiseCopy {
  static_assert(kLanes == 1 || kLanes == 16, "pieces of a position are counted by shifts");
  const DepthwiseTile& tile;
  const DepthwisePlace& at;
  const char* from;  // of the tile's first row at depth 0
  Dtype dtype;
  int size, log2;  // bytes of an element; a piece has 2^log2 elements
  int row_bytes, column_bytes;
  int first, group_log2, items;

  __device__ __forceinline__ DepthwiseCopy(const DepthwiseTile& t, const DepthwisePlace& place, Dtype type,
                                           int log2_of_piece)
      : tile(t), at(place), dtype(type), log2(log2_of_piece) {
    size = type == Dtype::kFloat32 ? 4 : 2;
    row_bytes = static_cast<int>(place.stride[1]) * size;
    column_bytes = static_cast<int>(place.stride[2]) * size;
    from = place.from + int64_t(place.row) * row_bytes;
    if (kLanes > 1 || log2 == 0) {
      first = group_log2 = 0;
      items = (t.all_rows * t.span * kLanes) >> log2;
    } else {
      // Pieces begin at multiples of their size.
      group_log2 = kDepthwiseRun - log2;
      first = place.column >> log2;
      const int pieces = ((place.column + t.span - 1) >> log2) - first + 1;
      items = (((pieces - 1) >> group_log2) + 1) * t.all_rows << group_log2;
    }
  }

  __device__ __forceinline__ DepthwisePiece locate(int item) const {
    int all_row, column, channel = 0;
    DepthwisePiece piece;
    if (kLanes == 1 && log2 > 0) {
      const int q = item >> group_log2, group = quotient_of(q, tile.by_all_rows);
      all_row = q - group * tile.all_rows;
      const int i = first + (group << group_log2) + (item & ((1 << group_log2) - 1));
      column = (i << log2) - at.column;
    } else {
      const int q = kLanes == 1 ? item : item >> (4 - log2);
      channel = (item << log2) & (kLanes - 1);
      all_row = quotient_of(q, tile.by_span);
      column = q - all_row * tile.span;
    }
    int plane = 0, row = all_row;
    int64_t offset = 0;  // elements
    piece.z = 0;
    if (kDepth > 1 || (kLanes == 1 && tile.planes > 1)) {
      plane = quotient_of(all_row, tile.by_rows);
      row = all_row - plane * tile.rows;
      if (kDepth > 1) {
        piece.z = quotient_of(plane, tile.by_planes);
        offset = piece.z * at.stride[0];
      }
      if (kLanes == 1) channel = plane - piece.z * tile.planes;
    }
    if (kLanes == 1 || log2 == 0) offset += channel * at.stride_c;
    const int w = at.column + column;
    const bool inside = column < tile.span && channel < at.channels &&
                        static_cast<unsigned>(at.row + row) < static_cast<unsigned>(at.size[1]) &&
                        static_cast<unsigned>(w) < static_cast<unsigned>(at.size[2]);
    // Vectors of channels have a stride of 1.
    const int64_t bytes = (kLanes > 1 && log2 > 0 ? offset + channel : offset) * size;
    piece.from = inside ? from + int64_t(row) * row_bytes + int64_t(w) * column_bytes + bytes : nullptr;
    const int slot = (row & (kAlternate - 1)) * tile.step + row / kAlternate;
    // Threads are more than a row's pieces.
    const bool wanted = kLanes > 1 || column < tile.span;
    piece.to =
        !wanted ? -1
                : plane * tile.plane + (slot * tile.pitch + tile.slack + column) * kLanes + (kLanes > 1 ? channel : 0);
    return piece;
  }

  // Zeros beyond a border.
  __device__ __forceinline__ uint4 load(const DepthwisePiece& piece) const {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (piece.from != nullptr && static_cast<unsigned>(at.depth + piece.z) < static_cast<unsigned>(at.size[0])) {
      const char* const data = piece.from + at.depth * at.stride[0] * size;
      switch (size << log2) {
        case 16: raw = *reinterpret_cast<const uint4*>(data); break;
        case 8: {
          const uint2 half = *reinterpret_cast<const uint2*>(data);
          raw.x = half.x, raw.y = half.y;
          break;
        }
        case 4: raw.x = *reinterpret_cast<const uint32_t*>(data); break;
        default: raw.x = *reinterpret_cast<const uint16_t*>(data);
      }
    }
    return raw;
  }

  __device__ __forceinline__ void put(float* tile_floats, const DepthwisePiece& piece, const uint4& raw) const {
    if (kLanes == 1 && piece.to < 0) return;
    float* const to = tile_floats + piece.to;
    float v[8];
    unpack_words(raw, dtype, v);
    if (kLanes > 1 && log2 >= 2) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      if (log2 == 3) *reinterpret_cast<float4*>(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
      return;
    }
    to[0] = v[0];
    if (log2 > 0) to[1] = v[1];
    if (kLanes == 1 && log2 > 1) to[2] = v[2], to[3] = v[3];
    if (kLanes == 1 && log2 > 2) {
#pragma unroll
      for (int i = 4; i < 8; ++i) to[i] = v[i];
    }
  }

  // Pieces from `item` on, each `step` apart, some of them on their way at a time.
  template <int kBatch>
  __device__ __forceinline__ void all(float* to, int item, int step) const {
    for (; item < items; item += kBatch * step) {
      uint4 raw[kBatch];
      DepthwisePiece piece[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (item + i * step < items) {
          piece[i] = locate(item + i * step);
          raw[i] = load(piece[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (item + i * step < items) put(to, piece[i], raw[i]);
      }
    }
  }
};

// A thread of a tile: its channel, plane, row and first column, in threads' units.
struct DepthwiseThread {
  int lane, plane, row, group;
  bool active;
};
template <int kLanes>
__device__ __forceinline__ DepthwiseThread depthwise_thread(int thread, int rows, int planes, int groups) {
  DepthwiseThread t;
  t.lane = thread % kLanes;
  const int unit = thread / kLanes, column = rows * planes;
  t.group = unit / column;
  const int in_column = unit - t.group * column;
  t.plane = in_column / rows;
  t.row = in_column - t.plane * rows;
  t.active = t.group < groups;
  return t;
}

}  // namespace kgopt
