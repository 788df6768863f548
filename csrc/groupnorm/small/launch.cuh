// From a plan and the activations to the instance of a kernel, and its launch.
#pragma once

#include <type_traits>

#include "common/device/floor.cuh"
#include "common/host/launch.h"
#include "groupnorm/small/small.cuh"

namespace kgopt {

template <auto kKernel, typename Params>
Status launch_small(const char* name, const Params& p, const SmallPlan& plan, cudaStream_t stream) {
  const LaunchShape shape{dim3(plan.grid), plan.threads, plan.smem_bytes, false, 1 << p.shares.blocks_log2};
  return launch_with(kKernel, facts_of<kKernel>(), name, shape, stream, p);
}

// A kernel's element, and the chain behind the norm: kAny looks both chains up at run time.
template <typename T_, Chain kAct_>
struct SmallInstance {
  using T = T_;
  static constexpr Chain kAct = kAct_;
};

// launch(SmallInstance()) with p's dtype and chains, whose kinds it writes into p.
template <typename Params, typename Launch>
Status dispatch_small(const char* kernel, Params& p, Launch launch) {
  constexpr bool kForward = std::is_base_of_v<GroupNormFwdArgs, Params>;
  p.shares.pre_kind = chain_kind(p.pre_act);
  p.shares.act_kind = chain_kind(p.act);
  const auto with_type = [&](auto zero) {
    using T = decltype(zero);
    bool any = p.shares.pre_kind != Chain::kNone;
    if constexpr (kForward) any = any || p.is_extended;
    if (any) return launch(SmallInstance<T, Chain::kAny>());
    switch (p.shares.act_kind) {
      case Chain::kNone:
      case Chain::kRelu: return launch(SmallInstance<T, Chain::kRelu>());
      case Chain::kSilu: return launch(SmallInstance<T, Chain::kSilu>());
      default: return launch(SmallInstance<T, Chain::kAny>());
    }
  };
  switch (p.dtype) {
    case Dtype::kFloat32: return with_type(float());
    case Dtype::kBFloat16: return with_type(__nv_bfloat16());
    case Dtype::kFloat16: return with_type(__half());
    default: return Status::Unsupported(kernel, "float64");
  }
}

// launch(SmallTraits()) with the plan's elements of a thread.
template <typename T, Chain kAct, typename Launch>
Status dispatch_runs(SmallInstance<T, kAct>, const SmallPlan& plan, Launch launch) {
  if constexpr (kAct != Chain::kAny) {
    if (plan.run == kSmallRun && plan.runs == 1) return launch(SmallTraits<T, kSmallRun, 1, kAct>());
    if (plan.run == kSmallRun) return launch(SmallTraits<T, kSmallRun, 2, kAct>());
  }
  return plan.runs == 1   ? launch(SmallTraits<T, 1, 1, kAct>())
         : plan.runs == 4 ? launch(SmallTraits<T, 1, 4, kAct>())
                          : launch(SmallTraits<T, 1, 8, kAct>());
}

}  // namespace kgopt
