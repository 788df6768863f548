// Facts about a GPU, read once per device.
#pragma once

#include "common/status.h"

namespace kgopt {

struct DeviceInfo {
  int compute_capability = 0;  // major * 10 + minor
  int sm_count = 0;
  int smem_per_block = 0;  // bytes, opt-in limit
  int smem_per_sm = 0;     // bytes
  int l2_bytes = 0;
  bool has_code = false;   // this binary has machine code or PTX for it
  bool has_wgmma = false;  // the code chosen for it is that of sm_90a
};

// Fails with CUDA's own error text when the device cannot be queried.
Status device_info(int device, DeviceInfo* info);

}  // namespace kgopt
