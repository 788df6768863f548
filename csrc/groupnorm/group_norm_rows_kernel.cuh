// GroupNorm of channels_last tensors whose samples stay on chip: the slabs of group_norm_columns_params.h are whole
// samples, of which a team of blocks has one after the other, and the warps of a block have roles, so that a sample is
// loaded while the ones before are summed up and stored:
//   producer     starts the loads of chunks, which are contiguous, into slots that have become free
//   summers      moments of what a thread sees of its channels
//   publishers   make the block's moments of a group the block's word
//   collectors   wait for the words of the team's blocks and merge them, in every block for itself
//   writers      write y or dx from the slots
#pragma once

#include "group_norm_columns_kernel.cuh"

namespace kgopt {

inline constexpr int kRowPublishers = 2, kRowCollectors = 4;  // warps
inline constexpr int kRowThreads = 32 * (1 + kRowPublishers + kRowCollectors) + 2 * kRowRoleThreads;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Those of two take turns from sample to sample.
struct RowBarriers {
  uint64_t loaded[kRowSlots], freed[kRowSlots];
  uint64_t summed[2], published[2];  // entries are there, and have been read
  uint64_t ready[2], taken[2];       // statistics are there, and have been read
};

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

// What forward and backward share. A slot has a chunk of each of kTensors tensors. Where summers write into slots, too,
// writers free a slot lane by lane: compute-sanitizer orders an arrival with its own thread's reads only.
template <typename Traits, typename Params, int kTensors, bool kWritesSlots = false>
struct RowBlock : ColumnBlock<Traits, Params> {
  using Columns = ColumnBlock<Traits, Params>;
  using T = typename Traits::T;
  static constexpr int kPasses = Traits::kPasses;
  using Columns::d, Columns::rank, Columns::team;

  RowBarriers& s;

  __device__ __forceinline__ RowBlock(const Params& params, char* memory, const ColumnTables& t, RowBarriers& barriers,
                                      uint32_t thread)
      : Columns(params, memory, t, nullptr, thread), s(barriers) {}

  static __device__ __forceinline__ uint32_t parity_of(uint32_t u) { return u >> 1 & 1; }

  static constexpr uint32_t kFreeing = kWritesSlots ? kRowRoleThreads : kRowRoleThreads / 32;  // arrivals
  __device__ __forceinline__ void free_slot(uint32_t k) const {
    if (kWritesSlots || this->lane == 0) barrier_arrive(&s.freed[k]);
  }

  // No more than two samples ahead of the collectors: a phase that they have not seen must not end twice.
  __device__ __forceinline__ void wait_collected(uint32_t u) const { barrier_wait(&s.ready[u & 1], parity_of(u) ^ 1); }

