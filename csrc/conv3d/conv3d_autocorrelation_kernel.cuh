// Statistics of a 2D convolution with stride 1 from its input alone, sm_90a.
//
// The sum of an output channel's squares is w' G w, where G[k, k'] sums products of input values over positions, k and
// k' being (tap, channel) pairs. But for the borders an entry depends on the channels and on the distance of the two
// taps, and half of the distances are enough: for 3 x 3 taps 13 matrices of 8 x 8 instead of one of 72 x 72.
//
// Products are those of a warp, positions along a row being K of both operands. K may be numbered in any way as long as
// both operands agree, so that a lane loads eight neighbours of its channel's row from memory into the registers that
// the products read. Rows 0 to 7 of the left operand are the channels, rows 8 to 15 the same moved by one position; the
// right operand is the row itself, the next or the one after, moved by -2, 0 or 2, which is other registers. Warps walk
// down the rows, and keep three of them.
//
// The left operand's position tells which taps see a product. Outer rows have sums of their own, outer columns warps of
// their own, whose K are rows, and what is outer in both is a product for each entry.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../common/async.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/dtype.cuh"
#include "../common/mma.cuh"
#include "../common/reduce.cuh"
#include "conv3d_autocorrelation_params.h"
#include "conv3d_narrow_finish.cuh"
#include "conv3d_narrow_window.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// How much larger the sum of the squares of a filter's terms may be than the variance of their sum, in a norm's group
// as a whole: sums of squares are known to some 2^-21 of their size.
template <typename Element>
inline constexpr float kAutocorrelationCancellation = sizeof(Element) == 4 ? 512.f : 2048.f;

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

// A row as products read it. Of eight neighbours, in words w0 to w3, with w- before and w4 behind them, a product of 16
// takes w0 and w2, the next w1 and w3. Moved by -2, 0 and 2 these are (w-, w1) and (w0, w2), then (w0, w2) and (w1, w3),
// then (w1, w3) and (w2, w4). The right operand's two words lie in neighbouring registers, so w1 and w2 are there twice.
struct WalkWords {
  uint32_t pair[4][2];

  __device__ __forceinline__ uint32_t word(int i) const {  // w0 to w4
    return i == 0 ? pair[1][0] : i == 1 ? pair[0][1] : i == 2 ? pair[1][1] : i == 3 ? pair[2][1] : pair[3][1];
  }
};

// A lane's values of a row: eight neighbours of its channel, and for the outer lanes of the four that share a row the
// two before or behind them.
template <typename Element>
struct WalkRow {
  static constexpr bool kScaled = std::is_same_v<Element, float>;
  static constexpr int kVector = kScaled ? 4 : 2;  // words that are loaded together
  static constexpr int kAhead = kScaled ? NAR_AHEAD32 : NAR_AHEAD16;   // rows that are under way
  static constexpr int kUnrolled = kAhead % 3 == 0 ? kAhead : 3 * kAhead;  // a multiple of those that are kept, too
  uint32_t v[kScaled ? 2 : 1][kScaled ? 4 : 4], pair[kScaled ? 2 : 1];

  __device__ __forceinline__ void convert(WalkWords& words, float scale, int lane) const {
    uint32_t w[4], outer;
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = packed_halves(__uint_as_float(v[i / 2][i % 2 * 2]) * scale,
                             __uint_as_float(v[i / 2][i % 2 * 2 + 1]) * scale);
      }
      outer = packed_halves(__uint_as_float(pair[0]) * scale, __uint_as_float(pair[1]) * scale);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = v[0][i];
      outer = pair[0];
    }
    const uint32_t before = __shfl_up_sync(0xffffffffu, w[3], 1, 4);
    const uint32_t behind = __shfl_down_sync(0xffffffffu, w[0], 1, 4);
    words.pair[0][0] = (lane & 3) == 0 ? outer : before;
    words.pair[0][1] = w[1];
    words.pair[1][0] = w[0], words.pair[1][1] = w[2];
    asm volatile("mov.b32 %0, %1;" : "=r"(words.pair[2][0]) : "r"(w[1]));
    words.pair[2][1] = w[3];
    asm volatile("mov.b32 %0, %1;" : "=r"(words.pair[3][0]) : "r"(w[2]));
    words.pair[3][1] = (lane & 3) == 3 ? outer : behind;
  }
};

