// Statistics of a narrow convolution's output without the convolution, sm_90a.
//
// With u the unfolded input at a position (all taps, all channels), channel c of the output is y_c = w_c' u + b_c, so
// that mean(y_c) = w_c' mean(u) + b_c and var(y_c) = w_c' C w_c with C the covariance of u. C costs no epilogue at all,
// and wgmma reads both of its operands from shared memory, as the input lies there:
//   - Entries of 16 bytes (8 channels of a position, or 4 of two) make strips: strip s of a row holds, for k = 0, 1,
//     ..., the entry that pair k of neighbouring outputs sees at offset s. A product sums over k. Neighbouring outputs
//     share all but one offset, so that entry (w, w') of C is the sum of two of the products.
//   - Strips of several rows are the 64 rows of a product, those of these rows and the next two its columns: any two
//   rows
//     of the same distance add to the same sums. Rows that some taps do not see (the first and last two) are multiplied
//     once more by themselves, and taken out at the end.
// x comes into shared memory once, as fp16 of (x - pivot) * scale, with a power of two that makes the channel's
// standard deviation about one: eleven bits, as TF32. -pivot * scale is a value of fp16, so that zero padding is exact.
// Where a value leaves fp16's range the sample is done again with the scale that its maximum asks for.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../common/async.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/dtype.cuh"
#include "../common/mma.cuh"
#include "../common/reduce.cuh"
#include "../common/wgmma.cuh"
#include "conv3d_gram_params.h"
#include "conv3d_narrow_finish.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The larger magnitude, NaN if either is.
__device__ __forceinline__ float larger_magnitude(float most, float v) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(v)));
  return most;
}
__device__ __forceinline__ uint32_t half_bits(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }

// From an even share of the registers to what either side needs, and back.
template <bool kComputes>
__device__ __forceinline__ void gram_registers() {
  if constexpr (kComputes) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
  }
}
template <bool kComputes>
__device__ __forceinline__ void gram_even_registers() {
  if constexpr (kComputes) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 128;");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 128;");
  }
}

// D[64 x N] += A' B, A of 16 x 64 and B of 16 x N fp16 in entries of 8: entry k of eight rows or columns lies 16 k
// bytes after the first, the next eight `strip` bytes further.
__device__ __forceinline__ uint64_t gram_descriptor(uint32_t strip_bytes) {
  return uint64_t(128 >> 4) << 16 | uint64_t(strip_bytes >> 4) << 32;
}
#define KGOPT_GRAM_PRODUCT(n, list, at_a, at_b, add_flag, outputs)                                  \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " add_flag                                           \
               ", 0; "                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" list "}, " at_a ", " at_b \
               ", p, 1, 1, 1, 1; }"                                                                 \
               : outputs                                                                            \
               : "l"(a), "l"(b), "r"(int(add)))
template <int kN>
__device__ __forceinline__ void gram_product(float (&d)[kN / 2], uint64_t a, uint64_t b, bool add) {
  if constexpr (kN == 8) {
    KGOPT_GRAM_PRODUCT(8, "%0,%1,%2,%3", "%4", "%5", "%6", KGOPT_D4(0));
  } else if constexpr (kN == 64) {
    KGOPT_GRAM_PRODUCT(64, KGOPT_S32, "%32", "%33", "%34", KGOPT_D32(0));
  } else if constexpr (kN == 96) {
    KGOPT_GRAM_PRODUCT(96, KGOPT_S48, "%48", "%49", "%50", KGOPT_D32(0) KGOPT_COMMA KGOPT_D16(32));
  } else {
    static_assert(kN == 128);
    KGOPT_GRAM_PRODUCT(128, KGOPT_S64, "%64", "%65", "%66", KGOPT_D64(0));
  }
}

// Shared memory, and what the two sides agree on.
struct GramBlock {
  uint64_t *full, *empty, *raw, *meet;
  float2* shift;       // [8] of (-pivot * scale, scale)
  float* largest;      // [16 warps][8 channels]
  int first, outputs;  // rows of outputs, of this block
  int rows;            // of input that they see
};

inline constexpr int kGramOnes = 768;  // where in shared memory there are 16 x 8 of them

// Stages in the order of the ring.
struct GramTurn {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

// What the stages hold, one after the other: for each tile of a slab all slabs.
struct GramWalk {
  int slab = 0, row = 0, column = 0;  // the tile's first, of the block
  __device__ __forceinline__ bool done(const GramBlock& b) const { return row >= b.rows; }
  __device__ __forceinline__ void advance(const GramParams& p, const GramBlock& b) {
    if (++slab < p.in[0]) return;
    slab = 0;
    column += 2 * p.plan.tile_pairs;
    if (column >= p.out[2]) column = 0, row += p.plan.tile_rows;
  }
};

// Columns, rows, slab, channels and sample of x by one tensor copy; zeros outside of x.
__device__ __forceinline__ void gram_tensor_load(void* shared, const void* map, int w, int h, int d, int n,
                                                 uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(shared_address(shared)),
      "l"(map), "r"(w), "r"(h), "r"(d), "r"(0), "r"(n), "r"(shared_address(barrier))
      : "memory");
}

