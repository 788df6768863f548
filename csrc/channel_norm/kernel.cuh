// What the forward and the backward of norms over channels share: statistics of positions, parameters, ways through x.
//   contiguous     a block has a tile of all channels of some positions; its threads lie [channels][positions]
//   channels_last  some lanes of a warp have a position
// Either holds its first vectors in registers: x is read once. Channels beyond are read again, from L1 or L2. The
// contiguous forward holds them in shared memory, where those of the next tile arrive while a tile is computed.
#pragma once

#include "channel_norm/plan.h"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/reduce.cuh"
#include "common/host/launch.h"

namespace kgopt {

template <typename Acc>
__device__ __forceinline__ void fill_affine_table(const ChannelNormParams& p, Acc* table, int64_t first, int64_t step) {
#pragma unroll 1
  for (int64_t c = first; c < p.c; c += step) {
    table[c] = p.weight != nullptr ? load_as<Acc>(p.weight, c, p.affine_dtype) : Acc(1);
    table[p.c + c] = p.bias != nullptr ? load_as<Acc>(p.bias, c, p.affine_dtype) : Acc(0);
  }
}

// fp32 or fp64 copies of weight and bias: in shared memory, or where they find no room there in p.table. They are read
// by generic loads, so that the kernels have no second path.
template <typename Acc>
struct ChannelAffine {
  const Acc* weights;
  const Acc* biases;
  __device__ __forceinline__ ChannelAffine(const ChannelNormParams& p, Acc* shared)
      : weights(p.table != nullptr ? static_cast<const Acc*>(p.table) : shared), biases(weights + p.c) {
    if (p.table != nullptr) return;
    fill_affine_table(p, shared, threadIdx.x, blockDim.x);
    __syncthreads();
  }
  __device__ __forceinline__ Acc weight(int64_t c) const { return weights[c]; }
  __device__ __forceinline__ Acc bias(int64_t c) const { return biases[c]; }
  // Of neighbouring channels; c is a multiple of kVec.
  template <int kVec>
  __device__ __forceinline__ static void load(const Acc* from, Acc (&to)[kVec]) {
    constexpr int kPart = kVec % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int first = 0; first < kVec; first += kPart) {
      const Vec<Acc, kPart> part = load_vec<Acc, kPart>(from + first);
#pragma unroll
      for (int j = 0; j < kPart; ++j) to[first + j] = part.v[j];
    }
  }
  // Where the reductions of a block may write.
  __device__ __forceinline__ static Acc* behind(const ChannelNormParams& p, Acc* shared) {
    return shared + (p.table != nullptr ? 0 : 2 * p.c);
  }
};

// xhat = (x - mean) * scale, of a position. turns: xhat keeps its length as x changes; else, where l2 has a position
// not longer than eps, xhat is x times a constant.
template <typename Acc>
struct PositionScale {
  Acc mean = 0, scale = 0;
  bool turns = true;
};

// Rounded by itself, as where it was summed up: the one channel's product and their mean are equal.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// From the sum of the squares, or for `layer` those of x - mean: of them, and of the squares. The mean is corrected by
// what its own rounding left.
template <typename Acc>
__device__ __forceinline__ PositionScale<Acc> position_scale(const ChannelNormParams& p, Acc mean, Acc sum,
                                                             Acc sum_sq) {
  const Acc count = static_cast<Acc>(p.c), eps = static_cast<Acc>(p.eps);
  PositionScale<Acc> r;
  if (p.kind == ChannelNormKind::kL2) {
    const Acc length = root(sum_sq);
    r.turns = !(length <= eps);
    r.scale = quotient(root(count), r.turns ? length : eps);
  } else if (p.kind == ChannelNormKind::kRms) {
    r.scale = reciprocal_root(quotient(sum_sq, count) + eps);
  } else {
    const Acc off = quotient(sum, count);
    const Acc variance = quotient(sum_sq, count) - off * off;
    r.mean = mean + off;
    r.scale = reciprocal_root((variance < Acc(0) ? Acc(0) : variance) + eps);
  }
  return r;
}

