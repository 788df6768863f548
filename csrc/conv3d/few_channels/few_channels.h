// Launchers of the kernels for few channels (sm_90a code only, see DeviceInfo::has_wgmma).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/few_channels/params.h"

namespace kgopt {

// Per-channel statistics of conv(x) + bias, see FewChannelsStats; nothing else is stored.
Status run_conv_few_channels_stats(const FewChannelsParams& p, int64_t n, cudaStream_t stream);

// logsumexp over channels of c + hardswish(tanh(GroupNorm(c))), c = conv(x) + bias.
Status run_conv_few_channels_residual_lse(const FewChannelsParams& p, int64_t n, cudaStream_t stream);

// conv(x) + bias, stored contiguously.
Status run_conv_few_channels_store(const FewChannelsParams& p, int64_t n, cudaStream_t stream);

// Either of the first two where the plan says that channels are rows; the launchers above hand over to it.
Status run_conv_channels(const FewChannelsParams& p, int64_t n, bool lse, cudaStream_t stream);

// The same where positions are rows and the halo lies in chunks of halves.
Status run_conv_positions(const FewChannelsParams& p, int64_t n, bool lse, cudaStream_t stream);

// Statistics where the plan says that kernel rows share a window of gathered chunks.
Status run_conv_window(const FewChannelsParams& p, int64_t n, cudaStream_t stream);

}  // namespace kgopt
