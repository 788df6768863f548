// How a block of the kernels over tiles (groupnorm/tiles/tiles.h) goes from tile to tile, and how blocks tell each
// other.
#pragma once

#include "common/device/async.cuh"
#include "groupnorm/shared/vectors.cuh"
#include "groupnorm/shared/words.cuh"
#include "groupnorm/tiles/tiles.h"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The base of a kernel's Block, which has `s`, in shared memory, with the barriers and the descriptions of its slots,
// describe_place(t, j, description) and describe_channels(t, description) for what its warps must know of tile t, the
// j-th in the slots, the second with what lies in memory, and start_load(t, description).
template <typename Block, typename Description, int kVec, int kTileVectors, int kSlots, int kHolders>
struct TileWalk {
  static constexpr int kPlaces = kSlots + kHolders;
  static constexpr uint32_t kNeighbours = kHolders > 0 ? 2 : 1;
  static_assert(kHolders * 2 <= kPlaces);  // no two holders' places are neighbours

  const GroupTiles& shares;

  __device__ __forceinline__ const Block& block() const { return static_cast<const Block&>(*this); }

  // Tile i of the block. A group's tiles lie on 128-byte lines, or loads and stores would touch twice as many: position
  // 0 of its first tile is up to `head` vectors before the group.
  struct Tile {
    uint32_t i, number;     // in the block, in the tensor
    uint32_t group, index;  // index in the group
    uint32_t visit;         // groups of the block before it
    uint32_t place, round;  // i = round * kPlaces + place
    uint32_t left;          // of the run, this one among them
  };
  __device__ __forceinline__ Tile first_tile() const {
    const uint32_t number = blockIdx.x * shares.run, group = number / shares.tiles_per_group;
    return {0, number, group, number - group * shares.tiles_per_group, 0, 0, 0, shares.run};
  }
  __device__ __forceinline__ void advance(Tile& t) const {
    ++t.i;
    uint32_t step = 1;
    if (--t.left == 0) {
      t.left = shares.run;
      step += (gridDim.x - 1) * shares.run;
    }
    t.number += step;
    t.index += step;
    if (t.index >= shares.tiles_per_group) {
      const uint32_t groups = t.index / shares.tiles_per_group;
      t.group += groups;
      t.index -= groups * shares.tiles_per_group;
      ++t.visit;
    }
    if (++t.place == kPlaces) {
      t.place = 0;
      ++t.round;
    }
  }
  // The same without the way there.
  __device__ __forceinline__ Tile tile_at(uint32_t i) const {
    Tile t;
    const uint32_t run = i / shares.run, in_run = i - run * shares.run;
    t.i = i;
    t.number = (blockIdx.x + run * gridDim.x) * shares.run + in_run;
    t.group = t.number / shares.tiles_per_group;
    t.index = t.number - t.group * shares.tiles_per_group;
    t.visit = visits_all() ? t.group : run;
    t.round = i / kPlaces;
    t.place = i - t.round * kPlaces;
    t.left = shares.run - in_run;
    return t;
  }
  // Whether every block has tiles of every group; else each of its runs is another group's.
  __device__ __forceinline__ bool visits_all() const { return shares.tiles_per_group >= gridDim.x * shares.run; }
  __device__ __forceinline__ uint32_t own_runs() const {
    return (shares.tiles / shares.run - blockIdx.x + gridDim.x - 1) / gridDim.x;
  }
  // Vectors of a group in a part, which is every grid's run from this one on. Its last tiles may be short or empty.
  __device__ __forceinline__ int part_vectors(int head, uint32_t part) const {
    const int end = head + static_cast<int>(shares.group_vectors), stride = static_cast<int>(shares.run) * kTileVectors;
    int vectors = part == 0 ? -head : 0;
    for (int first = static_cast<int>(part) * stride; first < end; first += static_cast<int>(gridDim.x) * stride) {
      vectors += min(end - first, stride);
    }
    return vectors;
  }
  // Which of the group's parts a block has whose first tile of it this is.
  __device__ __forceinline__ uint32_t part_of(const Tile& t) const {
    return shares.run == 1 ? t.index : t.index / shares.run;
  }
  // Of the tiles that come into slots the j-th.
  __device__ __forceinline__ Tile slot_tile(uint32_t j) const {
    const uint32_t round = j / kSlots, slot = j - round * kSlots;
    uint32_t place = slot;
    while (is_held(place) || place - holders_before(place) != slot) ++place;
    return tile_at(round * kPlaces + place);
  }
  __device__ __forceinline__ bool exists(const Tile& t) const { return t.number < shares.tiles; }
  // Tiles of this block that come into slots, which are taken in turn.
  __device__ __forceinline__ uint32_t slot_tiles() const {
    const uint32_t own = own_runs() * shares.run, rest = own % kPlaces;
    return own / kPlaces * kSlots + rest - holders_before(rest);
  }
  static __device__ __forceinline__ void next_slot(uint32_t& k, uint32_t& parity) {
    if (++k == kSlots) {
      k = 0;
      parity ^= 1;
    }
  }

