// Statistics of a 2D convolution with stride 1 from its input alone, sm_90a.
//
// The sum of an output channel's squares is w' G w, where G[k, k'] sums products of input values over positions, k and
// k' being (tap, channel) pairs. But for the borders an entry depends on the channels and on the distance of the two
// taps, and half of the distances are enough: for 3 x 3 taps 13 matrices of 8 x 8 instead of one of 72 x 72.
//
// Products are those of a warp, positions along a row being K of both operands. K may be numbered in any way as long as
// both operands agree, so that a lane loads eight neighbours of its channel's row from memory into the registers that
// the products read. Rows 0 to 7 of the left operand are the channels, rows 8 to 15 the same moved by one position; the
// right operand is the same row or one of the two below, moved by -2, 0 or 2, which is other registers. Warps walk down
// the rows: each is multiplied as it comes, by itself and by the two before it, which are kept as left operands. Three
// rows at a time are worked off without a branch while the next three are under way.
//
// The left operand's position tells which taps see a product. Outer rows have sums and warps of their own. Outer
// columns, whose K are rows, are kept in shared memory until all rows are there. What is outer in both is a product for
// each entry.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/reduce.cuh"
#include "conv3d/few_channels/autocorrelation/params.h"
#include "conv3d/few_channels/finish.cuh"
#include "conv3d/few_channels/window/kernel.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// How much larger the sum of the squares of a filter's terms may be than the variance of their sum, in a norm's group
// as a whole: sums of squares are known to some 2^-21 of their size, 2^-20 where more rows are added in the tensor
// core.
template <typename Element>
inline constexpr float kAutocorrelationCancellation = sizeof(Element) == 4 ? 512.f : 1024.f;

template <typename Element>
__device__ __forceinline__ void mma_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    mma_bf16(c, a, b0, b1);
  } else {
    mma_fp16(c, a, b0, b1);
  }
}
template <typename Element>
inline constexpr uint32_t kPairOfOnes = std::is_same_v<Element, __nv_bfloat16> ? 0x3f803f80u : 0x3c003c00u;

// Of two neighbouring half values in a word those from position `first` and below `end` on, counted from the lower one.
__device__ __forceinline__ uint32_t pair_mask(int first, int end) {
  return (first <= 0 && end > 0 ? 0x0000ffffu : 0u) | (first <= 1 && end > 1 ? 0xffff0000u : 0u);
}

// A lane's values of a row: eight neighbours of its channel, and for the outer lanes of the four that share a row the
// two before or behind them.
template <typename Element>
struct WalkRow {
  static constexpr bool kScaled = std::is_same_v<Element, float>;
  uint32_t v[kScaled ? 2 : 1][4], pair[kScaled ? 2 : 1];
};
// The same as words of two halves: w-, w0 to w3 and w4.
struct PackedRow {
  uint32_t before, w[4], behind;

  // Waits for the row, and for all that is under way with it: loads share a scoreboard.
  template <typename Element>
  __device__ __forceinline__ void set(const WalkRow<Element>& row, float scale) {
    if constexpr (WalkRow<Element>::kScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = packed_halves(__uint_as_float(row.v[i / 2][i % 2 * 2]) * scale,
                             __uint_as_float(row.v[i / 2][i % 2 * 2 + 1]) * scale);
      }
      before = packed_halves(__uint_as_float(row.pair[0]) * scale, __uint_as_float(row.pair[1]) * scale);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(w[i]) : "r"(row.v[0][i]));  // loaded again
      asm volatile("mov.b32 %0, %1;" : "=r"(before) : "r"(row.pair[0]));
    }
  }
  // What other lanes have.
  __device__ __forceinline__ void exchange(int lane) {
    const uint32_t outer = before;
    before = __shfl_up_sync(0xffffffffu, w[3], 1, 4), behind = __shfl_down_sync(0xffffffffu, w[0], 1, 4);
    before = (lane & 3) == 0 ? outer : before, behind = (lane & 3) == 3 ? outer : behind;
  }
};

// A row as the right operand. Of eight neighbours, in words w0 to w3, with w- before and w4 behind them, a product of
// 16 takes w0 and w2, the next w1 and w3. Moved by -2, 0 and 2 these are (w-, w1) and (w0, w2), then (w0, w2) and (w1,
// w3), then (w1, w3) and (w2, w4). An operand's two words lie in neighbouring registers, so w1 and w2 are there twice.
struct WalkRight {
  uint32_t pair[4][2];

  __device__ __forceinline__ explicit WalkRight(const PackedRow& row) {
    pair[0][0] = row.before, pair[0][1] = row.w[1];
    pair[1][0] = row.w[0], pair[1][1] = row.w[2];
    pair[2][0] = row.w[1], pair[2][1] = row.w[3];
    pair[3][0] = row.w[2], pair[3][1] = row.behind;
  }
};

inline constexpr int kWalkRows = 3;  // as many as a filter has
// Rows that are added up in registers, since the tensor core cuts off where it adds.
template <typename Element>
inline constexpr int kTogether = std::is_same_v<Element, float> ? 9 : 12;

__device__ __forceinline__ void load_vector(uint32_t (&v)[4], const void* from) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(from));
}
// What is there stays where nothing is to be loaded.
__device__ __forceinline__ void load_over(uint32_t (&v)[2], const void* from, bool inside) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p ld.global.nc.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(v[0]), "+r"(v[1])
               : "l"(from), "r"(uint32_t(inside)));
}

// Where a lane stands in its way down the rows.
template <typename Element, bool kVectors>
struct WalkCursor {
  static constexpr bool kScaled = WalkRow<Element>::kScaled;
  const Element* at;
  int64_t stride, stride_w;
  int rows_left;    // of the input
  int outer;        // where a lane's outer pair lies
  uint32_t inside;  // a bit for each load; kVectors: of vectors and the outer pair, else of values
  bool whole;       // all lanes' vectors are inside, where that is asked for

