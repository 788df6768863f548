// The kernel of conv3d_rows_kernel.cuh with a norm and an activation in front of it, sm_90a: three warps beside the
// loading one take every stage of x when it has landed in shared memory, and write act(x * scale + shift), rounded for
// the products, over it. What the tensor copies filled with zeros, the convolution's padding, stays as it is.
//
// x is loaded in pieces of some rows with a barrier each, so that its first rows are normalized while the others are
// still on their way.
#pragma once

#include "../common/mma.cuh"
#include "conv3d_rows_kernel.cuh"
#include "conv3d_rows_prologue.h"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Two neighbouring values as the products read them; relu comes with the rounding.
template <ConvMath kMath, bool kRelu>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t r;
  if constexpr (kMath == ConvMath::kBf16) {
    if constexpr (kRelu) {
      asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
  } else {
    if constexpr (kRelu) {
      asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
  }
  return r;
}

// 16 bytes of a position's channels.
template <ConvMath kMath, Chain kAct, int kSize>
__device__ __forceinline__ void normalize_vector(uint4* v, const float (&scale)[kSize], const float (&shift)[kSize]) {
  uint32_t words[4] = {v->x, v->y, v->z, v->w};
  if constexpr (kMath == ConvMath::kTf32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float z = fmaf(__uint_as_float(words[i]), scale[i], shift[i]);
      if constexpr (kAct == Chain::kSilu) z *= fast_sigmoid(z);
      words[i] = round_for_tf32<kAct == Chain::kRelu>(z);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float z[2];
      if constexpr (kMath == ConvMath::kBf16) {
        z[0] = __uint_as_float(words[i] << 16), z[1] = __uint_as_float(words[i] & 0xffff0000);
      } else {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        z[0] = pair.x, z[1] = pair.y;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        z[j] = fmaf(z[j], scale[2 * i + j], shift[2 * i + j]);
        if constexpr (kAct == Chain::kSilu) {
          z[j] = kMath == ConvMath::kBf16 ? coarse_silu(z[j]) : z[j] * fast_sigmoid(z[j]);
        }
      }
      words[i] = round_pair<kMath, kAct == Chain::kRelu>(z[0], z[1]);
    }
  }
  *v = make_uint4(words[0], words[1], words[2], words[3]);
}

// `count` positions of a row from the first one's address on, by a warp: lane l has vector l % kVectors of every
// 32 / kVectors-th position.
template <ConvMath kMath, Chain kAct, int kRowBytes, int kSize>
__device__ __forceinline__ void normalize_row(uint32_t first_row, int count, const float (&scale)[kSize],
                                              const float (&shift)[kSize]) {
  constexpr int kVectors = kRowBytes / 16, kStep = 32 / kVectors, kUnroll = kSize == 8 ? 4 : 8;
  // Four positions further under the 128-byte swizzle, a vector lies at its place with bit 2 turned.
  constexpr uint32_t kTurn = kRowBytes == 128 ? 64 : 0;
  const int lane = threadIdx.x & 31;
  const uint32_t row = first_row + lane / kVectors * kRowBytes;
  uint32_t at = row + ((lane % kVectors ^ (row / 128 & (kVectors - 1))) * 16);
  for (int i = lane / kVectors; i < count; i += kStep * kUnroll, at += kStep * kUnroll * kRowBytes) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * kStep < count) v[u] = load_shared_16((at ^ (u % 2 ? kTurn : 0)) + u * kStep * kRowBytes);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      normalize_vector<kMath, kAct>(&v[u], scale, shift);
      if (i + u * kStep < count) store_shared_16((at ^ (u % 2 ? kTurn : 0)) + u * kStep * kRowBytes, v[u]);
    }
  }
}
#endif

