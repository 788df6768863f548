// GroupNorm forward with one read of x; see groupnorm/tiles/tiles.h. The warps of a block have roles, and none waits
// for more than it needs:
//   producer    a warp that starts the loads into slots of shared memory that have become free
//   statistics  moments of the tiles in the slots
//   publisher   makes the block's moments of a group the block's word
//   merger      merges the words of all blocks, for a share of the groups, into one more word; clears them before
//   watcher     waits for such words, of all groups of which the block has tiles
//   collectors  instead of both where the plan says so: merge the words in every block for itself, one trip through L2
//   normalizers write y from the slots
//   holders     teams that keep a tile in their registers from load to store: room beyond the shared memory
#pragma once

#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/tiles/fwd_params.h"
#include "groupnorm/tiles/tiles.cuh"

namespace kgopt {

template <typename T_, Chain kPre_, Chain kAct_, int kHolders_, bool kCollects_>
struct GroupNormTilesFwdTraits {
  using T = T_;
  static constexpr Chain kPre = kPre_, kAct = kAct_;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kSlots = kTilesSlots, kHolders = kHolders_;
  static constexpr int kTileVectors = tile_vectors(1), kTileBytes = kTilesSlotBytes;
  static constexpr int kServantWarps = 4;
  static constexpr bool kCollects = kCollects_;
  static constexpr bool kExtends = kMayExtend<kAct> && kHolders == 0;  // holders have no registers for a residual
  // The residual is asked for ahead of the statistics, but where walking the chain takes longer than loading: values of
  // half types are twice as many, and the registers are wanted there.
  static constexpr bool kLoadsAhead = kExtends && (kAct != Chain::kAny || sizeof(T) == 4);
  static constexpr bool kScales = kHolders == 0;  // with holders, the short way for SiLU was not measured
  // Normalizing takes longer than the statistics, most of all with slow activations. Holders leave room for fewer
  // warps: 896 threads have 72 registers each.
  static constexpr bool kWalks = kAct == Chain::kAny;
  static constexpr int kStatWarps = 4, kNormWarps = kHolders == 0 ? 16 : 8, kHolderWarps = 4;
  static constexpr int kSet = kWalks && sizeof(T) == 2 ? 2 : 1;  // vectors that walk a chain together
  static constexpr int kThreads = 32 * (kServantWarps + kStatWarps + kNormWarps + kHolders * kHolderWarps);
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the warps must know of a tile in a slot; the producer works it out once for all. Vectors lo <= v < hi of the
// tile are the group's.
struct __align__(16) FwdTile {
  int64_t base;  // vector 0, from the tensor's start
  int lo, hi;
  uint32_t visit;     // groups of the block before it
  uint32_t is_last;   // of the group in this block's slots
  uint32_t channel0;  // of vector lo
  uint32_t column0;
  float weight, bias;  // of channel0
  float slope;         // of its PReLU
  bool is_full;        // no vector is another group's
  bool is_one;         // all of channel0
};

template <typename Traits>
struct FwdShared {
  uint64_t loaded[Traits::kSlots], freed[Traits::kSlots];
  FwdTile tiles[Traits::kSlots];
  uint64_t published[kTilesVisits], ready[kTilesVisits];
  uint64_t described, cleared;  // the first tiles; the words, by all blocks
  float2 statistics[kTilesVisits];
  uint64_t box_full[2], box_empty[2];
  uint64_t held[Traits::kHolders + 1];  // moments of a holders' tile are there
  Moments<float> box[2][Traits::kStatWarps];
  Moments<float> held_box[Traits::kHolders + 1][Traits::kHolderWarps];
};

template <typename Traits>
struct FwdBlock
    : TileWalk<FwdBlock<Traits>, FwdTile, Traits::kVec, Traits::kTileVectors, Traits::kSlots, Traits::kHolders> {
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kSlots = Traits::kSlots;
  static constexpr int kHolders = Traits::kHolders, kTileVectors = Traits::kTileVectors, kSet = Traits::kSet;

  using Walk = TileWalk<FwdBlock, FwdTile, kVec, kTileVectors, kSlots, kHolders>;
  using Tile = typename Walk::Tile;
  using Walk::advance, Walk::channel_of, Walk::channels_before, Walk::end_of, Walk::exists, Walk::first_tile,
      Walk::head_of, Walk::holders_before, Walk::is_held, Walk::next_slot, Walk::place_tile, Walk::slot_of,
      Walk::slot_tile, Walk::slot_tiles, Walk::wait_words;

  const GroupNormTilesFwdParams& p;
  FwdShared<Traits>& s;
  char* const slots;

  __device__ __forceinline__ FwdBlock(const GroupNormTilesFwdParams& params, FwdShared<Traits>& shared, char* memory)
      : Walk{params.shares}, p(params), s(shared), slots(memory) {}

  __device__ __forceinline__ char* slot(const Tile& t) const { return slots + slot_of(t) * Traits::kTileBytes; }
  __device__ __forceinline__ void describe_place(const Tile& t, FwdTile* d) const {
    place_tile(t, d);
    d->channel0 = channel_of(t, &d->column0) + channels_before(t);
    d->is_one = d->column0 + uint32_t(max(d->hi - d->lo, 0)) * kVec <= static_cast<uint32_t>(p.shares.dims.s);
  }
  // Of tile t, the j-th in the slots, everything but its load, which others need to know.
  __device__ __forceinline__ void describe_place(const Tile& t, uint32_t j, FwdTile* d) const {
    describe_place(t, d);
    const Tile next = slot_tile(j + 1);
    d->is_last = next.visit != t.visit || !exists(next);
  }
  __device__ __forceinline__ void describe_channels(const Tile&, FwdTile* d) const {
    const float2 coefficients = affine(d->channel0);
    d->weight = coefficients.x;
    d->bias = coefficients.y;
    if constexpr (Traits::kExtends) {
      if (p.slopes.data) d->slope = slope_at<T>(p.slopes, p.slopes.by_channel() ? d->channel0 : 0);
    }
  }
  __device__ __forceinline__ void start_load(const Tile& t, const FwdTile& d) const {
    const uint32_t k = slot_of(t);
    const int vectors = d.hi - d.lo;
    if (vectors > 0) {
      // evict_first and streaming stores were 2% slower
      barrier_expect_bytes(&s.loaded[k], vectors * 16);
      bulk_load(slot(t) + d.lo * 16, static_cast<const T*>(p.x) + (d.base + d.lo) * kVec, vectors * 16, &s.loaded[k],
                evict_normal_policy());
    } else {  // the other groups' heads need this tile
      barrier_arrive(&s.loaded[k]);
    }
  }

  // --- Statistics.

  // Adds vectors first + 32 * k, k < kPasses, that read(k) gives.
  template <int kPasses, typename Read>
  __device__ __forceinline__ void add_vectors(ThreadMoments<kVec>& m, const FwdTile& d, int first, Read read) const {
    if (!d.is_full) {
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        const int v = first + 32 * k;
        if (v >= d.lo && v < d.hi) add_vector(m, read(k));
      }
      return;
    }
    start_moments(m, read(0));
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      float x[kVec];
      values_of<Traits::kPre>(read(k), p.pre_act, x);
      m.add(x);
    }
    m.count += kPasses * kVec;
  }
  __device__ __forceinline__ void start_moments(ThreadMoments<kVec>& m, const Vec<T, kVec>& from) const {
    if (m.count != 0) return;
    float x[kVec];
    values_of<Traits::kPre>(from, p.pre_act, x);
    m.shift = sum_of(x) * (1.f / kVec);
  }
  __device__ __forceinline__ void add_vector(ThreadMoments<kVec>& m, const Vec<T, kVec>& from) const {
    start_moments(m, from);
    float x[kVec];
    values_of<Traits::kPre>(from, p.pre_act, x);
    m.add(x);
    m.count += kVec;
  }
  __device__ __forceinline__ Moments<float> warp_moments(const ThreadMoments<kVec>& m) const {
    const int counted = __reduce_add_sync(0xffffffffu, m.count);
    const Moments<float> own[1] = {m.moments()};
    return counted == 0 ? Moments<float>{} : warp_pool(own, static_cast<float>(counted));
  }
  __device__ __forceinline__ void compute_statistics(int warp, int lane) const {
    constexpr int kPasses = kTileVectors / 32 / Traits::kStatWarps;
    const int first = warp * kPasses * 32 + lane;
    const T* const from = reinterpret_cast<const T*>(slots) + first * kVec;
    ThreadMoments<kVec> mine;
    uint32_t boxes = 0;
    const uint32_t own = slot_tiles();
    for (uint32_t i = 0, k = 0, parity = 0; i < own; ++i) {
      barrier_wait(&s.loaded[k], parity);
      const FwdTile& d = s.tiles[k];
      const T* const data = from + k * (kTileVectors * kVec);
      add_vectors<kPasses>(mine, d, first, [&](int u) { return load_vec<T, kVec>(data + u * 32 * kVec); });
      const bool is_last = d.is_last;
      next_slot(k, parity);
      if (!is_last) continue;
      const Moments<float> m = warp_moments(mine);
      const uint32_t b = boxes & 1;
      if (lane == 0) {
        barrier_wait(&s.box_empty[b], (boxes / 2 & 1) ^ 1);
        s.box[b][warp] = m;
        barrier_arrive(&s.box_full[b]);
      }
      __syncwarp();
      ++boxes;
      mine = {};
    }
  }