// Brings x as it lies to the slots of `raw`, a stage's rows to each. By one thread.
struct GramFetch {
  GramWalk walk;
  int slot = 0;

  __device__ __forceinline__ void next(const GramParams& p, const GramBlock& b, unsigned char* smem, int n) {
    if (walk.done(b)) return;
    const GramPlan& plan = p.plan;
    barrier_expect_bytes(b.raw + slot, plan.raw_bytes);
    gram_tensor_load(smem + plan.at_raw + slot * plan.raw_stride, p.x_map, walk.column - plan.pad[2] - plan.lead,
                     b.first + walk.row - plan.pad[1], walk.slab, n, b.raw + slot);
    if (++slot == plan.raw_slots) slot = 0;
    walk.advance(p, b);
  }
};

// From x to the ring: all tiles, once. A thread takes vectors of four columns, all channels.
template <typename Element, int kChannels>
__device__ __forceinline__ void gram_load(const GramParams& p, const GramBlock& b, unsigned char* smem, GramTurn& turn,
                                          GramTurn& raw_turn) {
  constexpr int kLoaders = kGramLoaders;
  const GramPlan& plan = p.plan;
  const int tid = threadIdx.x, lane = tid & 31;
  const bool padded = (plan.pad[1] | plan.pad[2]) != 0;
  const int main_rows = plan.rows - (kChannels == 4 ? kGramBorders : 0);
  const bool one_tile = plan.tiles[0] == 1;
  const int rounds = ((one_tile ? b.rows : main_rows) * plan.vectors + kLoaders - 1) / kLoaders;
  const int row_begin = tid / plan.vectors, vector_begin = tid % plan.vectors;
  const int row_step = kLoaders / plan.vectors, vector_step = kLoaders - row_step * plan.vectors;
  const int row_bytes = plan.vectors * 4 * int(sizeof(Element)), plane_bytes = plan.raw_rows * row_bytes;
  // A vector of a stage.
  struct Item {
    int row, vector;
  };
  auto advance = [&](Item& item) {
    item.row += row_step, item.vector += vector_step;
    if (item.vector >= plan.vectors) item.vector -= plan.vectors, ++item.row;
  };
  auto has_bottom = [&](const GramWalk& walk) { return unsigned(b.outputs - walk.row) < unsigned(plan.tile_rows); };
  float most[kChannels] = {};
  for (GramWalk walk; !walk.done(b); walk.advance(p, b), turn.advance(plan.stages), raw_turn.advance(plan.raw_slots)) {
    const int pairs = min(plan.tile_pairs, (p.out[2] - walk.column) / 2);  // with outputs
    unsigned char* const to_stage = smem + plan.at_ring + turn.slot * plan.stage_bytes;
    barrier_wait(b.raw + raw_turn.slot, raw_turn.parity);
    // Where one tile holds all rows of a slab, rows around it stay the zeros that they are.
    const int end_row = one_tile ? b.rows : main_rows;
    Item item{row_begin, vector_begin};
#pragma unroll 1
    for (int round = 0; round < rounds; ++round, advance(item)) {
      // Two channels of four positions at a time.
      uint32_t words[4][kChannels / 2] = {};
      const int row = walk.row + item.row;                                    // of the block
      const int w = walk.column - plan.pad[2] - plan.lead + item.vector * 4;  // a vector lies in x or outside it
      const bool inside = unsigned(b.first + row - plan.pad[1]) < unsigned(p.in[1]) && unsigned(w) < unsigned(p.in[2]);
      if (item.row < end_row && unsigned(row) < unsigned(b.rows) && (inside || padded)) {
        const unsigned char* const from = smem + plan.at_raw + raw_turn.slot * plan.raw_stride + item.row * row_bytes +
                                          item.vector * (4 * int(sizeof(Element)));
#pragma unroll
        for (int c = 0; c < kChannels; c += 2) {
          float v[2][4] = {};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (c + e >= p.c_in) continue;
            const unsigned char* const at = from + (c + e) * plane_bytes;
            if constexpr (sizeof(Element) == 4) {
              const float4 f = *reinterpret_cast<const float4*>(at);
              v[e][0] = f.x, v[e][1] = f.y, v[e][2] = f.z, v[e][3] = f.w;
            } else {
              const uint2 f = *reinterpret_cast<const uint2*>(at);
#pragma unroll
              for (int k = 0; k < 4; ++k) v[e][k] = to_acc(reinterpret_cast<const Element*>(&f)[k]);
            }
          }
          const float2 first = b.shift[c], second = b.shift[c + 1];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float2 f = make_float2(fmaf(v[0][k], first.y, first.x), fmaf(v[1][k], second.y, second.x));
            most[c] = larger_magnitude(most[c], f.x);
            most[c + 1] = larger_magnitude(most[c + 1], f.y);
            const __half2 h = __float22half2_rn(f);
            words[k][c / 2] = half_bits(h);
          }
        }
      }
      if (round == 0) barrier_wait(b.empty + turn.slot, turn.parity ^ 1);
      if (item.row < end_row) {
        // A row, and once more where it is a border: 4 channels need these side by side. They belong to the tile that
        // has the first of them.
        int to_row = item.row, then = -1, last = -1;
        if constexpr (kChannels == 4) {
          const int below = row - b.outputs;
          if (walk.row == 0 && unsigned(row) < unsigned(plan.kernel[1] - 1)) last = main_rows + row;
          then = last;
          last = unsigned(below) < unsigned(plan.kernel[1] - 1) && has_bottom(walk) ? main_rows + 2 + below : -1;
          if (then < 0) then = last, last = -1;
        }
        do {
          unsigned char* const to = to_stage + to_row * plan.strips * plan.strip_bytes + item.vector * 32;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            // Position 2 k + s is entry k of strip s; with four channels, half of an entry.
            const int odd = (k - plan.lead) & 1, before = (k - plan.lead) >> 1;
            unsigned char* const at = to + before * 16 + odd * (kChannels == 8 ? plan.strip_bytes : 8);
            unsigned char* const next = at + (kChannels == 8 ? 2 : 1) * plan.strip_bytes - 16;
            const int pair = item.vector * 2 + before;
            auto store = [&](unsigned char* to, const uint32_t (&w)[kChannels / 2]) {
              if constexpr (kChannels == 8) {
                *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
              } else {
                *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
              }
            };
            if (unsigned(pair) < unsigned(pairs)) store(at, words[k]);
            if (unsigned(pair - 1) < unsigned(pairs)) store(next, words[k]);
          }
          to_row = then, then = last, last = -1;
        } while (to_row >= 0);
      }
    }
    // Borders of another tile are zeros here.
    if (kChannels == 4 && !one_tile) {
      const int row_entries = plan.strips * plan.tile_pairs;
      for (int half = 0; half < 2; ++half) {
        if (half == 0 ? walk.row == 0 : has_bottom(walk)) continue;
        uint4* const to = reinterpret_cast<uint4*>(to_stage) + (main_rows + 2 * half) * row_entries;
        for (int i = tid; i < 2 * row_entries; i += kLoaders) to[i] = make_uint4(0, 0, 0, 0);
      }
    }
    // Of a narrower tile, what a wider one before it left.
    if (plan.tiles[1] > 1 && pairs % kGramColumns != 0) {
      const int left = (kGramColumns - pairs % kGramColumns), all = plan.rows * plan.strips;
      for (int i = tid; i < all * left; i += kLoaders) {
        *reinterpret_cast<uint4*>(to_stage + i / left * plan.strip_bytes + (pairs + i % left) * 16) =
            make_uint4(0, 0, 0, 0);
      }
    }
    wgmma_fence_shared();
    barrier_arrive(b.full + turn.slot);
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    float all = c < kChannels ? most[c < kChannels ? c : 0] : 0.f;
#pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) all = larger_magnitude(all, __shfl_xor_sync(0xffffffffu, all, mask));
    if (lane == 0) b.largest[tid / 32 * 8 + c] = all;
  }
}

