// Statistics of a narrow convolution's output without the convolution, sm_90a.
//
// With u the unfolded input at a position (all taps, all channels), channel c of the output is y_c = w_c' u + b_c, so
// that mean(y_c) = w_c' mean(u) + b_c and var(y_c) = w_c' C w_c with C the covariance of u. C costs no epilogue at all,
// and less than the products suggest:
//   - It is symmetric, and along the outer dim only the distance of two taps counts, but for the first and last slabs:
//     the products of a slab (a row in 2D, a plane in 3D) with the slab `lag` further enter C for each tap that sees
//     the slab. Where that changes, the accumulators are added to shared memory.
//   - Two neighbouring positions share all but one offset along the width. A column of the products stands for both:
//     taps + 1 offsets at half the columns, and two filters, one shifted.
// x comes into shared memory once, as fp16 of (x - pivot) * scale, with a power of two that makes the channel's
// standard deviation about one: eleven bits, as TF32. A second fp16 term gives twenty-two where fp32 accuracy is asked
// for. -pivot * scale is a value of fp16, so that zero padding is exact. Where a value leaves fp16's range the sample
// is done again with the scale that its maximum asks for.
//
// Entries of 16 bytes (8 channels, or 4 of two positions) make the rows that ldmatrix transposes: positions are K.
#pragma once

#include <cuda_runtime.h>

#include "../common/async.cuh"
#include "../common/dtype.cuh"
#include "../common/mma.cuh"
#include "../common/reduce.cuh"
#include "conv3d_gram_params.h"
#include "conv3d_narrow_finish.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ldmatrix of four 8 x 8 matrices, transposed: the fragment A of 16 rows (two entries' channels) x 16 positions, or the
// fragments B of the same two entries.
__device__ __forceinline__ void load_transposed(uint32_t (&a)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}
// The larger magnitude, NaN if either is.
__device__ __forceinline__ float larger_magnitude(float most, float v) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(v)));
  return most;
}
__device__ __forceinline__ uint32_t half_bits(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }
// From an even share of the registers to what either side needs.
template <int kBlocks, bool kAccurate, bool kComputes>
__device__ __forceinline__ void gram_registers() {
  if constexpr (kAccurate) {
    if constexpr (kComputes) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
    }
  } else if constexpr (kBlocks == kGramBlocks) {
    if constexpr (kComputes) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    }
  }
}

// Shared memory, and what the two sides agree on.
struct GramBlock {
  uint64_t *full, *empty;
  float2* shift;   // [8] of (-pivot * scale, scale)
  float* largest;  // [8 warps][8 channels]
  float *sums, *gram;
  uint32_t ring;      // shared address
  int first;          // output along the outer dim
  int outputs;        // of this block
  int slabs, stages;  // of a sweep
};

