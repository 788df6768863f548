// Hopper's warpgroup products with A in registers or in shared memory and B in shared memory: D[64 x N] += A[64 x 8
// words] B[8 words x N], a word being one TF32 value or two neighbouring half values.
//
// Warp w of the four holds rows 16 w ... 16 w + 15 of A and D, in the fragment order of mma.cuh:
//   a0 = A[g][t], a1 = A[g + 8][t], a2 = A[g][t + 4], a3 = A[g + 8][t + 4];
//   d[4 j], d[4 j + 1] = D[g][8 j + 2 t], D[g][8 j + 2 t + 1]; d[4 j + 2], d[4 j + 3] the same of row g + 8.
// B lies without swizzle in blocks of 8 columns x 4 words (128 bytes, a column's 4 words together): for each 8 columns
// the block of words 0 to 3, then that of words 4 to 7.
// PTX ISA: asynchronous warpgroup level matrix instructions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kgopt {

enum class WgmmaType { kTf32, kBf16, kFp16 };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The low word of B's descriptor, which says how many bytes after words 0-3 words 4-7 begin. Adding bytes / 16 moves
// it.
__device__ __forceinline__ uint32_t wgmma_b_descriptor(uint32_t shared_address, uint32_t to_next_words = 128) {
  return (shared_address & 0x3FFFF) >> 4 | to_next_words >> 4 << 16;
}

// Makes what this thread wrote to shared memory visible to products that a later barrier allows.
__device__ __forceinline__ void wgmma_fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product and whenever other instructions wrote A or D.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of D across a wait.
template <int kCount>
__device__ __forceinline__ void wgmma_use(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_use(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define KGOPT_D4(i) "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define KGOPT_D8(i) KGOPT_D4(i), KGOPT_D4((i) + 4)
#define KGOPT_D16(i) KGOPT_D8(i), KGOPT_D8((i) + 8)
#define KGOPT_D32(i) KGOPT_D16(i), KGOPT_D16((i) + 16)
#define KGOPT_S8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define KGOPT_S12 KGOPT_S8 ",%8,%9,%10,%11"
#define KGOPT_S16 KGOPT_S12 ",%12,%13,%14,%15"
#define KGOPT_S32 KGOPT_S16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KGOPT_S36 KGOPT_S32 ",%32,%33,%34,%35"
#define KGOPT_S48 KGOPT_S36 ",%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define KGOPT_S64                                                                                                 \
  KGOPT_S32                                                                                                       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"

// N columns: `list` and `outputs` name D, `a_list`, `b` and `add_flag` the operands after it; `scale` says: A and B as
// they are and, for half types, B as it lies.
#define KGOPT_WGMMA_SHAPE(n, k, types, scale, list, a_list, b, add_flag, outputs)                                 \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " add_flag                                                         \
               ", 0; "                                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n k types " {" list "}, {" a_list "}, " b ", p, " scale "; }" \
               : outputs                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(int(add)))

#define KGOPT_WGMMA_TYPE(k, types, scale)                                                             \
  if constexpr (kN == 24) {                                                                           \
    KGOPT_WGMMA_SHAPE(24, k, types, scale, KGOPT_S12, "%12,%13,%14,%15", "%16", "%17",                \
                      KGOPT_D8(0) KGOPT_COMMA KGOPT_D4(8));                                           \
  } else if constexpr (kN == 32) {                                                                    \
    KGOPT_WGMMA_SHAPE(32, k, types, scale, KGOPT_S16, "%16,%17,%18,%19", "%20", "%21", KGOPT_D16(0)); \
  } else if constexpr (kN == 64) {                                                                    \
    KGOPT_WGMMA_SHAPE(64, k, types, scale, KGOPT_S32, "%32,%33,%34,%35", "%36", "%37", KGOPT_D32(0)); \
  } else if constexpr (kN == 72) {                                                                    \
    KGOPT_WGMMA_SHAPE(72, k, types, scale, KGOPT_S36, "%36,%37,%38,%39", "%40", "%41",                \
                      KGOPT_D32(0) KGOPT_COMMA KGOPT_D4(32));                                         \
  } else if constexpr (kN == 96) {                                                                    \
    KGOPT_WGMMA_SHAPE(96, k, types, scale, KGOPT_S48, "%48,%49,%50,%51", "%52", "%53",                \
                      KGOPT_D32(0) KGOPT_COMMA KGOPT_D16(32));                                        \
  } else {                                                                                            \
    static_assert(kN == 128);                                                                         \
    KGOPT_WGMMA_SHAPE(128, k, types, scale, KGOPT_S64, "%64,%65,%66,%67", "%68", "%69",               \
                      KGOPT_D32(0) KGOPT_COMMA KGOPT_D32(32));                                        \
  }
#define KGOPT_COMMA ,

// D = A B, or D += A B where `add`. Asynchronous: A and D may be touched after wgmma_commit and wgmma_wait only.
// kTo8Columns: bytes from 8 columns of B to the next.
template <WgmmaType kType, int kN, int kTo8Columns = 256>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b, bool add) {
  const uint64_t b_descriptor = uint64_t(b) | uint64_t(kTo8Columns >> 4) << 32;  // no swizzle
  if constexpr (kType == WgmmaType::kTf32) {
    KGOPT_WGMMA_TYPE("k8", ".f32.tf32.tf32", "1, 1")
  } else if constexpr (kType == WgmmaType::kBf16) {
    KGOPT_WGMMA_TYPE("k16", ".f32.bf16.bf16", "1, 1, 0")
  } else {
    KGOPT_WGMMA_TYPE("k16", ".f32.f16.f16", "1, 1, 0")
  }
}

