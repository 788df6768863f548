// GroupNorm of channels_last tensors by blocks whose warps have roles (group_norm_rows_params.h), so that a sample is
// loaded while the ones before are summed up and stored:
//   producer     starts the loads of chunks into slots that have become free
//   summers      moments of what a thread sees of its channels, and from these the block's word of a group
//   collectors   wait for the words of the team's blocks and merge them, in every block for itself
//   writers      write y or dx from the slots
#pragma once

#include "../common/async.cuh"
#include "../common/dtype.cuh"
#include "../common/reduce.cuh"
#include "group_norm_rows_params.h"
#include "vectors.cuh"
#include "words.cuh"

namespace kgopt {

inline constexpr int kRowRoleWarps = kRowThreads / 32;

template <typename T_, Chain kPre_, Chain kAct_, int kTensors_>
struct RowTraits {
  using T = T_;
  static constexpr int kTensors = kTensors_, kPasses = kRowPasses / kTensors;  // vectors of a tensor and a thread
  static constexpr Chain kPre = kPre_, kAct = kAct_;
  static constexpr int kVec = kVecSize<T>;
  // Warps. Chains that are walked need 96 registers, which 20 warps of a block may have; others 80, as 24 may.
  static constexpr int kCollectors = kPre == Chain::kAny || kAct == Chain::kAny ? 3 : 7;
  static constexpr int kThreads = 32 * (1 + kCollectors) + 2 * kRowThreads;  // of a block
  // Values of 16 bits lose nothing where the mean is part of the shift: their own rounding is coarser.
  static constexpr bool kFolds = sizeof(T) == 2 && (kPre == Chain::kNone || kPre == Chain::kRelu);
  // Whether the backward's summers leave dz in place of dy, where computing it twice costs more.
  static constexpr bool kStoresDz = kTensors == 2 && (kAct == Chain::kSilu || kAct == Chain::kAny);
};

// Those of two take turns from sample to sample.
struct RowBarriers {
  uint64_t loaded[kRowSlots], freed[kRowSlots];
  uint64_t published[2];        // the block's words of a sample are under way
  uint64_t ready[2], taken[2];  // statistics are there, and have been read
};

// Shared memory after the slots.
struct RowTables {
  float2* entries;  // [runs or elements of a vector][threads of a role]
  float2* stats;    // [2][groups] mean and rstd; in the backward what is taken off
  float2* affines;  // [channels] weight, bias
  float2* sums;     // [2][channels], of the backward: a sample's, and all samples'
  float* counts;    // [threads of a role], of the forward: values of a run
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

template <typename Traits, typename Params>
struct RowBlock {
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = Traits::kPasses, kTensors = Traits::kTensors;
  static constexpr int kCollectors = Traits::kCollectors, kThreads = Traits::kThreads;

  const Params& p;
  const RowShares& d;
  char* const slots;
  const RowTables tables;
  RowBarriers& s;
  const uint32_t team, rank;
  const uint32_t tid, lane = threadIdx.x % 32;  // of the role
  uint32_t samples, own;                        // of the team, rows of the block's share
  uint32_t walker, column, count;               // count: vectors of this thread's share
  bool active;

