// Where a call's statistics are, and the passes that compute them: for the files of the GroupNorm ops on CUDA.
#pragma once

#include "groupnorm/api/group_norm_api.h"

namespace kgopt {

// Where a call's statistics go. Tensors where somebody is given them; else they lie in the workspace, for an allocation
// takes the host a third of a launch.
struct __attribute__((visibility("hidden"))) Statistics {
  Tensor mean, rstd, channel_mean;
  void* mean_data = nullptr;
  void* rstd_data = nullptr;
  void* channel_mean_data = nullptr;
};

// A place for statistics that are not given away, in a workspace that is allocated between the two steps.
struct StatisticsSpace {
  int64_t mean, rstd, channel_mean;

  StatisticsSpace(Workspace* workspace, const GroupNormDims& d, bool with_channel_mean)
      : mean(workspace->reserve(d.n * d.g * acc_size(d))),
        rstd(workspace->reserve(d.n * d.g * acc_size(d))),
        channel_mean(with_channel_mean ? workspace->reserve(d.n * d.c * acc_size(d)) : 0) {}
  void set(const Workspace& workspace, bool with_channel_mean, Statistics* stats) const {
    stats->mean_data = workspace.at<void>(mean);
    stats->rstd_data = workspace.at<void>(rstd);
    if (with_channel_mean) stats->channel_mean_data = workspace.at<void>(channel_mean);
  }
};

Statistics allocate_statistics(const Tensor& x, const GroupNormDims& d, bool with_channel_mean);
// Nothing to reduce: PyTorch's statistics of an empty group are NaN.
Statistics empty_statistics(const Tensor& x, const GroupNormDims& d, bool with_channel_mean);

// Partial statistics of x, merged. With a table in the workspace the merge also fills it for a normalize pass; `shift`,
// [C], is what x would have had added to every channel.
void compute_statistics(const char* op, const Tensor& x, const GroupNormDims& d, const ActChain& pre_act, double eps,
                        const OptTensor& weight, const OptTensor& bias, bool with_table, bool with_channel_mean,
                        Statistics* stats, Workspace* workspace, void** table, const OptTensor& shift = std::nullopt);

}  // namespace kgopt
