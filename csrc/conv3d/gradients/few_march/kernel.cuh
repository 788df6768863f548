// Both gradients of a convolution with few input channels behind a norm and a mean, from x as it lies; sm_90a.
//
// dy is an affine function of the convolution's output for each sample and channel, so it is made on chip. A block has
// a slab of some rows of dx and marches along the depth. For each plane of dy it
//   - multiplies planes of x in shared memory, four channels a position, by the weights: y, and from it dy, in fp16;
//   - multiplies dy by the weights again, the taps of the depth being columns: these are sums of as many planes of dx,
//     the first of which is complete then, and the others stay in registers for the next plane;
//   - multiplies x and dy for dweight, positions being K, whose sums stay in registers to the end.
// Rows of the first two products are positions of a padded plane, flattened: a tap is another first row of the left
// operand, which wgmma reads from shared memory as it lies. Columns that a row has more than dy has zeros in dy: so
// taps that reach over a row's end meet zeros.
//
// x and the weights of y are TF32, whatever the type, which holds half values as they are. dy and the weights of dx are
// fp16 with as many digits, scaled by powers of two: a normalized value is at most the root of its group's size, so
// dy's bound is known ahead. Half of the bytes then.
//
// With fp32 accuracy everything is in two terms of fp16. Both of x lie in a position's 16 bytes and are multiplied
// together by either term of the weights, whose products are columns of their own; products of dy's second term come
// first, since the tensor core truncates where it adds to its accumulator, and for the same reason each plane has sums
// of its own for dweight.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/gradients/few_march/params.h"
#include "conv3d/gradients/scale.cuh"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace few_march {

// D = A B, or D += A B where `add`, both from shared memory without swizzle.
template <WgmmaType kType, int kN>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor, bool add) {
  if constexpr (kType == WgmmaType::kFp16 && kN == 16) {
    KGOPT_WGMMA_SHARED_SHAPE(16, "k16", ".f32.f16.f16", "1, 1, 0, 0", KGOPT_S8, "%8", "%9", "%10", KGOPT_D8(0));
  } else if constexpr (kType == WgmmaType::kFp16 && kN == 32) {
    KGOPT_WGMMA_SHARED_SHAPE(32, "k16", ".f32.f16.f16", "1, 1, 0, 0", KGOPT_S16, "%16", "%17", "%18", KGOPT_D16(0));
  } else if constexpr (kType == WgmmaType::kFp16 && kN == 48) {
    KGOPT_WGMMA_SHARED_SHAPE(48, "k16", ".f32.f16.f16", "1, 1, 0, 0", KGOPT_S16 ",%16,%17,%18,%19,%20,%21,%22,%23",
                             "%24", "%25", "%26", KGOPT_D16(0) KGOPT_COMMA KGOPT_D8(16));
  } else if constexpr (kType == WgmmaType::kFp16) {
    static_assert(kN == 64);
    KGOPT_WGMMA_SHARED_SHAPE(64, "k16", ".f32.f16.f16", "1, 1, 0, 0", KGOPT_S32, "%32", "%33", "%34", KGOPT_D32(0));
  } else if constexpr (kN == 16) {
    KGOPT_WGMMA_SHARED_SHAPE(16, "k8", ".f32.tf32.tf32", "1, 1", KGOPT_S8, "%8", "%9", "%10", KGOPT_D8(0));
  } else if constexpr (kN == 24) {
    KGOPT_WGMMA_SHARED_SHAPE(24, "k8", ".f32.tf32.tf32", "1, 1", KGOPT_S12, "%12", "%13", "%14",
                             KGOPT_D8(0) KGOPT_COMMA KGOPT_D4(8));
  } else {
    static_assert(kN == 32);
    KGOPT_WGMMA_SHARED_SHAPE(32, "k8", ".f32.tf32.tf32", "1, 1", KGOPT_S16, "%16", "%17", "%18", KGOPT_D16(0));
  }
}

// Of a left operand whose rows are 16 bytes apart and that begins, in units of 16 bytes, at `at` and what the plan
// says.
__device__ __forceinline__ uint64_t left_descriptor(uint32_t at, uint32_t operand) {
  return (at + operand) | uint64_t(128 >> 4) << 32;
}

// Of a right operand in blocks as in common/device/wgmma.cuh, by the low word.
__device__ __forceinline__ uint64_t right_descriptor(uint32_t low) { return low | uint64_t(256 >> 4) << 32; }

