// Behind a norm and a mean: dy of a tile from x, and what a plane of it gives to dx.
#pragma once

#include <cuda_runtime.h>

#include "conv3d/gradients/few_wgrad/plan.h"
#include "conv3d/gradients/few_wgrad/values.cuh"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {
namespace few_wgrad {

// The convolution of a tile, by which dy is made.
template <ConvMath kMath, int kDyTiles>
struct MadeDy {
  using Element = Stored<kMath>;
  using Value = std::conditional_t<kMath == ConvMath::kBf16, __nv_bfloat16,
                                   std::conditional_t<kMath == ConvMath::kFp16, __half, float>>;
  static constexpr int kSize = sizeof(Element), kStrips = kSize == 2 ? 2 : 1;  // of 16 positions in a unit
  static constexpr bool kSplit = kMath == ConvMath::kTf32x3;
  using Fragment = std::conditional_t<kSplit, uint4, uint2>;

  // Of the eight channels of a tile, the one that a column of the product is: a thread's two sums are four apart, so
  // that stores of both meet fewer banks twice.
  static __device__ __forceinline__ int channel_of(int column) { return column / 2 + column % 2 * 4; }

  static __device__ __forceinline__ void pack(const FewWgradParams& p, int c_first, int x_base, Fragment* weights,
                                              int2* taps) {
    const FewWgradPlan& plan = p.plan;
    const int tiles = few_wgrad_channels(plan) / 8;
    const auto place_of = [&](FewWgradTap tap) {
      const int row = max(tap.row, 0), kh = row % plan.kernel[1], kd = row / plan.kernel[1] % plan.kernel[0];
      return x_base + row / (plan.kernel[1] * plan.kernel[0]) * plan.x_channel + kd * plan.dilation[0] * plan.x_plane +
             kh * plan.dilation[1] * plan.x_pitch + (plan.margin[0] + tap.column - plan.padding[2]) * kSize;
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.k_steps * 4; i += kFewWgradThreads) {
      const int quad = i / 4 * 2;
      taps[i] = {place_of(few_wgrad_tap(plan, quad, i % 4)), place_of(few_wgrad_tap(plan, quad + 1, i % 4))};
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.k_steps * tiles * 32; i += kFewWgradThreads) {
      const int lane = i % 32, tile = i / 32 % tiles, step = i / 32 / tiles;
      const int c = c_first + tile * 8 + channel_of(lane / 4);
      float v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const FewWgradTap tap = few_wgrad_tap(plan, step * 2 + j, lane % 4);
        const int kh = tap.row % plan.kernel[1], kd = tap.row / plan.kernel[1] % plan.kernel[0];
        const int c_in = tap.row / (plan.kernel[1] * plan.kernel[0]);
        v[j] = tap.row < 0 || c >= p.c_out
                   ? 0.f
                   : value_of<kMath>(static_cast<const Element*>(
                         p.weight)[c * p.w_stride_out + c_in * p.w_stride_in + kd * p.w_stride_k[0] +
                                   kh * p.w_stride_k[1] + tap.column * p.w_stride_k[2]]);
      }
      if constexpr (kSplit) {
        split_for_tf32(v[0], &weights[i].x, &weights[i].z);
        split_for_tf32(v[1], &weights[i].y, &weights[i].w);
      } else {
        weights[i] = {to_tf32(v[0]), to_tf32(v[1])};
      }
    }
  }

  // Of channel c of sample n: dy = (convolution - x) * y + z.
  static __device__ __forceinline__ float4 row_of(const FewWgradParams& p, int64_t n, int c) {
    if (c >= p.c_out) return make_float4(0.f, 0.f, 0.f, 0.f);
    const GradientRow<float> row = static_cast<const GradientRow<float>*>(p.gradient_rows)[n * p.c_out + c];
    const float bias = p.bias ? load_as<float>(p.bias, c, p.bias_dtype) : 0.f, rstd = row.affine.rstd;
    return make_float4(row.affine.mean - bias, -rstd * (rstd * row.term_xhat), -rstd * row.term, 0.f);
  }