// Where a lane stands in its way down the rows.
template <typename Element, bool kVectors>
struct WalkCursor {
  const Element* at;
  int64_t stride, stride_w;
  int rows_left;   // of the input
  uint32_t inside;  // a bit for each load; kVectors: of vectors and the outer pair, else of values

  __device__ __forceinline__ void start(const AutocorrelationParams& p, int64_t n, int chunk, int row, int lane) {
    const int channel = lane >> 2, u = chunk * kAutocorrelationChunk + (lane & 3) * 8;
    stride = p.x_stride[1], stride_w = p.x_stride[2];
    at = static_cast<const Element*>(p.x) + n * p.x_stride_n + channel * p.x_stride_c + row * stride + u * stride_w;
    rows_left = p.in[1] - row;
    const int outer = (lane & 3) == 0 ? -2 : 8;
    const bool has_outer = (lane & 3) == 0 || (lane & 3) == 3;
    auto is_inside = [&](int i) { return channel < p.c_in && unsigned(u + i) < unsigned(p.in[2]); };
    inside = 0;
    if constexpr (kVectors) {
      inside = is_inside(0) | is_inside(4) << 1 | (has_outer && is_inside(outer)) << 2;
    } else {
      for (int i = 0; i < 8; ++i) inside |= is_inside(i) << i;
      for (int i = 0; i < 2; ++i) inside |= (has_outer && is_inside(outer + i)) << (8 + i);
    }
  }
  __device__ __forceinline__ void load(WalkRow<Element>& row, int lane) {
    constexpr bool kScaled = WalkRow<Element>::kScaled;
    const uint32_t valid = rows_left > 0 ? inside : 0;
    const int outer = (lane & 3) == 0 ? -2 : 8;
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
};

// A warp's sums: 13 distances in eight products, and the channels' own. What a row adds stays in registers for a few
// rows, since the tensor core cuts off where it adds.
template <typename Element>
struct WalkSums {
  static constexpr int kRows = 8;  // that are added up there
  float acc[8][4], own[4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i / 4][i % 4] = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = 0.f;
  }
  // The products of row a, whose values count where the masks say, with itself and the two below.
  __device__ __forceinline__ void add(const WalkWords& a, const WalkWords& below, const WalkWords& second,
                                      const uint32_t (&masks)[5]) {
    uint32_t same[5], moved[4];
#pragma unroll
    for (int i = 0; i < 5; ++i) same[i] = a.word(i) & masks[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) moved[i] = __funnelshift_r(same[i], same[i + 1], 16);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t left[4] = {same[step], moved[step], same[step + 2], moved[step + 2]};
      auto multiply = [&](float(&to)[4], const WalkWords& row, int i) {
        mma_halves<Element>(to, left, row.pair[i + step][0], row.pair[i + step][1]);
      };
      multiply(acc[0], a, 1);
      multiply(acc[1], a, 2);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        multiply(acc[2 + i], below, i);
        multiply(acc[5 + i], second, i);
      }
      mma_halves<Element>(own, left, kPairOfOnes<Element>, kPairOfOnes<Element>);
    }
  }
  __device__ __forceinline__ void flush(float* to, int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float4* const at = reinterpret_cast<float4*>(to) + i * 32 + lane;
      float4 v = *at;
      v.x += acc[i][0], v.y += acc[i][1], v.z += acc[i][2], v.w += acc[i][3];
      *at = v;
    }
    to[8 * 128 + lane] += own[0];
    clear();
  }
};

// What a block knows of its share of a sample.
struct WalkShare {
  int64_t n;
  int first, end;  // rows of the input
  int lane, warp;
};

__device__ __forceinline__ int outer_row(const AutocorrelationPlan& plan, int row) {
  return row < plan.core_rows[0] ? row : row - plan.core_rows[1] + 2;
}

