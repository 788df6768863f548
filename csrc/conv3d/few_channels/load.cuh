// The loading side of the kernels for few channels: halos of tiles from global to shared memory, rounded and
// laid out for the products, and the registers that go from it to the computing side.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/mma.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/params.h"
#include "conv3d/few_channels/plan.h"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Hands registers from the loading warpgroups to the computing ones; all counts fit what the block got at its start.
template <int kProducers, int kConsumers, bool kComputes>
__device__ __forceinline__ void share_registers() {
  if constexpr (!kComputes) {
    if constexpr (kProducers == 2 && kConsumers == 3) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    }
  } else if constexpr (kProducers == 2) {
    if constexpr (kConsumers == 3) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 128;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    }
  } else {
    if constexpr (kConsumers == 3) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    }
  }
}

// What the stages need before the first load, by all `threads`: the planes of zeros, and barriers on which every
// loading thread and every reading warp arrives. There for all after the next __syncthreads.
__device__ __forceinline__ void few_channels_prepare_stages(const FewChannelsPlan& plan,
                                                            const FewChannelsSmemLayout& layout, uint32_t* smem,
                                                            int threads, int loaders, int reading_warps) {
  const int tid = threadIdx.x;
  if (plan.zero_plane) {
    uint32_t* const zeros = smem + layout.halo + few_channels_planes(plan) * plan.plane;
    for (int stage = 0; stage < plan.stages; ++stage) {
      for (int i = tid; i < plan.plane; i += threads) zeros[stage * few_channels_stage_words(plan) + i] = 0;
    }
  }
  if (conv_is_scaled(plan.math)) {  // what no load writes must not count for the scale
    for (int i = tid; i < plan.raw_words; i += threads) smem[layout.raw + i] = 0;
  }
  if (tid == 0) {
    uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
    for (int stage = 0; stage < plan.stages; ++stage) {
      barrier_init(full + stage, loaders);
      barrier_init(full + 4 + stage, reading_warps);
    }
  }
}

// Two neighbouring values as words of two fp16 terms each; an infinite or NaN one keeps a second term of 0.
__device__ __forceinline__ void split_half(float a, float b, uint32_t* high, uint32_t* low) {
  const __half2 h = __floats2half2_rn(a, b);
  const float2 back = __half22float2(h);
  const __half2 l =
      __floats2half2_rn(fabsf(back.x) < INFINITY ? a - back.x : 0.f, fabsf(back.y) < INFINITY ? b - back.y : 0.f);
  *high = *reinterpret_cast<const uint32_t*>(&h);
  *low = *reinterpret_cast<const uint32_t*>(&l);
}

// The tiles of a slice: how many, and the first.
__device__ __forceinline__ TileCursor few_channels_tiles(const FewChannelsPlan& plan, int64_t slice, int* count) {
  const int begin = static_cast<int>(slice * plan.tiles_per_slice);
  *count = static_cast<int>(min(plan.tiles_per_slice, plan.tiles_per_sample - slice * plan.tiles_per_slice));
  const int tiles_w = static_cast<int>(plan.tiles[2]), tiles_h = static_cast<int>(plan.tiles[1]);
  return {begin / (tiles_w * tiles_h), begin / tiles_w % tiles_h, begin % tiles_w};
}

inline constexpr int kFewChannelsScales = 16;  // words after the barriers: what undoes each stage's scale, then maxima

// The power of two that brings the largest finite one of a tile's values below 2^15; undo_scale is one over it. Called
// by 128 threads.
__device__ __forceinline__ float scale_of_halo(const float* raw, int all, float* undo_scale, uint32_t* maxima,
                                               int tid) {
  float most = 0.f;
#pragma unroll 4
  for (int i = tid * 4; i < all; i += 512) {
    const float4 v = *reinterpret_cast<const float4*>(raw + i);
    const float values[4] = {fabsf(v.x), fabsf(v.y), fabsf(v.z), fabsf(v.w)};
#pragma unroll
    for (int k = 0; k < 4; ++k) most = values[k] < INFINITY ? fmaxf(most, values[k]) : most;
  }
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(most));  // in the order of their bits
  if (tid % 32 == 0) maxima[tid / 32] = of_warp;
  named_barrier(2, 128);
  const uint32_t largest = max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]));
  const uint32_t exponent = min(max(largest >> 23, 15u), 254u);
  if (tid == 0) *undo_scale = __uint_as_float((exponent - 14) << 23);
  return __uint_as_float((268 - exponent) << 23);
}

