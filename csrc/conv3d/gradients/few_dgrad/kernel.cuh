// Input gradient of convolutions with few input channels, from contiguous tensors as they lie; mma.sync, on
// Hopper.
//
// Rows of the products are pairs of a tap of the width and a channel of dx, columns positions of dy, K the channels of
// dy and the taps of depth and height. So no position of dy is ever read at an odd address: what the taps of the width
// give is added up afterwards, shifted, in shared memory. A block walks over tiles of dx and chunks of channels of dy,
// cp.async filling one stage while its warps multiply another; the weights stay in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "conv3d/gradients/copy_rows.cuh"
#include "conv3d/gradients/few_dgrad/params.h"
#include "conv3d/gradients/few_dgrad/plan.h"

namespace kgopt {

namespace few_dgrad {

// Fragment words of the weights, as the products want them.
template <ConvMath kMath>
__device__ __forceinline__ void pack_weights(const FewDgradParams& p, uint32_t* to) {
  constexpr bool kHalf = conv_channels_per_word(kMath) == 2;
  using Stored = std::conditional_t<kHalf, unsigned short, float>;
  const FewDgradPlan& plan = p.plan;
  const int taps = plan.kernel[0] * plan.kernel[1], pairs = plan.channels / 8 * taps;
  const Stored* const weight = static_cast<const Stored*>(p.weight);
  const int words = plan.chunks * plan.k_steps * plan.row_tiles * 128;
  for (int i = threadIdx.x; i < words; i += kFewDgradThreads) {
    const int lane = i / 4 % 32, g = lane / 4, t = lane % 4;
    const int row = i / 128 % plan.row_tiles * 16 + g + i % 2 * 8;
    const int step = i / 128 / plan.row_tiles, k_step = step % plan.k_steps;
    const int part = i / 2 % 2;  // of the step's K
    const int pair = few_dgrad_pair(plan, k_step, kHalf ? part : 0);
    const int kd = pair % taps / plan.kernel[1], kh = pair % plan.kernel[1];
    const int c = row % p.c_in, kw = row / p.c_in;
    const int channel = step / plan.k_steps * plan.channels + pair / taps * 8;
    auto read = [&](int c_out) -> Stored {
      if (kw >= plan.kernel[2] || pair >= pairs || c_out >= p.c_out) return 0;
      return weight[c_out * p.w_stride_out + c * p.w_stride_in + kd * p.w_stride_k[0] + kh * p.w_stride_k[1] +
                    kw * p.w_stride_k[2]];
    };
    if constexpr (kHalf) {
      to[i] = uint32_t(read(channel + 2 * t)) | uint32_t(read(channel + 2 * t + 1)) << 16;
    } else if constexpr (kMath == ConvMath::kTf32x3) {
      uint32_t* const at = to + i / 128 * 256 + i % 128;
      split_for_tf32(read(channel + t + part * 4), at, at + 128);
    } else {
      to[i] = to_tf32(read(channel + t + part * 4));
    }
  }
}

// The words of a unit of dy for a step of K, column g of tile j: of half types position 8 j + g, else 4 g + j.
template <ConvMath kMath>
struct Columns {
  static constexpr bool kHalf = conv_channels_per_word(kMath) == 2, kSplit = kMath == ConvMath::kTf32x3;
  uint32_t v[4][2], rest[kSplit ? 4 : 1][2];

  // `step`: from the first sixteen positions to the others; `far`: to the channels of the second word in TF32.
  __device__ __forceinline__ void load(uint32_t from, int step, int far) {
    if constexpr (kHalf) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t b[4];
        load_matrices_transposed(b, from + i * step);
        v[2 * i][0] = b[0], v[2 * i][1] = b[1], v[2 * i + 1][0] = b[2], v[2 * i + 1][1] = b[3];
      }
    } else {
      const uint4 one = load_shared_16(from), two = load_shared_16(from + far);
      const uint32_t words[4][2] = {{one.x, two.x}, {one.y, two.y}, {one.z, two.z}, {one.w, two.w}};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kSplit) {
            split_for_tf32(__uint_as_float(words[j][i]), &v[j][i], &rest[j][i]);
          } else {
            v[j][i] = to_tf32(__uint_as_float(words[j][i]));
          }
        }
      }
    }
  }
};

