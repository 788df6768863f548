// Statistics of a convolution with few input and at most 32 output channels and kernels of height 3, sm_90a.
//
// As in conv3d/few_channels/gather/kernel.cuh, rows of the products are positions, three kernel rows are columns side
// by side, and each row of the halo adds to the accumulators of three output rows. What differs is how the left operand
// comes to the registers. The halo holds no input as it lies, but chunks of eight half values that belong together: of
// the taps of the depth and the channels at one position, gathered once by the loading warpgroups for each output
// depth. Two chunks are a step of K, one ldmatrix; the kernel's columns read the chunks of neighbours along the width.
// K is dense: 3 channels and taps of 3 x 3 x 3 are 27 of 32 values.
//
// fp32 input becomes one fp16 term (11 bits, as TF32) or two (fp32 accuracy, three products), scaled by a power of two
// that a stage keeps as long as its values fit: fp16's range then does not matter.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <type_traits>
#include <utility>

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/finish.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/few_channels/weights.cuh"
#include "conv3d/implicit_gemm/kernel.cuh"

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
__device__ __forceinline__ bool window_value(const FewChannelsPlan& plan, int c_in, int type, int e, int* c, int* d,
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
__device__ __forceinline__ int window_values(const FewChannelsPlan& plan, int c_in, int type) {
  const int all = c_in * plan.kernel[0];
  if (type < plan.shifted_types) return min(8, all - type * 8);
  return min(8, (all - plan.shifted_types * 8) * plan.kernel[2] - (type - plan.shifted_types) * 8);
}

// Where position w of a halo row lies: threads that store four positions each and lanes that read neighbours both meet
// every bank once.
__device__ __forceinline__ int window_place(int w) { return w ^ (w >> 3 & 3); }

// The tiles of a slice: how many, and the first.
__device__ __forceinline__ WindowCursor window_tiles(const FewChannelsPlan& plan, int64_t slice, int* count) {
  const int begin = static_cast<int>(slice * plan.tiles_per_slice);
  *count = static_cast<int>(min(plan.tiles_per_slice, plan.tiles_per_sample - begin));
  const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
  return {begin % tiles_d, begin / tiles_d / tiles_w, begin / tiles_d % tiles_w};
}

// The first output of a tile, and the rows of its strips.
__device__ __forceinline__ int4 window_tile_at(const FewChannelsParams& p, const WindowCursor& cursor) {
  const int h = cursor.h * p.plan.tile[1];
  return make_int4(cursor.d * p.plan.tile[0], h, cursor.w * p.plan.tile[2], min(p.plan.rows, p.out[1] - h));
}

// What a block works through: slices of samples, every gridDim.x-th of them. At first it stands before the first.
struct WindowPiece {
  unsigned index = blockIdx.x - gridDim.x, n, slice;
  WindowCursor cursor;  // of the first tile
  int begin, tiles = 0;

  // False at the end.
  __device__ __forceinline__ bool next(const FewChannelsParams& p) {
    const unsigned slices = static_cast<unsigned>(p.plan.slices);
    index += gridDim.x;
    if (index >= static_cast<unsigned>(p.n) * slices) return false;
    n = index, slice = 0, begin = 0, cursor = {0, 0, 0}, tiles = static_cast<int>(p.plan.tiles_per_sample);
    if (slices > 1) {  // divisions take long
      n = index / slices, slice = index % slices;
      begin = static_cast<int>(slice * p.plan.tiles_per_slice);
      cursor = window_tiles(p.plan, slice, &tiles);
    }
    return true;
  }
};

// Whether any of kThreads threads says so, all of which wait for each other at this barrier.
template <int kThreads>
__device__ __forceinline__ bool any_thread(int barrier, bool mine) {
  uint32_t any;
  asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n bar.red.or.pred q, %3, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(uint32_t(mine)), "n"(kThreads), "r"(barrier)
               : "memory");
  return any != 0;
}
template <int kLoaders = kWindowLoaders>
__device__ __forceinline__ bool any_loader(bool mine) {
  return any_thread<kLoaders>(2, mine);
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
// in fp16 then, or below a limit, and has bits to spare below it. Else it comes below 2^11 (2^7 where there is a
// limit), or the scale is as much above the lowest one that there was as sums of squares bear.
inline constexpr float kWindowRange = 65536.f;
__device__ __forceinline__ bool scale_of_window(uint32_t bits, float* scale, float* lowest, float low = 2.f,
                                                float limit = INFINITY) {
  const uint32_t exponent = min(max(bits >> 23, 15u), 254u);
  const uint32_t top = limit < 65504.f ? 260 : 264;
  const float fitting = fminf(__uint_as_float((top - exponent) << 23), *lowest * kWindowRange);
  const float scaled = __uint_as_float(bits) * *scale;
  const bool stays = (scaled >= low && scaled < fminf(limit, 65504.f)) || fitting == *scale;
  if (!stays) *scale = fitting;
  *lowest = fminf(*lowest, *scale);
  return stays;
}

// What the loading warpgroups do from start to end, for any taps and strides.
template <ConvMath kMath>
__device__ __forceinline__ void window_load_tiles(const FewChannelsParams& p, const WindowSmemLayout& layout,
                                                  uint32_t* smem, int group) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr bool kScaled = std::is_same_v<Element, float>;
  constexpr bool kTwoTerms = kMath == ConvMath::kFp16x3;
  const FewChannelsPlan& plan = p.plan;
  const int tid = threadIdx.x;
  const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  const WindowEntry* const entries = reinterpret_cast<const WindowEntry*>(smem + layout.entries);
  const bool vectors = p.load == FewChannelsLoad::kVectors;
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
  int tile = 0;
  WindowPiece piece;
  for (;; ++tile, piece.cursor.advance(tiles_d, tiles_w)) {
    if (tile == piece.tiles) {
      if (!piece.next(p)) break;
      tile = 0, lowest = INFINITY;
    }
    const WindowCursor& cursor = piece.cursor;
    const Element* const x_sample =
        static_cast<const Element*>(p.x) + piece.n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
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
    if (tid == 0) {
      if (kScaled) reinterpret_cast<float*>(smem + layout.scales)[stage] = 1.f / scale;
      reinterpret_cast<int4*>(smem + layout.tiles)[stage] = window_tile_at(p, cursor);
    }
    barrier_arrive(full + stage);
    if (++stage == plan.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// The same for kernels of 3 x 3 x 3, stride 1 and tiles of one depth, where a thread has one piece of four positions of
// the halo: going down the depth, it keeps the values of two planes and loads the third,
// while the tile before it is stored.
template <ConvMath kMath, int kChannels, bool kVectors>
__device__ __forceinline__ void window_march_tiles(const FewChannelsParams& p, const WindowSmemLayout& layout,
                                                   uint32_t* smem, int group) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr bool kScaled = std::is_same_v<Element, float>;
  constexpr int kTerms = kMath == ConvMath::kFp16x3 ? 2 : 1;
  constexpr int kRaw = kScaled ? 4 : 2;  // words of four positions
  constexpr int kValues = 3 * kChannels, kFull = kValues / 8, kRest = kValues % 8;
  // As window_take_chunks: types that all kernel columns read, and those that hold the rest of all columns.
  constexpr int kTogether = (kRest * 3 + 7) / 8 < 3 ? (kRest * 3 + 7) / 8 : 0;
  constexpr int kShifted = kFull + (kRest > 0 && kTogether == 0);
  const FewChannelsPlan& plan = p.plan;
  const int tid = threadIdx.x;
  const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  const int row = tid >> __popc(plan.march_lanes - 1), place = tid & (plan.march_lanes - 1);  // a power of two
  const bool active = row < plan.halo[1] && place < plan.vectors;
  const int swap = place >> 1 & 3;  // see window_place
  uint32_t* const to = smem + layout.halo + (row * plan.pitch + place * 4) * 4;
  const int stage_words = window_stage_words(plan);

  float scale = 1.f, lowest = INFINITY;
  int quiet = 0;  // planes since one with large values
  const Element* from = nullptr;
  bool inside = false;  // the row
  int column = 0;
  // Values of four positions; half types: in two words. A vector lies inside or outside as a whole.
  auto load_plane_to = [&](uint32_t (*to)[kRaw], int depth) {
    const bool loads = inside && unsigned(depth) < unsigned(p.in[0]);
    const Element* at = from + depth * p.x_stride[0];
    if constexpr (kVectors) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c, at += p.x_stride_c) {
        load_if(to[c], at, loads && unsigned(column) < unsigned(p.in[2]));
      }
    } else {
      uint32_t one[kChannels][4];
#pragma unroll
      for (int c = 0; c < kChannels; ++c, at += p.x_stride_c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          one[c][i] = load_one_if(at + i * p.x_stride[2], loads && unsigned(column + i) < unsigned(p.in[2]));
        }
      }
#pragma unroll
      for (int i = 0; i < kChannels * kRaw; ++i) {
        const int c = i / kRaw, k = i % kRaw;
        to[c][k] = kScaled ? one[c][k] : one[c][2 * k % 4] | one[c][(2 * k + 1) % 4] << 16;
      }
    }
  };
  uint32_t raw[kChannels][kRaw];
  auto load_plane = [&](int depth) { load_plane_to(raw, depth); };
  uint32_t value[kTerms][kValues][2];  // of four positions, channels innermost of depths