// What a warp does with its part of the rows. ready(): waits for the scale, which is known while loads are under way.
template <typename Element, bool kVectors, typename Ready>
__device__ __forceinline__ void walk_rows(const AutocorrelationParams& p, const AutocorrelationLayout& layout,
                                          float* smem, const WalkShare& b, Ready ready) {
  using Row = WalkRow<Element>;
  constexpr int kAhead = Row::kAhead;
  const AutocorrelationPlan& plan = p.plan;
  const int lane = b.lane, tasks = plan.chunks * plan.runs;
  float* const core = smem + layout.walks + b.warp * kWalkFloats;
  Row rows[kAhead];
  WalkCursor<Element, kVectors> cursor;
  float scale = 0.f;
  int task = b.warp, chunk = 0, row = 0, end = 0;
  auto start = [&] {
    if (task < tasks) {
      const int run = task / plan.chunks;
      chunk = task - run * plan.chunks;
      row = b.first + run * plan.run_rows;
      end = min(row + plan.run_rows, b.end);
      cursor.start(p, b.n, chunk, row, lane);
      if (row >= end) cursor.rows_left = 0;
    } else {
      row = end = 0;
      cursor.start(p, b.n, 0, 0, lane);
      cursor.rows_left = 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) cursor.load(rows[i], lane);
  };
  start();
  scale = ready();
  WalkSums<Element> sums;
  sums.clear();
#pragma unroll 1
  for (; task < tasks; task += kAutocorrelationWarps, start()) {
    if (row >= end) continue;
    uint32_t masks[5];
    {
      const int u = chunk * kAutocorrelationChunk + (lane & 3) * 8;
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        masks[i] = pair_mask(plan.core_columns[0] - u - 2 * i, plan.core_columns[1] - u - 2 * i);
        asm volatile("" : "+r"(masks[i]));  // or they are computed again for every row
      }
    }
    const int slot = plan.chunks <= kAutocorrelationWarps ? chunk : b.warp;
    auto rows_together = [&] {  // the last row that is added up with this one
      const bool core_row = row >= plan.core_rows[0] && row < plan.core_rows[1];
      return core_row ? min(min(row + WalkSums<Element>::kRows, end), plan.core_rows[1]) - 1 : row;
    };
    int flush_at = rows_together();
    WalkWords kept[3];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i % kAhead].convert(kept[i], scale, lane);
      cursor.load(rows[i % kAhead], lane);
    }
#pragma unroll 1
    while (row < end) {
#pragma unroll
      for (int i = 0; i < Row::kUnrolled; ++i) {
        if (row < end) {
          rows[(i + 2) % kAhead].convert(kept[(i + 2) % 3], scale, lane);
          cursor.load(rows[(i + 2) % kAhead], lane);
          sums.add(kept[i % 3], kept[(i + 1) % 3], kept[(i + 2) % 3], masks);
          if (row == flush_at) {
            float* to = core;
            if (row < plan.core_rows[0] || row >= plan.core_rows[1]) {
              const int e = outer_row(plan, row) & (plan.edge_rows - 1);
              to = smem + layout.edges + (e * plan.edge_slots + slot) * kWalkFloats;
            }
            sums.flush(to, lane);
            ++row;
            flush_at = rows_together();
          } else {
            ++row;
          }
        }
      }
    }
  }
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

// One of the outermost values.
template <typename Element>
__device__ __forceinline__ Element corner_value(const AutocorrelationParams& p, int64_t n, int i) {
  const int channel = i & 7, column = i >> 3 & 7, row = i >> 6;
  const int h = row < 4 ? row : p.in[1] - 6 + row, w = column < 4 ? column : p.in[2] - 8 + column;
  if (channel >= p.c_in) return from_acc<Element>(0.f);
  return static_cast<const Element*>(
      p.x)[n * p.x_stride_n + channel * p.x_stride_c + h * p.x_stride[1] + w * p.x_stride[2]];
}

