// Statistics of a convolution with few input and at most 32 output channels and kernels of height 3, sm_90a.
//
// As in conv3d_narrow_kernel.cuh, rows of the products are positions, three kernel rows are columns side by side, and
// each row of the halo adds to the accumulators of three output rows. What differs is how the left operand comes to the
// registers. The halo holds no input as it lies, but chunks of eight half values that belong together: of the taps of
// the depth and the channels at one position, gathered once by the loading warpgroups for each output depth. Two chunks
// are a step of K, one ldmatrix; the kernel's columns read the chunks of neighbours along the width. K is dense: 3
// channels and taps of 3 x 3 x 3 are 27 of 32 values.
//
// fp32 input becomes one fp16 term (11 bits, as TF32) or two (fp32 accuracy, three products), scaled by a power of two
// that a stage keeps as long as its values fit: fp16's range then does not matter.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>
#include <utility>

#include "../common/async.cuh"
#include "../common/dtype.cuh"
#include "../common/reduce.cuh"
#include "../common/wgmma.cuh"
#include "conv3d_kernel.cuh"
#include "conv3d_narrow_finish.cuh"
#include "conv3d_narrow_load.cuh"

namespace kgopt {

// A value of a type of chunk: where it lies in x, in bytes from the position's first tap on, and how far along the
// depth and the width that is. Padding lies outside of any depth.
struct WindowEntry {
  int64_t bytes;
  int depth, column;
};
inline constexpr int kWindowPadding = 1 << 30;

// Tiles in the order of their depths: neighbours share planes of the input.
struct WindowCursor {
  int d, h, w;
  __device__ __forceinline__ void advance(int tiles_d, int tiles_w) {
    if (++d < tiles_d) return;
    d = 0;
    if (++w == tiles_w) w = 0, ++h;
  }
};

inline constexpr int kWindowLoaders = 128 * kWindowProducers;  // threads
KGOPT_HD constexpr int window_threads(ConvMath math, int columns, int blocks) {
  return kWindowLoaders + 128 * window_consumers(math, columns, blocks);
}

// Value e of chunk type `type`: its channel, kernel depth and kernel column (beyond the shift that a type may be read
// with). False: padding.
__device__ __forceinline__ bool window_value(const NarrowPlan& plan, int c_in, int type, int e, int* c, int* d,
                                             int* w) {
  int value = type * 8 + e;
  *w = 0;
  if (type >= plan.shifted_types) {
    const int together = value - plan.shifted_types * 8;
    value = plan.shifted_types * 8 + together / plan.kernel[2];
    *w = together % plan.kernel[2];
  }
  *c = value % c_in;
  *d = value / c_in;
  return *d < plan.kernel[0];
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Values of a type that are not padding; they come first.
__device__ __forceinline__ int window_values(const NarrowPlan& plan, int c_in, int type) {
  const int all = c_in * plan.kernel[0];
  if (type < plan.shifted_types) return min(8, all - type * 8);
  return min(8, (all - plan.shifted_types * 8) * plan.kernel[2] - (type - plan.shifted_types) * 8);
}

// Where position w of a halo row lies: threads that store four positions each and lanes that read neighbours both meet
// every bank once.
__device__ __forceinline__ int window_place(int w) { return w ^ (w >> 3 & 3); }

// The tiles of a slice: how many, and the first.
__device__ __forceinline__ WindowCursor window_tiles(const NarrowPlan& plan, int64_t slice, int* count) {
  const int begin = static_cast<int>(slice * plan.tiles_per_slice);
  *count = static_cast<int>(min(plan.tiles_per_slice, plan.tiles_per_sample - begin));
  const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
  return {begin % tiles_d, begin / tiles_d / tiles_w, begin / tiles_d % tiles_w};
}

// Whether any of the loading threads says so. All of them wait for each other.
template <int kLoaders = kWindowLoaders>
__device__ __forceinline__ bool any_loader(bool mine) {
  uint32_t any;
  asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n bar.red.or.pred q, 2, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(uint32_t(mine)), "n"(kLoaders)
               : "memory");
  return any != 0;
}

// Four neighbours, or one value, from memory; zeros where `inside` is false, without reading.
__device__ __forceinline__ void load_if(uint32_t (&v)[4], const void* from, bool inside) {
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n mov.u32 %2, 0;\n mov.u32 %3, 0;\n"
      " @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])
      : "l"(from), "r"(uint32_t(inside)));
}
__device__ __forceinline__ void load_if(uint32_t (&v)[2], const void* from, bool inside) {
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n"
      " @p ld.global.nc.v2.u32 {%0, %1}, [%2];\n}"
      : "=&r"(v[0]), "=&r"(v[1])
      : "l"(from), "r"(uint32_t(inside)));
}
__device__ __forceinline__ uint32_t load_one_if(const float* from, bool inside) {
  uint32_t v;
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u32 %0, 0;\n @p ld.global.nc.u32 %0, [%1];\n}"
      : "=&r"(v)
      : "l"(from), "r"(uint32_t(inside)));
  return v;
}
template <typename Half>
__device__ __forceinline__ uint32_t load_one_if(const Half* from, bool inside) {
  unsigned short v;
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u16 %0, 0;\n @p ld.global.nc.u16 %0, [%1];\n}"
      : "=&h"(v)
      : "l"(from), "r"(uint32_t(inside)));
  return v;
}

__device__ __forceinline__ uint32_t packed_halves(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&h);
}

// The largest of the loading threads' values, none of which is negative, as bits. All of them wait for each other.
template <int kLoaders = kWindowLoaders>
__device__ __forceinline__ uint32_t loaders_max(float mine, uint32_t* maxima) {
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(mine));  // in the order of their bits
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = of_warp;
  named_barrier(2, kLoaders);
  uint32_t bits = maxima[0];
