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

#include "../common/async.cuh"
#include "../common/dtype.cuh"
#include "../common/pointwise.cuh"
#include "../common/wgmma.cuh"
#include "conv3d_hopper_params.h"
#include "conv3d_hopper_plan.h"

namespace kgopt {

inline constexpr int kHopperThreads = (kHopperConsumers + 1) * 128;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void tensor_load_4d(uint32_t shared, const void* map, int c, int q, int d, int n,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(map), "r"(c), "r"(q), "r"(d), "r"(n), "r"(shared_address(barrier))
      : "memory");
}
#endif

// Index of a stage in a ring and the parity of its barriers.
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct HopperTile {
  int n, n_tile;
  int index;             // among the tiles of a sample
  int kd_first, kd_end;  // taps of the depth that read inside the tensor; at least one, which may read zeros
};

__device__ __forceinline__ HopperTile hopper_tile(const HopperParams& p, uint32_t tile) {
  const HopperPlan& plan = p.plan;
  HopperTile t;
  t.n_tile = tile % plan.n_tiles;
  tile /= plan.n_tiles;
  t.index = tile % plan.tiles_per_sample;
  t.n = tile / plan.tiles_per_sample;
  // The first of its planes reaches the last taps, the last plane the first ones.
  const int step = plan.dilation[0], first_run = t.index * plan.runs;
  const int lo = int(uint32_t(first_run) / uint32_t(plan.runs_per_plane)) - plan.padding[0];
  const int hi =
      min(int(uint32_t(first_run + plan.runs - 1) / uint32_t(plan.runs_per_plane)), p.out[0] - 1) - plan.padding[0];
  t.kd_first = hi < 0 ? (-hi + step - 1) / step : 0;
  t.kd_end = lo >= p.in[0] ? 0 : min(plan.taps[0], (p.in[0] - 1 - lo) / step + 1);
  if (t.kd_first >= t.kd_end) t.kd_first = 0, t.kd_end = 1;
  return t;
}

struct HopperRun {
  int od;
  int q0;  // position of its row 0
};
__device__ __forceinline__ HopperRun hopper_run(const HopperPlan& plan, const HopperTile& t, int run) {
  const uint32_t index = t.index * plan.runs + run;
  const uint32_t od = index / uint32_t(plan.runs_per_plane);
  return {int(od), int(index - od * plan.runs_per_plane) * plan.run_step - plan.owned_first};
}

template <ConvMath kMath>
struct HopperTypes {
  using Element = float;
  static constexpr WgmmaType kWgmma = WgmmaType::kTf32;
};
template <>
struct HopperTypes<ConvMath::kBf16> {
  using Element = __nv_bfloat16;
  static constexpr WgmmaType kWgmma = WgmmaType::kBf16;
};
template <>
struct HopperTypes<ConvMath::kFp16> {
  using Element = __half;
  static constexpr WgmmaType kWgmma = WgmmaType::kFp16;
};

__device__ __forceinline__ void hopper_act(Chain chain, float (&v)[8]) {
  if (chain == Chain::kRelu) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fast_relu(v[i]);
  } else if (chain == Chain::kSilu) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= fast_sigmoid(v[i]);
  }
}

// Rows handed over, in units of the dilation, for the taps before `tap`.
KGOPT_HD constexpr int hopper_handed_before(int tap, int taps) {
  int rows = 0;
  for (int j = 0; j < tap; ++j) rows += j < taps / 2 ? taps / 2 - j : j - taps / 2;
  return rows;
}

// Column x of a tap's c_tile columns holds this output channel of the tile: a thread then finds 8 neighbouring channels
// in its accumulators of 32 columns.
KGOPT_HD int hopper_column_channel(int x) { return x / 32 * 32 + x % 8 / 2 * 8 + x % 32 / 8 * 2 + x % 2; }