// A tile of y, of kTiles * 8 columns. `first`: its place in the first plane of x; kSteps: those of a plane, or 0.
template <WgmmaType kType, int kTiles, int kSteps>
__device__ __forceinline__ void multiply_x(float (&y)[kTiles * 4], const FewMarchPlan& plan, int d, uint32_t first,
                                           uint32_t weights) {
  constexpr int kBlock = kTiles * 256 / 16;
  const int steps = kSteps > 0 ? kSteps : plan.plane_steps;
#pragma unroll 1
  for (int kd = 0; kd < plan.kernel[0]; ++kd, weights += steps * kBlock) {
    const uint32_t at = first + (d + kd) % kFewMarchPlanes * plan.x_plane;
#pragma unroll(kSteps > 0 ? kSteps : 1)
    for (int i = 0; i < steps; ++i) {
      multiply<kType, kTiles * 8>(y, left_descriptor(at, plan.y_operands[i]), right_descriptor(weights + i * kBlock),
                                  kd + i > 0);
    }
  }
}

// Adds to a warpgroup's first kCount tiles of dx. Where there are fewer, the last one is multiplied again.
template <int kCount>
__device__ __forceinline__ void multiply_dy(float (&dx)[few_march_dx_tiles(false)][8], const FewMarchPlan& plan,
                                            int group, uint32_t first, uint32_t weights) {
#pragma unroll 1
  for (int step = 0; step < plan.dx_steps; ++step, weights += 512 / 16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int tile = min(group + i * kFewMarchGroups, plan.dx_tiles - 1);
      multiply<WgmmaType::kFp16, 16>(dx[i], left_descriptor(first + tile * kFewMarchRows, plan.dx_operands[step]),
                                     right_descriptor(weights), true);
    }
  }
}

// Both terms of dy, the second one first: a warpgroup's tiles of dx, their sums by either term of the weights. to_low:
// from one term of dy to the other.
__device__ __forceinline__ void multiply_dy_terms(float (&dx)[few_march_dx_tiles(true)][16], const FewMarchPlan& plan,
                                                  int group, uint32_t first, uint32_t to_low, uint32_t weights) {
#pragma unroll 1
  for (int term = 1; term >= 0; --term) {
    const uint32_t dy = first + term * to_low;
#pragma unroll 1
    for (int step = 0; step < plan.dx_steps; ++step) {
#pragma unroll
      for (int i = 0; i < few_march_dx_tiles(true); ++i) {
        const int tile = min(group + i * kFewMarchGroups, plan.dx_tiles - 1);
        multiply<WgmmaType::kFp16, 32>(dx[i], left_descriptor(dy + tile * kFewMarchRows, plan.dx_operands[step]),
                                       right_descriptor(weights + step * (1024 / 16)), term == 0 || step > 0);
      }
    }
  }
}

// The largest finite value of x that a march reads, of this thread. planes, rows: of x.
__device__ __forceinline__ float size_of_x(const FewMarchParams& p, const float* x, int first_plane, int end_plane,
                                           int first_row, int end_row) {
  const int begin = max(first_row, 0), end = min(end_row, p.in[1]), d = max(first_plane, 0);
  const int of_plane = (end - begin) * p.in[2], of_channel = (min(end_plane, p.in[0]) - d) * of_plane;
  float size = 0.f;
  for (int c = 0; c < p.c_in; ++c) {
    const float* const from = x + c * p.x_stride_c + d * p.x_stride[0] + begin * p.x_stride[1];
#pragma unroll 8
    for (int i = threadIdx.x; i < of_channel; i += kFewMarchThreads) {
      const int plane = i / of_plane, in_plane = i - plane * of_plane, row = in_plane / p.in[2];
      const float v = fabsf(from[plane * p.x_stride[0] + row * p.x_stride[1] + in_plane - row * p.in[2]]);
      size = v < INFINITY ? fmaxf(size, v) : size;
    }
  }
  return size;
}