#pragma unroll
  for (int i = 0; i < kTerms * kValues * 2; ++i) value[i / (kValues * 2)][i / 2 % kValues][i % 2] = 0;

  int stage = 0;
  uint32_t parity = 1;
  bool there = false;  // two of the tile's planes, and the third is under way
  bool waits = true;   // for the barriers, which are another thread's
  int tile = 0;
  WindowPiece piece;
  for (;; ++tile) {
    if (tile == piece.tiles) {
      if (!piece.next(p)) break;
      tile = 0, lowest = INFINITY;
    }
    WindowCursor& cursor = piece.cursor;
    const int depth = cursor.d + plan.origin[0];
    if (!there) {
      const Element* const x_sample =
          static_cast<const Element*>(p.x) + piece.n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
      const int h = cursor.h * plan.tile[1] + plan.origin[1] + row;
      column = cursor.w * plan.tile[2] + plan.origin[2] - plan.lead + place * 4;
      inside = active && unsigned(h) < unsigned(p.in[1]);
      from = x_sample + h * p.x_stride[1] + column * p.x_stride[2];
      if constexpr (!kScaled) {
        load_plane_to(&value[0][0], depth), load_plane_to(&value[0][kChannels], depth + 1);
        load_plane_to(&value[0][2 * kChannels], depth + 2);
      }
#pragma unroll 1
      for (int plane = 1; kScaled && plane < 3; ++plane) {  // while the first one comes
        if (!inside || unsigned(column) >= unsigned(p.in[2]) || unsigned(depth + plane) >= unsigned(p.in[0])) continue;
        for (int c = 0; c < (kVectors ? kChannels : 1); ++c) {
          prefetch_l2(from + (depth + plane) * p.x_stride[0] + c * p.x_stride_c);
        }
      }
    } else if constexpr (!kScaled) {
#pragma unroll
      for (int i = 0; i < 2 * (kValues - kChannels); ++i) value[0][i / 2][i % 2] = value[0][i / 2 + kChannels][i % 2];
#pragma unroll
      for (int i = 0; i < 2 * kChannels; ++i) value[0][kValues - kChannels + i / 2][i % 2] = raw[i / 2][i % 2];
    }
    while (kScaled) {
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
            const float a = __uint_as_float(raw[c][kRaw / 2 * i]) * scale;
            const float b = __uint_as_float(raw[c][kRaw / 2 * i + 1]) * scale;
            const uint32_t word = packed_halves(a, b);
            value[0][kNew + c][i] = word;
            largest = __hmax2(largest, __habs2(*reinterpret_cast<const __half2*>(&word)));
            if constexpr (kTerms == 2) {
              // An infinite value's second term is NaN: its channel's statistics are that already.
              const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&word));
              value[kTerms - 1][kNew + c][i] = packed_halves(a - high.x, b - high.y);
            }
          }
        }
      }
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
    const WindowCursor now = cursor;
    cursor.advance(tiles_d, tiles_w);
    there = tile + 1 < piece.tiles && cursor.d > 0;
    if (there) load_plane(depth + 3);

    if (waits) named_barrier(6, 32 + kWindowLoaders);  // loads did not
    waits = false;
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
    if (tid == 0) {
      if (kScaled) reinterpret_cast<float*>(smem + layout.scales)[stage] = 1.f / scale;
      reinterpret_cast<int4*>(smem + layout.tiles)[stage] = window_tile_at(p, now);
    }
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
__device__ __forceinline__ void window_load_weights(const FewChannelsParams& p, const int* weight_at, uint32_t* weights,
                                                    float* unscale, int group, int c_begin, int c_valid, int warp,
                                                    int lane) {
  constexpr bool kScaled = ConvMathTraits<kMath>::kPerWord == 1 || kMath == ConvMath::kFp16x3;
  constexpr bool kTwoTerms = kMath == ConvMath::kFp16x3;
  using Stored = std::conditional_t<kScaled, float, unsigned short>;
  constexpr int kRowWords = 16 * kBlocks, kWords = kWindowRows * kRowWords, kRounds = (kWords + 31) / 32;
  constexpr int kAllColumns = kWindowRows * kColumns, kTurnWords = kRowWords * kAllColumns;
  constexpr int kOwn = (kColumns + kWarps - 1) / kWarps;  // columns of a warp
  const Stored* const filters =
      static_cast<const Stored*>(p.weight) + group * p.w_stride_group + c_begin * p.w_stride_out;
  // In turn t of the window, kernel row r belongs to the accumulators (t - r) mod 3.
  constexpr int kTurns = window_turns(kMath, kColumns, kBlocks);
  if constexpr (!kScaled) {
    // Few instructions: they come from memory, too, and everybody waits for them.
    constexpr int kThreads = 32 * kWarps, kAll = kWords * kColumns, kEach = (kAll + kThreads - 1) / kThreads;
    uint32_t v[kEach];
    int at[kEach], kernel_row[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int index = warp * 32 + lane + i * kThreads, word = index % kWords, column = index / kWords;
      const int k = word % kRowWords;
      kernel_row[i] = word / kRowWords;
      const int2 from = reinterpret_cast<const int2*>(weight_at)[k];
      const Stored* const filter = filters + column * p.w_stride_out + kernel_row[i] * p.w_stride_k[1];
      const uint32_t low = from.x >= 0 && column < c_valid ? __ldg(filter + from.x) : 0;
      const uint32_t high = from.y >= 0 && column < c_valid ? __ldg(filter + from.y) : 0;
      v[i] = low | high << 16;
      at[i] = ((k / 8 * (kAllColumns / 8) + column / 8) * 2 + k / 4 % 2) * 32 + column % 8 * 4 + k % 4;
    }
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int last_row = turn < kWindowRows ? kWindowRows - 1 : turn - kWindowRows;
      uint32_t* const of_turn = weights + turn * kTurnWords;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        int slot = turn % kWindowRows - kernel_row[i];
        slot += slot < 0 ? kWindowRows : 0;
        // Before the first two rows of a halo there are none that earlier accumulators would have needed.
        const uint32_t word = kernel_row[i] <= last_row ? v[i] : 0;
        if (warp * 32 + lane + i * kThreads < kAll) of_turn[slot * (kColumns * 8) + at[i]] = word;
      }
    }
  } else {
    static_assert(kTurns == kWindowRows);
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
      WarpScale of_column;
      of_column.fit<2 * kRounds>(&v[own][0][0]);
      const float scale = of_column.scale;
      if (lane == 0) unscale[column] = of_column.undo;
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int word = lane + 32 * i, k = word % kRowWords, kernel_row = word / kRowWords;
        if (word >= kWords) continue;
        uint32_t high, low = 0;
        if constexpr (kTwoTerms) {
          split_half(v[own][i][0] * scale, v[own][i][1] * scale, &high, &low);
        } else {
          high = packed_halves(v[own][i][0] * scale, v[own][i][1] * scale);
        }
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
          const int to = (turn - kernel_row + kWindowRows) % kWindowRows * kColumns + column;
          const int at =
              turn * kTurnWords + ((k / 8 * (kAllColumns / 8) + to / 8) * 2 + k / 4 % 2) * 32 + to % 8 * 4 + k % 4;
          weights[at] = high;
          if constexpr (kTwoTerms) weights[at + kTurnWords * kWindowRows] = low;
        }
      }
    }
  }
}