  __device__ __forceinline__ void publish(int lane) const {
    uint32_t boxes = 0;
    for (Tile t = first_tile(); exists(t);) {
      const Tile start = t;
      Moments<float> m;
      bool in_slots = false;
      for (; exists(t) && t.visit == start.visit; advance(t)) {
        if (!is_held(t.place)) {
          in_slots = true;
          continue;
        }
        const uint32_t h = holders_before(t.place);
        barrier_wait(&s.held[h], t.round & 1);
        const int at = lane - Traits::kStatWarps - static_cast<int>(h) * Traits::kHolderWarps;
        if (at >= 0 && at < Traits::kHolderWarps) m = s.held_box[h][at];
      }
      if (in_slots) {
        const uint32_t b = boxes & 1;
        barrier_wait(&s.box_full[b], boxes / 2 & 1);
        if (lane < Traits::kStatWarps) {
          m = s.box[b][lane];
          barrier_arrive(&s.box_empty[b]);  // each reader for itself: one lane's arrival orders its own reads only
        }
        ++boxes;
      }
      const float count = warp_sum(m.count);
      const Moments<float> sets[1] = {m};
      m = count == 0.f ? Moments<float>{} : warp_pool(sets, count);
      if (lane != 0) continue;
      if (p.shares.parts == 1) {  // nobody else has tiles of the group
        const float2 statistics = statistics_of(m);
        make_ready(start.visit, statistics);
        keep(start.group, statistics);
      } else {
        store_relaxed(p.words + int64_t(start.group) * p.shares.parts + Walk::part_of(start), pack_word(m.mean, m.m2));
        barrier_arrive(&s.published[start.visit % kTilesVisits]);
      }
    }
  }

