// Weight and bias gradients of convolutions with few input channels, from contiguous tensors as they lie; mma.sync, on
// Hopper.
//
// Positions along the width are K, of both operands: a row of dy and a row of x are read in vectors of 16 bytes, and
// which position is which K does not matter as long as both agree. Taps of depth and height are other rows of x; the
// taps of the width are the same registers, shifted by one value. A block walks over tiles of positions, cp.async
// filling one stage while its warps multiply another, and keeps its part of dw in registers from start to end; the
// blocks' parts are added afterwards, always in the same order.
//
// Behind a norm and a mean, dy is an affine function of the convolution's output for each sample and channel. Then dy
// is not read: the tile of x is convolved again, in TF32 whatever the type, which holds half values as they are. Where
// the plan says so dx is given, too, from the same tiles: they are planes then, along which a block marches.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "conv3d/gradients/copy_rows.cuh"
#include "conv3d/gradients/few_wgrad/made.cuh"
#include "conv3d/gradients/few_wgrad/params.h"
#include "conv3d/gradients/few_wgrad/plan.h"
#include "conv3d/gradients/few_wgrad/values.cuh"

namespace kgopt {

namespace few_wgrad {

// What a thread has of a row of x in a unit: four words, and its neighbours as far as taps reach.
template <ConvMath kMath, int kLead>
struct Window {
  static constexpr bool kHalf = conv_channels_per_word(kMath) == 2;
  static constexpr int kBefore = kLead > 0 ? 1 : 0;
  static constexpr int kAfter = kHalf ? 1 : 2 - kLead;  // words
  static constexpr int kWords = kBefore + 4 + kAfter;
  uint32_t words[kWords];
  int positions;  // of the four words, those that dy has positions for; the others count as zero

  __device__ __forceinline__ void load(uint32_t address, int of_dy) {
    positions = of_dy;
    const uint4 v = load_shared_16(address);
    words[kBefore] = v.x, words[kBefore + 1] = v.y, words[kBefore + 2] = v.z, words[kBefore + 3] = v.w;
    if constexpr (kBefore) words[0] = load_shared(address - 4);
#pragma unroll
    for (int i = 0; i < kAfter; ++i) words[kBefore + 4 + i] = load_shared(address + 16 + i * 4);
    if constexpr (kMath == ConvMath::kTf32) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = to_tf32(__uint_as_float(words[i]));
    }
  }
  // Leaves here what TF32 holds of each word, and gives the rest.
  __device__ __forceinline__ Window split() {
    Window rest;
    rest.positions = positions;
#pragma unroll
    for (int i = 0; i < kWords; ++i) split_for_tf32(__uint_as_float(words[i]), &words[i], &rest.words[i]);
    return rest;
  }
  // Word i of the four, for a tap of the width. Beyond dy's positions the first tap may find x, and without zeros ahead
  // of a row the others may find the next one.
  __device__ __forceinline__ uint32_t at(int i, int tap) const {
    const bool may_find_x = kLead == 0 || tap == 0;
    return may_find_x && i >= positions ? 0u : shifted(i, tap - kLead);
  }
  __device__ __forceinline__ uint32_t shifted(int i, int shift) const {
    if constexpr (!kHalf) {
      return words[kBefore + i + shift];
    } else if (shift % 2 == 0) {
      return words[kBefore + i + shift / 2];
    } else {
      const int first = kBefore + i + (shift < 0 ? -1 : 0);
      return __byte_perm(words[first], words[first + 1], 0x5432);
    }
  }
};

template <ConvMath kMath>
__device__ __forceinline__ float word_sum(uint32_t word) {
  if constexpr (conv_channels_per_word(kMath) == 1) {
    return __uint_as_float(word);
  } else if constexpr (kMath == ConvMath::kBf16) {
    return __uint_as_float(word << 16) + __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&word));
    return v.x + v.y;
  }
}

