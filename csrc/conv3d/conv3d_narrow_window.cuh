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

// A value of a type of chunk: its channel's bytes in the ring of planes, and how far along the depth and the width from
// the position's first tap it lies.
struct WindowEntry {
  int bytes, depth, column, unused;
};

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
__device__ __forceinline__ bool window_value(const NarrowPlan& plan, int c_in, int type, int e, int* c, int* d, int* w) {
  int value = type * 8 + e;
  *w = 0;
  if (type >= plan.shifted_types) {
    const int together = value - plan.shifted_types * 8;
    value = plan.shifted_types * 8 + together / plan.kernel[2];
    *w = together % plan.kernel[2];
  }
  *c = value / plan.kernel[0];
  *d = value % plan.kernel[0];
  return *c < c_in;
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
__device__ __forceinline__ bool any_loader(bool mine) {
  uint32_t any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n bar.red.or.pred q, 2, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(uint32_t(mine)), "n"(kWindowLoaders)
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

// What the loading warpgroups do from start to end: planes of the input come once, as half values, into a ring that holds
// what a tile and the next one see; from there chunks are put together.
template <ConvMath kMath>
__device__ __forceinline__ void window_load_tiles(const NarrowParams& p, const WindowSmemLayout& layout, uint32_t* smem,
                                                  int64_t n, int group, WindowCursor cursor, int tile_count) {
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr bool kScaled = std::is_same_v<Element, float>;
  constexpr int kTerms = kMath == ConvMath::kFp16x3 ? 2 : 1;
  constexpr int kRaw = kScaled ? 4 : 2;  // words of four positions
  constexpr int kHeld = kScaled ? 5 : 8;  // of them that a thread has under way while it puts chunks together
  const NarrowPlan& plan = p.plan;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
  const int tiles_d = static_cast<int>(plan.tiles[0]), tiles_w = static_cast<int>(plan.tiles[2]);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.full);
  uint64_t* const empty = reinterpret_cast<uint64_t*>(smem + layout.empty);
  const int4* const entries = reinterpret_cast<const int4*>(smem + layout.entries);
  const Element* const x_sample =
      static_cast<const Element*>(p.x) + n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
  const bool in_vectors = p.load == NarrowLoad::kVectors;
  const int vectors = plan.vectors, rows = plan.halo[1], items = rows * vectors;
  // Planes that a tile sees, and those of them that the tile before it did not.
  const int fresh = plan.tile[0] * plan.step[0];
  const int span = (plan.tile[0] - 1) * plan.step[0] + (plan.kernel[0] - 1) * plan.dilation[0] + 1;
  const int plane_bytes = rows * plan.pitch * 2, channel_bytes = plan.ring * plane_bytes;
  const int term_bytes = p.c_in * channel_bytes;
  char* const ring = reinterpret_cast<char*>(smem + layout.ring);

  // Of the values in the ring, and the lowest one that there was.
  constexpr float kRange = 65536.f;
  float scale = 1.f, lowest = INFINITY;
  int quiet = 0;                                        // groups of fresh planes since one with large values
  __half2 largest = __half2half2(__ushort_as_half(0));  // of what was stored last

  int in_h = 0, in_w = 0, slot = 0;  // of the tile: its first row and column, where its first plane lies
  // An item is four positions of a row. With few of them, `groups` of threads share the planes of all channels.
  const int groups = items < kWindowLoaders ? kWindowLoaders / items : 1;
  const int group_of_thread = items < kWindowLoaders ? tid / items : 0;
  const int own_item = tid - group_of_thread * items, item_step = groups > 1 ? items : kWindowLoaders;
  struct Plane {
    int d, c;
  };
  auto next = [&](Plane& plane) {
    for (plane.c += groups; plane.c >= p.c_in; plane.c -= p.c_in) ++plane.d;
  };
  auto first_plane = [&](int d) {
    Plane plane{d, group_of_thread - groups};
    if (group_of_thread >= groups) plane.d = span;  // nothing is left for it
    next(plane);
    return plane;
  };
  struct Item {
    const Element* from;  // of plane 0 of channel 0
    int w, to;
    bool row_inside;
  };
  auto locate = [&](int item) {
    const int row = item / vectors, place = item - row * vectors;
    Item at;
    at.w = in_w + place * 4;
    at.from = x_sample + (in_h + row) * p.x_stride[1] + at.w * p.x_stride[2];
    at.row_inside = unsigned(in_h + row) < unsigned(p.in[1]);
    at.to = (row * plan.pitch + place * 4) * 2;
    return at;
  };
  auto load_item = [&](uint32_t(&v)[kRaw], const Item& item, int depth, int c) {
    const bool inside = item.row_inside && unsigned(depth) < unsigned(p.in[0]);
    const Element* const from = item.from + c * p.x_stride_c + depth * p.x_stride[0];
    if (in_vectors) {  // a vector lies inside or outside as a whole
      load_if(v, from, inside && unsigned(item.w) < unsigned(p.in[2]));
    } else {
      uint32_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits[i] = load_one_if(from + i * p.x_stride[2], inside && unsigned(item.w + i) < unsigned(p.in[2]));
      }
      if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = bits[i];
      } else {
        v[0] = bits[0] | bits[1] << 16, v[1] = bits[2] | bits[3] << 16;
      }
    }
  };
  auto store_item = [&](const uint32_t(&v)[kRaw], const Item& item, Plane plane) {
    int at_slot = slot + plane.d;
    if (at_slot >= plan.ring) at_slot -= plan.ring;
    char* const at = ring + (plane.c * channel_bytes + at_slot * plane_bytes + item.to);
    if constexpr (kScaled) {
      float f[4];
      uint32_t word[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(v[i]) * scale;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        word[i] = packed_halves(f[2 * i], f[2 * i + 1]);
        largest = __hmax2(largest, __habs2(*reinterpret_cast<const __half2*>(&word[i])));
      }
      *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[1]);
      if constexpr (kTerms == 2) {
        // An infinite value's second term is NaN: its channel's statistics are that already.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&word[i]));
          word[i] = packed_halves(f[2 * i] - high.x, f[2 * i + 1] - high.y);
        }
        *reinterpret_cast<uint2*>(at + term_bytes) = make_uint2(word[0], word[1]);
      }
    } else {
      *reinterpret_cast<uint2*>(at) = make_uint2(v[0], v[1]);
    }
  };
  uint32_t hold[kHeld][kRaw];
  auto fetch = [&](const Item& item, int depth, Plane plane) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j, next(plane)) {
      if (plane.d < span) load_item(hold[j], item, depth + plane.d, plane.c);
    }
  };
  // Planes [first, span) of the tile whose first one is plane `depth` of x, kHeld of a thread's at a time. held: the
  // first are there already.
  auto fill = [&](int depth, int first, bool held) {
#pragma unroll 1
    for (int i = own_item; i < items; i += item_step) {
      const Item item = locate(i);
      Plane plane = first_plane(first);
#pragma unroll 1
      while (plane.d < span) {
        if (!held) fetch(item, depth, plane);
        held = false;
#pragma unroll
        for (int j = 0; j < kHeld; ++j, next(plane)) {
          if (plane.d < span) store_item(hold[j], item, plane);
        }
      }
    }
  };
  // After the planes of a tile are there: all loading threads meet, and the scale follows what they found. False where
  // all planes must come again for it.
  auto settle = [&](int depth, bool all_fresh) {
    if constexpr (!kScaled) {
      named_barrier(2, kWindowLoaders);
      return true;
    }
    // It stays where all finite values are finite in fp16 and the largest has bits to spare below it.
    const float top = fmaxf(__low2float(largest), __high2float(largest));
    largest = __half2half2(__ushort_as_half(0));
    const bool too_large = any_loader(top == INFINITY), large = any_loader(top >= 2.f || scale == lowest * kRange);
    quiet = large ? 0 : all_fresh ? span : quiet + 1;
    if (!too_large && (quiet + 1) * fresh <= max(span, fresh)) {
      lowest = fminf(lowest, scale);
      return true;
    }
    float most = 0.f;
#pragma unroll 1
    for (int i = own_item; i < items; i += item_step) {
      const Item item = locate(i);
#pragma unroll 1
      for (Plane plane = first_plane(0); plane.d < span; next(plane)) {
        uint32_t v[kRaw];
        load_item(v, item, depth + plane.d, plane.c);
#pragma unroll
        for (int j = 0; j < kRaw; ++j) {
          const float size = fabsf(__uint_as_float(v[j]));
          most = size < INFINITY ? fmaxf(most, size) : most;
        }
      }
    }
    uint32_t* const maxima = smem + layout.maxima;
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(most));  // in the order of their bits
    if (lane == 0) maxima[warp] = of_warp;
    named_barrier(2, kWindowLoaders);
    uint32_t bits = maxima[0];
    for (int i = 1; i < kWindowLoaders / 32; ++i) bits = max(bits, maxima[i]);
    named_barrier(2, kWindowLoaders);
    if (bits == 0) return true;
    // Brings the largest below 2^11, or is as much above the lowest one as sums of squares bear.
    const uint32_t exponent = min(max(bits >> 23, 15u), 254u);
    const float fitting = fminf(__uint_as_float((264 - exponent) << 23), lowest * kRange);
    const float scaled = __uint_as_float(bits) * scale;
    const bool stays = (scaled >= 2.f && scaled < 65504.f) || fitting == scale;
    if (!stays) scale = fitting;
    lowest = fminf(lowest, scale);
    quiet = 0;
    return stays;
  };

  int stage = 0;
  uint32_t parity = 1;
  bool there = false;  // the tile's planes
  for (int tile = 0; tile < tile_count; ++tile) {
    const int depth = cursor.d * fresh + plan.origin[0];
    bool all = !there;
    if (all) {
      in_h = cursor.h * plan.tile[1] + plan.origin[1];
      in_w = cursor.w * plan.tile[2] + plan.origin[2] - plan.lead;
      slot = 0;
      named_barrier(2, kWindowLoaders);  // nobody reads the planes before
    }
    bool settled;
    do {
      fill(depth, all ? 0 : span - fresh, !all);
      settled = settle(depth, all);
      all = true;
    } while (!settled);
    cursor.advance(tiles_d, tiles_w);
    there = tile + 1 < tile_count && cursor.d > 0;
    if (there) fetch(locate(own_item), depth + fresh, first_plane(span - fresh));

    barrier_wait(empty + stage, parity);
    char* const to_stage = reinterpret_cast<char*>(smem + layout.halo + stage * window_stage_words(plan));
    const int all_items = plan.tile[0] * items, blocks = (all_items + 31) / 32;
    int from[8];  // of each value of the type, in the ring
    int last_type = -1;
#pragma unroll 1
    for (int unit = warp; unit < blocks * plan.types; unit += kWindowLoaders / 32) {
      const int block = unit / plan.types, type = unit - block * plan.types;
      const int item = min(block * 32 + lane, all_items - 1);
      const int row = item / vectors, place = item - row * vectors, d = row / rows;
      const int values = window_values(plan, p.c_in, type);
      if (type != last_type || plan.tile[0] > 1) {
        last_type = type;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int4 entry = entries[type * 8 + e];
          int at_slot = slot + d * plan.step[0] + entry.y;
          if (at_slot >= plan.ring) at_slot -= plan.ring;
          from[e] = entry.x + at_slot * plane_bytes;
        }
      }
      const int at = ((row - d * rows) * plan.pitch + place * 4) * 2;
      char* const to = to_stage + (type * plan.plane + (row * plan.pitch + place * 4) * 4) * 4;
      const int swap = place >> 1 & 3;  // see window_place
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        uint32_t v[8][2];  // four positions
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          v[e][0] = v[e][1] = 0;
          if (e >= values) continue;
          const char* const first = ring + (from[e] + at + term * term_bytes);
          if (type < plan.shifted_types) {
            const uint2 pairs = *reinterpret_cast<const uint2*>(first);
            v[e][0] = pairs.x, v[e][1] = pairs.y;
          } else {
            const int column = entries[type * 8 + e].z;
            const uint2* const pairs = reinterpret_cast<const uint2*>(first + (column & ~3) * 2);
            const uint2 a = pairs[0], b = pairs[1];
            const uint32_t bits = (column & 1) * 16;
            const uint32_t second = column & 2 ? b.x : a.y;
            v[e][0] = __funnelshift_r(column & 2 ? a.y : a.x, second, bits);
            v[e][1] = __funnelshift_r(second, column & 2 ? b.y : b.x, bits);
          }
        }
        if (block * 32 + lane < all_items) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t word[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              word[k] = __byte_perm(v[2 * k][i / 2], v[2 * k + 1][i / 2], i % 2 ? 0x7632 : 0x5410);
            }
            *reinterpret_cast<uint4*>(to + term * plan.types * plan.plane * 4 + (i ^ swap) * 16) =
                make_uint4(word[0], word[1], word[2], word[3]);
          }
        }
      }
    }
    if (kScaled && tid == 0) reinterpret_cast<float*>(smem + layout.scales)[stage] = 1.f / scale;
    __syncwarp();
    if (lane == 0) barrier_arrive(full + stage);
    if (++stage == plan.stages) {
      stage = 0;
      parity ^= 1;
    }
    if (there) {
      slot += fresh;
      if (slot >= plan.ring) slot -= plan.ring;
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
        const int at = turn * kTurnWords + ((k / 8 * (kAllColumns / 8) + to / 8) * 2 + k / 4 % 2) * 32 + to % 8 * 4 + k % 4;
        weights[at] = high;
        if constexpr (kTwoTerms) weights[at + kTurnWords * kNarrowWindow] = low;
      }
    }
  }
}

