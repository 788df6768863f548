// Weights of the kernels for few channels: their scales where they become fp16; with channels as rows, the left
// operand, in registers from start to end.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Weights as the right operand, in the blocks of wgmma.cuh: they stay in shared memory from start to end. Filters of
// some hundred values for each of 64 channels would take longer to fetch than to multiply with where a block has few
// tiles, so lanes go as the values lie in memory and not as K does, and each has several under way.
//
// Such an entry of a filter -> where it lies there (-1: padding) and, twice, its word in the weights of channel 0 and
// the first turn, odd where another channel shares that word.
template <ConvMath kMath, int kColumns, int kWindow>
__device__ __forceinline__ void few_channels_weight_table(const FewChannelsParams& p, int2* table, int thread,
                                                          int threads) {
  constexpr int kPerWord = ConvMathTraits<kMath>::kPerWord;
  const FewChannelsPlan& plan = p.plan;
  const int kernel_h = plan.kernel[1] / kWindow, taps = plan.kernel[0] * kernel_h * plan.kernel[2];
  const bool taps_first = p.w_stride_in >= p.w_stride_k[2];
  for (int i = thread; i < plan.k_steps * 8; i += threads) {
    int k = i, source = -1, is_pair = 0;
    if (i < plan.k_words) {
      const int word = taps_first ? i / taps : i % plan.words, tap = taps_first ? i % taps : i / plan.words;
      const int w = tap % plan.kernel[2], h = tap / plan.kernel[2] % kernel_h, d = tap / (plan.kernel[2] * kernel_h);
      k = plan.taps_fast ? word * taps + tap : tap * plan.words + word;
      source = static_cast<int>(word * kPerWord * p.w_stride_in + d * p.w_stride_k[0] + h * p.w_stride_k[1] +
                                w * p.w_stride_k[2]);
      is_pair = word * kPerWord + 1 < p.c_in;
    }
    const int at = (k / 8 * (kWindow * kColumns / 8) * 2 + k / 4 % 2) * 32 + k % 4;
    table[i] = make_int2(source, at * 2 + is_pair);
  }
}

// A warp takes four entries of eight channels at a time, whose words meet no bank twice but where the entries' own do.
template <ConvMath kMath, int kColumns, int kWindow>
__device__ __forceinline__ void few_channels_load_weights(const FewChannelsParams& p, const int2* table, int group,
                                                          int c_begin, int c_valid, uint32_t* weights, int thread,
                                                          int threads) {
  using Traits = ConvMathTraits<kMath>;
  constexpr int kPerWord = Traits::kPerWord;
  using Raw = std::conditional_t<kPerWord == 2, unsigned short, float>;
  constexpr int kOctets = kColumns / 8, kOnes = kWindow * kOctets;  // of channels, and their kernel rows
  constexpr int kFours = kOnes > 8 ? 1 : 2;                         // of entries at once
  const int lane = thread & 31, turn_words = p.plan.k_steps * 8 * kWindow * kColumns, fours = p.plan.k_steps * 2;
  const int own_octets = (c_valid - lane / 4 + 7) / 8;  // in which the lane's channel is one of the block's
  const int64_t octet_step = 8 * p.w_stride_out;
  const Raw* const filter = static_cast<const Raw*>(p.weight) + group * p.w_stride_group +
                            (c_begin + min(lane / 4, c_valid - 1)) * p.w_stride_out;
#pragma unroll 1
  for (int four = thread / 32 * kFours; four < fours; four += threads / 32 * kFours) {
    Raw raw[kFours][kOnes][kPerWord];
    uint32_t* to[kFours];
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      const int2 entry = table[min(four + f, fours - 1) * 4 + lane % 4];
      to[f] = weights + (entry.y >> 1) + lane / 4 * 4;
      const int octets = entry.x < 0 ? 0 : own_octets, pairs = entry.y & 1 ? octets : 0;
      const Raw* row = filter + max(entry.x, 0);
#pragma unroll
      for (int r = 0; r < kWindow; ++r, row += p.w_stride_k[1]) {
        const Raw* from = row;
#pragma unroll
        for (int j = 0; j < kOctets; ++j, from += octet_step) {
          Raw(&v)[kPerWord] = raw[f][r * kOctets + j];
          v[0] = Raw();
          if (j < octets) v[0] = *from;
          if constexpr (kPerWord == 2) {
            v[1] = Raw();
            if (j < pairs) v[1] = from[p.w_stride_in];
          }
        }
      }
    }
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      if (four + f >= fours) continue;
#pragma unroll
      for (int i = 0; i < kOnes; ++i) {
        const Raw(&v)[kPerWord] = raw[f][i];
        uint32_t word, low = 0;
        if constexpr (kPerWord == 2) {
          word = v[0] | uint32_t(v[1]) << 16;
        } else if constexpr (Traits::kSplit == 2) {
          split_tf32_for_stats(v[0], &word, &low);
        } else {
          word = to_tf32(v[0]);
        }
        // In turn t of the window, kernel row r belongs to the accumulators (t - r) mod kWindow.
#pragma unroll
        for (int turn = 0; turn < kWindow; ++turn) {
          const int block = (turn - i / kOctets + kWindow) % kWindow * kOctets + i % kOctets;
          uint32_t* const at = to[f] + turn * turn_words + block * 64;
          *at = word;
          if constexpr (Traits::kSplit == 2) at[turn_words * kWindow] = low;
        }
      }
    }
  }
}

