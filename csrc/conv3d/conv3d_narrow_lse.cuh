// Conv + GroupNorm + tanh + hardswish + residual + logsumexp over channels for few input and at most 64 output
// channels, from the statistics that an earlier pass left in a table, sm_90a.
//
// Channels are the rows of the products (conv3d_narrow_channels.cuh says how operands lie). A warpgroup takes two
// strips of 32 positions at a time, each with accumulators of its own: the tensor cores work on one while the special
// function units work on the other. The next pair's first strip is multiplied before the second one's exponentials and
// before the sum over channels, so that a warpgroup never waits for a product that it has just begun.
#pragma once

#include <cuda_runtime.h>

#include "../common/async.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/dtype.cuh"
#include "../common/mma.cuh"
#include "../common/wgmma.cuh"
#include "conv3d_narrow_load.cuh"
#include "conv3d_narrow_weights.cuh"

namespace kgopt {

inline constexpr int kLsePositions = 2 * kNarrowLseStrip;  // of a pair of strips

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A pair of strips. What belongs to one is that of the strip of the lane's positions, the second for lanes 16 to 31.
struct LsePair {
  uint32_t address;  // of its first position in the halo, in chunks of 16 bytes
  uint32_t offset;   // in the sample's result
  int width;         // positions inside; 0: nothing to do
  float unscaled;    // kAccurate: what undoes the scale of their input
};

// logsumexp over channels of u + hardswish(tanh(scale u + offset)) for a warpgroup's pairs of strips. A thread holds
// products acc[4 j + 2 r + e] of channel r at position 8 j + 2 t + e of a strip, and sums s[2 j + e].
//
// Any shift within some sixty of the result keeps the exponentials in range, so one shift serves all positions; where
// it does not, `exact` finds each position's maximum and the shift moves there. kAccurate: with fp32 accuracy, of
// values that a factor for each pair scales.
template <bool kAccurate>
struct ChannelLse {
  static constexpr int kAcc = kNarrowLseStrip / 2, kSums = kNarrowLseStrip / 4;  // of a strip
  static constexpr float kLog2E = 1.44269504088896340736f;
  static constexpr float kLn2 = 0.69314718055994530942f;

  float scale[2], offset[2], bias[2];  // bias: times log2(e), -inf for a channel that is padding
  float weight[2];                     // kAccurate: of a value in the sum, times log2(e); it and `scale` for this pair
  float shift = 0.f;                   // in powers of 2
  float* exchange;                     // [2][4 warps][kLsePositions], this warpgroup's
  float* y;                            // the sample's result
  int buffer = 0;
  int barrier, warp, lane;

  // 2^(r log2(e) - shift)
  __device__ __forceinline__ float power(float u, int r, float shifted_bias) const {
    // Since |tanh| <= 1, hardswish needs no clamp: h (h + 3) / 6. With q = 1 / (1 + exp(2 z)) that is
    // 2 / 3 + q (2 q - 5) / 3, whose constant is part of the bias.
    if constexpr (kAccurate) {
      const float q = rcp_approx(1.f + exp2_approx(fmaf(u, scale[r], offset[r])));
      return fmaf(q, fmaf(q, kLog2E * 2.f / 3.f, kLog2E * -5.f / 3.f), fmaf(u, weight[r], shifted_bias));
    }
    const float h = tanh_approx(fmaf(u, scale[r], offset[r]));
    return fmaf(h, fmaf(h, kLog2E / 6.f, kLog2E / 2.f), fmaf(u, kLog2E, shifted_bias));
  }
  __device__ __forceinline__ float* shared(int of_warp) const {
    return exchange + (buffer * 4 + of_warp) * kLsePositions;
  }
  __device__ __forceinline__ void sync() const { named_barrier(barrier, 128); }

  // A strip's exponentials, summed over this thread's two channels.
  __device__ __forceinline__ void add_up(const float (&acc)[kAcc], float* s) const {
    const float shifted[2] = {bias[0] - shift, bias[1] - shift};
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int at = i / 2 * 4 + i % 2;
      s[i] = exp2_approx(power(acc[at], 0, shifted[0])) + exp2_approx(power(acc[at + 2], 1, shifted[1]));
    }
  }