#endif

template <ConvMath kMath, int kColumns, int kBlocks>
__global__ void __launch_bounds__(window_threads(kMath, kColumns, kBlocks), 1) conv_narrow_window_kernel(const __grid_constant__ NarrowParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr WgmmaType kType = kMath == ConvMath::kBf16 ? WgmmaType::kBf16 : WgmmaType::kFp16;
  constexpr bool kScaled = kMath == ConvMath::kTf32 || kMath == ConvMath::kFp16x3;
  constexpr int kTerms = kMath == ConvMath::kFp16x3 ? 2 : 1;
  constexpr int kWindow = kNarrowWindow;
  constexpr int kAcc = kColumns / 2, kSums = kColumns / 4;
  constexpr int kConsumers = window_consumers(kMath, kColumns, kBlocks), kWarps = kConsumers * 4;
  constexpr int kThreads = kWindowLoaders + 32 * kWarps;

  if (gram_was_exact(p, kColumns)) return;
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
  const int c_begin = blockIdx.y * kColumns;  // first output channel of this block, within the conv group
  const int group = blockIdx.z;
  const int c_valid = min(kColumns, p.c_out - c_begin);
  const int c_first = group * p.c_out + c_begin;  // the same among all output channels
  const int jobs = (plan.strips + 3) / 4;         // of a tile: four strips, one for each warp

  // Every block waits for the same weights: they are asked for before anything else.
  const int64_t weight_bytes = c_valid * p.w_stride_out * static_cast<int64_t>(sizeof(Element));
  if (tid * 128 < weight_bytes) {
    const char* const weight = reinterpret_cast<const char*>(static_cast<const Element*>(p.weight) +
                                                             group * p.w_stride_group + c_begin * p.w_stride_out);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + tid * 128));
  }