// A power of two for the values of a warp, of which each thread has kCount, and what undoes it: the largest finite one
// comes below 2^5.
struct WarpScale {
  static constexpr float kUndoesZeros = 0x1p-116f;  // where all values are tiny

  float scale = 1.f, undo = 1.f;

  template <int kCount>
  __device__ __forceinline__ void fit(const float* v) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float size = fabsf(v[i]);
      most = size < INFINITY ? fmaxf(most, size) : most;
    }
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    const uint32_t exponent = min(max(bits >> 23, 15u), 254u);
    scale = __uint_as_float((258 - exponent) << 23);
    undo = __uint_as_float((exponent - 4) << 23);
  }
};

// K entry -> where its weight lies in a filter, and the one of the channel that shares its word; -1: padding.
__device__ __forceinline__ void fill_weight_table(const FewChannelsParams& p, int2* table, int thread, int threads) {
  const FewChannelsPlan& plan = p.plan;
  const int taps = plan.kernel[0] * plan.kernel[1] * plan.kernel[2];
  for (int k = thread; k < kChannelsSteps * 8; k += threads) {
    const int chunk = k / 4, tap = chunk % taps, channel = (chunk / taps * 4 + k % 4) * 2;
    int2 v = make_int2(-1, -1);
    if (chunk < plan.words / 4 * taps && channel < p.c_in) {
      const int w = tap % plan.kernel[2], h = tap / plan.kernel[2] % plan.kernel[1],
                d = tap / (plan.kernel[2] * plan.kernel[1]);
      v.x = static_cast<int>(channel * p.w_stride_in + d * p.w_stride_k[0] + h * p.w_stride_k[1] + w * p.w_stride_k[2]);
      if (channel + 1 < p.c_in) v.y = v.x + static_cast<int>(p.w_stride_in);
    }
    table[k] = v;
  }
}

// A thread's fragments: of channels g and g + 8 of its warp's 16.
struct ChannelWeights {
  static constexpr int kSteps = kChannelsSteps;

  uint32_t words[kSteps][4], low_words[kSteps][4];
  float unscaled[2];  // what undoes the scale of each channel

  // channels: within the block's c_valid, which begin at c_begin of the conv group.
  __device__ __forceinline__ void load(const FewChannelsParams& p, const int2* table, int group, int c_begin,
                                       int c_valid, const int (&channels)[2], int t) {
    // No branches and little arithmetic: all loads are under way before the first is used.
    const bool is_channel[2] = {channels[0] < c_valid, channels[1] < c_valid};
    const float* filter[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      filter[r] = static_cast<const float*>(p.weight) + group * p.w_stride_group +
                  (c_begin + min(channels[r], c_valid - 1)) * p.w_stride_out;
    }
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      const int2 at = table[i / 4 * 8 + (i >> 1 & 1) * 4 + t];
      const float* const w = filter[i & 1];
      const float first = w[max(at.x, 0)], second = w[max(at.y, 0)];
      words[i / 4][i & 3] = at.x < 0 || !is_channel[i & 1] ? 0 : __float_as_uint(first);  // the values for now
      low_words[i / 4][i & 3] = at.y < 0 || !is_channel[i & 1] ? 0 : __float_as_uint(second);
    }
    split();
  }

 private:
  // Two terms of each, scaled such that a channel's largest comes below 2^11.
  __device__ __forceinline__ void split() {
    auto larger = [](float m, uint32_t word) {
      const float v = fabsf(__uint_as_float(word));
      return v < INFINITY ? fmaxf(m, v) : m;
    };
    float most[2] = {0.f, 0.f}, scale[2];
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      most[i & 1] = larger(larger(most[i & 1], words[i / 4][i & 3]), low_words[i / 4][i & 3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The lanes of a channel are four neighbours.
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
      const uint32_t exponent = min(max(__float_as_uint(most[r]) >> 23, 11u), 254u);
      scale[r] = __uint_as_float((264 - exponent) << 23);
      unscaled[r] = __uint_as_float((exponent - 10) << 23);
    }
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      uint32_t& high = words[i / 4][i & 3];
      uint32_t& low = low_words[i / 4][i & 3];
      split_half(__uint_as_float(high) * scale[i & 1], __uint_as_float(low) * scale[i & 1], &high, &low);
    }
  }
};

#endif

}  // namespace kgopt
