// Implicit GEMM on wgmma for convolutions with few input channels, sm_90a.
//
// Rows of the GEMM are output positions, 16 neighbours along the width ("strip") to a warp, columns output channels, K
// the input channels and taps. One or two warpgroups load: the halo of the next tiles comes into shared memory as one
// plane per channel word, exactly as the input lies, or as chunks of four words a position, rounded to TF32 there, once
// for all taps that will read it. Two or three warpgroups compute: element A[m][k] is halo[row_base(m) + offset(k)], so
// every tap, stride and dilation is only another entry of an offset table and nothing is ever unfolded; A goes from the
// halo to registers and from there into wgmma, B (all weights) lies in shared memory from start to end. Epilogues see
// the fp32 accumulators in registers and reduce them to statistics, carry them to logsumexp or store them; they overlap
// the products of the next row, or those of the other warpgroups.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>
#include <utility>

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/reduce.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/finish.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/few_channels/params.h"
#include "conv3d/few_channels/plan.h"
#include "conv3d/few_channels/weights.cuh"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

// f(0) ... f(kCount - 1), each a compile-time constant.
template <typename F, int... kIndex>
__device__ __forceinline__ void call_each(F&& f, std::integer_sequence<int, kIndex...>) {
  (f(std::integral_constant<int, kIndex>()), ...);
}
template <int kCount, typename F>
__device__ __forceinline__ void unroll(F&& f) {
  call_each(f, std::make_integer_sequence<int, kCount>());
}

KGOPT_HD constexpr int few_channels_threads(ConvMath math, int columns, int window, bool lse) {
  return 128 * (few_channels_producers(math, lse) + few_channels_consumers(math, columns, window, lse));
}