  // 16 positions of all of the block's channels.
  struct Strip {
    uint32_t from;   // in x
    char* to;        // its unit in dy, where it begins
    int first_byte;  // here
    int left;        // positions of dy from this thread's first on; the others become zeros
    bool is_there;
  };

  // Two strips, by weights that are read once. A row of a product is a position, rows g and g + 8 being neighbours.
  static __device__ __forceinline__ void make(const FewWgradPlan& plan, const Strip (&strips)[2],
                                              const Fragment* weights, const int2* taps, const float4* rows) {
    const int lane = thread_now() & 31, g = lane >> 2, t = lane & 3, tiles = few_wgrad_channels(plan) / 8;
    const bool swizzles = plan.dx_rows > 0;
    for (int first = 0; first < tiles; first += kDyTiles) {
      float made[2][kDyTiles][4] = {};
      const Fragment* at = weights + first * 32 + lane;
#pragma unroll 1
      for (int k = 0; k < plan.k_steps; ++k, at += tiles * 32) {
        const int2 tap = taps[k * 4 + t];
        uint32_t a[2][4];
        [[maybe_unused]] uint32_t rest[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint32_t one = strips[s].from + g * 2 * kSize + tap.x, two = strips[s].from + g * 2 * kSize + tap.y;
          const float x[4] = {load_value<kMath>(one), load_value<kMath>(one + kSize), load_value<kMath>(two),
                              load_value<kMath>(two + kSize)};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (kSplit) {
              split_for_tf32(x[i], &a[s][i], &rest[s][i]);
            } else {
              a[s][i] = kMath == ConvMath::kTf32 ? to_tf32(x[i]) : __float_as_uint(x[i]);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kDyTiles; ++j) {
          const Fragment b = at[j * 32];
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            if constexpr (kSplit) {
              mma_tf32x3(made[s][j], a[s], rest[s], b.x, b.y, b.z, b.w);
            } else {
              mma_tf32(made[s][j], a[s], b.x, b.y);
            }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kDyTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = (first + j) * 8 + t + i * 4;
          const float4 row = rows[c];
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            if (!strips[s].is_there) continue;
            const float v[2] = {strips[s].left > 0 ? fmaf(made[s][j][i] - row.x, row.y, row.z) : 0.f,
                                strips[s].left > 1 ? fmaf(made[s][j][2 + i] - row.x, row.y, row.z) : 0.f};
            const int byte =
                (strips[s].first_byte + g * 2 * kSize) ^ (swizzles ? few_wgrad_swizzle(t + i * 4) * 16 : 0);
            store_vec(reinterpret_cast<Value*>(strips[s].to + c * plan.dy_channel + byte), kgopt::pack<Value>(v));
          }
        }
      }
    }
  }
};

// The input gradient from planes of dy that are made: dx[q] = sum over channels of dy and taps of w * dy[q + padding -
// tap]. Rows of the products are taps of the width and the depth, K channels of dy and taps of the height; a row of dx
// belongs to one warp, which adds a plane's products to planes of dx in shared memory, shifted by their tap.
template <ConvMath kMath>
struct MadeDx {
  static constexpr bool kHalf = conv_channels_per_word(kMath) == 2, kSplit = kMath == ConvMath::kTf32x3;
  static constexpr int kParts = conv_split_factor(kMath), kTiles = kMadeDxRows / 16;
  using Element = Stored<kMath>;
  using Value = typename MadeDy<kMath, 1>::Value;

