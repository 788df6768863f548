// Implicit GEMM on wgmma for convolutions with few input and more than 32 output channels, sm_90a.
//
// Rows of the GEMM are 64 output channels, columns 32 or 64 neighbouring positions of an output row, K the input
// channels and taps. The halo lies in shared memory in chunks of 16 bytes of channels a position, which is how wgmma
// wants its right operand: a tap is an address, and nothing is loaded to registers or unfolded. The weights stay in
// registers from start to end. A thread holds two channels, so that what belongs to a channel (statistics, or scale and
// offset of the norm) takes a few registers, where positions as rows (conv3d_narrow_kernel.cuh) take a shared memory
// load each.
//
// Each warpgroup starts the products of its next row before the epilogue of the one that is done.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../common/async.cuh"
#include "../common/dtype.cuh"
#include "../common/mma.cuh"
#include "../common/reduce.cuh"
#include "../common/wgmma.cuh"
#include "conv3d_narrow_finish.cuh"
#include "conv3d_narrow_load.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Statistics of a thread's two channels.
struct ChannelSums {
  ShiftedSums<float> sums[2];
  float count = 0.f;

  // A row's products: acc[4 j + 2 r + e] is channel r at position 8 j + 2 t + e, of which `width` are inside.
  // factor: of each channel, where kScaled.
  template <bool kScaled, int kAcc>
  __device__ __forceinline__ void add(const float (&acc)[kAcc], int t, int width, const float (&factor)[2]) {
    const int left = width - 2 * t;  // from this thread's first position
    if (count == 0.f && left > 0) {
      sums[0].shift = kScaled ? acc[0] * factor[0] : acc[0], sums[1].shift = kScaled ? acc[2] * factor[1] : acc[2];
    }
    float sum[2][2] = {}, sum_sq[2][2] = {};  // two chains of each hide the latency of an addition
    auto add_value = [&](int i) {
      const int r = i / 2 % 2, chain = i / 4 % 2;
      const float v = kScaled ? fmaf(acc[i], factor[r], -sums[r].shift) : acc[i] - sums[r].shift;
      sum[r][chain] += v;
      sum_sq[r][chain] = fmaf(v, v, sum_sq[r][chain]);
    };
    if (width >= kAcc * 2) {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) add_value(i);
      count += kAcc / 2;
    } else {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) {
        if (i / 4 * 8 + i % 2 < left) add_value(i);
      }
      count += static_cast<float>(width / 8 * 2 + max(0, min(2, width % 8 - 2 * t)));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r].sum += sum[r][0] + sum[r][1];
      sums[r].sum_sq += sum_sq[r][0] + sum_sq[r][1];
    }
  }
};

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// logsumexp over channels of u + hardswish(tanh(scale u + offset)) for a warpgroup's rows.
//
// Any shift within some sixty of the result keeps the exponentials in range, so one shift serves all positions; where
// it does not, `exact` finds each position's maximum and the shift moves there. kAccurate: with fp32 accuracy, of
// values that a factor for each row of positions scales.
template <int kPositions, bool kAccurate>
struct ChannelLse {
  static constexpr int kAcc = kPositions / 2;
  static constexpr int kBlocks = kPositions / 8;
  static constexpr float kLog2E = 1.44269504088896340736f;
  static constexpr float kLn2 = 0.69314718055994530942f;

  float scale[2], offset[2], bias[2];  // bias: times log2(e), -inf for a channel that is padding
  float weight[2];                     // kAccurate: of a value in the sum, times log2(e); it and `scale` for this row
  float shift = 0.f;                   // in powers of 2
  float* exchange;                     // [2][4 warps][kPositions], this warpgroup's
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
  __device__ __forceinline__ float* shared(int of_warp) const { return exchange + (buffer * 4 + of_warp) * kPositions; }
  __device__ __forceinline__ void sync() const { named_barrier(barrier, 128); }

  // Lanes of equal t hold the warp's 16 channels of the same positions, as many blocks of 8 as kLeft, two of them each.
  // Every step adds two lanes that differ in kMask and halves what either keeps, down to one block in s[0] and s[1].
  template <int kLeft, int kMask>
  __device__ __forceinline__ void scatter_sums(float (&s)[kPositions / 4]) const {
    const bool upper = lane & kMask;
#pragma unroll
    for (int i = 0; i < (kLeft > 1 ? kLeft : 2); ++i) {
      if constexpr (kLeft > 1) {
        const float kept = upper ? s[i + kLeft] : s[i], sent = upper ? s[i] : s[i + kLeft];
        s[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kMask);
      } else {
        s[i] += __shfl_xor_sync(0xffffffffu, s[i], kMask);
      }
    }
    if constexpr (kMask > 4) scatter_sums<(kLeft > 1 ? kLeft / 2 : 1), kMask / 2>(s);
  }

