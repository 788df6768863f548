// GroupNorm of channels_last tensors by blocks whose warps have roles (groupnorm/rows/params.h), so that a sample is
// loaded while the ones before are summed up and stored:
//   two producers  start the loads of chunks into slots that have become free: those that come for the first time, and
//                  those that come again
//   summers        two sums of what a thread sees of each of its channels
//   publishers     add the threads' sums up, and make the block's word of a group of them
//   collectors     wait for the words of the team's blocks and merge them, in every block for itself
//   writers        write y or dx from the slots
#pragma once

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/rows/params.h"
#include "groupnorm/shared/vectors.cuh"
#include "groupnorm/shared/words.cuh"

namespace kgopt {

inline constexpr int kRowPublishThreads = 32 * kRowPublishers, kRowCollectThreads = 32 * kRowCollectors;

// Registers of a thread: those that a block starts with, dealt out again by warpgroups.
struct RowRegisters {
  int servers, publishers, summers, writers;  // servers: producers and collectors
};
inline constexpr RowRegisters kRowFwdRegisters = {80, 40, 88, 136}, kRowBwdRegisters = {80, 40, 72, 144};
inline constexpr RowRegisters kRowManyWordsRegisters = {96, 40, 72, 136};
inline constexpr RowRegisters kRowActBwdRegisters = {80, 40, 80, 136};  // 16 bits, with an activation

template <typename T_, Chain kPre_, Chain kAct_, int kTensors_, bool kHolds_>
struct RowTraits {
  using T = T_;
  static constexpr bool kHolds = kHolds_;  // writers have chunks in registers
  static constexpr int kTensors = kTensors_;
  static constexpr int kSummers = kHolds ? kRowFewSummers : kRowSummers;
  static constexpr int kThreads = 32 * kRowProducers + kRowCollectThreads + kRowPublishThreads + kSummers + kRowWriters;
  // Vectors of a chunk that a writer has of a tensor, and a summer.
  static constexpr int kPasses = kRowPasses / kTensors, kSumPasses = kPasses * (kRowWriters / kSummers);
  static constexpr Chain kPre = kPre_, kAct = kAct_;
  static constexpr int kVec = kVecSize<T>;
  // Values of 16 bits lose nothing where the mean is part of the shift: their own rounding is coarser.
  static constexpr bool kFolds = sizeof(T) == 2 && (kPre == Chain::kNone || kPre == Chain::kRelu);
  // Whether the backward's summers leave dz in place of dy, where computing it twice costs more.
  static constexpr bool kStoresDz = kTensors == 2 && (kAct == Chain::kSilu || kAct == Chain::kAny);
  static constexpr bool kActs16 = kTensors == 2 && sizeof(T) == 2 && kAct != Chain::kNone;
  static constexpr int kHeld = !kHolds ? 0 : row_held(kTensors, sizeof(T)) - (kActs16 ? 2 : 0);
  // Whether summers and writers may take over each other's work.
  static constexpr bool kShares = kTensors == 2 && !kHolds;
  static constexpr int kWords = row_words(kTensors, sizeof(T), kHolds);  // that a collecting lane asks for at once
  static constexpr RowRegisters kRegisters = kWords > kTeamWords ? kRowManyWordsRegisters
                                             : kTensors == 1     ? kRowFwdRegisters
                                             : kActs16           ? kRowActBwdRegisters
                                                                 : kRowBwdRegisters;
};

// Those of kRowAhead take turns from sample to sample. The slots of chunks that come again follow those of the others.
struct RowBarriers {
  uint64_t loaded[kRowSlots], freed[kRowSlots];
  uint64_t summed, drained;                     // entries are there, and have been read
  uint64_t published[kRowAhead];                // the block's words of a sample are under way
  uint64_t told[kRowAhead];                     // so have all of the team's blocks
  uint64_t ready[kRowAhead], taken[kRowAhead];  // statistics are there, and have been read
  uint32_t samples_told;                        // whose words the block has told
  uint32_t chunks_again;                        // that came again
};

// Shared memory after the slots.
struct RowTables {
  float2* entries;  // [elements of a vector][summers]
  float2* sums;     // [elements of a row], the block's of a sample
  float2* affines;  // [channels] weight, bias
  float2* stats;    // [kRowAhead][groups] mean and rstd; in the backward what is taken off
  union {
    float* pivots;   // [channels], of the forward: what its sums are relative to
    float2* totals;  // [elements of a row], of the backward: the block's sums of all samples
  };
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Goes round the slots; parity is that of the round.
struct RowSlot {
  uint32_t k = 0, parity = 0;
  __device__ __forceinline__ void next(uint32_t slots) {
    if (++k == slots) {
      k = 0;
      parity ^= 1;
    }
  }
};

template <typename Traits_, typename Params>
struct RowBlock {
  using Traits = Traits_;
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = Traits::kPasses, kTensors = Traits::kTensors;
  static constexpr int kHeld = Traits::kHeld, kHeldSize = kHeld > 0 ? kHeld : 1;