#pragma unroll 1
  for (int i = 1; i < kLoaders / 32; ++i) bits = max(bits, maxima[i]);
  named_barrier(2, kLoaders);
  return bits;
}

// The scale for values of which the largest finite one is `bits`. True where the old one stays: the largest is finite
// in fp16 then and has bits to spare below it. Else it comes below 2^11, or the scale is as much above the lowest one
// that there was as sums of squares bear.
inline constexpr float kWindowRange = 65536.f;
__device__ __forceinline__ bool scale_of_window(uint32_t bits, float* scale, float* lowest) {
  const uint32_t exponent = min(max(bits >> 23, 15u), 254u);
  const float fitting = fminf(__uint_as_float((264 - exponent) << 23), *lowest * kWindowRange);
  const float scaled = __uint_as_float(bits) * *scale;
  const bool stays = (scaled >= 2.f && scaled < 65504.f) || fitting == *scale;
  if (!stays) *scale = fitting;
  *lowest = fminf(*lowest, *scale);
  return stays;
}

// What the loading warpgroups do from start to end, for any taps and strides.
template <ConvMath kMath>
__device__ __forceinline__ void window_load_tiles(const NarrowParams& p, const WindowSmemLayout& layout, uint32_t* smem,
                                                  int64_t n, int group, WindowCursor cursor, int tile_count) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr bool kScaled = std::is_same_v<Element, float>;
  constexpr bool kTwoTerms = kMath == ConvMath::kFp16x3;
  const NarrowPlan& plan = p.plan;
  const int tid = threadIdx.x;
  const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  const WindowEntry* const entries = reinterpret_cast<const WindowEntry*>(smem + layout.entries);
  const Element* const x_sample =
      static_cast<const Element*>(p.x) + n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
  const bool vectors = p.load == NarrowLoad::kVectors;
  const int across = plan.vectors;
  const int threads_w = min(across, kWindowLoaders);
  const int rows_at_once = kWindowLoaders / threads_w;
  const int first_row = tid / threads_w < rows_at_once ? tid / threads_w : 1 << 24;
  const int rows = plan.tile[0] * plan.halo[1];
  // Of the values of a stage, and the lowest one that there was.
  float scale = 1.f, lowest = INFINITY;
  const unsigned in_depth = p.in[0];

  int stage = 0;
  uint32_t parity = 1;
  for (int tile = 0; tile < tile_count; ++tile, cursor.advance(tiles_d, tiles_w)) {
    barrier_wait(empty + stage, parity);
    uint32_t* const to_stage = smem + layout.halo + stage * window_stage_words(plan);
    const int in_d = cursor.d * plan.tile[0] * plan.step[0] + plan.origin[0];
    const int in_h = cursor.h * plan.tile[1] + plan.origin[1];
    const int in_w = cursor.w * plan.tile[2] + plan.origin[2] - plan.lead;
    float most = 0.f;  // finite value of x, where that is asked for
    // Normally one sweep over the halo. Where its values do not fit the scale, one that measures them and one more.
    for (int pass = 0; pass < 3; ++pass) {
      const bool measures = kScaled && pass == 1;
      __half2 largest = __half2half2(__ushort_as_half(0));  // of what was stored
      for (int type = 0; type < plan.types; ++type) {
        const WindowEntry* const of_type = entries + type * 8;
        const int values = window_values(plan, p.c_in, type);
        int d = 0, h = first_row;
        for (int row = first_row; row < rows; row += rows_at_once, h += rows_at_once) {
          while (h >= plan.halo[1]) h -= plan.halo[1], ++d;
          const bool row_inside = unsigned(in_h + h) < unsigned(p.in[1]);
          const int depth = in_d + d * plan.step[0];
          for (int place = tid % threads_w; place < across; place += threads_w) {
            const int w = in_w + place * 4;  // a vector lies inside or outside as a whole
            const char* const src = reinterpret_cast<const char*>(x_sample + depth * p.x_stride[0] +
                                                                  (in_h + h) * p.x_stride[1] + w * p.x_stride[2]);
            // Values of four positions; half types: in two words. All loads are under way before the first is used.
            uint32_t v[8][kScaled ? 4 : 2];
            if (vectors && type < plan.shifted_types) {
              const bool vector_inside = row_inside && unsigned(w) < unsigned(p.in[2]);
#pragma unroll
              for (int e = 0; e < 8; ++e) {
                load_if(v[e], src + of_type[e].bytes, vector_inside && unsigned(depth + of_type[e].depth) < in_depth);
              }
            } else {
              uint32_t bits[8][4];
#pragma unroll
              for (int e = 0; e < 8; ++e) {
                if (e < values) {
                  const WindowEntry entry = of_type[e];
                  const bool inside = row_inside && unsigned(depth + entry.depth) < in_depth;
                  const char* const from = src + entry.bytes;
#pragma unroll
                  for (int i = 0; i < 4; ++i) {
                    bits[e][i] = load_one_if(reinterpret_cast<const Element*>(from) + i * p.x_stride[2],
                                             inside && unsigned(w + entry.column + i) < unsigned(p.in[2]));
                  }
                } else {
#pragma unroll
                  for (int i = 0; i < 4; ++i) bits[e][i] = 0;
                }
              }
#pragma unroll
              for (int e = 0; e < 8; ++e) {
                if constexpr (kScaled) {
#pragma unroll
                  for (int i = 0; i < 4; ++i) v[e][i] = bits[e][i];
                } else {
                  v[e][0] = bits[e][0] | bits[e][1] << 16, v[e][1] = bits[e][2] | bits[e][3] << 16;
                }
              }
            }
            if constexpr (kScaled) {
              if (measures) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                  const float size = fabsf(__uint_as_float(v[i / 4][i % 4]));
                  most = size < INFINITY ? fmaxf(most, size) : most;
                }
                continue;
              }
              if (scale != 1.f) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                  v[i / 4][i % 4] = __float_as_uint(__uint_as_float(v[i / 4][i % 4]) * scale);
                }
              }
            }
            uint32_t* const to = to_stage + type * plan.plane + (row * plan.pitch + place * 4) * 4;
            const int swap = place >> 1 & 3;  // see window_place
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              uint32_t* const at = to + (i ^ swap) * 4;
              uint32_t word[4];
#pragma unroll
              for (int k = 0; k < 4; ++k) {
                if constexpr (kScaled) {
                  word[k] = packed_halves(__uint_as_float(v[2 * k][i]), __uint_as_float(v[2 * k + 1][i]));
                  largest = __hmax2(largest, __habs2(*reinterpret_cast<const __half2*>(&word[k])));
                } else {
                  word[k] = __byte_perm(v[2 * k][i / 2], v[2 * k + 1][i / 2], i % 2 ? 0x7632 : 0x5410);
                }
              }
              *reinterpret_cast<uint4*>(at) = make_uint4(word[0], word[1], word[2], word[3]);
              if constexpr (kTwoTerms) {
                // An infinite value's second term is NaN: its channel's statistics are that already.
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&word[k]));
                  word[k] =
                      packed_halves(__uint_as_float(v[2 * k][i]) - high.x, __uint_as_float(v[2 * k + 1][i]) - high.y);
                }
                *reinterpret_cast<uint4*>(at + plan.types * plan.plane) =
                    make_uint4(word[0], word[1], word[2], word[3]);
              }
            }
          }
        }
      }
      if constexpr (!kScaled) {
        break;
      } else if (pass == 0) {
        // The scale stays where all finite values are finite in fp16 and the largest has bits to spare below it.
        const float top = fmaxf(__low2float(largest), __high2float(largest));
        const bool too_large = any_loader(top == INFINITY);
        if (!too_large && any_loader(top >= 2.f || scale == lowest * kWindowRange)) {
          lowest = fminf(lowest, scale);
          break;
        }
      } else if (pass == 1) {
        uint32_t* const maxima = smem + layout.maxima;
        const uint32_t bits = loaders_max(most, maxima);
        if (bits == 0) break;
        if (scale_of_window(bits, &scale, &lowest)) break;
      }
    }
    if constexpr (kScaled) {
      if (tid == 0) reinterpret_cast<float*>(smem + layout.scales)[stage] = 1.f / scale;
    }
    barrier_arrive(full + stage);
    if (++stage == plan.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// The same for kernels of 3 x 3 x 3, stride 1 and tiles of one depth, where rows come in vectors and a thread has one
// piece of four positions of the halo: going down the depth, it keeps the values of two planes and loads the third,
// while the tile before it is stored.
template <ConvMath kMath, int kChannels>
__device__ __forceinline__ void window_march_tiles(const NarrowParams& p, const WindowSmemLayout& layout,
                                                   uint32_t* smem, int64_t n, int group, WindowCursor cursor,
                                                   int tile_count) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr bool kScaled = std::is_same_v<Element, float>;
  constexpr int kTerms = kMath == ConvMath::kFp16x3 ? 2 : 1;
  constexpr int kRaw = kScaled ? 4 : 2;  // words of four positions
  constexpr int kValues = 3 * kChannels, kFull = kValues / 8, kRest = kValues % 8;
  // As window_take_chunks: types that all kernel columns read, and those that hold the rest of all columns.
  constexpr int kTogether = (kRest * 3 + 7) / 8 < 3 ? (kRest * 3 + 7) / 8 : 0;
  constexpr int kShifted = kFull + (kRest > 0 && kTogether == 0);
  const NarrowPlan& plan = p.plan;
  const int tid = threadIdx.x;
  const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  const int row = tid / plan.march_lanes, place = tid % plan.march_lanes;
  const bool active = row < plan.halo[1] && place < plan.vectors;
  const Element* const x_sample =
      static_cast<const Element*>(p.x) + n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
  const int swap = place >> 1 & 3;  // see window_place
  uint32_t* const to = smem + layout.halo + (row * plan.pitch + place * 4) * 4;
  const int stage_words = window_stage_words(plan);

  float scale = 1.f, lowest = INFINITY;
  int quiet = 0;  // planes since one with large values
  const Element* from = nullptr;
  bool inside = false;
  uint32_t raw[kChannels][kRaw];
  auto load_plane = [&](int depth) {
    const bool loads = inside && unsigned(depth) < unsigned(p.in[0]);
    const Element* at = from + depth * p.x_stride[0];
#pragma unroll
    for (int c = 0; c < kChannels; ++c, at += p.x_stride_c) load_if(raw[c], at, loads);
  };
  uint32_t value[kTerms][kValues][2];  // of four positions, channels innermost of depths
#pragma unroll
  for (int i = 0; i < kTerms * kValues * 2; ++i) value[i / (kValues * 2)][i / 2 % kValues][i % 2] = 0;

  int stage = 0;
  uint32_t parity = 1;
  bool there = false;  // two of the tile's planes, and the third is under way
  for (int tile = 0; tile < tile_count; ++tile) {
    const int depth = cursor.d + plan.origin[0];
    if (!there) {
      const int h = cursor.h * plan.tile[1] + plan.origin[1] + row;
      const int w = cursor.w * plan.tile[2] + plan.origin[2] - plan.lead + place * 4;
      inside = active && unsigned(h) < unsigned(p.in[1]) && unsigned(w) < unsigned(p.in[2]);
      from = x_sample + h * p.x_stride[1] + w;
#pragma unroll 1
      for (int plane = 1; plane < 3; ++plane) {  // while the first one comes
        if (!inside || unsigned(depth + plane) >= unsigned(p.in[0])) continue;
        for (int c = 0; c < kChannels; ++c) {
          prefetch_l2(from + (depth + plane) * p.x_stride[0] + c * p.x_stride_c);
        }
      }
    }
    for (;;) {
      __half2 largest = __half2half2(__ushort_as_half(0));
#pragma unroll 1
      for (int plane = there ? 2 : 0; plane < 3; ++plane) {
        if (!there) load_plane(depth + plane);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
#pragma unroll
          for (int v = 0; v < kValues - kChannels; ++v) {
            value[term][v][0] = value[term][v + kChannels][0], value[term][v][1] = value[term][v + kChannels][1];
          }
        }
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          constexpr int kNew = kValues - kChannels;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (kScaled) {
              const float a = __uint_as_float(raw[c][2 * i]) * scale, b = __uint_as_float(raw[c][2 * i + 1]) * scale;
              const uint32_t word = packed_halves(a, b);
              value[0][kNew + c][i] = word;
              largest = __hmax2(largest, __habs2(*reinterpret_cast<const __half2*>(&word)));
              if constexpr (kTerms == 2) {
                // An infinite value's second term is NaN: its channel's statistics are that already.
                const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&word));
                value[kTerms - 1][kNew + c][i] = packed_halves(a - high.x, b - high.y);
              }
            } else {
              value[0][kNew + c][i] = raw[c][i];
            }
          }
        }
      }
      if constexpr (!kScaled) break;
      // The scale stays where all finite values are finite in fp16 and the largest has bits to spare below it.
      const float top = fmaxf(__low2float(largest), __high2float(largest));
      const bool too_large = any_loader(top == INFINITY),
                 large = any_loader(top >= 2.f || scale == lowest * kWindowRange);
      quiet = large ? 0 : there ? quiet + 1 : 3;
      if (!too_large && quiet < 3) {
        lowest = fminf(lowest, scale);
        break;
      }
      float most = 0.f;
