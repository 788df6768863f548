// GroupNorm backward of channels_last tensors with one read of x and dy: blocks with roles, see
// group_norm_rows_kernel.cuh. The formulas are those of group_norm_backward.cu. Where the activation is slow to
// differentiate, the summers leave dz in dy's place, rounded as dy is.
#include "group_norm_columns_launch.h"
#include "group_norm_rows_kernel.cuh"
#include "groupnorm.h"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_rows_bwd_kernel";

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Whether summers leave dz in place of dy, where computing it twice costs more.
template <Chain kAct>
inline constexpr bool kStoresDz = kAct == Chain::kSilu || kAct == Chain::kAny;

// Of the tables: entries [2][walkers][elements of a row] of sums of dz and of dz (u - mean); stats [2][groups] of what
// is taken off: term + (u - mean) term_d; counts [channels][2] of sums of dz and dz xhat over the block's samples.
template <typename Traits>
struct RowBwdBlock : RowBlock<Traits, GroupNormRowsBwdParams, 2, kStoresDz<Traits::kAct>> {
  using Rows = RowBlock<Traits, GroupNormRowsBwdParams, 2, kStoresDz<Traits::kAct>>;
  using Columns = typename Rows::Columns;
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = Traits::kPasses;
  using Columns::channel_of, Columns::d, Columns::own, Columns::p, Columns::rank, Columns::tables, Columns::team;
  using Rows::parity_of, Rows::RowBlock, Rows::s;

  __device__ __forceinline__ uint32_t row_elements() const { return d.vectors * kVec; }
  __device__ __forceinline__ float2* entries(uint32_t u) const {
    return tables.entries + (u & 1) * d.walkers * row_elements();
  }
  __device__ __forceinline__ uint32_t group_at(int j) const { return this->group_of[j / 4] >> (j % 4 * 8) & 255; }
  __device__ __forceinline__ int64_t group0(uint32_t u) const { return int64_t(this->slab(u)) * d.groups; }

