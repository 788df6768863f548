// Launchers of the kernels for few channels (sm_90a code only, see DeviceInfo::has_wgmma).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/few_channels/params.h"

namespace kgopt {

// Each by one kernel; run_few_channels_* below take the plan's.

// Statistics, logsumexp over channels, and conv(x) + bias, stored.
Status run_conv_gather_stats(const FewChannelsParams& p, int64_t n, cudaStream_t stream);
Status run_conv_gather_residual_lse(const FewChannelsParams& p, int64_t n, cudaStream_t stream);
Status run_conv_gather_store(const FewChannelsParams& p, int64_t n, cudaStream_t stream);
// Either of the first two, with channels as rows.
Status run_conv_channels(const FewChannelsParams& p, int64_t n, bool lse, cudaStream_t stream);
// The same with positions as rows and the halo in chunks of halves.
Status run_conv_positions(const FewChannelsParams& p, int64_t n, bool lse, cudaStream_t stream);
// Statistics with kernel rows that share a window of gathered chunks.
Status run_conv_window(const FewChannelsParams& p, int64_t n, cudaStream_t stream);

// Per-channel statistics of conv(x) + bias, see FewChannelsStats; nothing else is stored.
inline Status run_few_channels_stats(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if (p.plan.by_positions) return run_conv_positions(p, n, false, stream);
  if (p.plan.by_channels) return run_conv_channels(p, n, false, stream);
  return p.plan.by_window ? run_conv_window(p, n, stream) : run_conv_gather_stats(p, n, stream);
}

// logsumexp over channels of c + hardswish(tanh(GroupNorm(c))), c = conv(x) + bias.
inline Status run_few_channels_residual_lse(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if (p.plan.by_positions) return run_conv_positions(p, n, true, stream);
  return p.plan.by_channels ? run_conv_channels(p, n, true, stream) : run_conv_gather_residual_lse(p, n, stream);
}

}  // namespace kgopt
