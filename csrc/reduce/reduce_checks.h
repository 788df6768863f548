// Argument checks of the reductions, shared by the CUDA and the CPU files, and the view of a tensor as
// [outer][reduced][inner].
#pragma once

#include <algorithm>
#include <array>

#include "common/host/torch_utils.h"

namespace kgopt {

struct ReduceShape {
  std::vector<bool> is_reduced;  // per dim
  IntArray out_sizes;            // of the result, keepdim respected
  IntArray kept_sizes;           // of the result with every reduced dim kept as 1
  int64_t outer = 1, reduced = 1, inner = 1;
  // With two groups of reduced dims: [outer][repeats][kept][reduced][inner].
  int64_t repeats = 1, kept = 1;
  // Physical order of the dims in which the reduced ones are neighbours. The identity where the dense tensor already
  // is [outer][reduced][inner].
  IntArray order;
  MemoryFormat format = MemoryFormat::Contiguous;  // layout that `order` describes
  bool adjacent = true;                            // false: a permuted copy with the reduced dims last is needed

  int64_t reduced_count() const { return repeats * reduced; }
};

// max_groups: how many groups of neighbouring reduced dims the caller can walk without a permuted copy, 1 or 2.
inline ReduceShape check_reduce_sizes(const char* op, const char* arg, const IntArray& sizes, const IntArray& dims,
                                      bool keepdim, bool channels_last, int max_groups = 1) {
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
  const auto first_spatial = s.is_reduced.begin() + std::min<int64_t>(rank, 2);
  if (channels_last && (rank == 4 || rank == 5) &&
      (s.is_reduced[1] || std::count(first_spatial, s.is_reduced.end(), true) == rank - 2)) {
    // Channels are innermost, and what is kept has the order of the result: reduced as it lies.
    s.format = channels_last_format(rank);
    s.order = {0};
    for (int64_t d = 2; d < rank; ++d) s.order.push_back(d);
    s.order.push_back(1);
  }
  std::array<int64_t, 5> sections{1, 1, 1, 1, 1};  // kept, reduced, kept, reduced, kept
  int64_t section = 0, kept = 1, reduced = 1;
  for (int64_t d : s.order) {
    (s.is_reduced[d] ? reduced : kept) *= sizes[d];
    if (sizes[d] == 1) continue;
    if ((section % 2 == 1) != s.is_reduced[d]) ++section;
    if (section < 5) sections[section] *= sizes[d];
  }
  const int64_t groups = (section + 1) / 2;
  s.adjacent = groups <= max_groups;
  if (groups <= 1) {
    s.outer = sections[0];
    s.reduced = sections[1];
    s.inner = sections[2];
  } else if (s.adjacent) {
    s.outer = sections[0];
    s.repeats = sections[1];
    s.kept = sections[2];
    s.reduced = sections[3];
    s.inner = sections[4];
  }
  if (!s.adjacent) {
    s.outer = kept;
    s.reduced = reduced;
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

inline ReduceShape check_reduce(const char* op, const char* arg, const Tensor& x, const IntArray& dims, bool keepdim,
                                int max_groups = 1) {
  check_dtype(op, "x", x);
  return check_reduce_sizes(op, arg, sizes_of(x), dims, keepdim, is_channels_last(x), max_groups);
}

// Of scaled_softmax: the dtype of its result.
inline Dtype check_softmax(const char* op, const Tensor& x, ScalarType dtype) {
  KGOPT_CHECK(x.dim() > 0, op, ": x is a scalar, expected at least 1 dimension");
  const Dtype own = check_dtype(op, "x", x);
  if (dtype == x.scalar_type()) return own;
  KGOPT_CHECK(own == Dtype::kFloat32 && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16), op, ": dtype is ",
              scalar_type_name(dtype), ", expected that of x, ", scalar_type_name(x.scalar_type()),
              own == Dtype::kFloat32 ? ", bfloat16 or float16" : "");
  return dtype == ScalarType::Half ? Dtype::kFloat16 : Dtype::kBFloat16;
}

// x dense as the sections of s.
inline Tensor reduce_input(const Tensor& x, const ReduceShape& s) {
  if (s.adjacent) return dense_in(x, s.format);
  return dense_in(call_aten("aten::permute", "", x, s.order), MemoryFormat::Contiguous);
}

// The inverse: a tensor dense as reduce_input gives it, seen with x's dims.
inline Tensor reduce_unpermute(const Tensor& t, const ReduceShape& s) {
  if (s.adjacent) return t;
  IntArray inverse(s.order.size());
  for (size_t i = 0; i < s.order.size(); ++i) inverse[s.order[i]] = static_cast<int64_t>(i);
  return dense_in(call_aten("aten::permute", "", t, inverse), s.format);
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

// The gradient of a mean over `dims` of a tensor of these sizes.
inline ReduceShape check_mean_gradient(const char* op, const Tensor& dy, const IntArray& sizes, const IntArray& dims,
                                       bool keepdim, int max_groups = 1) {
  const ReduceShape s = check_reduce_sizes(op, "dims", sizes, dims, keepdim, false, max_groups);
  KGOPT_CHECK(sizes_of(dy) == s.out_sizes, op, ": dy has shape ", shape_string(dy), ", expected ",
              list_string(s.out_sizes));
  return s;
}

}  // namespace kgopt