  const Params& p;
  const RowShares& d;
  char* const slots;
  const RowTables tables;
  RowBarriers& s;
  const uint32_t team, rank;
  const uint32_t tid, lane = threadIdx.x % 32;  // of the role
  const uint32_t rows;                          // that the role's threads have at a time
  uint32_t samples, own;                        // of the team, rows of the block's share
  uint32_t walker, column;
  uint32_t full_chunks, of_full, of_rest;  // of the share; vectors of this thread in these, and in the one after them
  bool active;

  __device__ __forceinline__ RowBlock(const Params& params, char* memory, const RowTables& t, RowBarriers& barriers,
                                      uint32_t thread, bool writes)
      : p(params),
        d(params.shares),
        slots(memory),
        tables(t),
        s(barriers),
        team(d.by_blocks(blockIdx.x)),
        rank(blockIdx.x - team * d.blocks),
        tid(thread),
        rows(d.walkers * (writes ? Traits::kSumPasses / kPasses : 1)) {
    samples = (d.samples - team + d.teams - 1) / d.teams;
    const uint32_t first = min(rank * d.share, d.rows);
    own = min(d.share, d.rows - first);
    walker = d.by_vectors(tid);
    column = tid - walker * d.vectors;
    active = walker < rows;
    const auto vectors_of = [&](uint32_t chunk) {
      if (!active || walker >= chunk) return 0u;
      return d.by_walkers(chunk - walker - 1) / (writes ? Traits::kSumPasses / kPasses : 1) + 1;
    };
    full_chunks = d.by_chunk_rows(own);
    of_full = vectors_of(d.chunk_rows);
    of_rest = vectors_of(own - full_chunks * d.chunk_rows);
  }

  __device__ __forceinline__ uint32_t sample(uint32_t u) const { return team + u * d.teams; }
  __device__ __forceinline__ int64_t group0(uint32_t u) const { return int64_t(sample(u)) * d.groups; }
  // The share's first element.
  __device__ __forceinline__ int64_t base(uint32_t u) const {
    return (int64_t(sample(u)) * d.rows + rank * d.share) * (d.vectors * kVec);
  }
  __device__ __forceinline__ uint32_t channel_of(int j) const {
    const uint32_t element = column * kVec + j;
    if (!active) return 0;
    return d.turns == 1 ? element : element - d.by_channels(element) * d.channels;
  }
  __device__ __forceinline__ uint32_t group_of(int j) const { return d.by_channels_per_group(channel_of(j)); }

  __device__ __forceinline__ RowSlot slot_at(uint32_t use) const {
    const uint32_t round = d.by_slots(use);
    return {use - round * d.slots, round & 1};
  }

  // Which of kRowAhead barriers is sample u's, and the parity of its phase.
  static __device__ __forceinline__ uint32_t turn_of(uint32_t u) { return u % kRowAhead; }
  static __device__ __forceinline__ uint32_t parity_of(uint32_t u) { return u / kRowAhead & 1; }

