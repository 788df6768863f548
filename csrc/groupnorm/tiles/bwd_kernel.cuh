// GroupNorm backward with one read of x and dy (groupnorm/tiles/tiles.h); the formulas are those of
// groupnorm/passes/backward.cu. The warps of a block have roles, as in groupnorm/tiles/fwd_kernel.cuh:
//   producer   a warp that starts the loads into slots of shared memory that have become free
//   summers    teams, each with a tile of its own at a time: the sums of its channels. Where the activation is slow to
//              differentiate, dz takes dy's place, rounded as dy is
//   publisher  keeps each tile's sums, and makes the block's sums over a group the block's word
//   merger     adds up the words of all blocks, for a share of the groups, to one more word; clears them before
//   watcher    waits for such words, of all groups of which the block has tiles
//   writers    write dx from the slots
//   holders    teams that keep a tile in their registers from load to store: room beyond the shared memory
#pragma once

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/tiles/bwd_params.h"
#include "groupnorm/tiles/tiles.cuh"

namespace kgopt {

template <typename T_, Chain kPre_, Chain kAct_, int kHolders_>
struct GroupNormTilesBwdTraits {
  using T = T_;
  static constexpr Chain kPre = kPre_, kAct = kAct_;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kSlots = kTilesSlots, kHolders = kHolders_;
  static constexpr int kTileVectors = tile_vectors(2);
  static constexpr bool kStoresDz = kAct == Chain::kSilu || kAct == Chain::kAny;
  static constexpr int kServantWarps = 4;
  // Holders leave room for fewer: 896 threads have 72 registers each. A chain that is walked waits for its own results
  // most of the time, which other warps hide.
  static constexpr int kTeamWarps = 4, kTeams = kAct == Chain::kAny ? 4 : kHolders == 0 ? 2 : 1, kWriterWarps = 8;
  static constexpr int kThreads = 32 * (kServantWarps + kTeams * kTeamWarps + kWriterWarps + kHolders * kTeamWarps);
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the warps must know of a tile. Elements from `split` on, counted from vector lo, are the second channel's.
struct __align__(16) BwdTile {
  int64_t base;  // vector 0, from the tensor's start
  int lo, hi;    // vectors of the group
  int split;
  uint32_t visit;  // groups of the block before it
  float mean;
  float scale[2], bias[2];  // weight * rstd, and bias
  bool is_full;             // no vector is another group's
  bool is_one;              // all of one channel
};

template <typename Traits>
struct BwdShared {
  uint64_t loaded[Traits::kSlots], summed[Traits::kSlots], freed[Traits::kSlots];
  BwdTile tiles[Traits::kSlots];
  uint64_t published[kTilesVisits], ready[kTilesVisits];
  uint64_t described, cleared;  // the first tiles; the words, by all blocks
  float2 terms[kTilesVisits];
  float2 box[Traits::kSlots][2][Traits::kTeamWarps];  // of a channel: sums of dz and dz (u - mean)
  uint64_t held[Traits::kHolders + 1];                // sums of a holders' tile are there
  float2 held_box[Traits::kHolders + 1][2][Traits::kTeamWarps];
  float2 held_scale[Traits::kHolders + 1];
};

template <typename Traits>
struct BwdBlock
    : TileWalk<BwdBlock<Traits>, BwdTile, Traits::kVec, Traits::kTileVectors, Traits::kSlots, Traits::kHolders> {
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kSlots = Traits::kSlots, kHolders = Traits::kHolders;
  static constexpr int kTileVectors = Traits::kTileVectors, kTeamWarps = Traits::kTeamWarps;
  static constexpr bool kCoarse = kIsCoarse<T>;
  using Walk = TileWalk<BwdBlock, BwdTile, kVec, kTileVectors, kSlots, kHolders>;
  using Tile = typename Walk::Tile;
  using Walk::advance, Walk::channel_of, Walk::channels_before, Walk::exists, Walk::first_tile, Walk::holders_before,
      Walk::is_held, Walk::next_slot, Walk::place_tile, Walk::slot_of, Walk::slot_tile, Walk::slot_tiles,
      Walk::wait_words;

  const GroupNormTilesBwdParams& p;
  BwdShared<Traits>& s;
  char* const slots;

  __device__ __forceinline__ BwdBlock(const GroupNormTilesBwdParams& params, BwdShared<Traits>& shared, char* memory)
      : Walk{params.shares}, p(params), s(shared), slots(memory) {}

  __device__ __forceinline__ BwdTile describe(const Tile& t) const {
    BwdTile d;
    place_tile(t, &d);
    uint32_t column;
    const uint32_t row = channel_of(t, &column), last = p.shares.channels_per_group - 1;
    const int64_t channel = channels_before(t);
    const float2 first = affine_of<T>(p.weight, p.bias, channel + min(row, last), p.affine_dtype);
    const float2 second = affine_of<T>(p.weight, p.bias, channel + min(row + 1, last), p.affine_dtype);
    const float rstd = p.rstd[t.group];
    d.mean = p.mean[t.group];
    d.scale[0] = first.x * rstd;
    d.scale[1] = second.x * rstd;
    d.bias[0] = first.y;
    d.bias[1] = second.y;
    d.split = static_cast<int>(min(static_cast<uint32_t>(p.shares.dims.s) - column, uint32_t(kTileVectors * kVec)));
    d.is_one = (d.hi - d.lo) * kVec <= d.split;
    return d;
  }
  // The sums need all of it.
  __device__ __forceinline__ void describe_place(const Tile& t, uint32_t, BwdTile* d) const { *d = describe(t); }
  __device__ __forceinline__ void describe_channels(const Tile&, BwdTile*) const {}
  __device__ __forceinline__ void start_load(const Tile& t, const BwdTile& d) const {
    const uint32_t k = slot_of(t);
    const int vectors = d.hi - d.lo;
    if (vectors > 0) {
      const uint64_t policy = evict_normal_policy();
      char* const slot = slots + k * kTilesSlotBytes + d.lo * 16;
      const int64_t from = (d.base + d.lo) * kVec;
      barrier_expect_bytes(&s.loaded[k], vectors * 32);
      bulk_load(slot, static_cast<const T*>(p.x) + from, vectors * 16, &s.loaded[k], policy);
      bulk_load(slot + kTileVectors * 16, static_cast<const T*>(p.dy) + from, vectors * 16, &s.loaded[k], policy);
    } else {  // the other groups' heads need this tile
      barrier_arrive(&s.loaded[k]);
    }
  }

  // --- Sums.

  struct Sums {
    float dz[2] = {}, dz_d[2] = {};
    __device__ __forceinline__ void add(int j, float value, float d) {
      dz[j % 2] += value;
      dz_d[j % 2] += value * d;
    }
    __device__ __forceinline__ float2 warp_total() const {
      return make_float2(warp_sum(dz[0] + dz[1]), warp_sum(dz_d[0] + dz_d[1]));
    }
  };
  // Whether element j of vector v is the tile's second channel's.
  static __device__ __forceinline__ bool has_crossed(const BwdTile& d, int v, int j) {
    return (v - d.lo) * kVec + j >= d.split;
  }
  static __device__ __forceinline__ float2 coefficients_of(const BwdTile& d, int v, int j) {
    return has_crossed(d, v, j) ? make_float2(d.scale[1], d.bias[1]) : make_float2(d.scale[0], d.bias[0]);
  }

  // The warp's sums over vectors first + 32 * k, k < kPasses, that read(k, &x, &dy) gives, to box[channel][warp];
  // keep(k, dz) takes dz.
  template <int kPasses, typename Read, typename Keep>
  __device__ __forceinline__ void sum_up(const BwdTile& d, int first, float2 (&box)[2][kTeamWarps], int warp, int lane,
                                         Read read, Keep keep) const {
    Sums sums, second;
    if (d.is_one && d.is_full) {
      const float mean = d.mean;
      const float2 coefficients = make_float2(d.scale[0], d.bias[0]);
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        Vec<T, kVec> input, gradient;
        read(k, &input, &gradient);
        float x[kVec], dy[kVec];
        values_of<Traits::kPre>(input, p.pre_act, x);
        unpack(gradient, dy);
#pragma unroll
        for (int j = 0; j < kVec; ++j) x[j] -= mean;
        make_dz<Traits::kAct, kCoarse>(p.act, x, dy, [&](int) { return coefficients; });
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums.add(j, dy[j], x[j]);
        if constexpr (Traits::kStoresDz) keep(k, pack<T, kVec>(dy));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        const int v = first + 32 * k;
        if (v < d.lo || v >= d.hi) continue;
        Vec<T, kVec> input, gradient;
        read(k, &input, &gradient);
        float x[kVec], dy[kVec];
        values_of<Traits::kPre>(input, p.pre_act, x);
        unpack(gradient, dy);
#pragma unroll
        for (int j = 0; j < kVec; ++j) x[j] -= d.mean;
        make_dz<Traits::kAct, kCoarse>(p.act, x, dy, [&](int j) { return coefficients_of(d, v, j); });
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const bool crossed = has_crossed(d, v, j);
          sums.add(j, crossed ? 0.f : dy[j], crossed ? 0.f : x[j]);
          second.add(j, crossed ? dy[j] : 0.f, crossed ? x[j] : 0.f);
        }
        if constexpr (Traits::kStoresDz) keep(k, pack<T, kVec>(dy));
      }
      __syncwarp();
    }
    const float2 total = sums.warp_total();
    const float2 rest = d.is_one ? make_float2(0.f, 0.f) : second.warp_total();
    if (lane == 0) {
      box[0][warp] = total;
      box[1][warp] = rest;
    }
  }