  // Chunk t of slab u: its first element in the tensor, and its bytes.
  __device__ __forceinline__ int64_t chunk(uint32_t u, uint32_t t, uint32_t* bytes) const {
    const uint32_t rows = kPasses * d.stride, first = rank * d.share + t * rows;
    const uint32_t end = min((rank + 1) * d.share, d.rows);
    *bytes = first < end ? min(rows, end - first) * static_cast<uint32_t>(d.pitch) * sizeof(T) : 0;
    return (int64_t(this->slab(u)) * d.rows + first) * d.pitch;
  }
  __device__ __forceinline__ void produce(const void* const (&tensors)[kTensors]) const {
    const uint32_t slabs = d.slabs_of(team);
    const uint64_t policy = evict_normal_policy();
    uint32_t ahead_u = 0, ahead_t = 0, lead = 0;  // the next chunk for L2, and how many are before it
    RowSlot slot;
    for (uint32_t u = 0, i = 0; u < slabs; ++u) {
      for (uint32_t t = 0; t < d.chunks; ++t, ++i, slot.next(d.slots)) {
        if (i >= d.slots) barrier_wait(&s.freed[slot.k], slot.parity ^ 1);
        uint32_t bytes;
        const int64_t from = chunk(u, t, &bytes);
        char* const to = this->slots + slot.k * d.slot_bytes;
        if (bytes > 0) {
          barrier_expect_bytes(&s.loaded[slot.k], bytes * kTensors);
#pragma unroll
          for (int k = 0; k < kTensors; ++k) {
            bulk_load(to + k * (d.slot_bytes / kTensors), static_cast<const T*>(tensors[k]) + from, bytes,
                      &s.loaded[slot.k], policy);
          }
        } else {
          barrier_arrive(&s.loaded[slot.k]);
        }
        for (; d.ahead > 0 && lead <= i + d.ahead && ahead_u < slabs; ++lead) {
          const int64_t later = chunk(ahead_u, ahead_t, &bytes);
          if (lead >= d.slots && lead > i && bytes > 0) {
#pragma unroll
            for (int k = 0; k < kTensors; ++k) bulk_prefetch(static_cast<const T*>(tensors[k]) + later, bytes);
          }
          if (++ahead_t == d.chunks) {
            ahead_t = 0;
            ++ahead_u;
          }
        }
      }
    }
  }
};

template <typename Traits>
struct RowFwdBlock : RowBlock<Traits, GroupNormColumnsFwdParams, 1> {
  using Rows = RowBlock<Traits, GroupNormColumnsFwdParams, 1>;
  using Columns = typename Rows::Columns;
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = Traits::kPasses;
  using Columns::d, Columns::p, Columns::team, Columns::own, Columns::lane;
  using Rows::RowBlock, Rows::s, Rows::parity_of;

  __device__ __forceinline__ float2* entries(uint32_t u) const {
    return this->tables.entries + (u & 1) * d.walkers * d.runs;
  }