  // Places go round; the holders' are spread among them.
  static __device__ __forceinline__ uint32_t holders_before(uint32_t place) { return place * kHolders / kPlaces; }
  static __device__ __forceinline__ bool is_held(uint32_t place) {
    return holders_before(place + 1) != holders_before(place);
  }
  static __device__ __forceinline__ uint32_t place_of_holder(uint32_t holder) {
    uint32_t place = 0;
    while (holders_before(place + 1) != holder + 1) ++place;
    return place;
  }
  static __device__ __forceinline__ uint32_t slot_of(const Tile& t) { return t.place - holders_before(t.place); }

  __device__ __forceinline__ int head_of(uint32_t group) const {
    return static_cast<int>(shares.x_line + group * shares.group_vectors) & 7;
  }
  __device__ __forceinline__ int end_of(int head, uint32_t index) const {
    const int64_t left = shares.group_vectors + head - int64_t(index) * kTileVectors;
    return static_cast<int>(left < 0 ? 0 : left < kTileVectors ? left : kTileVectors);
  }
  // Vectors lo <= v < hi of the tile are the group's; vector 0 is vector `base` of the tensor.
  template <typename Place>
  __device__ __forceinline__ void place_tile(const Tile& t, Place* d) const {
    const int head = head_of(t.group);
    d->base = t.group * shares.group_vectors - head + int64_t(t.index) * kTileVectors;
    d->lo = t.index == 0 ? head : 0;
    d->hi = end_of(head, t.index);
    d->visit = t.visit;
    d->is_full = d->lo == 0 && d->hi == kTileVectors;
  }
  // Where a tile's vectors lie in every tensor, in bytes; none where it does not exist.
  struct Span {
    int64_t from;
    uint32_t bytes;
  };
  __device__ __forceinline__ Span span_of(const Tile& t) const {
    const int head = head_of(t.group), lo = t.index == 0 ? head : 0, vectors = end_of(head, t.index) - lo;
    const int64_t from = t.group * shares.group_vectors - head + int64_t(t.index) * kTileVectors + lo;
    return {from * 16, exists(t) && vectors > 0 ? static_cast<uint32_t>(vectors) * 16 : 0};
  }
  // Into L2.
  __device__ __forceinline__ void prefetch(const Span& span, const void* x, const void* dy) const {
    if (span.bytes == 0) return;
    bulk_prefetch(static_cast<const char*>(x) + span.from, span.bytes);
    if (dy) bulk_prefetch(static_cast<const char*>(dy) + span.from, span.bytes);
  }
  // Until the j-th tile in the slots is there.
  __device__ __forceinline__ void wait_landed(uint32_t j) const {
    barrier_wait(&block().s.loaded[j % kSlots], j / kSlots & 1);
  }
  // The producer's warp begins with a tile for every slot; x and, where tiles have a part of it, dy are what it loads.
  // No more than shares.under_way loads are under way at a time: memory has enough to do, and words do not wait behind
  // them. Nor do loads wait for what else is to be known of their tiles, which another warp finds out.
  __device__ __forceinline__ void begin(int lane, const void* x, const void* dy) const {
    static_assert(kSlots <= 32);
    const uint32_t first = min(slot_tiles(), uint32_t(kSlots));
    const Tile t = slot_tile(lane);
    for (uint32_t turn = 0; turn < first; ++turn) {
      if (turn >= shares.under_way) wait_landed(turn - shares.under_way);
      if (lane == turn) {
        Description d;
        place_tile(t, &d);
        block().start_load(t, d);
      }
      __syncwarp();
    }
    if (lane < shares.ahead) prefetch(span_of(tile_at(kPlaces + lane)), x, dy);
    __syncwarp();
  }
  // Their descriptions, by another warp: first what the statistics need, then `complete` what has to come from memory,
  // which takes 3 us behind the loads. described: as many arrivals as a warp has lanes.
  __device__ __forceinline__ void describe_first(int lane, uint64_t* described) const {
    if (lane < kSlots && lane < slot_tiles()) {
      const Tile t = slot_tile(lane);
      const uint32_t k = slot_of(t);
      Description d;
      block().describe_place(t, lane, &d);
      block().s.tiles[k] = d;
      barrier_arrive(&block().s.loaded[k]);
      block().describe_channels(t, &block().s.tiles[k]);
    }
    barrier_arrive(described);
  }
  // The others: every lane prepares a tile; then, tile after tile, its lane starts it, and what a tile's distance later
  // will be loaded comes to L2 meanwhile: a slot is taken for a shorter time. The lanes take turns, so that what one of
  // them computes in its turn holds up the loads: 100 cycles there are 3 to 8% of a large tensor's time.
  __device__ __forceinline__ void produce(int lane, const void* x, const void* dy) const {
    const uint32_t own = slot_tiles();
    for (uint32_t base = kSlots; base < own; base += 32) {
      const uint32_t j = base + lane;
      const bool mine = j < own;
      const Tile t = slot_tile(j);
      Description d;
      Span coming[kNeighbours];  // of this tile and of a holders' before it
#pragma unroll
      for (uint32_t k = 0; k < kNeighbours; ++k) coming[k].bytes = 0;
      if (mine) {
        block().describe_place(t, j, &d);
        block().describe_channels(t, &d);
        const uint32_t before = max(slot_tile(j - 1).i + 1, uint32_t(kPlaces));
#pragma unroll
        for (uint32_t k = 0; k < kNeighbours; ++k) {
          if (shares.ahead > 0 && t.i >= before + k) coming[k] = span_of(tile_at(t.i - k + shares.ahead));
        }
      }
      __syncwarp();
      for (uint32_t turn = base; turn < min(base + 32, own); ++turn) {
        wait_landed(turn - shares.under_way);
        if (j == turn) {
          const uint32_t k = slot_of(t);
          barrier_wait(&block().s.freed[k], (t.round - 1) & 1);
          block().start_load(t, d);
          block().s.tiles[k] = d;
          barrier_arrive(&block().s.loaded[k]);
#pragma unroll
          for (uint32_t k = 0; k < kNeighbours; ++k) prefetch(coming[k], x, dy);
        }
        __syncwarp();
      }
    }
  }
  // Channel of vector lo's first element, counted in the group, and that element's place in the channel.
  __device__ __forceinline__ uint32_t channel_of(const Tile& t, uint32_t* column) const {
    const int64_t begin = t.index == 0 ? 0 : (int64_t(t.index) * kTileVectors - head_of(t.group)) * kVec;
    const int64_t row = __umul64hi(begin, shares.s_magic64);
    *column = static_cast<uint32_t>(begin - row * shares.dims.s);
    return static_cast<uint32_t>(row);
  }
  // The group's first channel.
  __device__ __forceinline__ uint32_t channels_before(const Tile& t) const {
    return t.group % static_cast<uint32_t>(shares.dims.g) * shares.channels_per_group;
  }

