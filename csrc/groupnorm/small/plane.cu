// GroupNorm backward of small contiguous groups of one channel, which start and end anywhere; see
// groupnorm/small/params.h. One weight and one bias serve all of a group, so that nothing but x needs a place for each
// element, and x comes by vectors.
#include <type_traits>

#include "common/device/dependent_launch.cuh"
#include "common/device/floor.cuh"
#include "common/host/launch.h"
#include "groupnorm/small/small.cuh"

namespace kgopt {
namespace {

// Where a lane's elements are, counted from the vector that the plane starts in: vectors lane + r * lanes, of which
// lo <= v < hi are whole, and at most one single element of those that are in no whole vector.
template <typename T, int kRuns>
struct PlaneLane {
  static constexpr int kRun = kSmallRun;

  uint32_t base;  // of the plane's first vector
  uint32_t lane, lanes, lo, hi, single;
  bool has_single;

  __device__ __forceinline__ PlaneLane(uint32_t start, uint32_t elements, uint32_t lane, uint32_t lanes)
      : lane(lane), lanes(lanes) {
    const uint32_t before = start % kRun, end = elements > 0 ? before + elements : 0;
    base = start - before;
    lo = before > 0 ? 1 : 0;
    hi = end / kRun;
    const uint32_t head = min(lo * kRun, end), tail = max(hi * kRun, head);
    single = lane < kRun ? before + lane : tail + lane - kRun;
    has_single = lane < kRun ? single < head : single < end && lane < 2 * kRun;
  }
  __device__ __forceinline__ bool has(int r) const { return lane + r * lanes >= lo && lane + r * lanes < hi; }
  __device__ __forceinline__ uint32_t at(int r) const { return base + (lane + r * lanes) * kRun; }
  __device__ __forceinline__ void load(const void* from, Vec<T, kRun> (&v)[kRuns], T* one) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      v[r] = load_run_in_order<T>(static_cast<const T*>(from) + at(r), has(r));
    }
    *one = load_in_order<T>(from, base + single, has_single);
  }
  __device__ __forceinline__ void store(void* to, const float (&v)[kRuns][kRun], float one) const {
    T* const y = static_cast<T*>(to);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if (has(r)) store_vec(y + at(r), pack<T, kRun>(v[r]));
    }
    if (has_single) y[base + single] = from_acc<T>(one);
  }
};

// A parameter as bits, of fp32 or of T.
template <typename T>
struct PlaneParameter {
  uint32_t word = 0, half = 0;

  __device__ __forceinline__ void load(const void* values, uint32_t channel, bool wide, bool wanted) {
    word = load_bits<float>(values, channel, wanted && (wide || sizeof(T) == 4));
    if (sizeof(T) < 4) half = load_bits<T>(values, channel, wanted && !wide);
  }
  __device__ __forceinline__ float value(bool wide) const {
    if (wide || sizeof(T) == 4) return __uint_as_float(word);
    const uint16_t bits = static_cast<uint16_t>(half);
    return static_cast<float>(to_acc(*reinterpret_cast<const T*>(&bits)));
  }
};