// What follows xhat * weight + bias. Without a chain that is compiled in: none, or ReLU by p.floor.
template <typename T, Chain kChain, int kVec>
__device__ __forceinline__ Vec<T, kVec> finish_position(const ChannelNormParams& p, acc_t<T> (&z)[kVec]) {
  if constexpr (kChain == Chain::kNone) {
    const auto floor = static_cast<acc_t<T>>(p.floor);
#pragma unroll
    for (int j = 0; j < kVec; ++j) z[j] = z[j] < floor ? floor : z[j];
  } else {
    finish_chain<kChain, T>(p.act, z);
  }
  return pack<T, kVec>(z);
}

// Sums over the threads of a block that have the same positions, always in the same order. For each position i of the
// tile, one thread calls f(i, sums) and may leave up to two results in shared[i] and shared[kVec * along + i], which
// all may read afterwards.
template <typename Acc, int kValues, int kVec, typename F>
__device__ __forceinline__ void sum_over_block(Acc (&v)[kValues][kVec], int along, Acc* shared, const F& f) {
#pragma unroll 1
  for (int mask = along; mask <= 16; mask *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[i][j] += __shfl_xor_sync(0xffffffffu, v[i][j], mask);
    }
  }
  const int size = max(along, 32), groups = blockDim.x / size, positions = kVec * along;
  const int group = threadIdx.x / size, at = threadIdx.x % along;
  __syncthreads();  // what was here is read
  if (static_cast<int>(threadIdx.x) % size < along) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared[(group * kValues + i) * positions + j * along + at] = v[i][j];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < positions; i += blockDim.x) {
    Acc sums[kValues] = {};
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) sums[k] += shared[(g * kValues + k) * positions + i];
    }
    f(i, sums);
  }
  __syncthreads();
}