template <ConvMath kMath, int kTaps, int kTile, int kSegments, int kRowBytes, bool kStats>
__global__ void __launch_bounds__(kHopperThreads, 1) conv_hopper_kernel(const __grid_constant__ HopperParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Element = typename HopperTypes<kMath>::Element;
  constexpr int kN = kTaps * kTile;
  constexpr int kRows = kHopperConsumers * kSegments * 64;
  constexpr int kUnits = kRows / 16;  // rows of a warp in a segment
  extern __shared__ char smem_unaligned[];
  const HopperPlan& plan = p.plan;
  const HopperSmemLayout layout = hopper_smem_layout(plan);
  const uint32_t unaligned = shared_address(smem_unaligned);
  char* const smem = smem_unaligned + ((unaligned + 1023) / 1024 * 1024 - unaligned);
  float* const exchange = reinterpret_cast<float*>(smem + layout.exchange);
  uint64_t* const a_full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const a_empty = a_full + kHopperMaxStages;
  uint64_t* const b_full = a_empty + kHopperMaxStages;
  uint64_t* const b_empty = b_full + kHopperMaxStages;
  const int tid = threadIdx.x;
  const int warpgroup = __shfl_sync(0xffffffff, tid / 128, 0);
  const int lane = tid & 31;
  const int a_bytes = hopper_a_stage_bytes(plan);
  const int b_bytes = kN * kRowBytes;
  const int groups_h = plan.taps[1] / plan.taps_per_stage;

  if (tid == 0) {
    for (int i = 0; i < kHopperMaxStages; ++i) {
      barrier_init(a_full + i, 1);
      barrier_init(b_full + i, 1);
      barrier_init(a_empty + i, kHopperConsumers * 4);
      barrier_init(b_empty + i, kHopperConsumers * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == kHopperConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const int warp = (tid / 32) % 4;
    if (warp == 0 && lane == 0) {
      const uint32_t stages = shared_address(smem);
      const uint32_t stage_load = plan.runs * plan.boxes * plan.box_rows * kRowBytes;
      StageCursor a;
      for (uint32_t tile = blockIdx.x; tile < uint32_t(plan.tiles); tile += gridDim.x) {
        const HopperTile t = hopper_tile(p, tile);
        for (int kd = t.kd_first; kd < t.kd_end; ++kd) {
          for (int chunk = 0; chunk < plan.chunks; ++chunk) {
            for (int group = 0; group < groups_h; ++group) {
              barrier_wait(a_empty + a.stage, a.parity ^ 1);
              barrier_expect_bytes(a_full + a.stage, stage_load);
              uint32_t to = stages + a.stage * a_bytes;
              for (int run = 0; run < plan.runs; ++run) {
                const HopperRun r = hopper_run(plan, t, run);
                const int d = r.od + kd * plan.dilation[0] - plan.padding[0];
                const int q = r.q0 + (group * plan.dilation[1] - plan.padding[1]) * p.in[2];
                for (int box = 0; box < plan.boxes; ++box) {
                  tensor_load_4d(to, p.x_map, chunk * (kRowBytes / int(sizeof(Element))), q + box * plan.box_rows, d,
                                 t.n, a_full + a.stage);
                  to += plan.box_rows * kRowBytes;
                }
              }
              a.advance(plan.a_stages);
            }
          }
        }
      }
    } else if (warp == 1 && lane == 0) {
      const uint64_t policy = evict_normal_policy();
      StageCursor b;
      const int per_kd = plan.chunks * plan.taps[1];
      for (uint32_t tile = blockIdx.x; tile < uint32_t(plan.tiles); tile += gridDim.x) {
        const HopperTile t = hopper_tile(p, tile);
        const char* image =
            static_cast<const char*>(p.packed) + int64_t(t.n_tile * plan.taps[0] + t.kd_first) * per_kd * b_bytes;
        for (int i = (t.kd_end - t.kd_first) * per_kd; i > 0; --i) {
          barrier_wait(b_empty + b.stage, b.parity ^ 1);
          barrier_expect_bytes(b_full + b.stage, b_bytes);
          bulk_load(smem + layout.weights + b.stage * b_bytes, image, b_bytes, b_full + b.stage, policy);
          image += b_bytes;
          b.advance(plan.b_stages);
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int warp = (tid / 32) % 4;
  const int g = lane >> 2, t4 = lane & 3;
  // Where the rows of each segment begin in a stage, in units of the descriptor.
  uint32_t segment_rows[kSegments];
#pragma unroll
  for (int m = 0; m < kSegments; ++m) {
    const int row = (warpgroup * kSegments + m) * 64, run = row / plan.run_rows;
    segment_rows[m] = (run * plan.boxes * plan.box_rows + row - run * plan.run_rows) * kRowBytes / 16;
  }
  const uint32_t a_rows = shared_address(smem);
  const uint32_t b_rows = shared_address(smem) + layout.weights;
  const uint32_t tap_bytes = plan.dilation[1] * p.in[2] * kRowBytes;
  StageCursor a, b;
  float acc[kSegments][kN / 2];

  for (uint32_t tile = blockIdx.x; tile < uint32_t(plan.tiles); tile += gridDim.x) {
    const HopperTile t = hopper_tile(p, tile);
    const int stages = (t.kd_end - t.kd_first) * plan.chunks * groups_h;
    int a_done = -1, b_done = -1;
    bool add = false;
    for (int stage = 0; stage < stages; ++stage) {
      barrier_wait(a_full + a.stage, a.parity);
      for (int tap = 0; tap < plan.taps_per_stage; ++tap) {
        barrier_wait(b_full + b.stage, b.parity);
        uint64_t a_descriptor = wgmma_swizzled_descriptor<kRowBytes>(a_rows + a.stage * a_bytes + tap * tap_bytes);
        const uint64_t b_descriptor = wgmma_swizzled_descriptor<kRowBytes>(b_rows + b.stage * b_bytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
          for (int m = 0; m < kSegments; ++m) {
            wgmma_shared<HopperTypes<kMath>::kWgmma, kN>(acc[m], a_descriptor + segment_rows[m] + 2 * k,
                                                         b_descriptor + 2 * k, k > 0 || add);
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
        add = true;
        if (lane == 0) {
          if (b_done >= 0) barrier_arrive(b_empty + b_done);
          if (a_done >= 0) barrier_arrive(a_empty + a_done);
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
      barrier_arrive(b_empty + b_done);
      barrier_arrive(a_empty + a_done);
    }

    // Epilogue. First the rows that other warps need: the first of taps that look ahead, the last of those that look
    // back.
    const int dilation = plan.dilation[2];
    const int handed = hopper_exchanged_rows(kTaps, dilation);
    if constexpr (kTaps > 1) {
      named_barrier(1, kHopperConsumers * 128);  // all have read what the tile before left here
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        if (tap == kTaps / 2) continue;
        const bool ahead = tap > kTaps / 2;
        const int count = abs(tap - kTaps / 2) * dilation;
        const int row = ahead ? g : g - (8 - count);
        if (row >= 0 && row < count) {
#pragma unroll
          for (int m = 0; m < kSegments; ++m) {
            const int unit = (warpgroup * kSegments + m) * 4 + warp;
            float* const to =
                exchange + (unit * handed + hopper_handed_before(tap, kTaps) * dilation + row) * kTile + t4 * 8;
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
              const float* const v = acc[m] + (tap * kTile / 8 + j) * 4 + (ahead ? 0 : 2);
              *reinterpret_cast<float2*>(to + j / 4 * 32 + j % 4 * 2) = make_float2(v[0], v[1]);
            }
          }
        }
      }
      named_barrier(1, kHopperConsumers * 128);
    }

    const int channels_left = p.c_out - t.n_tile * kTile - t4 * 8;
    Element* const y = static_cast<Element*>(p.y);
    // Finishes 8 channels of a position and stores them.
    auto put = [&](int64_t at, float (&v)[8], const float (&bias)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] += bias[i];
      hopper_act(p.act, v);
      if (p.y_stride_c != 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) y[at + i * p.y_stride_c] = from_acc<Element>(v[i]);
      } else if constexpr (sizeof(Element) == 4) {
        *reinterpret_cast<float4*>(y + at) = make_float4(v[0], v[1], v[2], v[3]);
        *reinterpret_cast<float4*>(y + at + 4) = make_float4(v[4], v[5], v[6], v[7]);
      } else {
        store_vec(y + at, pack<Element, 8>(v));
      }
    };
    // With statistics, what was stored goes back into the accumulators: an output into those of the middle tap, the
    // outputs beyond the input's columns into those of the only tap that reaches them.
    auto keep = [&](int m, int tap, int block, int half, const float (&v)[8]) {
      if constexpr (kStats) {
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[m][(tap * kTile / 8 + block * 4 + i / 2) * 4 + i % 2 + 2 * half] = v[i];
      }
    };
    uint32_t kept[3] = {};  // first tap, middle, last tap: one bit for each row of this thread
#pragma unroll
    for (int m = 0; m < kSegments; ++m) {
      const int unit = (warpgroup * kSegments + m) * 4 + warp;
      const int run = unit * 16 / plan.run_rows;
      const HopperRun r = hopper_run(plan, t, run);
      // This thread's two rows: where their outputs go, and their input columns.
      int64_t offset[2];
      int column[2];
      bool store[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = unit * 16 + half * 8 + g - run * plan.run_rows;
        const int q = r.q0 + row;
        const int oh = static_cast<int>(uint32_t(max(q, 0)) / uint32_t(p.in[2]));
        column[half] = q - oh * p.in[2];
        const int ow = column[half] + plan.anchor_to_out;
        store[half] = r.od < p.out[0] && q >= 0 && oh < p.out[1] && row >= plan.owned_first && row < plan.owned_end;
        offset[half] = t.n * p.y_stride_n + r.od * p.y_stride[0] + oh * p.y_stride[1] + ow * p.y_stride[2] +
                       (t.n_tile * kTile + t4 * 8) * p.y_stride_c;
      }
#pragma unroll
      for (int block = 0; block < kTile / 32; ++block) {
        float bias[8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const float4 v = *reinterpret_cast<const float4*>(p.bias + t.n_tile * kTile + block * 32 + t4 * 8 + i);
          bias[i] = v.x, bias[i + 1] = v.y, bias[i + 2] = v.z, bias[i + 3] = v.w;
        }
        float out[2][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int at = (kTaps / 2 * kTile / 8 + block * 4 + i / 2) * 4 + i % 2;
          out[0][i] = acc[m][at];
          out[1][i] = acc[m][at + 2];
        }
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          if (tap == kTaps / 2) continue;
          // Row r + shift of this warp's 16, or of the next or last warp's.
          const bool ahead = tap > kTaps / 2;
          const int shift = (tap - kTaps / 2) * dilation;
          const int source = (lane + 4 * shift) & 31;
          const bool wraps = ahead ? g < shift : g >= 8 + shift;  // rows that go from one eight to the other
          float other[8] = {};
          if (wraps) {
            const int neighbour = ahead ? min(unit + 1, kUnits - 1) : max(unit - 1, 0);
            const float* const from =
                exchange +
                (neighbour * handed + hopper_handed_before(tap, kTaps) * dilation + (ahead ? g : g - (8 + shift))) *
                    kTile +
                block * 32 + t4 * 8;
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
              const float4 w = *reinterpret_cast<const float4*>(from + i);
              other[i] = w.x, other[i + 1] = w.y, other[i + 2] = w.z, other[i + 3] = w.w;
            }
          }
          const bool inside[2] = {uint32_t(column[0] + shift) < uint32_t(p.in[2]),
                                  uint32_t(column[1] + shift) < uint32_t(p.in[2])};
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int at = (tap * kTile / 8 + block * 4 + i / 2) * 4 + i % 2;
            const float low = __shfl_sync(0xffffffff, wraps ? (ahead ? acc[m][at + 2] : other[i]) : acc[m][at], source);
            const float high =
                __shfl_sync(0xffffffff, wraps ? (ahead ? other[i] : acc[m][at]) : acc[m][at + 2], source);
            if (inside[0]) out[0][i] += low;
            if (inside[1]) out[1][i] += high;
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!store[half] || block * 32 >= channels_left) continue;
          const int ow = column[half] + plan.anchor_to_out;
          const int64_t at = offset[half] + block * 32 * p.y_stride_c;
          if (uint32_t(ow) < uint32_t(p.out[2])) {
            put(at, out[half], bias);
            keep(m, kTaps / 2, block, half, out[half]);
            kept[1] |= 1u << (m * 2 + half);
          }
          // Outputs left and right of all input columns: one tap reaches them.
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            if (side == 0 ? plan.anchor_to_out == 1 && column[half] == 0
                          : ow + 1 < p.out[2] && column[half] == p.in[2] - 1) {
              const int tap = side == 0 ? kTaps - 1 : 0;
              float edge[8];
#pragma unroll
              for (int i = 0; i < 8; ++i)
                edge[i] = acc[m][(tap * kTile / 8 + block * 4 + i / 2) * 4 + i % 2 + 2 * half];
              put(side == 0 ? at - p.y_stride[2] : at + p.y_stride[2], edge, bias);
              keep(m, tap, block, half, edge);
              kept[side == 0 ? 2 : 0] |= 1u << (m * 2 + half);
            }
          }
        }
      }
    }

    if constexpr (kStats) {
      // Mean and squared deviations of this warp's outputs, channel by channel, then of the tile's.
      float* const sums = reinterpret_cast<float*>(smem + layout.stats);  // [warps][kTile][2], [warps]
      const int warp_all = warpgroup * 4 + warp;
      constexpr int kTapOf[3] = {0, kTaps / 2, kTaps - 1};
      float count = static_cast<float>(__popc(kept[0]) + __popc(kept[1]) + __popc(kept[2]));
      // Every lane counts: neighbouring channels have the same positions.
      for (int lanes = 4; lanes < 32; lanes *= 2) count += __shfl_xor_sync(0xffffffff, count, lanes);
      const float over_count = count > 0.f ? 1.f / count : 0.f;
#pragma unroll
      for (int block = 0; block < kTile / 32; ++block) {
        float mean[8] = {}, deviation[8] = {};
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
          float (&sum)[8] = pass == 0 ? mean : deviation;
#pragma unroll
          for (int m = 0; m < kSegments; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int which = 0; which < 3; ++which) {
                if (kept[which] >> (m * 2 + half) & 1) {
#pragma unroll
                  for (int i = 0; i < 8; ++i) {
                    const float v = acc[m][(kTapOf[which] * kTile / 8 + block * 4 + i / 2) * 4 + i % 2 + 2 * half];
                    sum[i] += pass == 0 ? v : (v - mean[i]) * (v - mean[i]);
                  }
                }
              }
            }
          }
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            for (int lanes = 4; lanes < 32; lanes *= 2) sum[i] += __shfl_xor_sync(0xffffffff, sum[i], lanes);
            if (pass == 0) sum[i] *= over_count;
          }
        }
        if (g == 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            reinterpret_cast<float2*>(sums)[warp_all * kTile + block * 32 + t4 * 8 + i] =
                make_float2(mean[i], deviation[i]);
          }
        }
      }
      constexpr int kWarps = kHopperConsumers * 4;
      if (lane == 0) sums[kWarps * kTile * 2 + warp_all] = count;
      named_barrier(1, kHopperConsumers * 128);
      const int c = t.n_tile * kTile + tid;
      if (tid < kTile && c < p.c_out) {
        float mean = 0.f, deviation = 0.f, total = 0.f;
        for (int w = 0; w < kWarps; ++w) {
          const float2 part = reinterpret_cast<const float2*>(sums)[w * kTile + tid];
          const float n = sums[kWarps * kTile * 2 + w];
          if (n == 0.f) continue;
          const float delta = part.x - mean, share = n / (total + n);
          mean += delta * share;
          deviation += part.y + delta * delta * total * share;
          total += n;
        }
        float* const to = p.partials + ((int64_t(t.n) * plan.tiles_per_sample + t.index) * p.c_out + c) * 3;
        to[0] = mean, to[1] = deviation, to[2] = total;
      }
    }
  }
#endif
}

}  // namespace kgopt