template <typename T_, int kRuns_, Chain kAct_, bool kBlock_>
struct PlaneTraits {
  using T = T_;
  static constexpr int kRuns = kRuns_;
  static constexpr Chain kAct = kAct_;
  static constexpr bool kBlock = kBlock_;  // a block has a plane; else a warp has
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kRuns >= 4 ? kSmallMaxBwdThreads : kSmallMaxThreads)
    group_norm_small_plane_bwd_kernel(const __grid_constant__ GroupNormSmallBwdParams p) {
  using T = typename Traits::T;
  constexpr int kRuns = Traits::kRuns, kRun = kSmallRun, kElements = kRuns * kRun + 1;
  constexpr bool kBlock = Traits::kBlock;
  __shared__ float2 shared[kSmallMaxWarps], planes[kSmallMaxWarps];
  let_dependents_start();
  const SmallShares& s = p.shares;
  const uint32_t tid = threadIdx.x, lanes = kBlock ? s.by_lanes.d : 32, team = kBlock ? s.by_lanes(tid) : tid / 32;
  const uint32_t unit = s.owner ? team * s.by_groups.d + blockIdx.x : blockIdx.x * s.teams + team;
  const bool active = team < s.teams && unit < s.units, wide = p.affine_dtype == Dtype::kFloat32;
  const bool weighted = p.weight != nullptr, biased = p.bias != nullptr && !p.act.empty();
  const uint32_t channel = s.owner ? blockIdx.x : unit - s.by_groups(unit) * s.by_groups.d;
  PlaneParameter<T> weight, bias;
  const float mean = load_in_order<float>(p.mean, unit, active), rstd = load_in_order<float>(p.rstd, unit, active);
  weight.load(p.weight, channel, wide, weighted && active);
  bias.load(p.bias, channel, wide, biased && active);
  const PlaneLane<T, kRuns> t(unit * s.elements, active ? s.elements : 0, tid - team * lanes, lanes);
  Vec<T, kRun> raw_x[kRuns], raw_dy[kRuns];
  T one_x, one_dy;
  t.load(p.x, raw_x, &one_x);
  t.load(p.dy, raw_dy, &one_dy);
  const float w = weighted ? weight.value(wide) : 1.f, b = biased ? bias.value(wide) : 0.f;
  float xhat[kElements], dz[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    xhat[k] = (to_acc(k < kElements - 1 ? raw_x[k / kRun].v[k % kRun] : one_x) - mean) * rstd;
    dz[k] = to_acc(k < kElements - 1 ? raw_dy[k / kRun].v[k % kRun] : one_dy);
  }
  float z[kElements];
#pragma unroll
  for (int k = 0; k < kElements; ++k) z[k] = xhat[k] * w + b;
  multiply_slopes<Traits::kAct, false>(floored(p.act), z, dz);
  float terms[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const bool has = k < kElements - 1 ? t.has(k / kRun) : t.has_single;
    terms[0] += has ? dz[k] : 0.f;
    terms[1] += has ? dz[k] * xhat[k] : 0.f;
  }
  lanes_sum(32, terms);
  if (kBlock) {
    const uint32_t warps = lanes / 32;
    if (tid % 32 == 0) shared[tid / 32] = make_float2(terms[0], terms[1]);
    __syncthreads();
    const float2 other =
        tid % 32 < warps ? shared[min(team * warps + tid % 32, uint32_t(kSmallMaxWarps - 1))] : make_float2(0.f, 0.f);
    terms[0] = other.x;
    terms[1] = other.y;
    lanes_sum(32, terms);
  }
  if (active && t.lane == 0) {
    if (s.owner) {
      planes[team] = make_float2(terms[0], terms[1]);
    } else {
      reinterpret_cast<float2*>(p.channel_sums)[unit] = make_float2(terms[0], terms[1]);
    }
  }
  // Divided, as in group_norm_small_bwd_kernel.
  const float elements = static_cast<float>(s.elements), dz_term = w * terms[0] / elements,
              xhat_term = w * terms[1] / elements;
  float dx[kRuns][kRun];
#pragma unroll
  for (int k = 0; k < kElements - 1; ++k) {
    dx[k / kRun][k % kRun] = rstd * (w * dz[k] - (dz_term + xhat[k] * xhat_term));
  }
  t.store(p.dx, dx, rstd * (w * dz[kElements - 1] - (dz_term + xhat[kElements - 1] * xhat_term)));
  if (!s.owner) return;
  __syncthreads();
  if (tid >= 32) return;
  float sums[2] = {tid < s.teams ? planes[tid].x : 0.f, tid < s.teams ? planes[tid].y : 0.f};
  lanes_sum(32, sums);
  if (tid == 0) {
    store_gradient<T>(p.dbias, channel, p.gradient_dtype, sums[0]);
    store_gradient<T>(p.dweight, channel, p.gradient_dtype, sums[1]);
  }
}

constexpr const char* kName = "group_norm_small_plane_bwd_kernel";

template <typename T, int kRuns, Chain kAct>
Status dispatch_teams(const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  const LaunchShape shape{dim3(plan.grid), plan.threads, 0};
  const auto launch = [&](auto block) {
    constexpr auto kKernel = group_norm_small_plane_bwd_kernel<PlaneTraits<T, kRuns, kAct, decltype(block)::value>>;
    return launch_with(kKernel, facts_of<kKernel>(), kName, shape, stream, p);
  };
  return p.shares.by_lanes.d == 32 ? launch(std::false_type()) : launch(std::true_type());
}
template <typename T, Chain kAct>
Status dispatch_runs(const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  switch (plan.runs) {
    case 1: return dispatch_teams<T, 1, kAct>(p, plan, stream);
    case 2: return dispatch_teams<T, 2, kAct>(p, plan, stream);
    case 4: return dispatch_teams<T, 4, kAct>(p, plan, stream);
    default: return Status::Unsupported(kName, "over four vectors a thread");
  }
}
template <typename T>
Status dispatch_act(const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  switch (chain_kind(p.act)) {
    case Chain::kNone:
    case Chain::kRelu: return dispatch_runs<T, Chain::kRelu>(p, plan, stream);
    default: return dispatch_runs<T, Chain::kSilu>(p, plan, stream);
  }
}

}  // namespace

Status run_group_norm_small_plane_bwd(const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  switch (p.dtype) {
    case Dtype::kFloat32: return dispatch_act<float>(p, plan, stream);
    case Dtype::kBFloat16: return dispatch_act<__nv_bfloat16>(p, plan, stream);
    default: return dispatch_act<__half>(p, plan, stream);
  }
}

}  // namespace kgopt
