// Launch of a kernel over slabs: of clusters, or of blocks that all run at a time.
#pragma once

#include "groupnorm/columns/plan.h"
#include "groupnorm/shared/launch.h"

namespace kgopt {

template <typename Params, typename Plan>
Status launch_columns(const char* name, void (*kernel)(Params), int threads, const Params& p, const Plan& plan,
                      cudaStream_t stream) {
  NormLaunch launch;
  launch.grid = p.shares.teams * p.shares.blocks;
  launch.threads = threads;
  launch.smem_bytes = plan.smem_bytes;
  launch.smem_limit = plan.smem_limit;
  launch.cluster = plan.cluster ? p.shares.blocks : 0;
  if (p.words && p.shares.cleared == 0) {
    launch.words = p.words;
    launch.word_count = plan.words;
  }
  return launch_norm(name, kernel, p, launch, stream);
}

}  // namespace kgopt