  // Where summers write into slots, too, writers free a slot lane by lane: compute-sanitizer orders an arrival with its
  // own thread's reads only. Where writers hold chunks, they and the summers arrive for a half of a slot each if both
  // read it for the last time: a second arrival at once takes longer than the first.
  static constexpr int kHalves = kHeld > 0 ? 2 : 1;
  static constexpr uint32_t kFreeing = kHalves * (Traits::kStoresDz ? kRowWriters : kRowWriters / 32);
  // `seen` depends on all that was read from the slot. Nothing else makes an arrival wait for loads from shared memory
  // whose values nobody has used: with many stores before them they took longer than the slot's next copy.
  template <int kThreads, bool kHalf = false>
  __device__ __forceinline__ void free_slot(uint32_t k, uint32_t seen) const {
    __syncwarp();
    if (Traits::kStoresDz || lane == 0) {
      barrier_arrive<(kHalf ? 1 : kHalves) * (kRowWriters / kThreads)>(&s.freed[k + (seen & d.nothing)]);
    }
  }

  // This thread's first vector of a slot; its next ones lie `step` elements apart, there and in the tensor.
  __device__ __forceinline__ T* place(uint32_t k) const {
    return reinterpret_cast<T*>(slots + k * (d.tensor_bytes * kTensors) + tid * 16);
  }
  __device__ __forceinline__ uint32_t step() const { return rows * d.vectors * kVec; }

  // All lanes of a warp wait for a chunk.
  __device__ __forceinline__ void await_chunk(RowSlot slot) const {
    barrier_wait(&s.loaded[slot.k], slot.parity);
    __syncwarp();
  }
  // Vectors of this thread.
  __device__ __forceinline__ uint32_t left_of(uint32_t t) const {
    return t < full_chunks ? of_full : t == full_chunks ? of_rest : 0;
  }
  __device__ __forceinline__ uint32_t chunk_elements() const { return d.chunk_rows * d.vectors * kVec; }
  // This thread's first element of chunk t.
  __device__ __forceinline__ int64_t first_of(uint32_t u, uint32_t t) const {
    return base(u) + tid * kVec + int64_t(t) * chunk_elements();
  }
  // What summers do with each chunk of a sample: add(t, slot, left) gives something that depends on all that it read.
  // With shared(), and so below, of every second chunk, `half` says which.
  template <bool kShared = false, typename Add>
  __device__ __forceinline__ void for_each_summed(RowSlot* slot, Add add, uint32_t half = 0) const {
    if (half > 0) slot->next(d.slots);
    for (uint32_t t = half; t < d.chunks; t += kShared ? 2 : 1, advance<kShared>(slot, d.slots)) {
      await_chunk(*slot);
      const uint32_t seen = add(t, slot->k, left_of(t));
      if (t < d.held) {
        free_slot<Traits::kSummers, true>(slot->k, seen);
      } else if (t < d.held + d.rereads) {
        free_slot<Traits::kSummers>(slot->k, seen);
      }
    }
  }
  template <bool kShared>
  static __device__ __forceinline__ void advance(RowSlot* slot, uint32_t slots) {
    slot->next(slots);
    if (kShared) slot->next(slots);
  }
  __device__ __forceinline__ uint32_t chunk_again(uint32_t i) const {
    return d.held + (d.backwards ? d.rereads - 1 - i : i);
  }
  // What writers do with chunks that they take to registers before they know the statistics: take(h, slot, left),
  template <typename Take>
  __device__ __forceinline__ void for_each_taken(uint32_t u, Take take) const {
#pragma unroll
    for (int h = 0; h < Traits::kHeld; ++h) {
      if (h >= d.held) break;
      const RowSlot slot = slot_at(u * d.chunks + h);
      await_chunk(slot);
      const uint32_t seen = take(h, slot.k, left_of(h));
      free_slot<kRowWriters, true>(slot.k, seen);
    }
  }
  // and once they know them: with those that have stayed in slots, write(first element, slot, left),
  template <bool kShared = false, typename Write>
  __device__ __forceinline__ void for_each_kept(uint32_t u, Write write, uint32_t half = 0) const {
    const uint32_t kept = d.rereads + d.held, first = kept + (kShared ? kept + half & 1 : 0);
    RowSlot slot = slot_at(u * d.chunks + first);
    for (uint32_t t = first; t < d.chunks; t += kShared ? 2 : 1, advance<kShared>(&slot, d.slots)) {
      await_chunk(slot);
      write(first_of(u, t), slot.k, left_of(t));
      free_slot<kRowWriters>(slot.k, 0);
    }
  }
  // those in registers, write(first element, h, left),
  template <typename Write>
  __device__ __forceinline__ void for_each_held(uint32_t u, Write write) const {
    int64_t first = first_of(u, 0);  // counted up: offsets of their own would be kept in registers
#pragma unroll
    for (int h = 0; h < Traits::kHeld; ++h) {
      if (h >= d.held) break;
      write(first, h, left_of(h));
      first += chunk_elements();
    }
  }
  // and those that come again.
  template <bool kShared = false, typename Write>
  __device__ __forceinline__ void for_each_again(uint32_t u, RowSlot* again, Write write, uint32_t half = 0) const {
    if (d.again_slots == 0) *again = slot_at(d.chunks);
    const uint32_t first_slot = d.again_slots > 0 ? d.slots : 0,
                   slots_again = d.again_slots > 0 ? d.again_slots : d.slots;
    if (half > 0) again->next(slots_again);
    for (uint32_t i = half; i < d.rereads; i += kShared ? 2 : 1, advance<kShared>(again, slots_again)) {
      const uint32_t t = chunk_again(i);
      const RowSlot slot{first_slot + again->k, again->parity};
      await_chunk(slot);
      write(first_of(u, t), slot.k, left_of(t));
      free_slot<kRowWriters>(slot.k, 0);
    }
  }

