// GroupNorm forward of channels_last tensors by blocks with roles, see groupnorm/rows/kernel.cuh.
#include "groupnorm/columns/launch.h"
#include "groupnorm/groupnorm.h"
#include "groupnorm/rows/kernel.cuh"
#include "groupnorm/rows/plan.h"
#include "groupnorm/shared/dispatch.cuh"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_rows_fwd_kernel";

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <typename Traits>
struct RowFwdBlock : RowBlock<Traits, GroupNormRowsFwdParams> {
  using Rows = RowBlock<Traits, GroupNormRowsFwdParams>;
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = Traits::kPasses;
  static constexpr bool kFolds = Traits::kFolds;
  using Rows::active, Rows::channel_of, Rows::d, Rows::group0, Rows::lane, Rows::p, Rows::parity_of, Rows::turn_of;
  using Rows::RowBlock, Rows::s, Rows::samples, Rows::tables, Rows::tid;

  // Of what one thread sees of each of its channels, relative to the same pivot as the block's other threads: the
  // median of the channel's values in three rows, so that no single one that is far from the others makes sums cancel.
  struct Sums {
    float pivot[kVec], sum[kVec], squares[kVec];
  };
  __device__ __forceinline__ void read_row(const T* row, float (&v)[kVec]) const {
    Vec<T, kVec> first;
    if (d.turns == 1) {
      first = load_vec<T, kVec>(row + this->column * kVec);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) first.v[j] = row[channel_of(j)];
    }
    values_of<Traits::kPre>(first, p.pre_act, v);
  }
  // From the share's first rows, in the slot of its first chunk.
  __device__ __forceinline__ void set_pivots(Sums& sums, const T* rows) const {
    float a[kVec], b[kVec], c[kVec];
    const uint32_t last = this->own - 1, length = d.vectors * kVec;
    read_row(rows, a);
    read_row(rows + min(1u, last) * length, b);
    read_row(rows + min(2u, last) * length, c);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums.pivot[j] = median(a[j], b[j], c[j]);
  }
  __device__ __forceinline__ void add(Sums& sums, const Vec<T, kVec>& input) const {
    float v[kVec];
    values_of<Traits::kPre>(input, p.pre_act, v);
    add_relative(v, sums.pivot, sums.sum, sums.squares);
  }
  __device__ __forceinline__ void sum_up() const {
    const uint32_t step = this->step();
    RowSlot slot;
    for (uint32_t u = 0; u < samples; ++u) {
      Sums sums{};
      this->for_each_summed(&slot, [&](uint32_t t, uint32_t k, uint32_t left) {
        const T* const from = this->place(k);
        if (t == 0 && left > 0) set_pivots(sums, from - tid * kVec);
        constexpr int kBatch = 4;
#pragma unroll 1
        for (uint32_t i0 = 0; i0 < left; i0 += kBatch) {
          Vec<T, kVec> input[kBatch];
          if (i0 + kBatch <= left) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) input[i] = load_vec<T, kVec>(from + (i0 + i) * step);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) add(sums, input[i]);
          } else {
#pragma unroll
            for (int i = 0; i < kBatch - 1; ++i) {
              if (i0 + i < left) input[i] = load_vec<T, kVec>(from + (i0 + i) * step);
            }
#pragma unroll
            for (int i = 0; i < kBatch - 1; ++i) {
              if (i0 + i < left) add(sums, input[i]);
            }
          }
        }
        return __float_as_uint(sums.sum[0]);
      });
      this->write_entries(u, sums.pivot, sums.sum, sums.squares);
    }
  }
  // Everybody's sums, and the pivots from those who have the first row.
  __device__ __forceinline__ void write_entries(uint32_t u, const float (&pivot)[kVec], const float (&sum)[kVec],
                                                const float (&squares)[kVec]) const {
    __syncwarp();
    if (u > 0) barrier_wait(&s.drained, (u & 1) ^ 1);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (active && this->walker == 0 && this->column * kVec + j < d.channels) tables.pivots[channel_of(j)] = pivot[j];
    }
    Rows::write_entries(u, sum, squares);
  }

  // The moments of the block's groups, from those of the row's elements.
  __device__ __forceinline__ void publish() const {
    const float count = this->count_of(this->rank), rows = static_cast<float>(this->own);  // of a group, of an element
    for (uint32_t u = 0; u < samples; ++u) {
      barrier_wait(&s.summed, u & 1);
      __syncwarp();
      this->add_entries([&](uint32_t element, float2 v, bool) {
        const uint32_t c = d.turns == 1 ? element : element - d.by_channels(element) * d.channels;
        const float to_mean = count == 0.f ? 0.f : __fdividef(v.x, rows), rest = v.y - v.x * to_mean;
        tables.sums[element] = make_float2(tables.pivots[c] + to_mean, rest < 0.f ? 0.f : rest);
      });
      this->tell(u, [&](uint32_t g, uint32_t lanes, uint32_t member) {
        const float origin = g < d.groups ? tables.sums[g * d.channels_per_group].x : 0.f;
        float a = 0.f, b = 0.f;
        this->for_elements(g, lanes, member, [&](uint32_t element, uint32_t) {
          const float2 moments = tables.sums[element];
          const float distance = moments.x - origin, weighted = rows * distance;
          a += weighted;
          b += moments.y + weighted * distance;
        });
        __syncwarp();
        a = this->lanes_sum(a, lanes);
        b = this->lanes_sum(b, lanes);
        if (count == 0.f) return pack_word(0.f, 0.f);
        const float to_mean = __fdividef(a, count), rest = b - a * to_mean;
        return pack_word(origin + to_mean, rest < 0.f ? 0.f : rest);
      });
    }
  }

  // Sums over the blocks, relative to the first block's mean.
  template <int kWords>
  __device__ __forceinline__ void gather(uint32_t collector) const {
    const bool has_rest = d.rest_count > 0 && (collector & ((1u << d.team_lanes_log2) - 1)) == 0;
    float origin = 0.f;
    this->template collect<kWords>(
        collector,
        [&](uint32_t count, const uint64_t (&word)[kWords + 1]) {
          return sum_moments<kWords>(word, count, has_rest, 1u << d.team_lanes_log2, d.full_count, d.rest_count,
                                     &origin);
        },
        [&](uint32_t u, uint32_t g, float2 sums) {
          const float to_mean = quotient(sums.x, d.total_count), rest = sums.y - sums.x * to_mean;
          const float m2 = rest < 0.f ? 0.f : rest, mean = origin + to_mean;
          const float rstd = reciprocal_root(quotient(m2, d.total_count) + p.eps);
          this->stats(u)[g] = make_float2(mean, rstd);
          if (this->rank == 0) {
            p.mean[group0(u) + g] = mean;
            p.rstd[group0(u) + g] = rstd;
          }
        });
  }

  struct Coefficients {
    float mean[kFolds ? 1 : kVec], scale[kVec], shift[kVec];
  };
  __device__ __forceinline__ Coefficients coefficients(uint32_t u) const {
    Coefficients c;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float2 moments = this->stats(u)[this->group_of(j)], affine = tables.affines[channel_of(j)];
      c.scale[j] = affine.x * moments.y;
      c.shift[j] = kFolds ? affine.y - moments.x * c.scale[j] : affine.y;
      if constexpr (!kFolds) c.mean[j] = moments.x;
    }
    return c;
  }
  template <bool kAddInput>
  __device__ __forceinline__ void normalize(const Coefficients& c, T* to, const Vec<T, kVec>& input,
                                            uint64_t policy) const {
    float v[kVec];
    values_of<Traits::kPre>(input, p.pre_act, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if constexpr (!kFolds) v[j] -= c.mean[j];
      v[j] = v[j] * c.scale[j] + c.shift[j];
    }
    finish_chain<Traits::kAct, T>(floored(p.act), v);
    if constexpr (kAddInput) {
      float x[kVec];
      unpack(input, x);
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[j] += x[j];
    }
    store_values<T, kVec>(to, v, policy);
  }
  __device__ __forceinline__ void write() const {
    if (p.add_input) {
      write_all<true>();
    } else {
      write_all<false>();
    }
  }
  template <bool kAddInput>
  __device__ __forceinline__ void write_all() const {
    const uint32_t step = this->step();
    const uint64_t policy = store_policy(p.streaming_stores);
    RowSlot again;
    Vec<T, kVec> held[Rows::kHeldSize][kPasses];
    const auto load = [&](uint32_t k, uint32_t left, Vec<T, kVec>(&input)[kPasses]) {
      const T* const from = this->place(k);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        input[i] = Vec<T, kVec>{};  // or what was there before would have to be kept
        if (i < left) input[i] = load_vec<T, kVec>(from + i * step);
      }
    };
    for (uint32_t u = 0; u < samples; ++u) {
      this->for_each_taken(u, [&](int h, uint32_t k, uint32_t left) {
        load(k, left, held[h]);
        return any_bits(held[h]);
      });
      barrier_wait(&s.ready[turn_of(u)], parity_of(u));
      __syncwarp();
      const Coefficients c = coefficients(u);
      barrier_arrive(&s.taken[turn_of(u)]);
      T* const y = static_cast<T*>(p.y);
      const auto write = [&](int64_t first, uint32_t left, const Vec<T, kVec>(&input)[kPasses]) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (i < left) normalize<kAddInput>(c, y + first + i * step, input[i], policy);
        }
      };
      const auto write_slot = [&](int64_t first, uint32_t k, uint32_t left) {
        Vec<T, kVec> input[kPasses];
        load(k, left, input);
        write(first, left, input);
      };
      this->for_each_kept(u, write_slot);
      this->for_each_held(u, [&](int64_t first, int h, uint32_t left) { write(first, left, held[h]); });
      this->for_each_again(u, &again, write_slot);
    }
  }
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    group_norm_rows_fwd_kernel(const __grid_constant__ GroupNormRowsFwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  __shared__ RowBarriers barriers;
  const void* const tensors[1] = {p.x};
  run_roles<RowFwdBlock<Traits>>(p, memory, place_tables<Traits>(memory, p.shares), barriers, tensors);
#endif
}

template <typename T, Chain kPre, Chain kAct>
Status launch(NormTraits<T, kPre, kAct>, const GroupNormRowsFwdParams& p, const RowPlan& plan, cudaStream_t stream) {
  if constexpr (kAct == Chain::kAny) {
    return Status::Unsupported(kName, "the plan refuses chains that are walked");
  } else {
    if (p.shares.summers == kRowFewSummers) {
      using Traits = RowTraits<T, kPre, kAct, 1, true>;
      return launch_columns(kName, group_norm_rows_fwd_kernel<Traits>, Traits::kThreads, p, plan, stream);
    }
    using Traits = RowTraits<T, kPre, kAct, 1, false>;
    return launch_columns(kName, group_norm_rows_fwd_kernel<Traits>, Traits::kThreads, p, plan, stream);
  }
}

}  // namespace

Status run_group_norm_rows_fwd(const GroupNormRowsFwdParams& p, const RowPlan& plan, cudaStream_t stream) {
  return dispatch_norm(kName, p, [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
