// What this binary was built with, and numbers that Python asks it for, as one line of JSON.
#include "common/host/torch_utils.h"
#include "conv3d/choice/few_channels.h"

#ifndef KGOPT_ARCHS
#define KGOPT_ARCHS ""
#endif
#ifndef KGOPT_CUDA_VERSION
#define KGOPT_CUDA_VERSION ""
#endif

namespace kgopt {
namespace {

std::string build_info() {
#if defined(KGOPT_CUDA)
  const char* const cuda = "true";
#else
  const char* const cuda = "false";
#endif
  std::string few_channels;
  for (const auto& row : kFewChannelsTable) {
    few_channels += (few_channels.empty() ? "[" : ", [") + std::to_string(row[0]) + ", " + std::to_string(row[1]) + "]";
  }
  return std::string("{\"cuda\": ") + cuda + ", \"archs\": \"" + KGOPT_ARCHS + "\", \"cuda_version\": \"" +
         KGOPT_CUDA_VERSION + "\", \"torch_target\": \"2.10\", \"few_channels\": [" + few_channels + "]}";
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CompositeExplicitAutograd, m) { m.impl("build_info", TORCH_BOX(&kgopt::build_info)); }