// kWindow kernel rows share each fragment of A: input row r adds to output rows r, r - 1, ... r - kWindow + 1, whose
// accumulators take turns. Loads of A then cost a third, at the price of as many sets of accumulators.
template <ConvMath kMath, int kColumns, int kWindow, bool kChunked, bool kLargeBatch, ConvEpilogue kEpilogue>
__global__ void __launch_bounds__(few_channels_threads(kMath, kColumns, kWindow,
                                                       kEpilogue == ConvEpilogue::kResidualLse),
                                  1) conv_gather_kernel(const __grid_constant__ FewChannelsParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Traits = ConvMathTraits<kMath>;
  using Element = typename Traits::Element;
  constexpr int kSplit = Traits::kSplit;
  constexpr int kPerWord = Traits::kPerWord;
  constexpr bool kStats = kEpilogue == ConvEpilogue::kStats;
  constexpr bool kLse = kEpilogue == ConvEpilogue::kResidualLse;
  constexpr bool kStore = kEpilogue == ConvEpilogue::kStore;
  constexpr int kAcc = kColumns / 2;
  constexpr float kLog2E = 1.44269504088896340736f;
  static_assert(!(kLse && kSplit == 2), "the plan refuses it");
  constexpr WgmmaType kType = kMath == ConvMath::kBf16   ? WgmmaType::kBf16
                              : kMath == ConvMath::kFp16 ? WgmmaType::kFp16
                                                         : WgmmaType::kTf32;
  constexpr int kConsumers = few_channels_consumers(kMath, kColumns, kWindow, kLse);
  constexpr int kBatch = few_channels_batch(kMath, kWindow, kLargeBatch);
  constexpr int kProducers = few_channels_producers(kMath, kLse);
  constexpr int kLoaders = 128 * kProducers;  // threads
  constexpr int kGatherThreads = kLoaders + 128 * kConsumers;
  constexpr int kWarps = kConsumers * 4;

  extern __shared__ __align__(128) uint32_t smem[];
  const FewChannelsPlan& plan = p.plan;
  const FewChannelsSmemLayout layout = few_channels_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const empty = full + 4;
  uint32_t* const weights = smem + layout.weights;
  int2* const offsets = reinterpret_cast<int2*>(smem + layout.offsets);
  int2* const strip_table = reinterpret_cast<int2*>(smem + layout.strips);
  float4* const column_table = reinterpret_cast<float4*>(smem + layout.columns);
  float* const scratch = reinterpret_cast<float*>(smem + layout.scratch);
  uint32_t* const halo = smem + layout.halo;
  const int stage_words = few_channels_stage_words(plan);
  constexpr int kPositionWords = kChunked ? 4 : 1;
  auto word_offset = [&](int word) { return kChunked ? (word >> 2) * plan.plane + (word & 3) : word * plan.plane; };

  const int tid = threadIdx.x;
  const int64_t n = blockIdx.x / plan.slices;
  const int64_t slice = blockIdx.x % plan.slices;
  if (kEpilogue == ConvEpilogue::kStats && skips_sample(p.stats, n)) return;
  const int c_begin = blockIdx.y * kColumns;  // first output channel of this block, within the conv group
  const int group = blockIdx.z;
  const int c_valid = min(kColumns, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels
  const int kernel_h = plan.kernel[1] / kWindow;  // kernel rows within K
  const int taps = plan.kernel[0] * kernel_h * plan.kernel[2];

  // K entry -> byte offset in the halo. Padded entries point at the plane of zeros: a zero weight alone would turn an
  // infinite input into a NaN.
  const int k_padded = plan.k_steps * 8;
  for (int i = tid; i < k_padded; i += kGatherThreads) {
    int offset = few_channels_planes(plan) * plan.plane;
    if (i < plan.k_words) {
      const int word = plan.taps_fast ? i / taps : i % plan.words;
      const int tap = plan.taps_fast ? i % taps : i / plan.words;
      const int w = tap % plan.kernel[2];
      const int h = tap / plan.kernel[2] % kernel_h;
      const int d = tap / (plan.kernel[2] * kernel_h);
      const int position =
          (d * plan.dilation[0] * plan.halo[1] + h * plan.dilation[1]) * plan.pitch + w * plan.dilation[2];
      offset = word_offset(word) + position * kPositionWords;
    }
    if constexpr (kChunked) {
      if (i % 4 == 0) reinterpret_cast<int*>(offsets)[(i >> 2 & 1) * plan.k_steps + i / 8] = offset * 4;
    } else {
      int* const pair = reinterpret_cast<int*>(offsets + (i / 8) * 4 + (i & 3));
      pair[(i >> 2) & 1] = offset * 4;
    }
  }
  few_channels_weight_table<kMath, kColumns, kWindow>(p, reinterpret_cast<int2*>(halo), tid, kGatherThreads);
  __syncthreads();
  few_channels_load_weights<kMath, kColumns, kWindow>(p, reinterpret_cast<const int2*>(halo), group, c_begin, c_valid,
                                                      weights, tid, kGatherThreads);
  __syncthreads();  // the halo's space is free again
  for (int i = tid; i < plan.strips; i += kGatherThreads) {
    const int per_row = plan.tile[2] / kFewChannelsStrip;
    const int w = i % per_row * kFewChannelsStrip;
    const int h = i / per_row % plan.segments * plan.rows;
    const int d = i / (per_row * plan.segments);
    const int base = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead + w * plan.step[2];
    strip_table[i] = make_int2(base * kPositionWords * 4, d << 24 | h << 14 | w);
  }
  for (int c = tid; c < kColumns; c += kGatherThreads) {
    float bias = 0.f;
    if (p.bias && c < c_valid) bias = to_acc(static_cast<const Element*>(p.bias)[c_first + c]);
    column_table[c] = make_float4(bias, 0.f, 0.f, 0.f);
  }
  few_channels_prepare_stages(plan, layout, smem, kGatherThreads, kLoaders, kWarps);
  wgmma_fence_shared();  // the weights
  __syncthreads();

  int tile_count;
  TileCursor cursor = few_channels_tiles(plan, slice, &tile_count);
  const int tiles_w = static_cast<int>(plan.tiles[2]), tiles_h = static_cast<int>(plan.tiles[1]);

  if (tid < kLoaders) {
    share_registers<kProducers, kConsumers, false>();
    few_channels_load_tiles<kMath, kChunked, kProducers>(p, layout, smem, n, group, cursor, tile_count);
  } else {
    share_registers<kProducers, kConsumers, true>();
    if constexpr (kLse) {
      // Scale and offset that make z of a convolution without its bias, and what is added to make the residual. A
      // padded column gets -inf there and drops out of the sum.
      wait_for_prerequisites();  // the table; all else was there before them
      for (int c = tid - kLoaders; c < kColumns; c += kWarps * 32) {
        const float bias = column_table[c].x;
        float4 v = make_float4(bias, 0.f, -INFINITY, 0.f);
        if (c < c_valid) {
          const float4 norm = static_cast<const float4*>(p.norm_table)[n * p.c_out_total + c];
          v.x = norm.y * norm.z;
          v.y = fmaf(bias - norm.x, v.x, norm.w);
          v.z = bias;
        }
        column_table[c] = v;
      }
      named_barrier(1, kWarps * 32);
    }
    const int lane = tid & 31;
    const int warp = tid / 32 - kLoaders / 32;  // among the consumers
    const int g = lane >> 2;
    const int t = lane & 3;
    const int jobs = (plan.strips + 3) / 4;
    uint32_t b_first = wgmma_b_descriptor(shared_address(weights));
    asm volatile("" : "+r"(b_first));  // else it would be computed again for each product
    constexpr int kBStep = kWindow * kColumns * 8 * 4 / 16;
    const int b_turn = plan.k_steps * kBStep;
    const int b_low = b_turn * kWindow;
    // Bytes from a row of A to the next, and to the row eight further (a constant where only stride 1 comes).
    const int row_bytes = plan.step[2] * kPositionWords * 4;
    const int row8_bytes = kWindow > 1 ? 32 : 8 * row_bytes;
    // Planes: every lane reads its own words. Chunks: ldmatrix takes the address of row `lane` % 16 of the first four
    // words (lanes below 16) and the last four.
    const int lane_row = kChunked ? lane & 15 : g;

    using Offset = std::conditional_t<kChunked, int, int2>;
    Offset offset[kBatch];  // of the fragments that are loaded next
    auto load_offsets = [&](int first) {
      if constexpr (kChunked) {
        const int* const from = reinterpret_cast<const int*>(offsets) + (lane >> 4) * plan.k_steps + first;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) offset[i] = from[i];
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) offset[i] = offsets[(first + i) * 4 + t];
      }
    };
    load_offsets(0);

    [[maybe_unused]] float lse_shift[2] = {0.f, 0.f};
    ShiftedSums<float> sums[kStats ? kColumns / 4 : 1];
    float count = 0.f;

    int stage = 0;
    uint32_t parity = 0;
    int job = warp / 4;
    for (int tile = 0; tile < tile_count; ++tile, cursor.advance(tiles_h, tiles_w)) {
      barrier_wait(full + stage, parity);
      for (; job < jobs; job += kConsumers) {
        const int s = job * 4 + (warp & 3);
        const int2 strip = strip_table[min(s, plan.strips - 1)];
        const int d = cursor.d * plan.tile[0] + (strip.y >> 24);
        const int h0 = cursor.h * plan.tile[1] + ((strip.y >> 14) & 1023);
        const int w = cursor.w * plan.tile[2] + (strip.y & 16383) + g;
        const bool inside = s < plan.strips && d < p.out[0];
        const bool valid[2] = {inside && w < p.out[2], inside && w + 8 < p.out[2]};
        const int rows = min(plan.rows, p.out[1] - h0);
        // The four warps of a warpgroup go together, wherever their strips end.
        const int out_rows = plan.segments == 1 ? rows : plan.rows;
        const int steps = out_rows + kWindow - 1;
        uint32_t base = shared_address(halo + stage * stage_words) + strip.x + lane_row * row_bytes;
        const int base_step = plan.step[1] * plan.pitch * kPositionWords * 4;

        float acc[kWindow * kAcc];
        // wgmma truncates where it adds to its accumulator, which makes all sums smaller: without TF32, with three
        // times as many products, each batch of K steps has a sum of its own, and these are added here.
        constexpr bool kPromotes = kSplit == 2 && kWindow == 1;
        [[maybe_unused]] float total[kPromotes ? kAcc : 1];
        // With a window the products are summed onto minus the shift of the statistics, which saves subtracting it.
        auto start = [&](auto slot) {
#pragma unroll
          for (int j = 0; j < kAcc; ++j)
            acc[decltype(slot)::value * kAcc + j] = -sums[kStats ? j / 4 * 2 + (j & 1) : 0].shift;
        };
        if constexpr (kWindow > 1) unroll<kWindow>(start);
        // Fragments of kBatch K steps are loaded together and multiplied together.
        using Fragments = uint32_t[kBatch][4];
        auto load_fragments = [&](Fragments& a, int first) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if constexpr (kChunked) {
              load_matrices(a[i], base + offset[i]);
            } else {
              const uint32_t near = base + offset[i].x, far = base + offset[i].y;
              a[i][0] = load_shared(near);
              a[i][1] = load_shared(near + row8_bytes);
              a[i][2] = load_shared(far);
              a[i][3] = load_shared(far + row8_bytes);
            }
          }
          if (plan.k_steps > kBatch) load_offsets(first + kBatch < plan.k_steps ? first + kBatch : 0);
        };
        // No product may be under way: what it reads is written here.
        auto multiply = [&](auto turn, Fragments& a, int first) {
          [[maybe_unused]] uint32_t low[kSplit == 2 ? kBatch : 1][4];
          if constexpr (kSplit == 2) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
#pragma unroll
              for (int j = 0; j < 4; ++j) split_tf32_for_stats(__uint_as_float(a[i][j]), &a[i][j], &low[i][j]);
            }
          }
          wgmma_fence();
          const uint32_t b_batch = b_first + decltype(turn)::value * b_turn + first * kBStep;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const uint32_t b = b_batch + i * kBStep;
            const bool add = kWindow > 1 || i > 0 || (first > 0 && !kPromotes);
            if constexpr (kSplit == 2) {
              wgmma<kType, kWindow * kColumns>(acc, low[i], b, add);
              wgmma<kType, kWindow * kColumns>(acc, a[i], b + b_low, true);
              wgmma<kType, kWindow * kColumns>(acc, a[i], b, true);
            } else {
              wgmma<kType, kWindow * kColumns>(acc, a[i], b, add);
            }
          }
          wgmma_commit();
        };

        // A finished output row, in registers.
        auto epilogue = [&](float* done, int out_row) {
          if (out_row < 0 || out_row >= rows) return;
          if constexpr (kStats) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (!valid[half]) continue;
              count += 1.f;
#pragma unroll
              for (int j = 0; j < kColumns / 4; ++j) {
                const float v = done[j / 2 * 4 + half * 2 + (j & 1)];
                sums[j].sum += v;
                sums[j].sum_sq = fmaf(v, v, sums[j].sum_sq);
              }
            }
          }
          if constexpr (kStore) {
            // With pairs, neighbouring positions trade channels, so that each stores two positions of one.
            const bool pairs = kPerWord == 2 && p.stored_pairs;
            const int odd = pairs ? g & 1 : 0;
            const int64_t block_step = 8 * p.stored_stride_c;
            const int half_step = static_cast<int>(8 * p.y_stride[2]);
            Element* y = static_cast<Element*>(p.stored) + n * p.y_stride_n +
                         (c_first + t * 2 + odd) * p.stored_stride_c + d * p.y_stride[0] +
                         (h0 + out_row) * p.y_stride[1] + (w - odd) * p.y_stride[2];
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j, y += block_step) {
              asm("" : "+l"(y));  // else all addresses are kept in registers that the products need
              const int c = j * 8 + t * 2;
              const float bias[2] = {column_table[c].x, column_table[c + 1].x};
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const float v[2] = {done[j * 4 + half * 2] + bias[0], done[j * 4 + half * 2 + 1] + bias[1]};
                if (p.stored_channel_pairs) {
                  if (valid[half] && c < c_valid) store_vec(y + half * half_step, pack<Element>(v));
                } else if (pairs) {
                  const float got = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 4);
                  const float pair[2] = {odd ? got : v[0], odd ? v[1] : got};
                  if constexpr (kPerWord == 2) {
                    if (valid[half] && c + odd < c_valid) store_vec(y + half * 8, pack<Element>(pair));
                  }
                } else if (valid[half]) {
                  if (c < c_valid) y[half * half_step] = from_acc<Element>(v[0]);
                  if (c + 1 < c_valid) y[half * half_step + p.stored_stride_c] = from_acc<Element>(v[1]);
                }
              }
            }
          }
          if constexpr (kLse) {
            // u = conv, z = (u + bias - mean) * rstd * gamma + beta, t = tanh(z). Since |t| <= 1, hardswish needs no
            // clamp: r = u + bias + t (t + 3) / 6.
            auto residual = [](float u, float4 column) {
              const float th = tanh_approx(fmaf(u, column.x, column.y));
              return fmaf(th, fmaf(th, 1.f / 6.f, 0.5f), u + column.z);
            };
            auto quad_sum = [](float v) {
              v += __shfl_xor_sync(0xffffffffu, v, 1);
              return v + __shfl_xor_sync(0xffffffffu, v, 2);
            };
            // Any shift near the maximum keeps the exponentials in range: that of the row before spares finding this
            // row's first.
            float part[2][2] = {};
#pragma unroll
            for (int j = 0; j < kColumns / 4; ++j) {
              const float4 column = column_table[j / 2 * 8 + t * 2 + (j & 1)];
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const float r = residual(done[j / 2 * 4 + half * 2 + (j & 1)], column);
                part[half][j & 1] += exp2_approx(fmaf(r, kLog2E, -lse_shift[half] * kLog2E));
              }
            }
            float result[2];
            bool in_range = true;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float sum = quad_sum(part[half][0] + part[half][1]);
              in_range = in_range && (!valid[half] || (sum > 1e-30f && sum < 1e30f));
              result[half] = lse_shift[half] + __logf(sum);
            }
            if (!__all_sync(0xffffffffu, in_range)) {
              // The first row, values that leap, infinities and NaNs.
#pragma unroll 1
              for (int half = 0; half < 2; ++half) {
                float m = -INFINITY, sum = 0.f;
#pragma unroll 1
                for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
                  for (int j = 0; j < kColumns / 4; ++j) {
                    const float u = half == 0 ? done[j / 2 * 4 + (j & 1)] : done[j / 2 * 4 + 2 + (j & 1)];
                    const float r = residual(u, column_table[j / 2 * 8 + t * 2 + (j & 1)]);
                    if (pass == 0) {
                      m = fmaxf(m, r);
                    } else {
                      sum += exp2_approx(fmaf(r, kLog2E, -m * kLog2E));
                    }
                  }
                  if (pass == 0) {
                    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                    if (fabsf(m) == INFINITY) m = 0.f;  // as torch.logsumexp: an infinite maximum comes out as it is
                  }
                }
                const float value = m + logf(quad_sum(sum));
                result[0] = half == 0 ? value : result[0];
                result[1] = half == 1 ? value : result[1];
              }
            }
            const int64_t at =
                n * p.y_stride_n + d * p.y_stride[0] + (h0 + out_row) * p.y_stride[1] + w * p.y_stride[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (t == 0 && valid[half]) {
                const int64_t to = at + half * 8 * p.y_stride[2];
                if (kPerWord == 2 && p.y_rounded) {
                  static_cast<Element*>(p.y)[to] = from_acc<Element>(result[half]);
                } else {
                  static_cast<float*>(p.y)[to] = result[half];
                }
              }
              lse_shift[half] = fabsf(result[half]) < 1e30f ? result[half] : 0.f;
            }
          }
        };
        // The first value that a thread sees becomes its shift.
        auto choose_shift = [&](const float* row) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (valid[half]) {
#pragma unroll
              for (int j = 0; j < kColumns / 4; ++j) sums[j].shift = row[j / 2 * 4 + half * 2 + (j & 1)];
            }
          }
        };

        Fragments a;
        load_fragments(a, 0);
        if constexpr (kWindow > 1) {
          auto step = [&](auto turn, int row) {
            for (int first = 0;;) {
              multiply(turn, a, first);
              wgmma_wait<0>();
              first += kBatch;
              if (first >= plan.k_steps) break;
              load_fragments(a, first);
            }
            wgmma_use(acc);
            // The next row's fragments come while this thread is in its epilogue; after the last row nobody uses them.
            base += base_step;
            if (row + 1 < steps) load_fragments(a, 0);

            constexpr int kSlot = (decltype(turn)::value + 1) % kWindow;
            const int out_row = row - (kWindow - 1);
            float* const done = acc + kSlot * kAcc;
            if constexpr (kStats) {
              if (count == 0.f && out_row >= 0 && out_row < rows) {
                choose_shift(done);
#pragma unroll
                for (int j = 0; j < kWindow * kAcc; ++j) acc[j] -= sums[j % kAcc / 4 * 2 + (j & 1)].shift;
              }
            }
            epilogue(done, out_row);
            start(std::integral_constant<int, kSlot>());
          };
#pragma unroll 1
          for (int row = 0; row < steps; row += kWindow) {
            unroll<kWindow>([&](auto turn) {
              if (row + decltype(turn)::value < steps) step(turn, row + decltype(turn)::value);
            });
          }
        } else {
          // While the tensor cores work on a row, this thread is in the epilogue of the row before; 3xTF32 lacks the
          // registers, and multiplies so long that the other warpgroups' epilogues suffice.
          constexpr bool kOverlap = kSplit == 1;
          float done[kOverlap ? kAcc : 1];
#pragma unroll 1
          for (int row = 0; row < steps; ++row) {
            if constexpr (kPromotes) {
#pragma unroll
              for (int j = 0; j < kAcc; ++j) total[j] = 0.f;
            }
            for (int first = 0;;) {
              multiply(std::integral_constant<int, 0>(), a, first);
              first += kBatch;
              if (first >= plan.k_steps) break;
              wgmma_wait<0>();
              if constexpr (kPromotes) {
                wgmma_use(acc);
#pragma unroll
                for (int j = 0; j < kAcc; ++j) total[j] += acc[j];
              }
              load_fragments(a, first);
            }
            if constexpr (kOverlap) {
              if (row > 0) epilogue(done, row - 1);
            }
            wgmma_wait<0>();
            wgmma_use(acc);
            if constexpr (kPromotes) {
#pragma unroll
              for (int j = 0; j < kAcc; ++j) acc[j] += total[j];
            }
            base += base_step;
            if (row + 1 < steps) load_fragments(a, 0);
            if constexpr (kStats) {
              if (count == 0.f && row < rows) choose_shift(acc);
            }
            float* const to = kOverlap ? done : acc;
#pragma unroll
            for (int j = 0; j < kAcc; ++j) to[j] = kStats ? acc[j] - sums[j / 4 * 2 + (j & 1)].shift : acc[j];
            if constexpr (!kOverlap) epilogue(acc, row);
          }
          if constexpr (kOverlap) epilogue(done, steps - 1);
        }
      }
      job -= jobs;
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage);
      if (++stage == plan.stages) {
        stage = 0;
        parity ^= 1;
      }
    }

    if constexpr (kStats) {
      // Thread -> warp (rows of one channel lie in the lanes of equal t) -> block.
      Moments<float>* const shared = reinterpret_cast<Moments<float>*>(scratch);
#pragma unroll
      for (int j = 0; j < kColumns / 4; ++j) {
        const Moments<float> m = warp_merge(sums[j].moments(count), 4);
        if (g == 0) shared[warp * kColumns + (j / 2) * 8 + t * 2 + (j & 1)] = m;
      }
      finish_stats<kColumns, kWarps, kWarps * 32>(p.stats, n, slice, c_first, c_valid, shared, tid - kLoaders,
                                                  [&](int c) { return column_table[c].x; });
    }
  }
#endif
}

}  // namespace kgopt