// A team's products: each warpgroup has every second group of rows.
// One warp also fetches the stages: a stage that is there was read from its slot of x, which is free again.
template <int kChannels>
__device__ __forceinline__ void gram_multiply(const GramParams& p, const GramBlock& b, unsigned char* smem, int n,
                                              int team, GramTurn& turn, int& raw_slot, bool fetched) {
  constexpr int kStrips = kChannels == 8 ? 4 : 2, kRows = 8 / kStrips, kSide = kStrips * 8;
  constexpr int kN = (kRows + kGramBands - 1) * kSide;
  const GramPlan& plan = p.plan;
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread / 32, g = lane >> 2, t = lane & 3;
  const uint32_t ring = shared_address(smem + plan.at_ring);
  const uint64_t strips = gram_descriptor(plan.strip_bytes);
  const uint64_t ones = gram_descriptor(128) | (shared_address(smem + kGramOnes) >> 4);
  float* const gram = reinterpret_cast<float*>(smem + plan.at_gram) + team * kGramBands * kSide * kSide;
  float* const sums = reinterpret_cast<float*>(smem + plan.at_sums) + team * kSide;

  float acc[kN / 2] = {}, edge[32] = {}, total[4] = {}, edge_total[4] = {};
  bool edge_held = false;
  int held = 0;  // products that the accumulators hold
  const int my_row = warp * 2 / kStrips;
  auto dump = [&] {
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      named_barrier(2 + threadIdx.x / 128, 128);
      if (my_row != row) continue;
      {
        float* const part = gram + (warp * 2 % kStrips * 8 + g) * kSide + t * 2;
        // All loads of a batch before its stores, which the compiler would not dare.
        constexpr int kBatch = 4;
#pragma unroll
        for (int first = 0; first < kN / 8; first += kBatch) {
          float2 v[kBatch][2];
          auto each = [&](auto&& f) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
              const int q = first + i, band = q / kStrips - row;
              if (unsigned(band) >= unsigned(kGramBands)) continue;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                f(*reinterpret_cast<float2*>(part + band * kSide * kSide + half * 8 * kSide + q % kStrips * 8),
                  v[i][half], acc[q * 4 + half * 2], acc[q * 4 + half * 2 + 1]);
              }
            }
          };
          each([](float2& at, float2& v, float, float) { v = at; });
          each([](float2& at, float2& v, float x, float y) { at = make_float2(v.x + x, v.y + y); });
        }
        if (t == 0) {
          float* const at = sums + warp * 2 % kStrips * 8 + g;
          at[0] += total[0], at[8] += total[2];
        }
      }
    }
    held = 0;  // the next product overwrites: zeros by other instructions would make the compiler wait for every one
  };
  // Border rows: 4 channels: the matrix's first half of rows is that of the upper ones; 8: of one of the teams.
  auto dump_edge = [&] {
    constexpr int kEdge = 2 * kSide;
    const int place = kChannels == 4 ? warp / 2 : team;
    {
      float* const part = reinterpret_cast<float*>(smem + plan.at_border) + place * kEdge * kEdge;
      float* const at_row = part + ((kChannels == 4 ? warp % 2 : warp) * 16 + g) * kEdge + t * 2;
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        if (kChannels == 4 && q / 4 != place) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2* const at = reinterpret_cast<float2*>(at_row + half * 8 * kEdge + q % (kEdge / 8) * 8);
          float2 v = *at;
          v.x += edge[q * 4 + half * 2], v.y += edge[q * 4 + half * 2 + 1];
          *at = v;
        }
      }
      if (t == 0) {
        float* const at = reinterpret_cast<float*>(smem + plan.at_sums) + gram_sum_floats(plan) + place * kEdge +
                          (kChannels == 4 ? warp % 2 : warp) * 16 + g;
        at[0] += edge_total[0], at[8] += edge_total[2];
      }
    }
    edge_held = false;
  };

  const bool fetches = team == 1 && thread == 0;
  GramFetch fetch;
  fetch.slot = raw_slot;
  for (int i = 0; i < plan.raw_slots; ++i) {
    if (fetches && !fetched) {
      fetch.next(p, b, smem, n);
    } else {
      fetch.walk.advance(p, b);
    }
  }