// One or two fp16 terms of the values of a tile, all scaled by a power of two, the tile's own where `scale` is 0. raw:
// a plane of fp32 a channel. Called by 128 threads.
template <bool kTwo>
__device__ __forceinline__ void split_halo(const FewChannelsPlan& plan, uint32_t* to, const float* raw, int positions,
                                           float scale, float* undo_scale, uint32_t* maxima, int tid) {
  const int chunks = plan.words / 4;
  if (scale == 0.f) {
    scale = scale_of_halo(raw, chunks * 8 * positions, undo_scale, maxima, tid);
  } else if (tid == 0) {
    *undo_scale = 1.f / scale;
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    uint32_t* const high_plane = to + chunk * plan.plane;
    uint32_t* const low_plane = high_plane + chunks * plan.plane;
#pragma unroll 2
    for (int i = tid; i < positions; i += 128) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const src = raw + (chunk * 8 + 2 * j) * positions + i;
        split_half(src[0] * scale, src[positions] * scale, &high[j], &low[j]);
      }
      *reinterpret_cast<uint4*>(high_plane + i * 4) = make_uint4(high[0], high[1], high[2], high[3]);
      if (kTwo) *reinterpret_cast<uint4*>(low_plane + i * 4) = make_uint4(low[0], low[1], low[2], low[3]);
    }
  }
}