template <typename Acc>
__device__ __forceinline__ Acc sum_over_lanes(Acc v, int lanes) {
#pragma unroll 1
  for (int mask = 1; mask < lanes; mask *= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
  return v;
}

// A thread's vectors of a tile and of the next one in shared memory, [tile][vector][thread]. No other thread reads
// them, so that none waits for another.
template <typename T, int kVec>
struct Ring {
  using Slot = Vec<T, kVec>;
  Slot* next;  // a block of one tile has this one alone
  Slot* now;
  int held;  // vectors of a tile
  __device__ __forceinline__ Ring(void* shared, int held)
      : next(static_cast<Slot*>(shared) + threadIdx.x), now(next + held * static_cast<int>(blockDim.x)), held(held) {}
  __device__ __forceinline__ void turn() {
    Slot* const other = now;
    now = next;
    next = other;
  }
  __device__ __forceinline__ Slot slot(int k) const { return now[k * static_cast<int>(blockDim.x)]; }
  // Single elements have no asynchronous copies: some are of two bytes.
  __device__ __forceinline__ void fetch(int k, const T* from) const {
    Slot* const to = next + k * static_cast<int>(blockDim.x);
    if constexpr (sizeof(Slot) == 16) {
      cp_async_16(to, from);
    } else {
      *to = load_vec<T, kVec>(from);
    }
  }
};

// A thread of the contiguous kernels: kVec neighbouring positions of every deep-th channel.
template <typename T, int kVec, int kHeld>
struct PlanesThread {
  using Acc = acc_t<T>;
  const ChannelNormParams& p;
  int along, deep, first;
  int mine;  // channels of this thread, at most those that are held
  int64_t per_sample;
  bool live = false;
  int64_t base = 0;  // of the first channel's values

  __device__ __forceinline__ explicit PlanesThread(const ChannelNormParams& params)
      : p(params), along(params.along), deep(blockDim.x / params.along), first(threadIdx.x / params.along) {
    per_sample = p.tiles / p.n;
    const int64_t all = first < p.c ? (p.c - first - 1) / deep + 1 : 0;
    mine = static_cast<int>(all < p.held ? all : p.held);
  }
  __device__ __forceinline__ void move_to(int64_t tile) {
    // 32 bits where they do: a division of 64 costs as much as some vectors.
    const int64_t sample = (tile | per_sample) >> 32 == 0
                               ? static_cast<uint32_t>(tile) / static_cast<uint32_t>(per_sample)
                               : tile / per_sample;
    const int64_t s = ((tile - sample * per_sample) * along + threadIdx.x % along) * kVec;
    live = s < p.s;
    base = sample * p.c * p.s + s;
  }
  __device__ __forceinline__ bool has(int64_t c) const { return live && c < p.c; }
  __device__ __forceinline__ int64_t held_channel(int k) const { return first + int64_t(k) * deep; }
  __device__ __forceinline__ void load_held(const T* from, Vec<T, kVec> (&held)[kHeld]) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      held[k] = Vec<T, kVec>{};
      if (has(held_channel(k))) held[k] = load_vec<T, kVec>(from + base + held_channel(k) * p.s);
    }
  }
  __device__ __forceinline__ void fetch(const T* from, const Ring<T, kVec>& ring) const {
    if (!live) return;
    const T* at = from + base + first * p.s;
#pragma unroll 4
    for (int k = 0; k < mine; ++k) ring.fetch(k, at + k * deep * p.s);
  }
  // f(channel, values of x) for all channels of the thread; those of the threads that have none are left out.
  template <typename F>
  __device__ __forceinline__ void for_each(const T* x, const Vec<T, kVec> (&held)[kHeld], const F& f) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (has(held_channel(k))) {
        Acc v[kVec];
        unpack(held[k], v);
        f(held_channel(k), v);
      }
    }
    for_each_beyond(x, kHeld, f);
  }
  template <typename F>
  __device__ __forceinline__ void for_each(const T* x, const Ring<T, kVec>& ring, const F& f) const {
    const int count = live ? mine : 0;
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      Acc v[kVec];
      unpack(ring.slot(k), v);
      f(held_channel(k), v);
    }
    for_each_beyond(x, ring.held, f);
  }
  template <typename F>
  __device__ __forceinline__ void for_each_beyond(const T* x, int held, const F& f) const {
#pragma unroll 1
    for (int64_t c = held_channel(held); has(c); c += deep) {
      Acc v[kVec];
      unpack(load_vec<T, kVec>(x + base + c * p.s), v);
      f(c, v);
    }
  }
  template <typename Held>
  __device__ __forceinline__ void scales(const T* x, const Held& held, Acc* shared,
                                         PositionScale<Acc> (&scale)[kVec]) const {
    // The statistics of a position are one thread's: a division and a root cost as much as the sums do.
    const int positions = kVec * along, at = threadIdx.x % along;
    Acc* const means = shared + means_at();
    const bool has_mean = p.kind == ChannelNormKind::kLayer;
    const auto keep = [&](int i, Acc mean, Acc sum, Acc sum_sq) {
      const PositionScale<Acc> of = position_scale(p, mean, sum, sum_sq);
      shared[i] = of.mean;
      shared[positions + i] = of.turns ? fabs(of.scale) : -fabs(of.scale);
    };
    if (has_mean) {
      Acc sum[1][kVec] = {};
      for_each(x, held, [&](int64_t, const Acc(&v)[kVec]) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[0][j] += v[j];
      });
      sum_over_block(sum, along, shared,
                     [&](int i, const Acc(&of)[1]) { means[i] = quotient(of[0], static_cast<Acc>(p.c)); });
      Acc mean[kVec], sums[2][kVec] = {};
#pragma unroll
      for (int j = 0; j < kVec; ++j) mean[j] = means[j * along + at];
      for_each(x, held, [&](int64_t, const Acc(&v)[kVec]) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const Acc d = v[j] - mean[j];
          sums[0][j] += d;
          sums[1][j] += d * d;
        }
      });
      sum_over_block(sums, along, shared, [&](int i, const Acc(&of)[2]) { keep(i, means[i], of[0], of[1]); });
    } else {
      Acc sum_sq[1][kVec] = {};
      for_each(x, held, [&](int64_t, const Acc(&v)[kVec]) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum_sq[0][j] += v[j] * v[j];
      });
      sum_over_block(sum_sq, along, shared, [&](int i, const Acc(&of)[1]) { keep(i, Acc(0), Acc(0), of[0]); });
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const Acc of = shared[positions + j * along + at];
      scale[j].mean = shared[j * along + at];
      scale[j].scale = fabs(of);
      scale[j].turns = !signbit(of);
    }
  }
  // Behind the sums of the block's groups of warps.
  __device__ __forceinline__ int means_at() const {
    return static_cast<int>(blockDim.x) / max(along, 32) * 2 * kVec * along;
  }
};