  __device__ __forceinline__ void sum_up() const {
    const uint32_t slabs = d.slabs_of(team);
    RowSlot slot;
    for (uint32_t u = 0; u < slabs; ++u) {
      typename Columns::Sums sums{};
      for (uint32_t t = 0; t < d.chunks; ++t, slot.next(d.slots)) {
        barrier_wait(&s.loaded[slot.k], slot.parity);
        if (t == 0 && own > 0) {
          values_of<Traits::kPre>(load_vec<T, kVec>(this->place(slot.k)), p.pre_act, sums.shift);
        }
        this->add_chunk(sums, slot.k, t);
      }
      barrier_wait(&s.published[u & 1], parity_of(u) ^ 1);
      __syncwarp();
      this->write_entries(sums, entries(u), u == 0);
      barrier_arrive(&s.summed[u & 1]);
    }
  }
  __device__ __forceinline__ void tell(uint32_t thread) const {
    const uint32_t slabs = d.slabs_of(team);
    for (uint32_t u = 0; u < slabs; ++u) {
      barrier_wait(&s.summed[u & 1], parity_of(u));
      this->wait_collected(u);
      __syncwarp();
      this->publish(u, entries(u), thread, kRowPublishers * 32);
      barrier_arrive(&s.published[u & 1]);
    }
  }
  __device__ __forceinline__ void collect(uint32_t thread) const {
    const uint32_t slabs = d.slabs_of(team);
    for (uint32_t u = 0; u < slabs; ++u) {
      // Polls before that would only keep the words' lines busy for the others.
      barrier_wait(&s.published[u & 1], parity_of(u));
      barrier_wait(&s.taken[u & 1], parity_of(u) ^ 1);
      __syncwarp();
      this->await(u, thread, kRowCollectors * 32);
      barrier_arrive(&s.ready[u & 1]);
    }
  }
  __device__ __forceinline__ void write() const {
    const uint32_t slabs = d.slabs_of(team), stride = d.pass_bytes / sizeof(T);
    RowSlot slot;
    for (uint32_t u = 0; u < slabs; ++u) {
      barrier_wait(&s.ready[u & 1], parity_of(u));
      __syncwarp();
      const typename Columns::Coefficients c = this->coefficients(u);
      barrier_arrive(&s.taken[u & 1]);
      T* const y = static_cast<T*>(p.y) + this->base(u);
      for (uint32_t t = 0; t < d.chunks; ++t, slot.next(d.slots)) {
        barrier_wait(&s.loaded[slot.k], slot.parity);
        __syncwarp();
        const T* const from = this->place(slot.k);
        const uint32_t left = own > t * kPasses ? own - t * kPasses : 0;
        Vec<T, kVec> input[kPasses];
#pragma unroll
        for (int k = 0; k < kPasses; ++k) {
          if (k < left) input[k] = load_vec<T, kVec>(from + k * stride);
        }
#pragma unroll
        for (int k = 0; k < kPasses; ++k) {
          if (k < left) this->normalize(c, y + int64_t(t * kPasses + k) * this->step, input[k]);
        }
        __syncwarp();
        this->free_slot(slot.k);
      }
    }
  }
};

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void init_barriers(RowBarriers* barriers, uint32_t slots, uint32_t freeing) {
  for (uint32_t k = 0; k < slots; ++k) {
    barrier_init(&barriers->loaded[k], 1);
    barrier_init(&barriers->freed[k], freeing);
  }
  for (int i = 0; i < 2; ++i) {
    barrier_init(&barriers->summed[i], kRowRoleThreads);
    barrier_init(&barriers->published[i], kRowPublishers * 32);
    barrier_init(&barriers->ready[i], kRowCollectors * 32);
    barrier_init(&barriers->taken[i], kRowRoleThreads);
  }
  barrier_init_fence();
}

// The roles of a block's warps. Block is given its thread among those of a role that goes through x.
template <typename Block, typename Params, int kTensors>
__device__ __forceinline__ void run_roles(const Params& p, char* memory, const ColumnTables& t, RowBarriers& barriers,
                                          const void* const (&tensors)[kTensors]) {
  if (threadIdx.x == 0) init_barriers(&barriers, p.shares.slots, Block::kFreeing);
  for (uint32_t c = threadIdx.x; c < 2 * p.shares.channels; c += kRowThreads) {
    t.affines[c] = affine_of(p.weight, p.bias, c % p.shares.channels, p.affine_dtype);
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  constexpr int kFirstSummer = 1 + kRowPublishers + kRowCollectors, kRoleWarps = kRowRoleThreads / 32;
  const int role = warp < kFirstSummer ? 0 : warp - kFirstSummer;
  Block block(p, memory, t, barriers, role % kRoleWarps * 32 + threadIdx.x % 32);
  if (warp == 0) {
    if (threadIdx.x == 0) block.produce(tensors);
  } else if (warp <= kRowPublishers) {
    block.tell(threadIdx.x - 32);
  } else if (warp < kFirstSummer) {
    block.collect(threadIdx.x - 32 * (1 + kRowPublishers));
  } else if (role < kRoleWarps) {
    block.find_groups();
    block.sum_up();
  } else {
    block.find_groups();
    block.write();
  }
}

#endif

template <typename Traits>
__global__ void __launch_bounds__(kRowThreads, 1)
    group_norm_rows_fwd_kernel(const __grid_constant__ GroupNormColumnsFwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  __shared__ RowBarriers barriers;
  const ColumnShares& d = p.shares;
  ColumnTables t;
  t.entries = reinterpret_cast<float2*>(memory + d.data_bytes);
  t.stats = t.entries + 2 * d.walkers * d.runs;
  t.affines = t.stats + 2 * d.groups;
  t.counts = reinterpret_cast<float*>(t.affines + 2 * d.channels);
  t.messages = nullptr;
  const void* const tensors[1] = {p.x};
  run_roles<RowFwdBlock<Traits>>(p, memory, t, barriers, tensors);
#endif
}

}  // namespace kgopt