// What the warp of the left or right columns does: K are rows. Rows 0 to 7 of the left operand are the channels of one
// of the two outermost columns, rows 8 to 15 those of the other; the right operand is one of four columns.
template <typename Element, bool kVectors, typename Ready>
__device__ __forceinline__ void walk_columns(const AutocorrelationParams& p, float* to, float* corners,
                                             const WalkShare& b, int worker,
                                             Ready ready) {
  constexpr bool kScaled = std::is_same_v<Element, float>;
  const AutocorrelationPlan& plan = p.plan;
  constexpr int kStep = 16 * kAutocorrelationColumnWarps / 2;
  const int lane = b.lane, channel = lane >> 2, side = worker & 1;
  const int first = max(b.first, plan.core_rows[0]) + worker / 2 * 16, end = min(b.end, plan.core_rows[1]);
  const int64_t stride = p.x_stride[1], stride_w = p.x_stride[2];
  const Element* at = static_cast<const Element*>(p.x) + b.n * p.x_stride_n + channel * p.x_stride_c +
                      (first + (lane & 3) * 4) * stride + (side == 0 ? 0 : p.in[2] - 4) * stride_w;
  int row = first + (lane & 3) * 4;
  uint32_t v[6][kScaled ? 4 : 2], next[6][kScaled ? 4 : 2];
  auto load = [&](uint32_t(&to_row)[6][kScaled ? 4 : 2]) {
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const bool inside = channel < p.c_in && row + i < p.in[1] && row - (lane & 3) * 4 < end;
      if constexpr (kVectors) {
        load_if(to_row[i], at + i * stride, inside);
      } else {
        uint32_t bits[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) bits[k] = load_one_if(at + i * stride + k * stride_w, inside);
        if constexpr (kScaled) {
#pragma unroll
          for (int k = 0; k < 4; ++k) to_row[i][k] = bits[k];
        } else {
          to_row[i][0] = bits[0] | bits[1] << 16, to_row[i][1] = bits[2] | bits[3] << 16;
        }
      }
    }
    at += kStep * stride;
    row += kStep;
  };
  load(next);
  const float scale = ready();
  if (p.plan.slices == 1) {
#pragma unroll
    for (int i = worker * 32 + lane; i < kCornerFloats; i += 32 * kAutocorrelationColumnWarps) {
      corners[i] = as_multiplied<Element>(corner_value<Element>(p, b.n, i), scale);
    }
  }
  float acc[12][4] = {}, own[4] = {};
#pragma unroll 1
  for (int from = first; from < end; from += kStep) {
    const int own_row = row - kStep;
#pragma unroll
    for (int i = 0; i < 6; ++i) {
#pragma unroll
      for (int k = 0; k < (kScaled ? 4 : 2); ++k) v[i][k] = next[i][k];
    }
    load(next);
    uint32_t pairs[4][5];  // of a column rows i and i + 1
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        if constexpr (kScaled) {
          pairs[c][i] = packed_halves(__uint_as_float(v[i][c]) * scale, __uint_as_float(v[i + 1][c]) * scale);
        } else {
          pairs[c][i] = __byte_perm(v[i][c / 2], v[i + 1][c / 2], c % 2 ? 0x7632 : 0x5410);
        }
      }
    }
    const uint32_t low = pair_mask(0, end - own_row), high = pair_mask(0, end - own_row - 2);
    uint32_t left[4];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      left[c] = (side == 0 ? pairs[c][0] : pairs[c + 2][0]) & low;
      left[c + 2] = (side == 0 ? pairs[c][2] : pairs[c + 2][2]) & high;
    }
#pragma unroll
    for (int h = 0; h < 3; ++h) {
#pragma unroll
      for (int c = 0; c < 4; ++c) mma_halves<Element>(acc[h * 4 + c], left, pairs[c][h], pairs[c][h + 2]);
    }
    mma_halves<Element>(own, left, kPairOfOnes<Element>, kPairOfOnes<Element>);
  }
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    reinterpret_cast<float4*>(to)[i * 32 + lane] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  }
  to[12 * 128 + lane] = own[0];
  to[12 * 128 + 32 + lane] = own[2];
}

// The power of two that all values of a sample are multiplied by before they become fp16: it brings the largest of some
// of them to 2^2 to 2^3. Values that are 2^13 times as large become infinite and leave the sample to the convolution;
// what is lost of small ones is 2^-27 of it. 0: there are zeros only. Called by all threads of a block, which see the
// same values whatever part of the sample they have.
__device__ __forceinline__ float sampled_size(const AutocorrelationParams& p, int64_t n) {
  const uint32_t width = p.in[2], plane = width * p.in[1], all = plane * p.c_in;  // < 2^31
  float most = 0.f;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t i = __umulhi((threadIdx.x * 2 + k + 1) * 0x9E3779B9u, all);
    const uint32_t c = i / plane, row = (i - c * plane) / width, column = i - c * plane - row * width;
    const float size = fabsf(__ldg(static_cast<const float*>(p.x) + n * p.x_stride_n + c * p.x_stride_c +
                                   row * p.x_stride[1] + column * p.x_stride[2]));
    most = size < INFINITY ? fmaxf(most, size) : most;
  }
  return most;
}
__device__ __forceinline__ float scale_of_size(uint32_t bits) {
  return bits == 0 ? 0.f : __uint_as_float((256 - min(max(bits >> 23, 3u), 253u)) << 23);
}