template <ConvMath kMath, int kN, int kRowBytes>
__global__ void __launch_bounds__(kRowsPrologueThreads, 1)
    conv_rows_prologue_kernel(const __grid_constant__ RowsParams p, const __grid_constant__ RowsPrologue prologue) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename HopperTypes<kMath>::Element;
  constexpr int kTile = kN * kHopperConsumers;
  constexpr int kWeightBytes = 64 * kRowBytes;
  constexpr int kChannels = kRowBytes / int(sizeof(Element));
  extern __shared__ char smem_unaligned[];
  const RowsPlan& plan = p.plan;
  const RowsSmemLayout layout = rows_smem_layout(plan);
  const uint32_t unaligned = shared_address(smem_unaligned);
  char* const smem = smem_unaligned + ((unaligned + 1023) / 1024 * 1024 - unaligned);
  uint64_t* const x_full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const x_empty = x_full + kRowsMaxStages;
  uint64_t* const w_full = x_empty + kRowsMaxStages;
  uint64_t* const w_empty = w_full + kRowsMaxStages;
  uint64_t* const lagging = w_empty + kRowsMaxStages;
  uint64_t* const landed = lagging + 1;  // [stage][piece]
  const int tid = threadIdx.x;
  const int warpgroup = __shfl_sync(0xffffffff, tid / 128, 0);
  const int lane = tid & 31;
  const int x_bytes = rows_x_stage_bytes(plan);

  if (tid == 0) {
    for (int i = 0; i < kRowsMaxStages; ++i) {
      barrier_init(x_full + i, 32 * kRowsNormalizers);
      barrier_init(x_empty + i, kHopperConsumers * 4);
      barrier_init(w_full + i, 1);
      barrier_init(w_empty + i, kHopperConsumers * 4);
    }
    for (int i = 0; i < plan.x_stages * kRowsProloguePieces; ++i) barrier_init(landed + i, 1);
    barrier_init(lagging, 4);
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == kHopperConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
    const int warp = __shfl_sync(0xffffffff, tid / 32 % 4, 0);
    const int reach = (plan.taps[1] - 1) * plan.dilation[1] * plan.row_slots + (plan.taps[2] - 1) * plan.dilation[2];
    if (warp == 0) {
      // Two lanes of one warp load, which leaves three warps to the norm.
      if (lane == 0) {
        const int row_bytes = plan.row_slots * kRowBytes;
        StageCursor s;
        for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
          const RowsTile t = rows_tile<kTile>(p, tile);
          const int rows = plan.by_row(t.q0 + kTile - 1 + reach) - t.first_row + 1;
          const int plane = plan.by_plane(t.first_row);
          for (int kd = t.kd_first; kd < t.kd_end; ++kd) {
            for (int chunk = 0; chunk < plan.chunks; ++chunk) {
              barrier_wait(x_empty + s.stage, s.parity ^ 1);
              uint64_t* barrier = landed + s.stage * kRowsProloguePieces;
              uint32_t to = shared_address(smem) + s.stage * x_bytes;
              int d = plane - plan.padding[0] + kd * plan.dilation[0], h = t.first_row - plane * plan.plane_rows;
              for (int row = 0; row < rows; ++barrier) {
                const int end = min(row + prologue.piece_rows, rows);
                barrier_expect_bytes(barrier, (end - row) * row_bytes);
                for (; row < end; ++row) {
                  tensor_load_5d(to, p.x_map, chunk * kChannels, -plan.padding[2], h - plan.padding[1], d, t.n,
                                 barrier);
                  to += row_bytes;
                  if (++h == plan.plane_rows) h = 0, ++d;
                }
              }
              // A stage of fewer rows completes its other pieces, too: their parity goes on with the stage's.
              for (; barrier < landed + (s.stage + 1) * kRowsProloguePieces; ++barrier) barrier_arrive(barrier);
              s.advance(plan.x_stages);
            }
          }
        }
      } else if (lane == 1) {
        wait_for_prerequisites();
        const uint64_t policy = evict_normal_policy();
        const int per_kd = plan.chunks * plan.taps[1] * plan.taps[2];
        StageCursor s;
        for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
          const RowsTile t = rows_tile<kTile>(p, tile);
          const char* image = static_cast<const char*>(p.packed) +
                              int64_t(t.m_tile * plan.taps[0] + t.kd_first) * per_kd * kWeightBytes;
          for (int i = (t.kd_end - t.kd_first) * per_kd; i > 0; --i) {
            barrier_wait(w_empty + s.stage, s.parity ^ 1);
            barrier_expect_bytes(w_full + s.stage, kWeightBytes);
            bulk_load(smem + layout.weights + s.stage * kWeightBytes, image, kWeightBytes, w_full + s.stage, policy);
            image += kWeightBytes;
            s.advance(plan.w_stages);
          }
        }
      }
      return;
    }

    wait_for_prerequisites();  // for the table
    constexpr int kSize = 16 / int(sizeof(Element)), kVectors = kRowBytes / 16;
    // Halves of rows are dealt to the warps, the first a multiple of what a warp has under way at once.
    const int half = (p.in[2] + 31) / 32 * 16;
    StageCursor s;
    for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
      const RowsTile t = rows_tile<kTile>(p, tile);
      const int rows = plan.by_row(t.q0 + kTile - 1 + reach) - t.first_row + 1;
      for (int kd = t.kd_first; kd < t.kd_end; ++kd) {
        for (int chunk = 0; chunk < plan.chunks; ++chunk) {
          const int channel = chunk * kChannels + lane % kVectors * kSize;
          float scale[kSize], shift[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            // Channels behind the last one are zeros in x, and their weights are.
            float4 k = make_float4(0.f, 0.f, 0.f, 0.f);
            if (channel < prologue.c_in) k = __ldg(prologue.table + int64_t(t.n) * prologue.c_in + channel + i);
            scale[i] = k.y * k.z, shift[i] = fmaf(-k.x, scale[i], k.w);  // of mean, rstd, weight, bias
          }
          int piece = 0, end = prologue.piece_rows;
          for (int unit = warp - 1; unit < rows * 2; unit += kRowsNormalizers) {
            const int row = unit / 2, first = unit % 2 * half, count = min(unit % 2 ? p.in[2] : half, p.in[2]) - first;
            while (row >= end) ++piece, end += prologue.piece_rows;
            barrier_wait(landed + s.stage * kRowsProloguePieces + piece, s.parity);
            const int line = t.first_row + row, plane = plan.by_plane(line);
            const int h = line - plane * plan.plane_rows - plan.padding[1];
            const int d = plane - plan.padding[0] + kd * plan.dilation[0];
            if (h < 0 || d < 0 || d >= p.in[0]) continue;
            const uint32_t at =
                shared_address(smem) + s.stage * x_bytes + (row * plan.row_slots + plan.padding[2] + first) * kRowBytes;
            if (prologue.act == Chain::kRelu) {
              normalize_row<kMath, Chain::kRelu, kRowBytes>(at, count, scale, shift);
            } else if (prologue.act == Chain::kSilu) {
              normalize_row<kMath, Chain::kSilu, kRowBytes>(at, count, scale, shift);
            } else {
              normalize_row<kMath, Chain::kNone, kRowBytes>(at, count, scale, shift);
            }
          }
          wgmma_fence_shared();
          barrier_arrive(x_full + s.stage);
          s.advance(plan.x_stages);
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
  wait_for_prerequisites();  // for the bias
  const int g = lane >> 2, t4 = lane & 3;
  const uint32_t x_rows = shared_address(smem) + warpgroup * kN * kRowBytes;
  const uint32_t w_rows = shared_address(smem) + layout.weights;
  const int step_h = plan.dilation[1] * plan.row_slots, step_w = plan.dilation[2];
  StageCursor x, w;
  int lag = warpgroup == 0 ? plan.lag : 0;
  if (warpgroup > 0 && plan.lag > 0) barrier_wait(lagging, 0);
  float acc[kN / 2];

  for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
    const RowsTile t = rows_tile<kTile>(p, tile);
    const int c0 = t.m_tile * 64 + tid / 32 % 4 * 16 + g * 2;
    const float2 bias = __ldg(reinterpret_cast<const float2*>(p.bias + c0));
    const int first_slot = t.q0 - t.first_row * plan.row_slots;
    const int stages = (t.kd_end - t.kd_first) * plan.chunks;
    int x_done = -1, w_done = -1;
    bool add = false;
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
            wgmma_shared<HopperTypes<kMath>::kWgmma, kN>(acc, w_descriptor + 2 * k, x_descriptor + 2 * k, k > 0 || add);
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
    }
    wgmma_wait<0>();
    wgmma_use(acc);
    if (lane == 0) {
      barrier_arrive(w_empty + w_done);
      barrier_arrive(x_empty + x_done);
    }

    const int q0 = t.q0 + warpgroup * kN + t4 * 2;
    Element* const y = static_cast<Element*>(p.y) + t.n * p.y_stride_n + c0;
    const bool stores = c0 < p.c_out;
    // Of position q0: each step of 8 positions goes on by at most one row.
    const int line = plan.by_row(q0);
    int od = plan.by_plane(line), oh = line - od * plan.plane_rows, ow = q0 - line * plan.row_slots;
    int64_t offset = od * p.y_stride[0] + oh * p.y_stride[1] + ow * p.y_stride[2];
    const int64_t next_eight = 8 * p.y_stride[2];
    const int64_t next_row = p.y_stride[1] - plan.row_slots * p.y_stride[2];
    const int64_t next_plane = p.y_stride[0] - plan.plane_rows * p.y_stride[1];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const bool in_rows = od < p.out[0] && oh < p.out[1] && stores;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* const sum = acc + j * 4 + e;
        float v[2] = {sum[0] + bias.x, sum[2] + bias.y};
        if (p.act == Chain::kRelu) {
          v[0] = fast_relu(v[0]), v[1] = fast_relu(v[1]);
        } else if (p.act == Chain::kSilu) {
          v[0] *= fast_sigmoid(v[0]), v[1] *= fast_sigmoid(v[1]);
        }
        if (in_rows && ow + e < p.out[2]) store_vec(y + offset + e * p.y_stride[2], pack<Element, 2>(v));
      }
      ow += 8, offset += next_eight;
      const bool wraps = ow >= plan.row_slots;
      ow -= wraps ? plan.row_slots : 0;
      offset += wraps ? next_row : 0;
      oh += wraps;
      const bool next = oh == plan.plane_rows;
      oh = next ? 0 : oh;
      od += next;
      offset += next ? next_plane : 0;
    }
  }
  if (lag > 0 && lane == 0) barrier_arrive(lagging);  // too little work to have come to it
#endif
}

}  // namespace kgopt
