// GroupNorm backward of channels_last tensors by blocks with roles, see groupnorm/rows/kernel.cuh. The formulas are
// those of groupnorm/passes/backward.cu. Where the activation is slow to differentiate, the summers leave dz in dy's
// place, rounded as dy is, where the chunk stays.
#include <algorithm>

#include "groupnorm/columns/launch.h"
#include "groupnorm/groupnorm.h"
#include "groupnorm/rows/kernel.cuh"
#include "groupnorm/rows/plan.h"
#include "groupnorm/shared/dispatch.cuh"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_rows_bwd_kernel";

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A group's stats are what is taken off: term + (u - mean) term_d.
template <typename Traits>
struct RowBwdBlock : RowBlock<Traits, GroupNormRowsBwdParams> {
  using Rows = RowBlock<Traits, GroupNormRowsBwdParams>;
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = Traits::kPasses;
  static constexpr bool kCoarse = kIsCoarse<T>, kStoresDz = Traits::kStoresDz;
  using Rows::channel_of, Rows::d, Rows::group0, Rows::group_of, Rows::lane, Rows::p, Rows::parity_of, Rows::turn_of,
      Rows::rank;
  using Rows::RowBlock, Rows::s, Rows::samples, Rows::tables, Rows::tid;

  __device__ __forceinline__ uint32_t dy_at() const { return d.tensor_bytes / sizeof(T); }