// What the loading warpgroups do from start to end: fill the stages with the halos of `tile_count` tiles from `cursor`
// on. Their threads walk over the positions of the halo, all words of a position in one thread. kForProducts: wgmma
// itself reads the halo, not the threads of the computing side. scale: of all tiles in two terms, 0 where each has its
// own.
template <ConvMath kMath, bool kChunked, int kProducers, bool kForProducts = false>
__device__ __forceinline__ void few_channels_load_tiles(const FewChannelsParams& p, const FewChannelsSmemLayout& layout,
                                                        uint32_t* smem, int64_t n, int group, TileCursor cursor,
                                                        int tile_count, float scale = 0.f) {
  using Traits = ConvMathTraits<kMath>;
  using Element = typename Traits::Element;
  constexpr int kPerWord = Traits::kPerWord;
  constexpr int kLoaders = 128 * kProducers;  // threads
  constexpr int kPositionWords = kChunked ? 4 : 1;
  const FewChannelsPlan& plan = p.plan;
  const int tid = threadIdx.x;
  const int tiles_w = static_cast<int>(plan.tiles[2]), tiles_h = static_cast<int>(plan.tiles[1]);
  const int stage_words = few_channels_stage_words(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const empty = full + 4;
  uint32_t* const halo = smem + layout.halo;
  auto word_offset = [&](int word) { return kChunked ? (word >> 2) * plan.plane + (word & 3) : word * plan.plane; };
  const Element* const x_sample =
      static_cast<const Element*>(p.x) + n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
  // A thread has one place along the width and walks over the rows of the halo, all depths one after the other.
  constexpr int kVector = 4;
  constexpr bool kRearranged = kChunked || kPerWord == 2;  // what vectors bring
  constexpr bool kTerms = conv_is_scaled(kMath);
  const bool vectors = p.load == FewChannelsLoad::kVectors;
  const int across = vectors ? plan.vectors : plan.halo[2];
  const int threads_w = min(across, kLoaders);
  const int rows_at_once = kLoaders / threads_w;
  const int first_row = tid / threads_w < rows_at_once ? tid / threads_w : 1 << 24;
  const int rows = plan.halo[0] * plan.halo[1];
  const uint32_t halo_inverse = 0xffffffffu / plan.halo[1] + 1;
  auto depth_of = [&](uint32_t row) { return plan.halo[1] == 1 ? row : __umulhi(row, halo_inverse); };
  auto rounded = [](uint32_t word) { return kMath == ConvMath::kTf32 ? to_tf32(__uint_as_float(word)) : word; };
  // From rows of channels, as they lie in memory, to words and chunks.
  auto rearrange = [&](uint32_t* to, const uint32_t* raw, int rows) {
    if constexpr (kTerms) {
      split_halo<Traits::kSplit == 2>(
          plan, to, reinterpret_cast<const float*>(raw), rows * plan.pitch, scale,
          reinterpret_cast<float*>(smem + layout.barriers + kFewChannelsScales + (to - halo) / stage_words),
          smem + layout.barriers + kFewChannelsScales + kFewChannelsStages, tid);
    } else if constexpr (kPerWord == 1) {
      // Four channels of a position make a chunk.
      const int positions = rows * plan.pitch;  // a chunked plane has no gaps
      for (int chunk = 0; chunk < plan.words / 4; ++chunk) {
#pragma unroll 2
        for (int i = tid; i < positions; i += kLoaders) {
          const uint32_t* const src = raw + chunk * 4 * positions + i;
          *reinterpret_cast<uint4*>(to + chunk * plan.plane + i * 4) = make_uint4(
              rounded(src[0]), rounded(src[positions]), rounded(src[2 * positions]), rounded(src[3 * positions]));
        }
      }
    } else {
      // Two channels' values of two positions make two words.
      const int pairs = rows * plan.vectors * 2;
      auto merge = [&](const uint32_t* src, uint32_t& first, uint32_t& second) {
        const uint32_t a = src[0], b = src[pairs];
        first = __byte_perm(a, b, 0x5410);
        second = __byte_perm(a, b, 0x7632);
      };
      if constexpr (kChunked) {
        for (int i = tid; i < pairs; i += kLoaders) {
          for (int chunk = 0; chunk < plan.words / 4; ++chunk) {
            uint4 a, b;
            const uint32_t* const src = raw + chunk * 8 * pairs + i;
            merge(src, a.x, b.x);
            merge(src + 2 * pairs, a.y, b.y);
            merge(src + 4 * pairs, a.z, b.z);
            merge(src + 6 * pairs, a.w, b.w);
            uint4* const dst = reinterpret_cast<uint4*>(to + chunk * plan.plane + i * 8);
            dst[0] = a;
            dst[1] = b;
          }
        }
      } else {
        for (int row = first_row; row < rows; row += rows_at_once) {
          for (int place = tid % threads_w; place < across; place += threads_w) {
            const uint32_t* src = raw + (row * plan.vectors + place) * 2;
            uint32_t* dst = to + row * plan.pitch + place * kVector;
#pragma unroll 2
            for (int word = 0; word < plan.words; ++word) {
              uint4 v;
              merge(src, v.x, v.y);
              merge(src + 1, v.z, v.w);
              *reinterpret_cast<uint4*>(dst) = v;
              src += 2 * pairs;
              dst += plan.plane;
            }
          }
        }
      }
    }
  };
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = 0; tile < tile_count; ++tile, cursor.advance(tiles_h, tiles_w)) {
    barrier_wait(empty + stage, parity);
    uint32_t* const dst_stage = halo + stage * stage_words;
    const int in_d = cursor.d * plan.tile[0] * plan.step[0] + plan.origin[0];
    const int in_h = cursor.h * plan.tile[1] * plan.step[1] + plan.origin[1];
    const int in_w = cursor.w * plan.tile[2] * plan.step[2] + plan.origin[2];
    for (int place = tid % threads_w; place < across; place += threads_w) {
      // Where this thread reads in a row and where it writes; a vector lies inside or outside as a whole.
      const int w = vectors ? in_w - plan.lead + place * kVector : in_w + place;
      const int dst_w = vectors ? place * kVector : plan.lead + place;
      const bool inside_w = unsigned(w) < unsigned(p.in[2]);
      const Element* const column = x_sample + w * p.x_stride[2];
      if constexpr (kPerWord == 2 && !kTerms) {
        if (p.load == FewChannelsLoad::kHalves && plan.words <= 4) {
          // Two half values from two planes make a word: through registers, a word of four rows in flight.
          constexpr int kRows = 4;  // more do not fit the loading warps' registers
          for (int word = 0; word < plan.words; ++word) {
            const unsigned short* const plane =
                reinterpret_cast<const unsigned short*>(column + 2 * word * p.x_stride_c);
            const bool low_there = 2 * word < p.c_in, high_there = 2 * word + 1 < p.c_in;
            for (int row0 = first_row; row0 < rows; row0 += kRows * rows_at_once) {
              uint32_t low[kRows], high[kRows];
#pragma unroll
              for (int j = 0; j < kRows; ++j) {
                const uint32_t row = row0 + j * rows_at_once, d = depth_of(row);
                const int in_row = in_h + static_cast<int>(row - d * plan.halo[1]);
                const bool inside =
                    inside_w && row < rows && in_d + d < unsigned(p.in[0]) && unsigned(in_row) < unsigned(p.in[1]);
                const unsigned short* const at =
                    plane + (in_d + static_cast<int>(d)) * p.x_stride[0] + in_row * p.x_stride[1];
                low[j] = inside && low_there ? __ldg(at) : 0u;
                high[j] = inside && high_there ? __ldg(at + p.x_stride_c) : 0u;
              }
              uint32_t* const to = dst_stage + word_offset(word) + (row0 * plan.pitch + dst_w) * kPositionWords;
#pragma unroll
              for (int j = 0; j < kRows; ++j) {
                if (row0 + j * rows_at_once < rows) {
                  to[j * rows_at_once * plan.pitch * kPositionWords] = low[j] | high[j] << 16;
                }
              }
            }
          }
          continue;
        }
      }
      int d = 0, h = first_row;
      for (int row = first_row; row < rows; row += rows_at_once, h += rows_at_once) {
        while (h >= plan.halo[1]) h -= plan.halo[1], ++d;
        const bool inside =
            inside_w && unsigned(in_d + d) < unsigned(p.in[0]) && unsigned(in_h + h) < unsigned(p.in[1]);
        // Not read where outside, but cp.async wants an address it could read.
        const Element* src = inside ? column + (in_d + d) * p.x_stride[0] + (in_h + h) * p.x_stride[1] : x_sample;
        uint32_t* const dst = dst_stage + (row * plan.pitch + dst_w) * kPositionWords;
        if (vectors) {
          if constexpr (kRearranged) {
            constexpr int kVectorWords = kTerms ? kVector : kVector / kPerWord;
            uint32_t* raw = smem + layout.raw + (row * plan.vectors + place) * kVectorWords;
#pragma unroll 2
            for (int c = 0; c < plan.words * kPerWord; ++c) {
              const bool load = inside && c < p.c_in;
              cp_async<kVectorWords * 4>(raw, load ? src : x_sample, load);
              src += p.x_stride_c;
              raw += rows * plan.vectors * kVectorWords;
            }
          } else {
            uint32_t* to = dst;
#pragma unroll 2
            for (int word = 0; word < plan.words; ++word) {
              cp_async<16>(to, src, inside);
              src += p.x_stride_c;
              to += plan.plane;
            }
          }
        } else if (kTerms) {
          uint32_t* raw = smem + layout.raw + row * plan.pitch + dst_w;
#pragma unroll 2
          for (int c = 0; c < plan.words * kPerWord; ++c) {
            const bool load = inside && c < p.c_in;
            cp_async<4>(raw, load ? src : x_sample, load);
            src += p.x_stride_c;
            raw += rows * plan.pitch;
          }
        } else if (p.load == FewChannelsLoad::kWords) {
#pragma unroll 2
          for (int word = 0; word < plan.words; ++word) {
            const bool load = inside && word * kPerWord < p.c_in;  // chunks hold padded channels
            cp_async<4>(dst + word_offset(word), load ? src : x_sample, load);
            src += kPerWord * p.x_stride_c;
          }
        } else if constexpr (kPerWord == 2 && !kTerms) {
          // As above, with eight words of a row in flight.
          const unsigned short* bits = reinterpret_cast<const unsigned short*>(src);
          for (int word0 = 0; word0 < plan.words; word0 += 8) {
            uint32_t v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const int c = (word0 + j) * 2;
              const uint32_t low = inside && c < p.c_in ? __ldg(bits) : 0u;
              const uint32_t high = inside && c + 1 < p.c_in ? __ldg(bits + p.x_stride_c) : 0u;
              v[j] = low | high << 16;
              bits += 2 * p.x_stride_c;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              if (word0 + j < plan.words) dst[word_offset(word0 + j)] = v[j];
            }
          }
        }
      }
    }
    cp_async_commit();
    cp_async_wait_all();
    if (kTerms || (kRearranged && vectors)) {
      named_barrier(2, kLoaders);
      rearrange(dst_stage, smem + layout.raw, rows);
      named_barrier(2, kLoaders);  // the raw tile is read before the next one comes
    } else if constexpr (kMath == ConvMath::kTf32) {
      named_barrier(2, kLoaders);
      uint4* const words = reinterpret_cast<uint4*>(dst_stage);
#pragma unroll 4
      for (int i = tid; i < few_channels_planes(plan) * plan.plane / 4; i += kLoaders) {
        const uint4 v = words[i];
        words[i] = make_uint4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
      }
    }
    if constexpr (kForProducts) wgmma_fence_shared();
    barrier_arrive(full + stage);
    if (++stage == plan.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

#endif

}  // namespace kgopt