// 3xTF32 of a unit's two steps of K. The tensor core truncates when it adds to its accumulator; summing units outside
// rounds. The small products come first.
__device__ __forceinline__ void multiply_split(float (&c)[4], const uint32_t (&a)[2][4], const uint32_t (&a_rest)[2][4],
                                               const uint32_t (&b)[4], const uint32_t (&b_rest)[4]) {
  float partial[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    mma_tf32(partial, a_rest[s], b[2 * s], b[2 * s + 1]);
    mma_tf32(partial, a[s], b_rest[2 * s], b_rest[2 * s + 1]);
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) mma_tf32(partial, a[s], b[2 * s], b[2 * s + 1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += partial[i];
}

}  // namespace few_wgrad

template <ConvMath kMath, int kXTiles, int kDyTiles, bool kDyIsA, int kLead, bool kMakesDy>
__global__ void __launch_bounds__(kFewWgradThreads, few_wgrad_blocks_per_sm(kMath))
    conv_few_wgrad_kernel(const __grid_constant__ FewWgradParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using namespace few_wgrad;
  using Element = std::conditional_t<conv_channels_per_word(kMath) == 1, float, unsigned short>;
  constexpr int kSize = sizeof(Element);
  constexpr bool kSplit = kMath == ConvMath::kTf32x3;
  constexpr int kTaps = kFewWgradTaps;
  constexpr int kSums = few_wgrad_accumulators(kXTiles, kDyTiles);
  constexpr int kATiles = (kDyIsA ? kDyTiles : kXTiles) / 2, kBTiles = kDyIsA ? kXTiles : kDyTiles;
  extern __shared__ __align__(128) char smem_bytes[];
  const FewWgradPlan& plan = p.plan;
  const FewWgradLayout layout = few_wgrad_layout(plan);
  int4* const units = reinterpret_cast<int4*>(smem_bytes + layout.units);
  CopiedRow* const dy_rows = reinterpret_cast<CopiedRow*>(smem_bytes + layout.dy_rows);
  CopiedRow* const x_rows = reinterpret_cast<CopiedRow*>(smem_bytes + layout.x_rows);
  char* const stages = smem_bytes + layout.stages;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int channels = few_wgrad_channels(plan), c_first = blockIdx.y * channels;
  const int x_base = kMakesDy ? 0 : channels * plan.dy_channel + 64;  // of a stage: x after dy
  const int tile_d = plan.tile[0], tile_h = plan.tile[1];
  const int unit_count = few_wgrad_units(plan);

#pragma unroll 1
  for (int i = tid; i < unit_count; i += kFewWgradThreads) {
    const int across = plan.dy_pitch / kFewWgradUnit;
    const int w = i % across, h = i / across % tile_h, d = i / (across * tile_h);
    units[i] = make_int4((d * tile_h + h) * plan.dy_pitch + w * kFewWgradUnit,
                         d * plan.step[0] * plan.x_plane + h * plan.step[1] * plan.x_pitch + w * kFewWgradUnit,
                         d << 16 | h, w * (kFewWgradUnit / 4));
  }
  list_few_rows(plan.dy_copy, dy_rows, kFewWgradThreads, [&](int i) {
    const int h = i % tile_h, d = i / tile_h % tile_d, c = i / (tile_h * tile_d);
    const int64_t offset = (c * p.dy_stride_c + d * p.dy_stride[0] + h * p.dy_stride[1]) * kSize / 4;
    return CopiedRow{uint32_t(offset), c * plan.dy_channel + (d * tile_h + h) * plan.dy_pitch, d, h};
  });
  list_few_rows(plan.x_copy, x_rows, kFewWgradThreads, [&](int i) {
    const int h = i % plan.halo[1], d = i / plan.halo[1] % plan.halo[0], c = i / (plan.halo[1] * plan.halo[0]);
    const int64_t offset = (c * p.x_stride_c + d * p.x_stride[0] + h * p.x_stride[1]) * kSize / 4;
    return CopiedRow{uint32_t(offset), x_base + c * plan.x_channel + d * plan.x_plane + h * plan.x_pitch, d, h};
  });
  // What no copy writes is read, too, and multiplied by zeros.
  for (int i = tid * 16 - plan.made_bytes; i < plan.stage_bytes * plan.stages; i += kFewWgradThreads * 16) {
    *reinterpret_cast<uint4*>(stages + i) = make_uint4(0, 0, 0, 0);
  }
  using Made = MadeDy<kMath, kDyTiles>;
  auto* const weights = reinterpret_cast<typename Made::Fragment*>(smem_bytes + layout.weights);
  int2* const taps = reinterpret_cast<int2*>(smem_bytes + layout.taps);
  float4* const rows = reinterpret_cast<float4*>(smem_bytes + layout.rows);
  char* const made = smem_bytes + layout.made;
  using Dx = MadeDx<kMath>;
  const bool gives_dx = kMakesDy && plan.dx_rows > 0;
  uint32_t* const dx_weights = reinterpret_cast<uint32_t*>(smem_bytes + layout.dx_weights);
  int* const dx_offsets = reinterpret_cast<int*>(smem_bytes + layout.dx_offsets);
  int2* const dx_table = reinterpret_cast<int2*>(smem_bytes + layout.dx_table);
  float* const dx_sums = reinterpret_cast<float*>(smem_bytes + layout.dx_sums);
  // Planes and rows of dy ahead of those that dx's own position is multiplied with.
  const int reach_d = (plan.kernel[0] - 1) * plan.dilation[0], reach_h = (plan.kernel[1] - 1) * plan.dilation[1];
  if constexpr (kMakesDy) {
    Made::pack(p, c_first, x_base, weights, taps);
    if (gives_dx) {
      Dx::pack(p, dx_weights, dx_offsets, dx_table);
#pragma unroll 1
      for (int i = tid; i < plan.dx_slots * plan.dx_slot; i += kFewWgradThreads) dx_sums[i] = 0.f;
    }
  }

  // This thread's rows of x and channels of dy, in a stage.
  uint32_t x_row[kXTiles], dy_row;
#pragma unroll
  for (int i = 0; i < kXTiles; ++i) {
    const int row = min(i * 8 + g, plan.rows - 1);
    const int kh = row % plan.kernel[1], kd = row / plan.kernel[1] % plan.kernel[0];
    const int c = row / (plan.kernel[1] * plan.kernel[0]);
    x_row[i] = x_base + c * plan.x_channel + kd * plan.dilation[0] * plan.x_plane +
               kh * plan.dilation[1] * plan.x_pitch + plan.margin[0] * kSize + t * 16;
  }
  const int split = warp % plan.splits, group = warp / plan.splits, groups = kFewWgradWarps / plan.splits;
  dy_row = (split * kDyTiles * 8 + g) * plan.dy_channel + (gives_dx ? t ^ few_wgrad_swizzle(g) : t) * 16;

  const int all_tiles = static_cast<int>(plan.all_tiles);
  const int tiles_w = static_cast<int>(plan.tiles[2]), tiles_h = static_cast<int>(plan.tiles[1]);
  const int in_sample = static_cast<int>(plan.tiles[0]) * tiles_h * tiles_w * plan.steps;
  struct Corner {
    int d, h, w;
  };
  // Where dx is given, tiles along a march are neighbours; dy's first ones may lie ahead of the tensor.
  auto corner_of = [&](int tile) {
    const int rest = tile % in_sample;
    if (gives_dx) {
      const int march = rest / plan.steps;
      return Corner{march / tiles_h * plan.dx_planes + plan.padding[0] - reach_d + rest % plan.steps,
                    march % tiles_h * plan.dx_rows + plan.padding[1] - reach_h, 0};
    }
    return Corner{rest / (tiles_w * tiles_h) * tile_d, rest / tiles_w % tiles_h * tile_h,
                  rest % tiles_w * plan.tile[2]};
  };
  const auto tile_after = [&](int tile) {
    const bool goes_on = kMakesDy && (tile + 1) % plan.steps != 0;
    return goes_on ? tile + 1 : tile + 1 + (static_cast<int>(gridDim.x) - 1) * plan.steps;
  };
  const int first_tile = static_cast<int>(blockIdx.x) * plan.steps;
  int load_tile = first_tile, load_stage = 0;
  auto load = [&] {
    if (load_tile < all_tiles) {
      const int64_t n = load_tile / in_sample;
      const auto [d, h, w] = corner_of(load_tile);
      char* const stage = stages + load_stage * plan.stage_bytes;
      if constexpr (!kMakesDy) {
        const Element* const dy = static_cast<const Element*>(p.dy) + n * p.dy_stride_n + c_first * p.dy_stride_c;
        copy_few_rows<kFewWgradThreads>(
            plan.dy_copy, stage, dy + d * p.dy_stride[0] + h * p.dy_stride[1] + w, dy_rows,
            {d, h, w, {tile_d, tile_h}, {p.out[0], p.out[1], p.out[2]}, (p.c_out - c_first) * tile_d * tile_h});
      }
      const int in_d = d * plan.step[0] - plan.padding[0], in_h = h * plan.step[1] - plan.padding[1];
      const int in_w = w - plan.margin[0];
      const Element* const x = static_cast<const Element*>(p.x) + n * p.x_stride_n;
      copy_few_rows<kFewWgradThreads>(
          plan.x_copy, stage, x + in_d * p.x_stride[0] + in_h * p.x_stride[1] + in_w, x_rows,
          {in_d, in_h, in_w, {plan.halo[0], plan.halo[1]}, {p.in[0], p.in[1], p.in[2]}, plan.x_copy.rows});
      if (++load_stage == plan.stages) load_stage = 0;
      load_tile = tile_after(load_tile);
    }
    cp_async_commit();
  };

  float acc[kATiles][kBTiles][kTaps][4] = {};
  float sums[kDyTiles] = {};
  float4 row = make_float4(0.f, 0.f, 0.f, 0.f);  // of the tile that comes, of this thread's channel
  auto load_row = [&](int tile) {
    if (tid < channels && tile < all_tiles) row = Made::row_of(p, tile / in_sample, c_first + tid);
  };
  if constexpr (kMakesDy) {
    wait_for_prerequisites();
    let_dependents_start();
    load_row(first_tile);
    if (tid < channels) rows[tid] = row;
  }
  __syncthreads();
  // One place where copies are started, where code would be much of the kernel's.
  int ahead = plan.stages - 1;
  if constexpr (!kMakesDy) {
    for (; ahead > 0; --ahead) load();
  }
  int stage = 0;
  for (int tile = first_tile; tile < all_tiles;) {
    if (ahead == 0) {
      if (plan.stages == 2) {
        cp_async_wait_all();
      } else {
        cp_async_wait_group<1>();
      }
      __syncthreads();  // this tile is there for all, and all have read the one before it
    }
    load();
    if (kMakesDy && ahead > 0) {
      --ahead;
      continue;
    }
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(stages + stage * plan.stage_bytes));
    if (++stage == plan.stages) stage = 0;
    const Corner corner = corner_of(tile);
    // Both in halves of a word, whose highest bits stay where a position of a unit is below.
    const uint32_t left_rows = min(p.out[0] - corner.d, 0x7fff) << 16 | min(p.out[1] - corner.h, 0x7fff) | 0x80008000u;
    const int left_words = (p.out[2] - corner.w) * kSize / 4 - t * 4;
    const uint32_t dy_base = kMakesDy ? static_cast<uint32_t>(__cvta_generic_to_shared(made)) : base;
    // Some sums step aside while dy and dx are made; else the compiler keeps them out of registers in the last loop,
    // too.
    constexpr int kAside = kMakesDy && !kSplit ? 24 : 0;
    float aside[kAside + 1];
    const auto for_those_aside = [&](auto f) {
#pragma unroll
      for (int i = 0; i < kAside; ++i) {
        f(acc[i / 4 / kTaps / kBTiles][i / 4 / kTaps % kBTiles][i / 4 % kTaps][i % 4],
          static_cast<uint32_t>(__cvta_generic_to_local(aside)) + i * 4);
      }
    };
    for_those_aside([](float& sum, uint32_t at) {
      asm volatile("st.local.f32 [%0], %1;" ::"r"(at), "f"(sum) : "memory");
    });
    const bool dy_is_there = !gives_dx || unsigned(corner.d) < unsigned(p.out[0]);
    if constexpr (kMakesDy) {
      load_row(tile_after(tile));
#pragma unroll 1
      for (int i = dy_is_there ? warp : 1 << 30; i < unit_count * Made::kStrips; i += kFewWgradWarps * 2) {
        typename Made::Strip strips[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const int number = i + s * kFewWgradWarps;
          const int4 at = units[min(number / Made::kStrips, unit_count - 1)];
          const int first = number % Made::kStrips * 16;
          strips[s] = {base + at.y + first * kSize, made + at.x, first * kSize,
                       p.out[2] - corner.w - at.w * 4 / kSize - first - g * 2, number < unit_count * Made::kStrips};
          if (((left_rows - at.z - 0x00010001u) & 0x80008000u) == 0x80008000u && (at.z & 0xffff) >= -corner.h) continue;
          if (gives_dx && strips[s].is_there && first == 0) {  // dx reads it
            for (int j = lane; j < channels * 4; j += 32) {
              *reinterpret_cast<uint4*>(made + at.x + j / 4 * plan.dy_channel + j % 4 * 16) = make_uint4(0, 0, 0, 0);
            }
          }
          strips[s].is_there = false;
        }
        if (strips[0].is_there || strips[1].is_there) Made::make(plan, strips, weights, taps, rows);
      }
      __syncthreads();
      if (tid < channels) rows[tid] = row;
      if (p.made) {
        Element* const to = static_cast<Element*>(p.made) + tile / in_sample * p.dy_stride_n + c_first * p.dy_stride_c;
        store_few_rows<kFewWgradThreads>(plan.dy_copy, made,
                                         to + corner.d * p.dy_stride[0] + corner.h * p.dy_stride[1] + corner.w, dy_rows,
                                         {corner.d,
                                          corner.h,
                                          corner.w,
                                          {tile_d, tile_h},
                                          {p.out[0], p.out[1], p.out[2]},
                                          (p.c_out - c_first) * tile_d * tile_h});
      }
    }
    int first_unit = group;
    if (gives_dx) {
      // Planes and rows that two marches or slabs make count once: for all but the first those behind the reach.
      const int step = tile % plan.steps, march = tile % in_sample / plan.steps;
      const int own = max(march % tiles_h > 0 ? reach_h : 0, -corner.h);
      first_unit += own * (plan.dy_pitch / kFewWgradUnit);
      if (!dy_is_there || (march >= tiles_h && step < reach_d)) first_unit = unit_count;
      if constexpr (kMakesDy) {
        const int d = corner.d - plan.padding[0], h = march % tiles_h * plan.dx_rows;  // of dx, of its complete plane
        const int rows_now = min(plan.dx_rows, p.in[1] - h);
        if (dy_is_there) {
          Dx::add_plane(plan, dy_base, static_cast<uint32_t>(__cvta_generic_to_shared(dx_weights)), dx_offsets,
                        dx_table, dx_sums, step, rows_now);
        }
        Element* const dx =
            static_cast<Element*>(p.dx) + tile / in_sample * p.x_stride_n + d * p.x_stride[0] + h * p.x_stride[1];
        Dx::finish_plane(p, dx, dx_sums, step, rows_now, step >= reach_d && d < p.in[0]);
      }
    }
    for_those_aside([&](float& sum, uint32_t at) {
      asm volatile("ld.local.f32 %0, [%1];" : "=f"(sum) : "r"(at) : "memory");
    });
#pragma unroll 1
    for (int unit = first_unit; unit < unit_count; unit += groups) {
      const int4 at = units[unit];
      if (((left_rows - at.z - 0x00010001u) & 0x80008000u) != 0x80008000u) continue;
      // Where dy ends x may go on, with values that nothing is to be multiplied by, not even zero: NaN and infinities.
      const int words = left_words - at.w;
      uint32_t dy[kDyTiles][4];
      [[maybe_unused]] uint32_t dy_rest[kSplit ? kDyTiles : 1][4];
      const uint32_t dy_address = dy_base + at.x + dy_row;
#pragma unroll
      for (int j = 0; j < kDyTiles; ++j) {
        const uint4 v = load_shared_16(dy_address + j * 8 * plan.dy_channel);
        dy[j][0] = v.x, dy[j][1] = v.y, dy[j][2] = v.z, dy[j][3] = v.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[j] += word_sum<kMath>(dy[j][i]);
          if constexpr (kMath == ConvMath::kTf32) dy[j][i] = to_tf32(__uint_as_float(dy[j][i]));
          if constexpr (kSplit) split_for_tf32(__uint_as_float(dy[j][i]), &dy[j][i], &dy_rest[j][i]);
        }
      }
      const uint32_t x_address = base + at.y;
      if constexpr (kDyIsA) {
#pragma unroll
        for (int b = 0; b < kXTiles; ++b) {
          Window<kMath, kLead> window;
          window.load(x_address + x_row[b], words);
          if constexpr (kSplit) {
            const Window<kMath, kLead> rest = window.split();
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
              const uint32_t word[4] = {window.at(0, tap), window.at(1, tap), window.at(2, tap), window.at(3, tap)};
              const uint32_t word_rest[4] = {rest.at(0, tap), rest.at(1, tap), rest.at(2, tap), rest.at(3, tap)};
#pragma unroll
              for (int a = 0; a < kATiles; ++a) {
                uint32_t fragment[2][4], fragment_rest[2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                  fragment[i / 4][i % 4] = dy[2 * a + i % 2][i / 4 * 2 + i / 2 % 2];
                  fragment_rest[i / 4][i % 4] = dy_rest[2 * a + i % 2][i / 4 * 2 + i / 2 % 2];
                }
                multiply_split(acc[a][b][tap], fragment, fragment_rest, word, word_rest);
              }
            }
          } else {
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
              for (int s = 0; s < 4; s += 2) {
                const uint32_t b0 = window.at(s, tap), b1 = window.at(s + 1, tap);
#pragma unroll
                for (int a = 0; a < kATiles; ++a) {
                  const uint32_t fragment[4] = {dy[2 * a][s], dy[2 * a + 1][s], dy[2 * a][s + 1], dy[2 * a + 1][s + 1]};
                  multiply<kMath>(acc[a][b][tap], fragment, b0, b1);
                }
              }
            }
          }
        }
      } else {
#pragma unroll
        for (int a = 0; a < kATiles; ++a) {
          Window<kMath, kLead> first, second;
          first.load(x_address + x_row[2 * a], words);
          second.load(x_address + x_row[2 * a + 1], words);
          if constexpr (kSplit) {
            const Window<kMath, kLead> first_rest = first.split(), second_rest = second.split();
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
              uint32_t fragment[2][4], fragment_rest[2][4];
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                const int word = i / 4 * 2 + i / 2 % 2;
                fragment[i / 4][i % 4] = i % 2 ? second.at(word, tap) : first.at(word, tap);
                fragment_rest[i / 4][i % 4] = i % 2 ? second_rest.at(word, tap) : first_rest.at(word, tap);
              }
#pragma unroll
              for (int b = 0; b < kDyTiles; ++b) {
                multiply_split(acc[a][b][tap], fragment, fragment_rest, dy[b], dy_rest[b]);
              }
            }
          } else {
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
              for (int s = 0; s < 4; s += 2) {
                const uint32_t fragment[4] = {first.at(s, tap), second.at(s, tap), first.at(s + 1, tap),
                                              second.at(s + 1, tap)};
#pragma unroll
                for (int b = 0; b < kDyTiles; ++b) multiply<kMath>(acc[a][b][tap], fragment, dy[b][s], dy[b][s + 1]);
              }
            }
          }
        }
      }
    }
    tile = tile_after(tile);
  }
  cp_async_wait_all();

  // The groups of warps one after the other.
  float* const shared = reinterpret_cast<float*>(stages) + split * 32 * kSums + lane;
  for (int turn = 0; turn < groups; ++turn) {
    __syncthreads();
    if (turn != group) continue;
    auto add = [&](int i, float v) { shared[i * 32] = turn == 0 ? v : shared[i * 32] + v; };
#pragma unroll
    for (int i = 0; i < kSums - kDyTiles; ++i) {
      add(i, acc[i / 4 / kTaps / kBTiles][i / 4 / kTaps % kBTiles][i / 4 % kTaps][i % 4]);
    }
#pragma unroll
    for (int i = 0; i < kDyTiles; ++i) add(kSums - kDyTiles + i, sums[i]);
  }
  __syncthreads();
  const int floats = few_wgrad_floats(plan);
  float* const to = p.partials + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * floats;
  for (int i = tid; i < floats; i += kFewWgradThreads) {
    const float sum = reinterpret_cast<const float*>(stages)[i];
    to[i] = p.adds ? to[i] + sum : sum;
  }
#endif
}

}  // namespace kgopt