// Weights of 64 output channels from c_first on, rounded as the convolution rounds them; zeros where there are none.
template <typename Element>
__device__ __forceinline__ void load_filters(const AutocorrelationParams& p, float* filters, int c_first) {
  const int entries = p.plan.kernel[0] * p.plan.kernel[1] * p.c_in;
  const int padded = (entries + 3) / 4 * 4, width = p.plan.kernel[1];
#pragma unroll 8
  for (int i = threadIdx.x; i < padded * 64; i += kAutocorrelationThreads) {
    // Neighbouring threads read neighbours of a filter that lies as usual.
    const int o = i / padded, of_filter = i - o * padded;
    const int taps = p.plan.kernel[0] * width, c = of_filter / taps, tap = of_filter - c * taps, h = tap / width;
    float v = 0.f;
    if (c < p.c_in && c_first + o < p.c_out) {
      v = to_acc(static_cast<const Element*>(
          p.weight)[(c_first + o) * p.w_stride_out + c * p.w_stride_in + h * p.w_stride_k[1] +
                    (tap - h * width) * p.w_stride_k[2]]);
    }
    if constexpr (sizeof(Element) == 4) v = __uint_as_float(to_tf32(v));
    const int k = c < p.c_in ? tap * p.c_in + c : of_filter;
    filters[k * 64 + o] = v;
  }
}