  __device__ __forceinline__ void start(const AutocorrelationParams& p, int64_t n, int chunk, int row, int lane) {
    const int channel = lane >> 2, u = chunk * kAutocorrelationChunk + (lane & 3) * 8;
    stride = p.x_stride[1], stride_w = p.x_stride[2];
    at = static_cast<const Element*>(p.x) + n * p.x_stride_n + channel * p.x_stride_c + row * stride + u * stride_w;
    rows_left = p.in[1] - row;
    outer = (lane & 3) == 0 ? -2 : 8;
    const bool has_outer = (lane & 3) == 0 || (lane & 3) == 3;
    auto is_inside = [&](int i) { return channel < p.c_in && unsigned(u + i) < unsigned(p.in[2]); };
    inside = 0;
    if constexpr (kVectors) {
      inside = is_inside(0) | is_inside(4) << 1 | (has_outer && is_inside(outer)) << 2;
    } else {
      for (int i = 0; i < 8; ++i) inside |= is_inside(i) << i;
      for (int i = 0; i < 2; ++i) inside |= (has_outer && is_inside(outer + i)) << (8 + i);
    }
    if constexpr (kScaled && kVectors) whole = __all_sync(0xffffffffu, (~inside & 3u) == 0);
  }
  // Zeros where there is nothing.
  __device__ __forceinline__ void load(WalkRow<Element>& row) {
    const uint32_t valid = rows_left > 0 ? inside : 0;
    if constexpr (kVectors) {
      load_if(row.v[0], at, valid & 1);
      if constexpr (kScaled) {
        load_if(row.v[1], at + 4, valid & 2);
        load_if(row.pair, at + outer, valid & 4);
      } else {
        row.pair[0] = load_one_if(reinterpret_cast<const float*>(at + outer), valid & 4);
      }
    } else {
      uint32_t bits[10];
#pragma unroll
      for (int i = 0; i < 10; ++i) {
        bits[i] = load_one_if(at + (i < 8 ? i : outer + i - 8) * stride_w, valid >> i & 1);
      }
      if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < 8; ++i) row.v[i / 4][i % 4] = bits[i];
        row.pair[0] = bits[8], row.pair[1] = bits[9];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) row.v[0][i] = bits[2 * i] | bits[2 * i + 1] << 16;
        row.pair[0] = bits[8] | bits[9] << 16;
      }
    }
    at += stride;
    --rows_left;
  }
  // fp32 mostly by nothing but loads, an outer pair that is not inside staying zero; with halves that gained nothing.
  __device__ __forceinline__ void load_next(WalkRow<Element> (&rows)[kWalkRows]) {
    if constexpr (kScaled && kVectors) {
      if (whole && rows_left >= kWalkRows) {
#pragma unroll
        for (int i = 0; i < kWalkRows; ++i) {
          load_vector(rows[i].v[0], at);
          load_vector(rows[i].v[1], at + 4);
          load_over(rows[i].pair, at + outer, inside & 4);
          at += stride;
        }
        rows_left -= kWalkRows;
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kWalkRows; ++i) load(rows[i]);
  }
};

// Which values of a lane's eight neighbours and the two behind them are in core columns.
template <typename Element>
struct WalkMasks {
  uint32_t of[5];

  __device__ __forceinline__ void set(const AutocorrelationPlan& plan, int chunk, int lane) {
    const int u = chunk * kAutocorrelationChunk + (lane & 3) * 8;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      of[i] = pair_mask(plan.core_columns[0] - u - 2 * i, plan.core_columns[1] - u - 2 * i);
      asm volatile("" : "+r"(of[i]));  // or they are computed again for every row
    }
  }
};

// A warp's sums: 13 distances in eight products. One of these needs no values moved by one, and has ones in their
// place: its rows 8 to 15 are the channels' own sums.
template <typename Element>
struct WalkSums {
  float acc[8][4];
  uint32_t left[kWalkRows][2][4];  // the last rows as left operands, in turns

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i / 4][i % 4] = 0.f;
  }
  __device__ __forceinline__ void forget_rows() {
#pragma unroll
    for (int i = 0; i < 8 * kWalkRows; ++i) left[i / 8][i / 4 % 2][i % 4] = 0;
  }
  // The products of a row with itself and of the two above with it; on the left a row counts where both masks say.
  __device__ __forceinline__ void add(int turn, const PackedRow& row, const WalkMasks<Element>& masks, uint32_t all) {
    const WalkRight right(row);
    uint32_t same[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) same[i] = (i < 4 ? row.w[i % 4] : row.behind) & masks.of[i] & all;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      auto multiply = [&](float (&to)[4], const uint32_t (&by)[4], int i) {
        mma_halves<Element>(to, by, right.pair[i + step][0], right.pair[i + step][1]);
      };
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        multiply(acc[2 + i], left[(turn + 2) % kWalkRows][step], i);
        multiply(acc[5 + i], left[(turn + 1) % kWalkRows][step], i);
      }
      uint32_t (&mine)[4] = left[turn][step];
      mine[0] = same[step], mine[2] = same[step + 2];
      mine[1] = kPairOfOnes<Element> & masks.of[step] & all, mine[3] = kPairOfOnes<Element> & masks.of[step + 2] & all;
      multiply(acc[0], mine, 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) mine[2 * i + 1] = __funnelshift_r(same[step + 2 * i], same[step + 2 * i + 1], 16);
      multiply(acc[1], mine, 2);
    }
  }
  // Added to what is there, if anything is.
  __device__ __forceinline__ void flush(float* to, int lane, bool first) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float4* const at = reinterpret_cast<float4*>(to) + i * 32 + lane;
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if (!first) v = *at;
      v.x += acc[i][0], v.y += acc[i][1], v.z += acc[i][2], v.w += acc[i][3];
      *at = v;
    }
    clear();
  }
};
// Where channel c's own sum is among those of a warp.
__device__ __forceinline__ int own_sum(int c) { return c / 2 * 4 + 2 + c % 2; }

// What a block knows of its share of a sample.
struct WalkShare {
  int64_t n;
  int first, end;  // rows of the input
  int lane, warp;
};

// Where outer columns are kept: of each side and row four columns of each channel.
struct OuterColumns {
  uint2* at;
  int rows;

