// Launchers of small groups. One file for all kernels: they share the functions that walk a chain, whose machine code
// depends on who calls them.
#include "groupnorm/small/bwd_kernel.cuh"
#include "groupnorm/small/fwd_kernel.cuh"
#include "groupnorm/small/launch.cuh"
#include "groupnorm/small/single_bwd_kernel.cuh"

namespace kgopt {
namespace {

template <typename Traits>
Status launch_fwd(const GroupNormSmallFwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  const auto launch = [&](auto block, auto last, auto cluster) {
    using Own = SmallFwdTraits<Traits, decltype(block)::value, decltype(last)::value, decltype(cluster)::value>;
    return launch_small<group_norm_small_fwd_kernel<Own>>("group_norm_small_fwd_kernel", p, plan, stream);
  };
  const std::true_type yes;
  const std::false_type no;
  const bool last = p.shares.channels_last;
  if constexpr (Traits::kElements == 1) {
    if (p.shares.by_lanes.d <= 32) return last ? launch(no, yes, no) : launch(no, no, no);
  }
  if constexpr (Traits::kElements == kSmallMaxElements) {
    if (p.shares.blocks_log2 > 0) return launch(yes, yes, yes);
  }
  return last ? launch(yes, yes, no) : launch(yes, no, no);
}

template <typename Traits>
Status launch_team(Traits, const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream) {
  return launch_small<group_norm_small_bwd_kernel<Traits>>("group_norm_small_bwd_kernel", p, plan, stream);
}

template <int kElements, typename T, Chain kAct>
Status launch_elements(SmallInstance<T, kAct>, const GroupNormSmallBwdParams& p, const SmallPlan& plan,
                       cudaStream_t stream) {
  const auto launch = [&](auto block) {
    using Traits = SingleTraits<T, kElements, kAct, decltype(block)::value>;
    return launch_small<group_norm_small_single_bwd_kernel<Traits>>("group_norm_small_single_bwd_kernel", p, plan,
                                                                    stream);
  };
  // Teams below a block have one element a thread: where they would have more, a block has all samples, so that it adds
  // up channels.
  if constexpr (kElements == 1) {
    if (plan.shares.by_lanes.d <= 32) return launch(std::false_type());
  }
  return launch(std::true_type());
}

}  // namespace

Status run_group_norm_small_fwd(GroupNormSmallFwdParams p, const SmallPlan& plan, cudaStream_t stream) {
  return dispatch_small("group_norm_small_fwd_kernel", p, [&](auto instance) {
    return dispatch_runs(instance, plan, [&](auto traits) { return launch_fwd<decltype(traits)>(p, plan, stream); });
  });
}

Status run_group_norm_small_bwd(GroupNormSmallBwdParams p, const SmallPlan& plan, cudaStream_t stream) {
  if (plan.plane) return run_group_norm_small_plane_bwd(p, plan, stream);
  if (plan.single) return run_group_norm_small_single_bwd(p, plan, stream);
  return dispatch_small("group_norm_small_bwd_kernel", p, [&](auto instance) {
    return dispatch_runs(instance, plan, [&](auto traits) { return launch_team(traits, p, plan, stream); });
  });
}

Status run_group_norm_small_single_bwd(GroupNormSmallBwdParams p, const SmallPlan& plan, cudaStream_t stream) {
  return dispatch_small("group_norm_small_single_bwd_kernel", p, [&](auto instance) {
    return plan.runs == 1   ? launch_elements<1>(instance, p, plan, stream)
           : plan.runs == 4 ? launch_elements<4>(instance, p, plan, stream)
                            : launch_elements<kSmallMaxElements>(instance, p, plan, stream);
  });
}

}  // namespace kgopt