#pragma unroll 1
  for (GramWalk walk; !walk.done(b); walk.advance(p, b), turn.advance(plan.stages)) {
    barrier_wait(b.full + turn.slot, turn.parity);
    if (fetches) fetch.next(p, b, smem, n);
    __syncwarp();
    if (++raw_slot == plan.raw_slots) raw_slot = 0;
    {
      const int groups = (min(plan.tile_rows, b.rows - walk.row) + kRows - 1) / kRows;
      const int pairs = min(plan.tile_pairs, (p.out[2] - walk.column) / 2);
      const int steps = (pairs + kGramColumns - 1) / kGramColumns;
      if (held >= kGramMostHeld) dump();
      const uint32_t at = (ring + turn.slot * plan.stage_bytes) >> 4, row_words = (kStrips * plan.strip_bytes) >> 4;
      // Products of strips from `a` on with those from there on. Consecutive products add to the same registers: a
      // change of them costs the tensor cores what a product takes.
      auto multiply = [&](auto& d, uint32_t a, bool add) {
        constexpr int kColumns = sizeof(d) / sizeof(float) * 2;
#pragma unroll 1
        for (int k = 0; k < steps; ++k, a += kGramColumns) {
          wgmma_fence();
          gram_product<kColumns>(d, strips | a, strips | a, add);
          wgmma_commit();
          add = true;
        }
      };
      auto add_up = [&](float (&d)[4], uint32_t a, bool add) {
#pragma unroll 1
        for (int k = 0; k < steps; ++k, a += kGramColumns) {
          wgmma_fence();
          gram_product<8>(d, strips | a, ones, add);
          wgmma_commit();
          add = true;
        }
      };
      const bool add = held > 0;
      auto each_group = [&](auto&& f) {
        bool more = add;
#pragma unroll 1
        for (int group = team; group < groups; group += 2, more = true) f(at + group * kRows * row_words, more);
      };
      each_group([&](uint32_t a, bool more) { multiply(acc, a, more); });
      each_group([&](uint32_t a, bool more) { add_up(total, a, more); });
      if (team < groups) held += (groups - team + 1) / 2 * steps;
      wgmma_wait<0>();
      wgmma_use(acc);
      wgmma_use(total);
      int row = plan.rows - kGramBorders;
      bool has_border = plan.kernel[1] > 1;
      if constexpr (kChannels == 8) {
        row = (team == 0 ? 0 : b.outputs) - walk.row;
        has_border = has_border && unsigned(row) < unsigned(plan.tile_rows);
      } else {
        has_border = has_border && team == 0;
      }
      if (has_border) {
        multiply(edge, at + row * row_words, edge_held);
        add_up(edge_total, at + row * row_words, edge_held);
        edge_held = true;
        wgmma_wait<0>();
        wgmma_use(edge);
        wgmma_use(edge_total);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(b.empty + turn.slot);
  }
  if (held > 0) dump();
  named_barrier(1, kGramComputing);  // the ring is free: borders' sums go there
  float* const border = reinterpret_cast<float*>(smem + plan.at_border);
  for (int i = threadIdx.x - kGramLoaders; i < gram_border_floats(plan); i += kGramComputing) border[i] = 0.f;
  named_barrier(1, kGramComputing);
  if (edge_held) dump_edge();
}

// How much larger the sum of the variances of a filter's terms may be than the variance of their sum, which is known to
// a few units of the sums' last place, times this: below PyTorch's own error in each type.
template <typename Element>
__device__ __forceinline__ constexpr float gram_cancellation() {
  return sizeof(Element) == 4 ? 4096.f : 256.f;
}

// The Gram matrix in shared memory becomes moments of output channels. Called by all threads.
template <typename Element, int kChannels>
__device__ __forceinline__ void gram_finish(const GramParams& p, const GramBlock& b, unsigned char* smem, int64_t n,
                                            int64_t slice, float positions, bool broken) {
  constexpr int kThreads = kGramThreads, kSide = kChannels == 8 ? 32 : 16, kEdge = 2 * kSide;
  const GramPlan& plan = p.plan;
  const int thread = threadIdx.x, taps = plan.taps, columns = 1 << plan.column_bits, lane = thread & 31;
  const int last_row = plan.kernel[1] - 1;
  const int pitch = (taps + 7) / 8 * 8 + 4;  // of C: a row's 16 bytes, and rows apart in banks
  const int2* const tap_table = reinterpret_cast<const int2*>(smem + plan.at_taps);
  const float* const gram = reinterpret_cast<const float*>(smem + plan.at_gram);
  const float* const border = reinterpret_cast<const float*>(smem + plan.at_border);
  const float* const sums = reinterpret_cast<const float*>(smem + plan.at_sums);
  const float* const border_sums = sums + gram_sum_floats(plan);
  float* const filters = reinterpret_cast<float*>(smem + plan.at_filters);
  float* const c_matrix = reinterpret_cast<float*>(smem + plan.at_ring);
  float4* const parts = reinterpret_cast<float4*>(c_matrix + taps * pitch);  // of threads: mean, m2, variances alone
  Moments<float>* const shared = reinterpret_cast<Moments<float>*>(parts + kThreads);
  float2* const means = reinterpret_cast<float2*>(shared + 128);  // of K entries: sum, mean before the pivot went
  float* const unscale = reinterpret_cast<float*>(means + taps);  // undoes their scale
  const float share_of_one = 1.f / positions;
  // A K entry's taps, and its row of the matrices for the first of two neighbouring outputs; the second's is kChannels
  // further.
  struct Tap {
    int h, at;
  };
  auto tap_of = [&](int k) {
    const int packed = tap_table[k].x;
    return Tap{packed >> 16 & 255, (packed >> 8 & 255) * kChannels + (packed & 255)};
  };
  // The sum of both outputs' products in a matrix.
  auto both = [&](const float* of, int at) { return of[at] + of[at + kChannels]; };
#pragma unroll 1
  for (int k = thread; k < taps; k += kThreads) {
    const Tap tap = tap_of(k);
    float sum = both(sums, tap.at) + both(sums + kSide, tap.at);
    const float* const of = border_sums;
    for (int row = 0; row < tap.h; ++row) sum -= both(of + row * kSide, tap.at);
    for (int row = tap.h; row < last_row; ++row) sum -= both(of + kEdge + row * kSide, tap.at);
    const float2 shift = b.shift[tap_table[k].x & 255];
    const float unscaled = 1.f / shift.y;
    means[k] = make_float2(sum, (sum * share_of_one - shift.x) * unscaled);
    unscale[k] = unscaled;
  }
  __syncthreads();
  // A lane has entries lane, lane + 32, ... of each row.
  constexpr int kTogether = 4;
  Tap mine[kTogether];
  float my_mean[kTogether], my_scale[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int j = min(32 * i + lane, taps - 1);
    mine[i] = tap_of(j), my_mean[i] = means[j].x, my_scale[i] = unscale[j];
  }
#pragma unroll 1
  for (int k = thread / 32; k < taps; k += kThreads / 32) {
    const Tap a = tap_of(k);
    const float sum_a = means[k].x * share_of_one, scale_a = unscale[k];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (32 * i + 31 < k) continue;
      // All lanes do the same, without branches, and those with an entry on or right of the diagonal store it.
      const int j = 32 * i + lane;
      const Tap c = mine[i];
      const int band = max(c.h - a.h, 0);
      const float* const of = gram + (band * kSide + a.at) * kSide + c.at;
      const float* const team = of + kGramBands * kSide * kSide;
      float sum = of[0] + of[kChannels * kSide + kChannels] + (team[0] + team[kChannels * kSide + kChannels]);
      const float* const edge = border + a.at * kEdge + c.at;
      // Of the two border rows above and below, those that this pair of taps does not see.
#pragma unroll
      for (int row = 0; row < kGramTaps - 1; ++row) {
        const bool above = row < a.h, unseen = above || row + band < last_row;
        const float* const v = edge + (above ? 0 : kEdge * kEdge) + row * kSide * kEdge + min(row + band, 1) * kSide;
        const float both_outputs = v[0] + v[kChannels * kEdge + kChannels];
        sum -= unseen ? both_outputs : 0.f;
      }
      sum = j < taps ? (sum - sum_a * my_mean[i]) * (scale_a * my_scale[i]) : 0.f;
      if (j >= k && j < taps) c_matrix[j * pitch + k] = sum;
      if (j >= k && j < pitch) c_matrix[k * pitch + j] = sum;
    }
  }
  __syncwarp();
  bool inexact = false;
  for (int first = 0; first < p.c_out; first += columns) {
    const int valid = min(columns, p.c_out - first);
    // The first channels' filters were prepared.
    if (first > 0) {
#pragma unroll 1
      for (int i = thread; i < taps * columns; i += kThreads) {
        const int c = i & (columns - 1), where = tap_table[i >> plan.column_bits].y;
        const Element* const from = static_cast<const Element*>(p.weight) + (where & 15) * p.w_stride_in + (where >> 4);
        filters[i] = to_acc(from[min(first + c, p.c_out - 1) * p.w_stride_out]);
      }
    }
    __syncthreads();
    const int c = thread & (columns - 1), share = thread >> plan.column_bits, shares = kThreads >> plan.column_bits;
    float mean = 0.f, m2 = 0.f, alone = 0.f;
    // Eight rows of C at a time, on and right of the diagonal: what is right of it counts twice. Shares take rows
    // forth and back, since rows get shorter.
#pragma unroll 1
    for (int round = 0, chunk = share; chunk * 8 < taps;
         ++round, chunk = round * shares + (round & 1 ? shares - 1 - share : share)) {
      const int j0 = chunk * 8;
      float s[8] = {};
      auto add = [&](int begin, int end) {
#pragma unroll 8
        for (int k = begin; k < end; ++k) {
          const float4* const row = reinterpret_cast<const float4*>(c_matrix + k * pitch + j0);
          const float4 v0 = row[0], v1 = row[1];
          const float f = filters[(k << plan.column_bits) + c];
          s[0] = fmaf(v0.x, f, s[0]), s[1] = fmaf(v0.y, f, s[1]), s[2] = fmaf(v0.z, f, s[2]),
          s[3] = fmaf(v0.w, f, s[3]);
          s[4] = fmaf(v1.x, f, s[4]), s[5] = fmaf(v1.y, f, s[5]), s[6] = fmaf(v1.z, f, s[6]),
          s[7] = fmaf(v1.w, f, s[7]);
        }
      };
      add(j0 + 8, taps);
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i] *= 2.f;
      add(j0, min(j0 + 8, taps));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (j0 + i < taps) {
          const float f = filters[(j0 + i << plan.column_bits) + c];
          m2 = fmaf(s[i], f, m2);
          mean = fmaf(f, means[j0 + i].y, mean);
          alone = fmaf(f * f, c_matrix[(j0 + i) * pitch + j0 + i], alone);
        }
      }
    }
    parts[thread] = make_float4(mean, m2, alone, 0.f);
    __syncthreads();
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    if (thread < valid) {
      for (int k = 0; k < shares; ++k) {
        const float4 part = parts[k * columns + thread];
        total.x += part.x, total.y += part.y, total.z += part.z;
      }
    }
    __syncthreads();
    if (thread < columns) parts[thread] = total;
    __syncthreads();
    // Where filters cancel all but a little of their input, in a norm's group as a whole, C is not exact enough, and
    // the sample is done again by the convolution.
    bool cancels = false;
    for (int c = lane; c < valid; c += 32) {
      const int group = max(static_cast<int>(p.stats.finish.c / p.stats.finish.g), 1);
      const int begin = max(c - (first + c) % group, 0), end = min(begin + group, valid);
      float m2 = 0.f, alone = 0.f;
      for (int k = begin; k < end; ++k) m2 += parts[k].y, alone += parts[k].z;
      cancels = cancels || (alone > m2 * gram_cancellation<Element>() && alone > 0.f);
    }
    inexact = inexact || (!broken && __any_sync(0xffffffffu, cancels));
    if (thread < valid) {
      Moments<float> m;
      m.mean = parts[thread].x;
      if (p.bias) m.mean += to_acc(static_cast<const Element*>(p.bias)[first + thread]);
      m.m2 = parts[thread].y < 0.f ? 0.f : parts[thread].y;
      m.count = positions;
      if (broken) m.mean = m.m2 = __int_as_float(0x7fffffff);
      if (p.stats.finishes) {
        shared[thread] = m;
      } else {
        float* const out = p.stats.partials + ((n * p.stats.slices + slice) * p.c_out + first + thread) * 3;
        out[0] = m.mean, out[1] = m.m2, out[2] = m.count;
      }
    }
    __syncthreads();
  }
  if (thread == 0) p.inexact[n * plan.slices + slice] = inexact;
  if (p.stats.finishes) finish_sample<kThreads>(p.stats, n, shared, reinterpret_cast<float2*>(shared + 64), thread);
}