  __device__ __forceinline__ OuterColumns(const AutocorrelationPlan& plan, const AutocorrelationLayout& layout,
                                          float* smem)
      : at(reinterpret_cast<uint2*>(smem + layout.column_rows)), rows(plan.column_rows) {}
  // From the slice's first core row on.
  __device__ __forceinline__ uint2* place(int side, int row, int channel) const {
    return at + (side * rows + row) * kOuterPitch + channel;
  }
};
// A lane's share of them. kVectors: they lie in one lane's neighbouring words.
template <bool kVectors>
__device__ __forceinline__ void keep_columns(uint2* left, int to_right, const uint32_t (&w)[4], int u, int last) {
  if (u == 0) *left = make_uint2(w[0], w[1]);
  if constexpr (kVectors) {
    if (last == 0 || last == 4) left[to_right] = last == 0 ? make_uint2(w[0], w[1]) : make_uint2(w[2], w[3]);
  } else {
    unsigned short* const to = reinterpret_cast<unsigned short*>(left + to_right);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (unsigned(i - last) < 4u) to[i - last] = static_cast<unsigned short>(w[i / 2] >> i % 2 * 16);
    }
  }
}

// Weights of 64 output channels from c_first on, rounded as the convolution rounds them; zeros where there are none.
// Shared by `warps` warps, of which this is one.
template <typename Element>
__device__ __forceinline__ void load_filters(const AutocorrelationParams& p, float* filters, int c_first, int warp,
                                             int warps, int lane) {
  constexpr int kRounds = (kAutocorrelationEntries + 31) / 32, kLoads = 16;
  const int width = p.plan.kernel[1], entries = p.plan.kernel[0] * width * p.c_in, padded = (entries + 7) / 8 * 8;
  // A lane has K entries lane, lane + 32, ... in the order in which filters usually lie.
  int64_t from[kRounds];
  int to[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int k = lane + 32 * i, taps = p.plan.kernel[0] * width, c = k / taps, tap = k - c * taps, h = tap / width;
    from[i] = k < entries ? c * p.w_stride_in + h * p.w_stride_k[1] + (tap - h * width) * p.w_stride_k[2] : 0;
    to[i] = (k < entries ? tap * p.c_in + c : k) * kFilterPitch;
  }
#pragma unroll 1
  for (int o = warp; o < 64; o += warps * kLoads) {
    // Without branches, so that all are under way at once.
    Element v[kLoads][kRounds];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int at = min(c_first + o + j * warps, p.c_out - 1);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) v[j][i] = static_cast<const Element*>(p.weight)[at * p.w_stride_out + from[i]];
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int at = o + j * warps;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        float w = to_acc(v[j][i]);
        if constexpr (sizeof(Element) == 4) w = __uint_as_float(to_tf32(w));
        if (lane + 32 * i >= entries || c_first + at >= p.c_out) w = 0.f;
        if (at < 64 && lane + 32 * i < padded) filters[to[i] + at] = w;
      }
    }
  }
}