  static __device__ __forceinline__ void pack(const FewWgradParams& p, uint32_t* weights, int* offsets, int2* table) {
    const FewWgradPlan& plan = p.plan;
    const int pairs = few_wgrad_channels(plan) / 8 * plan.kernel[1], in_depth = plan.kernel[0] * p.c_in;
    constexpr int kPairs = kHalf ? 2 : 1;  // of 8 channels and a tap of the height, in a step of K
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.dx_k_steps * kPairs; i += kFewWgradThreads) {
      const int pair = min(i, pairs - 1);  // beyond, weights are zero
      offsets[i] = pair / plan.kernel[1] * 8 * plan.dy_channel +
                   (plan.kernel[1] - 1 - pair % plan.kernel[1]) * plan.dilation[1] * plan.dy_pitch;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < kMadeDxRows; i += kFewWgradThreads) {
      const int kw = i / in_depth, kd = i / p.c_in % plan.kernel[0];
      table[i] = {i % p.c_in * plan.dx_channel + kw, kd * plan.dilation[0] << 8 | kw};
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < plan.dx_k_steps * kTiles * 128; i += kFewWgradThreads) {
      const int lane = i / 4 % 32, g = lane / 4, t = lane % 4, part = i / 2 % 2;
      const int row = i / 128 % kTiles * 16 + g + i % 2 * 8, step = i / 128 / kTiles;
      const int pair = kHalf ? step * 2 + part : step;
      const int kw = row / in_depth, kd = row / p.c_in % plan.kernel[0], c = row % p.c_in;
      auto read = [&](int c_out) -> Element {
        c_out += pair / plan.kernel[1] * 8;
        if (kw >= plan.kernel[2] || pair >= pairs || c_out >= p.c_out) return 0;
        return static_cast<const Element*>(p.weight)[c_out * p.w_stride_out + c * p.w_stride_in + kd * p.w_stride_k[0] +
                                                     pair % plan.kernel[1] * p.w_stride_k[1] + kw * p.w_stride_k[2]];
      };
      if constexpr (kHalf) {
        weights[i] = uint32_t(read(2 * t)) | uint32_t(read(2 * t + 1)) << 16;
      } else if constexpr (kSplit) {
        uint32_t* const at = weights + i / 128 * 256 + i % 128;
        split_for_tf32(read(t + part * 4), at, at + 128);
      } else {
        weights[i] = to_tf32(read(t + part * 4));
      }
    }
  }

  // Adds what a plane of dy, the given one of its march, gives to `rows` rows of dx.
  static __device__ __forceinline__ void add_plane(const FewWgradPlan& plan, uint32_t dy, uint32_t weights,
                                                   const int* offsets, const int2* table, float* sums, int step,
                                                   int rows) {
    const int thread = thread_now(), lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    weights += lane * 16;
    // Of the matrix or vector that this thread names or gets.
    if constexpr (kHalf) {
      dy += (lane & 7) * plan.dy_channel + ((lane >> 4) ^ few_wgrad_swizzle(lane & 7)) * 16;
    } else {
      dy += t * plan.dy_channel + (g >> 2) * 64 + ((g & 3) ^ few_wgrad_swizzle(t)) * 16;
    }
    const int slot = (step + 1) % plan.dx_slots, far = 4 * plan.dy_channel;
    int at[kTiles][2], taps[kTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      const int2 row = table[i * 8 + g];
      const int own = slot + (row.y >> 8);
      at[i / 2][i % 2] =
          row.x + (own >= plan.dx_slots ? own - plan.dx_slots : own) * plan.dx_slot + t * (kHalf ? 2 : 8);
      taps[i / 2][i % 2] = row.y & 255;
    }
#pragma unroll 1
    for (int row = warp; row < rows; row += kFewWgradWarps) {
#pragma unroll 1
      for (int first = 0; first < plan.dx_pitch - 4; first += kMadeDxUnit) {
        float acc[kTiles][4][4] = {};
        const uint32_t unit = dy + row * plan.dy_pitch + first * int(sizeof(Element));
#pragma unroll 1
        for (int k = 0; k < plan.dx_k_steps; ++k) {
          uint32_t a[kTiles][kParts][4];
#pragma unroll
          for (int i = 0; i < kTiles * kParts; ++i) {
            const uint4 v = load_shared_16(weights + (k * kTiles * kParts + i) * 512);
            uint32_t (&to)[4] = a[i / kParts][i % kParts];
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
          }
          uint32_t b[4][2];
          [[maybe_unused]] uint32_t b_rest[kSplit ? 4 : 1][2];
          if constexpr (kHalf) {
            const uint32_t from = unit + offsets[2 * k + (lane >> 3 & 1)];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              uint32_t v[4];
              load_matrices_transposed(v, from ^ (i * 32));
              b[2 * i][0] = v[0], b[2 * i][1] = v[1], b[2 * i + 1][0] = v[2], b[2 * i + 1][1] = v[3];
            }
          } else {
            const uint32_t from = unit + offsets[k];
            const uint4 one = load_shared_16(from), two = load_shared_16((from ^ 16) + far);
            const uint32_t words[4][2] = {{one.x, two.x}, {one.y, two.y}, {one.z, two.z}, {one.w, two.w}};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const float v = __uint_as_float(words[i / 2][i % 2]);
              if constexpr (kSplit) {
                split_for_tf32(v, &b[i / 2][i % 2], &b_rest[i / 2][i % 2]);
              } else {
                b[i / 2][i % 2] = to_tf32(v);
              }
            }
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
              if constexpr (kSplit) {
                mma_tf32x3(acc[m][j], a[m][0], a[m][1], b[j][0], b[j][1], b_rest[j][0], b_rest[j][1]);
              } else {
                multiply<kMath>(acc[m][j], a[m][0], b[j][0], b[j][1]);
              }
            }
          }
        }
        // The taps of the width one after the other: their positions overlap.