  __device__ __forceinline__ RowBlock(const Params& params, char* memory, const RowTables& t, RowBarriers& barriers,
                                      uint32_t thread)
      : p(params),
        d(params.shares),
        slots(memory),
        tables(t),
        s(barriers),
        team(d.by_blocks(blockIdx.x)),
        rank(blockIdx.x - team * d.blocks),
        tid(thread) {
    samples = (d.samples - team + d.teams - 1) / d.teams;
    const uint32_t first = min(rank * d.share, d.rows);
    own = min(d.share, d.rows - first);
    walker = d.by_vectors(tid);
    column = tid - walker * d.vectors;
    active = walker < d.walkers;
    count = active && walker < own ? d.by_walkers(own - walker - 1) + 1 : 0;
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
  // Of this thread's elements, eight bits each would not do: a group's number is looked up once a sample.
  __device__ __forceinline__ uint32_t group_of(int j) const { return d.by_channels_per_group(channel_of(j)); }

  // The uses of slots in their order, see group_norm_rows_params.h.
  __device__ __forceinline__ uint32_t first_use(uint32_t u) const {
    return u == 0 ? 0 : d.chunks + (u - 1) * (d.chunks + d.rereads);
  }
  __device__ __forceinline__ uint32_t first_kept(uint32_t u) const {
    return first_use(u) + (u == 0 ? d.rereads : 2 * d.rereads);
  }
  __device__ __forceinline__ uint32_t first_again(uint32_t u) const {
    return first_use(u + 1) + (u + 1 < samples ? d.rereads : 0);
  }
  __device__ __forceinline__ RowSlot slot_at(uint32_t use) const {
    const uint32_t round = d.by_slots(use);
    return {use - round * d.slots, round & 1};
  }

  static __device__ __forceinline__ uint32_t parity_of(uint32_t u) { return u >> 1 & 1; }

  // Where summers write into slots, too, writers free a slot lane by lane: compute-sanitizer orders an arrival with its
  // own thread's reads only.
  static constexpr uint32_t kFreeing = Traits::kStoresDz ? kRowThreads : kRowRoleWarps;  // arrivals
  __device__ __forceinline__ void free_slot(uint32_t k) const {
    __syncwarp();
    if (Traits::kStoresDz || lane == 0) barrier_arrive(&s.freed[k]);
  }

  // This thread's first vector of a slot; its next ones lie `step` elements apart, there and in the tensor.
  __device__ __forceinline__ T* place(uint32_t k) const {
    return reinterpret_cast<T*>(slots + k * (d.tensor_bytes * kTensors) + tid * 16);
  }
  __device__ __forceinline__ uint32_t step() const { return d.walkers * d.vectors * kVec; }

  // All lanes of a warp wait for a chunk; `left` of its passes have a vector of this thread.
  __device__ __forceinline__ uint32_t await_chunk(RowSlot slot, uint32_t t) const {
    barrier_wait(&s.loaded[slot.k], slot.parity);
    __syncwarp();
    return count > t * kPasses ? count - t * kPasses : 0;
  }
  // What summers do with each chunk of sample u.
  template <typename Add>
  __device__ __forceinline__ void for_each_summed(uint32_t u, Add add) const {
    RowSlot slot = slot_at(first_use(u));
    for (uint32_t t = 0; t < d.chunks; ++t, slot.next(d.slots)) {
      if (t == d.rereads) slot = slot_at(first_kept(u));
      const uint32_t left = await_chunk(slot, t);
      add(t, slot.k, left);
      if (t < d.rereads) free_slot(slot.k);
    }
  }
  // What writers do.
  template <typename Write>
  __device__ __forceinline__ void for_each_written(uint32_t u, Write write) const {
    const uint32_t kept = d.chunks - d.rereads;
    RowSlot slot = slot_at(first_kept(u));
    for (uint32_t i = 0; i < d.chunks; ++i, slot.next(d.slots)) {
      if (i == kept) slot = slot_at(first_again(u));
      const uint32_t t = i < kept ? d.rereads + i : d.chunks - 1 - i;
      const uint32_t left = await_chunk(slot, t);
      write(int64_t(t * kPasses) * step() + tid * kVec, slot.k, left, i < kept);
      free_slot(slot.k);
    }
  }

  // Rows of chunk t, in bytes, and the first one's element in the share.
  __device__ __forceinline__ uint32_t chunk_bytes(uint32_t t, int64_t* first) const {
    const uint32_t row = t * d.chunk_rows;
    *first = int64_t(row) * (d.vectors * kVec);
    return row < own ? min(d.chunk_rows, own - row) * d.vectors * 16 : 0;
  }
  __device__ __forceinline__ void produce(const void* const (&tensors)[kTensors]) const {
    const uint64_t policy = evict_normal_policy();
    uint32_t use = 0, loads = 0, ahead_u = 0, ahead_t = 0, lead = 0;  // the next chunk for L2, and how many are before
    RowSlot slot;
    const auto load = [&](uint32_t u, uint32_t t) {
      if (use >= d.slots) barrier_wait(&s.freed[slot.k], slot.parity ^ 1);
      int64_t first;
      const uint32_t bytes = chunk_bytes(t, &first);
      first += base(u);
      char* const to = slots + slot.k * (d.tensor_bytes * kTensors);
      if (bytes > 0) {
        barrier_expect_bytes(&s.loaded[slot.k], bytes * kTensors);
#pragma unroll
        for (int k = 0; k < kTensors; ++k) {
          bulk_load(to + k * d.tensor_bytes, static_cast<const T*>(tensors[k]) + first, bytes, &s.loaded[slot.k],
                    policy);
        }
      } else {
        barrier_arrive(&s.loaded[slot.k]);
      }
      ++use;
      slot.next(d.slots);
    };
    const auto bring_ahead = [&] {
      for (; d.ahead > 0 && lead <= loads + d.ahead && ahead_u < samples; ++lead) {
        int64_t first;
        const uint32_t bytes = chunk_bytes(ahead_t, &first);
        first += base(ahead_u);
        if (lead >= d.slots && lead > loads && bytes > 0) {
#pragma unroll
          for (int k = 0; k < kTensors; ++k) bulk_prefetch(static_cast<const T*>(tensors[k]) + first, bytes);
        }
        if (++ahead_t == d.chunks) {
          ahead_t = 0;
          ++ahead_u;
        }
      }
      ++loads;
    };
    for (uint32_t u = 0; u <= samples; ++u) {
      for (uint32_t t = 0; u < samples && t < d.rereads; ++t) {
        load(u, t);
        bring_ahead();
      }
      for (uint32_t t = d.rereads; u > 0 && t > 0; --t) load(u - 1, t - 1);
      for (uint32_t t = d.rereads; u < samples && t < d.chunks; ++t) {
        load(u, t);
        bring_ahead();
      }
    }
  }

  // Summers may be two samples ahead of the collectors: a phase that these have not seen must not end twice.
  __device__ __forceinline__ void announce(uint32_t u) const {
    barrier_wait(&s.ready[u & 1], parity_of(u) ^ 1);
    __syncwarp();
    barrier_arrive(&s.published[u & 1]);
  }

  // Sum over the aligned `lanes` lanes around this one.
  static __device__ __forceinline__ float lanes_sum(float v, uint32_t lanes) {
#pragma unroll
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
      if (mask < lanes) v += __shfl_xor_sync(0xffffffffu, v, mask);
    }
    return v;
  }
  // Values of a group that a block of the team has.
  __device__ __forceinline__ float count_of(uint32_t block) const {
    return block < d.full_blocks ? d.full_count : block == d.full_blocks ? d.rest_count : 0.f;
  }