// What a warp does with its part of the core rows. ready(): waits for the scale, which is known while loads are under
// way.
template <typename Element, bool kVectors, typename Ready>
__device__ __forceinline__ void walk_rows(const AutocorrelationParams& p, const AutocorrelationLayout& layout,
                                          float* smem, const WalkShare& b, Ready ready) {
  const AutocorrelationPlan& plan = p.plan;
  const int lane = b.lane, tasks = plan.chunks * plan.runs;
  const int first_row = max(b.first, plan.core_rows[0]), end_row = min(b.end, plan.core_rows[1]);
  float* const core = smem + layout.walks + b.warp * kWalkFloats;
  const OuterColumns columns(plan, layout, smem);
  const int to_right = columns.rows * kOuterPitch;
  WalkRow<Element> rows[kWalkRows];
  WalkCursor<Element, kVectors> cursor;
  int task = b.warp, chunk = 0, row = 0, end = 0;
  auto start = [&] {
    const int run = task / plan.chunks;
    // Outer chunks, whose warps have more to do, on all schedulers.
    chunk = (task + run) % plan.chunks;
    row = first_row + run * plan.run_rows;
    end = min(row + plan.run_rows, end_row);
    cursor.start(p, b.n, chunk, row, lane);
    cursor.rows_left = task < tasks && row < end ? min(end + 2, p.in[1]) - row : 0;
#pragma unroll
    for (int i = 0; i < kWalkRows; ++i) cursor.load(rows[i]);
  };
  start();
  const float scale = ready();
  WalkSums<Element> sums;
  sums.clear();
  bool first = true;
#pragma unroll 1
  for (; task < tasks; task += kAutocorrelationWarps, start()) {
    if (row >= end) continue;
    WalkMasks<Element> masks;
    masks.set(plan, chunk, lane);
    sums.forget_rows();
    const int u = chunk * kAutocorrelationChunk + (lane & 3) * 8, last = p.in[2] - 4 - u;
    const bool has_columns = chunk == 0 || (chunk + 1) * kAutocorrelationChunk > p.in[2] - 4;
    // A run has two rows below that are another's, but for the last one.
    const int run = end - row, kept_rows = has_columns ? (end == end_row ? run + 2 : run) : 0;
    uint2* const kept_at = columns.place(0, row - first_row, lane >> 2);
    int together = 0;
#pragma unroll 1
    for (int at = 0; at < run + 2; at += kWalkRows) {
      PackedRow packed[kWalkRows];
#pragma unroll
      for (int i = 0; i < kWalkRows; ++i) packed[i].set(rows[i], scale);
      cursor.load_next(rows);
      if (at < kept_rows) {
#pragma unroll
        for (int i = 0; i < kWalkRows; ++i) {
          if (at + i < kept_rows) {
            keep_columns<kVectors>(kept_at + (at + i) * kOuterPitch, to_right, packed[i].w, u, last);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kWalkRows; ++i) packed[i].exchange(lane);
#pragma unroll
      for (int i = 0; i < kWalkRows; ++i) sums.add(i, packed[i], masks, at + i < run ? ~0u : 0u);
      if (++together == kTogether<Element> / kWalkRows) {
        sums.flush(core, lane, first);
        together = 0, first = false;
      }
    }
    if (together > 0) {
      sums.flush(core, lane, first);
      first = false;
    }
  }
  if (first) sums.flush(core, lane, first);
}

// The sums of an outer row, all of it by one warp. Zeros where there is none.
template <typename Element, bool kVectors>
__device__ __forceinline__ void walk_outer_row(const AutocorrelationParams& p, float* to, const WalkShare& b, int row,
                                               float scale) {
  const AutocorrelationPlan& plan = p.plan;
  const int lane = b.lane;
  const bool exists = row >= b.first && row < b.end && (row < plan.core_rows[0] || row >= plan.core_rows[1]);
  WalkRow<Element> rows[kWalkRows];
  WalkCursor<Element, kVectors> cursor;
  auto load = [&](int chunk) {
    cursor.start(p, b.n, chunk, row, lane);
    if (chunk >= plan.chunks) cursor.rows_left = 0;
#pragma unroll
    for (int i = 0; i < kWalkRows; ++i) cursor.load(rows[i]);
  };
  WalkSums<Element> sums;
  sums.clear();
  bool first = true;
  if (exists) {
    load(0);
    int together = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      PackedRow packed[kWalkRows];
#pragma unroll
      for (int i = 0; i < kWalkRows; ++i) packed[i].set(rows[i], scale);
      load(chunk + 1);
      WalkMasks<Element> masks;
      masks.set(plan, chunk, lane);
      sums.forget_rows();
#pragma unroll
      for (int i = 0; i < kWalkRows; ++i) packed[i].exchange(lane);
#pragma unroll
      for (int i = 0; i < kWalkRows; ++i) sums.add(i, packed[i], masks, i == 0 ? ~0u : 0u);
      if (++together == kTogether<Element>) {
        sums.flush(to, lane, first);
        together = 0, first = false;
      }
    }
  }
  sums.flush(to, lane, first);
}

// A value as the products have it.
template <typename Element>
__device__ __forceinline__ float as_multiplied(Element v, float scale) {
  if constexpr (std::is_same_v<Element, float>) {
    return __half2float(__float2half_rn(v * scale));
  } else {
    return to_acc(v);
  }
}

// The outermost values, with zeros around: rows 0 to 3, the last two and two of zeros, in each two columns of zeros,
// columns 0 to 3, the last four and two of zeros.
inline constexpr int kCornerRow = 12 * kAutocorrelationChannels;
template <typename Element>
__device__ __forceinline__ void load_corners(const AutocorrelationParams& p, int64_t n, float scale, float* corners,
                                             int thread, int threads) {
#pragma unroll 8
  for (int i = thread; i < kCornerFloats; i += threads) {
    const int row = i / kCornerRow, column = i % kCornerRow / 8, channel = i % 8;
    const int h = row < 4 ? row : p.in[1] - 6 + row, w = column < 6 ? column - 2 : p.in[2] - 10 + column;
    float v = 0.f;
    if (channel < p.c_in && h < p.in[1] && w >= 0 && w < p.in[2]) {
      v = as_multiplied<Element>(
          static_cast<const Element*>(
              p.x)[n * p.x_stride_n + channel * p.x_stride_c + h * p.x_stride[1] + w * p.x_stride[2]],
          scale);
    }
    corners[i] = v;
  }
}

// A side's outer columns: K are rows. Rows 0 to 7 of the left operand are the channels of one of the two outermost
// columns, rows 8 to 15 those of the other; the right operand is one of four columns in one of three rows. A warp takes
// one of these three and half of the steps of 16 rows, and one of them the channels' own sums, too.
inline constexpr int kColumnJobs = 12;
template <typename Element>
__device__ __forceinline__ void sum_columns(const AutocorrelationPlan& plan, const AutocorrelationLayout& layout,
                                            float* smem, const WalkShare& b) {
  const OuterColumns columns(plan, layout, smem);
  const int lane = b.lane, count = min(b.end, plan.core_rows[1]) - max(b.first, plan.core_rows[0]);
  const int side = b.warp & 1, half = b.warp >> 1 & 1, h = b.warp >> 2;
  const int middle = (count + 31) / 32 * 16;
  float acc[4][4] = {}, own[4] = {};
#pragma unroll 2
  for (int row = half * middle; row < (half == 0 ? min(middle, count) : count); row += 16) {
    const uint2* const from = columns.place(side, row + (lane & 3) * 4, lane >> 2);
    const int left_rows = count - row - (lane & 3) * 4;
    uint2 left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = from[i * kOuterPitch], right[i] = from[(i + h) * kOuterPitch];
    const uint32_t low = pair_mask(0, left_rows), high = pair_mask(0, left_rows - 2);
    auto of_side = [&](int i) { return side == 0 ? left[i].x : left[i].y; };
    const uint32_t a[4] = {
        __byte_perm(of_side(0), of_side(1), 0x5410) & low, __byte_perm(of_side(0), of_side(1), 0x7632) & low,
        __byte_perm(of_side(2), of_side(3), 0x5410) & high, __byte_perm(of_side(2), of_side(3), 0x7632) & high};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      auto pair = [&](int i) {
        return __byte_perm(c < 2 ? right[i].x : right[i].y, c < 2 ? right[i + 1].x : right[i + 1].y,
                           c % 2 ? 0x7632 : 0x5410);
      };
      mma_halves<Element>(acc[c], a, pair(0), pair(2));
    }
    mma_halves<Element>(own, a, kPairOfOnes<Element>, kPairOfOnes<Element>);
  }
  float* const to = smem + layout.columns + (half * 2 + side) * kColumnFloats;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    reinterpret_cast<float4*>(to)[(h * 4 + c) * 32 + lane] = make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]);
  }
  if (h == 0) {
    to[12 * 128 + lane] = own[0];
    to[12 * 128 + 32 + lane] = own[2];
  }
}