  // Rows of chunk t, in bytes, and the first one's element in the share.
  __device__ __forceinline__ uint32_t chunk_bytes(uint32_t t, int64_t* first) const {
    const uint32_t row = t * d.chunk_rows;
    *first = int64_t(row) * (d.vectors * kVec);
    return row < own ? min(d.chunk_rows, own - row) * d.vectors * 16 : 0;
  }
  __device__ __forceinline__ void load(uint32_t u, uint32_t t, uint32_t k,
                                       const void* const (&tensors)[kTensors]) const {
    int64_t first;
    const uint32_t bytes = chunk_bytes(t, &first);
    first += base(u);
    char* const to = slots + k * (d.tensor_bytes * kTensors);
    if (bytes == 0) {
      barrier_arrive(&s.loaded[k]);
      return;
    }
    const uint64_t policy = evict_normal_policy();
    barrier_expect_bytes(&s.loaded[k], bytes * kTensors);
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      bulk_load(to + i * d.tensor_bytes, static_cast<const T*>(tensors[i]) + first, bytes, &s.loaded[k], policy);
    }
  }
  // Before a load: no more than kRowFlight are under way.
  __device__ __forceinline__ void await_flight(uint32_t loads, RowSlot* landing, uint32_t first, uint32_t slots) const {
    if (loads < kRowFlight || kRowFlight >= slots) return;
    barrier_wait(&s.loaded[first + landing->k], landing->parity);
    landing->next(slots);
  }
  __device__ __forceinline__ void produce(const void* const (&tensors)[kTensors]) const {
    uint32_t loads = 0;
    RowSlot slot, landing;
    for (uint32_t u = 0; u < samples; ++u) {
      for (uint32_t t = 0; t < d.chunks; ++t, ++loads, slot.next(d.slots)) {
        if (d.distance > 0) {
          while (u * d.rereads + min(t - min(t, d.held), d.rereads) > load_counter(&s.chunks_again) + d.distance)
            __nanosleep(20);
        }
        if (loads >= d.slots) barrier_wait(&s.freed[slot.k], slot.parity ^ 1);
        await_flight(loads, &landing, 0, d.slots);
        load(u, t, slot.k, tensors);
      }
      if (d.again_slots > 0) continue;
      for (uint32_t i = 0; i < d.rereads; ++i, ++loads, slot.next(d.slots)) {
        barrier_wait(&s.freed[slot.k], slot.parity ^ 1);
        await_flight(loads, &landing, 0, d.slots);
        load(u, chunk_again(i), slot.k, tensors);
      }
    }
  }
  __device__ __forceinline__ void produce_again(const void* const (&tensors)[kTensors]) const {
    uint32_t loads = 0;
    RowSlot slot, landing;
    for (uint32_t u = 0; d.again_slots > 0 && u < samples; ++u) {
      while (load_counter(&s.samples_told) <= u) __nanosleep(20);
      for (uint32_t i = 0; i < d.rereads; ++i, slot.next(d.again_slots)) {
        if (loads >= d.again_slots) barrier_wait(&s.freed[d.slots + slot.k], slot.parity ^ 1);
        await_flight(loads, &landing, d.slots, d.again_slots);
        load(u, chunk_again(i), d.slots + slot.k, tensors);
        ++loads;
        increment(&s.chunks_again);
      }
    }
  }
  // Atomics, so that compute-sanitizer knows that these are meant to be read at any time.
  static __device__ __forceinline__ uint32_t load_counter(uint32_t* p) { return atomicAdd_block(p, 0); }
  static __device__ __forceinline__ void increment(uint32_t* p) { atomicAdd_block(p, 1); }