// Stages in the order of the ring.
struct GramTurn {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

// Tiles of a slab.
struct GramSweep {
  int row = 0, column = 0;  // the first
  int all_rows;
  __device__ __forceinline__ explicit GramSweep(const GramParams& p) : all_rows(p.plan.outer == 0 ? p.out[1] : 1) {}
  __device__ __forceinline__ bool done(const GramParams&) const { return row >= all_rows; }
  __device__ __forceinline__ void advance(const GramParams& p) {
    column += p.plan.tile[1];
    if (column >= p.out[2]) column = 0, row += p.plan.tile[0];
  }
  __device__ __forceinline__ int rows(const GramParams& p) const { return min(p.plan.tile[0], all_rows - row); }
  __device__ __forceinline__ int columns(const GramParams& p) const { return min(p.plan.tile[1], p.out[2] - column); }
};

// Four neighbouring values.
__device__ __forceinline__ float4 load_four(const float* p) { return __ldg(reinterpret_cast<const float4*>(p)); }
__device__ __forceinline__ uint2 load_four(const __nv_bfloat16* p) { return __ldg(reinterpret_cast<const uint2*>(p)); }
__device__ __forceinline__ uint2 load_four(const __half* p) { return __ldg(reinterpret_cast<const uint2*>(p)); }
template <typename Element, typename Four>
__device__ __forceinline__ float one_of_four(const Four& four, int k) {
  return to_acc(reinterpret_cast<const Element*>(&four)[k]);
}

// From x to the ring: all sweeps, once. A thread has one vector of four columns and walks over the rows of a stage.
template <typename Element, int kChannels, bool kAccurate>
__device__ __forceinline__ void gram_load(const GramParams& p, const GramBlock& b, unsigned char* ring, int64_t n,
                                          GramTurn& turn) {
  constexpr int kLoaders = 32 * gram_loading(kAccurate);
  using Four = decltype(load_four(static_cast<const Element*>(nullptr)));
  const GramPlan& plan = p.plan;
  const int tid = threadIdx.x, lane = tid & 31;
  const int low_at = plan.stages * plan.stage_slabs * plan.slab_entries * 16;
  const Element* const x = static_cast<const Element*>(p.x) + n * p.x_stride_n;
  const bool flat = plan.outer == 1;  // a slab is one row
  const bool padded = (plan.pad[0] | plan.pad[1] | plan.pad[2]) != 0;
  const int64_t outer_stride = p.x_stride[plan.outer], row_stride = flat ? 0 : p.x_stride[1];
  const int rows = plan.halo[0], all_rows = plan.stage_slabs * rows;
  const int threads_w = min(plan.vectors, kLoaders), rows_at_once = kLoaders / threads_w;
  const int first_row = tid / threads_w < rows_at_once ? tid / threads_w : 1 << 24;
  float2 shift[kChannels];
  float most[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) shift[c] = b.shift[c], most[c] = 0.f;
  for (GramSweep sweep(p); !sweep.done(p); sweep.advance(p)) {
#pragma unroll 1
    for (int stage = 0; stage < b.stages; ++stage, turn.advance(plan.stages)) {
      barrier_wait(b.empty + turn.slot, turn.parity ^ 1);
      unsigned char* const to_stage = ring + turn.slot * plan.stage_slabs * plan.slab_entries * 16;
#pragma unroll 1
      for (int place = tid % threads_w; place < plan.vectors; place += threads_w) {
        const int at_column = sweep.column - plan.pad[2] - plan.lead + place * 4;  // a vector lies in x or outside it
        const bool inside_column = unsigned(at_column) < unsigned(p.in[2]);
        unsigned char* const to_column = to_stage + place * (plan.pair == 2 ? 32 : 64);
        int slab = 0, row = first_row;
#pragma unroll 1
        for (int i = first_row; i < all_rows; i += rows_at_once, row += rows_at_once) {
          while (row >= rows) row -= rows, ++slab;
          const int at_outer = b.first + stage * plan.stage_slabs + slab - plan.pad[plan.outer];
          const int at_row = flat ? 0 : sweep.row + row - plan.pad[1];
          const bool inside = inside_column && unsigned(at_outer) < unsigned(p.in[plan.outer]) &&
                              (flat || unsigned(at_row) < unsigned(p.in[1]));
          const Element* src = x + (at_outer * outer_stride + at_row * row_stride + at_column);
          Four v[kChannels];
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            v[c] = Four{};
            if (inside && c < p.c_in) v[c] = load_four(src);
            src += p.x_stride_c;
          }
          // Without padding nobody multiplies what lies outside: any number will do, but for NaN.
          const bool counts = inside || padded;
          unsigned char* const to = to_column + (slab * plan.slab_entries + row * plan.row_entries) * 16;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            uint32_t high[kChannels / 2], low[kChannels / 2];
#pragma unroll
            for (int c = 0; c < kChannels; c += 2) {
              float2 f;
              f.x = counts ? fmaf(one_of_four<Element>(v[c], k), shift[c].y, shift[c].x) : 0.f;
              f.y = counts ? fmaf(one_of_four<Element>(v[c + 1], k), shift[c + 1].y, shift[c + 1].x) : 0.f;
              most[c] = larger_magnitude(most[c], f.x);
              most[c + 1] = larger_magnitude(most[c + 1], f.y);
              const __half2 h = __float22half2_rn(f);
              high[c / 2] = half_bits(h);
              if constexpr (kAccurate) {
                const float2 back = __half22float2(h);
                low[c / 2] = half_bits(__floats2half2_rn(f.x - back.x, f.y - back.y));
              }
            }
            const int entry = plan.pair == 2 ? (k & 1) * plan.half + k / 2 : k;
            auto store = [&](unsigned char* at, const uint32_t* w) {
              at += entry * 16;
              if constexpr (kChannels == 8) {
                *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
              } else {
                // And the second half of the entry `unit` before, in a row of pairs the other parity's.
                *reinterpret_cast<uint2*>(at) = make_uint2(w[0], w[1]);
                const int back = plan.pair == 1 ? plan.unit : k & 1 ? plan.half : 1 - plan.half;
                if (place * 4 + k >= plan.unit) *reinterpret_cast<uint2*>(at - back * 16 + 8) = make_uint2(w[0], w[1]);
              }
            };
            store(to, high);
            if constexpr (kAccurate) store(to + low_at, low);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(b.full + turn.slot);
    }
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    float all = c < kChannels ? most[c < kChannels ? c : 0] : 0.f;
#pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) all = larger_magnitude(all, __shfl_xor_sync(0xffffffffu, all, mask));
    if (lane == 0) b.largest[tid / 32 * 8 + c] = all;
  }
}

// The products of each slab with the slab `lag` further. Lag 0 is symmetric: blocks below the diagonal are left out,
// and the sums belong to it. There is one copy of everything here: code that runs once costs more to fetch than to run.
template <int kBlocks, bool kAccurate>
__device__ __forceinline__ void gram_multiply(const GramParams& p, const GramBlock& b, int warp, int lag,
                                              GramTurn& turn, int& lead) {
  constexpr int kHeld = 192;  // products that are summed before their sum moves on: the tensor core truncates
  const GramPlan& plan = p.plan;
  const int lane = threadIdx.x & 31;
  const int teams = plan.teams, team = warp - lag * teams, lags = plan.lags;
  const bool same = lag == 0;
  const int ring_slabs = plan.stages * plan.stage_slabs, slab_bytes = plan.slab_entries * 16;
  const uint32_t low_at = ring_slabs * slab_bytes;
  // Matrix lane / 8 of ldmatrix: A's words alternate between the two entries, B's between the two times 8 positions.
  const uint32_t own_a = b.ring + ((lane >> 4) * 8 + (lane & 7) + (lane >> 3 & 1) * plan.second_at) * 16;
  const uint32_t own_b = b.ring + ((lane >> 3 & 1) * 8 + (lane & 7) + (lane >> 4) * plan.second_at) * 16;

  float acc[kBlocks][kBlocks][2][4] = {}, only_sum[4] = {};
  // Lag 0 leaves the accumulators below the diagonal to its sums.
  auto sums = [&](int i) -> float (&)[4] {
    if constexpr (kBlocks == 1) {
      return only_sum;
    } else {
      return acc[i < 2 ? 1 : kBlocks - 1][0][i & 1];
    }
  };
  // Sixteen columns of a row of positions, of which `left` are there.
  auto multiply = [&](uint32_t at_a, uint32_t at_b, int left) {
    uint32_t a[kBlocks][4], a_low[kAccurate ? kBlocks : 1][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      load_transposed(a[i], at_a + plan.block_at[i]);
      if constexpr (kAccurate) load_transposed(a_low[i], at_a + plan.block_at[i] + low_at);
    }
    if (left < 16) {
      left -= 2 * (lane & 3);  // from this thread's first
      const uint32_t first = left >= 2 ? ~0u : left == 1 ? 0xffffu : 0u;
      const uint32_t second = left >= 10 ? ~0u : left == 9 ? 0xffffu : 0u;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          a[i][k] &= k < 2 ? first : second;
          if constexpr (kAccurate) a_low[i][k] &= k < 2 ? first : second;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      uint32_t f[4], f_low[4];
      load_transposed(f, at_b + plan.block_at[j]);
      if constexpr (kAccurate) load_transposed(f_low, at_b + plan.block_at[j] + low_at);
      auto product = [&](int i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float (&d)[4] = acc[i][j][half];
          const uint32_t b0 = f[2 * half], b1 = f[2 * half + 1];
          if constexpr (kAccurate) {
            const uint32_t low0 = f_low[2 * half], low1 = f_low[2 * half + 1];
            float t[4] = {};
            mma_fp16(t, a_low[i], low0, low1);
            mma_fp16(t, a_low[i], b0, b1);
            mma_fp16(t, a[i], low0, low1);
            mma_fp16(t, a[i], b0, b1);
#pragma unroll
            for (int k = 0; k < 4; ++k) d[k] += t[k];
          } else {
            mma_fp16(d, a[i], b0, b1);
          }
        }
      };
#pragma unroll
      for (int i = 0; i <= j; ++i) product(i);
      if (same) {
        constexpr uint32_t kOnes = 0x3C003C00u;
        if constexpr (kAccurate) {
          float t[4] = {};
          mma_fp16(t, a_low[j], kOnes, kOnes);
          mma_fp16(t, a[j], kOnes, kOnes);
          sums(j)[0] += t[0], sums(j)[2] += t[2];
        } else {
          mma_fp16(sums(j), a[j], kOnes, kOnes);
        }
      } else {
#pragma unroll
        for (int i = j + 1; i < kBlocks; ++i) product(i);
      }
    }
  };
  int held = 0, held_low = 0, held_high = -1;
  // The teams of a lag in turn, each with other blocks.
  auto flush = [&] {
    const int last = min(held_high, lags - 1 - lag);
    float* const gram = b.gram + (lag * lags - lag * (lag - 1) / 2) * (kBlocks * kBlocks * 256) + lane * 4;
#pragma unroll 1
    for (int round = 0; round < teams; ++round) {
      if (teams > 1) named_barrier(2 + lag, teams * 32);
      int to = team + round;
      if (to >= teams) to -= teams;
      int mine = to;  // the next product that is this team's
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          if (mine != i * kBlocks + j) continue;
          mine += teams;
          if (same && i > j) continue;
#pragma unroll 1
          for (int tap = held_low; tap <= last; ++tap) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float4* const at = reinterpret_cast<float4*>(gram + tap * (kBlocks * kBlocks * 256) +
                                                           (i * kBlocks + j) * 256 + half * 128);
              float4 v = *at;
              float* const add = acc[i][j][half];
              v.x += add[0], v.y += add[1], v.z += add[2], v.w += add[3];
              *at = v;
            }
          }
#pragma unroll
          for (int k = 0; k < 8; ++k) acc[i][j][k / 4][k % 4] = 0.f;
        }
      }
      if (same && to == 0) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll 1
          for (int tap = held_low; tap <= last; ++tap) {
            float* const at = b.sums + (tap * kBlocks + i) * 16 + (lane >> 2);
            if ((lane & 3) == 0) at[0] += sums(i)[0], at[8] += sums(i)[2];
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) sums(i)[k] = 0.f;
        }
      }
    }
    held = 0;
  };

  GramSweep sweep(p);
  int low = 0, high = 0;  // taps that see a slab
  for (int stage = 0;;) {
    const bool last = sweep.done(p);
    int slab = stage * plan.stage_slabs;
    const int begin = slab, end = last ? slab + 1 : min(begin + plan.stage_slabs, b.slabs);
    if (!last) {
      for (const int wanted = min(plan.ahead, b.stages - 1 - stage); lead <= wanted; ++lead) {
        int slot = turn.slot + lead;
        const uint32_t parity = slot < plan.stages ? turn.parity : turn.parity ^ 1;
        if (slot >= plan.stages) slot -= plan.stages;
        barrier_wait(b.full + slot, parity);
      }
    }
    const int rows = sweep.rows(p), columns = sweep.columns(p) / plan.pair, steps = (columns + 15) / 16;
    while (slab < end) {
      while (high < lags - 1 && slab >= (high + 1) * plan.lag_step) ++high;
      while (slab >= b.outputs + low * plan.lag_step) ++low;
      int next = min(end, b.outputs + low * plan.lag_step);
      if (high < lags - 1) next = min(next, (high + 1) * plan.lag_step);
      const bool works = !last && low <= min(high, lags - 1 - lag);
      if (held > 0 && (last || (works && (low != held_low || high != held_high || held >= kHeld * teams)))) flush();
      if (works) {
        held_low = low, held_high = high;
        held += (next - slab) * rows * steps;
        // Teams share out slabs, rows or steps.
        const int slab_at = turn.slot * plan.stage_slabs - begin;
        for (int i = slab + (plan.shared == 0 ? team : 0); i < next; i += plan.shared == 0 ? teams : 1) {
          int lagged = slab_at + i + lag * plan.lag_step;
          if (lagged >= ring_slabs) lagged -= ring_slabs;
          for (int row = plan.shared == 1 ? team : 0; row < rows; row += plan.shared == 1 ? teams : 1) {
            int step = plan.shared == 2 ? team : 0;
            const uint32_t at = row * plan.row_entries * 16 + step * 256;
            uint32_t at_a = own_a + at + (slab_at + i) * slab_bytes, at_b = own_b + at + lagged * slab_bytes;
            const int stride = plan.shared == 2 ? teams : 1;
#pragma unroll 1
            for (int left = columns - step * 16; left > 0; left -= 16 * stride) {
              multiply(at_a, at_b, left);
              at_a += 256 * stride, at_b += 256 * stride;
            }
          }
        }
      }
      slab = next;
    }
    if (last) break;
    __syncwarp();
    if (lane == 0) barrier_arrive(b.empty + turn.slot);
    turn.advance(plan.stages);
    --lead;
    if (++stage == b.stages) stage = 0, low = high = 0, sweep.advance(p);
  }
}