  // Of the words of tile t's group; the same in all lanes.
  __device__ __forceinline__ float2 merge_group(const Tile& t, const uint64_t* words, int lane) const {
    constexpr int kSets = kTilesMaxBlocks / 32;
    // All that does not need the words comes before them.
    const int head = head_of(t.group);
    Moments<float> sets[kSets];
#pragma unroll
    for (int k = 0; k < kSets; ++k) {
      const uint32_t part = lane + 32 * k;
      if (part < p.shares.parts) sets[k].count = static_cast<float>(Walk::part_vectors(head, part) * kVec);
    }
    uint64_t word[kSets] = {};
    wait_words(words, lane, word);
#pragma unroll
    for (int k = 0; k < kSets; ++k) {
      if (lane + 32 * k >= p.shares.parts) break;
      const float2 v = unpack_word(word[k]);
      sets[k].mean = v.x;
      sets[k].m2 = v.y;
    }
    return statistics_of(warp_pool(sets, static_cast<float>(p.shares.group_vectors * kVec)));
  }
  __device__ __forceinline__ float2 statistics_of(const Moments<float>& m) const {
    return make_float2(m.mean, reciprocal_root(quotient(m.m2, m.count) + p.eps));
  }
  __device__ __forceinline__ void keep(int64_t group, float2 statistics) const {
    p.mean[group] = statistics.x;
    p.rstd[group] = statistics.y;
  }
  __device__ __forceinline__ void make_ready(uint32_t visit, float2 statistics) const {
    s.statistics[visit % kTilesVisits] = statistics;
    barrier_arrive(&s.ready[visit % kTilesVisits]);
  }
  __device__ __forceinline__ void merge(int lane) const {
    Walk::merge_words(p.words, s.published, [&](const Tile& t, const uint64_t* words) {
      const float2 statistics = merge_group(t, words, lane);
      if (lane == 0) {
        store_relaxed(Walk::results(p.words) + t.group, pack_word(statistics.x, statistics.y));
        keep(t.group, statistics);
      }
    });
  }
  __device__ __forceinline__ void watch(int lane) const {
    Walk::watch(p.words, s.published, lane,
                [&](uint32_t visit, uint64_t word) { make_ready(visit, unpack_word(word)); });
  }
  __device__ __forceinline__ void collect(int collector, int lane) const {
    Walk::collect_words(p.words, s.published, collector, [&](const Tile& t, const uint64_t* words) {
      const float2 statistics = merge_group(t, words, lane);
      if (lane == 0) make_ready(t.visit, statistics);
      if (lane == 0 && t.index == 0) keep(t.group, statistics);
      __syncwarp();
    });
  }

