// Conv + GroupNorm + tanh + hardswish + residual + logsumexp over channels for few input and at most 64 output
// channels, from the statistics that an earlier pass left in a table, sm_90a. Channels are the rows of the products, as
// in conv3d/few_channels/channels/kernel.cuh.
//
// A warpgroup waits for its products and then reduces them; the other three are busy meanwhile.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/few_channels/weights.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// logsumexp over channels of u + hardswish(tanh(scale u + offset)) for a warpgroup's rows.
//
// Any shift within some sixty of the result keeps the exponentials in range, so one shift serves all positions; where
// it does not, `exact` finds each position's maximum and the shift moves there. With fp32
// accuracy, of values that a factor for each row of positions scales.
template <int kPositions>
struct ChannelLse {
  static constexpr int kAcc = kPositions / 2;
  static constexpr int kBlocks = kPositions / 8;
  static constexpr float kLog2E = 1.44269504088896340736f;
  static constexpr float kLn2 = 0.69314718055994530942f;

  float scale[2], offset[2], bias[2];  // bias: times log2(e), -inf for a channel that is padding
  float weight[2];                     // of a value in the sum, times log2(e); it and `scale` for this row
  float shift = 0.f;                   // in powers of 2
  float* exchange;                     // [2][4 warps][kPositions], this warpgroup's
  int buffer = 0;
  int barrier, warp, lane;