  __device__ __forceinline__ void finish(float (&acc)[kAcc], float* y, int width) {
    const int g = lane >> 2, t = lane & 3;
    const float shifted[2] = {bias[0] - shift, bias[1] - shift};
    float s[kPositions / 4];
#pragma unroll
    for (int i = 0; i < kPositions / 4; ++i) {
      const int at = i / 2 * 4 + i % 2;
      s[i] = exp2_approx(power(acc[at], 0, shifted[0])) + exp2_approx(power(acc[at + 2], 1, shifted[1]));
    }
    scatter_sums<kBlocks, 16>(s);
    const int block = kBlocks == 8 ? g : g / 2;
    const int position = block * 8 + t * 2;
    *reinterpret_cast<float2*>(shared(warp) + position) = make_float2(s[0], s[1]);
    sync();
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(shared(w) + position);
      sum.x += part.x;
      sum.y += part.y;
    }
    auto in_range = [&](float v, int at) { return at >= width || (v > 1e-30f && v < 1e30f); };
    // All warps see the same sums and decide alike.
    const bool in_step = __all_sync(0xffffffffu, in_range(sum.x, position) && in_range(sum.y, position + 1));
    if (__builtin_expect(in_step, 1)) {
      if (block / (kBlocks / 4) == warp && (kBlocks == 8 || g % 2 == 0)) {
        auto log = [](float v) { return kAccurate ? log2f(v) : log2_approx(v); };
        y += position;
        const float first = (log(sum.x) + shift) * kLn2, second = (log(sum.y) + shift) * kLn2;
        if (width >= kPositions) {
          y[0] = first, y[1] = second;
        } else {
          if (position < width) y[0] = first;
          if (position + 1 < width) y[1] = second;
        }
      }
      buffer ^= 1;
    } else {
      wgmma_use(acc);  // or the compiler keeps what it could use again, in registers that it does not have
      exact(acc, y, width);
    }
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
      s[i] = op(op(v[0], v[kPositions]), op(v[2 * kPositions], v[3 * kPositions]));
    }
  }

  // The first row, values that leap, infinities and NaNs: rare, so small code counts for more than speed.
  __device__ __forceinline__ void exact(const float (&acc)[kAcc], float* y, int width) {
    float kept[kAcc];  // indexed at run time, hence in local memory
#pragma unroll
    for (int i = 0; i < kAcc; ++i) kept[i] = acc[i];
    float first = 0.f;
#pragma unroll 1
    for (int quarter = 0; quarter < kBlocks / 2; ++quarter) {
      const float* const u = kept + quarter * 8;
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
        const int position = quarter * 16 + i / 2 * 8 + (lane & 3) * 2 + i % 2;
        s[i] = log2f(s[i]) + top[i];
        if (quarter % 4 == warp && lane < 4 && position < width) y[position] = s[i] * kLn2;
      }
      if (quarter == 0) first = s[0];
    }
    first = __shfl_sync(0xffffffffu, first, 0);
    shift = fabsf(first) < 1e30f ? first : 0.f;
    sync();
  }
};

#endif

