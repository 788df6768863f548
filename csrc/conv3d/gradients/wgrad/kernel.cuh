// Gradient of a convolution's weight for channels-innermost tensors, sm_90: the tensor copies, and products of a warp.
//
// A block holds all taps of 32 x 32 channels in registers and marches along the depth of a tile of positions: a plane
// of `moved` meets the planes of `still` that its taps along the depth reach, which stay in shared memory until then.
// Group g of four warps has tap g of the depth, warp j of it channels 8 j ... 8 j + 7 of `moved`, or every second or
// fourth plane of 16 or 8 channels. Within a plane a warp goes down the rows and keeps the fragments of the last rows
// of `still` in registers, so that a row of either tensor is read from shared memory once for all taps of height and
// width. With one tap along the depth, the groups take every third plane each. Blocks leave partial sums, which a
// second kernel adds in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/async.cuh"
#include "common/device/mma.cuh"
#include "conv3d/gradients/wgrad/params.h"
#include "conv3d/gradients/wgrad/plan.h"

namespace kgopt {

inline constexpr int kWgradThreads = (kWgradGroups * kWgradWarps + 1) * 32;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void load_shared(uint32_t& v0, uint32_t& v1, uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v0), "=r"(v1) : "r"(address));
}
__device__ __forceinline__ uint32_t load_shared_half(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void load_transposed_4(uint32_t& v0, uint32_t& v1, uint32_t& v2, uint32_t& v3,
                                                  uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v0), "=r"(v1), "=r"(v2), "=r"(v3)
               : "r"(address));
}
__device__ __forceinline__ void load_transposed_2(uint32_t& v0, uint32_t& v1, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(v0), "=r"(v1) : "r"(address));
}
#endif

// Fragments from rows of 32 channels under the swizzle of a row's width. One step of K is 8 positions in TF32, where
// K index t is position 2 t and t + 4 is 2 t + 1, which keeps the loads free of conflicts; 16 positions in half types.
// At stride 2 the middle tap reads the second run of a row.
template <int kStride>
__device__ __forceinline__ int wgrad_tap_row(int tap, int second_run) {
  return kStride == 1 ? tap : tap == 1 ? second_run : tap / 2;
}
template <ConvMath kMath, int kTaps, int kStride>
struct WgradFragments {
  static constexpr int kRowBytes = 64, kStep = 16, kColumns = kTaps;
  uint32_t still[2];
  uint32_t moved[(kTaps + 1) / 2];
  __device__ __forceinline__ WgradFragments(int lane, int block, int second_run) {
    const int row = (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) still[i] = row * 64 + ((i * 2 + (lane >> 3 & 1)) ^ (row >> 1 & 3)) * 16;
#pragma unroll
    for (int i = 0; i < (kTaps + 1) / 2; ++i) {
      const int at = (lane & 15) + wgrad_tap_row<kStride>(i * 2 + (lane >> 4), second_run);
      moved[i] = at * 64 + (block ^ (at >> 1 & 3)) * 16;
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void load_still(uint32_t (&a)[2][4], uint32_t base) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_transposed_4(a[i][0], a[i][1], a[i][2], a[i][3], base + still[i]);
  }
  __device__ __forceinline__ void load_moved(uint32_t (&b)[kTaps][2], uint32_t base) const {
#pragma unroll
    for (int i = 0; i + 1 < kTaps; i += 2) {
      load_transposed_4(b[i][0], b[i][1], b[i + 1][0], b[i + 1][1], base + moved[i / 2]);
    }
    if constexpr (kTaps % 2 == 1) load_transposed_2(b[kTaps - 1][0], b[kTaps - 1][1], base + moved[kTaps / 2]);
  }
#endif
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (kMath == ConvMath::kBf16) {
      mma_bf16(c, a, b[0], b[1]);
    } else {
      mma_fp16(c, a, b[0], b[1]);
    }
  }
  // Channel of `still` of row half * 8 + g of fragment i.
  static __device__ __forceinline__ int channel(int i, int half, int g) { return i * 16 + half * 8 + g; }
};
template <int kTaps, int kStride>
struct WgradFragments<ConvMath::kTf32, kTaps, kStride> {
  static constexpr int kRowBytes = 128, kStep = 8, kColumns = kTaps;
  uint32_t still[2][2];
  uint32_t moved[kTaps][2];
  __device__ __forceinline__ WgradFragments(int lane, int block, int second_run) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 2 * t + half;
#pragma unroll
      for (int i = 0; i < 2; ++i) still[i][half] = row * 128 + ((i * 4 + (g >> 1)) ^ row) * 16 + (g & 1) * 8;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        const int at = row + wgrad_tap_row<kStride>(tap, second_run);
        moved[tap][half] = at * 128 + ((2 * block + (g >> 2)) ^ (at & 7)) * 16 + (g & 3) * 4;
      }
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void load_still(uint32_t (&a)[2][4], uint32_t base) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_shared(a[i][0], a[i][1], base + still[i][0]);
      load_shared(a[i][2], a[i][3], base + still[i][1]);
    }
  }
  __device__ __forceinline__ void load_moved(uint32_t (&b)[kTaps][2], uint32_t base) const {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      b[tap][0] = load_shared(base + moved[tap][0]);
      b[tap][1] = load_shared(base + moved[tap][1]);
    }
  }
