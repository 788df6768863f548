// KGOPT_AUTOTUNE=1: which path a convolution takes is measured where it first runs, and remembered on disk.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "conv3d/choice/choice.h"

namespace kgopt {

bool autotune_is_on();

// What was measured for the key on this device, in this process or an earlier one.
std::optional<ConvPath> tuned_path(int device, const ConvKey& key);

// The fastest of `paths` for the key: known, or measured now by `run` on the stream. Nothing while the stream is
// captured into a graph, where nothing can be measured, or when no path ran.
std::optional<ConvPath> tune_path(int device, const ConvKey& key, const std::vector<ConvPath>& paths, void* stream,
                                  const std::function<void(ConvPath)>& run);

}  // namespace kgopt
