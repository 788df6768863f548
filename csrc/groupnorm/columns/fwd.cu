// GroupNorm forward of channels_last tensors with x on chip, for GPUs with clusters.
#include "groupnorm/columns/kernel.cuh"
#include "groupnorm/columns/launch.h"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_columns_fwd_kernel";

template <typename T, Chain kPre, Chain kAct>
Status launch(NormTraits<T, kPre, kAct>, const GroupNormColumnsFwdParams& p, const ColumnPlan& plan,
              cudaStream_t stream) {
  const auto launch_as = [&](auto traits) {
    return launch_columns(kName, group_norm_columns_fwd_kernel<decltype(traits)>, plan.threads, p, plan, stream);
  };
  // Calls that walk a chain leave no registers, and a residual and slopes leave none either.
  if constexpr (kAct == Chain::kAny) return launch_as(ColumnTraits<T, kPre, kAct, 0, true>());
  if constexpr (kAct == Chain::kLeakyRelu) {
    if (p.is_extended) return launch_as(ColumnTraits<T, kPre, kAct, 0, true>());
  }
  if constexpr (kAct != Chain::kAny) {
    if (p.shares.held > 0) return launch_as(ColumnTraits<T, kPre, kAct, kColumnHeld>());
    return launch_as(ColumnTraits<T, kPre, kAct, 0>());
  }
}

}  // namespace

Status run_group_norm_columns_fwd(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  return dispatch_norm(kName, p, [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