#endif
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_tf32(c, a, b[0], b[1]);
  }
  static __device__ __forceinline__ int channel(int i, int half, int g) { return i * 16 + g * 2 + half; }
};

// The same where a position of `moved` has few channels: column n of the product is element n from the first tap on, so
// that taps and channels are neighbours. Two blocks of 8 columns.
template <ConvMath kMath, int kStride>
struct WgradFewFragments : WgradFragments<kMath, 1, 1> {
  using Base = WgradFragments<kMath, 1, 1>;
  static constexpr int kColumns = 2, kSize = kMath == ConvMath::kTf32 ? 4 : 2;
  uint32_t element, position;
  __device__ __forceinline__ WgradFewFragments(int lane, int channels) : Base(lane, 0, 0) {
    position = channels * kStride * kSize;
    element = (lane & 3) * 2 * position + (lane >> 2) * kSize;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void load_moved(uint32_t (&b)[kColumns][2], uint32_t base) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kMath == ConvMath::kTf32) {
          b[i][half] = load_shared(base + element + half * position + i * 32);
        } else {
          const uint32_t at = base + element + half * 8 * position + i * 16;
          b[i][half] = load_shared_half(at) | load_shared_half(at + position) << 16;
        }
      }
    }
  }
#endif
};

template <ConvMath kMath, int kRows, int kTapsH, int kTapsW, int kStride, bool kFew>
__global__ void __launch_bounds__(kWgradThreads, 1) conv_wgrad_kernel(const __grid_constant__ WgradParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static_assert(kStride == 1 || kTapsW == 3);
  using Fragments = std::conditional_t<kFew, WgradFewFragments<kMath, kStride>, WgradFragments<kMath, kTapsW, kStride>>;
  constexpr int kMovedRows = (kRows - 1) * kStride + kTapsH;
  constexpr int kColumns = Fragments::kColumns;
  constexpr int kRowBytes = Fragments::kRowBytes;
  extern __shared__ char smem_unaligned[];
  const WgradPlan& plan = p.plan;
  const uint32_t unaligned = shared_address(smem_unaligned);
  const uint32_t aligned = (unaligned + 1023) / 1024 * 1024;
  const int moved_bytes = wgrad_moved_bytes(plan), still_bytes = wgrad_still_bytes(plan);
  const int still_stages = plan.stages + plan.back;
  const uint32_t still_smem = aligned + plan.stages * moved_bytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem_unaligned + (aligned - unaligned) +
                                                     plan.stages * moved_bytes + still_stages * still_bytes);
  uint64_t* const done = full + kWgradMaxStages;
  const int tid = threadIdx.x, warp = __shfl_sync(0xffffffff, tid / 32, 0), lane = tid & 31;
  if (tid == 0) {
    for (int i = 0; i < plan.stages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(done + i, kWgradGroups * kWgradWarps * 32);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int job = blockIdx.x / plan.splits, split = blockIdx.x - job * plan.splits;
  const int b_tile = job % plan.b_tiles, a_tile = job / plan.b_tiles % plan.a_tiles;
  const int depth_tap = job / plan.b_tiles / plan.a_tiles * kWgradGroups;
  const int first = static_cast<int>(plan.first_step + plan.steps * split / plan.splits);
  const int end = static_cast<int>(plan.first_step + plan.steps * (split + 1) / plan.splits);
  const int depth = p.moved[0];

  if (warp == kWgradGroups * kWgradWarps) {
    if (lane != 0) return;
    int stage = 0, still_stage = 0;
    uint32_t parity = 1;
    const int moved_load = kMovedRows * (kFew ? plan.row_numbers * (kRowBytes / kWgradChannels)
                                              : (wgrad_first_run(plan) + (kStride == 1 ? 0 : plan.width)) * kRowBytes);
    for (int at = first; at < end;) {
      const int column = at / depth, d0 = at - column * depth, count = min(depth - d0, end - at);
      const int w_tile = column % plan.tiles[1], rest = column / plan.tiles[1];
      const int h_tile = rest % plan.tiles[0], n = rest / plan.tiles[0];
      const int h = h_tile * plan.rows, w = w_tile * plan.width;
      for (int i = -plan.back; i < count; ++i) {
        barrier_wait(done + stage, parity);
        const int t = d0 + i + plan.padding[0] - depth_tap;  // tap 0 meets plane t / stride of `still`
        const bool loads_still = (t & (plan.depth_stride - 1)) == 0, loads_moved = i >= 0;
        barrier_expect_bytes(full + stage, (loads_still ? still_bytes : 0) + (loads_moved ? moved_load : 0));
        if (loads_still) {
          tensor_load_5d(still_smem + still_stage * still_bytes, p.still_map, a_tile * kWgradChannels, w, h,
                         t / plan.depth_stride, n, full + stage);
          if (++still_stage == still_stages) still_stage = 0;
        }
        if (loads_moved) {
          for (int r = 0; r < kMovedRows; ++r) {
            const uint32_t to = aligned + stage * moved_bytes + r * plan.pitch;
            const int moved_w = w * kStride - plan.padding[2], moved_h = h * kStride - plan.padding[1] + r;
            if constexpr (kFew) {
              tensor_load_4d(to, p.moved_map, moved_w * plan.few - plan.row_skip, moved_h, d0 + i, n, full + stage);
            } else if constexpr (kStride == 1) {
              tensor_load_5d(to, p.moved_map, b_tile * kWgradChannels, moved_w, moved_h, d0 + i, n, full + stage);
            } else {
#pragma unroll
              for (int run = 0; run < 2; ++run) {
                const int column = moved_w + run, odd = column & 1;
                tensor_load_5d(to + (run == 0 ? 0 : wgrad_second_run(plan) * kRowBytes),
                               run == 0 ? p.moved_map : p.second_map, b_tile * kWgradChannels + odd * p.moved_stride_w,
                               column >> 1, moved_h, d0 + i, n, full + stage);
              }
            }
          }
        }
        if (++stage == plan.stages) stage = 0, parity ^= 1;
      }
      at += count;
    }
    return;
  }

  const int group = warp / kWgradWarps, j = warp % kWgradWarps;
  const int tap_d = plan.alternate ? 0 : group;
  const int block = kFew ? 0 : j & (plan.b_blocks - 1);
  const Fragments fragments = [&] {
    if constexpr (kFew) {
      return Fragments(lane, plan.few);
    } else {
      return Fragments(lane, block, wgrad_second_run(plan));
    }
  }();
  float acc[kTapsH][kColumns][2][4] = {};
  const int my_turn = j / plan.b_blocks * (plan.alternate ? kWgradGroups : 1) + (plan.alternate ? group : 0);
  const int behind = tap_d / plan.depth_stride;  // planes of `still` from the newest to this group's
  int stage = 0, newest = still_stages - 1, turn = my_turn;
  uint32_t parity = 0;
  const uint32_t moved_row = plan.pitch, still_row = plan.width * kRowBytes;
  const uint32_t moved_step = Fragments::kStep * (kFew ? plan.few * kStride * (kRowBytes / kWgradChannels) : kRowBytes);
  for (int at = first; at < end;) {
    const int column = at / depth, d0 = at - column * depth, count = min(depth - d0, end - at);
    for (int i = -plan.back; i < count; ++i) {
      barrier_wait(full + stage, parity);
      const int t = d0 + i + plan.padding[0] - depth_tap;
      if ((t & (plan.depth_stride - 1)) == 0 && ++newest == still_stages) newest = 0;
      bool mine = i >= 0 && ((t - tap_d) & (plan.depth_stride - 1)) == 0;
      if (mine) {
        const int still_d = (t - tap_d) / plan.depth_stride;
        mine = turn == 0 && t >= tap_d && still_d < p.still[0] && depth_tap + tap_d < plan.taps[0];
        turn = turn == 0 ? plan.turns - 1 : turn - 1;
      }
      if (mine) {
        uint32_t a_base =
            still_smem + (newest < behind ? newest - behind + still_stages : newest - behind) * still_bytes;
        uint32_t b_base = aligned + stage * moved_bytes + (kFew ? plan.row_skip * (kRowBytes / kWgradChannels) : 0);
        for (int w = 0; w < plan.width; w += Fragments::kStep) {
          uint32_t a[kTapsH][2][4];
          uint32_t b[kColumns][2];
          uint32_t a_at = a_base, b_at = b_base;
#pragma unroll
          for (int r = 0; r < kMovedRows; ++r) {
            fragments.load_moved(b, b_at);
            b_at += moved_row;
            if (r % kStride == 0 && r / kStride < kRows) {
              fragments.load_still(a[r / kStride % kTapsH], a_at);
              a_at += still_row;
            }
#pragma unroll
            for (int kh = 0; kh < kTapsH; ++kh) {
              const int row = (r - kh) / kStride;  // of `still`
              if (r < kh || (r - kh) % kStride != 0 || row >= kRows) continue;
#pragma unroll
              for (int kw = 0; kw < kColumns; ++kw) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                  Fragments::multiply(acc[kh][kw][m], a[row % kTapsH][m], b[kw]);
                }
              }
            }
          }
          a_base += Fragments::kStep * kRowBytes;
          b_base += moved_step;
        }
      }
      barrier_arrive(done + stage);
      if (++stage == plan.stages) stage = 0, parity ^= 1;
    }
    at += count;
  }

  // A row of a partial sum is the channels of a tap, or the columns of a tap along the height.
  const int row_floats = wgrad_columns(plan);
  float* const to = p.partials + (int64_t(job) * plan.slots + split * plan.turns + my_turn) * wgrad_tile_floats(plan) +
                    tap_d * kTapsH * (kFew ? 1 : kTapsW) * kWgradChannels * row_floats + (lane & 3) * 2;
#pragma unroll
  for (int kh = 0; kh < kTapsH; ++kh) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const v = acc[kh][column][m] + half * 2;
          const int a = Fragments::channel(m, half, lane >> 2);
          const int row = (kFew ? kh : kh * kTapsW + column) * kWgradChannels + a;
          *reinterpret_cast<float2*>(to + row * row_floats + (kFew ? column : block) * 8) = make_float2(v[0], v[1]);
        }
      }
    }
  }
#endif
}

}  // namespace kgopt