  // --- Normalization.

  __device__ __forceinline__ float2 affine(int64_t c) const {
    return affine_of<T>(p.weight, p.bias, c, p.affine_dtype);
  }

  // Times what the activation takes.
  static constexpr float kScale = Traits::kScales ? kFinishScale<Traits::kAct, T> : 1.f;
  __device__ __forceinline__ float2 scaled_affine(int64_t c) const {
    const float2 v = affine(c);
    return make_float2(v.x * kScale, v.y * kScale);
  }

  __device__ __forceinline__ float2 wait_statistics(uint32_t visit) const {
    barrier_wait(&s.ready[visit % kTilesVisits], visit / kTilesVisits & 1);
    return s.statistics[visit % kTilesVisits];
  }

  // What the residual has for them, as far as it is loaded ahead.
  template <int kPasses>
  struct Residuals {
    Vec<T, kVec> values[Traits::kLoadsAhead ? kPasses : 1];
  };
  template <int kPasses>
  __device__ __forceinline__ Residuals<kPasses> residuals_of(const FwdTile& d, int first, const T* to) const {
    Residuals<kPasses> r{};
    if constexpr (Traits::kLoadsAhead) {
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        const int v = first + k * 32;
        if (v >= d.lo && v < d.hi) r.values[k] = residual_of<Traits::kAct>(p, to + k * 32 * kVec);
      }
    }
    return r;
  }
  template <int kPasses>
  __device__ __forceinline__ Vec<T, kVec> residual_at(const Residuals<kPasses>& residuals, int k, const T* to) const {
    if constexpr (Traits::kLoadsAhead) return residuals.values[k];
    return residual_of<Traits::kAct>(p, to);
  }
  // Residual and PReLU of a vector of channel0 alone.
  __device__ __forceinline__ void extend_one(const FwdTile& d, const Vec<T, kVec>& residual, float (&x)[kVec]) const {
    add_residual<Traits::kAct>(p, residual, x);
    if (!p.slopes.data) return;
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] = prelu(x[j], d.slope);
  }

  // Vectors first + 32 * k, k < kPasses, that read(k) gives, to `to` + 32 * k vectors.
  template <int kPasses, typename Read>
  __device__ __forceinline__ void normalize(const FwdTile& d, float2 statistics, int first, T* to,
                                            const Residuals<kPasses>& residuals, Read read) const {
    const float mean = statistics.x, rstd = statistics.y;
    if (d.is_one && d.is_full) {
      const float scale = d.weight * rstd * kScale, shift = d.bias * kScale;
#pragma unroll
      for (int k = 0; k < kPasses; k += kSet) {
        Vec<T, kVec> input[kSet];
        float x[kSet][kVec];
#pragma unroll
        for (int i = 0; i < kSet; ++i) {
          input[i] = read(k + i);
          values_of<Traits::kPre>(input[i], p.pre_act, x[i]);
          scale_shift(x[i], mean, scale, shift);
          if constexpr (Traits::kExtends) {
            if (p.is_extended) extend_one(d, residual_at(residuals, k + i, to + (k + i) * 32 * kVec), x[i]);
          }
        }
        walk(x);
#pragma unroll
        for (int i = 0; i < kSet; ++i) store(to + (k + i) * 32 * kVec, input[i], x[i]);
      }
      return;
    }
    const uint32_t length = static_cast<uint32_t>(p.shares.dims.s);
    const int lo = d.lo, hi = d.hi;
    // Row, weight and bias of each vector's first element; loads of all vectors before the first use.
    uint32_t row_of[kPasses], column_of[kPasses];
    float2 coefficients[kPasses];
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      const int v = first + k * 32;
      const uint32_t position = d.column0 + uint32_t(v >= lo && v < hi ? v - lo : 0) * kVec;
      row_of[k] = __umulhi(position, p.shares.s_magic) >> p.shares.s_shift;
      column_of[k] = position - row_of[k] * length;
      coefficients[k] = scaled_affine(d.channel0 + row_of[k]);
    }
    const auto is_group = [&](int k) { return first + k * 32 >= lo && first + k * 32 < hi; };