  // 2^(r log2(e) - shift)
  __device__ __forceinline__ float power(float u, int r, float shifted_bias) const {
    // Since |tanh| <= 1, hardswish needs no clamp: h (h + 3) / 6. With q = 1 / (1 + exp(2 z)) that is
    // 2 / 3 + q (2 q - 5) / 3, whose constant is part of the bias.
    const float q = rcp_approx(1.f + exp2_approx(fmaf(u, scale[r], offset[r])));
    return fmaf(q, fmaf(q, kLog2E * 2.f / 3.f, kLog2E * -5.f / 3.f), fmaf(u, weight[r], shifted_bias));
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
    float2 sum = *reinterpret_cast<const float2*>(shared(0) + position);
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(shared(w) + position);
      sum.x += part.x;
      sum.y += part.y;
    }
    auto in_range = [&](float v, int at) { return at >= width || (v > 1e-30f && v < 1e30f); };
    // All warps see the same sums and decide alike.
    const bool in_step = __all_sync(0xffffffffu, in_range(sum.x, position) && in_range(sum.y, position + 1));
    if (__builtin_expect(in_step, 1)) {
      if (block / (kBlocks / 4) == warp && (kBlocks == 8 || g % 2 == 0)) {
        y += position;
        const float first = (log2f(sum.x) + shift) * kLn2, second = (log2f(sum.y) + shift) * kLn2;
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

template <int kPositions>
__global__ void __launch_bounds__(128 * (1 + kChannelsConsumers), 1)
    conv_channels_lse_kernel(const __grid_constant__ FewChannelsParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr WgmmaType kType = WgmmaType::kFp16;
  constexpr int kSteps = kChannelsSteps;
  constexpr int kProducers = 1;
  constexpr int kConsumers = kChannelsConsumers;
  constexpr int kLoaders = 128 * kProducers;  // threads
  constexpr int kThreads = kLoaders + 128 * kConsumers;

  extern __shared__ __align__(128) uint32_t smem[];
  const FewChannelsPlan& plan = p.plan;
  const FewChannelsSmemLayout layout = few_channels_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const empty = full + 4;
  int2* const weight_table = reinterpret_cast<int2*>(smem + layout.weights);
  int4* const strip_table = reinterpret_cast<int4*>(smem + layout.strips);
  uint32_t* const halo = smem + layout.halo;
  const int tid = threadIdx.x;
  const int64_t n = blockIdx.x / plan.slices;
  const int64_t slice = blockIdx.x % plan.slices;

  fill_weight_table(p, weight_table, tid, kThreads);
  // Strip -> its place in the halo and in the result, and its rows and columns in the tile.
  const int per_row = plan.tile[2] / kPositions;
  for (int i = tid; i < plan.strips; i += kThreads) {
    const int w = i % per_row * kPositions, h = i / per_row % plan.tile[1], d = i / (per_row * plan.tile[1]);
    const int base = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead + w;
    strip_table[i] = make_int4(base, (d * p.out[1] + h) * p.out[2] + w, d << 16 | h, w);
  }
  few_channels_prepare_stages(plan, layout, smem, kThreads, kLoaders, kConsumers * 4);
  wgmma_fence_shared();  // the zeros
  __syncthreads();

  int tile_count;
  const TileCursor cursor = few_channels_tiles(plan, slice, &tile_count);

  if (tid < kLoaders) {
    share_registers<kProducers, kConsumers, false>();
    few_channels_load_tiles<ConvMath::kFp16x3, true, kProducers, true>(p, layout, smem, n, 0, cursor, tile_count);
  } else {
    share_registers<kProducers, kConsumers, true>();
    const int lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int warpgroup = __shfl_sync(0xffffffffu, tid / 128 - kProducers, 0);  // known to be the same in a warp
    const int warp = tid / 32 & 3;
    const int channels[2] = {warp * 16 + g, warp * 16 + g + 8};
    ChannelWeights weights;
    weights.load(p, weight_table, 0, 0, p.c_out, channels, t);

    wait_for_prerequisites();  // the table; everything else was there before them
    ChannelLse<kPositions> lse;
    float norm_scale[2];  // of the products
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse.scale[r] = lse.offset[r] = 0.f;
      lse.bias[r] = -INFINITY;
      if (channels[r] < p.c_out) {
        const float bias = p.bias ? static_cast<const float*>(p.bias)[channels[r]] : 0.f;
        const float4 norm = static_cast<const float4*>(p.norm_table)[n * p.c_out_total + channels[r]];
        const float scale = norm.y * norm.z;
        lse.scale[r] = scale * 2.f * lse.kLog2E;
        lse.offset[r] = fmaf(bias - norm.x, scale, norm.w) * 2.f * lse.kLog2E;
        lse.bias[r] = bias * lse.kLog2E + lse.kLog2E * 2.f / 3.f;
      }
      norm_scale[r] = lse.scale[r] * weights.unscaled[r];
    }
    lse.exchange = reinterpret_cast<float*>(smem + layout.scratch) + warpgroup * (2 * 4 * kPositions);
    lse.barrier = 3 + warpgroup;
    lse.warp = warp;
    lse.lane = lane;

    struct Strip {
      uint32_t address, offset;  // of its first position: in the halo, in chunks of 16 bytes; in the sample's result
      int width;                 // positions inside
      float unscaled;            // what undoes the scale of its input
    };
    int stage = 0, job = warpgroup, jobs;
    uint32_t parity = 0, tile = static_cast<uint32_t>(slice * plan.tiles_per_slice);
    const uint32_t halo_address = shared_address(halo) >> 4;
    const int stage_chunks = few_channels_stage_words(plan) / 4;
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
      jobs = ((min(plan.tile[0], room[0]) - 1) * plan.tile[1] + min(plan.tile[1], room[1])) * per_row;
    };
    enter_tile();
    int4 ahead = strip_table[min(job, plan.strips - 1)];  // of `job`, read a turn before it is needed
    // The next strip of this warpgroup; a stage is given back when its last strip was multiplied. False after the last.
    auto advance = [&](Strip& strip) {
      for (;;) {
        if (job >= jobs) {
          __syncwarp();
          if (lane == 0) barrier_arrive(empty + stage);
          if (--tile_count == 0) return false;
          if (++stage == plan.stages) stage = 0, parity ^= 1;
          ++tile;
          enter_tile();
          job = warpgroup;
          ahead = strip_table[min(job, plan.strips - 1)];
          barrier_wait(full + stage, parity);
          continue;
        }
        const int4 entry = ahead;
        job += kConsumers;
        ahead = strip_table[min(job, plan.strips - 1)];
        strip.width =
            (entry.z >> 16) < room[0] && (entry.z & 0xffff) < room[1] ? min(kPositions, room[2] - entry.w) : 0;
        if (strip.width <= 0) continue;
        strip.offset = tile_offset + entry.y;
        strip.address = __shfl_sync(0xffffffffu, halo_address + stage * stage_chunks + entry.x, 0);
        strip.unscaled = *reinterpret_cast<const float*>(smem + layout.barriers + kFewChannelsScales + stage);
        return true;
      }
    };
    // The small products come first. Most of the large ones have a sum of their own, since the tensor cores
    // truncate where they add to a sum.
    constexpr int kOwnSum = kSteps * 2 / 5;  // and steps from there on
    float acc[kPositions / 2];
    float other[kPositions / 2];
    auto multiply = [&](uint32_t address) {
      wgmma_fence();
      const uint32_t low = address + few_channels_planes(plan) * (plan.plane / 4);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        wgmma<kType, kPositions, 128>(acc, weights.low_words[i], address + plan.chunk_pairs[i], i > 0);
        wgmma<kType, kPositions, 128>(acc, weights.words[i], low + plan.chunk_pairs[i], true);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint32_t b = address + plan.chunk_pairs[i];
        if (i >= kOwnSum) {
          wgmma<kType, kPositions, 128>(other, weights.words[i], b, i > kOwnSum);
        } else {
          wgmma<kType, kPositions, 128>(acc, weights.words[i], b, true);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_use(acc);
      wgmma_use(other);
#pragma unroll
      for (int i = 0; i < kPositions / 2; ++i) acc[i] += other[i];
    };

    float* const y = static_cast<float*>(p.y) + n * p.y_stride_n;
    Strip strip{};
    barrier_wait(full, 0);
    while (advance(strip)) {
      multiply(strip.address);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse.scale[r] = norm_scale[r] * strip.unscaled;
        lse.weight[r] = weights.unscaled[r] * strip.unscaled * lse.kLog2E;
      }
      lse.finish(acc, y + strip.offset, strip.width);
    }
  }
#endif
}

}  // namespace kgopt
