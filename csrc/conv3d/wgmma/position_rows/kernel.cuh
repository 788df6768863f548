// Implicit GEMM on wgmma for channels-innermost tensors of 64 output channels and more, sm_90a.
//
// D[channel][q] = sum over taps and input channels of w[tap][channel][:] x[q + shift(tap)][:], 64 or 128 channels by
// two runs of positions a tile, one for each computing warpgroup. Positions are those of
// conv3d/wgmma/position_rows/params.h: every tap reads the same stage from another row on, and nothing is added up or
// exchanged behind the products. Rows of weight images are ordered such that a thread holds neighbouring channels of a
// position, which is what it stores.
//
// One warp loads rows of x through the tensor copy engine, one loads weights as images, eight compute. With a norm in
// front (conv3d/wgmma/position_rows/normalize.cuh) one warp loads both and three normalize; x is then loaded in pieces
// of some rows with a barrier each, so that its first rows are normalized while the others are still on their way.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/wgmma/common.cuh"
#include "conv3d/wgmma/position_rows/normalize.cuh"
#include "conv3d/wgmma/position_rows/params.h"
#include "conv3d/wgmma/position_rows/plan.h"
#include "conv3d/wgmma/position_rows/tile.cuh"

namespace kgopt {

// Without a branch, which the compiler would otherwise make around each store.
template <typename T>
__device__ __forceinline__ void store_pair_if(bool exists, T* to, const Vec<T, 2>& v) {
  if constexpr (sizeof(v) == 4) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.b32 [%1], %2; }" ::"r"(int(exists)), "l"(to),
                 "r"(reinterpret_cast<const uint32_t&>(v))
                 : "memory");
  } else {
    static_assert(sizeof(v) == 8);
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3}; }" ::"r"(int(exists)),
                 "l"(to), "f"(float(v.v[0])), "f"(float(v.v[1]))
                 : "memory");
  }
}