template <ConvMath kMath, int kRowTiles>
__device__ __forceinline__ void multiply(float (&acc)[kRowTiles][4][4],
                                         const uint32_t (&a)[kRowTiles * conv_split_factor(kMath)][4],
                                         const Columns<kMath>& b) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kMath == ConvMath::kTf32x3) {
        mma_tf32x3(acc[m][j], a[2 * m], a[2 * m + 1], b.v[j][0], b.v[j][1], b.rest[j][0], b.rest[j][1]);
      } else if constexpr (kMath == ConvMath::kTf32) {
        mma_tf32(acc[m][j], a[m], b.v[j][0], b.v[j][1]);
      } else if constexpr (kMath == ConvMath::kBf16) {
        mma_bf16(acc[m][j], a[m], b.v[j][0], b.v[j][1]);
      } else {
        mma_fp16(acc[m][j], a[m], b.v[j][0], b.v[j][1]);
      }
    }
  }
}

}  // namespace few_dgrad

template <ConvMath kMath, int kRowTiles, int kUnits, bool kMarches>
__global__ void __launch_bounds__(kFewDgradThreads, few_dgrad_blocks_per_sm(kMath, kRowTiles))
    conv_few_dgrad_kernel(const __grid_constant__ FewDgradParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using namespace few_dgrad;
  constexpr bool kHalf = conv_channels_per_word(kMath) == 2;
  constexpr int kParts = conv_split_factor(kMath);
  using Bits = std::conditional_t<kHalf, unsigned short, float>;
  using Element =
      std::conditional_t<!kHalf, float, std::conditional_t<kMath == ConvMath::kBf16, __nv_bfloat16, __half>>;
  constexpr int kSize = sizeof(Element);
  extern __shared__ __align__(128) char smem_bytes[];
  const FewDgradPlan& plan = p.plan;
  const FewDgradLayout layout = few_dgrad_layout(plan, p.c_in);
  int* const offsets = reinterpret_cast<int*>(smem_bytes + layout.offsets);
  int2* const units = reinterpret_cast<int2*>(smem_bytes + layout.units);
  CopiedRow* const rows = reinterpret_cast<CopiedRow*>(smem_bytes + layout.rows);
  CopiedRow* const dx_rows = reinterpret_cast<CopiedRow*>(smem_bytes + layout.dx_rows);
  char* const stages = smem_bytes + layout.stages;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int tile_d = plan.tile[0], tile_h = plan.tile[1], halo_rows = plan.halo[0] * plan.halo[1];
  const int out_rows = p.c_in * tile_d * tile_h;
  const int row_words = plan.units_w * kFewDgradUnit + 4;  // of the sums

  pack_weights<kMath>(p, reinterpret_cast<uint32_t*>(smem_bytes + layout.weights));
  const int taps = plan.kernel[0] * plan.kernel[1];
  constexpr int kPairs = kHalf ? 2 : 1, kSteps = kMarches ? kFewDgradTaps : 1;
  for (int i = tid; i < plan.k_steps / kSteps * kPairs; i += kFewDgradThreads) {
    // Marching, of the last tap of the height, whose row of dy is the first.
    const int pair = few_dgrad_pair(plan, i / kPairs * kSteps + kSteps - 1, i % kPairs);
    const int kd = pair % taps / plan.kernel[1], kh = pair % plan.kernel[1];
    const int row =
        (plan.kernel[0] - 1 - kd) * plan.dilation[0] * plan.halo[1] + (plan.kernel[1] - 1 - kh) * plan.dilation[1];
    offsets[i] = pair < plan.channels / 8 * taps ? pair / taps * 8 * plan.channel + row * plan.pitch : -1;
  }
  for (int i = tid; i < kFewDgradWarps * kUnits; i += kFewDgradThreads) {
    // Marching, a warp's units are neighbouring rows.
    const int across = i / kUnits % plan.units_w, down = i / kUnits / plan.units_w * kUnits + i % kUnits;
    const int w = kMarches ? across : i % plan.units_w, row = kMarches ? down : i / plan.units_w;
    // Units beyond the tile multiply its first for nobody.
    units[i] = row < tile_d * tile_h
                   ? make_int2((row / tile_h * plan.halo[1] + row % tile_h) * plan.pitch + w * kFewDgradUnit * kSize,
                               row * row_words + w * kFewDgradUnit)
                   : make_int2(0, -1);
  }
  list_few_rows(plan.dy_copy, rows, kFewDgradThreads, [&](int i) {
    const int h = i % plan.halo[1], d = i / plan.halo[1] % plan.halo[0], c = i / halo_rows;
    const int64_t offset = (c * p.dy_stride_c + d * p.dy_stride[0] + h * p.dy_stride[1]) * kSize / 4;
    return CopiedRow{uint32_t(offset), c * plan.channel + (d * plan.halo[1] + h) * plan.pitch, d, h};
  });
  for (int i = tid; i < out_rows; i += kFewDgradThreads) {
    const int h = i % tile_h, d = i / tile_h % tile_d, c = i / (tile_h * tile_d);
    // Its offset in elements here, and its place in words, where its sums begin.
    dx_rows[i] = CopiedRow{uint32_t(c * p.dx_stride_c + d * p.dx_stride[0] + h * p.dx_stride[1]),
                           c * plan.scratch_channel + (d * tile_h + h) * row_words + plan.padding[2], d, h};
  }
  if (tid < 32) reinterpret_cast<int*>(smem_bytes + layout.zeros)[tid] = 0;

  const int all_tiles = static_cast<int>(plan.all_tiles);
  const int tiles_h = static_cast<int>(plan.tiles[1]), in_sample = static_cast<int>(plan.tiles[0]) * tiles_h;
  struct Place {
    int64_t n;
    int d, h;
  };
  auto place_of = [&](int tile) {
    const int rest = tile % in_sample;
    return Place{tile / in_sample, rest / tiles_h * tile_d, rest % tiles_h * tile_h};
  };
  int load_tile = blockIdx.x, load_chunk = 0, load_stage = 0;
  auto load = [&] {
    if (load_tile < all_tiles) {
      const Place at = place_of(load_tile);
      const int d = at.d + plan.padding[0] - (plan.kernel[0] - 1) * plan.dilation[0];
      const int h = at.h + plan.padding[1] - (plan.kernel[1] - 1) * plan.dilation[1];
      const int channel = load_chunk * plan.channels;
      const Bits* const dy = static_cast<const Bits*>(p.dy);
      copy_few_rows<kFewDgradThreads>(
          plan.dy_copy, stages + load_stage * plan.stage_bytes,
          dy + at.n * p.dy_stride_n + channel * p.dy_stride_c + d * p.dy_stride[0] + h * p.dy_stride[1], rows,
          {d, h, 0, {plan.halo[0], plan.halo[1]}, {p.out[0], p.out[1], p.out[2]}, (p.c_out - channel) * halo_rows});
      if (++load_stage == plan.stages) load_stage = 0;
      if (++load_chunk == plan.chunks) load_chunk = 0, load_tile += gridDim.x;
    }
    cp_async_commit();
  };

  wait_for_prerequisites();
  let_dependents_start();
  __syncthreads();
  for (int i = 0; i < plan.stages - 1; ++i) load();
  const uint32_t weights = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes + layout.weights)) + lane * 16;
  const uint32_t zeros = static_cast<uint32_t>(__cvta_generic_to_shared(smem_bytes + layout.zeros));
  // Of a matrix or vector that this thread names or gets: its channel, and where along the width.
  const int in_unit = kHalf ? (lane & 7) * plan.channel + (lane >> 4) * 16 : t * plan.channel + g * 16;
  int2 unit[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) unit[u] = units[warp * kUnits + u];

  float acc[kUnits][kRowTiles][4][4];
  int tile = blockIdx.x, chunk = 0, stage = 0;
  while (tile < all_tiles) {
    if (plan.stages == 2) {
      cp_async_wait_all();
    } else {
      cp_async_wait_group<1>();
    }
    __syncthreads();  // this step's stage is there for all, and all have read the one before it
    load();
    if (chunk == 0) {
#pragma unroll
      for (int i = 0; i < kUnits * kRowTiles * 16; ++i)
        acc[i / 16 / kRowTiles][i / 16 % kRowTiles][i / 4 % 4][i % 4] = 0.f;
    }
    char* const stage_bytes = stages + stage * plan.stage_bytes;
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(stage_bytes)) + in_unit;
    const uint32_t step_weights = weights + chunk * plan.k_steps * kRowTiles * kParts * 512;
    auto load_weights = [&](uint32_t (&a)[kRowTiles* kParts][4], int k) {
#pragma unroll
      for (int m = 0; m < kRowTiles * kParts; ++m) {
        const uint4 v = load_shared_16(step_weights + (k * kRowTiles * kParts + m) * 512);
        a[m][0] = v.x, a[m][1] = v.y, a[m][2] = v.z, a[m][3] = v.w;
      }
    };
    if constexpr (kMarches) {
      // A row of dy meets all taps of the height while it is in registers, those of other rows of dx each.
#pragma unroll 1
      for (int k = 0; k < plan.k_steps; k += kFewDgradTaps) {
        uint32_t a[kFewDgradTaps][kRowTiles * kParts][4];
#pragma unroll
        for (int kh = 0; kh < kFewDgradTaps; ++kh) load_weights(a[kh], k + kh);
        const int offset = kHalf ? offsets[k / kFewDgradTaps * 2 + (lane >> 3 & 1)] : offsets[k / kFewDgradTaps];
        const uint32_t first = base + offset + unit[0].x;
#pragma unroll
        for (int row = 0; row < kUnits + kFewDgradTaps - 1; ++row) {
          Columns<kMath> b;
          b.load(kHalf && offset < 0 ? zeros : first + row * plan.pitch, kHalf && offset < 0 ? 0 : 32,
                 4 * plan.channel);
#pragma unroll
          for (int kh = 0; kh < kFewDgradTaps; ++kh) {
            const int u = row + kh - (kFewDgradTaps - 1);
            if (u >= 0 && u < kUnits) multiply<kMath, kRowTiles>(acc[u], a[kh], b);
          }
        }
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < plan.k_steps; ++k) {
        uint32_t a[kRowTiles * kParts][4];
        load_weights(a, k);
        const int offset = kHalf ? offsets[2 * k + (lane >> 3 & 1)] : offsets[k];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          Columns<kMath> b;
          b.load(kHalf && offset < 0 ? zeros : base + offset + unit[u].x, kHalf && offset < 0 ? 0 : 32,
                 4 * plan.channel);
          multiply<kMath, kRowTiles>(acc[u], a, b);
        }
      }
    }
    if (++stage == plan.stages) stage = 0;
    if (++chunk < plan.chunks) continue;
    chunk = 0;

    // The taps of the width one after the other, over the stage that was just read: nothing is loaded to it before the
    // next step's barrier.
    float* const sums = reinterpret_cast<float*>(stage_bytes);
    for (int tap = 0; tap < plan.kernel[2]; ++tap) {
      __syncthreads();
      if (tap == 0) {  // what no unit's first tap covers
        for (int i = tid; i < out_rows; i += kFewDgradThreads) {
          float* const end = sums + dx_rows[i].place - plan.padding[2] + row_words - 4;
          end[0] = end[1] = end[2] = end[3] = 0.f;
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int c = m * 16 + half * 8 + g - tap * p.c_in;
          if (c < 0 || c >= p.c_in) continue;
          float* const of_channel = sums + c * plan.scratch_channel + tap + t * (kHalf ? 2 : 8);
          // All loads before the first store, which they might depend on as far as the compiler knows.
          float v[kUnits][8];
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              v[u][i] = tap > 0 && unit[u].y >= 0
                            ? of_channel[unit[u].y + (kHalf ? i / 2 * 8 + i % 2 : i % 2 * 4 + i / 2)]
                            : 0.f;
            }
          }
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
            if (unit[u].y < 0) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              of_channel[unit[u].y + (kHalf ? i / 2 * 8 + i % 2 : i % 2 * 4 + i / 2)] =
                  v[u][i] + acc[u][m][i / 2][half * 2 + i % 2];
            }
          }
        }
      }
    }
    __syncthreads();
    const Place at = place_of(tile);
    tile += gridDim.x;
    Element* const dx =
        static_cast<Element*>(p.dx) + at.n * p.dx_stride_n + at.d * p.dx_stride[0] + at.h * p.dx_stride[1];
    const int first_row = tid >> plan.dx_across_log2;
    const int first_w = (tid & ((1 << plan.dx_across_log2) - 1)) * plan.dx_vector;
#pragma unroll 2
    for (int i = first_row; i < out_rows; i += kFewDgradThreads >> plan.dx_across_log2) {
      const CopiedRow row = dx_rows[i];
      if (at.d + row.d >= p.in[0] || at.h + row.h >= p.in[1]) continue;
      for (int w = first_w; w < p.in[2]; w += plan.dx_vector << plan.dx_across_log2) {
        const float* const from = sums + row.place + w;
        Element* const to = dx + row.words + w;
        if (kHalf && plan.dx_vector == 2) {
          const float v[2] = {from[0], from[1]};
          store_vec(to, pack<Element>(v));
        } else {
          *to = from_acc<Element>(*from);
        }
      }
    }
  }
  cp_async_wait_all();
#endif
}

}  // namespace kgopt