  __device__ __forceinline__ void sum_slots(int team, int warp, int lane) const {
    constexpr int kPasses = kTileVectors / 32 / kTeamWarps;
    const int first = warp * kPasses * 32 + lane;
    const uint32_t own = slot_tiles();
    for (uint32_t i = 0, k = 0, parity = 0; i < own; ++i, next_slot(k, parity)) {
      if (i % Traits::kTeams != static_cast<uint32_t>(team)) continue;
      barrier_wait(&s.loaded[k], parity);
      T* const x = reinterpret_cast<T*>(slots + k * kTilesSlotBytes) + first * kVec;
      T* const dy = x + kTileVectors * kVec;
      sum_up<kPasses>(
          s.tiles[k], first, s.box[k], warp, lane,
          [&](int u, Vec<T, kVec>* input, Vec<T, kVec>* gradient) {
            *input = load_vec<T, kVec>(x + u * 32 * kVec);
            *gradient = load_vec<T, kVec>(dy + u * 32 * kVec);
          },
          [&](int u, const Vec<T, kVec>& dz) { store_vec<T, kVec>(dy + u * 32 * kVec, dz); });
      barrier_arrive(&s.summed[k]);  // of every lane: each has written
    }
  }

  __device__ __forceinline__ void publish(int lane) const {
    const int channel = lane / kTeamWarps, warp = lane % kTeamWarps;
    const bool reads = channel < 2;
    for (Tile t = first_tile(); exists(t);) {
      const Tile start = t;
      float2 total = make_float2(0.f, 0.f);
      for (; exists(t) && t.visit == start.visit; advance(t)) {
        float2 v = make_float2(0.f, 0.f);
        float scale = 0.f;
        if (is_held(t.place)) {
          const uint32_t h = holders_before(t.place);
          barrier_wait(&s.held[h], t.round & 1);
          if (reads) v = s.held_box[h][channel][warp];
          if (reads) scale = channel == 0 ? s.held_scale[h].x : s.held_scale[h].y;
        } else {
          const uint32_t k = slot_of(t);
          barrier_wait(&s.summed[k], t.round & 1);
          if (reads) {
            v = s.box[k][channel][warp];
            scale = s.tiles[k].scale[channel];
            barrier_arrive(&s.freed[k]);
          }
        }
        __syncwarp();
#pragma unroll
        for (int mask = 1; mask < kTeamWarps; mask *= 2) {
          v.x += __shfl_xor_sync(0xffffffffu, v.x, mask);
          v.y += __shfl_xor_sync(0xffffffffu, v.y, mask);
        }
        if (reads && warp == 0) reinterpret_cast<float2*>(p.tile_sums)[int64_t(t.number) * 2 + channel] = v;
        total.x += scale * v.x;
        total.y += scale * v.y;
      }
      total.x += __shfl_down_sync(0xffffffffu, total.x, kTeamWarps);
      total.y += __shfl_down_sync(0xffffffffu, total.y, kTeamWarps);
      if (lane == 0) {
        store_relaxed(p.words + int64_t(start.group) * p.shares.parts + Walk::part_of(start),
                      pack_signed_word(total.x, total.y));
        barrier_arrive(&s.published[start.visit % kTilesVisits]);
      }
    }
  }