// A lane of the channels_last kernels: every lanes-th vector of a position.
template <typename T, int kVec, int kHeld>
struct PixelLane {
  using Acc = acc_t<T>;
  const ChannelNormParams& p;
  int lanes, lane;
  bool live = false;
  int64_t base = 0;

  __device__ __forceinline__ explicit PixelLane(const ChannelNormParams& params)
      : p(params), lanes(params.along), lane(threadIdx.x % params.along) {}
  // Positions of a block at a time, the first of them, and how many there are: lanes of a warp stay together.
  __device__ __forceinline__ int64_t per_block() const { return blockDim.x / lanes; }
  __device__ __forceinline__ void move_to(int64_t tile) {
    const int64_t position = tile * per_block() + threadIdx.x / lanes;
    live = position < p.n * p.s;
    base = position * p.c;
  }
  __device__ __forceinline__ int64_t held_channel(int k) const { return (lane + int64_t(k) * lanes) * kVec; }
  __device__ __forceinline__ bool has(int64_t c) const { return live && c < p.c; }
  __device__ __forceinline__ void load_held(const T* from, Vec<T, kVec> (&held)[kHeld]) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      held[k] = Vec<T, kVec>{};
      if (has(held_channel(k))) held[k] = load_vec<T, kVec>(from + base + held_channel(k));
    }
  }
  template <typename F>
  __device__ __forceinline__ void for_each(const T* x, const Vec<T, kVec> (&held)[kHeld], const F& f) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (has(held_channel(k))) {
        Acc v[kVec];
        unpack(held[k], v);
        f(held_channel(k), v);
      }
    }
#pragma unroll 1
    for (int64_t c = held_channel(kHeld); has(c); c += int64_t(lanes) * kVec) {
      Acc v[kVec];
      unpack(load_vec<T, kVec>(x + base + c), v);
      f(c, v);
    }
  }
  __device__ __forceinline__ PositionScale<Acc> scale(const T* x, const Vec<T, kVec> (&held)[kHeld]) const {
    Acc mean = 0;
    if (p.kind == ChannelNormKind::kLayer) {
      Acc sum = 0;
      for_each(x, held, [&](int64_t, const Acc(&v)[kVec]) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum += v[j];
      });
      mean = quotient(sum_over_lanes(sum, lanes), static_cast<Acc>(p.c));
    }
    Acc sum = 0, sum_sq = 0;
    for_each(x, held, [&](int64_t, const Acc(&v)[kVec]) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Acc d = v[j] - mean;
        sum += d;
        sum_sq += d * d;
      }
    });
    return position_scale(p, mean, sum_over_lanes(sum, lanes), sum_over_lanes(sum_sq, lanes));
  }
};

// Runs `body` with kVec and kChain bound: single elements, and fp64, have the one instance that takes any chain. SiLU
// is compiled in for bfloat16 alone, in which video autoencoders run: every instance is code in the wheel.
#define KGOPT_DISPATCH_CHANNEL_NORM(p, plan, relu_is_none, T, kVec, kChain, ...)   \
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {                                               \
    const ::kgopt::Chain chain = ::kgopt::chain_kind(p.act);                       \
    constexpr int kFull = std::is_same_v<T, double> ? 1 : 16 / int(sizeof(T));     \
    if (plan.vec == 1) {                                                           \
      constexpr int kVec = 1;                                                      \
      constexpr Chain kChain = Chain::kAny;                                        \
      __VA_ARGS__;                                                                 \
    } else if (chain == Chain::kNone || (relu_is_none && chain == Chain::kRelu)) { \
      constexpr int kVec = kFull;                                                  \
      constexpr Chain kChain = chain_for<T>(Chain::kNone);                         \
      __VA_ARGS__;                                                                 \
    } else if (kIsCoarse<T> && chain == Chain::kSilu) {                            \
      constexpr int kVec = kFull;                                                  \
      constexpr Chain kChain = kIsCoarse<T> ? Chain::kSilu : Chain::kAny;          \
      __VA_ARGS__;                                                                 \
    } else {                                                                       \
      constexpr int kVec = kFull;                                                  \
      constexpr Chain kChain = Chain::kAny;                                        \
      __VA_ARGS__;                                                                 \
    }                                                                              \
  })

}  // namespace kgopt
