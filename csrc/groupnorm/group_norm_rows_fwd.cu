// GroupNorm forward of channels_last tensors by blocks with roles, see group_norm_rows_kernel.cuh.
#include "group_norm_columns_launch.h"
#include "group_norm_rows_kernel.cuh"
#include "group_norm_rows_plan.h"
#include "groupnorm.h"

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
  using Rows::active, Rows::channel_of, Rows::count, Rows::d, Rows::group0, Rows::lane, Rows::p, Rows::parity_of;
  using Rows::RowBlock, Rows::s, Rows::samples, Rows::tables, Rows::tid;

  // Sums of what one thread sees of each of its channels, relative to the first value.
  struct Sums {
    float shift[kVec], sum[kVec], squares[kVec];
  };
  __device__ __forceinline__ void add(Sums& sums, const Vec<T, kVec>& input) const {
    float v[kVec];
    values_of<Traits::kPre>(input, p.pre_act, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float e = v[j] - sums.shift[j];
      sums.sum[j] += e;
      sums.squares[j] += e * e;
    }
  }
  __device__ __forceinline__ void sum_up() const {
    tables.counts[tid] = static_cast<float>(count << d.run_log2);
    const uint32_t step = this->step();
    for (uint32_t u = 0; u < samples; ++u) {
      Sums sums{};
      this->for_each_summed(u, [&](uint32_t t, uint32_t k, uint32_t left) {
        const T* const from = this->place(k);
        if (t == 0 && left > 0) values_of<Traits::kPre>(load_vec<T, kVec>(from), p.pre_act, sums.shift);
        Vec<T, kVec> input[kPasses];
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (i < left) input[i] = load_vec<T, kVec>(from + i * step);
        }
        if (left >= kPasses) {
#pragma unroll
          for (int i = 0; i < kPasses; ++i) add(sums, input[i]);
        } else {
#pragma unroll
          for (int i = 0; i < kPasses - 1; ++i) {
            if (i < left) add(sums, input[i]);
          }
        }
      });
      __syncwarp();
      publish(u, sums);
      this->announce(u);
    }
  }

  // The thread's moments of each run of elements, to the block's table.
  __device__ __forceinline__ void write_entries(const Sums& sums) const {
    float mean[kVec], m2[kVec];
    const float n = static_cast<float>(count), inverse = count == 0 ? 0.f : __fdividef(1.f, n);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float to_mean = sums.sum[j] * inverse, rest = sums.squares[j] - sums.sum[j] * to_mean;
      mean[j] = sums.shift[j] + to_mean;
      m2[j] = rest < 0.f ? 0.f : rest;
    }