  __device__ __forceinline__ void merge(int lane) const {
    constexpr int kSets = kTilesMaxBlocks / 32;
    Walk::merge_words(p.words, s.published, [&](const Tile& t, const uint64_t* words) {
      const float rstd = p.rstd[t.group];
      uint64_t word[kSets] = {};
      wait_words(words, lane, word);
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int k = 0; k < kSets; ++k) {
        if (lane + 32 * k >= p.shares.parts) break;
        const float2 v = unpack_signed_word(word[k]);
        sum.x += v.x;
        sum.y += v.y;
      }
      const float per_element = reciprocal_of_count(static_cast<float>(p.shares.group_vectors * kVec));
      const float term = warp_sum(sum.x) * per_element, term_d = warp_sum(sum.y) * per_element * rstd * rstd;
      if (lane == 0) store_relaxed(Walk::results(p.words) + t.group, pack_signed_word(term, term_d));
    });
  }
  __device__ __forceinline__ void watch(int lane) const {
    Walk::watch(p.words, s.published, lane, [&](uint32_t visit, uint64_t word) {
      s.terms[visit % kTilesVisits] = unpack_signed_word(word);
      barrier_arrive(&s.ready[visit % kTilesVisits]);
    });
  }

  // --- dx.

  __device__ __forceinline__ float2 wait_terms(uint32_t visit) const {
    barrier_wait(&s.ready[visit % kTilesVisits], visit / kTilesVisits & 1);
    return s.terms[visit % kTilesVisits];
  }
  // x becomes dx.
  template <typename At>
  __device__ __forceinline__ void gradient_of(float (&x)[kVec], float (&dy)[kVec], float mean, At at,
                                              float2 terms) const {
    make_dx<Traits::kPre, Traits::kAct, kCoarse, Traits::kStoresDz>(
        p.pre_act, p.act, x, dy, [&](int) { return mean; }, at, [&](int) { return terms; });
  }

  // dx of vectors first + 32 * k, k < kPasses, that read(k, &x, &dz or &dy) gives, to `to` + 32 * k vectors.
  template <int kPasses, typename Read>
  __device__ __forceinline__ void write(const BwdTile& d, float2 terms, int first, T* to, Read read) const {
    if (d.is_one && d.is_full) {
      const float mean = d.mean;
      const float2 coefficients = make_float2(d.scale[0], d.bias[0]);
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        Vec<T, kVec> input, gradient;
        read(k, &input, &gradient);
        float x[kVec], dy[kVec];
        unpack(input, x);
        unpack(gradient, dy);
        gradient_of(x, dy, mean, [&](int) { return coefficients; }, terms);
        store_values<T, kVec>(to + k * 32 * kVec, x, false);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      const int v = first + 32 * k;
      if (v < d.lo || v >= d.hi) continue;
      Vec<T, kVec> input, gradient;
      read(k, &input, &gradient);
      float x[kVec], dy[kVec];
      unpack(input, x);
      unpack(gradient, dy);
      gradient_of(x, dy, d.mean, [&](int j) { return coefficients_of(d, v, j); }, terms);
      store_values<T, kVec>(to + k * 32 * kVec, x, false);
    }
  }

  __device__ __forceinline__ void write_slots(int warp, int lane) const {
    constexpr int kPasses = kTileVectors / 32 / Traits::kWriterWarps;
    const int first = warp * kPasses * 32 + lane;
    T* const dx = static_cast<T*>(p.dx) + first * kVec;
    const uint32_t own = slot_tiles();
    for (uint32_t i = 0, k = 0, parity = 0; i < own; ++i, next_slot(k, parity)) {
      barrier_wait(&s.summed[k], parity);
      const BwdTile& d = s.tiles[k];
      const T* const x = reinterpret_cast<const T*>(slots + k * kTilesSlotBytes) + first * kVec;
      const T* const dy = x + kTileVectors * kVec;
      write<kPasses>(d, wait_terms(d.visit), first, dx + d.base * kVec,
                     [&](int u, Vec<T, kVec>* input, Vec<T, kVec>* gradient) {
                       *input = load_vec<T, kVec>(x + u * 32 * kVec);
                       *gradient = load_vec<T, kVec>(dy + u * 32 * kVec);
                     });
      barrier_arrive(&s.freed[k]);  // of every lane: racecheck orders an arrival with the reads of its own thread only
    }
  }

  __device__ __forceinline__ void hold(int holder, int warp, int lane) const {
    constexpr int kPasses = kTileVectors / 32 / kTeamWarps;
    const int first = warp * kPasses * 32 + lane;
    for (uint32_t i = Walk::place_of_holder(holder);; i += Walk::kPlaces) {
      const Tile t = Walk::tile_at(i);
      if (!exists(t)) return;
      const BwdTile d = describe(t);
      const int64_t at = (d.base + first) * kVec;
      const T* const x = static_cast<const T*>(p.x) + at;
      const T* const dy = static_cast<const T*>(p.dy) + at;
      Vec<T, kVec> inputs[kPasses], gradients[kPasses];
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        const int v = first + 32 * k;
        if (v < d.lo || v >= d.hi) continue;
        const uint4 a = __ldcs(reinterpret_cast<const uint4*>(x + k * 32 * kVec));
        const uint4 b = __ldcs(reinterpret_cast<const uint4*>(dy + k * 32 * kVec));
        inputs[k] = *reinterpret_cast<const Vec<T, kVec>*>(&a);
        gradients[k] = *reinterpret_cast<const Vec<T, kVec>*>(&b);
      }
      const auto read = [&](int k, Vec<T, kVec>* input, Vec<T, kVec>* gradient) {
        *input = inputs[k];
        *gradient = gradients[k];
      };
      if (warp == 0 && lane == 0) s.held_scale[holder] = make_float2(d.scale[0], d.scale[1]);
      sum_up<kPasses>(d, first, s.held_box[holder], warp, lane, read,
                      [&](int k, const Vec<T, kVec>& dz) { gradients[k] = dz; });
      if (lane == 0) barrier_arrive(&s.held[holder]);
      __syncwarp();
      write<kPasses>(d, wait_terms(t.visit), first, static_cast<T*>(p.dx) + at, read);
    }
  }
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    group_norm_tiles_bwd_kernel(const __grid_constant__ GroupNormTilesBwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char slots[];
  __shared__ BwdShared<Traits> shared;
  let_dependents_start();
  const BwdBlock<Traits> block(p, shared, slots);
  const int lane = threadIdx.x % 32;
  int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int k = 0; k < Traits::kSlots; ++k) {
      barrier_init(&shared.loaded[k], 2);
      barrier_init(&shared.summed[k], Traits::kTeamWarps * 32);
      barrier_init(&shared.freed[k], Traits::kWriterWarps * 32 + 2 * Traits::kTeamWarps);
    }
    for (int v = 0; v < kTilesVisits; ++v) {
      barrier_init(&shared.published[v], 1);
      barrier_init(&shared.ready[v], 1);
    }
    barrier_init(&shared.described, 32);
    barrier_init(&shared.cleared, 1);
    for (int h = 0; h < Traits::kHolders; ++h) barrier_init(&shared.held[h], Traits::kTeamWarps);
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < Traits::kServantWarps) {
    if (warp == 0) {
      block.begin(lane, p.x, p.dy);
      block.produce(lane, p.x, p.dy);
    }
    if (warp == 1) {
      block.describe_first(lane, &shared.described);
      barrier_wait(&shared.cleared, 0);
      block.publish(lane);
    }
    if (warp == 2) {
      block.clear_words(p.words, &shared.cleared, lane);
      block.merge(lane);
    }
    if (warp == 3) block.watch(lane);
    return;
  }
  warp -= Traits::kServantWarps;
  constexpr int kSummers = Traits::kTeams * Traits::kTeamWarps;
  if (warp < kSummers) return block.sum_slots(warp / Traits::kTeamWarps, warp % Traits::kTeamWarps, lane);
  warp -= kSummers;
  if (warp < Traits::kWriterWarps) return block.write_slots(warp, lane);
  warp -= Traits::kWriterWarps;
  if constexpr (Traits::kHolders > 0) block.hold(warp / Traits::kTeamWarps, warp % Traits::kTeamWarps, lane);
