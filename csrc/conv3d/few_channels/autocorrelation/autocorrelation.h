// Launcher of statistics from the input's autocorrelation (sm_90a code only, see DeviceInfo::has_wgmma).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/few_channels/autocorrelation/params.h"

namespace kgopt {

// What p.stats.finish asks for and sample_mean, for every sample, and which samples are not exact enough.
Status run_conv_autocorrelation(const AutocorrelationParams& p, int64_t n, cudaStream_t stream);

}  // namespace kgopt