#pragma unroll 1
      for (int plane = 0; plane < 3; ++plane) {
        load_plane(depth + plane);
#pragma unroll
        for (int i = 0; i < kChannels * kRaw; ++i) {
          const float size = fabsf(__uint_as_float(raw[i / kRaw][i % kRaw]));
          most = size < INFINITY ? fmaxf(most, size) : most;
        }
      }
      const uint32_t bits = loaders_max(most, smem + layout.maxima);
      if (bits == 0) break;
      quiet = 0;
      if (scale_of_window(bits, &scale, &lowest)) break;
      there = false;
    }
    cursor.advance(tiles_d, tiles_w);
    there = tile + 1 < tile_count && cursor.d > 0;
    if (there) load_plane(depth + 3);

    if (tile == 0) named_barrier(2, kWindowLoaders);  // the barriers are there, which loads did not wait for
    barrier_wait(empty + stage, parity);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      uint32_t* const at = to + stage * stage_words + term * plan.types * plan.plane;
      auto store = [&](int type, int i, const uint32_t (&word)[4]) {
        if (!active) return;
        *reinterpret_cast<uint4*>(at + type * plan.plane + (i ^ swap) * 4) =
            make_uint4(word[0], word[1], word[2], word[3]);
      };
#pragma unroll
      for (int type = 0; type < kShifted; ++type) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t word[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int v = type * 8 + 2 * k;
            const uint32_t a = v < kValues ? value[term][v < kValues ? v : 0][i / 2] : 0;
            const uint32_t b = v + 1 < kValues ? value[term][v + 1 < kValues ? v + 1 : 0][i / 2] : 0;
            word[k] = __byte_perm(a, b, i % 2 ? 0x7632 : 0x5410);
          }
          store(type, i, word);
        }
      }
      if constexpr (kTogether > 0) {
        uint32_t more[kRest];  // the next thread's first two positions
#pragma unroll
        for (int v = 0; v < kRest; ++v) more[v] = __shfl_down_sync(0xffffffffu, value[term][kFull * 8 + v][0], 1);
        // Position i of value v, as the lower half.
        auto half_of = [&](int v, int i) {
          const uint32_t word = i < 4 ? value[term][kFull * 8 + v][i / 2 % 2] : more[v];
          return i % 2 ? word >> 16 : word;
        };
#pragma unroll
        for (int type = 0; type < kTogether; ++type) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t word[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int q = type * 8 + 2 * k;
              const uint32_t a = q < kRest * 3 ? half_of(q < kRest * 3 ? q / 3 : 0, i + q % 3) : 0;
              const uint32_t b = q + 1 < kRest * 3 ? half_of(q + 1 < kRest * 3 ? (q + 1) / 3 : 0, i + (q + 1) % 3) : 0;
              word[k] = __byte_perm(a, b, 0x5410);
            }
            store(kShifted + type, i, word);
          }
        }
      }
    }
    if (kScaled && tid == 0) reinterpret_cast<float*>(smem + layout.scales)[stage] = 1.f / scale;
    barrier_arrive(full + stage);
    if (++stage == plan.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// All weights of the block's channels to shared memory, in the order in which the products take them, by kWarps warps.
// unscale: of each column, what undoes the power of two by which its weights are multiplied.
template <ConvMath kMath, int kColumns, int kBlocks, int kWarps>
__device__ __forceinline__ void window_load_weights(const NarrowParams& p, const int* weight_at, uint32_t* weights,
                                                    float* unscale, int group, int c_begin, int c_valid, int warp,
                                                    int lane) {
  constexpr bool kScaled = ConvMathTraits<kMath>::kPerWord == 1 || kMath == ConvMath::kFp16x3;
  constexpr bool kTwoTerms = kMath == ConvMath::kFp16x3;
  using Stored = std::conditional_t<kScaled, float, unsigned short>;
  constexpr int kRowWords = 16 * kBlocks, kWords = kNarrowWindow * kRowWords, kRounds = (kWords + 31) / 32;
  constexpr int kAllColumns = kNarrowWindow * kColumns, kTurnWords = kRowWords * kAllColumns;
  constexpr int kOwn = (kColumns + kWarps - 1) / kWarps;  // columns of a warp
  const Stored* const filters =
      static_cast<const Stored*>(p.weight) + group * p.w_stride_group + c_begin * p.w_stride_out;
  Stored v[kOwn][kRounds][2];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int word = lane + 32 * i;
    const int2 at = word < kWords ? reinterpret_cast<const int2*>(weight_at)[word % kRowWords] : make_int2(-1, -1);
    const Stored* const from = filters + word / kRowWords * p.w_stride_k[1];
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int column = warp + own * kWarps;
      const Stored* const filter = from + column * p.w_stride_out;
      v[own][i][0] = v[own][i][1] = 0;
      if (at.x >= 0 && column < c_valid) v[own][i][0] = __ldg(filter + at.x);
      if (at.y >= 0 && column < c_valid) v[own][i][1] = __ldg(filter + at.y);
    }
  }
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int column = warp + own * kWarps;
    if (column >= kColumns) break;
    float scale = 1.f, undo = 1.f;
    if constexpr (kScaled) {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * kRounds; ++i) {
        const float size = fabsf(v[own][i / 2][i % 2]);
        most = size < INFINITY ? fmaxf(most, size) : most;
      }
      const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
      const uint32_t exponent = min(max(bits >> 23, 15u), 254u);
      scale = __uint_as_float((258 - exponent) << 23);  // brings the largest below 2^5
      undo = __uint_as_float((exponent - 4) << 23);
    }
    if (lane == 0) unscale[column] = undo;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int word = lane + 32 * i, k = word % kRowWords, kernel_row = word / kRowWords;
      if (word >= kWords) continue;
      uint32_t high, low = 0;
      if constexpr (!kScaled) {
        high = uint32_t(v[own][i][0]) | uint32_t(v[own][i][1]) << 16;
      } else if constexpr (kTwoTerms) {
        split_half(v[own][i][0] * scale, v[own][i][1] * scale, &high, &low);
      } else {
        high = packed_halves(v[own][i][0] * scale, v[own][i][1] * scale);
      }
      // In turn t of the window, kernel row r belongs to the accumulators (t - r) mod 3.
