// What fused.cu asks of the machine, one instruction a function. Tests put a model of a device in its place (EMULATED).
#pragma once

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ __launch_bounds__(THREADS, 1)
#define SHARED_BASE() \
  extern __shared__ __align__(1024) unsigned char shared_memory[]; \
  const u32 sm = (u32)__cvta_generic_to_shared(shared_memory)

DEVICE void barrier_init(u32 a, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(a), "r"(n) : "memory"); }
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 a) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(a) : "memory"); }
DEVICE void barrier_wait(u32 a, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(a),
      "r"(parity)
      : "memory");
}
DEVICE void copy16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The barrier gets this thread's arrival once all copies it has started have landed.
DEVICE void barrier_arrive_after_copies(u32 a) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(a) : "memory"); }
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE u32 block_id() { return blockIdx.x; }
// (m, l) of the rows, from the consumers to the producers; weights of the merge, back.
DEVICE void result_ready() { asm volatile("bar.arrive 2, 384;" ::: "memory"); }
DEVICE void await_result() { asm volatile("bar.sync 2, 384;" ::: "memory"); }
DEVICE void weights_ready() { asm volatile("bar.arrive 3, 384;" ::: "memory"); }
DEVICE void await_weights() { asm volatile("bar.sync 3, 384;" ::: "memory"); }
DEVICE void producers_sync() { asm volatile("bar.sync 4, 128;" ::: "memory"); }
DEVICE void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
DEVICE void matrix_load(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEVICE void matrix_load_turned(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF || FP8
#define PRODUCT_TYPE "f16.f16"
#else
#define PRODUCT_TYPE "bf16.bf16"
#endif
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PRODUCT_TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two values of the products' type in one register, the first in the lower half.
DEVICE u32 pack(float lower, float upper) {
  u32 x;
#if HALF || FP8
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(upper), "f"(lower));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(upper), "f"(lower));
#endif
  return x;
}
DEVICE float unpack(u32 x, int upper) {
#if HALF || FP8
  float f;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(f) : "r"(upper ? x >> 16 : x));
  return f;
#else
  return __uint_as_float(upper ? x & 0xffff0000u : x << 16);
#endif
}
#if FP8
// Two e4m3 values in the lower half of x; exact in fp16.
DEVICE u32 widen(u32 x) {
  u32 y;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(y) : "r"(x));
  return y;
}
// Bytes 0, 2, 1, 3 of x.
DEVICE u32 swap_middle(u32 x) { return __byte_perm(x, 0, 0x3120); }
#endif
// One value of the queries' type, from a register that holds two.
DEVICE float query_value(u32 x, int upper) {
#if HALF
  float f;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(f) : "r"(upper ? x >> 16 : x));
  return f;
#else
  return __uint_as_float(upper ? x & 0xffff0000u : x << 16);
#endif
}
// Output elements have the queries' type, which differs from the products' for an fp8 cache.
DEVICE u16 to_output(float f) {
  u16 x;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(f));
#endif
  return x;
}
DEVICE u32 pack_output(float lower, float upper) {
  return to_output(lower) | (u32)to_output(upper) << 16;
}
DEVICE float exp2_of(float f) { float x; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(f)); return x; }
DEVICE float log2_of(float f) { float x; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(f)); return x; }
DEVICE float shared_f32(u32 a) { float x; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(a) : "memory"); return x; }
DEVICE float2 shared_f32x2(u32 a) { float2 x; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(a) : "memory"); return x; }
DEVICE float4 shared_f32x4(u32 a) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(a) : "memory");
  return x;
}
DEVICE uint2 shared_u32x2(u32 a) { uint2 x; asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(a) : "memory"); return x; }
DEVICE uint4 shared_u32x4(u32 a) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(a) : "memory");
  return x;
}
DEVICE void shared_put_f32(u32 a, float f) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(f) : "memory"); }
DEVICE void shared_put_u32(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DEVICE void shared_put_f32x2(u32 a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory"); }
DEVICE void shared_put_u32x2(u32 a, u32 x, u32 y) { asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(a), "r"(x), "r"(y) : "memory"); }
DEVICE void shared_put_zero(u32 a) { asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(a), "r"(0) : "memory"); }
DEVICE void shared_put_f32x4(u32 a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
DEVICE u32 bits_of(float f) { return __float_as_uint(f); }
DEVICE u32 shared_u32(u32 a) { u32 x; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(a) : "memory"); return x; }
DEVICE void matrix_store_turned(u32 a, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
// Words that other blocks write and read during this launch.
DEVICE uint4 packet_get(const u32* a) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(a) : "memory");
  return x;
}
DEVICE void packet_put(u32* a, uint4 x) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(a), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEVICE u32 word_get(const u32* a) { u32 x; asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(a) : "memory"); return x; }
DEVICE void word_put(u32* a, u32 x) { asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(a), "r"(x) : "memory"); }
#ifdef TRACE
DEVICE i64 clock_now() { i64 x; asm volatile("mov.u64 %0, %clock64;" : "=l"(x)::"memory"); return x; }
DEVICE i64 timer_now() { i64 x; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x)::"memory"); return x; }
DEVICE i64 multiprocessor() { u32 x; asm("mov.u32 %0, %smid;" : "=r"(x)); return x; }
#endif
DEVICE void give_up() { asm volatile("trap;"); }
#endif
