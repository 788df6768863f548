// A block's share of a group (groupnorm/cluster/params.h): where it lies, how it comes into shared memory, and which
// channels it touches.
#pragma once

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/pointwise.cuh"
#include "groupnorm/cluster/params.h"

namespace kgopt {

// Positions are local: element i of the block's shared memory is element `base + i` of the tensor. The block's own are
// begin <= i < end; of these lo <= v < hi are whole vectors, and the rest, its edges, less than a vector at either end.
// hi is 0 where there is no whole vector.
template <typename T>
struct GroupShare {
  static constexpr int kVec = kVecSize<T>;

  int64_t base;
  int begin, end, lo, hi;
  int head, tail;  // the edges are begin <= i < head and tail <= i < end
  uint32_t row0;   // the first channel, counted in the group
  int rows;        // channels
  int position0;   // of element 0 from row0's start; may be negative
  uint32_t s, magic;
  int shift;

  __device__ __forceinline__ GroupShare(const GroupShares& p, int64_t group, uint32_t rank)
      : s(p.s), magic(p.s_magic), shift(p.s_shift + 1) {
    const int64_t start = group * p.elements;
    const int origin = static_cast<int>(p.x_line + static_cast<uint32_t>(start)) & int(128 / sizeof(T) - 1);
    const int first = static_cast<int>(rank * p.share) - origin;
    base = start + first;
    begin = max(0, -first);
    end = max(begin, min(static_cast<int>(p.share), static_cast<int>(p.elements) - first));
    lo = (begin + kVec - 1) / kVec;
    head = min(lo * kVec, end);
    tail = max(end / kVec * kVec, head);
    hi = end / kVec > lo ? end / kVec : 0;
    row0 = quotient_by_s(begin + first);
    rows = end > begin ? static_cast<int>(quotient_by_s(end - 1 + first) - row0) + 1 : 0;
    position0 = first - static_cast<int>(row0 * s);
  }
  __device__ __forceinline__ uint32_t quotient_by_s(int n) const {
    return __umulhi(static_cast<uint32_t>(n) * 2, magic) >> shift;
  }
  // Local channel of element i, and its place in the channel.
  __device__ __forceinline__ uint32_t row_of(int i, uint32_t* column) const {
    const uint32_t row = quotient_by_s(position0 + i);
    *column = static_cast<uint32_t>(position0 + i) - row * s;
    return row;
  }
  // The edges' elements, one a lane of the first eight; -1 for the lanes that have none.
  __device__ __forceinline__ int head_edge(int lane) const { return begin + lane < head ? begin + lane : -1; }
  __device__ __forceinline__ int tail_edge(int lane) const { return tail + lane < end ? tail + lane : -1; }
  // The same by one warp at a time.
  __device__ __forceinline__ int edge(int lane) const { return lane < 16 ? head_edge(lane) : tail_edge(lane - 16); }
};

// What the loads of a share's whole vectors need of all that: those of lo <= v < lo + count.
template <typename T>
struct ShareVectors {
  int64_t base;
  int origin;  // elements from a 128-byte line to the group
  int lo, count;

  __device__ __forceinline__ ShareVectors(const GroupShares& p, int64_t group, uint32_t rank) {
    constexpr int kVec = kVecSize<T>;
    const int64_t start = group * p.elements;
    origin = static_cast<int>(p.x_line + static_cast<uint32_t>(start)) & int(128 / sizeof(T) - 1);
    const int first = static_cast<int>(rank * p.share) - origin;
    base = start + first;
    const int begin = max(0, -first);
    const int end = max(begin, min(static_cast<int>(p.share), static_cast<int>(p.elements) - first));
    lo = (begin + kVec - 1) / kVec;
    count = max(end / kVec - lo, 0);
  }
  __device__ __forceinline__ bool has(int v) const {
    return static_cast<uint32_t>(v - lo) < static_cast<uint32_t>(count);
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// This cluster's place among those of a grid of one dimension.
__device__ __forceinline__ uint32_t cluster_id() {
  uint32_t id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}

struct ShareBarriers {
  uint64_t loaded[kClusterMaxPieces], exchanged;
};

// One thread: barriers, and the loads of all pieces of kTensors tensors, `stride` bytes apart in shared memory.
template <typename T, int kTensors>
__device__ __forceinline__ void start_loads(const GroupShare<T>& share, ShareBarriers* barriers, char* memory,
                                            uint32_t stride, const void* const (&from)[kTensors],
                                            uint32_t exchanged_bytes) {
  const int piece = static_cast<int>(blockDim.x) * kClusterPasses;
  const int pieces = (share.hi + piece - 1) / piece;
  for (int k = 0; k < pieces; ++k) barrier_init(&barriers->loaded[k], 1);
  barrier_init(&barriers->exchanged, 1);
  barrier_init_fence();
  barrier_expect_bytes(&barriers->exchanged, exchanged_bytes);
  const uint64_t policy = evict_first_policy();  // nobody reads these again
  for (int k = 0; k < pieces; ++k) {
    const int first = max(share.lo, k * piece), bytes = (min(share.hi, (k + 1) * piece) - first) * 16;
    if (bytes <= 0) continue;  // a piece of edges alone; nobody waits for it
    barrier_expect_bytes(&barriers->loaded[k], bytes * kTensors);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      bulk_load(memory + t * stride + first * 16, static_cast<const T*>(from[t]) + share.base + first * share.kVec,
                bytes, &barriers->loaded[k], policy);
    }
  }
}

// Every warp of the cluster tells every block sixteen bytes: entry [block][warp] of each block's `entries`. All threads
// call it; what each wrote to its own block's shared memory before is there for all after.
__device__ __forceinline__ void exchange(float4 message, float4* entries, uint64_t* barrier, uint32_t rank,
                                         uint32_t blocks) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blocks == 1) {
    if (lane == 0) entries[warp] = message;
    __syncthreads();
    return;
  }
  __syncthreads();
  if (lane < blocks) cluster_send(message, entries + rank * (blockDim.x / 32) + warp, barrier, lane);
  cluster_barrier_wait(barrier, 0);
}

#endif

}  // namespace kgopt