#pragma unroll
    for (int width = 1; width < kVec; width *= 2) {
      if (width >> d.run_log2) break;
#pragma unroll
      for (int j = 0; j < kVec; j += 2 * width) {
        const float delta = mean[j + width] - mean[j];
        m2[j] += m2[j + width] + delta * delta * (0.5f * width * n);
        mean[j] += 0.5f * delta;
      }
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (j & ((1 << d.run_log2) - 1)) continue;
      tables.entries[(j >> d.run_log2) * kRowThreads + tid] = make_float2(mean[j], m2[j]);
    }
  }
  // The block's moments of each group, told to the team.
  __device__ __forceinline__ void publish(uint32_t u, const Sums& sums) const {
    named_barrier(1, kRowThreads);  // the entries of the sample before have been read
    write_entries(sums);
    named_barrier(1, kRowThreads);
    const uint32_t lanes = 1u << d.block_lanes_log2, member = tid & (lanes - 1);
    const uint32_t mask = (1u << d.vector_runs_log2) - 1;
    const float total = this->count_of(this->rank);
    for (uint32_t first = tid / 32 * 32 >> d.block_lanes_log2; first < d.groups;
         first += kRowThreads >> d.block_lanes_log2) {
      const uint32_t g = first + (lane >> d.block_lanes_log2);
      float origin = 0.f, a = 0.f, b = 0.f;
      if (g < d.groups) {
        const auto entry_at = [&](uint32_t w, uint32_t run) {
          return (run & mask) * kRowThreads + w * d.vectors + (run >> d.vector_runs_log2);
        };
        origin = tables.entries[entry_at(0, g * d.group_runs)].x;
        for (uint32_t turn = 0; turn < d.turns; ++turn) {
          const uint32_t run0 = turn * d.turn_runs + g * d.group_runs;
          uint32_t w = d.by_group_runs(member), i = member - w * d.group_runs;
          while (w < d.walkers) {
            const uint32_t at = entry_at(w, run0 + i);
            const float2 entry = tables.entries[at];
            const float n = tables.counts[w * d.vectors], distance = entry.x - origin, weighted = n * distance;
            if (n != 0.f) {
              a += weighted;
              b += entry.y + weighted * distance;
            }
            w += d.lanes_walkers;
            i += d.lanes_runs;
            if (i >= d.group_runs) {
              i -= d.group_runs;
              ++w;
            }
          }
        }
      }
      __syncwarp();
      a = this->lanes_sum(a, lanes);
      b = this->lanes_sum(b, lanes);
      if (g >= d.groups || member != 0) continue;
      const float to_mean = total == 0.f ? 0.f : __fdividef(a, total), rest = b - a * to_mean;
      const float mean = total == 0.f ? 0.f : origin + to_mean, m2 = total == 0.f || rest < 0.f ? 0.f : rest;
      store_word(p.words + (group0(u) + g) * d.blocks + this->rank, pack_word(mean, m2));
    }
  }

  // Sums over the blocks, relative to the first block's mean.
  struct Merged {
    float x = 0.f, y = 0.f, origin = 0.f;
  };
  __device__ __forceinline__ void gather() const {
    this->collect([] { return Merged(); },
                  [&](Merged& m, uint64_t word, bool there, uint32_t block, bool is_first) {
                    const float2 moments = unpack_word(word);
                    if (is_first) {
                      m.origin = __shfl_sync(0xffffffffu, moments.x, lane & ~((1u << d.team_lanes_log2) - 1));
                    }
                    const float n = there ? this->count_of(block) : 0.f, distance = moments.x - m.origin;
                    if (n == 0.f) return;
                    m.x += n * distance;
                    m.y += moments.y + n * distance * distance;
                  },
                  [&](uint32_t u, uint32_t g, const Merged& m) {
                    const float to_mean = m.x / d.total_count, rest = m.y - m.x * to_mean;
                    const float m2 = rest < 0.f ? 0.f : rest, mean = m.origin + to_mean;
                    const float rstd = 1.f / sqrtf(m2 / d.total_count + p.eps);
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
  __device__ __forceinline__ void normalize(const Coefficients& c, T* to, const Vec<T, kVec>& input) const {
    float v[kVec];
    values_of<Traits::kPre>(input, p.pre_act, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if constexpr (!kFolds) v[j] -= c.mean[j];
      v[j] = v[j] * c.scale[j] + c.shift[j];
    }
    finish_values<Traits::kAct>(to, input, p.act, p.add_input, p.streaming_stores, v);
  }
  __device__ __forceinline__ void write() const {
    const uint32_t step = this->step();
    for (uint32_t u = 0; u < samples; ++u) {
      barrier_wait(&s.ready[u & 1], parity_of(u));
      __syncwarp();
      const Coefficients c = coefficients(u);
      barrier_arrive(&s.taken[u & 1]);
      T* const y = static_cast<T*>(p.y) + this->base(u);
      this->for_each_written(u, [&](int64_t first, uint32_t k, uint32_t left, bool) {
        const T* const from = this->place(k);
        Vec<T, kVec> input[kPasses];
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (i < left) input[i] = load_vec<T, kVec>(from + i * step);
        }
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (i < left) normalize(c, y + first + i * step, input[i]);
        }
      });
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
  const RowShares& d = p.shares;
  RowTables t;
  t.entries = reinterpret_cast<float2*>(memory + d.slots * d.tensor_bytes);
  t.stats = t.entries + (kRowThreads << d.vector_runs_log2);
  t.affines = t.stats + 2 * d.groups;
  t.sums = nullptr;
  t.counts = reinterpret_cast<float*>(t.affines + d.channels);
  const void* const tensors[1] = {p.x};
  run_roles<RowFwdBlock<Traits>>(p, memory, t, barriers, tensors);
#endif
}

template <typename T, Chain kPre, Chain kAct>
Status launch(const GroupNormRowsFwdParams& p, const RowPlan& plan, cudaStream_t stream) {
  using Traits = RowTraits<T, kPre, kAct, 1>;
  return launch_columns(kName, group_norm_rows_fwd_kernel<Traits>, Traits::kThreads, p, plan, stream);
}

}  // namespace

Status run_group_norm_rows_fwd(const GroupNormRowsFwdParams& p, const RowPlan& plan, cudaStream_t stream) {
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