#endif
}

// dweight and dbias of a channel: its sums over the tiles that have a part of it, sample by sample, in a fixed order.
inline constexpr int kTileGradientThreads = 256;

template <int kVec>
__global__ void __launch_bounds__(kTileGradientThreads)
    group_norm_tiles_gradient_kernel(const __grid_constant__ GroupNormTilesBwdParams p) {
  __shared__ float2 shared[kTileGradientThreads / 32];
  constexpr int kWarps = kTileGradientThreads / 32, kTile = tile_vectors(2);
  wait_for_prerequisites();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t c = blockIdx.x, group_of_sample = c / p.shares.channels_per_group,
                row = c % p.shares.channels_per_group;
  const int64_t begin = row * p.shares.dims.s, end = begin + p.shares.dims.s;  // elements of the group
  const int64_t chunks = (p.shares.dims.s / (kTile * kVec) + 2 + 31) / 32;
  float2 total = make_float2(0.f, 0.f);
  for (int64_t item = warp; item < p.shares.dims.n * chunks; item += kWarps) {
    const int64_t n = item / chunks, group = n * p.shares.dims.g + group_of_sample;
    const int64_t head = (p.shares.x_line + group * p.shares.group_vectors) & 7;
    const int64_t first = (begin / kVec + head) / kTile, last = ((end - 1) / kVec + head) / kTile;
    const int64_t i = first + (item - n * chunks) * 32 + lane;
    if (i > last) continue;
    const int64_t start = i == 0 ? 0 : (i * kTile - head) * kVec;
    const int channel = start < begin ? 1 : 0;  // of the tile's two
    const float2 v = reinterpret_cast<const float2*>(p.tile_sums)[(group * p.shares.tiles_per_group + i) * 2 + channel];
    total.x += v.x;
    total.y += v.y * p.rstd[group];
  }
  __syncwarp();
  total.x = warp_sum(total.x);
  total.y = warp_sum(total.y);
  if (lane == 0) shared[warp] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    total.x += shared[w].x;
    total.y += shared[w].y;
  }
  store_as(p.dbias, c, p.gradient_dtype, total.x);
  store_as(p.dweight, c, p.gradient_dtype, total.y);
}

}  // namespace kgopt