  // Lanes of equal t hold the warp's 16 channels of the same positions, as many blocks of 8 as kLeft, two of them each.
  // Every step adds two lanes that differ in kMask and halves what either keeps, down to one block in s[0] and s[1].
  template <int kLeft, int kMask>
  __device__ __forceinline__ void scatter_sums(float (&s)[2 * kSums]) const {
    const bool upper = lane & kMask;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const float kept = upper ? s[i + kLeft] : s[i], sent = upper ? s[i] : s[i + kLeft];
      s[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kMask);
    }
    if constexpr (kMask > 4) scatter_sums<kLeft / 2, kMask / 2>(s);
  }

  // False where the result left the range of the shift: nothing is stored then.
  __device__ __forceinline__ bool finish(float (&s)[2 * kSums], const LsePair& pair) {
    scatter_sums<8, 16>(s);
    const int g = lane >> 2, t = lane & 3;  // block g of the pair's eight
    *reinterpret_cast<float2*>(shared(warp) + g * 8 + t * 2) = make_float2(s[0], s[1]);
    sync();
    float2 sum = *reinterpret_cast<const float2*>(shared(0) + g * 8 + t * 2);
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(shared(w) + g * 8 + t * 2);
      sum.x += part.x;
      sum.y += part.y;
    }
    buffer ^= 1;
    const int position = g % 4 * 8 + t * 2;  // of the strip
    auto in_range = [&](float v, int at) { return at >= pair.width || (v > 1e-30f && v < 1e30f); };
    // All warps see the same sums and decide alike.
    if (!__all_sync(0xffffffffu, in_range(sum.x, position) && in_range(sum.y, position + 1))) return false;
    if (g / 2 == warp) {
      auto log = [](float v) { return kAccurate ? log2f(v) : log2_approx(v); };
      float* const to = y + (pair.offset + position);
      const float first = (log(sum.x) + shift) * kLn2, second = (log(sum.y) + shift) * kLn2;
      if (position < pair.width) to[0] = first;
      if (position + 1 < pair.width) to[1] = second;
    }
    return true;
  }

  // `op` over the warpgroup's channels for four of each lane's positions, from 16 * quarter on.
  template <typename Op>
  __device__ __forceinline__ void all_reduce(float (&s)[4], int quarter, Op op) {
    float* const to = shared(warp) + quarter * 16 + (lane & 3) * 2;
    sync();  // the exchange is free
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int mask = 4; mask <= 16; mask *= 2) s[i] = op(s[i], __shfl_xor_sync(0xffffffffu, s[i], mask));
      if (lane < 4) to[i / 2 * 8 + i % 2] = s[i];
    }
    sync();
    const float* const from = shared(0) + quarter * 16 + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const v = from + i / 2 * 8 + i % 2;
      s[i] = op(op(v[0], v[kLsePositions]), op(v[2 * kLsePositions], v[3 * kLsePositions]));
    }
  }

  // The first pair, values that leap, infinities and NaNs: rare, so small code counts for more than speed.
  __device__ __forceinline__ void exact(const float (&first_acc)[kAcc], const float (&second_acc)[kAcc],
                                        const LsePair& pair) {
    float kept[2 * kAcc];  // indexed at run time, hence in local memory
#pragma unroll
    for (int i = 0; i < kAcc; ++i) kept[i] = first_acc[i], kept[kAcc + i] = second_acc[i];
    float found = 0.f;
    bool any = false;
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
      const float* const u = kept + quarter * 8;
      const int width = __shfl_sync(0xffffffffu, pair.width, quarter / 2 * 16);
      const uint32_t offset = __shfl_sync(0xffffffffu, pair.offset, quarter / 2 * 16);
      float top[4], s[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = i / 2 * 4 + i % 2;
        top[i] = fmaxf(power(u[at], 0, bias[0]), power(u[at + 2], 1, bias[1]));
      }
      all_reduce(top, quarter, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (fabsf(top[i]) == INFINITY) top[i] = 0.f;  // as torch.logsumexp: an infinite maximum comes out as it is
        const int at = i / 2 * 4 + i % 2;
        s[i] = exp2_approx(power(u[at], 0, bias[0] - top[i])) + exp2_approx(power(u[at + 2], 1, bias[1] - top[i]));
      }
      all_reduce(s, quarter, [](float a, float b) { return a + b; });
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = quarter % 2 * 16 + i / 2 * 8 + (lane & 3) * 2 + i % 2;
        s[i] = log2f(s[i]) + top[i];
        if (quarter == warp && lane < 4 && position < width) y[offset + position] = s[i] * kLn2;
      }
      if (!any && width > 0) found = s[0], any = true;
    }
    found = __shfl_sync(0xffffffffu, found, 0);
    shift = fabsf(found) < 1e30f ? found : 0.f;
    sync();
  }
};