  // A warp clears the block's share of the words, counts the block, and waits for all others: then words may be told,
  // and after its first one the block may look for others. A group's first words are told 4 us later, so that this
  // costs nothing.
  __device__ __forceinline__ void clear_words(uint64_t* words, uint64_t* cleared, int lane) const {
    if (shares.clears) {
      const uint32_t count = static_cast<uint32_t>(shares.dims.n * shares.dims.g) * (shares.parts + 1);
      uint64_t seen[kClearedWords];
      kgopt::clear_words(words, count, lane, 32, seen);
      await_cleared(words, lane, 32, seen);
      __syncwarp();
      if (lane == 0) await_all_cleared(count_cleared());
      __syncwarp();
    }
    if (lane == 0) barrier_arrive(cleared);
  }

  // Words lane + 32 * k of a group.
  template <int kSets>
  __device__ __forceinline__ void wait_words(const uint64_t* words, int lane, uint64_t (&word)[kSets]) const {
    bool is_missing;
    do {
      is_missing = false;
#pragma unroll
      for (int k = 0; k < kSets; ++k) {
        const uint32_t part = lane + 32 * k;
        if (part < shares.parts && word[k] == 0) word[k] = load_relaxed(words + part);
      }
#pragma unroll
      for (int k = 0; k < kSets; ++k) is_missing |= lane + 32 * k < shares.parts && word[k] == 0;
    } while (__any_sync(0xffffffffu, is_missing));
  }
  // The merger's warp: merge(t, words) for a share of the groups. Every block would keep the words' lines busy, and
  // take one group after the other, 2 us each.
  template <typename Merge>
  __device__ __forceinline__ void merge_words(uint64_t* words, uint64_t* published, Merge merge) const {
    each_visit([&](const Tile& t) {
      if (part_of(t) != t.group * shares.merger_step % shares.parts) return;
      wait_published(published, t);
      merge(t, words + int64_t(t.group) * shares.parts);
    });
  }
  // A collector's warp: merge(t, words) for every second group of the block.
  template <typename Merge>
  __device__ __forceinline__ void collect_words(uint64_t* words, uint64_t* published, uint32_t collector,
                                                Merge merge) const {
    each_visit([&](const Tile& t) {
      if (t.visit % 2 != collector) return;
      wait_published(published, t);
      merge(t, words + int64_t(t.group) * shares.parts);
    });
  }
  // f(t) for the block's first tile of each group.
  template <typename F>
  __device__ __forceinline__ void each_visit(F f) const {
    uint32_t next_visit = 0;
    for (Tile t = first_tile(); exists(t); advance(t)) {
      if (t.visit != next_visit) continue;
      ++next_visit;
      f(t);
    }
  }
  // Polls before that would only keep the words' lines busy for the others.
  __device__ __forceinline__ void wait_published(uint64_t* published, const Tile& t) const {
    barrier_wait(&published[t.visit % kTilesVisits], t.visit / kTilesVisits & 1);
  }
  __device__ __forceinline__ uint64_t* results(uint64_t* words) const {
    return words + shares.dims.n * shares.dims.g * shares.parts;
  }
  // The watcher's warp: each lane waits for the result of another of the block's groups. take(visit, result) follows.
  template <typename Take>
  __device__ __forceinline__ void watch(uint64_t* words, uint64_t* published, int lane, Take take) const {
    barrier_wait(&published[0], 0);
    const bool all = visits_all();
    const uint32_t visits = all ? shares.tiles / shares.tiles_per_group : own_runs();
    const uint64_t* const from = results(words);
    uint32_t visit = lane, first = 0;  // the first that has no result yet
    while (first < visits) {
      if (visit < min(visits, first + kPlaces)) {
        const uint32_t number = (blockIdx.x + visit * gridDim.x) * shares.run;
        const uint32_t group = all ? visit : number / shares.tiles_per_group;
        const uint64_t word = load_relaxed(from + group);
        if (word != 0) {
          take(visit, word);
          visit += 32;
        }
      }
      first = __reduce_min_sync(0xffffffffu, visit);
    }
  }
};

#endif

}  // namespace kgopt
