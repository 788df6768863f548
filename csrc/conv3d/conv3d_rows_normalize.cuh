// What stands between the loads and the products of the convolution by rows where a norm and an activation are in front
// of it: some warps take every stage of x when it has landed in shared memory, and write act(x * scale + shift),
// rounded for the products, over it. What the tensor copies filled with zeros, the convolution's padding, stays as it
// is.
#pragma once

#include "../common/async.cuh"
#include "../common/mma.cuh"
#include "../common/pointwise.cuh"
#include "../common/wgmma.cuh"
#include "conv3d_hopper_kernel.cuh"
#include "conv3d_rows_tile.cuh"

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

// Some positions of a row, which a warp has under way at once: lane l has vector l % kVectors of every 32 /
// kVectors-th.
template <int kRowBytes>
struct RowsBatch {
  static constexpr int kVectors = kRowBytes / 16, kStep = 32 / kVectors, kCount = 4, kPositions = kCount * kStep;
  static constexpr int kBytes = kPositions * kRowBytes;  // a multiple of the swizzle's period
  uint32_t at;                                           // of the lane's first vector
  int left;                                              // positions from there to the row's end
  uint4 v[kCount];

  // Four positions further under the 128-byte swizzle, a vector lies at its place with bit 2 turned.
  __device__ __forceinline__ uint32_t address(int i) const {
    return (at ^ (kRowBytes == 128 && i % 2 ? 64 : 0)) + i * kStep * kRowBytes;
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (left > i * kStep) v[i] = load_shared_16(address(i));
    }
  }
  template <ConvMath kMath, Chain kAct, int kSize>
  __device__ __forceinline__ void finish(const float (&scale)[kSize], const float (&shift)[kSize]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      normalize_vector<kMath, kAct>(&v[i], scale, shift);
      if (left > i * kStep) store_shared_16(address(i), v[i]);
    }
  }
};

// All stages of a block, by warp `warp` of the normalizing ones, to which batches are dealt in turns. The next batch is
// on its way to registers while one is normalized: the products keep shared memory busy, and a load takes long.
template <ConvMath kMath, Chain kAct, int kTile, int kRowBytes>
__device__ __forceinline__ void normalize_stages(const RowsParams& p, uint32_t stages, int stage_bytes,
                                                 uint64_t* landed, uint64_t* full, int warp) {
  using Element = typename HopperTypes<kMath>::Element;
  using Batch = RowsBatch<kRowBytes>;
  constexpr int kSize = 16 / int(sizeof(Element)), kVectors = Batch::kVectors;
  const RowsPlan& plan = p.plan;
  const int lane = threadIdx.x & 31;
  const int batches = (p.in[2] + Batch::kPositions - 1) / Batch::kPositions;  // of a row
  float scale[kSize], shift[kSize];
  int known = -1;  // whose channels these are
  StageCursor s;
  for (int tile = blockIdx.x; tile < int(plan.tiles); tile += gridDim.x) {
    const RowsTile t = rows_tile<kTile>(p, tile);
    const int rows = rows_of_stage<kTile>(plan, t);
    for (int kd = t.kd_first; kd < t.kd_end; ++kd) {
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
        int piece = 0, end = plan.piece_rows, row = -1, index = batches + warp - kRowsNormalizers;
        bool inside = false;
        uint32_t first = 0;
        auto next = [&](Batch* batch) {  // false behind the last one
          do {
            index += kRowsNormalizers;
            const bool moves = index >= batches;
            while (index >= batches) index -= batches, ++row;
            if (row >= rows) return false;
            if (moves) {
              while (row >= end) ++piece, end += plan.piece_rows;
              barrier_wait(landed + s.stage * kRowsPieces + piece, s.parity);
              const int line = t.first_row + row, plane = plan.by_plane(line);
              const int h = line - plane * plan.plane_rows - plan.padding[1];
              const int d = plane - plan.padding[0] + kd * plan.dilation[0];
              inside = h >= 0 && d >= 0 && d < p.in[0];
              const uint32_t lanes = stages + s.stage * stage_bytes +
                                     (row * plan.row_slots + plan.padding[2] + lane / kVectors) * kRowBytes;
              first = lanes + ((lane % kVectors ^ (lanes / 128 & (kVectors - 1))) * 16);
            }
          } while (!inside);
          batch->at = first + index * Batch::kBytes;
          batch->left = p.in[2] - lane / kVectors - index * Batch::kPositions;
          batch->load();
          return true;
        };
        Batch a, b;
        for (bool more = next(&a); more;) {
          const bool another = next(&b);
          a.template finish<kMath, kAct>(scale, shift);
          if (!another) break;
          more = next(&a);
          b.template finish<kMath, kAct>(scale, shift);
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
