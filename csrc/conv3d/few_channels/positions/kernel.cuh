// Convolutions with few input and more than 32 output channels, either their statistics or, from those, GroupNorm +
// tanh + hardswish + residual + logsumexp over channels, sm_90a.
//
// Rows of the products are positions, 16 neighbours of an output row for each warp, columns 64 output channels. The
// halo lies in shared memory in chunks of eight half channels a position, 16 bytes: a tap is an offset, and a step of
// K, two chunks, is one ldmatrix. What belongs to a position stays within four lanes, so that warps wait for their
// products and for nothing else. Weights lie in shared memory from start to end.
//
// fp32 input becomes fp16 (11 bits, as TF32) as in conv3d/few_channels/window/kernel.cuh, scaled by a power of two for
// each stage.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/reduce.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/finish.cuh"
#include "conv3d/few_channels/weights.cuh"
#include "conv3d/few_channels/window/kernel.cuh"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

inline constexpr float kPositionLog2E = 1.44269504088896340736f;

// How a pass multiplies. Logsumexp of half types sums in fp16, and bf16 becomes fp16 for it, by scales as fp32 does.
template <ConvMath kMath, bool kLse>
struct PositionMath {
  static constexpr bool kFp32 = kMath == ConvMath::kTf32;
  static constexpr bool kHalfSums = kLse && !kFp32;
  static constexpr bool kScaled = kFp32 || (kHalfSums && kMath == ConvMath::kBf16);
  static constexpr WgmmaType kType = kMath == ConvMath::kBf16 && !kHalfSums ? WgmmaType::kBf16 : WgmmaType::kFp16;
  static constexpr float kLowest = kHalfSums ? 0x1p-6f : 2.f;  // logsumexp is faster where no stage is scaled
};

// Of a tile, while it is loaded: fp32 values come scaled, or are measured where the scale does not fit. `most`: the
// largest finite one, where measured; `largest`: of those that were stored.
template <ConvMath kMath, int kLoaders, bool kScaled>
__device__ __forceinline__ void load_positions(const FewChannelsParams& p, uint32_t* to_stage,
                                               const typename ConvMathTraits<kMath>::Element* x_sample,
                                               const int (&first)[3], float scale, bool measures, float* most,
                                               __half2* largest) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr bool kFp32 = std::is_same_v<Element, float>;
  const FewChannelsPlan& plan = p.plan;
  const int rows = plan.halo[0] * plan.halo[1], across = plan.vectors;
  const bool vectors = p.load == FewChannelsLoad::kVectors;
  const int row_step = kLoaders / across, place_step = kLoaders % across;
#pragma unroll 1
  for (int type = 0; type < plan.types; ++type) {
    const int channels = p.c_in - type * 8;  // eight, or those that are left
    int row = threadIdx.x / across, place = threadIdx.x % across, d = 0, h = row;
#pragma unroll 1
    while (row < rows) {
      while (h >= plan.halo[1]) h -= plan.halo[1], ++d;
      const int w = first[2] + place * 4;  // a vector lies inside or outside as a whole
      const bool row_inside = unsigned(first[0] + d) < unsigned(p.in[0]) && unsigned(first[1] + h) < unsigned(p.in[1]);
      const Element* src = x_sample + type * 8 * p.x_stride_c + (first[0] + d) * p.x_stride[0] +
                           (first[1] + h) * p.x_stride[1] + w * p.x_stride[2];
      // Values of four positions; half types: in two words. All loads are under way before the first is used.
      uint32_t v[8][kFp32 ? 4 : 2];
      if (vectors) {
        const bool inside = row_inside && unsigned(w) < unsigned(p.in[2]);
#pragma unroll
        for (int e = 0; e < 8; ++e, src += p.x_stride_c) load_if(v[e], src, inside && e < channels);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e, src += p.x_stride_c) {
          uint32_t bits[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            bits[i] =
                load_one_if(src + i * p.x_stride[2], row_inside && e < channels && unsigned(w + i) < unsigned(p.in[2]));
          }
          if constexpr (kFp32) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[e][i] = bits[i];
          } else {
            v[e][0] = bits[0] | bits[1] << 16, v[e][1] = bits[2] | bits[3] << 16;
          }
        }
      }
      auto value = [&](int e, int i) {  // fp32 or bf16
        return __uint_as_float(kFp32   ? v[e][i % (kFp32 ? 4 : 2)]
                               : i % 2 ? v[e][i / 2] & 0xffff0000
                                       : v[e][i / 2] << 16);
      };
      if (kScaled && measures) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const float size = fabsf(value(i / 4, i % 4));
          *most = size < INFINITY ? fmaxf(*most, size) : *most;
        }
      } else {
        uint32_t* const to = to_stage + type * plan.plane + (row * plan.pitch + place * 4) * 4;
        uint32_t word[4][4];  // of each position
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if constexpr (kScaled) {
              word[i][k] = packed_halves(value(2 * k, i) * scale, value(2 * k + 1, i) * scale);
              *largest = __hmax2(*largest, __habs2(*reinterpret_cast<const __half2*>(&word[i][k])));
            } else {
              word[i][k] = __byte_perm(v[2 * k][i / 2], v[2 * k + 1][i / 2], i % 2 ? 0x7632 : 0x5410);
            }
          }
        }
        // Neighbouring pairs of threads store their positions in different orders, so that eight of them meet every
        // bank once.
        const int order = threadIdx.x >> 1 & 3;
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (i & bit) continue;
              const uint32_t a = word[i][k], b = word[i + bit][k];
              word[i][k] = order & bit ? b : a, word[i + bit][k] = order & bit ? a : b;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          *reinterpret_cast<uint4*>(to + (i ^ order) * 4) = make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]);
        }
      }
      place += place_step;
      const int carry = place >= across;
      place -= carry * across;
      row += row_step + carry, h += row_step + carry;
    }
  }
}

