// Statistics of convolutions with few input and more than 32 output channels by implicit GEMM on wgmma, sm_90a.
// conv3d/few_channels/channels/lse_kernel.cuh multiplies in the same way.
//
// Rows of the GEMM are 64 output channels, columns 32 or 64 neighbouring positions of an output row, K the input
// channels and taps. The halo lies in shared memory in chunks of 16 bytes of channels a position, which is how wgmma
// wants its right operand: a tap is an address, and nothing is loaded to registers or unfolded. The weights stay in
// registers from start to end. A thread holds two channels, so that what belongs to a channel takes a few registers,
// where positions as rows (conv3d/few_channels/gather/kernel.cuh) take a shared memory load each.
//
// Each warpgroup starts the products of its next row before the epilogue of the one that is done.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/reduce.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/finish.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/few_channels/weights.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Statistics of a thread's two channels.
struct ChannelSums {
  ShiftedSums<float> sums[2];
  float count = 0.f;

  // A row's products: acc[4 j + 2 r + e] is channel r at position 8 j + 2 t + e, of which `width` are inside.
  // factor: of each channel.
  template <int kAcc>
  __device__ __forceinline__ void add(const float (&acc)[kAcc], int t, int width, const float (&factor)[2]) {
    const int left = width - 2 * t;  // from this thread's first position
    if (count == 0.f && left > 0) {
      sums[0].shift = acc[0] * factor[0], sums[1].shift = acc[2] * factor[1];
    }
    float sum[2][2] = {}, sum_sq[2][2] = {};  // two chains of each hide the latency of an addition
    auto add_value = [&](int i) {
      const int r = i / 2 % 2, chain = i / 4 % 2;
      const float v = fmaf(acc[i], factor[r], -sums[r].shift);
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

#endif

template <int kPositions>
__global__ void __launch_bounds__(128 * (1 + kChannelsConsumers), 1)
    conv_channels_kernel(const __grid_constant__ FewChannelsParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr WgmmaType kType = WgmmaType::kFp16;
  constexpr int kSteps = kChannelsSteps;
  constexpr int kChannels = 64;
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
  int2* const job_table = reinterpret_cast<int2*>(smem + layout.strips);
  float* const scratch = reinterpret_cast<float*>(smem + layout.scratch);
  uint32_t* const halo = smem + layout.halo;
  const int stage_words = few_channels_stage_words(plan);

  const int tid = threadIdx.x;
  const int64_t n = blockIdx.x / plan.slices;
  const int64_t slice = blockIdx.x % plan.slices;
  const int c_begin = blockIdx.y * kChannels;  // first output channel of this block, within the conv group
  const int group = blockIdx.z;
  const int c_valid = min(kChannels, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels

  fill_weight_table(p, weight_table, tid, kThreads);
  for (int i = tid; i < plan.strips; i += kThreads) {
    const int per_row = plan.tile[2] / kPositions;
    const int w = i % per_row * kPositions, h = i / per_row % plan.tile[1], d = i / (per_row * plan.tile[1]);
    const int base = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead + w;
    job_table[i] = make_int2(base, d << 24 | h << 14 | w);
  }
  few_channels_prepare_stages(plan, layout, smem, kThreads, kLoaders, kConsumers * 4);
  wgmma_fence_shared();  // the zeros
  __syncthreads();

  int tile_count;
  TileCursor cursor = few_channels_tiles(plan, slice, &tile_count);
  const int tiles_w = static_cast<int>(plan.tiles[2]), tiles_h = static_cast<int>(plan.tiles[1]);

  if (tid < kLoaders) {
    share_registers<kProducers, kConsumers, false>();
    few_channels_load_tiles<ConvMath::kFp16x3, true, kProducers, true>(p, layout, smem, n, group, cursor, tile_count);
  } else {
    share_registers<kProducers, kConsumers, true>();
    const int lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int warpgroup = __shfl_sync(0xffffffffu, tid / 128 - kProducers, 0);  // known to be the same in a warp
    const int warp = tid / 32 & 3;
    const int channels[2] = {warp * 16 + g, warp * 16 + g + 8};  // of the block's

    ChannelWeights weights;
    weights.load(p, weight_table, group, c_begin, c_valid, channels, t);
    ChannelSums stats;

    struct Row {
      int d, h, w;
      float unscaled;  // what undoes the scale of its input
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
        row.unscaled = *reinterpret_cast<const float*>(smem + layout.barriers + kFewChannelsScales + stage);
        address = __shfl_sync(0xffffffffu, halo_address + stage * (stage_words / 4) + entry.x, 0);
        if (row.d < p.out[0] && row.h < p.out[1] && row.w < p.out[2]) return true;
      }
    };
    auto multiply = [&](float (&acc)[kPositions / 2]) {
      wgmma_fence();
      // The small products come first.
      const uint32_t low = address + few_channels_planes(plan) * (plan.plane / 4);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        wgmma<kType, kPositions, 128>(acc, weights.low_words[i], address + plan.chunk_pairs[i], i > 0);
        wgmma<kType, kPositions, 128>(acc, weights.words[i], low + plan.chunk_pairs[i], true);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        wgmma<kType, kPositions, 128>(acc, weights.words[i], address + plan.chunk_pairs[i], true);
      }
      wgmma_commit();
    };
    auto wait = [&](float (&acc)[kPositions / 2]) {
      wgmma_wait<0>();
      wgmma_use(acc);
    };
    auto epilogue = [&](float (&acc)[kPositions / 2], const Row& row) {
      const int width = min(kPositions, p.out[2] - row.w);
      if (width <= 0) return;  // never; without this branch the compiler puts the epilogue before the products
      const float factor[2] = {weights.unscaled[0] * row.unscaled, weights.unscaled[1] * row.unscaled};
      stats.add(acc, t, width, factor);
    };

    barrier_wait(full, 0);
    float first[kPositions / 2];
    Row row{}, next{};
    bool more = advance(next);
    if (more) {
      multiply(first);
      wait(first);
    }
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
        [&](int c) { return p.bias ? static_cast<const float*>(p.bias)[c_first + c] : 0.f; });
  }
#endif
}

}  // namespace kgopt