// The power of two that all values of a sample are multiplied by before they become fp16: it brings the largest of some
// of them to 2^2 to 2^3. Values that are 2^13 times as large become infinite and leave the sample to the convolution;
// what is lost of small ones is 2^-27 of it. 0: there are zeros only. Called by all threads of a block, which see the
// same values whatever part of the sample they have.
__device__ __forceinline__ float sampled_size(const AutocorrelationParams& p, int64_t n, int warp, int lane) {
  // Each warp a piece of a row, in turns of every channel.
  constexpr int kWarps = kAutocorrelationThreads / 32;
  const int channel = warp % p.c_in, row = static_cast<int>((2 * warp + 1) * int64_t(p.in[1]) / (2 * kWarps));
  const int pieces = p.in[2] / 32, column = pieces > 1 ? (warp * 5 + 2) % pieces * 32 + lane : lane % p.in[2];
  const float size = fabsf(__ldg(static_cast<const float*>(p.x) + n * p.x_stride_n + channel * p.x_stride_c +
                                 row * p.x_stride[1] + column * p.x_stride[2]));
  return size < INFINITY ? size : 0.f;
}
__device__ __forceinline__ float scale_of_size(uint32_t bits) {
  return bits == 0 ? 0.f : __uint_as_float((256 - min(max(bits >> 23, 3u), 253u)) << 23);
}

// What the end needs of each output channel.
template <typename Element>
__device__ __forceinline__ void load_affine(const AutocorrelationParams& p, float* affine, int thread, int threads) {
  const GroupStatsFinalizeParams& f = p.stats.finish;
#pragma unroll 1
  for (int c = thread; c < p.c_out; c += threads) {
    affine[c] = p.bias ? to_acc(static_cast<const Element*>(p.bias)[c]) : 0.f;
    affine[kAutocorrelationOutputs + c] = f.weight ? load_as<float>(f.weight, c, f.affine_dtype) : 1.f;
    affine[2 * kAutocorrelationOutputs + c] = f.bias ? load_as<float>(f.bias, c, f.affine_dtype) : 0.f;
  }
}

// A tap sees at most two outer rows and two outer columns. Of one of them: where its sums lie, where it lies among the
// corners, and whether there is one, 1 or 0; of a column also which of the two of its side it is, and the first column
// of the side among those that the right operand has, from which distances count.
struct alignas(16) OuterRow {
  int sums, corner;
  float exists;
  int padding;
};
struct alignas(16) OuterColumn {
  int sums, corner;
  float exists;
  int right;
};
__device__ __forceinline__ OuterRow outer_row(const AutocorrelationParams& p, const AutocorrelationLayout& layout,
                                              int tap, int i) {
  const uint32_t all = p.plan.seen_rows[tap], seen = i == 1 ? all & (all - 1) : all;
  const int e = seen != 0 ? __ffs(seen) - 1 : 0;
  const int corner = e < 2 ? e : p.plan.core_rows[1] + e + 4 - p.in[1];
  return {layout.edges + e * kWalkFloats, corner * kCornerRow, seen != 0 ? 1.f : 0.f, 0};
}
__device__ __forceinline__ OuterColumn outer_column(const AutocorrelationParams& p, const AutocorrelationLayout& layout,
                                                    int tap, int i) {
  const uint32_t all = p.plan.seen_columns[tap], seen = i == 1 ? all & (all - 1) : all;
  const int e = seen != 0 ? __ffs(seen) - 1 : 0, place = e < 2 ? e : p.plan.core_columns[1] + e - p.in[2];
  return {layout.columns + (e >> 1) * kColumnFloats + place * 2, (e < 2 ? e + 2 : place + 8) * 8, seen != 0 ? 1.f : 0.f,
          e < 2 ? place : place + 2};
}

// Where a pair of taps, the second not before the first, finds what its products are made of: a product of core values,
// two of outer rows and two of outer columns, and four corners of the left operand, from which those of the right one
// are `right` away. Zeros where there are none.
struct alignas(16) PairPlaces {
  int core, rows[2], columns[2], corners[4], right, first, second;
};
static_assert(sizeof(PairPlaces) == kPairInts * 4);
__device__ __forceinline__ void fill_places(const AutocorrelationParams& p, const AutocorrelationLayout& layout,
                                            float* smem, int thread, int threads) {
  const AutocorrelationPlan& plan = p.plan;
  const int taps = plan.kernel[0] * plan.kernel[1], width = plan.kernel[1];
  for (int i = thread; i < kZeroFloats; i += threads) smem[layout.zeros + i] = 0.f;
  for (int pair = thread; pair < taps * (taps + 1) / 2; pair += threads) {
    int first = 0, distance = pair;
    while (distance >= taps - first) distance -= taps - first, ++first;
    const int second = first + distance, ky = first / width, ky2 = second / width, kx = first - ky * width;
    const int dy = ky2 - ky, dx = second - ky2 * width - kx;
    // An odd distance: the left operand moved by one, the right one's by one more.
    const int odd = dx & 1, shift = (dx + odd) / 2 + 1, tile = dy == 0 ? shift - 1 : 2 + (dy - 1) * 3 + shift;
    PairPlaces to;
    const int at = tile * 128 + odd * 2;
    to.core = layout.walks + at;
    to.right = dy * kCornerRow + dx * 8;
    to.first = first * p.c_in, to.second = second * p.c_in;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const OuterRow row = outer_row(p, layout, ky, r);
      const OuterColumn column = outer_column(p, layout, kx, r);
      const int right = column.right + dx;  // of the four columns of that side
      to.rows[r] = row.exists != 0.f ? row.sums + at : layout.zeros;
      to.columns[r] =
          column.exists != 0.f && unsigned(right) < 4u ? column.sums + (dy * 4 + right) * 128 : layout.zeros;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const OuterColumn other = outer_column(p, layout, kx, i);
        // Columns of zeros are the first two of a row.
        to.corners[r * 2 + i] =
            layout.corners + (row.exists * other.exists != 0.f ? row.corner + other.corner : 2 * kCornerRow + 8);
      }
    }
    reinterpret_cast<PairPlaces*>(smem + layout.pairs)[pair] = to;
  }
}