// The same with sums in fp16, two columns of D a register: d[2 j] of row g, d[2 j + 1] of row g + 8.
__device__ __forceinline__ void wgmma_half_sums(uint32_t (&d)[16], const uint32_t (&a)[4], uint32_t b, bool add) {
  const uint64_t b_descriptor = uint64_t(b) | uint64_t(256 >> 4) << 32;  // no swizzle
#define KGOPT_H4(i) "+r"(d[(i)]), "+r"(d[(i) + 1]), "+r"(d[(i) + 2]), "+r"(d[(i) + 3])
  KGOPT_WGMMA_SHAPE(64, "k16", ".f16.f16.f16", "1, 1, 0", KGOPT_S16, "%16,%17,%18,%19", "%20", "%21",
                    KGOPT_H4(0) KGOPT_COMMA KGOPT_H4(4) KGOPT_COMMA KGOPT_H4(8) KGOPT_COMMA KGOPT_H4(12));
#undef KGOPT_H4
}

// --- Both operands in shared memory, rows of A and columns of B in rows of kRowBytes (32, 64 or 128) under the swizzle
// of that width, as the tensor copies lay them: the 16-byte pieces of row r sit at piece ^ (r * kRowBytes / 128 % 8)
// within the width. The pattern is one of addresses, so A may begin at any row of a region that is aligned to 1024.

// Adding bytes / 16 moves it, to a later step of K (32 bytes) or to another row.
template <int kRowBytes>
__device__ __forceinline__ uint64_t wgmma_swizzled_descriptor(uint32_t shared_address) {
  constexpr uint64_t kLayout = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return (shared_address & 0x3FFFF) >> 4 | uint64_t(1) << 16 | uint64_t(kRowBytes * 8 >> 4) << 32 | kLayout << 62;
}

#define KGOPT_S80 KGOPT_S64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define KGOPT_S92 KGOPT_S80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91"
#define KGOPT_S96 KGOPT_S80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define KGOPT_S104 KGOPT_S96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define KGOPT_S128                                                                                                   \
  KGOPT_S96                                                                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118," \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define KGOPT_D64(i) KGOPT_D32(i), KGOPT_D32((i) + 32)
#define KGOPT_WGMMA_SHARED_SHAPE(n, k, types, scale, list, a, b, add_flag, outputs)                        \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " add_flag                                                  \
               ", 0; "                                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n k types " {" list "}, " a ", " b ", p, " scale "; }" \
               : outputs                                                                                   \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(int(add)))
#define KGOPT_WGMMA_SHARED_TYPE(k, types, scale)                                                  \
  if constexpr (kN == 64) {                                                                       \
    KGOPT_WGMMA_SHARED_SHAPE(64, k, types, scale, KGOPT_S32, "%32", "%33", "%34", KGOPT_D32(0));  \
  } else if constexpr (kN == 96) {                                                                \
    KGOPT_WGMMA_SHARED_SHAPE(96, k, types, scale, KGOPT_S48, "%48", "%49", "%50",                 \
                             KGOPT_D32(0) KGOPT_COMMA KGOPT_D16(32));                             \
  } else if constexpr (kN == 128) {                                                               \
    KGOPT_WGMMA_SHARED_SHAPE(128, k, types, scale, KGOPT_S64, "%64", "%65", "%66", KGOPT_D64(0)); \
  } else if constexpr (kN == 160) {                                                               \
    KGOPT_WGMMA_SHARED_SHAPE(160, k, types, scale, KGOPT_S80, "%80", "%81", "%82",                \
                             KGOPT_D64(0) KGOPT_COMMA KGOPT_D16(64));                             \
  } else if constexpr (kN == 184) {                                                               \
    KGOPT_WGMMA_SHARED_SHAPE(184, k, types, scale, KGOPT_S92, "%92", "%93", "%94",                \
                             KGOPT_D64(0) KGOPT_COMMA KGOPT_D16(64) KGOPT_COMMA KGOPT_D8(80)      \
                                 KGOPT_COMMA KGOPT_D4(88));                                       \
  } else if constexpr (kN == 208) {                                                               \
    KGOPT_WGMMA_SHARED_SHAPE(208, k, types, scale, KGOPT_S104, "%104", "%105", "%106",            \
                             KGOPT_D64(0) KGOPT_COMMA KGOPT_D32(64) KGOPT_COMMA KGOPT_D8(96));    \
  } else if constexpr (kN == 256) {                                                               \
    KGOPT_WGMMA_SHARED_SHAPE(256, k, types, scale, KGOPT_S128, "%128", "%129", "%130",            \
                             KGOPT_D64(0) KGOPT_COMMA KGOPT_D64(64));                             \
  } else {                                                                                        \
    static_assert(kN == 192);                                                                     \
    KGOPT_WGMMA_SHARED_SHAPE(192, k, types, scale, KGOPT_S96, "%96", "%97", "%98",                \
                             KGOPT_D64(0) KGOPT_COMMA KGOPT_D32(64));                             \
  }

template <WgmmaType kType, int kN>
__device__ __forceinline__ void wgmma_shared(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor,
                                             bool add) {
  if constexpr (kType == WgmmaType::kTf32) {
    KGOPT_WGMMA_SHARED_TYPE("k8", ".f32.tf32.tf32", "1, 1")
  } else if constexpr (kType == WgmmaType::kBf16) {
    KGOPT_WGMMA_SHARED_TYPE("k16", ".f32.bf16.bf16", "1, 1, 0, 0")
  } else {
    KGOPT_WGMMA_SHARED_TYPE("k16", ".f32.f16.f16", "1, 1, 0, 0")
  }
}

#endif

}  // namespace kgopt