// dweight's products of a plane in two terms. The left operand's rows are two taps, each with both terms of four
// channels of x; a warp has kFewMarchPairs of them, whose places in x, of the lane's row of ldmatrix, are x_at.
// Positions are K. dy_at: of the lane's row in dy.
template <int kTiles>
__device__ __forceinline__ void multiply_for_dweight(float (&sums)[kFewMarchPairs][kTiles][4],
                                                     const uint32_t (&x_at)[kFewMarchPairs], uint32_t dy_at,
                                                     int octet_bytes, int steps, int count) {
  float of_plane[kFewMarchPairs][kTiles][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const uint32_t at = step * 16 * 16;
    uint32_t b[kTiles][4], a[kFewMarchPairs][4];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) load_matrices_transposed(b[j], dy_at + at + j * octet_bytes);
#pragma unroll
    for (int i = 0; i < kFewMarchPairs; ++i) {
      if (i >= count) continue;
      load_matrices_transposed(a[i], x_at[i] + at);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) mma_fp16(of_plane[i][j], a[i], b[j][2], b[j][3]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) mma_fp16(of_plane[i][j], a[i], b[j][0], b[j][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kFewMarchPairs * kTiles * 4; ++i) {
    sums[i / 4 / kTiles][i / 4 % kTiles][i % 4] += of_plane[i / 4 / kTiles][i / 4 % kTiles][i % 4];
  }
}

}  // namespace few_march
#endif