#pragma unroll 1
  for (int i = tid; i < plan.types * 8; i += kThreads) {
    int c, d, w;
    const bool is_value = window_value(plan, p.c_in, i / 8, i % 8, &c, &d, &w);
    WindowEntry entry{};
    if (is_value) {
      entry.bytes = c * plan.ring * plan.halo[1] * plan.pitch * 2;
      entry.depth = d * plan.dilation[0], entry.column = w * plan.dilation[2];
    }
    reinterpret_cast<WindowEntry*>(smem + layout.entries)[i] = entry;
  }
  const int chunk_count = window_chunks(plan), shifted = plan.shifted_types * plan.kernel[2];
#pragma unroll 1
  for (int i = tid; i < kBlocks * 4 * 8; i += kThreads) {
    const int chunk = i / 8;
    const int type = chunk < shifted ? chunk / plan.kernel[2] : plan.shifted_types + chunk - shifted;
    const int shift = chunk < shifted ? chunk % plan.kernel[2] : 0;
    int c, d, w;
    const bool is_value = chunk < chunk_count && window_value(plan, p.c_in, type, i % 8, &c, &d, &w);
    weight_at[i] =
        is_value ? static_cast<int>(c * p.w_stride_in + d * p.w_stride_k[0] + (w + shift) * p.w_stride_k[2]) : -1;
    // Padding reads the first chunk again: what is not finite there spoils the same outputs anyway.
    if (i % 8 == 0) {
      chunks[chunk] = chunk < chunk_count ? make_int2(type * plan.plane * 4, shift * plan.dilation[2]) : make_int2(0, 0);
    }
  }