// What the loading warpgroup does where rows come whole: bulk copies bring half of a plane of the halo at a time while
// its threads round and rearrange the half before.
template <ConvMath kMath>
__device__ __forceinline__ void load_rows(const NarrowParams& p, const NarrowSmemLayout& layout, uint32_t* smem,
                                          int64_t n, uint32_t first_tile, uint32_t end_tile) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr int kPerWord = ConvMathTraits<kMath>::kPerWord;
  const NarrowPlan& plan = p.plan;
  const int tid = threadIdx.x;
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const empty = full + 4;
  uint64_t* const raw_full = full + 8;
  const int slot_rows = plan.halo[1] / 2, row_words = p.in[2] / kPerWord, plane_words = slot_rows * row_words;
  const int slot_words = plane_words * p.c_in, pieces = (plan.halo[1] + slot_rows - 1) / slot_rows;
  const Element* const x = static_cast<const Element*>(p.x) + n * p.x_stride_n;
  // A piece: rows of one depth of a tile.
  const uint32_t tiles_h = static_cast<uint32_t>(plan.tiles[1]), per_tile = plan.halo[0] * pieces;
  struct Piece {
    uint32_t tile, part;
    int d, h, row;  // of the input; of the halo
  };
  auto piece_of = [&](uint32_t tile, uint32_t part) {
    const uint32_t depth = part / pieces, row = (part - depth * pieces) * slot_rows, tile_d = tile / tiles_h;
    return Piece{tile, part, int(tile_d * plan.tile[0] * plan.step[0] + depth) + plan.origin[0],
                 int((tile - tile_d * tiles_h) * plan.tile[1] * plan.step[1] + row) + plan.origin[1],
                 int(depth * plan.halo[1] + row)};
  };
  // By one warp.
  auto fetch = [&](uint32_t tile, uint32_t part, int slot) {
    if (part >= per_tile) part -= per_tile, ++tile;
    if (part >= per_tile) part -= per_tile, ++tile;
    if (tile >= end_tile) return;
    const Piece at = piece_of(tile, part);
    const int d = at.d, h = at.h, begin = max(0, -h);
    const int rows = min(min(slot_rows, plan.halo[1] - at.row % plan.halo[1]), p.in[1] - h) - begin;
    const bool any = rows > 0 && unsigned(d) < unsigned(p.in[0]);
    const uint32_t bytes = row_words * 4;
    if (tid == 0) barrier_expect_bytes(raw_full + slot, any ? rows * bytes * p.c_in : 0);
    __syncwarp();
    if (!any) return;
    const Element* const from = x + d * p.x_stride[0] + (h + begin) * p.x_stride[1];
    uint32_t* const to = smem + layout.raw + slot * slot_words + begin * row_words;
    const uint64_t policy = evict_normal_policy();
    const bool whole = p.x_stride[1] == p.in[2];  // rows lie one after the other
    for (int c = tid; c < p.c_in; c += 32) {
      for (int row = 0; row < (whole ? 1 : rows); ++row) {
        bulk_load(to + c * plane_words + row * row_words, from + c * p.x_stride_c + row * p.x_stride[1],
                  whole ? rows * bytes : bytes, raw_full + slot, policy);
      }
    }
  };
  if (tid < 32) {
    for (int slot = 0; slot < 2; ++slot) fetch(first_tile, slot, slot);
  }
  int stage = 0, slot = 0;
  uint32_t parity = 1, raw_parity = 0;
  const int columns = plan.pitch / kPerWord;  // words of a row of the halo
  const int lead = (plan.lead - plan.origin[2]) / kPerWord;
  for (uint32_t tile = first_tile, part = 0; tile < end_tile;) {
    barrier_wait(raw_full + slot, raw_parity);
    if (part == 0) barrier_wait(empty + stage, parity);
    const Piece at = piece_of(tile, part);
    const int h = at.h, rows = min(slot_rows, plan.halo[1] - at.row % plan.halo[1]);
    const bool inside_d = unsigned(at.d) < unsigned(p.in[0]);
    const uint32_t* const raw = smem + layout.raw + slot * slot_words;
    uint32_t* const to = smem + layout.halo + stage * narrow_stage_words(plan) + at.row * plan.pitch * 4;
    int row = 0, column = tid;
    while (column >= columns) column -= columns, ++row;
    while (row < rows) {
      const bool inside =
          inside_d && unsigned(h + row) < unsigned(p.in[1]) && unsigned(column - lead) < unsigned(row_words);
      const uint32_t* const from = raw + row * row_words + column - lead;
      uint32_t* const dst = to + (row * plan.pitch + column * kPerWord) * 4;
      auto word = [&](int c) { return inside && c < p.c_in ? from[c * plane_words] : 0u; };
      for (int chunk = 0; chunk < plan.words / 4; ++chunk) {
        if constexpr (kPerWord == 1) {
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = to_tf32(__uint_as_float(word(chunk * 4 + i)));
          *reinterpret_cast<uint4*>(dst + chunk * plan.plane) = make_uint4(v[0], v[1], v[2], v[3]);
        } else {
          uint32_t a[4], b[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t even = word(chunk * 8 + 2 * i), odd = word(chunk * 8 + 2 * i + 1);
            a[i] = __byte_perm(even, odd, 0x5410), b[i] = __byte_perm(even, odd, 0x7632);
          }
          uint4* const both = reinterpret_cast<uint4*>(dst + chunk * plan.plane);
          both[0] = make_uint4(a[0], a[1], a[2], a[3]);
          both[1] = make_uint4(b[0], b[1], b[2], b[3]);
        }
      }
      column += 128;
      while (column >= columns) column -= columns, ++row;
    }
    named_barrier(2, 128);  // the slot is free
    if (tid < 32) fetch(tile, part + 2, slot);
    slot ^= 1, raw_parity ^= slot == 0;
    if (++part == per_tile) {
      part = 0, ++tile;
      wgmma_fence_shared();
      barrier_arrive(full + stage);
      if (++stage == plan.stages) stage = 0, parity ^= 1;
    }
  }
}