  // The same sums of both halves, where chunks are shared.
  __device__ __forceinline__ void write_entries_shared(float (&a)[kVec], float (&b)[kVec], uint32_t half) const {
    constexpr int kBarrier = 2;
    __syncwarp();
    if (half > 0) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) tables.entries[j * Traits::kSummers + tid] = make_float2(a[j], b[j]);
      named_barrier_arrive(kBarrier, 2 * kRowWriters);
      return;
    }
    named_barrier(kBarrier, 2 * kRowWriters);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float2 other = tables.entries[j * Traits::kSummers + tid];
      a[j] += other.x;
      b[j] += other.y;
    }
    write_entries(0, a, b);
  }
  // The summers' end of a sample: their sums, to the block's table.
  __device__ __forceinline__ void write_entries(uint32_t u, const float (&a)[kVec], const float (&b)[kVec]) const {
    __syncwarp();
    if (u > 0) barrier_wait(&s.drained, (u & 1) ^ 1);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kVec; ++j) tables.entries[j * Traits::kSummers + tid] = make_float2(a[j], b[j]);
    barrier_arrive(&s.summed);
  }
  // The publishers' sums over the threads, of each element of the row. take(element, sums, is_first) is called by one
  // thread for each, always the same; is_first of the first element that a thread has.
  __device__ __forceinline__ uint32_t first_element() const {
    const uint32_t i = tid >> d.element_lanes_log2, j = d.by_vectors(i);
    return (i - j * d.vectors) * kVec + j;
  }
  template <typename Take>
  __device__ __forceinline__ void add_entries(Take take) const {
    const uint32_t lanes = 1u << d.element_lanes_log2, member = tid & (lanes - 1), elements = d.vectors * kVec;
    for (uint32_t i0 = 0; i0 < elements; i0 += kRowPublishThreads >> d.element_lanes_log2) {
      // Neighbours of a warp have neighbouring columns, which lie in different banks.
      const uint32_t i = i0 + (tid >> d.element_lanes_log2), j = d.by_vectors(i), at = i - j * d.vectors;
      float2 v = make_float2(0.f, 0.f);
      if (i < elements) {
        const float2* const from = tables.entries + j * Traits::kSummers + at;
        constexpr int kBatch = 8;
#pragma unroll 1
        for (uint32_t w = member; w < d.walkers; w += lanes * kBatch) {
          float2 part[kBatch];
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            part[k] = make_float2(0.f, 0.f);
            if (w + k * lanes < d.walkers) part[k] = from[(w + k * lanes) * d.vectors];
          }
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            v.x += part[k].x;
            v.y += part[k].y;
          }
        }
      }
      __syncwarp();
      v.x = lanes_sum(v.x, lanes);
      v.y = lanes_sum(v.y, lanes);
      if (i < elements && member == 0) take(at * kVec + j, v, i0 == 0);
    }
    named_barrier(1, kRowPublishThreads);
  }
  // How many of a team's blocks have told words of sample u.
  __device__ __forceinline__ uint32_t* told_of(uint32_t u) const {
    return reinterpret_cast<uint32_t*>(p.words + int64_t(d.samples) * d.groups * d.blocks) + sample(u);
  }
  // A lane's part of the elements of the row that are group g's: f(element, channel).
  template <typename F>
  __device__ __forceinline__ void for_elements(uint32_t g, uint32_t lanes, uint32_t member, F f) const {
    const uint32_t per_group = d.channels_per_group, c0 = g * per_group;
    if (g >= d.groups) return;
    if (d.turns == 1) {
      for (uint32_t k = member; k < per_group; k += lanes) f(c0 + k, c0 + k);
      return;
    }
    for (uint32_t i = member; i < d.turns * per_group; i += lanes) {
      const uint32_t turn = d.by_channels_per_group(i), c = c0 + i - turn * per_group;
      f(turn * d.channels + c, c);
    }
  }
  // Before the first of them.
  __device__ __forceinline__ void clear_all_words() const {
    if (d.cleared == 0) return;
    uint64_t seen[kClearedWords];
    clear_words(p.words, d.cleared, tid, kRowPublishThreads, seen);
    await_cleared(p.words, tid, kRowPublishThreads, seen);
    named_barrier(1, kRowPublishThreads);
    if (tid == 0) await_all_cleared(count_cleared());
    named_barrier(1, kRowPublishThreads);
  }
  // The block's word of each group: word_of(g, lanes, member) is called by all lanes.
  template <typename WordOf>
  __device__ __forceinline__ void tell(uint32_t u, WordOf word_of) const {
    const uint32_t lanes = 1u << d.group_lanes_log2, member = tid & (lanes - 1);
    for (uint32_t first = tid / 32 * 32 >> d.group_lanes_log2; first < d.groups;
         first += kRowPublishThreads >> d.group_lanes_log2) {
      const uint32_t g = first + (lane >> d.group_lanes_log2);
      const uint64_t word = word_of(g, lanes, member);
      if (g < d.groups && member == 0) store_relaxed(p.words + (group0(u) + g) * d.blocks + rank, word);
    }
    __syncwarp();
    if (tid == 0) atomicAdd(told_of(u), 1);  // more of them would queue, one behind the other
    barrier_arrive(&s.drained);
    // No more than kRowAhead samples ahead of the collectors: a phase that these have not seen must not end twice.
    barrier_wait(&s.ready[turn_of(u)], parity_of(u) ^ 1);
    __syncwarp();
    barrier_arrive(&s.published[turn_of(u)]);
    if (tid == 0) increment(&s.samples_told);
  }

  // Sum over the aligned `lanes` lanes around this one. What happens once a sample is short rather than unrolled: its
  // instructions have left the multiprocessor's caches when it comes again.
  static __device__ __forceinline__ float lanes_sum(float v, uint32_t lanes) {
#pragma unroll 1
    for (uint32_t mask = lanes / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
  }
  // Values of a group that a block of the team has.
  __device__ __forceinline__ float count_of(uint32_t block) const {
    return block < d.full_blocks ? d.full_count : block == d.full_blocks ? d.rest_count : 0.f;
  }

  __device__ __forceinline__ float2* stats(uint32_t u) const { return tables.stats + turn_of(u) * d.groups; }

  // Whether summers and writers do everything together: a block's only sample is first summed up, then written, and
  // half of their warps would idle.
  __device__ __forceinline__ bool shared() const { return Traits::kShares && samples == 1 && d.chunks > kRowFewChunks; }
  // Whether a warp's lanes are enough for all words of a sample: then each collecting warp has samples of its own.
  __device__ __forceinline__ bool collects_in_turns() const {
    return samples > 1 && d.groups << d.team_lanes_log2 <= 32;
  }
  // Threads that collect a sample's words. The summers of a block's only sample have nothing else to do.
  __device__ __forceinline__ uint32_t collectors() const {
    if (collects_in_turns()) return 32;
    return kRowCollectThreads + (samples == 1 ? Traits::kSummers : 0) + (shared() ? kRowWriters : 0);
  }
  // sums_of(count, words) gives a lane's sums of a group over the words of `count` blocks that have a full share, and
  // of the block that has the rest; finish(u, g, sums) is called by a group's first lane.
  template <int kWords, typename SumsOf, typename Finish>
  __device__ __forceinline__ void collect(uint32_t thread, SumsOf sums_of, Finish finish) const {
    const uint32_t turns = collects_in_turns() ? kRowCollectors : 1, turn = turns > 1 ? thread / 32 : 0;
    const uint32_t collector = thread - turn * 32;
    const uint32_t lanes = 1u << d.team_lanes_log2, member = collector & (lanes - 1);
    const uint32_t own_words = d.full_blocks > member ? ((d.full_blocks - member - 1) >> d.team_lanes_log2) + 1 : 0;
    for (uint32_t u = turn; u < samples; u += turns) {
      // Looks before that, or for the words themselves, would keep their lines busy for the others.
      barrier_wait(&s.published[turn_of(u)], parity_of(u));
      barrier_wait(&s.taken[turn_of(u)], parity_of(u) ^ 1);
      __syncwarp();
      if (collector == 0) {
        await_told(told_of(u), d.blocks);
        barrier_arrive(&s.told[turn_of(u)]);
      }
      barrier_wait(&s.told[turn_of(u)], parity_of(u));
      __syncwarp();
      const uint64_t* const words = p.words + group0(u) * d.blocks;
      for (uint32_t first = collector / 32 * 32 >> d.team_lanes_log2; first < d.groups;
           first += collectors() >> d.team_lanes_log2) {
        const uint32_t g = first + (lane >> d.team_lanes_log2), count = g < d.groups ? own_words : 0;
        const uint64_t* const from = words + g * d.blocks;
        uint64_t word[kWords + 1];
        load_words<kWords>(from + member, lanes, count,
                           d.rest_count > 0 && g < d.groups && member == 0 ? from + d.full_blocks : nullptr,
                           pack_word(0.f, 0.f), word);
        float2 sums = sums_of(count, word);
        sums.x = lanes_sum(sums.x, lanes);
        sums.y = lanes_sum(sums.y, lanes);
        if (g < d.groups && member == 0) finish(u, g, sums);
      }
      barrier_arrive(&s.ready[turn_of(u)]);
    }
  }
};