#pragma unroll 1
  for (int i = tid; i < plan.strips; i += kThreads) {
    const int per_row = plan.tile[2] / kNarrowStrip;
    const int w = i % per_row * kNarrowStrip;
    const int h = i / per_row % plan.segments * plan.rows;
    const int d = i / (per_row * plan.segments);
    strip_table[i] = make_int2((d * plan.halo[1] + h) * plan.pitch * 16, d << 24 | h << 14 | w);
  }
  if (tid < 4) smem[layout.zeros + tid] = 0;
  if (tid == 0) {
#pragma unroll 1
    for (int stage = 0; stage < plan.stages; ++stage) {
      barrier_init(full + stage, kWindowLoaders / 32);
      barrier_init(empty + stage, jobs * 4);
    }
  }
  __syncthreads();

  int tile_count;
  WindowCursor cursor = window_tiles(plan, slice, &tile_count);

  if (tid < kWindowLoaders) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
    window_load_tiles<kMath>(p, layout, smem, n, group, cursor, tile_count);
  } else {
    if constexpr (kConsumers == 3) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
    }
    const int lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int warp = tid / 32 - kWindowLoaders / 32;  // among the computing ones
    uint32_t* const weights = smem + layout.weights;
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

    // Of each channel: 8 j / 2 + 2 t + j % 2 of the block's. In the units of the stage that was last read.
    struct {
      float begin = 0.f, sum = 0.f, sum_sq = 0.f;  // sums of what the products add to `begin`
    } sums[kSums];
    float count = 0.f;
    float unit = 1.f;  // what undoes those

    int stage = 0, tile = 0;
    uint32_t parity = 0;
    int job = __shfl_sync(0xffffffffu, warp / 4, 0);  // known to be the same in a warp
    for (;; job += kConsumers) {
      while (job >= jobs) {
        job -= jobs;
        ++tile;
        cursor.advance(static_cast<int>(plan.tiles[0]), static_cast<int>(plan.tiles[2]));
        if (++stage == plan.stages) stage = 0, parity ^= 1;
      }
      if (tile >= tile_count) break;
      barrier_wait(full + stage, parity);
      if constexpr (kScaled) {
        const float stage_unit = reinterpret_cast<const float*>(smem + layout.scales)[stage];
        if (stage_unit != unit) {
          const float change = unit / stage_unit;
          unit = stage_unit;
#pragma unroll
          for (int j = 0; j < kSums; ++j) {
            sums[j].begin *= change;
            sums[j].sum *= change;
            sums[j].sum_sq = sums[j].sum_sq * change * change;
          }
        }
      }
      const int s = job * 4 + (warp & 3);
      const int2 strip = strip_table[min(s, plan.strips - 1)];
      const int d = cursor.d * plan.tile[0] + (strip.y >> 24);
      const int h0 = cursor.h * plan.tile[1] + (strip.y >> 14 & 1023);
      const int w = cursor.w * plan.tile[2] + (strip.y & 16383) + g;
      const bool inside = s < plan.strips && d < p.out[0] && h0 < p.out[1];
      const bool valid[2] = {inside && w < p.out[2], inside && w + 8 < p.out[2]};
      const int rows = min(plan.rows, p.out[1] - cursor.h * plan.tile[1]);  // segments, where several, are whole
      // Where this lane reads its row of the products' left operand. Positions that count nothing read zeros, and start
      // from zero.
      uint32_t from[2 * kBlocks];
      const int own_row = (strip.y & 16383) + (lane & 15);
      const bool own_valid = inside && cursor.w * plan.tile[2] + own_row < p.out[2];
      const uint32_t step_bytes = own_valid ? row_bytes : 0, to_low = own_valid ? low_bytes : 0;
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        const int2 chunk = chunks[2 * i + (lane >> 4)];
        const uint32_t at = shared_address(smem + layout.halo + stage * stage_words) + strip.x + chunk.x +
                            window_place(plan.lead + own_row + chunk.y) * 16;
        from[i] = own_valid ? at : zeros;
      }
      bool fresh = __any_sync(0xffffffffu, count == 0.f && valid[0]);
      const float counts[2] = {valid[0] ? 1.f : 0.f, valid[1] ? 1.f : 0.f};
      float acc[kWindow * kAcc];
      auto start = [&](auto slot) {
#pragma unroll
        for (int j = 0; j < kAcc; ++j)
          acc[decltype(slot)::value * kAcc + j] = sums[j / 4 * 2 + (j & 1)].begin * counts[j / 2 & 1];
      };
      start(std::integral_constant<int, 0>()), start(std::integral_constant<int, 1>()),
          start(std::integral_constant<int, 2>());

      uint32_t a[kTerms][kBlocks * 2][4];
      auto load_row = [&] {
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          load_matrices(a[0][i], from[i]);
          if constexpr (kTerms == 2) load_matrices(a[kTerms - 1][i], from[i] + to_low);
          from[i] += step_bytes;
        }
      };
      load_row();
      // A row of the halo. The accumulators of the output row that it completes are then free for another.
      auto step = [&](auto turn, int row) {
        wgmma_fence();
        const uint32_t b_turn = b_first + decltype(turn)::value * kBTurn;
        if constexpr (kTerms == 2) {
#pragma unroll
          for (int i = 0; i < 2 * kBlocks; ++i) {
            wgmma<kType, kWindow * kColumns>(acc, a[kTerms - 1][i], b_turn + i * kBStep, true);
            wgmma<kType, kWindow * kColumns>(acc, a[0][i], b_turn + i * kBStep + kBLow, true);
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          wgmma<kType, kWindow * kColumns>(acc, a[0][i], b_turn + i * kBStep, true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(acc);
        // The next row comes while this thread is in its epilogue; after the last row nobody uses what it reads.
        load_row();

        constexpr int kSlot = (decltype(turn)::value + 1) % kWindow;
        float* const done = acc + kSlot * kAcc;
        if (row >= kWindow - 1) {
          if (decltype(turn)::value == kWindow - 1 && fresh) {
            // The first value that a thread sees is what it subtracts from all.
            if (count == 0.f && valid[0]) {
#pragma unroll
              for (int j = 0; j < kSums; ++j) sums[j].begin = -done[j / 2 * 4 + (j & 1)];
#pragma unroll
              for (int j = 0; j < kWindow * kAcc; ++j) {
                acc[j] = fmaf(sums[j % kAcc / 4 * 2 + (j & 1)].begin, counts[j / 2 & 1], acc[j]);
              }
            }
            fresh = false;
          }
#pragma unroll
          for (int j = 0; j < kAcc; ++j) {
            auto& of = sums[j / 4 * 2 + (j & 1)];
            of.sum += done[j];
            of.sum_sq = fmaf(done[j], done[j], of.sum_sq);
          }
        }
        wgmma_use(acc);  // or copies are made for the sake of an earlier start
        start(std::integral_constant<int, kSlot>());
      };
      const int steps = rows + kWindow - 1;
#pragma unroll 1
      for (int row = 0; row < steps; row += kWindow) {
        step(std::integral_constant<int, 0>(), row);
        if (row + 1 < steps) step(std::integral_constant<int, 1>(), row + 1);
        if (row + 2 < steps) step(std::integral_constant<int, 2>(), row + 2);
      }
      count += (counts[0] + counts[1]) * static_cast<float>(rows);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage);
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
      const float own_unit = kScaled ? unit * unscale[c] : 1.f;  // in the convolution's own units
      float mean = fmaf(sums[j].sum, inverse, -sums[j].begin) * own_unit;
      float m2 = fmaf(-sums[j].sum * inverse, sums[j].sum, sums[j].sum_sq) * own_unit * own_unit;
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