// What the loading warpgroups do from start to end.
template <ConvMath kMath, int kLoaders, bool kLse>
__device__ __forceinline__ void position_tiles(const FewChannelsParams& p, const PositionSmemLayout& layout,
                                               uint32_t* smem, int64_t n, int group, TileCursor cursor,
                                               int tile_count) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr bool kScaled = PositionMath<kMath, kLse>::kScaled;
  constexpr float kLowest = PositionMath<kMath, kLse>::kLowest;
  const FewChannelsPlan& plan = p.plan;
  const int tiles_h = static_cast<int>(plan.tiles[1]), tiles_w = static_cast<int>(plan.tiles[2]);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  const Element* const x_sample =
      static_cast<const Element*>(p.x) + n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
  float scale = 1.f, lowest = INFINITY;  // of the values of a stage, and the lowest one that there was
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = 0; tile < tile_count; ++tile, cursor.advance(tiles_h, tiles_w)) {
    barrier_wait(empty + stage, parity, 1000000);
    uint32_t* const to_stage = smem + layout.halo + stage * plan.stage_words;
    const int first[3] = {cursor.d * plan.tile[0] * plan.step[0] + plan.origin[0],
                          cursor.h * plan.tile[1] * plan.step[1] + plan.origin[1],
                          cursor.w * plan.tile[2] * plan.step[2] + plan.origin[2] - plan.lead};
    float most = 0.f;
    // Normally one sweep over the halo. Where its values do not fit the scale, one that measures them and one more.
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      __half2 largest = __half2half2(__ushort_as_half(0));
      load_positions<kMath, kLoaders, kScaled>(p, to_stage, x_sample, first, scale, kScaled && pass == 1, &most,
                                               &largest);
      if constexpr (!kScaled) {
        break;
      } else if (pass == 0) {
        // The scale stays where all finite values are finite in fp16 and the largest has bits to spare below it.
        const float top = fmaxf(__low2float(largest), __high2float(largest));
        const bool too_large = any_loader<kLoaders>(top == INFINITY);
        if (!too_large && any_loader<kLoaders>(top >= kLowest || scale == lowest * kWindowRange)) {
          lowest = fminf(lowest, scale);
          break;
        }
      } else if (pass == 1) {
        const uint32_t bits = loaders_max<kLoaders>(most, smem + layout.maxima);
        if (bits == 0 || scale_of_window(bits, &scale, &lowest, kLowest)) break;
      }
    }
    if (kScaled && threadIdx.x == 0) reinterpret_cast<float*>(smem + layout.scales)[stage] = 1.f / scale;
    barrier_arrive(full + stage);
    if (++stage == plan.stages) stage = 0, parity ^= 1;
  }
}

// All weights of the block's channels to shared memory, in the order in which the products take them, by kWarps warps.
// unscale: of each column, what undoes the power of two by which its weights are multiplied. folds: becomes 0 where
// that is not 1, of sums in fp16.
template <ConvMath kMath, int kSteps, int kWarps, bool kLse>
__device__ __forceinline__ void position_weights(const FewChannelsParams& p, uint32_t* weights, float* unscale,
                                                 int group, int c_begin, int c_valid, int warp, int lane, int* folds) {
  constexpr bool kFp32 = PositionMath<kMath, kLse>::kFp32, kHalfSums = PositionMath<kMath, kLse>::kHalfSums;
  constexpr int kRounds = kSteps / 2 + kSteps % 2;  // of 32 values
  using Stored = std::conditional_t<kFp32, float, unsigned short>;
  const FewChannelsPlan& plan = p.plan;
  const int taps = plan.kernel[0] * plan.kernel[1] * plan.kernel[2];
  const Stored* const filters =
      static_cast<const Stored*>(p.weight) + group * p.w_stride_group + c_begin * p.w_stride_out;
  int64_t at[kRounds];  // where this lane's values of K lie in a filter; -1: padding
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int chunk = (lane + 32 * i) / 8, type = chunk / taps, tap = chunk % taps, c = type * 8 + lane % 8;
    const int w = tap % plan.kernel[2], h = tap / plan.kernel[2] % plan.kernel[1],
              d = tap / (plan.kernel[2] * plan.kernel[1]);
    at[i] = c < p.c_in ? c * p.w_stride_in + d * p.w_stride_k[0] + h * p.w_stride_k[1] + w * p.w_stride_k[2] : -1;
  }
  auto load = [&](int column, Stored(&v)[kRounds]) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      v[i] = 0;
      if (at[i] >= 0 && column < c_valid) v[i] = __ldg(filters + column * p.w_stride_out + at[i]);
    }
  };
  auto put = [&](int column, const Stored(&v)[kRounds]) {
    WarpScale of_column;
    float values[kRounds];
    if constexpr (kFp32 || kHalfSums) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if constexpr (kFp32) {
          values[i] = v[i];
        } else if constexpr (kMath == ConvMath::kBf16) {
          values[i] = __uint_as_float(uint32_t(v[i]) << 16);
        } else {
          values[i] = __half2float(__ushort_as_half(v[i]));
        }
      }
      of_column.fit<kRounds>(values);
      if constexpr (kHalfSums) {
        // Scale 1 where fp16 holds the weights well: what comes out is in powers of 2 as it is then, see PositionLse.
        if (of_column.undo == WarpScale::kUndoesZeros || (of_column.undo >= 0x1p-14f && of_column.undo <= 0x1p6f)) {
          of_column.scale = of_column.undo = 1.f;
        } else {
          of_column.scale *= 0x1p-5f, of_column.undo *= 0x1p5f;  // sums in fp16 are small then
          if (lane == 0) *folds = 0;
        }
        of_column.scale *= kPositionLog2E;
      }
    }
    if (lane == 0) unscale[column] = of_column.undo;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int chunk = (lane + 32 * i) / 8;
      if (chunk >= 2 * kSteps) continue;
      unsigned short bits;
      if constexpr (kFp32 || kHalfSums) {
        bits = __half_as_ushort(__float2half_rn(values[i] * of_column.scale));
      } else {
        bits = v[i];
      }
      reinterpret_cast<unsigned short*>(
          weights)[((chunk / 2 * 8 + column / 8) * 2 + chunk % 2) * 64 + column % 8 * 8 + lane % 8] = bits;
    }
  };
  if constexpr (kLse && kFp32) {
    // All are under way before the first is used; statistics, which wait for less, and half types would be slower.
    constexpr int kEach = (64 + kWarps - 1) / kWarps;
    Stored v[kEach][kRounds];
#pragma unroll
    for (int i = 0; i < kEach; ++i) load(warp + i * kWarps, v[i]);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (warp + i * kWarps < 64) put(warp + i * kWarps, v[i]);
    }
  } else {
#pragma unroll 2
    for (int column = warp; column < 64; column += kWarps) {
      Stored v[kRounds];
      load(column, v);
      put(column, v);
    }
  }
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// logsumexp over channels of u + hardswish(tanh(scale u + offset)) for a warp's two strips.
//
// Any shift within some sixty of the result keeps the exponentials in range, so one shift serves all positions; where
// it does not, `exact` finds each position's maximum and the shift moves there.
//
// What products have is u but for a power of two of each channel. Of half types, whose products are summed in fp16, it
// is u in powers of 2, and where none is scaled bias and shift are part of the products (`folded`): the last chunk of K
// is a constant, multiplied by the bias and by -1.
template <ConvMath kMath>
struct PositionLse {
  static constexpr int kStrips = kPositionStrips;
  static constexpr float kLog2E = kPositionLog2E;
  static constexpr float kLn2 = 0.69314718055994530942f;
  static constexpr bool kHalfSums = PositionMath<kMath, true>::kHalfSums;
  // Since |tanh| <= 1, hardswish needs no clamp: h (h + 3) / 6, in powers of 2 a square less kSquared, which the bias
  // holds. An instruction of three different registers takes half a cycle more of issue than one of two. The root is
  // (h + 1.5) sqrt(log2(e) / 6), of half types with factors that are fp16 values.
  static constexpr float kRootScale = kHalfSums ? 0.490478515625f : 0.490356170f;
  static constexpr float kRootOffset = kHalfSums ? 0.7353515625f : 1.5f * kRootScale;
  static constexpr float kSquared = kRootOffset * kRootOffset;
  // A special function takes a scheduler as long as four packed instructions, so half of bf16's tanh are polynomials:
  // of every other pair of channels, within 0.008, where bf16's own step below 1 is 0.004.
  static constexpr unsigned kPolynomials = kMath == ConvMath::kBf16 ? 0x55 : 0;  // a bit for every 8 channels
  static constexpr float kTanhRange = 2.75f;                                     // where the polynomial ends

