// Scratch memory of one call: reserve the pieces, allocate once.
#pragma once

#include "common/host/torch_utils.h"

namespace kgopt {

// Pieces of one uninitialized allocation on a tensor's device, each aligned to 256 bytes.
class __attribute__((visibility("hidden"))) Workspace {
 public:
  explicit Workspace(const Tensor& like) : like_(like) {}
  int64_t reserve(int64_t bytes) {
    const int64_t offset = size_;
    size_ += (bytes + 255) / 256 * 256;
    return offset;
  }
  void allocate() {
    if (size_ > 0) buffer_ = empty_like_shape(like_, {size_}, ScalarType::Byte);
  }
  template <typename T>
  T* at(int64_t offset) const {
    return size_ > 0 ? reinterpret_cast<T*>(static_cast<char*>(buffer_->mutable_data_ptr()) + offset) : nullptr;
  }

 private:
  const Tensor& like_;
  int64_t size_ = 0;
  OptTensor buffer_;
};

}  // namespace kgopt