#pragma unroll
    for (int k = 0; k < kPasses; k += kSet) {
      if (kSet == 1 && !is_group(k)) continue;
      Vec<T, kVec> input[kSet];
      float x[kSet][kVec];
#pragma unroll
      for (int i = 0; i < kSet; ++i) {
        const int u = k + i;
        if (!is_group(u)) continue;  // then nobody looks at x
        input[i] = read(u);
        values_of<Traits::kPre>(input[i], p.pre_act, x[i]);
        if (column_of[u] + kVec <= length) {
          scale_shift(x[i], mean, coefficients[u].x * rstd, coefficients[u].y);
        } else {
          scale_shift_two(x[i], mean, rstd, column_of[u], length, d.channel0 + row_of[u],
                          [&](int64_t channel) { return scaled_affine(channel); });
        }
        if constexpr (Traits::kExtends) {
          T* const at = to + u * 32 * kVec;
          if (p.is_extended) extend<Traits::kAct>(p, at, residual_at(residuals, u, at), x[i]);
        }
      }
      if constexpr (kSet > 1) __syncwarp();  // all lanes are here
      walk(x);
#pragma unroll
      for (int i = 0; i < kSet; ++i) {
        if (is_group(k + i)) store(to + (k + i) * 32 * kVec, input[i], x[i]);
      }
    }
  }
  // Activations of the set, and what follows them.
  __device__ __forceinline__ void walk(float (&x)[kSet][kVec]) const {
    if constexpr (kSet == 1 && Traits::kScales) {
      finish_chain<Traits::kAct, T, true>(floored(p.act), x[0]);
    } else if constexpr (kSet == 1) {
      apply_chain<Traits::kAct, kIsCoarse<T>>(floored(p.act), x[0]);
    } else {
      float all[kSet * kVec];
#pragma unroll
      for (int j = 0; j < kSet * kVec; ++j) all[j] = x[j / kVec][j % kVec];
      apply_chain<Traits::kAct, kIsCoarse<T>>(floored(p.act), all);
#pragma unroll
      for (int j = 0; j < kSet * kVec; ++j) x[j / kVec][j % kVec] = all[j];
    }
  }
  __device__ __forceinline__ void store(T* to, const Vec<T, kVec>& input, float (&x)[kVec]) const {
    finish_values<Chain::kNone>(p, to, input, false, x);
  }

  __device__ __forceinline__ void normalize_slots(int warp, int lane) const {
    constexpr int kPasses = kTileVectors / 32 / Traits::kNormWarps;
    const int first = warp * kPasses * 32 + lane;
    const T* const from = reinterpret_cast<const T*>(slots) + first * kVec;
    T* const y = static_cast<T*>(p.y) + first * kVec;
    const uint32_t own = slot_tiles();
    barrier_wait(&s.described, 0);
    for (uint32_t i = 0, k = 0, parity = 0; i < own; ++i, next_slot(k, parity)) {
      barrier_wait(&s.loaded[k], parity);
      const FwdTile& d = s.tiles[k];
      const T* const data = from + k * (kTileVectors * kVec);
      T* const to = y + d.base * kVec;
      const auto residuals = residuals_of<kPasses>(d, first, to);
      normalize<kPasses>(d, wait_statistics(d.visit), first, to, residuals,
                         [&](int u) { return load_vec<T, kVec>(data + u * 32 * kVec); });
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.freed[k]);
    }
  }

  __device__ __forceinline__ void hold(int holder, int warp, int lane) const {
    constexpr int kPasses = kTileVectors / 32 / Traits::kHolderWarps, kPiece = 2;
    const int first = warp * kPasses * 32 + lane;
    for (uint32_t i = Walk::place_of_holder(holder);; i += Walk::kPlaces) {
      const Tile t = Walk::tile_at(i);
      if (!exists(t)) return;
      FwdTile d;
      describe_place(t, &d);
      describe_channels(t, &d);
      const T* const x = static_cast<const T*>(p.x) + d.base * kVec;
      Vec<T, kVec> data[kPasses];
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        const int v = first + 32 * k;
        if (v >= d.lo && v < d.hi) {
          const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(x + v * kVec));
          data[k] = *reinterpret_cast<const Vec<T, kVec>*>(&bits);
        }
      }
      ThreadMoments<kVec> mine;
      add_vectors<kPasses>(mine, d, first, [&](int k) { return data[k]; });
      const Moments<float> m = warp_moments(mine);
      if (lane == 0) {
        s.held_box[holder][warp] = m;
        barrier_arrive(&s.held[holder]);
      }
      __syncwarp();
      const float2 statistics = wait_statistics(t.visit);
      T* const y = static_cast<T*>(p.y) + (d.base + first) * kVec;
      // In pieces, or the registers do not suffice.