// From merged sums to statistics of the sample. All values of x were multiplied by 1 / unit. Called by all threads of
// the block; the first filters are there.
template <typename Element>
__device__ __forceinline__ void finish_autocorrelation(const AutocorrelationParams& p,
                                                       const AutocorrelationLayout& layout, float* smem, int64_t n,
                                                       int edge_slots, float unit, bool broken) {
  constexpr int kThreads = kAutocorrelationThreads, kWarps = kThreads / 32;
  const AutocorrelationPlan& plan = p.plan;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int height = p.in[1], width = p.in[2];
  const int taps = plan.kernel[0] * plan.kernel[1], entries = taps * p.c_in, quads = (entries + 3) / 4;
  const float* const core = smem + layout.walks;
  const float* const core_rest = core + kWalkFloats;
  const float* const edges = smem + layout.edges;
  const float* const columns = smem + layout.columns;
  const float* const corners = smem + layout.corners;
  float4* const means = reinterpret_cast<float4*>(smem + layout.entries);
  float* const matrix = smem + layout.matrix;
  const float positions = static_cast<float>(p.out[1]) * static_cast<float>(p.out[2]);
  const int edge_stride = edge_slots * kWalkFloats;

  // Whether a tap sees an input row or column; the outer ones are 0, 1 and, from the core's end on, 2, 3.
  auto outer = [&](int dim, int e) { return e < 2 ? e : (dim == 0 ? plan.core_rows : plan.core_columns)[1] + e - 2; };
  auto sees = [&](int dim, int tap, int e) {
    const int at = outer(dim, e);
    const int(&of)[2] = dim == 0 ? plan.core_rows : plan.core_columns;
    const bool is_outer = e < 2 ? at < of[0] : at < p.in[dim + 1];
    return is_outer && unsigned(at + plan.pad[dim] - tap) < unsigned(p.out[dim + 1]);
  };
  auto corner = [&](int h, int w, int c) {
    const int row = h < 4 ? h : h - (height - 6), column = w < 4 ? w : w - (width - 8);
    const bool inside = unsigned(h) < unsigned(height) && unsigned(w) < unsigned(width);
    return inside ? corners[row * 64 + column * 8 + c] : 0.f;
  };
  // Of the columns' sums: side, and which of its two columns.
  auto column_side = [](int e) { return e >> 1; };
  auto column_place = [&](int e) { return e < 2 ? e : outer(1, e) - (width - 2); };

  for (int i = tid; i < quads * kAutocorrelationEntries * 4; i += kThreads) matrix[i] = 0.f;
  for (int k = tid; k < entries; k += kThreads) {
    const int tap = k / p.c_in, c = k - tap * p.c_in, ky = tap / plan.kernel[1], kx = tap - ky * plan.kernel[1];
    const int own = 8 * 128 + c * 4;
    float rest = core_rest[own];
    for (int e = 0; e < 4; ++e) {
      if (sees(0, ky, e)) rest += edges[e * edge_stride + own];
      if (sees(1, kx, e)) {
        rest += columns[column_side(e) * kColumnFloats + 12 * 128 + column_place(e) * 32 + c * 4];
        for (int r = 0; r < 4; ++r) {
          if (sees(0, ky, r)) rest += corner(outer(0, r), outer(1, e), c);
        }
      }
    }
    const double mean = (double(core[own]) + double(rest)) / double(positions);
    const float high = static_cast<float>(mean);
    means[k] = make_float4(high, static_cast<float>(mean - high), 0.f, 0.f);
  }
  __syncthreads();
  // Pairs of taps, the second not before the first, twice for 64 pairs of channels.
#pragma unroll 1
  for (int job = warp; job < taps * (taps + 1); job += kWarps) {
    int pair = job / 2, first = 0;
    while (pair >= taps - first) pair -= taps - first, ++first;
    const int second = first + pair;
    const int ky = first / plan.kernel[1], kx = first - ky * plan.kernel[1];
    const int dy = second / plan.kernel[1] - ky, dx = second - (dy + ky) * plan.kernel[1] - kx;
    const int c = (job & 1) * 4 + lane / 8, c2 = lane % 8;
    if (c >= p.c_in || c2 >= p.c_in) continue;
    const int in_tile = (c * 4 + c2 / 2) * 4 + c2 % 2;
    // An odd distance: the left operand moved by one, the right one's by one more.
    const int odd = dx & 1, shift = (dx + odd) / 2 + 1;
    const int tile = dy == 0 ? shift - 1 : 2 + (dy - 1) * 3 + shift;
    const int at = tile * 128 + in_tile + odd * 2;
    float rest = core_rest[at];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (sees(0, ky, e)) rest += edges[e * edge_stride + at];
      if (sees(1, kx, e)) {
        const int place = column_place(e), right = dx + (e < 2 ? place : place + 2);
        if (unsigned(right) < 4u) {
          rest += columns[column_side(e) * kColumnFloats + (dy * 4 + right) * 128 + in_tile + place * 2];
        }
        const int w = outer(1, e);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (sees(0, ky, r)) {
            const int h = outer(0, r);
            rest = fmaf(corner(h, w, c), corner(h + dy, w + dx, c2), rest);
          }
        }
      }
    }
    const int k = first * p.c_in + c, k2 = second * p.c_in + c2;
    const float4 a = means[k], b = means[k2];
    const double squares = double(core[at]) + double(rest);
    const float covariance = static_cast<float>(squares - (double(a.x) + a.y) * (double(b.x) + b.y) * positions);
    if (k == k2) means[k].z = static_cast<float>(squares);
    // By blocks of four rows, what is above the diagonal counted twice below it.
    if (k2 >= k) matrix[(k2 / 4 * kAutocorrelationEntries + k) * 4 + k2 % 4] = k == k2 ? covariance : 2.f * covariance;
  }
  const float* const filters = smem + layout.weights;
  float* const parts = smem + layout.parts;
  Moments<float>* const moments = reinterpret_cast<Moments<float>*>(smem + layout.moments);
  float2* const groups = reinterpret_cast<float2*>(moments + kAutocorrelationOutputs);
  float* const alone = reinterpret_cast<float*>(groups);  // until the groups' statistics are there
  for (int c_first = 0; c_first < p.c_out; c_first += 64) {
    if (c_first > 0) load_filters<Element>(p, smem + layout.weights, c_first);
    __syncthreads();
    // A warp takes blocks of four rows, a lane has two output channels.
#pragma unroll 1
    for (int quad = warp; quad < quads; quad += kWarps) {
      float s[4][2] = {};
      const float4* const row = reinterpret_cast<const float4*>(matrix) + quad * kAutocorrelationEntries;
#pragma unroll 4
      for (int k = 0; k < quad * 4 + 4; ++k) {
        const float4 m = row[k];
        const float2 w = reinterpret_cast<const float2*>(filters)[k * 32 + lane];
        s[0][0] = fmaf(m.x, w.x, s[0][0]), s[0][1] = fmaf(m.x, w.y, s[0][1]);
        s[1][0] = fmaf(m.y, w.x, s[1][0]), s[1][1] = fmaf(m.y, w.y, s[1][1]);
        s[2][0] = fmaf(m.z, w.x, s[2][0]), s[2][1] = fmaf(m.z, w.y, s[2][1]);
        s[3][0] = fmaf(m.w, w.x, s[3][0]), s[3][1] = fmaf(m.w, w.y, s[3][1]);
      }
      float m2[2] = {}, mean[2] = {}, squares[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = quad * 4 + i;
        if (k >= entries) continue;
        const float2 w = reinterpret_cast<const float2*>(filters)[k * 32 + lane];
        const float4 of = means[k];
        m2[0] = fmaf(w.x, s[i][0], m2[0]), m2[1] = fmaf(w.y, s[i][1], m2[1]);
        mean[0] = fmaf(w.x, of.x, mean[0]), mean[1] = fmaf(w.y, of.x, mean[1]);
        squares[0] = fmaf(w.x * w.x, of.z, squares[0]), squares[1] = fmaf(w.y * w.y, of.z, squares[1]);
      }
      float2* const part = reinterpret_cast<float2*>(parts + quad * 192);
      part[lane] = make_float2(m2[0], m2[1]);
      part[32 + lane] = make_float2(mean[0], mean[1]);
      part[64 + lane] = make_float2(squares[0], squares[1]);
    }
    __syncthreads();
    if (tid < 64 && c_first + tid < p.c_out) {
      const int c = c_first + tid;
      float m2 = 0.f, mean = 0.f, squares = 0.f;
      for (int i = 0; i < quads; ++i) {
        m2 += parts[i * 192 + tid], mean += parts[i * 192 + 64 + tid], squares += parts[i * 192 + 128 + tid];
      }
      mean *= unit;
      if (p.bias) mean += to_acc(static_cast<const Element*>(p.bias)[c]);
      moments[c] = {mean, fmaxf(m2, 0.f) * unit * unit, positions};
      if (!(m2 >= 0.f || m2 < 0.f)) moments[c].m2 = m2;  // fmaxf drops a NaN
      alone[c] = squares * unit * unit;
    }
  }
  __syncthreads();
  const int num_groups = static_cast<int>(p.stats.finish.g), of_group = p.c_out / num_groups;
  bool inexact = broken;
  for (int g = tid; g < num_groups; g += kThreads) {
    float terms = 0.f, m2 = 0.f, mean = 0.f;
    for (int c = g * of_group; c < (g + 1) * of_group; ++c) {
      terms += alone[c], m2 += moments[c].m2, mean += moments[c].mean - moments[g * of_group].mean;
    }
    mean = mean / static_cast<float>(of_group) + moments[g * of_group].mean;
    for (int c = g * of_group; c < (g + 1) * of_group; ++c) {
      const float d = moments[c].mean - mean;
      m2 = fmaf(d * d, positions, m2);
    }
    inexact = inexact || !(terms <= m2 * kAutocorrelationCancellation<Element>) || !(m2 < INFINITY);
  }
  inexact = __syncthreads_or(inexact);
  if (tid == 0) p.inexact[n] = inexact;
  finish_sample<kThreads>(p.stats, n, moments, groups, tid);
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
  const AutocorrelationLayout layout = autocorrelation_layout(kWarps, plan.edge_rows, plan.edge_slots, kAutocorrelationColumnWarps);
  const int tid = threadIdx.x;
  const unsigned slices = static_cast<unsigned>(plan.slices);  // as the grid's size
  WalkShare b;
  b.n = blockIdx.x / slices;
  const int slice = static_cast<int>(blockIdx.x % slices);
  b.first = slice * plan.slice_rows, b.end = min(b.first + plan.slice_rows, p.in[1]);
  b.lane = tid & 31, b.warp = __shfl_sync(0xffffffffu, tid / 32, 0);
  uint32_t* const maxima = reinterpret_cast<uint32_t*>(smem + layout.scratch);

  let_dependents_start();
  for (int i = tid; i < kWarps * kWalkFloats / 4; i += kThreads) {
    reinterpret_cast<float4*>(smem + layout.walks)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  for (int i = tid; i < plan.edge_rows * plan.edge_slots * kWalkFloats / 4; i += kThreads) {
    reinterpret_cast<float4*>(smem + layout.edges)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  float scale = 1.f;
  uint32_t largest = 1;
  // Called by every warp once, its first loads under way.
  auto ready = [&] {
    if constexpr (kScaled) {
      const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(sampled_size(p, b.n)));
      if (b.lane == 0) maxima[b.warp] = of_warp;
    }
    __syncthreads();
    if constexpr (kScaled) {
      largest = __reduce_max_sync(0xffffffffu, maxima[min(b.lane, kThreads / 32 - 1)]);
      scale = scale_of_size(largest);
    }
    return scale;
  };
  if (b.warp < kWarps) {
    walk_rows<Element, kVectors>(p, layout, smem, b, ready);
  } else {
    walk_columns<Element, kVectors>(p, smem + layout.columns + (b.warp - kWarps) * kColumnFloats,
                                    smem + layout.corners, b, b.warp - kWarps, ready);
  }
  if (slices == 1) load_filters<Element>(p, smem + layout.weights, 0);
  __syncthreads();
  // Merged sums take the place of the first ones; what a float has no digits for goes behind them.
  float* const to = slices == 1 ? nullptr : p.sums + (b.n * slices + slice) * plan.slice_floats;
  for (int i = tid; i < kWalkFloats; i += kThreads) {
    float* const at = smem + layout.walks + i;
    double sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += at[w * kWalkFloats];
    const float high = static_cast<float>(sum);
    if (to) {
      to[i] = high;
    } else {
      at[0] = high, at[kWalkFloats] = static_cast<float>(sum - high);
    }
    for (int e = 0; e < plan.edge_rows; ++e) {
      float* const edge = smem + layout.edges + e * plan.edge_slots * kWalkFloats + i;
      float of_edge = 0.f;
      for (int slot = 0; slot < plan.edge_slots; ++slot) of_edge += edge[slot * kWalkFloats];
      if (to) {
        to[(e + 1) * kWalkFloats + i] = of_edge;
      } else {
        edge[0] = of_edge;
      }
    }
  }
  for (int i = tid; i < 2 * kColumnFloats; i += kThreads) {
    float* const at = smem + layout.columns + i;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kAutocorrelationColumnWarps; w += 2) sum += at[w * kColumnFloats];
    if (to) {
      to[(plan.edge_rows + 1) * kWalkFloats + i] = sum;
    } else {
      at[0] = sum;
    }
  }
  if (to) {
    if (tid == 0) to[plan.slice_floats - 4] = scale;
    return;
  }
  __syncthreads();
  const bool broken = kScaled && scale == 0.f;
  finish_autocorrelation<Element>(p, layout, smem, b.n, plan.edge_slots, broken ? 1.f : 1.f / scale, broken);
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
  const AutocorrelationLayout layout = autocorrelation_layout(2, 4, 1, 2);
  const int tid = threadIdx.x, slices = static_cast<int>(plan.slices);
  const int64_t n = blockIdx.x;
  let_dependents_start();
  load_filters<Element>(p, smem + layout.weights, 0);
  Element outermost = from_acc<Element>(0.f);
  static_assert(kCornerFloats <= kThreads);
  if (tid < kCornerFloats) outermost = corner_value<Element>(p, n, tid);
  wait_for_prerequisites();
  const float* const from = p.sums + n * slices * plan.slice_floats;
  const float scale = from[plan.slice_floats - 4];
  if (tid < kCornerFloats) smem[layout.corners + tid] = as_multiplied<Element>(outermost, scale);
  for (int i = tid; i < kWalkFloats; i += kThreads) {
    double sum = 0;
#pragma unroll 4
    for (int s = 0; s < slices; ++s) sum += from[s * plan.slice_floats + i];
    const float high = static_cast<float>(sum);
    smem[layout.walks + i] = high;
    smem[layout.walks + kWalkFloats + i] = static_cast<float>(sum - high);
    // The first slice has the outer rows above, the last one those below.
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      smem[layout.edges + e * kWalkFloats + i] =
          from[(e < 2 ? 0 : slices - 1) * plan.slice_floats + (e % 2 + 1) * kWalkFloats + i];
    }
  }
  for (int i = tid; i < 2 * kColumnFloats; i += kThreads) {
    float sum = 0.f;
#pragma unroll 4
    for (int s = 0; s < slices; ++s) sum += from[s * plan.slice_floats + (plan.edge_rows + 1) * kWalkFloats + i];
    smem[layout.columns + i] = sum;
  }
  __syncthreads();
  const bool broken = scale == 0.f;
  finish_autocorrelation<Element>(p, layout, smem, n, 1, broken ? 1.f : 1.f / scale, broken);
#endif
}

}  // namespace kgopt