// From merged sums to statistics of the sample. All values of x were multiplied by 1 / unit. Called by all threads of
// the block; the first filters, corners, places and the channels' values are there.
template <typename Element>
__device__ __forceinline__ void finish_autocorrelation(const AutocorrelationParams& p,
                                                       const AutocorrelationLayout& layout, float* smem, int64_t n,
                                                       float unit, bool broken) {
  constexpr int kThreads = kAutocorrelationThreads, kWarps = kThreads / 32, kPitch = kAutocorrelationEntries;
  static_assert(kWarps == 16);
  const AutocorrelationPlan& plan = p.plan;
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int taps = plan.kernel[0] * plan.kernel[1], entries = taps * p.c_in, octets = (entries + 7) / 8;
  float4* const means = reinterpret_cast<float4*>(smem + layout.entries);
  float* const matrix = smem + layout.matrix;
  const float positions = static_cast<float>(p.out[1]) * static_cast<float>(p.out[2]);
  const float inverse = 1.f / positions, inverse_rest = fmaf(-inverse, positions, 1.f) * inverse;

  if (tid < entries) {
    const int tap = tid / p.c_in, c = tid - tap * p.c_in, ky = tap / plan.kernel[1], kx = tap - ky * plan.kernel[1];
    const OuterRow row[2] = {outer_row(p, layout, ky, 0), outer_row(p, layout, ky, 1)};
    float rest = row[0].exists * smem[row[0].sums + own_sum(c)] + row[1].exists * smem[row[1].sums + own_sum(c)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const OuterColumn column = outer_column(p, layout, kx, i);
      // These lie behind the products, one column of the side behind the other.
      float sum = smem[column.sums + 12 * 128 + (column.right & 1) * 30 + c * 4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum = fmaf(row[r].exists, smem[layout.corners + row[r].corner + column.corner + c], sum);
      }
      rest = fmaf(column.exists, sum, rest);
    }
    // Sum and mean in two terms each.
    const float own = smem[layout.walks + own_sum(c)], sum = own + rest, sum_rest = rest - (sum - own);
    const float mean = sum * inverse;
    const float mean_rest = fmaf(sum, inverse, -mean) + fmaf(sum, inverse_rest, sum_rest * inverse);
    means[tid] = make_float4(mean, mean_rest, 0.f, sum);
  } else if (tid < octets * 8) {
    for (int i = 0; i < octets * 8; ++i) matrix[i * kPitch + tid] = matrix[tid * kPitch + i] = 0.f;
  }
  __syncthreads();
  // Covariances, those above the diagonal counted twice; blocks of eight on the diagonal have zeros below it.
#pragma unroll 1
  for (int job = warp; job < taps * (taps + 1) / 2; job += kWarps) {
    const PairPlaces places = reinterpret_cast<const PairPlaces*>(smem + layout.pairs)[job];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = half * 4 + lane / 8, c2 = lane % 8, in_tile = (c * 4 + c2 / 2) * 4 + c2 % 2;
      float rest = (smem[places.rows[0] + in_tile] + smem[places.rows[1] + in_tile]) +
                   (smem[places.columns[0] + in_tile] + smem[places.columns[1] + in_tile]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rest = fmaf(smem[places.corners[i] + c], smem[places.corners[i] + places.right + c2], rest);
      }
      const int k = places.first + c, k2 = places.second + c2;
      if (c >= p.c_in || c2 >= p.c_in || k2 < k) continue;
      // What the means' product takes away is subtracted where it is large, and its rounding with the small terms.
      const float4 a = means[k], b = means[k2];
      const float squares = smem[places.core + in_tile];
      const float product = a.x * b.w, product_rest = fmaf(a.x, b.w, -product) + a.y * b.w;
      const float covariance = (squares - product) + (rest - product_rest);
      matrix[k * kPitch + k2] = k == k2 ? covariance : 2.f * covariance;
      if (k == k2) {
        means[k].z = squares + rest;
      } else if (k / 8 == k2 / 8) {
        matrix[k2 * kPitch + k] = 0.f;
      }
    }
  }
  const float* const filters = smem + layout.weights;
  const float* const affine = smem + layout.affine;
  float* const parts = smem + layout.parts;
  Moments<float>* const moments = reinterpret_cast<Moments<float>*>(smem + layout.moments);
  float* const alone = reinterpret_cast<float*>(moments + kAutocorrelationOutputs);