#pragma unroll 1
        for (int tap = 0; tap < plan.kernel[2]; ++tap) {
          __syncwarp();
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (taps[m][i] != tap) continue;
              float* const to = sums + at[m][i] + row * plan.dx_pitch + first;
              float v[8];
#pragma unroll
              for (int j = 0; j < 8; ++j) v[j] = to[kHalf ? j / 2 * 8 + j % 2 : j % 2 * 4 + j / 2];
#pragma unroll
              for (int j = 0; j < 8; ++j) {
                to[kHalf ? j / 2 * 8 + j % 2 : j % 2 * 4 + j / 2] = v[j] + acc[m][j / 2][i * 2 + j % 2];
              }
            }
          }
        }
      }
    }
  }

  // Stores the plane of dx that is complete where `stores`, and leaves zeros in its place; at the end of a march also
  // in all others. Each warp its own rows. `dx`: the slab's first row of the plane.
  static __device__ __forceinline__ void finish_plane(const FewWgradParams& p, Element* dx, float* sums, int step,
                                                      int rows, bool stores) {
    const FewWgradPlan& plan = p.plan;
    const int thread = thread_now(), lane = thread & 31, warp = thread >> 5, slot = (step + 1) % plan.dx_slots;
    const bool ends = step == plan.steps - 1;
    __syncwarp();
#pragma unroll 1
    for (int i = ends ? 0 : slot; i <= (ends ? plan.dx_slots - 1 : slot); ++i) {
      const bool stores_now = stores && i == slot;
#pragma unroll 1
      for (int row = warp; row < rows; row += kFewWgradWarps) {
#pragma unroll 1
        for (int c = 0; c < p.c_in; ++c) {
          float* const from = sums + i * plan.dx_slot + c * plan.dx_channel + row * plan.dx_pitch;
          Element* const to = dx + c * p.x_stride_c + row * p.x_stride[1] - plan.padding[2];
          for (int at = lane; at < plan.dx_pitch; at += 32) {
            if (stores_now && unsigned(at - plan.padding[2]) < unsigned(p.in[2])) {
              reinterpret_cast<Value*>(to)[at] = from_acc<Value>(from[at]);
            }
            from[at] = 0.f;
          }
        }
      }
    }
  }
};

}  // namespace few_wgrad
}  // namespace kgopt