template <typename Element, int kInputs, int kTiles, bool kTerms>
__global__ void __launch_bounds__(kFewMarchThreads, 2) conv_few_march_kernel(const __grid_constant__ FewMarchParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace few_march;
  extern __shared__ __align__(128) char few_march_smem[];
  char* const smem = few_march_smem;
  const FewMarchPlan& plan = p.plan;
  const FewMarchLayout layout = few_march_layout(plan);
  float4* const rows = reinterpret_cast<float4*>(smem + layout.rows);
  int2* const taps = reinterpret_cast<int2*>(smem + layout.taps);
  int* const places = reinterpret_cast<int*>(smem + layout.places);
  char* const valid = smem + layout.valid;
  uint32_t* const scratch = reinterpret_cast<uint32_t*>(smem + layout.scratch);
  constexpr int kDxTiles = few_march_dx_tiles(kTerms), kTermTiles = (kTerms ? 2 : 1) * kTiles;
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(0xffffffffu, tid >> 5, 0), group = warp >> 2;
  const int g = lane >> 2, t = lane & 3;
  const int pitch = plan.pitch, width = plan.kernel[2], plane_taps = plan.kernel[1] * width;
  const int lead = width - 1, plane_bytes = plan.x_plane * 16, octet_bytes = plan.dy_octet * 16;
  const int plane_steps = plan.plane_steps;
  const uint32_t smem_at = shared_address(smem);
  const uint32_t y_weights = wgmma_b_descriptor(smem_at + layout.y_weights);
  const uint32_t dx_weights = wgmma_b_descriptor(smem_at + layout.dx_weights);

  wait_for_prerequisites();
  // What products read and nobody writes must be finite.
#pragma unroll 1
  for (int i = tid * 16; i < layout.y_weights; i += kFewMarchThreads * 16) {
    *reinterpret_cast<uint4*>(smem + i) = make_uint4(0, 0, 0, 0);
  }
  auto weight = [&](int c_out, int c, int kd, int tap) {
    if (c_out >= p.c_out || c >= p.c_in || kd >= plan.kernel[0]) return 0.f;
    return to_acc(
        static_cast<const Element*>(p.weight)[c_out * p.w_stride_out + c * p.w_stride_in + kd * p.w_stride_k[0] +
                                              tap / width * p.w_stride_k[1] + tap % width * p.w_stride_k[2]]);
  };
  float size = 0.f, weight_scale;
  if constexpr (kTerms) {
    const int of_channel = plan.kernel[0] * plane_taps;
#pragma unroll 1
    for (int i = tid; i < p.c_out * p.c_in * of_channel; i += kFewMarchThreads) {
      const int tap = i % of_channel, c = i / of_channel % p.c_in;
      const float v = fabsf(weight(i / of_channel / p.c_in, c, tap / plane_taps, tap % plane_taps));
      size = v < INFINITY ? fmaxf(size, v) : size;
    }
    weight_scale = scale_of_size(block_size<kFewMarchWarps>(size, scratch));
#pragma unroll 1
    for (int i = tid; i < plan.kernel[0] * plane_steps * kTiles * 64; i += kFewMarchThreads) {
      const int word = i % 4, column = i / 4 % 8, part = i / 32 % 2, tile = i / 64 % kTiles, step = i / 64 / kTiles;
      const int tap = step % plane_steps * 2 + part, c = word % 2 * 2, c_out = tile * 8 + column;
      float v[2] = {0.f, 0.f};
      if (tap < plane_taps) {
        v[0] = weight(c_out, c, step / plane_steps, tap), v[1] = weight(c_out, c + 1, step / plane_steps, tap);
      }
      uint32_t* const to =
          reinterpret_cast<uint32_t*>(smem + layout.y_weights) + step * (kTermTiles * 64) + i % (kTiles * 64);
      split_half(v[0] * weight_scale, v[1] * weight_scale, to, to + kTiles * 64);
    }
  } else {
#pragma unroll 1
    for (int i = tid; i < plan.kernel[0] * plane_steps * kTiles * 64; i += kFewMarchThreads) {
      const int word = i % 4, column = i / 4 % 8, part = i / 32 % 2, tile = i / 64 % kTiles, step = i / 64 / kTiles;
      const int tap = step % plane_steps * 2 + part;
      const float v = tap < plane_taps ? weight(tile * 8 + column, word, step / plane_steps, tap) : 0.f;
      reinterpret_cast<uint32_t*>(smem + layout.y_weights)[i] = to_tf32(v);
      size = !(fabsf(v) <= size) ? fabsf(v) : size;
    }
    weight_scale = scale_of_size(block_size<kFewMarchWarps>(size, scratch));
  }
#pragma unroll 1
  for (int i = tid; i < plan.dx_steps * 256; i += kFewMarchThreads) {
    const int in_octet = i % 8, column = i / 8 % 8 + i / 128 % 2 * 8, part = i / 64 % 2;
    const int pair = i / 256 * 2 + part, octet = pair / plane_taps, c = octet * 8 + in_octet;
    const float v = octet < kTiles ? weight(c, column % 4, column / 4, plane_taps - 1 - pair % plane_taps) : 0.f;
    __half* const to = reinterpret_cast<__half*>(smem + layout.dx_weights) + (kTerms ? i / 256 * 256 + i : i);
    to[0] = __float2half_rn(v * weight_scale);
    if constexpr (kTerms) to[256] = __float2half_rn(v * weight_scale - __half2float(to[0]));
  }
#pragma unroll 1
  for (int i = tid; i < plan.halves * kFewMarchLeft; i += kFewMarchThreads) {
    const int tap = max(few_march_tap(plan, i), 0);
    const int row = tap % plane_taps / width;
    taps[i] = {tap / plane_taps, (row * pitch + tap % width) * 16};
  }

  // This warp's part of dweight: 16 taps, each channel's rows of a tile, and every so many positions.
  const int half = plan.halves == 2 ? warp & 1 : 0, share = plan.halves == 2 ? warp >> 1 : warp;
  const int shares = kFewMarchWarps / plan.halves;
  // In two terms, pairs of taps, and all positions.
  [[maybe_unused]] const int all_taps = plan.kernel[0] * plane_taps;
  [[maybe_unused]] const int pairs = ((all_taps + 1) / 2 - warp + kFewMarchWarps - 1) / kFewMarchWarps;
  constexpr int kSums = kTerms ? kFewMarchPairs : kInputs;
  float sums[kSums][kTiles][4] = {};
  float scale = 1.f;
  [[maybe_unused]] float x_scale = 1.f;  // in two terms
  const int in_sample = static_cast<int>(plan.slabs * plan.parts), slabs = static_cast<int>(plan.slabs);

#pragma unroll 1
  for (int march = blockIdx.x; march < static_cast<int>(plan.marches); march += gridDim.x) {
    const int64_t n = march / in_sample;
    const int slab = march % in_sample % slabs, part = march % in_sample / slabs;
    // Padded planes and rows of dx; dy's first row. Those of dy that lie ahead of the slab's count in the one before.
    const int begin = plan.padding[0] + part * plan.planes, end = min(begin + plan.planes, plan.padding[0] + p.in[0]);
    const int first_row = plan.padding[1] + slab * plan.rows, dy_row = first_row - (plan.kernel[1] - 1);
    const int own_row = slab == 0 ? max(-dy_row, 0) : plan.kernel[1] - 1;
    const int first_plane = max(begin - (plan.kernel[0] - 1), 0);
    __syncthreads();  // all have read what is overwritten
    {
      float4 row = make_float4(0.f, 0.f, 0.f, 0.f);
      float bound = 0.f;
      if (tid < p.c_out) {
        const GradientRow<float> of = static_cast<const GradientRow<float>*>(p.gradient_rows)[n * p.c_out + tid];
        const float bias = p.bias ? load_as<float>(p.bias, tid, p.bias_dtype) : 0.f, rstd = of.affine.rstd;
        row = make_float4(of.affine.mean - bias, -rstd * (rstd * of.term_xhat), -rstd * of.term, 0.f);
        const float count = float(p.c_out) * float(p.out[0]) * float(p.out[1]) * float(p.out[2]);
        bound = rstd * (fabsf(of.term) + (sqrtf(count) + 64.f) * fabsf(of.term_xhat));
      }
      const float next = scale_of_size(block_size<kFewMarchWarps>(bound, scratch));
      float change = next / scale;
      scale = next;
      if constexpr (kTerms) {
        const float* const x = static_cast<const float*>(p.x) + n * p.x_stride_n;
        const float of_x = size_of_x(p, x, first_plane - plan.padding[0], end - plan.padding[0] + plan.kernel[0] - 1,
                                     dy_row - plan.padding[1], dy_row - plan.padding[1] + plan.x_rows);
        __syncthreads();
        const float next_x = scale_of_size(block_size<kFewMarchWarps>(of_x, scratch));
        change *= next_x / x_scale;
        x_scale = next_x;
      }
#pragma unroll
      for (int i = 0; i < kSums * kTiles * 4; ++i) sums[i / 4 / kTiles][i / 4 % kTiles][i % 4] *= change;
      if (tid < kTiles * 8) rows[tid] = make_float4(row.x, row.y * scale, row.z * scale, 0.f);
    }
#pragma unroll 1
    for (int i = tid * 16; i < kTermTiles * octet_bytes; i += kFewMarchThreads * 16) {
      *reinterpret_cast<uint4*>(smem + layout.dy + i) = make_uint4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (int i = tid; i < plan.dy_tiles * kFewMarchRows; i += kFewMarchThreads) {
      const int r = i / pitch;
      valid[i] = r < plan.dy_rows && unsigned(dy_row + r) < unsigned(p.out[1]) && i - r * pitch < p.out[2];
    }
#pragma unroll 1
    for (int i = tid; i < plan.dx_tiles * kFewMarchRows; i += kFewMarchThreads) {
      const int r = i / pitch, h = first_row + r - plan.padding[1], w = i - r * pitch - plan.padding[2];
      const bool exists = r < plan.rows && h < p.in[1] && unsigned(w) < unsigned(p.in[2]);
      places[i] = exists ? h * static_cast<int>(p.x_stride[1]) + w : -1;
    }
    // Planes of x, by padded number. A thread has the same positions of each.
    int from[kFewMarchLoads];
#pragma unroll
    for (int i = 0; i < kFewMarchLoads; ++i) {
      const int at = tid + i * kFewMarchThreads, r = at / pitch;
      const int h = dy_row + r - plan.padding[1], w = at - r * pitch - plan.padding[2];
      const bool exists = r < plan.x_rows && unsigned(h) < unsigned(p.in[1]) && unsigned(w) < unsigned(p.in[2]);
      from[i] = exists ? h * static_cast<int>(p.x_stride[1]) + w : -1;
    }
    const Element* const x = static_cast<const Element*>(p.x) + n * p.x_stride_n;
    Element loaded[kFewMarchLoads][kInputs];
    auto load_plane = [&](int plane) {
      const int d = plane - plan.padding[0];
      const Element* const at = x + d * p.x_stride[0];
#pragma unroll
      for (int i = 0; i < kFewMarchLoads; ++i) {
#pragma unroll
        for (int c = 0; c < kInputs; ++c) {
          loaded[i][c] = from_acc<Element>(0.f);
          if (c < p.c_in && from[i] >= 0 && unsigned(d) < unsigned(p.in[0])) {
            loaded[i][c] = at[c * p.x_stride_c + from[i]];
          }
        }
      }
    };
    auto store_plane = [&](int plane) {
      char* const to = smem + layout.x + plane % kFewMarchPlanes * plane_bytes;
#pragma unroll
      for (int i = 0; i < kFewMarchLoads; ++i) {
        const int at = tid + i * kFewMarchThreads;
        if (at >= plan.x_rows * pitch) continue;
        uint32_t v[4] = {};
        if constexpr (kTerms) {
          split_half(loaded[i][0] * x_scale, loaded[i][1] * x_scale, &v[0], &v[2]);
          split_half(loaded[i][2] * x_scale, loaded[i][3] * x_scale, &v[1], &v[3]);
        } else {
#pragma unroll
          for (int c = 0; c < kInputs; ++c) v[c] = to_tf32(to_acc(loaded[i][c]));
        }
        *reinterpret_cast<uint4*>(to + at * 16) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    };
#pragma unroll 1
    for (int plane = first_plane; plane < first_plane + plan.kernel[0]; ++plane) {
      load_plane(plane);
      store_plane(plane);
    }
    // Tiles with rows of dy that exist.
    const int first_tile = max(-dy_row, 0) * pitch / kFewMarchRows;
    const int end_tile = (min(plan.dy_rows, p.out[1] - dy_row) * pitch + kFewMarchRows - 1) / kFewMarchRows;
    float carry[kDxTiles][4] = {};
    Element* const dx = static_cast<Element*>(p.dx) + n * p.x_stride_n;
    const float unscale = (1.f / scale) * (1.f / weight_scale);
    [[maybe_unused]] const float unscale_y = (1.f / x_scale) * (1.f / weight_scale);

#pragma unroll 1
    for (int d = first_plane; d < end; ++d) {
      const bool there = d < p.out[0], more = d + 1 < min(end, p.out[0]);
      wgmma_fence_shared();
      __syncthreads();  // planes of x are there, dy's has been read
      if (more) load_plane(d + plan.kernel[0]);
      if (there) {
#pragma unroll 1
        for (int tile = first_tile + group; tile < end_tile; tile += kFewMarchGroups) {
          constexpr WgmmaType kType = kTerms ? WgmmaType::kFp16 : WgmmaType::kTf32;
          float acc[kTermTiles * 4];
          const uint32_t first = (smem_at + layout.x) / 16 + tile * kFewMarchRows;
          wgmma_fence();
          if (plane_steps == 5) {  // 3 x 3 taps: without a loop
            multiply_x<kType, kTermTiles, 5>(acc, plan, d, first, y_weights);
          } else {
            multiply_x<kType, kTermTiles, 0>(acc, plan, d, first, y_weights);
          }
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_use(acc);
          const int at = tile * kFewMarchRows + (warp & 3) * 16 + g;
          const bool valids[2] = {valid[at] != 0, valid[at + 8] != 0};
          char* const to = smem + layout.dy + (lead + at) * 16 + t * 4;
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            const float4 row[2] = {rows[j * 8 + 2 * t], rows[j * 8 + 2 * t + 1]};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              float v[2];
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float y = acc[j * 4 + r * 2 + e];
                if constexpr (kTerms) y = (y + acc[(kTiles + j) * 4 + r * 2 + e]) * unscale_y;
                v[e] = fmaf(y - row[e].x, row[e].y, row[e].z);
                if (!valids[r]) v[e] = 0.f;
              }
              char* const to_row = to + j * octet_bytes + r * 8 * 16;
              if constexpr (kTerms) {
                uint32_t* const words = reinterpret_cast<uint32_t*>(to_row);
                split_half(v[0], v[1], words, words + kTiles * octet_bytes / 4);
              } else {
                *reinterpret_cast<__half2*>(to_row) = __floats2half2_rn(v[0], v[1]);
              }
            }
          }
        }
      }
      if (more) store_plane(d + plan.kernel[0]);
      wgmma_fence_shared();
      __syncthreads();  // dy is there
      {
        float acc[kDxTiles][8] = {};
        const uint32_t first = (smem_at + layout.dy) / 16;
        if constexpr (kTerms) {
          if (there) {
            float terms[kDxTiles][16];
            wgmma_fence();
            multiply_dy_terms(terms, plan, group, first, kTiles * plan.dy_octet, dx_weights);
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < kDxTiles; ++i) {
              wgmma_use(terms[i]);
#pragma unroll
              for (int r = 0; r < 8; ++r) acc[i][r] = terms[i][r] + terms[i][8 + r];
            }
          }
#pragma unroll
          for (int i = 0; i < kDxTiles * 4; ++i) acc[i / 4][i % 4] += carry[i / 4][i % 4];
        } else {
#pragma unroll
          for (int i = 0; i < kDxTiles * 4; ++i) acc[i / 4][i % 4] = carry[i / 4][i % 4];
          if (there) {
#pragma unroll
            for (int i = 0; i < kDxTiles; ++i) wgmma_use(acc[i]);
            wgmma_fence();
            if (plan.dx_tiles > 3 * kFewMarchGroups) {
              multiply_dy<4>(acc, plan, group, first, dx_weights);
            } else if (plan.dx_tiles > 2 * kFewMarchGroups) {
              multiply_dy<3>(acc, plan, group, first, dx_weights);
            } else {
              multiply_dy<2>(acc, plan, group, first, dx_weights);
            }
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < kDxTiles; ++i) wgmma_use(acc[i]);
          }
        }
        const bool stores = d >= begin && t < 2;
        Element* const plane = dx + (d - plan.padding[0]) * p.x_stride[0];
#pragma unroll
        for (int i = 0; i < kDxTiles; ++i) {
          const int tile = group + i * kFewMarchGroups;
          if (tile >= plan.dx_tiles) continue;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int place = places[tile * kFewMarchRows + (warp & 3) * 16 + g + r * 8];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (stores && place >= 0 && 2 * t + e < p.c_in) {
                plane[(2 * t + e) * p.x_stride_c + place] = from_acc<Element>(acc[i][r * 2 + e] * unscale);
              }
            }
          }
          // Columns are (tap of the depth, channel): the next plane's sums are those of one tap more.
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float one = __shfl_xor_sync(0xffffffffu, acc[i][r], 2);
            const float two = __shfl_xor_sync(0xffffffffu, acc[i][4 + r], 2);
            carry[i][r] = t < 2 ? one : two;
          }
        }
      }
      if (kTerms && there && (part == 0 || d >= begin)) {
        if constexpr (kTerms) {
          uint32_t x_at[kFewMarchPairs];
          const int own = own_row * pitch, row = (lane & 7) + (lane >> 4) * 8;
#pragma unroll
          for (int i = 0; i < kFewMarchPairs; ++i) {
            const int2 tap =
                taps[min((warp + i * kFewMarchWarps) * 2 + (lane >> 3 & 1), plan.halves * kFewMarchLeft - 1)];
            x_at[i] = smem_at + layout.x + (d + tap.x) % kFewMarchPlanes * plane_bytes + tap.y + (own + row) * 16;
          }
          const uint32_t dy_at =
              smem_at + layout.dy + (lane >> 4) * kTiles * octet_bytes + (lead + own + (lane & 15)) * 16;
          const int steps = ((plan.dy_rows - own_row) * pitch + 15) / 16;
          multiply_for_dweight<kTiles>(sums, x_at, dy_at, octet_bytes, steps, pairs);
        }
      } else if (!kTerms && there && (part == 0 || d >= begin)) {
        int x_at[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int2 tap = taps[half * kFewMarchLeft + i * 8 + g];
          x_at[i] = layout.x + (d + tap.x) % kFewMarchPlanes * plane_bytes + tap.y + t * 16;
        }
        const int steps = ((plan.dy_rows - own_row) * pitch + 7) / 8;
        const int dy_at = layout.dy + (lead + t) * 16;
#pragma unroll 1
        for (int step = share; step < steps; step += shares) {
          const int at = (own_row * pitch + step * 8) * 16;
          uint32_t b[kTiles][2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const char* const of = smem + dy_at + at + k * 64;
#pragma unroll
            for (int j = 0; j < kTiles / 2; ++j) {
              const float2 v = __half22float2(
                  *reinterpret_cast<const __half2*>(of + (2 * j + (g >> 2)) * octet_bytes + (g & 3) * 4));
              b[2 * j][k] = __float_as_uint(v.x), b[2 * j + 1][k] = __float_as_uint(v.y);
            }
            if constexpr (kTiles % 2 == 1) {
              b[kTiles - 1][k] = __float_as_uint(
                  __half2float(*reinterpret_cast<const __half*>(of + (kTiles - 1) * octet_bytes + g * 2)));
            }
          }
          // A thread has all channels of its two taps, at two positions.
          uint4 a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[i] = *reinterpret_cast<const uint4*>(smem + x_at[i % 2] + at + i / 2 * 64);
          }
#pragma unroll
          for (int c = 0; c < kInputs; ++c) {
            uint32_t of[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) of[i] = c == 0 ? a[i].x : c == 1 ? a[i].y : c == 2 ? a[i].z : a[i].w;
#pragma unroll
            for (int j = 0; j < kTiles; ++j) mma_tf32(sums[c < kSums ? c : 0][j], of, b[j][0], b[j][1]);
          }
        }
      }
    }
  }

  const int floats = few_march_floats(plan);
  if constexpr (kTerms) {
    // Rows are both terms of a channel.
    float* const to = p.partials + int64_t(blockIdx.x) * floats;
#pragma unroll
    for (int i = 0; i < kFewMarchPairs; ++i) {
#pragma unroll
      for (int r = 0; r < kTiles * 4; ++r) {
        const float v = sums[i][r / 4][r % 4], sum = v + __shfl_xor_sync(0xffffffffu, v, 16);
        const int tap = (warp + i * kFewMarchWarps) * 2 + r / 2 % 2;
        if (g < 4 && tap < all_taps) {
          to[(tap * kFewMarchInputs + g) * (kTiles * 8) + r / 4 * 8 + 2 * t + r % 2] =
              sum * (1.f / scale) * (1.f / x_scale);
        }
      }
    }
    return;
  }
  // Warps that share positions one after the other.
  float* const shared = reinterpret_cast<float*>(smem) + half * (floats / plan.halves) + lane;
  const float unscale = 1.f / scale;