#pragma unroll 1
  for (int c_first = 0; c_first < p.c_out; c_first += 64) {
    if (c_first > 0) load_filters<Element>(p, smem + layout.weights, c_first, warp, kWarps, lane);
    __syncthreads();
    {
      // A warp has 16 filters and up to three blocks of eight columns of the matrix, which are eleven or twelve steps.
      // Filters have TF32's digits, and three terms of the matrix all of its.
      const int share = warp / 4, o = warp % 4 * 16 + lane / 4, t = lane % 4;
      float m2[2] = {};
#pragma unroll 1
      for (int i = 0; i < 3; ++i) {
        const int block = i == 0 ? 8 - share : i == 1 ? 1 + share : share == 3 ? 0 : octets;
        if (block >= octets) continue;
        float large[4] = {}, small[4] = {};
        const float* left = filters + t * kFilterPitch + o;
        const float* right = matrix + t * kPitch + block * 8 + lane / 4;
#pragma unroll 2
        for (int k = 0; k <= block; ++k) {
          const uint32_t a[4] = {__float_as_uint(left[0]), __float_as_uint(left[8]),
                                 __float_as_uint(left[4 * kFilterPitch]), __float_as_uint(left[4 * kFilterPitch + 8])};
          uint32_t terms[3][2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float v = right[j * 4 * kPitch];
            terms[0][j] = to_tf32(v);
            const float rest = v - __uint_as_float(terms[0][j]);
            terms[1][j] = to_tf32(rest);
            terms[2][j] = __float_as_uint(rest - __uint_as_float(terms[1][j]));
          }
          mma_tf32(small, a, terms[2][0], terms[2][1]);
          mma_tf32(large, a, terms[0][0], terms[0][1]);
          mma_tf32(small, a, terms[1][0], terms[1][1]);
          left += 8 * kFilterPitch, right += 8 * kPitch;
        }
        const float* const by = filters + (block * 8 + 2 * t) * kFilterPitch + o;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          m2[j / 2] = fmaf(by[j % 2 * kFilterPitch + j / 2 * 8], large[j] + small[j], m2[j / 2]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        m2[j] += __shfl_xor_sync(0xffffffffu, m2[j], 1);
        m2[j] += __shfl_xor_sync(0xffffffffu, m2[j], 2);
        if (t == 0) parts[share * 64 + o + 8 * j] = m2[j];
      }
    }
    // Eight lanes have a filter's mean and its terms' squares.
    const int o = warp * 4 + lane / 8, c = c_first + o, eighth = lane % 8;
    float mean = 0.f, squares = 0.f;
#pragma unroll 3
    for (int k = eighth; k < entries; k += 8) {
      const float w = filters[k * kFilterPitch + o];
      const float4 of = means[k];
      mean = fmaf(w, of.x, mean), squares = fmaf(w * w, of.z, squares);
    }
#pragma unroll
    for (int i = 1; i < 8; i *= 2) {
      mean += __shfl_xor_sync(0xffffffffu, mean, i), squares += __shfl_xor_sync(0xffffffffu, squares, i);
    }
    __syncthreads();
    if (eighth == 0 && c < p.c_out) {
      float m2 = (parts[o] + parts[64 + o]) + (parts[128 + o] + parts[192 + o]);
      if (m2 < 0.f) m2 = 0.f;  // and a NaN stays
      moments[c] = {fmaf(mean, unit, affine[c]), m2 * unit * unit, positions};
      alone[c] = squares * unit * unit;
    }
  }
  __syncthreads();
  // A thread has a channel, and of all of its group what the others have, too.
  static_assert(kAutocorrelationOutputs <= kThreads);
  const GroupStatsFinalizeParams& f = p.stats.finish;
  bool inexact = broken;
  float normed = 0.f;
  if (tid < p.c_out) {
    const int num_groups = static_cast<int>(f.g), of_group = p.c_out / num_groups, group = tid / of_group;
    // Channels count the same number of values: no divisions.
    const int first = group * of_group;
    const float origin = moments[first].mean, share = 1.f / static_cast<float>(of_group);
    float terms = 0.f, m2 = 0.f, offset = 0.f;
#pragma unroll 4
    for (int c = first; c < first + of_group; ++c) {
      terms += alone[c], m2 += moments[c].m2, offset += moments[c].mean - origin;
    }
    offset *= share;
#pragma unroll 4
    for (int c = first; c < first + of_group; ++c) {
      const float d = moments[c].mean - origin - offset;
      m2 = fmaf(d * d, positions, m2);
    }
    inexact = inexact || !(terms <= m2 * kAutocorrelationCancellation<Element>) || !(m2 < INFINITY);
    const float mean_of_group = origin + offset, rstd = __frsqrt_rn(m2 * (inverse * share) + static_cast<float>(f.eps));
    const float mean = moments[tid].mean, weight = affine[kAutocorrelationOutputs + tid],
                shift = affine[2 * kAutocorrelationOutputs + tid];
    if (tid == first) {
      if (f.mean) static_cast<float*>(f.mean)[n * num_groups + group] = mean_of_group;
      if (f.rstd) static_cast<float*>(f.rstd)[n * num_groups + group] = rstd;
    }
    if (f.channel_mean) static_cast<float*>(f.channel_mean)[n * p.c_out + tid] = mean;
    if (f.table) {
      static_cast<float4*>(f.table)[n * p.c_out + tid] = make_float4(mean_of_group, rstd, weight, shift);
    }
    normed = fmaf((mean - mean_of_group) * rstd, weight, shift);
  }
  inexact = __syncthreads_or(inexact);
  if (tid == 0) p.inexact[n] = inexact;
  if (p.stats.sample_mean) {
    const float sum = block_sum(normed, smem + layout.scratch);
    if (tid == 0) p.stats.sample_mean[n] = sum / static_cast<float>(p.c_out);
  }
}

#endif