#endif

template <ConvMath kMath, int kSteps>
__global__ void __launch_bounds__(128 * (narrow_producers(kMath, true) + narrow_channel_consumers(kMath, true)), 1)
    conv_narrow_lse_kernel(const __grid_constant__ NarrowParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Traits = ConvMathTraits<kMath>;
  using Element = typename Traits::Element;
  constexpr int kPerWord = Traits::kPerWord;
  constexpr WgmmaType kType = kMath == ConvMath::kBf16 ? WgmmaType::kBf16
                              : kPerWord == 2          ? WgmmaType::kFp16
                                                       : WgmmaType::kTf32;
  constexpr bool kTerms = kMath == ConvMath::kFp16x3;
  constexpr int kStrip = kNarrowLseStrip;
  constexpr int kProducers = narrow_producers(kMath, true);
  constexpr int kConsumers = narrow_channel_consumers(kMath, true);
  constexpr int kLoaders = 128 * kProducers;  // threads
  constexpr int kThreads = kLoaders + 128 * kConsumers;

  extern __shared__ __align__(128) uint32_t smem[];
  const NarrowPlan& plan = p.plan;
  const NarrowSmemLayout layout = narrow_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const empty = full + 4;
  int2* const weight_table = reinterpret_cast<int2*>(smem + layout.weights);
  int4* const strip_table = reinterpret_cast<int4*>(smem + layout.strips);
  uint32_t* const halo = smem + layout.halo;
  const int pairs = (plan.strips + 2 * kConsumers - 1) / (2 * kConsumers) * kConsumers;  // with empty ones

  const int tid = threadIdx.x;
  const int64_t n = blockIdx.x / plan.slices;
  const int64_t slice = blockIdx.x % plan.slices;

  fill_weight_table<kPerWord>(p, weight_table, kSteps, tid, kThreads);
  // Strip -> its place in the halo and in the result, and its rows and columns in the tile.
  for (int i = tid; i < 2 * pairs; i += kThreads) {
    const int per_row = plan.tile[2] / kStrip;
    const int w = i % per_row * kStrip, h = i / per_row % plan.tile[1], d = i / (per_row * plan.tile[1]);
    const int base = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead + w;
    strip_table[i] = i < plan.strips ? make_int4(base, (d * p.out[1] + h) * p.out[2] + w, d << 16 | h, w)
                                     : make_int4(0, 0, 0, 1 << 30);
  }
  narrow_prepare_stages(plan, layout, smem, kThreads, kLoaders, kConsumers * 4);
  if (!kTerms && tid == 0) {
    for (int slot = 0; slot < 2; ++slot) barrier_init(full + 8 + slot, 1);
    barrier_init_fence();
  }
  wgmma_fence_shared();  // the zeros
  __syncthreads();

  int tile_count;
  const TileCursor cursor = narrow_tiles(plan, slice, &tile_count);
  const uint32_t first_tile = static_cast<uint32_t>(slice * plan.tiles_per_slice);

  if (tid < kLoaders) {
    share_registers<kProducers, kConsumers, false, (kSteps > kNarrowSplitSteps)>();
    if (!kTerms && p.load == NarrowLoad::kRows) {
      if constexpr (!kTerms) load_rows<kMath>(p, layout, smem, n, first_tile, first_tile + tile_count);
    } else {
      narrow_load_tiles<kMath, true, kProducers, true>(p, layout, smem, n, 0, cursor, tile_count);
    }
  } else {
    share_registers<kProducers, kConsumers, true, (kSteps > kNarrowSplitSteps)>();
    const int lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int warpgroup = __shfl_sync(0xffffffffu, tid / 128 - kProducers, 0);  // known to be the same in a warp
    const int warp = tid / 32 & 3;
    const int channels[2] = {warp * 16 + g, warp * 16 + g + 8};
    ChannelWeights<kMath, kSteps> weights;
    weights.load(p, weight_table, 0, 0, p.c_out, channels, t);

    wait_for_prerequisites();  // the table; everything else was there before them
    ChannelLse<kTerms> lse;
    [[maybe_unused]] float norm_scale[2];  // of the products
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse.scale[r] = lse.offset[r] = 0.f;
      lse.bias[r] = -INFINITY;
      if (channels[r] < p.c_out) {
        const float bias = p.bias ? to_acc(static_cast<const Element*>(p.bias)[channels[r]]) : 0.f;
        const float4 norm = static_cast<const float4*>(p.norm_table)[n * p.c_out_total + channels[r]];
        lse.scale[r] = norm.y * norm.z;
        lse.offset[r] = fmaf(bias - norm.x, lse.scale[r], norm.w);
        lse.bias[r] = bias * lse.kLog2E;
        if constexpr (kTerms) {
          lse.scale[r] *= 2.f * lse.kLog2E, lse.offset[r] *= 2.f * lse.kLog2E;
          lse.bias[r] += lse.kLog2E * 2.f / 3.f;
        }
      }
      if constexpr (kTerms) norm_scale[r] = lse.scale[r] * weights.unscaled[r];
    }
    lse.exchange = reinterpret_cast<float*>(smem + layout.scratch) + warpgroup * (2 * 4 * kLsePositions);
    lse.y = p.y + n * p.y_stride_n;
    lse.barrier = 3 + warpgroup;
    lse.warp = warp;
    lse.lane = lane;

    int stage = 0, round = -1, rounds, limit;
    int leaving = -1;  // a stage to give back when nothing needs it any more
    uint32_t parity = 0, tile = first_tile;
    const uint32_t halo_address = shared_address(halo) >> 4;
    const int stage_chunks = narrow_stage_words(plan) / 4;
    const int4* const my_strips = strip_table + 2 * warpgroup + lane / 16;
    // What is left of the output from the tile's first position on, and where that lies.
    int room[3];
    uint32_t tile_offset;
    auto enter_tile = [&] {
      const uint32_t tiles_w = static_cast<uint32_t>(plan.tiles[2]), tiles_h = static_cast<uint32_t>(plan.tiles[1]);
      const uint32_t row = tile / tiles_w, plane = row / tiles_h;
      const int d = plane * plan.tile[0], h = (row - plane * tiles_h) * plan.tile[1],
                w = (tile - row * tiles_w) * plan.tile[2];
      room[0] = p.out[0] - d, room[1] = p.out[1] - h, room[2] = p.out[2] - w;
      tile_offset = uint32_t(d * p.out[1] + h) * p.out[2] + w;
      // All warpgroups take as many turns, up to the last strip with outputs.
      const int rows = (min(plan.tile[0], room[0]) - 1) * plan.tile[1] + min(plan.tile[1], room[1]);
      limit = rows * (plan.tile[2] / kStrip);
      rounds = (limit + 2 * kConsumers - 1) / (2 * kConsumers);
    };
    enter_tile();
    // The next pair of this warpgroup, an empty one where it has none. False after the last.
    auto advance = [&](LsePair& pair) {
      pair.width = 0;
      if (++round == rounds) {
        if (--tile_count == 0) return false;
        round = 0;
        leaving = stage;
        if (++stage == plan.stages) stage = 0, parity ^= 1;
        ++tile;
        enter_tile();
        barrier_wait(full + stage, parity);
      }
      const int strip = round * (2 * kConsumers);  // the block's first
      const int4 entry = my_strips[strip];
      if (strip + 2 * warpgroup + lane / 16 < limit && (entry.z >> 16) < room[0] && (entry.z & 0xffff) < room[1]) {
        pair.width = min(kStrip, room[2] - entry.w);
      }
      pair.offset = tile_offset + entry.y;
      pair.address = halo_address + stage * stage_chunks + entry.x;
      if constexpr (kTerms) {
        pair.unscaled = *reinterpret_cast<const float*>(smem + layout.barriers + kNarrowScales + stage);
      }
      return true;
    };
    // Two terms: the small products come first. Most of the large ones have a sum of their own, since the tensor cores
    // truncate where they add to a sum.
    constexpr int kOwnSum = kSteps * 2 / 5;  // and steps from there on
    constexpr int kAcc = kStrip / 2;
    struct Products {
      float acc[kAcc];
      float other[kTerms ? kAcc : 1];
    };
    auto multiply = [&](Products& to, const LsePair& pair, int strip) {
      const uint32_t address = __shfl_sync(0xffffffffu, pair.address, strip * 16);  // known to be the same in a warp
      wgmma_fence();
      if constexpr (kTerms) {
        const uint32_t low = address + narrow_planes(plan) * (plan.plane / 4);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          wgmma<kType, kStrip, 128>(to.acc, weights.low_words[i], address + plan.chunk_pairs[i], i > 0);
          wgmma<kType, kStrip, 128>(to.acc, weights.words[i], low + plan.chunk_pairs[i], true);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const uint32_t b = address + plan.chunk_pairs[i];
          if (i >= kOwnSum) {
            wgmma<kType, kStrip, 128>(to.other, weights.words[i], b, i > kOwnSum);
          } else {
            wgmma<kType, kStrip, 128>(to.acc, weights.words[i], b, true);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          wgmma<kType, kStrip, 128>(to.acc, weights.words[i], address + plan.chunk_pairs[i], i > 0);
        }
      }
      wgmma_commit();
    };
    auto use = [&](Products& of) {
      wgmma_use(of.acc);
      if constexpr (kTerms) {
        wgmma_use(of.other);
#pragma unroll
        for (int i = 0; i < kAcc; ++i) of.acc[i] += of.other[i];
      }
    };
    auto set_scales = [&](const LsePair& pair) {
      if constexpr (kTerms) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          lse.scale[r] = norm_scale[r] * pair.unscaled;
          lse.weight[r] = weights.unscaled[r] * pair.unscaled * lse.kLog2E;
        }
      }
    };

    barrier_wait(full, 0);
    Products first, second;
    LsePair pair{}, next{};
    bool more = advance(next), again = false;
    multiply(first, next, 0);
    // Special functions are what most of the time goes into, and warps that come to them together leave them together,
    // to wait for all else side by side. So warpgroups take turns by halves.
    constexpr bool kTurns = kConsumers == 4;
    constexpr int kTurn = 8;  // barriers of the first and the second half
    const int half = warpgroup / 2;
    if (kTurns && half == 1) named_barrier_arrive(kTurn, 128 * kConsumers);
    while (more || again) {
      const bool in_turn = kTurns && more;
      wgmma_wait<0>();
      use(first);
      if (__builtin_expect(again, 0)) {
        // The pair before, whose stage is still there. This one's products were lost to it.
        multiply(first, pair, 0);
        multiply(second, pair, 1);
        wgmma_wait<0>();
        use(first);
        use(second);
        set_scales(pair);
        lse.exact(first.acc, second.acc, pair);
        multiply(first, next, 0);
        wgmma_wait<0>();
        use(first);
      }
      if (leaving >= 0) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + leaving);
        leaving = -1;
      }
      pair = next;
      set_scales(pair);
      float s[2 * lse.kSums];
      multiply(second, pair, 1);
      if (in_turn) named_barrier(kTurn + half, 128 * kConsumers);
      lse.add_up(first.acc, s);
      wgmma_wait<0>();
      use(second);
      more = more && advance(next);
      // After the last pair these are products for nobody, since a branch around them would make the compiler wait.
      multiply(first, next, 0);
      lse.add_up(second.acc, s + lse.kSums);
      if (in_turn && (half == 0 || more)) named_barrier_arrive(kTurn + 1 - half, 128 * kConsumers);
      again = !lse.finish(s, pair);
    }
    wgmma_wait<0>();
    use(first);
  }
#endif
}

}  // namespace kgopt