__device__ __forceinline__ void init_barriers(RowBarriers* barriers, uint32_t slots, uint32_t freeing, uint32_t summers,
                                              uint32_t collectors) {
  for (uint32_t k = 0; k < slots; ++k) {
    barrier_init(&barriers->loaded[k], 1);
    barrier_init(&barriers->freed[k], freeing);
  }
  for (int i = 0; i < kRowAhead; ++i) {
    barrier_init(&barriers->published[i], kRowPublishThreads);
    barrier_init(&barriers->told[i], 1);
    barrier_init(&barriers->ready[i], collectors);
    barrier_init(&barriers->taken[i], kRowWriters);
  }
  barrier_init(&barriers->summed, summers);
  barrier_init(&barriers->drained, kRowPublishThreads);
  barriers->samples_told = barriers->chunks_again = 0;
  barrier_init_fence();
}

// The roles of a block's warps. Block is given its thread among those of its role.
template <typename Block, typename Params, int kTensors>
__device__ __forceinline__ void run_roles(const Params& p, char* memory, const RowTables& t, RowBarriers& barriers,
                                          const void* const (&tensors)[kTensors]) {
  using Traits = typename Block::Traits;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == 0) {  // which goes on to load: nobody's parameters hold that up
    if (threadIdx.x == 0) {
      init_barriers(&barriers, p.shares.slots + p.shares.again_slots, Block::kFreeing, Traits::kSummers,
                    Block(p, memory, t, barriers, 0, false).collectors());
    }
    __syncwarp();
    named_barrier_arrive(0, Traits::kThreads);
  } else {
    for (uint32_t c = threadIdx.x - 32; c < p.shares.channels; c += Traits::kThreads - 32) {
      t.affines[c] = affine_of(p.weight, p.bias, c, p.affine_dtype);
    }
    named_barrier(0, Traits::kThreads);
  }
  constexpr RowRegisters kRegisters = Traits::kRegisters;
  constexpr int kFirstCollector = kRowProducers, kFirstPublisher = kFirstCollector + kRowCollectors;
  constexpr int kFirstSummer = kFirstPublisher + kRowPublishers, kFirstWriter = kFirstSummer + Traits::kSummers / 32;
  const int first = warp >= kFirstWriter      ? kFirstWriter
                    : warp >= kFirstSummer    ? kFirstSummer
                    : warp >= kFirstPublisher ? kFirstPublisher
                    : warp >= kFirstCollector ? kFirstCollector
                                              : warp;
  constexpr bool kDeals = Traits::kHolds;
  Block block(p, memory, t, barriers, threadIdx.x - first * 32, warp >= kFirstWriter);
  if (warp < kFirstPublisher) {
    if constexpr (kDeals) set_registers<kRegisters.servers, false>();
    if (warp == 0) {
      if (threadIdx.x == 0) block.produce(tensors);
    } else if (warp == 1) {
      if (threadIdx.x == 32) block.produce_again(tensors);
    } else if (Traits::kWords > kTeamWords && kTeamWords << p.shares.team_lanes_log2 < p.shares.blocks) {
      block.template gather<Traits::kWords>(block.tid);
    } else {
      block.template gather<kTeamWords>(block.tid);
    }
  } else if (warp < kFirstSummer) {
    if constexpr (kDeals) set_registers<kRegisters.publishers, false>();
    block.clear_all_words();
    block.publish();
  } else if (warp < kFirstWriter) {
    if constexpr (kDeals) set_registers<kRegisters.summers, false>();
    if constexpr (Traits::kShares) {
      if (block.shared()) return block.sum_and_write(0);
    }
    block.sum_up();
    if (block.samples == 1) block.template gather<kTeamWords>(kRowCollectThreads + block.tid);
  } else {
    if constexpr (Traits::kShares) {
      if (block.shared()) return block.sum_and_write(1);
    }
    if constexpr (kDeals) set_registers<kRegisters.writers, true>();
    block.write();
  }
}

// The tables after `slots` slots.
template <typename Traits>
__device__ __forceinline__ RowTables place_tables(char* memory, const RowShares& d) {
  constexpr int kVec = Traits::kVec;
  RowTables t;
  t.entries = reinterpret_cast<float2*>(memory + (d.slots + d.again_slots) * d.tensor_bytes * Traits::kTensors);
  t.sums = t.entries + Traits::kSummers * kVec;
  t.totals = t.sums + d.vectors * kVec;
  t.affines = t.totals + d.vectors * kVec;
  t.stats = t.affines + d.channels;
  return t;
}

#endif

}  // namespace kgopt