template <ConvMath kMath, int kSteps, int kPositions, ConvEpilogue kEpilogue>
__global__ void __launch_bounds__(128 * (narrow_producers(kMath, kEpilogue == ConvEpilogue::kResidualLse) +
                                         narrow_channel_consumers(kMath, kEpilogue == ConvEpilogue::kResidualLse)),
                                  1) conv_narrow_channels_kernel(const __grid_constant__ NarrowParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Traits = ConvMathTraits<kMath>;
  using Element = typename Traits::Element;
  constexpr int kPerWord = Traits::kPerWord;
  constexpr bool kStats = kEpilogue == ConvEpilogue::kStats;
  constexpr WgmmaType kType = kMath == ConvMath::kBf16 ? WgmmaType::kBf16
                              : kPerWord == 2          ? WgmmaType::kFp16
                                                       : WgmmaType::kTf32;
  constexpr bool kTerms = kMath == ConvMath::kFp16x3;
  constexpr int kChannels = 64;
  constexpr int kProducers = narrow_producers(kMath, !kStats);
  constexpr int kConsumers = narrow_channel_consumers(kMath, !kStats);
  constexpr int kLoaders = 128 * kProducers;  // threads
  constexpr int kThreads = kLoaders + 128 * kConsumers;

  if constexpr (kStats) {
    if (gram_was_exact(p, kChannels)) return;
  }
  extern __shared__ __align__(128) uint32_t smem[];
  const NarrowPlan& plan = p.plan;
  const NarrowSmemLayout layout = narrow_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const empty = full + 4;
  int2* const weight_table = reinterpret_cast<int2*>(smem + layout.weights);
  int2* const job_table = reinterpret_cast<int2*>(smem + layout.strips);
  float* const scratch = reinterpret_cast<float*>(smem + layout.scratch);
  uint32_t* const halo = smem + layout.halo;
  const int stage_words = narrow_stage_words(plan);

  const int tid = threadIdx.x;
  const int64_t n = blockIdx.x / plan.slices;
  const int64_t slice = blockIdx.x % plan.slices;
  const int c_begin = blockIdx.y * kChannels;  // first output channel of this block, within the conv group
  const int group = blockIdx.z;
  const int c_valid = min(kChannels, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels

  // K entry -> where its weight lies in a filter, and the one of the channel that shares its word; -1: padding.
  const int taps = plan.kernel[0] * plan.kernel[1] * plan.kernel[2];
  for (int k = tid; k < kSteps * 8; k += kThreads) {
    const int chunk = k / 4, tap = chunk % taps, channel = (chunk / taps * 4 + k % 4) * kPerWord;
    int2 v = make_int2(-1, -1);
    if (chunk < plan.words / 4 * taps && channel < p.c_in) {
      const int w = tap % plan.kernel[2], h = tap / plan.kernel[2] % plan.kernel[1],
                d = tap / (plan.kernel[2] * plan.kernel[1]);
      v.x = static_cast<int>(channel * p.w_stride_in + d * p.w_stride_k[0] + h * p.w_stride_k[1] + w * p.w_stride_k[2]);
      if (kPerWord == 2 && channel + 1 < p.c_in) v.y = v.x + static_cast<int>(p.w_stride_in);
    }
    weight_table[k] = v;
  }
  for (int i = tid; i < plan.strips; i += kThreads) {
    const int per_row = plan.tile[2] / kPositions;
    const int w = i % per_row * kPositions, h = i / per_row % plan.tile[1], d = i / (per_row * plan.tile[1]);
    const int base = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead + w;
    job_table[i] = make_int2(base, d << 24 | h << 14 | w);
  }
  narrow_prepare_stages(plan, layout, smem, kThreads, kLoaders, kConsumers * 4);
  wgmma_fence_shared();  // the zeros
  __syncthreads();

  int tile_count;
  TileCursor cursor = narrow_tiles(plan, slice, &tile_count);
  const int tiles_w = static_cast<int>(plan.tiles[2]), tiles_h = static_cast<int>(plan.tiles[1]);

  if (tid < kLoaders) {
    share_registers<kProducers, kConsumers, false>();
    narrow_load_tiles<kMath, true, kProducers, true>(p, layout, smem, n, group, cursor, tile_count);
  } else {
    share_registers<kProducers, kConsumers, true>();
    const int lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int warpgroup = __shfl_sync(0xffffffffu, tid / 128 - kProducers, 0);  // known to be the same in a warp
    const int warp = tid / 32 & 3;
    const int channels[2] = {warp * 16 + g, warp * 16 + g + 8};  // of the block's

    // No branches and little arithmetic: all loads are under way before the first is used.
    using Stored = std::conditional_t<kPerWord == 2 && !kTerms, unsigned short, float>;
    const bool is_channel[2] = {channels[0] < c_valid, channels[1] < c_valid};
    const Stored* filter[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      filter[r] = static_cast<const Stored*>(p.weight) + group * p.w_stride_group +
                  (c_begin + min(channels[r], c_valid - 1)) * p.w_stride_out;
    }
    uint32_t weights[kSteps][4];
    [[maybe_unused]] uint32_t low_weights[kTerms ? kSteps : 1][4];
    [[maybe_unused]] float most[2] = {0.f, 0.f}, unscaled[2] = {1.f, 1.f};  // of each channel's weights
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      const int2 at = weight_table[i / 4 * 8 + (i >> 1 & 1) * 4 + t];
      const Stored* const w = filter[i & 1];
      uint32_t word;
      if constexpr (kTerms) {
        // The two values for now.
        const float first = w[max(at.x, 0)], second = w[max(at.y, 0)];
        word = at.x < 0 || !is_channel[i & 1] ? 0 : __float_as_uint(first);
        low_weights[i / 4][i & 3] = at.y < 0 || !is_channel[i & 1] ? 0 : __float_as_uint(second);
      } else if constexpr (kPerWord == 2) {
        const uint32_t low = w[max(at.x, 0)], high = w[max(at.y, 0)];
        word = (at.x < 0 ? 0 : low) | (at.y < 0 ? 0 : high << 16);
      } else {
        word = at.x < 0 ? 0 : to_tf32(w[max(at.x, 0)]);
      }
      weights[i / 4][i & 3] = is_channel[i & 1] ? word : 0;
    }
    if constexpr (kTerms) {
      auto larger = [](float m, uint32_t word) {
        const float v = fabsf(__uint_as_float(word));
        return v < INFINITY ? fmaxf(m, v) : m;
      };
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) {
        most[i & 1] = larger(larger(most[i & 1], weights[i / 4][i & 3]), low_weights[i / 4][i & 3]);
      }
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The lanes of a channel are four neighbours. The largest weight comes below 2^11.
        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
        const uint32_t exponent = min(max(__float_as_uint(most[r]) >> 23, 11u), 254u);
        scale[r] = __uint_as_float((264 - exponent) << 23);
        unscaled[r] = __uint_as_float((exponent - 10) << 23);
      }
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) {
        uint32_t& high = weights[i / 4][i & 3];
        uint32_t& low = low_weights[i / 4][i & 3];
        split_half(__uint_as_float(high) * scale[i & 1], __uint_as_float(low) * scale[i & 1], &high, &low);
      }
    }
    float bias[2] = {0.f, 0.f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (p.bias && channels[r] < c_valid) bias[r] = to_acc(static_cast<const Element*>(p.bias)[c_first + channels[r]]);
    }
    [[maybe_unused]] ChannelSums stats;
    [[maybe_unused]] ChannelLse<kPositions, kTerms> lse;
    [[maybe_unused]] float norm_scale[2];  // of the products, as the next two
    if constexpr (!kStats) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse.scale[r] = lse.offset[r] = 0.f;
        lse.bias[r] = -INFINITY;
        if (channels[r] < c_valid) {
          const float4 norm = static_cast<const float4*>(p.norm_table)[n * p.c_out_total + channels[r]];
          lse.scale[r] = norm.y * norm.z;
          lse.offset[r] = fmaf(bias[r] - norm.x, lse.scale[r], norm.w);
          lse.bias[r] = bias[r] * lse.kLog2E;
          if constexpr (kTerms) {
            lse.scale[r] *= 2.f * lse.kLog2E, lse.offset[r] *= 2.f * lse.kLog2E;
            lse.bias[r] += lse.kLog2E * 2.f / 3.f;
          }
        }
        norm_scale[r] = lse.scale[r] * unscaled[r];
      }
      lse.exchange = scratch + warpgroup * (2 * 4 * kPositions);
      lse.barrier = 3 + warpgroup;
      lse.warp = warp;
      lse.lane = lane;
    }

    struct Row {
      int d, h, w;
      float unscaled;  // kTerms: what undoes the scale of its input
    };
    int stage = 0, tile = 0, job = warpgroup;
    uint32_t parity = 0;
    uint32_t address = 0;  // of the next row's first position, in chunks of 16 bytes
    const uint32_t halo_address = shared_address(halo) >> 4;
    int2 ahead = job_table[min(job, plan.strips - 1)];  // of `job`, read a turn before it is needed
    // The next row of this warpgroup, and a stage given back when its last row was multiplied. False after the last.
    auto advance = [&](Row& row) {
      for (;;) {
        int2 entry = ahead;
        if (job >= plan.strips) {
          do {
            job -= plan.strips;
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage);
            if (++stage == plan.stages) stage = 0, parity ^= 1;
            cursor.advance(tiles_h, tiles_w);
            if (++tile == tile_count) return false;
            barrier_wait(full + stage, parity);
          } while (job >= plan.strips);
          entry = job_table[job];
        }
        job += kConsumers;
        ahead = job_table[min(job, plan.strips - 1)];
        row.d = cursor.d * plan.tile[0] + (entry.y >> 24);
        row.h = cursor.h * plan.tile[1] + ((entry.y >> 14) & 1023);
        row.w = cursor.w * plan.tile[2] + (entry.y & 16383);
        if constexpr (kTerms) {
          row.unscaled = *reinterpret_cast<const float*>(smem + layout.barriers + kNarrowScales + stage);
        }
        address = __shfl_sync(0xffffffffu, halo_address + stage * (stage_words / 4) + entry.x, 0);
        if (row.d < p.out[0] && row.h < p.out[1] && row.w < p.out[2]) return true;
      }
    };
    // Two terms: the small products come first. For logsumexp most of the large ones have a sum of their own, since the
    // tensor cores truncate where they add to a sum.
    constexpr bool kTwoSums = kTerms && !kStats;
    constexpr int kOwnSum = kSteps * 2 / 5;  // and steps from there on
    [[maybe_unused]] float other_sum[kTwoSums ? kPositions / 2 : 1];
    auto multiply = [&](float (&acc)[kPositions / 2]) {
      wgmma_fence();
      if constexpr (kTerms) {
        const uint32_t low = address + narrow_planes(plan) * (plan.plane / 4);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          wgmma<kType, kPositions, 128>(acc, low_weights[i], address + plan.chunk_pairs[i], i > 0);
          wgmma<kType, kPositions, 128>(acc, weights[i], low + plan.chunk_pairs[i], true);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const uint32_t b = address + plan.chunk_pairs[i];
          if constexpr (kTwoSums) {
            if (i >= kOwnSum) {
              wgmma<kType, kPositions, 128>(other_sum, weights[i], b, i > kOwnSum);
              continue;
            }
          }
          wgmma<kType, kPositions, 128>(acc, weights[i], b, true);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          wgmma<kType, kPositions, 128>(acc, weights[i], address + plan.chunk_pairs[i], i > 0);
        }
      }
      wgmma_commit();
    };
    auto wait = [&](float (&acc)[kPositions / 2]) {
      wgmma_wait<0>();
      wgmma_use(acc);
      if constexpr (kTwoSums) {
        wgmma_use(other_sum);
#pragma unroll
        for (int i = 0; i < kPositions / 2; ++i) acc[i] += other_sum[i];
      }
    };
    auto epilogue = [&](float (&acc)[kPositions / 2], const Row& row) {
      const int width = min(kPositions, p.out[2] - row.w);
      if (width <= 0) return;  // never; without this branch the compiler puts the epilogue before the products
      if constexpr (kStats) {
        const float factor[2] = {unscaled[0] * row.unscaled, unscaled[1] * row.unscaled};
        stats.add<kTerms>(acc, t, width, factor);
      } else {
        if constexpr (kTerms) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            lse.scale[r] = norm_scale[r] * row.unscaled;
            lse.weight[r] = unscaled[r] * row.unscaled * lse.kLog2E;
          }
        }
        lse.finish(acc, p.y + n * p.y_stride_n + (uint32_t(row.d * p.out[1] + row.h) * p.out[2] + row.w), width);
      }
    };

    barrier_wait(full, 0);
    float first[kPositions / 2];
    Row row{}, next{};
    bool more = advance(next);
    if (more) {
      multiply(first);
      wait(first);
    }
    if constexpr (kStats) {
      // The epilogue of the row in `done` while the next one's products are under way. After the last row they are
      // multiplied once more, for nobody, since a branch around them would make the compiler wait.
      float second[kPositions / 2];
      auto turn = [&](auto& done, auto& other) {
        row = next;
        more = advance(next);
        multiply(other);
        epilogue(done, row);
        wait(other);
      };
      while (more) {
        turn(first, second);
        if (more) turn(second, first);
      }
    } else {
      while (more) {
        row = next;
        epilogue(first, row);
        more = advance(next);
        if (more) {
          multiply(first);
          wait(first);
        }
      }
    }

    if constexpr (kStats) {
      // Thread -> quad (the lanes of a channel) -> the block's warpgroups.
      Moments<float>* const shared = reinterpret_cast<Moments<float>*>(scratch);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Moments<float> m = stats.sums[r].moments(stats.count);
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) {
          Moments<float> other = shuffle_xor(m, mask);
          if (lane & mask) {
            merge(other, m);
            m = other;
          } else {
            merge(m, other);
          }
        }
        if (t == 0) shared[warpgroup * kChannels + channels[r]] = m;
      }
      finish_stats<kChannels, kConsumers, kConsumers * 128>(
          p.stats, n, slice, c_first, c_valid, shared, tid - kLoaders,
          [&](int c) { return p.bias ? to_acc(static_cast<const Element*>(p.bias)[c_first + c]) : 0.f; });
    }
  }
#endif
}

}  // namespace kgopt