  // Of a thread's channels.
  struct Channels {
    float mean[kVec], scale[kVec], bias[kVec];
  };
  __device__ __forceinline__ Channels channels_of(uint32_t u) const {
    Channels c;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float2 affine = tables.affines[channel_of(j)];
      const int64_t group = group0(u) + group_of(j);
      c.mean[j] = p.mean[group];
      c.scale[j] = affine.x * p.rstd[group];
      c.bias[j] = affine.y;
    }
    return c;
  }

  // A thread's sums of dz and of dz times the distance from the mean over its vectors of a sample.
  template <bool kShared>
  __device__ __forceinline__ void sum_sample(const Channels& c, RowSlot* slot, uint32_t half, float (&dz)[kVec],
                                             float (&dz_d)[kVec]) const {
    const uint32_t step = this->step();
    this->template for_each_summed<kShared>(
        slot,
        [&](uint32_t t, uint32_t k, uint32_t left) {
#pragma unroll
          for (int i = 0; i < Traits::kSumPasses; ++i) {
            if (i >= left) continue;
            T* const from = this->place(k) + i * step;
            float x[kVec], dy[kVec];
            values_of<Traits::kPre>(load_vec<T, kVec>(from), p.pre_act, x);
            unpack(load_vec<T, kVec>(from + dy_at()), dy);
#pragma unroll
            for (int j = 0; j < kVec; ++j) x[j] -= c.mean[j];
            make_dz<Traits::kAct, kCoarse>(p.act, x, dy, [&](int j) { return make_float2(c.scale[j], c.bias[j]); });
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
              dz[j] += dy[j];
              dz_d[j] += dy[j] * x[j];
            }
            if (kStoresDz && t >= d.rereads + d.held) store_vec<T, kVec>(from + dy_at(), pack<T, kVec>(dy));
          }
          return __float_as_uint(dz_d[0]);
        },
        half);
  }
  __device__ __forceinline__ void sum_up() const {
    RowSlot slot;
    for (uint32_t u = 0; u < samples; ++u) {
      const Channels c = channels_of(u);
      float dz[kVec] = {}, dz_d[kVec] = {};
      sum_sample<false>(c, &slot, 0, dz, dz_d);
      this->write_entries(u, dz, dz_d);
    }
  }
  // The block's only sample, by summers and writers.
  __device__ __forceinline__ void sum_and_write(uint32_t half) const {
    const Channels c = channels_of(0);
    RowSlot slot, again;
    float dz[kVec] = {}, dz_d[kVec] = {};
    sum_sample<true>(c, &slot, half, dz, dz_d);
    this->write_entries_shared(dz, dz_d, half);
    gather<kTeamWords>(kRowCollectThreads + half * kRowWriters + tid);
    barrier_wait(&s.ready[0], 0);
    __syncwarp();
    write_sample<true>(c, 0, &again, half, store_policy(p.streaming_stores), [](const float2(&)[kVec]) {});
  }

  // The block's sums of dz weight and of dz weight xhat of its groups, and of dz and dz xhat of its channels.
  __device__ __forceinline__ void publish() const {
    const auto rstd_of = [&](uint32_t u, uint32_t element) {
      const uint32_t c = d.turns == 1 ? element : element - d.by_channels(element) * d.channels;
      return p.rstd[group0(u) + d.by_channels_per_group(c)];
    };
    const uint32_t elements = d.vectors * kVec, first = min(this->first_element(), elements - 1);
    for (uint32_t u = 0; u < samples; ++u) {
      const float first_rstd = rstd_of(u, first);  // before the wait
      barrier_wait(&s.summed, u & 1);
      __syncwarp();
      this->add_entries([&](uint32_t element, float2 v, bool is_first) {
        v.y *= is_first ? first_rstd : rstd_of(u, element);
        tables.sums[element] = v;
        if (u > 0) {
          v.x += tables.totals[element].x;
          v.y += tables.totals[element].y;
        }
        tables.totals[element] = v;
      });
      this->tell(u, [&](uint32_t g, uint32_t lanes, uint32_t member) {
        float2 sum = make_float2(0.f, 0.f);
        this->for_elements(g, lanes, member, [&](uint32_t element, uint32_t c) {
          const float weight = tables.affines[c].x;
          sum.x += weight * tables.sums[element].x;
          sum.y += weight * tables.sums[element].y;
        });
        __syncwarp();
        sum.x = this->lanes_sum(sum.x, lanes);
        sum.y = this->lanes_sum(sum.y, lanes);
        return pack_signed_word(sum.x, sum.y);
      });
    }
    named_barrier(1, kRowPublishThreads);
    float2* const out = reinterpret_cast<float2*>(p.block_sums) + int64_t(blockIdx.x) * d.channels;
    for (uint32_t c = tid; c < d.channels; c += kRowPublishThreads) {
      float2 v = make_float2(0.f, 0.f);
      for (uint32_t element = c; samples > 0 && element < elements; element += d.channels) {
        v.x += tables.totals[element].x;
        v.y += tables.totals[element].y;
      }
      out[c] = v;
    }
  }

  template <int kWords>
  __device__ __forceinline__ void gather(uint32_t collector) const {
    this->template collect<kWords>(
        collector,
        [](uint32_t, const uint64_t (&word)[kWords + 1]) {
          float2 sum = unpack_signed_word(word[kWords]);
#pragma unroll
          for (int k = 0; k < kWords; ++k) {
            const float2 v = unpack_signed_word(word[k]);
            sum.x += v.x;
            sum.y += v.y;
          }
          return sum;
        },
        [&](uint32_t u, uint32_t g, float2 sum) {
          const float rstd = p.rstd[group0(u) + g], per_element = rstd * reciprocal_of_count(d.total_count);
          this->stats(u)[g] = make_float2(sum.x * per_element, sum.y * per_element * rstd);
        });
  }

  // dx from one vector of x and one of dy, or of dz.
  template <bool kIsDz>
  __device__ __forceinline__ void write_vector(const Channels& c, const float2 (&terms)[kVec], T* to,
                                               const Vec<T, kVec>& from_x, const Vec<T, kVec>& from_dy,
                                               uint64_t policy) const {
    float x[kVec], dy[kVec];
    unpack(from_x, x);
    unpack(from_dy, dy);
    make_dx<Traits::kPre, Traits::kAct, kCoarse, kIsDz>(
        p.pre_act, p.act, x, dy, [&](int j) { return c.mean[j]; },
        [&](int j) { return make_float2(c.scale[j], c.bias[j]); }, [&](int j) { return terms[j]; });
    store_values<T, kVec>(to, x, policy);
  }
  // What registers hold is written between what stayed and what comes again: write_held(terms).
  template <bool kShared, typename WriteHeld>
  __device__ __forceinline__ void write_sample(const Channels& c, uint32_t u, RowSlot* again, uint32_t half,
                                               uint64_t policy, WriteHeld write_held) const {
    const uint32_t step = this->step();
    T* const dx = static_cast<T*>(p.dx);
    float2 terms[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) terms[j] = this->stats(u)[group_of(j)];
    if constexpr (!kShared) barrier_arrive(&s.taken[turn_of(u)]);  // of an only sample nobody asks
    const auto write_slot = [&](int64_t first, uint32_t k, uint32_t left, auto is_dz) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (i >= left) continue;
        const T* const from = this->place(k) + i * step;
        write_vector<decltype(is_dz)::value>(c, terms, dx + first + i * step, load_vec<T, kVec>(from),
                                             load_vec<T, kVec>(from + dy_at()), policy);
      }
    };
    this->template for_each_kept<kShared>(
        u,
        [&](int64_t first, uint32_t k, uint32_t left) { write_slot(first, k, left, std::bool_constant<kStoresDz>()); },
        half);
    write_held(terms);
    this->template for_each_again<kShared>(
        u, again, [&](int64_t first, uint32_t k, uint32_t left) { write_slot(first, k, left, std::false_type()); },
        half);
  }
  __device__ __forceinline__ void write() const {
    const uint32_t step = this->step();
    const uint64_t policy = store_policy(p.streaming_stores);
    RowSlot again;
    Vec<T, kVec> held_x[Rows::kHeldSize][kPasses], held_dy[Rows::kHeldSize][kPasses];
    for (uint32_t u = 0; u < samples; ++u) {
      this->for_each_taken(u, [&](int h, uint32_t k, uint32_t left) {
        const T* const from = this->place(k);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          held_x[h][i] = held_dy[h][i] = Vec<T, kVec>{};  // or what was there before would have to be kept
          if (i >= left) continue;
          held_x[h][i] = load_vec<T, kVec>(from + i * step);
          held_dy[h][i] = load_vec<T, kVec>(from + i * step + dy_at());
        }
        return any_bits(held_x[h]) ^ any_bits(held_dy[h]);
      });
      const Channels c = channels_of(u);
      barrier_wait(&s.ready[turn_of(u)], parity_of(u));
      __syncwarp();
      write_sample<false>(c, u, &again, 0, policy, [&](const float2(&terms)[kVec]) {
        this->for_each_held(u, [&](int64_t first, int h, uint32_t left) {
#pragma unroll
          for (int i = 0; i < kPasses; ++i) {
            if (i < left) {
              write_vector<false>(c, terms, static_cast<T*>(p.dx) + first + i * step, held_x[h][i], held_dy[h][i],
                                  policy);
            }
          }
        });
      });
    }
  }
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    group_norm_rows_bwd_kernel(const __grid_constant__ GroupNormRowsBwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  __shared__ RowBarriers barriers;
  const void* const tensors[2] = {p.x, p.dy};
  run_roles<RowBwdBlock<Traits>>(p, memory, place_tables<Traits>(memory, p.shares), barriers, tensors);
#endif
}

template <typename T, Chain kPre, Chain kAct>
Status launch(NormTraits<T, kPre, kAct>, const GroupNormRowsBwdParams& p, const RowPlan& plan, cudaStream_t stream) {
  constexpr bool kHolds = kPre != Chain::kAny && kAct != Chain::kAny && kAct != Chain::kSilu;
  using Traits = RowTraits<T, kPre, kAct, 2, kHolds>;
  if (p.shares.summers != Traits::kSummers) {
    // A row that is more than the few summers have at a time.
    if constexpr (kHolds) return launch(NormTraits<T, Chain::kAny, Chain::kAny>(), p, plan, stream);
    return Status::Unsupported(kName, "the plan is one of another instance");
  }
  GroupNormRowsBwdParams params = p;
  params.shares.held = std::min<uint32_t>(p.shares.held, Traits::kHeld);
  return launch_columns(kName, group_norm_rows_bwd_kernel<Traits>, Traits::kThreads, params, plan, stream);
}

}  // namespace

Status run_group_norm_rows_bwd(const GroupNormRowsBwdParams& p, const RowPlan& plan, cudaStream_t stream) {
  return dispatch_norm(kName, p, [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