// An activation is all that it does behind the convolution: with a residual, a scale or moments
// conv3d/wgmma/tap_columns/kernel.cuh was faster.
template <ConvMath kMath, int kN, int kRowBytes, bool kNormalizes>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    conv_position_rows_kernel(const __grid_constant__ PositionRowsParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename WgmmaTypes<kMath>::Element;
  constexpr int kTile = kN * kWgmmaConsumers;
  constexpr int kWeightBytes = 64 * kRowBytes;
  // The tensor cores cut sums off instead of rounding them. For fp32 accuracy they add up a stage of x at a time.
  constexpr bool kPromotes = kMath == ConvMath::kTf32x3;
  extern __shared__ char smem_unaligned[];
  const PositionRowsPlan& plan = p.plan;
  const PositionRowsSmemLayout layout = position_rows_smem_layout(plan);
  const uint32_t unaligned = shared_address(smem_unaligned);
  char* const smem = smem_unaligned + ((unaligned + 1023) / 1024 * 1024 - unaligned);
  uint64_t* const x_full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const x_empty = x_full + kPositionRowsMaxStages;
  uint64_t* const w_full = x_empty + kPositionRowsMaxStages;
  uint64_t* const w_empty = w_full + kPositionRowsMaxStages;
  uint64_t* const lagging = w_empty + kPositionRowsMaxStages;
  uint64_t* const landed = lagging + 1;  // [stage][piece], where the plan normalizes
  const int tid = threadIdx.x;
  const int warpgroup = __shfl_sync(0xffffffff, tid / 128, 0);
  const int lane = tid & 31;
  const int x_bytes = position_rows_x_stage_bytes(plan);

  if (tid == 0) {
    for (int i = 0; i < kPositionRowsMaxStages; ++i) {
      barrier_init(x_full + i, kNormalizes ? 32 * kPositionRowsNormalizers : 1);
      barrier_init(x_empty + i, kWgmmaConsumers * 4);
      barrier_init(w_full + i, 1);
      barrier_init(w_empty + i, kWgmmaConsumers * 4);
    }
    for (int i = 0; kNormalizes && i < plan.x_stages * kPositionRowsPieces; ++i) barrier_init(landed + i, 1);
    barrier_init(lagging, 4);
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == kWgmmaConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kNormalizes ? 80 : 40));
    const int warp = (tid / 32) % 4;
    if (warp == 0 && lane == 0) {
      if (kPromotes) wait_for_prerequisites();  // for the copy of x
      const int row_bytes = plan.row_slots * kRowBytes;
      StageCursor s;
      for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
        const PositionRowsTile t = position_rows_tile<kTile>(p, tile);
        const int rows = rows_of_stage<kTile>(plan, t);
        const int plane = plan.by_plane(t.first_row);
        for (int kd = t.kd.first; kd < t.kd.end; ++kd) {
          for (int chunk = 0; chunk < plan.chunks; ++chunk) {
            barrier_wait(x_empty + s.stage, s.parity ^ 1);
            uint32_t to = shared_address(smem) + s.stage * x_bytes;
            int d = plane - plan.padding[0] + kd * plan.dilation[0], h = t.first_row - plane * plan.plane_rows;
            const int x_chunk = kPromotes ? (chunk < plan.chunks / 3 ? chunk : chunk - plan.chunks / 3) : chunk;
            auto load = [&](int count, uint64_t* barrier) {
              barrier_expect_bytes(barrier, count * row_bytes);
              for (int row = 0; row < count; ++row) {
                tensor_load_5d(to, p.x_map, x_chunk * (kRowBytes / int(sizeof(Element))), -plan.padding[2],
                               h - plan.padding[1], d, t.n, barrier);
                to += row_bytes;
                if (++h == plan.plane_rows) h = 0, ++d;
              }
            };
            if constexpr (kNormalizes) {
              // A stage of fewer rows completes its other pieces, too: their parity goes on with the stage's.
              for (int piece = 0; piece < kPositionRowsPieces; ++piece) {
                load(max(min(plan.piece_rows, rows - piece * plan.piece_rows), 0),
                     landed + s.stage * kPositionRowsPieces + piece);
              }
            } else {
              load(rows, x_full + s.stage);
            }
            s.advance(plan.x_stages);
          }
        }
      }
    } else if (kNormalizes ? warp == 0 && lane == 1 : warp == 1 && lane == 0) {
      wait_for_prerequisites();
      const uint64_t policy = evict_normal_policy();
      const int per_kd = plan.chunks * plan.taps[1] * plan.taps[2];
      StageCursor s;
      for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
        const PositionRowsTile t = position_rows_tile<kTile>(p, tile);
        const char* image =
            static_cast<const char*>(p.packed) + int64_t(t.m_tile * plan.taps[0] + t.kd.first) * per_kd * kWeightBytes;
        for (int i = (t.kd.end - t.kd.first) * per_kd; i > 0; --i) {
          load_image(smem + layout.weights, image, kWeightBytes, w_full, w_empty, s, policy);
          image += kWeightBytes;
          s.advance(plan.w_stages);
        }
      }
    } else if (kNormalizes && warp > 0) {
      wait_for_prerequisites();  // for the table
      auto normalize = [&](auto act) {
        normalize_stages<kMath, decltype(act)::value, kTile, kRowBytes>(p, shared_address(smem), x_bytes, landed,
                                                                        x_full, warp - 1);
      };
      if (p.norm.act == Chain::kRelu) {
        normalize(std::integral_constant<Chain, Chain::kRelu>());
      } else if (p.norm.act == Chain::kSilu) {
        normalize(std::integral_constant<Chain, Chain::kSilu>());
      } else {
        normalize(std::integral_constant<Chain, Chain::kNone>());
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kNormalizes ? 208 : 232));
  wait_for_prerequisites();  // for the bias
  const int warp = (tid / 32) % 4;
  const int g = lane >> 2, t4 = lane & 3;
  const uint32_t x_rows = shared_address(smem) + warpgroup * kN * kRowBytes;
  const uint32_t w_rows = shared_address(smem) + layout.weights;
  const int step_h = plan.dilation[1] * plan.row_slots, step_w = plan.dilation[2];
  StageCursor x, w;
  int lag = warpgroup == 0 ? plan.lag : 0;
  if (warpgroup > 0 && plan.lag > 0) barrier_wait(lagging, 0);
  float acc[kN / 2];
  float total[kPromotes ? kN / 2 : 1];

  for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
    const PositionRowsTile t = position_rows_tile<kTile>(p, tile);
    const int c0 = t.m_tile * 64 + warp * 16 + g * 2;
    const int first_slot = t.q0 - t.first_row * plan.row_slots;
    const int stages = (t.kd.end - t.kd.first) * plan.chunks;
    int x_done = -1, w_done = -1;
    bool add = false;
    if constexpr (kPromotes) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) total[i] = 0.f;
    }
    for (int stage = 0; stage < stages; ++stage) {
      barrier_wait(x_full + x.stage, x.parity);
      for (int kh = 0; kh < plan.taps[1]; ++kh) {
        for (int kw = 0; kw < plan.taps[2]; ++kw) {
          barrier_wait(w_full + w.stage, w.parity);
          const uint64_t x_descriptor = wgmma_swizzled_descriptor<kRowBytes>(
              x_rows + x.stage * x_bytes + (first_slot + kh * step_h + kw * step_w) * kRowBytes);
          const uint64_t w_descriptor = wgmma_swizzled_descriptor<kRowBytes>(w_rows + w.stage * kWeightBytes);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kRowBytes / 32; ++k) {
            wgmma_shared<WgmmaTypes<kMath>::kWgmma, kN>(acc, w_descriptor + 2 * k, x_descriptor + 2 * k, k > 0 || add);
          }
          wgmma_commit();
          wgmma_wait<1>();
          add = true;
          if (lag > 0 && --lag == 0 && lane == 0) barrier_arrive(lagging);
          if (lane == 0) {
            if (w_done >= 0) barrier_arrive(w_empty + w_done);
            if (x_done >= 0) barrier_arrive(x_empty + x_done);
          }
          x_done = -1;
          w_done = w.stage;
          w.advance(plan.w_stages);
        }
      }
      x_done = x.stage;
      x.advance(plan.x_stages);
      if constexpr (kPromotes) {
        wgmma_wait<0>();
        wgmma_use(acc);
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) total[i] += acc[i];
        add = false;
        if (lane == 0) {
          barrier_arrive(w_empty + w_done);
          barrier_arrive(x_empty + x_done);
        }
        x_done = w_done = -1;
      }
    }
    wgmma_wait<0>();
    wgmma_use(acc);
    if constexpr (kPromotes) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[i] = total[i];
    }
    if (lane == 0 && !kPromotes) {
      barrier_arrive(w_empty + w_done);
      barrier_arrive(x_empty + x_done);
    }

    const float2 bias = __ldg(reinterpret_cast<const float2*>(p.bias + c0));
    auto each = [&](auto act) {  // one question for all values
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[i] = act(acc[i] + (i % 4 < 2 ? bias.x : bias.y));
    };
    if (p.act == Chain::kRelu) {
      each([](float v) { return fast_relu(v); });
    } else if (p.act == Chain::kSilu) {
      each([](float v) { return v * fast_sigmoid(v); });
    } else {
      each([](float v) { return v; });
    }
    // Offsets are counted from the tile's first line, from which the outputs of a tile are 32 bits away at most;
    // products of strides on the way there may wrap around.
    const int q0 = t.q0 + warpgroup * kN + t4 * 2;
    const int first_plane = plan.by_plane(t.first_row), line = plan.by_row(q0);
    const int first_line = t.first_row - first_plane * plan.plane_rows;
    Element* y =
        static_cast<Element*>(p.y) + t.n * p.y_stride_n + first_plane * p.y_stride[0] + first_line * p.y_stride[1];
    asm volatile("" : "+l"(y));  // an address, to which offsets are added in one instruction each
    const uint32_t stride_w = static_cast<uint32_t>(p.y_stride[2]), stride_h = static_cast<uint32_t>(p.y_stride[1]);
    const uint32_t stride_d = static_cast<uint32_t>(p.y_stride[0]);
    int od = plan.by_plane(line), oh = line - od * plan.plane_rows, ow = q0 - line * plan.row_slots;
    uint32_t offset = (od - first_plane) * stride_d + (oh - first_line) * stride_h + ow * stride_w + c0;
    const bool exists = c0 < p.c_out;
    auto row_end = [&] { return od < p.out[0] && oh < p.out[1] && exists ? p.out[2] : 0; };  // of outputs
    int end = row_end();
    const uint32_t next_row = stride_h - plan.row_slots * stride_w, next_plane = stride_d - plan.plane_rows * stride_h;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float* const sum = acc + j * 4;
      const float v[2][2] = {{sum[0], sum[2]}, {sum[1], sum[3]}};
      store_pair_if(ow < end, y + static_cast<int>(offset), pack<Element, 2>(v[0]));
      store_pair_if(ow + 1 < end, y + static_cast<int>(offset + stride_w), pack<Element, 2>(v[1]));
      ow += 8;
      const bool wraps = ow >= plan.row_slots;  // by one row at most
      oh += wraps;
      const bool next = oh == plan.plane_rows;
      oh = next ? 0 : oh;
      od += next;
      ow -= wraps ? plan.row_slots : 0;
      offset += 8 * stride_w + (wraps ? next_row : 0) + (next ? next_plane : 0);
      end = row_end();
    }
  }
  if (lag > 0 && lane == 0) barrier_arrive(lagging);  // too little work to have come to it
#endif
}

}  // namespace kgopt