#pragma unroll
      for (int done = 0; done < kPasses; done += kPiece) {
        normalize<kPiece>(d, statistics, first + done * 32, y + done * 32 * kVec, {},
                          [&](int k) { return data[done + k]; });
      }
    }
  }
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    group_norm_tiles_fwd_kernel(const __grid_constant__ GroupNormTilesFwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char slots[];
  __shared__ FwdShared<Traits> shared;
  const FwdBlock<Traits> block{p, shared, slots};
  const int lane = threadIdx.x % 32;
  int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int k = 0; k < Traits::kSlots; ++k) {
      barrier_init(&shared.loaded[k], 2);
      barrier_init(&shared.freed[k], Traits::kNormWarps);
    }
    for (int v = 0; v < kTilesVisits; ++v) {
      barrier_init(&shared.published[v], 1);
      barrier_init(&shared.ready[v], 1);
    }
    barrier_init(&shared.described, 32);
    barrier_init(&shared.cleared, 1);
    for (int b = 0; b < 2; ++b) {
      barrier_init(&shared.box_full[b], Traits::kStatWarps);
      barrier_init(&shared.box_empty[b], Traits::kStatWarps);
    }
    for (int h = 0; h < Traits::kHolders; ++h) barrier_init(&shared.held[h], Traits::kHolderWarps);
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < Traits::kServantWarps) {
    if (warp == 0) {
      block.begin(lane, p.x, nullptr);
      block.produce(lane, p.x, nullptr);
    }
    if (warp == 1) {
      block.describe_first(lane, &shared.described);
      if (p.shares.parts > 1) barrier_wait(&shared.cleared, 0);
      block.publish(lane);
    }
    if (p.shares.parts == 1) return;
    if (warp == 2) block.clear_words(p.words, &shared.cleared, lane);
    if constexpr (Traits::kCollects) {
      if (warp >= 2) block.collect(warp - 2, lane);
    } else {
      if (warp == 2) block.merge(lane);
      if (warp == 3) block.watch(lane);
    }
    return;
  }
  warp -= Traits::kServantWarps;
  if (warp < Traits::kStatWarps) return block.compute_statistics(warp, lane);
  warp -= Traits::kStatWarps;
  if (warp < Traits::kNormWarps) return block.normalize_slots(warp, lane);
  warp -= Traits::kNormWarps;
  if constexpr (Traits::kHolders > 0) block.hold(warp / Traits::kHolderWarps, warp % Traits::kHolderWarps, lane);
#endif
}

}  // namespace kgopt