// One block a slice of a sample.
template <typename Element, bool kVectors>
__global__ void __launch_bounds__(kAutocorrelationThreads, 1)
    conv_autocorrelation_kernel(const __grid_constant__ AutocorrelationParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kThreads = kAutocorrelationThreads, kWarps = kAutocorrelationWarps;
  constexpr bool kScaled = std::is_same_v<Element, float>;
  extern __shared__ __align__(128) float autocorrelation_smem[];
  float* const smem = autocorrelation_smem;
  const AutocorrelationPlan& plan = p.plan;
  const AutocorrelationLayout layout = autocorrelation_layout(kWarps, plan.edge_rows, plan.column_rows);
  const int tid = threadIdx.x;
  const unsigned slices = static_cast<unsigned>(plan.slices);  // as the grid's size
  WalkShare b;
  b.n = blockIdx.x / slices;
  const int slice = static_cast<int>(blockIdx.x % slices);
  b.first = slice * plan.slice_rows, b.end = min(b.first + plan.slice_rows, p.in[1]);
  b.lane = tid & 31, b.warp = __shfl_sync(0xffffffffu, tid / 32, 0);
  uint32_t* const maxima = reinterpret_cast<uint32_t*>(smem + layout.scratch);

  let_dependents_start();
  // Of some values, asked for before anything else.
  const float size = kScaled ? sampled_size(p, b.n, b.warp, b.lane) : 0.f;
  float scale = 1.f;
  // A barrier in memory: warps of both kinds come to it, each in code of its own.
  uint64_t* const sampled = reinterpret_cast<uint64_t*>(maxima + 62);
  static_assert(kThreads / 32 < 62);
  if constexpr (kScaled) {
    if (tid == 0) {
      barrier_init(sampled, kThreads);
      barrier_init_fence();
    }
    __syncthreads();
  }
  // Called by every warp once, its first loads under way.
  auto ready = [&] {
    if constexpr (kScaled) {
      const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(size));
      if (b.lane == 0) maxima[b.warp] = of_warp;
      __syncwarp();
      barrier_arrive(sampled);
      barrier_wait(sampled, 0);
      scale = scale_of_size(__reduce_max_sync(0xffffffffu, maxima[min(b.lane, kThreads / 32 - 1)]));
    }
    return scale;
  };
  if (b.warp < kWarps) {
    walk_rows<Element, kVectors>(p, layout, smem, b, ready);
  } else {
    constexpr int kOthers = kAutocorrelationOthers;
    const int worker = b.warp - kWarps, thread = worker * 32 + b.lane;
    ready();
    if (slices == 1) {
      // Each its own, since all of it waits for memory.
      static_assert(kOthers == 4);
      if (worker == 0) {
        load_corners<Element>(p, b.n, scale, smem + layout.corners, b.lane, 32);
      } else if (worker == 1) {
        fill_places(p, layout, smem, b.lane, 32);
      } else {
        load_filters<Element>(p, smem + layout.weights, 0, worker - 2, 2, b.lane);
      }
      load_affine<Element>(p, smem + layout.affine, thread, 32 * kOthers);
    }
    // Zeros behind the rows of the outer columns.
    const OuterColumns columns(plan, layout, smem);
    const int rows = min(b.end, plan.core_rows[1]) - max(b.first, plan.core_rows[0]) + 2;
    for (int i = rows * kOuterPitch + thread; i < plan.column_rows * kOuterPitch; i += 32 * kOthers) {
      *columns.place(0, 0, i) = *columns.place(1, 0, i) = make_uint2(0, 0);
    }
    if (worker < plan.edge_rows) {
      // The last of several slices has the outer rows below, another one's would be those above.
      const int outer = slices > 1 && slice > 0 ? worker + 2 : worker;
      walk_outer_row<Element, kVectors>(p, smem + layout.edges + worker * kWalkFloats, b,
                                        outer < 2 ? outer : plan.core_rows[1] + outer - 2, scale);
    }
  }
  __syncthreads();
  // Merged sums take the place of the first ones, or leave with all others where a sample has slices.
  float* const to = slices == 1 ? nullptr : p.sums + (b.n * slices + slice) * plan.slice_floats;
  auto merge = [&](int sets, int vectors, int at, float* out, int thread, int threads) {
#pragma unroll 2
    for (int i = thread; i < vectors; i += threads) {
      const float4* const from = reinterpret_cast<const float4*>(smem + at) + i;
      float4 sum = from[0];
      for (int set = 1; set < sets; ++set) {
        const float4 v = from[set * vectors];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      reinterpret_cast<float4*>(out)[i] = sum;
    }
  };
  static_assert(kWarps >= kColumnJobs);
  if (b.warp < kColumnJobs) {
    sum_columns<Element>(plan, layout, smem, b);
  } else {
    merge(kWarps, kWalkFloats / 4, layout.walks, to ? to : smem + layout.walks, tid - kColumnJobs * 32,
          kThreads - kColumnJobs * 32);
  }
  __syncthreads();
  merge(2, 2 * kColumnFloats / 4, layout.columns, smem + layout.columns, tid, kThreads);
  __syncthreads();
  if (to) {
    // The outer rows' sums, and behind them the outer columns'.
    const float4* const edges = reinterpret_cast<const float4*>(smem + layout.edges);
    for (int i = tid; i < (plan.edge_rows * kWalkFloats + 2 * kColumnFloats) / 4; i += kThreads) {
      reinterpret_cast<float4*>(to + kWalkFloats)[i] = edges[i];
    }
  }
  if (to) {
    if (tid == 0) to[plan.slice_floats - 4] = scale;
    return;
  }
  const bool broken = kScaled && scale == 0.f;
  finish_autocorrelation<Element>(p, layout, smem, b.n, broken ? 1.f : 1.f / scale, broken);
#endif
}

// Behind it where a sample has several slices, one block a sample.
template <typename Element>
__global__ void __launch_bounds__(kAutocorrelationThreads, 1)
    conv_autocorrelation_finish_kernel(const __grid_constant__ AutocorrelationParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kThreads = kAutocorrelationThreads;
  extern __shared__ __align__(128) float autocorrelation_smem[];
  float* const smem = autocorrelation_smem;
  const AutocorrelationPlan& plan = p.plan;
  const AutocorrelationLayout layout = autocorrelation_layout(1, 4, 0);
  const int tid = threadIdx.x, slices = static_cast<int>(plan.slices);
  const int64_t n = blockIdx.x;
  let_dependents_start();
  load_filters<Element>(p, smem + layout.weights, 0, tid / 32, kThreads / 32, tid % 32);
  load_affine<Element>(p, smem + layout.affine, tid, kThreads);
  fill_places(p, layout, smem, tid, kThreads);
  wait_for_prerequisites();
  const float* const from = p.sums + n * slices * plan.slice_floats;
  const float scale = from[plan.slice_floats - 4];
  load_corners<Element>(p, n, scale, smem + layout.corners, tid, kThreads);
  constexpr int kOfWalk = kWalkFloats / 4, kOfColumns = 2 * kColumnFloats / 4;
  auto vectors = [&](int64_t slice, int set) {
    return reinterpret_cast<const float4*>(from + slice * plan.slice_floats + set * kWalkFloats);
  };
#pragma unroll 1
  for (int i = tid; i < 5 * kOfWalk + kOfColumns; i += kThreads) {
    const int set = i / kOfWalk, of = i - set * kOfWalk;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (set >= 1 && set <= 4) {
      // The first slice has the outer rows above, the last one those below.
      sum = vectors(set <= 2 ? 0 : slices - 1, set <= 2 ? set : set - 2)[of];
    } else {
      const int at = set == 0 ? i : i - 2 * kOfWalk;
#pragma unroll 4
      for (int s = 0; s < slices; ++s) {
        const float4 v = vectors(s, 0)[at];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
    }
    const int to = set == 0   ? layout.walks + of * 4
                   : set <= 4 ? layout.edges + (i - kOfWalk) * 4
                              : layout.columns + (i - 5 * kOfWalk) * 4;
    *reinterpret_cast<float4*>(smem + to) = sum;
  }
  __syncthreads();
  const bool broken = scale == 0.f;
  finish_autocorrelation<Element>(p, layout, smem, n, broken ? 1.f : 1.f / scale, broken);
#endif
}

}  // namespace kgopt
