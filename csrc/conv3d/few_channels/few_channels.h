// Launchers of the Hopper kernel for narrow convolutions (sm_90a code only, see DeviceInfo::has_wgmma).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/few_channels/params.h"

namespace kgopt {

// Per-channel statistics of conv(x) + bias, see NarrowStats; nothing else is stored.
Status run_conv_narrow_stats(const NarrowParams& p, int64_t n, cudaStream_t stream);

// logsumexp over channels of c + hardswish(tanh(GroupNorm(c))), c = conv(x) + bias.
Status run_conv_narrow_residual_lse(const NarrowParams& p, int64_t n, cudaStream_t stream);

// conv(x) + bias, stored contiguously.
Status run_conv_narrow_store(const NarrowParams& p, int64_t n, cudaStream_t stream);

// Either of the first two where the plan says that channels are rows; the launchers above hand over to it.
Status run_conv_narrow_channels(const NarrowParams& p, int64_t n, bool lse, cudaStream_t stream);

// The same where positions are rows and the halo lies in chunks of halves.
Status run_conv_narrow_positions(const NarrowParams& p, int64_t n, bool lse, cudaStream_t stream);

// Statistics where the plan says that the halo is gathered.
Status run_conv_narrow_window(const NarrowParams& p, int64_t n, cudaStream_t stream);

}  // namespace kgopt