  // This warp's, of fp32: for each pair of channels, for u as products have it, scale and offset of either, then the
  // biases in powers of 2 less the shift, then log2(e).
  float4* table;
  const float4* base;  // of each channel scale, offset, log2(e) and bias in units of 1 and without shift, the block's
  float shift = 0.f;   // in powers of 2
  float unit = 1.f;
  int lane;
  uint2 affine2[8];        // half types, folded: scale and offset of this lane's pairs of channels
  bool wide = false;       // half types: where exponentials leave the range of fp16
  bool folds = false;      // whether all powers but the stage's are 1
  bool folded = false;     // and the stage's
  uint32_t constants = 0;  // folded: what this lane has of the last chunk
  float most_shift;        // that may be folded
  // Of the bias, and a half of offsets, which are fp16: of what comes to them with the bias or the shift, a quarter.
  static constexpr float kMostFolded = 32768.f;

  __device__ __forceinline__ static bool is_polynomial(int i) { return kPolynomials >> i & 1; }
  // Of a channel: scale, offset, what undoes the powers, bias less the shift.
  __device__ __forceinline__ float4 scales(int c) const {
    const float4 v = base[c];
    // Of products with bias and shift: those without, in units of 1, are (p + shift) / log2(e) - the bias.
    if (folded && v.w == -INFINITY) return make_float4(0.f, 0.f, 1.f, -INFINITY);
    if (folded) return make_float4(v.x, fmaf(v.x, shift - v.w, v.y), 1.f, 0.f);
    return make_float4(v.x * unit, v.y, v.z * unit, v.w - shift);
  }
  __device__ __forceinline__ void fill() {
    __syncwarp();
    if constexpr (kHalfSums) {
      folded = folds && unit == 1.f && fabsf(shift) < most_shift;
      const int t = lane & 3;
      const __half high = __float2half_rn(shift);
      const uint32_t shifts = packed_halves(__half2float(high), shift - __half2float(high));
      constants = !folded || t > 1 ? 0 : t == 0 ? 0x3c003c00 : shifts;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = i * 8 + t * 2;
        const float4 u = scales(c), v = scales(c + 1);
        // The polynomial takes tanh's argument as 0 to 1.
        const float by = is_polynomial(i) ? 0.5f / kTanhRange : 1.f, to = is_polynomial(i) ? 0.5f : 0.f;
        affine2[i] = make_uint2(packed_halves(u.x * by, v.x * by), packed_halves(fmaf(u.y, by, to), fmaf(v.y, by, to)));
      }
    } else {
      const float4 u = scales(2 * lane), v = scales(2 * lane + 1);
      table[2 * lane] = make_float4(u.x, u.y, v.x, v.y);
      table[2 * lane + 1] = make_float4(u.w, v.w, u.z, v.z);
    }
    __syncwarp();
  }
  __device__ __forceinline__ static float power(float h, float linear) {
    const float root = fmaf(h, kRootScale, kRootOffset);
    return fmaf(root, root, linear);
  }

  // Of rows g and g + 8 of the first strip and of the second.
  struct Sums {
    float of[2 * kStrips];
  };
  // Over the channels of four lanes: the one that the lane's t chooses. Every step adds two lanes and halves what they
  // keep.
  __device__ __forceinline__ float sum_lanes(const Sums& sums) const {
    const float (&s)[2 * kStrips] = sums.of;
    const bool second = lane & 2, odd = lane & 1;
    float kept[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      kept[r] = (second ? s[2 + r] : s[r]) + __shfl_xor_sync(0xffffffffu, second ? s[r] : s[2 + r], 2);
    }
    return (odd ? kept[1] : kept[0]) + __shfl_xor_sync(0xffffffffu, odd ? kept[0] : kept[1], 1);
  }
  __device__ __forceinline__ static bool all(bool yes) { return __builtin_expect(__all_sync(0xffffffffu, yes), 1); }

  // `store` takes the result of this lane's position; `summed` is called when the exponentials are.
  template <typename Store, typename Again, typename Summed>
  __device__ __forceinline__ void finish(float (&acc)[kStrips][32], bool inside, const Store& store, const Again&,
                                         const Summed& summed) {
    const Sums of_lane = sums(acc);
    summed();
    const float sum = sum_lanes(of_lane);
    if (all(!inside || (sum > 1e-30f && sum < 1e30f))) {
      if (inside) store((log2_approx(sum) + shift) * kLn2);
    } else {
#pragma unroll
      for (int half = 0; half < kStrips; ++half) wgmma_use(acc[half]);  // or the compiler keeps what it could use again
      exact(
          [&](float (&kept)[32 * kStrips]) {
#pragma unroll
            for (int i = 0; i < 32 * kStrips; ++i) kept[i] = acc[i / 32][i % 32];
          },
          inside, store);
    }
  }
  __device__ __forceinline__ Sums sums(const float (&acc)[kStrips][32]) const {
    const int t = lane & 3;
    constexpr int kRows = 2 * kStrips, kChannels = 16 / kRows, kBatches = 16 / kChannels;  // 16 values at a time
    Sums s{};
    float h[16], e[16], p[16];
    float4 affine[kChannels / 2];
    float bias[kChannels], weight[kChannels];
    auto value = [&](int batch, int i) {
      const int c = batch * kChannels + i / kRows, r = i % kRows;
      return acc[r / 2][c / 2 * 4 + r % 2 * 2 + c % 2];
    };
    auto start = [&](int batch) {
#pragma unroll
      for (int i = 0; i < kChannels; i += 2) {
        const float4* const from = table + (batch * kChannels + i) / 2 * 8 + t * 2;
        affine[i / 2] = from[0];
        const float4 v = from[1];
        bias[i] = v.x, bias[i + 1] = v.y, weight[i] = v.z, weight[i + 1] = v.w;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float4 v = affine[i / kRows / 2];
        const bool odd = i / kRows % 2;
        h[i] = tanh_approx(fmaf(value(batch, i), odd ? v.z : v.x, odd ? v.w : v.y));
      }
    };
    start(0);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (batch > 0) s.of[i % kRows] += p[i];
        e[i] = power(h[i], fmaf(value(batch, i), weight[i / kRows], bias[i / kRows]));
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) p[i] = exp2_approx(e[i]);
      if (batch + 1 < kBatches) start(batch + 1);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) s.of[i % kRows] += p[i];
    return s;
  }

  // The same of half types. `again` multiplies once more, into fp32. Pairs of channels come packed; exponentials and
  // their sums over 16 channels are fp16 too, fp32 where `wide`.
  template <typename Store, typename Again, typename Summed>
  __device__ __forceinline__ void finish(uint32_t (&acc)[kStrips][16], bool inside, const Store& store,
                                         const Again& again, const Summed&) {
    if (folded && !wide) {
      const float sum = sum_lanes(half_sums(acc));
      if (all(!inside || (sum > 0x1p-4f && sum < 1e30f))) {
        if (inside) store((log2_approx(sum) + shift) * kLn2);
        return;
      }
#pragma unroll
      for (int half = 0; half < kStrips; ++half) wgmma_use(acc[half]);  // or the compiler keeps what it could use again
    }
    const float sum = sum_lanes(wide_sums(acc));
    if (all(!inside || (sum > 1e-30f && sum < 1e30f))) {
      if (inside) store((log2_approx(sum) + shift) * kLn2);
      wide = !all(!inside || (sum > 0x1p-3f && sum < 0x1p14f));
    } else {
      exact(again, inside, store);
    }
  }

  __device__ __forceinline__ static float2 unpacked(uint32_t v) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  }
  __device__ __forceinline__ static uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  __device__ __forceinline__ static uint32_t add2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  // The root of what hardswish of tanh adds, of a pair of channels.
  __device__ __forceinline__ static uint32_t root2(uint32_t u, const uint2& of, bool polynomial) {
    constexpr uint32_t kScale2 = 0x37d937d9, kOffset2 = 0x39e239e2;
    if (!polynomial) {
      uint32_t h;
      asm("tanh.approx.f16x2 %0, %1;" : "=r"(h) : "r"(fma2(u, of.x, of.y)));
      return fma2(h, kScale2, kOffset2);
    }
    // w (c0 + c1 w^2 + ... + c4 w^8) for w = z / (2 kTanhRange), which stays within a half.
    uint32_t v, square;
    asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(u), "r"(of.x), "r"(of.y));
    const uint32_t w = add2(v, 0xb800b800);
    asm("mul.rn.f16x2 %0, %1, %1;" : "=r"(square) : "r"(w));
    uint32_t q = fma2(square, 0x615b615b, 0xdfcadfca);
    q = fma2(square, q, 0x58775877);
    q = fma2(square, q, 0xcd7fcd7f);
    q = fma2(square, q, 0x414e414e);
    return fma2(w, q, kOffset2);
  }
  // Of rows g and g + 8 of both strips: channels 8 i + 2 t and the next are pair 4 i + t of the table.
  __device__ __forceinline__ Sums half_sums(const uint32_t (&acc)[kStrips][16]) const {
    constexpr int kPairs = 8, kBatches = 4;  // two pairs of channels of four rows at a time
    uint32_t s[4] = {}, root[kPairs], e[kPairs], p[kPairs];
    auto value = [&](int batch, int i) { return acc[i % 4 / 2][(batch * 2 + i / 4) * 2 + i % 2]; };
    auto start = [&](int batch) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int pair = batch * 2 + i / 4;
        root[i] = root2(value(batch, i), affine2[pair], is_polynomial(pair));
      }
    };
    start(0);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (batch > 0) s[i % 4] = add2(s[i % 4], p[i]);
        e[i] = fma2(root[i], root[i], value(batch, i));
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) asm("ex2.approx.f16x2 %0, %1;" : "=r"(p[i]) : "r"(e[i]));
      if (batch + 1 < kBatches) start(batch + 1);
    }
    Sums sums;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) s[i % 4] = add2(s[i % 4], p[i]);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float2 v = unpacked(s[r]);
      sums.of[r] = v.x + v.y;
    }
    return sums;
  }
  // Each channel as fp32.
  __device__ __forceinline__ Sums wide_sums(const uint32_t (&acc)[kStrips][16]) const {
    Sums sums{};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int c = i * 8 + (lane & 3) * 2;
      const float4 first = scales(c), second = scales(c + 1);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 u = unpacked(acc[r / 2][2 * i + r % 2]);
        sums.of[r] += exp2_approx(power(tanh_approx(fmaf(u.x, first.x, first.y)), fmaf(u.x, first.z, first.w))) +
                      exp2_approx(power(tanh_approx(fmaf(u.y, second.x, second.y)), fmaf(u.y, second.z, second.w)));
      }
    }
    return sums;
  }

  // Values that leap, sums beyond fp16, infinities and NaNs: rare, so small code counts for more than speed.
  // `fill_kept` fills what is indexed at run time, hence in local memory.
  template <typename Store, typename FillKept>
  __device__ __forceinline__ void exact(const FillKept& fill_kept, bool inside, const Store& store) {
    float kept[32 * kStrips];
    fill_kept(kept);
    const int t = lane & 3;
    float first = 0.f;
#pragma unroll 1
    for (int r = 0; r < 2 * kStrips; ++r) {
      float top = -INFINITY, s = 0.f;
#pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
        for (int i = 0; i < 16; ++i) {
          const int c = i / 2 * 8 + t * 2 + i % 2;
          const float u = kept[r / 2 * 32 + i / 2 * 4 + r % 2 * 2 + i % 2];
          const float4 of = scales(c);
          const float v = power(tanh_approx(fmaf(u, of.x, of.y)), fmaf(u, of.z, of.w)) + shift;
          if (pass == 0) {
            top = fmaxf(top, v);
          } else {
            s += exp2_approx(v - top);
          }
        }
        if (pass == 0) {
#pragma unroll
          for (int mask = 1; mask <= 2; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
          if (fabsf(top) == INFINITY) top = 0.f;  // as torch.logsumexp: an infinite maximum comes out as it is
        }
      }
#pragma unroll
      for (int mask = 1; mask <= 2; mask *= 2) s += __shfl_xor_sync(0xffffffffu, s, mask);
      s = log2f(s) + top;
      if (t == r && inside) store(s * kLn2);
      if (r == 0) first = s;
    }
    first = __shfl_sync(0xffffffffu, first, 0);
    // fp16 has more room above than below.
    shift = fabsf(first) < 1e30f ? first - (kHalfSums ? 4.f : 0.f) : 0.f;
    fill();
  }
};