#pragma unroll 1
  for (int turn = 0; turn < shares; ++turn) {
    __syncthreads();
    if (turn != share) continue;
#pragma unroll
    for (int i = 0; i < kSums * kTiles * 4; ++i) {
      const float v = sums[i / 4 / kTiles][i / 4 % kTiles][i % 4] * unscale;
      shared[i * 32] = turn == 0 ? v : shared[i * 32] + v;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = tid; i < floats; i += kFewMarchThreads) {
    p.partials[int64_t(blockIdx.x) * floats + i] = reinterpret_cast<const float*>(smem)[i];
  }
#endif
}

inline constexpr int kFewMarchSumShares = 16;  // warps that share an element's partial sums

// dw from the blocks' partial sums, 32 elements a block, then dbias, a channel a block. The order of summation depends
// on the plan alone. A channel's sum of dy follows from its mean.
inline __global__ void __launch_bounds__(kFewMarchSumShares * 32)
    conv_few_march_sum_kernel(const __grid_constant__ FewMarchParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  wait_for_prerequisites();
  __shared__ float shares[kFewMarchSumShares][32];
  const FewMarchPlan& plan = p.plan;
  const int lane = threadIdx.x % 32, share = threadIdx.x / 32, floats = few_march_floats(plan);
  const int piece = blockIdx.x, channel = piece - floats / 32;
  float sum = 0.f;
  if (channel >= 0) {
    const float positions = float(p.out[0]) * float(p.out[1]) * float(p.out[2]);
    for (int64_t n = threadIdx.x; n < p.n; n += kFewMarchSumShares * 32) {
      const GradientRow<float> row = static_cast<const GradientRow<float>*>(p.gradient_rows)[n * p.c_out + channel];
      const float mean = static_cast<const float*>(p.channel_mean)[n * p.c_out + channel], rstd = row.affine.rstd;
      sum -= rstd * fmaf((mean - row.affine.mean) * rstd, row.term_xhat, row.term) * positions;
    }
  } else {
    const float* from = p.partials + int64_t(share) * floats + piece * 32 + lane;
#pragma unroll 4
    for (int block = share; block < plan.blocks; block += kFewMarchSumShares) {
      sum += *from;
      from += int64_t(kFewMarchSumShares) * floats;
    }
  }
  shares[share][lane] = sum;
  __syncthreads();
  if (share > 0) return;
#pragma unroll
  for (int i = 1; i < kFewMarchSumShares; ++i) sum += shares[i][lane];
  if (channel >= 0) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (lane == 0) store_as(p.dbias, channel, p.dw_dtype, sum);
    return;
  }
  int tap, c, c_out;
  if (plan.terms) {
    const int i = piece * 32 + lane, columns = plan.tiles * 8;
    c_out = i % columns, c = i / columns % kFewMarchInputs, tap = i / columns / kFewMarchInputs;
  } else {
    const int r = piece % 4, tile = piece / 4 % plan.tiles, column = lane % 4 * 2 + r % 2;
    const int half = piece / 4 / plan.tiles / plan.inputs;
    c = piece / 4 / plan.tiles % plan.inputs;
    tap = few_march_tap(plan, half * kFewMarchLeft + r / 2 * 8 + lane / 4);
    c_out = tile < plan.tiles / 2 * 2 ? tile / 2 * 16 + column * 2 + tile % 2 : tile * 8 + column;
  }
  if (tap < 0 || c >= p.c_in || c_out >= p.c_out) return;
  const int width = plan.kernel[2], height = plan.kernel[1];
  store_as(p.dw,
           c_out * p.dw_stride_out + c * p.dw_stride_in + tap / (width * height) * p.dw_stride_k[0] +
               tap / width % height * p.dw_stride_k[1] + tap % width * p.dw_stride_k[2],
           p.dw_dtype, sum);
#endif
}

}  // namespace kgopt