#endif

template <typename Element, int kChannels>
__global__ void __launch_bounds__(kGramThreads, 1) conv_gram_kernel(const __grid_constant__ GramParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kThreads = kGramThreads, kLoaders = kGramLoaders, kComputing = kGramComputing;
  extern __shared__ __align__(128) unsigned char gram_smem[];
  unsigned char* const smem = gram_smem;
  const GramPlan& plan = p.plan;
  GramBlock b;
  b.full = reinterpret_cast<uint64_t*>(smem);
  b.empty = b.full + kGramStages;
  b.raw = reinterpret_cast<uint64_t*>(smem + 192);
  b.meet = b.raw + kGramSlots;
  b.shift = reinterpret_cast<float2*>(smem + 128);
  b.largest = reinterpret_cast<float*>(smem + 256);
  int2* const tap_table = reinterpret_cast<int2*>(smem + plan.at_taps);
  float* const filters = reinterpret_cast<float*>(smem + plan.at_filters);
  const int tid = threadIdx.x, lane = tid & 31;
  const int64_t n = blockIdx.x / plan.slices, slice = blockIdx.x % plan.slices;
  b.first = static_cast<int>(slice) * plan.slice;
  b.outputs = min(plan.slice, p.out[1] - b.first);
  b.rows = b.outputs + plan.kernel[1] - 1;

  let_dependents_start();
  // The first of x: nothing else is needed for it.
  if (tid == 0) {
    for (int i = 0; i < plan.raw_slots; ++i) barrier_init(b.raw + i, 1);
    barrier_init_fence();
    GramFetch fetch;
    for (int i = 0; i < plan.raw_slots; ++i) fetch.next(p, b, smem, static_cast<int>(n));
  }
  // What comes last is asked for now.
  if (tid < p.c_out) {
    const GroupStatsFinalizeParams& f = p.stats.finish;
    const int bytes = f.affine_dtype == Dtype::kFloat32 ? 4 : 2;
    if (p.bias) prefetch_l2(static_cast<const Element*>(p.bias) + tid);
    if (p.stats.finishes && f.weight) prefetch_l2(static_cast<const char*>(f.weight) + tid * bytes);
    if (p.stats.finishes && f.bias) prefetch_l2(static_cast<const char*>(f.bias) + tid * bytes);
  }
  // A few values of each channel, far apart: where its pivot and scale come from. Two warps a channel.
  const int of_channel = tid / kGramSamples;
  float sample = 0.f;
  if (of_channel < p.c_in) {
    const uint32_t height = p.in[1], width = p.in[2], all = p.in[0] * height * width;  // < 2^31
    const uint32_t i = __umulhi(uint32_t(tid % kGramSamples + 1) * 0x9E3779B9u, all), row = i / width;
    const uint32_t depth = row / height;
    sample = to_acc(
        static_cast<const Element*>(p.x)[n * p.x_stride_n + of_channel * p.x_stride_c + depth * p.x_stride[0] +
                                         (row - depth * height) * p.x_stride[1] + (i - row * width) * p.x_stride[2]]);
  }
  // K entries: taps and channel, and the weight's place in a filter's channel.
  const int columns = 1 << plan.column_bits;
  if (tid < plan.kernel[1] * plan.kernel[2]) {
    const int h = tid / plan.kernel[2], w = tid - h * plan.kernel[2];
    const int place = static_cast<int>(h * p.w_stride_k[1] + w * p.w_stride_k[2]);
#pragma unroll 1
    for (int c = 0; c < p.c_in; ++c) {
      tap_table[tid * p.c_in + c] = make_int2(h << 16 | w << 8 | c, place << 4 | c);
    }
  }
  if (tid < 64) reinterpret_cast<uint32_t*>(smem + kGramOnes)[tid] = 0x3C003C00u;  // ones
  // The ring starts as zeros too: what is never written is multiplied by zero.
#pragma unroll 1
  for (int i = plan.at_gram / 16 + tid; i < plan.at_raw / 16; i += kThreads) {
    reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
  }
  auto clear_sums = [&](int thread, int threads) {
    float* const sums = reinterpret_cast<float*>(smem + plan.at_sums);
    for (int i = thread; i < gram_sum_floats(plan) + gram_border_sum_floats(plan); i += threads) sums[i] = 0.f;
  };
  clear_sums(tid, kThreads);
  if (tid == 0) barrier_init(b.meet, kThreads);
  if (tid < plan.stages) {
    barrier_init(b.full + tid, kLoaders);
    barrier_init(b.empty + tid, kComputing / 32);
  }
  wgmma_fence_shared();
  auto warp_total = [&](float v) {
#pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
  };
  sample = of_channel < p.c_in ? sample : 0.f;
  float* const part = b.largest;
  const float sum = warp_total(sample);
  if (lane == 0) part[tid / 32] = sum;
  __syncthreads();
  const float mean = (part[of_channel * 2] + part[of_channel * 2 + 1]) / kGramSamples;
  const float squares = warp_total((sample - mean) * (sample - mean));
  if (lane == 0) part[32 + tid / 32] = squares;
  __syncthreads();
  // 2^(1 - e) of 2^(e - 1) <= |v| < 2^e, within range.
  auto scale_of = [](float v) {
    const int e = static_cast<int>(__float_as_uint(v) >> 23 & 255) - 126;
    return __uint_as_float((127 + 1 - min(max(e, -120), 120)) << 23);
  };
  auto set_shift = [&](int c, float pivot, float scale) {  // the pivot scaled
    const float rounded = __half2float(__float2half_rn(pivot));
    b.shift[c] = make_float2(-(fabsf(rounded) < 60000.f ? rounded : pivot), scale);
  };
  if (tid % kGramSamples == 0 && of_channel < 8) {
    const float variance = (part[32 + of_channel * 2] + part[33 + of_channel * 2]) / kGramSamples;
    const bool finite = variance < 1e30f && fabsf(mean) < 1e15f;
    const float size = !finite                ? 1.f
                       : variance > 1e-30f    ? __fsqrt_rn(variance)
                       : fabsf(mean) > 1e-15f ? fabsf(mean)
                                              : 1.f;
    // A mean within the deviation stays: half types are exact then.
    const float scale = scale_of(size);
    set_shift(of_channel, !finite || mean * mean <= variance ? 0.f : mean * scale, scale);
  }
  __syncthreads();

  // Where both sides meet, at different places of the code.
  uint32_t meetings = 0;
  auto meet = [&] {
    barrier_arrive(b.meet);
    barrier_wait(b.meet, meetings++ & 1);
  };
  // Whether fp16 held all values, by all warps alike. `most`: each lane's channel's, lane % 8.
  float most = 0.f;
  auto fits = [](float most) { return most <= 60000.f && !(most < 0.0625f && most > 0.f); };
  auto in_range = [&] {
    most = 0.f;
#pragma unroll 1
    for (int i = lane; i < kLoaders / 4; i += 32) most = larger_magnitude(most, b.largest[i]);
    most = larger_magnitude(most, __shfl_xor_sync(0xffffffffu, most, 8));
    most = larger_magnitude(most, __shfl_xor_sync(0xffffffffu, most, 16));
    return __all_sync(0xffffffffu, fits(most));
  };
  GramTurn turn;
  if (tid < kLoaders) {
    gram_registers<false>();
    GramTurn raw_turn;
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      gram_load<Element, kChannels>(p, b, smem, turn, raw_turn);
      meet();
      if (in_range() || attempt > 0) break;
      meet();
      // The scale that the maximum asks for.
      if (tid < 8 && !fits(most)) {
        const float by = scale_of(most) * 8192.f;
        const float2 old = b.shift[tid];
        set_shift(tid, -old.x * by, old.y * by);
      }
      meet();
    }
    gram_even_registers<false>();
  } else {
    gram_registers<true>();
    const int thread = tid - kLoaders;
    const int group = __shfl_sync(0xffffffffu, thread / 128, 0);
    // While the first stage comes.
#pragma unroll 4
    for (int i = thread; i < plan.taps << plan.column_bits; i += kComputing) {
      const int c = i & (columns - 1), where = tap_table[i >> plan.column_bits].y;
      const Element* const from = static_cast<const Element*>(p.weight) + (where & 15) * p.w_stride_in + (where >> 4);
      filters[i] = to_acc(from[min(c, p.c_out - 1) * p.w_stride_out]);
    }
    int raw_slot = 0;
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      gram_multiply<kChannels>(p, b, smem, static_cast<int>(n), group, turn, raw_slot, attempt == 0);
      meet();
      if (in_range() || attempt > 0) break;
      meet();
      for (int i = plan.at_gram / 16 + thread; i < plan.at_raw / 16; i += kComputing) {
        reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
      }
      clear_sums(thread, kComputing);
      wgmma_fence_shared();
      meet();
    }
    gram_even_registers<true>();
  }
  __syncthreads();
  const float positions = float(p.out[0]) * float(b.outputs) * float(p.out[2]);
  gram_finish<Element, kChannels>(p, b, smem, n, slice, positions, __any_sync(0xffffffffu, !(most < INFINITY)));
#endif
}

}  // namespace kgopt