// How much larger the sum of the variances of a filter's terms may be than the variance of their sum, which is known to
// a few units of the sums' last place, times this: below PyTorch's own error in each type.
template <typename Element>
__device__ __forceinline__ constexpr float gram_cancellation(bool accurate) {
  return accurate ? 16.f : sizeof(Element) == 4 ? 4096.f : 256.f;
}

// Moments of `valid` channels from the convolution itself, on the plain cores: slow, and hardly ever called. `parts`
// holds estimates of the means.
template <typename Element, int kThreads>
__device__ __noinline__ void gram_direct(const GramParams& p, const float2* scales, int begin, int outputs, int64_t n,
                                         float positions, const float* filters, float4* parts, int valid, int thread) {
  constexpr int kTogether = 8, kWarps = kThreads / 32;
  const GramPlan& plan = p.plan;
  const Element* const x = static_cast<const Element*>(p.x) + n * p.x_stride_n;
  const bool flat = plan.outer == 1;
  const int rows = flat ? 1 : p.out[1], area = rows * p.out[2];
  float* const scratch = reinterpret_cast<float*>(parts + 64);  // [warps][together][2]
  for (int first = 0; first < valid; first += kTogether) {
    float shift[kTogether], sum[kTogether] = {}, squares[kTogether] = {};
    for (int c = 0; c < kTogether; ++c) shift[c] = parts[first + c].x;
    for (int outer = 0; outer < outputs; ++outer) {
      for (int i = thread; i < area; i += kThreads) {
        const int row = i / p.out[2], column = i - row * p.out[2];
        float y[kTogether] = {};
        const float* w = filters + first;
        for (int o = 0; o < plan.lags; ++o) {
          const int at_o = begin + outer + o * plan.lag_step - plan.pad[plan.outer];
          for (int r = 0; r < plan.kernel[1]; ++r) {
            const int at_r = flat ? 0 : row + r * plan.row_step - plan.pad[1];
            for (int k = 0; k < plan.kernel[2]; ++k) {
              const int at_k = column + k * plan.unit - plan.pad[2];
              const bool inside = unsigned(at_o) < unsigned(p.in[plan.outer]) && unsigned(at_k) < unsigned(p.in[2]) &&
                                  (flat || unsigned(at_r) < unsigned(p.in[1]));
              const int64_t at =
                  at_o * p.x_stride[plan.outer] + (flat ? 0 : at_r * p.x_stride[1]) + at_k * p.x_stride[2];
              for (int c = 0; c < p.c_in; ++c, w += 1 << plan.column_bits) {
                const float v = inside ? to_acc(x[at + c * p.x_stride_c]) * scales[c].y : 0.f;
#pragma unroll
                for (int j = 0; j < kTogether; ++j) y[j] = fmaf(w[j], v, y[j]);
              }
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const float v = y[j] - shift[j];
          sum[j] += v;
          squares[j] = fmaf(v, v, squares[j]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      sum[j] = warp_sum(sum[j]);
      squares[j] = warp_sum(squares[j]);
      if (thread % 32 == 0) {
        scratch[(thread / 32 * kTogether + j) * 2] = sum[j];
        scratch[(thread / 32 * kTogether + j) * 2 + 1] = squares[j];
      }
    }
    named_barrier(1, kThreads);
    if (thread < kTogether) {
      float s = 0.f, q = 0.f;
      for (int k = 0; k < kWarps; ++k) {
        s += scratch[(k * kTogether + thread) * 2], q += scratch[(k * kTogether + thread) * 2 + 1];
      }
      parts[first + thread].x += s / positions;
      parts[first + thread].y = q - s * s / positions;
    }
    named_barrier(1, kThreads);
  }
}

// The Gram matrix in shared memory becomes moments of output channels.
template <typename Element, int kBlocks, bool kAccurate>
__device__ __forceinline__ void gram_finish(const GramParams& p, const GramBlock& b, unsigned char* smem, int64_t n,
                                            int64_t slice, float positions, bool broken, int thread) {
  constexpr int kThreads = 32 * kGramComputing;
  const GramPlan& plan = p.plan;
  const int taps = plan.taps, columns = 1 << plan.column_bits, lane = thread & 31;
  const int pitch = (taps + 7) / 8 * 8 + 4;  // of C: a row's 16 bytes, and rows apart in banks
  const int4* const tap_table = reinterpret_cast<const int4*>(smem + plan.at_taps);
  float* const filters = reinterpret_cast<float*>(smem + plan.at_filters);
  float* const c_matrix = reinterpret_cast<float*>(smem + plan.at_ring);
  float4* const parts = reinterpret_cast<float4*>(c_matrix + taps * pitch);  // of threads: mean, m2, variances alone
  Moments<float>* const shared = reinterpret_cast<Moments<float>*>(parts + kThreads);
  float2* const means = reinterpret_cast<float2*>(shared + 128);  // of K entries: sum, mean before the pivot went
  const float share_of_one = 1.f / positions;
#pragma unroll 1
  for (int k = thread; k < taps; k += kThreads) {
    const int4 tap = tap_table[k];
    const float* const of = b.sums + tap.x * (kBlocks * 16);
    const float sum = plan.pair == 2 ? of[tap.y] + of[tap.z] : of[tap.y];
    means[k] = make_float2(sum, sum * share_of_one - b.shift[tap.w & 15].x);
  }
  named_barrier(1, kThreads);
  for (int k = thread / 32; k < taps; k += kGramComputing) {
    const int4 a = tap_table[k];
    const float sum_a = means[k].x;
#pragma unroll 1
    for (int j = k + lane; j < pitch; j += 32) {
      float sum = 0.f;
      if (j < taps) {
        const int4 c = tap_table[j];
        const int lag = c.x - a.x;
        const float* const block = b.gram + (lag * plan.lags - lag * (lag - 1) / 2 + a.x) * (kBlocks * kBlocks * 256);
#pragma unroll 1
        for (int e = 0; e < plan.pair; ++e) {
          int row = e ? a.z : a.y, column = e ? c.z : c.y;
          if (lag == 0 && row / 16 > column / 16) {
            const int t = row;
            row = column;
            column = t;
          }
          sum += block[(row / 16 * kBlocks + column / 16) * 256 +
                       (column % 16 / 8 * 32 + row % 8 * 4 + column % 8 / 2) * 4 + row % 16 / 8 * 2 + column % 2];
        }
        sum -= sum_a * means[j].x * share_of_one;
        c_matrix[j * pitch + k] = sum;
      }
      c_matrix[k * pitch + j] = sum;
    }
  }
  for (int first = 0; first < p.c_out; first += columns) {
    const int valid = min(columns, p.c_out - first);
    // Filters of the scaled input; the first channels' were prepared.
#pragma unroll 1
    for (int i = thread; i < taps * columns; i += kThreads) {
      const int k = i >> plan.column_bits, c = i & (columns - 1), where = tap_table[k].w;
      float w = c < valid ? filters[i] : 0.f;
      if (first > 0) {
        const Element* const from = static_cast<const Element*>(p.weight) + (where & 15) * p.w_stride_in + (where >> 4);
        w = c < valid ? to_acc(from[(first + c) * p.w_stride_out]) : 0.f;
      }
      filters[i] = w * (1.f / b.shift[where & 15].y);
    }
    named_barrier(1, kThreads);
    const int c = thread & (columns - 1), share = thread >> plan.column_bits, shares = kThreads >> plan.column_bits;
    float mean = 0.f, m2 = 0.f, alone = 0.f;
    // Eight rows of C at a time, on and right of the diagonal: what is right of it counts twice. Shares take rows
    // forth and back, since rows get shorter.
#pragma unroll 1
    for (int round = 0, chunk = share; chunk * 8 < taps;
         ++round, chunk = round * shares + (round & 1 ? shares - 1 - share : share)) {
      const int j0 = chunk * 8;
      float s[8] = {};
      auto add = [&](int begin, int end) {
#pragma unroll 4
        for (int k = begin; k < end; ++k) {
          const float4* const row = reinterpret_cast<const float4*>(c_matrix + k * pitch + j0);
          const float4 v0 = row[0], v1 = row[1];
          const float f = filters[(k << plan.column_bits) + c];
          s[0] = fmaf(v0.x, f, s[0]), s[1] = fmaf(v0.y, f, s[1]), s[2] = fmaf(v0.z, f, s[2]),
          s[3] = fmaf(v0.w, f, s[3]);
          s[4] = fmaf(v1.x, f, s[4]), s[5] = fmaf(v1.y, f, s[5]), s[6] = fmaf(v1.z, f, s[6]),
          s[7] = fmaf(v1.w, f, s[7]);
        }
      };
      add(j0 + 8, taps);
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i] *= 2.f;
      add(j0, min(j0 + 8, taps));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (j0 + i < taps) {
          const float f = filters[(j0 + i << plan.column_bits) + c];
          m2 = fmaf(s[i], f, m2);
          mean = fmaf(f, means[j0 + i].y, mean);
          alone = fmaf(f * f, c_matrix[(j0 + i) * pitch + j0 + i], alone);
        }
      }
    }
    parts[thread] = make_float4(mean, m2, alone, 0.f);
    named_barrier(1, kThreads);
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    if (thread < valid) {
      for (int k = 0; k < shares; ++k) {
        const float4 part = parts[k * columns + thread];
        total.x += part.x, total.y += part.y, total.z += part.z;
      }
    }
    named_barrier(1, kThreads);
    if (thread < columns) parts[thread] = total;
    named_barrier(1, kThreads);
    // Where filters cancel all but a little of their input, in a norm's group as a whole, C is not exact enough.
    bool cancels = false;
    for (int c = lane; c < valid; c += 32) {
      const int group = max(static_cast<int>(p.stats.finish.c / p.stats.finish.g), 1);
      const int begin = max(c - (first + c) % group, 0), end = min(begin + group, valid);
      float m2 = 0.f, alone = 0.f;
      for (int k = begin; k < end; ++k) m2 += parts[k].y, alone += parts[k].z;
      cancels = cancels || (alone > m2 * gram_cancellation<Element>(kAccurate) && alone > 0.f);
    }
    if (!broken && __any_sync(0xffffffffu, cancels)) {
      gram_direct<Element, kThreads>(p, b.shift, b.first, b.outputs, n, positions, filters, parts, valid, thread);
    }
    if (thread < valid) {
      Moments<float> m;
      m.mean = parts[thread].x;
      if (p.bias) m.mean += to_acc(static_cast<const Element*>(p.bias)[first + thread]);
      m.m2 = parts[thread].y < 0.f ? 0.f : parts[thread].y;
      m.count = positions;
      if (broken) m.mean = m.m2 = __int_as_float(0x7fffffff);
      if (p.stats.finishes) {
        shared[thread] = m;
      } else {
        float* const out = p.stats.partials + ((n * p.stats.slices + slice) * p.c_out + first + thread) * 3;
        out[0] = m.mean, out[1] = m.m2, out[2] = m.count;
      }
    }
    named_barrier(1, kThreads);
  }
  if (p.stats.finishes) finish_sample<kThreads>(p.stats, n, shared, reinterpret_cast<float2*>(shared + 64), thread);
}

#endif

template <typename Element, int kChannels, int kBlocks, bool kAccurate>
__global__ void __launch_bounds__(gram_threads(kAccurate), 1) conv_gram_kernel(const __grid_constant__ GramParams p) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kLoading = gram_loading(kAccurate), kThreads = gram_threads(kAccurate);
  extern __shared__ __align__(128) unsigned char gram_smem[];
  unsigned char* const smem = gram_smem;
  const GramPlan& plan = p.plan;
  GramBlock b;
  b.full = reinterpret_cast<uint64_t*>(smem);
  b.empty = b.full + kGramStages;
  b.shift = reinterpret_cast<float2*>(smem + 128);
  b.largest = reinterpret_cast<float*>(smem + 256);
  b.sums = reinterpret_cast<float*>(smem + plan.at_sums);
  b.gram = reinterpret_cast<float*>(smem + plan.at_gram);
  b.ring = shared_address(smem + plan.at_ring);
  int4* const tap_table = reinterpret_cast<int4*>(smem + plan.at_taps);
  float* const filters = reinterpret_cast<float*>(smem + plan.at_filters);
  const int tid = threadIdx.x, lane = tid & 31;
  const int64_t n = blockIdx.x / plan.slices, slice = blockIdx.x % plan.slices;
  b.first = static_cast<int>(slice) * plan.slice;
  b.outputs = min(plan.slice, p.out[plan.outer] - b.first);
  b.slabs = b.outputs + (plan.lags - 1) * plan.lag_step;
  b.stages = (b.slabs + plan.stage_slabs - 1) / plan.stage_slabs;

  // A few values of each channel, far apart: where its pivot and scale come from. Two warps a channel.
  const int of_channel = tid / kGramSamples;
  float sample = 0.f;
  if (of_channel < p.c_in) {
    const uint32_t height = p.in[1], width = p.in[2], all = p.in[0] * height * width;  // < 2^31
    const uint32_t i = __umulhi(uint32_t(tid % kGramSamples + 1) * 0x9E3779B9u, all), row = i / width;
    const uint32_t depth = row / height;
    sample = to_acc(
        static_cast<const Element*>(p.x)[n * p.x_stride_n + of_channel * p.x_stride_c + depth * p.x_stride[0] +
                                         (row - depth * height) * p.x_stride[1] + (i - row * width) * p.x_stride[2]]);
  }
  // K entries: (tap along the outer dim; row of the Gram matrix; that of the neighbouring position; channel and place
  // of the weight in a filter's channel).
  const int per_row = plan.per_row, columns = 1 << plan.column_bits;
  if (tid < plan.kernel[1] * plan.kernel[2] * plan.lags) {
    const int column = tid % plan.kernel[2], rest = tid / plan.kernel[2];
    const int outer = rest / plan.kernel[1], row = rest - outer * plan.kernel[1];
    constexpr int kOffsets = kChannels == 8 ? 2 : 4;
    const int next = column + plan.pair - 1;
    const int at = (row * per_row + column / kOffsets) * 16 + column % kOffsets * kChannels;
    const int at_next = (row * per_row + next / kOffsets) * 16 + next % kOffsets * kChannels;
    const int place = static_cast<int>(outer * p.w_stride_k[plan.outer] +
                                       (plan.outer == 0 ? row * p.w_stride_k[1] : 0) + column * p.w_stride_k[2]);
#pragma unroll 1
    for (int c = 0; c < p.c_in; ++c) {
      tap_table[tid * p.c_in + c] = make_int4(outer, at + c, at_next + c, place << 4 | c);
    }
  }
  // The ring starts as zeros too: what is never written is multiplied by zero.
#pragma unroll 1
  for (int i = plan.at_gram / 16 + tid; i < plan.smem_bytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
  }
  if (tid < plan.lags * kBlocks * 16) b.sums[tid] = 0.f;
  if (tid < plan.stages) {
    barrier_init(b.full + tid, kLoading);
    barrier_init(b.empty + tid, plan.teams * plan.lags);
  }
  auto warp_total = [&](float v) {
#pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
  };
  sample = of_channel < p.c_in ? sample : 0.f;
  float* const part = b.largest;
  const float sum = warp_total(sample);
  if (lane == 0) part[tid / 32] = sum;
  __syncthreads();
  const float mean = (part[of_channel * 2] + part[of_channel * 2 + 1]) / kGramSamples;
  const float squares = warp_total((sample - mean) * (sample - mean));
  if (lane == 0) part[32 + tid / 32] = squares;
  __syncthreads();
  // 2^(1 - e) of 2^(e - 1) <= |v| < 2^e, within range.
  auto scale_of = [](float v) {
    const int e = static_cast<int>(__float_as_uint(v) >> 23 & 255) - 126;
    return __uint_as_float((127 + 1 - min(max(e, -120), 120)) << 23);
  };
  auto set_shift = [&](int c, float pivot, float scale) {  // the pivot scaled
    const float rounded = __half2float(__float2half_rn(pivot));
    b.shift[c] = make_float2(-(fabsf(rounded) < 60000.f ? rounded : pivot), scale);
  };
  if (tid % kGramSamples == 0 && of_channel < 8) {
    const float variance = (part[32 + of_channel * 2] + part[33 + of_channel * 2]) / kGramSamples;
    const bool finite = variance < 1e30f && fabsf(mean) < 1e15f;
    const float size = !finite                ? 1.f
                       : variance > 1e-30f    ? __fsqrt_rn(variance)
                       : fabsf(mean) > 1e-15f ? fabsf(mean)
                                              : 1.f;
    // A mean within the deviation stays: half types are exact then.
    const float scale = scale_of(size);
    set_shift(of_channel, !finite || mean * mean <= variance ? 0.f : mean * scale, scale);
  }
  __syncthreads();

  constexpr int kAll = 10;  // a barrier of both sides
  // Whether fp16 held all values, by all warps alike. `most`: each lane's channel's, lane % 8.
  float most = 0.f;
  auto in_range = [&] {
    most = b.largest[lane];  // of four warps
    if constexpr (kLoading > 4) most = larger_magnitude(most, b.largest[32 + lane]);
    most = larger_magnitude(most, __shfl_xor_sync(0xffffffffu, most, 8));
    most = larger_magnitude(most, __shfl_xor_sync(0xffffffffu, most, 16));
    return !__any_sync(0xffffffffu, !(most <= 60000.f) || (most < 0.0625f && most > 0.f));
  };
  GramTurn turn;
  if (tid < kLoading * 32) {
    gram_registers<kBlocks, kAccurate, false>();
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      gram_load<Element, kChannels, kAccurate>(p, b, smem + plan.at_ring, n, turn);
      named_barrier(kAll, kThreads);
      if (in_range()) break;
      named_barrier(kAll, kThreads);
      // The scale that the maximum asks for.
      if (attempt == 0 && tid < 8 && (most > 60000.f || (most < 0.0625f && most > 0.f))) {
        const float by = scale_of(most) * 8192.f;
        const float2 old = b.shift[tid];
        set_shift(tid, -old.x * by, old.y * by);
      }
      named_barrier(kAll, kThreads);
    }
  } else {
    gram_registers<kBlocks, kAccurate, true>();
    const int thread = tid - kLoading * 32;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    const int lag = warp / plan.teams;
    int lead = 0;
    // While the first stage comes.
#pragma unroll 4
    for (int i = thread; i < plan.taps << plan.column_bits; i += 32 * kGramComputing) {
      const int c = i & (columns - 1), where = tap_table[i >> plan.column_bits].w;
      const Element* const from = static_cast<const Element*>(p.weight) + (where & 15) * p.w_stride_in + (where >> 4);
      filters[i] = to_acc(from[min(c, p.c_out - 1) * p.w_stride_out]);
    }
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (lag < plan.lags) gram_multiply<kBlocks, kAccurate>(p, b, warp, lag, turn, lead);
      named_barrier(kAll, kThreads);
      if (in_range()) break;
      named_barrier(kAll, kThreads);
      if (attempt == 0) {
        for (int i = plan.at_gram / 16 + thread; i < plan.at_ring / 16; i += 32 * kGramComputing) {
          reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
        }
        if (thread < plan.lags * kBlocks * 16) b.sums[thread] = 0.f;
      }
      named_barrier(kAll, kThreads);
    }
    const bool broken = __any_sync(0xffffffffu, !(most < INFINITY));
    const float positions = float(b.outputs) * float(plan.outer == 0 ? p.out[1] : 1) * float(p.out[2]);
    gram_finish<Element, kBlocks, kAccurate>(p, b, smem, n, slice, positions, broken, thread);
  }
#endif
}

}  // namespace kgopt