  // Of a thread's channels.
  struct Channels {
    float mean[kVec], scale[kVec], bias[kVec];
  };
  __device__ __forceinline__ Channels channels_of(uint32_t u) const {
    Channels c;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float2 affine = tables.affines[this->active ? channel_of(j) : 0];
      const int64_t group = group0(u) + group_at(j);
      c.mean[j] = p.mean[group];
      c.scale[j] = affine.x * p.rstd[group];
      c.bias[j] = affine.y;
    }
    return c;
  }
  static constexpr bool kCoarse = kIsCoarse<T>;

  __device__ __forceinline__ void sum_up() const {
    const uint32_t slabs = d.slabs_of(team), stride = d.pass_bytes / sizeof(T), half = d.slot_bytes / 2 / sizeof(T);
    RowSlot slot;
    for (uint32_t u = 0; u < slabs; ++u) {
      const Channels c = channels_of(u);
      float dz[kVec] = {}, dz_d[kVec] = {};
      for (uint32_t t = 0; t < d.chunks; ++t, slot.next(d.slots)) {
        barrier_wait(&s.loaded[slot.k], slot.parity);
        __syncwarp();
        const uint32_t left = own > t * kPasses ? own - t * kPasses : 0;
#pragma unroll
        for (int k = 0; k < kPasses; ++k) {
          if (k >= left) continue;
          const T* const from = this->place(slot.k) + k * stride;
          float x[kVec], dy[kVec];
          values_of<Traits::kPre>(load_vec<T, kVec>(from), p.pre_act, x);
          unpack(load_vec<T, kVec>(from + half), dy);
#pragma unroll
          for (int j = 0; j < kVec; ++j) x[j] -= c.mean[j];
          make_dz<Traits::kAct, kCoarse>(p.act, x, dy, [&](int j) { return make_float2(c.scale[j], c.bias[j]); });
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            dz[j] += dy[j];
            dz_d[j] += dy[j] * x[j];
          }
          if constexpr (kStoresDz<Traits::kAct>) store_vec<T, kVec>(const_cast<T*>(from) + half, pack<T, kVec>(dy));
        }
      }
      barrier_wait(&s.published[u & 1], parity_of(u) ^ 1);
      __syncwarp();
      float2* const out = entries(u) + this->walker * row_elements() + this->column * kVec;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float a = this->positions_sum(dz[j]), b = this->positions_sum(dz_d[j]);
        if (this->active && this->position == 0) out[j] = make_float2(a, b);
        __syncwarp();
      }
      barrier_arrive(&s.summed[u & 1]);
    }
  }

  // Lanes next to each other have a group's channels.
  __device__ __forceinline__ void tell(uint32_t thread) const {
    const uint32_t slabs = d.slabs_of(team), elements = row_elements();
    const uint32_t lanes = 1u << d.block_lanes_log2, member = thread & (lanes - 1);
    float2* const totals = reinterpret_cast<float2*>(tables.counts);
    for (uint32_t u = 0; u < slabs; ++u) {
      barrier_wait(&s.summed[u & 1], parity_of(u));
      this->wait_collected(u);
      __syncwarp();
      const float2* const from = entries(u);
      for (uint32_t first = thread / 32 * 32 >> d.block_lanes_log2; first < d.groups;
           first += kRowPublishers * 32 >> d.block_lanes_log2) {
        const uint32_t g = first + (thread % 32 >> d.block_lanes_log2);
        const float rstd = g < d.groups ? p.rstd[group0(u) + g] : 0.f;
        float2 sum = make_float2(0.f, 0.f);
        for (uint32_t k = member; g < d.groups && k < d.channels_per_group; k += lanes) {
          const uint32_t channel = g * d.channels_per_group + k;
          float2 v = make_float2(0.f, 0.f);
          for (uint32_t w = 0; w < d.walkers; ++w) {
            for (uint32_t e = channel; e < elements; e += d.channels) {
              const float2 part = from[w * elements + e];
              v.x += part.x;
              v.y += part.y;
            }
          }
          const float weight = tables.affines[channel].x * rstd;
          sum.x += weight * v.x;
          sum.y += weight * v.y;
          float2 total = u == 0 ? make_float2(0.f, 0.f) : totals[channel];
          total.x += v.x;
          total.y += v.y * rstd;
          totals[channel] = total;
        }
        __syncwarp();
        sum.x = this->lanes_sum(sum.x, lanes);
        sum.y = this->lanes_sum(sum.y, lanes);
        if (g < d.groups && member == 0) {
          store_word(p.words + (group0(u) + g) * d.blocks + rank, pack_signed_word(sum.x, sum.y));
        }
      }
      barrier_arrive(&s.published[u & 1]);
    }
    // The same threads as before, so nobody else's sums.
    float2* const out = reinterpret_cast<float2*>(p.block_sums) + int64_t(blockIdx.x) * d.channels;
    for (uint32_t first = thread / 32 * 32 >> d.block_lanes_log2; first < d.groups;
         first += kRowPublishers * 32 >> d.block_lanes_log2) {
      const uint32_t g = first + (thread % 32 >> d.block_lanes_log2);
      for (uint32_t k = member; g < d.groups && k < d.channels_per_group; k += lanes) {
        const uint32_t channel = g * d.channels_per_group + k;
        out[channel] = slabs == 0 ? make_float2(0.f, 0.f) : totals[channel];
      }
    }
  }

  __device__ __forceinline__ void collect(uint32_t thread) const {
    constexpr int kBatch = 5;  // words under way
    const uint32_t slabs = d.slabs_of(team), lanes = 1u << d.team_lanes_log2, member = thread & (lanes - 1);
    for (uint32_t u = 0; u < slabs; ++u) {
      // Polls before that would only keep the words' lines busy for the others.
      barrier_wait(&s.published[u & 1], parity_of(u));
      barrier_wait(&s.taken[u & 1], parity_of(u) ^ 1);
      __syncwarp();
      for (uint32_t first = thread / 32 * 32 >> d.team_lanes_log2; first < d.groups;
           first += kRowCollectors * 32 >> d.team_lanes_log2) {
        const uint32_t g = first + (thread % 32 >> d.team_lanes_log2);
        float2 sum = make_float2(0.f, 0.f);
        for (uint32_t begin = member; g < d.groups && begin < d.blocks; begin += kBatch * lanes) {
          const uint64_t* const from = p.words + (group0(u) + g) * d.blocks + begin;
          uint64_t word[kBatch];
#pragma unroll
          for (int k = 0; k < kBatch; ++k) word[k] = begin + k * lanes < d.blocks ? load_word(from + k * lanes) : 0;
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            if (begin + k * lanes >= d.blocks) continue;
            const float2 v = unpack_signed_word(word[k] == 0 ? wait_word(from + k * lanes) : word[k]);
            sum.x += v.x;
            sum.y += v.y;
          }
        }
        __syncwarp();
        sum.x = this->lanes_sum(sum.x, lanes);
        sum.y = this->lanes_sum(sum.y, lanes);
        if (g < d.groups && member == 0) {
          const float rstd = p.rstd[group0(u) + g], per_element = 1.f / d.total_count;
          this->stats(u)[g] = make_float2(sum.x * per_element, sum.y * per_element * rstd * rstd);
        }
      }
      barrier_arrive(&s.ready[u & 1]);
    }
  }

  __device__ __forceinline__ void write() const {
    const uint32_t slabs = d.slabs_of(team), stride = d.pass_bytes / sizeof(T), half = d.slot_bytes / 2 / sizeof(T);
    RowSlot slot;
    for (uint32_t u = 0; u < slabs; ++u) {
      const Channels c = channels_of(u);
      barrier_wait(&s.ready[u & 1], parity_of(u));
      __syncwarp();
      float2 terms[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) terms[j] = this->stats(u)[group_at(j)];
      barrier_arrive(&s.taken[u & 1]);
      T* const dx = static_cast<T*>(p.dx) + this->base(u);
      for (uint32_t t = 0; t < d.chunks; ++t, slot.next(d.slots)) {
        barrier_wait(&s.loaded[slot.k], slot.parity);
        __syncwarp();
        const uint32_t left = own > t * kPasses ? own - t * kPasses : 0;
#pragma unroll
        for (int k = 0; k < kPasses; ++k) {
          if (k >= left) continue;
          const T* const from = this->place(slot.k) + k * stride;
          float x[kVec], dy[kVec];
          unpack(load_vec<T, kVec>(from), x);
          unpack(load_vec<T, kVec>(from + half), dy);
          make_dx<Traits::kPre, Traits::kAct, kCoarse, kStoresDz<Traits::kAct>>(
              p.pre_act, p.act, x, dy, [&](int j) { return c.mean[j]; },
              [&](int j) { return make_float2(c.scale[j], c.bias[j]); }, [&](int j) { return terms[j]; });
          store_values<T, kVec>(dx + int64_t(t * kPasses + k) * this->step, x, p.streaming_stores);
        }
        __syncwarp();
        this->free_slot(slot.k);
      }
    }
  }
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(kRowThreads, 1)
    group_norm_rows_bwd_kernel(const __grid_constant__ GroupNormRowsBwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  __shared__ RowBarriers barriers;
  const ColumnShares& d = p.shares;
  ColumnTables t;
  t.entries = reinterpret_cast<float2*>(memory + d.data_bytes);
  t.stats = t.entries + 2 * d.walkers * d.vectors * Traits::kVec;
  t.affines = t.stats + 2 * d.groups;
  t.counts = reinterpret_cast<float*>(t.affines + 2 * d.channels);
  t.messages = nullptr;
  const void* const tensors[2] = {p.x, p.dy};
  run_roles<RowBwdBlock<Traits>>(p, memory, t, barriers, tensors);
#endif
}

template <typename T, Chain kPre, Chain kAct>
Status launch(const GroupNormRowsBwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  return launch_columns(kName, group_norm_rows_bwd_kernel<ColumnTraits<T, kPre, kAct, kRowPasses / 2>>, kRowThreads, p,
                        plan, stream);
}

}  // namespace

Status run_group_norm_rows_bwd(const GroupNormRowsBwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  Status status;
  switch (p.dtype) {
#define KGOPT_ROWS_DTYPE(name, T)                                                                           \
  case Dtype::name:                                                                                         \
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, status = (launch<T, kPre, kAct>(p, plan, stream))); \
    break;
    KGOPT_ROWS_DTYPE(kFloat32, float)
    KGOPT_ROWS_DTYPE(kBFloat16, __nv_bfloat16)
    KGOPT_ROWS_DTYPE(kFloat16, __half)
#undef KGOPT_ROWS_DTYPE
    default: return Status::Unsupported(kName, "float64");
  }
  return status;
}

}  // namespace kgopt
