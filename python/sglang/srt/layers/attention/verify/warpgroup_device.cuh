// What warpgroup.cu asks of a Hopper multiprocessor beside fused_device.cuh, one instruction a function.
#pragma once

#ifndef EMULATED
// Registers that leave room for a block of the merge beside one of the split, if 32 rows need not more.
#define KERNEL_SPLIT extern "C" __global__ __maxnreg__(NT > 3 ? 208 : 168)
#define KERNEL_MERGE extern "C" __global__ __maxnreg__(88)
#define KERNEL_LIST extern "C" __global__ __launch_bounds__(LIST_THREADS)
DEVICE u32 block_row() { return blockIdx.y; }
DEVICE u32 block_columns() { return gridDim.x; }
DEVICE void warpgroup_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
// The same, and whether any of its threads says so. The vote tells the compiler that a warp's threads hold the same, as
// addresses of operands need it: without, it moves each one out of every thread's registers.
DEVICE bool warpgroup_any(bool x) {
  int y;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 q, %1, 0;\nbar.red.or.pred p, 1, 128, q;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(y) : "r"((int)x) : "memory");
  return __any_sync(~0u, y);
}
// What this thread wrote, and saw written, in shared memory: before what the matrix instructions read there from here on.
DEVICE void shared_to_matrix() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void matrix_store_turned2(u32 a, u32 x, u32 y) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
DEVICE void copy16_or_zero(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// This thread's copies since the last call are a part; and it goes on when no more than LEFT parts of its are under way.
DEVICE void part_sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void parts_under_way() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEVICE uint4 global_u32x4(const u32* a) {
  uint4 x;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(a) : "memory");
  return x;
}
DEVICE void global_put_u32x4(u32* a, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(a), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEVICE u32 global_u32(const u32* a) { u32 x; asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x) : "l"(a) : "memory"); return x; }
DEVICE uint2 global_u32x2(const u32* a) {
  uint2 x;
  asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(a) : "memory");
  return x;
}
// Whether a barrier has turned that often, without waiting for it.
DEVICE bool barrier_passed(u32 a, u32 parity) {
  int x;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(x) : "r"(a), "r"(parity) : "memory");
  return x;
}
DEVICE float inverse(float f) { float x; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(f)); return x; }
DEVICE float2 global_f32x2(const float* a) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(a) : "memory");
  return x;
}

// Operands in shared memory. Rows of 128 bytes whose 16-byte pieces are swizzled, eight to a KiB; and plain 8 x 8 matrices of
// 128 bytes, `along` and `across` bytes from one to the next along the summed dimension and across it.
DEVICE u64 swizzled(u32 a) { return (u64)(a >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }
DEVICE u64 matrices(u32 a, u32 along, u32 across) { return (u64)(a >> 4 & 0x3fff) | (u64)(along >> 4) << 16 | (u64)(across >> 4) << 32; }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_sent() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void products_done() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// The compiler knows nothing of it any more.
DEVICE void forget(u32& x) { asm volatile("" : "+r"(x)); }
// Sums of products that are done: what uses them stays behind this.
template <int N>
DEVICE void settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#if HALF
#define WG_TYPE "f16.f16"
#else
#define WG_TYPE "bf16.bf16"
#endif
#if NT == 1
#define WG_SHAPE "m64n8k16"
#define WG_SUMS "{%0,%1,%2,%3}, %4, %5, p, 1, 1, "
#define WG_KEEP "setp.ne.b32 p, %6, 0;\n"
#define WG_OUT(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#elif NT == 2
#define WG_SHAPE "m64n16k16"
#define WG_SUMS "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, "
#define WG_KEEP "setp.ne.b32 p, %10, 0;\n"
#define WG_OUT(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#elif NT == 3
#define WG_SHAPE "m64n24k16"
#define WG_SUMS "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, %12, %13, p, 1, 1, "
#define WG_KEEP "setp.ne.b32 p, %14, 0;\n"
#define WG_OUT(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), \
      "+f"(d[10]), "+f"(d[11])
#else
#define WG_SHAPE "m64n32k16"
#define WG_SUMS "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, "
#define WG_KEEP "setp.ne.b32 p, %18, 0;\n"
#define WG_OUT(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), \
      "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#endif
// d[64, rows] = (keep ? d : 0) + a[64, 16] b[16, rows]. Thread t holds of row 16 (t / 32) + t % 32 / 4 + 8 h and columns
// 8 j + 2 (t % 4) + c the sum d[4 j + 2 h + c]. SUMMED_ACROSS: the summed dimension of `a` goes from row to row in memory.
template <bool SUMMED_ACROSS>
DEVICE void product(float (&d)[4 * NT], u64 a, u64 b, bool keep) {
  if (SUMMED_ACROSS)
    asm volatile("{\n.reg .pred p;\n" WG_KEEP "wgmma.mma_async.sync.aligned." WG_SHAPE ".f32." WG_TYPE " " WG_SUMS "1, 0;\n}"
                 : WG_OUT(d) : "l"(a), "l"(b), "r"((int)keep));
  else
    asm volatile("{\n.reg .pred p;\n" WG_KEEP "wgmma.mma_async.sync.aligned." WG_SHAPE ".f32." WG_TYPE " " WG_SUMS "0, 0;\n}"
                 : WG_OUT(d) : "l"(a), "l"(b), "r"((int)keep));
}
#endif