#pragma unroll
      for (int turn = 0; turn < kNarrowWindow; ++turn) {
        const int to = (turn - kernel_row + kNarrowWindow) % kNarrowWindow * kColumns + column;
        const int at =
            turn * kTurnWords + ((k / 8 * (kAllColumns / 8) + to / 8) * 2 + k / 4 % 2) * 32 + to % 8 * 4 + k % 4;
        weights[at] = high;
        if constexpr (kTwoTerms) weights[at + kTurnWords * kNarrowWindow] = low;
      }
    }
  }
}

#endif

template <ConvMath kMath, int kColumns, int kBlocks>
__global__ void __launch_bounds__(window_threads(kMath, kColumns, kBlocks), 1)
    conv_narrow_window_kernel(const __grid_constant__ NarrowParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr WgmmaType kType = kMath == ConvMath::kBf16 ? WgmmaType::kBf16 : WgmmaType::kFp16;
  constexpr bool kScaled = kMath == ConvMath::kTf32 || kMath == ConvMath::kFp16x3;
  constexpr int kTerms = kMath == ConvMath::kFp16x3 ? 2 : 1;
  constexpr int kWindow = kNarrowWindow;
  constexpr int kAcc = kColumns / 2, kSums = kColumns / 4;
  constexpr int kConsumers = window_consumers(kMath, kColumns, kBlocks), kWarps = kConsumers * 4;
  constexpr int kChains = window_chains(kMath, kColumns, kBlocks);

  extern __shared__ __align__(128) uint32_t smem[];
  const NarrowPlan& plan = p.plan;
  const WindowSmemLayout layout = window_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  int* const weight_at = reinterpret_cast<int*>(smem + layout.weight_at);
  int2* const chunks = reinterpret_cast<int2*>(smem + layout.chunks);
  int2* const strip_table = reinterpret_cast<int2*>(smem + layout.strips);
  float* const unscale = reinterpret_cast<float*>(smem + layout.columns);
  const int stage_words = window_stage_words(plan);

  const int tid = threadIdx.x;
  const unsigned slices = static_cast<unsigned>(plan.slices);  // as the grid's size
  const int64_t n = blockIdx.x / slices, slice = blockIdx.x % slices;
  if (skips_sample(p.stats, n)) return;
  const int c_begin = blockIdx.y * kColumns;  // first output channel of this block, within the conv group
  const int group = blockIdx.z;
  const int c_valid = min(kColumns, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels
  // Of a tile, or of tiles_together: kChains strips for each warp of a warpgroup.
  const int jobs = (plan.strips + 4 * kChains - 1) / (4 * kChains), together = plan.tiles_together;

  // Every block waits for the same weights: they are asked for before anything else.
  const int64_t weight_bytes = c_valid * p.w_stride_out * static_cast<int64_t>(sizeof(Element));
  if (tid * 128 < weight_bytes) {
    const char* const weight = reinterpret_cast<const char*>(static_cast<const Element*>(p.weight) +
                                                             group * p.w_stride_group + c_begin * p.w_stride_out);
    prefetch_l2(weight + tid * 128);
  }

  int tile_count;
  WindowCursor cursor = window_tiles(plan, slice, &tile_count);

  // Those that load do not wait for the others' tables: their first tile is what takes longest.
  if (tid < kWindowLoaders) {
    if constexpr (kConsumers == 3) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    }
    if (tid < 32) {
      if (tid == 0) {
#pragma unroll 1
        for (int stage = 0; stage < plan.stages; ++stage) {
          barrier_init(full + stage, kWindowLoaders);
          barrier_init(empty + stage, jobs * 128 * kChains / together);
        }
      }
      __syncwarp();
      named_barrier_arrive(3, 32 + 32 * kWarps);
    }
    const int marches = plan.march_lanes > 0 && p.load == NarrowLoad::kVectors ? p.c_in : 0;
    if (marches == 0) {
#pragma unroll 1
      for (int i = tid; i < plan.types * 8; i += kWindowLoaders) {
        int c, d, w;
        const bool is_value = window_value(plan, p.c_in, i / 8, i % 8, &c, &d, &w);
        WindowEntry entry{0, kWindowPadding, 0};
        if (is_value) {
          entry.depth = d * plan.dilation[0], entry.column = w * plan.dilation[2];
          entry.bytes = (c * p.x_stride_c + entry.depth * p.x_stride[0] + entry.column * p.x_stride[2]) *
                        static_cast<int64_t>(sizeof(Element));
        }
        reinterpret_cast<WindowEntry*>(smem + layout.entries)[i] = entry;
      }
      named_barrier(2, kWindowLoaders);
    }
    switch (marches) {
      case 1: window_march_tiles<kMath, 1>(p, layout, smem, n, group, cursor, tile_count); break;
      case 2: window_march_tiles<kMath, 2>(p, layout, smem, n, group, cursor, tile_count); break;
      case 3: window_march_tiles<kMath, 3>(p, layout, smem, n, group, cursor, tile_count); break;
      case 4:
        if constexpr (window_march_channels(kMath) >= 4) {
          window_march_tiles<kMath, 4>(p, layout, smem, n, group, cursor, tile_count);
        }
        break;
      default: window_load_tiles<kMath>(p, layout, smem, n, group, cursor, tile_count);
    }
  } else {
    if constexpr (kConsumers == 3) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
    }
    const int lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int warp = tid / 32 - kWindowLoaders / 32;  // among the computing ones
    uint32_t* const weights = smem + layout.weights;

    // Each table is another warp's, since one instruction after the other is what takes long here.
    const int own = tid - kWindowLoaders;
    const int chunk_count = window_chunks(plan), shifted = plan.shifted_types * plan.kernel[2];
#pragma unroll 1
    for (int i = own; i < kBlocks * 4 * 8; i += 32 * kWarps) {
      const int chunk = i / 8;
      const int type = chunk < shifted ? chunk / plan.kernel[2] : plan.shifted_types + chunk - shifted;
      const int shift = chunk < shifted ? chunk % plan.kernel[2] : 0;
      int c, d, w;
      const bool is_value = chunk < chunk_count && window_value(plan, p.c_in, type, i % 8, &c, &d, &w);
      weight_at[i] =
          is_value ? static_cast<int>(c * p.w_stride_in + d * p.w_stride_k[0] + (w + shift) * p.w_stride_k[2]) : -1;
      // Padding reads the first chunk again: what is not finite there spoils the same outputs anyway.
      if (i % 8 == 0) {
        chunks[chunk] =
            chunk < chunk_count ? make_int2(type * plan.plane * 4, shift * plan.dilation[2]) : make_int2(0, 0);
      }
    }
#pragma unroll 1
    for (int i = 32 * kWarps - 1 - own; i < plan.strips; i += 32 * kWarps) {
      const int per_row = plan.tile[2] / kNarrowStrip;
      const int w = i % per_row * kNarrowStrip;
      const int h = i / per_row % plan.segments * plan.rows;
      const int d = i / (per_row * plan.segments);
      strip_table[i] = make_int2((d * plan.halo[1] + h) * plan.pitch * 16, d << 24 | h << 14 | w);
    }
    if (warp == 4 && lane < 4) smem[layout.zeros + lane] = 0;
    named_barrier(3, 32 + 32 * kWarps);

    window_load_weights<kMath, kColumns, kBlocks, kWarps>(p, weight_at, weights, unscale, group, c_begin, c_valid, warp,
                                                          lane);
    wgmma_fence_shared();
    named_barrier(1, kWarps * 32);

    uint32_t b_first = wgmma_b_descriptor(shared_address(weights));
    asm volatile("" : "+r"(b_first));  // else it would be computed again for each product
    constexpr int kBStep = kWindow * kColumns * 8 * 4 / 16, kBTurn = 2 * kBlocks * kBStep, kBLow = kWindow * kBTurn;
    const uint32_t zeros = shared_address(smem + layout.zeros);
    const uint32_t low_bytes = plan.types * plan.plane * 4;
    const int row_bytes = plan.pitch * 16;

    // Of each channel, 8 j / 2 + 2 t + j % 2 of the block's, minus the first value that a thread sees; in the
    // convolution's units but for the weights' scale.
    float begin[kSums] = {};
    float count = 0.f;
    bool begun = false;
    // Of what the products add to it, for each strip that a warp takes at once. In the units of the stage last read.
    struct {
      float sum = 0.f, sum_sq = 0.f;
    } sums[kChains][kSums];
    float unit[kChains];  // what undoes those
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) unit[chain] = 1.f;

    // The first tile of the warpgroup's job. Those of a warp's strips are some tiles on.
    struct Place {
      int tile, stage;
      uint32_t parity;
      WindowCursor cursor;
    };
    const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
    auto advance = [&](Place& place, int tiles) {  // at most as many as there are stages
      place.tile += tiles, place.stage += tiles, place.cursor.d += tiles;
      if (place.stage >= plan.stages) place.stage -= plan.stages, place.parity ^= 1;
      while (place.cursor.d >= tiles_d) {
        place.cursor.d -= tiles_d;
        if (++place.cursor.w == tiles_w) place.cursor.w = 0, ++place.cursor.h;
      }
    };
    Place first{0, 0, 0, cursor};
    int job = __shfl_sync(0xffffffffu, warp / 4, 0);  // known to be the same in a warp
    const int own_warp = __shfl_sync(0xffffffffu, warp & 3, 0);
    const int own_strip = together > 1 ? own_warp % plan.strips : own_warp;
    const int ahead = together > 1 ? own_warp / plan.strips : 0;
    const int between = together == 1 ? 0 : plan.strips < 4 ? 4 / plan.strips : kChains - 1;
    const uint32_t smem_at = shared_address(smem);
    for (;; job += kConsumers) {
      while (job >= jobs) {
        job -= jobs;
        advance(first, together);
      }
      if (first.tile >= tile_count) break;
      // Tiles that are taken together may have fewer rows than the others.
      const int all_rows = together > 1 ? plan.rows : min(plan.rows, p.out[1] - first.cursor.h * plan.tile[1]);
      int rows[kChains];  // of those that all run through, how many count
      uint32_t from[kChains][2 * kBlocks], step_bytes[kChains], to_low[kChains];
      float counts[kChains][2];  // of positions g and g + 8, times what brings x to the stage's units
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        Place place = first;
        if (together > 1) advance(place, ahead + chain * between);
        const int s = together > 1 ? own_strip : (job * kChains + chain) * 4 + own_warp;
        const int2 strip = strip_table[min(s, plan.strips - 1)];
        const bool present = place.tile < tile_count;
        if (present) barrier_wait(full + place.stage, place.parity);
        if (kScaled && present) {
          const float stage_unit = reinterpret_cast<const float*>(smem + layout.scales)[place.stage];
          if (stage_unit != unit[chain]) {
            const float change = unit[chain] / stage_unit;
            unit[chain] = stage_unit;
#pragma unroll
            for (int j = 0; j < kSums; ++j) {
              sums[chain][j].sum *= change;
              sums[chain][j].sum_sq = sums[chain][j].sum_sq * change * change;
            }
          }
        }
        const int d = place.cursor.d * plan.tile[0] + (strip.y >> 24);
        const int h0 = place.cursor.h * plan.tile[1] + (strip.y >> 14 & 1023);
        const int w0 = place.cursor.w * plan.tile[2] + (strip.y & 16383);
        const bool inside = present && s < plan.strips && d < p.out[0] && h0 < p.out[1];
        // Segments, where several, are whole.
        rows[chain] =
            __shfl_sync(0xffffffffu, inside ? min(plan.rows, p.out[1] - place.cursor.h * plan.tile[1]) : 0, 0);
        const int valid = inside ? p.out[2] - w0 : 0;
        // A power of two, of which the reciprocal is exact.
        const float one = kScaled ? __uint_as_float((254u << 23) - __float_as_uint(unit[chain])) : 1.f;
        counts[chain][0] = g < valid ? one : 0.f;
        counts[chain][1] = g + 8 < valid ? one : 0.f;
        // Positions that count nothing read zeros, and start from zero.
        const bool own_valid = (lane & 15) < valid;
        step_bytes[chain] = own_valid ? row_bytes : 0, to_low[chain] = own_valid ? low_bytes : 0;
        const uint32_t at = smem_at + (layout.halo + place.stage * stage_words) * 4 + strip.x;
        const int own_place = plan.lead + (strip.y & 16383) + (lane & 15);
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          const int2 chunk = chunks[2 * i + (lane >> 4)];
          from[chain][i] = own_valid ? at + chunk.x + window_place(own_place + chunk.y) * 16 : zeros;
        }
      }
      const bool fresh = __any_sync(0xffffffffu, count == 0.f);
      float acc[kChains][kWindow * kAcc];
      uint32_t a[kChains][kTerms][kBlocks * 2][4];
      auto start = [&](auto chain, auto slot) {
#pragma unroll
        for (int j = 0; j < kAcc; ++j) {
          asm volatile("mul.f32 %0, %1, %2;"
                       : "=f"(acc[decltype(chain)::value][decltype(slot)::value * kAcc + j])
                       : "f"(begin[j / 4 * 2 + (j & 1)]), "f"(counts[decltype(chain)::value][j / 2 & 1]));
        }
      };
      auto load_row = [&](auto of_chain) {
        constexpr int chain = decltype(of_chain)::value;
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          load_matrices(a[chain][0][i], from[chain][i]);
          if constexpr (kTerms == 2) load_matrices(a[chain][kTerms - 1][i], from[chain][i] + to_low[chain]);
          from[chain][i] += step_bytes[chain];
        }
      };
      auto multiply = [&](auto of_chain, auto turn) {
        constexpr int chain = decltype(of_chain)::value;
        wgmma_fence();
        const uint32_t b_turn = b_first + decltype(turn)::value * kBTurn;
        if constexpr (kTerms == 2) {
#pragma unroll
          for (int i = 0; i < 2 * kBlocks; ++i) {
            wgmma<kType, kWindow * kColumns>(acc[chain], a[chain][kTerms - 1][i], b_turn + i * kBStep, true);
            wgmma<kType, kWindow * kColumns>(acc[chain], a[chain][0][i], b_turn + i * kBStep + kBLow, true);
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          wgmma<kType, kWindow * kColumns>(acc[chain], a[chain][0][i], b_turn + i * kBStep, true);
        }
        wgmma_commit();
      };
      // After a row of the halo. The accumulators of the output row that it completes are then free for another.
      auto take_row = [&](auto of_chain, auto turn, int row) {
        constexpr int chain = decltype(of_chain)::value;
        wgmma_use(acc[chain]);
        // The next row comes while this thread is in its epilogue; after the last row nobody uses what it reads.
        load_row(of_chain);
        constexpr int kSlot = (decltype(turn)::value + 1) % kWindow;
        float* const done = acc[chain] + kSlot * kAcc;
        if (unsigned(row - (kWindow - 1)) < unsigned(rows[chain])) {
          if (decltype(turn)::value == kWindow - 1 && fresh && row == kWindow - 1) {
            // The first value that a thread sees is what it subtracts from all. No thread goes another way here, or
            // products would be waited for.
            const bool first = !begun && counts[chain][0] != 0.f;
#pragma unroll
            for (int j = 0; j < kSums; ++j) begin[j] = first ? -done[j / 2 * 4 + (j & 1)] * unit[chain] : begin[j];
            begun = begun || first;
#pragma unroll
            for (int j = 0; j < kWindow * kAcc; ++j) {
              const float missing = count == 0.f ? begin[j % kAcc / 4 * 2 + (j & 1)] : 0.f;
              acc[chain][j] = fmaf(missing, counts[chain][j / 2 & 1], acc[chain][j]);
            }
          }
#pragma unroll
          for (int j = 0; j < kAcc; ++j) {
            auto& of = sums[chain][j / 4 * 2 + (j & 1)];
            of.sum += done[j];
            of.sum_sq = fmaf(done[j], done[j], of.sum_sq);
          }
        }
        wgmma_use(acc[chain]);  // or copies are made for the sake of an earlier start
        start(of_chain, std::integral_constant<int, kSlot>());
      };
      using One = std::integral_constant<int, 0>;
      using Other = std::integral_constant<int, kChains - 1>;
      auto begin_chain = [&](auto chain) {
        start(chain, std::integral_constant<int, 0>()), start(chain, std::integral_constant<int, 1>()),
            start(chain, std::integral_constant<int, 2>());
        load_row(chain);
      };
      const int steps = all_rows + kWindow - 1;
      begin_chain(One());
      if constexpr (kChains == 2) begin_chain(Other());
      // Of two strips, one row's products are under way while another row's are summed up.
      auto step = [&](auto turn, int row) {
        multiply(One(), turn);
        if constexpr (kChains == 2) multiply(Other(), turn);
        wgmma_wait<kChains - 1>();
        take_row(One(), turn, row);
        if constexpr (kChains == 2) {
          wgmma_wait<0>();
          take_row(Other(), turn, row);
        }
      };
      using Turn0 = std::integral_constant<int, 0>;
      using Turn1 = std::integral_constant<int, 1>;
      using Turn2 = std::integral_constant<int, 2>;
      int row = 0;
      if constexpr (kChains == 1) {
#pragma unroll 1
        for (; row < steps; row += kWindow) {
          step(Turn0(), row);
          if (row + 1 < steps) step(Turn1(), row + 1);
          if (row + 2 < steps) step(Turn2(), row + 2);
        }
      } else {
#pragma unroll 1
        for (; row + kWindow <= steps; row += kWindow) {
          multiply(One(), Turn0());
          multiply(Other(), Turn0());
          wgmma_wait<1>();
          take_row(One(), Turn0(), row);
          multiply(One(), Turn1());
          wgmma_wait<1>();
          take_row(Other(), Turn0(), row);
          multiply(Other(), Turn1());
          wgmma_wait<1>();
          take_row(One(), Turn1(), row + 1);
          multiply(One(), Turn2());
          wgmma_wait<1>();
          take_row(Other(), Turn1(), row + 1);
          multiply(Other(), Turn2());
          wgmma_wait<1>();
          take_row(One(), Turn2(), row + 2);
          wgmma_wait<0>();
          take_row(Other(), Turn2(), row + 2);
        }
        if (row < steps) step(Turn0(), row);
        if (row + 1 < steps) step(Turn1(), row + 1);
      }
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        if (counts[chain][0] != 0.f) count += static_cast<float>(rows[chain]);
        if (counts[chain][1] != 0.f) count += static_cast<float>(rows[chain]);
        Place place = first;
        if (together > 1) advance(place, ahead + chain * between);
        if (place.tile < tile_count) barrier_arrive(empty + place.stage);
      }
    }
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      float sum = 0.f, sum_sq = 0.f;
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        sum += sums[chain][j].sum * unit[chain], sum_sq += sums[chain][j].sum_sq * unit[chain] * unit[chain];
      }
      sums[0][j].sum = sum, sums[0][j].sum_sq = sum_sq;
    }

    // Thread -> warp (rows of one channel lie in the lanes of equal t) -> block. Only the first lanes' results count,
    // and all channels of a thread have the same counts.
    Moments<float>* const shared = reinterpret_cast<Moments<float>*>(smem + layout.scratch);
    const float inverse = count > 0.f ? __fdividef(1.f, count) : 0.f;
    float of_lanes = count, fraction[3], weighted[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const float other = __shfl_down_sync(0xffffffffu, of_lanes, 4 << i), both = of_lanes + other;
      fraction[i] = both > 0.f ? __fdividef(other, both) : 0.f;
      weighted[i] = of_lanes * fraction[i];
      of_lanes = both;
    }
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int c = j / 2 * 8 + t * 2 + (j & 1);
      const float own_unit = kScaled ? unscale[c] : 1.f;
      float mean = fmaf(sums[0][j].sum, inverse, -begin[j]) * own_unit;
      float m2 = fmaf(-sums[0][j].sum * inverse, sums[0][j].sum, sums[0][j].sum_sq) * own_unit * own_unit;
      m2 = m2 < 0.f ? 0.f : m2;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const float delta = __shfl_down_sync(0xffffffffu, mean, 4 << i) - mean;
        m2 += fmaf(delta * delta, weighted[i], __shfl_down_sync(0xffffffffu, m2, 4 << i));
        mean = fmaf(delta, fraction[i], mean);
      }
      if (g == 0) shared[warp * kColumns + c] = {mean, m2, of_lanes};
    }
    finish_stats<kColumns, kWarps, kWarps * 32>(
        p.stats, n, slice, c_first, c_valid, shared, tid - kWindowLoaders,
        [&](int c) { return p.bias ? to_acc(static_cast<const Element*>(p.bias)[c_first + c]) : 0.f; });
  }
#endif
}

}  // namespace kgopt
