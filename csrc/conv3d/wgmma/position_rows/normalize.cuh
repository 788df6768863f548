// What stands between the loads and the products of the convolution where a norm and an activation are in front
// of it: some warps take every stage of x when it has landed in shared memory, and write act(x * scale + shift),
// rounded for the products, over it. What the tensor copies filled with zeros, the convolution's padding, stays as it
// is.
#pragma once

#include "common/device/mma.cuh"
#include "common/device/pointwise.cuh"
#include "conv3d/wgmma/common.cuh"
#include "conv3d/wgmma/position_rows/tile.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
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

// Whether scale and shift are halved, as the activation takes its argument.
template <ConvMath kMath, Chain kAct>
inline constexpr bool halves = kMath == ConvMath::kBf16 && kAct == Chain::kSilu;

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
          z[j] = halves<kMath, kAct> ? coarse_silu_of_half(z[j]) : z[j] * fast_sigmoid(z[j]);
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
  // One step further under the 128-byte swizzle, a vector lies at its place with bit 2 turned.
  constexpr uint32_t kTurn = kRowBytes == 128 ? 64 : 0;
  const int lane = threadIdx.x & 31;
  const uint32_t row = first_row + lane / kVectors * kRowBytes;
  uint32_t at = row + ((lane % kVectors ^ (row / 128 & (kVectors - 1))) * 16);
  // Without questions all loads of a batch are under way before the first is waited for.
  for (; count >= kStep * kUnroll; count -= kStep * kUnroll, at += kStep * kUnroll * kRowBytes) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_shared_16((at ^ (u % 2 ? kTurn : 0)) + u * kStep * kRowBytes);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      normalize_vector<kMath, kAct>(&v[u], scale, shift);
      store_shared_16((at ^ (u % 2 ? kTurn : 0)) + u * kStep * kRowBytes, v[u]);
    }
  }
#pragma unroll 1
  for (; count > 0; count -= kStep, at = (at ^ kTurn) + kStep * kRowBytes) {
    if (lane / kVectors >= count) continue;
    uint4 v = load_shared_16(at);
    normalize_vector<kMath, kAct>(&v, scale, shift);
    store_shared_16(at, v);
  }
}

// All stages of a block, by warp `warp` of the normalizing ones.
template <ConvMath kMath, Chain kAct, int kTile, int kRowBytes>
__device__ __forceinline__ void normalize_stages(const PositionRowsParams& p, uint32_t stages, int stage_bytes,
                                                 uint64_t* landed, uint64_t* full, int warp) {
  using Element = typename WgmmaTypes<kMath>::Element;
  constexpr int kSize = 16 / int(sizeof(Element)), kVectors = kRowBytes / 16;
  const PositionRowsPlan& plan = p.plan;
  const int lane = threadIdx.x & 31;
  // Halves of rows are dealt to the warps, the first a multiple of what a warp has under way at once.
  const int half = (p.in[2] + 31) / 32 * 16;
  float scale[kSize], shift[kSize];
  int known = -1;  // whose channels these are
  StageCursor s;
  for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
    const PositionRowsTile t = position_rows_tile<kTile>(p, tile);
    const int rows = rows_of_stage<kTile>(plan, t);
    for (int kd = t.kd.first; kd < t.kd.end; ++kd) {
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        if (known != t.n * plan.chunks + chunk) {
          known = t.n * plan.chunks + chunk;
          const int channel = chunk * (kRowBytes / int(sizeof(Element))) + lane % kVectors * kSize;
          const float4* const table = static_cast<const float4*>(p.norm.table) + int64_t(t.n) * p.norm.c_in + channel;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            // Channels behind the last one are zeros in x, and their weights are.
            const float4 k = channel < p.norm.c_in ? __ldg(table + i) : make_float4(0.f, 0.f, 0.f, 0.f);
            scale[i] = k.y * k.z, shift[i] = fmaf(-k.x, scale[i], k.w);  // of mean, rstd, weight, bias
            if constexpr (halves<kMath, kAct>) scale[i] *= 0.5f, shift[i] *= 0.5f;
          }
        }
        int piece = 0, end = plan.piece_rows;
        for (int unit = warp; unit < rows * 2; unit += kPositionRowsNormalizers) {
          const int row = unit / 2, first = unit % 2 * half, count = min(unit % 2 ? p.in[2] : half, p.in[2]) - first;
          while (row >= end) ++piece, end += plan.piece_rows;
          barrier_wait(landed + s.stage * kPositionRowsPieces + piece, s.parity);
          const int line = t.first_row + row, plane = plan.by_plane(line);
          const int h = line - plane * plan.plane_rows - plan.padding[1];
          const int d = plane - plan.padding[0] + kd * plan.dilation[0];
          if (h < 0 || d < 0 || d >= p.in[0]) continue;
          const uint32_t at =
              stages + s.stage * stage_bytes + (row * plan.row_slots + plan.padding[2] + first) * kRowBytes;
          normalize_row<kMath, kAct, kRowBytes>(at, count, scale, shift);
        }
        wgmma_fence_shared();
        barrier_arrive(full + s.stage);
        s.advance(plan.x_stages);
      }
    }
  }
}
#endif

}  // namespace kgopt