  __device__ __forceinline__ float2* stats(uint32_t u) const { return tables.stats + (u & 1) * d.groups; }

  // The collectors: merge(g, word) is called for each group's words by the lanes of a group, kBatch at a time, and
  // finish(g) after the last; both by all lanes, those of groups that do not exist get zeros.
  template <typename Begin, typename Merge, typename Finish>
  __device__ __forceinline__ void collect(Begin begin, Merge merge, Finish finish) const {
    constexpr int kBatch = 5;  // words under way
    const uint32_t lanes = 1u << d.team_lanes_log2, member = tid & (lanes - 1);
    for (uint32_t u = 0; u < samples; ++u) {
      // Polls before that would only keep the words' lines busy for the others.
      barrier_wait(&s.published[u & 1], parity_of(u));
      barrier_wait(&s.taken[u & 1], parity_of(u) ^ 1);
      __syncwarp();
      for (uint32_t first = tid / 32 * 32 >> d.team_lanes_log2; first < d.groups;
           first += kCollectors * 32 >> d.team_lanes_log2) {
        const uint32_t g = first + (lane >> d.team_lanes_log2);
        auto state = begin();
        for (uint32_t block0 = 0; block0 < d.blocks; block0 += kBatch * lanes) {
          const uint64_t* const from = p.words + (group0(u) + g) * d.blocks + block0 + member;
          uint64_t word[kBatch];
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            const bool there = g < d.groups && block0 + member + k * lanes < d.blocks;
            word[k] = there ? load_word(from + k * lanes) : 1;
          }
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            if (word[k] == 0) word[k] = wait_word(from + k * lanes);
          }
          __syncwarp();
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            const uint32_t block = block0 + member + k * lanes;
            merge(state, word[k], g < d.groups && block < d.blocks, block, block0 == 0 && k == 0);
          }
        }
        __syncwarp();
        state.x = lanes_sum(state.x, lanes);
        state.y = lanes_sum(state.y, lanes);
        if (g < d.groups && member == 0) finish(u, g, state);
      }
      barrier_arrive(&s.ready[u & 1]);
    }
  }
};

__device__ __forceinline__ void init_barriers(RowBarriers* barriers, uint32_t slots, uint32_t freeing, uint32_t collectors) {
  for (uint32_t k = 0; k < slots; ++k) {
    barrier_init(&barriers->loaded[k], 1);
    barrier_init(&barriers->freed[k], freeing);
  }
  for (int i = 0; i < 2; ++i) {
    barrier_init(&barriers->published[i], kRowThreads);
    barrier_init(&barriers->ready[i], collectors);
    barrier_init(&barriers->taken[i], kRowThreads);
  }
  barrier_init_fence();
}

// The roles of a block's warps. Block is given its thread among those of its role.
template <typename Block, typename Params, int kTensors>
__device__ __forceinline__ void run_roles(const Params& p, char* memory, const RowTables& t, RowBarriers& barriers,
                                          const void* const (&tensors)[kTensors]) {
  if (threadIdx.x == 0) init_barriers(&barriers, p.shares.slots, Block::kFreeing, Block::kCollectors * 32);
  for (uint32_t c = threadIdx.x; c < p.shares.channels; c += Block::kThreads) {
    t.affines[c] = affine_of(p.weight, p.bias, c, p.affine_dtype);
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  constexpr int kFirstSummer = 1 + Block::kCollectors, kFirstWriter = kFirstSummer + kRowRoleWarps;
  const int first = warp >= kFirstWriter ? kFirstWriter : warp >= kFirstSummer ? kFirstSummer : warp > 0 ? 1 : 0;
  Block block(p, memory, t, barriers, threadIdx.x - first * 32);
  if (warp == 0) {
    if (threadIdx.x == 0) block.produce(tensors);
  } else if (warp < kFirstSummer) {
    block.gather();
  } else if (warp < kFirstWriter) {
    block.sum_up();
  } else {
    block.write();
  }
}

#endif

}  // namespace kgopt