// Sums of a thread's 16 channels around the block's pivots, in the units of the stage that was last read.
struct PositionSums {
  float sum[16] = {}, sum_sq[16] = {};
  int count = 0;
  float unit = 1.f;

  __device__ __forceinline__ void change_unit(float to) {
    const float change = unit / to;
    unit = to;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[i] *= change, sum_sq[i] = sum_sq[i] * change * change;
  }
  __device__ __forceinline__ void drop_pivots(const float* pivots, float ratio, int t) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float pivot = pivots[i / 2 * 8 + t * 2 + i % 2] * ratio, n = static_cast<float>(count);
      sum_sq[i] += pivot * fmaf(n, pivot, 2.f * sum[i]);
      sum[i] = fmaf(n, pivot, sum[i]);
    }
  }
  __device__ __forceinline__ void add(const float (&acc)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int c = i / 4 * 2 + i % 2;
      sum[c] += acc[i];
      sum_sq[c] = fmaf(acc[i], acc[i], sum_sq[c]);
    }
  }
};

#endif

template <ConvMath kMath, int kSteps, bool kLse>
__global__ void __launch_bounds__(position_threads(kLse), 1)
    conv_positions_kernel(const __grid_constant__ FewChannelsParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename ConvMathTraits<kMath>::Element;
  using Math = PositionMath<kMath, kLse>;
  constexpr bool kScaled = Math::kScaled, kHalfSums = Math::kHalfSums;
  constexpr int kProducers = position_producers(kLse), kConsumers = position_consumers(kLse);
  constexpr int kColumns = 64, kWarps = kConsumers * 4, kStrips = kPositionStrips;
  constexpr int kLoaders = 128 * kProducers, kThreads = kLoaders + 32 * kWarps;
  // Of loading and of computing threads; together no more than the block gets at its start.
  constexpr int2 kRegisters = kLse ? int2{80, 144} : int2{88, 168};
  constexpr int kBatch = kPositionSteps;   // whose fragments are loaded together
  constexpr int kJobStrips = 4 * kStrips;  // of a warpgroup at once
  constexpr uint32_t kOne = kMath == ConvMath::kBf16 ? 0x3f80 : 0x3c00;
  // What a pivot in half a word counts: fp16 would not hold what products come to.
  constexpr float kPivotUnit = kMath == ConvMath::kBf16 ? 1.f : 256.f;
  // Of a scheduler's three warps two are behind their products at a time: else all three come to their products
  // together. With sums in fp16, whose products are shorter, that gained nothing.
  constexpr bool kTurns = kLse && Math::kFp32;

  extern __shared__ __align__(128) uint32_t smem[];
  const FewChannelsPlan& plan = p.plan;
  const PositionSmemLayout layout = position_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  uint64_t* const turns = reinterpret_cast<uint64_t*>(smem + layout.turns);  // two of each warp
  uint32_t* const strip_table = smem + layout.strips;
  float* const unscale = reinterpret_cast<float*>(smem + layout.unscale);
  const int tid = threadIdx.x;
  const unsigned slices = static_cast<unsigned>(plan.slices);  // as the grid's size
  const int64_t n = blockIdx.x / slices, slice = blockIdx.x % slices;
  if (!kLse && skips_sample(p.stats, n)) return;
  const int c_begin = blockIdx.y * kColumns;  // first output channel of this block, within the conv group
  const int group = blockIdx.z;
  const int c_valid = min(kColumns, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels

  // Strip -> its place in the halo and its depth, row and column in the tile: 14, 2, 6 and 6 bits.
  const int per_row = plan.tile[2] / kFewChannelsStrip;
  constexpr uint32_t kNoStrip = 0xffffffff;
  for (int i = tid; i < plan.strips + kPositionNoStrips; i += kThreads) {
    const int w = i % per_row, h = i / per_row % plan.tile[1], d = i / (per_row * plan.tile[1]);
    const int at = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead +
                   w * kFewChannelsStrip * plan.step[2];
    strip_table[i] = i < plan.strips ? at << 16 | d << 12 | h << 6 | w : kNoStrip;
  }
  // Where a step of K's chunks lie, in bytes. Padding reads the first chunk again: what is not finite there spoils the
  // same outputs anyway.
  if (tid >= kThreads - 2 * kSteps) {
    const int taps = plan.kernel[0] * plan.kernel[1] * plan.kernel[2];
    const int chunk = tid - (kThreads - 2 * kSteps), type = chunk / taps, tap = chunk % taps;
    const int w = tap % plan.kernel[2], h = tap / plan.kernel[2] % plan.kernel[1],
              d = tap / (plan.kernel[2] * plan.kernel[1]);
    const int at = type * plan.plane / 4 + (d * plan.dilation[0] * plan.halo[1] + h * plan.dilation[1]) * plan.pitch +
                   w * plan.dilation[2];
    reinterpret_cast<int*>(smem + layout.chunks)[chunk] = type < plan.types ? at * 16 : 0;
  }
  if (tid == kThreads - 64) {
    if (kHalfSums) smem[layout.maxima + 6] = 0, smem[layout.maxima + 7] = 1;
#pragma unroll 1
    for (int stage = 0; stage < plan.stages; ++stage) {
      barrier_init(full + stage, kLoaders);
      barrier_init(empty + stage, 32 * kWarps);
    }
    if constexpr (kTurns) {
#pragma unroll 1
      for (int i = 0; i < 2 * kWarps; ++i) barrier_init(turns + i, 1);
    }
  }
  __syncthreads();

  int tile_count;
  const TileCursor cursor = few_channels_tiles(plan, slice, &tile_count);

  if (tid < kLoaders) {
    set_registers<kRegisters.x, false>();
    position_tiles<kMath, kLoaders, kLse>(p, layout, smem, n, group, cursor, tile_count);
  } else {
    set_registers<kRegisters.y, true>();
    // Kept in registers: the compiler would compute them again and again.
    auto keep = [](int v) {
      asm volatile("" : "+r"(v));
      return v;
    };
    const int lane = keep(tid & 31), g = keep(lane >> 2), t = keep(lane & 3);
    const int warp = __shfl_sync(0xffffffffu, tid / 32 - kLoaders / 32, 0);  // among the computing ones
    const int warpgroup = warp / 4;
    const int own_strip = keep(tid / 32 % 4 * kStrips);  // not known to be the same: uniform registers are slow
    using Acc = std::conditional_t<kHalfSums, uint32_t[kStrips][16], float[kStrips][32]>;
    auto use = [](Acc& acc) {
#pragma unroll
      for (int half = 0; half < kStrips; ++half) wgmma_use(acc[half]);
    };
    uint32_t* const weights = smem + layout.weights;
    // Behind what the loading warps have there.
    int* const folds = reinterpret_cast<int*>(smem + layout.maxima) + 7;
    [[maybe_unused]] int* const most_scale = folds - 1;
    position_weights<kMath, kSteps, kWarps, kLse>(p, weights, unscale, group, c_begin, c_valid, warp, lane, folds);
    wgmma_fence_shared();
    named_barrier(1, kWarps * 32);

    const bool has_constant = plan.k_words < 8 * kSteps;
    PositionLse<kMath> lse;
    PositionSums sums;
    if constexpr (kLse) {
      wait_for_prerequisites();  // the table of norms; everything else was there before them
      float4* const tables = reinterpret_cast<float4*>(smem + layout.columns);
      for (int c = tid - kLoaders; c < kColumns; c += kWarps * 32) {
        float4 v = make_float4(0.f, 0.f, 0.f, -INFINITY);
        if (c < c_valid) {
          const float bias = p.bias ? to_acc(static_cast<const Element*>(p.bias)[c]) : 0.f;
          const float4 norm = static_cast<const float4*>(p.norm_table)[n * p.c_out_total + c];
          const float norm_scale = norm.y * norm.z;
          // Weights of half types are in powers of 2.
          const float to_norm = kHalfSums ? 1.f / lse.kLog2E : 1.f, to_powers = kHalfSums ? 1.f : lse.kLog2E;
          v = make_float4(norm_scale * to_norm * unscale[c], fmaf(bias - norm.x, norm_scale, norm.w),
                          unscale[c] * to_powers, fmaf(bias, lse.kLog2E, -lse.kSquared));
        }
        if constexpr (kHalfSums) {
          // What the last chunk is multiplied by: the bias, and -1 for the shift.
          const bool fits =
              fabsf(v.w) < lse.kMostFolded && fabsf(v.y) < lse.kMostFolded / 2 &&
              fabsf(v.x) * fabsf(v.w) < lse.kMostFolded / 2;  // no NaN, which the polynomial would not pass
          if (c < c_valid && !fits) *folds = 0;
          if (c < c_valid && fits) atomicMax(most_scale, __float_as_int(fabsf(v.x)));
          const float to_bias = c < c_valid ? fits ? v.w : 0.f : -lse.kMostFolded;
          const float high = __half2float(__float2half_rn(to_bias));
          uint32_t* const to = weights + (((kSteps - 1) * 8 + c / 8) * 2 + 1) * 32 + c % 8 * 4;
          if (has_constant) to[0] = packed_halves(high, to_bias - high), to[1] = 0xbc00bc00;
        }
        tables[c] = v;
      }
      if (kHalfSums) wgmma_fence_shared();
      named_barrier(1, kWarps * 32);
      lse.folds = kHalfSums && has_constant && *folds != 0;
      lse.most_shift = fminf(lse.kMostFolded, lse.kMostFolded / 2 / __int_as_float(*most_scale));
      lse.base = tables;
      lse.table = tables + (warp + 1) * kColumns;
      lse.lane = lane;
      lse.fill();
    }

    uint32_t b_first = wgmma_b_descriptor(shared_address(weights));
    asm volatile("" : "+r"(b_first));  // else it would be computed again for each product
    // Where this lane reads its row of each step's left operand, from the strip's place on.
    const int* const chunk_table = reinterpret_cast<const int*>(smem + layout.chunks) + (lane >> 4);
    const int own_row = (lane & 15) * plan.step[2] * 16;
    [[maybe_unused]] int chunk_at[kBatch];
    if constexpr (kSteps == kBatch) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) chunk_at[i] = chunk_table[2 * i] + own_row;
    }
    const uint32_t halo = shared_address(smem + layout.halo);
    const int stage_bytes = plan.stage_words * 4;

    struct Strip {
      uint32_t address;  // of its place in the halo
      uint32_t offset;   // of its first position in the sample's result
      int width;         // positions inside
    };
    int stage = 0, job = warpgroup, jobs;
    uint32_t parity = 0, tile = static_cast<uint32_t>(slice * plan.tiles_per_slice);
    int room[3];  // what is left of the output from the tile's first position on, and where that lies
    uint32_t tile_offset, stage_address;
    // What undoes the scale of the tile's input, and of the one that the pivots were taken from; 0: there are none.
    float unit = 1.f, pivot_unit = 0.f;
    uint32_t pivot_by = 0;
    auto enter_tile = [&] {
      const uint32_t tiles_w = static_cast<uint32_t>(plan.tiles[2]), tiles_h = static_cast<uint32_t>(plan.tiles[1]);
      const uint32_t row = tile / tiles_w, plane = row / tiles_h;
      const int d = plane * plan.tile[0], h = (row - plane * tiles_h) * plan.tile[1],
                w = (tile - row * tiles_w) * plan.tile[2];
      room[0] = min(plan.tile[0], p.out[0] - d), room[1] = p.out[1] - h, room[2] = p.out[2] - w;
      tile_offset = uint32_t(d * p.out[1] + h) * p.out[2] + w;
      const int strips = ((room[0] - 1) * plan.tile[1] + min(plan.tile[1], room[1])) * per_row;
      jobs = (strips + kJobStrips - 1) / kJobStrips;
      stage_address = halo + stage * stage_bytes;
    };
    float* const pivots = reinterpret_cast<float*>(smem + layout.pivots);
    // What belongs to the stage, once it is there.
    auto enter_stage = [&] {
      if constexpr (kScaled) unit = reinterpret_cast<const float*>(smem + layout.scales)[stage];
      if constexpr (kLse) {
        if (kScaled && unit != lse.unit) {
          lse.unit = unit;
          lse.fill();
        }
      } else {
        if constexpr (kScaled) {
          if (unit != sums.unit) sums.change_unit(unit);
        }
        uint32_t bits = pivot_unit == 0.f ? 0 : kOne;
        if constexpr (kMath != ConvMath::kBf16) {
          const float ratio = kScaled ? __fdividef(pivot_unit, unit) : pivot_unit, by = kPivotUnit * ratio;
          if (pivot_unit != 0.f && !(by >= 0x1p-14f && by < 65536.f)) {  // no fp16 value
            sums.drop_pivots(pivots, ratio, t);
            pivot_unit = 0.f;
          }
          bits = pivot_unit == 0.f ? 0 : __half_as_ushort(__float2half_rn(by));
        }
        pivot_by = t == 0 ? bits : 0;
      }
    };
    const uint32_t strips_at = keep(shared_address(strip_table) + own_strip * 4);
    auto read_entries = [&](int of_job, uint32_t (&entries)[kStrips]) {
#pragma unroll
      for (int half = 0; half < kStrips; ++half) {
        asm volatile("ld.shared.u32 %0, [%1];"
                     : "=r"(entries[half])
                     : "r"(strips_at + (of_job * kJobStrips + half) * 4));
      }
    };
    auto make_strips = [&](const uint32_t (&entries)[kStrips], Strip(&strips)[kStrips]) {
#pragma unroll
      for (int half = 0; half < kStrips; ++half) {
        const uint32_t entry = entries[half];
        const int d = entry >> 12 & 3, h = entry >> 6 & 63, w = (entry & 63) * kFewChannelsStrip;
        const bool inside = entry != kNoStrip && d < room[0] && h < room[1];
        strips[half] = {stage_address + (inside ? entry >> 16 << 4 : 0),
                        tile_offset + (d * p.out[1] + h) * p.out[2] + w,
                        inside ? min(kFewChannelsStrip, room[2] - w) : 0};
      }
    };
    uint32_t ahead[kStrips];  // of `job`, read a turn before they are needed
    // The next strips of this warpgroup; a stage is given back when its last ones were multiplied. False after the
    // last.
    auto advance = [&](Strip(&strips)[kStrips]) {
      if (job >= jobs) {
        do {
          barrier_arrive(empty + stage);
          if (--tile_count == 0) return false;
          if (++stage == plan.stages) stage = 0, parity ^= 1;
          ++tile;
          job -= jobs;
          enter_tile();
          barrier_wait(full + stage, parity);
          enter_stage();
        } while (job >= jobs);
        read_entries(job, ahead);
      }
      make_strips(ahead, strips);
      job += kConsumers;
      read_entries(job, ahead);
      return true;
    };
    auto multiply = [&](Acc& acc, const Strip(&strips)[kStrips]) {
#pragma unroll
      for (int half = 0; half < kStrips; ++half) {
#pragma unroll
        for (int batch = 0; batch < kSteps; batch += kBatch) {
          uint32_t a[kBatch][4];
          const uint32_t from = strips[half].address;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            load_matrices(a[i], from + (kSteps == kBatch ? chunk_at[i] : chunk_table[2 * (batch + i)] + own_row));
          }
          // The last chunk is a constant, which is what the pivots are multiplied by.
          if (!kLse && batch + kBatch == kSteps) a[kBatch - 1][2] = a[kBatch - 1][3] = pivot_by;
          if (kHalfSums && batch + kBatch == kSteps && has_constant) {
            a[kBatch - 1][2] = a[kBatch - 1][3] = lse.constants;
          }
#pragma unroll
          for (int i = 0; i < 4 * kBatch; ++i) asm volatile("" : "+r"(a[i / 4][i % 4]));
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if constexpr (kHalfSums) {
              wgmma_half_sums(acc[half], a[i], b_first + (batch + i) * 128, batch + i > 0);
            } else {
              wgmma<Math::kType, kColumns>(acc[half], a[i], b_first + (batch + i) * 128, batch + i > 0);
            }
          }
          wgmma_commit();
          if (batch + kBatch < kSteps) {  // for the registers of A
            wgmma_wait<0>();
            use(acc);
          }
        }
      }
    };
    // The same for this warp alone and summed in fp32: of each strip, 8 channels after the other, as wgmma has them.
    [[maybe_unused]] auto multiply_again = [&](float (&kept)[32 * kStrips], const Strip(&strips)[kStrips]) {
#pragma unroll 1
      for (int i = 0; i < 8 * kStrips; ++i) {
        const uint32_t from = i < 8 ? strips[0].address : strips[kStrips - 1].address;
        float c[4] = {};
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
          uint32_t a[4], b[4];
          load_matrices(a, from + chunk_table[2 * step] + own_row);
          if (kHalfSums && step == kSteps - 1 && has_constant) a[2] = a[3] = lse.constants;
          load_matrices(b, shared_address(weights) + (step * 8 + i % 8) * 256 + (lane & 15) * 16);  // two of them twice
          mma_fp16(c, a, b[0], b[1]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) kept[i * 4 + k] = c[k];
      }
    };
    // Job m waits until job m - 2 is done, which the warp of the next warpgroup has. A warp's jobs take its two
    // barriers in turn: when m waits that warp has done m - 5 and may have done m + 1, but not m + 4, so that the
    // parity tells.
    [[maybe_unused]] uint64_t* const turns_of_warp = turns + 2 * warp;
    [[maybe_unused]] uint64_t* const turns_before = turns + 2 * ((warp + 4) % kWarps);
    [[maybe_unused]] int turn = 0;  // of this warp's jobs
    auto wait_for_turn = [&] {
      if constexpr (kTurns) {
        const int before = turn - (warpgroup != kConsumers - 1);
        barrier_wait(turns_before + (before & 1), before >> 1 & 1);  // true where there is none before
      }
    };
    const int64_t y_first = n * p.y_stride_n;
    auto epilogue = [&](Acc& acc, const Strip(&strips)[kStrips]) {
      if constexpr (kLse) {
        // The position that this lane finishes.
        const Strip& last = strips[kStrips - 1];
        const bool second = t & 2;
        const int at = g + (t & 1) * 8;
        const int64_t y_at = y_first + (second ? last.offset : strips[0].offset) + at;
        lse.finish(
            acc, at < (second ? last.width : strips[0].width),
            [&](float v) {
              if (!Math::kFp32 && p.y_rounded) {
                static_cast<Element*>(p.y)[y_at] = from_acc<Element>(v);
              } else {
                static_cast<float*>(p.y)[y_at] = v;
              }
            },
            [&](float (&kept)[32 * kStrips]) { multiply_again(kept, strips); },
            [&] {
              if constexpr (kTurns) {
                if (lane == 0) barrier_arrive(turns_of_warp + (turn & 1));
              }
            });
      } else {
#pragma unroll
        for (int half = 0; half < kStrips; ++half) {
          const int width = strips[half].width;
          if (width < kFewChannelsStrip) {
#pragma unroll
            for (int i = 0; i < 32; ++i) acc[half][i] = g + i / 2 % 2 * 8 < width ? acc[half][i] : 0.f;
          }
          sums.count += (g < width) + (g + 8 < width);
          sums.add(acc[half]);
        }
      }
    };

    Acc acc;
    Strip strips[kStrips];
    enter_tile();
    barrier_wait(full, 0);
    enter_stage();
    if constexpr (!kLse) {
      // Pivots: the means over a strip in the middle of the first tile.
      const int middle = (min(plan.tile[1], room[1]) / 2 & ~1) * per_row;  // even
      sums.unit = unit;
      if (warpgroup == 0) {
        read_entries(middle / kJobStrips, ahead);
        make_strips(ahead, strips);
        multiply(acc, strips);
        wgmma_wait<0>();
        use(acc);
        if (warp == middle % kJobStrips / kStrips) {
          const int width = strips[0].width;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const int at = i / 2 * 4 + i % 2;
            float v = 0.f;
            if (g < width) v = acc[0][at];
            if (g + 8 < width) v += acc[0][at + 2];
#pragma unroll
            for (int mask = 4; mask <= 16; mask *= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
            v /= kPivotUnit * max(width, 1);
            unsigned short bits;
            float rounded;
            if constexpr (kMath == ConvMath::kBf16) {
              const __nv_bfloat16 h = __float2bfloat16_rn(-v);
              bits = __bfloat16_as_ushort(h), rounded = -__bfloat162float(h);
            } else {
              const __half h = __float2half_rn(-v);
              bits = __half_as_ushort(h), rounded = -__half2float(h);
            }
            if (!(fabsf(rounded) < INFINITY)) bits = 0, rounded = 0.f;
            const int c = i / 2 * 8 + t * 2 + i % 2;
            if (g == 0) {
              reinterpret_cast<unsigned short*>(weights)[(((kSteps - 1) * 8 + c / 8) * 2 + 1) * 64 + c % 8 * 8] = bits;
              pivots[c] = rounded * kPivotUnit;
            }
          }
          wgmma_fence_shared();
        }
      }
      pivot_unit = unit;
      enter_stage();
      named_barrier(1, kWarps * 32);
    }
    if (job < jobs) read_entries(job, ahead);
    while (advance(strips)) {
      multiply(acc, strips);
      wgmma_wait<0>();
      use(acc);
      wait_for_turn();
      epilogue(acc, strips);
      ++turn;
    }

    if constexpr (!kLse) {
      // Thread -> warp (rows of one channel lie in the lanes of equal t) -> block.
      Moments<float>* const shared = reinterpret_cast<Moments<float>*>(smem + layout.columns);
      int count = sums.count;
#pragma unroll
      for (int mask = 4; mask <= 16; mask *= 2) count += __shfl_xor_sync(0xffffffffu, count, mask);
      const float inverse = count > 0 ? __fdividef(1.f, static_cast<float>(count)) : 0.f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float sum = sums.sum[i], sum_sq = sums.sum_sq[i];
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, mask);
          sum_sq += __shfl_xor_sync(0xffffffffu, sum_sq, mask);
        }
        const int c = i / 2 * 8 + t * 2 + i % 2;
        const float own_unit = sums.unit * unscale[c];
        const float m2 = fmaf(-sum * inverse, sum, sum_sq) * own_unit * own_unit;
        if (g == 0) {
          shared[warp * kColumns + c] = {fmaf(sum * inverse, own_unit, pivots[c] * pivot_unit * unscale[c]),
                                         m2 < 0.f ? 0.f : m2, static_cast<float>(count)};
        }
      }
      finish_stats<kColumns, kWarps, kWarps * 32>(
          p.stats, n, slice, c_first, c_valid, shared, tid - kLoaders,
          [&](int c) { return p.bias ? to_acc(static_cast<const Element*>(p.bias)[c_first + c]) : 0.f; });
    }
  }
#endif
}

}  // namespace kgopt
