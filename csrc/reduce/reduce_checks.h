// Argument checks of the reductions, shared by the CUDA and the CPU files, and the view of a tensor as
// [outer][reduced][inner].
#pragma once

#include <algorithm>

#include "../common/torch_utils.h"

namespace kgopt {

struct ReduceShape {
  std::vector<bool> is_reduced;  // per dim
  IntArray out_sizes;            // of the result, keepdim respected
  IntArray kept_sizes;           // of the result with every reduced dim kept as 1
  int64_t outer = 1, reduced = 1, inner = 1;
  // Physical order of the dims in which the reduced ones are neighbours. The identity where the dense tensor already
  // is [outer][reduced][inner].
  IntArray order;
  MemoryFormat format = MemoryFormat::Contiguous;  // layout that `order` describes
  bool adjacent = true;                            // false: a permuted copy with the reduced dims last is needed
};

inline ReduceShape check_reduce_sizes(const char* op, const char* arg, const IntArray& sizes, const IntArray& dims,
                                      bool keepdim, bool channels_last) {
  const int64_t rank = static_cast<int64_t>(sizes.size());
  ReduceShape s;
  s.is_reduced.assign(rank, dims.empty());
  for (int64_t d : dims) {
    // A scalar has one dim as far as indexing goes, as in torch.
    const int64_t bound = std::max<int64_t>(rank, 1);
    KGOPT_CHECK(d >= -bound && d < bound, op, ": ", arg, " is ", list_string(dims), ", expected values from ", -bound,
                " to ", bound - 1);
    if (rank == 0) continue;
    const int64_t at = d < 0 ? d + rank : d;
    KGOPT_CHECK(!s.is_reduced[at], op, ": ", arg, " is ", list_string(dims), ", expected each dim once");
    s.is_reduced[at] = true;
  }
  for (int64_t d = 0; d < rank; ++d) {
    s.kept_sizes.push_back(s.is_reduced[d] ? 1 : sizes[d]);
    if (!s.is_reduced[d] || keepdim) s.out_sizes.push_back(s.kept_sizes.back());
    s.order.push_back(d);
  }
  if (channels_last && (rank == 4 || rank == 5) && s.is_reduced[1] &&
      std::count(s.is_reduced.begin(), s.is_reduced.end(), true) == 1) {
    // Channels are innermost: a row reduction of the tensor as it lies.
    s.format = channels_last_format(rank);
    s.order = {0};
    for (int64_t d = 2; d < rank; ++d) s.order.push_back(d);
    s.order.push_back(1);
  }
  int phase = 0;  // outer, reduced, inner
  for (int64_t d : s.order) {
    if (sizes[d] == 1) continue;
    if (s.is_reduced[d]) {
      if (phase == 2) s.adjacent = false;
      phase = std::max(phase, 1);
      s.reduced *= sizes[d];
    } else {
      if (phase == 1) phase = 2;
      (phase == 0 ? s.outer : s.inner) *= sizes[d];
    }
  }
  if (!s.adjacent) {
    s.outer *= s.inner;
    s.inner = 1;
    s.order.clear();
    for (int64_t d = 0; d < rank; ++d) {
      if (!s.is_reduced[d]) s.order.push_back(d);
    }
    for (int64_t d = 0; d < rank; ++d) {
      if (s.is_reduced[d]) s.order.push_back(d);
    }
  }
  return s;
}

inline ReduceShape check_reduce(const char* op, const char* arg, const Tensor& x, const IntArray& dims, bool keepdim) {
  check_dtype(op, "x", x);
  return check_reduce_sizes(op, arg, sizes_of(x), dims, keepdim, is_channels_last(x));
}

// x dense as [outer][reduced][inner].
inline Tensor reduce_input(const Tensor& x, const ReduceShape& s) {
  if (s.adjacent) return dense_in(x, s.format);
  return dense_in(call_aten("aten::permute", "", x, s.order), MemoryFormat::Contiguous);
}

// The inverse: a tensor dense as reduce_input gives it, seen with x's dims.
inline Tensor reduce_unpermute(const Tensor& t, const ReduceShape& s) {
  if (s.adjacent) return t;
  IntArray inverse(s.order.size());
  for (size_t i = 0; i < s.order.size(); ++i) inverse[s.order[i]] = static_cast<int64_t>(i);
  return dense_in(call_aten("aten::permute", "", t, inverse), MemoryFormat::Contiguous);
}

// A fresh tensor for the gradient of x, laid out as reduce_input lays x out.
inline Tensor reduce_gradient_buffer(const Tensor& like, const IntArray& sizes, const ReduceShape& s) {
  if (s.adjacent) return empty_like_shape(like, sizes, std::nullopt, s.format);
  IntArray permuted;
  for (int64_t d : s.order) permuted.push_back(sizes[d]);
  return empty_like_shape(like, permuted);
}

inline void check_reduce_gradient(const char* op, const char* arg, const Tensor& t, const Tensor& x,
                                  const ReduceShape& s) {
  check_same_device(op, arg, t, x);
  check_same_dtype(op, arg, t, x);
  KGOPT_CHECK(sizes_of(t) == s.out_sizes, op, ": ", arg, " has shape ", shape_string(t), ", expected ",
              list_string(s.out_sizes));
}

}  // namespace kgopt