#endif

template <ConvMath kMath, int kColumns, int kBlocks>
__global__ void __launch_bounds__(window_threads(kMath, kColumns, kBlocks), 1)
    conv_window_kernel(const __grid_constant__ FewChannelsParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr WgmmaType kType = kMath == ConvMath::kBf16 ? WgmmaType::kBf16 : WgmmaType::kFp16;
  constexpr bool kScaled = kMath == ConvMath::kTf32 || kMath == ConvMath::kFp16x3;
  constexpr int kTerms = kMath == ConvMath::kFp16x3 ? 2 : 1;
  constexpr int kWindow = kWindowRows;
  constexpr int kAcc = kColumns / 2, kSums = kColumns / 4;
  constexpr int kConsumers = window_consumers(kMath, kColumns, kBlocks), kWarps = kConsumers * 4;
  constexpr int kChains = window_chains(kMath, kColumns, kBlocks);

  extern __shared__ __align__(128) uint32_t smem[];
  const FewChannelsPlan& plan = p.plan;
  const WindowSmemLayout layout = window_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  int* const weight_at = reinterpret_cast<int*>(smem + layout.weight_at);
  int2* const chunks = reinterpret_cast<int2*>(smem + layout.chunks);
  int2* const strip_table = reinterpret_cast<int2*>(smem + layout.strips);
  float* const unscale = reinterpret_cast<float*>(smem + layout.columns);
  const int stage_words = window_stage_words(plan);

  const int tid = threadIdx.x;
  const int c_begin = blockIdx.y * kColumns;  // first output channel of this block, within the conv group
  const int group = blockIdx.z;
  const int c_valid = min(kColumns, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels
  // A warpgroup works by units of a strip for each warp: some of a tile, or one of several tiles together.
  const int units = (plan.strips + 3) / 4, together = kChains == 2 ? plan.tiles_together : 1;

  // Every block waits for the same weights: they are asked for before anything else.
  const int64_t weight_bytes = c_valid * p.w_stride_out * static_cast<int64_t>(sizeof(Element));
  if (tid * 128 < weight_bytes) {
    const char* const weight = reinterpret_cast<const char*>(static_cast<const Element*>(p.weight) +
                                                             group * p.w_stride_group + c_begin * p.w_stride_out);
    prefetch_l2(weight + tid * 128);
  }

  // Those that load do not wait for the others' tables: their first tile is what takes longest.
  if (tid < kWindowLoaders) {
    if constexpr (kConsumers == 3) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    }
    const int marches = plan.march_lanes > 0 ? p.c_in : 0;
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
      named_barrier(6, 32 + kWindowLoaders);
    }
    // As many chunks as there are products: see window_take_chunks.
    auto march = [&](auto channels) {
      constexpr int kChannels = decltype(channels)::value;
      if (p.load == FewChannelsLoad::kVectors) {
        window_march_tiles<kMath, kChannels, true>(p, layout, smem, group);
      } else {
        window_march_tiles<kMath, kChannels, false>(p, layout, smem, group);
      }
    };
    if (marches == 0) {
      window_load_tiles<kMath>(p, layout, smem, group);
    } else if constexpr (kBlocks == 1) {
      if (marches == 3) {
        march(std::integral_constant<int, 3>());
      } else if (marches == 2) {
        march(std::integral_constant<int, 2>());
      } else {
        march(std::integral_constant<int, 1>());
      }
    } else if constexpr (kBlocks == 2 && window_march_channels(kMath) >= 4) {
      march(std::integral_constant<int, 4>());
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

    if (warp == kWarps - 1) {  // not a loading warp, which everybody waits for
      if (lane == 0) {
#pragma unroll 1
        for (int stage = 0; stage < plan.stages; ++stage) {
          barrier_init(full + stage, kWindowLoaders);
          barrier_init(empty + stage, together > 1 ? plan.strips * 32 : units * 128);
        }
      }
      __syncwarp();
      named_barrier_arrive(6, 32 + kWindowLoaders);
    }

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
      const int per_row = plan.tile[2] / kFewChannelsStrip;
      const int w = i % per_row * kFewChannelsStrip;
      const int h = i / per_row % plan.segments * plan.rows;
      const int d = i / (per_row * plan.segments);
      strip_table[i] = make_int2((d * plan.halo[1] + h) * plan.pitch * 16, d << 24 | h << 14 | w);
    }
    if (warp == 4 && lane < 4) smem[layout.zeros + lane] = 0;
    named_barrier(3, 32 * kWarps);

    // What the end needs of each channel: asked for now, and there before anybody waits for it.
    const bool has_channel = own < c_valid, finishes = p.stats.finishes && own < static_cast<int>(p.stats.finish.c);
    const RawValue raw_bias(p.bias, c_first + own, sizeof(Element), has_channel);
    const int affine_size = p.stats.finish.affine_dtype == Dtype::kFloat32 ? 4 : 2;
    const RawValue raw_weight(p.stats.finish.weight, own, affine_size, finishes);
    const RawValue raw_shift(p.stats.finish.bias, own, affine_size, finishes);

    window_load_weights<kMath, kColumns, kBlocks, kWarps>(p, weight_at, weights, unscale, group, c_begin, c_valid, warp,
                                                          lane);
    float* const affine = reinterpret_cast<float*>(smem + layout.affine);
    if (own < kColumns) {
      affine[own] = raw_bias.as<Element>(0.f);
      affine[kColumns + own] = raw_weight.as(p.stats.finish.affine_dtype, 1.f);
      affine[2 * kColumns + own] = raw_shift.as(p.stats.finish.affine_dtype, 0.f);
    }
    wgmma_fence_shared();

    uint32_t b_first = wgmma_b_descriptor(shared_address(weights));
    asm volatile("" : "+r"(b_first));  // else it would be computed again for each product
    constexpr int kBStep = kWindow * kColumns * 8 * 4 / 16, kBTurn = 2 * kBlocks * kBStep, kBLow = kWindow * kBTurn;
    const uint32_t zeros = shared_address(smem + layout.zeros);
    const uint32_t low_bytes = plan.types * plan.plane * 4;
    const int row_bytes = plan.pitch * 16;

    struct Place {
      int tile, unit, stage;  // the unit of its tile, where that has several
      uint32_t parity;
    };
    auto advance_tiles = [&](Place& place, int tiles) {  // at most as many as there are stages
      place.tile += tiles, place.stage += tiles;
      if (place.stage >= plan.stages) place.stage -= plan.stages, place.parity ^= 1;
    };
    auto advance = [&](Place& place, int by) {  // units
      int tiles = by * together;
      if (kChains == 1 || units > 1) {
        for (tiles = 0, place.unit += by; place.unit >= units; ++tiles) place.unit -= units;
      }
      advance_tiles(place, tiles);
    };
    const int own_group = __shfl_sync(0xffffffffu, warp / 4, 0);  // known to be the same in a warp
    const int own_warp = __shfl_sync(0xffffffffu, warp & 3, 0);
    // Where a unit is of several tiles: which of them is this warp's, and which strip of it.
    const int ahead = together > 1 ? own_warp / plan.strips : 0;
    const int own_strip = together > 1 ? own_warp % plan.strips : own_warp;
    const uint32_t smem_at = shared_address(smem);
    // Tiles of a sample before this one have all their rows.
    const int tiles_h = static_cast<int>(plan.tiles[1]), per_row = static_cast<int>(plan.tiles[0] * plan.tiles[2]);
    const bool whole = plan.segments > 1 || tiles_h * plan.rows == p.out[1];
    const int whole_tiles = (tiles_h - 1) * per_row;
    // Where all strips of such tiles lie inside.
    const bool even = plan.tile[0] == 1 && (plan.segments == 1 || tiles_h * plan.tile[1] == p.out[1]);
    // Zero, but not for the compiler: it takes accumulators that are constants away from the products under way.
    const float zero = __uint_as_float(__shfl_sync(0xffffffffu, load_shared(zeros), 0));

    int known_strip = -1;
    int2 strip;
    uint32_t in_stage[2 * kBlocks];  // where its first row begins

    Place first{0, 0, 0, 0};
    named_barrier(1, kWarps * 32);  // the weights are there
    for (WindowPiece piece; piece.next(p);) {
      const int tile_count = piece.tiles;
      const int whole_count = whole ? INT_MAX : whole_tiles - piece.begin;
      // Of each channel, 8 j / 2 + 2 t + j % 2 of the block's, minus the first value that a thread sees; in the
      // convolution's units but for the weights' scale.
      float begin[kSums] = {};
      float count = 0.f;
      // Of what the products add to it, for each strip that a warp takes at once. In the units of the stage last read.
      struct {
        float sum = 0.f, sum_sq = 0.f;
      } sums[kChains][kSums];
      float unit = 1.f;  // what undoes those

      // With two strips at once: whether values lie so far from zero, beside their spread, that sums of squares must
      // begin elsewhere. Known after the warpgroup's first units, which are then taken once more.
      enum { kUnknown, kFar, kNear } values_lie = kUnknown;

      // Pairs of units while there are enough for all.
      const int unit_count = together > 1 ? (tile_count + together - 1) / together : tile_count * units;
      Place place = first;
      int at_unit = 0, round = 0;  // which begins with this unit
      auto find_unit = [&] {
        const int next = round + (kChains == 2 && unit_count - round > 2 ? 2 : 1) * own_group;
        advance(place, next - at_unit);
        at_unit = next;
      };
#pragma unroll 1
      for (find_unit(); at_unit < unit_count; find_unit()) {
        const int taken = kChains == 2 && unit_count - round > 2 + own_group ? 2 : 1;
        round += kChains * kConsumers;
        bool paired = false;
        if constexpr (kChains == 2) {
          paired = taken == 2 && values_lie != kFar;
          const int last_tile = together > 1 ? place.tile + 2 * together - 1 : place.tile + (place.unit + 1 == units);
          paired = paired && last_tile < whole_count;
        }
        Place own_unit = place;
#pragma unroll 1
        for (int left = taken; left > 0; left -= paired ? 2 : 1) {
          int rows[kChains];  // of those that all run through, how many count
          int all_rows = 0;
          uint32_t from[kChains][2 * kBlocks], step_bytes[kChains], to_low[kChains];
          float counts[kChains][2];  // of positions g and g + 8, times what brings x to the stage's units
          int reads[kChains];        // the stage, or -1
          // Of tiles that are even, less is to be looked up.
          auto begin_unit = [&](auto of_chain, auto is_even) {
            constexpr int chain = decltype(of_chain)::value;
            constexpr bool kEven = decltype(is_even)::value;
            Place own = own_unit;
            if (together > 1) advance_tiles(own, ahead);
            const int s = own.unit * 4 + own_strip;
            if (kChains == 1 || s != known_strip) {  // where a tile is one unit, nothing changes
              known_strip = s;
              strip = strip_table[min(s, plan.strips - 1)];
              const int own_place = plan.lead + (strip.y & 16383) + (lane & 15);
#pragma unroll
              for (int i = 0; i < 2 * kBlocks; ++i) {
                const int2 chunk = chunks[2 * i + (lane >> 4)];
                in_stage[i] = strip.x + chunk.x + window_place(own_place + chunk.y) * 16;
              }
            }
            const bool present = own.tile < tile_count;
            reads[chain] = present ? own.stage : -1;
            int4 tile{};
            if (present) {
              barrier_wait(full + own.stage, own.parity);
              const int4* const at = reinterpret_cast<const int4*>(smem + layout.tiles) + own.stage;
              if (!kEven) tile = *at;
              if (kEven && plan.tiles[2] > 1) tile.z = at->z;
            }
            // Tiles that are taken together may have fewer rows than the others.
            all_rows = together > 1 ? plan.rows : tile.w;
            if (kScaled && present) {
              const float stage_unit = reinterpret_cast<const float*>(smem + layout.scales)[own.stage];
              if (stage_unit != unit) {
                const float change = unit / stage_unit;
                unit = stage_unit;
#pragma unroll
                for (int j = 0; j < kSums; ++j) {
                  sums[chain][j].sum *= change;
                  sums[chain][j].sum_sq = sums[chain][j].sum_sq * change * change;
                }
              }
            }
            const int d = tile.x + (strip.y >> 24), h0 = tile.y + (strip.y >> 14 & 1023),
                      w0 = tile.z + (strip.y & 16383);
            const bool inside = present && s < plan.strips && (kEven || (d < p.out[0] && h0 < p.out[1]));
            // Segments, where several, are whole.
            rows[chain] = kEven ? (inside ? plan.rows : 0) : __shfl_sync(0xffffffffu, inside ? tile.w : 0, 0);
            const int valid = inside ? p.out[2] - w0 : 0;
            // A power of two, of which the reciprocal is exact.
            const float one = kScaled ? __uint_as_float((254u << 23) - __float_as_uint(unit)) : 1.f;
            counts[chain][0] = g < valid ? one : 0.f;
            counts[chain][1] = g + 8 < valid ? one : 0.f;
            // Positions that count nothing read zeros, and start from zero.
            const bool own_valid = (lane & 15) < valid;
            step_bytes[chain] = own_valid ? row_bytes : 0, to_low[chain] = own_valid ? low_bytes : 0;
            const uint32_t at = smem_at + (layout.halo + own.stage * stage_words) * 4;
#pragma unroll
            for (int i = 0; i < 2 * kBlocks; ++i) from[chain][i] = own_valid ? at + in_stage[i] : zeros;
            advance(own_unit, 1);
          };
          auto end_unit = [&](auto of_chain) {
            constexpr int chain = decltype(of_chain)::value;
            if (counts[chain][0] != 0.f) count += static_cast<float>(rows[chain]);
            if (counts[chain][1] != 0.f) count += static_cast<float>(rows[chain]);
            if (reads[chain] >= 0) barrier_arrive(empty + reads[chain]);
          };
          float acc[kChains][kWindow * kAcc];
          uint32_t a[kChains][kTerms][kBlocks * 2][4];
          auto load_row = [&](auto of_chain) {
            constexpr int chain = decltype(of_chain)::value;
#pragma unroll
            for (int i = 0; i < 2 * kBlocks; ++i) {
              load_matrices(a[chain][0][i], from[chain][i]);
              if constexpr (kTerms == 2) load_matrices(a[chain][kTerms - 1][i], from[chain][i] + to_low[chain]);
            }
          };
          auto next_row = [&](auto of_chain, bool is_there) {
            constexpr int chain = decltype(of_chain)::value;
            const uint32_t step = is_there ? step_bytes[chain] : 0;
#pragma unroll
            for (int i = 0; i < 2 * kBlocks; ++i) from[chain][i] += step;
          };
          auto multiply = [&](auto of_chain, auto turn, uint32_t opening) {
            constexpr int chain = decltype(of_chain)::value;
            wgmma_fence();
            const uint32_t b_turn = b_first + decltype(turn)::value * kBTurn + opening;
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
          auto add_row = [&](auto of_chain, const float* done) {
            constexpr int chain = decltype(of_chain)::value;
#pragma unroll
            for (int j = 0; j < kAcc; ++j) {
              auto& of = sums[chain][j / 4 * 2 + (j & 1)];
              of.sum += done[j];
              of.sum_sq = fmaf(done[j], done[j], of.sum_sq);
            }
          };
          using One = std::integral_constant<int, 0>;
          using Other = std::integral_constant<int, kChains - 1>;
          using Turn0 = std::integral_constant<int, 0>;
          using Turn1 = std::integral_constant<int, 1>;
          using Turn2 = std::integral_constant<int, 2>;
          if (!paired) {
            begin_unit(One(), std::false_type());
            if (values_lie == kUnknown) values_lie = kFar;  // few units are left, or their rows differ
            const bool fresh = __any_sync(0xffffffffu, count == 0.f);
            auto start = [&](auto slot) {
#pragma unroll
              for (int j = 0; j < kAcc; ++j) {
                asm volatile("mul.f32 %0, %1, %2;"
                             : "=f"(acc[0][decltype(slot)::value * kAcc + j])
                             : "f"(begin[j / 4 * 2 + (j & 1)]), "f"(counts[0][j / 2 & 1]));
              }
            };
            // A row of the halo. The accumulators of the output row that it completes are then free for another.
            auto step = [&](auto turn, int row) {
              multiply(One(), turn, 0);
              wgmma_wait<0>();
              wgmma_use(acc[0]);
              // The next row comes while this thread is in its epilogue. With one strip at a time there is always one:
              // behind the last, room of the stage that is never written, which nobody uses (see window_stage_words).
              load_row(One());
              next_row(One(), kChains == 1 || row + 2 < all_rows + kWindow - 1);
              constexpr int kSlot = (decltype(turn)::value + 1) % kWindow;
              float* const done = acc[0] + kSlot * kAcc;
              if (unsigned(row - (kWindow - 1)) < unsigned(rows[0])) {
                if (decltype(turn)::value == kWindow - 1 && fresh && row == kWindow - 1) {
                  // The first value that a thread sees is what it subtracts from all. No thread goes another way here,
                  // or products would be waited for.
                  const bool is_first = count == 0.f && counts[0][0] != 0.f;
#pragma unroll
                  for (int j = 0; j < kSums; ++j) {
                    begin[j] = is_first ? -done[j / 2 * 4 + (j & 1)] * unit : begin[j];
                  }
#pragma unroll
                  for (int j = 0; j < kWindow * kAcc; ++j) {
                    const float missing = count == 0.f ? begin[j % kAcc / 4 * 2 + (j & 1)] : 0.f;
                    acc[0][j] = fmaf(missing, counts[0][j / 2 & 1], acc[0][j]);
                  }
                }
                add_row(One(), done);
              }
              wgmma_use(acc[0]);  // or copies are made for the sake of an earlier start
              start(std::integral_constant<int, kSlot>());
            };
            start(Turn0()), start(Turn1()), start(Turn2());
            load_row(One());
            next_row(One(), true);
            const int steps = all_rows + kWindow - 1;
#pragma unroll 1
            for (int row = 0; row < steps; row += kWindow) {
              step(Turn0(), row);
              if (row + 1 < steps) step(Turn1(), row + 1);
              if (row + 2 < steps) step(Turn2(), row + 2);
            }
          } else if constexpr (kChains == 2) {
            // One strip's products are under way while the other's row is summed up. All rows of a strip count, or
            // none, whose sums are zeros.
            if (even) {
              begin_unit(One(), std::true_type());
              begin_unit(Other(), std::true_type());
            } else {
              begin_unit(One(), std::false_type());
              begin_unit(Other(), std::false_type());
            }
            auto clear = [&](float* slot) {
#pragma unroll
              for (int j = 0; j < kAcc; ++j) asm volatile("mov.f32 %0, %1;" : "=f"(slot[j]) : "f"(zero));
            };
            auto take = [&](auto of_chain, auto turn, bool is_last) {
              constexpr int chain = decltype(of_chain)::value, kSlot = (decltype(turn)::value + 1) % kWindow;
              wgmma_use(acc[chain]);
              // After the last row the same once more: behind it may be a stage that is being filled.
              next_row(of_chain, !is_last);
              load_row(of_chain);
              add_row(of_chain, acc[chain] + kSlot * kAcc);
              wgmma_use(acc[chain]);
              clear(acc[chain] + kSlot * kAcc);
            };
            auto begin_chain = [&](auto of_chain) {
              constexpr int chain = decltype(of_chain)::value;
              clear(acc[chain]), clear(acc[chain] + kAcc), clear(acc[chain] + 2 * kAcc);
              load_row(of_chain);
            };
            begin_chain(One()), begin_chain(Other());
            const int steps = plan.rows + kWindow - 1;
            int row = 0;
            uint32_t opening = kWindow * kBTurn;  // the first two rows complete no output row: what they add is zero
#pragma unroll 1
            for (; row + kWindow <= steps; row += kWindow) {
              const bool is_last = row + kWindow == steps;
              multiply(One(), Turn0(), opening);
              multiply(Other(), Turn0(), opening);
              wgmma_wait<1>();
              take(One(), Turn0(), false);
              multiply(One(), Turn1(), opening);
              wgmma_wait<1>();
              take(Other(), Turn0(), false);
              multiply(Other(), Turn1(), opening);
              wgmma_wait<1>();
              take(One(), Turn1(), false);
              multiply(One(), Turn2(), 0);
              wgmma_wait<1>();
              take(Other(), Turn1(), false);
              multiply(Other(), Turn2(), 0);
              wgmma_wait<1>();
              take(One(), Turn2(), is_last);
              wgmma_wait<0>();
              take(Other(), Turn2(), is_last);
              opening = 0;
            }
            auto step = [&](auto turn, bool last) {
              multiply(One(), turn, 0);
              multiply(Other(), turn, 0);
              wgmma_wait<1>();
              take(One(), turn, last);
              wgmma_wait<0>();
              take(Other(), turn, last);
            };
            if (row < steps) step(Turn0(), row + 1 == steps);
            if (row + 1 < steps) step(Turn1(), true);
            if (values_lie == kUnknown) {
              float seen = 0.f;  // rows times positions
              bool far = false;
#pragma unroll
              for (int i = 0; i < 4; ++i) seen += counts[i / 2][i % 2] * static_cast<float>(rows[i / 2]);
              const float inverse = seen > 0.f ? __fdividef(1.f, seen) : 0.f;
#pragma unroll
              for (int j = 0; j < kSums; ++j) {
                const float mean = (sums[0][j].sum + sums[1][j].sum) * inverse;
                const float square = (sums[0][j].sum_sq + sums[1][j].sum_sq) * inverse;
                far = far || mean * mean > 64.f * fmaf(-mean, mean, square);
              }
              values_lie = any_thread<128>(4 + own_group, far) ? kFar : kNear;
              if (values_lie == kFar) {
#pragma unroll
                for (int i = 0; i < 2 * kSums; ++i) sums[i / kSums][i % kSums] = {};
                paired = false;
                own_unit = place;
                left = taken + 1;
                continue;
              }
            }
            end_unit(Other());
          }
          end_unit(One());
        }
      }
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        if constexpr (kChains == 2) sums[0][j].sum += sums[1][j].sum, sums[0][j].sum_sq += sums[1][j].sum_sq;
        sums[0][j].sum *= unit, sums[0][j].sum_sq *= unit * unit;
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
          p.stats, piece.n, piece.slice, c_first, c_valid, shared, tid - kWindowLoaders,
          [&](int c) { return affine[c]; },
          [&](int c) { return make_float2(affine[kColumns + c], affine[2 * kColumns + c]); });
      first.stage += tile_count;
      first.parity ^= first.stage / plan.stages & 1;
      first.stage %= plan.stages;
      named_barrier(1, kWarps * 32);  // before the next piece's moments take these one's place
    }
  }
#endif
}

}  // namespace kgopt
