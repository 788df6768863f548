// Implicit GEMM on wgmma for channels-innermost tensors, sm_90a.
//
// Rows of the product are positions of an output plane, numbered by the input's width: row q is output row q / W and
// input column q % W, so that a tap of depth or height moves the input's rows by whole numbers of positions and a tile
// of positions lies in shared memory as one run that every tap of the height reads from another row on. The taps of
// the width are columns: D[q][kw * c_tile + c] = sum over kd, kh, channels of x[row(kd, kh)][q][:] w[kd][kh][kw][:][c],
// and the epilogue adds the taps' columns shifted against each other along the rows. A is thus read from shared memory
// once for all taps of the width, and the product is wide enough for the tensor cores not to wait for it.
//
// Two producer warps (positions through the tensor copy engine, weights as images) and two computing warpgroups.
#pragma once

#include <cuda_runtime.h>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/pointwise.cuh"
#include "conv3d/wgmma/common.cuh"
#include "conv3d/wgmma/epilogue.cuh"
#include "conv3d/wgmma/tap_columns/params.h"
#include "conv3d/wgmma/tap_columns/plan.h"

namespace kgopt {

struct TapColumnsTile {
  int n, n_tile;
  int index;  // among the tiles of a sample
  DepthTaps kd;
};

__device__ __forceinline__ TapColumnsTile tap_columns_tile(const TapColumnsParams& p, int tile) {
  const TapColumnsPlan& plan = p.plan;
  TapColumnsTile t;
  const int rest = plan.by_n_tiles(tile);
  t.n_tile = tile - rest * plan.n_tiles;
  t.n = plan.by_tiles_per_sample(rest);
  t.index = rest - t.n * plan.tiles_per_sample;
  // The first of its planes reaches the last taps, the last plane the first ones.
  const int first_run = t.index * plan.runs;
  const int lo = plan.by_runs_per_plane(first_run) - plan.padding[0];
  const int hi = min(plan.by_runs_per_plane(first_run + plan.runs - 1), p.out[0] - 1) - plan.padding[0];
  t.kd = depth_taps(lo, hi, p.in[0], plan.taps[0], plan.dilation[0]);
  return t;
}

struct TapColumnsRun {
  int od;
  int q0;  // position of its row 0
};
__device__ __forceinline__ TapColumnsRun tap_columns_run(const TapColumnsPlan& plan, const TapColumnsTile& t, int run) {
  const int index = t.index * plan.runs + run;
  const int od = plan.by_runs_per_plane(index);
  return {od, (index - od * plan.runs_per_plane) * plan.run_strips * plan.strip_step - plan.owned_first};
}

// Rows handed over, in units of the dilation, for the taps before `tap`.
template <int kTaps>
__device__ __forceinline__ constexpr int tap_columns_handed_before(int tap) {
  constexpr int kMiddle = kTaps / 2;
  const int behind = tap < kMiddle ? tap : kMiddle, ahead = tap - behind > 0 ? tap - behind - 1 : 0;
  return behind * (2 * kMiddle - behind + 1) / 2 + ahead * (ahead + 1) / 2;
}

// A sum that only some lanes make, without a select.
__device__ __forceinline__ void add_where(bool where, float (&sum)[4], const float (&v)[4]) {
  asm("{ .reg .pred p; setp.ne.b32 p, %8, 0; @p add.f32 %0, %0, %4; @p add.f32 %1, %1, %5; @p add.f32 %2, %2, %6; "
      "@p add.f32 %3, %3, %7; }"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(int(where)));
}

// kMore: 1 with a residual or a scale, 2 with moments, too; 0 with kWide.
template <ConvMath kMath, int kTaps, int kTile, int kSegments, int kRowBytes, bool kWide, int kMore>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    conv_tap_columns_kernel(const __grid_constant__ TapColumnsParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename WgmmaTypes<kMath>::Element;
  constexpr int kN = kTaps * kTile;
  extern __shared__ char smem_unaligned[];
  const TapColumnsPlan& plan = p.plan;
  const TapColumnsSmemLayout layout = tap_columns_smem_layout(plan);
  const uint32_t unaligned = shared_address(smem_unaligned);
  char* const smem = smem_unaligned + ((unaligned + 1023) / 1024 * 1024 - unaligned);
  float* const exchange = reinterpret_cast<float*>(smem + layout.exchange);
  uint64_t* const a_full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const a_empty = a_full + kWgmmaConsumers * kTapColumnsMaxStages;
  uint64_t* const b_full = a_empty + kWgmmaConsumers * kTapColumnsMaxStages;
  uint64_t* const b_empty = b_full + kTapColumnsMaxStages;
  uint64_t* const lagging = b_empty + kTapColumnsMaxStages;
  const int tid = threadIdx.x;
  const int warpgroup = __shfl_sync(0xffffffff, tid / 128, 0);
  const int lane = tid & 31;
  const int a_bytes = tap_columns_a_stage_bytes(plan);
  const int b_bytes = kN * kRowBytes;
  const int groups_h = plan.taps[1] / plan.taps_per_stage;

  if (tid == 0) {
    for (int i = 0; i < kWgmmaConsumers * kTapColumnsMaxStages; ++i) {
      barrier_init(a_full + i, 1);
      barrier_init(a_empty + i, kWgmmaConsumers / plan.teams * 4);
    }
    for (int i = 0; i < kTapColumnsMaxStages; ++i) {
      barrier_init(b_full + i, 1);
      barrier_init(b_empty + i, kWgmmaConsumers * 4);
    }
    barrier_init(lagging, 4);
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == kWgmmaConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const int warp = (tid / 32) % 4;
    if (lane == 0 && warp % 2 == 0 && warp / 2 < plan.teams) {
      const int team = warp / 2;
      uint64_t* const full = a_full + team * kTapColumnsMaxStages;
      uint64_t* const empty = a_empty + team * kTapColumnsMaxStages;
      const uint32_t stages = shared_address(smem) + team * plan.a_stages * a_bytes;
      const uint32_t stage_load = plan.runs * plan.boxes * plan.box_rows * kRowBytes;
      StageCursor a;
      for (int tile = blockIdx.x * plan.teams + team; tile < int(plan.tiles); tile += gridDim.x * plan.teams) {
        const TapColumnsTile t = tap_columns_tile(p, tile);
        if (kMore > 0 && p.residual) {
          for (int run = 0; run < plan.runs; ++run) {
            const TapColumnsRun r = tap_columns_run(plan, t, run);
            prefetch_residual<Element>(p, t.n, r.od, r.q0, (plan.run_strips - 1) * plan.strip_step + plan.strip_rows);
          }
        }
        for (int kd = t.kd.first; kd < t.kd.end; ++kd) {
          for (int chunk = 0; chunk < plan.chunks; ++chunk) {
            for (int group = 0; group < groups_h; ++group) {
              barrier_wait(empty + a.stage, a.parity ^ 1);
              barrier_expect_bytes(full + a.stage, stage_load);
              uint32_t to = stages + a.stage * a_bytes;
              for (int run = 0; run < plan.runs; ++run) {
                const TapColumnsRun r = tap_columns_run(plan, t, run);
                const int d = r.od + kd * plan.dilation[0] - plan.padding[0];
                const int q = r.q0 + (group * plan.dilation[1] - plan.padding[1]) * p.in[2];
                for (int box = 0; box < plan.boxes; ++box) {
                  tensor_load_4d(to, p.x_map, chunk * (kRowBytes / int(sizeof(Element))), q + box * plan.box_rows, d,
                                 t.n, full + a.stage);
                  to += plan.box_rows * kRowBytes;
                }
              }
              a.advance(plan.a_stages);
            }
          }
        }
      }
    } else if (warp == 1 && lane == 0) {
      wait_for_prerequisites();
      const uint64_t policy = evict_normal_policy();
      StageCursor b;
      const int per_kd = plan.chunks * plan.taps[1];
      if (plan.teams > 1) {  // all weights stay
        barrier_expect_bytes(b_full, plan.b_stages * b_bytes);
        for (int i = 0; i < plan.b_stages; ++i) {
          bulk_load(smem + layout.weights + i * b_bytes, static_cast<const char*>(p.packed) + i * b_bytes, b_bytes,
                    b_full, policy);
        }
        return;
      }
      for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
        const TapColumnsTile t = tap_columns_tile(p, tile);
        const char* image =
            static_cast<const char*>(p.packed) + int64_t(t.n_tile * plan.taps[0] + t.kd.first) * per_kd * b_bytes;
        for (int i = (t.kd.end - t.kd.first) * per_kd; i > 0; --i) {
          load_image(smem + layout.weights, image, b_bytes, b_full, b_empty, b, policy);
          image += b_bytes;
          b.advance(plan.b_stages);
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  wait_for_prerequisites();  // for the bias
  const int warp = (tid / 32) % 4;
  const int g = lane >> 2, t4 = lane & 3;
  const bool resident = plan.teams > 1;
  const int team = resident ? warpgroup : 0;
  const int first_segment = resident ? 0 : warpgroup * kSegments;  // of this warpgroup in a tile
  // Where the rows of each segment begin in a stage, in units of the descriptor.
  uint32_t segment_rows[kSegments];
#pragma unroll
  for (int m = 0; m < kSegments; ++m) {
    const TapColumnsSegment& segment = plan.segment[first_segment + m];
    segment_rows[m] = (segment.run * plan.boxes * plan.box_rows + segment.run_row) * kRowBytes / 16;
  }
  const uint32_t a_rows = shared_address(smem) + team * plan.a_stages * a_bytes;
  uint64_t* const my_full = a_full + team * kTapColumnsMaxStages;
  uint64_t* const my_empty = a_empty + team * kTapColumnsMaxStages;
  const uint32_t b_rows = shared_address(smem) + layout.weights;
  const uint32_t tap_bytes = plan.dilation[1] * p.in[2] * kRowBytes;
  StageCursor a, b;
  int lag = warpgroup == 0 ? plan.lag : 0;
  if (warpgroup > 0 && plan.lag > 0) barrier_wait(lagging, 0);
  if (resident) barrier_wait(b_full, 0);
  float acc[kSegments][kN / 2];
  TapColumnsMoments<kTile> moments;
  int moments_n = 0, moments_n_tile = 0;  // of the tiles before
  auto flush_moments = [&] {
    const int local = sizeof(Element) == 4 ? g / 4 * 16 + t4 * 4 + g % 4 : t4 * 8 + g;
    moments.flush(p, moments_n, moments_n_tile * kTile + local);
  };

  for (int tile = blockIdx.x * plan.teams + team; tile < int(plan.tiles); tile += gridDim.x * plan.teams) {
    const TapColumnsTile t = tap_columns_tile(p, tile);
    if (resident) b.stage = t.kd.first * plan.chunks * plan.taps[1];
    const int stages = (t.kd.end - t.kd.first) * plan.chunks * groups_h;
    int a_done = -1, b_done = -1;
    bool add = false;
    for (int stage = 0; stage < stages; ++stage) {
      barrier_wait(my_full + a.stage, a.parity);
      for (int tap = 0; tap < plan.taps_per_stage; ++tap) {
        if (!resident) barrier_wait(b_full + b.stage, b.parity);
        uint64_t a_descriptor = wgmma_swizzled_descriptor<kRowBytes>(a_rows + a.stage * a_bytes + tap * tap_bytes);
        const uint64_t b_descriptor = wgmma_swizzled_descriptor<kRowBytes>(b_rows + b.stage * b_bytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
          for (int m = 0; m < kSegments; ++m) {
            wgmma_shared<WgmmaTypes<kMath>::kWgmma, kN>(acc[m], a_descriptor + segment_rows[m] + 2 * k,
                                                        b_descriptor + 2 * k, k > 0 || add);
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
        add = true;
        if (lag > 0 && --lag == 0 && lane == 0) barrier_arrive(lagging);
        if (lane == 0) {
          if (b_done >= 0 && !resident) barrier_arrive(b_empty + b_done);
          if (a_done >= 0) barrier_arrive(my_empty + a_done);
        }
        a_done = -1;
        b_done = b.stage;
        b.advance(plan.b_stages);
      }
      a_done = a.stage;
      a.advance(plan.a_stages);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < kSegments; ++m) wgmma_use(acc[m]);
    if (lane == 0) {
      if (!resident) barrier_arrive(b_empty + b_done);
      barrier_arrive(my_empty + a_done);
    }

    // Epilogue. First the rows that other warps need: the first of taps that look ahead, the last of those that look
    // back.
    constexpr int kMiddle = kTaps / 2;
    const int dilation = plan.dilation[2];
    const int handed = tap_columns_exchanged_rows(kTaps, dilation);
    float* const handed_over = exchange + warpgroup * kSegments * 4 * handed * kTile + t4 * 8;
    auto at = [](int tap, int block, int half, int i) {  // of one of 8 neighbouring channels in the accumulators
      return (tap * kTile / 8 + block * 4 + i / 2) * 4 + i % 2 + 2 * half;
    };
    if constexpr (kTaps > 1) {
      named_barrier(1 + warpgroup, 128);  // all have read what the tile before left here
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        if (tap == kMiddle) continue;
        const bool ahead = tap > kMiddle;
        const int count = abs(tap - kMiddle) * dilation;
        const int row = ahead ? g : g - (8 - count);
        if (row >= 0 && row < count) {
#pragma unroll
          for (int m = 0; m < kSegments; ++m) {
            float* const to =
                handed_over +
                ((m * 4 + warp) * handed + tap_columns_handed_before<kTaps>(tap) * dilation + row) * kTile;
#pragma unroll
            for (int block = 0; block < kTile / 32; ++block) {
#pragma unroll
              for (int i = 0; i < 8; i += 2) {
                const float* const v = acc[m] + at(tap, block, ahead ? 0 : 1, i);
                *reinterpret_cast<float2*>(to + block * 32 + i) = make_float2(v[0], v[1]);
              }
            }
          }
        }
      }
      named_barrier(1 + warpgroup, 128);
    }

    // Then the taps are added up in the accumulators of the middle one, all without a branch.
    int column[kSegments][2];
    int oh[kSegments][2];
    uint32_t stored = 0;  // a bit for each row of this thread whose outputs it writes
#pragma unroll
    for (int m = 0; m < kSegments; ++m) {
      const TapColumnsSegment& segment = plan.segment[first_segment + m];
      const TapColumnsRun r = tap_columns_run(plan, t, segment.run);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int in_segment = warp * 16 + half * 8 + g, row = segment.strip_row + in_segment;
        const int q = r.q0 + segment.run_row + in_segment;
        oh[m][half] = plan.by_width(max(q, 0));
        column[m][half] = q - oh[m][half] * p.in[2];
        if (r.od < p.out[0] && q >= 0 && oh[m][half] < p.out[1] && row >= plan.owned_first && row < plan.owned_end &&
            (kWide || uint32_t(column[m][half] + plan.anchor_to_out) < uint32_t(p.out[2]))) {
          stored |= 1u << (m * 2 + half);
        }
      }
    }
    // Thread t4's channels of a block of 32: two times 4 from here on.
    constexpr int kNextFour = sizeof(Element) == 4 ? 16 : 4;
    const int c_local = t4 * (sizeof(Element) == 4 ? 4 : 8), c0 = t.n_tile * kTile + c_local;
    const int channels_left = p.c_out - c0;
    auto offset_of = [&](int m, int half) {
      const int od = plan.by_runs_per_plane(t.index * plan.runs + plan.segment[first_segment + m].run);
      const int ow = column[m][half] + plan.anchor_to_out;
      return od * p.y_stride[0] + oh[m][half] * p.y_stride[1] + ow * p.y_stride[2];
    };
    const int64_t first_offset = t.n * p.y_stride_n + c0 * p.y_stride_c;
#pragma unroll
    for (int m = 0; m < kSegments; ++m) {
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        if (tap == kMiddle) continue;
        // Row r + shift of this warp's 16, or of the next or last warp's.
        const bool ahead = tap > kMiddle;
        const int shift = (tap - kMiddle) * dilation;
        const int source = (lane + 4 * shift) & 31;
        const bool wraps = ahead ? g < shift : g >= 8 + shift;  // rows that go from one eight to the other
        const int neighbour = ahead ? min(m * 4 + warp + 1, kSegments * 4 - 1) : max(m * 4 + warp - 1, 0);
        const int row = ahead ? min(g, shift - 1) : max(g - (8 + shift), 0);
        const float* const from =
            handed_over + (neighbour * handed + tap_columns_handed_before<kTaps>(tap) * dilation + row) * kTile;
        const bool inside[2] = {uint32_t(column[m][0] + shift) < uint32_t(p.in[2]),
                                uint32_t(column[m][1] + shift) < uint32_t(p.in[2])};
#pragma unroll
        for (int block = 0; block < kTile / 32; ++block) {
#pragma unroll
          for (int i0 = 0; i0 < 8; i0 += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + block * 32 + i0);
            const float other[4] = {four.x, four.y, four.z, four.w};
            float low[4], high[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float v0 = acc[m][at(tap, block, 0, i0 + i)], v1 = acc[m][at(tap, block, 1, i0 + i)];
              low[i] = __shfl_sync(0xffffffff, wraps ? (ahead ? v1 : other[i]) : v0, source);
              high[i] = __shfl_sync(0xffffffff, wraps ? (ahead ? other[i] : v0) : v1, source);
            }
            float sum[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[i] = acc[m][at(kMiddle, block, half, i0 + i)];
              add_where(inside[half], sum, half == 0 ? low : high);
#pragma unroll
              for (int i = 0; i < 4; ++i) acc[m][at(kMiddle, block, half, i0 + i)] = sum[i];
            }
          }
        }
      }
    }

    // Bias, residual, scale and activation.
    auto finish = [&](int tap) {
#pragma unroll
      for (int block = 0; block < kTile / 32; ++block) {
        float bias[8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const float4 v = *reinterpret_cast<const float4*>(p.bias + c0 + block * 32 + i / 4 * kNextFour);
          bias[i] = v.x, bias[i + 1] = v.y, bias[i + 2] = v.z, bias[i + 3] = v.w;
        }
#pragma unroll
        for (int m = 0; m < kSegments; ++m) {
#pragma unroll
          for (int i = 0; i < 16; ++i) acc[m][at(tap, block, i / 8, i % 8)] += bias[i % 8];
        }
      }
      if (kMore > 0 && p.residual) {
        // All loads first: the accumulators of the outer taps are free to hold them.
        const Element* const from = static_cast<const Element*>(p.residual) + first_offset;
        TapColumnsResidual<Element, kSegments * 2, kTile> residual;
#pragma unroll
        for (int row = 0; row < kSegments * 2; ++row) {
          residual.load(row, from + offset_of(row / 2, row % 2), stored >> row & 1, channels_left);
        }
#pragma unroll
        for (int row = 0; row < kSegments * 2; ++row) {
#pragma unroll
          for (int i = 0; i < kTile / 4; ++i) {
            acc[row / 2][at(tap, i / 8, row % 2, i % 8)] += residual.at(row, i / 8, i % 8);
          }
        }
      }
      if (kMore > 0 && p.scale != 1.f) {
#pragma unroll
        for (int i = 0; i < kSegments * kTile / 2; ++i)
          acc[i / (kTile / 2)][tap * kTile / 2 + i % (kTile / 2)] *= p.scale;
      }
      if (p.act == Chain::kRelu) {
#pragma unroll
        for (int i = 0; i < kSegments * kTile / 2; ++i) {
          float& v = acc[i / (kTile / 2)][tap * kTile / 2 + i % (kTile / 2)];
          v = fast_relu(v);
        }
      } else if (p.act == Chain::kSilu) {
#pragma unroll
        for (int i = 0; i < kSegments * kTile / 2; ++i) {
          float& v = acc[i / (kTile / 2)][tap * kTile / 2 + i % (kTile / 2)];
          v *= fast_sigmoid(v);
        }
      }
    };
    finish(kMiddle);

    // Outputs left and right of all input columns: one tap reaches them, whose accumulators hold them.
    uint32_t beyond[2] = {};
    if constexpr (kWide) {
#pragma unroll
      for (int m = 0; m < kSegments * 2; ++m) {
        const int w = column[m / 2][m % 2];
        if (stored >> m & 1 && plan.anchor_to_out == 1 && w == 0) beyond[0] |= 1u << m;
        if (stored >> m & 1 && w == p.in[2] - 1 && w + plan.anchor_to_out + 1 < p.out[2]) beyond[1] |= 1u << m;
      }
      if (__any_sync(0xffffffff, beyond[0])) finish(kTaps - 1);
      if (__any_sync(0xffffffff, beyond[1])) finish(0);
    }

    Element* const y = static_cast<Element*>(p.y) + first_offset;
    auto store = [&](int64_t offset, int m, int half, int tap) {
#pragma unroll
      for (int block = 0; block < kTile / 32; ++block) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = acc[m][at(tap, block, half, i)];
        const bool valid[2] = {block * 32 < channels_left, block * 32 + kNextFour < channels_left};
        if (kWide && p.y_stride_c != 1) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (valid[i / 4]) {
              y[offset + (block * 32 + i / 4 * kNextFour + i % 4) * p.y_stride_c] = from_acc<Element>(v[i]);
            }
          }
        } else if constexpr (sizeof(Element) == 4) {
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            if (valid[i / 4]) {
              store_result(y + offset + block * 32 + i / 4 * kNextFour,
                           Vec<Element, 4>{{v[i], v[i + 1], v[i + 2], v[i + 3]}});
            }
          }
        } else if (valid[0]) {
          store_result(y + offset + block * 32, pack<Element, 8>(v));
        }
      }
    };
