// Warp-level tensor-core products of sm_80 and later, and the conversions into their operand words.
// All three shapes here read A as 16 rows x 8 words and B as 8 words x 8 columns; a word is one TF32 value or two
// neighbouring half values. Lane l holds, with g = l / 4 and t = l % 4:
//   a0 = A[g][t], a1 = A[g + 8][t], a2 = A[g][t + 4], a3 = A[g + 8][t + 4]; b0 = B[t][g], b1 = B[t + 4][g];
//   c0, c1 = C[g][2t], C[g][2t + 1]; c2, c3 = C[g + 8][2t], C[g + 8][2t + 1].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kgopt {

__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_fp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// C += A B of fp32 operands in two terms of TF32 each, the small products first. The tensor core truncates when it adds
// to its accumulator; summing the steps of K outside rounds.
__device__ __forceinline__ void mma_tf32x3(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&a_rest)[4],
                                           uint32_t b0, uint32_t b1, uint32_t b0_rest, uint32_t b1_rest) {
  float partial[4] = {0.f, 0.f, 0.f, 0.f};
  mma_tf32(partial, a_rest, b0, b1);
  mma_tf32(partial, a, b0_rest, b1_rest);
  mma_tf32(partial, a, b0, b1);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += partial[i];
}

// Round to nearest: the tensor core itself would truncate, which biases every product towards zero.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// The same of what an instruction gave in fp32, whose NaN has the largest number of bits that is positive; with kRelu
// its positive part. One instruction on Hopper, where the conversion takes the time of four: half a step more, of which
// the products cut off what is too much. An infinity stays one.
template <bool kRelu = false>
__device__ __forceinline__ uint32_t round_for_tf32(float x) {
  const int bits = __float_as_int(x);
  return kRelu ? __viaddmax_s32_relu(bits, 0x1000, bits) : __viaddmax_s32(bits, 0x1000, bits);
}

// x = hi + lo up to 2^-22 relative, for the products hi * hi, hi * lo and lo * hi. What is not finite is in lo, and hi
// is about 1 with its sign, so that the infinity comes from one product, or from two of one sign where both factors are
// infinite: with an infinite hi, the rests of the other factor, which are of any sign or zero, would make a NaN of it.
__device__ __forceinline__ void split_tf32(float x, uint32_t* hi, uint32_t* lo) {
  const uint32_t rounded = to_tf32(x);
  *hi = fabsf(x) < 3.0e38f ? rounded : rounded & 0xbfffffffu;
  *lo = to_tf32(x - __uint_as_float(*hi));
}

// The same for statistics of the products, which are NaN wherever an infinity comes in: an infinite x keeps lo = 0, and
// its products with the rests of others are what they are. Where registers are short the other one spills.
__device__ __forceinline__ void split_tf32_for_stats(float x, uint32_t* hi, uint32_t* lo) {
  *hi = to_tf32(x);
  const float rest = x - __uint_as_float(*hi);
  *lo = fabsf(x) < 3.0e38f ? to_tf32(rest) : 0u;
}

// x = hi + lo, in fewer instructions: lo is cut off by the products, whose error is then 2^-21 relative. What is not
// finite is in lo, so that of the products hi * hi, hi * lo and lo * hi one alone meets it, and an infinity stays one.
__device__ __forceinline__ void split_for_tf32(float x, uint32_t* hi, uint32_t* lo) {
  *hi = fabsf(x) < 3.0e38f ? (__float_as_uint(x) + 0x1000u) & 0xffffe000u : 0u;
  *lo = __float_as_uint(x - __uint_as_float(*hi));
}

// Loads from shared memory.
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
// The fragment A of 16 rows of 8 words: lane l names the 16-byte aligned first four words of row l % 16 (l < 16), or
// the last four.
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address));
}
// Four matrices of 8 rows by 16 bytes, transposed: each thread gets two neighbouring rows of one column of each. Lane l
// names row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&v)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(shared_address));
}

// Asynchronous copies into shared memory, 4, 8 or 16 bytes. Writes zeros where `valid` is false, without reading.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* dst, const void* src, bool valid) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(dst))),
      "l"(src), "n"(kBytes), "r"(valid ? kBytes : 0)
      : "memory");
}
// Past the L1 cache, always valid.
__device__ __forceinline__ void cp_async_16(void* dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(dst))),
               "l"(src)
               : "memory");
}
// The same with zeros where `valid` is false, and for streams of which L2 may bring more at once.
__device__ __forceinline__ void cp_async_16_stream(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(dst))),
               "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace kgopt