#pragma unroll
    for (int m = 0; m < kSegments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int bit = m * 2 + half;
        const int64_t offset = offset_of(m, half);
        if (kWide && uint32_t(column[m][half] + plan.anchor_to_out) >= uint32_t(p.out[2])) stored &= ~(1u << bit);
        if (stored >> bit & 1) store(offset, m, half, kMiddle);
        if constexpr (kWide) {
          if (beyond[0] >> bit & 1) store(offset - p.y_stride[2], m, half, kTaps - 1);
          if (beyond[1] >> bit & 1) store(offset + p.y_stride[2], m, half, 0);
        }
      }
    }

    if constexpr (kMore > 1) {
      auto value = [&](int row, int block, int i) {
        const float v = acc[row / 2][at(kMiddle, block, row % 2, i)];
        return std::is_same_v<Element, __half> ? __half2float(__float2half_rn(v)) : v;  // which may be Inf
      };
      if (t.n != moments_n || t.n_tile != moments_n_tile) {
        flush_moments();
        moments_n = t.n, moments_n_tile = t.n_tile;
      }
      moments.template add<kSegments * 2>(value, stored);
    }
  }
  if constexpr (kMore > 1) flush_moments();
  if (lag > 0 && lane == 0) barrier_arrive(lagging);  // too little work to have come to it
#endif
}

}  // namespace kgopt
